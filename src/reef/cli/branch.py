"""Branches and history: `reef branch`, `diff`, `history` and `rollback`."""

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import click

from reef.cli.options import (
    ReefCommand,
    as_of_options,
    engine_options,
    executing,
    on_namespace,
)
from reef.cli.output import Output
from reef.cli.read import find_snapshot
from reef.engine.context import NamespaceContext
from reef.engine.handles.branches import Difference
from reef.engine.handles.database import Database
from reef.engine.handles.pinned import PinnedReader
from reef.engine.history.snapshots import Snapshot
from reef.errors import NotFoundError
from reef.formats.manifest import BranchPin
from reef.manifest.branching import check_is_branch, is_dead
from reef.manifest.head import locate
from reef.paths import Namespace

DIFF_COLUMNS = ("op", "key", "a", "b")
BRANCH_COLUMNS = ("name", "state", "generation", "lsn", "id")


@click.group()
def branch() -> None:
    """Create, list, compare, merge and drop branches."""


@branch.command("create", cls=ReefCommand)
@on_namespace
@click.argument("name")
@as_of_options
def create_branch(
    output: Output, db: Database, namespace: str, *, name: str, as_of: dict[str, Any]
) -> None:
    """Create a namespace with the rows of another one, without copying them.

    Example: reef branch create ./data users experiment
    """
    made = db.branch(namespace, name, _point(db, namespace, as_of))
    output.record(f"branch of {namespace}", {"name": name, "generation": made.generation})


def _point(db: Database, namespace: str, as_of: dict[str, Any]) -> Any:
    if "snapshot" not in as_of:
        return as_of or None
    return find_snapshot(db, namespace, as_of["snapshot"])


@branch.command("list", cls=ReefCommand)
@on_namespace
def list_branches(output: Output, db: Database, namespace: str) -> None:
    """List the branches that a namespace retains objects for, with their state.

    That is `live`, `dropped`, `incomplete` while it is being made or if that was interrupted, and
    `released` if the next sweeps of the namespace remove the pin.

    Example: reef branch list ./data users
    """
    heads = locate(db.store, namespace)
    pins = sorted(heads.found.manifest.branches.items())
    rows = db.store.runtime.map(lambda pin: _branch_row(db, heads.names.root, *pin), pins)
    output.table(f"branches of {namespace}", BRANCH_COLUMNS, rows)


def _branch_row(db: Database, root: str, branch_id: str, pin: BranchPin) -> dict[str, Any]:
    names = Namespace.of_root(pin.root)
    name, state = names.name, "incomplete"
    with suppress(NotFoundError):
        head = NamespaceContext(db.store, names).heads.find(fallback=True, dropped=True).manifest
        name, state = head.name_in(names.folder), str(head.state)
        if is_dead(head, branch_id, root):
            state = "released"
    row = {"name": name, "state": state, "id": branch_id}
    return {**row, "generation": pin.generation, "lsn": pin.last_lsn}


@branch.command("diff", cls=ReefCommand)
@on_namespace
@click.argument("other")
@click.option("--limit", type=int, metavar="N", help="Print at most this many rows.")
def diff_branch(
    output: Output, db: Database, namespace: str, *, other: str, limit: int | None
) -> None:
    """Print the rows that differ between two namespaces.

    Example: reef branch diff ./data users experiment
    """
    _print(output, f"from {namespace} to {other}", db.diff(namespace, other), limit)


@branch.command("merge", cls=ReefCommand)
@on_namespace
@click.argument("parent", required=False)
@click.option(
    "--on-conflict",
    type=click.Choice(["error", "ours", "theirs"]),
    default="error",
    show_default=True,
    help="Rows changed on both sides: fail, keep the parent's, or take the branch's.",
)
@engine_options
def merge_branch(
    output: Output,
    db: Database,
    namespace: str,
    *,
    parent: str | None,
    on_conflict: str,
    engine: str,
    master: str | None,
) -> None:
    """Apply the changes of a branch to the namespace that it was made of, or to another.

    Example: reef branch merge ./data experiment users
    """
    target = parent or _parent(db, namespace)
    with executing(output, db, f"merging {namespace}", engine=engine, master=master) as executor:
        report = db.merge(namespace, target, on_conflict, executor=executor)
    output.record(f"merged {namespace} into {target}", report.to_dict())


def _parent(db: Database, namespace: str) -> str:
    origin = check_is_branch(locate(db.store, namespace).found.manifest, namespace)
    folder = Namespace.of_root(origin.root).name
    return locate(db.store, folder).names.name


@branch.command("drop", cls=ReefCommand)
@on_namespace
def drop_branch(output: Output, db: Database, namespace: str) -> None:
    """Drop a branch; a sweep of it releases the objects that it shares.

    Example: reef branch drop ./data experiment
    """
    check_is_branch(locate(db.store, namespace).found.manifest, namespace)
    db.drop(namespace)
    output.record("dropped branch", {"name": namespace})


@click.command("diff", cls=ReefCommand)
@on_namespace
@click.option("--from", "start", required=True, metavar="POINT", help="The earlier state.")
@click.option("--to", "end", metavar="POINT", help="The later state. Default: the newest.")
@click.option("--limit", type=int, metavar="N", help="Print at most this many rows.")
def diff(
    output: Output, db: Database, namespace: str, *, start: str, end: str | None, limit: int | None
) -> None:
    """Print the rows that differ between two states of a namespace.

    A POINT is a generation, lsn:N, the name or id of a snapshot, or a time such as
    2026-01-31T12:00.

    Example: reef diff ./data users --from 1
    """
    with ExitStack() as stack:
        views = [stack.enter_context(_view(db, namespace, at)) for at in (start, end)]
        _print(output, f"changes of {namespace}", db.diff(*views), limit)


def _view(db: Database, namespace: str, at: str | None) -> PinnedReader:
    if at is None:
        return db.reader(namespace, pin=True)
    point = _parse_point(db, namespace, at)
    if isinstance(point, Snapshot):
        return db.reader(namespace, snapshot=point)
    return db.reader(namespace, as_of=point)


def _parse_point(db: Database, namespace: str, at: str) -> Any:
    """Return a POINT as the API takes it; text that names no snapshot is a time."""
    if at.isdigit():
        return int(at)
    if at.startswith("lsn:") and at[4:].isdigit():
        return {"lsn": int(at[4:])}
    return next((found for found in db.snapshots(namespace) if at in (found.id, found.name)), at)


@click.command("history", cls=ReefCommand)
@on_namespace
def history(output: Output, db: Database, namespace: str) -> None:
    """List the retained generations, newest first, with what each of them changed.

    Example: reef history ./data users
    """
    columns = ("generation", "published_at", "lsn", "rows", "bytes", "segments", "change")
    rows = [{name: getattr(one, name) for name in columns} for one in db.history(namespace)]
    output.table(f"history of {namespace}", columns, rows)


@click.command("rollback", cls=ReefCommand)
@on_namespace
@click.argument("to", metavar="POINT")
def rollback(output: Output, db: Database, namespace: str, *, to: str) -> None:
    """Give a namespace the rows that it had at a POINT, in one commit.

    A POINT is a generation, lsn:N, the name or id of a snapshot, or a time such as
    2026-01-31T12:00.

    Example: reef rollback ./data users 1
    """
    report = db.rollback(namespace, _parse_point(db, namespace, to))
    output.record(f"rolled back {namespace}", report.to_dict())


def _print(output: Output, title: str, found: Iterator[Difference], limit: int | None) -> None:
    rows = []
    for number, one in enumerate(found):
        if number == limit:
            break
        rows.append({name: getattr(one, name) for name in DIFF_COLUMNS})
    output.table(title, DIFF_COLUMNS, rows)
