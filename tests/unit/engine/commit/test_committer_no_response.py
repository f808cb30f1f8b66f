"""Writers without a definite response: fences, lost slots, queued batches, skipped slots."""

from collections import deque
from types import SimpleNamespace

import pytest

import reef
from reef.engine.commit.committer import Committer, State
from reef.engine.commit.open_writer import WriterOpening
from reef.engine.commit.resync import Outcomes
from reef.engine.log.log import Log
from reef.errors import OutcomeUnknownError, UnavailableError
from reef.formats.wal_object import WalKind
from reef.manifest.head import HeadFinder
from reef.paths import number_of
from reef.stores import Outcome, Wrapper, WriteResult
from tests.support.bulk_jobs import append
from tests.support.sweep_world import NAME, USERS, World


@pytest.fixture
def world():
    """An empty namespace."""
    world = World()
    world.db.create(NAME)
    return world


def test_a_fence_is_sent_until_the_response_is_definite():
    """A fence that may or may not be stored fences no writer yet."""
    results = [WriteResult(Outcome.UNKNOWN), WriteResult(Outcome.CREATED)]
    log = SimpleNamespace(fill=lambda lsn, body: results.pop(0))
    opening = SimpleNamespace(_log=log, _namespace=USERS)
    assert WriterOpening._fill(opening, 1, b"fence").landed
    assert results == []


def test_an_opening_without_a_response_to_its_fence_fails():
    """It does not become the writer by a fence of which nothing is known."""
    log = SimpleNamespace(fill=lambda lsn, body: WriteResult(Outcome.UNKNOWN))
    opening = SimpleNamespace(_log=log, _namespace=USERS)
    with pytest.raises(OutcomeUnknownError):
        WriterOpening._fill(opening, 1, b"fence")


def test_a_listing_without_the_lost_slot_is_old():
    """H9: the slot was taken by another object, so a listing that lacks it proves nothing; the
    batch is not sent there again."""
    world = World()

    class Stale(Wrapper):
        """A bucket whose next listing of the log lacks the newest object."""

        stale = False

        def __init__(self, inner):
            super().__init__(inner)
            self.sent = []

        def list(self, prefix="", start_after=""):
            found = list(self.inner.list(prefix, start_after))
            if self.stale and prefix == USERS.wal:
                self.stale = False
                found.pop()
            return iter(found)

        def create(self, key, body):
            if key.startswith(USERS.wal):
                self.sent.append(number_of(key))
            return self.inner.create(key, body)

    store = Stale(world.bucket)
    db = reef.Database(store)

    def lose_a_slot():
        with db.writer(NAME, background=False) as writer:
            writer.put("a", b"1")
            lost = append(world.bucket, NAME, WalKind.SKIP)
            store.stale, store.sent = True, []
            assert writer.put("b", b"2").lsn == lost + 1
            return lost

    lost = world.run(lose_a_slot)
    assert not store.stale, "there was such a listing"
    assert store.sent == [lost, lost + 1]


def test_batches_that_were_never_sent_are_completed_with_the_error_of_the_writer():
    """Their callers would wait for ever behind a batch whose outcome is unknown."""
    completed = []
    committer = SimpleNamespace(
        _state=State.LOST,
        _inflight=deque(),
        _completions=SimpleNamespace(complete=lambda *result: completed.append(result)),
        _inflight_metrics=SimpleNamespace(record_inflight=lambda inflight: None),
        _queue=SimpleNamespace(clear=lambda: ["first", "second"]),
        _changed=SimpleNamespace(notify_all=lambda: None),
        namespace=USERS,
    )
    error = UnavailableError("the store is gone")
    Committer._finish(committer, error)
    assert completed == [("first", error), ("second", error)]


def test_a_write_behind_a_skipped_slot_is_resolved(world):
    """A repair has skipped a slot below it: the log continues there."""
    with world.db.writer(NAME) as writer:
        skipped, receipt = writer.put("a", b"1").lsn, writer.put("b", b"2")
    world.bucket.delete(USERS.wal_object(skipped))
    world.publish(skipped_lsns=(skipped,))
    outcomes = Outcomes(Log(world.bucket, USERS), HeadFinder(world.bucket, USERS))
    assert outcomes.resolve(receipt) == "committed"


def test_a_forked_view_leaves_the_lease_of_its_parent_alone(world):
    """H51: the parent reads on with it."""
    view = world.db.reader(NAME, pin=True)
    (lease,) = world.keys("leases")
    runtime = view._runtime
    view._runtime = SimpleNamespace(process_id=lambda: -1)
    view.close()
    assert world.keys("leases") == [lease]
    view._closed, view._runtime = False, runtime
    view.close()
    assert world.keys("leases") == []
