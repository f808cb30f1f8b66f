"""A view: one moment of a namespace, and how it is read.

A view is a manifest, what was committed since, and the segments to look into. What is in
memory goes on to grow under it, by whole WAL objects; a read takes its moment at the call, and
sees that moment to its end. Point reads go from the newest source to the oldest and stop as
soon as nothing older can matter. Scans merge all sources group by group, in bounded memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from reef.engine.reading.cursors import Cursor, LateCursor, RowsCursor, SegmentCursor, merged
from reef.engine.reading.memtable import Entry, Memtable, Moment, entry_at
from reef.engine.reading.merge import drop_deleted, newest_versions
from reef.engine.reading.projection import EVERYTHING, Projection
from reef.engine.reading.segments import SegmentStore
from reef.engine.reading.skipping import Skipping
from reef.engine.reading.tombstones import RangeTombstones
from reef.formats.batch import OpKind
from reef.formats.manifest import Manifest, SegmentEntry
from reef.formats.versions import RangeTombstone, Versions
from reef.types import KeyRange

__all__ = ["Scan", "View"]


@dataclass(frozen=True, slots=True)
class View:
    """What is visible, as of `last_lsn`."""

    manifest: Manifest
    segments: SegmentStore
    memtable: Memtable
    staged: Memtable | None = None
    """What a transaction has written and not committed: newer than everything else."""

    @property
    def last_lsn(self) -> int:
        return self.memtable.last_lsn

    def get(self, key: bytes, now_ms: int) -> Entry | None:
        """Return the row that a key has now; None if it has none."""
        entry = self.newest(key)
        if entry is None or entry.kind != OpKind.PUT:
            return None
        if entry.expires_at_ms is not None and entry.expires_at_ms <= now_ms:
            return None
        return entry

    def newest(self, key: bytes) -> Entry | None:
        """Return a key's newest version, patches laid over what they patch; None if never seen."""
        found = list(self.staged.chain(key)) if self.staged is not None else []
        if not found or found[-1].kind == OpKind.PATCH:
            found += self.memtable.chain(key)
        for entry in self._newest_first(key):
            whole = max((e.lsn for e in found if e.kind != OpKind.PATCH), default=-1)
            if whole > entry.lsn_max:
                break
            found += self._in_segment(entry, key)
        return resolve(found)

    def scan(
        self,
        wanted: KeyRange,
        now_ms: int,
        *,
        reverse: bool = False,
        projection: Projection = EVERYTHING,
    ) -> "Scan":
        """Return the rows of a range, as of now; nothing is fetched before they are asked for."""
        if projection.where is not None:
            wanted = wanted.both(projection.where.key_range())
        moments = self.moments(wanted)
        return Scan(self.manifest, self.segments, moments, wanted, now_ms, reverse, projection)

    def moments(self, wanted: KeyRange) -> tuple[Moment, ...]:
        """Return what is in memory of a range."""
        tables = (self.memtable,) if self.staged is None else (self.memtable, self.staged)
        return tuple(table.moment(wanted) for table in tables)

    def _newest_first(self, key: bytes) -> list[SegmentEntry]:
        everything = (*self.memtable.ingested, *self.manifest.segments)
        having = [e for e in everything if e.min_key <= key <= e.max_key]
        return sorted(having, key=lambda entry: entry.lsn_max, reverse=True)

    def _in_segment(self, entry: SegmentEntry, key: bytes) -> Iterator[Entry]:
        cover = self.segments.deletes(entry).covering(key)
        if cover is not None:
            yield Entry(cover.lsn, cover.seq, OpKind.DELETE)
        if not self.segments.may_have(entry, key):
            return
        group = self.segments.group_of(entry, key)
        if group is not None:
            for place in group.places(key):
                found = entry_at(group.rows, place)
                yield replace(found, lsn=entry.visible_lsn) if entry.visible_lsn else found


def resolve(versions: Iterable[Entry]) -> Entry | None:
    """Lay the patches of one key over the newest whole row below them."""
    ordered = sorted(versions, key=lambda entry: (entry.lsn, entry.seq), reverse=True)
    patches: list[Entry] = []
    for entry in ordered:
        if entry.kind != OpKind.PATCH:
            return _laid_over(entry, patches)
        patches.append(entry)
    return None


def _laid_over(whole: Entry, patches: list[Entry]) -> Entry:
    if not patches or whole.kind == OpKind.DELETE:
        return whole
    values = dict(whole.values)
    for patch in reversed(patches):
        values |= {number: patch.values.get(number) for number in patch.touched}
    return replace(whole, lsn=patches[0].lsn, seq=patches[0].seq, values=values)


@dataclass(frozen=True, slots=True)
class Scan:
    """The rows of a range at one moment. Can be read more than once."""

    manifest: Manifest
    segments: SegmentStore
    moments: tuple[Moment, ...]
    """What was in memory: the namespace's first, then what a transaction has staged."""
    wanted: KeyRange
    now_ms: int
    reverse: bool
    projection: Projection = EVERYTHING
    """Rows that cannot match may be left out; whether the others do is for the caller to see."""

    def __iter__(self) -> Iterator[Versions]:
        """Yield the rows in pieces, by key, from the end that was asked for."""
        overlapping = self.overlapping()
        tombstones = [RangeTombstones(moment.range_tombstones) for moment in self.moments]
        tombstones += [self.segments.deletes(entry) for entry in overlapping]
        deletes = [some for some in tombstones if some]
        cursors: list[Cursor] = [RowsCursor(moment.rows) for moment in self.moments]
        skipping = self.skipping(overlapping)
        cursors += [self._late_cursor(entry, skipping) for entry in overlapping]
        for piece in merged(cursors, self.reverse):
            rows = newest_versions(piece, self.manifest.schema, deletes)
            rows = drop_deleted(rows, self.now_ms)
            if len(rows):
                yield rows.take(np.arange(len(rows) - 1, -1, -1)) if self.reverse else rows

    def _late_cursor(self, entry: SegmentEntry, skipping: Skipping) -> LateCursor:
        near = entry.max_key if self.reverse else entry.min_key
        cursor = LateCursor(near, partial(self._cursor, entry, skipping))
        if self.segments.reads_ahead:
            cursor.open()  # which tells what it will read
        return cursor

    def _cursor(self, entry: SegmentEntry, skipping: Skipping) -> SegmentCursor:
        return SegmentCursor(
            self.segments,
            entry,
            self.wanted,
            reverse=self.reverse,
            schema=self.manifest.schema,
            columns=self.projection.numbers,
            needless=skipping.needless(entry),
        )

    def needless(self, entry: SegmentEntry, overlapping: list[SegmentEntry]) -> frozenset[int]:
        """Return the groups of a segment that may be left out."""
        return self.skipping(overlapping).needless(entry)

    def skipping(self, overlapping: list[SegmentEntry]) -> Skipping:
        """Return what may be left out of each segment."""
        return Skipping(self.projection.where, self.segments, overlapping, self.moments)

    def overlapping(self) -> list[SegmentEntry]:
        """Return the segments that may have a part in it."""
        everything = (*self.moments[0].ingested, *self.manifest.segments)
        return [e for e in everything if self.wanted.touches(e.min_key, e.max_key)]


def range_tombstones_of(segments: SegmentStore, entry: SegmentEntry) -> Sequence[RangeTombstone]:
    """Return a segment's range tombstones; those of an ingest have its LSN, and store 0."""
    if not entry.tombstones:
        return ()
    stored = segments.tail(entry).range_tombstones
    if not entry.visible_lsn:
        return stored
    return [replace(tombstone, lsn=entry.visible_lsn) for tombstone in stored]
