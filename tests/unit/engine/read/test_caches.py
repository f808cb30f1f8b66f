"""The cache: bounded in bytes, always; the least recently used leaves first."""

import gc
import random
import threading
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import reef
from reef.engine.read.caches import ByteCache
from reef.engine.read.segments import SegmentStore
from reef.errors import NotFoundError
from reef.jobs import fold
from reef.paths import Namespace
from reef.telemetry import Metrics
from tests.support.compaction import head_of
from tests.unit.engine.model import few


def load(cache, key, size):
    """Get a value that takes `size` bytes; return whether it had to be loaded."""
    loads = []
    assert cache.get(key, lambda: (loads.append(1) or f"value of {key}", size)) == f"value of {key}"
    return bool(loads)


@few
@given(
    st.integers(0, 50),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 30)), max_size=60),
)
def test_it_is_a_plain_model_with_a_bound(bytes_max, calls):
    """Against a list in order of use: the same hits, the same evictions, never a byte too many."""
    cache, model = ByteCache(bytes_max), {}
    for key, size in calls:
        assert load(cache, key, size) == (key not in model)
        kept = model.pop(key, size)
        if kept <= bytes_max:
            model[key] = kept
        while sum(model.values()) > bytes_max:
            del model[next(iter(model))]
        assert cache.bytes == sum(model.values()) <= bytes_max


def test_what_does_not_fit_is_not_kept_and_evicts_nothing():
    """A value larger than the whole cache passes through."""
    cache = ByteCache(10)
    load(cache, "small", 4)
    assert load(cache, "huge", 11)
    assert load(cache, "huge", 11)
    assert not load(cache, "small", 4)


def test_use_keeps_a_value():
    """The least recently read one is evicted, not the oldest."""
    cache = ByteCache(3)
    for key in "abc":
        load(cache, key, 1)
    load(cache, "a", 1)
    load(cache, "d", 1)
    assert not load(cache, "a", 1)
    assert load(cache, "b", 1)


@pytest.mark.parametrize("what", ["groups", "range deletes"])
@pytest.mark.quiet
def test_a_tail_counts_with_its_size_in_memory(what):
    """Decoded, not as stored: thousands of groups or deletes in order compress to next to none."""
    db = reef.open("memory://")
    writer = db.writer("users", background=False)
    keys, batch = [b"%08d" % number for number in range(5001)], reef.Batch()
    for key, following in pairwise(keys):
        batch.delete_range(key, following) if what == "range deletes" else batch.put(key, b"")
    writer.write(batch)
    fold(db, "users", group_bytes=1)
    (entry,) = head_of(db, "users").segments
    cache = ByteCache(1 << 30)
    segments = SegmentStore(db.store, Namespace("users"), cache)
    gc.collect()
    tracemalloc.start()
    try:
        kept = segments.tail(entry)
        gc.collect()
        takes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(kept.index) + len(kept.range_tombstones) == 5000
    assert takes > 5 * entry.tail_bytes
    assert takes / 2 < cache.bytes < 2 * takes


def test_H9_not_found_is_never_kept():
    """H9: a load that fails leaves nothing behind; the next one asks again."""
    cache = ByteCache(10)

    def missing():
        raise NotFoundError("swept")

    for _ in range(2):
        with pytest.raises(NotFoundError):
            cache.get("k", missing)
    assert cache.bytes == 0
    assert load(cache, "k", 1)


def test_hits_misses_and_bytes_are_counted():
    """The metrics that show whether it is large enough."""
    metrics = Metrics()
    cache = ByteCache(10, metrics)
    for key in ("a", "a", "b"):
        load(cache, key, 4)
    assert metrics.counter("cache.hits").value == 1
    assert metrics.counter("cache.misses").value == 2
    assert metrics.gauge("cache.bytes").value == 8


def test_threads_that_miss_at_once_count_a_value_once():
    """Both load, one is kept; its bytes are not counted twice."""
    cache, together = ByteCache(100), threading.Barrier(4)

    def get():
        cache.get("k", lambda: (together.wait(60), 10))

    threads = [threading.Thread(target=get) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.bytes == 10


def test_a_scan_that_does_not_fit_evicts_nothing():
    """Its pages would evict each other, and those that point reads use."""
    with reef.open("memory://") as db:
        with db.writer("data", background=False) as writer:
            for start in range(0, 4000, 1000):
                batch = reef.Batch()
                for number in range(start, start + 1000):
                    batch.put(f"{number:05}", random.Random(number).randbytes(200))
                writer.write(batch)
        fold(db, "data")
        with db.reader("data", cache_bytes=200_000) as reader:
            assert len(reader.get("00000")) == 200
            kept = reader._view().segments._cache.bytes
            assert reader.count() == sum(1 for _ in reader.scan()) == 4000
            assert reader._view().segments._cache.bytes == kept
