"""Two incarnations of a name, and the manifests or the record that lead from one to the other are
lost (H65)."""

import pytest

import reef
from reef.jobs import rebuild, repair, verify
from tests.support.sweep_world import NAME, USERS, World

RECORD = USERS.successor(2)
SECOND = USERS.at(2)


def delete(world, *prefixes):
    """Delete all objects whose keys begin with one of these."""
    for prefix in prefixes:
        for info in list(world.bucket.list(prefix)):
            world.bucket.delete(info.key)


@pytest.fixture
def world():
    """A name with a row in each of two incarnations, and a snapshot in the first."""
    world = World()
    with world.db.writer(NAME) as writer:
        writer.put("k", b"of the first life")
    world.db.snapshot(NAME, name="kept")
    world.db.drop(NAME)
    world.db.create(NAME)
    with world.db.writer(NAME) as writer:
        writer.put("k", b"of the second life")
    world.fold()
    with world.db.writer(NAME) as writer:
        writer.put("l", b"in the log")
    return world


ROWS = {b"k": b"of the second life", b"l": b"in the log"}


def lose_the_drop(world):
    """Delete the manifests of the first incarnation from the drop on."""
    chain = [info.key for info in world.bucket.list(USERS.manifests)]
    world.bucket.delete_many(chain[-2:])


def test_H65_a_lost_drop_is_reported_and_repaired(world):
    """H65: where readers open a dropped incarnation, verify says so, and repair ends it again.

    Root cause: verify checked the newest incarnation only, never the one that is opened.
    """
    lose_the_drop(world)
    assert dict(world.db.reader(NAME).scan()) == {b"k": b"of the first life"}
    (problem,) = world.run(lambda: verify(world.db, NAME)).problems
    assert "incarnation 1 are lost" in problem.message
    dry = world.run(lambda: repair(world.db, NAME))
    done = world.run(lambda: repair(world.db, NAME, apply=True))
    assert dry.actions == done.actions == ("publish the end of incarnation 1",)
    assert world.rows() == ROWS
    assert world.run(lambda: verify(world.db, NAME)).ok
    assert dict(world.db.reader(NAME, snapshot="kept").scan()) == {b"k": b"of the first life"}
    world.sweep_twice(dropped_s=0.0)
    assert world.rows() == ROWS


def test_H65_a_writer_of_a_life_whose_drop_was_lost_is_fenced(world):
    """H65: who has opened the dropped incarnation meanwhile acknowledges nothing after the repair,
    and its LSNs are not those of the successor."""
    lose_the_drop(world)
    with world.db.writer(NAME) as writer:
        writer.put("k", b"in the wrong life")
        world.run(lambda: repair(world.db, NAME, apply=True))
        with pytest.raises((reef.FencedError, reef.NotFoundError)):
            writer.put("k", b"again")
    assert world.rows() == ROWS


def test_H65_a_lost_record_is_reported_and_stored_again(world):
    """H65: without the record and without any manifest of the first incarnation nothing leads to
    the second one: verify says so, and repair stores the record."""
    delete(world, RECORD, USERS.manifests)
    with pytest.raises(reef.NotFoundError):
        world.db.reader(NAME)
    (problem,) = world.run(lambda: verify(world.db, NAME)).problems
    assert problem.object == RECORD
    done = world.run(lambda: repair(world.db, NAME, apply=True))
    assert done.actions == (f"store {RECORD} again",)
    assert world.rows() == ROWS


@pytest.mark.parametrize("first", [(), (USERS.manifests,)], ids=["first left", "first lost"])
def test_H65_rebuild_without_record_and_manifests(world, first):
    """H65: an incarnation of which only log and segments are left is rebuilt, not the one before.

    Root: the newest incarnation was found by records and manifests only. With both lost a rebuild
    raised "dropped", or published the first life without any problem.
    """
    delete(world, RECORD, SECOND.manifests, *first)
    report = world.run(lambda: rebuild(world.db, NAME))
    assert report.rows == 2
    world.run(lambda: rebuild(world.db, NAME, apply=True, force=bool(first)))
    assert world.rows() == ROWS
    assert world.run(lambda: verify(world.db, NAME, deep=True)).ok


def test_H65_rebuild_says_that_a_beginning_is_lost(world):
    """H65: if neither the record nor the manifest that repeats it is left, what came first in the
    log cannot be determined: that is a problem, and accepted only by force."""
    delete(world, RECORD, SECOND.manifests, USERS.manifests)
    for _ in range(2):  # the refusal leaves nothing that would hide it
        with pytest.raises(reef.InvalidInputError, match="is lost or damaged"):
            world.run(lambda: rebuild(world.db, NAME, apply=True))


def test_H65_rebuild_with_a_damaged_record(world):
    """H65: a record that cannot be read is taken from the manifest that repeats it."""
    world.bucket.put(RECORD, world.bucket.get(RECORD)[:-3])
    delete(world, SECOND.manifests)
    world.run(lambda: rebuild(world.db, NAME, apply=True))
    assert world.rows() == ROWS


def test_H65_lost_manifests_are_not_no_namespace(world):
    """H65: verify of an incarnation without manifests names the objects that are left, and says
    what to do."""
    delete(world, SECOND.manifests)
    for job in (verify, repair):
        with pytest.raises(reef.CorruptionError, match="no manifest, but objects") as caught:
            world.run(lambda job=job: job(world.db, NAME))
        assert "rebuild" in caught.value.hint


def test_H65_an_uncompleted_successor_is_named():
    """H65: a re-creation that died after its record says how to complete it, to readers, verify
    and repair alike; it is neither absent, nor to be opened again."""
    world = World()
    world.db.create(NAME)
    world.db.drop(NAME)
    world.db.create(NAME)
    delete(world, SECOND.root)
    for call in (world.db.reader, lambda n: verify(world.db, n), lambda n: repair(world.db, n)):
        with pytest.raises(reef.NotFoundError, match="did not finish") as caught:
            world.run(lambda call=call: call(NAME))
        assert caught.value.kind == "dropped"
        assert "create" in caught.value.hint
    world.db.create(NAME)
    assert world.rows() == {}
