"""Reef on Spark: tables as DataFrames, and Reef's jobs as Spark tasks.

    spark.read.format("reef").option("namespace", "events").load("s3://bucket/prefix")
    df.write.format("reef").option("namespace", "events").mode("append").save("s3://bucket/prefix")
    reef.spark.bulk_load(df, "s3://bucket/prefix", "events")
    reef.spark.table(spark, url, "events").where("amount > 5").select("id", "amount").df()
    reef.jobs.fold(db, "events", executor=reef.spark.executor(spark))

The only package of Reef that knows of pyspark. Executors need nothing but the Python package:
they reach the bucket through Reef's own stores, without any jar. Names are imported when they
are asked for: every Python process of an executor imports this, and a task needs little of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reef.spark.checks import Preflight
    from reef.spark.executors import SparkExecutor, executor
    from reef.spark.load_progress import LoadProgress
    from reef.spark.loads import BulkLoadReport, bulk_load, preflight
    from reef.spark.meter import TaskMeter
    from reef.spark.source import ReefSource, register
    from reef.spark.tables import Table, table

__all__ = [
    "BulkLoadReport",
    "LoadProgress",
    "Preflight",
    "ReefSource",
    "SparkExecutor",
    "Table",
    "TaskMeter",
    "bulk_load",
    "executor",
    "preflight",
    "register",
    "table",
]

_HOMES = {
    "BulkLoadReport": "loads",
    "LoadProgress": "load_progress",
    "Preflight": "checks",
    "ReefSource": "source",
    "SparkExecutor": "executors",
    "Table": "tables",
    "TaskMeter": "meter",
    "bulk_load": "loads",
    "executor": "executors",
    "preflight": "loads",
    "register": "source",
    "table": "tables",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
