"""Loads that no fold has passed yet are counted where a namespace is described.

The root: statistics counted the segments that the manifest names. Until a fold moves them there,
the segments of a load are named by the log, though every read shows their rows at once.
"""

import pytest

import reef
from reef.engine.log import tail as unfolded
from reef.jobs import fold, ingest
from tests.support import bulk_jobs

NAME = "users"
ROWS = {"id": [b"a", b"b", b"c"], "value": [b"1", b"2", b"3"]}


@pytest.fixture
def db():
    """Give a database with an empty namespace."""
    found = reef.open("memory://")
    found.create(NAME)
    return found


def counts(db):
    """Return rows, segments and bytes; `info` and `stats` must agree."""
    info, stats = db.info(NAME), db.stats(NAME)
    assert (info.rows, info.segments, info.bytes) == (stats.rows, stats.segments, stats.bytes)
    return info.rows, info.segments, info.bytes


def test_a_load_counts_before_and_after_its_fold(db):
    """The fold names the same segment in the manifest, and so changes no count."""
    ingest(db, NAME, ROWS)
    before = counts(db)
    assert before[:2] == (3, 1)
    assert [level.level for level in db.stats(NAME).levels] == [0]
    fold(db, NAME)
    assert counts(db) == before


def test_a_load_that_does_not_count_is_not_counted(db):
    """The rules of the log decide: an aborted job has no rows, an open one neither."""
    bulk_jobs.ingest(db.store, NAME, {b"k": b"v"}, abort=True)
    assert counts(db) == (0, 0, 0)
    bulk_jobs.append(db.store, NAME, bulk_jobs.WalKind.BEGIN, bulk_jobs.Job("open"))
    bulk_jobs.stage(db.store, NAME, {b"k": b"v"}, "open")
    assert counts(db) == (0, 0, 0)
    assert db.stats(NAME).open_jobs == 1


def test_handles_count_loads_that_they_have_seen(db):
    """The overview of a writer, of a reader and of a pinned view."""
    writer = db.writer(NAME, background=False)
    ingest(db, NAME, ROWS)
    writer.refresh()
    reader = db.reader(NAME)
    for handle in (writer, reader, reader.as_of(pin=True)):
        assert "at most 3" in handle._repr_html_()


def test_a_long_log_is_read_up_to_a_bound():
    """An overview stays cheap: a header for each object, and not more than so many."""
    db = reef.open("memory://")
    db.create(NAME)
    writer = db.writer(NAME, background=False)
    for number in range(5):
        writer.put(f"k{number}", b"v")
    ingest(db, NAME, ROWS)
    head = writer._manifest
    found = unfolded.read_unfolded(db.store, writer._outcomes.log._namespace, head)
    assert len(found.headers) == 8
    assert [entry.rows for entry in found.ingested] == [3]
    few = unfolded.read_unfolded(db.store, writer._outcomes.log._namespace, head, headers_max=4)
    assert len(few.headers) == 4
    assert few.ingested == ()
