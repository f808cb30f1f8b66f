"""Fold: turn the unfolded log into level-0 segments.

    1  plan      the slots from the head's floor up to the first gap
    2  replay    the rules of the log decide which objects count
    3  write     the newest version of each key, as segments (`reef.jobs.fold.task`)
    4  publish   one CAS: segments added, floor raised, dedup window, open jobs and stream marks
                 as the rules have them at the new floor

A writer folds its own log from memory: its memtable has the rows and its rules the verdicts, so
that no WAL object is read (H75). Any other process reads each object once, in one task; an
executor that can shuffle folds a long log in key ranges, in parallel (`reef.jobs.fold.shuffle`).

If the process dies before it publishes, its segments are orphans, and the next fold writes them
again under new names.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, Unpack

from reef.config import FoldOptions, FoldSettings
from reef.engine.context import NamespaceContext
from reef.engine.handles.database import Database
from reef.engine.log.log import LogRules, Slot, contiguous
from reef.engine.log.tail import TailCut
from reef.errors import ConflictError, CorruptionError, ErrorKind, NotFoundError, ReefError
from reef.formats.manifest import Manifest
from reef.formats.versions import RangeTombstone, Versions
from reef.formats.wal_object import WalKind
from reef.jobs.arguments import check_arguments
from reef.jobs.fold.shuffle import RANGES_MAX, Shuffler, fold_by_shuffle
from reef.jobs.fold.task import FoldedLog, FoldTask, LogPart, fold_rows, run_fold_task
from reef.manifest import edits
from reef.manifest.head import Publisher
from reef.runtime import Executor
from reef.telemetry import operation


@dataclass(frozen=True, slots=True)
class FoldPlan:
    """The part of the log to fold, and the manifest it was planned on."""

    manifest: Manifest
    lsns: tuple[int, ...]
    more: bool = False
    """Whether the log continues behind it, for another round."""

    @property
    def end(self) -> int:
        return self.lsns[-1] + 1 if self.lsns else self.manifest.wal_floor


@dataclass(frozen=True, slots=True)
class FoldReport:
    """The LSNs that were folded, and the segments written from them."""

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
    db: Database,
    namespace: str,
    *,
    executor: Executor | None = None,
    **settings: Unpack[FoldOptions],
) -> FoldReport:
    """Fold the log as it is now; safe while writers, readers and other folds run.

    A long log is folded in rounds, each with a publish of its own, so that memory is bounded.
    """
    check_arguments(db, executor)
    options = FoldSettings().changed(settings)
    db._prove_store()
    shown = db._working("fold", namespace) if executor is not None else nullcontext()
    executor = executor or db.store.runtime
    with operation(db.metrics, "fold"), shown:
        report, more = _fold_round(db, namespace, executor, options)
        for _ in range(1, options.stretches_max):
            if not more or not report.published:
                break
            latest, more = _fold_round(db, namespace, executor, options)
            report = _add_reports(report, latest) if latest.published else report
            more = more and latest.published
    db.events.emit("folded", **report.to_dict())
    return report


def _add_reports(report: FoldReport, latest: FoldReport) -> FoldReport:
    """Return the report of two consecutive rounds."""
    sums = ("objects", "voided", "rows", "segments", "bytes")
    return replace(
        latest,
        first_lsn=report.first_lsn,
        published=report.published,
        **{name: getattr(report, name) + getattr(latest, name) for name in sums},
    )


def _fold_round(
    db: Database, namespace: str, executor: Executor, settings: FoldSettings
) -> tuple[FoldReport, bool]:
    store, publisher = db.store, db._namespaces.publisher(namespace)
    names, manifest = publisher.heads.names, publisher.heads.found.manifest
    filled = NamespaceContext(store, names).log.filled(manifest.wal_floor)
    shuffler = _shuffler(executor, filled, settings)
    bytes_max = settings.log_bytes * (1 if shuffler is None else RANGES_MAX)
    plan = plan_fold(manifest, filled, bytes_max)
    task = FoldTask(store, names, manifest.generation, settings, plan.end)
    folded: FoldedLog | None = None
    try:
        if not plan.lsns:
            folded = FoldedLog.of(task, LogPart(manifest, names), LogRules(manifest).state(), ())
        elif shuffler is not None:
            sizes = {slot.lsn: slot.size for slot in filled if slot.lsn in plan.lsns}
            folded = fold_by_shuffle(shuffler, task, manifest, sizes)
        else:
            (folded,) = executor.map(run_fold_task, [task])
        return _publish(db, publisher, manifest, folded), plan.more
    except (NotFoundError, CorruptionError) as error:
        raise _missing_object_error(publisher, manifest, error, folded) from error


def _shuffler(
    executor: Executor, filled: Sequence[Slot], settings: FoldSettings
) -> Shuffler | None:
    """Return the executor if it can shuffle, and the log is long enough to gain by it."""
    worth_it = sum(slot.size for slot in filled) >= settings.shuffle_bytes_min
    return executor if worth_it and isinstance(executor, Shuffler) else None


def plan_fold(manifest: Manifest, filled: Sequence[Slot], bytes_max: int) -> FoldPlan:
    """Return the LSNs from the floor up to the first gap, or as many as `bytes_max` allows."""
    sizes = {slot.lsn: slot.size for slot in filled}
    lsns = contiguous([*sizes, *manifest.skipped_lsns], manifest.wal_floor)
    total, count = 0, 0
    for lsn in lsns:
        total += sizes.get(lsn, 0)
        if count and total > bytes_max:
            break
        count += 1
    return FoldPlan(manifest, tuple(lsns[:count]), more=count < len(lsns))


# --- the fold of a writer ----------------------------------------------------------------


class FoldedSlots:
    """The slots that folds of this process have passed, and which of them hold batches.

    A sweep needs the kind of an object before it condemns it: only batches are ever deleted.
    Slots are never forgotten: consecutive folds are one range, and other kinds are rare.
    """

    def __init__(self) -> None:
        self._ranges: list[range] = []
        self._records: dict[int, WalKind] = {}

    def add(self, folded: FoldedLog) -> None:
        """Record a fold that was published."""
        first, end = folded.result.floor, folded.result.end
        if self._ranges and self._ranges[-1].stop == first:
            first = self._ranges.pop().start
        self._ranges.append(range(first, end))
        self._records.update(folded.records)

    def kind(self, lsn: int) -> WalKind | None:
        """Return the kind of the object in a slot; None if no fold has passed it."""
        if not any(lsn in slots for slots in self._ranges):
            return None
        return self._records.get(lsn, WalKind.BATCHES)


def fold_memory(
    db: Database, namespace: str, cut: TailCut, slots: FoldedSlots
) -> tuple[FoldReport, Manifest] | None:
    """Fold a writer's log from its memory; return the report and the new head.

    None if the head has another floor, schema or set of skipped slots than the writer's memory, or
    if an object that landed before its turn has replaced rows in it.
    """
    publisher = db._namespaces.publisher(namespace)
    manifest = publisher.heads.found.manifest
    contents = cut.memtable.all_versions(manifest.wal_floor, cut.state.next_lsn - 1)
    if contents is None or not _is_at(cut, manifest):
        return None
    task = FoldTask(db.store, publisher.heads.names, manifest.generation, FoldSettings())
    folded: FoldedLog | None = None
    with operation(db.metrics, "fold"):
        try:
            folded = _fold_cut(task, manifest, cut, contents)
            report = _publish(db, publisher, manifest, folded)
        except NotFoundError as error:
            raise _missing_object_error(publisher, manifest, error, folded) from error
    db.events.emit("folded", **report.to_dict())
    if report.published:
        slots.add(folded)
    return report, publisher.heads.found.manifest


def _is_at(cut: TailCut, head: Manifest) -> bool:
    """Whether a writer's memory begins at the head's floor, and reads the log as the head does."""
    own = cut.manifest
    return (own.wal_base, own.wal_floor, own.schema.id, own.skipped_lsns) == (
        head.wal_base,
        head.wal_floor,
        head.schema.id,
        head.skipped_lsns,
    )


def _fold_cut(
    task: FoldTask,
    manifest: Manifest,
    cut: TailCut,
    contents: tuple[Versions, Sequence[RangeTombstone]],
) -> FoldedLog:
    part = LogPart(manifest, task.namespace, ingested=list(cut.memtable.ingested))
    for lsn, slot in cut.slots.items():
        part.count(lsn, slot.kind, slot.verdict)
    return fold_rows(task, part, cut.state, *contents)


# --- publish ------------------------------------------------------------------------------


def _publish(
    db: Database, publisher: Publisher, manifest: Manifest, folded: FoldedLog
) -> FoldReport:
    """Publish a fold, unless another one was first, and return its report."""
    db.store.runtime.reach("fold staged")
    after, won = manifest, False
    if folded.result.end > manifest.wal_floor:
        after, won = publisher.publish_once(lambda head: edits.fold(head, folded.result))
    return FoldReport(
        publisher.heads.names.name,
        after.generation,
        manifest.wal_floor,
        folded.result.end - 1,
        folded.objects,
        folded.voided,
        sum(entry.rows for entry in folded.written),
        len(folded.result.segments),
        sum(entry.size for entry in folded.written),
        won,
    )


def _missing_object_error(
    publisher: Publisher,
    manifest: Manifest,
    error: NotFoundError | CorruptionError,
    folded: FoldedLog | None,
) -> ReefError:
    """Return the error for an object that is gone: swept after another fold, or lost.

    A slot that was swept may have been filled again by a stalled process (H67).
    """
    is_filled_again = error.kind is ErrorKind.CHANGED_WINNER
    if error.kind is ErrorKind.DROPPED or (
        isinstance(error, CorruptionError) and not is_filled_again
    ):
        return error
    names = publisher.heads.names
    own = {names.segment(entry.id) for entry in (folded.written if folded else ())}
    if error.context.get("object") in own:
        return ConflictError(
            f"{error.message}: a sweep deleted the segments of this fold before it published them, "
            "as it does when a fold stalls for longer than the grace period",
            hint="No row is lost, the log is still there; run the fold again",
        )
    publisher.heads.forget()
    head = publisher.heads.find().manifest
    swept = head.oldest_retained > manifest.generation
    if head.wal_floor > manifest.wal_floor or swept:
        return ConflictError(
            f"{error.message}: another process has published generation {head.generation}, "
            f"with its floor at LSN {head.wal_floor}",
            hint="Run the fold again; there may be nothing left to fold",
        )
    if is_filled_again:
        return error
    return CorruptionError(f"{error.message}, and no fold has passed it", **error.context)
