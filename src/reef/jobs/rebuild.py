"""Rebuild: derive a manifest from the segments and the log.

    1  gather    footers of segments, headers of the log    (`reef.jobs.evidence.gather`)
    2  choose    which segments are live                    (`reef.jobs.evidence.gather`, pure)
    3  derive    floor, end of the log, epoch, schemas, dedup window, jobs
                                                            (`reef.jobs.evidence.derive`, pure)
    4  compare   the rows with those of the published head, if there is one: a hash over key, LSN,
                 sequence and kind of every row that a full scan returns
    5  publish   only with `apply`, and only without an intact head, or by force; a head is replaced
                 behind fences, since its writer relies on the rows that it shows

Manifests that are all damaged count as none; where one is intact, repair continues from it.
Manifests are used for the comparison only. Everything rests on one rule: every footer states the
LSNs and keys that its segment covers, and the segments of a manifest cover everything below the
floor exactly once. An unpublished fold or merge needs no mark, since it shows the rows of its
inputs; it must only never count together with any of its inputs (H37, H49).

Facts that no row depends on and that only manifests have are lost; the report lists them
(`not_derivable`).

**Numbers.** A process that still holds a deleted manifest may publish the generation after it, or
fence with the epoch that it has raised, at any later time. So the new generation and epoch are far
above all that any object names (`MARGIN`). A late publish then lands below the head, where it has
no effect, and a late writer is fenced.
"""

from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec
import numpy as np

from reef.engine.context import NamespaceContext
from reef.engine.handles.database import Database
from reef.engine.history.as_of import History, PointInTime
from reef.engine.stats import branch_pins_in
from reef.errors import (
    ConflictError,
    CorruptionError,
    ErrorKind,
    InvalidInputError,
    NotFoundError,
)
from reef.formats.manifest import (
    Manifest,
    Recent,
    SegmentEntry,
    encode_manifest,
)
from reef.formats.segment import EMPTY, Lineage, SetHash, set_hash
from reef.formats.segment_index import hash_keys
from reef.formats.segment_writer import SegmentWriter
from reef.formats.versions import Versions
from reef.jobs.arguments import check_arguments
from reef.jobs.evidence.derive import Derived, derive
from reef.jobs.evidence.gather import (
    MARGIN,
    Evidence,
    damaged_generations,
    find_inheritance,
    gather_evidence,
    read_checksums,
    readable_manifests,
)
from reef.jobs.ingest.staging import entry_of
from reef.jobs.repair.job import fence_off, restore_ends, store_record
from reef.jobs.repair.segments import write_saved
from reef.manifest.dedup import merge_streams
from reef.manifest.edits import index_specs
from reef.manifest.head import newest_incarnation
from reef.manifest.invariants import check_loaded
from reef.manifest.repairs import merged_window
from reef.paths import Namespace, number_of
from reef.runtime import Executor
from reef.stores import Outcome, Store
from reef.telemetry import operation
from reef.types import KeyRange

CACHE_BYTES = 64 << 20
LSN_FACTOR = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class RowSum:
    """The number of rows, and a hash over them."""

    rows: int
    hash: SetHash


def sum_rows(context: NamespaceContext, manifest: Manifest, last_lsn: int, now_ms: int) -> RowSum:
    """Scan the rows of a manifest and the log up to an LSN, as of a time."""
    segments = context.segments(CACHE_BYTES)
    tail = History(context.store, context.names, segments).replay(
        PointInTime(manifest, last_lsn), manifest
    )
    count, total = 0, EMPTY
    for rows in tail.view().scan(KeyRange(), now_ms):
        lsns = rows.lsns.astype(np.uint64) * np.uint64(LSN_FACTOR)
        total += set_hash(hash_keys(rows.keys) ^ lsns, rows.seqs, rows.kinds)
        count += len(rows)
    return RowSum(count, total)


COMPARISONS_MAX = 3

NOT_DERIVABLE = (
    "idempotency keys of batches that were collected, or folded and are unreadable: such a batch, "
    "sent again, is applied again",
    "stream marks of batches that were collected: such a stream applies its last batch again",
    "snapshots: the first sweep after the grace period deletes what only they retained",
    "cursors: their readers start over",
    "the grace period, and how many idempotency keys are kept: the defaults apply again",
    "generations: as_of reaches back to the rebuild and no further",
    "condemned keys: the sweep finds them again",
    "levels that a compaction gave to segments without rewriting them: they are as written",
    "a schema with which nothing was written yet, and whether the namespace was dropped",
)


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """The derived state, and how it differs from the published one."""

    namespace: str
    applied: bool
    generation: int
    """Generation of the head, after the rebuild if it was applied; 0 if there is none."""
    wal_floor: int
    last_lsn: int
    writer_epoch: int
    schemas: int
    rows: int
    segments: tuple[str, ...]
    left_out: tuple[str, ...]
    """Segments that were superseded, or written by a job that was never published."""
    staged: tuple[str, ...]
    """Segments of bulk jobs that have not committed."""
    open_jobs: tuple[str, ...]
    rows_equal: bool | None
    """Whether the published head shows the same rows; None if there is none to compare with."""
    differences: tuple[str, ...]
    """From the published head. Other segments with the same rows are no damage."""
    problems: tuple[str, ...]
    """Lost or unknown facts."""
    not_derivable: tuple[str, ...] = NOT_DERIVABLE
    drop_lost: bool = False
    """Whether the registry of the bucket lists it as dropped: publishing makes it live again."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def rebuild(
    db: Database,
    namespace: str,
    *,
    apply: bool = False,
    force: bool = False,
    executor: Executor | None = None,
) -> RebuildReport:
    """Derive a namespace's state from segments and log, and compare it with the published one.

    With `apply` it is published if there is no manifest; if there is one, only if the rows differ
    and `force` is given. Force also accepts problems, and loses the rows that they name.
    """
    check_arguments(db, executor)
    if apply:
        db._prove_store()
    executor = executor or db.store.runtime
    with operation(db.metrics, "rebuild"), db._working("rebuild", namespace):
        names = newest_incarnation(db.store, namespace)
        context = NamespaceContext(db.store, names, metrics=db.metrics)
        inherited = find_inheritance(context)
        if inherited is not None:
            context = NamespaceContext(db.store, inherited.names, metrics=db.metrics)
        run = _Rebuild(db, context, executor)
        report = run.apply(force=force) if apply else run.preview()[0]
    db.events.emit("rebuilt", namespace=namespace, applied=report.applied, rows=report.rows)
    return report


@dataclass(frozen=True, slots=True)
class _DerivedState:
    """The derived state, as a manifest that is not published."""

    evidence: Evidence
    derived: Derived
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class _Rebuild:
    """One rebuild of one namespace."""

    db: Database
    context: NamespaceContext
    executor: Executor

    @property
    def names(self) -> Namespace:
        return self.context.names

    @property
    def store(self) -> Store:
        return self.context.store

    def preview(self) -> tuple[RebuildReport, _DerivedState]:
        """Derive and compare; again if another process publishes meanwhile."""
        for _ in range(COMPARISONS_MAX):
            head = self._head()
            if head is None:
                found = self._derive()
                return self._report(found, None, None), found
            with self.db.reader(self.names.name, pin=True) as pinned:
                found = self._derive()
                head = self.context.heads.load(pinned.generation)
                if found.manifest.wal_floor <= pinned.last_lsn + 1:
                    return self._report(found, head, pinned.last_lsn), found
        raise ConflictError(
            f"{self.names.name} was folded during {COMPARISONS_MAX} comparisons",
            hint="Run it again when fewer jobs publish",
        )

    def apply(self, *, force: bool) -> RebuildReport:
        """Publish the derived state, if that is safe."""
        report, found = self.preview()
        if report.rows_equal and self._lead_here(found):
            return replace(report, applied=True)
        self._refuse(report, found.evidence, force=force)
        found = self._cover_holes(found)
        self.store.runtime.reach("rebuild staged")
        registry = self.db._registry
        with registry.recovering(self.names.name) if registry else nullcontext():
            head = self._replace(found) if report.generation else self._publish(found)
            self._lead_here(found)
        return replace(report, applied=True, generation=head.generation)

    def _lead_here(self, found: _DerivedState) -> bool:
        """Store the record of this incarnation and the ends of earlier ones, if they are lost;
        return whether any was.
        """
        stored = store_record(self.context, found.manifest)
        return restore_ends(self.context) or stored

    def _cover_holes(self, found: _DerivedState) -> _DerivedState:
        """Write an empty segment that covers the holes, so that lost rows stay lost.

        Otherwise the next rebuild would report them again, or find some of them in the log and
        show other rows than the head.
        """
        holes, manifest = found.derived.holes, found.manifest
        if not holes:
            return found
        lineage = Lineage("", 0, covers=holes, generation=found.evidence.generation)
        writer = SegmentWriter(manifest.schema, 0, lineage)
        empty = Versions.empty(manifest.schema)
        trace = write_saved(self.context, writer, empty)
        segments = (*manifest.segments, trace)
        return replace(found, manifest=msgspec.structs.replace(manifest, segments=segments))

    # --- deriving -----------------------------------------------------------------
    def _head(self) -> Manifest | None:
        """Return the published head; None if there is no manifest, or none that is intact."""
        try:
            return self.context.fresh().heads.find().manifest
        except NotFoundError as error:
            if error.kind is ErrorKind.DROPPED:
                raise
            return None
        except CorruptionError as error:
            if damaged_generations(self.context):
                return None
            raise CorruptionError(
                error.message,
                hint="Run repair; or delete all manifests first, and rebuild without any",
                **error.context,
            ) from error

    def _derive(self) -> _DerivedState:
        evidence = gather_evidence(self.context, self.executor)
        derived = derive(evidence)
        checksums = read_checksums(self.context, self.executor, derived.written)
        written = [entry_of(s.id, s.summary(checksums[s.id])) for s in derived.written]
        return _DerivedState(evidence, derived, self._manifest(evidence, derived, written))

    def _manifest(
        self, evidence: Evidence, derived: Derived, written: list[SegmentEntry]
    ) -> Manifest:
        now_ms = int(self.store.runtime.wall_s() * 1000)
        write_id = self.store.runtime.ulid()
        generation = max([evidence.generation, *damaged_generations(self.context)]) + MARGIN
        segments = [*derived.ingested, *written, *derived.inherited]
        newest_first = sorted(segments, key=lambda s: (-s.lsn_max, s.id))
        return Manifest(
            generation=generation,
            write_id=write_id,
            published_at_ms=now_ms,
            schemas=derived.schemas,
            writer_epoch=derived.writer_epoch + MARGIN,
            compactor_epoch=evidence.compactor_epoch + MARGIN,
            max_parallel_writes=derived.max_parallel_writes,
            wal_floor=derived.wal_floor,
            wal_base=evidence.wal_base,
            wal_id_last_seen=derived.log_end - 1,
            segments=tuple(newest_first),
            dedup=derived.dedup,
            stream_marks=derived.stream_marks,
            stream_lineages=derived.stream_lineages,
            open_jobs=derived.open_jobs,
            # Earlier drops are unknown: scans that outlive a sweep must assume all of them.
            dropped_lsn=derived.wal_floor - 1,
            dropped_expired_ms=now_ms,
            oldest_retained=generation,
            recent=(Recent(generation, write_id, now_ms),),
            incarnation=self.names.incarnation,
            created_at_ms=0 if evidence.successor is None else evidence.successor.created_at_ms,
            predecessors=_predecessors(evidence, self.names),
            below_floor=derived.below_floor,
            skipped_lsns=derived.skipped_lsns,
            indexes=index_specs(segment.footer for segment in evidence.segments),
            branches=branch_pins_in(self.store, self.names.root),
            **self._name(),
            **_origin(evidence.first),
        )

    def _name(self) -> dict[str, Any]:
        """Return the fields that make the alias of a renamed namespace lead to it."""
        if not self.names.home:
            return {}
        head = NamespaceContext(self.store, Namespace(self.names.name)).heads.find(
            fallback=True, dropped=True
        )
        alias = head.manifest.alias
        names = (self.names.home, self.names.name)
        return {"names": names, "rename_id": "" if alias is None else alias.id}

    # --- comparing ----------------------------------------------------------------
    def _report(
        self, found: _DerivedState, head: Manifest | None, last_lsn: int | None
    ) -> RebuildReport:
        derived, now_ms = found.derived, int(self.store.runtime.wall_s() * 1000)
        last = derived.log_end - 1 if last_lsn is None else last_lsn
        problems = list(derived.problems)
        rebuilt = self._sum(found.manifest, last, now_ms, problems)
        published = None if head is None else self._sum(head, last, now_ms, problems)
        return RebuildReport(
            namespace=self.names.name,
            applied=False,
            generation=head.generation if head is not None else 0,
            wal_floor=derived.wal_floor,
            last_lsn=last,
            writer_epoch=derived.writer_epoch,
            schemas=len(derived.schemas),
            rows=rebuilt.rows if rebuilt is not None else 0,
            segments=tuple(segment.id for segment in found.manifest.segments),
            left_out=derived.left_out,
            staged=derived.staged,
            open_jobs=tuple(job.id for job in derived.open_jobs),
            rows_equal=None if head is None else rebuilt is not None and rebuilt == published,
            differences=() if head is None else tuple(_differences(head, found.manifest)),
            problems=tuple(problems),
            drop_lost=head is None
            and self.db._registry is not None
            and self.db._registry.has_drop(self.names.name),
        )

    def _sum(
        self, manifest: Manifest, last_lsn: int, now_ms: int, problems: list[str]
    ) -> RowSum | None:
        try:
            return sum_rows(self.context, manifest, last_lsn, now_ms)
        except (CorruptionError, NotFoundError) as error:
            problems.append(f"generation {manifest.generation} cannot be read: {error.message}")
            return None

    # --- publishing ---------------------------------------------------------------
    def _refuse(self, report: RebuildReport, evidence: Evidence, *, force: bool) -> None:
        """Raise if publishing would replace an intact head, or accept a loss without `force`."""
        why = None
        if report.generation and report.generation < evidence.generation:
            raise ConflictError(
                f"generation {report.generation} is the head of {self.names.name}, but there are "
                f"traces of generation {evidence.generation}",
                hint="It was created after the manifests were lost: delete it, and rebuild again",
            )
        if report.rows_equal:
            why = "the published head shows the same rows: there is nothing to rebuild"
        elif report.generation and not force:
            why = f"generation {report.generation} is published, and shows other rows"
        elif report.problems and not force:
            why = f"rows may be lost: {'; '.join(report.problems)}"
        if why is not None:
            raise InvalidInputError(
                f"{self.names.name}: {why}",
                kind=ErrorKind.INVALID_OPTION,
                hint="Check the report without apply; force=True publishes although rows differ",
                namespace=self.names.name,
            )

    def _publish(self, found: _DerivedState) -> Manifest:
        """Publish the first manifest of a new chain, far above the old one."""
        manifest, key = found.manifest, self.names.manifest(found.manifest.generation)
        check_loaded(manifest, key)
        result = self.store.create(key, encode_manifest(manifest))
        if result.outcome is Outcome.UNKNOWN or result.outcome is Outcome.EXISTS:
            raise ConflictError(
                f"generation {manifest.generation} of {self.names.name} was "
                f"{'published by another rebuild' if result.outcome is Outcome.EXISTS else 'sent'}"
                f"{'' if result.outcome is Outcome.EXISTS else ', with unknown outcome'}",
                hint="Run rebuild without apply: its report compares the rows",
            )
        newest = max(number_of(info.key) or 0 for info in self.store.list(self.names.manifests))
        if newest != manifest.generation:
            raise ConflictError(
                f"generation {newest} of {self.names.name} appeared meanwhile",
                hint="Stop the process that still uses the deleted manifests first",
            )
        return manifest

    def _replace(self, found: _DerivedState) -> Manifest:
        """Publish after a head with other rows; facts that only the head has are kept."""
        rebuilt = found.manifest
        # Published entries are kept: a computed checksum would hide damage.
        manifests = readable_manifests(self.context)
        known = {segment.id: segment for manifest in manifests for segment in manifest.segments}
        self._check_floor(manifests[-1], rebuilt)
        fence_off(self.context, frozenset(rebuilt.skipped_lsns))

        def edit(head: Manifest) -> Manifest:
            self._check_floor(head, rebuilt)
            marks, lineages = merge_streams([head, rebuilt])
            return msgspec.structs.replace(
                head,
                schemas=max(head.schemas, rebuilt.schemas, key=len),
                wal_floor=rebuilt.wal_floor,
                wal_id_last_seen=max(head.wal_id_last_seen, rebuilt.wal_id_last_seen),
                segments=tuple(known.get(s.id, s) for s in rebuilt.segments),
                dedup=merged_window([head.dedup, rebuilt.dedup], rebuilt),
                stream_marks=marks,
                stream_lineages=lineages,
                open_jobs=rebuilt.open_jobs,
                below_floor=rebuilt.below_floor,
                skipped_lsns=tuple(sorted({*head.skipped_lsns, *rebuilt.skipped_lsns})),
                writer_epoch=max(head.writer_epoch, rebuilt.writer_epoch - MARGIN) + 1,
                compactor_epoch=head.compactor_epoch + 1,
                dropped_lsn=rebuilt.dropped_lsn,
                dropped_expired_ms=rebuilt.dropped_expired_ms,
                sums=None,
            )

        return self.context.fresh().publisher.publish(edit)

    def _check_floor(self, head: Manifest, rebuilt: Manifest) -> None:
        if rebuilt.wal_floor < head.wal_floor:
            raise ConflictError(
                f"the published floor of {self.names.name} is LSN {head.wal_floor}, but "
                f"segments cover the log only up to LSN {rebuilt.wal_floor - 1}",
                hint="Run repair: it recovers the rows of a lost segment from the log",
            )


def _origin(first: Manifest | None) -> dict[str, Any]:
    """Return the fields that lead a branch to the objects of its origin."""
    if first is None:
        return {}
    names = ("origin", "inherited", "pinned_homes", "ingests_without_begin")
    return {name: getattr(first, name) for name in names}


def _predecessors(evidence: Evidence, names: Namespace) -> tuple[int, ...]:
    """Return the earlier incarnations that a sweep may have to delete; all if unknown."""
    if evidence.successor is None:
        return tuple(range(1, names.incarnation))
    return evidence.successor.predecessors


def _differences(head: Manifest, rebuilt: Manifest) -> list[str]:
    """Return the differences between the derived and the published state."""
    published = {segment.id for segment in head.segments}
    derived = {segment.id for segment in rebuilt.segments}
    found = [f"segment {i} is published, but not derived" for i in sorted(published - derived)]
    found += [f"segment {i} is derived, but not published" for i in sorted(derived - published)]
    for name, before, after in (
        ("the floor", head.wal_floor, rebuilt.wal_floor),
        ("the writer's epoch", head.writer_epoch, rebuilt.writer_epoch - MARGIN),
        ("the schemas", [s.id for s in head.schemas], [s.id for s in rebuilt.schemas]),
        ("open jobs", _job_ids(head), _job_ids(rebuilt)),
        ("parallel writes", head.max_parallel_writes, rebuilt.max_parallel_writes),
    ):
        if before != after:
            found.append(f"{name}: {before} published, {after} derived")
    return found


def _job_ids(manifest: Manifest) -> list[str]:
    return sorted(job.id for job in manifest.open_jobs)
