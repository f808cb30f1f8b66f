"""Idempotency keys between batches and loads: found wherever they stand, in time (H46, H57)."""

import pytest

import reef
from reef.errors import InvalidInputError, NotFoundError
from reef.formats.manifest import DedupEntry
from reef.jobs import fold
from reef.manifest.dedup import DedupWindow
from tests.bulk import ingest

NAME = "users"


@pytest.fixture
def db():
    """Give a database in memory."""
    return reef.open("memory://")


def test_H57_the_key_of_a_load_is_resolved_before_and_after_a_fold(db):
    """What became of a load is told by its key, as of a batch."""
    writer = db.writer(NAME)
    writer.put("k", b"1", idempotency_key="batch")
    ingest(db.store, NAME, {b"k": b"bulk"}, key="load")
    ingest(db.store, NAME, {b"k": b"none"}, key="given up", abort=True)
    for _ in range(2):
        told = {key: writer.resolve(key) for key in ("batch", "load", "given up", "never")}
        assert told == {
            "batch": "committed",
            "load": "committed",
            "given up": "unknown",
            "never": "unknown",
        }
        fold(db, NAME)


@pytest.mark.parametrize("depends_on", ["k", "other"])
def test_H46_a_batch_that_is_being_decided_is_looked_up_again(db, depends_on):
    """H46: while it is judged a segment is gone; the look that follows finds its key committed."""
    writer = db.writer(NAME)
    judge = writer._judge

    def swept(conditions):
        writer._judge = judge
        ingest(db.store, NAME, {b"k": b"bulk"}, key="job-7")
        raise NotFoundError("a segment was swept")

    writer._judge = swept
    batch = reef.Batch().put("k", b"live")
    with pytest.raises(InvalidInputError, match="job-7"):
        writer.write(batch, when=[reef.absent(depends_on)], idempotency_key="job-7")
    assert writer.get("k") == b"bulk" == dict(db.reader(NAME).scan())[b"k"]
    assert writer.put("k", b"later").lsn


def test_a_window_that_is_too_long_is_trimmed():
    """A manifest of an older release may have more keys than the window holds: the last count."""
    entries = [DedupEntry(f"{n}", "", n, 0, 1, 1, "id", 0) for n in range(5)]
    window = DedupWindow(entries, 2)
    assert [entry.key for entry in window.entries()] == ["3", "4"]
    assert len(window) == 2
