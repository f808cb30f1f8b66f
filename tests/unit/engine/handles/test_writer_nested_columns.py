"""Columns of times of day, maps and structs: written in any form, read in any form."""

import datetime as dt

import pyarrow as pa
import pytest

import reef
from reef.jobs import compact, fold, verify

PLACE = pa.struct([("city", pa.string()), ("at", pa.list_(pa.float32(), 2))])
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("place", PLACE),
        ("counts", pa.map_(pa.string(), pa.int64())),
        ("opens", pa.time64("us")),
        ("lines", pa.list_(pa.struct([("sku", pa.string()), ("n", pa.int32())]))),
    ]
)
FULL = {
    "id": "a",
    "place": {"city": "Rome", "at": [1.0, 2.0]},
    "counts": {"x": 1, "y": None},
    "opens": dt.time(8, 30),
    "lines": [{"sku": "s1", "n": 2}, None],
}
EMPTY = {"id": "b", "place": None, "counts": None, "opens": None, "lines": None}
HOLLOW = {
    "id": "c",
    "place": {"city": None, "at": None},
    "counts": {},
    "opens": dt.time(23, 59, 59, 999999),
    "lines": [],
}
ROWS = [FULL, EMPTY, HOLLOW]


@pytest.fixture
def db():
    """Give a database with an empty table."""
    with reef.open("memory://") as db:
        db.create("t", SCHEMA)
        yield db


FORMS = {
    "dicts": ROWS,
    "columns": {name: [row[name] for row in ROWS] for name in SCHEMA.names},
    "Arrow": pa.Table.from_pylist(ROWS, schema=SCHEMA),
    "a slice": pa.concat_tables([pa.Table.from_pylist(ROWS, schema=SCHEMA)] * 2)
    .combine_chunks()
    .slice(3),
}


@pytest.mark.parametrize("form", FORMS)
def test_rows_come_back_as_they_were(db, form):
    """From the log and from segments, by get, get_many, scan, to_arrow and changes."""
    with db.writer("t", background=False) as writer:
        writer.upsert(FORMS[form])
        for _ in range(2):
            reader = db.reader("t")
            assert [reader.get(row["id"]) for row in ROWS] == ROWS
            many = reader.get_many(["c", "a"]).select(SCHEMA.names)
            assert many.to_pylist(maps_as_pydicts="strict") == [HOLLOW, FULL]
            assert [{"id": key, **row} for key, row in reader.scan()] == ROWS
            assert reader.to_arrow().equals(FORMS["Arrow"])
            assert [change.row for change in reader.changes(after_lsn=0)] == ROWS
            fold(db, "t")
    assert verify(db, "t", deep=True).ok


def test_a_row_is_a_copy(db):
    """A caller may change the dicts of a row without changing the cache."""
    with db.writer("t", background=False) as writer:
        writer.upsert([FULL])
        writer.get("a")["counts"]["x"] = 99
        writer.get("a")["place"]["city"] = "Oslo"
        assert writer.get("a") == FULL


def test_patches_replace_whole_values(db):
    """A struct or map of a patch is the new value, fields and keys that it lacks are gone."""
    with db.writer("t", background=False) as writer:
        writer.upsert([FULL])
        writer.patch([{"id": "a", "place": {"city": "Oslo"}, "counts": {"z": 3}}])
        changed = {**FULL, "place": {"city": "Oslo", "at": None}, "counts": {"z": 3}}
        assert writer.get("a") == changed
        fold(db, "t")
        compact(db, "t", full=True)
        assert db.reader("t").get("a") == changed


REFUSED = [
    {"place": {"town": "Rome"}},
    {"place": "Rome"},
    {"place": {"at": [1.0]}},
    {"counts": {1: 2}},
    {"counts": {"x": "many"}},
    {"counts": [("x", 1), ("x", 2)]},
    {"counts": {None: 1}},
    {"counts": pa.scalar(5)},
    {"opens": "08:30"},
    {"opens": dt.time(8, tzinfo=dt.UTC)},
    {"lines": [{"sku": 5}]},
]


@pytest.mark.parametrize("columns", REFUSED, ids=str)
def test_values_that_do_not_fit_are_refused(db, columns):
    """The error names row and column; nothing is written."""
    (name,) = columns
    with db.writer("t", background=False) as writer:
        with pytest.raises(reef.InvalidInputError, match=f"row 0, column {name}: expected"):
            writer.put("x", columns)
        assert writer.get("x") is None


def test_arrow_maps_with_a_key_twice_are_refused(db):
    """Readers return dicts, which would lose one of them."""
    twice = pa.array([[("x", 1), ("x", 2)]], SCHEMA.field("counts").type)
    rows = pa.table({"id": ["a"], "counts": twice})
    with db.writer("t", background=False) as writer, pytest.raises(reef.InvalidInputError):
        writer.upsert(rows)


def test_filters_compare_times_of_day(db):
    """As text, as TIME literals, as Python values and in pyarrow expressions."""
    import pyarrow.compute as pc

    with db.writer("t", background=False) as writer:
        writer.upsert(ROWS)
        for _ in range(2):
            reader = db.reader("t")
            for where in (
                "opens <= '08:30'",
                "opens < TIME '08:30:00.000000001'",
                [("opens", "=", dt.time(8, 30))],
                pc.field("opens") < dt.time(12),
                "counts IS NOT NULL AND opens < '12:00'",
            ):
                assert reader.to_arrow(where=where, columns=["id"])["id"].to_pylist() == ["a"]
            with pytest.raises(reef.InvalidInputError, match="not a time of day"):
                reader.count("opens > 'noon'")
            with pytest.raises(reef.InvalidInputError, match="cannot be compared"):
                reader.count("place = 'Rome'")
            fold(db, "t")


def test_queries_reach_into_them(db):
    """DuckDB selects fields of structs and values of maps."""
    with db.writer("t", background=False) as writer:
        writer.upsert(ROWS)
    query = "SELECT place.city, counts['x'] AS x, lines[1].n AS n FROM t WHERE opens = TIME '08:30'"
    assert db.sql(query).to_pylist() == [{"city": "Rome", "x": 1, "n": 2}]


def test_widened_maps(db):
    """Older rows are read with the wider type."""
    db.create("m", pa.schema([("id", pa.string()), ("m", pa.map_(pa.string(), pa.int8()))]))
    with db.writer("m", background=False) as writer:
        writer.upsert([{"id": "a", "m": {"x": 1}}])
    fold(db, "m")
    db.alter("m", pa.schema([("id", pa.string()), ("m", pa.map_(pa.string(), pa.int64()))]))
    with db.writer("m", background=False) as writer:
        writer.upsert([{"id": "b", "m": {"x": 2**40}}])
        assert writer.to_arrow()["m"].to_pylist() == [[("x", 1)], [("x", 2**40)]]
