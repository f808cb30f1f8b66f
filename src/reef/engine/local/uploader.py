"""The uploader: commits the batches of the local buffer to the bucket, in order (protocols §11).

    gather     until `upload_interval_ms` have passed, `upload_bytes` are there, or a caller waits
    commit     through the writer's ordinary commit path, each batch with its position in the stream
    release    receipts are filled in, rows leave the overlay, the local log is truncated

A PUT without a response is sent again for as long as the writer lives. A local disk that fails is
no reason to stop: acknowledged batches are in memory. An outcome that the commit path cannot
settle, a takeover or an unknown one, ends the writer; every batch that is not known to be in the
bucket stays on the disk, and the next opening resolves it by the marks in the bucket.
"""

import math
from contextlib import suppress

from reef.engine.commit.inflight import Pending, StreamMark
from reef.engine.local import stream
from reef.engine.local.buffer import BufferedBatch, LocalBuffer
from reef.engine.local.stream import UPLOADED
from reef.errors import ClosedError, FencedError, ReefError, UnavailableError
from reef.runtime import ConditionVariable, Deadline, Runtime, Task

TRUNCATE_BYTES = 16 << 20
"""The local log is truncated after so many uploaded bytes: that takes two syncs of its own."""
TRUNCATE_S = 1.0
"""Or after so long; or with the last byte of a segment, whose disk space is then free."""
RETRY_S = 0.05
"""The pause when the write queue is full."""
IDLE_S = 5.0
"""How often it checks whether its writer was garbage-collected."""
STOP_S = 5.0
"""How long `stop` waits for a PUT that is in flight."""


class Patience(Deadline):
    """A deadline that passes only when the writer ends."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime, math.inf)
        self.is_over = False

    def remaining_s(self) -> float:
        return 0.0 if self.is_over else math.inf


class Uploader:
    """Uploads for one buffer, in a thread of its own."""

    def __init__(self, buffer: LocalBuffer) -> None:
        self._buffer = buffer
        self._committer = buffer.committer
        self._settings = buffer.settings
        self._runtime = buffer.runtime
        self._patience = Patience(buffer.runtime)
        self._wake: ConditionVariable = buffer.runtime.condition()
        self._wake_upd = False
        self._truncated = buffer.runtime.stopwatch()
        self._bytes_since = 0
        self._task: Task | None = None
        self._is_abandoned = False
        buffer.wake_uploader = self._wake_up

    def start(self) -> "Uploader":
        """Upload in a thread, until the writer is closed or ends."""
        self._task = self._runtime.spawn(self._run, name="uploader")
        return self

    def abandon(self) -> None:
        """End soon: the writer was garbage-collected. Pending batches stay on the disk.

        Called by the garbage collector, in whatever thread: it takes no lock.
        """
        self._patience.is_over = self._is_abandoned = True

    def stop(self) -> None:
        """Send nothing more; a batch in flight may still land, and counts once in any case."""
        self._patience.is_over = True
        self._wake_up()
        if self._task is not None:
            self._task.join(STOP_S)

    # --- the thread ---------------------------------------------------------------
    def _run(self) -> None:
        try:
            while not self._patience.is_over and self._buffer.upload_error is None:
                if not self.step():
                    self._wait_for_work()
        except Exception as error:
            self._buffer.end_upload(
                stream.broken_writer_error(self._buffer.identity.namespace, error)
            )
        if self._is_abandoned:
            self._committer.end(
                ClosedError(f"{self._buffer.identity.namespace} was garbage-collected")
            )
            self._buffer.log.close()

    def step(self) -> bool:
        """Upload due batches, or truncate the log; return whether there was something to do."""
        items = self._due_batches()
        if items:
            self._upload(items)
        elif not self._truncation_is_due():
            return False
        if self._truncation_is_due():
            self._truncate()
        return True

    def _due_batches(self) -> list[BufferedBatch]:
        buffer = self._buffer
        with buffer.changed:
            if not buffer.backlog.waiting or (
                self._gathers_for_s() > 0 and not buffer.upload_waiters
            ):
                return []
            return buffer.backlog.next_upload(self._settings.upload_bytes)

    def _gathers_for_s(self) -> float:
        """Return how long the first batch may wait for others; under the lock."""
        backlog = self._buffer.backlog
        if backlog.bytes >= self._settings.upload_bytes or backlog.is_crowded:
            return 0.0
        return self._settings.upload_interval_ms / 1000 - backlog.waiting[0].queued.elapsed_s()

    def _wait_for_work(self) -> None:
        with self._buffer.changed:
            seconds = self._gathers_for_s() if self._buffer.backlog.waiting else IDLE_S
        if self._bytes_since:
            seconds = min(seconds, TRUNCATE_S)
        with self._wake:
            if not self._wake_upd:
                self._wake.wait(max(0.001, seconds))
            self._wake_upd = False

    def _wake_up(self) -> None:
        with self._wake:
            self._wake_upd = True
            self._wake.notify_all()

    # --- one upload ---------------------------------------------------------------
    def _upload(self, items: list[BufferedBatch]) -> None:
        """Commit some batches; if one is rejected, the writer ends."""
        sent = self._submit(items)
        if not sent:
            self._runtime.sleep(RETRY_S)
        self._runtime.reach("upload queued")
        error: ReefError | None = None
        for _, pending in sent:
            self._committer.drive(pending)
        self._runtime.reach("uploaded")
        with self._buffer.changed:
            for item, pending in sent:
                if isinstance(pending.result, ReefError):
                    error = pending.result
                    break
                self._buffer.note_uploaded(item, pending.outcome())
                self._bytes_since += item.batch.size
            self._buffer.note_progress()
        if error is not None:
            self._end(error)

    def _submit(self, items: list[BufferedBatch]) -> list[tuple[BufferedBatch, Pending]]:
        """Queue batches for the bucket, as many as there is room for."""
        sent: list[tuple[BufferedBatch, Pending]] = []
        for item in items:
            pending = self._pending(item)
            try:
                self._committer.submit(pending)
            except UnavailableError as error:
                if self._committer.is_open:
                    break  # the log is full until a fold: continue with the queued ones
                self._end(error)
                break
            except ReefError as error:
                self._end(error)
                break
            sent.append((item, pending))
        return sent

    def _pending(self, item: BufferedBatch) -> Pending:
        batch, stream = item.batch, self._buffer.identity.stream
        return Pending(
            item.ops,
            batch.record,
            batch.header,
            self._runtime.monotonic_s(),
            schema_id=batch.schema_id,
            mark=StreamMark(stream, item.points),
            deadline=self._patience,
        )

    def _end(self, error: ReefError) -> None:
        buffer = self._buffer
        if isinstance(error, FencedError):
            error = stream.fenced_log_error(
                error.message, buffer.identity, buffer.pending(), buffer.log.path
            )
        if not isinstance(error, ClosedError):
            buffer.end_upload(error)

    # --- truncating the local log -----------------------------------------------------
    def _truncation_is_due(self) -> bool:
        if not self._bytes_since:
            return False
        if self._bytes_since >= TRUNCATE_BYTES or self._truncated.elapsed_s() >= TRUNCATE_S:
            return True
        with suppress(ClosedError):
            return self._buffer.log.frees_segment(_last_released(self._buffer))
        return False

    def _truncate(self) -> None:
        self._bytes_since, self._truncated = 0, self._runtime.stopwatch()
        try:
            truncate(self._buffer)
        except ReefError as error:
            self._buffer.end(error)


def truncate(buffer: LocalBuffer) -> None:
    """Remove entries from the local log that are in the bucket, all but the last one.

    That one keeps the numbering: an empty log would start from 1 again.
    """
    with suppress(ClosedError):  # by a close() that did not wait for this thread
        if buffer.log.get_uint64(UPLOADED) < buffer.uploaded:
            buffer.log.set_uint64(UPLOADED, buffer.uploaded)
        buffer.runtime.reach("upload noted")
        last = _last_released(buffer)
        if buffer.log.first_index and buffer.log.first_index <= last:
            buffer.log.delete_range(buffer.log.first_index, last)


def _last_released(buffer: LocalBuffer) -> int:
    return min(buffer.uploaded, buffer.log.last_index - 1)
