"""A disk cache that holds wrong bytes costs a request, and is never the end of a read."""

import pytest

import reef
from reef import stores
from reef.errors import CorruptionError
from reef.jobs import fold
from reef.stores import DiskCache, Wrapper
from reef.telemetry import Metrics

NAME = "users"
ROWS = {b"k%03d" % n: b"v" * 50 for n in range(200)}


class BadTransfer(Wrapper):
    """Flips a bit in ranges of segments, a given number of times."""

    times = 0

    def get_range(self, key, start, end):
        body = self.inner.get_range(key, start, end)
        if not self.times or "/segments/" not in key:
            return body
        self.times -= 1
        middle = len(body) // 2
        return body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]

    def get_ranges(self, key, ranges):
        return [self.get_range(key, start, end) for start, end in ranges]


@pytest.fixture
def bucket():
    """Give a bucket with one folded namespace."""
    bucket = stores.open("memory://")
    db = reef.Database(bucket)
    with db.writer(NAME) as writer:
        batch = reef.Batch()
        for key, value in ROWS.items():
            batch.put(key, value)
        writer.write(batch)
    fold(db, NAME, group_bytes=1000)
    return bucket


def cached(bucket, tmp_path, metrics=None):
    """Return a new process's reader through the cache directory."""
    store = DiskCache(bucket, str(tmp_path / "cache"), metrics=metrics)
    return reef.Database(Wrapper(store)).reader(NAME)


@pytest.mark.parametrize("times", [1, 2])
def test_H8_a_bad_transfer_is_not_kept(bucket, tmp_path, times):
    """H8: its bytes were cached with a matching checksum of their own; they are dropped, and the
    bucket is asked again. Tails and groups alike, also under other wrappers.
    """
    bad = BadTransfer(bucket)
    reader = cached(bad, tmp_path)
    bad.times = times
    assert reader.get("k000") == ROWS[b"k000"]  # the tail comes wrong
    bad.times = times
    assert dict(reader.scan()) == ROWS  # a group does
    assert bad.times == 0
    assert dict(cached(bucket, tmp_path).scan()) == ROWS


def test_H8_damage_at_rest_is_reported_and_not_cached(bucket, tmp_path):
    """H8: the object itself is wrong; once it is repaired the cache does not bring that back."""
    bad = BadTransfer(bucket)
    bad.times = 100
    with pytest.raises(CorruptionError):
        cached(bad, tmp_path).get("k000")
    assert dict(cached(bucket, tmp_path).scan()) == ROWS


def test_H8_damaged_cache_files_are_read_past(bucket, tmp_path):
    """H8: every file of the cache has a flipped bit: all rows are there, and it is counted."""
    assert dict(cached(bucket, tmp_path).scan()) == ROWS
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    for path in files:
        body = bytearray(path.read_bytes())
        if body:
            body[len(body) // 2] ^= 1
            path.write_bytes(bytes(body))
    metrics = Metrics()
    assert dict(cached(bucket, tmp_path, metrics).scan()) == ROWS
    assert metrics.to_dict()["disk_cache.damaged"]["value"] > 1
