"""The local buffer: batches that are durable on the local disk and not yet in the bucket.

    put       check the key, wait for room, queue
    sync      one thread writes all queued batches at once: one write, one sync; then their rows
              become visible and they are completed
    upload    in the background (`uploader`); uploaded batches leave the buffer

A caller that waits for its batch also syncs; a worker does it for callers that do not wait. If the
disk fails, the fate of the batches in that write is unknown: the buffer accepts nothing more, and
every caller gets an error (H26). Batches that were acknowledged before are in memory, and are
still uploaded.

Conditions and transactions are decided in the bucket, behind a barrier: no batch is admitted
while one is in progress, and before it all buffered batches are uploaded. So they see every
earlier write, and later writes come later for every reader. Batches that had to wait for a barrier
are admitted before the next one.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from reef.config import WriterSettings
from reef.engine.commit.committer import Committer
from reef.engine.commit.completions import Completion, Completions, new_future
from reef.engine.commit.inflight import PatchedKeys, replayed_receipt
from reef.engine.local import stream
from reef.engine.local.stream import (
    LocalBatch,
    LocalPosition,
    LocalReceipt,
    LogIdentity,
    PendingUploads,
    encode_entry,
    point_of,
)
from reef.engine.log.tail import Watcher
from reef.engine.read.memtable import Memtable
from reef.engine.read.view import View
from reef.errors import ClosedError, InvalidInputError, ReefError
from reef.formats.manifest import Lineage, StreamPoint
from reef.formats.schema import Schema
from reef.formats.wal_object import AnyOps
from reef.locallog import LocalLog
from reef.manifest.dedup import StreamHistory
from reef.runtime import ConditionVariable, Deadline, Future, Runtime, Stopwatch
from reef.types import Receipt

BATCH_BYTES = 1536
"""Approximate memory per batch besides its record: its row, its receipts, its place here."""
SYNC_BYTES_MAX = 64 << 20
"""Upper bound of one write to the disk, however large an upload may be."""
LINGER_S = 1.0
"""How long an idle worker waits for more batches."""
FIRST_LSN = 1 << 61
"""First LSN of the overlay: above every LSN of a log, and below those of a transaction."""


@dataclass(eq=False, slots=True)
class BufferedBatch(Completion):
    """A batch on its way to the local disk, then to the bucket. Completed by the disk."""

    batch: LocalBatch
    ops: AnyOps
    queued: Stopwatch
    patched: PatchedKeys | None = None
    """Set if its patches of missing rows are not counted."""
    index: int = 0
    """Its index in the local log; 0 before it is written there."""
    points: Lineage = ()
    """Its entry in the local log; then entries right behind it that are in the bucket already."""
    receipts: list[LocalReceipt] = field(default_factory=list)
    """Its own, and one for each repeat of its key: its upload fills all of them in."""

    @property
    def mark(self) -> int:
        """Every entry up to this index is in the bucket once this batch is."""
        return self.points[-1].index

    def set_point(self, point: StreamPoint) -> None:
        """Set its entry in the local log."""
        self.index, self.points = point.index, (point,)


class Backlog:
    """Batches that are not in the bucket yet, first in, first out. Guarded by the buffer's lock.

        arriving   submitted, not on the local disk yet: not visible
        waiting    on the local disk, acknowledged, not in the bucket yet

    Both together are bounded in memory. The keys of both are looked up before a batch is admitted,
    so that an idempotency key counts once from its submission on (H19).
    """

    def __init__(self, bytes_max: int) -> None:
        self.arriving: deque[BufferedBatch] = deque()
        self.waiting: deque[BufferedBatch] = deque()
        self.bytes = 0
        self._waiting_bytes = 0
        self._bytes_max = bytes_max
        self._keys: dict[str, BufferedBatch] = {}

    @property
    def _held(self) -> int:
        """Approximate memory of all batches."""
        return self.bytes + BATCH_BYTES * (len(self.arriving) + len(self.waiting))

    def has_room(self, size: int) -> bool:
        """Whether one more fits in; an empty backlog accepts any batch."""
        return not self.bytes or self._held + BATCH_BYTES + size <= self._bytes_max

    @property
    def is_crowded(self) -> bool:
        """Whether to upload now, however few batches there are."""
        return self._held > self._bytes_max // 2

    def find(self, item: BufferedBatch) -> BufferedBatch | None:
        """Return the batch with the same key, if there is one; rejects another body (H19)."""
        header = item.batch.header
        other = self._keys.get(header.key) if header.key is not None else None
        if other is not None and other.batch.header.digest != header.digest:
            raise InvalidInputError(
                f"idempotency key {header.key!r} is in progress with another batch",
                hint="A key identifies one batch; use a new key for a new batch",
                idempotency_key=header.key,
            )
        return other

    def add(self, item: BufferedBatch) -> None:
        self.arriving.append(item)
        self._count(item)

    def restore(self, item: BufferedBatch) -> None:
        """Add a batch that was loaded from the disk."""
        self.waiting.append(item)
        self._waiting_bytes += item.batch.size
        self._count(item)

    def _count(self, item: BufferedBatch) -> None:
        self.bytes += item.batch.size
        if item.batch.header.key is not None:
            self._keys[item.batch.header.key] = item

    def next_sync(self, bytes_max: int) -> list[BufferedBatch]:
        """Return the batches of the next sync; they stay here until it is done."""
        return _first(self.arriving, bytes_max)

    def synced(self, group: list[BufferedBatch]) -> None:
        for item in group:
            self.arriving.popleft()
            self.waiting.append(item)
            self._waiting_bytes += item.batch.size

    def next_upload(self, bytes_max: int) -> list[BufferedBatch]:
        """Return the batches of the next upload; they stay here until they are in the bucket."""
        return _first(self.waiting, bytes_max)

    def uploaded(self, item: BufferedBatch) -> None:
        """Remove the first waiting batch: it is in the bucket."""
        if self.waiting.popleft() is not item:
            raise ValueError(f"batch {item.index} was uploaded out of order")
        self.bytes -= item.batch.size
        self._waiting_bytes -= item.batch.size
        self._forget_key(item)

    def reject_arriving(self) -> list[BufferedBatch]:
        """Remove and return the batches that are not on the disk."""
        rejected = list(self.arriving)
        self.arriving.clear()
        self.bytes -= sum(item.batch.size for item in rejected)
        for item in rejected:
            self._forget_key(item)
        return rejected

    def _forget_key(self, item: BufferedBatch) -> None:
        key = item.batch.header.key
        if key is not None and self._keys.get(key) is item:
            del self._keys[key]

    def pending(self) -> PendingUploads:
        """Return the number, size and indexes of the waiting batches."""
        if not self.waiting:
            return PendingUploads(0, 0, 0, 0)
        first, last = self.waiting[0].index, self.waiting[-1].index
        return PendingUploads(len(self.waiting), self._waiting_bytes, first, last)


def _first(items: "deque[BufferedBatch]", bytes_max: int) -> list[BufferedBatch]:
    taken: list[BufferedBatch] = []
    size = 0
    for item in items:
        size += item.batch.size
        if taken and size > bytes_max:
            break
        taken.append(item)
    return taken


class Overlay:
    """Rows that are on the local disk and not yet applied from the bucket's log.

    It is above everything in the bucket, since all of its rows will be committed after that. Rows
    are added once they are durable locally, and dropped after their upload was applied below; in
    between they are in both, which shows the same rows. Dropping makes a new table: a reader of the
    old one keeps its snapshot. Changed under the buffer's lock, read without it.
    """

    def __init__(self, schema: Schema, next_index: int) -> None:
        self.table = Memtable(schema, FIRST_LSN + next_index)

    def apply(self, index: int, ops: AnyOps, schema: Schema) -> None:
        """Make a batch visible."""
        self.follow(schema)
        self.table.apply(FIRST_LSN + index, [ops])

    def drop_to(self, index: int, *, is_last: bool) -> None:
        """Drop every row up to an index; `is_last` if there is none above it."""
        if is_last:
            self.table = Memtable(self.table.schema, FIRST_LSN + index + 1)
        else:
            self.table = self.table.drop_below(FIRST_LSN + index + 1)

    def follow(self, schema: Schema) -> None:
        """Adopt the columns of a newer schema."""
        if schema.id != self.table.schema.id:
            self.table = self.table.drop_below(self.table.first_lsn, schema)


class LocalBuffer:
    """The batches that one writer has on its local disk, and not yet in the bucket."""

    def __init__(
        self,
        log: LocalLog,
        identity: LogIdentity,
        committer: Committer,
        settings: WriterSettings,
        runtime: Runtime,
        *,
        position: LocalPosition,
    ) -> None:
        self.log = log
        self.identity = identity
        self.committer = committer
        self.settings = settings
        self.runtime = runtime
        self.changed: ConditionVariable = runtime.condition()
        self.backlog = Backlog(settings.local_backlog_bytes_max)
        self.uploaded = position.uploaded
        """Every entry up to this index is in the bucket."""
        self.last_index = max(log.last_index, position.uploaded)
        """The last entry on the disk."""
        self._digest = _digest_at(self.last_index, log, position.history)
        """Digest of all entries up to that one."""
        self.end_error: ReefError | None = None
        """Why no batch is accepted any more."""
        self.upload_error: ReefError | None = None
        """Why no batch is uploaded any more."""
        self.upload_waiters = 0
        """Callers that wait for an upload: it does not wait for more batches meanwhile."""
        self._overlay = Overlay(self._schema(), position.uploaded + 1)
        self.wake_uploader: Callable[[], None] = lambda: None
        """May be called under the lock."""
        self._watcher: Watcher | None = None
        self._sync_bytes = min(settings.group_bytes_max, SYNC_BYTES_MAX)
        self._syncing = False
        self._completions = Completions(
            runtime, self.changed, self, name="local-sync", linger_s=LINGER_S
        )
        self._barriers = 0
        self._held_back = 0
        """Batches that wait for the end of a barrier."""

    # --- reading ------------------------------------------------------------------
    def view(self) -> View:
        """Return a view of the bucket with the rows of the local log above it."""
        if self._overlay.table.schema.id != self._schema().id:
            with self.changed:
                self._overlay.follow(self._schema())
        below = self.committer.tail.view()
        return View(below.manifest, below.segments, below.memtable, self._overlay.table, self)

    def is_newest(self, view: View) -> bool:
        """Whether both tables of a view are still in use; called with both locked.

        A table that was replaced no longer changes while the other one does: together they would
        show a state that never existed (H69).
        """
        below = self.committer.tail.view().memtable
        return view.staged is self._overlay.table and view.memtable is below

    def newest(self) -> View:
        return self.view()

    def first_lsn(self, memtable: Memtable) -> int:
        """Return the first LSN of the overlay that a memtable does not include yet.

        An uploaded row stays in the overlay for a while. By then the log may have a newer version,
        by a load for instance, which it must not hide (H69).
        """
        return FIRST_LSN + memtable.marks.get(self.identity.stream, 0) + 1

    def watch(self, watcher: Watcher) -> None:
        """Notify `watcher` of every batch that becomes visible."""
        self._watcher = watcher

    def pending(self) -> PendingUploads:
        """Return the batches that are not known to be in the bucket."""
        with self.changed:
            return self.backlog.pending()

    # --- putting ------------------------------------------------------------------
    def put(
        self,
        batch: LocalBatch,
        ops: AnyOps,
        patched: PatchedKeys | None = None,
        *,
        wait: bool,
        owner: object | None = None,
    ) -> Any:
        """Return a receipt when a batch is on the disk, or a future of one.

        `owner` is the writer, which is kept alive until a batch without a waiting caller is there.
        """
        future: Future[Receipt] | None = None if wait else new_future(self.runtime)
        item = BufferedBatch(
            batch,
            ops,
            self.runtime.stopwatch(),
            patched=patched,
            future=future,
            in_callback=self._completions.in_callback,
        )
        known = self._admit(item)
        if known is not None:
            item.complete_at_once(self._repeat_receipt(known))
        elif future is None:
            self._drive(item)
        else:
            self._completions.ensure_worker(owner)
        return item.outcome() if future is None else future

    def restore(self, item: BufferedBatch) -> None:
        """Add a batch that an earlier writer has left on the disk, and make it visible."""
        with self.changed:
            self._overlay.apply(item.index, item.ops, self._schema())
            item.result = self._receipt(item)
            self.backlog.restore(item)

    def _admit(self, item: BufferedBatch) -> BufferedBatch | Receipt | None:
        """Queue a batch; or return the one with the same key, or the receipt of its commit."""
        deadline: Deadline | None = None
        with self.changed:
            while True:
                self.check_open()
                known = self.backlog.find(item) or self._committed_receipt(item)
                if known is not None:
                    return known
                if not self._barriers and self.backlog.has_room(item.batch.size):
                    self.backlog.add(item)
                    return None
                deadline = deadline or self.runtime.deadline(self.settings.write_deadline_s)
                if deadline.passed():
                    raise stream.queue_full_error(self.identity.namespace, self._why_full())
                self._await_admission(deadline)

    def _why_full(self) -> str:
        if self._barriers:
            return "conditions or transactions wait for the bucket"
        return f"{self.backlog.bytes} bytes in {self.log.path} wait for the bucket"

    def _await_admission(self, deadline: Deadline) -> None:
        held_back = self._barriers > 0
        self._held_back += held_back
        try:
            self.changed.wait(max(0.001, deadline.remaining_s()))
        finally:
            self._held_back -= held_back
            self.changed.notify_all()  # the next barrier may wait for that

    def _committed_receipt(self, item: BufferedBatch) -> Receipt | None:
        header = item.batch.header
        if header.key is None or header.digest is None:
            return None
        entry = self.committer.tail.dedup.find(header.key, header.digest)
        return None if entry is None else replayed_receipt(self.identity.namespace, entry)

    def _repeat_receipt(self, known: BufferedBatch | Receipt) -> Receipt:
        """Return the receipt of a repeated key, when its batch is on the disk."""
        if isinstance(known, Receipt):
            return known
        self._drive(known)
        first = known.outcome()
        with self.changed:
            again = self._receipt(known, replayed=True)
            if first.lsn is not None:
                again._fill(first)
        return again

    # --- syncing ------------------------------------------------------------------
    def _drive(self, item: BufferedBatch) -> None:
        """Sync, on the caller's thread, until a batch is decided."""
        try:
            while (sync := self._await_sync(item)) is not None:
                sync()
        except BaseException:
            self._completions.ensure_worker()  # an interrupt abandons the wait, not the batch
            raise
        self._completions.deliver_in_background()

    def _await_sync(self, item: BufferedBatch) -> Callable[[], None] | None:
        with self.changed:
            while item.result is None:
                if (sync := self.next_work()) is not None:
                    return sync
                self.changed.wait(None)
        return None

    def has_work(self) -> bool:
        return bool(self.backlog.arriving)

    def next_work(self) -> Callable[[], None] | None:
        """Claim the disk for the next group; under the lock."""
        if not self.backlog.arriving or self._syncing:
            return None
        self._syncing = True
        return partial(self._sync, self.backlog.next_sync(self._sync_bytes))

    def _sync(self, group: list[BufferedBatch]) -> None:
        """Write a group, make it visible, complete it. One thread at a time does this."""
        watch = self.runtime.stopwatch()
        try:
            self._write(group)
            self.runtime.reach("local synced")
            with self.changed:
                self._show(group)
                self._free_disk()
        except BaseException as error:
            self._fail(group, error)
            if not isinstance(error, Exception):
                raise
        self.committer.metrics.histogram("local.sync_seconds").record(watch.elapsed_s())

    def _write(self, group: list[BufferedBatch]) -> None:
        epoch, now_ns = self.committer.opened.epoch, self.runtime.wall_ns()
        entries, digest = [], self._digest
        for place, item in enumerate(group, self.last_index + 1):
            entry = encode_entry(place, epoch, item.batch, now_ns, digest)
            item.set_point(point_of(entry))
            entries.append(entry)
            digest = item.points[0].digest
        self.log.store_logs(entries)
        self._digest = digest

    def _show(self, group: list[BufferedBatch]) -> None:
        """Make the rows of a group visible, then complete it."""
        if self._watcher is not None:
            self._watcher.applying([item.ops for item in group])
        try:
            for item in group:
                if item.patched is not None:
                    self._count_patched(item, item.patched)
                self._overlay.apply(item.index, item.ops, self._schema())
        finally:
            if self._watcher is not None:
                self._watcher.applied()
        self.last_index = group[-1].index
        was_empty = not self.backlog.waiting
        self.backlog.synced(group)
        for item in group:
            self._completions.complete(item, self._receipt(item))
        if was_empty or self.backlog.bytes >= self.settings.upload_bytes:
            self.wake_uploader()
        self.committer.metrics.gauge("local.backlog_bytes").set(self.backlog.bytes)

    def _count_patched(self, item: BufferedBatch, patched: PatchedKeys) -> None:
        """Count the rows that patches change; every batch before them is visible."""
        tables = [self._overlay.table, self.committer.tail.view().memtable]
        count = patched.count(item.ops, (), tables, int(self.runtime.wall_s() * 1000))
        item.batch = replace(item.batch, header=item.batch.header.with_changes(count))

    def _fail(self, group: list[BufferedBatch], error: BaseException) -> None:
        """End after an error or an interrupt while writing: the disk may have the group.

        It has not if the log had failed before, and refuses.
        """
        with self.changed:
            for item in group:
                unknown = stream.unknown_outcome_error(
                    item.index, self.log.path, error, self._blank(item)
                )
                self._completions.complete(
                    item, error if isinstance(error, ClosedError) else unknown
                )
            if self.end_error is None:
                broken = stream.broken_writer_error(self.identity.namespace, error)
                self.end_error = error if isinstance(error, ReefError) else broken
            self._free_disk()

    def _free_disk(self) -> None:
        """Let the next thread sync; if this buffer has ended, reject the queued batches."""
        self._syncing = False
        if self.end_error is not None:
            for item in self.backlog.reject_arriving():
                self._completions.complete(item, self.end_error)
        self.changed.notify_all()

    # --- waiting for the bucket ---------------------------------------------------
    def drain(self, timeout_s: float | None = None) -> None:
        """Return when every batch that was submitted before is in the bucket."""
        with self.changed:
            last = self.backlog.arriving[-1] if self.backlog.arriving else None
        if last is not None:
            self._drive(last)
            last.outcome()
        self._completions.deliver_rest()
        with self.changed:
            index = self.last_index if last is None else last.index
        self.await_upload(index, timeout_s)

    def await_upload(self, index: int, timeout_s: float | None = None) -> None:
        """Return when every entry up to an index is in the bucket."""
        seconds = self.settings.commit_deadline_s if timeout_s is None else timeout_s
        deadline = self.runtime.deadline(seconds)
        with self.changed:
            self.upload_waiters += 1
            self.wake_uploader()
            try:
                while self.uploaded < index:
                    if self.upload_error is not None:
                        raise self.upload_error.with_traceback(None)
                    if deadline.passed():
                        pending = self.backlog.pending()
                        raise stream.upload_timeout_error(
                            self.identity.namespace, pending, self.log.path, seconds
                        )
                    self.changed.wait(max(0.001, deadline.remaining_s()))
            finally:
                self.upload_waiters -= 1

    def begin_barrier(self) -> None:
        """Admit no batch until `end_barrier`; return when every admitted one is in the bucket."""
        deadline = self.runtime.deadline(self.settings.write_deadline_s)
        with self.changed:
            while self._held_back and not deadline.passed():
                self.changed.wait(max(0.001, deadline.remaining_s()))
            self.check_open()
            self._barriers += 1
        try:
            self.drain()
        except BaseException:
            self.end_barrier()
            raise

    def end_barrier(self) -> None:
        with self.changed:
            self._barriers -= 1
            self.changed.notify_all()

    def await_barriers(self, deadline: Deadline) -> None:
        """Wait for conditions and transactions that are in progress, until a deadline."""
        with self.changed:
            while self._barriers and not deadline.passed():
                self.changed.wait(max(0.001, deadline.remaining_s()))

    @contextmanager
    def barrier(self) -> Iterator[None]:
        """Admit no batch in this block; when it begins, every batch is in the bucket."""
        self.begin_barrier()
        try:
            yield
        finally:
            self.end_barrier()

    def note_uploaded(self, item: BufferedBatch, receipt: Receipt) -> None:
        """Remove the first waiting batch: it is in the bucket, and applied."""
        for given in item.receipts:
            given._fill(receipt)
        self.backlog.uploaded(item)
        self.uploaded = item.mark

    def note_progress(self) -> None:
        """Drop uploaded rows, and wake callers that wait for the bucket; under the lock."""
        self._overlay.drop_to(self.uploaded, is_last=not self.backlog.waiting)
        self.committer.metrics.gauge("local.backlog_bytes").set(self.backlog.bytes)
        self.changed.notify_all()

    # --- the end ------------------------------------------------------------------
    def check_open(self) -> None:
        """Raise the error that ended this buffer, if one did."""
        if self.end_error is not None:
            raise self.end_error.with_traceback(None)

    def end(self, error: ReefError) -> None:
        """Accept nothing more; batches that are not on the disk are rejected."""
        with self.changed:
            self.end_error = self.end_error or error
            self.changed.notify_all()
            if not self._syncing:  # otherwise the thread that syncs rejects the rest
                self._free_disk()
        self.wake_uploader()
        self._completions.deliver_rest()

    def end_upload(self, error: ReefError) -> None:
        """Upload nothing more either: pending batches stay on the disk."""
        with self.changed:
            self.upload_error = self.upload_error or error
        self.end(error)

    # --- inside -------------------------------------------------------------------
    def _schema(self) -> Schema:
        return self.committer.tail.manifest.schema

    def _blank(self, item: BufferedBatch, *, replayed: bool = False) -> Receipt:
        header, epoch = item.batch.header, self.committer.opened.epoch
        name = self.identity.namespace
        return Receipt(name, None, 0, epoch, "", header.counted, replayed, header.key)

    def _receipt(self, item: BufferedBatch, *, replayed: bool = False) -> LocalReceipt:
        blank = self._blank(item, replayed=replayed)
        receipt = LocalReceipt(blank, self.identity.stream, item.points[0], self.await_upload)
        item.receipts.append(receipt)
        return receipt


def _digest_at(index: int, log: LocalLog, history: StreamHistory) -> bytes:
    """Return the digest of all entries up to the last one; empty where neither log nor bucket
    has it any more: then the next entry begins another chain."""
    if log.last_index == index > 0:
        return point_of(log.get_log(index)).digest
    return history.digest if history.mark == index else b""
