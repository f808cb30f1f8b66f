"""Covers: the part of the log, by LSN and key, that a segment replaces.

The bounds of a segment's rows do not say that: a fold of LSN 5 to 9 may have rows of LSN 7 only,
and a merge that dropped the tombstone of a key has no trace of the key left. So a footer names
rectangles of LSNs and keys, and promises that everything committed in them is in the segment,
as far as it still matters. A fold covers its part of the log, less the ingests in it, over
its piece of the keys; a merge for all that its inputs covered, cut where its outputs are cut.

The segments of a manifest never cover the same part twice, and together cover everything
below the floor that left a row or a delete. That is how a rebuild distinguishes published
segments from leftovers: by the rectangles alone, whatever was swept since (`reef.jobs.rebuild`).
"""

from collections.abc import Iterable, Sequence
from operator import attrgetter

import msgspec


class Cover(msgspec.Struct, frozen=True, array_like=True):
    """LSNs [first, end) of the keys [start, stop); no `stop` means to the last key."""

    first: int
    end: int
    start: bytes = b""
    stop: bytes | None = None

    def both(self, other: "Cover") -> "Cover | None":
        """Return the intersection; None if it is empty."""
        first, end = max(self.first, other.first), min(self.end, other.end)
        start, stop = max(self.start, other.start), _lower(self.stop, other.stop)
        if first >= end or (stop is not None and start >= stop):
            return None
        return Cover(first, end, start, stop)

    def minus(self, other: "Cover") -> "list[Cover]":
        """Return the rest without another: older and newer LSNs, lower and higher keys."""
        shared = self.both(other)
        if shared is None:
            return [self]
        left = []
        if self.first < shared.first:
            left.append(Cover(self.first, shared.first, self.start, self.stop))
        if shared.end < self.end:
            left.append(Cover(shared.end, self.end, self.start, self.stop))
        if self.start < shared.start:
            left.append(Cover(shared.first, shared.end, self.start, shared.start))
        if shared.stop is not None and shared.stop != self.stop:
            left.append(Cover(shared.first, shared.end, shared.stop, self.stop))
        return left

    def __str__(self) -> str:
        keys = (
            "" if (self.start, self.stop) == (b"", None) else f" of {self.start!r} to {self.stop!r}"
        )
        return f"LSN {self.first} to {self.end - 1}{keys}"


def overlap(some: Iterable[Cover], others: Sequence[Cover]) -> bool:
    """Whether they overlap.

    >>> overlap([Cover(1, 5)], [Cover(4, 9, b"m")]), overlap([Cover(1, 5)], [Cover(5, 9)])
    (True, False)
    """
    return any(one.both(other) is not None for one in some for other in others)


def without(some: Iterable[Cover], others: Iterable[Cover]) -> list[Cover]:
    """Return the parts of some covers that others do not cover.

    >>> without([Cover(1, 9)], [Cover(1, 5), Cover(5, 9, b"m")])
    [Cover(first=5, end=9, start=b'', stop=b'm')]
    """
    left = list(some)
    for other in others:
        left = [piece for cover in left for piece in cover.minus(other)]
    return left


def clipped(covers: Iterable[Cover], start: bytes, stop: bytes | None) -> tuple[Cover, ...]:
    """Return the part in the keys [start, stop): the covers of one output of a merge."""
    pieces = (Cover(c.first, c.end, start, stop).both(c) for c in covers)
    return tidied(piece for piece in pieces if piece is not None)


def tidied(covers: Iterable[Cover]) -> tuple[Cover, ...]:
    """Return the same in fewer rectangles where neighbours fit together. None overlap.

    >>> tidied([Cover(1, 5, b"", b"m"), Cover(5, 9), Cover(1, 5, b"m")])
    (Cover(first=1, end=9, start=b'', stop=None),)
    """
    left, count = list(covers), -1
    while len(left) != count:
        count = len(left)
        left = _joined_keys(_joined_lsns(left))
    return tuple(sorted(left, key=attrgetter("first", "start")))


def _joined_lsns(covers: Iterable[Cover]) -> list[Cover]:
    joined: list[Cover] = []
    for cover in sorted(covers, key=lambda c: (c.start, c.stop or b"", c.stop is None, c.first)):
        last = joined[-1] if joined else None
        if last and (last.start, last.stop, last.end) == (cover.start, cover.stop, cover.first):
            joined[-1] = Cover(last.first, cover.end, last.start, last.stop)
        else:
            joined.append(cover)
    return joined


def _joined_keys(covers: Iterable[Cover]) -> list[Cover]:
    joined: list[Cover] = []
    for cover in sorted(covers, key=attrgetter("first", "end", "start")):
        last = joined[-1] if joined else None
        if last and (last.first, last.end, last.stop) == (cover.first, cover.end, cover.start):
            joined[-1] = Cover(last.first, last.end, last.start, cover.stop)
        else:
            joined.append(cover)
    return joined


def _lower(one: bytes | None, other: bytes | None) -> bytes | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)
