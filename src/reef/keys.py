"""Order-preserving tuple keys: `pack(("user", 42, when))` sorts as the tuple does.

A packed key is its elements, one after the other, each a tag and the bytes that the tag defines:

    00      the end of a nested tuple      40 41   False, True
    08      None                           48      datetime: 8 bytes, microseconds since year 1
    10      bytes, then 00                 50      UUID: 16 bytes
    18      str as UTF-8, then 00          58      nested tuple: its elements, then 00
    20-36   a number

In bytes and str a zero byte is written as 00 ff; no tag is ff, so it is unambiguous.
Elements compare by type first, in the order of the tags, then by value; a shorter tuple
comes before the longer ones that it begins.

Ints and floats share one scale, so that 2 < 2.5 < 3 whatever their types:

    20 | 21 .. 2a | 2b .. 34 | 35 | 36       -inf | negative | zero or more | +inf | NaN
    2a - n, 2b + n                           n bytes (up to 8): the number without its fraction
    21, 34                                   the same, longer: u16 length, then the bytes
    … 01 | 02                                then: it was an int | a float without fraction
    … 00 | 03, 8 bytes                       a negative | positive float's fraction, as IEEE 754

Numbers are big-endian. A negative number's length, bytes and fraction are complemented.
Equal numbers of both types make two keys: 2 comes before 2.0. -0.0 is 0.0, and there is one
NaN. docs/format/keys.md has the whole grammar and an example.
"""

import builtins
import math
import struct
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn
from uuid import UUID  # noqa: TID251 - the type alone; none is drawn here

from reef.errors import ErrorKind, InvalidInputError

__all__ = ["pack", "range", "unpack"]

KEY_BYTES_MAX = 65_535
DEPTH_MAX = 32

END, NONE, BYTES, TEXT = 0x00, 0x08, 0x10, 0x18
MINUS_INFINITY, NEGATIVE_LONG, NEGATIVE = 0x20, 0x21, 0x2A
POSITIVE, POSITIVE_LONG, INFINITY, NAN = 0x2B, 0x34, 0x35, 0x36
FINITE = builtins.range(NEGATIVE_LONG, INFINITY)
FALSE, TRUE, TIME, ID, TUPLE = 0x40, 0x41, 0x48, 0x50, 0x58
FRACTION_BELOW, INT, FLOAT, FRACTION_ABOVE = 0, 1, 2, 3
SHORT_BYTES_MAX = 8

DOUBLE = struct.Struct(">d")
ALL_ONES = (1 << 64) - 1
FIRST_TIME = datetime(1, 1, 1, tzinfo=UTC)
DAY_US = 86_400_000_000
LAST_US = (datetime.max.replace(tzinfo=UTC) - FIRST_TIME) // timedelta(microseconds=1)

Element = None | bytes | str | int | float | bool | datetime | UUID | Sequence[Any]
Encoder = Callable[[Any, bytearray, int], None]
Decoder = Callable[[bytes, int, int], tuple[Any, int]]


def pack(values: Sequence[Element]) -> bytes:
    """Return the key of a tuple. `unpack` gives back an equal one, of the same types.

    >>> pack(("user", 42)).hex(" ")
    '18 75 73 65 72 00 2c 2a 01'
    """
    if not isinstance(values, tuple | list):
        raise _refusal(f"expected a tuple, got {type(values).__name__}")
    out, place = bytearray(), 0
    try:
        for place, value in enumerate(values):  # noqa: B007 - the error names it
            (ENCODERS.get(type(value)) or _encoder_of(value))(value, out, 1)
    except _UnfitError as error:
        raise _refusal(f"element {place} of a key: {error}", element=place) from None
    if len(out) > KEY_BYTES_MAX:
        raise _refusal(f"a packed key has at most {KEY_BYTES_MAX} bytes, this one {len(out)}")
    return bytes(out)


def unpack(key: bytes) -> tuple[Any, ...]:
    """Return the tuple of a packed key; InvalidInputError if it is none.

    >>> unpack(pack(("user", 42)))
    ('user', 42)
    """
    if not isinstance(key, bytes):
        raise _refusal(f"a packed key is bytes, got {type(key).__name__}")
    if len(key) > KEY_BYTES_MAX:
        raise _refusal(f"a packed key has at most {KEY_BYTES_MAX} bytes, this one {len(key)}")
    values, offset = [], 0
    while offset < len(key):
        value, offset = _decode(key, offset, 1)
        values.append(value)
    return tuple(values)


def range(prefix: Sequence[Element]) -> tuple[bytes, bytes]:
    """Return (start, end) for a scan over all keys whose tuple begins with `prefix`.

    >>> start, end = range(("user",))
    >>> start <= pack(("user",)) < pack(("user", 42)) < end <= pack(("users",))
    True
    """
    start = pack(prefix)
    if len(start) == KEY_BYTES_MAX:
        raise _refusal(f"a prefix has fewer than {KEY_BYTES_MAX} bytes, this one {len(start)}")
    return start, start + b"\xff"


# --- encoding -----------------------------------------------------------------------


class _UnfitError(Exception):
    """A value that no key can hold; `pack` says which element it was."""


def _encoder_of(value: Any) -> Encoder:
    """Return the encoder for a subclass of a type that keys can hold."""
    if isinstance(value, datetime) and getattr(value, "nanosecond", 0) != 0:
        raise _UnfitError(f"{value!r} has nanoseconds, a key holds microseconds")
    for kind, encode in ENCODERS.items():
        if isinstance(value, kind):
            return encode
    names = "None, bytes, str, int, float, bool, datetime, UUID and tuples of them"
    raise _UnfitError(f"{type(value).__name__} is not a type of keys, which are {names}")


def _encode_none(_value: None, out: bytearray, _depth: int) -> None:
    out.append(NONE)


def _encode_bool(value: bool, out: bytearray, _depth: int) -> None:
    out.append(TRUE if value else FALSE)


def _encode_bytes(value: bytes, out: bytearray, _depth: int) -> None:
    out.append(BYTES)
    out += value.replace(b"\x00", b"\x00\xff")
    out.append(END)


def _encode_text(value: str, out: bytearray, _depth: int) -> None:
    try:
        data = value.encode()
    except UnicodeEncodeError as error:
        raise _UnfitError(f"text that UTF-8 cannot hold, at character {error.start}") from None
    out.append(TEXT)
    out += data.replace(b"\x00", b"\x00\xff")
    out.append(END)


def _encode_int(value: int, out: bytearray, _depth: int) -> None:
    _encode_whole(abs(value), value < 0, out)
    out.append(INT)


def _encode_float(value: float, out: bytearray, _depth: int) -> None:
    if not math.isfinite(value):
        out.append(NAN if math.isnan(value) else INFINITY if value > 0 else MINUS_INFINITY)
        return
    fraction, whole = math.modf(abs(value))
    _encode_whole(int(whole), value < 0, out)
    if not fraction:
        out.append(FLOAT)
    elif value > 0:
        out.append(FRACTION_ABOVE)
        out += DOUBLE.pack(fraction)
    else:
        out.append(FRACTION_BELOW)
        out += _complement(DOUBLE.pack(fraction))


def _encode_whole(magnitude: int, negative: bool, out: bytearray) -> None:
    """Write a number without its fraction; its sign, then its length, decide the order."""
    length = (magnitude.bit_length() + 7) >> 3
    if length > KEY_BYTES_MAX:
        raise _UnfitError(f"an int of {length} bytes; a key has at most {KEY_BYTES_MAX}")
    if length <= SHORT_BYTES_MAX:
        out.append(NEGATIVE - length if negative else POSITIVE + length)
    else:
        out.append(NEGATIVE_LONG if negative else POSITIVE_LONG)
        out += (length ^ 0xFFFF if negative else length).to_bytes(2, "big")
    if negative:
        magnitude ^= (1 << 8 * length) - 1
    out += magnitude.to_bytes(length, "big")


def _encode_time(value: datetime, out: bytearray, _depth: int) -> None:
    if value.utcoffset() is None:
        raise _UnfitError(
            f"{value!r} has no time zone, so its order would depend on the machine; "
            "give it one, such as tzinfo=UTC"
        )
    since = value - FIRST_TIME
    time_us = since.days * DAY_US + since.seconds * 1_000_000 + since.microseconds
    if not 0 <= time_us <= LAST_US:
        raise _UnfitError(f"{value!r} is outside the years 1 to 9999 in UTC")
    out.append(TIME)
    out += time_us.to_bytes(8, "big")


def _encode_id(value: UUID, out: bytearray, _depth: int) -> None:
    out.append(ID)
    out += value.bytes


def _encode_tuple(values: Sequence[Any], out: bytearray, depth: int) -> None:
    if depth > DEPTH_MAX:
        raise _UnfitError(f"tuples are nested more than {DEPTH_MAX} deep")
    out.append(TUPLE)
    for value in values:
        (ENCODERS.get(type(value)) or _encoder_of(value))(value, out, depth + 1)
    out.append(END)


ENCODERS: dict[type, Encoder] = {
    type(None): _encode_none,
    bytes: _encode_bytes,
    str: _encode_text,
    bool: _encode_bool,
    int: _encode_int,
    float: _encode_float,
    datetime: _encode_time,
    UUID: _encode_id,
    tuple: _encode_tuple,
    list: _encode_tuple,
}


# --- decoding: each takes the bytes and where the value begins, returns it and its end ------


def _decode(key: bytes, offset: int, depth: int) -> tuple[Any, int]:
    decode = DECODERS.get(key[offset])
    if decode is None:
        _fail(offset, f"{key[offset]:02x} is not a tag")
    return decode(key, offset, depth)


def _decode_bytes(key: bytes, offset: int, _depth: int) -> tuple[bytes, int]:
    end = key.find(b"\x00", offset + 1)
    while key[end : end + 2] == b"\x00\xff":
        end = key.find(b"\x00", end + 2)
    if end < 0:
        _fail(offset, "bytes or text without an end")
    return key[offset + 1 : end].replace(b"\x00\xff", b"\x00"), end + 1


def _decode_text(key: bytes, offset: int, depth: int) -> tuple[str, int]:
    data, end = _decode_bytes(key, offset, depth)
    try:
        return data.decode(), end
    except UnicodeDecodeError:
        _fail(offset, "text that is not UTF-8")


def _decode_number(key: bytes, offset: int, _depth: int) -> tuple[int | float, int]:
    negative = key[offset] <= NEGATIVE
    magnitude, end = _decode_whole(key, offset, negative)
    kind, end = _take(key, end, 1)[0], end + 1
    if kind == INT and (magnitude or not negative):
        return -magnitude if negative else magnitude, end
    fraction = 0.0
    if kind == (FRACTION_BELOW if negative else FRACTION_ABOVE):
        data = _take(key, end, 8)
        (fraction,) = DOUBLE.unpack(_complement(data) if negative else data)
        if not 0 < fraction < 1:
            _fail(end, "a fraction that is not between 0 and 1")
        end += 8
    elif kind != FLOAT or (negative and not magnitude):
        _fail(end - 1, f"{kind:02x} does not end this number")
    value = _join_float(magnitude, fraction, offset)
    return -value if negative else value, end


def _decode_whole(key: bytes, offset: int, negative: bool) -> tuple[int, int]:
    tag, start = key[offset], offset + 1
    length = NEGATIVE - tag if negative else tag - POSITIVE
    least = length
    if tag in (NEGATIVE_LONG, POSITIVE_LONG):
        length = int.from_bytes(_take(key, start, 2), "big") ^ (0xFFFF if negative else 0)
        start, least = start + 2, max(length, SHORT_BYTES_MAX + 1)
    magnitude = int.from_bytes(_take(key, start, length), "big")
    if negative:
        magnitude ^= (1 << 8 * length) - 1
    if (magnitude.bit_length() + 7) >> 3 != least:
        _fail(offset, "a number longer than it needs to be")
    return magnitude, start + length


def _join_float(magnitude: int, fraction: float, offset: int) -> float:
    """Return the float of both parts, which `pack` would take apart in the same way."""
    try:
        value = magnitude + fraction
    except OverflowError:
        value = math.inf
    if not math.isfinite(value) or math.modf(value)[0] != fraction or int(value) != magnitude:
        _fail(offset, "a number that no float can hold")
    return value


def _decode_time(key: bytes, offset: int, _depth: int) -> tuple[datetime, int]:
    time_us = int.from_bytes(_take(key, offset + 1, 8), "big")
    if time_us > LAST_US:
        _fail(offset, "a time after the year 9999")
    return FIRST_TIME + timedelta(microseconds=time_us), offset + 9


def _decode_id(key: bytes, offset: int, _depth: int) -> tuple[UUID, int]:
    return UUID(bytes=_take(key, offset + 1, 16)), offset + 17


def _decode_tuple(key: bytes, offset: int, depth: int) -> tuple[tuple[Any, ...], int]:
    if depth > DEPTH_MAX:
        _fail(offset, f"tuples are nested more than {DEPTH_MAX} deep")
    values, place = [], offset + 1
    while _take(key, place, 1)[0] != END:
        value, place = _decode(key, place, depth + 1)
        values.append(value)
    return tuple(values), place + 1


def _constant(value: Any) -> Decoder:
    return lambda _key, offset, _depth: (value, offset + 1)


DECODERS: dict[int, Decoder] = {
    NONE: _constant(None),
    BYTES: _decode_bytes,
    TEXT: _decode_text,
    **dict.fromkeys(FINITE, _decode_number),
    MINUS_INFINITY: _constant(-math.inf),
    INFINITY: _constant(math.inf),
    NAN: _constant(math.nan),
    FALSE: _constant(False),
    TRUE: _constant(True),
    TIME: _decode_time,
    ID: _decode_id,
    TUPLE: _decode_tuple,
}


def _take(key: bytes, offset: int, length: int) -> bytes:
    taken = key[offset : offset + length]
    if len(taken) < length:
        _fail(offset, f"expected {length} bytes, found {len(taken)}")
    return taken


def _complement(data: bytes) -> bytes:
    return (int.from_bytes(data, "big") ^ ALL_ONES).to_bytes(8, "big")


def _fail(offset: int, problem: str) -> NoReturn:
    raise _refusal(f"not a packed key: offset {offset}: {problem}", offset=offset)


def _refusal(message: str, **context: Any) -> InvalidInputError:
    return InvalidInputError(message, kind=ErrorKind.INVALID_KEY, **context)
