"""The keys that a statement depends on: writes to others are no conflict, to these they are."""

from contextlib import suppress
from pathlib import Path
from stat import S_IMODE
from tempfile import gettempdir
from threading import Event, Thread

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql.functions import udf

import reef


@pytest.fixture
def table(spark, db, catalog):
    """A table with three rows."""
    name = f"{catalog}.t"
    spark.sql(f"CREATE TABLE {name} (id STRING, n INT, s STRING) TBLPROPERTIES ('key' = 'id')")
    with db.writer("t", background=False) as writer:
        writer.upsert([{"id": key, "n": n, "s": "x"} for n, key in enumerate("abc", 1)])
    return name


@pytest.fixture
def write_meanwhile(spark, url):
    """Register the function `slow`, during which another writer changes a row."""

    def register(*keys):
        def write(given):
            with reef.open(url).writer("t", background=False) as writer:
                writer.upsert([{"id": key, "n": 50, "s": "other"} for key in keys])
            return given

        spark.udf.register("slow", udf(write, "int"))

    return register


SLOW = ("matched", "more conditions", "another column", "an expression of the key")
"""Variants of others, which `make slow` runs."""


def each(statements):
    """Return the names of statements as parameters."""
    return [pytest.param(s, marks=[pytest.mark.slow] * (s in SLOW)) for s in statements]


SOURCE = "(SELECT 'a' AS id, 10 AS n UNION ALL SELECT 'q', slow(20)) s"
UPDATE = "WHEN MATCHED THEN UPDATE SET n = s.n"
INSERT = "WHEN NOT MATCHED THEN INSERT (id, n) VALUES (s.id, s.n)"
BY_SOURCE = {
    "matched": (f"MERGE INTO {{t}} t USING {SOURCE} ON t.id = s.id {UPDATE}", {"a": 10}),
    "both": (
        f"MERGE INTO {{t}} t USING {SOURCE} ON s.id = t.id {UPDATE} {INSERT}",
        {"a": 10, "q": 20},
    ),
    "only inserts": (f"MERGE INTO {{t}} t USING {SOURCE} ON t.id = s.id {INSERT}", {"q": 20}),
    "more conditions": (
        f"MERGE INTO {{t}} t USING {SOURCE} ON t.id = s.id AND t.n < s.n {UPDATE} "
        "WHEN NOT MATCHED AND s.n > 1000 THEN INSERT (id, n) VALUES (s.id, s.n)",
        {"a": 10},
    ),
    "subquery": (
        f"DELETE FROM {{t}} WHERE id IN (SELECT s.id FROM {SOURCE} WHERE s.n < 50)",
        {"a": None},
    ),
}


@pytest.mark.parametrize("statement", each(BY_SOURCE))
def test_H76_a_merge_on_the_key_depends_on_the_keys_of_its_source(
    spark, db, table, write_meanwhile, statement
):
    """Rows of other keys may change meanwhile; a row of a source's key, also a new one, may not."""
    text, changed = BY_SOURCE[statement]
    write_meanwhile("q")
    with pytest.raises(AnalysisException, match=r"ConflictError: t was changed at LSN \d+"):
        spark.sql(text.format(t=table))
    with db.writer("t", background=False) as writer:
        writer.delete("q")
    write_meanwhile("b", "p")
    spark.sql(text.format(t=table))
    found = {key: row["n"] for key, row in db.reader("t").scan()}
    expected = {"a": 1, "b": 50, "c": 3, "p": 50, **changed}
    assert found == {key: n for key, n in expected.items() if n is not None}


@pytest.mark.parametrize("loaded", ["bpz", "bqz"])
def test_H76_a_load_depends_on_its_keys_not_on_its_bounds(spark, db, url, table, loaded):
    """A load, as other statements are one, has keys below and above one of the source."""

    def load(given):
        from reef.jobs import ingest

        ingest(reef.open(url), "t", [{"id": key, "n": 9} for key in loaded])
        return given

    spark.udf.register("slow", udf(load, "int"))
    merge = BY_SOURCE["both"][0].format(t=table)
    if "q" in loaded:
        with pytest.raises(AnalysisException, match="ConflictError"):
            spark.sql(merge)
    else:
        spark.sql(merge)
    assert db.reader("t").get("a")["n"] == (1 if "q" in loaded else 10)


@pytest.fixture
def sort_merge_joins(spark):
    """Join by sorting, in many partitions: most of them have no row of the table."""
    options = {
        "spark.sql.autoBroadcastJoinThreshold": "-1",
        "spark.sql.adaptive.coalescePartitions.enabled": "false",
        "spark.sql.shuffle.partitions": "16",
    }
    before = {name: spark.conf.get(name) for name in options}
    for name, value in options.items():
        spark.conf.set(name, value)
    yield
    for name, value in before.items():
        spark.conf.set(name, value)


def test_H76_a_merge_depends_on_keys_of_a_grouped_source_that_its_join_does_not_read(
    spark, db, table, write_meanwhile, sort_merge_joins
):
    """The rows of the source have been exchanged by key before; their keys are recorded all the
    same."""
    write_meanwhile("q")
    grouped = f"(SELECT id, max(n) AS n FROM {SOURCE} GROUP BY id) s"
    with pytest.raises(AnalysisException, match=r"ConflictError: t was changed at LSN \d+"):
        spark.sql(f"MERGE INTO {table} t USING {grouped} ON t.id = s.id {UPDATE}")
    assert db.reader("t").get("a")["n"] == 1


def test_the_keys_of_a_statement_are_in_a_file_that_only_its_user_can_read(spark, table):
    """It is there while the statement commits."""
    known = set(Path(gettempdir()).glob("reef-keys-*"))
    done, modes = Event(), set()

    def watch():
        while not done.wait(0.01):
            for file in set(Path(gettempdir()).glob("reef-keys-*.json")) - known:
                with suppress(FileNotFoundError):
                    modes.add(S_IMODE(file.stat().st_mode))

    watcher = Thread(target=watch)
    watcher.start()
    try:
        spark.sql(f"DELETE FROM {table} WHERE id IN (SELECT * FROM VALUES ('a'))")
    finally:
        done.set()
        watcher.join()
    assert modes == {0o600}


def test_spark_keeps_no_copy_of_the_keys_for_each_task(spark, table):
    """Of a named accumulator it keeps text, for each task that has ended, to show it."""
    before = stages(spark)
    spark.sql(f"DELETE FROM {table} WHERE id IN (SELECT * FROM VALUES ('a'))")
    ran = [stage for number, stage in stages(spark).items() if number not in before]
    assert ran
    assert not [stage for stage in ran if stage.accumulatorUpdates().nonEmpty()]


def stages(spark):
    """Return the stages that Spark's UI knows, by number."""
    context = spark.sparkContext
    none = context._jvm.java.util.ArrayList()
    quantiles = context._gateway.new_array(context._jvm.double, 0)
    found = context._jsc.sc().statusStore().stageList(None, False, False, quantiles, none)
    return {found.apply(n).stageId(): found.apply(n) for n in range(found.size())}


ON_ALL = {
    "not matched by source": f"MERGE INTO {{t}} t USING {SOURCE} ON t.id = s.id {UPDATE} "
    "WHEN NOT MATCHED BY SOURCE AND t.n > 100 THEN DELETE",
    "another column": f"MERGE INTO {{t}} t USING {SOURCE} ON t.n = s.n {UPDATE}",
    "an expression of the key": f"MERGE INTO {{t}} t USING {SOURCE} "
    f"ON upper(t.id) = upper(s.id) {UPDATE}",
    "either key": f"MERGE INTO {{t}} t USING {SOURCE} ON t.id = s.id OR t.s = s.id {UPDATE}",
    "itself": "MERGE INTO {t} t USING (SELECT 'a' AS id, max(slow(n)) AS n FROM {t}) s "
    f"ON t.id = s.id {UPDATE}",
    "not in": f"DELETE FROM {{t}} WHERE id NOT IN (SELECT s.id FROM {SOURCE} WHERE s.n < 50)",
}


@pytest.mark.parametrize("statement", each(ON_ALL))
def test_H76_other_statements_depend_on_all_that_they_scan(
    spark, db, table, write_meanwhile, statement
):
    """A new row anywhere could have changed what they do."""
    write_meanwhile("z")
    with pytest.raises(AnalysisException, match=r"ConflictError: t was changed at LSN \d+"):
        spark.sql(ON_ALL[statement].format(t=table))
    assert db.reader("t").get("a")["n"] == 1
