"""The threads behind the loop: a bounded pool, and lanes that keep an order in it.

    loop ──submit──▶ pool of threads ──▶ the synchronous engine
      ◀──────────── answer ───────────┘

Nothing here waits in the loop. A waiter that is cancelled takes back what has not begun; what
has begun runs to its end, and its answer is dropped. When the pool is closed, what runs is
waited for and what has not begun gets ClosedError.
"""

import asyncio
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar

from reef.errors import ClosedError, Kind
from reef.runtime import Future, Runtime, leaf_lock

__all__ = ["Lane", "Threads", "answer_of"]

T = TypeVar("T")
THREADS_MAX = 32
"""Reads that may wait for the store at once: as many as the engine itself sends side by side."""


class Threads:
    """The pool of one database. Belongs to the process that made it."""

    def __init__(self, runtime: Runtime, workers: int) -> None:
        self.runtime = runtime
        self._pool = runtime.pool(workers, name="reef-aio")
        self._process_id = runtime.process_id()
        self._closed = False
        self.handles: weakref.WeakSet[Any] = weakref.WeakSet()
        """What was opened on it, to be closed before it."""

    def check(self) -> None:
        """Raise if nothing would ever run what is asked for."""
        if self._closed:
            raise ClosedError("this database is closed", hint="Open another one")
        if self.runtime.process_id() != self._process_id:
            raise ClosedError(
                f"this asyncio handle belongs to process {self._process_id}",
                kind=Kind.FORKED,
                hint="Threads do not survive a fork: open the database again in this process",
            )

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        self.check()
        return self._pool.submit(copy_context().run, call)

    async def close(self) -> None:
        """Wait for what runs; refuse the rest."""
        if not self._closed:
            self.check()
            self._closed = True
            await asyncio.to_thread(self._pool.close)


async def answer_of(future: "Future[T]", *, keep: bool = False) -> T:
    """Wait in the loop for what a thread will answer.

    A waiter that is cancelled takes the call back if it has not begun, unless it is to be kept.
    """
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not waiter.done():
            waiter.set_result(None)

    def tell(_: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(wake)

    future.add_done_callback(tell)
    try:
        await waiter
    except asyncio.CancelledError:
        if not keep:
            future.cancel()
        raise
    try:
        return future.result()
    except CancelledError:
        raise ClosedError("closed before this could begin", hint="Open another one") from None


class Lane:
    """Runs calls one after the other, in the order asked, in at most one thread at a time.

    A call that returns a future is over when it returns: its answer is that of the future.
    """

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._lock = leaf_lock()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._running = False

    def submit(self, call: Callable[[], Any]) -> "Future[Any]":
        """Queue a call. It cannot be taken back: a waiter that is cancelled stops waiting."""
        self._threads.check()
        answer: Future[Any] = self._threads.runtime.future()
        answer.set_running_or_notify_cancel()
        with self._lock:
            self._calls.append((call, answer))
            starts = not self._running
            self._running = True
        if starts:
            self._threads.submit(self._drain).add_done_callback(self._drop_if_cancelled)
        return answer

    def _drain(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._running = False
                    return
                call, answer = self._calls.popleft()
            _settle(call, answer)

    def _drop_if_cancelled(self, drain: "Future[None]") -> None:
        """Tell everyone who waits, if the pool was closed before a thread was free."""
        if drain.cancelled():
            with self._lock:
                dropped, self._running = list(self._calls), False
                self._calls.clear()
            for _, answer in dropped:
                answer.set_exception(ClosedError("closed before this could begin"))


def _settle(call: Callable[[], Any], answer: "Future[Any]") -> None:
    try:
        result = call()
    except BaseException as error:  # whatever it is, somebody waits for it
        answer.set_exception(error)
        return
    if isinstance(result, Future):
        result.add_done_callback(lambda done: _pass_on(done, answer))
    else:
        answer.set_result(result)


def _pass_on(done: "Future[Any]", answer: "Future[Any]") -> None:
    error = done.exception()
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(done.result())
