"""Counts the requests that reach the store inside, and times them.

A request that fails is counted too: it was sent, and it is billed. `requests.<kind>` is
the histogram of seconds for each kind of request.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from reef.stores.base import ObjectInfo, Store, Tagged, WriteResult
from reef.stores.wrappers.base import Wrapper
from reef.telemetry import Metrics, RequestKind, RequestMeter

__all__ = ["Meter"]


class Meter(Wrapper):
    """Every store that `reef.stores.open` returns has one."""

    def __init__(
        self, inner: Store, meter: RequestMeter | None = None, metrics: Metrics | None = None
    ) -> None:
        super().__init__(inner)
        self.meter = meter or RequestMeter()
        self.metrics = metrics or Metrics()

    def __reduce__(self) -> tuple[Any, ...]:
        return Meter, (self.inner,)  # a copy in another process counts its own requests

    def get_tagged(self, key: str) -> Tagged:
        with self._timed(RequestKind.GET):
            found = self.inner.get_tagged(key)
        self.meter.count(RequestKind.GET, requests=0, bytes=len(found.body))
        return found

    def get_range(self, key: str, start: int, end: int) -> bytes:
        with self._timed(RequestKind.GET):
            body = self.inner.get_range(key, start, end)
        self.meter.count(RequestKind.GET, requests=0, bytes=len(body))
        return body

    def head(self, key: str) -> ObjectInfo:
        with self._timed(RequestKind.HEAD):
            return self.inner.head(key)

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[ObjectInfo]:
        self.meter.count(RequestKind.LIST)
        page = self.capabilities.list_page
        for position, info in enumerate(self.inner.list(prefix, start_after)):
            if position and position % page == 0:
                self.meter.count(RequestKind.LIST)
            yield info

    def put(self, key: str, body: bytes) -> str | None:
        with self._timed(RequestKind.PUT, len(body)):
            return self.inner.put(key, body)

    def create(self, key: str, body: bytes) -> WriteResult:
        with self._timed(RequestKind.PUT, len(body)):
            return self.inner.create(key, body)

    def replace(self, key: str, body: bytes, tag: str) -> WriteResult:
        with self._timed(RequestKind.PUT, len(body)):
            return self.inner.replace(key, body, tag)

    def upload(self, key: str, parts: Iterable[bytes]) -> int:
        size = self.inner.upload(key, parts)
        part = self.capabilities.part_bytes
        # begin, each part, complete; what fits one part goes as a plain PUT
        requests = 1 if part is None or size <= part else 2 + -(-size // part)
        self.meter.count(RequestKind.PUT, requests=requests, bytes=size)
        return size

    def copy(self, source: str, target: str) -> None:
        with self._timed(RequestKind.COPY):
            self.inner.copy(source, target)

    def delete_many(self, keys: Sequence[str]) -> None:
        requests = -(-len(keys) // self.capabilities.delete_page)
        self.meter.count(RequestKind.DELETE, requests=requests)
        self.inner.delete_many(keys)

    @contextmanager
    def _timed(self, kind: RequestKind, sent_bytes: int = 0) -> Iterator[None]:
        self.meter.count(kind, bytes=sent_bytes)
        start_s = self.runtime.monotonic_s()
        try:
            yield
        finally:
            self.metrics.histogram(f"requests.{kind}").record(self.runtime.monotonic_s() - start_s)
