"""Requests of the native reader: it plans here, in a Python worker of Spark's driver.

The reader in the jar sends a request as an option of the data source, and takes the response from
the metadata of the schema that the source returns. All values are JSON; keys are base64.

    describe      schema of the namespace, at the snapshot that the options name
    plan          pin a generation with a lease; segments with their URLs, and the unfolded log
    renew         renew the lease of a plan
    release       release it
    define      check the definition of a table that a statement will create or replace
    list, exists, create, add_columns, drop, rename, truncate    for SQL statements on tables
    metadata      rows of a metadata table: history, segments, generations, snapshots

The unfolded log becomes a segment in a temporary file, so that the reader has one kind of input.
The native reader needs no credentials: it reads files, or URLs that are signed here.

**Definitions** of tables in SQL are checked as a whole before anything is created or replaced. A
statement that replaces a table keeps the namespace, and commits its rows in the place of all
others. So the new definition must fit the namespace: the same key, all of its columns with the same
types, and new ones only in addition. A definition that would lose something silently is refused:
dropped columns, constraints, unknown properties, a location of the table's own.
"""

import base64
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql import types as st
from pyspark.sql.types import (
    BinaryType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from reef.engine.history.commits import list_commits
from reef.errors import ErrorKind, InvalidInputError, NotFoundError, ReefError, UnavailableError
from reef.formats.coding import Codec
from reef.formats.manifest import Manifest, SegmentEntry
from reef.formats.schema import Schema
from reef.formats.segment import Lineage
from reef.formats.segment_writer import SegmentWriter
from reef.jobs.ingest.job import BulkJob
from reef.manifest.head import HeadFinder, locate
from reef.paths import Namespace
from reef.spark.options import REQUEST, WRITING, ReadOptions, parse_vectors
from reef.spark.read_plan import ReadPin, take_pin
from reef.spark.rows import raise_all
from reef.spark.sink import arrow_columns, check_collation
from reef.spark.types import same_type, spark_schema
from reef.stores import Store, Wrapper
from reef.stores.leases import SharedLease
from reef.stores.local import LocalStore
from reef.stores.remote import RemoteStore
from reef.types import KeyRange

KEY = "id"
"""The key column of a table whose statement names none."""
KNOWN = (
    *("key", "vectors", "provider", "location", "owner", "comment"),
    *("collation", "external", "is_managed_location", "table_type"),
)
"""Reef's own properties, and those that Spark sets; comments are dropped with a warning."""
OPTION = "option."
"""Spark passes each option a second time, under this prefix."""
DROP_HINT = "Nothing was changed. DROP TABLE first, or choose another name"


@dataclass(frozen=True, slots=True)
class Definition:
    """Columns and properties of a table that a statement creates or replaces."""

    columns: st.StructType
    key: str | None
    vectors: Mapping[str, int]

    @classmethod
    def of(
        cls, columns: st.StructType, properties: Mapping[str, str], default_provider: str = ""
    ) -> "Definition":
        """Check a definition by itself; InvalidInputError has all problems."""
        given = {name.lower(): value for name, value in properties.items()}
        problems = _property_problems(given, default_provider)
        vectors = {}
        try:
            vectors = parse_vectors(given.get("vectors", ""))
        except InvalidInputError as error:
            problems.append(error)
        raise_all(problems)
        return cls(columns, given.get("key"), vectors)

    def check_new(self) -> str:
        """Return the key column of a table that does not exist yet."""
        key = self.key or KEY
        check_columns(self.columns, key)
        Schema.of(arrow_columns(self.columns, self.vectors), key)
        return key

    def check_replacement(self, found: Schema) -> st.StructType:
        """Return the columns to add to a namespace; InvalidInputError if it has to be dropped."""
        check_columns(self.columns, found.key.name)
        known = {field.name: field for field in spark_schema(found)}
        given = {field.name: field for field in self.columns}
        added = st.StructType([field for field in self.columns if field.name not in known])
        arrow_columns(added, {n: size for n, size in self.vectors.items() if n in added.names})
        problems = []
        if self.key not in (None, found.key.name):
            problems.append(f"the key column is {found.key.name}, not {self.key}")
        problems += [f"column {name} would be dropped" for name in known if name not in given]
        problems += [
            f"column {name} is {known[name].dataType.simpleString()}, "
            f"not {field.dataType.simpleString()}"
            for name, field in given.items()
            if name in known and not same_type(field.dataType, known[name].dataType)
        ]
        problems += _vector_problems(self.vectors, found)
        if problems:
            raise InvalidInputError(
                f"the table cannot be replaced in place: {'; '.join(problems)}", hint=DROP_HINT
            )
        return added


def check_columns(columns: st.StructType, key: str) -> None:
    """Raise for constraints and collations that Reef would not keep."""
    problems = []
    for field in columns:
        if not field.nullable and field.name != key:
            problems.append(
                InvalidInputError(
                    f"column {field.name}: NOT NULL is for the key column only",
                    hint="All other columns may be null",
                    column=field.name,
                )
            )
        if field.name != key:
            try:
                check_collation(st.StructType([field]), field.name, is_key=False)
            except InvalidInputError as error:
                problems.append(error)
    raise_all(problems)
    check_collation(columns, key)


def _property_problems(given: Mapping[str, str], provider: str) -> list[InvalidInputError]:
    """Return why properties, whose names are in lower case, cannot be kept."""
    problems = []
    if given.get("provider", "reef").lower() not in ("reef", provider.lower()):
        problems.append(_bad(f"USING {given['provider']}: a Reef catalog has Reef tables only"))
    if "location" in given:
        problems.append(_bad("LOCATION: a table is in the bucket of its catalog"))
    write_options = {name.lower() for name in WRITING}
    for name in given:
        is_option = name in write_options and OPTION + name in given
        if name not in KNOWN and not name.startswith(OPTION) and not is_option:
            problems.append(
                _bad(f"a table has no property {name!r}", "There are the properties key, vectors")
            )
    return problems


def _vector_problems(vectors: Mapping[str, int], found: Schema) -> list[str]:
    stored = {field.name: field.arrow for field in found.fields}
    return [
        f"column {name} is {stored[name]}, not a vector of {size}"
        for name, size in vectors.items()
        if name in stored
        and not (pa.types.is_fixed_size_list(stored[name]) and stored[name].list_size == size)
    ]


def _bad(message: str, hint: str = "") -> InvalidInputError:
    return InvalidInputError(message, kind=ErrorKind.INVALID_OPTION, hint=hint)


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
            "lease": {"id": pin.lease.id, "ttl_ms": int(1000 * pin.lease.ttl_s)},
            "segments": [_segment(pin, entry) for entry in entries],
            "log": _log(pin),
            "probes": None if _is_past(options) else _probes(pin),
        }
    except BaseException:
        pin.lease.release()
        raise


def _probes(pin: ReadPin) -> Response:
    """Return URLs that show whether this is still the newest state (ADR 0054)."""
    names = pin.namespace
    following = (names.wal_object(pin.last_lsn + 1), names.manifest(pin.manifest.generation + 1))
    return {
        "absent": [_url(pin.store, key) for key in following],
        "present": [_url(pin.store, names.lease(pin.lease.id))],
        "grace_ms": pin.manifest.grace_ms,
    }


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
    store = _open(options)
    heads, target = options.target(store)
    tables: Mapping[str, tuple[str, Callable[[Manifest], list[tuple[Any, ...]]]]] = {
        "history": (HISTORY_COLUMNS, lambda _: _history_rows(store, heads.names)),
        "segments": (SEGMENT_COLUMNS, _segment_rows),
        "snapshots": (SNAPSHOT_COLUMNS, _snapshot_rows),
        "generations": (GENERATION_COLUMNS, _generation_rows),
    }
    if request["table"] not in tables:
        raise NotFoundError(
            f"there is no metadata table {request['table']}", hint=f"There are {', '.join(tables)}"
        )
    ddl, rows_of = tables[request["table"]]
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
HISTORY_COLUMNS = (
    "lsn long, committed_at timestamp, operation string, job string, idempotency_key string, "
    "rows long, bytes long"
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


def _history_rows(store: Store, namespace: Namespace) -> list[tuple[Any, ...]]:
    return [
        (
            commit.lsn,
            int(commit.committed_at.timestamp() * 1e6),
            commit.operation,
            commit.by,
            ", ".join(commit.keys) or None,
            commit.rows,
            commit.bytes,
        )
        for commit in list_commits(store, namespace)
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
