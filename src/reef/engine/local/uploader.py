"""The uploader: what has gathered in the local log becomes WAL objects, in order.

    gather     until `upload_interval_ms` have passed or `upload_bytes` are there, or somebody waits
    commit     through the writer's ordinary commit path, each batch with its place in the stream
    let go     receipts are filled in, rows leave the overlay, the local log loses its head

A PUT without an answer is sent again for as long as the writer lives: nobody waits for it but
those who ask. A local disk that fails is no reason to stop: what was acknowledged is in memory.
What the commit path cannot settle, a takeover or an answer that stays unknown, ends the writer;
all that is not known to be in the bucket stays on the disk, and the next opening finds out by the
marks in the bucket.
"""

import math
from contextlib import suppress

from reef.engine.commit.flights import Pending, StreamMark
from reef.engine.local import words
from reef.engine.local.backlog import Item
from reef.engine.local.front import LocalFront
from reef.engine.local.identity import UPLOADED
from reef.errors import ClosedError, FencedError, ReefError, UnavailableError
from reef.runtime import Condition, Deadline, Runtime, Task

__all__ = ["Uploader", "truncate"]

TRUNCATE_BYTES = 16 << 20
"""The local log loses its head after so many uploaded bytes: that takes two syncs of its own."""
TRUNCATE_S = 1.0
"""Or after so long; or with the last byte of a segment, whose room on the disk is then free."""
RETRY_S = 0.05
"""The pause when the bucket's log has no room."""
IDLE_S = 5.0
"""How often it looks whether its writer was forgotten."""
STOP_S = 5.0
"""How long `stop` waits for a PUT that is on its way."""


class Patience(Deadline):
    """Has no end but the writer's."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime, math.inf)
        self.is_over = False

    def remaining_s(self) -> float:
        return 0.0 if self.is_over else math.inf


class Uploader:
    """Uploads for one front, in a thread of its own."""

    def __init__(self, front: LocalFront) -> None:
        self._front = front
        self._committer = front.committer
        self._settings = front.settings
        self._runtime = front.runtime
        self._patience = Patience(front.runtime)
        self._wake: Condition = front.runtime.condition()
        self._poked = False
        self._truncated = front.runtime.stopwatch()
        self._bytes_since = 0
        self._task: Task | None = None
        self._is_abandoned = False
        front.poke = self._poke

    def start(self) -> "Uploader":
        """Upload in a thread, until the writer is closed or ends."""
        self._task = self._runtime.spawn(self._run, name="uploader")
        return self

    def abandon(self) -> None:
        """End by and by: the writer was forgotten. What is on the disk stays there.

        Called by the garbage collector, in whatever thread: it takes no lock.
        """
        self._patience.is_over = self._is_abandoned = True

    def stop(self) -> None:
        """Send nothing more; what is on its way may land yet, and counts once all the same."""
        self._patience.is_over = True
        self._poke()
        if self._task is not None:
            self._task.join(STOP_S)

    # --- the thread ---------------------------------------------------------------
    def _run(self) -> None:
        try:
            while not self._patience.is_over and self._front.upload_error is None:
                if not self.step():
                    self._rest()
        except Exception as error:
            self._front.end_upload(words.broken(self._front.identity.namespace, error))
        if self._is_abandoned:
            self._committer.end(ClosedError(f"{self._front.identity.namespace} was forgotten"))
            self._front.log.close()

    def step(self) -> bool:
        """Upload what is due, or let the log lose its head; whether there was something to do."""
        items = self._due()
        if items:
            self._upload(items)
        elif not self._truncation_is_due():
            return False
        if self._truncation_is_due():
            self._truncate()
        return True

    def _due(self) -> list[Item]:
        front = self._front
        with front.changed:
            if not front.backlog.waiting or (self._gathers_for_s() > 0 and not front.hurry):
                return []
            return front.backlog.next_upload(self._settings.upload_bytes)

    def _gathers_for_s(self) -> float:
        """How long the first one may wait for others to come; under the lock."""
        backlog = self._front.backlog
        if backlog.bytes >= self._settings.upload_bytes or backlog.is_crowded:
            return 0.0
        return self._settings.upload_interval_ms / 1000 - backlog.waiting[0].queued.elapsed_s()

    def _rest(self) -> None:
        with self._front.changed:
            seconds = self._gathers_for_s() if self._front.backlog.waiting else IDLE_S
        if self._bytes_since:
            seconds = min(seconds, TRUNCATE_S)
        with self._wake:
            if not self._poked:
                self._wake.wait(max(0.001, seconds))
            self._poked = False

    def _poke(self) -> None:
        with self._wake:
            self._poked = True
            self._wake.notify_all()

    # --- one upload ---------------------------------------------------------------
    def _upload(self, items: list[Item]) -> None:
        """Commit some batches; a refusal by the writer's end is the front's end too."""
        sent = self._submit(items)
        if not sent:
            self._runtime.sleep(RETRY_S)
        self._runtime.reach("upload queued")
        error: ReefError | None = None
        for _, pending in sent:
            self._committer.drive(pending.future)
        self._runtime.reach("uploaded")
        with self._front.changed:
            for item, pending in sent:
                refused = pending.future.exception()
                if isinstance(refused, ReefError):
                    error = refused
                    break
                self._front.note_uploaded(item, pending.future.result())
                self._bytes_since += item.batch.size
            self._front.note_progress()
        if error is not None:
            self._end(error)

    def _submit(self, items: list[Item]) -> list[tuple[Item, Pending]]:
        """Queue batches for the bucket, as many as there is room for."""
        sent: list[tuple[Item, Pending]] = []
        for item in items:
            pending = self._pending(item)
            try:
                self._committer.submit(pending)
            except UnavailableError as error:
                if self._committer.is_open:
                    break  # the log is not folded: on with what has gone in
                self._end(error)
                break
            except ReefError as error:
                self._end(error)
                break
            sent.append((item, pending))
        return sent

    def _pending(self, item: Item) -> Pending:
        batch, stream = item.batch, self._front.identity.stream
        return Pending(
            item.ops,
            batch.record,
            batch.header,
            self._runtime.future(),
            self._runtime.stopwatch(),
            schema_id=batch.schema_id,
            mark=StreamMark(stream, item.points),
            deadline=self._patience,
        )

    def _end(self, error: ReefError) -> None:
        front = self._front
        if isinstance(error, FencedError):
            error = words.fenced(error.message, front.identity, front.left(), front.log.path)
        if not isinstance(error, ClosedError):
            front.end_upload(error)

    # --- the local log's head -----------------------------------------------------
    def _truncation_is_due(self) -> bool:
        if not self._bytes_since:
            return False
        if self._bytes_since >= TRUNCATE_BYTES or self._truncated.elapsed_s() >= TRUNCATE_S:
            return True
        with suppress(ClosedError):
            return self._front.log.frees_segment(_last_released(self._front))
        return False

    def _truncate(self) -> None:
        self._bytes_since, self._truncated = 0, self._runtime.stopwatch()
        try:
            truncate(self._front)
        except ReefError as error:
            self._front.end(error)


def truncate(front: LocalFront) -> None:
    """Remove entries from the local log that are in the bucket, all but the last one.

    That one keeps the numbers going: an empty log would begin anew.
    """
    with suppress(ClosedError):  # by a close that did not wait for us
        if front.log.get_uint64(UPLOADED) < front.uploaded:
            front.log.set_uint64(UPLOADED, front.uploaded)
        front.runtime.reach("upload noted")
        last = _last_released(front)
        if front.log.first_index and front.log.first_index <= last:
            front.log.delete_range(front.log.first_index, last)


def _last_released(front: LocalFront) -> int:
    return min(front.uploaded, front.log.last_index - 1)
