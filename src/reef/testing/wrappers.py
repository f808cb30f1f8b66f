"""Store wrappers for tests: faults by rule, latency of real services, a recorder of calls.

    store = open_store("memory://", faults=[Rule(Fault.FAIL_AFTER, "create", "wal/*", times=1)])
    store = open_store("memory://", latency="s3-standard")

`open_store` is `reef.stores.open` with faults and latency between the backend and the usual
policies, where a network is: each attempt that a retry sends is delayed, or fails, by itself.
"""

import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from statistics import NormalDist
from typing import Any

from reef.errors import ErrorKind, InvalidInputError, UnavailableError
from reef.runtime import REAL, Runtime, leaf_lock
from reef.stores import with_policies
from reef.stores.base import ObjectInfo, Outcome, Store, Tagged, WriteResult
from reef.stores.opening import open_backend
from reef.stores.wrappers.base import Hooked, Operation, Send, StoreRequest

CALLS_MAX = 100_000
NORMAL = NormalDist()
P99 = NORMAL.inv_cdf(0.99)


def open_store(
    url: str | os.PathLike[str],
    *,
    runtime: Runtime = REAL,
    latency: str | None = None,
    faults: "Iterable[Rule] | None" = None,
    cas: str | None = None,
    **options: Any,
) -> Store:
    """Open a store as `reef.stores.open` does, with delays and failures below its policies.

    `latency` names one of `PROFILES`; `faults` are the rules by which requests fail.
    """
    policies = {name: options.pop(name) for name in POLICIES if name in options}
    store, cas = open_backend(url, cas, runtime, options)
    if latency is not None:
        store = Latency(store, _profile(latency))
    if faults is not None:
        store = Faults(store, faults)
    return with_policies(store, cas=cas, **policies)


POLICIES = ("retry", "meter", "metrics", "disk_cache", "disk_cache_bytes")
"""Options of `reef.stores.open` that select policies, rather than the backend."""


# --- faults -------------------------------------------------------------------------


class Fault(StrEnum):
    """Ways in which one call can fail.

    `FAIL_BEFORE` never reaches the store; `FAIL_AFTER` reaches it and loses the response. A
    conditional write that fails either way has an unknown outcome, exactly as over a network.
    """

    FAIL_BEFORE = "fail_before"
    FAIL_AFTER = "fail_after"
    STALL = "stall"
    SHORT_READ = "short_read"
    WRONG_BYTES = "wrong_bytes"
    CONFLICT_409 = "conflict_409"
    THROTTLE_429 = "throttle_429"
    THROTTLE_429_AFTER = "throttle_429_after"
    UNAVAILABLE_503 = "unavailable_503"


AFTER = {Fault.FAIL_AFTER, Fault.THROTTLE_429_AFTER}
THROTTLED = {Fault.THROTTLE_429, Fault.THROTTLE_429_AFTER, Fault.UNAVAILABLE_503}
"""As responses of services are classified: 503 is SlowDown."""
READ_ONLY = {Fault.SHORT_READ, Fault.WRONG_BYTES}
CONFLICTS = {Operation.CREATE: Outcome.EXISTS, Operation.REPLACE: Outcome.CHANGED}


@dataclass
class Rule:
    """A fault, the calls it applies to, and how often it strikes."""

    fault: Fault
    method: str = "*"
    """A pattern of `Operation` names."""
    key: str = "*"
    times: int | None = None
    """How often at most; None is without a bound."""
    skip: int = 0
    """How many matching calls succeed first."""
    chance: float = 1.0
    above_per_s: float | None = None
    """Strikes only calls above this rate: a limit, as services put on a prefix."""
    stall_s: float = 1.0
    struck: int = field(default=0, init=False)
    _tokens: float = field(default=0.0, init=False, repr=False)
    _filled_s: float | None = field(default=None, init=False, repr=False)

    def matches(self, method: str, keys: Sequence[str]) -> bool:
        """Whether it applies to this call; one matching key is enough."""
        return fnmatchcase(method, self.method) and any(fnmatchcase(k, self.key) for k in keys)

    def lets_through(self, now_s: float) -> bool:
        """Whether a limit has room for one more; at most one second accumulates."""
        if self.above_per_s is None:
            return False
        full = max(1.0, self.above_per_s)
        since_s = full if self._filled_s is None else now_s - self._filled_s
        self._tokens = min(full, self._tokens + since_s * self.above_per_s)
        self._filled_s = now_s
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


class Faults(Hooked):
    """Makes calls of a working store fail; the first rule that matches decides."""

    def __init__(self, inner: Store, rules: Iterable[Rule] = ()) -> None:
        super().__init__(inner)
        self.rules = list(rules)
        self._lock = leaf_lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Faults, (self.inner, self.rules)

    def around(self, request: StoreRequest, send: Send) -> Any:
        """A conditional write that fails is a lost race or unknown; other calls raise."""
        rule = self._strike(request)
        if rule is None:
            return send(request)
        if rule.fault in READ_ONLY:
            return _damage(rule.fault, send(request), request.operation)
        if rule.fault is Fault.STALL:
            self.runtime.sleep(rule.stall_s)
            return send(request)
        conflict = CONFLICTS.get(request.operation)
        if conflict is not None and rule.fault is Fault.CONFLICT_409:
            return WriteResult(conflict)
        if rule.fault in AFTER:
            send(request)
        if conflict is not None:
            return WriteResult(Outcome.UNKNOWN, cause=_failure(rule.fault, request))
        raise _failure(rule.fault, request)

    def around_list(self, request: StoreRequest, send: Send) -> Iterator[ObjectInfo]:
        infos: Iterator[ObjectInfo] = self.around(request, send)
        return infos

    def _strike(self, request: StoreRequest) -> Rule | None:
        method, keys = request.operation.value, request.keys or [request.key]
        with self._lock:
            for rule in self.rules:
                if not rule.matches(method, keys) or rule.struck == rule.times:
                    continue
                if rule.skip > 0:
                    rule.skip -= 1
                elif rule.lets_through(self.runtime.monotonic_s()):
                    continue
                elif rule.chance >= 1.0 or self.runtime.uniform(0.0, 1.0) < rule.chance:
                    rule.struck += 1
                    return rule
        return None


def _damage(fault: Fault, response: Any, operation: Operation) -> Any:
    """Damage the bytes of a read; other responses have none."""
    if operation is Operation.GET:
        return Tagged(_damaged(fault, response.body), response.tag)
    return _damaged(fault, response) if operation is Operation.GET_RANGE else response


def _damaged(fault: Fault, body: bytes) -> bytes:
    if fault is Fault.SHORT_READ:
        return body[: len(body) // 2]
    return bytes([body[0] ^ 0x01]) + body[1:] if body else body


def _failure(fault: Fault, request: StoreRequest) -> UnavailableError:
    kind = ErrorKind.THROTTLED if fault in THROTTLED else ErrorKind.UNAVAILABLE
    message = f"injected {fault} on {request.operation} {request.key}"
    return UnavailableError(message, kind=kind, object=request.key)


# --- latency ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LatencyProfile:
    """Milliseconds to the first byte, as (median, 99th percentile), and bandwidth.

    Times follow a log-normal distribution, plus the body's time at the given bandwidth.
    """

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
"""Rounded from public measurements; for comparing designs, not for promises."""


def _profile(name: str) -> LatencyProfile:
    if name not in PROFILES:
        raise InvalidInputError(
            f"there is no latency profile {name!r}",
            kind=ErrorKind.INVALID_OPTION,
            hint=f"There are: {', '.join(PROFILES)}",
        )
    return PROFILES[name]


class Latency(Hooked):
    """Delays every request; by the runtime's clock, so the delay can be simulated."""

    def __init__(self, inner: Store, profile: LatencyProfile) -> None:
        super().__init__(inner)
        self.profile = profile

    def handles(self, operation: Operation) -> bool:
        return operation not in (Operation.NOW, Operation.ABORT_STALE)

    def around(self, request: StoreRequest, send: Send) -> Any:
        read_ms, write_ms = self.profile.read_ms, self.profile.write_ms
        match request.operation:
            case Operation.GET:
                response = send(request)
                self._wait(read_ms, len(response.body))
                return response
            case Operation.UPLOAD | Operation.COMPOSE:
                size = send(request)
                self._wait(write_ms, size if request.operation is Operation.UPLOAD else 0)
                return size
            case Operation.DELETE:
                for _ in range(0, len(request.keys), self.capabilities.delete_page):
                    self._wait(write_ms)
            case Operation.GET_RANGE | Operation.HEAD:
                self._wait(read_ms, request.end - request.start)
            case _:
                self._wait(write_ms, len(request.body))
        return send(request)

    def around_list(self, request: StoreRequest, send: Send) -> Iterator[ObjectInfo]:
        self._wait(self.profile.list_ms)
        for position, info in enumerate(send(request)):
            if position and position % self.capabilities.list_page == 0:
                self._wait(self.profile.list_ms)
            yield info

    def _wait(self, timing: tuple[float, float], size: int = 0) -> None:
        chance = self.runtime.uniform(1e-6, 1 - 1e-6)
        self.runtime.sleep(self.profile.delay_s(timing, size, chance))


# --- recorder -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the store inside."""

    method: str
    key: str
    result: str
    start_s: float
    end_s: float

    def __str__(self) -> str:
        return f"{self.start_s:12.6f} {self.method:<10} {self.key:<60} {self.result}"


class Recorder(Hooked):
    """Records the last `calls_max` calls and their results, in the order in which they ended.

    For tests of an order of requests, for reading a simulated history, and for profiling the
    requests of a slow operation.
    """

    def __init__(self, inner: Store, calls_max: int = CALLS_MAX) -> None:
        super().__init__(inner)
        self.calls: deque[Call] = deque(maxlen=calls_max)

    def around(self, request: StoreRequest, send: Send) -> Any:
        start_s = self.runtime.monotonic_s()
        summary = "died"
        try:
            response = send(request)
            summary = _summary(response)
            return response
        except Exception as error:
            summary = type(error).__name__
            raise
        finally:
            key = " ".join(request.keys) if request.keys else request.key
            method, end_s = request.operation.value, self.runtime.monotonic_s()
            self.calls.append(Call(method, key, summary, start_s, end_s))

    def around_list(self, request: StoreRequest, send: Send) -> Iterator[ObjectInfo]:
        """Drain the listing: it is one call."""
        return iter(self.around(request, lambda request: list(send(request))))


def _summary(response: object) -> str:
    match response:
        case WriteResult():
            return response.outcome.value
        case Tagged():
            return f"{len(response.body)} bytes"
        case bytes():
            return f"{len(response)} bytes"
        case list():
            return f"{len(response)} objects"
        case _:
            return "done"
