"""Sweep: condemn objects that no root needs, and delete them after a grace period (protocols §6).

    1  load the head; plan which objects no root needs                 (`reef.jobs.sweep.plan`)
    2  CAS a manifest that condemns those keys and raises `oldest_retained`
    3  only now list the leases
    4  delete condemned keys that no lease holds and that were condemned a grace period ago
    5  CAS a manifest that removes the deleted keys from the list
    6  abort bulk jobs whose driver is gone, so that a later sweep can delete their segments

Condemning first makes it safe. From step 2 on no publish can name these keys (H55); a reader that
leases an older head sees the list when it reads the head again, or its lease is seen in step 3
(H22). A condemned key is never revived, and leaves the list only after its deletion, so that a
sweep that dies at any step is finished by the next one, and any number may run concurrently.

One call never condemns and deletes the same key: the grace period is in between. A dry run (the
default) reports what both calls would do.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any, Unpack

from reef.config import SweepOptions, SweepSettings
from reef.engine.context import NamespaceContext
from reef.engine.handles.database import Database
from reef.errors import (
    ConflictError,
    CorruptionError,
    ErrorKind,
    InvalidInputError,
    NotFoundError,
)
from reef.formats.manifest import CondemnedRange, Manifest, OpenJob
from reef.formats.wal_object import Job, WalKind
from reef.jobs.arguments import check_arguments
from reef.jobs.ingest.append import Appender
from reef.jobs.sweep.plan import (
    GarbageObject,
    HeadMoved,
    SlotScan,
    SweepMemory,
    SweepPlan,
    SweepPlanner,
    clock_margin_s,
)
from reef.manifest import branching, edits, lifecycle
from reef.manifest.head import HeadFinder, Publisher, without_manifest
from reef.manifest.roots import (
    GenerationLease,
    LeasedObjects,
    effective_grace_ms,
    find_generation_leases,
    job_owner,
)
from reef.paths import Namespace, number_of
from reef.runtime import Executor
from reef.stores import Store
from reef.stores.leases import FoundLease
from reef.stores.two_phase import collect

DELETES_AT_ONCE = 1000
PINS_AT_ONCE = 8
"""Pins of branches that one sweep examines."""
PLANS_MAX = 10
"""How often a sweep plans again because the head has moved."""


@dataclass(frozen=True, slots=True)
class SweepReport:
    """The objects that a sweep condemned and deleted, or in a dry run would."""

    namespace: str
    applied: bool
    generation: int
    oldest_retained: int
    condemned: tuple[GarbageObject, ...]
    condemned_bytes: int
    deleted: tuple[str, ...]
    leases: int
    leases_reaped: int
    uploads_aborted: int
    jobs_reaped: int
    """Bulk jobs that were aborted because their lease had expired."""
    kept: dict[str, int]
    """How many objects are kept, by reason."""
    refused: str | None = None
    """Why a dry run would not be applied without `force`."""
    temporaries_removed: int = 0
    """Old sources of two-phase writes that were never copied."""
    pins_removed: int = 0
    """Pins of branches that were never created, or that need nothing here any more."""
    records_removed: int = 0
    """Records of a register whose objects are gone and whose numbers will not be used again."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def sweep(
    db: Database,
    namespace: str,
    *,
    apply: bool = False,
    force: bool = False,
    executor: Executor | None = None,
    memory: SweepMemory | None = None,
    **settings: Unpack[SweepOptions],
) -> SweepReport:
    """Condemn and delete objects that no root needs; changes something only with `apply`.

    Safe while writers, readers, jobs and other sweeps run, and to be repeated at any time. A
    process that sweeps repeatedly passes the same `memory` to save requests.
    """
    check_arguments(db, executor)
    options = SweepSettings().changed(settings)
    return sweep_with(
        db, namespace, options, options, apply=apply, force=force, executor=executor, memory=memory
    )


def sweep_with(
    db: Database,
    namespace: str,
    options: SweepSettings,
    of_earlier: SweepSettings,
    *,
    apply: bool,
    force: bool,
    executor: Executor | None = None,
    memory: SweepMemory | None = None,
) -> SweepReport:
    """Sweep with some settings, and earlier incarnations of the name with their own."""
    memory = memory or SweepMemory()
    if apply:
        db._prove_store()
    executor = executor or db.store.runtime
    publisher = db._namespaces.publisher(namespace, dropped=True)

    def run(publisher: Publisher, memory: SweepMemory, options: SweepSettings) -> SweepReport:
        store, names, heads = db.store, publisher.heads.names, publisher.heads
        planner = SweepPlanner(
            store, names, heads, executor, options, is_dry=not apply, memory=memory
        )
        one = _Sweep(store, names, publisher, planner, options)
        return one.apply(force=force) if apply else one.preview()

    report = run(publisher, memory, options)
    for number in publisher.heads.found.manifest.predecessors:
        names = publisher.heads.names.at(number)
        earlier = NamespaceContext(db.store, names, metrics=db.metrics).publisher
        try:
            swept = run(earlier, SweepMemory(), of_earlier)
        except (CorruptionError, NotFoundError):  # its manifests are damaged or lost
            kept = Counter(report.kept) + Counter({"earlier incarnations that cannot be read": 1})
            report = replace(report, kept=dict(sorted(kept.items())))
            continue
        report = _with_earlier(report, names, swept)
        if apply and _is_finished(db.store, earlier.heads, swept):
            done = partial(lifecycle.forget_predecessor, incarnation=number)
            publisher.publish(done, dropped=True)
    return report


def _with_earlier(report: "SweepReport", names: Namespace, earlier: "SweepReport") -> "SweepReport":
    """Return a report with the objects of an earlier incarnation, relative to the name's folder."""
    prefix = names.root.removeprefix(names.base).lstrip("/")

    def relative(key: str) -> str:
        return f"{prefix}/{key}" if prefix else key

    kept = Counter(report.kept) + Counter(earlier.kept)
    sums = ("condemned_bytes", "leases", "leases_reaped", "jobs_reaped", "temporaries_removed")
    return replace(
        report,
        condemned=(
            *report.condemned,
            *(replace(one, key=relative(one.key)) for one in earlier.condemned),
        ),
        deleted=(*report.deleted, *map(relative, earlier.deleted)),
        records_removed=report.records_removed + earlier.records_removed,
        kept=dict(sorted(kept.items())),
        **{name: getattr(report, name) + getattr(earlier, name) for name in sums},
    )


def _is_finished(store: Store, heads: HeadFinder, report: "SweepReport") -> bool:
    """Whether a dropped incarnation has only old manifests left to delete.

    The last manifests are kept for ever; each publish of a sweep supersedes one and adds one.
    """
    head = heads.found.manifest
    if head.dropped is None or not head.dropped.is_cleared or head.snapshots or head.branches:
        return False
    condemned = [*(one.key for one in report.condemned), *(c.key for c in head.condemned)]
    in_log = any(one.folder == "wal" for one in head.condemned_ranges)
    if in_log or any(not key.startswith("manifest/") for key in condemned):
        return False
    return next(iter(store.list(heads.names.segments)), None) is None


@dataclass(frozen=True, slots=True)
class _Leases:
    """The listed leases, and the store's time just before."""

    now_s: float
    found: tuple[FoundLease[GenerationLease], ...]

    @property
    def expired(self) -> list[str]:
        return [lease.key for lease in self.found if lease.expired]

    @property
    def live(self) -> list[FoundLease[GenerationLease]]:
        return [lease for lease in self.found if not lease.expired]

    def hold_job(self, job_id: str) -> bool:
        """Whether a lease belongs to the job, or may."""
        return any(lease.owner in (job_owner(job_id), None) for lease in self.live)


@dataclass(frozen=True, slots=True)
class _Deletable:
    """Condemned objects to delete now, up to a number."""

    objects_max: int
    keys: list[str] = field(default_factory=list)
    ranges: list[CondemnedRange] = field(default_factory=list)
    homes: list[str] = field(default_factory=list)
    """Namespaces in which a branch needs no object any more: they are unpinned."""

    def forget(self, head: Manifest) -> Manifest | None:
        """Remove the deleted keys and homes from a manifest; None if another sweep has."""
        released = branching.release_homes(head, frozenset(self.homes))
        gone = frozenset([*self.keys, *(branching.HOMES + home for home in self.homes)])
        return edits.forget_condemned(released or head, gone, self.ranges) or released

    @property
    def room(self) -> int:
        return max(0, self.objects_max - len(self.keys) - sum(map(len, self.ranges)))

    def add(self, ranges: Iterable[CondemnedRange]) -> int:
        """Add ranges, or the parts for which there is room; return how many objects are left."""
        left = 0
        for one in ranges:
            fitting = one.without(one.first + self.room, one.last)
            self.ranges.extend(fitting)
            left += len(one) - sum(map(len, fitting))
        return left

    def all_keys(self, prefix: str = "") -> Iterator[str]:
        """Yield every key of the objects."""
        for key in chain(self.keys, *(one.all_keys() for one in self.ranges)):
            yield prefix + key


@dataclass(frozen=True, slots=True)
class _Sweep:
    """One sweep of one incarnation."""

    store: Store
    names: Namespace
    publisher: Publisher
    planner: SweepPlanner
    settings: SweepSettings

    def preview(self) -> SweepReport:
        """Return the report of a dry run. Writes nothing."""
        self.planner.memory.scan = SlotScan()
        plan = self._plan()
        leases = self._find_leases()
        deletable = self._deletable(plan.head, leases, plan.kept)
        report = self._report(plan, plan.head, deletable, leases)
        silent = len(self._silent_jobs(plan, leases))
        report = replace(report, refused=self._objection(plan), jobs_reaped=silent)
        return self._with_leftovers(report, plan)

    def apply(self, *, force: bool) -> SweepReport:
        """Run the six steps."""
        plan, head = self._condemn(force=force)
        self.store.runtime.reach("sweep condemned")
        leases = self._find_leases()
        deletable = self._deletable(head, leases, plan.kept)
        self._delete(deletable.all_keys(f"{self.names.root}/"))
        self._unpin(head, deletable.homes)
        self.store.runtime.reach("sweep deleted")
        if deletable.keys or deletable.ranges or deletable.homes:
            head = self.publisher.publish(deletable.forget, dropped=True)
        # An expired lease is not renewed by its holder: it is deleted at once.
        self._delete(leases.expired)
        aborted = 0
        if self.store.capabilities.abort_stale:
            aborted = self.store.abort_stale(self.settings.stale_upload_s)
        report = self._report(plan, head, deletable, leases)
        reaped = self._reap_jobs(plan, leases)
        report = replace(
            report,
            applied=True,
            uploads_aborted=aborted,
            jobs_reaped=reaped,
            pins_removed=self._remove_dead_pins(head, leases.now_s),
        )
        return self._with_leftovers(report, plan)

    # --- steps 1 and 2 ------------------------------------------------------------
    def _plan(self) -> SweepPlan:
        for _ in range(PLANS_MAX):
            try:
                return self.planner.plan()
            except HeadMoved:
                continue
        raise self._overtaken()

    def _condemn(self, *, force: bool) -> tuple[SweepPlan, Manifest]:
        """Condemn on exactly the planned head, or plan again while own folds wait (H32)."""
        self.planner.memory.scan = SlotScan()
        for attempt in range(PLANS_MAX):
            with self.planner.memory.folds_wait() if attempt else nullcontext():
                plan = self._plan()
                self._refuse(plan, force=force)
                needless = not plan.garbage and not plan.clears
                head = plan.head if needless else self._publish(plan)
            if head is not None:
                return plan, head
        raise self._overtaken()

    def _refuse(self, plan: SweepPlan, *, force: bool) -> None:
        objection = self._objection(plan)
        if objection and not force:
            raise InvalidInputError(
                objection,
                kind=ErrorKind.INVALID_OPTION,
                hint="Check a dry run; force=True sweeps all the same",
                namespace=self.names.name,
            )

    def _publish(self, plan: SweepPlan) -> Manifest | None:
        """Return the manifest that condemns; None if the head is newer than the plan."""
        condemnation = plan.condemnation()
        head, applied = self.publisher.publish_once(
            lambda head: edits.condemn(head, condemnation), dropped=True
        )
        return head if applied else None

    def _objection(self, plan: SweepPlan) -> str | None:
        """Return why so large a sweep is more likely a mistake than a clean-up (H32)."""
        size, limits = plan.garbage_bytes, self.settings
        small = size < limits.share_bytes_min or plan.share <= limits.share_max
        if small or plan.head.dropped is not None:  # the caller dropped all of it
            return None
        return (
            f"{size} bytes of segments in {self.names.name} would be deleted, {plan.share:.0%} of "
            f"all; the limit without force is {limits.share_max:.0%}"
        )

    # --- steps 3 and 4 ------------------------------------------------------------
    def _find_leases(self) -> _Leases:
        """List the leases, after the CAS: a later holder sees the condemned keys."""
        now_s = self.planner.now_s()
        found = find_generation_leases(self.store, self.names, now_s, clock_margin_s(self.store))
        return _Leases(now_s, tuple(found))

    def _deletable(self, head: Manifest, leases: _Leases, kept: Counter[str]) -> "_Deletable":
        """Return the condemned objects that can be deleted now."""
        grace_s = effective_grace_ms(head, int(leases.now_s * 1000)) / 1000
        latest_s = leases.now_s - grace_s - clock_margin_s(self.store)
        deletable = _Deletable(self.settings.deletes_max)
        leased = LeasedObjects(leases.found, self.planner.load_if_readable, self.planner.ingested)
        for condemned in head.condemned:
            if leased.pin(condemned):
                kept["condemned objects held by a lease"] += 1
            elif condemned.since_ms / 1000 >= latest_s:
                kept["condemned objects within the grace period"] += 1
            elif (home := branching.condemned_home(condemned.key)) is not None:
                deletable.homes.append(home)
            elif deletable.room:
                deletable.keys.append(condemned.key)
            else:
                kept["condemned objects left for the next sweep"] += 1
        for condemned_range in head.condemned_ranges:
            unpinned = leased.unpinned(condemned_range)
            free = sum(map(len, unpinned))
            kept["condemned objects held by a lease"] += len(condemned_range) - free
            if condemned_range.since_ms / 1000 >= latest_s:
                kept["condemned objects within the grace period"] += free
            else:
                kept["condemned objects left for the next sweep"] += deletable.add(unpinned)
        return deletable

    def _delete(self, keys: Iterable[str]) -> None:
        """Delete in chunks; keys that are gone already are no error."""
        chunk_keys, keys = max(DELETES_AT_ONCE, self.store.capabilities.delete_page), iter(keys)
        while chunk := list(islice(keys, chunk_keys)):
            self.store.delete_many(chunk)

    # --- branches -----------------------------------------------------------------
    def _unpin(self, head: Manifest, homes: Iterable[str]) -> None:
        """Remove the pins of this branch in namespaces whose objects it does not need (H42)."""
        for home in homes:
            if head.origin is not None:
                self._unpin_in(Namespace.of_root(home), head.origin.id)

    def _unpin_in(self, home: Namespace, branch_id: str) -> None:
        with suppress(NotFoundError):  # its manifests are lost: a rebuild finds no such pin
            NamespaceContext(self.store, home).publisher.publish(
                lambda h: branching.unpin_branch(h, branch_id), dropped=True
            )

    def _remove_dead_pins(self, head: Manifest, now_s: float) -> int:
        """Remove pins of branches that were never created, or that need nothing here (H42).

        It examines a few of those that are old enough, from a random one on: a sweep costs a
        bounded number of requests however many branches there are.
        """
        latest_ms = (now_s - self.settings.silent_job_s - clock_margin_s(self.store)) * 1000
        old = [branch for branch, pin in head.branches.items() if pin.pinned_at_ms < latest_ms]
        first = int(self.store.runtime.uniform(0, max(0, len(old) - 1))) if old else 0
        some = [*old[first:], *old[:first]][:PINS_AT_ONCE]
        dead = [branch for branch in some if self._is_dead(branch, head)]
        for branch in dead:
            self._unpin_in(self.names, branch)
        return len(dead)

    def _is_dead(self, branch: str, head: Manifest) -> bool:
        """Whether the chain of a branch shows that it needs nothing here.

        One that was never created gets a dropped manifest first: a creator that stalls finds its
        name taken. In a folder of a later incarnation no such manifest decides: it is kept.
        """
        names = Namespace.of_root(head.branches[branch].root)
        publisher = NamespaceContext(self.store, names).publisher
        absent = self.store.runtime.stopwatch()
        try:
            child = publisher.heads.find(dropped=True).manifest
        except NotFoundError:
            if names.incarnation > 1 or isinstance(
                without_manifest(self.store, names), CorruptionError
            ):
                return False  # the latter: it was created, and its manifests are lost
            tombstone = branching.tombstone(int(self.store.now() * 1000))
            return publisher.create(tombstone, absent) is not None
        except CorruptionError:
            return False
        return branching.is_dead(child, branch, self.names.root)

    def _with_leftovers(self, report: SweepReport, plan: SweepPlan) -> SweepReport:
        """Remove temporary objects of a two-phase store; other stores have none."""
        decided: dict[str, Callable[[str], bool]] = {
            self.names.wal: plan.is_collected,
            self.names.manifests: plan.is_collected,
        }
        if self.names.incarnation > 1 and plan.head.successor is None:  # once, by the newest
            decided[self.names.successors] = self._is_announced
        collected = [
            collect(
                self.store,
                prefix,
                is_below=is_below,
                older_than_s=self.settings.stale_upload_s + clock_margin_s(self.store),
                apply=report.applied,
            )
            for prefix, is_below in decided.items()
        ]
        return replace(
            report,
            temporaries_removed=sum(len(one.temporaries) for one in collected),
            records_removed=sum(len(one.records) for one in collected),
        )

    def _is_announced(self, key: str) -> bool:
        """Whether a key is the record of an incarnation that exists: no process creates it now."""
        number = number_of(key)
        return number is not None and number <= self.names.incarnation

    # --- step 6 -------------------------------------------------------------------
    def _silent_jobs(self, plan: SweepPlan, leases: _Leases) -> list[OpenJob]:
        """Return the open jobs without a lease. Jobs acquire it before they begin, and the leases
        were listed after the log was read, so the lease of a live job is seen.
        """
        if plan.head.dropped is not None:  # their segments are deleted when it is cleared
            return []
        latest_s = leases.now_s - self.settings.silent_job_s - clock_margin_s(self.store)
        silent = [job for job in plan.open_jobs if not leases.hold_job(job.id)]
        return [job for job in silent if self._begun_s(job) < latest_s]

    def _begun_s(self, job: OpenJob) -> float:
        try:
            key = self.planner.names.wal_object(job.begin_lsn)
            return self.store.head(key).last_modified_s
        except NotFoundError:  # records are never collected: it is lost, and so not recent
            return 0.0

    def _reap_jobs(self, plan: SweepPlan, leases: _Leases) -> int:
        """Append aborts to the log: only then may a job's segments be condemned (H28)."""
        silent = self._silent_jobs(plan, leases)
        appender = Appender(self.store, self.names)
        schema = plan.head.schema
        ends = [appender.append(WalKind.ABORT, Job(job.id, key=job.key), schema) for job in silent]
        return sum(end.counts for end in ends)  # one may have committed meanwhile

    # --- the report ---------------------------------------------------------------
    def _report(
        self, plan: SweepPlan, head: Manifest, deleted: _Deletable, leases: _Leases
    ) -> SweepReport:
        return SweepReport(
            namespace=self.names.name,
            applied=False,
            generation=head.generation,
            oldest_retained=plan.oldest_retained if plan.garbage else head.oldest_retained,
            condemned=plan.garbage,
            condemned_bytes=sum(one.bytes for one in plan.garbage),
            deleted=tuple(deleted.all_keys()),
            leases=len(leases.live),
            leases_reaped=len(leases.expired),
            uploads_aborted=0,
            jobs_reaped=0,
            kept={why: count for why, count in sorted(plan.kept.items()) if count},
        )

    def _overtaken(self) -> ConflictError:
        return ConflictError(
            f"the head of {self.names.name} changed during each of {PLANS_MAX} plans of a sweep",
            hint="Run the sweep again when fewer jobs publish",
            namespace=self.names.name,
        )
