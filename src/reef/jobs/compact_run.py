"""An input of a compaction: the groups of a segment in a key range, read in order, once.

Groups lie one behind the other, so that many come with one ranged GET. Nothing is cached: what a
compaction reads it will not read again, and serving needs the cache more. How many groups are
read at a time follows from what they turn out to take in memory.
"""

from bisect import bisect_left
from dataclasses import replace

from reef.engine.reading.arena import rows_bytes
from reef.engine.reading.cursors import Cursor
from reef.errors import InvalidInputError, Kind
from reef.formats.coding import corrupt
from reef.formats.filter import KeyFilter
from reef.formats.manifest import SegmentEntry
from reef.formats.schema import Schema
from reef.formats.segment_tail import SegmentTail, decode_tail
from reef.formats.versions import Versions, concat_versions
from reef.paths import Namespace
from reef.stores import Store
from reef.stores.fetch import read_again
from reef.types import KeyRange

__all__ = ["SegmentRun", "read_range", "read_tail"]

GROUPS_MAX = 512
NO_FILTER = KeyFilter(bytes(32))


def read_tail(store: Store, namespace: Namespace, entry: SegmentEntry) -> SegmentTail:
    """Return what plans the reading of a segment, without its filter, which may be large."""
    key = namespace.segment(entry.id)

    def read() -> SegmentTail:
        return decode_tail(
            read_range(store, key, entry.size - entry.tail_bytes, entry.size), entry.size, key
        )

    return replace(read_again(read), filter=NO_FILTER)


class SegmentRun(Cursor):
    """Reads about `bytes_max` of decoded rows at a time, and at least a group."""

    def __init__(
        self,
        store: Store,
        entry: SegmentEntry,
        tail: SegmentTail,
        wanted: KeyRange,
        *,
        schema: Schema,
        bytes_max: int,
    ) -> None:
        super().__init__()
        self._store, self._entry, self._tail = store, entry, tail
        self._wanted, self._schema, self._bytes_max = wanted, schema, bytes_max
        index = tail.index
        self._next_group = bisect_left(index.last_keys, wanted.start)
        self._end = len(index) if wanted.end is None else bisect_left(index.first_keys, wanted.end)
        self._count = 1
        self._columns = sorted(tail.footer.schema.types())

    def _next(self) -> Versions | None:
        first, end = self._next_group, min(self._next_group + self._count, self._end)
        if first >= end:
            return None
        self._next_group = end
        rows = read_again(lambda: self._read(first, end))
        each = max(1, rows_bytes(rows) // (end - first))
        self._count = min(max(1, self._bytes_max // each), GROUPS_MAX)
        rows = rows.under(self._schema).within(self._wanted)
        return rows.with_lsn(self._entry.visible_lsn) if self._entry.visible_lsn else rows

    def _read(self, first: int, end: int) -> Versions:
        """Fetch neighbouring groups with one request and decode them."""
        tail = self._tail
        spans = [tail.ranges(group, self._columns) for group in range(first, end)]
        start = spans[0][0][0]
        data = memoryview(read_range(self._store, tail.name, start, spans[-1][-1][1]))
        parts = [
            tail.decode_group(
                group, self._columns, [data[low - start : high - start] for low, high in span]
            )
            for group, span in zip(range(first, end), spans, strict=True)
        ]
        return concat_versions(parts, tail.footer.schema)


def read_range(store: Store, key: str, start: int, end: int) -> bytes:
    """Return a range that the object must have; if it ends before, it is damaged."""
    try:
        return store.get_range(key, start, end)
    except InvalidInputError as error:
        if error.kind is not Kind.INVALID_RANGE:
            raise
        raise corrupt(key, start, "the object ends too early") from error
