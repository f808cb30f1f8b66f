"""`reef sql`, `reef search` and `reef indexes`: queries over the namespaces of a bucket.

`sql` runs as one command or in a shell; `search` prints ranked rows.

DuckDB and the writers of CSV and Parquet are imported when they are used: other commands need not
wait for them.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click
import pyarrow as pa

from reef.cli.options import (
    NUMBER,
    ReefCommand,
    as_of_options,
    encoding_option,
    on_bucket,
    on_namespace,
    open_reader,
)
from reef.cli.output import Output
from reef.engine.handles.database import Database
from reef.engine.rows.json_values import python_rows
from reef.engine.search.specs import IndexDefinition, filter_index, text_index, vector_index
from reef.errors import ErrorKind, InvalidInputError, ReefError

if TYPE_CHECKING:
    from reef.engine.handles.sql import SqlResult

QUIT = (".quit", ".exit")
FORMATS = ("text", "json", "csv", "parquet")
HELP = """\
A statement ends with a semicolon. Namespaces are tables; the past is users AS OF 12 (a generation),
AS OF 'nightly' (a snapshot), AS OF TIMESTAMP '2026-01-31 12:00', or AS OF LSN 42.

.tables         list the namespaces
.schema NAME    show the columns of a namespace
.help           show this text
.quit           leave; so does Ctrl-D"""


@click.command("sql", cls=ReefCommand)
@on_bucket
@click.argument("query", required=False)
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    help="Print the rows in this format. Default: that of --output.",
)
@click.option("--to", metavar="FILE", help="Write the rows to this file.")
@encoding_option
def sql_command(
    output: Output, db: Database, *, query: str | None, form: str | None, to: str | None
) -> int:
    """Run a query, or a shell for queries.

    Every namespace is a table. The past is a table too: "users@12" or users AS OF 12 is generation
    12, users AS OF 'nightly' a snapshot, users AS OF TIMESTAMP '2026-01-31 12:00' a time. Queries
    only read. Without a query, statements are read from stdin; on a terminal, with a prompt.
    Needs the extra sql.

    Example: reef sql ./data "SELECT count(*) FROM users"
    """
    form = form or output.form
    if query is not None:
        write_result(output, db.sql_stream(query), form, to)
        return 0
    if to is not None or form == "parquet":
        raise click.UsageError("--to and --format parquet require a query")
    if sys.stdin.isatty():
        Shell(output, db, form).prompt()
        return 0
    Script(output, db, form).run(sys.stdin)
    return 0


# --- results ----------------------------------------------------------------------------


def write_result(output: Output, result: "SqlResult", form: str, to: str | None) -> None:
    """Print the rows of a result, or write them to a file."""
    with result:
        if to is not None:
            _write_file(result, form, Path(to))
        elif form in ("csv", "parquet"):
            if form == "parquet" and sys.stdout.isatty():
                raise InvalidInputError(
                    "Parquet is not for a terminal",
                    kind=ErrorKind.INVALID_OPTION,
                    hint="Name a file with --to, or redirect stdout",
                )
            sys.stdout.flush()
            WRITERS[form](result, sys.stdout.buffer)
            sys.stdout.flush()
        else:
            before, output.form = output.form, form
            output.stream(result.schema.names, _rows(result))
            output.form = before


def _rows(result: "SqlResult") -> Iterator[dict[str, Any]]:
    for batch in result._rows():
        yield from python_rows(batch)


def _write_file(result: "SqlResult", form: str, target: Path) -> None:
    """Write to a file; a query that fails leaves none."""
    if form not in WRITERS:
        raise click.UsageError("--to requires --format csv or --format parquet")
    try:
        with target.open("xb") as file:
            WRITERS[form](result, file)
    except FileExistsError:
        raise InvalidInputError(f"{target} exists", hint="Choose another file") from None
    except BaseException:
        with suppress(OSError):
            target.unlink()
        raise


def _write_csv(result: "SqlResult", file: IO[bytes]) -> None:
    from pyarrow.csv import CSVWriter

    with CSVWriter(file, result.schema) as writer:
        for batch in result._rows():
            writer.write_batch(batch)


def _write_parquet(result: "SqlResult", file: IO[bytes]) -> None:
    from pyarrow.parquet import ParquetWriter

    with ParquetWriter(file, result.schema) as writer:
        for batch in result._rows():
            writer.write_batch(batch)


WRITERS: dict[str, Callable[["SqlResult", IO[bytes]], None]] = {
    "csv": _write_csv,
    "parquet": _write_parquet,
}


# --- statements -------------------------------------------------------------------------


class Script:
    """Runs statements and dot commands, the same as the shell; the first error ends it."""

    def __init__(self, output: Output, db: Database, form: str) -> None:
        self._output, self._db, self._form = output, db, form

    def run(self, lines: Iterable[str]) -> None:
        """Run all lines; the last statement needs no semicolon."""
        from reef.engine.handles.sql import split_statements

        pending = ""
        for line in lines:
            if not pending.strip() and line.strip().startswith("."):
                if line.strip() in QUIT:
                    return
                self._dot(line.strip())
                continue
            statements, pending = split_statements(pending + line)
            for statement in statements:
                self._query(statement)
        if pending.strip():
            self._query(pending)

    def _query(self, statement: str) -> None:
        write_result(self._output, self._db.sql_stream(statement), self._form, None)

    def _dot(self, line: str) -> None:
        command, _, name = line.partition(" ")
        if command == ".tables":
            for namespace in self._db.namespaces():
                self._output.line(namespace)
        elif command == ".schema" and name:
            schema: pa.Schema = self._db.info(name.strip().rstrip(";").strip('"')).schema
            for field in schema:
                self._output.line(f"{field.name}  {field.type}")
        else:
            self._output.line(HELP)


class Shell(Script):
    """Reads statements from a terminal until Ctrl-D."""

    def __init__(
        self, output: Output, db: Database, form: str, read: Callable[[str], str] = input
    ) -> None:
        super().__init__(output, db, form)
        self._read = read

    def prompt(self) -> None:
        """Read and run statements; an error does not end the shell."""
        from reef.engine.handles.sql import split_statements

        with suppress(ImportError):
            import readline  # noqa: F401 - gives `input` line editing and a history of this session
        self._output.note(f"reef sql {self._db.store.url}; .help shows commands, .quit leaves")
        pending = ""
        while True:
            try:
                line = self._read("   ...> " if pending.strip() else "reef> ")
            except KeyboardInterrupt:
                self._output.line("")
                pending = ""
                continue
            except EOFError:
                self._output.line("")
                return
            if not pending.strip() and line.strip().startswith("."):
                if line.strip() in QUIT:
                    return
                self._run_guarded(self._dot, line.strip())
                continue
            statements, pending = split_statements(f"{pending}{line}\n")
            for statement in statements:
                self._run_guarded(self._query, statement)

    def _run_guarded(self, step: Callable[[str], None], text: str) -> None:
        try:
            step(text)
        except ReefError as error:
            self._output.error(error)
        except KeyboardInterrupt:
            self._output.note("interrupted")


@click.command("search", cls=ReefCommand)
@on_namespace
@as_of_options
@click.option(
    "--vector", metavar="COLUMN=[…]", help="Rank by the distance to this vector, as JSON."
)
@click.option("--text", metavar="COLUMN=WORDS", help="Rank by the words of this text.")
@click.option("--where", metavar="TEXT", help="Select rows, such as \"country = 'FR'\".")
@click.option(
    "-k", "k", type=NUMBER, default=10, metavar="N", help="Print so many rows. Default: 10."
)
@click.option("--columns", metavar="A,B", help="Select these columns, in this order.")
@click.option("--exact", is_flag=True, help="Compare all rows, without the lists of an index.")
@click.option("--probes", type=NUMBER, metavar="N", help="Read so many lists of a vector index.")
@click.option("--explain", is_flag=True, help="Print how the search was run, not its rows.")
@encoding_option
def search_command(
    output: Output,
    db: Database,
    namespace: str,
    *,
    as_of: dict[str, Any],
    vector: str | None,
    text: str | None,
    columns: str | None,
    exact: bool,
    **how: Any,
) -> None:
    """Print the rows that are nearest to a vector, or that match a text best.

    With both, the two rankings are fused. With --output json, print one object per line.

    Example: reef search ./data docs --text body="object storage"
    """
    asked = None if columns is None else [name for name in columns.split(",") if name]
    with closing(open_reader(db, namespace, as_of)) as reader:
        found = reader.search(
            vector=None if vector is None else _vector(vector),
            text=None if text is None else _split(text, "--text"),
            columns=asked,
            recall="exact" if exact else None,
            **how,
        )
    if how["explain"]:
        output.record(f"search of {namespace}", found)
        return
    rows = (row for batch in found.to_batches() for row in python_rows(batch))
    output.stream(found.column_names, rows)


def _split(argument: str, option: str) -> tuple[str, str]:
    column, equals, value = argument.partition("=")
    if not equals or not column:
        raise click.UsageError(f"{option} is COLUMN=…, got {argument!r}")
    return column, value


def _vector(argument: str) -> tuple[str, Any]:
    column, text = _split(argument, "--vector")
    try:
        return column, json.loads(text)
    except ValueError as error:
        raise InvalidInputError(f"--vector {column} is not JSON: {error}") from None


@click.group("indexes")
def indexes_command() -> None:
    """Add, drop, build and list search indexes."""


@indexes_command.command("add", cls=ReefCommand)
@on_namespace
@click.argument("kind", type=click.Choice(["vector", "text", "filter"]))
@click.argument("column")
@click.option("--metric", metavar="NAME", help="Of vectors: l2, cosine or dot. Default: l2.")
@click.option("--language", metavar="NAME", help="Of text: english, or none by default.")
@click.option("--positions", is_flag=True, help="Of text: allow phrases in quotes.")
@click.option("--no-build", is_flag=True, help="Leave existing segments to background work.")
def add_index(
    output: Output,
    db: Database,
    namespace: str,
    *,
    kind: str,
    column: str,
    no_build: bool,
    **how: Any,
) -> None:
    """Add a search index, and build it for the rows that exist.

    Example: reef indexes add ./data docs text body --language english
    """
    info = db.alter(namespace, add_index=_definition(kind, column, how), build=not no_build)
    output.record(f"indexes of {namespace}", {"indexes": ", ".join(info.indexes)})


def _definition(kind: str, column: str, how: dict[str, Any]) -> IndexDefinition:
    given = {name: value for name, value in how.items() if value}
    allowed = {"vector": {"metric"}, "text": {"language", "positions"}, "filter": set[str]()}[kind]
    for name in given.keys() - allowed:
        raise click.UsageError(f"--{name} is not for a {kind} index")
    make: Any = {"vector": vector_index, "text": text_index, "filter": filter_index}[kind]
    definition: IndexDefinition = make(column, **given)
    return definition


@indexes_command.command("drop", cls=ReefCommand)
@on_namespace
@click.argument("column")
def drop_index(output: Output, db: Database, namespace: str, *, column: str) -> None:
    """Drop the search indexes of a column.

    Example: reef indexes drop ./data docs body
    """
    info = db.alter(namespace, drop_index=column)
    output.record(f"indexes of {namespace}", {"indexes": ", ".join(info.indexes) or "none"})


@indexes_command.command("build", cls=ReefCommand)
@on_namespace
@click.option("--again", is_flag=True, help="Rewrite all segments, also those with indexes.")
def build_index(output: Output, db: Database, namespace: str, *, again: bool) -> None:
    """Build the search indexes of segments that lack them.

    Example: reef indexes build ./data docs
    """
    from reef.jobs.indexes import build_indexes

    output.report(f"indexed {namespace}", build_indexes(db, namespace, again=again))


@indexes_command.command("list", cls=ReefCommand)
@on_namespace
def list_indexes(output: Output, db: Database, namespace: str) -> None:
    """List the search indexes.

    Example: reef indexes list ./data docs
    """
    rows = [{"index": name} for name in db.info(namespace).indexes]
    output.table(f"indexes of {namespace}", ("index",), rows)
