"""Use the backups of a set: list them, check every object that they need, restore a namespace.

**Verify** reads these objects, or checks that they are stored:

    descriptors   the checksum of each
    manifests     the checksum of each, and the sum of the set hashes
    logs          every piece is read: its checksum, and that of every object in it
    segments      present with their size; deep: every block, and the set hash

Objects that no backup needs are reported as orphans: a backup that was interrupted leaves them, and
the next one uses them. Nothing is deleted here.

**Restore** makes a namespace from a backup, at any LSN or time that is covered:

    1  choose   a backup, and the log up to one LSN (`reef.jobs.backup.archive`)
    2  copy     its segments, and those of loads in the log, into the folder of the new namespace
    3  fold     the log from the floor to the LSN into segments, by the fold's own task
    4  check    every block of every segment, and the set hashes
    5  create   the first manifest: from here on the namespace exists

Before step 5 there are only segments that no manifest names. A restore that is repeated after a
crash finds those of step 2 by name and size, and does not copy them again.

The log itself is not restored. LSNs, epochs and write ids of the source would otherwise be valid in
both; the restored log begins far behind them (`reef.manifest.branching.restored_manifest`).
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from reef.config import FoldSettings
from reef.engine.context import NamespaceContext
from reef.engine.handles.database import Database, renamed_keyword
from reef.engine.log.log import LogRules, Verdict, replay_headers
from reef.engine.log.tail import ingested_segments
from reef.engine.namespaces import Namespaces
from reef.errors import (
    CorruptionError,
    ErrorKind,
    InvalidInputError,
    NotFoundError,
    UnsupportedFormatError,
)
from reef.formats.backup import BackedUp, Backup
from reef.formats.coding import corrupt
from reef.formats.manifest import Manifest, SegmentEntry, encode_manifest
from reef.formats.schema import Schema
from reef.formats.segment import SetHash
from reef.formats.wal_object import WalHeader, WalKind, WalObject
from reef.jobs.arguments import check_arguments, check_executor, open_files
from reef.jobs.backup.archive import (
    Archive,
    ArchivedLog,
    ArchivePiece,
    BackupCandidate,
    LogRange,
    RestorePoint,
    candidates,
    choose,
    position,
)
from reef.jobs.backup.copying import TASKS_AT_ONCE, Copier, Counts, Tally
from reef.jobs.fold.task import FoldTask, run_fold_task, write_trace
from reef.jobs.verify.chain import ProblemKind
from reef.jobs.verify.objects import check_segments
from reef.manifest import edits
from reef.manifest.branching import RESTORED_LSNS, restored_manifest
from reef.manifest.edits import without_centroids
from reef.manifest.invariants import is_balanced, total
from reef.paths import BACKUP_DATA, BackupNames, Namespace, number_of
from reef.runtime import Executor
from reef.stores import Meter, Store, Wrapper
from reef.stores.base import Tagged
from reef.telemetry import operation

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


@dataclass(frozen=True, slots=True)
class RestoredNamespace:
    """A namespace that was restored."""

    name: str
    namespace: str
    """Its name in the source."""
    backup: str
    lsn: int
    """The last LSN of the source that it has."""
    first_lsn: int
    """The first LSN of its own log."""
    segments: int
    rows: int
    """Versions in its segments, deletes among them."""
    bytes: int
    log_objects: int
    """Objects of the source's log that were folded."""


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """The namespaces of a restore, and its cost."""

    source: str
    namespaces: tuple[RestoredNamespace, ...]
    segments_sent: int
    segments_reused: int
    """Found in place, left there by a restore that was interrupted."""
    bytes_sent: int
    verified: bool
    seconds: float
    requests: dict[str, Counts]
    """Requests and bytes at `source`, the backup, and `target`, the database; by kind."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@renamed_keyword(target_url="source")
def restore(
    source: str | os.PathLike[str] | Store,
    db: Database,
    name: str | None = None,
    *,
    namespace: str | None = None,
    backup: str | None = None,
    lsn: int | None = None,
    time: Any = None,
    verify: bool = True,
    executor: Executor | None = None,
) -> RestoreReport:
    """Create the namespace `name` from the backups of `namespace`.

    That is by default the one of the same name, or the only one that the backups have.
    Without `lsn` and `time` it gets the newest state that is covered, or, with `backup`, the state
    of that backup, which is given by its id or the name of its snapshot. Without a name, all
    namespaces of a backup of a whole bucket are restored, under their names. With `verify` every
    block is read again, and the set hashes are compared, before the namespace is created.
    ConflictError if a namespace of that name exists; a dropped one is replaced.
    """
    check_arguments(db, executor)
    target = position(lsn, time)
    if name is None and (namespace is not None or lsn is not None or time is not None):
        raise InvalidInputError(
            "namespace=, lsn= and time= need the name of the namespace to create",
            kind=ErrorKind.INVALID_OPTION,
        )
    for given in (name, namespace):
        if given is not None:
            Namespace(given)  # raises if it is not the name of one
    db._prove_store()
    run = _RestoreRun(db, open_files(source), executor, verify)
    with operation(db.metrics, "restore"), db._working("restore", name or "*"):
        if name is None:
            done = tuple(run.whole_bucket(backup))
        else:
            found, log = candidates(run.archive, name, namespace, backup)
            point = choose(found, log, target, exact=backup is not None)
            done = (run.restore(point, name),)
    return run.report(done)


@dataclass
class _RestoreRun:
    """One call of `restore`."""

    db: Database
    source: Store
    executor: Executor | None
    verify: bool
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        self._watch = self.db.store.runtime.stopwatch()
        self.archive = Archive(Meter(self.source, self.tally.source))
        self.store: Store = Meter(self.db.store, self.tally.target)
        self._namespaces = Namespaces(self.store, self.db.metrics, self.db._registry)

    def whole_bucket(self, backup: str | None) -> Iterator[RestoredNamespace]:
        """Restore all namespaces of a backup; those names must be free before the first one is."""
        every = [one for one in self.archive.backups() if one.whole_bucket]
        chosen = [one for one in every if backup is None or backup in (one.id, one.snapshot)]
        if not chosen:
            raise NotFoundError(
                f"{self.source.url} has no backup of a whole bucket"
                + ("" if backup is None else f" named {backup}"),
                hint="`reef backup list` shows all backups",
            )
        for member in chosen[-1].namespaces:
            self._namespaces.free_names(member.namespace)
        for member in chosen[-1].namespaces:
            found, log = candidates(self.archive, member.namespace, member.namespace, chosen[-1].id)
            yield self.restore(
                choose(found, log, position(None, None), exact=True), member.namespace
            )

    def restore(self, point: RestorePoint, name: str) -> RestoredNamespace:
        """Restore one namespace."""
        names = self._namespaces.free_names(name)
        scanned = _scan(point.log, names)
        state = self._state(point, scanned)
        self._copy([*state.segments, *scanned.ingested(state, names)], names)
        state = self._fold_log(state, point, scanned, names)
        state = self._with_trace(state, names)
        self._check(state, names)
        self.store.runtime.reach("restore copied")
        now_ms = int(self.store.runtime.wall_s() * 1000)
        first = self._namespaces.create_restored(name, names, restored_manifest(state, now_ms))
        return RestoredNamespace(
            name=name,
            namespace=point.member.namespace,
            backup=point.backup.id,
            lsn=point.lsn,
            first_lsn=first.wal_base,
            segments=len(first.segments),
            rows=sum(entry.rows for entry in first.segments),
            bytes=sum(entry.size for entry in first.segments),
            log_objects=len(scanned.headers),
        )

    # --- the generation -------------------------------------------------------------
    def _state(self, point: RestorePoint, scanned: "_ScannedLog") -> Manifest:
        """Return the generation of a backup as one of the new namespace."""
        base = self.archive.manifest(point.member)
        found, expected = total(base.segments), SetHash.parse(point.member.set_hash)
        if found != expected:
            raise corrupt(point.member.manifest, 0, f"expected set hash {expected}, found {found}")
        schemas = max(base.schemas, scanned.schemas, key=len)
        if schemas[: len(base.schemas)] != base.schemas:
            raise corrupt(point.member.manifest, 0, "its schemas are not those of the log")
        return msgspec.structs.replace(
            base,
            schemas=schemas,
            segments=tuple(msgspec.structs.replace(s, home=None) for s in base.segments),
            skipped_lsns=tuple(sorted({*base.skipped_lsns, *scanned.skipped})),
            ingests_without_begin=tuple(
                sorted({*base.ingests_without_begin, *scanned.without_begin})
            ),
            inherited=(),
            condemned=(),
            condemned_ranges=(),
            indexes=without_centroids(base.indexes),
        )

    def _copy(self, entries: list[SegmentEntry], names: Namespace) -> None:
        folder = names.segments
        listed = self.store.list(folder)
        there = {i.key.removeprefix(folder).removesuffix(".seg"): i.size for i in listed}

        def keys(entry: SegmentEntry) -> tuple[str, str]:
            return NAMES.segment(entry.id), names.segment(entry.id)

        at_once = TASKS_AT_ONCE if self.executor is None else 0
        run = self.executor or self.db.store.runtime
        copier = Copier(self.source, self.db.store, run, at_once, self.tally)
        copier.copy(entries, there, keys)

    # --- the log --------------------------------------------------------------------
    def _fold_log(
        self, state: Manifest, point: RestorePoint, scanned: "_ScannedLog", names: Namespace
    ) -> Manifest:
        """Fold the log up to the chosen LSN, in rounds of bounded size."""
        settings = FoldSettings()
        for end in scanned.rounds(point.log, settings.log_bytes):
            view = _LogView(self.store, names, state, point.log)
            task = FoldTask(view, names, state.generation, settings, end)
            folded = edits.fold(state, run_fold_task(task).result)
            if folded is None or folded.wal_floor != end:
                raise CorruptionError(
                    f"LSN {state.wal_floor} of {point.member.namespace} has an unknown schema",
                    object=point.member.manifest,
                    offset=0,
                )
            state = folded
        return state

    def _with_trace(self, state: Manifest, names: Namespace) -> Manifest:
        """Add an empty segment that covers the LSNs which are left out.

        Without manifests, a rebuild would otherwise take them for lost ones (H49).
        """
        end = state.wal_floor + RESTORED_LSNS
        task = FoldTask(self.store, names, state.generation, FoldSettings(), end)
        trace = write_trace(task, state, ())
        return msgspec.structs.replace(state, segments=(*state.segments, *trace))

    # --- the check ------------------------------------------------------------------
    def _check(self, state: Manifest, names: Namespace) -> None:
        if not is_balanced(state):
            raise CorruptionError(f"the set hashes of {names.name} do not add up")
        if self.verify:
            context = NamespaceContext(self.store, names)
            run = self.executor or self.db.store.runtime
            for problem in check_segments(run, context, state.segments, deep=True):
                if problem.kind is ProblemKind.INDEX_DAMAGED:
                    continue  # derived from the rows, which are intact
                raise CorruptionError(
                    f"restored object {problem.object}: {problem.message}",
                    object=problem.object,
                    offset=problem.offset or 0,
                )

    def report(self, done: tuple[RestoredNamespace, ...]) -> RestoreReport:
        tally = self.tally
        return RestoreReport(
            source=self.source.url,
            namespaces=done,
            segments_sent=tally.segments_sent,
            segments_reused=tally.segments_reused,
            bytes_sent=tally.bytes_sent,
            verified=self.verify,
            seconds=self._watch.elapsed_s(),
            requests=tally.requests(),
        )


@dataclass(slots=True)
class _ScannedLog:
    """The headers of the log, and the facts that its pieces have about it."""

    last: int
    headers: dict[int, WalHeader] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    schemas: tuple[Schema, ...] = ()
    skipped: set[int] = field(default_factory=set)
    without_begin: set[int] = field(default_factory=set)

    def ingested(self, state: Manifest, names: Namespace) -> list[SegmentEntry]:
        """Return the segments of the loads that count."""
        rules, entries = LogRules(state), list[SegmentEntry]()
        for header, verdict in replay_headers(rules, self.headers, end=self.last + 1):
            if verdict is Verdict.APPLIES and header.kind is WalKind.INGEST:
                entries += ingested_segments(header, state.schema, names)
        if rules.next_lsn <= self.last:
            raise CorruptionError(
                f"LSN {rules.next_lsn} is missing in the pieces of the backup", lsn=rules.next_lsn
            )
        return entries

    def rounds(self, log: LogRange, bytes_max: int) -> Iterator[int]:
        """Yield the ends of the rounds of a fold, each of at most so many bytes or one object."""
        size, first = 0, log.first
        for lsn in range(log.first, log.last + 1):
            length = self.sizes.get(lsn, 0)
            if lsn > first and size + length > bytes_max:
                yield lsn
                size, first = 0, lsn
            size += length
        if first <= log.last:
            yield log.last + 1


def _scan(log: LogRange, names: Namespace) -> _ScannedLog:
    """Read the pieces of a log once."""
    found = _ScannedLog(log.last)
    for piece in log.pieces():
        found.schemas = max(found.schemas, piece.head.schemas, key=len)
        found.skipped.update(piece.head.skipped)
        found.without_begin.update(piece.head.ingests_without_begin)
        for lsn, body in piece.bodies.items():
            if log.first <= lsn <= log.last:
                found.headers[lsn] = WalObject.decode(body, names.wal_object(lsn)).header
                found.sizes[lsn] = len(body)
    return found


class _LogView(Wrapper):
    """The bucket of a restored namespace, with the manifest and the log of the backup in it.

    The fold's task reads both as it would in the source, and segments where they were copied to.
    """

    def __init__(self, inner: Store, names: Namespace, state: Manifest, log: LogRange) -> None:
        super().__init__(inner)
        self._names, self._log, self._state = names, log, state

    def get_tagged(self, key: str) -> Tagged:
        if key == self._names.manifest(self._state.generation):
            return Tagged(encode_manifest(self._state), None)
        if key.startswith(self._names.wal):
            body = self._log.body(number_of(key) or 0)
            if body is None:
                raise NotFoundError(f"object {key} is not in the backup", object=key)
            return Tagged(body, None)
        return self.inner.get_tagged(key)
