"""The plan of a repair, as of one survey. Reads only, but for the segments that it recovers.

1  damaged objects of the log: skip their LSNs, fold their intact batches
2  damaged segments: recovered rows replace them in the head; generations that name them are
   skipped, and so are ingests in the log that do
3  damaged manifests below the head: skip their generations, release the snapshots that pin
   them; a cursor on one continues from another generation whose floor is low enough
4  damaged leases: delete them; the holder notices at its next renewal

`SalvagePlanner` finds the sources for the rows of damaged segments, by the LSNs and keys that each
covers. A footer states the covers of its segment. If it is lost, the others show them: the segments
of a manifest cover everything below the floor exactly once, so a segment covers what all others
leave. Several segments without footers are each recovered from all of that, since nothing shows
which of them had a version, and cut to their own bounds in the end. The segments that replace them
share the covers: each its own bounds, and one of them the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from reef.engine.context import NamespaceContext
from reef.engine.log.log import Verdict
from reef.engine.log.tail import ingested_segments
from reef.errors import CorruptionError, InvalidInputError, NotFoundError, UnsupportedFormatError
from reef.formats.covers import Cover, clipped, tidied, without
from reef.formats.manifest import BranchPin, CursorEntry, SegmentEntry
from reef.formats.segment import Footer, Lineage, check_identity, covers_of, decode_footer
from reef.formats.segment_writer import SegmentWriter
from reef.formats.wal_object import WalKind
from reef.jobs.repair.log import (
    Remains,
    RescuedLog,
    counted_ingests,
    log_versions,
    read_remains,
    replay_damaged_log,
    unseen_ingests,
)
from reef.jobs.repair.report import Lost, LostLsn
from reef.jobs.repair.segments import (
    Salvaged,
    SalvageTask,
    collapsed,
    run_salvage_task,
    write_saved,
)
from reef.jobs.verify.chain import Problem, ProblemKind
from reef.jobs.verify.job import NamespaceSurvey
from reef.jobs.verify.objects import check_segments
from reef.manifest.edits import NEVER, hold_lsn_of
from reef.manifest.repairs import Repairs
from reef.manifest.roots import UNKNOWN_GENERATION
from reef.runtime import Executor


@dataclass(frozen=True, slots=True)
class _Deduced:
    """The joint covers of segments without footers, and the share of each."""

    left: tuple[Cover, ...]
    shares: dict[str, tuple[Cover, ...]]


@dataclass
class SalvagePlanner:
    """Plans the tasks that recover damaged segments, as of one survey."""

    context: NamespaceContext
    survey: NamespaceSurvey
    write: bool
    _deduced: "_Deduced | None" = field(default=None, init=False)

    def tasks(self, ingested: Sequence[SegmentEntry]) -> list[SalvageTask]:
        """Return one task per damaged segment; `ingested` are those that the log names."""
        live = {s.id: s for s in (*self.survey.head.segments, *ingested)}
        tasks = []
        for segment_id in sorted(self.survey.damaged_segments()):
            task = SalvageTask(
                self.context,
                self.survey.head.generation,
                self.survey.segments[segment_id],
                others=tuple(other for other in live.values() if other.id != segment_id),
                in_head=segment_id in live,
                write=self.write,
            )
            tasks.append(self._with_sources(task) if task.in_head else task)
        return tasks

    def _with_sources(self, task: SalvageTask) -> SalvageTask:
        covers, claimed = self._covers(task.entry)
        if task.entry.visible_lsn:
            return replace(task, covers=covers, claimed=claimed)  # rows of a load are nowhere else
        log_from, lsns, ingested = self._log(covers)
        return replace(
            task,
            covers=covers,
            claimed=claimed,
            lsns=lsns,
            ingested=ingested,
            log_from=log_from,
            ancestors=self._ancestors(task.entry),
        )

    # --- the log ------------------------------------------------------------------
    def _log(
        self, covers: Sequence[Cover]
    ) -> tuple[int, tuple[int, ...], tuple[SegmentEntry, ...]]:
        """Return the LSN from which on the log has all of some covers, and its contents."""
        log, damaged = self.survey.log, self.survey.damaged_segments()
        unread = {*log.damaged, *self.survey.head.skipped_lsns}
        loads = {lsn: [e for e in log.ingested if e.visible_lsn == lsn] for lsn in log.verdicts}
        lsns: list[int] = []
        ingested: list[SegmentEntry] = []
        first = min((cover.first for cover in covers), default=NEVER)
        complete_from = first
        for lsn in _lsns(covers):
            slot, verdict = log.slots.get(lsn), log.verdicts.get(lsn)
            if verdict is None or slot is None or slot.header is None:
                complete_from = lsn + 1
            elif verdict is Verdict.APPLIES and slot.header.kind.has_rows:
                lsns.append(lsn)
            elif verdict is Verdict.APPLIES:
                ingested += [entry for entry in loads[lsn] if entry.id not in damaged]
                # A load that was never merged is in no other segment.
                if any(e.id in damaged and _both(_bounds(e), covers) for e in loads[lsn]):
                    complete_from = lsn + 1
            elif slot.header.kind is WalKind.INGEST and any(n < lsn for n in unread):
                complete_from = lsn + 1  # one of these may be its begin
        return complete_from, tuple(lsns), tuple(ingested)

    # --- ancestors ----------------------------------------------------------------
    def _ancestors(self, entry: SegmentEntry) -> tuple[SegmentEntry, ...]:
        """Return the inputs of the merge that wrote a segment, if all of them are intact."""
        chain = self.survey.chain
        named = chain.named.get(entry.id)
        before = [g for g in chain.floors if chain.roots.keep(g) and named and g < named.first]
        if named is None or not before:
            return ()
        heads = self.context.fresh().heads
        older, newer = heads.load(max(before)), heads.load(named.first)
        left = {segment.id for segment in newer.segments}
        inputs = tuple(s for s in older.segments if s.id not in left)
        damaged = self.survey.damaged_segments()
        if older.wal_floor != newer.wal_floor or any(s.id in damaged for s in inputs):
            return ()
        skipped = set(newer.skipped_lsns) - set(older.skipped_lsns)
        repaired = skipped or set(newer.skipped_generations) - set(older.skipped_generations)
        return () if repaired else inputs

    # --- covers -------------------------------------------------------------------
    def _covers(self, entry: SegmentEntry) -> tuple[tuple[Cover, ...], tuple[Cover, ...]]:
        """Return the covers that a segment may have had, and those of its replacement."""
        footer = self._footer(entry)
        if footer is not None:
            covers = covers_of(footer, entry.visible_lsn)
            return covers, covers
        if self._deduced is None:
            self._deduced = self._deduce()
        bounds = (_bounds(entry),)
        if entry.id not in self._deduced.shares:
            return bounds, bounds
        wide = clipped(self._deduced.left, entry.min_key, entry.max_key + b"\0")
        return (bounds if entry.visible_lsn else wide), self._deduced.shares[entry.id]

    def _deduce(self) -> "_Deduced":
        """Return the covers that all readable footers of the head leave, and the shares."""
        head = self.survey.head
        # The segments of a branch also cover the LSNs of its origin, below its own log.
        first = head.wal_base if head.origin is None else 1
        left, lost = [Cover(first, head.wal_floor)], []
        for entry in head.segments:
            footer = self._footer(entry)
            if footer is None:
                lost.append(entry)
            else:
                left = without(left, covers_of(footer, entry.visible_lsn))
        shares: dict[str, list[Cover]] = {}
        rest = left
        for entry in sorted(lost, key=lambda entry: not entry.visible_lsn):
            shares[entry.id] = _both(_bounds(entry), rest)
            rest = without(rest, shares[entry.id])
        written = [entry.id for entry in lost if not entry.visible_lsn]
        if written:
            shares[written[0]] += rest
        return _Deduced(tuple(left), {i: tidied(covers) for i, covers in shares.items()})

    def _footer(self, entry: SegmentEntry) -> Footer | None:
        """Return a segment's footer; None if it is unreadable or another segment's."""
        key = self.context.names.segment(entry.id, entry.home)
        try:
            if entry.id not in self.survey.damaged_segments():
                segments = self.context.segments()
                return segments.tail(entry).footer
            body = self.context.store.get(key)
            footer = decode_footer(body, len(body), key)
            if isinstance(footer, Footer):
                check_identity(footer, entry.id, key)
                return footer
        except (CorruptionError, InvalidInputError, NotFoundError, UnsupportedFormatError):
            pass
        return None


def _lsns(covers: Sequence[Cover]) -> list[int]:
    return sorted({lsn for cover in covers for lsn in range(cover.first, cover.end)})


def _bounds(entry: SegmentEntry) -> Cover:
    """Return the slots and keys of a segment: all rows of a load are of one slot."""
    first, last = entry.lsn_min, entry.lsn_max
    if entry.visible_lsn:
        first = last = entry.visible_lsn
    return Cover(first, last + 1, entry.min_key, entry.max_key + b"\0")


def _both(cover: Cover, others: Sequence[Cover]) -> list[Cover]:
    shared = [cover.both(other) for other in others]
    return [piece for piece in shared if piece is not None]


UNREPAIRABLE = frozenset({ProblemKind.UNSUPPORTED})


@dataclass(slots=True)
class RepairPlan:
    """The edit to publish, the objects to copy to quarantine, and the losses."""

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

    context: NamespaceContext
    executor: Executor
    survey: NamespaceSurvey
    write: bool

    def plan(self) -> RepairPlan:
        """Decide about every problem; recovered segments are written if `write` is set."""
        remains = self._remains()
        log = replay_damaged_log(self.context.names, self.survey, remains)
        self._check_unseen(log)
        salvaged = self._salvage(log)
        saved = {s.segment: s.entries for s in salvaged}
        log.needs_fold |= any(entry.id in saved for entry in log.ingested)
        ingests = self._skipped_ingests(saved)
        generations = self._generations(saved)
        snapshots = {s.id: s for s in self.survey.head.snapshots if s.generation in generations}
        cursors = self._cursors()
        unseen = unseen_ingests(self.context.names, self.survey)
        unseen += [self._skipped_ingest(lsn) for lsn in log.without_begin]
        proved = counted_ingests(self.survey) & {lost.lsn for lost in unseen}
        counted = self._intact({*proved, *log.without_begin})
        repairs = Repairs(
            skipped_lsns=frozenset({*remains, *(lost.lsn for lost in ingests)}),
            skipped_generations=generations,
            ingests_without_begin=counted,
            replaced={i: entries for i, entries in saved.items() if self._is_named(i)},
            snapshots=frozenset(snapshots),
            cursors=cursors,
            branches=self._branches(),
            fold=log.fold_result(self._fold_log(log, saved)) if log.needs_fold else None,
        )
        lsns = [*(lost for lost in unseen if lost.lsn not in counted), *ingests, *log.lost]
        lost = Lost(
            lsns=tuple(
                sorted({lost.lsn: lost for lost in lsns}.values(), key=lambda lost: lost.lsn)
            ),
            segments=tuple(s.lost for s in salvaged),
            generations=tuple(sorted(generations)),
            snapshots=tuple(s.name or s.id for s in snapshots.values()),
            cursors=tuple(name for name, entry in cursors.items() if entry is None),
        )
        return self._describe(RepairPlan(repairs, lost), log)

    # --- the log ------------------------------------------------------------------
    def _remains(self) -> dict[int, Remains]:
        wrong = [p for p in self.survey.log.problems if p.kind not in UNREPAIRABLE]
        slots = self.survey.log.slots
        lsns = sorted({p.lsn for p in wrong if p.lsn is not None})
        # A readable fence or skip is in the place of a lost object. Rows in a slot that was filled
        # twice (H73) were acknowledged like those that they replaced: they are kept.
        fillers = (WalKind.FENCE, WalKind.SKIP)
        headers = {lsn: slots[lsn].header for lsn in lsns if lsn in slots}
        unreadable = [n for n in lsns if (h := headers.get(n)) is None or h.kind not in fillers]
        remains = {lsn: Remains(lsn) for lsn in lsns}
        return remains | read_remains(self.context, unreadable, self.survey.head.schemas)

    def _skipped_ingests(self, saved: dict[str, tuple[SegmentEntry, ...]]) -> list[LostLsn]:
        """Return the ingests of lost segments: views of older generations must skip them."""
        lsns = {e.visible_lsn for e in self.survey.log.ingested if e.id in saved}
        return [self._skipped_ingest(lsn) for lsn in sorted(lsns)]

    def _skipped_ingest(self, lsn: int) -> LostLsn:
        """Return an ingest that no longer counts in views of older generations."""
        return LostLsn(lsn, self.context.names.wal_object(lsn), "ingest", 0, 0, history_only=True)

    def _intact(self, lsns: set[int]) -> frozenset[int]:
        """Return the ingests whose segments all exist and are intact."""
        slots, schema = self.survey.log.slots, self.survey.head.schema
        headers = [slots[lsn].header for lsn in sorted(lsns) if lsn in slots]
        loads = [header for header in headers if header is not None]
        entries = {h.lsn: ingested_segments(h, schema, self.context.names) for h in loads}
        unknown = [e for es in entries.values() for e in es if e.id not in self.survey.segments]
        wrong = check_segments(self.executor, self.context, unknown, deep=True)
        damaged = {*self.survey.damaged_segments(), *(problem.segment for problem in wrong)}
        return frozenset(n for n, es in entries.items() if damaged.isdisjoint(e.id for e in es))

    def _fold_log(
        self, log: RescuedLog, saved: dict[str, tuple[SegmentEntry, ...]]
    ) -> list[SegmentEntry]:
        """Return the segments of the log from the floor on."""
        entries = [new for old in log.ingested for new in saved.get(old.id, (old,))]
        if self.write and log.counting:
            rows, tombstones = log_versions(self.context, log.manifest, log.counting, log.remains)
            others = (*log.ingested, *log.manifest.segments)
            hold_lsn = hold_lsn_of(log.open_jobs)
            rows = collapsed([rows], tombstones, log.manifest.schema, others, hold_lsn)
            lineage = Lineage("", 0, covers=log.covers(), generation=log.manifest.generation)
            writer = SegmentWriter(log.manifest.schema, 0, lineage, range_tombstones=tombstones)
            entries.append(write_saved(self.context, writer, rows))
        return entries

    # --- segments -----------------------------------------------------------------
    def _check_unseen(self, log: RescuedLog) -> None:
        """Check the segments of ingests whose begin cannot be read: no survey has seen them."""
        known = self.survey.segments
        unseen = [entry for entry in log.ingested if entry.id not in known]
        known |= {entry.id: entry for entry in unseen}
        self.survey.problems += check_segments(self.executor, self.context, unseen, deep=True)

    def _salvage(self, log: RescuedLog) -> list[Salvaged]:
        tasks = SalvagePlanner(self.context, self.survey, self.write).tasks(log.ingested)
        # One at a time: each holds a whole segment in memory.
        return [done for task in tasks for done in self.executor.map(run_salvage_task, [task])]

    def _is_named(self, segment_id: str) -> bool:
        return any(s.id == segment_id for s in self.survey.head.segments)

    # --- generations --------------------------------------------------------------
    def _generations(self, saved: dict[str, tuple[SegmentEntry, ...]]) -> frozenset[int]:
        """Return the generations that cannot be read: damaged, or naming a damaged segment."""
        chain = self.survey.chain
        disagree = [p.generation for p in chain.problems if p.generation is not None]
        spans = [chain.named[i] for i in saved if i in chain.named]
        naming = {
            g
            for g in chain.floors
            if chain.roots.keep(g) and any(span.first <= g <= span.last for span in spans)
        }
        lost = {*chain.lost, *disagree} - {chain.head.generation}
        return frozenset(lost | naming)

    def _branches(self) -> dict[str, BranchPin]:
        """Return the pins of branches on lost generations, without their generation.

        It is unknown then which objects they need: the sweep keeps all of them.
        """
        lost, pins = self.survey.chain.lost, self.survey.head.branches.items()
        unknown = {"generation": UNKNOWN_GENERATION}
        return {
            branch: msgspec.structs.replace(pin, **unknown)
            for branch, pin in pins
            if pin.generation in lost
        }

    def _cursors(self) -> dict[str, CursorEntry | None]:
        """Move cursors on lost generations to the newest one with a low enough floor."""
        chain, moved = self.survey.chain, {}
        for name, cursor in self.survey.head.cursors.items():
            if cursor.generation in chain.lost:
                fits = [g for g, floor in chain.floors.items() if floor <= cursor.lsn + 1]
                moved[name] = CursorEntry(cursor.lsn, max(fits)) if fits else None
        return moved

    # --- actions ------------------------------------------------------------------
    def _describe(self, plan: RepairPlan, log: RescuedLog) -> RepairPlan:
        head = self.survey.head.generation
        plan.unrepaired = [
            problem
            for problem in self.survey.problems
            if problem.kind in UNREPAIRABLE
            or (problem.kind is ProblemKind.MANIFEST_DISAGREES and problem.generation == head)
        ]
        present = [p for p in self.survey.problems if not p.is_missing and p not in plan.unrepaired]
        plan.quarantine = sorted(
            {p.object for p in present if p.object.startswith(f"{self.context.names.root}/")}
        )
        leases = [p.object for p in self.survey.problems if p.kind is ProblemKind.LEASE_DAMAGED]
        plan.leases = sorted(leases)
        plan.actions += [f"copy {key} to quarantine" for key in plan.quarantine]
        plan.actions += [_of_lsn(lost) for lost in plan.lost.lsns]
        if log.needs_fold:
            plan.actions.append("fold the log past the damage, with all that is intact in it")
        for segment in plan.lost.segments:
            verb = "drop" if segment.history_only else "replace"
            plan.actions.append(
                f"{verb} segment {segment.id}: {segment.saved_rows} of {segment.rows} rows saved"
            )
        plan.actions += [f"skip generation {g}" for g in plan.lost.generations]
        plan.actions += [f"release snapshot {name}" for name in plan.lost.snapshots]
        plan.actions += [f"reap lease {key}" for key in plan.leases]
        return plan


def _of_lsn(lost: LostLsn) -> str:
    kind = lost.kind or "unreadable"
    if lost.history_only:
        return f"skip LSN {lost.lsn} in views of older generations ({kind})"
    if lost.batches == 0:
        return f"skip LSN {lost.lsn} ({kind}) without loss"
    return f"skip LSN {lost.lsn} ({kind})"
