"""Recover the rows of a damaged segment from every source that the bucket still has.

    1  its own groups: those whose checksums match (`reef.jobs.repair.remains`)
    2  its ancestors: the segments that an older, retained generation names in its place
    3  the log: batches and loads that the segment covers, if they are still there
    4  merge by compaction's own rule (H68): two versions of a key become one row only if no other
       live segment can hold a version in between, which `reef.jobs.compact.merge.Merger` decides
       from key and LSN bounds. Deletes, range deletes, patches and merges without a row below
       are kept
    5  cut the result to the segment's bounds: other segments decide about versions outside, and
       their deletes may have been dropped since (H34)

Any one complete source recovers everything. Otherwise the intact groups stay as they are, and only
the ranges in between are filled with rows from the log, which may be older than the lost ones; the
report names these ranges. Patches and merges whose row may be missing are dropped there.

The new segment covers the same LSNs and keys, even without rows: otherwise a rebuild would take an
ancestor for live (H49). It has a new name: a condemned or damaged object is never used again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reef.engine.context import NamespaceContext
from reef.engine.read.merge import fragments
from reef.engine.read.view import range_tombstones_of
from reef.errors import NotFoundError
from reef.formats.covers import Cover
from reef.formats.manifest import Manifest, SegmentEntry
from reef.formats.schema import Schema
from reef.formats.segment import (
    Lineage,
)
from reef.formats.segment_writer import SegmentWriter
from reef.formats.versions import KeysInOrder, RangeTombstone, Versions, concat_versions
from reef.jobs.compact.merge import Merger
from reef.jobs.compact.plan import Other
from reef.jobs.ingest.staging import entry_of
from reef.jobs.repair.log import log_versions
from reef.jobs.repair.remains import SegmentRemains, segment_remains
from reef.jobs.repair.report import LostRange, LostSegment
from reef.manifest.edits import NEVER, hold_lsn_of
from reef.types import KeyRange

Mask = npt.NDArray[np.bool_]


def in_order(parts: Sequence[Versions], schema: Schema) -> Versions:
    """Return each version once, sorted by key, newest first.

    A row that a job has resolved has the LSN and sequence of its newest patch or merge: if one
    source has the row and another the patch, the row is kept.
    """
    rows = concat_versions([Versions.empty(schema), *parts], schema)
    columns = {"key": rows.keys, "lsn": rows.lsns, "seq": rows.seqs}
    table = pa.table({**columns, "partial": rows.are_partial()})
    order = [("key", "ascending"), ("lsn", "descending"), ("seq", "descending")]
    places = pc.sort_indices(table, [*order, ("partial", "ascending")]).to_numpy().astype(np.int64)
    rows = rows.take(places)
    if len(rows) < 2:
        return rows
    same = pc.equal(rows.keys[1:], rows.keys[:-1]).to_numpy(zero_copy_only=False)
    same &= (rows.lsns[1:] == rows.lsns[:-1]) & (rows.seqs[1:] == rows.seqs[:-1])
    return rows.take(np.flatnonzero(np.concatenate(([True], ~same))).astype(np.int64))


def collapsed(
    parts: Sequence[Versions],
    tombstones: Iterable[RangeTombstone],
    schema: Schema,
    others: Iterable[SegmentEntry],
    hold_lsn: int,
) -> Versions:
    """Merge versions; `others` are the live segments that are not merged."""
    rows = in_order(parts, schema)
    if not len(rows):
        return rows
    bounds = [Other(o.min_key, o.max_key, o.lsn_min, o.lsn_max) for o in others]
    # An older segment over all keys: so the merger drops no version that hides another.
    bounds.append(Other(b"", KeysInOrder(rows.keys)[len(rows) - 1], 0, 0))
    return Merger(schema, bounds, fragments(tombstones), hold_lsn).merge([rows])


def covered_by(rows: Versions, covers: Iterable[Cover], visible_lsn: int = 0) -> Versions:
    """Return the versions within some covers; those of a load count at the slot of its ingest."""
    inside = np.zeros(len(rows), dtype=bool)
    keys, slots = rows.keys, np.full(len(rows), visible_lsn) if visible_lsn else rows.lsns
    for cover in covers:
        mask: Mask = (slots >= cover.first) & (slots < cover.end)
        mask &= pc.greater_equal(keys, cover.start).to_numpy(zero_copy_only=False)
        if cover.stop is not None:
            mask &= pc.less(keys, cover.stop).to_numpy(zero_copy_only=False)
        inside |= mask
    return rows.take(np.flatnonzero(inside).astype(np.int64))


def within_bounds(rows: Versions, entry: SegmentEntry) -> Versions:
    """Return the merged versions that a segment with these bounds may hold.

    Versions outside were hidden when the segment was written, and the version that hid them may
    have been dropped since (H34). The exceptions are versions below a patch or merge inside: the
    segment had all as one row, at the newest LSN.
    """
    if not len(rows):
        return rows
    inside = (rows.lsns >= entry.lsn_min) & (rows.lsns <= entry.lsn_max)
    partial = inside & rows.are_partial()
    patched = pc.is_in(rows.keys, rows.keys.filter(pa.array(partial)))
    below = (rows.lsns < entry.lsn_min) & patched.to_numpy(zero_copy_only=False)
    low = pc.greater_equal(rows.keys, entry.min_key).to_numpy(zero_copy_only=False)
    high = pc.less_equal(rows.keys, entry.max_key).to_numpy(zero_copy_only=False)
    return rows.take(np.flatnonzero((inside | below) & low & high).astype(np.int64))


CACHE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class SalvageTask:
    """A damaged segment, and the other sources of its rows."""

    context: NamespaceContext
    generation: int
    """Generation of the manifest with its schemas."""
    entry: SegmentEntry
    covers: tuple[Cover, ...] = ()
    """The LSNs and keys that it covers; more if its footer is lost."""
    claimed: tuple[Cover, ...] = ()
    """The LSNs and keys that its replacement covers."""
    lsns: tuple[int, ...] = ()
    """Objects of the log with batches that count in those LSNs."""
    ingested: tuple[SegmentEntry, ...] = ()
    """Intact segments of loads that count in those LSNs."""
    log_from: int = NEVER
    """From this LSN on those two are complete."""
    ancestors: tuple[SegmentEntry, ...] = ()
    """The inputs of the merge that wrote it, if all of them are intact."""
    others: tuple[SegmentEntry, ...] = ()
    """All other segments of the head."""
    in_head: bool = True
    write: bool = False


@dataclass(frozen=True, slots=True)
class Salvaged:
    """The replacement of a damaged segment, and the rows that are lost."""

    segment: str
    entries: tuple[SegmentEntry, ...]
    lost: LostSegment


@dataclass(frozen=True, slots=True)
class _VersionSource:
    """Versions and range deletes from one source."""

    rows: list[Versions] = field(default_factory=list)
    tombstones: list[RangeTombstone] = field(default_factory=list)
    loads: list[tuple[int, Versions]] = field(default_factory=list)
    """Loads: the slot of each ingest, and its rows, which may sort at another LSN."""

    def since(self, lsn: int) -> "_VersionSource":
        """Return the versions of slots from an LSN on."""
        rows = [part.take(np.flatnonzero(part.lsns >= lsn).astype(np.int64)) for part in self.rows]
        tombstones = [t for t in self.tombstones if t.lsn >= lsn]
        return _VersionSource(rows, tombstones, [load for load in self.loads if load[0] >= lsn])

    def parts(self) -> list[Versions]:
        """Return all rows, in parts."""
        return [*self.rows, *(rows for _, rows in self.loads)]

    def without(self, groups: Sequence[Versions]) -> "_VersionSource":
        """Return versions of keys outside intact groups, which have all versions of their keys.

        A group may have several merges as one: together with the merges it would count twice.
        """
        known = pa.concat_arrays([pa.array([], pa.binary()), *(group.keys for group in groups)])

        def others(rows: Versions) -> Versions:
            there = pc.is_in(rows.keys, known).to_numpy(zero_copy_only=False)
            return rows.take(np.flatnonzero(~there))

        loads = [(lsn, others(rows)) for lsn, rows in self.loads]
        return _VersionSource([others(part) for part in self.rows], self.tombstones, loads)


@dataclass(frozen=True, slots=True)
class _Saved:
    rows: Versions
    tombstones: list[RangeTombstone]
    whole: bool

    def source(self) -> _VersionSource:
        return _VersionSource([self.rows], self.tombstones)


def run_salvage_task(task: SalvageTask) -> Salvaged:
    """Recover the rows of a segment; write them unless this is a dry run."""
    manifest = task.context.heads.load(task.generation)
    own = _own(task, manifest)
    saved = _salvage_versions(task, manifest, own)
    entries: tuple[SegmentEntry, ...] = ()
    if task.in_head and task.write and (len(saved.rows) or saved.tombstones or task.claimed):
        lineage = Lineage(
            "",
            0,
            ancestors=(task.entry.id,),
            covers=task.claimed,
            generation=manifest.generation,
        )
        writer = SegmentWriter(
            manifest.schema, task.entry.level, lineage, range_tombstones=saved.tombstones
        )
        entries = (write_saved(task.context, writer, saved.rows),)
    return Salvaged(
        task.entry.id, entries, _lost_segment(task, own, len(saved.rows), whole=saved.whole)
    )


def _lost_segment(
    task: SalvageTask, own: SegmentRemains, saved_rows: int, *, whole: bool
) -> LostSegment:
    return LostSegment.of(
        task.entry,
        task.context.names.segment(task.entry.id, task.entry.home),
        saved_rows=task.entry.rows if whole else min(saved_rows, task.entry.rows),
        ranges=() if whole else _ranges(task, own),
        tombstones_lost=own.tombstones_lost and not whole,
        history_only=not task.in_head,
    )


def _ranges(task: SalvageTask, own: SegmentRemains) -> tuple[LostRange, ...]:
    """Return the key ranges that are lost, unless another source is complete."""
    if own.lost or own.has_all_rows(task.entry):
        return tuple(own.lost)
    return (LostRange(task.entry.min_key, task.entry.max_key, task.entry.rows),)


# --- sources ----------------------------------------------------------------------------


def _salvage_versions(task: SalvageTask, manifest: Manifest, own: SegmentRemains) -> _Saved:
    """Return the versions of the first complete source, or of all of them."""
    groups = [group.under(manifest.schema) for group in own.groups]
    if own.has_all_rows(task.entry) and not own.tombstones_lost:
        return _Saved(in_order(groups, manifest.schema), own.tombstones, whole=True)
    mine = _VersionSource(groups, own.tombstones)
    if task.ancestors:
        source = _from_segments(task, task.ancestors, manifest).without(groups)
        return _merge_sources(task, manifest, [mine, source], whole=True)
    log = _from_log(task, manifest).without(groups)
    if _is_complete(task, manifest, log):
        return _merge_sources(task, manifest, [mine, log.since(task.log_from)], whole=True)
    newer = _merge_sources(task, manifest, [log.since(task.log_from)], whole=False)
    rest = [_whole_rows(source, _ranges(task, own)) for source in (log, newer.source())]
    return _merge_sources(task, manifest, [mine, *rest], whole=False)


def _is_complete(task: SalvageTask, manifest: Manifest, log: _VersionSource) -> bool:
    """Whether the part of the log that is complete has all rows of the segment.

    The newest version of each of its keys is within its LSN bounds. If that is a whole row or a
    delete, nothing below the bounds matters; a patch or merge needs everything that the segment
    covers.
    """
    if not task.covers or task.entry.visible_lsn:
        return False  # rows of a load are in no other place
    if task.log_from <= min(cover.first for cover in task.covers):
        return True
    found = _merge_sources(task, manifest, [log.since(task.log_from)], whole=False)
    return task.log_from <= task.entry.lsn_min and not found.rows.has_partial


def _whole_rows(source: _VersionSource, ranges: Sequence[LostRange]) -> _VersionSource:
    """Return the whole rows and deletes of an incomplete source in lost ranges.

    A patch or merge may have been written for a missing row, and would show one that never existed.
    """
    found = _VersionSource(tombstones=source.tombstones)
    for rows in source.parts():
        kept = np.zeros(len(rows), dtype=bool)
        for lost in ranges:
            low = pc.greater_equal(rows.keys, lost.first_key).to_numpy(zero_copy_only=False)
            high = pc.less_equal(rows.keys, lost.last_key).to_numpy(zero_copy_only=False)
            kept |= low & high
        kept &= ~rows.are_partial()
        found.rows.append(rows.take(np.flatnonzero(kept).astype(np.int64)))
    return found


def _own(task: SalvageTask, manifest: Manifest) -> SegmentRemains:
    """Return the intact parts of the object itself."""
    entry = task.entry
    key = task.context.names.segment(entry.id, entry.home)
    schemas = [s for s in manifest.schemas if s.id == entry.schema_id] or [manifest.schema]
    try:
        found = segment_remains(task.context.store.get(key), entry, schemas[0], key)
    except NotFoundError:
        return SegmentRemains(tombstones_lost=entry.tombstones > 0)
    if entry.rows_lsn:
        found.groups = [group.with_lsn(entry.rows_lsn) for group in found.groups]
        found.tombstones = [replace(t, lsn=entry.rows_lsn) for t in found.tombstones]
    return found


def _from_segments(
    task: SalvageTask, entries: Sequence[SegmentEntry], manifest: Manifest
) -> _VersionSource:
    segments = task.context.segments(CACHE_BYTES)
    found = _VersionSource()
    for entry in entries:
        pages = len(segments.tail(entry).index.pages.rows)
        if pages:
            rows = segments.rows(entry, range(pages)).under(manifest.schema)
            if entry.visible_lsn:
                found.loads.append((entry.visible_lsn, rows.with_lsn(entry.rows_lsn)))
            else:
                found.rows.append(rows)
        found.tombstones.extend(range_tombstones_of(segments, entry))
    return found


def _from_log(task: SalvageTask, manifest: Manifest) -> _VersionSource:
    """Return the batches and loads that the segment covers."""
    found = _from_segments(task, task.ingested, manifest)
    rows, tombstones = log_versions(task.context, manifest, task.lsns, {})
    loads = [(lsn, covered_by(part, task.covers, lsn)) for lsn, part in found.loads]
    logged = covered_by(rows, task.covers)
    return _VersionSource([logged], [*found.tombstones, *tombstones], loads)


# --- merging ----------------------------------------------------------------------------


def _merge_sources(
    task: SalvageTask, manifest: Manifest, sources: Sequence[_VersionSource], *, whole: bool
) -> _Saved:
    """Merge some sources, and cut the result to the segment's own keys and LSNs."""
    entry, end = task.entry, task.entry.max_key + b"\0"
    tombstones = [tombstone for source in sources for tombstone in source.tombstones]
    parts = [part for source in sources for part in source.parts()]
    hold_lsn = hold_lsn_of(manifest.open_jobs)
    rows = collapsed(parts, tombstones, manifest.schema, task.others, hold_lsn)
    keys = KeyRange(entry.min_key, end)
    cut = {
        RangeTombstone(max(t.start, entry.min_key), min(t.end, end), t.lsn, t.seq)
        for t in tombstones
        if entry.lsn_min <= t.lsn <= entry.lsn_max and keys.overlaps(KeyRange(t.start, t.end))
    }
    return _Saved(within_bounds(rows, entry), sorted(cut), whole)


def write_saved(context: NamespaceContext, writer: SegmentWriter, rows: Versions) -> SegmentEntry:
    """Write recovered rows as a segment under a new name; return its entry."""
    segment_id = context.runtime.ulid()
    now_ms = int(context.runtime.wall_s() * 1000)
    writer.lineage = replace(writer.lineage, write_id=segment_id, created_at_ms=now_ms)
    pieces = [rows] if len(rows) else []
    context.store.upload(context.names.segment(segment_id), writer.write(pieces))
    return entry_of(segment_id, writer.summary)
