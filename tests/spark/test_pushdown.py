"""Queries planned with the help of Reef: filters, aggregates, joins without a shuffle."""

import random

import pyarrow as pa
import pytest

import reef
import reef.jobs

ROWS = 4000
NUMBERS = pa.schema([("id", pa.string()), ("n", pa.int64())])


@pytest.fixture
def catalog(spark, url, request):
    """A catalog over an empty bucket; every test has one of its own name."""
    name = f"p{abs(hash(request.node.name))}"
    spark.conf.set(f"spark.sql.catalog.{name}", "reef.spark.ReefCatalog")
    spark.conf.set(f"spark.sql.catalog.{name}.url", url)
    return f"{name}.default"


@pytest.fixture
def no_broadcast(spark):
    """Joins of small tables sort and merge."""
    before = spark.conf.get("spark.sql.autoBroadcastJoinThreshold")
    spark.conf.set("spark.sql.autoBroadcastJoinThreshold", "-1")
    yield
    spark.conf.set("spark.sql.autoBroadcastJoinThreshold", before)


def ingested(db, name, first=0, last=ROWS, step=1):
    """Make a namespace of one segment with many pages, unless it exists, and load numbers."""
    if name not in db.namespaces():
        db.create(name, NUMBERS)
    numbers = range(first, last, step)
    table = pa.table({"id": [f"k{n:06}" for n in numbers], "n": list(numbers)}, schema=NUMBERS)
    reef.jobs.ingest(db, name, table)


def plan_of(df):
    """Return the plan that runs, as text."""
    return df._jdf.queryExecution().executedPlan().toString()


def read(spark, url, schema=None, **options):
    """Load the namespace t."""
    reader = spark.read.format("reef").option("namespace", "t").options(**options)
    return (reader.schema(schema) if schema else reader).load(url)


# --- filters ------------------------------------------------------------------------------


def test_a_filter_finds_zeros_of_either_sign(spark, db, url):
    """Spark takes 0.0 and -0.0 for equal; the bounds of a page may have one of them only."""
    db.create("t", pa.schema([("id", pa.string()), ("x", pa.float64()), ("y", pa.float32())]))
    table = pa.table({"id": ["a"], "x": [-0.0], "y": pa.array([0.0], pa.float32())})
    reef.jobs.ingest(db, "t", table)
    df = read(spark, url)
    for condition in ("x = 0D", "x >= 0D", "y <= float('-0.0')", "y = float('-0.0')"):
        assert df.where(condition).count() == 1, condition
    assert df.where("x > 0D").count() == 0


def test_a_filter_on_numbers_that_are_none(spark, db, url):
    """NaN is above every number for Spark; it has no place between bounds."""
    db.create("t", pa.schema([("id", pa.string()), ("x", pa.float64())]))
    reef.jobs.ingest(db, "t", pa.table({"id": ["a", "b"], "x": [1.0, float("nan")]}))
    assert [row["id"] for row in read(spark, url).where("x > 5").collect()] == ["b"]


def test_a_filter_on_the_expiry(spark, db, url):
    """It has no bounds in the index, so it excludes no page."""
    db.create("t", NUMBERS)
    with db.writer("t", background=False) as writer:
        writer.upsert([{"id": "a", "n": 1}], ttl_s=9999)
        writer.upsert([{"id": "b", "n": 2}])
    reef.jobs.fold(db, "t")
    df = read(spark, url, schema="id STRING, _expires_at TIMESTAMP")
    assert [row["id"] for row in df.where("_expires_at > current_timestamp()").collect()] == ["a"]
    assert [row["id"] for row in df.where("_expires_at IS NULL").collect()] == ["b"]


def test_filters_on_nulls_and_prefixes(spark, db, url):
    """Comparisons that are true for null, and prefixes that nothing is above."""
    db.create("t", pa.schema([("id", pa.binary()), ("s", pa.string())]))
    keys = [b"0", b"\xff" * 70, b"a"]
    reef.jobs.ingest(db, "t", pa.table({"id": keys, "s": [None, "xy", "x"]}))
    df = read(spark, url)
    assert df.where("s <=> NULL").count() == 1
    assert df.where("s <=> 'x'").count() == 1
    assert df.where("s IS NULL OR s = 'x'").count() == 2
    assert df.where("startswith(s, 'x')").count() == 2
    assert df.where("startswith(id, X'FFFF')").count() == 1
    assert df.where("s IN ('x', NULL)").count() == 1


# --- aggregates ---------------------------------------------------------------------------

AGGREGATES = "SELECT count(*), min(id), max(id), count(id), count(1) FROM {}.t"


def is_from_metadata(df):
    """Whether no rows are read."""
    return "LocalTableScan" in plan_of(df)


def test_aggregates_come_from_metadata_where_they_are_exact(spark, db, catalog):
    """Segments that do not overlap, and a log of new keys: no page is read."""
    ingested(db, "t", 0, 1000)
    ingested(db, "t", 2000, 3000)
    df = spark.sql(AGGREGATES.format(catalog))
    assert is_from_metadata(df)
    assert tuple(df.first()) == (2000, "k000000", "k002999", 2000, 2000)
    with db.writer("t", background=False) as writer:
        writer.upsert([{"id": "k009999", "n": 1}])
    df = spark.sql(AGGREGATES.format(catalog))
    assert is_from_metadata(df)
    assert tuple(df.first()) == (2001, "k000000", "k009999", 2001, 2001)


def test_aggregates_of_an_empty_table(spark, db, catalog):
    """A count of zero, and no lowest key."""
    db.create("t", NUMBERS)
    df = spark.sql(AGGREGATES.format(catalog))
    assert is_from_metadata(df)
    assert tuple(df.first()) == (0, None, None, 0, 0)


@pytest.mark.parametrize("change", ["overlap", "delete", "range", "patch", "expiry"])
def test_aggregates_are_read_where_metadata_would_be_wrong(spark, db, catalog, change):
    """Rows may be hidden or gone: all of them are read, and the result is right."""
    ingested(db, "t", 0, 100)
    with db.writer("t", background=False) as writer:
        if change == "overlap":
            writer.upsert([{"id": "k000050", "n": 1}])
        elif change == "delete":
            writer.delete("k000000")
        elif change == "range":
            writer.delete_range("k0", "k000010")
        elif change == "patch":
            writer.patch([{"id": "k000050", "n": 1}])
        else:
            writer.upsert([{"id": "k000200", "n": 1}], ttl_s=0.001)
    df = spark.sql(AGGREGATES.format(catalog))
    assert not is_from_metadata(df)
    count, lowest = {"delete": (99, "k000001"), "range": (90, "k000010")}.get(
        change, (100, "k000000")
    )
    assert tuple(df.first()) == (count, lowest, "k000099", count, count)


def test_other_aggregates_read_rows(spark, db, catalog):
    """Groups, filters, other columns and distinct counts are not in metadata."""
    ingested(db, "t", 0, 100)
    assert tuple(spark.sql(f"SELECT count(*) FROM {catalog}.t WHERE n < 10").first()) == (10,)
    assert tuple(spark.sql(f"SELECT max(n), count(n) FROM {catalog}.t").first()) == (99, 100)
    assert spark.sql(f"SELECT n % 2, count(*) FROM {catalog}.t GROUP BY 1").count() == 2
    limited = f"SELECT count(*) FROM (SELECT * FROM {catalog}.t LIMIT 7)"
    assert tuple(spark.sql(limited).first()) == (7,)


# --- partitioning -------------------------------------------------------------------------


def split(table, split_bytes):
    """Return a table for FROM that is read in many tasks."""
    return f"{table} WITH (splitBytes = {split_bytes})"


def test_rows_are_grouped_by_key_without_a_shuffle(spark, db, catalog):
    """Each key is in one task, and sorted there."""
    ingested(db, "t")
    ingested(db, "t", 0, ROWS, 3)
    df = spark.sql(f"SELECT id, sum(n) FROM {split(catalog + '.t', 8000)} GROUP BY id")
    assert "Exchange" not in plan_of(df)
    assert df.rdd.getNumPartitions() >= 4
    assert {tuple(row) for row in df.collect()} == {(f"k{n:06}", n) for n in range(ROWS)}


@pytest.mark.usefixtures("no_broadcast")
def test_tables_that_are_cut_alike_are_joined_without_a_shuffle(spark, db, catalog):
    """A self-join reads both sides by the same ranges; other cuts are shuffled."""
    ingested(db, "t")
    ingested(db, "u", 0, ROWS, 2)
    query = "SELECT a.id, a.n + b.n FROM {} a JOIN {} b ON a.id = b.id"
    table = split(f"{catalog}.t", 8000)
    same = spark.sql(query.format(table, table))
    assert "Exchange" not in plan_of(same)
    assert "Sort [" not in plan_of(same)
    assert {tuple(row) for row in same.collect()} == {(f"k{n:06}", 2 * n) for n in range(ROWS)}
    other = spark.sql(query.format(table, split(f"{catalog}.u", 5000)))
    assert "Exchange" in plan_of(other)
    assert {tuple(row) for row in other.collect()} == {
        (f"k{n:06}", 2 * n) for n in range(0, ROWS, 2)
    }


@pytest.mark.usefixtures("no_broadcast")
def test_the_other_side_of_a_join_may_be_shuffled_into_the_ranges(spark, db, catalog):
    """With Spark's setting for it, a task gets the rows of its own key range."""
    ingested(db, "t")
    name = "spark.sql.sources.v2.bucketing.shuffle.enabled"
    spark.conf.set(name, "true")
    try:
        numbers = list(range(-10, ROWS + 10))
        random.Random(1).shuffle(numbers)
        spark.createDataFrame([(f"k{n:06}", n) for n in numbers], "id STRING, m LONG").repartition(
            3
        ).createOrReplaceTempView("numbers")
        df = spark.sql(
            f"SELECT id, n, m FROM {split(catalog + '.t', 8000)} JOIN numbers USING (id)"
        )
        assert {tuple(row) for row in df.collect()} == {(f"k{n:06}", n, n) for n in range(ROWS)}
    finally:
        spark.conf.unset(name)


def test_a_join_with_few_keys_reads_their_pages_only(spark, db, catalog):
    """Keys of the small side are a runtime filter; the cuts stay where they were."""
    ingested(db, "t")
    spark.createDataFrame([("k000007", 1), ("k003999", 2)], "id STRING, m INT").where(
        "m > 0"
    ).createOrReplaceTempView("few")
    table = split(f"{catalog}.t", 8000)
    df = spark.sql(f"SELECT id, n, m FROM {table} JOIN few USING (id) WHERE m < 5")
    assert {tuple(row) for row in df.collect()} == {("k000007", 7, 1), ("k003999", 3999, 2)}
