"""Swaps of a catalog's documents that are slow, lost or without a tag, and leases that are lost.

A commit reports the outcome that every process sees: committed, in conflict, or unknown, and never
one of the first two on a guess. Each test names the line that it holds in place.
"""

from dataclasses import replace

import pytest

from reef.catalog import Catalog, Retention
from reef.catalog import head as registers
from reef.catalog.head import Swap
from reef.errors import ConflictError, ErrorKind, OutcomeUnknownError, ReefError
from reef.stores import Meter, Outcome, ReadBack, Wrapper
from reef.stores.memory import MemoryStore
from reef.testing import Chaos, Fault, Faults, Rule, Simulation, simulate
from tests.unit.catalog.conftest import AT_ONCE, put, without_if_match

CALM = Chaos(latency_s=(0.0, 0.0))
LONG_LEASES = Retention(lease_ttl_s=36_000.0, grace_s=0.0)


def numbered(sim):
    """Make the bucket of a simulation one without If-Match."""
    sim.bucket.capabilities = replace(sim.bucket.capabilities, if_match=False)


# --- numbered swaps ---------------------------------------------------------------------


class Slow(Wrapper):
    """A store whose next creation of a head takes its time, before or after it takes effect."""

    def __init__(self, inner, delay_s, *, lands_first):
        super().__init__(inner)
        self._delay_s, self._lands_first = delay_s, lands_first

    def create(self, key, body):
        delay_s, self._delay_s = self._delay_s, 0.0
        if self._lands_first:
            result = self.inner.create(key, body)
            self.runtime.sleep(delay_s)
            return result
        self.runtime.sleep(delay_s)
        return self.inner.create(key, body)


@pytest.mark.parametrize("lands_first", [False, True])
@pytest.mark.parametrize(
    ("share", "expected"), [(0.49, Swap.LANDED), (0.51, Swap.UNKNOWN), (2.0, Swap.UNKNOWN)]
)
def test_H14_a_slow_numbered_swap_does_not_count_as_landed(share, expected, lands_first):
    """H14: its place may have been filled, superseded and emptied again while it was on its way.

    Root: a creation that took longer than half of the time that numbers stay counted as landed.
    """

    def run(sim):
        numbered(sim)
        node = sim.process("p")

        def work():
            slow = Slow(node.raw_store(), registers.RETAINED_S * share, lands_first=lands_first)
            register = registers.open_register(slow, "HEAD.json", "heads/")
            swap, version = register.swap(register.load(), b"body")
            assert swap is expected
            if swap is Swap.LANDED:
                assert version.tag == "1"

        node.spawn(work)
        sim.run()

    simulate(run, range(1), chaos=CALM)


def test_H14_a_commit_that_landed_in_an_emptied_place_is_not_reported():
    """H14: the creation of a head outlives the number it was to have; others commit meanwhile.

    Root: as above. The session would report a commit that no reader ever sees.
    """
    sim = Simulation(1)
    numbered(sim)
    stalled, others = sim.process("stalled"), sim.process("others")
    reported = []

    class Stalling(Wrapper):
        def create(self, key, body):
            if key.startswith("heads/"):
                self.runtime.sleep(registers.RETAINED_S + 300)
            return self.inner.create(key, body)

    def commit_slowly():
        catalog = Catalog(Stalling(stalled.store()), retention=LONG_LEASES)
        with catalog.session_write() as session:
            session.put("mine", b"1")
            try:
                reported.append(session.commit())
            except ReefError as error:
                reported.append(error)

    def commit_and_trim():
        others.runtime.sleep(1)
        catalog = Catalog(others.store(), retention=LONG_LEASES)
        for number in range(40):
            put(catalog, n=b"%d" % number)
        others.runtime.sleep(registers.RETAINED_S + 30)
        for number in range(3):
            put(catalog, n=b"%d" % number)
        assert catalog._writable().heads.register.trim(sim.bucket.now()) > 0

    stalled.spawn(commit_slowly)
    others.spawn(commit_and_trim)
    sim.run()
    is_visible = Catalog(sim.bucket).get_latest("mine") == b"1"
    (outcome,) = reported
    assert not is_visible
    assert isinstance(outcome, ConflictError | OutcomeUnknownError), outcome


def test_H14_numbers_stay_for_the_whole_time():
    """H14: twice as long as a creation may take, and to the last second.

    Root: trimming after a quarter of the time, within which a creation still counts as landed.
    """

    def run(sim):
        numbered(sim)
        node = sim.process("p")

        def work():
            catalog = Catalog(ReadBack(node.raw_store()), retention=AT_ONCE)
            for number in range(registers.RETAINED_MIN + 5):
                put(catalog, n=b"%d" % number)
            heads = catalog._writable().heads
            node.runtime.sleep(registers.RETAINED_S - 1.0)
            assert heads.register.trim(sim.bucket.now()) == 0
            node.runtime.sleep(2.0)
            assert heads.register.trim(sim.bucket.now()) == 5
            assert catalog.get_latest("n") == b"%d" % (registers.RETAINED_MIN + 4)

        node.spawn(work)
        sim.run()

    simulate(run, range(1), chaos=CALM)


# --- swaps without a definite response -----------------------------------------------------


def test_H21_a_collected_link_is_not_taken_for_another_s(monkeypatch):
    """H21: a response is lost, and the part of the chain that would decide is collected: unknown.

    Root: a chain that ends early was taken for "not mine": ConflictError for an applied commit.
    """
    monkeypatch.setattr("reef.catalog.head.RECENT_MIN", 2)
    retention = replace(AT_ONCE, lease_ttl_s=1.0)
    sim = Simulation(1)
    writer, others = sim.process("writer"), sim.process("others")
    reported = []

    def commit():
        catalog = Catalog(writer.store(), retention=retention)
        put(catalog, x=b"0")
        register = catalog._writable().heads.register
        swap = register.swap

        def swap_without_response(version, body):
            register.swap = swap
            swap(version, body)
            writer.runtime.sleep(100)
            return Swap.UNKNOWN, version

        session = catalog.session_write()
        session.put("mine", b"1")
        register.swap = swap_without_response
        try:
            reported.append(session.commit())
        except ReefError as error:
            reported.append(error)

    def commit_and_collect():
        others.runtime.sleep(30)
        catalog = Catalog(others.store(), retention=retention)
        for number in range(6):
            put(catalog, n=b"%d" % number)
        others.runtime.sleep(10)
        for _ in range(4):
            catalog.compactor(compact_after=1).compact_and_gc()
            put(catalog, n=b"z")
        for number in range(6):
            put(catalog, n=b"%d" % number)

    writer.spawn(commit)
    others.spawn(commit_and_collect)
    sim.run()
    assert Catalog(sim.bucket).get_latest("mine") == b"1"
    (outcome,) = reported
    assert isinstance(outcome, OutcomeUnknownError), outcome
    assert "collected" in str(outcome)


class WithoutTags(Wrapper):
    """A store that does not return the tags of its writes."""

    def create(self, key, body):
        return replace(self.inner.create(key, body), tag=None)

    def replace(self, key, body, tag):
        assert tag, "a tag that no process has seen"
        return replace(self.inner.replace(key, body, tag), tag=None)


def test_H5_a_landed_swap_without_a_tag_is_settled_by_reading():
    """H5: neither landed, since nothing could build upon it, nor lost: it is unknown.

    Root: a version without a tag counted as landed, and the next swap was sent without one.
    """
    store = WithoutTags(MemoryStore())
    register = registers.open_register(store, "HEAD.json", "heads/")
    empty = register.load()
    assert register.swap(empty, b"one") == (Swap.UNKNOWN, empty)
    first = register.load()
    assert (first.body, bool(first.tag)) == (b"one", True)
    assert register.swap(first, b"two") == (Swap.UNKNOWN, first)
    assert register.load().body == b"two"
    assert register.swap(first, b"three") == (Swap.LOST, first)
    catalog = Catalog(WithoutTags(MemoryStore()))
    for _ in range(5):
        catalog.transact(lambda s: s.put("n", b"%d" % (int(s.get("n") or 0) + 1)))
    assert catalog.get_latest("n") == b"5"


# --- leases that are lost ---------------------------------------------------------------


@pytest.fixture(params=["If-Match", "numbered"])
def metered(request):
    """A store of each kind of lease, whose requests are counted."""
    return Meter(MemoryStore() if request.param == "If-Match" else without_if_match())


def requests(store):
    """Return how many requests were sent."""
    return sum(store.meter.requests().values())


def lose(catalog, session):
    """Remove a session's lease, and everything that only it has held."""
    catalog.store.delete_many([info.key for info in list(catalog.store.list("leases/"))])
    with pytest.raises(ConflictError, match="reaped"):
        session.heartbeat()
    put(catalog, a=b"2")
    catalog.compactor().compact_and_gc()


def test_H22_a_lease_that_was_lost_stays_lost(metered):
    """H22: its session says so at once, and nothing is sent any more to renew it.

    Root: a held lease that ignores its loss would be renewed, and protect nothing.
    """
    catalog = Catalog(metered, retention=AT_ONCE)
    put(catalog, a=b"1")
    with catalog.session_read() as session:
        lose(catalog, session)
        held = session._lease
        assert held.is_over
        sent = requests(metered)
        with pytest.raises(ConflictError, match="reaped"):
            session.heartbeat()
        held._lease._written = _Spent()
        held.renew_if_due()
        assert requests(metered) == sent
        assert [info.key for info in metered.list("leases/")] == []


class _Spent:
    """A stopwatch of a lease whose time has passed."""

    def elapsed_s(self):
        return 1e9


def test_H22_objects_of_a_lost_lease_are_collected_and_not_damaged(metered):
    """H22: its state may be gone long before its time: ConflictError, and not an alarm.

    Root: a held lease that ignores its loss reports collected objects as damage.
    """
    catalog = Catalog(metered, retention=AT_ONCE, cache=None)
    put(catalog, a=b"1")
    with catalog.session_read() as session:
        lose(catalog, session)
        assert session._lease.expired
        with pytest.raises(ConflictError) as gone:
            session.get("a")
        assert gone.value.kind is ErrorKind.COLLECTED


def test_H22_a_keeper_ends_when_its_lease_is_lost():
    """H22: there is nothing left to keep."""

    def run(sim):
        node = sim.process("p")

        def work():
            catalog = Catalog(ReadBack(node.raw_store()), retention=AT_ONCE)
            with catalog.session_read() as session:
                keeper = session.start_lease_keeper()
                node.runtime.sleep(30.0)
                sim.bucket.delete_many([info.key for info in list(sim.bucket.list("leases/"))])
                node.runtime.sleep(45.0)
                assert session._lease.expired, "the keeper has found out"
                assert keeper._renewals._task is None, "it continues without a lease"
                keeper.shutdown()

        node.spawn(work)
        sim.run()

    simulate(run, range(1), chaos=CALM)


def test_outcomes_that_are_known():
    """A creation that finds an object has lost; one without a response is unknown."""
    store = MemoryStore()
    register = registers.open_register(store, "HEAD.json", "heads/")
    empty = register.load()
    assert store.create("HEAD.json", b"rival").outcome is Outcome.CREATED
    assert register.swap(empty, b"mine") == (Swap.LOST, empty)
    rival = register.load()
    silent = Faults(store, [Rule(Fault.FAIL_AFTER, "replace", "*")])
    register = registers.open_register(silent, "HEAD.json", "heads/")
    assert register.swap(rival, b"mine") == (Swap.UNKNOWN, rival)
    assert store.get("HEAD.json") == b"mine", "it was not lost"
