"""Conditions: predicates on single keys that must hold for a batch to commit.

    writer.write(batch, when=[reef.absent("a"), reef.equals("c", "state", "open")])

They are evaluated once, when everything before the batch is durable, and again only if another
object won the batch's slot (H20, H46). The log keeps a record of them for audits; replay never
evaluates them again.

A new kind is a function that makes it and a case in `Condition._holds`.
"""

from dataclasses import dataclass
from math import isnan
from typing import Any

from reef.engine.read.memtable import Entry
from reef.engine.rows.batch import encode_key
from reef.engine.rows.convert import to_python
from reef.engine.rows.input import fit_column
from reef.errors import ConditionFailedError, InvalidInputError
from reef.formats.schema import Schema


@dataclass(frozen=True, slots=True)
class Condition:
    """A predicate on one key, made by `absent`, `present` or `equals`."""

    key: bytes
    kind: str
    """The name of the function that made it."""
    column: str | None = None
    """The column that is compared with `value`; None if the kind compares none."""
    value: Any = None

    def _typed(self, schema: Schema) -> "Condition":
        """Return the condition with its value in the column's type; reject one that cannot hold."""
        if self.column is None:
            return self
        field = next((f for f in schema.fields if f.name == self.column), None)
        if field is None:
            known = ", ".join(f.name for f in schema.fields)
            raise InvalidInputError(
                f"a condition names the unknown column {self.column!r}; the columns are {known}"
            )
        # As strict as a write: a value that the column cannot hold equals none of its values.
        try:
            value = to_python(fit_column([self.value], field)[0])
        except InvalidInputError as error:
            raise InvalidInputError(
                f"a condition on column {self.column}: {self.value!r} is not of type {field.type}",
                column=self.column,
            ) from error
        return Condition(self.key, self.kind, self.column, value)

    def _holds(self, row: Entry | None, schema: Schema) -> bool:
        """Return whether the condition holds for the key's row; None means no row."""
        if self.kind == "absent":
            return row is None
        if row is None:
            return False
        if self.kind == "present":
            return True
        number = next(f.number for f in schema.fields if f.name == self.column)
        return _same(row.values.get(number), self.value)  # equals

    def _error(self) -> ConditionFailedError:
        return ConditionFailedError(
            f"the condition {self} does not hold", hint="Read the row again before you retry"
        )

    def _record(self) -> list[Any]:
        """Return the condition as the log stores it."""
        return [self.kind, self.key, self.column, _plain(self.value)]

    def __str__(self) -> str:
        rest = "" if self.column is None else f", {self.column!r}, {self.value!r}"
        return f"{self.kind}({self.key!r}{rest})"


def absent(key: bytes | str) -> Condition:
    """Require that the key has no row."""
    return Condition(encode_key(key), "absent")


def present(key: bytes | str) -> Condition:
    """Require that the key has a row."""
    return Condition(encode_key(key), "present")


def equals(key: bytes | str, column: str, value: Any) -> Condition:
    """Require that the key has a row whose column equals `value`; None means null."""
    return Condition(encode_key(key), "equals", column, value)


def _same(one: Any, other: Any) -> bool:
    """Compare two values; NaN equals NaN, so that a row that was just read equals itself."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    is_nan = isinstance(one, float) and isinstance(other, float) and isnan(one) and isnan(other)
    return bool(one == other) or is_nan


def checked(when: Any, schema: Schema) -> list[Condition]:
    """Check `when=` against a schema; InvalidInputError if it is not a list of conditions."""
    given = [when] if isinstance(when, Condition) else when
    if given is not None and not isinstance(given, list | tuple):
        raise InvalidInputError(f"when must be a list of conditions, got {type(when).__name__}")
    for condition in given or ():
        if not isinstance(condition, Condition):
            raise InvalidInputError(
                f"when must hold conditions, such as reef.absent(key), got {condition!r}"
            )
    return [condition._typed(schema) for condition in given or ()]


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | bytes | None) else repr(value)
