"""Finds the rate that a throttled prefix takes, and keeps to it.

Services limit requests by prefix, reads and writes apart (S3: some 5,500 and 3,500 a second), and
some by object (GCS: about one write a second); past that they answer 503 SlowDown or 429. Sending
again at random only keeps the service busy with refusing. So the first such answer opens a lane
for the folder of its key, and requests in a lane go at a rate:

    rate
     |          refused                    .'     grows slowly near the rate that was refused
     |    .'|       __..---''''''''---..'`        last, fast away from it (a cubic curve): most
     |   /  |   .-'                               of the time goes by just below the limit
     |  /   | .'
     | /    |/  cut to 80 %
     +------------------------------------ time

At first nothing is known, and the rate doubles until it is refused. A refusal counts once: those
that were sent before the cut say nothing about the rate after it. A minute without a refusal
closes the lane. While there is none, a request costs the look at an empty dict.

Nobody waits for long: a turn that is further away than `wait_max_s` is not waited for, and the
request fails as throttled without having been sent. Other processes have lanes of their own; a
copy that travels starts without any.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from reef import paths
from reef.errors import Kind, UnavailableError
from reef.runtime import leaf_lock
from reef.stores.base import ObjectInfo, Part, Store, Tagged, WriteResult
from reef.stores.wrappers.base import Wrapper

__all__ = ["Throttle"]

T = TypeVar("T")
START_PER_S = 10.0
DOUBLING_S = 0.5
CUT = 0.8
STEEPNESS = 0.4
"""Of the cubic curve: one more request a second after some 1.4 s, 50 more after 5 s."""
RATE_MIN_PER_S = 0.2
BURST_S = 0.05
"""Turns that were not taken are kept this long: threads do not come on the dot."""
MEASURED_S = 1.0
CUT_GAP_S = 0.5
FORGET_S = 60.0
WAIT_MAX_S = 10.0


class _Lane:
    """The rate of one kind of request to one folder."""

    def __init__(self, now_s: float) -> None:
        self._lock = leaf_lock()
        self._began_s = self._cut_s = now_s
        self._peak: float | None = None
        """The rate that was refused last; None while nothing but a refusal is known."""
        self._free_s = now_s
        self._window_s, self._in_window, self._seen_per_s = now_s, 0, 0.0

    def take(self, now_s: float, wait_max_s: float) -> float | None:
        """Return how long to wait for a turn; None if that is too long, and none is taken."""
        with self._lock:
            start_s = max(self._free_s, now_s - BURST_S)
            wait_s = max(0.0, start_s - now_s)
            if wait_s > wait_max_s:
                return None
            self._free_s = start_s + 1.0 / self._rate(now_s)
            self._measure(now_s + wait_s)
            return wait_s

    def refused(self, sent_s: float, now_s: float) -> bool:
        """Cut the rate, unless the request was sent at a rate that was cut since."""
        with self._lock:
            if sent_s < self._cut_s + (CUT_GAP_S if self._peak is not None else 0.0):
                return False
            used = max(self._seen_per_s, self._in_window / MEASURED_S)
            self._peak = max(min(self._rate(now_s), used), RATE_MIN_PER_S)
            self._cut_s = now_s
            self._free_s = max(self._free_s, now_s + 1.0 / self._rate(now_s))
            return True

    def rate(self, now_s: float) -> float:
        with self._lock:
            return self._rate(now_s)

    def is_over(self, now_s: float) -> bool:
        return now_s - self._cut_s > FORGET_S

    def _rate(self, now_s: float) -> float:
        if self._peak is None:
            doublings = min((now_s - self._began_s) / DOUBLING_S, 60.0)
            return START_PER_S * math.exp2(doublings)
        back_s: float = math.cbrt(self._peak * (1.0 - CUT) / STEEPNESS)
        rate = STEEPNESS * (now_s - self._cut_s - back_s) ** 3 + self._peak
        return max(rate, RATE_MIN_PER_S)

    def _measure(self, now_s: float) -> None:
        """Count what really goes out: a rate that nobody uses grows without being tried."""
        if now_s - self._window_s >= MEASURED_S:
            self._seen_per_s = self._in_window / (now_s - self._window_s)
            self._window_s, self._in_window = now_s, 0
        self._in_window += 1


class Throttle(Wrapper):
    """Every store that `reef.stores.open` returns has one, inside of the retries."""

    def __init__(self, inner: Store, *, wait_max_s: float = WAIT_MAX_S) -> None:
        super().__init__(inner)
        self.wait_max_s = wait_max_s
        self._lock = leaf_lock()
        self._lanes: dict[tuple[str, str], _Lane] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.inner, self.wait_max_s)

    def rates(self) -> dict[tuple[str, str], float]:
        """Return requests per second by kind (read, write) and folder, where they are limited."""
        now_s = self.runtime.monotonic_s()
        return {name: lane.rate(now_s) for name, lane in list(self._lanes.items())}

    # --- requests -----------------------------------------------------------------
    def get_tagged(self, key: str) -> Tagged:
        return self._send("read", key, lambda: self.inner.get_tagged(key))

    def get_range(self, key: str, start: int, end: int) -> bytes:
        return self._send("read", key, lambda: self.inner.get_range(key, start, end))

    def head(self, key: str) -> ObjectInfo:
        return self._send("read", key, lambda: self.inner.head(key))

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[ObjectInfo]:
        """The first page takes a turn; a refusal of any page counts."""
        infos = self._send("read", prefix, lambda: self.inner.list(prefix, start_after))
        while True:
            info = self._send_now("read", prefix, lambda: next(infos, None))
            if info is None:
                return
            yield info

    def put(self, key: str, body: bytes) -> str | None:
        return self._send("write", key, lambda: self.inner.put(key, body))

    def create(self, key: str, body: bytes) -> WriteResult:
        return self._send("write", key, lambda: self.inner.create(key, body))

    def replace(self, key: str, body: bytes, tag: str) -> WriteResult:
        return self._send("write", key, lambda: self.inner.replace(key, body, tag))

    def upload(self, key: str, parts: Iterable[bytes]) -> int:
        return self._send("write", key, lambda: self.inner.upload(key, parts))

    def copy(self, source: str, target: str) -> None:
        self._send("write", target, lambda: self.inner.copy(source, target))

    def _compose(self, key: str, parts: Sequence[Part]) -> int:
        return self._send("write", key, lambda: self.inner.compose(key, parts))

    def delete_many(self, keys: Sequence[str]) -> None:
        self._send("write", keys[0] if keys else "", lambda: self.inner.delete_many(keys))

    def now(self) -> float:
        """Buckets tell the time by writing one object: the hottest there is."""
        if not self.capabilities.now_requests:
            return self.inner.now()
        return self._send("write", paths.clock(), self.inner.now)

    def abort_stale(self, older_than_s: float) -> int:
        if not self.capabilities.abort_stale_requests:
            return self.inner.abort_stale(older_than_s)
        return self._send("write", paths.clock(), lambda: self.inner.abort_stale(older_than_s))

    # --- lanes --------------------------------------------------------------------
    def _send(self, kind: str, key: str, call: Callable[[], T]) -> T:
        if self._lanes:
            self._wait(kind, key)
        return self._send_now(kind, key, call)

    def _send_now(self, kind: str, key: str, call: Callable[[], T]) -> T:
        sent_s = self.runtime.monotonic_s() if self._lanes else -math.inf
        try:
            result = call()
        except UnavailableError as error:
            if error.kind is Kind.THROTTLED:
                self._refused(kind, key, sent_s)
            raise
        if isinstance(result, WriteResult) and _is_throttled(result.cause):
            self._refused(kind, key, sent_s)
        return result

    def _wait(self, kind: str, key: str) -> None:
        name = (kind, _folder(key))
        lane = self._lanes.get(name)
        if lane is None:
            return
        now_s = self.runtime.monotonic_s()
        if lane.is_over(now_s):
            with self._lock:
                self._lanes.pop(name, None)
            return
        wait_s = lane.take(now_s, self.wait_max_s)
        if wait_s is None:
            raise UnavailableError(
                f"{self.url} throttles {kind}s below {name[1] or '/'}: it takes about "
                f"{lane.rate(now_s):.1f} a second, and more are waiting than fit into "
                f"{self.wait_max_s:g} s; this one was not sent",
                kind=Kind.THROTTLED,
                hint="Send less at once, or spread the load over namespaces",
                object=key,
            )
        if wait_s > 0.0:
            self.runtime.sleep(wait_s)

    def _refused(self, kind: str, key: str, sent_s: float) -> None:
        now_s = self.runtime.monotonic_s()
        name = (kind, _folder(key))
        with self._lock:
            lane = self._lanes.get(name)
            if lane is None:
                self._lanes[name] = _Lane(now_s)
                return
        lane.refused(sent_s, now_s)


def _is_throttled(cause: Exception | None) -> bool:
    return isinstance(cause, UnavailableError) and cause.kind is Kind.THROTTLED


def _folder(key: str) -> str:
    return key.rpartition("/")[0]


def _reopen(inner: Store, wait_max_s: float) -> Throttle:
    return Throttle(inner, wait_max_s=wait_max_s)
