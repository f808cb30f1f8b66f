"""Registered cursors: they continue where they were, and the log is kept for them."""

import pickle

import pytest

import reef
from reef import stores
from reef.formats.wal_object import Job, WalKind
from reef.telemetry import RequestMeter
from tests.support.bulk_jobs import append, ingest, make_with_window, stage
from tests.support.sweep_world import DAY_S, NAME, USERS, World


@pytest.fixture
def world():
    """Give a namespace on virtual time, with a writer."""
    world = World()
    world.writer = world.db.writer(NAME)
    return world


def seen(cursor):
    """Return the keys and values of a cursor's changes."""
    return [(change.key, change.row) for change in cursor]


def test_a_new_cursor_begins_at_the_end_or_at_a_given_lsn(world):
    """Earlier changes are not returned, unless `after_lsn` says so."""
    world.writer.put("a", b"1")
    now = world.db.cursor(NAME, "now")
    everything = world.db.cursor(NAME, "all", after_lsn=0)
    world.writer.put("b", b"2")
    assert seen(now) == [(b"b", b"2")]
    assert seen(everything) == [(b"a", b"1"), (b"b", b"2")]
    assert world.db.cursors(NAME) == {"all": 0, "now": 2}


def test_a_cursor_does_not_begin_past_the_end(world):
    """It would pass over what comes next; nothing is registered. At the end is fine."""
    world.writer.put("a", b"1")
    for past in (3, 2**70):
        with pytest.raises(reef.InvalidInputError, match="the last LSN is 2"):
            world.db.cursor(NAME, "c", after_lsn=past)
    assert world.db.cursors(NAME) == {}
    cursor = world.db.cursor(NAME, "c", after_lsn=2)
    world.writer.put("b", b"2")
    assert seen(cursor) == [(b"b", b"2")]
    assert world.db.cursor(NAME, "c", after_lsn=9).committed == 2, "it exists: it resumes"


def test_a_cursor_resumes_at_its_last_commit(world):
    """Reading alone moves nothing; the next process that opens the name resumes, whatever LSN it
    passes."""
    world.writer.put("a", b"1")
    with world.db.cursor(NAME, "c", after_lsn=0) as cursor:
        assert seen(cursor) == [(b"a", b"1")]
    with world.db.cursor(NAME, "c", after_lsn=0) as cursor:
        assert seen(cursor) == [(b"a", b"1")]
        assert (cursor.position, cursor.committed) == (2, 0)
        assert cursor.commit() == 2
        assert cursor.commit() == 2
    world.writer.put("b", b"2")
    assert seen(world.db.cursor(NAME, "c", after_lsn=0)) == [(b"b", b"2")]
    with pytest.raises(reef.ClosedError):
        next(iter(cursor))
    with pytest.raises(reef.ClosedError):
        cursor.commit()


def test_a_cursor_commits_up_to_the_last_processed_change(world):
    """`upto` commits a position between the last commit and the last row read, and no other."""
    for key in "abc":
        world.writer.put(key, b"v")
    cursor = world.db.cursor(NAME, "c", after_lsn=1)
    assert len(seen(cursor)) == 3
    assert cursor.commit(3) == cursor.committed == 3
    for wrong in (2, 5, -1, "3"):
        with pytest.raises(reef.InvalidInputError, match="upto_lsn"):
            cursor.commit(wrong)
    assert seen(world.db.cursor(NAME, "c")) == [(b"c", b"v")]
    assert cursor.commit() == 4


def test_a_cursor_keeps_exactly_its_log(world):
    """Sweeps retain the log after its commit, with its ingests, and delete the rest."""
    cursor = world.db.cursor(NAME, "c")
    for number in range(3):
        world.writer.put("k", b"%d" % number)
    lsn = ingest(world.bucket, NAME, {b"bulk": b"1"})
    world.fold()
    (bulk, *_) = world.compact()
    world.advance(2 * DAY_S)
    world.sweep_twice()
    assert {2, 3, 4, lsn} <= set(world.slots())
    assert world.bucket.head(USERS.segment(bulk))
    folded = world.head().segments
    expected = [(b"k", b"0"), (b"k", b"1"), (b"k", b"2"), (b"bulk", b"1")]
    assert seen(world.db.cursor(NAME, "c")) == expected
    assert seen(cursor) == expected
    cursor.commit()
    world.advance(DAY_S)
    world.sweep_twice()
    assert set(world.slots()) == {1, 5, lsn}, "fence, begin and ingest stay"
    with pytest.raises(reef.NotFoundError):
        world.bucket.head(USERS.segment(bulk))
    assert world.head().segments == folded
    world.writer.put("k", b"3")
    assert seen(cursor) == [(b"k", b"3")]


def test_a_cursor_keeps_no_segments(world):
    """It reads the log; folded and compacted objects are deleted as if it did not exist."""
    world.writer.put("k", b"1")
    world.fold()
    world.db.cursor(NAME, "c")
    (old,) = world.compact()
    world.advance(2 * DAY_S)
    world.sweep_twice()
    with pytest.raises(reef.NotFoundError):
        world.bucket.head(USERS.segment(old))


def test_a_dropped_cursor_holds_nothing(world):
    """Its log is deleted by the next sweep, and its reader gets an error."""
    cursor = world.db.cursor(NAME, "c")
    for number in range(3):
        world.writer.put("k", b"%d" % number)
    world.fold()
    world.advance(2 * DAY_S)
    assert not [key for key in world.sweep_twice() if key.startswith("wal/")]
    world.db.drop_cursor(NAME, "c")
    world.db.drop_cursor(NAME, "c")
    assert world.db.cursors(NAME) == {}
    world.sweep_twice()
    assert world.slots() == [1, 4]
    with pytest.raises(reef.NotFoundError, match="LSN 2 of users was garbage-collected"):
        seen(cursor)


def test_a_commit_after_a_drop(world):
    """It does not bring the cursor back."""
    cursor = world.db.cursor(NAME, "c")
    world.writer.put("k", b"1")
    assert len(seen(cursor)) == 1
    world.db.drop_cursor(NAME, "c")
    with pytest.raises(reef.NotFoundError, match="was dropped"):
        cursor.commit()
    assert world.db.cursors(NAME) == {}


def test_two_processes_with_one_cursor(world):
    """The second to commit gets ConflictError, and nothing moves back."""
    first, second = world.db.cursor(NAME, "c"), world.db.cursor(NAME, "c")
    world.writer.put("k", b"1")
    assert len(seen(first)) == 1
    world.writer.put("k", b"2")
    assert len(seen(second)) == 2
    second.commit()
    with pytest.raises(reef.ConflictError, match="another process has moved it"):
        first.commit()
    assert world.db.cursors(NAME) == {"c": 3}


def test_a_cursor_far_behind_the_folds(world):
    """It commits piece by piece, and continues from each, however many folds have passed it."""
    cursor = world.db.cursor(NAME, "c")
    for number in range(6):
        world.writer.put("k", b"%d" % number)
        world.fold()
    world.advance(2 * DAY_S)
    world.sweep_twice()
    values = []
    while True:
        cursor = world.db.cursor(NAME, "c")
        change = next(iter(cursor), None)
        if change is None:
            break
        values.append(change.row)
        next(iter(cursor), None)  # the position moves when the object is done
        cursor.commit()
        world.sweep_twice()
    assert values == [b"%d" % number for number in range(6)]


def test_a_cursor_classifies_jobs_as_all_readers_do():
    """A key that was committed below its position makes a second load void, though it is
    forgotten since.
    """
    world = World()
    make_with_window(world.db, NAME, 2)
    world.writer = world.db.writer(NAME)
    append(world.bucket, NAME, WalKind.BEGIN, Job("late", key="load"))
    ingest(world.bucket, NAME, {b"x": b"1"}, key="load")
    cursor = world.db.cursor(NAME, "c")
    staged = stage(world.bucket, NAME, {b"x": b"2"}, "late")
    append(world.bucket, NAME, WalKind.INGEST, Job("late", key="load", segments=(staged,)))
    world.writer.put("a", b"1")
    for number in range(3):
        world.advance(DAY_S)
        world.fold()
        world.sweep_twice()
        world.writer.put("a", b"more", idempotency_key=f"{number}")
    world.fold()
    assert "load" not in {entry.key for entry in world.head().dedup}
    assert {key for key, _ in seen(world.db.cursor(NAME, "c"))} == {b"a"}
    assert (b"x", b"1") in world.rows().items()
    assert cursor.committed == cursor.position


def test_following_by_a_cursor(world):
    """It waits for more, until its timeout."""
    cursor = world.db.cursor(NAME, "c")
    assert world.run(lambda: [c.key for c in cursor.follow(timeout_s=1)]) == []
    world.writer.put("k", b"1")
    assert world.run(lambda: [c.key for c in cursor.follow(timeout_s=1)]) == [b"k"]
    assert list(cursor) == []
    assert "committed up to 1" in repr(cursor)


def test_a_collected_beginning(world):
    """A cursor cannot be registered where the log is gone."""
    for number in range(3):
        world.writer.put("k", b"%d" % number)
    world.fold()
    world.sweep_twice()
    with pytest.raises(reef.NotFoundError, match="was garbage-collected") as caught:
        world.db.cursor(NAME, "c", after_lsn=0)
    assert caught.value.kind == "collected"
    assert world.db.cursors(NAME) == {}


@pytest.mark.parametrize("name", ["", "a\n", 7, "x" * 129])
def test_bad_names(world, name):
    """1 to 128 printable characters."""
    with pytest.raises(reef.InvalidInputError, match="not a valid name of a cursor"):
        world.db.cursor(NAME, name)


def test_a_cursor_belongs_to_its_process(world):
    """Pickled, it would be a second one with the same name."""
    with pytest.raises(reef.InvalidInputError, match="cannot be pickled"):
        pickle.dumps(world.db.cursor(NAME, "c"))


def test_requests_of_a_cursor_commit():
    """One manifest; nothing at all if nothing was read."""
    meter = RequestMeter()
    db = reef.Database(stores.open("memory://", meter=meter))
    writer = db.writer(NAME)
    cursor = db.cursor(NAME, "c")
    writer.put("k", b"1")
    assert len(seen(cursor)) == 1
    meter.reset()
    cursor.commit()
    assert meter.requests() == {"get": 2, "put": 1}
    cursor.commit()
    assert meter.requests() == {"get": 2, "put": 1}
    assert db.cursors(NAME) == {"c": 2}


def test_a_commit_whose_response_was_lost_is_not_mistaken_for_another(world):
    """It has moved the cursor, and no other process has: the next commit continues from there."""
    store = UnansweredOnce(world.bucket)
    cursor = reef.Database(store).cursor(NAME, "c", after_lsn=0)
    world.writer.put("a", b"1")
    assert seen(cursor) == [(b"a", b"1")]
    store.is_armed = True
    with pytest.raises(reef.OutcomeUnknownError):
        cursor.commit()
    world.writer.put("b", b"2")
    assert seen(cursor) == [(b"b", b"2")]
    assert cursor.commit() == world.db.cursors(NAME)["c"] == 3


class UnansweredOnce(stores.Wrapper):
    """Publishes a manifest, and loses the response and every read of it."""

    is_armed = False
    is_blind = False

    def create(self, key, body):
        """Lose the response, and the reads that could prove it."""
        result = self.inner.create(key, body)
        if self.is_armed and "/manifest/" in key:
            self.is_armed, self.is_blind = False, True
            return stores.WriteResult(stores.Outcome.UNKNOWN)
        return result

    def list(self, prefix="", start_after=""):
        """Fail once after that."""
        if self.is_blind:
            self.is_blind = False
            raise reef.UnavailableError("away")
        return self.inner.list(prefix, start_after)
