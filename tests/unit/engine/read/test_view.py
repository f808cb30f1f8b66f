"""Views: memory, ingests and segments read as one, from either end, against a plain model."""

import random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reef
from reef.engine.read.scan import Cursor
from reef.engine.read.segments import SegmentStore
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.segment import Lineage
from reef.formats.segment_writer import SegmentWriter
from reef.formats.versions import RangeTombstone, Versions
from reef.formats.wal_object import Job, OpKind, WalKind
from reef.jobs import fold
from reef.jobs.ingest.staging import job_segment_of
from reef.paths import Namespace
from tests.support.bulk_jobs import append, ingest
from tests.unit.engine.model import KEYS, LAST, Model, batches, keys, ranges, values

NAME = "users"
USERS = Namespace(NAME)

steps = st.lists(
    st.one_of(
        st.tuples(st.just("write"), batches),
        st.tuples(st.just("ingest"), st.dictionaries(keys, values, min_size=1, max_size=4)),
        st.tuples(st.just("fold"), st.integers(20, 200)),
        st.tuples(st.just("refresh"), st.none()),
    ),
    max_size=12,
)


class World:
    """A namespace, and the model of it."""

    def __init__(self):
        self.db = reef.open("memory://")
        self.writer = self.db.writer(NAME)
        self.reader = self.db.reader(NAME, refresh_interval_ms=1e9, cache_bytes=500)
        self.model = Model()

    def run(self, step, given):
        getattr(self, step)(given)

    def write(self, operations):
        batch = reef.Batch()
        for kind, key, value in operations:
            if kind == OpKind.PUT:
                batch.put(key, value)
            elif kind == OpKind.DELETE:
                batch.delete(key)
            else:
                batch.delete_range(key, value)
        self.model.apply(self.writer.write(batch).lsn, operations)

    def ingest(self, rows):
        lsn = ingest(self.db.store, NAME, rows)
        self.model.apply(lsn, [(OpKind.PUT, key, rows[key]) for key in sorted(rows)])
        self.writer.put("zz-after", b"")  # so that the writer has met it, and continues behind it

    def fold(self, group_bytes):
        fold(self.db, NAME, group_bytes=group_bytes)

    def refresh(self, _):
        self.writer.refresh()

    def check(self, bounds):
        expected = sorted(self.model.rows().items())
        self.reader.refresh()
        for handle in (self.writer, self.reader):
            for key in [*KEYS, LAST]:
                assert handle.get(key) == dict(expected).get(key)
            assert list(handle.scan(end=LAST)) == expected
            assert list(handle.scan(end=LAST, reverse=True)) == expected[::-1]
            start, end = bounds
            part = [row for row in expected if start <= row[0] < end]
            assert list(handle.scan(start, end)) == part
            assert list(handle.scan(start, end, reverse=True, limit=2)) == part[::-1][:2]


@settings(max_examples=20, deadline=None)
@given(steps, ranges())
def test_all_sources_are_one(steps, bounds):
    """Batches, ingests and folds in any order: gets and scans agree with the model throughout."""
    world = World()
    for step, given_ in steps:
        world.run(step, given_)
    world.check(bounds)


# --- ingests whose segments have range tombstones -----------------------------------------


def stage(store, rows, deletes):
    """Stage a segment of puts and range deletes, all stored at LSN 0, as a bulk job does."""
    segment_id, ordered = store.runtime.ulid(), sorted(rows)
    tombstones = [RangeTombstone(start, end, 0, 0) for start, end in deletes]
    writer = SegmentWriter(DEFAULT_SCHEMA, 0, Lineage(segment_id, 0), range_tombstones=tombstones)
    versions = Versions(
        pa.array(ordered, pa.binary()),
        np.zeros(len(rows), np.int64),
        np.arange(1, len(rows) + 1, dtype=np.uint32),
        np.zeros(len(rows), np.uint8),
        {1: pa.array([rows[key] for key in ordered], pa.binary())},
    )
    store.upload(USERS.segment(segment_id), writer.write([versions]))
    return job_segment_of(segment_id, writer.summary)


@pytest.mark.parametrize("folded", [False, True])
def test_range_deletes_of_an_ingest_have_its_lsn(folded):
    """They hide rows older than the ingest, at their edges too, and nothing newer."""
    db = reef.open("memory://")
    with db.writer(NAME) as writer:
        for key in ("a", "b", "c", "d"):
            writer.put(key, b"older")
        if folded:
            fold(db, NAME)
        append(db.store, NAME, WalKind.BEGIN, Job("j"))
        segment = stage(db.store, {b"bb": b"loaded"}, [(b"b", b"d")])
        append(db.store, NAME, WalKind.INGEST, Job("j", segments=(segment,)))
        writer.put("c", b"newer")
        expected = {b"a": b"older", b"bb": b"loaded", b"c": b"newer", b"d": b"older"}
        for _ in range(2):
            reader = db.reader(NAME)
            for handle in (writer, reader):
                assert dict(handle.scan()) == expected
                assert {key: handle.get(key) for key in expected} == expected
                assert handle.get("b") is None
            fold(db, NAME)
            writer.refresh()


# --- details ----------------------------------------------------------------------------


@pytest.fixture
def writer():
    """Give a writer with some rows in segments and some in memory."""
    db = reef.open("memory://")
    with db.writer(NAME) as writer:
        for number in range(0, 20, 2):
            writer.put(f"k{number:02}", b"segment")
        fold(db, NAME, group_bytes=60)
        writer.refresh()
        for number in range(1, 20, 2):
            writer.put(f"k{number:02}", b"memory")
        yield writer


def test_prefixes_ranges_and_limits(writer):
    """Bounds are [start, end); a prefix is a range; both together are their intersection."""
    names = [b"k%02d" % number for number in range(20)]

    def scanned(*bounds, **how):
        return [key for key, _ in writer.scan(*bounds, **how)]

    assert scanned() == names
    assert scanned("k05", "k08") == names[5:8]
    assert scanned(prefix="k1") == names[10:]
    assert scanned(prefix="k1", reverse=True, limit=3) == names[:16:-1]
    assert scanned("k15", prefix="k1") == names[15:]
    assert scanned("k08", "k05") == []
    assert scanned(limit=0) == []
    assert scanned(prefix=b"\xff") == []
    assert scanned(prefix="k05") == names[5:6]


@pytest.mark.parametrize("limit", [np.int64(3), 1 << 63, 10**30])
def test_a_limit_is_any_whole_number(writer, limit):
    """NumPy's too, and more than a machine counts to."""
    expected = min(limit, 20)
    assert len(list(writer.scan(limit=limit))) == expected
    assert writer.scan_arrow(limit=limit).read_all().num_rows == expected


@pytest.mark.parametrize("limit", [1.0, "3", True, b"1"])
def test_a_limit_that_is_no_number_is_refused(writer, limit):
    """Whatever it could be taken for."""
    with pytest.raises(reef.InvalidInputError, match="limit="):
        writer.scan(limit=limit)


def test_a_negative_limit_is_refused(writer):
    """Before anything is read."""
    with pytest.raises(reef.InvalidInputError, match="limit=-1"):
        writer.scan(limit=-1)


def test_a_scan_costs_nothing_before_it_is_read():
    """Its snapshot is taken at once, its objects are fetched when rows are asked for."""
    from reef.stores import Meter
    from reef.stores.memory import MemoryStore
    from reef.telemetry import RequestMeter

    meter, bucket = RequestMeter(), MemoryStore()
    db = reef.Database(bucket)
    with db.writer(NAME) as writer:
        writer.put("a", b"1")
    fold(db, NAME)
    reader = reef.Database(Meter(bucket, meter)).reader(NAME, refresh_interval_ms=1e9)
    meter.reset()
    scan = reader.scan()
    assert meter.requests() == {}
    assert list(scan) == [(b"a", b"1")]
    assert meter.requests() == {"get": 2}


@pytest.mark.parametrize("reverse", [False, True])
def test_adjacent_segments_are_opened_one_after_the_other(reverse, monkeypatch):
    """A scan that ends early asks for one of them, a whole one reads each of them once."""
    from reef.stores import Meter
    from reef.stores.memory import MemoryStore
    from reef.telemetry import RequestMeter

    meter, bucket = RequestMeter(), MemoryStore()
    db = reef.Database(bucket)
    with db.writer(NAME) as writer:
        for place in range(20):
            writer.write(reef.Batch().put(f"k{place:02d}a", b"1").put(f"k{place:02d}b", b"2"))
            fold(db, NAME)
    reader = reef.Database(Meter(bucket, meter)).reader(NAME, refresh_interval_ms=1e9)
    meter.reset()
    assert len(list(reader.scan(reverse=reverse, limit=2))) == 2
    assert meter.requests() == {"get": 2}
    probes = []
    take = Cursor.take
    monkeypatch.setattr(Cursor, "take", lambda *asked: probes.append(1) or take(*asked))
    found = [key for key, _ in reader.scan(reverse=reverse)]
    assert found == sorted(found, reverse=reverse)
    assert (len(found), len(probes)) == (40, 20)


@pytest.mark.parametrize("reverse", [False, True])
def test_reads_grow_within_bounds(reverse, monkeypatch):
    """Twice as many pages from read to read, but never more than a few megabytes."""
    reads, rows = [], SegmentStore.rows

    def noting(self, entry, pages, *options, **settings):
        reads.append(pages)
        return rows(self, entry, pages, *options, **settings)

    monkeypatch.setattr(SegmentStore, "rows", noting)
    db = reef.open("memory://")
    with db.writer(NAME, background=False) as writer:
        batch = reef.Batch()
        for number in range(4000):
            batch.put(b"%08d" % number, random.Random(number).randbytes(4000))
        writer.write(batch)
    fold(db, NAME, segment_bytes_max=1 << 30)
    (entry,) = db.reader(NAME)._view().manifest.segments
    pages = len(db.reader(NAME)._segments.tail(entry).index.pages.rows)
    assert sum(1 for _ in db.reader(NAME).scan(reverse=reverse)) == 4000
    counts = [len(read) for read in reads]
    most = max(counts)
    assert counts[:-1] == [min(2 << place, most) for place in range(len(counts) - 1)]
    assert 3 << 20 < most * entry.size / pages <= 5 << 20
    in_order = [page for read in reads for page in (read[::-1] if reverse else read)]
    assert in_order == list(range(pages))[:: -1 if reverse else 1]
    reads.clear()
    assert len(list(db.reader(NAME).scan(reverse=reverse, limit=1))) == 1
    assert [len(read) for read in reads] == [2]
