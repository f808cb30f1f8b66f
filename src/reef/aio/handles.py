"""`reef.aio.open` and its handles: databases, readers, writers, transactions, change streams.

Cached rows are returned in the loop, others by a thread.

A change stream prefetches, but its position is that of the changes it has yielded, so that a cursor
never commits a change that no task has seen. It waits for more in the loop: streams that follow a
log hold no thread while there is nothing to read.

Writes are submitted in the order of the calls by one thread, which blocks if the queue is full; the
loop does not. No thread waits for a result: a thousand writes are a thousand futures and a few WAL
objects.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from functools import partial
from typing import Any, Literal, Self, TypeVar, Unpack, overload

import pyarrow as pa

from reef import api
from reef.aio.bridge import (
    PIECE_ROWS,
    THREADS_MAX,
    Fetch,
    Handle,
    Lane,
    Opening,
    Pieces,
    Threads,
    hop,
    pieces,
    result_of,
)
from reef.engine.commit.open_writer import ReplayReport
from reef.engine.handles import database, pinned, readable, reader, writer
from reef.engine.handles import local_writer as local
from reef.engine.handles import transaction as transactions
from reef.engine.handles.branches import Difference
from reef.engine.handles.bucket_snapshots import BucketSnapshot
from reef.engine.handles.database import renamed_keyword
from reef.engine.handles.writer import Worker, WriteOptions
from reef.engine.history import changes, snapshots
from reef.engine.history.as_of import AsOf
from reef.engine.history.change_rows import Change
from reef.engine.local.open import LocalRecovery
from reef.engine.local.stream import LocalReceipt, PendingUploads
from reef.engine.read.caches import MISSING
from reef.engine.rows.batch import Batch
from reef.engine.rows.merges import Operand
from reef.engine.stats import NamespaceInfo
from reef.errors import CorruptionError, ReefError
from reef.runtime import REAL, Future
from reef.types import Receipt

PIECE_CHANGES = 256
CHANGES_POLL_S = changes.POLL_S

Piece = tuple[list[tuple[int, Change]], int | None]
"""Changes, each with the position before it, and the final position at the end of the log."""


class Changes(AsyncIterator[Change]):
    """An async iterator over changes. It stops at the end of the log, and can be resumed."""

    def __init__(
        self,
        handle: Handle[Any],
        start: Callable[[], changes.Changes],
        after_lsn: int,
        *,
        follow: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        self.position = after_lsn
        """The last LSN whose changes were all yielded: the position to resume from."""
        self._handle = handle
        self._start = start
        self._source: changes.Changes | None = None
        self._follow, self._timeout_s = follow, timeout_s
        self._fetch = Fetch(handle, self._next_piece)
        self._piece: Iterator[tuple[int, Change]] = iter(())
        self._end: int | None = None

    def follow(self, follow: bool, timeout_s: float | None = None) -> Self:
        """Set whether to wait for more at the end of the log."""
        self._follow, self._timeout_s = follow, timeout_s
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Change:
        while True:
            for position, change in self._piece:
                self.position = position
                return change
            if self._end is not None:
                self.position, self._end = self._end, None
                if not (self._follow and await self._wait()):
                    raise StopAsyncIteration
            fetched = await self._fetch.next()
            if fetched is not None:
                piece, self._end = fetched
                self._piece = iter(piece)

    def __repr__(self) -> str:
        return f"<aio.Changes after LSN {self.position}>"

    def _next_piece(self) -> Piece:
        """Read the next changes, in a thread; an error is raised after the changes before it."""
        if self._source is None:
            self._source = self._start()
            self._source.follow(False)
        found: list[tuple[int, Change]] = []
        try:
            for change in self._source:
                found.append((self._source.position, change))
                if len(found) == PIECE_CHANGES:
                    return found, None
        except ReefError:  # the source raises it again
            if not found:
                raise
            return found, None
        return found, self._source.position

    async def _wait(self) -> bool:
        """Wait for more; return False if the timeout passed first."""
        runtime, timeout_s, source = self._handle._threads.runtime, self._timeout_s, self._source
        assert source is not None
        deadline = None if timeout_s is None else runtime.deadline(timeout_s)
        while not await self._handle._run(source.has_more):
            if deadline is not None and deadline.passed():
                return False
            await asyncio.sleep(
                CHANGES_POLL_S if deadline is None else min(CHANGES_POLL_S, deadline.remaining_s())
            )
        return True


class ChangeCursor(Handle[changes.ChangeCursor]):
    """A named position in the log. For one process at a time."""

    _stream: Changes | None = None

    @property
    def namespace(self) -> str:
        return self._sync.namespace

    @property
    def name(self) -> str:
        return self._sync.name

    @property
    def committed(self) -> int:
        """The committed position, from which another process would resume."""
        return self._sync.committed

    @property
    def position(self) -> int:
        """The last LSN whose changes were all yielded."""
        return self._sync.committed if self._stream is None else self._stream.position

    def __aiter__(self) -> Changes:
        """Yield the changes up to the end of the log; iterate again for newer ones."""
        return self._changes().follow(False)

    def follow(self, timeout_s: float | None = None) -> Changes:
        """Yield changes as they are committed; stop after `timeout_s` without one."""
        return self._changes().follow(True, timeout_s)

    async def commit(self, upto_lsn: int | None = None) -> int:
        """Publish the position, so that the next process resumes here.

        With `upto_lsn`, publish that position instead.
        """
        position = self.position
        if upto_lsn is not None:  # prefetched changes were not yielded
            position = changes.check_upto(upto_lsn, self.committed, position)
        return await self._run(lambda: self._sync.commit(position))

    def _changes(self) -> Changes:
        if self._stream is None:
            self._stream = Changes(self, lambda: iter(self._sync), self._sync.position)
        return self._stream


class Snapshot(Handle[snapshots.Snapshot]):
    """A pinned generation."""

    @property
    def namespace(self) -> str:
        return self._sync.namespace

    @property
    def id(self) -> str:
        return self._sync.id

    @property
    def name(self) -> str | None:
        return self._sync.name

    @property
    def generation(self) -> int:
        return self._sync.generation

    @property
    def expires_at(self) -> datetime | None:
        """When the snapshot expires, by the store's clock; None if never. Not refreshed."""
        return self._sync.expires_at

    extend = hop(snapshots.Snapshot.extend)
    release = hop(snapshots.Snapshot.release)


R_co = TypeVar("R_co", bound=readable.Readable, covariant=True)
POLL_S = 0.05
"""How often `wait_for` polls."""


class Readable(Handle[R_co]):
    """Reads by key, by range, and as Arrow."""

    @property
    def namespace(self) -> str:
        return self._sync.namespace

    async def get(self, key: bytes | str, columns: Sequence[str] | None = None) -> Any:
        """Return the value or row of a key; None if it has none. A cached row needs no thread."""
        row = self._sync._get_cached(key) if columns is None else MISSING
        if row is not MISSING:
            return row
        return await self._run(lambda: self._sync.get(key, columns))

    async def schema(self) -> pa.Schema:
        """Return the Arrow schema, key column first."""
        return await self._run(lambda: self._sync.schema)

    get_many = hop(readable.Readable.get_many)
    count = hop(readable.Readable.count)
    dataset = hop(readable.Readable.dataset)
    to_arrow = hop(readable.Readable.to_arrow)
    to_pandas = hop(readable.Readable.to_pandas)
    to_polars = hop(readable.Readable.to_polars)
    search = hop(readable.Readable.search)
    scan = pieces(readable.Readable.scan)
    scan_arrow = pieces(readable.Readable.scan_arrow, 1)


class Reader(Readable[reader.Reader]):
    """A reader of one namespace."""

    @property
    def last_lsn(self) -> int:
        """The newest LSN that this reader has applied."""
        return self._sync.last_lsn

    @property
    def damage(self) -> CorruptionError | None:
        """The damage that hides newer rows from this reader; None if there is none."""
        return self._sync.damage

    refresh = hop(reader.Reader.refresh)
    changes_arrow = pieces(reader.Reader.changes_arrow, 1)

    async def wait_for(self, lsn: int, timeout_s: float = 30.0) -> bool:
        """Wait until an LSN is visible; False if `timeout_s` passed first."""
        deadline = self._threads.runtime.deadline(timeout_s)
        while not await self._run(lambda: self._sync.wait_for(lsn, 0.0)):
            if deadline.passed():
                return False
            await asyncio.sleep(min(POLL_S, deadline.remaining_s()))
        return True

    def as_of(
        self,
        *,
        generation: int | None = None,
        lsn: int | None = None,
        time: datetime | str | None = None,
        pin: bool = False,
    ) -> "Opening[PinnedReader]":
        """Return a view of a past state: by generation, LSN or time."""
        return Opening(
            self._threads,
            lambda: self._sync.as_of(generation=generation, lsn=lsn, time=time, pin=pin),
            PinnedReader,
        )

    def changes(
        self, after_lsn: int = 0, *, follow: bool = False, timeout_s: float | None = None
    ) -> Changes:
        """Yield the operations committed after an LSN, in order, up to the end of the log.

        With `follow`, wait there for more, at most `timeout_s` at a time.
        """
        return Changes(
            self,
            lambda: self._sync.changes(after_lsn, follow=follow, timeout_s=timeout_s),
            after_lsn,
            follow=follow,
            timeout_s=timeout_s,
        )


class PinnedReader(Readable[pinned.PinnedReader]):
    """A reader of one point in time."""

    @property
    def generation(self) -> int:
        """The generation that is read."""
        return self._sync.generation

    @property
    def last_lsn(self) -> int:
        """The last LSN of this point in time."""
        return self._sync.last_lsn

    @property
    def pinned(self) -> bool:
        """Whether a lease protects the objects of this view."""
        return self._sync.pinned


T = TypeVar("T")


class Writer(Readable[writer.Writer]):
    """The writer of one namespace. Bound to its process."""

    def __init__(self, sync: writer.Writer, threads: Threads) -> None:
        super().__init__(sync, threads)
        self._lane = Lane(threads)

    async def write(self, batch: Batch, **options: Unpack[WriteOptions]) -> Receipt:
        """Commit a batch atomically.

        Cancelling a submitted write only stops waiting: it may be committed all the same.
        """
        receipt: Receipt = await result_of(
            self._lane.submit(lambda: self._sync.write(batch, wait=False, **options))
        )
        return receipt

    async def put(
        self,
        key: bytes | str,
        value: bytes | Mapping[str, Any],
        *,
        ttl_s: float | None = None,
        **options: Unpack[WriteOptions],
    ) -> Receipt:
        """Set a key to bytes, or in a namespace with columns to a row."""
        return await self.write(Batch().put(key, value, ttl_s=ttl_s), **options)

    async def upsert(
        self, rows: Any, *, ttl_s: float | None = None, **options: Unpack[WriteOptions]
    ) -> Receipt:
        """Set whole rows: a list of dicts, a dict of columns, Arrow, pandas or polars.

        The last row of a repeated key wins; columns that are not named become null.
        """
        return await self.write(Batch().upsert(rows, ttl_s=ttl_s), **options)

    async def patch(self, rows: Any, **options: Unpack[WriteOptions]) -> Receipt:
        """Set only the named columns; keys without a row are ignored."""
        receipt: Receipt = await result_of(
            self._lane.submit(lambda: self._sync.patch(rows, wait=False, **options))
        )
        return receipt

    async def merge(
        self,
        key: bytes | str,
        columns: Mapping[str, Operand],
        *,
        ttl_s: float | None = None,
        **options: Unpack[WriteOptions],
    ) -> Receipt:
        """Apply operators to columns without reading: `merge("k", {"count": reef.add(1)})`."""
        return await self.write(Batch().merge(key, columns, ttl_s=ttl_s), **options)

    async def merge_rows(
        self,
        rows: Any,
        operators: Mapping[str, str],
        *,
        ttl_s: float | None = None,
        **options: Unpack[WriteOptions],
    ) -> Receipt:
        """Merge rows in any form, with one operator for each column: `{"count": "add"}`."""
        return await self.write(Batch().merge_rows(rows, operators, ttl_s=ttl_s), **options)

    async def delete(self, key: bytes | str, **options: Unpack[WriteOptions]) -> Receipt:
        """Delete the row of a key, if it has one."""
        return await self.write(Batch().delete(key), **options)

    async def delete_range(
        self, start: bytes | str, end: bytes | str, **options: Unpack[WriteOptions]
    ) -> Receipt:
        """Delete all rows of [start, end)."""
        return await self.write(Batch().delete_range(start, end), **options)

    async def delete_where(self, where: Any) -> Receipt:
        """Delete the rows that match a filter, as one transaction; `ops` is their number."""
        await result_of(self._lane.submit(lambda: None))  # after earlier writes
        return await self._run(lambda: self._sync.delete_where(where))

    async def update_where(self, set: Mapping[str, Any], where: Any) -> Receipt:
        """Set columns of the rows that match a filter, as one transaction."""
        await result_of(self._lane.submit(lambda: None))  # after earlier writes
        return await self._run(lambda: self._sync.update_where(set, where))

    def transaction(self, *, idempotency_key: str | None = None) -> "Opening[Transaction]":
        """Begin a transaction: `async with writer.transaction() as tx:`."""
        begin = partial(self._sync.transaction, idempotency_key=idempotency_key)
        return Opening(self._threads, begin, Transaction)

    async def flush(self) -> None:
        """Wait until every earlier write is durable."""
        await result_of(self._lane.submit(lambda: None))  # all of them are submitted
        await self._run(self._sync.flush)

    async def _close(self) -> None:
        await result_of(self._lane.submit(self._sync.close))

    resolve = hop(writer.Writer.resolve)
    refresh = hop(writer.Writer.refresh)

    @property
    def recovery(self) -> ReplayReport:
        """The part of the log that was replayed when this writer was opened."""
        return self._sync.recovery

    @property
    def is_open(self) -> bool:
        """Whether this writer can commit: not closed, and not known to be fenced."""
        return self._sync.is_open

    @property
    def unfolded(self) -> writer.LogBacklog:
        """The unfolded part of the log, as of the newest manifest that this writer has loaded."""
        return self._sync.unfolded

    @property
    def background(self) -> Worker | None:
        """The worker that folds, compacts and sweeps; pausing it does not block."""
        return self._sync.background


class LocalWriter(Writer):
    """A writer with a local log before its bucket: `durability="local"`."""

    _sync: local.LocalWriter

    async def flush(self, timeout_s: float | None = None) -> None:
        """Wait until every earlier write is in the bucket."""
        await result_of(self._lane.submit(lambda: None))  # all of them are submitted
        await self._run(lambda: self._sync.flush(timeout_s))

    async def wait_for(self, receipt: LocalReceipt, timeout_s: float | None = None) -> int:
        """Return the LSN of a receipt when its batch is in the bucket, as its `wait` does."""
        if receipt.lsn is not None:
            return receipt.lsn
        return await self._run(lambda: receipt.wait(timeout_s))

    @property
    def pending(self) -> PendingUploads:
        """Batches on the local disk that are not known to be in the bucket."""
        return self._sync.pending

    @property
    def local_recovery(self) -> LocalRecovery:
        """The batches that opening it has loaded from the local log."""
        return self._sync.local_recovery


class Transaction(Readable[transactions.Transaction]):
    """Commits when its block ends without an exception. Its calls run one after the other."""

    def __init__(self, sync: transactions.Transaction, threads: Threads) -> None:
        super().__init__(sync, threads)
        self._lane = Lane(threads)

    @property
    def receipt(self) -> Receipt | None:
        """The receipt of the commit; None before it, and for a transaction without writes."""
        return self._sync.receipt

    put = hop(transactions.Transaction.put)
    upsert = hop(transactions.Transaction.upsert)
    patch = hop(transactions.Transaction.patch)
    merge = hop(transactions.Transaction.merge)
    merge_rows = hop(transactions.Transaction.merge_rows)
    delete = hop(transactions.Transaction.delete)
    delete_range = hop(transactions.Transaction.delete_range)
    commit = hop(transactions.Transaction.commit)
    rollback = hop(transactions.Transaction.rollback)

    async def _close(self) -> None:
        await self.rollback()

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> None:
        ended = self._submit(lambda: self._sync.__exit__(kind, *error))
        if kind is not asyncio.CancelledError:  # then no task waits for its end
            await result_of(ended)

    def _submit(self, call: Callable[[], T]) -> "Future[T]":
        return self._lane.submit(call)


def open(
    url: str | os.PathLike[str], *, threads_max: int = THREADS_MAX, **options: Any
) -> "Opening[Database]":
    """Open the bucket at `url`: `await` it, or enter it with `async with`.

    `threads_max` bounds the calls that wait for the store concurrently; `options` are those of
    `reef.open`.
    """
    threads = Threads(options.get("runtime", REAL), threads_max)
    return Opening(threads, lambda: api.open(url, **options), Database)


class Database(Handle[database.Database]):
    """The namespaces of one bucket, for asyncio."""

    create = hop(database.Database.create)
    alter = hop(database.Database.alter)
    merge = hop(database.Database.merge)
    rollback = hop(database.Database.rollback)
    history = hop(database.Database.history)
    info = hop(database.Database.info)
    namespaces = hop(database.Database.namespaces)
    drop = hop(database.Database.drop)
    undrop = hop(database.Database.undrop)
    rename = hop(database.Database.rename)
    jobs = hop(database.Database.jobs)
    stats = hop(database.Database.stats)
    cursors = hop(database.Database.cursors)
    drop_cursor = hop(database.Database.drop_cursor)

    @overload
    def writer(
        self, namespace: str, *, durability: Literal["local"], **settings: Any
    ) -> Opening[LocalWriter]: ...
    @overload
    def writer(
        self, namespace: str, *, durability: Literal["object"] = "object", **settings: Any
    ) -> Opening[Writer]: ...
    @renamed_keyword(name="namespace")
    def writer(
        self, namespace: str, *, durability: Literal["object", "local"] = "object", **settings: Any
    ) -> Any:
        """Acquire the writer role of a namespace; see `reef.Database.writer`."""

        def make() -> writer.Writer:
            return self._sync.writer(namespace, durability=durability, **settings)

        return Opening(self._threads, make, LocalWriter if durability == "local" else Writer)

    @overload
    def reader(
        self,
        namespace: str,
        *,
        as_of: AsOf | datetime | str | int | dict[str, Any],
        **settings: Any,
    ) -> Opening[PinnedReader]: ...
    @overload
    def reader(
        self, namespace: str, *, snapshot: "Snapshot | str", **settings: Any
    ) -> Opening[PinnedReader]: ...
    @overload
    def reader(
        self, namespace: str, *, pin: Literal[True], **settings: Any
    ) -> Opening[PinnedReader]: ...
    @overload
    def reader(self, namespace: str, **settings: Any) -> Opening[Reader]: ...
    @renamed_keyword(name="namespace")
    def reader(self, namespace: str, *, snapshot: Any = None, **settings: Any) -> Any:
        """Open a namespace for reading; see `reef.Database.reader`."""
        pinned_by = snapshot._sync if isinstance(snapshot, Snapshot) else snapshot

        def make() -> reader.Reader | pinned.PinnedReader:
            opened: reader.Reader | pinned.PinnedReader
            opened = self._sync.reader(namespace, snapshot=pinned_by, **settings)
            return opened

        return Opening(self._threads, make, _reader_of)

    def cursor(
        self, namespace: str, name: str, after_lsn: int | None = None
    ) -> Opening[ChangeCursor]:
        """Open a registered cursor, for which the log is retained."""
        return Opening(
            self._threads, lambda: self._sync.cursor(namespace, name, after_lsn), ChangeCursor
        )

    async def snapshot(
        self,
        namespace: str,
        name: str | None = None,
        *,
        ttl_s: float | None = None,
        generation: int | None = None,
    ) -> Snapshot:
        """Pin everything that is committed now, until it is released or `ttl_s` has passed."""
        taken = await self._run(
            lambda: self._sync.snapshot(namespace, name, ttl_s=ttl_s, generation=generation)
        )
        return Snapshot(taken, self._threads)

    async def branch(self, source: str, namespace: str, at: Any = None) -> NamespaceInfo:
        """Create a namespace with the rows that another one has, or had; see `reef.Database`."""
        point = at._sync if isinstance(at, Snapshot) else at
        return await self._run(lambda: self._sync.branch(source, namespace, point))

    async def snapshot_all(self, name: str, *, ttl_s: float | None = None) -> dict[str, Snapshot]:
        """Pin all namespaces of the bucket under one name; see `reef.Database.snapshot_all`."""
        taken = await self._run(lambda: self._sync.snapshot_all(name, ttl_s=ttl_s))
        return {of: Snapshot(pin, self._threads) for of, pin in taken.items()}

    async def snapshots_all(self, name: str) -> dict[str, Snapshot]:
        """Return the snapshots of all namespaces under one name; see `reef.Database`."""
        found = await self._run(lambda: self._sync.snapshots_all(name))
        return {of: Snapshot(pin, self._threads) for of, pin in found.items()}

    async def bucket_snapshots(self) -> list[BucketSnapshot]:
        """Return the snapshots of the whole bucket by name; see `reef.Database`."""
        return await self._run(self._sync.bucket_snapshots)

    async def release_snapshot_all(self, name: str) -> None:
        """Release all snapshots of one name, and free the name; see `reef.Database`."""
        await self._run(lambda: self._sync.release_snapshot_all(name))

    def diff(
        self, a: str | Snapshot | PinnedReader, b: str | Snapshot | PinnedReader
    ) -> Pieces[Difference]:
        """Yield the rows that differ between two states; see `reef.Database.diff`."""
        states = [one._sync if isinstance(one, Handle) else one for one in (a, b)]
        return Pieces(self, lambda: self._sync.diff(*states), PIECE_ROWS)

    async def snapshots(self, namespace: str) -> list[Snapshot]:
        """Return the unexpired snapshots of a namespace, oldest first."""
        found = await self._run(lambda: self._sync.snapshots(namespace))
        return [Snapshot(snapshot, self._threads) for snapshot in found]

    async def sql(
        self, query: str, parameters: Sequence[Any] | Mapping[str, Any] | None = None
    ) -> pa.Table:
        """Run a query over the namespaces and return its rows; see `reef.Database.sql`."""
        return await self._run(lambda: self._sync.sql(query, parameters))

    def sql_stream(
        self, query: str, parameters: Sequence[Any] | Mapping[str, Any] | None = None
    ) -> Pieces[dict[str, Any]]:
        """Run a query and yield its rows as dicts; see `reef.Database.sql_stream`."""
        return Pieces(self, lambda: iter(self._sync.sql_stream(query, parameters)), PIECE_ROWS)

    async def run(self, job: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a job in a thread: `await db.run(fold, "users")`."""
        return await self._run(lambda: job(self._sync, *args, **kwargs))

    async def _close(self) -> None:
        """Close all handles that were opened here, then the threads."""
        try:
            async with AsyncExitStack() as stack:  # all of them, even if one fails
                for handle in self._threads.handles - {self}:
                    stack.push_async_callback(handle.close)
        finally:
            await self._threads.close()


def _reader_of(
    made: reader.Reader | pinned.PinnedReader, threads: Threads
) -> Reader | PinnedReader:
    if isinstance(made, reader.Reader):
        return Reader(made, threads)
    return PinnedReader(made, threads)
