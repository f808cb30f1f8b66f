"""All histories of a small scenario, not a sample.

Each run follows a script of decisions; the next script changes the last decision that
had another option. With few processes, switches only at store calls and a bound on
faults, the tree is small enough to walk to its end: `explore`.

The tree has the same state in many places, so `explore_states` walks each state once: a run
that comes to a state which was seen before ends there. That takes a scenario from two openers
and a writer in flight out of what cannot be done into what takes minutes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reef.testing.choices import ScriptedChoices
from reef.testing.explored import ExploredSimulation
from reef.testing.simulation import CALM, Chaos, Simulation, Step
from reef.testing.states import Cut, Footprint, Seen

__all__ = ["ExplorationFailed", "Explored", "explore", "explore_states", "replay", "replay_states"]

RUNS_MAX = 1_000_000
PROGRESS_RUNS = 1000
TRACE_SHOWN = 60


class ExplorationFailed(AssertionError):
    """A history broke an invariant. Its script brings it back."""

    def __init__(self, script: list[int], cause: BaseException, trace: Sequence[Step] = ()) -> None:
        shown = "".join(f"\n{step}" for step in trace[-TRACE_SHOWN:])
        super().__init__(f"script {script}: {type(cause).__name__}: {cause}{shown}")
        self.script = script


@dataclass(frozen=True, slots=True)
class Explored:
    """How far an exploration got."""

    histories: int
    """Runs, those that were cut included."""
    complete: bool
    """Whether nothing is left to try within the bounds that were given."""
    states: int = 0
    """Decisions and ends that differ; only where states are told apart."""


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
    runs_max: int = RUNS_MAX,
    progress: Callable[[Explored], object] = lambda _: None,
) -> Explored:
    """Run `scenario` through every state; ExplorationFailed at the first bad history.

    What a state is, and why cutting is sound: `reef.testing.states`. `switches_max` bounds how
    often a process is left that could go on; within that bound too, nothing is left out.
    """
    script: list[int] | None = []
    histories, seen = 0, Seen()
    while script is not None and histories < runs_max:
        choices = ScriptedChoices(script)
        sim = ExploredSimulation(
            choices,
            chaos=chaos,
            footprint=footprint,
            seen=seen,
            script_length=len(script),
            switches_max=switches_max,
        )
        _run(scenario, sim, choices)
        script = _next_script(choices)
        histories += 1
        if histories % PROGRESS_RUNS == 0:
            progress(Explored(histories, script is None, len(seen)))
    return Explored(histories, script is None, len(seen))


def replay_states(
    scenario: Callable[[ExploredSimulation], object],
    script: list[int],
    *,
    chaos: Chaos = CALM,
    footprint: Footprint = Footprint(),  # noqa: B008 - frozen
    switches_max: int | None = None,
) -> ScriptedChoices:
    """Run the one history of `explore_states` that a script tells, with the same bounds."""
    choices = ScriptedChoices(script)
    sim = ExploredSimulation(choices, chaos=chaos, footprint=footprint, switches_max=switches_max)
    _run(scenario, sim, choices)
    return choices


def _run(
    scenario: Callable[[ExploredSimulation], object],
    sim: ExploredSimulation,
    choices: ScriptedChoices,
) -> None:
    try:
        scenario(sim)
    except Cut:
        pass
    except Exception as error:
        raise ExplorationFailed(choices.taken, error, sim.trace) from error
    finally:
        sim.close()


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
