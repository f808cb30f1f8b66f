"""Snapshots of an earlier incarnation, and damage to what only they need (H65)."""

import pytest

from reef.engine.context import NamespaceContext
from reef.errors import ConflictError, CorruptionError, NotFoundError
from reef.jobs import repair, verify
from reef.jobs.verify.job import check_earlier
from reef.manifest.head import HeadFinder
from tests.support.sweep_world import NAME, USERS, World


@pytest.fixture
def world():
    """A name with two lives; of the first, snapshots of a segment, and of that and the log."""
    world = World()
    world.db.create(NAME)
    put(world, a=b"1")
    world.fold()
    world.db.snapshot(NAME, name="folded")
    put(world, b=b"2")
    world.db.cursor(NAME, "billing")
    put(world)
    world.db.snapshot(NAME, name="logged")
    world.db.drop(NAME)
    world.db.create(NAME)
    put(world, n=b"new")
    return world


def put(world, **rows):
    """Write some rows with a writer of their own."""
    with world.db.writer(NAME) as writer:
        for key, value in rows.items():
            writer.put(key, value)


def damaged(world, what):
    """Damage an object that only snapshots of the first life need; return the key."""
    listed = [info.key for info in world.bucket.list(f"{USERS.root}/{what}/")]
    key = {"wal": USERS.wal_object(4), "manifest": USERS.manifest(4)}.get(what, listed[0])
    assert key in listed
    world.bucket.put(key, b"junk")
    return key


def readable(world):
    """Return the names of the listed snapshots, with the rows of those that can be read."""
    return {s.name: dict(world.db.reader(NAME, snapshot=s).scan()) for s in listed(world)}


def listed(world):
    """Return the snapshots of all lives."""
    return world.db.snapshots(NAME)


BOTH = {"folded": {b"a": b"1"}, "logged": {b"a": b"1", b"b": b"2"}}


@pytest.mark.parametrize(("what", "left"), [("segments", ()), ("wal", ("folded",))])
def test_H65_damage_that_only_an_earlier_snapshot_notices_is_reported(world, what, left):
    """H65: verify reads what snapshots of earlier lives need; repair releases those it must.

    Root cause: verify and repair covered the newest incarnation only, so that a snapshot of an
    earlier one stayed listed, could not be read, and no job said so.
    """
    assert readable(world) == BOTH
    key = damaged(world, what)
    (problem,) = verify(world.db, NAME, deep=True).problems
    assert problem.object == key
    planned = repair(world.db, NAME)
    assert len(listed(world)) == 2, "a dry run changes nothing"
    done = world.run(lambda: repair(world.db, NAME, apply=True))
    lost = tuple(name for name in BOTH if name not in left)
    assert planned.lost.snapshots == done.lost.snapshots == lost
    assert done.actions == tuple(f"release snapshot {name} of incarnation 1" for name in lost)
    assert planned.actions == done.actions
    assert done.unrepaired == ()
    assert readable(world) == {name: BOTH[name] for name in left}
    assert world.rows() == {b"n": b"new"}
    assert verify(world.db, NAME, deep=True).ok
    world.sweep_twice(dropped_s=0.0, retain_generations_s=0.0)
    assert readable(world) == {name: BOTH[name] for name in left}


def test_H65_a_manifest_that_only_a_sweep_of_an_earlier_life_loads(world):
    """H65: a retained manifest of an earlier life is lost: repair skips it, and sweeps continue.

    Root cause, a sibling: sweeps of a name begin with its earlier lives, and took the lost manifest
    for one that another sweep was deleting: ConflictError for ever, for the current life as well.
    The damage machine with lives found it (seed 24).
    """
    head = HeadFinder(world.bucket, USERS).find(dropped=True).manifest
    lost = head.cursors["billing"].generation
    assert lost not in {snapshot.generation for snapshot in head.snapshots}
    world.bucket.delete(USERS.manifest(lost))
    with pytest.raises(ConflictError):
        world.sweep_twice(retain_generations_s=0.0)
    (problem,) = verify(world.db, NAME).problems
    assert problem.object == USERS.manifest(lost)
    done = world.run(lambda: repair(world.db, NAME, apply=True))
    assert done.actions == (f"skip generation {lost} of incarnation 1",)
    assert verify(world.db, NAME, deep=True).ok
    world.sweep_twice(retain_generations_s=0.0)
    world.sweep_twice(dropped_s=0.0, retain_generations_s=0.0)
    assert readable(world) == BOTH


def damage_the_end(world, how="flip", count=1):
    """Damage the newest manifests of the first life."""
    chain = [info.key for info in world.bucket.list(USERS.manifests)]
    for key in chain[-count:]:
        world.bucket.put(key, b"junk" if how == "flip" else b"")
    return chain[-1]


@pytest.mark.parametrize("count", [1, 2], ids=["the announcement", "and the drop"])
@pytest.mark.parametrize("how", ["flip", "truncate"])
def test_H65_a_damaged_end_of_an_earlier_life_is_published_again(world, how, count):
    """H65: if the newest manifest of an earlier life is damaged, its snapshots can be listed only:
    verify says so, and after a repair they can be read and released, and the life is swept.

    Root cause: the error of such a snapshot asked for a repair, and repair covered the newest
    manifest of the current incarnation only, so that there was no way out.
    """
    key = damage_the_end(world, how, count)
    with pytest.raises(CorruptionError, match="newest manifest is damaged"):
        listed(world)[0].release()
    (problem,) = verify(world.db, NAME).problems
    assert problem.object == key
    planned = repair(world.db, NAME)
    assert verify(world.db, NAME).problems, "a dry run changes nothing"
    done = world.run(lambda: repair(world.db, NAME, apply=True))
    assert planned.actions == done.actions == ("publish the end of incarnation 1",)
    assert done.unrepaired == ()
    assert readable(world) == BOTH
    assert verify(world.db, NAME, deep=True).ok
    for snapshot in listed(world):
        snapshot.release()
    for _ in range(2):
        world.sweep_twice(dropped_s=0.0, retain_generations_s=0.0)
    assert world.rows() == {b"n": b"new"}
    assert HeadFinder(world.bucket, USERS.at(2)).find().manifest.predecessors == ()


def test_H65_a_snapshot_that_was_released_with_a_damaged_end_is_released_again(world):
    """H65: the intact manifest below a damaged end lists snapshots that were released since: those
    whose objects are swept are released by the repair, and the others are listed again."""
    for name in ("folded", "logged"):
        next(s for s in listed(world) if s.name == name).release()
    segment = next(iter(world.bucket.list(USERS.segments))).key
    world.bucket.delete(segment)  # as a sweep of the last generation would
    damage_the_end(world, count=2)
    done = world.run(lambda: repair(world.db, NAME, apply=True))
    assert done.lost.snapshots == ("folded", "logged")
    assert readable(world) == {}
    assert verify(world.db, NAME, deep=True).ok


def test_H65_an_earlier_life_without_any_intact_manifest_is_given_up(world):
    """H65: then its snapshots are lost: verify says so, and after a repair a sweep removes it."""
    damage_the_end(world, count=len(list(world.bucket.list(USERS.manifests))))
    (problem,) = verify(world.db, NAME).problems
    assert "incarnation 1" in problem.message
    assert "its snapshots are lost" in problem.message
    done = world.run(lambda: repair(world.db, NAME, apply=True))
    assert done.actions == ("publish the end of incarnation 1",)
    assert verify(world.db, NAME, deep=True).ok
    assert readable(world) == {}
    for _ in range(2):
        world.sweep_twice(dropped_s=0.0, retain_generations_s=0.0)
    assert not list(world.bucket.list(USERS.segments))
    assert world.rows() == {b"n": b"new"}


@pytest.fixture
def branch():
    """A name whose first life was a branch, of rows that are in the log of its origin, with a
    snapshot; its second life has no origin."""
    world = World()
    world.db.create("origin")
    with world.db.writer("origin") as writer:
        writer.put(b"a", b"1")
    world.db.branch("origin", NAME)
    put(world, b=b"2")
    world.db.snapshot(NAME, name="of the branch")
    return world


OF_THE_BRANCH = {"of the branch": {b"a": b"1", b"b": b"2"}}


def test_H65_a_snapshot_of_an_earlier_life_that_was_a_branch_is_intact(branch):
    """H65: its log is inherited, and read where the origin has it.

    Root cause: verify looked for those slots in the folder of the branch, reported them as missing,
    and a repair released the snapshot. Found by a machine that crosses features.
    """
    branch.db.drop(NAME)
    branch.db.create(NAME)
    assert verify(branch.db, NAME, deep=True).problems == []
    done = branch.run(lambda: repair(branch.db, NAME, apply=True))
    assert done.actions == ()
    assert readable(branch) == OF_THE_BRANCH


def test_H65_the_end_of_an_earlier_life_that_was_a_branch_is_fenced_behind_its_log(branch):
    """H65: a sibling: if the drop of such a life is lost, the fences of a repair follow the
    inherited log, where a writer of that life would write next."""
    branch.db.drop(NAME)
    branch.db.create(NAME)
    put(branch, n=b"new")
    chain = [info.key for info in branch.bucket.list(USERS.manifests)]
    branch.bucket.delete_many(chain[-2:])
    before = set(branch.bucket.list(USERS.wal))
    branch.run(lambda: repair(branch.db, NAME, apply=True))
    fences = [one.key for one in branch.bucket.list(USERS.wal) if one not in before]
    assert fences
    assert min(fences) > max(one.key for one in before)
    assert readable(branch) == OF_THE_BRANCH


def test_H65_a_snapshot_that_is_released_during_a_verify_is_no_damage(world):
    """H65: what a sweep may have deleted since the check began counts no more."""
    damaged(world, "segments")
    get, released = world.bucket.head, []

    def release_before(key):
        if key.startswith(f"{USERS.root}/segments/") and not released:
            released.append([snapshot.release() for snapshot in listed(world)])
        return get(key)

    world.bucket.head = release_before
    assert verify(world.db, NAME).ok
    assert released


def test_H65_a_name_with_one_life_pays_nothing():
    """H65: without predecessors the check asks the store for nothing."""
    world = World()
    world.db.create(NAME)
    world.db.snapshot(NAME, name="kept")
    context = NamespaceContext(None, USERS)
    assert check_earlier(context, world.bucket.runtime, world.head(), deep=True) == []


def test_H65_snapshots_of_a_dropped_name_can_be_listed_read_and_released(world):
    """H65: a drop takes no snapshot away: not before a re-creation, nor after a sweep has cleared.

    Root cause: listing and opening a snapshot began with the newest state of the name, which a
    drop hides; only a re-creation brought the snapshots back.
    """
    world.db.snapshot(NAME, name="second")
    world.db.drop(NAME)
    expected = BOTH | {"second": {b"n": b"new"}}
    assert readable(world) == expected
    world.sweep_twice(dropped_s=0.0, retain_generations_s=0.0)
    assert readable(world) == expected
    assert world.db.reader(NAME, snapshot="second").get("n") == b"new"
    with pytest.raises(NotFoundError, match="was dropped"):
        world.db.reader(NAME, snapshot="never")
    with pytest.raises(NotFoundError, match="was dropped"):
        world.db.reader(NAME).get("n")
    for snapshot in listed(world):
        snapshot.release()
    with pytest.raises(NotFoundError, match="was dropped"):
        listed(world)
