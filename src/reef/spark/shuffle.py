"""The shuffle of jobs: Spark's own, between a task of Reef's that reads and one that writes.

    tasks ── mapInArrow(read) ──▶ rows ── repartitionById, sortWithinPartitions ──▶
    sorted rows of a range ── mapInArrow(write) ──▶ outcomes ──▶ the driver

Spark spills what does not fit, runs lost tasks again, and takes the rows of one attempt of each.
The cuts between ranges are known before, so that Spark need not sample; which range a task has
it sees by its first key. A task that reads sends a note after its rows, with what it asked of
the bucket and, if it has failed for good, its error: notes have the lowest key of all, and come
home with the outcomes of the first range.
"""

import pickle
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from reef.jobs.fold_shuffle import Shuffle
from reef.spark.outcomes import Outcome, counted, guarded
from reef.spark.ranges import range_of

__all__ = ["NO_RANGE", "run_shuffle"]

Batches = Iterator[pa.RecordBatch]
NOTE = "note"
NO_RANGE = -1
"""In place of a range: the outcome of a task that reads."""


def run_shuffle(spark: Any, job: Shuffle, attempts: int) -> list[tuple[int, Outcome]]:
    """Return the outcomes of the ranges, and of the tasks that read."""
    from pyspark.cloudpickle import dumps
    from pyspark.sql import functions as fn
    from pyspark.sql.pandas.types import from_arrow_schema

    carried = job.columns.append(pa.field(NOTE, pa.binary()))
    packed = [dumps((job.read, task)) for task in job.tasks]  # type: ignore[no-untyped-call]
    # The tasks travel as one value each, one in every partition.
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
                yield from _read(pickle.loads(packed), columns, attempts)

    return run


def _read(packed: tuple[Any, Any], columns: pa.Schema, attempts: int) -> Batches:
    read, task = packed
    rows: Batches = iter(())
    with guarded(attempts) as failed:
        rows = read(task)
    while failed.error is None:
        with guarded(attempts) as failed:
            batch = next(rows, None)
        if failed.error is not None or batch is None:
            break
        yield pa.RecordBatch.from_arrays(
            [*batch.columns, pa.nulls(len(batch), pa.binary())], schema=columns
        )
    done = counted(Outcome(error=failed.error), task)
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
    outcome = Outcome()
    with guarded(attempts) as failed:
        outcome = Outcome(write(plan, place, rows))
    return pickle.dumps(counted(Outcome(outcome.result, failed.error), plan))


def _without_notes(batches: Batches, notes: list[bytes]) -> Batches:
    for batch in batches:
        *names, note = batch.schema.names
        found = batch.column(note)
        rows = batch.select(names)
        if found.null_count < len(batch):
            notes += found.drop_null().to_pylist()
            rows = rows.filter(pc.is_null(found))
        if len(rows):
            yield rows
