"""Dropping and re-creating a namespace (H48): numbers continue, and no zombie's write appears."""

from contextlib import nullcontext

import pytest

import reef
from reef.errors import ErrorKind, FencedError, NotFoundError
from reef.formats.wal_object import Job, WalKind
from reef.jobs import fold, verify
from reef.jobs.ingest.append import Appender
from tests.support.bulk_jobs import append, stage
from tests.support.sweep_world import DAY_S, GRACE_S, NAME, USERS, At, World


@pytest.fixture
def world():
    """A bucket on virtual time."""
    return World()


def swept(world):
    """Let the sweep take a dropped namespace: clear and condemn, then delete."""
    world.advance(DAY_S + 10)
    world.sweep()
    world.advance(GRACE_S + 10)
    return world.sweep().deleted


@pytest.mark.parametrize("parallel", [1, 3])
@pytest.mark.parametrize("sweeps", [False, True])
def test_H48_the_old_writer_resumes_after_drop_sweep_and_create(world, parallel, sweeps):
    """H48: drop, sweep, create, resume the old writer: it is fenced, and its row is nowhere."""
    old = world.db.writer(NAME, max_parallel_writes=parallel)
    old.put("a", b"old")
    fold(world.db, NAME)
    old.put("b", b"old")
    before = world.head()
    world.db.drop(NAME)
    if sweeps:
        assert any(key.startswith("segments/") for key in swept(world))
    world.db.create(NAME)
    after = world.head()
    assert after.generation > before.generation + 1
    assert after.writer_epoch > before.writer_epoch
    assert after.wal_base == after.wal_floor > before.wal_floor + 1
    with pytest.raises(FencedError):
        old.put("zombie", b"?")
    assert world.rows() == {}
    with world.db.writer(NAME) as new:
        new.put("n", b"new")
    fold(world.db, NAME)
    assert world.rows() == {b"n": b"new"}
    assert not verify(world.db, NAME, deep=True).problems


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("sweeps", [False, True])
def test_H48_a_write_that_was_on_its_way_all_the_time(world, sweeps, after):
    """H48: a PUT that lands before or after drop, sweep and create appears in nothing new."""

    def drop_and_recreate():
        world.db.drop(NAME)
        if sweeps:
            swept(world)
        world.db.create(NAME)

    store = At(world.bucket, "create", "/wal/", drop_and_recreate, after=after)
    store.armed = False
    zombie = reef.Database(store).writer(NAME)
    zombie.put("a", b"1")
    store.armed = True
    # Landed before the drop it was committed, in the namespace that was; else it is refused.
    with pytest.raises(reef.ReefError) if sweeps or not after else nullcontext():
        zombie.put("zombie", b"?")
    assert not store.armed
    assert world.rows() == {}
    with world.db.writer(NAME) as writer:
        writer.put("n", b"new")
    fold(world.db, NAME)
    assert world.rows() == {b"n": b"new"}


def test_H48_a_bulk_job_of_the_old_one_does_not_begin_in_the_new_one(world):
    """H48: it lands in the log of the old one, late or not, and that log is over."""
    with world.db.writer(NAME) as writer:
        writer.put("a", b"1")
    old = world.head().schema
    world.db.drop(NAME)
    world.db.create(NAME)
    append(world.bucket, NAME, WalKind.BEGIN, Job("late", key="late"))
    segment = stage(world.bucket, NAME, {b"zombie": b"?"}, "late")
    append(world.bucket, NAME, WalKind.INGEST, Job("late", key="late", segments=(segment,)))
    assert world.rows() == {}
    fold(world.db, NAME)
    assert world.rows() == {}
    with pytest.raises(NotFoundError, match="created again"):
        Appender(world.bucket, USERS).append(WalKind.BEGIN, Job("later", key="later"), old)


def test_H48_the_last_manifest_stays_for_ever(world):
    """H48: after any number of sweeps there is a manifest, and fences stay in the log."""
    with world.db.writer(NAME) as writer:
        writer.put("a", b"1")
    world.db.drop(NAME)
    swept(world)
    for _ in range(4):
        world.advance(DAY_S)
        world.sweep()
    assert world.keys("segments") == []
    assert world.keys("manifest") != []
    with pytest.raises(NotFoundError) as gone:
        world.db.reader(NAME)
    assert gone.value.kind is ErrorKind.DROPPED
    assert world.db.create(NAME).generation > 3
