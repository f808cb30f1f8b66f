"""One job of a compaction, from its plan to what is to be published.

The inputs' tails are read for three things: where to cut a large job, so that its tasks have
about as much to do each; which ancestors the outputs have; and, by the tasks, how to read on.
Every footer names its siblings, the outputs of all tasks, and its ancestors: the inputs and
theirs, as far as their objects are still there. That is an audit, and what a rebuild goes by;
what is visible the manifest alone decides (H37).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from reef.config import CompactSettings
from reef.engine.database import Database
from reef.errors import InternalError
from reef.formats.covers import Cover, clipped, tidied
from reef.formats.manifest import Manifest, SegmentEntry
from reef.formats.segment import Lineage, covers_of
from reef.jobs.compact_merge import NEVER, Tally
from reef.jobs.compact_plan import CompactPlan, split_keys
from reef.jobs.compact_ranges import Other
from reef.jobs.compact_run import read_tail
from reef.jobs.compact_task import CompactTask, TaskResult, run_compact_task, write_trace
from reef.jobs.executor import Executor, LocalExecutor
from reef.manifest import edits
from reef.manifest.roots import staged_id
from reef.manifest.sums import total
from reef.paths import Namespace
from reef.types import KeyRange

__all__ = ["CompactJob"]

SAMPLES_MAX = 1000
"""Places at which one input may be cut: a thousandth of it is exact enough."""


@dataclass(frozen=True, slots=True)
class _Outline:
    """What a driver keeps of an input's tail."""

    ancestors: tuple[str, ...]
    covers: tuple[Cover, ...]
    samples: tuple[tuple[bytes, int], ...]
    """First keys of groups, and the bytes up to the next one."""


class CompactJob:
    """What one plan needs besides itself. Changes nothing that is visible."""

    def __init__(
        self,
        db: Database,
        names: Namespace,
        settings: CompactSettings,
        manifest: Manifest,
        plan: CompactPlan,
    ) -> None:
        self.store, self.names, self.settings = db.store, names, settings
        self.manifest, self.plan = manifest, plan
        self.hold_lsn = min(
            (job.begin_lsn for job in manifest.open_jobs if job.live_wins), default=NEVER
        )
        self.expired_before_ms = self._expired_before_ms()

    def run(self, executor: Executor | None) -> list[TaskResult]:
        """Run the tasks: a few at a time here, all at once where others run them."""
        if not self.plan.inputs:
            return []
        tasks = self.tasks()
        if executor is not None:
            return self._with_trace(tasks, executor.map(run_compact_task, tasks))
        local, step = LocalExecutor(self.store.runtime), self.settings.tasks_max
        results: list[TaskResult] = []
        for first in range(0, len(tasks), step):
            results += local.map(run_compact_task, tasks[first : first + step])
        return self._with_trace(tasks, results)

    def tasks(self) -> list[CompactTask]:
        """Return one task for each output."""
        inputs = self.plan.inputs
        outlines = self.store.runtime.gather(
            [lambda e=entry: self._outline(e) for entry in inputs]  # type: ignore[misc]
        )
        samples = [sample for outline in outlines for sample in outline.samples]
        cuts = split_keys(samples, self.plan.outputs(self.settings))
        cuts = sorted({*cuts, *self.plan.cuts})
        ranges = [KeyRange(*ends) for ends in zip([b"", *cuts], [*cuts, None], strict=True)]
        covers = tidied(cover for outline in outlines for cover in outline.covers)
        lineages = self._lineages(ranges, self._ancestors(outlines), covers)
        return [
            self._task(wanted, lineage) for wanted, lineage in zip(ranges, lineages, strict=True)
        ]

    def checked(self, results: Sequence[TaskResult]) -> edits.Compacted:
        """Return what is to be published, once it is proved that nothing was lost."""
        plan, tally = self.plan, sum((result.tally for result in results), Tally())
        outputs = [result.segment for result in results if result.segment is not None]
        read = total(plan.inputs)
        if total(outputs) != read - tally.dropped + tally.made:
            raise InternalError(
                f"a compaction of {self.names.name} wrote versions that add up to "
                f"{total(outputs)}: its inputs have {read}, {tally.dropped} were dropped, "
                f"{tally.made} made"
            )
        epoch = self.manifest.compactor_epoch
        return edits.Compacted(
            epoch=epoch,
            inputs=tuple(segment.id for segment in (*plan.inputs, *plan.moved)),
            outputs=(*outputs, *plan.moved),
            oldest_lsn=min(self.manifest.wal_floor, self.hold_lsn),
            known=frozenset(segment.id for segment in self.manifest.segments),
            dropped=tally.dropped,
            made=tally.made,
            dropped_lsn=tally.dropped_lsn,
            dropped_expired_ms=self.expired_before_ms if tally.expired else 0,
        )

    def figures(self, results: Sequence[TaskResult]) -> dict[str, Any]:
        """Return what a report tells of a job that was published."""
        tally = sum((result.tally for result in results), Tally())
        outputs = [result.segment for result in results if result.segment is not None]
        return {
            "jobs": 1,
            "inputs": len(self.plan.inputs),
            "input_bytes": self.plan.bytes,
            "outputs": len(outputs),
            "output_bytes": sum(segment.size for segment in outputs),
            "moved": len(self.plan.moved),
            "joined": sum(result.joined for result in results),
            "rows_read": tally.rows,
            "rows_written": sum(segment.rows for segment in outputs),
            "expired": tally.expired,
            "read": str(total(self.plan.inputs)),
            "dropped": str(tally.dropped),
            "made": str(tally.made),
        }

    # --- parts of a task ------------------------------------------------------------
    def _with_trace(
        self, tasks: Sequence[CompactTask], results: list[TaskResult]
    ) -> list[TaskResult]:
        """Where nothing is left of some keys, or of all, one empty segment says so.

        Otherwise nothing would: a rebuild finds a hole there, or takes an input that a snapshot
        pins for live (H49).
        """
        gone = [
            at
            for at, (task, result) in enumerate(zip(tasks, results, strict=True))
            if result.segment is None and task.lineage.covers
        ]
        if not gone:
            return results
        first, covers = gone[0], tidied(c for at in gone for c in tasks[at].lineage.covers)
        whole = replace(tasks[first], lineage=replace(tasks[first].lineage, covers=covers))
        traced = replace(results[first], segment=write_trace(whole))
        return [*results[:first], traced, *results[first + 1 :]]

    def _task(self, wanted: KeyRange, lineage: Lineage) -> CompactTask:
        merged = {segment.id for segment in self.plan.inputs}
        touching = [s for s in self.manifest.segments if wanted.touches(s.min_key, s.max_key)]
        return CompactTask(
            self.store,
            self.names,
            self.manifest.schema,
            self.settings,
            self.plan.level,
            lineage,
            wanted,
            tuple(segment for segment in touching if segment.id in merged),
            tuple(_other(segment) for segment in touching if segment.id not in merged),
            self.hold_lsn,
            self.expired_before_ms,
            self.plan.join,
        )

    def _lineages(
        self, ranges: Sequence[KeyRange], ancestors: tuple[str, ...], covers: tuple[Cover, ...]
    ) -> list[Lineage]:
        """Each output stands for what the inputs stood for in its range: what a rebuild needs."""
        runtime = self.store.runtime
        now_ms = int(runtime.wall_s() * 1000)
        job = runtime.ulid()
        ids = [staged_id(self.manifest.compactor_job, runtime.ulid()) for _ in ranges]
        return [
            Lineage(
                own,
                now_ms,
                ancestors,
                tuple(other for other in ids if other != own),
                job,
                clipped(covers, wanted.start, wanted.end),
                self.manifest.generation,
            )
            for own, wanted in zip(ids, ranges, strict=True)
        ]

    def _ancestors(self, outlines: Sequence[_Outline]) -> tuple[str, ...]:
        """Return the inputs, and of theirs those that no sweep has taken yet."""
        older = {ancestor for outline in outlines for ancestor in outline.ancestors}
        if older:
            prefix = self.names.segments
            older &= {
                info.key.removeprefix(prefix).removesuffix(".seg")
                for info in self.store.list(prefix)
            }
        return tuple(sorted(older | {segment.id for segment in self.plan.inputs}))

    def _outline(self, entry: SegmentEntry) -> _Outline:
        tail = read_tail(self.store, self.names, entry)
        index = tail.index
        ends = [*index.starts.tolist()[1:], index.end()]
        step = max(1, -(-len(index) // SAMPLES_MAX))
        samples = [
            (index.first_keys[at], ends[min(at + step, len(index)) - 1] - int(index.starts[at]))
            for at in range(0, len(index), step)
        ]
        covers = covers_of(tail.footer, entry.visible_lsn)
        return _Outline(tail.footer.ancestors, covers, tuple(samples))

    def _expired_before_ms(self) -> int:
        """One moment for all tasks, by whichever clock is behind, less a margin (H30)."""
        now_s = min(self.store.now(), self.store.runtime.wall_s())
        return max(0, int((now_s - self.settings.expiry_margin_s) * 1000))


def _other(segment: SegmentEntry) -> Other:
    return Other(segment.min_key, segment.max_key, segment.lsn_min, segment.lsn_max)
