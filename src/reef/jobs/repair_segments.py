"""Saving the rows of a damaged segment, from wherever the bucket still has them.

    its own groups     those whose checksums hold
    its ancestors      the segments that an older, kept generation names in its place
    the log            the batches and loads that the segment covers, if they are still there

Any one of these that is complete gives back all of it. Versions come together by compaction's own
merge (`repair_merge`, H68), over everything that the segment covers, since a row of it may rest on
a version far below its LSN bounds. Only the result is cut to those bounds: what is outside of them
others have the say over, and a delete of theirs may have been dropped since (H34).

Where no source is complete the sound groups stay as they are, and only the ranges in between are
filled with rows from the log, which may be older than those that are lost; the report names these
ranges. Patches whose row may be missing are left out.

The segment that takes its place covers the same LSNs and keys, also if no row is left: otherwise a
rebuild would take an ancestor for live (H49). It has a new name: a condemned or damaged object is
never used again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow.compute as pc

from reef.engine.reading.cache import ByteCache
from reef.engine.reading.segments import SegmentStore
from reef.engine.reading.view import range_tombstones_of
from reef.errors import NotFoundError
from reef.formats.batch import OpKind
from reef.formats.covers import Cover
from reef.formats.filter import hash_keys
from reef.formats.manifest import Manifest, SegmentEntry
from reef.formats.segment import Lineage
from reef.formats.segment_writer import SegmentWriter
from reef.formats.set_hash import EMPTY, set_hash
from reef.formats.versions import RangeTombstone, Versions
from reef.jobs.compact_merge import NEVER
from reef.jobs.repair_blocks import SegmentRemains, segment_remains
from reef.jobs.repair_log import log_versions
from reef.jobs.repair_merge import collapsed, covered_by, hold_lsn_of, in_order, within_bounds
from reef.jobs.repair_report import LostRange, LostSegment
from reef.jobs.segment_entries import entry_of
from reef.manifest.head import HeadFinder
from reef.paths import Namespace
from reef.stores import Store
from reef.types import KeyRange

__all__ = ["SalvageTask", "Salvaged", "run_salvage_task", "write_saved"]

CACHE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class SalvageTask:
    """One damaged segment, and where else its rows may be."""

    store: Store
    namespace: Namespace
    generation: int
    """Whose schemas it is read by."""
    entry: SegmentEntry
    covers: tuple[Cover, ...] = ()
    """The LSNs and keys that it covers; more where its footer is lost."""
    claimed: tuple[Cover, ...] = ()
    """The LSNs and keys that what takes its place covers."""
    lsns: tuple[int, ...] = ()
    """Objects of the log with batches that count in those LSNs."""
    ingested: tuple[SegmentEntry, ...] = ()
    """Intact segments of loads that count in those LSNs."""
    log_from: int = NEVER
    """From this LSN on those two are all there ever was."""
    ancestors: tuple[SegmentEntry, ...] = ()
    """The inputs of the merge that wrote it, if all of them are intact."""
    others: tuple[SegmentEntry, ...] = ()
    """All other segments of the head."""
    in_head: bool = True
    write: bool = False


@dataclass(frozen=True, slots=True)
class Salvaged:
    """What was saved, and what was not."""

    segment: str
    entries: tuple[SegmentEntry, ...]
    lost: LostSegment


@dataclass(frozen=True, slots=True)
class _Source:
    """Versions and range deletes from one place."""

    rows: list[Versions] = field(default_factory=list)
    tombstones: list[RangeTombstone] = field(default_factory=list)

    def since(self, lsn: int) -> "_Source":
        """Return what is not older than an LSN."""
        rows = [part.take(np.flatnonzero(part.lsns >= lsn).astype(np.int64)) for part in self.rows]
        return _Source(rows, [t for t in self.tombstones if t.lsn >= lsn])


@dataclass(frozen=True, slots=True)
class _Saved:
    rows: Versions
    tombstones: list[RangeTombstone]
    whole: bool

    def source(self) -> _Source:
        return _Source([self.rows], self.tombstones)


def run_salvage_task(task: SalvageTask) -> Salvaged:
    """Save what can be saved of a segment; write it, unless this is a dry run."""
    manifest = HeadFinder(task.store, task.namespace).load(task.generation)
    own = _own(task, manifest)
    saved = _saved(task, manifest, own)
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
        entries = (write_saved(task.store, task.namespace, writer, saved.rows),)
    return Salvaged(task.entry.id, entries, _lost(task, own, len(saved.rows), whole=saved.whole))


def _lost(task: SalvageTask, own: SegmentRemains, saved_rows: int, *, whole: bool) -> LostSegment:
    return LostSegment.of(
        task.entry,
        task.namespace.segment(task.entry.id),
        saved_rows=task.entry.rows if whole else min(saved_rows, task.entry.rows),
        ranges=() if whole else _ranges(task, own),
        tombstones_lost=own.tombstones_lost and not whole,
        history_only=not task.in_head,
    )


def _ranges(task: SalvageTask, own: SegmentRemains) -> tuple[LostRange, ...]:
    """Return the key ranges that are lost, unless another source is complete."""
    if own.groups or own.lost:
        return tuple(own.lost)
    return (LostRange(task.entry.min_key, task.entry.max_key, task.entry.rows),)


# --- sources ----------------------------------------------------------------------------


def _saved(task: SalvageTask, manifest: Manifest, own: SegmentRemains) -> _Saved:
    """Return the versions from the first source that is complete, or from all of them."""
    groups = [group.under(manifest.schema) for group in own.groups]
    if _is_whole(own, task.entry):
        return _Saved(in_order(groups, manifest.schema), own.tombstones, whole=True)
    mine = _Source(groups, own.tombstones)
    if task.ancestors:
        source = _from_segments(task, task.ancestors, manifest)
        return _merged(task, manifest, [mine, source], whole=True)
    log = _from_log(task, manifest)
    if _is_complete(task, manifest, log):
        return _merged(task, manifest, [mine, log.since(task.log_from)], whole=True)
    newer = _merged(task, manifest, [log.since(task.log_from)], whole=False)
    rest = [_whole_rows(source, _ranges(task, own)) for source in (log, newer.source())]
    return _merged(task, manifest, [mine, *rest], whole=False)


def _is_complete(task: SalvageTask, manifest: Manifest, log: _Source) -> bool:
    """Whether the log has all that the segment had, from the LSN on from which it has everything.

    The newest version of each of its keys is within its LSN bounds. If that is a whole row or a
    delete, nothing below the bounds matters; a patch needs everything that the segment covers.
    """
    if not task.covers or task.entry.visible_lsn:
        return False  # rows of a load are nowhere else
    if task.log_from <= min(cover.first for cover in task.covers):
        return True
    found = _merged(task, manifest, [log.since(task.log_from)], whole=False)
    rests = bool((found.rows.kinds == OpKind.PATCH).any())
    return task.log_from <= task.entry.lsn_min and not rests


def _whole_rows(source: _Source, ranges: Sequence[LostRange]) -> _Source:
    """Return what an incomplete source may add: whole rows and deletes in lost ranges.

    A patch may have been written for a row that is missing, and would show a row that never was.
    """
    found = _Source(tombstones=source.tombstones)
    for rows in source.rows:
        kept = np.zeros(len(rows), dtype=bool)
        for lost in ranges:
            low = pc.greater_equal(rows.keys, lost.first_key).to_numpy(zero_copy_only=False)
            high = pc.less_equal(rows.keys, lost.last_key).to_numpy(zero_copy_only=False)
            kept |= low & high
        kept &= rows.kinds != OpKind.PATCH
        found.rows.append(rows.take(np.flatnonzero(kept).astype(np.int64)))
    return found


def _own(task: SalvageTask, manifest: Manifest) -> SegmentRemains:
    """Return what is left of the object itself."""
    key, entry = task.namespace.segment(task.entry.id), task.entry
    schemas = [s for s in manifest.schemas if s.id == entry.schema_id] or [manifest.schema]
    try:
        found = segment_remains(task.store.get(key), entry, schemas[0], key)
    except NotFoundError:
        return SegmentRemains(tombstones_lost=entry.tombstones > 0)
    if entry.visible_lsn:
        found.groups = [group.with_lsn(entry.visible_lsn) for group in found.groups]
        found.tombstones = [replace(t, lsn=entry.visible_lsn) for t in found.tombstones]
    return found


def _from_segments(
    task: SalvageTask, entries: Sequence[SegmentEntry], manifest: Manifest
) -> _Source:
    segments = SegmentStore(task.store, task.namespace, ByteCache(CACHE_BYTES))
    found = _Source()
    for entry in entries:
        groups = len(segments.tail(entry).index)
        if groups:
            rows = segments.rows(entry, range(groups)).under(manifest.schema)
            found.rows.append(rows.with_lsn(entry.visible_lsn) if entry.visible_lsn else rows)
        found.tombstones.extend(range_tombstones_of(segments, entry))
    return found


def _from_log(task: SalvageTask, manifest: Manifest) -> _Source:
    """Return the batches and loads that the segment covers."""
    found = _from_segments(task, task.ingested, manifest)
    rows, tombstones = log_versions(task.store, task.namespace, manifest, task.lsns, {})
    rows = in_order([*found.rows, rows], manifest.schema)
    return _Source([covered_by(rows, task.covers)], [*found.tombstones, *tombstones])


# --- merging ----------------------------------------------------------------------------


def _merged(
    task: SalvageTask, manifest: Manifest, sources: Sequence[_Source], *, whole: bool
) -> _Saved:
    """Merge some sources, and cut the result to the segment's own keys and LSNs."""
    entry, end = task.entry, task.entry.max_key + b"\0"
    tombstones = [tombstone for source in sources for tombstone in source.tombstones]
    parts = [part for source in sources for part in source.rows]
    rows = collapsed(parts, tombstones, manifest.schema, task.others, hold_lsn_of(manifest))
    keys = KeyRange(entry.min_key, end)
    cut = {
        RangeTombstone(max(t.start, entry.min_key), min(t.end, end), t.lsn, t.seq)
        for t in tombstones
        if entry.lsn_min <= t.lsn <= entry.lsn_max and keys.overlaps(KeyRange(t.start, t.end))
    }
    return _Saved(within_bounds(rows, entry), sorted(cut), whole)


def _is_whole(own: SegmentRemains, entry: SegmentEntry) -> bool:
    """Whether every version is there: their number and their set hash tell."""
    if own.rows != entry.rows or own.tombstones_lost:
        return False
    return _set_hash(own.groups) == entry.set_hash


def _set_hash(groups: Sequence[Versions]) -> str:
    total = EMPTY
    for group in groups:
        total += set_hash(hash_keys(group.keys), group.seqs, group.kinds)
    return str(total)


def write_saved(
    store: Store, names: Namespace, writer: SegmentWriter, rows: Versions
) -> SegmentEntry:
    """Write a segment of what was saved, under a new name; return its entry."""
    segment_id = store.runtime.ulid()
    now_ms = int(store.runtime.wall_s() * 1000)
    writer.lineage = replace(writer.lineage, write_id=segment_id, created_at_ms=now_ms)
    pieces = [rows] if len(rows) else []
    store.upload(names.segment(segment_id), writer.write(pieces))
    return entry_of(segment_id, writer.summary)
