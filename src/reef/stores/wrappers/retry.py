"""Tries again, a bounded number of times, where trying again cannot do harm.

Reads, plain puts, copies and deletes say the same thing when said twice. A conditional
write does not: `create` after a lost answer finds its own object in the way. So `create`
and `replace` pass through here untouched, and the read-back wrapper settles them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from reef.errors import UnavailableError
from reef.runtime import Runtime
from reef.stores.base import ObjectInfo, Part, Store, Tagged, short_read
from reef.stores.wrappers.base import Wrapper

__all__ = ["Backoff", "Retry", "RetryPolicy"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long to go on. Both bounds hold: whichever is reached first ends it."""

    attempts_max: int = 8
    deadline_s: float = 30.0
    first_delay_s: float = 0.05
    delay_max_s: float = 5.0


class Backoff:
    """Counts attempts and waits between them: doubling delays, fully jittered."""

    def __init__(self, runtime: Runtime, policy: RetryPolicy) -> None:
        self._runtime = runtime
        self._policy = policy
        self._deadline = runtime.deadline(policy.deadline_s)
        self.attempts = 0

    def wait(self) -> bool:
        """Wait before the next attempt; False if there is to be none."""
        self.attempts += 1
        if self.attempts >= self._policy.attempts_max:
            return False
        ceiling = self._policy.first_delay_s * 2 ** (self.attempts - 1)
        delay_s = self._runtime.uniform(0.0, min(ceiling, self._policy.delay_max_s))
        if delay_s >= self._deadline.remaining_s():
            return False
        self._runtime.sleep(delay_s)
        return True


class Retry(Wrapper):
    """Only `UnavailableError` is tried again; a refusal or a wrong input never is."""

    def __init__(self, inner: Store, policy: RetryPolicy | None = None) -> None:
        super().__init__(inner)
        self.policy = policy or RetryPolicy()

    def get_tagged(self, key: str) -> Tagged:
        return self._try(lambda: self.inner.get_tagged(key))

    def get_range(self, key: str, start: int, end: int) -> bytes:
        return self._try(lambda: self._get_whole_range(key, start, end))

    def _get_whole_range(self, key: str, start: int, end: int) -> bytes:
        body = self.inner.get_range(key, start, end)
        if len(body) != end - start:
            raise short_read(key, len(body), end - start)
        return body

    def head(self, key: str) -> ObjectInfo:
        return self._try(lambda: self.inner.head(key))

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[ObjectInfo]:
        """After a failure, go on from the last key seen; progress earns new attempts."""
        backoff = Backoff(self.runtime, self.policy)
        while True:
            try:
                for info in self.inner.list(prefix, start_after):
                    start_after = info.key
                    backoff = Backoff(self.runtime, self.policy)
                    yield info
                return
            except UnavailableError:
                if not backoff.wait():
                    raise

    def put(self, key: str, body: bytes) -> str | None:
        return self._try(lambda: self.inner.put(key, body))

    def copy(self, source: str, target: str) -> None:
        self._try(lambda: self.inner.copy(source, target))

    def _compose(self, key: str, parts: Sequence[Part]) -> int:
        """Said twice, it says the same: nobody else uses the name."""
        return self._try(lambda: self.inner.compose(key, parts))

    def delete_many(self, keys: Sequence[str]) -> None:
        self._try(lambda: self.inner.delete_many(keys))

    def now(self) -> float:
        return self._try(self.inner.now)

    def abort_stale(self, older_than_s: float) -> int:
        return self._try(lambda: self.inner.abort_stale(older_than_s))

    def _try(self, call: Callable[[], T]) -> T:
        backoff = Backoff(self.runtime, self.policy)
        while True:
            try:
                return call()
            except UnavailableError as error:
                if not backoff.wait():
                    error.context["attempts"] = backoff.attempts
                    raise
