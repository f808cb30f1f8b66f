"""Import: upsert or patch the rows of Parquet, Arrow, CSV and JSON files through a writer.

    1  find the files: a directory, a bucket, or named files; an export lists its own
    2  create the namespace with the first file's columns, or as it was exported
    3  read each file as a stream, in batches of a fixed number of rows
    4  commit each batch with an idempotency key: the file's digest and the number of the batch

A second run after a crash sends the same batches, and those that were applied are not applied again
as long as the namespace remembers their keys. Files are identified by their digest, whatever their
names; batches depend on the number of rows alone. An error names the file, the row and the column.

The writer role is acquired only if it was unused for a minute, or with `take_over`. A bulk job
(`reef.jobs.ingest`) loads without the role, at one LSN; an import is for rows that should go
through the log like other writes.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import msgspec
import pyarrow as pa

from reef.engine.handles.database import Database
from reef.engine.handles.writer import Writer
from reef.engine.rows.convert import EXPIRES_AT
from reef.errors import UNDECODABLE, CorruptionError, ErrorKind, InvalidInputError, NotFoundError
from reef.formats.schema import DEFAULT_SCHEMA, Schema, arrow_type
from reef.jobs.arguments import check_arguments, open_files
from reef.jobs.transfer.export import SEAL, ExportSeal
from reef.jobs.transfer.source_files import SUFFIXES, SourceFile
from reef.stores import Store
from reef.telemetry import operation
from reef.types import Receipt

Source = str | os.PathLike[str] | Store


# --- finding ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """The files to import in order, and the seal if they are an export."""

    files: tuple[SourceFile, ...]
    seal: ExportSeal | None = None


def _split(source: str) -> tuple[str, str, str]:
    """Split a URL's options off: the name of a file precedes them."""
    return source.partition("?") if "://" in source else (source, "", "")


def find_files(source: Source | Sequence[Source]) -> Found:
    """Return the files of a directory or bucket, or those that are named."""
    if isinstance(source, list | tuple):
        parts = [find_files(one) for one in source]
        seal = next((part.seal for part in parts if part.seal is not None), None)
        return Found(tuple(file for part in parts for file in part.files), seal)
    if not isinstance(source, str | os.PathLike | Store):
        raise InvalidInputError(
            f"source={source!r} is not a file, a directory or a URL", kind=ErrorKind.INVALID_OPTION
        )
    if not isinstance(source, Store):
        path, mark, query = _split(os.fspath(source))
        if path.endswith(SUFFIXES):
            folder, slash, name = path.rpartition("/")
            store = open_files((folder or slash or ".") + mark + query)
            return Found((SourceFile(store, name, _size_of(store, name, path)),))
        if os.path.isfile(path):
            raise InvalidInputError(
                f"{path} is not a file of rows, by its name",
                kind=ErrorKind.INVALID_OPTION,
                hint=f"Names end in one of {', '.join(SUFFIXES)}",
            )
    store = open_files(source)
    found = [
        SourceFile(store, info.key, info.size)
        for info in store.list()
        if info.key.endswith(SUFFIXES)
    ]
    seal = _read_seal(store)
    if not found and seal is None:
        raise NotFoundError(
            f"no file of rows in {store.url}",
            hint=f"Names end in one of {', '.join(SUFFIXES)}",
        )
    return Found(tuple(found) if seal is None else _as_sealed(store, seal, found), seal)


def _size_of(store: Store, name: str, path: str) -> int:
    try:
        return store.head(name).size
    except NotFoundError as error:
        raise NotFoundError(f"there is no file {path}", object=name) from error


def _as_sealed(
    store: Store, seal: ExportSeal, found: Sequence[SourceFile]
) -> tuple[SourceFile, ...]:
    """Return the files that an export names; all must exist with their size."""
    sizes = {file.key: file.size for file in found}
    for file in seal.files:
        if sizes.get(file.name) != file.bytes:
            raise CorruptionError(
                f"{SEAL} of {store.url} names {file.name} with {file.bytes} bytes, "
                f"found {sizes.get(file.name, 'none')}",
                object=file.name,
            )
    return tuple(SourceFile(store, file.name, file.bytes) for file in seal.files)


def _read_seal(store: Store) -> ExportSeal | None:
    """Return the seal of an export; None if this is no export."""
    try:
        return msgspec.json.decode(store.get(SEAL), type=ExportSeal)
    except NotFoundError:
        return None
    except UNDECODABLE as error:
        raise CorruptionError(f"{SEAL} of {store.url} cannot be read: {error}") from error


ROW = re.compile(r"^row (\d+)")
TOO_LARGE = "a batch of "
"""The start of the error message for a batch above `batch_bytes_max`."""


@dataclass(frozen=True, slots=True)
class ImportProgress:
    """The progress of an import."""

    file: str
    files_done: int
    files: int
    rows: int
    """Rows of all files so far, including those that an earlier run applied."""


@dataclass(frozen=True, slots=True)
class ImportReport:
    """The rows and batches of an import."""

    namespace: str
    mode: str
    files: int
    rows: int
    batches: int
    replayed: int
    """Batches that an earlier run had applied."""
    created: bool
    last_lsn: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def import_(
    db: Database,
    namespace: str,
    source: Source | Sequence[Source],
    *,
    key: str | None = None,
    mode: Literal["upsert", "patch"] = "upsert",
    batch_rows: int = 50_000,
    create: bool = True,
    writer: Writer | None = None,
    take_over: bool = False,
    progress: Callable[[ImportProgress], None] | None = None,
) -> ImportReport:
    """Write the rows of files, directories or URLs of files into a namespace.

    Files are Parquet, Arrow, CSV or JSON lines, by the end of their names. Columns of CSV and JSON
    get the types of the namespace.

    A missing namespace is created with the first file's columns, or as it was exported, unless
    `create` is off; `key` names its key column. Without a `writer` one is opened.
    """
    check_arguments(db)
    _check(mode, batch_rows)
    found = find_files(source)
    created = _ensure(db, namespace, found, key, create=create)
    with operation(db.metrics, "import"), _writer(db, namespace, writer, take_over) as opened:
        _check_key(opened, key)
        run = _Import(opened, mode, batch_rows, len(found.files), progress)
        for file in found.files:
            run.take(file)
    return ImportReport(
        namespace,
        mode,
        len(found.files),
        run.rows,
        run.batches,
        run.replayed,
        created,
        run.last_lsn,
    )


class _Import:
    """One run."""

    def __init__(
        self,
        writer: Writer,
        mode: str,
        batch_rows: int,
        files: int,
        progress: Callable[[ImportProgress], None] | None,
    ) -> None:
        self._write = writer.upsert if mode == "upsert" else writer.patch
        self._types = writer.schema
        self._mode, self._batch_rows, self._files, self._progress = (
            mode,
            batch_rows,
            files,
            progress,
        )
        self._done = 0
        self.rows = self.batches = self.replayed = self.last_lsn = 0

    def take(self, file: SourceFile) -> None:
        """Write a file, batch by batch."""
        digest = file.digest()
        first = 0
        rows = file.open(self._types, is_patch=self._mode == "patch")
        for number, table in enumerate(rows.batches(self._batch_rows)):
            # The number of rows per batch is part of the key: it decides the cuts.
            self._commit(file, table, first, f"import/{digest}/{self._batch_rows}/{number}")
            first += len(table)
            self._report_progress(str(file))
        self._done += 1
        self._report_progress(str(file))

    def _commit(self, file: SourceFile, table: pa.Table, first: int, key: str) -> None:
        """Write a batch; one that is too large in bytes is split in halves."""
        try:
            receipt: Receipt = self._write(table, idempotency_key=f"{key}/{self._mode}")
        except InvalidInputError as error:
            if not error.message.startswith(TOO_LARGE) or len(table) < 2:
                raise _name_row(error, file, first) from error
            half = len(table) // 2
            self._commit(file, table.slice(0, half), first, f"{key}.0")
            self._commit(file, table.slice(half), first + half, f"{key}.1")
            return
        self.rows += len(table)
        self.batches += 1
        self.replayed += receipt.replayed
        self.last_lsn = max(self.last_lsn, receipt.lsn or 0)

    def _report_progress(self, file: str) -> None:
        if self._progress is not None:
            self._progress(ImportProgress(file, self._done, self._files, self.rows))


def _name_row(error: InvalidInputError, file: SourceFile, first: int) -> InvalidInputError:
    """Return an error that names the file, and the row by its position in it."""
    message = ROW.sub(lambda found: f"row {first + int(found[1])}", error.message)
    if not ROW.match(message):
        message = f"rows from {first} on: {message}"
    context = {**error.context, "object": file.key}
    if isinstance(context.get("row"), int):
        context["row"] += first
    hint = error.hint or "Rows before these are imported; a second run skips them"
    return InvalidInputError(f"file {file}, {message}", kind=error.kind, hint=hint, **context)


# --- the namespace ------------------------------------------------------------------------


def _ensure(db: Database, namespace: str, found: Found, key: str | None, *, create: bool) -> bool:
    """Create the namespace if it is absent; return whether it was created."""
    try:
        db.info(namespace)
        return False
    except NotFoundError:
        if not create:
            raise
    schema, key = _schema_of(found, key)
    plain = schema.equals(DEFAULT_SCHEMA.arrow()) and key == DEFAULT_SCHEMA.key.name
    db.create(namespace, None if plain else schema, key=key)
    return True


def _schema_of(found: Found, key: str | None) -> tuple[pa.Schema, str]:
    """Return the columns as they were exported, or as the first file has them."""
    seal = found.seal
    if seal is not None and (key in (None, seal.key[0]) or not found.files):
        fields = [seal.key, *seal.fields]
        return pa.schema([(name, arrow_type(kind)) for name, kind in fields]), seal.key[0]
    if not found.files:
        raise InvalidInputError("source=[] names no file", kind=ErrorKind.INVALID_OPTION)
    first = found.files[0]
    given = first.open().schema
    names = [name for name in given.names if name != EXPIRES_AT]
    key = key or DEFAULT_SCHEMA.key.name
    if key not in names:
        raise InvalidInputError(
            f"file {first}, column {key}: there is no such column, only {', '.join(names)}",
            kind=ErrorKind.INVALID_KEY,
            hint="Name the key column with key=, on the command line with --key",
            column=key,
        )
    try:
        return Schema.of(pa.schema([given.field(name) for name in names]), key).arrow(), key
    except InvalidInputError as error:
        raise InvalidInputError(
            f"file {first}: {error.message}", kind=error.kind, hint=error.hint, **error.context
        ) from error


def _check_key(writer: Writer, key: str | None) -> None:
    known = writer.schema.names[0]
    if key is not None and key != known:
        raise InvalidInputError(
            f"key={key!r}: the key column of {writer.namespace} is {known!r}",
            kind=ErrorKind.INVALID_KEY,
        )


@contextmanager
def _writer(
    db: Database, namespace: str, given: Writer | None, take_over: bool
) -> Iterator[Writer]:
    """Use the given writer, or open one and close it."""
    if given is not None:
        if given.namespace != namespace:
            raise InvalidInputError(f"the writer belongs to {given.namespace}, not to {namespace}")
        yield given
        return
    with db.writer(namespace, take_over=take_over) as opened:
        yield opened


def _check(mode: str, batch_rows: int) -> None:
    if mode not in ("upsert", "patch"):
        raise InvalidInputError(
            f"mode={mode!r} is neither 'upsert' nor 'patch'", kind=ErrorKind.INVALID_OPTION
        )
    if isinstance(batch_rows, bool) or not isinstance(batch_rows, int) or batch_rows < 1:
        raise InvalidInputError(
            f"batch_rows={batch_rows!r} is not a number of rows", kind=ErrorKind.INVALID_OPTION
        )
