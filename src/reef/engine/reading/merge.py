"""Merging versions: pure functions over Arrow data, the same for reads, folds and jobs.

Rows of several sources are put together and sorted by key and newest first. Range tombstones
count as versions: a row is gone if a newer one covers it. Then each key comes down to one row:
the newest, or where that is a patch, the newest whole row below with the patches laid over it,
column by column. A patch over nothing, or over a delete, does nothing.
"""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reef.engine.reading.tombstones import RangeTombstones
from reef.formats.batch import OpKind
from reef.formats.schema import Schema
from reef.formats.versions import KeysInOrder, Versions, concat_versions
from reef.types import KeyRange

__all__ = ["drop_covered", "drop_deleted", "keys_differ", "newest_versions", "sorted_places"]

Places = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def newest_versions(
    parts: Sequence[Versions], schema: Schema, tombstones: Sequence[RangeTombstones] = ()
) -> Versions:
    """Return one version of each key, sorted by key, and none that a tombstone covers.

    A patch whose whole row is not among the parts stays a patch, all patches of its key in one.
    """
    parts = [part for part in parts if len(part)] or list(parts[:1])
    rows = concat_versions(parts, schema)
    if len(parts) > 1:
        rows = rows.take(sorted_places(rows))
    if (rows.kinds == OpKind.PATCH).any():
        return _resolved(drop_covered(rows, tombstones), schema)
    return drop_covered(rows if rows.distinct else _first_of_each_key(rows), tombstones)


def drop_covered(rows: Versions, tombstones: Sequence[RangeTombstones]) -> Versions:
    """Return the rows that no newer range tombstone covers. Rows are sorted by key.

    Only deletes that touch these rows are looked at: there may be very many of them elsewhere.
    """
    if not len(rows) or not any(tombstones):
        return rows
    alive = np.ones(len(rows), dtype=bool)
    for deletes in filter(None, tombstones):
        _mark_covered(rows, deletes, alive)
    return _where(rows, alive)


def _mark_covered(rows: Versions, deletes: RangeTombstones, alive: Mask) -> None:
    """Go through the rows or through the deletes between them, whichever are fewer."""
    keys = KeysInOrder(rows.keys)
    touching = deletes.within(KeyRange(keys[0], keys[-1] + b"\0"))
    if len(touching) > len(rows):
        stamps = zip(rows.keys.to_pylist(), rows.lsns.tolist(), rows.seqs.tolist(), strict=True)
        alive &= ~np.array([deletes.hide(*stamp) for stamp in stamps], dtype=bool)
        return
    for tombstone in touching:
        first, last = _span(keys, tombstone.start, tombstone.end)
        lsns, seqs = rows.lsns[first:last], rows.seqs[first:last]
        older = (lsns < tombstone.lsn) | ((lsns == tombstone.lsn) & (seqs < tombstone.seq))
        alive[first:last] &= ~older


def drop_deleted(rows: Versions, now_ms: int) -> Versions:
    """Return the rows that are there: whole, and neither deleted nor expired."""
    alive = rows.kinds == OpKind.PUT
    if rows.expires_at_ms is not None:
        expired = pc.less_equal(rows.expires_at_ms, now_ms).fill_null(False)
        alive &= ~expired.to_numpy(zero_copy_only=False)
    return _where(rows, alive)


def sorted_places(rows: Versions) -> Places:
    """Return the order of rows: by key, and the newest first."""
    table = pa.table({"key": rows.keys, "lsn": rows.lsns, "seq": rows.seqs})
    order = [("key", "ascending"), ("lsn", "descending"), ("seq", "descending")]
    places: Places = pc.sort_indices(table, order).to_numpy().astype(np.int64)
    return places


# --- patches ------------------------------------------------------------------------


def _resolved(rows: Versions, schema: Schema) -> Versions:
    """Lay the patches of each key over the newest whole row below them."""
    if not len(rows):
        return rows
    first = _is_first(rows.keys)
    key_of = np.cumsum(first) - 1
    counts = _versions_that_matter(rows.kinds, first, key_of)
    heads = np.flatnonzero(first).astype(np.int64)
    bases = np.full(len(heads), -1, np.int64)
    whole = np.flatnonzero(counts & (rows.kinds != OpKind.PATCH))
    bases[key_of[whole]] = whole
    has_base = bases >= 0
    kinds = np.where(has_base, rows.kinds[bases], OpKind.PATCH).astype(np.uint8)
    deleted = kinds == OpKind.DELETE
    # Over a delete nothing happened: the delete's own version is what stays.
    stamps = np.where(deleted, bases, heads)
    fields, touched = _laid_over(rows, schema, counts, key_of, len(heads))
    resolved = Versions(
        rows.keys.take(pa.array(heads)),
        rows.lsns[stamps],
        rows.seqs[stamps],
        kinds,
        fields,
        _expiry_of(rows, bases),
        touched if not has_base.all() else {},
    )
    return resolved


def _versions_that_matter(kinds: npt.NDArray[np.uint8], first: Mask, key_of: Places) -> Mask:
    """Return which versions are the newest whole row of their key, or patches above it."""
    whole = (kinds != OpKind.PATCH).astype(np.int64)
    before = np.cumsum(whole) - whole
    at_head = before[np.flatnonzero(first)]
    matters: Mask = before == at_head[key_of]
    return matters


def _laid_over(
    rows: Versions, schema: Schema, matters: Mask, key_of: Places, keys: int
) -> tuple[dict[int, pa.Array], dict[int, pa.Array]]:
    """Return each column's newest value per key, and whether a version sets it at all."""
    fields, touched = {}, {}
    put = rows.kinds == OpKind.PUT
    for number, data_type in schema.types().items():
        array = rows.fields.get(number)
        sets = put | _bools(rows.touched.get(number), len(rows))
        places = np.flatnonzero(matters & sets)
        owners, firsts = np.unique(key_of[places], return_index=True)
        chosen = np.full(keys, -1, np.int64)
        chosen[owners] = places[firsts]
        touched[number] = pa.array(chosen >= 0)
        if array is None:
            fields[number] = pa.nulls(keys, data_type)
        else:
            fields[number] = array.take(pa.array(chosen, mask=chosen < 0))
    return fields, touched


def _expiry_of(rows: Versions, bases: Places) -> pa.Array | None:
    """Return the whole rows' own expiry: a patch does not change it."""
    if rows.expires_at_ms is None:
        return None
    return rows.expires_at_ms.take(pa.array(bases, mask=bases < 0))


# --- small things -------------------------------------------------------------------


def _bools(array: pa.Array | None, length: int) -> Mask:
    if array is None:
        return np.zeros(length, dtype=bool)
    bools: Mask = array.fill_null(False).to_numpy(zero_copy_only=False)
    return bools


def _is_first(keys: pa.Array) -> Mask:
    """Return which rows are the first of their key."""
    if len(keys) < 2:
        return np.ones(len(keys), dtype=bool)
    repeats = pc.equal(keys[1:], keys[:-1]).to_numpy(zero_copy_only=False)
    return np.concatenate(([True], ~repeats))


def keys_differ(keys: pa.Array) -> bool:
    """Whether no key comes twice among keys in order."""
    return bool(_is_first(keys).all())


def _first_of_each_key(rows: Versions) -> Versions:
    return _where(rows, _is_first(rows.keys))


def _where(rows: Versions, alive: Mask) -> Versions:
    return rows if alive.all() else rows.take(np.flatnonzero(alive).astype(np.int64))


def _span(keys: KeysInOrder, start: bytes, end: bytes) -> tuple[int, int]:
    first = bisect_left(keys, start)
    return first, max(first, bisect_left(keys, end))
