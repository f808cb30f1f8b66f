"""All histories of a small scenario, not a sample.

Each run follows a script of decisions; the next script changes the last decision that
had another option. With few processes, switches only at store calls and a bound on
faults, the tree is small enough to walk to its end: `explore`.

The tree has the same state in many places, so `explore_states` walks each state once, and runs
the code of a process once for each history of that process, not of the whole. That takes two
openers, a writer in flight, deaths and late requests out of what cannot be done into what takes
minutes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reef.testing.choices import ScriptedChoices
from reef.testing.explored import ExploredSimulation
from reef.testing.simulation import CALM, Chaos, Simulation
from reef.testing.states import Footprint
from reef.testing.walk import State, Walk

__all__ = ["ExplorationFailed", "Explored", "explore", "explore_states", "replay", "replay_states"]

RUNS_MAX = 1_000_000
STATES_MAX = 1_000_000_000
PROGRESS_STATES = 10_000
TRACE_SHOWN = 60


class ExplorationFailed(AssertionError):
    """A history broke an invariant. Its script brings it back."""

    def __init__(
        self, script: list[int], cause: BaseException, trace: Sequence[object] = ()
    ) -> None:
        shown = "".join(f"\n{step}" for step in trace[-TRACE_SHOWN:])
        super().__init__(f"script {script}: {type(cause).__name__}: {cause}{shown}")
        self.script = script


@dataclass(frozen=True, slots=True)
class Explored:
    """How far an exploration got."""

    histories: int
    """Runs of the scenario; where states are told apart, to find out what one process does."""
    complete: bool
    """Whether nothing is left to try within the bounds that were given."""
    states: int = 0
    """Decisions that differ; this and the following only where states are told apart."""
    steps: int = 0
    ends: int = 0
    """Ends that differ, each of which the scenario has checked."""


def explore(
    scenario: Callable[[Simulation], object],
    *,
    chaos: Chaos = CALM,
    switch_at: frozenset[str] = frozenset({"store"}),
    runs_max: int = RUNS_MAX,
) -> Explored:
    """Run `scenario` through every history; ExplorationFailed at the first bad one."""
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
    """Walk through every state of `scenario`; ExplorationFailed at the first bad history.

    What a state is, and why cutting is sound: `reef.testing.states`; which orders are left out
    because they come to the same: `reef.testing.walk`. `switches_max` bounds how often a process
    is left that could go on; within that bound too, nothing is left out. `progress` is called
    now and then, and ends the walk by returning True.
    """
    walk = Walk(
        scenario, chaos=chaos, footprint=footprint, switches_max=switches_max, reduced=reduced
    )
    try:
        return _Search(walk, states_max, progress).run()
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
    """Run the one history of `explore_states` that a script tells, with the same bounds."""
    walk = Walk(scenario, chaos=chaos, footprint=footprint, switches_max=switches_max)
    try:
        _follow(walk, script)
    finally:
        walk.close()


def _follow(walk: Walk, script: list[int]) -> None:
    """Take the steps that a script tells; where it has run out, the first one each time."""
    state, told, left = walk.root, [], list(script)
    try:
        while not walk.is_end(state):
            after = walk.steps(state)
            place = left.pop(0) if len(after) > 1 and left else 0
            told.append(walk.told(state, place))
            state = after[place]
        walk.check(state)
    except Exception as error:
        raise ExplorationFailed(script, error, told) from error


class _Search:
    """Depth first through all states, each once."""

    def __init__(self, walk: Walk, states_max: int, progress: Callable[[Explored], object]) -> None:
        self._walk = walk
        self._states_max = states_max
        self._progress = progress
        self._seen: dict[State, int] = {}
        """With how many switches left each state was seen."""
        self._ends: set[object] = set()
        self._steps = 0
        self._stopped = False
        self._path: list[tuple[list[State], int]] = []
        """Decisions on the way to where the search stands: the options, and which was taken."""

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
            raise ExplorationFailed(script, error) from error  # it did not come back
        return self._so_far(complete=not self._path)

    def _enter(self, state: State) -> None:
        """Go on from a state until there is a decision to make, or nothing new."""
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
        """Whether something can happen from here that was not looked into."""
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
    """Run the one history that a script tells."""
    choices = ScriptedChoices(script)
    sim = Simulation(choices, chaos=chaos, switch_at=switch_at)
    try:
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
