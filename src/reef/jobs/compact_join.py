"""Neighbours are joined by copying their groups as they are; only the tail is new.

    beginning | groups of the first, as they are | groups of the second | new filter, index, footer

The store puts the object together out of ranges (`Store.compose`): no value is decoded, encoded
or sent. The bytes are read once, for the new object's checksum and for the keys, which the filter
and the set hash are made from; every key block is checked on the way. That works where the
segments have one schema, store their own LSNs, and have no key in common nor a group that a cut
would split; where it turns out not to, the inputs are merged instead.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise

from reef.formats.coding import Buffer
from reef.formats.manifest import SegmentEntry
from reef.formats.schema import Schema
from reef.formats.segment_tail import SegmentTail
from reef.formats.segment_writer import SegmentWriter
from reef.formats.versions import Versions
from reef.jobs.compact_merge import Tally
from reef.jobs.compact_run import read_range
from reef.stores import Part, Store
from reef.stores.fetch import read_again
from reef.types import KeyRange

__all__ = ["Groups", "can_join", "join"]

READ_BYTES = 4 << 20
Groups = tuple[SegmentTail, range]


def can_join(
    entries: Sequence[SegmentEntry], tails: Sequence[SegmentTail], wanted: KeyRange, schema: Schema
) -> list[Groups] | None:
    """Return each input's groups in a range, in the order of keys; None if they must be merged."""
    for entry, tail in zip(entries, tails, strict=True):
        is_same = tail.footer.schema == schema
        if not is_same or entry.visible_lsn or tail.range_tombstones or tail.footer.tombstones:
            return None
    chosen = [(tail, _groups(tail, wanted)) for tail in tails]
    chosen = [(tail, groups) for tail, groups in chosen if groups]
    chosen.sort(key=lambda one: one[0].index.first_keys[one[1][0]])
    ends = [(t.index.first_keys[g[0]], t.index.last_keys[g[-1]]) for t, g in chosen]
    inside = all(wanted.has(key) for both in ends for key in both)
    apart = all(left[1] < right[0] for left, right in pairwise(ends))
    return chosen if chosen and inside and apart else None


def join(store: Store, key: str, writer: SegmentWriter, chosen: Sequence[Groups]) -> Tally:
    """Write a segment out of the groups of others; the writer then has its summary."""
    parts: list[Part] = [writer.beginning()]
    tally = Tally()
    for tail, groups in chosen:
        parts.append((tail.name, tail.index.span(groups[0])[0], tail.index.span(groups[-1])[1]))
        for group, blocks in _read(store, tail, groups):
            rows = _keys(tail, group, blocks)
            writer.copied(tail.index.entry(group), rows, blocks)
            tally.rows += len(rows)
    parts.append(writer.ending())
    store.compose(key, parts)
    return tally


def _groups(tail: SegmentTail, wanted: KeyRange) -> range:
    index = tail.index
    first = bisect_left(index.last_keys, wanted.start)
    end = len(index) if wanted.end is None else bisect_left(index.first_keys, wanted.end)
    return range(first, end)


def _read(store: Store, tail: SegmentTail, groups: range) -> Iterator[tuple[int, Buffer]]:
    """Yield the bytes of groups, a few at a time with one request."""
    at = groups.start
    while at < groups.stop:
        start, end = tail.index.span(at)[0], at + 1
        while end < groups.stop and tail.index.span(end)[1] - start <= READ_BYTES:
            end += 1
        spans = [tail.index.span(group) for group in range(at, end)]

        def checked(start: int = start, spans: Sequence[tuple[int, int]] = spans) -> list[Buffer]:
            data = memoryview(read_range(store, tail.name, start, spans[-1][1]))
            return [data[low - start : high - start] for low, high in spans]

        yield from zip(range(at, end), read_again(checked), strict=True)
        at = end


def _keys(tail: SegmentTail, group: int, blocks: Buffer) -> Versions:
    return tail.decode_keys(group, memoryview(blocks)[: int(tail.index.key_blocks[group])])
