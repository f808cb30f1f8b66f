"""Counters, gauges and histograms.

A histogram has fixed buckets, each twice the one before, from 1 µs (or 1 byte) up, so
that recording is one increment and memory never grows. Quantiles are read off the
bucket bounds: right to within a factor of two, and exact at the ends, which is what an
operator needs to tell 5 ms from 50.
"""

import math
from collections.abc import Callable
from typing import TypeVar

from reef.runtime import leaf_lock

__all__ = ["Counter", "Gauge", "Histogram", "Metrics"]

BUCKETS = 64
M = TypeVar("M", "Counter", "Gauge", "Histogram")


class Counter:
    """A number that only grows."""

    def __init__(self) -> None:
        self._lock = leaf_lock()
        self.value = 0

    def add(self, amount: int = 1) -> None:
        with self._lock:
            self.value += amount

    def to_dict(self) -> dict[str, float]:
        return {"value": self.value}


class Gauge:
    """A number that is set."""

    def __init__(self) -> None:
        self.value = 0.0

    def set(self, value: float) -> None:
        self.value = value

    def to_dict(self) -> dict[str, float]:
        return {"value": self.value}


class Histogram:
    """A distribution of non-negative amounts, in steps of powers of two of `unit`."""

    def __init__(self, unit: float = 1e-6) -> None:
        self._lock = leaf_lock()
        self._unit = unit
        self._buckets = [0] * BUCKETS
        self.count = 0
        self.total = 0.0
        self.smallest = math.inf
        self.largest = 0.0

    def record(self, amount: float) -> None:
        bucket = int(amount / self._unit).bit_length()
        if bucket >= BUCKETS:
            bucket = BUCKETS - 1
        with self._lock:
            self._buckets[bucket] += 1
            self.count += 1
            self.total += amount
            self.smallest = amount if amount < self.smallest else self.smallest
            self.largest = amount if amount > self.largest else self.largest

    def quantile(self, share: float) -> float:
        """Return an upper bound of the smallest amounts that make up `share` of all."""
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"a share lies between 0 and 1, got {share}")
        if self.count == 0:
            return 0.0
        wanted = max(1, math.ceil(share * self.count))
        seen = 0
        for bucket, count in enumerate(self._buckets):
            seen += count
            if seen >= wanted and bucket < BUCKETS - 1:
                bound = self._unit * (1 << bucket)
                return min(max(bound, self.smallest), self.largest)
        return self.largest  # the last bucket has no upper bound

    def to_dict(self) -> dict[str, float]:
        return {
            "count": self.count,
            "total": self.total,
            "p50": self.quantile(0.5),
            "p99": self.quantile(0.99),
            "max": self.largest,
        }


class Metrics:
    """A process's or a handle's metrics, by name; made on first use."""

    def __init__(self) -> None:
        self._lock = leaf_lock()
        self._by_name: dict[str, Counter | Gauge | Histogram] = {}

    # What is there already is found without the lock: most calls are on hot paths.
    def counter(self, name: str) -> Counter:
        found = self._by_name.get(name)
        return found if type(found) is Counter else self._named(name, Counter, Counter)

    def gauge(self, name: str) -> Gauge:
        found = self._by_name.get(name)
        return found if type(found) is Gauge else self._named(name, Gauge, Gauge)

    def histogram(self, name: str, unit: float = 1e-6) -> Histogram:
        found = self._by_name.get(name)
        if type(found) is Histogram:
            return found
        return self._named(name, lambda: Histogram(unit), Histogram)

    def to_dict(self) -> dict[str, dict[str, float]]:
        with self._lock:
            named = sorted(self._by_name.items())
        return {name: metric.to_dict() for name, metric in named}

    def __repr__(self) -> str:
        return f"<Metrics: {', '.join(sorted(tuple(self._by_name)))}>"

    def _named(self, name: str, make: Callable[[], M], kind: type[M]) -> M:
        with self._lock:
            metric = self._by_name.get(name)
            if metric is None:
                metric = self._by_name[name] = make()
        if type(metric) is not kind:
            raise TypeError(f"metric {name} is a {type(metric).__name__}")
        return metric
