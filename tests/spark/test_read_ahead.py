"""Requests of a task, and when they are sent: ahead of need, within bounds, and no more."""

import pickle
import threading

import pytest

import reef
from reef.manifest.head import HeadFinder
from reef.paths import Namespace
from reef.spark import source as ahead
from reef.spark.source import ReadAhead
from reef.stores import Wrapper
from tests.spark.data import Planned, folded, rows

THREAD = "read ahead"


class Watched(Wrapper):
    """Notes which thread asks for what."""

    def __init__(self, inner):
        super().__init__(inner)
        self.threads = []
        self.bytes = []

    def get_ranges(self, key, ranges):
        """Read; note who does."""
        self.threads.append(threading.current_thread().name)
        self.bytes.append(sum(end - start for start, end in ranges))
        return self.inner.get_ranges(key, ranges)


def entries(db):
    """Return the segments of the table."""
    return HeadFinder(db.store, Namespace("t")).find().manifest.segments


def running():
    """Return the threads that read ahead."""
    return [t.name for t in threading.enumerate() if t.name.startswith(THREAD)]


def opened(url):
    """Return the reader and its only share, as a task gets them."""
    planned = Planned(url, "t", splitBytes=1 << 30)
    (share,) = planned.shares
    return pickle.loads(pickle.dumps((planned.reader, share)))


def test_reads_are_begun_before_they_are_due(db, url):
    """All groups come from threads that read ahead; each is read once, in few requests."""
    folded(db, "t", 3000, parts=2, group_bytes=4096)
    reader, share = opened(url)
    store = Watched(reader._reading.pin.store)
    object.__setattr__(reader._reading.pin, "store", store)
    assert sum(len(batch) for batch in reader.read(share)) == 3000
    assert {name.rpartition("_")[0] for name in store.threads} == {THREAD}
    stored = sum(entry.size - entry.tail_bytes for entry in entries(db))
    assert sum(store.bytes) <= stored, "nothing is read twice"
    assert running() == []


def test_prefetched_bytes_are_bounded(db, url, monkeypatch):
    """No more bytes are on their way than there is room for; the rest is read when it is due."""
    folded(db, "t", 2000, parts=2, group_bytes=4096)
    monkeypatch.setattr(ahead, "AHEAD_BYTES", 20_000)
    most, expect = [], ReadAhead.expect

    def expected(self, *read):
        expect(self, *read)
        most.append(sum(size for _, size in self._coming.values()))

    monkeypatch.setattr(ReadAhead, "expect", expected)
    reader, share = opened(url)
    assert sum(len(batch) for batch in reader.read(share)) == 2000
    assert 0 < max(most) <= 20_000


def test_a_read_that_is_stopped_leaves_no_threads(db, url, monkeypatch):
    """Spark closes a task that it no longer needs: nothing runs on in the background."""
    folded(db, "t", 3000, group_bytes=4096)
    monkeypatch.setattr("reef.spark.source.BATCH_ROWS", 100)
    reader, share = opened(url)
    batches = reader.read(share)
    next(batches)
    assert running() != []
    batches.close()
    assert running() == []


def test_an_error_of_a_prefetch_is_raised_when_it_is_due(db, url):
    """As itself, with what else is known of it; and no thread is left."""
    folded(db, "t", 1000, group_bytes=4096)
    reader, share = opened(url)
    (entry,) = entries(db)
    db.store.delete(Namespace("t").segment(entry.id))
    with pytest.raises(reef.CorruptionError, match="though generation"):
        list(reader.read(share))
    assert running() == []


def test_conditions_skip_groups_that_overlap_others(db, url):
    """Newer segments overlap all keys: groups that min and max exclude are still not read."""
    folded(db, "t", 4000, group_bytes=4096)
    for text in ("first", "second"):
        with db.writer("t", background=False) as writer:
            writer.upsert(rows(0, 4000, text=text).take(list(range(0, 4000, 5))))
        reef.jobs.fold(db, "t", group_bytes=4096)
    planned = Planned(url, "t", where="n >= 1000 AND n < 1040")
    read = sum(len(tail.index) for share in planned.shares for tail in share.tails.values())
    whole = Planned(url, "t")
    of = sum(len(tail.index) for share in whole.shares for tail in share.tails.values())
    assert len(planned.rows()) == 40
    assert read < of / 20
