"""Reef on Spark: tables as DataFrames and in SQL, and Reef's jobs as Spark tasks.

    spark = reef.spark.configure(SparkSession.builder, url="s3://bucket/prefix").getOrCreate()
    spark.sql("SELECT * FROM reef.default.events")
    spark.read.format("reef").option("namespace", "events").load("s3://bucket/prefix")
    df.write.format("reef").option("namespace", "events").mode("append").save("s3://bucket/prefix")
    reef.spark.bulk_load(df, "s3://bucket/prefix", "events")
    reef.spark.table(spark, url, "events").where("amount > 5").select("id", "amount").df()
    reef.spark.diff(spark, url, "events", "experiment")
    reef.jobs.fold(db, "events", executor=reef.spark.executor(spark))

The only package of Reef that imports pyspark. With the jar of the native reader, reads run inside
of Spark's JVM; without it, in Python. Names are imported on first use: every Python process of an
executor imports this package, and a task needs little of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reef.spark.batch_search import search
    from reef.spark.bulk_loader import BulkLoadReport, LoadProgress, bulk_load
    from reef.spark.change_feed import changes, diff
    from reef.spark.load_check import Preflight, preflight
    from reef.spark.session import configure, jar_path
    from reef.spark.source import ReefSource, register
    from reef.spark.spark_executor import SparkExecutor, executor
    from reef.spark.tables import Merge, ReefTable, Table, TaskMeter, table

__all__ = [
    "BulkLoadReport",
    "LoadProgress",
    "Merge",
    "Preflight",
    "ReefSource",
    "ReefTable",
    "SparkExecutor",
    "Table",
    "TaskMeter",
    "bulk_load",
    "changes",
    "configure",
    "diff",
    "executor",
    "jar_path",
    "preflight",
    "register",
    "search",
    "table",
]

_HOMES = {
    "BulkLoadReport": "bulk_loader",
    "LoadProgress": "bulk_loader",
    "Merge": "tables",
    "Preflight": "load_check",
    "ReefSource": "source",
    "ReefTable": "tables",
    "SparkExecutor": "spark_executor",
    "Table": "tables",
    "TaskMeter": "tables",
    "bulk_load": "bulk_loader",
    "changes": "change_feed",
    "configure": "session",
    "diff": "change_feed",
    "executor": "spark_executor",
    "jar_path": "session",
    "preflight": "load_check",
    "register": "source",
    "search": "batch_search",
    "table": "tables",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
