"""A vector search over one snapshot: candidates of all sources, checked, ranked by exact distance.

    1  plan      the tails of all segments and the centroids, in one round of requests; segments
                 whose indexes serve the query, and the others, which are searched row by row
    2  filters   of each indexed segment, the rows that may meet the condition
    3  lists     of each indexed segment, the lists nearest to the query
    4  rows      the candidates of all segments together that may be among the nearest
    5  result    the nearest of them, and of the rows of memory and of unindexed segments; those
                 that are not current, or do not meet the condition, are replaced by the next best

Only step 3 approximates: every row in the result is current, meets the condition and has its exact
distance. An index that cannot be read is reported once and its segment searched row by row.
`recall="exact"` reads all rows.

Each step is one round of requests, for all segments at once; objects in memory take none.

With a filter, the number of rows of a segment that may match decides how its index is read. Of
many, more lists are read, the more rows the filter excludes. Few are all compared with the query:
by the codes of all lists, or by their stored vectors where those are fewer bytes.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

from reef.engine.read.skipping import rows_by_index
from reef.engine.search.candidates import CandidatePool, NearestRows
from reef.engine.search.request import Ranked, SearchReport, SearchRequest, VectorQuery
from reef.engine.search.state import SearchState
from reef.errors import CorruptionError, NotFoundError
from reef.formats.coding import Buffer
from reef.formats.manifest import IndexKind, IndexSpec, SegmentEntry
from reef.formats.segment import IndexPlace
from reef.formats.vector_index import (
    CentroidSet,
    CodedLists,
    Floats,
    NearRows,
    VectorDirectory,
    as_indexed,
    code_margin,
    distances,
    nearest_codes,
    vectors_of,
)
from reef.formats.versions import Versions

RERANK_MIN, RERANK_FACTOR = 50, 4
"""Candidates whose stored vectors are read, at least, and for each row of the result."""
WIDER = 4
"""How many times as many lists are read if those so far have too few rows that count."""
COMPLETE_ROWS_MIN = 2048
"""So few matching rows are always all compared."""
COMPLETE_SHARE = 0.02
"""And so small a share of a segment's rows: the nearest lists hold too few of them."""
WHOLE_SHARE = 0.25
"""Of so many lists of a segment, the ranges that are read would be nearly all of its index."""
ROWS_AT_ONCE = 4096
LIST_BYTES = 64
"""Of memory, for each list of a directory."""

Ordinals = npt.NDArray[np.uint32]
Distances = npt.NDArray[np.float32]
Candidates = tuple[Ordinals, Distances]
VectorIndex = tuple[IndexPlace, VectorDirectory]
ABSENT = "absent"
"""In the cache: a segment has no index that serves."""


class Probed:
    """The lists of a centroid set in the order in which a query reads them."""

    def __init__(self, centroids: CentroidSet, target: Floats, *, by_product: bool) -> None:
        self._far = centroids.distances(target, by_product=by_product)
        self._known: dict[tuple[int, int], list[int]] = {}

    def numbers(self, start: int, end: int) -> list[int]:
        """Return the lists with these ranks, sorted; ranked once for all segments."""
        known = self._known.get((start, end))
        if known is None:
            known = self._known[start, end] = self._ranked(start, end)
        return known

    def _ranked(self, start: int, end: int) -> list[int]:
        far, places = self._far, np.arange(len(self._far))
        if end < len(far):  # only those that are among the first are sorted
            places = np.flatnonzero(far <= np.partition(far, end - 1)[end - 1])
        ranked = places[np.argsort(far[places], kind="stable")][start:end]
        numbers: list[int] = np.sort(ranked).tolist()
        return numbers


@dataclass(slots=True)
class SegmentVectors:
    """The vector index of one segment, for one query."""

    state: SearchState
    entry: SegmentEntry
    place: IndexPlace
    directory: VectorDirectory
    centroids: CentroidSet
    query: VectorQuery
    probed: Probed
    allowed: BitMap | None = None
    """Rows that may match the filter; None without one."""
    fits: bool = False
    """Whether the data of all indexes are few enough to be kept in memory."""
    lists_read: int = 0
    numbers: list[int] = field(default_factory=list)
    """The lists that were read."""
    parts: list[Buffer] = field(default_factory=list)
    """As they are stored, without the empty ones; or the whole data of the index instead."""
    whole: Buffer | None = None
    compared: Candidates | None = None
    """Rows that were compared by their vectors instead."""

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
        """Whether there are no more candidates than those read so far."""
        return self.is_complete or self.lists_read >= len(self.centroids)

    def is_whole(self, lists: int) -> bool:
        """Whether all lists are read as one, if it is to be so many of them."""
        if self.is_complete:
            return not self._by_vectors
        return self.fits and lists >= WHOLE_SHARE * len(self.centroids)

    def next_lists(self, lists: int) -> list[int]:
        """Return the lists that are read next, if it is to be so many."""
        if not self.is_complete:
            return self.probed.numbers(self.lists_read, lists)
        return [] if self._by_vectors or self.numbers else list(range(len(self.centroids)))

    def add(self, numbers: Sequence[int], lists: int, parts: Sequence[Buffer] = ()) -> None:
        """Add lists, the last of so many."""
        self.lists_read = max(self.lists_read, min(lists, len(self.centroids)))
        self.numbers += numbers
        self.parts += parts

    def read(self, numbers: Sequence[int], lists: int) -> None:
        """Read and add lists, the last of so many; or all rows that match, if few do."""
        segments, directory = self.state.segments, self.directory
        if self.is_whole(lists):
            spans = directory.spans(range(len(directory.counts)))
            self.whole = segments.index_data(self.entry, self.place, spans) if spans else b""
            self.add(numbers, lists)
        elif self.is_complete:
            self.compared = self._compare() if self.compared is None else self.compared
            self.add((), lists)
        else:
            spans = directory.spans(numbers)
            self.add(numbers, lists, segments.index_parts(self.entry, self.place, spans))

    def is_known(self, lists: int) -> bool:
        """Whether `read` finds all lists in memory."""
        return self.is_whole(lists) and self.state.segments.has_index_data(self.entry, self.place)

    def coded(self) -> CodedLists:
        """Return the rows of all lists so far, to be compared by their codes."""
        if self.whole is None:
            return CodedLists(self.directory, self.parts, None, self._inside())
        spans = self.directory.span_array(self.numbers)
        return CodedLists(self.directory, [self.whole], spans, self._inside())

    @property
    def candidates(self) -> int:
        """How many rows are compared with the query."""
        if self.is_complete:
            return len(self.allowed or ())
        return int(self.directory.counts[self.numbers].sum())

    def _inside(self) -> npt.NDArray[np.bool_] | None:
        """Return which rows of the segment may match; None if all may."""
        if self.allowed is None:
            return None
        inside = np.zeros(self.state.segments.tail(self.entry).row_ends[-1], bool)
        inside[np.array(self.allowed.to_array(), np.int64)] = True
        return inside

    @property
    def _by_vectors(self) -> bool:
        """Whether the vectors of the matching rows are fewer bytes than all lists."""
        assert self.allowed is not None
        pages = self.state.segments.tail(self.entry).index.pages
        return len(self.allowed) * pages.average_bytes < self.directory.bytes

    def _compare(self) -> Candidates:
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
        return ordinals, np.concatenate(parts).astype(np.float32)


Plan = tuple[SegmentVectors, list[int]]
"""A segment, and the lists that are read of it next."""


def comparable(exact: npt.NDArray[np.float64], query: VectorQuery) -> npt.NDArray[np.float64]:
    """Return exact distances on the scale of those to codes, which leaves out constant terms."""
    if query.metric == "dot":
        return exact
    if query.metric == "cosine":
        return 2 * exact - 1  # |x|² - 2xq of unit vectors
    length = float(query.values.astype(np.float64) @ query.values.astype(np.float64))
    with np.errstate(over="ignore", invalid="ignore"):
        return exact**2 - length


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
        self._best = NearestRows(self.request, self.query, self.k)
        indexed = [] if self.request.exact else self._plan()
        if not indexed:
            self._everything()
        else:
            self.report.plan = "indexed"
            self._indexed(indexed)
        return self._best.ranked or Ranked(Versions.empty(self.request.schema), np.zeros(0))

    # --- plan -----------------------------------------------------------------------
    def _plan(self) -> list[SegmentVectors]:
        """Return the segments whose indexes serve the query."""
        state, query = self.state, self.query
        if query.spec is None or not query.spec.centroids:
            return []
        entries = [entry for entry in state.entries if entry.rows and not entry.patches]
        specs, found = (query.spec, *query.replaced), dict[str, SegmentVectors]()
        known = [self._known(entries, spec) for spec in specs]
        if any(None in some for some in known) or not all(map(state.segments.has_centroids, specs)):
            items: list[SegmentEntry | IndexSpec] = [*entries, *specs]
            state.gather(self._prefetch, items, self._is_prefetched)
        for spec, some in zip(specs, known, strict=True):
            found |= self._planned(entries, spec, some, found.keys())
        indexed = [found[entry.id] for entry in entries if entry.id in found]
        size = sum(one.directory.bytes for one in indexed)
        for one in indexed:
            one.fits = state.segments.bytes_kept(size) > 0
        return self._filtered(indexed)

    def _known(self, entries: Sequence[SegmentEntry], spec: IndexSpec) -> list[Any]:
        """Return what the cache has of the vector indexes of segments."""
        keys = [("vectors", entry.id, spec.centroids) for entry in entries]
        return self.state.segments.cache.peek_many(keys)

    def _planned(
        self,
        entries: Sequence[SegmentEntry],
        spec: IndexSpec,
        known: Sequence[Any],
        done: Collection[str],
    ) -> dict[str, SegmentVectors]:
        """Return the indexes with these centroids, by segment, without those that are done."""
        found = {}
        for entry, opened in zip(entries, known, strict=True):
            if entry.id in done or opened is ABSENT or entry.id in self.report.damaged:
                continue
            index = opened or self._open(entry, spec)
            if index is None:
                continue
            try:
                centroids, probed = self._probed(spec)
            except (CorruptionError, NotFoundError) as error:
                self.report.add_damage(entry.id, error)
                continue
            found[entry.id] = SegmentVectors(
                self.state, entry, index[0], index[1], centroids, self.query, probed
            )
        return found

    def _probed(self, spec: IndexSpec) -> tuple[CentroidSet, Probed]:
        """Return a set of centroids, and the order in which the query reads its lists."""
        known = self._orders.get(spec.centroids)
        if known is None:
            centroids = self.state.segments.centroids(spec)
            by_product = self.query.metric == "dot"
            known = centroids, Probed(centroids, self._target, by_product=by_product)
            self._orders[spec.centroids] = known
        return known

    @cached_property
    def _orders(self) -> dict[str, tuple[CentroidSet, Probed]]:
        return {}

    def _is_prefetched(self, item: SegmentEntry | IndexSpec) -> bool:
        segments = self.state.segments
        if isinstance(item, IndexSpec):
            return segments.has_centroids(item)
        return segments.has_tail(item)

    def _prefetch(self, item: SegmentEntry | IndexSpec) -> None:
        """Load the tail of a segment, or centroids, into the cache; errors are raised later."""
        try:
            if isinstance(item, IndexSpec):
                self.state.segments.centroids(item)
            else:
                self.state.segments.tail(item)
        except (CorruptionError, NotFoundError):
            return

    def _open(self, entry: SegmentEntry, spec: IndexSpec) -> VectorIndex | None:
        """Return the vector index of a segment, decoded once; None if it has none that serves."""
        tail, key = self.state.segments.tail(entry), ("vectors", entry.id, spec.centroids)
        for number, place in enumerate(tail.footer.indexes):
            is_vector = place.spec.kind is IndexKind.VECTOR and place.is_built
            if is_vector and place.spec.serves(spec):
                try:
                    data = tail.directory(number)
                    directory = VectorDirectory.decode(data, tail.name, place.directory.offset)
                except CorruptionError as error:
                    self.report.add_damage(entry.id, error)
                    return None
                size = LIST_BYTES * len(directory.counts) + 2 * directory.scale.nbytes
                self.state.segments.cache.put(key, (place, directory), size)
                return place, directory
        self.state.segments.cache.put(key, ABSENT, LIST_BYTES)
        return None

    @cached_property
    def _target(self) -> npt.NDArray[np.float32]:
        return as_indexed(self.query.values, self.query.metric)

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
            rest = self._rest(indexed)
            done = self._compare(indexed, rest)
            open_ones = [one for one in indexed if not one.is_exhausted]
            if done or not open_ones:
                break
            lists |= {one.entry.id: WIDER * max(1, one.lists_read) for one in open_ones}
        self.report.segments_indexed = len(indexed)
        self.report.segments_exact = sum(one.is_complete for one in indexed)
        self.report.lists = sum(one.lists_read for one in indexed)
        self.report.candidates = sum(one.candidates for one in indexed)
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
        planned = [(one, one.next_lists(lists[one.entry.id])) for one in indexed]
        missing = self._take_known(planned, lists)
        if not missing:
            return indexed

        def read(plan: Plan) -> CorruptionError | None:
            one, numbers = plan
            try:
                one.read(numbers, lists[one.entry.id])
            except CorruptionError as error:
                return error
            return None

        def is_known(plan: Plan) -> bool:
            return plan[0].is_known(lists[plan[0].entry.id])

        damaged = set()
        errors = self.state.gather(read, missing, is_known)
        for (one, _), error in zip(missing, errors, strict=True):
            if error is not None:
                damaged.add(one.entry.id)
                self.report.add_damage(one.entry.id, error)
        return [one for one in indexed if one.entry.id not in damaged]

    def _take_known(self, planned: Sequence[Plan], lists: dict[str, int]) -> list[Plan]:
        """Add the lists that are in memory; return the plans of the other segments."""
        by_list: list[Plan] = []
        missing: list[Plan] = []
        for one, numbers in planned:
            is_by_list = not one.is_complete and not one.is_whole(lists[one.entry.id])
            (by_list if is_by_list else missing).append((one, numbers))
        known = self.state.segments.known_parts(
            [(one.entry, one.place, one.directory.spans(numbers)) for one, numbers in by_list]
        )
        for (one, numbers), parts in zip(by_list, known, strict=True):
            if parts is None:
                missing.append((one, numbers))
            else:
                one.add(numbers, lists[one.entry.id], parts)
        return missing

    def _compare(self, indexed: list[SegmentVectors], rest: Sequence[SegmentEntry]) -> bool:
        """Compare the best candidates until enough of them count; return whether they do."""
        nearest = CandidateOrder(indexed, self._target)
        entries = [one.entry for one in indexed]
        pool = CandidatePool(self.state, self.request, self.query, entries, rest)
        most = max(RERANK_MIN, RERANK_FACTOR * self.k)
        enough = nearest.worth_reading(self.k, most) if self.request.where is None else most
        read, step = 0, enough
        while len(pool) < enough:
            some = nearest.part(read, read + step)
            if not len(some):
                break
            read, step = read + len(some), max(RERANK_MIN, 2 * step)
            pool.add(some.sources, some.ordinals)
            if pool.settle(self.k):
                pool.settle(len(pool))  # some were replaced: the others are checked as well
        self._best.ranked = pool.ranked(self.k)
        self.report.rows_read += read
        self.report.rows_stale += read - len(pool)
        # Probes are measured for the nearest rows: if most were replaced, the next are elsewhere.
        return len(pool) >= enough and 2 * len(pool) >= read


class CandidateOrder:
    """The candidates of all segments in the order of about their distances."""

    def __init__(self, indexed: Sequence[SegmentVectors], target: Floats) -> None:
        self._target = target
        listed = [n for n, one in enumerate(indexed) if one.compared is None and one.numbers]
        self._numbers = np.array(listed, np.int64)
        self._coded = [indexed[n].coded() for n in listed]
        self._compared = [(n, one.compared) for n, one in enumerate(indexed) if one.compared]
        self._asked = 0
        self._found = NearRows(np.zeros(0, np.int64), np.zeros(0, np.uint32), np.zeros(0, "<f4"))

    def worth_reading(self, k: int, most: int) -> int:
        """Return how many of the first rows may be among the k nearest, at most `most`."""
        far = self._first(most).far
        if self._compared or len(far) <= k:
            return most
        margin = code_margin(self._coded, self._target, float(far[k - 1]))
        return int(np.searchsorted(far, far[k - 1] + margin, side="right"))

    def part(self, start: int, end: int) -> NearRows:
        """Return the candidates with these ranks, as far as there are any."""
        found = self._first(end)
        return NearRows(found.sources[start:end], found.ordinals[start:end], found.far[start:end])

    def _first(self, most: int) -> NearRows:
        """Return the first candidates, at least so many if there are as many."""
        if most > self._asked:
            self._asked = most
            self._found = self._ranked(most)
        return self._found

    def _ranked(self, most: int) -> NearRows:
        found = nearest_codes(self._coded, self._target, most)
        sources = self._numbers[found.sources]
        if not self._compared:
            return NearRows(sources, found.ordinals, found.far)
        compared = [rows for _, rows in self._compared]
        places = [np.full(len(rows[0]), number) for number, rows in self._compared]
        return NearRows.nearest(
            np.concatenate([sources, *places]),
            np.concatenate([found.ordinals, *(ordinals for ordinals, _ in compared)]),
            np.concatenate([found.far, *(far for _, far in compared)]),
            most,
        )
