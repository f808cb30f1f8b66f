"""Writes: `reef create`, `put`, `delete`, `drop`, `undrop`, `rename`, `jobs` and `import`.

Each `put` and `delete` commits one batch atomically; `import` commits the rows of files, a batch at
a time.
"""

import sys
from dataclasses import asdict
from typing import IO, Any

import click
import pyarrow as pa

from reef.cli.options import (
    ReefCommand,
    create_option,
    encoding_option,
    job,
    on_bucket,
    on_namespace,
    open_writer,
    progress,
    suggesting_create,
    suggesting_take_over,
    take_over_option,
)
from reef.cli.output import Output, parse_bytes, parse_row, printable
from reef.config import WriterSettings
from reef.engine.handles.database import Database
from reef.engine.handles.transaction import Condition, absent, present
from reef.engine.registry import RunningJob
from reef.engine.rows.batch import Batch, check_idempotency_key, encode_batch
from reef.engine.stats import NamespaceInfo
from reef.errors import ErrorKind, InvalidInputError, NotFoundError
from reef.formats.schema import DEFAULT_SCHEMA, Schema, parse_type
from reef.jobs.transfer.import_ import ImportProgress
from reef.types import KeyRange, Receipt

# --- create -------------------------------------------------------------------------


@click.command(cls=ReefCommand)
@on_namespace
@click.option(
    "--key",
    metavar="NAME[:TYPE]",
    help="Name the key column; its type is string or binary. Default: id:string.",
)
@click.option(
    "-c",
    "--column",
    "columns",
    multiple=True,
    metavar="NAME:TYPE",
    help="Add a column. Repeatable.",
)
def create(
    output: Output, db: Database, namespace: str, key: str | None, columns: tuple[str, ...]
) -> None:
    """Create a namespace: plain, or with columns.

    Without --column it is a key-value store: keys and values are bytes. Types are bool, int8 to
    int64, uint8 to uint64, float32, float64, string, binary, date, time[us], timestamp[us, UTC],
    decimal(10, 2), list<string>, vector<float32, 384>, map<string, int64>,
    struct<city: string, zip: int32> and the like; Arrow's names, such as time64[us], mean the same.
    An existing namespace with the same columns is left unchanged.

    Example: reef create ./data events -c amount:float64 -c "at:timestamp[us, UTC]"
    """
    if key is not None and not columns:
        raise click.UsageError("--key requires --column: the key of a plain namespace is id")
    output.record(f"namespace {namespace}", _facts(_make(db, namespace, key or "id", columns)))


def _make(db: Database, namespace: str, key: str, columns: tuple[str, ...]) -> NamespaceInfo:
    if not columns:
        return db.create(namespace)
    schema = pa.schema([_field(key, "string"), *map(_field, columns)])
    return db.create(namespace, schema, key=key.partition(":")[0])


def _field(text: str, default: str = "") -> tuple[str, pa.DataType]:
    name, _, typed = text.partition(":")
    if not name or not (typed or default):
        raise click.BadParameter(f"{text!r} is not NAME:TYPE", param_hint="--column")
    try:
        return name, parse_type(typed.strip() or default)
    except InvalidInputError as error:
        raise InvalidInputError(
            f"column {name}: {error.message}",
            kind=error.kind,
            hint="See the types in reef create --help",
        ) from error


def _facts(info: NamespaceInfo) -> dict[str, Any]:
    columns = {field.name: str(field.type) for field in info.schema}
    return {"namespace": info.name, "generation": info.generation, "key": info.key} | {
        "columns": columns
    }


# --- put ----------------------------------------------------------------------------


class _InputFile(click.File):
    """A file to read from; a closed stdin is an error, not an empty value."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "-" and sys.stdin is None:
            self.fail("stdin is closed", param, ctx)
        return super().convert(value, param, ctx)


@click.command(cls=ReefCommand)
@on_namespace
@click.argument("pairs", nargs=-1, required=True, metavar="KEY VALUE…")
@click.option(
    "--from", "source", type=_InputFile("rb"), help="Read the value from a file; - is stdin."
)
@click.option("--patch", is_flag=True, help="Set only the named columns.")
@click.option(
    "--ttl", "ttl_s", type=float, metavar="SECONDS", help="Expire the rows after this time."
)
@click.option("--if-absent", is_flag=True, help="Write only if none of the keys has a row.")
@click.option("--if-present", is_flag=True, help="Write only if all of the keys have a row.")
@click.option(
    "--idempotency-key", metavar="TEXT", help="Commit once, even if the command is repeated."
)
@create_option
@take_over_option
@encoding_option
def put(
    output: Output,
    db: Database,
    namespace: str,
    *,
    pairs: tuple[str, ...],
    source: IO[bytes] | None,
    create: bool,
    take_over: bool,
    idempotency_key: str | None,
    **how: Any,
) -> None:
    """Set keys to values, or to rows.

    In a plain namespace a value is bytes; where there are columns it is a JSON object, such as
    '{"amount": 7.0}'. Several pairs are one batch. With --create, create a plain namespace if it
    does not exist. Fail without a change if another writer is active.

    Example: reef put ./data users u1 Ada
    """
    if how["patch"] and how["ttl_s"] is not None:
        raise click.UsageError("--ttl and --patch exclude each other")
    rows = _pairs(output, pairs, source)
    when = _conditions([key for key, _ in rows], how["if_absent"], how["if_present"])
    schema = _schema(db, namespace, create)
    batch = _puts(output, schema, rows, how["patch"], how["ttl_s"])
    _check(batch, schema, idempotency_key)
    with open_writer(db, namespace, take_over, create) as writer:
        receipt = writer.write(batch, idempotency_key=idempotency_key, when=when)
    _print_receipt(output, receipt)


def _pairs(
    output: Output, pairs: tuple[str, ...], source: IO[bytes] | None
) -> list[tuple[bytes, str | bytes]]:
    """Return keys and values; a value from a file is bytes, others are text."""
    if source is not None and len(pairs) != 1:
        raise click.UsageError("--from requires exactly one KEY, without a VALUE")
    if source is None and len(pairs) % 2:
        raise click.UsageError(f"KEY {pairs[-1]!r} has no VALUE")
    values = [source.read()] if source is not None else pairs[1::2]
    keys = [parse_bytes(key, output.encoding, "the key") for key in pairs[:: 1 if source else 2]]
    return list(zip(keys, values, strict=True))


def _schema(db: Database, namespace: str, create: bool) -> Schema:
    """Return the schema of a namespace, or of the one that will be created."""
    try:
        info = db.info(namespace)
    except NotFoundError as error:
        if create:
            return DEFAULT_SCHEMA
        create_it = f"--create creates {namespace}"
        error.hint = f"{error.hint} {create_it}" if error.hint else create_it
        raise
    return Schema.of(info.schema, info.key)


def _check(batch: Batch, schema: Schema, idempotency_key: str | None) -> None:
    """Reject a bad batch before the writer role is acquired."""
    encode_batch(batch, schema, WriterSettings().batch_bytes_max)
    check_idempotency_key(idempotency_key)


def _puts(
    output: Output,
    schema: Schema,
    rows: list[tuple[bytes, str | bytes]],
    patch: bool,
    ttl_s: float | None,
) -> Batch:
    batch = Batch()
    if schema.is_plain:
        if patch:
            raise InvalidInputError("--patch requires a namespace with columns")
        for key, value in rows:
            raw = parse_bytes(value, output.encoding) if isinstance(value, str) else value
            batch.put(key, raw, ttl_s=ttl_s)
        return batch
    for key, value in rows:
        row = _row(output, schema, key, _text(value))
        if patch:
            batch.patch([{schema.key.name: _key(schema, key), **row}])
        else:
            batch.put(key, row, ttl_s=ttl_s)
    return batch


def _row(output: Output, schema: Schema, key: bytes, text: str) -> dict[str, Any]:
    """Parse a row from JSON; an error names its key."""
    try:
        return parse_row(text, schema.arrow(), output.encoding)
    except InvalidInputError as error:
        message = f"key {printable(key, output.encoding)}: {error.message}"
        raise InvalidInputError(message, kind=error.kind, hint=error.hint) from error


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")


def _key(schema: Schema, key: bytes) -> bytes | str:
    if schema.key.type != "string":
        return key
    try:
        return key.decode()
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"key {key!r} is not text", kind=ErrorKind.INVALID_KEY) from error


def _conditions(keys: list[bytes], if_absent: bool, if_present: bool) -> list[Condition]:
    if if_absent and if_present:
        raise click.UsageError("--if-absent and --if-present exclude each other")
    return [absent(key) for key in keys if if_absent] + [present(key) for key in keys if if_present]


# --- delete -------------------------------------------------------------------------


@click.command(cls=ReefCommand)
@on_namespace
@click.argument("keys", nargs=-1, metavar="[KEY]…")
@click.option("--start", metavar="KEY", help="Delete all keys from this one; requires --end.")
@click.option("--end", metavar="KEY", help="Stop before this key; requires --start.")
@click.option("--prefix", metavar="KEY", help="Delete all keys with this prefix.")
@take_over_option
@encoding_option
def delete(
    output: Output,
    db: Database,
    namespace: str,
    *,
    keys: tuple[str, ...],
    start: str | None,
    end: str | None,
    prefix: str | None,
    take_over: bool,
) -> None:
    """Delete keys, or ranges of them.

    A key without a row is not an error. Fail without a change if another writer is active.

    Example: reef delete ./data users u1
    """
    batch = _deletes(output, keys, start, end, prefix)
    db.info(namespace)  # a missing namespace is reported before anything is written
    with open_writer(db, namespace, take_over) as writer:
        _print_receipt(output, writer.write(batch))


def _deletes(
    output: Output, keys: tuple[str, ...], start: str | None, end: str | None, prefix: str | None
) -> Batch:
    if not keys and prefix is None and (start is None or end is None):
        raise click.UsageError("pass a KEY, --prefix, or --start and --end")
    batch = Batch()
    for key in keys:
        batch.delete(parse_bytes(key, output.encoding, "the key"))
    if prefix is not None:
        found = KeyRange.of_prefix(parse_bytes(prefix, output.encoding, "--prefix"))
        if not found.start or found.end is None:
            raise click.UsageError("--prefix matches all keys: pass --start and --end instead")
        batch.delete_range(found.start, found.end)
    if start is not None and end is not None:
        first, last = (parse_bytes(text, output.encoding, "a bound") for text in (start, end))
        batch.delete_range(first, last)
    elif start is not None or end is not None:
        raise click.UsageError("--start and --end require each other")
    return batch


def _print_receipt(output: Output, receipt: Receipt) -> None:
    if output.is_json:
        output.json(asdict(receipt))
        return
    done = "was committed before" if receipt.replayed else "committed"
    count = "1 operation" if receipt.ops == 1 else f"{receipt.ops} operations"
    output.line(f"{done} at LSN {receipt.lsn}: {count} in {receipt.namespace}")


COLUMNS = ("namespace", "kind", "id", "where", "since", "heartbeat", "progress", "state")


@click.command(cls=ReefCommand)
@on_namespace
def drop(output: Output, db: Database, namespace: str) -> None:
    """Drop a namespace: fence its writer and make it invisible.

    `undrop` restores it until `sweep` deletes its data, a day later.

    Example: reef drop ./data users
    """
    db.drop(namespace)
    output.record("dropped", {"namespace": namespace})


@click.command(cls=ReefCommand)
@on_namespace
@click.argument("to")
def rename(output: Output, db: Database, namespace: str, *, to: str) -> None:
    """Give a namespace another name.

    Its writer is fenced; no object is copied. Opening the former name is an error that has the new
    one. Run it again if it was interrupted.

    Example: reef rename ./data users accounts
    """
    info = db.rename(namespace, to)
    output.record("renamed", {"namespace": namespace, "to": to, "generation": info.generation})


@click.command(cls=ReefCommand)
@on_namespace
def undrop(output: Output, db: Database, namespace: str) -> None:
    """Restore a dropped namespace.

    Example: reef undrop ./data users
    """
    info = db.undrop(namespace)
    output.record("restored", {"namespace": namespace, "generation": info.generation})


@click.command(cls=ReefCommand)
@on_bucket
@click.argument("namespace", required=False)
@click.option("--deep", is_flag=True, help="Read every namespace, also in a bucket of many.")
def jobs(output: Output, db: Database, namespace: str | None, deep: bool) -> None:
    """List the jobs that run in a bucket or a namespace, with their progress.

    Example: reef jobs ./data
    """
    found = db.jobs(namespace, deep=deep)
    if output.is_json:
        output.json([job.to_dict() for job in found])
        return
    output.table(f"jobs of {db.store.url}", COLUMNS, [_job_row(job) for job in found])


def _job_row(job: RunningJob) -> dict[str, str]:
    return {
        "namespace": job.namespace,
        "kind": job.kind,
        "id": job.id,
        "where": job.where or "?",
        "since": _age(job.since_s),
        "heartbeat": _age(job.heartbeat_s),
        "progress": ", ".join(f"{count:,} {unit}" for unit, count in job.progress.items()),
        "state": "stale" if job.is_stale else "running",
    }


def _age(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds:,.0f} s ago"


# --- import -------------------------------------------------------------------------


@click.command("import", cls=ReefCommand)
@on_namespace
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE…")
@click.option("--key", metavar="NAME", help="Use this column as the key.")
@click.option(
    "--mode",
    type=click.Choice(["upsert", "patch"]),
    default="upsert",
    show_default=True,
    help="Write whole rows, or only the columns that the files have.",
)
@click.option(
    "--batch-rows",
    type=click.IntRange(min=1),
    default=50_000,
    show_default=True,
    metavar="N",
    help="Commit this many rows at a time.",
)
@click.option(
    "--create/--no-create",
    default=False,
    help="Create the namespace with the columns of the files if it does not exist.",
)
@take_over_option
def import_command(
    output: Output, db: Database, namespace: str, *, sources: tuple[str, ...], **how: Any
) -> None:
    """Write the rows of Parquet, Arrow, CSV or JSON-lines files into a namespace.

    Columns of CSV and JSON get the types of the namespace; create it first, or --create infers them
    from the first rows. A source is a file, or a directory or URL of files. Each batch is committed
    once: run an interrupted import again to resume it. Options of a source's store are part of its
    URL, such as s3://bucket/in?region=eu-west-1; --option applies to the bucket that is written to.

    Example: reef import ./data people people.parquet --create
    """
    with progress(output, f"importing into {namespace}", "rows") as meter:

        def show(at: ImportProgress) -> None:
            """Extrapolate the total from the files that are done."""
            meter.reach(at.rows, at.rows * at.files // at.files_done if at.files_done else None)

        try:
            with suggesting_take_over(), suggesting_create(namespace):
                report = job("import_")(db, namespace, list(sources), progress=show, **how)
        except KeyboardInterrupt:
            output.note(f"{meter.done} rows were committed; run the command again to resume")
            raise
    output.report(f"imported into {namespace}", report)
