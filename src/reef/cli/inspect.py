"""`reef inspect`: one object, as it lies in the bucket."""

from datetime import UTC, datetime
from typing import Any

import click

from reef.cli.objects import Looked, ObjectReader
from reef.cli.options import EXIT_PROBLEMS, NUMBER, ReefCommand, encoding_option, on_namespace
from reef.cli.output import Output
from reef.engine.database import Database
from reef.manifest.head import newest_incarnation

__all__ = ["inspect"]

FOR_PROGRAMS = {"checksum", "set_hash", "tail_bytes", "schema_id", "visible_lsn", "home", "patches"}
"""Columns of a manifest's segments that people are spared."""
LISTED_MAX = 4


@click.command(cls=ReefCommand)
@on_namespace
@click.option("--generation", type=click.IntRange(min=1), metavar="N", help="This manifest.")
@click.option("--lsn", type=click.IntRange(min=1), metavar="N", help="This object of the log.")
@click.option("--segment", metavar="ID", help="This segment: footer, index and groups.")
@click.option("--lease", metavar="ID", help="This lease.")
@click.option(
    "--rows",
    type=NUMBER,
    default=20,
    show_default=True,
    metavar="N",
    help="Lines of a table, for people.",
)
@encoding_option
def inspect(output: Output, db: Database, namespace: str, *, rows: int, **which: Any) -> int:
    """Print what one object says, and what is damaged.

    The newest manifest, or the object that is named. Everything in it is checked. Damage is told
    with its offset, beside what can still be read, and the exit code is 2. --rows bounds the
    tables for people; JSON has everything.

    Example: reef inspect ./data users --lsn 2
    """
    names = newest_incarnation(db.store, namespace)
    looked = _look(ObjectReader(db.store, names), which)
    if output.is_json:
        output.json(looked.to_dict())
    else:
        _print(output, looked, rows)
    return EXIT_PROBLEMS if looked.damage else 0


def _look(reader: ObjectReader, which: dict[str, Any]) -> Looked:
    given = {name: value for name, value in which.items() if value is not None}
    if len(given) > 1:
        raise click.UsageError(f"--{' and --'.join(given)} each name an object")
    if "lsn" in given:
        return reader.wal_object(given["lsn"])
    if "segment" in given:
        return reader.segment(given["segment"])
    if "lease" in given:
        return reader.lease(given["lease"])
    return reader.manifest(given.get("generation"))


def _short(name: str, value: Any) -> Any:
    """Times as people read them, and of long lists only how long they are."""
    if name.endswith("_at_ms") and isinstance(value, int) and 0 < value < 1 << 45:
        return datetime.fromtimestamp(value / 1000, UTC).isoformat()
    if isinstance(value, list | tuple | dict) and len(value) > LISTED_MAX:
        return f"{len(value)}, which --output json tells"
    return value


def _print(output: Output, looked: Looked, rows: int) -> None:
    facts = {"bytes": looked.bytes, **looked.facts}
    output.record(looked.object, {name: _short(name, value) for name, value in facts.items()})
    if looked.rows and rows:
        shown = looked.rows[:rows]
        columns = [name for name in shown[0] if name not in FOR_PROGRAMS]
        output.line("")
        output.table(f"{looked.parts}, {len(looked.rows)} in all", columns, shown)
    for damage in looked.damage:
        output.line(f"damaged at offset {damage.offset}: {damage.message}", style="bold red")
