"""Bounds: which groups of a segment can have rows that match a predicate.

Bounds (smallest and largest value of a group) decide for many groups at once, and err on one side
only: an unknown bound, or one that is wider than the values (the index truncates long text), gives
True. Text is compared as UTF-8 bytes, which sort the same and can be truncated anywhere. A group
of floats with a NaN has no bounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reef.engine.where.literals import Value
from reef.engine.where.parser import Op
from reef.types import KeyRange

Flags = npt.NDArray[np.bool_]
COMPARE = {
    Op.EQ: pc.equal,
    Op.NE: pc.not_equal,
    Op.LT: pc.less,
    Op.LE: pc.less_equal,
    Op.GT: pc.greater,
    Op.GE: pc.greater_equal,
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of one column in each of `count` groups."""

    count: int
    low: pa.Array | None = None
    high: pa.Array | None = None
    """Null where it is not known; None where it is known of no group."""
    all_null: Flags | None = None
    no_null: Flags | None = None


def bound_array(bounds: pa.Array | Sequence[Any], data_type: pa.DataType) -> pa.Array | None:
    """Convert bounds to the type they are compared in; None if that is impossible."""
    target = _compared_as(data_type)
    try:
        array = bounds if isinstance(bounds, pa.Array) else pa.array(bounds, target)
        array = array.cast(target)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError):
        return None  # a column that was widened since, by values that the new type lacks
    if pa.types.is_floating(target):
        array = pc.if_else(pc.is_nan(array), pa.scalar(None, target), array)
    return array


def value_set(values: Sequence[Value], data_type: pa.DataType) -> pa.Array:
    """Return values for `is_in`, which compares bits: 0.0 and -0.0 differ."""
    both = [*values, -0.0] if pa.types.is_floating(data_type) and 0.0 in values else values
    return pa.array(both, data_type)


def can_match(op: Op, values: Sequence[Value], data_type: pa.DataType, bounds: Bounds) -> Flags:
    """Return for each group whether some row of it may meet the condition."""
    if op is Op.IS_NULL:
        return np.ones(bounds.count, bool) if bounds.no_null is None else ~bounds.no_null
    target = _compared_as(data_type)
    if pa.types.is_string(data_type):
        values = [str(value).encode() for value in values]
    if op in (Op.EQ, Op.IN):
        possible = _some_between(pa.array(values, target), bounds)
    elif op in (Op.NE, Op.NOT_IN):
        possible = _not_only(value_set(values, target), bounds)
    elif op is Op.LIKE:
        possible = _prefix_between(values[0], bounds)
    elif op is Op.NOT_LIKE:
        possible = _not_only_prefix(values[0], bounds)
    elif op is Op.NOT_NULL:
        possible = np.ones(bounds.count, bool)
    else:
        side = bounds.low if op in (Op.LT, Op.LE) else bounds.high
        possible = _flags(op, side, pa.array(values, target)[0], bounds.count)
    return possible if bounds.all_null is None else possible & ~bounds.all_null


def _compared_as(data_type: pa.DataType) -> pa.DataType:
    return pa.binary() if pa.types.is_string(data_type) else data_type


def _flags(op: Op, side: pa.Array | None, value: pa.Scalar, count: int) -> Flags:
    if side is None:
        return np.ones(count, bool)
    return _numpy(COMPARE[op](side, value).fill_null(True))


def _some_between(values: pa.Array, bounds: Bounds) -> Flags:
    """Return whether one of the sorted values is between the bounds."""
    if not len(values):
        return np.zeros(bounds.count, bool)
    sought = _as_comparable(values)
    places = np.zeros(bounds.count, np.int64)  # of the first value that is not below `low`
    if bounds.low is not None:
        known = _numpy(bounds.low.is_valid())
        low = _as_comparable(bounds.low.fill_null(values[0]))
        places[known] = np.searchsorted(sought, low)[known]
    found: Flags = places < len(sought)
    if bounds.high is None:
        return found
    high = _as_comparable(bounds.high.fill_null(values[len(values) - 1]))
    candidates = sought[np.minimum(places, len(sought) - 1)]
    found &= np.less_equal(candidates, high).astype(bool)
    return found


def _not_only(values: pa.Array, bounds: Bounds) -> Flags:
    """Whether a group may have a value outside a list; not if its only value is in it."""
    if bounds.low is None or bounds.high is None:
        return np.ones(bounds.count, bool)
    single = pc.equal(bounds.low, bounds.high).fill_null(False)
    return _numpy(pc.invert(pc.and_(single, pc.is_in(bounds.low, value_set=values))))


def _prefix_between(prefix: Any, bounds: Bounds) -> Flags:
    wanted = KeyRange.of_prefix(prefix)
    possible = _flags(Op.GE, bounds.high, pa.scalar(prefix, pa.binary()), bounds.count)
    if wanted.end is not None:
        end = pa.scalar(wanted.end, pa.binary())
        possible &= _flags(Op.LT, bounds.low, end, bounds.count)
    return possible


def _not_only_prefix(prefix: Any, bounds: Bounds) -> Flags:
    """Whether a group can have a value without the prefix: one before or after all with it."""
    span = KeyRange.of_prefix(prefix)
    possible = _flags(Op.LT, bounds.low, pa.scalar(prefix, pa.binary()), bounds.count)
    if span.end is not None:
        possible |= _flags(Op.GE, bounds.high, pa.scalar(span.end, pa.binary()), bounds.count)
    return possible


def _as_comparable(array: pa.Array) -> npt.NDArray[Any]:
    """Return values that numpy compares as Arrow does."""
    if pa.types.is_temporal(array.type):
        array = array.view(pa.int32() if array.type.bit_width == 32 else pa.int64())
    values: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return values


def _numpy(array: pa.Array) -> Flags:
    flags: Flags = array.to_numpy(zero_copy_only=False)
    return flags
