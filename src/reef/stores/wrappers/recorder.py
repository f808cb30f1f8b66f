"""Writes down every call and its result, in the order of their ends.

For tests that check an order of requests, for replaying a simulation by eye, and for
finding out what a slow operation really asks of the bucket.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from reef.stores.base import ObjectInfo, Part, Store, Tagged, WriteResult
from reef.stores.wrappers.base import Wrapper

__all__ = ["Call", "Recorder"]

T = TypeVar("T")
CALLS_MAX = 100_000


@dataclass(frozen=True, slots=True)
class Call:
    """One call on the store inside."""

    method: str
    key: str
    result: str
    start_s: float
    end_s: float

    def __str__(self) -> str:
        return f"{self.start_s:12.6f} {self.method:<10} {self.key:<60} {self.result}"


class Recorder(Wrapper):
    """Keeps the last `calls_max` calls."""

    def __init__(self, inner: Store, calls_max: int = CALLS_MAX) -> None:
        super().__init__(inner)
        self.calls: deque[Call] = deque(maxlen=calls_max)

    def get_tagged(self, key: str) -> Tagged:
        return self._record("get", key, lambda: self.inner.get_tagged(key))

    def get_range(self, key: str, start: int, end: int) -> bytes:
        return self._record("get_range", key, lambda: self.inner.get_range(key, start, end))

    def head(self, key: str) -> ObjectInfo:
        return self._record("head", key, lambda: self.inner.head(key))

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[ObjectInfo]:
        infos = self._record("list", prefix, lambda: list(self.inner.list(prefix, start_after)))
        return iter(infos)

    def put(self, key: str, body: bytes) -> str | None:
        return self._record("put", key, lambda: self.inner.put(key, body))

    def create(self, key: str, body: bytes) -> WriteResult:
        return self._record("create", key, lambda: self.inner.create(key, body))

    def replace(self, key: str, body: bytes, tag: str) -> WriteResult:
        return self._record("replace", key, lambda: self.inner.replace(key, body, tag))

    def upload(self, key: str, parts: Iterable[bytes]) -> int:
        return self._record("upload", key, lambda: self.inner.upload(key, parts))

    def copy(self, source: str, target: str) -> None:
        self._record("copy", target, lambda: self.inner.copy(source, target))

    def _compose(self, key: str, parts: Sequence[Part]) -> int:
        return self._record("compose", key, lambda: self.inner.compose(key, parts))

    def delete_many(self, keys: Sequence[str]) -> None:
        self._record("delete", " ".join(keys), lambda: self.inner.delete_many(keys))

    def now(self) -> float:
        return self._record("now", "", self.inner.now)

    def abort_stale(self, older_than_s: float) -> int:
        return self._record("abort_stale", "", lambda: self.inner.abort_stale(older_than_s))

    def _record(self, method: str, key: str, call: Callable[[], T]) -> T:
        start_s = self.runtime.monotonic_s()
        summary = "died"
        try:
            result = call()
            summary = _summary(result)
            return result
        except Exception as error:
            summary = type(error).__name__
            raise
        finally:
            self.calls.append(Call(method, key, summary, start_s, self.runtime.monotonic_s()))


def _summary(result: object) -> str:
    match result:
        case WriteResult():
            return result.outcome.value
        case Tagged():
            return f"{len(result.body)} bytes"
        case bytes():
            return f"{len(result)} bytes"
        case list():
            return f"{len(result)} objects"
        case _:
            return "done"
