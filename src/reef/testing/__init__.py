"""Tools that Reef is tested with, shipped so that you can test with them too.

`StoreContract` is the suite that every store must pass. `simulate`, `explore` and
`crash_points` run ordinary code against a simulated bucket, at random from a seed, through
all histories, or through all deaths. Needs the extra `testing`.
"""

from typing import TYPE_CHECKING, Any

from reef.testing.crashes import CrashPoint, crash_points
from reef.testing.explore import ExplorationFailed, Explored, explore, replay
from reef.testing.files import SimulatedDisk, SimulatedFiles
from reef.testing.simulation import Chaos, Process, Simulation, SimulationFailed, simulate

if TYPE_CHECKING:
    from reef.testing.contract import StoreContract

__all__ = [
    "Chaos",
    "CrashPoint",
    "ExplorationFailed",
    "Explored",
    "Process",
    "SimulatedDisk",
    "SimulatedFiles",
    "Simulation",
    "SimulationFailed",
    "StoreContract",
    "crash_points",
    "explore",
    "replay",
    "simulate",
]


def __getattr__(name: str) -> Any:
    """Load the contract suite on demand: it needs pytest, the simulator does not."""
    if name == "StoreContract":
        from reef.testing.contract import StoreContract

        return StoreContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
