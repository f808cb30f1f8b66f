"""A survey: everything that somebody needs in a namespace, and what is wrong with it.

Manifests first, then the log, then segments: each says what the next must have. Others go on
meanwhile, and a sweep may take what was needed when the survey began. So nothing is called
missing before it was looked for again, and a head that was read *after* that still needs it. What
that head still needs was needed all along, since what was once condemned never comes back.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from reef.errors import UNDECODABLE, NotFoundError
from reef.formats.manifest import Manifest, SegmentEntry
from reef.jobs.executor import Executor
from reef.jobs.verify_chain import Chain, Roots, read_chain
from reef.jobs.verify_log import SurveyedLog, survey_log
from reef.jobs.verify_problems import Problem, ProblemKind, Severity
from reef.jobs.verify_segments import check_segments
from reef.manifest.head import HeadFinder, refuse_dropped
from reef.manifest.leases import LeaseRecord, find_leases
from reef.manifest.roots import job_of
from reef.paths import Namespace
from reef.stores import Store
from reef.stores.dates import now_to_look

__all__ = ["Survey", "survey"]

CLOCK_MARGIN_S = 1.0


@dataclass(slots=True)
class Survey:
    """What was found, as of one head."""

    chain: Chain
    log: SurveyedLog
    segments: dict[str, SegmentEntry]
    """All that are needed: named by a generation that is kept, or by an ingest in the log."""
    problems: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)

    @property
    def head(self) -> Manifest:
        return self.chain.head

    def damaged_segments(self) -> dict[str, list[Problem]]:
        """Return the segments that are not what they should be."""
        found: dict[str, list[Problem]] = {}
        for problem in self.problems:
            if problem.segment is not None and problem.kind is not ProblemKind.UNSUPPORTED:
                found.setdefault(problem.segment, []).append(problem)
        return found


def survey(store: Store, names: Namespace, executor: Executor, *, deep: bool) -> Survey:
    """Look at everything; changes nothing."""
    return _Surveyor(store, names, executor, HeadFinder(store, names)).run(deep=deep)


@dataclass
class _Surveyor:
    """One look at one namespace."""

    store: Store
    names: Namespace
    executor: Executor
    heads: HeadFinder

    def run(self, *, deep: bool) -> Survey:
        chain = read_chain(self.store, self.names, self.heads, self._now_ms())
        refuse_dropped(self.names, chain.head)
        log = survey_log(self.executor, self.store, self.names, chain)
        segments = {entry.id: entry for entry in log.ingested}
        segments |= {i: named.entry for i, named in chain.named.items()}
        ordered = [segments[i] for i in sorted(segments)]
        found = Survey(chain, log, segments)
        wrong = check_segments(self.executor, self.store, self.names, ordered, deep=deep)
        found.problems = [*chain.problems, *log.problems, *wrong]
        if any(problem.is_missing for problem in found.problems):
            found.problems = self._confirmed(found)
        found.problems += self._lost_heads(found)
        found.problems += self._leases(found)
        found.notes += self._notes(found)
        return found

    def _now_ms(self) -> int:
        return int((now_to_look(self.store) - self._margin_s()) * 1000)

    def _margin_s(self) -> float:
        return CLOCK_MARGIN_S + self.store.capabilities.clock_resolution_s

    # --- what seems to be missing -------------------------------------------------
    def _confirmed(self, found: Survey) -> list[Problem]:
        """Drop what was swept, or has come, since the survey began."""
        self.heads.forget()
        head = self.heads.find(fallback=True).manifest
        roots = Roots.of(head, self._now_ms())
        floor = min(
            [head.wal_floor] + [f for g, f in found.chain.floors.items() if roots.keep_log(g)]
        )
        confirmed = []
        for problem in found.problems:
            swept = problem.is_missing and not self._needed(problem, found, roots, floor)
            if not swept and not (problem.is_missing and self._is_there(problem.object)):
                confirmed.append(problem)
        dropped = {p.generation for p in found.problems if p not in confirmed}
        for generation in dropped - {None}:
            found.chain.lost.pop(generation or 0, None)
        found.log.problems = [p for p in found.log.problems if p in confirmed]
        return confirmed

    def _needed(self, problem: Problem, found: Survey, roots: Roots, floor: int) -> bool:
        if problem.lsn is not None:
            return problem.lsn >= floor
        if problem.generation is not None:
            return roots.keep_log(problem.generation)
        named = found.chain.named.get(problem.segment or "")
        if named is not None:
            return named.needed_by(roots)
        ingested = [e for e in found.log.ingested if e.id == problem.segment]
        return any(entry.visible_lsn >= floor for entry in ingested)

    def _is_there(self, key: str) -> bool:
        try:
            self.store.head(key)
        except NotFoundError:
            return False
        return True

    def _lost_heads(self, found: Survey) -> list[Problem]:
        """Tell of manifests that are gone from the end: the log knows an epoch that none has.

        Every epoch was published before its first fence was put, in a generation of its own.
        """
        epoch = max((h.epoch for h in found.log.headers()), default=0)
        if found.chain.head_is_damaged or epoch <= found.head.writer_epoch:
            return []
        self.heads.forget()
        if self.heads.find(fallback=True).manifest.writer_epoch >= epoch:
            return []  # it was published since
        found.chain.newest += epoch - found.head.writer_epoch
        key = self.names.manifest(found.chain.newest)
        message = (
            f"there is no object {key}, though the log has a writer of epoch {epoch}: "
            f"generation {found.head.generation} knows none above {found.head.writer_epoch}"
        )
        lost = Problem(ProblemKind.MANIFEST_MISSING, key, message, generation=found.chain.newest)
        return [lost]

    # --- leases -------------------------------------------------------------------
    def _leases(self, found: Survey) -> Iterator[Problem]:
        """A lease that cannot be read holds everything for a day; a lapsed one holds nothing."""
        now_s = now_to_look(self.store)
        for lease in find_leases(self.store, self.names, now_s, self._margin_s()):
            wrong = self._wrong_with(lease.key)
            if wrong:
                message = f"object {lease.key}: {wrong}"
                yield Problem(ProblemKind.LEASE_DAMAGED, lease.key, message, Severity.WARNING, 0)
            elif lease.lapsed:
                found.notes.append(
                    Problem(
                        ProblemKind.LEASE_LAPSED,
                        lease.key,
                        f"lease of {lease.owner or 'nobody'} on generation {lease.generation} "
                        f"has lapsed",
                        Severity.INFO,
                        generation=lease.generation,
                    )
                )

    def _wrong_with(self, key: str) -> str | None:
        try:
            record = msgspec.json.decode(self.store.get(key), type=LeaseRecord)
        except NotFoundError:
            return None
        except UNDECODABLE as error:
            return f"not a lease: {error}"
        if self.names.lease(record.id) != key:
            return f"says that it is lease {record.id}"
        return None

    # --- for those who look around ------------------------------------------------
    def _notes(self, found: Survey) -> Iterator[Problem]:
        head = found.head
        condemned = {f"{self.names.root}/{c.key}" for c in head.condemned}
        for key in sorted(condemned):
            yield Problem(ProblemKind.CONDEMNED, key, "waits to be deleted", Severity.INFO)
        for lsn in head.skipped_lsns:
            key, said = self.names.wal_object(lsn), f"LSN {lsn} was given up by a repair"
            yield Problem(ProblemKind.SKIPPED, key, said, Severity.INFO, lsn=lsn)
        for generation in head.skipped_generations:
            key = self.names.manifest(generation)
            said = f"generation {generation} was given up by a repair"
            yield Problem(ProblemKind.SKIPPED, key, said, Severity.INFO, generation=generation)
        jobs = {job.id for job in found.log.open_jobs} | found.log.waiting_jobs
        for info in self.store.list(self.names.segments):
            segment_id = info.key.removeprefix(self.names.segments).removesuffix(".seg")
            if info.key in condemned or segment_id in found.segments:
                continue
            if job_of(segment_id) not in jobs:
                message = f"{info.size} bytes that nobody names"
                yield Problem(
                    ProblemKind.ORPHAN, info.key, message, Severity.INFO, segment=segment_id
                )
