"""Segments: sealed ones, which are read-only, and the tail, which grows.

Both find an entry in constant time. The tail has the offsets of its entries in memory; a
sealed segment has them in its own file, from which two are read. A read
checks type, bounds and index of an entry, but no checksum: those cover batches, and are checked
by `verify`.
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
from reef.files import File
from reef.locallog.encoding import (
    ENTRY_BYTES_MAX,
    FRAME,
    FRAME_BYTES,
    HEADER_BYTES,
    SEGMENT_BYTES_MAX,
    EntryCodec,
    Framed,
    FrameType,
    LogEntry,
    SegmentHeader,
    commit_frame,
    crc32c,
    decode_entry,
    index_bytes,
    index_frame,
)
from reef.locallog.metastore import SegmentInfo

SPAN_BYTES = 1 << 20
"""Bytes that an iteration reads at once."""
OFFSETS_MAX = 8192
"""Offsets of a sealed segment that it reads at once."""


class LogSegment(ABC):
    """Base of sealed segments and the tail: entries, found by their offsets."""

    def __init__(self, info: SegmentInfo, file: File, codec: EntryCodec) -> None:
        self.info = info
        self.file = file
        self.codec = codec

    @property
    @abstractmethod
    def last_index(self) -> int: ...

    @abstractmethod
    def bounds(self, first: int, last: int) -> Sequence[int]:
        """Return the start offset of each of these entries, and the end of the last one."""

    def get(self, index: int) -> LogEntry:
        """Return one entry, which must be in this segment."""
        start, end = self.bounds(index, index)
        return self._entry(index, self.file.read(end - start, start), 0, end - start)

    def entries(self, first: int, last: int) -> Iterator[LogEntry]:
        """Yield entries in order, with one read for many of them."""
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
            self.fail(index, f"expected {end - start} bytes, found {len(data) - start}")
        kind, length = FRAME.unpack_from(data, start)
        start += FRAME_BYTES
        if kind != FrameType.ENTRY or start + length > end or length > ENTRY_BYTES_MAX:
            self.fail(index, f"expected an entry, found a frame of type {kind} with {length} bytes")
        try:
            entry = decode_entry(self.codec, data[start : start + length])
        except CorruptionError as error:
            self.fail(index, error.message)
        if entry.index != index:
            self.fail(index, f"the stored entry has index {entry.index}")
        return entry

    def fail(self, index: int, problem: str) -> NoReturn:
        raise CorruptionError(
            f"{self.info.name}, entry {index}: {problem}",
            hint="Run `reef log verify`",
            object=self.info.name,
            index=index,
        )


class SealedSegment(LogSegment):
    """A complete segment, whose file ends with its index."""

    def __init__(self, info: SegmentInfo, file: File, codec: EntryCodec, count: int) -> None:
        super().__init__(info, file, codec)
        self._count = count
        """Entries in the file; more than in the log after a truncation of the tail."""

    @property
    def last_index(self) -> int:
        return self.info.max_index

    def with_info(self, info: SegmentInfo) -> "SealedSegment":
        return SealedSegment(info, self.file, self.codec, self._count)

    def bounds(self, first: int, last: int) -> Sequence[int]:
        place, count = first - self.info.base_index, last - first + 2
        have = min(count, self._count - place)
        data = self.file.read(4 * have, self.info.index_start + 4 * place)
        if len(data) < 4 * have:
            self.fail(first, f"the index ends {4 * have - len(data)} bytes early")
        end = self.info.index_start - FRAME_BYTES
        offsets = struct.unpack(f"<{have}I", data)
        bounds = offsets if have == count else (*offsets, end)
        before = HEADER_BYTES - 1
        for offset in bounds:
            if not before < offset <= end:
                self.fail(first, f"the index has offset {offset}, expected {before + 1} to {end}")
            before = offset
        return bounds


class AppendBatch(msgspec.Struct, frozen=True):
    """An append, ready to be written: one write, one sync."""

    data: bytes
    offset: int
    """Where it is written."""
    offsets: list[int]
    index_start: int
    """Where the index begins, if this seals the segment; otherwise 0."""

    @property
    def end(self) -> int:
        return self.offset + len(self.data)


class TailSegment(LogSegment):
    """The segment for appends, by one thread at a time."""

    def __init__(
        self, info: SegmentInfo, file: File, codec: EntryCodec, offsets: Sequence[int], end: int
    ) -> None:
        super().__init__(info, file, codec)
        self._offsets = array("I", offsets)
        self._end = end
        """Where the next batch is written; 0 before the header is."""
        self.count = len(offsets)
        """Durable entries, which readers see. An append changes this last."""

    @property
    def last_index(self) -> int:
        return self.info.base_index + self.count - 1

    @property
    def is_new(self) -> bool:
        """Whether nothing was committed to it yet."""
        return self._end == 0

    def bounds(self, first: int, last: int) -> Sequence[int]:
        place, stop, end = first - self.info.base_index, last - self.info.base_index + 1, self._end
        offsets = self._offsets[place : stop + 1]
        return offsets if len(offsets) > stop - place else (*offsets, end)

    def encode(self, framed: Framed, *, seal: bool = False) -> AppendBatch:
        """Encode an append of these entries, with the index if it fills the segment."""
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
        return AppendBatch(body + commit_frame(crc32c(body)), self._end, offsets, index_start)

    def write(self, batch: AppendBatch) -> None:
        """Make a batch durable. Readers do not see it yet."""
        self.file.write(batch.data, batch.offset)
        self.file.sync()

    def publish(self, batch: AppendBatch) -> None:
        """Make a durable batch visible to readers."""
        self._offsets.extend(batch.offsets)
        self._end = batch.end
        self.count += len(batch.offsets)

    def with_info(self, info: SegmentInfo) -> "TailSegment":
        return TailSegment(info, self.file, self.codec, self._offsets, self._end)

    def sealed(self, info: SegmentInfo) -> SealedSegment:
        """Return the same segment, sealed."""
        return SealedSegment(info, self.file, self.codec, self.count)


def not_in_log(index: int, first: int, last: int) -> NotFoundError:
    """Return the error for an index outside of the log."""
    held = f"it has {first} to {last}" if first else "it is empty"
    return NotFoundError(f"entry {index} is not in the log: {held}", index=index)
