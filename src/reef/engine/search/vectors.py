"""The vector index of one segment: its candidates for a query, the nearest first.

Without a filter, the lists of the nearest centroids are read. With one, the number of rows that may
match decides: few are compared with the query by their stored vectors, exactly; of many, more lists
are read, the more rows the filter excludes, and the others are left out of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

from reef.engine.search.request import VectorQuery
from reef.engine.search.state import SearchState
from reef.formats.centroids import CentroidSet
from reef.formats.coding import Buffer
from reef.formats.manifest import SegmentEntry
from reef.formats.segment import IndexPlace
from reef.formats.vector_index import (
    VectorDirectory,
    VectorList,
    as_indexed,
    distances,
    vectors_of,
)

EXACT_ROWS_MIN = 2048
"""So few matching rows are always compared exactly."""
EXACT_SHARE = 0.02
"""And so small a share of a segment's rows: lists hold too few of them."""
ROWS_AT_ONCE = 4096

Ordinals = npt.NDArray[np.uint32]
Distances = npt.NDArray[np.float64]


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
