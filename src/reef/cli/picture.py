"""A picture of levels: which keys each segment spans, as bars. Pure functions.

    level 0  ████████████████████
                     ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓
    level 1  ██████████▓▓▓▓▓▓▓▓▓▓██████████
             a                             z

Keys are bytes, and between two of them there is no distance that would mean anything. So the
scale is by rank: the bounds of all segments, in order, evenly spread. Segments of a level that
overlap stand below one another; neighbours on a line have different shades.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from reef.engine.stats import LevelStats, SegmentStats

__all__ = ["level_lanes"]

SHADES = "█▓"
LANES_MAX = 8
"""More than that is no overview any more."""


def level_lanes(levels: Sequence[LevelStats], width: int) -> dict[int, list[str]]:
    """Return the lines of each level, `width` characters wide."""
    segments = [segment for level in levels for segment in level.segments]
    bounds = sorted({key for s in segments for key in (s.min_key, s.max_key)})
    return {level.level: _drawn(level.segments, bounds, width) for level in levels}


def _drawn(segments: Iterable[SegmentStats], bounds: list[bytes], width: int) -> list[str]:
    lanes: list[list[SegmentStats]] = []
    for segment in segments:  # by their first key, so the first lane that is free will do
        free = (lane for lane in lanes if lane[-1].max_key < segment.min_key)
        lane = next(free, None)
        if lane is None:
            lanes.append([segment])
        else:
            lane.append(segment)
    lines = [_line(lane, bounds, width) for lane in lanes[:LANES_MAX]]
    left = sum(len(lane) for lane in lanes[LANES_MAX:])
    return [*lines, f"… and {left} more segments"] if left else lines


def _line(lane: list[SegmentStats], bounds: list[bytes], width: int) -> str:
    line = [" "] * width
    for number, segment in enumerate(lane):
        start, end = (_place(key, bounds, width) for key in (segment.min_key, segment.max_key))
        start = min(start, width - 1)
        stop = max(start + 1, end)
        line[start:stop] = SHADES[number % 2] * (stop - start)
    return "".join(line).rstrip()


def _place(key: bytes, bounds: list[bytes], width: int) -> int:
    steps = len(bounds) - 1
    return round(bisect_left(bounds, key) / steps * width) if steps else 0
