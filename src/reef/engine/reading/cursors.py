"""Sorted sources, read piece by piece from either end, and merged in bounded memory.

Take the last key of each source's current piece; up to the smallest of them no source can
add anything more. Cut every source there, and what was cut off can be merged and handed on.
A source that says where it begins is left alone until the merge is there: of segments that lie
side by side, however many there are, one is open at a time.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from reef.engine.reading.segments import SegmentStore
from reef.formats.manifest import SegmentEntry
from reef.formats.schema import Schema
from reef.formats.versions import KeysInOrder, Versions
from reef.types import KeyRange

__all__ = ["Cursor", "LateCursor", "RowsCursor", "SegmentCursor", "merged"]


GROUPS_AT_ONCE_MAX = 32
READ_BYTES_MAX = 4 << 20
"""As stored: so much is read at once, if that is more than one group."""
EXPECTED_MAX = 4
"""Reads that are told of before they are due, to whoever can use the time."""


class Cursor(ABC):
    """A sorted source, taken from piece by piece."""

    near: bytes | None = None
    """Where known: nothing of it comes before this key, in the direction of reading."""

    def __init__(self) -> None:
        self._rows: Versions | None = None

    def load(self) -> bool:
        """Have a piece at hand; False at the end."""
        while self._rows is None or not len(self._rows):
            self._rows = self._next()
            if self._rows is None:
                return False
        return True

    def edge(self, reverse: bool) -> bytes:
        """Return the last key of the piece, in the direction of reading."""
        assert self._rows is not None
        return KeysInOrder(self._rows.keys)[0 if reverse else -1]

    def take(self, bound: bytes, reverse: bool) -> Versions:
        """Cut off what lies up to `bound`, itself included."""
        rows = self._rows
        assert rows is not None
        if self.edge(reverse) == bound:  # all of it
            self._rows = None
            return rows
        keys = KeysInOrder(rows.keys)
        place = bisect_left(keys, bound) if reverse else bisect_right(keys, bound)
        low, high = rows.slice(0, place), rows.slice(place, len(rows))
        taken, self._rows = (high, low) if reverse else (low, high)
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


class LateCursor(Cursor):
    """A source that is opened when it is needed: to open a segment is a request."""

    def __init__(self, near: bytes, make: Callable[[], Cursor]) -> None:
        super().__init__()
        self.near = near
        self._make = make
        self._made: Cursor | None = None

    def open(self) -> Cursor:
        """Open it, or return what was opened before."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def _next(self) -> Versions | None:
        return self.open()._next()


class SegmentCursor(Cursor):
    """The groups of a segment that lie in a range."""

    def __init__(
        self,
        segments: SegmentStore,
        entry: SegmentEntry,
        wanted: KeyRange,
        *,
        reverse: bool,
        schema: Schema,
        columns: Sequence[int] | None = None,
        needless: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__()
        self._segments, self._entry, self._wanted = segments, entry, wanted
        self._schema, self._columns = schema, columns
        tail = segments.tail(entry)
        index = tail.index
        first = bisect_left(index.last_keys, wanted.start)
        last = len(index) if wanted.end is None else bisect_left(index.first_keys, wanted.end)
        left = [number for number in range(first, last) if number not in needless]
        sizes = [index.sizes[number] for number in left]
        self._reads = deque(_reads(left, sizes, reverse))
        self._expect()

    def _next(self) -> Versions | None:
        if not self._reads:
            return None
        numbers = self._reads.popleft()
        self._expect()
        rows = self._segments.rows(self._entry, numbers, self._columns)
        rows = rows.under(self._schema).within(self._wanted)
        return rows.with_lsn(self._entry.visible_lsn) if self._entry.visible_lsn else rows

    def _expect(self) -> None:
        for numbers in islice(self._reads, EXPECTED_MAX):
            self._segments.expect(self._entry, numbers, self._columns)


def _reads(numbers: list[int], sizes: list[int], reverse: bool) -> Iterator[list[int]]:
    """Yield the groups of each read: more and more at once, since whoever goes on reading will."""
    if reverse:
        numbers, sizes = numbers[::-1], sizes[::-1]
    count, done = 1, 0
    while done < len(numbers):
        end, size = done + 1, sizes[done]
        while end < min(done + count, len(numbers)) and size + sizes[end] <= READ_BYTES_MAX:
            size, end = size + sizes[end], end + 1
        yield sorted(numbers[done:end])
        count, done = min(2 * count, GROUPS_AT_ONCE_MAX), end


def merged(cursors: Sequence[Cursor], reverse: bool) -> Iterator[list[Versions]]:
    """Yield pieces that no source can add to any more, in the order of reading."""
    begun = [cursor for cursor in cursors if cursor.near is None]
    waiting = _by_near(cursors, reverse)
    nearest = max if reverse else min
    while True:
        begun = [cursor for cursor in begun if cursor.load()]
        bound = nearest((cursor.edge(reverse) for cursor in begun), default=None)
        while waiting and (bound is None or not _is_beyond(waiting[-1], bound, reverse)):
            cursor = waiting.pop()
            if cursor.load():
                begun.append(cursor)
                edge = cursor.edge(reverse)
                bound = edge if bound is None else nearest(bound, edge)
        if bound is None:
            return
        yield [cursor.take(bound, reverse) for cursor in begun]


def _by_near(cursors: Sequence[Cursor], reverse: bool) -> list[Cursor]:
    """Return those that say where they begin; the one that is next comes last."""
    known = [(cursor.near, cursor) for cursor in cursors if cursor.near is not None]
    known.sort(key=lambda pair: pair[0], reverse=not reverse)
    return [cursor for _, cursor in known]


def _is_beyond(cursor: Cursor, bound: bytes, reverse: bool) -> bool:
    assert cursor.near is not None
    return cursor.near < bound if reverse else cursor.near > bound
