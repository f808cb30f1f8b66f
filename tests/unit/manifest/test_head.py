"""Heads: their age, the fallback for a damaged one, manifests in a wrong place."""

import pytest

from reef.engine.log.tail import Tail
from reef.engine.read.caches import ByteCache
from reef.engine.read.segments import SegmentStore
from reef.errors import CorruptionError
from reef.manifest.head import HeadFinder
from tests.support.sweep_world import EachRequest, World, folded_world


@pytest.fixture
def world():
    """A namespace with several generations."""
    world = folded_world()
    for _ in range(3):
        world.publish()
    return world


def test_a_head_is_as_old_as_the_request_that_proved_it(world):
    """H10: a miss says that it was the head when the request was sent, not when the response
    came."""
    store = EachRequest(world.bucket, lambda: world.advance(100))
    found = HeadFinder(store, world.names).find()
    assert found.seen.elapsed_s() >= 100


def test_a_fallback_stays_one(world):
    """The newest manifest is damaged and the one before it is gone: a miss after the fallback does
    not make it the head."""
    newest = world.head().generation
    world.bucket.put(world.names.manifest(newest), b"damage")
    world.bucket.delete(world.names.manifest(newest - 1))
    heads = HeadFinder(world.bucket, world.names)
    for _ in range(2):
        assert heads.find(fallback=True).damage is not None
    with pytest.raises(CorruptionError):
        heads.find()


def test_a_manifest_in_the_place_of_another_is_damage(world):
    """It is intact, but it is not the generation that its name says."""
    newest, names = world.head().generation, world.names
    world.bucket.copy(names.manifest(newest - 1), names.manifest(newest + 1))
    with pytest.raises(CorruptionError, match="holds generation"):
        HeadFinder(world.bucket, names).load(newest + 1)


def test_a_request_is_quick_for_half_a_grace(world):
    """The rest of the grace is for the requests that rely on it."""
    head = HeadFinder(world.bucket, world.names).find()
    half_s = head.manifest.grace_ms / 2000
    assert head.is_quick(half_s)
    assert not head.is_quick(half_s + 0.001)


def test_a_tail_follows_newer_manifests_only():
    """A manifest that arrives late would take segments away that the tail has dropped from
    memory."""
    world = World()
    world.db.create("users")
    old, new = world.head(), world.publish()
    segments = SegmentStore(world.bucket, world.names, ByteCache(0))
    assert Tail(old, segments).follows(new)
    assert not Tail(new, segments).follows(old)
