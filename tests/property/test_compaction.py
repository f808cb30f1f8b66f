"""Compaction against a plain dict: whatever is merged with whatever, no row changes.

Histories of puts, deletes, range deletes, patches, expired rows and ingests of all of these, in
segments of a few rows, under both strategies and under merges of any segments that a test picks;
seen by readers of the head, of snapshots, of old generations, forwards and backwards.
"""

import datetime

import pyarrow as pa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import reef
from reef import stores
from reef.formats.wal_object import OpKind
from reef.jobs import compact, fold
from reef.jobs.compact.plan import STRATEGIES, CompactPlan
from reef.manifest.invariants import is_balanced
from tests.support.compaction import SMALL, head_of, ingest_rows

NAME = "events"
KEYS = st.sampled_from(["a", "b", "ba", "c", "d"])
RANGES = st.tuples(KEYS, KEYS).filter(lambda ends: ends[0] < ends[1])
NUMBERS = st.one_of(st.none(), st.integers(0, 9))
PAST = datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)
SCHEMA = pa.schema([("id", pa.string()), ("x", pa.int64()), ("y", pa.int64())])
COLUMNS = {1: "x", 2: "y"}


class Compaction(RuleBasedStateMachine):
    """Everything that makes versions, and everything that merges them."""

    @initialize()
    def open(self):
        self.db = reef.Database(stores.open("memory://"))
        self.db.create(NAME, SCHEMA)
        self.writer = self.db.writer(NAME, background=False)
        self.model = {}
        self.kept = []

    # --- writing ----------------------------------------------------------------------
    @rule(key=KEYS, x=NUMBERS, y=NUMBERS)
    def put(self, key, x, y):
        self.writer.upsert([{"id": key, "x": x, "y": y}])
        self.model[key] = {"id": key, "x": x, "y": y}

    @rule(keys=st.sets(KEYS, min_size=2), x=NUMBERS)
    def put_many(self, keys, x):
        self.writer.upsert([{"id": key, "x": x, "y": 1} for key in sorted(keys)])
        self.model |= {key: {"id": key, "x": x, "y": 1} for key in keys}

    @rule(key=KEYS)
    def put_expired(self, key):
        """A delete hides older rows, and is not visible itself."""
        self.writer.upsert([{"id": key, "x": 77, "y": 77, "_expires_at": PAST}])
        self.model.pop(key, None)

    @rule(key=KEYS, column=st.sampled_from("xy"), value=NUMBERS)
    def patch(self, key, column, value):
        self.writer.patch([{"id": key, column: value}])
        if key in self.model:
            self.model[key] = {**self.model[key], column: value}

    @rule(key=KEYS)
    def delete(self, key):
        self.writer.delete(key)
        self.model.pop(key, None)

    @rule(ends=RANGES)
    def delete_range(self, ends):
        self.writer.delete_range(*ends)
        self._forget(*ends)

    @rule(
        rows=st.dictionaries(
            KEYS,
            st.tuples(
                st.sampled_from([OpKind.PUT, OpKind.DELETE, OpKind.PATCH]),
                st.dictionaries(st.sampled_from([1, 2]), NUMBERS),
            ),
            min_size=1,
        ),
        ranges=st.lists(RANGES, max_size=1),
    )
    def ingest(self, rows, ranges):
        staged = [
            (key.encode(), kind, {} if kind == OpKind.DELETE else values)
            for key, (kind, values) in rows.items()
        ]
        self.writer.flush()
        ingest_rows(self.db, NAME, staged, [(s.encode(), e.encode()) for s, e in ranges])
        self.writer.refresh()
        for ends in ranges:
            self._forget(*ends)
        for key, (kind, values) in rows.items():
            named = {COLUMNS[number]: value for number, value in values.items()}
            if kind == OpKind.PUT:
                self.model[key] = {"id": key, "x": None, "y": None} | named
            elif kind == OpKind.DELETE:
                self.model.pop(key, None)
            elif key in self.model:
                self.model[key] = self.model[key] | named

    # --- merging ----------------------------------------------------------------------
    @rule()
    def fold(self):
        fold(self.db, NAME, segment_bytes_max=150, group_bytes=60)
        self.writer.refresh()

    @rule(strategy=st.sampled_from(["tiered", "leveled"]), group=st.sampled_from([1, 60, 4000]))
    def compact(self, strategy, group):
        compact(self.db, NAME, strategy=strategy, **{**SMALL, "group_bytes": group})
        self.writer.refresh()

    @rule(data=st.data(), level=st.integers(0, 2), parts=st.sampled_from([50, 200, 10_000]))
    def compact_some(self, data, level, parts):
        """Any segments at all, whether or not others overlap them or are between them."""
        present = head_of(self.db, NAME).segments
        if not present:
            return
        ids = data.draw(st.sets(st.sampled_from([s.id for s in present]), min_size=1))
        STRATEGIES["chosen"] = lambda segments, _: CompactPlan(
            level, tuple(s for s in segments if s.id in ids)
        )
        sizes = {"segment_bytes": parts, "segment_bytes_min": 1, "segment_bytes_max": 2 * parts}
        try:
            compact(self.db, NAME, strategy="chosen", **{**SMALL, **sizes, "rounds_max": 1})
        finally:
            del STRATEGIES["chosen"]
        self.writer.refresh()

    @rule()
    def compact_all(self):
        """Nothing is left that cannot be seen, once the log is folded."""
        fold(self.db, NAME, segment_bytes_max=150, group_bytes=60)
        compact(self.db, NAME, full=True, **SMALL)
        self.writer.refresh()
        head = head_of(self.db, NAME)
        assert sum(segment.rows for segment in head.segments) == len(self.model)
        assert sum(segment.tombstones for segment in head.segments) == 0

    # --- lives ------------------------------------------------------------------------
    @rule(creates=st.booleans())
    def drop(self, creates):
        """It comes back as it was, or is created again without a row; snapshots stay."""
        self.writer.close()
        self.db.drop(NAME)
        if creates:
            self.db.create(NAME, SCHEMA)
            self.model = {}
        else:
            self.db.undrop(NAME)
        self.writer = self.db.writer(NAME, background=False)

    # --- reading ----------------------------------------------------------------------
    @rule()
    def snapshot(self):
        self.kept.append((self.db.snapshot(NAME), dict(self.model)))

    @rule(start=KEYS, end=KEYS, reverse=st.booleans())
    def scan(self, start, end, reverse):
        expected = [self.model[k] for k in sorted(self.model) if start <= k < end]
        found = self.writer.scan(start, end, reverse=reverse)
        assert [row for _, row in found] == (expected[::-1] if reverse else expected)

    @rule(key=KEYS)
    def get(self, key):
        with self.db.reader(NAME) as reader:
            assert reader.get(key) == self.model.get(key)
            table = reader.get_many([key, "zz"])
            assert table["_found"].to_pylist() == [key in self.model, False]

    @invariant()
    def everything_is_there(self):
        """Check the rows of a new reader, in either direction, and of reads as of an LSN."""
        if not hasattr(self, "db"):
            return
        expected = [self.model[key] for key in sorted(self.model)]
        with self.db.reader(NAME) as reader:
            assert [row for _, row in reader.scan()] == expected
            assert [row for _, row in reader.scan(reverse=True)] == expected[::-1]
        for snapshot, model in self.kept[-2:]:
            with self.db.reader(NAME, snapshot=snapshot) as reader:
                assert [row for _, row in reader.scan()] == [model[key] for key in sorted(model)]
        assert is_balanced(head_of(self.db, NAME))

    def teardown(self):
        if hasattr(self, "db"):
            self.writer.close()

    def _forget(self, start, end):
        for key in [key for key in self.model if start <= key < end]:
            del self.model[key]


TestCompaction = Compaction.TestCase
TestCompaction.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
