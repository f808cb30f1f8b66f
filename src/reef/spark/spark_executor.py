"""The Spark executor: each task of a Reef job runs as one task of Spark.

    db = reef.open("s3://bucket/prefix")
    reef.jobs.fold(db, "events", executor=reef.spark.executor(spark))

Tasks run the same functions as on threads; the driver plans and publishes. A task may run more than
once, after the loss of an executor or by speculation: it writes under new names each time, and only
the results of the attempt that Spark counts return (H39). Objects of other attempts are named by no
manifest, and swept.

A long log is folded with Spark's shuffle:

    tasks ── mapInArrow(read) ──▶ rows ── repartitionById, sortWithinPartitions ──▶
    sorted rows of a range ── mapInArrow(write) ──▶ outcomes ──▶ the driver

Spark spills, retries lost tasks, and takes the rows of one attempt of each. The cuts between ranges
are known before, so Spark need not sample; a writing task finds its range by its first key. A
reading task sends a note after its rows, with its request counts and its final error, if any:
notes have the lowest key of all, and return with the outcomes of the first range.
"""

import pickle
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.cloudpickle import dumps

from reef.errors import ErrorKind, InvalidInputError
from reef.jobs.fold.shuffle import Shuffle
from reef.spark.session import (
    Counts,
    TaskOutcome,
    attempts_max,
    catch_final_error,
    check_running,
    is_remote,
    larger_batches,
    parallelism,
    stores_of,
    with_counts,
)
from reef.spark.staging import range_of
from reef.telemetry import RequestKind, RequestMeter

Batches = Iterator[pa.RecordBatch]
NOTE = "note"
NO_RANGE = -1
"""The range number of a reading task's outcome."""


def run_shuffle(spark: Any, job: Shuffle, attempts: int) -> list[tuple[int, TaskOutcome]]:
    """Run a shuffle; return the outcomes of the ranges and of the reading tasks."""
    from pyspark.cloudpickle import dumps
    from pyspark.sql import functions as fn
    from pyspark.sql.pandas.types import from_arrow_schema

    carried = job.columns.append(pa.field(NOTE, pa.binary()))
    packed = [dumps((job.read, task)) for task in job.tasks]  # type: ignore[no-untyped-call]
    given = spark.createDataFrame(list(enumerate(packed)), "place int, task binary")
    rows = given.repartitionById(len(packed), "place").mapInArrow(
        _reading(carried, attempts), from_arrow_schema(carried)
    )
    ranges = rows.repartitionById(len(job.cuts) + 1, range_of(fn.col("key"), job.cuts))
    ordered = ranges.sortWithinPartitions("key", fn.desc("lsn"), fn.desc("seq"))
    packed_write = dumps((job.write, job.plan))  # type: ignore[no-untyped-call]
    writing = _writing(packed_write, list(job.cuts), attempts)
    found = ordered.mapInArrow(writing, "place int, outcome binary").collect()
    return [(row["place"], pickle.loads(bytes(row["outcome"]))) for row in found]


# --- in tasks -------------------------------------------------------------------------------


def _reading(columns: pa.Schema, attempts: int) -> Callable[[Batches], Batches]:
    def run(batches: Batches) -> Batches:
        for batch in batches:
            for packed in batch.column(1).to_pylist():
                yield from _read_part(pickle.loads(packed), columns, attempts)

    return run


def _read_part(packed: tuple[Any, Any], columns: pa.Schema, attempts: int) -> Batches:
    read, task = packed
    rows: Batches = iter(())
    with catch_final_error(attempts) as failure:
        rows = read(task)
    while failure.error is None:
        with catch_final_error(attempts) as failure:
            batch = next(rows, None)
        if failure.error is not None or batch is None:
            break
        yield pa.RecordBatch.from_arrays(
            [*batch.columns, pa.nulls(len(batch), pa.binary())], schema=columns
        )
    done = with_counts(TaskOutcome(error=failure.error), task)
    note: dict[str, Any] = {"key": b"", NOTE: pickle.dumps(done)}
    yield pa.RecordBatch.from_pylist([{**dict.fromkeys(columns.names), **note}], schema=columns)


def _writing(packed: bytes, cuts: list[bytes], attempts: int) -> Callable[[Batches], Batches]:
    def run(batches: Batches) -> Batches:
        notes: list[bytes] = []
        rows = _without_notes(batches, notes)
        first = next(rows, None)  # the notes come before it
        outcomes = [(NO_RANGE, note) for note in notes]
        if first is not None and all(pickle.loads(note).error is None for note in notes):
            place = bisect_right(cuts, first.column("key")[0].as_py())
            outcomes.append((place, _write(packed, place, chain([first], rows), attempts)))
        places, found = zip(*outcomes, strict=True) if outcomes else ((), ())
        yield pa.RecordBatch.from_arrays(
            [pa.array(places, pa.int32()), pa.array(found, pa.binary())],
            names=["place", "outcome"],
        )

    return run


def _write(packed: bytes, place: int, rows: Batches, attempts: int) -> bytes:
    write, plan = pickle.loads(packed)
    outcome = TaskOutcome()
    with catch_final_error(attempts) as failure:
        outcome = TaskOutcome(write(plan, place, rows))
    return pickle.dumps(with_counts(TaskOutcome(outcome.result, failure.error), plan))


def _without_notes(batches: Batches, notes: list[bytes]) -> Batches:
    for batch in batches:
        *names, note = batch.schema.names
        column = batch.column(note)
        rows = batch.select(names)
        if column.null_count < len(batch):
            notes += column.drop_null().to_pylist()
            rows = rows.filter(pc.is_null(column))
        if len(rows):
            yield rows


In = TypeVar("In")
Out = TypeVar("Out")
SCHEMA = "place long, outcome binary"


def executor(spark: Any) -> "SparkExecutor":
    """Return an executor for the jobs of `reef.jobs`, on the machines of a session."""
    return SparkExecutor(spark)


class SparkExecutor:
    """Runs tasks on Spark, also with Spark Connect. `meter` has the requests of all tasks."""

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
        """Read rows, let Spark partition and sort them by key range, write each range."""
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

    def _results(self, outcomes: Sequence[TaskOutcome]) -> list[Any]:
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
            requests, size = (counts.get(f"{kind}.{unit}", 0) for unit in ("requests", "bytes"))
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
    """Run tasks without RDDs: one range, and so one Spark task, for each."""

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
    """Run one task, in a Python process of an executor."""
    run, task = pickle.loads(packed)
    outcome = TaskOutcome()
    with catch_final_error(attempts) as failure:
        outcome = TaskOutcome(run(task))
    return pickle.dumps(with_counts(TaskOutcome(outcome.result, failure.error), task))


def _check_shared(task: Any) -> None:
    for store in stores_of(task):
        if not store.capabilities.shared:
            raise InvalidInputError(
                f"{store.url} is in the memory of one process; Spark has many",
                kind=ErrorKind.INVALID_URL,
                hint="Use a directory or a bucket, or run the job without an executor",
            )
