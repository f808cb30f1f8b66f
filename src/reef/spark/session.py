"""Spark sessions: what Reef has to know of the one that it is given."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyspark.sql import SparkSession

from reef.errors import ClosedError, UnavailableError

__all__ = [
    "attempts_max",
    "check_running",
    "is_remote",
    "larger_batches",
    "parallelism",
    "start_session",
]

LOCAL = re.compile(r"local(?:\[[^,\]]*(?:,\s*(?P<attempts>\d+))?\])?")
ATTEMPTS = "spark.task.maxFailures"
ATTEMPTS_DEFAULT = 4
BATCH_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
BATCH_ROWS_WANTED = 65_536
"""Spark's own 10,000 cost half of the speed on the way into Python."""
RANGES_ASKED = 10_000
"""More rows than any cluster has cores."""


def is_remote(spark: Any) -> bool:
    """Whether a session is one of Spark Connect, which has no RDDs and no accumulators."""
    return not isinstance(spark, SparkSession) or "connect" in type(spark).__module__


def check_running(spark: Any) -> None:
    """Raise if a session was stopped: Spark itself would tell of a null pointer somewhere."""
    stopped = spark.is_stopped if is_remote(spark) else spark.sparkContext._jsc is None
    if stopped:
        raise ClosedError("this Spark session was stopped", hint="Start another one")


def attempts_max(spark: Any) -> int:
    """Return how often Spark runs a task before it gives up: once, on threads of the driver."""
    told = spark.conf.get(ATTEMPTS, str(ATTEMPTS_DEFAULT))
    local = LOCAL.fullmatch(spark.conf.get("spark.master", ""))
    if local is not None:
        told = local["attempts"] or "1"
    return int(told) if str(told).isdigit() else 1


def parallelism(spark: Any) -> int:
    """Return how many tasks run at once; what a remote session cannot tell, a small job shows."""
    if not is_remote(spark):
        return max(1, int(spark.sparkContext.defaultParallelism))
    from pyspark.sql import functions as fn

    ranges = spark.range(RANGES_ASKED).select(fn.spark_partition_id().alias("id")).distinct()
    return max(1, int(ranges.count()))


@contextmanager
def larger_batches(spark: Any) -> Iterator[None]:
    """Let Spark hand over more rows at once, for as long as this takes.

    How many bytes that may be is bounded by Spark itself (`maxBytesPerBatch`). Loads may overlap:
    whoever finds it set leaves it to the first, else the last would put back what was ours.
    """
    before = spark.conf.get(BATCH_ROWS, None)
    if before == str(BATCH_ROWS_WANTED):
        yield
        return
    spark.conf.set(BATCH_ROWS, str(BATCH_ROWS_WANTED))
    try:
        yield
    finally:
        if before is None:
            spark.conf.unset(BATCH_ROWS)
        else:
            spark.conf.set(BATCH_ROWS, before)


def start_session(master: str | None = None) -> Any:
    """Return a session for a command: a local one, one of a cluster, or one of Spark Connect.

    Executors on this machine run this very Python, which has Reef.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    try:
        return _started(SparkSession.builder.appName("reef"), master)
    except Exception as error:  # of Spark's, of its gateway to Java, or of a missing program
        # Java has told the rest on stderr.
        why = str(error).strip().split("\n")[0]
        raise UnavailableError(
            f"Spark did not start on {master or 'local[*]'}: {why}",
            hint="It needs Java 17, and a master such as local[2], spark://host:7077 or sc://host",
        ) from error


def _started(builder: Any, master: str | None) -> Any:
    if master is not None and master.startswith("sc://"):
        return builder.remote(master).getOrCreate()
    builder = builder.master(master or "local[*]")
    for part in ("spark.ui.enabled", "spark.ui.showConsoleProgress"):
        builder = builder.config(part, "false")
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session
