"""Caches bounded in bytes: one of immutable blocks, one of rows.

**The cache** has immutable values, tails of segments and payloads of blocks, and evicts the least
recently used ones. "Not found" is never kept (H9).

**The row cache** has rows as they are returned: a warm `get` is one dict lookup. Before a write is
applied its keys are dropped. While any write is being applied no row is kept, and neither is a row
whose read began before the end of a write. So a row in here is never older than a row that was read
elsewhere. There may be several writes at a time: with a local log, one thread applies uploads and
another one new batches. A fold changes no row and drops nothing. Rows that expire are never kept.
Bounded in bytes; the oldest rows leave first.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import islice
from typing import Any, TypeVar

from reef.formats.manifest import SegmentEntry
from reef.formats.wal_object import AnyOps
from reef.runtime import leaf_lock
from reef.telemetry import Metrics

T = TypeVar("T")


class ByteCache:
    """Values by key, with their sizes. Safe for threads."""

    def __init__(self, bytes_max: int, metrics: Metrics | None = None) -> None:
        self.bytes_max = bytes_max
        self._lock = leaf_lock()
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        metrics = metrics or Metrics()
        self._hits = metrics.counter("cache.hits")
        self._misses = metrics.counter("cache.misses")
        self._size = metrics.gauge("cache.bytes")
        self.bytes = 0
        self._is_full = False
        self._seen: tuple[set[int], set[int]] = set(), set()
        """Hashes of keys whose values were not kept: the newest ones, and as many before."""

    def is_fleeting(self, key: Hashable, values: int) -> bool:
        """Whether a value is not here, and should not be kept once it is loaded, with others: so
        many `values` in all.

        A full cache keeps values that are read again before half as many others as it holds. So
        reads of much more than fits leave in it those that are asked for more often.
        """
        if not self._is_full or key in self._values:
            return not self.bytes_max
        newest, before = self._seen
        hashed = hash(key)  # two that are the same do no harm
        if hashed in newest or hashed in before:
            return False
        newest.add(hashed)
        if 4 * values * len(newest) > len(self._values):
            self._seen = set(), newest
        self._misses.value += values
        return True

    def peek(self, key: Hashable) -> Any | None:
        """Return the value, or None where there is none; counted as a hit or a miss."""
        entry = self._values.get(key)
        if entry is None:
            self._misses.value += 1
            return None
        try:  # noqa: SIM105 - each read comes here; one call needs no lock
            self._values.move_to_end(key)
        except KeyError:  # evicted meanwhile
            pass
        self._hits.value += 1
        return entry[0]

    def peek_many(self, keys: Sequence[Hashable]) -> list[Any | None]:
        """Return the values of many keys, None for those that are not cached."""
        values, hits = self._values, 0
        results: list[Any | None] = []
        with self._lock:
            for key in keys:
                entry = values.get(key)
                if entry is None:
                    results.append(None)
                else:
                    values.move_to_end(key)
                    results.append(entry[0])
                    hits += 1
        self._hits.value += hits
        self._misses.value += len(results) - hits
        return results

    def get(self, key: Hashable, load: Callable[[], tuple[T, int]]) -> T:
        """Return the value, loading it on a miss; `load` returns it with its size.

        Two threads that miss at once both load: cheaper than making one wait.
        """
        known: T | None = self.peek(key)
        if known is not None:
            return known
        value, size = load()
        self.put(key, value, size)
        return value

    def put(self, key: Hashable, value: object, size: int) -> None:
        self.put_many([(key, value, size)])

    def put_many(self, entries: Iterable[tuple[Hashable, object, int]]) -> None:
        """Keep several values, each with its size, one after the other."""
        values, bytes_max = self._values, self.bytes_max
        with self._lock:
            for key, value, size in entries:
                if size > bytes_max or key in values:
                    continue
                values[key] = (value, size)
                self.bytes += size
                while self.bytes > bytes_max:
                    self._is_full = True
                    self.bytes -= values.popitem(last=False)[1][1]
            self._size.value = self.bytes


MISSING = object()
"""Default of `rows.get(key, MISSING)`: the key is not cached. None means that it has no row."""
ROW_BYTES = 200
"""Estimated memory of a row, without its own bytes."""
KEYS_DROPPED_MAX = 10_000
"""A larger write clears the cache: cheaper than dropping each of its keys."""


class RowCache:
    """Rows as they are returned, by key. `rows` is read without a lock, changed only here."""

    def __init__(self, bytes_max: int) -> None:
        self.rows: dict[bytes, Any] = {}
        self.writes = 0
        """Counts beginnings and ends of writes."""
        self._applying = 0
        """Writes that have begun and not ended."""
        self._bytes_max = bytes_max
        self._bytes = 0
        self._sizes: dict[bytes, int] = {}
        self._lock = leaf_lock()

    def keep(self, key: bytes, row: Any, size: int, writes: int) -> None:
        """Keep a row that was read when `writes` was the count."""
        size += ROW_BYTES + len(key)
        with self._lock:
            if (
                writes != self.writes
                or self._applying
                or key in self.rows
                or size > self._bytes_max // 8
            ):
                return
            self.rows[key] = row
            self._sizes[key] = size
            self._bytes += size
            if self._bytes > self._bytes_max:
                self._drop(list(islice(self.rows, len(self.rows) // 8 + 1)))

    def applying(
        self, batches: Sequence[AnyOps] = (), segments: Sequence[SegmentEntry] = ()
    ) -> None:
        """Drop the rows that are about to be written; the keys of an ingest are not known."""
        with self._lock:
            self.writes += 1
            self._applying += 1
            if segments:
                self._clear()
            for ops in batches:
                if ops.end_keys is not None or len(ops) > KEYS_DROPPED_MAX:
                    self._clear()
                elif self.rows:
                    self._drop(ops.key_list())

    def applied(self) -> None:
        with self._lock:
            self.writes += 1
            self._applying -= 1

    def lost_track(self) -> None:
        with self._lock:
            self.writes += 1
            self._clear()

    def _clear(self) -> None:
        self.rows.clear()
        self._sizes.clear()
        self._bytes = 0

    def _drop(self, keys: list[bytes]) -> None:
        for key in keys:
            if self.rows.pop(key, MISSING) is not MISSING:
                self._bytes -= self._sizes.pop(key)
