"""Apply a stream of changes to another namespace: `writeStream` with the option `applyChanges`.

    changes = spark.readStream.format("reef").options(namespace="orders", starting="all").load(url)
    changes.writeStream.format("reef").options(namespace="copy", applyChanges="true", …).start(url)

The rows of a micro-batch are change rows, as `readStream` yields them: puts, patches, merges,
deletes and deleted ranges. They are applied in the order of the log, by `_lsn` and `_seq`, however
Spark has distributed them, as one `append` that counts once (`stream_sink`). So a copy is exact
after every micro-batch: it is what its source was at the last LSN of it.

A namespace that the sink creates has the column types of the source, which `readStream` notes in
the metadata of columns: merges of a column are exact only where they are computed in the same type.
In a namespace that exists, merges are refused whose operator the type of the column does not allow.

The driver orders the changes, so a micro-batch is limited to `CHANGES_BYTES_MAX`; the source's
`maxBytesPerTrigger` divides large loads.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as st
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from reef.engine.history.change_rows import OP_NAMES
from reef.engine.read.operands import normal_list
from reef.engine.rows.input import fit_column, fit_keys
from reef.engine.rows.output import EXPIRES_AT
from reef.errors import ErrorKind, InvalidInputError
from reef.formats.operators import Codes, Operator, as_flags, type_problem
from reef.formats.schema import Field, Schema
from reef.formats.wal_object import OpKind, Ops
from reef.jobs.ingest.streams import StreamAppender
from reef.jobs.upkeep import Upkeep
from reef.spark.session import error_boundary
from reef.spark.sink import Target, find_target
from reef.spark.stream_options import StreamSinkOptions
from reef.spark.stream_sink import SinkStream, StreamTask, received
from reef.spark.types import reef_type

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
        _whole(changes, "_end_key"),
        _expiry(changes),
        fields,
        _touched(codes, changes),
        pa.repeat(now_ms, len(keys)) if pc.any(pc.equal(kinds, OpKind.MERGE)).as_py() else None,
    )


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


def _touched(codes: Mapping[int, Codes], changes: pa.Table) -> dict[int, pa.Array] | None:
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
