"""`reef.aio.open`, and the database that it gives."""

import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import datetime
from typing import Any, Literal, TypeVar, overload

from reef import api
from reef.aio.handle import Handle, Opening, hop
from reef.aio.reading import PinnedReader, Reader
from reef.aio.threads import THREADS_MAX, Threads
from reef.aio.views import ChangeCursor, Snapshot
from reef.aio.writing import LocalWriter, Writer
from reef.engine import database, reader, writer
from reef.engine.history import pinned
from reef.engine.history.moments import AsOf
from reef.runtime import REAL

__all__ = ["Database", "open"]

T = TypeVar("T")


def open(
    url: str | os.PathLike[str], *, threads_max: int = THREADS_MAX, **options: Any
) -> "Opening[Database]":
    """Open the bucket at `url`: `await` it, or enter it with `async with`.

    `threads_max` bounds the calls that wait for the store at once; `options` are those of
    `reef.open`.
    """
    threads = Threads(options.get("runtime", REAL), threads_max)
    return Opening(threads, lambda: api.open(url, **options), Database)


class Database(Handle[database.Database]):
    """The namespaces of one bucket, for asyncio."""

    create = hop(database.Database.create)
    alter = hop(database.Database.alter)
    info = hop(database.Database.info)
    namespaces = hop(database.Database.namespaces)
    drop = hop(database.Database.drop)
    undrop = hop(database.Database.undrop)
    jobs = hop(database.Database.jobs)
    stats = hop(database.Database.stats)
    cursors = hop(database.Database.cursors)
    drop_cursor = hop(database.Database.drop_cursor)

    @overload
    def writer(
        self, name: str, *, durability: Literal["local"], **settings: Any
    ) -> Opening[LocalWriter]: ...
    @overload
    def writer(
        self, name: str, *, durability: Literal["object"] = "object", **settings: Any
    ) -> Opening[Writer]: ...
    def writer(
        self, name: str, *, durability: Literal["object", "local"] = "object", **settings: Any
    ) -> Any:
        """Take the writer role of a namespace, which is made if there is none.

        With `take_over=False`, ConflictError if another writer was there within the last minute;
        with `durability="local"` and `local_log`, a write is acknowledged on the local disk.
        """

        def make() -> writer.Writer:
            return self._sync.writer(name, durability=durability, **settings)

        return Opening(self._threads, make, LocalWriter if durability == "local" else Writer)

    @overload
    def reader(
        self, name: str, *, as_of: AsOf | datetime | int | dict[str, Any], **settings: Any
    ) -> Opening[PinnedReader]: ...
    @overload
    def reader(
        self, name: str, *, snapshot: "Snapshot | str", **settings: Any
    ) -> Opening[PinnedReader]: ...
    @overload
    def reader(
        self, name: str, *, pin: Literal[True], **settings: Any
    ) -> Opening[PinnedReader]: ...
    @overload
    def reader(self, name: str, **settings: Any) -> Opening[Reader]: ...
    def reader(self, name: str, *, snapshot: Any = None, **settings: Any) -> Any:
        """Open a namespace for reading; NotFoundError if there is none.

        `as_of`, `snapshot` and `pin=True` open one moment, which a lease keeps until it is closed.
        """
        moment = snapshot._sync if isinstance(snapshot, Snapshot) else snapshot

        def make() -> reader.Reader | pinned.PinnedReader:
            opened: reader.Reader | pinned.PinnedReader
            opened = self._sync.reader(name, snapshot=moment, **settings)
            return opened

        return Opening(self._threads, make, _reader_of)

    def cursor(
        self, namespace: str, name: str, after_lsn: int | None = None
    ) -> Opening[ChangeCursor]:
        """Read changes by a cursor that has a name, and for which the log is kept."""
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
        """Keep everything that is committed now, until it is released or `ttl_s` has passed."""
        taken = await self._run(
            lambda: self._sync.snapshot(namespace, name, ttl_s=ttl_s, generation=generation)
        )
        return Snapshot(taken, self._threads)

    async def snapshots(self, namespace: str) -> list[Snapshot]:
        """Return the snapshots of a namespace that are not over, the oldest first."""
        found = await self._run(lambda: self._sync.snapshots(namespace))
        return [Snapshot(snapshot, self._threads) for snapshot in found]

    async def run(self, job: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a job in a thread: `await db.run(fold, "users")`."""
        return await self._run(lambda: job(self._sync, *args, **kwargs))

    async def _close(self) -> None:
        """Close all that was opened here, then the threads."""
        try:
            async with AsyncExitStack() as stack:  # each of them, whatever the others say
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
