"""Roots, leases among them: the objects that must be kept, and why (protocols §6).

A root is a generation that may still be read: the head, the retained generations, those that
snapshots and branches pin, and those under a lease. A root needs the segments and centroid sets
that its generation names, the log from its floor on, and the segments of counting ingests in that
log. Registered cursors need the manifest of the generation that they resume from, the log from its
floor on, and the ingests in that log, but not its segments, unless a load with `live_wins` is open
there. Open jobs need their staged segments.

Sequence numbers decide before time does: a date only ever makes the sweep wait (H30).

**Leases** pin generations of a namespace while a process uses them. They are read only after the
CAS that condemns. A lease is written wide and then narrowed (H74):

    read w → write a lease on w → read the head again, g ≥ w → use g → narrow the lease to g

- **Wide**, it pins everything that any generation from w on names. The order makes it safe: the
  sweep lists leases only after the CAS that condemns, so that either it sees the lease, or the
  holder sees the condemned keys in the head that it reads again (H22).
- **Narrow**, it pins exactly one generation up to one LSN, as a snapshot would: its manifest, the
  segments that it names, its part of the log, and the segments of ingests in that part. Objects
  that later generations supersede are collected as if the lease were not there.

A reader narrows its lease as soon as it has chosen. Leases of writers and of bulk jobs stay wide:
they also append to the log.

A release that does not know narrow leases takes them for wide ones on g, which pin more.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from platform import node

from reef.formats.manifest import Condemned, CondemnedRange, Manifest
from reef.formats.wal_object import WalHeader, WalKind
from reef.paths import Namespace, number_of
from reef.stores import Store
from reef.stores.leases import UNREADABLE_TTL_MS, FoundLease, Lease, LeaseRecord, find_leases

UNKNOWN_GENERATION = 0
"""In the pin of a branch, if the manifest that it pinned is lost."""
STAGED = "staged by an open job"
"""Why a segment is kept that neither a manifest nor an ingest names."""


def effective_grace_ms(manifest: Manifest, now_ms: int) -> int:
    """Return the grace that is in force: a lowered one is, one old grace later (H62).

    Until then some processes still use the longer one. `now_ms` is by the store's clock.
    """
    if now_ms < manifest.grace_lowered_at_ms + manifest.grace_before_ms:
        return max(manifest.grace_ms, manifest.grace_before_ms)
    return manifest.grace_ms


def oldest_to_retain(
    head: Manifest, dates_s: Mapping[int, float], before_s: float, count_max: int
) -> int:
    """Return the oldest generation that was the head after `before_s`, or is now.

    A generation is the head until the date of the one that follows it. The result never falls,
    and at most `count_max` generations are retained.
    """
    oldest = max(head.oldest_retained, head.generation - count_max + 1)
    for following in sorted(g for g in dates_s if oldest < g <= head.generation):
        if dates_s[following] > before_s:
            break
        oldest = following
    return oldest


def pinned_generations(head: Manifest, now_ms: int) -> frozenset[int]:
    """Return the generations that snapshots pin, however old they are."""
    expired = expired_snapshots(head, now_ms)
    return frozenset(s.generation for s in head.snapshots if s.id not in expired)


def branch_points(head: Manifest) -> frozenset[tuple[int, int]]:
    """Return the generations that branches pin, each with the last LSN that they need of its log.

    No other reader uses them: the log behind that LSN may be collected.
    """
    return frozenset((pin.generation, pin.last_lsn) for pin in head.branches.values())


def expired_snapshots(head: Manifest, now_ms: int) -> frozenset[str]:
    """Return the ids of expired snapshots. `now_ms` is by the store's clock (H30)."""
    return frozenset(
        snapshot.id
        for snapshot in head.snapshots
        if snapshot.expires_at_ms is not None and snapshot.expires_at_ms <= now_ms
    )


def log_generations(head: Manifest) -> frozenset[int]:
    """Return the generations whose manifest and log, but not segments, are pinned by cursors."""
    return frozenset(cursor.generation for cursor in head.cursors.values())


def staged_id(job_id: str, attempt_id: str) -> str:
    """Return the id of a segment that a job stages: it names its job, and so its root (H28)."""
    return f"{job_id}-{attempt_id}"


def job_of(segment_id: str) -> str | None:
    """Return the job that staged a segment; None if its id names none."""
    return segment_id.rpartition("-")[0] or None


@dataclass(slots=True)
class Needs:
    """The objects that any root needs."""

    wal_floor: int
    """The log is needed from here on, and so is the slot just below."""
    named: set[str] = field(default_factory=set)
    """Segments that some root's generation names."""
    ingested: set[str] = field(default_factory=set)
    """Segments of ingests in a log that some root needs (H54)."""
    jobs: set[str] = field(default_factory=set)
    """Open jobs: all of their staged segments stay (H28)."""
    kept_logs: list[tuple[int, int]] = field(default_factory=list)
    """Slots that branches need besides, below the floor too: first and last LSN."""
    is_unknown: bool = False
    """Whether the generation of a branch, or its log, is lost: all segments and slots are kept."""

    @classmethod
    def of_head(cls, head: Manifest) -> "Needs":
        needs = cls(head.wal_floor)
        needs.add_root(head)
        needs.add_jobs([head.compactor_job] if head.compactor_job else [])
        return needs

    def add_root(self, manifest: Manifest) -> None:
        """Add a generation that may be read."""
        self.named.update(manifest.own_objects)
        self.wal_floor = min(self.wal_floor, manifest.wal_floor)

    def add_branch(self, manifest: Manifest, last_lsn: int) -> None:
        """Add a generation that branches were made of, and its log up to an LSN."""
        self.named.update(manifest.own_objects)
        self.kept_logs.append((manifest.wal_floor - 1, last_lsn))

    def keep_everything(self) -> None:
        """Keep every object: a branch exists, and the objects that it needs are unknown."""
        self.is_unknown, self.wal_floor = True, 0

    def add_log(self, manifest: Manifest) -> None:
        """Add a generation whose log is read, but not its segments."""
        self.wal_floor = min(self.wal_floor, manifest.wal_floor)

    def add_ingest(self, header: WalHeader) -> None:
        """Add an ingest that counts, or that may still."""
        if header.kind is WalKind.INGEST and header.job is not None:
            self.ingested.update(segment.id for segment in header.job.segments)

    def add_jobs(self, job_ids: Iterable[str]) -> None:
        """Add jobs that are open at the end of the log."""
        self.jobs.update(job_ids)

    def why(self, segment_id: str) -> str | None:
        """Return why a segment is kept; None if no root needs it."""
        if self.is_unknown:
            return "perhaps needed by a branch whose generation or log is lost"
        if segment_id in self.named:
            return "named by a generation"
        if segment_id in self.ingested:
            return "named by an ingest in the log"
        if job_of(segment_id) in self.jobs:
            return STAGED
        return None


class GenerationLease(LeaseRecord, frozen=True, kw_only=True):
    """The record of a lease on a generation."""

    generation: int
    wal_floor: int
    where: str = ""
    """The machine and process that hold it, for people."""
    last_lsn: int | None = None
    """Last LSN that a narrow lease pins; None in a wide one."""


UNREADABLE = GenerationLease(id="", owner="", ttl_ms=UNREADABLE_TTL_MS, generation=0, wal_floor=0)
"""Substitute for a lease that cannot be decoded: it pins everything, for a day."""


def take_lease(
    store: Store, namespace: Namespace, manifest: Manifest, *, owner: str, ttl_s: float
) -> Lease[GenerationLease]:
    """Write a wide lease on a manifest that was read just before."""
    record = GenerationLease(
        id=store.runtime.ulid(),
        generation=manifest.generation,
        wal_floor=manifest.wal_floor,
        owner=owner,
        ttl_ms=int(ttl_s * 1000),
        where=f"{node()}:{store.runtime.process_id()}",
    )
    return Lease(store, namespace, record, subject=namespace.name)


def narrowed(manifest: Manifest, last_lsn: int) -> dict[str, int]:
    """Return the fields of a lease that pins exactly a generation, up to an LSN (H74)."""
    return {
        "generation": manifest.generation,
        "wal_floor": manifest.wal_floor,
        "last_lsn": last_lsn,
    }


def job_owner(job_id: str) -> str:
    """Return the owner of a bulk job's lease: while the lease lives, the job does."""
    return f"job {job_id}"


def find_generation_leases(
    store: Store, namespace: Namespace, now_s: float, margin_s: float
) -> list[FoundLease[GenerationLease]]:
    """Return all leases of a namespace. `now_s` is the store's time, read before this is called."""
    return find_leases(store, namespace, UNREADABLE, now_s=now_s, margin_s=margin_s)


class LeasedObjects:
    """Decides which condemned keys the live leases of a namespace pin.

    `load` returns the manifest of a generation, and `ingested` the ids of all segments that
    ingests in a range of the log name; both return None if they cannot be read. Both are called
    at most once for each narrow lease, and only for keys that depend on the result.
    """

    def __init__(
        self,
        leases: Sequence[FoundLease[GenerationLease]],
        load: Callable[[int], Manifest | None],
        ingested: Callable[[int, int], frozenset[str] | None],
    ) -> None:
        live = [lease.record for lease in leases if not lease.expired]
        wide = [record.generation for record in live if record.last_lsn is None]
        self._oldest_wide = min(wide, default=None)
        self._narrow = [record for record in live if record.last_lsn is not None]
        self._load, self._ingested = load, ingested
        self._named: dict[int, frozenset[str] | None] = {}
        self._in_log: dict[tuple[int, int], frozenset[str] | None] = {}

    def pin(self, condemned: Condemned) -> bool:
        """Whether some lease pins a condemned key.

        A lease on the generation in which the key was condemned, or a later one, never needs it.
        """
        if self._are_all_held(condemned.generation):
            return True
        return any(
            record.generation < condemned.generation and self._needs(record, condemned.key)
            for record in self._narrow
        )

    def unpinned(self, condemned: CondemnedRange) -> list[CondemnedRange]:
        """Return the parts of a condemned range that no lease pins."""
        if self._are_all_held(condemned.generation):
            return []
        left = [condemned]
        for record in self._narrow:
            if record.generation < condemned.generation:
                pinned = _numbers(record, condemned.folder)
                left = [part for one in left for part in one.without(*pinned)]
        return left

    def _are_all_held(self, generation: int) -> bool:
        """Whether a wide lease holds everything that was condemned as of a generation."""
        return self._oldest_wide is not None and self._oldest_wide < generation

    def _needs(self, record: GenerationLease, key: str) -> bool:
        folder, _, name = key.partition("/")
        number = number_of(key)
        if folder in ("manifest", "wal") and number is not None:
            first, last = _numbers(record, folder)
            return first <= number <= last
        if folder == "segments":
            return self._needs_segment(record, name.removesuffix(".seg"))
        return True

    def _needs_segment(self, record: GenerationLease, segment_id: str) -> bool:
        """Whether the generation names a segment, or an ingest in its part of the log (H54)."""
        named = self._cached_names(record.generation)
        if named is None or segment_id in named:
            return True
        ingested = self._cached_ingests(record.wal_floor, record.last_lsn or 0)
        return ingested is None or segment_id in ingested

    def _cached_names(self, generation: int) -> frozenset[str] | None:
        if generation not in self._named:
            manifest = self._load(generation)
            named = None if manifest is None else frozenset(manifest.own_objects)
            self._named[generation] = named
        return self._named[generation]

    def _cached_ingests(self, first: int, last: int) -> frozenset[str] | None:
        if first > last:
            return frozenset()
        if (first, last) not in self._in_log:
            self._in_log[first, last] = self._ingested(first, last)
        return self._in_log[first, last]


def _numbers(record: GenerationLease, folder: str) -> tuple[int, int]:
    """Return the first and the last generation, or slot, that a narrow lease pins."""
    if folder == "manifest":
        return record.generation, record.generation
    return record.wal_floor - 1, record.last_lsn or 0
