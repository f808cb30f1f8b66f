"""The runtime of a simulated process: virtual time, seeded chance, strands for threads.

Each process has its own clocks. The wall clock may be skewed; while the process is
suspended the monotonic clock stands still and the boot-time clock goes on, as on a
machine whose lid was closed (H62).

Locks, conditions, pools and gathers keep the rules of `reef.runtime.REAL`; the tests run
the same programs on both. What would hang there, such as taking a lock twice, is an error
here.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future  # noqa: TID251 - subclassed to wait in virtual time
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import greenlet

from reef.runtime import GATHER_WORKERS_MAX, Condition, Lock, Pool, Runtime
from reef.testing.scheduler import Owner, ProcessDied, Scheduler, Strand, Ticket

__all__ = ["SimulatedRuntime"]

P = ParamSpec("P")
T = TypeVar("T")
Seam = Callable[[str, str], None]


class SimulatedRuntime(Runtime):
    """What a simulated process may ask of its simulated machine."""

    def __init__(
        self, scheduler: Scheduler, owner: Owner, number: int, seam: Seam, skew_s: float = 0.0
    ) -> None:
        self._scheduler = scheduler
        self._owner = owner
        self._number = number
        self._seam = seam
        self._boot_s = scheduler.now_s
        self.skew_s = skew_s
        self.suspended_s = 0.0
        self._gather_pool = _Pool(self, GATHER_WORKERS_MAX, "gather")
        self._gathering: set[Strand] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a simulated process cannot be sent to a real one")

    def wall_s(self) -> float:
        self._seam("clock", "wall")
        return self._scheduler.now_s + self.skew_s

    def monotonic_s(self) -> float:
        self._seam("clock", "monotonic")
        return self._scheduler.now_s - self._boot_s - self.suspended_s

    def boottime_s(self) -> float:
        self._seam("clock", "boottime")
        return self._scheduler.now_s - self._boot_s

    def sleep(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError("sleep length must be non-negative")
        self._seam("wait", "sleep")
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
        self._seam("point", point)

    def lock(self) -> Lock:
        return _Lock(self._scheduler, self._seam)

    def condition(self) -> Condition:
        return _Condition(self._scheduler, self._seam)

    def spawn(self, call: Callable[[], object], *, name: str) -> "_Task":
        """Start a daemon: a run does not wait for it."""
        full_name = f"{self._owner.name}/{name}"
        strand = self._scheduler.spawn(self._owner, call, full_name, daemon=True)
        return _Task(self._scheduler, strand)

    def pool(self, workers: int, *, name: str) -> Pool:
        return _Pool(self, workers, name)

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
        """Run one call, marked: a gather inside a gather runs in place, as in `REAL`."""
        me = self._scheduler.ticket().strand
        self._gathering.add(me)
        try:
            return call()
        finally:
            self._gathering.remove(me)


def fulfil(future: Future[T], call: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except (ProcessDied, greenlet.GreenletExit):
        raise
    except BaseException as error:  # as a real pool does: it is the waiting caller's to see
        future.set_exception(error)


class _Task:
    def __init__(self, scheduler: Scheduler, strand: Strand) -> None:
        self._scheduler, self._strand = scheduler, strand

    @property
    def finished(self) -> bool:
        return self._strand.finished

    def join(self, timeout_s: float | None = None) -> bool:
        return self._scheduler.join(self._strand, timeout_s)


class _Lock:
    """Handed from strand to strand; who waits is asked of the choices like all else."""

    def __init__(self, scheduler: Scheduler, seam: Seam) -> None:
        self._scheduler, self._seam = scheduler, seam
        self._holder: Strand | None = None
        self._waiting: list[Ticket] = []

    def __enter__(self) -> bool:
        self._seam("lock", "acquire")
        self._acquire()
        return True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._release()

    def _acquire(self) -> None:
        me = self._scheduler.current or _OUTSIDE
        if self._holder is me:
            raise RuntimeError(f"{me.name} takes a lock that it holds")
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


_OUTSIDE = Strand("outside", Owner("outside"))


class _Condition(_Lock):
    def __init__(self, scheduler: Scheduler, seam: Seam) -> None:
        super().__init__(scheduler, seam)
        self._sleepers: list[Ticket] = []

    def wait(self, timeout: float | None = None) -> bool:
        self._check_held("wait()")
        self._seam("wait", "condition")
        ticket = self._scheduler.ticket()
        self._sleepers.append(ticket)
        self._release()
        notified = self._scheduler.park(timeout)
        if ticket in self._sleepers:
            self._sleepers.remove(ticket)
        self._acquire()
        return notified

    def notify(self, n: int = 1) -> None:
        """Wake up to `n` that still wait: one that has timed out takes no notice away."""
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


class _Pool:
    """At most `workers` strands at a time, started as work comes."""

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
        """Cancel what has not begun, and wait for what has."""
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
