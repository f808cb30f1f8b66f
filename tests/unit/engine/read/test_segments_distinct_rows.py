"""Rows of which it is known that no key comes twice are not compared again: when that is said."""

import numpy as np
import pytest

import reef
from reef.engine.read import merge
from reef.engine.read.caches import ByteCache
from reef.engine.read.segments import SegmentStore
from reef.formats.wal_object import OpKind
from reef.jobs import fold
from reef.manifest.head import HeadFinder
from reef.paths import Namespace
from tests.support.compaction import ingest_rows

NAME = "n"
KEYS = [f"key-{number:05}" for number in range(3000)]


@pytest.fixture
def db():
    """Give a database in memory."""
    return reef.open("memory://")


def pieces(db, numbers=None):
    """Return the rows of the only segment's pages, twice: read, and from memory."""
    (entry,) = HeadFinder(db.store, Namespace(NAME)).find().manifest.segments
    segments = SegmentStore(db.store, Namespace(NAME), ByteCache(1 << 30))
    pages = range(len(segments.tail(entry).index.pages.rows)) if numbers is None else numbers
    return [segments.rows(entry, list(pages)) for _ in range(2)]


def write(db):
    """Write all keys, and fold."""
    with db.writer(NAME, background=False) as writer:
        batch = reef.Batch()
        for key in KEYS:
            batch.put(key, b"value" * 20)
        writer.write(batch)
    fold(db, NAME, group_bytes=4096)


def test_keys_that_come_once_are_known_to(db):
    """In a part of them too; not in pages that are out of order."""
    write(db)
    first, again = pieces(db)
    assert len(first) == len(again) == len(KEYS)
    assert first.distinct
    assert again.distinct
    assert again.slice(5, 10).distinct
    assert again.with_lsn(7).distinct
    assert not again.take(np.array([3, 3])).distinct
    assert not pieces(db, [2, 1])[1].distinct


def test_a_key_that_comes_twice_is_seen(db):
    """Wherever it is: the scan shows its first version only, which is the newest."""
    db.create(NAME)
    rows = [(key.encode(), OpKind.PUT, {1: b"new"}) for key in KEYS]
    rows.insert(1235, (KEYS[1234].encode(), OpKind.PUT, {1: b"old"}))
    ingest_rows(db, NAME, rows)
    fold(db, NAME)
    first, again = pieces(db)
    assert len(first) == len(again) == len(KEYS) + 1
    assert not first.distinct
    assert not again.distinct
    with db.reader(NAME) as reader:
        for _ in range(2):
            assert dict(reader.scan()) == {key.encode(): b"new" for key in KEYS}


def test_scans_compare_no_keys(db, monkeypatch):
    """The page block has the number of different keys of each page."""
    write(db)
    compared = []
    is_first = merge._is_first
    monkeypatch.setattr(merge, "_is_first", lambda keys: compared.append(1) or is_first(keys))
    with db.reader(NAME) as reader:
        assert sum(len(batch) for batch in reader.scan_arrow()) == len(KEYS)
        assert not compared
