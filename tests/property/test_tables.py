"""Tables against a dict of dicts: patches, nulls, growth, conditions, transactions, folds."""

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import reef
from reef import stores
from reef.jobs import fold

NAME = "events"
KEYS = st.sampled_from(["a", "b", "c", "ca", "d", "é"])
COLUMNS = {
    "n": st.one_of(st.none(), st.integers(-(2**31), 2**31 - 1)),
    "s": st.one_of(st.none(), st.text(max_size=3)),
    "x": st.one_of(st.none(), st.floats(allow_nan=False)),
    "l": st.one_of(st.none(), st.lists(st.one_of(st.none(), st.integers(0, 9)), max_size=3)),
}
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("n", pa.int32()),
        ("s", pa.string()),
        ("x", pa.float64()),
        ("l", pa.list_(pa.int64())),
    ]
)
ROWS = st.lists(
    st.tuples(KEYS, st.fixed_dictionaries({}, optional=COLUMNS)), min_size=1, max_size=5
)
PATCHES = ROWS.map(lambda rows: [(k, row) for k, row in rows if row]).filter(bool)


class Tables(RuleBasedStateMachine):
    """Whatever is done in whatever order, the table and the model agree, in every form."""

    @initialize(parallel=st.integers(1, 2))
    def open(self, parallel):
        self.db = reef.Database(stores.open("memory://"))
        self.schema = SCHEMA
        self.db.create(NAME, SCHEMA)
        self.settings = {"max_parallel_writes": parallel, "group_bytes_max": 500}
        self.writer = self.db.writer(NAME, **self.settings)
        self.model = {}
        self.past = {}
        """The table as of an LSN."""
        self.buried = []
        """LSNs of lives that are over."""
        self.snapshots = []
        self.copy, self.copied_lsn = {}, 0
        """Kept up to date by changes alone."""

    def note(self, receipt):
        """Remember the current table, for reads as of an LSN."""
        self.past[receipt.lsn] = (self.schema.names[1:], dict(self.model))

    # --- the model ----------------------------------------------------------------
    def row(self, key, columns):
        return {"id": key, **dict.fromkeys(self.schema.names[1:]), **columns}

    def put(self, rows, model=None):
        model = self.model if model is None else model
        for key, columns in rows:
            model[key] = self.row(key, columns)

    def apply_patches(self, rows, model=None):
        model = self.model if model is None else model
        for key, columns in rows:
            if key in model:
                model[key] = {**model[key], **columns}

    # --- steps -------------------------------------------------------------------
    @rule(rows=ROWS)
    def upsert(self, rows):
        receipt = self.writer.upsert([{"id": key, **columns} for key, columns in rows])
        self.put(rows)
        self.note(receipt)

    @rule(rows=ROWS)
    def upsert_arrow(self, rows):
        full = [self.row(key, columns) for key, columns in rows]
        receipt = self.writer.upsert(pa.Table.from_pylist(full, self.schema))
        self.put(rows)
        self.note(receipt)

    @rule(rows=PATCHES)
    def patch(self, rows):
        receipt = self.writer.patch([{"id": key, **columns} for key, columns in rows])
        self.apply_patches(rows)
        self.note(receipt)

    @rule(rows=ROWS)
    def patch_arrow(self, rows):
        """A table touches all its columns, nulls too."""
        table = pa.Table.from_pylist([self.row(k, c) for k, c in rows], self.schema)
        self.writer.patch(table.select(["id", "n", "s"]))
        self.apply_patches([(k, {"n": c.get("n"), "s": c.get("s")}) for k, c in rows])

    @rule(key=KEYS)
    def delete(self, key):
        receipt = self.writer.delete(key)
        self.model.pop(key, None)
        self.note(receipt)

    @rule(key=KEYS)
    def put_expired(self, key):
        """A row whose time was over before it came is never there."""
        receipt = self.writer.upsert([{"id": key, "n": 1, "_expires_at": 1}])
        self.model.pop(key, None)
        self.note(receipt)

    @rule(ends=st.tuples(KEYS, KEYS).filter(lambda ends: ends[0] < ends[1]))
    def delete_range(self, ends):
        receipt = self.writer.delete_range(*ends)
        self.model = {k: r for k, r in self.model.items() if not ends[0] <= k < ends[1]}
        self.note(receipt)

    @rule(key=KEYS, column=st.sampled_from(["n", "s"]), data=st.data())
    def put_if_equal(self, key, column, data):
        expected = data.draw(COLUMNS[column])
        holds = key in self.model and self.model[key][column] == expected
        try:
            self.writer.put(key, {"n": 7}, when=[reef.equals(key, column, expected)])
        except reef.ConditionFailedError:
            assert not holds
            return
        assert holds
        self.put([(key, {"n": 7})])

    @rule(puts=ROWS, patches=PATCHES, key=KEYS, commit=st.booleans())
    def transaction(self, puts, patches, key, commit):
        model = dict(self.model)
        tx = self.writer.transaction()
        tx.upsert([{"id": k, **c} for k, c in puts])
        self.put(puts, model)
        tx.delete(key)
        model.pop(key, None)
        tx.patch([{"id": k, **c} for k, c in patches])
        self.apply_patches(patches, model)
        assert dict(tx.scan()) == model
        assert [tx.get(k) for k in ("a", "b", "nope")] == [model.get(k) for k in ("a", "b", "nope")]
        if commit:
            tx.commit()
            self.model = model
        else:
            tx.rollback()

    @rule(wider=st.booleans())
    def grow(self, wider):
        if wider:
            place = self.schema.get_field_index("n")
            self.schema = self.schema.set(place, pa.field("n", pa.int64()))
        elif len(self.schema) < 8:
            self.schema = self.schema.append(pa.field(f"new{len(self.schema)}", pa.int8()))
        self.db.alter(NAME, self.schema)
        self.writer.refresh()
        self.model = {key: self.row(key, row) for key, row in self.model.items()}

    @rule()
    def reopen(self):
        self.writer.close()
        self.writer = self.db.writer(NAME, **self.settings)

    @rule()
    def drop_and_undrop(self):
        """The rows, the columns, and all that there was before."""
        self.db.drop(NAME)
        self.db.undrop(NAME)
        self.writer = self.db.writer(NAME, **self.settings)

    @rule()
    def drop_and_create(self):
        """A table without rows, with the columns that it is created with."""
        self.db.drop(NAME)
        self.schema = SCHEMA
        self.db.create(NAME, SCHEMA)
        self.writer = self.db.writer(NAME, **self.settings)
        self.buried += self.past
        self.model, self.past = {}, {}
        self.copy, self.copied_lsn = {}, 0

    @rule(data=st.data())
    def read_as_of_an_earlier_incarnation(self, data):
        if self.buried:
            lsn = data.draw(st.sampled_from(self.buried))
            with pytest.raises(reef.NotFoundError):
                self.db.reader(NAME).as_of(lsn=lsn)

    @rule(refresh=st.booleans())
    def fold(self, refresh):
        fold(self.db, NAME, segment_bytes_max=200, group_bytes=60)
        if refresh:
            self.writer.refresh()

    # --- time travel -------------------------------------------------------------
    @rule()
    def take_snapshot(self):
        snapshot = self.db.snapshot(NAME)
        self.snapshots.append((snapshot, self.schema.names[1:], dict(self.model)))

    @rule(data=st.data())
    def read_a_snapshot(self, data):
        if self.snapshots:
            place = data.draw(st.integers(0, len(self.snapshots) - 1))
            snapshot, names, model = self.snapshots.pop(place)
            with self.db.reader(NAME, snapshot=snapshot) as reader:
                assert dict(reader.scan()) == self.cut(names, model)
            snapshot.release()

    @rule(data=st.data())
    def read_as_of_an_lsn(self, data):
        if self.past:
            lsn = data.draw(st.sampled_from(sorted(self.past)))
            _, model = self.past[lsn]
            with self.db.reader(NAME).as_of(lsn=lsn) as reader:
                assert dict(reader.scan()) == self.cut(reader.schema.names[1:], model)

    @rule()
    def follow_the_changes(self):
        """A copy that is made of changes alone is the table."""
        changes = self.db.reader(NAME).changes(after_lsn=self.copied_lsn)
        for change in changes:
            self.apply_change(change)
        self.copied_lsn = changes.position
        names = self.schema.names[1:]
        assert self.cut(names, self.copy) == self.cut(names, self.model)

    def apply_change(self, change):
        if change.op == "delete_range":
            end = change.end_key
            is_deleted = [k for k in self.copy if change.key <= k and (end is None or k < end)]
            self.copy = {k: r for k, r in self.copy.items() if k not in is_deleted}
        elif change.op == "delete" or change.expires_at is not None:
            self.copy.pop(change.key, None)
        elif change.op == "put":
            self.copy[change.key] = {"id": change.key, **change.row}
        elif change.key in self.copy:
            self.copy[change.key] = {**self.copy[change.key], **change.row}

    @staticmethod
    def cut(names, rows):
        """Return rows with just these columns: others came later."""
        return {k: {"id": k, **{name: row.get(name) for name in names}} for k, row in rows.items()}

    # --- what must hold -----------------------------------------------------------
    @invariant()
    def all_reads_agree(self):
        if not hasattr(self, "model"):
            return
        expected = [self.model[key] for key in sorted(self.model, key=str.encode)]
        for handle in (self.writer, self.db.reader(NAME)):
            assert [row for _, row in handle.scan()] == expected
            assert handle.scan_arrow().read_all().to_pylist() == expected
            assert [row for _, row in handle.scan(reverse=True)] == expected[::-1]
            asked = ["a", "c", "nope", "ca"]
            assert [handle.get(key) for key in asked] == [self.model.get(key) for key in asked]
            found = handle.get_many(asked).to_pylist()
            assert [row["_found"] for row in found] == [key in self.model for key in asked]
            positive = [row for row in expected if row["n"] is not None and row["n"] > 0]
            assert [row for _, row in handle.scan(where="n > 0")] == positive


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
