"""The rows of one snapshot, as a search needs them: by segment and ordinal, or all of a source.

A search takes one cut of a view and reads nothing but that: the memtable, the segments, and the
deletes of both. Of a key only the newest version counts, so a candidate that an index returns is a
result only if no other source has a newer version of its key:

    1  memory, and segments whose LSNs reach up to the candidate's: is its key in their filter?
    2  range tombstones of all of them
    3  keys that may be there are looked up, as a read would

Most candidates pass the first two, without a request. Rows that consist of several versions,
patches and merges above a whole row, are in no index as they are read: their keys are collected
from memory and from the segments that have such versions, and looked up.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reef.engine.read.memtable import MemtableCut
from reef.engine.read.merge import drop_covered, drop_deleted, newest_versions
from reef.engine.read.scan import Projection
from reef.engine.read.segments import SegmentStore
from reef.engine.read.view import Scan, View, versions_in
from reef.formats.filter import hash_keys
from reef.formats.manifest import Manifest, SegmentEntry
from reef.formats.versions import Versions
from reef.formats.wal_object import OpKind
from reef.runtime import Runtime
from reef.types import KeyRange

KEYS_AT_ONCE = 4096
PAGES_AT_ONCE = 256

Mask = npt.NDArray[np.bool_]
Ordinals = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class SearchState:
    """One snapshot of a namespace."""

    manifest: Manifest
    tables: tuple[MemtableCut, ...]
    segments: SegmentStore
    now_ms: int
    runtime: Runtime

    @classmethod
    def of(cls, view: View, now_ms: int, runtime: Runtime) -> "SearchState":
        """Cut a view."""
        manifest, tables = view.cut()
        return cls(manifest, tables, view.segments, now_ms, runtime)

    @cached_property
    def entries(self) -> tuple[SegmentEntry, ...]:
        """All segments, those of unfolded loads too."""
        return (*self.tables[0].ingested, *self.manifest.segments)

    # --- all rows of some sources -------------------------------------------------
    def everything(self, projection: Projection) -> Iterator[Versions]:
        """Yield all rows of the snapshot."""
        return iter(self._scan(self.entries, projection))

    def unindexed(
        self, entries: Sequence[SegmentEntry], projection: Projection
    ) -> Iterator[tuple[Versions, bool]]:
        """Yield the rows of memory and of some segments, and whether each piece is known to be
        current; of the others `are_current` decides.
        """
        partial = self._partial_keys(entries)
        keys = partial.to_pylist()
        for piece in self._scan(entries, projection):
            whole = pc.invert(pc.is_in(piece.keys, value_set=partial))
            rows = piece.take(np.flatnonzero(whole).astype(np.int64)) if keys else piece
            if len(rows):
                yield rows, False
        for at in range(0, len(keys), KEYS_AT_ONCE):
            rows = self.newest(keys[at : at + KEYS_AT_ONCE], projection.numbers)
            rows = drop_deleted(rows, self.now_ms)
            if len(rows):
                yield rows, True

    def _scan(self, entries: Sequence[SegmentEntry], projection: Projection) -> Scan:
        chosen = {entry.id for entry in entries}
        ingested = tuple(e for e in self.tables[0].ingested if e.id in chosen)
        segments = tuple(e for e in self.manifest.segments if e.id in chosen)
        return Scan(
            msgspec.structs.replace(self.manifest, segments=segments),
            self.segments,
            (self.tables[0]._replace(ingested=ingested), *self.tables[1:]),
            KeyRange(),
            self.now_ms,
            False,
            projection,
        )

    def are_looked_up(self, rows: Versions, entries: Sequence[SegmentEntry]) -> Mask:
        """Return which rows `unindexed` also yields, because it looks up their keys."""
        return np.asarray(
            pc.is_in(rows.keys, value_set=self._partial_keys(entries)).to_numpy(
                zero_copy_only=False
            )
        )

    def _partial_keys(self, entries: Sequence[SegmentEntry]) -> pa.Array:
        """Return the keys that have patches or merges in memory or in some segments, sorted."""
        ids = frozenset(entry.id for entry in entries)
        if ids not in self._partial:
            keys = sorted(self._find_partial_keys(entries))
            self._partial[ids] = pa.array(keys, pa.binary())
        return self._partial[ids]

    @cached_property
    def _partial(self) -> dict[frozenset[str], pa.Array]:
        return {}

    def _find_partial_keys(self, entries: Sequence[SegmentEntry]) -> set[bytes]:
        found: set[bytes] = set()
        for table in self.tables:
            for pieces in table.pieces(KeyRange(), False):
                for rows in pieces:
                    found.update(_partial(rows))
        for entry in entries:
            if entry.patches:
                for rows in self._key_pages(entry):
                    found.update(_partial(rows))
        return found

    def _key_pages(self, entry: SegmentEntry) -> Iterator[Versions]:
        count = len(self.segments.tail(entry).index.pages.rows)
        for first in range(0, count, PAGES_AT_ONCE):
            pages = range(first, min(first + PAGES_AT_ONCE, count))
            yield self.segments.rows(entry, pages, (), keep=False)

    # --- rows of a segment --------------------------------------------------------
    def rows_at(
        self, entry: SegmentEntry, ordinals: Ordinals, columns: Sequence[int] | None
    ) -> Versions:
        """Return the rows at ordinals of a segment, in their order, with these columns."""
        counts = self.segments.tail(entry).index.pages.rows
        ends = np.cumsum(counts)
        pages = np.searchsorted(ends, ordinals, side="right")
        read, which = np.unique(pages, return_inverse=True)
        rows = self.segments.rows(entry, read.tolist(), columns)
        lengths = counts[read]
        starts = np.cumsum(lengths) - lengths
        places = starts[which] + ordinals.astype(np.int64) - (ends[pages] - counts[pages])
        rows = rows.take(places.astype(np.int64)).under(self.manifest.schema)
        return rows.with_lsn(entry.rows_lsn) if entry.rows_lsn else rows

    # --- which rows are current ---------------------------------------------------
    def newest(self, keys: list[bytes], columns: Sequence[int] | None) -> Versions:
        """Return the newest version of each of some sorted keys, deletes too."""
        found, deletes = versions_in(
            keys,
            self.manifest,
            self.tables,
            self.segments,
            runtime=self.runtime,
            columns=columns,
        )
        return newest_versions(found, self.manifest.schema, deletes)

    def are_current(self, rows: Versions, own: Sequence[SegmentEntry], *, in_memory: bool) -> Mask:
        """Return which whole rows are the newest versions of their keys, and unexpired.

        `own` are the segments that they come from; `in_memory` says whether the tables are among
        their sources.
        """
        current, doubtful = self.may_be_current(rows, own, in_memory=in_memory)
        places = np.flatnonzero(current & doubtful).astype(np.int64)
        if len(places):
            current[places] = self.are_newest(rows.take(places))
        return current

    def may_be_current(
        self, rows: Versions, own: Sequence[SegmentEntry], *, in_memory: bool
    ) -> tuple[Mask, Mask]:
        """Return the same without reading a row: which may be current, and of which of them the
        filter of another segment has the key, so that `are_newest` has to decide.
        """
        if not len(rows):
            return np.zeros(0, bool), np.zeros(0, bool)
        order = pc.sort_indices(rows.keys).to_numpy().astype(np.int64)
        ordered = rows.with_fields({}).take(order)
        keys = ordered.keys.to_pylist()
        known = {entry.id for entry in own}
        others = [entry for entry in self.entries if entry.id not in known]
        deletes = [self.segments.deletes(e) for e in others if e.tombstones]
        current = drop_deleted_mask(ordered, self.now_ms)
        if not in_memory:
            deletes += [table.range_tombstones for table in self.tables]
            current &= ~self._replaced_in_memory(ordered, keys)
        current &= self._uncovered(ordered, deletes)
        doubtful = self._may_be_elsewhere(ordered, keys, others)
        back = np.empty(len(rows), np.int64)
        back[order] = np.arange(len(rows))
        return current[back], doubtful[back]

    def _may_be_elsewhere(
        self, rows: Versions, keys: list[bytes], others: Sequence[SegmentEntry]
    ) -> Mask:
        """Return which sorted rows may have a version in other segments that is not older."""
        suspect, hashes = np.zeros(len(rows), bool), hash_keys(keys)
        oldest = int(rows.lsns.min())
        for entry in others:
            if entry.lsn_max < oldest or not entry.rows:
                continue
            part = slice(bisect_left(keys, entry.min_key), bisect_right(keys, entry.max_key))
            if part.start < part.stop:
                newer = rows.lsns[part] <= entry.lsn_max
                suspect[part] |= newer & self.segments.tail(entry).filter.may_have_many(
                    hashes[part]
                )
        return suspect

    def _replaced_in_memory(self, rows: Versions, keys: list[bytes]) -> Mask:
        """Return which rows have a newer version in memory, whole or not."""
        replaced = np.zeros(len(rows), bool)
        for table in self.tables:
            for part in table.look_up(keys):
                at = pc.index_in(part.keys, value_set=rows.keys).to_numpy(zero_copy_only=False)
                newer = part.lsns > rows.lsns[at]
                newer |= (part.lsns == rows.lsns[at]) & (part.seqs > rows.seqs[at])
                replaced[at[newer]] = True
        return replaced

    def _uncovered(self, rows: Versions, deletes: Sequence[object]) -> Mask:
        """Return which sorted rows no range tombstone covers."""
        if not any(deletes):
            return np.ones(len(rows), bool)
        kept = drop_covered(rows, deletes)  # type: ignore[arg-type]
        return np.asarray(pc.is_in(rows.keys, value_set=kept.keys).to_numpy(zero_copy_only=False))

    def are_newest(self, rows: Versions) -> Mask:
        """Return which whole rows are the newest versions of their keys, by looking them up."""
        newest = self.newest(sorted(set(rows.keys.to_pylist())), ())
        places = pc.index_in(rows.keys, value_set=newest.keys)
        at = places.fill_null(0).to_numpy(zero_copy_only=False)
        if not len(newest):
            return np.zeros(len(rows), bool)
        same = (newest.lsns[at] == rows.lsns) & (newest.seqs[at] == rows.seqs)
        same &= newest.kinds[at] == OpKind.PUT
        return np.asarray(same & places.is_valid().to_numpy(zero_copy_only=False))


def drop_deleted_mask(rows: Versions, now_ms: int) -> Mask:
    """Return which rows are whole, and neither deleted nor expired."""
    alive: Mask = rows.kinds == OpKind.PUT
    if rows.expires_at_ms is not None:
        expired = pc.less_equal(rows.expires_at_ms, now_ms).fill_null(False)
        alive &= ~expired.to_numpy(zero_copy_only=False)
    return alive


def _partial(rows: Versions) -> list[bytes]:
    if not rows.has_partial:
        return []
    keys: list[bytes] = rows.keys.filter(pa.array(rows.are_partial())).to_pylist()
    return keys
