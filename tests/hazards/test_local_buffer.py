"""H15, H19, H26, H27, H45, H46, H63: a local log in front of the bucket."""

import errno
import threading
from queue import SimpleQueue

import pytest

import reef
from reef.engine.commit.completions import CALLBACK_WORKERS_MAX
from reef.engine.handles.database import Database
from reef.errors import (
    ConditionFailedError,
    CorruptionError,
    ErrorKind,
    InternalError,
    InvalidInputError,
    OutcomeUnknownError,
)
from reef.jobs import fold, sweep
from reef.paths import Namespace
from reef.runtime import REAL
from reef.stores.memory import MemoryStore
from reef.testing.disk import SimulatedDisk
from tests.support import bulk_jobs

NAME = "users"
SETTINGS = {
    "durability": "local",
    "local_log": "/log",
    "background": False,
    "upload_interval_ms": 1e9,
    "local_segment_bytes": 4096,
}


class FullDisk(SimulatedDisk):
    """A disk whose writes fail while `error` is set."""

    error: int | None = None

    def __init__(self, content=None):
        super().__init__(content)
        self.before = self._fail

    def _fail(self, call, path):
        if call == "write" and self.error is not None:
            raise OSError(self.error, "no")


class Clock(type(REAL)):
    """The machine's clocks, which can be put forward."""

    ahead_s = 0.0

    def wall_s(self):
        return super().wall_s() + self.ahead_s

    def boottime_s(self):
        return super().boottime_s() + self.ahead_s


@pytest.fixture
def store():
    """A bucket with a clock of its own."""
    return MemoryStore(runtime=Clock())


def machine(store, disk):
    """Return the writer of a machine with this disk."""
    db = Database(store)
    db._log_files = disk
    return db.writer(NAME, **SETTINGS)


def crash(writer, disk):
    """Kill a machine; return the disk that it leaves."""
    writer._uploader.stop()
    writer._closed = True
    return FullDisk(disk.content())


def changes(store):
    """Return everything that ever was applied, in order."""
    return [(c.key, c.row) for c in Database(store).reader(NAME).changes(after_lsn=0)]


def collect(store):
    """Fold, and sweep all that is not needed; return the names that are left in the log."""
    fold(Database(store), NAME)
    for _ in range(3):
        store.runtime.ahead_s += 3600.0
        sweep(Database(store), NAME, apply=True, force=True, retain_generations_s=0.0)
    return [info.key for info in store.list(Namespace(NAME).wal)]


@pytest.mark.parametrize("rival", [False, True])
def test_H63_uploaded_folded_and_collected_while_the_machine_was_down(store, rival):
    """H63: exactly that; the tail is still on the disk, and is not applied again."""
    disk = FullDisk()
    writer = machine(store, disk)
    receipts = [writer.put("a", b"1"), writer.put("b", b"2")]
    writer.flush()  # the machine dies before its log hears of it
    disk = crash(writer, disk)
    with Database(store).writer(NAME, background=False) as other:
        if rival:
            other.put("a", b"newer")
        other.put("c", b"3")
    names = collect(store)
    assert Namespace(NAME).wal_object(receipts[0].lsn) not in names, "it was not collected"
    again = machine(store, disk)
    assert again._buffer.log.last_index == 2, "the tail is not on the disk"
    assert again.local_recovery.replayed == 0
    assert again.get("a") == (b"newer" if rival else b"1")
    again.put("d", b"4")
    again.close()
    assert dict(Database(store).reader(NAME).scan())[b"a"] == (b"newer" if rival else b"1")


def test_H63_marks_outlive_many_folds(store):
    """H63: every fold carries the mark on, also those of logs that do nothing."""
    disk = FullDisk()
    writer = machine(store, disk)
    writer.put("a", b"1")
    writer.flush()
    disk = crash(writer, disk)
    for number in range(3):
        with Database(store).writer(NAME, background=False) as other:
            other.put(f"k{number}", b"v")
        collect(store)
    with machine(store, disk) as again:
        assert again.local_recovery.uploaded_index == 1
        assert again.local_recovery.replayed == 0


def test_H19_keys_count_from_the_local_sync_on(store):
    """H19: on the disk, after a crash, in the bucket and after the fold; one object, two keys."""
    disk = FullDisk()
    writer = machine(store, disk)
    first = writer.put("a", b"1", idempotency_key="one")
    writer.put("b", b"2", idempotency_key="two")
    assert writer.put("a", b"1", idempotency_key="one") == first
    with pytest.raises(InvalidInputError, match="another batch"):
        writer.put("a", b"other", idempotency_key="one")
    disk = crash(writer, disk)
    again = machine(store, disk)
    assert again.put("a", b"1", idempotency_key="one").replayed
    with pytest.raises(InvalidInputError, match="another batch"):
        again.put("b", b"other", idempotency_key="two")
    again.flush()
    fold(Database(store), NAME)
    again.refresh()
    assert again.put("b", b"2", idempotency_key="two").replayed
    assert again.put("b", b"2", idempotency_key="two", when=[reef.absent("z")]).replayed
    with pytest.raises(InvalidInputError, match="another batch"):
        again.put("b", b"other", idempotency_key="two")
    assert changes(store) == [(b"a", b"1"), (b"b", b"2")]
    again.close()


@pytest.mark.parametrize("knows", [False, True])
def test_H19_a_key_that_a_bulk_job_took_meanwhile(store, knows):
    """H19: a batch acknowledged on the disk counts, though its key was used in the bucket."""
    writer = machine(store, FullDisk())
    writer.put("a", b"1", idempotency_key="load")
    assert bulk_jobs.load(store, NAME, {b"b": b"2"}, key="load") is not None
    if knows:  # before it uploads, and not by losing the slot
        writer.refresh()
    writer.flush()
    assert writer.get("a") == b"1"
    assert Database(store).reader(NAME).get("a") == b"1"
    writer.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_H26_a_disk_that_fails_wakes_everyone(store, number):
    """H26: waiters and futures complete, no more writes are accepted, earlier ones are kept."""
    disk = FullDisk()
    writer = machine(store, disk)
    writer.put("a", b"1")
    disk.error = number
    errors = []

    def put(key):
        with pytest.raises(Exception) as error:  # noqa: PT011 - the class is checked below
            writer.put(key, b"2")
        errors.append(error.value)

    threads = [threading.Thread(target=put, args=(f"k{n}",)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(errors) == 5, "a waiter did not complete"
    unknown = [error for error in errors if isinstance(error, OutcomeUnknownError)]
    assert unknown
    assert unknown[0].kind is (
        ErrorKind.DISK_FULL if number == errno.ENOSPC else ErrorKind.NOT_DURABLE
    )
    assert writer.resolve(unknown[0]) == "unknown"
    assert not writer.is_open
    with pytest.raises(OutcomeUnknownError):
        writer.put("b", b"2", wait=False)
    assert writer.get("a") == b"1"
    assert writer.get("k0") is None, "a row is shown that is not on the disk"
    disk = crash(writer, disk)
    with machine(store, disk) as again:
        assert dict(again.scan()) == {b"a": b"1"}


def test_H26_acknowledged_writes_outlive_their_disk(store):
    """H26: no more writes are accepted, but acknowledged ones are in memory and still uploaded."""
    disk = FullDisk()
    writer = machine(store, disk)
    receipts = [writer.put(f"k{n}", b"1") for n in range(3)]
    disk.error = errno.EIO
    with pytest.raises(OutcomeUnknownError):
        writer.put("late", b"2")
    assert [receipt.wait(timeout_s=60) for receipt in receipts] == [2, 2, 2]
    for refused in (writer.flush, writer.transaction, lambda: writer.put("x", b"1")):
        with pytest.raises(OutcomeUnknownError):
            refused()
    with pytest.raises(OutcomeUnknownError):
        writer.put("x", b"1", when=[reef.absent("x")])
    writer.close()
    assert [key for key, _ in changes(store)] == [b"k0", b"k1", b"k2"]
    with machine(store, SimulatedDisk(disk.content())) as again:
        assert again.local_recovery.replayed == 0
    assert len(changes(store)) == 3


def test_H26_an_interrupt_during_a_sync_completes_every_waiter(store, monkeypatch):
    """H26: a signal in the middle of a sync ends the writer; the other writes fail."""
    disk = FullDisk()
    writer = machine(store, disk)
    writer.put("a", b"1")
    begun, others = threading.Event(), []

    def interrupted(entries):
        begun.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(writer._buffer.log, "store_logs", interrupted)

    def put_more():
        while not writer._buffer._syncing:
            begun.wait(0.001)
        others.extend(writer.put(f"k{n}", b"2", wait=False) for n in range(3))
        begun.set()

    thread = threading.Thread(target=put_more)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        writer.put("b", b"2")
    thread.join(60)
    assert [type(future.exception(60)) for future in others] == [InternalError] * 3
    assert not writer.is_open
    disk = crash(writer, disk)
    with machine(store, disk) as again:
        assert dict(again.scan()) == {b"a": b"1"}


class HeldDisk(FullDisk):
    """A disk whose sync blocks on request: writes that arrive meanwhile form one group."""

    def __init__(self):
        super().__init__()
        self.go = threading.Event()
        self.go.set()

    def _fail(self, call, path):
        if call == "write":
            assert self.go.wait(60)
        super()._fail(call, path)


def put_at_once(writer, disk, count):
    """Hand over some batches that are synced together; return their futures."""
    disk.go.clear()
    first = writer.put("first", b"", wait=False)
    return [first, *(writer.put(f"{number}", b"", wait=False) for number in range(count))]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_H26_a_callback_that_raises_does_not_lose_other_completions(store, error):
    """H26: it may end the thread that it runs on, even the only helper; another continues."""

    def fail(done):
        raise error

    disk = HeldDisk()
    writer = machine(store, disk)
    futures = put_at_once(writer, disk, 20)
    for future in futures[::3]:
        future.add_done_callback(fail)
    disk.go.set()
    assert all(future.result(60) for future in futures)
    assert writer.put("later", b"", wait=False).result(60)
    writer.close()
    deadline = REAL.deadline(60)  # a future is set before its callbacks run: not in the next test
    while any(thread.name.endswith("local-sync") for thread in threading.enumerate()):
        assert not deadline.passed()
        REAL.sleep(0.01)


def test_H26_a_callback_may_wait_for_its_own_write(store):
    """H26: the helper that runs it is not the only one; and it does not delay other completions."""
    disk = HeldDisk()
    writer = machine(store, disk)
    futures, waited = put_at_once(writer, disk, 20), SimpleQueue()

    def write_and_wait(done):
        waited.put(writer.put("more", b"", wait=False).result(60))

    for future in futures[::7]:
        future.add_done_callback(write_and_wait)
    disk.go.set()
    assert all(future.result(60) for future in futures)
    assert all(waited.get(timeout=60) for _ in futures[::7])
    writer.close()


def test_local_callbacks_that_block_do_not_cost_a_thread_each(store):
    """Only so many run at a time; the rest waits, and writes go through meanwhile."""
    disk, go = HeldDisk(), threading.Event()
    writer = machine(store, disk)
    entered, before = SimpleQueue(), threading.active_count()

    def block(done):
        entered.put(writer.put("urgent", b"", wait=False).result(60))
        assert go.wait(120)

    futures = put_at_once(writer, disk, 60)
    for future in futures:
        future.add_done_callback(block)
    disk.go.set()
    for number in range(60):
        writer.put(f"more {number}", b"", wait=False)
    assert all(entered.get(timeout=60) for _ in range(CALLBACK_WORKERS_MAX))
    assert writer.put("waited for", b"")
    assert threading.active_count() - before < 2 * CALLBACK_WORKERS_MAX, "one each would be sixty"
    go.set()
    assert all(future.result(60) for future in futures)
    writer.close()


def test_a_local_write_that_is_waited_for_runs_no_other_callbacks(store):
    """A caller gets its receipt, on whatever thread the other completions run."""
    disk = HeldDisk()
    writer = machine(store, disk)
    futures, threads = put_at_once(writer, disk, 5), SimpleQueue()
    for future in futures:
        future.add_done_callback(lambda _: threads.put(threading.current_thread()))
    threading.Timer(0.05, disk.go.set).start()
    writer.put("waited for", b"")
    callback_threads = [threads.get(timeout=60) for _ in futures]
    assert threading.current_thread() not in callback_threads
    writer.close()


def test_H26_a_helper_that_cannot_be_started_is_tried_again(store, monkeypatch):
    """H26: a machine without room for a thread has some later; nothing waits for ever."""
    writer = machine(store, FullDisk())
    spawn = writer._buffer.runtime.spawn

    def refuse(*_, **__):
        monkeypatch.setattr(writer._buffer.runtime, "spawn", spawn)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(writer._buffer.runtime, "spawn", refuse)
    with pytest.raises(RuntimeError):
        writer.put("a", b"1", wait=False)
    assert writer.put("b", b"2", wait=False).result(60)
    assert dict(writer.scan()) == {b"a": b"1", b"b": b"2"}, "it was handed over"
    writer.close()


def test_H27_damage_in_the_middle_of_the_log_is_fatal(store):
    """H27: a byte amiss in a sealed file stops the opening; nothing is passed over in silence."""
    disk = FullDisk()
    writer = machine(store, disk)
    for n in range(60):
        writer.put(f"k{n}", bytes(200))
    content = crash(writer, disk).content()
    sealed = sorted(name for name in content if name.endswith(".wal"))[0]
    damaged = bytearray(content[sealed])
    damaged[1000] ^= 1
    with pytest.raises(CorruptionError):
        machine(store, FullDisk({**content, sealed: bytes(damaged)})).flush()
    with machine(store, FullDisk(content)) as again:
        report = again.local_recovery
        assert (report.replayed, report.log.dropped_entries) == (60, 0)


def test_H45_a_load_between_local_writes_keeps_their_order(store):
    """H45: a load takes the next slot; the local writes come after it, none swaps or is lost."""
    writer = machine(store, FullDisk())
    writer.put("a", b"first")
    writer.flush()
    writer.put("a", b"v1")
    assert bulk_jobs.load(store, NAME, {b"a": b"loaded", b"b": b"loaded"}) is not None
    writer.put("a", b"v2")
    assert writer.get("a") == b"v2"
    writer.flush()
    assert dict(writer.scan()) == {b"a": b"v2", b"b": b"loaded"}
    rows = [row for key, row in changes(store) if key == b"a"]
    assert rows == [b"first", b"loaded", b"v1", b"v2"]
    writer.close()


def test_H46_a_condition_is_decided_behind_the_backlog_and_the_winner(store):
    """H46: entries on the disk are uploaded first, and a load that takes the slot is seen."""
    writer = machine(store, FullDisk())
    writer.put("a", b"1")
    assert bulk_jobs.load(store, NAME, {b"b": b"loaded"}) is not None
    for key in ("a", "b"):
        with pytest.raises(ConditionFailedError):
            writer.put(key, b"2", when=[reef.absent(key)])
    assert dict(writer.scan()) == {b"a": b"1", b"b": b"loaded"}
    writer.close()


def test_H15_batches_are_whole_for_every_reader(store):
    """H15: a transfer is seen whole, on the disk, between disk and bucket, and after a crash."""
    disk = FullDisk()
    writer = machine(store, disk)
    sums, stop = [], threading.Event()

    def watch():
        while not stop.is_set():
            sums.append(sum(int(value) for _, value in writer.scan()))

    writer.write(reef.Batch().put("a", b"50").put("b", b"50"))
    watcher = threading.Thread(target=watch)
    watcher.start()
    for n in range(40):
        writer.write(reef.Batch().put("a", b"%d" % n).put("b", b"%d" % (100 - n)))
        if n % 4 == 0:
            writer.flush()
    stop.set()
    watcher.join()
    disk = crash(writer, disk)
    with machine(store, disk) as again:
        sums.append(sum(int(value) for _, value in again.scan()))
    assert set(sums) == {100}
