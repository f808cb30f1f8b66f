"""Short scans by the kernel: the same rows as those of the ordinary merge, in fewer steps."""

import random
import sys
from functools import partial

import pyarrow as pa
import pytest

import reef
from reef import kernel
from reef.engine.read.short_scan import ShortScan
from reef.jobs import compact, fold
from reef.telemetry import RequestMeter

needs_kernel = pytest.mark.skipif(
    getattr(kernel.native, "merge_rows", None) is None, reason="the kernel was not built here"
)
NAME = "t"


@pytest.fixture(autouse=True)
def small_files_stay_open(monkeypatch):
    """Files of tests are small, and none of their pages are kept."""
    monkeypatch.setattr("reef.stores.local.KEPT_BYTES_MIN", 0)
    monkeypatch.setattr("reef.formats.segment_writer.PAGE_BYTES", 60)


def key(number):
    """Return a key of five bytes."""
    return b"%05d" % number


def change(chance, db, writer, model, *, deletes_ranges):
    """Do something random to a table and to its model."""
    what = chance.choice(["put"] * 3 + ["batch"] * 3 + ["delete"] * 2 + ["fold"] * 2 + ["rare"])
    some = [key(chance.randrange(300)) for _ in range(chance.choice([1, 5, 80]))]
    value = chance.randbytes(chance.randrange(12))
    if what == "put":
        writer.put(some[0], value)
        model[some[0]] = value
    elif what == "batch":
        writer.upsert(pa.table({"id": pa.array(some), "value": pa.array([value] * len(some))}))
        model |= dict.fromkeys(some, value)
    elif what == "delete":
        batch = reef.Batch()
        for one in some:
            batch.delete(one)
            model.pop(one, None)
        writer.write(batch)
    elif what == "fold":
        size, codec = chance.choice([300, 1 << 20]), chance.choice(["lz4", "lz4", "zstd"])
        fold(db, NAME, segment_bytes_max=size, codec=codec)
    elif not deletes_ranges:
        compact(db, NAME, full=True)
    else:
        start, end = sorted([some[0], key(chance.randrange(300))])
        if start < end:
            writer.delete_range(start, end)
            for one in [one for one in model if start <= one < end]:
                del model[one]


def expected(model, start, end, limit):
    """Return the rows that a scan has."""
    found = sorted(
        item for item in model.items() if start <= item[0] < (b"~" if end is None else end)
    )
    return found[:limit]


@needs_kernel
@pytest.mark.parametrize("seed", range(6))
def test_short_scans_have_the_rows_of_a_model(seed, tmp_path, monkeypatch):
    """Ranges, limits and projections over rows in memory and in segments, deletes among them; with
    the kernel and without it, of a writer and of a reader."""
    chance, model = random.Random(seed), {}
    db = reef.open(str(tmp_path))
    done = []
    monkeypatch.setattr(ShortScan, "__iter__", _noting(ShortScan.__iter__, done))
    with db.writer(NAME, background=False, cache_bytes=0) as writer:
        for step in range(25):
            change(chance, db, writer, model, deletes_ranges=step > 15)
            writer.refresh()
            reader = db.reader(NAME, cache_bytes=0)
            start, end = key(chance.randrange(300)), chance.choice([None, key(300), key(150), b""])
            limit = chance.choice([0, 1, 7, 40, 1000])
            rows = expected(model, start, end, limit)
            assert list(writer.scan(start, end, limit=limit)) == rows
            assert list(reader.scan(start, end, limit=limit)) == rows
            keys = [(one, {"id": one}) for one, _ in rows]
            assert list(reader.scan(start, end, limit=limit, columns=["id"])) == keys
            with monkeypatch.context() as patched:
                patched.setattr(kernel, "native", None)
                assert list(reader.scan(start, end, limit=limit)) == rows
    assert len(done) >= 20, "some scans are those of the kernel"


def _noting(iterate, done):
    def noted(self):
        for rows in iterate(self):
            done.append(1)
            yield rows

    return noted


def calls_of(call):
    """Return how many functions of Python and C are called."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in {"call", "c_call"}

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def scan_100(handle, start):
    """Read 100 rows."""
    assert len(list(handle.scan(start, limit=100))) == 100


@needs_kernel
@pytest.mark.quiet
def test_a_short_scan_makes_few_calls_whatever_the_size(tmp_path, monkeypatch):
    """H75: 100 rows of a segment and of a memtable, both ten times as large: one GET, and no
    more calls."""
    monkeypatch.undo()
    found = []
    for rows in (10_000, 60_000):
        meter = RequestMeter()
        db = reef.open(str(tmp_path / str(rows)), meter=meter)
        values = [random.Random(n).randbytes(50) * 2 for n in range(rows)]
        table = pa.table({"id": pa.array([b"%016d" % n for n in range(rows)]), "value": values})
        writer = db.writer(NAME, background=False, cache_bytes=300_000, row_cache_bytes=0)
        writer.upsert(table)
        fold(db, NAME)
        writer.refresh()
        found.append([])
        for _ in ("folded", "half of the rows are not"):
            for part in (2, 3):
                list(writer.scan(b"%016d" % (rows // part), limit=100))
            meter.reset()
            found[-1].append(calls_of(partial(scan_100, writer, b"%016d" % (rows // 4))))
            assert meter.requests() == {"get": 1}
            writer.upsert(table.take(list(range(0, rows, 2))))
        writer.close()
    for few, many in zip(*found, strict=True):
        assert many <= few + 5
    assert max(map(max, found)) <= 230
