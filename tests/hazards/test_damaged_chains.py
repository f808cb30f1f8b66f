"""Every manifest of a name is there, and damaged (H18)."""

import pytest

from reef.engine.context import NamespaceContext
from reef.errors import CorruptionError, UnsupportedFormatError
from reef.formats.coding import crc32c
from reef.formats.manifest import FORMAT
from reef.jobs import rebuild, repair, verify
from reef.jobs.evidence.gather import damaged_generations
from tests.support.sweep_world import NAME, USERS, World


@pytest.fixture
def world():
    """A name with a row in a segment and one in the log."""
    world = World()
    world.db.create(NAME)
    put(world, a=b"1")
    world.fold()
    put(world, b=b"2")
    return world


def put(world, **rows):
    """Write some rows with a writer of their own."""
    with world.db.writer(NAME) as writer:
        for key, value in rows.items():
            writer.put(key, value)


def damage(world, names, keep=()):
    """Overwrite all manifests of an incarnation; return their keys."""
    keys = [info.key for info in world.bucket.list(names.manifests) if info.key not in keep]
    for key in keys:
        world.bucket.put(key, b"junk")
    return keys


def test_H18_a_chain_without_an_intact_manifest_is_rebuilt(world):
    """H18: where repair says "run rebuild", rebuild derives the manifest, above all damaged ones.

    Root cause: rebuild looked for objects and not for intact ones: a damaged head was for repair,
    which needs an intact manifest to continue from. Each of the two asked for the other.
    """
    rows, keys = world.rows(), damage(world, USERS)
    with pytest.raises(CorruptionError, match=r"all \d+ manifests") as raised:
        repair(world.db, NAME)
    assert "rebuild" in raised.value.hint
    assert rebuild(world.db, NAME).problems == ()
    done = rebuild(world.db, NAME, apply=True)
    assert USERS.manifest(done.generation) > max(keys)
    assert world.rows() == rows
    assert verify(world.db, NAME, deep=True).ok
    put(world, c=b"3")
    world.sweep_twice(retain_generations_s=0.0)
    assert {info.key for info in world.bucket.list(USERS.manifests)}.isdisjoint(keys)
    assert world.rows() == rows | {b"c": b"3"}


def test_H18_the_new_chain_is_above_a_damaged_one_that_nothing_else_names(world):
    """H18: generations that only the names of damaged objects have are never used again."""
    damage(world, USERS)
    world.bucket.put(USERS.manifest(5_000_000), b"junk")
    done = rebuild(world.db, NAME, apply=True)
    assert done.generation > 5_000_000


def test_H18_one_intact_manifest_is_for_repair(world):
    """H18: the newest intact manifest has snapshots and settings: rebuild leaves it to repair."""
    damage(world, USERS, keep=(USERS.manifest(1),))
    with pytest.raises(CorruptionError) as raised:
        rebuild(world.db, NAME, apply=True, force=True)
    assert "Run repair" in raised.value.hint


def test_H18_a_manifest_of_a_newer_release_is_not_damaged(world):
    """H18: a rebuild does not replace what only a newer release can read."""
    damage(world, USERS)
    text = b'"format":%d}' % (FORMAT + 1)
    world.bucket.put(USERS.manifest(2), b'{"crc32c":"%08x",' % crc32c(text) + text)
    assert damaged_generations(NamespaceContext(world.bucket, USERS)) == []
    with pytest.raises(UnsupportedFormatError):
        rebuild(world.db, NAME, apply=True, force=True)


def test_H18_the_end_of_a_damaged_earlier_chain_is_published_again(world):
    """H18: the same of an earlier incarnation: a reader of the name gets the current one."""
    world.db.drop(NAME)
    world.db.create(NAME)
    put(world, n=b"new")
    keys = damage(world, USERS)
    assert rebuild(world.db, NAME, apply=True).applied
    assert max(info.key for info in world.bucket.list(USERS.manifests)) > max(keys)
    world.bucket.delete_many([USERS.successor(2)])
    assert world.rows() == {b"n": b"new"}
