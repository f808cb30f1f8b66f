"""Export: write the rows of one point in time as Parquet, Arrow or JSON-lines files, in key order.

    1  pin     one point in time, by a lease: writers, jobs and sweeps continue
    2  plan    cut the keys into ranges of about equal rows, along the segments' block indexes
    3  tasks   each writes its range, file after file; they run anywhere
    4  seal    `_export.json`, last of all: the source, the schema, and every file

Files never overlap, and their names sort as their keys do. A directory without `_export.json` is no
complete export. A target that has files already is refused: they would be taken for ours.

Rows are streamed: memory holds the groups of a scan, one row group, and the bytes of an upload that
are not sent yet. A file appears whole or not at all.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from reef.config import ReaderSettings
from reef.engine.handles.database import Database
from reef.engine.handles.pinned import PinnedReader
from reef.engine.history.snapshots import Snapshot
from reef.engine.read.scan import Projection
from reef.engine.registry import JobHeartbeat
from reef.engine.rows.convert import EXPIRES_AT, to_record_batch
from reef.engine.rows.json_values import python_rows, to_json
from reef.errors import ConflictError, ErrorKind, InvalidInputError, ReefError
from reef.formats.schema import Schema
from reef.formats.versions import Versions
from reef.jobs.arguments import check_arguments, open_files
from reef.jobs.compact.plan import split_keys
from reef.runtime import Executor
from reef.stores import Outcome, Store
from reef.telemetry import operation
from reef.types import KeyRange

Format = Literal["parquet", "arrow", "jsonl"]
COMPRESSIONS: dict[str, tuple[str, ...]] = {
    "parquet": ("zstd", "snappy", "gzip", "brotli", "lz4", "none"),
    "arrow": ("zstd", "lz4", "none"),
    "jsonl": ("none", "gzip"),
}
"""By format; the first one is the default."""
YEAR_MAX = 9999
"""ISO 8601 has four digits for it."""
GROUP_ROWS = 64 * 1024
GROUP_BYTES = 16 << 20
"""The first limit reached ends a row group of Parquet, or a record batch of Arrow."""


class ExportReader(PinnedReader):
    """Reads one point in time as versions: a plain scan does not return expiry times."""

    def pieces(self, key_range: KeyRange, projection: Projection) -> Iterator[Versions]:
        """Yield the rows of a range, in order."""
        return self._pieces(self._scan(self._view(), key_range, projection, False))

    @property
    def reef_schema(self) -> Schema:
        return self._view().manifest.schema

    @property
    def segments(self) -> Any:
        """The segments of the pinned manifest, and the store to read them."""
        return self._view().manifest.segments, self._segments


@dataclass(frozen=True, slots=True)
class ExportTask:
    """One key range, to be written as files in order."""

    reader: ExportReader
    target: Store
    number: int
    key_range: KeyRange
    columns: tuple[str, ...]
    """May include the expiry."""
    where: Any
    format: Format
    rows_per_file: int
    compression: str

    @property
    def suffix(self) -> str:
        """How names of the files end, by which an import knows them."""
        is_packed = self.format == "jsonl" and self.compression == "gzip"
        return f".{self.format}{'.gz' if is_packed else ''}"


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """A file that was written."""

    name: str
    rows: int
    bytes: int
    first_key: str
    """As text; in hexadecimal if keys are bytes."""
    last_key: str


def arrow_schema(schema: Schema, columns: tuple[str, ...]) -> pa.Schema:
    """Return the columns of the files; the expiry is a timestamp in milliseconds."""
    every = schema.arrow().append(pa.field(EXPIRES_AT, pa.timestamp("ms", "UTC")))
    return pa.schema([every.field(name) for name in columns])


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of a task; errors are raised once all tasks have ended."""

    files: tuple[ExportedFile, ...]
    error: ReefError | None = None


def run_export_task(task: ExportTask) -> Exported:
    """Write the files of a range; none if it has no rows."""
    done: list[ExportedFile] = []
    try:
        batches = _Batches(task)
        while batches.has_more:
            name = f"part-{task.number:05}-{len(done):05}{task.suffix}"
            batches.begin_file()
            size = task.target.upload(name, _encode_batches(task, batches.of_file()))
            done.append(ExportedFile(name, batches.rows, size, *batches.key_bounds()))
    except ReefError as error:
        return Exported(tuple(done), error)
    return Exported(tuple(done))


class _Batches:
    """The rows of a task as record batches, cut when a file is full."""

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
        return _format_key(self._first), _format_key(self._last)

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
        for rows in self._task.reader.pieces(self._task.key_range, self._projection):
            batch, keys = self._batch(rows)
            if len(batch):
                yield batch, keys

    def _batch(self, rows: Versions) -> tuple[pa.RecordBatch, pa.Array]:
        """Return the matching rows with the selected columns, and their keys."""
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
    timestamp = pa.timestamp("ms", "UTC")
    if rows.expires_at_ms is None:
        return pa.nulls(len(rows), timestamp)
    return rows.expires_at_ms.cast(timestamp)


def _format_key(key: str | bytes) -> str:
    return key if isinstance(key, str) else key.hex()


# --- bytes ------------------------------------------------------------------------------


class _Sink:
    """Buffers the output of a file's writer until it is sent."""

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
        """Do nothing: nothing is held back."""

    def close(self) -> None:
        self.closed = True


def _encode_batches(task: ExportTask, batches: Iterator[pa.RecordBatch]) -> Iterator[bytes]:
    """Yield a file's bytes as they are produced."""
    sink = _Sink()
    schema = arrow_schema(task.reader.reef_schema, task.columns)
    file = pa.PythonFile(sink, mode="w")
    write, close = _writer(task, file, schema)
    for group in _groups(batches):
        try:
            write(group)
        except (pa.ArrowInvalid, ValueError, OverflowError) as error:
            raise InvalidInputError(
                f"{task.format} cannot hold these rows: {error}", hint="Export them as arrow"
            ) from error
        yield sink.take()
    close()
    yield sink.take()


def _writer(
    task: ExportTask, file: pa.NativeFile, schema: pa.Schema
) -> tuple[Callable[[pa.Table], None], Callable[[], None]]:
    if task.format == "jsonl":
        lines = _LinesWriter(file, task.compression)
        return lines.write_table, lines.close
    if task.format == "parquet":
        parquet = pq.ParquetWriter(file, schema, compression=task.compression)
        return (lambda table: parquet.write_table(table, GROUP_ROWS)), parquet.close
    codec = None if task.compression == "none" else task.compression
    options = pa.ipc.IpcWriteOptions(compression=codec)
    arrow = pa.ipc.new_file(file, schema, options=options)
    return (lambda table: arrow.write_table(table.combine_chunks())), arrow.close


class _LinesWriter:
    """Writes rows as JSON objects, one on each line; a row that never expires has no expiry."""

    def __init__(self, file: pa.NativeFile, compression: str) -> None:
        self._file = pa.CompressedOutputStream(file, "gzip") if compression == "gzip" else file

    def write_table(self, table: pa.Table) -> None:
        for batch in table.to_batches():
            rows = python_rows(_in_utc(batch))
            self._file.write("".join(map(_line, rows)).encode())

    def close(self) -> None:
        self._file.close()


def _in_utc(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return timestamps with a zone in UTC: offsets in text have no seconds, as old ones had."""
    for place, field in enumerate(batch.schema):
        if not pa.types.is_timestamp(field.type):
            continue
        column = batch.column(place)
        years = pc.min_max(pc.year(column)).as_py()
        if years["min"] is not None and not 0 < years["min"] <= years["max"] <= YEAR_MAX:
            raise ValueError(f"column {field.name} has times beyond the years 1 to {YEAR_MAX}")
        if field.type.tz is not None:
            utc = pa.timestamp(field.type.unit, "UTC")
            batch = batch.set_column(place, field.name, column.cast(utc))
    return batch


def _line(row: dict[str, Any]) -> str:
    if row.get(EXPIRES_AT, "") is None:
        del row[EXPIRES_AT]
    return f"{json.dumps(to_json(row), ensure_ascii=False)}\n"


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


SEAL = "_export.json"
SUFFIXES = (".parquet", ".arrow", ".jsonl", ".jsonl.gz")
CACHE_BYTES = 48 << 20
"""Every block is read once: the cache only serves neighbouring reads."""
TASKS_AT_ONCE = 2
"""Each holds a scan and a row group; more of them are for executors with more memory."""
SAMPLES_MAX = 1000
SETTINGS = ReaderSettings(cache_bytes=CACHE_BYTES, row_cache_bytes=0)


class ExportSeal(msgspec.Struct, frozen=True):
    """The contents of `_export.json`: enough to check the files and re-create the namespace."""

    namespace: str
    format: str
    generation: int
    last_lsn: int
    fingerprint: str
    """Fingerprint of the namespace's schema."""
    key: tuple[str, str]
    """Name and type."""
    fields: list[tuple[str, str]]
    """All columns of the namespace but the key, exported or not."""
    columns: list[str]
    rows: int
    files: list[ExportedFile]


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The files of an export."""

    namespace: str
    target: str
    format: str
    generation: int
    last_lsn: int
    rows: int
    bytes: int
    files: tuple[ExportedFile, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def export(
    db: Database,
    namespace: str,
    target: str | os.PathLike[str] | Store,
    *,
    format: Format = "parquet",
    as_of: Any = None,
    snapshot: Snapshot | str | None = None,
    columns: list[str] | None = None,
    start: bytes | str | None = None,
    end: bytes | str | None = None,
    prefix: bytes | str | None = None,
    where: Any = None,
    rows_per_file: int = 1_000_000,
    compression: str | None = None,
    executor: Executor | None = None,
) -> ExportReport:
    """Write rows to a directory or bucket; all columns and the expiry, if none are named.

    `as_of`, `snapshot` and the bounds are those of a reader and of `scan_arrow`. Parquet and Arrow
    are compressed with zstd, JSON lines are not, unless `compression` says otherwise.
    """
    check_arguments(db, executor)
    packed = _compression(format, compression)
    if isinstance(rows_per_file, bool) or not isinstance(rows_per_file, int) or rows_per_file < 1:
        raise _bad(f"rows_per_file={rows_per_file!r:.80} is not a number of rows")
    files = open_files(target)
    _check_empty(files)
    heads, point = db._resolve_target(namespace, as_of, snapshot)
    dropped = heads.found.manifest.successor is not None
    with (
        operation(db.metrics, "export"),
        db._working("export", namespace) as working,
        ExportReader(
            db.store, heads.names, SETTINGS, point, pin=True, heads=heads, dropped=dropped
        ) as reader,
    ):
        asked = _columns(reader.reef_schema, columns)
        ranges = _ranges(reader, KeyRange.of(start, end, prefix), rows_per_file)
        tasks = [
            ExportTask(reader, files, number, part, asked, where, format, rows_per_file, packed)
            for number, part in enumerate(ranges)
        ]
        done = _run(executor, tasks, db.store.runtime, working)
        _seal(tasks[0], done)
        return ExportReport(
            namespace,
            files.url,
            format,
            reader.generation,
            reader.last_lsn,
            sum(file.rows for file in done),
            sum(file.bytes for file in done),
            tuple(done),
        )


def _run(
    executor: Executor | None, tasks: list[ExportTask], local: Executor, working: JobHeartbeat
) -> list[ExportedFile]:
    """Run all tasks at once on an executor; here a few at a time, to bound memory.

    If one fails, all files are deleted: they would be taken for an export.
    """
    step = len(tasks) if executor is not None else TASKS_AT_ONCE
    done: list[ExportedFile] = []
    for first in range(0, len(tasks), step):
        results = (executor or local).map(run_export_task, tasks[first : first + step])
        done += [file for result in results for file in result.files]
        working.progress = {"files": len(done), "tasks": len(tasks)}
        for result in results:
            if result.error is not None:
                with suppress(ReefError):
                    tasks[0].target.delete_many([file.name for file in done])
                raise result.error
    return done


# --- before -----------------------------------------------------------------------------


def _check_empty(files: Store) -> None:
    for info in files.list():
        if info.key.endswith(SUFFIXES) or info.key == SEAL:
            raise ConflictError(
                f"{files.url} holds {info.key} already",
                hint="Export to an empty directory; files without _export.json are leftovers",
                object=info.key,
            )


def _compression(format: str, compression: str | None) -> str:
    """Return the compression of a format; InvalidInputError if there is no such pair."""
    if not isinstance(format, str) or format not in COMPRESSIONS:
        hint = CSV_HINT if format == "csv" else ""
        raise _bad(f"format={format!r:.80} is not one of {_listed(COMPRESSIONS)}", hint)
    known = COMPRESSIONS[format]
    if compression is not None and compression not in known:
        raise _bad(f"compression={compression!r:.80} of {format} is not one of {_listed(known)}")
    return known[0] if compression is None else compression


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _columns(schema: Schema, columns: list[str] | None) -> tuple[str, ...]:
    if columns is None:
        return (*schema.arrow().names, EXPIRES_AT)
    if not isinstance(columns, list | tuple) or not columns:
        raise _bad(f"columns={columns!r:.80} is not a list of names")
    return tuple(columns)


def _ranges(reader: ExportReader, key_range: KeyRange, rows_per_file: int) -> list[KeyRange]:
    """Cut a range so that each part has about as many rows as a file."""
    entries, segments = reader.segments
    inside = [entry for entry in entries if key_range.touches(entry.min_key, entry.max_key)]
    # Aim below a full file: a few rows more would need a second one.
    parts = -(-sum(entry.rows for entry in inside) * 16 // (rows_per_file * 15))
    if parts < 2:
        return [key_range]
    samples: list[tuple[bytes, int]] = []
    for entry in inside:
        index = segments.tail(entry).index
        step = max(1, len(index) // SAMPLES_MAX)
        rows = index.rows.tolist()
        samples += [
            (index.first_keys[at], sum(rows[at : at + step])) for at in range(0, len(index), step)
        ]
    cuts = [
        key for key in split_keys(samples, parts) if key_range.start < key and key_range.has(key)
    ]
    ends = [key_range.start, *cuts, key_range.end]
    return [KeyRange(low or b"", high) for low, high in pairwise(ends)]


# --- after ------------------------------------------------------------------------------


def _seal(task: ExportTask, done: list[ExportedFile]) -> None:
    """Write `_export.json`; all tasks have the same facts."""
    files, reader = task.target, task.reader
    schema = reader.reef_schema
    seal = ExportSeal(
        namespace=reader.namespace,
        format=task.format,
        generation=reader.generation,
        last_lsn=reader.last_lsn,
        fingerprint=schema.fingerprint,
        key=(schema.key.name, schema.key.type),
        fields=[(field.name, field.type) for field in schema.fields],
        columns=list(task.columns),
        rows=sum(file.rows for file in done),
        files=done,
    )
    body = msgspec.json.format(msgspec.json.encode(seal), indent=1)
    if files.create(SEAL, body).outcome is not Outcome.CREATED:
        raise ConflictError(
            f"{files.url} was sealed by another export meanwhile", hint="Export to another target"
        )


CSV_HINT = (
    'CSV is written by reef sql URL "SELECT * FROM users" --format csv --to users.csv, or in '
    'Python by pyarrow.csv.write_csv(reader.to_arrow(), "users.csv")'
)


def _bad(message: str, hint: str = "") -> InvalidInputError:
    return InvalidInputError(message, kind=ErrorKind.INVALID_OPTION, hint=hint)
