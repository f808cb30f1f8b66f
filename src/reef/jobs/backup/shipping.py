"""Ship a log: read slots of the source in order, and store them as pieces.

    1  replay   the rules of the log, from the floor of a generation that is leased
    2  copy     the segments of ingests that count
    3  piece    the objects of the slots, unchanged, in one object; after their segments

A piece is in the backup from the PUT on, so that it is written last. Slots that some piece has
already are replayed and not sent again.

The lease is checked after the slots of a piece were read and before it is written: a slot that was
collected may have been filled again by a stalled process (H67).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from reef.engine.log.log import READ_AT_ONCE, LogRules, SlotGone, Verdict, contiguous, listed_slots
from reef.engine.log.tail import ingested_segments
from reef.errors import CorruptionError, NotFoundError, UnavailableError
from reef.formats.backup import PieceHead, PieceSlot, encode_piece
from reef.formats.manifest import Manifest, SegmentEntry
from reef.formats.wal_object import WalHeader, WalKind, WalObject
from reef.jobs.backup.archive import Archive, ArchivedLog, Piece
from reef.jobs.backup.copying import Tally
from reef.paths import Namespace
from reef.stores import Outcome, Store, fetch

PIECE_BYTES = 8 << 20
PIECE_SLOTS = 8192
"""The first limit reached ends a piece."""


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
        return self.size >= PIECE_BYTES or self.last - self.first + 1 >= PIECE_SLOTS


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
    """Of the source: schemas, and decisions of repairs."""
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
        if header is None:
            self.rules.skip()
        else:
            verdict = self.rules.advance(header)
            if verdict is Verdict.APPLIES and header.kind is WalKind.INGEST:
                loaded = ingested_segments(header, self.manifest.schema, self.names)
                self._open.ingested += loaded
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
        self.log.add(Piece(head.first, head.last, key, len(body)))
        self.tally.pieces += 1
        self.tally.bytes_sent += len(body)
