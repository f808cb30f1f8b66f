"""Verify: is everything there that somebody needs, and is it what it should be?

Opens read-only, prints every problem, changes nothing. Safe beside writers, jobs and sweeps. It
reads every manifest that is kept and the log from the lowest floor that is needed, and of each
segment the tail; `deep` reads every block of every segment too. Requests: one per manifest, per
object of the log, two per segment, and deep one more per four megabytes.
"""

from dataclasses import dataclass
from typing import Any

from reef.engine.database import Database
from reef.engine.log_rules import Verdict
from reef.jobs.executor import Executor, LocalExecutor
from reef.jobs.verify_problems import Problem, ProblemKind, Severity
from reef.jobs.verify_survey import Survey, survey
from reef.manifest.head import newest_incarnation
from reef.telemetry import operation

__all__ = ["Problem", "ProblemKind", "Severity", "VerifyReport", "verify"]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was looked at, and what is wrong with it."""

    namespace: str
    deep: bool
    generation: int
    """Of the newest sound manifest."""
    generations: int
    objects: int
    """Of the log, from the lowest floor that is needed."""
    voided: int
    segments: int
    rows: int
    problems: list[Problem]
    """Errors and warnings: something is damaged or missing."""
    notes: list[Problem]
    """Info: orphans, condemned keys, lapsed leases, what a repair gave up."""

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        facts = {name: getattr(self, name) for name in self.__slots__}
        facts["problems"] = [problem.to_dict() for problem in self.problems]
        facts["notes"] = [note.to_dict() for note in self.notes]
        return {**facts, "ok": self.ok}


def verify(
    db: Database, namespace: str, *, deep: bool = False, executor: Executor | None = None
) -> VerifyReport:
    """Look at everything that is needed; return every problem. Changes nothing."""
    names = newest_incarnation(db.store, namespace)
    with operation(db.metrics, "verify"):
        found = survey(db.store, names, executor or LocalExecutor(db.store.runtime), deep=deep)
    report = _report(namespace, found, deep=deep)
    db.events.emit("verified", namespace=namespace, deep=deep, problems=len(report.problems))
    return report


def _report(namespace: str, found: Survey, *, deep: bool) -> VerifyReport:
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
