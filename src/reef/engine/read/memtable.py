"""The memtable: committed rows that are not folded yet, ordered by key.

    head     single rows, by key; at most a few hundred
    runs     sorted, immutable blocks of columns, the oldest first (`runs`)
    deletes  range tombstones as disjoint fragments (`tombstones`)

A commit adds to the head, or adds its batch as a run: no row is sorted or copied. A full head
becomes a run. Small runs are merged by the commit that makes too many of them; large ones by
reads, outside the lock and a bounded part at a time, so neither a commit nor a read waits long.
The rows of each run are at least twice those of all newer runs together once reads have caught up:
the number of runs grows with the logarithm of the rows.

A read takes one `MemtableCut`: the memtable as of one instant, immutable and taken in constant
time. Since WAL objects are applied whole, a cut never falls inside one (H15), and a read that uses
one cut cannot combine two states (H69).

A merge drops versions that a newer whole row or a range delete hides. Patches of a key become one,
and so do its merges, if nothing can come between them any more: no late object (`settle`), no row
of an ingest, no range delete. After a fold, `drop_below` drops the rows that are in segments now.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from reef.engine.read.merge import RangeTombstones, count_keys, retained_versions, sorted_places
from reef.engine.read.runs import Run, merged_pieces, split_off
from reef.engine.rows.convert import to_python
from reef.formats.manifest import SegmentEntry
from reef.formats.schema import Schema
from reef.formats.versions import RangeTombstone, Versions, concat_versions, split_ops
from reef.formats.wal_object import FIRST_PARTIAL, AnyOps, OneOp, OpKind
from reef.runtime import leaf_lock
from reef.types import KeyRange

HEAD_ROWS = 128
HEAD_BYTES = 4 << 20
"""A head of this size becomes a run."""
SMALL_RUNS = 16
"""A commit merges this many small runs, or more; together they have at most:"""
SMALL_ROWS = 4_096
SMALL_BYTES = 1 << 20
RUNS_MAX = 4
"""Reads merge a part of the runs if there are more than these."""
PART_ROWS = 65_536
PART_BYTES = 16 << 20
"""Size of the part that one read merges."""
RANGE_BYTES = 250
"""Memory of a range tombstone besides its keys."""

HeadRow = tuple[OneOp, int, int]
"""A row that was written alone, its LSN and its sequence."""


NO_VALUES: Mapping[int, Any] = MappingProxyType({})
NO_CHANGES: Mapping[int, int] = MappingProxyType({})


class Entry(NamedTuple):
    """One version of a row. A tuple, as each point read makes one."""

    lsn: int
    seq: int
    kind: int
    values: Mapping[int, Any] = NO_VALUES
    """By field number; a column that is missing is null."""
    changes: Mapping[int, int] = NO_CHANGES
    """Columns that a patch or merge changes, and how (`Operator`)."""
    expires_at_ms: int | None = None
    merged_at_ms: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether this version hides all older ones."""
        return self.kind < FIRST_PARTIAL


class Head:
    """The newest single row of each key, as of one instant."""

    __slots__ = ("_run", "_schema", "rows")

    def __init__(self, rows: dict[bytes, HeadRow], schema: Schema) -> None:
        self.rows = rows
        self._schema = schema
        self._run: Run | None = None

    def __reduce__(self) -> tuple[type["Head"], tuple[dict[bytes, HeadRow], Schema]]:
        return Head, (self.rows, self._schema)

    def run(self) -> Run:
        """Return the rows as a run; made once."""
        if self._run is None:
            ordered = sorted(self.rows)
            columns = _columns_of(ordered, [self.rows[key] for key in ordered])
            self._run = Run.of_sorted(columns.under(self._schema))
        return self._run


class MemtableCut(NamedTuple):
    """A memtable as of one instant. Immutable."""

    schema: Schema
    first_lsn: int
    """Rows below are in segments, or elsewhere; runs may still have some."""
    last_lsn: int
    head: Head
    runs: tuple[Run, ...]
    range_tombstones: RangeTombstones
    ingested: tuple[SegmentEntry, ...]
    """Segments of ingests that are not folded yet."""
    superseded_lsn: int = 0
    """Some versions that those up to this LSN hide are no longer here."""
    is_empty: bool = False
    """Whether it is known that there is neither a row nor a range delete."""

    def all_runs(self) -> tuple[Run, ...]:
        """Return the runs, and the head as another one."""
        return (*self.runs, self.head.run()) if self.head.rows else self.runs

    def from_lsn(self, first: int) -> "MemtableCut":
        """Return the cut without versions below an LSN."""
        if first <= self.first_lsn:
            return self
        deletes = self.range_tombstones.from_lsn(first)
        return self._replace(first_lsn=first, range_tombstones=deletes)

    def versions(self, key: bytes, *, values: bool = True) -> list[Entry]:
        """Return the versions of a key, newest first: patches, down to the first whole row.

        Without `values`, only their kinds and times: no value has to exist in Python.
        """
        entries: list[Entry] = []
        if self.is_empty:
            return entries
        row = self.head.rows.get(key)
        if row is not None:
            entries.append(_entry_of(*row))
        whole = entries[0].lsn if entries else -1
        for run in reversed(self.runs):
            if whole > run.lsn_max or (chunk := run.chunk_of(key)) is None:
                continue
            for place in chunk.find(key):
                entries.append(entry_at(chunk.rows, place, values=values))
                if entries[-1].is_whole:
                    whole = max(whole, entries[-1].lsn)
        cover = self.range_tombstones.covering(key) if self.range_tombstones else None
        if cover is not None:
            entries.append(Entry(cover.lsn, cover.seq, OpKind.DELETE))
        return _down_to_whole(entries, self.first_lsn) if entries else entries

    def look_up(self, keys: list[bytes]) -> list[Versions]:
        """Return the versions of some sorted keys, in parts; each part is sorted."""
        parts: list[Versions] = []
        rows = self.head.rows
        there = [key for key in keys if key in rows] if rows else []
        if there:
            columns = _columns_of(there, [rows[key] for key in there])
            parts += self._visible(columns.under(self.schema), 0)
        for run in self.runs:
            for found in run.look_up(keys):
                parts += self._visible(found, run.lsn_min)
        return parts

    def pieces(self, key_range: KeyRange, reverse: bool) -> Iterator[Iterator[Versions]]:
        """Yield for each run an iterator of its rows in a range, from one of its ends."""
        for run in self.all_runs():
            yield self._pieces(run, key_range, reverse)

    def merged_pieces(self, key_range: KeyRange, rows_first: int) -> Iterator[Versions | KeyRange]:
        """Yield the newest row of each key in a range, put together by the kernel.

        Ends with the rest of the range if the kernel cannot merge that: at once, without one.
        """
        runs = self.all_runs()
        lsn_min = min((run.lsn_min for run in runs), default=0)
        for piece in merged_pieces(runs, self.schema, key_range, rows_first) if runs else ():
            if isinstance(piece, KeyRange):
                yield piece
            else:
                yield from self._visible(piece, lsn_min)

    def _pieces(self, run: Run, key_range: KeyRange, reverse: bool) -> Iterator[Versions]:
        for piece in run.pieces(key_range, reverse):
            yield from self._visible(piece, run.lsn_min)

    def rows(self, key_range: KeyRange) -> Versions:
        """Return all versions within a range, sorted by key, newest first."""
        parts = [Versions.empty(self.schema)]
        for run in self.all_runs():
            for piece in run.within(key_range):
                parts += self._visible(piece, run.lsn_min)
        if len(parts) == 2:
            return parts[1]
        rows = concat_versions(parts, self.schema)
        return rows.take(sorted_places(rows))

    def within(self, key_range: KeyRange) -> "MemtableCut":
        """Return a cut of a range alone, small to send."""
        rows = self.rows(key_range)
        rows = rows.take(np.arange(len(rows), dtype=np.int64))  # a slice would send it all
        return self._replace(
            head=Head({}, self.schema),
            runs=(Run.of_sorted(rows),) if len(rows) else (),
            range_tombstones=RangeTombstones(self.range_tombstones.within(key_range)),
            ingested=tuple(e for e in self.ingested if key_range.touches(e.min_key, e.max_key)),
        )

    def has_newer(self, lsn: int, key_range: KeyRange) -> bool:
        """Whether a range has a version or a range delete above an LSN."""
        if any(tombstone.lsn > lsn for tombstone in self.range_tombstones.within(key_range)):
            return True
        newer = (run for run in self.all_runs() if run.lsn_max > lsn)
        return any((rows.lsns > lsn).any() for run in newer for rows in run.within(key_range))

    def all_versions(
        self, first_lsn: int, last_lsn: int
    ) -> tuple[Versions, list[RangeTombstone]] | None:
        """Return all versions and range deletes between two LSNs, in key order: for a fold.

        None if versions are missing that were the newest as of `last_lsn`: newer ones have replaced
        them. At the cut's own `last_lsn` that is so only if an object landed before its turn.
        """
        if self.superseded_lsn > last_lsn:
            return None
        cut = self.from_lsn(first_lsn)
        rows = cut.rows(KeyRange())
        if len(rows) and int(rows.lsns.max()) > last_lsn:
            rows = rows.take(np.flatnonzero(rows.lsns <= last_lsn).astype(np.int64))
        return rows, [t for t in cut.range_tombstones if t.lsn <= last_lsn]

    def _visible(self, rows: Versions, lsn_min: int) -> Iterator[Versions]:
        """Yield rows without those below `first_lsn`; nothing if none are left."""
        if lsn_min < self.first_lsn:
            above = np.flatnonzero(rows.lsns >= self.first_lsn).astype(np.int64)
            if len(above) < len(rows):
                rows = rows.take(above, distinct=rows.distinct)
        if len(rows):
            yield rows


class Memtable:
    """The memtable: one thread at a time applies WAL objects, any number of threads read."""

    def __init__(self, schema: Schema, first_lsn: int) -> None:
        self.schema = schema
        self.first_lsn = first_lsn
        self.last_lsn = first_lsn - 1
        self.marks: dict[str, int] = {}
        """How far each stream of a local log has been applied."""
        self.ingested: tuple[SegmentEntry, ...] = ()
        """Segments of ingests that are not folded yet."""
        self.lock = leaf_lock()
        """Held to change this table, and to take cuts of several tables at one instant."""
        self._head: dict[bytes, HeadRow] = {}
        self._head_bytes = 0
        self._runs: tuple[Run, ...] = ()
        self._merge: RunMerge | None = None
        """The merge that reads do, part by part. Commits leave its runs alone."""
        self._is_merging = False
        """Whether a read does a part of it now."""
        self._reserved = 0
        """The runs of the first so many may be in a merge of reads."""
        self._range_tombstones = RangeTombstones()
        self._cut: MemtableCut | None = None
        """The last cut, until something changes."""
        self._newest_lsn = 0
        self._settled_lsn = 0
        """Nothing at or below will be applied any more."""
        self._unjoined_lsn = 0
        """Once this LSN is settled, many patches can be joined that were merged before."""
        self._barrier = 0
        """The LSN of the newest rows of ingests: they are between patches, and not in here."""
        self._superseded_lsn = 0

    @property
    def size(self) -> int:
        """Memory of the rows, in bytes."""
        runs = sum(run.bytes for run in self._runs)
        return runs + self._head_bytes + RANGE_BYTES * len(self._range_tombstones)

    def apply(
        self,
        lsn: int,
        batches: Sequence[AnyOps],
        marks: Mapping[str, int] | None = None,
        *,
        is_early: bool = False,
    ) -> None:
        """Apply one WAL object whole; sequences count over all its batches.

        With `is_early` an object below it is still missing, so `last_lsn` stays.
        """
        seq = 0
        with self.lock:
            self._cut = None
            is_newest = lsn >= self._newest_lsn
            if is_newest:
                self._newest_lsn = lsn
            for ops in batches:
                if is_newest and isinstance(ops, OneOp):
                    if ops.key in self._head:
                        self._superseded_lsn = lsn
                    self._head[ops.key] = ops, lsn, seq
                    self._head_bytes += len(ops.key) + len(ops.value or b"")
                    if len(self._head) >= HEAD_ROWS or self._head_bytes > HEAD_BYTES:
                        self._freeze_head()
                        self._merge_small_runs()
                    seq += 1
                else:
                    self._add_batch(ops, lsn, seq)
                    seq += len(ops)
            if lsn > self.last_lsn and not is_early:
                self.last_lsn = lsn
            if marks:
                self.marks.update(marks)

    def ingest(self, lsn: int, segments: Sequence[SegmentEntry]) -> None:
        """Add the segments that an ingest makes visible."""
        with self.lock:
            self._cut = None
            self.ingested = (*self.ingested, *segments)
            self.last_lsn = max(self.last_lsn, lsn)
            sorts_at = max((segment.lsn_max for segment in segments), default=lsn)
            self._barrier = max(self._barrier, sorts_at)

    def pass_over(self, lsn: int) -> None:
        """Note an LSN that changes no row."""
        if lsn > self.last_lsn:
            with self.lock:
                self._cut = None
                self.last_lsn = lsn

    def settle(self, lsn: int) -> None:
        """Note that nothing at or below an LSN will be applied any more: patches may be joined."""
        self._settled_lsn = lsn

    def cut(self) -> MemtableCut:
        """Return the table as of now."""
        with self.lock:
            return self.cut_locked()

    def tidy_cut(self) -> MemtableCut:
        """Return the table as of now for a read, which merges some runs if there are many."""
        cut = self._cut  # a commit clears it first, with the lock held
        if cut is not None and len(cut.runs) <= RUNS_MAX and not self._unjoined_lsn:
            return cut
        self.tidy()
        return self.cut()

    def cut_locked(self) -> MemtableCut:
        """Return the same; the caller holds the lock."""
        cut = self._cut
        if cut is None:
            cut = self._cut = MemtableCut(
                self.schema,
                self.first_lsn,
                self.last_lsn,
                Head(self._head.copy(), self.schema),
                self._runs,
                self._range_tombstones.share(),
                self.ingested,
                self._superseded_lsn,
                not (self._head or self._runs or self._range_tombstones),
            )
        return cut

    def tidy(self) -> None:
        """Merge small runs, or a part of the large ones, if there are many: called by reads, before
        they take a cut.
        """
        while len(self._runs) > RUNS_MAX or 0 < self._unjoined_lsn <= self._settled_lsn:
            if not self._merge_next():
                break

    def drop_below(self, floor: int, schema: Schema | None = None) -> "Memtable":
        """Return a memtable without the rows below an LSN."""
        kept = Memtable(schema or self.schema, floor)
        with self.lock:
            self._freeze_head()
            runs = [run.from_lsn(floor, kept.schema) for run in self._runs]
            kept._runs = tuple(run for run in runs if run is not None)
            kept._range_tombstones = self._range_tombstones.from_lsn(floor)
            kept.ingested = tuple(e for e in self.ingested if e.visible_lsn >= floor)
            kept.marks = dict(self.marks)
            kept.last_lsn = max(self.last_lsn, floor - 1)
            kept._newest_lsn = self._newest_lsn
            kept._settled_lsn = self._settled_lsn
            kept._unjoined_lsn = self._unjoined_lsn
            kept._barrier = self._barrier
            kept._superseded_lsn = self._superseded_lsn
        return kept

    # --- adding ---------------------------------------------------------------------

    def _add_batch(self, ops: AnyOps, lsn: int, seq: int) -> None:
        rows, tombstones = split_ops(ops.columns(), lsn, seq)
        for tombstone in tombstones:
            if self._range_tombstones.add(tombstone):
                self._superseded_lsn = self._newest_lsn
        if len(rows):
            self._runs = (*self._runs, Run.of_batch(rows.under(self.schema), lsn))
            self._merge_small_runs()

    def _freeze_head(self) -> None:
        """Make a run of the head."""
        if self._head:
            self._runs = (*self._runs, Head(self._head, self.schema).run())
            self._head, self._head_bytes = {}, 0

    # --- merging --------------------------------------------------------------------

    def _merge_small_runs(self) -> None:
        """Merge the newest runs if they are many and small."""
        runs = self._runs
        if len(runs) - self._reserved < SMALL_RUNS:
            return
        start, rows, size = len(runs), 0, 0
        while start > self._reserved:
            rows, size = rows + runs[start - 1].count, size + runs[start - 1].bytes
            if rows > SMALL_ROWS or size > SMALL_BYTES:
                break
            start -= 1
        if len(runs) - start >= SMALL_RUNS and (merge := self._plan(start)) is not None:
            runs = self._runs[merge.first : merge.end]
            self._install(merge, self._merge_part(merge, runs, self._range_tombstones))

    def _merge_next(self) -> bool:
        """Merge small neighbours, or a part of large runs; returns whether they were small.

        Holds the lock only to begin and to end. All small runs are merged before a read: it would
        sort every one of them.
        """
        with self.lock:
            if self._is_merging:
                return False
            small = self._small_neighbours()
            merge = small or self._planned_merge()
            if merge is None:
                return False
            self._is_merging, self._reserved = True, merge.end
            runs, tombstones = self._runs[merge.first : merge.end], self._range_tombstones.share()
        merged: Merged | None = None
        try:
            merged = self._merge_part(merge, runs, tombstones)
        finally:
            with self.lock:
                self._is_merging = False
                rest = merge if merged is None else self._install(merge, merged)
                if small is None:
                    self._merge = rest
                self._reserved = 0 if self._merge is None else self._merge.end
        return small is not None

    def _small_neighbours(self) -> "RunMerge | None":
        """Choose many runs that together are no more than a part."""
        runs, end = self._runs, len(self._runs)
        rows = size = 0
        for place in range(end - 1, self._reserved - 1, -1):
            rows, size = rows + runs[place].count, size + runs[place].bytes
            if rows > PART_ROWS or size > PART_BYTES:
                if end - place > SMALL_RUNS:
                    return self._merge_of(place + 1, end)
                end, rows, size = place, 0, 0
        return self._merge_of(self._reserved, end) if end - self._reserved >= SMALL_RUNS else None

    def _planned_merge(self) -> "RunMerge | None":
        """Return the merge that is in progress, or a new one if there are runs to merge."""
        if self._merge is None and 0 < self._unjoined_lsn <= self._settled_lsn:
            self._unjoined_lsn = 0
            self._merge = self._merge_of(0, len(self._runs)) if self._runs else None
        if self._merge is None:
            self._merge = self._plan(0)
        return self._merge

    def _plan(self, start: int) -> "RunMerge | None":
        """Choose runs to merge: the first one that has less than twice the rows of all newer ones,
        and these. None if all are larger than that.
        """
        newer, first = 0, None
        for place in range(len(self._runs) - 1, start - 1, -1):
            if self._runs[place].count < 2 * newer:
                first = place
            newer += self._runs[place].count
        return None if first is None else self._merge_of(first, len(self._runs))

    def _merge_of(self, first: int, end: int) -> "RunMerge":
        """Return the merge of some runs.

        Patches may be joined if no other version can be between them: their LSNs are above those of
        all older runs, and below those of all newer ones, the head included.
        """
        self._freeze_head()
        runs = self._runs
        above = max([self._barrier, *(run.lsn_max for run in runs[:first])])
        up_to = min([self._settled_lsn, *(run.lsn_min - 1 for run in runs[end:])])
        return RunMerge(first, end, above, up_to, False)

    def _merge_part(
        self, merge: "RunMerge", runs: Sequence[Run], tombstones: RangeTombstones
    ) -> "Merged":
        """Merge the first rows that are not merged yet; changes nothing in here."""
        done = list(runs[:1]) if merge.is_begun else []
        parts, rest = split_off(runs[len(done) :], PART_ROWS, PART_BYTES)
        rows = retained_versions(
            parts,
            self.schema,
            tombstones,
            first_lsn=self.first_lsn,
            joined_above=merge.joined_above,
            joined_up_to=merge.joined_up_to,
        )
        unjoined_lsn = 0
        if len(rows):
            part = Run.of_sorted(rows)
            done = [done[0].followed_by(part) if done else part]
            if part.lsn_max > merge.joined_up_to and 2 * count_keys(rows) < len(rows):
                unjoined_lsn = part.lsn_max
        return Merged(done, rest, len(rows) < sum(map(len, parts)), unjoined_lsn)

    def _install(self, merge: "RunMerge", merged: "Merged") -> "RunMerge | None":
        """Replace the runs of a merge by its result; returns the rest of the merge."""
        runs = (*merged.done, *merged.rest)
        self._runs = (*self._runs[: merge.first], *runs, *self._runs[merge.end :])
        self._cut = None
        if merged.has_dropped:
            self._superseded_lsn = self._newest_lsn
        self._unjoined_lsn = max(self._unjoined_lsn, merged.unjoined_lsn)
        if not merged.rest:
            return None
        return merge._replace(end=merge.first + len(runs), is_begun=bool(merged.done))


class RunMerge(NamedTuple):
    """Neighbouring runs that become one."""

    first: int
    end: int
    joined_above: int
    joined_up_to: int
    """Patches of a key with LSNs above the one and up to the other may be joined."""
    is_begun: bool
    """Whether the first of the runs is the part that has been merged."""


class Merged(NamedTuple):
    """The result of merging a part: the merged run, if it has rows, and the rest of the others."""

    done: list[Run]
    rest: list[Run]
    has_dropped: bool
    unjoined_lsn: int
    """Set if most rows are patches that later objects may still come between."""


def _columns_of(keys: Sequence[bytes], rows: Sequence[HeadRow]) -> Versions:
    """Return single rows of distinct keys in order as columns."""
    ops, lsns, seqs = zip(*rows, strict=True)
    fields = {
        number: pa.array([op.value if op.field == number else None for op in ops], pa.binary())
        for number in {op.field for op in ops if op.value is not None}
    }
    kinds = [OpKind.DELETE if op.value is None else OpKind.PUT for op in ops]
    return Versions(
        pa.array(keys, pa.binary()),
        np.array(lsns, np.int64),
        np.array(seqs, np.uint32),
        np.array(kinds, np.uint8),
        fields,
        distinct=True,
    )


def _entry_of(op: OneOp, lsn: int, seq: int) -> Entry:
    if op.value is None:
        return Entry(lsn, seq, OpKind.DELETE)
    return Entry(lsn, seq, OpKind.PUT, {op.field: op.value})


def _down_to_whole(entries: list[Entry], first_lsn: int) -> list[Entry]:
    """Return versions of one key from the newest to the first whole row."""
    ordered = sorted(entries, key=lambda entry: (entry.lsn, entry.seq), reverse=True)
    kept: list[Entry] = []
    for entry in ordered:
        if entry.lsn < first_lsn:
            break
        kept.append(entry)
        if entry.is_whole:
            break
    return kept


def entry_at(rows: Versions, place: int, *, values: bool = True) -> Entry:
    """Return one version, as Python values."""
    kind = int(rows.kinds[place])
    expiry = rows.expires_at_ms[place].as_py() if rows.expires_at_ms is not None else None
    row = {}
    if values and kind != OpKind.DELETE:
        row = {number: to_python(array[place]) for number, array in rows.fields.items()}
    lsn, seq = int(rows.lsns[place]), int(rows.seqs[place])
    changes, merged_at_ms = changes_at(rows, place, kind)
    return Entry(lsn, seq, kind, row, changes, expiry, merged_at_ms)


def changes_at(rows: Versions, place: int, kind: int) -> tuple[Mapping[int, int], int | None]:
    """Return the columns that a patch or merge changes, and how; and when a merge was written."""
    if kind < FIRST_PARTIAL:
        return NO_CHANGES, None
    codes = ((number, array[place].as_py()) for number, array in rows.touched.items())
    merged_at = None if rows.merged_at_ms is None else rows.merged_at_ms[place].as_py()
    return {number: int(code) for number, code in codes if code}, merged_at


def rows_of_key(versions: Sequence[Entry], schema: Schema) -> Versions:
    """Return the versions of one key as columns."""
    touched = {n: [v.changes.get(n, 0) for v in versions] for n in schema.types()}
    fields = {
        number: pa.array([v.values.get(number) for v in versions], data_type)
        for number, data_type in schema.types().items()
    }
    return Versions(
        pa.array([b""] * len(versions), pa.binary()),
        np.array([v.lsn for v in versions], np.int64),
        np.array([v.seq for v in versions], np.uint32),
        np.array([v.kind for v in versions], np.uint8),
        fields,
        pa.array([v.expires_at_ms for v in versions], pa.int64()),
        {number: pa.array(codes, pa.uint8()) for number, codes in touched.items()},
        merged_at_ms=pa.array([v.merged_at_ms for v in versions], pa.int64()),
    )
