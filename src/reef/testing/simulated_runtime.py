"""The runtime of a simulated process: virtual time, seeded chance, strands for threads.

Each process has its own clocks. The wall clock may be skewed; while the process is
suspended the monotonic clock stands still and the boot-time clock goes on, as on a
machine whose lid was closed (H62).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future  # noqa: TID251 - subclassed to wait in virtual time
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from reef.runtime import Condition, Lock, Pool, Runtime, Task
from reef.testing.scheduler import Owner, Scheduler, Strand

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
        self._seam("wait", "sleep")
        self._scheduler.park(seconds)

    def uniform(self, low: float, high: float) -> float:
        return self._scheduler.choices.uniform(low, high)

    def random_bytes(self, count: int) -> bytes:
        return self._scheduler.choices.random_bytes(count)

    def process_id(self) -> int:
        return self._number

    def reach(self, point: str) -> None:
        self._seam("point", point)

    def lock(self) -> Lock:
        return _Lock(self._scheduler, self._seam)

    def condition(self) -> Condition:
        return _Condition(self._scheduler, self._seam)

    def spawn(self, call: Callable[[], object], *, name: str) -> Task:
        strand = self._scheduler.spawn(self._owner, call, f"{self._owner.name}/{name}")
        return _Task(self._scheduler, strand)

    def pool(self, workers: int, *, name: str) -> Pool:
        return _Pool(self, workers, name)

    def future(self) -> Future[Any]:
        return _Future(self._scheduler)

    def gather(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        if len(calls) <= 1:
            return [call() for call in calls]
        futures = [self.future() for _ in calls]
        for number, (call, future) in enumerate(zip(calls, futures, strict=True)):
            self.spawn(lambda c=call, f=future: _fulfil(f, c), name=f"gather-{number}")  # type: ignore[misc]
        return [future.result() for future in futures]


def _fulfil(future: Future[T], call: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)


class _Task:
    def __init__(self, scheduler: Scheduler, strand: Strand) -> None:
        self._scheduler, self._strand = scheduler, strand

    def join(self, timeout_s: float | None = None) -> bool:
        return self._scheduler.join(self._strand, timeout_s)


class _Lock:
    """Handed from strand to strand; who waits is asked of the choices like all else."""

    def __init__(self, scheduler: Scheduler, seam: Seam) -> None:
        self._scheduler, self._seam = scheduler, seam
        self._holder: Strand | None = None
        self._waiting: list[Strand] = []

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
        me = self._scheduler.current
        if me is not None and self._holder is me:
            raise RuntimeError(f"{me.name} takes a lock that it holds")
        while self._holder is not None and not self._holder.owner.dead:
            assert me is not None, "a lock is held while the simulation is not running"
            self._waiting.append(me)
            self._scheduler.park()
        self._holder = me or _OUTSIDE

    def _release(self) -> None:
        self._holder = None
        waiting, self._waiting = self._waiting, []
        for strand in waiting:
            self._scheduler.wake(strand)


_OUTSIDE = Strand("outside", Owner("outside"))


class _Condition(_Lock):
    def __init__(self, scheduler: Scheduler, seam: Seam) -> None:
        super().__init__(scheduler, seam)
        self._sleepers: list[Strand] = []

    def wait(self, timeout: float | None = None) -> bool:
        me = self._scheduler.current
        if me is None or self._holder is not me:
            raise RuntimeError("wait() on a condition that the caller does not hold")
        self._seam("wait", "condition")
        self._sleepers.append(me)
        self._release()
        notified = self._scheduler.park(timeout)
        if me in self._sleepers:
            self._sleepers.remove(me)
        self._acquire()
        return notified

    def notify(self, n: int = 1) -> None:
        sleepers, self._sleepers = self._sleepers[:n], self._sleepers[n:]
        for strand in sleepers:
            self._scheduler.wake(strand)

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
        me = self._scheduler.current
        if me is None or self.done():
            return
        parked = me.parked
        self.add_done_callback(lambda _: self._scheduler.wake(me) if me.parked == parked else None)
        self._scheduler.park(timeout)


class _Pool:
    """At most `workers` strands at a time, started as work comes."""

    def __init__(self, runtime: SimulatedRuntime, workers: int, name: str) -> None:
        self._runtime, self._workers, self._name = runtime, workers, name
        self._queue: list[tuple[Future[Any], Callable[[], Any]]] = []
        self._busy = 0

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future = self._runtime.future()
        self._queue.append((future, lambda: call(*args, **kwargs)))
        if self._busy < self._workers:
            self._busy += 1
            self._runtime.spawn(self._work, name=f"{self._name}-{self._busy}")
        return future

    def close(self) -> None:
        for future, _ in self._queue:
            future.cancel()
        self._queue.clear()

    def _work(self) -> None:
        while self._queue:
            future, call = self._queue.pop(0)
            _fulfil(future, call)
        self._busy -= 1
