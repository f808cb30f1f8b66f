"""Batches of streams: committed once, by their number, without the writer role (H40)."""

import msgspec
import pytest

import reef
from reef.engine.log.log import Log
from reef.engine.rows.input import to_ops
from reef.errors import UnsupportedFormatError
from reef.formats import wal_object
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.wal_object import Job, OpKind, WalKind, WalObject, encode_ops
from reef.jobs import fold, rebuild, verify
from reef.jobs.ingest.append import Appender, StreamAppender
from reef.jobs.ingest.job import BulkJob, staged_rows
from reef.paths import Namespace
from reef.telemetry import RequestMeter
from tests.support.sweep_world import DAY_S, World

NAME, STREAM = "users", "spark/q1@/checkpoints/q1"


@pytest.fixture
def db():
    """An empty namespace."""
    db = reef.open("memory://")
    db.writer(NAME, background=False).close()
    return db


def batch(**values):
    """Return rows as a batch."""
    columns = {"id": [key.encode() for key in values], "value": list(values.values())}
    return to_ops(columns, DEFAULT_SCHEMA, kind=OpKind.PUT)


def append(db, number, stream=STREAM, **values):
    """Commit rows as a batch of a stream."""
    return StreamAppender(db, NAME).append(stream, number, [batch(**values)])


def load(db, number, **values):
    """Commit rows as a batch of a stream, through a bulk job."""
    with BulkJob(db, NAME) as job:
        staged = job.staging.stage([staged_rows(batch(**values))])
        return job.commit(staged, marks={STREAM: number})


def contents(db):
    """Return all rows."""
    with db.reader(NAME) as reader:
        return dict(reader.scan())


def objects(db, kind):
    """Return the LSNs of the objects of a kind in the log."""
    names = Namespace(NAME)
    found = (WalObject.decode(db.store.get(i.key), i.key) for i in db.store.list(names.wal))
    return [item.header.lsn for item in found if item.header.kind is kind]


@pytest.mark.parametrize("write", [append, load])
@pytest.mark.parametrize("folded", [False, True])
def test_H40_a_replayed_batch_is_skipped_by_its_number(db, write, folded):
    """Whatever rows it carries at the second time, and whether the first was folded or not."""
    assert not write(db, 1, a=b"1").replayed
    if folded:
        fold(db, NAME)
    again = write(db, 1, a=b"other", b=b"other")
    assert again.replayed
    assert again.ops == 0
    assert contents(db) == {b"a": b"1"}
    assert not write(db, 2, b=b"2").replayed
    assert contents(db) == {b"a": b"1", b"b": b"2"}


def test_H40_a_duplicate_that_lands_behind_the_first_does_not_count(db):
    """Another driver with the same query may have sent it into a later slot."""
    receipt = append(db, 1, a=b"1")
    names = Namespace(NAME)
    first = WalObject.decode(db.store.get(names.wal_object(receipt.lsn)), "first")
    record = encode_ops(batch(a=b"stale"))
    with db.writer(NAME, background=False) as writer:
        writer.put("other", b"x")  # a writer's fence takes the slot behind
    slot = max(item.lsn for item in Log(db.store, names).filled(1)) + 1
    later = msgspec.structs.replace(first.header, lsn=slot, write_id="zombie")
    db.store.create(names.wal_object(slot), WalObject.encode(later, (record,)))
    assert contents(db) == {b"a": b"1", b"other": b"x"}
    with db.writer(NAME, background=False) as writer:
        assert writer.get("a") == b"1"
        writer.put("b", b"2")
    fold(db, NAME)
    assert contents(db) == {b"a": b"1", b"b": b"2", b"other": b"x"}
    assert not verify(db, NAME, deep=True).problems


def test_H40_an_ingest_behind_its_batch_does_not_count(db):
    """The driver checks the marks before it sends; the rules decide what landed all the same."""
    with BulkJob(db, NAME) as job:
        staged = job.staging.stage([staged_rows(batch(a=b"stale"))])
        append(db, 1, a=b"1")
        ingest = Job(job.id, key=job.key, segments=tuple(staged))
        appender = Appender(db.store, Namespace(NAME))
        seen = appender.read_log()
        header = appender._header(seen.open_slot, WalKind.INGEST, ingest, job.schema)
        header = msgspec.structs.replace(header, marks={STREAM: 1})
        db.store.create(Namespace(NAME).wal_object(header.lsn), WalObject.encode(header))
        assert contents(db) == {b"a": b"1"}
        assert job.commit(staged, marks={STREAM: 1}).replayed
    fold(db, NAME)
    assert contents(db) == {b"a": b"1"}


def test_streams_are_independent(db):
    """Each has its own numbers."""
    append(db, 5, stream="one", a=b"1")
    assert not append(db, 1, stream="two", a=b"2").replayed
    assert StreamAppender(db, NAME).marks() == {"one": 5, "two": 1}
    assert contents(db) == {b"a": b"2"}


def test_a_live_writer_is_not_disturbed(db):
    """It sees the rows at its next commit, in order, and keeps the role."""
    with db.writer(NAME, background=False) as writer:
        writer.put("a", b"1")
        append(db, 1, a=b"2", b=b"2")
        writer.put("c", b"3")  # loses its slot, applies the batch, goes into the next one
        assert writer.get("a") == b"2"
        writer.put("a", b"4")
        append(db, 2, b=b"5")
        writer.put("d", b"6")
        assert writer.get("b") == b"5"
    assert contents(db) == {b"a": b"4", b"b": b"5", b"c": b"3", b"d": b"6"}


def test_conditions_of_a_writer_see_appended_rows(db):
    """A conditional batch that loses its slot to a stream is decided again."""
    with db.writer(NAME, background=False) as writer:
        writer.put("a", b"1")
        append(db, 1, a=b"2")
        with pytest.raises(reef.ConditionFailedError):
            writer.write(reef.Batch().put("b", b"1"), when=[reef.equals("a", "value", b"1")])
    assert contents(db) == {b"a": b"2"}


def test_readers_and_changes_have_the_rows_in_order(db):
    """Change rows of a batch have its LSN."""
    with db.writer(NAME, background=False) as writer:
        writer.put("a", b"1")
    lsn = append(db, 1, a=b"2", b=b"2").lsn
    with db.reader(NAME) as reader:
        changes = [(c.op, c.key, c.lsn) for c in reader.changes(after_lsn=lsn - 1)]
        assert changes == [("put", b"a", lsn), ("put", b"b", lsn)]
        assert reader.as_of(lsn=lsn - 1).get("a") == b"1"


def test_an_append_costs_two_listings_two_reads_and_one_put():
    """Head, log, PUT, and the proof; headers are read once."""
    meter = RequestMeter()
    db = reef.open("memory://", meter=meter)
    db.writer(NAME, background=False).close()
    fold(db, NAME)
    appender = StreamAppender(db, NAME)
    appender.append(STREAM, 1, [batch(a=b"1")])
    meter.reset()
    appender.append(STREAM, 2, [batch(a=b"1")])
    requests = meter.requests()
    assert requests["put"] == 1
    assert sum(requests.values()) <= 10, requests


def test_older_releases_refuse_such_objects(db, monkeypatch):
    """They would count a duplicate; a plain batch has the version that they know."""
    receipt = append(db, 1, a=b"1")
    data = db.store.get(Namespace(NAME).wal_object(receipt.lsn))
    with db.writer(NAME, background=False) as writer:
        plain = writer.put("b", b"2").lsn
    monkeypatch.setattr(wal_object, "VERSION", 1)
    with pytest.raises(UnsupportedFormatError):
        WalObject.decode(data, "object")
    WalObject.decode(db.store.get(Namespace(NAME).wal_object(plain)), "object")


def test_H40_a_rebuild_without_manifests_knows_how_far_a_stream_is():
    """The sweep keeps the last append of each stream, and collects the others."""
    world = World()
    world.db.writer(NAME, background=False).close()
    for number in range(1, 6):
        append(world.db, number, a=b"%d" % number)
    last = objects(world.db, WalKind.APPEND)[-1]
    with world.db.writer(NAME, background=False) as writer:
        writer.put("b", b"1")
    world.fold()
    world.sweep()
    world.advance(DAY_S)
    world.sweep()
    assert objects(world.db, WalKind.APPEND) == [last]
    for info in list(world.db.store.list(Namespace(NAME).manifests)):
        world.db.store.delete(info.key)
    report = rebuild(world.db, NAME, apply=True)
    assert not report.problems
    assert append(world.db, 5, a=b"stale").replayed
    assert contents(world.db) == {b"a": b"5", b"b": b"1"}
    assert not append(world.db, 6, a=b"6").replayed
    assert contents(world.db) == {b"a": b"6", b"b": b"1"}


def test_H40_an_older_batch_is_skipped_too(db):
    """A stream that restarts from an old checkpoint sends batches below the mark."""
    for number in range(1, 4):
        append(db, number, a=b"%d" % number)
    before = objects(db, WalKind.APPEND)
    assert append(db, 1, a=b"stale").replayed
    assert objects(db, WalKind.APPEND) == before
    assert contents(db) == {b"a": b"3"}


def test_H31_an_append_that_cannot_be_looked_up_is_unknown(db, monkeypatch):
    """It was sent, and the log cannot be read: it may count. Sent again, it counts once."""
    appender = StreamAppender(db, NAME)
    read, reads = appender._appender.read_log, []

    def fails_after_the_put():
        reads.append(1)
        if len(reads) > 1:
            raise reef.UnavailableError("the store does not respond")
        return read()

    monkeypatch.setattr(appender._appender, "read_log", fails_after_the_put)
    with pytest.raises(reef.OutcomeUnknownError):
        appender.append(STREAM, 1, [batch(a=b"1")])
    assert append(db, 1, a=b"stale").replayed
    assert contents(db) == {b"a": b"1"}


def test_H67_an_append_that_landed_late_does_not_hide_the_one_that_counts():
    """A rebuild keeps the rows behind the folds, and reports that they may have been there."""
    world = World()
    db, names = world.db, Namespace(NAME)
    with db.writer(NAME, background=False) as writer:
        slot = writer.put("a", b"1").lsn
        writer.put("a", b"2")
    world.fold()
    receipt = append(db, 1, b=b"3")
    real = WalObject.decode(db.store.get(names.wal_object(receipt.lsn)), "real")
    late = msgspec.structs.replace(real.header, lsn=slot, write_id="late")
    db.store.delete(names.wal_object(slot))  # collected, and filled again by a stalled process
    db.store.create(names.wal_object(slot), WalObject.encode(late, real.records))
    for info in list(db.store.list(names.manifests)):
        db.store.delete(info.key)
    report = rebuild(db, NAME, apply=True, force=True)
    assert f"LSN {slot} and LSN {receipt.lsn} hold the same batch" in str(report.problems)
    assert contents(db) == {b"a": b"2", b"b": b"3"}
