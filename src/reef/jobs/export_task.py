"""An export's task: one range of keys becomes files of Parquet or Arrow. Runs anywhere.

Rows stream through: what is in memory at once is what a scan holds, a row group, and what an
upload has not sent yet. A file appears whole or not at all.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from reef.engine.history.pinned import PinnedReader
from reef.engine.reading.projection import Projection
from reef.engine.rows import EXPIRES_AT
from reef.engine.rows.out import to_record_batch
from reef.errors import InvalidInputError, ReefError
from reef.formats.schema import Schema
from reef.formats.versions import Versions
from reef.stores import Store
from reef.types import KeyRange

__all__ = [
    "ExportReader",
    "ExportTask",
    "Exported",
    "ExportedFile",
    "Format",
    "arrow_schema",
    "run_export_task",
]

Format = Literal["parquet", "arrow"]
GROUP_ROWS = 64 * 1024
GROUP_BYTES = 16 << 20
"""Whichever is first: a row group of Parquet, or a record batch of Arrow."""


class ExportReader(PinnedReader):
    """One moment, read as versions: a plain scan does not tell when rows expire."""

    def pieces(self, wanted: KeyRange, projection: Projection) -> Iterator[Versions]:
        """Yield the rows of a range, in order."""
        return self._pieces(self._view(), wanted, projection, False)

    @property
    def reef_schema(self) -> Schema:
        return self._view().manifest.schema

    @property
    def segments(self) -> Any:
        """The entries of the manifest that is read, and how to look into them."""
        return self._view().manifest.segments, self._segments


@dataclass(frozen=True, slots=True)
class ExportTask:
    """One range of keys, to be written as files in order."""

    reader: ExportReader
    target: Store
    number: int
    wanted: KeyRange
    columns: tuple[str, ...]
    """May include the expiry."""
    where: Any
    format: Format
    rows_per_file: int
    compression: str


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """A file that was written."""

    name: str
    rows: int
    bytes: int
    first_key: str
    """As text, or in hexadecimal where keys are bytes."""
    last_key: str


def arrow_schema(schema: Schema, columns: tuple[str, ...]) -> pa.Schema:
    """Return the columns of the files; the expiry is a moment in milliseconds."""
    every = schema.arrow().append(pa.field(EXPIRES_AT, pa.timestamp("ms", "UTC")))
    return pa.schema([every.field(name) for name in columns])


@dataclass(frozen=True, slots=True)
class Exported:
    """What became of a task: an error is told when all have ended, and nothing is written then."""

    files: tuple[ExportedFile, ...]
    error: ReefError | None = None


def run_export_task(task: ExportTask) -> Exported:
    """Write the files of a range; none where it has no rows."""
    done: list[ExportedFile] = []
    try:
        batches = _Batches(task)
        while batches.has_more:
            name = f"part-{task.number:05}-{len(done):05}.{task.format}"
            batches.begin_file()
            size = task.target.upload(name, _encoded(task, batches.of_file()))
            done.append(ExportedFile(name, batches.rows, size, *batches.key_bounds()))
    except ReefError as error:
        return Exported(tuple(done), error)
    return Exported(tuple(done))


class _Batches:
    """The rows of a task as record batches, cut where a file is full."""

    def __init__(self, task: ExportTask) -> None:
        self._task = task
        self._schema = task.reader.reef_schema
        plain = [name for name in task.columns if name != EXPIRES_AT]
        self._projection = Projection.of(self._schema, plain, task.where)
        self._arrow = arrow_schema(self._schema, task.columns)
        self._pieces = self._read()
        self._next = next(self._pieces, None)
        self.begin_file()

    @property
    def has_more(self) -> bool:
        return self._next is not None

    def begin_file(self) -> None:
        self.rows = 0
        self._first: Any = None
        self._last: Any = None

    def key_bounds(self) -> tuple[str, str]:
        return _shown(self._first), _shown(self._last)

    def of_file(self) -> Iterator[pa.RecordBatch]:
        """Yield the batches of one file."""
        while self._next is not None and self.rows < self._task.rows_per_file:
            batch, keys = self._next
            room = self._task.rows_per_file - self.rows
            taken = min(room, len(batch))
            self._first = keys[0].as_py() if not self.rows else self._first
            self._last = keys[taken - 1].as_py()
            self.rows += taken
            if taken < len(batch):
                self._next = batch.slice(taken), keys.slice(taken)
            else:
                self._next = next(self._pieces, None)
            yield batch.slice(0, taken)

    def _read(self) -> Iterator[tuple[pa.RecordBatch, pa.Array]]:
        for rows in self._task.reader.pieces(self._task.wanted, self._projection):
            batch, keys = self._batch(rows)
            if len(batch):
                yield batch, keys

    def _batch(self, rows: Versions) -> tuple[pa.RecordBatch, pa.Array]:
        """Return the rows that match, with the columns asked for, and their keys."""
        where, key = self._projection.where, self._schema.key
        named = dict.fromkeys([key.name, *(self._projection.columns or ())])
        needed = list(dict.fromkeys([*named, *(where.columns if where is not None else ())]))
        batch = to_record_batch(rows, self._schema, needed)
        if EXPIRES_AT in self._task.columns:
            batch = batch.append_column(EXPIRES_AT, _expiry(rows))
        if where is not None:
            batch = batch.filter(where.mask(batch))
        keys = batch.column(key.name)
        return batch.select(list(self._task.columns)).cast(self._arrow), keys


def _expiry(rows: Versions) -> pa.Array:
    moment = pa.timestamp("ms", "UTC")
    if rows.expires_at_ms is None:
        return pa.nulls(len(rows), moment)
    return rows.expires_at_ms.cast(moment)


def _shown(key: str | bytes) -> str:
    return key if isinstance(key, str) else key.hex()


# --- bytes ------------------------------------------------------------------------------


class _Sink:
    """Takes what a file's writer writes, until it is sent."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> int:
        self._parts.append(bytes(data))
        return len(self._parts[-1])

    def take(self) -> bytes:
        data, self._parts = b"".join(self._parts), []
        return data

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        self.closed = True


def _encoded(task: ExportTask, batches: Iterator[pa.RecordBatch]) -> Iterator[bytes]:
    """Yield a file's bytes as they come about."""
    sink = _Sink()
    schema = arrow_schema(task.reader.reef_schema, task.columns)
    file = pa.PythonFile(sink, mode="w")
    write, close = _writer(task, file, schema)
    for group in _groups(batches):
        try:
            write(group)
        except pa.ArrowInvalid as error:
            raise InvalidInputError(
                f"{task.format} cannot hold these rows: {error}", hint="Export them as arrow"
            ) from error
        yield sink.take()
    close()
    yield sink.take()


def _writer(
    task: ExportTask, file: pa.NativeFile, schema: pa.Schema
) -> tuple[Callable[[pa.Table], None], Callable[[], None]]:
    if task.format == "parquet":
        parquet = pq.ParquetWriter(file, schema, compression=task.compression)
        return (lambda table: parquet.write_table(table, GROUP_ROWS)), parquet.close
    codec = None if task.compression == "none" else task.compression
    options = pa.ipc.IpcWriteOptions(compression=codec)
    arrow = pa.ipc.new_file(file, schema, options=options)
    return (lambda table: arrow.write_table(table.combine_chunks())), arrow.close


def _groups(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Join batches up to a row group."""
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        waiting.append(batch)
        rows, size = rows + len(batch), size + batch.nbytes
        if rows >= GROUP_ROWS or size >= GROUP_BYTES:
            yield pa.Table.from_batches(waiting)
            waiting, rows, size = [], 0, 0
    if waiting:
        yield pa.Table.from_batches(waiting)
