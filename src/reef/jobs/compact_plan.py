"""Which segments to merge next: pure functions from a manifest's segments to one job.

*Tiered*: in the lowest level whose smallest segments add up to the level's threshold, those are
merged into the next level. Rows are rewritten seldom, reads look into more segments. What a
load has brought goes down as it is, where it is large and overlaps nothing.

*Leveled*: level 0 is merged among itself while it is small; when it holds as much as one large
segment, it goes down, together with all that overlaps it, into level 1, whose segments do not
overlap each other. Neighbours in level 1 that are too small are joined. Rows are rewritten more
often, and a key is in one segment of level 1 at most.

Nothing that is read depends on levels: every version carries its LSN. Any choice of inputs gives
the same rows, and a namespace may change from one strategy to the other at any time; a planner
that finds levels overlap where its own would not merges what overlaps. What a choice does
decide is what can be dropped on the way (`reef.jobs.compact_merge`).

A segment that a branch reads out of its parent (`home`) is not taken: its bytes are not ours.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from reef.config import CompactSettings
from reef.errors import InvalidInputError, Kind
from reef.formats.manifest import SegmentEntry
from reef.manifest.levels import by_key, is_plain, overlapping_groups, replace_level

__all__ = ["STRATEGIES", "CompactPlan", "plan_full", "plan_leveled", "plan_tiered", "split_keys"]

Segments = Sequence[SegmentEntry]


@dataclass(frozen=True, slots=True)
class CompactPlan:
    """One job: what to merge or join, and what to move as it is, into which level."""

    level: int
    inputs: tuple[SegmentEntry, ...]
    moved: tuple[SegmentEntry, ...] = ()
    """Overlapping nothing: only their level changes."""
    join: bool = False
    """Whether the inputs are neighbours, to be put together without decoding them."""
    cuts: tuple[bytes, ...] = ()
    """Keys at which an output begins, since something that takes no part lies before them: an
    output over it would overlap it."""
    why: str = ""

    @property
    def bytes(self) -> int:
        return sum(map(data_bytes, self.inputs))

    def outputs(self, settings: CompactSettings) -> int:
        """Return into how many segments the inputs go."""
        rows = sum(segment.rows for segment in self.inputs)
        by_rows = -(-rows // settings.segment_rows_max)
        if self.join:
            return max(2 if self.bytes > settings.segment_bytes_max else 1, by_rows)
        least = -(-self.bytes // settings.segment_bytes_max)
        return max(1, least, by_rows, round(self.bytes / settings.segment_bytes))


Planner = Callable[[Segments, CompactSettings], CompactPlan | None]


def strategy(name: str) -> Planner:
    """Return a planner by its name."""
    if name not in STRATEGIES:
        raise InvalidInputError(
            f"there is no strategy {name!r}",
            kind=Kind.INVALID_OPTION,
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
            # Too many to be looked into one by one, and too small to go down.
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
    """Merge what overlaps; loaded segments of a good size that overlap nothing here are moved.

    A load has sorted its rows and cut them into segments once: to merge those with each other
    would rewrite all of them and gain nothing.
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
    """Level 0 as a whole, with all of level 1 that it overlaps; what overlaps nothing is moved."""
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
    """Return where outputs must begin, so that none of them lies over a segment that stays."""
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
    return _merge(_alike(smallest, settings.inputs_max), 0, f"{len(zero)} segments in level 0")


def _alike(smallest: Segments, count_max: int) -> Segments:
    """Return the smallest segments, up to one that dwarfs those before it.

    It waits until they have grown: taken along each time, its bytes would be rewritten for every
    few that are new.
    """
    total = 0
    for count, segment in enumerate(smallest):
        if count >= 2 and data_bytes(segment) > 2 * total:
            return smallest[:count]
        total += data_bytes(segment)
    return smallest[:count_max]


def _separate(one: Segments) -> CompactPlan | None:
    """Level 1 overlaps where another strategy was used before: merge what does."""
    for group in overlapping_groups(one):
        if len(group) > 1:
            return _merge(group, 1, f"{len(group)} segments of level 1 overlap")
    return None


def _join_neighbours(one: Segments, settings: CompactSettings) -> CompactPlan | None:
    """Put a segment that is too small together with the next one; the last, with the one before.

    One that has deletes is merged instead: most of them can go.
    """
    for left, right in pairwise(one):
        if not _too_small(left, right, settings):
            continue
        join = left.schema_id == right.schema_id
        join &= all(is_plain(segment) and not segment.visible_lsn for segment in (left, right))
        return CompactPlan(1, (left, right), join=join, why="a segment of level 1 is too small")
    return None


def _too_small(left: SegmentEntry, right: SegmentEntry, settings: CompactSettings) -> bool:
    """Whether two neighbours are better off together, or cut anew in the middle.

    Cuts fall between groups, so that halves are never quite equal; they must not be found too
    small again. Where two come out, as much as that may make is overlooked.
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
    """Merge all there is, whatever the levels: nothing that was deleted or replaced stays."""
    ours = [segment for segment in segments if segment.home is None]
    if not ours:
        return None
    level = max(1, *(segment.level for segment in ours))
    return _merge(ours, level, "a full compaction was asked for")


STRATEGIES: dict[str, Planner] = {"tiered": plan_tiered, "leveled": plan_leveled}


# --- small things ---------------------------------------------------------------------


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
    """Return what a segment's groups take: all sizes are meant without tails.

    A tail grows with a segment's history, and a plan must not depend on that.
    """
    return segment.size - segment.tail_bytes


def _merge(inputs: Iterable[SegmentEntry], level: int, why: str) -> CompactPlan:
    return CompactPlan(level, tuple(inputs), why=why)
