"""Merging versions: pure functions over Arrow data, the same for reads, folds and jobs.

Rows of several sources are concatenated and sorted by key, newest first. Range tombstones count
as versions: a row is gone if a newer one covers it. `newest_versions` then reduces each key to
one row: the newest, or where that is a patch or a merge, the newest whole row below it with all of
them applied, column by column (`rows.merges`). A patch over nothing, or over a delete, does
nothing. A merge makes a row there, and also over a row that had expired when it was written.

`joined_versions` reduces the versions of a key whose row may be elsewhere: patches become one
patch, merges one merge. `retained_versions` is the merge of the memtable's runs: it drops only
versions that no read of the newest state can need, and joins patches and merges only where no
version can come between them.

Range tombstones are fragments that do not overlap, each with the newest delete that covers it.
Ranges are cut where they overlap, always at the ends of other ranges (H36), so that finding
the delete that covers a key is one binary search, however many ranges were deleted. Where several
cover the same keys only the newest counts, since it hides all that the others hide.

    deleted      a ──────────── m          at 5
                       f ──────────── s    at 9
    fragments    a ─5─ f ─────9────── s
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reef.engine.rows.merges import ColumnOperands
from reef.formats.schema import Codes, Operator, Schema, codes_of
from reef.formats.versions import (
    KeysInOrder,
    RangeTombstone,
    RowBuffers,
    Versions,
    concat_versions,
    merge_places,
    merge_rows,
    row_buffers,
)
from reef.formats.wal_object import OpKind
from reef.types import KeyRange

ROWS_PER_DELETE = 10
"""To find the rows of a delete is as much work as to find the deletes of this many rows."""
NEWEST_FIRST = pc.SortOptions([("key", "ascending"), ("lsn", "descending"), ("seq", "descending")])
_sort_indices = pc.get_function("sort_indices")
"""Called as it is: the wrapper of pyarrow.compute takes longer than to sort a hundred rows."""
PUT, DELETE, PATCH, MERGE = (
    int(k) for k in (OpKind.PUT, OpKind.DELETE, OpKind.PATCH, OpKind.MERGE)
)
"""NumPy compares with an enum five times slower than with a number."""
NEVER, ALWAYS = 2**63 - 1, -(2**63)
Places = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Kinds = npt.NDArray[np.uint8]


class RangeTombstones:
    """A set of range deletes.

    `share` returns the same set in constant time; the next change of either copies it first.
    A thread that changes a set holds a lock that the threads that share it hold too.
    """

    __slots__ = ("_fragments", "_is_shared", "_lsn_min", "_starts")

    def __init__(self, fragments: Iterable[RangeTombstone] = ()) -> None:
        self._fragments = list(fragments)
        self._starts = [fragment.start for fragment in self._fragments]
        self._is_shared = False
        self._lsn_min = min((fragment.lsn for fragment in self._fragments), default=1 << 63)
        """No fragment is older; the oldest may be newer."""

    @classmethod
    def of(cls, tombstones: Iterable[RangeTombstone]) -> "RangeTombstones":
        """Return the set of some deletes, in any order."""
        return cls(fragments(tombstones))

    def __bool__(self) -> bool:
        return bool(self._fragments)

    def __len__(self) -> int:
        return len(self._fragments)

    def __iter__(self) -> Iterator[RangeTombstone]:
        return iter(self._fragments)

    def covering(self, key: bytes) -> RangeTombstone | None:
        """Return the newest delete that covers a key."""
        place = bisect_right(self._starts, key) - 1
        if place >= 0 and key < self._fragments[place].end:
            return self._fragments[place]
        return None

    def share(self) -> "RangeTombstones":
        """Return the set as it is now."""
        shared = RangeTombstones()
        shared._fragments, shared._starts = self._fragments, self._starts
        shared._lsn_min = self._lsn_min
        shared._is_shared = self._is_shared = True
        return shared

    def within(self, key_range: KeyRange) -> list[RangeTombstone]:
        """Return the fragments that overlap a range."""
        first = max(0, bisect_right(self._starts, key_range.start) - 1)
        last = len(self) if key_range.end is None else bisect_left(self._starts, key_range.end)
        return [f for f in self._fragments[first:last] if f.end > key_range.start]

    def add(self, new: RangeTombstone) -> bool:
        """Add a delete; where it overlaps others the newest one counts.

        Returns whether it overlaps any.
        """
        if self._is_shared:
            self._fragments, self._starts = self._fragments.copy(), self._starts.copy()
            self._is_shared = False
        first = max(0, bisect_right(self._starts, new.start) - 1)
        if first < len(self) and self._fragments[first].end <= new.start:
            first += 1
        last = max(first, bisect_left(self._starts, new.end))
        self._lsn_min = min(self._lsn_min, new.lsn)
        pieces = _overlaid(self._fragments[first:last], new)
        # In place: a copy each time would make many deletes take the square of their number.
        self._fragments[first:last] = pieces
        self._starts[first:last] = [piece.start for piece in pieces]
        return first < last

    def from_lsn(self, floor: int) -> "RangeTombstones":
        """Return the deletes that are not older than `floor`."""
        if self._lsn_min >= floor:
            return self.share()
        return RangeTombstones(f for f in self._fragments if f.lsn >= floor)


def fragments(tombstones: Iterable[RangeTombstone]) -> list[RangeTombstone]:
    """Return ranges that do not overlap, in order, each with the newest delete that covers it."""
    ordered = sorted(tombstones)
    edges = sorted({t.start for t in ordered} | {t.end for t in ordered})
    covering: list[tuple[int, int, bytes]] = []
    pieces: list[RangeTombstone] = []
    begun = 0
    for start, end in pairwise(edges):
        while begun < len(ordered) and ordered[begun].start <= start:
            new = ordered[begun]
            heappush(covering, (-new.lsn, -new.seq, new.end))
            begun += 1
        while covering and covering[0][2] <= start:
            heappop(covering)
        if covering:
            pieces.append(RangeTombstone(start, end, -covering[0][0], -covering[0][1]))
    return _join_neighbours(pieces)


def _overlaid(old: Sequence[RangeTombstone], new: RangeTombstone) -> list[RangeTombstone]:
    pieces: list[RangeTombstone] = []
    at = new.start
    for fragment in old:
        if fragment.start < new.start:
            pieces.append(_cut(fragment, fragment.start, new.start))
        if at < fragment.start:
            pieces.append(_cut(new, at, fragment.start))
        newer = max(fragment, new, key=lambda t: (t.lsn, t.seq))
        low, high = max(fragment.start, new.start), min(fragment.end, new.end)
        pieces.append(_cut(newer, low, high))
        at = high
        if fragment.end > new.end:
            pieces.append(_cut(fragment, new.end, fragment.end))
    if at < new.end:
        pieces.append(_cut(new, at, new.end))
    return _join_neighbours(pieces)


def _cut(tombstone: RangeTombstone, start: bytes, end: bytes) -> RangeTombstone:
    return RangeTombstone(start, end, tombstone.lsn, tombstone.seq)


def _join_neighbours(pieces: list[RangeTombstone]) -> list[RangeTombstone]:
    """Join neighbours that belong to one delete."""
    joined: list[RangeTombstone] = []
    for piece in pieces:
        if joined and joined[-1].end == piece.start and _same(joined[-1], piece):
            joined[-1] = _cut(piece, joined[-1].start, piece.end)
        else:
            joined.append(piece)
    return joined


def _same(one: RangeTombstone, other: RangeTombstone) -> bool:
    return (one.lsn, one.seq) == (other.lsn, other.seq)


def newest_versions(
    parts: Sequence[Versions], schema: Schema, tombstones: Sequence[RangeTombstones] = ()
) -> Versions:
    """Return one version of each key, sorted by key, and none that a tombstone covers.

    The parts have all versions there are: a merge without a row makes one. A patch without a row
    stays a patch, all patches of its key in one.
    """
    parts = [part for part in parts if len(part)] or list(parts[:1])
    if len(parts) > 1 and (merged := _merged_directly(parts, schema)) is not None:
        return drop_covered(merged, tombstones)
    rows = concat_versions(parts, schema)
    has_partial = rows.has_partial
    if len(parts) > 1:
        rows = _merge_parts(parts, rows, every=has_partial)
    if has_partial:
        return _resolve_versions(drop_covered(rows, tombstones), schema, complete=True)
    return drop_covered(rows if rows.distinct else _first_of_each_key(rows), tombstones)


def in_order(parts: Sequence[Versions], schema: Schema) -> Versions:
    """Return all versions of some parts, sorted by key, newest first."""
    rows = concat_versions(parts, schema)
    return rows if len(parts) == 1 else rows.take(sorted_places(rows))


def joined_versions(rows: Versions, schema: Schema, *, joins_merges: bool = True) -> Versions:
    """Return fewer versions of each key with the same effect on any row below them.

    Rows are sorted. A key may keep several versions: a merge above patches, and operands that
    cannot be combined without the value below. Without `joins_merges` all versions of a key stay
    apart if there are merges, and no row below them is known.
    """
    return _resolve_versions(rows, schema, complete=False, joins_merges=joins_merges)


def combined_merges(rows: Versions, schema: Schema) -> Versions:
    """Combine the merges of each key; sums of floats become one operand. Rows are sorted."""
    return _resolve_versions(rows, schema, complete=False, joins_sums=True)


def _merged_directly(parts: Sequence[Versions], schema: Schema) -> Versions | None:
    """Return the newest row of each key, put together by the kernel; None if it cannot."""
    buffers: list[RowBuffers] = []
    for part in parts:
        rows = row_buffers(part, schema)
        if rows is None:
            return None
        buffers.append(rows)
    return merge_rows(buffers, schema)


def _merge_parts(parts: Sequence[Versions], rows: Versions, *, every: bool) -> Versions:
    """Return the rows of all parts in order; without `every`, older versions may be left out."""
    places = merge_places(parts, every=every)
    if places is None:
        return rows.take(sorted_places(rows))
    return rows.take(places, distinct=not every)


def retained_versions(
    parts: Sequence[Versions],
    schema: Schema,
    tombstones: RangeTombstones,
    *,
    first_lsn: int,
    joined_above: int,
    joined_up_to: int,
) -> Versions:
    """Return all versions that a read may need, sorted by key, newest first.

    Versions go that are below `first_lsn`, or that a range tombstone or a newer whole row hides.
    Those of one key with LSNs above `joined_above` and up to `joined_up_to` become one: nothing can
    come between them.
    """
    rows = concat_versions(parts, schema)
    rows = rows.take(sorted_places(rows))
    rows = _where(rows, rows.lsns >= first_lsn)
    rows = drop_superseded(drop_covered(rows, (tombstones,)))
    return rows if rows.distinct else _join_patches(rows, schema, joined_above, joined_up_to)


def drop_superseded(rows: Versions) -> Versions:
    """Return the newest whole row of each key and the patches above it. Rows are sorted."""
    first = _is_first(rows.keys)
    if not first.all():
        key_of = np.cumsum(first) - 1
        rows = _where(rows, _versions_that_matter(rows.kinds, first, key_of))
        if rows.has_partial:
            return rows
    return replace(rows, distinct=True)


def _join_patches(rows: Versions, schema: Schema, above: int, up_to: int) -> Versions:
    """Apply patches to the patches and the whole row below them, within two LSNs."""
    key_of = np.cumsum(_is_first(rows.keys)) - 1
    joined = (rows.lsns > above) & (rows.lsns <= up_to)
    joined &= np.bincount(key_of[joined], minlength=int(key_of[-1]) + 1)[key_of] > 1
    if not joined.any():
        return rows
    # A fold may end between two merges: of a joined one, a part would then count twice.
    chosen = rows.take(np.flatnonzero(joined).astype(np.int64))
    ones = joined_versions(chosen, schema, joins_merges=False)
    rest = rows.take(np.flatnonzero(~joined).astype(np.int64))
    if not len(rest):
        return replace(ones, distinct=bool(_is_first(ones.keys).all()))
    both = concat_versions([rest, ones], schema)
    return both.take(sorted_places(both))


def drop_covered(rows: Versions, tombstones: Sequence[RangeTombstones]) -> Versions:
    """Return the rows that no newer range tombstone covers. Rows are sorted by key.

    Only deletes that touch these rows are checked: there may be very many of them elsewhere.
    """
    if not tombstones or not len(rows) or not any(tombstones):
        return rows
    alive = np.ones(len(rows), dtype=bool)
    for deletes in filter(None, tombstones):
        _mark_covered(rows, deletes, alive)
    return _where(rows, alive)


def _mark_covered(rows: Versions, deletes: RangeTombstones, alive: Mask) -> None:
    """Find the delete of each row, or the rows of each delete, whichever is less work."""
    keys = KeysInOrder(rows.keys)
    touching = deletes.within(KeyRange(keys[0], keys[-1] + b"\0"))
    if len(touching) * ROWS_PER_DELETE > len(rows):
        covers = map(deletes.covering, rows.keys.to_pylist())
        stamps = [(cover.lsn, cover.seq) if cover is not None else (-1, 0) for cover in covers]
        lsns, seqs = np.array(stamps, np.int64).T
        alive &= (rows.lsns > lsns) | ((rows.lsns == lsns) & (rows.seqs >= seqs))
        return
    for tombstone in touching:
        first, last = _span(keys, tombstone.start, tombstone.end)
        lsns, seqs = rows.lsns[first:last], rows.seqs[first:last]
        older = (lsns < tombstone.lsn) | ((lsns == tombstone.lsn) & (seqs < tombstone.seq))
        alive[first:last] &= ~older


def drop_deleted(rows: Versions, now_ms: int) -> Versions:
    """Return the rows that are there: whole, and neither deleted nor expired."""
    if rows.expires_at_ms is None and not rows.kinds.any():
        return rows  # all of them are PUT, which is 0
    alive = rows.kinds == PUT
    if rows.expires_at_ms is not None:
        expired = pc.less_equal(rows.expires_at_ms, now_ms).fill_null(False)
        alive &= ~expired.to_numpy(zero_copy_only=False)
    return _where(rows, alive)


def sorted_places(rows: Versions) -> Places:
    """Return the order of rows: by key, and the newest first."""
    columns = [rows.keys, pa.array(rows.lsns), pa.array(rows.seqs)]
    batch = pa.RecordBatch.from_arrays(columns, ["key", "lsn", "seq"])
    places: Places = _sort_indices.call([batch], NEWEST_FIRST).to_numpy().astype(np.int64)
    return places


# --- patches and merges -------------------------------------------------------------


def _resolve_versions(
    rows: Versions,
    schema: Schema,
    *,
    complete: bool,
    joins_merges: bool = True,
    joins_sums: bool = False,
) -> Versions:
    """Make one row of each key's versions; several where one row cannot represent them."""
    if not len(rows):
        return rows
    if rows.merged_at_ms is not None:
        rows = _each_once(rows)
    chains = _Chains(rows, complete=complete)
    codes = {n: chains.codes(rows.touched.get(n)) for n in schema.types()}
    exact = {} if joins_sums else schema.types()
    groups = chains.groups(codes, exact, joins_merges=joins_merges)
    fields, touched = {}, {}
    for number, data_type in schema.types().items():
        operands = ColumnOperands(codes[number], groups.of, len(groups))
        array = rows.fields.get(number)
        fields[number], touched[number] = operands.lay_over(array, chains.places, data_type)
    return groups.rows(rows, chains.places, fields, touched)


def _versions_that_matter(kinds: Kinds, first: Mask, key_of: Places) -> Mask:
    """Return which versions are the newest whole row of their key, or partial ones above it."""
    whole = (kinds < PATCH).astype(np.int64)
    before = np.cumsum(whole) - whole
    at_head = before[np.flatnonzero(first)]
    matters: Mask = before == at_head[key_of]
    return matters


def _each_once(rows: Versions) -> Versions:
    """Return each version once: a merge that two sources have, or one that is part of a row at
    its own LSN and sequence, must not count twice. Only a repair leaves such versions."""
    if len(rows) < 2:
        return rows
    same = ~_is_first(rows.keys)[1:] & (rows.lsns[1:] == rows.lsns[:-1])
    same &= rows.seqs[1:] == rows.seqs[:-1]
    if not same.any():
        return rows
    stamp_of = np.concatenate(([0], np.cumsum(~same)))
    order = np.lexsort((rows.kinds, stamp_of))
    return rows.take(order[np.append(True, np.diff(stamp_of[order]) > 0)].astype(np.int64))


class _Chains:
    """The versions of each key from the oldest to the newest: rows in reverse order.

    A chain begins with the newest version that hides all older ones: a whole row, or a merge that
    finds no row, since it was deleted, had expired by then, or never existed.
    """

    def __init__(self, rows: Versions, *, complete: bool) -> None:
        back = np.arange(len(rows) - 1, -1, -1, dtype=np.int64)
        first = _is_first(rows.keys)
        key_of = (np.cumsum(first) - 1)[back]
        begins = self._begins(rows, back, key_of, complete)
        kept = np.arange(len(rows)) >= begins[key_of]
        self._count = len(rows)
        self.places: Places = back[kept]
        self.kinds = rows.kinds[self.places]
        self.key_of: Places = key_of[kept]
        self.is_first: Mask = np.append(True, self.key_of[1:] != self.key_of[:-1])
        self.is_base: Mask = (np.arange(len(rows)) == begins[key_of])[kept]
        """Rows that hide all older ones."""

    @staticmethod
    def _begins(rows: Versions, back: Places, key_of: Places, complete: bool) -> Places:
        """Return for each key the place in reverse order of the row that its chain rests on; -1 if
        there is none."""
        kinds = rows.kinds[back]
        bases = kinds < PATCH
        if rows.merged_at_ms is not None and (merges := kinds == MERGE).any():
            bases = bases | merges & _finds_no_row(rows, back, key_of, complete)
        places = np.flatnonzero(bases)
        begins = np.full(int(key_of[0]) + 1, -1, np.int64)
        begins[key_of[places]] = places  # the last one counts
        return begins

    def codes(self, touched: pa.Array | None) -> Codes:
        """Return how each version changes a column."""
        codes = codes_of(touched, self._count)[self.places]
        return np.where(self.is_base, np.uint8(Operator.SET), codes)

    def groups(
        self, codes: Mapping[int, Codes], exact: Mapping[int, pa.DataType], *, joins_merges: bool
    ) -> "_Groups":
        """Return the versions that become one row: those of a key, as far as that is possible.

        Without the row below, patches are not joined with a merge above, since they would change
        nothing if there were no row; and operands of `exact` columns stay apart that have no
        common form.
        """
        starts = self.is_first.copy()
        is_merge = (self.kinds == MERGE) & ~self.is_base
        if is_merge.any():
            chain_of = np.cumsum(starts) - 1
            based = self.is_base[np.flatnonzero(starts)]
            count = np.bincount(chain_of, is_merge)
            if not joins_merges:
                starts |= (~based & (count > 0))[chain_of]
                return _Groups(starts, self.kinds, self.is_base)
            first_merge = np.full(len(based), -1, np.int64)
            places = np.flatnonzero(is_merge)[::-1]
            first_merge[chain_of[places]] = places  # the last one, which is the oldest
            starts[first_merge[~based & (count > 0)]] = True
            apart = self._apart(starts, codes, exact)
            starts |= apart[np.cumsum(starts) - 1]
        return _Groups(starts, self.kinds, self.is_base)

    @staticmethod
    def _apart(starts: Mask, codes: Mapping[int, Codes], exact: Mapping[int, pa.DataType]) -> Mask:
        """Return the groups that cannot be joined."""
        of = np.cumsum(starts) - 1
        apart = np.zeros(int(of[-1]) + 1, dtype=bool)
        for number, data_type in exact.items():
            apart |= ColumnOperands(codes[number], of, len(apart)).unjoinable(data_type)
        return apart


def _finds_no_row(rows: Versions, back: Places, key_of: Places, complete: bool) -> Mask:
    """Return which merges start from nothing; all columns are given in reverse order of rows.

    That depends on the version of the key before, other than patches: whether it is a row, and
    whether it had expired when the merge was written.
    """
    kinds, number = rows.kinds[back], np.arange(len(rows))
    makes_row = np.where(kinds != PATCH, number, -1)
    before = np.append(-1, np.maximum.accumulate(makes_row)[:-1])
    alone = (before < 0) | (key_of[before] != key_of)
    expiry = np.full(len(rows), NEVER, np.int64)
    if rows.expires_at_ms is not None:
        expiry = rows.expires_at_ms.fill_null(NEVER).to_numpy(zero_copy_only=False)[back]
    expiry = np.where(kinds == DELETE, ALWAYS, expiry)
    gone_at = np.where(alone, ALWAYS if complete else NEVER, expiry[before])
    assert rows.merged_at_ms is not None
    merged_at = rows.merged_at_ms.fill_null(0).to_numpy(zero_copy_only=False)[back]
    gone: Mask = gone_at <= merged_at
    return gone


class _Groups:
    """Neighbouring versions, oldest first; each group of them becomes one row."""

    def __init__(self, starts: Mask, kinds: Kinds, is_base: Mask) -> None:
        self._kinds = kinds
        self.of: Places = np.cumsum(starts) - 1
        self._first = np.flatnonzero(starts)
        self._last = np.append(self._first[1:], len(starts)) - 1
        self._based = is_base[self._first]

    def __len__(self) -> int:
        return len(self._first)

    def rows(
        self,
        rows: Versions,
        places: Places,
        fields: Mapping[int, pa.Array],
        codes: Mapping[int, Codes],
    ) -> Versions:
        """Return the groups as rows sorted by key, newest first."""
        kinds = np.where(self._based, PUT, self._kinds[self._first]).astype(np.uint8)
        # Over a delete nothing happened: the delete's own version is what stays.
        deleted = self._based & (self._kinds[self._first] == DELETE)
        kinds[deleted] = DELETE
        stamps = places[np.where(deleted, self._first, self._last)]
        is_merged = kinds == MERGE
        merged_at = rows.merged_at_ms
        if merged_at is not None:
            merged_at = merged_at.take(pa.array(places[self._first], mask=~is_merged))
        is_open = ~self._based
        touched = {n: np.where(is_open, c, np.uint8(0)) for n, c in codes.items()}
        if not is_merged.any():
            touched = {n: c != Operator.NONE for n, c in touched.items()}
        return Versions(
            rows.keys.take(pa.array(stamps)),
            rows.lsns[stamps],
            rows.seqs[stamps],
            kinds,
            fields,
            self._expiry(rows, places),
            {n: pa.array(array) for n, array in touched.items()} if is_open.any() else {},
            merged_at_ms=merged_at if is_merged.any() else None,
        ).take(np.arange(len(self) - 1, -1, -1))

    def _expiry(self, rows: Versions, places: Places) -> pa.Array | None:
        """Return the expiry of the newest version that is no patch, which does not change it."""
        if rows.expires_at_ms is None:
            return None
        makers = np.flatnonzero(self._kinds != PATCH)
        chosen = np.full(len(self), -1, np.int64)
        chosen[self.of[makers]] = places[makers]
        return rows.expires_at_ms.take(pa.array(chosen, mask=chosen < 0))


# --- small things -------------------------------------------------------------------


def _is_first(keys: pa.Array) -> Mask:
    """Return which rows are the first of their key."""
    if len(keys) < 2:
        return np.ones(len(keys), dtype=bool)
    repeats = pc.equal(keys[1:], keys[:-1]).to_numpy(zero_copy_only=False)
    return np.concatenate(([True], ~repeats))


def count_keys(rows: Versions) -> int:
    """Return how many different keys sorted rows have."""
    return len(rows) if rows.distinct else int(_is_first(rows.keys).sum())


def _first_of_each_key(rows: Versions) -> Versions:
    return _where(rows, _is_first(rows.keys))


def _where(rows: Versions, alive: Mask) -> Versions:
    return rows if alive.all() else rows.take(np.flatnonzero(alive).astype(np.int64))


def _span(keys: KeysInOrder, start: bytes, end: bytes) -> tuple[int, int]:
    first = bisect_left(keys, start)
    return first, max(first, bisect_left(keys, end))
