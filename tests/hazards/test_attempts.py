"""H38, H39: tasks of a bulk job that run twice, fail late, or overlap; without Spark around them.

What Spark itself does to tasks (kills, retries, speculation) is in tests/spark/test_kills.py.
"""

import pytest

import reef
from reef.engine.handles.database import Database
from reef.jobs import BulkJob, fold, verify
from reef.stores.memory import MemoryStore
from tests.spark.writing import named_segments, segments_of, sweep_everything
from tests.support.sweep_world import NAME
from tests.unit.jobs.test_ingest import _plain as plain


@pytest.fixture
def db():
    """Give a database with a plain namespace, and a live writer's row in it."""
    found = Database(MemoryStore())
    with found.writer(NAME, background=False) as writer:
        writer.put("b", b"live")
    return found


def keys(db):
    """Return the keys that a reader sees."""
    return [key for key, _ in db.reader(NAME).scan()]


def test_H39_attempts_have_names_of_their_own_and_one_of_each_counts(db):
    """H39: two attempts of one task stage the same rows; the commit names one, the sweep takes
    the other, also when that one ends after the commit."""
    with BulkJob(db, NAME) as job:
        staging = job.staging
        first = staging.stage([plain([b"a", b"c"])])
        second = staging.stage([plain([b"a", b"c"])])
        assert {s.id for s in first}.isdisjoint(s.id for s in second)
        job.commit(list(second))
        late = staging.stage([plain([b"a", b"c"])])
    assert keys(db) == [b"a", b"b", b"c"]
    assert len(segments_of(db, NAME)) == 3
    assert named_segments(db, NAME) == {s.id for s in second}
    fold(db, NAME)
    assert sweep_everything(db, NAME) == named_segments(db, NAME)
    assert {s.id for s in (*first, *late)}.isdisjoint(named_segments(db, NAME))
    assert keys(db) == [b"a", b"b", b"c"]
    assert verify(db, NAME, deep=True).problems == []


def test_H38_parts_that_overlap_are_refused_whole(db):
    """H38: two tasks with a key in common: nothing of either becomes visible."""
    with BulkJob(db, NAME) as job:
        staged = [*job.staging.stage([plain([b"a", b"c"])]), *job.staging.stage([plain([b"c"])])]
        with pytest.raises(reef.InvalidInputError):
            job.commit(staged)
    assert keys(db) == [b"b"]
    assert sweep_everything(db, NAME) == named_segments(db, NAME)


def test_H38_a_part_that_is_not_there_is_refused_whole(db):
    """H38: the commit checks that every object it names exists, with its size."""
    with BulkJob(db, NAME) as job:
        staged = [*job.staging.stage([plain([b"a"])]), *job.staging.stage([plain([b"c"])])]
        db.store.delete(job.staging.namespace.segment(staged[1].id))
        with pytest.raises(reef.ReefError):
            job.commit(staged)
    assert keys(db) == [b"b"]


def test_H38_the_place_of_a_load_among_live_writes_is_its_commit(db):
    """H38: rows written before the load are overwritten by it; rows written after it win."""
    with db.writer(NAME, background=False) as writer, BulkJob(db, NAME) as job:
        staged = job.staging.stage([plain([b"k", b"l"])])
        writer.put("k", b"before")
        job.commit(list(staged))
        writer.put("l", b"after")
        assert writer.get("k") != b"before"
        assert writer.get("l") == b"after"
