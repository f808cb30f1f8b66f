"""Runs one process of a scenario at a time, with every response supplied by the exploration.

A scenario is the same function that `simulate` runs. Here its `run` returns control to the
exploration, which resumes one process with the responses of some history and records the requests
that it sends next. At the end of a history all processes get the responses that they had in it, the
bucket gets the objects of that end, and `run` returns, so that the scenario's checks see it.

Processes of a scenario share the bucket only, and the state that the scenario keeps about one of
them must not depend on another: the exploration does not run them in the order of the history.

A fiber that sends a request stops until its response is delivered. A fiber that was started or
woken continues at once: until its next request it touches the memory of its process only. With
several threads in a process this is a bound: how the machine schedules woken threads is not
explored; the order in which responses arrive is. No wait ends by its timeout, because nothing takes
time here.

A process is a function of the responses that it has received, so that its code runs once for each
history of that process, however many histories of the whole contain it. `ProcessGraph` has a node
for each of these histories, with the requests that have no response yet. Nodes are identified by
hash chains (`reef.testing.explore.states`), so that several orders of responses to one gather
lead to the same node. A run that is paused at a node is kept for the next response; few are
kept, and without one the history is replayed from the start.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any, TypeVar, cast

import greenlet

from reef.runtime import Future
from reef.stores.base import ObjectInfo, Outcome, Part, Store, Tagged, WriteResult
from reef.testing.explore.states import (
    Chain,
    ContentBucket,
    ExploredRequest,
    FiberState,
    Objects,
    Requests,
    Responses,
    summary,
)
from reef.testing.runtime import (
    Fiber,
    Owner,
    Scheduler,
    ScriptedChoices,
    SimulatedRuntime,
    TooManySteps,
    fulfil,
)
from reef.testing.simulation import Chaos, Process, SimulatedStore, Simulation

RUNS_KEPT = 200


class ExploredScheduler(Scheduler):
    """Fibers that stop at requests, and hash chains of the responses that they have received."""

    def __init__(self, steps_max: int) -> None:
        super().__init__(ScriptedChoices(), steps_max)
        self.states: dict[Fiber, FiberState] = {}
        self.chains: dict[Owner, Chain] = {}
        self._spawned: dict[Owner, int] = {}

    def spawn(
        self, owner: Owner, call: Callable[[], object], name: str, *, daemon: bool = False
    ) -> Fiber:
        fiber = super().spawn(owner, call, name, daemon=daemon)
        number = self._spawned[owner] = self._spawned.get(owner, -1) + 1
        self.states[fiber] = FiberState(f"{name}:{number}".encode(), self.chain_of(owner))
        return fiber

    def spawn_alone(
        self, owner: Owner, call: Callable[[], object], chain: Chain, gather: str
    ) -> Fiber:
        """Start one call of a gather."""
        fiber = super().spawn(owner, call, f"{owner.name}/gather", daemon=True)
        self.states[fiber] = FiberState(chain.name.encode(), chain, gather)
        return fiber

    def chain_of(self, owner: Owner) -> Chain:
        if owner not in self.chains:
            self.chains[owner] = Chain(f"{len(self.chains)}-{owner.name}")
        return self.chains[owner]

    # --- called from fibers ------------------------------------------------------
    def note_clock(self) -> None:
        """Record that a fiber has read a clock."""
        if self.current is not None:
            self.states[self.current].chain.absorb(b"clock", str(self.now_s).encode())

    def ask(self, fiber: Fiber, request: ExploredRequest) -> Any:
        """Stop until the response is delivered; return it, or raise it."""
        state = self.states[fiber]
        state.request = request
        self._switch_out(fiber)
        response, state.response = state.response, None
        if isinstance(response, Exception):
            response.__context__ = None
            raise response.with_traceback(None)
        return response

    # --- called from outside ------------------------------------------------------
    def asking(self, owner: Owner) -> list[Fiber]:
        """Return the fibers of a process that wait for a response."""
        return [s for s, state in self.states.items() if state.request and s.owner is owner]

    def is_done(self, owner: Owner) -> bool:
        """Whether a run has no fiber of a process to wait for."""
        return all(s.finished or s.daemon for s in self.states if s.owner is owner)

    def respond(self, fiber: Fiber, response: Any) -> None:
        """Deliver a response, and run its process until all fibers wait."""
        state = self.states[fiber]
        state.chain.absorb(state.name, summary(response))
        state.request, state.response = None, response
        self._resume(fiber)
        self.settle(fiber.owner)

    def settle(self, owner: Owner) -> None:
        """Run the ready fibers of a process until all of them wait."""
        while woken := [fiber for fiber in self._ready if fiber.owner is owner]:
            fiber = woken[0]
            self._ready.remove(fiber)
            state = self.states[fiber]
            state.chain.absorb(state.name, b"timed out" if fiber.timed_out else b"on")
            self._resume(fiber)

    def _resume(self, fiber: Fiber) -> None:
        self.steps += 1
        if self.steps > self.steps_max:
            raise TooManySteps(f"not at an end after {self.steps_max} steps")
        self.current = fiber
        fiber.body.switch()
        self.current = None
        if fiber.error is not None:
            raise fiber.error


T = TypeVar("T")


class _Runtime(SimulatedRuntime):
    """Ids that depend on their process alone; gathers whose calls have chains of their own."""

    def __init__(self, world: "ExploredSimulation", process: Process, skew_s: float) -> None:
        scheduler = world.scheduler
        yield_point = partial(world.yield_point, process)
        super().__init__(scheduler, process, len(world.processes), yield_point, skew_s)
        self._fibers = scheduler
        self._chain = scheduler.chain_of(process)

    def random_bytes(self, count: int) -> bytes:
        fiber = self._fibers.current
        return (self._fibers.states[fiber].chain if fiber else self._chain).draw(count)

    def sleep(self, seconds: float) -> None:
        self._fibers.pause()

    def gather(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        me = self._fibers.current
        if len(calls) <= 1 or me is None or me in self._gathering:
            return [call() for call in calls]
        chain = self._fibers.states[me].chain
        futures = [self.future() for _ in calls]
        branches = [chain.branch() for _ in calls]
        settled = self.future()
        for future, call, branch in zip(futures, calls, branches, strict=True):
            future.add_done_callback(lambda _: _settle(settled, futures))
            one = partial(fulfil, future, partial(self._gather_one, call))
            self._fibers.spawn_alone(self._owner, one, branch, branches[0].name)
        try:
            settled.result()
            return [future.result() for future in futures]
        finally:
            ended = zip(branches, futures, strict=True)
            chain.join([branch for branch, future in ended if future.done()])


def _settle(settled: Future[Any], futures: list[Future[Any]]) -> None:
    """Wake the gathering fiber: at the end of all calls, or at the first error in order."""
    done = list(takewhile(lambda future: future.done(), futures))
    failed = any(future.exception() is not None for future in done)
    if not settled.done() and (failed or len(done) == len(futures)):
        settled.set_result(None)


class _Store(SimulatedStore):
    """Each call is a request that waits until the exploration delivers a response."""

    def __init__(self, world: "ExploredSimulation", process: Process) -> None:
        super().__init__(world.bucket, process)
        self._explored = world

    def get_tagged(self, key: str) -> Tagged:
        return cast(Tagged, self._ask(ExploredRequest("get_tagged", key)))

    def get_range(self, key: str, start: int, end: int) -> bytes:
        return cast(bytes, self._ask(ExploredRequest("get_range", key, (start, end))))

    def head(self, key: str) -> ObjectInfo:
        return cast(ObjectInfo, self._ask(ExploredRequest("head", key)))

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[ObjectInfo]:
        while True:
            page = self._ask(ExploredRequest("list", prefix, (start_after,)))
            yield from page
            if len(page) < self.capabilities.list_page:
                return
            start_after = page[-1].key

    def put(self, key: str, body: bytes) -> str | None:
        return cast(str, self._ask(ExploredRequest("put", key, (bytes(body),))))

    def create(self, key: str, body: bytes) -> WriteResult:
        request = ExploredRequest("create", key, (bytes(body),), Outcome.EXISTS)
        return cast(WriteResult, self._explored.send(request))

    def replace(self, key: str, body: bytes, tag: str) -> WriteResult:
        request = ExploredRequest("replace", key, (bytes(body), tag), Outcome.CHANGED)
        return cast(WriteResult, self._explored.send(request))

    def upload(self, key: str, parts: Iterable[bytes]) -> int:
        return cast(int, self._ask(ExploredRequest("upload", key, (tuple(map(bytes, parts)),))))

    def copy(self, source: str, target: str) -> None:
        self._ask(ExploredRequest("copy", target, (source,)))

    def _compose(self, key: str, parts: Sequence[Part]) -> int:
        return cast(int, self._ask(ExploredRequest("compose", key, (tuple(parts),))))

    def delete_many(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._ask(ExploredRequest("delete", key))

    def now(self) -> float:
        return cast(float, self._ask(ExploredRequest("now", "")))

    def abort_stale(self, older_than_s: float) -> int:
        return cast(int, self._ask(ExploredRequest("abort_stale", "", (older_than_s,))))

    def _ask(self, request: ExploredRequest) -> Any:
        """Send a request whose unknown outcome is an error."""
        result = self._explored.send(request)
        if isinstance(result, WriteResult) and result.cause is not None:
            raise result.cause
        return result


class ExploredSimulation(Simulation):
    """A simulation whose processes an exploration runs."""

    bucket: ContentBucket
    scheduler: ExploredScheduler

    def __init__(self, *, chaos: Chaos, steps_max: int = 100_000) -> None:
        self.witness: Callable[[], Hashable] | None = None
        """Returns the state of the scenario that its checks use."""
        self.recall: Callable[[list[Any]], object] | None = None
        """Restores that state from the witnesses of all processes. Without it, all of them are
        replayed for each end."""
        self.can_crash: Callable[[Owner], bool] = lambda _: True
        self.passing_s = 0.0
        """How far the clocks jump at some step, or never."""
        self.timed: tuple[Owner, ...] = ()
        self.stage: greenlet.greenlet | None = None
        """The greenlet of the scenario's own code."""
        self.has_run = False
        self._preparations: dict[Owner, list[Callable[[], object]]] = {}
        self._steps_max = steps_max
        super().__init__(ScriptedChoices(), chaos=chaos, bucket=ContentBucket())
        self.bucket.runtime = SimulatedRuntime(self.scheduler, self._world, 0, lambda *_: None)

    # --- for scenarios ------------------------------------------------------------
    def prepare(self, process: Process, call: Callable[[], object]) -> None:
        """Call this before a process starts, and only in runs in which it takes part.

        It may read the bucket, and start the process's fibers.
        """
        self._preparations.setdefault(process, []).append(call)

    def let_time_pass(self, seconds: float, *timed: Owner) -> None:
        """Add a step that advances the clocks, at any point or never.

        For `timed` processes also between the effect of a request and its response.
        """
        self.passing_s = seconds
        self.timed = timed

    def run(self, until_s: float | None = None) -> None:
        """Return control to the exploration; once, until the end of a history."""
        if self.has_run or until_s is not None or self.stage is None:
            raise RuntimeError("a scenario that is explored runs once, and to its end")
        self.has_run = True
        assert self.stage.parent is not None
        self.stage.parent.switch()

    # --- for processes ------------------------------------------------------------
    def prepared(self, owner: Owner) -> None:
        for call in self._preparations.pop(owner, []):
            call()

    def yield_point(self, process: Process, kind: str, detail: str) -> None:
        """Record a clock that is read; only requests are steps."""
        self.scheduler.running()
        if kind == "clock":
            self.scheduler.note_clock()

    def store_of(self, process: Process) -> Store:
        return _Store(self, process)

    def send(self, request: ExploredRequest) -> Any:
        """Return the response to a request, once it is delivered."""
        fiber = self.scheduler.running()
        if fiber is None:
            return request.apply(self.bucket)  # before the run: a preparation
        return self.scheduler.ask(fiber, request)

    # --- inside -------------------------------------------------------------------
    def _make_scheduler(self, steps_max: int) -> Scheduler:
        return ExploredScheduler(self._steps_max)

    def _make_runtime(self, process: Process, skew_s: float) -> SimulatedRuntime:
        return _Runtime(self, process, skew_s)


class PausedRun:
    """One run of a scenario, paused where its processes wait for responses."""

    def __init__(self, scenario: Callable[[ExploredSimulation], object], chaos: Chaos) -> None:
        self.sim = ExploredSimulation(chaos=chaos)
        self.start_s = self.sim.scheduler.now_s
        self._body = greenlet.greenlet(lambda: scenario(self.sim))
        self.sim.stage = self._body
        self._body.switch()
        if not self.sim.has_run:
            raise RuntimeError("a scenario that is explored must run")

    def start(self, owner: Owner) -> None:
        """Run a process until its first requests."""
        self.sim.prepared(owner)
        self.sim.scheduler.settle(owner)

    def deliver(self, owner: Owner, name: bytes, response: Any, now_s: float) -> None:
        """Deliver the response to a fiber's request."""
        scheduler = self.sim.scheduler
        scheduler.now_s = now_s
        [fiber] = [s for s in scheduler.asking(owner) if scheduler.states[s].name == name]
        scheduler.respond(fiber, response)

    def end(self, objects: Objects, now_s: float) -> None:
        """Run the checks of the scenario at the end of a history."""
        self.sim.bucket.load(objects)
        self.sim.scheduler.now_s = now_s
        self._body.switch()

    def close(self) -> None:
        self.sim.close()
        if not self._body.dead:
            self._body.throw(greenlet.GreenletExit)


# --- graphs of processes ------------------------------------------------------------


Edge = tuple[bytes, int, float]
"""A fiber, the number of the response that it receives, and the time."""


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A request without a response."""

    name: bytes
    request: int
    writes: bool
    gather: str
    """The gather whose call has sent it, if any."""


@dataclass(slots=True, eq=False)
class Node:
    """A process after some history of its own."""

    pending: tuple[PendingRequest, ...]
    done: bool
    """Whether a run need not wait for it."""
    witness: Hashable
    error: BaseException | None = None
    before: "tuple[Node, Edge] | None" = None
    """One path that leads here."""
    after: "dict[Edge, Node]" = field(default_factory=dict)

    def history(self) -> list[Edge]:
        edges: list[Edge] = []
        node = self
        while node.before is not None:
            node, edge = node.before
            edges.append(edge)
        return edges[::-1]


class ScenarioRuns:
    """Starts runs of a scenario, and counts them."""

    def __init__(self, scenario: Callable[[ExploredSimulation], object], chaos: Chaos) -> None:
        self._scenario = scenario
        self._chaos = chaos
        self.runs = 0

    def start(self) -> PausedRun:
        self.runs += 1
        return PausedRun(self._scenario, self._chaos)


class ProcessGraph:
    """The histories of one process, explored on demand."""

    def __init__(
        self, scenario_runs: ScenarioRuns, place: int, requests: Requests, responses: Responses
    ) -> None:
        self._scenario_runs = scenario_runs
        self._place = place
        self._requests = requests
        self._responses = responses
        self._nodes: dict[bytes, Node] = {}
        self._kept: dict[Node, PausedRun] = {}
        self.root = self._begin()

    def __len__(self) -> int:
        return len(self._nodes)

    def after(self, node: Node, edge: Edge) -> Node:
        """Return the node that a response leads to."""
        found = node.after.get(edge)
        if found is None:
            run = self._kept.pop(node, None) or self.replay(node)
            found = node.after[edge] = self._visit(run, (node, edge))
        return found

    def replay(self, node: Node, run: PausedRun | None = None) -> PausedRun:
        """Bring the process to a node, in a new run or a given one."""
        if run is None:
            run = self._scenario_runs.start()
        run.start(run.sim.processes[self._place])
        for edge in node.history():
            self._deliver_edge(run, edge)
        return run

    def close(self) -> None:
        for run in self._kept.values():
            run.close()
        self._kept.clear()

    # --- inside -------------------------------------------------------------------
    def _begin(self) -> Node:
        run = self._scenario_runs.start()
        return self._visit(run, None)

    def _deliver_edge(self, run: PausedRun, edge: Edge) -> None:
        name, response, now_s = edge
        run.deliver(run.sim.processes[self._place], name, self._responses.values[response], now_s)

    def _visit(self, run: PausedRun, before: tuple[Node, Edge] | None) -> Node:
        error: BaseException | None = None
        owner = run.sim.processes[self._place]
        try:
            if before is None:
                run.start(owner)
            else:
                self._deliver_edge(run, before[1])
        except Exception as caught:
            error = caught.with_traceback(None)
        key = run.sim.scheduler.chain_of(owner).whole()
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = self._node(run, error, before)
        self._keep(node, run)
        return node

    def _node(
        self, run: PausedRun, error: BaseException | None, before: tuple[Node, Edge] | None
    ) -> Node:
        sim, owner = run.sim, run.sim.processes[self._place]
        states = [sim.scheduler.states[fiber] for fiber in sim.scheduler.asking(owner)]
        pending = [
            PendingRequest(state.name, self._requests.number(sent), sent.writes, state.gather)
            for state in sorted(states, key=lambda state: state.name)
            if (sent := state.request) is not None
        ]
        witness = None if sim.witness is None else sim.witness()
        return Node(tuple(pending), sim.scheduler.is_done(owner), witness, error, before)

    def _keep(self, node: Node, run: PausedRun) -> None:
        if node in self._kept or node.error is not None or not node.pending:
            run.close()
            return
        self._kept[node] = run
        if len(self._kept) > RUNS_KEPT:
            self._kept.pop(next(iter(self._kept))).close()
