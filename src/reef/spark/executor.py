"""The Spark executor: the tasks of Reef's jobs, each as one task of Spark.

    db = reef.open("s3://bucket/prefix")
    reef.jobs.fold(db, "events", executor=reef.spark.executor(spark))

The functions are the very ones that threads run; the driver plans and publishes as ever. A task
may run more than once, after the loss of an executor or by speculation: it writes under new
names each time, and only the results of the attempt that Spark counts come back (H39). What
the others wrote is named by nobody, and swept.

An error of Reef's comes back as itself. What another attempt may mend (a store that cannot be
reached, or an error that is not Reef's) is left to Spark for as long as it tries again.
"""

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

import pyarrow as pa
from pyspark import TaskContext
from pyspark.cloudpickle import dumps

from reef.errors import InternalError, InvalidInputError, Kind, ReefError, UnavailableError
from reef.spark.counts import Counts, counts_of
from reef.spark.session import attempts_max, is_remote
from reef.stores import Store
from reef.telemetry import RequestKind, RequestMeter

__all__ = ["SparkExecutor", "executor"]

In = TypeVar("In")
Out = TypeVar("Out")
SCHEMA = "place long, outcome binary"


def executor(spark: Any) -> "SparkExecutor":
    """Return an executor for the jobs of `reef.jobs`, on the machines of a session."""
    return SparkExecutor(spark)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a task: its result or its error, and what it asked of the bucket."""

    result: Any = None
    error: BaseException | None = None
    counts: Counts | None = None


class SparkExecutor:
    """Runs tasks on Spark, with Spark Connect or without. `meter` has the requests of all."""

    def __init__(self, spark: Any) -> None:
        self._spark = spark
        self.meter = RequestMeter()

    def map(self, run: Callable[[In], Out], tasks: Sequence[In]) -> list[Out]:
        """Return the results in order, or raise the first error."""
        for task in tasks:
            _check_shared(task)
        if not tasks:
            return []
        attempts = attempts_max(self._spark)
        packed = [dumps((run, task)) for task in tasks]  # type: ignore[no-untyped-call]
        on_spark = _by_arrow if is_remote(self._spark) else _by_rdd
        outcomes = [pickle.loads(found) for found in on_spark(self._spark, packed, attempts)]
        for outcome in outcomes:
            self._count(outcome.counts or {})
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        return [outcome.result for outcome in outcomes]

    def __repr__(self) -> str:
        return f"<SparkExecutor {self._spark!r}>"

    def _count(self, counts: Counts) -> None:
        for kind in RequestKind:
            requests, size = (counts.get(f"{kind}.{what}", 0) for what in ("requests", "bytes"))
            if requests or size:
                self.meter.count(kind, requests=requests, bytes=size)


def _by_rdd(spark: Any, packed: list[bytes], attempts: int) -> list[bytes]:
    found: list[bytes] = (
        spark.sparkContext.parallelize(packed, len(packed))
        .map(lambda task: _run(task, attempts))
        .collect()
    )
    return found


def _by_arrow(spark: Any, packed: list[bytes], attempts: int) -> list[bytes]:
    """The same without RDDs: as many ranges as there are places, so one task for each."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            places, tasks = (column.to_pylist() for column in batch.columns)
            outcomes = [_run(task, attempts) for task in tasks]
            yield pa.record_batch(
                [pa.array(places, pa.int64()), pa.array(outcomes, pa.binary())],
                names=["place", "outcome"],
            )

    rows = spark.createDataFrame(list(enumerate(packed)), "place long, task binary")
    ranges = rows.repartitionByRange(len(packed), "place")
    found = ranges.mapInArrow(run, SCHEMA).collect()
    return [bytes(row["outcome"]) for row in sorted(found, key=lambda row: row["place"])]


def _run(packed: bytes, attempts: int) -> bytes:
    """Run one task; in a Python process of some executor."""
    run, task = pickle.loads(packed)
    try:
        outcome = Outcome(run(task))
    except Exception as error:
        if not _is_final(error) and _attempt() + 1 < attempts:
            raise
        outcome = Outcome(error=_sendable(error))
    counts: Counts = {}
    for store in _stores_of(task):
        counts |= counts_of(store)
    return pickle.dumps(Outcome(outcome.result, outcome.error, counts))


def _is_final(error: Exception) -> bool:
    """Whether another attempt would meet the same."""
    return isinstance(error, ReefError) and not isinstance(error, UnavailableError)


def _attempt() -> int:
    context = TaskContext.get()
    return 0 if context is None else context.attemptNumber()


def _sendable(error: Exception) -> Exception:
    """Return the error itself, or what is left of one that does not pickle."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return InternalError(f"{type(error).__name__} in a task: {error}")
    return error


def _stores_of(task: Any) -> list[Store]:
    if isinstance(task, Store):
        return [task]
    if is_dataclass(task):
        held = (getattr(task, field.name) for field in fields(task))
        return [value for value in held if isinstance(value, Store)]
    return []


def _check_shared(task: Any) -> None:
    for store in _stores_of(task):
        if not store.capabilities.shared:
            raise InvalidInputError(
                f"{store.url} lives in the memory of one process, and Spark has many",
                kind=Kind.INVALID_URL,
                hint="Use a directory or a bucket, or leave the executor away",
            )
