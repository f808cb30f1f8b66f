"""What a bucket tells of a namespace without any manifest. Reads only.

Footers of segments, headers of the log, leases and what a repair has put aside. Segments are
listed before the log is: whatever made one of them visible is in the log by then.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from reef.engine.wal_headers import Missing
from reef.errors import (
    UNDECODABLE,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    UnsupportedFormatError,
)
from reef.formats.coding import crc32c_extend
from reef.formats.manifest import Manifest, Successor, decode_successor
from reef.formats.segment import Footer, SegmentSummary
from reef.formats.segment_tail import decode_footer
from reef.formats.wal_object import WalHeader
from reef.jobs.executor import Executor
from reef.jobs.wal_headers import peek_headers
from reef.manifest.head import HeadFinder
from reef.manifest.leases import LeaseRecord
from reef.manifest.roots import job_of
from reef.paths import Namespace, number_of
from reef.stores import ObjectInfo, Store, fetch

__all__ = [
    "Evidence",
    "FoundSegment",
    "compactor_epoch_of",
    "gather_evidence",
    "read_checksums",
    "read_successor",
    "readable_manifests",
]

LAST_BYTES = 16 << 10
"""Most footers are shorter; a longer one costs a second request."""
PART_BYTES = 8 << 20
TASK_SEGMENTS = 64
COMPACTOR = "compact-"
"""How the jobs of a compactor are named, with its epoch behind."""


@dataclass(frozen=True, slots=True)
class FoundSegment:
    """A segment that is in the bucket, and what it says of itself."""

    id: str
    size: int
    footer: Footer

    @property
    def is_staged(self) -> bool:
        """Whether a bulk job wrote it: such rows have no LSN before their ingest counts."""
        return self.footer.lsn_max == 0 and not self.footer.covers

    @property
    def tail_bytes(self) -> int:
        first = self.footer.range_tombstones or self.footer.filter
        return self.size - first.offset

    def summary(self, checksum: int) -> SegmentSummary:
        """Return what its writer knew of it, with a checksum that was read anew."""
        return SegmentSummary(self.footer, self.size, checksum, self.tail_bytes)


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is known."""

    segments: tuple[FoundSegment, ...]
    unreadable: tuple[str, ...]
    """Segments whose footers cannot be read."""
    replaced: frozenset[str]
    """Those of them that a repair has put aside, and so replaced."""
    headers: dict[int, WalHeader]
    damaged: frozenset[int]
    """Slots whose objects cannot be read."""
    given_up: frozenset[int]
    """Those of them that a repair has put aside, and so skipped."""
    generation: int
    """The highest that anything names."""
    compactor_epoch: int
    successor: Successor | None = None
    """How this incarnation began, if the name was dropped and created again."""

    @property
    def wal_base(self) -> int:
        """The first LSN of this incarnation."""
        return 1 if self.successor is None else self.successor.wal_base


def gather_evidence(store: Store, names: Namespace, executor: Executor) -> Evidence:
    """Read footers and headers, side by side."""
    listed = list(store.list(names.segments))
    segments, unreadable = _read_footers(store, names, executor, listed)
    slots = [
        (lsn, info.size)
        for info in store.list(names.wal)
        if (lsn := number_of(info.key)) is not None
    ]
    peeked = peek_headers(executor, store, names, slots)
    damaged = {lsn for lsn, header in peeked.items() if header is Missing.UNREADABLE}
    aside = {info.key for info in store.list(f"{names.root}/quarantine/")}
    successor = read_successor(store, names)
    announced = 0 if successor is None else successor.generation
    first_epoch = 0 if successor is None else successor.compactor_epoch
    generations = [announced, *_leased(store, names), *(s.footer.generation for s in segments)]
    return Evidence(
        segments=segments,
        unreadable=unreadable,
        replaced=frozenset(i for i in unreadable if names.quarantined(names.segment(i)) in aside),
        headers={lsn: h for lsn, h in peeked.items() if isinstance(h, WalHeader)},
        damaged=frozenset(damaged),
        given_up=frozenset(n for n in damaged if names.quarantined(names.wal_object(n)) in aside),
        generation=max(generations),
        compactor_epoch=max([first_epoch, *(compactor_epoch_of(s.id) for s in segments)]),
        successor=successor,
    )


def read_successor(store: Store, names: Namespace) -> Successor | None:
    """Return the record with which an incarnation began; the first one has none."""
    if names.incarnation == 1:
        return None
    key = names.successor(names.incarnation)
    return fetch(store, key, lambda body: decode_successor(body, key))


def readable_manifests(store: Store, names: Namespace) -> list[Manifest]:
    """Return every generation that can be read, whether anything needs it or not, in order."""
    heads, found = HeadFinder(store, names), []
    listed = [number_of(info.key) for info in store.list(names.manifests)]
    for generation in sorted(number for number in listed if number):
        with suppress(CorruptionError, NotFoundError, UnsupportedFormatError):
            found.append(heads.load(generation))
    return found


def _leased(store: Store, names: Namespace) -> list[int]:
    """Return the generations that leases name; one that cannot be read names none."""
    found = [0]
    for info in store.list(names.leases):
        try:
            found.append(msgspec.json.decode(store.get(info.key), type=LeaseRecord).generation)
        except (NotFoundError, *UNDECODABLE):
            continue
    return found


def compactor_epoch_of(segment_id: str) -> int:
    """Return the epoch in whose name a compactor staged a segment; 0 if none did."""
    epoch = (job_of(segment_id) or "").removeprefix(COMPACTOR)
    return int(epoch) if epoch.isdecimal() else 0


# --- tasks ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SegmentTask:
    """Some segments, and how large they are."""

    store: Store
    namespace: Namespace
    segments: tuple[tuple[str, int], ...]


def read_checksums(
    store: Store, names: Namespace, executor: Executor, segments: Sequence[FoundSegment]
) -> dict[str, int]:
    """Return the checksums of whole objects: no footer can hold its own."""
    tasks = _tasks(store, names, [(segment.id, segment.size) for segment in segments])
    return {i: crc for part in executor.map(run_checksum_task, tasks) for i, crc in part.items()}


def run_checksum_task(task: SegmentTask) -> dict[str, int]:
    """Read objects from end to end, in pieces."""
    found = {}
    for segment_id, size in task.segments:
        checksum, key = 0, task.namespace.segment(segment_id)
        for start in range(0, size, PART_BYTES):
            part = task.store.get_range(key, start, min(start + PART_BYTES, size))
            checksum = crc32c_extend(checksum, part)
        found[segment_id] = checksum
    return found


def run_footer_task(task: SegmentTask) -> list[FoundSegment | None]:
    """Read the footers of some segments; None for one that is damaged or gone."""
    return task.store.runtime.gather(
        [lambda s=segment: _read_footer(task, *s) for segment in task.segments]  # type: ignore[misc]
    )


def _read_footer(task: SegmentTask, segment_id: str, size: int) -> FoundSegment | None:
    key = task.namespace.segment(segment_id)
    wanted = LAST_BYTES
    try:
        while True:
            tail = task.store.get_range(key, max(0, size - wanted), size)
            footer = decode_footer(tail, size, key)
            if isinstance(footer, Footer):
                return FoundSegment(segment_id, size, footer)
            wanted = footer
    except (CorruptionError, InvalidInputError, NotFoundError):
        return None


def _read_footers(
    store: Store, names: Namespace, executor: Executor, listed: Sequence[ObjectInfo]
) -> tuple[tuple[FoundSegment, ...], tuple[str, ...]]:
    ids = [i.key.removeprefix(names.segments).removesuffix(".seg") for i in listed]
    tasks = _tasks(store, names, [(i, info.size) for i, info in zip(ids, listed, strict=True)])
    read = [found for part in executor.map(run_footer_task, tasks) for found in part]
    sound = tuple(found for found in read if found is not None)
    return sound, tuple(i for i, found in zip(ids, read, strict=True) if found is None)


def _tasks(store: Store, names: Namespace, segments: list[tuple[str, int]]) -> list[SegmentTask]:
    chunks = range(0, len(segments), TASK_SEGMENTS)
    return [SegmentTask(store, names, tuple(segments[n : n + TASK_SEGMENTS])) for n in chunks]
