"""A view: one moment of a namespace, and how it is read.

A view is a manifest, what was committed since, and the segments to look into. It never
changes; a writer or a reader replaces it by the next one. Point reads go from the newest
source to the oldest and stop as soon as nothing older can matter. Scans merge all sources
group by group, in bounded memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from reef.engine.cursors import Cursor, RowsCursor, SegmentCursor, merged
from reef.engine.memtable import Entry, Memtable
from reef.engine.merge import drop_covered, drop_deleted, newest_versions
from reef.engine.segments import SegmentStore
from reef.formats.batch import OpKind
from reef.formats.manifest import Manifest, SegmentEntry
from reef.formats.versions import RangeTombstone, Versions
from reef.types import KeyRange

__all__ = ["View"]


@dataclass(frozen=True, slots=True)
class View:
    """What is visible, as of `last_lsn`."""

    manifest: Manifest
    segments: SegmentStore
    memtable: Memtable
    ingested: tuple[SegmentEntry, ...] = ()
    """Segments of ingests that are not folded yet."""

    @property
    def last_lsn(self) -> int:
        return self.memtable.last_lsn

    def get(self, key: bytes, now_ms: int) -> Entry | None:
        """Return the row that a key has now; None if it has none."""
        newest = self.memtable.get(key)
        for entry in self._newest_first(key):
            if newest is not None and newest.lsn > entry.lsn_max:
                break
            newest = _newer(newest, self._in_segment(entry, key))
        if newest is None or newest.kind == OpKind.DELETE:
            return None
        if newest.expires_at_ms is not None and newest.expires_at_ms <= now_ms:
            return None
        return newest

    def scan(self, wanted: KeyRange, now_ms: int, *, reverse: bool = False) -> Iterator[Versions]:
        """Yield the rows of a range in pieces, by key, from either end."""
        overlapping = [e for e in self._all_segments() if wanted.touches(e.min_key, e.max_key)]
        tombstones = self._range_tombstones(overlapping)
        cursors: list[Cursor] = [RowsCursor(self.memtable.versions(wanted.start, wanted.end))]
        cursors += [SegmentCursor(self.segments, entry, wanted, reverse) for entry in overlapping]
        for piece in merged(cursors, reverse):
            rows = newest_versions(piece, self.manifest.schema)
            rows = drop_deleted(drop_covered(rows, tombstones), now_ms)
            if len(rows):
                yield rows.take(np.arange(len(rows) - 1, -1, -1)) if reverse else rows

    def _all_segments(self) -> Sequence[SegmentEntry]:
        return (*self.ingested, *self.manifest.segments)

    def _newest_first(self, key: bytes) -> list[SegmentEntry]:
        having = [e for e in self._all_segments() if e.min_key <= key <= e.max_key]
        return sorted(having, key=lambda entry: entry.lsn_max, reverse=True)

    def _in_segment(self, entry: SegmentEntry, key: bytes) -> Entry | None:
        found = None
        if entry.tombstones:
            for tombstone in self.segments.tail(entry).range_tombstones:
                if tombstone.start <= key < tombstone.end:
                    covering = Entry(tombstone.lsn, tombstone.seq, OpKind.DELETE, ())
                    found = _newer(found, covering)
        if self.segments.may_have(entry, key):
            found = _newer(found, self._in_groups(entry, key))
        return found

    def _in_groups(self, entry: SegmentEntry, key: bytes) -> Entry | None:
        group = self.segments.group_of(entry, key)
        place = group.find(key) if group is not None else None
        if group is None or place is None:
            return None
        rows = group.rows
        values = tuple(
            rows.fields[field.number][place].as_py() if field.number in rows.fields else None
            for field in self.manifest.schema.fields
        )
        expiry = rows.expires_at_ms[place].as_py() if rows.expires_at_ms is not None else None
        lsn = entry.visible_lsn or int(rows.lsns[place])
        return Entry(lsn, int(rows.seqs[place]), int(rows.kinds[place]), values, expiry)

    def _range_tombstones(self, entries: Sequence[SegmentEntry]) -> list[RangeTombstone]:
        tombstones = list(self.memtable.range_tombstones)
        for entry in entries:
            if entry.tombstones:
                tombstones += self.segments.tail(entry).range_tombstones
        return tombstones


def _newer(one: Entry | None, other: Entry | None) -> Entry | None:
    if one is None or other is None:
        return one or other
    return one if (one.lsn, one.seq) >= (other.lsn, other.seq) else other
