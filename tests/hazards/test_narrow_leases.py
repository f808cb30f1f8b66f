"""H74: a lease pins the point in time that its reader has chosen, and nothing that came later."""

from dataclasses import replace

import pytest

import reef
from reef.engine.handles.database import Database
from reef.errors import UnavailableError
from reef.jobs import BulkJob
from reef.manifest.roots import find_generation_leases
from reef.stores import Wrapper
from tests.support.sweep_world import DAY_S, GRACE_S, NAME, USERS, World, folded_world
from tests.unit.jobs.test_ingest import _plain as plain

LONG = {"lease_ttl_s": 10.0 * DAY_S, "cache_bytes": 0, "row_cache_bytes": 0}
ROWS = {b"k%d" % number: b"v" for number in range(5)}


@pytest.fixture
def world():
    """A namespace with five rows, folded into one segment."""
    return folded_world()


def put(world: World, key: str, value: bytes) -> int:
    """Commit one row; return its LSN."""
    with world.db.writer(NAME) as writer:
        return writer.put(key, value).lsn


def ingest(world: World, key: bytes) -> str:
    """Commit one row by a bulk job, without a fold; return its segment's id."""
    job = BulkJob(world.db, NAME)
    staged = job.staging.stage([plain([key])])
    job.commit(staged)
    (segment_id,) = (entry.id for entry in staged)
    return segment_id


def churn(world: World, rounds: int = 3) -> list[int]:
    """Supersede every segment and fold the log several times, with a sweep after each round;
    return the LSNs that were folded.
    """
    lsns = []
    for number in range(rounds):
        lsns.append(put(world, "churn", b"%d" % number))
        world.fold()
        world.compact()
        world.advance(GRACE_S + 10)
        world.sweep_twice()
    return lsns


def segments(world: World) -> set[str]:
    """Return the ids of all segments in the bucket."""
    return {key.removesuffix(".seg") for key in world.keys("segments")}


def named(world: World) -> set[str]:
    """Return the ids of the segments that the head names."""
    return {entry.id for entry in world.head().segments}


def records(world: World):
    """Return the records of all leases."""
    found = find_generation_leases(world.bucket, USERS, world.bucket.now(), 1.0)
    return [lease.record for lease in found]


@pytest.mark.parametrize("if_match", [True, False])
def test_H74_a_held_lease_under_churn_pins_only_its_own_objects(world, if_match):
    """H74: the reader's segment, log and manifest stay. Everything that was superseded after it
    opened is deleted while it is open, and its own objects after it was closed.
    """
    put(world, "late", b"in the log")
    own, floor = named(world), world.head().wal_floor
    store = Wrapper(world.bucket)
    store.capabilities = replace(world.bucket.capabilities, if_match=if_match)
    reader = Database(store).reader(NAME, pin=True, **LONG)
    later = churn(world)
    assert segments(world) == own | named(world)
    assert not own & named(world)
    needed = range(floor - 1, reader.last_lsn + 1)
    assert set(needed) <= set(world.slots())
    assert not set(world.slots()) & set(later[:-1])
    kept = {int(key.split(".")[0]) for key in world.keys("manifest")}
    assert kept & set(range(10)) == {reader.generation}
    assert world.run(lambda: dict(reader.scan())) == {**ROWS, b"late": b"in the log"}
    world.run(reader.close)
    world.sweep_twice()
    assert segments(world) == named(world)


def test_H74_a_segment_that_was_ingested_in_its_log_is_pinned(world):
    """H74, H54: the reader's generation does not name it; an ingest in its log does."""
    loaded = ingest(world, b"loaded")
    with world.run(lambda: world.db.reader(NAME, pin=True, **LONG)) as reader:
        assert loaded not in named(world)
        churn(world)
        assert loaded in segments(world)
        assert world.run(lambda: dict(reader.scan())).keys() == {*ROWS, b"loaded"}


def test_H74_an_ingest_after_the_point_in_time_is_not_pinned(world):
    """H74: the log of the reader ends before it, though it was folded by a later generation."""
    with world.run(lambda: world.db.reader(NAME, pin=True, **LONG)):
        later = ingest(world, b"later")
        churn(world)
        assert later not in segments(world)


@pytest.mark.parametrize("wanted", ["generation", "snapshot"])
def test_H74_a_reader_of_the_past_pins_only_the_objects_it_reads(world, wanted):
    """H74: a lease on a generation or a snapshot is narrowed as that of a reader of the head."""
    snapshot = world.db.snapshot(NAME, "before")
    own = named(world)
    target = {"generation": {"as_of": snapshot.generation}, "snapshot": {"snapshot": "before"}}
    with world.run(lambda: world.db.reader(NAME, **target[wanted], **LONG)) as reader:
        (lease,) = records(world)
        assert (lease.generation, lease.last_lsn) == (snapshot.generation, reader.last_lsn)
        world.run(snapshot.release)
        churn(world)
        assert segments(world) == own | named(world)
        assert world.run(lambda: dict(reader.scan())) == ROWS


def test_H74_a_narrow_lease_whose_manifest_is_lost_pins_everything_later(world):
    """H74: its needs are unknown, so nothing that was superseded after it is deleted."""
    old = named(world)
    reader = world.run(lambda: world.db.reader(NAME, pin=True, **LONG))
    world.compact()
    middle = named(world)
    world.compact()
    world.bucket.delete(USERS.manifest(reader.generation))
    world.advance(GRACE_S + 10)
    world.sweep_twice()
    assert segments(world) == old | middle | named(world)


class Refuses(Wrapper):
    """A store whose renewals do not respond for a while."""

    away = True

    def replace(self, key, body, tag):
        if self.away:
            raise UnavailableError("the store is away")
        return self.inner.replace(key, body, tag)


def test_H74_a_lease_that_could_not_be_narrowed_stays_wide_until_it_is_renewed(world):
    """H74: either form protects the reader, so a store that is away costs only space."""
    store = Refuses(world.bucket)
    reader = Database(store).reader(NAME, pin=True, lease_ttl_s=60.0)
    (lease,) = records(world)
    assert lease.last_lsn is None
    store.away = False
    world.advance(30)
    assert world.run(lambda: dict(reader.scan())) == ROWS
    (lease,) = records(world)
    assert lease.last_lsn == reader.last_lsn


def test_H74_writers_and_bulk_jobs_hold_wide_leases(world):
    """H74: they append to the log, which a narrow lease would not pin."""
    job = BulkJob(world.db, NAME)
    assert [lease.last_lsn for lease in records(world)] == [None]
    job.abort()


def test_H22_a_reader_whose_lease_was_reaped_before_it_is_narrowed_raises(world):
    """H22, H67: objects may have been deleted before the renewal; the view is lost, not wrong."""

    class Reaps(Wrapper):
        times = 1

        def replace(self, key, body, tag):
            if "/leases/" in key and self.times:
                self.times -= 1
                self.inner.delete(key)
            return self.inner.replace(key, body, tag)

    reader = Database(Reaps(world.bucket)).reader(NAME, pin=True, **LONG)
    with pytest.raises(reef.ConflictError, match="was reaped"):
        dict(reader.scan())
