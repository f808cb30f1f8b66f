"""Sorted sources, read piece by piece from either end, and merged in bounded memory.

Take the last key of each source's current piece; up to the smallest of them no source can
add anything more. Cut every source there, and what was cut off can be merged and handed on.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterator

import numpy as np

from reef.engine.segments import SegmentStore
from reef.formats.manifest import SegmentEntry
from reef.formats.versions import Versions
from reef.types import KeyRange

__all__ = ["Cursor", "RowsCursor", "SegmentCursor", "merged"]


class Cursor(ABC):
    """A sorted source, taken from piece by piece."""

    def __init__(self) -> None:
        self._rows: Versions | None = None
        self._keys: list[bytes] = []

    def load(self) -> bool:
        """Have a piece at hand; False at the end."""
        while not self._keys:
            rows = self._next()
            if rows is None:
                return False
            self._rows, self._keys = rows, rows.keys.to_pylist()
        return True

    def edge(self, reverse: bool) -> bytes:
        """Return the last key of the piece, in the direction of reading."""
        return self._keys[0] if reverse else self._keys[-1]

    def take(self, bound: bytes, reverse: bool) -> Versions:
        """Cut off what lies up to `bound`, itself included."""
        assert self._rows is not None
        if reverse:
            place = bisect_left(self._keys, bound)
            taken = self._rows.slice(place, len(self._keys))
            self._rows, self._keys = self._rows.slice(0, place), self._keys[:place]
        else:
            place = bisect_right(self._keys, bound)
            taken = self._rows.slice(0, place)
            self._rows, self._keys = self._rows.slice(place, len(self._rows)), self._keys[place:]
        return taken

    @abstractmethod
    def _next(self) -> Versions | None:
        """Return the next piece; None at the end."""


class RowsCursor(Cursor):
    """One piece that is in memory already."""

    def __init__(self, rows: Versions) -> None:
        super().__init__()
        self._all: Versions | None = rows

    def _next(self) -> Versions | None:
        rows, self._all = self._all, None
        return rows


class SegmentCursor(Cursor):
    """The groups of a segment that lie in a range."""

    def __init__(
        self, segments: SegmentStore, entry: SegmentEntry, wanted: KeyRange, reverse: bool
    ) -> None:
        super().__init__()
        self._segments, self._entry, self._wanted = segments, entry, wanted
        index = segments.tail(entry).index
        first = bisect_left(index.last_keys, wanted.start)
        last = len(index) if wanted.end is None else bisect_left(index.first_keys, wanted.end)
        numbers = range(first, last)
        self._numbers = iter(reversed(numbers) if reverse else numbers)

    def _next(self) -> Versions | None:
        number = next(self._numbers, None)
        if number is None:
            return None
        rows = self._segments.group(self._entry, number).rows
        keys = rows.keys.to_pylist()
        end = len(keys) if self._wanted.end is None else bisect_left(keys, self._wanted.end)
        rows = rows.slice(bisect_left(keys, self._wanted.start), end)
        if not self._entry.visible_lsn:
            return rows
        lsns = np.full(len(rows), self._entry.visible_lsn, np.int64)
        return Versions(
            rows.keys, lsns, rows.seqs, rows.kinds, rows.fields, rows.expires_at_ms, rows.touched
        )


def merged(cursors: list[Cursor], reverse: bool) -> Iterator[list[Versions]]:
    """Yield pieces that no source can add to any more, in the order of reading."""
    while cursors := [cursor for cursor in cursors if cursor.load()]:
        edges = [cursor.edge(reverse) for cursor in cursors]
        bound = max(edges) if reverse else min(edges)
        yield [cursor.take(bound, reverse) for cursor in cursors]
