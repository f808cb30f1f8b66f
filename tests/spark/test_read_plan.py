"""Reading as Spark's processes do it, without Spark: plans, shares, leases, types."""

import datetime
import json
import pickle
from dataclasses import replace
from decimal import Decimal

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql import types as st

import reef
from reef.errors import ErrorKind
from reef.manifest.head import HeadFinder, Publisher
from reef.manifest.roots import find_generation_leases
from reef.paths import Namespace
from reef.spark import ReefSource
from reef.spark import read_plan as pins
from reef.spark import read_plan as plan
from reef.spark import source as scan
from reef.spark.read_plan import cut, ranges_between
from reef.spark.session import counts_of
from reef.stores.leases import SharedLease
from reef.types import KeyRange
from tests.spark.data import Planned, folded, history, rows
from tests.support.bulk_jobs import ingest


@pytest.mark.parametrize("seed", range(8))
def test_all_shares_together_are_the_table(db, url, seed):
    """Any history, cut small: every row once, in key order, as the engine reads it."""
    model = history(db, "t", seed)
    planned = Planned(url, "t", splitBytes=3000)
    table = planned.table()
    assert table["id"].to_pylist() == sorted(model)
    assert {k: row["n"] for k, row in planned.rows().items()} == {
        key: row["n"] for key, row in model.items()
    }
    assert {k: row["text"] for k, row in planned.rows().items()} == {
        key: row["text"] for key, row in model.items()
    }


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("where", ["n < 40", "n >= 60 AND n <= 90", "n = -5", "id > 'k0000200'"])
def test_conditions_leave_out_nothing_that_matches(db, url, seed, where):
    """Skipping by min/max never brings an older version back, nor hides a newer one."""
    history(db, "t", seed)
    expected = dict(db.reader("t").scan(where=where))
    found = Planned(url, "t", splitBytes=3000, where=where).rows()
    assert {k: row["n"] for k, row in found.items()} == {k: r["n"] for k, r in expected.items()}


@pytest.mark.parametrize("folds", [True, False])
def test_a_row_that_does_not_match_hides_an_older_one_that_does(db, url, folds):
    """Groups of the newer segment cannot match, and are read all the same; so is the log."""
    folded(db, "t", 200, group_bytes=1024)
    with db.writer("t") as writer:
        writer.patch([{"id": f"k{n:07d}", "n": -1} for n in range(100)])
    if folds:
        reef.jobs.fold(db, "t", group_bytes=1024)
    found = Planned(url, "t", where="n >= 60 AND n <= 120", splitBytes=3000).rows()
    assert sorted(row["n"] for row in found.values()) == list(range(100, 121))


@pytest.mark.parametrize("seed", range(4))
def test_keys_come_alone(db, url, seed):
    """`keys` gives the rows of these keys, whatever is above or under them."""
    model = history(db, "t", seed)
    keys = [f"k{n:07d}" for n in range(0, 400, 7)] + ["nope"]
    planned = Planned(url, "t", splitBytes=3000, keys=json.dumps(keys), columns="n,id")
    assert planned.rows().keys() == model.keys() & set(keys)
    assert planned.table().column_names == ["n", "id"]


@pytest.mark.parametrize("seed", range(2))
def test_a_long_log_is_read_by_the_tasks(db, url, seed, monkeypatch):
    """A log too large to send is replayed by each task, up to the same LSN."""
    model = history(db, "t", seed)
    monkeypatch.setattr(pins.take_pin, "__kwdefaults__", {"sent_bytes_max": -1})
    planned = Planned(url, "t", splitBytes=3000)
    with db.writer("t") as writer:
        writer.upsert([{"id": "k0000000", "n": 999}, {"id": "new", "n": 1}])
    assert all(share.memory is None for share in planned.shares)
    pins._memtables.clear()  # the tasks run in other processes
    assert {k: r["n"] for k, r in planned.rows().items()} == {k: r["n"] for k, r in model.items()}


def test_many_groups_are_not_sent(db, url, monkeypatch):
    """Where the indexes are too much to send, tasks read them, and find the same."""
    folded(db, "t", 3000)
    monkeypatch.setattr(scan, "GROUPS_SENT_MAX", 1)
    planned = Planned(url, "t", splitBytes=100_000)
    assert len(planned.shares) > 2
    assert not any(share.tails for share in planned.shares)
    assert len(planned.table()) == 3000


def test_a_load_that_is_not_folded_is_read(db, url):
    """Segments of an ingest are read at its LSN, above older rows and below newer ones."""
    with db.writer("t") as writer:
        writer.put("a", b"old")
        writer.put("b", b"old")
    ingest(db.store, "t", {b"a": b"loaded", b"c": b"loaded", b"d": b"loaded"})
    with db.writer("t") as writer:
        writer.put("c", b"new")
        writer.delete("d")
    found = {row["id"]: row["value"] for row in Planned(url, "t").table().to_pylist()}
    assert found == {b"a": b"loaded", b"b": b"old", b"c": b"new"}


def test_a_load_in_a_long_log_is_read(db, url, monkeypatch):
    """The same where tasks read the log by themselves; no segment is read twice."""
    ingest(db.store, _plain(db), {f"{n:03}".encode(): b"x" * 100 for n in range(200)})
    monkeypatch.setattr(pins.take_pin, "__kwdefaults__", {"sent_bytes_max": -1})
    planned = Planned(url, "t")
    assert [len(share.manifest.segments) for share in planned.shares] == [0]
    assert len(planned.table()) == 200


def _plain(db, name="t"):
    """Make a plain namespace, and return its name."""
    db.create(name)
    return name


def test_columns_that_came_later_are_read(db, url):
    """Rows from before a column was added have null there, and widened numbers are wide."""
    db.create("t", pa.schema([("id", pa.string()), ("n", pa.int32())]))
    with db.writer("t") as writer:
        writer.upsert([{"id": "a", "n": 1}, {"id": "b", "n": 2}])
        reef.jobs.fold(db, "t")
    db.alter("t", pa.schema([("id", pa.string()), ("n", pa.int64()), ("m", pa.string())]))
    with db.writer("t") as writer:
        writer.upsert([{"id": "b", "n": 2**40, "m": "new"}])
    planned = Planned(url, "t")
    assert planned.schema.simpleString() == "struct<id:string,n:bigint,m:string>"
    assert planned.table().to_pylist() == [
        {"id": "a", "n": 1, "m": None},
        {"id": "b", "n": 2**40, "m": "new"},
    ]
    assert len(Planned(url, "t", where="m = 'new'").table()) == 1


def test_rows_of_the_log_are_sent_once(db, url):
    """Each share carries its own rows of the log, however many shares there are."""
    folded(db, "t", 3000)
    with db.writer("t") as writer:
        writer.upsert(rows(0, 3000, text="new"))
    one, many = (Planned(url, "t", splitBytes=split) for split in (1 << 30, 100_000))
    assert len(one.shares) == 1
    assert len(many.shares) > 10
    sent = [sum(len(pickle.dumps(share)) for share in p.shares) for p in (one, many)]
    assert sent[1] < 1.2 * sent[0]
    assert len(pickle.dumps(many.reader)) < sent[1] / 20, "which goes along with every share"
    assert len(pickle.loads(pickle.dumps(many.reader)).partitions()) > 10


def test_shares_are_balanced_and_do_not_overlap(db, url):
    """Shares follow the block index: in order, next to each other, of about the same size."""
    folded(db, "t", 6000, parts=2)
    planned = Planned(url, "t", splitBytes=150_000)
    ranges = [share.range for share in planned.shares]
    assert len(ranges) >= 5
    assert ranges[0].start == b""
    assert ranges[-1].end is None
    assert [r.end for r in ranges[:-1]] == [r.start for r in ranges[1:]]
    sizes = [len(table) for table in planned.tables()]
    assert sum(sizes) == 6000
    assert max(sizes) <= 2 * min(sizes)


def test_a_task_asks_only_for_its_own_blocks(db, url):
    """All tasks together read each block about once, and no index."""
    folded(db, "t", 6000)
    planned = Planned(url, "t", splitBytes=150_000)
    stored = sum(entry.size - entry.tail_bytes for entry in _segments(db, "t"))
    asked = 0
    for share in planned.shares:
        reader, sent = pickle.loads(pickle.dumps((planned.reader, share)))
        list(reader.read(sent))
        asked += counts_of(reader._reading.pin.store)["get.bytes"]
    assert 0.98 * stored <= asked <= 1.01 * stored


def test_batches_are_worth_sending(db, url, monkeypatch):
    """Pieces are joined into batches of many rows, but not of too many bytes."""
    folded(db, "t", 6000)
    planned = Planned(url, "t", columns="id,n")
    assert [len(batch) for batch in planned.batches(planned.shares[0])] == [6000]
    monkeypatch.setattr(scan, "BATCH_ROWS", 2000)
    sizes = [len(batch) for batch in planned.batches(planned.shares[0])]
    assert min(sizes[:-1]) >= 2000
    monkeypatch.setattr(scan, "BATCH_ROWS", 1 << 30)
    monkeypatch.setattr(scan, "BATCH_BYTES_MAX", 30_000)
    assert len(planned.batches(planned.shares[0])) > 1
    assert scan.BATCH_ROWS >= 16_384


def test_columns_that_are_not_asked_for_are_not_read(db, url):
    """Two columns of five cost their own bytes, where groups are larger than a gap is worth."""
    folded(db, "t", 8000, group_bytes=1 << 20, segment_bytes_max=1 << 24)
    asked = {}
    for columns in ("id,n", "id,n,text,vector,at"):
        planned = Planned(url, "t", columns=columns)
        reader, share = pickle.loads(pickle.dumps((planned.reader, planned.shares[0])))
        list(reader.read(share))
        asked[columns] = counts_of(reader._reading.pin.store)["get.bytes"]
    small, large = asked.values()
    assert small < large / 3


# --- which point in time ---------------------------------------------------------------------


def test_all_tasks_see_the_time_of_the_load(db, url):
    """Later writes, folds and deletes are not visible to any task."""
    folded(db, "t", 1000)
    with db.writer("t") as writer:
        writer.upsert([{"id": "k0000001", "n": -1}])
        planned = Planned(url, "t", splitBytes=100_000)
        writer.delete_range("k", "l")
        writer.upsert([{"id": "later", "n": 1}])
    reef.jobs.fold(db, "t")
    found = planned.rows()
    assert len(found) == 1000
    assert found["k0000001"]["n"] == -1


def test_the_time_is_that_of_the_load_not_of_the_first_task(db, url):
    """Created now, read later, in another process: one lease, and the rows as of its creation."""
    folded(db, "t", 10)

    def meanwhile():
        with db.writer("t") as writer:
            writer.delete_range("k", "l")
        reef.jobs.fold(db, "t")

    planned = Planned(url, "t", between=meanwhile)
    assert len(planned.table()) == 10
    assert len(_leases(db)) == 1


def test_past_states_can_be_read(db, url):
    """A generation, a snapshot by name and a time, each as the engine reads it."""
    db.create("t")
    with db.writer("t") as writer:
        writer.put("a", b"1")
        db.snapshot("t", "monday")
        between = datetime.datetime.now(datetime.UTC) + datetime.timedelta(milliseconds=5)
        while datetime.datetime.now(datetime.UTC) < between + datetime.timedelta(milliseconds=5):
            pass
        writer.put("a", b"2")
    generation = reef.jobs.fold(db, "t").generation
    with db.writer("t") as writer:
        writer.put("a", b"3")
    found = {
        name: Planned(url, "t", **{name: value}).table()["value"].to_pylist()
        for name, value in {
            "snapshot": "monday",
            "asOfTime": between.isoformat(),
            "generation": generation,
            "prefix": "",
        }.items()
    }
    assert found == {
        "snapshot": [b"1"],
        "asOfTime": [b"1"],
        "generation": [b"2"],
        "prefix": [b"3"],
    }


def test_rows_expire_for_all_tasks_at_once(db, url):
    """Whether a row has expired is decided when the read is planned, not when a task runs."""
    runtime = db.store.runtime
    for ttl_s in (0.4, 4.0, 40.0):  # on a stalled machine the row may be gone before the plan
        planning = runtime.stopwatch()
        with db.writer("t") as writer:
            writer.put("a", b"1", ttl_s=ttl_s)
            writer.put("b", b"1")
        planned = Planned(url, "t")
        if planning.elapsed_s() < ttl_s:
            break
    runtime.sleep(ttl_s + 0.1)
    assert len(planned.table()) == 2
    assert len(Planned(url, "t").table()) == 1


# --- the lease ------------------------------------------------------------------------


def _exists(db, key):
    return any(info.key == key for info in db.store.list(key))


def _leases(db, name="t"):
    return list(find_generation_leases(db.store, Namespace(name), db.store.now(), 0.0))


def _segments(db, name):
    return HeadFinder(db.store, Namespace(name)).find().manifest.segments


def test_H22_the_lease_holds_the_objects_of_the_tasks(db, url):
    """A sweep after a rewrite of everything takes nothing from a read that is in progress."""
    folded(db, "t", 500)
    planned = Planned(url, "t", leaseSeconds=86400)
    before = [entry.id for entry in _segments(db, "t")]
    (lease,) = _leases(db)
    pin = planned.reader._reading.pin
    assert (lease.record.generation, lease.record.last_lsn) == (
        pin.manifest.generation,
        pin.last_lsn,
    )
    _forget_everything(db)
    assert not _segments(db, "t")
    assert len(planned.table()) == 500
    db.store.delete(lease.key)
    _forget_everything(db)
    assert not [key for key in before if _exists(db, Namespace("t").segment(key))]


def test_H74_an_unread_dataframe_does_not_stop_collection(db, url):
    """H74: the lease pins the planned generation; a segment that came and went later is deleted."""
    folded(db, "t", 500)
    planned = Planned(url, "t", leaseSeconds=86400)
    before = {entry.id for entry in _segments(db, "t")}
    folded(db, "t", 700)
    later = {entry.id for entry in _segments(db, "t")} - before
    _forget_everything(db)
    names = Namespace("t")
    assert later
    assert not [key for key in later if _exists(db, names.segment(key))]
    assert [key for key in before if _exists(db, names.segment(key))]
    assert len(planned.table()) == 500


def test_an_expired_lease_is_reported(db, url):
    """After the lease the rows may be gone: the task says so, and what to do."""
    folded(db, "t", 500)
    planned = Planned(url, "t", leaseSeconds=60)
    for lease in _leases(db):
        db.store.delete(lease.key)
    with pytest.raises(reef.NotFoundError, match="Load the DataFrame again") as caught:
        planned.table()
    assert caught.value.kind is ErrorKind.COLLECTED


def test_H30_a_lease_expires_by_the_clock_of_the_store(db, url):
    """One whose object is older than its time is expired, though no process has reaped it."""
    folded(db, "t", 10)
    lease = Planned(url, "t", leaseSeconds=5).reader._reading.pin.lease
    lease.verify()
    aged = _Aged(db.store, 4.0)
    SharedLease(aged, Namespace("t"), lease.id, 5.0).verify()  # in time: and so it is renewed
    aged.older_s = 6.0
    with pytest.raises(reef.NotFoundError, match="seconds old"):
        SharedLease(aged, Namespace("t"), lease.id, 5.0).verify()


def test_checking_the_lease_costs_one_request(db, url):
    """A task asks whether the lease is there, and no more, while there is time; then not again."""
    folded(db, "t", 10)
    lease = pickle.loads(pickle.dumps(Planned(url, "t").reader._reading.pin.lease))
    before = counts_of(lease._store)
    lease.check()
    lease.check()
    assert counts_of(lease._store) == before | {"head.requests": 1}


def test_tasks_renew_the_lease_for_all(db, url):
    """A process renews it when a third of its term has passed, and not before."""
    folded(db, "t", 10)
    lease = Planned(url, "t", leaseSeconds=90).reader._reading.pin.lease
    key = Namespace("t").lease(lease.id)
    before = db.store.get_tagged(key)
    SharedLease(_Aged(db.store, 10.0), Namespace("t"), lease.id, 90.0).check()
    assert db.store.get_tagged(key).tag == before.tag
    SharedLease(_Aged(db.store, 40.0), Namespace("t"), lease.id, 90.0).check()
    after = db.store.get_tagged(key)
    assert after.tag != before.tag
    assert json.loads(after.body)["generation"] == json.loads(before.body)["generation"]


def test_H22_a_reaped_lease_does_not_come_back(db, url):
    """A task that would renew it finds that it is gone, and writes nothing."""
    folded(db, "t", 10)
    lease = Planned(url, "t", leaseSeconds=90).reader._reading.pin.lease
    key = Namespace("t").lease(lease.id)
    aged = _Aged(db.store, 40.0)
    aged.before_replace = lambda: db.store.delete(key)
    with pytest.raises(reef.NotFoundError, match="garbage-collected"):
        SharedLease(aged, Namespace("t"), lease.id, 90.0).check()
    assert not _leases(db)


def test_a_damaged_log_is_reported_and_leaves_no_lease(db, url):
    """What cannot be read is said on the driver, after the lease was written: it is given back."""
    with db.writer("t") as writer:
        receipt = writer.put("a", b"1")
    db.store.put(Namespace("t").wal_object(receipt.lsn), b"damaged")
    with pytest.raises(reef.CorruptionError):
        Planned(url, "t")
    assert not _leases(db)


def test_a_refused_read_leaves_no_lease(db, url):
    """A generation that was swept is refused on the driver, and nothing is left behind."""
    folded(db, "t", 10)
    _forget_everything(db)
    with pytest.raises(reef.NotFoundError) as caught:
        Planned(url, "t", generation=1)
    assert caught.value.kind is ErrorKind.COLLECTED
    assert not _leases(db)


def _forget_everything(db, name="t"):
    """Supersede all rows, and sweep hours later: only leases hold anything."""
    Publisher(db.store, Namespace(name)).publish(
        lambda head: msgspec.structs.replace(head, segments=())
    )
    for hours in (1, 2, 3):
        later = reef.Database(_Later(db.store, hours * 3600.0))
        reef.jobs.sweep(later, name, apply=True, retain_generations_s=0.0, share_max=1.0)


class _Later(reef.stores.Wrapper):
    """A store whose clock is ahead of its objects."""

    def __init__(self, inner, later_s):
        super().__init__(inner)
        self.later_s = later_s

    def now(self):
        return self.inner.now() + self.later_s


class _Aged(reef.stores.Wrapper):
    """A store in which every object is older than it is."""

    def __init__(self, inner, older_s):
        super().__init__(inner)
        self.older_s = older_s
        self.before_replace = lambda: None

    def head(self, key):
        info = self.inner.head(key)
        return replace(info, last_modified_s=info.last_modified_s - self.older_s)

    def replace(self, key, body, tag):
        self.before_replace()
        return self.inner.replace(key, body, tag)


# --- types ----------------------------------------------------------------------------

UTC = datetime.UTC
TYPES = {
    pa.bool_(): (st.BooleanType(), [True, None], None),
    pa.int8(): (st.ByteType(), [-128, 127], None),
    pa.int64(): (st.LongType(), [-(2**63), 2**63 - 1], None),
    pa.uint8(): (st.ShortType(), [0, 255], None),
    pa.uint16(): (st.IntegerType(), [0, 65535], None),
    pa.uint32(): (st.LongType(), [0, 2**32 - 1], None),
    pa.uint64(): (st.DecimalType(20, 0), [0, 2**64 - 1], [Decimal(0), Decimal(2**64 - 1)]),
    pa.float32(): (st.FloatType(), [1.5, None], None),
    pa.float64(): (st.DoubleType(), [5e-324, None], None),
    pa.binary(): (st.BinaryType(), [b"\x00\xff", None], None),
    pa.date32(): (st.DateType(), [datetime.date(1, 1, 1), None], None),
    pa.decimal128(20, 4): (st.DecimalType(20, 4), [Decimal("1.2345"), None], None),
    pa.timestamp("s", tz="UTC"): (
        st.TimestampType(),
        [datetime.datetime(1969, 1, 1, tzinfo=UTC), None],
        None,
    ),
    pa.timestamp("ms"): (st.TimestampNTZType(), [datetime.datetime(2024, 1, 1), None], None),
    pa.timestamp("us", tz="Europe/Berlin"): (
        st.TimestampType(),
        [datetime.datetime(2024, 1, 1, tzinfo=UTC), None],
        None,
    ),
    pa.list_(pa.int64()): (st.ArrayType(st.LongType()), [[1, None], []], None),
    pa.list_(pa.list_(pa.string())): (
        st.ArrayType(st.ArrayType(st.StringType())),
        [[["a"], None], None],
        None,
    ),
    pa.list_(pa.float32(), 2): (
        st.ArrayType(st.FloatType(), False),
        [[1.5, -2.0], None],
        None,
    ),
}


@pytest.mark.parametrize("data_type", TYPES, ids=str)
def test_every_type_has_its_place_in_spark(db, url, data_type):
    """Each column type is one of Spark's, values and nulls come over, from segments and log."""
    spark_type, values, expected = TYPES[data_type]
    db.create("t", pa.schema([("id", pa.string()), ("c", data_type)]))
    with db.writer("t") as writer:
        writer.upsert(pa.table({"id": ["a", "b"], "c": pa.array(values, data_type)}))
        reef.jobs.fold(db, "t")
        writer.upsert(pa.table({"id": ["c", "d"], "c": pa.array(values, data_type)}))
    planned = Planned(url, "t")
    assert planned.schema == st.StructType(
        [st.StructField("id", st.StringType(), False), st.StructField("c", spark_type, True)]
    )
    assert planned.table()["c"].to_pylist() == 2 * (expected or values)


@pytest.mark.parametrize("of", [lambda t: t, pa.list_], ids=["column", "list"])
def test_nanoseconds_are_cut_towards_the_past(db, url, of):
    """Also before 1970, where a division would go the other way; null stays null."""
    data_type = of(pa.timestamp("ns"))
    counts = pa.array([1_999, -1, None], pa.int64()).view(pa.timestamp("ns"))
    given = counts if data_type == counts.type else pa.array([[c] for c in counts], data_type)
    db.create("t", pa.schema([("id", pa.string()), ("c", data_type)]))
    with db.writer("t") as writer:
        writer.upsert(pa.table({"id": ["a", "b", "c"], "c": given}))
    epoch = datetime.datetime(1970, 1, 1)
    micro = datetime.timedelta(microseconds=1)
    expected = [epoch + micro, epoch - micro, None]
    found = Planned(url, "t").table()["c"].to_pylist()
    assert found == (expected if data_type == counts.type else [[point] for point in expected])


@pytest.mark.parametrize("of", [lambda t: t, pa.list_], ids=["list", "list of lists"])
def test_nanoseconds_in_part_of_a_table_are_cut(db, url, of):
    """A range begins anywhere in a group, and lists there may be null."""
    columns = pa.schema([("id", pa.string()), ("c", of(pa.list_(pa.timestamp("ns"))))])
    db.create("t", columns)
    values = [None if n % 3 == 0 else [n * 1_000_000 + 1] * (n % 4) for n in range(12)]
    given = values if of(pa.int8()) == pa.int8() else [[value, None] for value in values]
    with db.writer("t") as writer:
        writer.upsert(pa.table([[f"k{n:02d}" for n in range(12)], given], schema=columns))
    reef.jobs.fold(db, "t")
    found = Planned(url, "t", start="k02", end="k08").table()["c"].to_pylist()
    assert found == Planned(url, "t").table()["c"].to_pylist()[2:8]
    assert found[1] == given[3]


def test_a_timestamp_that_spark_cannot_hold_is_rejected(db, url):
    """Seconds that do not fit into microseconds are an error that names the column."""
    db.create("t", pa.schema([("id", pa.string()), ("c", pa.timestamp("s"))]))
    far = pa.array([2**60], pa.int64()).view(pa.timestamp("s"))
    with db.writer("t") as writer:
        writer.upsert(pa.table({"id": ["a"], "c": far}))
    with pytest.raises(reef.InvalidInputError, match="column c: Spark cannot hold"):
        Planned(url, "t").table()


# --- cutting, pure --------------------------------------------------------------------


def test_cuts_are_keys_of_groups():
    """Equal weights are cut into equal parts; one group is never cut."""
    weights = [(bytes([65 + n]), 10) for n in range(12)]
    assert cut(weights, 40) == [b"E", b"I"]
    assert cut(weights, 1000) == []
    assert cut([(b"a", 10**9)], 10) == []
    assert cut([], 10) == []
    assert len(cut([(f"{n:06}".encode(), 10) for n in range(20_000)], 10)) < plan.SHARES_MAX


def test_ranges_cover_the_whole_and_nothing_twice():
    """Cuts outside of the range are left out; the ends are those of the range."""
    assert ranges_between(KeyRange(b"b", b"f"), [b"a", b"b", b"d", b"f", b"g"]) == [
        KeyRange(b"b", b"d"),
        KeyRange(b"d", b"f"),
    ]
    assert ranges_between(KeyRange(), []) == [KeyRange()]


# --- what is refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"colums": "id"}, "there is no option 'colums'"),
        ({"columns": "id,bad"}, "column bad: there is no such column"),
        ({"columns": "id,,n"}, "empty name"),
        ({"columns": "id,n,id"}, "column id is selected twice"),
        ({"columns": "[1]"}, "not a JSON list of texts"),
        ({"keys": "k1"}, "not JSON"),
        ({"where": "n ~ 5"}, "n ~ 5"),
        ({"where": "bad = 5"}, "there is no column 'bad'"),
        ({"generation": "x"}, "generation='x'"),
        ({"generation": "99"}, "no generation 99"),
        ({"snapshot": "sunday"}, "sunday"),
        (
            {"generation": "1", "snapshot": "a"},
            "only one of the options 'generation', 'snapshot' can be set",
        ),
        ({"asOfTime": "yesterday"}, "is not a time"),
        ({"asOfTime": "2024-01-01T00:00:00"}, "has no time zone"),
        ({"splitBytes": "0"}, "splitBytes='0'"),
        ({"leaseSeconds": "1"}, "leaseSeconds='1'"),
        ({"store.retry": "3"}, "cannot be given as text"),
        ({"store.endpoint": "http://x"}, "endpoint"),
    ],
    ids=str,
)
def test_errors_are_raised_while_the_dataframe_is_created(db, url, options, message):
    """A wrong option, column or condition never reaches a task, and leaves no lease."""
    db.create("t", pa.schema([("id", pa.string()), ("n", pa.int64())]))
    with pytest.raises(reef.ReefError) as caught:
        Planned(url, "t", **options)
    assert message in str(caught.value)
    assert not _leases(db)


def test_a_given_schema_without_columns_is_refused(db, url):
    """Batches without columns have no rows either: Spark would count none."""
    folded(db, "t", 10)
    source = ReefSource({"path": url, "namespace": "t"})
    with pytest.raises(reef.InvalidInputError, match="has no columns"):
        source.reader(st.StructType([]))
    assert not _leases(db)


def test_memory_is_refused():
    """A bucket in the memory of one process cannot be read by others."""
    with pytest.raises(reef.InvalidInputError, match="is in the memory of one process"):
        Planned("memory://", "t")


def test_what_names_the_table_is_needed(url):
    """Without a namespace, or a path, the error says what to add."""
    with pytest.raises(reef.InvalidInputError, match="'namespace' is missing"):
        Planned(url, "")
    with pytest.raises(reef.InvalidInputError, match="'path' is missing"):
        Planned("", "t")
    with pytest.raises(reef.InvalidInputError, match="one path"):
        Planned("", "t", paths='["a", "b"]')
    with pytest.raises(reef.NotFoundError):
        Planned(url, "t")
