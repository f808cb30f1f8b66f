"""All histories of a small scenario, instead of a sample.

Each run follows a script of decisions; the next script changes the last decision that had another
option. With few processes, switches only at store calls and a bound on faults, the tree is small
enough to be walked completely: `explore`.

The tree has the same state in many places, so that `explore_states` walks each state once, and runs
the code of a process once for each history of that process, not of the whole. Two openers, a writer
with requests in flight, crashes and late requests then take minutes.

    states       identities of states: buckets, requests, responses, hash chains
    processes    runs one process at a time, with the responses of its history
    walk         the steps of one process, the graph of the states of all; which orders need not
                 be tried, and why
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reef.testing.explore.processes import ExploredSimulation
from reef.testing.explore.states import Footprint
from reef.testing.explore.walk import State, Walk
from reef.testing.runtime import ScriptedChoices
from reef.testing.simulation import CALM, Chaos, Simulation, without_collections

__all__ = [
    "ExplorationFailed",
    "Explored",
    "ExploredSimulation",
    "Footprint",
    "explore",
    "explore_states",
    "replay",
    "replay_states",
]


RUNS_MAX = 1_000_000
STATES_MAX = 1_000_000_000
PROGRESS_STATES = 10_000
TRACE_SHOWN = 60


class ExplorationFailed(AssertionError):
    """A history broke an invariant; its script reproduces it."""

    def __init__(
        self, script: list[int], cause: BaseException, trace: Sequence[object] = ()
    ) -> None:
        shown = "".join(f"\n{step}" for step in trace[-TRACE_SHOWN:])
        super().__init__(f"script {script}: {type(cause).__name__}: {cause}{shown}")
        self.script = script


@dataclass(frozen=True, slots=True)
class Explored:
    """The extent of an exploration."""

    histories: int
    """Runs of the scenario; of `explore_states`, those of single processes."""
    complete: bool
    """Whether everything within the given bounds was tried."""
    states: int = 0
    """States with a decision; this and the following only of `explore_states`."""
    steps: int = 0
    ends: int = 0
    """Distinct ends, each of which the scenario has checked."""


def explore(
    scenario: Callable[[Simulation], object],
    *,
    chaos: Chaos = CALM,
    switch_at: frozenset[str] = frozenset({"store"}),
    runs_max: int = RUNS_MAX,
) -> Explored:
    """Run every history of `scenario`; raise ExplorationFailed at the first that fails."""
    script: list[int] | None = []
    histories = 0
    while script is not None and histories < runs_max:
        script = _next_script(replay(scenario, script, chaos=chaos, switch_at=switch_at))
        histories += 1
    return Explored(histories, complete=script is None)


def explore_states(
    scenario: Callable[[ExploredSimulation], object],
    *,
    chaos: Chaos = CALM,
    footprint: Footprint = Footprint(),  # noqa: B008 - frozen
    switches_max: int | None = None,
    states_max: int = STATES_MAX,
    reduced: bool = True,
    progress: Callable[[Explored], object] = lambda _: None,
) -> Explored:
    """Visit every state of `scenario`; raise ExplorationFailed at the first history that fails.

    `reef.testing.explore.states` defines a state, and says why each needs to be visited only once;
    `reef.testing.explore.walk` says which orders are not tried because they lead to the same.
    `switches_max` bounds how often a process that could continue is preempted; within that bound,
    too, nothing is left out. `progress` is called now and then; the walk ends if it returns True.
    """
    walk = Walk(
        scenario, chaos=chaos, footprint=footprint, switches_max=switches_max, reduced=reduced
    )
    try:
        return _StateSearch(walk, states_max, progress).run()
    finally:
        walk.close()


def replay_states(
    scenario: Callable[[ExploredSimulation], object],
    script: list[int],
    *,
    chaos: Chaos = CALM,
    footprint: Footprint = Footprint(),  # noqa: B008 - frozen
    switches_max: int | None = None,
) -> None:
    """Run the history of `explore_states` that a script selects, with the same bounds."""
    walk = Walk(scenario, chaos=chaos, footprint=footprint, switches_max=switches_max)
    try:
        _follow(walk, script)
    finally:
        walk.close()


def _follow(walk: Walk, script: list[int]) -> None:
    """Take the steps of a script; behind its end, the first one each time."""
    state, trace, left = walk.root, [], list(script)
    try:
        while not walk.is_end(state):
            after = walk.steps(state)
            place = left.pop(0) if len(after) > 1 and left else 0
            trace.append(walk.describe(state, place))
            state = after[place]
        walk.check(state)
    except Exception as error:
        raise ExplorationFailed(script, error, trace) from error


class _StateSearch:
    """Depth-first search through all states, each once."""

    def __init__(self, walk: Walk, states_max: int, progress: Callable[[Explored], object]) -> None:
        self._walk = walk
        self._states_max = states_max
        self._progress = progress
        self._seen: dict[State, int] = {}
        """How many switches were left when a state was visited."""
        self._ends: set[object] = set()
        self._steps = 0
        self._stopped = False
        self._path: list[tuple[list[State], int]] = []
        """Decisions that lead to the current state: the options, and which was taken."""

    def run(self) -> Explored:
        try:
            self._enter(self._walk.root)
            while self._path and not self._stopped:
                states, place = self._path.pop()
                if place + 1 < len(states):
                    self._path.append((states, place + 1))
                    self._enter(states[place + 1])
        except Exception as error:
            script = [place for _, place in self._path]
            _follow(self._walk, script)
            raise ExplorationFailed(script, error) from error  # it did not recur
        return self._so_far(complete=not self._path)

    def _enter(self, state: State) -> None:
        """Continue from a state to the next decision, or to a state that was visited before."""
        while not self._walk.is_end(state):
            after = self._walk.steps(state)
            self._steps += len(after)
            if len(after) == 1:
                state = after[0]
                continue
            if not self._is_new(state):
                return
            self._path.append((after, 0))
            state = after[0]
        key = self._walk.end_key(state)
        if key not in self._ends:
            self._ends.add(key)
            self._walk.check(state)

    def _is_new(self, state: State) -> bool:
        """Whether a state was not visited with at least as many switches left."""
        key, left = self._walk.without_switches(state)
        if self._seen.get(key, -1) >= left:
            return False
        self._seen[key] = left
        if len(self._seen) >= self._states_max:
            self._stopped = True
        elif len(self._seen) % PROGRESS_STATES == 0:
            self._stopped |= self._progress(self._so_far(complete=False)) is True
        return True

    def _so_far(self, *, complete: bool) -> Explored:
        return Explored(self._walk.runs, complete, len(self._seen), self._steps, len(self._ends))


def replay(
    scenario: Callable[[Simulation], object],
    script: list[int],
    *,
    chaos: Chaos = CALM,
    switch_at: frozenset[str] = frozenset({"store"}),
) -> ScriptedChoices:
    """Run the history that a script selects."""
    choices = ScriptedChoices(script)
    sim = Simulation(choices, chaos=chaos, switch_at=switch_at)
    try:
        with without_collections():
            scenario(sim)
    except Exception as error:
        raise ExplorationFailed(choices.taken, error) from error
    finally:
        sim.close()
    return choices


def _next_script(choices: ScriptedChoices) -> list[int] | None:
    taken = list(choices.taken)
    while taken and taken[-1] + 1 >= choices.widths[len(taken) - 1]:
        taken.pop()
    if not taken:
        return None
    return [*taken[:-1], taken[-1] + 1]
