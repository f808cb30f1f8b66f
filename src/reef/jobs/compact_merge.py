"""What a compaction makes of the versions of its inputs: pure, piece by piece, over Arrow data.

Of each key the newest version stays, as everywhere. Beyond that something may be left out only
if no segment that takes no part in the merge could show something in its place. Those are known
by their key and LSN bounds (`others`), and only those of the head count: a snapshot, a retained
generation and a branch name their own segments, the inputs among them, and never read what is
written here. What will be written later is newer; all but the rows of an open `live_wins` load,
which sort at its begin: nothing above `hold_lsn` is left out while there is one (H60).

    delete        goes if no other segment with its key has anything as old or older (H34)
    expired row   the same; otherwise it becomes a delete, since it still hides older rows
    patches       become one row with the whole row below them, or one patch, if no other segment
                  with their key has anything in between; otherwise they stay as they are. A
                  patch with nothing below it goes, where a delete would

Every version that is dropped or made on the way is counted by the set hash: `Tally`.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from reef.engine.reading.merge import newest_versions, sorted_places
from reef.formats.batch import OpKind
from reef.formats.filter import hash_keys
from reef.formats.schema import Schema
from reef.formats.set_hash import EMPTY, SetHash, set_hash
from reef.formats.versions import KeysInOrder, RangeTombstone, Versions, concat_versions
from reef.jobs.compact_order import order_of_runs
from reef.jobs.compact_ranges import Other

__all__ = ["NEVER", "Merger", "Tally"]

NEVER = 2**63 - 1
"""An LSN above all others."""

Lsns = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Places = npt.NDArray[np.int64]


@dataclass(slots=True)
class Tally:
    """What became of the rows that were read."""

    dropped: SetHash = EMPTY
    made: SetHash = EMPTY
    rows: int = 0
    dropped_lsn: int = 0
    """The newest delete that was dropped."""
    expired: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            self.dropped + other.dropped,
            self.made + other.made,
            self.rows + other.rows,
            max(self.dropped_lsn, other.dropped_lsn),
            self.expired + other.expired,
        )


@dataclass(slots=True)
class Merger:
    """Merges pieces of sorted runs that no input can add to any more, in the order of keys."""

    schema: Schema
    others: Sequence[Other] = ()
    tombstones: Sequence[RangeTombstone] = ()
    """Fragments of the inputs' own range deletes, in order."""
    hold_lsn: int = NEVER
    expired_before_ms: int = 0
    tally: Tally = field(default_factory=Tally)

    def merge(self, parts: Sequence[Versions]) -> Versions:
        """Return what is to be written of these rows, sorted by key."""
        rows, order = self._in_order([part for part in parts if len(part)] or parts[:1])
        if not len(rows):
            return rows
        self.tally.rows += len(rows)
        if (rows.kinds == OpKind.PATCH).any():
            rows = rows if order is None else rows.take(order)
            return self._without_deleted(self._with_patches(rows))
        # Only keys and stamps are put in order before it is known what stays.
        thin = rows.with_fields({})
        thin = thin if order is None else thin.take(order)
        kept = np.flatnonzero(~self._covered(thin) & _is_first(thin.keys))
        self._drop(thin, kept)
        if order is not None:
            rows = rows.take(order[kept])
        elif len(kept) < len(rows):
            rows = rows.take(kept)
        return self._without_deleted(rows)

    def _in_order(self, parts: Sequence[Versions]) -> tuple[Versions, Places | None]:
        """Return all rows, and in which order they are sorted; None if they are."""
        rows = concat_versions(parts, self.schema)
        if len(parts) == 1:
            return rows, None
        ends = [(part.keys[0].as_py(), part.keys[len(part) - 1].as_py()) for part in parts]
        return rows, order_of_runs(rows, ends)

    def _drop(self, rows: Versions, kept: Places) -> None:
        """Count what is not kept."""
        if len(kept) < len(rows):
            gone = np.ones(len(rows), dtype=bool)
            gone[kept] = False
            self.tally.dropped += _hash(rows, gone, rows.kinds)

    def _covered(self, rows: Versions) -> Mask:
        """Return which rows are older than a range delete that covers them."""
        covered = np.zeros(len(rows), dtype=bool)
        keys = KeysInOrder(rows.keys)
        low, high = keys[0], keys[len(keys) - 1]
        first = bisect_right(self.tombstones, low, key=lambda t: t.end)
        for tombstone in self.tombstones[first:]:
            if tombstone.start > high:
                break
            span = slice(bisect_left(keys, tombstone.start), bisect_left(keys, tombstone.end))
            lsns, seqs = rows.lsns[span], rows.seqs[span]
            same = (lsns == tombstone.lsn) & (seqs < tombstone.seq)
            covered[span] |= (lsns < tombstone.lsn) | same
        return covered

    # --- deletes and expired rows ---------------------------------------------------
    def _without_deleted(self, rows: Versions) -> Versions:
        """Leave out what hides nothing; what has expired and hides something becomes a delete."""
        expired = self._expired(rows)
        at = np.flatnonzero((rows.kinds != OpKind.PUT) | expired)
        if not len(at):
            return rows
        needless = np.zeros(len(rows), dtype=bool)
        needless[at] = self._hides_nothing(rows.keys.take(pa.array(at)), rows.lsns[at])
        needless &= (rows.kinds != OpKind.PATCH) | _is_only(rows.keys)
        self._count_deletes(rows, needless, expired)
        self._drop(rows, np.flatnonzero(~needless & ~expired))
        deleted = expired & ~needless
        kinds = np.where(deleted, np.uint8(OpKind.DELETE), rows.kinds)
        self.tally.made += _hash(rows, deleted, kinds)
        return _emptied(replace(rows, kinds=kinds), np.flatnonzero(~needless), deleted)

    def _expired(self, rows: Versions) -> Mask:
        if rows.expires_at_ms is None or not self.expired_before_ms:
            return np.zeros(len(rows), dtype=bool)
        over = pc.less_equal(rows.expires_at_ms, self.expired_before_ms).fill_null(False)
        expired: Mask = over.to_numpy(zero_copy_only=False) & (rows.kinds == OpKind.PUT)
        return expired

    def _hides_nothing(self, keys: pa.Array, lsns: Lsns) -> Mask:
        """Return for which of these versions no other segment can have an older one (H34)."""
        oldest = np.full(len(keys), NEVER, np.int64)
        for other, span in self._others_of(keys):
            oldest[span] = np.minimum(oldest[span], other.lsn_min)
        nothing: Mask = (lsns < oldest) & (lsns <= self.hold_lsn)
        return nothing

    def _count_deletes(self, rows: Versions, needless: Mask, expired: Mask) -> None:
        self.tally.expired += int(expired.sum())
        deletes = rows.lsns[needless & (rows.kinds == OpKind.DELETE)]
        self.tally.dropped_lsn = max(self.tally.dropped_lsn, int(deletes.max(initial=0)))

    def _others_of(self, keys: pa.Array) -> Iterator[tuple[Other, slice]]:
        """Yield the segments that may have some of these sorted keys, and which."""
        if not len(keys):
            return
        in_order = KeysInOrder(keys)
        low, high = in_order[0], in_order[len(keys) - 1]
        for other in self.others:
            if other.min_key <= high and other.max_key >= low:
                first = bisect_left(in_order, other.min_key)
                yield other, slice(first, bisect_right(in_order, other.max_key))

    # --- patches ----------------------------------------------------------------------
    def _with_patches(self, rows: Versions) -> Versions:
        """Come down to one version of each key, where nothing can lie between its versions."""
        before = _hash_all(rows)
        rows = rows.take(np.flatnonzero(~self._covered(rows)))
        rows = rows.take(np.flatnonzero(_matters(rows)))
        together = self._together(rows)
        apart = rows.take(np.flatnonzero(~together))
        self.tally.dropped += before - _hash_all(apart)
        if not together.any():
            return apart
        combined = newest_versions([rows.take(np.flatnonzero(together))], self.schema)
        self.tally.made += _hash_all(combined)
        both = concat_versions([apart, combined], self.schema)
        both = both.take(sorted_places(both))
        return both if (both.kinds == OpKind.PATCH).any() else replace(both, touched={})

    def _together(self, rows: Versions) -> Mask:
        """Return the rows of keys whose versions may become one."""
        if not len(rows):
            return np.zeros(0, dtype=bool)
        first = _is_first(rows.keys)
        heads = np.flatnonzero(first)
        tails = np.append(heads[1:], len(rows)) - 1
        newest, oldest = rows.lsns[heads], rows.lsns[tails]
        free: Mask = (tails > heads) & (newest <= self.hold_lsn)
        for other, span in self._others_of(rows.keys.take(pa.array(heads))):
            free[span] &= (newest[span] < other.lsn_min) | (oldest[span] > other.lsn_max)
        together: Mask = free[np.cumsum(first) - 1]
        return together


# --- small things -----------------------------------------------------------------------


def _hash(rows: Versions, which: Mask, kinds: npt.NDArray[np.uint8]) -> SetHash:
    keys = rows.keys.take(pa.array(np.flatnonzero(which)))
    return set_hash(hash_keys(keys), rows.seqs[which], kinds[which])


def _hash_all(rows: Versions) -> SetHash:
    return set_hash(hash_keys(rows.keys), rows.seqs, rows.kinds)


def _is_first(keys: pa.Array) -> Mask:
    """Return which rows are the first of their key."""
    if len(keys) < 2:
        return np.ones(len(keys), dtype=bool)
    repeats = pc.equal(keys[1:], keys[:-1]).to_numpy(zero_copy_only=False)
    return np.concatenate(([True], ~repeats))


def _is_only(keys: pa.Array) -> Mask:
    """Return which rows are the only ones of their key."""
    first = _is_first(keys)
    only: Mask = first & np.append(first[1:], True)
    return only


def _matters(rows: Versions) -> Mask:
    """Return which versions are the newest whole row of their key, or patches above it."""
    first = _is_first(rows.keys)
    whole = (rows.kinds != OpKind.PATCH).astype(np.int64)
    before = np.cumsum(whole) - whole
    matters: Mask = before == before[np.flatnonzero(first)][np.cumsum(first) - 1]
    return matters


def _emptied(rows: Versions, kept: npt.NDArray[np.int64], deleted: Mask) -> Versions:
    """Return the rows that are kept; those that became deletes have no columns any more."""
    if not deleted.any():
        return rows.take(kept)
    taken = rows.take(kept)
    places = pa.array(np.arange(len(kept)), mask=deleted[kept])
    expiry = taken.expires_at_ms
    return replace(
        taken,
        fields={number: array.take(places) for number, array in taken.fields.items()},
        expires_at_ms=None if expiry is None else expiry.take(places),
    )
