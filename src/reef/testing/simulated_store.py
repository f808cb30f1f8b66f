"""The shared bucket as one simulated process sees it.

Each call passes two seams: one before it takes effect and one after, before its answer
arrives. A process can die, stall or be overtaken at either; the answer can be lost. A
write can also outlive its caller's patience: unanswered now, in effect later.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from reef.errors import UnavailableError
from reef.stores.base import ObjectInfo, Outcome, Part, Store, Tagged, WriteResult
from reef.stores.wrappers import Wrapper

if TYPE_CHECKING:
    from reef.testing.simulation import Process

__all__ = ["SimulatedStore"]

T = TypeVar("T")


class SimulatedStore(Wrapper):
    """A store whose every call is a place where the process can die."""

    def __init__(self, bucket: Store, process: "Process") -> None:
        super().__init__(bucket)
        self.runtime = process.runtime
        self._process = process
        self._simulation = process.simulation
        self._chaos = process.simulation.chaos
        self._choices = process.simulation.choices
        self._held = process.simulation.held

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a simulated store cannot be sent to a real process")

    def get_tagged(self, key: str) -> Tagged:
        return self._call("get", key, lambda: self.inner.get_tagged(key))

    def get_range(self, key: str, start: int, end: int) -> bytes:
        return self._call("get_range", key, lambda: self.inner.get_range(key, start, end))

    def head(self, key: str) -> ObjectInfo:
        return self._call("head", key, lambda: self.inner.head(key))

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[ObjectInfo]:
        """Each page is a call: the bucket may change between two of them."""
        while True:
            page = self._call("list", prefix, lambda after=start_after: self._page(prefix, after))  # type: ignore[misc]
            yield from page
            if len(page) < self.capabilities.list_page:
                return
            start_after = page[-1].key

    def _page(self, prefix: str, start_after: str) -> Sequence[ObjectInfo]:
        infos = self.inner.list(prefix, start_after)
        return [info for _, info in zip(range(self.capabilities.list_page), infos, strict=False)]

    def put(self, key: str, body: bytes) -> str | None:
        return self._write("put", key, lambda: self.inner.put(key, body))

    def create(self, key: str, body: bytes) -> WriteResult:
        return self._conditional(
            "create", key, Outcome.EXISTS, lambda: self.inner.create(key, body)
        )

    def replace(self, key: str, body: bytes, tag: str) -> WriteResult:
        return self._conditional(
            "replace", key, Outcome.CHANGED, lambda: self.inner.replace(key, body, tag)
        )

    def upload(self, key: str, parts: Iterable[bytes]) -> int:
        pieces = [bytes(part) for part in parts]
        return self._write("upload", key, lambda: self.inner.upload(key, pieces))

    def copy(self, source: str, target: str) -> None:
        self._write("copy", target, lambda: self.inner.copy(source, target))

    def _compose(self, key: str, parts: Sequence[Part]) -> int:
        return self._write("compose", key, lambda: self.inner.compose(key, parts))

    def delete_many(self, keys: Sequence[str]) -> None:
        for key in keys:  # a real bucket may die between any two of a request's deletes
            self._write("delete", key, lambda key=key: self.inner.delete_many([key]))  # type: ignore[misc]

    def now(self) -> float:
        return self._call("now", "", self.inner.now)

    def abort_stale(self, older_than_s: float) -> int:
        return self._call("abort_stale", "", lambda: self.inner.abort_stale(older_than_s))

    def _call(self, method: str, key: str, effect: Callable[[], T]) -> T:
        self._before(method, key)
        return self._carry_out(method, key, effect)

    def _write(self, method: str, key: str, effect: Callable[[], T]) -> T:
        self._before(method, key)
        if self._simulation.strikes(self._chaos.late):
            raise self._delay(method, key, effect)
        if method != "delete" and self._held.is_held(key):
            return self._hold(method, key, effect)
        return self._carry_out(method, key, effect)

    def _carry_out(self, method: str, key: str, effect: Callable[[], T]) -> T:
        if self._simulation.strikes(self._chaos.fail_before):
            raise self._silence(method, key)
        result = effect()
        self._after(method, key)
        if self._simulation.strikes(self._chaos.lost_answer):
            raise self._silence(method, key)
        return result

    def _conditional(
        self, method: str, key: str, conflict: Outcome, effect: Callable[[], WriteResult]
    ) -> WriteResult:
        self._held.before_send(self._process, f"{method} {key}", key)
        self._before(method, key)
        if self._simulation.strikes(self._chaos.conflict):
            return WriteResult(conflict)
        try:
            return self._send(method, key, effect)
        except UnavailableError as error:
            return WriteResult(Outcome.UNKNOWN, cause=error)

    def _send(self, method: str, key: str, effect: Callable[[], WriteResult]) -> WriteResult:
        if self._simulation.strikes(self._chaos.late):
            raise self._delay(method, key, effect)
        if self._held.is_held(key):
            return self._hold(method, key, effect)
        if self._simulation.strikes(self._chaos.fail_before):
            raise self._silence(method, key)
        result = effect()
        if result.landed and self._held.is_forgotten(key):
            self._held.forget(self._process, f"{method} {key} {result.outcome}", key)
            raise self._silence(method, key)
        self._after(f"{method} {result.outcome}", key)
        if self._simulation.strikes(self._chaos.lost_answer):
            raise self._silence(method, key)
        return result

    def _before(self, method: str, key: str) -> None:
        self._travel()
        self._simulation.seam(self._process, "store", f"{method} {key}")

    def _after(self, method: str, key: str) -> None:
        self._simulation.seam(self._process, "store", f"{method} {key} done")
        self._travel()

    def _travel(self) -> None:
        """A request and its answer take time; now and then, a very long one."""
        delay_s = self._choices.uniform(*self._chaos.latency_s)
        if self._simulation.strikes(self._chaos.stall):
            delay_s += self._choices.uniform(*self._chaos.stall_s)
        if delay_s > 0.0:
            self._simulation.scheduler.park(delay_s)

    def _hold(self, method: str, key: str, effect: Callable[[], T]) -> T:
        result, error = self._held.hold(self._process, f"{method} {key}", key, effect)
        if error is not None:
            raise error
        return cast(T, result)

    def _delay(self, method: str, key: str, effect: Callable[[], object]) -> UnavailableError:
        self._simulation.land_later(f"{method} {key}", effect)
        return self._silence(method, key)

    def _silence(self, method: str, key: str) -> UnavailableError:
        self._simulation.note(self._process.name, "chaos", f"{method} {key}: no answer")
        return UnavailableError(f"no answer to {method} {key}", object=key)
