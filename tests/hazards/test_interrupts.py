"""H26: cancellation and failed appends. A commit in flight is shielded, and every waiter wakes."""

import errno
import linecache
import sys
import threading
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from pathlib import Path

import pytest

import reef
from reef.engine.commit import committer
from reef.errors import (
    ClosedError,
    ErrorKind,
    InternalError,
    InvalidInputError,
    OutcomeUnknownError,
    UnavailableError,
)
from reef.paths import Namespace
from reef.stores import Meter, ReadBack, Retry, RetryPolicy, Wrapper
from reef.stores.local import LocalStore
from reef.stores.memory import MemoryStore
from reef.testing import Fault, Faults, Rule
from tests.support.faulty_files import FaultyFiles

NAME = "users"
USERS = Namespace(NAME)
QUICK = RetryPolicy(attempts_max=2, deadline_s=1.0, first_delay_s=0.001)
ENGINE = Path(committer.__file__).parent.parent
WATCHED = {
    str(ENGINE / f"{name}.py")
    for name in (
        "handles/writer",
        "commit/committer",
        "commit/completions",
        "commit/inflight",
        "log/log",
        "log/tail",
        "read/memtable",
    )
}
"""The files that a commit runs through; how a batch is encoded is no part of it."""


def over(bucket):
    """Return a database over a bucket, with the usual wrappers."""
    return reef.Database(ReadBack(Retry(Meter(bucket), QUICK), QUICK))


def rows(bucket):
    """Return the rows of a reader."""
    return dict(over(bucket).reader(NAME).scan())


class Client(threading.Thread):
    """Another thread that writes through the same handle, and must not be left waiting."""

    def __init__(self, writer, key):
        super().__init__(daemon=True)
        self.writer, self.key, self.outcome = writer, key, None
        self.start()

    def run(self):
        try:
            self.outcome = self.writer.put(self.key, b"other's")
        except reef.ReefError as error:
            self.outcome = error

    def finish(self, where):
        self.join(60)
        assert not self.is_alive(), f"a waiter was left hanging by an interrupt at {where}"
        return self.outcome


class AtLine:
    """Raises KeyboardInterrupt at the n-th line of a commit that runs in this thread."""

    def __init__(self, number):
        self.left = number
        self.where = None

    def __enter__(self):
        sys.settrace(self._call)
        return self

    def __exit__(self, *error):
        sys.settrace(None)

    def _call(self, frame, event, arg):
        return self._line if frame.f_code.co_filename in WATCHED else None

    def _line(self, frame, event, arg):
        if event == "line" and self.where is None and not _enters_a_lock(frame):
            self.left -= 1
            if self.left == 0:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._line


def _enters_a_lock(frame):
    """A tracer can strike between the end of a block and its unlocking; a signal cannot."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return line.strip().startswith("with ")


class Companion(Wrapper):
    """Brings a second client in while the first one's PUT is on its way."""

    arrive = None

    def create(self, key, body):
        if self.arrive is not None and "/wal/" in key:
            arrive, self.arrive = self.arrive, None
            arrive()
        return self.inner.create(key, body)


def _interrupted_at(number):
    """Interrupt one put at one line; return where that was, or None if it ended before."""
    store = Companion(MemoryStore())
    writer = over(store).writer(NAME)
    writer.put("before", b"1")
    clients = []

    def arrive():
        tracing = sys.gettrace()
        sys.settrace(None)
        clients.append(Client(writer, "other"))
        while not len(writer._committer._queue):
            pass
        sys.settrace(tracing)

    store.arrive = arrive
    with AtLine(number) as interrupt, suppress(KeyboardInterrupt):
        writer.put("mine", b"mine")
    where = interrupt.where
    outcome = (clients or [Client(writer, "other")])[0].finish(where)
    seen = rows(store)
    assert seen[b"before"] == b"1", where
    if isinstance(outcome, reef.ReefError):
        assert isinstance(outcome, InternalError | OutcomeUnknownError), where
    else:
        assert seen[b"other"] == b"other's", where
        assert writer.get("other") == b"other's", where
    if isinstance(outcome, InternalError):
        assert b"other" not in seen, where
    if not isinstance(outcome, reef.ReefError):
        writer.close()  # does not hang; objects in flight have landed or not
        assert dict(over(store).writer(NAME).scan()) == rows(store), where
    return where


def test_H26_an_interrupt_at_every_line_of_a_commit():
    """H26: Ctrl-C strikes the sending thread anywhere: others get a result, and the right one."""
    struck = []
    number = 1
    while (where := _interrupted_at(number)) is not None:
        struck.append(where)
        number += 1
    files = {where.split(":")[0] for where in struck}
    assert {"writer.py", "committer.py", "inflight.py", "tail.py", "memtable.py"} <= files
    assert len(struck) > 100


def test_H26_an_interrupted_commit_is_carried_on():
    """H26: the caller stops waiting; the PUT that it was sending is finished by another thread."""

    class Interrupts(Wrapper):
        """Ctrl-C while the request is on its way: it arrives, and its response is not awaited."""

        armed = False

        def create(self, key, body):
            if self.armed and "/wal/" in key:
                self.armed = False
                self.inner.create(key, body)
                raise KeyboardInterrupt
            return self.inner.create(key, body)

    store = Interrupts(MemoryStore())
    writer = over(store).writer(NAME)
    store.armed = True
    with pytest.raises(KeyboardInterrupt):
        writer.put("k", b"1")
    writer.flush()
    assert writer.get("k") == b"1"
    assert writer.put("k", b"2").lsn == 3, "one LSN for the interrupted one"
    assert rows(store) == {b"k": b"2"}


def test_H26_a_write_cannot_be_cancelled(tmp_path):
    """H26: a future that is cancelled or no longer awaited is committed all the same."""

    class Slow(Wrapper):
        gate = threading.Event()

        def create(self, key, body):
            if "/wal/" in key:
                assert self.gate.wait(120)
            return self.inner.create(key, body)

    store = Slow(MemoryStore())
    store.gate.set()
    writer = over(store).writer(NAME)
    store.gate.clear()
    futures = [writer.put(f"k{n}", b"v", wait=False) for n in range(3)]
    assert [future.cancel() for future in futures] == [False] * 3
    with pytest.raises(FutureTimeout):
        futures[0].result(0.01)
    store.gate.set()
    assert all(future.result(60).lsn for future in futures)
    assert len(rows(store)) == 3


class Refuses(Wrapper):
    """A store that turns writes to the log down, or breaks, once enabled."""

    error = None

    def create(self, key, body):
        if self.error is not None and "/wal/" in key:
            raise self.error
        return self.inner.create(key, body)


def test_H26_a_rejected_write_fails_every_waiter_and_nothing_is_written():
    """H26: the credentials expire: a clear error for each waiter, a handle that stays ended."""
    store = Refuses(MemoryStore())
    writer = over(store).writer(NAME)
    writer.put("k", b"1")
    store.error = InvalidInputError("no permission", kind=ErrorKind.ACCESS_DENIED)
    futures = [writer.put("k", b"2", wait=False)]
    assert isinstance(futures[0].exception(60), InvalidInputError)
    with pytest.raises(InvalidInputError, match="no permission"):
        writer.put("k", b"3")
    store.error = None
    with pytest.raises(InvalidInputError, match="no permission"):
        writer.put("k", b"4")
    assert rows(store) == {b"k": b"1"}
    with over(store).writer(NAME) as successor:
        successor.put("k", b"5")


def test_H26_a_store_that_breaks_leaves_no_caller_waiting():
    """H26: an error that no store should raise: the outcome is unknown, and the handle ends."""
    store = Refuses(MemoryStore())
    writer = over(store).writer(NAME, max_parallel_writes=2)
    store.error = RuntimeError("a bug in the store")
    future = writer.put("k", b"1", wait=False)
    assert isinstance(future.exception(60), OutcomeUnknownError)
    with pytest.raises(InternalError, match="a bug in the store"):
        writer.put("k", b"2")
    writer.close()


def test_H26_what_waits_behind_an_unknown_outcome_was_not_sent():
    """H26: only objects that were sent may have landed; batches queued behind them are rejected."""
    store = Refuses(MemoryStore())
    writer = over(store).writer(NAME, commit_deadline_s=0.05, group_bytes_max=1)

    first, second = threading.Event(), threading.Event()

    def create(key, body):
        first.set()
        assert second.wait(60)  # without it the deadline may be over before the next one comes
        return reef.stores.WriteResult(reef.stores.Outcome.UNKNOWN)

    store.create = create
    sent = writer.put("a", b"1", wait=False)
    assert first.wait(60)
    queued = writer.put("b", b"2", wait=False)
    second.set()
    assert isinstance(sent.exception(60), OutcomeUnknownError)
    assert isinstance(queued.exception(60), UnavailableError)
    with pytest.raises(UnavailableError, match="has stopped: LSN 2 has no response"):
        writer.put("c", b"3")


@pytest.mark.parametrize("pattern", ["*/wal/*", "*/manifest/*"])
def test_H26_a_refresh_that_fails_ends_nothing(pattern):
    """H26: it was only a refresh: the caller gets the error, and the writer continues."""
    faults = Faults(MemoryStore())
    writer = over(faults).writer(NAME)
    writer.put("k", b"1")
    faults.rules.append(Rule(Fault.FAIL_BEFORE, "list", pattern))
    with pytest.raises(UnavailableError):
        writer.refresh()
    assert writer.put("k", b"2").lsn == 3
    faults.rules.clear()
    writer.refresh()
    assert writer.get("k") == b"2"


class FullDisk(FaultyFiles):
    """A disk that has no room for a while."""

    full = False

    def __init__(self):
        super().__init__(before=self._fail)

    def _fail(self, call, name):
        if call == "append" and self.full:
            raise OSError(errno.ENOSPC, "No space left on device")


def full_disk(tmp_path, **settings):
    """Return a writer on a disk that is about to fill, the disk and its store."""
    disk = FullDisk()
    store = LocalStore(str(tmp_path), files=disk)
    return over(store).writer(NAME, **settings), disk, store


def test_H26_a_full_disk_raises_a_clear_error(tmp_path):
    """H26: every waiter hears "disk full", and nothing is acknowledged."""
    writer, disk, store = full_disk(tmp_path, commit_deadline_s=0.1)
    writer.put("k", b"1")
    disk.full = True
    future = writer.put("k", b"2", wait=False)
    error = future.exception(60)
    assert isinstance(error, UnavailableError)
    assert error.kind is ErrorKind.DISK_FULL
    with pytest.raises(UnavailableError, match="No space left"):
        writer.put("k", b"3")
    disk.full = False
    assert rows(store) == {b"k": b"1"}
    with over(store).writer(NAME) as successor:
        successor.put("k", b"4")
    assert rows(store) == {b"k": b"4"}


def test_H26_a_disk_that_has_room_again_in_time(tmp_path):
    """H26, H78: the write is rejected at once; tried again, it commits once, in the same slot."""
    writer, disk, store = full_disk(tmp_path)
    disk.full = True
    error = writer.put("k", b"1", wait=False).exception(60)
    assert error.kind is ErrorKind.DISK_FULL
    assert rows(store) == {}
    disk.full = False
    assert writer.put("k", b"1", wait=False).result(60).lsn == 2
    assert rows(store) == {b"k": b"1"}


def test_H26_an_interrupted_close_still_ends_the_writer():
    """H26: Ctrl-C in close(): batches in flight are completed, later calls raise ClosedError."""

    class Stuck(Wrapper):
        stuck = False

        def create(self, key, body):
            if self.stuck and "/wal/" in key:
                raise KeyboardInterrupt
            return self.inner.create(key, body)

    store = Stuck(MemoryStore())
    writer = over(store).writer(NAME)
    writer._committer.drive_in_background = lambda owner=None: (
        None
    )  # so that close() is the one that sends
    store.stuck = True
    future = writer.put("k", b"1", wait=False)
    with pytest.raises(KeyboardInterrupt):
        writer.close()
    assert isinstance(future.exception(60), OutcomeUnknownError)
    with pytest.raises(ClosedError):
        writer.put("k", b"2")
