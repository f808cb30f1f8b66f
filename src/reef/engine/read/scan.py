"""Sorted sources, read piece by piece from either end, and merged in bounded memory.

Take the last key of each source's current piece; up to the smallest of them no source can add
anything more. Cut every source there, and the parts before the cut can be merged and yielded. A
source whose first key is known is not opened before the merge reaches it: of segments that do not
overlap, however many there are, one is open at a time.

A scan begins with two pages of each segment and doubles its reads, so that a short one reads little
and a long one reads megabytes at a time.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from reef.engine.read.segments import SegmentStore
from reef.engine.rows.convert import arrow_schema, check_columns, known_columns, to_record_batch
from reef.engine.where import Where, parse
from reef.formats.manifest import SegmentEntry
from reef.formats.schema import Schema
from reef.formats.segment_index import KEYS
from reef.formats.versions import KeysInOrder, Versions, key_place
from reef.types import KeyRange

PAGES_FIRST = 2
"""Pages of the first read of a segment; each further read is twice as large."""
READ_BYTES_MAX = 4 << 20
"""As stored: the size of the largest reads, if that is more than one page."""
EXPECTED_MAX = 4
"""Reads that are announced before they are due."""


class Cursor(ABC):
    """A sorted source, taken from piece by piece."""

    near: bytes | None = None
    """Where known: nothing of it comes before this key, in the direction of reading."""

    def __init__(self) -> None:
        self._rows: Versions | None = None
        self._rest: tuple[Versions, int, int] | None = None
        """Of the last piece, cut off when it is needed: a scan with a limit may end before."""

    def load(self) -> bool:
        """Load a piece, unless one is loaded; False at the end."""
        if self._rest is not None:
            rows, start, end = self._rest
            self._rows, self._rest = rows.slice(start, end), None
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
        """Cut off the rows up to `bound`, itself included."""
        rows = self._rows
        assert rows is not None
        if self.edge(reverse) == bound:  # all of it
            self._rows = None
            return rows
        place, self._rows = key_place(rows.keys, bound, above=not reverse), None
        if reverse:
            self._rest = rows, 0, place
            return rows.slice(place, len(rows))
        self._rest = rows, place, len(rows)
        return rows.slice(0, place)

    @abstractmethod
    def _next(self) -> Versions | None:
        """Return the next piece; None at the end."""


class RowsCursor(Cursor):
    """Pieces that are in memory already."""

    def __init__(self, pieces: Iterator[Versions]) -> None:
        super().__init__()
        self._pieces = pieces

    def _next(self) -> Versions | None:
        return next(self._pieces, None)


class LateCursor(Cursor):
    """A source that is opened when it is needed: to open a segment is a request."""

    def __init__(self, near: bytes, make: Callable[[], Cursor]) -> None:
        super().__init__()
        self.near = near
        self._make = make
        self._made: Cursor | None = None

    def open(self) -> Cursor:
        """Open the source, unless it is open."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def _next(self) -> Versions | None:
        return self.open()._next()


class SegmentCursor(Cursor):
    """The pages of a segment that have keys of a range, read in ever larger pieces."""

    def __init__(
        self,
        segments: SegmentStore,
        entry: SegmentEntry,
        bounds: KeyRange,
        *,
        reverse: bool,
        schema: Schema,
        columns: Sequence[int] | None = None,
        needless: frozenset[int] = frozenset(),
        bytes_kept: int | None = None,
    ) -> None:
        super().__init__()
        self._segments, self._entry, self._bounds = segments, entry, bounds
        self._schema, self._columns = schema, columns
        self._reverse, self._needless = reverse, needless
        self._pages = pages = segments.tail(entry).index.pages
        self._first = max(bisect_right(pages.keys, bounds.start) - 1, 0)
        self._end = len(pages.keys)
        if bounds.end is not None:
            self._end = bisect_left(pages.keys, bounds.end)
        self._pages_max = self._pages_of(READ_BYTES_MAX)
        kept = segments.bytes_kept(entry.size) if bytes_kept is None else bytes_kept
        self._pages_kept = self._pages_of(kept)
        self._count = PAGES_FIRST
        self._coming: deque[Sequence[int]] = deque()
        if segments.reads_ahead:
            self._expect()

    def _pages_of(self, size: int) -> int:
        """Return how many pages have about so many bytes in the columns that are read."""
        if self._columns is None:
            return max(1, size // self._pages.average_bytes)
        totals = self._pages.totals
        numbers = {KEYS, *self._columns} & totals.keys()
        each = sum(totals[number] for number in numbers) // max(1, len(self._pages.keys))
        return max(1, size // max(1, each))

    def _next(self) -> Versions | None:
        pages = self._coming.popleft() if self._coming else self._next_pages()
        if not pages:
            return None
        if self._segments.reads_ahead:
            self._expect()
        self._pages_kept -= len(pages)
        keep = self._pages_kept >= 0
        rows = self._segments.rows(self._entry, pages, self._columns, keep=keep)
        rows = rows.under(self._schema).within(self._bounds)
        return rows.with_lsn(self._entry.rows_lsn) if self._entry.rows_lsn else rows

    def _next_pages(self) -> Sequence[int]:
        """Return the pages of the next read; none at the end."""
        count, self._count = self._count, min(2 * self._count, self._pages_max)
        if not self._needless:
            if self._reverse:
                pages = range(max(self._end - count, self._first), self._end)
                self._end = pages.start
            else:
                pages = range(self._first, min(self._first + count, self._end))
                self._first = pages.stop
            return pages
        return self._next_needed(count)

    def _next_needed(self, count: int) -> list[int]:
        """Return the same without the pages of needless groups."""
        chosen: list[int] = []
        while self._first < self._end and len(chosen) < count:
            page = self._end - 1 if self._reverse else self._first
            group = self._pages.group_of(page)
            first, end = self._pages.firsts[group : group + 2].tolist()
            first, end = max(first, self._first), min(end, self._end)
            if group not in self._needless:
                left = count - len(chosen)
                if self._reverse:
                    first = max(first, end - left)
                else:
                    end = min(end, first + left)
                chosen += range(first, end)
            if self._reverse:
                self._end = first
            else:
                self._first = end
        return sorted(chosen)

    def _expect(self) -> None:
        """Announce the next reads, so that they can begin."""
        while len(self._coming) < EXPECTED_MAX and (pages := self._next_pages()):
            self._coming.append(pages)
            self._segments.expect(self._entry, pages, self._columns)


def merged(
    cursors: Sequence[Cursor], reverse: bool, late: Iterator[Cursor] | None = None
) -> Iterator[list[Versions]]:
    """Yield pieces that no source can add to any more, in the order of reading.

    `late` has the cursors whose first key is known, ordered by it; by default they are among the
    others.
    """
    begun = [cursor for cursor in cursors if cursor.near is None]
    waiting = iter(_by_near(cursors, reverse)) if late is None else late
    coming = next(waiting, None)
    nearest = max if reverse else min
    while True:
        begun = [cursor for cursor in begun if cursor.load()]
        bound = nearest((cursor.edge(reverse) for cursor in begun), default=None)
        while coming is not None and (bound is None or not _is_beyond(coming, bound, reverse)):
            if coming.load():
                begun.append(coming)
                edge = coming.edge(reverse)
                bound = edge if bound is None else nearest(bound, edge)
            coming = next(waiting, None)
        if bound is None:
            return
        yield [cursor.take(bound, reverse) for cursor in begun]


def _by_near(cursors: Sequence[Cursor], reverse: bool) -> list[Cursor]:
    """Return the cursors whose first key is known before they are opened, ordered by it."""
    known = [(cursor.near, cursor) for cursor in cursors if cursor.near is not None]
    known.sort(key=lambda pair: pair[0], reverse=reverse)
    return [cursor for _, cursor in known]


def _is_beyond(cursor: Cursor, bound: bytes, reverse: bool) -> bool:
    assert cursor.near is not None
    return cursor.near < bound if reverse else cursor.near > bound


@dataclass(frozen=True, slots=True)
class Projection:
    """Columns and conditions, checked against a schema."""

    columns: tuple[str, ...] | None = None
    """In the order asked; None means all, the key first."""
    where: Where | None = None
    numbers: tuple[int, ...] | None = None
    """The columns that must be read; None means all."""

    @classmethod
    def of(cls, schema: Schema, columns: Sequence[str] | None, where: Any) -> "Projection":
        """Return the projection; InvalidInputError names a column that does not exist."""
        if columns is None and where is None:
            return EVERYTHING
        conditions = parse(where, schema) if where is not None else None
        if columns is None:
            return cls(None, conditions, None)
        check_columns(schema, columns)
        by_name = known_columns(schema)
        used = {*columns, *(conditions.columns if conditions else ())}
        numbers = tuple(sorted(by_name[name] for name in used if by_name[name]))
        return cls(tuple(columns), conditions, numbers)

    def batch(self, rows: Versions, schema: Schema) -> pa.RecordBatch:
        """Return the rows that match, with the requested columns."""
        if self.where is None:
            return to_record_batch(rows, schema, self.columns)
        asked = list(self.columns if self.columns is not None else schema.arrow().names)
        needed = list(dict.fromkeys([*asked, *self.where.columns]))
        batch = to_record_batch(rows, schema, needed)
        mask = self.where.mask(batch)
        matching = mask.true_count
        if matching == len(batch):
            return batch.select(asked)
        if not asked:  # a batch without columns cannot be filtered
            return batch.slice(0, matching).select(asked)
        return batch.select(asked).filter(mask)

    def arrow_schema(self, schema: Schema) -> pa.Schema:
        return arrow_schema(schema, self.columns)


EVERYTHING = Projection()
