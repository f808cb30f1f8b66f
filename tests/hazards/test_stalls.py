"""Histories in which a process stalls for longer than the retention, found by the simulator."""

import msgspec
import pytest

from reef.engine.handles.database import Database
from reef.errors import ConflictError
from reef.formats.wal_object import Job, WalKind, WalObject
from reef.jobs import fold, rebuild, sweep
from reef.stores import Wrapper
from tests.support.bulk_jobs import append, stage
from tests.support.sweep_world import NAME, USERS, World


class Stalling(Wrapper):
    """A bucket in which something happens just after the log was listed."""

    def __init__(self, inner, happens):
        super().__init__(inner)
        self._happens = happens

    def list(self, *where):
        listed = list(self.inner.list(*where))
        if where[0] == USERS.wal and self._happens is not None:
            happens, self._happens = self._happens, None
            happens()
        return iter(listed)


@pytest.fixture
def world():
    """Rows in the log, and a segment of which only the log shows whether it counts."""
    world = World()
    with world.db.writer(NAME, background=False) as writer:
        writer.put("a", b"0")
        world.fold()
        stage(world.bucket, NAME, {b"b": b"staged"})
        world.slots = [writer.put("a", b"%d" % number).lsn for number in (1, 2, 3)]
    return world


def stalled(world):
    """Return a database whose process stalls after its first listing of the log: a slot is folded,
    collected, and filled again.
    """

    def happen():
        world.fold()
        key = USERS.wal_object(world.slots[1])
        found = WalObject.decode(world.bucket.get(key), key)
        world.bucket.delete(key)
        late = msgspec.structs.replace(found.header, write_id=found.header.write_id[::-1])
        world.bucket.create(key, WalObject.encode(late, found.records))

    return Database(Stalling(world.bucket, happen))


def test_H67_a_sweep_that_stalled_plans_again(world):
    """No damage, only an old head (jobs_and_pins, seed 145)."""
    assert sweep(stalled(world), NAME, apply=True).applied
    assert dict(world.db.reader(NAME).scan()) == {b"a": b"3"}


def test_H67_a_fold_that_stalled_is_in_conflict(world):
    """Another fold has passed the slot: nothing is damaged, and nothing is lost."""
    with pytest.raises(ConflictError, match="Run the fold again"):
        fold(stalled(world), NAME)
    assert dict(world.db.reader(NAME).scan()) == {b"a": b"3"}


def test_H67_statistics_report_no_damage_after_a_stall(world):
    """They are an overview."""
    assert stalled(world).stats(NAME)


def test_H67_ingests_without_a_begin_do_not_count_twice_over_in_a_rebuild():
    """The slots of those that are left out are no gaps in which a begin may have been lost
    (folders_race_with_lives, seed 151).
    """
    world = World()
    with world.db.writer(NAME, background=False) as writer:
        writer.put("a", b"1")
    segment = stage(world.bucket, NAME, {b"a": b"of no job"}, "stray")
    for _ in range(3):
        append(world.bucket, NAME, WalKind.INGEST, Job("stray", key="k", segments=(segment,)))
    for info in list(world.bucket.list(USERS.manifests)):
        world.bucket.delete(info.key)
    report = rebuild(world.db, NAME, apply=True)
    assert not report.problems
    assert dict(world.db.reader(NAME).scan()) == {b"a": b"1"}


def test_H67_a_slot_of_an_ingest_that_is_left_out_is_no_gap():
    """The first ingest of a job landed in a slot that was folded and collected, and a rebuild
    leaves it out. No begin was lost there: an ingest behind it that has none does not count.
    """
    world = World()
    with world.db.writer(NAME, background=False) as writer:
        append(world.bucket, NAME, WalKind.BEGIN, Job("job"))
        lsn = writer.put("a", b"1").lsn
        world.fold()
    world.bucket.delete(USERS.wal_object(lsn))
    job = Job("job", segments=(stage(world.bucket, NAME, {b"b": b"loaded"}, "job"),))
    append(world.bucket, NAME, WalKind.INGEST, job, lsn=lsn)
    append(world.bucket, NAME, WalKind.INGEST, job)
    stray = stage(world.bucket, NAME, {b"a": b"of no job"}, "stray")
    append(world.bucket, NAME, WalKind.INGEST, Job("stray", segments=(stray,)))
    published = dict(world.db.reader(NAME).scan())
    for info in list(world.bucket.list(USERS.manifests)):
        world.bucket.delete(info.key)
    report = rebuild(world.db, NAME, apply=True)
    assert not report.problems
    assert dict(world.db.reader(NAME).scan()) == published == {b"a": b"1", b"b": b"loaded"}


def test_H67_a_fold_leaves_a_trace_of_an_ingest_that_does_not_count():
    """Its job was aborted before. Without the trace, a rebuild takes it for one that the fold has
    left out because it counts, and the abort for a late one (bulk_loads_and_writers, seed 313).
    """
    world = World()
    world.db.writer(NAME, background=False).close()
    world.fold()
    job = Job("job", key="k")
    append(world.bucket, NAME, WalKind.BEGIN, job)
    segment = stage(world.bucket, NAME, {b"a": b"aborted"}, job.id)
    append(world.bucket, NAME, WalKind.ABORT, job)
    append(world.bucket, NAME, WalKind.INGEST, Job("job", key="k", segments=(segment,)))
    world.fold()
    with world.db.writer(NAME, background=False) as writer:
        writer.put("b", b"1")
    world.fold()
    for info in list(world.bucket.list(USERS.manifests)):
        world.bucket.delete(info.key)
    report = rebuild(world.db, NAME, apply=True)
    assert not report.problems
    assert dict(world.db.reader(NAME).scan()) == {b"b": b"1"}
