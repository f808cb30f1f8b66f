"""The memtable at 5,000 to 500,000 unfolded rows: calls and bytes that do not grow with them."""

import gc
import tracemalloc
from contextlib import contextmanager
from random import Random

import pyarrow as pa
import pytest

import reef
from reef.engine.read import memtable as module
from reef.engine.read.memtable import Memtable
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.wal_object import OneOp, OpKind, Ops, encode_ops
from reef.types import KeyRange
from tests.unit.engine.handles.test_handles_hot_paths import calls
from tests.unit.engine.read.test_memtable_joined_patches import merge_all

pytestmark = pytest.mark.quiet
NAME = "t"
SIZES = (5_000, 50_000, 500_000)
POOLS = []
"""Kept for good: rows that were allocated from a pool outlive the test."""


def key(number):
    """Return one of many keys of 8 bytes, in order."""
    return b"%08d" % number


def put_of(numbers):
    """Return a batch of rows of 8 + 8 bytes."""
    keys = pa.array([key(number) for number in numbers], pa.binary())
    kinds = pa.array([int(OpKind.PUT)] * len(keys), pa.uint8())
    return Ops(keys, kinds, fields={1: keys})


def put_rows(start, end, batch):
    """Return a memtable with rows in batches, merged."""
    memtable = Memtable(DEFAULT_SCHEMA, 1)
    for lsn, first in enumerate(range(start, end, batch), 1):
        memtable.apply(lsn, [put_of(range(first + batch - 1, first - 1, -1))])
    merge_all(memtable)
    return memtable


def shuffled(count, seed=0):
    """Return so many numbers in random order; every other number is left out."""
    numbers = list(range(0, 2 * count, 2))
    Random(seed).shuffle(numbers)
    return numbers


@pytest.fixture(scope="module")
def writers():
    """Give a writer for each size, its rows in batches of random keys, read a few times."""
    db = reef.open("memory://")
    made = {}
    for size in SIZES:
        writer = db.writer(f"{NAME}{size}", background=False, unfolded_bytes_max=1 << 30)
        numbers = shuffled(size)
        for start in range(0, size, 5_000):
            keys = [key(number) for number in numbers[start : start + 5_000]]
            writer.upsert({"id": keys, "value": keys})
        for _ in range(30):
            list(writer.scan(limit=1))
        made[size] = writer
    yield made
    for writer in made.values():
        writer.close()


@contextmanager
def allocated():
    """Give the most bytes of Python and Arrow memory that were in use inside, above before."""
    pool, before = pa.proxy_memory_pool(pa.default_memory_pool()), pa.default_memory_pool()
    POOLS.append(pool)
    peak = [0]
    gc.collect()
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        yield peak
        peak[0] = tracemalloc.get_traced_memory()[1] + pool.max_memory()
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)


@pytest.mark.parametrize("limit", [1, 100])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_short_scan_costs_the_same_at_any_size(writers, limit, reverse):
    """Calls and bytes of a short scan among 500,000 unfolded rows are those among 5,000."""
    counts, sizes = [], []
    for size, writer in writers.items():
        bounds = {"end": key(size)} if reverse else {"start": key(size)}
        found = list(writer.scan(**bounds, limit=limit, reverse=reverse))
        assert len(found) == limit
        with calls() as counted:
            list(writer.scan(**bounds, limit=limit, reverse=reverse))
        counts.append(counted[0])
        peaks = []
        for _ in range(5):  # threads of other tests allocate too, and only ever add
            with allocated() as peak:
                list(writer.scan(**bounds, limit=limit, reverse=reverse))
            peaks.append(peak[0])
        sizes.append(min(peaks))
    assert max(counts) < min(counts) + 300 < 1500
    assert max(sizes) < 300_000


def test_a_scan_after_each_put_costs_the_same_at_any_size(writers):
    """A put adds to the head, and a scan sorts the head alone."""
    counts = []
    for writer in writers.values():
        spent = []
        for number in range(7):
            with calls() as counted:
                writer.put(key(2 * number + 1), b"v")
                assert len(list(writer.scan(limit=20))) == 20
            spent.append(counted[0])
        counts.append(sorted(spent)[3])
    assert max(counts) < min(counts) + 300


def test_a_cut_is_taken_in_constant_time(writers):
    """After a change: one copy of the head; without one, the same cut again."""
    for writer in writers.values():
        memtable = writer._committer.tail.view().memtable
        writer.put(key(1), b"v")
        with calls() as counted:
            cut = memtable.cut()
        assert counted[0] < 20
        assert memtable.cut() is cut


def test_reads_reach_few_runs(writers):
    """The number of runs grows with the logarithm of the rows, once reads have merged them."""
    for size, writer in writers.items():
        memtable = writer._committer.tail.view().memtable
        for _ in range(30):
            list(writer.scan(limit=1))
        runs = memtable.cut().runs
        assert len(runs) <= 4 + (size > 5_000) * 4
        assert sum(run.count for run in runs) >= size


def test_reads_of_a_local_writer_merge_both_tables(tmp_path):
    """The uploaded rows, and those of the local log above them."""
    db = reef.open(str(tmp_path / "bucket"))
    settings = {"durability": "local", "local_log": tmp_path / "log", "background": False}
    with db.writer(NAME, upload_interval_ms=1e9, **settings) as writer:
        for flushes in (True, False):
            for start in range(module.RUNS_MAX + 4):
                keys = [key(number) for number in range(start, 600, 10)]
                writer.upsert({"id": keys, "value": keys})
            if flushes:
                writer.flush()
        assert len(list(writer.scan(limit=1))) == 1
        view = writer._view()
        for table in (view.memtable, view.staged):
            assert 0 < len(table.cut().runs) <= module.RUNS_MAX


@pytest.mark.parametrize("batch", [1, 100, 10_000])
def test_a_row_takes_at_most_twice_its_encoded_bytes(monkeypatch, batch):
    """Rows of 8 + 8 bytes in batches, and one by one; after reads have sorted and merged them."""
    monkeypatch.setattr(module, "PART_ROWS", 4_096)
    monkeypatch.setattr(module, "SMALL_ROWS", 2_048)
    count = 50_000 if batch > 1 else 10_000
    numbers, encoded = shuffled(count), 0
    len(put_rows(0, 1_000, 10).cut().rows(KeyRange()))  # the first merge imports modules
    memtable = Memtable(DEFAULT_SCHEMA, 1)
    with allocated() as peak:
        for lsn, start in enumerate(range(0, count, batch), 1):
            if batch == 1:
                ops = OneOp(key(numbers[start]), 1, key(numbers[start]))
            else:
                ops = put_of(numbers[start : start + batch])
            encoded += len(encode_ops(ops))
            memtable.apply(lsn, [ops])
            del ops
        for _ in range(50):
            memtable.tidy()
        memtable.cut().versions(b"nothing")
        gc.collect()
        held = tracemalloc.get_traced_memory()[0] + POOLS[-1].bytes_allocated()
        counted = memtable.size
        assert sum(run.count for run in memtable.cut().all_runs()) == count
    assert 0.9 * counted < held < 1.3 * counted, "counted bytes are held bytes"
    assert held < 2 * encoded
    assert peak[0] < 2.5 * encoded + 200 * (4_096 + batch), "one part is held several times"


def test_a_single_put_is_a_few_calls():
    """Of the commit itself, on average over heads that become runs and runs that are merged."""
    memtable = Memtable(DEFAULT_SCHEMA, 1)
    ops = [OneOp(key(number), 1, b"v" * 100) for number in shuffled(20_000)]
    with calls() as counted:
        for lsn, op in enumerate(ops, 1):
            memtable.apply(lsn, [op])
    assert counted[0] / len(ops) < 16


def test_a_batch_is_applied_without_work_per_row():
    """Neither sorted nor copied: that is for the first read."""
    spent = []
    for size in (1_000, 100_000):
        peaks, ops = [], put_of(shuffled(size))
        for _ in range(3):  # the heartbeats of open writers allocate too, and only ever add
            memtable = Memtable(DEFAULT_SCHEMA, 1)
            with allocated() as peak, calls() as counted:
                memtable.apply(1, [ops])
            peaks.append(peak[0])
        spent.append(counted[0])
        assert min(peaks) < 20 * size + 10_000, "LSNs and sequences alone"
    assert spent[1] == spent[0]


def test_a_merge_that_stops_halfway_holds_little_more_than_the_rows(monkeypatch):
    """The rest of a run is copied before much of its buffers is merged: they can be freed."""
    monkeypatch.setattr(module, "PART_ROWS", 2_000)
    memtable = Memtable(DEFAULT_SCHEMA, 1)
    with allocated():
        for lsn in range(1, 7):
            memtable.apply(lsn, [put_of(shuffled(10_000, lsn))])
        held = []
        while len(memtable.cut().runs) > module.RUNS_MAX:
            memtable.tidy()
            held.append(POOLS[-1].bytes_allocated() / memtable.size)
    assert len(held) > 10
    assert max(held) < 1.5


def test_runs_of_different_keys_are_merged_in_parts(monkeypatch):
    """However their keys are distributed, no part is much larger than it should be."""
    monkeypatch.setattr(module, "PART_ROWS", 1_000)
    memtable, parts, split = Memtable(DEFAULT_SCHEMA, 1), [], module.split_off

    def counted(runs, *bounds):
        found, rest = split(runs, *bounds)
        parts.append(sum(map(len, found)))
        return found, rest

    monkeypatch.setattr(module, "split_off", counted)
    for lsn in range(1, 9):
        start = 100_000 * (lsn % 3)
        memtable.apply(lsn, [put_of(range(start + lsn, start + lsn + 40_000, 8))])
    merge_all(memtable)
    assert max(parts) <= 2_000
    assert len(parts) < 4 * 40_000 / 1_000


def test_the_first_read_of_many_batches_sorts_them_together():
    """500 batches of 1,000 rows: few calls for each, and the rest in parts by later reads."""
    db = reef.open("memory://")
    numbers = shuffled(500_000)
    with db.writer("many", background=False, unfolded_bytes_max=1 << 30) as writer:
        for start in range(0, len(numbers), 1_000):
            keys = [key(number) for number in numbers[start : start + 1_000]]
            writer.upsert({"id": keys, "value": keys})
        memtable = writer._committer.tail.view().memtable
        assert len(memtable.cut().runs) > 400
        with calls() as counted:
            assert len(list(writer.scan(limit=10))) == 10
        assert counted[0] < 45 * 500
        assert len(memtable.cut().runs) < 20


def test_no_commit_merges_many_rows(monkeypatch):
    """Puts and small batches: a commit merges at most SMALL_ROWS rows, and there are few runs."""
    merged, merge_part = [], Memtable._merge_part

    def counted(self, merge, runs, tombstones):
        merged.append(sum(run.count for run in runs))
        return merge_part(self, merge, runs, tombstones)

    monkeypatch.setattr(Memtable, "_merge_part", counted)
    memtable, random = Memtable(DEFAULT_SCHEMA, 1), Random(1)
    for lsn in range(1, 3_000):
        size = random.choice([1, 1, 1, 10, 100])
        numbers = [random.randrange(10**6) for _ in range(size)]
        memtable.apply(lsn, [OneOp(key(numbers[0]), 1, b"v")] if size == 1 else [put_of(numbers)])
    assert merged
    assert max(merged) <= module.SMALL_ROWS + module.HEAD_ROWS
    assert len(memtable.cut().runs) < 80


def test_10_000_range_deletes_cost_no_scan_more_than_its_rows():
    """A scan of one row, and a cut, among 10,000 range deletes; one more delete each time."""
    db = reef.open("memory://")
    counts = []
    for size in (100, 10_000):
        with db.writer(f"d{size}", background=False) as writer:
            keys = [key(number) for number in range(2 * size)]
            writer.upsert({"id": keys, "value": keys})
            batch = reef.Batch()
            for number in range(0, 2 * size, 2):
                batch.delete_range(key(number), key(number + 1))
            writer.write(batch)
            spent = []
            for _ in range(5):
                writer.delete_range(b"x", b"y")
                with calls() as counted:
                    assert [k for k, _ in writer.scan(limit=1)] == [key(1)]
                spent.append(counted[0])
        counts.append(min(spent))
    assert counts[1] < counts[0] + 300
    assert counts[1] < 3_000


def test_many_overwrites_of_a_key_leave_few_versions():
    """100,000 puts of ten keys: neither memory nor a scan keeps all of them."""
    memtable = Memtable(DEFAULT_SCHEMA, 1)
    for lsn in range(1, 1_001):
        memtable.apply(lsn, [put_of([n % 10 for n in range(100)])])
    cut = memtable.cut()
    assert len(cut.rows(KeyRange())) <= 10 * 2 * module.SMALL_RUNS
    assert memtable.size < 100_000
    assert cut.versions(key(3))[0].lsn == 1_000
