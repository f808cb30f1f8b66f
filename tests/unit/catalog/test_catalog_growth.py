"""Costs that must not grow with the number of transactions: requests, and Python calls.

Each is measured at 20, 200 and 2,000 transactions: within the write ids that a head lists, about
as many, and many more.
"""

import sys

import pytest

from reef.catalog import Catalog
from reef.errors import UnavailableError
from reef.stores import Meter
from reef.stores.memory import MemoryStore
from tests.unit.catalog.conftest import put

pytestmark = pytest.mark.quiet
SIZES = (20, 200, 2000)


def calls(work):
    """Return the number of Python functions that some work calls."""
    count = 0

    def counted(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(counted)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def filled(size, **settings):
    """Return a catalog after so many transactions, and the meter of its store."""
    meter = Meter(MemoryStore())
    catalog = Catalog(meter, **settings)
    for number in range(size):
        put(catalog, **{f"key-{number:06}": b"%d" % number})
    return catalog, meter


def measured(size, work):
    """Return the requests and calls of work on a warm catalog that never compacts."""
    catalog, meter = filled(size, auto_compact=False)
    work(catalog)
    meter.meter.reset()
    counted = calls(lambda: work(catalog))
    return meter.meter.requests(), counted


@pytest.mark.parametrize(
    "work",
    [
        lambda catalog: catalog.get_latest("key-000007"),
        lambda catalog: catalog.get_latest("missing"),
        lambda catalog: catalog.scan_latest(prefix="key-00000"),
        lambda catalog: put(catalog, n=b"1"),
        lambda catalog: catalog.transact(lambda s: s.put("n", s.get("key-000007"))),
    ],
    ids=["get", "get of a missing key", "short scan", "put", "read and write"],
)
def test_work_without_compaction_costs_the_same_after_any_number_of_transactions(work):
    """A process indexes a segment once, so each operation has a fixed number of requests and
    calls; before, each one read the whole chain again."""
    small, *larger = (measured(size, work) for size in SIZES)
    for requests, counted in larger:
        assert requests == small[0]
        assert counted <= small[1] * 1.5


def test_a_new_process_reads_the_new_segments_only(metered_pair):
    """A reader that follows another process reads each segment once."""
    writer, reader, meter = metered_pair
    for number in range(300):
        put(writer, n=b"%d" % number)
    assert reader.get_latest("n") == b"299"
    meter.reset()
    for number in range(300, 310):
        put(writer, n=b"%d" % number)
        meter.reset()
        assert reader.get_latest("n") == b"%d" % number
        assert meter.requests() == {"get": 2}  # the head, and the new segment


@pytest.fixture
def metered_pair():
    """Return a writer, a reader of another process, and the meter of its store."""
    store = MemoryStore()
    meter = Meter(store)
    return Catalog(store, auto_compact=False), Catalog(meter), meter.meter


def test_commits_compact_so_that_a_cold_reader_costs_the_same():
    """The chain stays within the write ids of the head: no listing, and a bounded number of GETs.
    Before, a new process read one segment per transaction ever made, after a listing of them."""
    for size in SIZES:
        catalog, meter = filled(size)
        segments = catalog.snapshot().last_segment_seq - catalog.snapshot().floor
        assert segments <= min(size, 64)
        meter.meter.reset()
        cold = Catalog(meter)
        assert cold.get_latest(f"key-{size - 1:06}") == b"%d" % (size - 1)
        requests = meter.meter.requests()
        assert requests.keys() <= {"get"}
        assert requests["get"] <= segments + 4
        assert cold.verify().problems == []
        assert len(cold.scan_latest()) == size


def test_one_committer_compacts():
    """Concurrent writers derive one threshold from the head: exactly one of them compacts."""
    store = MemoryStore()
    writers = [Catalog(store) for _ in range(4)]
    for number in range(64 * 3):
        put(writers[number % 4], n=b"%d" % number)
    compactions = [w.metrics.counter("catalog.compactions").value for w in writers]
    assert sum(compactions) == 3
    assert writers[0].verify().checkpoints >= 1


def test_a_compaction_that_fails_does_not_fail_its_commit():
    """The commit has succeeded; an event reports the failure, and a later commit compacts."""

    class Full(MemoryStore):
        is_full = True

        def upload(self, key, parts):
            if self.is_full:
                raise UnavailableError("no space")
            return super().upload(key, parts)

    store, events = Full(), []
    catalog = Catalog(store)
    catalog.events.subscribe(lambda event: events.append(event.name))
    for number in range(70):
        put(catalog, n=b"%d" % number)
    store.is_full = False
    assert events == ["catalog.compaction_failed"]
    for number in range(70, 90):
        put(catalog, n=b"%d" % number)
    assert catalog.snapshot().checkpoint_seq == 80


def test_a_snapshot_does_not_see_segments_that_were_indexed_later():
    """Sessions of different ages share one index, and each reads its own state, also after a
    compaction has replaced the index."""
    catalog = Catalog(MemoryStore(), auto_compact=False)
    put(catalog, a=b"1", b=b"1")
    with catalog.session_read() as old:
        put(catalog, a=b"2", b=None, c=b"2")
        assert catalog.scan_latest() == [(b"a", b"2"), (b"c", b"2")]
        assert [old.get(key) for key in "abc"] == [b"1", b"1", None]
        catalog.compactor().compact_once()
        put(catalog, a=b"3")
        with catalog.session_read() as new:
            assert new.scan() == [(b"a", b"3"), (b"c", b"2")]
            assert old.scan() == [(b"a", b"1"), (b"b", b"1")]
            assert [new.get(key) for key in "abc"] == [b"3", None, b"2"]


def test_the_index_of_a_lost_catalog_is_not_used():
    """A catalog whose objects were all deleted, and that was filled again, has other segments under
    the same numbers."""
    store = MemoryStore()
    reader = Catalog(store)
    put(Catalog(store), a=b"lost")
    assert reader.get_latest("a") == b"lost"
    store.delete_many([info.key for info in store.list("") if info.key != "_reef/probe.json"])
    put(Catalog(store), b=b"new")
    assert reader.get_latest("a") is None
    assert reader.get_latest("b") == b"new"
