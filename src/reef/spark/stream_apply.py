"""Apply a stream of changes to another namespace: `writeStream` with the option `applyChanges`.

    changes = spark.readStream.format("reef").options(namespace="orders", starting="all").load(url)
    changes.writeStream.format("reef").options(namespace="copy", applyChanges="true", …).start(url)

The rows of a micro-batch are change rows, as `readStream` yields them: puts, patches, merges,
deletes and deleted ranges. They are applied in the order of the log, by `_lsn` and `_seq`, however
Spark has distributed them, as one `append` that counts once (`stream_sink`). So a copy is exact
after every micro-batch: it is what its source was at the last LSN of it.

The driver orders the changes, so a micro-batch is limited to `CHANGES_BYTES_MAX`; the source's
`maxBytesPerTrigger` divides large loads.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as st
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from reef.engine.history.change_rows import OP_NAMES
from reef.engine.rows.input import fit_column, fit_keys
from reef.engine.rows.output import EXPIRES_AT
from reef.errors import ErrorKind, InvalidInputError
from reef.formats.operators import Operator, as_flags
from reef.formats.schema import Schema
from reef.formats.wal_object import OpKind, Ops, end_of_keys
from reef.jobs.ingest.streams import StreamAppender
from reef.spark.session import error_boundary
from reef.spark.sink import Target, find_target
from reef.spark.stream_options import StreamSinkOptions
from reef.spark.stream_sink import SinkStream, StreamTask, received

CHANGES_BYTES_MAX = 64 << 20
"""Change rows of one micro-batch, as Arrow has them: they become one object of the log."""
NEEDED = ("_op", "_key", "_end_key", "_lsn", "_seq", "_touched", "_operators")


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
        location = options.write.location
        db = location.database()
        self._target: Target = find_target(
            db,
            location.namespace,
            st.StructType(own),
            key=options.write.key,
            vectors=options.write.vectors,
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
        StreamAppender(db, location.namespace.name).append(
            stream.name,
            batch_id + 1,
            batches_of_changes([part.table() for part in parts if part.rows], schema, now_ms),
            schema=schema,
            also=[stream.place],
            check=lambda marks: stream.check(marks, batch_id),
        )

    def abort(self, messages: list[WriterCommitMessage | None], batch_id: int) -> None:
        """Do nothing: nothing was staged, and the log shows whether the commit counted (H31)."""


def batches_of_changes(changes: Sequence[pa.Table], schema: Schema, now_ms: int) -> list[Ops]:
    """Return change rows as a batch of operations, in the order of the log.

    `now_ms` decides whether a merge finds a row that expires: the log has the time of each merge,
    change rows do not.
    """
    if not changes:
        return []
    table = pa.concat_tables(changes, promote_options="default")
    return [_ops(table.sort_by([("_lsn", "ascending"), ("_seq", "ascending")]), schema, now_ms)]


def _ops(changes: pa.Table, schema: Schema, now_ms: int) -> Ops:
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
    kinds, keys = kinds.combine_chunks().cast(pa.uint8()), _whole(changes, "_key")
    fit_keys(keys.filter(pc.not_equal(kinds, OpKind.DELETE_RANGE)), schema.key)  # bounds need not
    return Ops(
        keys,
        kinds,
        _ends(_whole(changes, "_end_key"), kinds, schema),
        _expiry(changes),
        fields,
        _touched(changes, schema),
        pa.repeat(now_ms, len(keys)) if pc.any(pc.equal(kinds, OpKind.MERGE)).as_py() else None,
    )


def _ends(end_keys: pa.Array, kinds: pa.Array, schema: Schema) -> pa.Array:
    """Return the ends of ranges; one without an end reaches behind every key."""
    has_none = pc.and_(pc.equal(kinds, OpKind.DELETE_RANGE), end_keys.is_null())
    return pc.if_else(has_none, pa.scalar(end_of_keys(schema), pa.binary()), end_keys)


def _touched(changes: pa.Table, schema: Schema) -> dict[int, pa.Array] | None:
    """Return by column how patches and merges change it; None if there are neither."""
    names = _whole(changes, "_touched")
    if names.null_count == len(names):
        return None
    rows, flat = pc.list_parent_indices(names).to_numpy(), pc.list_flatten(names)
    operators = _whole(changes, "_operators")
    is_merge = operators.is_valid().to_numpy(zero_copy_only=False)[rows]
    codes = np.full(len(rows), Operator.SET, np.uint8)
    words = pc.list_flatten(operators).to_pylist()
    codes[is_merge] = [Operator[word.upper()] for word in words]
    touched = {}
    for field in schema.fields:
        of_column = np.zeros(len(names), np.uint8)
        chosen = pc.equal(flat, field.name).to_numpy(zero_copy_only=False)
        of_column[rows[chosen]] = codes[chosen]
        touched[field.number] = pa.array(of_column)
    return touched if len(words) else {n: as_flags(array) for n, array in touched.items()}


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
