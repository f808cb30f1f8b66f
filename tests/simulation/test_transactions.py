"""Transactions are serializable, on many seeds; and the check would notice if they were not."""

import pytest

from reef.engine.handles.transaction import Footprints
from reef.testing import Chaos, SimulationFailed, simulate
from tests.simulation.scenarios import ROUGH
from tests.simulation.transaction_scenarios import concurrent_transactions

SEEDS = range(100)
BUSY = Chaos(latency_s=(0.001, 0.05))


def pipelined(sim):
    """The same with three PUTs in flight."""
    concurrent_transactions(sim, max_parallel_writes=3)


def independent(sim):
    """The same where each object is acknowledged as it lands."""
    concurrent_transactions(sim, max_parallel_writes=3, ack="independent")


@pytest.mark.parametrize("scenario", [concurrent_transactions, pipelined, independent])
@pytest.mark.parametrize("chaos", [BUSY, ROUGH], ids=["busy", "rough"])
def test_transactions_are_serializable(scenario, chaos):
    """What committed is as if it had run one by one, in the order of the log."""
    assert simulate(scenario, SEEDS, chaos=chaos) == len(SEEDS)


@pytest.mark.parametrize(
    "broken",
    [
        lambda reads: type(reads)(set(), reads.ranges),
        lambda reads: type(reads)(reads.keys, []),
    ],
    ids=["keys do not count", "H41: ranges do not count"],
)
def test_H41_a_missing_check_is_found(monkeypatch, broken):
    """H41: without tracking keys, or asked ranges, some seed shows a wrong read."""
    conflict = Footprints.conflict
    monkeypatch.setattr(
        Footprints, "conflict", lambda self, number, reads: conflict(self, number, broken(reads))
    )
    with pytest.raises(SimulationFailed):
        simulate(concurrent_transactions, range(300), chaos=BUSY)
