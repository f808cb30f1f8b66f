"""Fold: the log becomes level-0 segments.

    plan      from the head: which LSNs, up to the first gap
    task      read those WAL objects, keep the newest version of each key, write segments
    publish   one CAS: segments in, floor up, window and open jobs carried on

The rules of the log decide what counts, here as everywhere. Tombstones and range tombstones
are kept: what they hide may lie in older segments. If the driver dies before the publish, the
segments are orphans and the next fold does the work again under new names.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from reef.config import FoldSettings
from reef.engine.database import Database
from reef.engine.log import Log
from reef.engine.log_rules import LogReader, Verdict, contiguous
from reef.engine.tail import ingested_segments
from reef.errors import ConflictError, CorruptionError, NotFoundError, ReefError
from reef.formats.manifest import Manifest, SegmentEntry
from reef.formats.wal_object import WalKind, WalObject
from reef.jobs.executor import Executor, LocalExecutor
from reef.jobs.fold_task import FoldTask, missing_object, run_fold_task
from reef.manifest import edits
from reef.manifest.dedup import DedupWindow
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
    """Fold what stands in the log now; safe beside writers, readers and other folds."""
    wanted = FoldSettings().changed(settings)
    with operation(db.metrics, "fold"):
        report = _fold(db, namespace, executor or LocalExecutor(db.store.runtime), wanted)
    db.events.emit("folded", **report.to_dict())
    return report


def _fold(db: Database, namespace: str, executor: Executor, wanted: FoldSettings) -> FoldReport:
    store, names = db.store, Namespace(namespace)
    publisher = Publisher(store, names, metrics=db.metrics)
    log = Log(store, names)
    manifest = publisher.heads.find().manifest
    plan = plan_fold(manifest, [slot.lsn for slot in log.filled(manifest.wal_floor)])
    try:
        judged = _judge(plan, log, names)
        written = _write(executor, FoldTask(store, names, manifest.generation, wanted), judged)
        store.runtime.reach("fold staged")
        after, won = manifest, False
        if judged.end > manifest.wal_floor:
            now_ms = int(store.runtime.wall_s() * 1000)
            after, won = _publish(publisher, _result(manifest, judged, written, wanted, now_ms))
    except NotFoundError as error:
        raise _gone(publisher, manifest, error) from error
    return _report(namespace, manifest, after, judged, written, published=won)


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
    task = replace(empty, lsns=tuple(judged.counting), ingested=tuple(judged.ingested))
    tasks = [task] if judged.counting else []
    return [entry for entries in executor.map(run_fold_task, tasks) for entry in entries]


def _gone(publisher: Publisher, manifest: Manifest, error: NotFoundError) -> ReefError:
    """What the plan needs is gone: others went on and it was swept, or it is damage."""
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


def _result(
    manifest: Manifest,
    judged: "_Judged",
    written: list[SegmentEntry],
    settings: FoldSettings,
    now_ms: int,
) -> edits.FoldResult:
    """The age of keys goes by those who wrote; a folder's clock never makes one older (H30)."""
    oldest_ms = min(now_ms, judged.newest_ms) - int(settings.dedup_age_s * 1000)
    return edits.FoldResult(
        floor=manifest.wal_floor,
        end=judged.end,
        segments=(*judged.ingested, *written),
        dedup=judged.dedup.trimmed(settings.dedup_keys_max, oldest_ms),
        open_jobs=judged.rules.open_jobs,
        below_floor=judged.rules.last_ids(),
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


def plan_fold(manifest: Manifest, listed: list[int]) -> FoldPlan:
    """Return the LSNs from the floor up to the first gap."""
    present = [*listed, *manifest.skipped_lsns]
    return FoldPlan(manifest, tuple(contiguous(present, manifest.wal_floor)))


class _Judged:
    """What the rules of the log say of the objects of a plan."""

    def __init__(self, manifest: Manifest) -> None:
        self.rules = LogReader(manifest)
        self.dedup = DedupWindow.of(manifest)
        self.counting: list[int] = []
        self.ingested: list[SegmentEntry] = []
        self.objects = 0
        self.voided = 0
        self.newest_ms = max((entry.committed_at_ms for entry in manifest.dedup), default=0)
        self._schema = manifest.schema
        self._schema_ids = {0, *(schema.id for schema in manifest.schemas)}

    def knows_schema(self, found: WalObject) -> bool:
        return found.header.schema_id in self._schema_ids

    @property
    def end(self) -> int:
        return self.rules.next_lsn

    def take(self, found: WalObject) -> None:
        header = found.header
        verdict = self.rules.judge(header).verdict
        self.objects += 1
        self.newest_ms = max(self.newest_ms, header.created_at_ms)
        self.voided += verdict is Verdict.VOID
        if verdict is Verdict.APPLIES and header.kind is WalKind.INGEST:
            self.ingested += ingested_segments(header, self._schema)
            self.dedup.add(header)
        elif verdict is Verdict.APPLIES:
            self.counting.append(header.lsn)
            self.dedup.add(header)


def _judge(plan: FoldPlan, log: Log, namespace: Namespace) -> _Judged:
    judged = _Judged(plan.manifest)
    skipped = plan.manifest.skipped_lsns
    for start in range(0, len(plan.lsns), JUDGED_AT_ONCE):
        window = plan.lsns[start : start + JUDGED_AT_ONCE]
        sound = [lsn for lsn in window if lsn not in skipped]
        found = dict(zip(sound, log.read_many(sound), strict=True))
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
