"""Random filters against DuckDB and Arrow: the same rows, however the table is stored.

A table of few keys is written in random steps, with tiny groups, so that segments, loads, the log,
patches and deletes overlap and every rule about skipping decides. The same text is then given to
Reef and to DuckDB over all rows, and the same expression to Reef and to Arrow.
"""

import datetime as dt
import random
from decimal import Decimal
from functools import reduce
from operator import and_, or_

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import reef
from reef.jobs import compact, fold, ingest

KEYS = [f"k{n:03}" for n in range(60)]
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("n", pa.int64()),
        ("f", pa.float64()),
        ("price", pa.decimal128(10, 2)),
        ("at", pa.timestamp("us")),
        ("seen", pa.timestamp("ms", "UTC")),
        ("day", pa.date32()),
        ("odd name", pa.string()),
        ("open", pa.bool_()),
    ]
)
GROUPS = {"group_bytes": 200, "segment_bytes_max": 4096}
START = dt.datetime(2024, 1, 1)


def value(rng, name, number=None):
    """Return a value of a column, one of few."""
    number = rng.randrange(12) if number is None else number
    return {
        "n": number,
        "f": number / 4 - 1,
        "price": Decimal(number) / 4,
        "at": START + dt.timedelta(hours=number),
        "seen": (START + dt.timedelta(hours=number)).replace(tzinfo=dt.UTC),
        "day": START.date() + dt.timedelta(days=number),
        "odd name": "aàbé"[number // 3] * (number % 3 + 1),
        "open": number < 4,
    }[name]


def rows(rng, columns=None):
    """Return rows of a stretch of keys; a row has all columns, or the given ones."""
    first = rng.randrange(len(KEYS))
    keys = KEYS[first : first + rng.randint(1, 30)]
    names = columns or SCHEMA.names[1:]
    # Values of neighbouring keys are alike, so that bounds exclude groups.
    near = {name: (rng.randrange(11), rng.choice([0, 0, 0.2, 1])) for name in names}

    def values(name):
        number, nulls = near[name]
        return None if rng.random() < nulls else value(rng, name, number + rng.randrange(2))

    return [{"id": key, **{name: values(name) for name in names}} for key in keys]


def step(rng, db, writer):
    """Change or rewrite the table somehow."""
    move = rng.randrange(7)
    if move < 2:
        writer.upsert(rows(rng))
    elif move == 2:
        names = rng.sample(SCHEMA.names[1:], rng.randint(1, 3))
        writer.patch(rows(rng, names))
    elif move == 3:
        for row in rows(rng)[:5]:
            writer.delete(row["id"])
    elif move == 4:
        ingest(db, "t", pa.Table.from_pylist(rows(rng), SCHEMA))
    elif move == 5:
        fold(db, "t", **GROUPS)
    else:
        compact(db, "t")


# --- filters ----------------------------------------------------------------------------


def literal(rng, name):
    """Return a literal as text and as an Arrow scalar."""
    column = SCHEMA.field(name).type
    drawn = value(rng, name)
    if name == "n":
        drawn = rng.choice([drawn, drawn + 0.5, -3, 100])
        return str(drawn), pa.scalar(drawn)
    if name == "price":
        drawn += rng.choice([Decimal(0), Decimal("0.005")])
        return str(drawn), pa.scalar(drawn)
    if name == "f":
        return repr(drawn), pa.scalar(drawn)
    if name == "open":
        return str(drawn).upper(), pa.scalar(drawn)
    if name == "day":
        return f"DATE '{drawn}'", pa.scalar(drawn)
    if name == "seen":
        return f"TIMESTAMP '{drawn:%Y-%m-%d %H:%M:%S}+00:00'", pa.scalar(drawn, column)
    if name == "at":
        drawn += rng.choice([dt.timedelta(), dt.timedelta(minutes=30)])
        return f"TIMESTAMP '{drawn:%Y-%m-%d %H:%M:%S}'", pa.scalar(drawn, column)
    return f"'{drawn}'", pa.scalar(drawn)


COMPARED = {
    "=": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def condition(rng):
    """Return a condition as text and as an expression."""
    name = rng.choice(SCHEMA.names[1:]) if rng.random() < 0.9 else "id"
    column, quoted = pc.field(name), f'"{name}"'
    kind = rng.randrange(8)
    if name == "id":
        key = rng.choice(KEYS)
        op = rng.choice(list(COMPARED))
        return f"id {op} '{key}'", COMPARED[op](column, key)
    if kind == 0:
        return f"{quoted} IS NULL", column.is_null()
    if kind == 1:
        return f"{quoted} IS NOT NULL", column.is_valid()
    if kind == 2:
        (low, low_value), (high, high_value) = literal(rng, name), literal(rng, name)
        between = (column >= low_value) & (column <= high_value)
        return f"{quoted} BETWEEN {low} AND {high}", between
    if kind == 3 and name == "odd name":
        return f"{quoted} LIKE 'a%'", pc.starts_with(column, "a")
    op = rng.choice(list(COMPARED))
    text, scalar = literal(rng, name)
    return f"{quoted} {op} {text}", COMPARED[op](column, scalar)


def membership(rng):
    """Return IN or NOT IN as text, and as an expression that is null where SQL is."""
    name = rng.choice(["n", "odd name", "day"])
    some = [literal(rng, name) for _ in range(rng.randint(1, 3))]
    column, texts = pc.field(name), ", ".join(text for text, _ in some)
    equal = reduce(or_, [column == scalar for _, scalar in some])
    if rng.random() < 0.5:
        return f'"{name}" IN ({texts})', equal
    return f'"{name}" NOT IN ({texts})', ~equal


def tree(rng, depth=3):
    """Return a filter as text and as an expression."""
    if not depth or rng.random() < 0.3:
        return membership(rng) if rng.random() < 0.2 else condition(rng)
    parts = [tree(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    word, join = rng.choice([(" AND ", and_), (" OR ", or_)])
    text = "(" + word.join(text for text, _ in parts) + ")"
    expression = reduce(join, [expression for _, expression in parts])
    return (f"NOT {text}", ~expression) if rng.random() < 0.3 else (text, expression)


# --- the tests --------------------------------------------------------------------------


@pytest.fixture(scope="module", params=range(5), ids="seed {}".format)
def stored(request):
    """A table after random steps, all of its rows, and the generator of its seed."""
    rng = random.Random(request.param)
    db = reef.open("memory://")
    db.create("t", SCHEMA)
    with db.writer("t", background=False) as writer:
        for _ in range(14):
            step(rng, db, writer)
        if request.param == 0:
            fold(db, "t", **GROUPS)
        yield db, db.reader("t").to_arrow(), rng


@pytest.fixture(scope="module")
def connection():
    """DuckDB, on one thread: the tables are small."""
    with duckdb.connect(config={"threads": 1}) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        yield connection


def matching(connection, text):
    """Return the keys that match in DuckDB, which has another name for times with a zone."""
    for op in (*COMPARED, "BETWEEN"):
        text = text.replace(f'"seen" {op} TIMESTAMP ', f'"seen" {op} TIMESTAMPTZ ')
    text = text.replace("+00:00' AND TIMESTAMP ", "+00:00' AND TIMESTAMPTZ ")
    found = connection.execute(f"SELECT id FROM t WHERE {text} ORDER BY id").fetchall()
    return [key for (key,) in found]


def test_a_filter_selects_the_rows_that_it_selects_in_duckdb(stored, connection):
    """Text with AND, OR, NOT, nulls, decimals and times; overlapping, folded and in the log."""
    db, table, rng = stored
    reader = db.reader("t")
    connection.register("t", table)
    for number in range(40):
        text, _ = tree(rng)
        matches = matching(connection, text)
        assert [key for key, _ in reader.scan(where=text)] == matches, text
        if number % 4 == 0:
            assert reader.count(where=text) == len(matches), text


def test_an_expression_selects_the_rows_that_it_selects_in_arrow(stored):
    """Including parts that have no counterpart in `where`, and the logic of nulls."""
    db, table, rng = stored
    reader = db.reader("t")
    for number in range(40):
        _, expression = tree(rng)
        if number % 4 == 0:
            expression |= pc.field("n") + 1 == pc.field("f") * 4
        if number % 4 == 1:
            expression &= ~pc.field("n").isin([1, 2, None]) | pc.field("day").isin([])
        found = reader.to_arrow(where=expression)
        assert found.equals(table.filter(expression)), str(expression)
