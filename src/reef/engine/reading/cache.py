"""A cache bounded in bytes: what was used longest ago goes first.

Only what never changes is kept: decoded groups and tails of segments. "Not found" is never
kept (H9).
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

from reef.runtime import leaf_lock
from reef.telemetry import Metrics

__all__ = ["ByteCache"]

T = TypeVar("T")


class ByteCache:
    """Values by key, with their sizes. Safe for threads."""

    def __init__(self, bytes_max: int, metrics: Metrics | None = None, name: str = "cache") -> None:
        self.bytes_max = bytes_max
        self._lock = leaf_lock()
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        metrics = metrics or Metrics()
        self._hits = metrics.counter(f"{name}.hits")
        self._misses = metrics.counter(f"{name}.misses")
        self._size = metrics.gauge(f"{name}.bytes")
        self.bytes = 0

    def peek(self, key: Hashable) -> Any | None:
        """Return the value, or None where there is none: a hit or a miss all the same."""
        with self._lock:
            found = self._values.get(key)
            if found is not None:
                self._values.move_to_end(key)
        (self._misses if found is None else self._hits).add()
        return None if found is None else found[0]

    def peek_many(self, keys: Sequence[Hashable]) -> list[Any | None]:
        """Return what is here of many keys, None for the others."""
        values, found = self._values, []
        with self._lock:
            for key in keys:
                entry = values.get(key)
                if entry is not None:
                    values.move_to_end(key)
                found.append(None if entry is None else entry[0])
        misses = found.count(None)
        self._misses.add(misses)
        self._hits.add(len(keys) - misses)
        return found

    def get(self, key: Hashable, load: Callable[[], tuple[T, int]]) -> T:
        """Return the value, loading it on a miss; `load` returns it with its size.

        Two threads that miss at once both load: cheaper than making one wait.
        """
        known: T | None = self.peek(key)
        if known is not None:
            return known
        value, size = load()
        self.put(key, value, size)
        return value

    def put(self, key: Hashable, value: object, size: int) -> None:
        self.put_many([(key, value, size)])

    def put_many(self, entries: Iterable[tuple[Hashable, object, int]]) -> None:
        """Keep several values, each with its size, one after the other."""
        with self._lock:
            for key, value, size in entries:
                if size > self.bytes_max or key in self._values:
                    continue
                self._values[key] = (value, size)
                self.bytes += size
                while self.bytes > self.bytes_max:
                    self.bytes -= self._values.popitem(last=False)[1][1]
        self._size.set(self.bytes)
