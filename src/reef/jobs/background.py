"""Background work: what a writer's process does by itself, as bounded steps.

    fold      when the log holds so many bytes or objects, or something old
    compact   when the planner finds a job in the segments there are
    sweep     now and then, while there may be something to delete

`step()` does one of them and returns what it did; they take turns, so that none starves another.
A thread calls it in production, the simulator in whatever order its seed says. Whether something
is due is decided from what the writer has in memory. All requests go through one `Pace`, on
threads of their own, so that serving is neither starved nor held up; `pause()` stops them where
they stand.

Anybody may run the same jobs elsewhere. A fold that finds another one's floor, or a compaction
whose epoch was taken over, has nothing to do: it steps down without noise. What fails is told as
an event, and tried again after a while that grows, while the others go on. A writer that was
fenced, closed or forgotten ends it.
"""

import logging
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from reef.config import BackgroundSettings
from reef.engine.database import Database
from reef.engine.writer import Writer
from reef.errors import ClosedError, ConflictError, FencedError, Kind, NotFoundError, ReefError
from reef.formats.manifest import Manifest
from reef.jobs.compact import Compactor
from reef.jobs.compact_plan import strategy
from reef.jobs.fold import fold
from reef.jobs.sweep import sweep
from reef.manifest.edits import release_compactor
from reef.runtime import Condition, Runtime, Stopwatch, Task
from reef.stores import Pace, Paced, PaceEnded

__all__ = ["Background", "Step", "start_background"]

WORKERS = 8
"""Requests of background work at a time."""
RETRY_S_MAX = 60.0
"""The longest pause after failures of one kind of work, doubled from one to the next."""
IDLE_SWEEPS = 12
"""A sweep that finds nothing comes less and less often, down to one in so many intervals."""
STOP_S = 10.0
"""How long `stop` waits for a step that is on its way."""


@dataclass(frozen=True, slots=True)
class Step:
    """One piece of work that was done."""

    what: str
    """`fold`, `compact` or `sweep`."""
    report: Any


@dataclass(slots=True)
class Chore:
    """One kind of work: when it is due, what it does, how it fared of late."""

    what: str
    is_due: Callable[[Writer], bool]
    run: Callable[[], Any]
    """Returns a report, or None if others were first."""
    failures: int = 0
    failed: Stopwatch | None = None
    error: Exception | None = None

    def may_try(self, look_s: float) -> bool:
        """Whether enough time has passed since it failed."""
        pause_s = min(RETRY_S_MAX, look_s * 2**self.failures)
        return self.failed is None or self.failed.elapsed_s() >= pause_s


def start_background(db: Database, writer: Writer, settings: BackgroundSettings) -> "Background":
    """Work behind a writer in a thread."""
    return Background(db, writer, settings).start()


class Background:
    """Works behind one writer, which it does not keep alive."""

    def __init__(self, db: Database, writer: Writer, settings: BackgroundSettings) -> None:
        runtime: Runtime = db.store.runtime
        self.settings = settings
        self.namespace = writer.namespace
        self._runtime = runtime
        self._pace = pace = Pace(runtime, settings.requests_per_s, settings.bytes_per_s)
        paced = Paced(db.store, pace)
        paced.runtime = runtime.aside(WORKERS)
        self._db, self._unpaced = db.over(paced), db
        self._writer = weakref.ref(writer, lambda _: pace.end_soon())
        self._failures = db.metrics.counter("background.failures")  # shown as 0 while all is well
        self._compactor = Compactor(self._db, self.namespace, settings.strategy)
        self.chores = [
            Chore("fold", self._fold_is_due, self._fold),
            Chore("compact", self._compaction_is_due, self._compact),
            Chore("sweep", self._sweep_is_due, self._sweep),
        ]
        self._waiting: Stopwatch | None = None
        """Since something stands in the log that is not folded."""
        self._well_kept: Manifest | None = None
        """One in which there is nothing to compact."""
        self._swept: Stopwatch = runtime.stopwatch()
        self._swept_generation = 0
        self._idle_sweeps = 1
        self._wake: Condition = runtime.condition()
        self.is_stopped = False
        self._task: Task | None = None
        self._thread: object = None

    # --- one step -----------------------------------------------------------------
    def step(self) -> Step | None:
        """Do one piece of work that is due; None if nothing is, or if all that is has failed."""
        for chore in list(self.chores):
            if not self._is_due(chore):
                continue
            self.chores.remove(chore)
            self.chores.append(chore)  # the others come first now
            report = self._run_chore(chore)
            if report is not None:
                return Step(chore.what, report)
        return None

    def _is_due(self, chore: Chore) -> bool:
        """No reference to the writer outlives this: work that is paused must not keep it alive."""
        writer = self._writer()
        usable = writer is not None and writer.is_open
        may_try = chore.may_try(self.settings.look_s)
        return usable and may_try and writer is not None and chore.is_due(writer)

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
            self.is_stopped = error.kind is Kind.DROPPED
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
        told = f"{type(error).__name__}: {error}"
        self._db.events.emit(
            "background_failed",
            level=level,
            namespace=self.namespace,
            what=chore.what,
            error=told,
        )

    def _refresh_writer(self) -> None:
        """What is folded leaves the writer's memory, and its manifest is a new one."""
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

    def _fold(self) -> Any:
        with suppress(ConflictError):  # another fold was first
            report = fold(self._db, self.namespace, stretches_max=1)
            self._waiting = None
            self._refresh_writer()
            return report if report.published else None
        self._refresh_writer()
        return None

    # --- compact ------------------------------------------------------------------
    def _compaction_is_due(self, writer: Writer) -> bool:
        manifest = writer.manifest
        if not self.settings.compact or manifest is self._well_kept:
            return False
        plan = strategy(self.settings.strategy)(manifest.segments, self._compactor.settings)
        if plan is None:
            self._well_kept = manifest
        return plan is not None and self._compactor.is_due(manifest)

    def _compact(self) -> Any:
        report = self._compactor.step()
        self._refresh_writer()
        return None if report is None or not report.published else report

    # --- sweep --------------------------------------------------------------------
    def _sweep_is_due(self, writer: Writer) -> bool:
        manifest = writer.manifest
        changed = manifest.generation > self._swept_generation
        left = bool(manifest.condemned) or manifest.oldest_retained < manifest.generation
        interval_s = self.settings.sweep_interval_s * (1 if changed else self._idle_sweeps)
        due = (changed or left) and self._swept.elapsed_s() >= interval_s
        return self.settings.sweep and due

    def _sweep(self) -> Any:
        """Forced: what compactions have replaced is often most of what there is. The guard is
        for people, who may have the wrong bucket; here the manifest is the writer's own.
        """
        self._swept = self._runtime.stopwatch()
        retain_s = self.settings.retain_generations_s
        with suppress(ConflictError):  # so much goes on that the next one comes soon enough
            report = sweep(
                self._db, self.namespace, apply=True, force=True, retain_generations_s=retain_s
            )
            self._swept_generation = report.generation
            idle = not report.deleted and not report.condemned
            self._idle_sweeps = min(2 * self._idle_sweeps, IDLE_SWEEPS) if idle else 1
            self._refresh_writer()
            return report
        return None

    # --- for the owner ------------------------------------------------------------
    def start(self) -> "Background":
        """Take steps in a thread, until the writer is closed, fenced or forgotten."""
        self._task = self._runtime.spawn(self._run, name="background")
        return self

    def __repr__(self) -> str:
        running = "paused" if self._pace.is_paused else "running"
        return f"<Background of {self.namespace}, {'stopped' if self.is_stopped else running}>"

    def pause(self) -> None:
        """Send no request more until `resume`; what is on its way stays where it is."""
        self._pace.pause()

    def resume(self) -> None:
        """Go on."""
        self._pace.resume()

    def stop(self) -> None:
        """End the work: at its next request, if it is in the middle of something."""
        with self._wake:
            self.is_stopped = True
            self._wake.notify_all()
        self._pace.end()
        if self._runtime.thread_id() == self._thread:
            return  # asked for by whoever listens to its events: it ends after that
        if self._task is None or self._task.join(STOP_S):
            self._give_up_role()

    def _give_up_role(self) -> None:
        """Let the next compactor begin at once; without this it would wait to be sure."""
        epoch = self._compactor.epoch
        if epoch is None:
            return
        with suppress(ReefError):
            publisher = self._unpaced._namespaces.publisher(self.namespace)
            publisher.publish(lambda head: release_compactor(head, epoch))

    # --- the thread ---------------------------------------------------------------
    def _run(self) -> None:
        self._thread = self._runtime.thread_id()
        with suppress(PaceEnded):
            while self._wait():
                while not self.is_stopped and self.step() is not None:
                    pass

    def _wait(self) -> bool:
        """Wait for the next look; False when there is nobody left to work for."""
        with self._wake:
            if not self.is_stopped:
                self._wake.wait(self.settings.look_s)
        writer = self._writer()
        return not self.is_stopped and writer is not None and writer.is_open
