"""Copy segments and logs between two stores. The same task runs in threads and on Spark.

A segment is read in pieces of some megabytes and sent as it is read. Its checksum is compared
before the last piece is sent, so that nothing arrives of a segment that is damaged. An object that
a listing shows with the right size, under the name of its segment, is not sent or read again.

A task may run twice, at the same time, after the loss of an executor or by speculation: both write
the same bytes under the same name.

A log is shipped in pieces:

    1  replay   the rules of the log, from the floor of a generation that is leased
    2  copy     the segments of ingests that count
    3  piece    the objects of the slots, unchanged, in one object; after their segments

A piece is in the backup from the PUT on, so that it is written last. Slots that some piece has
already are replayed and not sent again.

The lease is checked after the slots of a piece were read and before it is written: a slot that was
collected may have been filled again by a stalled process (H67).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from reef.engine.log.log import READ_AT_ONCE, LogRules, SlotGone, Verdict, contiguous, listed_slots
from reef.engine.log.tail import ingested_segments
from reef.errors import CorruptionError, InvalidInputError, NotFoundError, UnavailableError
from reef.formats.backup import PieceHead, PieceSlot, encode_piece
from reef.formats.coding import corrupt, crc32c_extend
from reef.formats.manifest import Manifest, SegmentEntry
from reef.formats.wal_object import WalHeader, WalKind, WalObject
from reef.jobs.backup.archive import Archive, ArchivedLog, ArchivePiece
from reef.paths import Namespace
from reef.runtime import Executor
from reef.stores import Meter, Outcome, Store, fetch
from reef.stores.base import reread_if_damaged
from reef.telemetry import RequestMeter

PIECE_BYTES = 8 << 20
TASK_BYTES = 32 << 20
"""Small segments share a task."""
TASKS_AT_ONCE = 8
"""Each holds a piece, and the bytes of an upload that are not sent yet."""
Counts = dict[str, dict[str, int]]
"""Requests and bytes by kind."""
ARCHIVE_PIECE_BYTES = 8 << 20
PIECE_SLOTS = 8192
"""The first limit reached ends a piece."""


@dataclass(frozen=True, slots=True)
class CopyItem:
    """One object to copy."""

    source: str
    target: str
    size: int
    checksum: int


@dataclass(frozen=True, slots=True)
class CopyTask:
    """Some objects to copy, one after the other."""

    source: Store
    target: Store
    items: tuple[CopyItem, ...]


@dataclass(frozen=True, slots=True)
class CopyReport:
    """The requests of a task, wherever it ran."""

    source: Counts
    target: Counts


def run_copy_task(task: CopyTask) -> CopyReport:
    """Copy the objects of a task; CorruptionError if one of them is damaged or missing."""
    source, target = Meter(task.source), Meter(task.target)
    for item in task.items:
        reread_if_damaged(lambda item=item: _copy(source, target, item))  # type: ignore[misc]
    return CopyReport(source.meter.to_dict(), target.meter.to_dict())


def _copy(source: Store, target: Store, item: CopyItem) -> None:
    try:
        target.upload(item.target, _checked_pieces(source, item))
    except NotFoundError as error:
        if error.context.get("object", item.source) != item.source:
            raise
        raise CorruptionError(
            f"object {item.source} is missing", object=item.source, offset=0
        ) from error


def _checked_pieces(source: Store, item: CopyItem) -> Iterator[bytes]:
    """Yield an object; raise before its last piece if the checksum does not match."""
    checksum = 0
    for start in range(0, item.size, PIECE_BYTES):
        end = min(start + PIECE_BYTES, item.size)
        try:
            data = source.get_range(item.source, start, end)
        except InvalidInputError as error:
            raise corrupt(item.source, start, f"shorter than {item.size} bytes") from error
        checksum = crc32c_extend(checksum, data)
        if end == item.size and checksum != item.checksum:
            found, expected = f"{checksum:08x}", f"{item.checksum:08x}"
            raise corrupt(item.source, 0, f"expected checksum {expected}, found {found}")
        yield data


@dataclass(slots=True)
class Tally:
    """Objects that a job has copied, and its requests at both stores."""

    segments_sent: int = 0
    segments_reused: int = 0
    bytes_sent: int = 0
    log_objects: int = 0
    pieces: int = 0
    source: RequestMeter = field(default_factory=RequestMeter)
    target: RequestMeter = field(default_factory=RequestMeter)

    def add(self, done: CopyReport) -> None:
        """Add the requests of a task."""
        for meter, counts in ((self.source, done.source), (self.target, done.target)):
            for kind in meter.counts():
                count = counts.get(kind.value, {})
                if count:
                    meter.count(kind, requests=count["requests"], bytes=count["bytes"])

    def requests(self) -> dict[str, Counts]:
        """Return requests and bytes by store and kind, without kinds that were not used."""
        return {"source": _nonzero_counts(self.source), "target": _nonzero_counts(self.target)}


def _nonzero_counts(meter: RequestMeter) -> Counts:
    return {kind: count for kind, count in meter.to_dict().items() if count["requests"]}


@dataclass(frozen=True, slots=True)
class Copier:
    """Copies segments to another store, except those it already has."""

    source: Store
    target: Store
    executor: Executor
    at_once: int
    """Tasks that run at the same time; 0 for all of them."""
    tally: Tally
    check: Callable[[], None] = lambda: None
    """Raises if the objects are not pinned any more."""

    def copy(
        self,
        entries: Iterable[SegmentEntry],
        there: dict[str, int],
        keys: Callable[[SegmentEntry], tuple[str, str]],
    ) -> None:
        """Copy segments, except those that are there already; `keys` returns source and target."""
        needed = {entry.id: entry for entry in entries}
        missing = [entry for entry in needed.values() if there.get(entry.id) != entry.size]
        items = [CopyItem(*keys(entry), entry.size, entry.checksum) for entry in missing]
        self.tally.segments_reused += len(needed) - len(missing)
        tasks = [CopyTask(self.source, self.target, group) for group in _groups(items)]
        step = self.at_once or max(1, len(tasks))
        for at in range(0, len(tasks), step):
            self.check()
            for done in self.executor.map(run_copy_task, tasks[at : at + step]):
                self.tally.add(done)
        self.tally.segments_sent += len(missing)
        self.tally.bytes_sent += sum(item.size for item in items)
        there |= {entry.id: entry.size for entry in missing}


def _groups(items: Sequence[CopyItem]) -> Iterator[tuple[CopyItem, ...]]:
    """Cut objects into tasks of about TASK_BYTES."""
    group: list[CopyItem] = []
    size = 0
    for item in items:
        if group and size + item.size > TASK_BYTES:
            yield tuple(group)
            group, size = [], 0
        group.append(item)
        size += item.size
    if group:
        yield tuple(group)


@dataclass(slots=True)
class _Open:
    """The piece that is being filled."""

    slots: list[PieceSlot] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    ingested: list[SegmentEntry] = field(default_factory=list)
    first: int = 0
    last: int = 0
    size: int = 0

    @property
    def is_full(self) -> bool:
        return self.size >= ARCHIVE_PIECE_BYTES or self.last - self.first + 1 >= PIECE_SLOTS


@dataclass(slots=True)
class LogShipper:
    """Ships the log of one namespace, again and again while it grows."""

    store: Store
    names: Namespace
    bucket: str
    archive: Archive
    log: ArchivedLog
    copy: Callable[[list[SegmentEntry]], None]
    """Copies segments into the archive."""
    check: Callable[[], None]
    """Raises if the log is not pinned any more."""
    tally: Tally
    rules: LogRules
    manifest: Manifest
    """Manifest of the source: schemas, and decisions of repairs."""
    log_bytes: int = 0
    """Bytes of the log that were replayed since the last backup."""
    covered_ms: int = 0
    """When the end of the log was listed last."""
    _open: _Open = field(default_factory=_Open)

    def ship(self, last: int | None = None) -> int:
        """Ship the log up to an LSN, or up to its end; return the last LSN that was passed."""
        self.covered_ms = int(self.store.runtime.wall_s() * 1000) if last is None else 0
        for lsn, body, header in self._slots(last):
            self._pass(lsn, body, header)
            if self._open.is_full:
                self._close(0)
        self._close(self.covered_ms)
        return self.rules.next_lsn - 1

    def _slots(self, last: int | None) -> Iterator[tuple[int, bytes, WalHeader | None]]:
        """Yield the slots without a gap; no header if a repair has skipped the slot."""
        start = self.rules.next_lsn
        if last is None:
            listed = [lsn for lsn, _ in listed_slots(self.store, self.names, start)]
            lsns = contiguous([*listed, *self.rules.skipped], start)
        else:
            lsns = list(range(start, last + 1))
        for at in range(0, len(lsns), READ_AT_ONCE):
            window = lsns[at : at + READ_AT_ONCE]
            yield from self.store.runtime.map(self._read, window)

    def _read(self, lsn: int) -> tuple[int, bytes, WalHeader | None]:
        if lsn in self.rules.skipped:
            return lsn, b"", None
        key = self.names.wal_object(lsn)

        def decode(body: bytes) -> tuple[int, bytes, WalHeader]:
            header = WalObject.decode(body, key).header
            if header.lsn != lsn:
                message = f"object {key} has the header of LSN {header.lsn}"
                raise CorruptionError(message, object=key, offset=0)
            return lsn, body, header

        try:
            return fetch(self.store, key, decode)
        except NotFoundError as error:
            raise SlotGone(lsn) from error

    def _pass(self, lsn: int, body: bytes, header: WalHeader | None) -> None:
        """Replay a slot, and add it to the piece unless the archive has it."""
        verdict = self.rules.pass_slot(header)
        if header and verdict is Verdict.APPLIES and header.kind is WalKind.INGEST:
            self._open.ingested += ingested_segments(header, self.manifest.schema, self.names)
        self.log_bytes += len(body)
        if self.log.covers(lsn):
            self._close(0)
            return
        piece = self._open
        piece.first, piece.last = piece.first or lsn, lsn
        if header is not None:
            piece.slots.append(PieceSlot(lsn, len(body), header.created_at_ms))
            piece.bodies.append(body)
            piece.size += len(body)

    def _close(self, covered_ms: int) -> None:
        """Write the piece that is being filled, after the segments that its ingests name."""
        piece, self._open = self._open, _Open()
        if piece.ingested:
            self.copy(piece.ingested)
        if not piece.first:
            return
        head = PieceHead(
            bucket=self.bucket,
            root=self.names.root,
            first=piece.first,
            last=piece.last,
            slots=tuple(piece.slots),
            covered_ms=covered_ms,
            schemas=self.manifest.schemas,
            skipped=tuple(sorted(self.rules.skipped)),
            ingests_without_begin=self.manifest.ingests_without_begin,
        )
        self.check()
        self._put(head, encode_piece(head, piece.bodies))
        self.tally.log_objects += len(piece.slots)

    def _put(self, head: PieceHead, body: bytes) -> None:
        key = self.archive.names.piece(head.bucket, head.root, head.first, head.last)
        result = self.archive.store.create(key, body)
        if result.outcome is Outcome.UNKNOWN:
            raise UnavailableError(
                f"object {key} may not have been written", hint="Run the backup again", object=key
            ) from result.cause
        self.log.add(ArchivePiece(head.first, head.last, key, len(body)))
        self.tally.pieces += 1
        self.tally.bytes_sent += len(body)
