"""Sorted runs: the rows of the memtable in key order, immutable, searched where they are stored.

A run is a sequence of chunks of columns. Rows are sorted by key, the versions of one key newest
first, and all versions of a key are in one chunk:

    run      chunk 0  a b c d   chunk 1  e f g h   …        each chunk is one `Versions`
    fences            a   c              e   g              every 16th key, as Python bytes

A search bisects the chunks' first keys, then the chunk's fences, and reads about four keys of
the Arrow array: no list of all keys is ever built. A batch becomes a run as it is and is sorted
by its first reader, so that a bulk load that nothing reads is not sorted at all.

Runs are merged a part at a time (`split_off`): a merge of any length is done in steps of bounded
size, and between two steps all rows are in exactly one run.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import methodcaller

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reef import kernel
from reef.engine.read.merge import drop_superseded, sorted_places
from reef.formats.schema import Schema
from reef.formats.versions import RowBuffers, Versions, key_place, merge_rows, row_buffers
from reef.types import KeyRange

FENCE_ROWS = 16
"""One key in so many is kept as bytes: three or four bytes per row."""
PIECE_ROWS = 128
PIECE_ROWS_MAX = 8_192
PIECE_BYTES = 1 << 20
"""A scan reads this many rows or bytes of a run first, then twice as many each time."""
FEW_KEYS = 8
"""So few keys are searched one by one."""
ROW_BYTES = 13
"""Bytes of the LSN, the sequence and the kind of a row."""

Places = npt.NDArray[np.int64]

_as_py = methodcaller("as_py")


class Chunk:
    """Sorted rows, and the fences to search them."""

    __slots__ = ("_buffers", "_fences", "_held", "rows")

    def __init__(self, rows: Versions, held: int = 0) -> None:
        self.rows = rows
        self._held = held or len(rows)
        """How many rows its buffers hold: more than its own if it is a slice."""
        self._fences: list[bytes] | None = None
        self._buffers: tuple[Schema, RowBuffers | None] | None = None

    def buffers(self, schema: Schema) -> RowBuffers | None:
        """Return the rows as the kernel merges them; None if it cannot."""
        known = self._buffers
        if known is None or known[0] is not schema:
            rows = None if self.rows.has_partial else row_buffers(self.rows, schema)
            known = self._buffers = schema, rows
        return known[1]

    def __len__(self) -> int:
        return len(self.rows)

    def __reduce__(self) -> tuple[type["Chunk"], tuple[Versions]]:
        return Chunk, (self.rows,)

    @property
    def fences(self) -> list[bytes]:
        fences = self._fences
        if fences is None:
            places = np.arange(0, len(self), FENCE_ROWS, dtype=np.int64)
            fences = self._fences = self.rows.keys.take(pa.array(places)).to_pylist()
        return fences

    def left(self, key: bytes) -> int:
        """Return the place of the first row whose key is not below `key`."""
        if kernel.native is not None:
            return key_place(self.rows.keys, key)
        block = bisect_left(self.fences, key)
        if not block:
            return 0
        last = min(block * FENCE_ROWS, len(self))
        first = (block - 1) * FENCE_ROWS + 1
        return bisect_left(self.rows.keys, key, first, last, key=_as_py)

    def right(self, key: bytes) -> int:
        """Return the place of the first row whose key is above `key`."""
        if kernel.native is not None:
            return key_place(self.rows.keys, key, above=True)
        block = bisect_right(self.fences, key)
        if not block:
            return 0
        last = min(block * FENCE_ROWS, len(self))
        first = (block - 1) * FENCE_ROWS + 1
        return bisect_right(self.rows.keys, key, first, last, key=_as_py)

    def find(self, key: bytes) -> range:
        """Return the places of a key's versions, newest first."""
        first = self.left(key)
        keys = self.rows.keys
        if first == len(self) or keys[first].as_py() != key:
            return range(0)
        if first + 1 == len(self) or keys[first + 1].as_py() != key:
            return range(first, first + 1)
        return range(first, self.right(key))

    def places_of(self, keys: list[bytes]) -> Places:
        """Return the places of all versions of some sorted keys."""
        if len(keys) <= FEW_KEYS:
            return np.array([place for key in keys for place in self.find(key)], np.int64)
        if len(keys) * FENCE_ROWS > len(self):
            return _matching(self.rows.keys, keys)
        places = self._between_fences(keys)
        return places[_matching(self.rows.keys.take(pa.array(places)), keys)]

    def _between_fences(self, keys: list[bytes]) -> Places:
        """Return the places of all rows that are between the same two fences as one of the keys."""
        lasts = {bisect_right(self.fences, key) for key in keys}
        if not self.rows.distinct:  # versions of a key may continue behind a fence
            lasts |= {block for key in keys for block in self._blocks_of(key)}
        starts = (np.array(sorted(lasts - {0}), np.int64) - 1) * FENCE_ROWS
        places = (starts[:, None] + np.arange(FENCE_ROWS)).ravel()
        return places[: np.searchsorted(places, len(self))]

    def _blocks_of(self, key: bytes) -> range:
        return range(bisect_left(self.fences, key), bisect_right(self.fences, key))

    def behind(self, place: int) -> "Chunk":
        """Return the rows from a place on; copied if they are much less than their buffers hold."""
        rows = self.rows.slice(place, len(self))
        if 4 * len(rows) > 3 * self._held:
            return Chunk(rows, self._held)
        copied = rows.take(np.arange(len(rows), dtype=np.int64))
        return Chunk(replace(copied, distinct=rows.distinct))

    def under(self, schema: Schema) -> "Chunk":
        """Return the rows as a newer schema has them."""
        rows = self.rows.under(schema)
        return self if rows is self.rows else Chunk(rows)

    def bounds(self, key_range: KeyRange) -> tuple[int, int]:
        """Return the places between which the rows of a range are."""
        end = len(self) if key_range.end is None else self.left(key_range.end)
        return self.left(key_range.start) if key_range.start else 0, end

    def ends_of_pieces(self, start: int, end: int, size: int) -> tuple[int, int]:
        """Return where a piece of about `size` rows ends that begins at `start`, and one that
        ends at `end` begins; the versions of a key stay together."""
        after, before = min(start + size, end), max(end - size, start)
        if not self.rows.distinct:
            keys = self.rows.keys
            if start < after < end and keys[after - 1] == keys[after]:
                after = self.right(keys[after].as_py())
            if start < before < end and keys[before - 1] == keys[before]:
                before = self.left(keys[before].as_py())
        return after, before


class Run:
    """Rows in key order; never changes. A batch is sorted by the first use of its rows."""

    __slots__ = ("_rows", "bytes", "count", "lsn_max", "lsn_min")

    def __init__(
        self,
        rows: "Versions | tuple[tuple[Chunk, ...], list[bytes]]",
        count: int,
        size: int,
        lsns: tuple[int, int],
    ) -> None:
        self._rows = rows
        self.count = count
        self.bytes = size
        self.lsn_min, self.lsn_max = lsns
        """Bounds of the LSNs; rows may be further inside."""

    @classmethod
    def of_batch(cls, rows: Versions, lsn: int) -> "Run":
        """Return the rows of one WAL object, in any order."""
        return cls(rows, len(rows), rows_bytes(rows), (lsn, lsn))

    @classmethod
    def of_sorted(cls, rows: Versions) -> "Run":
        """Return rows that are in order."""
        lsns = int(rows.lsns.min()), int(rows.lsns.max())
        return _run([Chunk(rows)], rows_bytes(rows), lsns)

    def __reduce__(self) -> tuple[type["Run"], tuple[object, ...]]:
        return Run, (self._rows, self.count, self.bytes, (self.lsn_min, self.lsn_max))

    def _sorted(self) -> tuple[tuple[Chunk, ...], list[bytes]]:
        rows = self._rows
        if isinstance(rows, Versions):  # two readers may both sort it, with the same result
            ordered = _in_order(rows)
            rows = self._rows = (Chunk(ordered),), [ordered.keys[0].as_py()]
        return rows

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return self._sorted()[0]

    def parts(self) -> list[Versions]:
        """Return all rows; those of a batch that was not read yet are not sorted."""
        rows = self._rows
        return [rows] if isinstance(rows, Versions) else [chunk.rows for chunk in rows[0]]

    def chunk_of(self, key: bytes) -> Chunk | None:
        """Return the only chunk that may have a key."""
        chunks, first_keys = self._sorted()
        place = bisect_right(first_keys, key)
        return chunks[place - 1] if place else None

    def look_up(self, keys: list[bytes]) -> Iterator[Versions]:
        """Yield the versions of some sorted keys."""
        chunks, first_keys = self._sorted()
        starts = [0, *(bisect_left(keys, first) for first in first_keys[1:]), len(keys)]
        for chunk, (start, end) in zip(chunks, pairwise(starts), strict=True):
            if start < end:
                places = chunk.places_of(keys[start:end])
                if len(places):
                    rows = chunk.rows.take(places)
                    yield replace(rows, distinct=True) if chunk.rows.distinct else rows

    def pieces(self, key_range: KeyRange, reverse: bool = False) -> Iterator[Versions]:
        """Yield the rows of a range from one of its ends: few at first, then more and more."""
        chunks, first_keys = self._sorted()
        first = max(0, bisect_right(first_keys, key_range.start) - 1)
        last = len(chunks) if key_range.end is None else bisect_left(first_keys, key_range.end)
        size = max(1, min(PIECE_ROWS, PIECE_BYTES * self.count // (self.bytes + 1)))
        within = chunks[first:last]
        for chunk in reversed(within) if reverse else within:
            start, end = chunk.bounds(key_range)
            while start < end:
                after, before = chunk.ends_of_pieces(start, end, size)
                yield chunk.rows.slice(before, end) if reverse else chunk.rows.slice(start, after)
                start, end = (start, before) if reverse else (after, end)
                size = min(2 * size, PIECE_ROWS_MAX)

    def part_at(self, start: bytes) -> tuple[Chunk, bytes | None]:
        """Return the chunk that has the first rows from a key on, and where the next one begins."""
        chunks, first_keys = self._sorted()
        place = max(0, bisect_right(first_keys, start) - 1)
        return chunks[place], first_keys[place + 1] if place + 1 < len(chunks) else None

    def within(self, key_range: KeyRange) -> Iterator[Versions]:
        """Yield the rows of a range, chunk by chunk."""
        for chunk in self.chunks:
            start, end = chunk.bounds(key_range)
            if start < end:
                yield chunk.rows.slice(start, end)

    def from_lsn(self, floor: int, schema: Schema) -> "Run | None":
        """Return the run without rows below an LSN, as a newer schema has them.

        A chunk of which less than half is below it stays as it is: readers filter it, and the
        next merge drops those rows. So this costs about as much as the rows that it frees.
        """
        if self.lsn_max < floor:
            return None
        if isinstance(self._rows, Versions):  # of one LSN
            return Run(self._rows.under(schema), self.count, self.bytes, (self.lsn_min,) * 2)
        kept = list(self.chunks)
        if self.lsn_min < floor:
            kept = [above for chunk in kept if (above := _above(chunk, floor)) is not None]
        kept = [chunk.under(schema) for chunk in kept]
        if kept == list(self.chunks):
            return self
        lsn_min = min((int(chunk.rows.lsns.min()) for chunk in kept), default=0)
        size = sum(rows_bytes(chunk.rows) for chunk in kept)
        return _run(kept, size, (lsn_min, self.lsn_max)) if kept else None

    def key_at(self, place: int) -> bytes:
        """Return the key of a row, counted from the first."""
        for chunk in self.chunks:
            if place < len(chunk):
                break
            place -= len(chunk)
        key: bytes = chunk.rows.keys[min(place, len(chunk) - 1)].as_py()
        return key

    def count_up_to(self, bound: bytes) -> int:
        """Return how many rows have keys up to one, itself included."""
        chunks, first_keys = self._sorted()
        number = bisect_right(first_keys, bound) - 1
        if number < 0:
            return 0
        return sum(map(len, chunks[:number])) + chunks[number].right(bound)

    def split(self, bound: bytes) -> "tuple[list[Versions], Run | None]":
        """Return the rows up to a key, itself included, and a run of the others."""
        chunks, first_keys = self._sorted()
        number = bisect_right(first_keys, bound) - 1
        if number < 0:
            return [], self
        place = chunks[number].right(bound)
        low = [chunk.rows for chunk in chunks[:number]]
        low += [chunks[number].rows.slice(0, place)] if place else []
        high = [*chunks[number + 1 :]]
        if place < len(chunks[number]):
            high.insert(0, chunks[number].behind(place))
        if not high:
            return low, None
        size = sum(rows_bytes(chunk.rows) for chunk in high)
        return low, _run(high, size, (self.lsn_min, self.lsn_max))

    def followed_by(self, other: "Run") -> "Run":
        """Return this run followed by another whose keys are all larger."""
        lsns = min(self.lsn_min, other.lsn_min), max(self.lsn_max, other.lsn_max)
        return _run([*self.chunks, *other.chunks], self.bytes + other.bytes, lsns)


def split_off(
    runs: Sequence[Run], rows_max: int, bytes_max: int
) -> tuple[list[Versions], list[Run]]:
    """Return about the first rows of some runs, so many at most, and runs of the others.

    The part ends at the same key in all of them. Its rows are to be sorted.
    """
    count, size = sum(run.count for run in runs), sum(run.bytes for run in runs)
    share = min(rows_max / count, bytes_max / size)
    if share >= 1:
        return [rows for run in runs for rows in run.parts()], []
    # A small run would end the part early, at whatever key it has.
    large = [run for run in runs if run.count * 8 * len(runs) >= count]
    bounds = sorted(run.key_at(int(run.count * share)) for run in large)
    bound = bounds[len(bounds) // 2]
    if sum(run.count_up_to(bound) for run in runs) > 2 * share * count:
        bound = bounds[0]  # the keys of the runs are distributed differently
    parts: list[Versions] = []
    rest: list[Run] = []
    for run in runs:
        low, high = run.split(bound)
        parts += low
        if high is not None:
            rest.append(high)
    return parts, rest


def merged_pieces(
    runs: Sequence[Run], schema: Schema, key_range: KeyRange, rows_first: int
) -> Iterator[Versions | KeyRange]:
    """Yield the newest row of each key of a range in several runs, few at first, then more.

    Ends with the rest of the range if the kernel cannot merge that: at once, where there is none.
    """
    start, size = key_range.start, max(1, rows_first)
    while True:
        end, parts = key_range.end, list[RowBuffers]()
        for run in runs:
            chunk, follows = run.part_at(start)
            if follows is not None and (end is None or follows < end):
                end = follows
            if (buffers := chunk.buffers(schema)) is not None:
                parts.append(buffers)
        is_complete = len(parts) == len(runs)
        rows = merge_rows(parts, schema, start, end, size) if is_complete else None
        if rows is None:
            yield KeyRange(start, key_range.end)
            return
        if len(rows):
            yield rows
        if len(rows) == size:
            start = rows.keys[-1].as_py() + b"\0"
        elif end is None or end == key_range.end:
            return
        else:
            start = end
        size = min(2 * size, PIECE_ROWS_MAX)


def rows_bytes(rows: Versions) -> int:
    """Return the size of rows in memory."""
    columns = [rows.keys, *rows.fields.values(), *rows.touched.values()]
    if rows.expires_at_ms is not None:
        columns.append(rows.expires_at_ms)
    if rows.merged_at_ms is not None:
        columns.append(rows.merged_at_ms)
    return int(ROW_BYTES * len(rows) + sum(column.nbytes for column in columns))


def _run(chunks: list[Chunk], size: int, lsns: tuple[int, int]) -> Run:
    first_keys = [chunk.rows.keys[0].as_py() for chunk in chunks]
    return Run((tuple(chunks), first_keys), sum(map(len, chunks)), size, lsns)


def _matching(keys: pa.Array, sought: list[bytes]) -> Places:
    mask = pc.is_in(keys, value_set=pa.array(sought, pa.binary()))
    return np.flatnonzero(mask.to_numpy(zero_copy_only=False)).astype(np.int64)


def _in_order(rows: Versions) -> Versions:
    """Sort the rows of a batch; drop versions that later ones of the same batch hide."""
    if len(rows) == 1 or pc.all(pc.less(rows.keys[:-1], rows.keys[1:])).as_py():
        return replace(rows, distinct=True)
    return drop_superseded(rows.take(sorted_places(rows)))


def _above(chunk: Chunk, floor: int) -> Chunk | None:
    above = np.flatnonzero(chunk.rows.lsns >= floor).astype(np.int64)
    if not len(above) or 2 * len(above) > len(chunk):
        return chunk if len(above) else None
    return Chunk(replace(chunk.rows.take(above), distinct=chunk.rows.distinct))
