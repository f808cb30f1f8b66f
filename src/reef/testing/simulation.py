"""A whole cluster in one thread, decided by one seed.

    def scenario(sim):
        node = sim.process("node-1")
        store = node.store()
        node.spawn(lambda: store.create("a", b"1"))
        sim.run()

    simulate(scenario, seeds=range(1000), chaos=Chaos(crash=0.01, lost_answer=0.05))

Processes share one bucket. Every store call, clock read, lock, wait and named point is a
seam: there the scheduler may let another process go first, and chaos may strike. A
failure names its seed; the same seed gives the same history, call by call.
"""

import hashlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from reef.errors import ReefError
from reef.stores import Meter, ReadBack, Retry, RetryPolicy, Store, WriteResult
from reef.stores.memory import MemoryStore
from reef.testing.choices import Choices, SeededChoices
from reef.testing.held import HeldRequests, WatchedBucket
from reef.testing.scheduler import Owner, Scheduler
from reef.testing.simulated_runtime import SimulatedRuntime

__all__ = ["Chaos", "Process", "Simulation", "SimulationFailed", "Step", "simulate"]

TRACE_SHOWN = 60
ALL_SEAMS = frozenset({"store", "file", "clock", "lock", "wait", "point"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Chaos:
    """How much goes wrong. Chances are per seam; the bounds keep a history finite."""

    crash: float = 0.0
    crashes_max: int = 3
    faults_max: int = 1000
    """How many of the mishaps below there are at most, all taken together."""
    lost_answer: float = 0.0
    """The call takes effect, its caller hears nothing."""
    fail_before: float = 0.0
    """The call has no effect, its caller hears nothing."""
    late: float = 0.0
    """The caller of a write hears nothing now, and the call takes effect `stall_s` later,
    even if the caller has died meanwhile."""
    conflict: float = 0.0
    """A conditional write is answered "conflict" though nothing stands in its way (H2)."""
    stall: float = 0.0
    stall_s: tuple[float, float] = (1.0, 3600.0)
    freeze: float = 0.0
    """The whole process stands still for `stall_s`."""
    held: float = 0.0
    """A write arrives after the object of its name was deleted; see `reef.testing.held`."""
    forgotten: float = 0.0
    """A write takes effect, its response is lost, and its process is frozen until the object
    was deleted."""
    held_s: tuple[float, float] = (3600.0, 36000.0)
    """How long the two above last where the object is never deleted."""
    latency_s: tuple[float, float] = (0.001, 0.05)


CALM = Chaos(latency_s=(0.0, 0.0))


@dataclass(frozen=True, slots=True)
class Step:
    """One seam that was passed."""

    time_s: float
    who: str
    seam: str
    what: str

    def __str__(self) -> str:
        return f"{self.time_s - 1.8e9:14.6f}  {self.who:<24} {self.seam:<6} {self.what}"


@dataclass(frozen=True, slots=True)
class CrashAt:
    """Kill a process at the n-th seam of its name, whichever of its lives passes it."""

    process: str
    number: int


@dataclass(eq=False)
class Process(Owner):
    """A simulated machine's process: some strands, one runtime, one fate."""

    simulation: "Simulation" = field(kw_only=True)
    runtime: SimulatedRuntime = field(init=False)

    def spawn(self, call: Callable[[], object], name: str = "main") -> None:
        """Start a strand that `Simulation.run` sees to its end; none if the process is dead."""
        self.simulation.scheduler.spawn(self, call, f"{self.name}/{name}")

    def store(self, policy: RetryPolicy | None = None) -> Store:
        """Return the shared bucket as this process sees it, with the usual wrappers."""
        policy = policy or RetryPolicy()
        return ReadBack(Retry(Meter(self.raw_store()), policy), policy)

    def raw_store(self) -> Store:
        """Return the shared bucket without retries or read-back."""
        return self.simulation.store_of(self)

    def crash(self) -> None:
        """Die here; does not return when called by the process itself."""
        self.simulation.note(self.name, "death", "crash")
        self.simulation.scheduler.kill(self)

    def freeze(self, seconds: float, *, suspended: bool = False) -> None:
        """Stand still; `suspended` stops the monotonic clock too, like a closed lid.

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
        switch_at: frozenset[str] = ALL_SEAMS,
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
        self.seams: dict[str, int] = {}
        """How many seams were passed under each process name: the crash points, by number."""
        self.crash_seam: str | None = None
        """Where `crash_at` struck."""
        self._switch_at = switch_at
        self._crash_at = crash_at
        self._world = Owner("bucket")
        runtime = SimulatedRuntime(self.scheduler, self._world, 0, lambda *_: None)
        self.held = HeldRequests(self, self._world)
        self.bucket = bucket or self._make_bucket(runtime)

    def process(self, name: str, *, skew_s: float = 0.0) -> Process:
        """Start a process; a name may come back, as a restarted service does."""
        process = Process(name, simulation=self)
        self.processes.append(process)
        process.runtime = self._make_runtime(process, skew_s)
        return process

    def store_of(self, process: Process) -> Store:
        """Return the bucket as a process sees it."""
        from reef.testing.simulated_store import SimulatedStore

        return SimulatedStore(self.bucket, process)

    def run(self, until_s: float | None = None) -> None:
        """Run to the end, or for `until_s` of virtual seconds.

        The end is when all that `Process.spawn` started is done, and all late requests have
        landed. What `Runtime.spawn` started is a daemon, and goes on in the next run.
        """
        end_s = None if until_s is None else self.scheduler.now_s + until_s
        self.scheduler.run(end_s)

    def close(self) -> None:
        self.scheduler.close()

    def seam(self, process: Process, kind: str, what: str) -> None:
        """Pass a seam: note it, let others go first, and see whether it is the last."""
        strand = self.scheduler.running()  # raises in the code of a dead process
        number = self.seams[process.name] = self.seams.get(process.name, 0) + 1
        self.note(process.name if strand is None else strand.name, kind, what)
        if kind in self._switch_at:
            self.scheduler.pause()
        if self._dies_here(process, number):
            self.crashes += 1
            self.crash_seam = f"{kind} {what}"
            process.crash()
        if self.strikes(self.chaos.freeze):
            process.freeze(self.choices.uniform(*self.chaos.stall_s))

    def strikes(self, probability: float) -> bool:
        """Whether a mishap of this probability happens here and now."""
        if self.faults >= self.chaos.faults_max or not self.choices.chance(probability):
            return False
        self.faults += 1
        return True

    def land_later(self, what: str, effect: Callable[[], object]) -> None:
        """Let a request that its sender has given up take effect after a while."""
        delay_s = self.choices.uniform(*self.chaos.stall_s)

        def land() -> None:
            self.scheduler.park(delay_s)
            with suppress(ReefError):  # there is nobody left to tell
                result = effect()
                outcome = result.outcome if isinstance(result, WriteResult) else "done"
                self.note(self._world.name, "late", f"{what} {outcome}")

        # The bucket's own strand: no process's death stops it, and the run waits for it.
        self.scheduler.spawn(self._world, land, f"{self._world.name}/{what}")

    def note(self, who: str, kind: str, what: str) -> None:
        self.trace.append(Step(self.scheduler.now_s, who, kind, what))

    def fingerprint(self) -> str:
        """Return a digest of the whole history: equal for equal seeds."""
        digest = hashlib.sha256()
        for step in self.trace:
            digest.update(str(step).encode())
        return digest.hexdigest()

    # --- of what the world is made; an exploration makes it of other parts ---------
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
            lambda kind, what: self.seam(process, kind, what),
            skew_s,
        )

    def _dies_here(self, process: Process, number: int) -> bool:
        if self._crash_at is not None:
            return self._crash_at == CrashAt(process.name, number)
        return self.crashes < self.chaos.crashes_max and self.choices.chance(self.chaos.crash)


class SimulationFailed(AssertionError):
    """A history broke an invariant. Its seed brings it back."""

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
    """Run a scenario once per seed; SimulationFailed at the first that goes wrong.

    `world` is what to simulate it in: a class of yours, where buckets or processes differ.
    """
    count = 0
    for seed in seeds:
        sim = world(seed, chaos=chaos, steps_max=steps_max)
        try:
            scenario(sim)
        except Exception as error:
            raise SimulationFailed(seed, sim.trace, error) from error
        finally:
            sim.close()
        count += 1
    return count
