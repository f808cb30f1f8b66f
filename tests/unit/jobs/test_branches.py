"""Differences between states, merges of branches, rollbacks, and snapshots of a bucket."""

import datetime
import math
import pickle
import random

import pyarrow as pa
import pytest

import reef
from reef.engine.handles import bucket_snapshots
from reef.engine.handles.database import Database
from reef.engine.registry import Registry
from reef.jobs import compact, fold, ingest
from reef.stores import Wrapper

SCHEMA = pa.schema([("id", pa.string()), ("x", pa.int64()), ("tags", pa.list_(pa.string()))])


@pytest.fixture
def db():
    """Give a database with a namespace and a branch of it."""
    db = reef.open("memory://")
    with db.writer("main", create=True, background=False) as writer:
        for number in range(10):
            writer.put(f"k{number}", b"0")
    fold(db, "main")
    db.branch("main", "child")
    return db


def rows_of(db, name, **options):
    """Return the rows that a new reader sees."""
    with db.reader(name, **options) as reader:
        return dict(reader.scan())


def put(db, name, **rows):
    """Put or, with None, delete rows."""
    with db.writer(name, background=False) as writer:
        for key, value in rows.items():
            writer.delete(key) if value is None else writer.put(key, value)


def found(differences):
    """Return differences as tuples."""
    return [(d.op, d.key, d.a, d.b) for d in differences]


# --- differences ------------------------------------------------------------------------


def test_rows_that_differ_are_reported_in_key_order(db):
    """Inserts, updates and deletes, by a single key and by a range."""
    put(db, "child", k1=b"1", k2=None, new=b"n", k3=b"0")
    with db.writer("child", background=False) as writer:
        writer.delete_range("k5", "k7")
    expected = [
        ("update", b"k1", b"0", b"1"),
        ("delete", b"k2", b"0", None),
        ("delete", b"k5", b"0", None),
        ("delete", b"k6", b"0", None),
        ("insert", b"new", None, b"n"),
    ]
    assert found(db.diff("main", "child")) == expected
    fold(db, "child")
    assert found(db.diff("main", "child")) == expected
    compact(db, "child", full=True)
    assert found(db.diff("main", "child")) == expected
    back = [(d.op, d.key) for d in db.diff("child", "main")]
    assert (back[0], back[-1]) == (("update", b"k1"), ("delete", b"new"))


def test_a_load_that_is_not_folded_differs(db):
    """Its segments are sources like any other."""
    ingest(db, "child", [{"id": b"k4", "value": b"loaded"}])
    assert found(db.diff("main", "child")) == [("update", b"k4", b"0", b"loaded")]


class Reads(Wrapper):
    """Counts the bytes that are read from segments."""

    def __init__(self, inner):
        super().__init__(inner)
        self.bytes = 0

    def get_range(self, key, start, end):
        self.bytes += end - start if key.endswith(".seg") else 0
        return self.inner.get_range(key, start, end)

    def get_ranges(self, key, ranges):
        self.bytes += sum(end - start for start, end in ranges) if key.endswith(".seg") else 0
        return self.inner.get_ranges(key, ranges)


def test_shared_segments_are_not_read():
    """The cost follows the changes, not the rows."""
    db = reef.open("memory://")
    db.create("main", pa.schema([("id", pa.string()), ("text", pa.string())]))
    chance = random.Random(0)
    rows = [{"id": f"k{n:06}", "text": chance.randbytes(50).hex()} for n in range(20_000)]
    ingest(db, "main", rows)
    fold(db, "main")
    db.branch("main", "child")
    with db.writer("child", background=False) as writer:
        writer.upsert([{"id": "k000007", "text": "other"}])
    fold(db, "child")
    counted = Reads(db.store)
    differences = list(Database(counted).diff("main", "child"))
    assert [d.key for d in differences] == ["k000007"]
    size = db.info("main").bytes
    assert size > 500_000
    assert counted.bytes < size / 10


@pytest.fixture
def halves():
    """Give a namespace of two disjoint segments with many groups, and a branch of it."""
    return in_halves(write)


def in_halves(add):
    """Return it, with rows that came as loads or through the log."""
    db = reef.open("memory://")
    db.create("main", pa.schema([("id", pa.string()), ("text", pa.string())]))
    chance = random.Random(0)
    for half in range(2):
        keys = range(half * 10_000, (half + 1) * 10_000)
        add(db, "main", [{"id": f"k{n:06}", "text": chance.randbytes(50).hex()} for n in keys])
        fold(db, "main")
    db.branch("main", "child")
    return db


def write(db, name, rows):
    """Commit rows as one batch."""
    with db.writer(name, background=False) as writer:
        writer.upsert(rows)


def segment_bytes(db, a="main", b="child"):
    """Return the keys that differ, and the share of the segments' bytes that was read for it."""
    counted = Reads(db.store)
    keys = [difference.key for difference in Database(counted).diff(a, b)]
    return keys, counted.bytes / db.info("main").bytes


JOINS = {"strategy": "leveled", "level0_bytes": 1}
"""Settings with which a compaction copies the groups of neighbours."""


@pytest.mark.parametrize(
    ("add", "sides", "settings"),
    [(write, ["main"], JOINS), (ingest, ["main", "child"], {"full": True})],
)
def test_groups_that_a_compaction_copied_are_not_read(add, sides, settings):
    """The segments have other names; the cost still follows the changes, not the rows.

    Both sides merge loads into the same groups, since those have LSNs only then.
    """
    db = in_halves(add)
    for name in sides:
        assert compact(db, name, **settings).outputs == 1
    keys, share = segment_bytes(db)
    assert keys == []
    assert share < 0.1
    write(db, "child", [{"id": "k000007", "text": "other"}])
    fold(db, "child")
    keys, share = segment_bytes(db)
    assert keys == ["k000007"]
    assert share < 0.1


def test_a_deleted_range_of_shared_groups_differs(halves):
    """Its keys are in no group that only one side has."""
    assert compact(halves, "main", **JOINS).joined == 1
    with halves.writer("child", background=False) as writer:
        writer.delete_range("k009990", "k010010")
    for _ in range(2):
        keys, share = segment_bytes(halves)
        assert keys == [f"k{n:06}" for n in range(9990, 10_010)]
        assert share < 0.3
        fold(halves, "child")


def test_equal_groups_of_columns_with_other_names_differ():
    """Both sides have added a column since the branch: the bytes are the same, the rows are not."""
    db = reef.open("memory://")
    schema = pa.schema([("id", pa.string()), ("n", pa.int64())])
    db.create("main", schema)
    db.branch("main", "child")
    for name, column in (("main", "x"), ("child", "y")):
        db.alter(name, schema.append(pa.field(column, pa.int64())))
        ingest(db, name, [{"id": "k", "n": 1, column: 2}])
        fold(db, name)
    assert [(d.a, d.b) for d in db.diff("main", "child")] == [
        ({"id": "k", "n": 1, "x": 2}, {"id": "k", "n": 1, "y": 2})
    ]


def test_columns_are_compared_by_name_and_value():
    """Nulls, NaN, lists, and a column that only one side has."""
    db = reef.open("memory://")
    schema = pa.schema([("id", pa.string()), ("f", pa.float64()), ("l", pa.list_(pa.int64()))])
    db.create("main", schema)
    rows = [{"id": "a", "f": math.nan, "l": [1, 2]}, {"id": "b", "f": None, "l": None}]
    with db.writer("main", background=False) as writer:
        writer.upsert(rows)
    db.branch("main", "child")
    with db.writer("child", background=False) as writer:
        writer.upsert(rows)
    assert list(db.diff("main", "child")) == []
    db.alter("child", schema.append(pa.field("n", pa.int64())))
    assert list(db.diff("main", "child")) == []
    with db.writer("child", background=False) as writer:
        writer.patch([{"id": "b", "n": 7}])
        writer.patch([{"id": "a", "l": [1]}])
    (a, b) = db.diff("main", "child")
    assert (a.key, a.b["l"]) == ("a", [1])
    assert b.a == {"id": "b", "f": None, "l": None}
    assert b.b == {"id": "b", "f": None, "l": None, "n": 7}


def test_past_states_can_be_compared(db):
    """Any two pinned views."""
    put(db, "main", k1=b"1")
    with db.reader("main", as_of={"lsn": 11}) as before, db.reader("main", pin=True) as now:
        assert found(db.diff(before, now)) == [("update", b"k1", b"0", b"1")]


def test_snapshots_can_be_compared(db):
    """With one another, with a name, and with an open view; anything else is refused at once."""
    pin = db.snapshot("main", "before")
    put(db, "main", k1=b"1")
    assert found(db.diff(pin, "main")) == [("update", b"k1", b"0", b"1")]
    assert found(db.diff("main", db.snapshot("main"))) == []
    with db.reader("main", pin=True) as now:
        assert found(db.diff(now, pin)) == [("update", b"k1", b"1", b"0")]
    for wrong in (1, None, {"lsn": 3}):
        with pytest.raises(reef.InvalidInputError, match="neither the name of a namespace"):
            db.diff("main", wrong)


def test_a_snapshot_of_a_namespace_that_was_renamed(db):
    """It is found by its folder, since its former name leads nowhere."""
    pin = db.snapshot("main")
    db.rename("main", "renamed")
    put(db, "renamed", k1=b"other")
    assert found(db.diff(pin, "renamed")) == [("update", b"k1", b"0", b"other")]


def test_zeros_of_both_signs_differ():
    """They are different values, alone as in a list, so that a merge carries the change."""
    db = reef.open("memory://")
    db.create("main", pa.schema([("id", pa.string()), ("f", pa.float64()), ("g", pa.float32())]))
    with db.writer("main", background=False) as writer:
        writer.upsert([{"id": key, "f": 0.0, "g": 0.0} for key in "abc"])
    db.branch("main", "child")
    with db.writer("child", background=False) as writer:
        writer.upsert([{"id": "a", "f": -0.0, "g": 0.0}, {"id": "b", "f": 0.0, "g": -0.0}])
        writer.upsert([{"id": "c", "f": 0.0, "g": 0.0}])
    assert [d.key for d in db.diff("main", "child")] == ["a", "b"]
    db.merge("child", "main")
    assert math.copysign(1, rows_of(db, "main")["a"]["f"]) == -1


def test_earlier_keywords_are_accepted(db):
    """With a warning, as elsewhere."""
    with pytest.warns(DeprecationWarning, match="namespace="):
        db.branch("main", name="other")
    with pytest.warns(DeprecationWarning, match="namespace="):
        db.rollback(name="other", to=db.snapshot("other"))
    with pytest.warns(DeprecationWarning, match="target="):
        reef.jobs.backup(db, "main", target_url="memory://keywords")
    with pytest.warns(DeprecationWarning, match="source="):
        reef.jobs.restore(target_url="memory://keywords", db=db, name="copy")
    assert rows_of(db, "copy") == rows_of(db, "other") == rows_of(db, "main")


# --- merges -----------------------------------------------------------------------------


def test_changes_of_one_side_are_merged(db):
    """Rows of the parent that the branch did not touch stay as they are."""
    put(db, "child", k1=b"child", k2=None, new=b"n")
    put(db, "main", k8=b"main", k9=None)
    report = db.merge("child", "main")
    assert (report.written, report.deleted, report.conflicts) == (2, 1, 0)
    rows = rows_of(db, "main")
    assert (rows[b"k1"], rows[b"k8"], rows[b"new"]) == (b"child", b"main", b"n")
    assert not {b"k2", b"k9"} & rows.keys()
    again = db.merge("child", "main")
    assert (again.lsn, again.written, again.deleted) == (0, 0, 0)


def test_a_merge_is_one_commit(db):
    """A change stream of the parent sees it at one LSN."""
    put(db, "child", k1=b"1", k2=b"2")
    report = db.merge("child", "main")
    with db.reader("main") as reader:
        changes = [(c.op, c.key, c.lsn) for c in reader.changes(after_lsn=report.lsn - 1)]
    assert changes == [("put", b"k1", report.lsn), ("put", b"k2", report.lsn)]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [("ours", b"main"), ("theirs", b"child"), (lambda k, base, o, t: base + o + t, b"0mainchild")],
)
def test_conflicts_are_resolved_as_asked(db, choice, expected):
    """A row that both sides have changed; one that both have changed alike is none."""
    put(db, "child", k1=b"child", k2=b"same", k3=None)
    put(db, "main", k1=b"main", k2=b"same")
    assert db.merge("child", "main", on_conflict=choice).conflicts == 1
    rows = rows_of(db, "main")
    assert (rows[b"k1"], rows[b"k2"], rows.get(b"k3")) == (expected, b"same", None)


def test_a_function_may_delete_and_sees_deleted_rows(db):
    """None represents the absence of a row on either side."""
    put(db, "child", k1=None, k2=b"child")
    put(db, "main", k1=b"main", k2=None)
    seen = []

    def resolve(key, base, ours, theirs):
        seen.append((key, base, ours, theirs))
        return None

    db.merge("child", "main", on_conflict=resolve)
    assert seen == [(b"k1", b"0", b"main", None), (b"k2", b"0", None, b"child")]
    assert not {b"k1", b"k2"} & rows_of(db, "main").keys()


CONFLICT_SCHEMA = pa.schema([("id", pa.string()), ("x", pa.int64())])


def expiring():
    """Return a namespace and a branch in conflict: one row expires in the branch, one in it."""
    db = reef.open("memory://")
    db.create("main", CONFLICT_SCHEMA)
    with db.writer("main", background=False) as writer:
        writer.upsert([{"id": "a", "x": 1}, {"id": "b", "x": 1}])
    db.branch("main", "child")
    for name, x, expires in (("child", 2, "a"), ("main", 3, "b")):
        with db.writer(name, background=False) as writer:
            for key in "ab":
                writer.upsert([{"id": key, "x": x}], ttl_s=3600 if key == expires else None)
    return db


def expiry(db, name, key):
    """Return when a row expires."""
    with db.reader(name) as reader:
        return reader.get(key, columns=["_expires_at"])["_expires_at"]


@pytest.mark.parametrize(
    ("side", "same"), [("ours", "is"), ("theirs", "is"), ("ours", "equal"), ("theirs", "equal")]
)
def test_a_row_that_a_function_chooses_keeps_its_expiry(side, same):
    """Rows that a function returned had none: a row with a time to live stayed for ever."""
    db, source = expiring(), "main" if side == "ours" else "child"
    expected = [expiry(db, source, key) for key in "ab"]
    place = 2 if side == "ours" else 3

    def choose(*args):
        return args[place] if same == "is" else dict(args[place])

    db.merge("child", "main", choose)
    assert [expiry(db, "main", key) for key in "ab"] == expected
    assert expected.count(None) == 1


def test_a_row_that_a_function_makes_expires_as_the_parent_s():
    """Unless it says when, or the parent has none."""
    db = expiring()
    at = datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC)
    expected = expiry(db, "main", "b")

    def made(key, base, ours, theirs):
        row = {"x": ours["x"] + theirs["x"]}
        return {**row, "_expires_at": at} if key == "a" else row

    db.merge("child", "main", made)
    assert rows_of(db, "main") == {"a": {"id": "a", "x": 5}, "b": {"id": "b", "x": 5}}
    assert [expiry(db, "main", key) for key in "ab"] == [at, expected]
    db = expiring()
    with db.writer("main", background=False) as writer:
        writer.delete("a")
        writer.delete("b")
    expected = [expiry(db, "child", key) for key in "ab"]
    db.merge("child", "main", lambda key, base, ours, theirs: {"x": theirs["x"] + 1})
    assert [expiry(db, "main", key) for key in "ab"] == expected


def test_a_function_gets_keys_and_rows_as_readers_return_them():
    """Keys of text are text, and a row has its key, which may be in the row returned."""
    db, seen = expiring(), []

    def choose(key, base, ours, theirs):
        seen.append((key, base, ours, theirs))
        return {**theirs, "x": 9}

    db.merge("child", "main", choose)
    rows = [{"id": "a", "x": x} for x in (1, 3, 2)]
    assert seen[0] == ("a", *rows)
    assert rows_of(db, "main")["b"] == {"id": "b", "x": 9}


@pytest.mark.parametrize(
    ("row", "message"),
    [({"id": "b"}, "another key"), ({"y": 1}, "unknown columns: y"), (b"1", "not a dict")],
)
def test_a_function_that_returns_no_such_row_is_refused(row, message):
    """Before anything is visible."""
    db = expiring()
    before = rows_of(db, "main")
    with pytest.raises(reef.InvalidInputError, match=message):
        db.merge("child", "main", lambda *_: row)
    assert rows_of(db, "main") == before


def test_keys_in_conflict_are_named_as_readers_return_them():
    """Not as the bytes that a key of text is stored as."""
    db = expiring()
    with pytest.raises(reef.ConflictError, match=r"both sides: 'a', 'b'\. "):
        db.merge("child", "main")


def test_conflicts_are_an_error_by_default(db):
    """Nothing is merged, and the error names the keys."""
    put(db, "child", k1=b"child", k2=b"child")
    put(db, "main", k1=b"main")
    before = rows_of(db, "main")
    with pytest.raises(reef.ConflictError, match=r"1 rows were changed on both sides: b'k1'"):
        db.merge("child", "main")
    assert rows_of(db, "main") == before


def test_a_write_during_a_merge_is_not_lost(db, monkeypatch):
    """H76: the commit is conditional; the merge starts over and sees the write."""
    put(db, "child", k1=b"child")
    commit, once = reef.jobs.BulkJob.commit, []

    def late(self, *args, **kwargs):
        if not once:
            once.append(put(db, "main", k1=b"late"))
        return commit(self, *args, **kwargs)

    monkeypatch.setattr(reef.jobs.BulkJob, "commit", late)
    with pytest.raises(reef.ConflictError, match="changed on both sides"):
        db.merge("child", "main")
    assert rows_of(db, "main")[b"k1"] == b"late"


def test_rows_with_columns_and_expiry_are_merged():
    """Lists, nulls and the time at which a row expires."""
    db = reef.open("memory://")
    db.create("main", SCHEMA)
    with db.writer("main", background=False) as writer:
        writer.upsert([{"id": "a", "x": 1, "tags": ["t"]}])
    db.branch("main", "child")
    with db.writer("child", background=False) as writer:
        writer.patch([{"id": "a", "tags": ["u", None]}])
        writer.upsert([{"id": "b", "x": None, "tags": []}], ttl_s=3600)
    db.merge("child", "main")
    with db.reader("main") as reader, db.reader("child") as child:
        assert reader.get("a") == {"id": "a", "x": 1, "tags": ["u", None]}
        assert reader.get("b") == {"id": "b", "x": None, "tags": []}
        expiry = [r.get("b", columns=["_expires_at"]) for r in (reader, child)]
        assert expiry[0] == expiry[1] != {"_expires_at": None}


def test_a_branch_with_more_columns_is_refused():
    """Before anything is written."""
    db = reef.open("memory://")
    db.create("main", SCHEMA)
    db.branch("main", "child")
    db.alter("child", SCHEMA.append(pa.field("y", pa.int64())))
    with pytest.raises(reef.InvalidInputError, match="lacks: y"):
        db.merge("child", "main")


def test_what_is_not_a_branch_cannot_be_merged(db):
    """There is no common state."""
    db.create("other")
    with pytest.raises(reef.NotFoundError, match="not a branch"):
        db.merge("other", "main")
    with pytest.raises(reef.InvalidInputError, match="on_conflict"):
        db.merge("child", "main", on_conflict="mine")


# --- rollbacks --------------------------------------------------------------------------


def test_a_rollback_restores_a_state_in_one_commit(db):
    """As a new generation; the states in between can still be read."""
    before, generation = rows_of(db, "main"), db.info("main").generation
    put(db, "main", k1=b"1", k2=None, new=b"n")
    lsn = db.reader("main", pin=True).last_lsn
    changed = rows_of(db, "main")
    report = db.rollback("main", generation)
    assert (report.written, report.deleted) == (2, 1)
    assert rows_of(db, "main") == before
    assert db.info("main").generation > generation
    assert rows_of(db, "main", as_of={"lsn": lsn}) == changed
    assert db.rollback("main", generation).lsn == 0, "nothing is left to do"


def test_a_rollback_to_a_snapshot(db):
    """By its handle."""
    pin = db.snapshot("main", "before")
    put(db, "main", k1=b"1")
    db.rollback("main", pin)
    assert rows_of(db, "main")[b"k1"] == b"0"


def test_history_says_how_generations_differ(db):
    """Newest first, each readable."""
    put(db, "main", k1=b"1")
    fold(db, "main")
    records = db.history("main")
    assert records[0].change.startswith("fold up to LSN")
    assert [r.generation for r in records] == sorted((r.generation for r in records), reverse=True)
    for record in records:
        rows_of(db, "main", as_of=record.generation)


# --- snapshots of a bucket --------------------------------------------------------------


def test_all_namespaces_are_pinned_under_one_name(db):
    """Each at its own LSN; branches start from them."""
    taken = db.snapshot_all("nightly")
    assert sorted(taken) == ["child", "main"]
    put(db, "main", k1=b"1")
    assert sorted(db.snapshots_all("nightly")) == ["child", "main"]
    db.branch("main", "restored", at=db.snapshots_all("nightly")["main"])
    assert rows_of(db, "restored")[b"k1"] == b"0"
    with pytest.raises(reef.ConflictError, match="already"):
        db.snapshot_all("nightly")
    assert len(db.snapshots("main")) == 1, "a refused one leaves no snapshot behind"
    with pytest.raises(reef.NotFoundError, match="no snapshot"):
        db.snapshots_all("weekly")


def test_a_name_of_all_snapshots_is_free_again_when_none_is_left(db):
    """Its record stayed in the catalog for ever: a nightly snapshot worked once."""
    for pin in db.snapshot_all("nightly").values():
        pin.release()
    assert db.snapshots_all("nightly") == {}
    put(db, "main", k1=b"1")
    taken = db.snapshot_all("nightly")
    assert rows_of(db, "main", snapshot=taken["main"])[b"k1"] == b"1"
    taken["main"].release()
    with pytest.raises(reef.ConflictError, match="release_snapshot_all"):
        db.snapshot_all("nightly")  # one of them is left


def test_all_snapshots_are_listed_and_released(db):
    """Also those of a namespace that was renamed or dropped since."""
    db.create("other")
    db.snapshot_all("nightly")
    db.snapshot_all("weekly", ttl_s=3600)
    assert [(one.name, one.is_complete) for one in db.bucket_snapshots()] == [
        ("nightly", True),
        ("weekly", True),
    ]
    assert db.bucket_snapshots()[0].namespaces == ("child", "main", "other")
    assert db.bucket_snapshots()[0].taken_at is not None
    db.rename("main", "renamed")
    db.drop("other")
    assert sorted(db.snapshots_all("nightly")) == ["child", "other", "renamed"]
    db.release_snapshot_all("nightly")
    db.undrop("other")
    for name in ("renamed", "child", "other"):
        assert [pin.name for pin in db.snapshots(name)] == ["weekly"]
    assert [one.name for one in db.bucket_snapshots()] == ["weekly"]
    with pytest.raises(reef.NotFoundError, match="no snapshot 'nightly'"):
        db.release_snapshot_all("nightly")
    db.snapshot_all("nightly")


class _Killed(BaseException):
    """The process has died: nothing of it runs any more."""


@pytest.fixture
def dying(db, monkeypatch):
    """Let a process die after it has pinned one of two namespaces; nothing is cleaned up."""
    take = bucket_snapshots.take_snapshot
    taken = []

    def once(*args, **options):
        if taken:
            raise _Killed
        taken.append(take(*args, **options))
        return taken[0]

    with monkeypatch.context() as patched:
        patched.setattr(bucket_snapshots, "take_snapshot", once)
        patched.setattr(bucket_snapshots, "_release", lambda *_: (_ for _ in ()).throw(_Killed))
        with pytest.raises(_Killed):
            db.snapshot_all("nightly")
    return taken[0]


def test_pins_of_a_process_that_died_are_found_and_released(db, dying):
    """They never expired, and no record named them."""
    assert [pin.id for pin in db.snapshots(dying.namespace)] == [dying.id]
    assert [(one.name, one.is_complete) for one in db.bucket_snapshots()] == [("nightly", False)]
    with pytest.raises(reef.NotFoundError, match="not complete"):
        db.snapshots_all("nightly")
    with pytest.raises(reef.ConflictError, match="already"):
        db.snapshot_all("nightly")  # it may be alive
    db.release_snapshot_all("nightly")
    assert db.snapshots(dying.namespace) == []
    assert sorted(db.snapshot_all("nightly")) == ["child", "main"]


def test_a_name_that_a_dead_process_has_taken_is_free_after_an_hour(db, dying, monkeypatch):
    """Its pins are released first."""
    monkeypatch.setattr(bucket_snapshots, "SILENT_MS", -1000)
    taken = db.snapshot_all("nightly")
    assert sorted(taken) == ["child", "main"]
    assert db.snapshots(dying.namespace) == [taken[dying.namespace]]


def test_a_process_whose_record_was_removed_releases_its_pins(db, monkeypatch):
    """It took longer than an operator has waited."""
    take = bucket_snapshots.take_snapshot

    def slow(*args, **options):
        taken = take(*args, **options)
        if len(db.bucket_snapshots()) == 1:
            db.release_snapshot_all("nightly")
        return taken

    monkeypatch.setattr(bucket_snapshots, "take_snapshot", slow)
    with pytest.raises(reef.ConflictError):
        db.snapshot_all("nightly")
    assert db.bucket_snapshots() == []
    assert [db.snapshots(name) for name in ("main", "child")] == [[], []]


def test_a_record_of_an_earlier_release_can_be_read_and_released(db):
    """It has no folders, and no time."""
    pin = db.snapshot("main", "nightly")
    registry = Registry(db.store)
    registry.catalog.transact(lambda session: session.put("snapshot/nightly", {"main": pin.id}))
    assert db.snapshots_all("nightly") == {"main": pin}
    assert db.bucket_snapshots()[0].taken_at is None
    db.release_snapshot_all("nightly")
    assert db.snapshots("main") == []


class Ranges:
    """An executor that cuts a merge into as many ranges as it can."""

    def __init__(self, then=lambda: None):
        self.tasks, self.then = 0, then

    def parallelism(self):
        """Return how many tasks are asked for."""
        return 50

    def shuffle(self, job):
        """Not used by a merge."""
        raise NotImplementedError

    def map(self, run, tasks):
        """Run the tasks one by one, as another process would: from pickled copies."""
        self.tasks = len(tasks)
        results = [run(pickle.loads(pickle.dumps(task))) for task in tasks]
        self.then()
        return results


def wide(seed=0):
    """Return a namespace with many groups, and a branch with changes all over it."""
    db = reef.open("memory://")
    db.create("main", SCHEMA)
    ingest(db, "main", [{"id": f"k{n:04}", "x": n} for n in range(1000)], group_bytes=500)
    fold(db, "main")
    db.branch("main", "child")
    with db.writer("child", background=False) as writer:
        writer.upsert([{"id": f"k{n:04}", "x": -n} for n in range(0, 1000, 3)])
        writer.delete_range("k0500", "k0520")
        fold(db, "child", group_bytes=500)
        writer.upsert([{"id": "k9999", "x": 1}])
    return db


def test_a_merge_in_parts_is_the_merge_as_a_whole():
    """Tasks of key ranges stage segments, and one ingest has all of them."""
    results = []
    for executor in (None, Ranges()):
        db = wide()
        report = db.merge("child", "main", executor=executor)
        rows = rows_of(db, "main")
        assert rows == rows_of(db, "child")
        results.append((report.written, report.deleted, report.conflicts, rows))
    assert results[0] == results[1]
    assert executor.tasks > 5


def test_a_merge_in_parts_conflicts_with_writes_to_any_of_them():
    """A key of the first range is written after it was compared: nothing is merged at first."""
    db = wide()
    writes = iter([b"once"])

    def write():
        for _ in writes:
            with db.writer("main", background=False) as writer:
                writer.upsert([{"id": "k0000", "x": 7}, {"id": "k0003", "x": 7}])

    with pytest.raises(reef.ConflictError, match="changed on both sides"):
        db.merge("child", "main", executor=Ranges(write))
    assert rows_of(db, "main")["k0003"]["x"] == 7
    assert rows_of(db, "main")["k0006"]["x"] == 6, "nothing was merged"


def test_conflicts_of_all_parts_are_counted():
    """The error has the sum, and some of the keys."""
    db = wide()
    with db.writer("main", background=False) as writer:
        writer.upsert([{"id": f"k{n:04}", "x": 5000} for n in range(3, 1000, 300)])
    with pytest.raises(reef.ConflictError, match=r"4 rows were changed on both sides.*k0003"):
        db.merge("child", "main", executor=Ranges())


def test_a_branch_of_a_branch_is_merged_while_a_load_of_the_origin_is_not_folded(db):
    """The common state was read with the segments of the load in the wrong folder: NotFoundError.

    Its segments were named before the head of the branch said where its inherited log is stored.
    """
    ingest(db, "main", [{"id": b"loaded", "value": b"1"}])
    db.branch("main", "green")
    db.branch("green", "red")
    put(db, "red", loaded=b"2", mine=b"3")
    assert db.merge("red", "green").written == 2
    assert rows_of(db, "green") == rows_of(db, "red")
    assert db.merge("red", "main").written == 2
    assert rows_of(db, "main") == rows_of(db, "red")
