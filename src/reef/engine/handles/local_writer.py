"""A writer with a local log: acknowledged after one local sync, uploaded in the background.

A write is as durable as one disk until it is uploaded, and as the bucket from then on. Differences
to an ordinary writer:

- A receipt's `lsn` is None until its upload; `receipt.wait()` waits for that, `flush()` for all.
- Reads here see a write at once; readers elsewhere see it after its upload.
- Conditions and transactions are decided in the bucket: everything is uploaded first, and no batch
  is admitted while they are in progress.
- `close()` uploads pending batches, within `write_deadline_s`, and raises if some stay behind.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

from reef.config import WriterSettings
from reef.engine.commit.resync import Outcomes
from reef.engine.handles.transaction import Condition, Transaction
from reef.engine.handles.writer import Writer
from reef.engine.local import stream
from reef.engine.local.buffer import LocalBuffer
from reef.engine.local.open import LocalRecovery
from reef.engine.local.stream import LocalBatch, LocalReceipt, PendingUploads, read_marks
from reef.engine.local.uploader import Uploader, truncate
from reef.engine.read.view import View
from reef.engine.rows.batch import Batch, EncodedBatch
from reef.errors import ClosedError, FencedError, OutcomeUnknownError, ReefError
from reef.paths import Namespace
from reef.runtime import Future
from reef.types import Receipt


class LocalWriter(Writer):
    """A handle on the writer role of one namespace, with a local log before its bucket."""

    def __init__(
        self,
        namespace: Namespace,
        buffer: LocalBuffer,
        outcomes: Outcomes,
        settings: WriterSettings,
        recovery: LocalRecovery,
    ) -> None:
        self._buffer = buffer
        super().__init__(namespace, buffer.committer, outcomes, settings, buffer.runtime)
        self.local_recovery = recovery
        """The batches that opening it has loaded from the local log."""
        self._conditional: set[Future[Receipt]] = set()
        """Futures of conditional batches that are being decided in the bucket."""
        buffer.watch(self._row_cache)
        self._uploader = Uploader(buffer).start()
        weakref.finalize(self, self._uploader.abandon).atexit = False

    # --- writes -------------------------------------------------------------------
    def _write(
        self,
        batch: Batch,
        idempotency_key: str | None,
        when: Sequence[Condition],
        *,
        wait: bool,
    ) -> Any:
        if when:
            return self._write_through(batch, idempotency_key, when, wait=wait)
        encoded = self._encode(batch)
        if idempotency_key is not None:
            encoded = self._as_first_sent(batch, encoded, idempotency_key)
        patched = self._find_patched(encoded, idempotency_key) if batch._has_patches else None
        batch_to_log = LocalBatch.of(encoded, idempotency_key)
        return self._buffer.put(batch_to_log, encoded.ops, patched, wait=wait, owner=self)

    def _write_through(
        self, batch: Batch, key: str | None, when: Sequence[Condition], *, wait: bool
    ) -> Any:
        """Decide and commit in the bucket, when every earlier write is there."""
        self._check()
        self._buffer.begin_barrier()
        try:
            written = super()._write(batch, key, when, wait=wait)
        except BaseException:
            self._buffer.end_barrier()
            raise
        if wait:
            self._buffer.end_barrier()
        else:
            self._conditional.add(written)
            written.add_done_callback(self._end_conditional)
        return written

    def _end_conditional(self, written: "Future[Receipt]") -> None:
        self._buffer.end_barrier()
        self._conditional.discard(written)

    def transaction(self, *, idempotency_key: str | None = None) -> Transaction:
        """Begin a transaction on the state of the bucket: every earlier write is uploaded first."""
        self._check_reads()
        self._buffer.drain()
        self._buffer.check_open()
        return super().transaction(idempotency_key=idempotency_key)

    def _commit_transaction(self, batch: EncodedBatch, transaction: Transaction) -> Receipt:
        self._check()
        with self._buffer.barrier():
            return super()._commit_transaction(batch, transaction)

    # --- waiting for the bucket ---------------------------------------------------
    @property
    def pending(self) -> PendingUploads:
        """Batches on the local disk that are not known to be in the bucket."""
        return self._buffer.pending()

    def _has_queued(self) -> bool:
        return self._buffer.end_error is None and self._buffer.has_work()

    def _is_idle(self) -> Callable[[], bool]:
        backlog, is_idle = self._buffer.backlog, super()._is_idle()
        return lambda: is_idle() and not backlog.arriving and not backlog.waiting

    def flush(self, timeout_s: float | None = None) -> None:
        """Return when everything that was written before is in the bucket.

        UnavailableError if that takes longer than `timeout_s`, by default `commit_deadline_s`.
        If a write with `wait=False` was rejected, its error is raised here, once.
        """
        self._check()
        self._buffer.drain(timeout_s)
        self._buffer.check_open()
        for future in list(self._conditional):
            future.exception()
        # Noted when it was decided: the callbacks of these futures may not have run yet.
        rejection = self._committer.take_rejection()
        if rejection is not None:
            raise rejection

    def close(self) -> None:
        """Upload pending batches, finish commits in progress, and close the handle.

        Both within `write_deadline_s`.

        UnavailableError if batches stay on the local disk, or FencedError if another writer has the
        role; the handle is closed in any case, and nothing on the disk is lost.
        """
        if self._closed:
            return
        self._check_process()
        failure: ReefError | None = None
        deadline = self._runtime.deadline(self._settings.write_deadline_s)
        try:
            self._buffer.drain(self._settings.write_deadline_s)
        except ReefError as error:
            failure = error
        self._buffer.await_barriers(deadline)
        self._closed = True
        try:
            if self.background is not None:
                self.background.stop()
        finally:
            self._release()
        pending = self._buffer.backlog.pending()
        if pending.batches:
            if isinstance(failure, FencedError):
                raise failure
            raise stream.not_uploaded_error(
                self.namespace, pending, self._buffer.log.path
            ) from failure

    def _release(self) -> None:
        closed = ClosedError(f"the writer of {self.namespace} is closed", hint="Open another one")
        self._buffer.end_upload(closed)
        self._uploader.stop()
        if not self._buffer.backlog.pending().batches:
            self._release_role()
        self._committer.end(closed)
        try:
            truncate(self._buffer)
        except OutcomeUnknownError:
            pass  # the log is only longer than needed: the next opening truncates it
        finally:
            self._buffer.log.close()

    def __exit__(self, *error: object) -> None:
        try:
            self.close()
        except ReefError:
            if error[0] is None:  # otherwise another error is being raised already
                raise

    def resolve(
        self, write: OutcomeUnknownError | Receipt | str
    ) -> Literal["committed", "rejected", "unknown"]:
        """Return the outcome of a write; "unknown" while it is on the local disk only."""
        if isinstance(write, LocalReceipt) and write.lsn is None:
            self._check_process()
            self._outcomes.heads.forget()
            head = self._outcomes.heads.find().manifest
            history = read_marks(self._outcomes.log, head).history(write.stream)
            if history.is_proven:
                return "committed" if history.has_point(write.point) else "unknown"
            return "committed" if write.local_index <= history.mark else "unknown"
        return super().resolve(write)

    # --- state --------------------------------------------------------------------
    @property
    def is_open(self) -> bool:
        """Whether it can still acknowledge: neither closed nor fenced, as far as it knows."""
        return super().is_open and self._buffer.end_error is None

    def _view(self) -> View:
        self._check_reads()
        return self._buffer.view()

    def _fencing(self) -> FencedError | None:
        error = self._buffer.upload_error
        return error if isinstance(error, FencedError) else super()._fencing()
