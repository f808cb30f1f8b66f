"""The memtable against a plain model: cuts taken at random, read at once and again at the end."""

from random import Random

import numpy as np
import pyarrow as pa
import pytest

from reef.engine.read import memtable as module
from reef.engine.read import runs
from reef.engine.read.memtable import Memtable, entry_at
from reef.engine.read.merge import newest_versions
from reef.engine.read.scan import RowsCursor, merged
from reef.engine.read.view import resolve
from reef.engine.rows.input import to_ops
from reef.formats.schema import Schema
from reef.formats.versions import Versions
from reef.formats.wal_object import OneOp, OpKind, Ops
from reef.types import KeyRange

NARROW = Schema.of(pa.schema([("id", pa.binary()), ("a", pa.binary()), ("b", pa.int32())]), "id")
WIDE = NARROW.grown(
    pa.schema([("id", pa.binary()), ("a", pa.binary()), ("b", pa.int64()), ("c", pa.string())])
)
A, B = 1, 2
KEYS = [b"%c%c" % (first, second) for first in b"abcd" for second in b"\0ax\xff"]
PACES = [
    {"HEAD_ROWS": 2, "SMALL_RUNS": 2, "RUNS_MAX": 0, "PART_ROWS": 3},
    {"HEAD_ROWS": 5, "SMALL_RUNS": 4, "RUNS_MAX": 1, "PART_ROWS": 10, "SMALL_ROWS": 6},
    {"HEAD_ROWS": 1000, "SMALL_RUNS": 3, "RUNS_MAX": 2, "PART_ROWS": 7},
    {"HEAD_ROWS": 3, "SMALL_RUNS": 1000, "RUNS_MAX": 1, "PART_ROWS": 1},
    {},
]
"""How soon runs are made and merged, and how much at a time."""
SPREAD = ["one", "one", "one", "gone", "put", "patch", "patch", "range"]
PATCHES = ["patch"] * 20 + SPREAD
"""Kinds of operations: on many keys, or mostly patches of few keys."""


class World:
    """A memtable, and every operation that was applied to it."""

    def __init__(self, seed):
        self.random = Random(seed)
        self.keys, self.kinds = (KEYS, SPREAD) if seed % 2 else (KEYS[::5], PATCHES)
        self.memtable = Memtable(NARROW, 1)
        self.schema = NARROW
        self.applied = {}
        """By LSN: a list of operations, or the rows of an ingest."""
        self.floor, self.next_lsn, self.late = 1, 1, {}
        self.cuts = []

    # --- changes ----------------------------------------------------------------------

    def operations(self):
        random = self.random
        key, number = random.choice(self.keys), random.randrange(100)
        start, end = sorted(random.sample(KEYS, 2))
        kind = random.choice(self.kinds)
        match kind:
            case "one":
                return [("one", key, b"%d" % number)]
            case "gone":
                return [("one", key, None)]
            case "put" | "patch":
                keys = [random.choice(self.keys) for _ in range(random.randrange(1, 6))]
                return [(kind, k, random.choice("ab"), number + n) for n, k in enumerate(keys)]
            case _:
                return [("range", start, end)]

    def ops_of(self, operations):
        kind = operations[0][0]
        if kind == "one":
            return OneOp(operations[0][1], A, operations[0][2])
        if kind == "range":
            _, start, end = operations[0]
            ends = pa.array([end], pa.binary())
            return Ops(pa.array([start], pa.binary()), pa.array([2], pa.uint8()), ends)
        rows = [
            {"id": k, "a": b"%d" % n} if column == "a" else {"id": k, "b": n}
            for _, k, column, n in operations
        ]
        if kind == "put":
            rows = [{"a": None, "b": None, **row} for row in rows]
            return to_ops(rows, self.schema, kind=OpKind.PUT)
        # Columns differ from row to row: a patch of one column each.
        chosen = [row for row in rows if ("a" in row) == ("a" in rows[0])]
        operations[:] = [op for op in operations if (op[2] == "a") == ("a" in rows[0])]
        return to_ops(chosen, self.schema, kind=OpKind.PATCH)

    def apply(self, lsn, batches, *, is_early):
        encoded = [self.ops_of(batch) for batch in batches]
        self.applied[lsn] = [operation for batch in batches for operation in batch]
        self.memtable.apply(lsn, encoded, is_early=is_early)

    def commit(self):
        batches = [self.operations() for _ in range(self.random.randrange(1, 4))]
        self.apply(self.next_lsn, batches, is_early=bool(self.late))
        self.next_lsn += 1

    def postpone(self):
        """Leave an LSN open: its object is applied after later ones."""
        self.late[self.next_lsn] = [self.operations() for _ in range(2)]
        self.next_lsn += 1

    def ingest(self):
        if not self.late:
            key = self.random.choice(self.keys)
            self.applied[self.next_lsn] = {key: self.random.randrange(100)}
            self.memtable.ingest(self.next_lsn, [])
            self.next_lsn += 1

    def settle(self):
        if self.late:
            lsn = self.random.choice(list(self.late))
            self.apply(lsn, self.late.pop(lsn), is_early=bool(self.late))
        if not self.late:
            self.memtable.pass_over(self.next_lsn - 1)
        self.memtable.settle(min(self.late, default=self.next_lsn) - 1)

    def fold(self):
        last = min(self.late, default=self.next_lsn)
        self.floor = self.random.randrange(self.floor, last + 1)
        if self.random.random() < 0.2:
            self.schema = WIDE
        self.memtable = self.memtable.drop_below(self.floor, self.schema)

    def tidy(self):
        self.memtable.tidy()

    # --- the truth --------------------------------------------------------------------

    def truth(self, from_lsn=0, below=1 << 60):
        """Return the rows as (a, b), one operation after the other."""
        rows = {}
        for lsn in sorted(self.applied):
            if from_lsn <= lsn < below:
                _replay(rows, self.applied[lsn])
        return rows

    def take_cut(self):
        below = self.truth(0, self.floor)
        ingests = {
            lsn: made
            for lsn, made in self.applied.items()
            if isinstance(made, dict) and lsn >= self.floor
        }
        cut = self.memtable.cut()
        self.cuts.append((cut, below, ingests, self.floor, self.truth()))
        check(*self.cuts[-1])
        self.check_fold(cut)

    def check_fold(self, cut):
        """The versions for a fold give the rows as of its last LSN, where there are any."""
        folded = cut.all_versions(self.floor, cut.last_lsn)
        if folded is None:
            assert cut.superseded_lsn > cut.last_lsn, "only objects that came early may do that"
            return
        rows, tombstones = folded
        assert all(self.floor <= t.lsn <= cut.last_lsn for t in tombstones)
        assert not len(rows) or self.floor <= rows.lsns.min() <= rows.lsns.max() <= cut.last_lsn
        ordered = list(zip(rows.keys.to_pylist(), (-rows.lsns).tolist(), strict=True))
        assert ordered == sorted(ordered)
        whole = {
            lsn: made
            for lsn, made in self.applied.items()
            if isinstance(made, dict) and self.floor <= lsn <= cut.last_lsn
        }
        below = self.truth(0, self.floor)
        parts = [rows, *segments(below, whole, self.floor, cut.schema)]
        found = newest_versions(parts, cut.schema, [type(cut.range_tombstones).of(tombstones)])
        assert plain(found) == self.truth(0, cut.last_lsn + 1)


def _replay(rows, made):
    if isinstance(made, dict):
        rows.update({key: (b"%d" % number, number) for key, number in made.items()})
        return
    for operation in made:
        match operation:
            case ("one", key, None):
                rows.pop(key, None)
            case ("one", key, value):
                rows[key] = (value, None)
            case ("put", key, column, number):
                rows[key] = (b"%d" % number, None) if column == "a" else (None, number)
            case ("patch", key, column, number) if key in rows:
                a, b = rows[key]
                rows[key] = (b"%d" % number, b) if column == "a" else (a, number)
            case ("range", start, end):
                for key in [key for key in rows if start <= key < end]:
                    del rows[key]


# --- reading ----------------------------------------------------------------------------


def segments(below, ingests, floor, schema):
    """Return the rows below the floor, and those of ingests, as segments would have them."""
    rows = [(key, floor - 1, values) for key, values in below.items()]
    rows += [
        (key, lsn, (b"%d" % number, number))
        for lsn, made in ingests.items()
        for key, number in made.items()
    ]
    for key, lsn, (a, b) in rows:
        yield Versions(
            pa.array([key], pa.binary()),
            np.array([lsn], np.int64),
            np.array([0 if lsn >= floor else 1 << 30], np.uint32),
            np.array([OpKind.PUT], np.uint8),
            {A: pa.array([a], pa.binary()), B: pa.array([b], schema.types()[B])},
        )


def plain(rows):
    """Return the rows that exist."""
    a, b = (rows.fields[n].to_pylist() if n in rows.fields else [None] * len(rows) for n in (A, B))
    found = zip(rows.keys.to_pylist(), rows.kinds.tolist(), a, b, strict=True)
    return {key: (one, two) for key, kind, one, two in found if kind == OpKind.PUT}


def check(cut, below, ingests, floor, expected):
    """Every way of reading a cut gives the rows that are expected."""
    elsewhere = list(segments(below, ingests, floor, cut.schema))
    entries = {
        key: [entry_at(part, 0) for part in elsewhere if part.keys[0].as_py() == key]
        for key in KEYS
    }
    one_by_one = {key: resolve(cut.versions(key) + entries[key], cut.schema) for key in KEYS}
    one_by_one = {
        key: (found.values.get(A), found.values.get(B))
        for key, found in one_by_one.items()
        if found is not None and found.kind == OpKind.PUT
    }
    assert one_by_one == expected
    deletes = [cut.range_tombstones]
    parts = cut.look_up(KEYS)
    empty = Versions.empty(cut.schema)
    assert plain(newest_versions([empty, *parts, *elsewhere], cut.schema, deletes)) == expected
    some = KEYS[3:9:2]
    parts = [part for part in elsewhere if part.keys[0].as_py() in some]
    found = newest_versions([empty, *cut.look_up(some), *parts], cut.schema, deletes)
    assert plain(found) == {key: row for key, row in expected.items() if key in some}
    for bounds in (KeyRange(), KeyRange(KEYS[2], KEYS[11]), KeyRange(b"b\1", b"c")):
        within = {key: row for key, row in expected.items() if bounds.has(key)}
        outside = [s for s in elsewhere if bounds.has(s.keys[0].as_py())]
        for reverse in (False, True):
            assert scan(cut, bounds, reverse, outside) == within
        rows = cut.within(bounds).rows(KeyRange())
        assert plain(newest_versions([rows, *outside], cut.schema, deletes)) == within


def scan(cut, bounds, reverse, elsewhere):
    """Read a range as scans do; no key comes twice."""
    cursors = [RowsCursor(pieces) for pieces in cut.pieces(bounds, reverse)]
    cursors += [RowsCursor(iter([rows])) for rows in elsewhere]
    found = {}
    for parts in merged(cursors, reverse):
        rows = newest_versions(parts, cut.schema, [cut.range_tombstones])
        keys = rows.keys.to_pylist()
        assert not set(keys) & found.keys()
        found |= {key: plain(rows).get(key) for key in keys}
    return {key: row for key, row in found.items() if row is not None}


@pytest.mark.parametrize("seed", range(30))
def test_H69_every_cut_is_the_state_of_its_instant(monkeypatch, seed):
    """H15, H69: puts, patches, deletes, range deletes, late objects, ingests, folds and a growing
    schema: each cut reads as one operation after the other gives it, then and later.
    """
    for name, value in PACES[seed % len(PACES)].items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(runs, "PIECE_ROWS", 1 + seed % 3)
    monkeypatch.setattr(runs, "FENCE_ROWS", 2 + seed % 2)
    world = World(seed)
    steps = {
        world.commit: 12,
        world.postpone: 2,
        world.settle: 6,
        world.ingest: 2,
        world.tidy: 8,
        world.fold: 1,
        world.take_cut: 2,
    }
    for step in world.random.choices(list(steps), list(steps.values()), k=100):
        step()
    world.take_cut()
    for cut in world.random.sample(world.cuts, min(4, len(world.cuts))):
        check(*cut)
