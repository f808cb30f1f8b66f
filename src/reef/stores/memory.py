"""A store in this process's memory: for tests, examples and the simulator.

`memory://` is a new store at every opening; `memory://name` is shared by all who open
that name in this process. Both are gone with the process, so neither can be sent to
another one.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

from reef.errors import ErrorKind, InvalidInputError, NotFoundError
from reef.runtime import REAL, Runtime, leaf_lock
from reef.stores.base import (
    Capabilities,
    ObjectInfo,
    Outcome,
    Part,
    Store,
    Tagged,
    WriteResult,
    check_key,
    check_prefix,
    check_range,
    past_the_end,
)


@dataclass(frozen=True, slots=True)
class _Object:
    body: bytes
    tag: str
    written_s: float


class MemoryStore(Store):
    """Objects in a dict. Every call is atomic."""

    def __init__(
        self, url: str = "memory://", *, runtime: Runtime = REAL, page: int = 1000
    ) -> None:
        self.url = url
        self.runtime = runtime
        self.page = page
        self.capabilities = Capabilities(shared=False, list_page=page, compose=True)
        self._lock = leaf_lock()
        self._objects: dict[str, _Object] = {}
        self._keys: list[str] = []
        self._writes = 0
        self._token = next(_tokens)
        _by_token[self._token] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return _same_process, (self._token, REAL.process_id())

    def get_tagged(self, key: str) -> Tagged:
        found = self._find(key)
        return Tagged(found.body, found.tag)

    def get_range(self, key: str, start: int, end: int) -> bytes:
        check_range(key, start, end)
        body = self._find(key).body
        if end > len(body):
            raise past_the_end(key, end, len(body))
        return body[start:end]

    def head(self, key: str) -> ObjectInfo:
        return _info(key, self._find(key))

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        return self._pages(prefix, start_after)

    def _pages(self, prefix: str, last: str) -> Iterator[ObjectInfo]:
        """Page by page, as a bucket does: a page shows the store as it was when it was read."""
        while True:
            with self._lock:
                first = max(bisect_left(self._keys, prefix), bisect_right(self._keys, last))
                keys = self._keys[first : first + self.page]
                infos = [_info(k, self._objects[k]) for k in keys if k.startswith(prefix)]
            yield from infos
            if len(infos) < self.page:
                return
            last = infos[-1].key

    def put(self, key: str, body: bytes) -> str:
        with self._lock:
            return self._store(check_key(key), body)

    def create(self, key: str, body: bytes) -> WriteResult:
        with self._lock:
            if check_key(key) in self._objects:
                return WriteResult(Outcome.EXISTS)
            tag = self._store(key, body)
            return WriteResult(Outcome.CREATED, tag, date_s=self._objects[key].written_s)

    def replace(self, key: str, body: bytes, tag: str) -> WriteResult:
        with self._lock:
            found = self._objects.get(check_key(key))
            if found is None or found.tag != tag:
                return WriteResult(Outcome.CHANGED)
            return WriteResult(Outcome.REPLACED, self._store(key, body))

    def upload(self, key: str, parts: Iterable[bytes]) -> int:
        body = b"".join(parts)
        self.put(key, body)
        return len(body)

    def copy(self, source: str, target: str) -> None:
        self.put(target, self.get(source))

    def compose(self, key: str, parts: Sequence[Part]) -> int:
        pieces = [part if isinstance(part, bytes) else self.get_range(*part) for part in parts]
        return self.upload(key, pieces)

    def delete_many(self, keys: Sequence[str]) -> None:
        with self._lock:
            for key in keys:
                if self._objects.pop(check_key(key), None):
                    self._keys.pop(bisect_left(self._keys, key))

    def now(self) -> float:
        return self.runtime.wall_s()

    def abort_stale(self, older_than_s: float) -> int:
        return 0  # a write that did not finish left nothing

    def _find(self, key: str) -> _Object:
        with self._lock:
            found = self._objects.get(check_key(key))
        if found is None:
            raise NotFoundError(f"no object {key} in {self.url}", object=key)
        return found

    def _store(self, key: str, body: bytes) -> str:
        if key not in self._objects:
            insort(self._keys, key)
        self._writes += 1
        tag = f'"{self._writes}"'  # quoted, as servers quote theirs: tags are opaque
        self._objects[key] = _Object(bytes(body), tag, self.runtime.wall_s())
        return tag


_named: dict[str, MemoryStore] = {}
_tokens = count(1)
_by_token: "WeakValueDictionary[int, MemoryStore]" = WeakValueDictionary()
_named_lock = leaf_lock()


def open_memory(url: str, name: str, *, runtime: Runtime, page: int = 1000) -> MemoryStore:
    """Return a new store, or the one that this process knows by `name`."""
    if not name:
        return MemoryStore(url, runtime=runtime, page=page)
    with _named_lock:
        if name not in _named:
            _named[name] = MemoryStore(url, runtime=runtime, page=page)
        return _named[name]


def _info(key: str, found: _Object) -> ObjectInfo:
    return ObjectInfo(key, len(found.body), found.tag, found.written_s)


def _same_process(token: int, process_id: int) -> MemoryStore:
    """A memory store cannot travel; a copy would be an empty bucket with the same name."""
    if process_id != REAL.process_id() or token not in _by_token:
        raise InvalidInputError(
            "a memory:// store exists only in the process that opened it",
            kind=ErrorKind.NOT_PICKLABLE,
            hint="Use a directory or a bucket where several processes take part",
        )
    return _by_token[token]
