"""The test tools of Reef, for tests of programs that use it. Needs the extra `testing`.

`StoreContract` is the suite that every store must pass. `open_store` opens a store whose requests
are slow (`Latency`) or fail (`Faults`); `Recorder` records them. `simulate`, `explore` and
`crash_points` run ordinary code against a simulated bucket: at random from a seed, through all
histories, or through all crashes of a process.
"""

from typing import TYPE_CHECKING, Any

from reef.testing.disk import SimulatedDisk, SimulatedFiles
from reef.testing.explore import (
    ExplorationFailed,
    Explored,
    ExploredSimulation,
    Footprint,
    explore,
    explore_states,
    replay,
    replay_states,
)
from reef.testing.simulation import (
    Chaos,
    CrashPoint,
    Process,
    Simulation,
    SimulationFailed,
    crash_points,
    simulate,
)
from reef.testing.wrappers import (
    PROFILES,
    Call,
    Fault,
    Faults,
    Latency,
    LatencyProfile,
    Recorder,
    Rule,
    open_store,
)

if TYPE_CHECKING:
    from reef.testing.contract import StoreContract

__all__ = [
    "PROFILES",
    "Call",
    "Chaos",
    "CrashPoint",
    "ExplorationFailed",
    "Explored",
    "ExploredSimulation",
    "Fault",
    "Faults",
    "Footprint",
    "Latency",
    "LatencyProfile",
    "Process",
    "Recorder",
    "Rule",
    "SimulatedDisk",
    "SimulatedFiles",
    "Simulation",
    "SimulationFailed",
    "StoreContract",
    "crash_points",
    "explore",
    "explore_states",
    "open_store",
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
