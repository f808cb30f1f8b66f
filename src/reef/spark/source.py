"""The Python data source `reef`: the methods that Spark calls, and the tasks of a read.

    schema()      while the DataFrame is created; pins a snapshot, and checks all options
    reader()      before the first task, in another process: uses that pin
    partitions()  plans; once for each DataFrame
    read()        in the tasks

Spark pickles the source from process to process, and with it the pin. If the user gives a schema,
Spark does not call `schema`, and `reader` takes the pin. Spark's `pushFilters` for Python sources
returns wrong rows and is not used (a test checks it): ranges, columns and conditions are options.

A task merges its key range from all segments and the unfolded log, as any scan of Reef does, and
yields Arrow batches. It may run more than once, also concurrently: it changes nothing. A scan
announces its next reads (`expect`); as many as fit a limit of bytes are started on threads, over
all segments of the task. Decoding stays in the task's own thread, since Spark runs a task on each
core.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from reef.engine.read.caches import ByteCache
from reef.engine.read.memtable import MemtableCut
from reef.engine.read.scan import Projection
from reef.engine.read.segments import SegmentStore
from reef.engine.read.view import Scan
from reef.engine.where import Where, parse
from reef.errors import CorruptionError, ErrorKind, InvalidInputError, NotFoundError, ReefError
from reef.formats.coding import Buffer
from reef.formats.manifest import SegmentEntry
from reef.formats.schema import Schema
from reef.formats.segment import SegmentTail
from reef.formats.versions import Versions
from reef.paths import Namespace
from reef.runtime import Future
from reef.spark.options import (
    REQUEST,
    ChangeOptions,
    ReadOptions,
    StreamSinkOptions,
    StreamSourceOptions,
)
from reef.spark.read_plan import (
    GROUPS_SENT_MAX,
    ReadPin,
    Share,
    SharePart,
    cut,
    memory_of,
    piece_of,
    ranges_between,
    replayed,
    share_of,
    take_pin,
    weights_of,
)
from reef.spark.session import (
    Counts,
    CountsSum,
    counts_of,
    error_boundary,
    in_error_boundary,
    send_counts,
)
from reef.spark.types import arrow_schema, check_same, spark_schema, to_spark
from reef.stores import Store
from reef.types import KeyRange

if TYPE_CHECKING:
    from reef.spark.sink import ReefWriter
    from reef.spark.stream_sink import ReefChangeWriter, ReefStreamWriter
    from reef.spark.stream_source import ReefStreamReader


AHEAD_BYTES = 16 << 20
"""Stored bytes in flight, over all segments of a task."""
THREADS = 4

Read = tuple[str, tuple[tuple[int, int], ...]]


class KnownTails(SegmentStore):
    """Segments with known tails, which number the groups. Blocks are read once and not cached."""

    def __init__(self, store: Store, namespace: Namespace, tails: dict[str, SegmentTail]) -> None:
        super().__init__(store, namespace, ByteCache(0))
        self._tails = tails

    def tail(self, entry: SegmentEntry) -> SegmentTail:
        known = self._tails.get(entry.id)
        if known is None:
            known = self._tails[entry.id] = super().tail(entry)
        return known


class ReadAhead(KnownTails):
    """Prefetches the blocks of one task, which reads each group once and in order."""

    reads_ahead = True

    def __init__(self, store: Store, namespace: Namespace, tails: dict[str, SegmentTail]) -> None:
        super().__init__(store, namespace, tails)
        self._coming: dict[Read, tuple[Future[Sequence[Buffer]], int]] = {}
        self._pool = store.runtime.pool(THREADS, name="read ahead")
        self._left = AHEAD_BYTES

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(self, *error: object) -> None:
        self._coming.clear()
        self._pool.close()

    def expect(
        self, entry: SegmentEntry, pages: Sequence[int], columns: Sequence[int] | None = None
    ) -> None:
        """Start a read that follows soon, if it fits the byte limit."""
        key, spans = self._spans(entry, pages, columns)
        read = (key, tuple(spans))
        size = sum(end - start for start, end in spans)
        if read in self._coming or size > self._left:
            return
        self._left -= size
        self._coming[read] = self._pool.submit(self._store.get_ranges, key, spans), size

    def _read_ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> Sequence[Buffer]:
        """Return prefetched ranges, or read them now."""
        coming = self._coming.pop((key, tuple(spans)), None)
        if coming is None:
            return super()._read_ranges(key, spans)
        fetched, size = coming
        self._left += size
        return fetched.result()


BATCH_ROWS = 65_536
BATCH_BYTES_MAX = 16 << 20
"""Limit for batches of long rows: Spark copies them three times."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The part of a read that all tasks share. Picklable."""

    pin: ReadPin
    projection: Projection
    range: KeyRange
    target: pa.Schema
    now_ms: int
    """The time that decides expiry, for all tasks."""
    split_bytes: int
    meter: int | None = None
    planning: Counts = field(default_factory=dict)
    """Request counts of the pin."""

    def scan(self, memory: MemtableCut, segments: SegmentStore, share: Share | None = None) -> Scan:
        manifest = self.pin.manifest if share is None else share.manifest
        keys = self.range if share is None else share.range
        return Scan(manifest, segments, (memory,), keys, self.now_ms, False, self.projection)


class ReefReader(DataSourceReader):
    """Plans on the driver, reads on executors."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the log: each share has its own part of it.

        A copy that has to plan replays the log again.
        """
        pin = replace(self._reading.pin, memory=None)
        return ReefReader, (replace(self._reading, pin=pin),)

    @error_boundary
    def partitions(self) -> list[Share]:
        """Return the shares, in the order of their keys."""
        reading = self._reading
        memory = reading.pin.memory
        if memory is None:
            memory = replayed(reading.pin)
        shares = list(shares_of(reading, memory))
        planning = counts_of(reading.pin.store, "planning.")
        shares[0].planning = CountsSum().addInPlace(planning, reading.planning)
        return shares

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a share, by key."""
        if not isinstance(partition, Share):
            raise TypeError(f"{partition!r} is not a share of a Reef read")
        return in_error_boundary(read_share(self._reading, partition))


# --- on the driver --------------------------------------------------------------------


def shares_of(reading: Reading, memory: MemtableCut) -> Iterator[Share]:
    """Yield the shares of a read, in the order of their keys."""
    pin = reading.pin
    pieces = pieces_of(reading, memory)
    groups = sum(len(piece.groups) for piece in pieces)
    keys = cut(weights_of(pieces, memory.rows(reading.range)), reading.split_bytes)
    for span in ranges_between(reading.range, keys):
        sent = None if pin.memory is None else memory_of(pin, span)
        yield share_of(
            span,
            pin.manifest,
            pieces,
            sent,
            ingested=memory.ingested,
            with_tails=groups <= GROUPS_SENT_MAX,
        )


def pieces_of(reading: Reading, memory: MemtableCut) -> list[SharePart]:
    """Read the block indexes in parallel; return the groups to read of each segment."""
    store = reading.pin.store
    segments = SegmentStore(store, reading.pin.namespace, ByteCache(0))
    scan = reading.scan(memory, segments)
    overlapping = scan.overlapping()
    tails = store.runtime.map(segments.tail, overlapping)
    ids = (entry.id for entry in overlapping)
    known = KnownTails(store, reading.pin.namespace, dict(zip(ids, tails, strict=True)))
    skipping = replace(scan, segments=known).skipping(overlapping)
    return [
        piece_of(entry, tail, reading.range, reading.projection, skipping.needless(entry))
        for entry, tail in zip(overlapping, tails, strict=True)
    ]


# --- in a task ------------------------------------------------------------------------


def read_share(reading: Reading, share: Share) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a share, by key, as Spark expects them."""
    pin = reading.pin
    counts: Counts = {"tasks": 1, **share.planning}
    before = counts_of(pin.store)
    pin.lease.check()
    memory = share.memory if share.memory is not None else replayed(pin)
    with ReadAhead(pin.store, pin.namespace, dict(share.tails)) as segments:
        for batch in _of_good_size(_batches(reading, reading.scan(memory, segments, share))):
            counts["batches"] = counts.get("batches", 0) + 1
            counts["rows"] = counts.get("rows", 0) + len(batch)
            yield to_spark(batch, reading.target)
    if reading.meter is not None:
        for name, count in counts_of(pin.store).items():
            counts[name] = count - before.get(name, 0)
        send_counts(reading.meter, counts)


def _batches(reading: Reading, scan: Scan) -> Iterator[pa.RecordBatch]:
    schema = reading.pin.manifest.schema
    for rows in _protected(reading.pin, scan):
        batch = reading.projection.batch(rows, schema)
        if len(batch):
            yield batch


def _protected(pin: ReadPin, scan: Scan) -> Iterator[Versions]:
    """Yield the rows of a scan while the lease is valid."""
    try:
        for rows in scan:
            yield rows
            pin.lease.check()
    except NotFoundError as error:
        pin.lease.verify()  # it was swept if the lease has expired
        raise CorruptionError(
            f"{error.message}, though generation {pin.manifest.generation} needs it",
            hint="Run verify, then repair",
            **error.context,
        ) from error


def _of_good_size(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Concatenate small batches."""
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        waiting.append(batch)
        rows += len(batch)
        size += batch.nbytes
        if rows >= BATCH_ROWS or size >= BATCH_BYTES_MAX:
            yield _concat_batches(waiting)
            waiting, rows, size = [], 0, 0
    if waiting:
        yield _concat_batches(waiting)


def _concat_batches(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


class ReefSource(DataSource):
    """A namespace as a table of Spark."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._pin: ReadPin | None = None
        self._planning: Counts = {}

    @classmethod
    def name(cls) -> str:
        return "reef"

    @error_boundary
    def schema(self) -> StructType:
        """Return the columns of the snapshot that is read."""
        if any(name.lower() == REQUEST for name in self.options):  # the native reader plans
            from reef.spark.planner import respond

            return respond(self.options)
        feed = StreamSourceOptions.of(self.options) or ChangeOptions.of(self.options)
        if feed is not None:
            from reef.spark.change_feed import feed_schema

            return feed_schema(feed.location, feed.images)
        options = ReadOptions.of(self.options)
        with self._pinned(options) as pin:
            schema = pin.manifest.schema
            _projection(schema, options, options.columns)
            self._planning = counts_of(pin.store, "planning.")
            return spark_schema(schema, options.columns)

    @error_boundary
    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader; `schema` may be given by the user."""
        feed = ChangeOptions.of(self.options)
        if feed is not None:
            from reef.spark.change_feed import plan_changes

            return plan_changes(feed, schema)
        options = ReadOptions.of(self.options)
        with self._pinned(options) as pin:
            ours = pin.manifest.schema
            if not schema.names:  # rows without columns cannot be counted by Spark
                raise InvalidInputError(
                    "the given schema has no columns", kind=ErrorKind.INVALID_OPTION
                )
            check_same(schema, spark_schema(ours, schema.names))
            projection = _projection(ours, options, schema.names)
        keys = options.range
        if projection.where is not None:
            keys = keys.both(projection.where.key_range())
        return ReefReader(
            Reading(
                pin,
                projection,
                keys,
                arrow_schema(schema),
                int(pin.store.runtime.wall_s() * 1000),
                options.split_bytes,
                options.meter,
                self._planning,
            )
        )

    def writer(self, schema: StructType, overwrite: bool) -> "ReefWriter":
        """Begin a job; return the writer that stages and commits its rows."""
        from reef.spark.sink import ReefWriter  # tasks that read need no jobs

        return ReefWriter(self.options, schema, overwrite)

    def streamReader(self, schema: StructType) -> "ReefStreamReader":  # noqa: N802 - Spark's name
        """Return the reader of a stream of changes."""
        from reef.spark.stream_source import ReefStreamReader

        return ReefStreamReader(self.options, schema)

    @error_boundary
    def streamWriter(  # noqa: N802 - Spark's name
        self, schema: StructType, overwrite: bool
    ) -> "ReefStreamWriter | ReefChangeWriter":
        """Return the writer of one micro-batch."""
        given = StreamSinkOptions.of(self.options)
        if given.apply_changes:
            from reef.spark.stream_sink import ReefChangeWriter

            return ReefChangeWriter(given, schema, overwrite)
        from reef.spark.stream_sink import ReefStreamWriter

        return ReefStreamWriter(given, schema, overwrite)

    @contextmanager
    def _pinned(self, options: ReadOptions) -> Iterator[ReadPin]:
        """Pin a snapshot once; release its lease if the read is refused."""
        if self._pin is None:
            store = options.location.open()
            heads, target = options.target(store)
            self._pin = take_pin(store, heads, target, options.lease_s)
        try:
            yield self._pin
        except ReefError:
            self._pin.lease.release()
            raise


def register(spark: Any) -> None:
    """Register `format("reef")` in a session that has not found it by itself.

    Threads need it before they write: Spark searches Python sources in the active session of the
    thread, and only the thread that has created the session has one.
    """
    spark.dataSource.register(ReefSource)
    spark.createDataFrame([], "id string")  # makes the session the active one


def _projection(schema: Schema, options: ReadOptions, columns: Any) -> Projection:
    """Return the columns and conditions of a read, checked; keys become a condition."""
    projection = Projection.of(schema, columns, options.where)
    if options.keys is None:
        return projection
    keys = parse([(schema.key.name, "in", list(options.keys))], schema)
    known = projection.where.conditions if projection.where is not None else ()
    return Projection(projection.columns, Where((*known, *keys.conditions)), projection.numbers)
