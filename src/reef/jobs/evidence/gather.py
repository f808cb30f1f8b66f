"""The evidence for a rebuild: everything that a bucket shows of a namespace without its manifests.

Footers of segments, headers of the log, leases, and objects that a repair has quarantined. Reads
only. Segments are listed before the log: whatever made one of them visible is in the log by then.

**Branches.** The first manifest of a branch follows from one generation of its origin and one LSN
(protocols §8). The origin pins both under the folder of the branch for as long as the branch needs
them. So a branch whose manifests are lost is found by that pin, and begins where its first manifest
did: with the segments of the pinned generation, and the origin's log from its floor up to that LSN.
Its own segments and its own log continue from there.

If some manifest of the branch can be read, that names the origin. A pin that a rebuild or a repair
of the origin has renewed does not name a generation any more: then only the folder of the branch is
left, and the inherited LSNs are reported as lost.

**Live segments** are chosen by their covers, a pure function. Every segment covers rectangles of
LSNs and keys (`reef.formats.covers`). The segments of a manifest never overlap, and cover
everything that any segment in the bucket covers, but for the part that is still in the log. So a
choice is right if

    no two chosen segments overlap, and
    whatever any segment covers is covered by the chosen ones or is in the log behind them.

    1  sort candidates by the generation on which their job was planned, newest first
    2  choose each that overlaps no chosen one
    3  if that leaves a hole, refuse one job whose outputs are near it, and start again; continue
       from the attempt with the fewest holes

The bucket may hold superseded segments that a pin retains, outputs of jobs that died before their
publish, all of them or some, and outputs of rivals. Whether a job was published is not always
known, and need not be: its outputs have the rows of its inputs, so a choice of all outputs and one
of all inputs show the same rows. A mixture would be wrong: a merge drops a tombstone together with
the rows below it, and an input that is left would bring them back (H34, H49). Of two jobs with the
same covers the one planned on the later manifest is chosen: the other was not published by then,
and the compactor's epoch keeps it from being published later. A hole remains if the later job died
half-way or was overtaken and its rival's inputs were swept; then it is refused.

A part of a merge without rows has no segment. Missing siblings show that: if no choice is without
holes, the covers of such a merge are accepted.

A segment without covers (of an older writer) is chosen by its ancestors alone.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

import msgspec
import numpy as np

from reef.engine.context import NamespaceContext
from reef.engine.log.log import listed_slots
from reef.engine.log.tail import Missing, ingested_segments
from reef.engine.stats import pins_of_branch
from reef.errors import (
    UNDECODABLE,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    UnsupportedFormatError,
)
from reef.formats.coding import crc32c_extend
from reef.formats.covers import Cover, without
from reef.formats.manifest import Manifest, Origin, SegmentEntry, Successor, decode_successor
from reef.formats.segment import Footer, SegmentSummary, check_identity, decode_footer
from reef.formats.wal_object import WalHeader
from reef.jobs.sweep.plan import peek_headers
from reef.manifest.branching import first_manifest
from reef.manifest.roots import UNKNOWN_GENERATION, GenerationLease, job_of
from reef.paths import Namespace, is_segment, number_of
from reef.runtime import Executor
from reef.stores import Store, fetch

MARGIN = 1_000_000
"""More generations and writer openings than can pass without leaving another trace."""
LAST_BYTES = 16 << 10
"""Most footers are shorter; a longer one costs a second request."""
PART_BYTES = 8 << 20
TASK_SEGMENTS = 64
COMPACTOR = "compact-"
"""The prefix of a compactor's job name, before its epoch."""
TRIES_MAX, TRIES_MIN = 1000, 64
"""How many choices are tried before holes are reported."""
ROUNDS_MAX = 300_000
"""Segments checked in all tries together, so that the search takes seconds."""
EVERYWHERE = (b"", None)


@dataclass(frozen=True, slots=True)
class Inheritance:
    """The beginning of a branch."""

    names: Namespace
    """Names of the branch, with the folders of its inherited log."""
    first: Manifest
    """Its first manifest, derived once more."""


def find_inheritance(context: NamespaceContext) -> Inheritance | None:
    """Return the beginning of a branch; None of another namespace, or if the origin has lost it."""
    for origin in _origins(context):
        first = _first_manifest(context.store, origin)
        if first is not None:
            inherited = tuple((part.last_lsn, part.root) for part in first.inherited)
            return Inheritance(replace(context.names, inherited=inherited), first)
    return None


def _origins(context: NamespaceContext) -> Iterator[Origin]:
    """Yield the origin as manifests of the branch state it, or else as pins of others do."""
    listed = [number_of(info.key) for info in context.store.list(context.names.manifests)]
    heads = context.fresh().heads
    for generation in sorted((number for number in listed if number), reverse=True):
        with suppress(CorruptionError, NotFoundError, UnsupportedFormatError):
            origin = heads.load(generation).origin
            if origin is not None:
                yield origin
            return
    yield from pins_of_branch(context.store, context.names.root)


def _first_manifest(store: Store, origin: Origin) -> Manifest | None:
    """Return the first manifest of a branch; None if the pinned generation cannot be read."""
    if origin.generation == UNKNOWN_GENERATION:
        return None
    heads = NamespaceContext(store, Namespace.of_root(origin.root)).heads
    try:
        head = heads.find(fallback=True, dropped=True).manifest
        source = heads.load(origin.generation)
        first = first_manifest(source, head, origin)
        # A slot that a repair of the origin has skipped since counts in the branch.
        return msgspec.structs.replace(first, skipped_lsns=source.skipped_lsns)
    except (CorruptionError, NotFoundError, UnsupportedFormatError):
        return None


@dataclass(frozen=True, slots=True)
class FoundSegment:
    """A segment in the bucket, and its footer."""

    id: str
    size: int
    footer: Footer
    entry: SegmentEntry | None = None
    """Entry in a branch's first manifest, if the origin has written the segment."""

    @property
    def is_staged(self) -> bool:
        """Whether a bulk job wrote it: its rows have no LSN before their ingest counts."""
        return self.footer.lsn_max == 0 and not self.footer.covers and self.entry is None

    @property
    def tail_bytes(self) -> int:
        first = self.footer.range_tombstones or self.footer.filter
        return self.size - first.offset

    def summary(self, checksum: int) -> SegmentSummary:
        """Return the summary that its writer had, with a newly computed checksum."""
        return SegmentSummary(self.footer, self.size, checksum, self.tail_bytes)


@dataclass(frozen=True, slots=True)
class Evidence:
    """The facts about a namespace, without its manifests."""

    names: Namespace
    segments: tuple[FoundSegment, ...]
    unreadable: tuple[str, ...]
    """Segments whose footers cannot be read."""
    replaced: frozenset[str]
    """Those that a repair has quarantined, and so replaced."""
    headers: dict[int, WalHeader]
    damaged: frozenset[int]
    """Slots with unreadable objects."""
    skipped: frozenset[int]
    """Those that a repair has quarantined, and so skipped."""
    generation: int
    """The highest that any object names."""
    compactor_epoch: int
    successor: Successor | None = None
    """The record of this incarnation, if the name was dropped and created again."""
    late: frozenset[int] = frozenset()
    """Slots filled again after they were collected; not in `headers`."""
    lost_record: str | None = None
    """The key of that record, if it is lost or unreadable and no manifest has a copy."""
    first: Manifest | None = None
    """First manifest of a branch, which follows from the pin in its origin."""
    lost_inherited: tuple[SegmentEntry, ...] = ()
    """Segments of that manifest whose footers cannot be read."""

    def without(self, late: Iterable[int]) -> "Evidence":
        """Return the evidence without the objects of some slots."""
        gone = frozenset(late)
        headers = {lsn: header for lsn, header in self.headers.items() if lsn not in gone}
        return replace(self, headers=headers, late=self.late | gone)

    @property
    def wal_base(self) -> int:
        """The first LSN of this incarnation; if unknown, the first of any object."""
        if self.first is not None:
            return self.first.wal_base
        if self.lost_record is None:
            return 1 if self.successor is None else self.successor.wal_base
        covered = [cover.first for segment in self.segments for cover in segment.footer.covers]
        return min([*self.headers, *self.damaged, *covered], default=1)


def gather_evidence(context: NamespaceContext, executor: Executor) -> Evidence:
    """Read footers and headers, in parallel; of a branch also those that it has inherited."""
    inherited = find_inheritance(context)
    first = None if inherited is None else inherited.first
    store, names = context.store, context.names if inherited is None else inherited.names
    listed = [
        (_id_of(names, info.key), info.size)
        for info in store.list(names.segments)
        if is_segment(info.key)
    ]
    segments, unreadable = _read_footers(context, executor, listed)
    start = 1 if first is None else first.wal_floor
    slots = [(lsn, info.size) for lsn, info in listed_slots(store, names, start)]
    peeked = peek_headers(executor, store, names, slots)
    damaged = {lsn for lsn, header in peeked.items() if header is Missing.UNREADABLE}
    aside = {info.key for info in store.list(f"{names.root}/quarantine/")}
    successor, lost_record = None, None
    try:
        successor = read_successor(context)
    except (CorruptionError, NotFoundError):
        lost_record = names.successor(names.incarnation)
    announced = 0 if successor is None else successor.generation
    first_epoch = 0 if successor is None else successor.compactor_epoch
    generations = [
        announced,
        *_leased_generations(context),
        *(s.footer.generation for s in segments),
    ]
    headers = {lsn: h for lsn, h in peeked.items() if isinstance(h, WalHeader)}
    shared, lost = _inherited_segments(context, executor, names, first, headers)
    return Evidence(
        names=names,
        segments=(*segments, *shared),
        first=first,
        lost_inherited=lost,
        unreadable=unreadable,
        replaced=frozenset(i for i in unreadable if names.quarantined(names.segment(i)) in aside),
        headers=headers,
        damaged=frozenset(damaged),
        skipped=frozenset(n for n in damaged if names.quarantined(names.wal_object(n)) in aside),
        generation=max(generations),
        compactor_epoch=max([first_epoch, *(compactor_epoch_of(s.id) for s in segments)]),
        successor=successor,
        lost_record=lost_record,
    )


def _id_of(names: Namespace, key: str) -> str:
    return key.removeprefix(names.segments).removesuffix(".seg")


def _inherited_segments(
    context: NamespaceContext,
    executor: Executor,
    names: Namespace,
    first: Manifest | None,
    headers: Mapping[int, WalHeader],
) -> tuple[list[FoundSegment], tuple[SegmentEntry, ...]]:
    """Return the segments that a branch shares with others: of its first manifest, and of loads in
    its inherited log. The entries of unreadable ones come second.
    """
    if first is None:
        return [], ()
    loads = [h for lsn, h in headers.items() if names.home_of_slot(lsn) is not None]
    loaded = [e for h in loads for e in ingested_segments(h, first.schema, names)]
    entries = (*first.segments, *loaded)
    tasks = [SegmentsTask(context, ((entry.id, entry.size),), entry.home) for entry in entries]
    read = [found for part in executor.map(run_footer_task, tasks) for found in part]
    known = {entry.id: entry for entry in first.segments}
    shared = [replace(found, entry=known.get(found.id)) for found in read if found is not None]
    lost = [e for e, found in zip(entries, read, strict=True) if found is None and e.id in known]
    return shared, tuple(lost)


def read_successor(context: NamespaceContext) -> Successor | None:
    """Return the record of an incarnation; the first one has none.

    If it is lost, the last manifest of the incarnation before has a copy.
    """
    if context.names.incarnation == 1:
        return None
    key = context.names.successor(context.names.incarnation)
    try:
        return fetch(context.store, key, lambda body: decode_successor(body, key))
    except (CorruptionError, NotFoundError):
        for manifest in reversed(readable_manifests(context.at(context.names.incarnation - 1))):
            if manifest.successor is not None:
                return manifest.successor
        raise


def readable_manifests(context: NamespaceContext) -> list[Manifest]:
    """Return all readable manifests in order, needed or not."""
    heads, found = context.fresh().heads, []
    listed = [number_of(info.key) for info in context.store.list(context.names.manifests)]
    for generation in sorted(number for number in listed if number):
        with suppress(CorruptionError, NotFoundError, UnsupportedFormatError):
            found.append(heads.load(generation))
    return found


def damaged_generations(context: NamespaceContext) -> list[int]:
    """Return the generations of all manifests, if every one of them is damaged; else none.

    One of a newer release is intact: only that release can read its content.
    """
    heads = context.fresh().heads
    listed = [number_of(info.key) for info in context.store.list(context.names.manifests)]
    generations = sorted(number for number in listed if number)
    for generation in reversed(generations):
        try:
            heads.load(generation)
        except CorruptionError:
            continue
        except (NotFoundError, UnsupportedFormatError):
            pass
        return []
    return generations


def _leased_generations(context: NamespaceContext) -> list[int]:
    """Return the generations that readable leases name."""
    found = [0]
    for info in context.store.list(context.names.leases):
        try:
            found.append(
                msgspec.json.decode(context.store.get(info.key), type=GenerationLease).generation
            )
        except (NotFoundError, *UNDECODABLE):
            continue
    return found


def compactor_epoch_of(segment_id: str) -> int:
    """Return the epoch of the compactor that staged a segment; 0 if none did."""
    epoch = (job_of(segment_id) or "").removeprefix(COMPACTOR)
    return int(epoch) if epoch.isdecimal() else 0


# --- tasks ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SegmentsTask:
    """Some segments, and how large they are."""

    context: NamespaceContext
    segments: tuple[tuple[str, int], ...]
    home: str | None = None
    """The folder of another namespace that has them."""


def read_checksums(
    context: NamespaceContext, executor: Executor, segments: Sequence[FoundSegment]
) -> dict[str, int]:
    """Return the checksums of whole objects, which footers cannot contain."""
    tasks = _tasks(context, [(segment.id, segment.size) for segment in segments])
    return {i: crc for part in executor.map(run_checksum_task, tasks) for i, crc in part.items()}


def run_checksum_task(task: SegmentsTask) -> dict[str, int]:
    """Read objects from end to end, in pieces."""
    found = {}
    for segment_id, size in task.segments:
        checksum, key = 0, task.context.names.segment(segment_id)
        for start in range(0, size, PART_BYTES):
            part = task.context.store.get_range(key, start, min(start + PART_BYTES, size))
            checksum = crc32c_extend(checksum, part)
        found[segment_id] = checksum
    return found


def run_footer_task(task: SegmentsTask) -> list[FoundSegment | None]:
    """Read the footers of some segments; None for a damaged or missing one."""
    return task.context.runtime.map(lambda segment: _read_footer(task, *segment), task.segments)


def _read_footer(task: SegmentsTask, segment_id: str, size: int) -> FoundSegment | None:
    key = task.context.names.segment(segment_id, task.home)
    length = LAST_BYTES
    try:
        while True:
            tail = task.context.store.get_range(key, max(0, size - length), size)
            footer = decode_footer(tail, size, key)
            if isinstance(footer, Footer):
                check_identity(footer, segment_id, key)
                return FoundSegment(segment_id, size, footer)
            length = footer
    except (CorruptionError, InvalidInputError, NotFoundError):
        return None


def _read_footers(
    context: NamespaceContext, executor: Executor, listed: Sequence[tuple[str, int]]
) -> tuple[tuple[FoundSegment, ...], tuple[str, ...]]:
    read = [f for part in executor.map(run_footer_task, _tasks(context, listed)) for f in part]
    intact = tuple(found for found in read if found is not None)
    return intact, tuple(i for (i, _), found in zip(listed, read, strict=True) if found is None)


def _tasks(context: NamespaceContext, segments: Sequence[tuple[str, int]]) -> list[SegmentsTask]:
    chunks = range(0, len(segments), TASK_SEGMENTS)
    return [SegmentsTask(context, tuple(segments[n : n + TASK_SEGMENTS])) for n in chunks]


@dataclass(frozen=True, slots=True)
class SegmentCandidate:
    """A segment that may be live."""

    id: str
    generation: int
    """Manifest on which its job was planned; 0 for a bulk job."""
    covers: tuple[Cover, ...]
    ancestors: frozenset[str] = frozenset()
    unit: str = ""
    """Common to segments that were written together."""
    whole_keys: bool = False
    """Whether it is of a fold, whose pieces cover all keys together."""
    lacks_siblings: bool = False
    """Whether it is of a merge with outputs that are gone or were never written."""

    def claims(self) -> tuple[Cover, ...]:
        """Return the covers that must be somewhere, given that this segment exists."""
        if not self.whole_keys:
            return self.covers
        return tuple(Cover(c.first, c.end, *EVERYWHERE) for c in self.covers)


@dataclass(frozen=True, slots=True)
class Choice:
    """The live segments, and the holes between them."""

    chosen: tuple[SegmentCandidate, ...]
    holes: tuple[Cover, ...] = ()
    """Covers of segments that no chosen one has: their rows are lost."""
    uncovered: tuple[Cover, ...] = ()
    """The holes, and those where a merge lacks outputs, which may have had no rows: older releases
    wrote no empty segments. They overlap."""

    @property
    def end(self) -> int:
        """The first LSN above the covers of folds and merges."""
        return _end(self.chosen)

    @property
    def merged(self) -> list[Cover]:
        """The LSN ranges of merges; some of their keys may have no rows left."""
        merges = [c.covers for c in self.chosen if c.ancestors and c.covers]
        return [Cover(min(c.first for c in m), max(c.end for c in m)) for m in merges]


def choose(candidates: Iterable[SegmentCandidate], log: Cover) -> Choice:
    """Return a choice without holes, or the one with the fewest.

    If the first attempt has holes, jobs near them are refused one by one, continuing from the
    attempt with the fewest holes.
    """
    ordered = sorted(candidates, key=lambda c: (-c.generation, c.id))
    tries_max = min(TRIES_MAX, max(TRIES_MIN, ROUNDS_MAX // max(1, len(ordered))))
    tried: set[frozenset[str]] = set()
    waiting: list[tuple[int, int, frozenset[str], list[str]]] = [(0, 0, frozenset(), [""])]
    best = Choice(())
    least: tuple[int, int] | None = None  # holes, and how many jobs were refused
    while waiting:
        before, order, refused, culprits = heappop(waiting)
        for place, unit in enumerate(culprits):
            now = refused | {unit} if unit else refused
            if now in tried or len(tried) >= tries_max:
                continue
            tried.add(now)
            attempt = _Attempt(ordered, now, log)
            holes = attempt.holes()
            if not holes:
                return Choice(tuple(attempt.chosen))
            left = attempt.not_emptied(holes)
            if least is None or (len(left), len(now)) < least:
                best, least = Choice(tuple(attempt.chosen), left, holes), (len(left), len(now))
            heappush(waiting, (len(holes), len(tried), now, attempt.culprits))
            if len(holes) < before:  # continue from here; the others may wait
                heappush(waiting, (before, order, refused, culprits[place + 1 :]))
                break
    return best


@dataclass
class _Attempt:
    """One choice: newest first, each candidate that overlaps no chosen one."""

    ordered: Sequence[SegmentCandidate]
    refused: frozenset[str]
    log: Cover
    chosen: list[SegmentCandidate] = field(default_factory=list)
    culprits: list[str] = field(default_factory=list)
    """Jobs whose refusal may close a hole."""

    def __post_init__(self) -> None:
        self._taken = _Index(sum(len(c.covers) for c in self.ordered))
        superseded: set[str] = set()
        for candidate in self.ordered:
            if candidate.unit in self.refused or candidate.id in superseded:
                continue
            if not self._taken.overlapping(candidate.covers):
                self._taken.add(candidate)
                self.chosen.append(candidate)
                superseded |= candidate.ancestors if not candidate.covers else set()
        self._by_ancestors = superseded

    def holes(self) -> tuple[Cover, ...]:
        """Return the covers that are missing; the log has those behind the last chosen one."""
        end = max(_end(self.chosen), self.log.first)
        log = [Cover(end, self.log.end)] if end < self.log.end else []
        found: list[Cover] = []
        for candidate in self.ordered:
            if candidate.id in self._by_ancestors:
                continue
            claims = candidate.claims()
            near = self._taken.overlapping(claims)
            left = without(claims, [cover for other in near for cover in other.covers] + log)
            if left:
                found += left
                self._suspect(near)
        return tuple(found)

    def not_emptied(self, holes: Iterable[Cover]) -> tuple[Cover, ...]:
        """Return the holes outside of merges that may have had outputs without rows."""
        return tuple(without(holes, _emptied_covers(self.chosen)))

    def _suspect(self, near: Iterable[SegmentCandidate]) -> None:
        known = set(self.culprits)
        for other in near:
            if other.generation and other.unit not in known:  # an ingest always counts
                self.culprits.append(other.unit)
                known.add(other.unit)


class _Index:
    """Covers of chosen segments, indexed by LSN."""

    def __init__(self, room: int) -> None:
        self._first = np.zeros(room, np.int64)
        self._end = np.zeros(room, np.int64)
        self._covers: list[tuple[Cover, SegmentCandidate]] = []

    def add(self, candidate: SegmentCandidate) -> None:
        for cover in candidate.covers:
            at = len(self._covers)
            self._first[at], self._end[at] = cover.first, cover.end
            self._covers.append((cover, candidate))

    def overlapping(self, covers: Iterable[Cover]) -> list[SegmentCandidate]:
        """Return the candidates that overlap any of these covers."""
        found: dict[str, SegmentCandidate] = {}
        count = len(self._covers)
        for one in covers:
            shares = (self._first[:count] < one.end) & (self._end[:count] > one.first)
            for at in np.flatnonzero(shares).tolist():
                cover, candidate = self._covers[at]
                if cover.both(one) is not None:
                    found[candidate.id] = candidate
        return list(found.values())


def _emptied_covers(chosen: Iterable[SegmentCandidate]) -> list[Cover]:
    merges = [candidate for candidate in chosen if candidate.lacks_siblings]
    return [Cover(cover.first, cover.end) for merge in merges for cover in merge.covers]


def _end(chosen: Iterable[SegmentCandidate]) -> int:
    """Return the end of the covers, without ingests, which do not show how far a fold came."""
    return max((cover.end for c in chosen if c.generation for cover in c.covers), default=1)
