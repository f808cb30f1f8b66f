"""Handles: an asyncio object in front of one of the engine's, and how its methods are made.

Each blocking method of the engine comes to asyncio with one line: `info = hop(engine.info)`
awaits it in a thread, `scan = pieces(engine.scan)` iterates over it, a piece per thread call.
Names, arguments and documentation are the engine's own, for editors too.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import suppress
from functools import wraps
from itertools import islice
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, Self, TypeVar

from reef.aio.threads import Threads, answer_of
from reef.errors import ClosedError, InvalidInputError, Kind
from reef.runtime import Future

__all__ = ["Fetch", "Handle", "Opening", "Pieces", "hop", "pieces"]

S_co = TypeVar("S_co", covariant=True)
S = TypeVar("S")
H = TypeVar("H", bound="Handle[Any]")
P = ParamSpec("P")
T = TypeVar("T")

PIECE_ROWS = 1024
"""Rows per thread call of a scan: a fraction of a millisecond in the loop, until it is free."""


class Handle(Generic[S_co]):
    """A part of the engine, as asyncio sees it. Belongs to its process."""

    def __init__(self, sync: S_co, threads: Threads) -> None:
        self._sync = sync
        self._threads = threads
        self._closed = False

    def _submit(self, call: Callable[[], T]) -> "Future[T]":
        return self._threads.submit(call)

    async def _run(self, call: Callable[[], T]) -> T:
        """Run something that may wait for the store."""
        return await answer_of(self._submit(call))

    async def close(self) -> None:
        """Finish what is on its way, and give the handle up."""
        if not self._closed:
            await self._close()
            self._closed = True

    async def _close(self) -> None:
        close: Callable[[], None] = self._sync.close  # type: ignore[attr-defined]
        await answer_of(self._submit(close), keep=True)

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
            kind=Kind.NOT_PICKLABLE,
            hint="Send the URL, and open it where it is needed",
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
    """Return a method that iterates as one that iterates in the loop."""
    name = method.__name__

    @wraps(method)
    def call(self: Handle[S], /, *args: P.args, **kwargs: P.kwargs) -> Pieces[T]:
        bound: Callable[P, Iterator[T]] = getattr(self._sync, name)
        return Pieces(self, lambda: bound(*args, **kwargs), rows)

    return call


class Fetch(Generic[T]):
    """A call that is made again and again; a waiter that is cancelled leaves it to the next."""

    def __init__(self, handle: Handle[Any], call: Callable[[], T]) -> None:
        self._handle = handle
        self._call = call
        self._under_way: Future[T] | None = None

    async def next(self) -> T | None:
        """Return what the call returns; None to those who asked for it meanwhile."""
        if self._under_way is None:
            self._under_way = self._handle._submit(self._call)
        future = self._under_way
        try:
            found = await answer_of(future, keep=True)
        except Exception:
            self._under_way = None
            raise
        if self._under_way is not future:
            return None
        self._under_way = None
        return found


class Pieces(AsyncIterator[T]):
    """An iterator of the engine's, fetched in a thread, a piece at a time."""

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
            made = await answer_of(future)
        except asyncio.CancelledError:
            future.add_done_callback(self._give_back)
            raise
        opened = self._wrap(made, self._threads)
        self._threads.handles.add(opened)
        return opened

    def _give_back(self, future: "Future[Any]") -> None:
        """Close what nobody waits for any more: it may hold a lease."""
        if not future.cancelled() and future.exception() is None:
            close = getattr(future.result(), "close", None)
            with suppress(ClosedError):
                self._threads.submit(close or future.result().rollback)
