"""Conditions of scans: which rows match, and what need not be read to find them.

`where="amount > 5 AND id LIKE 'a%'"` is a conjunction of conditions on single columns; the
grammar is in `where.parser`. A condition is checked against the schema once, and its literals
become values of their column. Then it answers three questions: which rows of a batch match
(`mask`), which groups of a segment can have such rows (`groups`), and which keys (`key_range`).

What matches:

    NULL     only IS NULL; not even != and NOT IN
    NaN      is unlike every number: only !=, NOT IN and IS NOT NULL
    -0.0     equals 0.0
    text     compares by code point, bytes bytewise; for a bytes column text means its UTF-8
    time     without a zone is of UTC where the column has one; DATE is midnight
    5.5      lies between the integers: x > 5.5 means x >= 6, x = 5.5 never matches
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reef.engine.where.bounds import COMPARE, Bounds, bound_array, can_match, value_set
from reef.engine.where.literals import (
    Literal,
    UnfitError,
    Value,
    cast,
    literal_text,
    pattern_text,
    prefix_of,
    value_text,
)
from reef.engine.where.parser import Op, RawCondition, parse_text, parse_tuples, quote_name
from reef.errors import InvalidInputError
from reef.formats.schema import Field, Schema, arrow_type
from reef.formats.segment_index import SegmentIndex
from reef.types import KeyRange

__all__ = ["Condition", "Op", "Where", "parse"]

NO_KEYS = KeyRange(b"", b"")


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition, checked: its values are of its column's type."""

    column: str
    number: int
    type: str
    is_key: bool
    op: Op
    values: tuple[Value, ...] = ()
    """One for a comparison; a prefix for LIKE; sorted, without repetition, for lists."""

    def __str__(self) -> str:
        name = quote_name(self.column)
        if self.op in (Op.IS_NULL, Op.NOT_NULL):
            return f"{name} {self.op}"
        if self.op is Op.LIKE:
            return f"{name} LIKE {pattern_text(_bytes(self.values[0]).decode())}"
        texts = [value_text(value, self.arrow) for value in self.values]
        if self.op in (Op.IN, Op.NOT_IN):
            return f"{name} {self.op} ({', '.join(texts)})"
        return f"{name} {self.op} {texts[0]}"

    @property
    def arrow(self) -> pa.DataType:
        return arrow_type(self.type)

    def mask(self, column: pa.Array) -> pa.Array:
        """Return for each value whether it matches; never null."""
        if self.op is Op.IS_NULL:
            return column.is_null()
        if self.op is Op.NOT_NULL:
            return column.is_valid()
        if column.type != self.arrow:
            column = column.cast(self.arrow)
        if self.op in (Op.IN, Op.NOT_IN):
            found = pc.is_in(column, value_set=value_set(self.values, self.arrow))
            return found if self.op is Op.IN else pc.and_not(column.is_valid(), found)
        if self.op is Op.LIKE:
            return pc.starts_with(column, pattern=self.values[0]).fill_null(False)
        value = pa.array(self.values, self.arrow)[0]
        return COMPARE[self.op](column, value).fill_null(False)

    def can_match(self, bounds: Bounds) -> npt.NDArray[np.bool_]:
        """Return for each group whether one of its rows may match."""
        return can_match(self.op, self.values, self.arrow, bounds)

    def key_range(self) -> KeyRange:
        """Return a range that has all keys that match."""
        if not self.is_key or not _is_text(self.arrow):
            return KeyRange()
        keys = [_bytes(value) for value in self.values] or [b""]
        ranges = {
            Op.EQ: KeyRange(keys[0], keys[0] + b"\0"),
            Op.IN: KeyRange(keys[0], keys[-1] + b"\0") if self.values else NO_KEYS,
            Op.LT: KeyRange(b"", keys[0]),
            Op.LE: KeyRange(b"", keys[0] + b"\0"),
            Op.GT: KeyRange(keys[0] + b"\0"),
            Op.GE: KeyRange(keys[0]),
            Op.LIKE: KeyRange.of_prefix(keys[0]),
            Op.IS_NULL: NO_KEYS,
        }
        return ranges.get(self.op, KeyRange())


@dataclass(frozen=True, slots=True)
class Where:
    """Conditions that all must hold; `str` gives a text that parses to the same."""

    conditions: tuple[Condition, ...] = ()

    def __str__(self) -> str:
        return " AND ".join(map(str, self.conditions))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns to be read, each once."""
        return tuple(dict.fromkeys(condition.column for condition in self.conditions))

    def mask(self, batch: pa.RecordBatch) -> pa.BooleanArray:
        """Return for each row whether it matches; never null."""
        masks = [c.mask(batch.column(c.column)) for c in self.conditions]
        return reduce(pc.and_, masks) if masks else pa.array(np.ones(len(batch), bool))

    def may_match(
        self,
        bounds: Mapping[str, tuple[Any, Any]],
        null_counts: Mapping[str, int] | None = None,
        rows: int | None = None,
    ) -> bool:
        """Whether rows can match whose columns have these (smallest, largest) values.

        None is a bound that is not known, and so is a column that is not named. With the
        number of nulls, and of rows, IS NULL and columns without values are judged too.
        """
        known = (_bounds_of(c, bounds, null_counts or {}, rows) for c in self.conditions)
        return all(
            bool(condition.can_match(found)[0])
            for condition, found in zip(self.conditions, known, strict=True)
        )

    def groups(self, index: SegmentIndex, schema: Schema) -> npt.NDArray[np.bool_]:
        """Return for each group of a segment whether it can have rows that match.

        `schema` is the one that the segment was written with. The answer is about versions as
        they are stored: a group may still hide older rows of other segments that match, or hold
        a patch for one, so a scan passes over a group only where nothing older lies beneath it.
        """
        possible = np.ones(len(index), bool)
        for condition in self.conditions:
            possible &= condition.can_match(_bounds_in(index, condition, schema))
        return possible

    def key_range(self) -> KeyRange:
        """Return a range that has all keys that match; an empty one ends where it starts."""
        wanted = reduce(KeyRange.both, (c.key_range() for c in self.conditions), KeyRange())
        empty = wanted.end is not None and wanted.start >= wanted.end
        return NO_KEYS if empty else wanted


def parse(where: str | Sequence[Any], schema: Schema) -> Where:
    """Return the conditions of a text, or of tuples, for the columns of a schema."""
    if isinstance(where, str):
        raw = parse_text(where)
    elif isinstance(where, list | tuple):
        raw = parse_tuples(where)
    else:
        raise InvalidInputError(
            f"where is a text or a list of tuples, got {type(where).__name__}",
            hint="Such as \"amount > 5\" or [('amount', '>', 5)]",
        )
    return Where(tuple(_checked(condition, schema) for condition in raw))


# --- from what was said to what it means for a column ----------------------------------


def _checked(raw: RawCondition, schema: Schema) -> Condition:
    fields = {field.name: field for field in (*schema.fields, schema.key)}
    field = fields.get(raw.column)
    if field is None:
        names = ", ".join(map(quote_name, [schema.key.name, *(f.name for f in schema.fields)]))
        raise raw.place.error(f"there is no column {raw.column!r}", f"The columns are {names}")
    if pa.types.is_nested(field.arrow) and raw.op not in (Op.IS_NULL, Op.NOT_NULL):
        raise raw.place.error(
            f"column {field.name} is {field.type}, which is not compared",
            "A list is asked only for IS NULL and IS NOT NULL",
        )
    op, values = _meaning(raw, field)
    return Condition(field.name, field.number, field.type, field is schema.key, op, values)


def _meaning(raw: RawCondition, field: Field) -> tuple[Op, tuple[Value, ...]]:
    if raw.op in (Op.IS_NULL, Op.NOT_NULL):
        return raw.op, ()
    if raw.op is Op.LIKE:
        return _prefix(raw, field)
    casts = [_cast(raw, literal, field) for literal in raw.values]
    if raw.op in (Op.EQ, Op.NE, Op.IN, Op.NOT_IN):
        return _listed(raw.op in (Op.EQ, Op.IN), casts)
    return _compared(raw.op, *casts[0])


def _listed(wanted: bool, casts: list[tuple[Any, Any]]) -> tuple[Op, tuple[Value, ...]]:
    """Return the shortest way to say that a value is one of these, or none of them."""
    values = tuple(
        sorted({below for below, above in casts if below is not None and below == above})
    )
    if len(values) == 1:
        return Op.EQ if wanted else Op.NE, values
    if wanted:
        return Op.IN, values
    return (Op.NOT_IN, values) if values else (Op.NOT_NULL, ())


def _compared(op: Op, below: Value | None, above: Value | None) -> tuple[Op, tuple[Value, ...]]:
    """Return the same comparison with a value that the column can hold."""
    upward = op in (Op.GT, Op.GE)
    nearest = above if upward else below
    if nearest is None:
        return Op.IN, ()
    if below == above:
        return op, (nearest,)
    return Op.GE if upward else Op.LE, (nearest,)


def _prefix(raw: RawCondition, field: Field) -> tuple[Op, tuple[Value, ...]]:
    (pattern,) = raw.values
    if not isinstance(pattern, str) or not _is_text(field.arrow):
        raise _unfit(raw, field, pattern, "LIKE compares a text or bytes column with a text")
    try:
        prefix, is_open = prefix_of(pattern)
        value, _ = cast(prefix, field.arrow)
    except UnfitError as error:
        raise _unfit(raw, field, pattern, str(error)) from None
    assert value is not None
    if not is_open:
        return Op.EQ, (value,)
    return (Op.LIKE, (value,)) if value else (Op.NOT_NULL, ())


def _cast(raw: RawCondition, literal: Literal, field: Field) -> tuple[Value | None, Value | None]:
    try:
        return cast(literal, field.arrow)
    except UnfitError as error:
        raise _unfit(raw, field, literal, str(error)) from None


def _unfit(raw: RawCondition, field: Field, literal: Any, why: str) -> InvalidInputError:
    what = f"column {field.name} is {field.type}, compared with {literal_text(literal)}"
    return raw.place.error(f"{what}: {why}")


# --- what is known of a condition's column ------------------------------------------------


def _bounds_of(
    condition: Condition,
    bounds: Mapping[str, tuple[Any, Any]],
    null_counts: Mapping[str, int],
    rows: int | None,
) -> Bounds:
    low, high = (
        None if pa.types.is_nested(condition.arrow) else bound_array([bound], condition.arrow)
        for bound in bounds.get(condition.column, (None, None))
    )
    nulls = 0 if condition.is_key else null_counts.get(condition.column)
    all_null = None if None in (nulls, rows) else np.array([nulls == rows])
    return Bounds(1, low, high, all_null, None if nulls is None else np.array([nulls == 0]))


def _bounds_in(index: SegmentIndex, condition: Condition, schema: Schema) -> Bounds:
    count, number = len(index), condition.number
    if condition.is_key:
        no_null = np.ones(count, bool)
        if not _is_text(condition.arrow):
            return Bounds(count, no_null=no_null)
        low, high = (pa.array(keys, pa.binary()) for keys in (index.first_keys, index.last_keys))
        return Bounds(count, low, high, no_null=no_null)
    if number not in schema.types():  # the column is younger than the segment
        return Bounds(count, all_null=np.ones(count, bool))
    low, high = (
        bound_array(side[number], condition.arrow) if number in side else None
        for side in (index.smallest, index.largest)
    )
    blocks = index.column_blocks.get(number)
    return Bounds(count, low, high, all_null=None if blocks is None else blocks == 0)


def _is_text(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_string(data_type) or pa.types.is_binary(data_type))


def _bytes(value: Value) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
