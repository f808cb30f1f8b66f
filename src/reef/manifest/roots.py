"""Roots: what must be kept, and for whom (protocol section 6). Pure functions.

A root is a generation that somebody may still read: the head, the generations that are
retained, those that snapshots and branches pin. A root needs the segments that its generation
names, the log from its floor on, and the segments of counting ingests in that log. Registered
cursors need the log and the manifest of the generation that they go on from, and the ingests
in that log, but not its segments; open jobs need what they have staged. Leases are
roots too, and are not here: they are looked at only after the CAS that condemns.

Sequence numbers decide before time does: a date only ever makes the sweep wait (H30).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from reef.formats.manifest import Manifest
from reef.formats.wal_object import WalHeader, WalKind

__all__ = [
    "STAGED",
    "Needs",
    "effective_grace_ms",
    "expired_snapshots",
    "job_of",
    "log_generations",
    "oldest_to_retain",
    "pinned_generations",
    "staged_id",
]

STAGED = "staged by an open job"
"""Why a segment is kept that no manifest and no ingest names."""


def effective_grace_ms(manifest: Manifest, now_ms: int) -> int:
    """Return the grace that holds now: a lowered one holds only one old grace later (H62).

    Until then there are processes that still go by the longer one. `now_ms` is the store's.
    """
    if now_ms < manifest.grace_lowered_at_ms + manifest.grace_before_ms:
        return max(manifest.grace_ms, manifest.grace_before_ms)
    return manifest.grace_ms


def oldest_to_retain(
    head: Manifest, dates_s: Mapping[int, float], before_s: float, count_max: int
) -> int:
    """Return the first generation to keep: what was the head after `before_s`, or is.

    A generation's time ends with the date of the one that followed it. It never falls, and
    there are never more than `count_max`.
    """
    oldest = max(head.oldest_retained, head.generation - count_max + 1)
    for following in sorted(g for g in dates_s if oldest < g <= head.generation):
        if dates_s[following] > before_s:
            break
        oldest = following
    return oldest


def pinned_generations(head: Manifest, now_ms: int) -> frozenset[int]:
    """Return the generations that snapshots and branches keep, however old they are."""
    expired = expired_snapshots(head, now_ms)
    unexpired = {snapshot.generation for snapshot in head.snapshots if snapshot.id not in expired}
    return frozenset(unexpired | set(head.branch_pins.values()))


def expired_snapshots(head: Manifest, now_ms: int) -> frozenset[str]:
    """Return the ids of the snapshots whose time is over. `now_ms` is the store's (H30)."""
    return frozenset(
        snapshot.id
        for snapshot in head.snapshots
        if snapshot.expires_at_ms is not None and snapshot.expires_at_ms <= now_ms
    )


def log_generations(head: Manifest) -> frozenset[int]:
    """Return the generations whose manifest and log, but not segments, cursors keep."""
    return frozenset(cursor.generation for cursor in head.cursors.values())


def staged_id(job_id: str, attempt_id: str) -> str:
    """Return the id of a segment that a job stages: it names its job, and so its root (H28)."""
    return f"{job_id}-{attempt_id}"


def job_of(segment_id: str) -> str | None:
    """Return the job that staged a segment; None if its id names none."""
    return segment_id.rpartition("-")[0] or None


@dataclass(slots=True)
class Needs:
    """What all roots need, taken together."""

    wal_floor: int
    """The log is needed from here on, and the object just below."""
    named: set[str] = field(default_factory=set)
    """Segments that some root's generation names."""
    ingested: set[str] = field(default_factory=set)
    """Segments of ingests in a log that some root needs (H54)."""
    jobs: set[str] = field(default_factory=set)
    """Open jobs: whatever they have staged stays (H28)."""

    @classmethod
    def of_head(cls, head: Manifest) -> "Needs":
        needs = cls(head.wal_floor)
        needs.add_root(head)
        needs.add_jobs([head.compactor_job] if head.compactor_job else [])
        return needs

    def add_root(self, manifest: Manifest) -> None:
        """Take in a generation that somebody may read."""
        self.named.update(s.id for s in manifest.segments if s.home is None)
        self.wal_floor = min(self.wal_floor, manifest.wal_floor)

    def add_log(self, manifest: Manifest) -> None:
        """Take in a generation from which somebody reads the log, and nothing else."""
        self.wal_floor = min(self.wal_floor, manifest.wal_floor)

    def add_ingest(self, header: WalHeader) -> None:
        """Take in an ingest that counts, or that may yet."""
        if header.kind is WalKind.INGEST and header.job is not None:
            self.ingested.update(segment.id for segment in header.job.segments)

    def add_jobs(self, job_ids: Iterable[str]) -> None:
        """Take in jobs that are open at the end of the log."""
        self.jobs.update(job_ids)

    def why(self, segment_id: str) -> str | None:
        """Return for whom a segment is kept; None if nobody needs it."""
        if segment_id in self.named:
            return "named by a generation"
        if segment_id in self.ingested:
            return "named by an ingest in the log"
        if job_of(segment_id) in self.jobs:
            return STAGED
        return None
