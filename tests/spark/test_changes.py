"""Changes as a batch DataFrame, planned and read as Spark's processes do it."""

import random

import pytest

import reef
import reef.jobs
from tests.spark import data
from tests.spark.writing import sweep_everything


def changed(db, seed, steps=14):
    """Write a random history with loads, patches, deletes and deleted ranges; nothing is swept."""
    chance = random.Random(seed)
    db.create("t", data.SCHEMA)
    for step in range(steps):
        if chance.random() < 0.3:
            first = chance.randrange(300)
            rows = data.rows(first, first + 150, text=f"load {step} ")
            reef.jobs.ingest(db, "t", rows, replace=chance.random() < 0.3, segment_bytes=1 << 14)
        else:
            with db.writer("t", background=False) as writer:
                data.change(writer, chance, step)
        if chance.random() < 0.2:
            reef.jobs.fold(db, "t")


def contents(db):
    """Return all rows, as Spark gets them."""
    with db.reader("t") as reader:
        return {row["id"]: row for row in reader.to_arrow().to_pylist()}


@pytest.mark.parametrize("seed", range(3))
def test_changes_are_those_of_the_stream_whatever_the_parts(db, url, seed):
    """Parts are in the order of the log; their rows are numbered as in a stream of changes."""
    changed(db, seed)
    with db.reader("t") as reader:
        expected = reader.changes_arrow(0).read_all()
    found = data.Planned(url, "t", readChanges=True, splitBytes=1000)
    assert len(found.shares) > 5
    names = [n for n in expected.column_names if n != "_expires_at"]
    assert found.table().select(names).to_pylist() == expected.select(names).to_pylist()
    lsns = expected["_lsn"].to_pylist()
    after, until = lsns[len(lsns) // 3], lsns[2 * len(lsns) // 3]
    part = data.Planned(url, "t", readChanges=True, afterLsn=after, untilLsn=until).table()
    assert part["_lsn"].to_pylist() == [lsn for lsn in lsns if after < lsn <= until]


@pytest.mark.parametrize("seed", range(3))
def test_images_are_the_rows_around_each_change(db, url, seed):
    """Applied one after the other they build the table: each begins where the last one ended."""
    changed(db, seed)
    table = {}
    for change in (
        data.Planned(url, "t", readChanges=True, images=True, splitBytes=1000).table().to_pylist()
    ):
        key = change["_key"].decode()
        if change["_op"] == "delete_range":
            end = change["_end_key"]
            for known in list(table):
                if key <= known and (end is None or known.encode() < end):
                    del table[known]
            assert change["_before"] is change["_after"] is None
            continue
        assert change["_before"] == table.get(key)
        table[key] = change["_after"]
        if change["_op"] == "put":
            assert change["_after"] == {name: change[name] for name in data.SCHEMA.names}
        if change["_op"] == "delete" or change["_after"] is None:
            assert change["_op"] != "put"
            del table[key]
    assert table == contents(db)


def test_H44_a_swept_position_is_an_error_and_never_a_gap(db, url):
    """Without a position, the changes begin with the oldest that is retained."""
    changed(db, seed=1)
    reef.jobs.fold(db, "t")
    reef.jobs.compact(db, "t")
    sweep_everything(db)
    with db.writer("t", background=False) as writer:
        lsn = writer.upsert(data.rows(0, 5)).lsn
    with pytest.raises(reef.NotFoundError, match="garbage-collected"):
        data.Planned(url, "t", readChanges=True, afterLsn=1)
    newest = data.Planned(url, "t", readChanges=True).table()
    assert newest["_lsn"].to_pylist()[-5:] == [lsn] * 5
    assert not data.Planned(url, "t", readChanges=True, afterLsn=lsn).table().num_rows
    assert not data.Planned(url, "t", readChanges=True, afterLsn=lsn + 9).table().num_rows


def test_a_planned_read_of_changes_is_pinned(db, url):
    """A fold, a compaction and a sweep between plan and tasks take nothing away (H74)."""
    changed(db, seed=2)
    planned = data.Planned(url, "t", readChanges=True, splitBytes=1000, leaseSeconds=1_000_000)
    expected = planned.table().num_rows
    reef.jobs.fold(db, "t")
    reef.jobs.compact(db, "t")
    sweep_everything(db)
    with pytest.raises(reef.NotFoundError, match="garbage-collected"):
        db.reader("t", as_of={"generation": 1})
    assert planned.table().num_rows == expected


@pytest.mark.parametrize(
    "options", [{"afterLsn": "x"}, {"images": "maybe"}, {"where": "n > 5"}, {"readChanges": "7"}]
)
def test_wrong_options_are_refused(db, url, options):
    """A read of changes has options of its own."""
    db.create("t", data.SCHEMA)
    with pytest.raises(reef.InvalidInputError):
        data.Planned(url, "t", **{"readChanges": True, **options})
