"""`reef stats` and `namespaces`: what is there, and how it is doing."""

import click
from rich.table import Table

from reef.cli.options import ReefCommand, encoding_option, on_bucket, on_namespace
from reef.cli.output import Output
from reef.cli.picture import level_lanes
from reef.engine.database import Database
from reef.engine.display import human_bytes
from reef.engine.stats import NamespaceStats

__all__ = ["namespaces", "stats"]

PICTURE_WIDTH = 60
KEY_WIDTH = 20
FIGURES_WIDTH = 50
"""What stands to the left of the picture."""


@click.command(cls=ReefCommand)
@on_namespace
@encoding_option
def stats(output: Output, db: Database, namespace: str) -> None:
    """Show levels, log, pins and the writer of a namespace.

    The picture has one bar per segment, over the keys that it spans.

    Example: reef stats ./data users
    """
    found = db.stats(namespace)
    if output.is_json:
        output.json(found)
        return
    output.record(f"namespace {namespace}", {**found.facts(), "columns": found.columns})
    if found.levels:
        _levels(output, found)
    for name, pins in (("snapshots", found.snapshots), ("cursors", found.cursors)):
        if pins:
            output.record(name, pins)
    for damage in found.damage:
        output.line(f"damaged: {damage}", style="bold red")


def _levels(output: Output, found: NamespaceStats) -> None:
    width = max(KEY_WIDTH, min(PICTURE_WIDTH, output.console.width - FIGURES_WIDTH))
    lanes = level_lanes(found.levels, width)
    table = Table(box=None, pad_edge=False)
    for name in ("level", "segments", "bytes", "rows", "tombstones"):
        table.add_column(name, justify="right", vertical="top")
    table.add_column("keys", no_wrap=True)
    for level in found.levels:
        table.add_row(
            str(level.level),
            f"{len(level.segments):,}",
            human_bytes(level.bytes),
            f"{level.rows:,}",
            f"{level.tombstones:,}",
            "\n".join(lanes[level.level]),
        )
    first = min(level.min_key for level in found.levels)
    last = max(level.max_key for level in found.levels)
    table.add_row(*[""] * 5, _scale(output, first, last, width))
    output.line("")
    output.console.print(table, markup=False)


def _scale(output: Output, first: bytes, last: bytes, width: int) -> str:
    left, right = (output.cell(key)[: width // 2 - 1] for key in (first, last))
    return left + right.rjust(width - len(left))


@click.command(cls=ReefCommand)
@on_bucket
@click.option("--dropped", is_flag=True, help="Those that were dropped, instead.")
def namespaces(output: Output, db: Database, *, dropped: bool) -> None:
    """List the namespaces of a bucket.

    Example: reef namespaces ./data
    """
    output.table(
        f"namespaces of {db.store.url}",
        ("namespace",),
        [{"namespace": name} for name in db.namespaces(dropped=dropped)],
    )
