"""Keys and values between bytes and a command line.

Reef's keys are bytes, and a terminal has text. `--encoding` says which stands for which, in both
directions:

    auto     UTF-8 where it is, on the way out; what is not, is 0x… in text and
             {"base64": "…"} in JSON. On the way in, UTF-8.
    utf8     always text; bytes that are none are told as \\x…
    hex      hexadecimal digits
    base64   the standard alphabet, with padding

Text that a person sees never has control characters: a value must not move the cursor.
"""

import base64
import binascii
import json
import math
from collections.abc import Mapping
from datetime import date, datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any

import pyarrow as pa

from reef.errors import InvalidInputError, Kind

__all__ = ["Encoding", "parse_bytes", "parse_row", "printable", "python_rows", "to_json"]


class Encoding(StrEnum):
    """How bytes are written as text."""

    AUTO = "auto"
    UTF8 = "utf8"
    HEX = "hex"
    BASE64 = "base64"


# --- in -----------------------------------------------------------------------------


def parse_bytes(text: str, encoding: Encoding, what: str = "the value") -> bytes:
    """Return what was meant; InvalidInputError if it is not in that encoding."""
    try:
        if encoding is Encoding.HEX:
            return bytes.fromhex(text.removeprefix("0x"))
        if encoding is Encoding.BASE64:
            return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error) as error:
        raise InvalidInputError(
            f"{what} {text[:80]!r} is not {encoding}: {error}", kind=Kind.INVALID_INPUT
        ) from error
    return text.encode(errors="surrogateescape")  # as the system handed it over


def parse_row(text: str, schema: pa.Schema, encoding: Encoding) -> dict[str, Any]:
    """Return the columns of a JSON object, each as its column's type takes it."""
    try:
        row = json.loads(text, parse_float=Decimal)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"the row {text[:80]!r} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise InvalidInputError(
            f"the row {text[:80]!r} is not a JSON object", hint='For instance {"amount": 7.0}'
        )
    return {name: _typed(name, value, schema, encoding) for name, value in row.items()}


def _typed(name: str, value: Any, schema: pa.Schema, encoding: Encoding) -> Any:
    """Return a value of JSON as its column takes it: JSON has no bytes, moments and decimals."""
    at = schema.get_field_index(name)
    if at < 0 or value is None:
        return value  # the engine says which columns there are
    return _as_type(name, value, schema.field(at).type, encoding)


def _as_type(name: str, value: Any, typed: pa.DataType, encoding: Encoding) -> Any:
    types = pa.types
    if isinstance(value, list) and types.is_nested(typed):
        return [_as_type(name, item, typed.value_type, encoding) for item in value]
    if isinstance(value, Decimal) and not types.is_decimal(typed):
        return float(value)
    return _from_text(name, value, typed, encoding) if isinstance(value, str) else value


def _from_text(name: str, text: str, typed: pa.DataType, encoding: Encoding) -> Any:
    types = pa.types
    if types.is_binary(typed):
        return parse_bytes(text, encoding, f"column {name}:")
    if types.is_floating(typed):
        return _float(name, text)
    if types.is_temporal(typed) or types.is_decimal(typed):
        return _cast(name, text, typed)
    return text


def _float(name: str, text: str) -> float:
    if text not in ("NaN", "Infinity", "-Infinity"):
        raise InvalidInputError(f"column {name}: {text[:80]!r} is not a number")
    return float(text)


def _cast(name: str, text: str, typed: pa.DataType) -> Any:
    try:
        return pa.scalar(text, pa.string()).cast(typed).as_py()
    except (pa.ArrowException, ValueError) as error:
        raise InvalidInputError(f"column {name}: {text[:80]!r} is not {typed}: {error}") from error


# --- out ----------------------------------------------------------------------------


def printable(data: bytes, encoding: Encoding, *, lines: bool = False) -> str:
    """Return bytes as a person can read them; with `lines`, line breaks stay as they are."""
    if encoding is Encoding.HEX:
        return data.hex()
    if encoding is Encoding.BASE64:
        return base64.b64encode(data).decode()
    try:
        text = data.decode(errors="strict" if encoding is Encoding.AUTO else "backslashreplace")
    except UnicodeDecodeError:
        return f"0x{data.hex()}"
    kept = "\n\t" if lines else ""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def to_json(value: Any, encoding: Encoding) -> Any:
    """Return a value with nothing in it that JSON does not have."""
    if isinstance(value, bytes):
        return _json_bytes(value, encoding)
    if isinstance(value, Mapping):
        return {_json_name(name, encoding): to_json(item, encoding) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(item, encoding) for item in value]
    return _json_scalar(value, encoding)


def _json_scalar(value: Any, encoding: Encoding) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, datetime | date):
        return value.isoformat()
    return to_json(value.to_dict(), encoding) if hasattr(value, "to_dict") else str(value)


def _json_bytes(data: bytes, encoding: Encoding) -> Any:
    if encoding is Encoding.UTF8:
        return data.decode(errors="backslashreplace")
    if encoding is not Encoding.AUTO:
        return printable(data, encoding)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def _json_name(name: Any, encoding: Encoding) -> str:
    return printable(name, encoding) if isinstance(name, bytes) else str(name)


def python_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return Arrow rows as Python's; moments and days as text, since Python lacks some."""
    columns = {
        name: _python_column(column)
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _python_column(column: pa.Array) -> list[Any]:
    if pa.types.is_temporal(column.type):
        column = column.cast(pa.string())
    values: list[Any] = column.to_pylist()
    return values
