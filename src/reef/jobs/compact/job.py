"""Compaction: merge segments, and drop versions that no reader can see.

    1  role      raise the compactor epoch by CAS: later publishes of an older compactor are refused
    2  plan      from the head: which segments, into which level (`reef.jobs.compact.plan`)
    3  tasks     one per output, cut by key range along the inputs' block indexes
    4  check     by set hash: outputs = inputs − dropped + made. Made are rows merged from patches,
                 and deletes in place of expired rows
    5  publish   one CAS: outputs replace inputs, if the epoch is ours and all inputs are live

Only the last step changes the manifest, and no row changes even then. If the driver dies before
it, the outputs are orphans; the next compactor has another job name, so that the sweep deletes
them. While a compactor works, its job name in the manifest keeps its staged segments (H28).

The driver reads the inputs' tails: where to cut a large job into tasks of equal size, and which
ancestors the outputs have. Every footer names its siblings, the outputs of all tasks, and its
ancestors: the inputs and their ancestors, as far as their objects exist. That is for audits and for
rebuild; the manifest alone decides which segments are visible (H37).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, Unpack

from reef.config import CompactOptions, CompactSettings
from reef.engine.context import NamespaceContext
from reef.engine.handles.database import Database
from reef.errors import (
    CorruptionError,
    ErrorKind,
    InternalError,
    NotFoundError,
    UnsupportedFormatError,
)
from reef.formats.covers import Cover, clipped, tidied
from reef.formats.manifest import Manifest, SegmentEntry
from reef.formats.segment import EMPTY, Lineage, SetHash, covers_of
from reef.jobs.arguments import check_arguments
from reef.jobs.compact.merge import (
    CompactTask,
    MergeTally,
    TaskResult,
    read_tail,
    run_compact_task,
    write_trace,
)
from reef.jobs.compact.plan import CompactPlan, Other, Planner, plan_full, split_keys, strategy
from reef.manifest import edits
from reef.manifest.branching import let_origin_go
from reef.manifest.head import Publisher
from reef.manifest.invariants import total
from reef.manifest.roots import staged_id
from reef.paths import Namespace
from reef.runtime import Executor, Stopwatch
from reef.telemetry import operation
from reef.types import KeyRange

SAMPLES_MAX = 1000
"""Places at which one input may be cut: a thousandth of it is exact enough."""


@dataclass(frozen=True, slots=True)
class _Outline:
    """The facts that the driver keeps of an input's tail."""

    ancestors: tuple[str, ...]
    covers: tuple[Cover, ...]
    samples: tuple[tuple[bytes, int], ...]
    """First keys of groups, and the bytes up to the next one."""
    expires: bool
    """Whether some rows may expire."""


class CompactJob:
    """Runs one plan. Changes nothing that is visible."""

    run_task = staticmethod(run_compact_task)

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
        self.hold_lsn = edits.hold_lsn_of(manifest.open_jobs)
        self.expired_before_ms = self._expired_before_ms()

    def run(self, executor: Executor | None) -> list[TaskResult]:
        """Run the tasks: a few at a time here, all at once where others run them."""
        if not self.plan.inputs:
            return []
        tasks = self.tasks()
        if executor is not None:
            return self._with_trace(tasks, executor.map(self.run_task, tasks))
        local, step = self.store.runtime, self.settings.tasks_max
        results: list[TaskResult] = []
        for first in range(0, len(tasks), step):
            results += local.map(self.run_task, tasks[first : first + step])
        return self._with_trace(tasks, results)

    def tasks(self) -> list[CompactTask]:
        """Return one task for each output."""
        inputs = self.plan.inputs
        outlines = self.store.runtime.map(self._outline, inputs)
        if any(outline.expires for outline in outlines):
            self.expired_before_ms = min(self.expired_before_ms, self._log_begins_ms())
        samples = [sample for outline in outlines for sample in outline.samples]
        cuts = split_keys(samples, self.plan.outputs(self.settings))
        cuts = sorted({*cuts, *self.plan.cuts})
        ranges = [KeyRange(*ends) for ends in zip([b"", *cuts], [*cuts, None], strict=True)]
        covers = tidied(cover for outline in outlines for cover in outline.covers)
        lineages = self._lineages(ranges, self._ancestors(outlines), covers)
        return [
            self._task(key_range, lineage)
            for key_range, lineage in zip(ranges, lineages, strict=True)
        ]

    def checked(self, results: Sequence[TaskResult]) -> edits.CompactedSegments:
        """Return the edit to publish; InternalError if the set hashes do not add up."""
        plan, tally = self.plan, sum((result.tally for result in results), MergeTally())
        outputs = [result.segment for result in results if result.segment is not None]
        read = total(plan.inputs)
        if total(outputs) != read - tally.dropped + tally.made:
            raise InternalError(
                f"a compaction of {self.names.name} wrote versions that add up to "
                f"{total(outputs)}: its inputs have {read}, {tally.dropped} were dropped, "
                f"{tally.made} made"
            )
        epoch = self.manifest.compactor_epoch
        return edits.CompactedSegments(
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
        """Return the figures of a published job, for its report."""
        tally = sum((result.tally for result in results), MergeTally())
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
        """Add an empty segment for keys without any rows left.

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

    def _task(self, key_range: KeyRange, lineage: Lineage) -> CompactTask:
        merged = {segment.id for segment in self.plan.inputs}
        touching = [s for s in self.manifest.segments if key_range.touches(s.min_key, s.max_key)]
        return CompactTask(
            self.store,
            self.names,
            self.manifest.schema,
            self.settings,
            self.plan.level,
            lineage,
            key_range,
            tuple(segment for segment in touching if segment.id in merged),
            tuple(_other(segment) for segment in touching if segment.id not in merged),
            self.hold_lsn,
            self.expired_before_ms,
            self.plan.join,
            self.manifest.indexes,
        )

    def _lineages(
        self, ranges: Sequence[KeyRange], ancestors: tuple[str, ...], covers: tuple[Cover, ...]
    ) -> list[Lineage]:
        """Return the lineage of each output, with the inputs' covers in its range."""
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
                clipped(covers, key_range.start, key_range.end),
                self.manifest.generation,
            )
            for own, key_range in zip(ids, ranges, strict=True)
        ]

    def _ancestors(self, outlines: Sequence[_Outline]) -> tuple[str, ...]:
        """Return the inputs and their ancestors that have not been swept."""
        older = self._present({a for outline in outlines for a in outline.ancestors})
        return tuple(sorted(older | {segment.id for segment in self.plan.inputs}))

    def _present(self, segment_ids: set[str]) -> set[str]:
        """Return the ids whose objects exist."""
        if not segment_ids:
            return set()
        prefix = self.names.segments
        return segment_ids & {
            info.key.removeprefix(prefix).removesuffix(".seg") for info in self.store.list(prefix)
        }

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
        expires = tail.footer.expiring != 0  # None if the segment's release did not count them
        return _Outline(tail.footer.ancestors, covers, tuple(samples), expires)

    def _expired_before_ms(self) -> int:
        """Return one time for all tasks, by the slower of two clocks, less a margin (H30)."""
        now_s = min(self.store.now(), self.store.runtime.wall_s())
        return self._less_margin_ms(now_s)

    def _log_begins_ms(self) -> int:
        """Return when the first object of the log was written, less the margin.

        A merge in the log was applied to a row that expired afterwards, and would make a new row if
        that one were gone. So no row goes that expired later than that. 0 if it cannot be read.
        """
        try:
            first = NamespaceContext(self.store, self.names).log.read(self.manifest.wal_floor)
        except (CorruptionError, UnsupportedFormatError):
            return 0
        if first is None:
            return edits.NEVER
        return self._less_margin_ms(first.header.created_at_ms / 1000)

    def _less_margin_ms(self, time_s: float) -> int:
        return max(0, int((time_s - self.settings.expiry_margin_s) * 1000))


def _other(segment: SegmentEntry) -> Other:
    bounds = segment.min_key, segment.max_key, segment.lsn_min, segment.lsn_max
    return Other(*bounds, merges=segment.patches > 0)


@dataclass(frozen=True, slots=True)
class CompactReport:
    """The result of a compaction: of one job of a background compactor, or of one call."""

    namespace: str
    strategy: str
    outcome: str
    """`compacted`, `idle` if nothing was due, `superseded` if another compactor took the role."""
    generation: int
    epoch: int
    jobs: int = 0
    inputs: int = 0
    input_bytes: int = 0
    outputs: int = 0
    output_bytes: int = 0
    moved: int = 0
    """Segments that were moved to another level unchanged."""
    joined: int = 0
    """Segments that were joined without decoding them."""
    rows_read: int = 0
    rows_written: int = 0
    expired: int = 0
    read: str = ""
    """Set hashes of the versions read, dropped and made."""
    dropped: str = ""
    made: str = ""

    @property
    def published(self) -> bool:
        """Whether a job was published."""
        return self.jobs > 0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "published": self.published}


def compact(
    db: Database,
    namespace: str,
    *,
    strategy: str = "tiered",
    full: bool = False,
    executor: Executor | None = None,
    **settings: Unpack[CompactOptions],
) -> CompactReport:
    """Compact until nothing is due; with `full`, merge all segments once.

    A full compaction makes a branch independent: the next sweeps of it release its origin. Acquires
    the compactor role: a background compactor of another process steps down, and its job is lost.
    Safe while writers, readers, folds and sweeps run.
    """
    check_arguments(db, executor)
    compactor = Compactor(db, namespace, strategy, full=full, executor=executor, **settings)
    with operation(db.metrics, "compact"), db._working("compact", namespace) as working, compactor:
        reports = []
        for _ in range(1 if full else compactor.settings.rounds_max):
            report = compactor.step(take_over=True)
            if report is None:
                break
            reports.append(report)
            working.progress = {"jobs": len(reports)}
            if not report.published:  # two compactors would take the role from each other
                break
        if full:
            compactor.let_origin_go()
    return _sum_reports(reports) if reports else compactor.idle()


class Compactor:
    """Holds the compactor role of a namespace over many jobs; one `step` is one job.

    A step acquires the role when a job is due and no other compactor seems to work. It waits for
    another one as long as that makes progress. If the role was taken from this one it steps down,
    and its job has no effect.
    """

    def __init__(
        self,
        db: Database,
        namespace: str,
        strategy_name: str = "tiered",
        *,
        full: bool = False,
        executor: Executor | None = None,
        **settings: Unpack[CompactOptions],
    ) -> None:
        self.settings = CompactSettings().changed(settings)
        db._prove_store()
        self._db = db
        self._strategy = "full" if full else strategy_name
        self._planner: Planner = plan_full if full else strategy(strategy_name)
        self._name = namespace
        self._executor = executor
        self.epoch: int | None = None
        """None without the role."""
        self._watched: tuple[object, Stopwatch] | None = None

    @cached_property
    def _publisher(self) -> Publisher:
        """The publisher of the incarnation that is current at the first step."""
        return self._db._namespaces.publisher(self._name)

    def _head(self) -> Manifest:
        if "_publisher" not in self.__dict__:  # locating it finds the head
            return self._publisher.heads.found.manifest
        return self._publisher.heads.find().manifest

    def __enter__(self) -> "Compactor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def is_due(self, manifest: Manifest, planner: Planner | None = None) -> bool:
        """Whether a step would find a job in this manifest; sends no request."""
        plan = (planner or self._planner)(manifest.segments, self.settings)
        return plan is not None and not self._waits_for_another(manifest)

    def step(
        self, *, take_over: bool = False, planner: Planner | None = None
    ) -> CompactReport | None:
        """Run one job; None if none is due, or another compactor has the role.

        `planner` plans other work than the strategy's for this step.
        """
        manifest, planner = self._head(), planner or self._planner
        plan = planner(manifest.segments, self.settings)
        if self.epoch is not None and manifest.compactor_epoch != self.epoch:
            self.epoch = None
        if plan is None or (not take_over and self._waits_for_another(manifest)):
            return None
        if self.epoch is None:
            manifest = self._take_role()
            plan = planner(manifest.segments, self.settings)
            if plan is None or self.epoch is None:
                return None
        report = self._run(manifest, plan)
        self._db.events.emit("compacted", **report.to_dict())
        return report

    def let_origin_go(self) -> None:
        """Make a branch that shares no segment with its origin independent of it."""
        if let_origin_go(self._head()) is not None:
            self._publisher.publish(let_origin_go)

    def _take_role(self) -> Manifest:
        """Raise the epoch and return the head. If another compactor has raised it further before
        our publish was confirmed, `epoch` stays None.
        """
        raised = 0

        def edit(head: Manifest) -> Manifest:
            nonlocal raised
            edited = edits.raise_compactor_epoch(head)
            raised = edited.compactor_epoch
            return edited

        manifest = self._publisher.publish(edit)
        self.epoch = raised if manifest.compactor_epoch == raised else None
        return manifest

    def close(self) -> None:
        """Release the role, so that leftover outputs can be swept."""
        epoch, self.epoch = self.epoch, None
        if epoch is not None:
            self._publisher.publish(lambda head: edits.release_compactor(head, epoch))

    def idle(self) -> CompactReport:
        """Return the report of a call that found nothing due."""
        manifest = self._publisher.heads.find().manifest
        return CompactReport(
            self._name, self._strategy, "idle", manifest.generation, manifest.compactor_epoch
        )

    def _waits_for_another(self, manifest: Manifest) -> bool:
        """Whether another compactor has the role and has made progress recently."""
        if not manifest.compactor_job or manifest.compactor_epoch == self.epoch:
            self._watched = None
            return False
        seen = (manifest.compactor_epoch, manifest.sums)
        if self._watched is None or self._watched[0] != seen:
            self._watched = (seen, self._db.store.runtime.stopwatch())
        return self._watched[1].elapsed_s() < self.settings.patience_s

    def _run(self, manifest: Manifest, plan: CompactPlan) -> CompactReport:
        job = self._job(manifest, plan)
        try:
            results = job.run(self._executor)
        except NotFoundError as error:
            return self._step_down(self._handle_missing_input(plan, error))
        done = job.checked(results)
        self._db.store.runtime.reach("compact staged")
        try:
            after, won = self._publish(done)
        except NotFoundError as error:
            if error.kind is ErrorKind.DROPPED:
                raise
            # It stalled for so long that a sweep deleted its outputs.
            return self._step_down(self._publisher.heads.find().manifest)
        if not won:
            return self._step_down(after)
        return replace(self._report(after, "compacted"), **job.figures(results))

    def _job(self, manifest: Manifest, plan: CompactPlan) -> CompactJob:
        names = self._publisher.heads.names
        return CompactJob(self._db, names, self.settings, manifest, plan)

    def _step_down(self, head: Manifest) -> CompactReport:
        self.epoch = None
        return self._report(head, "superseded")

    def _report(self, after: Manifest, outcome: str) -> CompactReport:
        epoch = after.compactor_epoch
        return CompactReport(self._name, self._strategy, outcome, after.generation, epoch)

    def _publish(self, done: edits.CompactedSegments) -> tuple[Manifest, bool]:
        """Return the head after it, and whether this job is in it or was overtaken."""
        return self._publisher.publish_once(lambda head: edits.compact(head, done))

    def _handle_missing_input(self, plan: CompactPlan, error: NotFoundError) -> Manifest:
        """Classify a missing input: swept after another compactor was first, or damage."""
        self._publisher.heads.forget()
        head = self._publisher.heads.find().manifest
        live = {segment.id for segment in head.segments}
        if all(segment.id in live for segment in plan.inputs):
            raise CorruptionError(
                f"{error.message}, and generation {head.generation} names it", **error.context
            ) from error
        return head


def _sum_reports(reports: list[CompactReport]) -> CompactReport:
    """Return one report of several jobs: counts and set hashes add up."""
    last = reports[-1]
    sums: dict[str, Any] = {}
    for field in fields(CompactReport):
        values = [getattr(report, field.name) for report in reports]
        if field.name in ("read", "dropped", "made"):
            sums[field.name] = str(sum((SetHash.parse(v) for v in values if v), EMPTY))
        elif field.name not in ("namespace", "strategy", "outcome", "generation", "epoch"):
            sums[field.name] = sum(values)
    return replace(last, **sums)
