"""Options of the data source: text in, checked values out.

Spark passes names in lower case and values as text. An unknown option is an error, since a misspelt
`where` would otherwise read everything. Options of the store have the prefix `store.`:
`option("store.endpoint", …)` is `reef.open(url, endpoint=…)`. Keys that are no text, such as those
of `reef.keys.pack`, are given in hexadecimal digits (`startHex`).

Options of a write:

op               put (default), patch, merge or delete: the operation of all rows without a column
                 _op
mergeOps         operators of the columns that merges change: count=add,high=max
idempotencyKey   a write whose key was committed before changes nothing
orderBy          of several rows with one key, the one with the highest value is kept
duplicates       refuse (default) or order, which is implied by an order column
key              the key column of a namespace that does not exist yet
vectors          its vector columns: embedding=384,other=16
segmentBytes     target size of segments
sortBytes        memory of a task before it sorts on disk
leaseSeconds     how long the job is kept without any of its tasks
liveWins         true: everything written since the write began wins over its rows, as for a
                 backfill; for appends of whole rows and deletes
createOnly       fail if the namespace exists already, as the save mode errorifexists does
unlessChangedSince   GENERATION:LSN of a snapshot: fail with ConflictError if the namespace was
                 written since
unlessChangedIn  the key ranges to which that applies: a JSON list of [start, end] in base64, where
                 the end may be null
unlessChangedInFile   a file of the driver that has them when the write commits

Options of `writeStream` are those of a write, but for idempotencyKey, liveWins, createOnly and the
conditions; and:

checkpointLocation   Spark's own option; the namespace remembers it for the query
queryName        likewise, in its place if the session has a folder for checkpoints
adoptCheckpoint  accept a checkpoint that does not continue where the namespace is
appendBytes      micro-batches with so many bytes of rows go into the log itself; larger ones are
                 staged as segments
applyChanges     the rows are change rows of a stream, applied in the order of the log
background       fold and compact after a micro-batch, when that is due (true)

Options of `readStream`, exactly one of the first four, which say where it begins:

starting             all: all rows as puts, then changes; now: changes from now on
startingSnapshot     all rows of a snapshot, by name or id, then the changes since
startingGeneration   the changes since a generation
startingLsn          the changes after an LSN; 0: all that there ever were
maxRowsPerTrigger    rows of a micro-batch; whole objects of the log, or pages of a load
maxBytesPerTrigger   likewise in stored bytes
cursor               the name of the registered cursor; by default one is made up
images               add the rows before and after each change, _before and _after
pollMs               how often the end of the log is checked for more
cursorSeconds        how often the cursor is moved: each time is a manifest
snapshotSeconds      how long the snapshot of `all` is kept without progress
splitBytes, leaseSeconds   as in a read of rows
"""

import base64
import binascii
import json
import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reef import stores
from reef.config import IngestSettings
from reef.engine.history.as_of import AsOf, ReadTarget, read_target
from reef.engine.history.snapshots import resolve_snapshot
from reef.engine.rows.batch import check_idempotency_key, check_live_wins
from reef.errors import ErrorKind, InternalError, InvalidInputError
from reef.formats.schema import OPERATORS
from reef.manifest.head import HeadFinder, locate
from reef.paths import Namespace
from reef.spark.types import OP, OPS
from reef.stores import Store
from reef.types import KeyRange

if TYPE_CHECKING:
    from reef.engine.handles.database import Database


STORE = "store."
REQUEST = "reef.request"
"""Set by the native reader: a request to `reef.spark.planner`."""
HADOOP_PATH = re.compile(r"^file:/(?!/)")
"""How Spark and Hadoop spell the URL of a directory."""
TABLE_PROPERTY = "option.namespace"
"""Set while Spark creates a table in its own catalog; later reads and writes get no options."""
VIEW_HINT = (
    "Use CREATE TEMPORARY VIEW … USING reef OPTIONS (path '…', namespace '…'), or a DataFrame"
)
NOT_TEXT = ("runtime", "retry", "faults", "meter", "metrics")
"""Arguments of `reef.stores.open` that are no text."""
READING = (
    "generation",
    "snapshot",
    "asOfTime",
    "start",
    "end",
    "prefix",
    "startHex",
    "endHex",
    "prefixHex",
    "columns",
    "where",
    "keys",
    "keysHex",
    "splitBytes",
    "leaseSeconds",
    "meter",
    "engine",
)
SPLIT_BYTES = 32 << 20
"""Stored bytes of a partition: some seconds of work."""
LEASE_S = 3600.0
"""How long objects are kept after the last task of a read."""
LEASE_MIN_S = 5.0


@dataclass(frozen=True, slots=True)
class TableLocation:
    """A namespace of a bucket, and the options of its store."""

    url: str
    namespace: Namespace
    store_options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, options: Mapping[str, str]) -> "TableLocation":
        given = {name.lower(): value for name, value in options.items()}
        if not given or TABLE_PROPERTY in given:
            raise _bad("Spark passes no options of tables in its own catalog to Python", VIEW_HINT)
        if "paths" in given:
            raise _bad(
                "a bucket has one path, several were given",
                "Load each, and combine them with union",
            )
        for name, example in (("path", '.load("s3://bucket/prefix")'), ("namespace", "events")):
            if not given.get(name):
                raise _bad(f"the option {name!r} is missing", f"Such as {example}")
        words = {n.removeprefix(STORE): v for n, v in given.items() if n.startswith(STORE)}
        for name in NOT_TEXT:
            if name in words:
                raise _bad(f"the option '{STORE}{name}' cannot be given as text")
        return cls(given["path"], Namespace(given["namespace"]), words)

    def open(self) -> Store:
        """Open the store; InvalidInputError if other processes could not."""
        url = HADOOP_PATH.sub("file:///", self.url)
        store = stores.open(url, **self.store_options)  # type: ignore[arg-type]
        if not store.capabilities.shared:
            raise _bad(
                f"{self.url} is in the memory of one process; Spark has many",
                "Use a directory or a bucket",
            )
        return store

    def database(self) -> "Database":
        """Open the bucket, with its registry; nothing works in the background."""
        from reef.engine.handles.database import Database
        from reef.engine.registry import Registry

        store = self.open()
        return Database(store, registry=Registry(store))


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options of a read."""

    location: TableLocation
    generation: int | None = None
    snapshot: str | None = None
    as_of_time: datetime | None = None
    range: KeyRange = field(default_factory=KeyRange)
    columns: tuple[str, ...] | None = None
    where: str | None = None
    keys: tuple[bytes | str, ...] | None = None
    split_bytes: int = SPLIT_BYTES
    lease_s: float = LEASE_S
    meter: int | None = None
    """The id of the accumulator that collects request counts."""

    @classmethod
    def of(cls, options: Mapping[str, str]) -> "ReadOptions":
        """Parse options; InvalidInputError names a wrong one."""
        location = TableLocation.of(options)
        given = known_options(options, READING, "read")
        if given.get("engine", "python") != "python":
            raise _bad(
                f"engine={given['engine']!r}: this session has no native reader",
                "Start it with reef.spark.configure(SparkSession.builder)",
            )
        versions = [name for name in ("generation", "snapshot", "asOfTime") if name in given]
        if len(versions) > 1:
            raise _bad(f"only one of the options {', '.join(map(repr, versions))} can be set")
        return cls(
            location,
            _number(given, "generation", 1),
            given.get("snapshot"),
            _time(given),
            KeyRange.of(*(_bound(given, name) for name in ("start", "end", "prefix"))),
            _names(given),
            given.get("where"),
            _keys(given),
            _number(given, "splitBytes", 1) or SPLIT_BYTES,
            _seconds(given),
            _number(given, "meter", 0),
        )

    def target(self, store: Store) -> tuple[HeadFinder, ReadTarget]:
        """Return the manifests of the namespace, and the point in time to read."""
        name = self.location.namespace.name
        if self.snapshot is not None:
            heads, entry = resolve_snapshot(store, name, self.snapshot)
            return heads, ReadTarget(entry.generation)
        if self.as_of_time is not None:
            return locate(store, name), read_target(self.as_of_time)
        return locate(store, name), ReadTarget(self.generation)


CHANGES = ("readChanges", "afterLsn", "untilLsn", "images", "splitBytes", "leaseSeconds", "engine")


@dataclass(frozen=True, slots=True)
class ChangeOptions:
    """The options of a read of changes."""

    location: TableLocation
    after_lsn: int | None
    until_lsn: int | None
    images: bool
    split_bytes: int
    lease_s: float

    @classmethod
    def of(cls, options: Mapping[str, str]) -> "ChangeOptions | None":
        """Parse options; None if they read rows. InvalidInputError names an invalid option."""
        given = {name.lower(): value for name, value in options.items()}
        if not _flag(given, "readChanges".lower()):
            return None
        location = TableLocation.of(options)
        given = known_options(options, CHANGES, "read of changes")
        return cls(
            location,
            _number(given, "afterLsn", 0),
            _number(given, "untilLsn", 0),
            _flag(given, "images"),
            _number(given, "splitBytes", 1) or SPLIT_BYTES,
            _seconds(given),
        )


def known_options(
    options: Mapping[str, str], names: Collection[str], operation: str
) -> dict[str, str]:
    """Return the options of a read or a write by their proper names: Spark drops the case."""
    proper = {name.lower(): name for name in (*names, "namespace", "path")}
    renamed = {old.lower(): (old, new) for old, new in OLD_NAMES.items() if new in names}
    given: dict[str, str] = {}
    for name, value in options.items():
        if name.lower().startswith(STORE):
            continue
        if name.lower() in renamed:
            old, new = renamed[name.lower()]
            warnings.warn(f"the option {old} is now {new}", DeprecationWarning, stacklevel=2)
            given.setdefault(new, value)
            continue
        if name.lower() not in proper:
            raise _bad(
                f"there is no option {name!r} for a {operation}",
                f"There are: namespace, {', '.join(names)}, and {STORE}… for the store",
            )
        given[proper[name.lower()]] = value
    return given


def _number(given: Mapping[str, str], name: str, lowest: int) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and int(text) >= lowest):
        raise _bad(f"the option {name}={text!r} is not a number from {lowest} on")
    return int(text)


def _seconds(given: Mapping[str, str]) -> float:
    text = given.get("leaseSeconds", str(LEASE_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not LEASE_MIN_S <= seconds < 1e7:
        raise _bad(f"the option leaseSeconds={text!r} is not a number from {LEASE_MIN_S:g} on")
    return seconds


def _time(given: Mapping[str, str]) -> datetime | None:
    text = given.get("asOfTime")
    if text is None:
        return None
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise _bad(f"the option asOfTime={text!r} is not a time: {error}") from error
    AsOf(time=time)  # checks that it has a time zone
    return time


def _names(given: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the columns: names between commas, or a JSON list where names have commas."""
    text = given.get("columns")
    if text is None:
        return None
    names = tuple(name.strip() for name in text.split(","))
    if text.lstrip().startswith("["):
        names = _texts("columns", text)
    if not names:
        raise _bad("the option columns names no column", "Omit it to read all columns")
    if not all(names):
        raise _bad(f"the option columns={text!r} has an empty name")
    return names


def _bound(given: Mapping[str, str], name: str) -> bytes | str | None:
    digits = _one_of(given, name, f"{name}Hex")
    return given.get(name) if digits is None else _decode_hex(f"{name}Hex", digits)


def _keys(given: Mapping[str, str]) -> tuple[bytes | str, ...] | None:
    digits = _one_of(given, "keys", "keysHex")
    if digits is not None:
        return tuple(_decode_hex("keysHex", item) for item in _texts("keysHex", digits))
    return _texts("keys", given["keys"]) if "keys" in given else None


def _one_of(given: Mapping[str, str], name: str, other: str) -> str | None:
    """Return the second of two options that exclude each other; None if it is not set."""
    if name in given and other in given:
        raise _bad(f"only one of the options {name!r} and {other!r} can be set")
    return given.get(other)


def _decode_hex(name: str, digits: str) -> bytes:
    try:
        return bytes.fromhex(digits)
    except ValueError:
        raise _bad(f"the option {name}: {digits!r} is not pairs of hexadecimal digits") from None


def _texts(name: str, text: str) -> tuple[str, ...]:
    try:
        items: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise _bad(f"the option {name} is not JSON: {error}") from error
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise _bad(f"the option {name} is not a JSON list of texts", 'Such as ["a", "b"]')
    return tuple(items)


def _bad(message: str, hint: str = "") -> InvalidInputError:
    return InvalidInputError(message, kind=ErrorKind.INVALID_OPTION, hint=hint)


WRITING = (
    "op",
    "mergeOps",
    "idempotencyKey",
    "duplicates",
    "orderBy",
    "key",
    "vectors",
    "segmentBytes",
    "sortBytes",
    "leaseSeconds",
    "liveWins",
    "createOnly",
    "unlessChangedSince",
    "unlessChangedIn",
    "unlessChangedInFile",
)
OLD_NAMES = {"orderColumn": "orderBy"}
"""Options that were renamed: the old names keep working."""
SORT_BYTES = 256 << 20
"""Rows that a task buffers; sorting needs as much again."""
WRITE_LEASE_S = 3600.0
"""Tasks renew it: it must outlast the time before the first and after the last."""


@dataclass(frozen=True, slots=True)
class SparkWriteOptions:
    """The options of a write."""

    location: TableLocation
    op: str = "put"
    idempotency_key: str | None = None
    order_by: str | None = None
    key: str | None = None
    vectors: Mapping[str, int] = field(default_factory=dict)
    sort_bytes: int = SORT_BYTES
    settings: Mapping[str, Any] = field(default_factory=dict)
    create_only: bool = False
    unless: tuple[int, int, tuple[KeyRange, ...]] | None = None
    """The condition of the commit: generation and LSN of the snapshot that the rows were computed
    from, and the key ranges that were read."""
    merge_ops: Mapping[str, str] = field(default_factory=dict)
    """The operator of each column that merges change."""
    live_wins: bool = False
    unless_file: str | None = None
    """A file with the ranges of the condition, if they are known at the commit only."""

    @classmethod
    def of(cls, options: Mapping[str, str]) -> "SparkWriteOptions":
        """Parse options; InvalidInputError names a wrong one."""
        location = TableLocation.of(options)
        given = known_options(options, WRITING, "write")
        op = given.get("op", "put").lower()
        if op not in OPS:
            raise _bad(f"the option op={op!r} is not one of {', '.join(OPS)}")
        order = given.get("orderBy")
        check_duplicates(given.get("duplicates"), order)
        check_idempotency_key(given.get("idempotencyKey"))
        live_wins = _flag(given, "liveWins")
        check_live_wins(live_wins, partial=op in ("patch", "merge"))
        settings = {
            "segment_bytes": _count_option(given, "segmentBytes", IngestSettings().segment_bytes),
            "lease_ttl_s": float(_count_option(given, "leaseSeconds", int(WRITE_LEASE_S))),
        }
        IngestSettings().changed(settings)
        return cls(
            location,
            op,
            given.get("idempotencyKey"),
            order,
            given.get("key"),
            parse_vectors(given.get("vectors", "")),
            _count_option(given, "sortBytes", SORT_BYTES),
            settings,
            _flag(given, "createOnly"),
            _condition(given),
            parse_merge_ops(given.get("mergeOps", "")),
            live_wins,
            given.get("unlessChangedInFile"),
        )


def check_duplicates(duplicates: str | None, order_by: str | None) -> None:
    """Raise unless `duplicates` and the order column agree; an order column alone is enough."""
    if duplicates is None:
        return
    policy = str(duplicates).lower()
    if policy not in ("refuse", "order"):
        raise _bad(f"duplicates={duplicates!r} is not 'refuse' or 'order'")
    if (policy == "order") != (order_by is not None):
        raise _bad(
            "duplicates='order' and an order column go together",
            "The highest value of the order column decides which row of a key counts",
        )


def check_replacing(op: str, columns: Collection[str]) -> None:
    """Raise unless all rows are puts: an overwrite leaves exactly the rows of the DataFrame."""
    if op != "put" or OP in columns:
        raise _bad(
            "an overwrite leaves exactly the rows of the DataFrame: it has puts only",
            'Use mode("append"), or no replace, for patches and deletes',
        )


def _flag(given: Mapping[str, str], name: str, *, default: bool = False) -> bool:
    text = given.get(name, str(default)).lower()
    if text not in ("true", "false"):
        raise _bad(f"the option {name}={text!r} is not true or false")
    return text == "true"


def _condition(given: Mapping[str, str]) -> tuple[int, int, tuple[KeyRange, ...]] | None:
    since, ranges = given.get("unlessChangedSince"), given.get("unlessChangedIn")
    if since is None:
        if ranges is not None:
            raise _bad("the option unlessChangedIn needs unlessChangedSince")
        return None
    match = re.fullmatch(r"(\d+):(\d+)", since)
    if match is None:
        raise _bad(f"the option unlessChangedSince={since!r} is not GENERATION:LSN")
    return int(match[1]), int(match[2]), (KeyRange(),) if ranges is None else _ranges(ranges)


def read_ranges(file: str) -> tuple[KeyRange, ...]:
    """Read the key ranges that the native reader has left for the commit."""
    try:
        return _ranges(Path(file).read_text())
    except OSError as error:
        raise InternalError(f"the condition of a write is missing: {error}") from error


def _ranges(text: str) -> tuple[KeyRange, ...]:
    try:
        pairs = [(base64.b64decode(start), end) for start, end in json.loads(text)]
        return tuple(
            KeyRange(start, None if end is None else base64.b64decode(end)) for start, end in pairs
        )
    except (ValueError, TypeError, binascii.Error) as error:
        raise _bad(
            f"the option unlessChangedIn={text!r} is not a list of key ranges: {error}",
            'Such as [["YQ==", null]]',
        ) from error


def _count_option(given: Mapping[str, str], name: str, default: int) -> int:
    text = given.get(name, str(default))
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise _bad(f"the option {name}={text!r} is not a number from 1 on")
    return int(text)


def parse_merge_ops(text: str) -> dict[str, str]:
    """Return the operators of columns, from text such as `count=add,high=max`."""
    found = {}
    for word in filter(None, (word.strip() for word in text.split(","))):
        name, _, operator = (part.strip() for part in word.rpartition("="))
        if not name or operator.removesuffix("_") not in OPERATORS:
            raise _bad(
                f"the option mergeOps={text!r} is not such as count=add,high=max",
                f"Operators are {', '.join(OPERATORS)}",
            )
        found[name] = operator
    return found


def parse_vectors(text: str) -> dict[str, int]:
    """Return the sizes of vector columns, from text such as `embedding=384,other=16`."""
    found = {}
    for word in filter(None, (word.strip() for word in text.split(","))):
        name, _, size = word.rpartition("=")
        if not (name and size.isascii() and size.isdigit() and int(size) >= 1):
            raise _bad(f"the option vectors={text!r} is not such as embedding=384")
        found[name.strip()] = int(size)
    return found


STREAM_WRITING = (
    "checkpointLocation",
    "queryName",
    "adoptCheckpoint",
    "appendBytes",
    "applyChanges",
    "background",
)
BATCH_WRITING = (
    "idempotencyKey",
    "liveWins",
    "createOnly",
    "unlessChangedSince",
    "unlessChangedIn",
    "unlessChangedInFile",
)
"""Options of a batch write that a stream cannot have."""
APPEND_BYTES = 4 << 20
"""Rows of a micro-batch that go into the log itself. Below some 8 MiB that is quicker on an object
store and takes less than half of the requests; from there on staging is (`benchmarks.streams`)."""


@dataclass(frozen=True, slots=True)
class StreamSinkOptions:
    """The options of a streaming write: those of a write, and its checkpoint."""

    write: SparkWriteOptions
    checkpoint: str
    """Where the checkpoint is, as far as the sink can know it."""
    adopt_checkpoint: bool = False
    append_bytes: int = APPEND_BYTES
    apply_changes: bool = False
    background: bool = True
    """Fold and compact after a micro-batch, when that is due."""

    @classmethod
    def of(cls, options: Mapping[str, str]) -> "StreamSinkOptions":
        """Parse options; InvalidInputError names a wrong one."""
        proper = {name.lower(): name for name in STREAM_WRITING}
        own = {proper[n.lower()]: v for n, v in options.items() if n.lower() in proper}
        rest = {n: v for n, v in options.items() if n.lower() not in proper}
        for name in BATCH_WRITING:
            if name.lower() in {given.lower() for given in rest}:
                raise _bad(
                    f"a stream has no option {name}",
                    "Each micro-batch is committed once, by its number",
                )
        return cls(
            SparkWriteOptions.of(rest),
            _checkpoint(own),
            _flag(own, "adoptCheckpoint"),
            _count_option(own, "appendBytes", APPEND_BYTES),
            _flag(own, "applyChanges"),
            _flag(own, "background", default=True),
        )


def _checkpoint(given: Mapping[str, str]) -> str:
    """Return the location of a checkpoint; under a location of the session, the query's name."""
    if given.get("checkpointLocation"):
        path = HADOOP_PATH.sub("file:///", given["checkpointLocation"])
        return path.removeprefix("file://").rstrip("/") or "/"
    if given.get("queryName"):
        return f"queryName={given['queryName']}"
    raise _bad(
        "a stream into Reef needs the option checkpointLocation, or a queryName",
        "Without either, a lost checkpoint could not be recognised",
    )


# --- reading --------------------------------------------------------------------------

STARTS = ("starting", "startingLsn", "startingGeneration", "startingSnapshot")
STREAM_READING = (
    *STARTS,
    "images",
    "splitBytes",
    "leaseSeconds",
    "maxRowsPerTrigger",
    "maxBytesPerTrigger",
    "cursor",
    "pollMs",
    "cursorSeconds",
    "snapshotSeconds",
    "engine",
)
BYTES_PER_TRIGGER = 256 << 20
POLL_MS = 1000
CURSOR_S = 10
SNAPSHOT_S = 7 * 24 * 3600


@dataclass(frozen=True, slots=True)
class StreamSourceOptions:
    """The options of a streaming read."""

    location: TableLocation
    start: tuple[str, str]
    """Which option says where it begins, and its value."""
    images: bool
    split_bytes: int
    lease_s: float
    rows_max: int | None
    bytes_max: int
    cursor: str | None
    poll_s: float
    cursor_s: float
    snapshot_s: float

    @classmethod
    def of(cls, options: Mapping[str, str]) -> "StreamSourceOptions | None":
        """Parse options; None if they are a batch's. InvalidInputError names an invalid option."""
        names = {name.lower() for name in options}
        if not any(name.lower() in names for name in STARTS):
            return None
        location = TableLocation.of(options)
        given = known_options(options, STREAM_READING, "stream of changes")
        return cls(
            location,
            _start(given),
            _flag(given, "images"),
            _number(given, "splitBytes", 1) or SPLIT_BYTES,
            _seconds(given),
            _number(given, "maxRowsPerTrigger", 1),
            _count_option(given, "maxBytesPerTrigger", BYTES_PER_TRIGGER),
            given.get("cursor"),
            _from_zero(given, "pollMs", POLL_MS) / 1000,
            float(_from_zero(given, "cursorSeconds", CURSOR_S)),
            float(_count_option(given, "snapshotSeconds", SNAPSHOT_S)),
        )


def _start(given: Mapping[str, str]) -> tuple[str, str]:
    """Return the option that says where a stream begins."""
    chosen = [(name, given[name]) for name in STARTS if name in given]
    if len(chosen) > 1:
        raise _bad(f"only one of the options {', '.join(name for name, _ in chosen)} can be set")
    name, value = chosen[0]
    if name == "starting" and value not in ("all", "now"):
        raise _bad(f"the option starting={value!r} is not all or now")
    if name in ("startingLsn", "startingGeneration"):
        _number(given, name, 0 if name == "startingLsn" else 1)
    return name, value


def _from_zero(given: Mapping[str, str], name: str, default: int) -> int:
    number = _number(given, name, 0)
    return default if number is None else number
