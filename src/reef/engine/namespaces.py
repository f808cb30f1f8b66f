"""Making namespaces, dropping them, bringing them back, listing them (protocol section 8).

Drop: take the writer role, so that M fences lie in the log and no older writer commits any more;
publish that it is dropped, with where its log ends. Undrop: publish that it is live. Make anew: one
publish behind those fences, with numbers that go on. Each is one CAS on the manifest, which
decides; a registry, where there is one, is told before and after. Take back: what a drop does, for
a namespace that was made for a load which then failed, and that nobody else has used.
"""

from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass

from reef.config import WriterSettings
from reef.engine.commit.opening import WriterOpening
from reef.engine.log import Log
from reef.engine.reading.cache import ByteCache
from reef.engine.reading.segments import SegmentStore
from reef.engine.registry import Registry
from reef.engine.stats import list_states
from reef.errors import ConflictError, CorruptionError, FencedError, Kind, NotFoundError
from reef.formats.manifest import Dropped, Manifest, NamespaceState
from reef.formats.schema import Schema
from reef.manifest import dropping
from reef.manifest.edits import new_namespace
from reef.manifest.head import HeadFinder
from reef.manifest.publish import Publisher
from reef.paths import Namespace
from reef.runtime import Stopwatch
from reef.stores import Store
from reef.telemetry import Metrics

__all__ = ["Namespaces"]

MAKES_MAX = 10
"""How often a namespace is made anew because it was dropped at once."""
DROPS_MAX = 10
"""How often a drop begins anew because a writer opened, or a fold passed its fences."""


@dataclass(frozen=True, slots=True)
class Namespaces:
    """The namespaces of one bucket, as things that come and go."""

    store: Store
    metrics: Metrics
    registry: Registry | None = None

    def names(self, state: NamespaceState) -> list[str]:
        """Return the names of those in a state, from the registry or by listing."""
        found = None if self.registry is None else self.registry.names(state)
        if found is not None:
            return found
        return sorted(name for name, one in list_states(self.store).items() if one is state)

    def ensure(self, namespace: Namespace, schema: Schema, made_for: str = "") -> Publisher:
        """Make a namespace if there is none, or none but a dropped one; use it.

        With `made_for`, the id of a job, one that is made now may be taken back if that job fails.
        """
        publisher = self._publisher(namespace)
        for _ in range(MAKES_MAX):
            looked = self.store.runtime.stopwatch()
            try:
                self._use(publisher, made_for)
            except NotFoundError as error:
                with self._changing(namespace):
                    if error.kind is Kind.DROPPED:
                        publisher.publish(
                            lambda head: dropping.made_anew(head, schema, made_for), dropped=True
                        )
                    else:
                        first = new_namespace(schema, made_for=made_for)
                        if self._create(namespace, publisher, first, looked):
                            return publisher
            else:
                return publisher
        raise ConflictError(
            f"{namespace.name} was dropped again and again while it was made",
            namespace=namespace.name,
        )

    def use(self, namespace: Namespace) -> Manifest:
        """Return the head, which no failed load takes back any more; NotFoundError if none."""
        return self._use(self._publisher(namespace))

    def _use(self, publisher: Publisher, made_for: str = "") -> Manifest:
        head = publisher.heads.find().manifest
        if head.made_for in ("", made_for):
            return head
        return publisher.publish(dropping.use)

    def _create(
        self, namespace: Namespace, publisher: Publisher, first: Manifest, looked: Stopwatch
    ) -> bool:
        """Publish the first manifest; whether nobody else was first."""
        if self.registry is not None:  # telling it took time: somebody else may have been first
            looked = self.store.runtime.stopwatch()
            with suppress(NotFoundError):
                publisher.heads.find()
                return False
        self._check_nothing_is_left(namespace)
        return publisher.create(first, looked) is not None

    # --- dropping -----------------------------------------------------------------
    def drop(self, namespace: Namespace) -> Manifest:
        """Drop a namespace; NotFoundError if there is none. Fences its writer."""
        self._publisher(namespace).heads.find()
        with self._changing(namespace):
            for _ in range(DROPS_MAX):
                publisher = self._publisher(namespace)
                with suppress(FencedError):
                    manifest = self._try_to_drop(namespace, publisher)
                    if manifest.dropped is not None:
                        return manifest
        raise ConflictError(
            f"{namespace.name} was taken over by other writers while it was dropped",
            hint="Stop its writers, and drop it again",
            namespace=namespace.name,
        )

    def _try_to_drop(self, namespace: Namespace, publisher: Publisher) -> Manifest:
        epoch, fences = self._opening(namespace, publisher).fence_off()
        self.store.runtime.reach("drop fenced")
        found = Log(self.store, namespace).read_many(fences)
        below = tuple(fence.header.write_id for fence in found if fence is not None)
        if len(below) < len(fences):  # folded, and given up by a repair: begin anew
            return publisher.heads.find().manifest
        dropped = Dropped(int(self.store.now() * 1000), max(fences) + 1, below)
        return publisher.publish(lambda head: dropping.drop(head, epoch, dropped))

    def take_back(
        self, namespace: Namespace, job: str, end_lsn: int, below: tuple[str, ...]
    ) -> None:
        """Drop what was made for a job that was aborted, unless somebody else has used it.

        The abort stands in the slot below `end_lsn`; the write ids up to it are `below`.
        """
        dropped = Dropped(int(self.store.now() * 1000), end_lsn, below)
        with self._changing(namespace):
            self._publisher(namespace).publish(
                lambda head: dropping.take_back(head, job, dropped), dropped=True
            )

    def undrop(self, namespace: Namespace) -> Manifest:
        """Bring a dropped namespace back, as it was; one that is there stays as it is."""
        publisher = self._publisher(namespace)
        found = publisher.heads.find(dropped=True).manifest
        if dropping.undrop(found) is None:
            return found
        with self._changing(namespace):
            return publisher.publish(dropping.undrop, dropped=True)

    # --- parts --------------------------------------------------------------------
    def _changing(self, namespace: Namespace) -> AbstractContextManager[None]:
        return nullcontext() if self.registry is None else self.registry.changing(namespace)

    def _publisher(self, namespace: Namespace) -> Publisher:
        return Publisher(self.store, namespace, metrics=self.metrics)

    def _opening(self, namespace: Namespace, publisher: Publisher) -> WriterOpening:
        cache = ByteCache(0, self.metrics)
        return WriterOpening(
            self.store,
            namespace,
            publisher,
            SegmentStore(self.store, namespace, cache),
            writer_id=self.store.runtime.ulid(),
            max_parallel_writes=1,
            lease_ttl_s=WriterSettings().lease_ttl_s,
        )

    def _check_nothing_is_left(self, namespace: Namespace) -> None:
        """A log without any manifest is damage: a fresh namespace over it would hide its rows.

        Unless somebody has just made the namespace, and begun to write.
        """
        if next(iter(self.store.list(namespace.wal)), None) is None:
            return
        with suppress(NotFoundError):
            HeadFinder(self.store, namespace).find(dropped=True)
            return
        raise CorruptionError(
            f"namespace {namespace.name} has a log and no manifest",
            hint=f"Run rebuild: reef rebuild URL {namespace.name} --apply",
            object=namespace.manifests,
            offset=0,
        )
