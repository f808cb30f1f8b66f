"""A stream of changes starts at its LSN: it does not read the log from the last fold on."""

import random

import pytest

import reef
from reef.engine.log.log import Log
from reef.engine.rows.batch import encode_batch
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.wal_object import BatchHeader, Job, WalHeader, WalKind, WalObject
from reef.paths import Namespace
from reef.telemetry import RequestMeter
from tests.support.bulk_jobs import append, stage

NAME = "users"


def put_object(db, lsn, write_id, after):
    """Fill a slot with a batch of one put, as a writer would."""
    header = WalHeader(
        lsn=lsn,
        kind=WalKind.BATCHES,
        epoch=1,
        writer_id="w",
        write_id=write_id,
        created_at_ms=0,
        after=after,
        schema_id=1,
        batches=(BatchHeader(1),),
    )
    record = encode_batch(reef.Batch().put(f"k{lsn}", b"v"), DEFAULT_SCHEMA, 1000).record
    assert Log(db.store, Namespace(NAME)).fill(lsn, WalObject.encode(header, (record,))).landed


def random_log(db, rng, slots):
    """Fill slots with batches that count or are void, fences, and loads; return their number."""
    ids, jobs = [], []
    for lsn in range(1, slots + 1):
        write_id, kind = f"id{lsn}", rng.random()
        if kind < 0.6:
            after = tuple(ids[-rng.randint(1, min(4, len(ids))) :]) if ids else None
            put_object(db, lsn, write_id, after)
        elif kind < 0.7:
            # The first id is a known winner; only those behind it may have lost their slots.
            void = (ids[-2], "lost") if len(ids) > 1 else None
            put_object(db, lsn, write_id, void)
        elif kind < 0.8:
            put_object(db, lsn, write_id, None)
        elif kind < 0.9 or not jobs:
            jobs.append(f"job{lsn}")
            write_id = append_job(db, WalKind.BEGIN, Job(jobs[-1]), lsn)
        else:
            job = rng.choice(jobs)
            segment = stage(db.store, NAME, {b"loaded%d" % lsn: b"1"}, job)
            write_id = append_job(db, WalKind.INGEST, Job(job, segments=(segment,)), lsn)
        ids.append(write_id)


def append_job(db, kind, job, lsn):
    """Fill a slot with a record of a job; return its write id."""
    append(db.store, NAME, kind, job, lsn)
    return Log(db.store, Namespace(NAME)).read(lsn).header.write_id


def summary(changes):
    """Return changes without their rows."""
    return [(change.lsn, change.seq, change.op, change.key) for change in changes]


@pytest.mark.parametrize("seed", range(8))
def test_H44_a_stream_from_any_lsn_is_the_rest_of_the_whole_one(seed, monkeypatch):
    """H44: with void objects, loads, ignored loads and long `after` lists at its start."""
    db, slots = reef.open("memory://"), 40
    db.create(NAME)
    random_log(db, random.Random(seed), slots)
    whole = summary(db.reader(NAME).changes())
    monkeypatch.setattr("reef.engine.history.changes.IDS_KEPT", 0)
    for after_lsn in range(slots + 1):
        rest = summary(db.reader(NAME).changes(after_lsn=after_lsn))
        assert rest == [change for change in whole if change[0] > after_lsn], after_lsn


def test_H44_objects_behind_a_gap_are_no_changes(monkeypatch):
    """H44: a stream after an LSN that the log has not reached waits for the gap to close."""
    monkeypatch.setattr("reef.engine.history.changes.IDS_KEPT", 0)
    db = reef.open("memory://")
    db.create(NAME)
    put_object(db, 1, "a", None)
    for lsn, after in ((4, ("a", "b", "c")), (5, None), (6, ("a", "b", "c", "d", "e"))):
        put_object(db, lsn, "abcdef"[lsn - 1], after)
    follow = {"follow": True, "timeout_s": 0}
    streams = [db.reader(NAME).changes(after_lsn=lsn, **follow) for lsn in (1, 2, 3, 4, 5, 6)]
    assert [summary(stream) for stream in streams] == [[], [], [], [], [], []]
    put_object(db, 2, "b", ("a",))
    put_object(db, 3, "c", ("b",))
    found = [[change.lsn for change in stream] for stream in streams]
    assert found == [[2, 3, 4, 5, 6], [3, 4, 5, 6], [4, 5, 6], [5, 6], [6], []]


@pytest.mark.parametrize("ack", ["prefix", "independent"])
def test_ten_changes_cost_the_same_behind_any_number_of_others(ack):
    """×1, ×10, ×100: a few GETs for ten changes; it was one for each object since the fold."""
    meter = RequestMeter()
    db = reef.open("memory://", meter=meter)
    gets, lists = [], []
    with db.writer(NAME, background=False, ack=ack) as writer:
        for count in (80, 720, 7200):
            for _ in range(count):
                last = writer.put("k", b"v").lsn
            reader = db.reader(NAME)
            meter.reset()
            assert len(list(reader.changes(after_lsn=last - 10))) == 10
            gets.append(meter.requests()["get"])
            lists.append(meter.requests()["list"])
    assert max(gets) <= 20
    assert max(lists) <= (4 if ack == "prefix" else 4 + 8), "a page has 1,000 names"
