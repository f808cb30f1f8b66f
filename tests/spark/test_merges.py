"""Merges on Spark: written by DataFrames, and resolved by the native reader as Python does it."""

import decimal
import math
import random
from datetime import UTC, date, datetime, timedelta

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as f

import reef
from reef.formats import segment_writer

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("n", pa.int64()),
        ("u", pa.uint64()),
        ("x", pa.float64()),
        ("small", pa.float32()),
        ("flag", pa.bool_()),
        ("text", pa.string()),
        ("raw", pa.binary()),
        ("at", pa.timestamp("ms", "UTC")),
        ("day", pa.date32()),
        ("price", pa.decimal128(12, 3)),
        ("tags", pa.list_(pa.string())),
        ("marks", pa.list_(pa.float64())),
    ]
)
START = datetime(2026, 1, 1, tzinfo=UTC)
FLOATS = [0.0, -0.0, 1.5, -2.25, 1e16, math.inf, math.nan]
VALUES = {
    "n": lambda c: c.choice([1, -7, 2**63 - 1]),
    "u": lambda c: c.choice([1, 2**63, 2**64 - 1]),
    "x": lambda c: c.choice(FLOATS),
    "small": lambda c: c.choice(FLOATS[:4]),
    "flag": lambda c: c.random() < 0.5,
    "text": lambda c: c.choice(["", "a", "é", "\U0001f600", "zz"]),
    "raw": lambda c: c.randbytes(c.randrange(3)),
    "at": lambda c: START + timedelta(seconds=c.randrange(9)),
    "day": lambda c: date(2026, 1, 1 + c.randrange(9)),
    "price": lambda c: decimal.Decimal(c.randrange(-99, 99)) / 10,
    "tags": lambda c: [c.choice(["a", "b", "ä", None]) for _ in range(c.randrange(3))],
    "marks": lambda c: [c.choice(FLOATS) for _ in range(c.randrange(3))],
}
OPERATORS = {name: ("max", "min") for name in VALUES} | {
    "n": ("add", "max", "min"),
    "u": ("add", "max"),
    "x": ("add", "max", "min"),
    "tags": ("union",),
    "marks": ("union",),
}
OPERANDS = {"add": reef.add, "max": reef.max_, "min": reef.min_, "union": reef.union}


def some_columns(choices, count=4):
    """Return random values of some columns."""
    return {name: VALUES[name](choices) for name in choices.sample(list(VALUES), count)}


def random_step(choices, db, writer):
    """Change a few rows in one of the ways there are, or run a job."""
    key = f"k{choices.randrange(12):02}"
    step = choices.choice(
        ["merge"] * 6 + ["put", "patch", "delete", "range", "load", "fold", "all"]
    )
    if step == "merge":
        names = choices.sample(list(VALUES), 4)
        operators = {name: choices.choice(OPERATORS[name]) for name in names}
        columns = {n: OPERANDS[op](VALUES[n](choices)) for n, op in operators.items()}
        writer.merge(key, columns, ttl_s=choices.choice([None, None, None, 0.001, 9999]))
    elif step == "put":
        writer.put(key, some_columns(choices), ttl_s=choices.choice([None, 0.001, 9999]))
    elif step == "patch":
        writer.patch([{"id": key, **some_columns(choices)}])
    elif step == "delete":
        writer.delete(key)
    elif step == "range":
        writer.delete_range(key, key + "z")
    elif step == "load":
        rows = [{"id": f"k{n:02}", **some_columns(choices, 2)} for n in range(0, 12, 3)]
        operators = {name: OPERATORS[name][0] for row in rows for name in row if name != "id"}
        reef.jobs.ingest(db, "t", rows, op="merge", operators=operators)
    elif step == "fold":
        reef.jobs.fold(db, "t", group_bytes=500)
    else:
        reef.jobs.compact(db, "t", full=True)


def plain(value):
    """Return a value that compares equal bit by bit, but for NaN."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else (math.copysign(1, value), value)
    return value


def read(spark, url, engine):
    """Return all rows by key, and when they expire."""
    reader = spark.read.format("reef").option("namespace", "t").option("engine", engine)
    frame = reader.load(url)
    return {row["id"]: [plain(value) for value in row] for row in frame.collect()}


@pytest.mark.parametrize("seed", range(4))
def test_both_readers_resolve_merges_alike(spark, db, url, seed, monkeypatch):
    """Every operator on every type, over puts, patches, deletes, expired rows, and loads."""
    monkeypatch.setattr(segment_writer, "PAGE_BYTES", 60)
    choices = random.Random(seed)
    db.create("t", SCHEMA)
    with db.writer("t", background=False) as writer:
        for _ in range(70):
            random_step(choices, db, writer)
        expected = {key: [plain(v) for v in row.values()] for key, row in writer.scan()}
    python = read(spark, url, "python")
    assert python.keys() == expected.keys()
    assert read(spark, url, "jvm") == python


def counters(db):
    """Create a namespace of counters with one row."""
    columns = [("id", pa.string()), ("count", pa.int64()), ("high", pa.float64())]
    db.create("t", pa.schema(columns))
    with db.writer("t", background=False) as writer:
        writer.put("a", {"count": 1, "high": 2.0})


def test_a_data_frame_is_merged(spark, db, url):
    """Operators come from the option mergeOps; a null is no operand; an absent key gets a row."""
    counters(db)
    frame = spark.createDataFrame(
        [("a", 10, 1.0), ("b", 5, None)], "id string, count long, high double"
    )
    for _ in range(2):
        frame.write.format("reef").mode("append").option("namespace", "t").option(
            "op", "merge"
        ).option("mergeOps", "count=add, high=max").save(url)
    with db.reader("t") as reader:
        rows = dict(reader.scan())
    assert rows["a"] == {"id": "a", "count": 21, "high": 2.0}
    assert rows["b"] == {"id": "b", "count": 10, "high": None}


def test_a_column_names_the_operation_of_each_row(spark, db, url):
    """Merges, puts and deletes in one write; merges may leave other columns null."""
    counters(db)
    frame = spark.createDataFrame(
        [("a", 10, None, "merge"), ("b", 5, 7.0, "put")],
        "id string, count long, high double, _op string",
    )
    frame.write.format("reef").mode("append").option("namespace", "t").option(
        "mergeOps", "count=add"
    ).save(url)
    with db.reader("t") as reader:
        assert {key: row["count"] for key, row in reader.scan()} == {"a": 11, "b": 5}
        assert reader.get("a")["high"] == 2.0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"op": "merge"}, "columns count, high: merges have an operator"),
        ({"op": "merge", "mergeOps": "count=sum"}, "mergeOps='count=sum' is not such as"),
        ({"op": "merge", "mergeOps": "count=union,high=max"}, "union takes a column of lists"),
        ({"op": "merge", "mergeOps": "count=add,high=max,n=add"}, "there is no such column"),
    ],
)
def test_operators_are_checked_before_anything_is_written(spark, db, url, options, problem):
    """The driver names the column, or the option."""
    counters(db)
    frame = spark.range(1).select(
        f.col("id").cast("string"), f.lit(1).alias("count"), f.lit(1.0).alias("high")
    )
    write = frame.write.format("reef").mode("append").option("namespace", "t").options(**options)
    with pytest.raises(PySparkException, match=problem):
        write.save(url)


def test_a_merge_with_a_value_in_a_column_without_operator_is_refused(spark, db, url):
    """Such a value would be lost."""
    counters(db)
    frame = spark.createDataFrame(
        [("a", 1, 1.0, "merge")], "id string, count long, high double, _op string"
    )
    write = frame.write.format("reef").mode("append").option("namespace", "t")
    with pytest.raises(PySparkException, match="column high: a merge needs an operator"):
        write.option("mergeOps", "count=add").save(url)


def test_changes_show_merges_and_the_rows_around_them(spark, db, url):
    """Change rows have the operands and operators; images the merged rows."""
    counters(db)
    with db.writer("t", background=False) as writer:
        writer.merge("a", {"count": reef.add(4)})
        writer.merge("new", {"high": reef.max_(1.0)})
    rows = reef.spark.changes(spark, url, "t", images=True).orderBy("_lsn").collect()
    merged = [row for row in rows if row["_op"] == "merge"]
    assert [(row["_touched"], row["_operators"]) for row in merged] == [
        (["count"], ["add"]),
        (["high"], ["max"]),
    ]
    assert merged[0]["count"] == 4
    assert (merged[0]["_before"]["count"], merged[0]["_after"]["count"]) == (1, 5)
    assert merged[1]["_before"] is None
    assert merged[1]["_after"]["high"] == 1.0
