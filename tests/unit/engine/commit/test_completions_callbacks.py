"""A future's callbacks call the writer again, wait, block or break: no caller waits for ever (H26).

Callbacks run on the threads that send. Here they do things that a client's code may do there, most
of it in a schedule that a gate in front of the bucket forces.
"""

import sys
import threading
import time
from concurrent.futures import Future
from concurrent.futures import wait as wait_for

import pytest

import reef
from reef import stores
from reef.errors import ClosedError, ConditionFailedError, FencedError
from reef.runtime import REAL
from reef.stores import Wrapper

NAME = "users"
SOON_S = 60.0
"""For steps of milliseconds, unless a thread waits for itself or the machine stalls."""


class Holds(Wrapper):
    """Holds up PUTs into the log until it is released."""

    def __init__(self, inner):
        super().__init__(inner)
        self.go = threading.Event()
        self.go.set()

    def create(self, key, body):
        if "/wal/" in key:
            assert self.go.wait(4 * SOON_S)
        return self.inner.create(key, body)


class Depth:
    """Counts how deep a callback runs within others of its thread."""

    def __init__(self):
        self._here = threading.local()
        self.max = 0

    def __enter__(self):
        self._here.count = getattr(self._here, "count", 0) + 1
        self.max = max(self.max, self._here.count)

    def __exit__(self, *error):
        self._here.count -= 1


class Block:
    """A callback that says when it has begun, and ends when it is released."""

    def __init__(self):
        self.entered, self.go = threading.Event(), threading.Event()

    def __call__(self, future):
        self.entered.set()
        assert self.go.wait(4 * SOON_S)


@pytest.fixture
def store():
    """A bucket in memory behind a gate."""
    return Holds(stores.open("memory://"))


def opened(store, **settings):
    """Return a writer."""
    return reef.Database(store).writer(NAME, **settings)


def in_thread(call):
    """Run a call in a thread of its own; return a future of its result."""
    outcome = Future()

    def run():
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome


def until(is_so):
    """Wait until something is the case."""
    end_s = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def put_with(store, writer, callback):
    """Write something, with a callback that runs on a helper; the gate is open afterwards."""
    store.go.clear()
    writer.put("first", b"", wait=False).add_done_callback(callback)
    store.go.set()


def helpers():
    """Return how many helpers run."""
    return sum(thread.name == "sender" for thread in threading.enumerate())


# --- callbacks that write -----------------------------------------------------------------
def test_a_callback_never_runs_before_a_flight_of_its_thread_is_sent(store):
    """With two PUTs in flight a callback's own write may be queued behind the one not yet sent."""
    writer = opened(store, max_parallel_writes=2, group_window_ms=0)
    committer, second = writer._committer, writer._committer._next_lsn + 1
    landed, called = threading.Event(), Future()
    take, send = committer._next_to_send, committer._send

    def taken(*args, **options):
        flight = take(*args, **options)
        if flight is not None and flight.lsn == second:  # now the first one's response arrives
            store.go.set()
            assert landed.wait(SOON_S)
        return flight

    def sent(flight):
        send(flight)
        if flight.lsn == second - 1:  # and its sender stalls before it can give it
            landed.set()
            wait_for([called], 0.5)

    committer._next_to_send, committer._send = taken, sent
    store.go.clear()
    first = writer.put("k1", b"1", wait=False)
    first.add_done_callback(lambda done: called.set_result(writer.put("k3", b"3")))
    until(lambda: committer._inflight)
    receipt = in_thread(lambda: writer.put("k2", b"2"))
    assert called.result(SOON_S).lsn > second
    assert receipt.result(SOON_S).lsn == second


def test_callbacks_that_write_while_others_do(store):
    """Threads wait for their writes, callbacks for theirs, two PUTs at a time: all of it ends."""
    writer = opened(store, max_parallel_writes=2, group_window_ms=0)
    written = []
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def load(thread):
        for number in range(40):
            future = writer.put(f"{thread}/{number}", b"", wait=False)
            future.add_done_callback(lambda done: written.append(writer.put("more", b"").lsn))
            writer.put(f"{thread}/w{number}", b"")

    try:
        for loaded in [in_thread(lambda name=name: load(name)) for name in "abcd"]:
            loaded.result(SOON_S)
        until(lambda: len(written) == 160)
    finally:
        sys.setswitchinterval(interval_s)
    keys = {
        f"{thread}/{kind}{n}".encode() for thread in "abcd" for kind in ("", "w") for n in range(40)
    }
    assert {key for key, _ in writer.scan()} == {*keys, b"more"}
    assert all(isinstance(lsn, int) for lsn in written)


@pytest.mark.parametrize("does", ["put", "flush"])
def test_callbacks_do_not_run_within_each_other(store, does):
    """Each of 150 batches is completed alone; each callback waits for the batches behind it."""
    writer, depth, failed = opened(store), Depth(), []

    def write_more(future):
        with depth:
            try:
                writer.put("more", b"") if does == "put" else writer.flush()
            except Exception as error:
                failed.append(error)

    store.go.clear()
    futures = [
        writer.write(reef.Batch().put(f"{n}", b""), when=[reef.absent(f"{n}")], wait=False)
        for n in range(150)
    ]
    for future in futures:
        future.add_done_callback(write_more)
    store.go.set()
    assert len({future.result(SOON_S).lsn for future in futures}) == 150
    assert (failed, depth.max, writer.is_open) == ([], 1, True)


@pytest.mark.parametrize("parallel", [1, 4])
def test_a_callback_may_wait_for_the_future_of_its_own_write(store, parallel):
    """Even on the only worker: another one replaces it, and completes its batch first."""
    writer = opened(store, max_parallel_writes=parallel)
    results = []
    store.go.clear()
    for number in range(100):
        future = writer.put(f"{number}", b"", wait=False)
        future.add_done_callback(
            lambda done: results.append(writer.put("more", b"", wait=False).result(SOON_S).lsn)
        )
    store.go.set()
    until(lambda: len(results) == 100)
    until(lambda: not helpers())
    assert len(list(writer.scan())) == 101, "the rows of the test, and those of the callbacks"
    assert all(lsn > 0 for lsn in results)


# --- callbacks that hold up their thread ------------------------------------------------------
def test_a_callback_that_blocks_holds_up_neither_writes_nor_other_results(store):
    """Others send, are completed and flush meanwhile."""
    writer, block = opened(store), Block()
    put_with(store, writer, block)
    assert block.entered.wait(SOON_S)
    waited, unwaited = in_thread(lambda: writer.put("a", b"")), writer.put("b", b"", wait=False)
    assert waited.result(SOON_S).lsn
    assert unwaited.result(SOON_S).lsn
    in_thread(writer.flush).result(SOON_S)
    block.go.set()
    until(lambda: not helpers())


def test_callbacks_that_block_do_not_cost_a_thread_each(store):
    """Only so many run at a time; the rest waits, and writes and flushes still go through."""
    writer, blocks = opened(store), [Block() for _ in range(60)]
    futures = []
    store.go.clear()
    for number, block in enumerate(blocks):
        futures.append(writer.put(f"{number}", b"", wait=False))
        futures[-1].add_done_callback(block)
    store.go.set()
    until(blocks[0].entered.is_set)
    for number in range(60):
        writer.put(f"more {number}", b"", wait=False)
    assert in_thread(lambda: writer.put("waited for", b"")).result(SOON_S).lsn
    assert helpers() <= 20
    for block in blocks:
        block.go.set()
    assert all(future.result(SOON_S).lsn for future in futures)
    until(lambda: not helpers())


def test_a_flush_in_a_callback_does_not_wait_for_the_callback(store):
    """It returns when the rest is durable, and raises the rejection."""
    writer, results = opened(store), Future()

    def flush(done):
        try:
            results.set_result(writer.flush())
        except reef.ReefError as error:
            results.set_exception(error)

    store.go.clear()
    writer.put("a", b"", wait=False).add_done_callback(flush)
    until(lambda: writer._committer._inflight)
    behind = writer.put("b", b"", wait=False)
    refused = writer.write(reef.Batch().put("a", b"2"), when=[reef.absent("a")], wait=False)
    store.go.set()
    assert isinstance(results.exception(SOON_S), ConditionFailedError)
    assert behind.result(SOON_S).lsn
    assert isinstance(refused.exception(SOON_S), ConditionFailedError)
    assert writer.get("b") == b""


# --- the end of a writer ------------------------------------------------------------------
def test_H26_a_refresh_that_ends_the_writer_completes_queued_batches():
    """H26: `refresh` finds another writer's fence, while no caller waits for the queued batches."""
    bucket = stores.open("memory://")
    old = opened(bucket)
    old._committer.drive_in_background = lambda owner=None: None
    future = old.put("k", b"zombie", wait=False)
    opened(bucket)
    with pytest.raises(FencedError):
        old.refresh()
    assert isinstance(future.exception(SOON_S), FencedError)
    with pytest.raises(FencedError):
        old.flush()
    old.flush()  # raised once


def test_a_flush_waits_for_batches_that_are_decided_and_not_yet_completed(store):
    """Three batches are refused at once; the first one's callback does not end."""
    old, block = opened(store), Block()
    store.go.clear()
    futures = [old.put("k0", b"", wait=False)]
    futures[0].add_done_callback(block)
    until(lambda: old._committer._inflight)
    futures += [old.put(f"k{n}", b"", wait=False) for n in (1, 2)]
    opened(store.inner)
    store.go.set()
    assert block.entered.wait(SOON_S)
    assert isinstance(in_thread(old.flush).exception(SOON_S), FencedError)
    assert all(future.done() for future in futures)
    block.go.set()


def test_a_flush_raises_a_refusal_whose_callbacks_have_not_begun(store, monkeypatch):
    """A future is done before it runs its callbacks; a flush in between raises all the same."""
    go = threading.Event()

    class Late(Future):
        def _invoke_callbacks(self):
            assert go.wait(4 * SOON_S)
            super()._invoke_callbacks()

    writer = opened(store)
    writer.put("a", b"1")
    monkeypatch.setattr(type(REAL), "future", lambda self: Late())
    refused = writer.write(reef.Batch().put("a", b"2"), when=[reef.absent("a")], wait=False)
    until(refused.done)
    with pytest.raises(ConditionFailedError):
        writer.flush()
    go.set()
    until(lambda: not helpers())
    writer.flush()  # raised once


def test_a_callback_may_close_the_writer(store):
    """Earlier writes are durable and completed; later ones are rejected."""
    writer, closed = opened(store), threading.Event()

    def close(done):
        writer.close()
        closed.set()

    store.go.clear()
    writer.put("a", b"", wait=False).add_done_callback(close)
    until(lambda: writer._committer._inflight)
    futures = [writer.put(f"b{n}", b"", wait=False) for n in range(20)]
    store.go.set()
    assert closed.wait(SOON_S)
    assert all(future.result(SOON_S).lsn for future in futures)
    with pytest.raises(ClosedError):
        writer.put("c", b"")
    until(lambda: not helpers())


# --- callbacks that break -----------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("parallel", [1, 2])
def test_H26_a_callback_that_raises_loses_no_other_result(store, error, parallel):
    """H26: it may end the thread that it runs on, even the only worker; another continues."""

    def fail(done):
        raise error

    writer = opened(store, max_parallel_writes=parallel)
    store.go.clear()
    futures = []
    for number in range(20):
        futures.append(writer.put(f"{number}", b"", wait=False))
        if number % 3 == 0:
            futures[-1].add_done_callback(fail)
    store.go.set()
    assert all(future.result(SOON_S).lsn for future in futures)
    assert writer.put("afterwards", b"").lsn
    until(lambda: not helpers())


def test_a_write_that_is_waited_for_runs_no_other_callbacks(store):
    """A caller gets its receipt, not the interrupt of another caller's callback."""
    writer, threads = opened(store), []
    store.go.clear()
    futures = [writer.put(f"{number}", b"", wait=False) for number in range(20)]
    for future in futures:
        future.add_done_callback(lambda done: threads.append(threading.current_thread().name))
    waited = in_thread(lambda: writer.put("waited for", b""))
    until(lambda: len(writer._committer.pending()) == 21)
    store.go.set()
    assert waited.result(SOON_S).lsn
    until(lambda: len(threads) == 20)
    assert set(threads) == {"sender"}
