"""Requests are counted, and the counts are true: a proxy on the wire agrees with the meter."""

import random

import pytest

from reef import stores
from reef.stores import PROFILES, Fault, Faults, Latency, Meter, RetryPolicy, Rule
from reef.stores.memory import MemoryStore
from reef.telemetry import Metrics, RequestMeter
from reef.testing import Simulation
from tests.http_proxy import Forwarding, proxy

MIB = 1 << 20


@pytest.fixture
def metered():
    """Give a store on memory as users get it, and its meter."""
    meter = RequestMeter()
    return stores.open("memory://", meter=meter), meter


CALLS = [
    ("get", lambda s: s.get("k"), {"get": 1}),
    ("get_tagged", lambda s: s.get_tagged("k"), {"get": 1}),
    ("get_range", lambda s: s.get_range("k", 0, 5), {"get": 1}),
    ("near ranges", lambda s: s.get_ranges("k", [(0, 5), (10, 20), (7, 9)]), {"get": 1}),
    ("far ranges", lambda s: s.get_ranges("k", [(0, 5), (900_000, 900_005)]), {"get": 2}),
    ("no ranges", lambda s: s.get_ranges("k", []), {}),
    ("head", lambda s: s.head("k"), {"head": 1}),
    ("list", lambda s: list(s.list()), {"list": 1}),
    ("put", lambda s: s.put("n", b""), {"put": 1}),
    ("create", lambda s: s.create("n", b""), {"put": 1}),
    ("create, lost", lambda s: s.create("k", b""), {"put": 1, "get": 1}),
    ("upload", lambda s: s.upload("n", [b"a", b"b"]), {"put": 1}),
    ("copy", lambda s: s.copy("k", "n"), {"copy": 1}),
    ("delete", lambda s: s.delete("k"), {"delete": 1}),
    ("delete nothing", lambda s: s.delete_many([]), {}),
]


@pytest.mark.parametrize(("call", "expected"), [c[1:] for c in CALLS], ids=[c[0] for c in CALLS])
def test_what_each_call_costs(metered, call, expected):
    """One call, one request, but where the table says otherwise."""
    store, meter = metered
    store.put("k", bytes(1_000_000))
    meter.reset()
    call(store)
    assert meter.requests() == expected


def test_replace_costs_one_put(metered):
    """And one GET more when it lost, to see whose object is there."""
    store, meter = metered
    tag = store.put("k", b"old")
    meter.reset()
    assert store.replace("k", b"new", tag).landed
    assert meter.requests() == {"put": 1}
    assert not store.replace("k", b"newer", tag).landed
    assert meter.requests() == {"put": 2, "get": 1}


def test_pages_and_bytes_are_counted():
    """A listing of 25 objects in pages of 10 costs three requests; bytes go both ways."""
    meter = RequestMeter()
    store = Meter(MemoryStore(page=10), meter)
    for number in range(25):
        store.put(f"k/{number:02}", b"12345")
    meter.reset()
    assert len(list(store.list("k/"))) == 25
    next(store.list("k/"))
    store.get("k/00")
    assert meter.to_dict()["list"]["requests"] == 4
    assert meter.to_dict()["get"] == {"requests": 1, "bytes": 5}


def test_retries_are_counted_too():
    """What fails was sent, and is billed."""
    meter = RequestMeter()
    policy = RetryPolicy(first_delay_s=0.0)
    store = stores.open("memory://", meter=meter, retry=policy)
    store.put("k", b"v")
    meter.reset()
    faulty = stores.Retry(
        Meter(Faults(MemoryStore(), [Rule(Fault.FAIL_BEFORE, "put", times=2)]), meter), policy
    )
    faulty.put("k", b"v")
    assert meter.requests() == {"put": 3}


def test_latencies_are_recorded():
    """Each kind of request has its histogram of seconds."""
    metrics = Metrics()
    store = stores.open("memory://", metrics=metrics)
    store.put("k", b"v")
    store.get("k")
    assert metrics.to_dict()["requests.put"]["count"] == 1
    assert metrics.to_dict()["requests.get"]["max"] > 0


def _wire(requests):
    """Sort what a proxy saw into the meter's kinds."""
    counts = {}
    for method, path, headers in requests:
        kind = {"POST": "put", "PUT": "put"}.get(method, method.lower())
        if method == "GET" and "list-type" in path:
            kind = "list"
        elif method == "POST" and path.endswith("?delete"):
            kind = "delete"
        elif any(name.lower() == "x-amz-copy-source" for name in headers):
            kind = "copy"
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def test_the_meter_agrees_with_the_wire(ministack):
    """Every call of the protocol through a counting proxy: the same numbers, kind by kind."""
    ministack.make_bucket("wire")
    meter = RequestMeter()
    with proxy(Forwarding, ministack.address) as wire:
        store = stores.open(
            "s3://wire/x",
            meter=meter,
            **{**ministack.options(), "endpoint": wire.endpoint},
            part_bytes=5 * MIB,
        )
        for number in range(5):
            store.create(f"k/{number}", bytes(100_000))
        store.create("k/1", b"lost")
        tag = store.get_tagged("k/2").tag
        store.replace("k/2", b"new", tag)
        store.get_ranges("k/3", [(0, 10), (20, 30), (99_000, 99_001)])
        store.head("k/4")
        list(store.list("k/"))
        list(store.list("k/", "k/2"))
        store.copy("k/0", "copied")
        store.upload("small", [b"a", b"b"])
        store.upload("exactly-one-part", [bytes(5 * MIB)])
        store.upload("three-parts", [bytes(4 * MIB)] * 3)
        store.delete_many([f"k/{number}" for number in range(5)])
        store.delete("small")
        assert _wire(wire.requests) == meter.requests()


def test_a_long_listing_agrees_with_the_wire(ministack):
    """2,500 objects are three pages, on the wire and on the meter."""
    ministack.make_bucket("wire")
    direct = stores.open("s3://wire/long", **ministack.options())
    direct.runtime.gather([lambda n=n: direct.put(f"k/{n:05}", b"") for n in range(2500)])
    meter = RequestMeter()
    with proxy(Forwarding, ministack.address) as wire:
        store = stores.open(
            "s3://wire/long", meter=meter, **{**ministack.options(), "endpoint": wire.endpoint}
        )
        assert len(list(store.list("k/"))) == 2500
        assert _wire(wire.requests) == meter.requests() == {"list": 3}


@pytest.mark.parametrize("name", PROFILES)
def test_latency_profiles_have_the_stated_spread(name):
    """Median and 99th percentile of 20,000 draws are those of the profile, within 10 %."""
    profile = PROFILES[name]
    chance = random.Random(1)
    draws = sorted(profile.delay_s(profile.write_ms, 0, chance.random()) for _ in range(20_000))
    assert draws[10_000] * 1000 == pytest.approx(profile.write_ms[0], rel=0.1)
    assert draws[19_800] * 1000 == pytest.approx(profile.write_ms[1], rel=0.1)


def test_large_bodies_take_their_time():
    """Bandwidth counts, in virtual time."""
    sim = Simulation(0)
    node = sim.process("node")
    store = Latency(node.raw_store(), PROFILES["s3-standard"])
    took = []

    def write():
        start_s = node.runtime.monotonic_s()
        store.put("k", bytes(9_000_000))
        took.append(node.runtime.monotonic_s() - start_s)

    node.spawn(write)
    sim.run()
    sim.close()
    assert took[0] > 0.1
