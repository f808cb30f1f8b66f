"""Reading segments: one GET for the tail, then one for each group that is needed.

Tails and decoded groups are kept in a cache that is bounded in bytes. An object that is
missing was swept, or the namespace was damaged; the caller knows which to suspect.
"""

from bisect import bisect_left
from dataclasses import dataclass, field

from reef.engine.cache import ByteCache
from reef.formats.filter import hash_key
from reef.formats.manifest import SegmentEntry
from reef.formats.segment_tail import SegmentTail, decode_tail
from reef.formats.versions import Versions
from reef.paths import Namespace
from reef.stores import Store

__all__ = ["Group", "SegmentStore"]


@dataclass(slots=True)
class Group:
    """A decoded group, and its keys as Python values once someone looked one up."""

    rows: Versions
    _keys: list[bytes] | None = field(default=None)

    def find(self, key: bytes) -> int | None:
        """Return the place of a key's newest version; None if the group does not have it."""
        if self._keys is None:
            self._keys = self.rows.keys.to_pylist()
        place = bisect_left(self._keys, key)
        return place if place < len(self._keys) and self._keys[place] == key else None


class SegmentStore:
    """The segments of one namespace, read through a cache."""

    def __init__(self, store: Store, namespace: Namespace, cache: ByteCache) -> None:
        self._store = store
        self._namespace = namespace
        self._cache = cache

    def tail(self, entry: SegmentEntry) -> SegmentTail:
        """Return all that is needed to plan reads of a segment."""
        return self._cache.get(("tail", entry.id), lambda: self._load_tail(entry))

    def group(self, entry: SegmentEntry, number: int) -> Group:
        """Return a group with all its columns."""
        return self._cache.get((entry.id, number), lambda: self._load_group(entry, number))

    def may_have(self, entry: SegmentEntry, key: bytes) -> bool:
        """Whether a look at the segment's groups could find the key."""
        return self.tail(entry).filter.may_have(hash_key(key))

    def group_of(self, entry: SegmentEntry, key: bytes) -> Group | None:
        """Return the one group that can have a key."""
        index = self.tail(entry).index
        number = bisect_left(index.last_keys, key)
        if number == len(index) or index.first_keys[number] > key:
            return None
        return self.group(entry, number)

    def _load_tail(self, entry: SegmentEntry) -> tuple[SegmentTail, int]:
        key = self._namespace.segment(entry.id)
        data = self._store.get_range(key, entry.size - entry.tail_bytes, entry.size)
        return decode_tail(data, entry.size, key), 2 * len(data)

    def _load_group(self, entry: SegmentEntry, number: int) -> tuple[Group, int]:
        tail = self.tail(entry)
        numbers = sorted(tail.footer.schema.types())
        spans = tail.ranges(number, numbers)
        blocks = self._store.get_ranges(self._namespace.segment(entry.id), spans)
        rows = tail.decode_group(number, numbers, blocks)
        size = rows.keys.nbytes + 40 * len(rows) + sum(a.nbytes for a in rows.fields.values())
        return Group(rows), size
