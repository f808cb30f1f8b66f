"""The commit path (protocols §2).

Batches queue; groups of them go out as WAL objects, at most M in flight, each with the write ids
that it expects before it; objects that have landed are applied and completed in LSN order. There
is no thread of its own: a caller that waits for its batch also sends, and workers are started only
for callers that do not wait. In the steady state a commit is one PUT and nothing else.

    queue ──group──▶ in flight ──PUT──▶ response ──▶ applied, completed
      ▲                                    │ lost a slot
      └─────────── put back ◀─── resync: list the log, apply it, continue

A lost slot stops sending until every object in flight has its response. In prefix order all
objects behind the lost slot are then lost or void, so all of their batches are put back, in order.

Admission: a batch is looked up by its idempotency key and queued under one lock (H19). A caller
that finds no room waits for its own `write_deadline_s` plus at most one refresh of the head that is
under way: deadlines do not add up. Of the callers that wait, one at a time checks whether a fold
has made room, at most every `REFRESH_S`. Callbacks run on the threads that send, so a write from a
callback never waits for room: it might wait for itself. It is rejected at once, and may be retried
from another thread.

An interrupted caller abandons the wait, not the commit: another thread continues with the object
that it was sending. If a step that changes the state fails halfway, or the store refuses, the
writer ends. In every case all callers get a result (H26).

A full disk is no reason to end: the object is not in its slot. Its batches and all behind them are
rejected at once, and later ones are sent from the same slot on, so that writes succeed again when
there is space (H78).
"""

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import StrEnum
from logging import ERROR
from typing import ParamSpec, TypeVar

from reef.config import WriterSettings
from reef.engine.commit.completions import Completion, Completions
from reef.engine.commit.inflight import (
    GroupQueue,
    InflightMetrics,
    InflightObject,
    InflightSender,
    Pending,
    encode_object,
    find_abandoned,
    receipt_of,
    replayed_receipt,
    unknown_outcome,
)
from reef.engine.commit.open_writer import OpenedWriter
from reef.engine.commit.resync import Resync
from reef.engine.context import NamespaceContext
from reef.engine.log.log import Verdict
from reef.engine.log.tail import Tail, TailCut
from reef.errors import (
    CorruptionError,
    ErrorKind,
    FencedError,
    InternalError,
    InvalidInputError,
    ReefError,
    UnavailableError,
)
from reef.formats.manifest import Manifest, unindexed_rows
from reef.formats.wal_object import WalHeader, WalKind, WalObject
from reef.manifest.head import HeadFinder, ManifestHead
from reef.paths import Namespace
from reef.runtime import Deadline, Runtime, Stopwatch
from reef.stores import Outcome, Store, WriteResult
from reef.telemetry import Events, Metrics, operation
from reef.types import Receipt

P = ParamSpec("P")
T = TypeVar("T")

REFRESH_S = 0.5
"""How often a caller that waits for room refreshes the head: a fold may have made some."""


class State(StrEnum):
    """Only OPEN sends."""

    OPEN = "open"
    LOST = "lost"
    """A slot was lost; a resync follows when every object in flight has its response."""
    ENDED = "ended"


class Committer:
    """Commits batches for one writer."""

    def __init__(
        self,
        store: Store,
        heads: HeadFinder,
        opened: OpenedWriter,
        settings: WriterSettings,
        *,
        metrics: Metrics,
        events: Events,
    ) -> None:
        self.store = store
        self.namespace: Namespace = heads.names
        self.log = NamespaceContext(store, self.namespace).log
        self.heads = heads
        self.opened = opened
        self.settings = settings
        self.runtime: Runtime = store.runtime
        self.metrics = metrics
        self.events = events
        self.tail: Tail = opened.tail
        self.resync = Resync(
            self.namespace, self.log, heads, opened.epoch, opened.writer_id, metrics, events
        )
        self._state = State.OPEN
        self._end: ReefError | None = None
        self._inflight: deque[InflightObject] = deque()
        self._flushing = 0
        self._next_lsn = 0
        self._ids_before: deque[str] = deque()
        """Write ids from the last slot that was seen durable up to the last one sent."""
        self._changed = self.runtime.condition()
        self._lock = self._changed.lock
        self._gaps: list[int] = []
        """Slots that have to be filled before anything is sent: there was no space for a skip."""
        self._waiters = 0
        """Threads that wait on `_changed`."""
        self._weighed: tuple[Manifest | None, int] = None, 0
        """A manifest, and its rows without search indexes."""
        self._refresher: object | None = None
        """The caller that refreshes the head for all that wait for room."""
        self._refreshed: Stopwatch | None = None
        self._completions = Completions(
            self.runtime,
            self._changed,
            self,
            name="sender",
            workers_max=settings.max_parallel_writes,
        )
        self._queue = GroupQueue(settings, self.runtime.monotonic_s)
        self._sender = InflightSender(self.log, heads, settings.commit_deadline_s, self.runtime)
        self._inflight_metrics = InflightMetrics(metrics)
        self._start_after_tail()

    # --- called by clients --------------------------------------------------------
    def submit(self, pending: Pending) -> None:
        """Queue a batch, or complete it by its key; UnavailableError if there is no room in time.

        A key that is in the queue or in flight already is completed with that batch.
        """
        pending.in_callback = self._completions.in_callback
        with self._lock:
            if self._is_admitted(pending):
                return
        self._await_room(pending)

    def find_committed(self, key: str | None) -> Receipt | None:
        """Return the receipt of the batch that was committed with a key, if any was."""
        with self._lock:
            entry = None if key is None else self.tail.dedup.get(key)
        return None if entry is None else replayed_receipt(self.namespace.name, entry)

    @property
    def is_open(self) -> bool:
        return self._end is None

    def check_open(self) -> None:
        """Raise the error that ended this writer, if one did."""
        if self._end is not None:
            raise self._end.with_traceback(None)

    def drive(self, completion: Completion) -> None:
        """Send and apply, on the caller's thread, until a batch is decided."""
        me = object()
        try:
            while completion.result is None:
                inflight = self._next_to_send(me, completion)
                if inflight is None:
                    return
                self._send(inflight)
        except BaseException as error:
            self._hand_over(me, error)
            raise

    def drive_in_background(self, owner: object | None = None) -> None:
        """Make sure that a worker sends batches for which no caller waits.

        The writer that owns them is kept alive until they are decided.
        """
        self._completions.ensure_worker(owner)

    def flush(self) -> None:
        """Return when every batch that was queued before is decided, and its future is set.

        In a callback it returns when all are decided: futures are set as soon as it returns.
        """
        with self._lock:
            self._flushing += 1
            waiting: list[Completion] = self._completions.undelivered()
            for pending in self.pending():
                waiting += [pending, *pending.followers]
        try:
            for completion in waiting:
                self.drive(completion)
                if not self._completions.in_callback:
                    self._completions.deliver(completion)
        except BaseException:
            self._completions.deliver_in_background()
            raise
        finally:
            with self._lock:
                self._flushing -= 1

    @property
    def is_idle(self) -> bool:
        """Whether no batch is pending, as far as can be seen without the lock."""
        return not self.has_work()

    def has_pending(self) -> bool:
        """Return whether batches are not decided yet."""
        with self._changed:
            return bool(self.pending())

    def take_rejection(self) -> ReefError | None:
        """Return the first error since the last call that went to a caller that did not wait."""
        with self._lock:
            return self._completions.take_rejection()

    def end(self, error: ReefError) -> None:
        """Stop for good, and complete every batch."""
        with self._lock:
            self._finish(error)
        self._completions.deliver_rest()

    def run_locked(self, call: Callable[[], T]) -> T:
        """Run a call while nothing is being applied."""
        with self._lock:
            return call()

    def refresh(self) -> None:
        """Load the newest manifest from within a decision, where the lock is held."""
        self._run_resync()
        self.check_open()

    def cut(self) -> TailCut:
        """Return the durable part of the log as it is in memory, for a fold."""
        with self._lock:
            return self.tail.cut()

    def rebase(self) -> None:
        """Load the newest manifest, and apply the objects that others have put into the log."""
        with self._lock:
            alone = self._state is State.OPEN and not self._inflight
            if alone:
                self._run_step(self._run_resync)
        if alone:
            # Batches may have been found committed, or the writer may have ended.
            self._completions.deliver_in_background()
            return
        # Objects are in flight: only the manifest. A lost slot shows in its response.
        self.follow(self.heads.find().manifest)

    def follow(self, manifest: Manifest) -> None:
        """Continue from a newer manifest, if the tail reaches its floor. Sends no request."""
        with self._lock:
            if self.is_open and self.tail.follows(manifest):
                try:
                    self.tail.rebase(manifest)
                except CorruptionError as error:  # its own writes were replaced in the log (H73)
                    self._finish(error)
                    raise
                self._changed.notify_all()

    # --- admission ----------------------------------------------------------------
    def _is_admitted(self, pending: Pending) -> bool:
        if self._end is not None:
            self.check_open()
        if pending.header.key is not None and self._is_repeat(pending):
            return True
        if not self._queue.has_room(self.tail.bytes):
            return False
        if self.tail.manifest.indexes and self._has_too_many_unindexed():
            return False
        self._queue.add(pending)
        return True

    def _is_repeat(self, pending: Pending) -> bool:
        """Whether the key is committed or in progress; then the batch is completed by that."""
        key, digest = pending.header.key, pending.header.digest
        if key is None or digest is None or pending.mark is not None:
            return False
        for other in self.pending():
            if other.header.key == key:
                if other.header.digest != digest:
                    raise InvalidInputError(
                        f"idempotency key {key!r} is in progress with another batch"
                    )
                other.followers = (*other.followers, pending)
                return True
        entry = self.tail.dedup.find(key, digest)
        if entry is None:
            return False
        pending.complete_at_once(replayed_receipt(self.namespace.name, entry))
        return True

    def _await_room(self, pending: Pending) -> None:
        wait_s = 0.0 if pending.in_callback else self.settings.write_deadline_s
        deadline = self.runtime.deadline(wait_s)
        me, tries = object(), 0
        try:
            while True:
                with self._lock:
                    if self._is_admitted(pending):
                        return
                    if deadline.passed() and (tries or not self._is_refresh_due()):
                        raise self._queue_full_error(pending)
                    self._claim_refresh_or_wait(me, deadline)
                self._refresh_if_claimed(me)
                tries += 1
        finally:
            if self._refresher is me:  # interrupted
                self._refresher = None

    def _claim_refresh_or_wait(self, me: object, deadline: Deadline) -> None:
        if self._is_refresh_due():
            self._refresher = me
        else:
            since_s = self._refreshed.elapsed_s() if self._refreshed is not None else 0.0
            pause_s = REFRESH_S - since_s if since_s < REFRESH_S else REFRESH_S
            self._wait(max(0.001, min(pause_s, deadline.remaining_s())))

    def _is_refresh_due(self) -> bool:
        """Whether a fold could make room, and no caller checks for one or just has."""
        if self._refresher is not None:
            return False
        is_folded = self.tail.bytes <= self.settings.unfolded_bytes_max
        if is_folded and not self._has_too_many_unindexed():
            return False
        return self._refreshed is None or self._refreshed.elapsed_s() >= REFRESH_S

    def _refresh_if_claimed(self, me: object) -> None:
        if self._refresher is not me:
            return
        with suppress(UnavailableError):
            self.rebase()  # a fold, in whichever process, makes room
        with self._lock:
            self._refresher, self._refreshed = None, self.runtime.stopwatch()
            self._changed.notify_all()

    def _queue_full_error(self, pending: Pending) -> UnavailableError:
        name, most = self.namespace.name, self.settings.unindexed_rows_max
        reason = (
            f"{name}: write queue is full: {self._queue.bytes} bytes are queued, "
            f"{self.tail.bytes} wait to be folded"
        )
        hint = "Fold the log, write more slowly, or raise the bounds"
        if self._has_too_many_unindexed():
            rows = self._weighed[1]
            reason = f"{name}: expected at most {most} rows without search indexes, found {rows}"
            hint = "Compact the namespace with full=True, or raise unindexed_rows_max"
        if pending.in_callback:
            return UnavailableError(
                f"{reason}; a write from a future's callback does not wait for room",
                hint="Write from a thread other than the callback's, or try again later",
                namespace=name,
            )
        return UnavailableError(reason, hint=hint)

    def _has_too_many_unindexed(self) -> bool:
        """Whether searches would read too many rows one by one, until a compaction."""
        manifest = self.tail.manifest
        if self._weighed[0] is not manifest:
            self._weighed = manifest, unindexed_rows(manifest)
        return self._weighed[1] > self.settings.unindexed_rows_max

    # --- work ---------------------------------------------------------------------
    def pending(self) -> list[Pending]:
        """Return the batches that are not decided yet, in order; under the lock."""
        return [*(p for sent in self._inflight for p in sent.batches), *self._queue]

    def has_work(self) -> bool:
        return bool(self._inflight or self._queue)

    def next_work(self) -> Callable[[], None] | None:
        """Return work for a worker: send and apply until there is something to deliver."""
        return self._work_until_deliverable if self.has_work() else None

    def _work_until_deliverable(self) -> None:
        me = object()
        try:
            while (inflight := self._next_to_send(me, None)) is not None:
                self._send(inflight)
        except BaseException as error:
            self._hand_over(me, error)
            raise

    def _hand_over(self, me: object, error: BaseException) -> None:
        """Let other threads continue with an object whose sender failed: it may land yet."""
        with self._lock:
            if isinstance(error, Exception):  # not an interrupt: the next sender would fail too
                self._finish(_broken(self.namespace, error))
            for inflight in self._inflight:
                if inflight.sender is me:
                    inflight.sender, inflight.doubt = None, True
            is_left = self.has_work() or len(self._completions) > 0
            self._changed.notify_all()
        if is_left:
            self.drive_in_background()

    def _run_step(self, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a step that changes the state; if it fails halfway, this writer ends."""
        try:
            return step(*args, **kwargs)
        except BaseException as error:
            if not isinstance(error, UnavailableError):  # raised before anything has changed
                self._finish(_broken(self.namespace, error))
            raise

    def _next_to_send(self, me: object, completion: Completion | None) -> InflightObject | None:
        """Wait for an object to send; runs a resync if one is due.

        None if `completion` is decided, or for a worker, without one, if it has to deliver.
        """
        with self._lock:
            while completion.result is None if completion is not None else self._keeps_working():
                if self._state is State.LOST and all(
                    sent.response is not None for sent in self._inflight
                ):
                    self._run_step(self._run_resync)
                    continue
                waiting = len(self._queue)
                inflight = self._run_step(self._abandoned_or_new, me)
                if inflight is not None:
                    return inflight
                if len(self._queue) == waiting:  # otherwise one was rejected: try the next
                    self._wait(self._queue.wait_s(len(self._inflight)))
        return None

    def _keeps_working(self) -> bool:
        return not self._completions.deliverable() and self.has_work()

    def _wait(self, timeout_s: float | None) -> None:
        self._waiters += 1
        try:
            self._changed.wait(timeout_s)
        finally:
            self._waiters -= 1

    def _abandoned_or_new(self, me: object) -> InflightObject | None:
        abandoned = find_abandoned(self._inflight, me) if self._inflight else None
        if abandoned is not None or self._state is not State.OPEN:
            return abandoned
        group = self._queue.next_group(len(self._inflight), flushing=self._flushing > 0)
        if not group:
            return None
        if self._waiters:
            self._changed.notify_all()  # there is room again, or a batch is decided
        try:
            head = self._proving_head()
            if head is None and not self._inflight:
                group, head = self._refreshed_before(group)
            if group and group[0].decide is not None:
                group[0].decide()
                group = self._complete_replayed(group)  # a refresh may have found its key (H46)
                head = self._proving_head()
            return self._launch(group, me, head) if group else None
        except ReefError as error:
            for pending in self._complete_replayed(group):
                self._completions.complete(pending, error)
            return None
        except BaseException:
            if not any(inflight.batches is group for inflight in self._inflight):
                self._queue.put_back(group)
            raise

    def _proving_head(self) -> ManifestHead | None:
        """Return the head if it shows that the next slot was not collected."""
        head = self.heads.last
        return head if head is not None and head.shows_open(self._next_lsn) else None

    def _refreshed_before(self, group: list[Pending]) -> tuple[list[Pending], ManifestHead | None]:
        """Read the head and the log before a group is sent; return the batches that still count.

        The next slot may have been filled, folded and collected since it was seen open: batches
        of streams are collected as those of writers are, and their streams take no role (H52).
        """
        with suppress(UnavailableError):  # then the response is proved by the floor
            self._run_resync()
        self.check_open()
        return self._complete_replayed(group), self._proving_head()

    def _complete_replayed(self, batches: Iterable[Pending]) -> list[Pending]:
        """Complete batches whose key another object has committed; return the others."""
        return [pending for pending in batches if not self._is_replayed(pending)]

    def _is_replayed(self, pending: Pending) -> bool:
        key, digest = pending.header.key, pending.header.digest
        if key is None or digest is None or pending.mark is not None:
            return False  # one with a mark was acknowledged already, on a local disk
        try:
            entry = self.tail.dedup.find(key, digest)
        except ReefError as error:
            self._completions.complete(pending, error)
            return True
        if entry is not None:
            self._completions.complete(pending, replayed_receipt(self.namespace.name, entry))
        return entry is not None

    def _launch(
        self, batches: list[Pending], me: object, head: ManifestHead | None
    ) -> InflightObject:
        opened, schema_id = self.opened, batches[0].schema_id
        schema = None
        if schema_id != opened.schema_id:
            schema = opened.grown_schema(schema_id, self.tail.manifest)
        if batches[0].patched is not None or batches[-1] is not batches[0]:
            self._count_patched(batches)
        header, body = encode_object(
            batches,
            self.runtime,
            lsn=self._next_lsn,
            epoch=opened.epoch,
            writer_id=opened.writer_id,
            after=tuple(self._ids_before) if self._is_ordered(batches) else None,
            schema=schema,
        )
        inflight = InflightObject(header, body, batches, Stopwatch(self.runtime), me, head=head)
        self._inflight.append(inflight)
        self._ids_before.append(header.write_id)
        self._next_lsn += 1
        self._inflight_metrics.record_launch(inflight)
        return inflight

    def _count_patched(self, batches: list[Pending]) -> None:
        """Count the rows that patches change, as of all batches that apply before them."""
        if all(pending.patched is None for pending in batches):
            return
        before = [pending.ops for sent in self._inflight for pending in sent.batches]
        tables, now_ms = [self.tail.view().memtable], int(self.runtime.wall_s() * 1000)
        for pending in batches:
            if pending.patched is not None:
                count = pending.patched.count(pending.ops, before, tables, now_ms)
                pending.header = pending.header.with_changes(count)
            before.append(pending.ops)

    def _is_ordered(self, batches: list[Pending]) -> bool:
        """Whether an object counts only behind the objects that were sent before it.

        In independent mode too, if it has a key: whether that is new was decided on the slots
        before it. If one of these is lost to another object, this one is void, and is decided
        again (protocols §2, step 6).
        """
        return self.settings.ack == "prefix" or any(p.header.key is not None for p in batches)

    # --- sending ------------------------------------------------------------------
    def _send(self, inflight: InflightObject) -> None:
        """PUT until the response is definite, then apply every object that can be."""
        with operation(self.metrics, "commit"):
            response = self._sender.send(inflight)
        with self._lock:
            self._run_step(self._record_response, inflight, response)

    def _record_response(self, inflight: InflightObject, response: WriteResult) -> None:
        inflight.response = response
        if response.outcome is Outcome.UNKNOWN:
            self._end_unknown(inflight, response)
        self._apply_landed()
        if self._waiters:
            self._changed.notify_all()

    def _end_unknown(self, inflight: InflightObject, response: WriteResult) -> None:
        """End the writer: nothing can be sent behind a slot that may or may not be filled.

        After a full disk the slot is not filled, and the writer stays open (`_run_resync`, H78).
        """
        refusal = response.cause
        if inflight.disk_full is not None:  # the writer continues: space may be freed
            name, lsn = self.namespace.name, inflight.lsn
            self.events.emit("commit.disk_full", level=ERROR, namespace=name, lsn=lsn)
        elif inflight.doubt or not isinstance(refusal, ReefError):
            self._finish(_not_sent_error(self.namespace, inflight.lsn, refusal))
        elif inflight in self._inflight:
            self._inflight.remove(inflight)
            for pending in inflight.batches:
                self._completions.complete(pending, refusal)
            self._finish(refusal)

    # --- applying -----------------------------------------------------------------
    def _apply_landed(self) -> None:
        """Apply and complete the objects that have landed, in LSN order, up to a lost slot."""
        if self.settings.ack == "independent":
            self._apply_early()
        while self._state is State.OPEN and self._inflight:
            inflight = self._inflight[0]
            if inflight.response is None:
                break
            if not inflight.response.landed:
                self.metrics.counter("commit.lost_slots").add()
                self._state = State.LOST
                break
            self._apply(inflight)
            if self._inflight:  # otherwise the writer has ended
                self._inflight.popleft()
        self._inflight_metrics.record_inflight(self._inflight)
        self._inflight_metrics.unfolded_bytes.value = self.tail.bytes

    def _apply_early(self) -> None:
        """Apply objects that count independently of the slots before them."""
        for inflight in self._inflight:
            if inflight.header.after is not None:  # it counts in order
                continue
            response = inflight.response
            if response is not None and response.landed and not inflight.acknowledged:
                self.tail.apply_early(inflight.header, [p.ops for p in inflight.batches])
                self._acknowledge(inflight)

    def _apply(self, inflight: InflightObject) -> None:
        ops = [pending.ops for pending in inflight.batches]
        verdict = self.tail.apply_own(inflight.header, ops, len(inflight.body))
        if verdict is not Verdict.APPLIES:
            self._finish(InternalError(f"LSN {inflight.lsn} landed in its slot and is {verdict}"))
            return
        # `after` reaches back to the last slot that was seen durable, not further.
        while self._ids_before[0] != inflight.header.write_id:
            self._ids_before.popleft()
        self._acknowledge(inflight)

    def _acknowledge(self, inflight: InflightObject) -> None:
        if not inflight.acknowledged:
            for index, pending in enumerate(inflight.batches):
                receipt = receipt_of(self.namespace, inflight.header, index)
                self._completions.complete(pending, receipt)
            inflight.acknowledged = True
            self._inflight_metrics.seconds.record(inflight.sent.elapsed_s())

    # --- after a lost slot --------------------------------------------------------
    def _run_resync(self) -> None:
        """Apply the log, and queue again the batches that do not count in it.

        The lock is held on purpose: nothing may be sent or completed meanwhile.
        """
        lost = [p for sent in self._inflight if not sent.acknowledged for p in sent.batches]
        lost_lsns = [s.lsn for s in self._inflight if s.response and not s.response.landed]
        disk_full = next((e for s in self._inflight if (e := s.disk_full) is not None), None)
        if disk_full is not None:
            filled = [s.lsn for s in self._inflight if s.disk_full is None]
            lost_lsns = [lsn for lsn in lost_lsns if lsn < max(filled, default=0)]
        try:
            self._fill_gaps()
            tail = self.resync.run(self.tail, min(lost_lsns, default=None))
            if tail is not self.tail:
                with tail.replacing():
                    self.tail = tail
        except ReefError as error:
            if isinstance(error, UnavailableError) and self._state is State.OPEN:
                raise  # nothing was lost: it was only a refresh
            if isinstance(error, UnavailableError) and error.kind is ErrorKind.DISK_FULL:
                self._reject(error)  # the next batch tries again
                return
            if isinstance(error, FencedError | InternalError):
                # None of them counts: they lost their slot, or are void behind one that did.
                self._queue.put_back(lost)
                self._inflight.clear()
            self._finish(error)
            return
        self._inflight.clear()
        again = [*lost, *self._queue.clear()]  # queued batches were checked before, too
        again = self._complete_replayed(again)
        if disk_full is None:
            self._queue.put_back(again)
        else:  # those behind it too, so that none counts without its predecessors
            for pending in again:
                self._completions.complete(pending, disk_full)
        self._start_after_tail()
        self._state = State.OPEN
        self._changed.notify_all()

    def _fill_gaps(self) -> None:
        """Fill slots for which there was no space, where a later object has landed.

        Objects behind an open slot do not count; behind a skip they are void, or count
        independently of it. UnavailableError if there is still no space.
        """
        last = max([s.lsn for s in self._inflight if s.disk_full is None], default=0)
        self._gaps += [s.lsn for s in self._inflight if s.disk_full and s.lsn < last]
        while self._gaps:
            skip = WalHeader(
                lsn=self._gaps[0],
                kind=WalKind.SKIP,
                epoch=0,
                writer_id=self.opened.writer_id,
                write_id=self.runtime.ulid(),
                created_at_ms=int(self.runtime.wall_s() * 1000),
            )
            if self.log.fill(skip.lsn, WalObject.encode(skip)).outcome is Outcome.UNKNOWN:
                raise _not_sent_error(self.namespace, skip.lsn, "a skip has no response")
            self._gaps.pop(0)

    def _reject(self, disk_full: UnavailableError) -> None:
        """Complete all batches: none is sent before the gaps in the log are filled."""
        for inflight in self._inflight:
            for index, pending in enumerate(inflight.batches if not inflight.acknowledged else ()):
                error: ReefError = disk_full
                if inflight.disk_full is None:  # it counts if another process fills the gap so
                    error = unknown_outcome(self.namespace, inflight.header, index, disk_full)
                self._completions.complete(pending, error)
        self._inflight.clear()
        for pending in self._complete_replayed(self._queue.clear()):
            self._completions.complete(pending, disk_full)
        self._changed.notify_all()

    def _start_after_tail(self) -> None:
        self._next_lsn = self.tail.next_lsn
        self._ids_before = deque(self.tail.rules.last_ids()[-1:])

    # --- the end ------------------------------------------------------------------
    def _finish(self, error: ReefError) -> None:
        """Complete every batch: one that never counted is rejected, one that may is unknown."""
        if self._state is State.ENDED:
            return
        self._state, self._end = State.ENDED, error
        for inflight in self._inflight:
            for index, pending in enumerate(inflight.batches):
                unknown = unknown_outcome(self.namespace, inflight.header, index, error)
                self._completions.complete(pending, unknown)
        self._inflight.clear()
        self._inflight_metrics.record_inflight(self._inflight)
        for pending in self._queue.clear():
            self._completions.complete(pending, error)
        self._changed.notify_all()


def _not_sent_error(namespace: Namespace, lsn: int, cause: object) -> UnavailableError:
    """Return the error for batches that were not sent because an earlier PUT has no response."""
    return UnavailableError(
        f"the writer of {namespace.name} has stopped: LSN {lsn} has no response: {cause}",
        hint="Open the writer again",
        namespace=namespace.name,
    )


def _broken(namespace: Namespace, cause: BaseException) -> InternalError:
    """Return the error for a writer whose state cannot be trusted any more."""
    return InternalError(
        f"the writer of {namespace.name} failed in the middle of a step: {cause!r}",
        hint="Open the writer again",
        namespace=namespace.name,
    )
