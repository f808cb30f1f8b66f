"""Loads with `live_wins` from Spark, and Spark's readers of such loads."""

import random

import pyarrow as pa
import pytest

import reef
import reef.jobs
from reef.errors import InvalidInputError
from tests.spark import data
from tests.spark.streaming import Copy, Query, Stream
from tests.spark.writing import Write, kinds_of, sweep_everything
from tests.support.backfills import Backfill

COLUMNS = pa.schema([("id", pa.string()), ("n", pa.int64()), ("t", pa.string())])


def row(key, n, t="x"):
    """Return a row."""
    return {"id": key, "n": n, "t": t}


def contents(db, name="t"):
    """Return all rows by key."""
    with db.reader(name) as reader:
        return {key: found["n"] for key, found in reader.scan()}


def backfilled(db):
    """Load over live writes of every kind; leave the load in the log."""
    db.create("t", COLUMNS)
    with db.writer("t", background=False) as writer:
        writer.upsert([row("old", 1)])
        load = Backfill(db, "t")
        writer.upsert([row("put", 9)])
        writer.delete("deleted")
        writer.delete_range("r", "s")
        reef.jobs.fold(db, "t")
        writer.refresh()
        writer.patch([{"id": "patched", "n": 7}])
        writer.merge("merged", {"n": reef.add(2)})
        keys = ("deleted", "merged", "new", "old", "patched", "put", "range")
        return load.commit([row(key, 5) for key in keys])


ROWS = {"merged": 7, "new": 5, "old": 5, "patched": 7, "put": 9}
CHANGES = [("put", b"merged"), ("put", b"new"), ("put", b"old"), ("put", b"patched")]


# --- as Spark's processes do it, without Spark ------------------------------------------------


def test_a_write_loses_against_rows_written_since_it_began(db, url):
    """The option liveWins: from the process that begins to the one that commits."""
    db.create("t", COLUMNS)
    write = Write(url, liveWins="true")
    with db.writer("t", background=False) as writer:
        writer.upsert([row("a", 9)])
        reef.jobs.fold(db, "t")
    messages = [write.task([row("a", 1), row("b", 1)])]
    write.writer.commit(messages)
    assert contents(db) == {"a": 9, "b": 1}
    reef.jobs.fold(db, "t")
    reef.jobs.compact(db, "t", full=True)
    assert contents(db) == {"a": 9, "b": 1}


@pytest.mark.parametrize(
    ("options", "overwrite", "message"),
    [
        ({"liveWins": "yes"}, False, "not true or false"),
        ({"liveWins": "true", "op": "patch"}, False, "patches or merges"),
        ({"liveWins": "true", "op": "merge", "mergeOps": "n=add"}, False, "patches or merges"),
        ({"liveWins": "true"}, True, "replaces a range"),
    ],
    ids=str,
)
def test_a_write_that_cannot_lose_is_refused(db, url, options, overwrite, message):
    """Nothing is begun."""
    db.create("t", COLUMNS)
    with pytest.raises(InvalidInputError, match=message):
        Write(url, overwrite=overwrite, **options)
    assert kinds_of(db) == []


def test_a_stream_has_no_such_option(db, url):
    """Its micro-batches take their places in the log."""
    db.create("t", COLUMNS)
    with pytest.raises(InvalidInputError, match="a stream has no option liveWins"):
        Query(url, liveWins="true").run(0, [row("a", 1)])


@pytest.mark.parametrize("folds", [False, True])
def test_changes_leave_out_rows_that_were_beaten(db, url, folds):
    """In parts of any size, each by a task of its own; images are the rows around each."""
    lsn = backfilled(db)
    if folds:
        reef.jobs.fold(db, "t")
        reef.jobs.compact(db, "t", full=True)
    with db.reader("t") as reader:
        expected = reader.changes_arrow(0).read_all()
    found = data.Planned(url, "t", readChanges=True, splitBytes=1).table()
    names = [name for name in expected.column_names if name != "_expires_at"]
    assert found.select(names).to_pylist() == expected.select(names).to_pylist()
    ours = [r for r in found.to_pylist() if r["_lsn"] == lsn]
    assert [(r["_op"], r["_key"]) for r in ours] == CHANGES
    images = data.Planned(url, "t", readChanges=True, images=True, afterLsn=lsn - 1)
    around = [(r["_before"], r["_after"]["n"]) for r in images.table().to_pylist()]
    assert [after for _, after in around] == [7, 5, 5, 7]
    assert around[2][0]["n"] == 1


@pytest.mark.parametrize("seed", range(2))
def test_a_stream_of_changes_rebuilds_an_exact_copy(db, url, seed):
    """Killed and replayed, the log swept behind its cursor, while loads are open."""
    chance = random.Random(seed)
    db.create("t", data.SCHEMA)
    stream, copy, loads = Stream(url, startingLsn=0, splitBytes=5000), Copy(), []
    for number in range(14):
        with db.writer("t", background=False) as writer:
            data.change(writer, chance, number)
        if number == 0:
            copy.apply(stream.run())  # which registers the cursor
        if chance.random() < 0.5:
            loads.append(Backfill(db, "t", lease_ttl_s=1e6, segment_bytes=1 << 14))
        elif loads:
            first = chance.randrange(300)
            loads.pop(0).commit(data.rows(first, first + 150, text=f"load {number} "))
        if chance.random() < 0.5:
            reef.jobs.fold(db, "t")
            reef.jobs.compact(db, "t", full=True)
            sweep_everything(db)
        if chance.random() < 0.5:
            while (changes := stream.next()) is not None:
                if chance.random() < 0.3:
                    stream.crash()
                    continue
                copy.apply(changes)
                stream.done()
    copy.apply(stream.run())
    with db.reader("t") as reader:
        assert copy.rows == {found["id"]: found for found in reader.to_arrow().to_pylist()}


def test_H44_a_stream_whose_state_was_swept_reads_it_by_its_cursor(db, url):
    """H44: the cursor pins the rows that win over the load, which was open there."""
    db.create("t", COLUMNS)
    with db.writer("t", background=False) as writer:
        load = Backfill(db, "t")
        writer.upsert([row("beaten", 9)])
        writer.patch([{"id": "patched", "n": 7}])
        reef.jobs.fold(db, "t")
        stream = Stream(url, startingLsn=0)
        stream.run()
        stream.crash()
        load.commit([row("beaten", 5), row("new", 5), row("patched", 5)])
    for _ in range(2):
        reef.jobs.fold(db, "t")
        reef.jobs.compact(db, "t", full=True)
        sweep_everything(db)
    found = stream.run()
    assert [(r["_op"], r["_key"], r["n"]) for r in found] == [
        ("put", b"new", 5),
        ("put", b"patched", 7),
    ]


# --- with a session ---------------------------------------------------------------------------


def test_a_bulk_load_loses_against_rows_written_since_it_began(spark, db, url):
    """Rows that a live writer puts, patches and deletes while tasks run."""
    db.create("t", COLUMNS)
    writer = db.writer("t", background=False)

    def meanwhile(step):
        if step.stage == "stage":
            writer.upsert([row("k0001", -1)])
            writer.delete("k0002")
            writer.patch([{"id": "k0003", "n": -3}])
            reef.jobs.fold(db, "t")

    df = spark.range(100).selectExpr("format_string('k%04d', id) AS id", "id AS n", "'x' AS t")
    report = reef.spark.bulk_load(df, url, "t", live_wins=True, partitions=2, progress=meanwhile)
    assert report.rows == 100
    expected = {f"k{n:04}": n for n in range(100)} | {"k0001": -1, "k0003": -3}
    del expected["k0002"]
    assert contents(db) == expected
    with pytest.raises(InvalidInputError, match="replaces a range"):
        reef.spark.bulk_load(df, url, "t", live_wins=True, replace=True)
    df.limit(3).write.format("reef").options(namespace="t", liveWins="true").mode("append").save(
        url
    )
    assert contents(db)["k0001"] == 1
    writer.close()


@pytest.mark.parametrize("engine", ["jvm", "python"])
def test_readers_sort_the_rows_at_the_begin(spark, db, url, engine):
    """Both readers, with the load in the log, folded, and merged."""
    backfilled(db)
    for job in (lambda: None, lambda: reef.jobs.fold(db, "t"), lambda: merge(db)):
        job()
        reader = spark.read.format("reef").options(namespace="t", engine=engine)
        assert {r["id"]: r["n"] for r in reader.load(url).collect()} == ROWS


def merge(db):
    """Merge all segments."""
    reef.jobs.compact(db, "t", full=True)
