"""Merging versions: pure functions over Arrow data, the same for reads, folds and jobs.

Rows of several sources are put together, sorted by key and newest first, and the first of
each key is kept. Range tombstones count as versions: a row is gone if a newer one covers it.
"""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reef.formats.batch import OpKind
from reef.formats.schema import Schema
from reef.formats.versions import RangeTombstone, Versions, concat_versions

__all__ = ["drop_covered", "drop_deleted", "newest_versions", "sorted_places"]

Places = npt.NDArray[np.int64]


def newest_versions(parts: Sequence[Versions], schema: Schema) -> Versions:
    """Return the newest version of each key, sorted by key."""
    parts = [part for part in parts if len(part)] or list(parts[:1])
    rows = concat_versions(parts, schema)
    if len(parts) > 1:
        rows = rows.take(sorted_places(rows))
    return _first_of_each_key(rows)


def drop_covered(rows: Versions, tombstones: Sequence[RangeTombstone]) -> Versions:
    """Return the rows that no newer range tombstone covers. Rows are sorted by key."""
    if not len(rows) or not tombstones:
        return rows
    alive = np.ones(len(rows), dtype=bool)
    keys = rows.keys.to_pylist()
    for tombstone in tombstones:
        first, last = _span(keys, tombstone.start, tombstone.end)
        lsns, seqs = rows.lsns[first:last], rows.seqs[first:last]
        older = (lsns < tombstone.lsn) | ((lsns == tombstone.lsn) & (seqs < tombstone.seq))
        alive[first:last] &= ~older
    return rows if alive.all() else rows.take(np.flatnonzero(alive).astype(np.int64))


def drop_deleted(rows: Versions, now_ms: int) -> Versions:
    """Return the rows that are there: neither deleted nor expired."""
    alive = rows.kinds != OpKind.DELETE
    if rows.expires_at_ms is not None:
        expired = pc.less_equal(rows.expires_at_ms, now_ms).fill_null(False)
        alive &= ~expired.to_numpy(zero_copy_only=False)
    return rows if alive.all() else rows.take(np.flatnonzero(alive).astype(np.int64))


def sorted_places(rows: Versions) -> Places:
    """Return the order of rows: by key, and the newest first."""
    table = pa.table({"key": rows.keys, "lsn": rows.lsns, "seq": rows.seqs})
    order = [("key", "ascending"), ("lsn", "descending"), ("seq", "descending")]
    places: Places = pc.sort_indices(table, order).to_numpy().astype(np.int64)
    return places


def _first_of_each_key(rows: Versions) -> Versions:
    if len(rows) < 2:
        return rows
    repeats = pc.equal(rows.keys[1:], rows.keys[:-1]).to_numpy(zero_copy_only=False)
    if not repeats.any():
        return rows
    first = np.concatenate(([True], ~repeats))
    return rows.take(np.flatnonzero(first).astype(np.int64))


def _span(keys: list[bytes], start: bytes, end: bytes) -> tuple[int, int]:
    first = bisect_left(keys, start)
    return first, max(first, bisect_left(keys, end))
