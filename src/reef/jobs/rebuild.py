"""Rebuild: what a manifest says, made again from the rest of the bucket.

    gather    footers of segments, headers of the log                (rebuild_evidence: reads only)
    choose    which segments count                                   (rebuild_choice: pure)
    derive    floor, end of the log, epoch, schemas, window, jobs    (rebuild_state: pure)
    compare   all rows with those of the published head, where there is one (rebuild_rows)
    publish   only with `apply`, and only where there is no sound head, or by force; a head is
              replaced only behind fences, as its writer goes by the rows that it shows

No manifest is asked for anything but the comparison. The one rule on which all of it rests:
every segment says in its footer for which LSNs and keys it stands, and the segments of a manifest
stand for everything below the floor exactly once. A fold or a merge that was never published
needs no mark, since it shows the rows that it was made from; what must never happen is that it
and what it was made from both count, in part or in whole (H37, H49).

What it leaves out on purpose: whatever no row depends on and nothing but manifests has. The report
lists it (`not_derivable`).

**Numbers.** A process that still holds a deleted manifest may publish the generation after it, or
fence with the epoch it has raised, whenever it wakes up. So what is published here begins far
above all that anything in the bucket names (`MARGIN`): generations that footers and leases name,
epochs of the log. A late publish then lands below the head, where nobody looks, and a late writer
finds that its epoch is over.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec

from reef.engine.database import Database
from reef.errors import (
    ConflictError,
    CorruptionError,
    InvalidInputError,
    Kind,
    NotFoundError,
    UnavailableError,
)
from reef.formats.manifest import (
    Dropped,
    Manifest,
    NamespaceState,
    Recent,
    SegmentEntry,
    Successor,
    encode_manifest,
)
from reef.formats.segment import Lineage
from reef.formats.segment_writer import SegmentWriter
from reef.formats.versions import Versions
from reef.jobs.executor import Executor, LocalExecutor
from reef.jobs.rebuild_evidence import (
    Evidence,
    gather_evidence,
    read_checksums,
    read_successor,
    readable_manifests,
)
from reef.jobs.rebuild_rows import RowSum, sum_rows
from reef.jobs.rebuild_state import Derived, derive
from reef.jobs.repair_head import fence_off
from reef.jobs.repair_segments import write_saved
from reef.jobs.segment_entries import entry_of
from reef.manifest.head import HeadFinder, newest_incarnation
from reef.manifest.invariants import check_loaded
from reef.manifest.publish import Publisher
from reef.manifest.repairs import merged_window
from reef.manifest.streams import merged_streams
from reef.paths import Namespace, number_of
from reef.stores import Outcome, Store
from reef.telemetry import operation

__all__ = ["NOT_DERIVABLE", "RebuildReport", "rebuild"]

MARGIN = 1_000_000
"""More generations, and more openings, than can have gone by without leaving any other trace."""
COMPARISONS_MAX = 3

NOT_DERIVABLE = (
    "idempotency keys of batches that were collected: such a batch, sent again, is applied again",
    "stream marks of batches that were collected: such a stream applies its last batch again",
    "snapshots: what only they held is taken by the first sweep after the grace period",
    "cursors: their readers begin anew",
    "the grace period, and how many idempotency keys are kept: the defaults hold again",
    "generations: as_of reaches back to the rebuild and no further",
    "condemned keys: the sweep finds them again",
    "levels that a compaction gave to segments without rewriting them: they are as written",
    "a schema with which nothing was written yet, and whether the namespace was dropped",
)


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """What was derived, how it compares with what is published, and what was done."""

    namespace: str
    applied: bool
    generation: int
    """Of the head: the new one if it was applied; 0 if there is none."""
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
    """What is lost, or cannot be told."""
    not_derivable: tuple[str, ...] = NOT_DERIVABLE

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
    """Derive a namespace's state from segments and log, and compare it with what is published.

    With `apply` it is published where there is no manifest; where there is one, only if the rows
    differ and `force` is given. Force also accepts problems, and loses what they name.
    """
    if apply:
        db._prove_store()
    executor = executor or LocalExecutor(db.store.runtime)
    with operation(db.metrics, "rebuild"), db.working("rebuild", namespace):
        run = _Rebuild(db, newest_incarnation(db.store, namespace), executor)
        report = run.apply(force=force) if apply else run.look()[0]
    db.events.emit("rebuilt", namespace=namespace, applied=report.applied, rows=report.rows)
    return report


@dataclass(frozen=True, slots=True)
class _Found:
    """What was derived, as a manifest that is not published."""

    evidence: Evidence
    derived: Derived
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class _Rebuild:
    """One call."""

    db: Database
    names: Namespace
    executor: Executor

    @property
    def store(self) -> Store:
        return self.db.store

    def look(self) -> tuple[RebuildReport, _Found]:
        """Derive and compare; a head that others move meanwhile is looked at again."""
        for _ in range(COMPARISONS_MAX):
            head = self._head()
            if head is None:
                found = self._derive()
                return self._report(found, None, None), found
            with self.db.reader(self.names.name, pin=True) as pinned:
                found = self._derive()
                head = HeadFinder(self.store, self.names).load(pinned.generation)
                if found.manifest.wal_floor <= pinned.last_lsn + 1:
                    return self._report(found, head, pinned.last_lsn), found
        raise ConflictError(
            f"{self.names.name} was folded during {COMPARISONS_MAX} comparisons",
            hint="Run it again when fewer jobs are at work",
        )

    def apply(self, *, force: bool) -> RebuildReport:
        """Publish what was derived, where that can do no harm."""
        report, found = self.look()
        if self._restore_earlier() and report.rows_equal:
            return replace(report, applied=True)
        self._refuse(report, found.evidence, force=force)
        found = self._given_up(found)
        self.store.runtime.reach("rebuild staged")
        head = self._replace(found) if report.generation else self._publish(found)
        return replace(report, applied=True, generation=head.generation)

    def _restore_earlier(self) -> bool:
        """Publish the end of earlier incarnations whose manifests are lost; whether any was.

        Their rows were dropped, and their snapshots are not known any more: a sweep deletes them.
        """
        restored = False
        for number in range(1, self.names.incarnation):
            names = self.names.at(number)
            if next(iter(self.store.list(names.manifests)), None) is None:
                try:
                    record = read_successor(self.store, self.names.at(number + 1))
                except (CorruptionError, NotFoundError):  # a sweep says that it cannot be read
                    continue
                if record is not None:
                    self._publish_end(names, record)
                    restored = True
        return restored

    def _publish_end(self, names: Namespace, record: Successor) -> None:
        now_ms, write_id = int(self.store.now() * 1000), self.store.runtime.ulid()
        generation = record.generation + MARGIN  # above all that its sweeps have published since
        manifest = Manifest(
            generation=generation,
            write_id=write_id,
            published_at_ms=now_ms,
            state=NamespaceState.DROPPED,
            dropped=Dropped(now_ms, record.wal_base, (), is_cleared=True),
            writer_epoch=record.writer_epoch,
            wal_floor=record.wal_base,
            wal_id_last_seen=record.wal_base - 1,
            oldest_retained=generation,
            recent=(Recent(generation, write_id, now_ms),),
            incarnation=names.incarnation,
            successor=record,
        )
        key = names.manifest(generation)
        result = self.store.create(key, encode_manifest(check_loaded(manifest, key)))
        if result.outcome is Outcome.UNKNOWN:
            raise UnavailableError(f"{key} may not have been written", hint="Run it again")

    def _given_up(self, found: _Found) -> _Found:
        """Write an empty segment that covers what is lost: what is given up stays given up.

        Otherwise the next rebuild would report it again, or find some of it in the log and show
        other rows than the head does.
        """
        holes, manifest = found.derived.holes, found.manifest
        if not holes:
            return found
        lineage = Lineage("", 0, covers=holes, generation=found.evidence.generation)
        writer = SegmentWriter(manifest.schema, 0, lineage)
        empty = Versions.empty(manifest.schema)
        trace = write_saved(self.store, self.names, writer, empty)
        segments = (*manifest.segments, trace)
        return replace(found, manifest=msgspec.structs.replace(manifest, segments=segments))

    # --- deriving -----------------------------------------------------------------
    def _head(self) -> Manifest | None:
        """Return the published head; None if there is no manifest, sound or not."""
        try:
            return HeadFinder(self.store, self.names).find().manifest
        except NotFoundError as error:
            if error.kind is Kind.DROPPED:
                raise
            return None
        except CorruptionError as error:
            raise CorruptionError(
                error.message,
                hint="Run repair; or delete all manifests first, and rebuild without any",
                **error.context,
            ) from error

    def _derive(self) -> _Found:
        evidence = gather_evidence(self.store, self.names, self.executor)
        derived = derive(evidence)
        checksums = read_checksums(self.store, self.names, self.executor, derived.written)
        written = [entry_of(s.id, s.summary(checksums[s.id])) for s in derived.written]
        return _Found(evidence, derived, self._manifest(evidence, derived, written))

    def _manifest(
        self, evidence: Evidence, derived: Derived, written: list[SegmentEntry]
    ) -> Manifest:
        now_ms = int(self.store.runtime.wall_s() * 1000)
        write_id = self.store.runtime.ulid()
        generation = evidence.generation + MARGIN
        newest_first = sorted([*derived.ingested, *written], key=lambda s: (-s.lsn_max, s.id))
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
            # Whatever was dropped before is not known: for scans that outlive a sweep, everything.
            dropped_lsn=derived.wal_floor - 1,
            dropped_expired_ms=now_ms,
            oldest_retained=generation,
            recent=(Recent(generation, write_id, now_ms),),
            incarnation=self.names.incarnation,
            created_at_ms=0 if evidence.successor is None else evidence.successor.created_at_ms,
            predecessors=() if evidence.successor is None else evidence.successor.predecessors,
            below_floor=derived.below_floor,
            skipped_lsns=derived.skipped_lsns,
        )

    # --- comparing ----------------------------------------------------------------
    def _report(self, found: _Found, head: Manifest | None, last_lsn: int | None) -> RebuildReport:
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
        )

    def _sum(
        self, manifest: Manifest, last_lsn: int, now_ms: int, problems: list[str]
    ) -> RowSum | None:
        try:
            return sum_rows(self.store, self.names, manifest, last_lsn, now_ms)
        except (CorruptionError, NotFoundError) as error:
            problems.append(f"generation {manifest.generation} cannot be read: {error.message}")
            return None

    # --- publishing ---------------------------------------------------------------
    def _refuse(self, report: RebuildReport, evidence: Evidence, *, force: bool) -> None:
        """Raise where publishing would replace what is sound, or accept a loss unasked."""
        why = None
        if report.generation and report.generation < evidence.generation:
            raise ConflictError(
                f"generation {report.generation} is the head of {self.names.name}, but there are "
                f"traces of generation {evidence.generation}",
                hint="It was made after the manifests were lost: delete it, and rebuild again",
            )
        if report.rows_equal:
            why = "the published head shows the same rows: there is nothing to rebuild"
        elif report.generation and not force:
            why = f"generation {report.generation} is published, and shows other rows"
        elif report.problems and not force:
            why = f"not everything is there: {'; '.join(report.problems)}"
        if why is not None:
            raise InvalidInputError(
                f"{self.names.name}: {why}",
                kind=Kind.INVALID_OPTION,
                hint="Look at the report without apply; force=True publishes where rows differ",
                namespace=self.names.name,
            )

    def _publish(self, found: _Found) -> Manifest:
        """Put the first manifest of a new chain, far above the old one."""
        manifest, key = found.manifest, self.names.manifest(found.manifest.generation)
        check_loaded(manifest, key)
        result = self.store.create(key, encode_manifest(manifest))
        if result.outcome is Outcome.UNKNOWN or result.outcome is Outcome.EXISTS:
            raise ConflictError(
                f"generation {manifest.generation} of {self.names.name} was "
                f"{'made by another rebuild' if result.outcome is Outcome.EXISTS else 'sent'}"
                f"{'' if result.outcome is Outcome.EXISTS else ', and there is no answer'}",
                hint="Run rebuild without apply: it tells whether the rows are there",
            )
        newest = max(number_of(info.key) or 0 for info in self.store.list(self.names.manifests))
        if newest != manifest.generation:
            raise ConflictError(
                f"generation {newest} of {self.names.name} appeared meanwhile",
                hint="A process that goes on by the deleted manifests must be stopped first",
            )
        return manifest

    def _replace(self, found: _Found) -> Manifest:
        """Publish after a head that shows other rows; what only it knows stays."""
        rebuilt = found.manifest
        # As they were published: the checksum of one that is damaged must not be made to fit.
        manifests = readable_manifests(self.store, self.names)
        known = {segment.id: segment for manifest in manifests for segment in manifest.segments}
        self._check_floor(manifests[-1], rebuilt)
        fence_off(self.db, self.names, frozenset(rebuilt.skipped_lsns))

        def edit(head: Manifest) -> Manifest:
            self._check_floor(head, rebuilt)
            marks, lineages = merged_streams([head, rebuilt])
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

        return Publisher(self.store, self.names, metrics=self.db.metrics).publish(edit)

    def _check_floor(self, head: Manifest, rebuilt: Manifest) -> None:
        if rebuilt.wal_floor < head.wal_floor:
            raise ConflictError(
                f"the published floor of {self.names.name} is LSN {head.wal_floor}; segments "
                f"account for the log up to LSN {rebuilt.wal_floor - 1} only",
                hint="Run repair: it takes the rows of a lost segment from the log",
            )


def _differences(head: Manifest, rebuilt: Manifest) -> list[str]:
    """Say in what a derived state differs from the published one."""
    published = {segment.id for segment in head.segments}
    derived = {segment.id for segment in rebuilt.segments}
    found = [f"segment {i} is published, and was left out" for i in sorted(published - derived)]
    found += [f"segment {i} counts, and is not published" for i in sorted(derived - published)]
    for name, said, told in (
        ("the floor", head.wal_floor, rebuilt.wal_floor),
        ("the writer's epoch", head.writer_epoch, rebuilt.writer_epoch - MARGIN),
        ("the schemas", [s.id for s in head.schemas], [s.id for s in rebuilt.schemas]),
        ("open jobs", _job_ids(head), _job_ids(rebuilt)),
        ("parallel writes", head.max_parallel_writes, rebuilt.max_parallel_writes),
    ):
        if said != told:
            found.append(f"{name}: {said} published, {told} derived")
    return found


def _job_ids(manifest: Manifest) -> list[str]:
    return sorted(job.id for job in manifest.open_jobs)
