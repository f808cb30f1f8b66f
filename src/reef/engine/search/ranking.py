"""Ranked rows, how they are fused, and the report of a search."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reef.engine.rows.output import to_record_batch
from reef.engine.search.request import SearchRequest
from reef.formats.versions import Versions, concat_versions

T = TypeVar("T")
FUSION_CONSTANT = 60
"""Of reciprocal rank fusion: how much the first ranks count more than the next."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class SearchReport:
    """How a search was run."""

    plan: str = "exhaustive"
    """`exhaustive` if all rows were read, otherwise `indexed`."""
    segments_indexed: int = 0
    segments_exhaustive: int = 0
    segments_exact: int = 0
    """Of the indexed ones, those of which the filter left so few rows that all were compared."""
    lists: int = 0
    candidates: int = 0
    """Rows that the indexes returned."""
    rows_read: int = 0
    """Candidates that were read."""
    rows_stale: int = 0
    """Candidates that had been replaced, deleted or expired, or did not meet the condition."""
    rows_scanned: int = 0
    """Rows of memory and of segments without index."""
    documents: int = 0
    """Of a search by text: the rows that its statistics count, stored old versions too."""
    tokens: int = 0
    terms: dict[str, int] = field(default_factory=dict)
    """By term of the query: how many of these rows have it."""
    damaged: list[str] = field(default_factory=list)
    """Segments whose index could not be read."""
    results: int = 0
    requests: int = 0
    bytes: int = 0
    milliseconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def add_damage(self, segment_id: str, error: Exception) -> None:
        """Note that the index of a segment cannot be used, and log it once."""
        if segment_id not in self.damaged:
            self.damaged.append(segment_id)
            _log.warning("segment %s is searched row by row: %s", segment_id, error)


@dataclass(frozen=True, slots=True)
class Ranked:
    """Rows in rank order, with their distances or scores."""

    rows: Versions
    values: npt.NDArray[np.float64]

    @classmethod
    def best(
        cls, rows: Versions, values: npt.NDArray[np.float64], k: int, *, descending: bool = False
    ) -> "Ranked":
        """Return the k best rows with finite values; of equal values, the smaller keys."""
        places = np.flatnonzero(np.isfinite(values))
        order = -values[places] if descending else values[places]
        if len(places) > 4 * k:  # only those that may be among the k best are sorted by key
            bound = np.partition(order, k - 1)[k - 1]
            places, order = places[order <= bound], order[order <= bound]
        keys = rows.keys.take(pa.array(places)).to_pylist()
        ranked = sorted(range(len(places)), key=lambda at: (order[at], keys[at]))[:k]
        chosen = places[ranked].astype(np.int64)
        return cls(rows.take(chosen), values[chosen])

    def table(self, request: SearchRequest, name: str) -> pa.Table:
        """Return the rows as a table with their values in a last column."""
        batch = to_record_batch(self.rows, request.schema, list(request.columns))
        return pa.Table.from_batches([batch]).append_column(name, pa.array(self.values))


def fuse(rankings: Sequence[Ranked], weights: Sequence[float], request: SearchRequest) -> Ranked:
    """Fuse rankings by reciprocal ranks: a row scores weight / (60 + rank) in each of them."""
    scores: dict[bytes, float] = {}
    rows = concat_versions([ranked.rows for ranked in rankings], request.schema)
    for ranked, weight in zip(rankings, weights, strict=True):
        for rank, key in enumerate(ranked.rows.keys.to_pylist(), 1):
            scores[key] = scores.get(key, 0.0) + weight / (FUSION_CONSTANT + rank)
    keys = rows.keys.to_pylist()
    first = {key: at for at, key in reversed(list(enumerate(keys)))}
    places = np.array([first[key] for key in scores], np.int64)
    values = np.array(list(scores.values()), np.float64)
    return Ranked.best(rows.take(places), values, request.k, descending=True)


def matches(rows: Versions, request: SearchRequest) -> npt.NDArray[np.bool_]:
    """Return which rows meet the condition."""
    if request.where is None or not len(rows):
        return np.ones(len(rows), bool)
    batch = to_record_batch(rows, request.schema, list(request.where.columns))
    return np.asarray(request.where.mask(batch).to_numpy(zero_copy_only=False))


def one_by_one(call: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
    """Call a function for each item: where reads do not wait, threads gain nothing."""
    return [call(item) for item in items]
