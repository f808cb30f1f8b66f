"""The manifests that say that a name was dropped are lost: a recovery brings it back (H65)."""

import pytest

from reef.engine.handles.database import Database
from reef.engine.registry import Registry
from reef.jobs import rebuild, repair
from reef.testing import Simulation
from tests.support.sweep_world import USERS


@pytest.fixture
def bucket():
    """A bucket with one dropped name, which its registry lists."""
    bucket = Simulation(0).bucket
    db = opened(bucket)
    with db.writer("users", background=False) as writer:
        writer.put("a", b"1")
    db.drop("users")
    assert (db.namespaces(), db.namespaces(dropped=True)) == ([], ["users"])
    return bucket


def opened(bucket):
    """Return a database with a registry, as `reef.open` makes it."""
    return Database(bucket, registry=Registry(bucket))


def chain(bucket):
    """Return the keys of all manifests."""
    return [info.key for info in bucket.list(USERS.manifests)]


def damage_the_drop(bucket):
    """Overwrite the manifest that dropped the name."""
    bucket.put(chain(bucket)[-1], b"junk")


def test_H65_a_repair_that_loses_a_drop_tells_the_registry(bucket):
    """H65: a name that a repair brings back is listed, and the report names the lost drop.

    Root cause: repair published a live manifest without a change in the registry, whose entry
    without open changes is trusted: it said "dropped" from then on, and `namespaces`, SQL and
    `snapshot_all` left the name out.
    """
    damage_the_drop(bucket)
    db = opened(bucket)
    planned = repair(db, "users")
    assert db.namespaces(dropped=True) == ["users"], "a dry run changes nothing"
    done = repair(db, "users", apply=True)
    assert planned.lost.drop
    assert done.lost.drop
    assert planned.actions == done.actions
    assert "make users live again: its drop is lost" in done.actions
    assert (db.namespaces(), db.namespaces(dropped=True)) == (["users"], [])
    assert set(db.snapshot_all("all")) == {"users"}
    assert db.sql("select count(*) as n from users").to_pylist() == [{"n": 1}]


def test_H65_a_rebuild_that_loses_a_drop_tells_the_registry(bucket):
    """H65: the same of a rebuild, where no manifest is left.

    Root cause: as above; rebuild created the first manifest of a new chain in the same way.
    """
    bucket.delete_many(chain(bucket))
    db = opened(bucket)
    assert rebuild(db, "users").drop_lost
    assert rebuild(db, "users", apply=True).drop_lost
    assert (db.namespaces(), db.namespaces(dropped=True)) == (["users"], [])
    assert not rebuild(db, "users").drop_lost


def test_H65_a_recovery_that_dies_leaves_an_entry_that_is_looked_up(bucket):
    """H65: the change is open before anything is published, so a death in between is no harm."""
    damage_the_drop(bucket)
    db = opened(bucket)

    def die():
        raise KeyboardInterrupt

    db._registry._close_change = lambda *_: die()
    with pytest.raises(KeyboardInterrupt):
        repair(db, "users", apply=True)
    assert (opened(bucket).namespaces(), opened(bucket).namespaces(dropped=True)) == (["users"], [])


@pytest.mark.parametrize("way", ["repair", "rebuild"])
def test_H65_a_damaged_registry_stops_no_recovery(bucket, way):
    """H65: rows come first; names are listed from the bucket until the registry is rebuilt."""
    for info in list(bucket.list("catalog/")):
        bucket.put(info.key, b"junk")
    db = opened(bucket)
    if way == "repair":
        damage_the_drop(bucket)
        assert repair(db, "users", apply=True).applied
    else:
        bucket.delete_many(chain(bucket))
        assert rebuild(db, "users", apply=True).applied
    assert db.namespaces() == ["users"]
    assert db._registry.rebuild() == {"users": "live"}


def test_H65_a_name_that_was_live_loses_no_drop(bucket):
    """H65: the report of an ordinary repair says nothing about drops."""
    db = opened(bucket)
    db.undrop("users")
    with db.writer("users", background=False) as writer:
        writer.put("b", b"2")
    bucket.put(chain(bucket)[-1], b"junk")
    done = repair(db, "users", apply=True)
    assert not done.lost.drop
    assert not [action for action in done.actions if "drop" in action]
    assert db.namespaces() == ["users"]
