"""`reef snapshot …`: moments that are kept until they are released, or expire."""

from typing import Any

import click

from reef.cli.options import NUMBER, ReefCommand, on_namespace
from reef.cli.output import Output
from reef.engine.database import Database
from reef.engine.history.snapshots import Snapshot
from reef.errors import Kind, NotFoundError

__all__ = ["snapshot"]

COLUMNS = ("name", "id", "generation", "expires_at")


@click.group()
def snapshot() -> None:
    """Keep moments of a namespace, and let them go."""


@snapshot.command("take", cls=ReefCommand)
@on_namespace
@click.argument("name", required=False)
@click.option("--ttl", "ttl_s", type=float, metavar="SECONDS", help="Until when; for ever if not.")
@click.option("--generation", type=NUMBER, metavar="N", help="Keep this one, which is still there.")
def take(
    output: Output,
    db: Database,
    namespace: str,
    *,
    name: str | None,
    ttl_s: float | None,
    generation: int | None,
) -> None:
    """Keep everything that is committed now.

    Example: reef snapshot take ./data users monday --ttl 86400
    """
    taken = db.snapshot(namespace, name, ttl_s=ttl_s, generation=generation)
    output.record(f"snapshot of {namespace}", _facts(taken))


@snapshot.command("list", cls=ReefCommand)
@on_namespace
def list_command(output: Output, db: Database, namespace: str) -> None:
    """Show the snapshots that are kept, the oldest first.

    Example: reef snapshot list ./data users
    """
    rows = [_facts(found) for found in db.snapshots(namespace)]
    output.table(f"snapshots of {namespace}", COLUMNS, rows)


@snapshot.command("extend", cls=ReefCommand)
@on_namespace
@click.argument("name")
@click.option("--ttl", "ttl_s", type=float, metavar="SECONDS", help="From now; for ever if not.")
def extend(output: Output, db: Database, namespace: str, *, name: str, ttl_s: float | None) -> None:
    """Let a snapshot, by name or id, end at another time.

    Example: reef snapshot extend ./data users monday --ttl 172800
    """
    found = _find(db, namespace, name)
    found.extend(ttl_s)
    output.record(f"snapshot of {namespace}", _facts(found))


@snapshot.command("release", cls=ReefCommand)
@on_namespace
@click.argument("name")
def release(output: Output, db: Database, namespace: str, *, name: str) -> None:
    """End a snapshot, by name or id: the next sweep may take what only it held.

    Example: reef snapshot release ./data users monday
    """
    found = _find(db, namespace, name)
    found.release()
    output.record(f"released, of {namespace}", _facts(found))


def _find(db: Database, namespace: str, wanted: str) -> Snapshot:
    for found in db.snapshots(namespace):
        if wanted in (found.id, found.name):
            return found
    raise NotFoundError(
        f"{namespace} has no snapshot {wanted!r}: it was released, or it has expired",
        kind=Kind.COLLECTED,
        hint="reef snapshot list shows those there are",
    )


def _facts(found: Snapshot) -> dict[str, Any]:
    return {name: getattr(found, name) for name in COLUMNS}
