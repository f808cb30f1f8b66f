"""A writer with a local log: receipts, reads, uploads, refusals and errors."""

import pickle
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest

import reef
from reef import stores
from reef.config import BackgroundSettings
from reef.engine.handles.database import Database
from reef.engine.local.buffer import Backlog, BufferedBatch
from reef.engine.local.stream import LocalBatch, LogIdentity, PendingUploads
from reef.engine.local.uploader import truncate
from reef.errors import (
    ClosedError,
    ConditionFailedError,
    ConflictError,
    ErrorKind,
    FencedError,
    InvalidInputError,
    UnavailableError,
)
from reef.formats.manifest import StreamPoint
from reef.formats.wal_object import BatchHeader
from reef.jobs import fold
from reef.locallog import LocalLog, LogEntry
from reef.runtime import REAL
from reef.stores.memory import MemoryStore
from reef.testing import Fault, Faults, Rule, open_store
from reef.types import Receipt
from tests.support.child_process import in_child

NEVER_MS = 1e9
"""An upload interval that never ends: only who waits has something uploaded."""


@pytest.fixture
def path(tmp_path):
    """Where the local log is."""
    return tmp_path / "log"


@pytest.fixture
def store():
    """The bucket."""
    return MemoryStore()


@pytest.fixture
def open_local(store, path):
    """Return a function that opens a writer with the log; all are closed at the end."""
    opened = []

    def open_(name="users", bucket=None, log=path, **settings):
        settings = {"upload_interval_ms": NEVER_MS, "local_segment_bytes": 4096, **settings}
        db = Database(bucket or store)
        opened.append(db.writer(name, durability="local", local_log=log, **settings))
        return opened[-1]

    yield open_
    for writer in opened:
        writer._settings = writer._buffer.settings = writer._settings.changed(
            {"write_deadline_s": 0.0}
        )
        with suppress(UnavailableError, FencedError):
            writer.close()


def down(store, times=None):
    """Return the store with a log that cannot be written to, and the rule to lift that."""
    rule = Rule(Fault.FAIL_BEFORE, "create", "*/wal/*", times=times)
    return Faults(store, [rule]), rule


def crash(writer):
    """Leave a writer as a killed process leaves it: nothing is uploaded any more."""
    writer._uploader.stop()
    writer._buffer.log.close()
    writer._closed = True


def test_a_put_is_acknowledged_before_it_is_in_the_bucket(open_local, store):
    """One local sync and no request; the receipt's LSN comes with the upload."""
    writer = open_local()
    before = len(list(store.list()))
    receipt = writer.put("a", b"1")
    assert receipt.lsn is None
    assert len(list(store.list())) == before
    assert writer.pending.batches == 1
    assert receipt.wait() == receipt.lsn
    assert receipt.lsn == writer.unfolded.objects
    assert Database(store).reader("users").get("a") == b"1"
    assert writer.pending.batches == 0


def test_what_gathers_goes_out_as_one_object(open_local):
    """A hundred puts are one WAL object, each with a place of its own in it."""
    writer = open_local()
    receipts = [writer.put(f"k{n}", b"v") for n in range(100)]
    objects = writer.unfolded.objects
    writer.flush()
    assert writer.unfolded.objects == objects + 1
    assert {r.lsn for r in receipts} == {receipts[0].lsn}
    assert [r.index for r in receipts] == list(range(100))


def test_upload_bytes_bound_an_object(open_local):
    """More than that is several objects; the first goes out without waiting for the interval."""
    writer = open_local(upload_bytes=2000)
    receipts = [writer.put(f"k{n}", bytes(500)) for n in range(8)]
    receipts[0].wait()
    writer.flush()
    assert len({r.lsn for r in receipts}) >= 3


def test_an_upload_is_not_cut_by_what_holds_for_puts(open_local):
    """`upload_bytes` may be larger than the groups and the queue of a writer without a log."""
    writer = open_local(
        upload_bytes=1 << 20, group_bytes_max=10_000, queue_bytes_max=20_000, write_deadline_s=60.0
    )
    receipts = [writer.put(f"k{n}", bytes(1000), wait=False).result() for n in range(300)]
    writer.flush()
    assert len({receipt.lsn for receipt in receipts}) == 1


def test_a_log_that_refuses_has_not_got_it(open_local):
    """After its rotation has failed, the next put is refused, and its outcome is no secret."""
    writer = open_local()

    def no_space(*_):
        raise OSError(28, "No space left on device")

    writer._buffer.log._meta.set_state = no_space
    for n in range(4):  # the last one fills the segment
        writer.put(f"k{n}", bytes(1000))
    with pytest.raises(ClosedError, match="No space left"):
        writer.put("late", b"1")
    assert not writer.is_open


def test_its_names_are_public():
    """Public types, for annotations."""
    assert issubclass(reef.LocalWriter, reef.Writer)
    assert issubclass(reef.LocalReceipt, reef.Receipt)


def test_the_interval_uploads_by_itself(open_local, store):
    """It is uploaded soon, though no caller waits."""
    writer = open_local(upload_interval_ms=5.0)
    receipt = writer.put("a", b"1")
    while receipt.lsn is None:
        threading.Event().wait(0.01)
    assert Database(store).reader("users").get("a") == b"1"


def test_one_sync_takes_all_that_waits(open_local, monkeypatch):
    """Threads that write at once share syncs; each gets its own receipt."""
    writer, groups = open_local(), []
    store_logs = LocalLog.store_logs

    def slow(self, entries):
        groups.append(len(entries))
        deadline = REAL.deadline(60)
        while len(groups) == 1 and len(writer._buffer.backlog.arriving) < 30:
            assert not deadline.passed(), "the others do not come while the first sync lasts"
            threading.Event().wait(0.001)
        store_logs(self, entries)

    monkeypatch.setattr(LocalLog, "store_logs", slow)
    threads = [
        threading.Thread(target=writer.put, args=(f"k{n}", b"v"), name=f"p{n}") for n in range(30)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(groups) == 30
    assert len(groups) <= 2
    assert len(list(writer.scan())) == 30


def test_reads_see_everything_at_once(open_local):
    """Puts, deletes, ranges and expiry hide the rows of the bucket, for every kind of read."""
    writer = open_local()
    for key in ("a", "b", "c", "d"):
        writer.put(key, b"old")
    writer.flush()
    fold(Database(writer._committer.log._store), "users")
    writer.refresh()
    assert writer.get("a") == b"old"  # kept, ready to hand out
    writer.put("a", b"new")
    writer.delete("b")
    writer.delete_range("c", "d")
    writer.put("e", b"soon gone", ttl_s=0.001)
    threading.Event().wait(0.01)
    expected = {b"a": b"new", b"d": b"old"}
    for _ in range(2):
        assert writer.get("a") == b"new"
        assert writer.get("b") is None
        assert dict(writer.scan()) == expected
        assert dict(writer.scan(reverse=True)) == expected
        table = writer.get_many(["a", "b", "c", "d", "e"])
        assert table["_found"].to_pylist() == [True, False, False, True, False]
        writer.flush()  # the same rows, from below
        assert not writer._buffer.view().staged.cut().all_runs()
    assert writer.pending.batches == 0


def test_a_scan_keeps_its_snapshot(open_local):
    """Uploads and writes do not change an open iterator."""
    writer = open_local()
    for n in range(3):
        writer.put(f"k{n}", b"v")
    rows = writer.scan()
    first = next(rows)
    writer.flush()
    writer.put("k1", b"later")
    assert [first, *rows] == [(f"k{n}".encode(), b"v") for n in range(3)]


def test_rows_with_columns_and_patches(open_local, store):
    """Upserts and patches go through the log, also one on a row that is below."""
    schema = pa.schema([("id", pa.string()), ("n", pa.int64()), ("s", pa.string())])
    Database(store).create("events", schema)
    writer = open_local("events")
    writer.upsert([{"id": "e1", "n": 1, "s": "x"}])
    writer.flush()
    writer.patch([{"id": "e1", "n": 2}])
    writer.patch([{"id": "none", "n": 2}])
    assert writer.get("e1") == {"id": "e1", "n": 2, "s": "x"}
    assert writer.get("none") is None
    writer.flush()
    assert writer.get("e1") == {"id": "e1", "n": 2, "s": "x"}
    assert Database(store).reader("events").get("e1")["n"] == 2


def test_columns_may_grow_over_a_backlog(open_local, store):
    """Rows of the old columns and of the new ones, on the disk, in memory, and after a crash."""
    schema = pa.schema([("id", pa.string()), ("n", pa.int64())])
    db = Database(store)
    db.create("events", schema)
    writer = open_local("events")
    writer.upsert([{"id": "a", "n": 1}])
    db.alter("events", schema.append(pa.field("s", pa.string())))
    writer.upsert([{"id": "b", "n": 2, "s": "x"}])
    expected = [{"id": "a", "n": 1, "s": None}, {"id": "b", "n": 2, "s": "x"}]
    assert [row for _, row in writer.scan()] == expected
    crash(writer)
    again = open_local("events")
    assert again.local_recovery.replayed == 2
    assert [row for _, row in again.scan()] == expected
    again.flush()
    assert [row for _, row in db.reader("events").scan()] == expected


def test_without_waiting(open_local):
    """A future has the same receipt; callbacks may write."""
    writer = open_local()
    results = []
    future = writer.put("a", b"1", wait=False)
    future.add_done_callback(lambda done: results.append(writer.put("b", done.result().ops * b"2")))
    assert future.result().lsn is None
    while not results:
        threading.Event().wait(0.01)
    writer.flush()
    assert future.result().lsn == results[0].lsn == future.result().wait()


def test_conditions_wait_for_the_bucket(open_local):
    """They see all that was written before, and commit in the bucket at once."""
    writer = open_local()
    writer.put("a", b"1")
    with pytest.raises(ConditionFailedError):
        writer.put("a", b"2", when=[reef.absent("a")])
    assert writer.pending.batches == 0
    receipt = writer.put("b", b"2", when=[reef.present("a")])
    assert isinstance(receipt.lsn, int)
    writer.put("c", b"3")  # the way is free again
    assert dict(writer.scan()) == {b"a": b"1", b"b": b"2", b"c": b"3"}


def test_nothing_is_let_in_while_a_condition_is_decided(open_local):
    """A put that comes meanwhile waits, and then goes before the next condition."""
    writer = open_local()
    writer._buffer.begin_barrier()
    put = threading.Thread(target=writer.put, args=("a", b"1"))
    put.start()
    put.join(0.1)
    assert put.is_alive()
    assert writer.get("a") is None
    decided = threading.Thread(
        target=writer.put, args=("b", b"2"), kwargs={"when": [reef.present("a")]}
    )
    decided.start()
    decided.join(0.1)
    assert decided.is_alive()
    writer._buffer.end_barrier()
    put.join(60)
    decided.join(60)
    assert dict(writer.scan()) == {b"a": b"1", b"b": b"2"}


def test_no_caller_waits_behind_a_writer_that_has_ended(open_local):
    """Not a put that a condition holds back, nor the next condition, which lets that one pass."""
    writer = open_local(write_deadline_s=300.0)
    writer._buffer.begin_barrier()
    report = []

    def put(*when):
        with pytest.raises(ClosedError):
            writer.put("a", b"1", when=when)
        report.append(when)

    threads = [threading.Thread(target=put), threading.Thread(target=put, args=[reef.absent("a")])]
    threads[0].start()
    while not writer._buffer._held_back:
        threading.Event().wait(0.01)
    threads[1].start()
    threading.Event().wait(0.2)
    writer._buffer.end(ClosedError("that was all"))
    for thread in threads:
        thread.join(60)
    assert len(report) == 2, "a caller still waits"
    writer._buffer.end_barrier()


def test_conditions_without_waiting(open_local):
    """The future raises it; a refusal that no caller waited for is raised by flush, once."""
    writer = open_local()
    writer.put("a", b"1")
    refused = writer.put("a", b"2", when=[reef.absent("a")], wait=False)
    with pytest.raises(ConditionFailedError):
        writer.flush()
    writer.flush()
    assert isinstance(refused.exception(), ConditionFailedError)
    assert writer.put("a", b"3", when=[reef.present("a")], wait=False).result().lsn
    writer.put("b", b"1")


def test_transactions_see_earlier_writes_and_conflict_with_later_ones(open_local):
    """Local writes before the beginning are seen; one behind it makes the transaction lose."""
    writer = open_local()
    writer.put("a", b"1")
    with writer.transaction() as tx:
        tx.put("b", tx.get("a") + b"!")
    assert isinstance(tx.receipt.lsn, int)
    assert writer.get("b") == b"1!"
    lost = writer.transaction()
    assert lost.get("a") == b"1"
    writer.put("a", b"2")
    lost.put("c", b"3")
    with pytest.raises(ConflictError):
        lost.commit()
    assert writer.get("c") is None


def test_a_full_backlog_makes_writers_wait(store, open_local):
    """While the bucket is away there is room up to a bound, then UnavailableError."""
    bucket, rule = down(store, times=0)
    writer = open_local(bucket=bucket, local_backlog_bytes_max=20_000, write_deadline_s=0.1)
    rule.times = None
    written = 0
    with suppress(UnavailableError):
        for written in range(100):
            writer.put(f"k{written}", bytes(500))
    assert 5 <= written <= 10
    with pytest.raises(UnavailableError, match="wait for the bucket"):
        writer.put("one more", bytes(500))
    with pytest.raises(UnavailableError, match="safe in"):
        writer.flush(timeout_s=0.05)
    rule.times = rule.struck
    writer.flush()
    assert writer.pending.batches == 0
    assert writer.put("more", b"1").wait()
    assert len(list(Database(store).reader("users").scan())) == written + 1


def test_small_batches_count_with_their_size_in_memory(store, open_local):
    """In memory that is more than their bytes: so many that all of them fit in."""
    bucket, rule = down(store, times=0)
    writer = open_local(bucket=bucket, local_backlog_bytes_max=100_000, write_deadline_s=0.1)
    rule.times = None
    written = 0
    with suppress(UnavailableError):
        for written in range(1000):
            writer.put(f"k{written}", b"1")
    assert 30 <= written <= 100
    rule.times = rule.struck
    writer.flush()


def test_the_log_loses_its_head(open_local, path):
    """Uploaded entries leave the disk, file by file; the last entry stays for its number."""
    writer = open_local()
    for n in range(100):
        writer.put(f"k{n}", bytes(200))
    assert len(list(path.glob("*.wal"))) > 3
    writer.flush()
    truncate(writer._buffer)
    assert (writer._buffer.log.first_index, writer._buffer.log.last_index) == (100, 100)
    assert len(list(path.glob("*.wal"))) <= 2
    writer.put("more", b"1")
    assert writer.pending.first_index == 101


def test_closing_uploads(open_local, store):
    """Nothing is left; the next opening has nothing to do."""
    with open_local() as writer:
        writer.put("a", b"1")
    assert Database(store).reader("users").get("a") == b"1"
    assert open_local().local_recovery.replayed == 0
    with pytest.raises(ClosedError):
        writer.put("b", b"1")
    with pytest.raises(ClosedError):
        writer.get("a")


def test_closing_waits_for_conditions(store, open_local):
    """A duplicate of one in flight gets its receipt, as from a writer without a log."""
    gate = threading.Event()

    class Slow(stores.Wrapper):
        def create(self, key, body):
            if "/wal/" in key and gate.is_set():
                threading.Event().wait(0.3)
            return self.inner.create(key, body)

    writer = open_local(bucket=Slow(store))
    gate.set()
    first = writer.put("a", b"1", when=[reef.absent("a")], wait=False)
    writer.close()
    assert first.result(timeout=0).lsn == 2


def test_closing_reports_pending_batches(store, open_local, path):
    """A bucket that stays away does not hold up a close for ever; nothing is lost."""
    bucket, rule = down(store, times=0)
    writer = open_local(bucket=bucket, write_deadline_s=0.1)
    rule.times = None
    writer.put("a", b"1")
    with pytest.raises(UnavailableError, match=r"1 batches .* not in the bucket") as caught:
        writer.close()
    assert f"reef log pending {path}" in caught.value.hint
    writer.close()  # once more is nothing
    released = {info.key for info in store.list() if info.key.endswith("released.json")}
    assert not released, "a role with batches on one disk is not free for other writers"
    again = open_local()
    assert again.local_recovery.replayed == 1
    assert again.get("a") == b"1"


def test_an_error_of_the_block_is_not_hidden(store, open_local):
    """Pending batches are logged; the error of the block propagates."""
    bucket, rule = down(store, times=0)
    writer = open_local(bucket=bucket, write_deadline_s=0.0)
    rule.times = None
    writer.put("a", b"1")
    with pytest.raises(ZeroDivisionError), writer:
        raise ZeroDivisionError


def test_batches_left_by_a_crash_are_recovered(open_local, store):
    """Seen at once by the next writer of the same path, and uploaded once, in order."""
    writer = open_local()
    writer.put("a", b"1")
    writer.flush()
    writer.put("a", b"2", idempotency_key="k")
    writer.delete("b")
    crash(writer)
    assert Database(store).reader("users").get("a") == b"1"
    again = open_local()
    assert (again.local_recovery.uploaded_index, again.local_recovery.replayed) == (1, 2)
    assert again.get("a") == b"2"
    assert again.pending.batches == 2
    assert again.put("a", b"2", idempotency_key="k").replayed
    again.flush()
    assert Database(store).reader("users").get("a") == b"2"
    assert again.put("a", b"2", idempotency_key="k").lsn


def test_a_lost_end_does_not_reuse_numbers(open_local, store, path):
    """If the disk forgets entries that were uploaded, new ones are not taken for those."""
    writer = open_local()
    for n in range(5):
        writer.put(f"k{n}", b"v")
    writer.flush()
    crash(writer)
    with LocalLog(path) as log:
        log.delete_range(3, 5)
    again = open_local()
    again.put("new", b"1")
    assert again.pending.first_index == 6
    again.close()
    assert Database(store).reader("users").get("new") == b"1"


def test_another_namespace_or_database_is_refused(open_local, tmp_path):
    """A log belongs to one namespace of one bucket; the wrong one is left without a trace."""
    writer = open_local()
    writer.put("a", b"1")
    crash(writer)
    with pytest.raises(InvalidInputError, match="namespace users"):
        open_local("others")
    for bucket in (MemoryStore(), MemoryStore()):
        with pytest.raises(InvalidInputError, match="another database"):
            open_local(bucket=bucket)
        assert "users" not in Database(bucket).namespaces()
    taken = MemoryStore()
    Database(taken).writer("users").close()
    with pytest.raises(InvalidInputError, match="another database"):
        open_local(bucket=taken)
    with LocalLog(tmp_path / "raft") as log:
        log.store_log(LogEntry(1))
    with pytest.raises(InvalidInputError, match="no writer of Reef"):
        open_local(log=tmp_path / "raft")
    assert open_local().get("a") == b"1"


def test_a_log_that_no_namespace_knows_yet_is_not_anothers(open_local, path):
    """It was made for one namespace, and its first opening died before it took the role."""
    with LocalLog(path) as log:
        LogIdentity("log", "users", "memory:").write(log)
    with pytest.raises(InvalidInputError, match="local log of namespace users"):
        open_local("others")
    with open_local() as writer:
        assert writer._buffer.identity.id == "log"


def test_two_at_once_are_refused(open_local):
    """The directory has one owner; the second one changes nothing."""
    writer = open_local()
    with pytest.raises(ConflictError):
        open_local()
    assert writer.put("a", b"1").wait()


def test_after_a_takeover_opening_stops(open_local, store, path):
    """The tail is neither lost nor applied by itself; reapply applies it, once."""
    writer = open_local()
    writer.put("a", b"uploaded")
    writer.flush()
    writer.put("a", b"mine")
    writer.put("b", b"mine")
    crash(writer)
    with Database(store).writer("users") as rival:
        rival.put("a", b"theirs")
    for _ in range(2):
        with pytest.raises(FencedError, match="2 batches") as caught:
            open_local()
        assert f"reef log pending {path}" in caught.value.hint
        assert f"reef log reapply {path} {store.url}" in caught.value.hint
    assert Database(store).reader("users").get("a") == b"theirs"
    for replayed in (2, 0):
        with open_local(reapply=True) as again:
            assert again.local_recovery.replayed == replayed
    assert dict(Database(store).reader("users").scan()) == {b"a": b"mine", b"b": b"mine"}
    assert open_local().local_recovery.replayed == 0


@pytest.mark.parametrize("keyed", [{1}, {2}, {3}, {1, 2}, {2, 3}, {1, 2, 3}])
def test_a_key_that_a_rival_has_committed_counts_once(open_local, store, path, keyed):
    """H19: its client has sent it again, to the writer that took the role. Reapplying does not
    write it over what came later; all the rest is written, and the numbers continue."""
    writer = open_local()
    keys = {n: {"idempotency_key": f"key {n}"} for n in keyed}
    for n in (1, 2, 3):
        writer.put(f"k{n}", b"mine", **keys.get(n, {}))
    crash(writer)
    with Database(store).writer("users") as rival:
        for n in keyed:
            rival.put(f"k{n}", b"mine", **keys[n])
            rival.put(f"k{n}", b"newer")
    with open_local(reapply=True) as again:
        found = again.local_recovery
        assert (found.replayed, found.repeated) == (3 - len(keyed), len(keyed))
        again.flush()
        assert again.pending.batches == 0
        assert again.put("k4", b"4").local_index == 4
    rows = dict(Database(store).reader("users").scan())
    assert rows.pop(b"k4") == b"4"
    assert {n for n in (1, 2, 3) if rows[b"k%d" % n] == b"newer"} == keyed
    with LocalLog(path) as log:
        assert log.get_uint64("reef.uploaded") == 4
    assert open_local().local_recovery.replayed == 0


def test_a_key_with_another_body_is_reapplied(open_local, store):
    """Both were acknowledged, and `reapply` requests this one."""
    writer = open_local()
    writer.put("a", b"mine", idempotency_key="k")
    crash(writer)
    with Database(store).writer("users") as rival:
        rival.put("a", b"theirs", idempotency_key="k")
    with open_local(reapply=True) as again:
        assert (again.local_recovery.replayed, again.local_recovery.repeated) == (1, 0)
    assert Database(store).reader("users").get("a") == b"mine"


def test_a_namespace_that_was_created_again_does_not_know_the_columns(open_local, store, path):
    """Pending batches cannot be read with other columns: an error says so, and they stay."""
    writer = open_local()
    writer.put("a", b"mine")
    crash(writer)
    db = Database(store)
    db.drop("users")
    db.writer("users").close()
    with pytest.raises(InvalidInputError, match="schema 1, which namespace users does not have"):
        open_local(reapply=True)
    with LocalLog(path) as log:
        assert log.last_index == 1


def test_a_takeover_of_a_log_with_nothing_left_is_no_matter(open_local, store):
    """If all was uploaded, though the log has no record of it, opening succeeds."""
    writer = open_local()
    writer.put("a", b"mine")
    writer.flush()
    crash(writer)
    with Database(store).writer("users") as rival:
        rival.put("a", b"theirs")
    again = open_local()
    assert again.local_recovery.replayed == 0
    assert again.get("a") == b"theirs"


def test_a_running_writer_is_fenced(open_local, store, path):
    """The uploader finds out; from then on every call says so, and the tail stays on the disk."""
    writer = open_local()
    writer.put("a", b"1")
    Database(store).writer("users").close()
    writer.put("b", b"2")
    with pytest.raises(FencedError, match="2 batches") as caught:
        writer.flush()
    assert "reef log reapply" in caught.value.hint
    with pytest.raises(FencedError):
        writer.put("c", b"3")
    with pytest.raises(FencedError):
        writer.put("c", b"3", when=[reef.absent("c")])
    assert not writer.is_open
    with pytest.raises(FencedError):
        writer.close()
    with pytest.raises(FencedError):
        open_local()
    with open_local(reapply=True) as again:
        assert dict(again.scan()) == {b"a": b"1", b"b": b"2"}


def test_an_unanswered_upload_counts_once(open_local):
    """The response to a PUT is lost repeatedly; its rows are applied once."""
    rule = Rule(Fault.FAIL_AFTER, "create", "*/wal/*", times=0)
    store = open_store("memory://", faults=[rule])
    writer = open_local(bucket=store)
    rule.times = 3
    receipts = [writer.put(f"k{n}", b"v") for n in range(3)]
    writer.flush()
    assert len({receipt.lsn for receipt in receipts}) == 1
    changes = [change.lsn for change in Database(store).reader("users").changes(after_lsn=0)]
    assert len(changes) == 3
    assert rule.struck == 3


def test_receipts_are_equal_by_their_place(open_local):
    """Filling one in changes neither; elsewhere it is a plain receipt."""
    writer = open_local()
    one, two = writer.put("a", b"1"), writer.put("a", b"1", idempotency_key="k")
    again = writer.put("a", b"1", idempotency_key="k")
    assert one != two
    assert two == again
    assert again.replayed
    kept = {one: "a", two: "b"}
    assert writer.resolve(one) == "unknown"
    writer.flush()
    assert kept[one] == "a"
    assert again.lsn == two.lsn
    assert writer.resolve(one) == "committed"
    assert type(pickle.loads(pickle.dumps(one))) is Receipt


def test_forked_and_pickled_handles_refuse(open_local, path):
    """A copy would be a second writer of the same log."""
    writer = open_local()
    writer.put("a", b"1")

    def use():
        kinds = []
        for call in (lambda: writer.put("b", b"2"), writer.flush, writer.close):
            try:
                call()
            except ClosedError as error:
                kinds.append(error.kind)
        return kinds

    assert in_child(use) == (0, repr([ErrorKind.FORKED] * 3))
    with pytest.raises(InvalidInputError):
        pickle.dumps(writer)
    assert writer.put("b", b"2").wait()


def test_a_forgotten_writer_lets_go(open_local, store, path):
    """One that is dropped without a close ends by and by, and its tail is recovered."""
    db = Database(store)
    writer = db.writer("users", durability="local", local_log=path, upload_interval_ms=NEVER_MS)
    writer.put("a", b"1")
    uploader = writer._uploader
    del writer
    uploader._wake_up()
    uploader._task.join(60)
    assert open_local().get("a") == b"1"


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ({"durability": "local"}, "needs local_log"),
        ({"local_log": "x"}, "durability='local'"),
        ({"reapply": True}, "durability='local'"),
        ({"durability": "disk"}, "neither"),
        ({"durability": "local", "local_log": "x", "ack": "independent"}, "in order"),
    ],
)
def test_wrong_words_are_refused(store, words, match, tmp_path, monkeypatch):
    """Before anything is made."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInputError, match=match):
        Database(store).writer("users", **words)
    assert not Path("x").exists()


def test_the_async_face_has_it(tmp_path):
    """`reef.aio` passes it on: many puts, few objects."""
    import asyncio

    from reef import aio

    async def run():
        async with aio.open(str(tmp_path / "data")) as db:
            log = {"durability": "local", "local_log": tmp_path / "log"}
            async with db.writer("users", upload_interval_ms=NEVER_MS, **log) as writer:
                await asyncio.gather(*(writer.put(f"k{n}", b"v") for n in range(50)))
                assert await writer.get("k1") == b"v"
                assert isinstance(writer, aio.LocalWriter)
                assert writer.local_recovery.replayed == 0
                receipt = await writer.put("k50", b"v")
                assert (receipt.lsn, writer.pending.batches) == (None, 51)
                assert await writer.wait_for(receipt) == receipt.lsn == 2
                assert await writer.wait_for(receipt, timeout_s=0.0) == 2
                assert writer.pending.batches == 0
                await writer.flush(timeout_s=60.0)
                return writer.unfolded.objects

    assert asyncio.run(run()) == 2


def test_the_background_folds_behind_it(tmp_path):
    """The log becomes segments while rows are on the disk only; all of them are seen."""
    db = reef.open(str(tmp_path / "data"))
    fast = BackgroundSettings(fold_bytes=1, poll_interval_s=0.01, compact=False, sweep=False)
    log = {"durability": "local", "local_log": tmp_path / "log", "local_segment_bytes": 1 << 20}
    with db.writer("users", background=fast, upload_interval_ms=1.0, **log) as writer:
        for n in range(200):
            writer.put(f"k{n % 50:02}", str(n).encode())
            if n % 10 == 0:
                writer.flush()
                assert len(list(writer.scan())) == min(n + 1, 50)
        while not writer._manifest.segments:
            threading.Event().wait(0.01)
        assert {int(v) for _, v in writer.scan()} == set(range(150, 200))


# --- growth ---------------------------------------------------------------------------


def _calls(work):
    """Return the number of Python functions that some work calls."""
    count = 0

    def counted(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(counted)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_pending_costs_the_same_for_any_backlog():
    """Number and bytes of pending batches are counted as they change, not at each call; they stay
    exact when batches arrive, are synced, rejected and uploaded."""
    calls = []
    for size in (10, 100, 1000):
        backlog = Backlog(1 << 30)
        items = [_buffered(index, key=f"key-{index}") for index in range(1, size + 1)]
        for item in items:
            backlog.add(item)
        rejected = _buffered(size + 1, key="rejected")
        backlog.add(rejected)
        backlog.synced(items)
        assert backlog.reject_arriving() == [rejected]
        assert backlog.find(rejected) is None
        backlog.uploaded(items[0])
        expected = sum(item.batch.size for item in items[1:])
        assert backlog.pending() == PendingUploads(size - 1, expected, 2, size)
        calls.append(_calls(backlog.pending))
    assert calls[0] == calls[1] == calls[2]


def _buffered(index, key):
    batch = LocalBatch(bytes(index % 7), BatchHeader(1, key, "digest"), 1)
    item = BufferedBatch(batch, None, REAL.stopwatch())
    item.set_point(StreamPoint(1, index, b""))
    return item
