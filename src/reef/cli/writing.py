"""`reef create`, `put` and `delete`: a few rows, by hand.

Each call is one batch: all of it is committed, or nothing. Whoever has many rows uses `import`.
"""

import sys
from dataclasses import asdict
from typing import IO, Any

import click
import pyarrow as pa

from reef.cli.options import (
    ReefCommand,
    encoding_option,
    on_namespace,
    open_writer,
    take_over_option,
)
from reef.cli.output import Output
from reef.cli.values import parse_bytes, parse_row, printable
from reef.engine.batch import Batch
from reef.engine.conditions import Condition, absent, present
from reef.engine.database import Database
from reef.engine.info import Info
from reef.errors import InvalidInputError, Kind, NotFoundError
from reef.formats.schema import DEFAULT_SCHEMA, Schema, arrow_type
from reef.types import KeyRange, Receipt

__all__ = ["create", "delete", "put"]


# --- create -------------------------------------------------------------------------


@click.command(cls=ReefCommand)
@on_namespace
@click.option(
    "--key",
    metavar="NAME[:TYPE]",
    help="The key's column, where there are others: string or binary. Default: id:string.",
)
@click.option(
    "-c", "--column", "columns", multiple=True, metavar="NAME:TYPE", help="A column. Repeatable."
)
def create(
    output: Output, db: Database, namespace: str, key: str | None, columns: tuple[str, ...]
) -> None:
    """Make a namespace: plain, or with columns.

    Without --column it is a key-value store: keys and values are bytes. Types are bool, int8 to
    int64, uint8 to uint64, float32, float64, string, binary, date, timestamp[us, UTC],
    decimal(10, 2), list<string>, vector<float32, 384> and the like. A namespace that is there
    with the same columns is left as it is.

    Example: reef create ./data events -c amount:float64 -c "at:timestamp[us, UTC]"
    """
    if key is not None and not columns:
        raise click.UsageError("--key needs a --column: a plain namespace has the key id")
    output.record(f"namespace {namespace}", _facts(_make(db, namespace, key or "id", columns)))


def _make(db: Database, namespace: str, key: str, columns: tuple[str, ...]) -> Info:
    if not columns:
        return db.create(namespace)
    schema = pa.schema([_field(key, "string"), *map(_field, columns)])
    return db.create(namespace, schema, key=key.partition(":")[0])


def _field(text: str, default: str = "") -> tuple[str, pa.DataType]:
    name, _, typed = text.partition(":")
    if not name or not (typed or default):
        raise click.BadParameter(f"{text!r} is not NAME:TYPE", param_hint="--column")
    try:
        return name, arrow_type(typed.strip() or default)
    except InvalidInputError as error:
        raise InvalidInputError(
            f"column {name}: {error.message}", kind=error.kind, hint="reef create --help lists them"
        ) from error


def _facts(info: Info) -> dict[str, Any]:
    columns = {field.name: str(field.type) for field in info.schema}
    return {"namespace": info.name, "generation": info.generation, "key": info.key} | {
        "columns": columns
    }


# --- put ----------------------------------------------------------------------------


class _Source(click.File):
    """A file to read from; a stdin that is closed is no empty value."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "-" and sys.stdin is None:
            self.fail("stdin is closed", param, ctx)
        return super().convert(value, param, ctx)


@click.command(cls=ReefCommand)
@on_namespace
@click.argument("pairs", nargs=-1, required=True, metavar="KEY VALUE…")
@click.option("--from", "source", type=_Source("rb"), help="Read the value; - is stdin.")
@click.option("--patch", is_flag=True, help="Set only the columns that are named.")
@click.option(
    "--ttl", "ttl_s", type=float, metavar="SECONDS", help="The rows expire after so long."
)
@click.option("--if-absent", is_flag=True, help="Only if no key given has a row.")
@click.option("--if-present", is_flag=True, help="Only if every key given has one.")
@click.option("--idempotency-key", metavar="TEXT", help="Commit once, however often it is tried.")
@take_over_option
@encoding_option
def put(
    output: Output,
    db: Database,
    namespace: str,
    *,
    pairs: tuple[str, ...],
    source: IO[bytes] | None,
    take_over: bool,
    idempotency_key: str | None,
    **how: Any,
) -> None:
    """Set keys to values, or to rows.

    In a plain namespace a value is bytes; where there are columns it is a JSON object, such as
    '{"amount": 7.0}'. Several pairs are one batch. A namespace that is not there is made.
    Refuses, and changes nothing, if another writer wrote within the last minute.

    Example: reef put ./data users u1 Ada
    """
    if how["patch"] and how["ttl_s"] is not None:
        raise click.UsageError("--ttl: a patch cannot change when a row expires")
    rows = _pairs(output, pairs, source)
    when = _conditions([key for key, _ in rows], how["if_absent"], how["if_present"])
    batch = _puts(output, _schema(db, namespace), rows, how["patch"], how["ttl_s"])
    with open_writer(db, namespace, take_over) as writer:
        receipt = writer.write(batch, idempotency_key=idempotency_key, when=when)
    _tell(output, receipt)


def _pairs(
    output: Output, pairs: tuple[str, ...], source: IO[bytes] | None
) -> list[tuple[bytes, str | bytes]]:
    """Return keys and values; a value from a file is bytes, others are still text."""
    if source is not None and len(pairs) != 1:
        raise click.UsageError("--from takes the place of VALUE: give one KEY")
    if source is None and len(pairs) % 2:
        raise click.UsageError(f"KEY {pairs[-1]!r} has no VALUE")
    values = [source.read()] if source is not None else pairs[1::2]
    keys = [parse_bytes(key, output.encoding, "the key") for key in pairs[:: 1 if source else 2]]
    return list(zip(keys, values, strict=True))


def _schema(db: Database, namespace: str) -> Schema:
    """Return the columns there are, or those of the namespace that would be made."""
    try:
        info = db.info(namespace)
    except NotFoundError:
        return DEFAULT_SCHEMA
    return Schema.of(info.schema, info.key)


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
            raise InvalidInputError("--patch: a plain namespace has no columns to choose from")
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
    """Return a row of JSON; of several, an error names the key of the one that is wrong."""
    try:
        return parse_row(text, schema.arrow(), output.encoding)
    except InvalidInputError as error:
        told = f"key {printable(key, output.encoding)}: {error.message}"
        raise InvalidInputError(told, kind=error.kind, hint=error.hint) from error


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")


def _key(schema: Schema, key: bytes) -> bytes | str:
    if schema.key.type != "string":
        return key
    try:
        return key.decode()
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"key {key!r} is not text", kind=Kind.INVALID_KEY) from error


def _conditions(keys: list[bytes], if_absent: bool, if_present: bool) -> list[Condition]:
    if if_absent and if_present:
        raise click.UsageError("--if-absent and --if-present exclude each other")
    return [absent(key) for key in keys if if_absent] + [present(key) for key in keys if if_present]


# --- delete -------------------------------------------------------------------------


@click.command(cls=ReefCommand)
@on_namespace
@click.argument("keys", nargs=-1, metavar="[KEY]…")
@click.option("--start", metavar="KEY", help="With --end: all keys from this one on …")
@click.option("--end", metavar="KEY", help="… up to this one, itself not included.")
@click.option("--prefix", metavar="KEY", help="All keys that begin so.")
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

    A key that has no row is fine. Refuses, and changes nothing, if another writer wrote within
    the last minute.

    Example: reef delete ./data users u1
    """
    batch = _deletes(output, keys, start, end, prefix)
    db.info(namespace)  # a namespace that is not there is not made to delete from it
    with open_writer(db, namespace, take_over) as writer:
        _tell(output, writer.write(batch))


def _deletes(
    output: Output, keys: tuple[str, ...], start: str | None, end: str | None, prefix: str | None
) -> Batch:
    if not keys and prefix is None and (start is None or end is None):
        raise click.UsageError("give a KEY, --prefix, or --start and --end")
    batch = Batch()
    for key in keys:
        batch.delete(parse_bytes(key, output.encoding, "the key"))
    if prefix is not None:
        found = KeyRange.of_prefix(parse_bytes(prefix, output.encoding, "--prefix"))
        if not found.start or found.end is None:
            raise click.UsageError("--prefix is too wide: name a range with --start and --end")
        batch.delete_range(found.start, found.end)
    if start is not None and end is not None:
        first, last = (parse_bytes(text, output.encoding, "a bound") for text in (start, end))
        batch.delete_range(first, last)
    elif start is not None or end is not None:
        raise click.UsageError("--start and --end belong together")
    return batch


def _tell(output: Output, receipt: Receipt) -> None:
    if output.is_json:
        output.json(asdict(receipt))
        return
    done = "was committed before" if receipt.replayed else "committed"
    count = "1 operation" if receipt.ops == 1 else f"{receipt.ops} operations"
    output.line(f"{done} at LSN {receipt.lsn}: {count} in {receipt.namespace}")
