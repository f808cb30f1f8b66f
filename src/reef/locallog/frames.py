"""Segment files: header, frames, and one pass over all of them.

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
from enum import IntEnum
from typing import NamedTuple

import google_crc32c
from msgspec.structs import astuple

from reef.errors import CorruptionError, InvalidInputError, UnsupportedFormatError
from reef.locallog.entry import (
    TIME_BYTES,
    BinaryCodec,
    EntryCodec,
    LogEntry,
    uvarint,
    uvarints,
)

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
