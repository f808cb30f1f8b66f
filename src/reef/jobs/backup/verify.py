"""List the backups of a set, and check every object that they need.

    descriptors   the checksum of each
    manifests     the checksum of each, and the sum of the set hashes
    logs          every piece is read: its checksum, and that of every object in it
    segments      present with their size; deep: every block, and the set hash

Objects that no backup needs are reported as orphans: a backup that was interrupted leaves them, and
the next one uses them. Nothing is deleted here.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from reef.engine.context import NamespaceContext
from reef.engine.log.log import LogRules, Verdict, replay_headers
from reef.engine.log.tail import ingested_segments
from reef.errors import CorruptionError, UnsupportedFormatError
from reef.formats.backup import BackedUp, Backup
from reef.formats.manifest import Manifest, SegmentEntry
from reef.formats.segment import SetHash
from reef.formats.wal_object import WalKind, WalObject
from reef.jobs.arguments import check_executor, open_files
from reef.jobs.backup.archive import Archive, ArchivedLog, ArchivePiece, BackupCandidate, LogRange
from reef.jobs.verify.objects import check_segments
from reef.manifest.invariants import total
from reef.paths import BACKUP_DATA, BackupNames, Namespace
from reef.runtime import Executor
from reef.stores import Store

NAMES = BackupNames()
CHECKED_AS = Namespace("backup")
"""Segments of a set are checked as if they had another home than this namespace."""


@dataclass(frozen=True, slots=True)
class BackupProblem:
    """A damaged or missing object."""

    object: str
    message: str
    backup: str = ""
    """A backup that needs it; others may need it too."""


@dataclass(slots=True)
class BackupCheck:
    """The result of `verify_backup`."""

    source: str
    deep: bool
    backups: int = 0
    segments: int = 0
    pieces: int = 0
    bytes: int = 0
    problems: list[BackupProblem] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    """Objects that no backup needs."""

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def list_backups(source: str | os.PathLike[str] | Store) -> list[Backup]:
    """Return the complete backups of a set, oldest first."""
    return Archive(open_files(source)).backups()


def verify_backup(
    source: str | os.PathLike[str] | Store,
    *,
    deep: bool = False,
    executor: Executor | None = None,
) -> BackupCheck:
    """Check all objects of a backup set; with `deep` every block of every segment."""
    check_executor(executor)
    store = open_files(source)
    check = _Check(Archive(store), BackupCheck(store.url, deep), executor or store.runtime)
    check.run()
    return check.report


@dataclass
class _Check:
    archive: Archive
    report: BackupCheck
    executor: Executor

    def __post_init__(self) -> None:
        self.needed: dict[str, tuple[SegmentEntry, str]] = {}
        """Segments by id, each with a backup that needs it."""
        self.known: set[str] = set()
        """Keys of other objects that some backup needs."""

    def run(self) -> None:
        sizes = self.archive.segments()
        sources: dict[tuple[str, str], list[BackupCandidate]] = {}
        for backup in self._backups():
            for member in backup.namespaces:
                found = sources.setdefault((backup.bucket, member.root), [])
                found.append(BackupCandidate(backup, member))
        for source, found in sorted(sources.items()):
            self._source(self.archive.log(*source), found)
        self._segments(sizes)
        self._orphans(sizes)

    def _source(self, log: ArchivedLog, found: list[BackupCandidate]) -> None:
        """Check the log of one namespace, and all backups of it."""
        skipped: set[int] = set()
        for piece in log.pieces:
            self._piece(log, piece, skipped)
        replayed = 0
        for one in sorted(found, key=lambda one: one.member.floor):
            manifest = self._manifest(one, log)
            if manifest is None or one.member.floor <= replayed:
                continue  # verdicts are the same from whichever generation the log is replayed
            skipped.update(manifest.skipped_lsns)
            manifest = msgspec.structs.replace(manifest, skipped_lsns=tuple(sorted(skipped)))
            replayed = log.reach(one.member.floor)
            with suppress(CorruptionError, UnsupportedFormatError):  # reported by the piece
                self._add_needed(_ingested_segments(manifest, log, replayed), one.backup.id)

    def _add_needed(self, entries: Iterable[SegmentEntry], backup_id: str) -> None:
        for entry in entries:
            self.needed.setdefault(entry.id, (entry, backup_id))

    # --- descriptors and manifests ----------------------------------------------------
    def _backups(self) -> Iterator[Backup]:
        for info in self.archive.store.list(NAMES.backups):
            try:
                backup = self.archive.backup_at(info.key)
            except (CorruptionError, UnsupportedFormatError) as error:
                self._problem(info.key, error.message)
                continue
            self.report.backups += 1
            yield backup

    def _manifest(self, one: BackupCandidate, log: ArchivedLog) -> Manifest | None:
        """Check the generation of a backup; None if it cannot be read."""
        member, backup_id = one.member, one.backup.id
        self.known.add(member.manifest)
        self._missing_pieces(one.backup, member, log)
        try:
            manifest = self.archive.manifest(member)
        except (CorruptionError, UnsupportedFormatError) as error:
            self._problem(member.manifest, error.message, backup_id)
            return None
        found, expected = total(manifest.segments), SetHash.parse(member.set_hash)
        if found != expected:
            message = f"expected set hash {expected}, found {found}"
            self._problem(member.manifest, message, backup_id)
        self._add_needed(manifest.segments, backup_id)
        return manifest

    def _missing_pieces(self, backup: Backup, member: BackedUp, log: ArchivedLog) -> None:
        """Compare the pieces of a generation with the listing; two may have the same ones."""
        sizes = {piece.key: piece.size for piece in log.pieces}
        for piece in member.pieces:
            found = sizes.get(piece.key)
            if found is None:
                self._problem(piece.key, f"object {piece.key} is missing", backup.id)
            elif found != piece.size:
                message = f"object {piece.key}: expected {piece.size} bytes, found {found}"
                self._problem(piece.key, message, backup.id)

    # --- logs -------------------------------------------------------------------------
    def _piece(self, log: ArchivedLog, piece: ArchivePiece, skipped: set[int]) -> None:
        """Read a piece, and every object in it."""
        self.known.add(piece.key)
        self.report.pieces += 1
        self.report.bytes += piece.size
        try:
            loaded = log.piece(piece)
            for body in loaded.bodies.values():
                WalObject.decode(body, piece.key)
        except (CorruptionError, UnsupportedFormatError) as error:
            self._problem(piece.key, error.message)
            return
        skipped.update(loaded.head.skipped)

    # --- segments ---------------------------------------------------------------------
    def _segments(self, sizes: dict[str, int]) -> None:
        """Check sizes by the listing; deep, every block of those that are there."""
        there = []
        for entry, backup_id in self.needed.values():
            key, found = NAMES.segment(entry.id), sizes.get(entry.id)
            self.report.segments += 1
            self.report.bytes += entry.size
            if found is None:
                self._problem(key, f"object {key} is missing", backup_id)
            elif found != entry.size:
                message = f"object {key}: expected {entry.size} bytes, found {found}"
                self._problem(key, message, backup_id)
            else:
                there.append(msgspec.structs.replace(entry, home=BACKUP_DATA))
        if self.report.deep:
            context = NamespaceContext(self.archive.store, CHECKED_AS)
            for problem in check_segments(self.executor, context, there, deep=True):
                _, backup_id = self.needed[problem.segment or ""]
                self._problem(problem.object, problem.message, backup_id)

    def _orphans(self, sizes: dict[str, int]) -> None:
        orphans = [NAMES.segment(one) for one in sizes if one not in self.needed]
        for folder in (NAMES.manifests, NAMES.logs):
            listed = self.archive.store.list(folder)
            orphans += [info.key for info in listed if info.key not in self.known]
        self.report.orphans = sorted(orphans)

    def _problem(self, key: str, message: str, backup_id: str = "") -> None:
        problem = BackupProblem(key, message, backup_id)
        if problem not in self.report.problems:  # of a piece that two generations have
            self.report.problems.append(problem)


def _ingested_segments(manifest: Manifest, log: ArchivedLog, last: int) -> Iterator[SegmentEntry]:
    """Yield the segments of the loads in the log of a generation, up to an LSN."""
    rules = LogRules(manifest, disputes={})
    for piece in LogRange(log, manifest.wal_floor, last).pieces():
        headers = {n: WalObject.decode(body, str(n)).header for n, body in piece.bodies.items()}
        for header, verdict in replay_headers(rules, headers, end=piece.head.last + 1):
            if verdict is Verdict.APPLIES and header.kind is WalKind.INGEST:
                yield from ingested_segments(header, manifest.schema, CHECKED_AS)
