"""Comparing and merging branches on Spark: the same rows as on one machine."""

import random

import pyarrow as pa
import pytest

import reef
import reef.spark
from reef.jobs import fold, ingest

SCHEMA = pa.schema(
    [("id", pa.string()), ("n", pa.int64()), ("small", pa.uint8()), ("tags", pa.list_(pa.string()))]
)


def row(number, n):
    """Return a row of the table."""
    return {"id": f"k{number:04}", "n": n, "small": n % 200, "tags": [f"t{n % 3}"]}


def branched(db, seed):
    """Make a namespace with several segments, a branch of it, and changes on both sides."""
    chance = random.Random(seed)
    db.create("main", SCHEMA)
    ingest(db, "main", [row(number, number) for number in range(2000)], group_bytes=2000)
    fold(db, "main")
    db.branch("main", "child")
    for name, numbers in (("child", range(0, 2000, 7)), ("main", range(0, 2000, 31))):
        with db.writer(name, background=False) as writer:
            writer.upsert([row(number, chance.randrange(1000)) for number in numbers])
            writer.upsert([row(3000 + len(numbers), 1)])
            writer.delete_range(f"k{len(numbers):04}", f"k{len(numbers) + 20:04}")
            fold(db, name, group_bytes=2000)
            writer.patch([{"id": "k1999", "n": len(numbers)}])


def local(db, a, b):
    """Return the differences that `db.diff` yields."""
    return [(d.op, d.key, d.a, d.b) for d in db.diff(a, b)]


def on_spark(frame):
    """Return the rows of a DataFrame of differences, by key, as `db.diff` has them."""

    def plain(value):
        return value.asDict() if hasattr(value, "asDict") else value and bytes(value)

    rows = [(r["op"], r["key"], plain(r["a"]), plain(r["b"])) for r in frame.collect()]
    return sorted(rows, key=lambda one: one[1])


def test_differences_on_spark_are_those_of_one_machine(spark, db, url):
    """Inserts, updates and deletes, by key ranges on several tasks; in both directions."""
    branched(db, 1)
    frame = reef.spark.diff(spark, url, "main", "child")
    assert frame.columns == ["op", "key", "a", "b"]
    assert frame.rdd.getNumPartitions() > 1
    expected = local(db, "main", "child")
    assert {op for op, *_ in expected} == {"insert", "update", "delete"}
    assert on_spark(frame) == expected
    assert on_spark(reef.spark.diff(spark, url, "child", "main")) == local(db, "child", "main")
    assert frame.where("op = 'delete'").select("a.n").count() > 0


def test_points_in_time_are_compared(spark, db, url):
    """Of plain namespaces too, whose rows are bytes."""
    with db.writer("plain", create=True, background=False) as writer:
        writer.put("a", b"1")
        lsn = writer.put("b", b"1").lsn
        writer.put("b", b"2")
        writer.delete("a")
    frame = reef.spark.diff(spark, url, "plain", "plain", a_at={"lsn": lsn})
    assert on_spark(frame) == [
        ("delete", bytearray(b"a"), b"1", None),
        ("update", bytearray(b"b"), b"1", b"2"),
    ]
    assert reef.spark.diff(spark, url, "plain", "plain").count() == 0


@pytest.mark.parametrize("choice", ["ours", "theirs"])
def test_a_merge_on_spark_gives_the_rows_of_one_machine(spark, tmp_path, choice):
    """One commit, with the same report."""
    results = []
    for name, executor in (("threads", None), ("spark", reef.spark.executor(spark))):
        db = reef.open(str(tmp_path / name))
        branched(db, 2)
        report = db.merge("child", "main", choice, executor=executor)
        changes = db.reader("main").changes(after_lsn=report.lsn - 1)
        assert {change.lsn for change in changes} == {report.lsn}
        rows = dict(db.reader("main").scan())
        results.append((report.written, report.deleted, report.conflicts, rows))
    assert results[0] == results[1]
    assert results[0][2] > 0


def test_conflicts_are_refused_or_decided_by_a_function(spark, db):
    """With "error" nothing changes; a function runs in the tasks."""
    branched(db, 3)
    before = dict(db.reader("main").scan())
    executor = reef.spark.executor(spark)
    with pytest.raises(reef.ConflictError, match="rows were changed on both sides"):
        db.merge("child", "main", executor=executor)
    assert dict(db.reader("main").scan()) == before
    report = db.merge("child", "main", lambda key, base, ours, theirs: ours, executor=executor)
    assert report.conflicts > 0
    after = dict(db.reader("main").scan())
    assert after["k0217"]["n"] == before["k0217"]["n"], "a conflict, decided for ours"
    assert after["k0007"] == db.reader("child").get("k0007")
