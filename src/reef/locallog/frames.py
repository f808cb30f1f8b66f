"""Segment files, byte by byte: header, frames, and one pass over all of them.

    0       4      7 8            16           24       32
    +-------+------+-+------------+------------+--------+------------------
    | magic | zero |v| base index | segment id | codec  | frames …
    +-------+------+-+------------+------------+--------+------------------

    frame   = type u8, zero u24, length u32 (of a commit: its CRC-32C), payload, zeros to 8
    types   = 1 entry, 2 index (u32 offset of each entry's frame), 3 commit (no payload)

A commit's checksum covers every byte since the end of the commit before it; the first one
begins at 0 and covers the header. Everything behind the last commit is zeros, or a batch that
a crash has torn. Nothing here does I/O: a scan is given a way to read.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import google_crc32c

from reef.errors import CorruptionError, UnsupportedFormatError

__all__ = [
    "ENTRY_BYTES_MAX",
    "FRAME_BYTES",
    "HEADER_BYTES",
    "SEGMENT_BYTES_MAX",
    "Frame",
    "FrameType",
    "SegmentHeader",
    "commit_frame",
    "crc32c",
    "frames",
    "index_bytes",
    "index_frame",
    "read_header",
    "segment_name",
]

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
"""Returns (length, offset) of a file, fewer bytes only at its end."""


class FrameType(IntEnum):
    """What a frame holds."""

    ENTRY = 1
    INDEX = 2
    COMMIT = 3


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """Which segment a file says it is."""

    base_index: int
    id: int
    codec: int

    def encode(self) -> bytes:
        return HEADER.pack(MAGIC, VERSION, self.base_index, self.id, self.codec)


def read_header(data: bytes, name: str) -> SegmentHeader:
    """Return what the first 32 bytes of a file say."""
    if len(data) < HEADER_BYTES:
        raise CorruptionError(f"{name}: {len(data)} bytes, a header has 32", object=name, offset=0)
    magic, version, base_index, segment_id, codec = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise CorruptionError(
            f"{name}, offset 0: magic {magic:#x}, expected {MAGIC:#x}", object=name, offset=0
        )
    if version != VERSION:
        raise UnsupportedFormatError(
            f"{name} is a segment of format {version}, this release reads {VERSION}",
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
    """Return how long an index frame of `count` entries is.

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
    """A frame as it was found."""

    type: int
    offset: int
    length: int
    """Of the payload; 0 for a commit."""
    checksum: int = 0
    """Of a commit: what it says."""
    valid: bool = True
    """Of a commit: whether the bytes since the last one have that checksum."""

    @property
    def end(self) -> int:
        return self.offset + FRAME_BYTES + self.length + (-self.length & 7)


def frames(read: Read, size: int, start: int = HEADER_BYTES) -> Iterator[Frame]:
    """Yield all frames from the first on, up to zeros, a bad header, or the file's end.

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
    """A stretch of a file in memory, moved along as the scan goes."""

    def __init__(self, read: Read, size: int) -> None:
        self._read = read
        self._size = size
        self._start = 0
        self._data = b""

    def at(self, offset: int, length: int) -> tuple[bytes, int]:
        """Return bytes that hold the wanted ones, and where in them those begin."""
        place = offset - self._start
        if place + length > len(self._data):
            self._start, place = offset, 0
            self._data = self._read(min(WINDOW_BYTES, self._size - offset), offset)
        return self._data, place

    def cut(self, start: int, end: int) -> bytes:
        if start >= self._start and end <= self._start + len(self._data):
            return self._data[start - self._start : end - self._start]
        return self._read(end - start, start)
