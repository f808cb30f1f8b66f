"""The context of one namespace: its store, its names, and the parts that are built from them.

Every operation on a namespace needs some of the same five parts. They are built here, once per
context and only when used; a context costs no request by itself.

    heads       finds the newest manifest, and remembers it
    publisher   publishes manifests through the same `heads`
    log         reads and fills slots
    segments    reads segments, through a cache of the given size
    metrics     of the database that the context belongs to

A context is bound to one incarnation of the name (protocols §8). Pickled into a task, it is rebuilt
from the store and the names: remembered heads and caches stay behind.
"""

from functools import cached_property
from typing import Any, Self

from reef.engine.log.log import Log
from reef.engine.read.caches import ByteCache
from reef.engine.read.segments import SegmentStore
from reef.manifest.head import HeadFinder, Publisher, locate
from reef.paths import Namespace
from reef.runtime import Runtime
from reef.stores import Store
from reef.telemetry import Metrics


class NamespaceContext:
    """One incarnation of a namespace in one bucket."""

    def __init__(
        self,
        store: Store,
        names: Namespace,
        *,
        metrics: Metrics | None = None,
        heads: HeadFinder | None = None,
    ) -> None:
        self.store = store
        self.names = names
        self.metrics = metrics or Metrics()
        if heads is not None:
            self.heads = heads

    @classmethod
    def locate(
        cls,
        store: Store,
        name: str,
        *,
        fallback: bool = False,
        dropped: bool = False,
        metrics: Metrics | None = None,
    ) -> Self:
        """Return the context of the newest incarnation, whose head has just been read."""
        heads = locate(store, name, fallback=fallback, dropped=dropped)
        return cls(store, heads.names, metrics=metrics, heads=heads)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.store, self.names)

    def __repr__(self) -> str:
        return f"<NamespaceContext {self.names.name} in {self.store.url}>"

    @property
    def runtime(self) -> Runtime:
        return self.store.runtime

    @cached_property
    def heads(self) -> HeadFinder:
        return HeadFinder(self.store, self.names)

    @cached_property
    def publisher(self) -> Publisher:
        return Publisher(self.store, self.names, metrics=self.metrics, heads=self.heads)

    @cached_property
    def log(self) -> Log:
        return Log(self.store, self.names)

    def segments(self, cache: ByteCache | int = 0) -> SegmentStore:
        """Return a reader of segments with a cache, or with a new one of so many bytes."""
        if isinstance(cache, int):
            cache = ByteCache(cache, self.metrics) if cache else ByteCache(0)
        return SegmentStore(self.store, self.names, cache)

    def fresh(self) -> Self:
        """Return the same context without a remembered head."""
        return type(self)(self.store, self.names, metrics=self.metrics)

    def at(self, incarnation: int) -> Self:
        """Return the context of another incarnation of the name."""
        return type(self)(self.store, self.names.at(incarnation), metrics=self.metrics)
