"""What a repair would do, as of one survey. Reads only, but for what it saves of segments.

Decisions, kind by kind:

    an object of the log      its LSN is given up; what is sound in it is folded
    a manifest below the head its generation is given up, and the snapshots that pin it; a cursor
                              on it goes on from another one whose floor is low enough
    a segment                 what was saved of it takes its place in the head; generations that
                              name it are given up, and an ingest in the log that does
    a lease                   it is reaped: its holder is told when it next renews it
"""

from dataclasses import dataclass, field

from reef.formats.manifest import CursorEntry, SegmentEntry
from reef.formats.segment import Lineage
from reef.formats.segment_writer import SegmentWriter
from reef.formats.wal_object import WalKind
from reef.jobs.executor import Executor
from reef.jobs.repair_log import (
    Remains,
    RescuedLog,
    judge_log,
    log_versions,
    read_remains,
    unseen_ingests,
)
from reef.jobs.repair_merge import collapsed, hold_lsn_of
from reef.jobs.repair_report import Lost, LostLsn
from reef.jobs.repair_segments import Salvaged, run_salvage_task, write_saved
from reef.jobs.repair_sources import SalvagePlanner
from reef.jobs.verify_problems import Problem, ProblemKind
from reef.jobs.verify_segments import check_segments
from reef.jobs.verify_survey import Survey
from reef.manifest.repairs import Repairs
from reef.paths import Namespace
from reef.stores import Store

__all__ = ["RepairPlan", "RepairPlanner"]

UNREPAIRABLE = frozenset({ProblemKind.UNSUPPORTED})


@dataclass(slots=True)
class RepairPlan:
    """The edit to publish, what goes to quarantine, and what is lost."""

    repairs: Repairs
    lost: Lost
    actions: list[str] = field(default_factory=list)
    quarantine: list[str] = field(default_factory=list)
    leases: list[str] = field(default_factory=list)
    unrepaired: list[Problem] = field(default_factory=list)

    @property
    def changes_the_manifest(self) -> bool:
        return self.repairs != Repairs()


@dataclass
class RepairPlanner:
    """Plans the repair of one namespace."""

    store: Store
    names: Namespace
    executor: Executor
    survey: Survey
    write: bool

    def plan(self) -> RepairPlan:
        """Decide about everything that was found; salvage segments are written if told so."""
        remains = self._remains()
        log = judge_log(self.names, self.survey, remains)
        self._look_at_unseen(log)
        salvaged = self._salvage(log)
        saved = {s.segment: s.entries for s in salvaged}
        log.needs_fold |= any(entry.id in saved for entry in log.ingested)
        ingests = self._ingests_given_up(saved)
        generations = self._generations(saved)
        snapshots = {s.id: s for s in self.survey.head.snapshots if s.generation in generations}
        cursors = self._cursors()
        repairs = Repairs(
            skipped_lsns=frozenset({*remains, *(lost.lsn for lost in ingests)}),
            skipped_generations=generations,
            replaced={i: entries for i, entries in saved.items() if self._is_named(i)},
            snapshots=frozenset(snapshots),
            cursors=cursors,
            fold=log.fold_result(self._folded(log, saved)) if log.needs_fold else None,
        )
        lsns = [*unseen_ingests(self.names, self.survey), *ingests, *log.lost]
        lost = Lost(
            lsns=tuple(
                sorted({lost.lsn: lost for lost in lsns}.values(), key=lambda lost: lost.lsn)
            ),
            segments=tuple(s.lost for s in salvaged),
            generations=tuple(sorted(generations)),
            snapshots=tuple(s.name or s.id for s in snapshots.values()),
            cursors=tuple(name for name, entry in cursors.items() if entry is None),
        )
        return self._described(RepairPlan(repairs, lost), log)

    # --- the log ------------------------------------------------------------------
    def _remains(self) -> dict[int, Remains]:
        wrong = [p for p in self.survey.log.problems if p.kind not in UNREPAIRABLE]
        slots = self.survey.log.slots
        lsns = sorted({p.lsn for p in wrong if p.lsn is not None})
        # A readable fence or skip is in the place of a lost object. Rows in a slot that was filled
        # twice (H73) were acknowledged like those that they replaced: they are kept.
        fillers = (WalKind.FENCE, WalKind.SKIP)
        headers = {lsn: slots[lsn].header for lsn in lsns if lsn in slots}
        unsound = [n for n in lsns if (h := headers.get(n)) is None or h.kind not in fillers]
        remains = {lsn: Remains(lsn) for lsn in lsns}
        return remains | read_remains(self.store, self.names, unsound, self.survey.head.schemas)

    def _ingests_given_up(self, saved: dict[str, tuple[SegmentEntry, ...]]) -> list[LostLsn]:
        """Views of the past must not look for a lost segment: they pass over its ingest."""
        lsns = {e.visible_lsn for e in self.survey.log.ingested if e.id in saved}
        return [
            LostLsn(lsn, self.names.wal_object(lsn), "ingest", 0, 0, history_only=True)
            for lsn in sorted(lsns)
        ]

    def _folded(
        self, log: RescuedLog, saved: dict[str, tuple[SegmentEntry, ...]]
    ) -> list[SegmentEntry]:
        """Return what the log from the floor on becomes."""
        entries = [new for old in log.ingested for new in saved.get(old.id, (old,))]
        if self.write and log.counting:
            rows, tombstones = log_versions(
                self.store, self.names, log.manifest, log.counting, log.remains
            )
            others = (*log.ingested, *log.manifest.segments)
            hold_lsn = hold_lsn_of(log.manifest)
            rows = collapsed([rows], tombstones, log.manifest.schema, others, hold_lsn)
            lineage = Lineage("", 0, covers=log.covers(), generation=log.manifest.generation)
            writer = SegmentWriter(log.manifest.schema, 0, lineage, range_tombstones=tombstones)
            entries.append(write_saved(self.store, self.names, writer, rows))
        return entries

    # --- segments -----------------------------------------------------------------
    def _look_at_unseen(self, log: RescuedLog) -> None:
        """An ingest whose begin cannot be read counts only here: no survey saw its segments."""
        known = self.survey.segments
        unseen = [entry for entry in log.ingested if entry.id not in known]
        known |= {entry.id: entry for entry in unseen}
        self.survey.problems += check_segments(
            self.executor, self.store, self.names, unseen, deep=True
        )

    def _salvage(self, log: RescuedLog) -> list[Salvaged]:
        tasks = SalvagePlanner(self.store, self.names, self.survey, self.write).tasks(log.ingested)
        # One at a time: each holds a whole segment in memory.
        return [done for task in tasks for done in self.executor.map(run_salvage_task, [task])]

    def _is_named(self, segment_id: str) -> bool:
        return any(s.id == segment_id for s in self.survey.head.segments)

    # --- generations --------------------------------------------------------------
    def _generations(self, saved: dict[str, tuple[SegmentEntry, ...]]) -> frozenset[int]:
        """Return those that cannot be read: damaged, or naming a segment that is."""
        chain = self.survey.chain
        disagree = [p.generation for p in chain.problems if p.generation is not None]
        spans = [chain.named[i] for i in saved if i in chain.named]
        naming = {
            g
            for g in chain.floors
            if chain.roots.keep(g) and any(span.first <= g <= span.last for span in spans)
        }
        lost = {*chain.lost, *disagree} - {chain.head.generation}
        pinned = set(self.survey.head.branch_pins.values())
        return frozenset((lost - pinned) | naming)

    def _cursors(self) -> dict[str, CursorEntry | None]:
        """Let cursors on lost generations go on from the newest one that lies behind them."""
        chain, moved = self.survey.chain, {}
        for name, cursor in self.survey.head.cursors.items():
            if cursor.generation in chain.lost:
                fits = [g for g, floor in chain.floors.items() if floor <= cursor.lsn + 1]
                moved[name] = CursorEntry(cursor.lsn, max(fits)) if fits else None
        return moved

    # --- words --------------------------------------------------------------------
    def _described(self, plan: RepairPlan, log: RescuedLog) -> RepairPlan:
        head = self.survey.head.generation
        plan.unrepaired = [
            problem
            for problem in self.survey.problems
            if problem.kind in UNREPAIRABLE
            or (problem.kind is ProblemKind.MANIFEST_DISAGREES and problem.generation == head)
        ]
        present = [p for p in self.survey.problems if not p.is_missing and p not in plan.unrepaired]
        plan.quarantine = sorted(
            {p.object for p in present if p.object.startswith(self.names.root)}
        )
        leases = [p.object for p in self.survey.problems if p.kind is ProblemKind.LEASE_DAMAGED]
        plan.leases = sorted(leases)
        plan.actions += [f"copy {key} to quarantine" for key in plan.quarantine]
        plan.actions += [_of_lsn(lost) for lost in plan.lost.lsns]
        if log.needs_fold:
            plan.actions.append("fold the log past the damage, with all that is intact in it")
        for segment in plan.lost.segments:
            done = "give up" if segment.history_only else "replace"
            plan.actions.append(
                f"{done} segment {segment.id}: {segment.saved_rows} of {segment.rows} rows saved"
            )
        plan.actions += [f"give up generation {g}" for g in plan.lost.generations]
        plan.actions += [f"release snapshot {name}" for name in plan.lost.snapshots]
        plan.actions += [f"reap lease {key}" for key in plan.leases]
        return plan


def _of_lsn(lost: LostLsn) -> str:
    kind = lost.kind or "an object that cannot be read"
    if lost.history_only:
        return f"skip LSN {lost.lsn} in views of the past ({kind}): the newest state has it"
    if lost.batches == 0:
        return f"skip LSN {lost.lsn} ({kind}): nothing in it is lost"
    return f"skip LSN {lost.lsn} ({kind})"
