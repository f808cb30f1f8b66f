"""Export: the rows of one moment as files of Parquet or Arrow, in the order of their keys.

    pin       one moment, by a lease: writers, jobs and sweeps go on beside it
    plan      cut the keys into ranges of about as many rows, along the segments' block indexes
    tasks     each writes its range, file after file (`export_task`)
    seal      `_export.json`, last of all: what was exported, from where, and every file

Files never overlap, and sort by name as their keys do. What has no `_export.json` is not a
whole export. A target that holds files already is refused: theirs would be taken for ours.
"""

import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import msgspec

from reef import stores
from reef.config import ReaderSettings
from reef.engine.database import Database
from reef.engine.history.snapshots import Snapshot
from reef.engine.job_board import Working
from reef.engine.rows import EXPIRES_AT
from reef.errors import ConflictError, InvalidInputError, Kind, ReefError
from reef.formats.schema import Schema
from reef.jobs.compact_plan import split_keys
from reef.jobs.executor import Executor, LocalExecutor
from reef.jobs.export_task import ExportedFile, ExportReader, ExportTask, Format, run_export_task
from reef.stores import Outcome, Store
from reef.telemetry import operation
from reef.types import KeyRange

__all__ = ["SEAL", "ExportReport", "ExportSeal", "export", "open_files"]

SEAL = "_export.json"
SUFFIXES = (".parquet", ".arrow")
CACHE_BYTES = 48 << 20
"""Every block is read once: what is kept only bridges neighbouring reads."""
TASKS_AT_ONCE = 2
"""Each holds a scan and a row group; more of them are for executors with more memory."""
SAMPLES_MAX = 1000
SETTINGS = ReaderSettings(cache_bytes=CACHE_BYTES, row_cache_bytes=0)


class ExportSeal(msgspec.Struct, frozen=True):
    """What `_export.json` says: enough to check the files, and to make the namespace again."""

    namespace: str
    format: str
    generation: int
    last_lsn: int
    fingerprint: str
    """Of the namespace's schema."""
    key: tuple[str, str]
    """Name and type."""
    fields: list[tuple[str, str]]
    """All columns of the namespace but the key, exported or not."""
    columns: list[str]
    rows: int
    files: list[ExportedFile]


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was exported."""

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
    compression: str = "zstd",
    executor: Executor | None = None,
) -> ExportReport:
    """Write rows to a directory or bucket; all columns and the expiry, if none are named.

    `as_of`, `snapshot` and the bounds are those of a reader and of `scan_arrow`.
    """
    if format not in ("parquet", "arrow"):
        raise _bad(f"format={format!r} is neither 'parquet' nor 'arrow'")
    if rows_per_file < 1:
        raise _bad(f"rows_per_file={rows_per_file} is not a number of rows")
    files = open_files(target)
    _check_empty(files)
    heads, wanted = db._moment(namespace, as_of, snapshot)
    dropped = heads.found.manifest.successor is not None
    with (
        operation(db.metrics, "export"),
        db.working("export", namespace) as working,
        ExportReader(
            db.store, heads.names, SETTINGS, wanted, pin=True, heads=heads, dropped=dropped
        ) as reader,
    ):
        asked = _columns(reader.reef_schema, columns)
        ranges = _ranges(reader, KeyRange.of(start, end, prefix), rows_per_file)
        tasks = [
            ExportTask(
                reader, files, number, part, asked, where, format, rows_per_file, compression
            )
            for number, part in enumerate(ranges)
        ]
        done = _run(executor, tasks, LocalExecutor(db.store.runtime), working)
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


def open_files(place: str | os.PathLike[str] | Store) -> Store:
    """Return the store that holds files: a directory, a URL, or one that is open already."""
    return place if isinstance(place, Store) else stores.open(os.fspath(place))


def _run(
    executor: Executor | None, tasks: list[ExportTask], local: LocalExecutor, working: Working
) -> list[ExportedFile]:
    """Run all at once where others do it; here a few at a time, so that memory is bounded.

    If one fails, what was written is taken away again: it would be taken for an export.
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
                hint="Export to an empty directory; what has no _export.json is left over",
                object=info.key,
            )


def _columns(schema: Schema, columns: list[str] | None) -> tuple[str, ...]:
    if columns is None:
        return (*schema.arrow().names, EXPIRES_AT)
    if isinstance(columns, str) or not columns:
        raise _bad(f"columns={columns!r} is not a list of names")
    return tuple(columns)


def _ranges(reader: ExportReader, wanted: KeyRange, rows_per_file: int) -> list[KeyRange]:
    """Cut a range where segments have about as many rows as a file takes."""
    entries, segments = reader.segments
    inside = [entry for entry in entries if wanted.touches(entry.min_key, entry.max_key)]
    # A little less than a file: what is a little more would need a second one.
    parts = -(-sum(entry.rows for entry in inside) * 16 // (rows_per_file * 15))
    if parts < 2:
        return [wanted]
    samples: list[tuple[bytes, int]] = []
    for entry in inside:
        index = segments.tail(entry).index
        step = max(1, len(index) // SAMPLES_MAX)
        rows = index.rows.tolist()
        samples += [
            (index.first_keys[at], sum(rows[at : at + step])) for at in range(0, len(index), step)
        ]
    cuts = [key for key in split_keys(samples, parts) if wanted.start < key and wanted.has(key)]
    ends = [wanted.start, *cuts, wanted.end]
    return [KeyRange(low or b"", high) for low, high in pairwise(ends)]


# --- after ------------------------------------------------------------------------------


def _seal(task: ExportTask, done: list[ExportedFile]) -> None:
    """Write `_export.json`; any of the tasks knows what there is to say."""
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
            f"{files.url} was sealed by another export meanwhile", hint="Export to another place"
        )


def _bad(message: str) -> InvalidInputError:
    return InvalidInputError(message, kind=Kind.INVALID_OPTION)
