"""Targeted compaction: rewrite the segments that hold some keys, without these keys.

    find      by key range, block index and key blocks: which live segments hold the keys
    rewrite   each of them by itself, into the same level: the dead versions of the keys are left
              out, every other version and range tombstone is written as it is
    publish   one CAS by the holder of the compactor role: outputs in place of all inputs

A version of a key is *dead* up to the LSN at which the key was known to have no row. No tombstone
is kept for it: the inputs are all segments that hold the key, so that no older version is left for
a tombstone to hide (H34), and versions that are written meanwhile are newer. Segments that do not
hold the keys are not inputs, and no other row changes. A load with `live_wins` that is open brings
in older versions, so that its end has to be awaited (H60).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reef.config import CompactOptions, CompactSettings
from reef.engine.handles.database import Database
from reef.engine.read.scan import merged
from reef.errors import ConflictError
from reef.formats.covers import tidied
from reef.formats.manifest import Manifest, OpenJob, SegmentEntry
from reef.formats.segment import Lineage, SegmentTail, set_hash
from reef.formats.segment_index import hash_keys
from reef.formats.versions import Versions, concat_versions
from reef.formats.wal_object import OpKind
from reef.jobs.compact.job import CompactJob, Compactor, CompactReport
from reef.jobs.compact.merge import (
    CompactTask,
    MergeTally,
    SegmentRun,
    TaskResult,
    range_tombstones,
    read_range,
    read_tail,
    write_segment,
)
from reef.jobs.compact.plan import CompactPlan
from reef.manifest.edits import hold_lsn_of
from reef.manifest.roots import staged_id
from reef.paths import Namespace
from reef.runtime import Executor
from reef.stores import Store
from reef.types import KeyRange

FIND_AT_ONCE = 64
"""Segments that one task examines."""


@dataclass(frozen=True)
class DeadVersions:
    """Sorted keys, and of each the last LSN whose versions are dead."""

    keys: pa.Array
    limits: npt.NDArray[np.int64]

    def mask(self, rows: Versions) -> npt.NDArray[np.bool_]:
        """Return which rows are dead versions."""
        places = pc.index_in(rows.keys, value_set=self.keys).fill_null(-1).to_numpy()
        dead: npt.NDArray[np.bool_] = (places >= 0) & (rows.lsns <= self.limits[places])
        return dead


def keys_between(keys: pa.Array, first: bytes, last: bytes) -> pa.Array:
    """Return the sorted keys from `first` to `last`."""
    inside = pc.and_(pc.greater_equal(keys, first), pc.less_equal(keys, last))
    return keys.filter(inside)


def matching_rows(store: Store, tail: SegmentTail, keys: pa.Array) -> Iterator[Versions]:
    """Yield the versions of sorted keys in a segment, without columns, group by group.

    The block index decides which groups are read, and the key blocks decide: the filter is not
    asked, so that the result also proves that keys are absent.
    """
    for group in range(len(tail.index)):
        bounds = tail.index.first_keys[group], tail.index.last_keys[group]
        purged = keys_between(keys, *bounds)
        if len(purged):
            ((start, end),) = tail.ranges(group, ())
            rows = tail.decode_keys(group, read_range(store, tail.name, start, end))
            found = pc.is_in(rows.keys, value_set=purged).to_numpy(zero_copy_only=False)
            if found.any():
                yield rows.take(np.flatnonzero(found))


# --- find -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FindTask:
    """Live segments to be searched for dead versions."""

    store: Store
    names: Namespace
    entries: tuple[SegmentEntry, ...]
    dead: DeadVersions


def run_find_task(task: FindTask) -> list[bool]:
    """Return of each segment whether it holds a dead version."""
    return task.store.runtime.map(lambda entry: _holds(task, entry), task.entries)


def _holds(task: FindTask, entry: SegmentEntry) -> bool:
    purged = keys_between(task.dead.keys, entry.min_key, entry.max_key)
    if not len(purged):
        return False
    tail = read_tail(task.store, task.names, entry)
    for rows in matching_rows(task.store, tail, purged):
        seen = rows.with_lsn(entry.rows_lsn) if entry.rows_lsn else rows
        if task.dead.mask(seen).any():
            return True
    return False


# --- rewrite ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RewriteTask(CompactTask):
    """One segment, to be written again without dead versions."""

    dead: DeadVersions | None = None


def run_rewrite_task(task: RewriteTask) -> TaskResult:
    """Rewrite a segment; return nothing if no row remains."""
    (entry,) = task.inputs
    tail = read_tail(task.store, task.namespace, entry)
    tombstones = tuple(range_tombstones([entry], [tail]))
    tally = MergeTally()
    pieces = _living(task, entry, tail, tally)
    first = next(pieces, None)
    if first is None and not tombstones:
        return TaskResult(None, tally)
    segment = write_segment(task, _again(first, pieces), tombstones)
    return TaskResult(segment, tally)


def _living(
    task: RewriteTask, entry: SegmentEntry, tail: SegmentTail, tally: MergeTally
) -> Iterator[Versions]:
    """Yield the rows that are kept, and count the others."""
    assert task.dead is not None
    bytes_max = task.settings.merge_bytes
    run = SegmentRun(task.store, entry, tail, KeyRange(), schema=task.schema, bytes_max=bytes_max)
    for parts in merged([run], reverse=False):
        rows = concat_versions(parts, task.schema)
        dead = task.dead.mask(rows)
        tally.rows += len(rows)
        if dead.any():
            _count(rows.take(np.flatnonzero(dead)), tally)
            rows = rows.take(np.flatnonzero(~dead), distinct=rows.distinct)
        if len(rows):
            yield rows


def _count(dead: Versions, tally: MergeTally) -> None:
    tally.dropped += set_hash(hash_keys(dead.keys), dead.seqs, dead.kinds)
    deletes = dead.lsns[dead.kinds == OpKind.DELETE]
    tally.dropped_lsn = max(tally.dropped_lsn, int(deletes.max(initial=0)))


def _again(first: Versions | None, rest: Iterator[Versions]) -> Iterator[Versions]:
    if first is not None:
        yield first
    yield from rest


class RewriteJob(CompactJob):
    """Rewrites each input of a plan by itself."""

    run_task = staticmethod(run_rewrite_task)  # type: ignore[assignment]

    dead: DeadVersions

    def tasks(self) -> list[CompactTask]:
        """Return one task for each input."""
        outlines = self.store.runtime.map(self._outline, self.plan.inputs)
        ancestors = {a for outline in outlines for a in outline.ancestors}
        present = self._present(ancestors)
        runtime, now_ms = self.store.runtime, int(self.store.runtime.wall_s() * 1000)
        job = runtime.ulid()
        tasks: list[CompactTask] = []
        for entry, outline in zip(self.plan.inputs, outlines, strict=True):
            own = staged_id(self.manifest.compactor_job, runtime.ulid())
            older = tuple(sorted({entry.id, *present.intersection(outline.ancestors)}))
            covers = tidied(outline.covers)
            lineage = Lineage(own, now_ms, older, (), job, covers, self.manifest.generation)
            tasks.append(self._rewriting(entry, lineage))
        return tasks

    def _rewriting(self, entry: SegmentEntry, lineage: Lineage) -> RewriteTask:
        return RewriteTask(
            self.store,
            self.names,
            self.manifest.schema,
            self.settings,
            entry.level,
            lineage,
            KeyRange(),
            (entry,),
            (),
            self.hold_lsn,
            0,
            indexes=self.manifest.indexes,
            dead=self.dead,
        )


class Rewriter(Compactor):
    """Takes the compactor role and rewrites the segments that hold dead versions, in one publish.

    With `everything_shared`, segments that a branch reads in other namespaces are rewritten too,
    whatever they hold: the branch has no need of its origin afterwards.
    """

    def __init__(
        self,
        db: Database,
        namespace: str,
        dead: DeadVersions,
        *,
        everything_shared: bool = False,
        executor: Executor | None = None,
        **settings: Unpack[CompactOptions],
    ) -> None:
        super().__init__(db, namespace, executor=executor, **settings)
        self._strategy, self._planner = "purge", self._plan
        self._dead, self._everything_shared = dead, everything_shared
        self._known: dict[tuple[str, int], bool] = {}

    def let_origin_go(self) -> None:
        """Make a branch independent if everything that it shared was rewritten."""
        if self._everything_shared:
            super().let_origin_go()

    def _plan(
        self, segments: Sequence[SegmentEntry], settings: CompactSettings
    ) -> CompactPlan | None:
        self._search(segments)
        inputs = [entry for entry in segments if self._known[_identity(entry)]]
        why = "it holds rows that are erased"
        return CompactPlan(0, tuple(inputs), why=why) if inputs else None

    def _search(self, segments: Sequence[SegmentEntry]) -> None:
        """Find out which segments hold dead versions, once for each."""
        names, store = self._publisher.heads.names, self._db.store
        new = [entry for entry in segments if _identity(entry) not in self._known]
        shared = [entry for entry in new if self._everything_shared and entry.home is not None]
        self._known.update((_identity(entry), True) for entry in shared)
        new = [entry for entry in new if _identity(entry) not in self._known]
        chunks = [tuple(new[at : at + FIND_AT_ONCE]) for at in range(0, len(new), FIND_AT_ONCE)]
        tasks = [FindTask(store, names, chunk, self._dead) for chunk in chunks]
        results = (self._executor or store.runtime).map(run_find_task, tasks)
        for chunk, found in zip(chunks, results, strict=True):
            self._known.update(zip(map(_identity, chunk), found, strict=True))

    def _job(self, manifest: Manifest, plan: CompactPlan) -> CompactJob:
        names = self._publisher.heads.names
        check_backfills(names, manifest.open_jobs, int(self._dead.limits.max(initial=0)))
        job = RewriteJob(self._db, names, self.settings, manifest, plan)
        job.dead = self._dead
        return job


def check_backfills(names: Namespace, open_jobs: Sequence[OpenJob], lsn: int) -> None:
    """Raise ConflictError if an open load may bring in rows below an LSN: they would be visible
    without the deletes that are erased, or be taken for dead (H60)."""
    begin_lsn = hold_lsn_of(open_jobs)
    if begin_lsn < lsn:
        raise ConflictError(
            f"a load of {names.name} with live_wins is open since LSN {begin_lsn}: it may bring in "
            f"rows of the keys",
            hint="Purge again when the load is committed or aborted, and folded",
            namespace=names.name,
            lsn=begin_lsn,
        )


def _identity(entry: SegmentEntry) -> tuple[str, int]:
    return entry.id, entry.visible_lsn


def rewrite(rewriter: Rewriter, attempts_max: int) -> list[CompactReport]:
    """Run until no live segment holds a dead version; each attempt that is overtaken counts."""
    reports: list[CompactReport] = []
    with rewriter:
        for _ in range(attempts_max):
            report = rewriter.step(take_over=True)
            if report is None:
                break
            reports.append(report)
        rewriter.let_origin_go()
    return reports


def figures(reports: Sequence[CompactReport]) -> dict[str, Any]:
    """Return the sums of published rewrites, for a report."""
    done = [report for report in reports if report.published]
    return {
        "segments_rewritten": sum(report.inputs for report in done),
        "versions_dropped": sum(report.rows_read - report.rows_written for report in done),
    }
