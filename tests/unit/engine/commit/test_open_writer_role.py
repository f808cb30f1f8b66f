"""`take_over=False`: the role is refused while another writer seems active."""

import asyncio
from dataclasses import replace

import pytest

import reef
import reef.aio
from reef.engine.commit.open_writer import RECENT_S
from reef.formats.wal_object import WalKind
from reef.stores import Wrapper
from tests.support.bulk_jobs import append, ingest
from tests.support.sweep_world import NAME, USERS, World


@pytest.fixture
def world():
    """Give a namespace on virtual time."""
    return World()


def objects(store):
    """Return everything that is in a bucket, with its tags."""
    return [(info.key, info.tag) for info in store.list()]


def refused(world, db=None):
    """Open with take_over=False, which must fail; return the error. Nothing may have changed."""
    before = objects(world.bucket)
    with pytest.raises(reef.ConflictError) as caught:
        (db or world.db).writer(NAME, take_over=False)
    assert objects(world.bucket) == before
    return caught.value


def test_a_writer_that_is_there_is_named(world):
    """The error names the writer, its age and the remedy; that writer continues unharmed."""
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


def test_acquiring_the_role_is_the_default(world):
    """A service restarts into its own fence; with take_over=True it takes the role."""
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


def test_a_clean_close_releases_the_role(world):
    """The next writer need not take over, and that again and again."""
    for number in range(3):
        with world.db.writer(NAME, take_over=False) as writer:
            assert writer.get("k") == (b"%d" % (number - 1) if number else None)
            writer.put("k", b"%d" % number)


def test_a_close_without_a_write_releases_the_role(world):
    """A writer that only opened has a fence in the log."""
    world.db.writer(NAME).close()
    world.db.writer(NAME, take_over=False)


def test_a_clean_close_releases_only_its_own_role(world):
    """A writer that opened since is active, whichever was closed before or after it."""
    world.db.writer(NAME).close()
    active = world.db.writer(NAME)
    refused(world)
    active.put("k", b"1")
    assert refused(world).context["epoch"] == 2


def test_a_fenced_writer_releases_nothing(world):
    """Its role is another's by now: closing it does not free that one."""
    fenced = world.db.writer(NAME)
    active = world.db.writer(NAME)
    with pytest.raises(reef.FencedError):
        fenced.put("k", b"1")
    fenced.close()
    refused(world)
    active.close()
    world.db.writer(NAME, take_over=False)


def test_a_fenced_writer_keeps_the_release_of_its_successor(world):
    """It knows that the role is another's: closing it overwrites nothing."""
    fenced, active = world.db.writer(NAME), world.db.writer(NAME)
    with pytest.raises(reef.FencedError):
        fenced.put("k", b"1")
    active.close()
    fenced.close()
    world.db.writer(NAME, take_over=False)


def test_a_release_is_of_one_writer(world):
    """The same epoch of another writer, in a bucket that was restored, frees nothing."""
    world.db.writer(NAME)
    epoch = world.db.info(NAME).writer_epoch
    world.bucket.put(USERS.released, b'{"epoch":%d,"writer_id":"another"}' % epoch)
    refused(world)


def test_a_stale_release_does_not_free_the_role(world):
    """A writer that does not know that it is fenced overwrites the record of its successor."""
    stale, active = world.db.writer(NAME), world.db.writer(NAME)
    active.close()
    stale.close()
    refused(world)


@pytest.mark.parametrize("damage", [b"", b"{", b'{"epoch": 1}', b"\xff"])
def test_a_damaged_release_does_not_free_the_role(world, damage):
    """It is refused as after a crash, and in a minute it is free."""
    world.db.writer(NAME).close()
    world.bucket.put(USERS.released, damage)
    refused(world)
    world.advance(RECENT_S + 1)
    world.db.writer(NAME, take_over=False)


def test_a_close_whose_release_cannot_be_stored_is_a_close(world):
    """The release is a hint: the writes are durable without it."""

    class Refusing(Wrapper):
        def put(self, key, body):
            if key == USERS.released:
                raise reef.UnavailableError("away")
            return self.inner.put(key, body)

    with reef.Database(Refusing(world.bucket)).writer(NAME) as writer:
        writer.put("k", b"1")
    refused(world)
    assert world.db.reader(NAME).get("k") == b"1"


def test_a_release_survives_a_fold(world):
    """The objects of the writer may be below the floor."""
    with world.db.writer(NAME) as writer:
        writer.put("k", b"1")
    world.fold()
    world.db.writer(NAME, take_over=False)


def test_a_fold_hides_no_writer(world):
    """A recent commit may be below the floor by now."""
    world.db.writer(NAME).put("k", b"1")
    world.fold()
    assert world.head().wal_floor == 3
    assert refused(world).context["lsn"] == 2
    world.advance(RECENT_S + 1)
    world.db.writer(NAME, take_over=False)


def test_a_swept_log_hides_no_writer_either(world):
    """Where the log was collected, the search ends; a gap there is older than a minute."""
    with world.db.writer(NAME) as writer:
        for _ in range(3):
            writer.put("k", b"1")
    world.fold()
    world.sweep_twice()
    assert len(world.slots()) < 4
    world.db.writer(NAME, take_over=False)


def test_jobs_are_no_writers(world):
    """A bulk load and a skip are ignored; the writer's object before them counts, if any."""
    world.db.writer(NAME).put("k", b"1")
    world.advance(30)
    ingest(world.bucket, NAME, {b"x": b"1"})
    append(world.bucket, NAME, WalKind.SKIP)
    assert refused(world).context["lsn"] == 2
    world.advance(40)
    world.db.writer(NAME, take_over=False)


def test_lsns_that_a_repair_has_skipped_are_not_read(world):
    """It cannot be read: the fence before it shows the writer."""
    world.db.writer(NAME).put("k", b"1")
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
    """However wrong ours is; truncated dates make no writer appear older."""
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
    writer = db.writer(NAME, take_over=False)
    writer.put("k", b"1")
    before = objects(db.store)
    with pytest.raises(reef.ConflictError, match=r"0 s ago, at LSN 2\. Pass take_over=True"):
        reef.open(str(tmp_path / "data")).writer(NAME, take_over=False)
    assert objects(db.store) == before
    writer.close()
    reef.open(str(tmp_path / "data")).writer(NAME, take_over=False).close()


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
