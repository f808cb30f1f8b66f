"""Reading segments: one GET for the tail, then one for what is needed of its groups.

Tails, key blocks and column blocks are kept, decoded, in a cache that is bounded in bytes:
each on its own, so that a scan of two columns neither loads nor keeps the others. What is
missing of several groups comes with one ranged GET. An object that is missing was swept, or
the namespace was damaged; the caller knows which to suspect.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pyarrow as pa

from reef.engine.reading.cache import ByteCache
from reef.engine.reading.merge import keys_differ
from reef.engine.reading.tombstones import RangeTombstones
from reef.errors import InvalidInputError, Kind
from reef.formats.batch import concat_numbered
from reef.formats.coding import Buffer, corrupt
from reef.formats.filter import hash_key
from reef.formats.manifest import SegmentEntry
from reef.formats.segment_index import KEYS
from reef.formats.segment_tail import SegmentTail, decode_tail
from reef.formats.versions import Versions, concat_versions
from reef.paths import Namespace
from reef.stores import Store
from reef.stores.fetch import read_again

__all__ = ["Group", "SegmentStore"]

FRAGMENT_BYTES = 200
"""About what a range tombstone takes in memory beside its keys."""
GROUP_BYTES, SPAN_BYTES = 160, 140
"""About what a group takes in an index beside its keys, and what each of its blocks does."""


@dataclass(slots=True)
class Group:
    """The rows of a group, and their keys as Python values once someone looked one up."""

    rows: Versions
    block: "Group | None" = None
    """The cached key block that this one was made from."""
    _keys: list[bytes] | None = field(default=None)
    _distinct: bool | None = None

    @property
    def keys(self) -> list[bytes]:
        if self.block is not None:
            return self.block.keys
        if self._keys is None:
            self._keys = self.rows.keys.to_pylist()
        return self._keys

    @property
    def distinct(self) -> bool:
        """Whether no key comes twice; scans from memory ask it again and again."""
        if self._distinct is None:
            self._distinct = keys_differ(self.rows.keys)
        return self._distinct

    def places(self, key: bytes) -> range:
        """Return where a key's versions stand, newest first."""
        keys = self.keys
        first = last = bisect_left(keys, key)
        while last < len(keys) and keys[last] == key:
            last += 1
        return range(first, last)


class SegmentStore:
    """The segments of one namespace, read through a cache."""

    reads_ahead = False
    """Whether it makes use of being told what comes (`expect`)."""

    def __init__(self, store: Store, namespace: Namespace, cache: ByteCache) -> None:
        self._store = store
        self.namespace = namespace
        self._cache = cache

    def tail(self, entry: SegmentEntry) -> SegmentTail:
        """Return all that is needed to plan reads of a segment."""
        return self._cache.get(("tail", entry.id), lambda: self._load_tail(entry))

    def deletes(self, entry: SegmentEntry) -> RangeTombstones:
        """Return a segment's range tombstones to be searched, at the LSN at which they count."""
        stored = self.tail(entry).range_tombstones if entry.tombstones else ()
        if not stored:
            return RangeTombstones()

        def load() -> tuple[RangeTombstones, int]:
            lsn = entry.visible_lsn  # those of an ingest store 0
            found = RangeTombstones.of([replace(t, lsn=lsn) for t in stored] if lsn else stored)
            return found, sum(FRAGMENT_BYTES + len(t.start) + len(t.end) for t in found)

        return self._cache.get(("deletes", entry.id, entry.visible_lsn), load)

    def may_have(self, entry: SegmentEntry, key: bytes) -> bool:
        """Whether a look at the segment's groups could find the key."""
        return self.tail(entry).filter.may_have(hash_key(key))

    def group_of(self, entry: SegmentEntry, key: bytes) -> Group | None:
        """Return the one group that can have a key."""
        index = self.tail(entry).index
        number = bisect_left(index.last_keys, key)
        if number == len(index) or index.first_keys[number] > key:
            return None
        return self.groups(entry, [number])[0]

    def groups(
        self, entry: SegmentEntry, numbers: Sequence[int], columns: Iterable[int] | None = None
    ) -> list[Group]:
        """Return groups with these columns, all by default; one request for what is missing."""
        tail = self.tail(entry)
        wanted = _wanted(tail, columns)
        found, _ = self._blocks(entry, tail, numbers, wanted)
        return [_assembled(group, wanted, found) for group in numbers]

    def rows(
        self, entry: SegmentEntry, numbers: Sequence[int], columns: Iterable[int] | None = None
    ) -> Versions:
        """Return the rows of several groups as one piece: what scans read."""
        tail = self.tail(entry)
        wanted = _wanted(tail, columns)
        found, is_warm = self._blocks(entry, tail, numbers, wanted)
        blocks: list[Group] = [found[group, KEYS] for group in numbers]
        parts = [block.rows for block in blocks]
        keys = concat_versions(parts, tail.footer.schema)
        # What was just read is compared in larger pieces, by whoever merges it.
        if is_warm and all(block.distinct for block in blocks) and _apart(tail, numbers):
            keys = replace(keys, distinct=True)
        types = tail.footer.schema.types()
        columns_of = [
            (len(part), {n: found[group, n] for n in wanted if (group, n) in found})
            for group, part in zip(numbers, parts, strict=True)
        ]
        return keys.with_fields(concat_numbered(columns_of, types))

    def expect(
        self, entry: SegmentEntry, numbers: Sequence[int], columns: Iterable[int] | None = None
    ) -> None:
        """Be told that `rows` will be asked for soon, with these very arguments."""

    def _spans(
        self, entry: SegmentEntry, numbers: Sequence[int], columns: Iterable[int] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return what `rows` reads of which object, as long as nothing of it is known."""
        tail = self.tail(entry)
        blocks = _blocks_of(tail, numbers, _wanted(tail, columns))
        return self.namespace.segment(entry.id), [_span(tail, *block) for block in blocks]

    def _blocks(
        self,
        entry: SegmentEntry,
        tail: SegmentTail,
        numbers: Sequence[int],
        columns: Sequence[int],
    ) -> tuple[dict[tuple[int, int], Any], bool]:
        """Return key blocks and columns of groups, where they have them, and whether all of it
        was in memory.
        """
        blocks = _blocks_of(tail, numbers, columns)
        known = self._cache.peek_many([(entry.id, *block) for block in blocks])
        found = dict(zip(blocks, known, strict=True))
        missing = [block for block in blocks if found[block] is None]
        if missing:
            fetched = dict(zip(missing, self._fetch(entry, tail, missing), strict=True))
            found |= fetched
            if self._cache.bytes_max:
                self._cache.put_many(
                    [
                        ((entry.id, *block), value, _bytes_of(value))
                        for block, value in fetched.items()
                    ]
                )
        return found, not missing

    def _fetch(
        self, entry: SegmentEntry, tail: SegmentTail, blocks: Sequence[tuple[int, int]]
    ) -> list[Any]:
        """Read and decode blocks; a wrong checksum is read again, as it may be the network's."""
        key = self.namespace.segment(entry.id)
        spans = [_span(tail, *block) for block in blocks]

        def read() -> list[Any]:
            with _whole(key, max(spans)[0]):
                fetched = self._read_ranges(key, spans)
            return [_decoded(tail, *b, data) for b, data in zip(blocks, fetched, strict=True)]

        return read_again(read, lambda: self._store.forget(key, spans))

    def _read_ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> Sequence[Buffer]:
        return self._store.get_ranges(key, spans)

    def _load_tail(self, entry: SegmentEntry) -> tuple[SegmentTail, int]:
        key = self.namespace.segment(entry.id)
        start = entry.size - entry.tail_bytes

        def read() -> SegmentTail:
            with _whole(key, start):
                fetched = self._store.get_range(key, start, entry.size)
            return decode_tail(fetched, entry.size, key)

        found = read_again(read, lambda: self._store.forget(key, [(start, entry.size)]))
        return found, entry.tail_bytes + _memory_of(found)


@contextmanager
def _whole(key: str, offset: int) -> Iterator[None]:
    """Tell of an object that ends before a range that it must have: it is damaged."""
    try:
        yield
    except InvalidInputError as error:
        if error.kind is not Kind.INVALID_RANGE:
            raise
        raise corrupt(key, offset, "the object ends too early") from error


def _apart(tail: SegmentTail, numbers: Sequence[int]) -> bool:
    """Whether groups follow each other without a key in common."""
    first, last = tail.index.first_keys, tail.index.last_keys
    return all(last[group] < first[following] for group, following in pairwise(numbers))


def _memory_of(tail: SegmentTail) -> int:
    """Return about what a tail takes: stored, its index may have been compressed to very little."""
    index = tail.index
    keys = sum(map(len, index.first_keys)) + sum(map(len, index.last_keys))
    bounds = [*index.smallest.values(), *index.largest.values()]
    group = GROUP_BYTES + SPAN_BYTES * (1 + len(index.column_blocks))
    deletes = sum(FRAGMENT_BYTES + len(t.start) + len(t.end) for t in tail.range_tombstones)
    return keys + group * len(index) + sum(int(array.nbytes) for array in bounds) + deletes


def _wanted(tail: SegmentTail, columns: Iterable[int] | None) -> list[int]:
    return sorted(tail.footer.schema.types() if columns is None else columns)


def _blocks_of(
    tail: SegmentTail, numbers: Sequence[int], columns: Sequence[int]
) -> list[tuple[int, int]]:
    """Return which blocks groups have of their keys and these columns, in the segment's order."""
    of_group = tail.index.column_range
    wanted = (KEYS, *columns)
    return [(g, n) for g in sorted(numbers) for n in wanted if n == KEYS or of_group(g, n)]


def _assembled(group: int, columns: Iterable[int], found: dict[tuple[int, int], Any]) -> Group:
    keys: Group = found[group, KEYS]
    fields = {n: found[group, n] for n in columns if (group, n) in found}
    return Group(keys.rows.with_fields(fields), keys)


def _span(tail: SegmentTail, group: int, number: int) -> tuple[int, int]:
    found = (
        tail.index.key_range(group) if number == KEYS else tail.index.column_range(group, number)
    )
    assert found is not None  # only blocks that are present are asked for
    return found


def _decoded(tail: SegmentTail, group: int, number: int, data: Buffer) -> Group | pa.Array:
    if number == KEYS:
        return Group(tail.decode_keys(group, data))
    return tail.decode_column(group, number, data)


def _bytes_of(value: Group | pa.Array) -> int:
    if isinstance(value, Group):
        return int(2 * value.rows.keys.nbytes + 60 * len(value.rows))
    return int(value.nbytes)
