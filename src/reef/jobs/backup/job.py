"""Back up a namespace, or a snapshot of the whole bucket, to another store.

    1  pin       a lease on the generation: writers, jobs and sweeps continue
    2  segments  those that the set does not have yet; on threads, or on Spark
    3  log       from the floor to its end, in pieces (`reef.jobs.backup.copying`)
    4  seal      the manifest, then the descriptor: from here on the backup exists

Segments are named by id, wherever they are stored in the source: a backup of a branch holds those
of its origin too, and both share them in one set.

The log is continued where the last backup of the namespace ended, as long as the source retains
it, so that every LSN in between can be restored as well. With `follow` it is shipped as it grows.
The lease then moves on with the head: the source retains objects for one interval, not for as long
as the backup runs. From time to time a new generation is backed up, so that a restore does not
replay more than REBASE_BYTES.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from reef.config import ReaderSettings
from reef.engine.handles.database import Database, renamed_keyword
from reef.engine.history.as_of import (
    ConcurrentSweep,
    History,
    PointInTime,
    ReadTarget,
    with_skipped,
)
from reef.engine.history.snapshots import Snapshot
from reef.engine.log.log import LogRules, SlotGone
from reef.engine.read.caches import ByteCache
from reef.engine.read.segments import SegmentStore
from reef.errors import (
    CorruptionError,
    ErrorKind,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)
from reef.formats.backup import BackedUp, Backup, StoredPiece, encode_backup
from reef.formats.coding import crc32c
from reef.formats.manifest import Manifest, SegmentEntry, encode_manifest
from reef.jobs.arguments import check_arguments, open_files
from reef.jobs.backup.archive import Archive, ArchivedLog, identify_bucket
from reef.jobs.backup.copying import TASKS_AT_ONCE, Copier, Counts, LogShipper, Tally
from reef.manifest.head import HeadFinder
from reef.manifest.invariants import total
from reef.manifest.roots import GenerationLease, narrowed, take_lease
from reef.paths import BackupNames, Namespace
from reef.runtime import Executor
from reef.stores import Meter, Outcome, Store
from reef.stores.leases import HeldLease
from reef.telemetry import operation

RESTARTS_MAX = 10
INTERVAL_S = 10.0
REBASE_BYTES = 64 << 20
"""After so many bytes of log a backup that follows backs up another generation."""
PINNED_S = 24 * 3600.0
"""Snapshots that a backup of the whole bucket takes for itself expire by then, if it dies."""
NAMES = BackupNames()


@dataclass(frozen=True, slots=True)
class BackupReport:
    """A backup, and its cost."""

    id: str
    target: str
    namespaces: tuple[BackedUp, ...]
    snapshot: str
    segments_sent: int
    segments_reused: int
    bytes_sent: int
    log_objects: int
    """Objects of logs that were sent, in `pieces` objects of the backup."""
    pieces: int
    last_lsn: int
    """Last LSN that can be restored, if there is only one namespace; otherwise 0."""
    backups: int
    """Descriptors that were written; more than one if `follow` has backed up later generations."""
    seconds: float
    requests: dict[str, Counts]
    """Requests and bytes at `source` and `target`, by kind."""

    def to_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        fields["namespaces"] = [_facts(member) for member in self.namespaces]
        return fields


def _facts(member: BackedUp) -> dict[str, Any]:
    names = ("namespace", "generation", "floor", "last_lsn", "rows", "bytes", "segments")
    return {name: getattr(member, name) for name in names}


@renamed_keyword(target_url="target")
def backup(
    db: Database,
    namespace: str | None,
    target: str | os.PathLike[str] | Store,
    *,
    as_of: Any = None,
    snapshot: Snapshot | str | None = None,
    follow: bool = False,
    until_lsn: int | None = None,
    seconds: float | None = None,
    interval_s: float = INTERVAL_S,
    executor: Executor | None = None,
) -> BackupReport:
    """Copy a namespace, with the log up to now, to another store; only new objects are sent.

    `as_of` and `snapshot` choose a past state, as for a reader. Without a namespace, all namespaces
    are copied into one backup: as they are now, or those of a snapshot of the whole bucket
    (`db.snapshot_all`), by its name. With `follow` the log is shipped every `interval_s` from then
    on, until `until_lsn` is shipped, `seconds` are over, or for ever. `executor` runs the copies,
    for instance on Spark.
    """
    check_arguments(db, executor)
    until = Until(until_lsn, seconds, interval_s)
    until.check(follow)
    _check_state(namespace, as_of, snapshot, follow)
    db._prove_store()
    run = _BackupRun(db, open_files(target), executor)
    with (
        operation(db.metrics, "backup"),
        db._working("backup", namespace or "*") as working,
    ):
        working.progress = {"segments": 0}
        if namespace is None:
            run.whole_bucket(snapshot)
        else:
            run.one_namespace(namespace, as_of, snapshot, until if follow else None)
    return run.report()


def _check_state(namespace: str | None, as_of: Any, snapshot: Any, follow: bool) -> None:
    if namespace is None and (as_of is not None or follow or isinstance(snapshot, Snapshot)):
        raise _bad(
            "a backup of a whole bucket takes snapshot=, a name, and neither as_of= nor follow="
        )
    if follow and (as_of is not None or snapshot is not None):
        raise _bad("follow=True begins with the newest state, not with as_of= or snapshot=")


@dataclass(frozen=True, slots=True)
class Until:
    """When a backup that follows the log ends."""

    lsn: int | None
    seconds: float | None
    interval_s: float

    def check(self, follow: bool) -> None:
        """Raise InvalidInputError unless these are options of a backup that follows."""
        if not follow and (self.lsn is not None or self.seconds is not None):
            raise _bad("until_lsn= and seconds= are for follow=True")
        if self.lsn is not None and (isinstance(self.lsn, bool) or self.lsn < 0):
            raise _bad(f"until_lsn={self.lsn!r} is not an LSN")
        if self.seconds is not None and not self.seconds >= 0:
            raise _bad(f"seconds={self.seconds!r} is not a number of seconds")
        if not self.interval_s > 0:
            raise _bad(f"interval_s={self.interval_s!r} is not a number of seconds")


@dataclass
class _BackupRun:
    """One call of `backup`."""

    db: Database
    target: Store
    executor: Executor | None
    tally: Tally = field(default_factory=Tally)
    sealed: list[Backup] = field(default_factory=list)
    last_lsn: int = 0

    def __post_init__(self) -> None:
        self._watch = self.db.store.runtime.stopwatch()
        self.source: Store = Meter(self.db.store, self.tally.source)
        self.archive = Archive(Meter(self.target, self.tally.target))
        self.bucket = identify_bucket(self.source)
        self.there = self.archive.segments()

    def whole_bucket(self, snapshot: Any) -> None:
        """Back up every namespace that a snapshot of the bucket has, as one backup."""
        if snapshot is not None:
            self._all_of(self.db.snapshots_all(snapshot), snapshot)
            return
        with ExitStack() as stack:
            pins = {}
            for namespace in self.db.namespaces():
                with suppress(NotFoundError):  # dropped since it was listed
                    pins[namespace] = self.db.snapshot(namespace, ttl_s=PINNED_S)
                    stack.callback(pins[namespace].release)
            self._all_of(pins, "")

    def _all_of(self, pins: dict[str, Snapshot], snapshot: str) -> None:
        backup_id, members = self.target.runtime.ulid(), []
        for number, (namespace, pin) in enumerate(sorted(pins.items())):
            heads, point = self.db._resolve_target(namespace, None, pin)
            one = _NamespaceBackup(self, heads, point)
            with one.pinned():
                members.append(one.copy(backup_id, number))
        self.seal(backup_id, members, whole_bucket=True, snapshot=snapshot)

    def one_namespace(self, namespace: str, as_of: Any, snapshot: Any, until: Until | None) -> None:
        heads, point = self.db._resolve_target(namespace, as_of, snapshot)
        one = _NamespaceBackup(self, heads, point)
        with one.pinned():
            backup_id = self.target.runtime.ulid()
            self.seal(backup_id, one.copy_all(backup_id))
            if until is not None:
                one.follow(until)
            self.last_lsn = one.shipped_lsn

    def seal(
        self,
        backup_id: str,
        members: list[BackedUp],
        *,
        whole_bucket: bool = False,
        snapshot: str = "",
    ) -> None:
        """Write the descriptor: from here on the backup exists."""
        made = Backup(
            id=backup_id,
            bucket=self.bucket,
            source=self.db.store.url,
            created_at_ms=int(self.db.store.runtime.wall_s() * 1000),
            namespaces=tuple(members),
            whole_bucket=whole_bucket,
            snapshot=snapshot,
        )
        self.db.store.runtime.reach("backup copied")
        self.put(NAMES.backup(backup_id), encode_backup(made))
        self.sealed.append(made)

    def put(self, key: str, body: bytes) -> None:
        """Create an object of a backup, under a name that no other run uses."""
        result = self.archive.store.create(key, body)
        if result.outcome is not Outcome.CREATED:
            raise UnavailableError(
                f"object {key} may not have been written", hint="Run the backup again", object=key
            ) from result.cause
        self.tally.bytes_sent += len(body)

    def copier(self, held: HeldLease[GenerationLease]) -> Copier:
        local = self.db.store.runtime
        at_once = TASKS_AT_ONCE if self.executor is None else 0
        run = self.executor or local
        return Copier(self.db.store, self.target, run, at_once, self.tally, held.check)

    def report(self) -> BackupReport:
        first, tally = self.sealed[0], self.tally
        return BackupReport(
            id=self.sealed[-1].id,
            target=self.target.url,
            namespaces=self.sealed[-1].namespaces,
            snapshot=first.snapshot,
            segments_sent=tally.segments_sent,
            segments_reused=tally.segments_reused,
            bytes_sent=tally.bytes_sent,
            log_objects=tally.log_objects,
            pieces=tally.pieces,
            last_lsn=self.last_lsn,
            backups=len(self.sealed),
            seconds=self._watch.elapsed_s(),
            requests=tally.requests(),
        )


class _NamespaceBackup:
    """Copies one namespace while a lease pins it."""

    def __init__(self, run: _BackupRun, heads: HeadFinder, target: ReadTarget) -> None:
        self._run, self._target = run, target
        self.names: Namespace = heads.names
        self._dropped = heads.found.manifest.successor is not None
        self._store = run.source
        self._log: ArchivedLog = run.archive.log(run.bucket, self.names.root)
        self._held: HeldLease[GenerationLease]
        self._shipper: LogShipper
        self._base: Manifest
        self._head: Manifest
        self._leased = 0
        """The generation that the lease pins, with all later ones."""
        self._last_lsn: int | None = None
        self._oldest: Manifest | None = None
        """Of a first backup: the oldest retained generation, if the log was folded since."""
        self._history = self._new_history()

    @property
    def shipped_lsn(self) -> int:
        """The last LSN that can be restored."""
        return self._shipper.rules.next_lsn - 1

    # --- pin ------------------------------------------------------------------------
    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Hold a lease on the generation, and on the log that continues the archive."""
        self._pin()
        try:
            yield
        finally:
            self._held.release()

    def _pin(self) -> None:
        for _ in range(RESTARTS_MAX):
            try:
                return self._pin_once()
            except ConcurrentSweep:
                self._history = self._new_history()
        raise UnavailableError(f"sweeps of {self.names.name} outran {RESTARTS_MAX} attempts")

    def _pin_once(self) -> None:
        history = self._history
        head = history.head()
        base, last_lsn = self._resolve(head)
        start = self._start(head, base)
        held = self._lease(start)
        try:
            head = history.head()  # again, now that the lease is there (H22)
            if self._target == ReadTarget():
                base, last_lsn = head, None
            history.check(head, PointInTime(start))
            history.check(head, PointInTime(base))
        except BaseException:
            held.release()
            raise
        if last_lsn is not None:  # an old state does not hold everything since (H74)
            held.narrow(**narrowed(base, last_lsn))
        self._held, self._base, self._head, self._last_lsn = held, base, head, last_lsn
        self._leased = start.generation
        is_first = self._target == ReadTarget() and not self._log.last_lsn
        self._oldest = start if is_first and start.wal_floor < base.wal_floor else None
        self._shipper = self._new_shipper(start)

    def _resolve(self, head: Manifest) -> tuple[Manifest, int | None]:
        """Return the generation to back up, and the last LSN; None: up to the end of the log."""
        if self._target == ReadTarget():
            return head, None
        return self._history.resolve(head, self._target)

    def _start(self, head: Manifest, base: Manifest) -> Manifest:
        """Return the generation from whose floor the log is read.

        An older one than is backed up, if the archive ends below its floor and the source still
        retains the log in between. The oldest one, if the archive has no log: every LSN that the
        source can still show can then be restored.
        """
        archived = self._log.last_lsn
        if self._target != ReadTarget() or (archived and base.wal_floor <= archived + 1):
            return base
        try:
            if not archived:
                return self._history.oldest(head)
            return self._history.start_of_log(head, archived)
        except (NotFoundError, CorruptionError):
            return base

    def _lease(self, manifest: Manifest) -> HeldLease[GenerationLease]:
        owner = f"backup-{self._store.runtime.process_id()}"
        ttl_s = ReaderSettings().lease_ttl_s
        held = HeldLease(take_lease(self._store, self.names, manifest, owner=owner, ttl_s=ttl_s))
        held.renew_in_background()
        return held

    def _new_history(self) -> History:
        segments = SegmentStore(self._store, self.names, ByteCache(0, self._run.db.metrics))
        return History(self._store, self.names, segments, dropped=self._dropped)

    def _new_shipper(self, start: Manifest) -> LogShipper:
        return LogShipper(
            store=self._store,
            names=self.names,
            bucket=self._run.bucket,
            archive=self._run.archive,
            log=self._log,
            copy=self._copy,
            check=self._check,
            tally=self._run.tally,
            rules=LogRules(with_skipped(start, self._head)),
            manifest=self._head,
        )

    def _check(self) -> None:
        self._held.check()

    # --- copy -----------------------------------------------------------------------
    def copy_all(self, backup_id: str) -> list[BackedUp]:
        """Copy the generation and, in a first backup, the oldest one before it."""
        if self._oldest is None:
            return [self.copy(backup_id, 0)]
        self._copy(list(self._oldest.segments))
        newest = self.copy(backup_id, 1)
        return [self._member(backup_id, 0, self._oldest), newest]

    def copy(self, backup_id: str, number: int) -> BackedUp:
        """Copy segments, log and manifest; the descriptor is the caller's."""
        self._copy(list(self._base.segments))
        self._ship(self._last_lsn)
        return self._member(backup_id, number, self._base)

    def _ship(self, last_lsn: int | None) -> None:
        try:
            self._shipper.ship(last_lsn)
        except SlotGone as gone:
            self._check()  # raises if the lease was lost, and the slot collected
            raise self._history.missing(gone.lsn, PointInTime(self._base, last_lsn)) from gone

    def _copy(self, entries: list[SegmentEntry]) -> None:
        run = self._run

        def keys(entry: SegmentEntry) -> tuple[str, str]:
            return self.names.segment(entry.id, entry.home), NAMES.segment(entry.id)

        run.copier(self._held).copy(entries, run.there, keys)

    def _member(self, backup_id: str, number: int, base: Manifest) -> BackedUp:
        """Write the manifest of a generation, and return the entry of the descriptor."""
        log = self._log
        body, key = encode_manifest(base), NAMES.manifest(backup_id, number)
        last_lsn = self.shipped_lsn if self._last_lsn is None else self._last_lsn
        folded_s = self._history.folded_at_ms(with_skipped(base, self._head))
        self._check()
        self._run.put(key, body)
        pieces = log.chain(base.wal_floor, last_lsn)
        return BackedUp(
            namespace=self.names.name,
            root=self.names.root,
            generation=base.generation,
            floor=base.wal_floor,
            last_lsn=last_lsn,
            floor_at_ms=None if folded_s == float("inf") else int(folded_s),
            covered_ms=self._covered_ms,
            manifest=key,
            manifest_size=len(body),
            manifest_crc32c=crc32c(body),
            set_hash=str(total(base.segments)),
            rows=sum(entry.rows for entry in base.segments),
            bytes=sum(entry.size for entry in base.segments),
            segments=len(base.segments),
            pieces=tuple(StoredPiece(piece.key, piece.size) for piece in pieces),
        )

    @property
    def _covered_ms(self) -> int:
        return self._shipper.covered_ms if self._last_lsn is None else 0

    # --- follow ---------------------------------------------------------------------
    def follow(self, until: Until) -> None:
        """Ship the log as it grows, until the given LSN is shipped or the time is over."""
        runtime = self._store.runtime
        watch = runtime.stopwatch()
        while until.lsn is None or self.shipped_lsn < until.lsn:
            left_s = None if until.seconds is None else until.seconds - watch.elapsed_s()
            if left_s is not None and left_s <= 0:
                return
            runtime.sleep(until.interval_s if left_s is None else min(until.interval_s, left_s))
            self.step()

    def step(self) -> None:
        """Ship later commits, move the lease to the head, and back up a generation if due."""
        head = self._history.head()
        if with_skipped(self._head, head) != self._head:  # a repair has decided about the log
            self._restart(head)
        self._head = self._shipper.manifest = head
        self._ship(None)
        if head.generation != self._leased and self._move_lease(head):
            self._leased = head.generation
            if self._shipper.log_bytes >= REBASE_BYTES:
                self._rebase(head)

    def _restart(self, head: Manifest) -> None:
        """Replay the log again, with the decisions of a repair."""
        self._head = head
        start = self._history.start_of_log(head, self.shipped_lsn)
        self._shipper = self._new_shipper(start)

    def _move_lease(self, head: Manifest) -> bool:
        """Lease the head instead of an older generation, whose lease is released last.

        False if a sweep has been faster: the older lease is still held.
        """
        held = self._lease(head)
        try:
            self._history.check(self._history.head(), PointInTime(head))
        except BaseException as error:
            held.release()
            if isinstance(error, ConcurrentSweep):
                return False
            raise
        self._check()
        self._held, older = held, self._held
        older.release()
        return True

    def _rebase(self, head: Manifest) -> None:
        """Back up another generation, so that a restore replays less of the log."""
        self._base = head
        backup_id = self._run.target.runtime.ulid()
        self._copy(list(head.segments))
        self._run.seal(backup_id, [self._member(backup_id, 0, head)])
        self._shipper.log_bytes = 0


def _bad(message: str) -> InvalidInputError:
    return InvalidInputError(message, kind=ErrorKind.INVALID_OPTION)
