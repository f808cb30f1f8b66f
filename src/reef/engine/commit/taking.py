"""Taking the writer role, and what commits with it: the parts of a writer put together."""

from dataclasses import dataclass

from reef.config import WriterSettings
from reef.engine.commit.committer import Committer
from reef.engine.commit.opening import Opened, WriterOpening
from reef.engine.commit.outcomes import Outcomes
from reef.engine.commit.resync import Resync
from reef.engine.log import Log
from reef.engine.reading.cache import ByteCache
from reef.engine.reading.segments import SegmentStore
from reef.manifest.edits import lower_parallel_writes
from reef.manifest.publish import Publisher
from reef.manifest.streams import NO_STREAM, StreamClaim
from reef.paths import Namespace
from reef.stores import Store
from reef.telemetry import Events, Metrics, operation

__all__ = ["RoleTaking"]


@dataclass(frozen=True, slots=True)
class RoleTaking:
    """Takes the role of one namespace, for a writer with these settings."""

    store: Store
    namespace: Namespace
    publisher: Publisher
    settings: WriterSettings
    metrics: Metrics
    events: Events

    def take(self, claim: StreamClaim = NO_STREAM) -> tuple[Committer, Outcomes]:
        """Return what commits, and what resolves; `claim` says for which local log, if any."""
        writer_id = self.store.runtime.ulid()
        opened = self._open(writer_id, claim)
        self._note_opened(opened)
        wanted = self.settings.max_parallel_writes
        if wanted < opened.tail.manifest.max_parallel_writes:
            # Only now: this writer has fenced with the old number, so it may fall (H56).
            self.publisher.publish(lambda head: lower_parallel_writes(head, opened.epoch, wanted))
        heads, log = self.publisher.heads, Log(self.store, self.namespace)
        name, metrics = self.namespace, self.metrics
        resync = Resync(name, log, heads, opened.epoch, writer_id, metrics, self.events)
        runtime = self.store.runtime
        committer = Committer(name, log, heads, opened, self.settings, runtime, metrics, resync)
        return committer, Outcomes(log, heads)

    def _open(self, writer_id: str, claim: StreamClaim) -> Opened:
        cache = ByteCache(self.settings.cache_bytes, self.metrics)
        with operation(self.metrics, "open_writer"):
            return WriterOpening(
                self.store,
                self.namespace,
                self.publisher,
                SegmentStore(self.store, self.namespace, cache),
                writer_id=writer_id,
                max_parallel_writes=self.settings.max_parallel_writes,
                lease_ttl_s=self.settings.lease_ttl_s,
                claim=claim,
            ).open()

    def _note_opened(self, opened: Opened) -> None:
        report = opened.report
        self.metrics.counter("open.fences").add(len(opened.fence_ids))
        self.metrics.counter("log.void").add(report.voided)
        self.metrics.histogram("open.replay_seconds").record(report.seconds)
        self.events.emit(
            "opened",
            namespace=self.namespace.name,
            epoch=opened.epoch,
            first_lsn=report.first_lsn,
            last_lsn=report.last_lsn,
            seconds=round(report.seconds, 3),
        )
