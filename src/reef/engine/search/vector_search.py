"""A vector search over one snapshot: candidates of all sources, checked, ranked by exact distance.

    1  plan      the tails of all segments and the centroids, in one round of requests; segments
                 whose indexes serve the query, and the others, which are searched row by row
    2  lists     of each indexed segment, the lists nearest to the query
    3  rows      the best candidates of all segments together; those that are not current, or do not
                 meet the condition, are replaced by the next best
    4  rank      by the stored vectors, together with the rows of memory and of unindexed segments

Only step 2 approximates: every row in the result is current, meets the condition and has its exact
distance. An index that cannot be read is reported once and its segment searched row by row.
`recall="exact"` reads all rows.

With a filter, the number of rows of a segment that may match decides how its index is read: few are
compared with the query by their stored vectors, exactly; of many, more lists are read, the more
rows the filter excludes, and the others are left out of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

from reef.engine.read.skipping import filter_indexes, matching_rows
from reef.engine.search.request import (
    Ranked,
    SearchReport,
    SearchRequest,
    VectorQuery,
    matches,
    one_by_one,
)
from reef.engine.search.state import SearchState
from reef.errors import CorruptionError, NotFoundError
from reef.formats.coding import Buffer
from reef.formats.index_block import IndexKind
from reef.formats.manifest import SegmentEntry
from reef.formats.segment import IndexPlace
from reef.formats.vector_index import (
    CentroidSet,
    VectorDirectory,
    VectorList,
    as_indexed,
    distances,
    vectors_of,
)
from reef.formats.versions import Versions, concat_versions

EXACT_ROWS_MIN = 2048
"""So few matching rows are always compared exactly."""
EXACT_SHARE = 0.02
"""And so small a share of a segment's rows: lists hold too few of them."""
ROWS_AT_ONCE = 4096
Ordinals = npt.NDArray[np.uint32]
Distances = npt.NDArray[np.float64]
RERANK_MIN, RERANK_FACTOR = 50, 4
"""Candidates whose stored vectors are read, at least, and for each row of the result."""
WIDER = 4
"""How many times as many lists are read if those so far have too few rows that count."""


@dataclass(slots=True)
class SegmentVectors:
    """The vector index of one segment, for one query."""

    state: SearchState
    entry: SegmentEntry
    place: IndexPlace
    directory: VectorDirectory
    centroids: CentroidSet
    query: VectorQuery
    allowed: BitMap | None = None
    """Rows that may match the filter; None without one."""
    lists_read: int = 0
    _order: npt.NDArray[np.int64] | None = None
    _rows: list[tuple[Ordinals, Distances]] = field(default_factory=list)

    @property
    def is_exact(self) -> bool:
        """Whether the matching rows are few enough to compare all of them."""
        if self.allowed is None:
            return False
        return len(self.allowed) <= max(EXACT_ROWS_MIN, EXACT_SHARE * self.directory.rows)

    @property
    def probes(self) -> int:
        """How many lists are read at first."""
        options = {} if self.query.spec is None else self.query.spec.options
        probes = self.query.probes or int(options.get("probes", self.centroids.probes))
        if self.allowed is not None and self.directory.rows:
            share = len(self.allowed) / self.directory.rows
            probes = int(np.ceil(probes / max(share, 1e-9) ** 0.5))
        return min(probes, len(self.centroids))

    @property
    def is_exhausted(self) -> bool:
        """Whether there are no more candidates than those returned so far."""
        return self.is_exact or self.lists_read >= len(self.centroids)

    def candidates(self, lists: int) -> tuple[Ordinals, Distances]:
        """Return rows with about their distances: those of so many lists, or all that match."""
        if self.is_exact and not self._rows:
            self._rows.append(self._exact())
        elif not self.is_exact:
            self._read_up_to(min(lists, len(self.centroids)))
        return (
            np.concatenate([np.zeros(0, np.uint32), *(ordinals for ordinals, _ in self._rows)]),
            np.concatenate([np.zeros(0), *(far for _, far in self._rows)]),
        )

    def _read_up_to(self, lists: int) -> None:
        if self._order is None:
            by_product = self.query.metric == "dot"
            self._order = self.centroids.nearest(self._target, by_product=by_product)
        chosen = self._order[self.lists_read : lists]
        self.lists_read = max(self.lists_read, lists)
        filled = np.sort(chosen[self.directory.counts[chosen] > 0]).tolist()
        if not filled:
            return
        spans = [self.directory.span(number) for number in filled]
        parts = self.state.segments.index_parts(self.entry, self.place, spans)
        ordinals, far = self.directory.distances(self._decoded(filled, parts), self._target)
        if self.allowed is not None:
            inside = _are_in(self.allowed, ordinals)
            ordinals, far = ordinals[inside], far[inside]
        self._rows.append((ordinals, far.astype(np.float64)))

    def _decoded(self, numbers: Sequence[int], parts: Sequence[Buffer]) -> list[VectorList]:
        pairs = zip(numbers, parts, strict=True)
        return [self.directory.decode_list(number, part) for number, part in pairs]

    @property
    def _target(self) -> npt.NDArray[np.float32]:
        query = self.query
        return as_indexed(query.values, query.metric)

    def _exact(self) -> tuple[Ordinals, Distances]:
        """Compare all matching rows with the query by their vectors."""
        assert self.allowed is not None
        ordinals = np.array(self.allowed.to_array(), np.uint32)
        column, parts = self.query.column.number, [np.zeros(0)]
        for at in range(0, len(ordinals), ROWS_AT_ONCE):
            rows = self.state.rows_at(self.entry, ordinals[at : at + ROWS_AT_ONCE], [column])
            stored = rows.fields.get(column)
            if stored is None:  # all of them are null
                parts.append(np.full(len(rows), np.inf))
                continue
            vectors, known = vectors_of(stored, np.float64)
            far = distances(vectors, self.query.values, self.query.metric)
            parts.append(comparable(np.where(known, far, np.inf), self.query))
        far = np.concatenate(parts)
        found = np.isfinite(far)
        return ordinals[found], far[found]


def comparable(exact: Distances, query: VectorQuery) -> Distances:
    """Return exact distances on the scale of those to codes, which leaves out constant terms."""
    if query.metric == "dot":
        return exact
    if query.metric == "cosine":
        return 2 * exact - 1  # |x|² - 2xq of unit vectors
    length = float(query.values.astype(np.float64) @ query.values.astype(np.float64))
    return exact**2 - length


def _are_in(allowed: BitMap, ordinals: Ordinals) -> npt.NDArray[np.bool_]:
    if not len(ordinals) or not len(allowed):
        return np.zeros(len(ordinals), bool)
    inside = np.zeros(max(int(ordinals.max()), int(allowed.max())) + 1, bool)
    inside[np.array(allowed.to_array())] = True
    return inside[ordinals]


class _Best:
    """The nearest rows so far, with their exact distances."""

    def __init__(self, request: SearchRequest, query: VectorQuery, k: int) -> None:
        self._request, self._query, self.k = request, query, k
        self.ranked = Ranked(Versions.empty(request.schema), np.zeros(0))

    def bound(self) -> float:
        """The distance from which on rows cannot be among the nearest."""
        values = self.ranked.values
        return float(values[-1]) if len(values) >= self.k else np.inf

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
        both = concat_versions([self.ranked.rows, rows], self._request.schema)
        self.ranked = Ranked.best(both, np.concatenate([self.ranked.values, far]), self.k)


@dataclass
class VectorRanking:
    """One search for vectors in one snapshot."""

    state: SearchState
    request: SearchRequest
    query: VectorQuery
    k: int
    report: SearchReport

    def run(self) -> Ranked:
        """Return the nearest rows, the nearest first."""
        self._best = self._nothing()
        self._columns = self.request.projection.numbers
        indexed = [] if self.request.exact else self._plan()
        if not indexed:
            self._everything()
        else:
            self.report.plan = "indexed"
            self._indexed(indexed)
        return self._best.ranked

    def _nothing(self) -> _Best:
        return _Best(self.request, self.query, self.k)

    # --- plan -----------------------------------------------------------------------
    def _plan(self) -> list[SegmentVectors]:
        """Return the segments whose indexes serve the query."""
        state, spec = self.state, self.query.spec
        if spec is None or not spec.centroids:
            return []
        entries = [entry for entry in state.entries if entry.rows and not entry.patches]
        if state.segments.waits and len(entries) > 0:
            state.runtime.map(self._prefetch, [*entries, None])
        return [found for entry in entries if (found := self._open(entry)) is not None]

    def _prefetch(self, entry: SegmentEntry | None) -> None:
        """Load the tail of a segment, or the centroids, into the cache; errors are raised later."""
        spec = self.query.spec
        assert spec is not None
        try:
            if entry is not None:
                self.state.segments.tail(entry)
            else:
                self.state.segments.centroids(spec)
        except (CorruptionError, NotFoundError):
            return

    def _open(self, entry: SegmentEntry) -> SegmentVectors | None:
        """Return the vector index of a segment; None if it has none that serves the query."""
        query, segments = self.query, self.state.segments
        assert query.spec is not None
        tail = segments.tail(entry)
        for number, place in enumerate(tail.footer.indexes):
            if place.spec.kind is not IndexKind.VECTOR or not place.is_built:
                continue
            if not place.spec.serves(query.spec):
                continue
            try:
                at = place.directory.offset
                directory = VectorDirectory.decode(tail.directory(number), tail.name, at)
                found = SegmentVectors(
                    self.state, entry, place, directory, segments.centroids(query.spec), query
                )
                return self._filtered(found)
            except (CorruptionError, NotFoundError) as error:
                self.report.add_damage(entry.id, error)
                return None
        return None

    def _filtered(self, found: SegmentVectors) -> SegmentVectors | None:
        """Apply the condition by the segment's filter indexes; None if they say nothing of it."""
        if self.request.where is None:
            return found
        indexes = filter_indexes(self.state.segments, found.entry)
        found.allowed = matching_rows(self.request.where, indexes)
        return None if found.allowed is None else found

    # --- row by row -----------------------------------------------------------------
    def _everything(self) -> None:
        self.report.segments_exhaustive = len(self.state.entries)
        for rows in self.state.everything(self.request.projection):
            self._scanned(rows)

    def _scanned(self, rows: Versions, own: Sequence[SegmentEntry] | None = None) -> None:
        """Add rows of a scan; with `own`, only those that no other segment has replaced."""
        self.report.rows_scanned += len(rows)
        far = self._best.distances(rows)
        near = np.flatnonzero(far <= self._best.bound()).astype(np.int64)
        near = near[np.isfinite(far[near])]
        if not len(near):
            return
        rows, far = rows.take(near), far[near]
        if own is not None:
            far = np.where(self.state.are_current(rows, own, in_memory=True), far, np.inf)
        self._best.add(rows, far)

    # --- by index -------------------------------------------------------------------
    def _indexed(self, indexed: list[SegmentVectors]) -> None:
        lists = {found.entry.id: found.probes for found in indexed}
        while True:
            indexed, found = self._candidates(indexed, lists)
            done = self._verify(indexed, found)
            open_ones = [one for one in indexed if not one.is_exhausted]
            if done or not open_ones:
                break
            lists |= {one.entry.id: WIDER * max(1, one.lists_read) for one in open_ones}
        self.report.segments_indexed = len(indexed)
        self.report.segments_exact = sum(one.is_exact for one in indexed)
        self.report.lists = sum(one.lists_read for one in indexed)
        self.report.candidates = sum(len(ordinals) for ordinals, _ in found)
        rest = self._rest(indexed)
        self.report.segments_exhaustive = len(rest)
        for rows, current in self.state.unindexed(rest, self.request.projection):
            self._scanned(rows, None if current else rest)

    def _rest(self, indexed: Sequence[SegmentVectors]) -> list[SegmentEntry]:
        """Return the segments that are searched row by row."""
        known = {one.entry.id for one in indexed}
        return [entry for entry in self.state.entries if entry.id not in known]

    def _candidates(
        self, indexed: list[SegmentVectors], lists: dict[str, int]
    ) -> tuple[list[SegmentVectors], list[tuple[Any, Any]]]:
        """Return the candidates of each segment, without segments whose index is damaged."""

        def read(one: SegmentVectors) -> tuple[Any, Any] | CorruptionError:
            try:
                return one.candidates(lists[one.entry.id])
            except CorruptionError as error:
                return error

        gather = self.state.runtime.map if self.state.segments.waits else one_by_one
        kept, found = [], []
        for one, result in zip(indexed, gather(read, indexed), strict=True):
            if isinstance(result, CorruptionError):
                self.report.add_damage(one.entry.id, result)
                continue
            kept.append(one)
            found.append(result)
        return kept, found

    def _verify(self, indexed: list[SegmentVectors], found: list[tuple[Any, Any]]) -> bool:
        """Read the best candidates until enough of them count; return whether they do."""
        pool = _CandidatePool(self.state, self._nothing(), self._rest(indexed))
        wanted = max(RERANK_MIN, RERANK_FACTOR * self.k)
        far = np.concatenate([np.zeros(0), *(far for _, far in found)])
        ordinals = np.concatenate([np.zeros(0, np.uint32), *(some for some, _ in found)])
        source = np.repeat(np.arange(len(found)), [len(some) for some, _ in found])
        order = np.argsort(far, kind="stable")
        at, step = 0, wanted
        while at < len(order) and len(pool) < wanted:
            chosen = order[at : at + step]
            at, step = at + step, 2 * step
            self._fill(pool, indexed, source[chosen], ordinals[chosen])
            if pool.settle(self.k):
                pool.settle(len(pool))  # some were replaced: the others are checked as well
        self._best = pool.best
        read = min(at, len(order))
        self.report.rows_read += read
        self.report.rows_stale += read - len(pool)
        # Probes are measured for the nearest rows: if most were replaced, the next are elsewhere.
        return len(pool) >= wanted and 2 * len(pool) >= read

    def _fill(
        self,
        pool: "_CandidatePool",
        indexed: list[SegmentVectors],
        source: npt.NDArray[np.int64],
        ordinals: npt.NDArray[np.uint32],
    ) -> None:
        """Read candidates, those of all segments in parallel."""

        def read(number: int) -> tuple[SegmentEntry, Versions]:
            entry = indexed[number].entry
            own = np.sort(ordinals[source == number])
            return entry, self.state.rows_at(entry, own, self._columns)

        gather = self.state.runtime.map if self.state.segments.waits else one_by_one
        for entry, rows in gather(read, np.unique(source).tolist()):
            pool.add(entry, rows)


class _CandidatePool:
    """Candidates that were read, by exact distance.

    A key that the filter of another segment has may be newer there. That is looked up for rows of
    the result only: filters are wrong now and then, and a lookup costs a round of requests.
    """

    def __init__(self, state: SearchState, best: _Best, rest: list[SegmentEntry]) -> None:
        self._state, self.best, self._rest = state, best, rest
        self._rows = best.ranked.rows
        self._far: npt.NDArray[np.float64] = np.zeros(0)
        self._doubtful = np.zeros(0, bool)

    def __len__(self) -> int:
        return int(np.isfinite(self._far).sum())

    def add(self, entry: SegmentEntry, rows: Versions) -> None:
        """Add rows of a segment."""
        far = self.best.distances(rows)
        current, doubtful = self._state.may_be_current(rows, [entry], in_memory=False)
        current &= ~self._state.are_looked_up(rows, self._rest)
        kept = np.flatnonzero(current & np.isfinite(far)).astype(np.int64)
        self._rows = concat_versions([self._rows, rows.take(kept)], self._state.manifest.schema)
        self._far = np.concatenate([self._far, far[kept]])
        self._doubtful = np.concatenate([self._doubtful, doubtful[kept]])

    def settle(self, k: int) -> int:
        """Look up the doubtful ones of the k nearest until none is; return how many were stale.

        Rows as far as the k-th are among them: of those, the result has the smaller keys.
        """
        stale = 0
        while True:
            nearest = self._nearest(k)
            doubtful = nearest[self._doubtful[nearest]]
            if not len(doubtful):
                break
            newest = self._state.are_newest(self._rows.take(doubtful))
            self._doubtful[doubtful] = False
            self._far[doubtful[~newest]] = np.inf
            stale += int((~newest).sum())
        self.best.ranked = Ranked.best(self._rows, self._far, self.best.k)
        return stale

    def _nearest(self, k: int) -> npt.NDArray[np.int64]:
        """Return the places of the rows that are no farther than the k-th."""
        finite = np.flatnonzero(np.isfinite(self._far)).astype(np.int64)
        if len(finite) <= k:
            return finite
        far = self._far[finite]
        near: npt.NDArray[np.int64] = finite[far <= np.partition(far, k - 1)[k - 1]]
        return near
