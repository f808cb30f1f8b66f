"""Upkeep of namespaces without a live writer: the processes that commit to them fold them.

A writer's process folds its log in the background, while it is open (`reef.jobs.background`). A
namespace that only streams write has no such process: its log would grow by an object or two for
each micro-batch, and so would the requests of every open and every commit. So a process that has
committed a micro-batch folds when the log it has just read is long, and compacts when that leaves a
job that is small. Both take place after the commit, within bounds, and never fail it.
"""

import logging
from dataclasses import dataclass, field
from functools import partial

from reef.config import BackgroundSettings, CompactSettings
from reef.engine.handles.database import Database
from reef.errors import ConflictError, ReefError
from reef.formats.manifest import SegmentEntry
from reef.jobs.compact.job import Compactor
from reef.jobs.compact.plan import CompactPlan, strategy
from reef.jobs.fold.job import fold
from reef.jobs.ingest.append import UnfoldedLog

FOLD_OBJECTS = 16
"""Each object is a request, or several, for every commit of a process that has just started. A fold
costs about as many as there are objects."""
WRITERS_SHARE = 2
"""With a live writer the log is folded here only when it is so many times as long as the writer's
own process lets it become."""
COMPACT_BYTES = 64 << 20
"""Larger compactions take longer than a micro-batch may wait: they are left to other processes."""
SEGMENTS_MAX = 200
"""With so many segments a compactor that has the role is dead, or does not keep up."""


@dataclass(frozen=True, slots=True)
class Upkeep:
    """Folds and compacts one namespace, between the commits of a process that holds no role."""

    db: Database
    namespace: str
    limits: BackgroundSettings = field(default_factory=BackgroundSettings)

    def after(self, log: UnfoldedLog | None) -> None:
        """Fold and compact if it is due by the log as a commit has read it; raises no error."""
        if log is None or not self._is_due(log):
            return
        try:
            self._fold()
        except Exception as error:
            self._note(error)

    def _is_due(self, log: UnfoldedLog) -> bool:
        limits = self.limits
        if log.has_writer:
            objects, size = limits.fold_objects * WRITERS_SHARE, limits.fold_bytes * WRITERS_SHARE
        else:
            objects, size = min(limits.fold_objects, FOLD_OBJECTS), limits.fold_bytes
        return log.objects >= objects or log.bytes >= size

    def _fold(self) -> None:
        try:
            fold(self.db, self.namespace, stretches_max=1)
        except ConflictError:  # another fold was first
            return
        if not self.limits.compact:
            return
        planner = partial(_small_plan, self.limits.strategy)
        head = self.db._namespaces.use(self.namespace).heads.found.manifest
        with Compactor(self.db, self.namespace, self.limits.strategy) as compactor:
            if planner(head.segments, compactor.settings) is not None:
                compactor.step(take_over=len(head.segments) >= SEGMENTS_MAX, planner=planner)

    def _note(self, error: Exception) -> None:
        self.db.metrics.counter("background.failures").add()
        self.db.events.emit(
            "background_failed",
            level=logging.WARNING if isinstance(error, ReefError) else logging.ERROR,
            namespace=self.namespace,
            job="fold",
            error=f"{type(error).__name__}: {error}",
        )


def _small_plan(
    name: str, segments: tuple[SegmentEntry, ...], settings: CompactSettings
) -> CompactPlan | None:
    """Return the strategy's plan, if it is small."""
    plan = strategy(name)(segments, settings)
    return plan if plan is not None and plan.bytes <= COMPACT_BYTES else None
