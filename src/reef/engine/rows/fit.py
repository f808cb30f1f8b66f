"""One column of what a user gave, as the array that is committed; or which row is wrong.

The whole column is converted at once. Only when that fails is the offending row looked for,
by halves: the first half that does not fit holds the first row that does not.
"""

import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reef.engine.rows.arrow import MISFITS, Misfit, fit_array, fit_numpy, kind_of
from reef.engine.rows.python import fit_values
from reef.errors import InvalidInputError, Kind
from reef.formats.batch import KEY_BYTES_MAX
from reef.formats.schema import Field

__all__ = ["Column", "fit_column", "fit_expiry", "fit_keys"]

Column: TypeAlias = list[Any] | npt.NDArray[np.generic] | pa.Array
"""A column as it came: Python values, a numpy array of numbers or such, or an Arrow array."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MILLISECOND = timedelta(milliseconds=1)
SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = 80


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a column should have been, for the message that says it is not."""

    name: str
    expected: str
    kind: Kind = Kind.INVALID_INPUT
    hint: str = ""


def fit_column(values: Column, field: Field) -> pa.Array:
    """Return the column as an array of exactly its field's type."""
    target = field.arrow
    return _fit_all(values, lambda part: _fit(part, target), _Wanted(field.name, field.type))


def fit_keys(values: Column, field: Field) -> pa.Array:
    """Return the key column as binary; text is UTF-8, and text it is where the schema says so."""
    target = field.arrow
    expected = "text or UTF-8 bytes" if target == pa.string() else "bytes or text"
    hint = "Make keys of other values with reef.keys.pack"
    wanted = _Wanted(field.name, expected, Kind.INVALID_KEY, hint)
    keys = _fit_all(values, lambda part: _fit_key(part, target), wanted)
    if keys.null_count:
        raise _bad_key(pc.index(keys.is_null(), True).as_py(), field, "a key cannot be null")
    lengths = pc.binary_length(keys)
    wrong = pc.or_(pc.less(lengths, 1), pc.greater(lengths, KEY_BYTES_MAX))
    row = pc.index(wrong, True).as_py()
    if row >= 0:
        found = lengths[row].as_py()
        raise _bad_key(row, field, f"a key has 1 to {KEY_BYTES_MAX} bytes, got {found}")
    return keys


def fit_expiry(values: Column, name: str) -> pa.Array | None:
    """Return when rows expire, in milliseconds since 1970; None if none does."""
    wanted = _Wanted(name, "a datetime or an integer of milliseconds")
    expires = _fit_all(values, _fit_expiry, wanted)
    return None if expires.null_count == len(expires) else expires


# --- conversions --------------------------------------------------------------------


def _fit(values: Column, target: pa.DataType) -> pa.Array:
    if isinstance(values, list):
        return fit_values(values, target)
    if isinstance(values, np.ndarray):
        return fit_numpy(values, target)
    return fit_array(values, target)


def _as_array(values: Column) -> pa.Array:
    return values if isinstance(values, pa.Array) else pa.array(values)


def _fit_key(values: Column, target: pa.DataType) -> pa.Array:
    array = _key_array(values) if isinstance(values, list) else _as_array(values)
    kind = kind_of(array.type)
    if kind == "bytes" and target == pa.string():
        return array.cast(pa.binary()).cast(target).cast(pa.binary())
    return fit_array(array, pa.string() if kind == "text" else pa.binary()).cast(pa.binary())


def _key_array(values: list[Any]) -> pa.Array:
    classes = set(map(type, values)) - {type(None)}
    if not all(issubclass(cls, str | bytes | bytearray | memoryview) for cls in classes):
        raise Misfit("neither bytes nor text")
    return pa.array(values, pa.binary())


def _fit_expiry(values: Column) -> pa.Array:
    if isinstance(values, list):
        return pa.array([_expiry_ms(value) for value in values], pa.int64())
    array = _as_array(values)
    if pa.types.is_timestamp(array.type):
        finer = array.type.unit in ("us", "ns")  # less than a millisecond is cut off
        array = array.cast(pa.timestamp("ms", array.type.tz), safe=not finer)
        return array.cast(pa.int64())
    if kind_of(array.type) != "integer" and array.null_count < len(array):
        raise Misfit(f"{array.type} is not a moment")
    return array.cast(pa.int64())


def _expiry_ms(value: Any) -> int | None:
    if value is None or value != value:  # noqa: PLR0124, NaT
        return None
    if isinstance(value, np.datetime64):
        return int(value.astype("datetime64[ms]").astype(np.int64))
    if isinstance(value, datetime):
        aware = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
        return int((aware - EPOCH) // MILLISECOND)
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise Misfit(f"{value!r} is not a moment")
    return int(value)


# --- what is wrong, and where -------------------------------------------------------


def _fit_all(values: Column, fit: Callable[[Column], pa.Array], wanted: _Wanted) -> pa.Array:
    try:
        return fit(values)
    except MISFITS as reason:
        raise _refusal(values, fit, wanted) from reason


def _first_misfit(values: Column, fit: Callable[[Column], pa.Array]) -> int:
    start, end = 0, len(values)
    while end - start > 1:
        middle = (start + end) // 2
        if _fits(values[start:middle], fit):
            start = middle
        else:
            end = middle
    return start


def _fits(values: Column, fit: Callable[[Column], pa.Array]) -> bool:
    try:
        fit(values)
    except MISFITS:
        return False
    return True


def _refusal(
    values: Column, fit: Callable[[Column], pa.Array], wanted: _Wanted
) -> InvalidInputError:
    row = _first_misfit(values, fit)
    if _fits(values[row : row + 1], fit):
        return InvalidInputError(
            f"column {wanted.name}: each row fits, but not all {len(values)} together",
            hint="A batch takes 2 GiB of one column at most: split it",
        )
    found = _described(values[row])
    return InvalidInputError(
        f"row {row}, column {wanted.name}: expected {wanted.expected}, got {found}",
        kind=wanted.kind,
        hint=wanted.hint,
        row=row,
        column=wanted.name,
    )


def _described(value: Any) -> str:
    """Return a value and its type, short enough for a message."""
    what = type(value).__name__
    if isinstance(value, pa.Scalar):
        what = str(value.type)
        try:
            value = value.as_py()
        except (ValueError, OverflowError, LookupError):
            return f"{getattr(value, 'value', 'what Python cannot hold')} ({what})"
    if isinstance(value, datetime) and value.tzinfo is None:
        what += " without a zone"
    if isinstance(value, list | tuple | np.ndarray):
        what += f" of {len(value)}"
    return f"{SHORT.repr(value)} ({what})"


def _bad_key(row: int, field: Field, problem: str) -> InvalidInputError:
    return InvalidInputError(
        f"row {row}, column {field.name}: {problem}",
        kind=Kind.INVALID_KEY,
        row=row,
        column=field.name,
    )
