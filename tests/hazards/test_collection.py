"""H10, H22, H24, H30, H32: which objects a sweep may delete, and when."""

import pytest

import reef
from reef.jobs import fold
from reef.manifest.head import HeadFinder
from reef.stores import Wrapper
from tests.support.sweep_world import (
    DAY_S,
    GRACE_S,
    NAME,
    USERS,
    At,
    EachRequest,
    WholeSeconds,
    World,
    condemned_keys,
    folded_world,
)

ROWS = {b"k%d" % number: b"v" for number in range(5)}


@pytest.fixture
def world():
    """Give a namespace with five rows in the log, folded into one segment."""
    return folded_world()


# --- readers --------------------------------------------------------------------------


def test_H10_a_sweep_between_the_manifest_and_the_listing(world):
    """H10: the reader's manifest is old and its objects are being deleted: it starts again."""
    with world.db.writer(NAME) as writer:
        writer.put("late", b"1")
        writer.put("late", b"2")

    def fold_and_sweep():
        world.fold()
        world.sweep_twice()

    def in_between(store):
        return At(store, "list", "/wal/", fold_and_sweep, after=True)

    reader = reef.Database(in_between(world.bucket)).reader(NAME)
    assert dict(reader.scan()) == {**ROWS, b"late": b"2"}
    assert world.slots() == [1, 7, 9], "it was all swept underneath"


def test_H24_the_log_is_kept_from_the_lowest_floor_of_any_root(world):
    """H24: a process on an old generation replays its log after a sweep."""
    with world.db.writer(NAME) as writer:
        writer.put("late", b"1")
        writer.put("late", b"2")
    old = world.head()
    lease = world.lease(ttl_s=DAY_S)
    world.fold()
    world.sweep_twice()
    needed = range(old.wal_floor - 1, world.head().wal_floor)
    assert set(needed) <= set(world.slots())
    assert HeadFinder(world.bucket, USERS).load(old.generation) == old
    lease.release()
    world.sweep()
    assert not set(needed) <= set(world.slots())


def test_H24_a_retained_generation_has_its_log(world):
    """H24: not only the current one's floor counts."""
    with world.db.writer(NAME) as writer:
        writer.put("late", b"1")
        writer.put("late", b"2")
    old = world.head()
    world.fold()
    world.sweep_twice(retain_generations_s=DAY_S)
    assert set(range(old.wal_floor - 1, world.head().wal_floor)) <= set(world.slots())


def test_H22_a_lease_between_any_two_steps_of_a_sweep(world):
    """H22: a reader that leases, then reads the head again, finds every object of this head."""
    (old,) = world.compact()
    world.advance(GRACE_S + 10)
    world.sweep()
    world.advance(GRACE_S + 10)
    found = []

    def lease_and_check():
        world.lease(ttl_s=DAY_S)
        head = world.head()
        assert f"segments/{old}.seg" in {c.key for c in head.condemned}
        found.extend(world.bucket.head(USERS.segment(s.id)) for s in head.segments)

    for method, part in (("list", "/manifest/"), ("list", "/segments/"), ("list", "/leases/")):
        world.sweep(reef.Database(At(world.bucket, method, part, lease_and_check)), deletes_max=0)
    assert len(found) == 3
    assert world.rows() == ROWS


def test_H22_leases_are_listed_after_the_condemning_cas(world):
    """H22: one that is written just before the CAS is seen, and keeps the objects it needs.

    Its holder read the head before the sweep condemned anything, and has yet to read it again.
    The CAS took so long that the objects it condemned could be deleted by the same sweep.
    """
    manifest = world.head()
    (old,) = world.compact()
    world.advance(GRACE_S + 10)

    def lease_and_stall():
        world.lease(ttl_s=DAY_S, manifest=manifest)
        world.advance(GRACE_S + 10)

    stalled = At(world.bucket, "create", "/manifest/", lease_and_stall)
    report = world.sweep(reef.Database(stalled))
    assert f"segments/{old}.seg" in {doomed.key for doomed in report.condemned}
    assert report.deleted == ()
    assert world.bucket.head(USERS.segment(old)), "held by the lease"


# --- clocks ---------------------------------------------------------------------------


@pytest.mark.parametrize("skew_s", [-600.0, 0.0, 600.0])
def test_H30_a_sweep_goes_by_the_stores_clock(world, skew_s):
    """H30: its own may be ten minutes off, and dates may have whole seconds."""
    node = world.sim.process("skewed", skew_s=skew_s)
    db = reef.Database(WholeSeconds(node.store()))
    lease = world.lease(ttl_s=60)
    (old,) = world.compact()
    world.bucket.put(USERS.segment("orphan"), b"x")
    reports = []

    def sweep_at(*times_s):
        start_s = world.bucket.now()
        for at_s in times_s:
            node.runtime.sleep(max(0.0, start_s + at_s - world.bucket.now()))
            reports.append(world.sweep(db))

    node.spawn(lambda: sweep_at(5.0, 61.5, 64.0, GRACE_S + 1.5))
    world.sim.run()
    assert [(r.leases, r.leases_reaped) for r in reports[:3]] == [(1, 0), (1, 0), (0, 1)]
    condemned = [{d.key for d in report.condemned} for report in reports]
    assert not any("segments/orphan.seg" in keys for keys in condemned), "not old enough yet"
    node.spawn(lambda: sweep_at(2.0, GRACE_S + 1.5, GRACE_S + 6.0))
    world.sim.run()
    assert "segments/orphan.seg" in {d.key for d in reports[4].condemned}
    assert "segments/orphan.seg" not in reports[5].deleted
    assert {"segments/orphan.seg", f"segments/{old}.seg"} <= set(reports[6].deleted)
    assert world.rows() == ROWS
    assert lease.record.ttl_ms == 60_000


def test_H30_sequence_numbers_decide_before_time(world):
    """H30: objects of the head stay, however old their timestamps are."""
    world.advance(365 * DAY_S)
    world.sweep_twice()
    assert world.rows() == ROWS


# --- stale metadata -------------------------------------------------------------------


def test_H32_a_publish_between_any_two_steps_of_a_sweep(world):
    """H32: a fold and a compaction at every request of a sweep; nothing that is named goes."""
    requests = 40
    for number in range(requests):
        world = World()
        with world.db.writer(NAME) as writer:
            for row in range(5):
                writer.put(f"k{row}", b"v")
        world.fold()
        world.publish(grace_ms=0)
        world.compact()
        world.advance(60)
        count = [0]

        def strike(world=world, count=count, number=number):
            count[0] += 1
            if count[0] == number:
                world.db.writer(NAME).put("more", b"1")
                fold(world.db, NAME)
                world.compact()

        for _ in range(3):
            world.sweep(reef.Database(EachRequest(world.bucket, strike)))
            world.advance(10)
        seen = world.rows()
        assert {k: seen[k] for k in ROWS} == ROWS, number
        assert seen.get(b"more", b"1") == b"1"
        for entry in world.head().segments:
            assert world.bucket.head(USERS.segment(entry.id)), number


def test_H32_a_rival_sweep_at_every_request(world):
    """H32: the other one finishes its whole work in between; both end, nothing is lost."""
    world.publish(grace_ms=0)
    world.compact()
    world.advance(60)
    resting = []

    def rival():
        if not resting:
            resting.append(1)
            world.sweep()
            resting.pop()

    for _ in range(3):
        try:
            world.sweep(reef.Database(EachRequest(world.bucket, rival)))
        except reef.ConflictError:
            world.sweep()
        world.advance(10)
    assert world.rows() == ROWS
    assert world.slots() == [1, 6, 7], "fences, and the one below the floor"


def test_H32_a_condemned_key_leaves_the_list_only_after_its_deletion(world):
    """H32: forgotten first, it could be published again just before it is deleted."""
    world.compact()
    world.advance(GRACE_S + 10)
    world.sweep()
    world.advance(GRACE_S + 10)
    deleted = []

    class Checks(Wrapper):
        def delete_many(self, keys):
            listed = {f"{USERS.root}/{key}" for key in condemned_keys(world.head())}
            assert set(keys) <= listed
            deleted.extend(keys)
            self.inner.delete_many(keys)

    world.sweep(reef.Database(Checks(world.bucket)))
    assert len(deleted) > 5
    gone = {key.removeprefix(USERS.root + "/") for key in deleted}
    assert not gone & set(condemned_keys(world.head()))
