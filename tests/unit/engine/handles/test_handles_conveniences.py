"""Conveniences of handles: counts, mappings, frames, changes by a filter, creation, lifecycle."""

import pickle

import pyarrow as pa
import pytest

import reef
from reef.engine.namespaces import similar_name
from reef.telemetry import RequestMeter

SCHEMA = pa.schema([("id", pa.string()), ("n", pa.int64()), ("state", pa.string())])


@pytest.fixture
def db():
    """Return a database in memory."""
    return reef.open("memory://")


@pytest.fixture
def events(db):
    """Return a writer of ten rows."""
    db.create("events", SCHEMA)
    with db.writer("events", background=False) as writer:
        writer.upsert([{"id": f"e{n}", "n": n, "state": "open"} for n in range(10)])
        yield writer


def handles(db, writer):
    """Return one handle of each kind that reads."""
    return [writer, db.reader("events"), db.reader("events", pin=True), writer.transaction()]


# --- reads ----------------------------------------------------------------------------


def test_count(db, events):
    """All rows, those of a range, and those that match; deleted rows do not count."""
    events.delete("e9")
    for handle in handles(db, events):
        assert handle.count() == 9
        assert handle.count("n >= 5 AND state = 'open'") == 4
        assert handle.count(where=[("n", "<", 2)]) == 2
        assert handle.count(prefix="e1") == 1
        assert handle.count(start="e3", end="e5") == 2


def test_count_after_a_fold(db, events):
    """Rows in segments count once, with the newest version of each."""
    reef.jobs.fold(db, "events")
    events.upsert([{"id": "e1", "n": 100}])
    assert db.reader("events").count() == 10
    assert db.reader("events").count("n = 100") == 1


def test_rows_as_items(db, events):
    """A key without a row is a KeyError and not contained; one with a null value is."""
    for handle in handles(db, events):
        assert handle["e3"] == {"id": "e3", "n": 3, "state": "open"}
        assert "e3" in handle
        assert b"e3" in handle
        assert "e33" not in handle
        with pytest.raises(KeyError, match="'e33' has no row in events"):
            handle["e33"]
        with pytest.raises(reef.InvalidInputError, match="bytes or str"):
            assert 3 in handle
    with db.writer("plain") as plain:
        plain.upsert([{"id": "k", "value": None}])
        assert "k" in plain
        assert plain["k"] is None


def test_a_read_item_conflicts_in_a_transaction(events):
    """`in` and `[]` are reads: a write to the key since is a conflict."""
    for read in (lambda tx: "e1" in tx, lambda tx: tx["e1"], lambda tx: tx.count()):
        tx = events.transaction()
        read(tx)
        tx.put("x", {"n": 1})
        events.patch([{"id": "e1", "n": 7}])
        with pytest.raises(reef.ConflictError):
            tx.commit()


def test_len_is_refused_with_a_hint(db, events):
    """Counting reads all keys, which `len()` must not hide; handles are true and not iterable."""
    for handle in handles(db, events):
        with pytest.raises(TypeError, match=r"use count\(\)"):
            len(handle)
        with pytest.raises(TypeError, match="not iterable"):
            list(handle)
        assert handle


def test_frames(db, events):
    """All rows, or those of a scan's arguments, as Arrow, pandas and polars."""
    reader = db.reader("events")
    assert reader.to_arrow().column("n").to_pylist() == list(range(10))
    assert reader.to_arrow(columns=["n"], where="n > 7").to_pydict() == {"n": [8, 9]}
    assert reader.to_pandas(limit=2)["id"].tolist() == ["e0", "e1"]
    assert reader.to_polars(reverse=True, limit=1)["n"].to_list() == [9]


def test_a_frame_library_that_is_missing(events, monkeypatch):
    """The error names the package to install."""
    monkeypatch.setitem(__import__("sys").modules, "polars", None)
    with pytest.raises(reef.InvalidInputError, match="pip install polars"):
        events.to_polars()


@pytest.mark.parametrize("time", ["2999-01-01", "2999-01-01T00:00:00Z", "2999-01-01T00:00+02:00"])
def test_times_as_text(db, events, time):
    """ISO 8601 text is a point in time, for readers and `as_of`; UTC without an offset."""
    assert db.reader("events", as_of=time).count() == 10
    assert db.reader("events").as_of(time=time).count() == 10
    assert db.reader("events", as_of="1999-01-01").count() == 0
    with pytest.raises(reef.InvalidInputError, match="'yesterday' is not a time"):
        db.reader("events", as_of="yesterday")


# --- changes by a filter --------------------------------------------------------------


@pytest.mark.parametrize("folded", [False, True])
def test_delete_where(db, events, folded):
    """The rows that match, and no others; the receipt counts them."""
    if folded:
        reef.jobs.fold(db, "events")
        events.refresh()
    receipt = events.delete_where("n < 3 AND state = 'open'")
    assert (receipt.ops, receipt.namespace) == (3, "events")
    assert events.to_arrow(columns=["n"]).to_pydict() == {"n": list(range(3, 10))}
    assert db.reader("events").count() == 7


@pytest.mark.parametrize("folded", [False, True])
def test_update_where(db, events, folded):
    """Only the named columns of the rows that match."""
    if folded:
        reef.jobs.fold(db, "events")
        events.refresh()
    receipt = events.update_where({"state": "closed", "n": None}, [("n", "in", [1, 2])])
    assert receipt.ops == 2
    assert events["e1"] == {"id": "e1", "n": None, "state": "closed"}
    assert events.count("state = 'closed'") == 2


def test_no_row_matches(events):
    """Nothing is written, and the receipt says so."""
    last = events.put("x", {"n": 1}).lsn
    for receipt in (events.delete_where("n > 99"), events.update_where({"n": 1}, "n > 99")):
        assert (receipt.ops, receipt.lsn) == (0, last)
    assert events.put("x", {"n": 2}).lsn == last + 1


@pytest.mark.parametrize("values", [{}, {"id": "x"}, None, "n = 1"])
def test_update_where_takes_columns(events, values):
    """The key cannot be set, and nothing at all is a mistake."""
    with pytest.raises(reef.InvalidInputError, match="columns to set, other than id"):
        events.update_where(values, "n > 1")


def test_a_concurrent_write_starts_it_over(events, monkeypatch):
    """A row that comes to match in between is deleted too."""
    stage, writes = reef.Transaction._stage, iter(["late"])

    def stage_after_a_write(tx, add):
        for key in writes:
            events.put(key, {"n": 0})
        stage(tx, add)

    monkeypatch.setattr(reef.Transaction, "_stage", stage_after_a_write)
    assert events.delete_where("n = 0").ops == 2
    assert "late" not in events


def test_concurrent_writes_without_end(events, monkeypatch):
    """After ten attempts it is a conflict, with nothing changed."""
    stage, counted = reef.Transaction._stage, []

    def stage_after_a_write(tx, add):
        counted.append(events.put("e0", {"n": 0}))
        stage(tx, add)

    monkeypatch.setattr(reef.Transaction, "_stage", stage_after_a_write)
    with pytest.raises(reef.ConflictError):
        events.delete_where("n = 0")
    assert (len(counted), events.count()) == (10, 10)


# --- parameters -----------------------------------------------------------------------


@pytest.mark.parametrize("method", ["put", "upsert", "patch", "delete", "delete_range", "write"])
def test_help_shows_real_parameters(method):
    """And an unknown keyword names the public method."""
    from inspect import signature

    parameters = signature(getattr(reef.Writer, method)).parameters
    assert {"wait", "idempotency_key", "when"} <= set(parameters)
    with (
        reef.open("memory://").writer("users") as users,
        pytest.raises(TypeError, match=rf"{method}\(\) got an unexpected keyword argument 'keyy'"),
    ):
        getattr(users, method)(*["a", b"b"][: 2 if "r" in method[-5:] else 1], keyy=1)


def test_the_old_keyword_of_the_namespace_warns(db):
    """`name=` of earlier releases is `namespace=` now, in every method."""
    with pytest.warns(DeprecationWarning, match=r"create\(name=\) is now create\(namespace=\)"):
        db.create(name="users")
    with pytest.warns(DeprecationWarning, match="writer"):
        db.writer(name="users").put("k", b"v")
    with pytest.warns(DeprecationWarning, match="reader"):
        assert db.reader(name="users").get("k") == b"v"
    assert db.info(namespace="users").name == "users"


def test_the_old_name_of_the_info_warns(db):
    """`reef.Info` is `reef.NamespaceInfo`."""
    with pytest.warns(DeprecationWarning, match=r"reef\.Info is now reef\.NamespaceInfo"):
        assert reef.Info is reef.NamespaceInfo
    assert isinstance(db.create("users"), reef.NamespaceInfo)


# --- creation -------------------------------------------------------------------------


def test_a_typo_creates_nothing(db):
    """A similar name is likely a typo: the error names the existing one."""
    db.create("users")
    with pytest.raises(reef.NotFoundError, match=r"Did you mean users\? create=True creates uesrs"):
        db.writer("uesrs")
    assert db.namespaces() == ["users"]
    with db.writer("uesrs", create=True) as writer:
        writer.put("k", b"v")
    assert db.namespaces() == ["uesrs", "users"]
    db.writer("uesrs").close()


@pytest.mark.parametrize(
    "use",
    [
        lambda db, name: db.reader(name),
        lambda db, name: db.reader(name, pin=True),
        lambda db, name: db.cursor(name, "c"),
        lambda db, name: db.snapshot(name),
    ],
)
def test_a_missing_namespace_is_reported_with_the_one_that_is_similar(db, use):
    """Where it is read, as where it is written; a name that is no typo has no suggestion."""
    db.create("users")
    with pytest.raises(reef.NotFoundError, match=r"no namespace uesrs in .*Did you mean users\?$"):
        use(db, "uesrs")
    with pytest.raises(reef.NotFoundError) as caught:
        use(db, "orders")
    assert not caught.value.hint


def test_a_missing_snapshot_is_no_missing_namespace(db):
    """No other namespace is suggested for it."""
    db.create("user")
    db.create("users")
    with pytest.raises(reef.NotFoundError) as caught:
        db.reader("users", snapshot="monday")
    assert "Did you mean user?" not in str(caught.value)


def test_other_names_create_a_plain_namespace(db):
    """With a log line; and those that differ by digits are no typos."""
    seen = []
    db.events.subscribe(seen.append)
    for name in ("users", "events", "users2", "users-3"):
        db.writer(name).close()
    created = [event.fields["namespace"] for event in seen if event.name == "namespace.created"]
    assert created == ["users", "events", "users2", "users-3"]


def test_create_false(db):
    """Only an existing namespace is opened."""
    with pytest.raises(reef.NotFoundError, match="there is no namespace users"):
        db.writer("users", create=False)
    assert db.namespaces() == []
    db.create("users")
    db.writer("users", create=False).close()
    db.drop("users")
    with pytest.raises(reef.NotFoundError):
        db.writer("users", create=False)
    assert db.namespaces() == []


@pytest.mark.parametrize(
    ("name", "similar"),
    [("uesrs", True), ("user", True), ("usersx", True), ("usexs", True), ("Users", True),
     ("users2", False), ("users-", False), ("posts", False), ("us", False), ("sresu", False)],
)  # fmt: skip
def test_similar_names(name, similar):
    """One letter too many, too few, another or swapped; digits and punctuation are meant."""
    assert similar_name(name, ["users"]) == ("users" if similar else None)


def test_longer_names_may_have_two_typos():
    """Of customers: two letters, not three."""
    assert similar_name("cstomres", ["customers"]) == "customers"
    assert similar_name("cstmres", ["customers"]) is None


# --- lifecycle ------------------------------------------------------------------------


def test_closing_a_database_closes_its_handles(tmp_path):
    """Writers release their roles, and nothing can be opened any more."""
    with reef.open(str(tmp_path)) as db:
        writer = db.writer("users")
        writer.put("k", b"v")
        reader, pinned = db.reader("users"), db.reader("users", pin=True)
        copy = pickle.loads(pickle.dumps(db))
    for handle in (writer, reader, pinned):
        with pytest.raises(reef.ClosedError):
            handle.get("k")
    for call in (
        lambda: db.writer("users"),
        lambda: db.reader("users"),
        lambda: db.create("x"),
        lambda: db.info("users"),
        db.namespaces,
        db.__enter__,
    ):
        with pytest.raises(reef.ClosedError, match="is closed"):
            call()
    db.close()
    assert copy.reader("users").get("k") == b"v"
    copy.writer("users", take_over=False).close()


def test_all_handles_are_closed_whatever_one_of_them_raises(db, monkeypatch):
    """The error is raised when all of them are closed."""
    first, second = db.writer("first"), db.writer("second")

    def fail():
        raise reef.UnavailableError("away")

    monkeypatch.setattr(first, "close", fail)
    with pytest.raises(reef.UnavailableError):
        db.close()
    assert not second.is_open


# --- counts of patches ----------------------------------------------------------------


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("wait", [True, False])
def test_a_patch_counts_the_rows_that_exist(db, events, folded, wait):
    """A key without a row is ignored, and not counted."""
    if folded:
        reef.jobs.fold(db, "events")
        events.refresh()
    events.delete("e3")

    def patched(*keys):
        written = events.patch([{"id": key, "n": -1} for key in keys], wait=wait)
        return (written if wait else written.result()).ops

    assert patched("e1") == 1
    assert patched("missing") == 0
    assert patched("e1", "missing", "e2", "e3") == 2
    assert "missing" not in events
    assert events.count("n = -1") == 2


def test_a_large_patch_counts_all_rows(events, monkeypatch):
    """Its keys are not looked up."""
    monkeypatch.setattr("reef.engine.commit.inflight.PATCHES_COUNTED_MAX", 2)
    assert events.patch([{"id": f"x{n}", "n": 1} for n in range(3)]).ops == 3


def test_a_patch_of_many_rows_reads_nothing():
    """H75: its cost is that of the same upsert; 10,000 keys were looked up before."""
    meter = RequestMeter()
    db = reef.open("memory://", meter=meter)
    db.create("events", SCHEMA)
    with db.writer("events", background=False) as writer:
        writer.upsert([{"id": f"e{n:06}", "n": n} for n in range(2000)])
        reef.jobs.fold(db, "events")
        writer.refresh()
        meter.reset()
        receipt = writer.patch([{"id": f"e{n:06}", "n": -1} for n in range(0, 2000, 10)])
        assert receipt.ops == 200
        assert meter.requests() == {"put": 1}
        assert writer["e000010"]["n"] == -1


def test_a_repeated_patch_returns_the_first_receipt(events):
    """With the number of operations that the log has."""
    rows = [{"id": "e1", "n": 5}]
    first = events.patch(rows, idempotency_key="k")
    again = events.patch(rows, idempotency_key="k")
    assert (first.ops, again.ops, again.replayed, again.lsn) == (1, 1, True, first.lsn)


def test_a_patch_of_a_local_writer_counts_too(tmp_path):
    """Rows on the local disk exist."""
    db = reef.open(str(tmp_path / "data"))
    db.create("events", SCHEMA)
    log = str(tmp_path / "log")
    with db.writer("events", durability="local", local_log=log) as writer:
        writer.upsert([{"id": "e1", "n": 1}])
        receipt = writer.patch([{"id": "e1", "n": 2}, {"id": "e2", "n": 2}])
        assert receipt.ops == 1
        receipt.wait()
        assert receipt.ops == 1
