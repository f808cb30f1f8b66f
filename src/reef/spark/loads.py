"""Bulk load: a DataFrame of any size becomes non-overlapping segments, visible at one LSN.

    check    columns, a sample, one pass over the keys; nothing is written yet
    begin    in the log; from here on the job's segments have a root (H28)
    stage    Spark samples the keys and brings each range of them into one partition; a task
             sorts its range in Arrow and writes segments, named after job and attempt (H39)
    commit   the driver names all of them in one ingest, or none (H38)

A live writer goes on meanwhile and is not fenced: what it wrote before the commit's LSN loses
against the load, what it writes after wins. The driver keeps the job alive from a thread; if it
dies, a sweep gives the job up. All rows of a key meet in one task, so whether a key comes twice
is seen there, and an order column decides between all of its rows.

With Spark Connect the same, from the client: it needs no RDD, but has to reach the bucket.
"""

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import pyarrow as pa

from reef.engine.batch import check_idempotency_key
from reef.engine.database import Database
from reef.errors import InternalError, InvalidInputError, Kind
from reef.jobs.ingest import BulkJob
from reef.paths import Namespace
from reef.runtime import Runtime
from reef.spark.checks import Preflight, check_load, raise_if_bad
from reef.spark.load_progress import LoadProgress, StagedSoFar, watch
from reef.spark.options import Place
from reef.spark.parts import PartPlan, StagedPart, first_error, stage_part
from reef.spark.ranges import by_ranges, numbered
from reef.spark.session import larger_batches
from reef.spark.sorting import SORT_BYTES
from reef.spark.write_options import check_duplicates, check_replacing
from reef.stores import Store
from reef.types import KeyRange, Receipt

__all__ = ["BulkLoadReport", "bulk_load", "preflight"]

Progress = Callable[[LoadProgress], object]


@dataclass(frozen=True, slots=True)
class BulkLoadReport:
    """What a load wrote, where it stands in the log, and where the time went."""

    namespace: str
    job: str
    lsn: int
    replayed: bool
    """Whether the idempotency key was committed before, and nothing was written now."""
    rows: int
    duplicates: int
    """Rows that gave way to another one of their key."""
    bytes: int
    segments: int
    partitions: int
    skew: float
    """Rows of the largest partition over those of a mean one: 1 is even."""
    spilled: int
    """Sorted runs that went to local files."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By stage on the driver: check, begin, stage, commit."""
    task_seconds: dict[str, float] = field(default_factory=dict)
    """Of all tasks together: receive, check, sort and write."""
    checks: Preflight | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def bulk_load(
    df: Any,
    url: str,
    namespace: str,
    *,
    key: str | None = None,
    idempotency_key: str | None = None,
    replace: bool = False,
    duplicates: Literal["refuse", "order"] | None = None,
    order_by: str | None = None,
    vectors: Mapping[str, int] | None = None,
    segment_bytes: int | None = None,
    partitions: int | None = None,
    sort_bytes: int = SORT_BYTES,
    count: bool = True,
    progress: Progress | None = None,
    store_options: Mapping[str, Any] | None = None,
) -> BulkLoadReport:
    """Load a DataFrame, at one LSN, without the writer role; return what was done.

    Rows are upserts. A namespace that is not there is made from the DataFrame's columns, with
    `key` as its key column. With `replace` it has exactly these rows afterwards. `count=False`
    leaves out the pass over the keys, where computing them twice costs more than it tells.
    """
    check_duplicates(duplicates, order_by)
    check_idempotency_key(idempotency_key)
    settings = _settings(segment_bytes, partitions, sort_bytes)
    everything = _everything(df) if replace else None
    place = Place(str(url), Namespace(namespace), store_options or {})
    db = place.database()
    load = _Load(db, place, df, progress or _nothing)
    with load.stage("check"):
        target, checks = check_load(
            db,
            place,
            df,
            order_by=order_by,
            key=key,
            vectors=vectors,
            partitions=partitions,
            segment_bytes=segment_bytes,
            count=count,
        )
        load.tell("checked", checks=checks)
        raise_if_bad(checks)
    with load.stage("begin"):
        wanted = {"idempotency_key": idempotency_key, "replace": everything, **settings}
        job = BulkJob(db, namespace, make=target.make, **wanted)
    with job:
        parts: list[StagedPart] = []
        if job.receipt is None:
            with load.stage("stage"):
                plan = PartPlan(job.staging, target.rows_under(job.schema), sort_bytes)
                parts = load.run(plan, job, checks)
        with load.stage("commit"):
            receipt = load.commit(job, parts)
    return _report(job, receipt, parts, load.seconds, checks)


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
    """Return what `bulk_load` would find before it writes anything."""
    _settings(segment_bytes, partitions)
    place = Place(str(url), Namespace(namespace), store_options or {})
    _, checks = check_load(
        place.database(),
        place,
        df,
        order_by=order_by,
        key=key,
        vectors=vectors,
        partitions=partitions,
        segment_bytes=segment_bytes,
    )
    return checks


def _settings(
    segment_bytes: int | None, partitions: int | None, sort_bytes: int = SORT_BYTES
) -> dict[str, Any]:
    """Return the settings of the job; InvalidInputError before anything is looked at."""
    numbers = {"partitions": partitions, "sort_bytes": sort_bytes, "segment_bytes": segment_bytes}
    for name, number in numbers.items():
        if number is not None and (not isinstance(number, int) or number < 1):
            raise InvalidInputError(
                f"{name}={number!r} is not a number from 1 on", kind=Kind.INVALID_OPTION
            )
    return {} if segment_bytes is None else {"segment_bytes": segment_bytes}


def _everything(df: Any) -> KeyRange:
    """Return the range that a load replaces; InvalidInputError if its rows are not all puts."""
    check_replacing("put", df.columns)
    return KeyRange()


class _Load:
    """One load on its way: its stages and how long they took."""

    def __init__(self, db: Database, place: Place, df: Any, progress: Progress) -> None:
        self._runtime: Runtime = db.store.runtime
        self._store: Store = db.store
        self._df = df
        self._progress = progress
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        watch = self._runtime.stopwatch()
        self.tell(name)
        yield
        self.seconds[name] = watch.elapsed_s()

    def tell(self, stage: str, **facts: Any) -> None:
        self._progress(LoadProgress(stage, **facts))

    def run(self, plan: PartPlan, job: BulkJob, checks: Preflight) -> list[StagedPart]:
        """Let Spark do it; return what became of each partition."""
        names = self._df.columns
        key = names.index(plan.rows.schema.key.name)

        def staged(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            named = (batch.rename_columns(names) for batch in batches)
            yield _to_message(stage_part(plan, named, *_whereabouts()))

        def so_far(found: StagedSoFar) -> None:
            self.tell("staging", segments=found.segments, bytes=found.bytes, checks=checks)

        watching = self._progress is not _nothing
        with (
            larger_batches(self._df.sparkSession),
            watch(self._store, job.handle.namespace, job.id, so_far if watching else None),
        ):
            looked_at = checks.rows is not None
            ranges = by_ranges(numbered(self._df), str(key), checks.partitions, sample=looked_at)
            rows = ranges.mapInArrow(staged, "part binary").collect()
        parts = [_from_message(bytes(row["part"])) for row in rows]
        error = first_error(parts)
        if error is not None:
            raise error
        return parts

    def commit(self, job: BulkJob, parts: list[StagedPart]) -> Receipt:
        segments = [segment for part in parts for segment in part.segments]
        if job.replace is not None and job.receipt is None:
            segments += job.staging.stage([], job.replace)
        receipt = job.commit(segments)
        self.tell("committed", segments=len(segments), bytes=sum(s.size for s in segments))
        return receipt


def _report(
    job: BulkJob,
    receipt: Receipt,
    parts: list[StagedPart],
    seconds: dict[str, float],
    checks: Preflight,
) -> BulkLoadReport:
    segments = [segment for part in parts for segment in part.segments]
    sizes = [part.rows for part in parts if part.rows]
    spent: dict[str, float] = {}
    for part in parts:
        for name, took in part.seconds.items():
            spent[name] = spent.get(name, 0.0) + took
    if receipt.lsn is None:
        raise InternalError("a commit that counts has an LSN")
    return BulkLoadReport(
        job.staging.namespace.name,
        job.id,
        receipt.lsn,
        receipt.replayed,
        receipt.ops if receipt.replayed else sum(segment.rows for segment in segments),
        sum(part.duplicates for part in parts),
        sum(segment.size for segment in segments),
        len(segments),
        checks.partitions,
        max(sizes) * len(sizes) / sum(sizes) if sizes else 1.0,
        sum(part.spilled for part in parts),
        seconds,
        spent,
        checks,
    )


def _nothing(_: LoadProgress) -> None:
    """Where nobody wants to know."""


def _whereabouts() -> tuple[int, int]:
    from pyspark import TaskContext

    context = TaskContext.get()
    return (0, 0) if context is None else (context.partitionId(), context.attemptNumber())


def _to_message(part: StagedPart) -> pa.RecordBatch:
    return pa.record_batch([pa.array([pickle.dumps(part)], pa.binary())], names=["part"])


def _from_message(message: bytes) -> StagedPart:
    part: StagedPart = pickle.loads(message)
    return part
