"""Requests are counted, and the counts are true: a proxy on the wire agrees with the meter."""

import random

import pytest

from reef import stores
from reef.errors import InvalidInputError, UnavailableError
from reef.stores import Meter, RetryPolicy
from reef.stores.memory import MemoryStore
from reef.telemetry import Metrics, RequestMeter
from reef.testing import PROFILES, Fault, Faults, Latency, Rule, Simulation
from tests.support.http_proxy import Failing, Forwarding, Trouble, proxy

MIB = 1 << 20
ONCE = RetryPolicy(attempts_max=1)


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


def test_a_fault_strikes_whichever_key_it_names():
    """`Faults.delete_many` checks all keys, not at the first alone."""
    store = Faults(MemoryStore(), [Rule(Fault.FAIL_BEFORE, "delete", "wal/2", times=1)])
    store.put("wal/1", b"")
    with pytest.raises(UnavailableError):
        store.delete_many(["wal/1", "wal/2"])
    assert store.get("wal/1") == b""
    store.delete_many([])
    store.delete_many(["wal/1", "wal/2"])


def test_latencies_are_recorded():
    """Each kind of request has its histogram of seconds."""
    metrics = Metrics()
    store = stores.open("memory://", metrics=metrics)
    store.put("k", b"v")
    store.get("k")
    store.copy("k", "copied")
    store.upload("uploaded", [b"a", b"b"])
    store.delete_many(["k", "copied"])
    counts = {name: metric["count"] for name, metric in metrics.to_dict().items()}
    assert counts == {f"requests.{name}": 1 for name in ("put", "get", "copy", "upload", "delete")}
    assert metrics.to_dict()["requests.get"]["max"] > 0


def _wire(requests):
    """Sort the requests that a proxy saw into the meter's kinds."""
    counts = {}
    for method, path, headers in requests:
        kind = {"POST": "put", "PUT": "put"}.get(method, method.lower())
        if method == "GET" and ("list-type" in path or "?uploads" in path):
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


@pytest.fixture
def wired(ministack):
    """Give a way to open a bucket through a counting proxy, the meter, and the proxy."""
    ministack.make_bucket("wire")
    with proxy(Failing, ministack.address) as wire:
        meter = RequestMeter()

        def open_wired(prefix, **options):
            options = {**ministack.options(), "endpoint": wire.endpoint, **options}
            return stores.open(f"s3://wire/{prefix}", meter=meter, retry=ONCE, **options)

        yield open_wired, meter, wire


@pytest.fixture(scope="module")
def long_folder():
    """Give a function that fills the folder L of a server with 3,500 objects, once."""
    filled = set()

    def fill(server):
        server.make_bucket("wire")
        store = stores.open("s3://wire/folder", **server.options())
        if server.endpoint not in filled:
            store.runtime.gather([lambda n=n: store.put(f"L/{n:04}", b"") for n in range(3500)])
            filled.add(server.endpoint)

    return fill


SHORT_LISTINGS = [
    ("L/0349", "", 1, 1),
    ("L/034", "", 10, 1),
    ("L/34", "", 100, 1),
    ("L/34", "L/3490", 9, 1),
    ("L/34", "L/2", 100, 1),
    ("L/0", "", 1000, 2),  # whether there is an eleventh hundred is known from the next page
    ("L/", "L/3399", 100, 1),
    ("L/", "L/z", 0, 1),
    ("L/9", "", 0, 1),
    ("L", "", 3500, 4),
    ("nothing/here", "", 0, 1),
]


@pytest.mark.parametrize(("prefix", "start_after", "found", "requests"), SHORT_LISTINGS)
def test_a_listing_begins_at_its_prefix(
    ministack, wired, long_folder, prefix, start_after, found, requests
):
    """A part of a large folder costs its own pages, on the wire and on the meter."""
    long_folder(ministack)
    open_wired, meter, wire = wired
    listed = list(open_wired("folder").list(prefix, start_after))
    assert len(listed) == found
    assert all(i.key.startswith(prefix) and i.key > start_after for i in listed)
    assert _wire(wire.requests) == meter.requests() == {"list": requests}


def test_an_unsorted_listing_costs_the_folder(ministack, wired, long_folder):
    """Where the order cannot be trusted all pages are read, and counted."""
    long_folder(ministack)
    open_wired, meter, wire = wired
    listed = list(open_wired("folder", listing="unsorted").list("L/", "L/3398"))
    assert len(listed) == 101
    assert _wire(wire.requests) == meter.requests() == {"list": 4}


def test_a_listing_costs_the_pages_that_were_read(ministack, wired, long_folder):
    """Nothing before the first object; one page for the first thousand; a failure counts."""
    long_folder(ministack)
    open_wired, meter, wire = wired
    listing = open_wired("folder").list("L/")
    assert meter.requests() == {}
    for _ in range(1000):
        next(listing)
    assert _wire(wire.requests) == meter.requests() == {"list": 1}
    wire.troubles.append(Trouble(503, "SlowDown"))
    with pytest.raises(UnavailableError):
        next(listing)
    assert _wire(wire.requests) == meter.requests() == {"list": 2}


ODD_KEYS = sorted(["0", "a", "a b", "a!", "a/0", "a/b", "a/]x", "a/ä", "a/ö/1", "a0", "é", "😀1"])
ODD_PREFIXES = sorted({key[:end] for key in ODD_KEYS for end in range(1, len(key) + 1)})


@pytest.mark.parametrize("name", ["ministack", "ceph"])
def test_a_listing_that_begins_at_its_prefix_misses_nothing(servers, name):
    """Whatever character a prefix ends with: the offset below it hides no key."""
    server = servers.use(name)
    server.make_bucket("odd-keys")
    store = stores.open("s3://odd-keys/x", **server.options())
    for key in ODD_KEYS:
        store.put(key, b"")
    for prefix in ODD_PREFIXES:
        for start_after in ("", "/", "/z", "a/", "a//z", prefix, prefix + " "):
            expected = [k for k in ODD_KEYS if k.startswith(prefix) and k > start_after]
            found = [info.key for info in store.list(prefix, start_after)]
            assert found == expected, (prefix, start_after)


def test_the_clock_and_the_sweep_are_counted(ministack, wired):
    """now() writes and reads; abort_stale() reads the clock, lists, and aborts old uploads."""
    open_wired, meter, wire = wired
    store = open_wired("swept")
    store.now()
    assert _wire(wire.requests) == meter.requests() == {"put": 1, "head": 1}
    with ministack.client() as client:
        for key in ("swept/1", "swept/2"):
            client.create_multipart_upload(Bucket="wire", Key=key)
    assert store.abort_stale(-5) == 2
    expected = {"put": 2, "head": 2, "list": 1, "delete": 2}
    assert _wire(wire.requests) == meter.requests() == expected


def test_clocks_and_sweeps_that_cost_nothing_count_nothing(metered):
    """A store in memory sends no request."""
    store, meter = metered
    store.now()
    store.abort_stale(0)
    assert meter.requests() == {}


def _breaking(pieces):
    for _ in range(pieces):
        yield bytes(5 * MIB)
    raise RuntimeError("the source broke")


@pytest.mark.parametrize("pieces", [0, 1, 2, 3, 4])
def test_an_upload_whose_source_breaks_is_counted(wired, pieces):
    """Begin, the parts that were sent, and the abort; nothing if it broke before."""
    open_wired, meter, wire = wired
    store = open_wired("broken", part_bytes=5 * MIB, upload_concurrency=1)
    with pytest.raises(RuntimeError, match="the source broke"):
        store.upload("n", _breaking(pieces))
    assert sum(_wire(wire.requests).values()) == sum(meter.requests().values())


def test_an_upload_that_the_store_refuses_is_counted(wired):
    """A PUT that got 403 was sent, and is billed."""
    open_wired, meter, wire = wired
    wire.troubles.append(Trouble(403, "AccessDenied", method="PUT"))
    with pytest.raises(InvalidInputError):
        open_wired("refused").upload("n", [b"small"])
    assert _wire(wire.requests) == meter.requests() == {"put": 1}


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


def test_failed_listings_are_counted():
    """A LIST that was refused was sent, and is billed."""
    meter = RequestMeter()
    faults = Faults(MemoryStore(), [Rule(Fault.UNAVAILABLE_503, "list", times=2)])
    store = stores.Retry(Meter(faults, meter), RetryPolicy(first_delay_s=0.0))
    assert list(store.list()) == []
    assert meter.requests() == {"list": 3}
