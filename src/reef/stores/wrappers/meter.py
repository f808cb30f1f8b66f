"""Counts the requests that reach the store inside, and times the calls that send them.

A request that fails is counted too: it was sent, and it is billed. `requests.<kind>` is
the histogram of seconds: of a get, head, put and copy, which are one request each; of a
delete and of an upload (`requests.upload`), which may be many. Listings go at the pace of
those who read them, so they are counted and not timed; so are `now` and `abort_stale`.

What the S3 client sends again by itself, parts of an upload after a failure, is not seen
here.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from reef.errors import UnavailableError
from reef.stores.base import ObjectInfo, Part, Store, Tagged, WriteResult
from reef.stores.listing import Listing
from reef.stores.wrappers.base import CountedParts, Wrapper
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
        with self._request(RequestKind.GET):
            found = self.inner.get_tagged(key)
        self.meter.count(RequestKind.GET, requests=0, bytes=len(found.body))
        return found

    def get_range(self, key: str, start: int, end: int) -> bytes:
        with self._request(RequestKind.GET):
            body = self.inner.get_range(key, start, end)
        self.meter.count(RequestKind.GET, requests=0, bytes=len(body))
        return body

    def head(self, key: str) -> ObjectInfo:
        with self._request(RequestKind.HEAD):
            return self.inner.head(key)

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[ObjectInfo]:
        try:
            infos = self.inner.list(prefix, start_after)
        except UnavailableError:
            self.meter.count(RequestKind.LIST)  # it was sent, and it is billed
            raise
        # Only the store inside knows what it asks for beyond what it passes on.
        return self._told(infos) if isinstance(infos, Listing) else self._paged(infos)

    def _told(self, infos: Listing) -> Iterator[ObjectInfo]:
        counted = 0
        while True:
            try:
                info = next(infos, None)
            finally:
                self.meter.count(RequestKind.LIST, requests=infos.requests - counted)
                counted = infos.requests
            if info is None:
                return
            yield info

    def _paged(self, infos: Iterator[ObjectInfo]) -> Iterator[ObjectInfo]:
        self.meter.count(RequestKind.LIST)
        page = self.capabilities.list_page
        for position, info in enumerate(infos):
            if position and position % page == 0:
                self.meter.count(RequestKind.LIST)
            yield info

    def put(self, key: str, body: bytes) -> str | None:
        with self._request(RequestKind.PUT, len(body)):
            return self.inner.put(key, body)

    def create(self, key: str, body: bytes) -> WriteResult:
        with self._request(RequestKind.PUT, len(body)):
            return self.inner.create(key, body)

    def replace(self, key: str, body: bytes, tag: str) -> WriteResult:
        with self._request(RequestKind.PUT, len(body)):
            return self.inner.replace(key, body, tag)

    def upload(self, key: str, parts: Iterable[bytes]) -> int:
        """What failed is counted as far as it was read: begin, the parts, and the abort."""
        read = CountedParts(parts)
        try:
            with self._timed("upload"):
                return self.inner.upload(key, read)
        finally:
            requests = _upload_requests(read, self.capabilities.part_bytes)
            self.meter.count(RequestKind.PUT, requests=requests, bytes=read.bytes)

    def copy(self, source: str, target: str) -> None:
        with self._request(RequestKind.COPY):
            self.inner.copy(source, target)

    def _compose(self, key: str, parts: Sequence[Part]) -> int:
        """Only the store inside knows what it copies and what it reads and sends."""
        for kind, (requests, size) in self.inner.compose_cost(parts).items():
            self.meter.count(RequestKind(kind), requests=requests, bytes=size)
        with self._timed("compose"):
            return self.inner.compose(key, parts)

    def delete_many(self, keys: Sequence[str]) -> None:
        requests = -(-len(keys) // self.capabilities.delete_page)
        self.meter.count(RequestKind.DELETE, requests=requests)
        with self._timed("delete"):
            self.inner.delete_many(keys)

    def now(self) -> float:
        self._count_all(self.capabilities.now_requests)
        return self.inner.now()

    def abort_stale(self, older_than_s: float) -> int:
        self._count_all(self.capabilities.abort_stale_requests)
        removed = self.inner.abort_stale(older_than_s)
        if self.capabilities.abort_stale_requests:
            self.meter.count(RequestKind.DELETE, requests=removed)
        return removed

    def _count_all(self, kinds: Sequence[str]) -> None:
        for kind in kinds:
            self.meter.count(RequestKind(kind))

    def _request(self, kind: RequestKind, sent_bytes: int = 0) -> "_Timed":
        self.meter.count(kind, bytes=sent_bytes)
        return _Timed(self, kind)

    def _timed(self, name: str) -> "_Timed":
        return _Timed(self, name)


class _Timed:
    """Records how long what runs inside took. A class and no generator: all requests pass here."""

    __slots__ = ("_meter", "_name", "_start_s")

    def __init__(self, meter: Meter, name: str) -> None:
        self._meter, self._name = meter, name
        self._start_s = meter.runtime.monotonic_s()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        took_s = self._meter.runtime.monotonic_s() - self._start_s
        self._meter.metrics.histogram(f"requests.{self._name}").record(took_s)


def _upload_requests(read: CountedParts, part_bytes: int | None) -> int:
    """What fits one part goes as a plain PUT; a part is sent when there is more after it."""
    if part_bytes is None or read.bytes <= part_bytes:
        return int(read.ended)
    parts = -(-read.bytes // part_bytes) if read.ended else (read.bytes - 1) // part_bytes
    return 2 + parts if read.ended or parts >= 2 else 0
