"""Range tombstones as fragments that do not overlap, each with the newest delete that covers it.

Ranges are cut where they overlap, always at the ends of other ranges (H36), so that finding
the delete that covers a key is one binary search, however many ranges were deleted. Where several
cover the same keys only the newest counts, since it hides all that the others hide.

    deleted      a ──────────── m          at 5
                       f ──────────── s    at 9
    fragments    a ─5─ f ─────9────── s
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import pairwise

from reef.formats.versions import RangeTombstone
from reef.types import KeyRange


class RangeTombstones:
    """A set of range deletes.

    `share` returns the same set in constant time; the next change of either copies it first.
    A thread that changes a set holds a lock that the threads that share it hold too.
    """

    __slots__ = ("_fragments", "_is_shared", "_lsn_min", "_starts")

    def __init__(self, fragments: Iterable[RangeTombstone] = ()) -> None:
        self._fragments = list(fragments)
        self._starts = [fragment.start for fragment in self._fragments]
        self._is_shared = False
        self._lsn_min = min((fragment.lsn for fragment in self._fragments), default=1 << 63)
        """No fragment is older; the oldest may be newer."""

    @classmethod
    def of(cls, tombstones: Iterable[RangeTombstone]) -> "RangeTombstones":
        """Return the set of some deletes, in any order."""
        return cls(fragments(tombstones))

    def __bool__(self) -> bool:
        return bool(self._fragments)

    def __len__(self) -> int:
        return len(self._fragments)

    def __iter__(self) -> Iterator[RangeTombstone]:
        return iter(self._fragments)

    def covering(self, key: bytes) -> RangeTombstone | None:
        """Return the newest delete that covers a key."""
        place = bisect_right(self._starts, key) - 1
        if place >= 0 and key < self._fragments[place].end:
            return self._fragments[place]
        return None

    def share(self) -> "RangeTombstones":
        """Return the set as it is now."""
        shared = RangeTombstones()
        shared._fragments, shared._starts = self._fragments, self._starts
        shared._lsn_min = self._lsn_min
        shared._is_shared = self._is_shared = True
        return shared

    def within(self, wanted: KeyRange) -> list[RangeTombstone]:
        """Return the fragments that overlap a range."""
        first = max(0, bisect_right(self._starts, wanted.start) - 1)
        last = len(self) if wanted.end is None else bisect_left(self._starts, wanted.end)
        return [f for f in self._fragments[first:last] if f.end > wanted.start]

    def add(self, new: RangeTombstone) -> bool:
        """Add a delete; where it overlaps others the newest one counts.

        Returns whether it overlaps any.
        """
        if self._is_shared:
            self._fragments, self._starts = self._fragments.copy(), self._starts.copy()
            self._is_shared = False
        first = max(0, bisect_right(self._starts, new.start) - 1)
        if first < len(self) and self._fragments[first].end <= new.start:
            first += 1
        last = max(first, bisect_left(self._starts, new.end))
        self._lsn_min = min(self._lsn_min, new.lsn)
        pieces = _overlaid(self._fragments[first:last], new)
        # In place: a copy each time would make many deletes take the square of their number.
        self._fragments[first:last] = pieces
        self._starts[first:last] = [piece.start for piece in pieces]
        return first < last

    def from_lsn(self, floor: int) -> "RangeTombstones":
        """Return the deletes that are not older than `floor`."""
        if self._lsn_min >= floor:
            return self.share()
        return RangeTombstones(f for f in self._fragments if f.lsn >= floor)


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


def _overlaid(old: Sequence[RangeTombstone], new: RangeTombstone) -> list[RangeTombstone]:
    pieces: list[RangeTombstone] = []
    at = new.start
    for fragment in old:
        if fragment.start < new.start:
            pieces.append(_cut(fragment, fragment.start, new.start))
        if at < fragment.start:
            pieces.append(_cut(new, at, fragment.start))
        newer = max(fragment, new, key=lambda t: (t.lsn, t.seq))
        low, high = max(fragment.start, new.start), min(fragment.end, new.end)
        pieces.append(_cut(newer, low, high))
        at = high
        if fragment.end > new.end:
            pieces.append(_cut(fragment, new.end, fragment.end))
    if at < new.end:
        pieces.append(_cut(new, at, new.end))
    return _joined(pieces)


def _cut(tombstone: RangeTombstone, start: bytes, end: bytes) -> RangeTombstone:
    return RangeTombstone(start, end, tombstone.lsn, tombstone.seq)


def _joined(pieces: list[RangeTombstone]) -> list[RangeTombstone]:
    """Join neighbours that belong to one delete."""
    joined: list[RangeTombstone] = []
    for piece in pieces:
        if joined and joined[-1].end == piece.start and _same(joined[-1], piece):
            joined[-1] = _cut(piece, joined[-1].start, piece.end)
        else:
            joined.append(piece)
    return joined


def _same(one: RangeTombstone, other: RangeTombstone) -> bool:
    return (one.lsn, one.seq) == (other.lsn, other.seq)
