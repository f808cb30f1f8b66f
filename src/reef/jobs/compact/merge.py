"""The merge of a compaction, and the task that runs it over one key range.

`Merger` is pure and merges piece by piece, over Arrow data. Of each key the newest version is kept,
as everywhere. Another version may be dropped only if no segment outside of the merge could show a
row in its place. Those segments are known by their key and LSN bounds (`others`), and only those of
the head count: snapshots, retained generations and branches name their own segments, the inputs
among them, and never read the outputs. Later writes are newer, but for the rows of an open
`live_wins` load, which sort at its begin: nothing above `hold_lsn` is dropped while there is one
(H60).

    delete        dropped if no other segment with its key has a version as old or older (H34)
    expired row   the same; otherwise it becomes a delete, since it still hides older rows
    patches       merged into the whole row below them, or into one patch, if no other segment with
                  their key has a version in between; otherwise kept. A patch without a row below is
                  dropped like a delete
    merges        the same; a merge without a row below becomes one. A row that has expired stays
                  while a merge above it, which may be older than its expiry, is in another segment

`MergeTally` counts every dropped and made version by set hash.

`SegmentRun` reads the groups of an input in a key range, in order, once: many contiguous groups per
ranged GET, as many as their size in memory allows. Nothing is cached, since serving needs the cache
more.

`join` joins neighbours by copying their groups; only the tail is new:

    head | groups of the first | groups of the second | new filter, index, footer

The store composes the object from ranges (`Store.compose`): no value is decoded, encoded or sent.
The bytes are read once, for the checksum and for the keys, from which filter and set hash are
computed; every key block is verified. It requires one schema, stored LSNs, no common key and no
group that a cut would split; otherwise the inputs are merged.

**The task** merges one key range of all inputs into one segment, and runs anywhere. The inputs are
read group by group, in large ranges, and written as a stream: memory is bounded, whatever the size
of the inputs. A task is self-contained, and no other task or attempt uses the name of its segment.
A range without rows gives no segment; the driver writes one trace for all such ranges.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reef.config import CompactSettings
from reef.engine.read.merge import fragments, joined_versions, newest_versions, sorted_places
from reef.engine.read.runs import rows_bytes
from reef.engine.read.scan import Cursor, merged
from reef.engine.search.specs import load_indexes
from reef.errors import ErrorKind, InvalidInputError
from reef.formats.coding import Buffer, Codec, corrupt
from reef.formats.manifest import IndexSpec, SegmentEntry
from reef.formats.schema import Schema
from reef.formats.segment import (
    EMPTY,
    PLAIN_VERSION,
    Lineage,
    SegmentTail,
    SetHash,
    check_identity,
    decode_tail,
    set_hash,
)
from reef.formats.segment_index import KeyFilter, hash_keys
from reef.formats.segment_writer import SegmentWriter
from reef.formats.versions import KeysInOrder, RangeTombstone, Versions, concat_versions
from reef.formats.wal_object import OpKind
from reef.jobs.compact.plan import Other, clipped, needed, order_of_runs
from reef.jobs.ingest.staging import entry_of
from reef.manifest.edits import NEVER
from reef.paths import Namespace
from reef.stores import Part, Store
from reef.stores.base import reread_if_damaged
from reef.types import KeyRange

Lsns = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Places = npt.NDArray[np.int64]


@dataclass(slots=True)
class MergeTally:
    """The versions that a merge dropped and made."""

    dropped: SetHash = EMPTY
    made: SetHash = EMPTY
    rows: int = 0
    dropped_lsn: int = 0
    """The newest delete that was dropped."""
    expired: int = 0

    def __add__(self, other: "MergeTally") -> "MergeTally":
        return MergeTally(
            self.dropped + other.dropped,
            self.made + other.made,
            self.rows + other.rows,
            max(self.dropped_lsn, other.dropped_lsn),
            self.expired + other.expired,
        )


@dataclass(slots=True)
class Merger:
    """Merges pieces of sorted runs, in key order; each piece has all versions of its keys."""

    schema: Schema
    others: Sequence[Other] = ()
    tombstones: Sequence[RangeTombstone] = ()
    """Fragments of the inputs' own range deletes, in order."""
    hold_lsn: int = NEVER
    expired_before_ms: int = 0
    tally: MergeTally = field(default_factory=MergeTally)

    def merge(self, parts: Sequence[Versions]) -> Versions:
        """Return the merged rows, sorted by key."""
        rows, order = self._in_order([part for part in parts if len(part)] or parts[:1])
        if not len(rows):
            return rows
        self.tally.rows += len(rows)
        if rows.has_partial:
            rows = rows if order is None else rows.take(order)
            return self._without_deleted(self._combine_versions(rows))
        # Sort only keys, LSNs and sequences until it is known which rows are kept.
        thin = rows.with_fields({})
        thin = thin if order is None else thin.take(order)
        kept = np.flatnonzero(~self._are_covered(thin) & _is_first(thin.keys))
        self._drop(thin, kept)
        if order is not None:
            rows = rows.take(order[kept])
        elif len(kept) < len(rows):
            rows = rows.take(kept)
        return self._without_deleted(rows)

    def _in_order(self, parts: Sequence[Versions]) -> tuple[Versions, Places | None]:
        """Return all rows, and the permutation that sorts them; None if they are sorted."""
        rows = concat_versions(parts, self.schema)
        if len(parts) == 1:
            return rows, None
        ends = [(part.keys[0].as_py(), part.keys[len(part) - 1].as_py()) for part in parts]
        return rows, order_of_runs(rows, ends)

    def _drop(self, rows: Versions, kept: Places) -> None:
        """Count the rows that are not kept."""
        if len(kept) < len(rows):
            gone = np.ones(len(rows), dtype=bool)
            gone[kept] = False
            self.tally.dropped += _hash(rows, gone, rows.kinds)

    def _are_covered(self, rows: Versions) -> Mask:
        """Return which rows are older than a range delete that covers them."""
        covered = np.zeros(len(rows), dtype=bool)
        keys = KeysInOrder(rows.keys)
        low, high = keys[0], keys[len(keys) - 1]
        first = bisect_right(self.tombstones, low, key=lambda t: t.end)
        for tombstone in self.tombstones[first:]:
            if tombstone.start > high:
                break
            span = slice(bisect_left(keys, tombstone.start), bisect_left(keys, tombstone.end))
            lsns, seqs = rows.lsns[span], rows.seqs[span]
            same = (lsns == tombstone.lsn) & (seqs < tombstone.seq)
            covered[span] |= (lsns < tombstone.lsn) | same
        return covered

    # --- deletes and expired rows ---------------------------------------------------
    def _without_deleted(self, rows: Versions) -> Versions:
        """Drop deletes and expired rows that hide nothing; other expired rows become deletes."""
        expired = self._are_expired(rows)
        at = np.flatnonzero((rows.kinds != OpKind.PUT) | expired)
        if not len(at):
            return rows
        needless = np.zeros(len(rows), dtype=bool)
        needless[at] = self._hides_nothing(rows.keys.take(pa.array(at)), rows.lsns[at])
        needless &= ~rows.are_partial() | (rows.kinds == OpKind.PATCH) & _is_only(rows.keys)
        self._count_deletes(rows, needless, expired)
        self._drop(rows, np.flatnonzero(~needless & ~expired))
        deleted = expired & ~needless
        kinds = np.where(deleted, np.uint8(OpKind.DELETE), rows.kinds)
        self.tally.made += _hash(rows, deleted, kinds)
        return _empty_deleted(replace(rows, kinds=kinds), np.flatnonzero(~needless), deleted)

    def _are_expired(self, rows: Versions) -> Mask:
        if rows.expires_at_ms is None or not self.expired_before_ms:
            return np.zeros(len(rows), dtype=bool)
        over = pc.less_equal(rows.expires_at_ms, self.expired_before_ms).fill_null(False)
        expired: Mask = over.to_numpy(zero_copy_only=False) & (rows.kinds == OpKind.PUT)
        if expired.any():
            expired &= ~self._below_merges(rows)
        return expired

    def _below_merges(self, rows: Versions) -> Mask:
        """Return the rows of keys that may have merges above them, here or in other segments."""
        below = np.zeros(len(rows), dtype=bool)
        for other, span in self._others_of(rows.keys):
            below[span] |= other.merges and rows.lsns[span] < other.lsn_max
        if (merges := rows.kinds == OpKind.MERGE).any():
            merged = rows.keys.filter(pa.array(merges))
            below |= pc.is_in(rows.keys, merged).to_numpy(zero_copy_only=False)
        return below

    def _hides_nothing(self, keys: pa.Array, lsns: Lsns) -> Mask:
        """Return which versions hide no older one in another segment (H34)."""
        oldest = np.full(len(keys), NEVER, np.int64)
        for other, span in self._others_of(keys):
            oldest[span] = np.minimum(oldest[span], other.lsn_min)
        nothing: Mask = (lsns < oldest) & (lsns <= self.hold_lsn)
        return nothing

    def _count_deletes(self, rows: Versions, needless: Mask, expired: Mask) -> None:
        self.tally.expired += int(expired.sum())
        deletes = rows.lsns[needless & (rows.kinds == OpKind.DELETE)]
        self.tally.dropped_lsn = max(self.tally.dropped_lsn, int(deletes.max(initial=0)))

    def _others_of(self, keys: pa.Array) -> Iterator[tuple[Other, slice]]:
        """Yield the segments that may have some of these sorted keys, and which."""
        if not len(keys):
            return
        in_order = KeysInOrder(keys)
        low, high = in_order[0], in_order[len(keys) - 1]
        for other in self.others:
            if other.min_key <= high and other.max_key >= low:
                first = bisect_left(in_order, other.min_key)
                yield other, slice(first, bisect_right(in_order, other.max_key))

    # --- patches and merges -----------------------------------------------------------
    def _combine_versions(self, rows: Versions) -> Versions:
        """Make one version of those of each key, if no other version can be in between."""
        before = _hash_all(rows)
        rows = rows.take(np.flatnonzero(~self._are_covered(rows)))
        rows = rows.take(np.flatnonzero(_matters(rows)))
        joined, complete = self._together(rows)
        apart = rows.take(np.flatnonzero(~joined & ~complete))
        self.tally.dropped += before - _hash_all(apart)
        combined = [
            joined_versions(rows.take(np.flatnonzero(joined)), self.schema),
            newest_versions([rows.take(np.flatnonzero(complete))], self.schema),
        ]
        for part in combined:
            self.tally.made += _hash_all(part)
        both = concat_versions([apart, *combined], self.schema)
        both = both.take(sorted_places(both))
        return both if both.has_partial else replace(both, touched={}, merged_at_ms=None)

    def _together(self, rows: Versions) -> tuple[Mask, Mask]:
        """Return the rows of keys whose versions may become fewer, and of those that have no
        versions elsewhere that are older than their newest one."""
        if not len(rows):
            return np.zeros(0, dtype=bool), np.zeros(0, dtype=bool)
        first = _is_first(rows.keys)
        heads, key_of = np.flatnonzero(first), np.cumsum(first) - 1
        tails = np.append(heads[1:], len(rows)) - 1
        newest, oldest = rows.lsns[heads], rows.lsns[tails]
        keys = rows.keys.take(pa.array(heads))
        several = tails > heads
        alone = self._hides_nothing(keys, newest) & (several | rows.are_partial()[heads])
        free: Mask = several & (newest <= self.hold_lsn) & ~alone
        for other, span in self._others_of(keys):
            free[span] &= (newest[span] < other.lsn_min) | (oldest[span] > other.lsn_max)
        return free[key_of], alone[key_of]


# --- helpers ----------------------------------------------------------------------------


def _hash(rows: Versions, which: Mask, kinds: npt.NDArray[np.uint8]) -> SetHash:
    keys = rows.keys.take(pa.array(np.flatnonzero(which)))
    return set_hash(hash_keys(keys), rows.seqs[which], kinds[which])


def _hash_all(rows: Versions) -> SetHash:
    return set_hash(hash_keys(rows.keys), rows.seqs, rows.kinds)


def _is_first(keys: pa.Array) -> Mask:
    """Return which rows are the first of their key."""
    if len(keys) < 2:
        return np.ones(len(keys), dtype=bool)
    repeats = pc.equal(keys[1:], keys[:-1]).to_numpy(zero_copy_only=False)
    return np.concatenate(([True], ~repeats))


def _is_only(keys: pa.Array) -> Mask:
    """Return which rows have a key of their own."""
    first = _is_first(keys)
    only: Mask = first & np.append(first[1:], True)
    return only


def _matters(rows: Versions) -> Mask:
    """Return which versions are the newest whole row of their key, or partial ones above it."""
    first = _is_first(rows.keys)
    whole = (~rows.are_partial()).astype(np.int64)
    before = np.cumsum(whole) - whole
    matters: Mask = before == before[np.flatnonzero(first)][np.cumsum(first) - 1]
    return matters


def _empty_deleted(rows: Versions, kept: npt.NDArray[np.int64], deleted: Mask) -> Versions:
    """Return the kept rows; those that became deletes lose their columns."""
    if not deleted.any():
        return rows.take(kept)
    taken = rows.take(kept)
    places = pa.array(np.arange(len(kept)), mask=deleted[kept])
    expiry = taken.expires_at_ms
    return replace(
        taken,
        fields={number: array.take(places) for number, array in taken.fields.items()},
        expires_at_ms=None if expiry is None else expiry.take(places),
    )


GROUPS_MAX = 512
NO_FILTER = KeyFilter(bytes(32))


def read_tail(store: Store, namespace: Namespace, entry: SegmentEntry) -> SegmentTail:
    """Return the tail of a segment without its filter, which may be large."""
    key = namespace.segment(entry.id, entry.home)

    def read() -> SegmentTail:
        data = read_range(store, key, entry.size - entry.tail_bytes, entry.size)
        tail = decode_tail(data, entry.size, key)
        check_identity(tail.footer, entry.id, key)
        return tail

    return replace(reread_if_damaged(read), filter=NO_FILTER)


class SegmentRun(Cursor):
    """Reads about `bytes_max` of decoded rows at a time, and at least a group."""

    def __init__(
        self,
        store: Store,
        entry: SegmentEntry,
        tail: SegmentTail,
        key_range: KeyRange,
        *,
        schema: Schema,
        bytes_max: int,
    ) -> None:
        super().__init__()
        self._store, self._entry, self._tail = store, entry, tail
        self._key_range, self._schema, self._bytes_max = key_range, schema, bytes_max
        index = tail.index
        self._next_group = bisect_left(index.last_keys, key_range.start)
        self._end = (
            len(index) if key_range.end is None else bisect_left(index.first_keys, key_range.end)
        )
        self._count = 1
        self._columns = sorted(tail.footer.schema.types())

    def _next(self) -> Versions | None:
        first, end = self._next_group, min(self._next_group + self._count, self._end)
        if first >= end:
            return None
        self._next_group = end
        rows = reread_if_damaged(lambda: self._read(first, end))
        each = max(1, rows_bytes(rows) // (end - first))
        self._count = min(max(1, self._bytes_max // each), GROUPS_MAX)
        rows = rows.under(self._schema).within(self._key_range)
        return rows.with_lsn(self._entry.rows_lsn) if self._entry.rows_lsn else rows

    def _read(self, first: int, end: int) -> Versions:
        """Fetch neighbouring groups with one request and decode them."""
        tail = self._tail
        spans = [tail.ranges(group, self._columns) for group in range(first, end)]
        start = spans[0][0][0]
        data = memoryview(read_range(self._store, tail.name, start, spans[-1][-1][1]))
        parts = [
            tail.decode_group(
                group, self._columns, [data[low - start : high - start] for low, high in span]
            )
            for group, span in zip(range(first, end), spans, strict=True)
        ]
        return concat_versions(parts, tail.footer.schema)


def read_range(store: Store, key: str, start: int, end: int) -> bytes:
    """Return a range that the object must have; if it ends before, it is damaged."""
    try:
        return store.get_range(key, start, end)
    except InvalidInputError as error:
        if error.kind is not ErrorKind.INVALID_RANGE:
            raise
        raise corrupt(key, start, "the object ends too early") from error


READ_BYTES = 4 << 20
Groups = tuple[SegmentTail, range]


def can_join(
    entries: Sequence[SegmentEntry],
    tails: Sequence[SegmentTail],
    key_range: KeyRange,
    schema: Schema,
) -> list[Groups] | None:
    """Return each input's groups in a range, in the order of keys; None if they must be merged."""
    for entry, tail in zip(entries, tails, strict=True):
        is_same = tail.footer.schema == schema and tail.footer.version >= PLAIN_VERSION
        if not is_same or entry.visible_lsn or tail.range_tombstones or tail.footer.tombstones:
            return None
    chosen = [(tail, _groups(tail, key_range)) for tail in tails]
    chosen = [(tail, groups) for tail, groups in chosen if groups]
    chosen.sort(key=lambda one: one[0].index.first_keys[one[1][0]])
    ends = [(t.index.first_keys[g[0]], t.index.last_keys[g[-1]]) for t, g in chosen]
    inside = all(key_range.has(key) for both in ends for key in both)
    apart = all(left[1] < right[0] for left, right in pairwise(ends))
    return chosen if chosen and inside and apart else None


def join(store: Store, key: str, writer: SegmentWriter, chosen: Sequence[Groups]) -> MergeTally:
    """Write a segment out of the groups of others; the writer then has its summary."""
    parts: list[Part] = [writer.beginning()]
    tally = MergeTally()
    for tail, groups in chosen:
        parts.append((tail.name, tail.index.span(groups[0])[0], tail.index.span(groups[-1])[1]))
        for group, blocks in _read(store, tail, groups):
            rows = _keys(tail, group, blocks)
            writer.copied(tail.index.entry(group), rows, blocks)
            tally.rows += len(rows)
    parts.append(writer.ending())
    store.compose(key, parts)
    return tally


def _groups(tail: SegmentTail, key_range: KeyRange) -> range:
    index = tail.index
    first = bisect_left(index.last_keys, key_range.start)
    end = len(index) if key_range.end is None else bisect_left(index.first_keys, key_range.end)
    return range(first, end)


def _read(store: Store, tail: SegmentTail, groups: range) -> Iterator[tuple[int, Buffer]]:
    """Yield the bytes of groups, a few at a time with one request."""
    at = groups.start
    while at < groups.stop:
        start, end = tail.index.span(at)[0], at + 1
        while end < groups.stop and tail.index.span(end)[1] - start <= READ_BYTES:
            end += 1
        spans = [tail.index.span(group) for group in range(at, end)]

        def checked(start: int = start, spans: Sequence[tuple[int, int]] = spans) -> list[Buffer]:
            data = memoryview(read_range(store, tail.name, start, spans[-1][1]))
            return [data[low - start : high - start] for low, high in spans]

        yield from zip(range(at, end), reread_if_damaged(checked), strict=True)
        at = end


def _keys(tail: SegmentTail, group: int, blocks: Buffer) -> Versions:
    return tail.decode_keys(group, memoryview(blocks)[: int(tail.index.key_blocks[group])])


@dataclass(frozen=True, slots=True)
class CompactTask:
    """A key range of some segments, to be written as one."""

    store: Store
    namespace: Namespace
    schema: Schema
    settings: CompactSettings
    level: int
    lineage: Lineage
    """Its write id is the segment's name."""
    key_range: KeyRange
    inputs: tuple[SegmentEntry, ...]
    """Those that may have something in the range."""
    others: tuple[Other, ...]
    """Segments that are no inputs and may have versions in the range."""
    hold_lsn: int
    expired_before_ms: int
    join: bool = False
    """Whether to copy groups as they are, if that turns out to be possible."""
    indexes: tuple[IndexSpec, ...] = ()
    """Search indexes of the output. Groups are not copied then, since their rows are needed."""


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The segment that a task wrote, and its tally."""

    segment: SegmentEntry | None
    tally: MergeTally
    joined: bool = False


def run_compact_task(task: CompactTask) -> TaskResult:
    """Merge a range of the inputs and write the result."""
    tails = [read_tail(task.store, task.namespace, entry) for entry in task.inputs]
    joins = task.join and not task.indexes
    groups = can_join(task.inputs, tails, task.key_range, task.schema) if joins else None
    if groups is not None:
        return _join_segments(task, groups)
    deleted = fragments(clipped(range_tombstones(task.inputs, tails), task.key_range))
    kept = needed(deleted, task.others, task.hold_lsn)
    merger = Merger(task.schema, task.others, deleted, task.hold_lsn, task.expired_before_ms)
    merger.tally.dropped_lsn = max((t.lsn for t in set(deleted) - set(kept)), default=0)
    pieces = _merge_runs(task, tails, merger)
    first = next(pieces, None)
    if first is None and not kept:
        return TaskResult(None, merger.tally)
    return TaskResult(write_segment(task, _again(first, pieces), kept), merger.tally)


def _join_segments(task: CompactTask, groups: Sequence[Groups]) -> TaskResult:
    writer = _writer(task, ())
    segment_id = task.lineage.write_id
    tally = join(task.store, task.namespace.segment(segment_id), writer, groups)
    return TaskResult(entry_of(segment_id, writer.summary), tally, joined=True)


def write_trace(task: CompactTask) -> SegmentEntry:
    """Write an empty segment, whose covers have no rows left."""
    return write_segment(task, iter(()), ())


def range_tombstones(
    entries: Sequence[SegmentEntry], tails: Sequence[SegmentTail]
) -> Iterator[RangeTombstone]:
    """Yield range tombstones; those of an ingest store LSN 0 and get its LSN."""
    for entry, tail in zip(entries, tails, strict=True):
        for tombstone in tail.range_tombstones:
            yield replace(tombstone, lsn=entry.rows_lsn or tombstone.lsn)


def _merge_runs(
    task: CompactTask, tails: Sequence[SegmentTail], merger: Merger
) -> Iterator[Versions]:
    bytes_each = task.settings.merge_bytes // max(1, len(tails))
    runs: list[Cursor] = [
        SegmentRun(
            task.store, entry, tail, task.key_range, schema=task.schema, bytes_max=bytes_each
        )
        for entry, tail in zip(task.inputs, tails, strict=True)
    ]
    for parts in merged(runs, reverse=False):
        rows = merger.merge(parts)
        if len(rows):
            yield rows


def _again(first: Versions | None, rest: Iterator[Versions]) -> Iterator[Versions]:
    if first is not None:
        yield first
    yield from rest


def write_segment(
    task: CompactTask, pieces: Iterator[Versions], tombstones: Sequence[RangeTombstone]
) -> SegmentEntry:
    """Write the segment of a task; return its entry."""
    writer = _writer(task, tombstones)
    segment_id = task.lineage.write_id
    task.store.upload(task.namespace.segment(segment_id), writer.write(pieces))
    return entry_of(segment_id, writer.summary)


def _writer(task: CompactTask, tombstones: Sequence[RangeTombstone]) -> SegmentWriter:
    return SegmentWriter(
        task.schema,
        task.level,
        task.lineage,
        codec=Codec[task.settings.codec.upper()],
        group_bytes=task.settings.group_bytes,
        range_tombstones=tombstones,
        indexes=load_indexes(task.store, task.namespace, task.indexes),
    )
