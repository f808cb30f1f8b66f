"""Stores around stores: `Wrapper` forwards each call, `Hooked` sends each call as a `StoreRequest`.

A policy is a `Hooked` store that overrides one function:

    class Retry(Hooked):
        def around(self, request, send):      # send(request) continues to the store inside
            ...

Policies nest as stores do, and still cost one call each. The store methods run only on the
outermost policy; from there a request passes from `around` to `around`, skipping the policies that
do not handle its operation:

    ReadBack(Retry(Throttle(Meter(bucket)))).create(key, body)

        ReadBack.create                       builds the Request
        ReadBack.around -> Throttle.around -> Meter.around -> bucket.create

`list` is a stream, whose requests are sent while it is consumed. It has a hook of its own,
`around_list`, which takes and returns an iterator.

`Meter` is the innermost policy. It counts the requests that reach the store inside, and times the
calls that send them. A request that fails is counted too: it was sent, and it is billed.
`requests.<kind>` is the histogram of seconds: of a get, head, put and copy, which are one request
each; of a delete and of an upload (`requests.upload`), which may be several. A listing is as slow
as its consumer, so it is counted and not timed; so are `now` and `abort_stale`. Retries inside the
S3 client, of the parts of an upload, are not counted.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import Any

import msgspec

from reef.errors import UnavailableError
from reef.stores.base import (
    COALESCE_GAP_BYTES,
    Listing,
    ObjectInfo,
    Part,
    Store,
    Tagged,
    WriteResult,
    coalesce,
)
from reef.telemetry import Metrics, RequestKind, RequestMeter


class Wrapper(Store):
    """A store that forwards every call; a subclass overrides the methods that it changes.

    `get`, `get_ranges` and `delete` are composed of the other methods, so overriding those is
    enough.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.url = inner.url
        self.capabilities = inner.capabilities
        self.runtime = inner.runtime

    @property
    def cas(self) -> str:
        return self.inner.cas

    def get_tagged(self, key: str) -> Tagged:
        return self.inner.get_tagged(key)

    def get_range(self, key: str, start: int, end: int) -> bytes:
        return self.inner.get_range(key, start, end)

    def head(self, key: str) -> ObjectInfo:
        return self.inner.head(key)

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[ObjectInfo]:
        return self.inner.list(prefix, start_after)

    def put(self, key: str, body: bytes) -> str | None:
        return self.inner.put(key, body)

    def create(self, key: str, body: bytes) -> WriteResult:
        return self.inner.create(key, body)

    def replace(self, key: str, body: bytes, tag: str) -> WriteResult:
        return self.inner.replace(key, body, tag)

    def upload(self, key: str, parts: Iterable[bytes]) -> int:
        return self.inner.upload(key, parts)

    def copy(self, source: str, target: str) -> None:
        self.inner.copy(source, target)

    def compose(self, key: str, parts: Sequence[Part]) -> int:
        """Compose in the store if it can; otherwise read the parts and upload them."""
        if not self.capabilities.compose:
            return super().compose(key, parts)
        return self._compose(key, parts)

    def _compose(self, key: str, parts: Sequence[Part]) -> int:
        """Override this method: it is called only if the inner store can compose."""
        return self.inner.compose(key, parts)

    def compose_cost(self, parts: Sequence[Part]) -> Mapping[str, tuple[int, int]]:
        return self.inner.compose_cost(parts)

    def forget(self, key: str, ranges: Iterable[tuple[int, int]]) -> None:
        """Forget coalesced ranges too: `get_ranges` requests them in that form."""
        each = list(ranges)
        self.inner.forget(key, {*each, *coalesce(each, COALESCE_GAP_BYTES)})

    def delete_many(self, keys: Sequence[str]) -> None:
        self.inner.delete_many(keys)

    def now(self) -> float:
        return self.inner.now()

    def abort_stale(self, older_than_s: float) -> int:
        return self.inner.abort_stale(older_than_s)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.inner!r}>"


# --- requests -----------------------------------------------------------------------


class Operation(StrEnum):
    """The store methods that send requests; fault rules and recordings use the same names."""

    GET = "get"
    GET_RANGE = "get_range"
    GET_RANGES = "get_ranges"
    HEAD = "head"
    LIST = "list"
    PUT = "put"
    CREATE = "create"
    REPLACE = "replace"
    UPLOAD = "upload"
    COPY = "copy"
    COMPOSE = "compose"
    DELETE = "delete"
    NOW = "now"
    ABORT_STALE = "abort_stale"

    __hash__ = str.__hash__  # an Enum's own is Python code, which every dict lookup would run

    @property
    def is_conditional(self) -> bool:
        """Whether the response is a `WriteResult`, which can be unknown."""
        return self in CONDITIONAL

    @property
    def is_idempotent(self) -> bool:
        """Whether it can be sent again after a lost response.

        A conditional write would find its own object; an upload has consumed its parts.
        """
        return self not in CONDITIONAL and self is not Operation.UPLOAD


GET, GET_RANGE, HEAD = Operation.GET, Operation.GET_RANGE, Operation.HEAD
GET_RANGES = Operation.GET_RANGES
LIST, PUT, CREATE = Operation.LIST, Operation.PUT, Operation.CREATE
READS = frozenset({GET, GET_RANGE, GET_RANGES, HEAD, LIST})
CONDITIONAL = frozenset({CREATE, Operation.REPLACE})


class StoreRequest(msgspec.Struct, frozen=True, gc=False):
    """One call of a store method. Fields that an operation does not have are empty."""

    operation: Operation
    key: str = ""
    """Prefix of a listing, target of a copy, first of `keys` of a deletion."""
    body: bytes = b""
    start: int = 0
    end: int = 0
    ranges: Sequence[tuple[int, int]] = ()
    tag: str = ""
    start_after: str = ""
    source: str = ""
    keys: Sequence[str] = ()
    parts: Iterable[bytes] = ()
    """Parts of an upload; read once."""
    pieces: Sequence[Part] = ()
    """Pieces of an object to be composed."""
    older_than_s: float = 0.0

    def with_parts(self, parts: Iterable[bytes]) -> "StoreRequest":
        """Return the same upload, reading other parts."""
        return msgspec.structs.replace(self, parts=parts)

    def after(self, key: str) -> "StoreRequest":
        """Return the same listing, from the key after `key`."""
        return msgspec.structs.replace(self, start_after=key)


Send = Callable[[StoreRequest], Any]
"""Sends a request to the store inside; returns or raises as its method does."""


class Hooked(Wrapper):
    """A wrapper whose requests all pass through `around`."""

    passes_ranges = False
    """Whether `around` handles GET_RANGES, which only stores with `many_ranges` receive."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._sends = self._link()

    def around(self, request: StoreRequest, send: Send) -> Any:
        """Send a request, or not, or several times; return the response."""
        return send(request)

    def around_list(self, request: StoreRequest, send: Send) -> Iterator[ObjectInfo]:
        """Return a listing; `send(request)` returns that of the store inside."""
        infos: Iterator[ObjectInfo] = send(request)
        return infos

    def handles(self, operation: Operation) -> bool:
        """Whether this policy sees the operation; the others bypass it at no cost.

        Called once for each operation, by `Hooked.__init__`.
        """
        return True

    # --- store methods --------------------------------------------------------------
    def get_tagged(self, key: str) -> Tagged:
        found: Tagged = self._sends[GET](StoreRequest(GET, key))
        return found

    def get_range(self, key: str, start: int, end: int) -> bytes:
        body: bytes = self._sends[GET_RANGE](StoreRequest(GET_RANGE, key, b"", start, end))
        return body

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        if not self.passes_ranges or not self.capabilities.many_ranges:
            return super().get_ranges(key, ranges)
        bodies: list[bytes] = self._sends[GET_RANGES](StoreRequest(GET_RANGES, key, ranges=ranges))
        return bodies

    def head(self, key: str) -> ObjectInfo:
        info: ObjectInfo = self._sends[HEAD](StoreRequest(HEAD, key))
        return info

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[ObjectInfo]:
        infos: Iterator[ObjectInfo] = self._sends[LIST](
            StoreRequest(LIST, prefix, start_after=start_after)
        )
        return infos

    def put(self, key: str, body: bytes) -> str | None:
        tag: str | None = self._sends[PUT](StoreRequest(PUT, key, body))
        return tag

    def create(self, key: str, body: bytes) -> WriteResult:
        result: WriteResult = self._sends[CREATE](StoreRequest(CREATE, key, body))
        return result

    def replace(self, key: str, body: bytes, tag: str) -> WriteResult:
        request = StoreRequest(Operation.REPLACE, key, body, tag=tag)
        result: WriteResult = self._sends[Operation.REPLACE](request)
        return result

    def upload(self, key: str, parts: Iterable[bytes]) -> int:
        request = StoreRequest(Operation.UPLOAD, key, parts=parts)
        size: int = self._sends[Operation.UPLOAD](request)
        return size

    def copy(self, source: str, target: str) -> None:
        self._sends[Operation.COPY](StoreRequest(Operation.COPY, target, source=source))

    def _compose(self, key: str, parts: Sequence[Part]) -> int:
        request = StoreRequest(Operation.COMPOSE, key, pieces=parts)
        size: int = self._sends[Operation.COMPOSE](request)
        return size

    def delete_many(self, keys: Sequence[str]) -> None:
        first = keys[0] if keys else ""
        self._sends[Operation.DELETE](StoreRequest(Operation.DELETE, first, keys=keys))

    def now(self) -> float:
        now_s: float = self._sends[Operation.NOW](StoreRequest(Operation.NOW))
        return now_s

    def abort_stale(self, older_than_s: float) -> int:
        request = StoreRequest(Operation.ABORT_STALE, older_than_s=older_than_s)
        removed: int = self._sends[Operation.ABORT_STALE](request)
        return removed

    # --- the chain of hooks -----------------------------------------------------------
    def _link(self) -> dict[Operation, Send]:
        """Return the route of each operation: through this policy, then those inside it."""
        sends = {operation: _sending_to(self.inner, operation) for operation in Operation}
        for operation, send in sends.items():
            if self.handles(operation):
                hook = self.around_list if operation is LIST else self.around
                sends[operation] = partial(hook, send=send)
        return sends

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_sends"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._sends = self._link()


METHODS: Mapping[Operation, str] = {
    **{operation: operation.value for operation in Operation},
    GET: "get_tagged",
    Operation.COMPOSE: "_compose",
    Operation.DELETE: "delete_many",
}
CALLS: Mapping[Operation, Callable[[Store, StoreRequest], Any]] = {
    GET: lambda store, r: store.get_tagged(r.key),
    GET_RANGE: lambda store, r: store.get_range(r.key, r.start, r.end),
    GET_RANGES: lambda store, r: store.get_ranges(r.key, r.ranges),
    HEAD: lambda store, r: store.head(r.key),
    LIST: lambda store, r: store.list(r.key, r.start_after),
    PUT: lambda store, r: store.put(r.key, r.body),
    CREATE: lambda store, r: store.create(r.key, r.body),
    Operation.REPLACE: lambda store, r: store.replace(r.key, r.body, r.tag),
    Operation.UPLOAD: lambda store, r: store.upload(r.key, r.parts),
    Operation.COPY: lambda store, r: store.copy(r.source, r.key),
    Operation.COMPOSE: lambda store, r: store.compose(r.key, r.pieces),
    Operation.DELETE: lambda store, r: store.delete_many(r.keys),
    Operation.NOW: lambda store, r: store.now(),
    Operation.ABORT_STALE: lambda store, r: store.abort_stale(r.older_than_s),
}


def _sending_to(store: Store, operation: Operation) -> Send:
    """Return the hooks of a policy directly; of any other store, a call of its method."""
    method = METHODS[operation]
    if operation is GET_RANGES and not getattr(store, "passes_ranges", False):
        return partial(CALLS[operation], store)
    if isinstance(store, Hooked) and getattr(type(store), method) is getattr(Hooked, method):
        return store._sends[operation]
    return partial(CALLS[operation], store)


class CountedParts:
    """The parts of an upload, counting the bytes that were read and whether all were."""

    def __init__(self, parts: Iterable[bytes]) -> None:
        self._parts = parts
        self.bytes = 0
        self.ended = False

    def __iter__(self) -> Iterator[bytes]:
        for part in self._parts:
            self.bytes += len(part)
            yield part
        self.ended = True


# --- the meter --------------------------------------------------------------------


class Meter(Hooked):
    """Every store that `reef.stores.open` returns has one."""

    passes_ranges = True

    def __init__(
        self, inner: Store, meter: RequestMeter | None = None, metrics: Metrics | None = None
    ) -> None:
        super().__init__(inner)
        self.meter = meter or RequestMeter()
        self.metrics = metrics or Metrics()

    def __reduce__(self) -> tuple[Any, ...]:
        return Meter, (self.inner,)  # a copy in another process counts its own requests

    def around(self, request: StoreRequest, send: Send) -> Any:
        kind = SINGLE.get(request.operation)
        if kind is None:
            return MULTIPLE[request.operation](self, request, send)
        size, start_s = len(request.body), self.runtime.monotonic_s()
        try:
            response = send(request)
            if kind is GET_KIND:
                size = _bytes_of(request.operation, response)
        finally:
            took_s = self.runtime.monotonic_s() - start_s
            self.meter.count(kind, bytes=size)
            self.metrics.histogram(HISTOGRAMS[kind]).record(took_s)
        return response

    def around_list(self, request: StoreRequest, send: Send) -> Iterator[ObjectInfo]:
        try:
            infos = send(request)
        except UnavailableError:
            self.meter.count(RequestKind.LIST)  # it was sent, and it is billed
            raise
        # Only a `Listing` knows the requests behind the objects that it yields.
        return self._count_listed(infos) if isinstance(infos, Listing) else self._count_pages(infos)

    def _count_listed(self, infos: Listing) -> Iterator[ObjectInfo]:
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

    def _count_pages(self, infos: Iterator[ObjectInfo]) -> Iterator[ObjectInfo]:
        self.meter.count(RequestKind.LIST)
        page = self.capabilities.list_page
        for position, info in enumerate(infos):
            if position and position % page == 0:
                self.meter.count(RequestKind.LIST)
            yield info

    # --- operations of several requests ----------------------------------------------
    def _upload(self, request: StoreRequest, send: Send) -> Any:
        """Count a failed upload as far as it was read: the start, its parts and the abort."""
        counted = CountedParts(request.parts)
        try:
            return self._time_request("upload", request.with_parts(counted), send)
        finally:
            requests = _upload_requests(counted, self.capabilities.part_bytes)
            self.meter.count(RequestKind.PUT, requests=requests, bytes=counted.bytes)

    def _compose_parts(self, request: StoreRequest, send: Send) -> Any:
        """The inner store decides which parts are copied, and which are read and sent."""
        for kind, (requests, size) in self.inner.compose_cost(request.pieces).items():
            self.meter.count(RequestKind(kind), requests=requests, bytes=size)
        return self._time_request("compose", request, send)

    def _delete(self, request: StoreRequest, send: Send) -> Any:
        requests = -(-len(request.keys) // self.capabilities.delete_page)
        self.meter.count(RequestKind.DELETE, requests=requests)
        return self._time_request("delete", request, send)

    def _now(self, request: StoreRequest, send: Send) -> Any:
        self._count_all(self.capabilities.now_requests)
        return send(request)

    def _abort_stale(self, request: StoreRequest, send: Send) -> Any:
        self._count_all(self.capabilities.abort_stale_requests)
        removed = send(request)
        if self.capabilities.abort_stale_requests:
            self.meter.count(RequestKind.DELETE, requests=removed)
        return removed

    def _count_all(self, kinds: Sequence[str]) -> None:
        for kind in kinds:
            self.meter.count(RequestKind(kind))

    def _time_request(self, name: str, request: StoreRequest, send: Send) -> Any:
        start_s = self.runtime.monotonic_s()
        try:
            return send(request)
        finally:
            took_s = self.runtime.monotonic_s() - start_s
            self.metrics.histogram(f"requests.{name}").record(took_s)


def _bytes_of(operation: Operation, response: Any) -> int:
    if operation is GET_RANGES:
        return sum(map(len, response))
    return len(response if operation is GET_RANGE else response.body)


SINGLE: Mapping[Operation, RequestKind] = {
    Operation.GET: RequestKind.GET,
    Operation.GET_RANGE: RequestKind.GET,
    Operation.GET_RANGES: RequestKind.GET,
    Operation.HEAD: RequestKind.HEAD,
    Operation.PUT: RequestKind.PUT,
    Operation.CREATE: RequestKind.PUT,
    Operation.REPLACE: RequestKind.PUT,
    Operation.COPY: RequestKind.COPY,
}
"""Operations that are one request each."""
MULTIPLE: Mapping[Operation, Callable[[Meter, StoreRequest, Send], Any]] = {
    Operation.UPLOAD: Meter._upload,
    Operation.COMPOSE: Meter._compose_parts,
    Operation.DELETE: Meter._delete,
    Operation.NOW: Meter._now,
    Operation.ABORT_STALE: Meter._abort_stale,
}
GET_KIND = RequestKind.GET
HISTOGRAMS = {kind: f"requests.{kind}" for kind in RequestKind}


def _upload_requests(counted: CountedParts, part_bytes: int | None) -> int:
    """An upload of one part is a plain PUT; a part is sent once there is more after it."""
    if part_bytes is None or counted.bytes <= part_bytes:
        return int(counted.ended)
    parts = -(-counted.bytes // part_bytes) if counted.ended else (counted.bytes - 1) // part_bytes
    return 2 + parts if counted.ended or parts >= 2 else 0
