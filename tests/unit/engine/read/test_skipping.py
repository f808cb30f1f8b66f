"""Skipping by min/max where segments and the log overlap: less is read, and never another row.

The table is small and its groups are tiny, so that every rule decides about many of them.
"""

import random

import pyarrow as pa
import pytest

import reef
from reef.engine.read.scan import Projection
from reef.jobs import compact, fold, ingest
from reef.types import KeyRange

NAME = "t"
SCHEMA = pa.schema([("id", pa.string()), ("a", pa.int64()), ("b", pa.int64())])
GROUPS = {"group_bytes": 100, "segment_bytes_max": 1 << 20}
KEYS = 120
TESTS = {
    "a >= 70": lambda row: row["a"] is not None and row["a"] >= 70,
    "a < 20 AND b < 20": lambda row: None not in row.values() and row["a"] < 20 and row["b"] < 20,
    "b = 7": lambda row: row["b"] == 7,
    "a IS NULL": lambda row: row["a"] is None,
    "a != 5 AND b > 90": lambda row: None not in row.values() and row["a"] != 5 and row["b"] > 90,
}


@pytest.fixture
def db():
    """A table in memory."""
    found = reef.open("memory://")
    found.create(NAME, SCHEMA)
    return found


def put(db, rows, **write):
    """Write rows (key number, a, b) and fold them into a segment of their own."""
    with db.writer(NAME, background=False) as writer:
        getattr(writer, write.get("op", "upsert"))(rows)
    fold(db, NAME, **GROUPS)


def row(number, **columns):
    """Return a row of a key."""
    return {"id": f"k{number:03}", **columns}


def skipped(db, where):
    """Return of each segment, oldest first, how many groups are left out, and of how many."""
    view = db.reader(NAME)._tail.view()
    scan = view.scan(KeyRange(), 0, projection=Projection.of(view.manifest.schema, None, where))
    entries = sorted(scan.overlapping(), key=lambda entry: entry.lsn_max)
    skipping = scan.skipping(scan.overlapping())
    return [
        (len(skipping.needless(entry)), len(view.segments.tail(entry).index)) for entry in entries
    ]


def found(db, where):
    """Return the keys that match."""
    return [key for key, _ in db.reader(NAME).scan(where=where)]


# --- one rule at a time -----------------------------------------------------------------


def test_a_newer_row_that_does_not_match_is_read_where_an_older_one_would(db):
    """Else the older one would come forward, though it was overwritten."""
    put(db, [row(n, a=n, b=0) for n in range(100)])
    put(db, [row(n, a=-1, b=0) for n in range(40, 60)])
    assert found(db, "a >= 45 AND a < 50") == []
    assert found(db, "a >= 55") == [f"k{n:03}" for n in range(60, 100)]
    (_, _), (newer, of) = skipped(db, "a >= 0 AND a < 200")
    assert newer == 0 < of


def test_a_newer_row_is_not_read_where_no_older_one_matches(db):
    """Neither of them can match: both are passed by, though they overlap."""
    put(db, [row(n, a=n, b=0) for n in range(100)])
    put(db, [row(n, a=-1, b=0) for n in range(100)])
    assert skipped(db, "a >= 200") == [(n, n) for n, _ in skipped(db, "a >= 200")]
    assert found(db, "a >= 200") == []
    older, newer = skipped(db, "a >= 90")
    assert older[0] > 0.8 * older[1]
    assert newer[0] > 0.8 * newer[1], "only where the older one has rows from 90 on"
    assert found(db, "a >= 90") == []


def test_an_older_row_is_not_read_below_newer_ones(db):
    """The version of the newer segment counts, whether the older one is read or not."""
    put(db, [row(n, a=0, b=0) for n in range(100)])
    put(db, [row(n, a=100, b=0) for n in range(0, 100, 2)])
    older, newer = skipped(db, "a >= 50")
    assert older == (older[1], older[1])
    assert newer[0] == 0
    assert found(db, "a >= 50") == [f"k{n:03}" for n in range(0, 100, 2)]


def test_an_older_row_is_read_below_a_patch(db):
    """The patch matches, and the row is both of them together."""
    with db.writer(NAME, background=False) as writer:
        writer.upsert([row(n, a=0, b=n) for n in range(100)])
        fold(db, NAME, **GROUPS)
    ingest(db, NAME, {"id": [f"k{n:03}" for n in range(50, 60)], "a": [100] * 10}, op="patch")
    assert [r["b"] for _, r in db.reader(NAME).scan(where="a >= 50")] == list(range(50, 60))
    assert 0 < skipped(db, "a >= 50")[0][0] < skipped(db, "a >= 50")[0][1]
    fold(db, NAME, **GROUPS)
    assert [r["b"] for _, r in db.reader(NAME).scan(where="a >= 50")] == list(range(50, 60))


def test_a_row_may_match_by_what_several_versions_have(db):
    """The row fails by one condition, its patch by the other, and both together by none."""
    put(db, [row(n, a=1, b=0) for n in range(50)])
    ingest(db, NAME, {"id": ["k007"], "b": [1]}, op="patch")
    assert found(db, "a = 1 AND b = 1") == ["k007"]
    fold(db, NAME, **GROUPS)
    assert found(db, "a = 1 AND b = 1") == ["k007"]


@pytest.mark.parametrize("a", [0, 100])
def test_rows_of_the_log_count_too(db, a):
    """They hide older ones; those that do not match hide none that could."""
    put(db, [row(n, a=n, b=0) for n in range(100)])
    with db.writer(NAME, background=False) as writer:
        writer.upsert([row(n, a=a, b=1) for n in range(0, 100, 3)])
        expected = [f"k{n:03}" for n in range(100) if (a if n % 3 == 0 else n) >= 90]
        assert [key for key, _ in writer.scan(where="a >= 90")] == expected
    assert skipped(db, "a >= 90")[0][0] > 0


def test_rows_are_read_below_a_patch_in_the_log(db):
    """It has one column, and they have the others."""
    put(db, [row(n, a=0, b=n) for n in range(100)])
    with db.writer(NAME, background=False) as writer:
        writer.patch([row(n, a=100) for n in range(50, 60)])
        assert [r["b"] for _, r in writer.scan(where="a >= 50")] == list(range(50, 60))


def test_a_load_is_read_where_the_log_has_older_rows(db):
    """Its rows do not match, and hide those in memory that do."""
    with db.writer(NAME, background=False) as writer:
        writer.upsert([row(n, a=100, b=n) for n in range(50)])
        ingest(db, NAME, [row(n, a=0, b=n) for n in range(40)], group_bytes=200)
        writer.delete("k049")
    assert found(db, "a >= 50") == [f"k{n:03}" for n in range(40, 49)]


def test_a_load_is_older_than_what_came_after_it(db):
    """Rows of an ingest have its LSN, wherever they are."""
    put(db, [row(n, a=100, b=0) for n in range(50)])
    ingest(db, NAME, [row(n, a=0, b=n) for n in range(50)], group_bytes=200)
    assert found(db, "a >= 50") == []
    put(db, [row(n, a=100, b=n) for n in range(10)])
    assert found(db, "a >= 50") == [f"k{n:03}" for n in range(10)]


# --- all of them ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_random_histories_give_the_same_rows(db, seed):
    """Whatever was written in whatever order: a condition gives the rows that match it."""
    chance = random.Random(seed)
    with db.writer(NAME, background=False) as writer:
        for _ in range(14):
            change(db, writer, chance)
            if chance.random() < 0.5:
                fold(db, NAME, **GROUPS)
            if chance.random() < 0.1:
                compact(db, NAME, full=True, group_bytes=200)
    everything = dict(db.reader(NAME).scan())
    for where, matches in TESTS.items():
        expected = {key: row for key, row in everything.items() if matches(row)}
        assert dict(db.reader(NAME).scan(where=where)) == expected, where
        backwards = list(db.reader(NAME).scan(where=where, reverse=True))
        assert backwards == list(expected.items())[::-1], where


def change(db, writer, chance):
    """Write one batch: values grow with the keys, so that groups have narrow bounds."""
    first = chance.randrange(KEYS)
    numbers = range(first, min(KEYS, first + chance.randrange(1, 60)), chance.randrange(1, 4))
    shift = chance.choice([0, 0, 30, -40])
    kind = chance.choice(["upsert", "upsert", "patch", "delete", "delete_range", "load", "lay"])
    columns = chance.choice([["a", "b"], ["a"], ["b"]])
    values = {n: {c: chance.choice([n + shift, n, 5, None]) for c in columns} for n in numbers}
    rows = [row(n, **values[n]) for n in numbers]
    whole = [{"a": None, "b": None, **r} for r in rows]
    if kind == "upsert":
        writer.upsert(whole)
    elif kind == "patch":
        writer.patch(rows)
    elif kind == "delete":
        writer.write(delete_all(rows))
    elif kind == "delete_range":
        writer.delete_range(rows[0]["id"], rows[-1]["id"] + "~")
    elif kind == "load":
        ingest(db, NAME, whole, group_bytes=200)
    else:
        ingest(db, NAME, rows, op="patch", group_bytes=200)


def delete_all(rows):
    """Return a batch that deletes the keys of some rows."""
    batch = reef.Batch()
    for one in rows:
        batch.delete(one["id"])
    return batch
