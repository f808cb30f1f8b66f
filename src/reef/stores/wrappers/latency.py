"""Delays every request as a real bucket would.

Times to first byte follow a log-normal distribution with the given median and 99th
percentile, plus the body's time at the given bandwidth. The profiles are rounded from
public measurements; they are for comparing designs, not for promises.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from reef.stores.base import ObjectInfo, Part, Store, Tagged, WriteResult
from reef.stores.wrappers.base import Wrapper

__all__ = ["PROFILES", "Latency", "LatencyProfile"]

NORMAL = NormalDist()
P99 = NORMAL.inv_cdf(0.99)


@dataclass(frozen=True, slots=True)
class LatencyProfile:
    """Milliseconds to the first byte, as (median, 99th percentile), and bandwidth."""

    read_ms: tuple[float, float]
    write_ms: tuple[float, float]
    list_ms: tuple[float, float]
    bytes_per_s: float

    def delay_s(self, timing: tuple[float, float], size: int, chance: float) -> float:
        """Return the delay at this point of the distribution; `chance` in (0, 1)."""
        median_ms, p99_ms = timing
        spread = math.log(p99_ms / median_ms) / P99
        first_byte_ms = median_ms * math.exp(spread * NORMAL.inv_cdf(chance))
        return first_byte_ms / 1000 + size / self.bytes_per_s


PROFILES: Mapping[str, LatencyProfile] = {
    "s3-standard": LatencyProfile((18, 80), (35, 140), (40, 150), 90e6),
    "s3-express": LatencyProfile((4, 10), (6, 15), (8, 20), 200e6),
    "minio-lan": LatencyProfile((1, 4), (3, 10), (3, 10), 500e6),
}


class Latency(Wrapper):
    """Waits before each request; the waiting is the runtime's, so it can be virtual."""

    def __init__(self, inner: Store, profile: LatencyProfile) -> None:
        super().__init__(inner)
        self.profile = profile

    def get_tagged(self, key: str) -> Tagged:
        found = self.inner.get_tagged(key)
        self._wait(self.profile.read_ms, len(found.body))
        return found

    def get_range(self, key: str, start: int, end: int) -> bytes:
        self._wait(self.profile.read_ms, end - start)
        return self.inner.get_range(key, start, end)

    def head(self, key: str) -> ObjectInfo:
        self._wait(self.profile.read_ms)
        return self.inner.head(key)

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[ObjectInfo]:
        self._wait(self.profile.list_ms)
        for position, info in enumerate(self.inner.list(prefix, start_after)):
            if position and position % self.capabilities.list_page == 0:
                self._wait(self.profile.list_ms)
            yield info

    def put(self, key: str, body: bytes) -> str | None:
        self._wait(self.profile.write_ms, len(body))
        return self.inner.put(key, body)

    def create(self, key: str, body: bytes) -> WriteResult:
        self._wait(self.profile.write_ms, len(body))
        return self.inner.create(key, body)

    def replace(self, key: str, body: bytes, tag: str) -> WriteResult:
        self._wait(self.profile.write_ms, len(body))
        return self.inner.replace(key, body, tag)

    def upload(self, key: str, parts: Iterable[bytes]) -> int:
        size = self.inner.upload(key, parts)
        self._wait(self.profile.write_ms, size)
        return size

    def copy(self, source: str, target: str) -> None:
        self._wait(self.profile.write_ms)
        self.inner.copy(source, target)

    def _compose(self, key: str, parts: Sequence[Part]) -> int:
        size = self.inner.compose(key, parts)
        self._wait(self.profile.write_ms)
        return size

    def delete_many(self, keys: Sequence[str]) -> None:
        for _ in range(0, len(keys), self.capabilities.delete_page):
            self._wait(self.profile.write_ms)
        self.inner.delete_many(keys)

    def _wait(self, timing: tuple[float, float], size: int = 0) -> None:
        chance = self.runtime.uniform(1e-6, 1 - 1e-6)
        self.runtime.sleep(self.profile.delay_s(timing, size, chance))
