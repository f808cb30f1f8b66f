"""Repair: bring a damaged namespace back into service, with all rows that are left (protocols §7).

    1  survey everything, deeply (`reef.jobs.verify`)
    2  damaged head: publish the generation after it, from the newest intact one       (H18)
    3  damaged head, or damage in the unfolded log: raise the writer epoch, put fences, and
       survey again                                                                    (H17)
    4  plan: recover rows of damaged segments and WAL objects; copy damaged objects to
       `quarantine/`
    5  one CAS: LSNs and generations skipped, segments replaced, the log folded past the damage
    6  delete unreadable leases
    7  if readers open an earlier incarnation, publish its end again
    8  release snapshots of earlier incarnations that cannot be read

Fences come before anything is skipped: a writer that has lost rows in memory must not commit on
them once readers cannot see them. Damaged objects stay in place: an emptied slot could be filled by
its owner's resend. All decisions are in one publish, so that a repair that dies has done everything
or nothing, but for the fences, which the next writer puts too. On an intact namespace it does
nothing. A dry run (the default) only reads and reports. Writers, readers and jobs may run
concurrently; the writer is fenced if the head or its log was damaged.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

from reef.engine.context import NamespaceContext
from reef.engine.handles.database import Database
from reef.engine.registry import Registry
from reef.errors import ConflictError, NotFoundError
from reef.formats.manifest import Manifest
from reef.jobs.repair.head import (
    Published,
    end_earlier,
    fence_off,
    lost_ends,
    publish_after_damage,
    restart_of,
)
from reef.jobs.repair.plan import RepairPlan, RepairPlanner
from reef.jobs.repair.report import RepairReport
from reef.jobs.verify.chain import Problem, check_opened
from reef.jobs.verify.job import EarlierDamage, NamespaceSurvey, check_earlier, problems_of, survey
from reef.manifest.head import newest_incarnation
from reef.manifest.repairs import Restart, apply_repairs
from reef.runtime import Executor
from reef.telemetry import operation


def repair(
    db: Database, namespace: str, *, apply: bool = False, executor: Executor | None = None
) -> RepairReport:
    """Find all damage and repair it; changes something only with `apply`.

    Returns the problems, the actions, and exactly which rows are lost.
    """
    if apply:
        db._prove_store()
    names = newest_incarnation(db.store, namespace)
    context = NamespaceContext(db.store, names, metrics=db.metrics)
    run = _Repair(context, executor or db.store.runtime, db._registry)
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


@dataclass(slots=True)
class _Repair:
    """One repair of one namespace."""

    context: NamespaceContext
    executor: Executor
    registry: Registry | None = None
    drop_is_lost: bool = False
    unreadable: list[EarlierDamage] = field(default_factory=list)
    """Snapshots of earlier incarnations, which this repair releases."""

    def preview(self) -> RepairReport:
        """Return the report of a dry run. Writes nothing."""
        found = first = self._survey()
        opened = check_opened(self.context)
        first.problems += opened
        self.unreadable = self._check_earlier(first)
        restart, context = self._restart(found), self.context
        self.drop_is_lost = (restart is not None or bool(opened)) and self._has_drop()
        if restart is not None:
            store = Published(context.store, context.names, found.head, restart)
            context = NamespaceContext(store, context.names)
            found = survey(context, self.executor, deep=True)
        plan = RepairPlanner(context, self.executor, found, write=False).plan()
        _quarantine_manifests(plan, first)
        plan.actions += lost_ends(self.context) if opened else []
        return self._report(first, found, plan, first.head.generation, restart)

    def apply(self) -> RepairReport:
        """Run the steps."""
        found = first = self._survey()
        opened = check_opened(self.context)
        first.problems += opened
        self.unreadable = self._check_earlier(first)
        if not first.problems and not self.unreadable:
            plan = self._planner(found, write=False).plan()
            report = self._report(first, first, plan, first.head.generation, None)
            return replace(report, applied=True)
        restart = self._restart(found)
        if restart is None and not opened:
            return self._apply(first, None, opened)
        # Readers may have found the name dropped, and find it live afterwards.
        self.drop_is_lost = self._has_drop()
        with self._recovering():
            return self._apply(first, restart, opened)

    def _apply(
        self, first: NamespaceSurvey, restart: Restart | None, opened: list[Problem]
    ) -> RepairReport:
        found, restarted = first, None
        if restart is not None:
            restarted = publish_after_damage(self.context, found.head, restart)
            self.context.runtime.reach("repair restarted")
            found = self._survey()
        unfolded = {lsn for lsn in found.log.damaged if lsn >= found.head.wal_floor}
        if restarted is not None or unfolded:
            fence_off(self.context, frozenset(unfolded), restarted)
            self.context.runtime.reach("repair fenced")
            found = self._survey()
        plan = self._planner(found, write=True).plan()
        self.context.runtime.reach("repair staged")
        _quarantine_manifests(plan, first)
        self._quarantine(plan)
        head = self._publish(plan) if plan.changes_the_manifest else found.head
        self.context.runtime.reach("repair published")
        self._reap(plan)
        plan.actions += end_earlier(self.context, head) if opened else []
        self._release_earlier()
        report = self._report(first, found, plan, head.generation, restart)
        return replace(report, applied=True)

    # --- the steps ----------------------------------------------------------------
    def _check_earlier(self, found: NamespaceSurvey) -> list[EarlierDamage]:
        return check_earlier(self.context, self.executor, found.head, deep=True)

    def _release_earlier(self) -> None:
        """Release what cannot be read of earlier incarnations: sweeps would keep the rest of its
        objects, or fail, and nothing but a snapshot reads those.
        """
        for found in self.unreadable:
            publisher = self.context.at(found.incarnation).publisher
            publisher.publish(partial(apply_repairs, repairs=found.repairs), dropped=True)

    def _has_drop(self) -> bool:
        return self.registry is not None and self.registry.has_drop(self.context.names.name)

    def _recovering(self) -> AbstractContextManager[None]:
        if self.registry is None:
            return nullcontext()
        return self.registry.recovering(self.context.names.name)

    def _survey(self) -> NamespaceSurvey:
        return survey(self.context, self.executor, deep=True)

    def _restart(self, found: NamespaceSurvey) -> Restart | None:
        """Return the start after a damaged head; None if the head is intact."""
        if not found.chain.head_is_damaged:
            return None
        return restart_of(self.context, self.executor, found)

    def _planner(self, found: NamespaceSurvey, *, write: bool) -> RepairPlanner:
        return RepairPlanner(self.context, self.executor, found, write)

    def _quarantine(self, plan: RepairPlan) -> None:
        """Copy damaged objects for later inspection; missing ones are passed."""
        for key in plan.quarantine:
            try:
                self.context.store.copy(key, self.context.names.quarantined(key))
            except NotFoundError:
                continue

    def _publish(self, plan: RepairPlan) -> Manifest:
        publisher = self.context.fresh().publisher
        head, applied = publisher.publish_once(lambda head: apply_repairs(head, plan.repairs))
        if not applied:
            raise ConflictError(
                f"another process has folded the damaged part of the log of "
                f"{self.context.names.name}",
                hint="Run the repair again",
                namespace=self.context.names.name,
            )
        return head

    def _reap(self, plan: RepairPlan) -> None:
        if plan.leases:
            self.context.store.delete_many(plan.leases)

    # --- the report ---------------------------------------------------------------
    def _report(
        self,
        first: NamespaceSurvey,
        found: NamespaceSurvey,
        plan: RepairPlan,
        generation: int,
        restart: Restart | None,
    ) -> RepairReport:
        # Generations that this repair has published were never used.
        own = range(first.chain.newest + 1, found.head.generation + 1)
        own_actions = {f"skip generation {generation}" for generation in own}
        actions = [action for action in plan.actions if action not in own_actions]
        generations = set(plan.lost.generations) - set(own)
        lost = replace(plan.lost, generations=tuple(sorted(generations)))
        if restart is not None:
            base, made = first.head.generation, first.chain.newest + 1
            heads = range(base + 1, made)
            skipped = [f"skip generation {generation}" for generation in heads]
            actions = [
                f"publish generation {made}, made from generation {base}",
                *skipped,
                *(action for action in actions if action not in skipped),
            ]
            missing = [g for g, problem in first.chain.lost.items() if problem.is_missing]
            lost = replace(
                lost,
                generations=tuple(sorted({*heads, *missing, *generations} - {made})),
                since_generation=base,
                holes=restart.holes,
                cursors=(*lost.cursors, *_lost_cursors(first.head, restart)),
            )
        for found_earlier in self.unreadable:
            released = [s.name or s.id for s in found_earlier.snapshots]
            lost = replace(lost, snapshots=(*lost.snapshots, *released))
            of = f"of incarnation {found_earlier.incarnation}"
            gone = sorted(found_earlier.generations)
            actions += [f"skip generation {generation} {of}" for generation in gone]
            actions += [f"release snapshot {name} {of}" for name in released]
        if self.drop_is_lost:
            lost = replace(lost, drop=True)
            actions.append(f"make {self.context.names.name} live again: its drop is lost")
        if restart is not None and restart.rebuilt is not None:
            actions.insert(1, "derive segments and floor from the objects in the bucket")
        return RepairReport(
            namespace=self.context.names.name,
            applied=False,
            generation=generation,
            problems=(
                *first.problems,
                *_later_problems(first, found),
                *problems_of(self.unreadable),
            ),
            actions=tuple(actions),
            quarantined=tuple(sorted(plan.quarantine)),
            lost=lost,
            unrepaired=tuple(plan.unrepaired),
        )


def _quarantine_manifests(plan: RepairPlan, first: NamespaceSurvey) -> None:
    """Add damaged heads, which are no problem of the later survey, to the quarantine."""
    damaged = {problem.object for problem in first.chain.problems if not problem.is_missing}
    new = sorted(damaged - set(plan.quarantine))
    plan.quarantine += new
    plan.actions[:0] = [f"copy {key} to quarantine" for key in new]


def _later_problems(first: NamespaceSurvey, found: NamespaceSurvey) -> list[Problem]:
    """Return the problems that only the survey of the new head has found."""
    known = {problem.object for problem in first.problems}
    return [problem for problem in found.problems if problem.object not in known]


def _lost_cursors(base: Manifest, restart: Restart) -> list[str]:
    """Return the cursors whose part of the log is gone."""
    if restart.rebuilt is None:
        return []
    floor = restart.rebuilt.wal_floor
    return [name for name, cursor in base.cursors.items() if cursor.lsn + 1 < floor]
