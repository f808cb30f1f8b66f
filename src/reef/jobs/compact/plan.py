"""Planners: which segments to merge next. Pure functions from a manifest's segments to one job.

*Tiered*: in the lowest level whose smallest segments add up to the level's threshold, those are
merged into the next level. Rows are rewritten seldom; reads touch more segments. Large loaded
segments that overlap nothing are moved unchanged.

*Leveled*: level 0 is merged within itself while it is small; once it holds as much as one large
segment, it is merged with all overlapping segments into level 1, whose segments do not overlap.
Neighbours in level 1 that are too small are joined. Rows are rewritten more often, and a key is in
at most one segment of level 1.

With either of them, segments that get no search index are merged once they have many rows: they may
be few bytes, and writers wait while searches would have to read too many rows one by one.

Reads do not depend on levels: every version has its LSN. Any choice of inputs gives the same rows,
and a namespace may change its strategy at any time; a planner that finds overlaps in its levels
merges them. The choice only decides which versions can be dropped (`reef.jobs.compact.merge`).

Segments that a branch reads from its parent (`home`) are never inputs.

**Range tombstones** are cut into fragments and clipped to a task. Of several over the same keys the
newest hides everything that the others hide. A fragment is kept only where a segment outside of the
merge may have an older version: only there does it still hide a row (H34). Cuts are at keys, where
one fragment ends and the next begins (H36).

**Order of runs.** Rows of a few sorted runs are ordered by numbers instead of keys: the eight bytes
behind the common prefix as an integer, in a stable sort that detects the runs, some forty times
faster than a sort of keys. Only rows with equal numbers are sorted by key, LSN and sequence.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reef.config import CompactSettings
from reef.engine.read.merge import fragments, sorted_places
from reef.errors import ErrorKind, InvalidInputError
from reef.formats.coding import shared_bytes
from reef.formats.manifest import SegmentEntry
from reef.formats.versions import RangeTombstone, Versions
from reef.manifest.edits import by_key, is_plain, overlapping_groups, replace_level
from reef.types import KeyRange

Segments = Sequence[SegmentEntry]


@dataclass(frozen=True, slots=True)
class CompactPlan:
    """One job: segments to merge or join, and segments to move unchanged, into a level."""

    level: int
    inputs: tuple[SegmentEntry, ...]
    moved: tuple[SegmentEntry, ...] = ()
    """Overlapping nothing: only their level changes."""
    join: bool = False
    """Whether the inputs are neighbours, to be put together without decoding them."""
    cuts: tuple[bytes, ...] = ()
    """Keys at which an output must begin, so that none overlaps a segment that is no input."""
    why: str = ""

    @property
    def bytes(self) -> int:
        return sum(map(data_bytes, self.inputs))

    def outputs(self, settings: CompactSettings) -> int:
        """Return the number of output segments."""
        rows = sum(segment.rows for segment in self.inputs)
        by_rows = -(-rows // settings.segment_rows_max)
        if self.join:
            return max(2 if self.bytes > settings.segment_bytes_max else 1, by_rows)
        least = -(-self.bytes // settings.segment_bytes_max)
        return max(1, least, by_rows, round(self.bytes / settings.segment_bytes))


Planner = Callable[[Segments, CompactSettings], CompactPlan | None]


def strategy(name: str) -> Planner:
    """Return a planner by its name."""
    if not isinstance(name, str) or name not in STRATEGIES:
        raise InvalidInputError(
            f"there is no strategy {name!r}",
            kind=ErrorKind.INVALID_OPTION,
            hint=f"There are: {', '.join(STRATEGIES)}",
        )
    return STRATEGIES[name]


# --- tiered ---------------------------------------------------------------------------


def plan_tiered(segments: Segments, settings: CompactSettings) -> CompactPlan | None:
    """Merge the smallest segments of a level that together cross its threshold."""
    ours = [segment for segment in segments if segment.home is None]
    for level in sorted({segment.level for segment in ours}):
        threshold = settings.tier_bytes * settings.tier_growth**level
        smallest = sorted(
            (s for s in ours if s.level == level), key=lambda s: (data_bytes(s), s.lsn_max, s.id)
        )
        chosen = _crossing(smallest, threshold, settings)
        if chosen:
            why = f"{len(chosen)} segments of level {level} cross {threshold} bytes"
            return _merge_tier(chosen, level + 1, why, settings)
        if len(smallest) > settings.inputs_max:
            # Too many for reads, and too small for the next level.
            why = f"more than {settings.inputs_max} segments in level {level}"
            fewer = _merge(smallest[: settings.inputs_max], level, why)
            if 2 * fewer.outputs(settings) <= settings.inputs_max:
                return fewer
    return None


def _crossing(smallest: Segments, threshold: int, settings: CompactSettings) -> Segments:
    """Return the smallest segments whose sum crosses the threshold; none if it does not."""
    total = 0
    for count, segment in enumerate(smallest, start=1):
        total += data_bytes(segment)
        if total >= threshold and count >= settings.tier_segments_min:
            return smallest[:count]
    return ()


def _merge_tier(chosen: Segments, level: int, why: str, settings: CompactSettings) -> CompactPlan:
    """Merge overlapping segments; large loaded ones that overlap nothing are moved.

    A load is already sorted and cut into segments: merging them would rewrite all for nothing.
    """
    good_bytes = settings.tier_bytes // settings.tier_segments_min
    lone = [group[0] for group in overlapping_groups(chosen) if len(group) == 1]
    moved = [s for s in lone if s.visible_lsn and is_plain(s) and data_bytes(s) >= good_bytes]
    if not moved:
        return _merge(chosen, level, why)
    going = {segment.id for segment in moved}
    inputs = [segment for segment in chosen if segment.id not in going]
    if len(inputs) == 1:  # it waits for company
        inputs = []
    return CompactPlan(
        level, tuple(inputs), tuple(replace_level(segment, level) for segment in moved), why=why
    )


# --- leveled --------------------------------------------------------------------------


def plan_leveled(segments: Segments, settings: CompactSettings) -> CompactPlan | None:
    """Merge down level 0, or within it; mend and join level 1. The first that is due."""
    ours = [segment for segment in segments if segment.home is None]
    zero = [segment for segment in ours if segment.level == 0]
    one = sorted((s for s in ours if s.level > 0), key=by_key)
    return (
        _merge_down(zero, one, settings)
        or _merge_level0(zero, settings)
        or _separate(one)
        or _join_neighbours(one, settings)
    )


def _merge_down(zero: Segments, one: Segments, settings: CompactSettings) -> CompactPlan | None:
    """Merge level 0 with the overlapping part of level 1; move segments without overlap."""
    size = sum(map(data_bytes, zero))
    if size < settings.level0_bytes and not _is_crowded(zero, settings):
        return None
    chosen = sorted(zero, key=lambda s: (s.lsn_max, s.id))[: settings.inputs_max]
    groups = overlapping_groups([*chosen, *one])
    down = {segment.id for segment in chosen}
    groups = [group for group in groups if any(segment.id in down for segment in group)]
    moved = [group[0] for group in groups if len(group) == 1 and is_plain(group[0])]
    kept = {segment.id for segment in moved}
    inputs = [s for group in groups for s in group if s.id not in kept]
    why = f"level 0 holds {size} bytes in {len(zero)} segments"
    down |= {segment.id for segment in inputs}
    staying = [*moved, *(segment for segment in one if segment.id not in down)]
    return CompactPlan(
        1,
        tuple(inputs),
        tuple(replace_level(s, 1) for s in moved),
        cuts=_cuts_around(inputs, staying),
        why=why,
    )


def _cuts_around(inputs: Segments, staying: Segments) -> tuple[bytes, ...]:
    """Return the keys where outputs must begin, so that none overlaps a segment that stays."""
    firsts = sorted(segment.min_key for segment in staying)
    cuts = []
    for before, after in pairwise(overlapping_groups(inputs)):
        end, start = max(segment.max_key for segment in before), after[0].min_key
        if bisect_left(firsts, end) < bisect_left(firsts, start):
            cuts.append(start)
    return tuple(cuts)


def _is_crowded(zero: Segments, settings: CompactSettings) -> bool:
    """Whether level 0 has too many segments, and to merge them among themselves would not help.

    Rows that are small come to `segment_rows_max` long before they come to any size.
    """
    merged = _merge_level0(zero, settings)
    return merged is not None and 2 * merged.outputs(settings) > len(merged.inputs)


def _merge_level0(zero: Segments, settings: CompactSettings) -> CompactPlan | None:
    if len(zero) < settings.level0_segments_max:
        return None
    smallest = sorted(zero, key=lambda s: (data_bytes(s), s.lsn_max, s.id))
    return _merge(
        _take_similar(smallest, settings.inputs_max), 0, f"{len(zero)} segments in level 0"
    )


def _take_similar(smallest: Segments, count_max: int) -> Segments:
    """Return the smallest segments, up to one that is far larger than those before it.

    Merged each time, its bytes would be rewritten for every few new ones.
    """
    total = 0
    for count, segment in enumerate(smallest):
        if count >= 2 and data_bytes(segment) > 2 * total:
            return smallest[:count]
        total += data_bytes(segment)
    return smallest[:count_max]


def _separate(one: Segments) -> CompactPlan | None:
    """Merge segments of level 1 that overlap because another strategy was used before."""
    for group in overlapping_groups(one):
        if len(group) > 1:
            return _merge(group, 1, f"{len(group)} segments of level 1 overlap")
    return None


def _join_neighbours(one: Segments, settings: CompactSettings) -> CompactPlan | None:
    """Join a segment that is too small with the next one; the last, with the one before.

    A segment with deletes is merged instead: most of them can be dropped.
    """
    for left, right in pairwise(one):
        if not _too_small(left, right, settings):
            continue
        join = left.schema_id == right.schema_id
        join &= all(is_plain(segment) and not segment.visible_lsn for segment in (left, right))
        return CompactPlan(1, (left, right), join=join, why="a segment of level 1 is too small")
    return None


def _too_small(left: SegmentEntry, right: SegmentEntry, settings: CompactSettings) -> bool:
    """Whether two neighbours should be joined, or cut again in the middle.

    Cuts are between groups, so halves are never quite equal. They must not count as too small
    again, so a tolerance applies if two segments result.
    """
    if left.rows + right.rows > settings.segment_rows_max:
        return False
    smaller, larger = sorted((data_bytes(left), data_bytes(right)))
    if smaller + larger <= settings.segment_bytes_max:
        return smaller < settings.segment_bytes_min
    row_bytes = (smaller + larger) // max(1, left.rows + right.rows)
    uneven = max(settings.segment_bytes_min // 10, 2 * settings.group_bytes, 4 * row_bytes)
    return smaller < settings.segment_bytes_min - uneven


# --- everything -----------------------------------------------------------------------


def plan_full(segments: Segments, settings: CompactSettings) -> CompactPlan | None:
    """Merge all segments of all levels: no deleted or replaced row is kept.

    Those that a branch shares with its origin too: it has no need of the origin afterwards.
    """
    if not segments:
        return None
    level = max(1, *(segment.level for segment in segments))
    return _merge(list(segments), level, "a full compaction was requested")


def plan_unindexed(
    segments: Segments, settings: CompactSettings, *, rows_min: int
) -> CompactPlan | None:
    """Merge segments that get no search index: small ones with each other, if that is enough for
    an index; or those with patches with all that they overlap, which has the rows below.
    """
    ours = [segment for segment in segments if segment.home is None]
    inputs = [s for s in ours if 0 < s.rows < rows_min and not s.patches]
    if sum(s.rows for s in inputs) < rows_min:
        groups = overlapping_groups(ours)
        inputs = [s for group in groups if any(one.patches for one in group) for s in group]
    if len(inputs) < 2:
        return None
    level = max(segment.level for segment in inputs)
    return _merge(inputs, level, "too many rows have no search index")


STRATEGIES: dict[str, Planner] = {"tiered": plan_tiered, "leveled": plan_leveled}


# --- helpers --------------------------------------------------------------------------


def split_keys(groups: Iterable[tuple[bytes, int]], parts: int) -> list[bytes]:
    """Return up to `parts` − 1 keys that cut groups, given by first key and size, evenly.

    Cuts fall between keys: all versions of a key are on one side (H33).

    >>> split_keys([(b"a", 10), (b"b", 10), (b"c", 10), (b"d", 10)], 2)
    [b'c']
    """
    ordered = sorted(groups)
    total = sum(size for _, size in ordered)
    cuts: list[bytes] = []
    before = 0
    for key, size in ordered:
        due = total * (len(cuts) + 1) // parts
        last = cuts[-1] if cuts else ordered[0][0]
        if len(cuts) + 1 < parts and before >= due and key > last:
            cuts.append(key)
        before += size
    return cuts


def data_bytes(segment: SegmentEntry) -> int:
    """Return the bytes of a segment's groups: all size limits exclude tails.

    A tail grows with a segment's history, and a plan must not depend on that.
    """
    return segment.size - segment.tail_bytes


def _merge(inputs: Iterable[SegmentEntry], level: int, why: str) -> CompactPlan:
    return CompactPlan(level, tuple(inputs), why=why)


@dataclass(frozen=True, slots=True)
class Other:
    """The key and LSN bounds of a segment that is no input of a merge."""

    min_key: bytes
    max_key: bytes
    lsn_min: int
    lsn_max: int
    merges: bool = False
    """Whether it may have merges: they depend on when the row below them expires."""


def clipped(tombstones: Iterable[RangeTombstone], key_range: KeyRange) -> list[RangeTombstone]:
    """Return the parts of range tombstones within a key range."""
    pieces = []
    for tombstone in tombstones:
        start = max(tombstone.start, key_range.start)
        end = tombstone.end if key_range.end is None else min(tombstone.end, key_range.end)
        if start < end:
            pieces.append(RangeTombstone(start, end, tombstone.lsn, tombstone.seq))
    return pieces


def needed(
    found: Iterable[RangeTombstone], others: Sequence[Other], hold_lsn: int
) -> list[RangeTombstone]:
    """Return the parts of fragments that may still hide a row; all above `hold_lsn`."""
    kept: list[RangeTombstone] = []
    for fragment in found:
        if fragment.lsn > hold_lsn:
            kept.append(fragment)
            continue
        hidden = [other for other in others if other.lsn_min <= fragment.lsn]
        for other in sorted(hidden, key=lambda o: o.min_key):
            kept += clipped([fragment], KeyRange(other.min_key, other.max_key + b"\0"))
    return fragments(kept)


Numbers = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]
BYTES = 8


def order_of_runs(rows: Versions, ends: list[tuple[bytes, bytes]]) -> Places:
    """Return the order of rows by key, the newest first; `ends` are each run's two keys."""
    low, high = min(first for first, _ in ends), max(last for _, last in ends)
    numbers = _numbers(rows.keys, shared_bytes(low, high))
    order: Places = np.argsort(numbers, kind="stable").astype(np.int64, copy=False)
    ordered = numbers[order]
    same = ordered[1:] == ordered[:-1]
    if not same.any():
        return order
    tied = np.zeros(len(order), dtype=bool)
    tied[1:] |= same
    tied[:-1] |= same
    places = np.flatnonzero(tied)
    ties = order[places]
    order[places] = ties[sorted_places(rows.take(ties))]
    return order


def _numbers(keys: pa.Array, skip: int) -> Numbers:
    """Return eight bytes of each key, from `skip` on, as numbers that sort as they do."""
    count = len(keys)
    _, offsets_buffer, data_buffer = keys.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int32)[keys.offset : keys.offset + count + 1]
    data = np.frombuffer(data_buffer or b"", np.uint8)
    starts = offsets[:-1].astype(np.int64) + skip
    left = offsets[1:] - starts
    padded = np.zeros((count, BYTES), np.uint8)
    for place in range(BYTES):
        inside = left > place
        if inside.all():
            padded[:, place] = data[starts + place]
        elif inside.any():
            padded[inside, place] = data[starts[inside] + place]
    return padded.view(">u8").ravel().astype(np.uint64)
