"""The newest rows, in memory: what was committed and is not folded yet.

Batches stay as the columns they came as, one behind the other; an index leads from each key
to its newest row. Taking in a batch of 100,000 rows is a few calls into C, not a loop. Range
deletes stand beside the rows as versions of their own. A patch also knows the row that it
was laid over, so that reading can go down to a whole row. When a key has many patches, they are
laid over each other once and for all, so that no read goes down more than a few.
Many keys at once, and of very many some only, the rest with the next objects: no commit waits
long.

It knows the LSNs that it covers, and changes by whole WAL objects only, so that a cut never
falls inside a batch (H15). When a fold has passed, `drop_below` removes what the segments now
hold.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, repeat
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from reef.engine.reading.arena import Arena, Numbers
from reef.engine.reading.chains import NONE, Chains, Floors, go_down
from reef.engine.reading.merge import newest_versions, sorted_places
from reef.engine.reading.tombstones import RangeTombstones
from reef.engine.rows.out import to_python
from reef.formats.batch import AnyOps, OneOp, OpKind
from reef.formats.manifest import SegmentEntry
from reef.formats.schema import Schema
from reef.formats.versions import RangeTombstone, Versions, split_ops
from reef.runtime import leaf_lock
from reef.types import KeyRange

__all__ = ["Chain", "Entry", "Memtable", "Moment", "entry_at"]

INDEXED_LATER = 1000
"""Batches of this many rows are indexed by the first read after them, not by the write."""
CHAIN_MAX = 16
"""So many patches of a key become one, as soon as nothing can come in between them any more."""
SHORTENED_MAX = 10_000
"""About so many rows are laid over each other per WAL object, or twice as many as it has; up to
double that where chains have become very long."""
KEY_BYTES = 150
"""About what Python needs around a key in the index."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One version of a row."""

    lsn: int
    seq: int
    kind: int
    values: Mapping[int, Any] = field(default_factory=dict)
    """By field number; a column that is not there is null."""
    touched: frozenset[int] = frozenset()
    """Of a patch: the columns that it sets."""
    expires_at_ms: int | None = None


class Chain(NamedTuple):
    """The versions of one key, and the ingested segments of the same instant."""

    entries: list[Entry]
    """Newest first: patches, and the row that they were laid over."""
    ingested: tuple[SegmentEntry, ...]


@dataclass(frozen=True, slots=True)
class Moment:
    """The contents of a memtable within a range, all of one instant."""

    last_lsn: int
    rows: Versions
    range_tombstones: Sequence[RangeTombstone]
    ingested: tuple[SegmentEntry, ...]

    def from_lsn(self, first: int) -> "Moment":
        """Return the versions that are not older than an LSN."""
        if first <= 0:
            return self
        rows = self.rows.take(np.flatnonzero(self.rows.lsns >= first).astype(np.int64))
        deleted = [t for t in self.range_tombstones if t.lsn >= first]
        return replace(self, rows=rows, range_tombstones=deleted)


class Memtable:
    """Applied to by one thread at a time, read by any number.

    It keeps changing, so a read takes all that it needs in one call: `chain`, `look_up` or
    `moment`, each of which holds `lock` once and returns values that never change. Rows and
    ingested segments of two calls may belong to two different states (H69).
    """

    def __init__(self, schema: Schema, first_lsn: int) -> None:
        self.schema = schema
        self.first_lsn = first_lsn
        self.last_lsn = first_lsn - 1
        self.range_tombstones = RangeTombstones()
        self.marks: dict[str, int] = {}
        """How far each stream of a local log is in here."""
        self._ingested: tuple[SegmentEntry, ...] = ()
        """Segments of ingests that are not folded yet."""
        self._arena = Arena(schema)
        self._index: dict[bytes, int] = {}
        self._under: dict[int, int] = {}
        """From a patch to the row that was the newest of its key before."""
        self._patches: Counter[bytes] = Counter()
        """Patches per key, since those of that key were last laid over each other."""
        self._long: dict[bytes, None] = {}
        """Keys with many, the one that waits longest first."""
        self._newest_size = 0
        self._barrier = 0
        """The LSN of the last ingest: its rows lie between patches, and are not in here."""
        self._newest_lsn = 0
        self.lock = leaf_lock()
        """Held by whoever reads several tables at one instant, or changes this one."""
        self._unindexed: list[tuple[pa.Array, int]] = []
        """Large batches, and their first rows: indexed when somebody reads."""
        self._sorted: list[bytes] = []

    def __len__(self) -> int:
        with self.lock:
            return len(self._ready_index())

    @property
    def size(self) -> int:
        """About how many bytes it takes."""
        return self._arena.bytes + KEY_BYTES * len(self._index)

    def apply(
        self,
        lsn: int,
        batches: Sequence[AnyOps],
        marks: Mapping[str, int] | None = None,
        *,
        is_early: bool = False,
    ) -> None:
        """Apply one WAL object whole; sequences count over all its batches.

        With `is_early` an object below it is missing yet, so `last_lsn` stays.
        """
        seq = 0
        with self.lock:
            for ops in batches:
                if isinstance(ops, OneOp) and lsn >= self._newest_lsn:
                    self._add_one(ops, lsn, seq)
                    seq += 1
                    continue
                rows, tombstones = split_ops(ops.columns(), lsn, seq)
                for tombstone in tombstones:
                    self.range_tombstones.add(tombstone)
                if len(rows):
                    self._add(rows, lsn)
                seq += len(ops)
            self._newest_size = seq
            self._newest_lsn = max(self._newest_lsn, lsn)
            if not is_early:
                self.last_lsn = max(self.last_lsn, lsn)
            if marks:
                self.marks.update(marks)

    def ingest(self, lsn: int, segments: Sequence[SegmentEntry]) -> None:
        """Take in the segments that an ingest makes visible."""
        with self.lock:
            self._ingested = (*self._ingested, *segments)
            self.last_lsn = max(self.last_lsn, lsn)
            self._barrier = max(self._barrier, lsn)

    def pass_over(self, lsn: int) -> None:
        """Note an LSN that changes no row."""
        self.last_lsn = max(self.last_lsn, lsn)

    def settle(self, lsn: int) -> None:
        """Note that nothing at or below an LSN will come in any more, and shorten long chains.

        Of many chains some, as many as go with the size of the newest object: shortening keeps
        up with what comes in, and everybody who needs the lock waits a moment only.
        """
        if self._long:
            with self.lock:
                most = max(SHORTENED_MAX, 2 * self._newest_size)
                self._shorten(sorted(islice(self._long, most // CHAIN_MAX + 1)), lsn, 2 * most)

    def chain(self, key: bytes) -> Chain:
        """Return the versions of a key and the ingested segments, all of one instant (H15, H69)."""
        with self.lock:
            return Chain(list(self._chain(key)), self._ingested)

    def chains_locked(self, keys: Sequence[bytes]) -> list[Chain]:
        """Return the same of several keys; the caller holds the lock."""
        return [Chain(list(self._chain(key)), self._ingested) for key in keys]

    def _chain(self, key: bytes) -> Iterator[Entry]:
        row = self._find(key)
        cover = self.range_tombstones.covering(key) if self.range_tombstones else None
        while row is not None:
            entry = entry_at(*self._arena.locate(row))
            if cover is not None and (cover.lsn, cover.seq) > (entry.lsn, entry.seq):
                break
            yield entry
            row = self._under.get(row)
        if cover is not None:
            yield Entry(cover.lsn, cover.seq, OpKind.DELETE)

    def look_up(self, keys: Sequence[bytes]) -> Moment:
        """Return the versions of some sorted keys, all of one instant."""
        with self.lock:
            return self.look_up_locked(keys)

    def look_up_locked(self, keys: Sequence[bytes]) -> Moment:
        """Return the same; the caller holds the lock."""
        rows = [row for row in map(self._ready_index().get, keys) if row is not None]
        deleted = self.range_tombstones.within(KeyRange(keys[0], keys[-1] + b"\0"))
        return Moment(self.last_lsn, self._gather(rows), deleted, self._ingested)

    def moment(self, wanted: KeyRange) -> Moment:
        """Return the versions within a range, all of one instant: no batch is seen in part."""
        with self.lock:
            return self.moment_locked(wanted)

    def moment_locked(self, wanted: KeyRange) -> Moment:
        """Return the same; the caller holds the lock."""
        keys, end = self._sorted_keys(), wanted.end
        first = bisect_left(keys, wanted.start)
        keys = keys[first : len(keys) if end is None else bisect_left(keys, end)]
        rows = self._gather(list(map(self._index.__getitem__, keys)))
        return Moment(self.last_lsn, rows, self.range_tombstones.within(wanted), self._ingested)

    def drop_below(self, floor: int, schema: Schema | None = None) -> "Memtable":
        """Return a memtable without what lies below `floor`."""
        kept = Memtable(schema or self.schema, floor)
        with self.lock:
            self._ready_index()
            kept._arena = self._arena.from_lsn(floor, kept.schema)
            first, old = kept._arena.first_row, kept._arena.below_lsn(floor)
            kept._index = {k: row for k, row in self._index.items() if row >= first}
            kept._under = {row: below for row, below in self._under.items() if below >= first}
            if old:  # they came late, behind newer ones
                kept._index = {k: row for k, row in kept._index.items() if row not in old}
                kept._under = {r: below for r, below in kept._under.items() if below not in old}
            kept._patches = Counter({k: n for k, n in self._patches.items() if k in kept._index})
            kept._long = {k: None for k in self._long if k in kept._index}
            kept._barrier = self._barrier
            kept.range_tombstones = self.range_tombstones.from_lsn(floor)
            kept._ingested = tuple(e for e in self._ingested if e.lsn_max >= floor)
            kept.marks = dict(self.marks)
            kept.last_lsn = max(self.last_lsn, floor - 1)
            kept._newest_lsn = self._newest_lsn
        return kept

    def _add_one(self, op: OneOp, lsn: int, seq: int) -> None:
        """Take in a whole row of one key, the newest there is: a look into a dict and no Arrow."""
        if self._unindexed:
            self._ready_index()
        self._index[op.key] = self._arena.append_one(op, lsn, seq)

    def _add(self, rows: Versions, lsn: int) -> None:
        rows = rows.under(self.schema)
        first = self._arena.append(rows)
        patches = rows.kinds == OpKind.PATCH
        if lsn < self._newest_lsn or patches.any():
            self._ready_index()
            keys, numbers = rows.keys.to_pylist(), range(first, first + len(rows))
            if lsn < self._newest_lsn or len(set(keys)) < len(keys):
                self._count_patches(keys)
                self._add_one_by_one(keys, numbers)
            else:
                there, under = list(map(self._index.get, keys)), self._under
                self._count_patches([k for k, b in zip(keys, there, strict=True) if b in under])
                below = zip(numbers, there, patches.tolist(), strict=True)
                under.update([(row, b) for row, b, patch in below if patch and b is not None])
                self._index.update(zip(keys, numbers, strict=True))
        else:
            self._unindexed.append((rows.keys, first))
            if len(rows) < INDEXED_LATER:
                self._ready_index()

    def _count_patches(self, keys: list[bytes]) -> None:
        """Note keys that have patches already and get another version."""
        if keys:
            self._patches.update(keys)
            counts = self._patches
            self._long.update([(key, None) for key in keys if counts[key] >= CHAIN_MAX])

    def _shorten(self, keys: list[bytes], settled: int, most: int) -> None:
        """Lay patches of each key over each other, down to a whole row if there is one in here.

        Only those between which nothing can come any more, nor has: no late object, no row of
        an ingest, no range delete. What was laid over each other leaves with its newest part.
        """
        heads = list(map(self._index.__getitem__, keys))
        chains = go_down(heads, self._under, self._arena, self._floors(keys), most)
        waiting = chains.lsns > settled
        above = np.full(len(keys), NONE, np.int64)
        rows, owners = chains.of(waiting)
        above[owners] = rows  # the lowest of each key is the last one
        counts = np.bincount(chains.owners[~waiting], minlength=len(keys))
        rows, owners = chains.of(~waiting & (counts[chains.owners] > 1))
        if len(rows):
            several = np.flatnonzero(counts > 1).tolist()
            self._put_in_place([keys[n] for n in several], above[several], rows, owners)
        self._note_shortened(keys, chains)

    def _floors(self, keys: list[bytes]) -> Floors:
        """Return where the chains of keys end: at the last ingest, or a newer range delete."""
        lsns = np.full(len(keys), self._barrier, np.int64)
        seqs = np.full(len(keys), 1 << 32, np.int64)
        if self.range_tombstones:
            for place, cover in enumerate(map(self.range_tombstones.covering, keys)):
                if cover is not None and cover.lsn > self._barrier:
                    lsns[place], seqs[place] = cover.lsn, cover.seq
        return Floors(lsns, seqs)

    def _put_in_place(
        self, keys: list[bytes], above: Numbers, rows: Numbers, owners: Numbers
    ) -> None:
        """Let one row of each key stand for several of its chain."""
        ones = newest_versions([self._arena.take(rows)], self.schema)
        first, under = self._arena.append(ones), self._under
        numbers = range(first, first + len(ones))
        lowest = rows[np.flatnonzero(np.diff(owners, append=NONE))].tolist()
        below = zip(numbers, map(under.get, lowest), strict=True)
        links = [(number, row) for number, row in below if row is not None]
        deque(map(under.pop, rows.tolist(), repeat(None)), maxlen=0)
        under.update(links)
        tops = list(zip(keys, numbers, above.tolist(), strict=True))
        self._index.update([(key, number) for key, number, row in tops if row == NONE])
        under.update([(row, number) for _, number, row in tops if row != NONE])

    def _note_shortened(self, keys: list[bytes], chains: Chains) -> None:
        """Take keys out of those to be shortened; the unfinished ones wait again."""
        unfinished = dict.fromkeys([keys[n] for n in chains.unfinished.tolist()])
        finished = [key for key in keys if key not in unfinished]
        deque(map(self._long.pop, keys, repeat(None)), maxlen=0)
        deque(map(self._patches.pop, finished, repeat(0)), maxlen=0)
        self._long.update(unfinished)

    def _find(self, key: bytes) -> int | None:
        return self._ready_index().get(key)

    def _ready_index(self) -> dict[bytes, int]:
        """Bring the index up to date. Later rows of a key take the place of earlier ones."""
        for keys, first in self._unindexed:
            self._index.update(zip(keys.to_pylist(), range(first, first + len(keys)), strict=True))
        self._unindexed = []
        return self._index

    def _sorted_keys(self) -> list[bytes]:
        """Return all keys in order. The index keeps the order in which keys were first seen, so
        new ones stand at its end.
        """
        known = len(self._sorted)
        if len(self._ready_index()) > known:
            self._sorted = sorted([*self._sorted, *islice(self._index, known, None)])
        return self._sorted

    def _add_one_by_one(self, keys: list[bytes], numbers: range) -> None:
        """Patches look at what is below; independent objects may come out of order."""
        for key, row in zip(keys, numbers, strict=True):
            chunk, place = self._arena.locate(row)
            below = self._index.get(key)
            if below is not None and self._is_newer(below, chunk, place):
                self._slip_under(key, row)
                continue
            if below is not None and chunk.kinds[place] == OpKind.PATCH:
                self._under[row] = below
            self._index[key] = row

    def _is_newer(self, row: int, chunk: Versions, place: int) -> bool:
        there, at = self._arena.locate(row)
        return (there.lsns[at], there.seqs[at]) > (chunk.lsns[place], chunk.seqs[place])

    def _slip_under(self, key: bytes, row: int) -> None:
        """Find the place of a late row below the patches that are newer than it."""
        chunk, place = self._arena.locate(row)
        above = self._index[key]
        while self._kind(above) == OpKind.PATCH:
            below = self._under.get(above)
            if below is None or not self._is_newer(below, chunk, place):
                self._under[above] = row
                if below is not None and chunk.kinds[place] == OpKind.PATCH:
                    self._under[row] = below
                return
            above = below

    def _kind(self, row: int) -> int:
        chunk, place = self._arena.locate(row)
        return int(chunk.kinds[place])

    def _gather(self, rows: list[int]) -> Versions:
        below = self._below(rows) if self._under else []
        found = self._arena.take(np.array(rows + below, np.int64))
        return found.take(sorted_places(found)) if below else found

    def _below(self, rows: list[int]) -> list[int]:
        found: list[int] = []
        while rows:
            rows = [row for row in map(self._under.get, rows) if row is not None]
            found += rows
        return found


def entry_at(rows: Versions, place: int) -> Entry:
    """Return one version, as Python values."""
    kind = int(rows.kinds[place])
    expiry = rows.expires_at_ms[place].as_py() if rows.expires_at_ms is not None else None
    values = {}
    if kind != OpKind.DELETE:
        values = {number: to_python(array[place]) for number, array in rows.fields.items()}
    touched: frozenset[int] = frozenset()
    if kind == OpKind.PATCH:
        touched = frozenset(n for n, array in rows.touched.items() if array[place].as_py())
    return Entry(int(rows.lsns[place]), int(rows.seqs[place]), kind, values, touched, expiry)
