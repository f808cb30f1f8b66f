"""Reef on Spark: tables as DataFrames, and Reef's jobs as Spark tasks.

    spark.read.format("reef").option("namespace", "events").load("s3://bucket/prefix")
    df.write.format("reef").option("namespace", "events").mode("append").save("s3://bucket/prefix")
    reef.spark.bulk_load(df, "s3://bucket/prefix", "events")
    reef.spark.table(spark, url, "events").where("amount > 5").select("id", "amount").df()
    reef.jobs.fold(db, "events", executor=reef.spark.executor(spark))

The only package of Reef that knows of pyspark. Executors need nothing but the Python package:
they reach the bucket through Reef's own stores, without any jar.
"""

from reef.spark.bulk_load import BulkLoadReport, bulk_load, preflight
from reef.spark.executor import SparkExecutor, executor
from reef.spark.load_progress import LoadProgress
from reef.spark.meter import TaskMeter
from reef.spark.preflight import Preflight
from reef.spark.source import ReefSource, register
from reef.spark.table import Table, table

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
