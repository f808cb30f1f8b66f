"""Sessions and tasks of Spark: the native reader, request counts and errors of tasks.

    spark = reef.spark.configure(SparkSession.builder, url="s3://bucket/prefix").getOrCreate()
    spark.read.format("reef").option("namespace", "events").load("s3://bucket/prefix")
    spark.sql("SELECT * FROM reef.default.events")

The native reader is a jar that reads segments inside of Spark's JVM. With it, `format("reef")` is
read by the JVM and planned by Python; without it, or on a Spark that it was not tested with, by the
Python source. Writes go through Python either way.

A task counts its requests and bytes and sends them to the driver when it has succeeded: a read
through one of Spark's accumulators, whose id is an option of the read; a job with its result.

`TaskOutcome` is the result of a Reef job's task. An error of Reef returns to the driver as itself.
An error that a retry may fix (a store that cannot be reached, an error that is not Reef's) is
raised in the task for as long as Spark retries it.

`error_boundary` wraps the methods that Spark calls: users see the message of an error of Reef
without the frames inside of Reef, unless the fault is Reef's own, or the bucket's.
"""

import gc
import logging
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import pyarrow as pa
import pyspark
from pyspark import TaskContext
from pyspark.accumulators import Accumulator, AccumulatorParam
from pyspark.sql import SparkSession

from reef.engine.context import NamespaceContext
from reef.errors import (
    ClosedError,
    CorruptionError,
    ErrorKind,
    InternalError,
    InvalidInputError,
    ReefError,
    UnavailableError,
)
from reef.stores import Meter, Store, Wrapper
from reef.telemetry import RequestMeter

JAR = "reef-spark.jar"
JARS = "spark.jars"
TIME_TYPE = "spark.sql.timeType.enabled"
CATALOG = "reef.spark.ReefCatalog"
SPARK_VERSIONS = ("4.1", "4.2", "4.3")
"""Versions of Spark that the jar is tested with."""


def jar_path() -> Path | None:
    """Return the jar of the native reader; None if it was not built or Spark is another one."""
    if ".".join(pyspark.__version__.split(".")[:2]) not in SPARK_VERSIONS:
        return None
    jar = Path(__file__).parent / JAR
    return jar if jar.exists() else None


def configure(
    builder: Any, url: str | None = None, catalog: str = "reef", **store_options: Any
) -> Any:
    """Return a session builder with the native reader and, given a URL, a catalog of its tables.

    Call it before the session starts: jars are part of the JVM's class path. `store_options` are
    those of `reef.open`. On a local master, tasks run this very Python, unless `PYSPARK_PYTHON` is
    set: Spark's default is the `python3` of the PATH, which may lack Reef.
    """
    master = getattr(builder, "_options", {}).get("spark.master", "local")
    if master.startswith("local"):
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if TIME_TYPE not in getattr(builder, "_options", {}):
        builder = builder.config(TIME_TYPE, "true")  # off in Spark 4; some plans fail without it
    jar = jar_path()
    if jar is None:
        logging.getLogger("reef").warning(
            "Spark %s reads through Python: the native reader was not built, or is for Spark %s",
            pyspark.__version__,
            ", ".join(SPARK_VERSIONS),
        )
        if url is None:
            return builder
        raise InvalidInputError(
            "a catalog needs the jar of the native reader",
            kind=ErrorKind.INVALID_OPTION,
            hint="Install Reef again where pyspark and a JDK 17 are, or run `make jar`; "
            f"it works with Spark {', '.join(SPARK_VERSIONS)}",
        )
    known = getattr(builder, "_options", {}).get(JARS)
    builder = builder.config(JARS, ",".join(filter(None, (known, str(jar)))))
    if url is None:
        return builder
    name = f"spark.sql.catalog.{catalog}"
    builder = builder.config(name, CATALOG).config(f"{name}.url", str(url))
    for option, value in store_options.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        builder = builder.config(f"{name}.store.{option}", text)
    return builder


LOCAL = re.compile(r"local(?:\[[^,\]]*(?:,\s*(?P<attempts>\d+))?\])?")
ATTEMPTS = "spark.task.maxFailures"
ATTEMPTS_DEFAULT = 4
BATCH_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
LARGE_BATCH_ROWS = 65_536
"""Spark's default of 10,000 halves the throughput into Python."""
PROBED_ROWS = 10_000
"""More than any cluster has cores."""


def is_remote(spark: Any) -> bool:
    """Whether a session is one of Spark Connect, which has no RDDs and no accumulators."""
    return not isinstance(spark, SparkSession) or "connect" in type(spark).__module__


def check_running(spark: Any) -> None:
    """Raise ClosedError if a session was stopped: Spark itself raises a null pointer exception."""
    stopped = spark.is_stopped if is_remote(spark) else spark.sparkContext._jsc is None
    if stopped:
        raise ClosedError("this Spark session was stopped", hint="Start another one")


def check_dataframe(df: Any) -> None:
    """Raise InvalidInputError unless this is a DataFrame of Spark, also of Spark Connect."""
    if not hasattr(df, "sparkSession"):
        raise InvalidInputError(
            f"expected a DataFrame of Spark, found {type(df).__name__} {df!r:.80}",
            hint="spark.createDataFrame(rows) makes one; without Spark use reef.jobs.ingest",
        )


def attempts_max(spark: Any) -> int:
    """Return how often Spark runs a task before the job fails: once, on threads of the driver."""
    attempts = spark.conf.get(ATTEMPTS, str(ATTEMPTS_DEFAULT))
    local = LOCAL.fullmatch(spark.conf.get("spark.master", ""))
    if local is not None:
        attempts = local["attempts"] or "1"
    return int(attempts) if str(attempts).isdigit() else 1


def parallelism(spark: Any) -> int:
    """Return how many tasks run at once; for a remote session, by running a small job."""
    if not is_remote(spark):
        return max(1, int(spark.sparkContext.defaultParallelism))
    from pyspark.sql import functions as fn

    ranges = spark.range(PROBED_ROWS).select(fn.spark_partition_id().alias("id")).distinct()
    return max(1, int(ranges.count()))


def larger_batches(spark: Any) -> AbstractContextManager[None]:
    """Let Spark pass more rows in a batch to Python, until the block ends.

    Spark bounds the bytes of a batch by itself (`maxBytesPerBatch`).
    """
    return batch_rows(spark, LARGE_BATCH_ROWS)


@contextmanager
def batch_rows(spark: Any, rows: int) -> Iterator[None]:
    """Let Spark pass batches of so many rows to Python, until the block ends.

    Loads may overlap: only the one that has changed the setting restores it.
    """
    before = spark.conf.get(BATCH_ROWS, None)
    if before == str(rows):
        yield
        return
    spark.conf.set(BATCH_ROWS, str(rows))
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
        return _start_session(SparkSession.builder.appName("reef"), master)
    except Exception as error:  # of Spark, of its gateway to Java, or a missing program
        cause = str(error).strip().split("\n")[0]
        raise UnavailableError(
            f"Spark did not start on {master or 'local[*]'}: {cause}",
            hint="It needs Java 17, and a master such as local[2], spark://host:7077 or sc://host",
        ) from error


def _start_session(builder: Any, master: str | None) -> Any:
    if master is not None and master.startswith("sc://"):
        return builder.remote(master).getOrCreate()
    builder = builder.master(master or "local[*]")
    for part in ("spark.ui.enabled", "spark.ui.showConsoleProgress"):
        builder = builder.config(part, "false")
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def to_message(value: Any) -> pa.RecordBatch:
    """Return a value as the one row that a task of `mapInArrow` yields."""
    return pa.record_batch([pa.array([pickle.dumps(value)], pa.binary())], names=["message"])


def from_message(message: bytes) -> Any:
    """Return the value of such a row."""
    return pickle.loads(message)


Counts = dict[str, int]


class CountsSum(AccumulatorParam[Counts]):
    """Adds counts name by name."""

    def zero(self, value: Counts) -> Counts:
        return {}

    def addInPlace(self, value1: Counts, value2: Counts) -> Counts:  # noqa: N802 - Spark's name
        for name, count in value2.items():
            value1[name] = value1.get(name, 0) + count
        return value1


def send_counts(meter: int, counts: Mapping[str, int]) -> None:
    """Add to an accumulator of the driver; called in a task."""
    Accumulator(meter, {}, CountsSum()).add(dict(counts))


def counts_of(store: Store, prefix: str = "") -> Counts:
    """Return the counts of a store: requests and bytes by kind."""
    meter = _meter_in(store)
    kinds: dict[str, Any] = {} if meter is None else meter.to_dict()
    return {
        f"{prefix}{kind}.{name}": count
        for kind, counts in kinds.items()
        for name, count in counts.items()
        if count
    }


def _meter_in(store: Store) -> RequestMeter | None:
    while isinstance(store, Wrapper):
        if isinstance(store, Meter):
            return store.meter
        store = store.inner
    return None


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """The result or the error of a task, and its request counts."""

    result: Any = None
    error: BaseException | None = None
    counts: Counts | None = None


@dataclass(slots=True)
class TaskFailure:
    """The final error of a block, if it has one."""

    error: Exception | None = None


@contextmanager
def catch_final_error(attempts: int) -> Iterator[TaskFailure]:
    """Keep the error of a block, unless Spark may retry this task with success."""
    failure = TaskFailure()
    try:
        yield failure
    except Exception as error:
        if not _is_final(error) and _attempt() + 1 < attempts:
            raise
        failure.error = _sendable(error)


def with_counts(outcome: TaskOutcome, task: Any) -> TaskOutcome:
    """Return the outcome with the counts of the task's stores."""
    counts: Counts = {}
    for store in stores_of(task):
        counts |= counts_of(store)
    return replace(outcome, counts=counts)


def stores_of(task: Any, depth: int = 2) -> list[Store]:
    """Return the stores in a task and in its fields."""
    if isinstance(task, Store):
        return [task]
    if isinstance(task, NamespaceContext):
        return [task.store]
    if not is_dataclass(task) or not depth:
        return []
    held = (getattr(task, field.name) for field in fields(task))
    return [store for value in held for store in stores_of(value, depth - 1)]


def _is_final(error: Exception) -> bool:
    """Whether another attempt would raise the same error."""
    return isinstance(error, ReefError) and not isinstance(error, UnavailableError)


def _attempt() -> int:
    context = TaskContext.get()
    return 0 if context is None else context.attemptNumber()


def _sendable(error: Exception) -> Exception:
    """Return the error, or its text as an InternalError if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return InternalError(f"{type(error).__name__} in a task: {error}")
    return error


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
WITH_TRACEBACK = (CorruptionError, InternalError)
"""Errors of Reef or of the bucket, not of the caller: their frames are kept."""


WORKER_PROGRAM = "daemon.py"
"""Of Spark's Python workers, which it forks."""


def error_boundary(method: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Raise errors of a method that Spark calls without their causes and Reef's frames.

    Spark shows the whole traceback of an exception, causes first, and its message last.
    """

    @wraps(method)
    def wrapped(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            result = method(*args, **kwargs)
        except WITH_TRACEBACK:
            raise
        except ReefError as error:
            raise error.with_traceback(None) from None
        _exempt_imports_from_collection()
        return result

    return wrapped


@cache
def _exempt_imports_from_collection() -> None:
    """Leave all modules loaded by now out of garbage collections, once per Python worker of Spark.

    A worker runs a full collection after each task, which takes 30 ms of CPU with pyarrow and Reef
    imported: more than most calls of Reef.
    """
    if Path(sys.argv[0]).name == WORKER_PROGRAM:
        gc.freeze()


def in_error_boundary(items: Iterator[Result]) -> Iterator[Result]:
    """Yield the items; raise errors as `error_boundary` does."""
    try:
        yield from items
    except WITH_TRACEBACK:
        raise
    except ReefError as error:
        raise error.with_traceback(None) from None
    _exempt_imports_from_collection()
