"""The sink: `df.write.format("reef")` is one ingest at one LSN.

    writer()   in a process of the driver that ends before the first task: begin
    write()    in the tasks: stage
    commit()   in another process of the driver: one ingest names the segments of all tasks
    abort()    likewise; also after a commit that raised. Nothing is deleted: the log shows whether
               the commit has counted (H31)

The job's handle and its staging are pickled from process to process. Between them the tasks renew
the job's lease. An append is an upsert by key; an overwrite replaces everything in the same commit,
with a range tombstone over all keys that sorts below the rows.

Segments of different tasks may interleave, since Spark chooses the partitions. The commit reads the
keys of overlapping segments: a key in two of them is refused (H38), unless an order column decides
(`staging.deduplicate`).

`find_target` checks everything that is known before the first row: the namespace, names and types
of columns, the key. A missing namespace is created from the DataFrame's columns, if the key column
is named. The job creates it, because it begins in the log of its namespace, and drops it again if
the write fails.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import types as st
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from reef.engine.handles.database import Database
from reef.engine.rows.batch import check_live_wins
from reef.engine.rows.convert import EXPIRES_AT
from reef.errors import ErrorKind, InternalError, InvalidInputError, NotFoundError
from reef.formats.schema import Schema
from reef.jobs.ingest.condition import Unchanged
from reef.jobs.ingest.job import BulkJob
from reef.manifest.head import locate
from reef.paths import Namespace
from reef.spark.options import SparkWriteOptions, check_replacing, read_ranges
from reef.spark.rows import RowsPlan, raise_all
from reef.spark.session import error_boundary
from reef.spark.staging import PartPlan, StagedPart, deduplicate, stage_part
from reef.spark.types import OP, arrow_schema
from reef.stores.leases import SharedLease
from reef.types import KeyRange

BINARY = "UTF8_BINARY"


@dataclass(frozen=True, slots=True)
class Target:
    """The namespace of a write, and how rows of the DataFrame become rows of it."""

    namespace: Namespace
    schema: Schema
    rows: RowsPlan
    given: pa.Schema
    make: Schema | None = None
    """The schema to create the namespace with; None if it exists."""

    def rows_under(self, schema: Schema) -> RowsPlan:
        """Return the plan for a job that has begun with this schema.

        The schema may have changed since the check, and segments are written with the schema of
        their job. InvalidInputError if the rows do not fit any more.
        """
        if schema.fingerprint == self.schema.fingerprint:
            return self.rows
        _check_key(self.namespace, schema, self.schema.key.name)
        order = None if self.rows.order is None else self.rows.order.name
        rows = RowsPlan.of(self.given, schema, self.rows.op, order, self.rows.merge_ops)
        return replace(rows, now_ms=self.rows.now_ms)


def find_target(
    db: Database,
    namespace: Namespace,
    columns: st.StructType,
    *,
    op: str = "put",
    order_by: str | None = None,
    key: str | None = None,
    vectors: Mapping[str, int] | None = None,
    merge_ops: Mapping[str, str] | None = None,
    types: Mapping[str, pa.DataType] | None = None,
) -> Target:
    """Check the columns of a write; InvalidInputError has all problems, not only the first.

    `types` are those of columns of a new namespace that are not the DataFrame's.
    """
    given, problems = _arrow_fields(columns, vectors or {})
    try:
        schema = locate(db.store, namespace.name).found.manifest.schema
        make = None
    except NotFoundError as error:
        if key is None:
            hints = (
                error.hint,
                "Name the key column (option key) to create it from the DataFrame",
            )
            raise NotFoundError(
                error.message, kind=error.kind, hint=". ".join(filter(None, hints)), **error.context
            ) from error
        raise_all(problems)
        schema = make = Schema.of(_own_columns(given, order_by, types or {}), key)
    try:
        if key is not None:
            _check_key(namespace, schema, key)
        check_collation(columns, schema.key.name)
        rows = RowsPlan.of(given, schema, op, order_by, merge_ops or {})
        rows = replace(rows, now_ms=int(db.store.runtime.wall_s() * 1000))
    except InvalidInputError as error:
        problems.append(error)
    raise_all(problems)
    return Target(namespace, schema, rows, given, make)


def check_collation(columns: st.StructType, column: str, *, is_key: bool = True) -> None:
    """Raise if a column has a collation: Reef orders and compares text as bytes."""
    for field in columns:
        collation = getattr(field.dataType, "collation", BINARY)
        if field.name == column and collation != BINARY:
            role = "key" if is_key else "column"
            raise InvalidInputError(
                f"column {column}: a {role} has the collation {BINARY}, not {collation}",
                kind=ErrorKind.INVALID_KEY if is_key else None,
                hint=f"Text is compared as bytes; cast it: {column} COLLATE {BINARY}",
                column=column,
            )


def _check_key(namespace: Namespace, schema: Schema, key: str) -> None:
    if key != schema.key.name:
        raise InvalidInputError(
            f"the key column of {namespace.name} is {schema.key.name!r}, not {key!r}",
            kind=ErrorKind.INVALID_OPTION,
        )


def arrow_columns(columns: st.StructType, vectors: Mapping[str, int]) -> pa.Schema:
    """Return a DataFrame's columns as Arrow; InvalidInputError names all that Reef cannot store."""
    fields, problems = _arrow_fields(columns, vectors)
    raise_all(problems)
    return fields


def _arrow_fields(
    columns: st.StructType, vectors: Mapping[str, int]
) -> tuple[pa.Schema, list[InvalidInputError]]:
    """Return the columns that Reef can store, and the errors of the others."""
    names = columns.names
    problems = [
        InvalidInputError(
            f"the vector column {name!r} is missing", kind=ErrorKind.INVALID_OPTION, column=name
        )
        for name in vectors
        if name not in names
    ]
    fields = []
    for place, field in enumerate(columns):
        if field.name in names[:place]:
            problems.append(
                InvalidInputError(f"column {field.name} is there twice", column=field.name)
            )
            continue
        try:
            fields.append(_arrow_field(field, vectors.get(field.name)))
        except InvalidInputError as error:
            problems.append(error)
    return pa.schema(fields), problems


def _arrow_field(field: st.StructField, size: int | None) -> pa.Field:
    if isinstance(field.dataType, st.NullType) and size is None:
        return pa.field(field.name, pa.null())  # NULL without a type fits every column
    try:
        arrow = arrow_schema(st.StructType([field])).field(0).type
    except KeyError:
        raise InvalidInputError(
            f"column {field.name}: Reef has no {field.dataType.simpleString()}",
            hint="Convert it to text with to_json, or select its fields as columns",
            column=field.name,
        ) from None
    if size is None:
        return pa.field(field.name, arrow)
    if not pa.types.is_list(arrow) or not pa.types.is_floating(arrow.value_type):
        raise InvalidInputError(
            f"column {field.name}: a vector is an array of float or double, "
            f"got {field.dataType.simpleString()}",
            column=field.name,
        )
    return pa.field(field.name, pa.list_(arrow.value_type, size))


def _own_columns(
    given: pa.Schema, order_by: str | None, types: Mapping[str, pa.DataType]
) -> pa.Schema:
    """Return the columns of a new namespace: all but those that control the write.

    Other names that begin with _ are refused by its schema.
    """
    control = {OP, EXPIRES_AT}
    if order_by is not None and order_by.startswith("_"):
        control.add(order_by)
    own = [field for field in given if field.name not in control]
    return pa.schema([field.with_type(types.get(field.name, field.type)) for field in own])


class PartMessage(WriterCommitMessage):
    """The message of a task to the commit."""

    def __init__(self, part: StagedPart) -> None:
        self.part = part


class ReefWriter(DataSourceArrowWriter):
    """One write of one DataFrame. Pickled to the tasks, and to the process that commits."""

    @error_boundary
    def __init__(self, options: Any, schema: StructType, overwrite: bool) -> None:
        write = SparkWriteOptions.of(options)
        if overwrite:
            check_replacing(write.op, schema.names)
            check_live_wins(write.live_wins, replaces=True)
        location = write.location
        db = location.database()
        target = find_target(
            db,
            location.namespace,
            schema,
            op=write.op,
            merge_ops=write.merge_ops,
            order_by=write.order_by,
            key=write.key,
            vectors=write.vectors,
        )
        if write.create_only and target.make is None:
            raise _exists(location.namespace)
        job = BulkJob(
            db,
            location.namespace.name,
            idempotency_key=write.idempotency_key,
            replace=KeyRange() if overwrite else None,
            live_wins=write.live_wins,
            make=target.make,
            **write.settings,
        )
        try:
            if write.create_only and not job.handle.made:  # another job was faster
                raise _exists(location.namespace)
            rows = target.rows_under(job.schema)
        except InvalidInputError:
            job.abort()
            raise
        self._handle = handle = job.hand_over()
        self._unless = None if write.unless is None else Unchanged(*write.unless)
        self._unless_file = write.unless_file
        lease = SharedLease(
            handle.store,
            handle.namespace,
            handle.lease_id,
            handle.settings.lease_ttl_s,
        )
        self._plan = PartPlan(job.staging, rows, write.sort_bytes, lease, keys_shared=True)

    @error_boundary
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage one partition; InvalidInputError if a row cannot be written."""
        context = TaskContext.get()
        partition, attempt = (
            (0, 0) if context is None else (context.partitionId(), context.attemptNumber())
        )
        if self._handle.receipt is not None:  # committed before: nothing is staged
            for _ in iterator:
                pass
            return PartMessage(StagedPart(partition, attempt))
        return PartMessage(stage_part(self._plan, iterator, partition, attempt))

    @error_boundary
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Make the staged segments visible, all at one LSN, or raise."""
        if self._handle.receipt is not None:
            return
        parts = _parts(messages)
        job = BulkJob.resume(self._handle)
        try:
            segments = deduplicate(job.staging, self._plan.rows, parts)
            if job.replace is not None:
                segments += job.staging.stage([], job.replace)
            job.commit(segments, interleaved=True, unless=self._condition())
        except BaseException:
            job.let_go()  # Spark calls abort next, in a process of its own
            raise

    def _condition(self) -> Unchanged | None:
        if self._unless is None or self._unless_file is None:
            return self._unless
        return replace(self._unless, ranges=read_ranges(self._unless_file))

    @error_boundary
    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Abort the job, unless it has committed; a failed task's message is None (H39)."""
        if self._handle.receipt is None:
            BulkJob.resume(self._handle).abort()


def _exists(namespace: Namespace) -> InvalidInputError:
    return InvalidInputError(
        f"namespace {namespace.name} exists already",
        kind=ErrorKind.INVALID_OPTION,
        hint='Write into it with mode("append") or mode("overwrite")',
    )


def _parts(messages: list[WriterCommitMessage | None]) -> list[StagedPart]:
    parts = [message.part for message in messages if isinstance(message, PartMessage)]
    if len(parts) < len(messages):
        missing = len(messages) - len(parts)
        raise InternalError(f"{missing} of {len(messages)} tasks have sent no message")
    return parts
