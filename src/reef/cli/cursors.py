"""`reef cursors …`: readers of changes for whom the log is kept."""

import click

from reef.cli.options import NUMBER, ReefCommand, on_namespace
from reef.cli.output import Output
from reef.engine.database import Database
from reef.errors import NotFoundError

__all__ = ["cursors"]


@click.group()
def cursors() -> None:
    """Readers of changes for whom the log is kept."""


@cursors.command("list", cls=ReefCommand)
@on_namespace
def list_command(output: Output, db: Database, namespace: str) -> None:
    """Show the cursors, and up to which LSN each was committed.

    Example: reef cursors list ./data users
    """
    rows = [{"name": name, "lsn": lsn} for name, lsn in db.cursors(namespace).items()]
    output.table(f"cursors of {namespace}", ("name", "lsn"), rows)


@cursors.command("register", cls=ReefCommand)
@on_namespace
@click.argument("name")
@click.option(
    "--after",
    "after_lsn",
    type=NUMBER,
    metavar="LSN",
    help="Begin after it; at the end of the log, if not given.",
)
def register(
    output: Output, db: Database, namespace: str, *, name: str, after_lsn: int | None
) -> None:
    """Keep the log for a reader from now on, or from an LSN on.

    One that is there stays where it is. Drop a cursor that nobody reads by any more: the log
    would grow for ever.

    Example: reef cursors register ./data users billing --after 0
    """
    with db.cursor(namespace, name, after_lsn) as found:
        output.record(f"cursor of {namespace}", {"name": name, "lsn": found.committed})


@cursors.command("drop", cls=ReefCommand)
@on_namespace
@click.argument("name")
def drop(output: Output, db: Database, namespace: str, *, name: str) -> None:
    """Let the sweep take what was kept for a cursor.

    Example: reef cursors drop ./data users billing
    """
    lsn = db.cursors(namespace).get(name)
    if lsn is None:
        raise NotFoundError(f"{namespace} has no cursor {name!r}", cursor=name)
    db.drop_cursor(namespace, name)
    output.record(f"dropped, of {namespace}", {"name": name, "lsn": lsn})
