"""Reads of pages: requests, bytes and calls do not grow with the data (H75)."""

import random
import sys
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pytest

import reef
from reef.jobs import fold
from reef.telemetry import RequestMeter

pytestmark = pytest.mark.quiet
NAME = "t"
SIZES = (2_000, 20_000, 200_000)


def key(number):
    """Return a key of 16 bytes."""
    return b"user-%011d" % number


def plain_table(rows):
    """Return rows of 16 + 100 bytes that compress to a half."""
    chance = random.Random(rows)
    values = [chance.randbytes(50) * 2 for _ in range(rows)]
    return pa.table(
        {
            "id": pa.array([key(number) for number in range(rows)], pa.binary()),
            "value": pa.array(values, pa.binary()),
        }
    )


def written(table, name=NAME, **settings):
    """Return a database with the rows in one segment, and the meter of its requests."""
    meter = RequestMeter()
    db = reef.open("memory://", meter=meter)
    if name not in [n for n in db.namespaces()]:
        db.create(name, table.schema)
    with db.writer(name, background=False) as writer:
        writer.upsert(table)
    fold(db, name, segment_bytes_max=1 << 30, **settings)
    return db, meter


@contextmanager
def counted_calls():
    """Count Python calls."""
    count = [0]

    def note(frame, event, argument):
        count[0] += event == "call"

    sys.setprofile(note)
    try:
        yield count
    finally:
        sys.setprofile(None)


def bytes_read(meter):
    """Return the bytes of all GETs."""
    return meter.to_dict()["get"]["bytes"]


def test_a_cold_get_reads_kilobytes_whatever_the_size():
    """One GET for the tail, one for the blocks of a page; its bytes and calls stay the same."""
    results = []
    for rows in SIZES:
        db, meter = written(plain_table(rows))
        reader = db.reader(NAME, refresh_interval_ms=1e9)
        assert reader.get(key(rows // 3)) is not None
        meter.reset()
        with counted_calls() as calls:
            assert reader.get(key(rows // 2)) is not None
        assert meter.requests() == {"get": 1}
        results.append((bytes_read(meter), calls[0]))
        meter.reset()
        assert reader.get(key(rows // 2)[:-1] + b"x") is None
        assert meter.requests() == {}, "a missing key costs nothing once the filter is cached"
    sizes, calls = zip(*results, strict=True)
    assert max(sizes) < 300_000, "within a group, of which a bucket sends one range"
    assert max(calls) <= 1.1 * min(calls)
    assert max(calls) < 130


def test_a_get_from_a_directory_reads_one_page(tmp_path):
    """Two ranges of about 16 KiB together, not the group."""
    meter = RequestMeter()
    db = reef.open(str(tmp_path), meter=meter)
    with db.writer(NAME, background=False) as writer:
        writer.upsert(plain_table(100_000))
    fold(db, NAME)
    reader = db.reader(NAME, refresh_interval_ms=1e9)
    reader.get(key(1))
    meter.reset()
    assert reader.get(key(70_000)) is not None
    assert bytes_read(meter) < 20_000
    assert meter.requests() == {"get": 1}


def test_a_short_scan_does_not_grow_with_its_segment():
    """100 rows: the same requests, bytes and calls in a segment a hundred times as large."""
    results = []
    for rows in SIZES:
        db, meter = written(plain_table(rows))
        reader = db.reader(NAME, refresh_interval_ms=1e9)
        assert len(list(reader.scan(start=key(1), limit=100))) == 100
        meter.reset()
        with counted_calls() as calls:
            assert len(list(reader.scan(start=key(rows // 2), limit=100))) == 100
        results.append((bytes_read(meter), calls[0], meter.requests()["get"]))
    sizes, calls, requests = zip(*results, strict=True)
    assert max(sizes) < 200_000
    assert max(calls) <= 1.2 * min(calls)
    assert max(calls) < 800
    assert max(requests) <= 2


def test_a_cold_scan_makes_few_calls_for_each_megabyte():
    """Pages are decoded together: calls go by blocks, not by rows or buffers."""
    results = []
    for rows in (20_000, 200_000):
        db, _ = written(plain_table(rows))
        reader = db.reader(NAME, refresh_interval_ms=1e9, cache_bytes=0)
        reader.get(key(1))
        with counted_calls() as calls:
            assert reader.scan_arrow().read_all().num_rows == rows
        results.append(calls[0] / (rows * 116 / 1e6))
    assert results[1] < 1.1 * results[0]
    assert results[1] < 700


@pytest.mark.parametrize("count", [10, 100, 400])
def test_two_keys_open_two_segments(count):
    """Of segments that do not overlap, `get_many` opens those that may have a key."""
    meter = RequestMeter()
    db = reef.open("memory://", meter=meter)
    with db.writer(NAME, background=False) as writer:
        writer.upsert(plain_table(count * 4))
    fold(db, NAME, segment_bytes_max=100, group_bytes=100)
    reader = db.reader(NAME, refresh_interval_ms=1e9)
    segments = len(reader._view().manifest.segments)
    assert segments >= count
    meter.reset()
    found = reader.get_many([key(0), key(4 * count - 1)])
    assert found["_found"].to_pylist() == [True, True]
    assert meter.requests() == {"get": 4}, "two tails and two pages"
    reader.get(key(0) + b"x")
    with counted_calls() as calls:
        assert reader.get(key(0)) is not None
    assert calls[0] < 130, "not by the number of segments"


def wide_table(rows, columns=12):
    """Return rows of a key, a vector of 64 floats and other columns."""
    chance = np.random.default_rng(1)
    arrays = {"id": pa.array([key(number) for number in range(rows)], pa.binary())}
    vectors = chance.random(rows * 64, np.float32)
    arrays["vector"] = pa.FixedSizeListArray.from_arrays(pa.array(vectors), 64)
    for number in range(columns - 1):
        if number % 2:
            arrays[f"c{number}"] = pa.array(
                [f"text {n * 7919 % 100_003} {number}" for n in range(rows)]
            )
        else:
            arrays[f"c{number}"] = pa.array(chance.integers(0, 1 << 40, rows))
    return pa.table(arrays)


@pytest.mark.parametrize("where", ["directory", "memory"])
def test_one_column_of_thirteen_reads_its_own_bytes(where, tmp_path):
    """At most 15 % of the bytes of all columns, the keys included."""
    meter = RequestMeter()
    db = reef.open(str(tmp_path) if where == "directory" else "memory://", meter=meter)
    table = wide_table(20_000)
    db.create(NAME, table.schema)
    with db.writer(NAME, background=False) as writer:
        writer.upsert(table)
    fold(db, NAME, segment_bytes_max=1 << 30)
    read = []
    for columns in (None, ["c2"]):
        reader = db.reader(NAME, refresh_interval_ms=1e9, cache_bytes=0)
        reader.get(key(1))
        meter.reset()
        result = reader.scan_arrow(columns=columns).read_all()
        assert result.num_rows == 20_000
        read.append(bytes_read(meter))
    assert result["c2"].to_pylist() == table["c2"].to_pylist()
    assert read[1] <= 0.15 * read[0]


def test_a_get_of_one_column_reads_one_column():
    """Of a thousand columns, the blocks of the others are not read."""
    rows = 300
    arrays = {"id": pa.array([key(number) for number in range(rows)], pa.binary())}
    arrays |= {f"c{n}": pa.array(np.arange(rows) * n) for n in range(1000)}
    meter = RequestMeter()
    db = reef.open("memory://", meter=meter)
    db.create(NAME, pa.table(arrays).schema)
    with db.writer(NAME, background=False) as writer:
        writer.upsert(pa.table(arrays))
    fold(db, NAME)
    reader = db.reader(NAME, refresh_interval_ms=1e9, row_cache_bytes=0)
    reader.get(key(1), columns=["c1"])
    kept = reader._segments._cache.bytes
    assert reader.get(key(100), columns=["c7"]) == {"c7": 700}
    assert reader._segments._cache.bytes - kept < 40_000
    assert reader.get(key(2), columns=["c999"]) == {"c999": 1998}


@pytest.mark.parametrize("cache_bytes", [0, 64 << 20])
def test_a_column_that_was_added_later_is_null(cache_bytes, tmp_path, monkeypatch):
    """A segment of the time before does not have it, in pages that are kept and in others."""
    monkeypatch.setattr("reef.stores.local.KEPT_BYTES_MIN", 0)
    db = reef.open(str(tmp_path))
    table = plain_table(3_000)
    with db.writer(NAME, background=False) as writer:
        writer.upsert(table)
    fold(db, NAME)
    db.alter(NAME, table.schema.append(pa.field("later", pa.int64())))
    reader = db.reader(NAME, cache_bytes=cache_bytes, row_cache_bytes=0)
    reader.get(key(1))
    for number in (2, 2_000, 2_001):
        assert reader.get(key(number), columns=["later"]) == {"later": None}
        assert reader.get(key(number))["later"] is None


def test_wide_tables_cost_by_the_column():
    """Ten times the columns: about ten times the calls of a fold and of a scan, not a hundred."""
    results = []
    for columns in (30, 300):
        rows = 500
        arrays = {"id": pa.array([key(number) for number in range(rows)], pa.binary())}
        arrays |= {f"c{n}": pa.array(np.arange(rows) + n) for n in range(columns)}
        table = pa.table(arrays)
        db = reef.open("memory://")
        db.create(NAME, table.schema)
        with db.writer(NAME, background=False) as writer:
            writer.upsert(table)
        with counted_calls() as folding:
            fold(db, NAME)
        reader = db.reader(NAME, refresh_interval_ms=1e9, cache_bytes=0)
        groups = len(reader._segments.tail(reader._view().manifest.segments[0]).index)
        with counted_calls() as scanning:
            assert reader.scan_arrow().read_all().num_rows == rows
        results.append((folding[0], scanning[0], groups))
    assert results[1][0] < 14 * results[0][0]
    assert results[1][1] < 14 * results[0][1]
    assert results[1][2] <= 4


def test_a_long_scan_leaves_hot_pages_in_memory():
    """A scan of more than the cache keeps a part of it; the page of a hot key stays."""
    db, meter = written(plain_table(50_000))
    reader = db.reader(NAME, refresh_interval_ms=1e9, cache_bytes=1 << 20, row_cache_bytes=0)
    reader.get(key(25_000))
    assert reader.scan_arrow().read_all().num_rows == 50_000
    meter.reset()
    assert reader.get(key(25_000)) is not None
    assert meter.requests() == {}


def test_a_second_scan_of_data_that_fits_costs_no_request():
    """All pages are kept if all of them fit."""
    db, meter = written(plain_table(20_000))
    reader = db.reader(NAME, refresh_interval_ms=1e9, cache_bytes=8 << 20)
    assert reader.scan_arrow().read_all().num_rows == 20_000
    meter.reset()
    assert reader.scan_arrow().read_all().num_rows == 20_000
    assert meter.requests() == {}


def test_a_lookup_of_more_than_the_cache_leaves_the_index_in_memory():
    """H75: its pages would push out the tail, and each lookup would begin by reading it again."""
    db, meter = written(plain_table(50_000))
    reader = db.reader(NAME, refresh_interval_ms=1e9, cache_bytes=1 << 20, row_cache_bytes=0)
    asked = [key(number) for number in range(0, 50_000, 50)]
    assert reader.get_many(asked).num_rows == len(asked)
    meter.reset()
    assert reader.get_many(asked[:10])["_found"].to_pylist() == [True] * 10
    tails = meter.requests()["get"]
    assert tails == 1, "the pages, in one range"


@pytest.mark.parametrize("where", ["directory", "memory"])
def test_short_reads_do_not_get_slower_with_segments(where, tmp_path):
    """A scan of some rows, from both ends, and two keys: over 120 segments as over 20."""
    counts = []
    db = reef.open(str(tmp_path) if where == "directory" else "memory://")
    with db.writer("plain", background=False) as writer:
        for number in range(120):
            keys = [key(n) for n in range(number * 10, number * 10 + 10)]
            writer.upsert(pa.table({"id": pa.array(keys), "value": pa.array([b"v"] * 10)}))
            fold(db, "plain")
            if number + 1 in {20, 120}:
                counts.append(_calls_of_reads(db, number))
    few, many = counts
    assert len(db.reader("plain")._view().manifest.segments) > 100
    for name, calls in few.items():
        assert many[name] <= calls + 40, (few, many)


def _calls_of_reads(db, last):
    reader = db.reader("plain", refresh_interval_ms=1e9)
    reads = {
        "scan": lambda: list(reader.scan(start=key(50), limit=15)),
        "reverse": lambda: list(reader.scan(reverse=True, limit=15)),
        "get_many": lambda: reader.get_many([key(3), key(last * 10 + 4)]),
    }
    found = {}
    for name, read in reads.items():
        read()
        with counted_calls() as calls:
            read()
        found[name] = calls[0]
    return found
