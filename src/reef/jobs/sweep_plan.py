"""What a sweep would condemn, as of one head. Reads only.

The order of reading matters. Segments are listed before the log is read: a segment that is
listed was staged after its job's begin, so that begin is in the log by then. The store's time
is asked between the two, and so before anything is condemned by it: by then all that was listed
is at least as old as it seems.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from reef.config import SweepSettings
from reef.engine.history.moments import with_skipped
from reef.engine.log_rules import LogReader, Verdict, contiguous
from reef.engine.wal_headers import Missing, Peeked
from reef.errors import CorruptionError, NotFoundError
from reef.formats.manifest import Manifest, OpenJob
from reef.formats.wal_object import WalHeader, WalKind
from reef.jobs.executor import Executor
from reef.jobs.wal_headers import peek_headers
from reef.manifest.dropping import clear_dropped, is_due
from reef.manifest.edits import Condemnation
from reef.manifest.head import HeadFinder
from reef.manifest.roots import (
    STAGED,
    Needs,
    effective_grace_ms,
    expired_snapshots,
    job_of,
    log_generations,
    oldest_to_retain,
    pinned_generations,
)
from reef.paths import Namespace, number_of
from reef.stores import ObjectInfo, Store
from reef.stores.dates import now_to_look

__all__ = ["Doomed", "HeadMoved", "SweepPlan", "SweepPlanner", "clock_margin_s"]

LOADS_AT_ONCE = 16
PEEKS_AT_ONCE = 1024
CLOCK_MARGIN_S = 1.0
"""A bucket is many machines, whose clocks agree to within this."""


class HeadMoved(Exception):
    """Something that was read is gone: another sweep works on a newer head. Plan again."""


@dataclass(frozen=True, slots=True)
class Doomed:
    """An object that nobody needs."""

    key: str
    """Relative to the namespace."""
    bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """What to condemn, and what is kept for which reason."""

    head: Manifest
    oldest_retained: int
    now_s: float
    doomed: tuple[Doomed, ...]
    kept: Counter[str]
    segment_bytes: int
    """All segments that are not condemned yet, needed or not."""
    expired: frozenset[str] = frozenset()
    """Snapshots that hold nothing any more."""
    open_jobs: tuple[OpenJob, ...] = ()
    """Those that hold segments, and those that the head carries along; alive or not."""
    wal_floor: int = 0
    """From where on some root needs the log."""
    clears: bool = False
    """Whether a dropped namespace's time is over: `head` is what will be published then."""

    @property
    def share(self) -> float:
        """How much of the segments' bytes would go."""
        return self.going_bytes / self.segment_bytes if self.segment_bytes else 0.0

    @property
    def going_bytes(self) -> int:
        return sum(d.bytes for d in self.doomed if d.key.startswith("segments/"))

    def is_collected(self, key: str) -> bool:
        """Whether a key is of a slot or a generation below all that any root needs (H24)."""
        number = number_of(key)
        if number is None:
            return False
        return number < (self.wal_floor - 1 if key.endswith(".wal") else self.oldest_retained)

    def condemnation(self) -> Condemnation:
        return Condemnation(
            self.head.generation - self.clears,
            self.oldest_retained,
            tuple(doomed.key for doomed in self.doomed),
            int(self.now_s * 1000),
            self.expired,
            self.clears,
        )


def clock_margin_s(store: Store) -> float:
    """Return by how much an age may seem larger than it is: dates are cut to whole units."""
    return CLOCK_MARGIN_S + store.capabilities.clock_resolution_s


def _as_cleared(head: Manifest) -> Manifest:
    """Return the generation in which a dropped namespace will be cleared.

    Nobody opens an older one any more, so none but those that are pinned is retained.
    """
    generation = head.generation + 1
    return msgspec.structs.replace(
        clear_dropped(head), generation=generation, oldest_retained=generation
    )


@dataclass
class SweepPlanner:
    """Plans one sweep of one namespace."""

    store: Store
    names: Namespace
    heads: HeadFinder
    executor: Executor
    settings: SweepSettings
    is_dry: bool = False
    """Whether nothing will be deleted by this plan: then read-only credentials are enough."""
    kept: Counter[str] = field(default_factory=Counter)
    _open_jobs: tuple[OpenJob, ...] = ()

    def now_s(self) -> float:
        """Return the store's time."""
        return now_to_look(self.store) if self.is_dry else self.store.now()

    def plan(self) -> SweepPlan:
        """Read what is there and what is needed; HeadMoved if it changed underneath."""
        self.kept.clear()
        self._open_jobs = ()
        self.heads.forget()
        head = self.heads.find(dropped=True).manifest
        condemned = {c.key for c in head.condemned}
        manifests = self._listed(self.names.manifests, condemned)
        segments = self._listed(self.names.segments, condemned)
        now_s = self.now_s()
        clears = is_due(head, now_s - self.settings.dropped_s - clock_margin_s(self.store))
        if clears:
            head = _as_cleared(head)
        oldest = self._oldest(head, manifests, now_s)
        latest_ms = int((now_s - clock_margin_s(self.store)) * 1000)
        pinned = pinned_generations(head, latest_ms)
        needs = self._needs(head, oldest, pinned, segments)
        doomed = [
            *self._doomed_segments(head, needs, segments, now_s),
            *self._doomed_manifests(manifests, oldest, pinned | log_generations(head)),
        ]
        room = max(0, self.settings.condemned_max - len(condemned))
        doomed += self._doomed_slots(head, needs, condemned, room - len(doomed))
        total = sum(info.size for info in segments)
        expired = expired_snapshots(head, latest_ms)
        return SweepPlan(
            head,
            oldest,
            now_s,
            tuple(doomed[:room]),
            self.kept,
            total,
            expired,
            self._open_jobs,
            needs.wal_floor,
            clears,
        )

    # --- roots --------------------------------------------------------------------
    def _oldest(self, head: Manifest, manifests: Sequence[ObjectInfo], now_s: float) -> int:
        dates_s = {number_of(info.key) or 0: info.last_modified_s for info in manifests}
        before_s = now_s - self.settings.retain_generations_s - clock_margin_s(self.store)
        return oldest_to_retain(head, dates_s, before_s, self.settings.retain_generations_max)

    def _needs(
        self,
        head: Manifest,
        oldest: int,
        pinned: frozenset[int],
        segments: Sequence[ObjectInfo],
    ) -> Needs:
        """Take all roots together; leases come later, after the CAS."""
        needs = Needs.of_head(head)
        skipped = set(head.skipped_generations)
        first = self._load(head, min(set(range(oldest, head.generation + 1)) - skipped))
        roots = [first, *(self._load(head, g) for g in sorted(pinned - skipped))]
        for root in roots:
            needs.add_root(root)
        logs = [self._load(head, g) for g in sorted(log_generations(head))]
        for log in logs:
            needs.add_log(log)
        if all(self._segment_id(info) in needs.named for info in segments):
            # Floors are all that is left to ask, and the oldest have the lowest; and whether the
            # jobs that the head carries along are open still, though they have staged nothing.
            if head.open_jobs:
                self._add_open_jobs(needs, head)
            return needs
        between = set(range(first.generation + 1, head.generation)) - skipped
        for named in self._load_many(sorted(between)):
            needs.add_root(named)
        self._add_log(needs, head, [*roots, *logs], first.wal_floor)
        return needs

    def _load(self, head: Manifest, generation: int) -> Manifest:
        if generation == head.generation:
            return head
        try:
            return self.heads.load(generation)
        except NotFoundError as error:
            raise HeadMoved(str(error)) from error

    def _load_many(self, generations: Sequence[int]) -> Iterator[Manifest]:
        """A few at a time: there may be hundreds, each with many segments."""
        for at in range(0, len(generations), LOADS_AT_ONCE):
            chunk = generations[at : at + LOADS_AT_ONCE]
            try:
                yield from self.store.runtime.gather(
                    [lambda g=generation: self.heads.load(g) for generation in chunk]  # type: ignore[misc]
                )
            except NotFoundError as error:
                raise HeadMoved(str(error)) from error

    # --- the log ------------------------------------------------------------------
    def _add_log(
        self, needs: Needs, head: Manifest, roots: Sequence[Manifest], folded: int
    ) -> None:
        """Take in the ingests of all logs that are needed, and the open jobs (H54, H28).

        The log between the floors of the oldest retained generation and of the head was
        folded by a generation that is retained, which names it: only the ends are read. A
        release before incarnations kept two lives of a name in one chain: the log of each is
        read from a root of its own (H65).
        """
        bases = sorted({root.wal_base for root in roots})
        for base, following in zip(bases, [*bases[1:], folded], strict=True):
            lowest = min((r for r in roots if r.wal_base == base), key=lambda r: r.wal_floor)
            end = following if base != head.wal_base else folded
            if lowest.wal_floor < end:
                # By what a repair has given up since, as everyone does who reads from there.
                self._judge(needs, with_skipped(lowest, head), end)
        self._add_open_jobs(needs, head)

    def _add_open_jobs(self, needs: Needs, head: Manifest) -> None:
        rules = self._judge(needs, head, None)
        needs.add_jobs(job.id for job in rules.open_jobs)
        self._open_jobs = rules.open_jobs

    def _judge(self, needs: Needs, start: Manifest, end: int | None) -> LogReader:
        """Pass the log from a root's floor through the rules, as everyone does."""
        headers = self._headers(start.wal_floor, end)
        rules = LogReader(start)
        present = contiguous([*headers, *start.skipped_lsns], start.wal_floor)
        for lsn in present:
            header = headers.pop(lsn, None)
            if header is None or lsn in start.skipped_lsns:
                rules.skip()
            elif rules.judge(header).verdict is Verdict.APPLIES:
                needs.add_ingest(header)
        if end is not None and rules.next_lsn < end:
            raise CorruptionError(
                f"generation {start.generation} of {self.names.name} needs the log from LSN "
                f"{start.wal_floor}, and LSN {rules.next_lsn} is missing",
                object=self.names.wal_object(rules.next_lsn),
                offset=0,
            )
        for header in headers.values():  # behind a gap: it may count yet
            needs.add_ingest(header)
            needs.add_jobs([header.job.id] if header.job is not None else [])
        return rules

    def _headers(self, first: int, end: int | None) -> dict[int, WalHeader]:
        slots = [(lsn, info.size) for lsn, info in self._slots(first, end)]
        headers = {}
        for lsn, header in self._peek(slots).items():
            if header is Missing.GONE:
                raise HeadMoved(f"LSN {lsn} was listed and is gone")
            if isinstance(header, WalHeader):
                headers[lsn] = header
        return headers

    def _peek(self, slots: Sequence[tuple[int, int]]) -> dict[int, Peeked]:
        return peek_headers(self.executor, self.store, self.names, slots)

    def _slots(self, first: int, end: int | None) -> Iterator[tuple[int, ObjectInfo]]:
        after = self.names.wal_object(first - 1)
        for info in self.store.list(self.names.wal, after):
            lsn = number_of(info.key)
            if lsn is None:
                continue
            if end is not None and lsn >= end:
                return
            yield lsn, info

    # --- what nobody needs --------------------------------------------------------
    def _doomed_segments(
        self, head: Manifest, needs: Needs, segments: Sequence[ObjectInfo], now_s: float
    ) -> Iterator[Doomed]:
        """Superseded ones and orphans alike: named by no root, and older than the grace."""
        grace_s = effective_grace_ms(head, int(now_s * 1000)) / 1000 + clock_margin_s(self.store)
        for info in segments:
            why = needs.why(self._segment_id(info))
            if why == STAGED and self._is_of_dead_compactor(head, info, now_s):
                why = None
            if why is None and now_s - info.last_modified_s <= grace_s:
                why = "younger than the grace period"
            if why is not None:
                self.kept[f"segments {why}"] += 1
            else:
                yield self._doom(info, "no generation that is kept names it")

    def _is_of_dead_compactor(self, head: Manifest, info: ObjectInfo, now_s: float) -> bool:
        """Whether it was staged so long ago that its compactor must have died. If it has not,
        its publish is refused, since it names a condemned key, and it begins anew.
        """
        age_s = now_s - info.last_modified_s - clock_margin_s(self.store)
        of_compactor = job_of(self._segment_id(info)) == head.compactor_job
        return of_compactor and age_s > self.settings.silent_compactor_s

    def _doomed_manifests(
        self, manifests: Sequence[ObjectInfo], oldest: int, pinned: frozenset[int]
    ) -> Iterator[Doomed]:
        for info in manifests:
            generation = number_of(info.key)
            if generation is None or generation >= oldest:
                self.kept["manifests of retained generations"] += 1
            elif generation in pinned:
                self.kept["manifests of pinned generations"] += 1
            else:
                yield self._doom(info, "older than the oldest generation that is kept")

    def _doomed_slots(
        self, head: Manifest, needs: Needs, condemned: set[str], room: int
    ) -> Iterator[Doomed]:
        """Batches below every floor, less the one just below; every other kind stays (H52)."""
        slots = (
            (lsn, info)
            for lsn, info in self._slots(1, needs.wal_floor - 1)
            if self._relative(info) not in condemned
        )
        while room > 0 and (chunk := dict(islice(slots, min(room, PEEKS_AT_ONCE)))):
            headers = self._peek([(lsn, info.size) for lsn, info in chunk.items()])
            for lsn, header in headers.items():
                if header is Missing.UNREADABLE or lsn in head.skipped_lsns:
                    self.kept["damaged objects in the log"] += 1
                elif isinstance(header, WalHeader) and header.kind is not WalKind.BATCHES:
                    self.kept[f"{header.kind} objects in the log"] += 1
                elif isinstance(header, WalHeader):
                    room -= 1
                    yield self._doom(chunk[lsn], "folded, and below every floor that is needed")

    # --- names --------------------------------------------------------------------
    def _listed(self, prefix: str, condemned: set[str]) -> list[ObjectInfo]:
        return [i for i in self.store.list(prefix) if self._relative(i) not in condemned]

    def _doom(self, info: ObjectInfo, why: str) -> Doomed:
        return Doomed(self._relative(info), info.size, why)

    def _relative(self, info: ObjectInfo) -> str:
        return info.key.removeprefix(self.names.root + "/")

    def _segment_id(self, info: ObjectInfo) -> str:
        return info.key.removeprefix(self.names.segments).removesuffix(".seg")
