"""The manifest that renamed a namespace is lost: a repair ends under a name that leads to it (H79).

Root cause: a chain that restarts from an older manifest has the name of that, and the steps behind
the restart were sent to the name that was asked for: the repair died between its restart and its
fences, and where another namespace had that name by then, none led to the rows any more.
"""

import pytest

from reef.engine.handles.database import Database
from reef.engine.registry import Registry
from reef.errors import NotFoundError
from reef.jobs import repair, verify
from reef.paths import Namespace
from tests.support.sweep_world import World


@pytest.fixture
def world():
    """Give a bucket with a registry, and a namespace `a` with one row."""
    world = World()
    world.db = Database(world.bucket, registry=Registry(world.bucket))
    put(world, "a", b"1")
    return world


def put(world, name, value):
    """Write one row."""
    with world.db.writer(name, background=False) as writer:
        writer.put("k", value)


def lose_the_rename(world):
    """Damage the newest manifest in the folder of `a`."""
    last = [info.key for info in world.bucket.list(Namespace("a").manifests)][-1]
    world.bucket.put(last, b"junk")


def repaired(world, name):
    """Repair by a name; the dry run announces the same."""
    planned = repair(world.db, name)
    done = world.run(lambda: repair(world.db, name, apply=True))
    assert planned.actions == done.actions
    assert planned.lost == done.lost
    assert planned.namespace == done.namespace == name
    return done


def value_of(world, name):
    """Return the value of the only row."""
    with world.db.reader(name) as reader:
        assert verify(world.db, name, deep=True).ok
        return reader.get("k")


def test_H79_a_namespace_whose_rename_is_lost_has_its_former_name(world):
    """H79: the repair runs to its end, says so, and the registry follows."""
    world.db.rename("a", "b")
    lose_the_rename(world)
    done = repaired(world, "b")
    assert done.actions[-1] == "rename b to a: its last rename is lost"
    assert value_of(world, "a") == b"1"
    with pytest.raises(NotFoundError):
        world.db.reader("b")
    assert world.db.namespaces() == ["a"]
    put(world, "a", b"2")
    world.db.rename("a", "b")
    assert value_of(world, "b") == b"2"


def test_H79_a_repair_without_the_rename_back_fences_the_writer(world):
    """H79: the fences come under the name that the chain has now."""
    world.db.rename("a", "b")
    world.db.rename("b", "a")
    lose_the_rename(world)
    done = repaired(world, "a")
    assert done.actions[-1] == "rename a to b: its last rename is lost"
    assert value_of(world, "b") == b"1"
    assert world.db.namespaces() == ["b"]


def test_H79_a_former_name_that_is_taken_is_not_given_back(world):
    """H79: it would lead to the rows of the other namespace; the name of the folder is free."""
    world.db.rename("a", "b")
    world.db.rename("b", "a")
    world.db.create("b")
    put(world, "b", b"another")
    lose_the_rename(world)
    repaired(world, "a")
    assert value_of(world, "a") == b"1"
    assert value_of(world, "b") == b"another"
    assert world.db.namespaces() == ["a", "b"]
