"""The evidence for a rebuild: everything that a bucket shows of a namespace without its manifests.

Footers of segments, headers of the log, leases, and objects that a repair has quarantined. Reads
only. Segments are listed before the log: whatever made one of them visible is in the log by then.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec

from reef.engine.context import NamespaceContext
from reef.engine.log.log import listed_slots
from reef.engine.log.tail import Missing, ingested_segments
from reef.errors import (
    UNDECODABLE,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    UnsupportedFormatError,
)
from reef.formats.coding import crc32c_extend
from reef.formats.manifest import Manifest, SegmentEntry, Successor, decode_successor
from reef.formats.segment import Footer, SegmentSummary, check_identity, decode_footer
from reef.formats.wal_object import WalHeader
from reef.jobs.rebuild.inheritance import find_inheritance
from reef.jobs.sweep.plan import peek_headers
from reef.manifest.roots import GenerationLease, job_of
from reef.paths import Namespace, is_segment, number_of
from reef.runtime import Executor
from reef.stores import fetch

MARGIN = 1_000_000
"""More generations and writer openings than can pass without leaving another trace."""
LAST_BYTES = 16 << 10
"""Most footers are shorter; a longer one costs a second request."""
PART_BYTES = 8 << 20
TASK_SEGMENTS = 64
COMPACTOR = "compact-"
"""The prefix of a compactor's job name, before its epoch."""


@dataclass(frozen=True, slots=True)
class FoundSegment:
    """A segment in the bucket, and its footer."""

    id: str
    size: int
    footer: Footer
    entry: SegmentEntry | None = None
    """Of a branch: its entry in the first manifest, if the origin has written it."""

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
    """Slots whose objects landed after the slot was collected, and are left out of `headers`."""
    lost_record: str | None = None
    """The key of that record, if it is lost or unreadable and no manifest has a copy."""
    first: Manifest | None = None
    """Of a branch: its first manifest, which follows from the pin in its origin."""
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
    generations = [announced, *_leased(context), *(s.footer.generation for s in segments)]
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

    One of a newer release is intact: only that release can tell what it states.
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


def _leased(context: NamespaceContext) -> list[int]:
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
