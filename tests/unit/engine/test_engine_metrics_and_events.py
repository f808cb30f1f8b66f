"""Metrics and events: the engine as an operator sees it, by the names in the docs."""

import logging
import re
from pathlib import Path

import pytest

import reef
from reef.engine.log.log import Log
from reef.formats.wal_object import WalHeader, WalKind, WalObject
from reef.jobs import fold
from reef.paths import Namespace
from reef.stores import DiskCache, agree_on_cas
from reef.telemetry import Metrics
from tests.support.bulk_jobs import ingest

NAME = "users"
PAGE = Path(__file__).parents[3] / "docs/operations/metrics.md"


@pytest.fixture
def db():
    """Give an empty database in memory."""
    return reef.open("memory://")


def busy(db):
    """Do one of everything, so that every metric has a reason to be there."""
    agree_on_cas(db.store)
    first = db.writer(NAME, max_parallel_writes=2)
    reader = db.reader(NAME, refresh_interval_ms=1e9)
    for number in range(3):
        first.put(f"k{number}", b"v")
    ingest(db.store, NAME, {b"bulk": b"v"})
    first.put("behind the ingest", b"v")
    fold(db, NAME)
    reader.refresh()
    assert reader.get("k1") == b"v"
    with db.writer(NAME) as second:
        second.put("k", b"v")
        with pytest.raises(reef.FencedError):
            first.put("k", b"zombie")
    return reader


def test_every_metric_of_the_page_is_there(db, tmp_path):
    """The table in the docs and the program agree, in both directions."""
    busy(db)
    with db.writer("local", durability="local", local_log=tmp_path / "log") as local:
        local.put("k", b"v")
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`([\w.]+)`", row.split("|")[1])}
    of_cache = Metrics()
    DiskCache(db.store, str(tmp_path / "cache"), metrics=of_cache)
    assert documented == set(db.metrics.to_dict()) | set(of_cache.to_dict())


def test_each_void_object_is_counted_once_by_each_handle(db):
    """Whether it is replayed, listed, probed, or read again after a fold (H45)."""
    agree_on_cas(db.store)
    writer = db.writer(NAME)
    probing = db.reader(NAME, refresh_interval_ms=1e9)
    writer.put("k", b"1")
    last = writer._committer.tail.next_lsn
    after = (writer._committer.tail.rules.last_ids()[-2], "another")
    header = WalHeader(last, WalKind.BATCHES, 1, "w", "void", 0, after=after, schema_id=1)
    assert Log(db.store, Namespace(NAME)).fill(last, WalObject.encode(header)).landed
    voids = db.metrics.counter("log.void")
    probing.refresh()
    assert voids.value == 1
    listing = db.reader(NAME)
    assert voids.value == 2
    for reader in (probing, listing):
        reader._reopen()
    assert voids.value == 2, "it was counted before"
    db.writer(NAME).close()
    assert voids.value == 3
    assert listing.get("k") == b"1"


def test_the_counted_bytes(db):
    """Figures, not only names."""
    reader = busy(db)
    report = db.metrics.to_dict()
    assert report["commit.seconds"]["count"] == 5
    assert report["commit.object_rows"]["total"] == 7, "two objects were sent in vain"
    assert report["commit.object_bytes"]["max"] > 100
    assert report["commit.lost_slots"]["value"] == 2  # to the ingest, and to the second writer
    assert report["commit.fenced"]["value"] == 1
    assert report["open.fences"]["value"] == 4  # two each: the second opens while two are recorded
    assert report["commit.in_flight"]["value"] == report["commit.in_flight_bytes"]["value"] == 0
    assert report["reader.last_lsn"]["value"] == reader.last_lsn
    assert report["reader.lag_lsns"]["value"] == 6
    assert report["cache.misses"]["value"] > 0


def test_requests_per_operation(db):
    """The costs that docs/design/protocols.md states, as production would see them."""
    with db.writer(NAME) as writer:
        for number in range(10):
            writer.put(f"k{number}", b"v" * 100)
        fold(db, NAME)
        writer.refresh()
        for _ in range(2):
            assert writer.get("k1") == b"v" * 100
    reader = db.reader(NAME, refresh_interval_ms=1e9)
    reader.refresh()
    report = db.metrics.to_dict()
    assert report["commit.requests"] == {"count": 10, "total": 10, "p50": 1, "p99": 1, "max": 1}
    assert report["get.requests"]["total"] == 2, "the tail and the group, once"
    assert report["open_reader.requests"]["max"] <= 4
    assert report["refresh.requests"]["max"] == 2, "two probes"


def test_an_idle_reader_sends_about_one_request_a_second(db):
    """By the defaults: two probes every two seconds, however often it is asked."""
    db.writer(NAME).put("k", b"v")
    settings = reef.config.ReaderSettings()
    reader = db.reader(NAME)
    for _ in range(50):
        assert reader.get("k") == b"v"
    report = db.metrics.to_dict()
    assert "refresh.requests" not in report, "50 reads within the interval cost nothing"
    reader.refresh()
    per_refresh = db.metrics.to_dict()["refresh.requests"]["max"]
    assert per_refresh / (settings.refresh_interval_ms / 1000) <= 1.0


def test_the_log_is_silent_and_structured(db, caplog, capfd):
    """No handler of our own; an application that wants the lines gets names and values."""
    db.writer(NAME).close()
    assert capfd.readouterr() == ("", "")
    with caplog.at_level(logging.INFO, logger="reef"):
        db.writer(NAME).close()
    (line,) = caplog.messages
    assert line.startswith("opened namespace='users' epoch=2 ")
