"""Literals of `where=`: parse them, cast them to the type of a column, format them.

A literal may be between two values of its column, as 5.5 is among integers, or out of its range.
So a cast returns two values: the largest that is not above the literal and the smallest that is
not below it. They are equal if the column can hold the literal, and None if there is no such value;
`x > 5.5` becomes `x >= 6`, and `x = 5.5` never matches. Only against a float column is a number
rounded to the nearest float, as in Python.

Values are plain, so that predicates can be pickled and compared: timestamps are counts of the
column's unit since 1970, times of day since midnight, dates are days.
"""

import math
import re
from datetime import date, datetime, time, timedelta
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

EPOCH_DAY = date(1970, 1, 1).toordinal()
DAY_NS = 86_400 * 10**9
FIRST_NS = (1 - EPOCH_DAY) * DAY_NS
END_NS = (date.max.toordinal() + 1 - EPOCH_DAY) * DAY_NS
UNIT_NS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
EXACT = Context(prec=100)
TIME = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})"
    r"(?:[ T]([0-9]{2}:[0-9]{2}(?::[0-9]{2})?)(?:\.([0-9]{1,9}))?(Z|[+-][0-9]{2}:[0-9]{2})?)?"
)


CLOCK = re.compile(r"([0-9]{2}:[0-9]{2}(?::[0-9]{2})?)(?:\.([0-9]{1,9}))?")


class Timestamp(NamedTuple):
    """Nanoseconds since 1970; in UTC if `zoned`."""

    ns: int
    zoned: bool


class Clock(NamedTuple):
    """Nanoseconds since midnight."""

    ns: int


Literal = bool | int | float | Decimal | str | bytes | date | Timestamp | Clock
Value = bool | int | float | Decimal | str | bytes
Neighbours = tuple[Value | None, Value | None]


class LiteralError(Exception):
    """An invalid literal, or one that does not fit its column."""


# --- parsing ------------------------------------------------------------------------


def literal_of(value: Any) -> Literal:
    """Convert a Python value to a literal."""
    if isinstance(value, np.generic) and not isinstance(value, np.datetime64):
        value = value.item()
    if isinstance(value, datetime):
        return _timestamp_of(value)
    if isinstance(value, time):
        return _clock_of(value)
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if isinstance(value, Decimal) and value.is_infinite():
        return float(value)
    if isinstance(value, float | Decimal) and math.isnan(value):
        raise LiteralError("NaN equals no value")
    if not isinstance(value, bool | int | float | Decimal | str | bytes | date):
        raise LiteralError(f"{value!r}, a {type(value).__name__}, is not a literal")
    return value


def parse_date(text: str) -> date:
    """Parse a date such as 2024-01-31."""
    match = TIME.fullmatch(text)
    try:
        if match and not match[2]:
            return date.fromisoformat(text)
    except ValueError:
        pass
    raise LiteralError(f"{text!r} is not a date such as '2024-01-31'")


def parse_timestamp(text: str) -> Timestamp:
    """Parse a timestamp; without a time of day it is midnight."""
    match = TIME.fullmatch(text)
    try:
        if match:
            clock = time.fromisoformat(match[2] or "00:00")
            days = date.fromisoformat(match[1]).toordinal() - EPOCH_DAY
            seconds = days * 86_400 + clock.hour * 3600 + clock.minute * 60 + clock.second
            fraction_ns = int((match[3] or "").ljust(9, "0"))
            return _check_range(
                Timestamp((seconds - _offset_s(match[4])) * 10**9 + fraction_ns, bool(match[4]))
            )
    except ValueError:
        pass
    raise LiteralError(f"{text!r} is not a time such as '2024-01-31 12:00:00.5+00:00'")


def parse_clock(text: str) -> Clock:
    """Parse a time of day such as 08:30 or 08:30:00.5."""
    match = CLOCK.fullmatch(text)
    try:
        if match:
            fraction_ns = int((match[2] or "").ljust(9, "0"))
            return Clock(_clock_of(time.fromisoformat(match[1])).ns + fraction_ns)
    except ValueError:
        pass
    raise LiteralError(f"{text!r} is not a time of day such as '08:30:00.5'")


def _clock_of(value: time) -> Clock:
    if value.tzinfo is not None:
        raise LiteralError(f"{value} is a time of day with a zone")
    seconds = value.hour * 3600 + value.minute * 60 + value.second
    return Clock(seconds * 10**9 + value.microsecond * 1000)


def prefix_of(pattern: str) -> tuple[str, bool]:
    """Return the text before a pattern's last %, and whether there is one.

    >>> prefix_of("5\\\\%-%")
    ('5%-', True)
    """
    text = re.fullmatch(r"((?:[^%_\\]|\\[%_\\])*)(%?)", pattern, re.DOTALL)
    if text is None:
        raise LiteralError(
            f"LIKE {pattern!r}: only a prefix and one % at its end; "
            r"write \%, \_ and \\ for these characters themselves"
        )
    return re.sub(r"\\(.)", r"\1", text[1]), bool(text[2])


def _timestamp_of(value: datetime) -> Timestamp:
    offset = value.utcoffset()
    since = value.replace(tzinfo=None) - datetime(1970, 1, 1) - (offset or timedelta())
    seconds = since.days * 86_400 + since.seconds
    fraction_ns = since.microseconds * 1000 + getattr(value, "nanosecond", 0)
    return _check_range(Timestamp(seconds * 10**9 + fraction_ns, offset is not None))


def _check_range(timestamp: Timestamp) -> Timestamp:
    if not FIRST_NS <= timestamp.ns < END_NS:
        raise LiteralError("a time outside the years 1 to 9999 in UTC")
    return timestamp


def _offset_s(zone: str | None) -> int:
    if zone in (None, "Z"):
        return 0
    assert zone is not None
    clock = time.fromisoformat(zone[1:])
    return (clock.hour * 3600 + clock.minute * 60) * (-1 if zone[0] == "-" else 1)


# --- casting ------------------------------------------------------------------------


def cast(literal: Literal, data_type: pa.DataType) -> Neighbours:
    """Return the nearest values of a column: not above a literal, and not below it."""
    if isinstance(literal, int | float | Decimal) and not isinstance(literal, bool):
        return _among_numbers(literal, data_type)
    if pa.types.is_date(data_type) or pa.types.is_timestamp(data_type):
        return _among_times(literal, data_type)
    if pa.types.is_time(data_type):
        return _among_clocks(literal, data_type)
    if isinstance(literal, bool) and pa.types.is_boolean(data_type):
        return literal, literal
    return _among_texts(literal, data_type)


def _among_texts(literal: Any, data_type: pa.DataType) -> Neighbours:
    is_bytes = pa.types.is_binary(data_type)
    if isinstance(literal, str) and (is_bytes or pa.types.is_string(data_type)):
        try:
            value = literal.encode()
        except UnicodeEncodeError:
            raise LiteralError("UTF-8 cannot hold this text") from None
        return (value, value) if is_bytes else (literal, literal)
    if isinstance(literal, bytes) and is_bytes:
        return literal, literal
    raise LiteralError("the types do not fit")


def _among_numbers(literal: Any, data_type: pa.DataType) -> Neighbours:
    if pa.types.is_integer(data_type):
        return _among_integers(literal, data_type)
    if pa.types.is_floating(data_type):
        return _among_floats(literal, data_type)
    if pa.types.is_decimal(data_type):
        return _among_decimals(literal, data_type)
    raise LiteralError("the types do not fit")


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


def _among_times(literal: Any, data_type: pa.DataType) -> Neighbours:
    timestamp = _as_timestamp(literal)
    is_date = pa.types.is_date(data_type)
    if timestamp.zoned and (is_date or data_type.tz is None):
        raise LiteralError("a time with a zone, for a column without one")
    unit_ns = DAY_NS if is_date else UNIT_NS[data_type.unit]
    whole, rest = divmod(timestamp.ns, unit_ns)
    below, _ = _among_whole(whole, -(1 << 63), (1 << 63) - 1)
    _, above = _among_whole(whole + bool(rest), -(1 << 63), (1 << 63) - 1)
    return below, above


def _among_clocks(literal: Any, data_type: pa.DataType) -> Neighbours:
    clock = parse_clock(literal) if isinstance(literal, str) else literal
    if not isinstance(clock, Clock):
        raise LiteralError("the types do not fit")
    whole, rest = divmod(clock.ns, UNIT_NS[data_type.unit])
    above = whole + bool(rest)
    return whole, above if above * UNIT_NS[data_type.unit] < DAY_NS else None


def _as_timestamp(literal: Any) -> Timestamp:
    if isinstance(literal, str):
        return parse_timestamp(literal)
    if isinstance(literal, Timestamp):
        return literal
    if isinstance(literal, date):
        return Timestamp((literal.toordinal() - EPOCH_DAY) * DAY_NS, False)
    raise LiteralError("the types do not fit")


# --- formatting ---------------------------------------------------------------------


def literal_text(literal: Literal) -> str:
    """Format a literal as it is written in a filter."""
    if isinstance(literal, bool):
        return "TRUE" if literal else "FALSE"
    if isinstance(literal, str):
        return "'" + literal.replace("'", "''") + "'"
    if isinstance(literal, bytes):
        return f"X'{literal.hex()}'"
    if isinstance(literal, Timestamp | Clock | date):
        return _temporal_text(literal)
    return str(literal).replace("inf", "INFINITY")


def _temporal_text(literal: Timestamp | Clock | date) -> str:
    if isinstance(literal, Timestamp):
        return f"TIMESTAMP '{_time_text(literal.ns)}{'+00:00' if literal.zoned else ''}'"
    if isinstance(literal, Clock):
        return f"TIME '{_clock_text(literal.ns)}'"
    return f"DATE '{literal}'"


def value_text(value: Value, data_type: pa.DataType) -> str:
    """Format a value of a column, so that it parses to the same value."""
    if isinstance(value, int) and pa.types.is_date(data_type):
        return literal_text(date.fromordinal(value + EPOCH_DAY))
    if isinstance(value, int) and pa.types.is_timestamp(data_type):
        return literal_text(Timestamp(value * UNIT_NS[data_type.unit], bool(data_type.tz)))
    if isinstance(value, int) and pa.types.is_time(data_type):
        return literal_text(Clock(value * UNIT_NS[data_type.unit]))
    return literal_text(value)


def pattern_text(prefix: str) -> str:
    """Format a prefix as a quoted LIKE pattern."""
    return literal_text(re.sub(r"([%_\\])", r"\\\1", prefix) + "%")


def _time_text(time_ns: int) -> str:
    day, rest = divmod(time_ns, DAY_NS)
    return f"{date.fromordinal(day + EPOCH_DAY)} {_clock_text(rest)}"


def _clock_text(clock_ns: int) -> str:
    seconds, fraction = divmod(clock_ns, 10**9)
    text = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return f"{text}.{fraction:09}".rstrip("0") if fraction else text
