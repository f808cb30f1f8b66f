"""The catalog is strictly serializable, on many seeds; and the check would notice if it were not.

`python -m tests.simulation --scenario concurrent_catalog_sessions --seeds 5000` runs more of them.
"""

from contextlib import suppress

import pytest

from reef.catalog import Catalog, catalog, commit
from reef.catalog import snapshot as pinning
from reef.catalog import upkeep as collection
from reef.catalog.commit import ConflictSet
from reef.errors import ReefError
from reef.stores import agree_on_cas
from reef.testing import Chaos, SimulationFailed, crash_points, simulate
from tests.simulation.catalog_scenarios import SHORT, concurrent_catalog_sessions
from tests.simulation.scenarios import SCENARIOS

BUSY = Chaos(latency_s=(0.001, 0.05))
STALLING = Chaos(latency_s=(0.001, 0.05), stall=0.02, stall_s=(0.1, 2.5), lost_response=0.03)
"""Stalls that a lease outlives."""


def test_catalogs_are_serializable():
    """Committed transactions are serializable; outcomes are right; nothing is lost.

    The first 50 seeds of each scenario are run with those of all others, in test_finding_bugs.
    """
    scenario, chaos = SCENARIOS["concurrent_catalog_sessions"]
    assert simulate(scenario, range(50, 150), chaos=chaos) == 100


def test_H21_a_collected_name_is_no_proof():
    """H21: seed 4752 once made `resolve` take a name freed by collection for its own commit."""
    scenario, chaos = SCENARIOS["concurrent_catalog_sessions"]
    assert simulate(scenario, [4752], chaos=chaos) == 1


@pytest.mark.parametrize("victim", ["writer", "upkeep"])
def test_H21_a_death_at_each_point(victim):
    """H21: wherever a process crashes, others continue; acknowledged commits are applied once."""
    reported = []

    def scenario(sim):
        agree_on_cas(sim.bucket)
        reported.clear()
        writer, upkeep = sim.process("writer"), sim.process("upkeep")

        def write():
            catalog = Catalog(writer.store(), retention=SHORT)
            for number in (1, 2):
                catalog.transact(lambda s, n=number: s.put("n", b"%d" % n))
                reported.append(number)

        def tidy():
            catalog = Catalog(upkeep.store(), retention=SHORT)
            for _ in range(2):
                upkeep.runtime.sleep(0.2)
                with suppress(ReefError):
                    catalog.compactor(compact_after=1).run_once()

        writer.spawn(write)
        upkeep.spawn(tidy)
        sim.run()

    points = 0
    for point in crash_points(scenario, victim):
        points += 1
        bucket = point.simulation.bucket
        bucket.delete_many([info.key for info in bucket.list("leases/")])  # they have expired
        catalog = Catalog(bucket, retention=SHORT)
        catalog.recover_orphans()
        found = int(catalog.get_latest("n") or 0)
        assert max(reported, default=0) <= found <= max(reported, default=0) + 1, point.site
        catalog.compactor().compact_and_gc()
        assert catalog.verify().problems == [], point.site
        assert int(catalog.get_latest("n") or 0) == found
    assert points > 20


def _only_keys(self, segment):
    return next((key for key in segment.records if key in self.keys), None)


def _only_ranges(self, segment):
    return next((k for k in segment.records if any(r.has(k) for r in self.ranges)), None)


MUTANTS = {
    "phantoms: ranges do not count": (ConflictSet, "conflict", _only_keys, BUSY),
    "keys do not count": (ConflictSet, "conflict", _only_ranges, BUSY),
    "H21: only the head's own write id counts as mine": (
        commit,
        "on_chain",
        lambda parts, head, seq, write_id: head.write_id == write_id,
        SCENARIOS["concurrent_catalog_sessions"][1],
    ),
    "H22: leases do not hold anything": (
        collection,
        "watermark_of",
        lambda head, leases: head.checkpoint_seq,
        STALLING,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_H21_H22_a_missing_check_is_found(monkeypatch, name):
    """H21, H22: without each protection some seed fails."""
    target, attribute, broken, chaos = MUTANTS[name]
    monkeypatch.setattr(target, attribute, broken)
    with pytest.raises(SimulationFailed):
        simulate(concurrent_catalog_sessions, range(300), chaos=chaos)


def test_H22_a_session_on_the_head_before_its_lease_is_found(monkeypatch):
    """H22: a session that uses the head from before its lease is found out, in the past or gone."""

    def hasty(parts, *, owner):
        before = parts.heads.last or parts.heads.load()
        return before, pinning.pin(parts, owner=owner)[1]

    monkeypatch.setattr(catalog, "pin", hasty)
    with pytest.raises(SimulationFailed):
        simulate(concurrent_catalog_sessions, range(300), chaos=STALLING)
