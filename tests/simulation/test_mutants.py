"""The scenarios are worth their time: each of these bugs is found, by the scenario named.

Two protections make up for each other: fences stay in their slots, and a slow PUT is proved
by the floor. Without either one alone no history goes wrong, so they are taken away together.
"""

import pytest

from reef.testing import SimulationFailed, simulate
from tests.simulation import mutants
from tests.simulation.scenarios import SCENARIOS

FOUND_BY = {
    mutants.window_without_the_tail: ("keyed_batches_again", 100),
    mutants.folds_without_a_floor_check: ("folders_race", 300),
    mutants.publishes_condemned_segments: ("rival_compactors", 300),
    mutants.no_epoch_check: ("openers_stall", 300),
    mutants.no_proof_of_slow_publishes: ("openers_stall", 600),
    mutants.reader_never_lists: ("zombies_and_sweeps", 600),
    mutants.collected_fences_and_no_proof: ("zombies_and_sweeps", 600),
}


@pytest.mark.parametrize("mutant", FOUND_BY, ids=lambda mutant: mutant.__name__)
def test_a_missing_protection_is_found(mutant, monkeypatch):
    """Some history within so many seeds breaks an invariant."""
    name, seeds = FOUND_BY[mutant]
    scenario, chaos = SCENARIOS[name]
    mutant(monkeypatch)
    with pytest.raises(SimulationFailed):
        simulate(scenario, range(seeds), chaos=chaos)
