"""H13, H14, H16, H28, H47, H48, H52, H54, H55, H57: jobs and zombies next to a real sweep."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import reef
from reef.engine.rows.input import to_ops
from reef.formats.manifest import SnapshotEntry
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.wal_object import Job, OpKind, WalKind
from reef.jobs import fold
from reef.jobs.ingest.append import StreamAppender
from reef.manifest import edits
from reef.manifest.head import HeadFinder, Publisher
from reef.stores import Outcome, Wrapper, agree_on_cas
from tests.support.bulk_jobs import append, ingest, stage
from tests.support.segment_copies import copy_segment
from tests.support.sweep_world import (
    DAY_S,
    GRACE_S,
    NAME,
    USERS,
    At,
    EachRequest,
    World,
    folded_world,
)

ROWS = {b"k%d" % number: b"v" for number in range(5)}


@pytest.fixture
def world():
    """Give a namespace with five rows in the log, folded into one segment."""
    return folded_world()


# --- jobs -----------------------------------------------------------------------------


def test_H54_a_committed_ingest_is_rooted_in_the_log(world):
    """H54: sweeps with a grace of zero between its commit and its fold."""
    world.publish(grace_ms=0)
    ingest(world.bucket, NAME, {b"bulk": b"1"})
    world.advance(60)
    assert world.sweep().kept["segments named by an ingest in the log"] == 1
    world.advance(60)
    world.sweep()
    assert world.rows() == {**ROWS, b"bulk": b"1"}
    world.fold()
    world.sweep()
    world.advance(60)
    world.sweep()
    assert world.rows() == {**ROWS, b"bulk": b"1"}


def test_H54_the_ingests_in_a_snapshots_log(world):
    """H54: folded and compacted since; the snapshot needs the segments its own log names."""
    pinned = world.publish()
    world.publish(snapshots=(SnapshotEntry("s", pinned.generation),), grace_ms=0)
    ingest(world.bucket, NAME, {b"bulk": b"1"})
    world.fold()
    (bulk, *_) = world.compact()
    world.advance(DAY_S)
    world.sweep()
    world.advance(60)
    world.sweep()
    assert world.bucket.head(USERS.segment(bulk))
    world.publish(snapshots=())
    world.advance(60)
    world.sweep()
    world.advance(60)
    assert f"segments/{bulk}.seg" in world.sweep().deleted


def test_H28_a_job_that_outlasts_the_grace_wins_wholly(world):
    """H28: its begin pins the segments it stages, for as long as it runs."""
    append(world.bucket, NAME, WalKind.BEGIN, Job("j1"))
    staged = stage(world.bucket, NAME, {b"bulk": b"1"}, "j1")
    for _ in range(3):
        world.advance(DAY_S)
        world.sweep(silent_job_s=10 * DAY_S)  # it has no lease
        world.fold()
    append(world.bucket, NAME, WalKind.INGEST, Job("j1", segments=(staged,)))
    assert world.rows() == {**ROWS, b"bulk": b"1"}


def test_H28_a_fold_that_outlasts_the_grace_fails_cleanly(world):
    """H28, H55: its segment was taken for an orphan; its publish is refused, and run again."""
    with world.db.writer(NAME) as writer:
        writer.put("late", b"1")

    class Pauses(Wrapper):
        def upload(self, key, parts):
            size = self.inner.upload(key, parts)
            world.advance(GRACE_S + 10)
            world.sweep()
            return size

    with pytest.raises(reef.ConflictError, match="was condemned"):
        fold(reef.Database(Pauses(world.bucket)), NAME)
    assert world.rows() == {**ROWS, b"late": b"1"}
    world.fold()
    assert world.rows() == {**ROWS, b"late": b"1"}


def test_H55_an_orphan_that_is_published_while_the_sweep_lists(world):
    """H55: at every request of the sweep; published means kept, condemned means refused."""
    for number in range(1, 40):
        world = World()
        with world.db.writer(NAME) as writer:
            writer.put("k", b"v")
        world.fold()
        world.publish(grace_ms=0)
        segment = world.head().segments[0]
        copied = copy_segment(world.bucket, USERS, segment, "01COPY")
        world.advance(60)
        outcome, count = [], [0]

        def publish(world=world, outcome=outcome, count=count, number=number, new=copied):
            count[0] += 1
            if count[0] != number:
                return
            try:
                world.publish(segments=(new,))
                outcome.append("published")
            except (reef.ConflictError, reef.NotFoundError) as error:
                outcome.append(type(error).__name__)

        db = reef.Database(EachRequest(world.bucket, publish))
        for _ in range(2):
            world.sweep(db)
            world.advance(10)
        assert world.rows() == {b"k": b"v"}, number
        if not outcome:
            break
    assert number > 15


def test_H57_a_key_counts_once_across_a_fold(world):
    """H57: the first ingest of a key was folded and swept; a second one is skipped by all."""
    ingest(world.bucket, NAME, {b"bulk": b"1"}, key="load")
    world.fold()
    world.sweep_twice()
    ingest(world.bucket, NAME, {b"bulk": b"2"}, key="load")
    assert world.rows() == {**ROWS, b"bulk": b"1"}
    world.fold()
    assert world.rows() == {**ROWS, b"bulk": b"1"}


# --- zombies --------------------------------------------------------------------------


def test_H13_a_zombie_finds_a_fence_in_its_slot(world):
    """H13: its successor wrote, folded and swept; fences stay, so its PUT is lost for certain."""
    zombie = world.db.writer(NAME)
    with world.db.writer(NAME) as successor:
        for number in range(5):
            successor.put("k", b"%d" % number)
    world.fold()
    world.sweep_twice()
    with pytest.raises(reef.FencedError):
        zombie.put("k", b"zombie")
    assert world.rows()[b"k"] == b"4"


def test_H52_an_idle_writer_after_ingests_were_folded_and_swept(world):
    """H52: the ingests keep its next slots; its write goes behind them and counts."""
    writer = world.db.writer(NAME)
    ingest(world.bucket, NAME, {b"k0": b"bulk"})
    ingest(world.bucket, NAME, {b"k1": b"bulk"})
    world.fold()
    world.sweep_twice()
    receipt = writer.put("k2", b"live")
    assert receipt.lsn >= world.head().wal_floor
    assert world.rows() == {**ROWS, b"k0": b"bulk", b"k1": b"bulk", b"k2": b"live"}


def append_batches(world, count):
    """Append batches of a stream, which takes no role."""
    stream = StreamAppender(reef.Database(world.bucket), NAME)
    for number in range(1, count + 1):
        rows = {"id": [b"s%d" % number], "value": [b"stream"]}
        stream.append("q", number, [to_ops(rows, DEFAULT_SCHEMA, kind=OpKind.PUT)])


def resolves(writer, receipt):
    """Find the newest head without applying the log."""
    writer.resolve(receipt)


def waits(writer, receipt):
    """Do nothing."""


@pytest.mark.parametrize("before", [waits, resolves])
@pytest.mark.parametrize("ack", ["prefix", "independent"])
def test_H52_an_idle_writer_after_appends_were_folded_and_swept(world, before, ack):
    """H52: its next slots are open again, and count no more. Its write goes behind the floor: an
    acknowledged one was lost where the head was newer than the writer's own place in the log."""
    writer = world.db.writer(NAME, max_parallel_writes=3, ack=ack)
    receipt = writer.put("k0", b"first")
    append_batches(world, 5)
    world.fold()
    world.sweep_twice()
    assert receipt.lsn + 1 not in world.slots(), "collected"
    before(writer, receipt)
    assert writer.put("k2", b"live").lsn >= world.head().wal_floor
    expected = {**ROWS, b"k0": b"first", b"k2": b"live"}
    expected |= {b"s%d" % number: b"stream" for number in range(1, 6)}
    assert world.rows() == dict(writer.scan()) == expected


def test_H52_a_condition_is_decided_on_appends_that_were_swept(world):
    """H52: the idle writer reads them before it decides."""
    writer = world.db.writer(NAME)
    append_batches(world, 3)
    world.fold()
    world.sweep_twice()
    with pytest.raises(reef.ConditionFailedError):
        writer.write(reef.Batch().put("k0", b"live"), when=[reef.absent("s1")])
    assert world.rows()[b"k0"] == b"v"


def test_H52_a_decision_that_takes_long(world, monkeypatch):
    """H52: while the condition is evaluated, its slot is filled, folded and collected: the write
    is not acknowledged."""
    writer = world.db.writer(NAME)
    decide = writer._decide

    def slow(conditions):
        decide(conditions)
        append_batches(world, 3)
        world.fold()
        world.sweep_twice()

    monkeypatch.setattr(writer, "_decide", slow)
    with pytest.raises(reef.OutcomeUnknownError):
        writer.write(reef.Batch().put("k2", b"live"), when=[reef.absent("x")])
    assert world.rows()[b"k2"] == b"v"


def test_H52_an_idle_writer_that_cannot_read_the_head_proves_its_write(world):
    """H52: the refresh fails, the PUT succeeds, in a slot that was collected: unknown."""
    writer = world.db.writer(NAME)
    append_batches(world, 3)
    world.fold()
    world.sweep_twice()
    unreachable = reef.UnavailableError("the store does not respond")
    writer._committer.resync = SimpleNamespace(run=Mock(side_effect=unreachable))
    with pytest.raises(reef.OutcomeUnknownError):
        writer.put("k2", b"live")
    assert world.rows()[b"k2"] == b"v"


def test_H14_a_publish_that_lands_in_a_swept_generation_does_not_count():
    """H14: stalled past the grace; its number was published, condemned and deleted meanwhile."""
    world = World()
    world.db.writer(NAME)
    slow = world.sim.process("slow")
    results = []

    class Stalls(Wrapper):
        armed = True

        def create(self, key, body):
            if self.armed and "/manifest/" in key:
                self.armed = False
                self.runtime.sleep(3600)
                for _ in range(3):
                    world.publish()
                self.runtime.sleep(60)
                world.sweep()
                self.runtime.sleep(GRACE_S + 60)
                assert key.removeprefix(USERS.root + "/") in world.sweep().deleted
                result = self.inner.create(key, body)
                assert result.outcome is Outcome.CREATED, "it landed where no reader lists"
                return result
            return self.inner.create(key, body)

    def publish():
        publisher = Publisher(Stalls(slow.store()), USERS)
        try:
            results.append(publisher.publish(lambda head: edits.raise_writer_epoch(head, 1)))
        except reef.ReefError as error:
            results.append(error)

    slow.spawn(publish)
    world.sim.run()
    assert results[0] == world.head(), "the head names another one there: it is published again"
    assert world.head().writer_epoch == 2


# --- found by the simulator -----------------------------------------------------------


def busy(world, times=5):
    """Publish and sweep until the first generations are gone."""
    for _ in range(times):
        world.publish()
    world.advance(60)
    world.sweep_twice()


@pytest.mark.parametrize("response", ["late", "too late for the listed one"])
def test_H47_a_slow_response_proves_no_head(world, response):
    """H47: behind a manifest whose response took longer than the grace, numbers may be swept.

    The probe that follows finds nothing, and that proves nothing: an opener that took it for
    the head once raised an epoch, fenced and wrote in a part of the past.
    """
    generation = world.head().generation
    late = At(
        world.bucket, "get_tagged", "/manifest/", lambda: busy(world), after=response == "late"
    )
    head = world.run(lambda: HeadFinder(late, USERS).find().manifest)
    assert not late.armed
    assert head == world.head()
    assert head.generation > generation + 5
    assert USERS.manifest(generation + 1).rsplit("/", 1)[1] not in world.keys("manifest")


def test_H47_a_cached_head_and_a_slow_probe(world):
    """H47: the same for a head that was fresh when the probe was sent."""
    slow = At(world.bucket, "get_tagged", "none yet", lambda: busy(world))
    finder = HeadFinder(slow, USERS)
    generation = finder.find().manifest.generation
    finder._store = At(world.bucket, "get_tagged", "/manifest/", lambda: busy(world))
    assert world.run(lambda: finder.find().manifest) == world.head()
    assert world.head().generation > generation + 5


@pytest.mark.parametrize("method", ["list", "create"])
def test_H48_a_namespace_is_not_made_again_in_its_own_past(method):
    """H48: "there is none" was long ago; meanwhile it was made, and its first generation swept."""
    world = World()
    agree_on_cas(world.bucket)
    made = []

    def make():
        with world.db.writer(NAME) as writer:
            for number in range(3):
                writer.put("k", b"%d" % number)
        world.fold()
        busy(world)
        made.append(world.head())

    late = At(world.bucket, method, "/manifest/", make, after=method == "list")
    with world.run(lambda: reef.Database(late).writer(NAME)) as writer:
        assert writer.get("k") == b"2", "the head names another first generation"
    assert made
    assert USERS.manifest(2).rsplit("/", 1)[1] not in world.keys("manifest")
    assert world.rows() == {b"k": b"2"}


def test_H16_a_replay_that_outlasted_its_lease_is_not_damage(world):
    """H16: folded and swept in the middle of it: open again."""
    with world.db.writer(NAME) as writer:
        for number in range(3):
            writer.put("late", b"%d" % number)

    def fold_and_sweep():
        world.advance(120)  # the opener's lease lasts a minute
        world.fold()
        world.sweep_twice()

    slot = USERS.wal_object(world.head().wal_floor + 1)
    late = At(world.bucket, "get_tagged", slot, fold_and_sweep)
    with pytest.raises(reef.UnavailableError, match="outlasted its lease"):
        world.run(lambda: reef.Database(late).writer(NAME))
    assert world.rows() == {**ROWS, b"late": b"2"}


def test_a_fold_whose_log_is_swept_gets_a_conflict(world):
    """Another fold was first and its log is gone: a conflict, not damage."""
    with world.db.writer(NAME) as writer:
        writer.put("late", b"1")
        writer.put("late", b"2")

    def fold_and_sweep():
        world.fold()
        world.sweep_twice()

    slot = USERS.wal_object(world.head().wal_floor + 1)
    late = At(world.bucket, "get_tagged", slot, fold_and_sweep)
    with pytest.raises(reef.ConflictError, match="has published generation"):
        world.run(lambda: fold(reef.Database(late), NAME))
    world.bucket.delete(slot)
    assert world.rows() == {**ROWS, b"late": b"2"}


def test_a_hole_in_the_log_is_damage_to_a_fold(world):
    """The same hole without a fold behind it is corruption."""
    with world.db.writer(NAME) as writer:
        writer.put("late", b"1")
        writer.put("late", b"2")
    slot = USERS.wal_object(world.head().wal_floor + 1)
    late = At(world.bucket, "get_tagged", slot, lambda: world.bucket.delete(slot))
    with pytest.raises(reef.CorruptionError, match="no fold has passed it"):
        world.run(lambda: fold(reef.Database(late), NAME))


def test_H28_a_fold_that_stalled_has_lost_only_its_own_work(world):
    """Taken for dead and swept: the error says to run again, not that the bucket is damaged.

    Found by the simulator (folders_race, seed 5313 of that day).
    """
    with world.db.writer(NAME) as writer:
        writer.put("late", b"1")

    def stall():
        world.advance(DAY_S)
        world.sweep_twice(retain_generations_s=9.0 * DAY_S)
        world.sweep(retain_generations_s=9.0 * DAY_S)

    late = At(world.bucket, "head", "/segments/", stall)
    with pytest.raises(reef.ConflictError, match="before it published them"):
        world.run(lambda: fold(reef.Database(late), NAME))
    assert world.rows() == {**ROWS, b"late": b"1"}
    world.fold()
    assert world.rows() == {**ROWS, b"late": b"1"}


def test_H28_a_compaction_that_stalled_releases_its_role(world):
    """The same for a compactor: the inputs of its merge are still there."""

    def stall():
        world.advance(2 * DAY_S)
        world.sweep_twice(silent_compactor_s=60.0)
        world.sweep(silent_compactor_s=60.0)

    late = At(world.bucket, "head", "/segments/", stall)
    report = world.run(lambda: reef.jobs.compact(reef.Database(late), NAME, full=True))
    assert report.outcome == "superseded"
    assert world.rows() == ROWS
    assert world.run(lambda: reef.jobs.compact(world.db, NAME, full=True)).outcome == "compacted"
    assert world.rows() == ROWS


def test_H12_a_late_fence_in_a_collected_slot_is_not_taken_for_the_log(world):
    """A replay outlasts its lease: the log is folded and collected under it, and an opener that
    was fenced off long ago puts its fence where an acknowledged write had been. Found by
    exploring two openers with M = 2 under collection.
    """
    with world.db.writer(NAME) as writer:
        lsn = writer.put("late", b"1").lsn
    epoch = world.head().writer_epoch

    def collect_and_fence():
        world.fold()
        world.advance(2 * DAY_S)
        world.sweep_twice()
        assert lsn not in world.slots()
        append(world.bucket, NAME, WalKind.FENCE, lsn=lsn, epoch=epoch)

    late = At(world.bucket, "get_tagged", USERS.wal_object(lsn), collect_and_fence)
    opened = world.run(lambda: reef.Database(late).writer(NAME, background=False))
    assert world.run(lambda: opened.get("late")) == b"1"
    assert world.run(lambda: dict(opened.scan())) == {**ROWS, b"late": b"1"}
    world.run(opened.close)
    assert world.rows() == {**ROWS, b"late": b"1"}
