"""The Spark executor: the tasks of Reef's jobs, each as one task of Spark.

    db = reef.open("s3://bucket/prefix")
    reef.jobs.fold(db, "events", executor=reef.spark.executor(spark))

The functions are the very ones that threads run; the driver plans and publishes as ever. A task
may run more than once, after the loss of an executor or by speculation: it writes under new
names each time, and only the results of the attempt that Spark counts come back (H39). What
the others wrote is named by nobody, and swept.

A long log is folded with Spark's shuffle (`shuffle`), which brings the rows of a range of keys
into one task, sorted.
"""

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.cloudpickle import dumps

from reef.errors import InvalidInputError, Kind
from reef.jobs.fold_shuffle import Shuffle
from reef.spark.counts import Counts
from reef.spark.outcomes import Outcome, counted, guarded, stores_of
from reef.spark.session import (
    attempts_max,
    check_running,
    is_remote,
    larger_batches,
    parallelism,
)
from reef.spark.shuffle import NO_RANGE, run_shuffle
from reef.telemetry import RequestKind, RequestMeter

__all__ = ["SparkExecutor", "executor"]

In = TypeVar("In")
Out = TypeVar("Out")
SCHEMA = "place long, outcome binary"


def executor(spark: Any) -> "SparkExecutor":
    """Return an executor for the jobs of `reef.jobs`, on the machines of a session."""
    return SparkExecutor(spark)


class SparkExecutor:
    """Runs tasks on Spark, with Spark Connect or without. `meter` has the requests of all."""

    def __init__(self, spark: Any) -> None:
        self._spark = spark
        self.meter = RequestMeter()

    def map(self, run: Callable[[In], Out], tasks: Sequence[In]) -> list[Out]:
        """Return the results in order, or raise the first error."""
        check_running(self._spark)
        for task in tasks:
            _check_shared(task)
        if not tasks:
            return []
        attempts = attempts_max(self._spark)
        packed = [dumps((run, task)) for task in tasks]  # type: ignore[no-untyped-call]
        on_spark = _by_arrow if is_remote(self._spark) else _by_rdd
        outcomes = [pickle.loads(found) for found in on_spark(self._spark, packed, attempts)]
        return self._results(outcomes)

    def parallelism(self) -> int:
        """Return how many tasks run at once."""
        check_running(self._spark)
        return parallelism(self._spark)

    def shuffle(self, job: Shuffle) -> dict[int, Any]:
        """Read rows, let Spark bring and sort them by ranges of keys, write each range."""
        check_running(self._spark)
        for task in job.tasks:
            _check_shared(task)
        if not job.tasks:
            return {}
        with larger_batches(self._spark):
            found = run_shuffle(self._spark, job, attempts_max(self._spark))
        found.sort(key=lambda outcome: outcome[0])
        results = self._results([outcome for _, outcome in found])
        places = [place for place, _ in found]
        return {n: out for n, out in zip(places, results, strict=True) if n != NO_RANGE}

    def _results(self, outcomes: Sequence[Outcome]) -> list[Any]:
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
    outcome = Outcome()
    with guarded(attempts) as failed:
        outcome = Outcome(run(task))
    return pickle.dumps(counted(Outcome(outcome.result, failed.error), task))


def _check_shared(task: Any) -> None:
    for store in stores_of(task):
        if not store.capabilities.shared:
            raise InvalidInputError(
                f"{store.url} lives in the memory of one process, and Spark has many",
                kind=Kind.INVALID_URL,
                hint="Use a directory or a bucket, or leave the executor away",
            )
