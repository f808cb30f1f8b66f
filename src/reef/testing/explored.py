"""The simulated world, made for being explored: one process at a time, all answers from outside.

A scenario is the same function that `simulate` runs. Here its `run` hands over to the exploration,
which lets one process go on with the answers of some history, and looks at what it asks for next.
At the end of a history all processes get the answers that they had in it, the bucket becomes what
it was at that end, and `run` returns, so that the scenario's checks look at it.

Processes of a scenario share the bucket only, and what the scenario remembers of one of them
must not depend on another: the exploration does not run them in the order of the history.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, TypeVar, cast

import greenlet

from reef.runtime import Future
from reef.stores.base import ObjectInfo, Outcome, Part, Store, Tagged, WriteResult
from reef.testing.buckets import ContentBucket, Objects
from reef.testing.choices import ScriptedChoices
from reef.testing.explored_scheduler import ExploredScheduler
from reef.testing.scheduler import Owner, Scheduler
from reef.testing.simulated_runtime import SimulatedRuntime, fulfil
from reef.testing.simulated_store import SimulatedStore
from reef.testing.simulation import Chaos, Process, Simulation
from reef.testing.states import Request

__all__ = ["ExploredSimulation", "Stage"]

T = TypeVar("T")


class _Runtime(SimulatedRuntime):
    """Ids that depend on their drawer alone; gathers whose calls are told apart."""

    def __init__(self, world: "ExploredSimulation", process: Process, skew_s: float) -> None:
        scheduler = world.scheduler
        seam = partial(world.seam, process)
        super().__init__(scheduler, process, len(world.processes), seam, skew_s)
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
            self._strands.spawn_alone(self._owner, one, branch, branches[0].name)
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
    """Each call is a request that stands still until the exploration has an answer."""

    def __init__(self, world: "ExploredSimulation", process: Process) -> None:
        super().__init__(world.bucket, process)
        self._explored = world

    def get_tagged(self, key: str) -> Tagged:
        return cast(Tagged, self._ask(Request("get_tagged", key)))

    def get_range(self, key: str, start: int, end: int) -> bytes:
        return cast(bytes, self._ask(Request("get_range", key, (start, end))))

    def head(self, key: str) -> ObjectInfo:
        return cast(ObjectInfo, self._ask(Request("head", key)))

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[ObjectInfo]:
        while True:
            page = self._ask(Request("list", prefix, (start_after,)))
            yield from page
            if len(page) < self.capabilities.list_page:
                return
            start_after = page[-1].key

    def put(self, key: str, body: bytes) -> str | None:
        return cast(str, self._ask(Request("put", key, (bytes(body),))))

    def create(self, key: str, body: bytes) -> WriteResult:
        request = Request("create", key, (bytes(body),), Outcome.EXISTS)
        return cast(WriteResult, self._explored.send(request))

    def replace(self, key: str, body: bytes, tag: str) -> WriteResult:
        request = Request("replace", key, (bytes(body), tag), Outcome.CHANGED)
        return cast(WriteResult, self._explored.send(request))

    def upload(self, key: str, parts: Iterable[bytes]) -> int:
        return cast(int, self._ask(Request("upload", key, (tuple(map(bytes, parts)),))))

    def copy(self, source: str, target: str) -> None:
        self._ask(Request("copy", target, (source,)))

    def _compose(self, key: str, parts: Sequence[Part]) -> int:
        return cast(int, self._ask(Request("compose", key, (tuple(parts),))))

    def delete_many(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._ask(Request("delete", key))

    def now(self) -> float:
        return cast(float, self._ask(Request("now", "")))

    def abort_stale(self, older_than_s: float) -> int:
        return cast(int, self._ask(Request("abort_stale", "", (older_than_s,))))

    def _ask(self, request: Request) -> Any:
        """Where no answer is an error, not an outcome."""
        result = self._explored.send(request)
        if isinstance(result, WriteResult) and result.cause is not None:
            raise result.cause
        return result


class ExploredSimulation(Simulation):
    """A simulation whose `run` is done by an exploration."""

    bucket: ContentBucket
    scheduler: ExploredScheduler

    def __init__(self, *, chaos: Chaos, steps_max: int = 100_000) -> None:
        self.witness: Callable[[], Hashable] | None = None
        """Returns what the scenario remembers, and its checks look at."""
        self.recall: Callable[[list[Any]], object] | None = None
        """Remembers what the witness has said of several processes. Without it, all of them are
        performed again for each end."""
        self.mortal: Callable[[Owner], bool] = lambda _: True
        self.passing_s = 0.0
        """How much time passes at some moment, or never."""
        self.timed: tuple[Owner, ...] = ()
        self.stage: greenlet.greenlet | None = None
        """Where the scenario's own code runs, while an exploration is at it."""
        self.has_run = False
        self._preparations: dict[Owner, list[Callable[[], object]]] = {}
        self._steps_max = steps_max
        super().__init__(ScriptedChoices(), chaos=chaos, bucket=ContentBucket())
        self.bucket.runtime = SimulatedRuntime(self.scheduler, self._world, 0, lambda *_: None)

    # --- for scenarios ------------------------------------------------------------
    def prepare(self, process: Process, call: Callable[[], object]) -> None:
        """Do this for a process before it starts, and only in runs in which it takes part.

        It may read the bucket, and start the process's strands.
        """
        self._preparations.setdefault(process, []).append(call)

    def let_time_pass(self, seconds: float, *timed: Owner) -> None:
        """Add a step that moves the clocks, at any moment or never.

        For `timed` processes also between an effect and the moment when they hear of it.
        """
        self.passing_s = seconds
        self.timed = timed

    def run(self, until_s: float | None = None) -> None:
        """Hand over to the exploration; once, and to the end."""
        if self.has_run or until_s is not None or self.stage is None:
            raise RuntimeError("a scenario that is explored runs once, and to its end")
        self.has_run = True
        assert self.stage.parent is not None
        self.stage.parent.switch()

    # --- what the parts ask -------------------------------------------------------
    def prepared(self, owner: Owner) -> None:
        for call in self._preparations.pop(owner, []):
            call()

    def seam(self, process: Process, kind: str, what: str) -> None:
        """Only requests are steps; a clock that is read is something that is told."""
        self.scheduler.running()
        if kind == "clock":
            self.scheduler.note_clock()

    def store_of(self, process: Process) -> Store:
        return _Store(self, process)

    def send(self, request: Request) -> Any:
        """Return the answer to a request, when there is one."""
        strand = self.scheduler.running()
        if strand is None:
            return request.apply(self.bucket)  # before the run: a preparation
        return self.scheduler.ask(strand, request)

    # --- inside -------------------------------------------------------------------
    def _make_scheduler(self, steps_max: int) -> Scheduler:
        return ExploredScheduler(self._steps_max)

    def _make_runtime(self, process: Process, skew_s: float) -> SimulatedRuntime:
        return _Runtime(self, process, skew_s)


class Stage:
    """One performance of a scenario, held where it runs."""

    def __init__(self, scenario: Callable[[ExploredSimulation], object], chaos: Chaos) -> None:
        self.sim = ExploredSimulation(chaos=chaos)
        self.start_s = self.sim.scheduler.now_s
        self._body = greenlet.greenlet(lambda: scenario(self.sim))
        self.sim.stage = self._body
        self._body.switch()
        if not self.sim.has_run:
            raise RuntimeError("a scenario that is explored must run")

    def start(self, owner: Owner) -> None:
        """Let a process come as far as its first requests."""
        self.sim.prepared(owner)
        self.sim.scheduler.settle(owner)

    def give(self, owner: Owner, name: bytes, answer: Any, now_s: float) -> None:
        """Answer a strand's request."""
        scheduler = self.sim.scheduler
        scheduler.now_s = now_s
        [strand] = [s for s in scheduler.asking(owner) if scheduler.tracks[s].name == name]
        scheduler.answer(strand, answer)

    def end(self, objects: Objects, now_s: float) -> None:
        """Let the scenario look at the end of a history."""
        self.sim.bucket.load(objects)
        self.sim.scheduler.now_s = now_s
        self._body.switch()

    def close(self) -> None:
        self.sim.close()
        if not self._body.dead:
            self._body.throw(greenlet.GreenletExit)
