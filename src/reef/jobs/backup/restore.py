"""Restore a namespace from a backup, at any LSN or time that is covered.

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
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from reef.config import FoldSettings
from reef.engine.context import NamespaceContext
from reef.engine.handles.database import Database, renamed_keyword
from reef.engine.log.log import LogRules, Verdict, replay_headers
from reef.engine.log.tail import ingested_segments
from reef.engine.namespaces import Namespaces
from reef.errors import CorruptionError, ErrorKind, InvalidInputError, NotFoundError
from reef.formats.coding import corrupt
from reef.formats.manifest import Manifest, SegmentEntry, encode_manifest
from reef.formats.schema import Schema
from reef.formats.segment import SetHash
from reef.formats.wal_object import WalHeader, WalKind, WalObject
from reef.jobs.arguments import check_arguments, open_files
from reef.jobs.backup.archive import Archive, LogRange, RestorePoint, candidates, choose, position
from reef.jobs.backup.copying import TASKS_AT_ONCE, Copier, Counts, Tally
from reef.jobs.fold.task import FoldTask, run_fold_task, write_trace
from reef.jobs.verify.chain import ProblemKind
from reef.jobs.verify.objects import check_segments
from reef.manifest import edits
from reef.manifest.branching import RESTORED_LSNS, restored_manifest
from reef.manifest.edits import without_centroids
from reef.manifest.invariants import is_balanced, total
from reef.paths import BackupNames, Namespace, number_of
from reef.runtime import Executor
from reef.stores import Meter, Store, Wrapper
from reef.stores.base import Tagged
from reef.telemetry import operation

NAMES = BackupNames()


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
