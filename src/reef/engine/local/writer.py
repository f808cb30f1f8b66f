"""A writer with a local log: acknowledged after one local sync, uploaded in the background.

The promise is one disk until a write is uploaded, and the bucket's from then on. It is a writer
like any other; what differs:

- A receipt's `lsn` is None until its upload; `receipt.wait()` waits for that, `flush()` for all.
- Reads here see what is on the local disk at once; readers elsewhere see it after its upload.
- Conditions and transactions are decided by what is in the bucket: everything is uploaded first,
  and nothing is let in while they are on their way.
- `close()` uploads what is left, within `write_deadline_s`, and says so if something stays behind.
"""

import weakref
from collections.abc import Sequence
from typing import Any, Literal

from reef.config import WriterSettings
from reef.engine.batch import Batch, EncodedBatch, check_idempotency_key
from reef.engine.commit.outcomes import Outcomes
from reef.engine.conditions import Condition
from reef.engine.local import words
from reef.engine.local.backlog import Left
from reef.engine.local.entries import LocalBatch
from reef.engine.local.front import LocalFront
from reef.engine.local.marks import read_marks
from reef.engine.local.opening import LocalRecovery
from reef.engine.local.receipts import LocalReceipt
from reef.engine.local.uploader import Uploader, truncate
from reef.engine.reading.view import View
from reef.engine.transactions import Transaction
from reef.engine.writer import Writer
from reef.errors import ClosedError, FencedError, OutcomeUnknownError, ReefError
from reef.paths import Namespace
from reef.runtime import Future
from reef.types import Receipt

__all__ = ["LocalWriter"]


class LocalWriter(Writer):
    """A handle on the writer role of one namespace, with a local log in front of its bucket."""

    def __init__(
        self,
        namespace: Namespace,
        front: LocalFront,
        outcomes: Outcomes,
        settings: WriterSettings,
        recovery: LocalRecovery,
    ) -> None:
        super().__init__(namespace, front.committer, outcomes, settings, front.runtime)
        self.local_recovery = recovery
        """What opening it took up from the local log."""
        self._front = front
        self._unattended: set[Future[Receipt]] = set()
        """Conditional batches on their way to the bucket, for which nobody waits."""
        self._refusal: BaseException | None = None
        """The first one since the last flush that went to one of these."""
        front.watch(self._row_cache)
        self._uploader = Uploader(front).start()
        weakref.finalize(self, self._uploader.abandon).atexit = False

    # --- writes -------------------------------------------------------------------
    def _write(
        self,
        batch: Batch,
        *,
        idempotency_key: str | None = None,
        when: Sequence[Condition] = (),
        wait: bool = True,
    ) -> Any:
        if when:
            return self._write_through(batch, idempotency_key, when, wait=wait)
        encoded = self._encode(batch)
        check_idempotency_key(idempotency_key)
        return self._front.put(LocalBatch.of(encoded, idempotency_key), encoded.ops, wait=wait)

    def _write_through(
        self, batch: Batch, key: str | None, when: Sequence[Condition], *, wait: bool
    ) -> Any:
        """Decide and commit in the bucket, when all that was written before is there."""
        self._check()
        self._front.hold_back()
        try:
            written = super()._write(batch, idempotency_key=key, when=when, wait=wait)
        except BaseException:
            self._front.let_in()
            raise
        if wait:
            self._front.let_in()
        else:
            self._unattended.add(written)
            written.add_done_callback(self._note_answer)
        return written

    def _note_answer(self, written: "Future[Receipt]") -> None:
        self._front.let_in()
        self._refusal = self._refusal or written.exception()
        self._unattended.discard(written)

    def transaction(self) -> Transaction:
        """Begin a transaction, on what is in the bucket: everything is uploaded first."""
        self._check_reads()
        self._front.drain()
        self._front.check_open()
        return super().transaction()

    def _commit_transaction(self, batch: EncodedBatch, transaction: Transaction) -> Receipt:
        self._check()
        with self._front.held_back():
            return super()._commit_transaction(batch, transaction)

    # --- waiting for the bucket ---------------------------------------------------
    @property
    def pending(self) -> Left:
        """What is on the local disk, and not known to be in the bucket."""
        return self._front.left()

    def flush(self, timeout_s: float | None = None) -> None:
        """Return when everything that was written before is in the bucket.

        UnavailableError if that takes longer than `timeout_s`, by default `commit_deadline_s`.
        If something that nobody waited for was refused, its error is raised here, once.
        """
        self._check()
        self._front.drain(timeout_s)
        self._front.check_open()
        for future in list(self._unattended):
            future.exception()
        refused, self._refusal = self._refusal, None
        if refused is not None:
            raise refused

    def close(self) -> None:
        """Upload what is left, finish what is on its way, and give the handle up.

        Both within `write_deadline_s`.

        UnavailableError if something stays on the local disk, or FencedError if another writer
        has taken over; the handle is closed all the same, and nothing on the disk is lost.
        """
        if self._closed:
            return
        self.check_process()
        trouble: ReefError | None = None
        deadline = self._runtime.deadline(self._settings.write_deadline_s)
        try:
            self._front.drain(self._settings.write_deadline_s)
        except ReefError as error:
            trouble = error
        self._front.await_answers(deadline)
        self._closed = True
        try:
            if self.background is not None:
                self.background.stop()
        finally:
            self._let_go()
        left = self._front.backlog.left()
        if left.batches:
            if isinstance(trouble, FencedError):
                raise trouble
            raise words.left_behind(self.namespace, left, self._front.log.path) from trouble

    def _let_go(self) -> None:
        closed = ClosedError(f"the writer of {self.namespace} is closed", hint="Open another one")
        self._front.end_upload(closed)
        self._uploader.stop()
        self._committer.end(closed)
        try:
            truncate(self._front)
        except OutcomeUnknownError:
            pass  # it is only longer than it need be: the next opening sees that
        finally:
            self._front.log.close()

    def __exit__(self, *error: object) -> None:
        try:
            self.close()
        except ReefError:
            if error[0] is None:  # otherwise there is an error on its way already
                raise

    def resolve(
        self, what: OutcomeUnknownError | Receipt | str
    ) -> Literal["committed", "rejected", "unknown"]:
        """Tell what became of a write; one that is on the local disk only is unknown yet."""
        if isinstance(what, LocalReceipt) and what.lsn is None:
            self.check_process()
            self._outcomes.heads.forget()
            head = self._outcomes.heads.find().manifest
            history = read_marks(self._outcomes.log, head).history(what.stream)
            if history.is_proven:
                return "committed" if history.has_point(what.point) else "unknown"
            return "committed" if what.local_index <= history.mark else "unknown"
        return super().resolve(what)

    # --- what it knows ------------------------------------------------------------
    @property
    def is_open(self) -> bool:
        """Whether it can still acknowledge: neither closed nor fenced, as far as it knows."""
        return super().is_open and self._front.end_error is None

    def _view(self) -> View:
        self._check_reads()
        return self._front.view()

    def _fencing(self) -> FencedError | None:
        error = self._front.upload_error
        return error if isinstance(error, FencedError) else super()._fencing()
