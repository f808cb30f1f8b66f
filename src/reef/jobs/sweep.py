"""Sweep: what nobody needs any more is condemned, and later deleted (protocol section 6).

    1  load the head; find what no root needs                       (sweep_plan: reads only)
    2  CAS a manifest that condemns those keys and raises `oldest_retained`
    3  only now list the leases
    4  delete condemned keys that no lease holds and that were condemned a grace period ago
    5  CAS a manifest that drops the deleted from the list
    6  abort the bulk jobs whose driver is gone, so that a later sweep can take what they staged

Condemning first is what makes it safe. From step 2 on no publish can name these keys (H55);
a reader that leases an older head sees the list when it reads the head again, or its lease
is seen in step 3 (H22). A condemned key is never revived, and leaves the list only after its
deletion, so that a sweep that dies anywhere is finished by the next one, and any number of
them may run side by side.

What is left out on purpose: a key is condemned by one call and deleted by a later one, when
the grace period has passed. A dry run (the default) says what both would do.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from reef.config import SweepSettings
from reef.engine.database import Database
from reef.errors import (
    ConflictError,
    CorruptionError,
    InvalidInputError,
    Kind,
    NotFoundError,
)
from reef.formats.manifest import Condemned, Manifest, OpenJob
from reef.formats.wal_object import Job, WalKind
from reef.jobs.appending import Appender
from reef.jobs.executor import Executor, LocalExecutor
from reef.jobs.sweep_plan import (
    Doomed,
    HeadMoved,
    SweepPlan,
    SweepPlanner,
    clock_margin_s,
)
from reef.manifest import dropping, edits
from reef.manifest.head import HeadFinder
from reef.manifest.leases import FoundLease, find_leases, job_owner
from reef.manifest.publish import Publisher
from reef.manifest.roots import effective_grace_ms
from reef.paths import Namespace
from reef.stores import Store
from reef.stores.two_phase import collect

__all__ = ["SweepReport", "sweep"]

PLANS_MAX = 10
"""How often a sweep starts again because the head has moved."""


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What a sweep did, or in a dry run would do."""

    namespace: str
    applied: bool
    generation: int
    oldest_retained: int
    condemned: tuple[Doomed, ...]
    condemned_bytes: int
    deleted: tuple[str, ...]
    leases: int
    leases_reaped: int
    uploads_aborted: int
    jobs_reaped: int
    """Bulk jobs that were aborted, since their lease had lapsed."""
    kept: dict[str, int]
    """What stays, by reason."""
    refused: str | None = None
    """Why a dry run would not be applied without `force`."""
    temporaries_removed: int = 0
    """Old sources of two-phase writes that nobody will copy from."""
    records_removed: int = 0
    """Records of a register whose objects are gone, and whose numbers nobody will use."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def sweep(
    db: Database,
    namespace: str,
    *,
    apply: bool = False,
    force: bool = False,
    executor: Executor | None = None,
    **settings: Any,
) -> SweepReport:
    """Condemn and delete what nobody needs; only with `apply` is anything changed.

    Safe beside writers, readers, jobs and other sweeps, and to be repeated at any time.
    """
    wanted = SweepSettings().changed(settings)
    if apply:
        db._prove_store()
    executor = executor or LocalExecutor(db.store.runtime)
    publisher = db._namespaces.publisher(namespace, dropped=True)

    def swept(publisher: Publisher) -> SweepReport:
        store, names, heads = db.store, publisher.heads.names, publisher.heads
        planner = SweepPlanner(store, names, heads, executor, wanted, is_dry=not apply)
        run = _Sweep(store, names, publisher, planner, wanted)
        return run.apply(force=force) if apply else run.preview()

    report = swept(publisher)
    for number in publisher.heads.found.manifest.predecessors:
        names = publisher.heads.names.at(number)
        earlier = Publisher(db.store, names, metrics=db.metrics)
        try:
            found = swept(earlier)
        except (CorruptionError, NotFoundError):  # its manifests are damaged or lost
            kept = Counter(report.kept) + Counter({"earlier incarnations that cannot be read": 1})
            report = replace(report, kept=dict(sorted(kept.items())))
            continue
        report = _with_earlier(report, names, found)
        if apply and _is_finished(db.store, earlier.heads, found):
            done = partial(dropping.forget_predecessor, incarnation=number)
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
            *(replace(doomed, key=relative(doomed.key)) for doomed in earlier.condemned),
        ),
        deleted=(*report.deleted, *map(relative, earlier.deleted)),
        records_removed=report.records_removed + earlier.records_removed,
        kept=dict(sorted(kept.items())),
        **{name: getattr(report, name) + getattr(earlier, name) for name in sums},
    )


def _is_finished(store: Store, heads: HeadFinder, found: "SweepReport") -> bool:
    """Whether sweeps have nothing more to delete of a dropped incarnation but old manifests.

    The last manifests stay for ever; every publish of a sweep supersedes one, and adds another.
    """
    head = heads.found.manifest
    if head.dropped is None or not head.dropped.is_cleared or head.snapshots or head.branch_pins:
        return False
    condemned = [*(doomed.key for doomed in found.condemned), *(c.key for c in head.condemned)]
    if any(not key.startswith("manifest/") for key in condemned):
        return False
    return next(iter(store.list(heads.names.segments)), None) is None


@dataclass(frozen=True, slots=True)
class _Leases:
    """The leases as they were found, and the store's time just before."""

    now_s: float
    found: tuple[FoundLease, ...]

    @property
    def lapsed(self) -> list[str]:
        return [lease.key for lease in self.found if lease.lapsed]

    @property
    def live(self) -> list[FoundLease]:
        return [lease for lease in self.found if not lease.lapsed]

    def hold(self, condemned: Condemned) -> bool:
        """Whether some lease is on a generation from before nobody could need a key."""
        return any(lease.generation < condemned.generation for lease in self.live)

    def hold_job(self, job_id: str) -> bool:
        """Whether a lease is the job's, or may be."""
        return any(lease.owner in (job_owner(job_id), None) for lease in self.live)


@dataclass(frozen=True, slots=True)
class _Sweep:
    """One call."""

    store: Store
    names: Namespace
    publisher: Publisher
    planner: SweepPlanner
    settings: SweepSettings

    def preview(self) -> SweepReport:
        """Say what would be done. Writes nothing."""
        plan = self._plan()
        leases = self._find_leases()
        deletable = self._deletable(plan.head, leases, plan.kept)
        report = self._report(plan, plan.head, deletable, leases)
        lapsed = len(self._lapsed_jobs(plan, leases))
        report = replace(report, refused=self._objection(plan), jobs_reaped=lapsed)
        return self._with_leftovers(report, plan)

    def apply(self, *, force: bool) -> SweepReport:
        """Run the five steps."""
        plan, head = self._condemn(force=force)
        self.store.runtime.reach("sweep condemned")
        leases = self._find_leases()
        deletable = self._deletable(head, leases, plan.kept)
        self._delete([f"{self.names.root}/{key}" for key in deletable])
        self.store.runtime.reach("sweep deleted")
        if deletable:
            deleted = frozenset(deletable)
            head = self.publisher.publish(
                lambda h: edits.forget_condemned(h, deleted), dropped=True
            )
        # A lapsed lease is not renewed by its holder: it can go at once.
        self._delete(leases.lapsed)
        aborted = 0
        if self.store.capabilities.abort_stale:
            aborted = self.store.abort_stale(self.settings.stale_upload_s)
        report = self._report(plan, head, deletable, leases)
        reaped = self._reap_jobs(plan, leases)
        report = replace(report, applied=True, uploads_aborted=aborted, jobs_reaped=reaped)
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
        """Condemn on the very head that was looked at, or look again (H32)."""
        for _ in range(PLANS_MAX):
            plan = self._plan()
            objection = self._objection(plan)
            if objection and not force:
                raise InvalidInputError(
                    objection,
                    kind=Kind.INVALID_OPTION,
                    hint="Look at a dry run; force=True does it all the same",
                    namespace=self.names.name,
                )
            if not plan.doomed and not plan.clears:
                return plan, plan.head
            head = self._publish(plan)
            if head is not None:
                return plan, head
        raise self._overtaken()

    def _publish(self, plan: SweepPlan) -> Manifest | None:
        """Return the manifest that condemns; None if the plan's head is not the head any more."""
        condemnation = plan.condemnation()
        overtaken = False

        def edit(head: Manifest) -> Manifest | None:
            nonlocal overtaken
            edited = edits.condemn(head, condemnation)
            overtaken = edited is None
            return edited

        head = self.publisher.publish(edit, dropped=True)
        return None if overtaken else head

    def _objection(self, plan: SweepPlan) -> str | None:
        """A sweep of so much is more likely a mistake than a large clean-up (H32)."""
        going, wanted = plan.going_bytes, self.settings
        small = going < wanted.share_bytes_min or plan.share <= wanted.share_max
        if small or plan.head.dropped is not None:  # that all of it goes is what was asked for
            return None
        return (
            f"{going} bytes of segments in {self.names.name} would go, {plan.share:.0%} of all; "
            f"{wanted.share_max:.0%} is the most without being forced"
        )

    # --- steps 3 and 4 ------------------------------------------------------------
    def _find_leases(self) -> _Leases:
        """List the leases, after the CAS: who leases later sees what was condemned."""
        now_s = self.planner.now_s()
        found = find_leases(self.store, self.names, now_s, clock_margin_s(self.store))
        return _Leases(now_s, tuple(found))

    def _deletable(self, head: Manifest, leases: _Leases, kept: Counter[str]) -> list[str]:
        """Return the condemned keys whose time has come."""
        grace_s = effective_grace_ms(head, int(leases.now_s * 1000)) / 1000
        latest_s = leases.now_s - grace_s - clock_margin_s(self.store)
        deletable: list[str] = []
        for condemned in head.condemned:
            if leases.hold(condemned):
                kept["condemned objects held by a lease"] += 1
            elif condemned.since_ms / 1000 >= latest_s:
                kept["condemned objects within the grace period"] += 1
            elif len(deletable) < self.settings.deletes_max:
                deletable.append(condemned.key)
            else:
                kept["condemned objects left for the next sweep"] += 1
        return deletable

    def _delete(self, keys: Sequence[str]) -> None:
        """Delete page by page; what is gone already is fine."""
        page = max(1, self.store.capabilities.delete_page)
        for at in range(0, len(keys), page):
            self.store.delete_many(keys[at : at + page])

    def _with_leftovers(self, report: SweepReport, plan: SweepPlan) -> SweepReport:
        """Remove what deaths left beside a two-phase store's names; other stores have nothing."""
        found = [
            collect(
                self.store,
                prefix,
                is_below=plan.is_collected,
                older_than_s=self.settings.stale_upload_s + clock_margin_s(self.store),
                apply=report.applied,
            )
            for prefix in (self.names.wal, self.names.manifests)
        ]
        return replace(
            report,
            temporaries_removed=sum(len(one.temporaries) for one in found),
            records_removed=sum(len(one.records) for one in found),
        )

    # --- step 6 -------------------------------------------------------------------
    def _lapsed_jobs(self, plan: SweepPlan, leases: _Leases) -> list[OpenJob]:
        """Return the open jobs without a lease. They take it before they begin, and the leases
        were listed after the log was read, so one that lives is seen.
        """
        if plan.head.dropped is not None:  # what they staged goes when it is cleared
            return []
        latest_s = leases.now_s - self.settings.silent_job_s - clock_margin_s(self.store)
        lapsed = [job for job in plan.open_jobs if not leases.hold_job(job.id)]
        return [job for job in lapsed if self._begun_s(job) < latest_s]

    def _begun_s(self, job: OpenJob) -> float:
        try:
            return self.store.head(self.names.wal_object(job.begin_lsn)).last_modified_s
        except NotFoundError:  # only what is a month old may be gone
            return 0.0

    def _reap_jobs(self, plan: SweepPlan, leases: _Leases) -> int:
        """Put an abort into the log: only then may a job's segments be condemned (H28)."""
        lapsed = self._lapsed_jobs(plan, leases)
        appender = Appender(self.store, self.names)
        schema = plan.head.schema
        ends = [appender.append(WalKind.ABORT, Job(job.id, key=job.key), schema) for job in lapsed]
        return sum(end.counts for end in ends)  # one may have committed at the last moment

    # --- the end ------------------------------------------------------------------
    def _report(
        self, plan: SweepPlan, head: Manifest, deleted: Sequence[str], leases: _Leases
    ) -> SweepReport:
        return SweepReport(
            namespace=self.names.name,
            applied=False,
            generation=head.generation,
            oldest_retained=plan.oldest_retained if plan.doomed else head.oldest_retained,
            condemned=plan.doomed,
            condemned_bytes=sum(doomed.bytes for doomed in plan.doomed),
            deleted=tuple(deleted),
            leases=len(leases.live),
            leases_reaped=len(leases.lapsed),
            uploads_aborted=0,
            jobs_reaped=0,
            kept=dict(sorted(plan.kept.items())),
        )

    def _overtaken(self) -> ConflictError:
        return ConflictError(
            f"{self.names.name} changed under {PLANS_MAX} plans of a sweep",
            hint="Try again when fewer jobs are at work",
            namespace=self.names.name,
        )
