"""The core of Reef on Spark, in a driver of its own, for one kind of session and one version.

    python -m tests.spark.core_driver MASTER FOLDER

MASTER is Spark's, `connect` for a server of Spark Connect, or `shell` for the spark-sql shell.
Fails with the first check that does not hold; prints the version and the engine that reads.
"""

import io
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pyspark
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.functions import col

import reef
import reef.jobs
import reef.spark
from tests.support.spark_sessions import QUICK, configured

TABLE = "reef.default.t"
STATEMENTS = [
    f"CREATE TABLE {TABLE} (id STRING, n INT, s STRING) TBLPROPERTIES ('key' = 'id')",
    f"INSERT INTO {TABLE} VALUES ('a', 1, 'x'), ('b', 2, 'y'), ('c', 3, 'z')",
    f"UPDATE {TABLE} SET n = n + 10 WHERE id < 'c'",
    f"DELETE FROM {TABLE} WHERE n = 12",
    f"""MERGE INTO {TABLE} t USING (SELECT 'a' AS id, 100 AS n UNION ALL SELECT 'q', 5) s
        ON t.id = s.id
        WHEN MATCHED THEN UPDATE SET n = s.n
        WHEN NOT MATCHED THEN INSERT (id, n) VALUES (s.id, s.n)
        WHEN NOT MATCHED BY SOURCE THEN DELETE""",
    f"ALTER TABLE {TABLE} ADD COLUMN extra DOUBLE",
]
EXPECTED = [("a", 100, "x", None), ("q", 5, None, None)]


def main(master, folder):
    """Run all checks in one session."""
    url = str(Path(folder) / "bucket")
    if master == "shell":
        check_shell(url)
        print(f"pyspark {pyspark.__version__} spark-sql: all checks hold")
        return
    spark = session(master, url)
    engine = "jvm" if reef.spark.jar_path() is not None else "python"
    check_reads_and_writes(spark, url, engine)
    if engine == "jvm":
        check_sql(spark, url)
    print(f"pyspark {pyspark.__version__} {master}: all checks hold, engine {engine}")
    spark.stop()


def session(master, url):
    """Return a session with the catalog, where the jar is there."""
    kind = SparkSession.builder
    if master == "connect":
        os.environ["SPARK_TESTING"] = "1"  # any free port: 15002 may be taken
        kind = kind.remote("local[2]")
    else:
        kind = kind.master(master)
    has_jar = reef.spark.jar_path() is not None
    return reef.spark.configure(configured(kind), url=url if has_jar else None).getOrCreate()


def rows(df):
    """Return the rows of a DataFrame in order."""
    return sorted((tuple(row) for row in df.collect()), key=repr)


def explained(df):
    """Return the plan of a DataFrame."""
    text = io.StringIO()
    with redirect_stdout(text):
        df.explain(True)
    return text.getvalue()


def check_reads_and_writes(spark, url, engine):
    """The format: reads, filters and writes; by either engine."""
    written = spark.range(2000).selectExpr("'k' || lpad(id, 6, '0') AS id", "id AS n")
    written.write.format("reef").options(namespace="w", key="id").mode("append").save(url)
    found = spark.read.format("reef").option("namespace", "w").load(url)
    assert found.count() == 2000
    few = found.where("id BETWEEN 'k000100' AND 'k000109' AND n > 104").select("n")
    assert rows(few) == [(n,) for n in range(105, 110)]
    shown = {"jvm": "(native)", "python": "Python"}[engine]
    assert shown in explained(few), explained(few)
    python = spark.read.format("reef").options(namespace="w", engine="python").load(url)
    assert rows(python) == rows(found)
    written.where("n < 7").write.format("reef").options(namespace="w").mode("overwrite").save(url)
    assert spark.read.format("reef").option("namespace", "w").load(url).count() == 7
    assert reef.spark.changes(spark, url, "w").where("_op = 'put'").count() == 2007
    report = reef.spark.bulk_load(written, url, "loaded", key="id")
    assert report.rows == 2000


def check_sql(spark, url):
    """The catalog: all statements, versions, metadata tables, errors, and ReefTable."""
    for statement in STATEMENTS:
        spark.sql(statement)
    assert rows(spark.table(TABLE)) == EXPECTED
    reef.jobs.fold(reef.open(url), "t")
    reef.open(url).snapshot("t", name="monday")
    spark.sql(f"INSERT OVERWRITE {TABLE} SELECT id, n + 1, s, 0.5D FROM {TABLE} WHERE id = 'a'")
    assert rows(spark.table(TABLE)) == [("a", 101, "x", 0.5)]
    assert rows(spark.sql(f"SELECT * FROM {TABLE} VERSION AS OF 'monday'")) == EXPECTED
    assert rows(spark.sql(f"SELECT name FROM {TABLE}.snapshots")) == [("monday",)]
    assert spark.sql(f"SELECT * FROM {TABLE}.changes WHERE _lsn > 1").count() > 3
    found = reef.spark.ReefTable.for_name(spark, TABLE)
    source = spark.createDataFrame([("a", 7), ("z", 8)], "id string, n int")
    merge = found.merge(source, "t.id = source.id").when_matched_update({"n": "source.n"})
    merge.when_not_matched_insert({"id": "source.id", "n": "source.n"}).execute()
    found.update(col("id") == "z", {"s": "'new'"})
    assert rows(found.to_df().select("id", "n", "s")) == [("a", 7, "x"), ("z", 8, "new")]
    found.restore(snapshot="monday")
    assert rows(found.to_df()) == EXPECTED
    source.write.format("reef").options(namespace="fresh", key="id").save(url)
    for refused, why in (
        (f"SELECT * FROM {TABLE}x", "TABLE_OR_VIEW_NOT_FOUND"),
        (f"CREATE TABLE {TABLE} (id STRING)", "ALREADY_EXISTS"),
        (f"SELECT * FROM {TABLE} VERSION AS OF 999", "no generation 999"),
    ):
        with pytest.raises(PySparkException, match=why):
            spark.sql(refused).collect()
    spark.sql(f"TRUNCATE TABLE {TABLE}")
    assert spark.table(TABLE).count() == 0
    spark.sql(
        "CREATE TABLE reef.default.u TBLPROPERTIES ('key' = 'id') AS SELECT 'a' AS id, 1 AS n"
    )
    names = {row.tableName for row in spark.sql("SHOW TABLES IN reef.default").collect()}
    assert names >= {"t", "u", "w"}
    spark.sql("DROP TABLE reef.default.u")


def check_shell(url):
    """The spark-sql shell has no Python driver; Python plans in a worker all the same."""
    conf = {
        **QUICK,
        "spark.sql.catalog.reef": "reef.spark.ReefCatalog",
        "spark.sql.catalog.reef.url": url,
        "spark.sql.warehouse.dir": f"{url}-warehouse",
        "spark.hadoop.javax.jdo.option.ConnectionURL": "jdbc:derby:memory:shell;create=true",
        "spark.sql.catalogImplementation": "in-memory",
    }
    shell = Path(pyspark.__file__).parent / "bin" / "spark-sql"
    argv = [str(shell), "--master", "local[2]", "--jars", str(reef.spark.jar_path())]
    argv += [word for item in conf.items() for word in ("--conf", "=".join(item))]
    text = "; ".join([*STATEMENTS, f"SELECT id, n, s FROM {TABLE} ORDER BY id"])
    done = subprocess.run(
        [*argv, "-e", text], capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().splitlines()[-2:] == ["a\t100\tx", "q\t5\tNULL"], done.stdout


if __name__ == "__main__":
    main(*sys.argv[1:])
