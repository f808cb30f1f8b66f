"""The writer and its transactions for asyncio.

Writes go to the engine one by one, in the order in which they were asked for, by one thread that
takes as many as there are; it waits where there is no room, and the loop does not. Nobody waits
for an answer in a thread: a thousand writes are a thousand futures and a few WAL objects.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, Unpack

from reef.aio.handle import Opening, hop
from reef.aio.reading import Readable
from reef.aio.threads import Lane, Threads, answer_of
from reef.engine import transactions, writer
from reef.engine.batch import Batch
from reef.engine.commit.opening import ReplayReport
from reef.engine.local import writer as local
from reef.engine.local.backlog import Left
from reef.engine.local.opening import LocalRecovery
from reef.engine.local.receipts import LocalReceipt
from reef.engine.worker import Worker
from reef.engine.writable import Options
from reef.runtime import Future
from reef.types import Receipt

__all__ = ["LocalWriter", "Transaction", "Writer"]

T = TypeVar("T")


class Writer(Readable[writer.Writer]):
    """A handle on the writer role of one namespace. Bound to its process."""

    def __init__(self, sync: writer.Writer, threads: Threads) -> None:
        super().__init__(sync, threads)
        self._lane = Lane(threads)

    async def write(self, batch: Batch, **options: Unpack[Options]) -> Receipt:
        """Commit a batch, all of it or nothing.

        Once it was handed over, cancelling does not take it back: it may land all the same.
        """
        receipt: Receipt = await answer_of(
            self._lane.submit(lambda: self._sync.write(batch, wait=False, **options))
        )
        return receipt

    async def put(
        self,
        key: bytes | str,
        value: bytes | Mapping[str, Any],
        *,
        ttl_s: float | None = None,
        **options: Unpack[Options],
    ) -> Receipt:
        """Set a key to bytes, or in a namespace with columns to a row."""
        return await self.write(Batch().put(key, value, ttl_s=ttl_s), **options)

    async def upsert(
        self, rows: Any, *, ttl_s: float | None = None, **options: Unpack[Options]
    ) -> Receipt:
        """Set whole rows: a list of dicts, a dict of columns, Arrow, pandas or polars.

        A key that comes twice has its last row; columns that are not named are null.
        """
        return await self.write(Batch().upsert(rows, ttl_s=ttl_s), **options)

    async def patch(self, rows: Any, **options: Unpack[Options]) -> Receipt:
        """Set only the named columns; a key that has no row stays without one."""
        return await self.write(Batch().patch(rows), **options)

    async def delete(self, key: bytes | str, **options: Unpack[Options]) -> Receipt:
        """Remove a key's row, if it has one."""
        return await self.write(Batch().delete(key), **options)

    async def delete_range(
        self, start: bytes | str, end: bytes | str, **options: Unpack[Options]
    ) -> Receipt:
        """Remove all rows of [start, end)."""
        return await self.write(Batch().delete_range(start, end), **options)

    def transaction(self) -> "Opening[Transaction]":
        """Begin a transaction: `async with writer.transaction() as tx:`."""
        return Opening(self._threads, self._sync.transaction, Transaction)

    async def flush(self) -> None:
        """Return when everything that was written before is durable."""
        await answer_of(self._lane.submit(lambda: None))  # all of it is handed over
        await self._run(self._sync.flush)

    async def _close(self) -> None:
        await answer_of(self._lane.submit(self._sync.close))

    resolve = hop(writer.Writer.resolve)
    refresh = hop(writer.Writer.refresh)

    @property
    def recovery(self) -> ReplayReport:
        """What opening this writer read back from the log."""
        return self._sync.recovery

    @property
    def is_open(self) -> bool:
        """Whether it can still commit: neither closed nor fenced, as far as it knows."""
        return self._sync.is_open

    @property
    def unfolded(self) -> writer.Unfolded:
        """How much of the log no fold has taken over yet, as far as it knows."""
        return self._sync.unfolded

    @property
    def background(self) -> Worker | None:
        """What folds, compacts and sweeps behind it; holding it back takes no time."""
        return self._sync.background


class LocalWriter(Writer):
    """A writer with a local log in front of its bucket: `durability="local"`."""

    _sync: local.LocalWriter

    async def flush(self, timeout_s: float | None = None) -> None:
        """Return when everything that was written before is in the bucket."""
        await answer_of(self._lane.submit(lambda: None))  # all of it is handed over
        await self._run(lambda: self._sync.flush(timeout_s))

    async def wait_for(self, receipt: LocalReceipt, timeout_s: float | None = None) -> int:
        """Return the LSN of a receipt when its batch is in the bucket, as its `wait` does."""
        if receipt.lsn is not None:
            return receipt.lsn
        return await self._run(lambda: receipt.wait(timeout_s))

    @property
    def pending(self) -> Left:
        """What is on the local disk, and not known to be in the bucket."""
        return self._sync.pending

    @property
    def local_recovery(self) -> LocalRecovery:
        """What opening it took up from the local log."""
        return self._sync.local_recovery


class Transaction(Readable[transactions.Transaction]):
    """Commits when its block ends without an exception. Its calls run one after the other."""

    def __init__(self, sync: transactions.Transaction, threads: Threads) -> None:
        super().__init__(sync, threads)
        self._lane = Lane(threads)

    @property
    def receipt(self) -> Receipt | None:
        """Where it was committed; None before, and for one that has written nothing."""
        return self._sync.receipt

    put = hop(transactions.Transaction.put)
    upsert = hop(transactions.Transaction.upsert)
    patch = hop(transactions.Transaction.patch)
    delete = hop(transactions.Transaction.delete)
    delete_range = hop(transactions.Transaction.delete_range)
    commit = hop(transactions.Transaction.commit)
    rollback = hop(transactions.Transaction.rollback)

    async def _close(self) -> None:
        await self.rollback()

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> None:
        ended = self._submit(lambda: self._sync.__exit__(kind, *error))
        if kind is not asyncio.CancelledError:  # then it ends without anybody waiting for it
            await answer_of(ended)

    def _submit(self, call: Callable[[], T]) -> "Future[T]":
        return self._lane.submit(call)
