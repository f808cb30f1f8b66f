"""A begin that cannot be read, and the load that it began: views of the past have it (H17)."""

import pyarrow as pa
import pytest

from reef.formats.wal_object import Job, WalKind
from reef.jobs import compact, ingest, repair, verify
from tests.support.bulk_jobs import append
from tests.support.sweep_world import NAME, USERS, World

ROWS = {b"before": b"v", b"loaded": b"v"}


@pytest.fixture
def world():
    """A load, and a snapshot that needs the log from before it."""
    world = World()
    with world.db.writer(NAME) as writer:
        writer.put("before", b"v")
    rows = pa.table({"id": [b"loaded"], "value": [b"v"]})
    world.lsn = world.run(lambda: ingest(world.db, NAME, rows)).lsn
    world.db.snapshot(NAME, name="kept")
    return world


def check(world):
    """Repair, and read the snapshot, as of the load, the changes and the newest state."""
    world.bucket.put(USERS.wal_object(world.lsn - 1), b"")
    done = world.run(lambda: repair(world.db, NAME, apply=True))
    assert [lost.lsn for lost in done.lost.lsns] == [world.lsn - 1]
    assert not done.lost.snapshots
    assert world.rows() == ROWS
    for _ in range(2):
        assert dict(world.db.reader(NAME, snapshot="kept").scan()) == ROWS
        with world.db.reader(NAME) as reader:
            assert dict(reader.as_of(lsn=world.lsn).scan()) == ROWS
            assert b"loaded" in [change.key for change in reader.changes()]
        assert world.run(lambda: verify(world.db, NAME, deep=True)).ok
        world.sweep_twice(retain_generations_s=1e6)
    return done


def test_H17_a_snapshot_has_a_load_whose_begin_was_voided(world):
    """H17: a repair that lets an ingest count without its begin lets it count in every view.

    Root: only the newest state had its rows, as they were folded. Readers of the past passed over
    the ingest, since its job had never begun, and a snapshot lacked an acknowledged load.
    """
    check(world)


def test_H17_also_if_the_header_of_the_begin_can_be_read(world):
    """H17: the slot of a damaged begin is skipped, also where its header is intact."""
    key = USERS.wal_object(world.lsn - 1)
    world.bucket.put(key, world.bucket.get(key)[:-4])
    world.run(lambda: repair(world.db, NAME, apply=True))
    assert world.rows() == ROWS
    assert dict(world.db.reader(NAME, snapshot="kept").scan()) == ROWS


def test_H17_also_if_it_was_folded_before(world):
    """H17: that it counted is known from the segments that a generation names."""
    world.fold()
    check(world)


def test_H17_an_ingest_that_did_not_count_does_not_count_without_its_begin(world):
    """H17, H67: an ingest of a job that was reaped long ago is passed over, whatever is skipped."""
    world.fold()
    reaped = Job("01REAPED", key="reaped")
    late = append(world.bucket, NAME, WalKind.INGEST, reaped)
    world.fold()
    world.bucket.put(USERS.wal_object(world.lsn - 1), b"")
    world.run(lambda: repair(world.db, NAME, apply=True))
    assert world.head().ingests_without_begin == (world.lsn,)
    assert late not in world.head().ingests_without_begin
    assert world.rows() == ROWS


def test_H17_a_load_whose_segment_is_lost_too_is_passed_over(world):
    """H17: a view that lets it count would read a segment that is gone: it is reported as
    passed over, and verify finds nothing more. Seed 123 of the damage machine."""
    world.fold()
    with world.db.writer(NAME) as writer:
        writer.put("loaded", b"newer")
    world.fold()
    world.run(lambda: compact(world.db, NAME, full=True))
    (segment,) = (k for k in world.keys("segments") if k.count("-") == 1 and k[0] == "0")
    world.bucket.delete(f"{USERS.segments}{segment}")
    world.bucket.put(USERS.wal_object(world.lsn - 1), b"")
    done = world.run(lambda: repair(world.db, NAME, apply=True))
    assert world.lsn in {lost.lsn for lost in done.lost.lsns if lost.history_only}
    assert world.head().ingests_without_begin == ()
    assert world.run(lambda: verify(world.db, NAME, deep=True)).ok
    assert world.rows() == {b"before": b"v", b"loaded": b"newer"}
