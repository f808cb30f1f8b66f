"""What things cost: requests are exact."""

import pytest

from reef.catalog import Catalog, MemoryBlobCache
from reef.catalog.checkpoints import decode_pairs
from reef.stores import Meter, ReadBack, Retry
from reef.stores.memory import MemoryStore
from tests.unit.catalog.conftest import AT_ONCE, put, without_if_match


@pytest.fixture
def metered():
    """Return a warm catalog and the meter of its store."""
    meter = Meter(MemoryStore())
    catalog = Catalog(ReadBack(Retry(meter)), retention=AT_ONCE)
    put(catalog, a=b"1")
    meter.meter.reset()
    return catalog, meter.meter


def test_a_commit_is_two_puts_and_the_lease(metered):
    """Begin: the lease and the head. Commit: segment and head. End: the lease goes."""
    catalog, meter = metered
    session = catalog.session_write()
    assert meter.requests() == {"put": 1, "get": 1}
    assert session.get("a") == b"1"
    session.put("b", b"2")
    meter.reset()
    session.commit()
    assert meter.requests() == {"put": 2, "delete": 1}
    meter.reset()
    catalog.transact(lambda s: s.put("c", b"3"))
    assert meter.requests() == {"put": 3, "get": 1, "delete": 1}


def test_get_latest_on_a_warm_cache_is_one_get(metered):
    """The head; its segments are cached, and after a checkpoint the block is."""
    catalog, meter = metered
    assert catalog.get_latest("a") == b"1"
    assert catalog.scan_latest() == [(b"a", b"1")]
    assert meter.requests() == {"get": 2}
    catalog.compactor().compact_once()
    catalog.get_latest("a")
    meter.reset()
    assert catalog.get_latest("a") == b"1"
    assert catalog.get_latest("missing") is None
    assert meter.requests() == {"get": 2}


def test_the_cost_of_a_rebase(metered):
    """One doomed try at most; a process that knows better does not even send it."""
    catalog, meter = metered
    with catalog.session_write() as session:
        session.put("x", b"1")
        put(catalog, y=b"2")  # of this process: the session learns of it without a request
        meter.reset()
        session.commit()
        assert meter.requests() == {"put": 2, "delete": 1}
    with catalog.session_write() as session:
        session.put("x", b"2")
        put(Catalog(catalog.store), z=b"2")  # as another process would
        meter.reset()
        session.commit()
        # The attempt: segment, head, and its read-back; then the head and the other's
        # segment; after the wait the head again, and the second try.
        assert meter.requests() == {"put": 4, "get": 4, "delete": 1}


def test_numbered_heads_cost_a_listing_more():
    """Without If-Match the head is found by a listing."""
    meter = Meter(without_if_match())
    catalog = Catalog(ReadBack(Retry(meter)))
    put(catalog, a=b"1")
    meter.meter.reset()
    assert catalog.get_latest("a") == b"1"
    assert meter.meter.requests() == {"get": 1, "list": 1}
    meter.meter.reset()
    catalog.transact(lambda s: s.put("c", b"3"))
    assert meter.meter.requests() == {"put": 3, "get": 1, "list": 1, "delete": 1}


def test_a_large_checkpoint_is_read_by_key(monkeypatch):
    """Of 100,000 keys, a get fetches the tail and one block, and decodes nothing else."""
    meter = Meter(MemoryStore())
    catalog = Catalog(meter, retention=AT_ONCE)
    pairs = {f"key-{number:06}": b"value-%06d" % number * 4 for number in range(100_000)}
    put(catalog, **pairs)
    catalog.compactor().compact_once()
    blocks = []

    def counted(data, name, offset):
        blocks.append(offset)
        return decode_pairs(data, name, offset)

    monkeypatch.setattr("reef.catalog.checkpoints.decode_pairs", counted)
    for cache in (None, 1 << 20):
        other = Catalog(meter, cache=cache)
        other.snapshot()
        meter.meter.reset()
        blocks.clear()
        assert other.get_latest("key-054321") == b"value-054321" * 4
        assert other.get_latest("key-054321x") is None
        assert len(blocks) == 2
        assert meter.meter.requests() == {"get": 6 if cache is None else 4}
        assert sum(tally.bytes for tally in meter.meter.counts().values()) < 100_000
    assert len(other.scan_latest("key-099990")) == 10
    assert len(blocks) <= 4
    assert other.verify().keys == 100_000


def test_a_snapshot_never_downloads_a_checkpoint(metered):
    """Its number is in the head."""
    catalog, meter = metered
    catalog.compactor().compact_once()
    meter.reset()
    other = Catalog(catalog.store)
    assert other.snapshot().checkpoint_seq == 1
    assert meter.requests() == {"get": 2}  # how the bucket swaps, and the head


def test_segments_are_fetched_together_and_once(metered):
    """A reader of k segments sends k GETs, in parallel; then none."""
    catalog, meter = metered
    for number in range(9):
        put(catalog, **{f"k{number}": b"x"})
    other = Catalog(catalog.store)
    other.snapshot()
    meter.reset()
    with other.session_read() as session:
        assert len(session.scan()) == 10
        assert session.get("a") == b"1"
        assert meter.requests() == {"put": 1, "get": 11}


def test_decoded_segments_have_a_bound_of_their_own(metered, monkeypatch):
    """In bytes: large segments are decoded again, out of the cache, and not fetched again."""
    monkeypatch.setattr("reef.catalog.segments.DECODED_BYTES_MAX", 3000)
    catalog, meter = metered
    segments = catalog._writable().segments
    for number in range(9):
        put(catalog, **{f"k{number}": b"x" * 1000})
        assert segments.decoded_bytes <= 3000
    put(catalog, large=b"x" * 5000)
    meter.reset()
    for _ in range(2):
        assert len(catalog.scan_latest()) == 11
        assert 1000 < segments.decoded_bytes <= 3000
    assert meter.requests() == {"get": 2}


def test_the_cache_can_be_shared_bounded_or_left_out(metered):
    """Blobs are kept by name and tag; without a cache everything is read again."""
    catalog, meter = metered
    cache = MemoryBlobCache(1000)
    readers = [Catalog(catalog.store, cache=cache) for _ in range(2)]
    for reader in readers:
        assert reader.get_latest("a") == b"1"
    assert meter.requests() == {"get": 5}  # two each for the bucket and the head, one segment
    bare = Catalog(catalog.store, cache=None)
    bare.get_latest("a")
    meter.reset()
    bare.get_latest("a")
    assert meter.requests() == {"get": 2}
    for number in range(10):
        cache.put("name", str(number), bytes(200))
    assert cache.bytes <= 1000
    assert len(cache) == 2
    assert cache.get("name", "9") == bytes(200)
    assert cache.get("name", "0") is None
    cache.put("name", "large", bytes(2000))
    assert cache.get("name", "large") is None
    cache.forget("name", "9")
    assert cache.get("name", "9") is None
