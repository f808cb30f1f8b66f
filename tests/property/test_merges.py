"""Merge operators against a model in plain Python: reads, joins, folds, compactions, reopenings."""

from datetime import UTC, datetime
from decimal import Decimal
from itertools import count

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import reef
from reef.engine.read.memtable import entry_at, rows_of_key
from reef.engine.read.merge import drop_deleted, joined_versions, newest_versions, sorted_places
from reef.engine.read.view import resolve
from reef.formats.schema import Operator, Schema
from reef.formats.versions import Versions, concat_versions
from reef.formats.wal_object import OpKind
from reef.jobs import compact, fold, ingest, rebuild, repair, verify
from reef.manifest.roots import job_of
from reef.runtime import REAL
from reef.stores.memory import MemoryStore
from tests.support.compaction import SMALL
from tests.support.merges import COLUMNS, OPERANDS, OPERATORS, SCHEMA, Model, canonical

NAME = "counters"
REEF_SCHEMA = Schema.of(SCHEMA)
NUMBERS = {field.name: field.number for field in REEF_SCHEMA.fields}
VALUES = {
    "n": st.one_of(st.integers(-3, 3), st.sampled_from([2**63 - 1, -(2**63)])),
    "u": st.one_of(st.integers(0, 3), st.just(2**64 - 1)),
    "x": st.one_of(
        st.floats(-2, 2), st.sampled_from([0.0, -0.0, float("nan"), float("inf"), 1e308])
    ),
    "s": st.text(max_size=2),
    "l": st.lists(st.integers(0, 4), max_size=3),
    "f": st.lists(st.sampled_from([0.0, -0.0, 1.5, float("nan")]), max_size=3),
    "d": st.sampled_from([Decimal("-9999999999.99"), Decimal("0.00"), Decimal("0.01")]),
    "t": st.sampled_from([datetime(year, 1, 1, tzinfo=UTC) for year in (1600, 1970, 2200)]),
}
ROWS = st.fixed_dictionaries({}, optional={n: st.one_of(st.none(), v) for n, v in VALUES.items()})
PATCHES = ROWS.filter(bool)


@st.composite
def operands(draw):
    """Some columns, each with an operator of its type and an operand."""
    columns = draw(st.lists(st.sampled_from(COLUMNS), min_size=1, max_size=3, unique=True))
    return {c: (draw(st.sampled_from(OPERATORS[c])), draw(VALUES[c])) for c in columns}


TIMES = st.integers(0, 6)
EXPIRIES = st.one_of(st.none(), TIMES)
STEPS = st.one_of(
    st.tuples(st.just("put"), ROWS, EXPIRIES),
    st.tuples(st.just("delete")),
    st.tuples(st.just("patch"), PATCHES),
    st.tuples(st.just("merge"), operands(), TIMES, EXPIRIES),
)


def version(lsn, step):
    """Return one step as the only row of a table of versions."""
    kind, *rest = step
    columns = dict(rest[0]) if rest else {}
    codes, merged_at, expires = dict.fromkeys(COLUMNS, 0), None, None
    if kind == "put":
        expires = rest[1]
    elif kind == "patch":
        codes |= dict.fromkeys(columns, int(Operator.SET))
    elif kind == "merge":
        merged_at, expires = rest[1:]
        codes |= {name: int(Operator[op.upper()]) for name, (op, _) in columns.items()}
        columns = {name: _operand(name, value) for name, (_, value) in columns.items()}
    return Versions(
        pa.array([b"k"], pa.binary()),
        np.array([lsn]),
        np.array([0], np.uint32),
        np.array([OpKind[kind.upper()]], np.uint8),
        {NUMBERS[name]: pa.array([columns.get(name)], SCHEMA.field(name).type) for name in COLUMNS},
        pa.array([expires], pa.int64()),
        {NUMBERS[name]: pa.array([code], pa.uint8()) for name, code in codes.items()},
        merged_at_ms=pa.array([merged_at], pa.int64()),
    )


def _operand(name, value):
    if name not in ("l", "f"):
        return value
    return Model().row("k").merge({name: ("union", value)}, 0).columns[name]


def modelled(steps):
    """Return the row after some steps."""
    row = Model().row("k")
    for kind, *rest in steps:
        if kind == "put":
            row = row.put(*rest)
        elif kind == "patch":
            row = row.patch(*rest)
        elif kind == "merge":
            row = row.merge(*rest)
        else:
            row = type(row)()
    return row


def rows_of(steps, first_lsn=1):
    """Return the versions of some steps, newest first."""
    parts = [version(lsn, step) for lsn, step in enumerate(steps, first_lsn)]
    rows = concat_versions([Versions.empty(REEF_SCHEMA), *parts], REEF_SCHEMA)
    return rows.take(sorted_places(rows))


def assert_is(rows, model, now_ms):
    """Check the one row that versions amount to."""
    seen = drop_deleted(rows, now_ms)
    expected = model.at(now_ms)
    assert len(seen) == (expected is not None)
    if expected is not None:
        found = {name: seen.fields[NUMBERS[name]][0].as_py() for name in COLUMNS}
        assert canonical(found) == canonical(expected)


@example([("put", {"n": 1}, None), ("merge", {"x": ("add", -0.0)}, 0, None)], 0)
@settings(max_examples=300)
@given(steps=st.lists(STEPS, min_size=1, max_size=8), now_ms=TIMES)
def test_versions_amount_to_the_row_of_the_model(steps, now_ms):
    """Puts, deletes, patches and merges in any order and time give the row of a sequential model,
    read by a scan and by a point read."""
    rows = rows_of(steps)
    assert_is(newest_versions([rows], REEF_SCHEMA), modelled(steps), now_ms)
    entry = resolve([entry_at(rows, place) for place in range(len(rows))], REEF_SCHEMA)
    if entry is not None and entry.kind == OpKind.PUT:
        assert_is(rows_of_key([entry], REEF_SCHEMA), modelled(steps), now_ms)
    else:
        assert modelled(steps).at(now_ms) is None


def test_a_merge_that_is_part_of_a_row_does_not_count_again():
    """H68: a repair may leave a row in one segment, and a merge that it was made of in another."""
    steps = [("merge", {"n": ("add", 5)}, 0, None)]
    merge = rows_of(steps)
    whole = newest_versions([merge], REEF_SCHEMA)
    assert (whole.kinds[0], whole.lsns[0]) == (OpKind.PUT, 1)
    for parts in ([whole, merge], [merge, whole], [merge, merge]):
        assert_is(newest_versions(parts, REEF_SCHEMA), modelled(steps), 0)


@example([("patch", {"n": 1}), ("merge", {"n": ("add", 1)}, 0, None)], (0, 8), True, 0)
@settings(max_examples=300)
@given(
    steps=st.lists(STEPS, min_size=1, max_size=8),
    cut=st.tuples(st.integers(0, 8), st.integers(0, 8)),
    joins=st.booleans(),
    now_ms=TIMES,
)
def test_joined_versions_have_the_same_effect_on_any_row_below(steps, cut, joins, now_ms):
    """Versions in the middle of a history are joined without the row below them."""
    first, last = sorted(cut)
    rows = rows_of(steps)
    inside = (rows.lsns > first) & (rows.lsns <= last)
    middle = rows.take(np.flatnonzero(inside))
    joined = joined_versions(middle, REEF_SCHEMA, joins_merges=joins)
    assert len(joined) <= len(middle)
    rest = rows.take(np.flatnonzero(~inside))
    assert_is(
        newest_versions([rest, joined], REEF_SCHEMA)
        if len(rest)
        else newest_versions([joined], REEF_SCHEMA),
        modelled(steps),
        now_ms,
    )


class AdjustableClock(type(REAL)):
    """A runtime whose wall clock runs ahead."""

    ahead_s = 0.0

    def wall_s(self):
        return super().wall_s() + self.ahead_s


def _can_come_back(key):
    """Whether a segment is of a fold or merge, whose log or inputs are still there."""
    job = job_of(key.rpartition("/")[2].removesuffix(".seg"))
    return job is None or job.startswith("compact-")


class Merges(RuleBasedStateMachine):
    """Whatever is merged, folded and compacted, the namespace and the model agree."""

    keys = st.sampled_from(["a", "b", "c"])
    ttls = st.sampled_from([None, None, 1000, 2000])

    @initialize()
    def open(self):
        self.runtime = AdjustableClock()
        self.db = reef.Database(MemoryStore(runtime=self.runtime))
        self.db.create(NAME, SCHEMA)
        self.writer = self.db.writer(NAME, background=False)
        self.model = Model()
        self.numbers = count()
        self.snapshots, self.past = [], {}
        """Rows of the model when a snapshot was taken, and by LSN."""
        self.merged_at = {}
        """The time of each merge, by its LSN: whether it finds a row that expires."""

    @property
    def now_ms(self):
        return int(self.runtime.wall_s() * 1000)

    def expiry(self, ttl_s):
        return None if ttl_s is None else self.now_ms + 1000 * ttl_s

    # --- writing ----------------------------------------------------------------------
    @rule(key=keys, row=ROWS, ttl_s=ttls)
    def put(self, key, row, ttl_s):
        self.writer.put(key, row, ttl_s=ttl_s)
        self.model.rows[key] = self.model.row(key).put(row, self.expiry(ttl_s))

    @rule(key=keys, columns=PATCHES)
    def patch(self, key, columns):
        self.writer.patch([{"id": key, **columns}])
        self.model.rows[key] = self.model.row(key).patch(columns)

    @rule(key=keys, merged=operands(), ttl_s=ttls)
    def merge(self, key, merged, ttl_s):
        columns = {name: OPERANDS[op](value) for name, (op, value) in merged.items()}
        self._note(self.writer.merge(key, columns, ttl_s=ttl_s))
        self._merge(key, merged, ttl_s)

    @rule(changes=st.lists(st.tuples(keys, st.integers(-3, 3)), min_size=1, max_size=4))
    def merge_rows(self, changes):
        """A key may come several times in one batch."""
        rows = [{"id": key, "n": value, "x": 0.1 * value} for key, value in changes]
        self._note(self.writer.merge_rows(rows, {"n": "add", "x": "add"}))
        for key, value in changes:
            self._merge(key, {"n": ("add", value), "x": ("add", 0.1 * value)}, None)

    @rule(key=keys, merged=operands(), commit=st.booleans())
    def transaction(self, key, merged, commit):
        """A transaction reads its own merges."""
        columns = {name: OPERANDS[op](value) for name, (op, value) in merged.items()}
        tx = self.writer.transaction()
        tx.merge(key, columns)
        before = self.model.row(key)
        self._merge(key, merged, None)
        assert canonical(tx.get(key)) == canonical(self.model.row(key).at(self.now_ms))
        if commit:
            self._note(tx.commit())
        else:
            tx.rollback()
            self.model.rows[key] = before

    @rule(key=keys, merged=operands(), ttl_s=ttls)
    def merge_again(self, key, merged, ttl_s):
        """A keyed merge that is sent twice counts once."""
        columns = {name: OPERANDS[op](value) for name, (op, value) in merged.items()}
        once = {"ttl_s": ttl_s, "idempotency_key": f"key {next(self.numbers)}"}
        self._note(self.writer.merge(key, columns, **once))
        self._merge(key, merged, ttl_s)
        assert self.writer.merge(key, columns, **once).replayed

    @rule(key=keys, merged=operands(), expected=st.integers(-3, 3))
    def merge_on_a_condition(self, key, merged, expected):
        """A condition sees the merges before it."""
        columns = {name: OPERANDS[op](value) for name, (op, value) in merged.items()}
        row = self.model.row(key).at(self.now_ms)
        when = [reef.equals(key, "n", expected)]
        if row is not None and row["n"] == expected:
            self._note(self.writer.merge(key, columns, when=when))
            self._merge(key, merged, None)
        else:
            with pytest.raises(reef.ConditionFailedError):
                self.writer.merge(key, columns, when=when)

    def _note(self, receipt):
        self.merged_at[receipt.lsn] = self.now_ms

    def _merge(self, key, merged, ttl_s):
        row = self.model.row(key).merge(merged, self.now_ms, self.expiry(ttl_s))
        self.model.rows[key] = row

    @rule(key=keys)
    def delete(self, key):
        self.writer.delete(key)
        self.model.rows.pop(key, None)

    @rule(ends=st.sampled_from([("a", "b"), ("b", "d"), ("a", "d")]))
    def delete_range(self, ends):
        self.writer.delete_range(*ends)
        kept = {k: row for k, row in self.model.rows.items() if not ends[0] <= k < ends[1]}
        self.model.rows = kept

    @rule(row=ROWS, key=keys)
    def load(self, row, key):
        """A bulk load is between the merges before and after it."""
        self.writer.flush()
        ingest(self.db, NAME, [{"id": key, **row}])
        self.writer.refresh()
        self.model.rows[key] = self.model.row(key).put(row)

    # --- jobs -------------------------------------------------------------------------
    @rule()
    def wait(self):
        self.runtime.ahead_s += 1500

    @rule()
    def fold(self):
        fold(self.db, NAME, segment_bytes_max=150, group_bytes=60)
        self.writer.refresh()

    @rule(full=st.booleans())
    def compact(self, full):
        compact(self.db, NAME, full=full, **SMALL)
        self.writer.refresh()

    @rule()
    def reopen(self):
        self.writer.close()
        self.writer = self.db.writer(NAME, background=False)

    @rule()
    def rebuild(self):
        """A bucket that has lost its manifests has the same rows after a rebuild."""
        copy = self._copy_without("/manifest/")
        rebuild(copy, NAME, apply=True)
        self._check_rows(copy.reader(NAME), self.model.rows)

    @rule(place=st.integers(0, 9))
    def repair(self, place):
        """A lost segment comes back from the log, which no sweep has collected; one of a load does
        not.
        """
        kept = sorted(i.key for i in self.db.store.list("") if "/segments/" in i.key)
        segments = [key for key in kept if _can_come_back(key)]
        if segments:
            copy = self._copy_without(segments[place % len(segments)])
            repair(copy, NAME, apply=True)
            self._check_rows(copy.reader(NAME), self.model.rows)

    def _copy_without(self, part):
        self.writer.flush()
        store = MemoryStore(runtime=self.runtime)
        for info in self.db.store.list(""):
            if part not in info.key and "/leases/" not in info.key:
                store.put(info.key, self.db.store.get(info.key))
        return reef.Database(store)

    # --- reading ----------------------------------------------------------------------
    @rule()
    def take_a_snapshot(self):
        self.writer.flush()
        self.snapshots.append((self.db.snapshot(NAME), dict(self.model.rows)))

    @rule()
    def remember(self):
        self.writer.flush()
        self.past[self.db.reader(NAME).last_lsn] = dict(self.model.rows)

    @rule(place=st.integers(0, 9))
    def read_the_past(self, place):
        """Snapshots and past states have the merges of their time, whatever was compacted since."""
        if self.snapshots:
            snapshot, rows = self.snapshots[place % len(self.snapshots)]
            self._check_rows(self.db.reader(NAME, snapshot=snapshot), rows)
        if self.past:
            lsn, rows = list(self.past.items())[place % len(self.past)]
            self._check_rows(self.db.reader(NAME, as_of={"lsn": lsn}), rows)

    @rule()
    def follow(self):
        """Changes from the beginning on give the same rows, merge by merge."""
        self.writer.flush()
        model = Model()
        for change in self.db.reader(NAME).changes(after_lsn=0):
            self._apply(model, change)
        assert {k: canonical(r) for k, r in model.visible(self.now_ms).items()} == {
            k: canonical(r) for k, r in self.model.visible(self.now_ms).items()
        }

    def _apply(self, model, change):
        key, row = change.key, model.row(change.key)
        columns = {n: v for n, v in (change.row or {}).items() if n != "id"}
        expires = change.expires_at and int(change.expires_at.timestamp() * 1000)
        if change.op == "put":
            model.rows[key] = row.put(columns, expires)
        elif change.op == "patch":
            model.rows[key] = row.patch(columns)
        elif change.op == "merge":
            merged = {n: (o.operator.name.lower(), o.value) for n, o in columns.items()}
            model.rows[key] = row.merge(merged, self.merged_at[change.lsn], expires)
        else:
            end = change.end_key if change.op == "delete_range" else None
            model.rows = {
                k: r
                for k, r in model.rows.items()
                if not (k == key if end is None else key <= k < end)
            }

    def _check_rows(self, reader, rows):
        with reader:
            found = {key: canonical(row) for key, row in reader.scan()}
        expected = {k: canonical(r) for k, r in Model(rows).visible(self.now_ms).items()}
        assert found == expected

    @invariant()
    def rows_are_those_of_the_model(self):
        expected = {k: canonical(row) for k, row in self.model.visible(self.now_ms).items()}
        assert {k: canonical(row) for k, row in self.writer.scan()} == expected
        for key in "abc":
            row = self.writer.get(key)
            assert (row and canonical(row)) == expected.get(key)
        found = self.writer.get_many(["c", "a"]).to_pylist()
        assert [row["_found"] for row in found] == ["c" in expected, "a" in expected]
        for n in {row["n"] for row in expected.values()} - {None}:
            chosen = {k for k, _ in self.writer.scan(where=[("n", "=", n)])}
            assert chosen == {k for k, row in expected.items() if row["n"] == n}

    def teardown(self):
        if hasattr(self, "db"):
            self.writer.close()
            assert not verify(self.db, NAME, deep=True).problems


TestMerges = Merges.TestCase
TestMerges.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
