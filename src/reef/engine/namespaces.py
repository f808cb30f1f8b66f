"""Create, drop, undrop and list namespaces (protocol section 8).

Drop: take the writer role, so that the log ends with M fences and no older writer commits any
more; publish that the namespace is dropped, with the end of its log. Undrop: publish that it is
live. Create again: publish in the dropped chain which incarnation succeeds it, store that record,
and create the first manifest of the new chain from it; a process that finds a successor without
a manifest completes it. Each is decided by one CAS on a manifest; the registry, where there is
one, is updated before and after. Take back: a drop, for a namespace that was created for a load
which then failed, and that no other process has used.
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
from reef.errors import (
    ConflictError,
    CorruptionError,
    FencedError,
    NotFoundError,
    UnavailableError,
)
from reef.formats.manifest import (
    Dropped,
    Manifest,
    NamespaceState,
    Successor,
    encode_successor,
)
from reef.formats.schema import Schema
from reef.manifest import dropping
from reef.manifest.dropping import LogEnd
from reef.manifest.edits import new_namespace
from reef.manifest.head import HeadFinder, locate, refuse_dropped
from reef.manifest.publish import Publisher
from reef.paths import Namespace
from reef.runtime import Stopwatch
from reef.stores import Outcome, Store
from reef.telemetry import Metrics

__all__ = ["Namespaces"]

CREATES_MAX = 10
"""How often a namespace is created again because it was dropped at once."""
DROPS_MAX = 10
"""How often a drop fences again because a writer opened, or a fold passed its fences."""


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

    def ensure(self, name: str, schema: Schema, made_for: str = "") -> Publisher:
        """Return the publisher of a namespace, which is created if it is absent or dropped.

        With `made_for`, the id of a job, one that is created now is dropped if that job fails.
        """
        for _ in range(CREATES_MAX):
            absent = self.store.runtime.stopwatch()
            try:
                heads = locate(self.store, name, dropped=True)
            except NotFoundError:
                with self._changing(name):
                    created = self._create(Namespace(name), schema, made_for, absent)
                if created is not None:
                    return created
                continue
            publisher = self._publisher(heads)
            try:
                self._use(publisher, made_for)
            except NotFoundError:
                with self._changing(name):
                    self._create_again(publisher, schema, made_for)
            else:
                return publisher
        raise ConflictError(
            f"{name} was dropped again and again while it was being created", namespace=name
        )

    def use(self, name: str) -> Publisher:
        """Return the publisher of a namespace that no failed load takes back any more."""
        publisher = self.publisher(name)
        self._use(publisher)
        return publisher

    def _use(self, publisher: Publisher, made_for: str = "") -> None:
        head = publisher.heads.last or publisher.heads.find(dropped=True)
        refuse_dropped(publisher.heads.names, head.manifest)
        if head.manifest.made_for not in ("", made_for):
            publisher.publish(dropping.use)

    # --- creating -----------------------------------------------------------------
    def _create(
        self, names: Namespace, schema: Schema, made_for: str, absent: Stopwatch
    ) -> Publisher | None:
        """Create the first incarnation; None if another process was first."""
        if self.registry is not None:  # updating it took time: another process may have been first
            absent = self.store.runtime.stopwatch()
            with suppress(NotFoundError):
                HeadFinder(self.store, names).find(dropped=True)
                return None
        self._check_nothing_is_left(names)
        publisher = self._publisher(HeadFinder(self.store, names))
        created = publisher.create(new_namespace(schema, made_for=made_for), absent)
        return None if created is None else publisher

    def _create_again(self, publisher: Publisher, schema: Schema, made_for: str) -> None:
        """Announce a successor in the dropped chain, and complete it; or what others announced."""
        now_ms = int(self.store.runtime.wall_s() * 1000)
        names, dropped = publisher.heads.names, publisher.heads.found.manifest.dropped
        if dropped is None:  # it was undropped meanwhile
            return
        # A load may have committed behind the fences, before the drop was published: its LSN is
        # not used again.
        used = [slot.lsn for slot in Log(self.store, names).filled(dropped.end_lsn)]
        end = LogEnd(dropped.end_lsn, max(used, default=0) + 1)
        head = publisher.publish(
            lambda h: dropping.succeed(h, schema, now_ms, end, made_for), dropped=True
        )
        self.store.runtime.reach("successor announced")
        if head.successor is not None:  # otherwise it was undropped meanwhile
            self._complete(names, head.successor)

    def _complete(self, dropped: Namespace, successor: Successor) -> None:
        """Store the record and the first manifest of an incarnation; both may be there already."""
        absent = self.store.runtime.stopwatch()
        names = dropped.at(successor.incarnation)
        publisher = self._publisher(HeadFinder(self.store, names))
        with suppress(NotFoundError):
            publisher.heads.find(dropped=True)
            return
        self._check_nothing_is_left(names)
        record = names.successor(successor.incarnation)
        if self.store.create(record, encode_successor(successor)).outcome is Outcome.UNKNOWN:
            raise UnavailableError(
                f"{record} may not have been written",
                hint="Create the namespace again: that completes it",
                namespace=names.name,
            )
        self.store.runtime.reach("successor recorded")
        publisher.create(dropping.first_manifest(successor), absent)

    # --- dropping -----------------------------------------------------------------
    def drop(self, name: str) -> Manifest:
        """Drop a namespace; NotFoundError if there is none. Fences its writer."""
        names = self.publisher(name).heads.names
        with self._changing(name):
            for _ in range(DROPS_MAX):
                publisher = self._publisher(HeadFinder(self.store, names))
                with suppress(FencedError):
                    manifest = self._try_to_drop(names, publisher)
                    if manifest.dropped is not None:
                        return manifest
        raise ConflictError(
            f"{name} was taken over by other writers while it was being dropped",
            hint="Stop its writers, and drop it again",
            namespace=name,
        )

    def _try_to_drop(self, names: Namespace, publisher: Publisher) -> Manifest:
        epoch, fences = self._opening(names, publisher).fence_off()
        self.store.runtime.reach("drop fenced")
        found = Log(self.store, names).read_many(fences)
        below = tuple(fence.header.write_id for fence in found if fence is not None)
        if len(below) < len(fences):  # folded, and skipped by a repair: fence again
            return publisher.heads.find().manifest
        dropped = Dropped(int(self.store.now() * 1000), max(fences) + 1, below)
        return publisher.publish(lambda head: dropping.drop(head, epoch, dropped))

    def take_back(self, names: Namespace, job: str, end_lsn: int, below: tuple[str, ...]) -> None:
        """Drop a namespace that was created for a job which was aborted, unless it is in use.

        The abort is in the slot below `end_lsn`; the write ids up to it are `below`.
        """
        dropped = Dropped(int(self.store.now() * 1000), end_lsn, below)
        with self._changing(names.name):
            self._publisher(HeadFinder(self.store, names)).publish(
                lambda head: dropping.take_back(head, job, dropped), dropped=True
            )

    def undrop(self, name: str) -> Manifest:
        """Bring a dropped namespace back, as it was; a live one stays as it is."""
        publisher = self.publisher(name, dropped=True)
        found = publisher.heads.find(dropped=True).manifest
        if dropping.undrop(found) is None:
            return found
        with self._changing(name):
            return publisher.publish(dropping.undrop, dropped=True)

    # --- parts --------------------------------------------------------------------
    def publisher(self, name: str, *, dropped: bool = False) -> Publisher:
        """Return the publisher of the current incarnation of a name; NotFoundError if none."""
        return self._publisher(locate(self.store, name, dropped=dropped))

    def _publisher(self, heads: HeadFinder) -> Publisher:
        return Publisher(self.store, heads.names, metrics=self.metrics, heads=heads)

    def _changing(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if self.registry is None else self.registry.changing(name)

    def _opening(self, names: Namespace, publisher: Publisher) -> WriterOpening:
        cache = ByteCache(0, self.metrics)
        return WriterOpening(
            self.store,
            names,
            publisher,
            SegmentStore(self.store, names, cache),
            writer_id=self.store.runtime.ulid(),
            max_parallel_writes=1,
            lease_ttl_s=WriterSettings().lease_ttl_s,
        )

    def _check_nothing_is_left(self, names: Namespace) -> None:
        """A log without any manifest is damage: a fresh namespace would hide its rows.

        Unless another process has just created the namespace, and begun to write.
        """
        if next(iter(self.store.list(names.wal)), None) is None:
            return
        with suppress(NotFoundError):
            HeadFinder(self.store, names).find(dropped=True)
            return
        raise CorruptionError(
            f"namespace {names.name} has a log and no manifest",
            hint=f"Run rebuild: reef rebuild URL {names.name} --apply",
            object=names.manifests,
            offset=0,
        )
