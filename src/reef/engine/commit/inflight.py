"""Batches on their way into the log: queued, grouped into a WAL object, sent.

    Pending ──GroupQueue──▶ InflightObject ──InflightSender──▶ outcome

`GroupQueue` decides which batches go out together. A lone batch goes out at once. While others are
in flight, batches gather until the group window closes or the group is large enough. A conditional
batch is a barrier: it waits until nothing is in flight and goes alone. A large batch goes alone
too, so that it does not delay small ones.

`InflightSender` PUTs one object until its outcome is definite, and proves it where it is in doubt
(protocols §2, steps 2 and 5):

created    it is in its slot, and counts; after a slow PUT the floor proves it (H13)
exists     another object has the slot, and this one never landed; after doubt the floor proves it
unknown    no response within the deadline, or no proof: it may count
refused    every attempt was rejected by the store: nothing was written. A full disk is a refusal,
           unless the batch comes from a local log, which can wait for space

The receipt of a patch counts the rows that it has changed: `ops` is without patches of keys that
have no row. They are counted when the batch is

    submitted   the keys are looked up, as reads do: the only requests
    sent        batches that were submitted before decide about the rows since: those in memory,
                those in flight, and those ahead in the same object. The count goes into the header
                of the batch, so that a repeat of its key has the same receipt

A batch that has lost its slot is sent again, and counted again. Exceptions, where the count is of
the rows as they were when the batch was submitted: a bulk load, or a fold together with the writes
that it has folded, that came in between.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from reef.config import WriterSettings
from reef.engine.commit.completions import Completion
from reef.engine.log.log import Log, Proof, prove
from reef.engine.read.memtable import Entry, Memtable
from reef.errors import ErrorKind, OutcomeUnknownError, ReefError, UnavailableError
from reef.formats.manifest import DedupEntry, Lineage
from reef.formats.schema import Schema
from reef.formats.wal_object import (
    AnyOps,
    BatchHeader,
    OneOp,
    OpKind,
    Ops,
    WalHeader,
    WalKind,
    WalObject,
)
from reef.manifest.dedup import extend_lineage
from reef.manifest.head import HeadFinder, ManifestHead
from reef.paths import Namespace
from reef.runtime import Deadline, Runtime, Stopwatch
from reef.stores import Outcome, WriteResult
from reef.telemetry import Metrics
from reef.types import Receipt

HEADER_BYTES = 64
"""Approximate size of a batch's entry in the header of its object."""

PATCHES_COUNTED_MAX = 100
"""Rows of a batch's patches that are looked up: a page each, at worst. Above it all are counted."""


@dataclass(frozen=True, slots=True)
class PatchedKeys:
    """The keys that a batch patches, and those of them that had a row when it was submitted."""

    keys: frozenset[bytes]
    existing: frozenset[bytes]
    lsn: int
    """The last LSN of the state in which they were looked up."""

    def count(
        self, ops: AnyOps, before: Iterable[AnyOps], tables: Sequence[Memtable], now_ms: int
    ) -> int:
        """Return the operations without patches of missing rows.

        `before` are the batches that apply first and are not in `tables`, the newest of which is
        the first.
        """
        exists = {key: self._exists(key, tables, now_ms) for key in self.keys}
        for earlier in before:
            _apply(earlier, exists, now_ms)
        return _apply(ops, exists, now_ms)

    def _exists(self, key: bytes, tables: Sequence[Memtable], now_ms: int) -> bool:
        for table in tables:
            for entry in table.cut().versions(key, values=False):
                if entry.lsn > self.lsn and entry.kind != OpKind.PATCH:
                    return _is_row(entry, now_ms)
        return key in self.existing


def patched_keys(ops: AnyOps) -> list[bytes] | None:
    """Return the keys that a batch patches; None if they are too many to be counted, or none."""
    if isinstance(ops, OneOp):
        return None
    keys = ops.keys.filter(pc.equal(ops.kinds, OpKind.PATCH.value))
    return keys.to_pylist() if 0 < len(keys) <= PATCHES_COUNTED_MAX else None


def _is_row(entry: Entry, now_ms: int) -> bool:
    if entry.kind == OpKind.DELETE:
        return False
    return entry.expires_at_ms is None or entry.expires_at_ms > now_ms


def _apply(ops: AnyOps, exists: dict[bytes, bool], now_ms: int) -> int:
    """Note which keys have a row after a batch; return its operations but patches of no row."""
    if isinstance(ops, OneOp):
        if ops.key in exists:
            exists[ops.key] = ops.value is not None
        return 1
    missing = 0
    for place in _places(ops, exists):
        key, kind = ops.keys[place].as_py(), ops.kinds[place].as_py()
        if kind == OpKind.PATCH:
            missing += not exists[key]
        elif kind == OpKind.DELETE_RANGE and ops.end_keys is not None:
            end = ops.end_keys[place].as_py()
            exists.update({other: False for other in exists if key <= other < end})
        else:
            expiry = None if ops.expires_at_ms is None else ops.expires_at_ms[place].as_py()
            exists[key] = kind != OpKind.DELETE and (expiry is None or expiry > now_ms)
    return len(ops) - missing


def _places(ops: Ops, keys: Iterable[bytes]) -> list[int]:
    """Return the places of the operations that concern some keys."""
    concerned = pc.is_in(ops.keys, pa.array(list(keys), ops.keys.type))
    if ops.end_keys is not None:
        concerned = pc.or_(concerned, pc.equal(ops.kinds, OpKind.DELETE_RANGE.value))
    places: list[int] = np.flatnonzero(concerned.to_numpy(zero_copy_only=False)).tolist()
    return places


class StreamMark(NamedTuple):
    """The position of a batch in its stream."""

    stream: str
    points: Lineage
    """The batch's own entry, then entries right behind it that were committed already; the last
    one is the mark."""


@dataclass(eq=False, slots=True)
class Pending(Completion):
    """A submitted batch, from the queue to its outcome."""

    ops: AnyOps
    record: bytes
    header: BatchHeader
    queued_s: float
    """When it was submitted, by the monotonic clock."""
    decide: Callable[[], None] | None = None
    """Raises if a condition is false; called when every earlier batch is durable."""
    schema_id: int = 1
    """Schema of the record; an object has records of one schema only."""
    mark: StreamMark | None = None
    """Set for uploads of a local log: a batch with a mark counts once by its position, and its key
    was checked when it was acknowledged."""
    patched: PatchedKeys | None = None
    """Set if its patches of missing rows are not counted."""
    deadline: Deadline | None = None
    """Until when it is sent again; None for the writer's `commit_deadline_s`."""

    @property
    def size(self) -> int:
        return len(self.record) + HEADER_BYTES


class GroupQueue:
    """Batches that wait to be sent, first in, first out. Guarded by the committer's lock."""

    def __init__(self, settings: WriterSettings, monotonic_s: Callable[[], float]) -> None:
        self._settings = settings
        self._monotonic_s = monotonic_s
        self._waiting: deque[Pending] = deque()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Pending]:
        return iter(self._waiting)

    def add(self, pending: Pending) -> None:
        self._waiting.append(pending)
        self.bytes += pending.size

    def has_room(self, unfolded_bytes: int) -> bool:
        """Whether one more batch may wait, by the bytes in the queue and in the unfolded log."""
        fits = self.bytes <= self._settings.queue_bytes_max
        return fits and unfolded_bytes <= self._settings.unfolded_bytes_max

    def put_back(self, lost: Iterable[Pending]) -> None:
        """Queue batches again that were sent and did not count: in front, and in order."""
        again = list(lost)
        self._waiting.extendleft(reversed(again))
        self.bytes += sum(pending.size for pending in again)

    def clear(self) -> list[Pending]:
        waiting = list(self._waiting)
        self._waiting.clear()
        self.bytes = 0
        return waiting

    def next_group(self, in_flight: int, *, flushing: bool) -> list[Pending]:
        """Remove and return the batches that may go out now; none if it is too early."""
        if not self._waiting or in_flight >= self._settings.max_parallel_writes:
            return []
        if self._waiting[0].decide is not None:
            return [] if in_flight else [self._pop()]
        if in_flight and not flushing and not self._is_due():
            return []
        group = [self._pop()]
        if not self._waiting:
            return group
        size = group[0].size
        while self._waiting and self._joins(self._waiting[0], group[0], size):
            size += self._waiting[0].size
            group.append(self._pop())
        return group

    def wait_s(self, in_flight: int) -> float | None:
        """Return how long the next group may still gather; None if no timeout would help."""
        if not self._waiting or not 0 < in_flight < self._settings.max_parallel_writes:
            return None
        if self._waiting[0].decide is not None:
            return None  # a barrier waits for responses
        return max(0.0005, self._window_left_s())

    def _is_due(self) -> bool:
        return self.bytes >= self._settings.group_bytes_max or self._window_left_s() <= 0

    def _window_left_s(self) -> float:
        waited_s = self._monotonic_s() - self._waiting[0].queued_s
        return self._settings.group_window_ms / 1000 - waited_s

    def _joins(self, pending: Pending, first: Pending, size: int) -> bool:
        if pending.schema_id != first.schema_id:
            return False
        if pending.decide is not None:
            return False
        if max(first.size, pending.size) > self._settings.skip_memtable_bytes:
            return False
        return size + pending.size <= self._settings.group_bytes_max

    def _pop(self) -> Pending:
        pending = self._waiting.popleft()
        self.bytes -= pending.size
        return pending


@dataclass(eq=False, slots=True)
class InflightObject:
    """A WAL object that was sent and whose outcome is not known yet."""

    header: WalHeader
    body: bytes
    batches: list[Pending]
    sent: Stopwatch
    sender: object | None
    """The thread's token; None if it was interrupted and another one has to continue."""
    response: WriteResult | None = None
    doubt: bool = False
    """Whether an attempt may have landed without a response."""
    acknowledged: bool = False
    head: ManifestHead | None = None
    """The head that showed, when this was sent, that its slot was not collected."""

    @property
    def lsn(self) -> int:
        return self.header.lsn

    @property
    def disk_full(self) -> UnavailableError | None:
        """The error, if the store had no space for it, so that its slot was not filled."""
        cause = None if self.response is None or self.doubt else self.response.cause
        if isinstance(cause, UnavailableError) and cause.kind is ErrorKind.DISK_FULL:
            return cause
        return None


def encode_object(
    batches: list[Pending],
    runtime: Runtime,
    *,
    lsn: int,
    epoch: int,
    writer_id: str,
    after: tuple[str, ...] | None,
    schema: Schema | None = None,
) -> tuple[WalHeader, bytes]:
    """Return the WAL object that holds these batches.

    `after` are the write ids that it expects before it. `schema` is set if it is newer than the
    one in the fences, so that the log is readable without a manifest.
    """
    # Only a local log has marks, and then every batch of the object has one.
    lineages = _lineages(batches) if batches[0].mark is not None else NO_LINEAGES
    marks = {s: points[-1].index for s, points in lineages.items()} if lineages else NO_MARKS
    header = WalHeader(
        lsn=lsn,
        kind=WalKind.BATCHES,
        epoch=epoch,
        writer_id=writer_id,
        write_id=runtime.ulid(),
        created_at_ms=int(runtime.wall_s() * 1000),
        after=after,
        schema_id=batches[0].schema_id,
        batches=tuple(map(HEADER, batches)),
        schema=schema,
        marks=marks,
        lineages=lineages,
    )
    return header, WalObject.encode(header, tuple(map(RECORD, batches)))


HEADER, RECORD = attrgetter("header"), attrgetter("record")
NO_LINEAGES: dict[str, Lineage] = {}
NO_MARKS: dict[str, int] = {}


def _lineages(batches: Iterable[Pending]) -> dict[str, Lineage]:
    """Return the last entry of each epoch in an object, by stream."""
    lineages: dict[str, Lineage] = {}
    for pending in batches:
        if pending.mark is not None:
            stream, points = pending.mark
            lineages[stream] = extend_lineage(lineages.get(stream, ()), points)
    return lineages


def find_abandoned(inflight: Iterable[InflightObject], sender: object) -> InflightObject | None:
    """Return an object whose sender was interrupted; `sender` continues with it."""
    for sent in inflight:
        if sent.sender is None and sent.response is None:
            sent.sender = sender
            return sent
    return None


class InflightMetrics:
    """Metrics of every commit; looked up once."""

    def __init__(self, metrics: Metrics) -> None:
        self.seconds = metrics.histogram("commit.seconds")
        self._objects = metrics.gauge("commit.in_flight")
        self._bytes = metrics.gauge("commit.in_flight_bytes")
        self.unfolded_bytes = metrics.gauge("commit.unfolded_bytes")
        self._group_batches = metrics.histogram("commit.group_batches", unit=1.0)
        self._object_bytes = metrics.histogram("commit.object_bytes", unit=1.0)
        self._object_rows = metrics.histogram("commit.object_rows", unit=1.0)

    def record_launch(self, sent: InflightObject) -> None:
        rows = 0
        for batch in sent.header.batches:
            rows += batch.ops
        self._group_batches.record(len(sent.batches))
        self._object_bytes.record(len(sent.body))
        self._object_rows.record(rows)
        self._objects.value += 1
        self._bytes.value += len(sent.body)

    def record_inflight(self, inflight: Iterable[InflightObject]) -> None:
        objects = size = 0
        for sent in inflight:
            objects += 1
            size += len(sent.body)
        self._objects.value, self._bytes.value = objects, size


def receipt_of(namespace: Namespace, header: WalHeader, index: int) -> Receipt:
    """Return the receipt of one batch of an object."""
    batch = header.batches[index]
    return Receipt(
        namespace.name,
        header.lsn,
        index,
        header.epoch,
        header.write_id,
        batch.ops if batch.changes is None else batch.changes,
        idempotency_key=batch.key,
    )


def replayed_receipt(namespace: str, entry: DedupEntry) -> Receipt:
    """Return the receipt of a batch whose key was committed before."""
    return Receipt(
        namespace,
        entry.lsn,
        entry.index,
        entry.epoch,
        entry.write_id,
        entry.ops,
        replayed=True,
        idempotency_key=entry.key,
    )


def unknown_outcome(
    namespace: Namespace, header: WalHeader, index: int, cause: object
) -> OutcomeUnknownError:
    """Return the error for a batch that may have been committed."""
    return OutcomeUnknownError(
        f"LSN {header.lsn} of {namespace.name} may have been committed: {cause}",
        hint="resolve() this error before trying again",
        namespace=namespace.name,
        receipt=receipt_of(namespace, header, index),
    )


@dataclass(frozen=True, slots=True)
class InflightSender:
    """Sends for one writer."""

    log: Log
    heads: HeadFinder
    deadline_s: float
    runtime: Runtime

    def send(self, inflight: InflightObject) -> WriteResult:
        """Return the outcome; `inflight.doubt` separates unknown from refused."""
        response = self._put(inflight)
        if response.outcome is Outcome.UNKNOWN:
            return response
        took_s = self.heads.dates.took_s(inflight.sent, response.date_s)
        # Whether no slot can have been collected since the first attempt was sent. One attempt
        # that lost at once: the slot was taken before it came.
        if response.outcome is Outcome.CREATED:
            is_certain = inflight.head is not None and inflight.head.is_quick(took_s)
        else:
            head = self.heads.last
            is_quick = head is not None and head.is_quick(took_s)
            is_certain = is_quick and not inflight.doubt
        return response if is_certain else self._prove(inflight, response)

    def _put(self, inflight: InflightObject) -> WriteResult:
        """Send the same bytes each time. An attempt that raises has written nothing."""
        deadline = inflight.batches[0].deadline
        end_s = self.runtime.boottime_s() + self.deadline_s
        while True:
            try:
                response = self.log.fill(inflight.header.lsn, inflight.body)
                doubt = response.doubt or response.outcome is Outcome.UNKNOWN
                inflight.doubt = inflight.doubt or doubt
            except UnavailableError as error:
                response = WriteResult(Outcome.UNKNOWN, cause=error)
                if error.kind is ErrorKind.DISK_FULL and deadline is None:  # not over soon (H78)
                    return response
            except ReefError as error:  # a refusal is final
                return WriteResult(Outcome.UNKNOWN, cause=error)
            if response.outcome is not Outcome.UNKNOWN:
                return response
            if self.runtime.boottime_s() >= end_s if deadline is None else deadline.passed():
                return response
            self.runtime.sleep(self.runtime.uniform(0.01, 0.2))

    def _prove(self, inflight: InflightObject, response: WriteResult) -> WriteResult:
        """Prove by the floor: the slot may have been collected and filled again (H66)."""
        try:
            self.heads.forget()
            manifest = self.heads.find(dropped=True).manifest
        except ReefError as error:
            inflight.doubt = True
            return WriteResult(Outcome.UNKNOWN, cause=error)
        match prove(manifest, inflight.header, in_slot=response.landed):
            case Proof.COUNTS:
                return WriteResult(Outcome.CREATED)
            case Proof.LOST:
                return response
        inflight.doubt = True
        floor = manifest.wal_floor
        cause = UnavailableError(f"LSN {inflight.lsn} was folded: the floor is LSN {floor}")
        return WriteResult(Outcome.UNKNOWN, cause=cause)
