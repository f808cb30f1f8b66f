"""Throttled prefixes: the rate that a store accepts is found, kept, and released again."""

import pickle
from dataclasses import dataclass, field, replace

import pytest

from reef import stores
from reef.errors import ErrorKind, UnavailableError
from reef.stores import Meter, ReadBack, Retry
from reef.stores.base import Outcome
from reef.stores.memory import MemoryStore
from reef.stores.wrappers import Throttle
from reef.telemetry import RequestMeter
from reef.testing import Fault, Faults, Latency, LatencyProfile, Rule, Simulation, open_store

PROFILE = LatencyProfile((20, 50), (20, 50), (20, 50), 1e12)
THREADS = 4
LIMITED = "namespaces/a/wal/*"


@dataclass
class Crowd:
    """Clients on virtual time, each with a stack of its own, over one store with a limit."""

    rules: list
    paced: bool = True
    sim: Simulation = field(default_factory=lambda: Simulation(1, switch_at=frozenset()))

    def __post_init__(self):
        self.runtime = (node := self.sim.process("clients")).runtime
        self.spawn = node.spawn
        self.landed = Meter(MemoryStore(runtime=self.runtime))
        self.sent = Meter(Faults(Latency(self.landed, PROFILE), self.rules))
        self.errors = []

    def client(self, **words):
        """Give one more client's store."""
        return ReadBack(Retry(Throttle(self.sent, **words) if self.paced else self.sent))

    def busy(self, store, name, seconds, think_s=0.0):
        """Let four threads of a client write as fast as they can."""
        end_s = self.runtime.monotonic_s() + seconds

        def work(thread):
            number = 0
            while self.runtime.monotonic_s() < end_s:
                number += 1
                try:
                    store.put(f"namespaces/a/wal/{name}-{thread}-{number}", b"")
                except UnavailableError as error:
                    self.errors.append(error)
                self.runtime.sleep(think_s)

        for thread in range(THREADS):
            self.spawn(lambda thread=thread: work(thread), name=f"{name}-{thread}")

    def run(self, clients, seconds):
        for number in range(clients):
            self.busy(self.client(), f"c{number}", seconds)
        self.sim.run()
        self.sim.close()

    @property
    def shares(self):
        """Landed and refused requests, as shares of the sent requests."""
        sent = self.sent.meter.requests()["put"]
        landed = self.landed.meter.requests()["put"]
        return landed, (sent - landed) / sent


def limit(per_s, method="put", key=LIMITED):
    """Give a rule that throttles what comes faster."""
    return Rule(Fault.THROTTLE_429, method, key, above_per_s=per_s)


@pytest.mark.parametrize(
    ("clients", "per_s", "seconds", "refused_max"),
    [(1, 100, 30, 0.05), (4, 100, 30, 0.08), (16, 100, 30, 0.20), (8, 400, 15, 0.05)],
)
def test_clients_reach_the_limit_and_are_rarely_refused(clients, per_s, seconds, refused_max):
    """At least 80 % of the prefix's capacity gets through; no call fails."""
    crowd = Crowd([limit(per_s)])
    crowd.run(clients, seconds)
    landed, refused = crowd.shares
    assert landed >= 0.8 * per_s * seconds
    assert refused <= refused_max
    assert crowd.errors == []


def test_without_pacing_most_requests_would_be_refused():
    """Without the wrapper, retries alone keep the service busy with refusing."""
    crowd = Crowd([limit(100)], paced=False)
    crowd.run(16, 15)
    assert crowd.shares[1] > 0.5


def test_an_unthrottled_store_pays_nothing():
    """No lane is opened, no clock is read, nothing waits."""

    crowd = Crowd([])
    store = Throttle(crowd.landed)
    reads = []
    store.runtime = type("NoClock", (), {"monotonic_s": lambda self: reads.append(1) or 0.0})()
    for number in range(100):
        store.put(f"k/{number}", b"")
        store.create(f"c/{number}", b"")
        store.get(f"k/{number}")
    assert len(list(store.list("k/"))) == 100
    assert (store.rates(), len(reads)) == ({}, 1), "only rates() itself reads the clock"


def test_other_folders_and_reads_are_not_held_back():
    """A lane is for one kind of request to one folder."""
    crowd = Crowd([limit(10)])
    store = crowd.client()
    took = {}

    def others():
        crowd.runtime.sleep(3)
        watch = crowd.runtime.stopwatch()
        for number in range(100):
            store.put(f"namespaces/b/wal/{number}", b"")
        for number in range(100):
            store.get(f"namespaces/b/wal/{number}")
        took["others"] = watch.elapsed_s()

    crowd.busy(store, "busy", 20)
    crowd.spawn(others)
    crowd.sim.run()
    assert took["others"] < 200 * 0.06
    assert set(store.inner.inner.rates()) == {("write", "namespaces/a/wal")}
    crowd.sim.close()


def test_a_limit_that_is_lifted_is_forgotten():
    """Soon after the last refusal the rate is no hindrance; after a minute there is no lane."""
    rules = [limit(20)]
    crowd = Crowd(rules)
    store = crowd.client()
    measured = {}

    def watcher():
        crowd.runtime.sleep(20)
        rules[0].times = rules[0].struck  # it strikes no more
        crowd.runtime.sleep(20)
        before = crowd.landed.meter.requests()["put"]
        crowd.runtime.sleep(5)
        measured["per_s"] = (crowd.landed.meter.requests()["put"] - before) / 5
        crowd.runtime.sleep(45)
        measured["lanes"] = store.inner.inner.rates()

    crowd.busy(store, "busy", 95, think_s=0.01)
    crowd.spawn(watcher)
    crowd.sim.run()
    crowd.sim.close()
    assert measured["per_s"] > 80, "four threads, 10 ms of thought and calls of some 22 ms"
    assert measured["lanes"] == {}


def test_a_turn_too_far_away_is_not_waited_for():
    """The call fails as throttled, was not sent, and has a hint; no caller waits longer."""
    crowd = Crowd([limit(2)])
    store = Throttle(crowd.sent, wait_max_s=1.0)
    waits, errors = [], []

    def one(number):
        crowd.runtime.sleep(5)
        watch = crowd.runtime.stopwatch()
        try:
            store.put(f"namespaces/a/wal/{number}", b"")
        except UnavailableError as error:
            errors.append(error)
        waits.append(watch.elapsed_s())

    crowd.busy(store, "busy", 5, think_s=0.2)
    for number in range(50):
        crowd.spawn(lambda number=number: one(number), name=f"one-{number}")
    crowd.sim.run()
    crowd.sim.close()
    assert max(waits) < 1.2
    unsent = [error for error in errors if "was not sent" in error.message]
    assert unsent
    assert all(error.kind is ErrorKind.THROTTLED for error in errors)
    assert "writes below namespaces/a/wal" in unsent[0].message
    assert unsent[0].context["object"].startswith("namespaces/a/wal/")


@pytest.mark.parametrize("fault", [Fault.THROTTLE_429, Fault.THROTTLE_429_AFTER])
def test_h6_a_hot_object_is_written_at_the_rate_it_takes(fault):
    """H6: one write a second, and a 429 before or after it applied: every write counts once."""
    key = "catalog/HEAD.json"
    crowd = Crowd([Rule(fault, "replace", key, above_per_s=1.0)])
    crowd.landed.put(key, b"0 start")

    def count(name):
        store, done = crowd.client(), 0
        while done < 5:
            found = store.get_tagged(key)
            body = f"{int(found.body.split()[0]) + 1} {name}.{done}".encode()
            result = store.replace(key, body, found.tag)
            if result.outcome is Outcome.UNKNOWN:  # ours may have landed and been replaced
                crowd.errors.append(result.cause)
                return
            done += result.landed

    watch = crowd.runtime.stopwatch()
    crowd.spawn(lambda: count("one"))
    crowd.sim.run()
    took_s = watch.elapsed_s()
    assert crowd.errors == []
    assert crowd.landed.get(key).split()[0] == b"5"
    assert took_s < 40
    crowd.sim.close()


def test_a_conditional_write_that_has_no_turn_has_written_nothing():
    """It raises: nothing was sent, so its outcome is known."""
    crowd = Crowd([limit(1, "create")])
    store = Throttle(crowd.sent, wait_max_s=0.0)
    raised = []

    def work():
        results = []
        for number in range(20):
            try:
                results.append(store.create(f"namespaces/a/wal/{number}", b"").outcome)
            except UnavailableError as error:
                raised.append((number, error))
        assert {Outcome.CREATED, Outcome.UNKNOWN} == set(results)

    crowd.spawn(work)
    crowd.sim.run()
    crowd.sim.close()
    assert raised
    there = {info.key for info in crowd.landed.list()}
    assert not there & {f"namespaces/a/wal/{number}" for number, _ in raised}


def test_it_is_part_of_every_opened_store():
    """`stores.open` puts it inside of the retries: a limited prefix is written without errors."""
    sim = Simulation(3, switch_at=frozenset())
    node = sim.process("client")
    meter = RequestMeter()
    store = open_store("memory://", runtime=node.runtime, faults=[limit(50)], meter=meter)
    took = []

    def work():
        watch = node.runtime.stopwatch()
        for number in range(500):
            store.put(f"namespaces/a/wal/{number}", b"")
        took.append(watch.elapsed_s())

    node.spawn(work)
    sim.run()
    assert 8.0 <= took[0] <= 14.0, "500 at 50 a second, the first second's worth at once"
    assert len(list(store.list())) == 500
    assert meter.requests()["put"] < 540, "retries alone would be refused every fourth time"
    sim.close()


def test_a_listing_that_is_refused_opens_a_lane():
    """Reads of the folder are paced from then on, and the listing is complete."""
    sim = Simulation(4, switch_at=frozenset())
    node = sim.process("client")
    store = open_store("memory://", runtime=node.runtime, faults=[limit(5, "list", "*")])
    seen = []

    def work():
        for number in range(3):
            store.put(f"a/{number}", b"")
        seen.extend(len(list(store.list("a/"))) for _ in range(20))

    node.spawn(work)
    sim.run()
    sim.close()
    assert seen == [3] * 20


def test_a_copy_in_another_process_starts_without_lanes(tmp_path):
    """Rates are one process's own."""
    store = Throttle(stores.open(str(tmp_path)), wait_max_s=3.0)
    store._note_refusal("write", "a/b", 0.0)
    copy = pickle.loads(pickle.dumps(store))
    assert (copy.rates(), copy.wait_max_s) == ({}, 3.0)
    assert set(store.rates()) == {("write", "a")}


def test_a_503_of_the_fault_wrapper_is_read_as_a_services_is():
    """SlowDown is a 503: it opens a lane, as 429 does."""
    store = Throttle(Faults(MemoryStore(), [Rule(Fault.UNAVAILABLE_503, "put", times=1)]))
    with pytest.raises(UnavailableError) as caught:
        store.put("a/wal/1", b"")
    assert caught.value.kind is ErrorKind.THROTTLED
    assert list(store.rates()) == [("write", "a/wal")]


def test_h6_asking_a_bucket_for_the_time_is_paced():
    """H6: it writes one object, the hottest there is; some services take one write a second."""
    crowd = Crowd([limit(1, "now", "*")])
    crowd.sent.capabilities = replace(crowd.sent.capabilities, now_requests=("put", "head"))
    store, lanes = crowd.client(), []

    def ask():
        for _ in range(10):
            store.now()
        lanes.extend(store.inner.inner.rates())

    crowd.spawn(ask)
    crowd.sim.run()
    crowd.sim.close()
    assert lanes == [("write", "store")]
    assert crowd.rules[0].struck <= 12
