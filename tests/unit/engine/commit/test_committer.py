"""Edges of the commit path that only one line each protects; every test here kills a mutant."""

import threading

import msgspec
import pytest

import reef
from reef.engine.commit.resync import Outcomes
from reef.engine.log.log import Log
from reef.errors import ErrorKind, InvalidInputError, OutcomeUnknownError
from reef.formats.wal_object import BatchHeader, Job, WalHeader, WalKind, WalObject
from reef.manifest.dedup import DedupWindow
from reef.manifest.head import HeadFinder, Publisher
from reef.paths import Namespace
from reef.stores import Meter, ReadBack, Retry, Wrapper
from reef.stores.memory import MemoryStore
from reef.types import Receipt
from tests.support.bulk_jobs import append
from tests.unit.engine.commit.test_inflight_queue import pending, queue

NAME = "users"
USERS = Namespace(NAME)


class Stalls(Wrapper):
    """Holds the PUT into one slot back for half a second, or until a later one comes; it lands
    before that one then."""

    slot = None

    def __init__(self, inner):
        super().__init__(inner)
        self.is_stalled, self.later, self.landed = (threading.Event() for _ in range(3))

    def create(self, key, body):
        if key == self.slot and not self.is_stalled.is_set():
            self.is_stalled.set()
            self.later.wait(0.5)
            result = self.inner.create(key, body)
            self.landed.set()
            return result
        if self.slot is not None:
            assert self.is_stalled.wait(60)
            if key >= self.slot:
                self.later.set()
                assert self.landed.wait(60)
        return self.inner.create(key, body)


def test_H45_a_lost_slot_waits_for_all_that_is_in_flight():
    """Protocol section 2, step 4: without an `after` a PUT that lands behind a lost slot counts.
    If its batch were queued again before that PUT has its response, it would be applied twice.
    """
    store = Stalls(MemoryStore())
    db = reef.Database(ReadBack(Retry(Meter(store))))
    writer = db.writer(
        NAME, ack="independent", max_parallel_writes=2, group_window_ms=0.0, group_bytes_max=1
    )
    lsn = writer._committer._next_lsn
    append(store.inner, NAME, WalKind.BEGIN, Job("job"), lsn)
    store.slot = USERS.wal_object(lsn + 1)
    futures = [writer.put(key, b"v", wait=False) for key in ("a", "b")]
    writer._committer.drive_in_background()
    assert sorted(future.result(60).lsn for future in futures) == [lsn + 1, lsn + 2]
    writer.close()
    changed = [change.key for change in db.reader(NAME).changes()]
    assert sorted(changed) == [b"a", b"b"], "each of them once"


def test_H26_batches_of_an_interrupted_sender_are_unknown_if_the_next_one_is_refused():
    """H26: the first attempt may have landed, so the refusal of a later one decides nothing."""

    class Interrupts(Wrapper):
        attempts = None

        def create(self, key, body):
            if self.attempts is None or not key.startswith(USERS.wal):
                return self.inner.create(key, body)
            self.attempts += 1
            if self.attempts == 1:
                self.inner.create(key, body)
                sent.extend(writer._committer.pending())
                raise KeyboardInterrupt
            raise InvalidInputError("no permission", kind=ErrorKind.ACCESS_DENIED)

    sent = []
    store = Interrupts(MemoryStore())
    writer = reef.Database(ReadBack(Retry(Meter(store)))).writer(NAME)
    store.attempts = 0
    with pytest.raises(KeyboardInterrupt):
        writer.put("k", b"1")
    (batch,) = sent
    writer._committer.drive(batch)
    assert isinstance(batch.result, OutcomeUnknownError)


def test_records_of_one_object_have_one_schema():
    """The header names one schema, by which all records of the object are read."""
    one, other = pending(), pending()
    other.schema_id = one.schema_id + 1
    waiting = queue(one, other)
    assert waiting.next_group(0, flushing=True) == [one]
    assert waiting.next_group(0, flushing=True) == [other]


def test_a_window_that_holds_a_part_of_an_object_does_not_reach_back_to_it():
    """Of three keys at one LSN the first has left the window: it may have counted there."""
    window = DedupWindow((), 2)
    keyed = tuple(BatchHeader(1, key, "digest") for key in ("a", "b", "c"))
    window.add(WalHeader(5, WalKind.BATCHES, 1, "w", "id", 0, batches=keyed))
    assert "a" not in window
    assert not window.reaches_back_to(5)
    assert window.reaches_back_to(6)


# --- resolving ------------------------------------------------------------------------


@pytest.fixture
def db():
    """A database with a namespace and one row."""
    db = reef.open("memory://")
    with db.writer(NAME) as writer:
        writer.put("k", b"0")
    return db


def receipt(lsn, write_id):
    """Return the receipt of a write without a response."""
    return Receipt(NAME, lsn, 0, 1, write_id, 1)


def test_H45_a_void_object_was_rejected(db):
    """H45: it is in its slot, and everybody passes over it."""
    head = HeadFinder(db.store, USERS).find().manifest
    log = Log(db.store, USERS)
    last = max(slot.lsn for slot in log.filled(1))
    header = WalHeader(
        last + 1,
        WalKind.BATCHES,
        head.writer_epoch,
        "w",
        "void",
        0,
        after=(log.read(last - 1).header.write_id, "another"),
    )
    assert log.fill(header.lsn, WalObject.encode(header)).landed
    outcomes = Outcomes(log, HeadFinder(db.store, USERS))
    assert outcomes.resolve(receipt(header.lsn, "void")) == "rejected"


def test_H67_resolve_finds_the_head_from_scratch(db):
    """H67: a probe misses where the generations in between were swept, and the object in a
    slot below the floor by now proves nothing.
    """
    heads, log = HeadFinder(db.store, USERS), Log(db.store, USERS)
    heads.find()
    last = max(slot.lsn for slot in log.filled(1))
    publisher = Publisher(db.store, USERS)
    folded = publisher.publish(lambda head: msgspec.structs.replace(head, wal_floor=last + 1))
    publisher.publish(lambda head: head)
    db.store.delete(USERS.manifest(folded.generation))
    assert Outcomes(log, heads).resolve(receipt(last, "mine")) == "unknown"
