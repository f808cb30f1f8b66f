"""Changes and differences as batch DataFrames.

**Changes** are the operations in the log of a namespace, expanded by tasks:

    reef.spark.changes(spark, url, "events", after_lsn=120, until_lsn=300)
    SELECT * FROM reef.default.events.changes WHERE _lsn > 120

    plan   replay the log by its rules, from a retained generation whose floor is at or below the
           first LSN; a lease pins that generation and the log up to the last LSN
    tasks  a run of WAL objects, or some pages of one segment of an ingest, of about splitBytes
    rows   as `reef.engine.history.change_rows` has them: _op, _key, _end_key, _lsn, _seq, …

With images, each row also has `_before` and `_after`: the whole row around this one operation,
null where there is none. A task reads the state before its first LSN and applies the operations in
order. The row of a deleted range has no images.

An LSN that was garbage-collected is an error, never a gap (H44).

**Differences** between two states are compared by tasks:

    reef.spark.diff(spark, url, "orders", "experiment")
    reef.spark.diff(spark, url, "orders", "orders", a_at=12)

    plan   pin both states with leases that tasks renew; cut the keys into ranges by the segments
           that only one of them has
    tasks  one per range: the keys of these segments and of the log, looked up on both sides
    rows   op (insert, update, delete: from a to b), key, a, b; `a` and `b` are rows as structs, or
           the bytes of a plain namespace, and null where there is no row

The pins are taken when the DataFrame is made, and held as those of a read (`reef.spark.read_plan`).
To merge on Spark: `db.merge(child, parent, executor=reef.spark.executor(spark))`.
"""

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.cloudpickle import dumps
from pyspark.sql import types as st
from pyspark.sql.datasource import DataSourceReader, InputPartition

from reef.engine.context import NamespaceContext
from reef.engine.handles.branches import DifferingRows, Side, SideRef, differing
from reef.engine.history.as_of import (
    ConcurrentSweep,
    History,
    PointInTime,
    ReadTarget,
    collected,
    read_target,
)
from reef.engine.history.change_rows import (
    change_batches,
    live_writes,
    merged_row,
    range_changes,
    segment_changes,
    state_before,
)
from reef.engine.history.changes import LogFollower
from reef.engine.log.tail import ingested_segments
from reef.engine.read.caches import ByteCache
from reef.engine.read.segments import SegmentStore
from reef.engine.read.view import View, range_tombstones_of
from reef.engine.rows.convert import to_row
from reef.errors import ErrorKind, NotFoundError, UnavailableError
from reef.formats.manifest import Manifest, SegmentEntry
from reef.formats.schema import Schema
from reef.formats.versions import RangeTombstone
from reef.formats.wal_object import WalHeader, WalKind, WalObject
from reef.jobs.branches import split
from reef.manifest.head import locate
from reef.manifest.roots import narrowed, take_lease
from reef.paths import Namespace
from reef.runtime import Runtime
from reef.spark.options import ChangeOptions, TableLocation
from reef.spark.read_plan import take_pin
from reef.spark.session import check_running, in_error_boundary
from reef.spark.spark_executor import executor
from reef.spark.types import arrow_schema, spark_schema, to_spark, with_reef_types
from reef.stores import Store
from reef.stores.leases import SharedLease
from reef.types import KeyRange

BEFORE, AFTER = "_before", "_after"
OWN = st.StructType(
    [
        st.StructField("_op", st.StringType(), False),
        st.StructField("_key", st.BinaryType(), False),
        st.StructField("_end_key", st.BinaryType(), True),
        st.StructField("_lsn", st.LongType(), False),
        st.StructField("_seq", st.LongType(), False),
        st.StructField("_touched", st.ArrayType(st.StringType()), True),
        st.StructField("_operators", st.ArrayType(st.StringType()), True),
        st.StructField("_expires_at", st.TimestampType(), True),
    ]
)
CACHE_BYTES = 64 << 20
"""Cached blocks, for the rows before a task's first change."""
RESTARTS_MAX = 10
EXPIRED_HINT = "Load the DataFrame again, or raise leaseSeconds"


def changes(
    spark: Any,
    url: str,
    namespace: str,
    *,
    after_lsn: int | None = None,
    until_lsn: int | None = None,
    images: bool = False,
    **store_options: Any,
) -> Any:
    """Return the changes of LSNs in (after_lsn, until_lsn] as a DataFrame.

    Without `after_lsn` they begin with the oldest that is retained; without `until_lsn` they end
    with the log. NotFoundError(kind=collected) if a part was garbage-collected.
    """
    reader = spark.read.format("reef").option("namespace", namespace).option("readChanges", "true")
    for name, lsn in (("afterLsn", after_lsn), ("untilLsn", until_lsn)):
        if lsn is not None:
            reader = reader.option(name, str(lsn))
    if images:
        reader = reader.option("images", "true")
    for name, value in store_options.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        reader = reader.option(f"store.{name}", text)
    return reader.load(str(url))


def feed_schema(location: TableLocation, with_images: bool) -> st.StructType:
    """Return the columns of change rows, under the newest schema."""
    schema = locate(location.open(), location.namespace.name).found.manifest.schema
    columns = [
        st.StructField(field.name, field.dataType, True) for field in spark_schema(schema).fields
    ]
    images = []
    if with_images:
        row = st.StructType(columns)
        images = [st.StructField(BEFORE, row, True), st.StructField(AFTER, row, True)]
    typed = with_reef_types(st.StructType(columns), schema)
    return st.StructType([*OWN.fields, *typed.fields, *images])


class ChangePart(InputPartition):
    """One task's part: a run of WAL objects, or a piece of an ingest."""

    def __init__(
        self, objects: Sequence[tuple[int, str]] = (), ingest: "IngestPiece | None" = None
    ) -> None:
        super().__init__(None)
        self.objects = tuple(objects)
        """LSN and write id of each."""
        self.ingest = ingest

    @property
    def first_lsn(self) -> int:
        return self.objects[0][0] if self.ingest is None else self.ingest.header.lsn

    @property
    def deleted(self) -> tuple[RangeTombstone, ...]:
        """Ranges that another part of the same ingest deletes before these rows."""
        piece = self.ingest
        return piece.tombstones if piece is not None and piece.entry is not None else ()


@dataclass(frozen=True, slots=True)
class IngestPiece:
    """Some pages of a segment of an ingest; without a segment, the ranges that it deletes."""

    header: WalHeader
    seq: int
    tombstones: tuple[RangeTombstone, ...] = ()
    """Range deletes of the whole ingest: they come before all its rows."""
    entry: SegmentEntry | None = None
    pages: range = range(0)


@dataclass(frozen=True, slots=True)
class Feed:
    """The part of a read of changes that all tasks share. Picklable."""

    store: Store
    namespace: Namespace
    start: Manifest
    """The generation from whose floor the log is replayed."""
    head: Manifest
    lease: SharedLease | None
    """None if a registered cursor pins the log."""
    target: pa.Schema
    images: bool


class ChangeReader(DataSourceReader):
    """Plans on the driver, reads on executors. Pickled to the tasks, without the parts."""

    def __init__(self, feed: Feed, parts: Sequence[ChangePart] = ()) -> None:
        self._feed, self._parts = feed, parts

    def __reduce__(self) -> tuple[Any, ...]:
        return ChangeReader, (self._feed,)

    def partitions(self) -> Sequence[ChangePart]:
        """Return the parts, in the order of their LSNs."""
        return self._parts

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the change rows of a part."""
        if not isinstance(partition, ChangePart):
            raise TypeError(f"{partition!r} is not a part of a read of changes")
        return in_error_boundary(read_part(self._feed, partition))


# --- on the driver --------------------------------------------------------------------


def plan_changes(options: ChangeOptions, schema: st.StructType) -> ChangeReader:
    """Pin the part of the log that is read, and divide it into parts."""
    store, target = options.location.open(), arrow_target(schema)
    for _ in range(RESTARTS_MAX):
        try:
            feed, parts = _plan(store, options, target)
            return ChangeReader(feed, parts or [ChangePart()])
        except ConcurrentSweep:
            continue
    name = options.location.namespace.name
    raise UnavailableError(f"{name} is swept faster than its changes can be read")


def _plan(store: Store, options: ChangeOptions, target: pa.Schema) -> tuple[Feed, list[ChangePart]]:
    heads = locate(store, options.location.namespace.name)
    names = heads.names
    segments = SegmentStore(store, names, ByteCache(0))
    history = History(store, names, segments, heads)
    head = history.head()
    start = _start(history, head, options.after_lsn)
    owner = f"spark-{store.runtime.process_id()}"
    lease = take_lease(store, names, start, owner=owner, ttl_s=options.lease_s)
    try:
        head = history.head()  # again, now that the lease is there (H22)
        history.check(head, PointInTime(start))
        end = history.end_of_log(head)
        last = end if options.until_lsn is None else min(options.until_lsn, end)
        after = max(start.wal_floor, start.wal_base) - 1
        if options.after_lsn is not None:
            after = options.after_lsn
        parts: list[ChangePart] = []
        if after < last:
            follower = LogFollower(store, names, segments, after, start)
            parts += _parts(follower, segments, last, options.split_bytes, store.runtime)
        lease.narrow(**narrowed(start, max(last, start.wal_floor - 1)))  # H74
    except BaseException:
        lease.release()
        raise
    shared = SharedLease(store, names, lease.record.id, options.lease_s, hint=EXPIRED_HINT)
    return Feed(store, names, start, head, shared, target, options.images), parts


def _start(history: History, head: Manifest, after_lsn: int | None) -> Manifest:
    if after_lsn is not None:
        return history.start_of_changes(head, after_lsn)
    try:
        return history.start_of_changes(head, 0)
    except NotFoundError as error:
        if error.kind is not ErrorKind.COLLECTED:
            raise
    return history.oldest(head)


@dataclass(frozen=True, slots=True)
class FeedEntry:
    """An object of the log that applies."""

    lsn: int
    write_id: str
    rows: int
    """Rows of a load, without the ranges that it deletes."""
    size: int
    ingest: WalHeader | None = None

    @classmethod
    def of(cls, applied: WalObject) -> "FeedEntry":
        """Return the facts of an object, without its rows."""
        header = applied.header
        if header.kind is WalKind.INGEST and header.job is not None:
            staged = header.job.segments
            rows, size = sum(s.rows for s in staged), sum(s.size for s in staged)
            return cls(header.lsn, header.write_id, rows, size, header)
        rows, size = sum(b.ops for b in header.batches), sum(map(len, applied.records))
        return cls(header.lsn, header.write_id, rows, size)


def _parts(
    follower: LogFollower,
    segments: SegmentStore,
    last_lsn: int,
    split_bytes: int,
    runtime: Runtime,
) -> Iterator[ChangePart]:
    def parts_of_ingest(entry: FeedEntry) -> Iterator[ChangePart]:
        return IngestLayout.of(entry, follower.schema, segments, runtime).parts(split_bytes)

    return parts_of(_applied_entries(follower, last_lsn), split_bytes, parts_of_ingest)


def parts_of(
    entries: Iterable[FeedEntry],
    split_bytes: int,
    parts_of_ingest: Callable[[FeedEntry], Iterable[ChangePart]],
) -> Iterator[ChangePart]:
    """Yield the parts of consecutive objects: runs of batches, and pieces of loads."""
    run: list[tuple[int, str]] = []
    size = 0
    for entry in entries:
        if run and (entry.ingest is not None or size >= split_bytes):
            yield ChangePart(run)
            run, size = [], 0
        if entry.ingest is not None:
            yield from parts_of_ingest(entry)
        else:
            run.append((entry.lsn, entry.write_id))
            size += entry.size
    if run:
        yield ChangePart(run)


def _applied_entries(follower: LogFollower, last_lsn: int) -> Iterator[FeedEntry]:
    while steps := follower.more():
        for step in steps:
            if step.lsn > last_lsn:
                return
            if step.applied is not None:
                follower.schema_for(step)
                yield FeedEntry.of(step.applied)


@dataclass(frozen=True, slots=True)
class IngestLayout:
    """Where the rows of a load are, numbered as `change_batches` does: ranges, then page by page.

    A position within a load is the number of its first row, at the start of a page.
    """

    header: WalHeader
    deleted: tuple[RangeTombstone, ...]
    segments: tuple[tuple[SegmentEntry, npt.NDArray[np.int64]], ...]
    """With the numbers of the first rows of their pages, and the one behind the last page."""

    @classmethod
    def of(
        cls, entry: FeedEntry, schema: Schema, segments: SegmentStore, runtime: Runtime
    ) -> "IngestLayout":
        """Read the block indexes of a load's segments."""
        if entry.ingest is None:
            raise ValueError(f"LSN {entry.lsn} is no ingest")
        entries = ingested_segments(entry.ingest, schema, segments.namespace)
        tails = runtime.map(segments.tail, entries)
        deleted = tuple(t for found in entries for t in range_tombstones_of(segments, found))
        first, pages = len(deleted), []
        for found, tail in zip(entries, tails, strict=True):
            counts = np.asarray(tail.index.pages.rows, np.int64)
            starts = first + np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
            pages.append((found, starts))
            first = int(starts[-1])
        return cls(entry.ingest, deleted, tuple(pages))

    @property
    def end(self) -> int:
        """The number behind the last row."""
        return int(self.segments[-1][1][-1]) if self.segments else len(self.deleted)

    def parts(
        self, split_bytes: int, first: int = 0, end: int | None = None
    ) -> Iterator[ChangePart]:
        """Yield the parts with the rows in [first, end)."""
        end = self.end if end is None else end
        if self.deleted and first == 0 < end:
            yield ChangePart(ingest=IngestPiece(self.header, 0, self.deleted))
        for entry, starts in self.segments:
            at_once = max(1, (len(starts) - 1) * split_bytes // max(1, entry.size))
            low = int(np.searchsorted(starts[:-1], first))
            high = int(np.searchsorted(starts[:-1], end))
            for page in range(low, high, at_once):
                pages = range(page, min(page + at_once, high))
                seq = int(starts[page])
                yield ChangePart(ingest=IngestPiece(self.header, seq, self.deleted, entry, pages))

    def cut(self, first: int, rows_max: float, bytes_max: float, *, pages_min: int) -> int:
        """Return the end of the next rows from `first` on, in whole pages."""
        end, pages = max(first, len(self.deleted)), 0
        for entry, starts in self.segments:
            row_bytes = entry.size / max(1, int(starts[-1] - starts[0]))
            for page in range(int(np.searchsorted(starts[:-1], first)), len(starts) - 1):
                count = int(starts[page + 1] - starts[page])
                rows_max, bytes_max = rows_max - count, bytes_max - count * row_bytes
                if (rows_max < 0 or bytes_max < 0) and pages >= pages_min:
                    return end
                end, pages = int(starts[page + 1]), pages + 1
        return end


# --- in a task ------------------------------------------------------------------------


def read_part(feed: Feed, part: ChangePart) -> Iterator[pa.RecordBatch]:
    """Yield the change rows of a part, as Spark expects them."""
    if feed.lease is not None:
        feed.lease.check()
    segments = SegmentStore(feed.store, feed.namespace, ByteCache(CACHE_BYTES))
    schema = feed.head.schema
    images = None
    if feed.images and (part.objects or part.ingest):
        row = feed.target.field(BEFORE).type
        images = Images(_state_before(feed, segments, part.first_lsn), schema, row, part.deleted)
    names = [name for name in feed.target.names if name not in (BEFORE, AFTER)]
    try:
        for batch, header in _batches(feed, part, segments):
            arrays = [batch.column(name) for name in names]
            if images is not None:
                arrays += images.around(batch, header.created_at_ms)
            rows = pa.RecordBatch.from_arrays(arrays, names=feed.target.names)
            yield to_spark(rows, feed.target)
            if feed.lease is not None:
                feed.lease.check()
    except NotFoundError as error:
        if feed.lease is not None:
            feed.lease.verify()
        raise collected(feed.namespace, part.first_lsn) from error


def _batches(
    feed: Feed, part: ChangePart, segments: SegmentStore
) -> Iterator[tuple[pa.RecordBatch, WalHeader]]:
    schema = feed.head.schema
    piece = part.ingest

    def state(lsn: int) -> View:
        return _state_before(feed, segments, lsn)

    if piece is not None and piece.entry is None:
        yield range_changes(piece.tombstones, piece.header.lsn, piece.seq, schema), piece.header
    elif piece is not None and piece.entry is not None:
        for batch in segment_changes(
            piece.entry,
            piece.pages,
            piece.header.lsn,
            piece.seq,
            schema=schema,
            segments=segments,
            live=live_writes(piece.header, schema, state),
        ):
            yield batch, piece.header
    schemas = {0: schema, **{known.id: known for known in feed.head.schemas}}
    log = NamespaceContext(feed.store, feed.namespace).log
    for lsn, write_id in part.objects:
        found = log.read(lsn)
        if found is None or found.header.write_id != write_id:
            raise collected(feed.namespace, lsn)
        for batch in change_batches(found, schemas, schema, segments, state):
            yield batch, found.header


def _state_before(feed: Feed, segments: SegmentStore, lsn: int) -> View:
    """Return the rows before an LSN, from the generation that the lease pins."""
    heads = NamespaceContext(feed.store, feed.namespace).heads
    history = History(feed.store, feed.namespace, segments, heads)
    # Not as it was sent: without its dedup window and marks other objects would count.
    view = state_before(history, heads.load(feed.start.generation), feed.head, lsn)
    if feed.lease is not None:
        feed.lease.verify()
    return view


Row = dict[str, Any] | None


class Images:
    """The rows before and after each change, in order, from the state before the first one.

    `deleted` are ranges that come before the changes, in another part.
    """

    def __init__(
        self, view: View, schema: Schema, target: pa.DataType, deleted: Sequence[RangeTombstone]
    ) -> None:
        self._view, self._schema = view, schema
        self._target = pa.schema(list(target))
        self._rows: dict[bytes, tuple[Row, int | None]] = {}
        """By key: the row, and when it expires."""
        self._deleted: list[tuple[bytes, bytes | None]] = [(t.start, t.end) for t in deleted]

    def around(self, batch: pa.RecordBatch, now_ms: int) -> list[pa.Array]:
        """Return the rows before and after each change of a batch, as two columns."""
        changed = batch.to_pylist()
        self._load([change["_key"] for change in changed], now_ms)
        around = [self._apply(change, now_ms) for change in changed]
        return [self._column([pair[side] for pair in around]) for side in (0, 1)]

    def _load(self, keys: Sequence[bytes], now_ms: int) -> None:
        new = sorted(set(keys) - self._rows.keys())
        for key, entry in zip(new, self._view.get_each(new, now_ms), strict=True):
            if entry is None or any(_covers(deleted, key) for deleted in self._deleted):
                self._rows[key] = None, None
            else:
                self._rows[key] = to_row(key, entry.values, self._schema), entry.expires_at_ms

    def _apply(self, change: Mapping[str, Any], now_ms: int) -> tuple[Row, Row]:
        key, op = change["_key"], change["_op"]
        if op == "delete_range":
            deleted = key, change["_end_key"]
            self._deleted.append(deleted)
            self._rows |= {k: (None, None) for k in self._rows if _covers(deleted, k)}
            return None, None
        before, expires = self._rows[key]
        if expires is not None and expires <= now_ms:
            before = None
        after = before
        if op in ("put", "merge"):
            at = change["_expires_at"]
            expires = None if at is None else int(at.timestamp() * 1000)
        if op == "put":
            after = {name: change[name] for name in self._target.names}
        elif op == "merge":
            after = merged_row(before, change, self._schema)
        elif op == "delete":
            after = None
        elif before is not None:
            after = {**before, **{name: change[name] for name in change["_touched"]}}
        self._rows[key] = after, expires
        return before, after

    def _column(self, rows: Sequence[Row]) -> pa.Array:
        ours = self._schema.arrow()
        names = self._target.names
        columns = [
            pa.array([None if row is None else row[n] for row in rows], ours.field(n).type)
            for n in names
        ]
        batch = to_spark(pa.RecordBatch.from_arrays(columns, names=names), self._target)
        missing = pa.array([row is None for row in rows], pa.bool_())
        return pa.StructArray.from_arrays(batch.columns, fields=list(self._target), mask=missing)


def _covers(deleted: tuple[bytes, bytes | None], key: bytes) -> bool:
    start, end = deleted
    return start <= key and (end is None or key < end)


def arrow_target(schema: st.StructType) -> pa.Schema:
    """Return the Arrow schema of change rows; images are structs, which tables do not have."""
    plain = st.StructType([f for f in schema.fields if f.name not in (BEFORE, AFTER)])
    fields = {field.name: field for field in arrow_schema(plain)}
    for field in schema.fields:
        if isinstance(field.dataType, st.StructType):
            row = pa.struct(list(arrow_schema(field.dataType)))
            fields[field.name] = pa.field(field.name, row, True)
    return pa.schema([fields[name] for name in schema.names])


LEASE_S = 3600.0
Batches = Iterator[pa.RecordBatch]


@dataclass(frozen=True, slots=True)
class DiffTask:
    """A key range to compare. Picklable."""

    a: SideRef
    b: SideRef
    leases: tuple[SharedLease, SharedLease]
    bounds: KeyRange


def diff(
    spark: Any,
    url: str,
    a: str,
    b: str,
    *,
    a_at: Any = None,
    b_at: Any = None,
    lease_s: float = LEASE_S,
    **store_options: Any,
) -> Any:
    """Return the rows that differ between two namespaces, or points in time, as a DataFrame.

    Columns: `op`, `key`, `a`, `b`, as `db.diff` yields them. `a_at` and `b_at` are a generation, a
    datetime, ISO 8601 text or `{"lsn": 12}`; by default the newest state is read. Tasks renew the
    pins; without a task for `lease_s` seconds they expire, and a later action is an error of the
    kind `collected`.
    """
    check_running(spark)
    store = TableLocation(str(url), Namespace(a), store_options).open()
    (ref_a, lease_a), (ref_b, lease_b) = (
        _pin_point(store, *one, lease_s) for one in ((a, a_at), (b, b_at))
    )
    side_a, side_b = ref_a.open(), ref_b.open()
    ranges = split(side_a, side_b, executor(spark))
    tasks = [DiffTask(ref_a, ref_b, (lease_a, lease_b), bounds) for bounds in ranges]
    packed = [dumps(task) for task in tasks]  # type: ignore[no-untyped-call]
    given = spark.createDataFrame(list(enumerate(packed)), "place int, task binary")
    schema = diff_schema(side_a.schema, side_b.schema)
    rows = given.repartitionById(len(packed), "place")
    return rows.mapInArrow(_comparing(schema), schema)


def _pin_point(store: Store, name: str, at: Any, lease_s: float) -> tuple[SideRef, SharedLease]:
    target = ReadTarget() if at is None else read_target(at)
    pin = take_pin(store, locate(store, name), target, lease_s)
    now_ms = int(store.runtime.wall_s() * 1000)
    generation = pin.manifest.generation
    return SideRef(store, pin.namespace, generation, pin.last_lsn, now_ms), pin.lease


def diff_schema(a: Schema, b: Schema) -> st.StructType:
    """Return the columns of differences."""
    return st.StructType(
        [
            st.StructField("op", st.StringType(), False),
            st.StructField("key", spark_schema(b)[b.key.name].dataType, False),
            st.StructField("a", _row_type(a), True),
            st.StructField("b", _row_type(b), True),
        ]
    )


def _row_type(schema: Schema) -> st.DataType:
    return st.BinaryType() if schema.is_plain else spark_schema(schema)


# --- in tasks ---------------------------------------------------------------------------


def _comparing(schema: st.StructType) -> Callable[[Batches], Batches]:
    target = arrow_schema(schema)

    def run(batches: Batches) -> Batches:
        for batch in batches:
            for packed in batch.column(1).to_pylist():
                yield from compare(pickle.loads(packed), target)

    return run


def compare(task: DiffTask, target: pa.Schema) -> Batches:
    """Yield the differences in a task's range."""
    a, b = task.a.open(), task.b.open()
    for rows in differing(a, b, task.bounds):
        for lease in task.leases:
            lease.check()
        yield to_spark(_as_batch(rows, a, b), target)


def _as_batch(rows: DifferingRows, a: Side, b: Side) -> pa.RecordBatch:
    in_a, in_b = (table.column("_found").combine_chunks() for table in (rows.a, rows.b))
    ops = pc.if_else(in_a, pc.if_else(in_b, "update", "delete"), "insert")
    key = rows.keys.cast(b.schema.key.arrow)
    return pa.RecordBatch.from_arrays(
        [ops, key, _rows(rows.keys, rows.a, a), _rows(rows.keys, rows.b, b)],
        names=["op", "key", "a", "b"],
    )


def _rows(keys: pa.Array, table: pa.Table, side: Side) -> pa.Array:
    """Return the rows of one side: bytes, or structs with the key; null where there is none."""
    schema, found = side.schema, table.column("_found").combine_chunks()
    columns = {
        field.name: table.column(field.name).combine_chunks().cast(field.arrow)
        for field in schema.fields
    }
    if schema.is_plain:
        return columns[schema.fields[0].name]
    columns = {schema.key.name: keys.cast(schema.key.arrow), **columns}
    batch = to_spark(pa.RecordBatch.from_pydict(columns), arrow_schema(spark_schema(schema)))
    return pa.StructArray.from_arrays(
        batch.columns, fields=list(batch.schema), mask=pc.invert(found)
    )
