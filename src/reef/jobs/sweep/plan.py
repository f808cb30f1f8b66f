"""The plan of a sweep: which objects no root needs, as of one head. Reads only.

    1  load the head; list manifests and segments
    2  read the store's clock: everything listed is at least as old as it appears
    3  collect the needs of all roots: retained and pinned generations, cursors, the head
    4  replay the headers of the log that roots need: ingests and open jobs name segments
    5  garbage: segments and manifests that no root needs, and batches below every floor

Segments are listed before the log is read: a listed segment was staged after its job's begin, so
that begin is in the log by then.

Most of it is known to a process that sweeps again and again, and to one that folds: `SweepMemory`
keeps which generations name a segment and which slots hold batches, so that neither a manifest
nor a WAL object is read twice.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice

import msgspec

from reef.config import SweepSettings
from reef.engine.context import NamespaceContext
from reef.engine.history.as_of import with_skipped
from reef.engine.log.log import LogRules, Verdict, listed_slots, replay_headers
from reef.engine.log.tail import HeaderTask, Missing, Peeked, run_header_task
from reef.errors import CorruptionError, NotFoundError
from reef.formats.manifest import Manifest, ManifestOutline, OpenJob
from reef.formats.wal_object import WalHeader, WalKind
from reef.jobs.fold.job import FoldedSlots
from reef.manifest.branching import HOMES, holds_origin, inherited_homes, needed_homes
from reef.manifest.edits import NEVER, Condemnation, hold_lsn_of
from reef.manifest.head import HeadFinder
from reef.manifest.lifecycle import clear_dropped, is_due
from reef.manifest.roots import (
    STAGED,
    UNKNOWN_GENERATION,
    Needs,
    branch_points,
    effective_grace_ms,
    expired_snapshots,
    job_of,
    log_generations,
    oldest_to_retain,
    pinned_generations,
)
from reef.paths import Namespace, number_of, numbered_key
from reef.runtime import Executor
from reef.stores import ObjectInfo, Store
from reef.stores.base import current_time_s

TASK_SLOTS = 256


def peek_headers(
    executor: Executor, store: Store, namespace: Namespace, slots: Sequence[tuple[int, int]]
) -> dict[int, Peeked]:
    """Return the headers of slots (LSN, size), fetched in parallel by tasks of an executor."""
    chunks = [tuple(slots[at : at + TASK_SLOTS]) for at in range(0, len(slots), TASK_SLOTS)]
    tasks = [HeaderTask(store, namespace, chunk) for chunk in chunks]
    peeked = [header for part in executor.map(run_header_task, tasks) for header in part]
    return {lsn: header for (lsn, _), header in zip(slots, peeked, strict=True)}


LOADS_AT_ONCE = 16
PEEKS_AT_ONCE = 1024
CLOCK_MARGIN_S = 1.0
"""The machines of a bucket have clocks that agree to within this."""


class HeadMoved(Exception):
    """A listed object is gone: another sweep works on a newer head. Plan again."""


@dataclass(frozen=True, slots=True)
class GarbageObject:
    """An object that no root needs, or several with consecutive numbers."""

    key: str
    """Relative to the namespace; of several, the first."""
    bytes: int
    why: str
    objects: int = 1

    @property
    def numbers(self) -> tuple[str, int, int] | None:
        """The folder, first and last number of slots or manifests; None for a segment."""
        folder, number = self.key.partition("/")[0], number_of(self.key)
        if folder == "segments" or number is None or numbered_key(folder, number) != self.key:
            return None
        return folder, number, number + self.objects - 1


def join_numbered(garbage: Iterable[GarbageObject]) -> Iterator[GarbageObject]:
    """Join objects of one folder whose numbers are consecutive."""
    last: GarbageObject | None = None
    for one in garbage:
        if last is not None and _follows(one, last):
            last = replace(last, bytes=last.bytes + one.bytes, objects=last.objects + one.objects)
            continue
        if last is not None:
            yield last
        last = one
    if last is not None:
        yield last


def _follows(one: GarbageObject, last: GarbageObject) -> bool:
    numbers, before = one.numbers, last.numbers
    return numbers is not None and before is not None and numbers[1] == before[2] + 1


@dataclass(slots=True)
class SlotScan:
    """The slots that the plans of one sweep have examined so far.

    A plan that folds have overtaken is not repeated: the next one lists from where it ended. One
    that a branch has overtaken is: the branch may need slots that were garbage before (H42).
    """

    next_lsn: int = 1
    kept_logs: tuple[tuple[int, int], ...] = ()
    """The slots that branches needed then."""
    ranges: list[GarbageObject] = field(default_factory=list)
    """Objects to condemn, with ascending numbers."""
    kept: Counter[str] = field(default_factory=Counter)

    def add(self, garbage: Iterable[GarbageObject]) -> None:
        """Add slots behind those that are here."""
        self.ranges[-1:] = join_numbered([*self.ranges[-1:], *garbage])


class SweepMemory:
    """The facts that one sweep leaves for the next in the same process, and folds for sweeps."""

    def __init__(
        self, folds_wait: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self.folds_wait = folds_wait
        """Entered by a sweep that was overtaken: no fold of this process publishes inside, or at a
        high rate of commits every plan would be (H75)."""
        self.folded = FoldedSlots()
        self.scan = SlotScan()
        self._root = ""
        self._loaded = range(0)
        self._last_named: dict[str, int] = {}

    def start(self, root: str, first: int) -> None:
        """Prepare for a sweep that retains generations from `first` on; others are forgotten."""
        if root != self._root or first not in range(self._loaded.start, self._loaded.stop + 1):
            self._root, self._loaded, self._last_named = root, range(first, first), {}
            return
        self._loaded = range(first, self._loaded.stop)
        self._last_named = {i: g for i, g in self._last_named.items() if g >= first}

    def to_load(self, generations: Iterable[int]) -> list[int]:
        """Return the generations whose segments are not known yet, in ascending order."""
        return sorted(g for g in generations if g not in self._loaded)

    def add(self, outline: ManifestOutline) -> None:
        """Remember the segments of a generation."""
        self._last_named.update(dict.fromkeys(outline.segment_ids, outline.generation))
        self._loaded = range(self._loaded.start, max(self._loaded.stop, outline.generation + 1))

    def named(self) -> Iterable[str]:
        """Return the segments that a retained generation names."""
        return self._last_named.keys()


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """The objects to condemn, and how many are kept for which reason."""

    head: Manifest
    oldest_retained: int
    now_s: float
    garbage: tuple[GarbageObject, ...]
    kept: Counter[str]
    segment_bytes: int
    """Bytes of all segments that are not condemned yet, needed or not."""
    expired: frozenset[str] = frozenset()
    """Snapshots that have expired."""
    open_jobs: tuple[OpenJob, ...] = ()
    """Jobs that hold segments, and those that the head lists; running or not."""
    wal_floor: int = 0
    """The first LSN that some root needs."""
    clears: bool = False
    """Whether a dropped namespace is due to be cleared; `head` is then the cleared manifest."""
    kept_logs: tuple[tuple[int, int], ...] = ()
    """The slots below `wal_floor` that branches need: first and last LSN."""

    @property
    def share(self) -> float:
        """The share of the segments' bytes that would be deleted."""
        return self.garbage_bytes / self.segment_bytes if self.segment_bytes else 0.0

    @property
    def garbage_bytes(self) -> int:
        return sum(one.bytes for one in self.garbage if one.key.startswith("segments/"))

    def is_collected(self, key: str) -> bool:
        """Whether a key is that of a slot or generation below all that roots need (H24)."""
        number = number_of(key)
        if number is None:
            return False
        if not key.endswith(".wal"):
            return number < self.oldest_retained
        kept = any(first <= number <= last for first, last in self.kept_logs)
        return number < self.wal_floor - 1 and not kept

    def condemnation(self) -> Condemnation:
        numbered = [one.numbers for one in self.garbage]
        return Condemnation(
            self.head.generation - self.clears,
            self.oldest_retained,
            tuple(one.key for one in self.garbage if one.numbers is None),
            int(self.now_s * 1000),
            self.expired,
            self.clears,
            tuple(numbers for numbers in numbered if numbers is not None),
        )


def _condemned_keys(head: Manifest) -> set[str]:
    """Return the condemned keys of segments and manifests."""
    ranges = [one for one in head.condemned_ranges if one.folder == "manifest"]
    return {c.key for c in head.condemned}.union(*(one.all_keys() for one in ranges))


def clock_margin_s(store: Store) -> float:
    """Return by how much an object may be younger than it appears: dates are rounded down."""
    return CLOCK_MARGIN_S + store.capabilities.clock_resolution_s


def _as_cleared(head: Manifest) -> Manifest:
    """Return the generation in which a dropped namespace will be cleared.

    No process opens an older one, so only pinned ones are retained.
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
    """Whether the plan is only reported: read-only credentials are enough."""
    memory: SweepMemory = field(default_factory=SweepMemory)
    kept: Counter[str] = field(default_factory=Counter)
    _open_jobs: tuple[OpenJob, ...] = ()

    def now_s(self) -> float:
        """Store clock; a dry run falls back to the local clock with read-only credentials."""
        return current_time_s(self.store) if self.is_dry else self.store.now()

    def plan(self) -> SweepPlan:
        """Return the plan; HeadMoved if another sweep deleted a listed object meanwhile."""
        self.kept.clear()
        self._open_jobs = ()
        self.heads.forget()
        head = self.heads.find(dropped=True).manifest
        self.names = self.heads.names
        condemned = _condemned_keys(head)
        manifests = self._list_uncondemned(self.names.manifests, condemned)
        segments = self._list_uncondemned(self.names.segments, condemned)
        now_s = self.now_s()
        clears = is_due(head, now_s - self.settings.dropped_s - clock_margin_s(self.store))
        if clears:
            head = _as_cleared(head)
        oldest = self._oldest(head, manifests, now_s)
        latest_ms = int((now_s - clock_margin_s(self.store)) * 1000)
        pinned = pinned_generations(head, latest_ms)
        branched = frozenset(generation for generation, _ in branch_points(head))
        try:
            needs = self._needs(head, oldest, pinned, segments)
        except CorruptionError as error:
            if self._is_newest(head):
                raise
            # After a stall a slot may have been collected, and filled again (H67).
            raise HeadMoved(str(error)) from error
        garbage = [
            *self._garbage_segments(head, needs, segments, now_s),
            *join_numbered(
                self._garbage_manifests(
                    manifests, oldest, pinned | branched | log_generations(head)
                )
            ),
            *self._released_homes(head, oldest, pinned, needs.wal_floor),
        ]
        listed = len(head.condemned) + len(head.condemned_ranges)
        room = max(0, self.settings.condemned_max - listed)
        garbage += self._garbage_slots(head, needs, room - len(garbage))
        total = sum(info.size for info in segments)
        expired = expired_snapshots(head, latest_ms)
        return SweepPlan(
            head,
            oldest,
            now_s,
            tuple(garbage[:room]),
            self.kept,
            total,
            expired,
            self._open_jobs,
            needs.wal_floor,
            clears,
            tuple(needs.kept_logs),
        )

    # --- roots --------------------------------------------------------------------
    def _is_newest(self, head: Manifest) -> bool:
        heads = NamespaceContext(self.store, self.names).heads
        return heads.find(dropped=True).manifest.generation == head.generation

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
        """Collect the needs of all roots but the leases, which are listed after the CAS."""
        needs = Needs.of_head(head)
        skipped = set(head.skipped_generations)
        first = self._load(head, min(set(range(oldest, head.generation + 1)) - skipped))
        roots = [first, *(self._load(head, g) for g in sorted(pinned - skipped))]
        for root in roots:
            needs.add_root(root)
        logs = [self._load(head, g) for g in sorted(log_generations(head))]
        for log in logs:
            needs.add_log(log)
            if hold_lsn_of(log.open_jobs) < NEVER:  # its rows may win over those of the load
                needs.add_root(log)
        self._add_branches(needs, head)
        if all(self._segment_id(info) in needs.named for info in segments):
            # Only floors are left, and the oldest generations have the lowest; and whether the
            # jobs that the head lists are still open, though they have staged nothing.
            if head.open_jobs:
                self._add_open_jobs(needs, head)
            return needs
        self._add_between(needs, first.generation, head.generation, skipped)
        self._add_log(needs, head, [*roots, *logs], first.wal_floor)
        return needs

    def _add_branches(self, needs: Needs, head: Manifest) -> None:
        """Add the objects that branches pin: a generation, and its log up to an LSN.

        Either may be damaged, or unknown after a rebuild. This namespace does not depend on it, and
        a repair of the branch decides: until then everything is kept.
        """
        for generation, last_lsn in sorted(branch_points(head)):
            pinned = head if generation == head.generation else self.load_if_readable(generation)
            if pinned is None:
                needs.keep_everything()
                continue
            manifest = with_skipped(pinned, head)
            needs.add_branch(manifest, last_lsn)
            if manifest.wal_floor <= last_lsn:
                try:
                    self._replay(needs, manifest, last_lsn + 1)
                except CorruptionError:
                    needs.keep_everything()

    def _released_homes(
        self, head: Manifest, oldest: int, pinned: frozenset[int], floor: int
    ) -> Iterator[GarbageObject]:
        """Yield the homes of a branch in which no root needs an object any more (H42)."""
        condemned = {c.key for c in head.condemned}
        homes = {home for home in head.pinned_homes if HOMES + home not in condemned}
        homes -= needed_homes(head) | inherited_homes(head, floor)
        if head.origin is not None and holds_origin(head):
            homes.discard(head.origin.root)
        if not homes:
            return
        points = {generation for generation, _ in branch_points(head)}
        if UNKNOWN_GENERATION in points:
            return  # a branch of this one may need any of them
        roots = {*range(oldest, head.generation), *pinned, *points} - {*head.skipped_generations}
        for generation in sorted(roots):
            homes -= self._outline(generation).homes
        for home in sorted(homes):
            yield GarbageObject(HOMES + home, 0, "no retained generation names its objects")

    def _outline(self, generation: int) -> ManifestOutline:
        try:
            return self.heads.load_outline(generation)
        except NotFoundError as error:
            raise HeadMoved(str(error)) from error

    def _add_between(self, needs: Needs, first: int, head: int, skipped: set[int]) -> None:
        """Add the segments of all generations between two; their floors are not below the first."""
        self.memory.start(self.names.root, first)
        generations = self.memory.to_load(set(range(first + 1, head)) - skipped)
        for at in range(0, len(generations), LOADS_AT_ONCE):
            chunk = generations[at : at + LOADS_AT_ONCE]
            try:
                outlines = self.store.runtime.map(self.heads.load_outline, chunk)
            except NotFoundError as error:
                raise HeadMoved(str(error)) from error
            for outline in outlines:
                self.memory.add(outline)
        needs.named.update(self.memory.named())

    def _load(self, head: Manifest, generation: int) -> Manifest:
        if generation == head.generation:
            return head
        try:
            return self.heads.load(generation)
        except NotFoundError as error:
            raise HeadMoved(str(error)) from error

    # --- narrow leases ------------------------------------------------------------
    def load_if_readable(self, generation: int) -> Manifest | None:
        """Return a manifest; None if it is damaged or missing."""
        try:
            return self.heads.load(generation)
        except (NotFoundError, CorruptionError):
            return None

    def ingested(self, first: int, last: int) -> frozenset[str] | None:
        """Return the ids of all segments of ingests in a range of the log, whether they count or
        not; None if a header cannot be read.
        """
        slots = [(lsn, info.size) for lsn, info in self._slots(first, last + 1)]
        needs = Needs(first)
        for header in self._peek(slots).values():
            if not isinstance(header, WalHeader):
                return None
            needs.add_ingest(header)
        return frozenset(needs.ingested)

    # --- the log ------------------------------------------------------------------
    def _add_log(
        self, needs: Needs, head: Manifest, roots: Sequence[Manifest], folded: int
    ) -> None:
        """Add the ingests of every log that roots need, and the open jobs (H54, H28).

        The log between the floors of the oldest retained generation and of the head was folded
        by a retained generation, which names its segments: only the ends are read. Releases
        before incarnations kept a dropped and a re-created namespace in one chain: the log of
        each is read from a root of its own (H65).
        """
        bases = sorted({root.wal_base for root in roots})
        for base, following in zip(bases, [*bases[1:], folded], strict=True):
            lowest = min((r for r in roots if r.wal_base == base), key=lambda r: r.wal_floor)
            end = following if base != head.wal_base else folded
            if lowest.wal_floor < end:
                # Without the slots that a repair has skipped since, as for every reader.
                self._replay(needs, with_skipped(lowest, head), end)
        self._add_open_jobs(needs, head)

    def _add_open_jobs(self, needs: Needs, head: Manifest) -> None:
        rules = self._replay(needs, head, None)
        needs.add_jobs(job.id for job in rules.open_jobs)
        self._open_jobs = rules.open_jobs

    def _replay(self, needs: Needs, start: Manifest, end: int | None) -> LogRules:
        """Replay the log from a root's floor, and add the segments of its ingests."""
        headers = self._headers(start.wal_floor, end)
        rules = LogRules(start)
        for header, verdict in replay_headers(rules, headers):
            if verdict is Verdict.APPLIES:
                needs.add_ingest(header)
        if end is not None and rules.next_lsn < end:
            raise CorruptionError(
                f"generation {start.generation} of {self.names.name} needs the log from LSN "
                f"{start.wal_floor}, and LSN {rules.next_lsn} is missing",
                object=self.names.wal_object(rules.next_lsn),
                offset=0,
            )
        for header in headers.values():
            if header.lsn < rules.next_lsn:
                continue
            needs.add_ingest(header)  # behind a gap: it may still count
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
        return listed_slots(self.store, self.names, first, end)

    # --- garbage ------------------------------------------------------------------
    def _garbage_segments(
        self, head: Manifest, needs: Needs, segments: Sequence[ObjectInfo], now_s: float
    ) -> Iterator[GarbageObject]:
        """Superseded segments and orphans alike: no root names them, and the grace has passed."""
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
                yield self._garbage(info, "no retained generation names it")

    def _is_of_dead_compactor(self, head: Manifest, info: ObjectInfo, now_s: float) -> bool:
        """Whether a segment was staged so long ago that its compactor must have died. If it lives,
        its publish is refused, since it names a condemned key, and it starts over.
        """
        age_s = now_s - info.last_modified_s - clock_margin_s(self.store)
        of_compactor = job_of(self._segment_id(info)) == head.compactor_job
        return of_compactor and age_s > self.settings.silent_compactor_s

    def _garbage_manifests(
        self, manifests: Sequence[ObjectInfo], oldest: int, pinned: frozenset[int]
    ) -> Iterator[GarbageObject]:
        for info in manifests:
            generation = number_of(info.key)
            if generation is None or generation >= oldest:
                self.kept["manifests of retained generations"] += 1
            elif generation in pinned:
                self.kept["manifests of pinned generations"] += 1
            else:
                yield self._garbage(info, "older than the oldest retained generation")

    def _garbage_slots(self, head: Manifest, needs: Needs, room: int) -> list[GarbageObject]:
        """Objects with rows below every floor but the slot just below; other kinds are kept (H52).

        Slots that a branch needs, and those that a branch has inherited, are kept. Of the appends
        of a stream, the one at its mark is kept: a rebuild without manifests then knows how far
        the stream was committed (H40).
        """
        end, kept_logs = needs.wal_floor - 1, tuple(sorted(needs.kept_logs))
        scan = self.memory.scan
        if scan.next_lsn > end or scan.kept_logs != kept_logs:  # other roots than before
            scan = self.memory.scan = SlotScan(kept_logs=kept_logs)
        first = max(scan.next_lsn, self.names.first_own_lsn)
        slots = self._uncondemned_slots(head, first, end, needs.kept_logs)
        while len(scan.ranges) < room and (chunk := dict(islice(slots, PEEKS_AT_ONCE))):
            scan.add(self._garbage_in(chunk, head, scan.kept))
            scan.next_lsn = max(chunk) + 1
        self.kept.update(scan.kept)
        return scan.ranges[: max(0, room)]

    def _garbage_in(
        self, chunk: dict[int, ObjectInfo], head: Manifest, kept: Counter[str]
    ) -> Iterator[GarbageObject]:
        kinds: dict[int, WalKind | Missing | None] = {
            lsn: self.memory.folded.kind(lsn) for lsn in chunk
        }
        unread = (None, WalKind.APPEND)
        unknown = [(lsn, info.size) for lsn, info in chunk.items() if kinds[lsn] in unread]
        for lsn, header in self._peek(unknown).items():
            kinds[lsn] = _kind(header, head) if isinstance(header, WalHeader) else header
        for lsn, kind in kinds.items():
            if kind is Missing.UNREADABLE or lsn in head.skipped_lsns:
                kept["damaged objects in the log"] += 1
            elif kind is WalKind.BATCHES:
                yield self._garbage(chunk[lsn], "folded, and below the floor of every root")
            elif kind is not Missing.GONE:
                kept[f"{kind} objects in the log"] += 1

    def _uncondemned_slots(
        self, head: Manifest, first: int, end: int, kept: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[int, ObjectInfo]]:
        """List the log below `end` without condemned and kept slots: a range costs no page."""
        single = {c.key for c in head.condemned}
        condemned = [(r.first, r.last) for r in head.condemned_ranges if r.folder == "wal"]
        taken = sorted([*condemned, *kept])
        for condemned_first, condemned_last in (*taken, (end, end)):
            if first < min(condemned_first, end):
                for lsn, info in self._slots(first, min(condemned_first, end)):
                    if self._relative(info) not in single:
                        yield lsn, info
            first = max(first, condemned_last + 1)

    # --- names --------------------------------------------------------------------
    def _list_uncondemned(self, prefix: str, condemned: set[str]) -> list[ObjectInfo]:
        return [i for i in self.store.list(prefix) if self._relative(i) not in condemned]

    def _garbage(self, info: ObjectInfo, why: str) -> GarbageObject:
        return GarbageObject(self._relative(info), info.size, why)

    def _relative(self, info: ObjectInfo) -> str:
        return info.key.removeprefix(self.names.root + "/")

    def _segment_id(self, info: ObjectInfo) -> str:
        return info.key.removeprefix(self.names.segments).removesuffix(".seg")


def _kind(header: WalHeader, head: Manifest) -> WalKind:
    """Return the kind of an object; appends below the marks of their streams are as batches."""
    if header.kind is not WalKind.APPEND:
        return header.kind
    at_mark = any(place >= head.stream_marks.get(s, 0) for s, place in header.marks.items())
    return WalKind.APPEND if at_mark else WalKind.BATCHES
