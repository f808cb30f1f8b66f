"""Namespaces with columns: upserts, patches, growth of the schema, reads in every form."""

import datetime

import pyarrow as pa
import pytest

import reef
from reef.jobs import fold
from reef.runtime import REAL

NAME = "events"
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("amount", pa.float64()),
        ("count", pa.int32()),
        ("state", pa.string()),
        ("spot", pa.list_(pa.float32(), 2)),
    ]
)


@pytest.fixture
def db():
    """Give a database with an empty table."""
    db = reef.open("memory://")
    db.create(NAME, SCHEMA)
    return db


@pytest.fixture
def writer(db):
    """Give a writer of the table."""
    with db.writer(NAME) as writer:
        yield writer


def row(key, **columns):
    """Return a row with all its columns."""
    return {"id": key, "amount": None, "count": None, "state": None, "spot": None, **columns}


@pytest.fixture(params=["in memory", "folded", "half and half"])
def settle(request, db, writer):
    """Give a call after which rows are where the parameter says."""

    def settle(half_way=False):
        if request.param == "folded" or (request.param == "half and half" and half_way):
            fold(db, NAME, group_bytes=64)
            writer.refresh()

    return settle


# --- schemas ----------------------------------------------------------------------------


def test_create_returns_the_namespace(db):
    """The info has columns, key and fingerprint; a second time it is the same."""
    info = db.create(NAME, SCHEMA)
    assert (info.name, info.key, info.schema) == (NAME, "id", SCHEMA)
    assert db.create(NAME, SCHEMA).fingerprint == info.fingerprint == db.info(NAME).fingerprint
    assert info.generation == 1


def test_create_refuses_other_columns(db):
    """A namespace that is there with other columns is a conflict, and stays as it is."""
    with pytest.raises(reef.ConflictError, match="other columns"):
        db.create(NAME, pa.schema([("id", pa.string()), ("other", pa.int8())]))
    assert db.info(NAME).schema == SCHEMA


def test_a_key_column_by_another_name():
    """`key=` names it; it comes first."""
    db = reef.open("memory://")
    info = db.create("users", pa.schema([("age", pa.int8()), ("name", pa.string())]), key="name")
    assert info.schema.names == ["name", "age"]
    with db.writer("users") as users:
        users.upsert([{"name": "Ada", "age": 36}])
        assert users.get("Ada") == {"name": "Ada", "age": 36}


def test_a_schema_grows(db, writer, settle):
    """Old rows have null in a new column, and their numbers in a wider one."""
    writer.upsert([{"id": "old", "count": 7}])
    settle(half_way=True)
    wider = SCHEMA.set(2, pa.field("count", pa.int64())).append(pa.field("note", pa.string()))
    info = db.alter(NAME, wider)
    assert (info.schema_id, info.schema) == (2, wider)
    writer.upsert([{"id": "new", "count": 2**40, "note": "x"}])
    settle()
    reader = db.reader(NAME)
    for handle in (writer, reader):
        assert handle.get("old") == row("old", count=7, note=None)
        assert handle.get("new") == row("new", count=2**40, note="x")
        table = handle.scan_arrow().read_all()
        assert table.schema == wider
        assert table["count"].to_pylist() == [2**40, 7]
        assert handle.get_many(["old", "new"])["count"].to_pylist() == [7, 2**40]


def test_a_reader_follows_a_growing_schema(db, writer):
    """It meets an object of a schema that it does not know, and reads the manifest."""
    reader = db.reader(NAME, refresh_interval_ms=1e9)
    db.alter(NAME, SCHEMA.append(pa.field("note", pa.string())))
    writer.upsert([{"id": "a", "note": "x"}])
    reader.refresh()
    assert reader.get("a") == row("a", note="x")


def test_patches_of_two_schemas_meet(db, writer, settle):
    """A patch of a widened column over a row from before."""
    writer.upsert([{"id": "a", "count": 1, "state": "s"}])
    settle(half_way=True)
    db.alter(NAME, SCHEMA.set(2, pa.field("count", pa.int64())))
    writer.refresh()
    writer.patch([{"id": "a", "count": 2**40}])
    settle()
    assert db.reader(NAME).get("a") == row("a", count=2**40, state="s")


@pytest.mark.parametrize(
    "changed",
    [
        SCHEMA.remove(1),
        SCHEMA.set(2, pa.field("count", pa.int16())),
        SCHEMA.set(3, pa.field("status", pa.string())),
    ],
    ids=["dropped", "narrowed", "renamed"],
)
def test_a_change_that_would_lose_data_is_refused(db, changed):
    """Nothing is published."""
    with pytest.raises(reef.InvalidInputError, match="lose data"):
        db.alter(NAME, changed)
    assert db.info(NAME).generation == 1


# --- patches ----------------------------------------------------------------------------


def test_a_patch_changes_the_named_columns(db, writer, settle):
    """Null is a value that can be set; columns that are not named stay."""
    writer.upsert([{"id": "a", "amount": 1.0, "count": 1, "state": "new"}])
    settle(half_way=True)
    writer.patch([{"id": "a", "count": 2}])
    writer.patch([{"id": "a", "state": None}])
    settle()
    for handle in (writer, db.reader(NAME)):
        assert handle.get("a") == row("a", amount=1.0, count=2)
        assert dict(handle.scan()) == {"a": row("a", amount=1.0, count=2)}
        assert handle.get_many(["a"]).to_pylist() == [row("a", amount=1.0, count=2, _found=True)]


def test_a_patch_of_nothing_does_nothing(db, writer, settle):
    """Neither for a key that was never there, nor for a deleted one, nor after a range delete."""
    writer.upsert([{"id": "deleted", "count": 1}, {"id": "ranged", "count": 1}])
    settle(half_way=True)
    writer.delete("deleted")
    writer.delete_range("r", "s")
    writer.patch([{"id": key, "count": 2} for key in ("never", "deleted", "ranged")])
    settle()
    for handle in (writer, db.reader(NAME)):
        assert list(handle.scan()) == []
        assert [handle.get(key) for key in ("never", "deleted", "ranged")] == [None] * 3


def test_a_patch_applies_to_the_rows_below_it(db, writer, settle):
    """H20: patch, put, patch: the first one does not come through."""
    writer.upsert([{"id": "a", "count": 1, "state": "first"}])
    settle(half_way=True)
    writer.patch([{"id": "a", "state": "lost"}])
    writer.upsert([{"id": "a", "count": 2}])
    writer.patch([{"id": "a", "amount": 3.0}])
    settle()
    assert db.reader(NAME).get("a") == row("a", count=2, amount=3.0)


def test_patches_in_one_batch_apply_in_order(writer):
    """Also of one key, and together with puts and deletes."""
    batch = reef.Batch().put("a", {"count": 1}).patch([{"id": "a", "state": "x"}])
    batch.patch([{"id": "a", "state": "y"}]).delete("b").put("b", {"count": 9})
    assert writer.write(batch).ops == 5
    assert writer.get("a") == row("a", count=1, state="y")
    assert writer.get("b") == row("b", count=9)


# --- expiry -----------------------------------------------------------------------------


def test_rows_expire(db, writer, settle):
    """By `ttl_s` or `_expires_at`; decided when they are read."""
    past = datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)
    writer.upsert([{"id": "gone", "_expires_at": past}, {"id": "stays", "_expires_at": None}])
    writer.upsert([{"id": "later", "count": 1}], ttl_s=3600)
    settle(half_way=True)
    writer.patch([{"id": "gone", "count": 1}, {"id": "later", "count": 2}])
    settle()
    for handle in (writer, db.reader(NAME)):
        assert [key for key, _ in handle.scan()] == ["later", "stays"]
        assert handle.get("gone") is None
        assert handle.get("later")["count"] == 2
        assert handle.get_many(["gone", "later"])["_found"].to_pylist() == [False, True]


def test_a_put_replaces_the_expiry(writer):
    """A row written again without one stays."""
    writer.put("a", {"count": 1}, ttl_s=0.000001)
    REAL.sleep(0.01)  # a clock of milliseconds may stall
    assert writer.get("a") is None
    writer.put("a", {"count": 2})
    assert writer.get("a") == row("a", count=2)


# --- reads ------------------------------------------------------------------------------


@pytest.fixture
def many(db, writer, settle):
    """Give a hundred rows, some overwritten, some deleted, and the rest of them."""
    rows = [
        row(f"k{n:03}", count=n, amount=n / 2, state="even" if n % 2 else "odd") for n in range(100)
    ]
    writer.upsert(rows)
    settle(half_way=True)
    for n in range(0, 100, 7):
        rows[n] = row(f"k{n:03}", count=-n)
        writer.put(f"k{n:03}", {"count": -n})
    writer.delete("k050")
    writer.delete_range("k060", "k065")
    settle()
    gone = {f"k{n:03}" for n in (50, 60, 61, 62, 63, 64)}
    return {r["id"]: r for r in rows if r["id"] not in gone}


def test_scans_agree(db, writer, many):
    """Forward, backward, by prefix, by range, as Arrow and row by row."""
    for handle in (writer, db.reader(NAME)):
        assert dict(handle.scan()) == many
        assert list(handle.scan(reverse=True)) == list(many.items())[::-1]
        assert handle.scan_arrow().read_all().to_pylist() == list(many.values())
        assert dict(handle.scan(prefix="k01")) == {k: r for k, r in many.items() if k[:3] == "k01"}
        assert [k for k, _ in handle.scan("k010", "k013", limit=2)] == ["k010", "k011"]
        last = handle.scan_arrow(limit=3, reverse=True).read_all()
        assert last["id"].to_pylist() == ["k099", "k098", "k097"]
        assert pa.table(handle).num_rows == len(many)


def test_columns_and_conditions(db, writer, many):
    """Only the columns asked for, in that order; only the rows that match."""
    for handle in (writer, db.reader(NAME)):
        table = handle.scan_arrow(
            columns=["count", "id"], where="count > 90 AND id < 'k098'"
        ).read_all()
        assert table.column_names == ["count", "id"]
        assert table.to_pylist() == [
            {"count": r["count"], "id": k}
            for k, r in many.items()
            if r["count"] > 90 and k < "k098"
        ]
        assert dict(handle.scan(where="state IS NULL")) == {
            k: r for k, r in many.items() if r["state"] is None
        }
        hidden = dict(handle.scan(where="count = 49"))
        assert "k049" not in hidden, "an older version that matches does not come back"


@pytest.mark.parametrize("wrong", ["k001", b"k001"])
def test_get_many_of_one_text_is_refused(db, writer, wrong):
    """It would be the keys of its letters."""
    with writer.transaction() as transaction:
        for handle in (writer, db.reader(NAME), transaction):
            with pytest.raises(reef.InvalidInputError, match="keys must be a list") as caught:
                handle.get_many(wrong)
            assert caught.value.kind == "invalid_key"


def test_get_many_keeps_the_order(db, writer, many):
    """One row per key asked, repeated ones too; a missing one is null and not found."""
    asked = ["k099", "nope", "k001", "k050", "k001", "k007"]
    for handle in (writer, db.reader(NAME)):
        table = handle.get_many(asked)
        assert table["id"].to_pylist() == asked
        assert table["_found"].to_pylist() == [key in many for key in asked]
        assert table["count"].to_pylist() == [many.get(key, {}).get("count") for key in asked]
        assert handle.get_many(asked, columns=["count"]).column_names == ["count", "_found"]
        found = handle.get_many(asked, columns=[])["_found"]
        assert found.to_pylist() == [key in many for key in asked]
        assert handle.get_many([]).num_rows == 0


def test_what_get_returns_is_the_callers(writer):
    """Changing the dict changes no row, though rows are kept for the next get."""
    writer.put("a", {"count": 1})
    for _ in range(2):
        found = writer.get("a")
        found["count"] = 99
    assert writer.get("a")["count"] == 1


def test_plain_bytes_do_not_fit_a_table(writer):
    """And columns are named."""
    with pytest.raises(reef.InvalidInputError, match="columns amount, count, state, spot"):
        writer.put("a", b"bytes")
    assert list(writer.scan()) == []
