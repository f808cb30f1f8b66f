"""Literals of `where=`: from what was written to the values of a column, and back to text.

A literal may lie between two values of its column, as 5.5 does among integers, or beyond all
of them. So a cast gives two values: the largest that is not above the literal and the smallest
that is not below it. They are the same where the column can hold the literal, and None where
there is none; `x > 5.5` then means `x >= 6`, and `x = 5.5` never matches. Only against a float
column is a number rounded to the nearest float, as everywhere in Python.

Values are plain, so that conditions can be pickled and compared: moments are counts of the
column's own unit since 1970, dates are days.
"""

import math
import re
from datetime import date, datetime, time, timedelta
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

__all__ = [
    "Literal",
    "Moment",
    "UnfitError",
    "Value",
    "cast",
    "literal_of",
    "literal_text",
    "parse_date",
    "parse_moment",
    "pattern_text",
    "prefix_of",
    "value_text",
]

EPOCH_DAY = date(1970, 1, 1).toordinal()
DAY_NS = 86_400 * 10**9
FIRST_NS = (1 - EPOCH_DAY) * DAY_NS
END_NS = (date.max.toordinal() + 1 - EPOCH_DAY) * DAY_NS
UNIT_NS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
EXACT = Context(prec=100)
MOMENT = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})"
    r"(?:[ T]([0-9]{2}:[0-9]{2}(?::[0-9]{2})?)(?:\.([0-9]{1,9}))?(Z|[+-][0-9]{2}:[0-9]{2})?)?"
)


class Moment(NamedTuple):
    """A point in time, in nanoseconds since 1970; of UTC if it has a zone."""

    ns: int
    zoned: bool


Literal = bool | int | float | Decimal | str | bytes | date | Moment
Value = bool | int | float | Decimal | str | bytes
Neighbours = tuple[Value | None, Value | None]


class UnfitError(Exception):
    """A literal that means nothing, or nothing for its column."""


# --- reading ------------------------------------------------------------------------


def literal_of(value: Any) -> Literal:
    """Return a Python value as a literal."""
    if isinstance(value, np.generic) and not isinstance(value, np.datetime64):
        value = value.item()
    if isinstance(value, datetime):
        return _moment_of(value)
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if isinstance(value, Decimal) and value.is_infinite():
        return float(value)
    if isinstance(value, float | Decimal) and math.isnan(value):
        raise UnfitError("nothing is equal to NaN")
    if not isinstance(value, bool | int | float | Decimal | str | bytes | date):
        raise UnfitError(f"{value!r}, a {type(value).__name__}, is not a literal")
    return value


def parse_date(text: str) -> date:
    """Return the date of a text such as 2024-01-31."""
    match = MOMENT.fullmatch(text)
    try:
        if match and not match[2]:
            return date.fromisoformat(text)
    except ValueError:
        pass
    raise UnfitError(f"{text!r} is not a date such as '2024-01-31'")


def parse_moment(text: str) -> Moment:
    """Return the moment of a text; without a time it is midnight."""
    match = MOMENT.fullmatch(text)
    try:
        if match:
            clock = time.fromisoformat(match[2] or "00:00")
            days = date.fromisoformat(match[1]).toordinal() - EPOCH_DAY
            seconds = days * 86_400 + clock.hour * 3600 + clock.minute * 60 + clock.second
            fraction_ns = int((match[3] or "").ljust(9, "0"))
            return _checked(
                Moment((seconds - _offset_s(match[4])) * 10**9 + fraction_ns, bool(match[4]))
            )
    except ValueError:
        pass
    raise UnfitError(f"{text!r} is not a time such as '2024-01-31 12:00:00.5+00:00'")


def prefix_of(pattern: str) -> tuple[str, bool]:
    """Return the text before a pattern's last %, and whether there is one.

    >>> prefix_of("5\\\\%-%")
    ('5%-', True)
    """
    text = re.fullmatch(r"((?:[^%_\\]|\\[%_\\])*)(%?)", pattern, re.DOTALL)
    if text is None:
        raise UnfitError(
            f"LIKE {pattern!r}: only a prefix and one % at its end; "
            r"write \%, \_ and \\ for these characters themselves"
        )
    return re.sub(r"\\(.)", r"\1", text[1]), bool(text[2])


def _moment_of(value: datetime) -> Moment:
    offset = value.utcoffset()
    since = value.replace(tzinfo=None) - datetime(1970, 1, 1) - (offset or timedelta())
    seconds = since.days * 86_400 + since.seconds
    fraction_ns = since.microseconds * 1000 + getattr(value, "nanosecond", 0)
    return _checked(Moment(seconds * 10**9 + fraction_ns, offset is not None))


def _checked(moment: Moment) -> Moment:
    if not FIRST_NS <= moment.ns < END_NS:
        raise UnfitError("a time outside the years 1 to 9999 in UTC")
    return moment


def _offset_s(zone: str | None) -> int:
    if zone in (None, "Z"):
        return 0
    assert zone is not None
    clock = time.fromisoformat(zone[1:])
    return (clock.hour * 3600 + clock.minute * 60) * (-1 if zone[0] == "-" else 1)


# --- casting ------------------------------------------------------------------------


def cast(literal: Literal, data_type: pa.DataType) -> Neighbours:
    """Return the column's values next to a literal: not above it, and not below it."""
    if isinstance(literal, int | float | Decimal) and not isinstance(literal, bool):
        return _among_numbers(literal, data_type)
    if pa.types.is_date(data_type) or pa.types.is_timestamp(data_type):
        return _among_moments(literal, data_type)
    if isinstance(literal, bool) and pa.types.is_boolean(data_type):
        return literal, literal
    return _among_texts(literal, data_type)


def _among_texts(literal: Any, data_type: pa.DataType) -> Neighbours:
    is_bytes = pa.types.is_binary(data_type)
    if isinstance(literal, str) and (is_bytes or pa.types.is_string(data_type)):
        try:
            value = literal.encode()
        except UnicodeEncodeError:
            raise UnfitError("UTF-8 cannot hold this text") from None
        return (value, value) if is_bytes else (literal, literal)
    if isinstance(literal, bytes) and is_bytes:
        return literal, literal
    raise UnfitError("the types do not fit")


def _among_numbers(literal: Any, data_type: pa.DataType) -> Neighbours:
    if pa.types.is_integer(data_type):
        return _among_integers(literal, data_type)
    if pa.types.is_floating(data_type):
        return _among_floats(literal, data_type)
    if pa.types.is_decimal(data_type):
        return _among_decimals(literal, data_type)
    raise UnfitError("the types do not fit")


def _among_integers(literal: Any, data_type: pa.DataType) -> Neighbours:
    bits = data_type.bit_width
    if pa.types.is_signed_integer(data_type):
        return _among_whole(literal, -(1 << bits - 1), (1 << bits - 1) - 1)
    return _among_whole(literal, 0, (1 << bits) - 1)


def _among_whole(literal: Any, low: int, high: int) -> Neighbours:
    if literal > high:
        return high, None
    if literal < low:
        return None, low
    return math.floor(literal), math.ceil(literal)


def _among_floats(literal: Any, data_type: pa.DataType) -> Neighbours:
    kind = np.float32 if pa.types.is_float32(data_type) else np.float64
    try:
        with np.errstate(over="ignore"):
            rounded = float(kind(float(literal))) + 0.0  # -0.0 becomes 0.0
    except OverflowError:
        rounded = math.inf if literal > 0 else -math.inf
    if math.isinf(rounded) and literal not in (math.inf, -math.inf):
        largest = float(np.finfo(kind).max)
        return (largest, math.inf) if rounded > 0 else (-math.inf, -largest)
    return rounded, rounded


def _among_decimals(literal: Any, data_type: pa.DataType) -> Neighbours:
    step = Decimal(1).scaleb(-data_type.scale)
    largest = Decimal(10**data_type.precision - 1).scaleb(-data_type.scale, EXACT)
    if literal > largest:
        return largest, None
    if literal < -largest:
        return None, -largest
    exact = Decimal(repr(literal)) if isinstance(literal, float) else Decimal(literal)
    below, above = (exact.quantize(step, way, EXACT) for way in (ROUND_FLOOR, ROUND_CEILING))
    return EXACT.plus(below), EXACT.plus(above)


def _among_moments(literal: Any, data_type: pa.DataType) -> Neighbours:
    moment = _as_moment(literal)
    is_date = pa.types.is_date(data_type)
    if moment.zoned and (is_date or data_type.tz is None):
        raise UnfitError("a time with a zone, for a column without one")
    unit_ns = DAY_NS if is_date else UNIT_NS[data_type.unit]
    whole, rest = divmod(moment.ns, unit_ns)
    below, _ = _among_whole(whole, -(1 << 63), (1 << 63) - 1)
    _, above = _among_whole(whole + bool(rest), -(1 << 63), (1 << 63) - 1)
    return below, above


def _as_moment(literal: Any) -> Moment:
    if isinstance(literal, str):
        return parse_moment(literal)
    if isinstance(literal, Moment):
        return literal
    if isinstance(literal, date):
        return Moment((literal.toordinal() - EPOCH_DAY) * DAY_NS, False)
    raise UnfitError("the types do not fit")


# --- writing ------------------------------------------------------------------------


def literal_text(literal: Literal) -> str:
    """Return a literal as it must stand in a text."""
    if isinstance(literal, bool):
        return "TRUE" if literal else "FALSE"
    if isinstance(literal, str):
        return "'" + literal.replace("'", "''") + "'"
    if isinstance(literal, bytes):
        return f"X'{literal.hex()}'"
    if isinstance(literal, Moment):
        return f"TIMESTAMP '{_moment_text(literal.ns)}{'+00:00' if literal.zoned else ''}'"
    if isinstance(literal, date):
        return f"DATE '{literal}'"
    return str(literal).replace("inf", "INFINITY")


def value_text(value: Value, data_type: pa.DataType) -> str:
    """Return the text of a column's value, which reads back as the same."""
    if isinstance(value, int) and pa.types.is_date(data_type):
        return literal_text(date.fromordinal(value + EPOCH_DAY))
    if isinstance(value, int) and pa.types.is_timestamp(data_type):
        return literal_text(Moment(value * UNIT_NS[data_type.unit], bool(data_type.tz)))
    return literal_text(value)


def pattern_text(prefix: str) -> str:
    """Return the pattern of a prefix, quoted."""
    return literal_text(re.sub(r"([%_\\])", r"\\\1", prefix) + "%")


def _moment_text(moment_ns: int) -> str:
    day, rest = divmod(moment_ns, DAY_NS)
    seconds, fraction = divmod(rest, 10**9)
    clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    text = f"{date.fromordinal(day + EPOCH_DAY)} {clock}"
    return f"{text}.{fraction:09}".rstrip("0") if fraction else text
