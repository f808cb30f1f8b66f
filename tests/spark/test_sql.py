"""Spark as people use it: SQL, settings of a session, schemas and names of any kind."""

import datetime
import threading

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as fn
from pyspark.sql import types as st

import reef
import reef.spark
from tests.spark.writing import named_segments, numbers_of, rows_of, sweep_everything


@pytest.fixture
def settings(spark):
    """Change settings of the session for one test."""
    before = {}

    def change(name, value):
        before[name] = spark.conf.get(name)
        spark.conf.set(name, value)

    yield change
    for name, value in before.items():
        spark.conf.set(name, value)


def write(df, url, mode="append", **options):
    """Write a DataFrame."""
    df.write.format("reef").options(namespace="t", **options).mode(mode).save(url)


def read(spark, url, **options):
    """Read it with Spark."""
    return spark.read.format("reef").options(namespace="t", **options).load(url)


def test_a_view_is_read_and_inserted_into(spark, db, url):
    """Inserts are upserts, an overwrite replaces; the view stays at the snapshot of its first
    read."""
    write(spark.sql("SELECT 'a' AS id, 1L AS n"), url, key="id")
    spark.sql(f"CREATE TEMPORARY VIEW v USING reef OPTIONS (path '{url}', namespace 't')")
    try:
        assert [tuple(row) for row in spark.sql("SELECT * FROM v").collect()] == [("a", 1)]
        spark.sql("INSERT INTO v SELECT 'a', 5L UNION ALL SELECT 'b', 2L")
        assert numbers_of(db) == {"a": 5, "b": 2}
        assert [tuple(row) for row in spark.sql("SELECT * FROM v").collect()] == [("a", 1)]
        spark.sql("INSERT OVERWRITE v SELECT 'c', 3L")
        assert numbers_of(db) == {"c": 3}
    finally:
        spark.catalog.dropTempView("v")


@pytest.mark.slow
def test_tables_of_sparks_catalog_are_refused_clearly(spark, db, url):
    """Spark keeps their options to itself: the day this fails, they can be supported."""
    write(spark.sql("SELECT 'a' AS id, 1L AS n"), url, key="id")
    options = f"OPTIONS (path '{url}', namespace 't')"
    with pytest.raises(PySparkException, match="CREATE TEMPORARY VIEW"):
        spark.sql(f"CREATE TABLE known USING reef {options}")
    spark.sql(f"CREATE TABLE declared (id STRING, n BIGINT) USING reef {options}")
    try:
        with pytest.raises(PySparkException, match="CREATE TEMPORARY VIEW"):
            spark.sql("SELECT * FROM declared").collect()
    finally:
        spark.sql("DROP TABLE declared")
    assert numbers_of(db) == {"a": 1}


def test_timestamps_do_not_depend_on_the_sessions_zone(spark, settings, db, url):
    """A timestamp in New York is the same instant in the bucket, in both directions."""
    settings("spark.sql.session.timeZone", "America/New_York")
    df = spark.sql(
        """SELECT 'a' AS id, TIMESTAMP '2024-01-01 12:00:00' AS at,
           TIMESTAMP_NTZ '2024-01-01 12:00:00' AS local, DATE '2024-01-01' AS day"""
    )
    write(df, url, key="id")
    noon = datetime.datetime(2024, 1, 1, 12)
    expected = {
        "at": datetime.datetime(2024, 1, 1, 17, tzinfo=datetime.UTC),
        "local": noon,
        "day": noon.date(),
    }
    assert rows_of(db) == {"a": expected}
    found = read(spark, url, where="at = TIMESTAMP '2024-01-01 12:00:00-05:00'")
    assert found.exceptAll(df).count() == 0
    assert found.count() == 1


@pytest.mark.slow
def test_a_session_may_prefer_large_types(spark, settings, db, url):
    """Rows come and go as large strings: written, shuffled by a fold and read the same."""
    settings("spark.sql.execution.arrow.useLargeVarTypes", "true")
    df = spark.sql("SELECT 'k' || id AS id, id AS n, array('x') AS l, 'put' AS _op FROM range(10)")
    write(df, url, key="id")
    with db.writer("t", background=False) as writer:
        writer.upsert([{"id": "k3", "n": -3, "l": ["y", None]}])
    reef.jobs.fold(db, "t", executor=reef.spark.executor(spark), shuffle_bytes_min=0)
    expected = {f"k{n}": n for n in range(10)} | {"k3": -3}
    assert numbers_of(db) == expected
    assert {row["id"]: row["n"] for row in read(spark, url).collect()} == expected


def test_nulls_against_the_schema_of_the_user(spark, db, url):
    """A schema that promises none is believed until there is one; then the column is named."""
    write(spark.sql("SELECT 'a' AS id, 1L AS n UNION ALL SELECT 'b', NULL"), url, key="id")
    promised = st.StructType(
        [st.StructField("id", st.StringType()), st.StructField("n", st.LongType(), False)]
    )
    given = spark.read.format("reef").schema(promised).option("namespace", "t")
    assert given.option("end", "b").load(url).collect() == [("a", 1)]
    with pytest.raises(PySparkException, match="column n has nulls, the given schema"):
        given.option("end", "z").load(url).collect()


def test_an_order_column_decides_between_partitions(spark, db, url):
    """Rows of a key are in any partition, and the highest counts (H38)."""
    rows = spark.range(400, numPartitions=4).selectExpr(
        "'k' || id % 100 AS id", "id AS n", "id AS _at"
    )
    write(rows, url, key="id", orderBy="_at")
    expected = {f"k{n % 100}": n for n in range(300, 400)}
    assert numbers_of(db) == expected
    assert db.info("t").schema.names == ["id", "n"]
    assert sweep_everything(db) == named_segments(db)
    assert numbers_of(db) == expected


def test_columns_may_have_any_name(spark, db, url):
    """Dots, commas, quotes and spaces; a name that Spark takes for a path within a row is one
    column."""
    names = ["the id", "a.b", "a,b", 'a"b']
    columns = st.StructType(
        [st.StructField(name, st.StringType()) for name in names[:1]]
        + [st.StructField(name, st.IntegerType()) for name in names[1:]]
    )
    df = spark.createDataFrame([("x", 1, 2, 3), ("y", 4, 5, 6)], columns)
    reef.spark.bulk_load(df, url, "t", key="the id")
    write(df, url)
    assert db.info("t").schema == pa.schema(
        [("the id", pa.string()), *((name, pa.int32()) for name in names[1:])]
    )
    table = reef.spark.table(spark, url, "t").where(('a"b', ">", 3)).select("a,b", "a.b")
    assert table.df().collect() == [(5, 4)]
    filtered = table.where(fn.col("`a.b`") > 3)  # Spark's own, which reads all columns
    assert filtered.df().collect() == [(5, 4)]
    for wrong, why in ((["A,B"], "no such column"), (["a.b", "a.b"], "twice")):
        with pytest.raises(reef.InvalidInputError, match=why):
            filtered.select(*wrong).df()


def test_names_that_differ_only_in_case(spark, db, url):
    """Spark takes them for one where it is asked for a column by its name."""
    db.create("t", pa.schema([("id", pa.string()), ("ID", pa.int64()), ("Id", pa.int64())]))
    with db.writer("t") as writer:
        writer.upsert([{"id": "a", "ID": 1, "Id": 2}])
    assert reef.spark.bulk_load(read(spark, url), url, "t").rows == 1
    table = reef.spark.table(spark, url, "t").where(fn.lit(True))
    assert table.select("Id", "id").df().collect() == [(2, "a")]


def test_rows_that_are_written_back_keep_their_expiry(spark, settings, db, url):
    """It is no column, but can be asked for like one, as in a scan."""
    settings("spark.sql.session.timeZone", "America/New_York")
    late = datetime.datetime(2100, 1, 2, 3, 4, 5, 678000, tzinfo=datetime.UTC)
    db.create("t", pa.schema([("id", pa.string()), ("n", pa.int64())]))
    with db.writer("t") as writer:
        writer.upsert([{"id": "a", "n": 1, "_expires_at": late}, {"id": "b", "n": 2}])
    assert read(spark, url).columns == ["id", "n"]
    write(read(spark, url, columns="id,n,_expires_at"), url, "overwrite")
    with db.reader("t") as reader:
        found = reader.get_many(["a", "b"], columns=["n", "_expires_at"])
    assert found["n"].to_pylist() == [1, 2]
    assert found["_expires_at"].to_pylist() == [late, None]
    some = reef.spark.table(spark, url, "t").where(fn.col("n") > 1).select("id", "_expires_at")
    assert some.df().collect() == [("b", None)]


def test_a_column_of_nothing_is_null(spark, db, url):
    """NULL without a type, as `lit(None)` is, fits every column; no column can be made of it."""
    db.create("t", pa.schema([("id", pa.string()), ("n", pa.int64()), ("l", pa.list_(pa.int8()))]))
    with db.writer("t") as writer:
        writer.upsert([{"id": "a", "n": 1, "l": [1]}])
    write(spark.sql("SELECT 'a' AS id, NULL AS n"), url, op="patch")
    reef.spark.bulk_load(spark.sql("SELECT 'b' AS id, NULL AS l, NULL AS n"), url, "t")
    assert read(spark, url).collect() == [("a", None, [1]), ("b", None, None)]
    with pytest.raises(reef.InvalidInputError, match="column n: null is not a column type"):
        reef.spark.bulk_load(spark.sql("SELECT 'b' AS id, NULL AS n"), url, "new", key="id")


def test_writing_from_a_thread(spark, db, url):
    """The native source is found by threads other than the one that made the session."""
    write(spark.sql("SELECT 'a' AS id, 1L AS n"), url, key="id")
    df, errors = spark.sql("SELECT 'b' AS id, 2L AS n"), []

    def work():
        try:
            write(df, url)
        except Exception as error:
            errors.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []
    assert numbers_of(db) == {"a": 1, "b": 2}


def test_errors_are_short(spark, db, url):
    """What Spark shows of an error of Reef's: its own first line, where it called, the message."""
    with pytest.raises(PySparkException) as caught:
        write(spark.sql("SELECT 'a' AS id"), url)
    text = str(caught.value)
    assert len(text.splitlines()) < 10
    assert "Traceback" not in text
    assert "NotFoundError: there is no namespace t" in text
    assert "option key" in text
