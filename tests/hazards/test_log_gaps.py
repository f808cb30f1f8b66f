"""Slots of the log that were emptied, without a batch behind them as evidence (H17)."""

from datetime import UTC, datetime

import pyarrow as pa
import pytest

from reef.jobs import ProblemKind, ingest, rebuild, repair, verify
from tests.support.sweep_world import GRACE_S, NAME, USERS, World


@pytest.fixture
def world():
    """An empty namespace on virtual time."""
    world = World()
    world.db.create(NAME)
    return world


def put(world, *keys):
    """Write one row each; return the LSNs."""
    with world.db.writer(NAME) as writer:
        return [writer.put(key, b"v").lsn for key in keys]


def test_H17_a_gap_that_is_older_than_the_grace_period_is_a_loss(world):
    """H17: a load behind an emptied slot says nothing of it, but no PUT is in flight for so long.

    Root: only `after` of batches, or a distance, proved that a slot had been filled. Readers
    stopped at the gap, verify said nothing, and repair left the load behind it invisible.
    """
    (lsn,) = put(world, "lost")
    rows = pa.table({"id": [b"loaded"], "value": [b"v"]})
    world.run(lambda: ingest(world.db, NAME, rows))
    world.bucket.delete(USERS.wal_object(lsn))
    assert world.run(lambda: verify(world.db, NAME)).ok, "it may be in flight"
    world.advance(GRACE_S + 10)
    (problem,) = world.run(lambda: verify(world.db, NAME)).problems
    assert (problem.kind, problem.lsn) == (ProblemKind.WAL_MISSING, lsn)
    done = world.run(lambda: repair(world.db, NAME, apply=True))
    assert [lost.lsn for lost in done.lost.lsns if lost.is_loss] == [lsn]
    assert world.rows() == {b"loaded": b"v"}


def test_H17_a_slot_before_an_object_that_cannot_be_read_is_reported(world):
    """H17: a damaged object may have named the emptied slot before it: both are reported as lost.

    Cause: repair skipped the damaged object alone, and reported no other loss.
    """
    first, second = put(world, "a", "b")
    world.bucket.delete(USERS.wal_object(first))
    world.bucket.put(USERS.wal_object(second), b"")
    found = world.run(lambda: verify(world.db, NAME)).problems
    assert {problem.lsn for problem in found} == {first, second}
    done = world.run(lambda: repair(world.db, NAME, apply=True))
    assert [lost.lsn for lost in done.lost.lsns if lost.is_loss] == [first, second]
    assert world.rows() == {}


def test_H17_a_rebuild_voids_the_damaged_slot_below_its_floor(world):
    """H17: the last object below the floor has the time for `as_of`; where it is damaged, a rebuild
    skips it, as it does from the floor on, and leaves nothing for verify to find."""
    (*_, last) = put(world, "a", "b")
    world.fold()
    world.bucket.put(USERS.wal_object(last), b"damaged")
    for info in list(world.bucket.list(USERS.manifests)):
        world.bucket.delete(info.key)
    world.run(lambda: rebuild(world.db, NAME, apply=True))
    assert world.run(lambda: verify(world.db, NAME, deep=True)).ok
    now = datetime.fromtimestamp(world.sim.scheduler.now_s, UTC)
    assert dict(world.db.reader(NAME, as_of=now).scan()) == {b"a": b"v", b"b": b"v"}
