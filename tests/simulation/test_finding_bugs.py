"""The simulator earns its keep: it finds a planted bug, and brings it back."""

import gc
from contextlib import suppress

import pytest

from reef.engine.commit import open_writer
from reef.manifest.roots import LeasedObjects
from reef.testing import (
    Chaos,
    ExplorationFailed,
    Simulation,
    SimulationFailed,
    crash_points,
    explore,
    replay,
    simulate,
)
from reef.testing.runtime import ProcessDied
from tests.simulation.scenarios import (
    ROUGH,
    SCENARIOS,
    racing_creators,
    racing_creators_with_a_bug,
)

SEEDS = range(300)
SAMPLE = SEEDS[:120]
LONG = {
    *("rival_compactors", "jobs_and_pins", "background_and_other_jobs", "hardly_any_grace"),
    *("backfills", "counters_and_sets", "counters_and_backfills", "two_drivers_of_counters"),
    *("concurrent_catalog_sessions", "catalog_slow", "catalog_without_if_match", "catalog_counter"),
    *("a_machine_comes_back", "copies_of_a_log"),
    *("names_come_and_go", "names_come_and_go_slowly"),
    *("branches_come_and_go", "branches_roll_back", "rows_are_erased"),
    "slots_filled_again",
    *("reads_race_writes", "readers_race_refreshes", "local_reads_race_uploads"),
    *("two_drivers_of_a_stream", "zombies_and_sweeps", "openers_stall", "keyed_batches_again"),
}
"""Histories of all jobs at once, or of many catalogs, several times as long as the others."""


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_holds(name):
    """A sample of what `make sim` runs; its ledger has the seeds that have run."""
    scenario, chaos = SCENARIOS[name]
    plain = name.removesuffix("_late").removesuffix("_with_lives")
    seeds = SAMPLE[:50] if plain in LONG else SAMPLE
    seeds = seeds if plain == name else seeds[: len(seeds) // 3]
    assert simulate(scenario, seeds, chaos=chaos) == len(seeds)


def test_H49_a_rebuild_misses_no_slot_without_rows():
    """H49: a fold of begins alone writes no segment, and one that was overtaken has covered them.
    Found by this seed."""
    scenario, chaos = SCENARIOS["backfills"]
    assert simulate(scenario, [307], chaos=chaos) == 1


@pytest.mark.parametrize(
    ("name", "seed"),
    [("backfills", 788), ("backfills_late", 1374), ("rows_are_erased_late", 1614)],
)
def test_seeds_that_have_failed_hold(name, seed):
    """Late begins in a rebuild (H67), and rows that move while a purge scans (ADR 0046)."""
    scenario, chaos = SCENARIOS[name]
    assert simulate(scenario, [seed], chaos=chaos) == 1


def test_slots_that_are_filled_out_of_order_are_no_holes(monkeypatch):
    """A drop that has lost some slots aims at several at once, and the later ones may land first.
    A pinned log has lost nothing then. Found by seed 253; these show it at the first loss."""
    monkeypatch.setattr(open_writer, "PATIENT_ROUNDS", 0)
    scenario, chaos = SCENARIOS["leases_hold_with_lives"]
    assert simulate(scenario, [21, 24, 33, 49, 253], chaos=chaos) == 5


@pytest.mark.parametrize("name", ["leases_hold", "leases_hold_with_lives"])
def test_a_sweep_that_passes_over_leases_is_found(name, monkeypatch):
    """The end of a pinned log counts as well as its beginning."""
    monkeypatch.setattr(LeasedObjects, "pin", lambda self, condemned: False)
    monkeypatch.setattr(LeasedObjects, "unpinned", lambda self, condemned: [condemned])
    scenario, chaos = SCENARIOS[name]
    with pytest.raises(SimulationFailed, match="are pinned, and gone"):
        simulate(scenario, SEEDS, chaos=chaos)


def test_a_check_then_put_is_found_and_replayed():
    """Two winners of one name show up within 1,000 seeds, and again from the seed alone."""
    with pytest.raises(SimulationFailed) as found:
        simulate(racing_creators_with_a_bug, range(1000), chaos=ROUGH)
    with pytest.raises(SimulationFailed) as again:
        simulate(racing_creators_with_a_bug, [found.value.seed], chaos=ROUGH)
    assert str(again.value) == str(found.value)
    assert again.value.trace == found.value.trace


@pytest.mark.parametrize("collects", [False, True])
def test_the_garbage_collector_is_no_part_of_a_history(collects):
    """No abandoned generator is closed, and cleans up, at a point that no seed decides."""

    def abandoned(node):
        try:
            yield
        finally:
            with suppress(ProcessDied):  # after the end of the history
                node.store().put("cleaned", b"")

    def scenario(sim):
        def act(node):
            cleanup = [abandoned(node)]
            next(cleanup[0])
            cleanup.append(cleanup)  # a cycle, which only a collection ends
            del cleanup
            if collects and gc.isenabled():  # as happens once enough memory is allocated
                gc.collect()
            node.store().put("work", b"")

        node = sim.process("a")
        node.spawn(lambda: act(node))
        sim.run()
        assert not [step for step in sim.trace if "cleaned" in step.detail]

    assert simulate(scenario, [0]) == 1


def test_the_bug_needs_no_chaos_to_be_found():
    """Interleaving alone is enough."""
    with pytest.raises(SimulationFailed, match=r"two winners|is lost"):
        simulate(racing_creators_with_a_bug, range(1000))


def _two_creators(wrap=lambda store: store):
    """Two processes, one slot: small enough for all histories."""

    def scenario(sim: Simulation):
        winners = []

        def take(node):
            if wrap(node.store()).create("wal/1", node.name.encode()).landed:
                winners.append(node.name)

        for name in ("a", "b"):
            node = sim.process(name)
            node.spawn(lambda node=node: take(node))
        sim.run()
        assert len(winners) <= 1
        assert all(sim.bucket.get("wal/1") == name.encode() for name in winners)

    return scenario


def test_all_histories_of_two_creators_hold():
    """Every order of the calls, with one lost response and one crash anywhere."""
    chaos = Chaos(
        crash=0.5, crashes_max=1, lost_response=0.5, fail_before=0.5, faults_max=1, latency_s=(0, 0)
    )
    explored = explore(_two_creators(), chaos=chaos)
    assert explored.complete
    assert explored.histories > 1000


def test_exploring_finds_the_bug_without_luck():
    """The bad history is found by walking, and its script replays it."""
    from tests.simulation.scenarios import CheckThenPut

    with pytest.raises(ExplorationFailed) as found:
        explore(_two_creators(CheckThenPut))
    with pytest.raises(ExplorationFailed, match="AssertionError"):
        replay(_two_creators(CheckThenPut), found.value.script)


def test_an_exploration_says_when_it_was_cut_short():
    """Incomplete is not the same as done."""
    explored = explore(_two_creators(), runs_max=3)
    assert explored.histories == 3
    assert not explored.complete


def test_every_seam_is_a_crash_point():
    """Store calls count before and after their effect; clocks and named points count too."""

    def scenario(sim):
        node = sim.process("victim")

        def work():
            store = node.raw_store()
            store.create("a", b"1")
            node.runtime.reach("half-way")
            node.runtime.wall_s()
            store.create("b", b"2")

        node.spawn(work)
        sim.run()

    reached = []
    for point in crash_points(scenario, "victim"):
        keys = [info.key for info in point.simulation.bucket.list()]
        reached.append((point.site, keys))
    assert reached == [
        ("store create a", []),
        ("store create created a done", ["a"]),
        ("point half-way", ["a"]),
        ("clock wall", ["a"]),
        ("store create b", ["a"]),
        ("store create created b done", ["a", "b"]),
    ]


def test_after_a_crash_the_simulation_continues():
    """A new process can be started on the state that a crash left."""

    def scenario(sim):
        node = sim.process("victim")
        node.spawn(lambda: [node.store().create(f"{n}", b"x") for n in range(3)])
        sim.run()

    for point in crash_points(scenario, "victim"):
        successor = point.simulation.process("successor")
        found = []
        successor.spawn(lambda s=successor, f=found: f.extend(s.store().list()))
        point.simulation.run()
        keys = [info.key for info in found]
        assert keys == [str(n) for n in range(len(keys))], "slots are filled in order"


def test_racing_creators_is_not_vacuous():
    """With chaos on, acknowledgements and refusals both happen in most histories."""
    outcomes = set()
    for seed in range(20):
        sim = Simulation(seed, chaos=ROUGH)
        racing_creators(sim)
        sim.close()
        outcomes |= {
            step.detail.split()[1] for step in sim.trace if step.detail.startswith("create ")
        }
    assert {"created", "exists"} <= outcomes


def test_a_name_that_comes_back_dies_in_each_of_its_lives():
    """A service that is restarted inside the scenario has crash points before and after."""

    def scenario(sim):
        for life in ("first", "second"):
            node = sim.process("writer")
            node.spawn(lambda node=node, life=life: node.raw_store().create(life, b""))
            sim.run()

    reached = []
    for point in crash_points(scenario, "writer"):
        keys = [info.key for info in point.simulation.bucket.list()]
        reached.append((point.number, point.site, keys))
    assert reached == [
        (1, "store create first", ["second"]),
        (2, "store create created first done", ["first", "second"]),
        (3, "store create second", ["first"]),
        (4, "store create created second done", ["first", "second"]),
    ]


def test_clearing_away_leftovers_is_a_seam():
    """A process can die before and after `abort_stale`, as at every store call."""

    def scenario(sim):
        node = sim.process("sweeper")
        node.spawn(lambda: node.raw_store().abort_stale(0.0))
        sim.run()

    reached = [point.site.split() for point in crash_points(scenario, "sweeper")]
    assert reached == [["store", "abort_stale"], ["store", "abort_stale", "done"]]
