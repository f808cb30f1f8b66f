"""Levels of loads: at the bottom at once where they overlap nothing."""

import msgspec
import pyarrow as pa
import pytest

import reef
from reef.jobs import fold, ingest
from reef.manifest.edits import replace_level
from reef.manifest.head import HeadFinder, Publisher
from reef.paths import Namespace

SCHEMA = pa.schema([("id", pa.string()), ("n", pa.int64()), ("t", pa.string())])


@pytest.fixture
def db(tmp_path):
    """Give a database with a table."""
    db = reef.open(str(tmp_path))
    db.create("t", SCHEMA)
    return db


def rows(db):
    """Return all rows as a reader sees them."""
    return {key: row["n"] for key, row in db.reader("t").scan()}


def loaded(db, *keys, **how):
    """Load rows of these keys and fold; return the levels of all segments, by first key."""
    data = pa.table({"id": sorted(keys), "n": range(len(keys)), "t": ["x"] * len(keys)})
    ingest(db, "t", data, **how)
    fold(db, "t")
    return levels(db)


def levels(db):
    """Return the level of each segment, by its first key; the highest of those that share one."""
    segments = HeadFinder(db.store, Namespace("t")).find().manifest.segments
    return {s.min_key.decode(): s.level for s in sorted(segments, key=lambda s: s.level)}


def test_a_load_over_nothing_goes_to_the_bottom(db):
    """Sorted and cut, it needs no compaction; a load that overlaps segments waits for one."""
    assert loaded(db, "a", "c") == {"a": 1}
    assert loaded(db, "d", "f") == {"a": 1, "d": 1}
    assert loaded(db, "b") == {"a": 1, "b": 0, "d": 1}, "it is between a and c"
    with db.writer("t", background=False) as writer:
        writer.upsert([{"id": "h", "n": 1, "t": "y"}])
        assert loaded(db, "g", "i") == {"a": 1, "b": 0, "d": 1, "g": 0, "h": 0}
    assert rows(db) == {"a": 0, "b": 0, "c": 1, "d": 0, "f": 1, "g": 0, "h": 1, "i": 1}


def test_the_bottom_is_the_deepest_level_there_is(db):
    """Not just the one below the top."""
    loaded(db, "a")
    publisher = Publisher(db.store, Namespace("t"))

    def sink(head):
        return msgspec.structs.replace(
            head, segments=tuple(replace_level(s, 3) for s in head.segments)
        )

    publisher.publish(sink)
    assert loaded(db, "b") == {"a": 3, "b": 3}


def test_patches_and_replacements_stay_on_top(db):
    """They are meant for rows below them: only a merge can say that there are none."""
    assert loaded(db, "a", op="patch") == {"a": 0}
    ingest(db, "t", pa.table({"id": ["x"], "n": [1], "t": ["x"]}), replace=True)
    fold(db, "t")
    assert set(levels(db).values()) == {0}
