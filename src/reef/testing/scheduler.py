"""One baton, many strands, virtual time.

A strand is ordinary synchronous code on a greenlet. It runs until it calls into the
simulated world, where it hands the baton back; the scheduler asks its `Choices` who goes
next. When nobody can run, time jumps to the next moment at which somebody can.

Strands belong to processes. A process that dies takes its strands with it: they are never
resumed, so nothing that they would have done "in the end" happens, as in a real crash.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NoReturn

import greenlet

from reef.testing.choices import Choices

__all__ = ["Deadlock", "Owner", "ProcessDied", "Scheduler", "Strand", "TooManySteps"]

START_S = 1_800_000_000.0
THAW = -1
"""In place of a wait's number: the strand was ready when its process was frozen."""


class ProcessDied(BaseException):
    """Raised in a dead process's code while it is cleared away; never seen by a live one."""


class Deadlock(AssertionError):
    """Everybody waits for somebody."""


class TooManySteps(AssertionError):
    """The simulation did not come to an end within its bound."""


@dataclass(eq=False)
class Owner:
    """What a strand belongs to: a process that can die or be frozen."""

    name: str
    dead: bool = False
    frozen_until_s: float = 0.0


@dataclass(eq=False)
class Strand:
    """One thread of control."""

    name: str
    owner: Owner
    body: Any = None
    """Its greenlet."""
    finished: bool = False
    error: BaseException | None = None
    parked: int = 0
    """Which wait it is in; a wake-up meant for an earlier wait is ignored."""
    timed_out: bool = False
    joiners: "list[Strand]" = field(default_factory=list)


class Scheduler:
    """Runs strands one at a time, in an order that `choices` decides."""

    def __init__(self, choices: Choices, steps_max: int = 1_000_000) -> None:
        self.choices = choices
        self.now_s = START_S
        self.steps = 0
        self.steps_max = steps_max
        self.current: Strand | None = None
        self._hub = greenlet.getcurrent()
        self._ready: list[Strand] = []
        self._alarms: list[tuple[float, int, Strand, int]] = []
        self._serial = count()
        self._all: list[Strand] = []
        self._closing = False

    # --- called from outside ------------------------------------------------------
    def spawn(self, owner: Owner, call: Callable[[], object], name: str) -> Strand:
        # The hub is every strand's parent: where control goes when one ends.
        strand = Strand(name, owner)
        strand.body = greenlet.greenlet(lambda: self._live(strand, call), self._hub)
        self._all.append(strand)
        self._ready.append(strand)
        return strand

    def run(self, until_s: float | None = None) -> None:
        """Run until all strands have ended, or virtual time has passed `until_s`."""
        self._hub = greenlet.getcurrent()
        while self._step(until_s):
            self.steps += 1
            if self.steps > self.steps_max:
                raise TooManySteps(f"not at an end after {self.steps_max} steps")

    def close(self) -> None:
        """Clear away what is left; the code of dead processes unwinds without effect."""
        self._closing = True
        for strand in self._all:
            if not strand.body.dead and strand.body:
                strand.body.throw(greenlet.GreenletExit)
        self._all.clear()

    # --- called from strands ------------------------------------------------------
    def pause(self) -> None:
        """Hand the baton over, ready to go on."""
        strand = self._running()
        if strand is not None:
            self._ready.append(strand)
            self._switch_out(strand)

    def park(self, timeout_s: float | None = None) -> bool:
        """Wait for `wake`, or for the timeout: False if that came first."""
        strand = self._running()
        if strand is None:
            raise RuntimeError("only simulated code can wait in simulated time")
        if timeout_s is not None:
            self._set_alarm(strand, self.now_s + max(0.0, timeout_s))
        self._switch_out(strand)
        return not strand.timed_out

    def wake(self, strand: Strand, timed_out: bool = False) -> None:
        strand.parked += 1
        strand.timed_out = timed_out
        if strand not in self._ready and not strand.finished:
            self._ready.append(strand)

    def join(self, strand: Strand, timeout_s: float | None = None) -> bool:
        waiting = self._running()
        if waiting is None or strand.finished or strand.owner.dead:
            return strand.finished
        strand.joiners.append(waiting)
        self.park(timeout_s)
        return strand.finished

    def kill(self, owner: Owner) -> None:
        """End a process here and now; does not return if it is the caller's own."""
        owner.dead = True
        self._ready = [strand for strand in self._ready if strand.owner is not owner]
        if self.current is not None and self.current.owner is owner:
            self._switch_out(self.current)

    # --- inside -------------------------------------------------------------------
    def _live(self, strand: Strand, call: Callable[[], object]) -> None:
        try:
            call()
        except ProcessDied:
            pass
        except Exception as error:
            strand.error = error
        finally:
            strand.finished = True
        for joiner in strand.joiners:
            self.wake(joiner)

    def _step(self, until_s: float | None) -> bool:
        self._freeze()
        if not self._ready and not self._advance(until_s):
            return False
        if not self._ready:
            return True
        place = self.choices.pick(len(self._ready)) if len(self._ready) > 1 else 0
        strand = self._ready.pop(place)
        self.current = strand
        strand.body.switch()
        self.current = None
        if strand.error is not None:
            raise strand.error
        return True

    def _freeze(self) -> None:
        """Set aside the strands of processes that stand still."""
        frozen = [strand for strand in self._ready if strand.owner.frozen_until_s > self.now_s]
        for strand in frozen:
            self._ready.remove(strand)
            thaw_s = strand.owner.frozen_until_s
            heapq.heappush(self._alarms, (thaw_s, next(self._serial), strand, THAW))

    def _advance(self, until_s: float | None) -> bool:
        """Jump to the next alarm; False at the end of the simulation."""
        while self._alarms:
            when_s, _, strand, parked = self._alarms[0]
            if until_s is not None and when_s > until_s:
                self.now_s = until_s
                return False
            heapq.heappop(self._alarms)
            if strand.owner.dead or strand.finished:
                continue
            if parked == THAW:
                self._ready.append(strand)
            elif parked == strand.parked:
                self.wake(strand, timed_out=True)
            else:
                continue
            self.now_s = max(self.now_s, when_s)
            return True
        waiting = [s.name for s in self._all if not s.finished and not s.owner.dead]
        if waiting:
            raise Deadlock(f"all wait for each other: {', '.join(waiting)}")
        return False

    def _set_alarm(self, strand: Strand, when_s: float) -> None:
        heapq.heappush(self._alarms, (when_s, next(self._serial), strand, strand.parked))

    def _running(self) -> Strand | None:
        """The strand whose code is calling; None outside of the simulation."""
        if self._closing:
            raise ProcessDied
        if self.current is not None and greenlet.getcurrent() is not self.current.body:
            raise RuntimeError("a simulated call from outside the scheduler's strands")
        return self.current

    def _switch_out(self, strand: Strand) -> None:
        self._hub.switch()
        if strand.owner.dead or self._closing:
            self._unwind()

    def _unwind(self) -> NoReturn:
        raise ProcessDied
