"""Scenarios that `make sim` and the tests run: one function each, checked at its end.

A scenario gets a fresh `Simulation`, starts processes, runs them, and asserts what must
hold under every schedule and all faults.
"""

from contextlib import suppress
from dataclasses import replace

from reef.errors import NotFoundError, UnavailableError
from reef.stores import Outcome, Wrapper, WriteResult
from reef.testing import Chaos
from tests.simulation import branch_scenarios as branches
from tests.simulation import catalog_scenarios as catalogs
from tests.simulation import counting_scenarios as counting
from tests.simulation import dropping_scenarios as dropping
from tests.simulation import engine_scenarios as engine
from tests.simulation import job_scenarios as jobs
from tests.simulation import local_log_scenarios as local_logs
from tests.simulation import reading_scenarios as reading
from tests.simulation.copied_log_scenarios import copies_of_a_log
from tests.simulation.transaction_scenarios import concurrent_transactions

ROUGH = Chaos(
    crash=0.01,
    crashes_max=2,
    lost_response=0.1,
    fail_before=0.1,
    conflict=0.05,
    late=0.03,
    stall=0.02,
    freeze=0.01,
    held=0.04,
    forgotten=0.02,
)

SLOW = Chaos(
    crash=0.001,
    crashes_max=2,
    lost_response=0.02,
    fail_before=0.02,
    conflict=0.02,
    late=0.02,
    stall=0.02,
    freeze=0.002,
    stall_s=(0.5, 40.0),
    held=0.04,
    forgotten=0.02,
    held_s=(60.0, 600.0),
)
"""Stalls around a grace period of some seconds, on either side of it."""

POWER_CUTS = Chaos(
    crash=0.002,
    crashes_max=3,
    lost_response=0.08,
    fail_before=0.05,
    conflict=0.02,
    late=0.04,
    stall=0.02,
    freeze=0.001,
    stall_s=(0.5, 20.0),
    held=0.02,
    forgotten=0.01,
    held_s=(60.0, 600.0),
)
"""A machine that dies and comes back, on a bad network."""

STALLING = Chaos(
    crash=0.0005,
    crashes_max=1,
    stall=0.07,
    stall_s=(1.0, 40.0),
    held=0.02,
    forgotten=0.02,
    held_s=(60.0, 600.0),
)
"""Mostly requests that stall."""

LATE = Chaos(
    crash=0.0003,
    crashes_max=1,
    lost_response=0.005,
    fail_before=0.005,
    late=0.01,
    stall=0.003,
    stall_s=(0.5, 40.0),
    held=0.15,
    forgotten=0.06,
    faults_max=40,
)
"""Mostly writes that arrive after the object of their name was collected."""

LIVELY = Chaos(
    crash=0.0005,
    crashes_max=2,
    lost_response=0.01,
    fail_before=0.01,
    conflict=0.01,
    late=0.01,
    stall=0.01,
    freeze=0.0005,
    stall_s=(0.5, 40.0),
    faults_max=60,
)
"""Enough faults to coincide, and few enough for long histories."""

REFILLS = Chaos(
    latency_s=(0.001, 0.3), held=0.2, forgotten=0.05, faults_max=10, held_s=(400.0, 1200.0)
)
"""Nothing but writes that arrive after the object of their name was collected."""


def racing_creators(sim, wrap=lambda store: store):
    """Several processes take numbered slots, as log writers do.

    A process with the outcome "created" has the slot, and one with "exists" does not.
    """
    acknowledged: dict[str, bytes] = {}
    refused: list[tuple[str, bytes]] = []

    def take_slots(node):
        store = wrap(node.store())
        for slot in range(3):
            key, body = f"wal/{slot}", node.name.encode()
            result = store.create(key, body)
            if result.outcome is Outcome.CREATED:
                assert acknowledged.setdefault(key, body) == body, f"two winners of {key}"
            elif result.outcome is Outcome.EXISTS:
                refused.append((key, body))

    for name in ("a", "b", "c"):
        node = sim.process(name)
        node.spawn(lambda node=node: _until_unavailable(lambda: take_slots(node)))
    sim.run()
    for key, body in acknowledged.items():
        assert sim.bucket.get(key) == body, f"{key} was acknowledged and is lost"
    for key, body in refused:
        assert sim.bucket.get(key) != body, f"{key} was refused and is there"


def counting_with_replace(sim):
    """Processes increment a counter by If-Match; an unknown outcome may count once or not.

    The final value is between the acknowledged increments and those plus the unknown.
    """
    sim.bucket.put("counter", b"0 start")
    landed, unknown = [0], [0]

    def increment(node):
        store = node.store()
        for _ in range(3):
            found = store.get_tagged("counter")
            value = int(found.body.split()[0])
            body = f"{value + 1} {node.runtime.ulid()}".encode()  # a nonce: equal means ours
            unknown[0] += 1
            outcome = store.replace("counter", body, found.tag).outcome
            if outcome is not Outcome.UNKNOWN:
                unknown[0] -= 1
            landed[0] += outcome is Outcome.REPLACED

    for name in ("a", "b"):
        node = sim.process(name)
        node.spawn(lambda node=node: _until_unavailable(lambda: increment(node)))
    sim.run()
    value = int(sim.bucket.get("counter").split()[0])
    assert landed[0] <= value <= landed[0] + unknown[0]


def _until_unavailable(call):
    with suppress(UnavailableError):  # retries end within their bounds
        call()


class CheckThenPut(Wrapper):
    """The bug to find: create-only made of a HEAD and a PUT."""

    def create(self, key, body):
        try:
            self.inner.head(key)
        except NotFoundError:
            self.inner.put(key, body)
            return WriteResult(Outcome.CREATED)
        return WriteResult(Outcome.EXISTS)


def racing_creators_with_a_bug(sim):
    """The first scenario on a store that only pretends to exclude."""
    racing_creators(sim, wrap=CheckThenPut)


BUSY = Chaos(latency_s=(0.001, 0.05))
"""Nothing goes wrong, and nothing takes the same time twice."""

SCENARIOS = {
    "reads_race_writes": (reading.reads_race_writes, BUSY),
    "readers_race_refreshes": (reading.readers_race_refreshes, BUSY),
    "local_reads_race_uploads": (reading.local_reads_race_uploads, BUSY),
    "racing_creators": (racing_creators, ROUGH),
    "counting_with_replace": (counting_with_replace, ROUGH),
    "writer_takeovers": (engine.writer_takeovers, ROUGH),
    "pipelined_writer_takeovers": (engine.pipelined_writer_takeovers, ROUGH),
    "independent_writer_takeovers": (engine.independent_writer_takeovers, ROUGH),
    "zombies_and_sweeps": (engine.zombies_and_sweeps, SLOW),
    "openers_stall": (engine.openers_stall, STALLING),
    "keyed_batches_again": (engine.keyed_batches_again, SLOW),
    "bulk_loads_and_writers": (engine.bulk_loads_and_writers, ROUGH),
    "folders_race": (engine.folders_race, SLOW),
    "outcomes_are_resolved": (engine.outcomes_are_resolved, SLOW),
    "concurrent_transactions": (concurrent_transactions, ROUGH),
    "concurrent_catalog_sessions": (catalogs.concurrent_catalog_sessions, ROUGH),
    "catalog_slow": (catalogs.concurrent_catalog_sessions, SLOW),
    "catalog_without_if_match": (catalogs.catalog_without_if_match, ROUGH),
    "catalog_counter": (catalogs.catalog_counter, ROUGH),
    "names_come_and_go": (dropping.names_come_and_go, ROUGH),
    "names_come_and_go_slowly": (dropping.names_come_and_go, SLOW),
    "loads_make_their_namespace": (dropping.loads_make_their_namespace, ROUGH),
    "loads_make_it_slowly": (dropping.loads_make_their_namespace, SLOW),
    "branches_come_and_go": (branches.branches_come_and_go, SLOW),
    "branches_roll_back": (branches.branches_roll_back, LIVELY),
    "rows_are_erased": (branches.rows_are_erased, SLOW),
    "rival_compactors": (jobs.rival_compactors, SLOW),
    "jobs_and_pins": (jobs.jobs_and_pins, SLOW),
    "backfills": (jobs.backfills, SLOW),
    "counters_and_sets": (counting.counters_and_sets, SLOW),
    "counters_and_backfills": (counting.counters_and_backfills, SLOW),
    "two_drivers_of_counters": (counting.two_drivers_of_counters, SLOW),
    "background_and_other_jobs": (jobs.background_and_other_jobs, SLOW),
    "hardly_any_grace": (jobs.hardly_any_grace, SLOW),
    "two_drivers_of_a_stream": (jobs.two_drivers_of_a_stream, SLOW),
    "slots_filled_again": (jobs.slots_filled_again, REFILLS),
    "a_machine_comes_back": (local_logs.a_machine_comes_back, POWER_CUTS),
    "copies_of_a_log": (copies_of_a_log, POWER_CUTS),
    "leases_hold": (engine.leases_hold, replace(STALLING, stall_s=(1.0, 15.0))),
}

NOT_LATE = {
    *("names_come_and_go_slowly", "loads_make_it_slowly", "slots_filled_again"),
    *("reads_race_writes", "readers_race_refreshes", "local_reads_race_uploads"),
}
"""Without a variant of late writes of their own:

    names_come_and_go_slowly, loads_make_it_slowly   are variants themselves, of scenarios that
                                                     have one
    slots_filled_again                               `REFILLS` holds more writes than `LATE` does
    reads_race_writes, readers_race_refreshes,       explore orders of threads of one process:
    local_reads_race_uploads                         every write has to succeed

Those with lives have late writes in either chaos (`LATE`, `LIVELY_AND_LATE`, `REFILLS`).
"""

SCENARIOS |= {
    f"{name}_late": (scenario, LATE)
    for name, (scenario, chaos) in SCENARIOS.items()
    if name not in NOT_LATE
}

WITH_LIVES = (
    *("writer_takeovers", "pipelined_writer_takeovers", "independent_writer_takeovers"),
    *("zombies_and_sweeps", "keyed_batches_again", "bulk_loads_and_writers", "folders_race"),
    *("outcomes_are_resolved", "rival_compactors", "jobs_and_pins", "background_and_other_jobs"),
    *("hardly_any_grace", "slots_filled_again", "two_drivers_of_a_stream", "backfills"),
    *("openers_stall", "concurrent_transactions"),
    *("counters_and_sets", "counters_and_backfills", "two_drivers_of_counters"),
    "leases_hold",
)
"""The others bring names of their own, or make and drop them already, or have no namespace."""

LIVELY_AND_LATE = replace(LIVELY, held=0.1, forgotten=0.04)
"""The same, with writes that arrive after the object of their name was collected."""


def with_lives(scenario):
    """Return a scenario in which the name is also dropped, undropped and created again."""

    def run(sim):
        sim.has_lives = True
        scenario(sim)

    run.__doc__ = scenario.__doc__
    return run


SCENARIOS |= {
    f"{name}_with_lives": (with_lives(SCENARIOS[name][0]), LATE if number % 2 else LIVELY_AND_LATE)
    for number, name in enumerate(WITH_LIVES)
}
SCENARIOS["slots_filled_again_with_lives"] = (with_lives(jobs.slots_filled_again), REFILLS)
