"""Reads: `reef get`, `scan`, `changes`, `cursors`, `snapshot` and `export`."""

from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from typing import Any

import click
import pyarrow as pa

from reef.cli.options import (
    EXIT_PROBLEMS,
    NUMBER,
    CountingExecutor,
    ReefCommand,
    as_of_options,
    encoding_option,
    engine_options,
    executing,
    job,
    on_bucket,
    on_namespace,
    open_reader,
    range_options,
)
from reef.cli.output import Output, parse_bytes, printable
from reef.engine.handles.database import Database
from reef.engine.handles.pinned import PinnedReader
from reef.engine.handles.reader import Reader
from reef.engine.history.change_rows import Change
from reef.engine.history.changes import ChangeCursor, cursor_lags
from reef.engine.history.snapshots import Snapshot
from reef.engine.rows.json_values import python_rows
from reef.errors import CorruptionError, ErrorKind, NotFoundError
from reef.jobs.arguments import open_files
from reef.jobs.transfer.export import COMPRESSIONS, SEAL, SUFFIXES, TASKS_AT_ONCE
from reef.runtime import Executor


@click.command(cls=ReefCommand)
@on_namespace
@as_of_options
@click.argument("key")
@click.option("--columns", metavar="A,B", help="Select these columns, in this order.")
@click.option("--raw", is_flag=True, help="Print the bytes of the value, unchanged.")
@encoding_option
def get(
    output: Output,
    db: Database,
    namespace: str,
    *,
    key: str,
    columns: str | None,
    raw: bool,
    as_of: dict[str, Any],
) -> int:
    """Print the value or the row of a key.

    Exit with 1 if the key has no row, and with 2 if damage hides newer writes.

    Example: reef get ./data users u1
    """
    encoded = parse_bytes(key, output.encoding, "the key")
    with closing(open_reader(db, namespace, as_of)) as reader:
        table = reader.get_many([encoded], _selected(columns))
        found = table.column("_found")[0].as_py()
        rows = python_rows(table.drop_columns(["_found"]).to_batches()[0])
        damage = _damage_of(reader)
    if not found:
        raise damage or NotFoundError(
            f"{printable(encoded, output.encoding)} has no row in {namespace}", key=encoded
        )
    _show(output, namespace, encoded, rows[0], raw)
    return _warn(output, damage)


def _show(output: Output, namespace: str, key: bytes, row: dict[str, Any], raw: bool) -> None:
    plain = "id" in row and list(row)[1:] == ["value"] and isinstance(row["value"], bytes)
    if raw and not plain:
        raise click.UsageError(f"--raw requires a plain namespace; {namespace} has columns")
    if raw:
        output.raw(row["value"])
    elif plain and not output.is_json:
        output.line(printable(row["value"], output.encoding, lines=True))
    else:
        output.record(printable(key, output.encoding), row)


def _selected(columns: str | None) -> list[str] | None:
    return None if columns is None else [name.strip() for name in columns.split(",")]


@click.command(cls=ReefCommand)
@on_namespace
@range_options
@as_of_options
@click.option("--columns", metavar="A,B", help="Select these columns, in this order.")
@click.option(
    "--where", metavar="TEXT", help="Select rows, such as \"amount > 5 AND state = 'open'\"."
)
@click.option("--reverse", is_flag=True, help="Print the last key first.")
@click.option("--limit", type=NUMBER, metavar="N", help="Print at most this many rows.")
@encoding_option
def scan(
    output: Output,
    db: Database,
    namespace: str,
    *,
    bounds: dict[str, Any],
    as_of: dict[str, Any],
    columns: str | None,
    **how: Any,
) -> int:
    """Print rows in key order.

    With --output json, print one object per line, as rows are read. Exit with 2 if damage hides
    newer writes.

    Example: reef scan ./data users --prefix u --limit 10
    """
    with closing(open_reader(db, namespace, as_of)) as reader:
        code = _warn(output, _damage_of(reader))
        with reader.scan_arrow(**bounds, columns=_selected(columns), **how) as batches:
            output.stream(batches.schema.names, _rows(batches))
    return code


def _rows(batches: pa.RecordBatchReader) -> Iterator[dict[str, Any]]:
    for batch in batches:
        yield from python_rows(batch)


def _damage_of(reader: Reader | PinnedReader) -> CorruptionError | None:
    """Return the damage that hides newer rows from a reader (H17, H18)."""
    return getattr(reader, "damage", None)


def _warn(output: Output, damage: CorruptionError | None) -> int:
    """Report damage that hides newer rows; return the exit code."""
    if damage is None:
        return 0
    output.errors.print(f"damaged; showing older rows: {damage}", markup=False, style="red")
    return EXIT_PROBLEMS


@click.command(cls=ReefCommand)
@on_namespace
@click.option(
    "--after",
    "after_lsn",
    type=NUMBER,
    default=0,
    metavar="LSN",
    help="Start after this LSN. Default: 0.",
)
@click.option("--cursor", metavar="NAME", help="Resume at the position of this cursor.")
@click.option("--commit", is_flag=True, help="Commit the position of --cursor at the end.")
@click.option("--follow", is_flag=True, help="Wait for more at the end of the log.")
@click.option(
    "--timeout",
    "timeout_s",
    type=float,
    metavar="SECONDS",
    help="Stop --follow after this time without a change.",
)
@click.option("--limit", type=NUMBER, metavar="N", help="Print at most this many changes.")
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
    """Print committed operations in log order.

    Read the log after an LSN, if it is still retained, or with a registered cursor, for which it is
    retained. With --output json, print one object per line.

    Example: reef changes ./data users --after 0 --limit 10
    """
    if how["timeout_s"] is not None and not how["follow"]:
        raise click.UsageError("--timeout requires --follow")
    if commit and (cursor is None or limit is not None):
        raise click.UsageError("--commit requires --cursor, and excludes --limit")
    if cursor is None:
        with closing(db.reader(namespace)) as reader:
            _print(output, reader.changes(**how), limit)
    else:
        if how["after_lsn"]:
            raise click.UsageError("--after and --cursor exclude each other")
        with _open(db, namespace, cursor) as reading:
            found = reading.follow(how["timeout_s"]) if how["follow"] else iter(reading)
            _print(output, found, limit)
            if commit:
                output.note(f"committed up to LSN {reading.commit()}")


def _open(db: Database, namespace: str, name: str) -> ChangeCursor:
    """Open an existing cursor; reading registers none by accident."""
    if name not in db.cursors(namespace):
        raise NotFoundError(
            f"{namespace} has no cursor {name!r}", hint="Register it with reef cursors register"
        )
    return db.cursor(namespace, name)


def _print(output: Output, found: Iterator[Change], limit: int | None) -> None:
    for change in islice(found, limit):
        if output.is_json:
            output.json(change.to_dict())
        else:
            output.line(_line(output, change))
        output.flush()  # show each change at once


def _line(output: Output, change: Change) -> str:
    where = f"{change.lsn}.{change.seq}"
    key = output.cell(change.key)
    if change.op == "delete_range":
        end = "" if change.end_key is None else f" {output.cell(change.end_key)}"
        key = f"{key} …{end}"
    return f"{where:<10} {change.op:<12} {key}  {output.cell(change.row)}".rstrip()


@click.group()
def cursors() -> None:
    """Manage cursors, for which the log is retained."""


@cursors.command("list", cls=ReefCommand)
@on_namespace
def list_cursors(output: Output, db: Database, namespace: str) -> None:
    """List the cursors, their committed LSNs, and how many LSNs each is behind.

    Example: reef cursors list ./data users
    """
    found = cursor_lags(db.store, namespace).items()
    rows = [{"name": name, "lsn": lsn, "lag": lag} for name, (lsn, lag) in found]
    output.table(f"cursors of {namespace}", ("name", "lsn", "lag"), rows)


@cursors.command("register", cls=ReefCommand)
@on_namespace
@click.argument("name")
@click.option(
    "--after",
    "after_lsn",
    type=NUMBER,
    metavar="LSN",
    help="Start after this LSN. Default: the end of the log.",
)
def register(
    output: Output, db: Database, namespace: str, *, name: str, after_lsn: int | None
) -> None:
    """Register a cursor at the end of the log, or after an LSN.

    An existing cursor keeps its position. Drop a cursor that is no longer read: the log is retained
    for it.

    Example: reef cursors register ./data users billing --after 0
    """
    with db.cursor(namespace, name, after_lsn) as found:
        output.record(f"cursor of {namespace}", {"name": name, "lsn": found.committed})


@cursors.command("drop", cls=ReefCommand)
@on_namespace
@click.argument("name")
def drop(output: Output, db: Database, namespace: str, *, name: str) -> None:
    """Unregister a cursor, so that the log is no longer retained for it.

    Example: reef cursors drop ./data users billing
    """
    lsn = db.cursors(namespace).get(name)
    if lsn is None:
        raise NotFoundError(f"{namespace} has no cursor {name!r}", cursor=name)
    db.drop_cursor(namespace, name)
    output.record(f"dropped cursor of {namespace}", {"name": name, "lsn": lsn})


COLUMNS = ("name", "id", "generation", "expires_at")


@click.group()
def snapshot() -> None:
    """Take, list, extend and release snapshots."""


@snapshot.command("take", cls=ReefCommand)
@on_namespace
@click.argument("name", required=False)
@click.option(
    "--ttl", "ttl_s", type=float, metavar="SECONDS", help="Expire after this time. Default: never."
)
@click.option("--generation", type=NUMBER, metavar="N", help="Pin this generation.")
def take(
    output: Output,
    db: Database,
    namespace: str,
    *,
    name: str | None,
    ttl_s: float | None,
    generation: int | None,
) -> None:
    """Pin everything that is committed now.

    Example: reef snapshot take ./data users monday --ttl 86400
    """
    taken = db.snapshot(namespace, name, ttl_s=ttl_s, generation=generation)
    output.record(f"snapshot of {namespace}", _facts(taken))


@snapshot.command("list", cls=ReefCommand)
@on_namespace
def list_snapshots(output: Output, db: Database, namespace: str) -> None:
    """List the snapshots, oldest first.

    Example: reef snapshot list ./data users
    """
    rows = [_facts(found) for found in db.snapshots(namespace)]
    output.table(f"snapshots of {namespace}", COLUMNS, rows)


@snapshot.command("extend", cls=ReefCommand)
@on_namespace
@click.argument("name")
@click.option(
    "--ttl",
    "ttl_s",
    type=float,
    metavar="SECONDS",
    help="Expire after this time, from now. Default: never.",
)
def extend(output: Output, db: Database, namespace: str, *, name: str, ttl_s: float | None) -> None:
    """Set when a snapshot, by name or id, expires.

    Example: reef snapshot extend ./data users monday --ttl 172800
    """
    found = find_snapshot(db, namespace, name)
    found.extend(ttl_s)
    output.record(f"snapshot of {namespace}", _facts(found))


@snapshot.command("release", cls=ReefCommand)
@on_namespace
@click.argument("name")
def release(output: Output, db: Database, namespace: str, *, name: str) -> None:
    """Release a snapshot, by name or id.

    Example: reef snapshot release ./data users monday
    """
    found = find_snapshot(db, namespace, name)
    found.release()
    output.record(f"released snapshot of {namespace}", _facts(found))


@snapshot.command("take-all", cls=ReefCommand)
@on_bucket
@click.argument("name")
@click.option(
    "--ttl", "ttl_s", type=float, metavar="SECONDS", help="Expire after this time. Default: never."
)
def take_all(output: Output, db: Database, *, name: str, ttl_s: float | None) -> None:
    """Pin all namespaces of a bucket under one name.

    A name can be used again when all of its snapshots were released or have expired.

    Example: reef snapshot take-all ./data nightly --ttl 86400
    """
    taken = db.snapshot_all(name, ttl_s=ttl_s)
    rows = [{"namespace": of, **_facts(one)} for of, one in sorted(taken.items())]
    output.table(f"snapshot {name} of {db.store.url}", ("namespace", *COLUMNS), rows)


@snapshot.command("list-all", cls=ReefCommand)
@on_bucket
def list_all(output: Output, db: Database) -> None:
    """List the snapshots of all namespaces of a bucket, by name.

    Example: reef snapshot list-all ./data
    """
    columns = ("name", "taken_at", "is_complete", "namespaces")
    rows = [
        {**{name: getattr(one, name) for name in columns}, "namespaces": len(one.namespaces)}
        for one in db.bucket_snapshots()
    ]
    output.table(f"snapshots of {db.store.url}", columns, rows)


@snapshot.command("release-all", cls=ReefCommand)
@on_bucket
@click.argument("name")
def release_all(output: Output, db: Database, *, name: str) -> None:
    """Release the snapshots that take-all has taken under a name.

    Example: reef snapshot release-all ./data nightly
    """
    db.release_snapshot_all(name)
    output.record(f"released snapshot of {db.store.url}", {"name": name})


def find_snapshot(db: Database, namespace: str, name: str) -> Snapshot:
    """Return a snapshot by name or id; NotFoundError if there is none."""
    for found in db.snapshots(namespace):
        if name in (found.id, found.name):
            return found
    raise NotFoundError(
        f"{namespace} has no snapshot {name!r}: it was never taken, was released, or has expired",
        kind=ErrorKind.COLLECTED,
        hint="List them with reef snapshot list",
    )


def _facts(found: Snapshot) -> dict[str, Any]:
    return {name: getattr(found, name) for name in COLUMNS}


# --- export -------------------------------------------------------------------------


class _ExportFormat(click.Choice):  # type: ignore[type-arg]  # only newer releases are generic
    """A format of files; the error for CSV says what writes it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "csv":
            from reef.jobs.transfer.export import CSV_HINT

            known = ", ".join(map(repr, self.choices))
            self.fail(f"'csv' is not one of {known}. {CSV_HINT}", param, ctx)
        return super().convert(value, param, ctx)


@click.command("export", cls=ReefCommand)
@on_namespace
@range_options
@as_of_options
@click.argument("target")
@click.option(
    "--format",
    "form",
    type=_ExportFormat(list(COMPRESSIONS)),
    default="parquet",
    show_default=True,
    help="Write files of this format.",
)
@click.option("--columns", metavar="A,B", help="Select these columns, in this order.")
@click.option(
    "--where", metavar="TEXT", help="Select rows, such as \"amount > 5 AND state = 'open'\"."
)
@click.option(
    "--rows-per-file",
    type=click.IntRange(min=1),
    metavar="N",
    help="Write at most this many rows to a file.",
)
@engine_options
@encoding_option
def export_command(
    output: Output,
    db: Database,
    namespace: str,
    *,
    target: str,
    form: str,
    bounds: dict[str, bytes | None],
    as_of: dict[str, Any],
    columns: str | None,
    engine: str,
    master: str | None,
    **how: Any,
) -> None:
    """Write rows to Parquet, Arrow or JSON-lines files.

    The target is a directory or bucket without such files; rows are in key order. _export.json is
    written last and lists all files: an export without it is incomplete. Options of the target's
    store are part of its URL, such as s3://bucket/out?region=eu-west-1; --option applies to the
    bucket that is read.

    Example: reef export ./data users ./exported
    """
    given = {name: value for name, value in (how | bounds).items() if value is not None}
    if "snapshot" in as_of:
        given["snapshot"] = as_of["snapshot"]
    elif as_of:
        given["as_of"] = as_of
    if columns is not None:
        given["columns"] = [name.strip() for name in columns.split(",")]
    executor: Executor | None = None
    try:
        with executing(
            output,
            db,
            f"exporting {namespace}",
            engine=engine,
            master=master,
            at_once=TASKS_AT_ONCE,
        ) as executor:
            report = job("export")(db, namespace, target, format=form, executor=executor, **given)
    except KeyboardInterrupt:
        _remove_files(target, executor)
        raise
    output.report(f"exported {namespace}", report)


def _remove_files(target: str, executor: Executor | None) -> None:
    """Delete the files of an interrupted export, so that it can be run again.

    The job has checked that there were no such files before its first task; it deletes its files
    itself after a failure.
    """
    if isinstance(executor, CountingExecutor) and executor.has_begun:
        files = open_files(target)
        written = [info.key for info in files.list()]
        if SEAL not in written:  # otherwise the export is complete
            files.delete_many([key for key in written if key.endswith(SUFFIXES)])
