"""Fold: the log becomes level-0 segments.

    plan      from the head: which LSNs, up to the first gap
    task      read those WAL objects, keep the newest version of each key, write segments
    publish   one CAS: segments in, floor up, window and open jobs carried on

The rules of the log decide what counts, here as everywhere. Tombstones and range tombstones
are kept: what they hide may lie in older segments. If the driver dies before the publish, the
segments are orphans and the next fold does the work again under new names.

An executor that can shuffle folds a long log in ranges of keys, side by side (`fold_shuffle`);
everyone else folds it in one task for each stretch of it.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

from reef.config import FoldSettings
from reef.engine.database import Database
from reef.engine.log import Log, Slot
from reef.engine.log_rules import LogReader, Verdict, contiguous
from reef.engine.tail import ingested_segments
from reef.errors import ConflictError, CorruptionError, Kind, NotFoundError, ReefError
from reef.formats.manifest import Manifest, SegmentEntry
from reef.formats.wal_object import WalHeader, WalKind
from reef.jobs.executor import Executor, LocalExecutor
from reef.jobs.fold_shuffle import RANGES_MAX, Shuffler, survey_log, write_by_shuffle
from reef.jobs.fold_task import FoldTask, missing_object, run_fold_task, write_trace
from reef.manifest import edits
from reef.manifest.publish import Publisher
from reef.paths import Namespace
from reef.telemetry import operation

__all__ = ["FoldPlan", "FoldReport", "FoldTask", "fold", "plan_fold", "run_fold_task"]


JUDGED_AT_ONCE = 128
"""WAL objects in memory at a time while the driver looks at their headers."""


@dataclass(frozen=True, slots=True)
class FoldPlan:
    """Which part of the log to fold, as of which manifest."""

    manifest: Manifest
    lsns: tuple[int, ...]
    more: bool = False
    """Whether there is more behind it, for another round."""


@dataclass(frozen=True, slots=True)
class FoldReport:
    """What a fold did."""

    namespace: str
    generation: int
    first_lsn: int
    last_lsn: int
    objects: int
    voided: int
    rows: int
    segments: int
    bytes: int
    published: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def fold(
    db: Database, namespace: str, *, executor: Executor | None = None, **settings: Any
) -> FoldReport:
    """Fold what stands in the log now; safe beside writers, readers and other folds.

    A long log is folded in stretches, each with a publish of its own, so that memory is bounded.
    """
    wanted = FoldSettings().changed(settings)
    db._prove_store()
    elsewhere = db.working("fold", namespace) if executor is not None else nullcontext()
    executor = executor or LocalExecutor(db.store.runtime)
    with operation(db.metrics, "fold"), elsewhere:
        report, more = _fold(db, namespace, executor, wanted)
        for _ in range(1, wanted.stretches_max):
            if not more or not report.published:
                break
            stretch, more = _fold(db, namespace, executor, wanted)
            report = _added(report, stretch) if stretch.published else report
            more = more and stretch.published
    db.events.emit("folded", **report.to_dict())
    return report


def _added(done: FoldReport, stretch: FoldReport) -> FoldReport:
    """Return the report of two stretches, one behind the other."""
    sums = ("objects", "voided", "rows", "segments", "bytes")
    return replace(
        stretch,
        first_lsn=done.first_lsn,
        published=done.published,
        **{name: getattr(done, name) + getattr(stretch, name) for name in sums},
    )


def _fold(
    db: Database, namespace: str, executor: Executor, wanted: FoldSettings
) -> tuple[FoldReport, bool]:
    store, publisher = db.store, db._namespaces.publisher(namespace)
    names, manifest = publisher.heads.names, publisher.heads.found.manifest
    log = Log(store, names)
    filled = log.filled(manifest.wal_floor)
    shuffler = _shuffler(executor, filled, wanted)
    bytes_max = wanted.log_bytes * (1 if shuffler is None else RANGES_MAX)
    plan = plan_fold(manifest, filled, bytes_max)
    empty = FoldTask(store, names, manifest.generation, wanted)
    written: list[SegmentEntry] = []
    try:
        if shuffler is not None:
            judged, written = _shuffled(shuffler, empty, plan, filled)
        else:
            judged = _judge(plan, lambda lsns: _headers(log, lsns), names)
            written = _write(executor, empty, judged)
        if not written and (judged.counting or judged.voided):
            # A rebuild could not tell a fold of which nothing is left from a lost segment (H49).
            written = list(write_trace(judged.task(empty), manifest, ()))
        store.runtime.reach("fold staged")
        after, won = manifest, False
        if judged.end > manifest.wal_floor:
            after, won = _publish(publisher, _result(manifest, judged, written))
    except NotFoundError as error:
        if error.kind is Kind.DROPPED:
            raise
        own = {names.segment(entry.id) for entry in written}
        raise _gone(publisher, manifest, error, own) from error
    return _report(namespace, manifest, after, judged, written, published=won), plan.more


def _publish(publisher: Publisher, result: edits.FoldResult) -> tuple[Manifest, bool]:
    """Return the head after it, and whether this fold is in it or another one was first."""
    won = False

    def edit(head: Manifest) -> Manifest | None:
        nonlocal won
        edited = edits.fold(head, result)
        won = edited is not None
        return edited

    return publisher.publish(edit), won


def _write(executor: Executor, empty: FoldTask, judged: "_Judged") -> list[SegmentEntry]:
    tasks = [judged.task(empty)] if judged.counting else []
    return [entry for entries in executor.map(run_fold_task, tasks) for entry in entries]


def _shuffler(executor: Executor, filled: Sequence[Slot], wanted: FoldSettings) -> Shuffler | None:
    """Return the executor if it can shuffle, and the log is long enough to gain by it."""
    worth_it = sum(slot.size for slot in filled) >= wanted.shuffle_bytes_min
    return executor if worth_it and isinstance(executor, Shuffler) else None


def _shuffled(
    shuffler: Shuffler, empty: FoldTask, plan: FoldPlan, filled: Sequence[Slot]
) -> tuple["_Judged", list[SegmentEntry]]:
    sound = [lsn for lsn in plan.lsns if lsn not in plan.manifest.skipped_lsns]
    survey = survey_log(shuffler, empty, filled, sound)
    judged = _judge(plan, survey.headers, empty.namespace)
    counting = survey.only(judged.counting)
    return judged, write_by_shuffle(shuffler, judged.task(empty), plan.manifest, counting)


def _gone(
    publisher: Publisher, manifest: Manifest, error: NotFoundError, own: set[str]
) -> ReefError:
    """What the plan needs is gone: others went on and it was swept, or it is damage."""
    if error.context.get("object") in own:
        return ConflictError(
            f"{error.message}: what this fold had written is gone; it is swept where a fold stands "
            "still for so long that it is taken for dead",
            hint="Nothing is lost, as the log is still there; run it again",
        )
    publisher.heads.forget()
    head = publisher.heads.find().manifest
    swept = head.oldest_retained > manifest.generation
    if head.wal_floor > manifest.wal_floor or swept:
        return ConflictError(
            f"{error.message}: others went on to generation {head.generation}, "
            f"with its floor at LSN {head.wal_floor}",
            hint="There is nothing left to do, or run it again",
        )
    return CorruptionError(f"{error.message}, and no fold has passed it", **error.context)


def _result(manifest: Manifest, judged: "_Judged", written: list[SegmentEntry]) -> edits.FoldResult:
    return edits.FoldResult(
        floor=manifest.wal_floor,
        end=judged.end,
        segments=(*judged.ingested, *written),
        dedup=judged.rules.dedup.entries(),
        open_jobs=judged.rules.open_jobs,
        below_floor=judged.rules.last_ids(),
        marks=judged.rules.marks,
        lineages=judged.rules.lineages,
    )


def _report(
    namespace: str,
    before: Manifest,
    after: Manifest,
    judged: "_Judged",
    written: list[SegmentEntry],
    *,
    published: bool,
) -> FoldReport:
    return FoldReport(
        namespace,
        after.generation,
        before.wal_floor,
        judged.end - 1,
        judged.objects,
        judged.voided,
        sum(entry.rows for entry in written),
        len(written) + len(judged.ingested),
        sum(entry.size for entry in written),
        published,
    )


def plan_fold(manifest: Manifest, filled: Sequence[Slot], bytes_max: int) -> FoldPlan:
    """Return the LSNs from the floor up to the first gap, or as many as `bytes_max` allows."""
    sizes = {slot.lsn: slot.size for slot in filled}
    found = contiguous([*sizes, *manifest.skipped_lsns], manifest.wal_floor)
    total, count = 0, 0
    for lsn in found:
        total += sizes.get(lsn, 0)
        if count and total > bytes_max:
            break
        count += 1
    return FoldPlan(manifest, tuple(found[:count]), more=count < len(found))


class _Judged:
    """What the rules of the log say of the objects of a plan."""

    def __init__(self, manifest: Manifest) -> None:
        self.rules = LogReader(manifest)
        self.counting: list[int] = []
        self.ingested: list[SegmentEntry] = []
        self.objects = 0
        self.voided = 0
        self._schema = manifest.schema
        self._schema_ids = {0, *(schema.id for schema in manifest.schemas)}

    def knows_schema(self, header: WalHeader) -> bool:
        return header.schema_id in self._schema_ids

    def task(self, empty: FoldTask) -> FoldTask:
        """Return the task for all that counts."""
        lsns, ingested = tuple(self.counting), tuple(self.ingested)
        return replace(empty, lsns=lsns, ingested=ingested, end=self.end)

    @property
    def end(self) -> int:
        return self.rules.next_lsn

    def take(self, header: WalHeader) -> None:
        verdict = self.rules.judge(header).verdict
        self.objects += 1
        self.voided += verdict is Verdict.VOID
        if verdict is Verdict.APPLIES and header.kind is WalKind.INGEST:
            self.ingested += ingested_segments(header, self._schema)
        elif verdict is Verdict.APPLIES:
            self.counting.append(header.lsn)


def _headers(log: Log, lsns: Sequence[int]) -> list[WalHeader | None]:
    return [None if found is None else found.header for found in log.read_many(list(lsns))]


Headers = Callable[[Sequence[int]], list[WalHeader | None]]


def _judge(plan: FoldPlan, headers: Headers, namespace: Namespace) -> _Judged:
    judged = _Judged(plan.manifest)
    skipped = plan.manifest.skipped_lsns
    for start in range(0, len(plan.lsns), JUDGED_AT_ONCE):
        window = plan.lsns[start : start + JUDGED_AT_ONCE]
        sound = [lsn for lsn in window if lsn not in skipped]
        found = dict(zip(sound, headers(sound), strict=True))
        for lsn in window:
            if lsn in skipped:
                judged.rules.skip()
                continue
            read = found[lsn]
            if read is None:
                raise missing_object(namespace, lsn)
            if not judged.knows_schema(read):
                return judged  # of a newer manifest: the next fold has that one
            judged.take(read)
    return judged
