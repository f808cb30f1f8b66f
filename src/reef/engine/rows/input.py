"""Rows from callers, checked and converted to the operations of one batch.

    data ── read_columns ──▶ columns ── fit ──▶ arrays of the schema's types ──▶ Ops

Rows come as lists of dicts, dicts of columns, tables, frames or streams. Nothing of pandas, polars
or DuckDB is imported: objects with the Arrow C interface are read through it, without a copy;
pandas is recognised by its module's name, since its frames have an index that the interface would
export as a column. In pandas NaN is a missing value, so it becomes null, also inside lists;
everywhere else, and in Arrow-backed pandas columns, NaN is a number.

Everything is checked before anything is written: names, keys, types, ranges, the length of vectors.
A column is converted at once (`rows.convert`). Only if that fails is the offending row searched, by
halves; the error names row and column. A key may be repeated: the last row wins.

An upsert replaces the row: columns that it does not name become null. A patch changes only named
columns, so it records for each column and row whether it is touched, apart from null: a dict
touches its keys, a table touches all its columns in all rows.
"""

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reef.engine.rows.convert import (
    EXPIRES_AT,
    MISFITS,
    Misfit,
    fit_array,
    fit_numpy,
    fit_values,
    kind_of,
    unknown_column,
)
from reef.errors import ErrorKind, InvalidInputError
from reef.formats.schema import Field, Schema
from reef.formats.wal_object import KEY_BYTES_MAX, OpKind, Ops

Column: TypeAlias = list[Any] | npt.NDArray[np.generic] | pa.Array
"""A column as it came: Python values, a numpy array of numbers or such, or an Arrow array."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MILLISECOND = timedelta(milliseconds=1)
SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = 80


@dataclass(frozen=True, slots=True)
class _Expected:
    """The expected type of a column, for error messages."""

    name: str
    expected: str
    kind: ErrorKind = ErrorKind.INVALID_INPUT
    hint: str = ""


def fit_column(values: Column, field: Field) -> pa.Array:
    """Return the column as an array of exactly its field's type."""
    target = field.arrow
    return _fit_all(values, lambda part: _fit(part, target), _Expected(field.name, field.type))


def fit_keys(values: Column, field: Field) -> pa.Array:
    """Return the key column as binary; text is UTF-8, and text it is where the schema says so."""
    target = field.arrow
    expected = "text or UTF-8 bytes" if target == pa.string() else "bytes or text"
    hint = "Make keys of other values with reef.keys.pack"
    wanted = _Expected(field.name, expected, ErrorKind.INVALID_KEY, hint)
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
    wanted = _Expected(name, "a datetime or an integer of milliseconds")
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
        raise Misfit(f"{array.type} is not a timestamp")
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
        raise Misfit(f"{value!r} is not a timestamp")
    return int(value)


# --- errors -------------------------------------------------------------------------


def _fit_all(values: Column, fit: Callable[[Column], pa.Array], wanted: _Expected) -> pa.Array:
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
    values: Column, fit: Callable[[Column], pa.Array], wanted: _Expected
) -> InvalidInputError:
    row = _first_misfit(values, fit)
    if _fits(values[row : row + 1], fit):
        return InvalidInputError(
            f"column {wanted.name}: each row fits, but not all {len(values)} together",
            hint="A batch takes 2 GiB of one column at most: split it",
        )
    found = _describe_value(values[row])
    return InvalidInputError(
        f"row {row}, column {wanted.name}: expected {wanted.expected}, got {found}",
        kind=wanted.kind,
        hint=wanted.hint or _time_hint(wanted.expected, values[row]),
        row=row,
        column=wanted.name,
    )


def _time_hint(expected: str, value: Any) -> str:
    """Say which Python value a column of timestamps takes: text and numbers are ambiguous."""
    if not expected.startswith("timestamp") or not isinstance(value, datetime | str | int | float):
        return ""
    zoned = "," in expected
    if isinstance(value, datetime) and (value.tzinfo is not None) == zoned:
        return ""  # too precise, or out of range
    return f"Pass a datetime {'with a time zone: datetime.now(UTC)' if zoned else 'without a zone'}"


def _describe_value(value: Any) -> str:
    """Format a value and its type for a message, shortened."""
    shown_type = type(value).__name__
    if isinstance(value, pa.Scalar):
        shown_type = str(value.type)
        try:
            value = value.as_py()
        except (ValueError, OverflowError, LookupError):
            return f"{getattr(value, 'value', 'a value out of range')} ({shown_type})"
    if isinstance(value, datetime) and value.tzinfo is None:
        shown_type += " without a zone"
    if isinstance(value, list | tuple | np.ndarray):
        shown_type += f" of {len(value)}"
    return f"{SHORT.repr(value)} ({shown_type})"


def _bad_key(row: int, field: Field, problem: str) -> InvalidInputError:
    return InvalidInputError(
        f"row {row}, column {field.name}: {problem}",
        kind=ErrorKind.INVALID_KEY,
        row=row,
        column=field.name,
    )


FORMS = "a list of dicts, a dict of columns, an Arrow table, batch or stream, pandas, or polars"


@dataclass(frozen=True, slots=True)
class InputColumns:
    """Columns of equal length, by name."""

    columns: Mapping[str, Column]
    rows: int
    dicts: Sequence[Mapping[str, Any]] | None = None
    """The rows themselves, where each one says which columns it has."""


def read_columns(data: Any, key: str) -> InputColumns:
    """Return any form of rows as columns; streams are read to their end."""
    if isinstance(data, list | tuple):
        return _from_dicts(data)
    if isinstance(data, Mapping):
        return _from_columns(data)
    if _is_pandas(data) and hasattr(data, "columns"):
        return _from_pandas(data, key)
    return _from_table(_as_table(data))


# --- Python -------------------------------------------------------------------------


def _from_dicts(data: Sequence[Any]) -> InputColumns:
    for cls in set(map(type, data)):
        if not issubclass(cls, Mapping):
            row = next(place for place, value in enumerate(data) if type(value) is cls)
            raise InvalidInputError(f"row {row}: expected a dict, got {cls.__name__}", row=row)
    names = {name: None for row in data for name in row}
    columns = {name: [row.get(name) for row in data] for name in names}
    return InputColumns(columns, len(data), data)


def _from_columns(data: Mapping[Any, Any]) -> InputColumns:
    columns = {name: _as_column(values, name) for name, values in data.items()}
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise InvalidInputError(f"columns of a batch must have equal lengths, but {shown}")
    return InputColumns(columns, next(iter(lengths.values()), 0))


def _as_column(values: Any, name: str) -> Column:
    if isinstance(values, list | pa.Array):
        return values
    if isinstance(values, np.ndarray):
        return _from_numpy(values, name)
    if isinstance(values, pa.ChunkedArray) or hasattr(values, "__arrow_c_stream__"):
        return _combine_chunks(pa.chunked_array(values), name)
    if hasattr(values, "__arrow_c_array__"):
        return pa.array(values)
    if _is_pandas(values):
        return _from_series(values)
    if isinstance(values, Sequence) and not isinstance(values, str | bytes | bytearray):
        return list(values)
    raise InvalidInputError(
        f"column {name}: expected a list or an array, got {type(values).__name__}",
        hint="A single row is a list of one dict",
        column=name,
    )


def _from_numpy(values: npt.NDArray[np.generic], name: str) -> Column:
    if values.ndim not in (1, 2):
        raise InvalidInputError(
            f"column {name}: expected an array of 1 or 2 dimensions, got {values.ndim}",
            column=name,
        )
    return list(values) if values.dtype == object else values


# --- Arrow --------------------------------------------------------------------------


def _as_table(data: Any) -> pa.Table:
    if isinstance(data, pa.Table):
        return data
    try:
        if hasattr(data, "__arrow_c_stream__"):
            reader = pa.RecordBatchReader.from_stream(data)
        elif hasattr(data, "__arrow_c_array__"):
            return pa.Table.from_batches([pa.record_batch(data)])
        else:
            raise InvalidInputError(f"rows are {FORMS}, got {type(data).__name__}")
    except pa.ArrowInvalid as error:
        raise InvalidInputError(f"a {type(data).__name__} is not rows: {error}") from error
    return reader.read_all()


def _from_table(table: pa.Table) -> InputColumns:
    names = table.column_names
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidInputError(f"column {twice} is there twice")
    columns = {name: _combine_chunks(table.column(name), name) for name in names}
    return InputColumns(columns, table.num_rows)


def _combine_chunks(chunks: pa.ChunkedArray, name: str) -> pa.Array:
    """Return all chunks in one."""
    try:
        joined = chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()
    except pa.ArrowInvalid:
        joined = chunks
    if isinstance(joined, pa.ChunkedArray):
        raise InvalidInputError(
            f"column {name} has {chunks.nbytes} bytes", hint="A batch takes 2 GiB of it: split it"
        )
    return joined


# --- pandas -------------------------------------------------------------------------


def _is_pandas(data: Any) -> bool:
    return type(data).__module__.partition(".")[0] == "pandas"


def _from_pandas(frame: Any, key: str) -> InputColumns:
    """Read a frame; its index counts only where it has the key column's name."""
    if frame.index.name == key and key not in frame.columns:
        frame = frame.reset_index()
    if not frame.columns.is_unique:
        twice = frame.columns[frame.columns.duplicated()][0]
        raise InvalidInputError(f"column {twice} is there twice")
    columns = {str(name): _from_series(frame[name]) for name in frame.columns}
    return InputColumns(columns, len(frame))


def _from_series(series: Any) -> Column:
    try:
        array = pa.array(series, from_pandas=True)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        # Arrow finds no one type for it: the column's own type decides, value by value.
        values: list[Any] = series.astype(object).where(series.notna(), None).tolist()
        return values
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


EXPIRY_MS_MAX = 2**63 - 1


def to_ops(
    data: object, schema: Schema, *, kind: OpKind, ttl_s: float | None = None, now_ms: int = 0
) -> Ops:
    """Return rows in any form as puts or patches; InvalidInputError names row and column.

    Rows expire at their `_expires_at` (a timestamp, UTC without a zone, or milliseconds since
    1970; null: never), or all of them `ttl_s` after `now_ms`.
    """
    if kind not in (OpKind.PUT, OpKind.PATCH):
        raise InvalidInputError(f"rows are put or patched, got {kind!r}")
    given = read_columns(data, schema.key.name)
    if not given.rows:
        raise InvalidInputError("a batch without operations")
    check_names(given, schema)
    if kind is OpKind.PATCH:
        _check_patch(given, schema, ttl_s)
    named = [field for field in schema.fields if field.name in given.columns]
    return Ops(
        keys=fit_keys(given.columns[schema.key.name], schema.key),
        kinds=pa.array(np.full(given.rows, kind, np.uint8)),
        expires_at_ms=expiry_of(given, ttl_s, now_ms),
        fields={field.number: fit_column(given.columns[field.name], field) for field in named},
        touched={field.number: _touched_rows(given, field.name) for field in named}
        if kind is OpKind.PATCH
        else None,
    )


# --- names --------------------------------------------------------------------------


def check_names(given: InputColumns, schema: Schema) -> None:
    """Check that there is a key, and no column that the schema does not have."""
    key = schema.key.name
    known = [key, *(field.name for field in schema.fields)]
    expected = {*known, EXPIRES_AT}
    for name in given.columns:
        if name not in expected:
            raise unknown_column(str(name), known, _row_with(given, name))
    if key not in given.columns:
        raise InvalidInputError(
            f"column {key}: the key column is missing", kind=ErrorKind.INVALID_KEY
        )
    if given.dicts is not None:
        _check_keys_given(given.dicts, key)


def _check_keys_given(rows: Sequence[Mapping[str, object]], key: str) -> None:
    row = next((place for place, row in enumerate(rows) if row.get(key) is None), None)
    if row is not None:
        problem = "a key cannot be null" if key in rows[row] else "the key is missing"
        raise InvalidInputError(
            f"row {row}, column {key}: {problem}", kind=ErrorKind.INVALID_KEY, row=row, column=key
        )


def _row_with(given: InputColumns, name: object) -> str:
    if given.dicts is None:
        return ""
    return f"row {next(n for n, row in enumerate(given.dicts) if name in row)}, "


# --- patches ------------------------------------------------------------------------


def _check_patch(given: InputColumns, schema: Schema, ttl_s: float | None) -> None:
    if ttl_s is not None or EXPIRES_AT in given.columns:
        raise InvalidInputError(
            f"a patch cannot change when a row expires ({EXPIRES_AT}, ttl_s)",
            hint="Use upsert, with the whole row",
        )
    key_only = 0 if given.columns.keys() == {schema.key.name} else None
    if given.dicts is not None:
        key_only = next((n for n, row in enumerate(given.dicts) if len(row) == 1), None)
    if key_only is not None:
        raise InvalidInputError(
            f"row {key_only}: a patch that names the key only, column {schema.key.name}",
            hint="Name the columns to change; None sets one to null",
            row=key_only,
            column=schema.key.name,
        )


def _touched_rows(given: InputColumns, name: str) -> pa.Array:
    if given.dicts is None:
        return pa.array(np.ones(given.rows, np.bool_))
    return pa.array([name in row for row in given.dicts], pa.bool_())


# --- expiry -------------------------------------------------------------------------


def expiry_of(given: InputColumns, ttl_s: float | None, now_ms: int) -> pa.Array | None:
    """Return when rows expire: by their own column, or all at the same time; None if never."""
    values = given.columns.get(EXPIRES_AT)
    if ttl_s is None:
        return None if values is None else fit_expiry(values, EXPIRES_AT)
    if values is not None:
        raise InvalidInputError(f"ttl_s and a column {EXPIRES_AT}: give one of them")
    return pa.array(np.full(given.rows, _expires_at_ms(ttl_s, now_ms), np.int64))


def _expires_at_ms(ttl_s: float, now_ms: int) -> int:
    if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float):
        raise InvalidInputError(f"ttl_s is a number of seconds, got {ttl_s!r}")
    if not 0 < ttl_s < (EXPIRY_MS_MAX - now_ms) / 1000:
        raise InvalidInputError(f"ttl_s={ttl_s}: a time to live is above 0 and below infinity")
    return now_ms + math.ceil(ttl_s * 1000)
