"""Reading segments: one GET for the tail, then one for the pages that are needed.

Tails and the payloads of blocks are kept in a cache that is bounded in bytes: each block by itself,
checked and decompressed, so that a scan of two columns neither loads nor keeps the others. A point
read searches a key page in place; scans and lookups of many keys decode all their pages at once.
An object that is missing was swept, or the namespace was damaged; the caller knows which.

How much of a gap between two blocks is read along depends on its cost. A directory reads each range
by itself. A bucket is asked once for all blocks of a row, and scans leave out gaps that take longer
to transfer than another request.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reef.engine.read.blocks import (
    COLUMN_KIND,
    DELETE,
    KEY_KIND,
    Part,
    add_columns,
    assemble_rows,
    block_kinds,
    block_spans,
    cut_spans,
    decode_spans,
    entry_at,
    select_blocks,
    value_at,
    values_at,
)
from reef.engine.read.caches import ByteCache
from reef.engine.read.memtable import NO_CHANGES, Entry
from reef.engine.read.merge import RangeTombstones
from reef.errors import CorruptionError, ErrorKind, InvalidInputError
from reef.formats.coding import (
    BLOCK_HEAD_BYTES,
    Buffer,
    corrupt,
    crc32c,
    decode_block_bytes,
)
from reef.formats.manifest import IndexSpec, SegmentEntry
from reef.formats.schema import Schema
from reef.formats.segment import IndexPlace, SegmentTail, check_identity, decode_tail
from reef.formats.segment_index import KEYS, of_pages
from reef.formats.vector_index import CentroidSet, decode_centroids
from reef.formats.versions import (
    RowBuffers,
    Versions,
    buffers_read,
    concat_versions,
    row_buffers,
)
from reef.paths import Namespace
from reef.runtime import Runtime
from reef.stores import Store
from reef.stores.base import coalesce, reread_if_damaged
from reef.stores.direct import DirectReads
from reef.types import KeyRange

FRAGMENT_BYTES = 200
"""About the memory of a range tombstone, without its keys."""
GROUP_BYTES, PAGE_BYTES, BLOCK_BYTES = 160, 60, 24
"""About the memory of a group, a page and a block in an index, without keys."""
PAYLOAD_BYTES = 150
"""About the memory of a cached payload, without its bytes."""
DIRECTORY_GAP_BYTES = 16 * 1024
"""Copying a gap of this size takes as long as another system call."""
ROW_GAP_BYTES = 1 << 20
"""A point read waits for its request: at 100 MB/s a gap of this size takes 10 ms."""
SCAN_GAP_BYTES = 64 * 1024
"""A scan sends requests in parallel; it pays for their number and for the bytes."""
EXPANSION = 2
"""About how much larger blocks are in memory than as stored."""
PAGES_AT_ONCE, PAGES_IN_PARALLEL = 64, 4096
"""Pages per step of a lookup: a megabyte of memory is reused from step to step, more of it would
be returned to the kernel and faulted in again. A bucket is asked for many pages in parallel."""
RANKED_GAP_BYTES = 128 * 1024
"""The same for single rows all over a segment: their requests are the most of a search."""
INDEX_RANGES_MAX = 8
"""Requests for the parts of one index that a search reads."""
DIRECT_PAGES_MAX = 16
"""A scan reads more pages than these straight into the buffers of their columns."""
DIRECT_BLOCKS_MAX = 32
"""The kernel reads pages of so many blocks itself; the bounds of all pages are kept for it."""
BLOCK_KINDS = (int(KEY_KIND), int(COLUMN_KIND))
Ordinals = npt.NDArray[np.uint32]


_new_entry = partial(tuple.__new__, Entry)
"""Makes an entry of all its fields, without the call that gives some of them their defaults."""


class KeyRanges:
    """The key bounds of segments, searched by bisection."""

    __slots__ = ("_ordered", "_reach", "_starts", "entries")

    def __init__(self, entries: tuple[SegmentEntry, ...]) -> None:
        self.entries = entries
        self._ordered = sorted(entries, key=_first_key)
        self._starts = list(map(_first_key, self._ordered))
        self._reach = list(accumulate(map(_last_key, self._ordered), max))
        """The largest key of each segment and those before it."""

    def having(self, key: bytes) -> list[SegmentEntry]:
        """Return the segments whose bounds include a key."""
        entries, place = [], bisect_right(self._starts, key) - 1
        while place >= 0 and self._reach[place] >= key:
            entry = self._ordered[place]
            if entry.max_key >= key:
                entries.append(entry)
            place -= 1
        return entries

    def touching(self, key_range: KeyRange) -> list[SegmentEntry]:
        """Return the segments that may have a key of a range, in the order of their first keys."""
        start = key_range.start
        first, last = bisect_left(self._reach, start), len(self._starts)
        if key_range.end is not None:
            last = bisect_left(self._starts, key_range.end)
        return [entry for entry in self._ordered[first:last] if entry.max_key >= start]


_first_key, _last_key = attrgetter("min_key"), attrgetter("max_key")
_highest_lsn = attrgetter("lsn_max")


class SegmentStore:
    """The segments of one namespace, read through a cache."""

    reads_ahead = False
    """Whether it uses the time between `expect` and `rows`."""

    def __init__(self, store: Store, namespace: Namespace, cache: ByteCache) -> None:
        self._store = store
        self.namespace = namespace
        self._cache = cache
        self._ranges = KeyRanges(())
        self._direct = DirectReads.of(store)

    @property
    def runtime(self) -> Runtime:
        """The runtime of the store: clocks and threads."""
        return self._store.runtime

    @property
    def cache(self) -> ByteCache:
        """Holds decoded parts of segments, by keys that name their object."""
        return self._cache

    @property
    def waits(self) -> bool:
        """Whether a read is worth another thread: it waits for a network."""
        return not self._store.capabilities.many_ranges

    def bytes_kept(self, stored_bytes: int) -> int:
        """Return how much a scan of so many bytes keeps in memory: all or nothing.

        The pages of a scan that does not fit would evict each other before they are read again,
        and with them the pages of point reads.
        """
        return stored_bytes if EXPANSION * stored_bytes <= self._cache.bytes_max else 0

    def newest_first(
        self, entries: tuple[SegmentEntry, ...], ingested: Sequence[SegmentEntry], key: bytes
    ) -> list[SegmentEntry]:
        """Return the segments whose bounds include a key, the newest first."""
        ranges = self._ranges
        if ranges.entries is not entries:
            ranges = self._ranges_of(entries)
        having = ranges.having(key)
        if ingested:
            having += [e for e in ingested if e.min_key <= key <= e.max_key]
        if len(having) > 1:
            having.sort(key=_highest_lsn, reverse=True)
        return having

    def touching(
        self, entries: tuple[SegmentEntry, ...], key_range: KeyRange
    ) -> list[SegmentEntry]:
        """Return the segments that may have a key of a range, in the order of their first keys."""
        return self._ranges_of(entries).touching(key_range)

    def _ranges_of(self, entries: tuple[SegmentEntry, ...]) -> KeyRanges:
        """Return the bounds of a manifest's segments; made once for each manifest."""
        ranges = self._ranges
        if ranges.entries is not entries:
            ranges = self._ranges = KeyRanges(entries)
        return ranges

    def tail(self, entry: SegmentEntry) -> SegmentTail:
        """Return the tail of a segment, from which its reads are planned."""
        known: SegmentTail | None = self._cache.peek(("tail", entry.id))
        if known is None:
            known, size = self._load_tail(entry)
            self._cache.put(("tail", entry.id), known, size)
        return known

    def deletes(self, entry: SegmentEntry) -> RangeTombstones:
        """Return a segment's range tombstones for searching, at the LSN at which they count."""
        stored = self.tail(entry).range_tombstones if entry.tombstones else ()
        if not stored:
            return RangeTombstones()

        def load() -> tuple[RangeTombstones, int]:
            lsn = entry.rows_lsn  # those of an ingest store 0
            tombstones = RangeTombstones.of(
                [replace(t, lsn=lsn) for t in stored] if lsn else stored
            )
            return tombstones, sum(FRAGMENT_BYTES + len(t.start) + len(t.end) for t in tombstones)

        return self._cache.get(("deletes", entry.id, entry.rows_lsn), load)

    # --- search indexes -----------------------------------------------------------
    def index_parts(
        self,
        entry: SegmentEntry,
        place: IndexPlace,
        spans: Sequence[tuple[int, int]],
        *,
        checks: bool = True,
    ) -> list[Buffer]:
        """Return parts of an index's data; with `checks`, each begins with a checksum of the rest.

        Others are checked when they are decoded.
        """
        keys = [(entry.id, "index", place.data.offset + start) for start, _ in spans]
        parts: list[Any] = self._cache.peek_many(keys)
        missing = [at for at, part in enumerate(parts) if part is None]
        if not missing:
            return parts
        base = place.data.offset + BLOCK_HEAD_BYTES
        absolute = [(base + spans[at][0], base + spans[at][1]) for at in missing]
        key = self.namespace.segment(entry.id, entry.home)
        fetched = self._read_parts(key, absolute, checks=checks)
        for at, part in zip(missing, fetched, strict=True):
            parts[at] = part
        if checks:
            sizes = [(keys[at], parts[at], len(parts[at]) + PAYLOAD_BYTES) for at in missing]
            self._cache.put_many(sizes)
        return parts

    def index_data(
        self, entry: SegmentEntry, place: IndexPlace, spans: Sequence[tuple[int, int]]
    ) -> bytes:
        """Return all parts of an index, which follow each other, each with its checksum."""

        def load() -> tuple[bytes, int]:
            base = place.data.offset + BLOCK_HEAD_BYTES
            key = self.namespace.segment(entry.id, entry.home)
            whole = (base + spans[0][0], base + spans[-1][1])

            def read() -> bytes:
                data = bytes(self._checked_ranges(key, [whole])[0])
                for start, end in spans:
                    check_part(
                        memoryview(data)[start - spans[0][0] : end - spans[0][0]], key, base + start
                    )
                return data

            data = reread_if_damaged(read, lambda: self._store.forget(key, [whole]))
            return data, len(data)

        return self._cache.get((entry.id, "index data", place.data.offset), load)

    def has_index_data(self, entry: SegmentEntry, place: IndexPlace) -> bool:
        """Whether all parts of an index are in memory as one."""
        return self._cache.peek((entry.id, "index data", place.data.offset)) is not None

    def known_parts(
        self, requests: Sequence[tuple[SegmentEntry, IndexPlace, Sequence[tuple[int, int]]]]
    ) -> list[list[Buffer] | None]:
        """Return parts of the indexes of several segments; None for those that are not in memory
        as a whole.
        """
        keys = [
            (entry.id, "index", place.data.offset + start)
            for entry, place, spans in requests
            for start, _ in spans
        ]
        cached: list[Any] = self._cache.peek_many(keys)
        parts: list[list[Buffer] | None] = []
        at = 0
        for _, _, spans in requests:
            some, at = cached[at : at + len(spans)], at + len(spans)
            parts.append(None if None in some else some)
        return parts

    def has_tail(self, entry: SegmentEntry) -> bool:
        """Whether the tail of a segment is in memory."""
        return self._cache.peek(("tail", entry.id)) is not None

    def has_centroids(self, spec: IndexSpec) -> bool:
        """Whether the centroids of a vector index are in memory."""
        return self._cache.peek(("centroids", spec.centroids)) is not None

    def _read_parts(self, key: str, spans: list[tuple[int, int]], *, checks: bool) -> list[bytes]:
        ranges = _few_ranges(spans, self._gap(SCAN_GAP_BYTES), INDEX_RANGES_MAX)

        def read() -> list[bytes]:
            bodies = self._checked_ranges(key, ranges)
            parts = [bytes(part) for part in cut_spans(bodies, ranges, spans)]
            for part, (start, _) in zip(parts, spans, strict=True):
                if checks:
                    check_part(part, key, start)
            return parts

        return reread_if_damaged(read, lambda: self._store.forget(key, ranges))

    def centroids(self, spec: IndexSpec) -> CentroidSet:
        """Return the centroids of a vector index."""
        key = self.namespace.centroids(spec.centroids, spec.home)

        def load() -> tuple[CentroidSet, int]:
            data = self._store.get(key)
            return decode_centroids(data, key), len(data)

        return self._cache.get(("centroids", spec.centroids), load)

    # --- by key -------------------------------------------------------------------
    def find(  # noqa: C901, PLR0912 - each get comes here, and each call costs
        self, entry: SegmentEntry, key: bytes, key_hash: int, columns: Sequence[int] | None = None
    ) -> list[Entry]:
        """Return the versions of a key, newest first, with these columns; all by default."""
        tail = self.tail(entry)
        page = tail.page_of(key) if tail.filter.may_have(key_hash) else -1
        if page < 0:
            return []
        numbers = tail.numbers
        if columns is not None:  # those that were added since are not in the segment
            numbers = (KEYS, *[number for number in columns if number in tail.fields])
        first, count = (entry.id, KEYS, page), len(numbers)
        if self._direct is not None and self._cache.is_fleeting(first, count):
            known = self._read_values(entry, tail, page, key, numbers)
            if known is not None:
                return known
        keys = [(entry.id, number, page) for number in numbers]
        payloads: list[Any] = [None] * len(keys)
        if self._cache.bytes_max:
            payloads = self._cache.peek_many(keys)
        stamp = value = None
        if None in payloads:
            response = self._read_row(tail, page, key, numbers) if not any(payloads) else None
            if response is None:
                self._read_missing(tail, page, keys, payloads)
            else:
                row, last, lsn, seq, kind, value, payloads, _, _ = response
                stamp = (row, last, lsn, seq, kind) if row >= 0 else None
                self._keep_page(keys, payloads)
        if stamp is None:
            stamp = tail.stamp(page, key, payloads[0])
        if stamp is not None and (versions := stamp[1] - stamp[0]) < 2:
            if not versions:
                return []
            row, _, lsn, seq, kind = stamp
            if kind == DELETE:
                values = {}
            elif value is not None:
                values = {numbers[1]: value[0]}
            else:
                values = values_at(tail, page, row, zip(numbers, payloads, strict=True))
            return [Entry(entry.rows_lsn or lsn, seq, kind, values)]
        rows, source = tail.find(page, key, payloads[0])
        return [
            entry_at(tail, page, source, row, zip(numbers, payloads, strict=True), entry)
            for row in rows
        ]

    def _read_values(
        self,
        entry: SegmentEntry,
        tail: SegmentTail,
        page: int,
        key: bytes,
        numbers: tuple[int, ...],
    ) -> list[Entry] | None:
        """Return the only version of a key in a page that is not kept, read by one call of the
        kernel; None if that is left to `_read_row`.
        """
        layout = tail.layout(numbers)
        if self._direct is None or len(numbers) > DIRECT_BLOCKS_MAX or layout.values is None:
            return None
        response = self._direct.call(
            "get_values", tail.name, layout.bounds, layout.values, page, BLOCK_KINDS, key
        )
        if not response:
            if response is False:
                tail.leave_values_to_python(numbers)
            return None
        row, lsn, seq, kind, values, payloads, stored, _ = response
        if row < 0:
            return []
        if payloads or stored:
            values = _decoded_values(tail, page, numbers, response)
            if values is None:
                return None
        if not values:
            by_number = {}
        elif len(values) == 1:  # half a microsecond less than the general case
            by_number = {numbers[1]: values[0]}
        else:
            by_number = dict(zip(numbers[1:], values, strict=True))
        return [_new_entry((entry.rows_lsn or lsn, seq, kind, by_number, NO_CHANGES, None, None))]

    def _read_row(
        self, tail: SegmentTail, page: int, key: bytes, numbers: tuple[int, ...]
    ) -> Sequence[Any] | None:
        """Read a page and search it in one call of the kernel, whose result it returns; None if
        that is left to the store and to Python.
        """
        if self._direct is None or len(numbers) > DIRECT_BLOCKS_MAX:
            return None
        layout = tail.layout(numbers)
        response: tuple[Any, ...] | None = self._direct.call(
            *("get_row", tail.name, layout.bounds, layout.columns, page, BLOCK_KINDS, key),
            layout.is_bytes,
        )
        if response is None or not response[7]:
            return response
        spans = tail.spans_of(page, numbers)
        payloads = list(response[6])
        for place, (start, _) in enumerate(spans):
            if response[7] >> place & 1:
                kind = COLUMN_KIND if place else KEY_KIND
                try:
                    payloads[place] = decode_block_bytes(payloads[place], kind, tail.name, start)
                except CorruptionError:
                    return None  # it is read again
        return (*response[:6], payloads, *response[7:])

    def _read_missing(
        self,
        tail: SegmentTail,
        page: int,
        keys: Sequence[tuple[str, int, int]],
        payloads: list[Any],
    ) -> None:
        """Read the blocks of a page that are not in memory; empty are those that it does not have.

        `keys` are those of the cache; the payloads are filled in.
        """
        numbers = [number for _, number, _ in keys]
        missing, spans = [], []
        for place, span in enumerate(tail.spans_of(page, numbers)):
            if payloads[place] is None:
                if span[0] < span[1]:
                    missing.append(place)
                    spans.append(span)
                else:
                    payloads[place] = b""
        if not missing:
            return
        fetched = self._read_page(tail, [numbers[place] for place in missing], spans)
        for place, payload in zip(missing, fetched, strict=True):
            payloads[place] = payload
        self._keep_page([keys[place] for place in missing], fetched)

    def _keep_page(self, keys: Sequence[tuple[str, int, int]], payloads: Sequence[bytes]) -> None:
        """Cache the blocks of a page that are not empty."""
        kept = []
        for key, payload in zip(keys, payloads, strict=True):
            if payload:
                kept.append((key, payload, len(payload) + PAYLOAD_BYTES))
        self._cache.put_many(kept)

    def _read_page(
        self, tail: SegmentTail, numbers: Sequence[int], spans: list[tuple[int, int]]
    ) -> list[bytes]:
        """Read blocks of these columns: from a bucket with one request if they are close."""
        key = tail.name
        ranges = coalesce(spans, ROW_GAP_BYTES) if self.waits else spans

        def read() -> list[bytes]:
            bodies = self._checked_ranges(key, ranges)
            data = bodies if ranges is spans else cut_spans(bodies, ranges, spans)
            return [
                decode_block_bytes(body, KEY_KIND if number == KEYS else COLUMN_KIND, key, start)
                for number, (start, _), body in zip(numbers, spans, data, strict=True)
            ]

        return reread_if_damaged(read, lambda: self._store.forget(key, ranges))

    def find_many(
        self,
        entry: SegmentEntry,
        keys: Sequence[bytes],
        hashes: npt.NDArray[np.uint64],
        schema: Schema,
        columns: Sequence[int] | None = None,
    ) -> Versions:
        """Return the versions that a segment has of some sorted keys."""
        tail = self.tail(entry)
        chosen = [keys[at] for at in np.flatnonzero(tail.filter.may_have_many(hashes)).tolist()]
        pages, counts = tail.pages_of(chosen)
        chosen = chosen[len(chosen) - int(counts.sum()) :]  # without those below the first page
        parts = self._picked(entry, tail, pages, counts, chosen, columns)
        parts = [part.under(schema) for part in parts if len(part)] or [Versions.empty(schema)]
        rows = concat_versions(parts, schema)
        return rows.with_lsn(entry.rows_lsn) if entry.rows_lsn else rows

    def _picked(  # noqa: PLR0917 - as find_many, with its pages
        self,
        entry: SegmentEntry,
        tail: SegmentTail,
        pages: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        keys: list[bytes],
        columns: Sequence[int] | None,
    ) -> list[Versions]:
        """Return the versions of sorted keys, of which `counts` may be in each of some pages."""
        each = tail.index.pages.average_bytes
        kept = self.bytes_kept(len(pages) * each) // each
        if not kept and len(pages):
            parts = select_blocks(tail, pages.tolist(), columns)
            rows = self._read_rows(tail, pages, parts, (tuple(keys), counts))
            if rows is not None:
                return [rows]
        step = PAGES_IN_PARALLEL if self.waits else PAGES_AT_ONCE
        ends, listed = np.cumsum(counts).tolist(), pages.tolist()
        sought = [keys[end - n : end] for end, n in zip(ends, counts.tolist(), strict=True)]
        return [
            self._matching(
                *(entry, tail, listed[start : start + step], sought[start : start + step], columns),
                keep=start + step <= kept or kept == len(pages),
            )
            for start in range(0, len(pages), step)
        ]

    def _read_rows(
        self,
        tail: SegmentTail,
        pages: npt.NDArray[np.int64],
        parts: Sequence[Part],
        sought: tuple[tuple[bytes, ...], npt.NDArray[np.int64]] | None = None,
    ) -> Versions | None:
        """Return the rows of pages, or of sorted keys and how many of them to search in each page,
        read by one call of the kernel; None if that is left to the store and to Python.
        """
        numbers = tuple([number for number, _ in parts])
        buffers = self._read_buffers(tail, pages, numbers, sought)
        read = tail.layout(numbers).read
        return None if buffers is None or read is None else read.rows(buffers)

    def _read_buffers(
        self,
        tail: SegmentTail,
        pages: npt.NDArray[np.int64],
        numbers: tuple[int, ...],
        sought: tuple[tuple[bytes, ...], npt.NDArray[np.int64]] | None = None,
    ) -> Sequence[Any] | None:
        """Return the same rows as the kernel returns them."""
        if self._direct is None or len(numbers) > DIRECT_BLOCKS_MAX:
            return None
        layout = tail.layout(numbers)
        if layout.read is None or numbers in tail.left_to_python:
            return None
        if not self._direct.is_open(tail.name):
            return None
        keys, counts = (None, None) if sought is None else sought
        buffers: Sequence[Any] | None = self._direct.call(
            *("read_rows", tail.name, layout.bounds, layout.read.encoded, BLOCK_KINDS),
            *(pages, keys, counts),
        )
        if buffers is None:
            tail.left_to_python.add(numbers)
        return buffers

    def first_pages(
        self,
        entry: SegmentEntry,
        start: bytes,
        schema: Schema,
        columns: Sequence[int] | None,
        count: int,
        *,
        keep: bool,
    ) -> tuple[RowBuffers | None, bytes | None]:
        """Return the rows of the first pages from a key on, as the kernel merges them, and the
        key before which they end, None at the last page. No rows if it cannot merge them.
        """
        tail = self.tail(entry)
        starts = tail.index.pages.keys
        first = max(bisect_right(starts, start) - 1, 0)
        pages = range(first, min(first + count, len(starts)))
        follows = starts[pages.stop] if pages.stop < len(starts) else None
        if not keep and not self._has_some(entry, pages):
            numbers = tail.numbers
            if columns is not None:
                numbers = tuple([n for n in numbers if n == KEYS or n in columns])
            places = tail.layout(numbers).places_under(schema)
            buffers = places and self._read_buffers(tail, np.array(pages, np.int64), numbers)
            if places and buffers:
                return buffers_read(buffers, places, entry.rows_lsn), follows
        rows = self.rows(entry, pages, columns, keep=keep).under(schema)
        if entry.rows_lsn:
            rows = rows.with_lsn(entry.rows_lsn)
        return None if rows.has_partial else row_buffers(rows, schema), follows

    def _matching(
        self,
        entry: SegmentEntry,
        tail: SegmentTail,
        pages: Sequence[int],
        sought: Sequence[list[bytes]],
        columns: Sequence[int] | None,
        *,
        keep: bool,
    ) -> Versions:
        """Return the versions of sorted keys, given those that each page may have."""
        parts = select_blocks(tail, pages, columns)
        payloads = self._payloads(entry, tail, parts, ROW_GAP_BYTES, keep=keep)
        found = tail.pick(pages, sought, parts, payloads)
        if found is not None:
            return found
        rows = assemble_rows(tail, pages, parts, payloads)
        keys = pa.array([key for some in sought for key in some], pa.binary())
        matches = pc.is_in(rows.keys, value_set=keys).to_numpy(zero_copy_only=False)
        return rows.take(np.flatnonzero(matches).astype(np.int64))

    # --- by page ------------------------------------------------------------------
    def rows(
        self,
        entry: SegmentEntry,
        pages: Sequence[int],
        columns: Sequence[int] | None = None,
        *,
        keep: bool = True,
    ) -> Versions:
        """Return the rows of pages with these columns; blocks that are read are kept in memory."""
        tail = self.tail(entry)
        parts = select_blocks(tail, pages, columns)
        if not keep and not self._has_some(entry, pages):
            return self._streamed(tail, pages, parts)
        payloads = self._payloads(entry, tail, parts, SCAN_GAP_BYTES, keep=keep)
        return assemble_rows(tail, pages, parts, payloads)

    # --- by ordinal ---------------------------------------------------------------
    def rows_at(
        self, entry: SegmentEntry, ordinals: Ordinals, columns: Sequence[int] | None
    ) -> Versions:
        """Return the rows at sorted ordinals of a segment, with these columns."""
        tail = self.tail(entry)
        pages, picks = tail.places(ordinals)
        parts = select_blocks(tail, pages, columns)
        payloads = self._payloads(entry, tail, parts, RANKED_GAP_BYTES)
        rows = tail.picked(pages, parts, payloads, picks)
        if rows is None:
            starts = np.cumsum([0, *of_pages(tail.index.pages.rows, pages).tolist()])
            places = starts[picks[:, 0]] + picks[:, 1]
            rows = assemble_rows(tail, pages, parts, payloads).take(places.astype(np.int64))
        return rows

    def values_at(self, entry: SegmentEntry, ordinals: Ordinals, number: int) -> pa.Array | None:
        """Return a column at sorted ordinals of a segment; None if all of it is null."""
        tail = self.tail(entry)
        pages, picks = tail.places(ordinals)
        parts = [part for part in select_blocks(tail, pages, [number]) if part[0] == number]
        if not parts:
            return None
        payloads = self._payloads(entry, tail, parts, RANKED_GAP_BYTES)
        return tail.picked_column(pages, parts[0], payloads, picks)

    def has_values(self, entry: SegmentEntry, ordinals: Ordinals, number: int) -> bool:
        """Whether a column at some ordinals is in memory."""
        pages, _ = self.tail(entry).places(ordinals)
        return None not in self._cache.peek_many([(entry.id, number, page) for page in pages])

    def _has_some(self, entry: SegmentEntry, pages: Sequence[int]) -> bool:
        """Whether the first or the last of these pages is in memory, and others may be as well."""
        ends = [(entry.id, KEYS, page) for page in (pages[0], pages[-1])] if pages else []
        return any(payload is not None for payload in self._cache.peek_many(ends))

    def _streamed(self, tail: SegmentTail, pages: Sequence[int], parts: Sequence[Part]) -> Versions:
        """Read pages that are not kept: from stored blocks to columns, without payloads between."""
        if len(pages) <= DIRECT_PAGES_MAX:
            rows = self._read_rows(tail, np.array(pages, np.int64), parts)
            if rows is not None:
                return replace(rows, distinct=tail.is_distinct(pages))
        key, spans = tail.name, block_spans(tail, parts)
        ranges = coalesce(spans, self._gap(SCAN_GAP_BYTES))

        def read() -> Versions:
            bodies = self._checked_ranges(key, ranges)
            found = tail.join(pages, parts, bodies, [start for start, _ in ranges])
            if found is not None:
                return add_columns(tail, pages, parts, *found)
            payloads = decode_spans(bodies, ranges, spans, block_kinds(parts), key)
            return assemble_rows(tail, pages, parts, payloads)

        return reread_if_damaged(read, lambda: self._store.forget(key, ranges))

    def expect(
        self, entry: SegmentEntry, pages: Sequence[int], columns: Sequence[int] | None = None
    ) -> None:
        """Prepare for a call of `rows` with the same arguments."""

    def _spans(
        self, entry: SegmentEntry, pages: Sequence[int], columns: Sequence[int] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the ranges that `rows` reads of an object, if none of it is in memory."""
        tail = self.tail(entry)
        spans = block_spans(tail, select_blocks(tail, pages, columns))
        key = self.namespace.segment(entry.id, entry.home)
        return key, coalesce(spans, self._gap(SCAN_GAP_BYTES))

    def _gap(self, gap_bytes: int) -> int:
        return DIRECTORY_GAP_BYTES if self._store.capabilities.many_ranges else gap_bytes

    def _payloads(
        self,
        entry: SegmentEntry,
        tail: SegmentTail,
        parts: Sequence[Part],
        gap_bytes: int,
        *,
        keep: bool = True,
    ) -> list[Buffer]:
        """Return the contents of blocks, from memory or with as few requests as are worth it."""
        cache = self._cache
        if not cache.bytes_max:
            return self._fetch(entry, tail, parts, gap_bytes)
        keys = [(entry.id, number, page) for number, pages in parts for page in pages]
        payloads: list[Any] = cache.peek_many(keys)
        if None not in payloads:
            return payloads
        missing = [place for place, payload in enumerate(payloads) if payload is None]
        if len(missing) < len(keys):
            by_column: dict[int, list[int]] = {}
            for place in missing:
                _, number, page = keys[place]
                by_column.setdefault(number, []).append(page)
            parts = list(by_column.items())
        fetched = self._fetch(entry, tail, parts, gap_bytes)
        if keep:
            # A view would keep all bytes that were read with it.
            fetched = [bytes(payload) for payload in fetched]
            cache.put_many(
                [
                    (keys[place], payload, len(payload) + PAYLOAD_BYTES)
                    for place, payload in zip(missing, fetched, strict=True)
                ]
            )
        for place, payload in zip(missing, fetched, strict=True):
            payloads[place] = payload
        return payloads

    def _fetch(
        self, entry: SegmentEntry, tail: SegmentTail, parts: Sequence[Part], gap_bytes: int
    ) -> list[Buffer]:
        """Read and check blocks; a wrong checksum is read again, as it may be the network's."""
        key, spans = tail.name, block_spans(tail, parts)
        ranges = coalesce(spans, self._gap(gap_bytes))

        def read() -> list[Buffer]:
            bodies = self._checked_ranges(key, ranges)
            return decode_spans(bodies, ranges, spans, block_kinds(parts), key)

        return reread_if_damaged(read, lambda: self._store.forget(key, ranges))

    def _checked_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Buffer]:
        try:
            return self._read_ranges(key, ranges)
        except InvalidInputError as error:
            raise _ends_early(error, key, max(ranges)[0]) from error

    def _read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Buffer]:
        return self._store.get_ranges(key, ranges)

    def _load_tail(self, entry: SegmentEntry) -> tuple[SegmentTail, int]:
        key = self.namespace.segment(entry.id, entry.home)
        start = entry.size - entry.tail_bytes

        def read() -> SegmentTail:
            try:
                data = self._store.get_range(key, start, entry.size)
            except InvalidInputError as error:
                raise _ends_early(error, key, start) from error
            tail = decode_tail(data, entry.size, key)
            check_identity(tail.footer, entry.id, key)
            return tail

        tail = reread_if_damaged(read, lambda: self._store.forget(key, [(start, entry.size)]))
        return tail, entry.tail_bytes + _memory_of(tail)


def _decoded_values(
    tail: SegmentTail, page: int, numbers: Sequence[int], response: Sequence[Any]
) -> list[Any] | None:
    """Return the values of a row, of which the kernel has left some to Python: blocks of other
    codecs, and payloads of other types. None if a block is damaged: it is read again.
    """
    row, *_, values, payloads, stored, _ = response
    decoded = list(values)
    for place, number in enumerate(numbers[1:]):
        if (payloads | stored) >> place & 1:
            try:
                if stored >> place & 1:
                    start = tail.offset(page, number)
                    payload = decode_block_bytes(values[place], COLUMN_KIND, tail.name, start)
                else:
                    payload = values[place]
                decoded[place] = value_at(tail, page, number, payload, row)
            except CorruptionError:
                return None
    return decoded


def _few_ranges(
    spans: list[tuple[int, int]], gap_bytes: int, ranges_max: int
) -> list[tuple[int, int]]:
    """Join spans over gaps, larger ones if there would be too many requests."""
    ranges = coalesce(spans, gap_bytes)
    if len(ranges) <= ranges_max:
        return ranges
    gaps = sorted((after[0] - before[1] for before, after in pairwise(ranges)), reverse=True)
    return coalesce(spans, gaps[ranges_max - 1])


def check_part(part: Buffer, key: str, offset: int) -> None:
    """Raise unless a part of an index begins with the checksum of the rest."""
    view = memoryview(part)
    if crc32c(view[4:]).to_bytes(4, "little") != bytes(view[:4]):
        raise corrupt(key, offset, "checksum of a part of the index does not match")


def _ends_early(error: InvalidInputError, key: str, offset: int) -> Exception:
    """Return the error for an object that ends before a range that it must have."""
    if error.kind is not ErrorKind.INVALID_RANGE:
        return error
    return corrupt(key, offset, "the object ends too early")


def _memory_of(tail: SegmentTail) -> int:
    """Estimate the memory of a tail, whose stored index may be far smaller."""
    index, pages = tail.index, tail.index.pages
    keys = sum(map(len, index.first_keys)) + sum(map(len, index.last_keys))
    keys += sum(map(len, pages.keys))
    bounds = [*index.smallest.values(), *index.largest.values()]
    columns = 1 + len(index.column_blocks)
    blocks = BLOCK_BYTES * columns * (len(index) + len(pages.rows))
    deletes = sum(FRAGMENT_BYTES + len(t.start) + len(t.end) for t in tail.range_tombstones)
    return (
        keys
        + GROUP_BYTES * len(index)
        + PAGE_BYTES * len(pages.rows)
        + blocks
        + sum(int(array.nbytes) for array in bounds)
        + deletes
    )
