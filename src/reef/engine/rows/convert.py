"""Convert Arrow arrays and Python values to a column's exact type, only if nothing is lost.

The kinds of the types decide first: text and bytes do not mix, nor do timestamps with and without a
zone; nulls fit everywhere. Within a kind the values decide: an integer too large for its column, a
float with a fraction in an integer column, nanoseconds in a column of microseconds do not fit. The
only rounding is of float64 in a float32 column, since Python has no float32; a value that would
become infinite does not fit.

Arrow's own conversion of Python values truncates fractions and drops the time of day and the zone.
So the classes of a column's values are checked first (there are few, for any number of rows), then
inexact values are converted, and only then Arrow converts.

Buffers are trusted to follow the Arrow format, except that text is checked to be UTF-8: committed
rows are read for years, by programs that check it.

For callers, versions become Arrow batches, and single rows dicts. A column that is newer than the
data is null there, and data from before a column was widened is cast to its current type. The
expiry time is no column of the schema, but can be selected by name.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, time
from decimal import Decimal
from difflib import get_close_matches
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reef import kernel
from reef.errors import CorruptionError, InvalidInputError
from reef.formats.schema import FLOATS, Field, Schema, cast_column, normal_type
from reef.formats.versions import Versions

FITS = {
    "bool": {"bool"},
    "integer": {"integer", "float", "decimal"},
    "float": {"integer", "float"},
    "decimal": {"integer", "decimal"},
    "text": {"text"},
    "bytes": {"bytes"},
    "date": {"date"},
    "time": {"time"},
    "timestamp": {"timestamp"},
}
"""Which kinds of values a column of some kind may be given."""
MISFITS = (pa.ArrowException, ValueError, TypeError, ArithmeticError)
"""Errors of conversions, ours and Arrow's, for a value that does not fit."""
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
    "time": (time,),
    "timestamp": (datetime, np.datetime64),
}
"""Accepted classes by kind of column. A bool is not a number, a datetime is not a date."""
EXPIRES_AT = "_expires_at"
"""When a row expires: null, or a timestamp in UTC."""
EXPIRES_TYPE = pa.timestamp("ms", "UTC")
BINARY_ID = pa.binary().id
FLOAT_IDS = frozenset(data_type.id for data_type in FLOATS)
NUMBER_IDS = FLOAT_IDS | {
    *(pa.int8().id, pa.int16().id, pa.int32().id, pa.int64().id),
    *(pa.uint8().id, pa.uint16().id, pa.uint32().id, pa.uint64().id),
}
TEXT_IDS = frozenset({BINARY_ID, pa.string().id})
"""Types whose values become Python values without pyarrow, which takes ten times as long."""


TIME = re.compile(r"(\d\d:\d\d(?::\d\d(?=$|\.))?)(?:\.(\d{1,9}))?")


class Misfit(ValueError):
    """A value that its column cannot hold; the caller adds row and column."""


def fit_array(array: pa.Array, target: pa.DataType) -> pa.Array:
    """Return the array as `target`, or raise one of MISFITS."""
    array = _unwrap(array)
    if array.null_count == len(array):
        return pa.nulls(len(array), target)
    if not may_fit(array.type, target):
        raise Misfit(f"{array.type} is not {target}")
    if _has_fields(target):
        return _fit_fields(array, target)
    fitted = _cast(array, target)
    _check_finite(array, fitted)
    _check_content(fitted)
    return fitted


def fit_numpy(values: npt.NDArray[np.generic], target: pa.DataType) -> pa.Array:
    """Return a numpy array as `target`; two dimensions are lists of equal length."""
    if not values.dtype.isnative:
        values = values.astype(values.dtype.newbyteorder("="))
    if values.ndim == 2:
        flat = pa.array(values.reshape(-1))
        return fit_array(pa.FixedSizeListArray.from_arrays(flat, values.shape[1]), target)
    array = pa.array(values)
    if pa.types.is_timestamp(target) and pa.types.is_timestamp(array.type):
        # numpy has no zones: its timestamps are UTC if the column has a zone.
        array = array.cast(pa.timestamp(array.type.unit, target.tz))
    return fit_array(array, target)


def parse_times(texts: pa.Array, target: pa.DataType) -> pa.Array:
    """Return times of day from ISO 8601 text, to the nanosecond, or raise one of MISFITS."""
    times = [None if text is None else _parse_time(text) for text in texts.to_pylist()]
    return pa.array(times, pa.int64()).cast(pa.time64("ns")).cast(target)


def _parse_time(text: str) -> int:
    """Return the nanoseconds since midnight; Arrow parses no times, Python cuts nanoseconds off."""
    match = TIME.fullmatch(text)
    if match is None:
        raise Misfit(f"{text[:80]!r} is not a time such as 12:30:01.5")
    clock = time.fromisoformat(match[1])
    seconds = (clock.hour * 60 + clock.minute) * 60 + clock.second
    return seconds * 10**9 + int((match[2] or "").ljust(9, "0"))


def is_list(data_type: pa.DataType) -> bool:
    """Whether values of this type are lists, of any or of fixed length."""
    types = pa.types
    return bool(
        types.is_list(data_type)
        or types.is_large_list(data_type)
        or types.is_fixed_size_list(data_type)
    )


def kind_of(data_type: pa.DataType) -> str:
    """Return the kind of a type's values; empty if columns never hold it."""
    types = pa.types
    data_type = normal_type(data_type)
    kinds = {
        "bool": types.is_boolean,
        "integer": types.is_integer,
        "float": types.is_floating,
        "decimal": types.is_decimal,
        "text": types.is_string,
        "bytes": lambda t: types.is_binary(t) or types.is_fixed_size_binary(t),
        "date": types.is_date,
        "time": types.is_time,
        "timestamp": types.is_timestamp,
    }
    return next((kind for kind, holds in kinds.items() if holds(data_type)), "")


def may_fit(source: pa.DataType, target: pa.DataType) -> bool:
    """Whether a type can be converted to another; then each value decides for itself."""
    if pa.types.is_null(source):
        return True
    if is_list(target):
        return is_list(source) and may_fit(source.value_type, target.value_type)
    if pa.types.is_struct(target):
        return pa.types.is_struct(source) and _fields_fit(source, target)
    if pa.types.is_map(target):
        return (
            pa.types.is_map(source)
            and may_fit(source.key_type, target.key_type)
            and may_fit(source.item_type, target.item_type)
        )
    if pa.types.is_timestamp(target) and pa.types.is_timestamp(source):
        return (source.tz is None) == (target.tz is None)
    return kind_of(source) in FITS[kind_of(target)]


def _unwrap(array: pa.Array) -> pa.Array:
    """Return the values themselves, without dictionary, runs or a type that extends another."""
    if isinstance(array, pa.ExtensionArray):
        return _unwrap(array.storage)
    if isinstance(array, pa.DictionaryArray):
        words = _unwrap(array.dictionary)
        return words.cast(normal_type(words.type)).take(array.indices)
    if isinstance(array, pa.RunEndEncodedArray):
        return _unwrap(pc.run_end_decode(array))
    return array


def _cast(array: pa.Array, target: pa.DataType) -> pa.Array:
    if array.type.equals(target, check_metadata=True):  # the names inside lists count
        return array
    if pa.types.is_decimal(target) and pa.types.is_integer(array.type):
        # By way of all digits of an integer: Arrow would decide by the type, not by the values.
        array = array.cast(pa.decimal128(20, 0))
    return array.cast(target)


def _leaves(array: pa.Array) -> pa.Array:
    """Return the values inside lists of any depth."""
    while is_list(array.type):
        array = array.flatten()
    return array


def _check_finite(given: pa.Array, fitted: pa.Array) -> None:
    before, after = _leaves(given), _leaves(fitted)
    if (after.type, before.type) == FLOATS and _infinities(before) != _infinities(after):
        raise Misfit("a number out of the range of float32")


def _infinities(array: pa.Array) -> int:
    return int(pc.sum(pc.is_inf(array)).as_py() or 0)


def _check_content(array: pa.Array) -> None:
    """Refuse vectors with holes and text that is not UTF-8."""
    while is_list(array.type):
        is_vector = pa.types.is_fixed_size_list(array.type)
        array = array.flatten()
        if is_vector and array.null_count:
            raise Misfit("a vector with a null inside")
    if pa.types.is_string(array.type):
        array.validate(full=True)


def fit_values(values: Sequence[Any], target: pa.DataType) -> pa.Array:
    """Return the values as an array of `target`, or raise one of MISFITS."""
    if is_list(target):
        return _fit_lists(values, target)
    if pa.types.is_struct(target):
        return _fit_dicts(values, target)
    if pa.types.is_map(target):
        return _fit_maps(values, target)
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


# --- dates and timestamps -----------------------------------------------------------


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
        raise Misfit("timestamps with and without a zone")
    if classes <= {datetime}:
        return pa.array(values, pa.timestamp("us", target.tz)).cast(target)
    counts = [None if value is None else _count(_to_numpy(value), target.unit) for value in values]
    return pa.array(counts, pa.int64()).view(target)


def _to_numpy(value: Any) -> np.datetime64:
    """Convert a timestamp to numpy, in UTC; this keeps the nanoseconds of pandas."""
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


def _times(values: Sequence[Any], _: set[type], target: pa.DataType) -> pa.Array:
    if any(value.tzinfo is not None for value in values if value is not None):
        raise Misfit("a time of day with a zone")
    return pa.array(values, pa.time64("us")).cast(target)


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
    if _has_fields(target):
        return pa.ListArray.from_arrays(offsets, items, type=target, mask=holes)
    return fit_array(pa.ListArray.from_arrays(offsets, items, mask=holes), target)


def _fit_items(lists: Sequence[Any], target: pa.DataType) -> pa.Array:
    kinds = {(type(value), getattr(value, "dtype", None)) for value in lists}
    if len(kinds) == 1 and _joins(lists[0]):
        return fit_numpy(np.concatenate(lists), target)
    return fit_values(list(chain.from_iterable(lists)), target)


def _joins(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype != object


# --- structs and maps ---------------------------------------------------------------


def _has_fields(data_type: pa.DataType) -> bool:
    """Whether values are structs or maps, or lists of those: their parts are fitted one by one."""
    while is_list(data_type):
        data_type = data_type.value_type
    return bool(pa.types.is_struct(data_type) or pa.types.is_map(data_type))


def _fields_fit(source: pa.DataType, target: pa.DataType) -> bool:
    """Whether each field of a struct is one of another struct; any of those may be missing."""
    known = {field.name: field.type for field in target}
    return all(field.name in known and may_fit(field.type, known[field.name]) for field in source)


def _fit_fields(array: pa.Array, target: pa.DataType) -> pa.Array:
    """Return structs, maps or lists of those as `target`; null where they are null."""
    array = array.cast(normal_type(array.type))  # Arrow cannot take from views
    if pa.types.is_struct(target):
        given = dict(zip((field.name for field in array.type), array.flatten(), strict=True))
        parts = [
            fit_array(given[field.name], field.type)
            if field.name in given
            else pa.nulls(len(array), field.type)
            for field in target
        ]
        return pa.StructArray.from_arrays(parts, fields=list(target), mask=array.is_null())
    offsets, kept = _offsets_without_nulls(array)
    if pa.types.is_map(target):
        first, last = int(kept.offsets[0].as_py()), int(kept.offsets[-1].as_py())
        keys = fit_array(kept.keys[first:last], target.key_type)
        items = fit_array(kept.items[first:last], target.item_type)
        return _map_array(offsets, keys, items, target, array.is_null())
    items = fit_array(kept.flatten(), target.value_type)
    return pa.ListArray.from_arrays(offsets, items, type=target, mask=array.is_null())


def _offsets_without_nulls(array: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return where the items of each value begin if null has none, and the other values."""
    kept = array.drop_null()
    lengths = np.zeros(len(array), np.int64)
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    lengths[valid] = np.diff(kept.offsets.to_numpy())
    return _offsets_of(lengths), kept


def _offsets_of(lengths: npt.ArrayLike) -> pa.Array:
    ends = np.cumsum(np.asarray(lengths, np.int64))
    return pa.array(np.concatenate([[0], ends]).astype(np.int64)).cast(pa.int32())


def _map_array(
    offsets: pa.Array, keys: pa.Array, items: pa.Array, target: pa.DataType, holes: pa.Array
) -> pa.Array:
    """Return maps; a key that is null, or comes twice in a map, is a Misfit."""
    if keys.null_count:
        raise Misfit("a map with a key that is null")
    rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets.to_numpy()))
    pairs = pa.table({"row": rows, "key": keys.cast(_grouped_type(keys.type))})
    if pairs.group_by(["row", "key"]).aggregate([]).num_rows < len(keys):
        raise Misfit("a map in which a key comes twice")
    return pa.MapArray.from_arrays(offsets, keys, items, type=target, mask=holes)


def _grouped_type(data_type: pa.DataType) -> pa.DataType:
    """Return a type that distinguishes the same values, and that Arrow can group by."""
    return pa.float64() if data_type == pa.float32() else data_type


def _fit_dicts(values: Sequence[Any], target: pa.DataType) -> pa.Array:
    """Return structs of dicts; a field that a dict does not have is null."""
    names = {field.name for field in target}
    for value in values:
        if value is not None and not (isinstance(value, Mapping) and names.issuperset(value)):
            raise Misfit("not a dict of the fields of a struct")
    rows: list[Mapping[str, Any]] = [{} if value is None else value for value in values]
    parts = [fit_values([row.get(field.name) for row in rows], field.type) for field in target]
    holes = pa.array([value is None for value in values], pa.bool_())
    return pa.StructArray.from_arrays(parts, fields=list(target), mask=holes)


def _fit_maps(values: Sequence[Any], target: pa.DataType) -> pa.Array:
    """Return maps of dicts, or of lists of pairs as Arrow has them."""
    pairs = [() if value is None else _pairs(value) for value in values]
    keys = fit_values([pair[0] for some in pairs for pair in some], target.key_type)
    items = fit_values([pair[1] for some in pairs for pair in some], target.item_type)
    holes = pa.array([value is None for value in values], pa.bool_())
    return _map_array(_offsets_of([len(some) for some in pairs]), keys, items, target, holes)


def _pairs(value: Any) -> Sequence[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return tuple(value.items())
    pairs = isinstance(value, list | tuple) and all(
        isinstance(pair, tuple) and len(pair) == 2 for pair in value
    )
    if not pairs:
        raise Misfit("not a dict")
    return tuple(value)


CONVERSIONS: dict[str, Callable[[Sequence[Any], set[type], pa.DataType], pa.Array]] = {
    "integer": _integers,
    "float": _floats,
    "decimal": _decimals,
    "date": _dates,
    "time": _times,
    "timestamp": _timestamps,
}


def known_columns(schema: Schema) -> dict[str, int]:
    """Return the numbers of all columns that can be selected; 0 if no column block is read."""
    return {field.name: field.number for field in (schema.key, *schema.fields)} | {EXPIRES_AT: 0}


def to_record_batch(
    rows: Versions, schema: Schema, columns: Sequence[str] | None = None
) -> pa.RecordBatch:
    """Return the selected columns in the given order; all, key column first, by default."""
    if columns is None:
        every = [_column(rows, field) for field in (schema.key, *schema.fields)]
        return pa.RecordBatch.from_arrays(every, schema=schema.arrow())
    check_columns(schema, columns)
    names = list(columns)
    if not names:
        # A batch of no columns still knows how many rows it has.
        empty = pa.Array.from_buffers(pa.struct([]), len(rows), [None])
        return pa.RecordBatch.from_struct_array(empty)
    fields = {field.name: field for field in (schema.key, *schema.fields)}
    arrays = [_expiry(rows) if n == EXPIRES_AT else _column(rows, fields[n]) for n in names]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(schema, names))


def arrow_schema(schema: Schema, columns: Sequence[str] | None) -> pa.Schema:
    """Return the Arrow schema of the selected columns, by default of all."""
    if columns is None:
        return schema.arrow()
    every = schema.arrow().append(pa.field(EXPIRES_AT, EXPIRES_TYPE))
    return pa.schema([every.field(name) for name in columns])


def check_columns(schema: Schema, columns: Sequence[str]) -> None:
    """Raise unless these are names of columns, each once."""
    if isinstance(columns, str | bytes) or not isinstance(columns, Sequence):
        raise InvalidInputError(f"columns is a list of names, got {columns!r}")
    known = known_columns(schema)
    seen: set[str] = set()
    for name in columns:
        if not isinstance(name, str) or name not in known:
            raise unknown_column(str(name), list(schema.arrow().names))
        if name in seen:
            raise InvalidInputError(f"column {name} is selected twice", column=name)
        seen.add(name)


def to_row(key: bytes, values: Mapping[int, object], schema: Schema) -> dict[str, object]:
    """Return a row by column names, in the schema's order; missing values are None."""
    row: dict[str, object] = {schema.key.name: _key_out(key, schema.key)}
    for field in schema.fields:
        row[field.name] = values.get(field.number)
    return row


def expiry_out(expires_at_ms: int | None) -> Any:
    """Convert an expiry time to Python."""
    return None if expires_at_ms is None else to_python(pa.scalar(expires_at_ms, EXPIRES_TYPE))


def to_python(scalar: pa.Scalar) -> Any:
    """Convert a scalar to Python; InvalidInputError if Python cannot represent it."""
    try:
        return scalar.as_py(maps_as_pydicts="strict")
    except (ValueError, OverflowError, LookupError) as error:
        raise InvalidInputError(
            f"Python cannot represent this {scalar.type}{_number(scalar)}: {error}",
            hint="Read it with scan_arrow",
        ) from error


def python_list(array: pa.Array) -> list[Any]:
    """Return the values of a column as Python has them.

    Bytes and texts by the kernel, numbers and vectors by NumPy, which takes a tenth of the time.
    """
    if not array.null_count:
        if array.type.id in NUMBER_IDS:
            numbers: list[Any] = array.to_numpy(zero_copy_only=False).tolist()
            return numbers
        if pa.types.is_fixed_size_list(array.type) and array.type.value_type.id in FLOAT_IDS:
            values = array.flatten()
            if not values.null_count:
                table = values.to_numpy(zero_copy_only=False).reshape(len(array), -1)
                vectors: list[Any] = table.tolist()
                return vectors
        if (found := _list_of_bytes(array)) is not None:
            return found if array.type.id == BINARY_ID else [value.decode() for value in found]
    listed: list[Any] = array.to_pylist(maps_as_pydicts="strict")
    return listed


def _list_of_bytes(array: pa.Array) -> list[bytes] | None:
    """Return values without nulls as bytes; None if the kernel leaves it to pyarrow."""
    if (native := kernel.native) is None or array.type.id not in TEXT_IDS:
        return None
    _, offsets, data = array.buffers()
    if data is None:
        return None
    values: list[bytes] | None = native.bytes_list(offsets, data, array.offset, len(array))
    return values


def unknown_column(name: str, known: Sequence[str], where: str = "") -> InvalidInputError:
    """Return the error for a name that no column has."""
    close = get_close_matches(name, known, 1)
    return InvalidInputError(
        f"{where}column {name}: there is no such column, only {', '.join(known)}",
        hint=f"Did you mean {close[0]}?" if close else "",
        column=name,
    )


def _number(scalar: pa.Scalar) -> str:
    value = getattr(scalar, "value", None)
    return f", {value}" if isinstance(value, int) else ""


def _expiry(rows: Versions) -> pa.Array:
    if rows.expires_at_ms is None:
        return pa.nulls(len(rows), EXPIRES_TYPE)
    return rows.expires_at_ms.cast(EXPIRES_TYPE)


def _column(rows: Versions, field: Field) -> pa.Array:
    if field.number == 0:
        return _keys_out(rows.keys, field)
    array = rows.fields.get(field.number)
    if array is None:
        return pa.nulls(len(rows), field.arrow)
    array = cast_column(array, field.arrow)
    if pa.types.is_fixed_size_list(array.type) and array.offset and array.null_count:
        # polars 2.1 does not read a slice of vectors with nulls; joining makes a copy.
        array = pa.concat_arrays([array, array[:0]])
    return array


def _keys_out(keys: pa.Array, field: Field) -> pa.Array:
    try:
        return cast_column(keys, field.arrow)
    except pa.ArrowInvalid as error:
        raise CorruptionError(f"column {field.name}: a key is not UTF-8: {error}") from error


def _key_out(key: bytes, field: Field) -> bytes | str:
    if field.type == "binary":
        return key
    try:
        return key.decode()
    except UnicodeDecodeError as error:
        raise CorruptionError(f"column {field.name}: the key {key!r} is not UTF-8") from error
