"""One baton, many strands, virtual time.

A strand is ordinary synchronous code on a greenlet. It runs until it calls into the
simulated world, where it hands the baton back; the scheduler asks its `Choices` who goes
next. When nobody can run, time jumps to the next moment at which somebody can; all whose
alarms are set for that same moment are then ready, in whatever order is chosen.

Strands belong to processes. A process that dies takes its strands with it: they are never
resumed, so nothing that they would have done "in the end" happens, as in a real crash. A
process that is frozen keeps its strands, and none of them runs until the thaw.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import greenlet

from reef.testing.choices import Choices

__all__ = ["Deadlock", "Owner", "ProcessDied", "Scheduler", "Strand", "Ticket", "TooManySteps"]

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
    daemon: bool = False
    """Whether a run may end without it."""
    body: Any = None
    """Its greenlet."""
    finished: bool = False
    error: BaseException | None = None
    parked: int = 0
    """Which wait it is in; a wake-up meant for an earlier wait is ignored."""
    timed_out: bool = False
    joiners: "list[Ticket]" = field(default_factory=list)


class Ticket(NamedTuple):
    """One wait of one strand: what a wake-up must name, so that it cannot hit a later one."""

    strand: Strand
    parked: int


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
        self._alarms: list[tuple[float, int, Ticket]] = []
        self._serial = count()
        self._all: list[Strand] = []
        self._awaited = 0
        """How many strands a run must still see through: neither daemons nor dead."""
        self._thaw_s = 0.0
        """From when on no process is frozen."""
        self._closing = False

    # --- called from outside ------------------------------------------------------
    def spawn(
        self, owner: Owner, call: Callable[[], object], name: str, *, daemon: bool = False
    ) -> Strand:
        """Start a strand; in a dead process, one that never runs."""
        # The hub is every strand's parent: where control goes when one ends.
        strand = Strand(name, owner, daemon)
        if not owner.dead:
            strand.body = greenlet.greenlet(lambda: self._live(strand, call), self._hub)
            self._all.append(strand)
            self._ready.append(strand)
            self._awaited += not daemon
        return strand

    def run(self, until_s: float | None = None) -> None:
        """Run until only daemons are left, or until virtual time has passed `until_s`."""
        self._hub = greenlet.getcurrent()
        while (self._awaited or until_s is not None) and self._step(until_s):
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
    def running(self) -> Strand | None:
        """Return the strand whose code is calling; None outside of the simulation."""
        strand = self.current
        if self._closing or (strand is not None and strand.owner.dead):
            raise ProcessDied
        if strand is not None and greenlet.getcurrent() is not strand.body:
            raise RuntimeError("a simulated call from outside the scheduler's strands")
        return strand

    def pause(self) -> None:
        """Hand the baton over, ready to go on."""
        strand = self.running()
        if strand is not None:
            self._ready.append(strand)
            self._switch_out(strand)

    def ticket(self) -> Ticket:
        """Return what wakes the caller from the wait that it is about to begin."""
        strand = self.running()
        if strand is None:
            raise RuntimeError("only simulated code can wait in simulated time")
        return Ticket(strand, strand.parked)

    def park(self, timeout_s: float | None = None) -> bool:
        """Wait for `wake`, or for the timeout: False if that came first."""
        ticket = self.ticket()
        if timeout_s is not None:
            self._set_alarm(ticket, timeout_s)
        self._switch_out(ticket.strand)
        return not ticket.strand.timed_out

    def wake(self, ticket: Ticket, *, timed_out: bool = False) -> bool:
        """End a wait; False if it is over already, or its process is dead."""
        strand, parked = ticket
        if strand.parked != parked or strand.finished or strand.owner.dead:
            return False
        strand.parked += 1
        strand.timed_out = timed_out
        self._ready.append(strand)
        return True

    def join(self, strand: Strand, timeout_s: float | None = None) -> bool:
        """Wait for a strand's end; False if the timeout came first."""
        waiting = self.running()
        if waiting is None or strand.finished or strand.owner.dead:
            return strand.finished
        if waiting is strand:
            raise RuntimeError(f"{strand.name} waits for its own end")
        ticket = self.ticket()
        strand.joiners.append(ticket)
        self.park(timeout_s)
        strand.joiners.remove(ticket)
        return strand.finished

    def kill(self, owner: Owner) -> None:
        """End a process here and now; does not return if it is the caller's own."""
        if not owner.dead:
            owner.dead = True
            self._ready = [strand for strand in self._ready if strand.owner is not owner]
            left = [s for s in self._all if s.owner is owner and not s.finished]
            self._awaited -= sum(not strand.daemon for strand in left)
        if self.current is not None and self.current.owner is owner:
            self._switch_out(self.current)

    def freeze(self, owner: Owner, until_s: float) -> None:
        """Stop a process until then; returns after the thaw if it is the caller's own."""
        owner.frozen_until_s = max(owner.frozen_until_s, until_s)
        self._thaw_s = max(self._thaw_s, until_s)
        if self.current is not None and self.current.owner is owner:
            self.pause()

    def thaw(self, owner: Owner) -> None:
        """Let a frozen process continue before its time."""
        owner.frozen_until_s = self.now_s
        held = [alarm for alarm in self._alarms if self._is_thaw_of(alarm[2], owner)]
        if held and not owner.dead:
            self._ready += [ticket.strand for _, _, ticket in sorted(held, key=lambda a: a[1])]
        self._alarms = [a for a in self._alarms if not self._is_thaw_of(a[2], owner)]
        heapq.heapify(self._alarms)

    # --- inside -------------------------------------------------------------------
    @staticmethod
    def _is_thaw_of(ticket: Ticket, owner: Owner) -> bool:
        return ticket.parked == THAW and ticket.strand.owner is owner

    def _live(self, strand: Strand, call: Callable[[], object]) -> None:
        try:
            call()
        except (ProcessDied, greenlet.GreenletExit):
            pass
        except BaseException as error:
            strand.error = error  # raised by the hub: an error that nobody caught fails the run
        finally:
            strand.finished = True
            self._awaited -= not (strand.daemon or strand.owner.dead)
        for joiner in strand.joiners:
            self.wake(joiner)

    def _step(self, until_s: float | None) -> bool:
        self._set_aside_frozen()
        while not self._ready:
            if not self._advance(until_s):
                return False
            self._set_aside_frozen()
        strand = self._next()
        if strand is None:
            return True
        self.current = strand
        strand.body.switch()
        self.current = None
        if strand.error is not None:
            raise strand.error
        return True

    def _next(self) -> Strand | None:
        """Take the strand that goes on from those that can; None if it died instead."""
        place = self.choices.pick(len(self._ready)) if len(self._ready) > 1 else 0
        return self._ready.pop(place)

    def _set_aside_frozen(self) -> None:
        """Keep the strands of processes that stand still from being picked."""
        if self.now_s >= self._thaw_s:
            return
        ready, self._ready = self._ready, []
        for strand in ready:
            thaw_s = strand.owner.frozen_until_s
            if thaw_s > self.now_s:
                self._push_alarm(thaw_s, Ticket(strand, THAW))
            else:
                self._ready.append(strand)

    def _advance(self, until_s: float | None) -> bool:
        """Jump to the next moment for which an alarm is set; False at the end of the run."""
        if not self._alarms:
            self._check_nobody_waits()
            return False
        when_s = self._alarms[0][0]
        if until_s is not None and when_s > until_s:
            self.now_s = until_s
            return False
        # All alarms of this moment ring before anybody runs: their order is a choice.
        while self._alarms and self._alarms[0][0] == when_s:
            if self._ring(heapq.heappop(self._alarms)[2]):
                self.now_s = when_s
        return True

    def _ring(self, ticket: Ticket) -> bool:
        """Return whether anybody still waited for this alarm."""
        strand = ticket.strand
        if ticket.parked != THAW:
            return self.wake(ticket, timed_out=True)
        if not strand.owner.dead:
            self._ready.append(strand)
        return not strand.owner.dead

    def _check_nobody_waits(self) -> None:
        if self._awaited:
            left = [s for s in self._all if not (s.finished or s.owner.dead or s.daemon)]
            names = ", ".join(strand.name for strand in left)
            raise Deadlock(f"all wait for each other: {names}")

    def _set_alarm(self, ticket: Ticket, timeout_s: float) -> None:
        when_s = self.now_s + timeout_s
        if when_s > self.now_s:
            self._push_alarm(when_s, ticket)
        else:  # it is that late already: no reason to let the others run dry first
            self.wake(ticket, timed_out=True)

    def _push_alarm(self, when_s: float, ticket: Ticket) -> None:
        heapq.heappush(self._alarms, (when_s, next(self._serial), ticket))

    def _switch_out(self, strand: Strand) -> None:
        self._hub.switch()
        if strand.owner.dead or self._closing:
            raise ProcessDied
