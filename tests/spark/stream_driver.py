"""A driver of streams in a process of its own, for tests that kill it, and its executors.

    python stream_driver.py MASTER URL HOME OPTIONS

Two queries write the files of HOME/in1 and HOME/in2 into one namespace, a file in each micro-batch.
A third one follows that namespace and keeps a copy: while they write, if HOME/early is there, and
again when all files are written and HOME/ended says that no other process writes. OPTIONS are those
of the store, as JSON. It is run again after each kill; its last line is `done`.
"""

import json
import sys
import time
from pathlib import Path

from pyspark.sql import SparkSession

import reef.spark
from tests.spark import streaming
from tests.support.spark_sessions import configured

NAMESPACE, COPY = "t", "copy"


def store_options(options):
    """Return options of the store as those of a query."""
    return {f"store.{name}": str(value) for name, value in options.items()}


def write(spark, url, home, number, options):
    """Start a query; the second one has micro-batches that are staged by tasks.

    A file source that was killed may put two files into its next micro-batch: the order decides.
    """
    source = streaming.read_files(spark, home / f"in{number}")
    options = options | {"orderBy": "batch"}
    if number == 2:
        source, options = source.repartition(2), options | {"appendBytes": 2000}
    return streaming.start(source, url, NAMESPACE, home / f"checkpoint{number}", **options)


def copy(spark, url, home, options):
    """Start a query that keeps a copy, up to the end of the log."""
    reader = spark.readStream.format("reef").options(namespace=NAMESPACE, starting="all")
    changes = reader.options(cursor="copy", maxRowsPerTrigger="700", **options).load(url)
    return streaming.start(changes, url, COPY, home / "checkpoint3", applyChanges="true", **options)


def main(master, url, home, options="{}"):
    """Run all queries to their ends."""
    home, options = Path(home), store_options(json.loads(options))
    config = {"spark.task.maxFailures": "8"}
    spark = configured(SparkSession.builder.master(master), **config).getOrCreate()
    reef.spark.register(spark)
    queries = [write(spark, url, home, number, options) for number in (1, 2)]
    if (home / "early").exists():
        queries.append(copy(spark, url, home, options))
    for query in queries:
        query.awaitTermination()
    (home / "written").touch()
    while not (home / "ended").exists():
        time.sleep(0.1)
    copy(spark, url, home, options).awaitTermination()
    print("done", flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
