"""The front: batches become durable on the local disk, and the books of those are kept.

    put       look up the key, wait for room, queue
    sync      one thread takes all that is queued: one write, one sync; then the rows are shown
              and the receipts given
    upload    in the background (`uploader`); what is in the bucket leaves the books here

Whoever waits for a batch also syncs; a helper does it for those who do not wait. If the disk
fails, nobody knows what it has: the front takes nothing more, and every waiter is told (H26). What
was acknowledged before is in memory, and is still uploaded.

Conditions and transactions go to the bucket. Meanwhile no batch is let in here, and before that
all that was is uploaded: so what they see is all there is, and what comes later is later for
everyone. Batches that had to wait for that come before the next one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from reef.config import WriterSettings
from reef.engine.commit.committer import Committer
from reef.engine.commit.flights import replayed_receipt
from reef.engine.local import words
from reef.engine.local.backlog import Backlog, Item, Left
from reef.engine.local.entries import LocalBatch, encode_entry, point_of
from reef.engine.local.helpers import LocalHelpers
from reef.engine.local.identity import LogIdentity
from reef.engine.local.overlay import FIRST_LSN, Overlay
from reef.engine.local.position import Position
from reef.engine.local.receipts import LocalReceipt
from reef.engine.reading.memtable import Memtable
from reef.engine.reading.view import View
from reef.engine.tail import Watcher
from reef.errors import ClosedError, InternalError, ReefError
from reef.formats.batch import AnyOps
from reef.locallog import LocalLog
from reef.manifest.streams import StreamHistory
from reef.runtime import Condition, Deadline, Future, Runtime
from reef.types import Receipt

__all__ = ["LocalFront"]

SYNC_BYTES_MAX = 64 << 20
"""What one sync takes at most, however large an upload may be."""


class LocalFront:
    """What one writer has on its local disk, and not yet in the bucket."""

    def __init__(
        self,
        log: LocalLog,
        identity: LogIdentity,
        committer: Committer,
        settings: WriterSettings,
        runtime: Runtime,
        *,
        position: Position,
    ) -> None:
        self.log = log
        self.identity = identity
        self.committer = committer
        self.settings = settings
        self.runtime = runtime
        self.changed: Condition = runtime.condition()
        self.backlog = Backlog(settings.local_backlog_bytes_max)
        self.uploaded = position.uploaded
        """Up to which index all is in the bucket."""
        self.last_index = max(log.last_index, position.uploaded)
        """The last one that is on the disk."""
        self._digest = _digest_at(self.last_index, log, position.history)
        """Of all entries up to that one."""
        self.end_error: ReefError | None = None
        """Why nothing more is taken."""
        self.upload_error: ReefError | None = None
        """Why nothing more is uploaded."""
        self.hurry = 0
        """How many wait for the bucket: nothing is gathered meanwhile."""
        self._overlay = Overlay(self._schema(), position.uploaded + 1)
        self.poke: Callable[[], None] = lambda: None
        """Wakes the uploader. It may be called under the lock."""
        self._watcher: Watcher | None = None
        self._sync_bytes = min(settings.group_bytes_max, SYNC_BYTES_MAX)
        self._syncing = False
        self._helpers = LocalHelpers(runtime, self.changed, self.backlog, self._next_sync)
        self._barriers = 0
        self._held_back = 0
        """Batches that wait for a barrier to go."""

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

        A table that was replaced stays as it was while the other one goes on: together they
        would show a state that never was (H69).
        """
        below = self.committer.tail.view().memtable
        return view.staged is self._overlay.table and view.memtable is below

    def newest(self) -> View:
        return self.view()

    def first_lsn(self, memtable: Memtable) -> int:
        """Return the first LSN of the overlay that a memtable does not include yet.

        An uploaded row stays in the overlay for a while. By then the log may hold something
        newer, a load for instance, which it must not hide (H69).
        """
        return FIRST_LSN + memtable.marks.get(self.identity.stream, 0) + 1

    def watch(self, watcher: Watcher) -> None:
        """Tell it of every batch that is shown from now on."""
        self._watcher = watcher

    def left(self) -> Left:
        with self.changed:
            return self.backlog.left()

    # --- putting ------------------------------------------------------------------
    def put(self, batch: LocalBatch, ops: AnyOps, *, wait: bool) -> Any:
        """Return a receipt when a batch is on the disk, or a future of one."""
        future: Future[Receipt] | None = None
        if not wait:
            future = self.runtime.future()
            future.set_running_or_notify_cancel()  # it cannot be taken back (H26)
        item = Item(batch, ops, self.runtime.stopwatch(), future, self._helpers.in_callback)
        known = self._admit(item)
        if known is None and future is not None:
            self._helpers.ensure()
            return future
        receipt = self._drive(item) if known is None else self._repeated(known)
        if future is None:
            return receipt
        future.set_result(receipt)
        return future

    def restore(self, item: Item) -> None:
        """Take in a batch that is on the disk since an earlier life, and show it."""
        with self.changed:
            self._overlay.apply(item.index, item.ops, self._schema())
            item.answer = self._receipt(item)
            self.backlog.restore(item)

    def _admit(self, item: Item) -> "Item | Receipt | None":
        """Queue a batch; or return the one with the same key, or how that was committed."""
        deadline = self.runtime.deadline(self.settings.write_deadline_s)
        with self.changed:
            while True:
                self.check_open()
                known = self.backlog.find(item) or self._committed(item)
                if known is not None:
                    return known
                if not self._barriers and self.backlog.has_room(item.batch.size):
                    self.backlog.add(item)
                    return None
                if deadline.passed():
                    raise words.no_room(self.identity.namespace, self._why_not())
                self._wait_at_the_door(deadline)

    def _why_not(self) -> str:
        if self._barriers:
            return "conditions or transactions wait for the bucket"
        return f"{self.backlog.bytes} bytes in {self.log.path} wait for the bucket"

    def _wait_at_the_door(self, deadline: Deadline) -> None:
        held_back = self._barriers > 0
        self._held_back += held_back
        try:
            self.changed.wait(max(0.001, deadline.remaining_s()))
        finally:
            self._held_back -= held_back
            self.changed.notify_all()  # the next barrier may wait for that

    def _committed(self, item: Item) -> Receipt | None:
        header = item.batch.header
        if header.key is None or header.digest is None:
            return None
        entry = self.committer.tail.dedup.find(header.key, header.digest)
        return None if entry is None else replayed_receipt(self.identity.namespace, entry)

    def _repeated(self, known: "Item | Receipt") -> Receipt:
        """Answer a repeated key; a batch that is not on the disk yet is waited for."""
        if isinstance(known, Receipt):
            return known
        first = self._drive(known)
        with self.changed:
            again = self._receipt(known, replayed=True)
            if first.lsn is not None:
                again.fill(first)
        return again

    # --- syncing ------------------------------------------------------------------
    def _drive(self, item: Item) -> LocalReceipt:
        """Sync until a batch is answered; raise if it was refused."""
        try:
            while (sync := self._await_sync(lambda: item.answer is not None)) is not None:
                sync()
        except BaseException:
            self._helpers.ensure()  # an interrupt gives up waiting, not the batch
            raise
        self._helpers.leave_none()
        if isinstance(item.answer, LocalReceipt):
            return item.answer
        raise item.answer or InternalError("a batch without an answer")

    def _await_sync(self, is_enough: Callable[[], bool]) -> Callable[[], None] | None:
        with self.changed:
            while not is_enough():
                if (sync := self._next_sync()) is not None:
                    return sync
                self.changed.wait(None)
        return None

    def _next_sync(self) -> Callable[[], None] | None:
        """Claim the disk for the next group; under the lock."""
        if not self.backlog.arriving or self._syncing:
            return None
        self._syncing = True
        return partial(self._sync, self.backlog.next_sync(self._sync_bytes))

    def _sync(self, group: list[Item]) -> None:
        """Write a group, show it, answer it. Only one thread does this at a time."""
        watch = self.runtime.stopwatch()
        try:
            self._write(group)
            self.runtime.reach("local synced")
            with self.changed:
                self._show(group)
                self._free_disk(group)
        except BaseException as error:
            self._break_off(group, error)
            if not isinstance(error, Exception):
                raise
        self.committer.metrics.histogram("local.sync_seconds").record(watch.elapsed_s())

    def _write(self, group: list[Item]) -> None:
        epoch, now_ns = self.committer.opened.epoch, self.runtime.wall_ns()
        entries, digest = [], self._digest
        for place, item in enumerate(group, self.last_index + 1):
            entry = encode_entry(place, epoch, item.batch, now_ns, digest)
            item.set_point(point_of(entry))
            entries.append(entry)
            digest = item.points[0].digest
        self.log.store_logs(entries)
        self._digest = digest

    def _show(self, group: list[Item]) -> None:
        if self._watcher is not None:
            self._watcher.applying([item.ops for item in group])
        try:
            for item in group:
                self._overlay.apply(item.index, item.ops, self._schema())
                item.answer = self._receipt(item)
        finally:
            if self._watcher is not None:
                self._watcher.applied()
        self.last_index = group[-1].index
        was_empty = not self.backlog.waiting
        self.backlog.synced(group)
        if was_empty or self.backlog.bytes >= self.settings.upload_bytes:
            self.poke()
        self.committer.metrics.gauge("local.backlog_bytes").set(self.backlog.bytes)

    def _break_off(self, group: list[Item], error: BaseException) -> None:
        """The disk failed, or we were interrupted over it: it may have the group, unless the log
        has failed before and refuses."""
        with self.changed:
            for item in group:
                unknown = words.unknown(item.index, self.log.path, error, self._blank(item))
                item.answer = error if isinstance(error, ClosedError) else unknown
            is_told = isinstance(error, ReefError)
            broken = words.broken(self.identity.namespace, error)
            self.end_error = self.end_error or (error if is_told else broken)  # type: ignore[assignment]
            self._free_disk(group)

    def _free_disk(self, group: list[Item]) -> None:
        """Let the next one sync, and this group be told; if this was the end, the rest too."""
        self._syncing = False
        self.changed.notify_all()
        if self.end_error is not None:
            rest = self.backlog.refuse_arriving()
            for item in rest:
                item.answer = item.answer or self.end_error
            group = list(dict.fromkeys([*group, *rest]))  # what broke off is still among those
        self._helpers.add(group)

    # --- waiting for the bucket ---------------------------------------------------
    def drain(self, timeout_s: float | None = None) -> None:
        """Return when everything that was handed over before is in the bucket."""
        with self.changed:
            last = self.backlog.arriving[-1] if self.backlog.arriving else None
        if last is not None:
            self._drive(last)
        self._helpers.tell_all()
        with self.changed:
            index = self.last_index if last is None else last.index
        self.await_upload(index, timeout_s)

    def await_upload(self, index: int, timeout_s: float | None = None) -> None:
        """Return when everything up to an index is in the bucket."""
        seconds = self.settings.commit_deadline_s if timeout_s is None else timeout_s
        deadline = self.runtime.deadline(seconds)
        with self.changed:
            self.hurry += 1
            self.poke()
            try:
                while self.uploaded < index:
                    if self.upload_error is not None:
                        raise self.upload_error.with_traceback(None)
                    if deadline.passed():
                        left = self.backlog.left()
                        raise words.late(self.identity.namespace, left, self.log.path, seconds)
                    self.changed.wait(max(0.001, deadline.remaining_s()))
            finally:
                self.hurry -= 1

    def hold_back(self) -> None:
        """Let nothing in until `let_in`; return when all that was let in is in the bucket."""
        deadline = self.runtime.deadline(self.settings.write_deadline_s)
        with self.changed:
            while self._held_back and not deadline.passed():
                self.changed.wait(max(0.001, deadline.remaining_s()))
            self.check_open()
            self._barriers += 1
        try:
            self.drain()
        except BaseException:
            self.let_in()
            raise

    def let_in(self) -> None:
        """End a `hold_back`."""
        with self.changed:
            self._barriers -= 1
            self.changed.notify_all()

    def await_answers(self, deadline: Deadline) -> None:
        """Wait for conditions and transactions that are on their way, if it does not take long."""
        with self.changed:
            while self._barriers and not deadline.passed():
                self.changed.wait(max(0.001, deadline.remaining_s()))

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Let nothing in while this lasts; when it begins, everything is in the bucket."""
        self.hold_back()
        try:
            yield
        finally:
            self.let_in()

    def note_uploaded(self, item: Item, receipt: Receipt) -> None:
        """Note that the first of those that wait is in the bucket, and applied there."""
        for given in item.receipts:
            given.fill(receipt)
        self.backlog.uploaded(item)
        self.uploaded = item.mark

    def note_progress(self) -> None:
        """Let go of what was uploaded, and wake those who wait for it; under the lock."""
        self._overlay.drop_to(self.uploaded, is_last=not self.backlog.waiting)
        self.committer.metrics.gauge("local.backlog_bytes").set(self.backlog.bytes)
        self.changed.notify_all()

    # --- the end ------------------------------------------------------------------
    def check_open(self) -> None:
        """Raise what ended this front, if something did."""
        if self.end_error is not None:
            raise self.end_error.with_traceback(None)

    def end(self, error: ReefError) -> None:
        """Take nothing more; what is not on the disk is refused."""
        with self.changed:
            self.end_error = self.end_error or error
            self.changed.notify_all()
            if not self._syncing:  # otherwise whoever syncs refuses the rest
                self._free_disk([])
        self.poke()
        self._helpers.tell_all()

    def end_upload(self, error: ReefError) -> None:
        """Upload nothing more either: what is not in the bucket stays on the disk."""
        with self.changed:
            self.upload_error = self.upload_error or error
        self.end(error)

    # --- inside -------------------------------------------------------------------
    def _schema(self) -> Any:
        return self.committer.tail.manifest.schema

    def _blank(self, item: Item, *, replayed: bool = False) -> Receipt:
        header, epoch = item.batch.header, self.committer.opened.epoch
        name = self.identity.namespace
        return Receipt(name, None, 0, epoch, "", header.ops, replayed, header.key)

    def _receipt(self, item: Item, *, replayed: bool = False) -> LocalReceipt:
        blank = self._blank(item, replayed=replayed)
        receipt = LocalReceipt(blank, self.identity.stream, item.points[0], self.await_upload)
        item.receipts.append(receipt)
        return receipt


def _digest_at(index: int, log: LocalLog, history: StreamHistory) -> bytes:
    """Return the digest of all entries up to the last one; empty where neither log nor bucket
    knows it any more: then the next entry begins another chain."""
    if log.last_index == index > 0:
        return point_of(log.get_log(index)).digest
    return history.digest if history.mark == index else b""
