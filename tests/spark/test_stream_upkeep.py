"""Namespaces that only streams write are folded and compacted by the processes that commit."""

from functools import partial

import pytest

import reef
import reef.jobs
from reef.config import BackgroundSettings
from reef.jobs import background
from reef.jobs.compact.job import Compactor
from reef.spark import options, stream_sink
from reef.telemetry import RequestMeter
from tests.spark.streaming import Stream, numbered
from tests.spark.test_stream_apply import contents, copying
from tests.spark.test_stream_sink import SCHEMA, SIZES, query
from tests.spark.writing import numbers_of


@pytest.fixture
def table(db):
    """An empty namespace."""
    db.create("t", SCHEMA)
    return db


@pytest.fixture(autouse=True)
def small_shares(monkeypatch):
    """Let `appendBytes` alone decide how much a task keeps."""
    monkeypatch.setattr(stream_sink, "SHARE_BYTES_MIN", 1)


def requests_of_each(monkeypatch, query, count):
    """Run micro-batches; return how many requests each of them has sent."""
    meter = RequestMeter()
    monkeypatch.setattr(
        options.TableLocation, "open", lambda self: reef.stores.open(self.url, meter=meter)
    )
    sums = []
    for batch_id in range(count):
        meter.reset()
        query.run(batch_id, numbered(batch_id), numbered(1000 + batch_id))
        sums.append(sum(meter.requests().values()))
    return sums


@pytest.fixture
def early_compaction(monkeypatch):
    """Let eight segments be too many, not 64."""
    early = partial(background.Compactor, inputs_max=8)
    monkeypatch.setattr(background, "Compactor", early)


def segments_and_unfolded(db, name="t"):
    """Return how many segments there are, and how many objects are in the unfolded log."""
    stats = db.stats(name)
    return sum(len(level.segments) for level in stats.levels), stats.log.objects


@SIZES
def test_the_requests_of_a_micro_batch_do_not_grow(table, url, size, monkeypatch):
    """The 60th costs what the 5th does, or one of the objects since the last fold more."""
    sums = requests_of_each(monkeypatch, query(url, size), 64)
    cycle = background.FOLD_OBJECTS // {"append": 1, "ingest": 2}[size]
    usual = [sum for place, sum in enumerate(sums, 1) if place % cycle]
    assert max(usual) <= sums[4] + 2 * background.FOLD_OBJECTS
    assert max(usual[len(usual) // 2 :]) <= max(usual[: cycle - 1]) + 3
    assert sum(sums) <= 1.2 * len(sums) * max(usual)
    assert len(numbers_of(table)) == 128
    assert reef.jobs.verify(table, "t", deep=True).problems == []


@SIZES
def test_segments_of_many_folds_are_compacted(table, url, size, monkeypatch, early_compaction):
    """The number of segments stays small, too."""
    monkeypatch.setattr(background, "FOLD_OBJECTS", 2)
    running = query(url, size)
    for batch_id in range(40):
        running.run(batch_id, numbered(batch_id), numbered(1000 + batch_id))
    segments, unfolded = segments_and_unfolded(table)
    assert segments < 14
    assert unfolded < 3
    assert len(numbers_of(table)) == 80
    assert reef.jobs.verify(table, "t", deep=True).problems == []


def test_a_compactor_that_died_is_replaced(table, url, monkeypatch, early_compaction):
    """Its role stays in the manifest; too many segments show that it does nothing."""
    monkeypatch.setattr(background, "FOLD_OBJECTS", 1)
    monkeypatch.setattr(background, "SEGMENTS_MAX", 20)
    running = query(url)
    real = Compactor._run
    monkeypatch.setattr(Compactor, "_run", lambda *_: 1 / 0)
    monkeypatch.setattr(Compactor, "close", lambda self: None)
    for batch_id in range(12):
        running.run(batch_id, numbered(batch_id))
    before, _ = segments_and_unfolded(table)
    assert before == 12
    monkeypatch.setattr(Compactor, "_run", real)
    for batch_id in range(12, 40):
        running.run(batch_id, numbered(batch_id))
    assert segments_and_unfolded(table)[0] < 25
    assert len(numbers_of(table)) == 40


def test_a_live_writer_folds_its_own_log(table, url, monkeypatch):
    """A stream does not, before the log is much longer than a writer lets it become."""
    monkeypatch.setattr(background, "FOLD_OBJECTS", 2)
    limits = BackgroundSettings(fold_objects=5)
    monkeypatch.setattr(stream_sink, "Upkeep", lambda db, name: background.Upkeep(db, name, limits))
    running = query(url)
    with table.writer("t", background=False) as writer:
        writer.upsert(numbered(1000))
        for batch_id in range(7):
            running.run(batch_id, numbered(batch_id))
        assert segments_and_unfolded(table)[0] == 0
        for batch_id in range(7, 10):
            running.run(batch_id, numbered(batch_id))
        assert segments_and_unfolded(table)[0] >= 1
        writer.upsert(numbered(2000))
    assert len(numbers_of(table)) == 12


@SIZES
@pytest.mark.parametrize("error", [reef.UnavailableError("no network"), ZeroDivisionError()])
def test_a_fold_that_fails_fails_no_micro_batch(table, url, size, error, monkeypatch):
    """The rows are committed before; the failure is an event."""

    def fails(*_, **__):
        raise error

    monkeypatch.setattr(background, "FOLD_OBJECTS", 1)
    monkeypatch.setattr(background, "fold", fails)
    seen = []
    monkeypatch.setattr(background.Upkeep, "_note", lambda self, error: seen.append(error))
    query(url, size).run(0, numbered(1), numbered(2))
    assert numbers_of(table) == {"k0001": 1, "k0002": 2}
    assert seen == [error]


def test_an_option_leaves_the_log_alone(table, url, monkeypatch):
    """For namespaces that another process maintains."""
    monkeypatch.setattr(background, "FOLD_OBJECTS", 1)
    running = query(url, background="false")
    for batch_id in range(3):
        running.run(batch_id, numbered(batch_id))
    assert segments_and_unfolded(table) == (0, 3)


def test_copies_are_folded(table, url, monkeypatch):
    """Changes that are applied elsewhere are micro-batches like any other."""
    monkeypatch.setattr(background, "FOLD_OBJECTS", 3)
    stream = Stream(url, startingLsn=0)
    copy = copying(url, stream)
    for number in range(6):
        with table.writer("t", background=False) as writer:
            writer.upsert(numbered(number))
        copy.run(number, stream.next())
        stream.done()
    segments, unfolded = segments_and_unfolded(table, "copy")
    assert segments >= 1
    assert unfolded < 3
    assert contents(table, "copy") == contents(table)
