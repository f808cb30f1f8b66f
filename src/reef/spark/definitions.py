"""Definitions of tables in SQL: checked as a whole before anything is created or replaced.

A statement that replaces a table keeps the namespace, and commits its rows in the place of all
others. So the new definition must fit the namespace: the same key, all of its columns with the same
types, and new ones only in addition. Everything that would be lost without a word is refused:
columns, constraints, unknown properties, a place of the table's own.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import types as st

from reef.errors import ErrorKind, InvalidInputError
from reef.formats.schema import Schema
from reef.spark.options import WRITING, parse_vectors
from reef.spark.rows import raise_all
from reef.spark.sink import arrow_columns, check_collation
from reef.spark.types import same_type, spark_schema

KEY = "id"
"""The key column of a table whose statement names none."""
KNOWN = (
    *("key", "vectors", "provider", "location", "owner", "comment"),
    *("collation", "external", "is_managed_location", "table_type"),
)
"""Reef's own properties, and those that Spark sets; comments are dropped with a warning."""
OPTION = "option."
"""Spark passes each option a second time, under this prefix."""
DROP_HINT = "Nothing was changed. DROP TABLE first, or choose another name"


@dataclass(frozen=True, slots=True)
class Definition:
    """Columns and properties of a table that a statement creates or replaces."""

    columns: st.StructType
    key: str | None
    vectors: Mapping[str, int]

    @classmethod
    def of(
        cls, columns: st.StructType, properties: Mapping[str, str], default_provider: str = ""
    ) -> "Definition":
        """Check a definition by itself; InvalidInputError has all problems."""
        given = {name.lower(): value for name, value in properties.items()}
        problems = _property_problems(given, default_provider)
        vectors = {}
        try:
            vectors = parse_vectors(given.get("vectors", ""))
        except InvalidInputError as error:
            problems.append(error)
        raise_all(problems)
        return cls(columns, given.get("key"), vectors)

    def check_new(self) -> str:
        """Return the key column of a table that does not exist yet."""
        key = self.key or KEY
        check_columns(self.columns, key)
        Schema.of(arrow_columns(self.columns, self.vectors), key)
        return key

    def check_replacement(self, found: Schema) -> st.StructType:
        """Return the columns to add to a namespace; InvalidInputError if it has to be dropped."""
        check_columns(self.columns, found.key.name)
        known = {field.name: field for field in spark_schema(found)}
        given = {field.name: field for field in self.columns}
        added = st.StructType([field for field in self.columns if field.name not in known])
        arrow_columns(added, {n: size for n, size in self.vectors.items() if n in added.names})
        problems = []
        if self.key not in (None, found.key.name):
            problems.append(f"the key column is {found.key.name}, not {self.key}")
        problems += [f"column {name} would be dropped" for name in known if name not in given]
        problems += [
            f"column {name} is {known[name].dataType.simpleString()}, "
            f"not {field.dataType.simpleString()}"
            for name, field in given.items()
            if name in known and not same_type(field.dataType, known[name].dataType)
        ]
        problems += _vector_problems(self.vectors, found)
        if problems:
            raise InvalidInputError(
                f"the table cannot be replaced in place: {'; '.join(problems)}", hint=DROP_HINT
            )
        return added


def check_columns(columns: st.StructType, key: str) -> None:
    """Raise for constraints and collations that Reef would not keep."""
    problems = []
    for field in columns:
        if not field.nullable and field.name != key:
            problems.append(
                InvalidInputError(
                    f"column {field.name}: NOT NULL is for the key column only",
                    hint="All other columns may be null",
                    column=field.name,
                )
            )
        if field.name != key:
            try:
                check_collation(st.StructType([field]), field.name, is_key=False)
            except InvalidInputError as error:
                problems.append(error)
    raise_all(problems)
    check_collation(columns, key)


def _property_problems(given: Mapping[str, str], provider: str) -> list[InvalidInputError]:
    """Return why properties, whose names are in lower case, cannot be kept."""
    problems = []
    if given.get("provider", "reef").lower() not in ("reef", provider.lower()):
        problems.append(_bad(f"USING {given['provider']}: a Reef catalog has Reef tables only"))
    if "location" in given:
        problems.append(_bad("LOCATION: a table is in the bucket of its catalog"))
    write_options = {name.lower() for name in WRITING}
    for name in given:
        is_option = name in write_options and OPTION + name in given
        if name not in KNOWN and not name.startswith(OPTION) and not is_option:
            problems.append(
                _bad(f"a table has no property {name!r}", "There are the properties key, vectors")
            )
    return problems


def _vector_problems(vectors: Mapping[str, int], found: Schema) -> list[str]:
    stored = {field.name: field.arrow for field in found.fields}
    return [
        f"column {name} is {stored[name]}, not a vector of {size}"
        for name, size in vectors.items()
        if name in stored
        and not (pa.types.is_fixed_size_list(stored[name]) and stored[name].list_size == size)
    ]


def _bad(message: str, hint: str = "") -> InvalidInputError:
    return InvalidInputError(message, kind=ErrorKind.INVALID_OPTION, hint=hint)
