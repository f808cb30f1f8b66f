"""The simulated world, made for being explored: one decision per step, all of them in one place.

A step is: one request takes effect, and its process goes on until it has sent the next one. At
each step the exploration is asked once: whose request, and what becomes of it. Deaths are asked
for here too, together with what becomes of the requests that the dead one had under way: each is
either never seen, or lands at any later step, or at once. A late request is a strand of its own.

Some steps are taken without asking, because their order makes no difference (see `Footprint`):

- A strand that was just started or woken goes on at once: until its next request it touches its
  process's memory only. With several threads in a process this is a bound: how the machine shares
  its time among woken threads is not explored, in which order answers come to them is.
- A call of a gather shares no memory with anybody until it ends. Of reads in one gather, the first
  takes effect first: they commute with each other, and whoever deletes does so in order too.
- Private objects, and reads of what cannot change any more.
- The answer is taken in together with the effect if no other strand of the process can go on:
  in between, others could do nothing that either side would notice.

A process dies only when one of its requests is about to take effect, instead of it. To die earlier
is the same, since nobody notices a death; to die before an answer is taken in leaves the same
bucket and fewer promises than to die after it. Reads have no faults of their own: a read whose
answer is lost is asked again, and so is a read that comes later.

Time stands still, sleeps hand over at once, unless the scenario lets time pass: then that is a
step as well, to be taken at any moment or never.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import Any, TypeVar, cast

from reef.errors import ReefError, UnavailableError
from reef.runtime import Future
from reef.stores.base import Outcome, Store, WriteResult
from reef.testing.choices import ScriptedChoices
from reef.testing.explored_scheduler import Death, ExploredScheduler
from reef.testing.scheduler import Owner, Scheduler, Strand
from reef.testing.simulated_runtime import SimulatedRuntime, fulfil
from reef.testing.simulated_store import SimulatedStore
from reef.testing.simulation import Chaos, Process, Simulation
from reef.testing.states import (
    TIME,
    ContentBucket,
    Cut,
    Fate,
    Footprint,
    Request,
    Seen,
    Track,
    digest,
    summary,
)

__all__ = ["ExploredSimulation"]

T = TypeVar("T")


class _Runtime(SimulatedRuntime):
    """Ids that depend on their drawer alone; gathers whose calls are told apart."""

    def __init__(self, world: "ExploredSimulation", process: Process, skew_s: float) -> None:
        scheduler = world.scheduler
        seam = partial(world.seam, process)
        super().__init__(scheduler, process, len(world.processes), seam, skew_s)
        self._explored = world
        self._strands = scheduler
        self._chain = scheduler.chain_of(process)

    def random_bytes(self, count: int) -> bytes:
        strand = self._strands.current
        return (self._strands.tracks[strand].chain if strand else self._chain).draw(count)

    def sleep(self, seconds: float) -> None:
        self._strands.pause()

    def gather(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        me = self._strands.current
        if len(calls) <= 1 or me is None or me in self._gathering:
            return [call() for call in calls]
        chain = self._strands.tracks[me].chain
        futures = [self.future() for _ in calls]
        branches = [chain.branch() for _ in calls]
        settled = self.future()
        for future, call, branch in zip(futures, calls, branches, strict=True):
            future.add_done_callback(lambda _: _settle(settled, futures))
            one = partial(fulfil, future, partial(self._gather_one, call))
            self._strands.spawn_alone(self._owner, one, branch, settled)
        try:
            settled.result()
            return [future.result() for future in futures]
        finally:
            ended = zip(branches, futures, strict=True)
            chain.join([branch for branch, future in ended if future.done()])


def _settle(settled: Future[Any], futures: list[Future[Any]]) -> None:
    """Wake who gathers when it is due: at the end of all, or at the first error in order."""
    done = list(takewhile(lambda future: future.done(), futures))
    failed = any(future.exception() is not None for future in done)
    if not settled.done() and (failed or len(done) == len(futures)):
        settled.set_result(None)


class _Store(SimulatedStore):
    """Each call is a request that takes effect when the exploration says so."""

    def __init__(self, world: "ExploredSimulation", process: Process) -> None:
        super().__init__(world.bucket, process)
        self._explored = world

    def create(self, key: str, body: bytes) -> WriteResult:
        effect = partial(self.inner.create, key, body)
        result = self._explored.send(
            Request("create", key, effect, True, Outcome.EXISTS, digest(body))
        )
        assert isinstance(result, WriteResult)
        return result

    def _call(self, method: str, key: str, effect: Callable[[], T]) -> T:
        return cast(T, self._answered(Request(method, key, effect)))

    def _write(self, method: str, key: str, effect: Callable[[], T]) -> T:
        return cast(T, self._answered(Request(method, key, effect, True)))

    def _conditional(
        self, method: str, key: str, conflict: Outcome, effect: Callable[[], WriteResult]
    ) -> WriteResult:
        result = self._explored.send(Request(method, key, effect, True, conflict))
        assert isinstance(result, WriteResult)
        return result

    def _answered(self, request: Request) -> Any:
        """Where no answer is an error, not an outcome."""
        result = self._explored.send(request)
        if isinstance(result, WriteResult) and result.cause is not None:
            raise result.cause
        return result


class ExploredSimulation(Simulation):
    """A simulation that follows a script, and stops where it has been before."""

    bucket: ContentBucket
    scheduler: ExploredScheduler

    def __init__(
        self,
        choices: ScriptedChoices,
        *,
        chaos: Chaos,
        footprint: Footprint,
        seen: Seen | None = None,
        script_length: int = 0,
        switches_max: int | None = None,
        steps_max: int = 100_000,
    ) -> None:
        self.footprint = footprint
        self.bounded = switches_max is not None
        self.switches_left = 1 << 30 if switches_max is None else switches_max
        self.witness: Callable[[], object] | None = None
        """Returns what the scenario remembers, and its checks look at."""
        self.mortal: Callable[[Owner], bool] = lambda _: True
        self._seen = seen
        self._script_length = script_length
        self._script = choices
        self._timed: tuple[Owner, ...] = ()
        self._effects: dict[Owner, int] = {}
        bucket = ContentBucket(footprint)
        super().__init__(choices, chaos=chaos, bucket=bucket, steps_max=steps_max)
        bucket.runtime = SimulatedRuntime(self.scheduler, self._world, 0, lambda *_: None)

    # --- for scenarios ------------------------------------------------------------
    def settle(self) -> None:
        """Let what was started come as far as its first requests, without asking."""
        self.scheduler.settle()

    def let_time_pass(self, seconds: float, *timed: Owner) -> None:
        """Add a step that moves the clocks, at any moment or never.

        For `timed` processes also between an effect and the moment when they hear of it.
        """
        self._timed += timed

        def passes() -> None:
            self.scheduler.now_s += seconds
            self._timed = ()
            self.note("time", "time", f"{seconds} s pass")

        self._pending(Request(TIME, "", passes, identity=TIME.encode()), daemon=True)

    def run(self, until_s: float | None = None) -> None:
        """Run to the end; Cut if that end was seen before."""
        super().run(until_s)
        self.look(None)

    # --- what the parts ask -------------------------------------------------------
    def seam(self, process: Process, kind: str, what: str) -> None:
        """Only requests are steps."""
        self.scheduler.running()

    @property
    def world(self) -> Owner:
        """Who owns what no process waits for: late requests, and time."""
        return self._world

    def store_of(self, process: Process) -> Store:
        return _Store(self, process)

    def send(self, request: Request) -> Any:
        """Wait until the request's fate is decided; return the answer."""
        strand = self.scheduler.running()
        if strand is None:
            return request.effect()  # before the run: a preparation
        track = self.scheduler.tracks[strand]
        if not self.is_free(request):
            request.identity = digest(request.what.encode(), request.identity or track.chain.value)
            track.request = request
            self.scheduler.pause()
            track.request = None
        self.note(strand.name, "store", f"{request.what} {track.fate.value}")
        return self._take_in(strand, track, *self._befall(strand.owner, request, track.fate))

    def _befall(
        self, owner: Owner, request: Request, fate: Fate
    ) -> tuple[object, Exception | None]:
        """Return the answer to a request, or the error."""
        silence = WriteResult(Outcome.UNKNOWN, cause=UnavailableError(f"no answer: {request.what}"))
        self.faults += fate is not Fate.OK
        if fate is Fate.CONFLICT and request.conflict is not None:
            return WriteResult(request.conflict), None
        if fate is Fate.LATE:
            self._pending(request)
        if fate in (Fate.LATE, Fate.FAILED):
            return silence, None
        self._effects[owner] = self._effects.get(owner, 0) + request.writes
        try:
            answer = request.effect()
        except ReefError as error:
            return None, error
        return (answer if fate is Fate.OK else silence), None

    def _take_in(
        self, strand: Strand, track: Track, answer: object, error: Exception | None
    ) -> object:
        track.answer, track.fate = summary(error or answer), Fate.OK
        shares = not track.alone and self.scheduler.others_ready(strand)
        if shares or self.feels_time(strand.owner):
            self.scheduler.pause()
        track.chain.absorb(track.name, track.answer, self.clock())
        track.answer = b""
        if error is not None:
            raise error
        return answer

    def is_free(self, request: Request) -> bool:
        """Whether the order of this call makes no difference to anybody."""
        if self.footprint.private(request.key):
            return True
        single = request.method in ("get", "get_range", "head", "create")
        return single and self.bucket.is_fixed(request.key)

    def feels_time(self, owner: Owner) -> bool:
        return owner in self._timed

    def fates(self, track: Track) -> list[Fate]:
        fates = [Fate.OK]
        request, chaos = track.request, self.chaos
        if request is None or not request.writes or self.faults >= chaos.faults_max:
            return fates
        if track.chain is self.scheduler.chain_of(self._world):
            return fates
        fates += [Fate.LOST] if chaos.lost_answer else []
        fates += [Fate.FAILED] if chaos.fail_before else []
        fates += [Fate.LATE] if chaos.late else []
        fates += [Fate.CONFLICT] if chaos.conflict and request.conflict else []
        return fates

    def left_by(self, owner: Owner) -> tuple[int, str]:
        """Return what stands for the traces of a process: its writes, and what it told."""
        told = "" if self.witness is None else repr(self.witness())
        return self._effects.get(owner, 0), told

    def may_die(self, owner: Owner) -> bool:
        if self.crashes >= self.chaos.crashes_max or not self.chaos.crash:
            return False
        return isinstance(owner, Process) and self.mortal(owner)

    def die(self, owner: Owner, landing: Death) -> None:
        """Kill a process; of its requests, these land later."""
        self.crashes += 1
        self.note(owner.name, "death", f"crash, {len(landing)} requests under way")
        requests = [self.scheduler.tracks[strand].request for strand in landing]
        self.scheduler.kill(owner)
        for request in requests:
            if request is not None:
                self._pending(request)

    def look(self, last: Owner | None, asleep: frozenset[bytes] = frozenset()) -> None:
        """Raise Cut if the state at this decision was seen, and the script has run out."""
        if self._seen is None or len(self._script.taken) < self._script_length:
            return
        bound = last.name.encode() if self.bounded and last is not None else b""
        if not self._seen.is_new(digest(self.state(), bound), self.switches_left, asleep):
            raise Cut

    def state(self) -> bytes:
        """Return a digest of all that decides what can happen from here on."""
        counts = f"{self.crashes} {self.faults} {self.scheduler.now_s}"
        parts = [self.bucket.contents.to_bytes(16, "big"), counts.encode()]
        if self.witness is not None:
            parts.append(repr(self.witness()).encode())
        living = self._living()
        for owner, chain in self.scheduler.chains.items():
            if owner is not self._world and (owner in living or self.witness is None):
                parts += [chain.name.encode(), chain.whole(), *sorted(living.get(owner, ()))]
        return digest(*parts, *sorted(living.get(self._world, ())))

    # --- inside -------------------------------------------------------------------
    def _make_scheduler(self, steps_max: int) -> Scheduler:
        return ExploredScheduler(self, steps_max)

    def _make_runtime(self, process: Process, skew_s: float) -> SimulatedRuntime:
        return _Runtime(self, process, skew_s)

    def clock(self) -> bytes:
        return str(self.scheduler.now_s).encode()

    def _living(self) -> dict[Owner, list[bytes]]:
        """Return who has not ended, with the answers and requests that belong to no chain."""
        living: dict[Owner, list[bytes]] = {}
        for strand, track in self.scheduler.tracks.items():
            if strand.finished or strand.owner.dead:
                continue
            apart = living.setdefault(strand.owner, [])
            if track.answer:
                apart.append(track.name + b" " + track.answer)
            if strand.owner is self._world and track.request is not None:
                apart.append(track.request.identity)
        return living

    def _pending(self, request: Request, *, daemon: bool = False) -> None:
        """Let a request take effect at any later step, whatever becomes of its sender."""

        def land() -> None:
            with suppress(ReefError):  # there is nobody left to tell
                result = request.effect()
                outcome = result.outcome if isinstance(result, WriteResult) else "done"
                self.note(self._world.name, "late", f"{request.what} {outcome}")

        strand = self.scheduler.spawn(self._world, land, f"bucket/{request.what}", daemon=daemon)
        self.scheduler.tracks[strand].request = request
