"""The runtime of a simulated process: virtual time, seeded randomness, fibers for threads.

Each process has its own clocks. The wall clock may be skewed; while the machine is suspended the
monotonic clock stops and the boot-time clock continues (H62).

Locks, conditions, pools and gathers keep the rules of `reef.runtime.REAL`; the tests run the same
programs on both. Acquiring a lock twice, which would hang there, is an error here.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future  # noqa: TID251 - subclassed to wait in virtual time
from typing import Any, ParamSpec, TypeVar

import greenlet

from reef.runtime import GATHER_WORKERS_MAX, REAL, ConditionVariable, Lock, Pool, Runtime, Task
from reef.testing.scheduler import Fiber, Owner, ProcessDied, Scheduler, WaitTicket

P = ParamSpec("P")
T = TypeVar("T")
YieldPoint = Callable[[str, str], None]


class SimulatedRuntime(Runtime):
    """Clocks, randomness, fibers and locks of one simulated process."""

    def __init__(
        self,
        scheduler: Scheduler,
        owner: Owner,
        number: int,
        yield_point: YieldPoint,
        skew_s: float = 0.0,
    ) -> None:
        self._scheduler = scheduler
        self._owner = owner
        self._number = number
        self._yield = yield_point
        self._boot_s = scheduler.now_s
        self.skew_s = skew_s
        self.suspended_s = 0.0
        self._gather_pool = _FiberPool(self, GATHER_WORKERS_MAX, "gather")
        self._gathering: set[Fiber] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a simulated process cannot be sent to a real one")

    def wall_s(self) -> float:
        self._yield("clock", "wall")
        return self._scheduler.now_s + self.skew_s

    def monotonic_s(self) -> float:
        self._yield("clock", "monotonic")
        return self._scheduler.now_s - self._boot_s - self.suspended_s

    def boottime_s(self) -> float:
        self._yield("clock", "boottime")
        return self._scheduler.now_s - self._boot_s

    def sleep(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError("sleep length must be non-negative")
        self._yield("wait", "sleep")
        self._scheduler.park(seconds)

    def uniform(self, low: float, high: float) -> float:
        return self._scheduler.choices.uniform(low, high)

    def random_bytes(self, count: int) -> bytes:
        return self._scheduler.choices.random_bytes(count)

    def process_id(self) -> int:
        return self._number

    def thread_id(self) -> object:
        return greenlet.getcurrent()

    def reach(self, point: str) -> None:
        self._yield("point", point)

    def lock(self) -> Lock:
        return _Lock(self._scheduler, self._yield)

    def condition(self) -> ConditionVariable:
        return _Condition(self._scheduler, self._yield)

    def spawn(self, call: Callable[[], object], *, name: str) -> "_Task":
        """Start a daemon, which a run does not wait for."""
        full_name = f"{self._owner.name}/{name}"
        fiber = self._scheduler.spawn(self._owner, call, full_name, daemon=True)
        return _Task(self._scheduler, fiber)

    def pool(self, workers: int, *, name: str) -> Pool:
        return _FiberPool(self, workers, name)

    def future(self) -> Future[Any]:
        return _Future(self._scheduler)

    def gather(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        me = self._scheduler.current
        if len(calls) <= 1 or me is None or me in self._gathering:
            return [call() for call in calls]
        futures = [self._gather_pool.submit(self._gather_one, call) for call in calls]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def _gather_one(self, call: Callable[[], T]) -> T:
        """Run one call; a gather inside of it runs in place, as in `REAL`."""
        me = self._scheduler.ticket().fiber
        self._gathering.add(me)
        try:
            return call()
        finally:
            self._gathering.remove(me)


def fulfil(future: Future[T], call: Callable[[], T]) -> None:
    """Complete a future with the outcome of a call."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except (ProcessDied, greenlet.GreenletExit):
        raise
    except BaseException as error:  # as in a real pool: raised by `result()`
        future.set_exception(error)


class _Task:
    def __init__(self, scheduler: Scheduler, fiber: Fiber) -> None:
        self._scheduler, self._fiber = scheduler, fiber

    @property
    def finished(self) -> bool:
        return self._fiber.finished

    def join(self, timeout_s: float | None = None) -> bool:
        return self._scheduler.join(self._fiber, timeout_s)


class _Lock:
    """A lock between fibers; the choices decide which of the waiting ones gets it."""

    def __init__(self, scheduler: Scheduler, yield_point: YieldPoint) -> None:
        self._scheduler, self._yield = scheduler, yield_point
        self._holder: Fiber | None = None
        self._waiting: list[WaitTicket] = []

    def __enter__(self) -> bool:
        self._yield("lock", "acquire")
        self._acquire()
        return True

    def __exit__(self, *error: object) -> None:
        self._release()

    def _acquire(self) -> None:
        me = self._scheduler.current or _OUTSIDE
        if self._holder is me:
            raise RuntimeError(f"{me.name} acquires a lock that it holds")
        while self._holder is not None and not self._holder.owner.dead:
            self._waiting.append(self._scheduler.ticket())
            self._scheduler.park()
        self._holder = me

    def _release(self) -> None:
        self._holder = None
        waiting, self._waiting = self._waiting, []
        for ticket in waiting:
            self._scheduler.wake(ticket)

    def _check_held(self, call: str) -> None:
        if self._holder is not (self._scheduler.current or _OUTSIDE):
            raise RuntimeError(f"{call} on a condition that the caller does not hold")


_OUTSIDE = Fiber("outside", Owner("outside"))


class _Condition(_Lock):
    def __init__(self, scheduler: Scheduler, yield_point: YieldPoint) -> None:
        super().__init__(scheduler, yield_point)
        self._sleepers: list[WaitTicket] = []

    @property
    def lock(self) -> Lock:
        return self

    def wait(self, timeout: float | None = None) -> bool:
        self._check_held("wait()")
        self._yield("wait", "condition")
        ticket = self._scheduler.ticket()
        self._sleepers.append(ticket)
        self._release()
        notified = self._scheduler.park(timeout)
        if ticket in self._sleepers:
            self._sleepers.remove(ticket)
        self._acquire()
        return notified

    def notify(self, n: int = 1) -> None:
        """Wake up to `n` fibers that still wait; those that have timed out do not count."""
        self._check_held("notify()")
        while n > 0 and self._sleepers:
            n -= self._scheduler.wake(self._sleepers.pop(0))

    def notify_all(self) -> None:
        self.notify(len(self._sleepers))


class _Future(Future[Any]):
    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler

    def result(self, timeout: float | None = None) -> Any:
        self._wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._wait(timeout)
        return super().exception(0)

    def _wait(self, timeout: float | None) -> None:
        if self._scheduler.running() is None or self.done():
            return
        ticket = self._scheduler.ticket()
        self.add_done_callback(lambda _: self._scheduler.wake(ticket))
        self._scheduler.park(timeout)


class _FiberPool:
    """At most `workers` fibers at a time, started as work is submitted."""

    def __init__(self, runtime: SimulatedRuntime, workers: int, name: str) -> None:
        self._runtime, self._workers, self._name = runtime, workers, name
        self._queue: list[tuple[Future[Any], Callable[[], Any]]] = []
        self._tasks: list[_Task] = []
        self._busy = 0
        self._closed = False

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        if self._closed:
            raise RuntimeError("cannot submit to a pool after its close()")
        future = self._runtime.future()
        self._queue.append((future, lambda: call(*args, **kwargs)))
        if self._busy < self._workers:
            self._start_worker()
        return future

    def close(self) -> None:
        """Cancel calls that have not begun, and wait for the others."""
        self._closed = True
        for future, _ in self._queue:
            future.cancel()
        self._queue.clear()
        for task in self._tasks:
            task.join()

    def _start_worker(self) -> None:
        self._busy += 1
        worker = self._runtime.spawn(self._work, name=f"{self._name}-{self._busy}")
        self._tasks = [*(task for task in self._tasks if not task.finished), worker]

    def _work(self) -> None:
        while self._queue:
            future, call = self._queue.pop(0)
            fulfil(future, call)
        self._busy -= 1


class _Deferred:
    """A task that runs when it is joined."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call: Callable[[], object] | None = call

    def join(self, timeout_s: float | None = None) -> bool:
        call, self._call = self._call, None
        if call is not None:
            call()
        return True


class DeferredRuntime(type(REAL)):  # type: ignore[misc]
    """Runs a spawned task when it is joined: as late as possible, and in order."""

    def spawn(self, call: Callable[[], object], *, name: str) -> Task:
        return _Deferred(call)


def deferred_runtime() -> Runtime:
    """Return a runtime for one history."""
    runtime: Runtime = DeferredRuntime()
    return runtime
