"""`make sim`: many seeds of every scenario, or one seed again (`make sim SEED=17 SEEDS=1`).

`STORE=two-phase` runs them on a bucket without conditional writes, with a register beside it.
"""

import argparse
import sys
import time

from reef.testing import Simulation, SimulationFailed, simulate
from tests.simulation.scenarios import SCENARIOS
from tests.simulation.two_phase_register import NEED_IF_MATCH, TwoPhaseSimulation

WORLDS = {"native": Simulation, "two-phase": TwoPhaseSimulation}


def main() -> int:
    """Run the seeds; 1 at the first failure, with its seed and its trace."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--scenario", choices=sorted(SCENARIOS))
    parser.add_argument("--store", choices=sorted(WORLDS), default="native")
    arguments = parser.parse_args()
    world = WORLDS[arguments.store]
    for name, (scenario, chaos) in SCENARIOS.items():
        if world is TwoPhaseSimulation and name in NEED_IF_MATCH:
            continue
        if arguments.scenario in (None, name):
            start_s = time.perf_counter()
            seeds = range(arguments.seed, arguments.seed + arguments.seeds)
            try:
                count = simulate(scenario, seeds, chaos=chaos, world=world)
            except SimulationFailed as failure:
                print(f"{name}: {failure}", file=sys.stderr)
                again = f"make sim SEED={failure.seed} SEEDS=1 STORE={arguments.store}"
                print(f"replay: {again}", file=sys.stderr)
                return 1
            took_s = time.perf_counter() - start_s
            print(f"{name:<28} {count:>7} seeds  {took_s:8.1f} s  {count / took_s:8.0f} a second")
    return 0


if __name__ == "__main__":
    sys.exit(main())
