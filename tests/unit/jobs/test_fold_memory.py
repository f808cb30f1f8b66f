"""Folds from a writer's memory: no WAL object is read, and the result is that of any other fold."""

from functools import partial

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reef
from reef.config import BackgroundSettings
from reef.engine.rows.batch import encode_batch
from reef.engine.rows.input import to_ops
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.wal_object import OpKind, WalHeader, WalKind
from reef.jobs import fold
from reef.jobs.background import Background
from reef.jobs.ingest.append import StreamAppender
from reef.manifest.head import HeadFinder
from reef.paths import Namespace
from reef.stores.memory import MemoryStore
from reef.testing import Recorder
from tests.support.compaction import ingest_rows
from tests.support.sweep_world import DAY_S, GRACE_S, NAME, World

EAGER = BackgroundSettings(fold_bytes=1, compact=False, sweep=False)
COLUMNS = pa.schema([("id", pa.string()), ("x", pa.int64()), ("y", pa.int64())])


def recorded():
    """Return a database whose requests are recorded, and its recorder."""
    recorder = Recorder(MemoryStore(), calls_max=1_000_000)
    return reef.Database(recorder), recorder


def head_of(db):
    """Return the newest manifest."""
    return HeadFinder(db.store, Namespace(NAME)).find().manifest


@pytest.mark.parametrize("commits", [20, 200])
def test_a_fold_of_a_writer_reads_no_object_of_the_log(commits):
    """H75: the number of requests does not grow with the number of commits."""
    db, recorder = recorded()
    with db.writer(NAME, background=False) as writer:
        for number in range(commits):
            writer.put(f"k{number:04}", b"v")
        recorder.calls.clear()
        assert Background(db, writer, EAGER).step().report.rows == commits
        assert not [call for call in recorder.calls if "/wal/" in call.key]
        assert len(recorder.calls) <= 12
        assert writer.unfolded.objects == 0
    assert len(list(db.reader(NAME).scan())) == commits


@pytest.mark.parametrize("commits", [20, 200])
def test_a_fold_by_another_process_reads_each_object_once(commits):
    """One GET per object, by whichever executor."""
    db, recorder = recorded()
    with db.writer(NAME, background=False) as writer:
        for number in range(commits):
            writer.put(f"k{number:04}", b"v")
    recorder.calls.clear()
    assert fold(db, NAME).rows == commits
    reads = [call.key for call in recorder.calls if "/wal/" in call.key and call.method != "list"]
    assert len(reads) == len(set(reads)) == commits + 1, "and the fence"


@pytest.mark.parametrize("commits", [20, 200])
def test_a_sweep_after_own_folds_reads_no_object(commits):
    """The fold knows which slots hold batches; all but the fences are collected."""
    world = World()
    recorder = Recorder(world.bucket, calls_max=1_000_000)
    db = reef.Database(recorder)
    writer = db.writer(NAME, background=False)
    limits = {"fold_bytes": 1, "compact": False, "sweep_interval_s": 0.0}
    worker = Background(db, writer, BackgroundSettings(**limits, retain_generations_s=0.0))
    for number in range(commits):
        writer.put(f"k{number:04}", b"v")
    assert world.run(worker.step).job == "fold"
    world.advance(DAY_S)
    recorder.calls.clear()
    sweeps = partial(worker.step, ("sweep",))
    assert world.run(sweeps).report.condemned
    world.advance(GRACE_S + 10)
    deleted = world.run(sweeps).report.deleted
    assert len([key for key in deleted if key.startswith("wal/")]) >= commits - 1
    assert not [c for c in recorder.calls if "/wal/" in c.key and c.method.startswith("get")]
    assert 1 in world.slots(), "the fence is kept"


def test_a_sweep_after_own_folds_collects_appends_below_their_mark():
    """The fold has seen their kind; the sweep reads their headers, and keeps the one at the mark,
    from which a rebuild knows how far the stream was committed (H40)."""
    world = World()
    writer = world.db.writer(NAME, background=False)
    limits = {"fold_bytes": 1, "compact": False, "sweep_interval_s": 0.0}
    worker = Background(world.db, writer, BackgroundSettings(**limits, retain_generations_s=0.0))
    for number in range(1, 6):
        rows = to_ops({"id": [b"s"], "value": [b"v"]}, DEFAULT_SCHEMA, kind=OpKind.PUT)
        receipt = StreamAppender(world.db, NAME).append("q", number, [rows])
    writer.put("a", b"1")
    writer.put("b", b"2")
    assert world.run(worker.step).job == "fold"
    world.advance(DAY_S)
    sweeps = partial(worker.step, ("sweep",))
    world.run(sweeps)
    world.advance(GRACE_S + 10)
    deleted = world.run(sweeps).report.deleted
    assert {lsn for lsn in range(2, receipt.lsn)}.isdisjoint(world.slots()), deleted
    assert receipt.lsn in world.slots()


def test_objects_behind_a_gap_are_folded_from_the_log():
    """H75: rows the memtable shows early are not part of the log yet, and hide older rows."""
    db = reef.Database(MemoryStore())
    with db.writer(NAME, background=False, max_parallel_writes=2, ack="independent") as writer:
        writer.put("k", b"old")
        tail = writer._committer.tail
        batch = encode_batch(reef.Batch().put("k", b"early"), tail.schema, 1000)
        header = WalHeader(
            lsn=tail.next_lsn + 1,
            kind=WalKind.BATCHES,
            epoch=1,
            writer_id="",
            write_id="w",
            created_at_ms=0,
        )
        tail.apply_early(header, [batch.ops])
        assert Background(db, writer, EAGER).step().report.rows == 1
    assert db.reader(NAME).get("k") == b"old"


def test_memory_from_before_another_fold_is_refused():
    """Another process folds first: its floor counts, and nothing is folded twice."""
    db = reef.Database(MemoryStore())
    with db.writer(NAME, background=False) as writer:
        writer.put("a", b"1")
        ingest_rows(db, NAME, [(b"c", OpKind.PUT, {1: b"3"})])
        writer.refresh()
        fold(reef.Database(db.store), NAME)
        writer.put("b", b"2")
        report = Background(db, writer, EAGER).step().report
        assert (report.rows, report.objects) == (1, 1)
        assert [segment.rows for segment in head_of(db).segments] == [1, 1, 1]
        assert writer.unfolded.objects == 0
    assert dict(db.reader(NAME).scan()) == {b"a": b"1", b"b": b"2", b"c": b"3"}


KEYS = st.sampled_from(["a", "b", "c", "d"])
CHANGES = st.one_of(
    st.tuples(st.just("put"), KEYS, st.integers(0, 9)),
    st.tuples(st.just("patch"), KEYS, st.integers(0, 9)),
    st.tuples(st.just("delete"), KEYS),
    st.tuples(st.just("delete range"), KEYS, KEYS),
    st.tuples(st.just("load"), KEYS, st.integers(0, 9)),
    st.tuples(st.just("fold")),
)


def change(db, writer, one):
    """Apply one change."""
    match one:
        case ("put", key, value):
            writer.upsert([{"id": key, "x": value, "y": value}])
        case ("patch", key, value):
            writer.patch([{"id": key, "y": value}])
        case ("delete", key):
            writer.delete(key)
        case ("delete range", start, end) if start < end:
            writer.delete_range(start, end)
        case ("load", key, value):
            ingest_rows(db, NAME, [(key.encode(), OpKind.PATCH, {1: value})])
            writer.refresh()
        case ("fold",):
            Background(db, writer, EAGER).step()


@settings(max_examples=60, deadline=None)
@given(changes=st.lists(CHANGES, max_size=12))
def test_a_fold_from_memory_equals_one_from_the_log(changes):
    """The same rows, versions and bounds, whatever was written, patched, deleted and loaded."""
    db = reef.Database(MemoryStore())
    db.create(NAME, COLUMNS)
    with db.writer(NAME, background=False) as writer:
        for one in changes:
            change(db, writer, one)
        writer.upsert([{"id": "z", "x": 1, "y": 1}])  # so that a fold is due
        expected = dict(writer.scan())
        copy = MemoryStore()
        for info in db.store.list():
            copy.put(info.key, db.store.get(info.key))
        Background(db, writer, EAGER).step()
        assert dict(writer.scan()) == expected
    other = reef.Database(copy)
    fold(other, NAME)
    assert dict(db.reader(NAME).scan()) == dict(other.reader(NAME).scan()) == expected
    facts = ("rows", "patches", "min_key", "max_key", "lsn_max", "set_hash")
    ours, theirs = (
        [tuple(getattr(segment, name) for name in facts) for segment in head_of(one).segments]
        for one in (db, other)
    )
    assert ours == theirs
    assert head_of(db).below_floor == head_of(other).below_floor
