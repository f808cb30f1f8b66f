"""All histories of a small scenario, not a sample.

Each run follows a script of decisions; the next script changes the last decision that
had another option. With few processes, switches only at store calls and a bound on
faults, the tree is small enough to walk to its end.
"""

from collections.abc import Callable
from dataclasses import dataclass

from reef.testing.choices import ScriptedChoices
from reef.testing.simulation import CALM, Chaos, Simulation

__all__ = ["ExplorationFailed", "Explored", "explore"]

RUNS_MAX = 1_000_000


class ExplorationFailed(AssertionError):
    """A history broke an invariant. Its script brings it back."""

    def __init__(self, script: list[int], cause: BaseException) -> None:
        super().__init__(f"script {script}: {type(cause).__name__}: {cause}")
        self.script = script


@dataclass(frozen=True, slots=True)
class Explored:
    """How far an exploration got."""

    histories: int
    complete: bool


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
