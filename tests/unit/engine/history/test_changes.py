"""Streams of changes: every operation, in order, and positions that move over everything."""

import threading
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reef
from reef.engine.log.log import Log
from reef.engine.rows.batch import encode_batch
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.segment import Lineage
from reef.formats.segment_writer import SegmentWriter
from reef.formats.versions import RangeTombstone, Versions
from reef.formats.wal_object import BatchHeader, Job, JobSegment, WalHeader, WalKind, WalObject
from reef.jobs import fold
from reef.paths import Namespace
from reef.stores import Wrapper
from reef.stores.memory import MemoryStore
from tests.support.bulk_jobs import append, ingest, stage
from tests.support.sweep_world import GRACE_S, NAME, World
from tests.unit.engine.model import few, keys, values


@pytest.fixture
def db():
    """Give an empty database in memory."""
    return reef.open("memory://")


def report(changes):
    """Return what changes say, in short."""
    return [(c.lsn, c.seq, c.op, c.key) for c in changes]


SCHEMA = pa.schema([("id", pa.string()), ("n", pa.int32()), ("name", pa.string())])


# --- what they say --------------------------------------------------------------------


def test_every_operation_of_a_plain_namespace(db):
    """Puts have bytes, ranges have two ends; sequences count over the whole object."""
    with db.writer(NAME) as writer:
        writer.write(reef.Batch().put("a", b"1").delete("b").delete_range("c", "d").put("e", b""))
        writer.put("a", b"2", ttl_s=60)
    changes = list(db.reader(NAME).changes())
    assert [(c.lsn, c.seq, c.op, c.key, c.end_key, c.row) for c in changes] == [
        (2, 0, "put", b"a", None, b"1"),
        (2, 1, "delete", b"b", None, None),
        (2, 2, "delete_range", b"c", b"d", None),
        (2, 3, "put", b"e", None, b""),
        (3, 0, "put", b"a", None, b"2"),
    ]
    assert changes[0].expires_at is None
    assert abs((changes[4].expires_at - datetime.now(UTC)).total_seconds() - 60) < 30
    assert changes[2].to_dict() == {
        "_op": "delete_range",
        "_key": b"c",
        "_end_key": b"d",
        "_lsn": 2,
        "_seq": 2,
    }
    assert changes[0].to_dict()["value"] == b"1"


def test_sequences_count_over_the_batches_of_an_object(db):
    """Two clients in one group: the second continues where the first ended."""
    db.create(NAME)
    header = WalHeader(
        lsn=1,
        kind=WalKind.BATCHES,
        epoch=1,
        writer_id="w",
        write_id="b",
        created_at_ms=0,
        schema_id=1,
        batches=(BatchHeader(2), BatchHeader(1)),
    )
    batches = (reef.Batch().put("a", b"1").put("b", b"2"), reef.Batch().put("c", b"3"))
    records = tuple(encode_batch(batch, DEFAULT_SCHEMA, 1000).record for batch in batches)
    assert Log(db.store, Namespace(NAME)).fill(1, WalObject.encode(header, records)).landed
    assert [(c.seq, c.key) for c in db.reader(NAME).changes()] == [(0, b"a"), (1, b"b"), (2, b"c")]


def test_every_operation_of_a_table(db):
    """Puts have all columns, patches those that they set, null or not."""
    db.create("t", SCHEMA)
    with db.writer("t") as writer:
        writer.upsert([{"id": "a", "n": 1}])
        writer.patch([{"id": "a", "name": None}])
        writer.patch([{"id": "a", "n": 2, "name": "x"}, {"id": "b", "n": 3, "name": "y"}])
        writer.delete("a")
        writer.delete_range("x", b"x\xff")
    changes = list(db.reader("t").changes())
    assert [(c.op, c.key, c.row) for c in changes] == [
        ("put", "a", {"id": "a", "n": 1, "name": None}),
        ("patch", "a", {"name": None}),
        ("patch", "a", {"n": 2, "name": "x"}),
        ("patch", "b", {"n": 3, "name": "y"}),
        ("delete", "a", None),
        ("delete_range", "x", None),
    ]
    assert changes[5].end_key == b"x\xff", "the end of a range need not be text"
    assert changes[1].to_dict() == {
        "_op": "patch",
        "_key": "a",
        "_end_key": None,
        "_lsn": 3,
        "_seq": 0,
        "name": None,
    }


def test_an_ingest_gives_its_rows_at_its_lsn(db):
    """By key, numbered from 0; its begin changes nothing."""
    db.writer(NAME).put("a", b"1")
    lsn = ingest(db.store, NAME, {b"y": b"2", b"x": b"1"})
    changes = list(db.reader(NAME).changes(2))
    assert report(changes) == [(lsn, 0, "put", b"x"), (lsn, 1, "put", b"y")]
    assert [c.row for c in changes] == [b"1", b"2"]


def test_an_ingest_of_ranges_and_several_versions_of_a_key(db):
    """Ranges first, then the versions of a key from the oldest to the newest."""
    db.writer(NAME)
    rows = [(b"a", 4, None), (b"a", 3, b"2"), (b"a", 2, b"1"), (b"b", 5, b"3")]
    versions = Versions(
        pa.array([key for key, _, _ in rows], pa.binary()),
        np.zeros(4, np.int64),
        np.array([seq for _, seq, _ in rows], np.uint32),
        np.array([value is None for _, _, value in rows], np.uint8),
        {1: pa.array([value for _, _, value in rows], pa.binary())},
    )
    ranges = (RangeTombstone(b"a", b"c", 0, 0), RangeTombstone(b"x", b"y", 0, 1))
    writer = SegmentWriter(DEFAULT_SCHEMA, 0, Lineage("j-1", 0), range_tombstones=ranges)
    db.store.upload(Namespace(NAME).segment("j-1"), writer.write([versions]))
    summary = writer.summary
    segment = JobSegment(
        id="j-1",
        size=summary.size,
        checksum=summary.checksum,
        rows=4,
        tombstones=3,
        tail_bytes=summary.tail_bytes,
        min_key=b"a",
        max_key=b"y",
        set_hash=summary.footer.set_hash,
    )
    append(db.store, NAME, WalKind.BEGIN, Job("j"))
    lsn = append(db.store, NAME, WalKind.INGEST, Job("j", segments=(segment,)))
    changes = list(db.reader(NAME).changes(1))
    assert [(c.op, c.key, c.end_key, c.row) for c in changes] == [
        ("delete_range", b"a", b"c", None),
        ("delete_range", b"x", b"y", None),
        ("put", b"a", None, b"1"),
        ("put", b"a", None, b"2"),
        ("delete", b"a", None, None),
        ("put", b"b", None, b"3"),
    ]
    assert [(c.lsn, c.seq) for c in changes] == [(lsn, seq) for seq in range(6)]


def test_rows_have_the_columns_of_now(db):
    """A stream that begins before a column came has it as null, and numbers as wide as now."""
    db.create("t", SCHEMA)
    with db.writer("t") as writer:
        writer.upsert([{"id": "a", "n": 1}])
        db.alter("t", pa.schema([*SCHEMA.set(1, pa.field("n", pa.int64())), ("z", pa.bool_())]))
        writer.refresh()
        stream = db.reader("t").changes()
        writer.upsert([{"id": "a", "n": 2**40, "z": True}])
    assert [c.row for c in stream] == [
        {"id": "a", "n": 1, "name": None, "z": None},
        {"id": "a", "n": 2**40, "name": None, "z": True},
    ]


def test_a_schema_that_grows_under_an_open_stream(db):
    """An object with columns that the stream does not know makes it load the head again."""
    db.create("t", SCHEMA)
    with db.writer("t") as writer:
        stream = db.reader("t").changes()
        writer.upsert([{"id": "a", "n": 1}])
        assert [c.row["n"] for c in stream] == [1]
        db.alter("t", pa.schema([*SCHEMA, ("z", pa.bool_())]))
        writer.refresh()
        writer.upsert([{"id": "a", "z": True}])
        assert [c.row["z"] for c in stream] == [True]


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        (pa.timestamp("ms"), 2**60),
        (pa.timestamp("us", "UTC"), -(2**62)),
        (pa.date32(), 2**30),
    ],
)
def test_a_value_that_python_cannot_hold(db, kind, number):
    """It is returned as its Arrow scalar, other values as usual; streams and cursors continue."""
    db.create("t", pa.schema([("id", pa.string()), ("n", pa.int32()), ("v", kind)]))
    numbers = pa.array([number, 0], pa.int32() if kind == pa.date32() else pa.int64())
    counts = pa.array([1, 2], pa.int32())
    table = pa.table({"id": ["a", "b"], "n": counts, "v": numbers.view(kind)})
    with db.writer("t") as writer:
        writer.upsert(table)
        writer.patch(table.slice(0, 1).select(["id", "v"]))
        writer.delete("a")
        with pytest.raises(reef.InvalidInputError, match="cannot represent"):
            db.reader("t").as_of(lsn=2).get("a")
    cursor = db.cursor("t", "c", after_lsn=0)
    for changes in (list(db.reader("t").changes()), list(cursor)):
        assert [c.op for c in changes] == ["put", "put", "patch", "delete"]
        for change in (changes[0], changes[2]):
            assert isinstance(change.row["v"], pa.Scalar)
            assert (change.row["v"].type, change.row["v"].value) == (kind, number)
            assert change.to_dict()["v"] == change.row["v"]
            assert f"'v': <{kind}: {number}>" in repr(change)
        assert changes[0].row["n"] == 1
        assert changes[1].row["v"] == pa.scalar(0, kind).as_py()
    assert cursor.commit() == 4


def test_an_expiry_that_python_cannot_hold(db):
    """The same holds for when a row expires."""
    db.writer(NAME).put("a", b"1", ttl_s=1e13)
    (change,) = db.reader(NAME).changes()
    assert change.expires_at.value > 1e16
    assert "expires_at=<timestamp[ms, tz=UTC]: 1" in repr(change)


def test_a_change_prints_as_it_always_did():
    """As code that would make it."""
    change = reef.Change("put", b"a", 2, 0, {"n": 1})
    assert repr(change) == (
        "Change(op='put', key=b'a', lsn=2, seq=0, row={'n': 1}, end_key=None, expires_at=None)"
    )


def test_changes_as_arrow(db):
    """The same rows, column by column; columns that a patch does not touch are marked."""
    db.create("t", SCHEMA)
    with db.writer("t") as writer:
        writer.upsert([{"id": "a", "n": 1}, {"id": "b", "n": 2}])
        writer.patch([{"id": "a", "name": None}])
        writer.delete_range("x", b"x\xff")
        writer.delete("b")
    reader = db.reader("t")
    table = reader.changes_arrow(0, 3).read_all()
    assert table.column_names == [
        *("_op", "_key", "_end_key", "_lsn", "_seq", "_touched", "_operators", "_expires_at"),
        *("id", "n", "name"),
    ]
    assert table["_op"].to_pylist() == ["put", "put", "patch"]
    assert table["_touched"].to_pylist() == [None, None, ["name"]]
    assert table["_lsn"].to_pylist() == [2, 2, 3]
    rest = reader.changes_arrow(3).read_all()
    assert rest["id"].to_pylist() == [None, "b"]
    assert rest["_end_key"].to_pylist() == [b"x\xff", None]
    assert rest["n"].null_count == 2
    assert reader.changes_arrow(5).read_all().num_rows == 0
    with pytest.raises(reef.NotFoundError, match="LSN 9 is not in the log"):
        reader.changes_arrow(0, 9)


# --- in order, and complete -----------------------------------------------------------


@few
@given(st.lists(st.tuples(st.sampled_from(["put", "delete", "fold", "ingest"]), keys, values)))
def test_changes_lead_from_any_lsn_to_the_rows_of_now(steps):
    """Laid over the state at an LSN, what comes after it gives the state at the end."""
    db = reef.open("memory://")
    writer = db.writer(NAME)
    for step, key, value in steps:
        if step == "fold":
            fold(db, NAME)
        elif step == "ingest":
            ingest(db.store, NAME, {key: value})
        elif step == "put":
            writer.put(key, value)
        else:
            writer.delete(key)
    reader = db.reader(NAME)
    reader.refresh()
    for lsn in range(reader.last_lsn + 1):
        rows = dict(reader.as_of(lsn=lsn).scan())
        changes = reader.changes(lsn)
        for change in changes:
            if change.op == "put":
                rows[change.key] = change.row
            else:
                rows.pop(change.key, None)
        assert rows == dict(reader.scan())
        assert changes.position == reader.last_lsn


def test_void_and_ignored_objects_change_nothing(db):
    """An ingest whose job was aborted, one whose key was used, a skip: the position moves."""
    db.writer(NAME).put("a", b"1")
    ingest(db.store, NAME, {b"x": b"1"}, key="load")
    ingest(db.store, NAME, {b"y": b"1"}, key="load")
    ingest(db.store, NAME, {b"z": b"1"}, abort=True)
    append(db.store, NAME, WalKind.SKIP)
    changes = db.reader(NAME).changes()
    assert [key for _, _, _, key in report(changes)] == [b"a", b"x"]
    assert changes.position == 10


def test_a_job_that_began_before_the_stream(db):
    """Whether its ingest counts is decided from below the stream's beginning."""
    writer = db.writer(NAME)
    append(db.store, NAME, WalKind.BEGIN, Job("j"))
    segment = stage(db.store, NAME, {b"x": b"1"}, "j")
    writer.put("a", b"1")
    append(db.store, NAME, WalKind.INGEST, Job("j", segments=(segment,)))
    assert report(db.reader(NAME).changes(3)) == [(4, 0, "put", b"x")]
    fold(db, NAME)
    assert report(db.reader(NAME).changes(3)) == [(4, 0, "put", b"x")]


def test_the_position_moves_after_the_last_row_of_an_object(db):
    """A process that stops in the middle begins that object again."""
    with db.writer(NAME) as writer:
        writer.write(reef.Batch().put("a", b"1").put("b", b"2"))
        writer.put("c", b"3")
    reader = db.reader(NAME)
    changes = reader.changes(1)
    assert next(changes).key == b"a"
    assert next(changes).key == b"b"
    assert changes.position == 1
    assert next(changes).key == b"c"
    assert changes.position == 2
    assert list(changes) == []
    assert changes.position == 3
    assert report(reader.changes(changes.position)) == []


def test_a_stream_can_be_asked_again(db):
    """It ends at the end of the log, and continues from there when there is more."""
    writer = db.writer(NAME)
    changes = db.reader(NAME).changes()
    assert list(changes) == []
    assert changes.position == 1
    writer.put("a", b"1")
    assert report(changes) == [(2, 0, "put", b"a")]
    assert "after LSN 2" in repr(changes)


def test_following(db):
    """It waits for what comes, and ends when nothing came in time, or with its reader."""
    writer = db.writer(NAME)
    reader = db.reader(NAME)
    timer = threading.Timer(0.1, lambda: writer.put("a", b"1"))
    timer.start()
    changes = reader.changes(follow=True, timeout_s=10)
    assert next(changes).key == b"a"
    timer.join()
    assert list(reader.changes(2, follow=True, timeout_s=0.01)) == []
    reader.close()
    with pytest.raises(reef.ClosedError):
        next(changes)


@pytest.mark.parametrize("lsn", [-1, "1", True, None])
def test_bad_positions(db, lsn):
    """An LSN is a number from 0 on."""
    db.create(NAME)
    with pytest.raises(reef.InvalidInputError, match="is not an LSN"):
        db.reader(NAME).changes(lsn)


def test_a_stream_does_not_begin_past_the_end(db):
    """It would pass over what comes next without a word; at the end it is empty."""
    writer = db.writer(NAME)
    reader = db.reader(NAME)
    writer.put("a", b"1")
    assert list(reader.changes(2)) == [], "the reader has not seen it yet"
    with pytest.raises(reef.InvalidInputError, match="the last LSN is 2") as caught:
        reader.changes(3)
    assert (caught.value.kind, caught.value.context["last_lsn"]) == ("invalid_option", 2)
    later = reader.changes(3, follow=True, timeout_s=0.01)
    writer.put("b", b"1")
    writer.put("c", b"1")
    assert report(later) == [(4, 0, "put", b"c")]


def test_a_stream_begins_at_the_end_of_a_folded_log(db):
    """Nothing is left to list there."""
    db.writer(NAME).put("a", b"1")
    fold(db, NAME)
    assert list(db.reader(NAME).changes(2)) == []
    with pytest.raises(reef.InvalidInputError, match="last LSN is 2"):
        db.reader(NAME).changes(3)


def test_a_timeout_is_for_following(db):
    """Without it there is nothing to wait for."""
    db.create(NAME)
    with pytest.raises(reef.InvalidInputError, match="requires follow"):
        db.reader(NAME).changes(timeout_s=1)


# --- what is gone ---------------------------------------------------------------------


def test_a_swept_segment_of_an_ingest_is_collected():
    """The ingest stays in its slot for ever, but below the floor nothing vouches for the slots
    before it; its segment was compacted away."""
    world = World()
    world.db.writer(NAME)
    lsn = ingest(world.bucket, NAME, {b"x": b"1"})
    changes = world.db.reader(NAME).changes()
    world.fold()
    world.compact()
    world.advance(GRACE_S + 10)
    world.sweep_twice()
    for _ in range(2):
        with pytest.raises(reef.NotFoundError) as caught:
            list(changes)
        assert caught.value.kind == "collected"
        assert caught.value.context["lsn"] <= lsn
        assert changes.position == caught.value.context["lsn"] - 1


def test_an_error_ends_a_stream_for_good():
    """Asked again it gives the same error, never the end."""
    world = World()
    with world.db.writer(NAME) as writer:
        writer.put("a", b"1")
        changes = world.db.reader(NAME).changes()
        next(changes)
        for number in range(3):
            writer.put("a", b"%d" % number)
    world.fold()
    world.sweep_twice()
    for _ in range(2):
        with pytest.raises(reef.NotFoundError, match="LSN 3 of users was garbage-collected"):
            list(changes)


# --- interrupts, and another namespace in the same place ------------------------------


class InterruptsOnce(Wrapper):
    """Interrupts the first request for a key of this kind, as Ctrl-C does."""

    part = "nothing"

    def _interrupt(self, key):
        if self.part in key:
            self.part = "nothing"
            raise KeyboardInterrupt

    def get_tagged(self, key):
        """Interrupt, or not."""
        self._interrupt(key)
        return self.inner.get_tagged(key)

    def get_range(self, key, start, end):
        """Interrupt, or not."""
        self._interrupt(key)
        return self.inner.get_range(key, start, end)


@pytest.mark.parametrize("part", ["/segments/", "/wal/"])
def test_H44_an_interrupt_leaves_nothing_out(part):
    """H44: the rest of its object would be missing: the stream ends with an error."""
    store = InterruptsOnce(MemoryStore())
    db = reef.Database(store)
    with db.writer(NAME) as writer:
        writer.put("a", b"1")
        ingest(store, NAME, {b"b": b"2", b"c": b"3"})
        writer.put("d", b"4")
    reader = db.reader(NAME)
    changes = reader.changes()
    store.part, given = part, []
    with pytest.raises(KeyboardInterrupt):
        given.extend(changes)
    for _ in range(2):
        with pytest.raises(reef.UnavailableError, match="was interrupted after LSN") as caught:
            next(changes)
    assert caught.value.context["lsn"] == changes.position
    given += [*reader.changes(changes.position)]
    assert [change.key for change in given] == [b"a", b"b", b"c", b"d"]


def test_a_stream_that_is_interrupted_while_it_waits_continues():
    """Nothing was taken, so nothing is lost."""
    store = InterruptsOnce(MemoryStore())
    db = reef.Database(store)
    with db.writer(NAME) as writer:
        writer.put("a", b"1")
        changes = db.reader(NAME).changes(follow=True, timeout_s=0.1)
        assert [change.key for change in changes] == [b"a"]
        store.part = "/wal/"
        with pytest.raises(KeyboardInterrupt):
            next(changes)
        writer.put("b", b"2")
        assert next(changes).key == b"b"


@pytest.fixture
def created_again(db):
    """Give a reader and a stream of a namespace, then another namespace in its place."""
    with db.writer(NAME) as writer:
        writer.put("old", b"1")
    reader = db.reader(NAME)
    changes = reader.changes()
    assert [change.key for change in changes] == [b"old"]
    db.drop(NAME)
    db.create(NAME)
    with db.writer(NAME) as writer:
        writer.put("new", b"2")
    return db, reader, changes


ON_FROM_BEFORE = {
    "the same stream": lambda db, reader, changes: next(changes),
    "another one": lambda db, reader, changes: reader.changes(changes.position),
    "arrow": lambda db, reader, changes: reader.changes_arrow(changes.position),
    "a cursor": lambda db, reader, changes: db.cursor(NAME, "c", after_lsn=changes.position),
}


@pytest.mark.parametrize("how", ON_FROM_BEFORE)
def test_H48_a_stream_does_not_continue_in_another_incarnation(created_again, how):
    """H48: its numbers continue, but a follower would keep deleted rows for ever."""
    with pytest.raises(reef.NotFoundError, match="was dropped") as caught:
        ON_FROM_BEFORE[how](*created_again)
    assert caught.value.kind == ("dropped" if how == "the same stream" else "collected")


def test_H48_from_the_beginning_is_from_the_new_one_on(created_again):
    """H48: a stream that has returned nothing yet misses nothing."""
    db, reader, _ = created_again
    assert [change.key for change in reader.changes()] == [b"new"]
    assert reader.changes_arrow().read_all()["_key"].to_pylist() == [b"new"]
    cursor = db.cursor(NAME, "c", after_lsn=0)
    assert [change.key for change in cursor] == [b"new"]
    assert cursor.commit() == db.cursor(NAME, "c").committed == cursor.position


@pytest.mark.parametrize("key_type", [pa.string(), pa.binary()])
def test_a_range_without_an_end_has_none(db, key_type):
    """H40: the end of a range is of the key's type, or None if there is none.

    Root cause: change rows showed the bound that a load with `replace` uses internally, which is
    above every key and is no key: a byte next to text, or 65,536 bytes.
    """
    first, second = ("a", "b") if key_type == pa.string() else (b"a", b"b")
    db.create("t", pa.schema([("id", key_type), ("n", pa.int64())]))
    with db.writer("t") as writer:
        writer.delete_range(first, second)
    reef.jobs.ingest(db, "t", [{"id": second, "n": 1}], replace=True)
    with db.reader("t") as reader:
        changes = list(reader.changes())
        rows = reader.changes_arrow().read_all()
    assert [(c.op, c.key, c.end_key) for c in changes] == [
        ("delete_range", first, second),
        ("delete_range", type(first)(), None),
        ("put", second, None),
    ]
    assert rows["_end_key"].to_pylist() == [b"b", None, None]
