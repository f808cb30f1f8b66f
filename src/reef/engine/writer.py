"""The writer: puts, deletes and reads by the one process that has the writer role.

A write returns when it is durable. With `wait=False` it returns a future at once, and the
batches are sent in order by a helper. Reads see everything that was acknowledged here.
"""

from collections.abc import Iterator
from typing import Any, Literal, Self

from reef.config import WriterSettings
from reef.engine.batch import Batch, EncodedBatch, encode_key
from reef.engine.committer import Committer
from reef.engine.flights import Pending
from reef.engine.outcomes import Outcomes
from reef.engine.reading import read_range, row_of
from reef.engine.view import View
from reef.errors import ClosedError, InvalidInputError, OutcomeUnknownError
from reef.formats.manifest import DedupEntry
from reef.formats.wal_object import BatchHeader
from reef.paths import Namespace
from reef.runtime import Future, ProcessBound, Runtime
from reef.telemetry import operation
from reef.types import KeyRange, Receipt

__all__ = ["Writer"]


class Writer(ProcessBound):
    """A handle on the writer role of one namespace. Safe for threads, bound to its process."""

    def __init__(
        self,
        namespace: Namespace,
        committer: Committer,
        outcomes: Outcomes,
        settings: WriterSettings,
        runtime: Runtime,
    ) -> None:
        super().__init__(runtime)
        self.namespace = namespace.name
        self._committer = committer
        self._outcomes = outcomes
        self._settings = settings
        self._runtime = runtime
        self._keyed = runtime.lock()
        self._closed = False

    # --- writes -------------------------------------------------------------------
    def put(self, key: bytes | str, value: bytes, *, wait: bool = True, **options: Any) -> Any:
        return self.write(Batch().put(key, value), wait=wait, **options)

    def delete(self, key: bytes | str, *, wait: bool = True, **options: Any) -> Any:
        return self.write(Batch().delete(key), wait=wait, **options)

    def delete_range(
        self, start: bytes | str, end: bytes | str, *, wait: bool = True, **options: Any
    ) -> Any:
        return self.write(Batch().delete_range(start, end), wait=wait, **options)

    def write(self, batch: Batch, *, idempotency_key: str | None = None, wait: bool = True) -> Any:
        """Commit a batch; return its receipt, or with `wait=False` a future of it."""
        self._check()
        encoded = batch.encode(self._committer.tail.manifest.schema, self._settings.batch_bytes_max)
        future = self._submit(encoded, idempotency_key)
        if not wait:
            self._committer.drive_in_background()
            return future
        self._committer.drive(future)
        return future.result()

    def flush(self) -> None:
        """Return when everything that was written before is durable."""
        self._check()
        self._committer.flush()

    def close(self) -> None:
        """Finish what is on its way, and give the handle up. The role stays free for others."""
        if not self._closed:
            self.check_process()
            self._closed = True
            self._committer.flush()
            self._committer.end(ClosedError(f"the writer of {self.namespace} is closed"))

    def resolve(
        self, what: OutcomeUnknownError | Receipt | str
    ) -> Literal["committed", "rejected", "unknown"]:
        """Tell what became of a write whose outcome was unknown."""
        self.check_process()
        return self._outcomes.resolve(what)

    # --- reads --------------------------------------------------------------------
    def get(self, key: bytes | str) -> bytes | None:
        """Return a key's value; None if it has none."""
        self._check()
        with operation(self._committer.metrics, "get"):
            return row_of(self._view().get(encode_key(key), self._now_ms()))

    def scan(
        self,
        start: bytes | str | None = None,
        end: bytes | str | None = None,
        *,
        prefix: bytes | str | None = None,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[tuple[bytes, bytes]]:
        """Yield keys and values of [start, end) in order, from either end."""
        self._check()
        wanted = KeyRange.of(start, end, prefix)
        return read_range(self._view(), wanted, self._now_ms(), reverse=reverse, limit=limit)

    def refresh(self) -> None:
        """Move on to the newest manifest: what a fold has taken over leaves memory."""
        self._check()
        self._committer.rebase()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"epoch {self._committer.opened.epoch}"
        return f"<Writer {self.namespace}, {state}, LSN {self._view().last_lsn}>"

    # --- inside -------------------------------------------------------------------
    def _submit(self, encoded: EncodedBatch, key: str | None) -> "Future[Receipt]":
        pending = Pending(
            encoded.ops,
            encoded.record,
            BatchHeader(len(encoded.ops), key, encoded.digest if key else None),
            self._runtime.future(),
            self._runtime.stopwatch(),
        )
        if key is None:
            self._committer.submit(pending)
            return pending.future
        with self._keyed:  # check and append under one lock (H19)
            known = self._known(key, encoded.digest)
            if known is None:
                self._committer.submit(pending)
            return known or pending.future

    def _known(self, key: str, digest: str) -> "Future[Receipt] | None":
        """Return the answer to a key that is committed or on its way."""
        on_its_way = self._committer.pending_with(key)
        if on_its_way is not None:
            if on_its_way.header.digest != digest:
                raise InvalidInputError(f"idempotency key {key!r} is on its way with another batch")
            return on_its_way.future
        entry = self._committer.tail.dedup.find(key, digest)
        if entry is None:
            return None
        answered: Future[Receipt] = self._runtime.future()
        answered.set_result(_replayed(self.namespace, entry))
        return answered

    def _view(self) -> View:
        return self._committer.tail.view()

    def _now_ms(self) -> int:
        return int(self._runtime.wall_s() * 1000)

    def _check(self) -> None:
        self.check_process()
        if self._closed:
            raise ClosedError(f"the writer of {self.namespace} is closed", hint="Open another one")


def _replayed(namespace: str, entry: DedupEntry) -> Receipt:
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
