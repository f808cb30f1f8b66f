"""Skipping: which groups a scan with conditions need not read.

The bounds of its columns tell of a group that no row in it can match. That alone is not enough
to pass it by: its rows may stand in front of older ones that would match, and a patch may lie
on top of them. Passing it by changes nothing if of each other source one of these holds:

    it is newer than the group, and has no patches: what it has of a key counts anyway
    between the group's first and last key nothing in it can match either

For then, of a key in the group, the version that counts is either in a newer source, and found
there; or all that could come forward in its place cannot match, and are filtered out by whoever
asked. Where patches lie about, a row is put together from several versions. Its columns may each
come from another one, so it takes one condition that fails in all of them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reef.engine.reading.memtable import Moment
from reef.engine.reading.segments import SegmentStore
from reef.engine.where import Condition, Where
from reef.formats.batch import OpKind
from reef.formats.manifest import SegmentEntry
from reef.formats.segment_index import SegmentIndex
from reef.formats.versions import Versions

__all__ = ["Skipping"]

NOTHING: frozenset[int] = frozenset()


class Skipping:
    """What the sources of one scan may leave out: all of them are looked at together."""

    def __init__(
        self,
        where: Where | None,
        segments: SegmentStore,
        entries: Sequence[SegmentEntry],
        moments: Sequence[Moment],
    ) -> None:
        # A segment without rows has range tombstones only, which are always looked at.
        self._entries = [entry for entry in entries if entry.rows]
        self._segments = segments
        self._memory = [moment.rows for moment in moments if len(moment.rows)]
        self._wheres = self._alternatives(where)
        self._known: dict[tuple[int, str], _Groups] = {}
        self._in_memory: dict[tuple[int, int], list[bytes]] = {}

    def needless(self, entry: SegmentEntry) -> frozenset[int]:
        """Return the groups of a segment that need not be read."""
        if not self._wheres or not entry.rows:
            return NOTHING
        others = [other for other in self._entries if _may_matter(other, entry)]
        found: set[int] = set()
        for number in range(len(self._wheres)):
            groups = self._groups(number, entry)
            left = np.flatnonzero(~groups.matching).tolist()
            for other in others:
                below = self._groups(number, other)
                left = [group for group in left if not below.match(*groups.bounds(group))]
            for place, rows in enumerate(self._memory):
                if left and not _is_newer(rows, entry):
                    keys = self._keys_in_memory(number, place)
                    left = [group for group in left if not _within(keys, *groups.bounds(group))]
            found.update(left)
        return frozenset(found)

    def _alternatives(self, where: Where | None) -> list[Where]:
        """Return conditions of which any may fail, each of them in all sources alike."""
        if where is None or not where.conditions:
            return []
        patched = any(entry.patches for entry in self._entries)
        patched |= any(bool((rows.kinds == OpKind.PATCH).any()) for rows in self._memory)
        return [Where((condition,)) for condition in where.conditions] if patched else [where]

    def _groups(self, number: int, entry: SegmentEntry) -> "_Groups":
        known = self._known.get((number, entry.id))
        if known is None:
            tail = self._segments.tail(entry)
            matching = self._wheres[number].groups(tail.index, tail.footer.schema)
            known = _Groups(tail.index, matching, np.concatenate(([0], np.cumsum(matching))))
            self._known[number, entry.id] = known
        return known

    def _keys_in_memory(self, number: int, place: int) -> list[bytes]:
        """Return the keys of the rows in memory that match, in order."""
        keys = self._in_memory.get((number, place))
        if keys is None:
            rows = self._memory[place]
            masks = [_mask(condition, rows) for condition in self._wheres[number].conditions]
            keys = sorted(rows.keys.filter(reduce(pc.and_, masks)).to_pylist())
            self._in_memory[number, place] = keys
        return keys


@dataclass(frozen=True, slots=True)
class _Groups:
    """The groups of a segment, and which of them may have rows that match."""

    index: SegmentIndex
    matching: npt.NDArray[np.bool_]
    before: npt.NDArray[np.int64]
    """How many match before each group, and at the end of all."""

    def bounds(self, group: int) -> tuple[bytes, bytes]:
        return self.index.first_keys[group], self.index.last_keys[group]

    def match(self, low: bytes, high: bytes) -> bool:
        """Whether a group with keys from `low` to `high` may have rows that match."""
        first = bisect_left(self.index.last_keys, low)
        last = bisect_right(self.index.first_keys, high)
        return bool(first < last and self.before[last] > self.before[first])


def _may_matter(other: SegmentEntry, entry: SegmentEntry) -> bool:
    """Whether another segment may have older versions of the same keys, or patches on them."""
    apart = other.max_key < entry.min_key or entry.max_key < other.min_key
    newer = other.lsn_min > entry.lsn_max and not other.patches
    return other is not entry and not apart and not newer


def _is_newer(rows: Versions, entry: SegmentEntry) -> bool:
    return bool(rows.lsns.min() > entry.lsn_max and not (rows.kinds == OpKind.PATCH).any())


def _mask(condition: Condition, rows: Versions) -> pa.Array:
    """Return which rows match; of a condition on the key all of a key's rows are alike."""
    if condition.is_key:
        return pa.array(np.ones(len(rows), bool))
    column = rows.fields.get(condition.number)
    return condition.mask(pa.nulls(len(rows), condition.arrow) if column is None else column)


def _within(keys: list[bytes], low: bytes, high: bytes) -> bool:
    return bisect_left(keys, low) < bisect_right(keys, high)
