"""The blob cache: bytes of immutable objects, by name and tag, within a budget.

Only what can never change is kept: segments, and ranges of checkpoints. Their tag is the write
id that nobody else draws, so that no request is needed to know it; the head, the plan and the
leases are never cached, and neither is a "not found" (H9). Several catalogs may share one cache:
names begin with the address of their store. Anything with `get`, `put` and `forget` can stand in
its place.
"""

from collections import OrderedDict
from typing import Protocol

from reef.runtime import leaf_lock

__all__ = ["CACHE_BYTES", "BlobCache", "MemoryBlobCache"]

CACHE_BYTES = 256 << 20
ENTRY_BYTES = 200
"""About what an entry takes beside its bytes."""


class BlobCache(Protocol):
    """Where blobs are kept. Safe for threads."""

    def get(self, name: str, tag: str) -> bytes | None: ...
    def put(self, name: str, tag: str, blob: bytes) -> None: ...
    def forget(self, name: str, tag: str) -> None: ...


class MemoryBlobCache:
    """The least recently used go first."""

    def __init__(self, bytes_max: int = CACHE_BYTES) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self.hits = 0
        self.misses = 0
        self._lock = leaf_lock()
        self._blobs: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blobs)

    def __reduce__(self) -> tuple[type["MemoryBlobCache"], tuple[int]]:
        return MemoryBlobCache, (self.bytes_max,)  # another process has its own memory

    def get(self, name: str, tag: str) -> bytes | None:
        with self._lock:
            blob = self._blobs.get((name, tag))
            if blob is None:
                self.misses += 1
                return None
            self.hits += 1
            self._blobs.move_to_end((name, tag))
            return blob

    def put(self, name: str, tag: str, blob: bytes) -> None:
        if _weight(blob) > self.bytes_max:
            return
        with self._lock:
            self._drop((name, tag))
            self._blobs[name, tag] = blob
            self.bytes += _weight(blob)
            while self.bytes > self.bytes_max:
                self.bytes -= _weight(self._blobs.popitem(last=False)[1])

    def forget(self, name: str, tag: str) -> None:
        with self._lock:
            self._drop((name, tag))

    def _drop(self, key: tuple[str, str]) -> None:
        blob = self._blobs.pop(key, None)
        if blob is not None:
            self.bytes -= _weight(blob)


def _weight(blob: bytes) -> int:
    return len(blob) + ENTRY_BYTES
