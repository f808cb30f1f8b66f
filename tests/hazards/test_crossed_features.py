"""Histories that cross features, found in a review of incarnations and of proofs by the floor.

Most need a name that was dropped and created again, and then one more event: damage in the
dropped incarnation, a load or a change stream at its very end, a process that stalls.
"""

import pytest

import reef
from reef.engine.commit.resync import Outcomes
from reef.engine.history.as_of import ReadTarget
from reef.engine.log.log import Log
from reef.engine.rows.input import to_ops
from reef.errors import CorruptionError, NotFoundError, OutcomeUnknownError
from reef.formats.wal_object import Job, OpKind, WalHeader, WalKind, WalObject
from reef.jobs import ingest, rebuild, verify
from reef.jobs.ingest.job import BulkJob, sorted_rows, staged_rows
from reef.manifest.head import HeadFinder, locate
from reef.spark.read_plan import take_pin
from reef.stores import Outcome, Wrapper, WriteResult
from tests.support.sweep_world import DAY_S, GRACE_S, NAME, USERS, At, World

OLD, NEW = {b"old": b"old"}, {b"new": b"new"}


def with_row(world, row):
    """Write a row and fold it."""
    with world.db.writer(NAME) as writer:
        for key, value in row.items():
            writer.put(key, value)
    world.fold()


def create_again(world):
    """Drop the name and create it again, with some time in between."""
    world.advance(100)
    world.db.drop(NAME)
    world.advance(10)
    world.db.create(NAME)
    world.advance(10)


@pytest.fixture
def world():
    """One row in each of two incarnations, and a snapshot of the first."""
    world = World()
    with_row(world, OLD)
    world.db.snapshot(NAME, name="old")
    create_again(world)
    with_row(world, NEW)
    return world


def manifests(world, names):
    """Return the keys of the manifests of an incarnation, the newest last."""
    return [info.key for info in world.bucket.list(names.manifests)]


def spoil(world, keys, *, damaged):
    """Damage objects, or lose them."""
    for key in keys:
        if damaged:
            world.bucket.put(key, b"damage")
        else:
            world.bucket.delete(key)


class BeforeTheDrop(Wrapper):
    """Calls something between the fences of a drop and its publish."""

    def __init__(self, inner, does):
        super().__init__(inner)
        self._does, self._manifests = does, 0

    def create(self, key, body):
        self._manifests += "/manifest/" in key
        if "/manifest/" in key and self._manifests == 2:  # the first one raises the epoch
            self._does()
        return self.inner.create(key, body)


# --- damage in one incarnation --------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3])
def test_H65_damaged_last_manifests_of_a_dropped_incarnation(world, count):
    """H65, H18: a reader served dropped rows, or said that the name was dropped.

    Root: `locate` took a manifest that replaces a damaged one as the end of its chain.
    """
    spoil(world, manifests(world, USERS)[-count:], damaged=True)
    assert dict(world.db.reader(NAME).scan()) == NEW
    assert world.db.namespaces() == [NAME]
    assert world.db.stats(NAME).generation == world.head().generation
    assert world.rows() == NEW


def test_H65_a_lost_last_manifest_of_a_dropped_incarnation(world):
    """H65: the name counted as dropped, and `undrop` brought the old rows back.

    Root: without a `successor` in the newest manifest the records were not listed.
    """
    spoil(world, manifests(world, USERS)[-1:], damaged=False)
    assert dict(world.db.reader(NAME).scan()) == NEW
    with pytest.raises(NotFoundError, match="it is live"):
        world.db.undrop(NAME)
    assert world.rows() == NEW


def test_H65_a_lost_record_of_a_successor(world):
    """H65: an incarnation without its record could be neither read nor created again.

    Root: `locate` ignored the successor that the manifest names, and went by the listing alone.
    """
    spoil(world, [USERS.successor(2)], damaged=False)
    assert dict(world.db.reader(NAME).scan()) == NEW
    assert world.rows() == NEW
    assert verify(world.db, NAME).generation == world.head().generation


def test_H65_manifests_of_the_current_incarnation_that_are_lost(world):
    """H65: `create` and `writer` made an empty namespace over a log and segments.

    Root: an announced incarnation was completed without the check that the first one gets.
    """
    names = world.names
    spoil(world, manifests(world, names), damaged=False)
    with pytest.raises(CorruptionError, match="a log and no manifest"):
        world.db.create(NAME)
    with pytest.raises(CorruptionError, match="a log and no manifest"):
        world.db.writer(NAME)
    world.run(lambda: rebuild(world.db, NAME, apply=True))
    assert world.rows() == NEW


@pytest.mark.parametrize("damaged", [False, True])
def test_H65_snapshots_where_an_earlier_incarnation_cannot_be_read(world, damaged):
    """H65: no snapshot could be listed or opened, those of the current incarnation included.

    Root: the earlier chains were read before the current one was asked. A snapshot that may be
    in a damaged chain is still an error that names the damage.
    """
    world.db.snapshot(NAME, name="new")
    spoil(world, manifests(world, USERS), damaged=damaged)
    with world.db.reader(NAME, snapshot="new") as reader:
        assert dict(reader.scan()) == NEW
    assert [snapshot.name for snapshot in world.db.snapshots(NAME)] == ["new"]
    with pytest.raises(CorruptionError if damaged else NotFoundError):
        world.db.reader(NAME, snapshot="old")


def test_H65_a_late_publish_in_an_earlier_incarnation_that_was_rebuilt(world):
    """H65, H14: every later sweep of the name failed with a ConflictError.

    Root: a rebuild published the end of an earlier incarnation with the generation of its drop.
    The sweeps of that incarnation have published more since, and one that stalled landed above.
    """
    world.advance(DAY_S)
    world.sweep()
    stalled = []

    class Dies(Wrapper):
        def create(self, key, body):
            if key.startswith(USERS.manifests):
                stalled.append((key, bytes(body)))
                raise reef.UnavailableError("the process is gone")
            return self.inner.create(key, body)

    world.advance(GRACE_S + 10)
    with pytest.raises(reef.UnavailableError):
        world.sweep(reef.Database(Dies(world.bucket)))
    spoil(world, manifests(world, USERS), damaged=False)
    world.run(lambda: rebuild(world.db, NAME, apply=True))
    assert world.bucket.create(*stalled[0]).landed
    assert world.rows() == NEW
    for _ in range(3):
        world.advance(GRACE_S + 10)
        world.sweep()
    assert world.rows() == NEW
    assert world.head().predecessors == ()


def test_H65_a_rebuild_where_an_earlier_incarnation_has_lost_its_manifests_and_record(world):
    """H65: the current incarnation could not be rebuilt.

    Root: the record that ended the earlier one was needed, though only that one is described by it.
    """
    create_again(world)
    with_row(world, {b"third": b"3"})
    for names in (USERS, world.names):
        spoil(world, manifests(world, names), damaged=False)
    spoil(world, [USERS.successor(2)], damaged=True)
    world.run(lambda: rebuild(world.db, NAME, apply=True))
    assert world.rows() == {b"third": b"3"}


def test_H65_a_rebuild_whose_write_for_an_earlier_incarnation_has_no_response(world):
    """H65: it said that this incarnation was restored. Root: the outcome was ignored."""
    spoil(world, manifests(world, USERS), damaged=False)

    class Silent(Wrapper):
        def create(self, key, body):
            if key.startswith(USERS.manifests):
                return WriteResult(Outcome.UNKNOWN)
            return self.inner.create(key, body)

    with pytest.raises(reef.UnavailableError, match="may not have been written"):
        world.run(lambda: rebuild(reef.Database(Silent(world.bucket)), NAME, apply=True))


# --- positions ------------------------------------------------------------------------------


def test_H65_the_lsn_of_a_load_that_commits_behind_the_fences_of_a_drop():
    """H65, H44: its LSN was used again, so that a stream behind it missed rows of the new life.

    Root: a successor began at the end of the fences, not at the end of the log.
    """
    world = World()
    with_row(world, OLD)
    loaded = []
    rows = {"id": [b"l"], "value": [b"x"]}
    store = BeforeTheDrop(world.bucket, lambda: loaded.append(ingest(world.db, NAME, rows).lsn))
    reef.Database(store).drop(NAME)
    world.db.create(NAME)
    assert world.head().wal_base > loaded[0]
    with pytest.raises(NotFoundError, match="created again"):
        world.db.reader(NAME).changes(after_lsn=loaded[0])


def test_H65_a_name_that_is_dropped_once_more_while_it_is_created_again():
    """H65: the end of the log was listed before another drop; that drop's end is another one."""
    world = World()
    with_row(world, OLD)
    world.db.drop(NAME)
    loaded = []
    rows = {"id": [b"l"], "value": [b"x"]}

    def drop_again():
        world.db.undrop(NAME)
        store = BeforeTheDrop(world.bucket, lambda: loaded.append(ingest(world.db, NAME, rows).lsn))
        reef.Database(store).drop(NAME)

    store = At(world.bucket, "list", "/wal/", drop_again, after=True)
    world.run(lambda: reef.Database(store).create(NAME))
    assert world.head().wal_base > loaded[0] + 1
    assert world.rows() == {}


def test_H65_a_change_stream_that_has_read_all_of_a_dropped_incarnation():
    """H65, H44: its consumer continued in the new one, and kept the rows that were dropped.

    Root: the last position of the old log was the first position of the new one.
    """
    world = World()
    with_row(world, OLD)
    stream = world.db.reader(NAME).changes()
    store = BeforeTheDrop(world.bucket, lambda: list(stream))
    reef.Database(store).drop(NAME)
    world.db.create(NAME)
    reader = world.db.reader(NAME)
    first = reader.last_lsn
    with_row(world, NEW)
    for position in range(1, stream.position + 1):
        with pytest.raises(NotFoundError, match="created again"):
            reader.changes(after_lsn=position)
    for after_lsn in (0, first):
        assert [change.key for change in reader.changes(after_lsn=after_lsn)] == [b"new"]


# --- pinned snapshots -----------------------------------------------------------------------


def test_H65_H51_a_pinned_reader_is_sent_elsewhere_after_a_re_creation():
    """H65, H51: a copy of a reader of a snapshot said that the namespace was dropped.

    Root: whether a dropped chain may be read was decided when the first copy was opened.
    """
    world = World()
    with_row(world, OLD)
    world.db.snapshot(NAME, name="old")
    with world.run(lambda: world.db.reader(NAME, snapshot="old")) as reader:
        create_again(world)
        reopen, args = reader.__reduce__()
        with world.run(lambda: reopen(*args)) as copy:
            assert dict(copy.scan()) == OLD


# --- stalls ---------------------------------------------------------------------------------


def late(world, lsn, kind=WalKind.SKIP, job=None):
    """Return an object that a stalled process has made for a slot."""
    header = WalHeader(
        lsn=lsn,
        kind=kind,
        epoch=0,
        job=job,
        writer_id="",
        write_id=world.bucket.runtime.ulid(),
        created_at_ms=int(world.bucket.runtime.wall_s() * 1000),
    )
    return WalObject.encode(header)


def collect_and_refill(world, lsn):
    """Fold and collect a slot behind other writes; then a stalled process fills it."""
    with world.db.writer(NAME, background=False) as writer:
        for number in range(3):
            writer.put("other", b"%d" % number)
    world.fold()
    world.sweep_twice()
    assert lsn not in world.slots()
    assert world.bucket.create(USERS.wal_object(lsn), late(world, lsn)).landed


def test_H67_an_outcome_that_is_resolved_while_its_slot_is_collected():
    """H67: `resolve` said "rejected" of a batch that had counted.

    Root: it classified the slots by a manifest from before a stall, in which they were collected.
    """
    world = World()

    class Silent(Wrapper):
        armed = False

        def create(self, key, body):
            result = self.inner.create(key, body)
            return WriteResult(Outcome.UNKNOWN) if self.armed and "/wal/" in key else result

    store = Silent(world.bucket)
    writer = reef.Database(store).writer(NAME, commit_deadline_s=0.0, background=False)
    store.armed = True
    with pytest.raises(OutcomeUnknownError) as caught:
        world.run(lambda: writer.put("k", b"counts"))
    assert caught.value.receipt is not None
    lsn = caught.value.receipt.lsn
    stalls = At(world.bucket, "list", "/wal/", lambda: collect_and_refill(world, lsn))
    outcomes = Outcomes(Log(stalls, USERS), HeadFinder(stalls, USERS))
    assert world.run(lambda: outcomes.resolve(caught.value)) == "unknown"
    assert world.rows()[b"k"] == b"counts"


def test_H67_a_pin_for_tasks_whose_log_is_collected_while_it_is_read():
    """H67: the driver of a distributed read passed over a slot that was collected and refilled.

    Root: it did not check its lease after the replay, as a pinned reader and its tasks do. A lease
    that was reaped meanwhile cannot be narrowed, and the pin is taken again.
    """
    world = World()
    with world.db.writer(NAME, background=False) as writer:
        lsn = writer.put("k", b"counts").lsn

    class Stalls(Wrapper):
        armed = True

        def get_tagged(self, key):
            if self.armed and key == USERS.wal_object(lsn):
                self.armed = False
                collect_and_refill(world, lsn)
            return self.inner.get_tagged(key)

    store = Stalls(world.bucket)

    def pinned():
        return take_pin(store, locate(store, NAME), ReadTarget(), 30.0)

    pin = world.run(pinned)
    assert not store.armed
    assert pin.manifest.wal_floor > lsn
    assert any(entry.lsn_min <= lsn <= entry.lsn_max for entry in pin.manifest.segments)
    assert world.rows()[b"k"] == b"counts"


@pytest.mark.parametrize("folded", [True, False])
def test_H67_a_rebuild_and_an_abort_that_landed_in_a_collected_slot(folded):
    """H67, H49: an acknowledged load was lost without a problem in the report.

    Root: a late ingest was recognized by the covers of folds, a late abort was not. It comes from
    a sweep that died with its PUT in flight, while the driver of the job had only stalled. Where no
    fold has passed the ingest, nothing shows which was first, and the report says so.
    """
    world = World()
    world.db.writer(NAME, background=False).close()

    def load():
        job = BulkJob(world.db, NAME, idempotency_key="load")
        rows = {"id": [b"l"], "value": [b"x"]}
        ops = to_ops(rows, job.schema, kind=OpKind.PUT, ttl_s=None, now_ms=0)
        staged = job.staging.stage([sorted_rows(staged_rows(ops))])
        job.let_go()
        with world.db.writer(NAME, background=False) as writer:
            lsn = [writer.put("p", b"%d" % number).lsn for number in range(4)][1]
        world.fold()
        world.sweep_twice(silent_job_s=1e6)
        assert lsn not in world.slots()
        abort = late(world, lsn, WalKind.ABORT, Job(job.id, key="load"))
        assert world.bucket.create(USERS.wal_object(lsn), abort).landed
        job.commit(staged)

    world.run(load)
    if folded:
        with_row(world, {b"p": b"4"})
    before = world.rows()
    assert before == {b"p": b"4" if folded else b"3", b"l": b"x"}
    spoil(world, manifests(world, USERS), damaged=False)
    report = world.run(lambda: rebuild(world.db, NAME))
    if not folded:
        assert "unknown which" in report.problems[0]
        return
    assert report.problems == ()
    world.run(lambda: rebuild(world.db, NAME, apply=True))
    assert world.rows() == before
    again = {"id": [b"l"], "value": [b"y"]}
    assert world.run(lambda: ingest(world.db, NAME, again, idempotency_key="load")).replayed
