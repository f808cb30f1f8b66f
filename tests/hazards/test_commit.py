"""H1, H2, H9, H20, H45, H46: one commit, whatever the responses and the rivals."""

import threading
from concurrent.futures import Future
from contextlib import suppress

import pytest

import reef
from reef.engine.commit.inflight import Pending
from reef.engine.rows.batch import Batch, encode_batch
from reef.errors import ConditionFailedError, FencedError, NotFoundError
from reef.formats.wal_object import BatchHeader, Job, WalKind, WalObject
from reef.jobs import fold
from reef.paths import Namespace, number_of
from reef.stores import Meter, ReadBack, Retry, RetryPolicy, Wrapper
from reef.stores.memory import MemoryStore
from reef.testing import Fault, Faults, Rule
from tests.support.bulk_jobs import append, ingest

NAME = "users"
USERS = Namespace(NAME)
QUICK = RetryPolicy(attempts_max=5, deadline_s=5.0, first_delay_s=0.001, delay_max_s=0.002)


def over(bucket):
    """Return a database over a bucket, with the usual wrappers."""
    return reef.Database(ReadBack(Retry(Meter(bucket), QUICK), QUICK))


def objects(bucket):
    """Return the headers of the batches in the log, in order."""
    found = [WalObject.decode(bucket.get(i.key), i.key).header for i in bucket.list(USERS.wal)]
    return [header for header in found if header.kind is WalKind.BATCHES]


# --- false responses -----------------------------------------------------------------

AMBIGUOUS_FAULTS = [
    Fault.FAIL_AFTER,
    Fault.FAIL_BEFORE,
    Fault.CONFLICT_409,
    Fault.THROTTLE_429_AFTER,
]


@pytest.mark.parametrize("fault", AMBIGUOUS_FAULTS)
def test_H1_H2_a_commit_with_a_lost_or_false_response_is_one_commit(fault):
    """H1, H2: landed and unheard, or "conflict" with the slot open: one LSN, one ack each."""
    bucket = MemoryStore()
    faults = Faults(bucket)
    writer = over(faults).writer(NAME)
    faults.rules.append(Rule(fault, "create", "*/wal/*", times=2))
    receipts = [writer.put("k", b"%d" % n) for n in range(3)]
    assert faults.rules[0].struck == 2
    assert [receipt.lsn for receipt in receipts] == [2, 3, 4]
    assert [header.write_id for header in objects(bucket)] == [r.write_id for r in receipts]
    assert writer.get("k") == b"2"
    assert dict(over(bucket).reader(NAME).scan()) == {b"k": b"2"}


def test_H2_a_conflict_with_a_foreign_object_is_a_lost_slot():
    """H2: the same response with a job's object in the slot: the batch goes to the next one."""
    bucket = MemoryStore()
    faults = Faults(bucket)
    writer = over(faults).writer(NAME)
    append(bucket, NAME, WalKind.BEGIN, Job("j"))
    faults.rules.append(Rule(Fault.CONFLICT_409, "create", "*/wal/*", times=1))
    assert writer.put("k", b"1").lsn == 3
    assert len(objects(bucket)) == 1


# --- a cache in between ---------------------------------------------------------------


class Stale(Wrapper):
    """A cache in front of the bucket, which may serve old responses.

    Old bodies, old listings and "not found" alike, while it is enabled. Conditional
    writes reach the bucket, as they do through every proxy.
    """

    stale = False

    def __init__(self, inner):
        super().__init__(inner)
        self._bodies, self._lists = {}, {}

    def get_tagged(self, key):
        if not self.stale or key not in self._bodies:
            self._bodies[key] = self._fetch(lambda: self.inner.get_tagged(key))
        if self._bodies[key] is None:
            raise NotFoundError(f"no object {key}")
        return self._bodies[key]

    def list(self, prefix="", start_after=""):
        asked = (prefix, start_after)
        if not self.stale or asked not in self._lists:
            self._lists[asked] = list(self.inner.list(prefix, start_after))
        return iter(self._lists[asked])

    def _fetch(self, call):
        try:
            return call()
        except NotFoundError:
            return None


@pytest.mark.parametrize("ack", ["prefix", "independent"])
def test_H9_fencing_works_through_a_stale_cache(ack):
    """H9: the old writer sees only old responses: it acknowledges nothing after the fence."""
    bucket = MemoryStore()
    cache = Stale(bucket)
    old = over(cache).writer(NAME, ack=ack, commit_deadline_s=0.2)
    old.put("k", b"old")
    cache.stale = True
    new = over(bucket).writer(NAME, ack=ack)
    receipt = new.put("k", b"new")
    for _ in range(2):
        with pytest.raises(reef.ReefError):
            old.put("k", b"zombie")
    assert new.get("k") == b"new"
    assert dict(over(bucket).reader(NAME).scan()) == {b"k": b"new"}
    assert [header.write_id for header in objects(bucket)][-1] == receipt.write_id
    cache.stale = False
    with over(cache).writer(NAME) as writer:
        assert writer.get("k") == b"new"


class TakesASlot(Wrapper):
    """Holds a batch back until it is released, and then fills its slot with another object."""

    def __init__(self, inner):
        super().__init__(inner)
        self.lsn, self.released = 0, threading.Event()

    def create(self, key, body):
        """Lose the slot, if it is this one."""
        if self.lsn and key == USERS.wal_object(self.lsn):
            self.lsn = 0
            assert self.released.wait(30)
            append(self.inner, NAME, WalKind.SKIP, lsn=number_of(key))
        return self.inner.create(key, body)


def test_H45_rows_shown_early_are_not_applied_again_after_a_lost_slot():
    """H45: acknowledged and read before the slot in front of it was lost: nothing is newer."""
    store = TakesASlot(MemoryStore())
    writer = over(store).writer(
        NAME, ack="independent", max_parallel_writes=2, group_window_ms=0, background=False
    )
    store.lsn = writer.put("k", b"0").lsn + 1
    behind = writer.put("a", b"1", wait=False)
    assert writer.put("k", b"1").lsn == 5, "acknowledged, and the one before it is not"
    with writer.transaction() as transaction:
        assert transaction.get("k") == b"1"
        store.released.set()
        writer.flush()
        transaction.put("b", b"2")
    assert behind.result().lsn == 6
    assert not writer._committer.tail._early
    assert dict(writer.scan()) == {b"a": b"1", b"b": b"2", b"k": b"1"}


def test_H9_a_listing_that_lacks_the_lost_slot_is_not_believed():
    """H9: it is asked again; if it shows the slot in time the writer continues behind it."""
    bucket = MemoryStore()
    cache = Stale(bucket)
    writer = over(cache).writer(NAME)
    writer.refresh()  # every listing is in the cache now
    ingest(bucket, NAME, {b"k": b"bulk"})
    cache.stale = True
    threading.Timer(0.1, lambda: setattr(cache, "stale", False)).start()
    assert writer.put("k", b"live").lsn == 4
    assert dict(over(bucket).reader(NAME).scan()) == {b"k": b"live"}


def test_H9_an_opener_behind_a_stale_cache_loses_no_acknowledged_write():
    """H9: its listing is old, and says that slots are open which are taken: it steps over them."""
    bucket = MemoryStore()
    cache = Stale(bucket)
    with over(cache).writer(NAME) as writer:
        writer.put("a", b"1")
    with over(bucket).writer(NAME) as writer:
        writer.put("b", b"2")
        writer.put("c", b"3")
    cache.stale = True
    opened = over(cache)
    before = dict(over(bucket).reader(NAME).scan())
    with suppress(reef.ReefError), opened.writer(NAME) as writer:  # it may fail
        assert dict(writer.scan()) == before
        writer.put("d", b"4")
        before[b"d"] = b"4"
    cache.stale = False
    with opened.writer(NAME) as writer:
        assert dict(writer.scan()) == before


def test_H9_a_reader_behind_a_stale_cache_only_lags():
    """H9: old responses make it late, never wrong; it keeps no "not found" of its own."""
    bucket = MemoryStore()
    cache = Stale(bucket)
    with over(bucket).writer(NAME) as writer:
        writer.put("k", b"1")
        reader = over(cache).reader(NAME)
        reader.refresh()
        cache.stale = True
        writer.put("k", b"2")
        fold(over(bucket), NAME)
        reader.refresh()
        assert reader.get("k") == b"1"
        cache.stale = False
        reader.refresh()
        assert reader.get("k") == b"2"


# --- conditions, through the hook that they will use -----------------------------------


class Conditional:
    """A batch with a condition, evaluated on the writer's own view. Records the values that it saw.

    The public face comes with conditions; this is how they are decided underneath.
    """

    def __init__(self, writer, key, expected, value):
        self.writer, self.key, self.expected = writer, key, expected
        self.seen = []
        committer = writer._committer
        encoded = encode_batch(Batch().put(key, value), committer.tail.manifest.schema, 1 << 20)
        self.pending = Pending(
            encoded.ops,
            encoded.record,
            BatchHeader(1, when=[["equals", key]]),
            writer._runtime.monotonic_s(),
            self._decide,
        )
        committer.submit(self.pending)

    def _decide(self):
        committer = self.writer._committer
        assert not committer._inflight, "something before it is not durable yet"
        self.seen.append(self.writer.get(self.key))
        if self.seen[-1] != self.expected:
            raise ConditionFailedError(f"{self.key} is {self.seen[-1]}")

    def result(self):
        self.writer._committer.drive(self.pending)
        return self.pending.outcome()


class Gate(Wrapper):
    """Holds PUTs into the log back until it is opened."""

    def __init__(self, inner):
        super().__init__(inner)
        self.open = threading.Event()
        self.open.set()
        self.waiting = threading.Semaphore(0)

    def create(self, key, body):
        if "/wal/" in key and not self.open.is_set():
            self.waiting.release()
            assert self.open.wait(120)
        return self.inner.create(key, body)


def test_H20_a_condition_is_decided_when_all_before_it_is_durable():
    """H20: it waits for the PUTs in flight, sees their rows, and is decided once."""
    gate = Gate(MemoryStore())
    writer = over(gate).writer(NAME, max_parallel_writes=4, group_bytes_max=1, group_window_ms=0)
    gate.open.clear()
    before = [writer.put("k", b"%d" % n, wait=False) for n in range(3)]
    assert all(gate.waiting.acquire(timeout=60) for _ in before)
    conditional = Conditional(writer, "k", b"2", b"decided")
    after = writer.put("other", b"behind it", wait=False)
    assert not gate.waiting.acquire(timeout=0.05), "one more may be in flight, and none is"
    assert conditional.seen == [], "nothing is decided while something is in flight"
    gate.open.set()
    receipt = conditional.result()
    assert conditional.seen == [b"2"]
    assert [future.result(60).lsn for future in before] < [receipt.lsn] < [after.result(60).lsn]
    assert writer.get("k") == b"decided"


def test_H20_a_rejected_batch_holds_up_no_other():
    """H20: its caller gets the error, nothing of it is written, the rest continues."""
    bucket = MemoryStore()
    writer = over(bucket).writer(NAME)
    writer.put("k", b"1")
    conditional = Conditional(writer, "k", b"something else", b"never")
    with pytest.raises(ConditionFailedError):
        conditional.result()
    assert writer.put("k", b"2").lsn == 3
    assert len(objects(bucket)) == 2


def test_H20_replay_never_decides_again():
    """H20: the state that the condition was decided on is gone, and the batch still counts."""
    bucket = MemoryStore()
    with over(bucket).writer(NAME) as writer:
        writer.put("k", b"1")
        Conditional(writer, "k", b"1", b"decided").result()  # its condition is false from now on
        assert objects(bucket)[-1].batches[0].when == [["equals", "k"]], "kept for audits"
    reader = over(bucket).reader(NAME)
    assert reader.get("k") == b"decided"
    with over(bucket).writer(NAME) as writer:
        assert writer.get("k") == b"decided"
    fold(over(bucket), NAME)
    assert over(bucket).reader(NAME).get("k") == b"decided"


class TakesTheSlot(Wrapper):
    """A bulk job takes the slot just before the writer's PUT arrives, once."""

    rows = None

    def create(self, key, body):
        if self.rows is not None and "/wal/" in key:
            rows, self.rows = self.rows, None
            append(self.inner, NAME, WalKind.BEGIN, Job("j"), lsn=number_of(key))
            ingest(self.inner, NAME, rows, begin=False, job_id="j")
        return self.inner.create(key, body)


@pytest.mark.parametrize("holds", [True, False])
def test_H46_a_condition_is_decided_again_after_a_lost_slot(holds):
    """H46: an ingest took the slot; the condition is evaluated again."""
    bucket = MemoryStore()
    rival = TakesTheSlot(bucket)
    writer = over(rival).writer(NAME)
    writer.put("k", b"1")
    rival.rows = {b"other" if holds else b"k": b"bulk"}
    conditional = Conditional(writer, "k", b"1", b"decided")
    if holds:
        assert conditional.result().lsn == 5
        assert conditional.seen == [b"1", b"1"]
        expected = {b"k": b"decided", b"other": b"bulk"}
    else:
        with pytest.raises(ConditionFailedError):
            conditional.result()
        assert conditional.seen == [b"1", b"bulk"]
        expected = {b"k": b"bulk"}
    assert dict(over(bucket).reader(NAME).scan()) == expected
    assert dict(writer.scan()) == expected


def sent(writer, key, value):
    """Write without waiting; a writer that has ended by then rejects at once."""
    try:
        return writer.put(key, value, wait=False)
    except reef.ReefError as error:
        future = Future()
        future.set_exception(error)
        return future


# --- order ------------------------------------------------------------------------------


@pytest.mark.parametrize("slot", range(5))
@pytest.mark.parametrize("rival", ["ingest", "fence", "lost response"])
def test_H45_two_batches_to_one_key_never_swap(slot, rival):
    """H45: with three in flight and a rival at any slot, the last acknowledged value wins.

    And nothing that was reported as failed is seen, by readers, by writers, after a fold.
    """
    bucket = MemoryStore()

    class Rival(Wrapper):
        """Strikes when the writer's PUT for one slot arrives."""

        at = None

        def create(self, key, body):
            if number_of(key) != self.at or "/wal/" not in key:
                return self.inner.create(key, body)
            self.at = None
            self._wait_for(number_of(key) + 1, number_of(key) + 2)
            if rival == "ingest":
                append(self.inner, NAME, WalKind.SKIP, lsn=number_of(key))
            elif rival == "fence":
                over(self.inner).writer(NAME).put("mark", b"newer")
            else:
                Faults(self.inner, [Rule(Fault.FAIL_AFTER, "create")]).create(key, body)
            return self.inner.create(key, body)

        def _wait_for(self, *slots):
            """Let the objects that were sent behind it land first."""
            wanted = {USERS.wal_object(slot) for slot in slots if slot <= last_slot}
            deadline = self.runtime.deadline(60)
            while not wanted <= {info.key for info in self.inner.list(USERS.wal)}:
                assert not deadline.passed()
                self.runtime.sleep(0.001)

    store = Rival(bucket)
    writer = over(store).writer(NAME, max_parallel_writes=3, group_bytes_max=1, group_window_ms=0)
    last_slot = writer._committer.tail.next_lsn + 4
    store.at = writer._committer.tail.next_lsn + slot
    futures = [sent(writer, "k", b"%d" % n) for n in range(5)]
    errors = [future.exception(60) for future in futures]
    acknowledged = [n for n, error in enumerate(errors) if error is None]
    assert acknowledged == list(range(len(acknowledged))), "a prefix"
    assert all(isinstance(error, FencedError) for error in errors[len(acknowledged) :])
    assert (len(acknowledged) == 5) == (rival != "fence")
    lsns = [futures[n].result().lsn for n in acknowledged]
    assert lsns == sorted(lsns)
    last = {b"k": b"%d" % acknowledged[-1]} if acknowledged else {}
    for _ in range(2):
        seen = dict(over(bucket).reader(NAME).scan())
        seen.pop(b"mark", None)
        assert seen == last
        fold(over(bucket), NAME)
