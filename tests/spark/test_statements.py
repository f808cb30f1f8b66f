"""Tables of a Reef catalog in Spark SQL: statements, time travel, isolation."""

import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql.functions import col, lit, udf

import reef
import reef.jobs
import reef.spark
from tests.spark.writing import sweep_everything


def rows(spark, query):
    """Return the rows of a query as tuples."""
    return [tuple(row) for row in spark.sql(query).collect()]


def contents(df):
    """Return the rows of a DataFrame as a set of tuples."""
    return {tuple(row) for row in df.collect()}


@pytest.fixture
def table(spark, catalog):
    """A table with three rows."""
    name = f"{catalog}.t"
    spark.sql(f"CREATE TABLE {name} (id STRING, n INT, s STRING) TBLPROPERTIES ('key' = 'id')")
    spark.sql(f"INSERT INTO {name} VALUES ('a', 1, 'x'), ('b', 2, 'y'), ('c', 3, 'z')")
    return name


def test_tables_are_created_listed_described_and_dropped(spark, catalog, table):
    """Each statement has its usual meaning in Spark."""
    assert rows(spark, f"SHOW TABLES IN {catalog}") == [("default", "t", False)]
    described = rows(spark, f"DESCRIBE {table}")
    assert described[:3] == [("id", "string", None), ("n", "int", None), ("s", "string", None)]
    with pytest.raises(AnalysisException, match="ALREADY_EXISTS"):
        spark.sql(f"CREATE TABLE {table} (id STRING)")
    spark.sql(f"ALTER TABLE {table} ADD COLUMN extra DOUBLE")
    assert rows(spark, f"SELECT * FROM {table} WHERE id = 'a'") == [("a", 1, "x", None)]
    spark.sql(f"DROP TABLE {table}")
    with pytest.raises(AnalysisException, match="TABLE_OR_VIEW_NOT_FOUND"):
        spark.sql(f"SELECT * FROM {table}")


def test_inserts_overwrites_and_truncates(spark, catalog, table):
    """An insert is an upsert by key, an overwrite replaces everything in one commit."""
    spark.sql(f"INSERT INTO {table} VALUES ('a', 9, 'new'), ('d', 4, NULL)")
    assert rows(spark, f"SELECT id, n FROM {table} ORDER BY id") == [
        ("a", 9),
        ("b", 2),
        ("c", 3),
        ("d", 4),
    ]
    spark.sql(f"CREATE TABLE {catalog}.u TBLPROPERTIES ('key' = 'id') AS SELECT id, n FROM {table}")
    spark.sql(f"INSERT OVERWRITE {table} SELECT id, n, 'from u' FROM {catalog}.u WHERE n > 3")
    assert rows(spark, f"SELECT * FROM {table} ORDER BY id") == [
        ("a", 9, "from u"),
        ("d", 4, "from u"),
    ]
    spark.sql(f"TRUNCATE TABLE {table}")
    assert rows(spark, f"SELECT count(*) FROM {table}") == [(0,)]


def test_rows_are_updated_deleted_and_merged(spark, table):
    """All clauses of MERGE; columns that are not set keep their values."""
    spark.sql(f"UPDATE {table} SET n = n + 10 WHERE id < 'c'")
    assert rows(spark, f"SELECT id, n, s FROM {table} ORDER BY id") == [
        ("a", 11, "x"),
        ("b", 12, "y"),
        ("c", 3, "z"),
    ]
    spark.sql(f"DELETE FROM {table} WHERE n = 12")
    source = "SELECT 'a' AS id, 100 AS n UNION ALL SELECT 'q', 5"
    spark.sql(
        f"MERGE INTO {table} t USING ({source}) s ON t.id = s.id "
        "WHEN MATCHED THEN UPDATE SET n = s.n "
        "WHEN NOT MATCHED THEN INSERT (id, n) VALUES (s.id, s.n) "
        "WHEN NOT MATCHED BY SOURCE THEN DELETE"
    )
    assert rows(spark, f"SELECT * FROM {table} ORDER BY id") == [("a", 100, "x"), ("q", 5, None)]


def test_earlier_versions_are_read(spark, db, table):
    """VERSION AS OF takes a generation or the name of a snapshot."""
    reef.jobs.fold(db, "t")
    snapshot = db.snapshot("t", name="monday")
    spark.sql(f"DELETE FROM {table} WHERE id = 'a'")
    for version in (str(snapshot.generation), "'monday'"):
        assert rows(spark, f"SELECT count(*) FROM {table} VERSION AS OF {version}") == [(3,)]
    assert rows(spark, f"SELECT count(*) FROM {table}") == [(2,)]
    assert rows(spark, f"SELECT name, generation FROM {table}.snapshots") == [
        ("monday", snapshot.generation)
    ]
    assert rows(spark, f"SELECT sum(rows) FROM {table}.segments") == [(3,)]
    with pytest.raises(PySparkException, match="no generation 999"):
        spark.sql(f"SELECT * FROM {table} VERSION AS OF 999").collect()


def test_a_path_is_read_with_the_options_of_other_table_formats(spark, db, url, table):
    """versionAsOf and timestampAsOf; without a catalog they were ignored once."""
    snapshot = db.snapshot("t", name="monday")
    time.sleep(0.01)
    before = datetime.now(UTC)
    time.sleep(0.01)
    spark.sql(f"DELETE FROM {table} WHERE id = 'a'")
    reader = spark.read.format("reef").option("namespace", "t")
    for option, value in (
        ("versionAsOf", snapshot.generation),
        ("versionAsOf", "monday"),
        ("timestampAsOf", before.isoformat()),
    ):
        assert (
            spark.read.format("reef")
            .option("namespace", "t")
            .option(option, value)
            .load(url)
            .count()
            == 3
        ), option
    assert reader.load(url).count() == 2
    with pytest.raises(AnalysisException, match="asOfTime='yesterday' is not a time"):
        reader.option("timestampAsOf", "yesterday").load(url).count()


STATEMENTS = {
    "update": "UPDATE {table} SET n = slow(n)",
    "delete": "DELETE FROM {table} WHERE slow(n) >= 0",
    "merge": "MERGE INTO {table} t USING (SELECT 'a' AS id) s ON t.id = s.id "
    "WHEN MATCHED THEN UPDATE SET n = slow(t.n)",
}


@pytest.fixture
def write_meanwhile(spark, url):
    """Register the function `slow`, during which another writer changes a row."""

    def register(key, value):
        def write(given):
            other = reef.open(url)
            with other.writer("t", background=False) as writer:
                writer.upsert([{"id": key, "n": value, "s": "other"}])
            return given

        spark.udf.register("slow", udf(write, "int"))

    return register


@pytest.mark.parametrize("statement", STATEMENTS)
def test_H76_a_commit_between_read_and_write_is_a_conflict(
    spark, table, write_meanwhile, statement
):
    """No update is lost: the statement fails, and the other commit stays as it is."""
    write_meanwhile("a", 77)
    with pytest.raises(AnalysisException, match=r"ConflictError: t was changed at LSN \d+") as info:
        spark.sql(STATEMENTS[statement].format(table=table))
    assert "Traceback" not in str(info.value)
    assert "Run it again, or restrict it to a range of keys" in str(info.value)
    assert rows(spark, f"SELECT id, n FROM {table} ORDER BY id") == [("a", 77), ("b", 2), ("c", 3)]


RANGES = {
    "keys": ("UPDATE {table} SET n = slow(n) + 10 WHERE id IN ('a', 'aa')", "aa"),
    "prefix": ("DELETE FROM {table} WHERE id LIKE 'a%' AND slow(n) > 0", "az"),
    "merge": (
        "MERGE INTO {table} t USING (SELECT 'a' AS id) s ON t.id = s.id AND t.id < 'aaa' "
        "WHEN MATCHED AND slow(t.n) > 0 THEN UPDATE SET n = 11",
        "a",
    ),
}


@pytest.mark.parametrize("statement", RANGES)
def test_H76_a_statement_depends_on_the_keys_that_it_reads(
    spark, table, write_meanwhile, statement
):
    """A commit to other keys is no conflict; one to a key that had no row before is."""
    text, conflicting = RANGES[statement]
    write_meanwhile(conflicting, 5)
    with pytest.raises(AnalysisException, match="ConflictError") as info:
        spark.sql(text.format(table=table))
    assert "restrict it" not in str(info.value)
    write_meanwhile("b", 50)
    spark.sql(text.format(table=table))
    found = dict(rows(spark, f"SELECT id, n FROM {table}"))
    expected = {"keys": {"a": 11, "aa": 15}, "prefix": {}, "merge": {"a": 11}}[statement]
    assert found == {**expected, "b": 50, "c": 3}


SUBQUERIES = {
    "scalar": "DELETE FROM {table} WHERE id = 'a' AND n < (SELECT max(slow(n)) FROM {table})",
    "source": "MERGE INTO {table} t USING (SELECT 'a' AS id, max(slow(n)) AS n FROM {table}) s "
    "ON t.id = s.id AND t.id = 'a' WHEN MATCHED THEN UPDATE SET n = s.n",
}


@pytest.mark.parametrize("statement", SUBQUERIES)
def test_H76_a_subquery_on_the_table_counts_as_read(spark, table, write_meanwhile, statement):
    """The statement changes one key only, but depends on others."""
    write_meanwhile("b", 50)
    with pytest.raises(AnalysisException, match="ConflictError"):
        spark.sql(SUBQUERIES[statement].format(table=table))
    assert dict(rows(spark, f"SELECT id, n FROM {table}")) == {"a": 1, "b": 50, "c": 3}


def test_a_statement_reads_one_state_of_a_table(spark, db, table):
    """A self-join never mixes two states, although the table is named twice."""
    joined = spark.sql(f"SELECT a.n, b.n FROM {table} a JOIN {table} b ON a.id = b.id")
    assert sorted(tuple(row) for row in joined.collect()) == [(1, 1), (2, 2), (3, 3)]
    with db.writer("t", background=False) as writer:
        writer.upsert(pa.table({"id": ["a"], "n": pa.array([50], pa.int32()), "s": ["x"]}))
    assert (50, 50) in rows(spark, f"SELECT a.n, b.n FROM {table} a JOIN {table} b ON a.id = b.id")


def test_a_table_in_python(spark, db, table):
    """ReefTable has the methods of Delta's tables; each one is a commit."""
    found = reef.spark.ReefTable.for_name(spark, table)
    found.update("id = 'a'", {"n": "n + 10"})
    found.update(col("id") == "b", {"n": col("n") * 100, "s": lit("new")})
    reef.jobs.fold(db, "t")
    before = db.snapshot("t", name="before")
    source = spark.createDataFrame([("a", 5, "m"), ("q", 6, "m")], "id string, n int, s string")
    (
        found.merge(source, "t.id = source.id")
        .when_matched_update({"n": "t.n + source.n"})
        .when_not_matched_insert()
        .when_not_matched_by_source_update({"s": "'old'"}, "t.n = 3")
        .when_not_matched_by_source_delete()
        .execute()
    )
    assert contents(found.to_df()) == {("a", 16, "x"), ("c", 3, "old"), ("q", 6, "m")}
    found.merge(source, "id").when_matched_delete("source.n = 5").execute()  # a column of both
    found.delete(col("id") == "c")
    found.delete("n > 100")
    assert contents(found.to_df()) == {("q", 6, "m")}
    assert contents(found.to_df(version="before")) == {
        ("a", 11, "x"),
        ("b", 200, "new"),
        ("c", 3, "z"),
    }
    found.restore(snapshot="before")
    assert contents(found.to_df()) == contents(found.to_df(version=before.generation))
    history = found.history().collect()
    assert [row.operation for row in history][:1] == ["replace"]
    assert {row.operation for row in history[1:]} == {"load"}
    assert history[0].rows == 3
    assert rows(spark, f"SELECT generation FROM {table}.generations ORDER BY 1 DESC LIMIT 1") == [
        (db.info("t").generation,)
    ]
    with pytest.raises(AnalysisException, match="TABLE_OR_VIEW_NOT_FOUND"):
        reef.spark.ReefTable.for_name(spark, f"{table}x")


def test_H76_a_conflict_is_retried_by_option(spark, url, table, write_meanwhile, tmp_path):
    """Without retries it is Reef's own error; with them the statement sees the other commit."""
    write_meanwhile("a", 5)
    found = reef.spark.ReefTable.for_path(spark, url, "t")
    with pytest.raises(reef.ConflictError, match="was changed at LSN"):
        found.update("id = 'a'", {"n": "slow(n) + 10"})
    flag = tmp_path / "written"

    def write_once(given):
        if not flag.exists():
            flag.touch()
            with reef.open(url).writer("t", background=False) as writer:
                writer.upsert([{"id": "a", "n": 70, "s": "other"}])
        return given

    spark.udf.register("slow", udf(write_once, "int"))
    replace(found, conflict_retries=2).update("id = 'a'", {"n": "slow(n) + 10"})
    assert ("a", 80, "other") in contents(found.to_df())


def test_changes_are_a_metadata_table(spark, url, table):
    """Conditions on _lsn decide which part of the log is read; a missing table is Spark's error."""
    spark.sql(f"DELETE FROM {table} WHERE id = 'b'")
    query = f"SELECT _lsn, _op, CAST(_key AS STRING), id, n FROM {table}.changes"
    found = rows(spark, f"{query} ORDER BY _lsn, _seq")
    assert [row[1:] for row in found] == [
        ("put", "a", "a", 1),
        ("put", "b", "b", 2),
        ("put", "c", "c", 3),
        ("delete", "b", "b", None),
    ]
    last = found[-1][0]
    newest = spark.sql(f"{query} WHERE _lsn > {last - 1} AND _lsn < {last + 5}")
    assert "_lsn > " in newest._jdf.queryExecution().toString()
    assert [tuple(row) for row in newest.collect()] == found[-1:]
    assert rows(spark, f"{query} WHERE _lsn = {last + 100}") == []
    with_images = reef.spark.changes(spark, url, "t", after_lsn=last - 1, images=True)
    assert [tuple(row) for row in with_images.select("_before.n", "_after").collect()] == [
        (2, None)
    ]
    for missing in (f"{table}x.changes", f"{table}x VERSION AS OF 3", f"{table}.nothing"):
        with pytest.raises(AnalysisException, match="TABLE_OR_VIEW_NOT_FOUND"):
            spark.sql(f"SELECT * FROM {missing}")


def test_a_time_is_a_version_too(spark, db, table):
    """TIMESTAMP AS OF reads the log up to that time; a swept state is an error of analysis."""
    time.sleep(0.01)
    now = datetime.now(UTC).isoformat()
    spark.sql(f"DELETE FROM {table} WHERE id = 'a'")
    query = f"SELECT count(*) FROM {table} TIMESTAMP AS OF '{now}'"
    assert rows(spark, query) == [(3,)]
    assert spark.read.option("timestampAsOf", now).table(table).count() == 3
    assert rows(spark, f"SELECT count(*) FROM {table}") == [(2,)]
    reef.jobs.fold(db, "t")
    sweep_everything(db)
    with pytest.raises(AnalysisException, match=r"NotFoundError: .*garbage-collected"):
        rows(spark, query)


def test_save_modes_of_a_new_table(spark, db, url):
    """The default mode refuses a table that exists, and `ignore` leaves it as it is."""
    df = spark.sql("SELECT 'a' AS id, 1L AS n")

    def write(mode, rows=df):
        rows.write.format("reef").options(namespace="t", key="id").mode(mode).save(url)

    df.write.format("reef").options(namespace="t", key="id").save(url)
    with pytest.raises(AnalysisException, match="TABLE_OR_VIEW_ALREADY_EXISTS"):
        write("errorifexists")
    other = spark.sql("SELECT 'b' AS id, raise_error('evaluated') AS n")
    write("ignore", other)
    with db.reader("t") as reader:
        assert dict(reader.scan()) == {"a": {"id": "a", "n": 1}}
    write("overwrite", spark.sql("SELECT 'c' AS id, 3L AS n"))
    write("append", spark.sql("SELECT 'd' AS id, 4L AS n"))
    with db.reader("t") as reader:
        assert list(dict(reader.scan())) == ["c", "d"]


def test_writers_of_version_two(spark, catalog):
    """create, append, overwrite and createOrReplace; a table that exists is Spark's own error."""
    name = f"{catalog}.v"
    one, two = (spark.sql(f"SELECT '{k}' AS id, {n} AS n") for k, n in (("a", 1), ("b", 2)))
    one.writeTo(name).tableProperty("key", "id").create()
    with pytest.raises(AnalysisException, match="ALREADY_EXISTS"):
        one.writeTo(name).tableProperty("key", "id").create()
    two.writeTo(name).append()
    assert contents(spark.table(name)) == {("a", 1), ("b", 2)}
    two.writeTo(name).overwrite(lit(True))
    assert contents(spark.table(name)) == {("b", 2)}
    one.writeTo(name).tableProperty("key", "id").createOrReplace()
    assert contents(spark.table(name)) == {("a", 1)}


def test_a_table_is_renamed(spark, table):
    """The rows are found by the new name only; a name in use and a missing table are errors."""
    catalog = table.rpartition(".")[0]
    spark.sql(f"CREATE TABLE {catalog}.u (id STRING)")
    with pytest.raises(AnalysisException, match="ALREADY_EXISTS"):
        spark.sql(f"ALTER TABLE {table} RENAME TO {catalog}.u")
    spark.sql(f"ALTER TABLE {table} RENAME TO {catalog}.v")
    assert rows(spark, f"SELECT count(*), sum(n) FROM {catalog}.v") == [(3, 6)]
    spark.sql(f"UPDATE {catalog}.v SET n = n + 1 WHERE id = 'a'")
    assert rows(spark, f"SELECT id, n FROM {catalog}.v WHERE n = 2 ORDER BY id") == [
        ("a", 2),
        ("b", 2),
    ]
    with pytest.raises(AnalysisException, match="NOT_FOUND"):
        spark.sql(f"SELECT * FROM {table}")
    with pytest.raises(AnalysisException, match="NOT_FOUND"):
        spark.sql(f"ALTER TABLE {catalog}.nothing RENAME TO {catalog}.w")


def test_a_key_is_not_changed_by_an_update(spark, table):
    """It would replace the row that has the new key, and forget when the row expires."""
    for changed in ("id = 'c'", "id = 'new'"):
        with pytest.raises(PySparkException, match="cannot change the key of a row") as info:
            spark.sql(f"UPDATE {table} SET {changed} WHERE id = 'a'")
        assert "\n\tat " not in str(info.value).split("JVM stacktrace")[0]
    spark.sql(f"UPDATE {table} SET id = 'a', n = 9 WHERE id = 'a'")
    assert rows(spark, f"SELECT id, n FROM {table} ORDER BY id") == [("a", 9), ("b", 2), ("c", 3)]


def test_the_expiry_of_rows_is_a_column_that_can_be_selected(spark, db, table):
    """It is not part of `*`; updates and merges keep it."""
    late = datetime(2100, 1, 2, tzinfo=UTC)
    with db.writer("t", background=False) as writer:
        writer.upsert([{"id": "e", "n": 5, "_expires_at": late}])
    spark.sql(f"UPDATE {table} SET n = n + 1")
    assert spark.table(table).columns == ["id", "n", "s"]
    query = f"SELECT id, n, unix_seconds(_expires_at) FROM {table} WHERE id IN ('a', 'e')"
    assert rows(spark, f"{query} ORDER BY id") == [("a", 2, None), ("e", 6, late.timestamp())]


def test_a_time_without_a_zone_is_in_that_of_the_session(spark, db, url, table):
    """As in TIMESTAMP AS OF; both readers understand the options of other table formats."""
    snapshot = db.snapshot("t", name="monday")
    time.sleep(0.01)
    now = datetime.now(UTC)
    time.sleep(0.01)
    spark.sql(f"DELETE FROM {table} WHERE id = 'a'")
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        local = (now + timedelta(hours=9)).replace(tzinfo=None)
        for engine in ("jvm", "python"):
            reader = spark.read.format("reef").options(namespace="t", engine=engine)
            assert reader.option("timestampAsOf", str(local)).load(url).count() == 3
            reader = spark.read.format("reef").options(namespace="t", engine=engine)
            assert reader.option("versionAsOf", snapshot.generation).load(url).count() == 3
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)


def test_a_time_before_the_table_existed_is_an_error(spark, table):
    """No rows would mean that it was empty then."""
    with pytest.raises(AnalysisException, match="NotFoundError: t did not exist at 2001"):
        spark.sql(f"SELECT * FROM {table} TIMESTAMP AS OF '2001-01-01'").collect()


def test_metadata_tables_of_a_version(spark, db, table):
    """Segments are those of the version; the other tables have only one."""
    reef.jobs.fold(db, "t")
    first = db.info("t").generation
    spark.sql(f"INSERT INTO {table} VALUES ('d', 4, 'q')")
    reef.jobs.fold(db, "t")
    counted = f"SELECT sum(rows) FROM {table}.segments"
    assert rows(spark, f"{counted} VERSION AS OF {first}") == [(3,)]
    assert rows(spark, counted) == [(4,)]
    with pytest.raises(AnalysisException, match="generations are listed for the newest version"):
        spark.sql(f"SELECT * FROM {table}.generations VERSION AS OF {first}")


def test_errors_of_the_python_reader_are_those_of_reef(spark, db, url, table):
    """Changes of a namespace that is not there; a catalog alone lists its tables."""
    with pytest.raises(AnalysisException, match="NotFoundError: there is no namespace x") as info:
        reef.spark.changes(spark, url, "x")
    assert "Traceback" not in str(info.value)
    catalog = table.split(".")[0]
    assert rows(spark, f"SHOW TABLES IN {catalog}") == [("default", "t", False)]
