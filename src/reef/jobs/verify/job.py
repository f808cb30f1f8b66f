"""Verify: check that every object that is needed exists and is intact.

    1  manifests: the chain from the head to the oldest retained generation, and pinned ones
    2  the log, from the lowest floor that a generation needs
    3  segments that a generation or an ingest in the log names: tails, or with `deep` every block
    4  missing objects are checked again against a head that was read later: a sweep may have
       deleted objects that were needed when the survey began
    5  leases, orphans, condemned keys, slots that an earlier repair skipped
    6  snapshots of earlier incarnations

Opens read-only, reports every problem, changes nothing; writers, jobs and sweeps may run
concurrently. Whatever a later head needs was needed all along, since a condemned key never comes
back. Requests: one per manifest, one per object of the log, two per segment, and with `deep` one
more per four megabytes.

**Earlier incarnations** are kept by their snapshots alone. After a drop and a re-creation nothing
but snapshots, and branches, which check their own objects, reads an earlier incarnation. So each
snapshot is opened as a reader opens it: its manifest, the log from its floor to its last LSN, and
the segments that both name. A generation that several snapshots pin is read once. Sweeps also load
the manifests that the dropped head retains, and those that its cursors name; without one of them
the needed objects are unknown, and nothing is collected.

The newest manifest of an earlier incarnation is its end. If it is damaged, its snapshots can be
listed, from the next older one that is intact, but neither read nor released, and no sweep deletes
its objects.

Only names that were created again pay: a listing and a manifest for each predecessor that is not
swept, and what its snapshots need.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from reef.engine.context import NamespaceContext
from reef.engine.handles.database import Database
from reef.engine.history.as_of import ConcurrentSweep, History, PointInTime
from reef.engine.log.log import Verdict
from reef.errors import (
    UNDECODABLE,
    CorruptionError,
    ErrorKind,
    InvalidInputError,
    NotFoundError,
    ReefError,
    UnsupportedFormatError,
)
from reef.formats.manifest import Manifest, SegmentEntry, SnapshotEntry
from reef.jobs.arguments import check_arguments
from reef.jobs.verify.chain import (
    ManifestChain,
    Problem,
    ProblemKind,
    Roots,
    Severity,
    check_opened,
    load,
    read_chain,
)
from reef.jobs.verify.indexes import check_centroids
from reef.jobs.verify.objects import LogSurvey, check_segments, survey_log
from reef.manifest.head import HeadFinder, ManifestHead, newest_incarnation, refuse_dropped
from reef.manifest.repairs import Repairs
from reef.manifest.roots import (
    GenerationLease,
    branch_points,
    expired_snapshots,
    find_generation_leases,
    job_of,
)
from reef.paths import number_of, numbered_key
from reef.runtime import Executor
from reef.stores.base import current_time_s
from reef.telemetry import operation

CACHE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class EarlierDamage:
    """The snapshots of one earlier incarnation that cannot be read, and why."""

    incarnation: int
    snapshots: tuple[SnapshotEntry, ...]
    generations: frozenset[int]
    """Retained ones without an intact manifest."""
    cursors: tuple[str, ...]
    """Those that resume from such a generation: nothing reads them."""
    problems: tuple[Problem, ...]
    end_is_damaged: bool = False
    """Whether its newest manifest is."""

    @property
    def is_needed(self) -> bool:
        """Whether anything needs the damaged object."""
        return self.end_is_damaged or self.releases_anything

    @property
    def releases_anything(self) -> bool:
        """Whether there is anything for `repairs` to release."""
        return bool(self.snapshots or self.generations)

    @property
    def repairs(self) -> Repairs:
        """Return the edit of the dropped head that releases all of it."""
        return Repairs(
            skipped_generations=self.generations,
            snapshots=frozenset(snapshot.id for snapshot in self.snapshots),
            cursors=dict.fromkeys(self.cursors),
        )


def check_earlier(
    context: NamespaceContext, executor: Executor, head: Manifest, *, deep: bool
) -> list[EarlierDamage]:
    """Check the snapshots of the incarnations before that of a head; changes nothing."""
    checks = [_Check(context.at(n), executor, deep) for n in head.predecessors]
    return [found for check in checks if (found := check.run()) is not None]


def problems_of(found: Iterable[EarlierDamage]) -> list[Problem]:
    """Return why they cannot be read."""
    return [problem for damage in found for problem in damage.problems]


@dataclass
class _Check:
    """The check of one earlier incarnation."""

    context: NamespaceContext
    executor: Executor
    deep: bool

    def run(self) -> EarlierDamage | None:
        """Return the damage of earlier incarnations; None if there is none."""
        try:
            head = self._find()
        except CorruptionError as error:
            return self._without_snapshots(error)
        except NotFoundError:
            return None  # nothing is left that would say what was there
        try:
            found = self._damage(head)
            return None if found is None else self._still(found)  # released meanwhile, and swept?
        except (CorruptionError, NotFoundError):
            return None

    def _without_snapshots(self, error: CorruptionError) -> EarlierDamage:
        """Return the damage where no manifest says which snapshots there were."""
        number, problem = self.context.names.incarnation, self._end_problem(error)
        message = f"{problem.message}; its snapshots are lost"
        problem = replace(problem, message=message, severity=Severity.WARNING)
        return EarlierDamage(number, (), frozenset(), (), (problem,), end_is_damaged=True)

    def _end_problem(self, error: CorruptionError) -> Problem:
        key = _object(error, self.context.names.manifests)
        message = f"incarnation {self.context.names.incarnation}: {error.message}"
        return Problem(ProblemKind.MANIFEST_DAMAGED, key, message, generation=number_of(key))

    def _damage(self, found: ManifestHead) -> EarlierDamage | None:
        head = found.manifest
        known = {g: [problem] for g, problem in self._lost(head).items()}
        lost, snapshots = frozenset(known), []
        for snapshot in self._alive(head):
            if snapshot.generation not in known:
                known[snapshot.generation] = list(self._problems(head, snapshot))
            if known[snapshot.generation]:
                snapshots.append(snapshot)
        ends = [] if found.damage is None else [self._end_problem(found.damage)]
        problems = dict.fromkeys([*ends, *(p for damaged in known.values() for p in damaged)])
        if not problems:
            return None
        cursors = tuple(n for n, cursor in head.cursors.items() if cursor.generation in lost)
        number = self.context.names.incarnation
        return EarlierDamage(
            number, tuple(snapshots), lost, cursors, tuple(problems), end_is_damaged=bool(ends)
        )

    def _still(self, found: EarlierDamage) -> EarlierDamage | None:
        """Return the damage without snapshots and generations that need no more."""
        head = self._find().manifest
        alive = {snapshot.id for snapshot in self._alive(head)}
        kept = Roots.of(head, self._now_ms())
        found = replace(
            found,
            snapshots=tuple(s for s in found.snapshots if s.id in alive),
            generations=frozenset(g for g in found.generations if kept.keep_log(g)),
        )
        return found if found.is_needed else None

    def _lost(self, head: Manifest) -> dict[int, Problem]:
        """Return the problems of the manifests that a sweep loads."""
        heads = self.context.fresh().heads
        generations = [g for g in Roots.of(head, self._now_ms()).all() if g != head.generation]
        found = self.context.runtime.map(partial(load, heads, self.context.names), generations)
        both = zip(generations, found, strict=True)
        return {g: problem for g, problem in both if isinstance(problem, Problem)}

    def _now_ms(self) -> int:
        return int(current_time_s(self.context.store) * 1000)

    def _find(self) -> ManifestHead:
        """Return the newest intact manifest; a branch's leads to the log that it inherits."""
        heads = self.context.fresh().heads
        found = heads.find(fallback=True, dropped=True)
        self.context = NamespaceContext(self.context.store, heads.names)
        return found

    def _alive(self, head: Manifest) -> list[SnapshotEntry]:
        if not head.snapshots:
            return []
        expired = expired_snapshots(head, self._now_ms())
        return [snapshot for snapshot in head.snapshots if snapshot.id not in expired]

    def _problems(self, head: Manifest, snapshot: SnapshotEntry) -> Iterator[Problem]:
        """Read everything that a snapshot needs, as a reader does."""
        names, generation = self.context.names, snapshot.generation
        kind, key = ProblemKind.MANIFEST_DAMAGED, names.manifest(generation)
        try:
            history = History(
                self.context.store, names, self.context.segments(CACHE_BYTES), dropped=True
            )
            manifest = history.load(generation)
            kind, key = ProblemKind.WAL_DAMAGED, names.wal
            last_lsn = max(manifest.wal_id_last_seen, manifest.wal_floor - 1)
            tail = history.replay(PointInTime(manifest, last_lsn), head)
        except UnsupportedFormatError as error:
            yield Problem(ProblemKind.UNSUPPORTED, _object(error, key), error.message)
            return
        except (CorruptionError, NotFoundError) as error:
            yield Problem(kind, _object(error, key), error.message, generation=generation)
            return
        except ConcurrentSweep as error:
            yield Problem(ProblemKind.MANIFEST_MISSING, key, str(error), generation=generation)
            return
        entries = {e.id: e for e in (*manifest.segments, *tail.view().memtable.cut().ingested)}
        ordered = [entries[i] for i in sorted(entries)]
        yield from check_segments(self.executor, self.context, ordered, deep=self.deep)


def _object(error: ReefError, key: str) -> str:
    return str(error.context.get("object") or key)


CLOCK_MARGIN_S = 1.0


@dataclass(slots=True)
class NamespaceSurvey:
    """The state and the problems of a namespace, as of one head."""

    chain: ManifestChain
    log: LogSurvey
    segments: dict[str, SegmentEntry]
    """All needed ones: named by a retained generation, or by an ingest in the log."""
    problems: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)

    @property
    def head(self) -> Manifest:
        return self.chain.head

    def damaged_segments(self) -> dict[str, list[Problem]]:
        """Return the problems of damaged segments, by segment."""
        found: dict[str, list[Problem]] = {}
        for problem in self.problems:
            if problem.segment is not None and problem.kind is not ProblemKind.UNSUPPORTED:
                found.setdefault(problem.segment, []).append(problem)
        return found


def survey(
    context: NamespaceContext, executor: Executor, *, deep: bool, every_row: bool = False
) -> NamespaceSurvey:
    """Check everything that is needed; changes nothing."""
    return _Surveyor(context, executor, context.fresh().heads).run(deep=deep, every_row=every_row)


@dataclass
class _Surveyor:
    """One survey of one namespace."""

    context: NamespaceContext
    executor: Executor
    heads: HeadFinder

    def run(self, *, deep: bool, every_row: bool = False) -> NamespaceSurvey:
        chain = read_chain(self.context, self.heads, self._now_ms())
        refuse_dropped(self.context.names, chain.head)
        log = survey_log(self.executor, self.context, chain)
        segments = {entry.id: entry for entry in log.ingested}
        segments |= {i: named.entry for i, named in chain.named.items()}
        ordered = [segments[i] for i in sorted(segments)]
        found = NamespaceSurvey(chain, log, segments)
        wrong = check_segments(self.executor, self.context, ordered, deep=deep, every_row=every_row)
        found.problems = [*chain.problems, *log.problems, *wrong]
        if any(problem.is_missing for problem in found.problems):
            found.problems = self._confirm_problems(found)
        found.problems += self._lost_heads(found)
        found.problems += check_centroids(self.context.store, self.context.names, found.head)
        found.problems += self._leases(found)
        found.notes += self._notes(found)
        return found

    def _now_ms(self) -> int:
        return int((current_time_s(self.context.store) - self._margin_s()) * 1000)

    def _margin_s(self) -> float:
        return CLOCK_MARGIN_S + self.context.store.capabilities.clock_resolution_s

    # --- missing objects ----------------------------------------------------------
    def _confirm_problems(self, found: NamespaceSurvey) -> list[Problem]:
        """Return the problems without objects that were swept, or written, since it began."""
        self.heads.forget()
        head = self.heads.find(fallback=True).manifest
        roots = Roots.of(head, self._now_ms())
        floor = min(
            [head.wal_floor] + [f for g, f in found.chain.floors.items() if roots.keep_log(g)]
        )
        confirmed = []
        for problem in found.problems:
            swept = problem.is_missing and not self._is_still_needed(problem, found, roots, floor)
            if not swept and not (problem.is_missing and self._is_there(problem.object)):
                confirmed.append(problem)
        dropped = {p.generation for p in found.problems if p not in confirmed}
        for generation in dropped - {None}:
            found.chain.lost.pop(generation or 0, None)
        found.log.problems = [p for p in found.log.problems if p in confirmed]
        return confirmed

    def _is_still_needed(
        self, problem: Problem, found: NamespaceSurvey, roots: Roots, floor: int
    ) -> bool:
        if problem.lsn is not None:
            return problem.lsn >= floor
        if problem.generation is not None:
            return roots.keep_manifest(problem.generation)
        named = found.chain.named.get(problem.segment or "")
        if named is not None:
            return named.needed_by(roots)
        ingested = [e for e in found.log.ingested if e.id == problem.segment]
        return any(entry.visible_lsn >= floor for entry in ingested)

    def _is_there(self, key: str) -> bool:
        try:
            self.context.store.head(key)
        except NotFoundError:
            return False
        return True

    def _lost_heads(self, found: NamespaceSurvey) -> list[Problem]:
        """Return the manifests that are missing at the end: the log has an epoch that none has.

        Every epoch was published before its first fence was put, in a generation of its own.
        """
        epoch = max((h.epoch for h in found.log.headers()), default=0)
        if found.chain.head_is_damaged or epoch <= found.head.writer_epoch:
            return []
        self.heads.forget()
        if self.heads.find(fallback=True).manifest.writer_epoch >= epoch:
            return []  # it was published since
        found.chain.newest += epoch - found.head.writer_epoch
        key = self.context.names.manifest(found.chain.newest)
        message = (
            f"object {key} is missing: the log has a writer of epoch {epoch}, "
            f"generation {found.head.generation} none above {found.head.writer_epoch}"
        )
        lost = Problem(ProblemKind.MANIFEST_MISSING, key, message, generation=found.chain.newest)
        return [lost]

    # --- leases -------------------------------------------------------------------
    def _leases(self, found: NamespaceSurvey) -> Iterator[Problem]:
        """A lease that cannot be read holds everything for a day; an expired one holds nothing."""
        now_s = current_time_s(self.context.store)
        for lease in find_generation_leases(
            self.context.store, self.context.names, now_s, self._margin_s()
        ):
            wrong = self._wrong_with(lease.key)
            if wrong:
                message = f"object {lease.key}: {wrong}"
                yield Problem(ProblemKind.LEASE_DAMAGED, lease.key, message, Severity.WARNING, 0)
            elif lease.expired:
                found.notes.append(
                    Problem(
                        ProblemKind.LEASE_EXPIRED,
                        lease.key,
                        f"the lease of {lease.owner or 'an unknown process'} on generation "
                        f"{lease.record.generation} has expired",
                        Severity.INFO,
                        generation=lease.record.generation,
                    )
                )

    def _wrong_with(self, key: str) -> str | None:
        try:
            record = msgspec.json.decode(self.context.store.get(key), type=GenerationLease)
        except NotFoundError:
            return None
        except UNDECODABLE as error:
            return f"not a lease: {error}"
        if self.context.names.lease(record.id) != key:
            return f"says that it is lease {record.id}"
        return None

    # --- notes --------------------------------------------------------------------
    def _of_branches(self, head: Manifest) -> set[str]:
        """Return the segments of generations that branches pin; a verify of those checks them."""
        named: set[str] = set()
        for generation, _ in branch_points(head):
            with suppress(NotFoundError, CorruptionError):
                named.update(self.heads.load_outline(generation).segment_ids)
        return named

    def _notes(self, found: NamespaceSurvey) -> Iterator[Problem]:
        head = found.head
        condemned = {f"{self.context.names.root}/{c.key}" for c in head.condemned}
        for key in sorted(condemned):
            yield Problem(
                ProblemKind.CONDEMNED, key, "condemned, to be deleted by a sweep", Severity.INFO
            )
        for one in head.condemned_ranges:
            key = f"{self.context.names.root}/{numbered_key(one.folder, one.first)}"
            message = f"condemned with all up to number {one.last}, to be deleted by a sweep"
            yield Problem(ProblemKind.CONDEMNED, key, message, Severity.INFO)
        for lsn in head.skipped_lsns:
            key, message = self.context.names.wal_object(lsn), f"LSN {lsn} was skipped by a repair"
            yield Problem(ProblemKind.SKIPPED, key, message, Severity.INFO, lsn=lsn)
        for generation in head.skipped_generations:
            key = self.context.names.manifest(generation)
            message = f"generation {generation} was skipped by a repair"
            yield Problem(ProblemKind.SKIPPED, key, message, Severity.INFO, generation=generation)
        jobs = {job.id for job in found.log.open_jobs} | found.log.waiting_jobs
        known = self._of_branches(head) | found.segments.keys() | head.own_objects
        for info in self.context.store.list(self.context.names.segments):
            segment_id = info.key.removeprefix(self.context.names.segments).removesuffix(".seg")
            if info.key in condemned or segment_id in known:
                continue
            if job_of(segment_id) not in jobs:
                message = f"{info.size} bytes that no generation and no ingest names"
                yield Problem(
                    ProblemKind.ORPHAN, info.key, message, Severity.INFO, segment=segment_id
                )


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The extent of a check, and its results."""

    namespace: str
    deep: bool
    generation: int
    """Generation of the newest intact manifest."""
    generations: int
    objects: int
    """WAL objects, from the lowest floor that is needed."""
    voided: int
    segments: int
    rows: int
    problems: list[Problem]
    """Errors and warnings: damaged or missing objects."""
    notes: list[Problem]
    """Info: orphans, condemned keys, expired leases, slots that a repair skipped."""

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        facts = {name: getattr(self, name) for name in self.__slots__}
        facts["problems"] = [problem.to_dict() for problem in self.problems]
        facts["notes"] = [note.to_dict() for note in self.notes]
        return {**facts, "ok": self.ok}


def verify(
    db: Database,
    namespace: str,
    *,
    deep: bool = False,
    indexes: str = "sample",
    executor: Executor | None = None,
) -> VerifyReport:
    """Check everything that is needed and return every problem. Changes nothing.

    With `deep` every block is read, and the rows of three groups of each segment are compared with
    its search indexes; with `indexes="all"` all rows, which keeps the indexed columns of a segment
    in memory.
    """
    check_arguments(db, executor)
    if indexes not in ("sample", "all"):
        raise InvalidInputError(
            f"indexes={indexes!r} is neither 'sample' nor 'all'", kind=ErrorKind.INVALID_OPTION
        )
    if indexes == "all" and not deep:
        raise InvalidInputError("indexes='all' needs deep=True", kind=ErrorKind.INVALID_OPTION)
    names = newest_incarnation(db.store, namespace)
    context = NamespaceContext(db.store, names, metrics=db.metrics)
    with operation(db.metrics, "verify"):
        every_row = indexes == "all"
        found = survey(context, executor or db.store.runtime, deep=deep, every_row=every_row)
        found.problems += check_opened(context)
        executor = executor or db.store.runtime
        earlier = check_earlier(context, executor, found.head, deep=deep)
        found.problems += problems_of(earlier)
    report = _report(namespace, found, deep=deep)
    db.events.emit("verified", namespace=namespace, deep=deep, problems=len(report.problems))
    return report


def _report(namespace: str, found: NamespaceSurvey, *, deep: bool) -> VerifyReport:
    return VerifyReport(
        namespace=namespace,
        deep=deep,
        generation=found.head.generation,
        generations=len(found.chain.floors),
        objects=len(found.log.slots),
        voided=sum(verdict is Verdict.VOID for verdict in found.log.verdicts.values()),
        segments=len(found.segments),
        rows=sum(entry.rows for entry in found.segments.values()),
        problems=list(found.problems),
        notes=list(found.notes),
    )
