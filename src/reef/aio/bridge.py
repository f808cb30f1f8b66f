"""The bridge from asyncio to the synchronous engine: threads, lanes, and wrapped methods.

    loop ──submit──▶ pool of threads ──▶ the synchronous engine
      ◀──────────── result ───────────┘

A bounded pool runs blocking calls; a `Lane` runs calls in order. Nothing blocks the loop. A
cancelled waiter cancels a call that has not started; a running call continues, and its result is
discarded. Closing the pool waits for running calls; the others get ClosedError.

A `Handle` wraps a handle of the engine. Each blocking method is wrapped in one line:
`info = hop(engine.info)` runs it in a thread, `scan = pieces(engine.scan)` iterates over it, one
piece per thread call. Names, parameters and documentation are those of the engine.
"""

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from contextvars import copy_context
from functools import wraps
from itertools import islice
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, Self, TypeVar

from reef.errors import ClosedError, ErrorKind, InvalidInputError
from reef.runtime import Future, Runtime, leaf_lock

T = TypeVar("T")
THREADS_MAX = 32
"""Concurrent calls that wait for the store: as many as the engine sends in parallel."""


class Threads:
    """The thread pool of one database. Bound to its process."""

    def __init__(self, runtime: Runtime, workers: int) -> None:
        self.runtime = runtime
        self._pool = runtime.pool(workers, name="reef-aio")
        self._process_id = runtime.process_id()
        self._closed = False
        self.handles: weakref.WeakSet[Any] = weakref.WeakSet()
        """Open handles, which are closed before the pool."""

    def check(self) -> None:
        """Raise if the pool cannot run calls any more."""
        if self._closed:
            raise ClosedError("this database is closed", hint="Open it again")
        if self.runtime.process_id() != self._process_id:
            raise ClosedError(
                f"this asyncio handle belongs to process {self._process_id}",
                kind=ErrorKind.FORKED,
                hint="Threads do not survive a fork: open the database again in this process",
            )

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        self.check()
        return self._pool.submit(copy_context().run, call)

    async def close(self) -> None:
        """Wait for running calls; cancel the others."""
        if not self._closed:
            self.check()
            self._closed = True
            await asyncio.to_thread(self._pool.close)


async def result_of(future: "Future[T]", *, keep: bool = False) -> T:
    """Wait in the loop for the result of a thread.

    A cancelled waiter cancels a call that has not started, unless `keep` is set.
    """
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not waiter.done():
            waiter.set_result(None)

    def notify(_: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: no task waits any more
            loop.call_soon_threadsafe(wake)

    future.add_done_callback(notify)
    try:
        await waiter
    except asyncio.CancelledError:
        if not keep:
            future.cancel()
        raise
    try:
        return future.result()
    except CancelledError:
        raise ClosedError("closed before this call started", hint="Open it again") from None


class Lane:
    """Runs calls one after the other, in order, in at most one thread at a time.

    The result of a call that returns a future is that of the future; the next call does not wait
    for it.
    """

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._lock = leaf_lock()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._running = False

    def submit(self, call: Callable[[], Any]) -> "Future[Any]":
        """Queue a call. It cannot be cancelled: a cancelled waiter only stops waiting."""
        self._threads.check()
        result: Future[Any] = self._threads.runtime.future()
        result.set_running_or_notify_cancel()
        with self._lock:
            self._calls.append((call, result))
            starts = not self._running
            self._running = True
        if starts:
            self._threads.submit(self._drain).add_done_callback(self._drop_if_cancelled)
        return result

    def _drain(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._running = False
                    return
                call, result = self._calls.popleft()
            _complete(call, result)

    def _drop_if_cancelled(self, drain: "Future[None]") -> None:
        """Fail all queued calls if the pool was closed before a thread was free."""
        if drain.cancelled():
            with self._lock:
                dropped, self._running = list(self._calls), False
                self._calls.clear()
            for _, result in dropped:
                result.set_exception(ClosedError("closed before this call started"))


def _complete(call: Callable[[], Any], result: "Future[Any]") -> None:
    try:
        returned = call()
    except BaseException as error:  # of any kind: a task waits for it
        result.set_exception(error)
        return
    if isinstance(returned, Future):
        returned.add_done_callback(lambda done: _copy(done, result))
    else:
        result.set_result(returned)


def _copy(done: "Future[Any]", result: "Future[Any]") -> None:
    error = done.exception()
    if error is not None:
        result.set_exception(error)
    else:
        result.set_result(done.result())


S_co = TypeVar("S_co", covariant=True)
S = TypeVar("S")
H = TypeVar("H", bound="Handle[Any]")
P = ParamSpec("P")

PIECE_ROWS = 1024
"""Rows per thread call of a scan: a fraction of a millisecond in the loop."""


class Handle(Generic[S_co]):
    """An asyncio wrapper of a handle of the engine. Bound to its process."""

    def __init__(self, sync: S_co, threads: Threads) -> None:
        self._sync = sync
        self._threads = threads
        self._closed = False

    def _submit(self, call: Callable[[], T]) -> "Future[T]":
        return self._threads.submit(call)

    async def _run(self, call: Callable[[], T]) -> T:
        """Run a call that may wait for the store."""
        return await result_of(self._submit(call))

    async def close(self) -> None:
        """Wait for calls in progress, and close the handle."""
        if not self._closed:
            await self._close()
            self._closed = True

    async def _close(self) -> None:
        close: Callable[[], None] = self._sync.close  # type: ignore[attr-defined]
        await result_of(self._submit(close), keep=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return repr(self._sync).replace("<", "<aio.", 1)

    def _repr_html_(self) -> str | None:
        html: str | None = getattr(self._sync, "_repr_html_", lambda: None)()
        return html

    def __reduce__(self) -> NoReturn:
        raise InvalidInputError(
            f"a {type(self).__name__} of reef.aio cannot be pickled",
            kind=ErrorKind.NOT_PICKLABLE,
            hint="Send the URL, and open it in the other process",
        )


def hop(
    method: Callable[Concatenate[S, P], T],
) -> Callable[Concatenate[Handle[S], P], Coroutine[Any, Any, T]]:
    """Return a blocking method as a coroutine that runs it in a thread."""
    name = method.__name__

    @wraps(method)
    async def call(self: Handle[S], /, *args: P.args, **kwargs: P.kwargs) -> T:
        bound: Callable[P, T] = getattr(self._sync, name)
        return await self._run(lambda: bound(*args, **kwargs))

    return call


def pieces(
    method: Callable[Concatenate[S, P], Iterator[T]], rows: int = PIECE_ROWS
) -> "Callable[Concatenate[Handle[S], P], Pieces[T]]":
    """Return a method that returns an iterator as one that returns an async iterator."""
    name = method.__name__

    @wraps(method)
    def call(self: Handle[S], /, *args: P.args, **kwargs: P.kwargs) -> Pieces[T]:
        bound: Callable[P, Iterator[T]] = getattr(self._sync, name)
        return Pieces(self, lambda: bound(*args, **kwargs), rows)

    return call


class Fetch(Generic[T]):
    """A repeated call; if its waiter is cancelled, the next waiter gets the pending result."""

    def __init__(self, handle: Handle[Any], call: Callable[[], T]) -> None:
        self._handle = handle
        self._call = call
        self._pending: Future[T] | None = None

    async def next(self) -> T | None:
        """Return the result of the call; None if a concurrent waiter got it."""
        if self._pending is None:
            self._pending = self._handle._submit(self._call)
        future = self._pending
        try:
            result = await result_of(future, keep=True)
        except Exception:
            self._pending = None
            raise
        if self._pending is not future:
            return None
        self._pending = None
        return result


class Pieces(AsyncIterator[T]):
    """An async iterator over an iterator of the engine, fetched in pieces by a thread."""

    def __init__(self, handle: Handle[Any], start: Callable[[], Iterator[T]], rows: int) -> None:
        self._start = start
        self._rows = rows
        self._fetch = Fetch(handle, self._next_piece)
        self._source: Iterator[T] | None = None
        self._piece: Iterator[T] = iter(())
        self._over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        while True:
            for row in self._piece:
                return row
            if self._over:
                raise StopAsyncIteration
            await self._refill()

    async def _refill(self) -> None:
        try:
            piece = await self._fetch.next()
        except Exception:
            self._over = True
            raise
        if piece is not None:
            self._over = len(piece) < self._rows
            self._piece = iter(piece)

    def _next_piece(self) -> list[T]:
        if self._source is None:
            self._source = self._start()
        return list(islice(self._source, self._rows))


class Opening(Generic[H]):
    """A handle that is being opened: `await` it, or enter it with `async with`."""

    def __init__(
        self, threads: Threads, make: Callable[[], S], wrap: Callable[[S, Threads], H]
    ) -> None:
        self._threads = threads
        self._make: Callable[[], Any] = make
        self._wrap: Callable[[Any, Threads], H] = wrap
        self._opened: H

    def __await__(self) -> Generator[Any, None, H]:
        return self._open().__await__()

    async def __aenter__(self) -> H:
        self._opened = await self
        return self._opened

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> None:
        await self._opened.__aexit__(kind, *error)

    async def _open(self) -> H:
        future = self._threads.submit(self._make)
        try:
            made = await result_of(future)
        except asyncio.CancelledError:
            future.add_done_callback(self._close_opened)
            raise
        opened = self._wrap(made, self._threads)
        self._threads.handles.add(opened)
        return opened

    def _close_opened(self, future: "Future[Any]") -> None:
        """Close a handle whose opener was cancelled: it may hold a lease."""
        if not future.cancelled() and future.exception() is None:
            close = getattr(future.result(), "close", None)
            with suppress(ClosedError):
                self._threads.submit(close or future.result().rollback)
