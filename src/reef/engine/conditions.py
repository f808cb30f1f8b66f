"""Conditions: what must be true of some keys for a batch to commit.

    writer.write(batch, when=[reef.absent("a"), reef.equals("c", "state", "open")])

They are decided once, when everything before the batch is durable, and again only if another
object took the batch's slot (H20, H46). What was decided is kept in the log as a record; replay
never decides again.
"""

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from reef.engine.batch import encode_key
from reef.engine.reading.memtable import Entry
from reef.errors import ConditionFailedError, InvalidInputError
from reef.formats.schema import Schema

__all__ = ["Condition", "absent", "equals", "present"]


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
        try:
            value = pa.scalar(self.value, field.arrow).as_py()
        except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, OverflowError, ValueError) as error:
            raise InvalidInputError(
                f"a condition on column {self.column}: {self.value!r} is not a {field.type}"
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
        return bool(row.values.get(number) == self.value)

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


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | bytes | None) else repr(value)
