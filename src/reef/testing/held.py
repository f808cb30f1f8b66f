"""Requests that arrive after the object of their name was collected.

A slot of the log, or a generation, is filled once by create-only PUT; a sweep deletes it a
grace period after it was folded. A PUT that was issued before and arrives after that deletion
fills the slot again. Waiting for such an arrival by random delays alone finds few of them, so
here the delay ends with the deletion itself:

    hold      the request travels until some time after its key was deleted; meanwhile the
              caller has an unknown outcome, waits, or its whole process is frozen
    freeze    the request takes effect, its response is lost, and the process is frozen, at
              once or before it sends the request again, until some time after the key was
              deleted

Both are bounded by `Chaos.held_s`, for keys that are never deleted; a held request for a key
that no other process creates arrives within a minute. It arrives whether or not its process is
alive. A key with a held request is contested: who creates it meanwhile is likely to be frozen,
since two accidents on one slot are what protocols get wrong.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from reef.errors import NotFoundError, ReefError, UnavailableError
from reef.stores.base import WriteResult
from reef.stores.memory import MemoryStore
from reef.testing.scheduler import Owner, Ticket

if TYPE_CHECKING:
    from reef.testing.simulation import Process, Simulation

__all__ = ["HeldRequests", "WatchedBucket"]

AFTER_DELETION_S = (0.0, 8.0)
UNCONTESTED_S = (1.0, 60.0)
"""After this long, a request for a key that does not exist arrives."""
CONTESTED = 0.5
"""How likely the process that creates a contested key is frozen."""


class WatchedBucket(MemoryStore):
    """A bucket that reports deletions to the simulation."""

    held: "HeldRequests | None" = None

    def delete_many(self, keys: Sequence[str]) -> None:
        super().delete_many(keys)
        if self.held is not None:
            self.held.deleted(keys)


class HeldRequests:
    """What waits for the deletion of an object."""

    def __init__(self, simulation: "Simulation", world: Owner) -> None:
        self._simulation = simulation
        self._world = world
        self._waiting: dict[str, list[Ticket]] = {}
        self._contested: dict[str, int] = {}
        self.refilled: list[str] = []
        """Keys that a held request has created after their object was deleted."""
        self._deleted: set[str] = set()
        self._before_resend: set[tuple[Process, str]] = set()

    def deleted(self, keys: Iterable[str]) -> None:
        """Wake the waits for these keys."""
        for key in keys:
            self._deleted.add(key)
            for ticket in self._waiting.pop(key, []):
                self._simulation.scheduler.wake(ticket)

    @property
    def pending(self) -> bool:
        """Whether anything still waits for a deletion."""
        return bool(self._waiting)

    def is_held(self, key: str) -> bool:
        """Whether a write of this key is held from here on."""
        return key not in self._contested and self._simulation.strikes(self._simulation.chaos.held)

    def is_forgotten(self, key: str) -> bool:
        """Whether the process that has written this key is frozen now."""
        probability = self._simulation.chaos.forgotten
        if probability > 0.0 and key in self._contested:
            probability = max(probability, CONTESTED)
        return self._simulation.strikes(probability)

    def hold(
        self, process: "Process", what: str, key: str, effect: Callable[[], object]
    ) -> tuple[object, UnavailableError | None]:
        """Let a request travel for long; return its result, or the error of a caller that has
        stopped waiting."""
        sim, box = self._simulation, list[tuple[object, ReefError | None]]()
        self._contested[key] = self._contested.get(key, 0) + 1
        way = sim.choices.pick(3)
        caller = sim.scheduler.ticket() if way == 1 else None

        def travel() -> None:
            self._wait(key)
            self._contested[key] -= 1
            if not self._contested[key]:
                del self._contested[key]
            box.append(self._arrive(what, key, effect))
            if caller is not None:
                sim.scheduler.wake(caller)
            elif way == 2:
                sim.scheduler.thaw(process)

        sim.scheduler.spawn(self._world, travel, f"{self._world.name}/{what}")
        if way == 0:
            return None, UnavailableError(f"no response to {what}", object=key)
        if way == 1:
            sim.note(process.name, "held", f"{what}: waits")
            sim.scheduler.park()
        else:
            sim.note(process.name, "held", f"{what}: frozen")
            self._freeze(process, lambda: bool(box))
        ((result, error),) = box
        if error is not None:
            raise error
        return result, None

    def forget(self, process: "Process", what: str, key: str) -> None:
        """Stop a process whose request has taken effect: now, or before it sends it again."""
        if self._simulation.choices.pick(2):
            self._freeze_until_deleted(process, what, key)
        else:
            self._before_resend.add((process, key))

    def before_send(self, process: "Process", what: str, key: str) -> None:
        """Stop a process here if this is the request that it sends again."""
        if (process, key) in self._before_resend:
            self._before_resend.remove((process, key))
            self._freeze_until_deleted(process, what, key)

    # --- inside -------------------------------------------------------------------
    def _freeze_until_deleted(self, process: "Process", what: str, key: str) -> None:
        sim, over = self._simulation, list[bool]()

        def watch() -> None:
            self._wait(key)
            over.append(True)
            sim.scheduler.thaw(process)

        sim.note(process.name, "held", f"{what}, no response: frozen")
        sim.scheduler.spawn(self._world, watch, f"{self._world.name}/watch {key}")
        self._freeze(process, lambda: bool(over))

    def _freeze(self, process: "Process", is_over: Callable[[], bool]) -> None:
        while not is_over():  # another freeze of the process may end before this one
            process.freeze(self._simulation.chaos.held_s[1] + AFTER_DELETION_S[1] + 1.0)

    def _wait(self, key: str) -> None:
        sim = self._simulation
        bounds_s = [sim.choices.uniform(*UNCONTESTED_S), sim.choices.uniform(*sim.chaos.held_s)]
        after_s = sim.choices.uniform(*AFTER_DELETION_S)
        if self._is_deleted(key, bounds_s[0]) or (
            self._exists(key) and self._is_deleted(key, bounds_s[1])
        ):
            sim.scheduler.park(after_s)

    def _is_deleted(self, key: str, timeout_s: float) -> bool:
        """Wait for the deletion of a key; False if the time is over first."""
        ticket = self._simulation.scheduler.ticket()
        self._waiting.setdefault(key, []).append(ticket)
        if self._simulation.scheduler.park(timeout_s):
            return True
        self._waiting[key].remove(ticket)
        self._waiting = {one: left for one, left in self._waiting.items() if left}
        return False

    def _exists(self, key: str) -> bool:
        try:
            self._simulation.bucket.head(key)
        except NotFoundError:
            return False
        return True

    def _arrive(
        self, what: str, key: str, effect: Callable[[], object]
    ) -> tuple[object, ReefError | None]:
        result, outcome, error = None, "done", None
        try:
            result = effect()
            if isinstance(result, WriteResult):
                outcome = str(result.outcome)
                if result.landed and key in self._deleted:
                    self.refilled.append(key)
        except ReefError as failed:
            outcome, error = failed.kind, failed
        with suppress(ReefError):
            self._simulation.note(self._world.name, "late", f"{what} {outcome}")
        return result, error
