"""An order column between the partitions of a write: it decides as if all rows were in one."""

import random
from decimal import Decimal
from itertools import pairwise

import pyarrow as pa
import pytest
from pyspark.sql import types as st

import reef
from reef.jobs import fold
from tests.spark.writing import (
    Write,
    kinds_of,
    leases_of,
    named_segments,
    rows_of,
    segments_of,
    struct,
    sweep_everything,
)

COLUMNS = pa.schema([("id", pa.string()), ("n", pa.int64()), ("t", pa.string())])
ORDERED = {"id": st.StringType(), "n": st.LongType(), "t": st.StringType(), "_at": st.IntegerType()}


@pytest.fixture
def table(db):
    """Give a database with a table of three rows."""
    db.create("t", COLUMNS)
    with db.writer("t", background=False) as writer:
        writer.upsert([{"id": key, "n": 0, "t": "old"} for key in "abc"])
    return db


def row(key, at, n=1, **more):
    """Return a row with its place in the order."""
    return {"id": key, "n": n, "_at": at, **more}


def write(url, *partitions, columns=ORDERED, **options):
    """Write rows with an order column."""
    wanted = {"orderBy": "_at", **options}
    return Write(url, schema=struct(**columns), **wanted).run(*partitions)


def numbers(db):
    """Return the column n of all rows."""
    return {key: found["n"] for key, found in rows_of(db).items()}


def test_H38_the_highest_row_counts_wherever_it_is(table, url):
    """H38: between partitions as within one, and never at random; nothing else is touched."""
    write(
        url,
        [row("x", 1, 10), row("y", 5, 50), row("a", None, 1)],
        [row("x", 2, 20), row("x", 1, 11)],
        [row("y", 4, 40), row("x", 0, 0), row("z", 1, 9), row("a", -3, 2)],
    )
    expected = {"a": 2, "b": 0, "c": 0, "x": 20, "y": 50, "z": 9}
    for _ in range(2):
        assert numbers(table) == expected
        fold(table, "t")
    assert kinds_of(table)[-2:] == ["begin", "ingest"]
    assert leases_of(table) == []
    assert sweep_everything(table) == named_segments(table), "notes and first segments are swept"
    assert numbers(table) == expected


def test_without_keys_in_common_nothing_is_written_again(table, url):
    """The segments of the tasks are committed as they are, with their notes."""
    first, second = write(url, [row("m", 1), row("x", 1)], [row("n", 1), row("y", 1)])
    staged = {segment.id for message in (first, second) for segment in message.part.segments}
    notes = {segment.id for message in (first, second) for segment in message.part.notes}
    assert segments_of(table) == staged | notes
    assert named_segments(table) == staged
    assert len(notes) == 2


@pytest.mark.parametrize(
    ("partitions", "fits"),
    [
        ([[row("x", 1)], [row("x", 1)]], False),
        ([[row("x", None)], [row("x", None)]], False),
        ([[row("x", 1), row("x", 1)], [row("y", 1)]], False),
        ([[row("x", 1), row("x", 1)], [row("x", 1)]], False),
        ([[row("x", 1), row("x", 1)], [row("x", 2, 5)]], True),
        ([[row("x", 1)], [row("x", 1)], [row("x", 2, 5)]], True),
        ([[row("x", None)], [row("x", 0, 5)], [row("x", None)]], True),
    ],
)
def test_a_draw_is_refused_unless_another_row_is_higher(table, url, partitions, fits):
    """A tie within one partition may be resolved by another; one at the top never is."""
    if fits:
        write(url, *partitions)
        assert numbers(table)["x"] == 5
        return
    with pytest.raises(reef.InvalidInputError, match="same place in the order column"):
        write(url, *partitions)
    assert sorted(numbers(table)) == ["a", "b", "c"]
    assert kinds_of(table)[-2:] == ["begin", "abort"]
    assert sweep_everything(table) == set()


def test_deletes_and_patches_take_part(table, url):
    """What counts is the highest row alone: a patch is not put on top of a row that lost."""
    columns = {**ORDERED, "_op": st.StringType()}
    write(
        url,
        [row("a", 1, 5, t="x", _op="put"), row("b", 2, 6, _op="delete"), row("c", 1, _op="delete")],
        [row("a", 2, 7, t="new", _op="patch"), row("b", 1, 8, _op="put"), row("d", 1, _op="patch")],
        [row("c", 2, 9, t=None, _op="put"), row("d", 0, 4, _op="put")],
        columns=columns,
    )
    for _ in range(2):
        assert rows_of(table) == {"a": {"n": 7, "t": "new"}, "c": {"n": 9, "t": None}}
        fold(table, "t")


def test_an_overwrite_is_deduplicated_too(table, url):
    """Exactly the highest rows are left."""
    write(url, [row("x", 1, 1), row("b", 1, 1)], [row("x", 2, 2)], overwrite=True)
    assert numbers(table) == {"b": 1, "x": 2}


@pytest.mark.parametrize(
    ("spark_type", "values"),
    [
        (st.StringType(), ["", "a", "aa", "b", "é"]),
        (st.BinaryType(), [b"", b"\x00", b"a", b"\xff"]),
        (st.DecimalType(20, 4), [Decimal("-1.5"), Decimal("0.0001"), Decimal("3")]),
        (st.DoubleType(), [float("-inf"), -0.5, 0.25, float("inf"), float("nan")]),
        (st.DateType(), [-800, 0, 5]),
        (st.TimestampType(), [-1, 0, 1_000_000]),
        (st.ByteType(), [-128, 127]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_ordered_type_orders(table, url, spark_type, values):
    """From the lowest to the highest, null below all of them, in whatever partition."""
    columns = {**ORDERED, "_at": spark_type}
    chance = random.Random(2)
    order = list(enumerate([None, *values]))
    chance.shuffle(order)
    write(url, *[[row("x", value, place)] for place, value in order], columns=columns)
    assert numbers(table)["x"] == len(values)


@pytest.mark.parametrize("seed", range(2))
def test_random_rows_come_out_as_in_one_partition(table, url, seed):
    """Many keys, groups and segments; runs on disk; the result is that of a dict."""
    chance = random.Random(seed)
    count = 3000
    keys = [f"k{chance.randrange(count // 2):05}" for _ in range(count)]
    rows = [
        row(key, at, chance.randrange(10**6), t=f"{chance.getrandbits(800):0200x}")
        for key, at in zip(keys, chance.sample(range(10**6), count), strict=True)
    ]
    expected = {}
    for given in sorted(rows, key=lambda given: given["_at"]):
        expected[given["id"]] = given["n"]
    parts = [rows[at::5] for at in range(5)]
    write(url, *parts, segmentBytes=20_000, sortBytes=60_000)
    assert {k: n for k, n in numbers(table).items() if k.startswith("k")} == expected
    entries = [e for e in table.reader("t")._tail.view().memtable.ingested if e.rows]
    ordered = sorted(entries, key=lambda entry: entry.min_key)
    assert len(ordered) > 1
    assert all(a.max_key < b.min_key for a, b in pairwise(ordered)), "they do not overlap any more"
