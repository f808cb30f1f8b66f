"""`reef get` and `scan`: rows, now or at a past moment."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import click
import pyarrow as pa

from reef.cli.options import (
    EXIT_PROBLEMS,
    NUMBER,
    ReefCommand,
    encoding_option,
    moment_options,
    on_namespace,
    open_reader,
    range_options,
)
from reef.cli.output import Output
from reef.cli.values import parse_bytes, printable, python_rows
from reef.engine.database import Database
from reef.engine.history.pinned import PinnedReader
from reef.engine.reader import Reader
from reef.errors import CorruptionError, NotFoundError

__all__ = ["get", "scan"]


@click.command(cls=ReefCommand)
@on_namespace
@moment_options
@click.argument("key")
@click.option("--raw", is_flag=True, help="The value's bytes as they are, and nothing else.")
@encoding_option
def get(
    output: Output, db: Database, namespace: str, *, key: str, raw: bool, moment: dict[str, Any]
) -> int:
    """Print the value or the row of one key.

    Exits with 1 if it has none, and with 2 if damage hides what came later.

    Example: reef get ./data users u1
    """
    wanted = parse_bytes(key, output.encoding, "the key")
    with closing(open_reader(db, namespace, moment)) as reader:
        table = reader.get_many([wanted])
        found = table.column("_found")[0].as_py()
        rows = python_rows(table.drop_columns(["_found"]).to_batches()[0])
        damage = _damage_of(reader)
    if not found:
        raise damage or NotFoundError(
            f"{printable(wanted, output.encoding)} has no row in {namespace}", key=wanted
        )
    _show(output, namespace, rows[0], raw)
    return _warn(output, damage)


def _show(output: Output, namespace: str, row: dict[str, Any], raw: bool) -> None:
    values = list(row.values())
    plain = list(row) == ["id", "value"] and isinstance(values[1], bytes)
    if raw and not plain:
        raise click.UsageError(f"--raw: {namespace} has columns, there is no one value")
    if raw:
        output.raw(values[1])
    elif plain and not output.is_json:
        output.line(printable(values[1], output.encoding, lines=True))
    else:
        output.record(output.cell(values[0]), row)


@click.command(cls=ReefCommand)
@on_namespace
@range_options
@moment_options
@click.option("--columns", metavar="A,B", help="Only these, in this order.")
@click.option("--where", metavar="TEXT", help="For instance \"amount > 5 AND state = 'open'\".")
@click.option("--reverse", is_flag=True, help="The last key first.")
@click.option("--limit", type=NUMBER, metavar="N", help="At most so many rows.")
@encoding_option
def scan(
    output: Output,
    db: Database,
    namespace: str,
    *,
    bounds: dict[str, Any],
    moment: dict[str, Any],
    columns: str | None,
    **how: Any,
) -> int:
    """Print rows in the order of their keys.

    With --output json, one object per line, as they are read. Exits with 2 if damage hides what
    came later.

    Example: reef scan ./data users --prefix u --limit 10
    """
    wanted = None if columns is None else [name.strip() for name in columns.split(",")]
    with closing(open_reader(db, namespace, moment)) as reader:
        code = _warn(output, _damage_of(reader))
        with reader.scan_arrow(**bounds, columns=wanted, **how) as batches:
            output.stream(batches.schema.names, _rows(batches))
    return code


def _rows(batches: pa.RecordBatchReader) -> Iterator[dict[str, Any]]:
    for batch in batches:
        yield from python_rows(batch)


def _damage_of(reader: Reader | PinnedReader) -> CorruptionError | None:
    """Return what keeps a reader from seeing all there is (H17, H18)."""
    return getattr(reader, "damage", None)


def _warn(output: Output, damage: CorruptionError | None) -> int:
    """Say that newer rows are hidden, if they are; return the exit code."""
    if damage is None:
        return 0
    output.errors.print(f"damaged, older rows are shown: {damage}", markup=False, style="red")
    return EXIT_PROBLEMS
