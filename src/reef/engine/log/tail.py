"""The unfolded part of the log, from a manifest's floor on: replayed whole, or by its headers.

`Tail` applies the log to a memtable. Writers and readers build it in the same way, from one
manifest: segments, dedup window, open jobs and floor all belong together (H61). Which objects count
is decided by the rules of the log.

**Headers** are read without their records: a listing does not show the kind of an object, a ranged
GET of its first bytes does. An object whose header cannot be decoded is damaged, or from a newer
release: its kind is unknown, so it is never collected.

`read_unfolded` reads the unfolded part of the log by its headers alone:

    slots     one listing, from the floor of the head
    headers   one ranged GET for each slot, in parallel, HEADERS_MAX at most

It serves statistics and the list of open jobs. If the log is longer than HEADERS_MAX, only its
beginning is read: an overview has to stay cheap, and a log of that length should be folded first.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from reef.engine.log.log import Log, LogRules, RulesState, Scanned, Slot, Verdict, replay_headers
from reef.engine.read.memtable import Memtable, MemtableCut
from reef.engine.read.segments import SegmentStore
from reef.engine.read.view import View
from reef.errors import (
    CorruptionError,
    InternalError,
    InvalidInputError,
    NotFoundError,
)
from reef.formats.coding import ALIGNMENT, U32, ByteReader, decode_msgpack, read_frame
from reef.formats.manifest import Manifest, OpenJob, SegmentEntry
from reef.formats.schema import Schema
from reef.formats.wal_object import (
    HEAD,
    MAGIC,
    VERSION,
    AnyOps,
    JobSegment,
    WalHeader,
    WalKind,
    WalObject,
    decode_records,
)
from reef.manifest.dedup import DedupWindow
from reef.paths import Namespace
from reef.stores import Store


class Watcher(Protocol):
    """Is notified of writes, before they can be read and after."""

    def applying(
        self, batches: Sequence[AnyOps] = (), segments: Sequence[SegmentEntry] = ()
    ) -> None: ...

    def applied(self) -> None: ...

    def lost_track(self) -> None:
        """Unknown rows were applied: forget everything."""


class AppliedSlot(NamedTuple):
    """An object of the tail: its size, its kind, and whether it counts."""

    size: int
    kind: WalKind
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class TailCut:
    """A tail at one point in time: a fold of it reads no WAL object."""

    manifest: Manifest
    state: RulesState
    slots: dict[int, AppliedSlot]
    memtable: MemtableCut


class Tail:
    """One manifest, and the log from its floor on, applied to a memtable."""

    def __init__(self, manifest: Manifest, segments: SegmentStore) -> None:
        self.manifest = manifest
        self.rules = LogRules(manifest)
        self.bytes = 0
        """Size of the objects that are not folded yet."""
        self._slots: dict[int, AppliedSlot] = {}
        self.created_at_ms = manifest.published_at_ms
        self._segments = segments
        self.schema = manifest.schema
        """The newest one."""
        self._schemas = {schema.id: schema for schema in manifest.schemas}
        memtable = Memtable(manifest.schema, manifest.wal_floor)
        memtable.marks.update(manifest.stream_marks)
        self._view = View(manifest, segments, memtable)
        self._early: set[int] = set()
        self._watchers: tuple[Watcher, ...] = ()

    @property
    def next_lsn(self) -> int:
        return self.rules.next_lsn

    @property
    def dedup(self) -> DedupWindow:
        return self.rules.dedup

    def view(self) -> View:
        """Return the visible state; manifest and memtable are always replaced together."""
        return self._view

    @property
    def ingested(self) -> tuple[SegmentEntry, ...]:
        """The segments of loads that are not folded yet."""
        return self._memtable.ingested

    def watch(self, *watchers: Watcher) -> None:
        """Notify these watchers of everything that is applied from now on."""
        new = [watcher for watcher in watchers if watcher not in self._watchers]
        self._watchers = (*self._watchers, *new)

    def restarted(self, manifest: Manifest) -> "Tail":
        """Return a tail from a newer manifest on, whose floor is above this one's end."""
        if manifest.wal_base == self.manifest.wal_base:
            self.rules.check_floor(manifest)
        tail = Tail(manifest, self._segments)
        tail.watch(*self._watchers)
        tail.lost_track()
        return tail

    def lost_track(self) -> None:
        """Let the watchers forget everything."""
        for watcher in self._watchers:
            watcher.lost_track()

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Replace the visible state within this block.

        The watchers forget everything before the new state can be read, and keep nothing until
        the block ends: no row of the old state is served after one of the new state, or cached.
        """
        for watcher in self._watchers:
            watcher.applying()
        try:
            self.lost_track()
            yield
        finally:
            for watcher in self._watchers:
                watcher.applied()

    @property
    def _memtable(self) -> Memtable:
        return self._view.memtable

    def apply(self, slot: Scanned) -> Verdict:
        """Apply a scanned slot, which must be the next one."""
        if slot.object is None:
            self.skip()
            return Verdict.IGNORED
        return self.apply_object(slot.object, slot.size)

    def apply_object(self, wal_object: WalObject, size: int = 0) -> Verdict:
        """Apply the object of the next slot; if it cannot be decoded, nothing changes (H27)."""
        header = wal_object.header
        applies = self.rules.classify(header) is Verdict.APPLIES
        is_early = header.lsn in self._early  # our own, and applied already
        apply = self._decode(wal_object) if applies and not is_early else None
        verdict = self.rules.advance(header)
        if apply is not None:
            apply()
        self._note_passed(header, size or sum(map(len, wal_object.records)), verdict)
        self.created_at_ms = max(self.created_at_ms, header.created_at_ms)
        return verdict

    def apply_own(self, header: WalHeader, batches: Sequence[AnyOps], size: int) -> Verdict:
        """Apply an object that this process wrote, without decoding it again."""
        verdict, lsn = self.rules.advance(header), header.lsn
        if verdict is Verdict.APPLIES and lsn not in self._early:
            self._apply_batches(header, batches)
        self._note_passed(header, size, verdict)
        return verdict

    def apply_early(self, header: WalHeader, batches: Sequence[AnyOps]) -> None:
        """Apply an object that landed before those in front of it (independent order)."""
        if header.lsn not in self._early:
            self._early.add(header.lsn)
            self._apply_batches(header, batches, is_early=True)

    def skip(self) -> None:
        """Pass a slot that a repair has skipped."""
        self._memtable.pass_over(self.next_lsn)
        self.rules.skip()

    def knows(self, header: WalHeader) -> bool:
        """Whether an object can be read: a newer schema comes with a newer manifest."""
        return not header.kind.has_rows or header.schema_id in self._schemas

    def follows(self, manifest: Manifest) -> bool:
        """Whether a manifest is newer, and its floor is at or below the end of this tail."""
        newer = manifest.generation > self.manifest.generation
        same = manifest.wal_base == self.manifest.wal_base  # not of a later incarnation (H48)
        return newer and same and manifest.wal_floor <= self.next_lsn

    def rebase(self, manifest: Manifest) -> None:
        """Continue from a newer manifest: drop from memory the rows that its segments hold now."""
        if manifest.wal_floor > self.next_lsn:
            raise ValueError(f"floor {manifest.wal_floor} is above LSN {self.next_lsn}")
        self.rules.check_floor(manifest)
        memtable = self._memtable.drop_below(manifest.wal_floor, manifest.schema)
        view = View(manifest, self._segments, memtable)
        if manifest.schema.id == self.manifest.schema.id:
            self._view = view
        else:
            with self.replacing():  # cached rows lack the new columns
                self._view = view
        self.schema = manifest.schema
        self._schemas = {schema.id: schema for schema in manifest.schemas}
        floor = manifest.wal_floor
        self._slots = {lsn: slot for lsn, slot in self._slots.items() if lsn >= floor}
        self.bytes = sum(slot.size for slot in self._slots.values())
        self.manifest = manifest

    def cut(self) -> TailCut:
        """Return the tail as it is now. The caller makes sure that nothing is applied meanwhile."""
        memtable = self._view.memtable.cut()
        return TailCut(self.manifest, self.rules.state(), dict(self._slots), memtable)

    def _note_passed(self, header: WalHeader, size: int, verdict: Verdict) -> None:
        """Record that the slot just below `next_lsn` was replayed."""
        lsn = header.lsn
        if self._early:
            self._early.discard(lsn)
        memtable = self._view.memtable
        memtable.pass_over(lsn)
        if not self.rules.awaits_live_wins:
            memtable.settle(lsn)
        self._slots[lsn] = AppliedSlot(size, header.kind, verdict)
        self.bytes += size

    def _decode(self, wal_object: WalObject) -> Callable[[], None]:
        """Decode an object that counts; return the call that applies it."""
        header = wal_object.header
        if header.kind is WalKind.INGEST:
            segments = ingested_segments(header, self.manifest.schema, self._segments.namespace)
            return lambda: self._apply_ingest(header, segments)
        schema = self._schemas.get(header.schema_id)
        if schema is None:
            raise InternalError(f"LSN {header.lsn} is of schema {header.schema_id}, not known here")
        name = self._segments.namespace.wal_object(header.lsn)
        batches = list(decode_records(wal_object, schema, name))
        return lambda: self._apply_batches(header, batches)

    def _apply_ingest(self, header: WalHeader, segments: Sequence[SegmentEntry]) -> None:
        for watcher in self._watchers:
            watcher.applying(segments=segments)
        try:
            self._memtable.ingest(header.lsn, segments)
        finally:
            for watcher in self._watchers:
                watcher.applied()

    def _apply_batches(
        self, header: WalHeader, batches: Sequence[AnyOps], *, is_early: bool = False
    ) -> None:
        for watcher in self._watchers:
            watcher.applying(batches)
        try:
            memtable = self._view.memtable
            memtable.apply(header.lsn, batches, header.marks, is_early=is_early)
        finally:
            for watcher in self._watchers:
                watcher.applied()


def ingested_segments(header: WalHeader, schema: Schema, names: Namespace) -> list[SegmentEntry]:
    """Return the entries of the segments that an ingest makes visible at its LSN.

    With `live_wins` their rows sort at the begin of the job. Segments of an inherited ingest are
    stored in the namespace of the branch's origin.
    """
    if header.job is None:
        return []
    schema_id = header.schema_id or schema.id
    home = names.home_of_slot(header.lsn)
    rows_lsn = header.job.begin_lsn if header.job.live_wins else header.lsn
    return [
        entry_at(segment, header.lsn, schema_id, home, rows_lsn=rows_lsn)
        for segment in header.job.segments
    ]


def entry_at(
    segment: JobSegment,
    lsn: int,
    schema_id: int,
    home: str | None = None,
    *,
    rows_lsn: int | None = None,
) -> SegmentEntry:
    """Return the manifest entry of a loaded segment; LSN 0 is for one that is only staged."""
    sorts_at = lsn if rows_lsn is None else rows_lsn
    return SegmentEntry(
        id=segment.id,
        level=0,
        size=segment.size,
        checksum=segment.checksum,
        rows=segment.rows,
        tombstones=segment.tombstones,
        min_key=segment.min_key,
        max_key=segment.max_key,
        lsn_min=sorts_at,
        lsn_max=sorts_at,
        tail_bytes=segment.tail_bytes,
        schema_id=schema_id,
        set_hash=segment.set_hash,
        patches=segment.patches,
        visible_lsn=lsn,
        home=home,
    )


FIRST_BYTES = 1024
"""Enough for the header of an object with a few batches; a longer one needs a second request."""


class Missing(StrEnum):
    """The reason why a slot has no readable header."""

    GONE = "gone"
    """The slot was listed, and is empty now."""
    UNREADABLE = "unreadable"


Peeked = WalHeader | Missing


@dataclass(frozen=True, slots=True)
class HeaderTask:
    """Some slots, and how large their objects are."""

    store: Store
    namespace: Namespace
    slots: tuple[tuple[int, int], ...]


def run_header_task(task: HeaderTask) -> list[Peeked]:
    """Read the headers of a task's slots."""
    return task.store.runtime.map(lambda slot: _peek(task, *slot), task.slots)


def _peek(task: HeaderTask, lsn: int, size: int) -> Peeked:
    key = task.namespace.wal_object(lsn)
    try:
        data = task.store.get_range(key, 0, min(size, FIRST_BYTES))
        whole = _header_end(data)
        if len(data) < whole <= size:
            data = task.store.get_range(key, 0, whole)
        return _decode(data, key, lsn)
    except NotFoundError:
        return Missing.GONE
    except (CorruptionError, InvalidInputError):  # the latter: shorter than it was listed
        return Missing.UNREADABLE


def _header_end(data: bytes) -> int:
    """Return where the header's frame ends, padding included."""
    if len(data) < HEAD.size + 8:
        return len(data)
    length: int = U32.unpack_from(data, HEAD.size)[0]
    end = HEAD.size + 8 + length
    return end + -end % ALIGNMENT


def _decode(data: bytes, key: str, lsn: int) -> Peeked:
    cursor = ByteReader(data, key)
    magic, version, zero = HEAD.unpack(cursor.take(HEAD.size))
    if magic != MAGIC or not 1 <= version <= VERSION or zero:
        return Missing.UNREADABLE
    header = decode_msgpack(read_frame(cursor, "the header"), WalHeader, key, HEAD.size)
    if not isinstance(header, WalHeader) or header.lsn != lsn:
        return Missing.UNREADABLE
    return header


HEADERS_MAX = 1000
"""As many as one page of a listing: about a second of requests."""


@dataclass(frozen=True, slots=True)
class UnfoldedHeaders:
    """The log above a head's floor, up to a gap, damage, or the bound."""

    open_jobs: tuple[OpenJob, ...]
    ingested: tuple[SegmentEntry, ...]
    """The segments of loads that count."""
    headers: dict[int, WalHeader] = field(default_factory=dict)
    """By LSN: all that could be read, also behind a gap."""


def read_unfolded(
    store: Store,
    names: Namespace,
    head: Manifest,
    slots: Sequence[Slot] | None = None,
    headers_max: int = HEADERS_MAX,
) -> UnfoldedHeaders:
    """Pass the headers of the log through the rules; without `slots` they are listed."""
    if slots is None:
        slots = Log(store, names).filled(head.wal_floor)
    sizes = [(slot.lsn, slot.size) for slot in slots[:headers_max]]
    read = run_header_task(HeaderTask(store, names, tuple(sizes)))
    headers = {lsn: h for (lsn, _), h in zip(sizes, read, strict=True) if isinstance(h, WalHeader)}
    rules, ingested = LogRules(head, disputes={}), []  # an overview decides nothing: verify does
    for header, verdict in replay_headers(rules, headers):
        if verdict is Verdict.APPLIES and header.kind is WalKind.INGEST:
            ingested += ingested_segments(header, head.schema, names)
    return UnfoldedHeaders(rules.open_jobs, tuple(ingested), headers)
