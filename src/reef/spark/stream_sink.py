"""The streaming sink: `df.writeStream.format("reef")` commits every micro-batch exactly once.

    streamWriter()  in a process of the driver, for each micro-batch: checks the columns
    write()         in the tasks: few rows go into the task's message; more are staged as segments,
                    under a job that the first of these tasks begins
    commit()        in another process of the driver: if all rows are in the messages, one `append`
                    in the log; otherwise one ingest
    abort()         likewise; also after a commit that raised. Nothing is deleted: the log shows
                    whether the commit has counted (H31)

Either commit carries the number of the micro-batch as the mark of its query, in the same object as
the rows. A micro-batch that is replayed after a crash is skipped by its number, never by its
content (H40), whichever driver sends it and however late.

**Size.** A task keeps up to `appendBytes` of rows; the one of partition p, which knows that there
are at least p + 1 of them, that share of it. So rows spread evenly stay in the messages up to
`appendBytes` in total, and the driver receives a few times that at most. It stages rows in messages
if others were staged, or if they are more than `appendBytes`.

**Checkpoints.** Spark numbers the micro-batches of a query in its checkpoint, which also has the id
of the query. The marks record both the query and the location of its checkpoint:

    spark/QUERY             how many micro-batches of the query were committed
    spark/QUERY@LOCATION    the same, with the location of the checkpoint

A query that continues has both marks, and the next number or the last one. Anything else would lose
rows or apply them twice, so it is refused, with the reason (`SinkStream.check`).

The option `applyChanges` applies a stream of changes to another namespace:

    changes = spark.readStream.format("reef").options(namespace="orders", starting="all").load(url)
    changes.writeStream.format("reef").options(namespace="copy", applyChanges="true", …).start(url)

The rows of a micro-batch are change rows, as `readStream` yields them: puts, patches, merges,
deletes and deleted ranges. They are applied in the order of the log, by `_lsn` and `_seq`, however
Spark has distributed them, as one `append` that counts once. So a copy is exact
after every micro-batch: it is what its source was at the last LSN of it.

A namespace that the sink creates has the column types of the source, which `readStream` notes in
the metadata of columns: merges of a column are exact only where they are computed in the same type.
In a namespace that exists, merges are refused whose operator the type of the column does not allow.

The driver orders the changes, so a micro-batch is limited to `CHANGES_BYTES_MAX`; the source's
`maxBytesPerTrigger` divides large loads.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import types as st
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from reef.engine.handles.database import Database
from reef.engine.history.change_rows import OP_NAMES
from reef.engine.rows.convert import EXPIRES_AT
from reef.engine.rows.input import fit_column, fit_keys
from reef.engine.rows.merges import normal_list
from reef.errors import ErrorKind, InternalError, InvalidInputError
from reef.formats.schema import Codes, Field, Operator, Schema, as_flags, type_problem
from reef.formats.versions import Versions
from reef.formats.wal_object import OpKind, Ops, end_of_keys
from reef.jobs.background import Upkeep
from reef.jobs.ingest.append import StreamAppender, UnfoldedLog
from reef.jobs.ingest.job import BulkJob, JobHandle, batch_of
from reef.spark.options import StreamSinkOptions, check_replacing
from reef.spark.rows import RowSorter, RowsPlan, bytes_of, from_batch, to_table
from reef.spark.session import error_boundary
from reef.spark.sink import Target, find_target
from reef.spark.staging import PartPlan, StagedPart, check_rows, deduplicate, stage_rows
from reef.spark.types import reef_type
from reef.types import KeyRange

QUERY_ID, RUN_ID, BATCH_ID = "sql.streaming.queryId", "spark.jobGroup.id", "streaming.sql.batchId"
"""Properties that Spark sets for the tasks of a micro-batch."""
SHARE_BYTES_MIN = 64 << 10
"""A task keeps so many bytes of rows in its message, however many tasks there are."""
Message = TypeVar("Message", bound=WriterCommitMessage)
CHANGES_BYTES_MAX = 64 << 20
"""Change rows of one micro-batch, as Arrow has them: they become one object of the log."""
NEEDED = ("_op", "_key", "_end_key", "_lsn", "_seq", "_touched", "_operators")


# --- exactly once ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SinkStream:
    """A query and its checkpoint, as the namespace knows them."""

    query: str
    location: str
    adopt: bool = False
    """Accept a checkpoint that does not continue where the namespace is."""

    @property
    def name(self) -> str:
        return f"spark/{self.query}"

    @property
    def place(self) -> str:
        """The name of the mark with the location."""
        return f"{self.name}@{self.location}"

    def marks(self, batch_id: int) -> dict[str, int]:
        """Return the marks of a micro-batch; Spark counts from 0."""
        return {self.name: batch_id + 1, self.place: batch_id + 1}

    def check(self, marks: Mapping[str, int], batch_id: int) -> None:
        """Raise InvalidInputError unless a micro-batch is the next one, or the last one again."""
        known = marks.get(self.name)
        if self.adopt and (known is None or batch_id >= known - 1):
            return
        if self.place not in marks:
            self._check_location(marks)
        if known is None and batch_id:
            raise self._refused(
                f"micro-batch {batch_id} is the first one of query {self.query} here: those "
                f"before it were committed elsewhere, or to a namespace that was dropped since"
            )
        if known is not None and batch_id < known - 1:
            raise self._refused(
                f"micro-batch {batch_id} of query {self.query} was committed before, and "
                f"{known - 1 - batch_id} after it: the checkpoint is an older copy",
                "Restore the newest checkpoint, or start with an empty one",
            )
        if known is not None and batch_id > known:
            raise self._refused(
                f"micro-batch {batch_id} of query {self.query} follows number {known - 1}: those "
                f"in between are missing. Was the namespace restored to an earlier state?"
            )

    def _check_location(self, marks: Mapping[str, int]) -> None:
        """Raise if the query is known elsewhere, or another query with this checkpoint."""
        moved = [name for name in marks if name.startswith(f"{self.name}@")]
        if moved:
            raise self._refused(
                f"the checkpoint of query {self.query} was at {moved[-1].partition('@')[2]} and is "
                f"at {self.location} now: it was moved or copied",
            )
        others = [n for n in marks if n.startswith("spark/") and n.endswith(f"@{self.location}")]
        if others:
            query = others[-1].removeprefix("spark/").partition("@")[0]
            raise self._refused(
                f"the checkpoint at {self.location} was deleted or replaced: query {query} has "
                f"committed {marks[others[-1]]} micro-batches with it, and this is a new query, "
                f"{self.query}, which would write its rows once more",
                "Restore the checkpoint, or use another location for a new query",
            )

    def _refused(
        self, message: str, hint: str = "Continue with the checkpoint that was used"
    ) -> InvalidInputError:
        return InvalidInputError(
            message,
            kind=ErrorKind.WRONG_CHECKPOINT,
            hint=f'{hint}. To accept it all the same: option("adoptCheckpoint", "true")',
            query=self.query,
            checkpoint=self.location,
        )


# --- messages -------------------------------------------------------------------------


class StreamPartMessage(WriterCommitMessage):
    """The message of a task: its rows, or the segments that it has staged under a job."""

    def __init__(
        self, query: str, plan: RowsPlan, rows: bytes = b"", staged: "StagedUnder | None" = None
    ) -> None:
        self.query, self.plan = query, plan
        self.rows = rows
        """As an Arrow stream."""
        self.staged = staged

    def pieces(self) -> Iterator[Versions]:
        """Yield the rows that the message carries."""
        if self.rows:
            with pa.ipc.open_stream(self.rows) as reader:
                for batch in reader:
                    yield from_batch(batch)


@dataclass(frozen=True, slots=True)
class StagedUnder:
    """A staged part, and the job as its task has joined it, with a lease of its own."""

    job: JobHandle
    part: StagedPart


def _pack_rows(pieces: Sequence[Versions]) -> bytes:
    """Return rows as Arrow streams them: buffers of exactly these rows."""
    tables = [to_table(piece) for piece in pieces if len(piece)]
    if not tables:
        return b""
    table = pa.concat_tables(tables, promote_options="default")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    packed: bytes = sink.getvalue().to_pybytes()
    return packed


# --- the writer -----------------------------------------------------------------------


class ReefStreamWriter(DataSourceStreamArrowWriter):
    """The writer of one micro-batch. Spark creates another one for its commit."""

    @error_boundary
    def __init__(self, options: StreamSinkOptions, schema: StructType, overwrite: bool) -> None:
        self._options = options
        self._overwrite = overwrite
        write = options.write
        if overwrite:
            check_replacing(write.op, schema.names)
        db = write.location.database()
        self._target: Target = find_target(
            db,
            write.location.namespace,
            schema,
            op=write.op,
            merge_ops=write.merge_ops,
            order_by=write.order_by,
            key=write.key,
            vectors=write.vectors,
        )
        if self._target.make is not None:
            db._namespaces.ensure(write.location.namespace.name, self._target.make)

    @error_boundary
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Collect or stage one partition; InvalidInputError if a row cannot be written."""
        task = StreamTask.current()
        plan = self._target.rows
        rows = check_rows(plan, iterator, task.partition)
        limit = max(SHARE_BYTES_MIN, self._options.append_bytes // (task.partition + 1))
        kept: list[Versions] = []
        size = 0
        for piece in rows:
            kept.append(piece)
            size += bytes_of(piece)
            if size > limit:
                return self._stage(task, chain(kept, rows))
        return StreamPartMessage(task.query, plan, _pack_rows(kept))

    def _stage(self, task: "StreamTask", rows: Iterable[Versions]) -> StreamPartMessage:
        write = self._options.write
        job = BulkJob(
            write.location.database(),
            write.location.namespace.name,
            job_id=task.job_id,
            replace=KeyRange() if self._overwrite else None,
            reported=False,  # the process of a task outlives it, and the namespace shows the job
            **write.settings,
        )
        try:
            plan = self._target.rows_under(job.schema)
            part = stage_rows(self._parts(job, plan), rows, task.partition, task.attempt)
        except BaseException:
            job.let_go()
            raise
        return StreamPartMessage(task.query, plan, staged=StagedUnder(job.hand_over(), part))

    def _parts(self, job: BulkJob, plan: RowsPlan) -> PartPlan:
        return PartPlan(job.staging, plan, self._options.write.sort_bytes, keys_shared=True)

    @error_boundary
    def commit(self, messages: list[WriterCommitMessage | None], batch_id: int) -> None:
        """Make the rows of a micro-batch visible, all at one LSN, unless they are already."""
        parts = received(messages, StreamPartMessage)
        given = self._options
        stream = SinkStream(parts[0].query, given.checkpoint, given.adopt_checkpoint)
        size = sum(len(part.rows) for part in parts)
        location = given.write.location
        db = location.database()
        if size > given.append_bytes or any(part.staged for part in parts):
            log = self._ingest(db, parts, stream, batch_id)
        else:
            log = self._append(db, parts, stream, batch_id)
        if given.background:
            Upkeep(db, location.namespace.name).after(log)

    def _append(
        self, db: Database, parts: Sequence[StreamPartMessage], stream: SinkStream, batch_id: int
    ) -> UnfoldedLog | None:
        """Commit the rows in the log; return the log as it is then."""
        plan = parts[0].plan
        rows = RowSorter(plan).sorted(piece for part in parts for piece in part.pieces())
        batches = [batch_of(piece) for piece in rows]
        if self._overwrite:
            batches = [_delete_everything(plan.schema), *batches]
        appender = StreamAppender(db, self._options.write.location.namespace.name)
        appender.append(
            stream.name,
            batch_id + 1,
            batches,
            schema=plan.schema,
            also=[stream.place],
            check=lambda marks: stream.check(marks, batch_id),
        )
        return appender.log

    def _ingest(
        self, db: Database, parts: Sequence[StreamPartMessage], stream: SinkStream, batch_id: int
    ) -> UnfoldedLog | None:
        """Commit the segments of all tasks; return the log as it is then."""
        location = self._options.write.location
        stream.check(StreamAppender(db, location.namespace.name).marks(), batch_id)
        job = self._job(db, parts)
        try:
            plan = self._parts(job, self._target.rows_under(job.schema))
            staged = [part.staged.part for part in parts if part.staged is not None]
            rows = [piece for part in parts for piece in part.pieces()]
            if rows:
                staged.append(stage_rows(plan, rows, len(parts), 0))
            segments = deduplicate(job.staging, plan.rows, staged)
            if job.replace is not None:
                segments += job.staging.stage([], job.replace)
            job.commit(segments, interleaved=True, marks=stream.marks(batch_id))
        except BaseException:
            job.let_go()  # Spark calls abort next, in a process of its own
            raise
        return job.log

    def _job(self, db: Database, parts: Sequence[StreamPartMessage]) -> BulkJob:
        """Return the job that tasks have begun; begin one if no task has."""
        handles = [part.staged.job for part in parts if part.staged is not None]
        if handles:
            return _resume_job(handles)
        write = self._options.write
        replace = KeyRange() if self._overwrite else None
        return BulkJob(db, write.location.namespace.name, replace=replace, **write.settings)

    @error_boundary
    def abort(self, messages: list[WriterCommitMessage | None], batch_id: int) -> None:
        """Abort the job, if tasks have begun one and it has not committed (H31, H39)."""
        parts = [message for message in messages if isinstance(message, StreamPartMessage)]
        handles = [part.staged.job for part in parts if part.staged is not None]
        if handles:
            _resume_job(handles).abort()


@dataclass(frozen=True, slots=True)
class StreamTask:
    """A task of a micro-batch, by the properties that Spark has set for it."""

    query: str
    run: str
    batch: str
    partition: int
    attempt: int

    @classmethod
    def current(cls) -> "StreamTask":
        """Return the task that runs here."""
        context = TaskContext.get()
        if context is None:
            raise InternalError("a micro-batch is written outside of a task of Spark")
        names = (QUERY_ID, RUN_ID, BATCH_ID)
        query, run, batch = (context.getLocalProperty(name) for name in names)
        if query is None:
            raise InternalError(f"Spark has not set the property {QUERY_ID} of a micro-batch")
        return cls(query, run or "", batch or "", context.partitionId(), context.attemptNumber())

    @property
    def job_id(self) -> str:
        """The same for all tasks of a micro-batch; another one when it is run again."""
        text = f"{self.query}/{self.run}/{self.batch}"
        return hashlib.blake2b(text.encode(), digest_size=13).hexdigest().upper()


def received(messages: Sequence[WriterCommitMessage | None], kind: type[Message]) -> list[Message]:
    """Return the messages of all tasks; InternalError if one is missing."""
    parts = [message for message in messages if isinstance(message, kind)]
    if len(parts) < len(messages) or not parts:
        raise InternalError(f"{len(parts)} of {len(messages)} tasks have sent a message")
    return parts


def _resume_job(handles: Sequence[JobHandle]) -> BulkJob:
    """Continue the job on the driver; the leases of its tasks are released."""
    job = BulkJob.resume(handles[0])
    for handle in handles[1:]:
        handle.release()
    return job


def _delete_everything(schema: Schema) -> Ops:
    """Return the deletion of all rows, as a batch."""
    return Ops(
        pa.array([b""], pa.binary()),
        pa.array([OpKind.DELETE_RANGE], pa.uint8()),
        pa.array([end_of_keys(schema)], pa.binary()),
    )


class ChangesMessage(WriterCommitMessage):
    """The change rows of a task, as an Arrow stream."""

    def __init__(self, query: str, rows: bytes) -> None:
        self.query, self.rows = query, rows

    def table(self) -> pa.Table:
        """Return the change rows."""
        with pa.ipc.open_stream(self.rows) as reader:
            return reader.read_all()


class ReefChangeWriter(DataSourceStreamArrowWriter):
    """Applies one micro-batch of change rows. Spark creates another writer for its commit."""

    @error_boundary
    def __init__(self, options: StreamSinkOptions, schema: st.StructType, overwrite: bool) -> None:
        self._options = options
        if overwrite:
            raise _bad("changes are applied in append mode", 'Leave out outputMode("complete")')
        missing = [name for name in NEEDED if name not in schema.names]
        if missing:
            raise _bad(
                f"change rows have a column {missing[0]}, the DataFrame does not",
                'Pass on all columns of readStream.format("reef")',
            )
        own = [field for field in schema if not field.name.startswith("_")]
        known = {field.name: reef_type(field) for field in own}
        self._types = {name: data_type for name, data_type in known.items() if data_type}
        location = options.write.location
        db = location.database()
        self._target: Target = find_target(
            db,
            location.namespace,
            st.StructType(own),
            key=options.write.key,
            vectors=options.write.vectors,
            types={n: t for n, t in self._types.items() if n not in options.write.vectors},
        )
        if self._target.make is not None:
            db._namespaces.ensure(location.namespace.name, self._target.make)

    @error_boundary
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Collect the change rows of one partition."""
        task = StreamTask.current()
        names = [*NEEDED, EXPIRES_AT, *self._target.given.names]
        sink, size, writer = pa.BufferOutputStream(), 0, None
        for given in iterator:
            batch = given.select([name for name in names if name in given.schema.names])
            size += batch.nbytes
            _check_size(size)
            writer = writer or pa.ipc.new_stream(sink, batch.schema)
            writer.write_batch(batch)
        if writer is None:
            return ChangesMessage(task.query, b"")
        writer.close()
        return ChangesMessage(task.query, sink.getvalue().to_pybytes())

    @error_boundary
    def commit(self, messages: list[WriterCommitMessage | None], batch_id: int) -> None:
        """Apply the changes, all at one LSN, unless they are applied already."""
        parts = received(messages, ChangesMessage)
        _check_size(sum(len(part.rows) for part in parts))
        given, schema = self._options, self._target.schema
        stream = SinkStream(parts[0].query, given.checkpoint, given.adopt_checkpoint)
        location = given.write.location
        db = location.database()
        now_ms = int(db.store.runtime.wall_s() * 1000)
        tables = [part.table() for part in parts if part.rows]
        appender = StreamAppender(db, location.namespace.name)
        appender.append(
            stream.name,
            batch_id + 1,
            batches_of_changes(tables, schema, now_ms, self._types),
            schema=schema,
            also=[stream.place],
            check=lambda marks: stream.check(marks, batch_id),
        )
        if given.background:
            Upkeep(db, location.namespace.name).after(appender.log)

    def abort(self, messages: list[WriterCommitMessage | None], batch_id: int) -> None:
        """Do nothing: nothing was staged, and the log shows whether the commit counted (H31)."""


def batches_of_changes(
    changes: Sequence[pa.Table],
    schema: Schema,
    now_ms: int,
    types: Mapping[str, pa.DataType] | None = None,
) -> list[Ops]:
    """Return change rows as a batch of operations, in the order of the log.

    `now_ms` decides whether a merge finds a row that expires: the log has the time of each merge,
    change rows do not. `types` are those of columns in the source, as far as they are known.
    """
    if not changes:
        return []
    table = pa.concat_tables(changes, promote_options="default")
    ordered = table.sort_by([("_lsn", "ascending"), ("_seq", "ascending")])
    return [_ops(ordered, schema, now_ms, types or {})]


def _ops(changes: pa.Table, schema: Schema, now_ms: int, types: Mapping[str, pa.DataType]) -> Ops:
    kinds = pc.index_in(changes.column("_op"), pa.array(OP_NAMES, pa.string()))
    unknown = pc.index(pc.is_valid(kinds), False).as_py()
    if unknown >= 0:
        raise InvalidInputError(
            f"column _op: expected {', '.join(OP_NAMES)}, got {changes['_op'][unknown].as_py()!r}",
            column="_op",
        )
    fields = {
        field.number: fit_column(_whole(changes, field.name), field)
        for field in schema.fields
        if field.name in changes.column_names
    }
    codes = _codes(changes, schema)
    for field in schema.fields:
        _check_operators(codes[field.number], field, types.get(field.name))
        if (codes[field.number] == Operator.UNION).any() and field.number in fields:
            fields[field.number] = _with_normal_unions(fields[field.number], codes[field.number])
    kinds, keys = kinds.combine_chunks().cast(pa.uint8()), _whole(changes, "_key")
    fit_keys(keys.filter(pc.not_equal(kinds, OpKind.DELETE_RANGE)), schema.key)  # bounds need not
    return Ops(
        keys,
        kinds,
        _ends(_whole(changes, "_end_key"), kinds, schema),
        _expiry(changes),
        fields,
        _touched_columns(codes, changes),
        pa.repeat(now_ms, len(keys)) if pc.any(pc.equal(kinds, OpKind.MERGE)).as_py() else None,
    )


def _ends(end_keys: pa.Array, kinds: pa.Array, schema: Schema) -> pa.Array:
    """Return the ends of ranges; one without an end reaches behind every key."""
    has_none = pc.and_(pc.equal(kinds, OpKind.DELETE_RANGE), end_keys.is_null())
    return pc.if_else(has_none, pa.scalar(end_of_keys(schema), pa.binary()), end_keys)


def _codes(changes: pa.Table, schema: Schema) -> dict[int, Codes]:
    """Return by column how each change changes it; 0 where it does not, or is a whole row."""
    names, operators = _whole(changes, "_touched"), _whole(changes, "_operators")
    rows, flat = pc.list_parent_indices(names).to_numpy(), pc.list_flatten(names)
    is_merge = operators.is_valid().to_numpy(zero_copy_only=False)[rows]
    codes = np.full(len(rows), Operator.SET, np.uint8)
    codes[is_merge] = [_operator(word) for word in pc.list_flatten(operators).to_pylist()]
    of_columns = {}
    for field in schema.fields:
        of_column = of_columns[field.number] = np.zeros(len(names), np.uint8)
        chosen = pc.equal(flat, field.name).to_numpy(zero_copy_only=False)
        of_column[rows[chosen]] = codes[chosen]
    return of_columns


def _operator(word: str) -> Operator:
    """Return an operator by the name that change rows have for it."""
    try:
        return Operator[word.upper()]
    except KeyError:
        raise InvalidInputError(
            f"column _operators: {word!r} is no merge operator", column="_operators"
        ) from None


def _check_operators(codes: Codes, field: Field, source: pa.DataType | None) -> None:
    """Raise if a merge of a column would be another one than in the source.

    Sums wrap around at the ends of their type, so it has to be that of the source.
    """
    for code in np.unique(codes[codes > Operator.SET]).tolist():
        problem = type_problem(Operator(code), field.arrow)
        is_other = code == Operator.ADD and source is not None and source != field.arrow
        if problem or is_other:
            raise InvalidInputError(
                f"column {field.name}: {problem or f'sums of {source}'}, not {field.type}",
                hint="The copy needs the column types of its source; let the sink create it",
                column=field.name,
            )


def _with_normal_unions(values: pa.Array, codes: Codes) -> pa.Array:
    """Return a column whose operands of unions are sets: a conversion may make elements equal."""
    is_union = pa.array(codes == Operator.UNION)
    return pc.if_else(is_union, normal_list(pc.if_else(is_union, values, None)), values)


def _touched_columns(codes: Mapping[int, Codes], changes: pa.Table) -> dict[int, pa.Array] | None:
    """Return by column how patches and merges change it; None if there are neither."""
    names, operators = _whole(changes, "_touched"), _whole(changes, "_operators")
    if names.null_count == len(names):
        return None
    touched = {number: pa.array(of_column) for number, of_column in codes.items()}
    if operators.null_count < len(operators):
        return touched
    return {number: as_flags(array) for number, array in touched.items()}


def _expiry(changes: pa.Table) -> pa.Array | None:
    if EXPIRES_AT not in changes.column_names:
        return None
    at = _whole(changes, EXPIRES_AT)
    if at.null_count == len(at):
        return None
    return at.cast(pa.timestamp("ms", "UTC"), safe=False).cast(pa.int64())


def _whole(changes: pa.Table, name: str) -> pa.Array:
    column = changes.column(name).combine_chunks()
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _check_size(size: int) -> None:
    if size > CHANGES_BYTES_MAX:
        raise InvalidInputError(
            f"a micro-batch has more than {CHANGES_BYTES_MAX >> 20} MiB of changes",
            kind=ErrorKind.INVALID_OPTION,
            hint="Lower maxBytesPerTrigger or maxRowsPerTrigger of the stream that is read",
        )


def _bad(message: str, hint: str) -> InvalidInputError:
    return InvalidInputError(message, kind=ErrorKind.INVALID_OPTION, hint=hint)
