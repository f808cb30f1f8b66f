"""Saving the rows of a damaged segment, from wherever the bucket still has them.

    its own groups            those whose checksums hold
    the log                   objects in its LSN range that are still there
    what it was made of       segments that an older, kept generation names in its place

Everything is cut to the segment's own keys and LSNs: outside of them others have the say, and a
delete of theirs may have been dropped since (H34). So the log is read up to where the segment was
made, since what it left out must not come back. If nothing of it is lost, by the log, by its
ancestors, or by the set hash, the report says so; otherwise it names the ranges. What was saved is
written under a new name: a condemned or damaged object is never used again.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from reef.engine.reading.cache import ByteCache
from reef.engine.reading.merge import newest_versions, sorted_places
from reef.engine.reading.segments import SegmentStore
from reef.engine.reading.tombstones import RangeTombstones
from reef.engine.reading.view import range_tombstones_of
from reef.errors import NotFoundError
from reef.formats.batch import OpKind
from reef.formats.covers import Cover, tidied, without
from reef.formats.filter import hash_keys
from reef.formats.manifest import Manifest, SegmentEntry
from reef.formats.segment import Lineage, covers_of
from reef.formats.segment_writer import SegmentWriter
from reef.formats.set_hash import EMPTY, set_hash
from reef.formats.versions import RangeTombstone, Versions, concat_versions
from reef.jobs.repair_blocks import SegmentRemains, segment_remains
from reef.jobs.repair_log import log_rows
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
    lsns: tuple[int, ...] = ()
    """Objects of the log that count and can be read: in its range, and newer ones which hide."""
    log_is_whole: bool = False
    """Whether those are all there ever were."""
    ancestors: tuple[SegmentEntry, ...] = ()
    """What it was made of, if all of that is sound."""
    others: tuple[SegmentEntry, ...] = ()
    """Sound ones that share keys and LSNs with it: it does not stand for what they stand for."""
    in_head: bool = True
    write: bool = False


@dataclass(frozen=True, slots=True)
class Salvaged:
    """What was saved, and what was not."""

    segment: str
    entries: tuple[SegmentEntry, ...]
    lost: LostSegment


@dataclass(slots=True)
class _Saved:
    """Rows and range deletes from one source."""

    parts: list[Versions] = field(default_factory=list)
    tombstones: list[RangeTombstone] = field(default_factory=list)


def run_salvage_task(task: SalvageTask) -> Salvaged:
    """Save what can be saved of a segment; write it, unless this is a dry run."""
    entry = task.entry
    manifest = HeadFinder(task.store, task.namespace).load(task.generation)
    own = _own(task, manifest)
    saved = _Saved([g.under(manifest.schema) for g in own.groups], list(own.tombstones))
    whole = _is_whole(own, entry)
    if not whole and task.ancestors:
        _add_ancestors(saved, task, manifest)
    if not whole and task.lsns:
        rows, ranges = log_rows(task.store, task.namespace, manifest, task.lsns, {})
        saved.parts.append(rows)
        saved.tombstones += ranges
    whole = whole or bool(task.ancestors) or task.log_is_whole
    rows, tombstones = _merged(saved, entry, manifest)
    entries: tuple[SegmentEntry, ...] = ()
    if task.in_head and task.write and (len(rows) or tombstones):
        lineage = Lineage(
            "",
            0,
            ancestors=(entry.id,),
            covers=_covers(task, own),
            generation=manifest.generation,
        )
        writer = SegmentWriter(manifest.schema, entry.level, lineage, range_tombstones=tombstones)
        entries = (write_saved(task.store, task.namespace, writer, rows),)
    return Salvaged(entry.id, entries, _lost(task, own, len(rows), whole=whole))


def _lost(task: SalvageTask, own: SegmentRemains, saved_rows: int, *, whole: bool) -> LostSegment:
    everything = (LostRange(task.entry.min_key, task.entry.max_key, task.entry.rows),)
    ranges = tuple(own.lost) if own.groups or own.lost else everything
    return LostSegment.of(
        task.entry,
        task.namespace.segment(task.entry.id),
        saved_rows=task.entry.rows if whole else min(saved_rows, task.entry.rows),
        ranges=() if whole else ranges,
        tombstones_lost=own.tombstones_lost and not whole,
        history_only=not task.in_head,
    )


def _covers(task: SalvageTask, own: SegmentRemains) -> tuple[Cover, ...]:
    """Return what the segment stood for; where its footer is lost, its bounds, less the others'."""
    entry = task.entry
    if own.footer is not None:
        return covers_of(own.footer, entry.visible_lsn)
    bounds = Cover(entry.lsn_min, entry.lsn_max + 1, entry.min_key, entry.max_key + b"\0")
    segments = SegmentStore(task.store, task.namespace, ByteCache(CACHE_BYTES))
    taken = [covers_of(segments.tail(o).footer, o.visible_lsn) for o in task.others]
    return tidied(without([bounds], [cover for covers in taken for cover in covers]))


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


def _is_whole(own: SegmentRemains, entry: SegmentEntry) -> bool:
    """Whether every version is there: their number and their set hash tell."""
    if own.rows != entry.rows or own.tombstones_lost:
        return False
    total = EMPTY
    for group in own.groups:
        total += set_hash(hash_keys(group.keys), group.seqs, group.kinds)
    return str(total) == entry.set_hash


def _add_ancestors(saved: _Saved, task: SalvageTask, manifest: Manifest) -> None:
    segments = SegmentStore(task.store, task.namespace, ByteCache(CACHE_BYTES))
    for entry in task.ancestors:
        groups = len(segments.tail(entry).index)
        if groups:
            rows = segments.rows(entry, range(groups)).under(manifest.schema)
            saved.parts.append(rows.with_lsn(entry.visible_lsn) if entry.visible_lsn else rows)
        saved.tombstones += range_tombstones_of(segments, entry)


def _merged(
    saved: _Saved, entry: SegmentEntry, manifest: Manifest
) -> tuple[Versions, list[RangeTombstone]]:
    """Return the newest version of each key, cut to the segment's own keys and LSNs.

    What a newer delete or row hides is left out: the segment did not have it either, and the
    delete itself may have been dropped for good.
    """
    end = entry.max_key + b"\0"
    keys = KeyRange(entry.min_key, end)
    rows = concat_versions([Versions.empty(manifest.schema), *saved.parts], manifest.schema)
    rows = rows.take(sorted_places(rows)).within(keys)
    newer = (rows.lsns > entry.lsn_max) & (rows.kinds != OpKind.PATCH)
    hidden = pc.is_in(rows.keys, rows.keys.filter(pa.array(newer)))
    ours = (rows.lsns >= entry.lsn_min) & (rows.lsns <= entry.lsn_max)
    ours &= ~hidden.to_numpy(zero_copy_only=False)
    rows = rows.take(np.flatnonzero(ours).astype(np.int64))
    cut = {
        RangeTombstone(max(t.start, entry.min_key), min(t.end, end), t.lsn, t.seq)
        for t in saved.tombstones
        if entry.lsn_min <= t.lsn <= entry.lsn_max and keys.overlaps(KeyRange(t.start, t.end))
    }
    deleted = [RangeTombstones.of(saved.tombstones)]
    return newest_versions([rows], manifest.schema, deleted), sorted(cut)


def write_saved(
    store: Store, names: Namespace, writer: SegmentWriter, rows: Versions
) -> SegmentEntry:
    """Write a segment of what was saved, under a new name; return its entry."""
    segment_id = store.runtime.ulid()
    now_ms = int(store.runtime.wall_s() * 1000)
    writer.lineage = replace(writer.lineage, write_id=segment_id, created_at_ms=now_ms)
    store.upload(names.segment(segment_id), writer.write([rows]))
    return entry_of(segment_id, writer.summary)
