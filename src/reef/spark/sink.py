"""The sink: `df.write.format("reef")`, an ingest at one LSN.

    writer()   in a process of the driver that is gone before the first task: begin
    write()    in the tasks: stage
    commit()   in yet another process of the driver: one ingest names what the tasks sent home
    abort()    likewise; also after a commit that raised, with all messages: nothing is deleted,
               the log says whether the commit has counted (H31)

What goes from process to process is the job's handle and its staging, both picklable; nobody
beats for the job in between but its tasks, which renew its lease. An append is an upsert by key,
an overwrite replaces everything in the same commit: one segment without rows has a range
tombstone over all keys, which sorts below the rows.

Spark gives a sink whatever partitions the DataFrame has, so the segments of different tasks
interleave. The commit reads the keys of those that overlap: a key that stands in two of them is
refused (H38), unless there is an order column, which then decides (`settling`).
"""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from reef.errors import InternalError, InvalidInputError
from reef.jobs.ingest import BulkJob
from reef.spark.lease import SharedLease
from reef.spark.parts import PartPlan, StagedPart, first_error, stage_part
from reef.spark.plainly import plainly
from reef.spark.settling import settled
from reef.spark.target import find_target
from reef.spark.write_options import WriteOptions, check_replacing
from reef.types import KeyRange

__all__ = ["PartMessage", "ReefWriter"]


class PartMessage(WriterCommitMessage):
    """What a task sends home."""

    def __init__(self, part: StagedPart) -> None:
        self.part = part


class ReefWriter(DataSourceArrowWriter):
    """One write of one DataFrame. Pickled to the tasks, and to the process that commits."""

    @plainly
    def __init__(self, options: Any, schema: StructType, overwrite: bool) -> None:
        wanted = WriteOptions.of(options)
        if overwrite:
            check_replacing(wanted.op, schema.names)
        place = wanted.place
        db = place.database()
        target = find_target(
            db,
            place.namespace,
            schema,
            op=wanted.op,
            order_column=wanted.order_column,
            key=wanted.key,
            vectors=wanted.vectors,
        )
        job = BulkJob(
            db,
            place.namespace.name,
            idempotency_key=wanted.idempotency_key,
            replace=KeyRange() if overwrite else None,
            make=target.make,
            **wanted.settings,
        )
        try:
            rows = target.rows_under(job.schema)
        except InvalidInputError:
            job.abort()
            raise
        self._handle = job.handle
        lease = SharedLease(
            job.handle.store,
            job.handle.namespace,
            job.handle.lease_id,
            job.handle.settings.lease_ttl_s,
        )
        self._plan = PartPlan(job.staging, rows, wanted.sort_bytes, lease, apart=True)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage one partition."""
        context = TaskContext.get()
        partition, attempt = (
            (0, 0) if context is None else (context.partitionId(), context.attemptNumber())
        )
        if self._handle.receipt is not None:  # committed before: nothing is staged
            for _ in iterator:
                pass
            return PartMessage(StagedPart(partition, attempt))
        return PartMessage(stage_part(self._plan, iterator, partition, attempt))

    @plainly
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Make what the tasks sent home visible, all of it at one LSN, or raise."""
        if self._handle.receipt is not None:
            return
        parts = _parts(messages)
        error = first_error(parts)
        if error is not None:
            raise error
        job = BulkJob.resume(self._handle)
        try:
            segments = settled(job.staging, self._plan.rows, parts)
            if job.replace is not None:
                segments += job.staging.stage([], job.replace)
            job.commit(segments, interleaved=True)
        except BaseException:
            job.let_go()  # Spark calls abort next, in a process of its own
            raise

    @plainly
    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Give the job up, unless it has committed; a failed task's message is None (H39)."""
        if self._handle.receipt is None:
            BulkJob.resume(self._handle).abort()


def _parts(messages: list[WriterCommitMessage | None]) -> list[StagedPart]:
    found = [message.part for message in messages if isinstance(message, PartMessage)]
    if len(found) < len(messages):
        raise InternalError(f"{len(messages) - len(found)} of {len(messages)} tasks told nothing")
    return found
