"""The sweep: condemn, wait, delete; and the objects that pins keep."""

import msgspec
import pytest

import reef
from reef.formats.manifest import CursorEntry, SnapshotEntry
from reef.formats.wal_object import Job, WalKind
from reef.jobs import fold, sweep
from reef.manifest import edits
from reef.manifest.head import HeadFinder, Publisher
from reef.manifest.roots import job_of, oldest_to_retain, staged_id
from reef.stores import Wrapper
from reef.testing import Simulation
from tests.support.bulk_jobs import append, ingest, stage
from tests.support.sweep_world import (
    DAY_S,
    GRACE_S,
    NAME,
    USERS,
    World,
    condemned_keys,
    garbage_keys,
)


@pytest.fixture
def world():
    """Give a namespace with five rows in the log, folded into one segment."""
    world = World()
    with world.db.writer(NAME) as writer:
        for number in range(5):
            writer.put(f"k{number}", b"v")
    world.fold()
    return world


ROWS = {b"k%d" % number: b"v" for number in range(5)}


# --- the course of things -------------------------------------------------------------


def test_a_dry_run_writes_nothing_and_says_what_would_go(world):
    """The default: names, bytes and reasons."""
    world.advance(DAY_S)
    before = [(info.key, info.tag) for info in world.bucket.list()]
    report = sweep(world.db, NAME, retain_generations_s=0)
    assert [(info.key, info.tag) for info in world.bucket.list()] == before
    assert not report.applied
    assert {doomed.key.split("/")[0] for doomed in report.condemned} == {"manifest", "wal"}
    assert report.condemned_bytes == sum(doomed.bytes for doomed in report.condemned) > 0
    assert report.kept["fence objects in the log"] == 1
    assert report.to_dict()["condemned"][0]["why"]


def test_one_sweep_condemns_and_a_later_one_deletes(world):
    """In between is the grace period; the rows are the same throughout."""
    first = world.sweep()
    assert len(garbage_keys(first)) == 6  # two manifests, and batches 2 to 5 of slots 1 to 6
    assert first.deleted == ()
    assert condemned_keys(world.head()) == garbage_keys(first)
    world.advance(GRACE_S / 2)
    assert world.sweep().deleted == ()
    world.advance(GRACE_S / 2 + 10)
    second = world.sweep()
    assert set(second.deleted) >= set(garbage_keys(first))
    assert world.slots() == [1, 6], "the fence, and the one just below the floor"
    assert world.rows() == ROWS


def test_a_sweep_with_nothing_to_do_publishes_nothing(world):
    """No generation is spent on it."""
    assert world.sweep(retain_generations_s=DAY_S).condemned == ()
    assert world.head().generation == 3


def test_a_head_that_moved_is_read_again(world):
    """A plan is published on the very head it was made on, or made again (H32)."""

    class Rival(Wrapper):
        """Publishes another manifest after each listing of the segments."""

        moves = 3

        def list(self, prefix="", start_after=""):
            if prefix == USERS.segments and self.moves:
                self.moves -= 1
                Publisher(self.inner, USERS).publish(lambda h: edits.raise_writer_epoch(h, 1))
            return self.inner.list(prefix, start_after)

    report = world.sweep(reef.Database(Rival(world.bucket)))
    assert report.generation == 7, "three by the rival, one by the sweep"
    world.advance(10)
    Rival.moves = 1000
    with pytest.raises(reef.ConflictError, match="during each of 10 plans"):
        world.sweep(reef.Database(Rival(world.bucket)))


def test_two_concurrent_sweeps():
    """One of them may be overtaken; nothing is lost and nothing is left."""
    sim = Simulation(7)
    db = reef.Database(sim.bucket)
    with db.writer(NAME) as writer:
        for number in range(4):
            writer.put(f"k{number}", b"v")
    fold(db, NAME)
    Publisher(sim.bucket, USERS).publish(lambda h: msgspec.structs.replace(h, grace_ms=1000))
    for name in ("a", "b"):
        node = sim.process(name)

        def work(node=node):
            for _ in range(3):
                sweep(reef.Database(node.store()), NAME, apply=True, retain_generations_s=0)
                node.runtime.sleep(4)

        node.spawn(work)
    sim.run()
    assert len(list(sim.bucket.list(USERS.wal))) == 2
    assert len(dict(db.reader(NAME).scan())) == 4


def test_listings_page_by_page():
    """A page size of one shows the same."""
    world = World(page=1)
    with world.db.writer(NAME) as writer:
        for number in range(5):
            writer.put(f"k{number}", b"v")
    world.fold()
    assert len(garbage_keys(world.sweep())) == 6


# --- roots ----------------------------------------------------------------------------


def test_generations_are_retained_for_a_day(world):
    """A superseded segment stays as long as a retained generation names it."""
    (old,) = world.compact()
    world.advance(DAY_S - 3600)
    world.sweep(retain_generations_s=DAY_S)
    assert f"segments/{old}.seg" not in condemned_keys(world.head())
    world.advance(3700)
    assert f"segments/{old}.seg" in world.sweep_twice(retain_generations_s=DAY_S)
    assert f"{old}.seg" not in world.keys("segments")
    assert world.rows() == ROWS


def test_there_are_never_more_than_so_many_generations(world):
    """Whatever their age."""
    for _ in range(5):
        world.publish()
    report = world.sweep(retain_generations_s=DAY_S, retain_generations_max=3)
    assert report.oldest_retained == 6
    doomed = {key for key in garbage_keys(report) if key.startswith("manifest/")}
    assert doomed == {f"manifest/{g:020}.manifest.json" for g in range(1, 6)}


def test_a_generation_ends_when_the_next_one_begins():
    """It counts how long ago it was the head, not how long ago it became it."""
    head = edits.new_namespace(reef.formats.schema.DEFAULT_SCHEMA)
    head = msgspec.structs.replace(head, generation=4)
    dates_s = {1: 0.0, 2: 100.0, 3: 200.0, 4: 300.0}
    assert oldest_to_retain(head, dates_s, before_s=150.0, count_max=900) == 2
    assert oldest_to_retain(head, dates_s, before_s=99.0, count_max=900) == 1
    assert oldest_to_retain(head, dates_s, before_s=9999.0, count_max=900) == 4
    assert oldest_to_retain(head, dates_s, before_s=0.0, count_max=2) == 3


def test_a_pinned_generation_keeps_all_that_it_needs(world):
    """Its manifest, its segments, and the log from its floor."""
    with world.db.writer(NAME) as writer:
        writer.put("later", b"1")
        writer.put("later", b"2")
    pinned = world.head()
    world.publish(snapshots=(SnapshotEntry("s1", pinned.generation),))
    world.fold()
    world.compact()
    world.advance(DAY_S)
    world.sweep_twice()
    assert HeadFinder(world.bucket, USERS).load(pinned.generation) == pinned
    for entry in pinned.segments:
        assert world.bucket.head(USERS.segment(entry.id))
    assert world.slots() == [1, *range(pinned.wal_floor - 1, world.head().wal_floor)]
    assert len(world.keys("segments")) == 3, "the pinned one, and two that the head names"


def test_an_expired_snapshot_keeps_nothing(world):
    """By the store's clock."""
    world.publish(
        snapshots=(SnapshotEntry("s1", 2, expires_at_ms=int(world.bucket.now() * 1000) + 1),)
    )
    assert "manifest/00000000000000000002.manifest.json" not in world.sweep_twice()
    world.advance(10)
    assert "manifest/00000000000000000002.manifest.json" in world.sweep_twice()


def test_a_cursor_holds_the_log(world):
    """From the floor of the generation that it resumes from, and that manifest."""
    world.publish(cursors={"stream": CursorEntry(4, 2)})
    assert "manifest/00000000000000000002.manifest.json" not in world.sweep_twice()
    assert world.slots() == [1, 2, 3, 4, 5, 6]
    world.publish(cursors={})
    assert "manifest/00000000000000000002.manifest.json" in world.sweep_twice()
    assert world.slots() == [1, 6]


def test_only_batches_are_collected(world):
    """Fences, begins, aborts, ingests and skips keep their slots for ever."""
    first = append(world.bucket, NAME, WalKind.SKIP)
    ingest(world.bucket, NAME, {b"bulk": b"1"}, abort=True)
    with world.db.writer(NAME) as writer:
        writer.put("last", b"1")
    world.fold()
    world.sweep_twice()
    assert world.slots() == [1, *range(first, first + 6)]
    assert world.rows() == {**ROWS, b"last": b"1"}


def test_a_damaged_object_is_never_collected(world):
    """Nothing is known of it, so it stays in its slot (H17)."""
    body = world.bucket.get(USERS.wal_object(3))
    world.bucket.put(USERS.wal_object(3), b"x" + body[1:])
    report = world.sweep()
    assert report.kept["damaged objects in the log"] == 1
    world.advance(GRACE_S + 10)
    world.sweep()
    assert world.slots() == [1, 3, 6]


def test_staged_segments_stay_while_their_job_is_open(world):
    """H28: the begin is their root from the first byte on; an abort ends it."""
    append(world.bucket, NAME, WalKind.BEGIN, Job("j1"))
    staged = stage(world.bucket, NAME, {b"bulk": b"1"}, "j1")
    assert job_of(staged.id) == "j1"
    world.advance(DAY_S)
    world.fold()  # the begin is folded: the manifest carries the job on
    assert world.sweep().kept["segments staged by an open job"] == 1
    append(world.bucket, NAME, WalKind.ABORT, Job("j1"))
    assert f"segments/{staged.id}.seg" in world.sweep_twice()


def test_a_job_behind_a_gap_is_open_too(world):
    """It has aimed ahead and is about to fill the slots below."""
    append(world.bucket, NAME, WalKind.BEGIN, Job("j1"), lsn=world.head().wal_floor + 2)
    stage(world.bucket, NAME, {b"bulk": b"1"}, "j1")
    world.advance(DAY_S)
    assert world.sweep().kept["segments staged by an open job"] == 1


def test_names_of_staged_segments():
    """The job's id may hold dashes itself."""
    assert job_of(staged_id("a-b", "1")) == "a-b"
    assert job_of("01ARZ3NDEKTSV4RRFFQ69G5FAV") is None


def test_orphans_go_when_they_are_older_than_the_grace(world):
    """A fold that died left a segment that no manifest names."""
    world.bucket.put(USERS.segment("orphan"), b"x" * 10)
    assert world.sweep().kept["segments younger than the grace period"] == 1
    world.advance(GRACE_S + 10)
    assert "segments/orphan.seg" in world.sweep_twice()


# --- leases ---------------------------------------------------------------------------


def test_a_lease_on_an_old_generation_keeps_its_objects(world):
    """Until it is released."""
    lease = world.lease(ttl_s=DAY_S)
    (old,) = world.compact()
    world.advance(GRACE_S + 10)
    assert world.sweep_twice() == ()
    assert world.bucket.head(USERS.segment(old))
    lease.release()
    assert f"segments/{old}.seg" in world.sweep().deleted


def test_a_lease_on_a_retained_generation_holds_nothing_older(world):
    """It protects what generations from its own on name."""
    world.compact()
    world.lease(ttl_s=DAY_S)
    world.advance(GRACE_S + 10)
    report = world.sweep()
    world.advance(GRACE_S + 10)
    assert len(world.sweep().deleted) == len(garbage_keys(report))


def test_an_expired_lease_is_reaped_and_does_not_count(world):
    """It was not renewed in time."""
    world.lease(ttl_s=60)
    world.compact()
    world.advance(GRACE_S + 10)
    report = world.sweep()
    assert (report.leases, report.leases_reaped) == (0, 1)
    assert world.keys("leases") == []
    world.advance(GRACE_S + 10)
    assert world.sweep().deleted


def test_a_lease_that_cannot_be_read_holds_everything_for_a_day(world):
    """Its owner is unknown."""
    world.bucket.put(USERS.lease("odd"), b"not a lease")
    assert world.sweep_twice() == ()
    world.advance(DAY_S)
    assert world.sweep().deleted


def test_an_expired_lease_is_not_renewed(world):
    """H22: a sweep may have passed it over already, so its holder gives it up."""
    lease = world.lease(ttl_s=60)
    world.advance(50)
    lease.renew()
    world.advance(50)
    lease.renew()
    world.advance(61)
    with pytest.raises(reef.ConflictError, match="was reaped"):
        lease.renew()
