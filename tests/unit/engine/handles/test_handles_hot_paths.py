"""Hot paths stay hot: how many requests, and how many Python calls, each of them costs.

Seconds depend on the machine; calls do not. A guard that fails says that a change has put work
where there was none.
"""

import gc
import sys
import time
from contextlib import contextmanager

import pyarrow as pa
import pytest

import reef
from reef import kernel
from reef.jobs import fold
from reef.stores import local
from reef.telemetry import RequestMeter

pytestmark = pytest.mark.quiet
NAME = "events"
PUT_CALLS, DIRECTORY_CALLS = 235, 66
"""Of a put of one row, where the bucket is in memory; and the extra calls of a directory."""
GROUP_CALLS = 220
KERNEL_CALLS = {"get": 82, "get_many": 3_500, "scan": 285, "scan of two runs": 190}
"""Of reads of a directory beyond the caches, by the kernel: a tenth more than measured."""


@contextmanager
def calls():
    """Count the calls of Python and C functions inside."""
    counted = [0]

    def note(frame, event, argument):
        counted[0] += event in ("call", "c_call")

    gc.collect()
    gc.disable()  # the garbage of others, collected just then, would count as ours
    sys.setprofile(note)
    try:
        yield counted
    finally:
        sys.setprofile(None)
        gc.enable()


def table(count):
    """Return that many rows."""
    return pa.table(
        {
            "id": [f"k{n:07}" for n in range(count)],
            "amount": pa.array(range(count), pa.int64()),
            "state": ["open" if n % 2 else "paid" for n in range(count)],
        }
    )


@pytest.fixture
def meter():
    """Give a meter."""
    return RequestMeter()


@pytest.fixture
def db(meter):
    """Give a database with an empty table, its requests counted."""
    db = reef.open("memory://", meter=meter)
    db.create(NAME, table(1).schema)
    return db


@pytest.mark.parametrize("how", ["upsert", "patch"])
def test_100_000_rows_cost_no_work_per_row(db, meter, how):
    """Validated, encoded, committed and in the memtable: as many calls as for 1,000 rows."""
    small, large = table(2000), table(100_000)
    with db.writer(NAME, unfolded_bytes_max=1 << 30, background=False) as writer:
        write = getattr(writer, how)
        writer.upsert(large)
        write(small)
        with calls() as for_small:
            write(small)
        meter.reset()
        with calls() as for_large:
            write(large)
        assert meter.requests() == {"put": 1}
        assert for_large[0] < for_small[0] + 500 < 100_000 / 10


@pytest.mark.parametrize("where", ["memory", "directory"])
def test_a_durable_put_has_little_work_of_its_own(where, tmp_path, monkeypatch):
    """Encoded, sent, applied and completed by its own caller, in so many calls."""
    monkeypatch.setattr(local, "_suspects", set())  # a failed sync of an earlier test costs a stat
    db = reef.open("memory://" if where == "memory" else str(tmp_path))
    with db.writer("plain", background=False) as writer:
        counts = []
        for number in range(20):
            with calls() as counted:
                writer.put(b"k%d" % number, b"v" * 100)
            counts.append(counted[0])
    assert min(counts) <= (PUT_CALLS if where == "memory" else PUT_CALLS + DIRECTORY_CALLS)


@pytest.mark.parametrize("plain", [True, False], ids=["bytes", "columns"])
def test_a_warm_get_is_one_dict_lookup(db, meter, plain):
    """No request, and a handful of calls, from memory or from a segment alike."""
    name = "plain" if plain else NAME
    with db.writer(name) as writer:
        writer.put("k", b"v" if plain else {"amount": 1})
        fold(db, name)
        writer.refresh()
        reader = db.reader(name, refresh_interval_ms=1e9)
        most = 14 if plain else 16
        for handle in (writer, reader):
            first = handle.get("k")
            meter.reset()
            with calls() as counted:
                again = handle.get("k")
            assert again == first
            assert meter.requests() == {}
            assert counted[0] <= most


def test_get_many_of_1000_waits_for_two_round_trips(db, meter):
    """Cold: a tail and one ranged GET for each segment, however many keys. Warm: nothing."""
    with db.writer(NAME) as writer:
        for start in (0, 5000):
            writer.upsert(table(10_000).slice(start, 5000))
            fold(db, NAME)
    reader = db.reader(NAME, refresh_interval_ms=1e9)
    asked = [f"k{n:07}" for n in range(0, 10_000, 10)]
    meter.reset()
    found = reader.get_many(asked)
    assert found["amount"].to_pylist() == list(range(0, 10_000, 10))
    assert sum(meter.requests().values()) <= 4
    meter.reset()
    with calls() as counted:
        reader.get_many(asked)
    assert meter.requests() == {}
    assert counted[0] < 25 * len(asked)


def test_a_cold_get_many_of_1000_costs_a_third_of_1000_gets(db, meter):
    """In requests, in calls and in CPU time, each with a new reader; of a bucket it is far less."""
    with db.writer(NAME, background=False) as writer:
        writer.upsert(table(20_000))
    fold(db, NAME)
    keys = [f"k{n * 7919 % 20_000:07}" for n in range(1000)]

    def cost(read):
        with db.reader(NAME) as reader:
            assert reader.get("none") is None  # the filter and the index are in memory
            meter.reset()
            with calls() as counted:
                read(reader)
            requests = sum(meter.requests().values())
        with db.reader(NAME) as reader:
            assert reader.get("none") is None
            began_s = time.process_time()
            read(reader)
            return requests, counted[0], time.process_time() - began_s

    rounds = []
    for _ in range(5):
        many = cost(lambda reader: reader.get_many(keys))
        each = cost(lambda reader: [reader.get(key) for key in keys])
        rounds.append([one / other for one, other in zip(many, each, strict=True)])
    assert all(min(ratios) <= 1 / 3 for ratios in zip(*rounds, strict=True)), rounds


def test_a_missing_key_costs_nothing(db, meter):
    """Filters cached: no request, for one key or for many."""
    with db.writer(NAME) as writer:
        writer.upsert(table(1000))
        fold(db, NAME)
    reader = db.reader(NAME, refresh_interval_ms=1e9)
    reader.get("k0000001")
    meter.reset()
    assert [reader.get(f"k000000{n}x") for n in range(5)] == [None] * 5
    assert meter.requests().get("get", 0) <= 1, "a filter may be wrong once in 250"


def test_a_scan_has_little_work_per_row(db, meter):
    """A full scan of 20,000 warm rows: calls go by groups, not by rows."""
    with db.writer(NAME) as writer:
        writer.upsert(table(20_000))
        fold(db, NAME)
    reader = db.reader(NAME, refresh_interval_ms=1e9)
    reader.scan_arrow().read_all()
    meter.reset()
    with calls() as counted:
        assert reader.scan_arrow().read_all().num_rows == 20_000
    assert meter.requests() == {}
    assert counted[0] < 20_000 / 4


def test_a_cold_scan_has_little_work_per_group(meter):
    """Read, checked, unpacked and put together: so many calls for each group of 64 KiB."""
    db = reef.open("memory://", meter=meter)
    rows = pa.table({"id": [f"k{n:07}" for n in range(40_000)], "value": [b"v" * 100] * 40_000})
    with db.writer("plain") as writer:
        writer.upsert(rows.cast(pa.schema([("id", pa.binary()), ("value", pa.binary())])))
        fold(db, "plain")
    counts = []
    for _ in range(3):  # the garbage of others may be collected just then
        reader = db.reader("plain", refresh_interval_ms=1e9)
        groups = len(reader._segments.tail(reader._view().manifest.segments[0]).index)
        assert groups > 50
        with calls() as counted:
            assert reader.scan_arrow().read_all().num_rows == 40_000
        counts.append(counted[0])
    assert min(counts) < GROUP_CALLS * groups


def test_columns_that_are_not_asked_for_are_not_read(db, meter):
    """Fewer bytes fetched where groups are large; where they are small, a gap costs less than
    another request, and its rows are skipped, neither decoded nor kept.
    """
    wide = table(20_000).set_column(2, "state", pa.array(["x" * 100] * 20_000))
    with db.writer(NAME) as writer:
        writer.upsert(wide)
        fold(db, NAME, codec="none", group_bytes=1 << 20)
    read, kept = [], []
    for columns in (None, ["id"], ["id", "amount"]):
        reader = db.reader(NAME, refresh_interval_ms=1e9)
        meter.reset()
        assert reader.scan_arrow(columns=columns).read_all().num_rows == 20_000
        read.append(meter.to_dict()["get"]["bytes"])
        kept.append(reader._segments._cache.bytes)
    assert read[1] < read[2] < read[0] / 2
    assert kept[1] < kept[2] < kept[0] / 2


def test_groups_that_cannot_match_are_not_read(db, meter):
    """A condition on a column skips by smallest and largest value."""
    with db.writer(NAME) as writer:
        writer.upsert(table(20_000))
        fold(db, NAME, codec="none", group_bytes=4096)
    read = []
    for where in (None, "amount >= 19990"):
        reader = db.reader(NAME, refresh_interval_ms=1e9)
        meter.reset()
        reader.scan_arrow(where=where).read_all()
        read.append(meter.to_dict()["get"]["bytes"])
    assert read[1] < read[0] / 3


@pytest.mark.skipif(
    getattr(kernel.native, "get_values", None) is None, reason="the kernel was not built here"
)
def test_reads_by_the_kernel_have_little_work_of_their_own(tmp_path):
    """Of a directory, beyond the caches: a get, 1,000 keys, and 100 rows, folded and not."""
    db = reef.open(str(tmp_path))
    count = 40_000
    keys = [b"k%07d" % n for n in range(count)]
    rows = pa.table({"id": keys, "value": [b"v%07d" % n * 12 for n in range(count)]})
    settings = {"cache_bytes": 600_000, "row_cache_bytes": 0}
    with db.writer("plain", background=False, **settings) as writer:
        writer.upsert(rows)
        fold(db, "plain")
        reader = db.reader("plain", refresh_interval_ms=1e9, **settings)
        reads = {
            "get": lambda n: reader.get(keys[n]),
            "get_many": lambda n: reader.get_many(keys[n::40]),
            "scan": lambda n: list(reader.scan(start=keys[n], limit=100)),
        }
        fewest = {name: _fewest(read) for name, read in reads.items()}
        writer.upsert(rows.slice(0, 20_000))
        writer.upsert(rows.slice(0, 5_000))
        runs = "scan of two runs"
        fewest[runs] = _fewest(lambda n: list(writer.scan(start=keys[n], limit=100)))
    for name, most in KERNEL_CALLS.items():
        assert fewest[name] <= most, fewest


def _fewest(read):
    """Return the calls of the cheapest of several reads."""
    counts = []
    for n in range(3, 1000, 111):
        with calls() as counted:
            read(n)
        counts.append(counted[0])
    return min(counts)
