"""Rows for callers: versions as Arrow, and single rows as dicts.

A column that is newer than the data is null there, and data from before a column was widened is
cast to its current type. The expiry time is no column of the schema, but can be selected by name.
"""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import pyarrow as pa

from reef import kernel
from reef.errors import CorruptionError, InvalidInputError
from reef.formats.schema import Field, Schema, cast_column
from reef.formats.versions import Versions

EXPIRES_AT = "_expires_at"
"""When a row expires: null, or a timestamp in UTC."""
EXPIRES_TYPE = pa.timestamp("ms", "UTC")
BINARY_ID = pa.binary().id


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
    """Return the values of a column; those of bytes by the kernel, which takes a tenth of the
    time."""
    if (native := kernel.native) is not None and array.type.id == BINARY_ID:
        _, offsets, data = array.buffers()
        if data is not None and not array.null_count:  # takes leave a bitmap without nulls
            values: list[Any] | None = native.bytes_list(offsets, data, array.offset, len(array))
            if values is not None:
                return values
    listed: list[Any] = array.to_pylist(maps_as_pydicts="strict")
    return listed


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
