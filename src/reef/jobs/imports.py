"""Import: rows of Parquet and Arrow files, upserted or patched through a writer.

Files are read in streams and written batch by batch, each checked as any upsert is; an error names
the file, the row and the column. Every batch has an idempotency key made of the file's digest and
its own number: a second run after a crash goes through the same batches, and those that were
applied are answered and not applied again, as long as the namespace remembers their keys. So it
does not matter where the first run died, or whether its last answer was lost.

The writer role is taken only if nobody has used it for a minute (`take_over=False`), or if told
to. A bulk job (`reef.jobs.ingest`) loads without the role, at one LSN; this is the way for rows
that should go through the log like everyone else's.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import pyarrow as pa

from reef.engine.database import Database
from reef.engine.rows import EXPIRES_AT
from reef.engine.writer import Writer
from reef.errors import InvalidInputError, Kind, NotFoundError
from reef.formats.schema import DEFAULT_SCHEMA, Schema, arrow_type
from reef.jobs.import_source import Found, Source, SourceFile, find_files
from reef.telemetry import operation
from reef.types import Receipt

__all__ = ["ImportProgress", "ImportReport", "import_files"]

ROW = re.compile(r"^row (\d+)")
TOO_LARGE = "a batch of "
"""How the error of a batch above `batch_bytes_max` begins."""


@dataclass(frozen=True, slots=True)
class ImportProgress:
    """How far an import is."""

    file: str
    files_done: int
    files: int
    rows: int
    """Of all files so far, those that were applied before included."""


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What was imported."""

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


def import_files(
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

    A namespace that is not there is made with the first file's columns, or as it was exported,
    unless `create` is off; `key` names its key column. Without a `writer` one is opened.
    """
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
        self._mode, self._batch_rows, self._files, self._tell = mode, batch_rows, files, progress
        self._done = 0
        self.rows = self.batches = self.replayed = self.last_lsn = 0

    def take(self, file: SourceFile) -> None:
        """Write a file, batch by batch."""
        digest = file.digest()
        first = 0
        for number, table in enumerate(file.open().batches(self._batch_rows)):
            # Cut otherwise, they would be other batches: the count belongs to the key.
            self._commit(file, table, first, f"import/{digest}/{self._batch_rows}/{number}")
            first += len(table)
            self._told(str(file))
        self._done += 1
        self._told(str(file))

    def _commit(self, file: SourceFile, table: pa.Table, first: int, key: str) -> None:
        """Write a batch; one that is too large in bytes goes in halves."""
        try:
            receipt: Receipt = self._write(table, idempotency_key=f"{key}/{self._mode}")
        except InvalidInputError as error:
            if not error.message.startswith(TOO_LARGE) or len(table) < 2:
                raise _located(error, file, first) from error
            half = len(table) // 2
            self._commit(file, table.slice(0, half), first, f"{key}.0")
            self._commit(file, table.slice(half), first + half, f"{key}.1")
            return
        self.rows += len(table)
        self.batches += 1
        self.replayed += receipt.replayed
        self.last_lsn = max(self.last_lsn, receipt.lsn or 0)

    def _told(self, file: str) -> None:
        if self._tell is not None:
            self._tell(ImportProgress(file, self._done, self._files, self.rows))


def _located(error: InvalidInputError, file: SourceFile, first: int) -> InvalidInputError:
    """Return an error that names the file, and the row by its place in it."""
    message = ROW.sub(lambda found: f"row {first + int(found[1])}", error.message)
    if not ROW.match(message):
        message = f"rows from {first} on: {message}"
    context = {**error.context, "object": file.key}
    if isinstance(context.get("row"), int):
        context["row"] += first
    hint = error.hint or "Rows before these are imported; a second run passes over them"
    return InvalidInputError(f"file {file}, {message}", kind=error.kind, hint=hint, **context)


# --- the namespace ------------------------------------------------------------------------


def _ensure(db: Database, namespace: str, found: Found, key: str | None, *, create: bool) -> bool:
    """Make the namespace if there is none; whether it was made."""
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
        raise InvalidInputError("source=[] names no file", kind=Kind.INVALID_OPTION)
    first = found.files[0]
    given = first.open().schema
    names = [name for name in given.names if name != EXPIRES_AT]
    key = key or DEFAULT_SCHEMA.key.name
    if key not in names:
        raise InvalidInputError(
            f"file {first}, column {key}: there is no such column, only {', '.join(names)}",
            kind=Kind.INVALID_KEY,
            hint="Name the key column with key=",
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
            f"key={key!r}: the key column of {writer.namespace} is {known!r}", kind=Kind.INVALID_KEY
        )


@contextmanager
def _writer(
    db: Database, namespace: str, given: Writer | None, take_over: bool
) -> Iterator[Writer]:
    """Use the writer that was given, or open one and close it."""
    if given is not None:
        if given.namespace != namespace:
            raise InvalidInputError(f"the writer is that of {given.namespace}, not of {namespace}")
        yield given
        return
    with db.writer(namespace, take_over=take_over) as opened:
        yield opened


def _check(mode: str, batch_rows: int) -> None:
    if mode not in ("upsert", "patch"):
        raise InvalidInputError(
            f"mode={mode!r} is neither 'upsert' nor 'patch'", kind=Kind.INVALID_OPTION
        )
    if isinstance(batch_rows, bool) or not isinstance(batch_rows, int) or batch_rows < 1:
        raise InvalidInputError(
            f"batch_rows={batch_rows!r} is not a number of rows", kind=Kind.INVALID_OPTION
        )
