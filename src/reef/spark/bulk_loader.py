"""Bulk load: a DataFrame of any size becomes non-overlapping segments, visible at one LSN.

    check    columns and types, then one pass over the rows; nothing is written yet
    begin    in the log; from here on the job is a root for its segments (H28)
    stage    Spark moves each range of keys into one partition; a task sorts its range in Arrow and
             writes segments, named after the job and the attempt (H39)
    commit   the driver names all of them in one ingest, or none (H38)

A live writer continues concurrently and is not fenced: rows that it wrote before the commit's LSN
lose against the load, later ones win; with `live_wins`, all that it wrote since the begin do. A
thread of the driver renews the job's lease; if the driver dies, a sweep aborts the job. All rows of
a key are in one task, which therefore detects duplicates, and an order column chooses among all
rows of a key. A row that cannot be written fails its task, and so the load, at once.

The DataFrame is evaluated twice: by the check (`reef.spark.load_check`), whose pass also takes the
sample of keys that the ranges are cut from, and by the load. A load with an idempotency key that
was committed before returns without evaluating it.

Progress is reported by stage. While tasks run, a thread lists the segments of the job, whose names
begin with its id: Spark Connect has no task listener. Loads work with Spark Connect from the
client, which must be able to reach the bucket.
"""

import pickle
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import pyarrow as pa

from reef.engine.handles.database import Database
from reef.engine.rows.batch import check_idempotency_key, check_live_wins
from reef.errors import ErrorKind, InternalError, InvalidInputError, ReefError
from reef.jobs.ingest.job import BulkJob, find_commit
from reef.paths import Namespace
from reef.runtime import ConditionVariable, Runtime
from reef.spark.load_check import Check, Preflight, check_load, check_numbers, raise_problems
from reef.spark.options import SORT_BYTES, TableLocation, check_duplicates, check_replacing
from reef.spark.session import check_dataframe, from_message, larger_batches, to_message
from reef.spark.staging import PartPlan, StagedPart, by_ranges, numbered, stage_part
from reef.stores import Store
from reef.types import KeyRange, Receipt

POLL_INTERVAL_S = 2.0


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """One step of a load: check, checked, begin, stage, staging (repeatedly), commit, committed."""

    stage: str
    segments: int = 0
    bytes: int = 0
    checks: Preflight | None = None
    """From `checked` on."""


@dataclass(frozen=True, slots=True)
class BulkLoadReport:
    """The rows and segments that a load wrote, its LSN, and the time of each stage."""

    namespace: str
    job: str
    """Empty if the load was replayed."""
    lsn: int
    replayed: bool
    """Whether the idempotency key was committed before, so that nothing was written now."""
    rows: int
    duplicates: int
    """Rows that were dropped in favour of another row of their key."""
    bytes: int
    segments: int
    partitions: int
    skew: float
    """Rows of the largest partition over the mean: 1 is even."""
    spilled: int
    """Sorted runs that were written to local files."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By stage on the driver: check, begin, stage, commit."""
    task_seconds: dict[str, float] = field(default_factory=dict)
    """Sums over all tasks: receive, check, sort and write."""
    checks: Preflight | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


Progress = Callable[[LoadProgress], object]


def bulk_load(
    df: Any,
    url: str,
    namespace: str,
    *,
    key: str | None = None,
    idempotency_key: str | None = None,
    replace: bool = False,
    live_wins: bool = False,
    duplicates: Literal["refuse", "order"] | None = None,
    order_by: str | None = None,
    vectors: Mapping[str, int] | None = None,
    segment_bytes: int | None = None,
    partitions: int | None = None,
    sort_bytes: int = SORT_BYTES,
    count: bool = True,
    persist: bool = False,
    progress: Progress | None = None,
    store_options: Mapping[str, Any] | None = None,
) -> BulkLoadReport:
    """Load a DataFrame at one LSN, without the writer role.

    Rows are upserts. A missing namespace is created from the DataFrame's columns, with `key` as its
    key column. With `replace` the namespace has exactly these rows afterwards. With `live_wins`
    everything written from the begin of the load on wins over its rows: for backfills, which may
    take hours. The DataFrame is evaluated twice, for the check and for the load; with `persist`
    once, and Spark keeps its rows until the load ends. `count=False` skips the pass of the check;
    Spark then evaluates the DataFrame once more by itself, to partition it.
    """
    check_dataframe(df)
    check_duplicates(duplicates, order_by)
    check_idempotency_key(idempotency_key)
    settings = check_numbers(segment_bytes, partitions, sort_bytes)
    check_live_wins(live_wins, replaces=replace)
    if live_wins and persist:
        raise InvalidInputError(
            "a load with live_wins reads its rows after its begin; persist reads them before",
            kind=ErrorKind.INVALID_OPTION,
            hint="Omit persist: rows written between the two would lose against older ones",
        )
    if replace:
        check_replacing("put", df.columns)
    location = TableLocation(str(url), Namespace(namespace), store_options or {})
    db = location.database()
    load = _Load(db, df, progress or _ignore)
    if idempotency_key is not None:
        receipt = find_commit(db, namespace, idempotency_key)
        if receipt is not None:
            return _replayed_report(receipt)
    with _keep_rows(df, persist):
        with load.stage("check"):
            check = check_load(
                db,
                location,
                df,
                order_by=order_by,
                key=key,
                vectors=vectors,
                partitions=partitions,
                segment_bytes=segment_bytes,
                count=count,
            )
            load.notify("checked", checks=check.report)
            raise_problems(check.report)
        with load.stage("begin"):
            job = BulkJob(
                db,
                namespace,
                idempotency_key=idempotency_key,
                replace=KeyRange() if replace else None,
                live_wins=live_wins,
                make=check.target.make,
                **settings,
            )
        with job:
            parts: list[StagedPart] = []
            if job.receipt is None:
                with load.stage("stage"):
                    plan = PartPlan(job.staging, check.target.rows_under(job.schema), sort_bytes)
                    parts = load.run(plan, job, check)
            with load.stage("commit"):
                receipt = load.commit(job, parts)
        return _report(job, receipt, parts, load.seconds, check.report)


@contextmanager
def _keep_rows(df: Any, persist: bool) -> Iterator[None]:
    """Let Spark keep the rows until the block ends, unless it keeps them already."""
    level = df.storageLevel
    if not persist or level.useMemory or level.useDisk:
        yield
        return
    df.persist()
    try:
        yield
    finally:
        df.unpersist()


# --- run ------------------------------------------------------------------------------


class _Load:
    """A load in progress: its stages and their durations."""

    def __init__(self, db: Database, df: Any, progress: Progress) -> None:
        self._runtime: Runtime = db.store.runtime
        self._store: Store = db.store
        self._df = df
        self._progress = progress
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        stopwatch = self._runtime.stopwatch()
        self.notify(name)
        yield
        self.seconds[name] = stopwatch.elapsed_s()

    def notify(self, stage: str, **facts: Any) -> None:
        self._progress(LoadProgress(stage, **facts))

    def run(self, plan: PartPlan, job: BulkJob, check: Check) -> list[StagedPart]:
        """Stage all partitions with Spark; raise the error of the first one that failed."""
        names = self._df.columns
        key = names.index(plan.rows.schema.key.name)

        def stage(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            renamed = (batch.rename_columns(names) for batch in batches)
            with _errors_as_text():
                yield to_message(stage_part(plan, renamed, *_task_attempt()))

        def report(totals: StagedTotals) -> None:
            self.notify(
                "staging", segments=totals.segments, bytes=totals.bytes, checks=check.report
            )

        polled = self._progress is not _ignore
        with (
            larger_batches(self._df.sparkSession),
            poll_staged(self._store, job.handle.namespace, job.id, report if polled else None),
        ):
            ranges = by_ranges(numbered(self._df), str(key), check.report.partitions, check.keys)
            try:
                rows = ranges.mapInArrow(stage, "message binary").collect()
            except Exception as error:
                raise _error_from_text(error) from None
        return [from_message(bytes(row["message"])) for row in rows]

    def commit(self, job: BulkJob, parts: list[StagedPart]) -> Receipt:
        segments = [segment for part in parts for segment in part.segments]
        if job.replace is not None and job.receipt is None:
            segments += job.staging.stage([], job.replace)
        receipt = job.commit(segments)
        self.notify("committed", segments=len(segments), bytes=sum(s.size for s in segments))
        return receipt


@dataclass(frozen=True, slots=True)
class StagedTotals:
    """Segments of a job in the bucket, of all attempts."""

    segments: int
    bytes: int


@contextmanager
def poll_staged(
    store: Store,
    namespace: Namespace,
    job_id: str,
    report: Callable[[StagedTotals], None] | None,
) -> Iterator[None]:
    """Report the staged segments of a job periodically until the block ends.

    An exception of `report` ends the polling, and is raised at the end of the block.
    """
    if report is None:
        yield
        return
    wake: ConditionVariable = store.runtime.condition()
    over, failure = False, None

    def poll() -> None:
        nonlocal failure
        while True:
            with wake:
                if not over:
                    wake.wait(POLL_INTERVAL_S)
                if over:
                    return
            with suppress(ReefError):  # progress is optional
                staged = list(store.list(f"{namespace.segments}{job_id}-"))
                try:
                    report(StagedTotals(len(staged), sum(info.size for info in staged)))
                except BaseException as error:
                    failure = error
                    return

    polling = store.runtime.spawn(poll, name="load progress")
    try:
        yield
    finally:
        with wake:
            over = True
            wake.notify_all()
        polling.join()
    if failure is not None:
        raise failure


def _report(
    job: BulkJob,
    receipt: Receipt,
    parts: list[StagedPart],
    seconds: dict[str, float],
    checks: Preflight,
) -> BulkLoadReport:
    segments = [segment for part in parts for segment in part.segments]
    sizes = [part.rows for part in parts if part.rows]
    task_seconds: dict[str, float] = {}
    for part in parts:
        for name, spent in part.seconds.items():
            task_seconds[name] = task_seconds.get(name, 0.0) + spent
    return BulkLoadReport(
        job.staging.namespace.name,
        job.id,
        _lsn_of(receipt),
        receipt.replayed,
        receipt.ops if receipt.replayed else sum(segment.rows for segment in segments),
        sum(part.duplicates for part in parts),
        sum(segment.size for segment in segments),
        len(segments),
        checks.partitions,
        max(sizes) * len(sizes) / sum(sizes) if sizes else 1.0,
        sum(part.spilled for part in parts),
        seconds,
        task_seconds,
        checks,
    )


def _replayed_report(receipt: Receipt) -> BulkLoadReport:
    return BulkLoadReport(
        receipt.namespace, "", _lsn_of(receipt), True, receipt.ops, 0, 0, 0, 0, 1.0, 0
    )


def _lsn_of(receipt: Receipt) -> int:
    if receipt.lsn is None:
        raise InternalError("the receipt of a committed job has no LSN")
    return receipt.lsn


def _ignore(_: LoadProgress) -> None:
    """The progress callback of a load without one."""


# --- between tasks and driver -----------------------------------------------------------


def _task_attempt() -> tuple[int, int]:
    from pyspark import TaskContext

    context = TaskContext.get()
    return (0, 0) if context is None else (context.partitionId(), context.attemptNumber())


ERROR = re.compile(r"reef-error:([A-Za-z0-9+/=]+);")
"""A pickled error in the text of an exception: Spark passes on nothing but that text."""


@contextmanager
def _errors_as_text() -> Iterator[None]:
    try:
        yield
    except InvalidInputError as error:
        pickled = b64encode(pickle.dumps(error.with_traceback(None))).decode()
        raise RuntimeError(f"{error} [reef-error:{pickled};]") from None


def _error_from_text(error: Exception) -> Exception:
    """Return the error of a task, as it was raised there; else Spark's own."""
    match = ERROR.search(str(error))
    if match is None:
        return error
    decoded: Exception = pickle.loads(b64decode(match[1]))
    return decoded
