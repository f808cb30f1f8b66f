"""Holds requests and bytes to a rate, so that background work leaves room for serving.

Every request takes its share of a budget that fills at a steady rate, and waits until the
budget has it. A burst of one second is free; after that the rate holds, whatever the number of
threads. While it is paused every request waits: work stops in the middle, where it stands, and
goes on from there. Once it is ended, every request is refused with `PaceEnded` before it is
sent: whoever works through it is interrupted there, as by a death. What goes to another
process is the store inside: a rate is one process's own.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from reef.runtime import Condition, Runtime
from reef.stores.base import ObjectInfo, Part, Store, Tagged, WriteResult
from reef.stores.wrappers.base import Wrapper

__all__ = ["Pace", "PaceEnded", "Paced"]

SOON_S = 1e-6
"""Not worth waiting for; and clocks do not always move by less."""
LOOK_S = 1.0
"""How often a paused request looks whether it may go on, should a wake-up be missed."""


class PaceEnded(Exception):
    """No request is let through any more. No error of the store's: nobody should retry it."""


class Pace:
    """A budget of requests and bytes; 0 means no limit."""

    def __init__(self, runtime: Runtime, requests_per_s: float, bytes_per_s: float) -> None:
        self._runtime = runtime
        self._requests = _Bucket(requests_per_s)
        self._bytes = _Bucket(bytes_per_s)
        self._turn: Condition = runtime.condition()
        self._paused = False
        self._ended = False

    def take(self, size: int = 0, requests: int = 1) -> None:
        """Return when the budget has room for a request of so many bytes."""
        with self._turn:
            self._hold()
            now_s = self._runtime.monotonic_s()
            wait_s = max(self._requests.reserve(requests, now_s), self._bytes.reserve(size, now_s))
            while (left_s := now_s + wait_s - self._runtime.monotonic_s()) > SOON_S:
                self._turn.wait(left_s)
                self._hold()

    def _hold(self) -> None:
        """Wait while it is paused; PaceEnded when nothing goes through any more."""
        while self._paused and not self._ended:
            self._turn.wait(LOOK_S)
        if self._ended:
            raise PaceEnded

    def pause(self) -> None:
        """Let nothing more through."""
        with self._turn:
            self._paused = True

    def resume(self) -> None:
        """Go on where it was left."""
        with self._turn:
            self._paused = False
            self._turn.notify_all()

    def end(self) -> None:
        """Refuse every request from now on, those that wait included."""
        with self._turn:
            self._ended = True
            self._turn.notify_all()

    def end_soon(self) -> None:
        """The same without a lock: for the garbage collector, which may strike while it is held."""
        self._ended = True

    @property
    def is_paused(self) -> bool:
        return self._paused


class _Bucket:
    """When the next one may go, if each takes its share of a second."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._free_s = -math.inf
        """When all that was reserved is used up."""

    def reserve(self, amount: float, now_s: float) -> float:
        """Return how long to wait for this amount; at most a second's worth is saved up."""
        if self._per_s <= 0 or amount <= 0:
            return 0.0
        start_s = max(self._free_s, now_s - 1.0)
        self._free_s = start_s + amount / self._per_s
        return max(0.0, self._free_s - now_s)


class Paced(Wrapper):
    """Asks a `Pace` before each request."""

    def __init__(self, inner: Store, pace: Pace) -> None:
        super().__init__(inner)
        self.pace = pace

    def get_tagged(self, key: str) -> Tagged:
        self.pace.take()
        found = self.inner.get_tagged(key)
        self.pace.take(len(found.body), requests=0)
        return found

    def get_range(self, key: str, start: int, end: int) -> bytes:
        self.pace.take(end - start)
        return self.inner.get_range(key, start, end)

    def head(self, key: str) -> ObjectInfo:
        self.pace.take()
        return self.inner.head(key)

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[ObjectInfo]:
        self.pace.take()
        for position, info in enumerate(self.inner.list(prefix, start_after)):
            if position and position % self.capabilities.list_page == 0:
                self.pace.take()
            yield info

    def put(self, key: str, body: bytes) -> str | None:
        self.pace.take(len(body))
        return self.inner.put(key, body)

    def create(self, key: str, body: bytes) -> WriteResult:
        self.pace.take(len(body))
        return self.inner.create(key, body)

    def replace(self, key: str, body: bytes, tag: str) -> WriteResult:
        self.pace.take(len(body))
        return self.inner.replace(key, body, tag)

    def upload(self, key: str, parts: Iterable[bytes]) -> int:
        self.pace.take()
        return self.inner.upload(key, self._paced(parts))

    def copy(self, source: str, target: str) -> None:
        self.pace.take()
        self.inner.copy(source, target)

    def _compose(self, key: str, parts: Sequence[Part]) -> int:
        self.pace.take(requests=len(parts))
        return self.inner.compose(key, parts)

    def delete_many(self, keys: Sequence[str]) -> None:
        self.pace.take(requests=-(-len(keys) // self.capabilities.delete_page))
        self.inner.delete_many(keys)

    def __reduce__(self) -> tuple[Any, ...]:
        return _inner, (self.inner,)

    def _paced(self, parts: Iterable[bytes]) -> Iterator[bytes]:
        for part in parts:
            self.pace.take(len(part), requests=0)
            yield part


def _inner(store: Store) -> Store:
    return store
