"""The streaming source: `spark.readStream.format("reef")` yields change rows, without a gap.

    initialOffset()  where the stream begins, by its options
    latestOffset()   the end of the next micro-batch, within Spark's limit
    partitions()     runs of WAL objects, pieces of loads, or key ranges of a snapshot
    read()           in the tasks
    commit()         moves the registered cursor, which holds the sweep back

These run in one process of the driver, for as long as the query does, and `read` in the tasks. The
log is followed by `LogFollower`, once and in order; only facts about its objects are kept.

**Offsets** are positions, in Spark's checkpoint. A micro-batch is either rows or changes:

    {"starting": …}                         not resolved yet: only before the first micro-batch
    {"lsn": 7, "snapshot": id, "key": hex}  rows of the snapshot at LSN 7 were read, below that key
    {"lsn": 7, "snapshot": id}              all of them
    {"lsn": 9, "row": 640}                  changes up to LSN 9, and 640 rows of the load at LSN 10

Spark replays a micro-batch by its two offsets, and the first one is not in its checkpoint. So the
end of the first micro-batch has all that its replay needs: the snapshot, or the LSN `after` which
it begins. A stream that starts `now` begins with a micro-batch without rows, for that reason.

**All rows, then changes.** A snapshot is taken when the stream begins, and released when its rows
were processed. The rows are puts at the snapshot's LSN; the changes are those after that LSN.

**The cursor** is registered when the stream begins, under a name that is in every offset, and moved
when a micro-batch was processed, at most every `cursorSeconds`. `reef cursors` shows how far it is
behind, and drops the cursor of a query that will not be continued. A position that was collected is
an error, never a gap (H44).

Spark 4.1 passes neither the position nor a limit to `latestOffset`: there a stream that is resumed
reads all that is available in its first micro-batch, and a snapshot is one micro-batch.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from reef.engine.handles.database import Database
from reef.engine.history.as_of import ConcurrentSweep, History, PointInTime, ReadTarget
from reef.engine.history.changes import LogFollower, move_cursor, register_cursor
from reef.engine.history.snapshots import resolve_snapshot
from reef.engine.read.caches import ByteCache
from reef.engine.read.scan import Projection
from reef.engine.read.segments import SegmentStore
from reef.engine.rows.convert import EXPIRES_AT
from reef.errors import ErrorKind, InvalidInputError, NotFoundError, ReefError, UnavailableError
from reef.formats.manifest import Manifest
from reef.manifest.roots import narrowed, take_lease
from reef.paths import Namespace
from reef.runtime import Runtime, Stopwatch
from reef.spark.change_feed import (
    AFTER,
    BEFORE,
    OWN,
    ChangePart,
    Feed,
    FeedEntry,
    IngestLayout,
    arrow_target,
    parts_of,
    read_part,
)
from reef.spark.options import STARTS, StreamSourceOptions
from reef.spark.read_plan import ROWS_WEIGHED, Share, replayed, slim, take_pin, weights_of
from reef.spark.session import error_boundary, in_error_boundary
from reef.spark.source import Reading, pieces_of, read_share, shares_of
from reef.spark.types import arrow_schema, spark_schema
from reef.stores.leases import SharedLease
from reef.types import KeyRange

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:  # Spark 4.1

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        """Not there yet."""


RESTARTS_MAX = 10
NONE = float("inf")


# --- positions ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """How far a stream was read."""

    lsn: int | None = None
    """None: where the options say that it begins."""
    row: int = 0
    """Rows that were read of the load behind `lsn`."""
    snapshot: str = ""
    """The id of the snapshot whose rows are read, or were read last."""
    key: bytes | None = None
    """Its rows were read up to here; None: all of them, or there is none."""
    after: int | None = None
    """Where the first micro-batch of changes begins."""
    cursor: str | None = None

    @classmethod
    def of(cls, offset: Mapping[str, Any]) -> "StreamPosition":
        """Parse an offset; InvalidInputError if another source wrote it."""
        if "starting" in offset:
            return cls()
        known = {"lsn", "row", "snapshot", "key", "after", "cursor"}
        if not isinstance(offset.get("lsn"), int) or not offset.keys() <= known:
            raise InvalidInputError(
                f"{dict(offset)!r} is not an offset of a stream of Reef",
                kind=ErrorKind.WRONG_CHECKPOINT,
                hint="Use a checkpoint for one query and one source only",
            )
        key = offset.get("key")
        return cls(**{**offset, "key": None if key is None else bytes.fromhex(key)})

    def to_dict(self) -> dict[str, Any]:
        """Return the offset, without the fields that are not set."""
        fields = {
            "lsn": self.lsn,
            "row": self.row or None,
            "snapshot": self.snapshot or None,
            "key": None if self.key is None else self.key.hex(),
            "after": self.after,
            "cursor": self.cursor,
        }
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def in_rows(self) -> bool:
        """Whether the snapshot has more rows."""
        return self.key is not None


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How much a micro-batch may have."""

    rows: float = NONE
    size: float = NONE


class StreamPart(InputPartition):
    """A part of the changes of a micro-batch: all that a task needs besides the options."""

    def __init__(
        self,
        part: ChangePart,
        namespace: Namespace,
        head: Manifest,
        start: Manifest | None = None,
        lease: SharedLease | None = None,
    ) -> None:
        super().__init__(None)
        self.part, self.namespace, self.head = part, namespace, head
        self.start, self.lease = start, lease
        """For images and `live_wins`: the generation that has the rows before the changes."""


class StreamShare(InputPartition):
    """A key range of the snapshot with which a stream begins."""

    def __init__(self, reading: Reading, share: Share) -> None:
        super().__init__(None)
        self.reading, self.share = reading, share


# --- the log, as far as it is needed --------------------------------------------------


class FollowedLog:
    """Facts about the objects behind an LSN, read in order and once."""

    def __init__(self, follower: LogFollower, after_lsn: int) -> None:
        self._follower = follower
        self._entries: deque[FeedEntry] = deque()
        self.first, self.last = after_lsn, after_lsn
        """The facts of the slots in (first, last] are known."""

    def extend(self) -> bool:
        """Read more of the log; return False at its end."""
        steps = self._follower.more()
        for step in steps:
            if step.applied is not None:
                self._follower.schema_for(step)
                self._entries.append(FeedEntry.of(step.applied))
            self.last = step.lsn
        return bool(steps)

    def probe(self) -> bool:
        """Return whether there is more: two requests, no listing."""
        return self._follower.probe()

    def after(self, lsn: int, last: float = NONE) -> Iterator[FeedEntry]:
        """Yield the objects in (lsn, last] that apply; reads on as far as necessary."""
        place = 0
        while True:
            while place < len(self._entries):
                entry = self._entries[place]
                place += 1
                if entry.lsn > last:
                    return
                if entry.lsn > lsn:
                    yield entry
            if self.last >= last or not self.extend():
                return

    def forget(self, lsn: int) -> None:
        """Drop the facts of slots up to an LSN."""
        while self._entries and self._entries[0].lsn <= lsn:
            self._entries.popleft()
        self.first = max(self.first, min(lsn, self.last))


# --- on the driver --------------------------------------------------------------------


class SnapshotRows:
    """The rows of a snapshot, in key order: a micro-batch has as many groups as fit its limit."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self._memory = reading.pin.memory or replayed(reading.pin)
        groups: list[tuple[bytes, int, int]] = []
        for piece in pieces_of(reading, self._memory):
            rows, sizes = piece.tail.index.rows[piece.groups].tolist(), piece.sizes.tolist()
            groups += zip(piece.first_keys, rows, sizes, strict=True)
        in_memory = self._memory.rows(reading.range)
        counts = len(in_memory) - np.arange(0, len(in_memory), ROWS_WEIGHED)
        for (key, size), count in zip(weights_of((), in_memory), counts.tolist(), strict=True):
            groups.append((key, min(count, ROWS_WEIGHED), size))
        groups.sort()
        self._keys = [key for key, _, _ in groups]
        self._ends = np.cumsum([(rows, size) for _, rows, size in groups] or [(0, 0)], axis=0)

    def end(self, start: bytes, limits: BatchLimits) -> bytes | None:
        """Return the key where the next micro-batch ends; None if that is the last one."""
        first = bisect_left(self._keys, start) if start else 0
        before = self._ends[first - 1] if first else np.zeros(2)
        most = before + np.array([limits.rows, limits.size])
        fit = min(int(np.searchsorted(self._ends[:, i], most[i], side="right")) for i in (0, 1))
        # The first key behind the groups that fit, and behind the first one in any case.
        low = self._keys[first] if first < len(self._keys) else start
        place = max(fit, bisect_right(self._keys, max(low, start)))
        return self._keys[place] if place < len(self._keys) else None

    def partitions(self, span: KeyRange) -> list[StreamShare]:
        """Return the shares of a key range."""
        pin = self.reading.pin
        pinned = replace(pin, memory=None, manifest=_without_segments(pin.manifest))
        sent = replace(self.reading, pin=pinned)
        return [
            StreamShare(sent, share)
            for share in shares_of(replace(self.reading, range=span), self._memory)
        ]


class ChangeStream:
    """One stream of a namespace, on the driver. Not thread-safe."""

    def __init__(self, options: StreamSourceOptions, target: pa.Schema) -> None:
        self._options = options
        self._target = target
        self._db: Database = options.location.database()
        self._store = self._db.store
        self._publisher = self._db._namespaces.publisher(options.location.namespace.name)
        self._names = self._publisher.heads.names
        self._segments = SegmentStore(self._store, self._names, ByteCache(CACHE_BYTES))
        self._log: FollowedLog | None = None
        self._rows: SnapshotRows | None = None
        self._polled: Stopwatch | None = None
        self._moved: Stopwatch | None = None
        self._extended: Stopwatch | None = None
        self._leases: list[SharedLease] = []
        self.until: int | None = None
        """The last LSN to read, if the query ends there."""
        self.cursor: str | None = options.cursor
        """Also known from offsets."""

    # --- positions ----------------------------------------------------------------
    def end_of_log(self) -> int:
        """Return the last LSN."""
        history = self._history()
        return history.end_of_log(history.head())

    def begin(self) -> StreamPosition:
        """Return where the stream begins; registers its cursor, and takes a snapshot for `all`."""
        name, value = self._options.start
        self.cursor = cursor = self._options.cursor or _new_name(self._store.runtime)
        if name == "startingSnapshot" or value == "all":
            position = self._begin_with_rows(cursor)
        elif name == "startingGeneration":
            found = self._history().find(self._head(), ReadTarget(generation=int(value)))
            position = StreamPosition(found.last_lsn, after=found.last_lsn, cursor=cursor)
        else:
            lsn = int(value) if name == "startingLsn" else self.end_of_log()
            position = StreamPosition(lsn, after=lsn, cursor=cursor)
        self._register(position)
        return position

    def _begin_with_rows(self, cursor: str) -> StreamPosition:
        name, value = self._options.start
        if name == "starting":
            ttl_s = self._options.snapshot_s
            snapshot = self._db.snapshot(self._names.name, name=cursor, ttl_s=ttl_s)
            snapshot_id, generation = snapshot.id, snapshot.generation
        else:
            _, entry = resolve_snapshot(self._store, self._names.name, value)
            snapshot_id, generation = entry.id, entry.generation
        point = self._history().find(self._head(), ReadTarget(generation=generation))
        return StreamPosition(point.last_lsn, snapshot=snapshot_id, key=b"", cursor=cursor)

    def advance(self, at: StreamPosition, limits: BatchLimits) -> StreamPosition:
        """Return the end of the next micro-batch; the position itself if there is nothing new."""
        self.cursor = at.cursor or self.cursor
        if at.lsn is None:
            at = self.begin()
            if self._options.start == ("starting", "now"):
                return at
            if not at.in_rows:
                return self._advance_changes(at, limits)
        if at.in_rows:
            return replace(at, key=self._snapshot_rows(at).end(at.key or b"", limits))
        end = self._advance_changes(StreamPosition(at.lsn, at.row, cursor=at.cursor), limits)
        return at if (end.lsn, end.row) == (at.lsn, at.row) else end

    def _advance_changes(self, at: StreamPosition, limits: BatchLimits) -> StreamPosition:
        lsn = at.lsn or 0
        until = NONE if self.until is None else self.until
        log = self._follow_log(lsn)
        if lsn >= until or (log.last == lsn and not self._has_more(log)):
            return at
        left, first, is_first = limits, at.row, True
        for entry in log.after(lsn, until):
            if entry.rows > left.rows or entry.size > left.size:
                return self._cut(at, entry, first, left, is_first)
            left = BatchLimits(left.rows - entry.rows, left.size - entry.size)
            first, is_first = 0, False
        return replace(at, lsn=int(min(log.last, until)), row=0)

    def _cut(
        self, at: StreamPosition, entry: FeedEntry, first: int, left: BatchLimits, is_first: bool
    ) -> StreamPosition:
        """Return the end before or within an object that exceeds the limit.

        A micro-batch has at least one object, or one page of a load.
        """
        before = replace(at, lsn=entry.lsn - 1, row=0)
        if not is_first and (entry.ingest is None or min(left.rows, left.size) <= 0):
            return before
        if entry.ingest is None:
            return replace(before, lsn=entry.lsn)
        layout = self._layout(entry)
        end = layout.cut(first, left.rows, left.size, pages_min=int(is_first))
        return replace(before, lsn=entry.lsn) if end >= layout.end else replace(before, row=end)

    def _has_more(self, log: FollowedLog) -> bool:
        """Whether the log has grown; asked at most every `pollMs`."""
        if self._polled is None:
            self._polled = self._store.runtime.stopwatch()
            return log.extend()
        wait_s = self._options.poll_s - self._polled.elapsed_s()
        if wait_s > 0 and self.until is None:
            self._store.runtime.sleep(wait_s)
        self._polled = self._store.runtime.stopwatch()
        return log.probe() and log.extend()

    # --- partitions ---------------------------------------------------------------
    def partitions(self, start: StreamPosition, end: StreamPosition) -> Sequence[InputPartition]:
        """Return the parts of a micro-batch, which may be a replay."""
        self.cursor = end.cursor or start.cursor or self.cursor
        if end.snapshot and (start.lsn is None or start.in_rows):
            span = KeyRange(start.key or b"", end.key)
            return self._snapshot_rows(end).partitions(span)
        first = replace(start, lsn=end.after, row=0) if start.lsn is None else start
        if first.lsn is None or end.lsn is None or (first.lsn, first.row) == (end.lsn, end.row):
            return []
        return self._change_partitions(first, end)

    def _change_partitions(self, start: StreamPosition, end: StreamPosition) -> list[StreamPart]:
        first, last = start.lsn or 0, end.lsn or 0
        log = self._follow_log(first)
        entries = [*log.after(first, last + (end.row > 0))]

        def parts_of_ingest(entry: FeedEntry) -> Iterator[ChangePart]:
            begin = start.row if entry.lsn == first + 1 else 0
            stop = end.row if entry.lsn == last + 1 else None
            return self._layout(entry).parts(self._options.split_bytes, begin, stop)

        parts = list(parts_of(entries, self._options.split_bytes, parts_of_ingest))
        head = _without_segments(slim(self._head()))
        if not parts or not (self._options.images or any(map(_may_lose, entries))):
            return [StreamPart(part, self._names, head) for part in parts]
        before, lease = self._pin_before(first, last + (end.row > 0))
        return [StreamPart(part, self._names, head, before, lease) for part in parts]

    def _pin_before(self, lsn: int, last: int) -> tuple[Manifest, SharedLease | None]:
        """Pin the rows before a micro-batch, from which images are computed.

        They are retained, or the cursor pins them, while a load with `live_wins` is open.
        """
        try:
            return self._lease_before(lsn, last)
        except NotFoundError as error:
            start = None if self._options.images else self._start(lsn)
            if start is None or error.kind is not ErrorKind.COLLECTED:
                raise
            return slim(start), None

    def _lease_before(self, lsn: int, last: int) -> tuple[Manifest, SharedLease]:
        history, ttl_s = self._history(), self._options.lease_s
        owner = f"spark-{self._store.runtime.process_id()}"
        for _ in range(RESTARTS_MAX):
            with suppress(ConcurrentSweep):
                start = history.start_of_changes(history.head(), lsn)
                lease = take_lease(self._store, self._names, start, owner=owner, ttl_s=ttl_s)
                shared = SharedLease(self._store, self._names, lease.record.id, ttl_s)
                self._leases.append(shared)
                history.check(history.head(), PointInTime(start))  # again, under the lease (H22)
                lease.narrow(**narrowed(start, last))
                return slim(start), shared
        raise UnavailableError(f"{self._names.name} is swept faster than it can be pinned")

    # --- the end of a micro-batch -------------------------------------------------
    def commit(self, end: StreamPosition, *, now: bool = False) -> None:
        """Note that everything up to a position was processed."""
        if end.lsn is None:
            return
        while self._leases:
            with suppress(ReefError):  # it expires by itself
                self._leases.pop().release()
        if self._log is not None:
            self._log.forget(end.lsn)
        if end.in_rows:
            self._keep_snapshot(end)
        elif end.snapshot:
            self._release_snapshot(end)
        is_due = self._moved is None or self._moved.elapsed_s() >= self._options.cursor_s
        if end.cursor is not None and (is_due or now):
            move_cursor(
                self._store, self._names, end.cursor, end.lsn,
                segments=self._segments, publisher=self._publisher,
            )  # fmt: skip
            self._moved = self._store.runtime.stopwatch()

    def abandon(self, position: StreamPosition) -> None:
        """Undo `begin` for a stream that has processed nothing."""
        if position.cursor is not None and self._options.cursor is None:
            self._db.drop_cursor(self._names.name, position.cursor)
        if position.snapshot:
            self._release_snapshot(position)

    def _register(self, position: StreamPosition) -> None:
        if position.cursor is None or position.lsn is None:
            return
        with suppress(ConcurrentSweep):
            register_cursor(
                self._store, self._names, position.cursor, position.lsn,
                segments=self._segments, publisher=self._publisher,
            )  # fmt: skip

    def _keep_snapshot(self, end: StreamPosition) -> None:
        """Extend the snapshot of `all`, when half of its time has passed."""
        if self._options.start[0] != "starting":
            return
        if self._extended is None:
            self._extended = self._store.runtime.stopwatch()
        elif self._extended.elapsed_s() > self._options.snapshot_s / 2:
            for snapshot in self._db.snapshots(self._names.name):
                if snapshot.id == end.snapshot:
                    snapshot.extend(self._options.snapshot_s)
            self._extended = self._store.runtime.stopwatch()

    def _release_snapshot(self, end: StreamPosition) -> None:
        """Release the snapshot of `all`; one that the user has named stays."""
        if self._rows is not None:
            with suppress(ReefError):
                self._rows.reading.pin.lease.release()
            self._rows = None
        if self._options.start[0] == "starting":
            for snapshot in self._db.snapshots(self._names.name):
                if snapshot.id == end.snapshot:
                    snapshot.release()

    # --- inside -------------------------------------------------------------------
    def _head(self) -> Manifest:
        return self._history().head()

    def _history(self) -> History:
        return History(self._store, self._names, self._segments)

    def _follow_log(self, lsn: int) -> FollowedLog:
        """Return the log behind an LSN; followed from there, unless it is known already."""
        log = self._log
        if log is None or not log.first <= lsn <= log.last:
            start = self._start(lsn)
            follower = LogFollower(self._store, self._names, self._segments, lsn, start)
            follower.check_reached()
            log = self._log = FollowedLog(follower, lsn)
            self._polled = None
        return log

    def _start(self, lsn: int) -> Manifest | None:
        """Return the generation that the cursor pins, if no newer one that fits is retained."""
        history = self._history()
        head = history.head()
        with suppress(ConcurrentSweep):
            try:
                return history.start_of_changes(head, lsn)
            except NotFoundError:
                entry = head.cursors.get(self.cursor or "")
                if entry is None or entry.lsn > lsn:
                    raise
                return history.heads.load(entry.generation)
        return None

    def _layout(self, entry: FeedEntry) -> IngestLayout:
        schema = self._head().schema
        return IngestLayout.of(entry, schema, self._segments, self._store.runtime)

    def _snapshot_rows(self, at: StreamPosition) -> SnapshotRows:
        """Return the rows of a position's snapshot, pinned by a lease too, which tasks check."""
        if self._rows is not None:
            with suppress(ReefError):
                self._rows.reading.pin.lease.verify()
                return self._rows
        heads, entry = resolve_snapshot(
            self._store, self._options.location.namespace.name, at.snapshot
        )
        pin = take_pin(self._store, heads, ReadTarget(entry.generation), self._options.lease_s)
        schema = pin.manifest.schema
        own = set(OWN.names) | {BEFORE, AFTER}
        columns = [n for n in self._target.names if n not in own]
        names = [*dict.fromkeys([schema.key.name, *columns]), EXPIRES_AT]
        reading = Reading(
            pin,
            Projection.of(schema, names, None),
            KeyRange(),
            arrow_schema(spark_schema(schema, names)),
            int(self._store.runtime.wall_s() * 1000),
            self._options.split_bytes,
        )
        self._rows = SnapshotRows(reading)
        return self._rows


def _new_name(runtime: Runtime) -> str:
    return f"spark-{runtime.ulid().lower()}"


CACHE_BYTES = 64 << 20
"""Cached block indexes, on the driver."""


def _may_lose(entry: FeedEntry) -> bool:
    """Whether rows of a load may have been beaten before they became visible."""
    job = None if entry.ingest is None else entry.ingest.job
    return job is not None and job.live_wins


def _without_segments(manifest: Manifest) -> Manifest:
    return msgspec.structs.replace(manifest, segments=())


# --- the source -----------------------------------------------------------------------

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def _explain_collected(method: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Raise the error of a collected position with advice for a stream (H44)."""

    @error_boundary
    @wraps(method)
    def wrapped(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return method(*args, **kwargs)
        except NotFoundError as error:
            if error.kind is not ErrorKind.COLLECTED:
                raise
            raise NotFoundError(
                f"this stream cannot be continued: {error.message}",
                kind=error.kind,
                hint='Start it again with an empty checkpoint and starting="all", and replace what '
                "it has written. A stream's cursor retains the log until `reef cursors drop`",
                **error.context,
            ) from error

    return wrapped


class ReefStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream of changes. On the driver it lives as long as the query; tasks only read."""

    @error_boundary
    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        given = StreamSourceOptions.of(options)
        if given is None:
            raise InvalidInputError(
                f"a stream of Reef needs one of the options {', '.join(STARTS)}",
                kind=ErrorKind.INVALID_OPTION,
                hint='Such as option("starting", "all"): all rows, then all changes',
            )
        self._options = given
        self._target = arrow_target(schema)
        self._stream: ChangeStream | None = None
        self._last: StreamPosition | None = None
        """The last position that Spark has passed or was given."""
        self._begun: StreamPosition | None = None
        self._committed: StreamPosition | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_reader, (self._options, self._target)

    @property
    def _changes(self) -> ChangeStream:
        if self._stream is None:
            self._stream = ChangeStream(self._options, self._target)
        return self._stream

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return where the stream begins: resolved with the first micro-batch."""
        self._last = StreamPosition()
        name, value = self._options.start
        return {"starting": f"{name}={value}"}

    @_explain_collected
    def latestOffset(  # noqa: N802 - Spark's name
        self, start: dict[str, Any] | None = None, limit: "ReadLimit | None" = None
    ) -> dict[str, Any]:
        """Return the end of the next micro-batch; Spark 4.1 passes no arguments."""
        at = self._last if start is None else StreamPosition.of(start)
        if at is None:  # resumed on Spark 4.1: the next offset is read by `partitions`
            end = StreamPosition(self._changes.end_of_log(), cursor=self._options.cursor)
        else:
            limits = BatchLimits() if start is None and at.lsn is None else self._limits(limit)
            end = self._changes.advance(at, limits)
            if at.lsn is None:
                self._begun = end
        self._last = end
        same = start is not None and end == StreamPosition.of(start)
        return start if same and start is not None else end.to_dict()

    def _limits(self, limit: "ReadLimit | None") -> BatchLimits:
        rows, size = self._options.rows_max or NONE, float(self._options.bytes_max)
        if limit is None:
            return BatchLimits(rows, size)
        if isinstance(limit, ReadAllAvailable):
            return BatchLimits()
        if isinstance(limit, ReadMaxRows):
            rows = min(rows, limit.max_rows)
        if isinstance(limit, ReadMaxBytes):
            size = min(size, limit.max_bytes)
        return BatchLimits(rows, size)

    def getDefaultReadLimit(self) -> "ReadLimit":  # noqa: N802 - Spark's name
        """Return the limit of a micro-batch, by the options."""
        if self._options.rows_max is not None:
            return ReadMaxRows(self._options.rows_max)
        return ReadMaxBytes(self._options.bytes_max)

    @_explain_collected
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """End the query where the log ends now."""
        self._changes.until = self._changes.end_of_log()

    @_explain_collected
    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 - Spark's name
        """Return the end of the log, which the progress of the query shows."""
        return {"lsn": self._changes.end_of_log()}

    @_explain_collected
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the parts of a micro-batch."""
        first, last = StreamPosition.of(start), StreamPosition.of(end)
        self._last = last
        return self._changes.partitions(first, last)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the change rows of a part."""
        if isinstance(partition, StreamShare):
            return in_error_boundary(_rows_as_changes(partition, self._target))
        if not isinstance(partition, StreamPart):
            raise TypeError(f"{partition!r} is not a part of a stream of Reef")
        feed = Feed(
            self._options.location.open(),
            partition.namespace,
            partition.start or partition.head,
            partition.head,
            partition.lease,
            self._target,
            self._options.images,
        )
        return in_error_boundary(read_part(feed, partition.part))

    @_explain_collected
    def commit(self, end: dict[str, Any]) -> None:
        """Move the cursor behind the rows that were processed."""
        self._committed = StreamPosition.of(end)
        self._changes.commit(self._committed)

    def stop(self) -> None:
        """Leave the cursor where the query ends; drop it if the query has processed nothing."""
        with suppress(ReefError):
            if self._stream is None:
                return
            if self._committed is not None:
                self._stream.commit(self._committed, now=True)
            elif self._begun is not None:
                self._stream.abandon(self._begun)


def _unpickle_reader(options: StreamSourceOptions, target: pa.Schema) -> ReefStreamReader:
    reader = ReefStreamReader.__new__(ReefStreamReader)
    reader._options, reader._target = options, target
    return reader


def _rows_as_changes(part: StreamShare, target: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a snapshot as puts at its LSN."""
    for rows in read_share(part.reading, part.share):
        count = rows.num_rows
        own = {
            "_op": pa.repeat("put", count),
            "_key": rows.column(0).cast(pa.binary()),
            "_lsn": pa.repeat(part.reading.pin.last_lsn, count),
            "_seq": pa.repeat(0, count),
            EXPIRES_AT: rows.column(EXPIRES_AT),
        }
        columns = []
        for field in target:
            if field.name in own:
                columns.append(own[field.name].cast(field.type))
            elif field.name == AFTER:
                arrays = [rows.column(part.name) for part in field.type]
                columns.append(pa.StructArray.from_arrays(arrays, fields=list(field.type)))
            elif field.name in rows.schema.names:
                columns.append(rows.column(field.name))
            else:
                columns.append(pa.nulls(count, field.type))
        yield pa.RecordBatch.from_arrays(columns, schema=target)
