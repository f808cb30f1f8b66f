"""Salvaged versions come together by compaction's own rule (H68).

A repair reads versions of a key from several sources: groups of the damaged segment, its ancestors,
the log. Two of them become one row only if no other live segment can hold a version in between,
which `compact_merge.Merger` decides from key and LSN bounds. Otherwise they stay apart: a patch
would be applied to an older row than the one that it was written for.

Nothing that may hide an older version is dropped here, unlike in a compaction: deletes, range
deletes and patches without a row below them are kept at their LSNs.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reef.engine.reading.tombstones import fragments
from reef.formats.batch import OpKind
from reef.formats.covers import Cover
from reef.formats.manifest import Manifest, SegmentEntry
from reef.formats.schema import Schema
from reef.formats.versions import KeysInOrder, RangeTombstone, Versions, concat_versions
from reef.jobs.compact_merge import NEVER, Merger
from reef.jobs.compact_ranges import Other

__all__ = ["collapsed", "covered_by", "hold_lsn_of", "in_order", "within_bounds"]

Mask = npt.NDArray[np.bool_]


def hold_lsn_of(manifest: Manifest) -> int:
    """Return the LSN above which no patch is resolved, as in a compaction (H60)."""
    return min((job.begin_lsn for job in manifest.open_jobs if job.live_wins), default=NEVER)


def in_order(parts: Sequence[Versions], schema: Schema) -> Versions:
    """Return all versions once, by key and the newest first.

    A row that a merge has resolved has the LSN and sequence of its newest patch: where a source has
    the row and another one the patch, the row stays.
    """
    rows = concat_versions([Versions.empty(schema), *parts], schema)
    columns = {"key": rows.keys, "lsn": rows.lsns, "seq": rows.seqs}
    table = pa.table({**columns, "patch": rows.kinds == OpKind.PATCH})
    order = [("key", "ascending"), ("lsn", "descending"), ("seq", "descending")]
    places = pc.sort_indices(table, [*order, ("patch", "ascending")]).to_numpy().astype(np.int64)
    rows = rows.take(places)
    if len(rows) < 2:
        return rows
    same = pc.equal(rows.keys[1:], rows.keys[:-1]).to_numpy(zero_copy_only=False)
    same &= (rows.lsns[1:] == rows.lsns[:-1]) & (rows.seqs[1:] == rows.seqs[:-1])
    return rows.take(np.flatnonzero(np.concatenate(([True], ~same))).astype(np.int64))


def collapsed(
    parts: Sequence[Versions],
    tombstones: Iterable[RangeTombstone],
    schema: Schema,
    others: Iterable[SegmentEntry],
    hold_lsn: int,
) -> Versions:
    """Merge versions; `others` are the live segments that take no part."""
    rows = in_order(parts, schema)
    if not len(rows):
        return rows
    bounds = [Other(o.min_key, o.max_key, o.lsn_min, o.lsn_max) for o in others]
    # Older than everything, under every key: so the merger drops nothing that could hide it.
    bounds.append(Other(b"", KeysInOrder(rows.keys)[len(rows) - 1], 0, 0))
    return Merger(schema, bounds, fragments(tombstones), hold_lsn).merge([rows])


def covered_by(rows: Versions, covers: Iterable[Cover]) -> Versions:
    """Return the versions that some covers include; rows are sorted by key."""
    inside = np.zeros(len(rows), dtype=bool)
    keys = rows.keys
    for cover in covers:
        mask: Mask = (rows.lsns >= cover.first) & (rows.lsns < cover.end)
        mask &= pc.greater_equal(keys, cover.start).to_numpy(zero_copy_only=False)
        if cover.stop is not None:
            mask &= pc.less(keys, cover.stop).to_numpy(zero_copy_only=False)
        inside |= mask
    return rows.take(np.flatnonzero(inside).astype(np.int64))


def within_bounds(rows: Versions, entry: SegmentEntry) -> Versions:
    """Return what of merged versions a segment with these bounds may hold.

    Whatever is outside was hidden when the segment was written, and what hid it may have been
    dropped since (H34). The one exception is the row below a patch inside: the segment had the two
    as one row, at the patch's LSN.
    """
    if not len(rows):
        return rows
    inside = (rows.lsns >= entry.lsn_min) & (rows.lsns <= entry.lsn_max)
    patches = inside & (rows.kinds == OpKind.PATCH)
    patched = pc.is_in(rows.keys, rows.keys.filter(pa.array(patches)))
    below = (rows.lsns < entry.lsn_min) & patched.to_numpy(zero_copy_only=False)
    low = pc.greater_equal(rows.keys, entry.min_key).to_numpy(zero_copy_only=False)
    high = pc.less_equal(rows.keys, entry.max_key).to_numpy(zero_copy_only=False)
    return rows.take(np.flatnonzero((inside | below) & low & high).astype(np.int64))
