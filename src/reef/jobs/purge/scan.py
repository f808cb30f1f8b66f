"""The proof of an erasure: read every object of a namespace for rows of some keys.

    log          every record is decoded: its keys, the ends of range deletes, and the keys that
                 conditions of a batch name
    segments     of every generation, staged or orphaned: block index, and the key blocks of all
                 groups whose range holds a key. Filters are not asked
    manifests    the key bounds of segments
    quarantine   as the object was before it was copied there
    others       leases and records of the namespace have no rows; they are counted

A key that is only named as the *bound* of a range (of a loaded segment, of a range delete, of a
segment's lineage) is counted apart: no row of it is there. A range that includes its last key ends
at that key with a zero byte behind it. An object that cannot be decoded is reported as such, and
nothing is proved of it.

Why an object that holds erased rows is still there, and until when:

head         the newest generation needs it: it was written after the purge, or just now
generation   a retained generation needs it
snapshot, branch, cursor, lease, job
             named: the operator decides when it ends
stream       the append at the mark of a stream: kept until the stream commits its next batch
grace        condemned, or too young to be condemned, until a time
sweep        no root needs it: the next run of a purge or sweep condemns or deletes it
quarantine   a copy that a repair made; only an operator deletes it
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from reef.engine.log.log import listed_slots
from reef.errors import CorruptionError, NotFoundError, UnsupportedFormatError
from reef.formats.columns import decode_columns
from reef.formats.manifest import Condemned, Manifest, ManifestDecoder
from reef.formats.segment import Footer, SegmentTail, decode_footer, decode_tail
from reef.formats.wal_object import END_KEY, KEY, KIND, OpKind, WalHeader, WalKind, WalObject
from reef.jobs.compact.merge import read_range
from reef.jobs.evidence.gather import LAST_BYTES, FoundSegment
from reef.jobs.ingest.append import Appender
from reef.jobs.purge.rewrite import matching_rows
from reef.jobs.sweep.plan import clock_margin_s, peek_headers
from reef.manifest.branching import HOMES
from reef.manifest.head import HeadFinder
from reef.manifest.roots import (
    GenerationLease,
    LeasedObjects,
    effective_grace_ms,
    expired_snapshots,
    find_generation_leases,
    job_of,
)
from reef.paths import Namespace, number_of
from reef.runtime import Executor
from reef.stores import ObjectInfo, Store, fetch
from reef.stores.base import current_time_s, reread_if_damaged
from reef.stores.leases import FoundLease

TASK_OBJECTS = 256
TASK_BYTES = 64 << 20
"""Objects that one task reads: at most so many, and about so many bytes."""
ENDLESS = 1 << 62
GENERATIONS_MAX = 64
"""Retained generations that are examined one by one; of more, the oldest ones."""


@dataclass(slots=True)
class ScannedObject:
    """The traces of some keys in one object."""

    key: str
    size: int
    modified_s: float
    rows: int = 0
    """Versions of the keys, tombstones too, and conditions that name one."""
    bounds: int = 0
    """Bounds of ranges that are one of the keys."""
    problem: str = ""
    """Why it cannot be decoded."""
    ingested: tuple[str, ...] = ()
    """Segments that an ingest in the log names."""
    marks: dict[str, int] = field(default_factory=dict)
    """Batches of streams that an append commits."""
    is_gone: bool = False
    """Whether a sweep deleted it after it was listed."""

    @property
    def is_of_interest(self) -> bool:
        return bool(self.rows or self.bounds or self.problem or self.ingested)


@dataclass(frozen=True, slots=True)
class ScanTask:
    """Objects to be searched for sorted keys."""

    store: Store
    objects: tuple[ObjectInfo, ...]
    keys: pa.Array


@dataclass(slots=True)
class ScanResult:
    """The objects in which something was found, and how many were read."""

    found: list[ScannedObject] = field(default_factory=list)
    objects: int = 0
    bytes: int = 0
    gone: list[str] = field(default_factory=list)
    """Objects that were deleted after they were listed."""

    def add(self, other: "ScanResult") -> None:
        self.found += other.found
        self.gone += other.gone
        self.objects += other.objects
        self.bytes += other.bytes


def scan_objects(
    executor: Executor, store: Store, objects: Iterable[ObjectInfo], keys: pa.Array
) -> ScanResult:
    """Search objects for sorted keys, in parallel."""
    tasks = [ScanTask(store, chunk, keys) for chunk in _chunks(objects)]
    result = ScanResult()
    for part in executor.map(run_scan_task, tasks):
        result.add(part)
    return result


def _chunks(objects: Iterable[ObjectInfo]) -> Iterator[tuple[ObjectInfo, ...]]:
    chunk: list[ObjectInfo] = []
    total = 0
    for info in objects:
        chunk.append(info)
        total += info.size
        if len(chunk) >= TASK_OBJECTS or total >= TASK_BYTES:
            yield tuple(chunk)
            chunk, total = [], 0
    if chunk:
        yield tuple(chunk)


def run_scan_task(task: ScanTask) -> ScanResult:
    """Search the objects of a task."""
    found = task.store.runtime.map(lambda info: _scan(task, info), task.objects)
    present = [one for one in found if not one.is_gone]
    interesting = [one for one in present if one.is_of_interest]
    gone = [one.key for one in found if one.is_gone]
    return ScanResult(interesting, len(present), sum(one.size for one in present), gone)


def _scan(task: ScanTask, info: ObjectInfo) -> ScannedObject:
    found = ScannedObject(info.key, info.size, info.last_modified_s)
    try:
        if info.key.endswith(".wal"):
            _scan_log(task, found)
        elif info.key.endswith(".seg"):
            reread_if_damaged(lambda: _scan_segment(task, found))
        elif info.key.endswith(".manifest.json"):
            _scan_manifest(task, found)
    except (CorruptionError, UnsupportedFormatError) as error:
        found.problem = error.message
    except NotFoundError:
        found.is_gone = True
    return found


# --- the log ----------------------------------------------------------------------------


def _scan_log(task: ScanTask, found: ScannedObject) -> None:
    name = found.key
    decoded = fetch(task.store, name, lambda body: WalObject.decode(body, name))
    header = decoded.header
    for record, start in zip(decoded.records, decoded.starts, strict=True):
        _scan_record(task.keys, record, name, start, found)
    found.rows += _conditions(header, task.keys)
    if header.kind is WalKind.APPEND:
        found.marks = dict(header.marks)
    if header.kind is WalKind.INGEST and header.job is not None:
        found.ingested = tuple(segment.id for segment in header.job.segments)
    if header.job is not None:
        ends = [key for s in header.job.segments for key in (s.min_key, s.max_key)]
        found.bounds += _bounds([*ends, *(header.job.replace or ())], task.keys)


def _scan_record(
    keys: pa.Array, record: memoryview, name: str, start: int, found: ScannedObject
) -> None:
    """Count the keys of a batch; no schema is needed for that."""
    types = {KEY: pa.binary(), KIND: pa.uint8(), END_KEY: pa.binary()}
    _, columns = decode_columns(record, types, name, start)
    named = pc.is_in(columns[KEY], value_set=keys)
    is_range = pc.equal(columns[KIND], pa.scalar(OpKind.DELETE_RANGE, pa.uint8()))
    found.rows += pc.and_not(named, is_range).true_count
    found.bounds += pc.and_(named, is_range).true_count
    if END_KEY in columns:
        found.bounds += _bounds(columns[END_KEY].drop_null().to_pylist(), keys)


def _conditions(header: WalHeader, keys: pa.Array) -> int:
    """Return how many conditions of batches name one of the keys."""
    named = [condition[1] for batch in header.batches for condition in batch.when or ()]
    return _equal(named, keys)


def _equal(named: Sequence[bytes | None], keys: pa.Array) -> int:
    given = [key for key in named if isinstance(key, bytes)]
    return int(pc.is_in(pa.array(given, pa.binary()), value_set=keys).true_count)


def _bounds(named: Sequence[bytes | None], keys: pa.Array) -> int:
    """Return how many bounds of ranges are one of the keys, or its direct successor."""
    following = pc.binary_join_element_wise(keys, pa.scalar(b"\0"), pa.scalar(b""))
    return _equal(named, pa.concat_arrays([keys, following]))


# --- segments and manifests ---------------------------------------------------------------


def _scan_segment(task: ScanTask, found: ScannedObject) -> None:
    tail = _tail(task.store, found)
    found.rows = sum(len(rows) for rows in matching_rows(task.store, tail, task.keys))
    ends = [key for cover in tail.footer.covers for key in (cover.start, cover.stop)]
    ends += [key for one in tail.range_tombstones for key in (one.start, one.end)]
    found.bounds = _bounds(ends, task.keys)


def _tail(store: Store, found: ScannedObject) -> SegmentTail:
    """Read the tail of a segment that no manifest needs to name: the footer says how long it is."""
    length = LAST_BYTES
    while True:
        last = read_range(store, found.key, max(0, found.size - length), found.size)
        footer = decode_footer(last, found.size, found.key)
        if isinstance(footer, Footer):
            break
        length = footer
    tail_bytes = FoundSegment("", found.size, footer).tail_bytes
    if tail_bytes > len(last):
        last = read_range(store, found.key, found.size - tail_bytes, found.size)
    return decode_tail(last, found.size, found.key)


def _scan_manifest(task: ScanTask, found: ScannedObject) -> None:
    name = found.key
    manifest = fetch(task.store, name, lambda body: ManifestDecoder().decode(body, name))
    ends = [key for entry in manifest.segments for key in (entry.min_key, entry.max_key)]
    found.bounds = _bounds(ends, task.keys)


def sorted_keys(keys: Iterable[bytes]) -> pa.Array:
    """Return keys in order, each once."""
    return pa.array(sorted(set(keys)), pa.binary())


def limits_of(keys: pa.Array, lsn: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return one LSN for all keys."""
    return np.full(len(keys), lsn, np.int64)


@dataclass(frozen=True, slots=True)
class Pin:
    """One reason why an object is kept."""

    kind: str
    name: str
    id: str = ""
    """Id of a snapshot, a branch, a lease or a job."""
    until: str | None = None
    """When running the purge again makes progress, by the store's clock; None: when it ends."""

    @classmethod
    def up_to(cls, until_s: float | None, kind: str, name: str, pin_id: str = "") -> "Pin":
        """Return a pin that ends at a time, if that is known."""
        at = None if until_s is None else datetime.fromtimestamp(until_s, UTC).isoformat()
        return cls(kind, name, pin_id, at)


@dataclass(frozen=True, slots=True)
class PurgedChain:
    """One chain of manifests whose objects are examined."""

    heads: HeadFinder
    is_branch: bool = False

    @property
    def names(self) -> Namespace:
        return self.heads.names

    @property
    def head(self) -> Manifest:
        return self.heads.found.manifest

    @property
    def root(self) -> str:
        return self.names.root


@dataclass(frozen=True)
class _NamedRoot:
    """A generation that is needed, with or without its segments, and how far its log is."""

    pin: Pin
    names: Namespace
    manifest: Manifest | None
    """None if it cannot be read: then it may need everything."""
    last_lsn: int = ENDLESS
    has_segments: bool = True

    def needs(self, key: str, ingests: Sequence[int]) -> bool:
        """Whether it needs an object; `ingests` are the LSNs of loads that name a segment."""
        if self.manifest is None:
            return True
        floor, lsn = self.manifest.wal_floor, number_of(key) or 0
        if key.endswith(".wal"):
            needed = floor - 1 <= lsn <= self.last_lsn
            return needed and self.names.wal_object(lsn) == key
        return key in self.segments or any(floor <= lsn <= self.last_lsn for lsn in ingests)

    @cached_property
    def segments(self) -> frozenset[str]:
        """The keys of all segments, those of other namespaces too."""
        if self.manifest is None or not self.has_segments:
            return frozenset()
        return frozenset(self.names.segment(s.id, s.home) for s in self.manifest.segments)


class Pins:
    """Explains the objects of one place, as of its head and the leases that are there now."""

    def __init__(
        self, store: Store, place: PurgedChain, swept: Sequence[PurgedChain], *, is_swept: bool
    ) -> None:
        self._store, self._place, self._is_swept = store, place, is_swept
        self._now_s = current_time_s(store)
        self._swept = {one.root: one.head for one in swept}
        self._ingests: dict[str, list[int]] = {}

    def _pin(self, until_s: float | None, kind: str, name: str, pin_id: str = "") -> Pin:
        """Return a pin; where the purge does not sweep, no time of its own brings progress."""
        return Pin.up_to(until_s if self._is_swept else None, kind, name, pin_id)

    def learn(self, scanned: Iterable[ScannedObject]) -> None:
        """Add the loads that a scan has found in the log."""
        for one in scanned:
            for segment_id in one.ingested:
                self._ingests.setdefault(segment_id, []).append(number_of(one.key) or 0)

    def foreign_objects(self) -> Iterator[ObjectInfo]:
        """List the objects of other namespaces that generations of a branch need: segments, slots
        of the inherited log, and segments of loads in it.
        """
        own, names = self._place.root + "/", self._place.names
        floors = [root.manifest.wal_floor for root in self._roots if root.manifest is not None]
        slots = dict(listed_slots(self._store, names, min(floors), names.first_own_lsn))
        yield from slots.values()
        needed = {key for root in self._roots for key in root.segments if not key.startswith(own)}
        needed |= set(self._loaded_segments({lsn: info.size for lsn, info in slots.items()}))
        for folder in sorted({key.rpartition("/")[0] for key in needed}):
            yield from (info for info in self._store.list(folder + "/") if info.key in needed)

    def _loaded_segments(self, sizes: Mapping[int, int]) -> Iterator[str]:
        """Yield the segments of loads in slots."""
        names = self._place.names
        headers = peek_headers(self._store.runtime, self._store, names, list(sizes.items()))
        for lsn, header in headers.items():
            if isinstance(header, WalHeader) and header.job is not None:
                for segment in header.job.segments:
                    yield names.segment(segment.id, names.home_of_slot(lsn))

    def roots_of(self, found: ScannedObject) -> tuple[Pin, ...]:
        """Return the generations that need an object, here or in another namespace."""
        segment = found.key.rpartition("/")[2].removesuffix(".seg")
        ingests = self._ingests.get(segment, [])
        return tuple(root.pin for root in self._roots if root.needs(found.key, ingests))

    def of(self, found: ScannedObject) -> tuple[Pin, ...]:
        """Return the reasons why an object of this place is kept; at least one."""
        relative = found.key.removeprefix(self._place.root + "/")
        folder, _, name = relative.partition("/")
        if folder == "quarantine":
            return (Pin("quarantine", relative),)
        condemned = self._condemned.get(relative) or self._in_ranges(relative)
        if condemned is not None:
            return tuple(self._holding(condemned))
        pins = (*self.roots_of(found), *self._at_marks(found))
        return pins or tuple(self._loose(folder, name.removesuffix(".seg"), found))

    # --- condemned objects ----------------------------------------------------------
    @cached_property
    def _condemned(self) -> dict[str, Condemned]:
        return {one.key: one for one in self._place.head.condemned}

    def _in_ranges(self, relative: str) -> Condemned | None:
        folder, number = relative.partition("/")[0], number_of(relative)
        for one in self._place.head.condemned_ranges:
            if folder == one.folder and number is not None and one.first <= number <= one.last:
                return Condemned(relative, one.generation, one.since_ms)
        return None

    def _holding(self, condemned: Condemned) -> Iterator[Pin]:
        """Yield the leases that hold a condemned object, and its grace period."""
        held = False
        for lease in self._leases:
            if LeasedObjects([lease], self._load, self._ingested_segments).pin(condemned):
                held = True
                record = lease.record
                name = f"{record.owner or 'unreadable'} at {record.where or lease.key}"
                ends_s = lease.renewed_s + record.ttl_ms / 1000
                yield self._pin(ends_s + self._margin_s, "lease", name, record.id)
        until_s = self._after_grace(condemned.since_ms / 1000)
        if until_s > self._now_s:
            yield self._pin(until_s, "grace", "condemned")
        elif not held:
            yield self._pin(self._now_s, "sweep", "deletable")

    @cached_property
    def _leases(self) -> list[FoundLease[GenerationLease]]:
        found = find_generation_leases(self._store, self._place.names, self._now_s, self._margin_s)
        return [lease for lease in found if not lease.expired]

    def _ingested_segments(self, first: int, last: int) -> frozenset[str]:
        found = self._ingests.items()
        return frozenset(i for i, lsns in found if any(first <= lsn <= last for lsn in lsns))

    def _after_grace(self, since_s: float) -> float:
        head = self._place.head
        grace_s = effective_grace_ms(head, int(self._now_s * 1000)) / 1000
        return since_s + grace_s + self._margin_s

    @property
    def _margin_s(self) -> float:
        return clock_margin_s(self._store)

    # --- roots ----------------------------------------------------------------------
    @cached_property
    def _roots(self) -> list[_NamedRoot]:
        head = self._place.head
        soon_s = self._now_s + self._margin_s
        pin = Pin("head", f"generation {head.generation}")
        if head.successor is not None:
            pin = self._pin(soon_s, "incarnation", f"{head.incarnation}, replaced by a later one")
        roots = [self._root(pin, head)]
        retained = sorted(set(range(head.oldest_retained, head.generation)) - self._skipped)
        for generation in retained[:GENERATIONS_MAX]:
            pin = self._pin(soon_s, "generation", str(generation))
            roots.append(self._root(pin, self._load(generation)))
        roots += self._snapshots()
        for branch_id, branch in head.branches.items():
            name = Namespace.of_root(branch.root).name
            pin = self._pin(self._released_at(branch.root), "branch", name, branch_id)
            pinned = self._load(branch.generation)
            roots.append(replace(self._root(pin, pinned), last_lsn=branch.last_lsn))
        for name, cursor in head.cursors.items():
            start = self._load(cursor.generation)
            roots.append(replace(self._root(Pin("cursor", name), start), has_segments=False))
        return roots

    @property
    def _skipped(self) -> set[int]:
        return set(self._place.head.skipped_generations)

    def _snapshots(self) -> Iterator[_NamedRoot]:
        head = self._place.head
        expired = expired_snapshots(head, int((self._now_s - self._margin_s) * 1000))
        for snapshot in head.snapshots:
            if snapshot.id not in expired:
                ends = snapshot.expires_at_ms
                until_s = None if ends is None else ends / 1000 + self._margin_s
                pin = self._pin(until_s, "snapshot", snapshot.name or snapshot.id, snapshot.id)
                yield self._root(pin, self._load(snapshot.generation))

    def _root(self, pin: Pin, manifest: Manifest | None) -> _NamedRoot:
        return _NamedRoot(pin, self._place.names, manifest)

    def _released_at(self, root: str) -> float | None:
        """Return when a branch removes its pin, if a sweep of it has decided that already."""
        child = self._swept.get(root)
        for condemned in child.condemned if child is not None else ():
            if condemned.key == HOMES + self._place.root:
                return self._after_grace(condemned.since_ms / 1000)
        return None

    def _load(self, generation: int) -> Manifest | None:
        if generation == self._place.head.generation:
            return self._place.head
        try:
            return self._place.heads.load(generation)
        except (NotFoundError, CorruptionError):
            return None

    # --- objects that no root needs ---------------------------------------------------
    def _at_marks(self, found: ScannedObject) -> list[Pin]:
        marks: Mapping[str, Any] = self._place.head.stream_marks
        at_mark = [s for s, place in found.marks.items() if place >= marks.get(s, 0)]
        return [Pin("stream", stream) for stream in at_mark]

    def _loose(self, folder: str, segment: str, found: ScannedObject) -> list[Pin]:
        job = job_of(segment) if folder == "segments" else None
        if job is not None and (job in self._open_jobs or job == self._place.head.compactor_job):
            return [Pin("job", job, job)]
        young_until_s = self._after_grace(found.modified_s)
        if folder == "segments" and young_until_s > self._now_s:
            return [self._pin(young_until_s, "grace", "younger than the grace period")]
        return [self._pin(self._now_s, "sweep", "not condemned yet")]

    @cached_property
    def _open_jobs(self) -> frozenset[str]:
        if self._place.head.dropped is not None:
            return frozenset()
        return frozenset(Appender(self._store, self._place.names).read_log().open_jobs)
