"""Conditions: what must be true of some keys for a batch to commit.

    writer.write(batch, when=[reef.absent("a"), reef.equals("c", "state", "open")])

They are decided once, when everything before the batch is durable, and again only if another
object took the batch's slot (H20, H46). What was decided is kept in the log as a record; replay
never decides again.
"""

from dataclasses import dataclass
from math import isnan
from typing import Any

from reef.engine.batch import encode_key
from reef.engine.reading.memtable import Entry
from reef.engine.rows.fit import fit_column
from reef.engine.rows.out import to_python
from reef.errors import ConditionFailedError, InvalidInputError
from reef.formats.schema import Schema

__all__ = ["Condition", "absent", "checked", "equals", "present"]


@dataclass(frozen=True, slots=True)
class Condition:
    """Something that must be true of one key."""

    key: bytes
    what: str
    """`absent`, `present` or `equals`."""
    column: str | None = None
    value: Any = None

    def check(self, schema: Schema) -> "Condition":
        """Return the condition with its value in the column's type; refuse an impossible one."""
        if self.what != "equals":
            return self
        field = next((f for f in schema.fields if f.name == self.column), None)
        if field is None:
            known = ", ".join(f.name for f in schema.fields)
            raise InvalidInputError(f"a condition names column {self.column!r}, there are {known}")
        # As exact as a write: what a column cannot hold is not equal to what it holds.
        try:
            value = to_python(fit_column([self.value], field)[0])
        except InvalidInputError as error:
            raise InvalidInputError(
                f"a condition on column {self.column}: {self.value!r} is not a {field.type}",
                column=self.column,
            ) from error
        return Condition(self.key, self.what, self.column, value)

    def holds(self, row: Entry | None, schema: Schema) -> bool:
        """Whether it is true of the row that the key has; None if it has none."""
        if self.what == "absent":
            return row is None
        if row is None:
            return False
        if self.what == "present":
            return True
        number = next(f.number for f in schema.fields if f.name == self.column)
        return _same(row.values.get(number), self.value)

    def failed(self) -> ConditionFailedError:
        return ConditionFailedError(
            f"the condition {self} is not true", hint="Read the row again and decide anew"
        )

    def record(self) -> list[Any]:
        """Return what the log keeps of it: for audits, never decided again."""
        return [self.what, self.key, self.column, _plain(self.value)]

    def __str__(self) -> str:
        rest = f", {self.column!r}, {self.value!r}" if self.what == "equals" else ""
        return f"{self.what}({self.key!r}{rest})"


def absent(key: bytes | str) -> Condition:
    """The key has no row."""
    return Condition(encode_key(key), "absent")


def present(key: bytes | str) -> Condition:
    """The key has a row."""
    return Condition(encode_key(key), "present")


def equals(key: bytes | str, column: str, value: Any) -> Condition:
    """The key has a row whose column has this value; None means null."""
    return Condition(encode_key(key), "equals", column, value)


def _same(one: Any, other: Any) -> bool:
    """Whether two values are the same: NaN too, so that a row just read equals itself."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    is_nan = isinstance(one, float) and isinstance(other, float) and isnan(one) and isnan(other)
    return bool(one == other) or is_nan


def checked(when: Any, schema: Schema) -> list[Condition]:
    """Return conditions that fit a schema; InvalidInputError for anything else."""
    given = [when] if isinstance(when, Condition) else when
    if given is not None and not isinstance(given, list | tuple):
        raise InvalidInputError(f"when is a list of conditions, got {type(when).__name__}")
    for condition in given or ():
        if not isinstance(condition, Condition):
            raise InvalidInputError(
                f"a condition is made by absent(), present() or equals(), got {condition!r}"
            )
    return [condition.check(schema) for condition in given or ()]


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | bytes | None) else repr(value)
