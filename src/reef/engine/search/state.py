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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

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
from reef.formats.manifest import Manifest, SegmentEntry
from reef.formats.schema import cast_column
from reef.formats.segment_index import hash_keys, may_have_each
from reef.formats.versions import Versions
from reef.formats.wal_object import OpKind
from reef.runtime import Runtime
from reef.types import KeyRange

KEYS_AT_ONCE = 4096
PAGES_AT_ONCE = 256

Mask = npt.NDArray[np.bool_]
T = TypeVar("T")
R = TypeVar("R")
Ordinals = npt.NDArray[np.uint32]
Places = npt.NDArray[np.int64]


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

    @cached_property
    def is_memory_empty(self) -> bool:
        """Whether all rows and deletes are in segments."""
        return all(table.is_empty for table in self.tables)

    def gather(
        self, call: Callable[[T], R], items: Sequence[T], is_known: Callable[[T], bool]
    ) -> list[R]:
        """Call with each item: those that have to be read in parallel, where reads wait."""
        if self.segments.waits and len(items) > 1:
            missing = [item for item in items if not is_known(item)]
            if len(missing) > 1:
                return self.runtime.map(call, items)
        return [call(item) for item in items]

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
        if not entries and self.is_memory_empty:
            return
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
        """Return which rows `unindexed` yields as well, because it looks up their keys."""
        partial = self._partial_keys(entries)
        if not len(partial):
            return np.zeros(len(rows), bool)
        return np.asarray(pc.is_in(rows.keys, value_set=partial).to_numpy(zero_copy_only=False))

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
        if self.is_memory_empty and not any(entry.patches for entry in entries):
            return found
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
        is_sorted = bool((ordinals[1:] >= ordinals[:-1]).all())
        order = np.arange(len(ordinals)) if is_sorted else np.argsort(ordinals, kind="stable")
        rows = self.segments.rows_at(entry, ordinals[order], columns).under(self.manifest.schema)
        if not is_sorted:
            back = np.empty(len(order), np.int64)
            back[order] = np.arange(len(order))
            rows = rows.take(back)
        return rows.with_lsn(entry.rows_lsn) if entry.rows_lsn else rows

    def values_at(self, entry: SegmentEntry, ordinals: Ordinals, number: int) -> pa.Array | None:
        """Return a column at sorted ordinals of a segment; None if all of it is null."""
        column = self.segments.values_at(entry, ordinals, number)
        data_type = self.manifest.schema.types()[number]
        if column is None or column.type == data_type:
            return column
        return cast_column(column, data_type)

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

    def are_current(
        self,
        rows: Versions,
        own: Sequence[SegmentEntry],
        *,
        in_memory: bool,
        homes: Places | None = None,
    ) -> Mask:
        """Return which whole rows are the newest versions of their keys, and unexpired.

        `own` are the segments that they come from, and `homes`, if given, the place of each row's
        among these: otherwise no two of them have versions of one key that is among the rows.
        `in_memory` says whether the tables are among their sources.
        """
        current = drop_deleted_mask(rows, self.now_ms)
        if not len(rows):
            return current
        if homes is not None and len(own) > 1 and len(rows.keys.unique()) < len(rows):
            for home in np.unique(homes):  # the versions of a key, one by one
                places = np.flatnonzero(homes == home).astype(np.int64)
                source = [own[int(home)]]
                current[places] = self.are_current(rows.take(places), source, in_memory=in_memory)
            return current
        others = self._others(rows, own, homes)
        deletes = [self.segments.deletes(e) for e in self._with_deletes(own, homes)]
        above = not in_memory and not self.is_memory_empty
        if above:
            deletes += [table.range_tombstones for table in self.tables]
        if not others and not above and not any(deletes):
            return current
        order = pc.sort_indices(rows.keys).to_numpy().astype(np.int64)
        ordered = rows.with_fields({}).take(order)
        kept = self._are_uncovered(ordered, deletes)
        if above:
            kept &= ~self._replaced_in_memory(ordered, ordered.keys.to_pylist())
        homes = None if homes is None else homes[order]
        kept &= ~self._replaced_elsewhere(ordered, others, homes, current[order] & kept)
        current[order] &= kept
        return current

    def _with_deletes(
        self, own: Sequence[SegmentEntry], homes: Places | None
    ) -> list[SegmentEntry]:
        """Return the segments whose range deletes may cover rows of some segments.

        With `homes` the rows are candidates, whose own segments may have deletes as well.
        """
        known = {entry.id for entry in own} if homes is None else set()
        return [entry for entry in self.entries if entry.tombstones and entry.id not in known]

    def _others(
        self, rows: Versions, own: Sequence[SegmentEntry], homes: Places | None
    ) -> list[tuple[SegmentEntry, int]]:
        """Return the segments that may have newer versions of rows, each with its place among those
        that the rows are from, -1 if it is none of them.
        """
        oldest = int(rows.lsns.min())
        known = {entry.id: place for place, entry in enumerate(own)}
        found = [
            (entry, known.get(entry.id, -1))
            for entry in self.entries
            if entry.lsn_max >= oldest and entry.rows
        ]
        if homes is None:
            return [one for one in found if one[1] < 0]
        is_own = len(found) == 1 and (homes == found[0][1]).all()
        return [] if is_own else found

    def _replaced_elsewhere(
        self,
        rows: Versions,
        others: Sequence[tuple[SegmentEntry, int]],
        homes: Places | None,
        asked: Mask,
    ) -> Mask:
        """Return which of the asked, sorted rows have a newer version in other segments.

        Their keys are looked up where a segment's filter may have them.
        """
        replaced, keys = np.zeros(len(rows), bool), rows.keys.to_pylist()
        older = self._are_older(rows, keys, others, homes) & asked
        chosen = [
            entry for (entry, _), any_older in zip(others, older, strict=True) if any_older.any()
        ]
        if not chosen:
            return replaced
        hashes = hash_keys(keys)
        found = may_have_each([self.segments.tail(entry).filter for entry in chosen], hashes)
        suspects = [
            (entry, np.flatnonzero(some))
            for entry, some in zip(chosen, found & older[older.any(axis=1)], strict=True)
            if some.any()
        ]

        def look_up(suspect: tuple[SegmentEntry, Places]) -> Mask:
            entry, places = suspect
            sought = [keys[place] for place in places]
            schema = self.manifest.schema
            there = self.segments.find_many(entry, sought, hashes[places], schema, ())
            return _are_replaced(rows, there)

        for mask in self.gather(look_up, suspects, lambda _: False):
            replaced |= mask
        return replaced

    @staticmethod
    def _are_older(
        rows: Versions,
        keys: list[bytes],
        others: Sequence[tuple[SegmentEntry, int]],
        homes: Places | None,
    ) -> Mask:
        """Return by segment which sorted rows are within its keys, and not above its LSNs."""
        older = np.zeros((len(others), len(rows)), bool)
        for place, (entry, number) in enumerate(others):
            part = slice(bisect_left(keys, entry.min_key), bisect_right(keys, entry.max_key))
            if part.start < part.stop:
                older[place, part] = rows.lsns[part] <= entry.lsn_max
                if homes is not None:
                    older[place, part] &= homes[part] != number
        return older

    def _replaced_in_memory(self, rows: Versions, keys: list[bytes]) -> Mask:
        """Return which rows have a newer version in memory, whole or not."""
        replaced = np.zeros(len(rows), bool)
        for table in self.tables:
            for part in table.look_up(keys):
                replaced |= _are_replaced(rows, part)
        return replaced

    def _are_uncovered(self, rows: Versions, deletes: Sequence[object]) -> Mask:
        """Return which sorted rows no range tombstone covers."""
        if not any(deletes):
            return np.ones(len(rows), bool)
        kept = drop_covered(rows, deletes)  # type: ignore[arg-type]
        return np.asarray(pc.is_in(rows.keys, value_set=kept.keys).to_numpy(zero_copy_only=False))


def _are_replaced(rows: Versions, others: Versions) -> Mask:
    """Return which rows have a newer version among others, whole or not."""
    replaced = np.zeros(len(rows), bool)
    if len(others):
        at = pc.index_in(others.keys, value_set=rows.keys).fill_null(-1).to_numpy()
        newer = (others.lsns > rows.lsns[at]) & (at >= 0)
        newer |= (others.lsns == rows.lsns[at]) & (others.seqs > rows.seqs[at]) & (at >= 0)
        replaced[at[newer]] = True
    return replaced


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
