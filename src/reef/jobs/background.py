"""Background work: a writer's process folds, compacts and sweeps by itself, in bounded steps.

    fold      when the log has enough bytes or objects, or an old one
    compact   when the planner finds a job in the current segments
    index     when a segment may lack a search index
    sweep     at intervals, while there may be objects to delete

`step()` runs one job that is due and returns its report; the jobs take turns, so that none
starves another. Two threads call it in production, one for folds and one for the rest, since a
fold must keep up with the commits; the simulator calls it in an order that its seed decides.
Whether a job is due is decided from the writer's memory.

Compactions and sweeps share one `Pace` and threads of their own, so that they neither starve nor
delay serving. Folds are not throttled: they read no WAL object, and write as much as was committed
(H75). Only a sweep that a fold has overtaken lets folds wait, for one plan, which begins with a
fold and is not throttled either. `pause()` stops all of them at their next request.

Other processes may run the same jobs. A fold that finds a newer floor, or a compaction whose epoch
was taken over, has nothing to do and ends silently. A failed job is reported as an event and
retried with growing pauses, while the others continue. The work ends when the writer is fenced,
closed or garbage-collected.

**Without a live writer**, as in a namespace that only streams write, the processes that commit
fold. The log would otherwise grow by an object or two for each micro-batch, and so would the
requests of every open and every commit. A process that has committed a micro-batch folds if the log
that it has just read is long, and then compacts if that is a small job. Both take place after the
commit, within bounds, and never fail it.
"""

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from reef.config import BackgroundSettings, CompactSettings
from reef.engine.handles.database import Database
from reef.engine.handles.writer import Writer
from reef.engine.log.tail import TailCut
from reef.errors import ClosedError, ConflictError, ErrorKind, FencedError, NotFoundError, ReefError
from reef.formats.manifest import Manifest, SegmentEntry, unindexed_rows
from reef.jobs.compact.job import Compactor, CompactReport
from reef.jobs.compact.plan import CompactPlan, Planner, plan_unindexed, strategy
from reef.jobs.fold.job import FoldReport, fold, fold_memory
from reef.jobs.indexes import IndexPlanner, forget_replaced, retrain_worn, train_missing
from reef.jobs.ingest.append import UnfoldedLog
from reef.jobs.sweep.job import SweepReport, sweep
from reef.jobs.sweep.plan import SweepMemory
from reef.manifest.edits import release_compactor
from reef.runtime import ConditionVariable, Runtime, Stopwatch, Task
from reef.stores import Pace, Paced, PaceEnded

FOLD_OBJECTS = 16
"""Each object is a request, or several, for every commit of a process that has just started. A fold
costs about as many as there are objects."""
WRITERS_SHARE = 2
"""With a live writer the log is folded here only when it is so many times as long as the writer's
own process lets it become."""
COMPACT_BYTES = 64 << 20
"""Larger compactions take longer than a micro-batch may wait: they are left to other processes."""
SEGMENTS_MAX = 200
"""With so many segments a compactor that has the role is dead, or does not keep up."""


JOBS = ("fold", "compact", "index", "sweep")
WORKERS = 8
"""Requests of background work at a time."""
RETRY_S_MAX = 60.0
"""The longest pause after failures of one job; pauses double from one failure to the next."""
IDLE_SWEEPS = 12
"""Sweeps that find nothing become rarer, down to one in so many intervals."""
STOP_S = 10.0
"""How long `stop` waits for a running step."""


@dataclass(frozen=True, slots=True)
class BackgroundStep:
    """A job that was run."""

    job: str
    """`fold`, `compact`, `index` or `sweep`."""
    report: Any


@dataclass(slots=True)
class Chore:
    """One of the jobs: when it is due, how to run it, and its recent failures."""

    job: str
    is_due: Callable[[Writer], bool]
    run: Callable[[], Any]
    """Returns a report, or None if another process was first."""
    failures: int = 0
    failed: Stopwatch | None = None
    error: Exception | None = None

    def may_retry(self, interval_s: float) -> bool:
        """Whether enough time has passed since the last failure."""
        pause_s = min(RETRY_S_MAX, interval_s * 2**self.failures)
        return self.failed is None or self.failed.elapsed_s() >= pause_s


def start_background(db: Database, writer: Writer, settings: BackgroundSettings) -> "Background":
    """Start the threads that work for a writer."""
    return Background(db, writer, settings).start()


class Background:
    """Background work of one writer; holds a weak reference to it."""

    def __init__(self, db: Database, writer: Writer, settings: BackgroundSettings) -> None:
        runtime: Runtime = db.store.runtime
        self.settings = settings
        self.namespace = writer.namespace
        self._runtime = runtime
        self._pace = pace = Pace(runtime, settings.requests_per_s, settings.bytes_per_s)
        self._fold_pace = fold_pace = Pace(runtime, 0, 0)
        self._unpaced = db
        self._db, self._fold_db = self._over(pace), self._over(fold_pace)

        def end_soon(_: object) -> None:
            pace.end_soon()
            fold_pace.end_soon()

        self._writer = weakref.ref(writer, end_soon)
        self._failures = db.metrics.counter("background.failures")  # shown as 0 from the start
        self._compactor = Compactor(self._db, self.namespace, settings.strategy)
        self.chores = [
            Chore("fold", self._fold_is_due, self._fold),
            Chore("compact", self._compaction_is_due, self._compact),
            Chore("index", self._indexing_is_due, self._index),
            Chore("sweep", self._sweep_is_due, self._sweep),
        ]
        self._waiting: Stopwatch | None = None
        """Since when the log has had an unfolded object."""
        self._fold_lock = runtime.lock()
        """Held while a fold of this process publishes."""
        self._memory = SweepMemory(self._folds_wait)
        self._indexed: object = None
        """The indexes and segments of the last manifest whose segments lack none."""
        self._known_to_lack: dict[str, dict[str, bool]] = {}
        """By segment, whether it lacks an index that it can get."""
        self._rewritten = 0
        """Rows that compactions have written since centroids were last compared with new ones."""
        self._left_unindexed = 0
        """Rows without search indexes that the last merge of these has left: of loads that are
        open, for instance. Another merge is due when there are more."""
        self._nothing_to_compact: Manifest | None = None
        """The last manifest without a job for the compactor."""
        self._swept: Stopwatch = runtime.stopwatch()
        self._swept_generation = 0
        self._idle_sweeps = 1
        self._wake: ConditionVariable = runtime.condition()
        self.is_stopped = False
        self._tasks: list[Task] = []
        self._threads: set[object] = set()

    def _over(self, pace: Pace) -> Database:
        paced = Paced(self._unpaced.store, pace)
        paced.runtime = self._runtime.aside(WORKERS)
        return self._unpaced._over(paced)

    # --- one step -----------------------------------------------------------------
    def step(self, jobs: Sequence[str] = JOBS) -> BackgroundStep | None:
        """Run one job that is due; None if none is, or all that are have failed."""
        for chore in [chore for chore in self.chores if chore.job in jobs]:
            if not self._is_due(chore):
                continue
            with self._wake:
                self.chores.remove(chore)
                self.chores.append(chore)  # the others come first next time
            report = self._run_chore(chore)
            if report is not None:
                return BackgroundStep(chore.job, report)
        return None

    def _is_due(self, chore: Chore) -> bool:
        """No reference to the writer outlives this: a paused job must not keep it alive."""
        writer = self._writer()
        if writer is None or not writer.is_open:
            return False
        return chore.may_retry(self.settings.poll_interval_s) and chore.is_due(writer)

    def _run_chore(self, chore: Chore) -> Any:
        try:
            report = chore.run()
            chore.failures, chore.failed, chore.error = 0, None, None
            return report
        except (FencedError, ClosedError):
            self.is_stopped = True
        except PaceEnded:
            raise
        except NotFoundError as error:
            self.is_stopped = error.kind is ErrorKind.DROPPED
            if not self.is_stopped:
                self._note_failure(chore, error)
        except Exception as error:
            self._note_failure(chore, error)
        return None

    def _note_failure(self, chore: Chore, error: Exception) -> None:
        chore.failures = min(chore.failures + 1, 16)
        chore.failed, chore.error = self._runtime.stopwatch(), error
        self._failures.add()
        level = logging.WARNING if isinstance(error, ReefError) else logging.ERROR
        self._db.events.emit(
            "background_failed",
            level=level,
            namespace=self.namespace,
            job=chore.job,
            error=f"{type(error).__name__}: {error}",
        )

    def _refresh_writer(self) -> None:
        """Let the writer load the newest manifest, and drop the folded rows from its memory."""
        writer = self._writer()
        if writer is not None:
            writer.refresh()

    # --- fold ---------------------------------------------------------------------
    def _fold_is_due(self, writer: Writer) -> bool:
        unfolded, limits = writer.unfolded, self.settings
        if not unfolded.bytes:
            self._waiting = None
        elif self._waiting is None:
            self._waiting = self._runtime.stopwatch()
        waited_s = 0.0 if self._waiting is None else self._waiting.elapsed_s()
        old = self._waiting is not None and waited_s >= limits.fold_interval_s
        many = unfolded.objects >= limits.fold_objects
        return old or many or unfolded.bytes >= limits.fold_bytes

    def _fold(self) -> FoldReport | None:
        report: FoldReport | None = None
        with suppress(ConflictError), self._fold_lock:  # another fold was first
            report = self._fold_memory()
            if report is None:  # objects behind a gap, or a change by another process
                report = fold(self._fold_db, self.namespace, stretches_max=1)
                self._refresh_writer()
            self._waiting = None
        if report is None or not report.published:
            self._refresh_writer()
            return None
        return report

    def _fold_memory(self) -> FoldReport | None:
        """Fold from the writer's memory; None if it differs from the head."""
        for _ in range(2):
            cut = self._take_cut()
            folded = cut and fold_memory(self._fold_db, self.namespace, cut, self._memory.folded)
            if folded:
                report, head = folded
                self._follow(head)
                return report
            self._refresh_writer()
        return None

    def _take_cut(self) -> TailCut | None:
        writer = self._writer()
        return None if writer is None else writer._committer.cut()

    def _follow(self, head: Manifest) -> None:
        """Drop the folded rows from the writer's memory, without a request."""
        writer = self._writer()
        if writer is not None:
            writer._committer.follow(head)

    # --- compact ------------------------------------------------------------------
    def _compaction_is_due(self, writer: Writer) -> bool:
        manifest = writer._manifest
        if not self.settings.compact or manifest is self._nothing_to_compact:
            return False
        planner = self._unindexed_planner(writer) or strategy(self.settings.strategy)
        plan = planner(manifest.segments, self._compactor.settings)
        if plan is None:
            self._nothing_to_compact = manifest
        return plan is not None and self._compactor.is_due(manifest, planner)

    def _compact(self) -> CompactReport | None:
        writer = self._writer()
        planner = None if writer is None else self._unindexed_planner(writer)
        report = self._compactor.step(planner=planner)
        self._refresh_writer()
        if planner is not None and writer is not None and report is not None and report.published:
            self._left_unindexed = unindexed_rows(writer._manifest)
        self._rewritten += report.rows_written if report is not None else 0
        return None if report is None or not report.published else report

    def _unindexed_planner(self, writer: Writer) -> Planner | None:
        """Return a planner that merges rows without search indexes, before there are so many that
        the writer waits for it; None if there are not half as many.
        """
        manifest, most = writer._manifest, writer._committer.settings.unindexed_rows_max
        rows = unindexed_rows(manifest)
        left = self._left_unindexed = min(self._left_unindexed, rows)
        if rows == left or rows <= min(left + most // 2, most):
            return None
        usual = strategy(self.settings.strategy)
        rows_min = max(spec.rows_min for spec in manifest.indexes)
        first = partial(plan_unindexed, rows_min=rows_min)
        return lambda segments, settings: first(segments, settings) or usual(segments, settings)

    # --- search indexes -----------------------------------------------------------
    def _indexing_is_due(self, writer: Writer) -> bool:
        """Whether segments came since all of them were known to have their indexes."""
        manifest = writer._manifest
        state = (manifest.indexes, manifest.segments)
        return bool(self.settings.compact and manifest.indexes and self._indexed != state)

    def _index(self) -> CompactReport | None:
        """Train missing and worn centroids, and rewrite one segment that lacks an index."""
        train_missing(self._db, self.namespace)
        writer = self._writer()
        if writer is not None and self._rewritten >= sum(e.rows for e in writer._manifest.segments):
            self._rewritten = 0
            retrain_worn(self._db, self.namespace)
        planner = IndexPlanner(self._db, self.namespace, known=self._known_to_lack)
        report = self._compactor.step(planner=planner)
        self._refresh_writer()
        if report is None and not forget_replaced(self._db, self.namespace):
            self._indexed = planner.state
        return None if report is None or not report.published else report

    # --- sweep --------------------------------------------------------------------
    def _sweep_is_due(self, writer: Writer) -> bool:
        manifest = writer._manifest
        changed = manifest.generation > self._swept_generation
        left = (
            bool(manifest.condemned or manifest.condemned_ranges)
            or manifest.oldest_retained < manifest.generation
        )
        interval_s = self.settings.sweep_interval_s * (1 if changed else self._idle_sweeps)
        due = (changed or left) and self._swept.elapsed_s() >= interval_s
        return self.settings.sweep and due

    def _sweep(self) -> SweepReport | None:
        """Sweep with `force`: compactions often replace most segments. The guard is for people, who
        may name the wrong bucket; here the manifest is the writer's own.
        """
        self._swept = self._runtime.stopwatch()
        retain_s = self.settings.retain_generations_s
        with suppress(ConflictError):  # the head moves too often; the next sweep tries again
            report = sweep(
                self._db,
                self.namespace,
                apply=True,
                force=True,
                memory=self._memory,
                retain_generations_s=retain_s,
            )
            self._swept_generation = report.generation
            idle = not report.deleted and not report.condemned
            self._idle_sweeps = min(2 * self._idle_sweeps, IDLE_SWEEPS) if idle else 1
            self._refresh_writer()
            return report
        return None

    @contextmanager
    def _folds_wait(self) -> Iterator[None]:
        """Hold folds back for a sweep, after one of them: the sweep reads the unfolded log, which
        grows by each commit until it is done (H75).
        """
        with self._fold_lock, self._pace.lifted():
            with suppress(ConflictError):
                self._fold_memory()
            yield

    # --- for the owner ------------------------------------------------------------
    def start(self) -> "Background":
        """Run steps in two threads, until the writer is closed, fenced or garbage-collected."""
        for name, jobs in (("fold", ("fold",)), ("background", JOBS[1:])):
            self._tasks.append(self._runtime.spawn(partial(self._run, jobs), name=name))
        return self

    def __repr__(self) -> str:
        running = "paused" if self._pace.is_paused else "running"
        return f"<Background of {self.namespace}, {'stopped' if self.is_stopped else running}>"

    def pause(self) -> None:
        """Hold every request until `resume`; a running job stops at its next one."""
        self._pace.pause()
        self._fold_pace.pause()

    def resume(self) -> None:
        """Continue."""
        self._pace.resume()
        self._fold_pace.resume()

    def stop(self) -> None:
        """End the work; a running job ends at its next request."""
        with self._wake:
            self.is_stopped = True
            self._wake.notify_all()
        self._pace.end()
        self._fold_pace.end()
        if self._runtime.thread_id() in self._threads:
            return  # called by a listener of its events: it ends after that
        if all([task.join(STOP_S) for task in self._tasks]):
            self._release_role()

    def _release_role(self) -> None:
        """Let the next compactor start at once, without waiting for this one to be silent."""
        epoch = self._compactor.epoch
        if epoch is None:
            return
        with suppress(ReefError):
            publisher = self._unpaced._namespaces.publisher(self.namespace)
            publisher.publish(lambda head: release_compactor(head, epoch))

    # --- the threads --------------------------------------------------------------
    def _run(self, jobs: Sequence[str]) -> None:
        self._threads.add(self._runtime.thread_id())
        with suppress(PaceEnded):
            while self._wait():
                while not self.is_stopped and self.step(jobs) is not None:
                    pass

    def _wait(self) -> bool:
        """Wait for the next check; False once the writer is gone or closed."""
        with self._wake:
            if not self.is_stopped:
                self._wake.wait(self.settings.poll_interval_s)
        writer = self._writer()
        return not self.is_stopped and writer is not None and writer.is_open


@dataclass(frozen=True, slots=True)
class Upkeep:
    """Folds and compacts one namespace, between the commits of a process that holds no role."""

    db: Database
    namespace: str
    limits: BackgroundSettings = field(default_factory=BackgroundSettings)

    def after(self, log: UnfoldedLog | None) -> None:
        """Fold and compact if it is due by the log as a commit has read it; raises no error."""
        if log is None or not self._is_due(log):
            return
        try:
            self._fold()
        except Exception as error:
            self._note(error)

    def _is_due(self, log: UnfoldedLog) -> bool:
        limits = self.limits
        if log.has_writer:
            objects, size = limits.fold_objects * WRITERS_SHARE, limits.fold_bytes * WRITERS_SHARE
        else:
            objects, size = min(limits.fold_objects, FOLD_OBJECTS), limits.fold_bytes
        return log.objects >= objects or log.bytes >= size

    def _fold(self) -> None:
        try:
            fold(self.db, self.namespace, stretches_max=1)
        except ConflictError:  # another fold was first
            return
        if not self.limits.compact:
            return
        planner = partial(_small_plan, self.limits.strategy)
        head = self.db._namespaces.use(self.namespace).heads.found.manifest
        with Compactor(self.db, self.namespace, self.limits.strategy) as compactor:
            if planner(head.segments, compactor.settings) is not None:
                compactor.step(take_over=len(head.segments) >= SEGMENTS_MAX, planner=planner)

    def _note(self, error: Exception) -> None:
        self.db.metrics.counter("background.failures").add()
        self.db.events.emit(
            "background_failed",
            level=logging.WARNING if isinstance(error, ReefError) else logging.ERROR,
            namespace=self.namespace,
            job="fold",
            error=f"{type(error).__name__}: {error}",
        )


def _small_plan(
    name: str, segments: tuple[SegmentEntry, ...], settings: CompactSettings
) -> CompactPlan | None:
    """Return the strategy's plan, if it is small."""
    plan = strategy(name)(segments, settings)
    return plan if plan is not None and plan.bytes <= COMPACT_BYTES else None
