"""From when a lease counts, for its holder and for a sweep (H22, H28, H30)."""

import pytest

from reef.jobs.ingest.job import BulkJob
from reef.manifest.roots import take_lease
from reef.stores import Wrapper
from reef.stores.leases import HeldLease
from tests.support.sweep_world import DAY_S, NAME, USERS, World

TTL_S = 60.0


class Slow(Wrapper):
    """A store whose writes take their time before they are done."""

    takes_s = 0.0

    def put(self, key, body):
        self.runtime.sleep(self.takes_s)
        return self.inner.put(key, body)

    def replace(self, key, body, tag):
        self.runtime.sleep(self.takes_s)
        return self.inner.replace(key, body, tag)


@pytest.fixture
def world():
    """A namespace on virtual time."""
    world = World()
    world.db.create(NAME)
    return world


def take(store, manifest):
    """Take a lease."""
    return take_lease(store, USERS, manifest, owner="me", ttl_s=TTL_S)


def test_H30_a_lease_counts_from_before_it_was_written(world):
    """H30: the store may have dated it when the request came; its holder counts from before."""
    store = Slow(world.bucket)
    store.takes_s = TTL_S
    lease = world.run(lambda: take(store, world.head()))
    assert lease.expired


def test_H30_a_renewal_counts_from_before_it_was_sent(world):
    """H30: of a slow renewal half of the time is over when its response comes."""
    store = Slow(world.bucket)
    lease = world.run(lambda: take(store, world.head()))
    store.takes_s = TTL_S / 2
    world.run(lease.renew)
    assert not lease.expired
    assert lease.is_spent(0.5)


def test_H22_a_reader_renews_in_time(world):
    """H22: a lease that is used is renewed when a third of its time has passed, so that it
    outlives its first term without any help.
    """
    held = HeldLease(take(world.bucket, world.head()))
    for _ in range(4):
        world.advance(TTL_S / 2)
        assert world.run(held.is_held)
        assert world.sweep().leases_reaped == 0


def test_H28_a_lease_that_cannot_be_read_may_be_any_jobs(world):
    """H28: its owner is unknown: until it has expired no job is reaped."""
    job = world.run(lambda: BulkJob(world.db, NAME))
    world.run(job.let_go)
    world.advance(DAY_S / 2)
    world.fold()
    world.bucket.put(USERS.lease("damaged"), b"no lease")
    assert world.sweep().jobs_reaped == 0
    world.bucket.delete(USERS.lease("damaged"))
    assert world.sweep().jobs_reaped == 1
