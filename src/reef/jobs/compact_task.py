"""A compaction's task: one key range of all inputs becomes one segment. Runs anywhere.

The inputs are read group by group, in large ranges, merged piece by piece (`compact_merge`) and
written as they come: what is in memory at once is bounded, whatever the size of the inputs. A
task knows all that it needs, and its segment has a name that no other task and no other run
uses. A range of which nothing is left gives no segment; the driver notes it in one for all such.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from reef.config import CompactSettings
from reef.engine.reading.cursors import Cursor, merged
from reef.formats.block import Codec
from reef.formats.manifest import SegmentEntry
from reef.formats.schema import Schema
from reef.formats.segment import Lineage
from reef.formats.segment_tail import SegmentTail
from reef.formats.segment_writer import SegmentWriter
from reef.formats.versions import RangeTombstone, Versions
from reef.jobs.compact_join import Groups, can_join, join
from reef.jobs.compact_merge import Merger, Tally
from reef.jobs.compact_ranges import Other, clipped, fragments, needed
from reef.jobs.compact_run import SegmentRun, read_tail
from reef.jobs.segment_entries import entry_of
from reef.paths import Namespace
from reef.stores import Store
from reef.types import KeyRange

__all__ = ["CompactTask", "TaskResult", "run_compact_task", "write_trace"]


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
    wanted: KeyRange
    inputs: tuple[SegmentEntry, ...]
    """Those that may have something in the range."""
    others: tuple[Other, ...]
    """What takes no part, and may have something there too."""
    hold_lsn: int
    expired_before_ms: int
    join: bool = False
    """Whether to copy groups as they are, if that turns out to be possible."""


@dataclass(frozen=True, slots=True)
class TaskResult:
    """What a task wrote, and what it did with what it read."""

    segment: SegmentEntry | None
    tally: Tally
    joined: bool = False


def run_compact_task(task: CompactTask) -> TaskResult:
    """Merge a range of the inputs and write what is left."""
    tails = [read_tail(task.store, task.namespace, entry) for entry in task.inputs]
    groups = can_join(task.inputs, tails, task.wanted, task.schema) if task.join else None
    if groups is not None:
        return _joined(task, groups)
    deleted = fragments(clipped(_range_tombstones(task.inputs, tails), task.wanted))
    kept = needed(deleted, task.others, task.hold_lsn)
    merger = Merger(task.schema, task.others, deleted, task.hold_lsn, task.expired_before_ms)
    merger.tally.dropped_lsn = max((t.lsn for t in set(deleted) - set(kept)), default=0)
    pieces = _merged(task, tails, merger)
    first = next(pieces, None)
    if first is None and not kept:
        return TaskResult(None, merger.tally)
    return TaskResult(_write(task, _again(first, pieces), kept), merger.tally)


def _joined(task: CompactTask, groups: Sequence[Groups]) -> TaskResult:
    writer = _writer(task, ())
    segment_id = task.lineage.write_id
    tally = join(task.store, task.namespace.segment(segment_id), writer, groups)
    return TaskResult(entry_of(segment_id, writer.summary), tally, joined=True)


def write_trace(task: CompactTask) -> SegmentEntry:
    """Write an empty segment: it only says for what it stands, and that nothing is left of it."""
    return _write(task, iter(()), ())


def _range_tombstones(
    entries: Sequence[SegmentEntry], tails: Sequence[SegmentTail]
) -> Iterator[RangeTombstone]:
    """Those of an ingest have its LSN, and store 0."""
    for entry, tail in zip(entries, tails, strict=True):
        for tombstone in tail.range_tombstones:
            yield replace(tombstone, lsn=entry.visible_lsn or tombstone.lsn)


def _merged(task: CompactTask, tails: Sequence[SegmentTail], merger: Merger) -> Iterator[Versions]:
    bytes_each = task.settings.merge_bytes // max(1, len(tails))
    runs: list[Cursor] = [
        SegmentRun(task.store, entry, tail, task.wanted, schema=task.schema, bytes_max=bytes_each)
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


def _write(
    task: CompactTask, pieces: Iterator[Versions], tombstones: Sequence[RangeTombstone]
) -> SegmentEntry:
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
    )
