"""A cache bounded in bytes: what was used longest ago goes first.

Only what never changes is kept: decoded groups and tails of segments. "Not found" is never
kept (H9).
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from reef.runtime import leaf_lock
from reef.telemetry import Metrics

__all__ = ["ByteCache"]

T = TypeVar("T")


class ByteCache:
    """Values by key, with their sizes. Safe for threads."""

    def __init__(self, bytes_max: int, metrics: Metrics | None = None, name: str = "cache") -> None:
        self._bytes_max = bytes_max
        self._lock = leaf_lock()
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        metrics = metrics or Metrics()
        self._hits = metrics.counter(f"{name}.hits")
        self._misses = metrics.counter(f"{name}.misses")
        self._size = metrics.gauge(f"{name}.bytes")
        self.bytes = 0

    def get(self, key: Hashable, load: Callable[[], tuple[T, int]]) -> T:
        """Return the value, loading it on a miss; `load` returns it with its size.

        Two threads that miss at once both load: cheaper than making one wait.
        """
        with self._lock:
            found = self._values.get(key)
            if found is not None:
                self._values.move_to_end(key)
        if found is not None:
            self._hits.add()
            value: T = found[0]
            return value
        self._misses.add()
        value, size = load()
        self._put(key, value, size)
        return value

    def _put(self, key: Hashable, value: object, size: int) -> None:
        if size > self._bytes_max:
            return
        with self._lock:
            if key in self._values:
                return
            self._values[key] = (value, size)
            self.bytes += size
            while self.bytes > self._bytes_max:
                self.bytes -= self._values.popitem(last=False)[1][1]
        self._size.set(self.bytes)
