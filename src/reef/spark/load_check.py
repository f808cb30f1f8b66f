"""The check of a bulk load: one pass over its rows, before anything is written.

Columns and types are compared with the namespace first. Then each task converts the first rows of
its partition, counts null keys and keys of an invalid length, and keeps a sample of its keys; one
more task merges these reports. The driver receives counts, messages and a bounded sample of keys,
never rows. The number of partitions follows from the number of rows and their size, the bounds
between them from the sample: the source is not evaluated again to find them.

Over a plan that Spark can narrow, such as a scan of files with filters, the check is two jobs: one
reads keys alone, of which Python receives a fair part and all that are invalid; the other reads the
first rows of each partition and stops there. Spark counts the rows: of a scan without filters from
metadata, otherwise as the keys pass by. Over any other plan, which would be
evaluated twice, it is one job: Python receives the whole of the first rows, and of all others the
key and its hash.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from reef.config import IngestSettings
from reef.engine.handles.database import Database
from reef.errors import ErrorKind, InvalidInputError
from reef.formats.wal_object import KEY_BYTES_MAX
from reef.paths import Namespace
from reef.spark.options import SORT_BYTES, TableLocation
from reef.spark.rows import RowsPlan
from reef.spark.session import (
    batch_rows,
    check_dataframe,
    check_running,
    from_message,
    larger_batches,
    parallelism,
    to_message,
)
from reef.spark.sink import Target, find_target
from reef.spark.staging import SAMPLED, KeySample, column_of, numbered
from reef.spark.types import OP

SAMPLE_ROWS = 1000
"""Sampled rows of each partition."""
SAMPLE_BYTES = 4 << 20
"""Sampled bytes of each partition: a sample of large values ends here."""
PROBLEMS_MAX = 20
PARTITION_BYTES_MIN = 16 << 20
"""Smaller partitions are not worth a task each."""
PARTITIONS_MAX = 10_000
TASK_KEYS, TASK_KEY_BYTES = 8_000, 256 << 10
"""The sample of keys of each task."""
KEYS, KEY_BYTES = 200_000, 16 << 20
"""The merged sample. Of 200 keys for each partition, ranges are even to within about a tenth."""
THINNED = ((1 << 14, 8), (1 << 17, 64))
"""From these rows of a partition on, Python receives only one of so many keys: those whose hash is
low."""
HASH_MIN = -(1 << 63)
NARROW = (
    *("Project", "Filter", "Union", "SubqueryAlias", "LocalRelation", "Range"),
    *("LogicalRelation", "DataSourceV2Relation", "DataSourceV2ScanRelation"),
)
"""Nodes of plans over which Spark prunes columns, and a task that stops early has done little."""
MERGED_HERE_MAX = 64
"""The driver merges the reports of so many tasks; those of more are merged in another task."""
ROW_NUMBER = (1 << 33) - 1
"""The bits of Spark's `monotonically_increasing_id` that count the rows of a partition."""


@dataclass(frozen=True, slots=True)
class Preflight:
    """The result of checking a load before anything is written."""

    namespace: str
    creates: bool
    """Whether the namespace does not exist yet."""
    columns: tuple[str, ...]
    rows: int | None
    """None if the pass over the keys was skipped."""
    null_keys: int
    bad_length_keys: int
    longest_key: int
    """Of a scan: the longest one of the sample, and of the keys with an invalid length."""
    bytes: int | None
    """Estimated size of the rows in memory, from the sample."""
    partitions: int
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Check:
    """The namespace of a load, the report, and a sample of the keys."""

    target: Target
    report: Preflight
    keys: tuple[bytes, ...] | None
    """None if the pass over the rows was skipped."""


def preflight(
    df: Any,
    url: str,
    namespace: str,
    *,
    key: str | None = None,
    order_by: str | None = None,
    vectors: Mapping[str, int] | None = None,
    segment_bytes: int | None = None,
    partitions: int | None = None,
    store_options: Mapping[str, Any] | None = None,
) -> Preflight:
    """Check a load as `bulk_load` does before it writes anything; return all problems."""
    check_dataframe(df)
    check_numbers(segment_bytes, partitions)
    location = TableLocation(str(url), Namespace(namespace), store_options or {})
    try:
        return check_load(
            location.database(),
            location,
            df,
            order_by=order_by,
            key=key,
            vectors=vectors,
            partitions=partitions,
            segment_bytes=segment_bytes,
        ).report
    except InvalidInputError as error:  # columns that cannot be loaded
        problems = tuple(error.context.get("problems", (error.message,)))
        return Preflight(namespace, False, tuple(df.columns), None, 0, 0, 0, None, 0, problems)


def check_numbers(
    segment_bytes: int | None, partitions: int | None, sort_bytes: int = SORT_BYTES
) -> dict[str, Any]:
    """Return the settings of the job; InvalidInputError if a number is out of range."""
    numbers = {"partitions": partitions, "sort_bytes": sort_bytes, "segment_bytes": segment_bytes}
    for name, number in numbers.items():
        if number is not None and (not isinstance(number, int) or number < 1):
            raise InvalidInputError(
                f"{name}={number!r} is not a number from 1 on", kind=ErrorKind.INVALID_OPTION
            )
    return {} if segment_bytes is None else {"segment_bytes": segment_bytes}


def check_load(
    db: Database,
    location: TableLocation,
    df: Any,
    *,
    order_by: str | None = None,
    key: str | None = None,
    vectors: Mapping[str, int] | None = None,
    partitions: int | None = None,
    segment_bytes: int | None = None,
    count: bool = True,
) -> Check:
    """Check columns, a sample and the keys; InvalidInputError if the columns do not fit."""
    check_running(df.sparkSession)
    target = find_target(
        db, location.namespace, df.schema, order_by=order_by, key=key, vectors=vectors
    )
    found = _run_pass(df, target.rows) if count else None
    size = None if found is None else found.size
    if partitions is None:
        partitions = count_partitions(
            size, segment_bytes or IngestSettings().segment_bytes, parallelism(df.sparkSession)
        )
    counts = KeyCounts() if found is None else found.counts
    report = Preflight(
        location.namespace.name,
        target.make is not None,
        tuple(df.columns),
        None if found is None else counts.rows,
        counts.null_keys,
        counts.bad_length,
        counts.longest,
        size,
        partitions,
        () if found is None else found.problems(target.schema.key.name),
    )
    return Check(target, report, None if found is None else tuple(found.keys.to_list()))


def raise_problems(checks: Preflight) -> None:
    """Raise InvalidInputError with all problems, if there are any."""
    if checks.problems:
        raise InvalidInputError(
            f"{checks.namespace} cannot be loaded: {'; '.join(checks.problems)}",
            kind=ErrorKind.INVALID_KEY if checks.null_keys or checks.bad_length_keys else None,
            hint="Nothing was written",
        )


def count_partitions(size: int | None, segment_bytes: int, parallelism: int) -> int:
    """Return the number of partitions: segments of the given size, and no idle core.

    >>> count_partitions(580 << 20, 256 << 20, 2), count_partitions(1 << 20, 256 << 20, 8)
    (4, 1)
    """
    if size is None:
        return 2 * parallelism
    segments = max(1, -(-size // segment_bytes))
    partitions_max = max(1, size // PARTITION_BYTES_MIN)
    rounds = -(-segments // parallelism)
    return min(PARTITIONS_MAX, partitions_max, rounds * parallelism)


# --- the pass ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeyCounts:
    """The keys of a load, and those that cannot be stored."""

    rows: int = 0
    null_keys: int = 0
    bad_length: int = 0
    longest: int = 0

    def merge(self, other: "KeyCounts") -> "KeyCounts":
        return KeyCounts(
            self.rows + other.rows,
            self.null_keys + other.null_keys,
            self.bad_length + other.bad_length,
            max(self.longest, other.longest),
        )

    def problems(self, key: str) -> list[str]:
        problems = []
        if self.null_keys:
            problems.append(f"column {key}: {self.null_keys} keys are null")
        if self.bad_length:
            problems.append(
                f"column {key}: {self.bad_length} keys do not have 1 to {KEY_BYTES_MAX} bytes, "
                f"the longest has {self.longest}"
            )
        return problems


def count_keys(keys: pa.Array) -> KeyCounts:
    """Count keys, null keys and keys of an invalid length.

    >>> count_keys(pa.array([b"a", None, b""]))
    KeyCounts(rows=3, null_keys=1, bad_length=1, longest=1)
    """
    lengths = pc.binary_length(keys)
    invalid = pc.or_(pc.less(lengths, 1), pc.greater(lengths, KEY_BYTES_MAX))
    return KeyCounts(
        len(keys), keys.null_count, pc.sum(invalid).as_py() or 0, pc.max(lengths).as_py() or 0
    )


@dataclass(frozen=True, slots=True)
class SampleReport:
    """Number and size of sampled rows, and why they cannot be loaded."""

    rows: int
    bytes: int
    problems: tuple[str, ...]

    def merge(self, other: "SampleReport") -> "SampleReport":
        problems = tuple(dict.fromkeys((*self.problems, *other.problems)))
        rows, size = self.rows + other.rows, self.bytes + other.bytes
        return SampleReport(rows, size, problems[:PROBLEMS_MAX])


@dataclass(frozen=True, slots=True)
class _PassReport:
    """The result of one task, or of several."""

    sample: SampleReport
    counts: KeyCounts
    keys: KeySample

    @property
    def size(self) -> int:
        """The estimated size of all rows."""
        return self.counts.rows * self.sample.bytes // max(1, self.sample.rows)

    def problems(self, key: str) -> tuple[str, ...]:
        return (*self.sample.problems, *self.counts.problems(key))

    def merge(self, other: "_PassReport") -> "_PassReport":
        return _PassReport(
            self.sample.merge(other.sample),
            self.counts.merge(other.counts),
            self.keys.merge(other.keys).cut(KEYS, KEY_BYTES),
        )


def _run_pass(df: Any, plan: RowsPlan) -> _PassReport:
    """Check all rows; a DataFrame that is costly to evaluate is evaluated once."""
    if not is_narrow(df):
        return _one_report(_whole_pieces(df, plan), partial(_check_partition, plan, df.columns))
    sampled = _sample_rows(df, plan)
    counts, keys = _sample_keys(df, plan)
    return _PassReport(sampled, counts, keys)


def is_narrow(df: Any) -> bool:
    """Whether a pass over a few columns or rows of a DataFrame costs little, by its plan."""
    if not hasattr(df, "_jdf"):  # Spark Connect does not show its plans
        return False
    return all(
        node.getClass().getSimpleName() in NARROW and node.deterministic() for node in _nodes(df)
    )


def _is_filtered(df: Any) -> bool:
    return any(node.getClass().getSimpleName() == "Filter" for node in _nodes(df))


def _nodes(df: Any) -> Iterator[Any]:
    """Yield the nodes of the optimized plan."""
    nodes = [df._jdf.queryExecution().optimizedPlan()]
    while nodes:
        node = nodes.pop()
        yield node
        children = node.children()
        nodes += [children.apply(place) for place in range(children.size())]


def _whole_pieces(df: Any, plan: RowsPlan) -> Any:
    """Return keys and their hashes, and the first rows of each partition as a whole."""
    from pyspark.sql import functions as fn

    pieces, number = _keys_of(df, plan)
    rows = numbered(df)
    whole = fn.struct(*[column_of(rows, name) for name in rows.columns])
    return rows.select(*pieces, fn.when(number < SAMPLE_ROWS, whole).alias("row"))


def _keys_of(df: Any, plan: RowsPlan) -> tuple[list[Any], Any]:
    """Return expressions for the key and its hash, and for the number of a row."""
    from pyspark.sql import functions as fn

    place = df.columns.index(plan.schema.key.name)
    key = fn.col(f"`{place}`").cast("binary")
    number = fn.monotonically_increasing_id().bitwiseAND(fn.lit(ROW_NUMBER))
    return [key.alias("key"), fn.xxhash64(key).alias("hash")], number


def _sample_rows(df: Any, plan: RowsPlan) -> SampleReport:
    """Convert the first rows of each partition; tasks read no further."""

    def check(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        sample = check_sample(plan, (batch.rename_columns(names) for batch in batches))
        next(batches, None)  # the end of the stream, unless rows are large
        yield to_message(_PassReport(sample, KeyCounts(), KeySample.empty()))

    names = df.columns
    with batch_rows(df.sparkSession, SAMPLE_ROWS):
        return _merged(_heads(numbered(df)).mapInArrow(check, "message binary")).sample


def _heads(df: Any) -> Any:
    """Return the first rows of each partition, where Spark itself stops.

    A Python worker that stops by itself is thrown away, and the next task waits for another.
    """
    from pyspark.sql import DataFrame

    packages = df.sparkSession._jvm.org.apache.spark.sql
    rows = packages.catalyst.expressions.Literal(SAMPLE_ROWS, packages.types.DataTypes.IntegerType)
    plan = packages.catalyst.plans.logical.LocalLimit(rows, df._jdf.logicalPlan())
    session = df.sparkSession._jsparkSession
    return DataFrame(packages.classic.Dataset.ofRows(session, plan), df.sparkSession)


def _sample_keys(df: Any, plan: RowsPlan) -> tuple[KeyCounts, KeySample]:
    """Sample the keys, and count the rows and the keys that cannot be stored."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as fn

    pieces, number = _keys_of(df, plan)
    keys = numbered(df).select(*pieces, number.alias("number"))
    counted = Observation() if _is_filtered(df) else None
    if counted is not None:
        keys = keys.observe(counted, fn.count(fn.lit(1)).alias("rows"))
    length = fn.octet_length("key")
    (first, few), (second, fewer) = THINNED
    kept = (
        (fn.col("number") <= first)  # the row with each of these numbers reports that it exists
        | (fn.col("number") == second)
        | ((fn.col("number") < second) & (fn.col("hash") < hash_limit(few)))
        | (fn.col("hash") < hash_limit(fewer))
        | fn.col("key").isNull()
        | (length < 1)
        | (length > KEY_BYTES_MAX)
    )

    def check(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield to_message(_PassReport(SampleReport(0, 0, ()), *sample_keys(batches)))

    with larger_batches(df.sparkSession):
        report = _merged(keys.where(kept).mapInArrow(check, "message binary"))
    rows = df.count() if counted is None else counted.get["rows"]
    return replace(report.counts, rows=rows), report.keys


def hash_limit(part: int) -> int:
    """Return the hash below which one of so many hashes is."""
    return HASH_MIN + (1 << 64) // part


def sample_keys(batches: Iterable[pa.RecordBatch]) -> tuple[KeyCounts, KeySample]:
    """Count and sample the keys of one partition, of which Spark has left out most above a limit,
    but none that is invalid."""
    counts, keys = KeyCounts(), KeySample.empty()
    last = 0
    for batch in batches:
        counts = counts.merge(count_keys(batch.column("key")))
        last = max(last, pc.max(batch.column("number")).as_py() or 0)
        keys = keys.add(batch.select(["hash", "key"])).cut(TASK_KEYS, TASK_KEY_BYTES)
    limits = [hash_limit(part) for first, part in THINNED if last >= first]
    if limits:
        keys = keys.merge(KeySample(SAMPLED.empty_table(), min(limits)))
    return counts, keys


def _one_report(
    pieces: Any, check_partition: Callable[[Iterator[pa.RecordBatch]], _PassReport]
) -> _PassReport:
    def check(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield to_message(check_partition(batches))

    with larger_batches(pieces.sparkSession):
        return _collected(pieces.mapInArrow(check, "message binary"))


def _merged(reports: Any) -> _PassReport:
    """Merge the reports of the tasks of a narrow plan, which runs no job to be partitioned."""
    if reports._jdf.queryExecution().toRdd().getNumPartitions() > MERGED_HERE_MAX:
        return _collected(reports)
    return _merge(bytes(row.message) for row in reports.collect())


def _collected(reports: Any) -> _PassReport:
    """Merge the reports of tasks in one more task."""

    def merge(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        messages = (message.as_py() for batch in batches for message in batch.column("message"))
        yield to_message(_merge(messages))

    (row,) = reports.repartition(1).mapInArrow(merge, "message binary").collect()
    found: _PassReport = from_message(bytes(row["message"]))
    return found


def _check_partition(
    plan: RowsPlan, names: list[str], batches: Iterable[pa.RecordBatch]
) -> _PassReport:
    """Check the rows of one partition; the first of them are there as a whole."""
    counts, keys = KeyCounts(), KeySample.empty()

    def whole_rows() -> Iterator[pa.RecordBatch]:
        nonlocal counts, keys
        for batch in batches:
            counts = counts.merge(count_keys(batch.column("key")))
            keys = keys.add(batch.select(["hash", "key"])).cut(TASK_KEYS, TASK_KEY_BYTES)
            rows = batch.column("row").drop_null()
            if len(rows):
                yield pa.RecordBatch.from_struct_array(rows).rename_columns(names)

    rows = whole_rows()
    sample = check_sample(plan, rows)
    for _ in rows:  # the sample may be complete before the keys are counted
        pass
    return _PassReport(sample, counts, keys)


def _merge(messages: Iterable[bytes]) -> _PassReport:
    """Merge the reports of all tasks."""
    merged = _PassReport(SampleReport(0, 0, ()), KeyCounts(), KeySample.empty())
    for message in messages:
        merged = merged.merge(from_message(message))
    return merged


def check_sample(plan: RowsPlan, batches: Iterable[pa.RecordBatch]) -> SampleReport:
    """Convert rows as the load will, up to a bound of rows and bytes."""
    rows = size = 0
    problems: dict[str, None] = {}
    for batch in batches:
        sample = pa.Table.from_batches([batch.slice(0, SAMPLE_ROWS - rows)])
        rows += sample.num_rows
        size += sample.nbytes
        problems |= dict.fromkeys(_problems_of(plan, sample))
        if rows >= SAMPLE_ROWS or size >= SAMPLE_BYTES:
            break
    return SampleReport(rows, size, tuple(problems))


def _problems_of(plan: RowsPlan, rows: pa.Table) -> list[str]:
    """Return one problem for each column; keys are counted by `count_keys`."""
    key = plan.schema.key.name
    rows = rows.filter(rows.column(key).is_valid()).combine_chunks()
    first = _problem_of(plan, rows)
    if first is None:
        return []
    always = [key, *(name for name in (OP, plan.order and plan.order.name) if name)]
    shared = [name for name in rows.column_names if name in always]
    columns = [name for name in rows.column_names if name not in always]
    found = [_problem_of(plan, rows.select([*shared, name])) for name in columns]
    return list(filter(None, found)) or list(filter(None, [first]))


def _problem_of(plan: RowsPlan, rows: pa.Table) -> str | None:
    """Return why rows cannot be converted; empty if it is their keys."""
    if not rows.num_rows:
        return None
    try:
        plan.versions(rows)
    except InvalidInputError as error:
        return "" if error.kind is ErrorKind.INVALID_KEY else error.message
    return None
