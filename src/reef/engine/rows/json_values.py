"""Values of rows as JSON and back. JSON has no bytes, no times, no decimals and no NaN:

    bytes                text if they are UTF-8, otherwise {"base64": "…"}
    dates, times         text, ISO 8601
    decimals             text; numbers are read too, exactly
    NaN and infinities   "NaN", "Infinity", "-Infinity"
    maps, structs        objects; keys of a map are text

`from_json` reads what `to_json` writes, given the type of the column. Values that have another
form are returned unchanged: the check of the column reports them.
"""

import base64
import binascii
import json
import math
from collections.abc import Callable, Mapping
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa

from reef.engine.rows.convert import parse_times
from reef.errors import InvalidInputError

INFINITE = ("NaN", "Infinity", "-Infinity")
BASE64 = "base64"


def encode_bytes(data: bytes) -> Any:
    """Return bytes as JSON."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {BASE64: base64.b64encode(data).decode()}


def to_json(value: Any, encode: Callable[[bytes], Any] = encode_bytes) -> Any:
    """Return a value as JSON types."""
    if isinstance(value, bytes):
        return encode(value)
    if isinstance(value, Mapping):
        return {_name(name, encode): to_json(item, encode) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(item, encode) for item in value]
    return to_json(value.to_dict(), encode) if hasattr(value, "to_dict") else _scalar(value)


def _scalar(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return value.isoformat() if isinstance(value, datetime | date) else str(value)


def _name(name: Any, encode: Callable[[bytes], Any]) -> str:
    """Return a key of a map as text; bytes that are no text keep their escapes."""
    if not isinstance(name, bytes):
        return str(name)
    encoded = encode(name)
    return encoded if isinstance(encoded, str) else name.decode(errors="backslashreplace")


def python_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Convert Arrow rows to Python; times as text, since Python cannot represent all of them."""
    columns = {
        name: _python_column(column)
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _python_column(column: pa.Array) -> list[Any]:
    if pa.types.is_temporal(column.type):
        column = column.cast(pa.string())
    values: list[Any] = column.to_pylist(maps_as_pydicts="lossy")
    return values


# --- from JSON ------------------------------------------------------------------------


def parse_object(text: str) -> Any:
    """Parse JSON; numbers with a fraction are exact. ValueError or RecursionError if it is none."""
    return json.loads(text, parse_float=Decimal)


def from_json(
    name: str, value: Any, typed: pa.DataType, decode: Callable[[str], bytes] = str.encode
) -> Any:
    """Convert a value of JSON to a column's type; `decode` makes bytes of text."""
    if isinstance(value, list) and hasattr(typed, "value_type"):
        return [from_json(name, item, typed.value_type, decode) for item in value]
    if isinstance(value, dict):
        return _from_object(name, value, typed, decode)
    if isinstance(value, Decimal) and not pa.types.is_decimal(typed):
        return float(value)
    return _from_text(name, value, typed, decode) if isinstance(value, str) else value


def _from_object(
    name: str, value: dict[str, Any], typed: pa.DataType, decode: Callable[[str], bytes]
) -> Any:
    """Convert an object to a map, a struct or bytes; other fields are left alone."""
    if pa.types.is_map(typed):
        keys = [_from_key(name, key, typed.key_type, decode) for key in value]
        items = [from_json(name, item, typed.item_type, decode) for item in value.values()]
        return dict(zip(keys, items, strict=True))
    if pa.types.is_binary(typed) and value.keys() == {BASE64}:
        return _from_base64(name, value[BASE64])
    kinds = {field.name: field.type for field in typed} if pa.types.is_struct(typed) else {}
    return {
        field: from_json(name, item, kinds.get(field, pa.null()), decode)
        for field, item in value.items()
    }


def _from_key(name: str, text: str, typed: pa.DataType, decode: Callable[[str], bytes]) -> Any:
    """Convert a key of a map: keys of objects are always text."""
    if pa.types.is_integer(typed) or pa.types.is_boolean(typed):
        return _cast(name, text, typed)
    return _from_text(name, text, typed, decode)


def _from_base64(name: str, text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise InvalidInputError(f"column {name}: {text!r:.80} is not base64: {error}") from error


def _from_text(name: str, text: str, typed: pa.DataType, decode: Callable[[str], bytes]) -> Any:
    types = pa.types
    if types.is_binary(typed):
        return decode(text)
    if types.is_floating(typed):
        return _float(name, text)
    if types.is_temporal(typed) or types.is_decimal(typed):
        return _cast(name, text, typed)
    return text


def _float(name: str, text: str) -> float:
    if text not in INFINITE:
        raise InvalidInputError(f"column {name}: {text[:80]!r} is not a number")
    return float(text)


def _cast(name: str, text: str, typed: pa.DataType) -> Any:
    try:
        if pa.types.is_time(typed):
            return parse_times(pa.array([text]), typed)[0].as_py()
        return pa.scalar(text, pa.string()).cast(typed).as_py()
    except (pa.ArrowException, ValueError) as error:
        raise InvalidInputError(f"column {name}: {text[:80]!r} is not {typed}: {error}") from error
