"""Fold: the log becomes level-0 segments.

    plan      from the head: which LSNs, up to the first gap
    task      read those WAL objects, keep the newest version of each key, write segments
    publish   one CAS: segments in, floor up, window and open jobs carried on

The rules of the log decide what counts, here as everywhere. Tombstones and range tombstones
are kept: what they hide may lie in older segments. If the driver dies before the publish, the
segments are orphans and the next fold does the work again under new names.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from reef.config import FoldSettings
from reef.engine.database import Database
from reef.engine.log import Log
from reef.engine.log_rules import LogReader, Verdict, contiguous
from reef.engine.merge import drop_covered, newest_versions, sorted_places
from reef.engine.tail import ingested_segments
from reef.errors import CorruptionError, NotFoundError
from reef.formats.batch import OpKind, Ops, decode_ops
from reef.formats.block import Codec
from reef.formats.manifest import Manifest, SegmentEntry
from reef.formats.schema import Schema
from reef.formats.segment import Lineage, SegmentSummary
from reef.formats.segment_writer import SegmentWriter
from reef.formats.versions import RangeTombstone, Versions, concat_versions
from reef.formats.wal_object import WalKind, WalObject
from reef.jobs.executor import Executor, LocalExecutor
from reef.manifest import edits
from reef.manifest.dedup import DedupWindow
from reef.manifest.publish import Publisher
from reef.paths import Namespace
from reef.stores import Store
from reef.telemetry import operation

__all__ = ["FoldPlan", "FoldReport", "FoldTask", "fold", "plan_fold", "run_fold_task"]


@dataclass(frozen=True, slots=True)
class FoldPlan:
    """Which part of the log to fold, as of which manifest."""

    manifest: Manifest
    lsns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FoldTask:
    """The rows of some WAL objects, to be written as segments."""

    store: Store
    namespace: Namespace
    schema: Schema
    lsns: tuple[int, ...]
    """Only those whose batches count."""
    settings: FoldSettings


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
    judged = _judge(plan, log)
    tasks = []
    if judged.counting:
        tasks = [FoldTask(store, names, manifest.schema, tuple(judged.counting), wanted)]
    written = [entry for entries in executor.map(run_fold_task, tasks) for entry in entries]
    store.runtime.reach("fold staged")
    published = manifest
    if judged.end > manifest.wal_floor:
        result = _result(manifest, judged, written, wanted, int(store.runtime.wall_s() * 1000))
        published = publisher.publish(lambda head: edits.fold(head, result))
    return _report(namespace, manifest, published, judged, written)


def _result(
    manifest: Manifest,
    judged: "_Judged",
    written: list[SegmentEntry],
    settings: FoldSettings,
    now_ms: int,
) -> edits.FoldResult:
    oldest_ms = now_ms - int(settings.dedup_age_s * 1000)
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
        after.wal_floor >= judged.end > before.wal_floor,
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
        self._schema = manifest.schema

    @property
    def end(self) -> int:
        return self.rules.next_lsn

    def take(self, found: WalObject) -> None:
        header = found.header
        verdict = self.rules.judge(header).verdict
        self.objects += 1
        self.voided += verdict is Verdict.VOID
        if verdict is Verdict.APPLIES and header.kind is WalKind.INGEST:
            self.ingested += ingested_segments(header, self._schema)
        elif verdict is Verdict.APPLIES:
            self.counting.append(header.lsn)
            self.dedup.add(header)


def _judge(plan: FoldPlan, log: Log) -> _Judged:
    judged = _Judged(plan.manifest)
    for lsn in plan.lsns:
        if lsn in plan.manifest.skipped_lsns:
            judged.rules.skip()
            continue
        found = log.read(lsn)
        if found is None:
            raise NotFoundError(f"LSN {lsn} was listed and is gone: another fold was first")
        judged.take(found)
    return judged


def run_fold_task(task: FoldTask) -> tuple[SegmentEntry, ...]:
    """Write the segments of a task; their names are new at every run."""
    rows, tombstones = _read_rows(task)
    if not len(rows) and not tombstones:
        return ()
    rows = drop_covered(newest_versions([rows], task.schema), tombstones)
    return tuple(_write_segments(task, rows, tombstones))


def _read_rows(task: FoldTask) -> tuple[Versions, list[RangeTombstone]]:
    log = Log(task.store, task.namespace)
    parts: list[Versions] = []
    tombstones: list[RangeTombstone] = []
    for lsn, found in zip(task.lsns, log.read_many(list(task.lsns)), strict=True):
        if found is None:
            raise CorruptionError(
                f"LSN {lsn} of {task.namespace.name} vanished during a fold",
                object=task.namespace.wal_object(lsn),
                offset=0,
            )
        first_seq = 0
        for record in found.records:
            ops = decode_ops(record, task.schema, task.namespace.wal_object(lsn))
            parts.append(_to_versions(ops, lsn, first_seq))
            tombstones += _range_tombstones(ops, lsn, first_seq)
            first_seq += len(ops)
    rows = concat_versions(parts, task.schema)
    is_row = np.flatnonzero(rows.kinds != OpKind.DELETE_RANGE).astype(np.int64)
    rows = rows.take(is_row)
    return rows.take(sorted_places(rows)), tombstones


def _to_versions(ops: Ops, lsn: int, first_seq: int) -> Versions:
    count = len(ops)
    return Versions(
        ops.keys,
        np.full(count, lsn, np.int64),
        np.arange(first_seq, first_seq + count, dtype=np.uint32),
        ops.kinds.to_numpy(zero_copy_only=False).astype(np.uint8),
        dict(ops.fields or {}),
        ops.expires_at_ms,
        dict(ops.touched or {}),
    )


def _range_tombstones(ops: Ops, lsn: int, first_seq: int) -> list[RangeTombstone]:
    if ops.end_keys is None:
        return []
    kinds = ops.kinds.to_numpy(zero_copy_only=False)
    places = np.flatnonzero(kinds == OpKind.DELETE_RANGE)
    return [
        RangeTombstone(ops.keys[p].as_py(), ops.end_keys[p].as_py(), lsn, first_seq + int(p))
        for p in places.tolist()
    ]


def _write_segments(
    task: FoldTask, rows: Versions, tombstones: list[RangeTombstone]
) -> Iterator[SegmentEntry]:
    """Cut by size; range tombstones go with the first piece, whose bounds then include them."""
    pieces = list(_pieces(rows, task.settings.segment_bytes_max))
    runtime = task.store.runtime
    ids = [runtime.ulid() for _ in pieces]
    for place, piece in enumerate(pieces):
        siblings = tuple(other for other in ids if other != ids[place])
        writer = SegmentWriter(
            task.schema,
            0,
            Lineage(ids[place], int(runtime.wall_s() * 1000), siblings=siblings),
            codec=Codec[task.settings.codec.upper()],
            group_bytes=task.settings.group_bytes,
            range_tombstones=tombstones if place == 0 else (),
        )
        key = task.namespace.segment(ids[place])
        task.store.upload(key, writer.write([piece]))
        yield _entry(ids[place], writer.summary)


def _pieces(rows: Versions, bytes_max: int) -> Iterator[Versions]:
    total = rows.keys.nbytes + sum(array.nbytes for array in rows.fields.values())
    count = max(1, -(-total // bytes_max))
    step = max(1, -(-len(rows) // count))
    if not len(rows):
        yield rows
    for start in range(0, len(rows), step):
        yield rows.slice(start, min(start + step, len(rows)))


def _entry(segment_id: str, summary: SegmentSummary) -> SegmentEntry:
    footer = summary.footer
    return SegmentEntry(
        id=segment_id,
        level=footer.level,
        size=summary.size,
        checksum=summary.checksum,
        rows=footer.rows,
        tombstones=footer.tombstones,
        min_key=footer.min_key,
        max_key=footer.max_key,
        lsn_min=footer.lsn_min,
        lsn_max=footer.lsn_max,
        tail_bytes=summary.tail_bytes,
        schema_id=footer.schema.id,
        set_hash=footer.set_hash,
        patches=footer.patches,
    )
