"""Tools that Reef is tested with, shipped so that you can test with them too.

`StoreContract` is the suite that every store must pass. `simulate`, `explore` and
`crash_points` run ordinary code against a simulated bucket, at random from a seed, through
all histories, or through all deaths. Needs the extra `testing`.
"""

from typing import TYPE_CHECKING, Any

from reef.testing.crashes import CrashPoint, crash_points
from reef.testing.explore import (
    ExplorationFailed,
    Explored,
    explore,
    explore_states,
    replay,
    replay_states,
)
from reef.testing.explored import ExploredSimulation
from reef.testing.files import SimulatedDisk, SimulatedFiles
from reef.testing.simulation import Chaos, Process, Simulation, SimulationFailed, simulate
from reef.testing.states import Footprint

if TYPE_CHECKING:
    from reef.testing.contract import StoreContract

__all__ = [
    "Chaos",
    "CrashPoint",
    "ExplorationFailed",
    "Explored",
    "ExploredSimulation",
    "Footprint",
    "Process",
    "SimulatedDisk",
    "SimulatedFiles",
    "Simulation",
    "SimulationFailed",
    "StoreContract",
    "crash_points",
    "explore",
    "explore_states",
    "replay",
    "replay_states",
    "simulate",
]


def __getattr__(name: str) -> Any:
    """Load the contract suite on demand: it needs pytest, the simulator does not."""
    if name == "StoreContract":
        from reef.testing.contract import StoreContract

        return StoreContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
