"""A view: the state of a namespace, and how it is read.

A view is a manifest, the memtable of everything committed since, and the segments of both. The
memtable keeps growing under it, by whole WAL objects, so it is accessed exactly once per read:
every read begins with one call that returns an immutable cut (`Chain` or `Moment`) of rows, range
deletes and ingested segments, taken under one lock, and never goes back to the memtable. Manifest
and memtable are replaced together, as one view. So no read can combine two states (H69).

Rows of a transaction or of a local log are a second table above the memtable; the cut is then
taken of both with both locks held. Point reads go from the newest source to the oldest and stop
as soon as nothing older can matter. Scans merge all sources group by group, in bounded memory.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from reef.engine.reading.cursors import Cursor, LateCursor, RowsCursor, SegmentCursor, merged
from reef.engine.reading.memtable import Chain, Entry, Memtable, Moment, entry_at
from reef.engine.reading.merge import drop_deleted, newest_versions
from reef.engine.reading.projection import EVERYTHING, Projection
from reef.engine.reading.segments import SegmentStore
from reef.engine.reading.skipping import Skipping
from reef.engine.reading.tombstones import RangeTombstones
from reef.formats.batch import OpKind
from reef.formats.manifest import Manifest, SegmentEntry
from reef.formats.versions import RangeTombstone, Versions
from reef.types import KeyRange

__all__ = ["Overlaying", "Scan", "View"]

T = TypeVar("T")


class Overlaying(Protocol):
    """Who owns a table above the memtable that other threads change and replace."""

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

    def get(self, key: bytes, now_ms: int) -> Entry | None:
        """Return the row that a key has now; None if it has none."""
        return _visible(self.newest(key), now_ms)

    def get_each(self, keys: Sequence[bytes], now_ms: int) -> list[Entry | None]:
        """Return the rows that several keys have, all of one state."""
        cut = self._cut(lambda table: table.chains_locked(keys))
        chains = _laid_together(cut) if cut.over is not None else cut.below
        found = zip(keys, chains, strict=True)
        return [_visible(cut.view._newest_in(key, chain), now_ms) for key, chain in found]

    def newest(self, key: bytes) -> Entry | None:
        """Return a key's newest version, patches laid over what they patch; None if never seen."""
        if self.staged is None:
            return self._newest_in(key, self.memtable.chain(key))
        cut = self._cut(lambda table: table.chains_locked((key,)))
        return cut.view._newest_in(key, _laid_together(cut)[0])

    def _newest_in(self, key: bytes, chain: Chain) -> Entry | None:
        """Return the newest version, with the segments that belong to a chain."""
        found = [*chain.entries]
        for entry in self._newest_first(key, chain.ingested):
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
        cut = self._cut(lambda table: table.moment_locked(wanted))
        manifest, moments = cut.view.manifest, _moments(cut)
        return Scan(manifest, self.segments, moments, wanted, now_ms, reverse, projection)

    def look_up(self, keys: Sequence[bytes]) -> tuple[Manifest, tuple[Moment, ...]]:
        """Return what is in memory of some sorted keys, and the manifest that goes with it."""
        cut = self._cut(lambda table: table.look_up_locked(keys))
        return cut.view.manifest, _moments(cut)

    def _cut(self, read: "Callable[[Memtable], T]") -> "_Cut[T]":
        """Read the memtable, and the table above it if there is one, at one instant."""
        view = self
        while True:
            below, over, overlaying = view.memtable, view.staged, view.overlaying
            if over is None:
                with below.lock:
                    return _Cut(view, read(below))
            with below.lock, over.lock:
                if overlaying is None:
                    return _Cut(view, read(below), read(over))
                if overlaying.is_newest(view):
                    return _Cut(view, read(below), read(over), overlaying.first_lsn(below))
            view = overlaying.newest()

    def _newest_first(self, key: bytes, ingested: tuple[SegmentEntry, ...]) -> list[SegmentEntry]:
        everything = (*ingested, *self.manifest.segments)
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


class _Cut(NamedTuple, Generic[T]):
    """What was read of a view's tables at one instant."""

    view: View
    below: T
    over: T | None = None
    first_lsn: int = 0
    """The first LSN of `over` that is not in `below` as well."""


def _laid_together(cut: "_Cut[list[Chain]]") -> list[Chain]:
    """Return the chains of both tables as one for each key."""
    return [
        Chain(_over_entries(over.entries, below.entries, cut.first_lsn), below.ingested)
        for over, below in zip(cut.over or (), cut.below, strict=True)
    ]


def _over_entries(over: list[Entry], below: list[Entry], first_lsn: int) -> list[Entry]:
    above = [entry for entry in over if entry.lsn >= first_lsn]
    return above if above and above[-1].kind != OpKind.PATCH else above + below


def _moments(cut: "_Cut[Moment]") -> tuple[Moment, ...]:
    if cut.over is None:
        return (cut.below,)
    return cut.below, cut.over.from_lsn(cut.first_lsn)


def _visible(entry: Entry | None, now_ms: int) -> Entry | None:
    """Return a version if it is a row that has not expired."""
    if entry is None or entry.kind != OpKind.PUT:
        return None
    if entry.expires_at_ms is not None and entry.expires_at_ms <= now_ms:
        return None
    return entry


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
