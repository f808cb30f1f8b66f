"""The candidates of a vector search: read by ordinal, ranked by exact distance, checked.

Rows of all segments are read at once: what is in memory is picked from the pages of all of them
with one call for each column. What is not is read segment by segment, in parallel where reads wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reef.engine.read.scan import Projection
from reef.engine.search.request import Ranked, SearchRequest, VectorQuery, matches
from reef.engine.search.state import SearchState
from reef.formats.manifest import SegmentEntry
from reef.formats.pages import join_column, join_keys
from reef.formats.segment_index import KEYS
from reef.formats.vector_index import distances, vectors_of
from reef.formats.versions import Versions, concat_versions

Places = npt.NDArray[np.int64]
Ordinals = npt.NDArray[np.uint32]


class NearestRows:
    """The nearest rows so far, with their exact distances."""

    def __init__(self, request: SearchRequest, query: VectorQuery, k: int) -> None:
        self._request, self._query, self.k = request, query, k
        self.ranked: Ranked | None = None

    def bound(self) -> float:
        """The distance from which on rows cannot be among the nearest."""
        if self.ranked is None or len(self.ranked.values) < self.k:
            return float(np.inf)
        return float(self.ranked.values[-1])

    def distances(self, rows: Versions) -> npt.NDArray[np.float64]:
        """Return the exact distances of rows, infinite for those that do not match."""
        column = rows.fields.get(self._query.column.number)
        if column is None:
            return np.full(len(rows), np.inf)
        vectors, known = vectors_of(column, np.float64)
        far = distances(vectors, self._query.values, self._query.metric)
        matching = known & np.isfinite(far) & matches(rows, self._request)
        return np.where(matching, far, np.inf)

    def add(self, rows: Versions, far: npt.NDArray[np.float64]) -> None:
        """Add current rows, none of which was added before."""
        if self.ranked is not None and len(self.ranked.rows):
            rows = concat_versions([self.ranked.rows, rows], self._request.schema)
            far = np.concatenate([self.ranked.values, far])
        self.ranked = Ranked.best(rows, far, self.k)


class CandidatePool:
    """Candidates that were read, by exact distance.

    Whether a row is current and meets the condition is checked of rows of the result only, and of
    those as far as its last: most are both.
    """

    def __init__(
        self,
        state: SearchState,
        request: SearchRequest,
        query: VectorQuery,
        entries: Sequence[SegmentEntry],
        rest: Sequence[SegmentEntry],
    ) -> None:
        self._state, self._request, self._query = state, request, query
        self._entries, self._rest = entries, rest
        self._columns = Projection.of(request.schema, request.columns_read, None).numbers or ()
        self._picker = RowPicker(state, entries)
        self._rows: Versions = Versions.empty(request.schema)
        self._source = np.zeros(0, np.int64)
        self._far: npt.NDArray[np.float64] = np.zeros(0)
        self._checked = np.zeros(0, bool)

    def __len__(self) -> int:
        return int(np.isfinite(self._far).sum())

    def add(self, source: Places, ordinals: Ordinals) -> None:
        """Read candidates."""
        order = np.lexsort((ordinals, source))
        source, number = source[order], self._query.column.number
        rows = self._picker.rows(source, ordinals[order], sorted({number, *self._columns}))
        far, checked = self._distances(rows), np.zeros(len(rows), bool)
        if number not in self._columns:
            rows = rows.with_fields({n: rows.fields[n] for n in self._columns if n in rows.fields})
        if len(self._far):
            rows = concat_versions([self._rows, rows], self._request.schema)
            far = np.concatenate([self._far, far])
            source = np.concatenate([self._source, source])
            checked = np.concatenate([self._checked, checked])
        self._rows, self._far, self._source, self._checked = rows, far, source, checked

    def _distances(self, rows: Versions) -> npt.NDArray[np.float64]:
        column = rows.fields.get(self._query.column.number)
        if column is None:
            return np.full(len(rows), np.inf)
        vectors, known = vectors_of(column, np.float64)
        far = distances(vectors, self._query.values, self._query.metric)
        return np.where(known & np.isfinite(far), far, np.inf)

    def settle(self, k: int) -> int:
        """Check the k nearest until all of them count; return how many did not.

        Rows as far as the k-th are among them: of those, the result has the smaller keys.
        """
        stale = 0
        while True:
            far = self._far
            bound = np.partition(far, k - 1)[k - 1] if len(far) > k else np.inf
            unchecked = np.flatnonzero((far <= bound) & ~self._checked & np.isfinite(far))
            if not len(unchecked):
                return stale
            stale += self._check(unchecked.astype(np.int64))

    def _check(self, places: Places) -> int:
        """Check some candidates; return how many of them do not count."""
        state, rows = self._state, self._rows.take(places)
        counts = state.are_current(rows, self._entries, in_memory=False, homes=self._source[places])
        if self._rest or not state.is_memory_empty:
            counts &= ~state.are_looked_up(rows, self._rest)
        if self._request.where is not None:
            counts &= matches(rows, self._request)
        self._checked[places] = True
        self._far[places[~counts]] = np.inf
        return int((~counts).sum())

    def ranked(self, k: int) -> Ranked:
        """Return the nearest of the rows that were checked."""
        return Ranked.best(self._rows, np.where(self._checked, self._far, np.inf), k)


@dataclass(frozen=True, slots=True)
class _Pages:
    """Pages of several segments, and rows in them."""

    pages: list[tuple[str, int]]
    """The id of the segment, and the number of the page in it."""
    rows: Places
    """Of each page."""
    picks: bytes
    """For each row, the place of its page among these and its place in the page."""


class RowPicker:
    """Reads rows of segments by their ordinals."""

    def __init__(self, state: SearchState, entries: Sequence[SegmentEntry]) -> None:
        self._state, self._entries = state, entries
        self._tails = [state.segments.tail(entry) for entry in entries]
        self._ids = [entry.id for entry in entries]
        self._types = state.manifest.schema.types()
        if not entries:
            return
        page_rows = [tail.index.pages.rows for tail in self._tails]
        self._page_rows = np.concatenate(page_rows) if len(entries) > 1 else page_rows[0]
        self._ends: Places = np.cumsum(self._page_rows)
        self._first_pages = np.cumsum([0, *map(len, page_rows)])
        self._first_rows = np.concatenate([[0], self._ends])[self._first_pages]

    def rows(self, source: Places, ordinals: Ordinals, columns: Sequence[int]) -> Versions:
        """Return rows with these columns, in the order of their sources and ordinals."""
        known = self._rows_in_memory(source, ordinals, columns) if len(source) else None
        if known is not None:
            return known
        state, entries = self._state, self._entries
        parts = _runs(source)

        def read(part: slice) -> Versions:
            return state.rows_at(entries[source[part.start]], ordinals[part], columns)

        def is_known(part: slice) -> bool:
            return state.segments.has_values(entries[source[part.start]], ordinals[part], KEYS)

        found = state.gather(read, parts, is_known)
        schema = state.manifest.schema
        return concat_versions(found, schema) if found else Versions.empty(schema)

    # --- from memory ----------------------------------------------------------------
    def _places(self, source: Places, ordinals: Ordinals) -> _Pages:
        rows = self._first_rows[source] + ordinals
        of_row = self._ends.searchsorted(rows, side="right")
        fresh = np.ones(len(rows), bool)
        np.not_equal(of_row[1:], of_row[:-1], out=fresh[1:])
        chosen = of_row[fresh]
        picks = np.empty((len(rows), 2), "<i4")
        picks[:, 0] = fresh.cumsum() - 1
        picks[:, 1] = rows - (self._ends[of_row] - self._page_rows[of_row])
        homes, ids = source[fresh], self._ids
        numbers = (chosen - self._first_pages[homes]).tolist()
        pages = [(ids[home], page) for home, page in zip(homes.tolist(), numbers, strict=True)]
        return _Pages(pages, self._page_rows[chosen], picks.tobytes())

    def _column(self, pages: _Pages, number: int) -> pa.Array | None:
        """Return a column of rows whose pages are all in memory; None for others."""
        keys = [(home, number, page) for home, page in pages.pages]
        payloads: list[Any] = self._state.segments.cache.peek_many(keys)
        if None in payloads:
            return None
        fields = [tail.fields[number] for tail in self._tails if number in tail.fields]
        if any(field.arrow != self._types[number] for field in fields):
            return None
        return join_column(payloads, pages.rows, fields[0], pages.picks)

    def _rows_in_memory(
        self, source: Places, ordinals: Ordinals, columns: Sequence[int]
    ) -> Versions | None:
        pages = self._places(source, ordinals)
        keys = [(home, KEYS, page) for home, page in pages.pages]
        payloads: list[Any] = self._state.segments.cache.peek_many(keys)
        rows = None if None in payloads else join_keys(payloads, pages.rows, pages.picks)
        if rows is None:
            return None
        fields = {number: self._column(pages, number) for number in columns}
        if None in fields.values():
            return None
        ingested = np.array([entry.rows_lsn for entry in self._entries], np.int64)[source]
        lsns = np.where(ingested > 0, ingested, rows.lsns)
        return Versions(rows.keys, lsns, rows.seqs, rows.kinds, fields)


def _runs(source: Places) -> list[slice]:
    """Return the runs of equal numbers."""
    starts = np.flatnonzero(np.diff(source, prepend=-1)).tolist()
    return [slice(*pair) for pair in pairwise([*starts, len(source)])]
