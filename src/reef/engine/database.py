"""A database: the namespaces of one bucket. Wires the parts together; no algorithms."""

from typing import Any, Self

from reef.config import ReaderSettings, WriterSettings
from reef.engine.cache import ByteCache
from reef.engine.committer import Committer
from reef.engine.log import Log
from reef.engine.opening import Opened, WriterOpening
from reef.engine.outcomes import Outcomes
from reef.engine.reader import Reader
from reef.engine.resync import Resync
from reef.engine.segments import SegmentStore
from reef.engine.writer import Writer
from reef.errors import NotFoundError
from reef.formats.schema import DEFAULT_SCHEMA
from reef.manifest.edits import lower_parallel_writes, new_namespace
from reef.manifest.publish import Publisher
from reef.paths import Namespace
from reef.runtime import Runtime
from reef.stores import Store, agree_on_cas
from reef.stores.probe import as_proved
from reef.telemetry import Events, Metrics, operation

__all__ = ["Database"]


class Database:
    """The namespaces of one bucket."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.metrics = Metrics()
        self.events = Events()
        self._runtime: Runtime = store.runtime
        self._proved = False

    def writer(self, name: str, **settings: Any) -> Writer:
        """Take the writer role of a namespace, which is made if there is none.

        Any older writer is fenced: it acknowledges nothing more.
        """
        wanted = WriterSettings().changed(settings)
        namespace = Namespace(name)
        self._prove_store()
        publisher = self._ensure(namespace)
        writer_id = self._runtime.ulid()
        cache = ByteCache(ReaderSettings().cache_bytes, self.metrics)
        segments = SegmentStore(self.store, namespace, cache)
        with operation(self.metrics, "open_writer"):
            opened = WriterOpening(
                self.store,
                namespace,
                publisher,
                segments,
                writer_id=writer_id,
                max_parallel_writes=wanted.max_parallel_writes,
                lease_ttl_s=wanted.lease_ttl_s,
            ).open()
        self._note_opened(namespace, opened)
        if wanted.max_parallel_writes < opened.tail.manifest.max_parallel_writes:
            # Only now: this writer has fenced with the old number, so it may fall (H56).
            publisher.publish(
                lambda head: lower_parallel_writes(head, opened.epoch, wanted.max_parallel_writes)
            )
        log = Log(self.store, namespace)
        committer = Committer(
            namespace,
            log,
            publisher.heads,
            opened,
            wanted,
            self._runtime,
            self.metrics,
            Resync(
                namespace,
                log,
                publisher.heads,
                segments,
                opened.epoch,
                writer_id,
                self.metrics,
                self.events,
            ),
        )
        outcomes = Outcomes(log, publisher.heads)
        return Writer(namespace, committer, outcomes, wanted, self._runtime)

    def reader(self, name: str, **settings: Any) -> Reader:
        """Open a namespace for reading; NotFoundError if there is none."""
        wanted = ReaderSettings().changed(settings)
        with operation(self.metrics, "open_reader"):
            return Reader(
                self.store, Namespace(name), wanted, metrics=self.metrics, events=self.events
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def __repr__(self) -> str:
        return f"<Database {self.store.url}>"

    def _note_opened(self, namespace: Namespace, opened: Opened) -> None:
        report = opened.report
        self.metrics.counter("open.fences").add(len(opened.fence_ids))
        self.metrics.counter("log.void").add(report.voided)
        self.metrics.histogram("open.replay_seconds").record(report.seconds)
        self.events.emit(
            "opened",
            namespace=namespace.name,
            epoch=opened.epoch,
            first_lsn=report.first_lsn,
            last_lsn=report.last_lsn,
            seconds=round(report.seconds, 3),
        )

    def _prove_store(self) -> None:
        if not self._proved:
            self.store = as_proved(self.store, agree_on_cas(self.store))
            self._proved = True

    def _ensure(self, namespace: Namespace) -> Publisher:
        publisher = Publisher(self.store, namespace, metrics=self.metrics)
        try:
            publisher.heads.find()
        except NotFoundError:
            publisher.create(new_namespace(DEFAULT_SCHEMA))
        return publisher
