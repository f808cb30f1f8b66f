"""The only source of time, randomness, ids, threads and locks.

All of Reef takes these from a `Runtime`; no other module may import `time`, `random` or
`threading` (the linter checks). `REAL` is this machine. The simulated one, in
`reef.testing.simulation`, runs the same code on virtual time and one seeded scheduler.

Two kinds of lock, on purpose. `Runtime.lock()` may be held over a store call or a wait,
so the simulator must schedule it. `leaf_lock()` guards a few instructions without any
call that could switch threads; it is an ordinary lock everywhere.
"""

import os
import random
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future as Future  # noqa: PLC0414 - others import it from here
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, ParamSpec, Protocol, TypeVar

from reef.errors import ClosedError, ErrorKind, InvalidInputError

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")

GATHER_WORKERS_MAX = 32
CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
CROCKFORD_PAIRS = [first + second for first in CROCKFORD for second in CROCKFORD]
ULID_SHIFTS = range(120, -1, -10)


class Lock(Protocol):
    """Mutual exclusion between the threads of one process; not re-entrant."""

    def __enter__(self) -> Any: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> Any: ...


class ConditionVariable(Lock, Protocol):
    """A lock that its holder can wait on."""

    @property
    def lock(self) -> Lock:
        """The same lock, quicker to enter."""

    def wait(self, timeout: float | None = None, /) -> bool: ...
    def notify(self, n: int = 1, /) -> None: ...
    def notify_all(self) -> None: ...


class Task(Protocol):
    """A thread started by `Runtime.spawn`, or a fiber of the simulator."""

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for its end; False if `timeout_s` passed first."""


class Pool(Protocol):
    """A bounded number of workers."""

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...
    def close(self) -> None: ...


class Executor(Protocol):
    """Runs the tasks of a job: a runtime in threads of this process, `reef.spark` on a cluster.

    A task is a picklable value, and `run` a module-level function.
    """

    def map(self, run: Callable[[A], T], tasks: Sequence[A], /) -> list[T]:
        """Run all tasks; return the results in order, or raise the first error."""


class Runtime(ABC):
    """The clock, randomness and threads of a process."""

    # --- time, in seconds ---------------------------------------------------------
    @abstractmethod
    def wall_s(self) -> float:
        """Return Unix time by this machine's clock."""

    def wall_ns(self) -> int:
        """Return Unix time in nanoseconds, as finely as the machine has it."""
        return int(self.wall_s() * 1e9)

    @abstractmethod
    def monotonic_s(self) -> float:
        """Return a time that never steps back; it may stop while the machine is suspended."""

    @abstractmethod
    def boottime_s(self) -> float:
        """Return a time that never steps back, and includes suspensions where the machine can."""

    @abstractmethod
    def sleep(self, seconds: float) -> None: ...

    # --- chance and ids -----------------------------------------------------------
    @abstractmethod
    def uniform(self, a: float, b: float) -> float:
        """Return a random number between `a` and `b`, for jitter; not for secrets."""

    @abstractmethod
    def random_bytes(self, count: int) -> bytes:
        """Return bytes that no other process will get."""

    def ulid(self) -> str:
        """Return an id of 26 characters, unique, and sorted by time to the millisecond."""
        number = int(self.wall_s() * 1000) & (1 << 48) - 1
        number = number << 80 | int.from_bytes(self.random_bytes(10), "big")
        return "".join([CROCKFORD_PAIRS[number >> shift & 1023] for shift in ULID_SHIFTS])

    @abstractmethod
    def process_id(self) -> int: ...

    @abstractmethod
    def thread_id(self) -> object:
        """Return an id that is unique among the running threads of this process."""

    # --- concurrency --------------------------------------------------------------
    @abstractmethod
    def lock(self) -> Lock: ...

    @abstractmethod
    def condition(self) -> ConditionVariable: ...

    @abstractmethod
    def spawn(self, call: Callable[[], object], *, name: str) -> Task:
        """Run `call` in a new thread. It ends with the process at the latest."""

    @abstractmethod
    def pool(self, workers: int, *, name: str) -> Pool: ...

    @abstractmethod
    def future(self) -> Future[Any]:
        """Return a new future whose `result()` waits in this runtime's own way."""

    @abstractmethod
    def gather(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Run calls, a bounded number at a time; results in order, or the first error."""

    def map(self, call: Callable[[A], T], items: Iterable[A]) -> list[T]:
        """Run `call` with each item, as `gather` does."""
        return self.gather([partial(call, item) for item in items])

    # --- the simulator's hook -----------------------------------------------------
    def aside(self, workers: int) -> "Runtime":
        """Return a runtime that gathers on threads of its own: slow calls delay no others."""
        return self

    def reach(self, point: str) -> None:  # noqa: B027 - a real machine has nothing to do here
        """Pass a named point at which a simulated process may die or stall."""

    def deadline(self, seconds: float) -> "Deadline":
        return Deadline(self, seconds)

    def stopwatch(self) -> "Stopwatch":
        return Stopwatch(self)


class Deadline:
    """A bound on waiting, counted from its making."""

    def __init__(self, runtime: Runtime, seconds: float) -> None:
        self._runtime = runtime
        self.seconds = seconds
        self._end_s = runtime.boottime_s() + seconds

    def remaining_s(self) -> float:
        """Return the seconds left, never below zero."""
        return max(0.0, self._end_s - self._runtime.boottime_s())

    def passed(self) -> bool:
        return self.remaining_s() <= 0.0


class Stopwatch:
    """Measures elapsed time by the clock that shows most, since any of them may stop.

    A suspended machine's monotonic clock does not move, a wall clock may be set back. Ages that
    must not be underestimated are measured by the one that shows the longest time (H62).
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._boottime_s = runtime.boottime_s()
        self._wall_s = runtime.wall_s()

    def elapsed_s(self) -> float:
        boottime_s = self._runtime.boottime_s() - self._boottime_s
        wall_s = self._runtime.wall_s() - self._wall_s
        return wall_s if wall_s > boottime_s else boottime_s


class ProcessBound:
    """A handle that belongs to the process that opened it: a writer, in whatever form.

    A copy in another process, by pickling or by fork, would be a second writer with the
    same epoch, and could not be distinguished (H43). So neither works.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._home_runtime = runtime
        self._home_process = runtime.process_id()

    def _check_process(self) -> None:
        """Raise if this is a forked copy. Called first by every method that writes."""
        if self._home_runtime.process_id() != self._home_process:
            raise ClosedError(
                f"this {type(self).__name__} belongs to process {self._home_process}",
                kind=ErrorKind.FORKED,
                hint="Open another one in this process: it acquires the writer role",
            )

    def __reduce__(self) -> NoReturn:
        raise InvalidInputError(
            f"a {type(self).__name__} cannot be pickled",
            kind=ErrorKind.NOT_PICKLABLE,
            hint="Send the URL, or a reader, and open a writer where it is needed",
        )


# --- the real one -------------------------------------------------------------------

_leaf_locks: "weakref.WeakSet[threading.Lock]" = weakref.WeakSet()


def leaf_lock() -> Lock:
    """Return a lock for a few instructions, usable again in a forked child."""
    lock = threading.Lock()
    _leaf_locks.add(lock)
    return lock


def _free_leaf_locks_in_child() -> None:
    """A lock held by another thread at the fork has no owner in the child."""
    for lock in list(_leaf_locks):
        lock._at_fork_reinit()  # type: ignore[attr-defined]  # CPython's own modules do the same


class _Thread:
    def __init__(self, call: Callable[[], object], name: str) -> None:
        self._thread = threading.Thread(target=call, name=name, daemon=True)
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


class _ThreadPool:
    def __init__(self, workers: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix=name)

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._executor.submit(call, *args, **kwargs)

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)


class _RealCondition(threading.Condition):
    def __init__(self) -> None:
        self.lock = threading.Lock()  # entered in C, while `Condition.__enter__` is Python
        super().__init__(self.lock)


class _RealRuntime(Runtime):
    def __init__(self) -> None:
        self._gather_pool: ThreadPoolExecutor | None = None
        self._gathering = threading.local()
        self._setup = leaf_lock()

    def __reduce__(self) -> str:
        return "REAL"

    def forget_threads(self) -> None:
        """Forget the threads of the parent: only the calling one survives a fork."""
        self._gather_pool = None
        self._gathering = threading.local()

    # The clocks themselves: a commit reads them two dozen times.
    wall_s = staticmethod(time.time)
    wall_ns = staticmethod(time.time_ns)
    monotonic_s = staticmethod(time.monotonic)
    if sys.platform == "linux":
        boottime_s = staticmethod(partial(time.clock_gettime, time.CLOCK_BOOTTIME))
    else:
        boottime_s = staticmethod(time.monotonic)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    # Not the module's generator: its state belongs to the program that uses this library.
    uniform = staticmethod(random.SystemRandom().uniform)

    def random_bytes(self, count: int) -> bytes:
        return os.urandom(count)

    process_id = staticmethod(os.getpid)
    thread_id = staticmethod(threading.get_ident)

    def lock(self) -> Lock:
        return threading.Lock()

    def condition(self) -> ConditionVariable:
        return _RealCondition()

    def spawn(self, call: Callable[[], object], *, name: str) -> Task:
        return _Thread(call, name)

    def pool(self, workers: int, *, name: str) -> Pool:
        return _ThreadPool(workers, name)

    def future(self) -> Future[Any]:
        return Future()

    def gather(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        # A gather inside a gather runs in place: waiting for a full pool from one of
        # its own workers would never end.
        if len(calls) <= 1 or getattr(self._gathering, "inside", False):
            return [call() for call in calls]
        # Each helper counts and logs as part of the operation that it works for.
        futures = [self._shared_pool().submit(copy_context().run, call) for call in calls]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def aside(self, workers: int) -> "Runtime":
        return _AsideRuntime(workers)

    def _shared_pool(self) -> ThreadPoolExecutor:
        with self._setup:
            if self._gather_pool is None:
                self._gather_pool = ThreadPoolExecutor(
                    GATHER_WORKERS_MAX, "reef-io", initializer=self._mark_worker
                )
            return self._gather_pool

    def _mark_worker(self) -> None:
        self._gathering.inside = True


REAL = _RealRuntime()


class _AsideRuntime(_RealRuntime):
    """Gathers on a few threads that are made for it, and that no exit waits for."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        self._workers = workers

    def gather(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        if len(calls) <= 1 or getattr(self._gathering, "inside", False):
            return [call() for call in calls]
        futures: list[Future[T]] = [Future() for _ in calls]
        contexts = [copy_context() for _ in calls]
        todo = iter(zip(calls, contexts, futures, strict=True))
        turn = threading.Lock()

        def work() -> None:
            self._gathering.inside = True
            while True:
                with turn:
                    call, context, future = next(todo, (None, None, None))
                if call is None or context is None or future is None:
                    return
                try:
                    future.set_result(context.run(call))
                except BaseException as error:
                    future.set_exception(error)

        for _ in range(min(self._workers, len(calls))):
            self.spawn(work, name="aside")
        wait(futures)
        return [future.result() for future in futures]


def _after_fork_in_child() -> None:
    _free_leaf_locks_in_child()
    REAL.forget_threads()


os.register_at_fork(after_in_child=_after_fork_in_child)
