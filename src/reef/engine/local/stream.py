"""A local log as a stream of its namespace: entries, identity, position, receipts.

**Entries.** Each batch is one entry, and its bytes are those of its WAL record:

    u32 crc32c of the rest | msgpack: [version, schema id, operations, key, digest, record]

The checksum covers entries in sealed segments, which a log does not check when it is opened. The
record goes into a WAL object as it is: an upload encodes nothing again. The entry's index is the
batch's position in the stream; its time is when it was written. Its extensions hold the digest of
all entries before it, so that a log and a bucket can compare whether they have the same entries
(H71); entries of older releases have none.

    digest = blake2b-128 of: u64 index | u64 term | u8 length of the extensions | extensions | data

**Identity.** A log has an id, which names its stream, and belongs to one namespace of one bucket.
It is stored in the log before the first entry. The bucket's address is informative only: buckets
move. The proof that the two belong together is that the namespace knows the stream. Copies of a log
share its id, but not its life: each opening has a new one, stored here before it acquires the role,
so no copy that was opened since has it.

**Position.** A directory may be copied, or restored from an older image of its disk, and then every
copy continues with the same numbers (H71). The bucket has a lineage of the stream
(`reef.manifest.dedup`), the log has the epoch and the digest of each entry. Compared above the
index up to which the log has recorded its uploads, there are three cases:

    mark within the log, same digest      entries up to the mark are committed, later ones are not
    mark above the log's end, all of      the bucket is ahead: the end of this log was lost, or a
      its entries in the lineage          copy has continued; every entry here is committed
    anything else                         forked: entries above the last common one are not
                                          committed, whatever their numbers are

The entries of a fork belong to a branch: a stream of their own, whose name is derived from the
first entry that differs. So two copies of one fork have one branch, and the copy that is re-applied
second finds the entries of the first there. A branch may fork in turn. A mark without a lineage,
from an older release, is compared by index alone.

**Receipts.** A `LocalReceipt` is returned after the local sync. It has no LSN until the batch is
uploaded; then it is filled in, and `wait` returns. From then on it is an ordinary receipt.
"""

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec

from reef.engine.log.log import Log, LogRules, SlotGone, run_replay
from reef.engine.rows.batch import EncodedBatch
from reef.errors import (
    UNDECODABLE,
    CorruptionError,
    ErrorKind,
    FencedError,
    InternalError,
    InvalidInputError,
    OutcomeUnknownError,
    UnavailableError,
    UnsupportedFormatError,
)
from reef.formats.coding import crc32c
from reef.formats.manifest import Manifest, StreamPoint
from reef.formats.wal_object import BatchHeader
from reef.locallog import EntryTime, LocalLog, LogEntry
from reef.manifest.dedup import StreamHistory
from reef.runtime import Runtime
from reef.types import Receipt

VERSION = 2
"""Version of batches with merges, which older releases must not upload."""
PLAIN_VERSION = 1
CHECKSUM = struct.Struct("<I")
HEADER_BYTES = 112
"""Approximate size of an entry besides its record."""
DIGEST_BYTES = 16
DIGEST_HEAD = struct.Struct("<QQB")
IDENTITY = b"reef.front"
UPLOADED = b"reef.uploaded"
"""Every entry up to this index is in the bucket; later ones may be too."""
LIVES_MAX = 16
"""Openings that are remembered because they may have acquired the role."""
BRANCH_BYTES = 16
EntriesFrom = Callable[[int], Iterable[LogEntry]]
"""Returns the entries of a log, starting at an index."""


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    version: int
    schema_id: int
    ops: int
    key: str | None
    digest: str | None
    record: bytes


@dataclass(frozen=True, slots=True)
class LocalBatch:
    """A batch as the local log stores it."""

    record: bytes
    header: BatchHeader
    schema_id: int

    @classmethod
    def of(cls, encoded: EncodedBatch, key: str | None) -> "LocalBatch":
        digest = encoded.digest() if key is not None else None
        header = BatchHeader(len(encoded.ops), key, digest, merges=encoded.merges)
        return cls(encoded.record, header, encoded.schema_id)

    @property
    def size(self) -> int:
        return len(self.record) + HEADER_BYTES


def encode_entry(index: int, epoch: int, batch: LocalBatch, now_ns: int, before: bytes) -> LogEntry:
    """Return the entry of a batch after one with the digest `before`; its term is the epoch of
    the writer that accepted it."""
    header = batch.header
    version = VERSION if header.merges else PLAIN_VERSION
    stored = _Stored(version, batch.schema_id, header.ops, header.key, header.digest, batch.record)
    time = EntryTime.from_unix_ns(now_ns)
    body = msgspec.msgpack.encode(stored)
    data = CHECKSUM.pack(crc32c(body)) + body
    return LogEntry(index=index, term=epoch, data=data, extensions=before, appended_at=time)


def point_of(entry: LogEntry) -> StreamPoint:
    """Return the identity of an entry, which covers all entries before it."""
    before = entry.extensions
    digest = blake2b(
        DIGEST_HEAD.pack(entry.index, entry.term, len(before)), digest_size=DIGEST_BYTES
    )
    digest.update(before)
    digest.update(entry.data)
    return StreamPoint(entry.term, entry.index, digest.digest())


def decode_entry(entry: LogEntry, path: str) -> LocalBatch:
    """Return the batch of an entry; CorruptionError if it is damaged."""
    body = memoryview(entry.data)[CHECKSUM.size :]
    if len(entry.data) < CHECKSUM.size or CHECKSUM.unpack_from(entry.data)[0] != crc32c(body):
        raise CorruptionError(
            f"entry {entry.index} of {path}: the checksum does not match",
            hint=f"Run `reef log verify {path}`; the bucket is not affected",
            object=path,
            offset=0,
        )
    try:
        stored = msgspec.msgpack.decode(body, type=_Stored)
    except UNDECODABLE as error:
        raise CorruptionError(
            f"entry {entry.index} of {path} is not a batch: {error}", object=path, offset=0
        ) from error
    if stored.version > VERSION:
        raise UnsupportedFormatError(
            f"entry {entry.index} of {path} has version {stored.version}, known is {VERSION}",
            hint="Upgrade Reef",
        )
    merges = stored.version > PLAIN_VERSION
    header = BatchHeader(stored.ops, stored.key, stored.digest, merges=merges)
    return LocalBatch(stored.record, header, stored.schema_id)


def stream_of(log_id: str) -> str:
    """Return the name of a log's stream in its bucket."""
    return f"local/{log_id}"


class LogIdentity(msgspec.Struct, frozen=True):
    """The identity of a local log, as stored in it."""

    id: str
    namespace: str
    url: str
    is_known: bool = False
    """Whether its namespace knows the stream: before that it accepts no batch."""
    lives: tuple[str, ...] = ()
    """Openings that may have acquired the writer role last: one, and any that crashed since. An
    opening that has acquired the role forgets the others."""
    base: int = 0
    """Entries up to here were uploaded under another id: the log forked there."""

    @property
    def stream(self) -> str:
        return stream_of(self.id)

    def noted(self, log: LocalLog) -> int:
        """Return the last index that the log knows to be uploaded; later ones may be too."""
        return max(log.get_uint64(UPLOADED), self.base)

    def born(self, life: str, held: str = "") -> "LogIdentity":
        """Return it with one more life. The life that the bucket names is kept, however many have
        crashed since: one of those may still acquire the role, by a request that arrives late."""
        others = [other for other in self.lives if other != held][1 - LIVES_MAX :]
        kept = [held] if held in self.lives else []
        return msgspec.structs.replace(self, lives=(*kept, *others, life))

    def write(self, log: LocalLog) -> None:
        """Store it in the log, durably."""
        if read_identity(log.get(IDENTITY), log.path) != self:
            log.set(IDENTITY, msgspec.json.encode(self))


def read_identity(stored: bytes | None, path: str) -> LogIdentity | None:
    """Decode the identity of a log; None if no writer has used it."""
    if stored is None:
        return None
    try:
        return msgspec.json.decode(stored, type=LogIdentity)
    except UNDECODABLE as error:
        raise InvalidInputError(
            f"the identity stored in {path} cannot be decoded: {error}"
        ) from error


def own_log(log: LocalLog, namespace: str, url: str, runtime: Runtime) -> LogIdentity:
    """Return the identity of a log, new if it is empty; rejects that of another namespace."""
    identity = read_identity(log.get(IDENTITY), log.path)
    if identity is None:
        if log.last_index:
            raise InvalidInputError(
                f"{log.path} holds {log.last_index - log.first_index + 1} entries that no "
                f"writer of Reef has put there",
                hint="Choose another directory",
            )
        identity = LogIdentity(runtime.ulid(), namespace, url)
    if identity.namespace != namespace:
        raise InvalidInputError(
            f"{log.path} is the local log of namespace {identity.namespace} in {identity.url}, "
            f"not of {namespace}",
            hint="Each namespace needs its own local log: choose another directory",
            namespace=identity.namespace,
        )
    return identity


@dataclass(frozen=True, slots=True)
class LocalPosition:
    """The last committed entry of a log."""

    id: str
    """Id of the log's stream, or of the branch to which its uncommitted entries belong."""
    uploaded: int
    """Every entry up to here is committed; it may be above the end of the log."""
    history: StreamHistory
    """History of that stream or branch."""
    forked_from: str = ""
    """The log's own id, if it has forked."""

    @property
    def stream(self) -> str:
        return stream_of(self.id)

    @property
    def is_forked(self) -> bool:
        return bool(self.forked_from)


def find_position(
    entries: EntriesFrom, history: Callable[[str], StreamHistory], log_id: str, noted: int
) -> LocalPosition:
    """Return the position of a log that has recorded its uploads up to `noted`."""
    branch_id, forked_from = log_id, ""
    while True:
        known = history(branch_id)
        fork = _find_fork(entries, known, noted)
        if fork is None:
            return LocalPosition(branch_id, max(known.mark, noted), known, forked_from)
        branch_id, noted, forked_from = _branch(branch_id, fork), fork.index - 1, log_id


def _find_fork(entries: EntriesFrom, history: StreamHistory, noted: int) -> LogEntry | None:
    """Return the first entry that differs from the one that was committed with its index."""
    if not history.is_proven or _agrees(entries, history):
        return None
    for entry in entries(noted + 1):
        if entry.index > history.mark or not history.has_point(point_of(entry)):
            return entry
    return None


def _agrees(entries: EntriesFrom, history: StreamHistory) -> bool:
    """Whether the digest at the mark is the log's own, or there is no entry to compare it with."""
    entry = next(iter(entries(history.mark)), None)
    if entry is None:
        return False
    if entry.index == history.mark:
        return point_of(entry).digest == history.digest
    if entry.index == history.mark + 1 and entry.extensions:
        return entry.extensions == history.digest
    return True


def _branch(log_id: str, fork: LogEntry) -> str:
    point = msgspec.msgpack.encode((log_id, point_of(fork)))
    return blake2b(point, digest_size=BRANCH_BYTES).hexdigest()


def read_marks(log: Log, manifest: Manifest) -> LogRules:
    """Replay the log of a namespace, without a role; return its rules with each stream's history.

    The manifest has the marks up to its floor, the log above the floor has the rest.
    """
    rules = LogRules(manifest)
    try:
        run_replay(log.replay(rules))
    except SlotGone as gone:
        raise UnavailableError(
            f"LSN {gone.lsn} was swept while the log was read", hint="Try again"
        ) from gone
    return rules


@dataclass(frozen=True, slots=True)
class PendingUploads:
    """Batches on the local disk that are not known to be in the bucket."""

    batches: int
    bytes: int
    first_index: int
    last_index: int


class LocalReceipt(Receipt):
    """The receipt of a batch in the local log, and in the bucket's log once it is uploaded."""

    __slots__ = ("_wait", "local_index", "point", "stream")

    local_index: int
    """The batch's index in the local log."""
    point: StreamPoint
    """The entry: copies of the log may have another one at the same index."""
    stream: str
    """The stream of that local log."""
    _wait: Callable[[int, float | None], None]

    def __init__(
        self,
        receipt: Receipt,
        stream: str,
        point: StreamPoint,
        wait: Callable[[int, float | None], None],
    ) -> None:
        super().__init__(*_fields(receipt))
        object.__setattr__(self, "stream", stream)
        object.__setattr__(self, "local_index", point.index)
        object.__setattr__(self, "point", point)
        object.__setattr__(self, "_wait", wait)

    def wait(self, timeout_s: float | None = None) -> int:
        """Return the LSN when the batch is in the bucket.

        UnavailableError if that takes longer; FencedError if another writer has acquired the role.
        """
        if self.lsn is None:
            self._wait(self.local_index, timeout_s)
        lsn = self.lsn
        return lsn if lsn is not None else 0

    def _fill(self, uploaded: Receipt) -> None:
        """Set the position in the bucket's log; called once, by the uploader."""
        for name in (
            "index",
            "epoch",
            "write_id",
            "lsn",
        ):  # the LSN last: it marks the receipt as filled
            object.__setattr__(self, name, getattr(uploaded, name))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LocalReceipt):
            return NotImplemented
        return (self.stream, self.local_index) == (other.stream, other.local_index)

    def __hash__(self) -> int:
        return hash((self.stream, self.local_index))

    def __reduce__(self) -> tuple[Any, ...]:
        return Receipt, _fields(self)  # no uploader fills a copy in another process


def _fields(receipt: Receipt) -> tuple[Any, ...]:
    return (
        receipt.namespace,
        receipt.lsn,
        receipt.index,
        receipt.epoch,
        receipt.write_id,
        receipt.ops,
        receipt.replayed,
        receipt.idempotency_key,
    )


def queue_full_error(namespace: str, why: str) -> UnavailableError:
    """Return the error for a batch that was not admitted within its deadline."""
    return UnavailableError(
        f"{namespace}: write queue is full: {why}",
        hint="Check whether the bucket is reachable, write more slowly, or raise "
        "local_backlog_bytes_max",
        namespace=namespace,
    )


def upload_timeout_error(
    namespace: str, pending: PendingUploads, path: str, seconds: float
) -> UnavailableError:
    """Return the error for an upload that takes longer than the caller's timeout."""
    return UnavailableError(
        f"{_count(pending)} of {namespace} are not in the bucket after {seconds:g} s; "
        f"they are safe in {path}",
        hint="Wait longer: they are uploaded as soon as the bucket is reachable",
        namespace=namespace,
    )


def not_uploaded_error(namespace: str, pending: PendingUploads, path: str) -> UnavailableError:
    """Return the error for a writer that was closed before every batch was uploaded."""
    return UnavailableError(
        f"the writer of {namespace} is closed, and {_count(pending)} are not in the bucket; "
        f"they are safe in {path}",
        hint=f"Open the writer again with this local log; `reef log pending {path}` shows them",
        namespace=namespace,
    )


def fenced_log_error(
    cause: str, identity: LogIdentity, pending: PendingUploads, path: str
) -> FencedError:
    """Return the error for a local log whose namespace another writer has acquired."""
    return FencedError(
        f"{cause}; {_count(pending)} are on this disk only, in {path}",
        hint=f"See them with `reef log pending {path}`; "
        f"apply them with `reef log reapply {path} {identity.url}`",
        namespace=identity.namespace,
        path=path,
    )


def forked_log_error(identity: LogIdentity, pending: PendingUploads, path: str) -> FencedError:
    """Return the error for a log whose copy has committed other entries."""
    first = f", the first of them entry {pending.first_index}" if pending.batches else ""
    return FencedError(
        f"{path} has forked: a copy of this local log has uploaded other entries to "
        f"{identity.namespace} under the same numbers; {_count(pending)} are on this disk only"
        f"{first}",
        kind=ErrorKind.LOG_FORKED,
        hint=f"Nothing was changed. See them with `reef log pending {path} --url {identity.url}`; "
        f"apply them with `reef log reapply {path} {identity.url}`",
        namespace=identity.namespace,
        path=path,
        first_index=pending.first_index,
    )


def foreign_log_error(identity: LogIdentity, path: str, url: str) -> InvalidInputError:
    """Return the error for a log whose stream a namespace does not know."""
    return InvalidInputError(
        f"{path} is a local log of another database: namespace {identity.namespace} of {url} "
        f"does not know it; it was last used with {identity.url}",
        hint="Choose another directory, or open the database that it belongs to; if this is the "
        f"one, and it was rebuilt, `reef log reapply {path} {url}` applies the rest",
        namespace=identity.namespace,
        path=path,
    )


def missing_schema_error(
    index: int, schema_id: int, identity: LogIdentity, path: str
) -> InvalidInputError:
    """Return the error for a batch whose schema its namespace does not have."""
    return InvalidInputError(
        f"batch {index} of {path} was written with schema {schema_id}, which namespace "
        f"{identity.namespace} does not have: it was re-created since",
        hint=f"The batches stay in {path}; `reef log dump {path}` shows them",
        namespace=identity.namespace,
        path=path,
    )


def unknown_outcome_error(
    index: int, path: str, cause: BaseException, receipt: Receipt
) -> OutcomeUnknownError:
    """Return the error for a batch that was being written when the disk failed."""
    return OutcomeUnknownError(
        f"batch {index} of {path} may be on the disk: {cause}",
        kind=cause.kind if isinstance(cause, OutcomeUnknownError) else None,
        hint="Open the writer again: it recovers the batches on the disk",
        receipt=receipt,
    )


def broken_writer_error(namespace: str, cause: BaseException) -> InternalError:
    """Return the error for a writer whose state cannot be trusted any more."""
    return InternalError(
        f"the writer of {namespace} failed while it wrote its local log: {cause!r}",
        hint="Open the writer again",
        namespace=namespace,
    )


def _count(pending: PendingUploads) -> str:
    return f"{pending.batches} batches ({pending.bytes} bytes)"
