"""Repair: bring a damaged namespace back into service, with all rows that are left (protocols §7).

    1  survey everything, deeply (`reef.jobs.verify`)
    2  damaged head: publish the generation after it, from the newest intact one       (H18)
    3  damaged head, or damage in the unfolded log: raise the writer epoch, put fences, and
       survey again                                                                    (H17)
    4  plan: recover rows of damaged segments and WAL objects; copy damaged objects to
       `quarantine/`
    5  one CAS: LSNs and generations skipped, segments replaced, the log folded past the damage
    6  delete unreadable leases
    7  if readers open an earlier incarnation, publish its end again
    8  publish damaged ends of earlier incarnations again; release their snapshots that cannot be
       read

Fences come before anything is skipped: a writer that has lost rows in memory must not commit on
them once readers cannot see them. Damaged objects stay in place: an emptied slot could be filled by
its owner's resend. All decisions are in one publish, so that a repair that dies has done everything
or nothing, but for the fences, which the next writer puts too. On an intact namespace it does
nothing. A dry run (the default) only reads and reports. Writers, readers and jobs may run
concurrently; the writer is fenced if the head or its log was damaged.

**Heads.** A damaged head is followed by a generation made from the newest intact one (H18):

    1  copy the newest intact manifest; list the damaged generations as skipped
    2  add the facts of other readable generations (`reef.manifest.repairs`, H70)
    3  add what the log shows since: epochs, parallel writes and schemas of its fences. An epoch
       rises by at most one per generation, so the next one is above all that were ever used
    4  if segments or log objects that the copy needs were swept since, derive segments and floor
       from the covers of the segments in the bucket, as `rebuild` does

The damaged manifest stays in its place. No field may move backwards.

**Ends.** The chain of every incarnation but the newest ends in a manifest that is dropped and names
its successor, which leads readers to the current one; a record repeats it (protocols §8). Opening a
namespace costs no extra request for that, so a reader trusts the first chain whose newest manifest
is live. If the drop and all manifests after it are lost, that is an incarnation whose rows were
dropped. Verify detects it by comparing the incarnation that readers open with the newest one that
has any object; repair and rebuild publish the end again, far above the lost generations.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from reef.engine.commit.open_writer import WriterOpening
from reef.engine.context import NamespaceContext
from reef.engine.handles.database import Database
from reef.engine.log.log import Verdict
from reef.engine.registry import Registry
from reef.errors import (
    ConflictError,
    CorruptionError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
)
from reef.formats.covers import Cover, without
from reef.formats.manifest import (
    Dropped,
    Manifest,
    NamespaceState,
    Recent,
    SegmentEntry,
    Successor,
    encode_manifest,
    encode_successor,
)
from reef.formats.segment import covers_of
from reef.jobs.arguments import check_arguments
from reef.jobs.evidence.derive import Derived, derive
from reef.jobs.evidence.gather import (
    MARGIN,
    Evidence,
    compactor_epoch_of,
    damaged_generations,
    gather_evidence,
    read_checksums,
    read_successor,
    readable_manifests,
)
from reef.jobs.ingest.staging import entry_of
from reef.jobs.repair.plan import RepairPlan, RepairPlanner
from reef.jobs.repair.report import RepairReport
from reef.jobs.verify.chain import Problem, check_opened
from reef.jobs.verify.job import EarlierDamage, NamespaceSurvey, check_earlier, problems_of, survey
from reef.manifest.head import newest_incarnation, with_inherited_log
from reef.manifest.invariants import check_loaded, check_next
from reef.manifest.repairs import Restart, apply_repairs, restart_after
from reef.paths import Namespace, is_segment, number_of
from reef.runtime import Executor
from reef.stores import ObjectInfo, Outcome, Store, Tagged, Wrapper
from reef.telemetry import operation

RESENDS_MAX = 10
LEASE_TTL_S = 60.0


def fence_off(
    context: NamespaceContext, skipped: frozenset[int], raised: Manifest | None = None
) -> None:
    """Acquire the writer role, with fences behind all slots that are about to be skipped.

    Called before anything is skipped or replaced: a writer that has it in memory would commit on
    it.
    """
    WriterOpening(
        context.store,
        context.names,
        context.fresh().publisher,
        context.segments(),
        writer_id=context.runtime.ulid(),
        max_parallel_writes=1,
        lease_ttl_s=LEASE_TTL_S,
    ).fence_off(skipped, raised)


def restart_of(context: NamespaceContext, executor: Executor, survey: NamespaceSurvey) -> Restart:
    """Return the facts that the bucket has since the newest intact manifest."""
    headers = survey.log.headers()
    found_all = readable_manifests(context)
    known = tuple(m for m in found_all if m.generation != survey.head.generation)
    staged = [
        i.key.removeprefix(context.names.segments)
        for i in context.store.list(context.names.segments)
        if is_segment(i.key)
    ]
    found = Restart(
        newest=survey.chain.newest,
        epoch=max((header.epoch for header in headers), default=0),
        max_parallel_writes=max((header.max_parallel_writes for header in headers), default=1),
        schemas=tuple(header.schema for header in headers if header.schema is not None),
        last_lsn=survey.log.end - 1,
        compactor_epoch=max([0, *map(compactor_epoch_of, staged)]),
        oldest_retained=_oldest_generation(survey),
        known=known,
    )
    missing = [p for p in survey.problems if p.is_missing and p.generation is None]
    if not missing:
        return found
    evidence = _not_condemned(gather_evidence(context, executor), (*known, survey.head))
    derived = derive(evidence) if _was_swept(survey.head, missing, evidence) else None
    if derived is None or derived.wal_floor < survey.head.wal_floor:
        return found
    checksums = read_checksums(context, executor, derived.written)
    # Published entries are kept: a computed checksum would hide damage.
    published = {s.id: s for manifest in (*known, survey.head) for s in manifest.segments}
    written = [
        published.get(s.id) or entry_of(s.id, s.summary(checksums[s.id])) for s in derived.written
    ]
    schemas = (*found.schemas, *derived.schemas)
    segments = [*derived.ingested, *written, *derived.inherited]
    rebuilt = _rebuilt(survey.head, derived, segments)
    holes = (*derived.problems, *_holes(survey, derived))
    return replace(found, schemas=schemas, rebuilt=rebuilt, holes=holes)


def _oldest_generation(survey: NamespaceSurvey) -> int:
    """Return the first retained generation whose manifest exists: older ones were swept."""
    base, oldest = survey.head, survey.head.oldest_retained
    lost, skipped = survey.chain.lost, set(base.skipped_generations)
    while oldest < base.generation and (
        oldest in skipped or (oldest in lost and lost[oldest].is_missing)
    ):
        oldest += 1
    return oldest


def _not_condemned(evidence: Evidence, known: Sequence[Manifest]) -> Evidence:
    """Leave out condemned segments: a sweep may be deleting them."""
    condemned = {entry.key for manifest in known for entry in manifest.condemned}
    kept = [s for s in evidence.segments if f"segments/{s.id}.seg" not in condemned]
    return replace(evidence, segments=tuple(kept))


def _was_swept(base: Manifest, missing: Sequence[Problem], evidence: Evidence) -> bool:
    """Whether missing objects were swept under a newer manifest, and are not lost.

    A missing segment may have been merged. A WAL object was folded if a segment that this manifest
    does not name covers it; otherwise it is lost.
    """
    named = {segment.id for segment in base.segments}
    newer = [c for s in evidence.segments if s.id not in named for c in s.footer.covers]
    return any(
        problem.segment in named
        or (problem.lsn is not None and any(c.first <= problem.lsn < c.end for c in newer))
        for problem in missing
    )


def _holes(survey: NamespaceSurvey, derived: Derived) -> Iterator[str]:
    """Yield the LSNs and keys of the newest intact manifest that no segment covers any more."""
    entries = (*derived.ingested, *derived.inherited)
    there = {segment.id for segment in derived.written} | {s.id for s in entries}
    covers = [c for segment in derived.written for c in covers_of(segment.footer, 0)]
    covers += [Cover(*_slots(s), s.min_key) for s in derived.ingested]
    # A fold has no rows in the slots of loads; whether a part of a load is lost, the log says.
    loads = [Cover(s.visible_lsn, s.visible_lsn + 1) for s in entries if s.visible_lsn]
    for entry in survey.head.segments:
        if not entry.rows and not entry.tombstones:
            continue  # a trace without rows
        bounds = Cover(*_slots(entry), entry.min_key, entry.max_key + b"\0")
        if entry.id not in there:
            known = covers if entry.visible_lsn else [*covers, *loads]
            for hole in without([bounds], known):
                yield f"no object has {hole}, which was in segment {entry.id}"
    gone = [p.lsn for p in survey.log.problems if p.is_missing and p.lsn is not None]
    gone += [lsn for lsn, verdict in survey.log.verdicts.items() if verdict is Verdict.APPLIES]
    folded = sorted(n for n in gone if survey.head.wal_floor <= n < derived.wal_floor)
    for hole in without([Cover(lsn, lsn + 1) for lsn in folded], covers):
        yield f"no object has {hole}"


def _slots(entry: SegmentEntry) -> tuple[int, int]:
    """Return the slots of the log that a segment's rows come from, as [first, end)."""
    if entry.visible_lsn:
        return entry.visible_lsn, entry.visible_lsn + 1
    return entry.lsn_min, entry.lsn_max + 1


def _rebuilt(base: Manifest, derived: Derived, segments: Sequence[SegmentEntry]) -> Manifest:
    return msgspec.structs.replace(
        base,
        segments=tuple(sorted(segments, key=lambda s: (-s.lsn_max, s.id))),
        wal_floor=derived.wal_floor,
        wal_id_last_seen=derived.log_end - 1,
        dedup=derived.dedup,
        stream_marks=derived.stream_marks,
        stream_lineages=derived.stream_lineages,
        open_jobs=derived.open_jobs,
        below_floor=derived.below_floor,
        # Unreadable slots are replayed again: some of their batches may be intact.
        skipped_lsns=base.skipped_lsns,
        dropped_lsn=derived.wal_floor - 1,
    )


def _restart_manifest(store: Store, names: Namespace, base: Manifest, found: Restart) -> Manifest:
    now_ms = int(store.runtime.wall_s() * 1000)
    following = restart_after(base, found, store.runtime.ulid(), now_ms)
    return check_next(base, _with_a_name(store, names, following))


def _with_a_name(store: Store, names: Namespace, following: Manifest) -> Manifest:
    """Return a restarted manifest under the name of its folder, unless its own leads to it.

    The lost manifests may have renamed it, and another namespace may have its former name by now.
    """
    folder = names.folder
    current = following.name_in(folder)
    if current == folder:
        return following
    try:
        alias = NamespaceContext(store, Namespace(current)).heads.find(dropped=True).manifest.alias
    except (CorruptionError, NotFoundError):
        alias = None
    if alias is not None and alias.folder == folder and alias.id == following.rename_id:
        return following
    return msgspec.structs.replace(following, names=(*following.names, folder))


class Published(Wrapper):
    """A bucket with the generation after the damaged ones, for a dry run."""

    def __init__(self, inner: Store, names: Namespace, base: Manifest, found: Restart) -> None:
        super().__init__(inner)
        following = _restart_manifest(inner, names, base, found)
        self.name = following.name_in(names.folder)
        self._key, self._body = names.manifest(following.generation), encode_manifest(following)
        self._date_s = inner.now()

    def get_tagged(self, key: str) -> Tagged:
        if key != self._key:
            return self.inner.get_tagged(key)
        return Tagged(self._body, None)

    def head(self, key: str) -> ObjectInfo:
        return self._info() if key == self._key else self.inner.head(key)

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[ObjectInfo]:
        yield from self.inner.list(prefix, start_after)  # the newest is the last
        if self._key.startswith(prefix) and self._key > start_after:
            yield self._info()

    def _info(self) -> ObjectInfo:
        return ObjectInfo(self._key, len(self._body), None, self._date_s)


def publish_after_damage(context: NamespaceContext, base: Manifest, found: Restart) -> Manifest:
    """Publish the generation after the damaged ones; ConflictError if another repair was first."""
    following = _restart_manifest(context.store, context.names, base, found)
    key, body = context.names.manifest(following.generation), encode_manifest(following)
    for _ in range(RESENDS_MAX):
        outcome = context.store.create(key, body).outcome
        if outcome is Outcome.CREATED:
            return following
        if outcome is Outcome.EXISTS:
            winner = context.heads.load(following.generation)
            if winner.write_id == following.write_id:
                return following
            raise ConflictError(
                f"another repair has published generation {following.generation} of "
                f"{context.names.name}",
                hint="Run the repair again: it continues from there",
                namespace=context.names.name,
            )
    raise OutcomeUnknownError(
        f"generation {following.generation} of {context.names.name} may have been published",
        hint="Run the repair again: it continues where this one stopped",
        namespace=context.names.name,
    )


def lost_ends(context: NamespaceContext) -> list[str]:
    """Return the actions that `end_earlier` would take."""
    done = [f"publish the end of incarnation {number}" for number in _not_ended(context)]
    key = context.names.successor(context.names.incarnation)
    if context.names.incarnation > 1 and not _is_there(context.store, key):
        done.insert(0, f"store {key} again")
    return done


def end_earlier(context: NamespaceContext, current: Manifest) -> list[str]:
    """Publish the ends of earlier incarnations again; return the actions.

    The writer of the incarnation that readers have opened is fenced.
    """
    done = lost_ends(context)
    store_record(context, current)
    for number in _not_ended(context):
        names = with_inherited_log(context.store, context.names.at(number))
        earlier = NamespaceContext(context.store, names)
        fence_off(earlier, frozenset())
        record = read_successor(context.at(number + 1))
        if record is not None:
            _publish_end(earlier, record, readable_manifests(earlier)[-1])
    return done


def _not_ended(context: NamespaceContext) -> list[int]:
    """Return the earlier incarnations whose newest manifest is live."""
    found = []
    for number in range(1, context.names.incarnation):
        manifests = readable_manifests(context.at(number))
        if manifests and manifests[-1].dropped is None:
            found.append(number)
    return found


def _is_there(store: Store, key: str) -> bool:
    try:
        store.head(key)
    except NotFoundError:
        return False
    return True


def restore_end(context: NamespaceContext, number: int, current: Manifest) -> None:
    """Publish the end of an earlier incarnation after a damaged one.

    It is made from the newest intact manifest, with the snapshots of that; without any, they are
    lost. It needs no fences: those of the drop are in the log, and nothing opens a damaged chain.
    """
    earlier = context.at(number)
    try:
        record = read_successor(context.at(number + 1))
    except (CorruptionError, NotFoundError):
        record = None
    manifests = readable_manifests(earlier)
    damaged = max(number_of(info.key) or 0 for info in context.store.list(earlier.names.manifests))
    last = manifests[-1] if manifests else None
    _publish_end(earlier, record or _record_of(current), last, above=damaged)


def restore_ends(context: NamespaceContext) -> bool:
    """Publish the end of earlier incarnations without an intact manifest; return whether any was.

    Their rows were dropped, and their snapshots are lost: a sweep deletes them.
    """
    restored = False
    for number in range(1, context.names.incarnation):
        earlier = context.at(number)
        is_empty = next(iter(context.store.list(earlier.names.manifests)), None) is None
        if is_empty or damaged_generations(earlier):
            try:
                record = read_successor(context.at(number + 1))
            except (CorruptionError, NotFoundError):  # the sweep reports it as unreadable
                continue
            if record is not None:
                _publish_end(earlier, record, None)
                restored = True
    return restored


def store_record(context: NamespaceContext, current: Manifest) -> bool:
    """Store the record of an incarnation again if it is lost; return whether it was.

    A damaged one stays: readers need only its name.
    """
    key = context.names.successor(context.names.incarnation)
    if context.names.incarnation == 1 or _is_there(context.store, key):
        return False
    try:
        record = read_successor(context)
    except (CorruptionError, NotFoundError):
        record = None
    result = context.store.create(key, encode_successor(record or _record_of(current)))
    if result.outcome is Outcome.UNKNOWN:
        raise UnavailableError(f"{key} may not have been written", hint="Run it again")
    return True


def _record_of(current: Manifest) -> Successor:
    """Return a record made from a manifest of the incarnation itself."""
    return Successor(
        incarnation=current.incarnation,
        schema=current.schemas[0],
        generation=current.generation,
        wal_base=current.wal_base,
        writer_epoch=current.writer_epoch,
        compactor_epoch=current.compactor_epoch,
        predecessors=tuple(range(1, current.incarnation)),
        created_at_ms=current.created_at_ms,
        grace_ms=current.grace_ms,
    )


def _publish_end(
    context: NamespaceContext, record: Successor, last: Manifest | None, above: int = 0
) -> Manifest:
    """Publish the last manifest of a chain, above a generation; `last` is the newest intact one."""
    now_ms, write_id = int(context.store.now() * 1000), context.runtime.ulid()
    # Above all that its sweeps have published since.
    generation = max(record.generation, 0 if last is None else last.generation, above) + MARGIN
    entry = Recent(generation, write_id, now_ms)
    if last is None:
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
            recent=(entry,),
            incarnation=context.names.incarnation,
            successor=record,
        )
    else:  # with its snapshots; a sweep deletes its rows when it clears it
        floor = max(record.wal_base, last.wal_floor, last.wal_id_last_seen + 1)
        manifest = msgspec.structs.replace(
            last,
            generation=generation,
            write_id=write_id,
            published_at_ms=now_ms,
            state=NamespaceState.DROPPED,
            dropped=last.dropped or Dropped(now_ms, floor, last.below_floor),
            writer_epoch=max(record.writer_epoch, last.writer_epoch),
            oldest_retained=generation,
            recent=(*last.recent, entry),
            successor=msgspec.structs.replace(record, wal_base=floor),
        )
    key = context.names.manifest(generation)
    result = context.store.create(key, encode_manifest(check_loaded(manifest, key)))
    if result.outcome is Outcome.UNKNOWN:
        raise UnavailableError(f"{key} may not have been written", hint="Run it again")
    return manifest


def repair(
    db: Database, namespace: str, *, apply: bool = False, executor: Executor | None = None
) -> RepairReport:
    """Find all damage and repair it; changes something only with `apply`.

    Returns the problems, the actions, and exactly which rows are lost.
    """
    check_arguments(db, executor)
    if apply:
        db._prove_store()
    names = newest_incarnation(db.store, namespace)
    context = NamespaceContext(db.store, names, metrics=db.metrics)
    run = _Repair(context, executor or db.store.runtime, db._registry)
    with operation(db.metrics, "repair"):
        report = run.apply() if apply else run.preview()
    if apply and report.problems:
        db.events.emit(
            "repaired",
            namespace=namespace,
            generation=report.generation,
            problems=len(report.problems),
            lost_lsns=[lost.lsn for lost in report.lost.lsns],
            lost_segments=[lost.id for lost in report.lost.segments],
        )
    return report


@dataclass(slots=True)
class _Repair:
    """One repair of one namespace."""

    context: NamespaceContext
    executor: Executor
    registry: Registry | None = None
    drop_is_lost: bool = False
    renamed: tuple[str, str] | None = None
    """A name that only lost manifests have, and the name that the intact ones have."""
    unreadable: list[EarlierDamage] = field(default_factory=list)
    """Snapshots of earlier incarnations, which this repair releases."""

    def preview(self) -> RepairReport:
        """Return the report of a dry run. Writes nothing."""
        found = first = self._survey()
        opened = check_opened(self.context)
        first.problems += opened
        self.unreadable = self._check_earlier(first)
        restart, context = self._restart(found), self.context
        self.drop_is_lost = (restart is not None or bool(opened)) and self._has_drop()
        if restart is not None:
            store = Published(context.store, context.names, found.head, restart)
            context = self._rename(store, store.name)
            found = survey(context, self.executor, deep=True)
        plan = RepairPlanner(context, self.executor, found, write=False).plan()
        _quarantine_manifests(plan, first)
        plan.actions += lost_ends(self.context) if opened else []
        return self._report(first, found, plan, first.head.generation, restart)

    def apply(self) -> RepairReport:
        """Run the steps."""
        found = first = self._survey()
        opened = check_opened(self.context)
        first.problems += opened
        self.unreadable = self._check_earlier(first)
        if not first.problems and not self.unreadable:
            plan = self._planner(found, write=False).plan()
            report = self._report(first, first, plan, first.head.generation, None)
            return replace(report, applied=True)
        restart = self._restart(found)
        if restart is None and not opened:
            return self._apply(first, None, opened)
        # Readers may have found the name dropped, and find it live afterwards.
        self.drop_is_lost = self._has_drop()
        with self._recovering(found, restart):
            return self._apply(first, restart, opened)

    def _apply(
        self, first: NamespaceSurvey, restart: Restart | None, opened: list[Problem]
    ) -> RepairReport:
        found, restarted = first, None
        if restart is not None:
            restarted = publish_after_damage(self.context, found.head, restart)
            self.context = self._rename(
                self.context.store, restarted.name_in(self.context.names.folder)
            )
            self.context.runtime.reach("repair restarted")
            found = self._survey()
        unfolded = {lsn for lsn in found.log.damaged if lsn >= found.head.wal_floor}
        if restarted is not None or unfolded:
            fence_off(self.context, frozenset(unfolded), restarted)
            self.context.runtime.reach("repair fenced")
            found = self._survey()
        plan = self._planner(found, write=True).plan()
        self.context.runtime.reach("repair staged")
        _quarantine_manifests(plan, first)
        self._quarantine(plan)
        head = self._publish(plan) if plan.changes_the_manifest else found.head
        self.context.runtime.reach("repair published")
        self._reap(plan)
        plan.actions += end_earlier(self.context, head) if opened else []
        self._repair_earlier(head)
        report = self._report(first, found, plan, head.generation, restart)
        return replace(report, applied=True)

    # --- the steps ----------------------------------------------------------------
    def _rename(self, store: Store, name: str) -> NamespaceContext:
        """Return the context under the name that a restarted chain has."""
        names = self.context.names
        self.renamed = None if name == names.name else (names.name, name)
        home = "" if name == names.folder else names.folder
        renamed = replace(names, name=name, home=home)
        return NamespaceContext(store, renamed, metrics=self.context.metrics)

    def _check_earlier(self, found: NamespaceSurvey) -> list[EarlierDamage]:
        return check_earlier(self.context, self.executor, found.head, deep=True)

    def _repair_earlier(self, head: Manifest) -> None:
        """Publish damaged ends of earlier incarnations again, and release unreadable ones:
        sweeps would keep the rest of its objects, or fail, and nothing but a snapshot reads those.
        """
        for found in self.unreadable:
            if found.end_is_damaged:
                restore_end(self.context, found.incarnation, head)
            if found.releases_anything:
                publisher = self.context.at(found.incarnation).publisher
                publisher.publish(partial(apply_repairs, repairs=found.repairs), dropped=True)

    def _has_drop(self) -> bool:
        return self.registry is not None and self.registry.has_drop(self.context.names.name)

    def _recovering(self, found: NamespaceSurvey, restart: Restart | None) -> ExitStack:
        """Register the change: of the name, and of another one that a restarted chain has."""
        stack, names = ExitStack(), self.context.names
        changed = {names.name}
        if restart is not None:
            following = _restart_manifest(self.context.store, names, found.head, restart)
            changed.add(following.name_in(names.folder))
        if self.registry is not None:
            for name in sorted(changed):
                stack.enter_context(self.registry.recovering(name))
        return stack

    def _survey(self) -> NamespaceSurvey:
        return survey(self.context, self.executor, deep=True)

    def _restart(self, found: NamespaceSurvey) -> Restart | None:
        """Return the start after a damaged head; None if the head is intact."""
        if not found.chain.head_is_damaged:
            return None
        return restart_of(self.context, self.executor, found)

    def _planner(self, found: NamespaceSurvey, *, write: bool) -> RepairPlanner:
        return RepairPlanner(self.context, self.executor, found, write)

    def _quarantine(self, plan: RepairPlan) -> None:
        """Copy damaged objects for later inspection; missing ones are passed."""
        for key in plan.quarantine:
            try:
                self.context.store.copy(key, self.context.names.quarantined(key))
            except NotFoundError:
                continue

    def _publish(self, plan: RepairPlan) -> Manifest:
        publisher = self.context.fresh().publisher
        head, applied = publisher.publish_once(lambda head: apply_repairs(head, plan.repairs))
        if not applied:
            raise ConflictError(
                f"another process has folded the damaged part of the log of "
                f"{self.context.names.name}",
                hint="Run the repair again",
                namespace=self.context.names.name,
            )
        return head

    def _reap(self, plan: RepairPlan) -> None:
        if plan.leases:
            self.context.store.delete_many(plan.leases)

    # --- the report ---------------------------------------------------------------
    def _report(
        self,
        first: NamespaceSurvey,
        found: NamespaceSurvey,
        plan: RepairPlan,
        generation: int,
        restart: Restart | None,
    ) -> RepairReport:
        # Generations that this repair has published were never used.
        own = range(first.chain.newest + 1, found.head.generation + 1)
        own_actions = {f"skip generation {generation}" for generation in own}
        actions = [action for action in plan.actions if action not in own_actions]
        generations = set(plan.lost.generations) - set(own)
        lost = replace(plan.lost, generations=tuple(sorted(generations)))
        if restart is not None:
            base, made = first.head.generation, first.chain.newest + 1
            heads = range(base + 1, made)
            skipped = [f"skip generation {generation}" for generation in heads]
            actions = [
                f"publish generation {made}, made from generation {base}",
                *skipped,
                *(action for action in actions if action not in skipped),
            ]
            missing = [g for g, problem in first.chain.lost.items() if problem.is_missing]
            lost = replace(
                lost,
                generations=tuple(sorted({*heads, *missing, *generations} - {made})),
                since_generation=base,
                holes=restart.holes,
                cursors=(*lost.cursors, *_lost_cursors(first.head, restart)),
            )
        for found_earlier in self.unreadable:
            released = [s.name or s.id for s in found_earlier.snapshots]
            lost = replace(lost, snapshots=(*lost.snapshots, *released))
            of = f"of incarnation {found_earlier.incarnation}"
            if found_earlier.end_is_damaged:
                actions.append(f"publish the end {of}")
            gone = sorted(found_earlier.generations)
            actions += [f"skip generation {generation} {of}" for generation in gone]
            actions += [f"release snapshot {name} {of}" for name in released]
        if self.drop_is_lost:
            lost = replace(lost, drop=True)
            actions.append(f"make {self.context.names.name} live again: its drop is lost")
        if self.renamed is not None:
            former, current = self.renamed
            actions.append(f"rename {former} to {current}: its last rename is lost")
        if restart is not None and restart.rebuilt is not None:
            actions.insert(1, "derive segments and floor from the objects in the bucket")
        return RepairReport(
            namespace=self.renamed[0] if self.renamed is not None else self.context.names.name,
            applied=False,
            generation=generation,
            problems=(
                *first.problems,
                *_later_problems(first, found),
                *problems_of(self.unreadable),
            ),
            actions=tuple(actions),
            quarantined=tuple(sorted(plan.quarantine)),
            lost=lost,
            unrepaired=tuple(plan.unrepaired),
        )


def _quarantine_manifests(plan: RepairPlan, first: NamespaceSurvey) -> None:
    """Add damaged heads, which are no problem of the later survey, to the quarantine."""
    damaged = {problem.object for problem in first.chain.problems if not problem.is_missing}
    new = sorted(damaged - set(plan.quarantine))
    plan.quarantine += new
    plan.actions[:0] = [f"copy {key} to quarantine" for key in new]


def _later_problems(first: NamespaceSurvey, found: NamespaceSurvey) -> list[Problem]:
    """Return the problems that only the survey of the new head has found."""
    known = {problem.object for problem in first.problems}
    return [problem for problem in found.problems if problem.object not in known]


def _lost_cursors(base: Manifest, restart: Restart) -> list[str]:
    """Return the cursors whose part of the log is gone."""
    if restart.rebuilt is None:
        return []
    floor = restart.rebuilt.wal_floor
    return [name for name, cursor in base.cursors.items() if cursor.lsn + 1 < floor]
