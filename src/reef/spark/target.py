"""Where a write goes: the namespace and what of the DataFrame's columns it takes.

Everything that can be known before the first row is checked here, on the driver: the namespace,
the columns' names and types, the key. A namespace that is not there is made from the DataFrame's
columns, if its key is named. The job makes it, since a job begins in its namespace's log, and
takes it back if the write fails.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import types as st

from reef.engine.database import Database
from reef.engine.rows import EXPIRES_AT
from reef.errors import InvalidInputError, Kind, NotFoundError
from reef.formats.schema import Schema
from reef.manifest.head import locate
from reef.paths import Namespace
from reef.spark.rows import OP, RowsPlan
from reef.spark.schema import arrow_schema

__all__ = ["Target", "arrow_columns", "find_target"]


@dataclass(frozen=True, slots=True)
class Target:
    """A namespace that takes the rows of a DataFrame."""

    namespace: Namespace
    schema: Schema
    rows: RowsPlan
    given: pa.Schema
    make: Schema | None = None
    """What the namespace is made with; None if it is there."""

    def rows_under(self, schema: Schema) -> RowsPlan:
        """Return what becomes of the rows in a job that has begun with this schema.

        The namespace may have grown since it was looked at, or be another one, and a segment is
        what its job's schema says it is. InvalidInputError if the rows do not fit any more.
        """
        if schema.fingerprint == self.schema.fingerprint:
            return self.rows
        _check_key(self.namespace, schema, self.schema.key.name)
        order = None if self.rows.order is None else self.rows.order.name
        return RowsPlan.of(self.given, schema, self.rows.op, order)


def find_target(
    db: Database,
    namespace: Namespace,
    columns: st.StructType,
    *,
    op: str = "put",
    order_column: str | None = None,
    key: str | None = None,
    vectors: Mapping[str, int] | None = None,
) -> Target:
    """Return where the rows go; InvalidInputError or NotFoundError if they cannot."""
    given = arrow_columns(columns, vectors or {})
    try:
        schema = locate(db.store, namespace.name).found.manifest.schema
        make = None
    except NotFoundError as error:
        if key is None:
            hints = (
                error.hint,
                "Name the key column (option key) and it is made from the DataFrame",
            )
            raise NotFoundError(
                error.message, kind=error.kind, hint=". ".join(filter(None, hints)), **error.context
            ) from error
        schema = make = Schema.of(_own_columns(given, order_column), key)
    if key is not None:
        _check_key(namespace, schema, key)
    return Target(namespace, schema, RowsPlan.of(given, schema, op, order_column), given, make)


def _check_key(namespace: Namespace, schema: Schema, key: str) -> None:
    if key != schema.key.name:
        raise InvalidInputError(
            f"the key column of {namespace.name} is {schema.key.name!r}, not {key!r}",
            kind=Kind.INVALID_OPTION,
        )


def arrow_columns(columns: st.StructType, vectors: Mapping[str, int]) -> pa.Schema:
    """Return a DataFrame's columns as Arrow; InvalidInputError names what Reef cannot hold."""
    names = columns.names
    for name in vectors:
        if name not in names:
            raise InvalidInputError(
                f"the vector column {name!r} is not there", kind=Kind.INVALID_OPTION, column=name
            )
    fields = []
    for field in columns:
        if names.count(field.name) > 1:
            raise InvalidInputError(f"column {field.name} is there twice", column=field.name)
        fields.append(_arrow_field(field, vectors.get(field.name)))
    return pa.schema(fields)


def _arrow_field(field: st.StructField, size: int | None) -> pa.Field:
    if isinstance(field.dataType, st.NullType) and size is None:
        return pa.field(field.name, pa.null())  # NULL without a type fits every column
    try:
        found = arrow_schema(st.StructType([field])).field(0).type
    except KeyError:
        raise InvalidInputError(
            f"column {field.name}: Reef has no {field.dataType.simpleString()}",
            hint="Turn it into text (to_json), or take its parts apart",
            column=field.name,
        ) from None
    if size is None:
        return pa.field(field.name, found)
    if not pa.types.is_list(found) or not pa.types.is_floating(found.value_type):
        raise InvalidInputError(
            f"column {field.name}: a vector is an array of float or double, "
            f"got {field.dataType.simpleString()}",
            column=field.name,
        )
    return pa.field(field.name, pa.list_(found.value_type, size))


def _own_columns(given: pa.Schema, order_column: str | None) -> pa.Schema:
    """Return the columns that a new namespace gets: all but those that only say something.

    Other names with _ in front are refused by its schema.
    """
    saying = {OP, EXPIRES_AT}
    if order_column is not None and order_column.startswith("_"):
        saying.add(order_column)
    return pa.schema([field for field in given if field.name not in saying])
