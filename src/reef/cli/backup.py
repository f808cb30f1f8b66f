"""Backups: `reef backup create`, `create-all`, `list`, `verify`, `restore` and `restore-all`."""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import wraps
from typing import Any

import click

from reef import stores
from reef.cli.options import (
    EXIT_PROBLEMS,
    NUMBER,
    ReefCommand,
    as_of_options,
    engine_options,
    executing,
    job,
    on_bucket,
    on_namespace,
)
from reef.cli.output import Output
from reef.engine.handles.database import Database
from reef.jobs.backup.copying import TASKS_AT_ONCE
from reef.stores import Store

LISTED = ("id", "created_at", "namespace", "from_lsn", "last_lsn", "segments", "bytes", "snapshot")


@click.group()
def backup() -> None:
    """Copy namespaces to another store, and restore them from there."""


def _on_backups(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `SOURCE`, the URL of the store that has the backups; it is called with it."""

    @click.argument("source")
    @wraps(command)
    def run(*args: Any, source: str, **words: Any) -> Any:
        return command(*args, source=stores.open(source), **words)

    return run


@backup.command("create", cls=ReefCommand)
@on_namespace
@click.argument("target")
@as_of_options
@click.option("--follow", is_flag=True, help="Ship the log as it grows, until interrupted.")
@click.option(
    "--until-lsn", type=NUMBER, metavar="N", help="End --follow once this LSN is shipped."
)
@click.option("--seconds", type=float, metavar="S", help="End --follow after so many seconds.")
@click.option(
    "--interval",
    "interval_s",
    type=float,
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Ship the log this often.",
)
@engine_options
def create_backup(
    output: Output,
    db: Database,
    namespace: str,
    *,
    target: str,
    as_of: dict[str, Any],
    engine: str,
    master: str | None,
    **options: Any,
) -> None:
    """Copy a namespace and its log to another store; objects that are there are not sent again.

    Example: reef backup create ./data users ./backup
    """
    snapshot, store = as_of.pop("snapshot", None), stores.open(target)
    label = f"backing up {namespace}"
    with _executing(output, db, label, engine, master) as executor:
        report = job("backup")(
            db,
            namespace,
            store,
            as_of=as_of or None,
            snapshot=snapshot,
            executor=executor,
            **options,
        )
    output.report(f"backed up {namespace}", report)


@backup.command("create-all", cls=ReefCommand)
@on_bucket
@click.argument("target")
@click.option("--snapshot", metavar="NAME", help="Copy this snapshot of the whole bucket.")
@engine_options
def create_all(
    output: Output,
    db: Database,
    *,
    target: str,
    snapshot: str | None,
    engine: str,
    master: str | None,
) -> None:
    """Copy all namespaces of a bucket to another store, as one backup.

    Example: reef backup create-all ./data ./backup
    """
    store = stores.open(target)
    with _executing(output, db, "backing up", engine, master) as executor:
        report = job("backup")(db, None, store, snapshot=snapshot, executor=executor)
    output.report(f"backed up {db.store.url}", report)


@backup.command("list", cls=ReefCommand)
@_on_backups
@click.pass_obj
def list_command(output: Output, source: Store) -> None:
    """List the backups in a store, oldest first.

    Example: reef backup list ./backup
    """
    rows = [
        {
            "id": found.id,
            "created_at": datetime.fromtimestamp(found.created_at_ms / 1000, UTC),
            "namespace": member.namespace,
            "from_lsn": member.floor - 1,
            "last_lsn": member.last_lsn,
            "segments": member.segments,
            "bytes": member.bytes,
            "snapshot": found.snapshot or None,
        }
        for found in job("list_backups")(source)
        for member in found.namespaces
    ]
    output.table(f"backups in {source.url}", LISTED, rows)


@backup.command("verify", cls=ReefCommand)
@_on_backups
@click.option("--deep", is_flag=True, help="Also read every block of every segment.")
@click.pass_obj
def verify_command(output: Output, source: Store, *, deep: bool) -> int:
    """Check every object of the backups in a store, and print every problem.

    Change nothing. Exit with 2 if there is a problem.

    Example: reef backup verify ./backup --deep
    """
    report = job("verify_backup")(source, deep=deep)
    output.report(f"verified {source.url}", report)
    return EXIT_PROBLEMS if report.problems else 0


def _restoring(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that both kinds of restore share."""
    choose = click.option("--backup", metavar="ID", help="Restore this backup. Default: newest.")
    check = click.option(
        "--no-verify",
        is_flag=True,
        help="Skip reading every block again before the namespace is created.",
    )
    return choose(check(engine_options(command)))


@backup.command("restore", cls=ReefCommand)
@_on_backups
@on_namespace
@click.option("--namespace", "origin", metavar="NAME", help="Restore this namespace.")
@click.option("--lsn", type=NUMBER, metavar="N", help="Restore the state at this LSN.")
@click.option("--time", metavar="ISO", help="Restore the state at this time. Default: UTC.")
@_restoring
def restore_command(
    output: Output,
    db: Database,
    namespace: str,
    *,
    source: Store,
    origin: str | None,
    no_verify: bool,
    engine: str,
    master: str | None,
    **options: Any,
) -> None:
    """Create a namespace from a backup, in its newest state or at an LSN or time.

    The arguments are the store of the backups, the bucket, and the name of the new namespace.

    Example: reef backup restore ./backup ./data users-copy --namespace users
    """
    label = f"restoring {namespace}"
    with _executing(output, db, label, engine, master) as executor:
        report = job("restore")(
            source,
            db,
            namespace,
            namespace=origin,
            verify=not no_verify,
            executor=executor,
            **options,
        )
    output.report(f"restored {namespace}", report)


@backup.command("restore-all", cls=ReefCommand)
@_on_backups
@on_bucket
@_restoring
def restore_all(
    output: Output,
    db: Database,
    *,
    source: Store,
    no_verify: bool,
    engine: str,
    master: str | None,
    **options: Any,
) -> None:
    """Create all namespaces of a backup of a whole bucket, under their names.

    Example: reef backup restore-all ./backup ./elsewhere
    """
    with _executing(output, db, "restoring", engine, master) as executor:
        report = job("restore")(source, db, verify=not no_verify, executor=executor, **options)
    output.report(f"restored {db.store.url}", report)


def _executing(output: Output, db: Database, label: str, engine: str, master: str | None) -> Any:
    return executing(output, db, label, engine=engine, master=master, at_once=TASKS_AT_ONCE)
