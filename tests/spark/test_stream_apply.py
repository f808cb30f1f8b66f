"""A stream of changes applied to another namespace: an exact copy after every micro-batch."""

import random

import pytest
from pyspark.sql import types as st
from pyspark.sql.streaming.datasource import ReadMaxRows

import reef
import reef.jobs
from reef.spark import stream_sink
from tests.spark import data
from tests.spark.streaming import Query, Stream
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
