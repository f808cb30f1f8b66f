"""Python values as a column's exact type: as strict as for Arrow, whatever Arrow would accept.

Arrow's own conversion cuts fractions off, drops the time of day and the zone. So the classes
of a column's values are looked at first (there are few, however many the rows), then what
needs a closer look is made exact, and only then Arrow converts.
"""

from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from reef.engine.rows.arrow import Misfit, fit_array, fit_numpy, is_list, kind_of

__all__ = ["fit_values"]

INTEGERS = (int, np.integer)
NUMBERS = (*INTEGERS, float, np.floating)
CLASSES: dict[str, tuple[type, ...]] = {
    "bool": (bool, np.bool_),
    "integer": (*NUMBERS, Decimal),
    "float": NUMBERS,
    "decimal": (*INTEGERS, Decimal),
    "text": (str,),
    "bytes": (bytes, bytearray, memoryview),
    "date": (date, np.datetime64),
    "timestamp": (datetime, np.datetime64),
}
"""What a column of some kind may be given. A bool is no number, a datetime no date."""


def fit_values(values: Sequence[Any], target: pa.DataType) -> pa.Array:
    """Return the values as an array of `target`, or raise one of MISFITS."""
    if is_list(target):
        return _fit_lists(values, target)
    kind = kind_of(target)
    classes = set(map(type, values)) - {type(None)}
    for cls in classes:
        if not _is_one_of(cls, kind):
            raise Misfit(f"{cls.__name__} is not {target}")
    convert = CONVERSIONS.get(kind)
    return convert(values, classes, target) if convert else pa.array(values, target)


def _is_one_of(cls: type, kind: str) -> bool:
    if issubclass(cls, bool):
        return kind == "bool"
    if issubclass(cls, datetime):
        return kind == "timestamp"
    return issubclass(cls, CLASSES[kind])


# --- numbers ------------------------------------------------------------------------


def _integers(values: Sequence[Any], classes: set[type], target: pa.DataType) -> pa.Array:
    if not all(issubclass(cls, INTEGERS) for cls in classes):
        values = [None if value is None else _whole(value) for value in values]
    return pa.array(values, target)


def _whole(number: Any) -> int:
    whole = int(number)
    if whole != number:
        raise Misfit(f"{number} has a fraction")
    return whole


def _floats(values: Sequence[Any], _: set[type], target: pa.DataType) -> pa.Array:
    fitted = pa.array(values, target)  # integers are checked to be exact
    if target == pa.float32():
        fit_array(pa.array(values, pa.float64()), target)
    return fitted


def _decimals(values: Sequence[Any], classes: set[type], target: pa.DataType) -> pa.Array:
    if any(issubclass(cls, np.integer) for cls in classes):
        values = [int(value) if isinstance(value, np.integer) else value for value in values]
    return pa.array(values, target)


# --- days and moments ---------------------------------------------------------------


def _dates(values: Sequence[Any], classes: set[type], target: pa.DataType) -> pa.Array:
    if classes <= {date}:
        return pa.array(values, target)
    days = [None if value is None else _count(np.datetime64(value), "D") for value in values]
    return pa.array(days, pa.int32()).view(target)


def _timestamps(values: Sequence[Any], classes: set[type], target: pa.DataType) -> pa.Array:
    if not classes <= {datetime}:
        values = [None if value != value else value for value in values]  # noqa: PLR0124, NaT
    zoned = target.tz is not None
    if any((value.tzinfo is not None) != zoned for value in values if isinstance(value, datetime)):
        raise Misfit("moments with and without a zone")
    if classes <= {datetime}:
        return pa.array(values, pa.timestamp("us", target.tz)).cast(target)
    counts = [None if value is None else _count(_moment(value), target.unit) for value in values]
    return pa.array(counts, pa.int64()).view(target)


def _moment(value: Any) -> np.datetime64:
    """Return a moment as numpy has it, in UTC; pandas keeps its nanoseconds that way."""
    if hasattr(value, "to_datetime64"):
        return value.to_datetime64()  # type: ignore[no-any-return]
    if isinstance(value, datetime) and value.tzinfo is not None:
        value = value.astimezone(UTC).replace(tzinfo=None)
    return np.datetime64(value)


def _count(value: np.datetime64, unit: str) -> int | None:
    """Return the number of units since 1970, if it is whole and the unit can count so far."""
    if np.isnat(value):
        return None
    counted = value.astype(f"datetime64[{unit}]")
    if counted.astype(value.dtype) != value:
        raise Misfit(f"{value} is not exact in {unit}")
    return int(counted.astype(np.int64))


# --- lists --------------------------------------------------------------------------


def _fit_lists(values: Sequence[Any], target: pa.DataType) -> pa.Array:
    """Put all items behind one another, fit those, and cut them into lists again."""
    lists = [value for value in values if value is not None]
    if not all(isinstance(value, list | tuple | np.ndarray) for value in lists):
        raise Misfit("not a list")
    lengths = [0 if value is None else len(value) for value in values]
    if pa.types.is_fixed_size_list(target) and any(len(v) != target.list_size for v in lists):
        raise Misfit("a vector of another length")
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)).cast(pa.int32())
    holes = pa.array([value is None for value in values], pa.bool_())
    items = _fit_items(lists, target.value_type)
    return fit_array(pa.ListArray.from_arrays(offsets, items, mask=holes), target)


def _fit_items(lists: Sequence[Any], target: pa.DataType) -> pa.Array:
    kinds = {(type(value), getattr(value, "dtype", None)) for value in lists}
    if len(kinds) == 1 and _joins(lists[0]):
        return fit_numpy(np.concatenate(lists), target)
    return fit_values(list(chain.from_iterable(lists)), target)


def _joins(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype != object


CONVERSIONS: dict[str, Callable[[Sequence[Any], set[type], pa.DataType], pa.Array]] = {
    "integer": _integers,
    "float": _floats,
    "decimal": _decimals,
    "date": _dates,
    "timestamp": _timestamps,
}
