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

The state to restore is one generation, and the log up to one LSN:

    no position   the backup that reaches furthest, up to its end
    lsn=n         the newest backup with a floor of at most n + 1, and the log up to n
    time=t        the newest backup that has folded nothing created after t, and the log up to the
                  first object that was created after t

The same rules as for time travel in the source (`reef.engine.history.as_of`).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import msgspec

from reef.engine.history.as_of import ReadTarget, read_target
from reef.errors import (
    CorruptionError,
    ErrorKind,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)
from reef.formats.backup import BackedUp, Backup, LogPiece, decode_backup, decode_piece
from reef.formats.coding import corrupt, crc32c
from reef.formats.manifest import Manifest, decode_manifest
from reef.paths import BackupNames, bucket_id, piece_range
from reef.runtime import leaf_lock
from reef.stores import Outcome, Store, fetch

PIECES_CACHED = 4
"""Decoded pieces in memory; a replay reads them in order."""


@dataclass(frozen=True, slots=True)
class ArchivePiece:
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
                raise corrupt(key, 0, f"expected checksum {expected:08x}, found {found:08x}")
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
                pieces.append(ArchivePiece(*found, info.key, info.size))
        return ArchivedLog(self.store, pieces)


class ArchivedLog:
    """The pieces of one log. Safe for threads."""

    def __init__(self, store: Store, pieces: list[ArchivePiece]) -> None:
        self._store = store
        self._guard = leaf_lock()
        self._loading = store.runtime.lock()
        self._decoded: dict[str, LogPiece] = {}
        self.pieces: list[ArchivePiece] = []
        """By their first LSN."""
        self._spans: list[tuple[int, int]] = []
        """The LSNs that are covered, without those that meet."""
        self._set(pieces)

    @property
    def last_lsn(self) -> int:
        """The highest LSN that is covered; 0 if there is none."""
        return self._spans[-1][1] if self._spans else 0

    def add(self, piece: ArchivePiece) -> None:
        """Add a piece that was just written."""
        self._set([*self.pieces, piece])

    def _set(self, pieces: list[ArchivePiece]) -> None:
        self.pieces = sorted(pieces, key=lambda piece: piece.first)
        self._spans = list(joined((piece.first, piece.last) for piece in self.pieces))

    def covers(self, lsn: int) -> bool:
        return self.reach(lsn) >= lsn

    def reach(self, first: int) -> int:
        """Return the last LSN up to which everything from `first` on is covered."""
        place = bisect_right(self._spans, first, key=lambda span: span[0]) - 1
        return max(first - 1, self._spans[place][1]) if place >= 0 else first - 1

    def chain(self, first: int, last: int) -> list[ArchivePiece]:
        """Return pieces that cover [first, last], in order; NotFoundError if an LSN is missing."""
        chain: list[ArchivePiece] = []
        best, pieces = ArchivePiece(0, 0, "", 0), iter(self.pieces)
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

    def piece(self, piece: ArchivePiece) -> LogPiece:
        """Return a decoded piece; CorruptionError if it is damaged or missing."""
        with self._guard:
            known = self._decoded.get(piece.key)
        if known is not None:
            return known
        with self._loading:
            with self._guard:
                known = self._decoded.get(piece.key)
            return known or self._load(piece)

    def _load(self, piece: ArchivePiece) -> LogPiece:
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
    def chain(self) -> list[ArchivePiece]:
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
    """Return the id of a bucket, assigned by its first backup.

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


@dataclass(frozen=True, slots=True)
class BackupCandidate:
    """A namespace in a backup."""

    backup: Backup
    member: BackedUp


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """The state to restore."""

    backup: Backup
    member: BackedUp
    lsn: int
    log: LogRange


def position(lsn: int | None, time: Any) -> ReadTarget:
    """Return the requested position; InvalidInputError if two are given or one is invalid."""
    if lsn is not None and time is not None:
        raise InvalidInputError(
            "lsn= and time= both name a point in time", kind=ErrorKind.INVALID_OPTION
        )
    if lsn is None and time is None:
        return ReadTarget()
    return read_target({"lsn": lsn} if time is None else {"time": time})


def candidates(
    archive: Archive, name: str, namespace: str | None, backup: str | None
) -> tuple[list[BackupCandidate], ArchivedLog]:
    """Return the backups to restore `name` from, oldest first, and their log.

    They are of one incarnation of `namespace`: that of the newest backup, or of the one that is
    named. By default it is the namespace of the same name, or the only one that has backups.
    """
    members = [
        BackupCandidate(one, member) for one in archive.backups() for member in one.namespaces
    ]
    names = {one.member.namespace for one in members}
    if namespace is None:
        namespace = name if name in names or len(names) != 1 else names.pop()
    every = [one for one in members if one.member.namespace == namespace]
    chosen = [one for one in every if backup in (None, one.backup.id, one.backup.snapshot or None)]
    if not chosen:
        which = "" if backup is None else f" {backup}"
        known = ", ".join(sorted({one.backup.id for one in every})) or "none"
        raise NotFoundError(
            f"{archive.store.url} has no backup{which} of {namespace}; there are: {known}",
            hint="`reef backup list` shows all of them",
            namespace=namespace,
        )
    source = _source(chosen[-1])
    same = [one for one in every if _source(one) == source]
    return (same if backup is None else chosen[-1:]), archive.log(*source)


def _source(one: BackupCandidate) -> tuple[str, str]:
    return one.backup.bucket, one.member.root


def choose(
    found: list[BackupCandidate], log: ArchivedLog, target: ReadTarget, *, exact: bool = False
) -> RestorePoint:
    """Return the state of a target; NotFoundError if the backups do not cover it.

    `exact`: without a position, the state that was backed up, without the log shipped since.
    """
    if target.lsn is not None:
        return _at_lsn(found, log, target.lsn)
    if target.until_ms is not None:
        return _at_time(found, log, target.until_ms)
    if exact:
        return _point(found[-1], log, found[-1].member.last_lsn)
    best = max(found, key=lambda one: (log.reach(one.member.floor), one.member.floor))
    return _point(best, log, max(log.reach(best.member.floor), best.member.last_lsn))


def _point(one: BackupCandidate, log: ArchivedLog, lsn: int) -> RestorePoint:
    log_range = LogRange(log, one.member.floor, lsn)
    return RestorePoint(one.backup, one.member, lsn, log_range)


def _at_lsn(found: list[BackupCandidate], log: ArchivedLog, lsn: int) -> RestorePoint:
    fitting = [one for one in found if one.member.floor - 1 <= lsn <= log.reach(one.member.floor)]
    if not fitting:
        raise NotFoundError(
            f"the backups do not cover LSN {lsn} of {found[0].member.namespace}; "
            f"they cover {_ranges(found, log)}",
            kind=ErrorKind.NOT_FOUND,
            lsn=lsn,
        )
    return _point(max(fitting, key=_age), log, lsn)


def _age(one: BackupCandidate) -> tuple[int, int]:
    return one.member.floor, one.member.generation


def _at_time(found: list[BackupCandidate], log: ArchivedLog, until_ms: int) -> RestorePoint:
    fitting = [
        one
        for one in found
        if one.member.floor_at_ms is not None and one.member.floor_at_ms <= until_ms
    ]
    for one in sorted(fitting, key=_age, reverse=True):
        last = _last_before(found, one, log, until_ms)
        if last is not None:
            return _point(one, log, last)
    raise NotFoundError(
        f"the backups of {found[0].member.namespace} do not cover {_shown(until_ms)}; they cover "
        f"{', '.join(_times(found, log)) or 'no range of time'}",
        kind=ErrorKind.NOT_FOUND,
        hint="Without a time, the newest state that is covered is restored",
    )


def _last_before(
    found: list[BackupCandidate], one: BackupCandidate, log: ArchivedLog, until_ms: int
) -> int | None:
    """Return the last LSN before a time; None if the backups end before it.

    A later object shows that it is the last one; so does the time at which the end of the log was
    listed.
    """
    floor = one.member.floor
    last, end = floor - 1, log.reach(floor)
    covered_ms = _listed_ms(found, floor, end)
    for piece in LogRange(log, floor, end).pieces():
        covered_ms = max(covered_ms, piece.head.covered_ms)
        for slot in piece.head.slots:
            if slot.lsn > last and slot.created_at_ms > until_ms:
                return last
            last = max(last, slot.lsn)
    return end if until_ms <= covered_ms else None


def _listed_ms(found: list[BackupCandidate], floor: int, end: int) -> int:
    """Return when a backup has listed the end of the log, up to an LSN."""
    ends = [one.member.covered_ms for one in found if floor - 1 <= one.member.last_lsn <= end]
    return max(ends, default=0)


def _ranges(found: list[BackupCandidate], log: ArchivedLog) -> str:
    """Return the LSNs that can be restored, as text."""
    spans = sorted({(one.member.floor - 1, log.reach(one.member.floor)) for one in found})
    return ", ".join(f"{first} to {last}" for first, last in joined(spans))


def _times(found: list[BackupCandidate], log: ArchivedLog) -> Iterator[str]:
    for one in found:
        start = one.member.floor_at_ms
        end = _listed_ms(found, one.member.floor, log.reach(one.member.floor))
        if start is not None and end:
            yield f"{_shown(start)} to {_shown(end)}"


def _shown(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds")
