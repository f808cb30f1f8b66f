"""A cluster simulated in one thread, with every decision drawn from one seed.

    def scenario(sim):
        node = sim.process("node-1")
        store = node.store()
        node.spawn(lambda: store.create("a", b"1"))
        sim.run()

    simulate(scenario, seeds=range(1000), chaos=Chaos(crash=0.01, lost_response=0.05))

Processes share one bucket. Every store call, clock read, lock, wait and named point is a yield
point: there the scheduler may run another process first, and `Chaos` may inject a fault. A failure
names its seed; the same seed gives the same history, call by call.

`crash_points` runs a scenario once for each yield point of a process and crashes it there. Crash
points are not registered by hand: new code that makes a store call, reads a clock or names a point
is covered at once.

    for point in crash_points(scenario, victim="writer"):
        ...   # a Simulation in which the writer crashed at this point

**The bucket** is shared; each process has a store of its own on it. Each call has two yield points:
one before it takes effect and one after, before its response arrives. At either one the process can
crash, stall or be overtaken; the response can be lost. A write can also take effect after its
caller has timed out.

**Very late requests.** A slot of the log, or a generation, is filled once by create-only PUT; a
sweep deletes it a grace period after it was folded. A PUT that was issued before and arrives after
that deletion fills the slot again. Random delays alone produce few such arrivals, so that
`HeldRequests` ends the delay with the deletion itself:

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

import gc
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar, cast

from reef.errors import NotFoundError, ReefError, UnavailableError
from reef.stores import Meter, ReadBack, Retry, RetryPolicy
from reef.stores.base import ObjectInfo, Outcome, Store, WriteResult
from reef.stores.memory import MemoryStore
from reef.stores.wrappers.base import Hooked, Operation, Send, StoreRequest
from reef.testing.runtime import (
    Choices,
    Owner,
    Scheduler,
    SeededChoices,
    SimulatedRuntime,
    WaitTicket,
)
from reef.testing.wrappers import CONFLICTS

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


TRACE_SHOWN = 60
STEPS_PER_COLLECTION = 500_000
"""Garbage of so many steps takes about a hundred megabytes."""
ALL_YIELD_POINTS = frozenset({"store", "file", "clock", "lock", "wait", "point"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Chaos:
    """Fault injection: probabilities per yield point, and bounds that keep a history finite."""

    crash: float = 0.0
    crashes_max: int = 3
    faults_max: int = 1000
    """Bound on all faults below together."""
    lost_response: float = 0.0
    """The call takes effect, and its caller gets no response."""
    fail_before: float = 0.0
    """The call has no effect, and its caller gets no response."""
    late: float = 0.0
    """The caller of a write gets no response, and the call takes effect `stall_s` later, even if
    the caller has crashed meanwhile."""
    conflict: float = 0.0
    """A conditional write reports a conflict although there is none (H2)."""
    stall: float = 0.0
    stall_s: tuple[float, float] = (1.0, 3600.0)
    freeze: float = 0.0
    """The whole process is frozen for `stall_s`."""
    held: float = 0.0
    """A write arrives after the object of its name was deleted; see `reef.testing.simulation`."""
    forgotten: float = 0.0
    """A write takes effect, its response is lost, and its process is frozen until the object
    was deleted."""
    held_s: tuple[float, float] = (3600.0, 36000.0)
    """How long the two above last where the object is never deleted."""
    latency_s: tuple[float, float] = (0.001, 0.05)


CALM = Chaos(latency_s=(0.0, 0.0))


class Step(NamedTuple):
    """One entry of the trace: a yield point, or an injected fault."""

    time_s: float
    source: str
    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.time_s - 1.8e9:14.6f}  {self.source:<24} {self.kind:<6} {self.detail}"


@dataclass(frozen=True, slots=True)
class CrashAt:
    """Crash a process at the n-th yield point of its name, restarts included."""

    process: str
    number: int


@dataclass(eq=False)
class Process(Owner):
    """A process on a simulated machine: its fibers and its runtime."""

    simulation: "Simulation" = field(kw_only=True)
    runtime: SimulatedRuntime = field(init=False)

    def spawn(self, call: Callable[[], object], name: str = "main") -> None:
        """Start a fiber that `Simulation.run` waits for; none if the process is dead."""
        self.simulation.scheduler.spawn(self, call, f"{self.name}/{name}")

    def store(self, policy: RetryPolicy | None = None) -> Store:
        """Return the shared bucket as this process sees it, with the usual wrappers."""
        policy = policy or RetryPolicy()
        return ReadBack(Retry(Meter(self.raw_store()), policy), policy)

    def raw_store(self) -> Store:
        """Return the shared bucket without retries or read-back."""
        return self.simulation.store_of(self)

    def crash(self) -> None:
        """Crash; does not return when called by the process itself."""
        self.simulation.note(self.name, "death", "crash")
        self.simulation.scheduler.kill(self)

    def freeze(self, seconds: float, *, suspended: bool = False) -> None:
        """Stop for some time; `suspended` stops the monotonic clock too, like a closed lid.

        Returns after the thaw when called by the process itself.
        """
        scheduler = self.simulation.scheduler
        end_s = max(scheduler.now_s + seconds, self.frozen_until_s)
        if suspended:  # a part that is frozen already counts once
            self.runtime.suspended_s += end_s - max(scheduler.now_s, self.frozen_until_s)
        self.simulation.note(self.name, "freeze", f"{seconds:.3f} s")
        scheduler.freeze(self, end_s)


class Simulation:
    """The bucket, the processes, the scheduler and the trace of one history."""

    def __init__(
        self,
        choices: Choices | int = 0,
        *,
        chaos: Chaos = CALM,
        bucket: MemoryStore | None = None,
        switch_at: frozenset[str] = ALL_YIELD_POINTS,
        crash_at: CrashAt | None = None,
        steps_max: int = 1_000_000,
    ) -> None:
        self.choices = SeededChoices(choices) if isinstance(choices, int) else choices
        self.chaos = chaos
        self.scheduler = self._make_scheduler(steps_max)
        self.trace: list[Step] = []
        self.processes: list[Process] = []
        self.crashes = 0
        self.faults = 0
        self.yield_counts: dict[str, int] = {}
        """Yield points passed so far, by process name: the numbers of its crash points."""
        self.crash_site: str | None = None
        """The yield point at which `crash_at` has crashed the process."""
        self._switch_at = switch_at
        self._crash_at = crash_at
        self._world = Owner("bucket")
        runtime = SimulatedRuntime(self.scheduler, self._world, 0, lambda *_: None)
        self.held = HeldRequests(self, self._world)
        self.bucket = bucket or self._make_bucket(runtime)

    def process(self, name: str, *, skew_s: float = 0.0) -> Process:
        """Start a process; a name may be used again, for a restarted service."""
        process = Process(name, simulation=self)
        self.processes.append(process)
        process.runtime = self._make_runtime(process, skew_s)
        return process

    def store_of(self, process: Process) -> Store:
        """Return the bucket as a process sees it."""
        return SimulatedStore(self.bucket, process)

    def run(self, until_s: float | None = None) -> None:
        """Run to the end, or for `until_s` of virtual seconds.

        The end is when all fibers of `Process.spawn` have ended, and all late requests have
        landed. Fibers of `Runtime.spawn` are daemons, and continue in the next run.
        """
        end_s = None if until_s is None else self.scheduler.now_s + until_s
        self.scheduler.run(end_s)

    def close(self) -> None:
        self.scheduler.close()

    def yield_point(self, process: Process, kind: str, detail: str) -> None:
        """Record a step, let other fibers run first, and perhaps crash or freeze the process."""
        fiber = self.scheduler.running()  # raises in the code of a dead process
        number = self.yield_counts[process.name] = self.yield_counts.get(process.name, 0) + 1
        source = process.name if fiber is None else fiber.name
        self.trace.append(Step(self.scheduler.now_s, source, kind, detail))
        if fiber is not None and kind in self._switch_at:
            self.scheduler.pause_running(fiber)
        if self._crashes_here(process, number):
            self.crashes += 1
            self.crash_site = f"{kind} {detail}"
            process.crash()
        if self.chaos.freeze and self.strikes(self.chaos.freeze):
            process.freeze(self.choices.uniform(*self.chaos.stall_s))

    def strikes(self, probability: float) -> bool:
        """Decide whether a fault of this probability happens now."""
        if (
            probability <= 0.0
            or self.faults >= self.chaos.faults_max
            or not self.choices.chance(probability)
        ):
            return False
        self.faults += 1
        return True

    def land_later(self, request: str, effect: Callable[[], object]) -> None:
        """Let a request that its sender no longer waits for take effect after some time."""
        delay_s = self.choices.uniform(*self.chaos.stall_s)

        def land() -> None:
            self.scheduler.park(delay_s)
            with suppress(ReefError):  # no caller is left
                result = effect()
                outcome = result.outcome if isinstance(result, WriteResult) else "done"
                self.note(self._world.name, "late", f"{request} {outcome}")

        # A fiber of the bucket: no crash of a process stops it, and the run waits for it.
        self.scheduler.spawn(self._world, land, f"{self._world.name}/{request}")

    def note(self, source: str, kind: str, detail: str) -> None:
        self.trace.append(Step(self.scheduler.now_s, source, kind, detail))

    def fingerprint(self) -> str:
        """Return a digest of the whole history: equal for equal seeds."""
        digest = hashlib.sha256()
        for step in self.trace:
            digest.update(str(step).encode())
        return digest.hexdigest()

    # --- parts, which an exploration replaces --------------------------------------
    def _make_scheduler(self, steps_max: int) -> Scheduler:
        return Scheduler(self.choices, steps_max)

    def _make_bucket(self, runtime: SimulatedRuntime) -> MemoryStore:
        bucket = WatchedBucket("memory://simulated", runtime=runtime)
        bucket.held = self.held
        return bucket

    def _make_runtime(self, process: Process, skew_s: float) -> SimulatedRuntime:
        return SimulatedRuntime(
            self.scheduler,
            process,
            len(self.processes),
            partial(self.yield_point, process),
            skew_s,
        )

    def _crashes_here(self, process: Process, number: int) -> bool:
        if self._crash_at is not None:
            return self._crash_at == CrashAt(process.name, number)
        return self.crashes < self.chaos.crashes_max and self.choices.chance(self.chaos.crash)


class SimulationFailed(AssertionError):
    """A history broke an invariant; its seed reproduces it."""

    def __init__(self, seed: int, trace: list[Step], cause: BaseException) -> None:
        shown = "\n".join(str(step) for step in trace[-TRACE_SHOWN:])
        super().__init__(f"seed {seed}: {type(cause).__name__}: {cause}\n{shown}")
        self.seed = seed
        self.trace = trace


def simulate(
    scenario: Callable[[Simulation], object],
    seeds: Iterable[int],
    *,
    chaos: Chaos = CALM,
    steps_max: int = 1_000_000,
    world: type[Simulation] = Simulation,
) -> int:
    """Run a scenario once per seed; raise SimulationFailed at the first that fails.

    `world` is the class of simulation to use, for other buckets or processes.
    """
    count = steps = 0
    with without_collections():
        for seed in seeds:
            sim = world(seed, chaos=chaos, steps_max=steps_max)
            try:
                scenario(sim)
            except Exception as error:
                raise SimulationFailed(seed, sim.trace, error) from error
            finally:
                sim.close()
            count += 1
            steps += sim.scheduler.steps
            if steps > STEPS_PER_COLLECTION:
                gc.collect()
                steps = 0
    return count


@contextmanager
def without_collections() -> Iterator[None]:
    """Keep the garbage collector from running.

    It closes abandoned generators, whose `finally` blocks may send requests: at a point in the
    history that depends on how much memory the process has allocated before, and on no seed.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class CrashPoint:
    """One crash, and the simulation after it."""

    number: int
    site: str
    """The yield point, as in the trace."""
    simulation: Simulation


def crash_points(
    scenario: Callable[[Simulation], object], victim: str, *, seed: int = 0, every: int = 1
) -> Iterator[CrashPoint]:
    """Run `scenario` once for each yield point of `victim`, and crash it there.

    With `every`, only at each such point: a sample of a long scenario.

    The scenario starts processes and calls `sim.run()`. After each crash the simulation is
    yielded, so that new processes can be started on the state that is left. A victim that the
    scenario restarts under its name is crashed after each restart, too.
    """
    total = _count_yield_points(scenario, victim, seed)
    for number in range(1, total + 1, every):
        sim = Simulation(seed, crash_at=CrashAt(victim, number))
        try:
            with without_collections():
                scenario(sim)
            if sim.crash_site is None:
                raise AssertionError(f"{victim} did not crash: the scenario is not deterministic")
            yield CrashPoint(number, sim.crash_site, sim)
        finally:
            sim.close()


def _count_yield_points(scenario: Callable[[Simulation], object], victim: str, seed: int) -> int:
    sim = Simulation(seed)
    try:
        with without_collections():
            scenario(sim)
        return sim.yield_counts.get(victim, 0)
    finally:
        sim.close()
