"""A store that passes every call on to the one inside it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from reef.stores.base import (
    COALESCE_GAP_BYTES,
    ObjectInfo,
    Part,
    Store,
    Tagged,
    WriteResult,
    coalesce,
)

__all__ = ["CountedParts", "Wrapper"]


class Wrapper(Store):
    """Override what you change; the rest goes straight through.

    `get`, `get_ranges` and `delete` are made of the others, so a wrapper sees them as
    those: there is one place to count, fail or delay each request.
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
        """A store that cannot compose is asked for reads and an upload, as any caller's are."""
        if not self.capabilities.compose:
            return super().compose(key, parts)
        return self._compose(key, parts)

    def _compose(self, key: str, parts: Sequence[Part]) -> int:
        """Override this one: the store inside can compose by itself."""
        return self.inner.compose(key, parts)

    def compose_cost(self, parts: Sequence[Part]) -> Mapping[str, tuple[int, int]]:
        return self.inner.compose_cost(parts)

    def forget(self, key: str, ranges: Iterable[tuple[int, int]]) -> None:
        """Neighbours too as one: that is how a wrapper asks for them."""
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


class CountedParts:
    """Counts what an upload reads of its source, and whether it read all."""

    def __init__(self, parts: Iterable[bytes]) -> None:
        self._parts = parts
        self.bytes = 0
        self.ended = False

    def __iter__(self) -> Iterator[bytes]:
        for part in self._parts:
            self.bytes += len(part)
            yield part
        self.ended = True
