"""Repair: back to service, with all that the bucket still holds (protocol section 7).

    1  survey everything, deeply
    2  damaged head: publish the generation after it, from the newest sound one     (H18)
    3  damaged head, or damage in the log that is not folded: raise the writer epoch, put fences,
       and survey again                                                             (H17)
    4  save what can be saved of segments; copy what is damaged to `quarantine/`
    5  one CAS: LSNs and generations given up, segments replaced, the log folded past the damage
    6  reap leases that cannot be read

Fences come before anything is given up: a writer that has lost rows in memory must not commit on
them once readers cannot see them. Damaged objects stay where they are: an emptied slot could be
filled by its owner's resend. All that is decided about them is in one publish, so that a repair
that dies is either not done or done, but for the fences, which the next writer puts too. On a sound
namespace it does nothing. A dry run (the default) reads, and says what it would do. Writers,
readers and jobs may run concurrently; the writer is fenced if the head or its log was damaged.
"""

from dataclasses import dataclass, replace

from reef.engine.database import Database
from reef.errors import ConflictError, NotFoundError
from reef.formats.manifest import Manifest
from reef.jobs.executor import Executor, LocalExecutor
from reef.jobs.repair_head import Published, fence_off, publish_after_damage, restart_of
from reef.jobs.repair_plan import RepairPlan, RepairPlanner
from reef.jobs.repair_report import Lost, LostLsn, LostRange, LostSegment, RepairReport
from reef.jobs.verify_problems import Problem
from reef.jobs.verify_survey import Survey, survey
from reef.manifest.head import newest_incarnation
from reef.manifest.publish import Publisher
from reef.manifest.repairs import Restart, apply_repairs
from reef.paths import Namespace
from reef.telemetry import operation

__all__ = ["Lost", "LostLsn", "LostRange", "LostSegment", "RepairReport", "repair"]


def repair(
    db: Database, namespace: str, *, apply: bool = False, executor: Executor | None = None
) -> RepairReport:
    """Find all damage and repair it; only with `apply` is anything changed.

    Returns what was found, what is done about it, and exactly what is lost.
    """
    if apply:
        db._prove_store()
    names = newest_incarnation(db.store, namespace)
    run = _Repair(db, names, executor or LocalExecutor(db.store.runtime))
    with operation(db.metrics, "repair"):
        report = run.apply() if apply else run.preview()
    if apply and report.problems:
        db.events.emit(
            "repaired",
            namespace=namespace,
            generation=report.generation,
            problems=len(report.problems),
            lost_lsns=[lost.lsn for lost in report.lost.lsns],
            lost_segments=[lost.id for lost in report.lost.segments],
        )
    return report


@dataclass(frozen=True, slots=True)
class _Repair:
    """One call."""

    db: Database
    names: Namespace
    executor: Executor

    def preview(self) -> RepairReport:
        """Say what would be done. Writes nothing."""
        found = first = self._survey()
        restart, store = self._restart(found), self.db.store
        if restart is not None:
            store = Published(store, self.names, found.head, restart)
            found = survey(store, self.names, self.executor, deep=True)
        plan = RepairPlanner(store, self.names, self.executor, found, write=False).plan()
        _quarantine_manifests(plan, first)
        return self._report(first, found, plan, first.head.generation, restart)

    def apply(self) -> RepairReport:
        """Run the six steps."""
        found = first = self._survey()
        if not first.problems:
            plan = self._planner(found, write=False).plan()
            report = self._report(first, first, plan, first.head.generation, None)
            return replace(report, applied=True)
        restart = self._restart(found)
        restarted = None
        if restart is not None:
            restarted = publish_after_damage(self.db.store, self.names, found.head, restart)
            self.db.store.runtime.reach("repair restarted")
            found = self._survey()
        unfolded = {lsn for lsn in found.log.damaged if lsn >= found.head.wal_floor}
        if restarted is not None or unfolded:
            fence_off(self.db, self.names, frozenset(unfolded), restarted)
            self.db.store.runtime.reach("repair fenced")
            found = self._survey()
        plan = self._planner(found, write=True).plan()
        self.db.store.runtime.reach("repair staged")
        _quarantine_manifests(plan, first)
        self._quarantine(plan)
        head = self._publish(plan) if plan.changes_the_manifest else found.head
        self.db.store.runtime.reach("repair published")
        self._reap(plan)
        report = self._report(first, found, plan, head.generation, restart)
        return replace(report, applied=True)

    # --- the steps ----------------------------------------------------------------
    def _survey(self) -> Survey:
        return survey(self.db.store, self.names, self.executor, deep=True)

    def _restart(self, found: Survey) -> Restart | None:
        """Return from where to go on after a damaged head; None if it is sound."""
        if not found.chain.head_is_damaged:
            return None
        return restart_of(self.db.store, self.names, self.executor, found)

    def _planner(self, found: Survey, *, write: bool) -> RepairPlanner:
        return RepairPlanner(self.db.store, self.names, self.executor, found, write)

    def _quarantine(self, plan: RepairPlan) -> None:
        """Keep a copy for those who want to look; what is gone cannot be copied."""
        for key in plan.quarantine:
            try:
                self.db.store.copy(key, self.names.quarantined(key))
            except NotFoundError:
                continue

    def _publish(self, plan: RepairPlan) -> Manifest:
        overtaken = False

        def edit(head: Manifest) -> Manifest | None:
            nonlocal overtaken
            edited = apply_repairs(head, plan.repairs)
            overtaken = edited is None
            return edited

        publisher = Publisher(self.db.store, self.names, metrics=self.db.metrics)
        head = publisher.publish(edit)
        if overtaken:
            raise ConflictError(
                f"a fold has passed what a repair of {self.names.name} was about to fold",
                hint="Run the repair again",
                namespace=self.names.name,
            )
        return head

    def _reap(self, plan: RepairPlan) -> None:
        if plan.leases:
            self.db.store.delete_many(plan.leases)

    # --- the end ------------------------------------------------------------------
    def _report(
        self,
        first: Survey,
        found: Survey,
        plan: RepairPlan,
        generation: int,
        restart: Restart | None,
    ) -> RepairReport:
        # Generations that were published on the way were never anyone's.
        own = range(first.chain.newest + 1, found.head.generation + 1)
        said = {f"give up generation {generation}" for generation in own}
        actions = [action for action in plan.actions if action not in said]
        generations = set(plan.lost.generations) - set(own)
        lost = replace(plan.lost, generations=tuple(sorted(generations)))
        if restart is not None:
            base, made = first.head.generation, first.chain.newest + 1
            heads = range(base + 1, made)
            given_up = [f"give up generation {generation}" for generation in heads]
            actions = [
                f"publish generation {made}, made from generation {base}",
                *given_up,
                *(action for action in actions if action not in given_up),
            ]
            missing = [g for g, problem in first.chain.lost.items() if problem.is_missing]
            lost = replace(
                lost,
                generations=tuple(sorted({*heads, *missing, *generations} - {made})),
                since_generation=base,
                holes=restart.holes,
                cursors=(*lost.cursors, *_dropped(first.head, restart)),
            )
        if restart is not None and restart.rebuilt is not None:
            actions.insert(1, "derive segments and floor from what is in the bucket")
        return RepairReport(
            namespace=self.names.name,
            applied=False,
            generation=generation,
            problems=(*first.problems, *_found_later(first, found)),
            actions=tuple(actions),
            quarantined=tuple(sorted(plan.quarantine)),
            lost=lost,
            unrepaired=tuple(plan.unrepaired),
        )


def _quarantine_manifests(plan: RepairPlan, first: Survey) -> None:
    """Damaged heads are no problem any more once there is another one; a copy is kept still."""
    damaged = {problem.object for problem in first.chain.problems if not problem.is_missing}
    new = sorted(damaged - set(plan.quarantine))
    plan.quarantine += new
    plan.actions[:0] = [f"copy {key} to quarantine" for key in new]


def _found_later(first: Survey, found: Survey) -> list[Problem]:
    """Return what was found only when the head was sound again."""
    told = {problem.object for problem in first.problems}
    return [problem for problem in found.problems if problem.object not in told]


def _dropped(base: Manifest, restart: Restart) -> list[str]:
    """Return the cursors that stood in a part of the log that is gone."""
    if restart.rebuilt is None:
        return []
    floor = restart.rebuilt.wal_floor
    return [name for name, cursor in base.cursors.items() if cursor.lsn + 1 < floor]
