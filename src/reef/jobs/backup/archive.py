"""The backup set: which backups are there, and the logs that they share.

    backups/<ulid>.json                              one descriptor per backup, written last
    data/manifests/<ulid>-<number>.manifest.json     the generations
    data/segments/<id>.seg                           segments, each stored once for all backups
    data/logs/<bucket>/<root>/<first>-<last>.log     pieces of logs

A backup exists if and only if its descriptor does. Objects that a crashed run has left are used by
the next one: a segment, like a piece, is written whole, under a name that identifies its content.

The log of a namespace belongs to all of its backups. Pieces may overlap: a slot is filled once, so
both have the same object. A restore replays the log from the floor of one backup up to any LSN that
is covered without a gap.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import msgspec

from reef.errors import CorruptionError, NotFoundError, UnavailableError
from reef.formats.backup import BackedUp, Backup, LogPiece, decode_backup, decode_piece
from reef.formats.coding import corrupt, crc32c
from reef.formats.manifest import Manifest, decode_manifest
from reef.paths import BackupNames, bucket_id, piece_range
from reef.runtime import leaf_lock
from reef.stores import Outcome, Store, fetch

PIECES_CACHED = 4
"""Decoded pieces in memory; a replay reads them in order."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a log, as a listing shows it."""

    first: int
    last: int
    key: str
    size: int


class Archive:
    """Reads one backup set."""

    names = BackupNames()

    def __init__(self, store: Store) -> None:
        self.store = store

    def backups(self) -> list[Backup]:
        """Return all complete backups, oldest first."""
        keys = [info.key for info in self.store.list(self.names.backups)]
        return self.store.runtime.map(self.backup_at, keys)

    def backup_at(self, key: str) -> Backup:
        """Return the backup of a descriptor; CorruptionError if that is damaged."""
        return fetch(self.store, key, lambda body: decode_backup(body, key))

    def manifest(self, member: BackedUp) -> Manifest:
        """Return the generation of a backup; CorruptionError if it is damaged or missing."""
        key, expected = member.manifest, member.manifest_crc32c

        def decode(body: bytes) -> Manifest:
            found = crc32c(body)
            if found != expected:
                raise corrupt(key, 0, f"the checksum is {found:08x}, expected {expected:08x}")
            return decode_manifest(body, key)

        try:
            return fetch(self.store, key, decode)
        except NotFoundError as error:
            raise missing(key) from error

    def segments(self) -> dict[str, int]:
        """List the segments: sizes by id."""
        folder = self.names.segments
        listed = self.store.list(folder)
        return {i.key.removeprefix(folder).removesuffix(".seg"): i.size for i in listed}

    def log(self, bucket: str, root: str) -> "ArchivedLog":
        """List the log of one incarnation of a namespace."""
        pieces = []
        for info in self.store.list(self.names.log(bucket, root)):
            found = piece_range(info.key)
            if found is not None and info.key == self.names.piece(bucket, root, *found):
                pieces.append(Piece(*found, info.key, info.size))
        return ArchivedLog(self.store, pieces)


class ArchivedLog:
    """The pieces of one log. Safe for threads."""

    def __init__(self, store: Store, pieces: list[Piece]) -> None:
        self._store = store
        self._guard = leaf_lock()
        self._loading = store.runtime.lock()
        self._decoded: dict[str, LogPiece] = {}
        self.pieces: list[Piece] = []
        """By their first LSN."""
        self._spans: list[tuple[int, int]] = []
        """The LSNs that are covered, without those that meet."""
        self._set(pieces)

    @property
    def last_lsn(self) -> int:
        """The highest LSN that is covered; 0 if there is none."""
        return self._spans[-1][1] if self._spans else 0

    def add(self, piece: Piece) -> None:
        """Add a piece that was just written."""
        self._set([*self.pieces, piece])

    def _set(self, pieces: list[Piece]) -> None:
        self.pieces = sorted(pieces, key=lambda piece: piece.first)
        self._spans = list(joined((piece.first, piece.last) for piece in self.pieces))

    def covers(self, lsn: int) -> bool:
        return self.reach(lsn) >= lsn

    def reach(self, first: int) -> int:
        """Return the last LSN up to which everything from `first` on is covered."""
        place = bisect_right(self._spans, first, key=lambda span: span[0]) - 1
        return max(first - 1, self._spans[place][1]) if place >= 0 else first - 1

    def chain(self, first: int, last: int) -> list[Piece]:
        """Return pieces that cover [first, last], in order; NotFoundError if an LSN is missing."""
        chain: list[Piece] = []
        best, pieces = Piece(0, 0, "", 0), iter(self.pieces)
        following, candidate = first, next(pieces, None)
        while following <= last:
            while candidate is not None and candidate.first <= following:
                best = max(best, candidate, key=lambda piece: piece.last)
                candidate = next(pieces, None)
            if best.last < following:
                raise NotFoundError(f"LSN {following} is not in the backup", lsn=following)
            chain.append(best)
            following = best.last + 1
        return chain

    def piece(self, piece: Piece) -> LogPiece:
        """Return a decoded piece; CorruptionError if it is damaged or missing."""
        with self._guard:
            known = self._decoded.get(piece.key)
        if known is not None:
            return known
        with self._loading:
            with self._guard:
                known = self._decoded.get(piece.key)
            return known or self._load(piece)

    def _load(self, piece: Piece) -> LogPiece:
        key = piece.key
        try:
            loaded = fetch(self._store, key, lambda body: decode_piece(body, key))
        except NotFoundError as error:
            raise missing(key) from error
        if (loaded.head.first, loaded.head.last) != (piece.first, piece.last):
            found = f"LSNs {loaded.head.first} to {loaded.head.last}"
            raise corrupt(key, 0, f"has {found}, expected those of its name")
        with self._guard:
            self._decoded[key] = loaded
            while len(self._decoded) > PIECES_CACHED:
                del self._decoded[next(iter(self._decoded))]
        return loaded


@dataclass(frozen=True)
class LogRange:
    """The slots [first, last] of an archived log, for one replay."""

    log: ArchivedLog
    first: int
    last: int

    @cached_property
    def chain(self) -> list[Piece]:
        return self.log.chain(self.first, self.last)

    def body(self, lsn: int) -> bytes | None:
        """Return the object of a slot; None if there is none."""
        if not self.first <= lsn <= self.last:
            return None
        place = bisect_left(self.chain, lsn, key=lambda piece: piece.last)
        return self.log.piece(self.chain[place]).bodies.get(lsn)

    def pieces(self) -> Iterator[LogPiece]:
        """Yield the pieces, decoded, in order."""
        return map(self.log.piece, self.chain)


def joined(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Join sorted spans that overlap or meet.

    >>> list(joined([(1, 5), (4, 9), (12, 13)]))
    [(1, 9), (12, 13)]
    """
    current: tuple[int, int] | None = None
    for first, last in spans:
        if current is not None and first <= current[1] + 1:
            current = current[0], max(current[1], last)
            continue
        if current is not None:
            yield current
        current = first, last
    if current is not None:
        yield current


def missing(key: str) -> CorruptionError:
    """Return the error for an object that a backup needs."""
    return CorruptionError(
        f"object {key} of the backup is missing",
        hint="Use another backup; `reef backup verify` lists those that are damaged",
        object=key,
        offset=0,
    )


class _BucketId(msgspec.Struct, frozen=True):
    id: str


def identify_bucket(store: Store) -> str:
    """Return the id of a bucket, which its first backup gives it.

    A bucket that is restored from a backup has another one: the logs of both are never mixed.
    """
    key = bucket_id()
    try:
        return fetch(store, key, _decode_id)
    except NotFoundError:
        made = _BucketId(store.runtime.ulid())
    result = store.create(key, msgspec.json.encode(made))
    if result.outcome is Outcome.CREATED:
        return made.id
    try:
        return fetch(store, key, _decode_id)
    except NotFoundError as error:
        raise UnavailableError(f"{key} could not be written", hint="Try again") from error


def _decode_id(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_BucketId).id
    except msgspec.DecodeError as error:
        raise corrupt(bucket_id(), 0, f"not the id of a bucket: {error}") from error
