"""`reef changes`: what was committed, in order, one line per operation."""

from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from typing import Any

import click

from reef.cli.options import NUMBER, ReefCommand, encoding_option, on_namespace
from reef.cli.output import Output
from reef.engine.database import Database
from reef.engine.history.change_rows import Change
from reef.engine.history.cursor import ChangeCursor
from reef.errors import NotFoundError

__all__ = ["changes"]


@click.command(cls=ReefCommand)
@on_namespace
@click.option(
    "--after",
    "after_lsn",
    type=NUMBER,
    default=0,
    metavar="LSN",
    help="What was committed after it; all, if not given.",
)
@click.option("--cursor", metavar="NAME", help="Go on from where this cursor was committed.")
@click.option("--commit", is_flag=True, help="With --cursor: commit it when all was printed.")
@click.option("--follow", is_flag=True, help="Wait for more at the end of the log.")
@click.option("--timeout", "timeout_s", type=float, metavar="SECONDS", help="With --follow.")
@click.option("--limit", type=NUMBER, metavar="N", help="At most so many.")
@encoding_option
def changes(
    output: Output,
    db: Database,
    namespace: str,
    *,
    cursor: str | None,
    commit: bool,
    limit: int | None,
    **how: Any,
) -> None:
    """Print what was written, in the order of the log.

    Reads the log after an LSN, as far as sweeps have left it, or by a registered cursor, for
    which it is kept. With --output json, one object per line.

    Example: reef changes ./data users --after 0 --limit 10
    """
    if how["timeout_s"] is not None and not how["follow"]:
        raise click.UsageError("--timeout is for --follow")
    if commit and (cursor is None or limit is not None):
        raise click.UsageError("--commit needs --cursor, and no --limit: all must be printed")
    if cursor is None:
        with closing(db.reader(namespace)) as reader:
            _print(output, reader.changes(**how), limit)
    else:
        if how["after_lsn"]:
            raise click.UsageError("--after and --cursor each say where to begin")
        with _open(db, namespace, cursor) as reading:
            found = reading.follow(how["timeout_s"]) if how["follow"] else iter(reading)
            _print(output, found, limit)
            if commit:
                output.note(f"committed up to LSN {reading.commit()}")


def _open(db: Database, namespace: str, name: str) -> ChangeCursor:
    """Open a cursor that is there: reading registers none by accident."""
    if name not in db.cursors(namespace):
        raise NotFoundError(
            f"{namespace} has no cursor {name!r}", hint="reef cursors register makes one"
        )
    return db.cursor(namespace, name)


def _print(output: Output, found: Iterator[Change], limit: int | None) -> None:
    for change in islice(found, limit):
        if output.is_json:
            output.json(change.to_dict())
        else:
            output.line(_line(output, change))
        output.flush()  # whoever follows sees each when it comes


def _line(output: Output, change: Change) -> str:
    where = f"{change.lsn}.{change.seq}"
    key = output.cell(change.key)
    if change.end_key is not None:
        key = f"{key} … {output.cell(change.end_key)}"
    return f"{where:<10} {change.op:<12} {key}  {output.cell(change.row)}".rstrip()
