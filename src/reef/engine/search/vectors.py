"""The vector index of one segment: its candidates for a query, the nearest first.

Without a filter, the lists of the nearest centroids are read. With one, the number of rows that may
match decides. Of many, more lists are read, the more rows the filter excludes. Few are all compared
with the query: by the codes of all lists, or by their stored vectors where those are fewer bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

from reef.engine.search.request import VectorQuery
from reef.engine.search.state import SearchState
from reef.formats.centroids import CentroidSet
from reef.formats.manifest import SegmentEntry
from reef.formats.segment import IndexPlace
from reef.formats.vector_index import VectorDirectory, VectorList, distances, vectors_of

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
        elif numbers:
            parts = self.state.segments.index_parts(self.entry, self.place, self.spans(numbers))
            self._found.append(self._scored(numbers, parts))

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
            inside = _mask(self.allowed, self.state.segments.tail(self.entry).index.rows.sum())
            decoded = [one.take(np.flatnonzero(inside[one.ordinals])) for one in decoded]
        rows = VectorList.join(decoded)
        return rows.ordinals, directory.distances(rows, self.target)

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


def _mask(allowed: BitMap, rows: int) -> npt.NDArray[np.bool_]:
    inside = np.zeros(rows, bool)
    inside[np.array(allowed.to_array())] = True
    return inside
