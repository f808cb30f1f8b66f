"""The cache of rows: never older than the memtable, and bounded."""

import pytest

from reef.engine.read.caches import KEYS_DROPPED_MAX, MISSING, RowCache
from reef.engine.rows.batch import Batch, encode_batch
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.wal_object import OneOp


def kept(*keys):
    """Return a cache with a row for each of some keys."""
    cache = RowCache(1 << 20)
    for key in keys:
        cache.keep(key, b"old", 3, cache.writes)
    return cache


def encoded(batch):
    """Return the operations of a batch as a writer applies them."""
    return encode_batch(batch, DEFAULT_SCHEMA, 1 << 30, 0).ops


def test_a_write_drops_its_own_keys_before_it_is_applied():
    """Others stay: a row that is written often does not cost the rest their places."""
    cache = kept(b"a", b"b")
    cache.applying([OneOp(b"a", 1, b"new")])
    assert set(cache.rows) == {b"b"}


def test_an_ingest_drops_every_row():
    """Its keys are not known before its segments are read."""
    cache = kept(b"a", b"b")
    cache.applying(segments=[object()])
    assert cache.rows == {}


def test_a_range_delete_drops_every_row():
    """It has no list of the keys that it deletes."""
    cache = kept(b"a", b"m", b"z")
    cache.applying([encoded(Batch().delete_range("b", "y"))])
    assert cache.rows == {}


def test_a_large_write_drops_every_row():
    """Cheaper than a lookup of each of its keys."""
    cache = kept(b"a", b"b")
    batch = Batch()
    for number in range(KEYS_DROPPED_MAX + 1):
        batch.put(f"k{number}", b"new")
    cache.applying([encoded(batch)])
    assert cache.rows == {}


@pytest.mark.parametrize("ended", [False, True])
def test_a_row_that_was_read_before_a_write_is_not_kept(ended):
    """It may be older than that write, whether or not the write has ended meanwhile."""
    cache = kept()
    writes = cache.writes
    cache.applying([OneOp(b"a", 1, b"new")])
    if ended:
        cache.applied()
    cache.keep(b"a", b"old", 3, writes)
    assert cache.rows.get(b"a", MISSING) is MISSING


def test_a_lost_track_drops_every_row_and_every_read_in_progress():
    """Nothing is known of the writes applied meanwhile."""
    cache = kept(b"a")
    writes = cache.writes
    cache.lost_track()
    cache.keep(b"b", b"old", 3, writes)
    assert cache.rows == {}


def test_it_is_bounded_in_bytes():
    """The oldest rows leave first."""
    cache = RowCache(64 << 10)
    for number in range(1000):
        cache.keep(b"%04d" % number, b"v", 100, cache.writes)
    assert cache._bytes <= 64 << 10
    assert b"0999" in cache.rows
    assert b"0000" not in cache.rows
