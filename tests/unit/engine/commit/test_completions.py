"""Completions: each batch is decided once, and its caller learns of it once, in both writers."""

import threading
import time
from concurrent.futures import Future

import pytest

import reef
from reef import stores
from reef.engine.commit import committer
from reef.engine.commit.completions import Completion, Completions
from reef.errors import ConditionFailedError, InvalidInputError, OutcomeUnknownError
from reef.runtime import REAL
from reef.stores import Wrapper
from reef.types import Receipt

NAME = "users"
SOON_S = 60.0


class NoWork:
    """A writer with nothing to do besides deliveries."""

    def has_work(self):
        return False

    def next_work(self):
        return None


class Holds(Wrapper):
    """Holds up PUTs into the log while its gate is closed."""

    def __init__(self, inner):
        super().__init__(inner)
        self.go = threading.Event()
        self.go.set()

    def create(self, key, body):
        if "/wal/" in key:
            assert self.go.wait(4 * SOON_S)
        return self.inner.create(key, body)


def receipt(lsn):
    """Return a receipt."""
    return Receipt(NAME, lsn, 0, 1, "id", 1)


def until(is_so):
    """Wait until a condition holds."""
    end_s = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.001)


@pytest.fixture
def completions():
    """Return completions without a writer."""
    return Completions(REAL, REAL.condition(), NoWork(), name="completer")


def test_H26_a_batch_keeps_its_first_result(completions):
    """H26: an error while a writer ends does not replace a receipt that a caller may have seen."""
    waited, future = Completion(), REAL.future()
    unwaited = Completion(future=future)
    for batch in (waited, unwaited):
        completions.complete(batch, receipt(1))
        completions.complete(batch, InvalidInputError("too late"))
    completions.deliver_rest()
    assert waited.outcome() == future.result(SOON_S) == receipt(1)
    assert completions.take_rejection() is None


def test_results_are_delivered_in_the_order_in_which_they_are_decided(completions):
    """Except for batches that were written in a callback, which may be waiting for them."""
    seen, batches = [], [Completion(future=REAL.future()) for _ in range(5)]
    batches[3].in_callback = True
    for number, batch in enumerate(batches):
        batch.future.add_done_callback(lambda _, number=number: seen.append(number))
    for batch in batches:
        completions.complete(batch, receipt(1))
    completions.deliver_rest()
    assert seen == [3, 0, 1, 2, 4]
    assert [batch.future for batch in batches] == [None] * 5, "a long backlog keeps no futures"


def test_H26_a_result_whose_delivery_was_interrupted_is_delivered_first(completions):
    """H26: Ctrl-C strikes between the claim and the future; another thread sets it."""

    class Interrupted(Future):
        times = 1

        def set_result(self, result):
            if self.times:
                self.times -= 1
                raise KeyboardInterrupt
            super().set_result(result)

    seen, futures = [], [Interrupted(), Future()]
    for number, future in enumerate(futures):
        future.add_done_callback(lambda _, number=number: seen.append(number))
        completions.complete(Completion(future=future), receipt(number))
    with pytest.raises(KeyboardInterrupt):
        completions.deliver_all()
    completions.deliver_in_background()
    assert [future.result(SOON_S).lsn for future in futures] == [0, 1]
    until(lambda: seen == [0, 1])


def test_H26_an_interrupt_between_the_receipts_of_one_object_leaves_no_caller_waiting(monkeypatch):
    """H26: of two batches in one object the second is decided too, as unknown.

    Its object had been marked as acknowledged before its receipts were made, and the end of the
    writer passed over it.
    """
    store = Holds(stores.open("memory://"))
    writer = reef.Database(store).writer(NAME, background=False, max_parallel_writes=1)
    make, struck = committer.receipt_of, []

    def interrupted(namespace, header, index):
        if index == 1 and not struck:
            struck.append(header.lsn)
            raise KeyboardInterrupt
        return make(namespace, header, index)

    monkeypatch.setattr(committer, "receipt_of", interrupted)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    store.go.clear()
    writer.put("first", b"", wait=False)
    until(lambda: writer._committer._inflight)
    futures = [writer.put(key, b"", wait=False) for key in ("a", "b")]
    store.go.set()
    assert futures[0].result(SOON_S).lsn
    assert isinstance(futures[1].exception(SOON_S), OutcomeUnknownError)
    assert struck
    # The interrupted worker ends under this test's excepthook, not in the middle of the next test.
    until(lambda: all(thread.name != "sender" for thread in threading.enumerate()))


@pytest.mark.parametrize("first_waits", [True, False])
def test_H19_a_repeat_of_a_key_in_flight_has_a_future_of_its_own(first_waits):
    """H19: one commit, and one result for both callers, whichever of them waits."""
    store = Holds(stores.open("memory://"))
    writer = reef.Database(store).writer(NAME, background=False)
    store.go.clear()
    outcomes = []

    def put(**how):
        outcomes.append(writer.put("k", b"v", idempotency_key="once", **how))

    if first_waits:
        thread = threading.Thread(target=put)
        thread.start()
    else:
        put(wait=False)
    until(lambda: writer._committer._inflight)
    repeat = writer.put("k", b"v", idempotency_key="once", wait=False)
    assert not repeat.done()
    store.go.set()
    assert repeat.result(SOON_S).lsn
    if first_waits:
        thread.join(SOON_S)
    (first,) = outcomes
    assert (first if first_waits else first.result(SOON_S)) == repeat.result()
    assert first is not repeat
    writer.close()


def test_a_flush_waits_for_repeats_too():
    """A repeat that no caller waits for is set when `flush` returns."""
    store = Holds(stores.open("memory://"))
    writer = reef.Database(store).writer(NAME, background=False)
    store.go.clear()
    futures = [writer.put("k", b"v", idempotency_key="once", wait=False) for _ in range(5)]
    threading.Timer(0.05, store.go.set).start()
    writer.flush()
    assert [future.done() for future in futures] == [True] * 5
    writer.close()


@pytest.mark.parametrize("durability", ["object", "local"])
def test_a_flush_raises_a_rejection_before_the_callbacks_of_its_future_have_run(
    durability, tmp_path, monkeypatch
):
    """A future is done before it runs callbacks; a flush in between raises the error, once.

    The writer with a local log noted the error in such a callback, and lost it to that race.
    """
    returned, go = threading.Event(), threading.Event()

    class Late(Future):
        def set_exception(self, error):
            assert returned.wait(4 * SOON_S)
            super().set_exception(error)

        def _invoke_callbacks(self):
            assert go.wait(4 * SOON_S)
            super()._invoke_callbacks()

    local = {"durability": "local", "local_log": tmp_path / "log"} if durability == "local" else {}
    db = reef.Database(stores.open("memory://"))
    writer = db.writer(NAME, background=False, **local)
    writer.put("a", b"1")
    writer.flush()
    monkeypatch.setattr(type(REAL), "future", lambda self: Late())
    rejected = writer.write(reef.Batch().put("a", b"2"), when=[reef.absent("a")], wait=False)
    returned.set()
    until(rejected.done)
    with pytest.raises(ConditionFailedError):
        writer.flush()
    go.set()
    writer.flush()
    writer.close()
