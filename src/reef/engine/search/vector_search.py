"""A vector search over one snapshot: candidates of all sources, checked, ranked by exact distance.

    1  plan      the tails of all segments and the centroids, in one round of requests; segments
                 whose indexes serve the query, and the others, which are searched row by row
    2  filters   of each indexed segment, the rows that may meet the condition
    3  lists     of each indexed segment, the lists nearest to the query
    4  rows      the stored vectors of the best candidates of all segments together
    5  result    the nearest of them, and of the rows of memory and of unindexed segments; those
                 that are not current, or do not meet the condition, are replaced by the next best

Only step 3 approximates: every row in the result is current, meets the condition and has its exact
distance. An index that cannot be read is reported once and its segment searched row by row.
`recall="exact"` reads all rows.

Each step is one round of requests, for all segments at once; what is in memory takes none.

With a filter, the number of rows of a segment that may match decides how its index is read. Of
many, more lists are read, the more rows the filter excludes. Few are all compared with the query:
by the codes of all lists, or by their stored vectors where those are fewer bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

from reef.engine.read.scan import Projection
from reef.engine.read.skipping import rows_by_index
from reef.engine.search.request import Ranked, SearchReport, SearchRequest, VectorQuery, matches
from reef.engine.search.state import SearchState
from reef.errors import CorruptionError, NotFoundError
from reef.formats.manifest import IndexKind, SegmentEntry
from reef.formats.segment import IndexPlace, SegmentTail
from reef.formats.segment_index import KEYS
from reef.formats.vector_index import (
    CentroidSet,
    VectorDirectory,
    VectorList,
    as_indexed,
    distances,
    vectors_of,
)
from reef.formats.versions import Versions, concat_versions

T = TypeVar("T")
R = TypeVar("R")
RERANK_MIN, RERANK_FACTOR = 50, 4
"""Candidates whose stored vectors are read, at least, and for each row of the result."""
WIDER = 4
"""How many times as many lists are read if those so far have too few rows that count."""
COMPLETE_ROWS_MIN = 2048
"""So few matching rows are always all compared."""
COMPLETE_SHARE = 0.02
"""And so small a share of a segment's rows: the nearest lists hold too few of them."""
ROWS_AT_ONCE = 4096

Ordinals = npt.NDArray[np.uint32]
Distances = npt.NDArray[np.float32]
Candidates = tuple[Ordinals, Distances]


@dataclass(slots=True)
class SegmentVectors:
    """The vector index of one segment, for one query."""

    state: SearchState
    entry: SegmentEntry
    place: IndexPlace
    directory: VectorDirectory
    centroids: CentroidSet
    query: VectorQuery
    target: npt.NDArray[np.float32]
    """The query as indexes have it."""
    allowed: BitMap | None = None
    """Rows that may match the filter; None without one."""
    lists_read: int = 0
    _found: list[Candidates] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether the matching rows are few enough to compare all of them."""
        if self.allowed is None:
            return False
        return len(self.allowed) <= max(COMPLETE_ROWS_MIN, COMPLETE_SHARE * self.directory.rows)

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
        return self.is_complete or self.lists_read >= len(self.centroids)

    def numbers(self, order: npt.NDArray[np.int64], lists: int) -> list[int]:
        """Return the lists that are read next, sorted, if it is to be so many of an order."""
        if self.is_complete:
            return [] if self._found or self._by_vectors else self._filled(order)
        return self._filled(order[self.lists_read : lists])

    def _filled(self, lists: npt.NDArray[np.int64]) -> list[int]:
        numbers: list[int] = np.sort(lists[self.directory.counts[lists] > 0]).tolist()
        return numbers

    def spans(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """Return where lists are in the data."""
        return [self.directory.span(number) for number in numbers]

    def read(self, numbers: Sequence[int], lists: int) -> None:
        """Add the candidates of lists, the last of so many; or all rows that match, if few do."""
        self.lists_read = max(self.lists_read, min(lists, len(self.centroids)))
        if self.is_complete and self._by_vectors:
            if not self._found:
                self._found.append(self._compared())
        elif numbers and self.is_complete:
            segments = self.state.segments
            data = segments.index_data(self.entry, self.place, self.spans(numbers))
            rows = self.directory.rows_among(self._inside(), data)
            self._found.append((rows.ordinals, self.directory.distances(rows, self.target)))
        elif numbers:
            parts = self.state.segments.index_parts(self.entry, self.place, self.spans(numbers))
            self._found.append(self._scored(numbers, parts))

    def is_known(self, numbers: Sequence[int]) -> bool:
        """Whether `read` finds lists in memory."""
        segments = self.state.segments
        if self.is_complete:
            return not self._by_vectors and segments.has_index_data(self.entry, self.place)
        return segments.has_index_parts(self.entry, self.place, self.spans(numbers))

    def candidates(self) -> Candidates:
        """Return all candidates so far, with about their distances."""
        if len(self._found) == 1:
            return self._found[0]
        return (
            np.concatenate([np.zeros(0, np.uint32), *(ordinals for ordinals, _ in self._found)]),
            np.concatenate([np.zeros(0, np.float32), *(far for _, far in self._found)]),
        )

    def _scored(self, numbers: Sequence[int], parts: Sequence[bytes | memoryview]) -> Candidates:
        directory = self.directory
        decoded = [
            directory.decode_list(number, part, is_checked=True)
            for number, part in zip(numbers, parts, strict=True)
        ]
        if self.allowed is not None:
            inside = self._inside()
            decoded = [one.take(np.flatnonzero(inside[one.ordinals])) for one in decoded]
        rows = VectorList.join(decoded)
        return rows.ordinals, directory.distances(rows, self.target)

    def _inside(self) -> npt.NDArray[np.bool_]:
        """Return which rows of the segment may match."""
        assert self.allowed is not None
        inside = np.zeros(self.state.segments.tail(self.entry).index.rows.sum(), bool)
        inside[np.array(self.allowed.to_array(), np.int64)] = True
        return inside

    @property
    def _by_vectors(self) -> bool:
        """Whether the vectors of the matching rows are fewer bytes than all lists."""
        assert self.allowed is not None
        pages = self.state.segments.tail(self.entry).index.pages
        return len(self.allowed) * pages.average_bytes < self.directory.bytes

    def _compared(self) -> Candidates:
        """Compare all matching rows with the query by their vectors."""
        assert self.allowed is not None
        ordinals = np.array(self.allowed.to_array(), np.uint32)
        column, parts = self.query.column, [np.zeros(0)]
        for at in range(0, len(ordinals), ROWS_AT_ONCE):
            some = ordinals[at : at + ROWS_AT_ONCE]
            stored = self.state.values_at(self.entry, some, column.number)
            if stored is None:  # all of them are null
                parts.append(np.full(len(some), np.inf))
                continue
            vectors, known = vectors_of(stored, np.float64)
            far = distances(vectors, self.query.values, self.query.metric)
            parts.append(comparable(np.where(known, far, np.inf), self.query))
        every: Distances = np.concatenate(parts).astype(np.float32)
        found = np.isfinite(every)
        return ordinals[found], every[found]


def comparable(exact: npt.NDArray[np.float64], query: VectorQuery) -> npt.NDArray[np.float64]:
    """Return exact distances on the scale of those to codes, which leaves out constant terms."""
    if query.metric == "dot":
        return exact
    if query.metric == "cosine":
        return 2 * exact - 1  # |x|² - 2xq of unit vectors
    length = float(query.values.astype(np.float64) @ query.values.astype(np.float64))
    with np.errstate(over="ignore", invalid="ignore"):
        return exact**2 - length


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
        indexed = [] if self.request.exact else self._plan()
        if not indexed:
            self._everything()
        else:
            self.report.plan = "indexed"
            self._indexed(indexed)
        return self._best.ranked

    def _nothing(self) -> _Best:
        return _Best(self.request, self.query, self.k)

    def _gather(
        self, call: Callable[[T], R], items: Sequence[T], is_known: Callable[[T], bool]
    ) -> list[R]:
        """Call with each item: those that have to be read in parallel, where reads wait."""
        if self.state.segments.waits and len(items) > 1:
            missing = [item for item in items if not is_known(item)]
            if len(missing) > 1:
                return self.state.runtime.map(call, items)
        return [call(item) for item in items]

    # --- plan -----------------------------------------------------------------------
    def _plan(self) -> list[SegmentVectors]:
        """Return the segments whose indexes serve the query."""
        state, spec = self.state, self.query.spec
        if spec is None or not spec.centroids:
            return []
        entries = [entry for entry in state.entries if entry.rows and not entry.patches]
        self._gather(self._prefetch, [*entries, None], self._is_prefetched)
        found = [one for entry in entries if (one := self._open(entry)) is not None]
        return self._filtered(found)

    def _is_prefetched(self, entry: SegmentEntry | None) -> bool:
        assert self.query.spec is not None
        segments = self.state.segments
        if entry is None:
            return segments.has_centroids(self.query.spec)
        return segments.has_tail(entry)

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
                directory = self._directory(tail, number)
                centroids = segments.centroids(query.spec)
            except (CorruptionError, NotFoundError) as error:
                self.report.add_damage(entry.id, error)
                return None
            return SegmentVectors(
                self.state, entry, place, directory, centroids, query, self._target
            )
        return None

    def _directory(self, tail: SegmentTail, number: int) -> VectorDirectory:
        """Return the directory of an index, decoded once."""
        offset = tail.footer.indexes[number].directory.offset

        def load() -> tuple[VectorDirectory, int]:
            directory = VectorDirectory.decode(tail.directory(number), tail.name, offset)
            return directory, 2 * directory.counts.nbytes + 2 * directory.scale.nbytes

        return self.state.segments.cache.get(("vectors", tail.name, offset), load)

    @cached_property
    def _target(self) -> npt.NDArray[np.float32]:
        return as_indexed(self.query.values, self.query.metric)

    @cached_property
    def _order(self) -> npt.NDArray[np.int64]:
        """All lists, the most promising first."""
        assert self.query.spec is not None
        centroids = self.state.segments.centroids(self.query.spec)
        return centroids.nearest(self._target, by_product=self.query.metric == "dot")

    def _filtered(self, found: list[SegmentVectors]) -> list[SegmentVectors]:
        """Apply the condition by the segments' filter indexes, where these say something of it."""
        where = self.request.where
        if where is None or not found:
            return found
        rows = rows_by_index(
            self.state.segments, self.state.runtime, [one.entry for one in found], where
        )
        kept = []
        for one, allowed in zip(found, rows, strict=True):
            if isinstance(allowed, CorruptionError):
                self.report.add_damage(one.entry.id, allowed)
            elif allowed is not None:
                one.allowed = allowed
                kept.append(one)
        return kept

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
        lists = {one.entry.id: one.probes for one in indexed}
        while True:
            indexed = self._read_lists(indexed, lists)
            found = [one.candidates() for one in indexed]
            done = self._verify(indexed, found)
            open_ones = [one for one in indexed if not one.is_exhausted]
            if done or not open_ones:
                break
            lists |= {one.entry.id: WIDER * max(1, one.lists_read) for one in open_ones}
        self.report.segments_indexed = len(indexed)
        self.report.segments_exact = sum(one.is_complete for one in indexed)
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

    def _read_lists(
        self, indexed: list[SegmentVectors], lists: dict[str, int]
    ) -> list[SegmentVectors]:
        """Read so many lists of each segment; return those whose index is not damaged."""
        numbers = {one.entry.id: one.numbers(self._order, lists[one.entry.id]) for one in indexed}

        def read(one: SegmentVectors) -> CorruptionError | None:
            try:
                one.read(numbers[one.entry.id], lists[one.entry.id])
            except CorruptionError as error:
                return error
            return None

        def is_known(one: SegmentVectors) -> bool:
            return one.is_known(numbers[one.entry.id])

        kept = []
        for one, error in zip(indexed, self._gather(read, indexed, is_known), strict=True):
            if error is None:
                kept.append(one)
            else:
                self.report.add_damage(one.entry.id, error)
        return kept

    def _verify(self, indexed: list[SegmentVectors], found: list[Candidates]) -> bool:
        """Compare the best candidates until enough of them count; return whether they do."""
        pool = _CandidatePool(self, indexed)
        enough = max(RERANK_MIN, RERANK_FACTOR * self.k)
        candidates = _Nearest(found)
        read, step = 0, enough
        while read < len(candidates) and len(pool) < enough:
            source, ordinals = candidates.part(read, read + step)
            read, step = read + len(ordinals), 2 * step
            pool.add(source, ordinals)
            if pool.settle(self.k):
                pool.settle(len(pool))  # some were replaced: the others are checked as well
        self._best = pool.best()
        self.report.rows_read += read
        self.report.rows_stale += read - len(pool)
        # Probes are measured for the nearest rows: if most were replaced, the next are elsewhere.
        return len(pool) >= enough and 2 * len(pool) >= read


class _Nearest:
    """Candidates of all segments in the order of about their distances."""

    def __init__(self, found: Sequence[Candidates]) -> None:
        self._far = np.concatenate([np.zeros(0, np.float32), *(far for _, far in found)])
        self._ordinals = np.concatenate([np.zeros(0, np.uint32), *(some for some, _ in found)])
        self._ends = np.cumsum([len(some) for some, _ in found])
        self._order: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self._far)

    def part(self, start: int, end: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
        """Return the sources and ordinals of the candidates with these ranks."""
        if not start and end < len(self):
            chosen = np.argpartition(self._far, end - 1)[:end]
            self._order = None
        else:
            if self._order is None:
                self._order = np.argsort(self._far, kind="stable")
            chosen = self._order[start:end]
        return np.searchsorted(self._ends, chosen, side="right"), self._ordinals[chosen]


class _CandidatePool:
    """Candidates whose vectors were read, by exact distance.

    Whether a row is current and meets the condition is checked of rows of the result only, and of
    those as far as its last: most are both, and the check costs as much as all the rest.
    """

    def __init__(self, ranking: VectorRanking, indexed: Sequence[SegmentVectors]) -> None:
        self._ranking, self._state = ranking, ranking.state
        self._entries = [one.entry for one in indexed]
        self._rest = ranking._rest(indexed)
        names = ranking.request.columns_read
        self._columns = Projection.of(ranking.request.schema, names, None).numbers
        self._rows = Versions.empty(ranking.request.schema)
        self._source = np.zeros(0, np.int64)
        self._ordinals = np.zeros(0, np.uint32)
        self._far: npt.NDArray[np.float64] = np.zeros(0)
        self._place = np.zeros(0, np.int64)
        """Of each candidate in the checked rows; negative for those not checked."""

    def __len__(self) -> int:
        return int(np.isfinite(self._far).sum())

    def add(self, source: npt.NDArray[np.int64], ordinals: npt.NDArray[np.uint32]) -> None:
        """Read the vectors of candidates, those of all segments in parallel."""
        order = np.lexsort((ordinals, source))
        source, ordinals = source[order], ordinals[order]
        parts = _parts(source)
        query, segments = self._ranking.query, self._state.segments

        def read(part: slice) -> npt.NDArray[np.float64]:
            entry, some = self._entries[source[part.start]], ordinals[part]
            column = self._state.values_at(entry, some, query.column.number, self._columns or ())
            if column is None:
                return np.full(len(some), np.inf)
            vectors, known = vectors_of(column, np.float64)
            return np.where(known, distances(vectors, query.values, query.metric), np.inf)

        def is_known(part: slice) -> bool:
            entry = self._entries[source[part.start]]
            return segments.has_values(entry, ordinals[part], query.column.number)

        far = self._ranking._gather(read, parts, is_known)
        self._far = np.concatenate([self._far, *far])
        self._far[~np.isfinite(self._far)] = np.inf
        self._source = np.concatenate([self._source, source])
        self._ordinals = np.concatenate([self._ordinals, ordinals])
        self._place = np.concatenate([self._place, np.full(len(source), -1)])

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
            stale += self._check(np.sort(unchecked))

    def _nearest(self, k: int) -> npt.NDArray[np.int64]:
        """Return the places of the rows that are no farther than the k-th."""
        finite = np.flatnonzero(np.isfinite(self._far)).astype(np.int64)
        if len(finite) <= k:
            return finite
        far = self._far[finite]
        near: npt.NDArray[np.int64] = finite[far <= np.partition(far, k - 1)[k - 1]]
        return near

    def _check(self, places: npt.NDArray[np.int64]) -> int:
        """Read candidates as rows; return how many of them do not count."""
        order = np.lexsort((self._ordinals[places], self._source[places]))
        places = places[order]
        source, ordinals = self._source[places], self._ordinals[places]
        parts, schema = _parts(source), self._ranking.request.schema

        def read(part: slice) -> Versions:
            entry = self._entries[source[part.start]]
            return self._state.rows_at(entry, ordinals[part], self._columns)

        def is_known(part: slice) -> bool:
            return self._state.segments.has_values(
                self._entries[source[part.start]], ordinals[part], KEYS
            )

        found = self._ranking._gather(read, parts, is_known)
        rows = concat_versions(found, schema)
        counts = self._state.are_current(rows, self._entries, in_memory=False, homes=source)
        counts &= ~self._state.are_looked_up(rows, self._rest)
        counts &= matches(rows, self._ranking.request)
        self._place[places] = len(self._rows) + np.arange(len(places))
        self._far[places[~counts]] = np.inf
        self._rows = concat_versions([self._rows, rows], schema) if len(self._rows) else rows
        return int((~counts).sum())

    def best(self) -> _Best:
        """Return the nearest of the rows that were checked."""
        best = self._ranking._nothing()
        checked = np.flatnonzero(self._place >= 0)
        far = np.full(len(self._rows), np.inf)
        far[self._place[checked]] = self._far[checked]
        best.ranked = Ranked.best(self._rows, far, best.k)
        return best


def _parts(source: npt.NDArray[np.int64]) -> list[slice]:
    """Return the runs of equal numbers."""
    starts = np.flatnonzero(np.diff(source, prepend=-1)).tolist()
    return [slice(*pair) for pair in pairwise([*starts, len(source)])]
