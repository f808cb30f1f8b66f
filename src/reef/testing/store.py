"""The shared bucket as one simulated process sees it, and requests that arrive very late.

Each call has two yield points: one before it takes effect and one after, before its response
arrives. At either one the process can crash, stall or be overtaken; the response can be lost. A
write can also take effect after its caller has timed out.

A slot of the log, or a generation, is filled once by create-only PUT; a sweep deletes it a grace
period after it was folded. A PUT that was issued before and arrives after that deletion fills the
slot again. Random delays alone produce few such arrivals, so that `HeldRequests` ends the delay
with the deletion itself:

    hold      the request travels until some time after its key was deleted; meanwhile the
              caller has an unknown outcome, waits, or its whole process is frozen
    freeze    the request takes effect, its response is lost, and the process is frozen, at
              once or before it sends the request again, until some time after the key was
              deleted

Both are bounded by `Chaos.held_s`, for keys that are never deleted; a held request for a key that
no other process creates arrives within a minute. It arrives whether or not its process is alive. A
key with a held request is contested: a process that creates it meanwhile is likely to be frozen,
because protocols tend to fail where two accidents hit the same slot.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar, cast

from reef.errors import NotFoundError, ReefError, UnavailableError
from reef.stores.base import ObjectInfo, Outcome, Store, WriteResult
from reef.stores.memory import MemoryStore
from reef.stores.wrappers.base import Hooked, Operation, Send, StoreRequest
from reef.testing.runtime import Owner, WaitTicket
from reef.testing.wrappers import CONFLICTS

if TYPE_CHECKING:
    from reef.testing.simulation import Process, Simulation


T = TypeVar("T")
WRITES = {Operation.PUT, Operation.UPLOAD, Operation.COPY, Operation.COMPOSE}
"""Like `Operation.DELETE`, these may take effect after their caller has stopped waiting."""


class SimulatedStore(Hooked):
    """A store at whose every call the process can crash."""

    def __init__(self, bucket: Store, process: "Process") -> None:
        super().__init__(bucket)
        self.runtime = process.runtime
        self._process = process
        self._simulation = process.simulation
        self._chaos = process.simulation.chaos
        self._choices = process.simulation.choices
        self._held = process.simulation.held

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a simulated store cannot be sent to a real process")

    def around(self, request: StoreRequest, send: Send) -> Any:
        operation, key = request.operation, request.key
        if operation is Operation.DELETE:
            for key in request.keys:  # a real bucket may fail between two deletes of one request
                one = StoreRequest(operation, key, keys=[key])
                self._write(operation, key, partial(send, one))
            return None
        if operation is Operation.UPLOAD:
            request = request.with_parts([bytes(part) for part in request.parts])
        effect = partial(send, request)
        if operation.is_conditional:
            return self._conditional(operation, key, effect)
        if operation in WRITES:
            return self._write(operation, key, effect)
        return self._call(operation, key, effect)

    def around_list(self, request: StoreRequest, send: Send) -> Iterator[ObjectInfo]:
        """Each page is a call: the bucket may change between two of them."""
        while True:
            page = self._call(request.operation, request.key, partial(self._page, request, send))
            yield from page
            if len(page) < self.capabilities.list_page:
                return
            request = request.after(page[-1].key)

    def _page(self, request: StoreRequest, send: Send) -> Sequence[ObjectInfo]:
        return list(islice(send(request), self.capabilities.list_page))

    def _call(self, method: str, key: str, effect: Callable[[], T]) -> T:
        self._before(method, key)
        return self._carry_out(method, key, effect)

    def _write(self, method: str, key: str, effect: Callable[[], T]) -> T:
        self._before(method, key)
        if self._simulation.strikes(self._chaos.late):
            raise self._delay(method, key, effect)
        if method != "delete" and self._held.is_held(key):
            return self._hold(method, key, effect)
        return self._carry_out(method, key, effect)

    def _carry_out(self, method: str, key: str, effect: Callable[[], T]) -> T:
        if self._simulation.strikes(self._chaos.fail_before):
            raise self._silence(method, key)
        result = effect()
        self._after(method, key)
        if self._simulation.strikes(self._chaos.lost_response):
            raise self._silence(method, key)
        return result

    def _conditional(
        self, method: Operation, key: str, effect: Callable[[], WriteResult]
    ) -> WriteResult:
        self._held.before_send(self._process, f"{method} {key}", key)
        self._before(method, key)
        if self._simulation.strikes(self._chaos.conflict):
            return WriteResult(CONFLICTS[method])
        try:
            return self._send(method, key, effect)
        except UnavailableError as error:
            return WriteResult(Outcome.UNKNOWN, cause=error)

    def _send(self, method: str, key: str, effect: Callable[[], WriteResult]) -> WriteResult:
        if self._simulation.strikes(self._chaos.late):
            raise self._delay(method, key, effect)
        if self._held.is_held(key):
            return self._hold(method, key, effect)
        if self._simulation.strikes(self._chaos.fail_before):
            raise self._silence(method, key)
        result = effect()
        if result.landed and self._held.is_forgotten(key):
            self._held.forget(self._process, f"{method} {key} {result.outcome}", key)
            raise self._silence(method, key)
        self._after(f"{method} {result.outcome}", key)
        if self._simulation.strikes(self._chaos.lost_response):
            raise self._silence(method, key)
        return result

    def _before(self, method: str, key: str) -> None:
        self._travel()
        self._simulation.yield_point(self._process, "store", f"{method} {key}")

    def _after(self, method: str, key: str) -> None:
        self._simulation.yield_point(self._process, "store", f"{method} {key} done")
        self._travel()

    def _travel(self) -> None:
        """Take the time of one way over the network; now and then, a very long one."""
        delay_s = self._choices.uniform(*self._chaos.latency_s)
        if self._simulation.strikes(self._chaos.stall):
            delay_s += self._choices.uniform(*self._chaos.stall_s)
        if delay_s > 0.0:
            self._simulation.scheduler.park(delay_s)

    def _hold(self, method: str, key: str, effect: Callable[[], T]) -> T:
        result, error = self._held.hold(self._process, f"{method} {key}", key, effect)
        if error is not None:
            raise error
        return cast(T, result)

    def _delay(self, method: str, key: str, effect: Callable[[], object]) -> UnavailableError:
        self._simulation.land_later(f"{method} {key}", effect)
        return self._silence(method, key)

    def _silence(self, method: str, key: str) -> UnavailableError:
        self._simulation.note(self._process.name, "chaos", f"{method} {key}: no response")
        return UnavailableError(f"no response to {method} {key}", object=key)


# --- requests that arrive very late ---------------------------------------------------


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
    """Requests and processes that wait for the deletion of an object."""

    def __init__(self, simulation: "Simulation", world: Owner) -> None:
        self._simulation = simulation
        self._world = world
        self._waiting: dict[str, list[WaitTicket]] = {}
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
        self, process: "Process", request: str, key: str, effect: Callable[[], object]
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
            box.append(self._arrive(request, key, effect))
            if caller is not None:
                sim.scheduler.wake(caller)
            elif way == 2:
                sim.scheduler.thaw(process)

        sim.scheduler.spawn(self._world, travel, f"{self._world.name}/{request}")
        if way == 0:
            return None, UnavailableError(f"no response to {request}", object=key)
        if way == 1:
            sim.note(process.name, "held", f"{request}: waits")
            sim.scheduler.park()
        else:
            sim.note(process.name, "held", f"{request}: frozen")
            self._freeze(process, lambda: bool(box))
        ((result, error),) = box
        if error is not None:
            raise error
        return result, None

    def forget(self, process: "Process", request: str, key: str) -> None:
        """Stop a process whose request has taken effect: now, or before it sends it again."""
        if self._simulation.choices.pick(2):
            self._freeze_until_deleted(process, request, key)
        else:
            self._before_resend.add((process, key))

    def before_send(self, process: "Process", request: str, key: str) -> None:
        """Stop a process here if this is the request that it sends again."""
        if (process, key) in self._before_resend:
            self._before_resend.remove((process, key))
            self._freeze_until_deleted(process, request, key)

    # --- inside -------------------------------------------------------------------
    def _freeze_until_deleted(self, process: "Process", request: str, key: str) -> None:
        sim, over = self._simulation, list[bool]()

        def watch() -> None:
            self._wait(key)
            over.append(True)
            sim.scheduler.thaw(process)

        sim.note(process.name, "held", f"{request}, no response: frozen")
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
        self, request: str, key: str, effect: Callable[[], object]
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
            self._simulation.note(self._world.name, "late", f"{request} {outcome}")
        return result, error
