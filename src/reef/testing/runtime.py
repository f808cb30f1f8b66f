"""The runtime of a simulated process: virtual time, seeded randomness, fibers for threads.

Each process has its own clocks. The wall clock may be skewed; while the machine is suspended the
monotonic clock stops and the boot-time clock continues (H62).

Locks, conditions, pools and gathers keep the rules of `reef.runtime.REAL`; the tests run the same
programs on both. Acquiring a lock twice, which would hang there, is an error here.

**Scheduling** is cooperative, on virtual time. A fiber is ordinary synchronous code on a greenlet.
It runs until it calls into the simulated world, which yields to the scheduler; the scheduler asks
its `Choices` which fiber runs next. When none can run, time advances to the next alarm; all fibers
whose alarms are due at that time become ready, and their order is a choice again.

Fibers belong to processes. When a process crashes, its fibers are never resumed, so that no
cleanup code takes effect. A frozen process keeps its fibers, and none of them runs until it thaws.

Every decision comes from one `Choices`: `SeededChoices` gives one random history per seed,
`ScriptedChoices` replays an exact one, and `reef.testing.explore` enumerates the scripts.
"""

import heapq
import random  # noqa: TID251 - a seeded generator is the point here
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future  # noqa: TID251 - subclassed to wait in virtual time
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, ParamSpec, TypeVar

import greenlet

from reef.runtime import GATHER_WORKERS_MAX, REAL, ConditionVariable, Lock, Pool, Runtime, Task

START_S = 1_800_000_000.0
THAW = -1
"""In place of the number of a wait: the fiber was ready when its process was frozen."""


# --- choices ------------------------------------------------------------------------


class Choices(ABC):
    """The decisions of a simulation."""

    @abstractmethod
    def pick(self, count: int) -> int:
        """Return one of 0 … count − 1."""

    @abstractmethod
    def chance(self, probability: float) -> bool:
        """Return True with this probability."""

    @abstractmethod
    def uniform(self, low: float, high: float) -> float: ...

    @abstractmethod
    def random_bytes(self, count: int) -> bytes: ...


class SeededChoices(Choices):
    """One random history per seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def pick(self, count: int) -> int:
        return self._random.randrange(count)

    def chance(self, probability: float) -> bool:
        return probability > 0.0 and self._random.random() < probability

    def uniform(self, low: float, high: float) -> float:
        return self._random.uniform(low, high)

    def random_bytes(self, count: int) -> bytes:
        return self._random.randbytes(count)


class ScriptedChoices(Choices):
    """Follows a script of decisions; behind its end, takes the first option each time.

    `taken` and `widths` record the decisions and how many options each had, so that the next
    script can be derived. Durations never vary: only orders are explored.
    """

    def __init__(self, script: Sequence[int] = ()) -> None:
        self._script = script
        self.taken: list[int] = []
        self.widths: list[int] = []
        self._drawn = 0

    def pick(self, count: int) -> int:
        place = len(self.taken)
        option = self._script[place] if place < len(self._script) else 0
        if not 0 <= option < count:
            raise ValueError(f"decision {place} is {option}, but there are {count} options")
        self.taken.append(option)
        self.widths.append(count)
        return option

    def chance(self, probability: float) -> bool:
        if probability <= 0.0:
            return False
        return self.pick(2) == 1

    def uniform(self, low: float, high: float) -> float:
        return low

    def random_bytes(self, count: int) -> bytes:
        self._drawn += 1
        return self._drawn.to_bytes(count, "big")


# --- fibers -------------------------------------------------------------------------


class ProcessDied(BaseException):
    """Raised in the code of a crashed process while it is unwound; live code never sees it."""


class Deadlock(AssertionError):
    """All fibers wait for each other."""


class TooManySteps(AssertionError):
    """The simulation did not end within its bound."""


@dataclass(eq=False)
class Owner:
    """The process of a fiber, which can crash or be frozen."""

    name: str
    dead: bool = False
    frozen_until_s: float = 0.0


@dataclass(eq=False, slots=True)
class Fiber:
    """One thread of control."""

    name: str
    owner: Owner
    daemon: bool = False
    """Whether a run may end before it does."""
    body: Any = None
    """Its greenlet."""
    finished: bool = False
    error: BaseException | None = None
    waits: int = 0
    """Number of its current wait; a wake-up of an earlier one is ignored."""
    timed_out: bool = False
    joiners: "list[WaitTicket]" = field(default_factory=list)


class WaitTicket(NamedTuple):
    """One wait of a fiber; its wake-up names it, so that it cannot end a later wait."""

    fiber: Fiber
    wait: int


class Scheduler:
    """Runs fibers one at a time, in an order that `choices` decides."""

    def __init__(self, choices: Choices, steps_max: int = 1_000_000) -> None:
        self.choices = choices
        self.now_s = START_S
        self.steps = 0
        self.steps_max = steps_max
        self.current: Fiber | None = None
        self._hub = greenlet.getcurrent()
        self._chosen: Fiber | None = None
        """The fiber that the hub starts next."""
        self._ready: list[Fiber] = []
        self._alarms: list[tuple[float, int, WaitTicket]] = []
        self._serial = count()
        self._all: list[Fiber] = []
        self._awaited = 0
        """Fibers that a run waits for: neither daemons nor dead."""
        self._until_s: float | None = None
        self._is_running = False
        self._closing = False

    # --- called from outside ------------------------------------------------------
    def spawn(
        self, owner: Owner, call: Callable[[], object], name: str, *, daemon: bool = False
    ) -> Fiber:
        """Start a fiber; in a dead process, one that never runs."""
        fiber = Fiber(name, owner, daemon)
        if not owner.dead:
            # The hub is every fiber's parent: control returns there when one ends.
            fiber.body = greenlet.greenlet(lambda: self._run_fiber(fiber, call), self._hub)
            self._all.append(fiber)
            self._make_ready(fiber)
            self._awaited += not daemon
        return fiber

    def run(self, until_s: float | None = None) -> None:
        """Run until only daemons are left, or until virtual time has passed `until_s`."""
        self._hub = greenlet.getcurrent()
        self._until_s, self._is_running = until_s, True
        try:
            while (fiber := self._chosen or self._next()) is not None:
                self.current, self._chosen = fiber, None
                fiber.body.switch()
                last, self.current = self.current, None  # fibers switch to each other, too
                if last.error is not None:
                    raise last.error
        finally:
            self._is_running = False

    def close(self) -> None:
        """Unwind all fibers that have not ended, without any effect."""
        self._closing = True
        for fiber in self._all:
            if not fiber.body.dead and fiber.body:
                fiber.body.throw(greenlet.GreenletExit)
        self._all.clear()

    # --- called from fibers -------------------------------------------------------
    def running(self) -> Fiber | None:
        """Return the fiber that is calling; None outside of the simulation."""
        fiber = self.current
        if self._closing or (fiber is not None and fiber.owner.dead):
            raise ProcessDied
        if fiber is not None and greenlet.getcurrent() is not fiber.body:
            raise RuntimeError("a simulated call from outside the scheduler's fibers")
        return fiber

    def pause(self) -> None:
        """Let other fibers run first."""
        fiber = self.running()
        if fiber is not None:
            self.pause_running(fiber)

    def pause_running(self, fiber: Fiber) -> None:
        """Let other fibers run first; `fiber` is the one that `running` has returned."""
        if (
            not self._ready  # no other fiber can run: continue without a switch
            and self._is_running
            and (self._awaited or self._until_s is not None)
            and self.steps < self.steps_max
            and fiber.owner.frozen_until_s <= self.now_s
        ):
            self.steps += 1
            return
        self._make_ready(fiber)
        self._switch_out(fiber)

    def ticket(self) -> WaitTicket:
        """Return the ticket of the wait that the caller is about to begin."""
        fiber = self.running()
        if fiber is None:
            raise RuntimeError("only simulated code can wait in simulated time")
        return WaitTicket(fiber, fiber.waits)

    def park(self, timeout_s: float | None = None) -> bool:
        """Wait for `wake`; return False if the timeout came first."""
        ticket = self.ticket()
        if timeout_s is not None:
            self._set_alarm(ticket, timeout_s)
        self._switch_out(ticket.fiber)
        return not ticket.fiber.timed_out

    def wake(self, ticket: WaitTicket, *, timed_out: bool = False) -> bool:
        """End a wait; return False if it is over already, or its process is dead."""
        fiber, wait = ticket
        if fiber.waits != wait or fiber.finished or fiber.owner.dead:
            return False
        fiber.waits += 1
        fiber.timed_out = timed_out
        self._make_ready(fiber)
        return True

    def join(self, fiber: Fiber, timeout_s: float | None = None) -> bool:
        """Wait for a fiber's end; return False if the timeout came first."""
        waiting = self.running()
        if waiting is None or fiber.finished or fiber.owner.dead:
            return fiber.finished
        if waiting is fiber:
            raise RuntimeError(f"{fiber.name} waits for its own end")
        ticket = self.ticket()
        fiber.joiners.append(ticket)
        self.park(timeout_s)
        fiber.joiners.remove(ticket)
        return fiber.finished

    def kill(self, owner: Owner) -> None:
        """Crash a process; does not return if it is the caller's own."""
        if not owner.dead:
            owner.dead = True
            self._ready = [fiber for fiber in self._ready if fiber.owner is not owner]
            left = [f for f in self._all if f.owner is owner and not f.finished]
            self._awaited -= sum(not fiber.daemon for fiber in left)
        if self.current is not None and self.current.owner is owner:
            self._switch_out(self.current)

    def freeze(self, owner: Owner, until_s: float) -> None:
        """Stop a process until then; returns after the thaw if it is the caller's own."""
        owner.frozen_until_s = max(owner.frozen_until_s, until_s)
        ready, self._ready = self._ready, []
        for fiber in ready:
            self._make_ready(fiber)
        if self.current is not None and self.current.owner is owner:
            self.pause()

    def thaw(self, owner: Owner) -> None:
        """Resume a frozen process before its time."""
        owner.frozen_until_s = self.now_s
        frozen = [alarm for alarm in self._alarms if self._is_thaw_of(alarm[2], owner)]
        if frozen and not owner.dead:
            self._ready += [ticket.fiber for _, _, ticket in sorted(frozen, key=lambda a: a[1])]
        self._alarms = [a for a in self._alarms if not self._is_thaw_of(a[2], owner)]
        heapq.heapify(self._alarms)

    # --- inside -------------------------------------------------------------------
    @staticmethod
    def _is_thaw_of(ticket: WaitTicket, owner: Owner) -> bool:
        return ticket.wait == THAW and ticket.fiber.owner is owner

    def _run_fiber(self, fiber: Fiber, call: Callable[[], object]) -> None:
        try:
            call()
        except (ProcessDied, greenlet.GreenletExit):
            pass
        except BaseException as error:
            fiber.error = error  # raised by the hub: an uncaught error fails the run
        finally:
            fiber.finished = True
            self._awaited -= not (fiber.daemon or fiber.owner.dead)
        for joiner in fiber.joiners:
            self.wake(joiner)

    def _make_ready(self, fiber: Fiber) -> None:
        """Let a fiber run, once its process is not frozen any more."""
        thaw_s = fiber.owner.frozen_until_s
        if thaw_s > self.now_s:
            self._push_alarm(thaw_s, WaitTicket(fiber, THAW))
        else:
            self._ready.append(fiber)

    def _next(self) -> Fiber | None:
        """Take the fiber that runs next from those that are ready; None at the end of the run."""
        if not self._awaited and self._until_s is None:
            return None
        while not self._ready:
            if not self._advance():
                return None
        if self.steps > self.steps_max:
            raise TooManySteps(f"not at an end after {self.steps_max} steps")
        self.steps += 1
        ready = self._ready
        return ready.pop(self.choices.pick(len(ready))) if len(ready) > 1 else ready.pop()

    def _advance(self) -> bool:
        """Advance to the time of the next alarm; return False at the end of the run."""
        alarms = self._alarms
        if not alarms:
            self._check_deadlock()
            return False
        when_s = alarms[0][0]
        if self._until_s is not None and when_s > self._until_s:
            self.now_s = self._until_s
            return False
        # All alarms of this time ring before any fiber runs: their order is a choice.
        while alarms and alarms[0][0] == when_s:
            self._ring(heapq.heappop(alarms)[2], when_s)
        return True

    def _ring(self, ticket: WaitTicket, when_s: float) -> None:
        """End a wait at its timeout, or resume a thawed fiber; do nothing if the wait is over."""
        fiber = ticket.fiber
        if fiber.owner.dead or fiber.finished or ticket.wait not in (THAW, fiber.waits):
            return
        self.now_s = when_s
        if ticket.wait == THAW:
            self._make_ready(fiber)
        else:
            self.wake(ticket, timed_out=True)

    def _check_deadlock(self) -> None:
        if self._awaited:
            left = [f for f in self._all if not (f.finished or f.owner.dead or f.daemon)]
            names = ", ".join(fiber.name for fiber in left)
            raise Deadlock(f"all wait for each other: {names}")

    def _set_alarm(self, ticket: WaitTicket, timeout_s: float) -> None:
        when_s = self.now_s + timeout_s
        if when_s > self.now_s:
            self._push_alarm(when_s, ticket)
        else:  # due now: other fibers need not block first
            self.wake(ticket, timed_out=True)

    def _push_alarm(self, when_s: float, ticket: WaitTicket) -> None:
        heapq.heappush(self._alarms, (when_s, next(self._serial), ticket))

    def _switch_out(self, fiber: Fiber) -> None:
        """Run other fibers until this one is chosen again.

        Switches to the next fiber directly, without a detour over the hub, except at the end of the
        run and on an error. A new fiber is started by the hub: a greenlet inherits the recursion
        depth of the one that starts it.
        """
        following = None
        if self._is_running:
            try:
                following = self._next()
            except Exception:  # it recurs in the hub, which raises it
                following = None
        if following is None:
            self._hub.switch()
        elif not following.body:
            self._chosen = following
            self._hub.switch()
        elif following is not fiber:
            self.current = following
            following.body.switch()
        if fiber.owner.dead or self._closing:
            raise ProcessDied


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
