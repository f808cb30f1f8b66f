"""The parts of one catalog, put together: stores for each kind of object, limits and meters."""

from dataclasses import dataclass

from reef.catalog.cache import BlobCache
from reef.catalog.checkpoints import CheckpointStore
from reef.catalog.gc_plan import GcPlanStore
from reef.catalog.head import HeadStore
from reef.catalog.leases import LeaseStore
from reef.catalog.limits import Limits, limits_of
from reef.catalog.register import register
from reef.catalog.segments import SegmentStore
from reef.catalog.settings import Retention
from reef.catalog.snapshot import Snapshot
from reef.catalog.view import View
from reef.paths import CatalogNames
from reef.runtime import Runtime
from reef.stores import RetryPolicy, Store
from reef.telemetry import Events, Metrics

__all__ = ["Parts"]


@dataclass(frozen=True, slots=True)
class Parts:
    """What sessions, the compactor and recovery work with."""

    store: Store
    names: CatalogNames
    heads: HeadStore
    segments: SegmentStore
    checkpoints: CheckpointStore
    leases: LeaseStore
    plans: GcPlanStore
    limits: Limits
    retention: Retention
    backoff: RetryPolicy
    metrics: Metrics
    events: Events

    @classmethod
    def of(
        cls,
        store: Store,
        names: CatalogNames,
        *,
        cache: BlobCache | None,
        retention: Retention,
        backoff: RetryPolicy,
        metrics: Metrics,
        events: Events,
    ) -> "Parts":
        """Put them together over a store whose conditional writes are known."""
        limits = limits_of(store.runtime, f"{store.url} {names.root}")
        return cls(
            store,
            names,
            HeadStore(register(store, names.head, names.heads), store.runtime),
            SegmentStore(store, names, cache),
            CheckpointStore(store, names, cache),
            LeaseStore(store, names, limits.leases),
            GcPlanStore(register(store, names.plan, names.plans), store.runtime),
            limits,
            retention,
            backoff,
            metrics,
            events,
        )

    @property
    def runtime(self) -> Runtime:
        return self.store.runtime

    def newest_number(self) -> int:
        """Return the highest number that a segment or a checkpoint has; 0 if there is none."""
        numbers = [each.seq for each in self.segments.found()]
        numbers += [each.seq for each in self.checkpoints.found()]
        return max(numbers, default=0)

    def view(self, snapshot: Snapshot) -> View:
        return View(snapshot, self.segments, self.checkpoints)
