"""The outcomes of one WAL object by the responses of the store (protocols §2, step 5)."""

from types import SimpleNamespace

import pytest

from reef.engine.commit.inflight import InflightObject, InflightSender
from reef.formats.wal_object import WalHeader, WalKind
from reef.manifest.head import HeadFinder
from reef.stores import Outcome, WriteResult
from tests.support.sweep_world import GRACE_S, NAME, USERS, World

CREATED = WriteResult(Outcome.CREATED)
EXISTS = WriteResult(Outcome.EXISTS)
UNKNOWN = WriteResult(Outcome.UNKNOWN)


class Script:
    """Scripted responses to PUTs; before the last one a fold passes the slot, and a sweep deletes
    the generation that a probe would find."""

    def __init__(self, world, responses, *, waits_s=0.0, folds=True):
        self.world, self.responses, self.waits_s, self.folds = (
            world,
            list(responses),
            waits_s,
            folds,
        )

    def fill(self, lsn, body):
        response = self.responses.pop(0)
        if not self.responses:
            self.world.bucket.runtime.sleep(self.waits_s)
            if self.folds:
                folded = self.world.publish(wal_floor=lsn + 1).generation
                self.world.publish()
                self.world.bucket.delete(USERS.manifest(folded))
        return response


@pytest.fixture
def world():
    """A namespace with one row in its log."""
    world = World()
    with world.db.writer(NAME) as writer:
        writer.put("k", b"0")
    return world


def send(world, script, *, shown=True):
    """Send one object behind the log; return the flight and the outcome."""
    runtime = world.bucket.runtime
    heads = HeadFinder(world.bucket, USERS)
    head = heads.find()
    header = WalHeader(
        lsn=max(world.slots()) + 1,
        kind=WalKind.BATCHES,
        epoch=1,
        writer_id="me",
        write_id=runtime.ulid(),
        created_at_ms=0,
    )
    batches = [SimpleNamespace(deadline=None)]
    flight = InflightObject(
        header, b"body", batches, runtime.stopwatch(), None, head=head if shown else None
    )
    sender = InflightSender(script, heads, 30.0, runtime)
    return flight, world.run(lambda: sender.send(flight))


@pytest.mark.parametrize("doubtful", [[UNKNOWN], [UNKNOWN, UNKNOWN]])
def test_H66_exists_after_an_attempt_without_response_is_proved_however_quick(world, doubtful):
    """H66: clocks may stop while the slot is folded, collected and filled again. The
    attempt without a response may have landed, so a floor above the slot leaves it unknown.
    """
    flight, outcome = send(world, Script(world, [*doubtful, EXISTS]))
    assert outcome.outcome is Outcome.UNKNOWN
    assert flight.doubt, "it is unknown, not refused"


def test_H66_a_slow_exists_is_proved_though_every_attempt_had_a_response(world):
    """H66: whatever is between client and store may have sent the request twice."""
    flight, outcome = send(world, Script(world, [EXISTS], waits_s=GRACE_S))
    assert outcome.outcome is Outcome.UNKNOWN
    assert flight.doubt


def test_exists_at_once_is_a_lost_slot(world):
    """One attempt with an immediate response needs no proof: the slot was taken before it came."""
    flight, outcome = send(world, Script(world, [EXISTS]))
    assert outcome.outcome is Outcome.EXISTS
    assert not flight.doubt


@pytest.mark.parametrize("responses", [[CREATED], [UNKNOWN, CREATED]])
@pytest.mark.parametrize("waits_s", [0.0, GRACE_S])
def test_an_object_that_landed_above_the_floor_counts(world, responses, waits_s):
    """A slow PUT is proved by the floor of the head that is read after it."""
    _, outcome = send(world, Script(world, responses, waits_s=waits_s, folds=False))
    assert outcome.outcome is Outcome.CREATED


def test_H13_a_slow_put_below_the_floor_is_unknown(world):
    """H13: what landed below the floor may have landed in a slot that was collected."""
    flight, outcome = send(world, Script(world, [CREATED], waits_s=GRACE_S))
    assert outcome.outcome is Outcome.UNKNOWN
    assert flight.doubt


def test_a_quick_put_that_is_folded_before_its_response_counts(world):
    """The head before it shows that the slot was open; a newer one does not make it doubtful."""
    _, outcome = send(world, Script(world, [CREATED]))
    assert outcome.outcome is Outcome.CREATED


def test_H52_a_quick_put_is_proved_if_no_head_showed_its_slot_open(world):
    """H52: an append of a stream may have been in the slot, and may have been collected."""
    flight, outcome = send(world, Script(world, [CREATED]), shown=False)
    assert outcome.outcome is Outcome.UNKNOWN
    assert flight.doubt
