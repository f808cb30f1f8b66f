"""Makes a working store fail, by rule: the real store stays underneath.

    Faults(store, [Rule(Fault.FAIL_AFTER, "create", "wal/*", times=1)])

A rule names a fault, the calls it is for, and how often it strikes. `FAIL_BEFORE` never
reaches the store; `FAIL_AFTER` reaches it and loses the answer; a conditional write that
fails either way has an unknown outcome, exactly as over a network.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from reef.errors import Kind, UnavailableError
from reef.runtime import leaf_lock
from reef.stores.base import ObjectInfo, Outcome, Part, Store, Tagged, WriteResult
from reef.stores.wrappers.base import Wrapper

__all__ = ["Fault", "Faults", "Rule"]

T = TypeVar("T")


class Fault(StrEnum):
    """What can go wrong with one call."""

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
"""As the answers of services are read: 503 is SlowDown."""
READ_ONLY = {Fault.SHORT_READ, Fault.WRONG_BYTES}


@dataclass
class Rule:
    """When a fault strikes."""

    fault: Fault
    method: str = "*"
    key: str = "*"
    times: int | None = None
    """How often at most; None is without end."""
    skip: int = 0
    """How many matching calls go unharmed first."""
    chance: float = 1.0
    above_per_s: float | None = None
    """Strikes only what comes faster than this: a limit, as services put on a prefix."""
    stall_s: float = 1.0
    struck: int = field(default=0, init=False)
    _tokens: float = field(default=0.0, init=False, repr=False)
    _filled_s: float | None = field(default=None, init=False, repr=False)

    def matches(self, method: str, keys: Sequence[str]) -> bool:
        """Whether it is for this call; one of its keys is enough."""
        return fnmatchcase(method, self.method) and any(fnmatchcase(k, self.key) for k in keys)

    def lets_through(self, now_s: float) -> bool:
        """Whether a limit has room for one more; a second's worth is saved up."""
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


class Faults(Wrapper):
    """The first rule that matches a call decides its fate."""

    def __init__(self, inner: Store, rules: Iterable[Rule] = ()) -> None:
        super().__init__(inner)
        self.rules = list(rules)
        self._lock = leaf_lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Faults, (self.inner, self.rules)

    def get_tagged(self, key: str) -> Tagged:
        def damage(fault: Fault, found: Tagged) -> Tagged:
            return Tagged(_damage(fault, found.body), found.tag)

        return self._call("get", key, lambda: self.inner.get_tagged(key), damage)

    def get_range(self, key: str, start: int, end: int) -> bytes:
        return self._call(
            "get_range",
            key,
            lambda: self.inner.get_range(key, start, end),
            _damage,
        )

    def head(self, key: str) -> ObjectInfo:
        return self._call("head", key, lambda: self.inner.head(key))

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[ObjectInfo]:
        return self._call("list", prefix, lambda: self.inner.list(prefix, start_after))

    def put(self, key: str, body: bytes) -> str | None:
        return self._call("put", key, lambda: self.inner.put(key, body))

    def create(self, key: str, body: bytes) -> WriteResult:
        return self._conditional(
            "create", key, Outcome.EXISTS, lambda: self.inner.create(key, body)
        )

    def replace(self, key: str, body: bytes, tag: str) -> WriteResult:
        return self._conditional(
            "replace", key, Outcome.CHANGED, lambda: self.inner.replace(key, body, tag)
        )

    def upload(self, key: str, parts: Iterable[bytes]) -> int:
        return self._call("upload", key, lambda: self.inner.upload(key, parts))

    def copy(self, source: str, target: str) -> None:
        self._call("copy", target, lambda: self.inner.copy(source, target))

    def _compose(self, key: str, parts: Sequence[Part]) -> int:
        return self._call("compose", key, lambda: self.inner.compose(key, parts))

    def delete_many(self, keys: Sequence[str]) -> None:
        self._call("delete", keys, lambda: self.inner.delete_many(keys))

    def now(self) -> float:
        return self._call("now", "", self.inner.now)

    def abort_stale(self, older_than_s: float) -> int:
        return self._call("abort_stale", "", lambda: self.inner.abort_stale(older_than_s))

    def _conditional(
        self, method: str, key: str, conflict: Outcome, call: Callable[[], WriteResult]
    ) -> WriteResult:
        """A conflict answer looks like a lost race; every other failure like no answer."""
        rule = self._strike(method, [key])
        if rule is None or rule.fault in READ_ONLY:
            return call()
        if rule.fault is Fault.STALL:
            self.runtime.sleep(rule.stall_s)
            return call()
        if rule.fault is Fault.CONFLICT_409:
            return WriteResult(conflict)
        if rule.fault in AFTER:
            call()
        return WriteResult(Outcome.UNKNOWN, cause=_failure(rule.fault, method, key))

    def _call(
        self,
        method: str,
        key: str | Sequence[str],
        call: Callable[[], T],
        damage: Callable[[Fault, T], T] | None = None,
    ) -> T:
        keys = [key] if isinstance(key, str) else list(key) or [""]
        rule = self._strike(method, keys)
        if rule is None:
            return call()
        if rule.fault in READ_ONLY:
            result = call()
            return damage(rule.fault, result) if damage else result
        if rule.fault is Fault.STALL:
            self.runtime.sleep(rule.stall_s)
            return call()
        if rule.fault in AFTER:
            call()
        raise _failure(rule.fault, method, keys[0])

    def _strike(self, method: str, keys: Sequence[str]) -> Rule | None:
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


def _damage(fault: Fault, body: bytes) -> bytes:
    if fault is Fault.SHORT_READ:
        return body[: len(body) // 2]
    return bytes([body[0] ^ 0x01]) + body[1:] if body else body


def _failure(fault: Fault, method: str, key: str) -> UnavailableError:
    kind = Kind.THROTTLED if fault in THROTTLED else Kind.UNAVAILABLE
    return UnavailableError(f"injected {fault} on {method} {key}", kind=kind, object=key)
