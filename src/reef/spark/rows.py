"""Rows of a DataFrame, as a bulk job stages them: checked, and each with what it does.

    op = "put" | "patch" | "delete"     for all rows, or by row in a column `_op`
    _expires_at                         when a row expires, as in an upsert

A put replaces the row, so columns that the DataFrame lacks are null. A patch touches all columns
that the DataFrame has. A delete needs the key only. Values are converted only where nothing is
lost, by the rules of an upsert; what does not fit is told with its column, and nothing is
written.

An order column decides between rows of one key. It may be a column of the namespace or one that
is there for this purpose only; either way it travels with the rows, under a number of its own,
until each key has come down to one row.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from reef.engine.rows import EXPIRES_AT, to_ops
from reef.engine.rows.arrow import kind_of, may_fit
from reef.engine.rows.fit import fit_column, fit_keys
from reef.engine.rows.out import unknown_column
from reef.errors import InvalidInputError, Kind
from reef.formats.batch import OpKind, Ops
from reef.formats.schema import Field, Schema, normal_type, type_name
from reef.formats.versions import Versions, concat_versions
from reef.jobs.ingest import staged_rows

__all__ = ["OP", "OPS", "RowsPlan"]

OP = "_op"
OPS = {"put": OpKind.PUT, "patch": OpKind.PATCH, "delete": OpKind.DELETE}


@dataclass(frozen=True, slots=True)
class RowsPlan:
    """What the columns of a DataFrame mean. Picklable: made on the driver, used by tasks."""

    schema: Schema
    op: str = "put"
    """What rows do, where no column says so."""
    order: Field | None = None
    """What decides between rows of one key, under a number that no column has."""

    @classmethod
    def of(cls, given: pa.Schema, schema: Schema, op: str, order_column: str | None) -> "RowsPlan":
        """Return the plan for a DataFrame; InvalidInputError names what does not fit."""
        if op not in OPS:
            raise InvalidInputError(
                f"there is no operation {op!r}, only {', '.join(OPS)}", kind=Kind.INVALID_OPTION
            )
        plan = cls(schema, op, _order_field(given, schema, order_column))
        plan._check(given)
        return plan

    @property
    def ordered(self) -> Schema:
        """The schema of what `versions` returns: with the order column, if there is one."""
        if self.order is None:
            return self.schema
        return Schema(self.schema.id, self.schema.key, (*self.schema.fields, self.order))

    def versions(self, rows: pa.Table) -> Versions:
        """Return rows as they are staged, in the order they came in."""
        ops = rows.column(OP) if OP in rows.column_names else None
        known = self._known()
        rest = rows.select([name for name in rows.column_names if name in known])
        parts = []
        for kind, part, places in self._split(rest, ops):
            found = self._of_kind(part, kind)
            if self.order is not None:
                order = _taken(rows.column(self.order.name), places)
                fitted = fit_column(order, self.order)
                found = found.with_fields({**found.fields, self.order.number: fitted})
            parts.append(found)
        return concat_versions(parts, self.ordered)

    # --- kinds --------------------------------------------------------------------
    def _split(
        self, rows: pa.Table, ops: pa.ChunkedArray | None
    ) -> list[tuple[OpKind, pa.Table, pa.Array | None]]:
        if ops is None:
            return [(OPS[self.op], rows, None)]
        known = pc.is_in(ops, value_set=pa.array(list(OPS), pa.string()))
        wrong = pc.index(known, False).as_py()
        if wrong >= 0:
            raise InvalidInputError(
                f"row {wrong}, column {OP}: expected {', '.join(OPS)}, got {ops[wrong].as_py()!r}",
                row=wrong,
                column=OP,
            )
        parts = []
        for name, kind in OPS.items():
            places = pc.indices_nonzero(pc.equal(ops, name))
            if len(places):
                parts.append((kind, rows.take(places), places))
        return parts

    def _of_kind(self, rows: pa.Table, kind: OpKind) -> Versions:
        if kind is OpKind.PATCH and EXPIRES_AT in rows.column_names:
            expiry = rows.column(EXPIRES_AT)
            if expiry.null_count == len(expiry):  # it is there for the puts among them
                rows = rows.drop_columns(EXPIRES_AT)
        if kind is not OpKind.DELETE:
            return staged_rows(to_ops(rows, self.schema, kind=kind))
        key = self.schema.key
        keys = fit_keys(_whole(rows.column(key.name)), key)
        kinds = pa.array(np.full(len(keys), OpKind.DELETE, np.uint8))
        return staged_rows(Ops(keys, kinds))

    # --- names and types ----------------------------------------------------------
    def _known(self) -> set[str]:
        return {EXPIRES_AT, self.schema.key.name, *(field.name for field in self.schema.fields)}

    def _check(self, given: pa.Schema) -> None:
        known = self._known()
        own = {OP} | ({self.order.name} if self.order is not None else set())
        for name in given.names:
            if name not in known | own:
                raise unknown_column(name, sorted(known - {EXPIRES_AT}))
        key = self.schema.key.name
        if key not in given.names:
            raise InvalidInputError(
                f"column {key}: the key column is missing", kind=Kind.INVALID_KEY, column=key
            )
        if kind_of(given.field(key).type) not in ("text", "bytes"):
            raise InvalidInputError(
                f"column {key}: a key is text or bytes, got {given.field(key).type}",
                kind=Kind.INVALID_KEY,
                hint="Cast it to string",
                column=key,
            )
        for field in self.schema.fields:
            if field.name in given.names:
                _check_type(given.field(field.name), field)
        if OP in given.names and kind_of(given.field(OP).type) != "text":
            raise InvalidInputError(f"column {OP}: text expected, got {given.field(OP).type}")


def _check_type(given: pa.Field, field: Field) -> None:
    if not may_fit(given.type, field.arrow):
        raise InvalidInputError(
            f"column {field.name}: {field.type} expected, the DataFrame has {given.type}",
            hint="Cast it, or let the namespace grow with db.alter",
            column=field.name,
        )


def _order_field(given: pa.Schema, schema: Schema, name: str | None) -> Field | None:
    if name is None:
        return None
    if name not in given.names:
        raise InvalidInputError(
            f"the order column {name!r} is not there, only {', '.join(given.names)}",
            kind=Kind.INVALID_OPTION,
            column=name,
        )
    number = max(field.number for field in (schema.key, *schema.fields)) + 1
    order = Field(number, name, type_name(normal_type(given.field(name).type)))
    if order.type == "bool" or order.type.startswith(("list", "vector")):
        raise InvalidInputError(
            f"the order column {name!r} is {order.type}, which has no useful order", column=name
        )
    return order


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _taken(column: pa.ChunkedArray, places: pa.Array | None) -> pa.Array:
    return _whole(column if places is None else column.take(places))
