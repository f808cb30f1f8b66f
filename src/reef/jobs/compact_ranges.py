"""Range tombstones in a compaction: cut into fragments, clipped to a task, kept where needed.

Where several cover the same keys only the newest counts, since it hides all that the others
hide. A fragment stays only over those parts of its range where a segment that takes no part
in the merge may have something older: there, and nowhere else, it still hides a row (H34). All
cuts fall on keys, at which one fragment ends and the next one begins (H36).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise

from reef.formats.versions import RangeTombstone
from reef.types import KeyRange

__all__ = ["Other", "clipped", "fragments", "needed"]


@dataclass(frozen=True, slots=True)
class Other:
    """A segment that takes no part in a merge: which keys and LSNs it can have."""

    min_key: bytes
    max_key: bytes
    lsn_min: int
    lsn_max: int


def fragments(tombstones: Iterable[RangeTombstone]) -> list[RangeTombstone]:
    """Return ranges that do not overlap, in order, each with the newest delete that covers it."""
    ordered = sorted(tombstones)
    edges = sorted({t.start for t in ordered} | {t.end for t in ordered})
    covering: list[tuple[int, int, bytes]] = []
    found: list[RangeTombstone] = []
    begun = 0
    for start, end in pairwise(edges):
        while begun < len(ordered) and ordered[begun].start <= start:
            new = ordered[begun]
            heappush(covering, (-new.lsn, -new.seq, new.end))
            begun += 1
        while covering and covering[0][2] <= start:
            heappop(covering)
        if covering:
            found.append(RangeTombstone(start, end, -covering[0][0], -covering[0][1]))
    return _joined(found)


def clipped(tombstones: Iterable[RangeTombstone], wanted: KeyRange) -> list[RangeTombstone]:
    """Return what of them lies in a range."""
    found = []
    for tombstone in tombstones:
        start = max(tombstone.start, wanted.start)
        end = tombstone.end if wanted.end is None else min(tombstone.end, wanted.end)
        if start < end:
            found.append(RangeTombstone(start, end, tombstone.lsn, tombstone.seq))
    return found


def needed(
    found: Iterable[RangeTombstone], others: Sequence[Other], hold_lsn: int
) -> list[RangeTombstone]:
    """Return what of the fragments may still hide something; all that are above `hold_lsn`."""
    kept: list[RangeTombstone] = []
    for fragment in found:
        if fragment.lsn > hold_lsn:
            kept.append(fragment)
            continue
        hidden = [other for other in others if other.lsn_min <= fragment.lsn]
        for other in sorted(hidden, key=lambda o: o.min_key):
            kept += clipped([fragment], KeyRange(other.min_key, other.max_key + b"\0"))
    return fragments(kept)


def _joined(found: list[RangeTombstone]) -> list[RangeTombstone]:
    """Join neighbours that belong to one delete."""
    joined: list[RangeTombstone] = []
    for one in found:
        last = joined[-1] if joined else None
        if last and last.end == one.start and (last.lsn, last.seq) == (one.lsn, one.seq):
            joined[-1] = RangeTombstone(last.start, one.end, one.lsn, one.seq)
        else:
            joined.append(one)
    return joined
