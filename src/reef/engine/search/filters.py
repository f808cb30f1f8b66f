"""Which rows of a segment may meet a condition, by its filter indexes.

The result is a superset: predicates on columns without an index count as met. None means that the
indexes exclude nothing at all, so the rows have to be read. Whether a row really meets the
condition is decided by the condition itself, once the row is read.
"""

import logging
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap

from reef.engine.read.segments import SegmentStore
from reef.engine.where import ArrowFilter, Bounds, Op, Predicate, Where, bound_array
from reef.errors import CorruptionError
from reef.formats.filter_index import FilterDirectory, FilterIndex
from reef.formats.index_block import IndexKind
from reef.formats.manifest import SegmentEntry

_log = logging.getLogger(__name__)


def filter_indexes(segments: SegmentStore, entry: SegmentEntry) -> dict[int, FilterIndex]:
    """Return the filter indexes of a segment, by column; those of dropped ones are as good."""
    tail = segments.tail(entry)
    found = {}
    for number, place in enumerate(tail.footer.indexes):
        if place.is_built and place.spec.kind is IndexKind.FILTER:
            at = place.directory.offset
            directory = FilterDirectory.decode(tail.directory(number), tail.name, at)
            read = partial(segments.index_parts, entry, place)
            found[place.spec.column] = FilterIndex(directory, read)
    return found


def groups_with_matches(
    segments: SegmentStore, entry: SegmentEntry, where: Where
) -> npt.NDArray[np.bool_] | None:
    """Return which groups of a segment have rows that may meet a condition, for a scan.

    None if the segment has no index that says so. An index that cannot be read is as good as none.
    """
    tail = segments.tail(entry)
    try:
        rows = matching_rows(where, filter_indexes(segments, entry))
    except CorruptionError as error:
        _log.warning("segment %s is scanned without its indexes: %s", entry.id, error)
        return None
    if rows is None:
        return None
    ends = np.cumsum(tail.index.rows)
    counts = np.array([rows.range_cardinality(start, end) for start, end in _spans(ends)])
    return np.asarray(counts > 0)


def _spans(ends: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    bounds = ends.tolist()
    return list(zip([0, *bounds[:-1]], bounds, strict=True))


def matching_rows(where: Where, indexes: dict[int, FilterIndex]) -> BitMap | None:
    """Return the rows that may meet a condition; None if the indexes say nothing about it."""

    def of_leaf(leaf: Predicate | ArrowFilter) -> BitMap | None:
        if isinstance(leaf, ArrowFilter) or leaf.is_key or leaf.number not in indexes:
            return None
        return _of_predicate(leaf, indexes[leaf.number])

    def of_constant(known: bool) -> BitMap | None:
        return None if known else BitMap()

    return where.fold(of_leaf, _both, _either, of_constant)


def _both(one: BitMap | None, other: BitMap | None) -> BitMap | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _either(one: BitMap | None, other: BitMap | None) -> BitMap | None:
    return None if one is None or other is None else one | other


def _of_predicate(predicate: Predicate, index: FilterIndex) -> BitMap:
    if predicate.op is Op.IS_NULL:
        return index.nulls()
    if predicate.op is Op.NOT_NULL:
        return index.everything()
    if not index.directory.runs:
        return index.values_where(predicate.mask)
    return index.runs_where(_runs(predicate, index), predicate.mask)


def _runs(predicate: Predicate, index: FilterIndex) -> npt.NDArray[np.bool_]:
    """Return which runs may have values that meet a predicate."""
    low, high = index.directory.bounds()
    bounds = Bounds(
        len(low),
        bound_array(low, predicate.arrow),
        bound_array(high, predicate.arrow),
        no_null=np.ones(len(low), bool),
    )
    possible = np.asarray(predicate.can_match(bounds), bool)
    if pa.types.is_floating(high.type):  # NaN sorts last, and is no bound
        possible |= pc.is_nan(high).to_numpy(zero_copy_only=False)
    return possible
