"""The expiry of a row can be read by name, so that a rewrite can keep it."""

from datetime import UTC, datetime

import pyarrow as pa
import pytest

import reef
from reef.jobs import fold

NAME = "sessions"
EXPIRY = "_expires_at"
LATER = datetime(2100, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)
SCHEMA = pa.schema([("id", pa.string()), ("n", pa.int64())])


@pytest.fixture(params=["in memory", "folded"])
def writer(request):
    """Give a writer of a table in which one row expires and one does not."""
    db = reef.open("memory://")
    db.create(NAME, SCHEMA)
    with db.writer(NAME) as writer:
        writer.upsert([{"id": "a", "n": 1, EXPIRY: LATER}, {"id": "b", "n": 2}])
        if request.param == "folded":
            fold(db, NAME)
            writer.refresh()
        yield writer


def test_every_read_gives_it_by_name(writer):
    """A timestamp in UTC, or None if the row does not expire."""
    assert writer.get("a", columns=["n", EXPIRY]) == {"n": 1, EXPIRY: LATER}
    assert writer.get("b", columns=[EXPIRY]) == {EXPIRY: None}
    assert writer.get("c", columns=[EXPIRY]) is None
    assert list(writer.scan(columns=[EXPIRY, "n"])) == [
        ("a", {EXPIRY: LATER, "n": 1}),
        ("b", {EXPIRY: None, "n": 2}),
    ]
    table = writer.get_many(["b", "nope", "a"], columns=["id", EXPIRY])
    assert table.column_names == ["id", EXPIRY, "_found"]
    assert table[EXPIRY].to_pylist() == [None, None, LATER]
    stream = writer.scan_arrow(columns=["id", EXPIRY], where="n < 5")
    assert stream.schema.field(EXPIRY).type == pa.timestamp("ms", "UTC")
    assert stream.read_all()[EXPIRY].to_pylist() == [LATER, None]


def test_without_asking_nothing_changes(writer):
    """It is no column of the schema."""
    assert writer.get("a") == {"id": "a", "n": 1}
    assert dict(writer.scan())["a"] == {"id": "a", "n": 1}
    assert writer.scan_arrow().schema.names == ["id", "n"]
    assert writer.get_many(["a"]).column_names == ["id", "n", "_found"]


def test_read_modify_write_keeps_it(writer):
    """A row that is read with all its columns and written again expires when it did."""
    names = [*writer.schema.names, EXPIRY]
    rows = [row for _, row in writer.scan(columns=names)]
    writer.upsert([{**row, "n": row["n"] + 10} for row in rows])
    assert writer.get("a", columns=["n", EXPIRY]) == {"n": 11, EXPIRY: LATER}
    writer.upsert(writer.scan_arrow(columns=names))
    assert writer.get("a", columns=["n", EXPIRY]) == {"n": 11, EXPIRY: LATER}
    with writer.transaction() as tx:
        row = tx.get("a", columns=names)
        tx.upsert([{**row, "n": 12}])
        assert tx.get("a", columns=[EXPIRY]) == {EXPIRY: LATER}
    writer.patch([{"id": "a", "n": 13}])
    assert writer.get("a", columns=["n", EXPIRY]) == {"n": 13, EXPIRY: LATER}


def test_in_a_plain_namespace():
    """Rows are dicts there too, once columns are named."""
    with reef.open("memory://").writer(NAME) as writer:
        writer.upsert([{"id": b"k", "value": b"v", EXPIRY: LATER}])
        assert writer.get("k") == b"v"
        assert writer.get("k", columns=["value", EXPIRY]) == {"value": b"v", EXPIRY: LATER}
        assert list(writer.scan(columns=["id"])) == [(b"k", {"id": b"k"})]
        assert list(writer.scan(columns=[])) == [(b"k", {})]


@pytest.mark.parametrize("columns", ["n", ["nope"], ["n", "n"], [EXPIRY, EXPIRY]])
def test_bad_columns(writer, columns):
    """Every read refuses them alike."""
    for read in (
        lambda: writer.get("a", columns=columns),
        lambda: writer.get("missing", columns=columns),
        lambda: list(writer.scan(columns=columns)),
        lambda: writer.get_many(["a"], columns=columns),
        lambda: writer.scan_arrow(columns=columns),
    ):
        with pytest.raises(reef.InvalidInputError, match="column"):
            read()
