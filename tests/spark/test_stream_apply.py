"""A stream of changes applied to another namespace: an exact copy after every micro-batch."""

import random
from datetime import UTC, date, datetime, time
from decimal import Decimal

import pyarrow as pa
import pytest
from pyspark.sql import types as st
from pyspark.sql.streaming.datasource import ReadMaxRows

import reef
import reef.jobs
from reef.spark import stream_sink
from tests.spark import data
from tests.spark.streaming import Query, Stream, start
from tests.spark.test_stream_source import contents, step
from tests.spark.writing import sweep_everything


def copying(url, stream, **options):
    """Return the query that applies a stream's changes."""
    return Query(url, "copy", stream.schema, applyChanges=True, key="id", **options)


def scattered(chance, rows):
    """Return rows as Spark might distribute them."""
    parts = [[] for _ in range(chance.randrange(1, 4))]
    for row in rows:
        chance.choice(parts).append(row)
    return parts


@pytest.mark.parametrize("seed", range(3))
def test_H40_a_copy_is_exact_after_every_micro_batch(db, url, seed):
    """Loads, patches, deletes and deleted ranges in any distribution; both sides are killed."""
    chance = random.Random(seed)
    db.create("t", data.SCHEMA)
    start = {"starting": "all"} if seed else {"startingLsn": 0}
    stream = Stream(url, splitBytes=5000, **start)
    query = copying(url, stream)
    for number in range(10):
        for _ in range(chance.randrange(1, 3)):
            step(db, chance, number)
        rows = stream.next(ReadMaxRows(chance.randrange(50, 900)))
        if rows is None:
            continue
        batch_id = len(stream.offsets) - 1
        query.run(batch_id, *scattered(chance, rows))
        if chance.random() < 0.4:  # killed between the sink's commit and the checkpoint
            stream.crash()
            again = stream.next()
            query.run(batch_id, *scattered(chance, again))
        stream.done()
        last = stream.offsets[-1]
        if "row" not in last and "key" not in last:
            with db.reader("t", as_of={"lsn": last["lsn"]}) as then:
                expected = {row["id"]: row for row in then.to_arrow().to_pylist()}
            assert contents(db, "copy") == expected
        if chance.random() < 0.2:
            sweep_everything(db)
    while (rows := stream.next()) is not None:
        query.run(len(stream.offsets) - 1, *scattered(chance, rows))
        stream.done()
    assert contents(db, "copy") == contents(db)
    reef.jobs.fold(db, "copy")
    assert contents(db, "copy") == contents(db)
    assert reef.jobs.verify(db, "copy", deep=True).problems == []


def test_changes_of_one_commit_are_applied_in_their_order(db, url):
    """Several of one key, and a range around it."""
    db.create("t", data.SCHEMA)
    row = {"id": "k5", "n": 1, "text": "x", "vector": None, "at": None}
    batch = (
        reef.Batch()
        .upsert([row])
        .delete("k5")
        .upsert([{**row, "n": 2}])
        .upsert([row | {"id": "k7"}])
    )
    batch = batch.delete_range("k6", "k8").upsert([row | {"id": "k61", "n": 3}])
    with db.writer("t", background=False) as writer:
        writer.write(batch)
    stream = Stream(url, startingLsn=0)
    changes = stream.next()
    assert len(changes) == 6
    copying(url, stream).run(0, changes[::2], changes[1::2])
    assert contents(db, "copy") == contents(db)
    assert {key: row["n"] for key, row in contents(db).items()} == {"k5": 2, "k61": 3}


def test_H40_a_load_that_replaces_everything_empties_the_copy(db, url):
    """H40: a range without an end deletes every row of the copy, whatever the last key is."""
    db.create("t", data.SCHEMA)
    with db.writer("t", background=False) as writer:
        writer.upsert([{"id": "a", "n": 1}, {"id": "\U0010ffff", "n": 2}])
    reef.jobs.ingest(db, "t", [{"id": "b", "n": 3}], replace=True)
    stream = Stream(url, startingLsn=0)
    changes = stream.next()
    (deleted,) = [change for change in changes if change["_op"] == "delete_range"]
    assert (bytes(deleted["_key"]), deleted["_end_key"]) == (b"", None)
    copying(url, stream).run(0, changes)
    assert set(contents(db, "copy")) == {"b"}


def test_the_checkpoint_of_a_copy_is_checked(db, url):
    """As that of any other query."""
    db.create("t", data.SCHEMA)
    stream = Stream(url, starting="now")
    copying(url, stream).run(0, stream.next())
    with pytest.raises(reef.InvalidInputError, match="was moved or copied"):
        copying(url, stream, checkpointLocation="/elsewhere").run(1, [])
    with pytest.raises(reef.InvalidInputError, match="deleted or replaced"):
        copying(url, stream, query="q2").run(0, [])


def test_expiry_is_copied(db, url):
    """A row expires in the copy when it does in its source."""
    db.create("t", data.SCHEMA)
    with db.writer("t", background=False) as writer:
        writer.upsert(data.rows(0, 2), ttl_s=1000)
        writer.upsert(data.rows(2, 3))
    stream = Stream(url, startingLsn=0)
    copying(url, stream).run(0, stream.next())
    changes = {name: [c.expires_at for c in db.reader(name).changes(0)] for name in ("t", "copy")}
    assert changes["copy"] == changes["t"]
    assert None in changes["t"]


def test_wrong_changes_are_refused(db, url, monkeypatch):
    """Columns that are missing, an unknown operation, too many at once."""
    db.create("t", data.SCHEMA)
    with db.writer("t", background=False) as writer:
        writer.upsert(data.rows(0, 200))
    stream = Stream(url, startingLsn=0)
    rows = stream.next()
    few = st.StructType([field for field in stream.schema if field.name != "_seq"])
    with pytest.raises(reef.InvalidInputError, match="have a column _seq"):
        _ = Query(url, "copy", few, applyChanges=True, key="id").writer
    with pytest.raises(reef.InvalidInputError, match="append mode"):
        _ = Query(url, "copy", stream.schema, applyChanges=True, key="id", overwrite=True).writer
    wrong = [{**rows[0], "_op": "swap"}]
    with pytest.raises(reef.InvalidInputError, match="column _op"):
        copying(url, stream).run(0, wrong)
    monkeypatch.setattr(stream_sink, "CHANGES_BYTES_MAX", 20_000)
    with pytest.raises(reef.InvalidInputError, match="MiB of changes"):
        copying(url, stream).run(0, rows)
    assert contents(db, "copy") == {}


NOON = datetime(2026, 1, 2, 12, 0, 0, 1000, UTC)
MERGED = {
    "i64": (pa.int64(), 2**63 - 1, [reef.add(1), reef.add(5)]),
    "u64": (pa.uint64(), 2**64 - 1, [reef.add(3), reef.add(2**64 - 1)]),
    "f64": (pa.float64(), 0.1, [reef.add(0.2), reef.add(1e300), reef.add(-1e300)]),
    "u8": (pa.uint8(), 7, [reef.max_(255), reef.max_(9)]),
    "u32": (pa.uint32(), 7, [reef.min_(5), reef.min_(6)]),
    "i8": (pa.int8(), -7, [reef.min_(-128)]),
    "f32": (pa.float32(), 0.5, [reef.max_(0.75)]),
    "money": (pa.decimal128(12, 2), Decimal("1.25"), [reef.max_(Decimal("9.75"))]),
    "text": (pa.string(), "b", [reef.min_("a"), reef.min_("c")]),
    "raw": (pa.binary(), b"b", [reef.max_(b"c")]),
    "flag": (pa.bool_(), False, [reef.max_(True)]),
    "day": (pa.date32(), date(2026, 1, 2), [reef.max_(date(2026, 1, 3))]),
    "at": (pa.timestamp("ms", "UTC"), NOON, [reef.max_(datetime(2027, 1, 1, tzinfo=UTC))]),
    "nanos": (pa.timestamp("ns"), datetime(2026, 1, 1), [reef.min_(datetime(2025, 1, 1))]),
    "hour": (pa.time32("s"), time(1, 2, 3), [reef.max_(time(4, 5, 6))]),
    "set": (pa.list_(pa.uint64()), [2**64 - 1, 5], [reef.union([2**64 - 1, 3]), reef.union([])]),
    "words": (pa.list_(pa.string()), ["b"], [reef.union(["c", "a"])]),
    "vector": (pa.list_(pa.float32(), 2), [1.0, 2.0], []),
}
"""By column: its type, a value, and merges; sums wrap around, and depend on their order."""


def merge_every_type(db, name="t"):
    """Write and merge a value of each type: over rows, and over nothing."""
    db.create(name, pa.schema([("id", pa.string()), *((n, m[0]) for n, m in MERGED.items())]))
    with db.writer(name, background=False) as writer:
        writer.upsert([{"id": "a", **{column: m[1] for column, m in MERGED.items()}}])
        for column, (_, _, operands) in MERGED.items():
            for operand in operands:
                writer.merge("a", {column: operand})
                writer.merge("b", {column: operand})


def test_a_copy_keeps_types_and_merges_of_every_type(db, url):
    """A namespace that the sink creates has the types of its source, where all merges are exact."""
    merge_every_type(db)
    stream = Stream(url, startingLsn=0)
    changes = stream.next()
    copying(url, stream).run(0, changes[::2], changes[1::2])
    assert db.info("copy").schema == db.info("t").schema
    assert contents(db, "copy") == contents(db)
    assert contents(db)["a"]["u64"] == 1
    reef.jobs.fold(db, "copy")
    assert contents(db, "copy") == contents(db)
    assert reef.jobs.verify(db, "copy", deep=True).problems == []


@pytest.mark.parametrize(
    ("column", "target", "message"),
    [
        ("u64", pa.decimal128(20, 0), "add takes a column of"),
        ("u64", pa.int64(), "sums of uint64"),
        ("i64", pa.float64(), "sums of int64"),
        ("i64", pa.int32(), "add takes a column of"),
        ("text", pa.list_(pa.string()), "column text"),
        ("set", pa.list_(pa.list_(pa.uint64())), "column set"),
    ],
)
def test_merges_that_a_copy_cannot_compute_are_refused(db, url, column, target, message):
    """A copy of other types would differ, or could never be read again: nothing is written."""
    merge_every_type(db)
    db.create("copy", pa.schema([("id", pa.string()), (column, target)]))
    stream = Stream(url, startingLsn=0)
    wanted = ["id", column]
    fields = [f for f in stream.schema if f.name.startswith("_") or f.name in wanted]
    query = Query(url, "copy", st.StructType(fields), applyChanges=True)
    operator = MERGED[column][2][0].operator.name.lower()
    changes = [row for row in stream.next() if (row["_operators"] or [""])[0] == operator]
    only = [{f.name: row[f.name] for f in fields} for row in changes if row["_touched"] == [column]]
    with pytest.raises(reef.InvalidInputError, match=message):
        query.run(0, only[:1])
    assert contents(db, "copy") == {}


def test_an_operator_that_does_not_exist_is_refused(db, url):
    """The error names the column of the change rows."""
    merge_every_type(db)
    stream = Stream(url, startingLsn=0)
    merge = next(row for row in stream.next() if row["_op"] == "merge")
    with pytest.raises(reef.InvalidInputError, match="_operators: 'twice'"):
        copying(url, stream).run(0, [merge | {"_operators": ["twice"]}])


def test_types_of_a_copy_pass_through_spark(db, url, spark, tmp_path):
    """Spark hands the metadata of columns from the source to the sink; a cast column has none."""
    merge_every_type(db)
    changes = spark.readStream.format("reef").options(namespace="t", startingLsn=0).load(str(url))
    own = ["id", "u64", "u32", "nanos", "vector"]
    kept = changes.select([name for name in changes.columns if name[0] == "_" or name in own])
    cast = kept.withColumn("u32", kept.u32.cast("string"))
    start(cast, url, "copy", tmp_path / "checkpoint", applyChanges="true").awaitTermination()
    types = {field.name: field.type for field in db.info("copy").schema}
    assert types == {name: MERGED[name][0] for name in own[1:]} | {
        "id": pa.string(),
        "u32": pa.string(),
    }
    rows = contents(db)
    assert {key: row["u64"] for key, row in contents(db, "copy").items()} == {
        key: row["u64"] for key, row in rows.items()
    }
