"""Open a writer with a local log, and report the pending batches of one (protocols §11).

1. Open the log, exclusively. Check its identity, and read its batches.
2. If it has batches that are not known to be in the bucket, no other writer may have had the role
   since, and no copy of this log. Otherwise read the bucket's log: batches that are not there are
   applied only on request (`reapply`). They stay on the disk, and FencedError says so; its kind is
   `log_forked` if a copy has committed other entries with the same numbers (H71). A bucket that
   does not know the log is another one, or was rebuilt: then its batches are applied only on
   request, and only to the bucket that it was last used with.
3. Store a new life in the log, and acquire the role with it (`open_writer`). The same publish makes
   the log's stream known to the namespace, and checks again that no other writer came in between.
4. Record in the log that it is known. Only then does it accept batches.
5. After the fences no write of an earlier life can land any more. So the position that the replay
   has reached is exact: entries up to it are in the bucket, later entries are not (H63). The latter
   are loaded, made visible, and uploaded; except for keyed batches that their client has sent again
   to another writer meanwhile: those are in the bucket, and a key counts once (H19).
6. Release the segments of the log whose entries are all in the bucket: the disk may be full.

With `reapply` the entries of a fork are applied too: under the name of their branch, which the log
has from then on.

`read_pending` reports batches without opening the log. Without a store it uses the log's own record
of its uploads, which may lag by a second, or by a crash; with one, the bucket, which is exact.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, TypeVar

import msgspec

from reef.config import WriterSettings
from reef.engine.commit.committer import Committer
from reef.engine.commit.resync import Outcomes
from reef.engine.context import NamespaceContext
from reef.engine.local import stream
from reef.engine.local.buffer import BufferedBatch, LocalBuffer
from reef.engine.local.stream import (
    IDENTITY,
    UPLOADED,
    LocalBatch,
    LocalPosition,
    LogIdentity,
    PendingUploads,
    decode_entry,
    find_position,
    own_log,
    point_of,
    read_identity,
    read_marks,
    stream_of,
)
from reef.engine.local.uploader import truncate
from reef.engine.log.log import LogRules
from reef.errors import ErrorKind, FencedError, InvalidInputError, NotFoundError
from reef.files import OS, FileSystem
from reef.formats.manifest import Manifest, StreamPoint
from reef.formats.wal_object import decode_ops
from reef.locallog import LocalLog, LogEntry, LogRecoveryReport
from reef.locallog.encoding import ENTRY_BYTES_MAX
from reef.locallog.inspect import check_is_log, dump_entries
from reef.locallog.metastore import read_meta_store
from reef.manifest.dedup import StreamClaim, StreamHistory, extend_lineage
from reef.manifest.head import locate, locate_folder, refuse_dropped
from reef.paths import Namespace
from reef.runtime import REAL, Runtime
from reef.stores import Store

Handle = TypeVar("Handle")
AcquireRole = Callable[[StreamClaim], tuple[Committer, Outcomes]]
ENTRY_HEADER_BYTES = 8192
"""Upper bound of an entry besides its record, with the longest idempotency key."""
NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class LocalRecovery:
    """The batches that an opening has loaded from a local log (H27)."""

    log: LogRecoveryReport
    """The recovery of the log itself."""
    uploaded_index: int
    """Every entry up to this index was in the bucket already."""
    replayed: int
    """Batches that were on the disk only: they are visible, and will be uploaded."""
    repeated: int = 0
    """Batches whose keys another writer has committed meanwhile: they are not applied again."""


@dataclass(frozen=True, slots=True)
class LocalOpening:
    """Opens the local buffer of one namespace."""

    store: Store
    namespace: Namespace
    settings: WriterSettings
    reapply: bool = False
    """Whether to apply pending batches although another writer has acquired the role."""

    def open(
        self, log: LocalLog, acquire_role: AcquireRole
    ) -> tuple[LocalBuffer, Outcomes, LocalRecovery]:
        """Run the protocol on a log that is open."""
        runtime = self.store.runtime
        identity = own_log(log, self.namespace.folder, self.store.url, runtime)
        loaded = _load(log, identity.noted(log))
        head = self._head(log, identity)
        claim = StreamClaim(identity.stream, life=runtime.ulid(), lives=identity.lives)
        if head is not None:
            claim = self._check_claim(claim, log, identity, head)
        identity = identity.born(claim.life, held=head.writer_life if head else "")
        identity.write(log)
        committer, outcomes = acquire_role(claim)
        runtime.reach("local log claimed")
        position = self._position(log, identity, committer.tail.rules, claim.stream)
        identity = self._record_known(log, identity, position)
        if 0 < log.last_index < position.uploaded:  # the bucket is ahead: continue with its numbers
            log.delete_range(log.first_index, log.last_index)
        buffer = LocalBuffer(log, identity, committer, self.settings, runtime, position=position)
        replayed, repeated = self._replay(buffer, loaded)
        truncate(buffer)
        recovery = LocalRecovery(log.recovery, position.uploaded, replayed, repeated)
        return buffer, outcomes, recovery

    # --- step 2 -------------------------------------------------------------------
    def _head(self, log: LocalLog, identity: LogIdentity) -> Manifest | None:
        """Return the head of the log's namespace; None if the log is new."""
        if not identity.is_known:
            return None
        try:
            return locate(self.store, self.namespace.name).found.manifest
        except NotFoundError as error:
            if error.kind is not ErrorKind.NOT_FOUND:  # renamed, or dropped: it is the log's own
                raise
            raise stream.foreign_log_error(identity, log.path, self.store.url) from None

    def _check_claim(
        self, claim: StreamClaim, log: LocalLog, identity: LogIdentity, head: Manifest
    ) -> StreamClaim:
        """Return the claim with its conditions; raise if the head does not meet them."""
        if self.reapply and self._was_forgotten(identity, head):
            return claim
        noted = identity.noted(log)
        known = replace(
            claim,
            is_known=True,
            unknown=stream.foreign_log_error(identity, log.path, self.store.url),
            taken_over=self._taken_over(log, identity, noted),
        )
        known.check(head)
        if log.last_index <= noted:
            return known
        if known.is_held(head) and not self.reapply:
            return replace(known, must_hold=True)
        names = self.namespace.at(head.incarnation)
        rules = read_marks(NamespaceContext(self.store, names).log, head)
        position = _position_of(log, identity, rules)
        if not self.reapply:
            self._check_nothing_pending(log, identity, position)
        return replace(claim, stream=position.stream) if position.is_forked else known

    def _was_forgotten(self, identity: LogIdentity, head: Manifest) -> bool:
        """Whether this is the log's bucket and has lost the mark, by a rebuild for instance. Then
        the log's own record says how far it was uploaded; it may lag."""
        return identity.stream not in head.stream_marks and identity.url == self.store.url

    def _check_nothing_pending(
        self, log: LocalLog, identity: LogIdentity, position: LocalPosition
    ) -> None:
        if position.is_forked:
            raise stream.forked_log_error(identity, pending_above(log, position.uploaded), log.path)
        if log.last_index > position.uploaded:
            raise self._taken_over(log, identity, position.uploaded)

    def _taken_over(self, log: LocalLog, identity: LogIdentity, mark: int) -> FencedError:
        cause = f"another writer has taken over {self.namespace.name} since this log was used"
        return stream.fenced_log_error(cause, identity, pending_above(log, mark), log.path)

    # --- steps 4 and 5 ------------------------------------------------------------
    def _position(
        self, log: LocalLog, identity: LogIdentity, rules: LogRules, claimed: str
    ) -> LocalPosition:
        """Return the position of a log whose role is acquired: it is exact."""
        position = _position_of(log, identity, rules)
        if position.stream != claimed:  # a copy has uploaded since the check
            raise stream.forked_log_error(identity, pending_above(log, position.uploaded), log.path)
        return position

    def _record_known(
        self, log: LocalLog, identity: LogIdentity, position: LocalPosition
    ) -> LogIdentity:
        """Record that the namespace knows the stream, and the address of the bucket.

        Only the life that has the role is kept: the requests of earlier openings have lost their
        generation to its publish. A life that was copied with the log before it had the role
        would make a takeover by that other copy pass for our own (H71).
        """
        known = msgspec.structs.replace(
            identity,
            id=position.id,
            is_known=True,
            url=self.store.url,
            lives=identity.lives[-1:],
        )
        if position.is_forked:
            known = msgspec.structs.replace(known, base=position.uploaded)
        known.write(log)
        return known

    def _replay(self, buffer: LocalBuffer, loaded: "list[_PendingEntry]") -> tuple[int, int]:
        """Restore batches that are not in the bucket; return how many, and how many were there."""
        path, mark = buffer.log.path, buffer.uploaded
        schemas = {schema.id: schema for schema in buffer.committer.tail.manifest.schemas}
        replayed = repeated = 0
        for point, batch in loaded:
            if point.index <= mark:
                continue
            if _is_committed(buffer, batch):
                _pass_over(buffer, point)
                repeated += 1
                continue
            schema = schemas.get(batch.schema_id)
            if schema is None:
                raise stream.missing_schema_error(
                    point.index, batch.schema_id, buffer.identity, path
                )
            ops = decode_ops(batch.record, schema, f"entry {point.index} of {path}")
            item = BufferedBatch(batch, ops, buffer.runtime.stopwatch())
            item.set_point(point)
            buffer.restore(item)
            replayed += 1
        return replayed, repeated


class _PendingEntry(NamedTuple):
    point: StreamPoint
    batch: LocalBatch


def _load(log: LocalLog, noted: int) -> list[_PendingEntry]:
    """Read the batches that may have to be uploaded: with a damaged log no role is acquired."""
    entries = log.entries(max(noted + 1, log.first_index))
    return [_PendingEntry(point_of(entry), decode_entry(entry, log.path)) for entry in entries]


def _is_committed(buffer: LocalBuffer, batch: LocalBatch) -> bool:
    """Whether the same batch is in the bucket, under the same key. One with another body is not:
    both were acknowledged."""
    key = batch.header.key
    known = buffer.committer.tail.dedup.get(key) if key is not None else None
    return known is not None and known.digest == batch.header.digest


def _pass_over(buffer: LocalBuffer, point: StreamPoint) -> None:
    """Record that an entry is in the bucket: at once, or with the pending entry before it."""
    if buffer.backlog.waiting:
        item = buffer.backlog.waiting[-1]
        item.points = extend_lineage(item.points, (point,))
    else:
        buffer.uploaded = point.index


def _position_of(log: LocalLog, identity: LogIdentity, rules: LogRules) -> LocalPosition:
    def entries(first: int) -> Iterator[LogEntry]:
        return log.entries(max(first, log.first_index))

    def history(name: str) -> StreamHistory:
        return rules.history(stream_of(name))

    return find_position(entries, history, identity.id, identity.noted(log))


def pending_above(log: LocalLog, index: int) -> PendingUploads:
    """Return the entries of a log above an index."""
    if log.last_index <= index:
        return PendingUploads(0, 0, 0, 0)
    first = max(index + 1, log.first_index)
    size = sum(len(entry.data) for entry in log.entries(first))
    return PendingUploads(log.last_index - first + 1, size, first, log.last_index)


@dataclass(frozen=True, slots=True)
class LocalDurability:
    """`durability="local"`: acknowledge a write when it is in this directory."""

    path: str
    reapply: bool
    files: FileSystem

    @classmethod
    def of(
        cls,
        durability: str,
        path: str | os.PathLike[str] | None,
        *,
        reapply: bool,
        files: FileSystem,
    ) -> "LocalDurability | None":
        """Check the arguments of `db.writer`; None for the bucket alone."""
        if durability not in ("object", "local"):
            raise _option_error(f"durability={durability!r} is neither 'object' nor 'local'")
        if durability == "object":
            if path is not None or reapply:
                raise _option_error("a local log is for durability='local'")
            return None
        if path is None or not os.fspath(path):
            raise _option_error("durability='local' needs local_log, the path of a directory")
        return cls(os.fspath(path), reapply, files)

    def adjust(self, settings: WriterSettings) -> WriterSettings:
        """Return the settings of a writer with this directory: uploads are not split."""
        if settings.ack != "prefix":
            raise _option_error("a local log is uploaded in order: ack='prefix'")
        return replace(
            settings,
            batch_bytes_max=min(settings.batch_bytes_max, ENTRY_BYTES_MAX - ENTRY_HEADER_BYTES),
            group_bytes_max=max(settings.group_bytes_max, settings.upload_bytes),
            queue_bytes_max=max(settings.queue_bytes_max, 2 * settings.upload_bytes),
        )

    def open(
        self,
        store: Store,
        namespace: Namespace,
        settings: WriterSettings,
        acquire_role: AcquireRole,
        handle: Callable[[Namespace, LocalBuffer, Outcomes, WriterSettings, LocalRecovery], Handle],
    ) -> Handle:
        """Open a writer with this directory before the bucket, and make its handle."""
        log = LocalLog(
            self.path, settings.local_segment_bytes, files=self.files, runtime=store.runtime
        )
        try:
            opening = LocalOpening(store, namespace, settings, self.reapply)
            buffer, outcomes, recovery = opening.open(log, acquire_role)
            return handle(namespace, buffer, outcomes, settings, recovery)
        except BaseException:
            log.close()
            raise


def _option_error(why: str) -> InvalidInputError:
    return InvalidInputError(why, kind=ErrorKind.INVALID_OPTION)


@dataclass(frozen=True, slots=True)
class PendingReport:
    """Batches of a local log that are on its disk only."""

    path: str
    namespace: str
    url: str
    """Address of the bucket when the log was last opened."""
    asked_bucket: bool
    """Whether the bucket was read; otherwise it may have more than the log knows."""
    forked: bool
    """Whether a copy of the log has uploaded other entries under the same numbers."""
    uploaded_index: int
    batches: int
    operations: int
    bytes: int
    first_index: int
    last_index: int
    oldest: str | None
    """When the first one was written."""
    newest: str | None
    oldest_age_s: float | None
    newest_age_s: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def identity_of(path: str, *, files: FileSystem = OS) -> tuple[LogIdentity, int]:
    """Return the identity of a local log, and the last index that it knows to be uploaded."""
    check_is_log(files, path)
    stable = read_meta_store(files, path)[1]
    identity = read_identity(stable.get(IDENTITY), path)
    if identity is None:
        raise InvalidInputError(f"{path} is a local log without a namespace: no writer has used it")
    return identity, max(int.from_bytes(stable.get(UPLOADED, b""), "little"), identity.base)


def namespace_of(path: str, store: Store, *, files: FileSystem = OS) -> str:
    """Return the current name of a log's namespace, which may have been renamed since."""
    folder = identity_of(path, files=files)[0].namespace
    try:
        return locate_folder(store, folder).names.name
    except NotFoundError:
        return folder


def find_pending(
    path: str, *, store: Store | None = None, files: FileSystem = OS
) -> tuple[LocalPosition, Iterator[LogEntry]]:
    """Return the position of a log, and the entries above it."""
    identity, noted = identity_of(path, files=files)

    def entries(first: int) -> Iterator[LogEntry]:
        return (entry for entry in dump_entries(path, files=files) if entry.index >= first)

    position = LocalPosition(identity.id, noted, StreamHistory())
    if store is not None:
        heads = locate_folder(store, identity.namespace)
        refuse_dropped(heads.names, heads.found.manifest)
        head = heads.found.manifest
        if identity.is_known and identity.stream not in head.stream_marks:
            raise stream.foreign_log_error(identity, path, store.url)
        rules = read_marks(NamespaceContext(store, heads.names).log, head)
        position = find_position(
            entries, lambda name: rules.history(stream_of(name)), identity.id, noted
        )
    return position, entries(position.uploaded + 1)


def read_pending(
    path: str,
    *,
    store: Store | None = None,
    files: FileSystem = OS,
    runtime: Runtime = REAL,
) -> PendingReport:
    """Report the entries that are not uploaded: number, size, indexes, age."""
    identity, _ = identity_of(path, files=files)
    name = identity.namespace if store is None else namespace_of(path, store, files=files)
    position, entries = find_pending(path, store=store, files=files)
    batches = operations = size = 0
    first: LogEntry | None = None
    last: LogEntry | None = None
    for entry in entries:
        first, last = first or entry, entry
        batches, size = batches + 1, size + len(entry.data)
        operations += decode_entry(entry, path).header.ops
    now_ns = runtime.wall_ns()
    return PendingReport(
        path,
        name,
        identity.url,
        store is not None,
        position.is_forked,
        position.uploaded,
        batches,
        operations,
        size,
        first.index if first else 0,
        last.index if last else 0,
        str(first.appended_at) if first else None,
        str(last.appended_at) if last else None,
        round((now_ns - first.appended_at.unix_ns) / NS, 3) if first else None,
        round((now_ns - last.appended_at.unix_ns) / NS, 3) if last else None,
    )
