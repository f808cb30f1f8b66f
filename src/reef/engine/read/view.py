"""A view: the state of a namespace, and how it is read.

A view is a manifest, the memtable of everything committed since, and the segments of both. The
memtable keeps growing under it, by whole WAL objects, so it is accessed exactly once per read:
every read begins with one call that returns an immutable `MemtableCut` of rows, range deletes
and ingested segments, taken under one lock, and never goes back to the memtable. Manifest
and memtable are replaced together, as one view. So no read can combine two states (H69).

Rows of a transaction or of a local log are a second table above the memtable; the cut is then
taken of both with both locks held. Point reads go from the newest source to the oldest and stop
as soon as nothing older can matter. Scans merge all sources piece by piece, in bounded memory.

**Many keys at once.** Each segment is searched once, for those of the keys that are within its
bounds. Its filter is applied to all of them together, and the pages that may have some are read in
parallel and decoded together. So a thousand cold keys wait for two round trips, not for a thousand.

**Scans that outlive their segments** resume with the same rows, or fail. A plain reader holds no
lease, so a sweep may delete a segment that an open iterator still needs. The scan is then planned
again from the current head. The rows of its LSN are still there, under other names, unless newer
versions have replaced them in segments. So it resumes only if nothing in the rest of its range is
newer than its LSN, and no compaction has dropped a delete that is: apart from that, a fold or a
compaction changes no row. Otherwise the rest of its snapshot is gone.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, takewhile
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from reef.engine.read.memtable import Entry, Memtable, MemtableCut, entry_at, rows_of_key
from reef.engine.read.merge import (
    PUT,
    RangeTombstones,
    drop_deleted,
    in_order,
    newest_versions,
)
from reef.engine.read.runs import PIECE_ROWS, PIECE_ROWS_MAX
from reef.engine.read.scan import (
    EVERYTHING,
    Cursor,
    LateCursor,
    Projection,
    RowsCursor,
    SegmentCursor,
    merged,
)
from reef.engine.read.segments import SegmentStore
from reef.engine.read.short_scan import LIMIT_MAX, ShortScan, Sources
from reef.engine.read.skipping import Skipping
from reef.errors import ErrorKind, NotFoundError
from reef.formats.manifest import Manifest, SegmentEntry
from reef.formats.schema import Schema
from reef.formats.segment_index import hash_key, hash_keys
from reef.formats.versions import RangeTombstone, Versions
from reef.formats.wal_object import FIRST_PARTIAL, OpKind
from reef.runtime import Runtime
from reef.types import KeyRange

T = TypeVar("T")
ONE_BY_ONE = 4
"""So few keys cost less one by one than a lookup of all of them."""
FEW_KEYS = 64
"""So few keys are looked for one by one among the bounds of segments."""
_near_key, _far_key, _size = attrgetter("min_key"), attrgetter("max_key"), attrgetter("size")


class Overlaying(Protocol):
    """The owner of a table above the memtable that other threads change and replace."""

    def is_newest(self, view: "View") -> bool:
        """Whether neither of a view's tables was replaced; called with both locked."""

    def newest(self) -> "View":
        """Return the view to read instead of one that was replaced."""

    def first_lsn(self, memtable: Memtable) -> int:
        """Return the first LSN of the upper table that a memtable does not include yet."""


@dataclass(frozen=True, slots=True)
class View:
    """All rows that are visible, as of `last_lsn`."""

    manifest: Manifest
    segments: SegmentStore
    memtable: Memtable
    staged: Memtable | None = None
    """Rows that are not committed yet: newer than everything else."""
    overlaying: Overlaying | None = None
    """Set if other threads change `staged` as well; None for a transaction's own rows."""

    @property
    def last_lsn(self) -> int:
        return self.memtable.last_lsn

    def get(self, key: bytes, now_ms: int, columns: Sequence[int] | None = None) -> Entry | None:
        """Return the current row of a key, with at least these columns; None if it has no row."""
        version = self.newest(key, columns)
        if version is None or (version.kind == PUT and version.expires_at_ms is None):
            return version
        return _visible(version, now_ms)

    def get_each(self, keys: Sequence[bytes], now_ms: int) -> list[Entry | None]:
        """Return the rows that several keys have, all of one state: many are looked up together."""
        cut = self._cut()
        if len(keys) <= ONE_BY_ONE:
            return [_visible(cut.view._newest_in(key, cut), now_ms) for key in keys]
        manifest, segments = cut.view.manifest, self.segments
        parts, tombstones = versions_in(
            sorted(set(keys)), manifest, cut.tables, segments, runtime=segments.runtime
        )
        rows = drop_deleted(newest_versions(parts, manifest.schema, tombstones), now_ms)
        known = {key: entry_at(rows, place) for place, key in enumerate(rows.keys.to_pylist())}
        return [known.get(key) for key in keys]

    def newest(self, key: bytes, columns: Sequence[int] | None = None) -> Entry | None:
        """Return a key's newest version with all patches applied; None if it never had one."""
        if self.staged is None:
            table = self.memtable.tidy_cut()
            versions = [] if table.is_empty else table.versions(key)
            return self._with_segments(key, versions, table, columns)
        cut = self._cut()
        return cut.view._newest_in(key, cut, columns)

    def _newest_in(
        self, key: bytes, cut: "_ViewCut", columns: Sequence[int] | None = None
    ) -> Entry | None:
        """Return the newest version, as of a cut."""
        return self._with_segments(key, cut.versions(key), cut.tables[0], columns)

    def _with_segments(
        self,
        key: bytes,
        versions: list[Entry],
        table: MemtableCut,
        columns: Sequence[int] | None = None,
    ) -> Entry | None:
        """Return the newest version, given those in memory."""
        segments, key_hash = self.segments, None
        for entry in segments.newest_first(self.manifest.segments, table.ingested, key):
            if versions and _newest_whole_lsn(versions) > entry.lsn_max:
                break
            if entry.tombstones:
                cover = segments.deletes(entry).covering(key)
                if cover is not None:
                    versions.append(Entry(cover.lsn, cover.seq, OpKind.DELETE))
            if key_hash is None:
                key_hash = hash_key(key)
            versions += segments.find(entry, key, key_hash, columns)
        if not versions:
            return None
        if len(versions) == 1 and versions[0].kind < FIRST_PARTIAL:
            return versions[0]
        return resolve(versions, self.manifest.schema)

    def scan(
        self,
        key_range: KeyRange,
        now_ms: int,
        *,
        reverse: bool = False,
        projection: Projection = EVERYTHING,
        limit: int | None = None,
    ) -> "Scan":
        """Return the rows of a range, as of now; nothing is fetched before they are consumed.

        With `limit` there is no need for more rows than these, though the scan has them.
        """
        if projection.where is not None:
            key_range = key_range.both(projection.where.key_range())
        cut = self._cut()
        manifest = cut.view.manifest
        return Scan(
            *(manifest, self.segments, cut.tables, key_range, now_ms, reverse, projection),
            limit,
        )

    def cut(self) -> tuple[Manifest, tuple[MemtableCut, ...]]:
        """Return the tables as of now, the memtable first, and the manifest below them."""
        cut = self._cut()
        return cut.view.manifest, cut.tables

    def _cut(self) -> "_ViewCut":
        """Cut the memtable and any table above it, at one instant."""
        view = self
        while True:
            below, over, overlaying = view.memtable, view.staged, view.overlaying
            if over is None:
                return _ViewCut(view, (below.tidy_cut(),))
            below.tidy()
            over.tidy()
            with below.lock, over.lock:
                if overlaying is None:
                    return _ViewCut(view, (below.cut_locked(), over.cut_locked()))
                if overlaying.is_newest(view):
                    newer = over.cut_locked().from_lsn(overlaying.first_lsn(below))
                    return _ViewCut(view, (below.cut_locked(), newer))
            view = overlaying.newest()


class _ViewCut(NamedTuple):
    """The tables of a view as of one instant."""

    view: View
    tables: tuple[MemtableCut, ...]
    """The memtable, and the table above it if there is one."""

    def versions(self, key: bytes) -> list[Entry]:
        """Return the versions of a key in all tables, down to the first whole row."""
        if len(self.tables) == 1:
            return self.tables[0].versions(key)
        entries: list[Entry] = []
        for table in reversed(self.tables):
            entries += table.versions(key)
            if entries and entries[-1].is_whole:
                break
        return entries


def _newest_whole_lsn(versions: Iterable[Entry]) -> int:
    return max((entry.lsn for entry in versions if entry.is_whole), default=-1)


def _visible(entry: Entry | None, now_ms: int) -> Entry | None:
    """Return a version if it is a row that has not expired."""
    if entry is None or entry.kind != OpKind.PUT:
        return None
    if entry.expires_at_ms is not None and entry.expires_at_ms <= now_ms:
        return None
    return entry


def resolve(versions: Iterable[Entry], schema: Schema) -> Entry | None:
    """Apply the patches and merges of one key to the newest whole row below them."""
    ordered = sorted(versions, key=lambda entry: (entry.lsn, entry.seq), reverse=True)
    above = list(takewhile(lambda entry: not entry.is_whole, ordered))
    if any(entry.kind == OpKind.MERGE for entry in above):
        return _merge_entries(ordered[: len(above) + 1], schema)
    return _with_patches(ordered[len(above)], above) if len(above) < len(ordered) else None


def _merge_entries(versions: Sequence[Entry], schema: Schema) -> Entry:
    """Return the row of a key with merges, by the same function that scans use."""
    rows = newest_versions([rows_of_key(versions, schema)], schema)
    return entry_at(rows, 0)


def _with_patches(whole: Entry, patches: list[Entry]) -> Entry:
    if not patches or whole.kind == OpKind.DELETE:
        return whole
    values = dict(whole.values)
    for patch in reversed(patches):
        values |= {number: patch.values.get(number) for number in patch.changes}
    return whole._replace(lsn=patches[0].lsn, seq=patches[0].seq, values=values)


@dataclass(frozen=True, slots=True)
class Scan:
    """The rows of a range in one snapshot. Can be read more than once."""

    manifest: Manifest
    segments: SegmentStore
    tables: tuple[MemtableCut, ...]
    """The memtable, and the rows of a transaction or a local log above it."""
    key_range: KeyRange
    now_ms: int
    reverse: bool
    projection: Projection = EVERYTHING
    """Rows that cannot match may be left out; whether the others do is for the caller to see."""
    limit: int | None = None
    """How many rows are needed, if that is known."""

    def __iter__(self) -> Iterator[Versions]:
        """Yield the rows in pieces, by key, from either end."""
        overlapping = self.overlapping()
        if (short := self._short_scan(overlapping)) is not None:
            yield from short
            if short.rest is not None:
                yield from replace(self, key_range=short.rest, limit=None)
            return
        tombstones = [table.range_tombstones for table in self.tables]
        tombstones += [self.segments.deletes(entry) for entry in overlapping if entry.tombstones]
        deletes = [some for some in tombstones if some]
        cursors = [cursor for table in self.tables for cursor in self._in_memory(table)]
        skipping = self.skipping(overlapping)
        by_near = sorted(overlapping, key=_far_key if self.reverse else _near_key)
        late = (self._late_cursor(entry, skipping) for entry in _in_turn(by_near, self.reverse))
        waiting = list(late) if self.segments.reads_ahead else late
        for piece in merged(cursors, self.reverse, iter(waiting)):
            rows = newest_versions(piece, self.manifest.schema, deletes)
            rows = drop_deleted(rows, self.now_ms)
            if len(rows):
                yield rows.take(np.arange(len(rows) - 1, -1, -1)) if self.reverse else rows

    def _short_scan(self, overlapping: Sequence[SegmentEntry]) -> ShortScan | None:
        """Return the first rows as the kernel merges them; None if it does not."""
        limit, projection = self.limit, self.projection
        if limit is None or limit > LIMIT_MAX or self.reverse or projection.where is not None:
            return None
        sources = Sources(
            self.manifest.schema,
            self.segments,
            self.tables,
            sorted(overlapping, key=_near_key) if self.tables[0].ingested else overlapping,
            projection.numbers,
            self.now_ms,
            keep=self.segments.bytes_kept(sum(map(_size, overlapping))) > 0,
        )
        return ShortScan(sources, self.key_range, limit) if sources.can_be_merged() else None

    def _in_memory(self, table: MemtableCut) -> list[Cursor]:
        """Return the rows of a table: of all runs merged by the kernel, or run by run."""
        if not self.reverse and len(table.runs) + bool(table.head.rows) > 1:
            rows_first = PIECE_ROWS if self.limit is None else min(self.limit, PIECE_ROWS_MAX)
            pieces = table.merged_pieces(self.key_range, rows_first)
            first = next(pieces, None)
            if first is None:
                return []
            if not isinstance(first, KeyRange):
                return [RowsCursor(_newest_rows(table, chain((first,), pieces)))]
        return [RowsCursor(pieces) for pieces in table.pieces(self.key_range, self.reverse)]

    def _late_cursor(self, entry: SegmentEntry, skipping: Skipping) -> LateCursor:
        near = entry.max_key if self.reverse else entry.min_key
        cursor = LateCursor(near, partial(self._cursor, entry, skipping))
        if self.segments.reads_ahead:
            cursor.open()  # which announces its reads
        return cursor

    def _cursor(self, entry: SegmentEntry, skipping: Skipping) -> SegmentCursor:
        return SegmentCursor(
            self.segments,
            entry,
            self.key_range,
            reverse=self.reverse,
            schema=self.manifest.schema,
            columns=self.projection.numbers,
            needless=skipping.needless(entry),
            bytes_kept=skipping.bytes_kept(entry),
        )

    def needless(self, entry: SegmentEntry, overlapping: list[SegmentEntry]) -> frozenset[int]:
        """Return the groups of a segment that may be left out."""
        return self.skipping(overlapping).needless(entry)

    def skipping(self, overlapping: list[SegmentEntry]) -> Skipping:
        """Return which groups of each segment may be skipped."""
        where = self.projection.where
        memory = [] if where is None else [table.rows(self.key_range) for table in self.tables]
        return Skipping(where, self.segments, overlapping, memory)

    def overlapping(self) -> list[SegmentEntry]:
        """Return the segments whose keys overlap the range, those of ingests first."""
        stored = self.segments.touching(self.manifest.segments, self.key_range)
        ingested = self.tables[0].ingested
        return [e for e in ingested if self.key_range.touches(e.min_key, e.max_key)] + stored


def _in_turn(entries: list[SegmentEntry], reverse: bool) -> Iterator[SegmentEntry]:
    return reversed(entries) if reverse else iter(entries)


def _newest_rows(table: MemtableCut, pieces: Iterable[Versions | KeyRange]) -> Iterator[Versions]:
    """Yield pieces of merged rows; where the kernel ends, all versions, merged by Python."""
    for piece in pieces:
        if isinstance(piece, KeyRange):
            cursors = [RowsCursor(some) for some in table.pieces(piece, False)]
            for parts in merged(cursors, False):
                yield in_order(parts, table.schema)
        else:
            yield piece


def range_tombstones_of(segments: SegmentStore, entry: SegmentEntry) -> Sequence[RangeTombstone]:
    """Return a segment's range tombstones; those of an ingest have its LSN, and store 0."""
    if not entry.tombstones:
        return ()
    stored = segments.tail(entry).range_tombstones
    if not entry.rows_lsn:
        return stored
    return [replace(tombstone, lsn=entry.rows_lsn) for tombstone in stored]


def look_up(
    view: View,
    keys: Iterable[bytes],
    now_ms: int,
    runtime: Runtime,
    columns: Sequence[int] | None = None,
) -> Versions:
    """Return the rows that these keys have now, sorted by key, each once."""
    return drop_deleted(newest_rows(view, keys, runtime, columns), now_ms)


def newest_rows(
    view: View, keys: Iterable[bytes], runtime: Runtime, columns: Sequence[int] | None = None
) -> Versions:
    """Return the newest version of each key, deletes and expired rows too."""
    parts, tombstones = key_versions(view, keys, runtime, columns)
    return newest_versions(parts, view.manifest.schema, tombstones)


def key_versions(
    view: View, keys: Iterable[bytes], runtime: Runtime, columns: Sequence[int] | None = None
) -> tuple[list[Versions], list[RangeTombstones]]:
    """Return the versions of keys that may matter, by source, and the range tombstones."""
    ordered = sorted(set(keys))
    if not ordered:
        return [Versions.empty(view.manifest.schema)], []
    manifest, tables = view.cut()
    return versions_in(ordered, manifest, tables, view.segments, runtime=runtime, columns=columns)


def versions_in(
    ordered: list[bytes],
    manifest: Manifest,
    tables: Sequence[MemtableCut],
    segments: SegmentStore,
    *,
    runtime: Runtime,
    columns: Sequence[int] | None = None,
) -> tuple[list[Versions], list[RangeTombstones]]:
    """Return the same for sorted keys, as of one cut of a view."""
    in_memory = [rows for table in tables for rows in table.look_up(ordered)]
    open_keys = _unsettled_keys(ordered, in_memory, (*tables[0].ingested, *manifest.segments))
    hashes = hash_keys(open_keys)
    shares = [
        (entry, slice(first, last))
        for entry in _holders(open_keys, manifest, tables[0].ingested, segments)
        if (first := bisect_left(open_keys, entry.min_key))
        < (last := bisect_right(open_keys, entry.max_key))
    ]

    def find(share: tuple[SegmentEntry, slice]) -> Versions:
        entry, part = share
        return segments.find_many(entry, open_keys[part], hashes[part], manifest.schema, columns)

    gather = runtime.map if segments.waits and len(shares) > 1 else _one_by_one
    gather(segments.tail, [entry for entry, _ in shares])
    parts = gather(find, shares)
    tombstones = [table.range_tombstones for table in tables]
    # Keys that are newest in memory may be covered by deletes, but not by those of segments.
    tombstones += [segments.deletes(entry) for entry, _ in shares]
    return [Versions.empty(manifest.schema), *in_memory, *parts], tombstones


def _holders(
    keys: list[bytes],
    manifest: Manifest,
    ingested: Sequence[SegmentEntry],
    segments: SegmentStore,
) -> list[SegmentEntry]:
    """Return the segments that may have some of these sorted keys, and some others."""
    if not keys:
        return []
    if len(keys) > FEW_KEYS:
        within = KeyRange(keys[0], keys[-1] + b"\0")
        return [*ingested, *segments.touching(manifest.segments, within)]
    having = (segments.newest_first(manifest.segments, (), key) for key in keys)
    return [*ingested, *{entry.id: entry for some in having for entry in some}.values()]


def _one_by_one(call: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
    return [call(item) for item in items]


def _unsettled_keys(
    ordered: list[bytes], in_memory: Sequence[Versions], entries: Sequence[SegmentEntry]
) -> list[bytes]:
    """Return the keys whose newest whole row in memory may not be the newest there is."""
    if not in_memory:
        return ordered
    newest = max(map(attrgetter("lsn_max"), entries), default=0)
    known: set[bytes] = set()
    for rows in in_memory:
        settled = ~rows.are_partial() & (rows.lsns > newest)
        known.update(rows.keys.filter(pa.array(settled)).to_pylist())
    return [key for key in ordered if key not in known] if known else ordered


Replan = Callable[[int, NotFoundError], View]
"""Returns a view on a newer generation than the given one, in which an object was missing."""


def resume_after_sweeps(scan: Scan, replan: Replan) -> Iterator[Versions]:
    """Yield the rows of a scan; if an object was swept, the same rows from other segments."""
    lsn, *staged = (table.last_lsn for table in scan.tables)
    while True:
        left = scan.key_range
        try:
            for rows in scan:
                yield rows
                left = _rest(left, rows.keys[-1].as_py(), scan.reverse)
            return
        except NotFoundError as error:
            before, view = scan.manifest, replan(scan.manifest.generation, error)
            scan = view.scan(left, scan.now_ms, reverse=scan.reverse, projection=scan.projection)
            above = zip(scan.tables[1:], staged, strict=True)
            grew = any(table.has_newer(last, left) for table, last in above)
            other = _is_another(before, scan.manifest)
            if other or scan.tables[0].last_lsn < lsn or grew or _is_newer(scan, lsn):
                raise _collected_error(lsn, error) from error


def _rest(key_range: KeyRange, last_key: bytes, reverse: bool) -> KeyRange:
    """Return the range after a key, in the direction of reading."""
    if reverse:
        return KeyRange(key_range.start, last_key)
    return KeyRange(last_key + b"\0", key_range.end)


def _is_another(before: Manifest, after: Manifest) -> bool:
    """Whether rows went without being replaced: a repair gave some up, or the namespace was
    dropped and re-created (H48). An empty one has nothing newer, and would end the scan.
    """
    return (before.wal_base, before.skipped_lsns) != (after.wal_base, after.skipped_lsns)


def _is_newer(scan: Scan, lsn: int) -> bool:
    """Whether some source of a scan may have a version above an LSN."""
    head = scan.manifest
    return (
        # A compaction may have dropped a delete, or an expired row, with all that it hid; or have
        # merged a load whose rows sort below this LSN, and were not visible then.
        head.dropped_lsn > lsn
        or head.dropped_expired_ms > scan.now_ms
        or scan.tables[0].has_newer(lsn, scan.key_range)
        or any(max(e.lsn_max, e.visible_lsn) > lsn for e in scan.overlapping())
    )


def _collected_error(lsn: int, error: NotFoundError) -> NotFoundError:
    return NotFoundError(
        f"the rest of this scan is gone: {error.message}, and rows were changed since LSN {lsn}",
        kind=ErrorKind.COLLECTED,
        hint="Scan again, or read a snapshot, which pins its segments",
        **{**error.context, "lsn": lsn},
    )
