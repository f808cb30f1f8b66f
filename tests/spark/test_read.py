"""Reading with a real Spark session, over a directory and over a real S3 server."""

import datetime

import pytest
from pyspark.errors import PySparkException
from pyspark.sql.datasource import DataSource, DataSourceReader, EqualTo, InputPartition
from pyspark.sql.functions import col

import reef
import reef.spark
from tests.spark.data import folded, history

ROWS = 30_000


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """A bucket with a namespace of some megabytes, in segments that do not overlap."""
    url = str(tmp_path_factory.mktemp("big") / "bucket")
    db = reef.open(url)
    folded(db, "events", ROWS, parts=2, segment_bytes_max=2 << 20, group_bytes=8192)
    return url


def values(df):
    """Return keys and numbers of a DataFrame."""
    return {row["id"]: row["n"] for row in df.collect()}


def test_spark_finds_the_format_by_itself(spark, db, url):
    """Installed is registered: rows of segments and log, with columns as Python has them.

    A new session knows nothing of another one's tables.
    """
    model = history(db, "t", 3)
    df = (
        spark.newSession()
        .read.format("reef")
        .option("namespace", "t")
        .option("splitBytes", 4096)
        .load(url)
    )
    assert df.schema.simpleString() == (
        "struct<id:string,n:bigint,text:string,vector:array<float>,at:timestamp>"
    )
    assert [field.nullable for field in df.schema] == [False, True, True, True, True]
    found = {row["id"]: row.asDict() for row in df.collect()}
    assert found.keys() == model.keys()
    for key, row in found.items():
        assert (row["n"], row["text"], row["vector"]) == tuple(
            model[key][name] for name in ("n", "text", "vector")
        )
        at = model[key]["at"]
        assert row["at"].timestamp() == at.timestamp()


def test_registering_again_is_fine(spark, db, url):
    """One line makes the format known where Spark did not find it; twice does no harm."""
    with db.writer("t") as writer:
        writer.put("a", b"1")
    reef.spark.register(spark)
    reef.spark.register(spark)
    df = spark.read.format("reef").option("namespace", "t").load(url)
    assert [(bytes(row["id"]), bytes(row["value"])) for row in df.collect()] == [(b"a", b"1")]


def test_a_dataframe_never_changes(spark, db, url):
    """Counted twice, with a write and a fold between: the same; loaded again: the new rows."""
    folded(db, "t", 100)
    events = reef.spark.table(spark, url, "t")
    df = events.df()
    assert df.count() == 100
    with db.writer("t") as writer:
        writer.upsert([{"id": "new", "n": 1}])
    reef.jobs.fold(db, "t")
    assert df.count() == 100
    assert df.filter("n < 10").count() == 10
    assert events.df().count() == 101


def test_filters_and_columns_of_the_table(spark, big):
    """Reef's conditions decide which rows are read, Spark's are applied to them; columns come
    last."""
    events = reef.spark.table(spark, big, "events")
    df = events.where("n >= 10 AND n < 20").where(col("n") % 2 == 0).select("id").df()
    assert df.columns == ["id"]
    assert [row["id"] for row in df.collect()] == [f"k{n:07d}" for n in range(10, 20, 2)]
    assert values(events.where("n < 3", "n > 0").select("n", "id").df()) == {
        "k0000001": 1,
        "k0000002": 2,
    }
    assert events.range("k0000010", "k0000013").df().count() == 3
    assert events.range(prefix="k00000").df().count() == 100
    assert values(events.keys(["k0000007", "nope", b"k0000009"]).df()) == {
        "k0000007": 7,
        "k0000009": 9,
    }


def test_past_states_of_the_table(spark, db, url):
    """A snapshot, its name, a generation and a time name a point in time."""
    folded(db, "t", 10)
    monday = db.snapshot("t", "monday")
    at = datetime.datetime.now(datetime.UTC)
    db.store.runtime.sleep(0.05)
    with db.writer("t") as writer:
        writer.delete_range("k", "l")
    events = reef.spark.table(spark, url, "t")
    assert events.df().count() == 0
    for point in (
        {"snapshot": monday},
        {"snapshot": "monday"},
        {"generation": monday.generation},
        {"time": at},
    ):
        assert events.as_of(**point).df().count() == 10, point


def test_one_percent_of_the_keys_is_one_percent_of_the_bytes(spark, big):
    """Range, keys and a condition that min/max can decide read about as much as they return."""
    events = reef.spark.table(spark, big, "events")
    meter = reef.spark.TaskMeter(spark)

    def share_of(table, rows, whole=None):
        meter.reset()
        assert table.meter(meter).df().count() == rows
        counts = meter.counts
        assert counts["rows"] == rows
        return counts["get.bytes"] / (whole or 1)

    whole = share_of(events, ROWS)
    stored = sum(entry.size for entry in _segments(big))
    assert 0.8 * stored < whole < 1.2 * stored
    asked = {
        "range": events.range("k0010000", "k0010300"),
        "condition": events.where("n >= 20000 AND n < 20300"),
    }
    for name, table in asked.items():
        assert 0.008 < share_of(table, 300, whole) < 0.02, name
        # Nor does planning read more than the block indexes of what may match.
        assert meter.counts["planning.get.bytes"] < 0.05 * whole, name
    assert share_of(events.keys(["k0000100", "k0015000"]), 2, whole) < 0.01


def _segments(url):
    from reef.manifest.head import HeadFinder
    from reef.paths import Namespace

    return HeadFinder(reef.open(url).store, Namespace("events")).find().manifest.segments


def test_a_schema_of_the_user_chooses_columns(spark, big):
    """Spark then does not ask for ours; what does not fit is refused before any task."""
    read = spark.read.format("reef").option("namespace", "events").option("end", "k0000003")
    found = read.schema("n bigint, id string").load(big)
    assert [tuple(row) for row in found.collect()] == [
        (0, "k0000000"),
        (1, "k0000001"),
        (2, "k0000002"),
    ]
    with pytest.raises(PySparkException, match="the given schema says int"):
        read.schema("n int").load(big).collect()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"namespace": "nope"}, "nope"),
        ({"namespace": "events", "generation": "999"}, "no generation 999"),
        ({"namespace": "events", "colums": "id"}, "there is no option 'colums'"),
        ({"namespace": "events", "columns": "id,bad"}, "column bad: there is no such column"),
        ({"namespace": "events", "where": "n LIKE 5"}, "LIKE"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_errors_are_raised_on_the_driver(spark, big, options, message):
    """Errors are raised by `load`, with Reef's own message."""
    with pytest.raises(PySparkException) as caught:
        spark.read.format("reef").options(**options).load(big)
    assert message in str(caught.value)
    assert "reef.errors." in str(caught.value)


def test_conditions_are_checked_by_the_table(spark):
    """A text that is no condition is refused at once, without a bucket."""
    with pytest.raises(reef.InvalidInputError, match="expected AND or OR"):
        reef.spark.table(spark, "./nowhere", "t").where("n > 5 XOR n < 3")


def test_a_real_bucket_is_read(spark, seaweedfs):
    """The store's options go along to the tasks, which open it by themselves."""
    seaweedfs.make_bucket("spark-read")
    options = {**seaweedfs.options(), "listing": "unsorted"}
    db = reef.open("s3://spark-read/here", **options)
    model = history(db, "t", 8)
    df = reef.spark.table(spark, "s3://spark-read/here", "t", **options)
    assert values(df.option(splitBytes=4096).df()) == {k: row["n"] for k, row in model.items()}


class HalvesReader(DataSourceReader):
    """Understands one filter, and says so."""

    def __init__(self):
        self.half = None

    def pushFilters(self, filters):
        for wanted in filters:
            if isinstance(wanted, EqualTo) and wanted.attribute == ("half",):
                self.half = wanted.value
            else:
                yield wanted

    def partitions(self):
        return [InputPartition(0)]

    def read(self, partition):
        for number in range(40):
            if self.half is None or number % 2 == self.half:
                yield number, number % 2


class Halves(DataSource):
    """Forty rows in two halves, half of which can be asked for."""

    @classmethod
    def name(cls):
        return "halves"

    def schema(self):
        return "number int, half int"

    def reader(self, schema):
        return HalvesReader()


def test_push_filters_of_spark_is_still_broken(spark):
    """The day this fails, Spark has mended it, and Reef may let Spark push its filters.

    The plan of a filtered query is reused by the next one without a filter: 40, 20, 20.
    """
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        spark.dataSource.register(Halves)
        df = spark.read.format("halves").load()
        counts = df.count(), df.filter("half = 0").count(), df.count()
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    assert counts == (40, 20, 20)
