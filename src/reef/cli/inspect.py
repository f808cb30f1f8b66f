"""`reef inspect` and `reef log`: the contents of one object, and of local logs.

`reef inspect` prints one object and its damage, and writes nothing. Parts of a damaged object that
can still be read are printed, with the offset of each part that cannot. A segment is read group by
group, so that memory is bounded.

`reef log` prints and verifies local logs, and uploads their pending batches. `pending` and
`reapply` are for recovery: after a crash, or when another writer took over a namespace whose last
writes are on this disk only.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import click
import msgspec

from reef import stores
from reef.cli.options import (
    EXIT_PROBLEMS,
    NUMBER,
    ReefCommand,
    encoding_option,
    on_bucket,
    on_namespace,
    parse_options,
    store_options,
    suggesting_take_over,
    take_over_option,
)
from reef.cli.output import Output
from reef.engine.context import NamespaceContext
from reef.engine.handles.database import Database
from reef.engine.history.change_rows import OP_NAMES
from reef.engine.local.open import namespace_of, read_pending
from reef.errors import (
    UNDECODABLE,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    UnsupportedFormatError,
)
from reef.formats.coding import ByteReader, decode_msgpack, read_frame
from reef.formats.manifest import decode_manifest
from reef.formats.schema import Schema
from reef.formats.segment import HEAD as SEGMENT_HEAD
from reef.formats.segment import MAGIC as SEGMENT_MAGIC
from reef.formats.segment import VERSION as SEGMENT_VERSION
from reef.formats.segment import SegmentTail, decode_tail
from reef.formats.wal_object import FOOTER, HEAD, WalHeader, WalObject, decode_ops
from reef.locallog.encoding import BINARY, EntryType
from reef.locallog.inspect import dump_entries, dump_frames, frame_name, verify_log
from reef.manifest.head import newest_incarnation
from reef.manifest.invariants import check_loaded
from reef.manifest.roots import GenerationLease
from reef.paths import Namespace, number_of
from reef.stores import Store
from reef.stores.base import current_time_s

TAIL_BYTES = 16 << 20
"""Bytes read from the end of a segment: enough for the filter and index of a gigabyte."""
DAMAGED = (CorruptionError, UnsupportedFormatError)


@dataclass(frozen=True, slots=True)
class Damage:
    """A part of an object that cannot be read."""

    offset: int
    message: str


@dataclass(slots=True)
class ObjectReport:
    """The contents of an object: facts, parts, and damage."""

    object: str
    bytes: int
    facts: dict[str, Any] = field(default_factory=dict)
    parts: str = ""
    """The name of the rows: segments, operations or groups."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)

    def note(self, error: CorruptionError | UnsupportedFormatError) -> None:
        self.damage.append(Damage(error.context.get("offset", 0), error.message))

    def to_dict(self) -> dict[str, Any]:
        parts = {self.parts: self.rows} if self.parts else {}
        damage = [{"offset": d.offset, "message": d.message} for d in self.damage]
        return {"object": self.object, "bytes": self.bytes, **self.facts, **parts, "damage": damage}


@dataclass(frozen=True, slots=True)
class ObjectInspector:
    """Reads single objects of one namespace."""

    store: Store
    names: Namespace

    # --- manifests ----------------------------------------------------------------
    def manifest(self, generation: int | None) -> ObjectReport:
        """Inspect a manifest, by default the newest."""
        if generation is None:
            listed = (number_of(info.key) for info in self.store.list(self.names.manifests))
            generation = max((number for number in listed if number), default=0)
            if not generation:
                raise NotFoundError(f"there is no namespace {self.names.name} in {self.store.url}")
        key = self.names.manifest(generation)
        data = self.store.get(key)
        report = ObjectReport(key, len(data), parts="segments")
        try:
            found = check_loaded(decode_manifest(data, key), key)
        except DAMAGED as error:
            report.note(error)
            return report
        report.facts = _plain(found)
        report.rows = report.facts.pop("segments", [])
        return report

    # --- the log ------------------------------------------------------------------
    def wal_object(self, lsn: int) -> ObjectReport:
        """Inspect a WAL object."""
        key = self.names.wal_object(lsn)
        data = self.store.get(key)
        report = ObjectReport(key, len(data), parts="operations")
        try:
            found = WalObject.decode(data, key)
        except DAMAGED as error:
            report.note(error)
            _walk(report, data)
            return report
        report.facts = _plain(found.header)
        schema = self._schema(found.header)
        if schema is not None:
            report.rows = list(_operations(report, found, schema))
        return report

    def _schema(self, header: WalHeader) -> Schema | None:
        """Return the schema of the records; None if no manifest has it."""
        if header.schema is not None:
            return header.schema
        try:
            head = NamespaceContext(self.store, self.names).heads.find(fallback=True).manifest
        except (NotFoundError, *DAMAGED):
            return None
        return next((s for s in head.schemas if s.id == header.schema_id), None)

    # --- segments -----------------------------------------------------------------
    def segment(self, segment_id: str) -> ObjectReport:
        """Inspect a segment: footer, index, and every group."""
        key = self.names.segment(segment_id)
        size = self.store.head(key).size
        report = ObjectReport(key, size, parts="groups")
        self._check_start(report)
        try:
            tail = self._tail(segment_id, size)
        except DAMAGED as error:
            report.note(error)
            return report
        report.facts = _plain(tail.footer)
        report.facts["range_tombstones"] = [_plain_tuple(t) for t in tail.range_tombstones]
        report.rows = [self._group(report, tail, group) for group in range(len(tail.index))]
        return report

    def _check_start(self, report: ObjectReport) -> None:
        start = self.store.get_range(report.object, 0, min(SEGMENT_HEAD.size, report.bytes))
        versions = range(1, SEGMENT_VERSION + 1)
        expected = SEGMENT_HEAD.pack(SEGMENT_MAGIC, SEGMENT_VERSION, 0)
        if start not in {SEGMENT_HEAD.pack(SEGMENT_MAGIC, number, 0) for number in versions}:
            report.damage.append(Damage(0, f"expected {expected!r} at the start, found {start!r}"))

    def _tail(self, segment_id: str, size: int) -> SegmentTail:
        """Read the end of a segment: as much as the manifest says, or TAIL_BYTES."""
        try:
            head = NamespaceContext(self.store, self.names).heads.find(fallback=True).manifest
        except (NotFoundError, *DAMAGED):
            named = []
        else:
            named = [entry.tail_bytes for entry in head.segments if entry.id == segment_id]
        key, start = self.names.segment(segment_id), max(0, size - max([*named, TAIL_BYTES]))
        return decode_tail(self.store.get_range(key, start, size), size, key)

    def _group(self, report: ObjectReport, tail: SegmentTail, group: int) -> dict[str, Any]:
        index, numbers = tail.index, sorted(tail.footer.schema.types())
        spans = tail.ranges(group, numbers)
        try:
            tail.decode_group(group, numbers, self.store.get_ranges(report.object, spans))
        except DAMAGED as error:
            report.note(error)
        return {
            "group": group,
            "offset": spans[0][0],
            "bytes": spans[-1][1] - spans[0][0],
            "rows": int(index.rows[group]),
            "lsn_min": int(index.lsn_min[group]),
            "lsn_max": int(index.lsn_max[group]),
            "first_key": index.first_keys[group],
            "last_key": index.last_keys[group],
        }

    # --- leases -------------------------------------------------------------------
    def lease(self, lease_id: str) -> ObjectReport:
        """Inspect a lease and its remaining time."""
        key = self.names.lease(lease_id)
        info, data = self.store.head(key), self.store.get(key)
        report = ObjectReport(key, len(data))
        try:
            record = msgspec.json.decode(data, type=GenerationLease)
        except UNDECODABLE as error:
            report.damage.append(Damage(0, f"not a lease: {error}"))
            return report
        left_s = record.ttl_ms / 1000 - (current_time_s(self.store) - info.last_modified_s)
        report.facts = {**_plain(record), "seconds_left": round(left_s, 3), "expired": left_s < 0}
        return report


def _walk(report: ObjectReport, data: bytes) -> None:
    """Read a WAL object frame by frame, up to the damaged one."""
    cursor = ByteReader(memoryview(data)[: -FOOTER.size], report.object)
    try:
        cursor.take(HEAD.size)
        header = decode_msgpack(
            read_frame(cursor, "the header"), WalHeader, report.object, HEAD.size
        )
        assert isinstance(header, WalHeader)
        report.facts = _plain(header)
        for number in range(len(header.batches)):
            read_frame(cursor, f"record {number}")
    except DAMAGED as error:
        report.note(error)


def _operations(report: ObjectReport, found: WalObject, schema: Schema) -> Iterator[dict[str, Any]]:
    for number, (record, start) in enumerate(zip(found.records, found.starts, strict=True)):
        try:
            ops = decode_ops(record, schema, report.object, start)
        except DAMAGED as error:
            report.note(error)
            continue
        kinds, keys = ops.kinds.to_pylist(), ops.keys.to_pylist()
        ends = ops.end_keys.to_pylist() if ops.end_keys is not None else [None] * len(ops)
        for kind, key, end in zip(kinds, keys, ends, strict=True):
            yield {"batch": number, "op": OP_NAMES[kind], "key": key, "end_key": end}


def _plain(value: Any) -> dict[str, Any]:
    """Convert a struct to a dictionary; bytes stay bytes."""
    plain: dict[str, Any] = msgspec.to_builtins(value, builtin_types=(bytes,))
    return plain


def _plain_tuple(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in ("start", "end", "lsn", "seq")}


FOR_PROGRAMS = {"checksum", "set_hash", "tail_bytes", "schema_id", "visible_lsn", "home", "patches"}
"""Columns of a manifest's segments that are shown in JSON only."""
LISTED_MAX = 4


@click.command(cls=ReefCommand)
@on_namespace
@click.option("--generation", type=click.IntRange(min=1), metavar="N", help="Print this manifest.")
@click.option("--lsn", type=click.IntRange(min=1), metavar="N", help="Print this WAL object.")
@click.option("--segment", metavar="ID", help="Print this segment: footer, index and groups.")
@click.option("--lease", metavar="ID", help="Print this lease.")
@click.option(
    "--rows",
    type=NUMBER,
    default=20,
    show_default=True,
    metavar="N",
    help="Print at most this many rows of a table.",
)
@encoding_option
def inspect(output: Output, db: Database, namespace: str, *, rows: int, **which: Any) -> int:
    """Print the contents of one object, and its damage.

    By default the newest manifest. Check the whole object; print damage with its offset, together
    with the parts that can still be read, and exit with 2. --rows applies to tables only.

    Example: reef inspect ./data users --lsn 2
    """
    names = newest_incarnation(db.store, namespace)
    report = _inspect_one(ObjectInspector(db.store, names), which)
    if output.is_json:
        output.json(report.to_dict())
    else:
        _print(output, report, rows)
    return EXIT_PROBLEMS if report.damage else 0


def _inspect_one(reader: ObjectInspector, which: dict[str, Any]) -> ObjectReport:
    given = {name: value for name, value in which.items() if value is not None}
    if len(given) > 1:
        raise click.UsageError(f"--{' and --'.join(given)} exclude each other")
    if "lsn" in given:
        return reader.wal_object(given["lsn"])
    if "segment" in given:
        return reader.segment(given["segment"])
    if "lease" in given:
        return reader.lease(given["lease"])
    return reader.manifest(given.get("generation"))


def _short(name: str, value: Any) -> Any:
    """Format times as ISO 8601, and long lists as their length."""
    if name.endswith("_at_ms") and isinstance(value, int) and 0 < value < 1 << 45:
        return datetime.fromtimestamp(value / 1000, UTC).isoformat()
    if isinstance(value, list | tuple | dict) and len(value) > LISTED_MAX:
        return f"{len(value)} items, printed by --output json"
    return value


def _print(output: Output, report: ObjectReport, rows: int) -> None:
    facts = {"bytes": report.bytes, **report.facts}
    output.record(report.object, {name: _short(name, value) for name, value in facts.items()})
    if report.rows and rows:
        shown = report.rows[:rows]
        columns = [name for name in shown[0] if name not in FOR_PROGRAMS]
        output.line("")
        output.table(f"{report.parts}, {len(report.rows)} in all", columns, shown)
    for damage in report.damage:
        output.line(f"damaged at offset {damage.offset}: {damage.message}", style="bold red")


@click.command("pending", cls=ReefCommand)
@click.argument("path")
@click.option("--url", metavar="URL", help="Check this bucket instead of the notes in the log.")
@store_options
@click.pass_obj
def pending_command(output: Output, path: str, url: str | None, options: tuple[str, ...]) -> None:
    """Print the batches of a local log that are not uploaded.

    Print their number, size, entries and age. Change nothing; the log may be in use. Without --url,
    use the uploads that are noted in the log, which may lag behind; with it, use the bucket.

    Example: reef log pending ./users-log
    """
    store = None if url is None else stores.open(url, **parse_options(options))
    output.report(f"not uploaded from {path}", read_pending(path, store=store))


@click.command("reapply", cls=ReefCommand)
@click.argument("path")
@on_bucket
@take_over_option
def reapply_command(output: Output, db: Database, *, path: str, take_over: bool) -> None:
    """Write the pending batches of a local log, though another writer has taken over.

    Acquire the writer role, which fences any other writer. Uploaded batches are not written again.
    The others overwrite newer rows of the same keys: inspect them first with `reef
    log pending` and `reef log dump`. A batch whose idempotency key was committed meanwhile is not
    written again. Can be repeated. Fail without a change if another writer is active.

    Example: reef log reapply ./users-log ./data
    """
    namespace = namespace_of(path, db.store)
    with suggesting_take_over():
        writer = db.writer(
            namespace,
            durability="local",
            local_log=path,
            reapply=True,
            take_over=take_over,
            background=False,
        )
    with writer:
        recovery = writer.local_recovery
        writer.flush()
        facts: dict[str, Any] = {
            "namespace": namespace,
            "applied_batches": recovery.replayed,
            "repeated_batches": recovery.repeated,
            "uploaded_before": recovery.uploaded_index,
            "last_index": recovery.uploaded_index + recovery.replayed + recovery.repeated,
        }
    output.record(f"applied the pending batches of {path}", facts)


ENTRY_COLUMNS = ("index", "term", "type", "appended_at", "data", "extensions")
FRAME_COLUMNS = ("segment", "offset", "frame", "bytes", "checksum", "valid")


@click.group()
def log() -> None:
    """Inspect, verify and recover local logs."""


log.add_command(pending_command)
log.add_command(reapply_command)


@log.command("inspect", cls=ReefCommand)
@click.argument("path")
@click.pass_obj
def inspect_command(output: Output, path: str) -> int:
    """Print the segments of a log, and their damage.

    Check every checksum; entries are not decoded, so the codec does not matter. The log may be in
    use. Exit with 2 if there is damage.

    Example: reef log inspect ./log
    """
    report = verify_log(path, deep=False)
    output.report(f"log {path}", report)
    return EXIT_PROBLEMS if report.problems else 0


@log.command("verify", cls=ReefCommand)
@click.argument("path")
@click.pass_obj
def verify_command(output: Output, path: str) -> int:
    """Check every checksum, every index and every entry.

    Change nothing; the log may be in use. A batch that a crash has torn is not damage: it was never
    acknowledged, and the next open drops it. Exit with 2 if there is damage.

    Example: reef log verify ./log
    """
    report = verify_log(path)
    output.report(f"verified {path}", report)
    return EXIT_PROBLEMS if report.problems else 0


@log.command("dump", cls=ReefCommand)
@click.argument("path")
@click.option("--frames", is_flag=True, help="Print the frames of the files instead of entries.")
@click.option("--first", type=click.IntRange(min=1), metavar="N", help="Start at this entry.")
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="Stop after this entry.")
@encoding_option
@click.pass_obj
def dump_command(
    output: Output, path: str, *, frames: bool, first: int | None, last: int | None
) -> int:
    """Print the entries of a log, or its frames with their offsets and checksums.

    The log may be in use. Stop with exit code 2 at the first entry that cannot be read. With
    --frames, print all of them, and exit with 2 if a commit before the last has a wrong checksum.

    Example: reef log dump ./log --first 2
    """
    if frames:
        if first or last:
            raise InvalidInputError("--frames excludes --first and --last")
        output.stream(FRAME_COLUMNS, _frame_rows(path))
        return EXIT_PROBLEMS if verify_log(path, deep=False).problems else 0
    output.stream(ENTRY_COLUMNS, _entry_rows(path, first or 1, last))
    return 0


def _entry_rows(path: str, first: int, last: int | None) -> Iterator[dict[str, Any]]:
    for entry in dump_entries(path, codec=BINARY):
        if last is not None and entry.index > last:
            return
        if entry.index >= first:
            yield {
                "index": entry.index,
                "term": entry.term,
                "type": _type_name(entry.type),
                "appended_at": str(entry.appended_at),
                "data": entry.data,
                "extensions": entry.extensions,
            }


def _type_name(kind: int) -> str:
    return EntryType(kind).name.lower() if kind in set(EntryType) else str(kind)


def _frame_rows(path: str) -> Iterator[dict[str, Any]]:
    for name, frame in dump_frames(path):
        row = {"segment": name, "offset": frame.offset, "frame": frame_name(frame)}
        if frame_name(frame) == "commit":
            yield {**row, "checksum": f"{frame.checksum:08x}", "valid": frame.valid}
        else:
            yield {**row, "bytes": frame.length}
