"""Groups of a segment that a scan with conditions need not read.

The bounds of its columns show that no row of a group can match. That alone is not enough to skip
it: its rows may hide older ones that would match, and a patch may change them. Skipping the group
changes nothing if one of these holds for each other source:

    it is newer than the group, and has no patches: its versions of a key hide the group's anyway
    between the group's first and last key nothing in it can match either

Then the newest version of a key in the group is either in a newer source, and found there; or none
of the versions that could come forward can match, and the caller filters them out. If there are
patches, a row is made of several versions. Its columns may each come from another one, so one
condition must fail in all of them. A merge computes values that no version has: it always matches.

Filter indexes exclude more groups. They return a superset of the rows that meet a condition:
predicates on columns without an index count as met. None means that the indexes exclude nothing at
all, so the rows have to be read. Whether a row really meets the condition is decided by the
condition itself, once the row is read.
"""

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap

from reef.engine.read.segments import SegmentStore
from reef.engine.where import ArrowFilter, Bounds, Op, Predicate, Where, bound_array
from reef.errors import CorruptionError
from reef.formats.filter_index import RUN_ROWS, FilterDirectory, FilterIndex
from reef.formats.manifest import IndexKind, SegmentEntry
from reef.formats.segment import SegmentTail
from reef.formats.segment_index import SegmentIndex
from reef.formats.versions import Versions
from reef.formats.wal_object import OpKind
from reef.runtime import Runtime

INDEXED_GROUPS_MIN = 4
"""A scan of fewer groups does not read an index for it."""
INTERVALS = (Op.EQ, Op.LT, Op.LE, Op.GT, Op.GE, Op.LIKE)
"""Operators whose values follow each other in sorted order, NaN excluded."""
SCANNED_MIN, SCANNED_SHARE = 4 * RUN_ROWS, 0.1
"""A scan for more of a segment's rows reads nearly all groups, and no index for it."""
NOTHING: frozenset[int] = frozenset()

_log = logging.getLogger(__name__)


def filter_indexes(segments: SegmentStore, entry: SegmentEntry) -> dict[int, FilterIndex]:
    """Return the filter indexes of a segment, by column; those of dropped ones are as good."""
    tail = segments.tail(entry)
    found = {}
    for number, place in enumerate(tail.footer.indexes):
        if place.is_built and place.spec.kind is IndexKind.FILTER:
            directory = _directory(segments, tail, number)
            read = partial(segments.index_parts, entry, place)
            found[place.spec.column] = FilterIndex(directory, read, is_checked=True)
    return found


def _directory(segments: SegmentStore, tail: SegmentTail, number: int) -> FilterDirectory:
    """Return the directory of an index, decoded once."""
    offset = tail.footer.indexes[number].directory.offset

    def load() -> tuple[FilterDirectory, int]:
        directory = FilterDirectory.decode(tail.directory(number), tail.name, offset)
        return directory, directory.values.nbytes + 2 * directory.counts.nbytes

    return segments.cache.get(("filter", tail.name, offset), load)


def rows_by_index(
    segments: SegmentStore, runtime: Runtime, entries: Sequence[SegmentEntry], where: Where
) -> list[BitMap | CorruptionError | None]:
    """Return the rows of each segment that may meet a condition, None if its indexes do not say;
    or what is wrong with them. What has to be read is read in one round, for all segments.
    """
    found: list[dict[int, FilterIndex] | CorruptionError] = []
    for entry in entries:
        try:
            found.append(filter_indexes(segments, entry))
        except CorruptionError as error:
            found.append(error)
    missing = [
        (place, index, parts)
        for place, indexes in enumerate(found)
        if isinstance(indexes, dict)
        for index, parts in _missing_parts(where, indexes)
    ]

    def load(item: tuple[int, FilterIndex, list[int]]) -> CorruptionError | None:
        try:
            item[1].load(item[2])
        except CorruptionError as error:
            return error
        return None

    waits = segments.waits and len(missing) > 1
    loaded = runtime.map(load, missing) if waits else list(map(load, missing))
    for (place, _, _), damage in zip(missing, loaded, strict=True):
        if damage is not None:
            found[place] = damage
    return [
        indexes if isinstance(indexes, CorruptionError) else _matching(where, indexes)
        for indexes in found
    ]


def _matching(where: Where, indexes: dict[int, FilterIndex]) -> BitMap | CorruptionError | None:
    try:
        return matching_rows(where, indexes)
    except CorruptionError as error:
        return error


def _missing_parts(
    where: Where, indexes: dict[int, FilterIndex]
) -> list[tuple[FilterIndex, list[int]]]:
    """Return the parts of indexes that a condition needs, without those in memory."""
    needed: dict[int, list[int]] = {}

    def note(number: int, predicates: Sequence[Predicate]) -> BitMap:
        whole, some = _selected(predicates, indexes[number])
        needed.setdefault(number, []).extend((*whole, *some))
        return BitMap()

    _resolve(where, indexes, note)
    missing = [(indexes[n], indexes[n].missing(sorted(set(parts)))) for n, parts in needed.items()]
    return [(index, parts) for index, parts in missing if parts]


def groups_with_matches(
    segments: SegmentStore, entry: SegmentEntry, where: Where
) -> npt.NDArray[np.bool_] | None:
    """Return which groups of a segment have rows that may meet a condition, for a scan.

    None if the segment has no index that says so. An index that cannot be read is as good as none.
    """
    tail = segments.tail(entry)
    try:
        indexes = filter_indexes(segments, entry)
        most = rows_at_most(where, indexes)
        if most is None or most > max(SCANNED_MIN, SCANNED_SHARE * entry.rows):
            return None
        rows = matching_rows(where, indexes)
    except CorruptionError as error:
        _log.warning("segment %s is scanned without its indexes: %s", entry.id, error)
        return None
    if rows is None:
        return None
    ends = np.cumsum(tail.index.rows)
    counts = np.array([rows.range_cardinality(start, end) for start, end in _spans(ends)])
    return np.asarray(counts > 0)


def _spans(ends: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    bounds = ends.tolist()
    return list(zip([0, *bounds[:-1]], bounds, strict=True))


def matching_rows(where: Where, indexes: dict[int, FilterIndex]) -> BitMap | None:
    """Return the rows that may meet a condition; None if the indexes say nothing about it."""

    def evaluate(number: int, predicates: Sequence[Predicate]) -> BitMap:
        index = indexes[number]
        whole, some = _selected(predicates, index)
        return index.rows(whole, some, lambda values: _all(predicates, values))

    return _resolve(where, indexes, evaluate)


def rows_at_most(where: Where, indexes: dict[int, FilterIndex]) -> int | None:
    """Return about how many rows meet a condition, at most, by the directories alone; None if the
    indexes say nothing about it.
    """

    def of_leaf(leaf: Predicate | ArrowFilter) -> int | None:
        if isinstance(leaf, ArrowFilter) or leaf.is_key or leaf.number not in indexes:
            return None
        index = indexes[leaf.number]
        whole, some = _selected([leaf], index)
        return int(index.directory.counts[[*whole, *some]].sum())

    def both(one: int | None, other: int | None) -> int | None:
        return one if other is None else other if one is None else min(one, other)

    def either(one: int | None, other: int | None) -> int | None:
        return None if one is None or other is None else one + other

    return where.fold(of_leaf, both, either, lambda known: None if known else 0)


def count_matching(where: Where, indexes: dict[int, FilterIndex], rows: int) -> int | None:
    """Return how many of a segment's rows meet a condition whose columns all have indexes.

    Of predicates on one column the directory knows most. None if they are on several, and so
    many rows may match that a scan reads them faster.
    """

    def of_leaf(leaf: Predicate | ArrowFilter) -> dict[int, list[Predicate]] | None:
        return {leaf.number: [leaf]} if isinstance(leaf, Predicate) else None

    def both(one: Any, other: Any) -> Any:
        if one is None or other is None:
            return None
        return {n: [*one.get(n, ()), *other.get(n, ())] for n in one.keys() | other.keys()}

    predicates = where.fold(of_leaf, both, lambda _one, _other: None, lambda _known: None)
    if predicates is not None and len(predicates) == 1:
        ((number, some),) = predicates.items()
        index = indexes[number]
        whole, partly = _selected(some, index)
        count = int(index.directory.counts[whole].sum())
        return count + len(index.rows([], partly, lambda values: _all(some, values)))
    most = rows_at_most(where, indexes)
    if most is None or most > max(SCANNED_MIN, SCANNED_SHARE * rows):
        return None
    found = matching_rows(where, indexes)
    return None if found is None else len(found)


@dataclass(frozen=True, slots=True)
class _Rows:
    """A conjunction: predicates that are not evaluated yet, by column, and rows."""

    predicates: dict[int, list[Predicate]]
    rows: BitMap | None = None


def _resolve(
    where: Where,
    indexes: dict[int, FilterIndex],
    evaluate: Callable[[int, Sequence[Predicate]], BitMap],
) -> BitMap | None:
    """Combine what `evaluate` returns for the predicates on each column, those of an AND at once:
    of a range, neither end is evaluated without the other.
    """

    def of_leaf(leaf: Predicate | ArrowFilter) -> _Rows:
        if isinstance(leaf, ArrowFilter) or leaf.is_key or leaf.number not in indexes:
            return _Rows({})
        return _Rows({leaf.number: [leaf]})

    def both(one: _Rows, other: _Rows) -> _Rows:
        numbers = one.predicates.keys() | other.predicates.keys()
        predicates = {
            n: [*one.predicates.get(n, ()), *other.predicates.get(n, ())] for n in sorted(numbers)
        }
        return _Rows(predicates, _both(one.rows, other.rows))

    def resolved(rows: _Rows) -> BitMap | None:
        return reduce(_both, [evaluate(n, some) for n, some in rows.predicates.items()], rows.rows)

    def either(one: _Rows, other: _Rows) -> _Rows:
        return _Rows({}, _either(resolved(one), resolved(other)))

    def of_constant(known: bool) -> _Rows:
        return _Rows({}, None if known else BitMap())

    return resolved(where.fold(of_leaf, both, either, of_constant))


def _both(one: BitMap | None, other: BitMap | None) -> BitMap | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _either(one: BitMap | None, other: BitMap | None) -> BitMap | None:
    return None if one is None or other is None else one | other


def _all(predicates: Sequence[Predicate], values: pa.Array) -> pa.Array:
    """Return which values meet all predicates."""
    return reduce(pc.and_, [predicate.mask(values) for predicate in predicates])


def _selected(predicates: Sequence[Predicate], index: FilterIndex) -> tuple[list[int], list[int]]:
    """Return the parts of which all rows meet predicates, and those of which some may."""
    directory, nulls = index.directory, index.directory.nulls
    is_null = [predicate.op is Op.IS_NULL for predicate in predicates]
    if any(is_null):
        return ([nulls] if all(is_null) else []), []
    if not directory.runs:
        return np.flatnonzero(_all(predicates, directory.values)).tolist(), []
    possible, whole = np.ones(nulls, bool), np.ones(nulls, bool)
    for predicate in predicates:
        if predicate.op is Op.NOT_NULL:
            continue
        possible &= _runs(predicate, index)
        # Of sorted values, all meet such a comparison if the first and the last do.
        ends = np.asarray(predicate.mask(directory.values)).reshape(-1, 2).all(axis=1)
        whole &= ends & (predicate.op in INTERVALS)
    return np.flatnonzero(whole & possible).tolist(), np.flatnonzero(possible & ~whole).tolist()


def _runs(predicate: Predicate, index: FilterIndex) -> npt.NDArray[np.bool_]:
    """Return which runs may have values that meet a predicate."""
    low, high = index.directory.bounds()
    bounds = Bounds(
        len(low),
        bound_array(low, predicate.arrow),
        bound_array(high, predicate.arrow),
        no_null=np.ones(len(low), bool),
    )
    possible = np.asarray(predicate.can_match(bounds), bool)
    if pa.types.is_floating(high.type):  # NaN sorts last, and is no bound
        possible |= pc.is_nan(high).to_numpy(zero_copy_only=False)
    return possible


class Skipping:
    """The groups that the sources of one scan may skip, decided for all sources together."""

    def __init__(
        self,
        where: Where | None,
        segments: SegmentStore,
        entries: Sequence[SegmentEntry],
        memory: Sequence[Versions],
    ) -> None:
        # A segment without rows has range tombstones only, which are always read.
        self._entries = [entry for entry in entries if entry.rows]
        self._segments = segments
        self._bytes: int = sum(map(attrgetter("size"), entries))
        self._memory = [rows for rows in memory if len(rows)]
        self._wheres = self._alternatives(where)
        self._known: dict[tuple[int, str], _SegmentGroups] = {}
        self._in_memory: dict[tuple[int, int], list[bytes]] = {}

    def bytes_kept(self, entry: SegmentEntry) -> int:
        """Return how much of a segment the scan keeps in memory."""
        return self._segments.bytes_kept(self._bytes) * entry.size // max(1, self._bytes)

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
        """Return conditions; a group is skipped if one of them fails in all sources."""
        if where is None or not where.conditions:
            return []
        patched = any(entry.patches for entry in self._entries)
        patched |= any(rows.has_partial for rows in self._memory)
        return where.clauses() if patched else [where]

    def _groups(self, number: int, entry: SegmentEntry) -> "_SegmentGroups":
        known = self._known.get((number, entry.id))
        if known is None:
            tail = self._segments.tail(entry)
            matching = self._wheres[number].groups(tail.index, tail.footer.schema)
            if tail.footer.indexes and matching.sum() >= INDEXED_GROUPS_MIN:
                matching = matching & self._by_index(number, entry)
            if tail.footer.merges:  # the bounds of operands say nothing about sums and unions
                matching = np.ones_like(matching)
            known = _SegmentGroups(tail.index, matching, np.concatenate(([0], np.cumsum(matching))))
            self._known[number, entry.id] = known
        return known

    def _by_index(self, number: int, entry: SegmentEntry) -> npt.NDArray[np.bool_]:
        """Return which groups have matching rows, by the filter indexes of a segment."""
        found = groups_with_matches(self._segments, entry, self._wheres[number])
        return np.ones(len(self._segments.tail(entry).index), bool) if found is None else found

    def _keys_in_memory(self, number: int, place: int) -> list[bytes]:
        """Return the keys of the rows in memory that match, in order."""
        keys = self._in_memory.get((number, place))
        if keys is None:
            rows = self._memory[place]
            mask = self._wheres[number].fold(
                lambda leaf: _mask(leaf, rows),
                pc.and_,
                pc.or_,
                lambda known: pa.array(np.full(len(rows), known)),
            )
            mask = pc.or_(mask, pa.array(rows.kinds == OpKind.MERGE))
            keys = sorted(rows.keys.filter(mask).to_pylist())
            self._in_memory[number, place] = keys
        return keys


@dataclass(frozen=True, slots=True)
class _SegmentGroups:
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
    return bool(rows.lsns.min() > entry.lsn_max and not rows.has_partial)


def _mask(condition: Predicate | ArrowFilter, rows: Versions) -> pa.Array:
    """Return which rows may match; of a condition on the key all of a key's rows are alike."""
    if isinstance(condition, ArrowFilter) or condition.is_key:
        return pa.array(np.ones(len(rows), bool))
    column = rows.fields.get(condition.number)
    return condition.mask(pa.nulls(len(rows), condition.arrow) if column is None else column)


def _within(keys: list[bytes], low: bytes, high: bytes) -> bool:
    return bisect_left(keys, low) < bisect_right(keys, high)
