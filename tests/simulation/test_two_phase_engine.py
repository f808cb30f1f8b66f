"""The engine's scenarios on a bucket without conditional writes, with a register.

A sample of seeds; `make sim STORE=two-phase` runs as many as wanted.
"""

import pytest

from reef.testing import SimulationFailed, simulate
from tests.simulation.scenarios import SCENARIOS
from tests.simulation.two_phase_mutants import silence_means_won
from tests.simulation.two_phase_register import NEED_IF_MATCH, TwoPhaseSimulation

SEEDS = 2


@pytest.mark.parametrize("name", sorted(set(SCENARIOS) - NEED_IF_MATCH))
def test_a_scenario_holds_on_two_phase(name):
    """All observations of clients hold, with crashes, lost responses and late requests."""
    scenario, chaos = SCENARIOS[name]
    assert simulate(scenario, range(SEEDS), chaos=chaos, world=TwoPhaseSimulation) == SEEDS


def test_a_broken_register_is_found(monkeypatch):
    """The sample is on two-phase indeed: an insert that is taken for granted breaks it."""
    scenario, chaos = SCENARIOS["racing_creators"]
    silence_means_won(monkeypatch)
    with pytest.raises(SimulationFailed):
        simulate(scenario, range(500), chaos=chaos, world=TwoPhaseSimulation)
