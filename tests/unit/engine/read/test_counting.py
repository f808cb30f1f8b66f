"""Counts by filter indexes: the same as by scans, without reading a row."""

import random

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import reef
from reef.errors import ConflictError
from reef.jobs import compact, fold, ingest
from reef.runtime import REAL
from reef.stores.memory import MemoryStore

SCHEMA = pa.schema(
    [("id", pa.string()), ("n", pa.int64()), ("s", pa.string()), ("other", pa.int64())]
)
CONDITIONS = [
    *("n = 3", "n < 5 OR n IS NULL", "NOT (n = 3 OR n > 7)", "n BETWEEN 2 AND 6 AND s >= 'x3'"),
    *(
        "n IS NULL AND n = 1",
        "s LIKE 'x12%' OR NOT s LIKE 'x1%'",
        "n = 3 AND other > 1",
        "n = 3 OR id < 'k0300'",
    ),
]


def rows_of(numbers):
    """Return the rows with these numbers."""
    numbers = list(numbers)
    return pa.table(
        {
            "id": [f"k{number:04}" for number in numbers],
            "n": [None if number % 13 == 0 else number % 10 for number in numbers],
            "s": [f"x{number % 3000}" for number in numbers],
            "other": numbers,
        },
        schema=SCHEMA,
    )


def make(*parts):
    """Return a database with an indexed segment for each part."""
    db = reef.Database(MemoryStore())
    indexes = [reef.filter_index(column, rows_min=10) for column in ("n", "s")]
    db.create("t", SCHEMA, indexes=indexes)
    for part in parts:
        ingest(db, "t", rows_of(part))
        fold(db, "t")
    return db


def assert_same(handle, **bounds):
    """Compare counts with scans for all conditions."""
    for where in CONDITIONS:
        scanned = handle.to_arrow(columns=["id"], where=where, **bounds)
        assert handle.count(where, **bounds) == len(scanned), (where, bounds)


def test_indexed_columns_are_counted_without_reading_rows():
    """Only parts of the indexes are read, none of the pages."""
    db = make(range(5000), range(5000, 9000))
    with db.reader("t") as reader:
        assert_same(reader)
    with db.reader("t") as reader:
        fetched = []
        segments = reader._view().segments
        read = segments._fetch
        segments._fetch = lambda *a: fetched.append(a) or read(*a)
        assert reader.count("n = 3 AND s >= 'x3'") > 0
        assert not fetched
        reader.count("n = 3 AND other > 1")
        assert fetched


@pytest.mark.parametrize("bounds", [{"start": "k0700"}, {"end": "k2500"}, {"prefix": "k11"}])
def test_ranges_are_counted_as_scans_do(bounds):
    """A segment that is cut by the range is scanned."""
    db = make(range(1000), range(1000, 2000), range(2000, 3000))
    with db.reader("t") as reader:
        assert_same(reader, **bounds)


def test_rows_of_memory_and_of_overlapping_segments_count_once():
    """Replaced, deleted, expired and patched rows are counted as a scan returns them."""
    db = make(range(1000), range(2000, 3000), range(4000, 5000))
    with db.writer("t", background=False) as writer:
        assert_same(writer)
        writer.put("k0003", {"n": 4, "s": "x", "other": 1})
        assert_same(writer)
        writer.delete("k2003")
        writer.delete_range("k4100", "k4200")
        writer.put("k1500", {"n": 3, "s": "x", "other": 1})
        assert_same(writer)
        writer.put("k3500", {"n": 3, "s": "x", "other": 1}, ttl_s=0.001)
        REAL.sleep(0.002)
        writer.patch([{"id": "k0500", "n": 3}])
        assert_same(writer)
    fold(db, "t")
    with db.reader("t") as reader:
        assert_same(reader)
        assert reader.dataset().count_rows(filter=pc.field("n") == 3) == reader.count("n = 3")
    compact(db, "t", full=True)
    with db.reader("t") as reader:
        assert_same(reader)


@pytest.mark.parametrize("seed", range(6))
def test_random_histories(seed):
    """Counts agree with scans after any writes, folds, compactions and loads."""
    choose = random.Random(seed)
    db = make(range(500), range(500, 1000))
    with db.writer("t", background=False) as writer:
        for _ in range(12):
            key = f"k{choose.randrange(1500):04}"
            step = choose.randrange(7)
            if step < 2:
                ttl_s = choose.choice([None, None, 0.001, 1000])
                writer.put(key, {"n": 3, "s": "x1", "other": 1}, ttl_s=ttl_s)
                REAL.sleep(0.002)
            elif step == 2:
                writer.delete(key)
            elif step == 3:
                writer.delete_range(key, key[:-1] + "z")
            elif step == 4:
                fold(db, "t")
            elif step == 5:
                ingest(db, "t", rows_of(range(choose.randrange(900), 1400, 3)))
            else:
                compact(db, "t", full=choose.random() < 0.5)
            writer.refresh()
            assert_same(writer)


def test_a_count_in_a_transaction_conflicts_with_writes_to_what_it_counted():
    """The whole range counts as read."""
    db = make(range(1000))
    with db.writer("t", background=False) as writer:
        transaction = writer.transaction()
        transaction.count("n = 3")
        writer.put("k0003", {"n": 4, "s": "x", "other": 1})
        transaction.put("k9999", {"n": 1, "s": "x", "other": 1})
        with pytest.raises(ConflictError):
            transaction.commit()


def test_rows_that_expire_are_scanned():
    """An index does not know which rows have expired by now."""
    db = make()
    with db.writer("t", background=False) as writer:
        for number in range(100):
            row = {"n": 3, "s": "x", "other": number}
            writer.put(f"k{number:04}", row, ttl_s=0.001 if number < 40 else None)
    fold(db, "t")
    REAL.sleep(0.002)
    with db.reader("t") as reader:
        assert reader.count("n = 3") == 60
