"""Rows out: versions as Arrow, and single rows as dicts.

A column that some data lacks is null there, and data from before a column was widened is cast
to what the column is by now. When a row expires is no column of its schema; it can be asked for
by name as if it were one.
"""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import pyarrow as pa

from reef.errors import CorruptionError, InvalidInputError
from reef.formats.schema import Field, Schema, cast_column
from reef.formats.versions import Versions

__all__ = [
    "EXPIRES_AT",
    "arrow_schema",
    "check_columns",
    "expiry_out",
    "known_columns",
    "to_python",
    "to_record_batch",
    "to_row",
    "unknown_column",
]


EXPIRES_AT = "_expires_at"
"""When a row expires: null, or a moment in UTC."""
EXPIRES_TYPE = pa.timestamp("ms", "UTC")


def known_columns(schema: Schema) -> dict[str, int]:
    """Return the numbers of all columns that can be asked for; 0 where none must be read."""
    return {field.name: field.number for field in (schema.key, *schema.fields)} | {EXPIRES_AT: 0}


def to_record_batch(
    rows: Versions, schema: Schema, columns: Sequence[str] | None = None
) -> pa.RecordBatch:
    """Return the chosen columns in the order asked; all, the key first, if none are named."""
    if columns is not None:
        check_columns(schema, columns)
    names = schema.arrow().names if columns is None else list(columns)
    if not names:
        # A batch of no columns still knows how many rows it has.
        empty = pa.Array.from_buffers(pa.struct([]), len(rows), [None])
        return pa.RecordBatch.from_struct_array(empty)
    fields = {field.name: field for field in (schema.key, *schema.fields)}
    arrays = [_expiry(rows) if n == EXPIRES_AT else _column(rows, fields[n]) for n in names]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(schema, names))


def arrow_schema(schema: Schema, columns: Sequence[str] | None) -> pa.Schema:
    """Return the Arrow schema of the chosen columns; of all of them, if none are named."""
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
            raise InvalidInputError(f"column {name} is asked for twice", column=name)
        seen.add(name)


def to_row(key: bytes, values: Mapping[int, object], schema: Schema) -> dict[str, object]:
    """Return a row by column names, in the schema's order; what is missing is None."""
    row: dict[str, object] = {schema.key.name: _key_out(key, schema.key)}
    for field in schema.fields:
        row[field.name] = values.get(field.number)
    return row


def expiry_out(expires_at_ms: int | None) -> Any:
    """Return when a row expires as Python has it."""
    return None if expires_at_ms is None else to_python(pa.scalar(expires_at_ms, EXPIRES_TYPE))


def to_python(scalar: pa.Scalar) -> Any:
    """Return a value as Python has it; InvalidInputError if Python has no such moment."""
    try:
        return scalar.as_py()
    except (ValueError, OverflowError, LookupError) as error:
        raise InvalidInputError(
            f"Python cannot hold this {scalar.type}{_number(scalar)}: {error}",
            hint="Read it with scan_arrow",
        ) from error


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
