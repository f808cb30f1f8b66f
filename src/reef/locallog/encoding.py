"""The bytes of a log: entries, and the frames of segment files.

**Entries** are encoded by a codec:

    uvarint index, uvarint term, uvarint type,
    uvarint length + data, uvarint length + extensions, time (15 or 16 bytes)

A uvarint has seven bits per byte, the lowest first, and a high bit where more follow, as Go
writes it. `EntryTime` is the binary form of a Go time: seconds since the year 1, nanoseconds
and a zone. Python's datetime has no nanoseconds and loses the zone in UTC, so the bytes are kept
and decoded on demand.

Every segment records the codec that wrote it. A codec of your own (encryption, compression) has
an id of `CUSTOM_CODEC_MIN` or above.

**Segment files** have a header, and frames, which one pass reads:

    0       4      7 8            16           24       32
    +-------+------+-+------------+------------+--------+------------------
    | magic | zero |v| base index | segment id | codec  | frames …
    +-------+------+-+------------+------------+--------+------------------

    frame   = type u8, zero u24, length u32 (of a commit: its CRC-32C), payload, zeros to 8
    types   = 1 entry, 2 index (u32 offset of each entry's frame), 3 commit (no payload)

A commit's checksum covers every byte since the end of the commit before it; the first one
starts at 0 and covers the header. Everything after the last commit is zeros, or a batch that
a crash has torn. Nothing here does I/O: a scan is given a function that reads.

Appends of many entries spend their time on one Python call per entry, so entries of the
format's own codec that share term, type and shape, as those of a batch mostly do, are encoded by
columns: all heads, all indexes, all data. The bytes are the same.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from enum import IntEnum
from functools import lru_cache
from typing import ClassVar, NamedTuple, Protocol

import google_crc32c
import msgspec
from msgspec.structs import astuple

from reef.errors import CorruptionError, ErrorKind, InvalidInputError, UnsupportedFormatError

U64_MAX = (1 << 64) - 1
UVARINT_BYTES_MAX = 10


@lru_cache(maxsize=1024)
def uvarints(*numbers: int) -> bytes:
    """Encode several numbers; cached, because entries repeat a few combinations."""
    return b"".join(map(uvarint, numbers))


def uvarint(number: int) -> bytes:
    """Encode a number: seven bits per byte, the lowest first.

    >>> uvarint(300).hex()
    'ac02'
    """
    if not 0 <= number <= U64_MAX:
        raise InvalidInputError(f"{number} is out of range for an unsigned 64-bit integer")
    coded = bytearray()
    while number >= 128:
        coded.append(number & 127 | 128)
        number >>= 7
    coded.append(number)
    return bytes(coded)


def read_uvarint(data: bytes, at: int) -> tuple[int, int]:
    """Decode the number at `at`; return it and the offset after it."""
    byte = data[at]
    if byte < 128:
        return byte, at + 1
    number, shift, start = byte & 127, 7, at
    while True:
        at += 1
        byte = data[at]
        number |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
        if at - start >= UVARINT_BYTES_MAX - 1:
            raise InvalidInputError(
                f"the number at {start} has more than {UVARINT_BYTES_MAX} bytes"
            )
    if number > U64_MAX:
        raise InvalidInputError(f"the number at {start} has more than 64 bits")
    return number, at + 1


# --- entries ------------------------------------------------------------------------


V1 = struct.Struct(">BqiH")
TIME_BYTES = V1.size
UNIX_EPOCH_S = 62_135_596_800
"""Unix time 0, in seconds since 0001-01-01T00:00:00Z."""
UTC_ZONE = 0xFFFF
"""Marks UTC, as opposed to a zone with an offset of 0 minutes."""
ZONE_MINUTES_MAX = (1 << 15) - 1


class EntryType(IntEnum):
    """Entry types of Raft. Unknown types are kept as integers."""

    COMMAND = 0
    NOOP = 1
    ADD_PEER_DEPRECATED = 2
    REMOVE_PEER_DEPRECATED = 3
    BARRIER = 4
    CONFIGURATION = 5


class EntryTime:
    """The time of an append, with nanoseconds and the original zone."""

    __slots__ = ("raw",)

    LENGTHS: ClassVar = {1: 15, 2: 16}
    """Encoded length by version; version 2 has seconds in its zone offset."""

    def __init__(self, raw: bytes) -> None:
        if not raw or self.LENGTHS.get(raw[0]) != len(raw):
            raise InvalidInputError(
                f"invalid time {raw.hex()}: expected 01 and 14 bytes, or 02 and 15 bytes"
            )
        self.raw = raw

    @classmethod
    def from_unix_ns(cls, unix_ns: int, *, zone_s: int | None = None) -> "EntryTime":
        """Return a time in a zone `zone_s` seconds east of UTC; by default in UTC."""
        seconds, nanoseconds = divmod(unix_ns, 1_000_000_000)
        zone, odd_s = (-1, 0) if zone_s is None else _minutes(zone_s)
        try:
            head = V1.pack(2 if odd_s else 1, seconds + UNIX_EPOCH_S, nanoseconds, zone & 0xFFFF)
        except struct.error as error:
            raise InvalidInputError(f"{unix_ns} ns is out of range for an entry's time") from error
        return cls(head + struct.pack(">b", odd_s) if odd_s else head)

    @classmethod
    def from_datetime(cls, value: datetime) -> "EntryTime":
        """Convert a timezone-aware datetime."""
        offset = value.utcoffset()
        if offset is None:
            raise InvalidInputError(f"{value} has no time zone", hint="Set tzinfo")
        micros = (value - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
        zone_s = None if value.tzinfo is UTC else int(offset.total_seconds())
        return cls.from_unix_ns(micros * 1000, zone_s=zone_s)

    @property
    def seconds(self) -> int:
        """Whole seconds since 0001-01-01T00:00:00Z."""
        return int.from_bytes(self.raw[1:9], "big", signed=True)

    @property
    def nanoseconds(self) -> int:
        return int.from_bytes(self.raw[9:13], "big", signed=True)

    @property
    def unix_ns(self) -> int:
        return (self.seconds - UNIX_EPOCH_S) * 1_000_000_000 + self.nanoseconds

    @property
    def zone_s(self) -> int:
        """Seconds east of UTC."""
        if self.raw[13:15] == b"\xff\xff":
            return 0
        zone = int.from_bytes(self.raw[13:15], "big", signed=True) * 60
        return zone + int.from_bytes(self.raw[15:], "big", signed=True)

    @property
    def is_zero(self) -> bool:
        """Whether it is the zero time, which means that no time was set."""
        return self.unix_ns == -UNIX_EPOCH_S * 1_000_000_000

    def to_datetime(self) -> datetime:
        """Return it as a datetime in its zone, rounded down to a microsecond."""
        zone = timezone(timedelta(seconds=self.zone_s)) if self.zone_s else UTC
        local = datetime(1, 1, 1) + timedelta(
            seconds=self.seconds + self.zone_s, microseconds=self.nanoseconds // 1000
        )
        return local.replace(tzinfo=zone)

    def __str__(self) -> str:
        """Format as RFC 3339, without trailing zeros; as hex if it is out of datetime's range."""
        try:
            local = self.to_datetime()
        except (OverflowError, ValueError):
            return self.raw.hex()
        fraction = f".{self.nanoseconds:09}".rstrip("0").rstrip(".")
        sign = "-" if self.zone_s <= -60 else "+"  # an offset below a minute is formatted as +00:00
        hours, minutes = divmod(abs(self.zone_s) // 60, 60)
        zone = f"{sign}{hours:02}:{minutes:02}" if self.zone_s else "Z"
        return local.replace(tzinfo=None, microsecond=0).isoformat() + fraction + zone

    def __repr__(self) -> str:
        return f"EntryTime({self})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EntryTime) and self.raw == other.raw

    def __hash__(self) -> int:
        return hash(self.raw)

    def __reduce__(self) -> "tuple[type[EntryTime], tuple[bytes]]":
        return EntryTime, (self.raw,)


def _minutes(zone_s: int) -> tuple[int, int]:
    """Split an offset into minutes and seconds, both with its sign."""
    sign = -1 if zone_s < 0 else 1
    minutes, seconds = divmod(abs(zone_s), 60)
    if minutes * sign == -1:
        raise InvalidInputError(
            "an offset of one minute west of UTC cannot be distinguished from UTC"
        )
    if minutes > ZONE_MINUTES_MAX:
        raise InvalidInputError(f"a zone offset of {zone_s} s is out of range")
    return minutes * sign, seconds * sign


ZERO_TIME = EntryTime(V1.pack(1, 0, 0, UTC_ZONE))


TYPE_MAX = 255
"""The Go library has one byte for the type of an entry."""


class LogEntry(msgspec.Struct, frozen=True, gc=False):
    """One entry of the log."""

    index: int
    """Consecutive: each entry has the index after its predecessor's."""
    term: int = 0
    type: int = EntryType.COMMAND
    data: bytes = b""
    extensions: bytes = b""
    """For middleware between Raft and the log."""
    appended_at: EntryTime = ZERO_TIME
    """By the leader's clock; the zero time if it is not set. A datetime is converted."""

    def __post_init__(self) -> None:
        given: object = self.appended_at
        if isinstance(given, datetime):
            msgspec.structs.force_setattr(self, "appended_at", EntryTime.from_datetime(given))

    def encode(self) -> bytes:
        """Encode with the format's own codec; InvalidInputError for a type it has no byte for."""
        if not 0 <= self.type <= TYPE_MAX:
            raise bad_type(self)
        data, extensions = _plain(self.data), _plain(self.extensions)
        return b"".join(
            (
                uvarint(self.index),
                uvarints(self.term, self.type, len(data)),
                data,
                uvarints(len(extensions)),
                extensions,
                self.appended_at.raw,
            )
        )

    @classmethod
    def decode(cls, payload: bytes) -> "LogEntry":
        """Decode such bytes; CorruptionError if they are not an entry."""
        try:
            index, at = read_uvarint(payload, 0)
            term, at = read_uvarint(payload, at)
            kind, at = read_uvarint(payload, at)
            length, at = read_uvarint(payload, at)
            data = payload[at : at + length]
            at += length
            extension_length, at = read_uvarint(payload, at)
            extensions = payload[at : at + extension_length]
            appended_at = EntryTime(payload[at + extension_length :])
        except (IndexError, InvalidInputError) as error:
            raise CorruptionError(f"{len(payload)} bytes are not an entry: {error}") from error
        if len(data) != length or len(extensions) != extension_length:
            raise CorruptionError(f"{len(payload)} bytes are not an entry: its lengths exceed them")
        return cls(index, term, kind, data, extensions, appended_at)


def bad_type(entry: LogEntry) -> InvalidInputError:
    """Return the error for a type that does not fit in its byte."""
    return InvalidInputError(f"entry {entry.index} has type {entry.type}, expected 0 to {TYPE_MAX}")


def _plain(given: bytes) -> bytes:
    """Convert to bytes: the length of another buffer may count items of several bytes."""
    return given if type(given) is bytes else memoryview(given).tobytes()


# --- codecs -------------------------------------------------------------------------


CUSTOM_CODEC_MIN = 1 << 16
"""Lower ids are reserved, as in the Go library."""


class EntryCodec(Protocol):
    """Encodes entries to bytes, and decodes them."""

    @property
    def id(self) -> int:
        """Stored in segments and in the meta store; another id is another format."""

    def encode(self, entry: LogEntry) -> bytes: ...

    def decode(self, data: bytes) -> LogEntry:
        """Decode an entry; any exception means that `encode` did not write these bytes."""


class BinaryCodec:
    """The codec of the format, as the Go library writes it."""

    id = 1

    def encode(self, entry: LogEntry) -> bytes:
        return entry.encode()

    def decode(self, data: bytes) -> LogEntry:
        return LogEntry.decode(data)


BINARY = BinaryCodec()


def check_id(codec: EntryCodec) -> None:
    """Raise InvalidInputError if a codec's id is out of range."""
    if not isinstance(codec.id, int) or not 0 <= codec.id < U64_MAX:
        raise InvalidInputError(
            f"codec id {codec.id} is out of range: expected 0 to {U64_MAX - 1}",
            kind=ErrorKind.INVALID_OPTION,
        )


def decode_entry(codec: EntryCodec, data: bytes) -> LogEntry:
    """Decode an entry with any codec; CorruptionError if that fails."""
    try:
        return codec.decode(data)
    except CorruptionError:
        raise
    except Exception as error:
        raise CorruptionError(f"{len(data)} bytes are not an entry: {error!r}") from error


def torn_index(codec: EntryCodec, payload: bytes) -> int:
    """Return the index of an entry whose end a crash may have cut off, leaving zeros.

    0 unless its length is that of the frame, so that the frame's length is not damaged. With the
    format's own codec the lengths in the entry show that; with another one, encoding it again.
    """
    try:
        if codec.id != BINARY.id:
            entry = codec.decode(payload)
            return entry.index if codec.encode(entry) == payload else 0
        index, at = read_uvarint(payload, 0)
        _, at = read_uvarint(payload, at)
        _, at = read_uvarint(payload, at)
        length, at = read_uvarint(payload, at)
        rest = payload[at + length :]
        if not any(rest):  # extensions and time are cut off
            return index if len(rest) > TIME_BYTES else 0
        extension_length, at = read_uvarint(rest, 0)
        time = rest[at + extension_length :]
        is_whole = EntryTime.LENGTHS.get(time[0]) == len(time)
        return index if is_whole or (len(time) >= TIME_BYTES and not any(time)) else 0
    except Exception:  # as from any codec: these bytes are not an entry
        return 0


MAGIC = 0x58EB6B0D
VERSION = 0
HEADER = struct.Struct("<I3xBQQQ")
HEADER_BYTES = HEADER.size
FRAME = struct.Struct("<B3xI")
FRAME_BYTES = FRAME.size
ALIGNMENT = 8
PADS = [bytes(-length % ALIGNMENT) for length in range(ALIGNMENT)]
ENTRY_BYTES_MAX = 64 << 20
SEGMENT_BYTES_MAX = (1 << 31) - 1
WINDOW_BYTES = 1 << 20

Read = Callable[[int, int], bytes]
"""Takes (length, offset); returns fewer bytes only at the end of the file."""


class FrameType(IntEnum):
    """Type of a frame's payload."""

    ENTRY = 1
    INDEX = 2
    COMMIT = 3


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """Identity of a segment, at the start of its file."""

    base_index: int
    id: int
    codec: int

    def encode(self) -> bytes:
        return HEADER.pack(MAGIC, VERSION, self.base_index, self.id, self.codec)


def read_header(data: bytes, name: str) -> SegmentHeader:
    """Decode the first 32 bytes of a file."""
    if len(data) < HEADER_BYTES:
        raise CorruptionError(
            f"{name}: the file has {len(data)} bytes, expected at least 32", object=name, offset=0
        )
    magic, version, base_index, segment_id, codec = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise CorruptionError(
            f"{name}, offset 0: magic {magic:#x}, expected {MAGIC:#x}", object=name, offset=0
        )
    if version != VERSION:
        raise UnsupportedFormatError(
            f"{name} has segment format {version}, this release reads {VERSION}",
            hint="Upgrade Reef",
            object=name,
        )
    return SegmentHeader(base_index, segment_id, codec)


def segment_name(base_index: int, segment_id: int) -> str:
    """Return the name of a segment's file.

    >>> segment_name(1000, 171)
    '00000000000000001000-00000000000000ab.wal'
    """
    return f"{base_index:020}-{segment_id:016x}.wal"


def crc32c(data: bytes) -> int:
    """Return the Castagnoli checksum."""
    checksum: int = google_crc32c.value(data)
    return checksum


# --- writing ------------------------------------------------------------------------


def index_bytes(count: int) -> int:
    """Return the size of an index frame of `count` entries.

    >>> index_bytes(3)
    24
    """
    return FRAME_BYTES + -(-4 * count // ALIGNMENT) * ALIGNMENT


def index_frame(offsets: Sequence[int]) -> bytes:
    """Return the frame that seals a segment."""
    array = struct.pack(f"<{len(offsets)}I", *offsets)
    return FRAME.pack(FrameType.INDEX, len(array)) + array + PADS[len(array) & 7]


def commit_frame(checksum: int) -> bytes:
    """Return the frame that ends a batch."""
    return FRAME.pack(FrameType.COMMIT, checksum)


# --- reading ------------------------------------------------------------------------


class Frame(NamedTuple):
    """A frame of a file."""

    type: int
    offset: int
    length: int
    """Length of the payload; 0 for a commit."""
    checksum: int = 0
    """Stored checksum of a commit."""
    valid: bool = True
    """Whether the checksum of a commit matches the bytes since the last one."""

    @property
    def end(self) -> int:
        return self.offset + FRAME_BYTES + self.length + (-self.length & 7)


def frames(read: Read, size: int, start: int = HEADER_BYTES) -> Iterator[Frame]:
    """Yield all frames up to zeros, an invalid header, or the end of the file.

    From another `start` they are those of a batch that is believed to begin there.
    """
    window = _Window(read, size)
    offset, batch_start = start, 0 if start == HEADER_BYTES else start
    while offset + FRAME_BYTES <= size:
        kind, number = FRAME.unpack_from(*window.at(offset, FRAME_BYTES))
        if kind == FrameType.COMMIT:
            checksum = crc32c(window.cut(batch_start, offset))
            yield Frame(kind, offset, 0, number, checksum == number)
            offset += FRAME_BYTES
            batch_start = offset
            continue
        if kind not in (FrameType.ENTRY, FrameType.INDEX):
            return
        frame = Frame(kind, offset, number)
        if frame.end > size:
            return
        yield frame
        offset = frame.end


class _Window:
    """A part of a file in memory, which moves with the scan."""

    def __init__(self, read: Read, size: int) -> None:
        self._read = read
        self._size = size
        self._start = 0
        self._data = b""

    def at(self, offset: int, length: int) -> tuple[bytes, int]:
        """Return a buffer with the requested bytes, and their offset in it."""
        place = offset - self._start
        if place + length > len(self._data):
            self._start, place = offset, 0
            self._data = self._read(min(WINDOW_BYTES, self._size - offset), offset)
        return self._data, place

    def cut(self, start: int, end: int) -> bytes:
        if start >= self._start and end <= self._start + len(self._data):
            return self._data[start - self._start : end - self._start]
        return self._read(end - start, start)


# --- entries as frames --------------------------------------------------------------


LOW_BITS = [bytes([bits | 128]) for bits in range(128)]
"""First bytes of uvarints with more than one byte."""
NO_EXTENSIONS = uvarint(0)
COLUMNS_MIN = 4
"""Fewer entries are encoded one by one."""
SHARING_MIN = 4
"""How often each length must occur on average: a shape is built for each length."""
SMALL_BYTES = ENTRY_BYTES_MAX - 64
"""Entries with data of up to this size never exceed the limit."""


class Framed(NamedTuple):
    """Frames of entries, in pieces."""

    pieces: list[bytes]
    sizes: list[int]
    """Size of each entry's frame, with its padding."""


def frame_entries(codec: EntryCodec, entries: Sequence[LogEntry]) -> Framed:
    """Encode entries with consecutive indexes as frames."""
    if type(codec) is BinaryCodec and len(entries) >= COLUMNS_MIN:
        framed = _by_columns(entries)
        if framed is not None:
            return framed
    payloads = [codec.encode(entry) for entry in entries]
    if max(map(len, payloads)) > ENTRY_BYTES_MAX:
        raise InvalidInputError(f"an encoded entry exceeds {ENTRY_BYTES_MAX} bytes")
    return frame_all(payloads)


def frame_all(payloads: Sequence[bytes]) -> Framed:
    """Return the frames of encoded entries."""
    framed = Framed([], [])
    for payload in payloads:
        length = len(payload)
        framed.pieces.extend((_head(length), payload, PADS[length & 7]))
        framed.sizes.append(_size(length))
    return framed


def _by_columns(entries: Sequence[LogEntry]) -> Framed | None:
    """Encode entries that share term, type and shape; return None for others."""
    count = len(entries)
    columns = zip(*map(astuple, entries), strict=False)  # a subclass may have more fields
    indexes, terms, kinds, data, extensions, times, *_ = columns
    width = len(uvarint(indexes[0]))
    alike = (
        terms.count(terms[0]) == count
        and kinds.count(kinds[0]) == count
        and extensions.count(b"") == count
        and set(map(type, data)) == {bytes}
        and width == len(uvarint(indexes[-1])) > 1
    )
    if not alike:
        return None
    raws = [time.raw for time in times]
    lengths = list(map(len, data))
    one_time, one_length = raws.count(raws[0]) == count, lengths.count(lengths[0]) == count
    different = {lengths[0]} if one_length else set(lengths)
    if max(different) > SMALL_BYTES or len(different) * SHARING_MIN > count:
        return None
    if not one_time and set(map(len, raws)) != {TIME_BYTES}:
        return None
    around = width + len(NO_EXTENSIONS) + len(raws[0])
    shapes = {n: _Shape.of(n, around, terms[0], kinds[0]) for n in different}
    coded = _indexes(indexes[0], indexes[-1])
    if one_time and one_length:
        return _of_one_shape(shapes[lengths[0]], raws[0], coded, data)
    return _of_several([shapes[length] for length in lengths], raws, coded, data)


def _of_one_shape(
    shape: "_Shape", time: bytes, indexes: list[bytes], data: Sequence[bytes]
) -> Framed:
    count = len(data)
    pieces = [shape.head, b"", shape.numbers, b"", NO_EXTENSIONS + time + shape.pad] * count
    pieces[1::5], pieces[3::5] = indexes, data
    return Framed(pieces, [shape.size] * count)


def _of_several(
    shapes: "list[_Shape]", times: list[bytes], indexes: list[bytes], data: Sequence[bytes]
) -> Framed:
    pieces = [NO_EXTENSIONS] * (7 * len(data))
    pieces[0::7] = [shape.head for shape in shapes]
    pieces[1::7] = indexes
    pieces[2::7] = [shape.numbers for shape in shapes]
    pieces[3::7] = data
    pieces[5::7] = times
    pieces[6::7] = [shape.pad for shape in shapes]
    return Framed(pieces, [shape.size for shape in shapes])


class _Shape(NamedTuple):
    """The bytes that entries with data of one length share."""

    head: bytes
    numbers: bytes
    pad: bytes
    size: int

    @classmethod
    def of(cls, length: int, around: int, term: int, kind: int) -> "_Shape":
        numbers = uvarints(term, kind, length)
        payload = around + len(numbers) + length
        return cls(_head(payload), numbers, PADS[payload & 7], _size(payload))


def _indexes(first: int, last: int) -> list[bytes]:
    """Encode consecutive indexes from 128 on: neighbours differ in the first byte only."""
    coded: list[bytes] = []
    for above in range(first >> 7, (last >> 7) + 1):
        low, high = max(first, above << 7) & 127, min(last, above << 7 | 127) & 127
        end = uvarint(above << 7)[1:]
        coded += [bits + end for bits in LOW_BITS[low : high + 1]]
    return coded


def _head(length: int) -> bytes:
    return FRAME.pack(FrameType.ENTRY, length)


def _size(length: int) -> int:
    return FRAME_BYTES + length + (-length & 7)
