"""The candidates of a vector search: read by ordinal, ranked by exact distance, checked.

Rows of all segments are read at once: what is in memory is picked from the pages of all of them
with one call for each column. What is not is read segment by segment, in parallel where reads wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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
    """Candidates whose vectors were read, by exact distance.

    Whether a row is current and meets the condition is checked of rows of the result only, and of
    those as far as its last: most are both, and the check costs as much as all the rest.
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
        self._rows: Versions | None = None
        self._source = np.zeros(0, np.int64)
        self._ordinals = np.zeros(0, np.uint32)
        self._far: npt.NDArray[np.float64] = np.zeros(0)
        self._place = np.zeros(0, np.int64)
        """Of each candidate in the checked rows; negative for those not checked."""

    def __len__(self) -> int:
        return int(np.isfinite(self._far).sum())

    def add(self, source: Places, ordinals: Ordinals) -> None:
        """Read the vectors of candidates."""
        order = np.lexsort((ordinals, source))
        source, ordinals = source[order], ordinals[order]
        far = np.full(len(source), np.inf)
        number = self._query.column.number
        for part, column in self._picker.columns(source, ordinals, number, self._columns):
            vectors, known = vectors_of(column, np.float64)
            exact = distances(vectors, self._query.values, self._query.metric)
            far[part] = np.where(known & np.isfinite(exact), exact, np.inf)
        fresh = np.full(len(source), -1)
        if len(self._far):
            far = np.concatenate([self._far, far])
            source = np.concatenate([self._source, source])
            ordinals = np.concatenate([self._ordinals, ordinals])
            fresh = np.concatenate([self._place, fresh])
        self._far, self._source, self._ordinals, self._place = far, source, ordinals, fresh

    def settle(self, k: int) -> int:
        """Check the k nearest until all of them count; return how many did not.

        Rows as far as the k-th are among them: of those, the result has the smaller keys.
        """
        stale = 0
        while True:
            nearest = self._nearest(k)
            unchecked = nearest[self._place[nearest] < 0]
            if not len(unchecked):
                return stale
            stale += self._check(unchecked)

    def _nearest(self, k: int) -> Places:
        """Return the places of the rows that are no farther than the k-th."""
        if len(self._far) <= k:
            return np.flatnonzero(np.isfinite(self._far)).astype(np.int64)
        bound = np.partition(self._far, k - 1)[k - 1]
        return np.flatnonzero((self._far <= bound) & np.isfinite(self._far)).astype(np.int64)

    def _check(self, places: Places) -> int:
        """Read candidates as rows; return how many of them do not count."""
        order = np.lexsort((self._ordinals[places], self._source[places]))
        places = places[order]
        source, state = self._source[places], self._state
        rows = self._picker.rows(source, self._ordinals[places], self._columns)
        counts = state.are_current(rows, self._entries, in_memory=False, homes=source)
        if self._rest or not state.is_memory_empty:
            counts &= ~state.are_looked_up(rows, self._rest)
        if self._request.where is not None:
            counts &= matches(rows, self._request)
        checked = 0 if self._rows is None else len(self._rows)
        self._place[places] = checked + np.arange(len(places))
        self._far[places[~counts]] = np.inf
        schema = self._request.schema
        self._rows = concat_versions([self._rows, rows], schema) if self._rows else rows
        return int((~counts).sum())

    def ranked(self, k: int) -> Ranked | None:
        """Return the nearest of the rows that were checked; None if none was."""
        if self._rows is None:
            return None
        checked = np.flatnonzero(self._place >= 0)
        far = np.full(len(self._rows), np.inf)
        far[self._place[checked]] = self._far[checked]
        return Ranked.best(self._rows, far, k)


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

    def columns(
        self, source: Places, ordinals: Ordinals, number: int, along: Sequence[int]
    ) -> "list[tuple[slice, pa.Array]]":
        """Return a column of rows in the order of their sources and ordinals, in parts; rows that
        no part has are null. If it has to be read, keys and the columns `along` are as well.
        """
        if not len(source):
            return []
        known = self._column(self._places(source, ordinals), number)
        if known is not None:
            return [(slice(0, len(source)), known)]
        state, entries = self._state, self._entries
        parts = _runs(source)

        def read(part: slice) -> pa.Array | None:
            return state.values_at(entries[source[part.start]], ordinals[part], number, along)

        def is_known(part: slice) -> bool:
            return state.segments.has_values(entries[source[part.start]], ordinals[part], number)

        found = zip(parts, state.gather(read, parts, is_known), strict=True)
        return [(part, column) for part, column in found if column is not None]

    def rows(self, source: Places, ordinals: Ordinals, columns: Sequence[int]) -> Versions:
        """Return rows with these columns, in the order of their sources and ordinals."""
        known = self._rows_in_memory(source, ordinals, columns)
        if known is not None:
            return known
        state, entries = self._state, self._entries
        parts = _runs(source)

        def read(part: slice) -> Versions:
            return state.rows_at(entries[source[part.start]], ordinals[part], columns)

        def is_known(part: slice) -> bool:
            return state.segments.has_values(entries[source[part.start]], ordinals[part], KEYS)

        found = state.gather(read, parts, is_known)
        return concat_versions(found, state.manifest.schema)

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
        payloads = self._state.segments.cache.peek_many(keys)
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
        payloads = self._state.segments.cache.peek_many(keys)
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
