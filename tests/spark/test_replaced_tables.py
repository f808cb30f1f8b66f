"""Tables that statements create and replace: what becomes of the old rows, and what is refused."""

from datetime import UTC, datetime

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import functions as fn

import reef
import reef.jobs
import reef.spark


@pytest.fixture
def table(spark, catalog):
    """A table with two rows."""
    name = f"{catalog}.t"
    spark.sql(f"CREATE TABLE {name} (id STRING, n INT) TBLPROPERTIES ('KEY' = 'id')")
    spark.sql(f"INSERT INTO {name} VALUES ('a', 1), ('b', 2)")
    return name


def contents(spark, table):
    """Return the rows by key."""
    return {row[0]: row[1] for row in spark.table(table).collect()}


def sql_replace(spark, table):
    """Replace a table by a query of itself."""
    spark.sql(f"CREATE OR REPLACE TABLE {table} AS SELECT id, n + 1 AS n FROM {table}")


def sql_replace_only(spark, table):
    """Replace a table that has to exist."""
    spark.sql(f"REPLACE TABLE {table} AS SELECT id, n + 1 AS n FROM {table}")


def save_as_table(spark, table):
    """Overwrite it by a DataFrame of itself."""
    df = spark.table(table).withColumn("n", fn.col("n") + 1)
    df.write.mode("overwrite").saveAsTable(table)


def create_or_replace(spark, table):
    """Replace it by the second writer's API."""
    spark.table(table).withColumn("n", fn.col("n") + 1).writeTo(table).createOrReplace()


def replace(spark, table):
    """Replace it by the second writer's API, if it exists."""
    spark.table(table).withColumn("n", fn.col("n") + 1).writeTo(table).replace()


REPLACEMENTS = [sql_replace, sql_replace_only, save_as_table, create_or_replace, replace]


@pytest.mark.parametrize("statement", REPLACEMENTS)
def test_a_query_may_read_the_table_that_it_replaces(spark, db, table, statement):
    """Nothing is dropped: the new rows are one commit in the same namespace."""
    db.snapshot("t", name="before")
    statement(spark, table)
    assert contents(spark, table) == {"a": 2, "b": 3}
    before = spark.read.option("versionAsOf", "before").table(table)
    assert {row[0]: row[1] for row in before.collect()} == {"a": 1, "b": 2}


@pytest.mark.parametrize("statement", REPLACEMENTS)
def test_a_query_that_fails_leaves_the_table_that_it_replaces(spark, db, table, statement):
    """The error is in a task, after the statement has begun."""
    bad = f"SELECT id, IF(id = 'b', CAST(raise_error('broken') AS INT), n) AS n FROM {table}"
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW bad AS {bad}")
    run = {
        sql_replace: lambda: spark.sql(f"CREATE OR REPLACE TABLE {table} AS SELECT * FROM bad"),
        sql_replace_only: lambda: spark.sql(f"REPLACE TABLE {table} AS SELECT * FROM bad"),
        save_as_table: lambda: spark.table("bad").write.mode("overwrite").saveAsTable(table),
        create_or_replace: lambda: spark.table("bad").writeTo(table).createOrReplace(),
        replace: lambda: spark.table("bad").writeTo(table).replace(),
    }
    with pytest.raises(PySparkException, match="broken"):
        run[statement]()
    assert contents(spark, table) == {"a": 1, "b": 2}


REFUSED = {
    "another key": (
        "TBLPROPERTIES ('key' = 'k') AS SELECT id AS k, n FROM {t}",
        "key column is id",
    ),
    "a key by default": ("AS SELECT 'x' AS k, 1 AS n", "column id would be dropped"),
    "a dropped column": ("AS SELECT id FROM {t}", "column n would be dropped"),
    "another type": ("AS SELECT id, 'x' AS n FROM {t}", "column n is int, not string"),
    "a type that Reef lacks": (
        "AS SELECT id, n, INTERVAL '1' DAY AS t FROM {t}",
        "column t: Reef has no interval",
    ),
    "a property": ("TBLPROPERTIES ('kee' = 'id') AS SELECT id, n FROM {t}", "no property 'kee'"),
    "a place": ("LOCATION '/tmp/x' AS SELECT id, n FROM {t}", "LOCATION"),
    "a format": ("USING csv AS SELECT id, n FROM {t}", "USING csv"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_definition_that_does_not_fit_is_refused_before_anything_changes(spark, table, case):
    """The table keeps its rows and its columns."""
    text, why = REFUSED[case]
    with pytest.raises(AnalysisException, match=why):
        spark.sql(f"CREATE OR REPLACE TABLE {table} {text.format(t=table)}")
    assert spark.table(table).columns == ["id", "n"]
    assert contents(spark, table) == {"a": 1, "b": 2}


def test_a_replacement_may_add_columns_and_may_have_no_query(spark, catalog, table):
    """Added columns are there for the new rows; a definition alone leaves an empty table."""
    spark.sql(f"CREATE OR REPLACE TABLE {table} AS SELECT 2.5D AS x, n, id FROM {table}")
    assert {tuple(row) for row in spark.table(table).select("id", "n", "x").collect()} == {
        ("a", 1, 2.5),
        ("b", 2, 2.5),
    }
    spark.sql(f"CREATE OR REPLACE TABLE {table} (id STRING, n INT, x DOUBLE)")
    assert spark.table(table).count() == 0
    spark.sql(f"CREATE OR REPLACE TABLE {catalog}.made (id STRING, n INT)")
    assert spark.table(f"{catalog}.made").count() == 0
    with pytest.raises(AnalysisException, match=r"NOT_FOUND|CANNOT_FIND"):
        spark.sql(f"REPLACE TABLE {catalog}.missing (id STRING)")


def test_a_new_table_exists_only_with_its_rows(spark, db, catalog):
    """A query that fails leaves no table; one that succeeds has the key and vectors asked for."""
    broken = "CAST(raise_error('broken') AS INT)"
    with pytest.raises(PySparkException, match="broken"):
        spark.sql(f"CREATE TABLE {catalog}.q AS SELECT 'a' AS id, {broken} AS n")
    assert db.namespaces() == []
    spark.sql(
        f"CREATE TABLE {catalog}.q TBLPROPERTIES ('key' = 'k', 'Vectors' = 'e=2') "
        "AS SELECT 'a' AS k, array(1f, 2f) AS e"
    )
    assert [tuple(row) for row in spark.table(f"{catalog}.q").collect()] == [("a", [1.0, 2.0])]
    with pytest.raises(AnalysisException, match="ALREADY_EXISTS"):
        spark.sql(f"CREATE TABLE {catalog}.q AS SELECT 'b' AS id")
    spark.sql("SELECT 'z' AS id, 1 AS n").write.saveAsTable(f"{catalog}.saved")
    assert contents(spark, f"{catalog}.saved") == {"z": 1}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("(id STRING, n INT NOT NULL)", "column n: NOT NULL"),
        ("(id STRING, n STRING COLLATE UTF8_LCASE)", "column n: a column has the collation"),
        ("(id STRING COLLATE UTF8_LCASE)", "a key has the collation"),
        ("(id STRING) TBLPROPERTIES ('retention' = '3')", "no property 'retention'"),
        ("(id STRING) OPTIONS ('compression' = 'zstd')", "no property 'compression'"),
        ("(id STRING) LOCATION '/tmp/elsewhere'", "LOCATION"),
        ("(id STRING) USING csv", "USING csv"),
    ],
)
def test_nothing_of_a_definition_is_dropped_without_a_word(spark, db, catalog, text, why):
    """What Reef would not keep is refused; comments are dropped with a warning in the log."""
    with pytest.raises(AnalysisException, match=why):
        spark.sql(f"CREATE TABLE {catalog}.q {text}")
    assert db.namespaces() == []


def test_comments_and_a_key_without_nulls_are_accepted(spark, db, catalog):
    """NOT NULL on the key says what is so anyway."""
    spark.sql(f"CREATE TABLE {catalog}.q (id STRING NOT NULL COMMENT 'k', n INT) COMMENT 'all'")
    assert db.namespaces() == ["q"]


def test_errors_of_inserts_are_those_of_reef(spark, table):
    """No traceback of Python, and no stack of Java."""
    with pytest.raises(AnalysisException, match="InvalidInputError: 1 keys of this") as info:
        spark.sql(f"INSERT INTO {table} VALUES ('x', 1), ('x', 2)")
    assert "Traceback" not in str(info.value)
    assert contents(spark, table) == {"a": 1, "b": 2}


def test_methods_of_a_table_by_their_other_names(spark, db, url, table):
    """The URL of a bucket instead of a catalog; `where` and `to` by name and by place."""
    found = reef.spark.ReefTable.for_name(spark, url, "t")
    found.update(set={"n": "n + 10"}, where="id = 'a'")
    found.update({"n": fn.col("n") + 100}, fn.col("id") == "b")
    assert contents(spark, table) == {"a": 11, "b": 102}
    reef.jobs.fold(db, "t")
    first = db.snapshot("t", name="first")
    after = datetime.now(UTC)
    for to in (first.generation, first, "first", after):
        found.delete(where="id = 'a'")
        found.restore(to)
        assert contents(spark, table) == {"a": 11, "b": 102}
    found.restore(to="first")
    with pytest.raises(reef.InvalidInputError, match="exactly one"):
        found.restore("first", generation=1)
    with pytest.raises(reef.InvalidInputError, match="given once"):
        found.delete("n > 1", where="n > 2")
