"""Segments as they are used: sealed ones that only answer, and the tail that grows.

Both find an entry in constant time. The tail has the offsets of its entries in memory; a
sealed segment has them in its own file, from where the two that matter are read. What a read
returns has been checked for its type, its bounds and its index, but not for its checksum:
that one is over batches, and `verify` is there for it.
"""

import struct
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NoReturn

import msgspec

from reef.errors import CorruptionError, InvalidInputError, NotFoundError
from reef.locallog.batching import Framed
from reef.locallog.codec import EntryCodec, decode_entry
from reef.locallog.entry import LogEntry
from reef.locallog.frames import (
    ENTRY_BYTES_MAX,
    FRAME,
    FRAME_BYTES,
    HEADER_BYTES,
    SEGMENT_BYTES_MAX,
    FrameType,
    SegmentHeader,
    commit_frame,
    crc32c,
    index_bytes,
    index_frame,
)
from reef.locallog.metastore import SegmentInfo
from reef.locallog.vfs import File

__all__ = ["Batch", "Sealed", "Segment", "Tail"]

SPAN_BYTES = 1 << 20
"""How much an iteration reads at once."""
OFFSETS_MAX = 8192
"""How many offsets of a sealed segment it reads at once."""


class Segment(ABC):
    """What sealed segments and the tail have in common: entries, found by their offsets."""

    def __init__(self, info: SegmentInfo, file: File, codec: EntryCodec) -> None:
        self.info = info
        self.file = file
        self.codec = codec

    @property
    @abstractmethod
    def last_index(self) -> int: ...

    @abstractmethod
    def bounds(self, first: int, last: int) -> Sequence[int]:
        """Return where each of these entries begins, and where the last one must have ended."""

    def get(self, index: int) -> LogEntry:
        """Return one entry, which the caller knows to be here."""
        start, end = self.bounds(index, index)
        return self._entry(index, self.file.read(end - start, start), 0, end - start)

    def entries(self, first: int, last: int) -> Iterator[LogEntry]:
        """Yield entries in order, of which many are read at once."""
        for low in range(first, last + 1, OFFSETS_MAX):
            bounds = self.bounds(low, min(last, low + OFFSETS_MAX - 1))
            place = 0
            while place < len(bounds) - 1:
                start = bounds[place]
                stop = max(bisect_right(bounds, start + SPAN_BYTES) - 1, place + 1)
                data = self.file.read(bounds[stop] - start, start)
                for number in range(place, stop):
                    here, end = bounds[number] - start, bounds[number + 1] - start
                    yield self._entry(low + number, data, here, end)
                place = stop

    def _entry(self, index: int, data: bytes, start: int, end: int) -> LogEntry:
        if end > len(data) or end - start < FRAME_BYTES:
            self.fail(index, f"{end - start} bytes expected, {len(data) - start} are left")
        kind, length = FRAME.unpack_from(data, start)
        start += FRAME_BYTES
        if kind != FrameType.ENTRY or start + length > end or length > ENTRY_BYTES_MAX:
            self.fail(index, f"a frame of type {kind} with {length} bytes, expected an entry")
        try:
            entry = decode_entry(self.codec, data[start : start + length])
        except CorruptionError as error:
            self.fail(index, error.message)
        if entry.index != index:
            self.fail(index, f"the entry says that it is {entry.index}")
        return entry

    def fail(self, index: int, what: str) -> NoReturn:
        raise CorruptionError(
            f"{self.info.name}, entry {index}: {what}",
            hint="Run `reef log verify`",
            object=self.info.name,
            index=index,
        )


class Sealed(Segment):
    """A segment that is complete, with its index in its file."""

    def __init__(self, info: SegmentInfo, file: File, codec: EntryCodec, count: int) -> None:
        super().__init__(info, file, codec)
        self._count = count
        """Entries in the file; more than in the log after a truncation of the tail."""

    @property
    def last_index(self) -> int:
        return self.info.max_index

    def with_info(self, info: SegmentInfo) -> "Sealed":
        return Sealed(info, self.file, self.codec, self._count)

    def bounds(self, first: int, last: int) -> Sequence[int]:
        place, wanted = first - self.info.base_index, last - first + 2
        have = min(wanted, self._count - place)
        data = self.file.read(4 * have, self.info.index_start + 4 * place)
        if len(data) < 4 * have:
            self.fail(first, f"the index ends {4 * have - len(data)} bytes early")
        end = self.info.index_start - FRAME_BYTES
        found = struct.unpack(f"<{have}I", data)
        bounds = found if have == wanted else (*found, end)
        before = HEADER_BYTES - 1
        for offset in bounds:
            if not before < offset <= end:
                self.fail(first, f"the index has offset {offset}, expected {before + 1} to {end}")
            before = offset
        return bounds


class Batch(msgspec.Struct, frozen=True):
    """An append, ready to be written: one write, one sync."""

    data: bytes
    offset: int
    """Where it goes."""
    offsets: list[int]
    index_start: int
    """Where the index begins, if this seals the segment; otherwise 0."""

    @property
    def end(self) -> int:
        return self.offset + len(self.data)


class Tail(Segment):
    """The segment that is appended to, by one thread at a time."""

    def __init__(
        self, info: SegmentInfo, file: File, codec: EntryCodec, offsets: Sequence[int], end: int
    ) -> None:
        super().__init__(info, file, codec)
        self._offsets = array("I", offsets)
        self._end = end
        """Where the next batch goes; 0 while even the header is still to be written."""
        self.count = len(offsets)
        """Entries that are durable, and shown. The last thing that an append changes."""

    @property
    def last_index(self) -> int:
        return self.info.base_index + self.count - 1

    @property
    def is_new(self) -> bool:
        """Whether nothing was ever committed to it."""
        return self._end == 0

    def bounds(self, first: int, last: int) -> Sequence[int]:
        place, stop, end = first - self.info.base_index, last - self.info.base_index + 1, self._end
        found = self._offsets[place : stop + 1]
        return found if len(found) > stop - place else (*found, end)

    def encode(self, framed: Framed, *, seal: bool = False) -> Batch:
        """Return the batch that appends these entries, with the index if it is the last one."""
        *offsets, end = accumulate(framed.sizes, initial=self._end or HEADER_BYTES)
        pieces = list(framed.pieces)
        count = self.count + len(offsets)
        index_start = 0
        if seal or end + index_bytes(count) > self.info.size_limit:
            index_start = end + FRAME_BYTES
            pieces.append(index_frame([*self._offsets, *offsets]))
            end += index_bytes(count)
        if end + FRAME_BYTES > SEGMENT_BYTES_MAX:
            raise InvalidInputError(
                f"a segment has at most {SEGMENT_BYTES_MAX} bytes, this batch ends at {end}",
                hint="Append fewer entries at once",
            )
        if self.is_new:
            info = self.info
            pieces.insert(0, SegmentHeader(info.base_index, info.id, info.codec).encode())
        body = b"".join(pieces)
        return Batch(body + commit_frame(crc32c(body)), self._end, offsets, index_start)

    def write(self, batch: Batch) -> None:
        """Make a batch durable. Nobody sees it yet."""
        self.file.write(batch.data, batch.offset)
        self.file.sync()

    def show(self, batch: Batch) -> None:
        """Let readers find what is durable now."""
        self._offsets.extend(batch.offsets)
        self._end = batch.end
        self.count += len(batch.offsets)

    def with_info(self, info: SegmentInfo) -> "Tail":
        return Tail(info, self.file, self.codec, self._offsets, self._end)

    def sealed(self, info: SegmentInfo) -> Sealed:
        """Return itself as it is from now on."""
        return Sealed(info, self.file, self.codec, self.count)


def missing(index: int, first: int, last: int) -> NotFoundError:
    """Return the error for an index that the log does not have."""
    held = f"it has {first} to {last}" if first else "it is empty"
    return NotFoundError(f"entry {index} is not in the log: {held}", index=index)
