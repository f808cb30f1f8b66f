"""Taking the writer role only where nobody else seems to have it."""

import asyncio
from dataclasses import replace

import pytest

import reef
import reef.aio
from reef.engine.commit.role import RECENT_S
from reef.formats.wal_object import WalKind
from reef.stores import Wrapper
from tests.bulk import append, ingest
from tests.collecting import NAME, USERS, World


@pytest.fixture
def world():
    """Give a namespace on virtual time."""
    return World()


def objects(store):
    """Return everything that is in a bucket, with its tags."""
    return [(info.key, info.tag) for info in store.list()]


def refused(world, db=None):
    """Ask for the role politely, in vain; return what was said. Nothing may have changed."""
    before = objects(world.bucket)
    with pytest.raises(reef.ConflictError) as caught:
        (db or world.db).writer(NAME, take_over=False)
    assert objects(world.bucket) == before
    return caught.value


def test_a_writer_that_is_there_is_named(world):
    """Who, since when, and what to do about it; it goes on as if nobody had asked."""
    writer = world.db.writer(NAME)
    lsn = writer.put("k", b"1").lsn
    world.advance(20)
    error = refused(world)
    assert error.context["epoch"] == world.db.info(NAME).writer_epoch == 1
    assert 20 <= error.context["age_s"] < 30
    assert error.context["lsn"] == lsn
    for said in (error.context["writer_id"], "epoch 1", "20 s ago", "take_over=True"):
        assert said in str(error)
    assert writer.put("k", b"2").lsn == lsn + 1


def test_taking_over_is_the_default(world):
    """A service restarts into its own fence; whoever says so takes the role as well."""
    first = world.db.writer(NAME)
    second = world.db.writer(NAME)
    third = world.db.writer(NAME, take_over=True)
    for fenced in (first, second):
        with pytest.raises(reef.FencedError):
            fenced.put("k", b"1")
    third.put("k", b"1")


def test_a_namespace_that_does_not_exist_yet(world):
    """It has no writer: it is made, in an empty bucket too."""
    with world.db.writer(NAME, take_over=False) as writer:
        writer.put("k", b"1")
    world.db.create("other")
    with world.db.writer("other", take_over=False) as writer:
        writer.put("k", b"1")
    assert [world.db.reader(name).get("k") for name in (NAME, "other")] == [b"1", b"1"]


def test_an_old_writer_is_passed_over(world):
    """After a minute of silence the role is taken, and the old one is fenced as ever."""
    old = world.db.writer(NAME)
    old.put("k", b"1")
    world.advance(RECENT_S - 1)
    refused(world)
    world.advance(2)
    with world.db.writer(NAME, take_over=False) as writer:
        assert writer.get("k") == b"1"
    with pytest.raises(reef.FencedError):
        old.put("k", b"2")


def test_a_commit_counts_as_much_as_a_fence(world):
    """A writer that was opened long ago is there for as long as it commits."""
    writer = world.db.writer(NAME)
    world.advance(10 * RECENT_S)
    writer.put("k", b"1")
    assert refused(world).context["lsn"] == 2


def test_a_closed_writer_cannot_be_told_apart(world):
    """Closing leaves no trace in the bucket: within the minute it is refused all the same."""
    with world.db.writer(NAME) as writer:
        writer.put("k", b"1")
    refused(world)
    world.advance(RECENT_S + 1)
    with world.db.writer(NAME, take_over=False) as writer:
        assert writer.get("k") == b"1"


def test_a_fold_hides_nobody(world):
    """What was just committed may lie below the floor by now."""
    with world.db.writer(NAME) as writer:
        writer.put("k", b"1")
    world.fold()
    assert world.head().wal_floor == 3
    assert refused(world).context["lsn"] == 2
    world.advance(RECENT_S + 1)
    world.db.writer(NAME, take_over=False)


def test_a_swept_log_hides_nobody_either(world):
    """Where the log was collected, the search ends; a gap there is older than a minute."""
    with world.db.writer(NAME) as writer:
        for _ in range(3):
            writer.put("k", b"1")
    world.fold()
    world.sweep_twice()
    assert len(world.slots()) < 4
    world.db.writer(NAME, take_over=False)


def test_jobs_are_no_writers(world):
    """A bulk load and a skip are passed over, to the writer before them or to nobody."""
    world.db.writer(NAME).put("k", b"1")
    world.advance(30)
    ingest(world.bucket, NAME, {b"x": b"1"})
    append(world.bucket, NAME, WalKind.SKIP)
    assert refused(world).context["lsn"] == 2
    world.advance(40)
    world.db.writer(NAME, take_over=False)


def test_what_a_repair_has_skipped_is_not_read(world):
    """It cannot be: the fence before it tells."""
    with world.db.writer(NAME) as writer:
        writer.put("k", b"1")
    world.bucket.put(USERS.wal_object(2), b"garbage")
    world.publish(skipped_lsns=(2,))
    assert refused(world).context["lsn"] == 1


class OwnClock(Wrapper):
    """A store whose clock is far from ours, and which cuts its dates to whole seconds."""

    ahead_s = 1e6

    def __init__(self, inner):
        super().__init__(inner)
        self.capabilities = replace(inner.capabilities, clock_resolution_s=1.0)

    def _dated(self, info):
        return replace(info, last_modified_s=float(int(info.last_modified_s + self.ahead_s)))

    def head(self, key):
        return self._dated(self.inner.head(key))

    def list(self, prefix="", start_after=""):
        return map(self._dated, self.inner.list(prefix, start_after))

    def now(self):
        return float(int(self.inner.now() + self.ahead_s))


def test_ages_go_by_the_clock_of_the_store(world):
    """However wrong ours is; and dates that are cut make nobody older than they are."""
    db = reef.Database(OwnClock(world.bucket))
    world.db.writer(NAME)
    assert refused(world, db).context["age_s"] < 10
    world.advance(RECENT_S - 0.5)
    refused(world, db)
    world.advance(3)
    db.writer(NAME, take_over=False)


def test_on_a_directory(tmp_path):
    """The same with real clocks."""
    db = reef.open(str(tmp_path / "data"))
    with db.writer(NAME, take_over=False) as writer:
        writer.put("k", b"1")
    before = objects(db.store)
    with pytest.raises(reef.ConflictError, match=r"0 s ago, at LSN 2\. Pass take_over=True"):
        reef.open(str(tmp_path / "data")).writer(NAME, take_over=False)
    assert objects(db.store) == before


def test_aio_passes_it_on():
    """The same for asyncio."""

    async def main():
        async with reef.aio.open("memory://take-over") as db:
            async with db.writer(NAME, take_over=False) as writer:
                await writer.put("k", b"1")
                with pytest.raises(reef.ConflictError, match="take_over=True"):
                    await db.writer(NAME, take_over=False)
                await writer.put("k", b"2")
            async with db.writer(NAME) as writer:
                assert await writer.get("k") == b"2"

    asyncio.run(main())
