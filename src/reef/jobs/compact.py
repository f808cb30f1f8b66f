"""Compaction: segments become fewer, and what nobody can see any more goes.

    role      raise the compactor epoch by CAS: whatever an older compactor publishes is refused
    plan      from the head: which segments, into which level (`compact_plan`)
    tasks     one for each output, cut by key range along the inputs' block indexes
    publish   one CAS: outputs in the place of inputs, if the epoch is ours and all inputs live

Nothing but the last step changes what is visible, and no row changes even then. If the driver
dies before it, the outputs are orphans; the next compactor does not stand in for the dead one's
job, so that the sweep takes them. While a compactor works, its job's name in the manifest keeps
what it stages (H28).

Before it publishes, a compaction proves by the set hash that it lost nothing: the outputs are what
the manifest says of the inputs, less what was dropped, plus what was made of patches and
expired rows.
"""

from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

from reef.config import CompactSettings
from reef.engine.database import Database
from reef.errors import CorruptionError, Kind, NotFoundError
from reef.formats.manifest import Manifest
from reef.formats.set_hash import EMPTY, SetHash
from reef.jobs.compact_job import CompactJob
from reef.jobs.compact_plan import CompactPlan, Planner, plan_full, strategy
from reef.jobs.executor import Executor
from reef.manifest import edits
from reef.manifest.publish import Publisher
from reef.runtime import Stopwatch
from reef.telemetry import operation

__all__ = ["CompactReport", "Compactor", "compact"]


@dataclass(frozen=True, slots=True)
class CompactReport:
    """What a compaction did: one job of a background compactor, or all of one call."""

    namespace: str
    strategy: str
    outcome: str
    """`compacted`, `idle` where nothing was due, `superseded` where another compactor took over."""
    generation: int
    epoch: int
    jobs: int = 0
    inputs: int = 0
    input_bytes: int = 0
    outputs: int = 0
    output_bytes: int = 0
    moved: int = 0
    """Segments that went to another level as they are."""
    joined: int = 0
    """Segments that were put together without decoding them."""
    rows_read: int = 0
    rows_written: int = 0
    expired: int = 0
    read: str = ""
    """Set hashes: of what was read, and of what was dropped and made on the way."""
    dropped: str = ""
    made: str = ""

    @property
    def published(self) -> bool:
        """Whether anything has changed."""
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
    **settings: Any,
) -> CompactReport:
    """Compact until nothing is due; with `full`, merge all there is, once.

    Takes the compactor role: a background compactor elsewhere steps down, and its job is lost.
    Safe beside writers, readers, folds and sweeps.
    """
    compactor = Compactor(db, namespace, strategy, full=full, executor=executor, **settings)
    with operation(db.metrics, "compact"), db.working("compact", namespace) as working, compactor:
        reports = []
        for _ in range(1 if full else compactor.settings.rounds_max):
            report = compactor.step(take_over=True)
            if report is None:
                break
            reports.append(report)
            working.progress = {"jobs": len(reports)}
            if not report.published:  # to take the role back would only go on and on
                break
    return _summed(reports) if reports else compactor.idle()


class Compactor:
    """Holds the compactor role of a namespace over many jobs; one `step` is one job.

    A step takes the role when there is something to do and nobody else seems to have it. Where
    another one is at work it waits, as long as that one makes progress; where this one was
    overtaken it steps down, and its job is as if it had never been.
    """

    def __init__(
        self,
        db: Database,
        namespace: str,
        strategy_name: str = "tiered",
        *,
        full: bool = False,
        executor: Executor | None = None,
        **settings: Any,
    ) -> None:
        self.settings = CompactSettings().changed(settings)
        db._prove_store()
        self._db = db
        self._strategy = "full" if full else strategy_name
        self._planner: Planner = plan_full if full else strategy(strategy_name)
        self._name = namespace
        self._executor = executor
        self.epoch: int | None = None
        """None while it has not got the role."""
        self._watched: tuple[object, Stopwatch] | None = None

    @cached_property
    def _publisher(self) -> Publisher:
        """Of the incarnation that is current at the first step, and of no other."""
        return self._db._namespaces.publisher(self._name)

    def _head(self) -> Manifest:
        if "_publisher" not in self.__dict__:  # locating it finds the head
            return self._publisher.heads.found.manifest
        return self._publisher.heads.find().manifest

    def __enter__(self) -> "Compactor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def is_due(self, manifest: Manifest) -> bool:
        """Whether a step would find a job, as far as a manifest tells; costs no request."""
        return self._planner(manifest.segments, self.settings) is not None and not (
            self._waits_for_another(manifest)
        )

    def step(self, *, take_over: bool = False) -> CompactReport | None:
        """Run one job; None if there is none, or if it is another compactor's turn."""
        manifest = self._head()
        plan = self._planner(manifest.segments, self.settings)
        if self.epoch is not None and manifest.compactor_epoch != self.epoch:
            self.epoch = None
        if plan is None or (not take_over and self._waits_for_another(manifest)):
            return None
        if self.epoch is None:
            manifest = self._take_role()
            plan = self._planner(manifest.segments, self.settings)
            if plan is None or self.epoch is None:
                return None
        report = self._run(manifest, plan)
        self._db.events.emit("compacted", **report.to_dict())
        return report

    def _take_role(self) -> Manifest:
        """Raise the epoch, and return the head: if another one has raised it since, while our
        publish had no answer, the role is that one's, and `epoch` stays None.
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
        """Give the role up, if it was taken: what was left over may be swept."""
        epoch, self.epoch = self.epoch, None
        if epoch is not None:
            self._publisher.publish(lambda head: edits.release_compactor(head, epoch))

    def idle(self) -> CompactReport:
        """Return the report of nothing that was due."""
        manifest = self._publisher.heads.find().manifest
        return CompactReport(
            self._name, self._strategy, "idle", manifest.generation, manifest.compactor_epoch
        )

    def _waits_for_another(self, manifest: Manifest) -> bool:
        """Whether another compactor has the role, and has been at work of late."""
        if not manifest.compactor_job or manifest.compactor_epoch == self.epoch:
            self._watched = None
            return False
        seen = (manifest.compactor_epoch, manifest.sums)
        if self._watched is None or self._watched[0] != seen:
            self._watched = (seen, self._db.store.runtime.stopwatch())
        return self._watched[1].elapsed_s() < self.settings.patience_s

    def _run(self, manifest: Manifest, plan: CompactPlan) -> CompactReport:
        names = self._publisher.heads.names
        job = CompactJob(self._db, names, self.settings, manifest, plan)
        try:
            results = job.run(self._executor)
        except NotFoundError as error:
            return self._step_down(self._gone(plan, error))
        done = job.checked(results)
        self._db.store.runtime.reach("compact staged")
        try:
            after, won = self._publish(done)
        except NotFoundError as error:
            if error.kind is Kind.DROPPED:
                raise
            # It stood still until it was taken for dead, and what it had written was swept.
            return self._step_down(self._publisher.heads.find().manifest)
        if not won:
            return self._step_down(after)
        return replace(self._report(after, "compacted"), **job.figures(results))

    def _step_down(self, head: Manifest) -> CompactReport:
        self.epoch = None
        return self._report(head, "superseded")

    def _report(self, after: Manifest, outcome: str) -> CompactReport:
        epoch = after.compactor_epoch
        return CompactReport(self._name, self._strategy, outcome, after.generation, epoch)

    def _publish(self, done: edits.Compacted) -> tuple[Manifest, bool]:
        """Return the head after it, and whether this job is in it or was overtaken."""
        won = False

        def edit(head: Manifest) -> Manifest | None:
            nonlocal won
            edited = edits.compact(head, done)
            won = edited is not None
            return edited

        return self._publisher.publish(edit), won

    def _gone(self, plan: CompactPlan, error: NotFoundError) -> Manifest:
        """An input is gone: another compactor was first and it was swept, or it is damage."""
        self._publisher.heads.forget()
        head = self._publisher.heads.find().manifest
        live = {segment.id for segment in head.segments}
        if all(segment.id in live for segment in plan.inputs):
            raise CorruptionError(
                f"{error.message}, and generation {head.generation} names it", **error.context
            ) from error
        return head


def _summed(reports: list[CompactReport]) -> CompactReport:
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
