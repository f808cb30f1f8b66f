"""`reef search` and `reef indexes`: ranked rows, and the search indexes of a namespace."""

import json
from contextlib import closing
from typing import Any

import click

from reef.cli.options import (
    NUMBER,
    ReefCommand,
    as_of_options,
    encoding_option,
    on_namespace,
    open_reader,
)
from reef.cli.output import Output, python_rows
from reef.engine.handles.database import Database
from reef.engine.search.specs import IndexDefinition, filter_index, text_index, vector_index
from reef.errors import InvalidInputError


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
