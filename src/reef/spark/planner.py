"""Requests of the native reader: it plans here, in a Python worker of Spark's driver.

The reader in the jar sends a request as an option of the data source, and takes the response from
the metadata of the schema that the source returns. All values are JSON; keys are base64.

    describe      schema of the namespace, at the snapshot that the options name
    plan          pin a generation with a lease; segments with their URLs, and the unfolded log
    renew         renew the lease of a plan
    release       release it
    define      check the definition of a table that a statement will create or replace
    list, exists, create, add_columns, drop, rename, truncate    for SQL statements on tables
    metadata      rows of a metadata table: segments, generations, snapshots

The unfolded log becomes a segment in a temporary file, so that the reader has one kind of input.
The native reader needs no credentials: it reads files, or URLs that are signed here.
"""

import base64
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from pyspark.sql.types import (
    BinaryType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from reef.errors import ErrorKind, InvalidInputError, NotFoundError, ReefError, UnavailableError
from reef.formats.coding import Codec
from reef.formats.manifest import Manifest, SegmentEntry
from reef.formats.segment import Lineage
from reef.formats.segment_writer import SegmentWriter
from reef.jobs.ingest.job import BulkJob
from reef.manifest.head import HeadFinder, locate
from reef.spark.definitions import KEY, Definition, check_columns
from reef.spark.options import REQUEST, ReadOptions, parse_vectors
from reef.spark.read_plan import ReadPin, take_pin
from reef.spark.sink import arrow_columns
from reef.stores import Store, Wrapper
from reef.stores.leases import SharedLease
from reef.stores.local import LocalStore
from reef.stores.remote import RemoteStore
from reef.types import KeyRange

URL_VALID_S = 12 * 3600.0
LOG_BYTES_MAX = 256 << 20
"""A longer unfolded log is read through Python; folding it is the better way."""

STORES_MAX = 16
_stores: dict[tuple[str, tuple[tuple[str, str], ...]], Store] = {}
"""Opened stores of this process, by URL and options: a directory that was synced is not again."""

Request = Mapping[str, Any]
Response = dict[str, Any]


def respond(options: Mapping[str, str]) -> StructType:
    """Perform the request in the options; return a schema whose metadata is the response."""
    rest = {name: value for name, value in options.items() if name.lower() != REQUEST}
    request = json.loads(next(v for n, v in options.items() if n.lower() == REQUEST))
    try:
        response = OPERATIONS[request["operation"]](ReadOptions.of(rest), request)
    except ReefError as error:
        response = {
            "error": type(error).__name__,
            "kind": str(error.kind or ""),
            "message": f"{error.message}. {error.hint}" if error.hint else error.message,
        }
    metadata = {"response": json.dumps(response)}
    return StructType([StructField("response", StringType(), True, metadata)])


def _open(options: ReadOptions) -> Store:
    """Open the store of a request; the one of an earlier request, if there is one."""
    location = options.location
    key = (location.url, tuple(sorted(location.store_options.items())))
    store = _stores.get(key)
    if store is None:
        if len(_stores) == STORES_MAX:
            _stores.clear()
        store = _stores[key] = location.open()
    return store


def _describe(options: ReadOptions, request: Request) -> Response:
    store = _open(options)
    heads, target = options.target(store)
    manifest = heads.found.manifest
    if _is_past(options):
        pin = take_pin(store, heads, target, options.lease_s)
        pin.lease.release()
        _check_existed(options, heads, pin)
        manifest = pin.manifest
    return {"schema": _schema(manifest), "generation": manifest.generation}


def _is_past(options: ReadOptions) -> bool:
    return bool(options.snapshot or options.generation or options.as_of_time)


def _check_existed(options: ReadOptions, heads: HeadFinder, pin: ReadPin) -> None:
    """Raise NotFoundError for a time before the namespace was created."""
    time = options.as_of_time
    if time is None or pin.last_lsn >= max(1, pin.manifest.wal_base):
        return
    try:
        first = heads.load(1)
    except NotFoundError:  # it was swept, long after it was created
        return
    if first.published_at_ms is not None and time.timestamp() * 1000 < first.published_at_ms:
        raise NotFoundError(
            f"{pin.namespace.name} did not exist at {time.isoformat()}",
            hint="Use a later time, or a generation",
        )


def _plan(options: ReadOptions, request: Request) -> Response:
    store = _open(options)
    heads, target = options.target(store)
    pin = take_pin(store, heads, target, options.lease_s, sent_bytes_max=LOG_BYTES_MAX)
    try:
        if pin.memory is None:
            raise UnavailableError(
                f"the unfolded log of {pin.namespace.name} exceeds {LOG_BYTES_MAX >> 20} MiB",
                hint='Fold it, or read with option("engine", "python")',
            )
        entries = (*pin.manifest.segments, *pin.memory.ingested)
        return {
            "schema": _schema(pin.manifest),
            "generation": pin.manifest.generation,
            "lsn": pin.last_lsn,
            "now_ms": int(store.runtime.wall_s() * 1000),
            "lease": {"id": pin.lease.id, "ttl_ms": int(1000 * pin.lease.ttl_s)},
            "segments": [_segment(pin, entry) for entry in entries],
            "log": _log(pin),
        }
    except BaseException:
        pin.lease.release()
        raise


def _renew(options: ReadOptions, request: Request) -> Response:
    _lease(options, request).verify()
    return {}


def _release(options: ReadOptions, request: Request) -> Response:
    _lease(options, request).release()
    return {}


def _list(options: ReadOptions, request: Request) -> Response:
    return {"names": options.location.database().namespaces()}


def _exists(options: ReadOptions, request: Request) -> Response:
    location = options.location
    return {"exists": location.namespace.name in location.database().namespaces()}


def _create(options: ReadOptions, request: Request) -> Response:
    db, name = options.location.database(), options.location.namespace.name
    if name in db.namespaces():
        return {"created": False}
    columns = StructType.fromJson(json.loads(request["schema"]))
    db.create(name, arrow_columns(columns, parse_vectors(request["vectors"])), key=request["key"])
    return {"created": True}


def _define(options: ReadOptions, request: Request) -> Response:
    """Check a definition; nothing is changed."""
    db, name = options.location.database(), options.location.namespace.name
    columns = StructType.fromJson(json.loads(request["schema"]))
    properties = request["properties"]
    definition = Definition.of(columns, properties, request["default_provider"])
    vectors = definition.vectors
    exists = name in db.namespaces()
    response: Response = {"exists": exists, "added": StructType([]).jsonValue(), "key": ""}
    if not exists:
        response["key"] = definition.check_new()
    elif request["mode"] == "replace":
        schema = locate(db.store, name).found.manifest.schema
        added = definition.check_replacement(schema)
        vectors = {n: size for n, size in definition.vectors.items() if n in added.names}
        response["added"] = added.jsonValue()
        response["key"] = schema.key.name
    response["vectors"] = ",".join(f"{column}={size}" for column, size in vectors.items())
    return response


def _add_columns(options: ReadOptions, request: Request) -> Response:
    db, name = options.location.database(), options.location.namespace.name
    schema = db.info(name).schema
    columns = StructType.fromJson(json.loads(request["schema"]))
    check_columns(columns, KEY)
    for field in arrow_columns(columns, parse_vectors(request.get("vectors", ""))):
        schema = schema.append(field)
    db.alter(name, schema)
    return {}


def _drop(options: ReadOptions, request: Request) -> Response:
    db, name = options.location.database(), options.location.namespace.name
    if name not in db.namespaces():
        return {"dropped": False}
    db.drop(name)
    return {"dropped": True}


def _rename(options: ReadOptions, request: Request) -> Response:
    options.location.database().rename(options.location.namespace.name, request["to"])
    return {}


def _truncate(options: ReadOptions, request: Request) -> Response:
    """Delete all rows with one range tombstone, committed as an ingest."""
    with BulkJob(
        options.location.database(), options.location.namespace.name, replace=KeyRange()
    ) as job:
        job.commit(job.staging.stage([], job.replace))
    return {}


def _metadata(options: ReadOptions, request: Request) -> Response:
    """Return the rows of a metadata table, and its schema as Spark writes it."""
    tables: Mapping[str, tuple[str, Callable[[Manifest], list[tuple[Any, ...]]]]] = {
        "segments": (SEGMENT_COLUMNS, _segment_rows),
        "snapshots": (SNAPSHOT_COLUMNS, _snapshot_rows),
        "generations": (GENERATION_COLUMNS, _generation_rows),
    }
    if request["table"] not in tables:
        raise NotFoundError(
            f"there is no metadata table {request['table']}", hint=f"There are {', '.join(tables)}"
        )
    ddl, rows_of = tables[request["table"]]
    store = _open(options)
    heads, target = options.target(store)
    manifest = heads.found.manifest
    if _is_past(options):
        if request["table"] != "segments":
            raise InvalidInputError(
                f"{request['table']} are listed for the newest version only",
                kind=ErrorKind.INVALID_OPTION,
                hint="Leave VERSION AS OF away",
            )
        pin = take_pin(store, heads, target, options.lease_s)
        pin.lease.release()
        manifest = pin.manifest
    fields = [StructField(n, TYPES[t], True) for n, t in (c.split() for c in ddl.split(", "))]
    schema = StructType(fields)
    return {"schema": schema.jsonValue(), "rows": rows_of(manifest)}


TYPES = {
    "string": StringType(),
    "long": LongType(),
    "binary": BinaryType(),
    "timestamp": TimestampType(),
}
SEGMENT_COLUMNS = (
    "id string, level long, bytes long, rows long, tombstones long, patches long, "
    "min_key binary, max_key binary, lsn_min long, lsn_max long, visible_lsn long"
)
SNAPSHOT_COLUMNS = "id string, name string, generation long, expires_at timestamp, owner string"
GENERATION_COLUMNS = "generation long, write_id string, published_at timestamp"


def _segment_rows(manifest: Manifest) -> list[tuple[Any, ...]]:
    return [
        (
            entry.id,
            entry.level,
            entry.size,
            entry.rows,
            entry.tombstones,
            entry.patches,
            _base64(entry.min_key),
            _base64(entry.max_key),
            entry.lsn_min,
            entry.lsn_max,
            entry.visible_lsn,
        )
        for entry in manifest.segments
    ]


def _snapshot_rows(manifest: Manifest) -> list[tuple[Any, ...]]:
    return [
        (s.id, s.name, s.generation, _micros(s.expires_at_ms), s.owner) for s in manifest.snapshots
    ]


def _generation_rows(manifest: Manifest) -> list[tuple[Any, ...]]:
    """Generations that the manifest still names as recent, and its own."""
    own = (manifest.generation, manifest.write_id, _micros(manifest.published_at_ms))
    recent = [(r.generation, r.write_id, _micros(r.published_at_ms)) for r in manifest.recent]
    return [*(row for row in recent if row[0] != manifest.generation), own]


def _micros(time_ms: int | None) -> int | None:
    return None if time_ms is None else 1000 * time_ms


def _lease(options: ReadOptions, request: Request) -> SharedLease:
    store = _open(options)
    heads, _ = options.target(store)
    return SharedLease(store, heads.names, request["lease"], request["ttl_ms"] / 1000)


def _schema(manifest: Manifest) -> Response:
    schema = manifest.schema
    return {
        "key": list(msgspec.structs.astuple(schema.key)),
        "fields": [list(msgspec.structs.astuple(field)) for field in schema.fields],
    }


def _segment(pin: ReadPin, entry: SegmentEntry) -> Response:
    key = pin.namespace.segment(entry.id, entry.home)
    return {
        "name": key,
        "url": _url(pin.store, key),
        "size": entry.size,
        "tail_bytes": entry.tail_bytes,
        "min_key": _base64(entry.min_key),
        "max_key": _base64(entry.max_key),
        "rows": entry.rows,
        "tombstones": entry.tombstones,
        "patches": entry.patches,
        "rows_lsn": entry.rows_lsn,
    }


def _log(pin: ReadPin) -> Response | None:
    """Write the unfolded rows as a segment; None if there are none."""
    memory = pin.memory
    if memory is None:
        return None
    rows, deletes = memory.rows(KeyRange()), list(memory.range_tombstones)
    if not len(rows) and not deletes:
        return None
    writer = SegmentWriter(
        pin.manifest.schema,
        0,
        Lineage(pin.lease.id, 0),
        codec=Codec.NONE,
        range_tombstones=deletes,
    )
    handle, path = tempfile.mkstemp(prefix="reef-log-", suffix=".seg")
    with os.fdopen(handle, "wb") as file:
        for data in writer.write([rows]):
            file.write(data)
    footer = writer.summary.footer
    return {
        "file": path,
        "name": f"the unfolded log of {pin.namespace.name}",
        "tail_bytes": writer.summary.tail_bytes,
        "min_key": _base64(footer.min_key),
        "max_key": _base64(footer.max_key),
        "rows": footer.rows,
        "tombstones": footer.tombstones,
        "patches": footer.patches,
        "rows_lsn": 0,
    }


def _url(store: Store, key: str) -> str:
    while isinstance(store, Wrapper):
        store = store.inner
    if isinstance(store, LocalStore):
        return f"{store.url}/{key}"
    if isinstance(store, RemoteStore):
        return store.signed_url("GET", key, URL_VALID_S)
    raise InvalidInputError(
        f"objects of {store.url} have no URL", hint='Read with option("engine", "python")'
    )


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


OPERATIONS: Mapping[str, Callable[[ReadOptions, Request], Response]] = {
    "describe": _describe,
    "plan": _plan,
    "renew": _renew,
    "release": _release,
    "list": _list,
    "exists": _exists,
    "create": _create,
    "define": _define,
    "add_columns": _add_columns,
    "drop": _drop,
    "rename": _rename,
    "truncate": _truncate,
    "metadata": _metadata,
}
