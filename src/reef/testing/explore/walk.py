"""The graph of a scenario's states: the steps of each process, and their combinations.

A state is a tuple of numbers: of the bucket, of each process, of the requests that no process waits
for, and the counts. The effect of a request on a bucket is looked up in `Buckets`, the effect of a
response on a process in its `ProcessGraph`: both are computed by the real code, once. The steps of
one process depend on the bucket and itself alone, so that they are computed once for each pair, too
(`ExploredProcess`); `Walk` combines the processes.

In one step a request takes effect, and its process continues until it has sent the next one. A late
request takes effect at any later step; so does each request that a crashing process had in flight,
or it never does.

Some orders are not tried, because those steps commute (`Footprint` declares which).
`reduced=False` tries them all; the tests compare the ends.

- A call of a gather shares no memory with other fibers until it ends: if its request is private, or
  reads an object that cannot change any more, it runs first. So does a process if that is true of
  all its fibers: its steps commute with everything that others do, before or after.
- Of the reads of one gather, the first takes effect first: they commute with each other, and a
  process that deletes objects does so in that order too.
- A response is delivered together with the effect of its request if the process has no other
  request in flight: in between, other processes could do nothing that either side would notice. If
  another response waits for delivery, it is delivered before (at once) or after.
- A late request for a slot that is filled for good has landed: it never has an effect.
- A process crashes only right after a step of its own, and only if it leaves something that an
  earlier crash would not have left: a promise (the witness has changed), or a request that it has
  just sent and that takes effect. Everything that others did between that step and a later crash,
  they would have done after it; and a write that took effect before the crash is one that lands
  after it. A crash between two promises, without a step in between that others could notice, leaves
  the same bucket and fewer promises than a crash after both, and is not tried.

Reads have no faults of their own: a read whose response is lost is sent again, which equals a read
that comes later. Nor have private writes: no other process would notice.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, combinations

from reef.errors import UnavailableError
from reef.stores.base import Outcome, WriteResult
from reef.testing.explore.processes import (
    ExploredSimulation,
    Node,
    PendingRequest,
    ProcessGraph,
    ScenarioRuns,
)
from reef.testing.explore.states import Buckets, Fate, Footprint, Requests, Responses
from reef.testing.runtime import Deadlock
from reef.testing.simulation import Chaos

FAULT, CRASH = 2, 2 << 10
"""The counts of a state are one number: whether the clocks have advanced, faults, crashes."""


class Counts:
    """Faults and crashes so far, their bounds, and the time."""

    def __init__(self, chaos: Chaos, start_s: float, passing_s: float) -> None:
        self._times = (start_s, start_s + passing_s)
        self.start = int(passing_s == 0)
        self.fates = [
            *([Fate.LOST] if chaos.lost_response else []),
            *([Fate.FAILED] if chaos.fail_before else []),
            *([Fate.LATE] if chaos.late else []),
            *([Fate.CONFLICT] if chaos.conflict else []),
        ]
        self._faults_max = chaos.faults_max if self.fates else 0
        self._crashes_max = chaos.crashes_max if chaos.crash else 0

    def now_s(self, counts: int) -> float:
        return self._times[counts & 1]

    def may_pass(self, counts: int) -> bool:
        """Whether the clocks have still to advance."""
        return not counts & 1

    def passed(self, counts: int) -> int:
        return counts | 1

    def may_fail(self, counts: int) -> bool:
        return counts // FAULT % (CRASH // FAULT) < self._faults_max

    def may_crash(self, counts: int) -> bool:
        return counts // CRASH < self._crashes_max

    def context(self, counts: int) -> int:
        """Return the part of the counts on which the steps of a process depend."""
        return counts & 1 | self.may_fail(counts) << 1 | self.may_crash(counts) << 2


@dataclass(frozen=True, slots=True, eq=False)
class ProcessState:
    """A process at a node, and responses that were not delivered yet."""

    node: Node
    undelivered: tuple[tuple[PendingRequest, int], ...]
    pending: tuple[PendingRequest, ...]
    ended: bool
    """Whether a run need not wait for it."""
    gone: bool

    @property
    def waits(self) -> bool:
        """Whether it has no step to take."""
        return not self.pending and not self.undelivered


@dataclass(frozen=True, slots=True)
class Move:
    """One step, and where it leads."""

    bucket: int
    state: int
    counts: int
    late: tuple[int, ...] = ()
    """Requests that take effect later."""
    landed: int | None = None
    """The late request that takes effect by this step."""
    free: bool = False
    """Whether it commutes with the steps of all other processes."""
    source: str = ""
    description: str = ""


@dataclass(frozen=True, slots=True)
class Moves:
    """The steps of a process; with `first`, they may precede those of all others."""

    all: tuple[Move, ...]
    first: bool


class ExploredProcess:
    """One process: its states, by number, and the steps from each."""

    def __init__(
        self,
        name: str,
        graph: ProcessGraph,
        buckets: Buckets,
        counts: Counts,
        *,
        can_crash: bool,
        timed: bool,
        deletes: bool,
        has_witness: bool,
        reduced: bool,
    ) -> None:
        self.name = name
        self.graph = graph
        self._buckets = buckets
        self._counts = counts
        self._can_crash = can_crash
        self._timed = timed
        """Whether the clocks may advance between an effect and its response."""
        self._deletes = deletes
        self._has_witness = has_witness
        self._reduced = reduced
        self.states: list[ProcessState] = []
        self._numbers: dict[object, int] = {}
        self._moves: dict[tuple[int, int, int], Moves] = {}
        self._settled: dict[tuple[int, int, int], tuple[int, int]] = {}

    # --- states -------------------------------------------------------------------
    def number(self, node: Node, undelivered: tuple[tuple[PendingRequest, int], ...] = ()) -> int:
        """Return the number of a process at a node; of one that has ended, by its witness."""
        if node.done and not node.pending:
            return self._ended_number(node)
        key = (node, undelivered)
        number = self._numbers.get(key)
        if number is None:
            arrived = {pending.name for pending, _ in undelivered}
            pending = tuple(one for one in node.pending if one.name not in arrived)
            number = self._add(key, ProcessState(node, undelivered, pending, node.done, gone=False))
        return number

    def _ended_number(self, node: Node) -> int:
        """Return the number of a process that has ended or crashed."""
        key = (
            ("witness", node.witness)
            if self._has_witness and node.error is None
            else (node, "gone")
        )
        number = self._numbers.get(key)
        return (
            self._add(key, ProcessState(node, (), (), True, gone=True))
            if number is None
            else number
        )

    def _add(self, key: object, state: ProcessState) -> int:
        self._numbers[key] = len(self.states)
        self.states.append(state)
        return len(self.states) - 1

    # --- steps --------------------------------------------------------------------
    def moves(self, number: int, bucket: int, counts: int) -> Moves:
        """Return the steps that the process can take."""
        # A move leads to counts, so that all of them are part of the key.
        key = (number, bucket, counts)
        moves = self._moves.get(key)
        if moves is None:
            moves = self._moves[key] = self._all(number, bucket, counts)
        return moves

    def settled(self, number: int, bucket: int, counts: int) -> tuple[int, int]:
        """Return the states of process and bucket after all steps that need no decision."""
        key = (number, bucket, self._counts.context(counts))
        settled = self._settled.get(key)
        if settled is None:
            settled = self._settled[key] = self._settle(number, bucket, counts)
        return settled

    def crashes(
        self, number: int, bucket: int, counts: int, before: int | None = None
    ) -> Iterator[Move]:
        """Yield crashes that leave a state which no earlier crash would have left."""
        state = self.states[number]
        if not (self._can_crash and self._counts.may_crash(counts)):
            return
        if state.gone or state.node.error is not None:
            return
        sent = [one.request for one in state.pending if one.writes]
        sent = [request for request in sent if not self._is_free(bucket, request)]
        fresh = None
        if before is not None and self.states[before].node.witness == state.node.witness:
            fresh = set(sent) - {one.request for one in self.states[before].pending}
        gone = self._ended_number(state.node)
        for landing in chain.from_iterable(combinations(sent, n) for n in range(len(sent) + 1)):
            if fresh is None or not fresh.isdisjoint(landing):
                description = f"death  crash, {len(landing)} requests in flight"
                yield Move(bucket, gone, counts + CRASH, landing, description=description)

    # --- inside -------------------------------------------------------------------
    def _all(self, number: int, bucket: int, counts: int) -> Moves:
        state = self.states[number]
        if state.gone:
            return Moves((), first=False)
        if not self._reduced:
            return Moves(tuple(self._each(state, bucket, counts)), first=False)
        first = self._first(state, bucket, counts)
        moves = first or self._each(state, bucket, counts)
        return Moves(tuple(self._settled_move(move) for move in moves), first=bool(first))

    def _settled_move(self, move: Move) -> Move:
        """Return a move followed by all steps that need no decision."""
        state, bucket = self.settled(move.state, move.bucket, move.counts)
        return replace(move, state=state, bucket=bucket)

    def _settle(self, number: int, bucket: int, counts: int) -> tuple[int, int]:
        while True:
            first = self._first(self.states[number], bucket, counts)
            if len(first) != 1:
                return number, bucket
            number, bucket = first[0].state, first[0].bucket

    def _first(self, state: ProcessState, bucket: int, counts: int) -> list[Move]:
        """Return steps that commute with those of all other processes, if there are any."""
        free = [one for one in state.pending if self._is_free(bucket, one.request)]
        for one in free:
            if one.gather:
                return self._outcomes_of(state, one, bucket, counts)
        observes_time = self._timed and self._counts.may_pass(counts)
        if len(free) < len(state.pending) or (state.undelivered and observes_time):
            return []
        return self._each(state, bucket, counts)

    def _each(self, state: ProcessState, bucket: int, counts: int) -> list[Move]:
        gathers: set[str] = set()
        moves: list[Move] = []
        for one in state.pending:
            if one.gather and not one.writes and self._reduced:
                if one.gather in gathers:
                    continue  # an earlier read of the same gather is first
                gathers.add(one.gather)
            moves += self._outcomes_of(state, one, bucket, counts)
        for one, response in state.undelivered:
            rest = tuple(other for other in state.undelivered if other[0] is not one)
            number = self._deliver(state, one, response, rest, counts)
            description = f"gets   {self._buckets.describe(one.request)}"
            moves.append(
                Move(
                    bucket,
                    number,
                    counts,
                    free=True,
                    source=one.name.decode(),
                    description=description,
                )
            )
        return moves

    def _outcomes_of(
        self, state: ProcessState, one: PendingRequest, bucket: int, counts: int
    ) -> list[Move]:
        """Return the moves of a request, one for each of its possible fates."""
        fates = [Fate.OK]
        private = self._buckets.private(bucket, one.request)
        if one.writes and not private and self._counts.may_fail(counts):
            fates += self._counts.fates
        return [self._apply_fate(state, one, bucket, counts, fate) for fate in fates]

    def _apply_fate(
        self, state: ProcessState, one: PendingRequest, bucket: int, counts: int, fate: Fate
    ) -> Move:
        now_s = self._counts.now_s(counts)
        free = self._is_free(bucket, one.request)
        after, response = bucket, -1
        if fate in (Fate.OK, Fate.LOST):
            after, response = self._buckets.apply(bucket, one.request, now_s)
        if fate is Fate.CONFLICT:
            response = self._buckets.response_number(
                WriteResult(self._buckets.conflict(one.request))
            )
        elif fate is not Fate.OK:
            cause = UnavailableError(f"no response: {self._buckets.describe(one.request)}")
            response = self._buckets.response_number(WriteResult(Outcome.UNKNOWN, cause=cause))
        if self._is_delivered_apart(state, one, counts):
            undelivered = sorted((*state.undelivered, (one, response)), key=lambda u: u[0].name)
            number = self.number(state.node, tuple(undelivered))
        else:
            number = self._deliver(state, one, response, state.undelivered, counts)
        late = (one.request,) if fate is Fate.LATE else ()
        description = f"store  {self._buckets.describe(one.request)} {fate.value}"
        faults = counts + FAULT * (fate is not Fate.OK)
        return Move(after, number, faults, late, None, free, one.name.decode(), description)

    def _is_free(self, bucket: int, request: int) -> bool:
        return self._buckets.is_free(bucket, request, deleter=self._deletes)

    def _is_delivered_apart(self, state: ProcessState, one: PendingRequest, counts: int) -> bool:
        """Whether the response is delivered by a step of its own."""
        if not self._reduced or (self._timed and self._counts.may_pass(counts)):
            return True
        return not one.gather and len(state.pending) > 1

    def _deliver(
        self,
        state: ProcessState,
        one: PendingRequest,
        response: int,
        undelivered: tuple[tuple[PendingRequest, int], ...],
        counts: int,
    ) -> int:
        edge = (one.name, response, self._counts.now_s(counts))
        return self.number(self.graph.after(state.node, edge), undelivered)


State = tuple[int, ...]
Way = tuple[tuple[int | None, Move], ...]
"""A step, and the crashes right after it."""
BUCKET, LATE, COUNTS, LAST, SWITCHES, PROCESSES = range(6)


class Walk:
    """The graph of a scenario's states, computed on demand."""

    def __init__(
        self,
        scenario: Callable[[ExploredSimulation], object],
        *,
        chaos: Chaos,
        footprint: Footprint,
        switches_max: int | None = None,
        reduced: bool = True,
    ) -> None:
        self._bounded = switches_max is not None
        self._reduced = reduced
        self._scenario_runs = ScenarioRuns(scenario, chaos)
        self._requests, self._responses = Requests(footprint), Responses()
        self._buckets = Buckets(self._requests, self._responses)
        self._late: list[tuple[int, ...]] = [()]
        self._late_numbers: dict[tuple[int, ...], int] = {(): 0}
        self._begin(chaos, footprint, switches_max or 0)

    def _begin(self, chaos: Chaos, footprint: Footprint, switches: int) -> None:
        run = self._scenario_runs.start()
        sim = run.sim
        self.has_witness = sim.witness is not None
        deleter = footprint.deleter[0] if footprint.deleter else None
        names = [process.name for process in sim.processes]
        self._deleter = names.index(deleter) if deleter in names else None
        self._counts = Counts(chaos, run.start_s, sim.passing_s)
        self.processes = [
            ExploredProcess(
                process.name,
                ProcessGraph(self._scenario_runs, place, self._requests, self._responses),
                self._buckets,
                self._counts,
                can_crash=sim.can_crash(process),
                timed=process in sim.timed,
                deletes=process.name == deleter,
                has_witness=self.has_witness,
                reduced=self._reduced,
            )
            for place, process in enumerate(sim.processes)
        ]
        bucket = self._buckets.number(sim.bucket.objects)
        run.close()
        roots = [process.number(process.graph.root) for process in self.processes]
        root = [bucket, 0, self._counts.start, len(self.processes), switches, *roots]
        self._settle(root)
        self.root: State = tuple(root)

    @property
    def runs(self) -> int:
        """How often the scenario was run."""
        return self._scenario_runs.runs

    def close(self) -> None:
        for process in self.processes:
            process.graph.close()

    # --- the graph ----------------------------------------------------------------
    def steps(self, state: State) -> list[State]:
        """Return the states that one step, and perhaps crashes right after it, lead to."""
        return [after for after, _ in self._steps(state)]

    def without_switches(self, state: State) -> tuple[State, int]:
        """Split a state into the number of remaining switches and the rest."""
        if not self._bounded:
            return state, 0
        return (*state[:SWITCHES], *state[PROCESSES:]), state[SWITCHES]

    def describe(self, state: State, number: int) -> str:
        """Return the trace of the step to one of the states after this one."""
        moves = [
            f"{self._source_of(place, move):<24} {move.description}"
            for place, move in self._steps(state)[number][1]
        ]
        return "\n".join(moves)

    def _source_of(self, place: int | None, move: Move) -> str:
        return "bucket" if place is None else move.source or self.processes[place].name

    def is_end(self, state: State) -> bool:
        """Whether all processes have ended; raise the error of one that has failed."""
        for process, number in self._of(state):
            local = process.states[number]
            if local.node.error is not None:
                raise local.node.error
            if not local.ended:
                return False
        return state[LATE] == 0

    def end_key(self, state: State) -> object:
        """Return the part of an end on which the scenario's checks depend."""
        nodes = [process.states[number].node for process, number in self._of(state)]
        return state[BUCKET], *(node.witness if self.has_witness else node for node in nodes)

    def check(self, state: State) -> None:
        """Run the scenario's checks at an end."""
        run = self._scenario_runs.start()
        try:
            ends = [
                (process.graph, process.states[number].node) for process, number in self._of(state)
            ]
            if run.sim.recall is not None:
                run.sim.recall([node.witness for _, node in ends])
            else:
                for graph, node in ends:
                    graph.replay(node, run)
            run.end(self._buckets.objects(state[BUCKET]), self._counts.now_s(state[COUNTS]))
        finally:
            run.close()

    # --- inside -------------------------------------------------------------------
    def _of(self, state: State) -> Iterator[tuple[ExploredProcess, int]]:
        return zip(self.processes, state[PROCESSES:], strict=True)

    def _steps(self, state: State) -> list[tuple[State, Way]]:
        all_processes: list[tuple[int, int | None]] = [
            (n, None) for n in range(len(self.processes))
        ]
        states: list[tuple[State, Way]] = []
        if state == self.root or not self._reduced:
            states += self._with_crashes(state, (), all_processes)[1:]
        for place, move in self._moves(state):
            after, advanced = self._after(state, place, move)
            states += self._with_crashes(after, ((place, move),), advanced)
        return states

    def _with_crashes(
        self, state: State, way: Way, advanced: list[tuple[int, int | None]]
    ) -> list[tuple[State, Way]]:
        """Return a state, and those after a crash of processes that the last step has advanced."""
        found = [(state, way)]
        if not self._counts.may_crash(state[COUNTS]):
            return found
        for place, before in advanced:
            for known, known_way in list(found):
                local, bucket, counts = known[PROCESSES + place], known[BUCKET], known[COUNTS]
                for death in self.processes[place].crashes(local, bucket, counts, before):
                    after, _ = self._after(known, place, death)
                    found.append((after, (*known_way, (place, death))))
        return found

    def _moves(self, state: State) -> list[tuple[int | None, Move]]:
        """Return all possible steps; the place is None where no process takes it."""
        bucket, counts = state[BUCKET], state[COUNTS]
        found: list[tuple[int | None, Move]] = []
        for place, process in enumerate(self.processes):
            moves = process.moves(state[PROCESSES + place], bucket, counts)
            if moves.first:
                return [(place, move) for move in moves.all]
            found += [(place, move) for move in moves.all]
        found += [(None, self._landing(state, request)) for request in self._late[state[LATE]]]
        if self._counts.may_pass(counts):
            passed = Move(bucket, 0, counts=self._counts.passed(counts), description="time passes")
            found.append((None, passed))
        if not found:
            names = [a.name for a, number in self._of(state) if not a.states[number].ended]
            raise Deadlock(f"all wait for each other: {', '.join(names)}")
        if self._bounded and state[SWITCHES] <= 0:
            return [one for one in found if one[0] == state[LAST]] or found
        return found

    def _landing(self, state: State, request: int) -> Move:
        bucket, _ = self._buckets.apply(state[BUCKET], request, self._counts.now_s(state[COUNTS]))
        description = f"late   {self._requests.values[request].description}"
        return Move(bucket, 0, landed=request, counts=state[COUNTS], description=description)

    def _after(
        self, state: State, place: int | None, move: Move
    ) -> tuple[State, list[tuple[int, int | None]]]:
        """Return the state after a step, and the processes that have advanced, from which state."""
        after = list(state)
        after[BUCKET], after[COUNTS] = move.bucket, move.counts
        advanced: list[tuple[int, int | None]] = []
        if place is not None:
            after[PROCESSES + place] = move.state
            advanced.append((place, state[PROCESSES + place]))
        if move.late or move.landed is not None:
            late = [*self._late[state[LATE]], *move.late]
            if move.landed is not None:
                late.remove(move.landed)
            after[LATE] = self._late_number(late)
        if self._has_gone(place, move.state):
            after[BUCKET] = self._buckets.later(move.bucket)
        if after[BUCKET] != state[BUCKET] or move.late:
            advanced += self._settle(after)
        if self._bounded and not move.free:
            self._count_switch(state, place, after)
        return tuple(after), advanced

    def _has_gone(self, place: int | None, local: int) -> bool:
        """Whether this was the deleter's last step."""
        if place is None or place != self._deleter or not self._reduced:
            return False
        return self.processes[place].states[local].gone

    def _settle(self, after: list[int]) -> list[tuple[int, int]]:
        """Take the steps that need no decision; return the processes and their states before."""
        advanced: list[tuple[int, int]] = []
        if not self._reduced:
            return advanced
        for place, process in enumerate(self.processes):
            before = after[PROCESSES + place]
            local, after[BUCKET] = process.settled(before, after[BUCKET], after[COUNTS])
            if local != before:
                after[PROCESSES + place] = local
                advanced.append((place, before))
        if after[LATE]:
            late = self._late[after[LATE]]
            left = [one for one in late if not self._buckets.is_free(after[BUCKET], one)]
            if len(left) < len(late):
                after[LATE] = self._late_number(left)
        return advanced

    def _late_number(self, requests: list[int]) -> int:
        late = tuple(sorted(requests))
        number = self._late_numbers.get(late)
        if number is None:
            number = self._late_numbers[late] = len(self._late)
            self._late.append(late)
        return number

    def _count_switch(self, state: State, place: int | None, after: list[int]) -> None:
        """Count a switch: from a process that could continue, or to a step of no process."""
        last = state[LAST]
        if place != last and last < len(self.processes):
            after[SWITCHES] -= not self.processes[last].states[state[PROCESSES + last]].waits
        if place is not None:
            after[LAST] = place
