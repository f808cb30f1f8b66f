"""Staging: the rows of one partition become sorted segments in the bucket.

    batches ── RowsPlan ──▶ checked rows ── RowSorter ──▶ by key, each once ── Staging ──▶ segments

Every task of a write runs `stage_part`. Names are new at each attempt, so a task that runs twice
leaves segments that no commit names (H39). A row that cannot be written fails the task, and with
it the write, as soon as it is met.

`df.write` gives a task whatever partition Spark has, so rows of a key may be in several of them.
Each task reduces a key to one row and stores the order of that row in notes, next to its segments:

    part 1    segments   a  c  f        notes   a 5   c 1   f 9
    part 2    segments   b  c           notes   b 2   c 7

`deduplicate` runs on the driver before the commit. If no key is in two parts, the segments are
committed as they are. Otherwise all parts are merged, in bounded memory, into segments that do not
overlap; this is the work of one process. So are parts with merges of the same keys, without notes:
merges of a key are combined.

Rows are assigned to partitions by key ranges. Spark's `repartitionByRange` samples whole rows, and
so computes all of them once more. Here the check of a load has taken a sample in its pass over the
rows: the distinct keys with the lowest hashes, a fair choice that needs no row count, and that
tasks make and merge within bounds. The bounds between partitions become one expression, a tree of
comparisons, that Spark evaluates during the shuffle.

Keys are compared as bytes. Spark's own partitioning remains for loads whose keys were not sampled,
and for very many partitions.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from reef.engine.log.tail import entry_at
from reef.engine.read.caches import ByteCache
from reef.engine.read.scan import Cursor, SegmentCursor
from reef.engine.read.segments import SegmentStore
from reef.errors import InternalError, InvalidInputError, ReefError
from reef.formats.schema import Schema
from reef.formats.versions import Versions, concat_versions
from reef.formats.wal_object import JobSegment
from reef.jobs.ingest.staging import Staging, shared_keys
from reef.runtime import Runtime
from reef.spark.options import SORT_BYTES
from reef.spark.rows import OrderNotes, RowSorter, RowsPlan, notes_schema, order_of
from reef.stores.leases import SharedLease
from reef.types import KeyRange

PARTITIONS_MAX = 512
"""Larger trees are more than Spark compiles into one method."""
SAMPLED = pa.schema([("hash", pa.int64()), ("key", pa.binary())])
Item = TypeVar("Item")
CACHE_BYTES = 32 << 20
"""For segment tails; every group is read once."""


def column_of(df: Any, name: str) -> Any:
    """Return a column by its name, whatever is in it: dots, backticks."""
    return df["`" + name.replace("`", "``") + "`"]


def numbered(df: Any) -> Any:
    """Return the same columns, named by their places.

    Spark reads a name with a dot as a path, and takes names that differ only in case for one.
    """
    return df.toDF(*map(str, range(len(df.columns))))


def by_ranges(df: Any, key: str, partitions: int, sample: Sequence[bytes] | None) -> Any:
    """Return the same rows, each range of keys in one partition; without a sample by Spark's."""
    if partitions == 1:
        return df.repartition(1)
    column = column_of(df, key).cast("binary")
    bounds: list[bytes] = []
    if sample and partitions <= PARTITIONS_MAX:
        bounds = bounds_of(sample, partitions)
    if not bounds:
        return df.repartitionByRange(partitions, column)
    return df.repartitionById(len(bounds) + 1, range_of(column, bounds))


def range_of(column: Any, bounds: Sequence[bytes]) -> Any:
    """Return an expression for the number of a key's range: that of the last bound up to it."""
    from pyspark.sql import functions as fn

    def place(low: int, high: int) -> Any:
        """Return the number, which is one of low to high."""
        if low == high:
            return fn.lit(low)
        middle = (low + high) // 2
        return fn.when(column < fn.lit(bounds[middle]), place(low, middle)).otherwise(
            place(middle + 1, high)
        )

    return place(0, len(bounds))


@dataclass(frozen=True, slots=True)
class KeySample:
    """All distinct keys whose hash is below a limit, in the order of their hashes."""

    rows: pa.Table
    """`hash` and `key`."""
    below: int | None = None
    """None if there was no reason to drop any."""

    @classmethod
    def empty(cls) -> "KeySample":
        return cls(SAMPLED.empty_table())

    def add(self, batch: pa.RecordBatch) -> "KeySample":
        """Add rows; those without a key do not count."""
        rows = pa.Table.from_batches([batch]).cast(SAMPLED).drop_null()
        return self.merge(KeySample(_below(rows, self.below)))

    def merge(self, other: "KeySample") -> "KeySample":
        """Return the sample of both: the lower limit holds for all keys."""
        limits = [limit for limit in (self.below, other.below) if limit is not None]
        below = min(limits, default=None)
        rows = pa.concat_tables([_below(self.rows, below), _below(other.rows, below)])
        return KeySample(rows.group_by(SAMPLED.names).aggregate([]), below)

    def cut(self, keys_max: int, bytes_max: int) -> "KeySample":
        """Lower the limit until the sample is within its bounds."""
        rows = self.rows.sort_by("hash").combine_chunks()
        sizes = pc.cumulative_sum(pc.binary_length(rows["key"]))
        fitting = pc.sum(pc.less_equal(sizes, bytes_max)).as_py() or 0
        kept = min(keys_max, max(1, fitting))
        if rows.num_rows <= kept:
            return KeySample(rows, self.below)
        return KeySample(rows.slice(0, kept), rows["hash"][kept].as_py())

    def to_list(self) -> list[bytes]:
        keys: list[bytes] = self.rows["key"].to_pylist()
        return keys


def _below(rows: pa.Table, limit: int | None) -> pa.Table:
    return rows if limit is None else rows.filter(pc.less(rows["hash"], limit))


def bounds_of(sample: Iterable[bytes], partitions: int) -> list[bytes]:
    """Return keys that cut a sample into even parts: the first of each part but the first one.

    >>> bounds_of([b"d", b"a", b"c", b"b"], 2)
    [b'c']
    """
    ordered = sorted(set(sample))
    if len(ordered) < 2:
        return []
    cuts = [len(ordered) * part // partitions for part in range(1, partitions)]
    found = [ordered[cut] for cut in cuts if cut]
    return found[:1] + [later for earlier, later in pairwise(found) if later != earlier]


@dataclass(frozen=True, slots=True)
class PartPlan:
    """The input of a task. Picklable."""

    staging: Staging
    rows: RowsPlan
    sort_bytes: int = SORT_BYTES
    lease: SharedLease | None = None
    """The job's lease, if no driver renews it."""
    keys_shared: bool = False
    """Whether other partitions may have rows of the same keys."""


@dataclass(frozen=True, slots=True)
class StagedPart:
    """The staged segments of a partition. Only parts that reach the driver's commit count."""

    partition: int
    attempt: int
    segments: tuple[JobSegment, ...] = ()
    notes: tuple[JobSegment, ...] = ()
    """The order of each row, if other parts may have rows of the same keys."""
    undecided: int = 0
    """Keys whose highest order occurs in two rows."""
    rows: int = 0
    duplicates: int = 0
    spilled: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Time to receive rows, to check them, and to sort and write them."""

    @property
    def bytes(self) -> int:
        return sum(segment.size for segment in self.segments)


def stage_part(
    plan: PartPlan, batches: Iterable[pa.RecordBatch], partition: int, attempt: int
) -> StagedPart:
    """Stage the rows of one partition; InvalidInputError if a row cannot be written."""
    clock = _Clock(plan.staging.store.runtime)
    received = _renewing(plan, clock.timed("receive", batches))
    checked = check_rows(plan.rows, received, partition, clock)
    return stage_rows(plan, checked, partition, attempt, clock)


def stage_rows(
    plan: PartPlan,
    checked: Iterable[Versions],
    partition: int,
    attempt: int,
    clock: "_Clock | None" = None,
) -> StagedPart:
    """Stage checked rows, in any order, as those of one partition."""
    clock = clock or _Clock(plan.staging.store.runtime)
    with_notes = plan.keys_shared and plan.rows.order is not None
    sorter = RowSorter(plan.rows, plan.sort_bytes, keeps_order=with_notes)
    part = StagedPart(partition, attempt)
    rows = _renewing(plan, sorter.sorted(checked))
    if with_notes:
        part = _stage_with_notes(plan, rows, part)
    else:
        part = replace(part, segments=plan.staging.stage(rows))
    return replace(
        part,
        rows=sorter.rows,
        duplicates=sorter.duplicates,
        spilled=sorter.spilled,
        seconds=clock.seconds(),
    )


def _stage_with_notes(plan: PartPlan, rows: Iterable[Versions], part: StagedPart) -> StagedPart:
    with OrderNotes(plan.rows) as notes:
        segments = plan.staging.stage(notes.record(rows))
        noted = notes.stage(plan.staging) if segments else ()
        return replace(part, segments=segments, notes=noted, undecided=notes.undecided)


def check_rows(
    plan: RowsPlan,
    batches: Iterable[pa.RecordBatch],
    partition: int,
    clock: "_Clock | None" = None,
) -> Iterator[Versions]:
    """Yield the rows of a partition as they are staged; an error names the partition."""
    seen = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        try:
            with nullcontext() if clock is None else clock.span("check"):
                versions = plan.versions(pa.Table.from_batches([batch]))
        except InvalidInputError as error:
            raise InvalidInputError(
                f"partition {partition}, after {seen} rows: {error.message}",
                kind=error.kind,
                hint=error.hint,
                **error.context,
            ) from error
        seen += batch.num_rows
        yield versions


def _renewing(plan: PartPlan, items: Iterable[Item]) -> Iterator[Item]:
    for item in items:
        if plan.lease is not None:
            _renew(plan.lease)
        yield item


def _renew(lease: SharedLease) -> None:
    """Renew the job's lease if it is due; the commit checks that it has not expired."""
    with suppress(ReefError):
        lease.check()


class _Clock:
    """Measures a task: time not spent receiving or checking is spent sorting and writing."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._all = runtime.stopwatch()
        self._spent = {"receive": 0.0, "check": 0.0}

    def timed(self, name: str, items: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        iterator = iter(items)
        while True:
            with self.span(name):
                item = next(iterator, None)
            if item is None:
                return
            yield item

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        started = self._runtime.monotonic_s()
        yield
        self._spent[name] += self._runtime.monotonic_s() - started

    def seconds(self) -> dict[str, float]:
        rest = self._all.elapsed_s() - sum(self._spent.values())
        return {**self._spent, "sort and write": max(0.0, rest)}


def deduplicate(staging: Staging, plan: RowsPlan, parts: Sequence[StagedPart]) -> list[JobSegment]:
    """Return the segments of all parts; merged ones if keys are in several parts."""
    segments = [segment for part in parts for segment in part.segments]
    reduces = plan.order is not None or plan.has_merges
    if not reduces or not _share_keys(staging, segments, parts):
        return segments
    reading = SegmentStore(staging.store, staging.namespace, ByteCache(CACHE_BYTES))
    cursor = _PartCursor if plan.order is None else _NotedCursor
    runs = [cursor(reading, part, staging.schema, plan) for part in parts if part.segments]
    return list(staging.stage(RowSorter(plan).merge(runs)))


def _share_keys(staging: Staging, segments: list[JobSegment], parts: Sequence[StagedPart]) -> bool:
    """Whether a key is in two parts, or has no highest row in its own."""
    if any(part.undecided for part in parts):
        return True
    return shared_keys(staging.store, staging.namespace, staging.schema, segments) is not None


class _PartCursor(Cursor):
    """The rows of one part."""

    def __init__(
        self, reading: SegmentStore, part: StagedPart, schema: Schema, plan: RowsPlan
    ) -> None:
        super().__init__()
        self._data = _pieces(reading, part.segments, schema)

    def _next(self) -> Versions | None:
        return next(self._data, None)


class _NotedCursor(_PartCursor):
    """The rows of one part, with their order column."""

    def __init__(
        self, reading: SegmentStore, part: StagedPart, schema: Schema, plan: RowsPlan
    ) -> None:
        super().__init__(reading, part, schema, plan)
        self._number = order_of(plan).number
        self._noted = notes_schema(plan)
        self._notes = _pieces(reading, part.notes, self._noted)
        self._ahead = Versions.empty(self._noted)

    def _next(self) -> Versions | None:
        rows = super()._next()
        if rows is None:
            return None
        notes = self._notes_of(rows)
        fields = {**rows.fields, self._number: notes.fields[self._number]}
        return replace(rows.with_fields(fields), seqs=notes.seqs)

    def _notes_of(self, rows: Versions) -> Versions:
        """Return the notes of these rows; both were written in the same order."""
        parts, count = [self._ahead], len(self._ahead)
        while count < len(rows):
            parts.append(next(self._notes, Versions.empty(self._noted)))
            if not len(parts[-1]):
                break
            count += len(parts[-1])
        loaded = concat_versions(parts, self._noted)
        notes, self._ahead = loaded.slice(0, len(rows)), loaded.slice(len(rows), len(loaded))
        if not notes.keys.equals(rows.keys):
            raise InternalError("rows and their notes were staged in different orders")
        return notes


def _pieces(
    reading: SegmentStore, segments: Sequence[JobSegment], schema: Schema
) -> Iterator[Versions]:
    for segment in segments:
        entry = entry_at(segment, 0, 0)
        cursor = SegmentCursor(reading, entry, KeyRange(), reverse=False, schema=schema)
        while cursor.load():
            yield cursor.take(cursor.edge(reverse=False), reverse=False)
