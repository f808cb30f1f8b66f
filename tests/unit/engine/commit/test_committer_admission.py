"""Admission to a writer's queue: callbacks never wait, and no caller waits for two deadlines."""

import threading
import time

import pyarrow as pa
import pytest

import reef
from reef import stores
from reef.engine.commit import committer
from reef.errors import UnavailableError
from reef.jobs import compact, fold
from reef.stores import Wrapper

NAME = "users"


class Holds(Wrapper):
    """Holds up PUTs into the log until it is released."""

    def __init__(self, inner):
        super().__init__(inner)
        self.go = threading.Event()
        self.go.set()

    def create(self, key, body):
        if "/wal/" in key:
            assert self.go.wait(240)
        return self.inner.create(key, body)


class SlowHeads(Holds):
    """Delays requests for manifests, once enabled."""

    delay_s = 0.0
    asked = 0

    def get_tagged(self, key):
        if self.delay_s and "/manifest/" in key:
            self.asked += 1
            time.sleep(self.delay_s)
        return self.inner.get_tagged(key)


def seconds(call):
    """Return the result or error of a call, and how long it took."""
    begin_s = time.monotonic()
    try:
        outcome = call()
    except reef.ReefError as error:
        outcome = error
    return outcome, time.monotonic() - begin_s


def full_queue(**settings):
    """Return a store that holds up PUTs, and a writer whose queue is full with one."""
    store = Holds(stores.open("memory://"))
    writer = reef.Database(store).writer(NAME, queue_bytes_max=300, **settings)
    store.go.clear()
    futures = [writer.put("in flight", b"", wait=False)]
    while not writer._committer._inflight:
        time.sleep(0.001)
    futures += [writer.put(f"k{n}", bytes(100), wait=False) for n in range(2)]
    return store, writer, futures


def test_a_callback_that_writes_into_a_full_queue_is_refused_at_once():
    """It runs on the thread that would make room: to wait there would be to wait for itself."""
    store, writer, futures = full_queue(write_deadline_s=120)
    results = []
    futures[0].add_done_callback(
        lambda done: results.append(seconds(lambda: writer.put("more", b"", wait=False)))
    )
    store.go.set()
    receipts = [future.result(60) for future in futures]
    refused, took_s = results[0]
    assert isinstance(refused, UnavailableError)
    assert "callback" in refused.message
    assert took_s < 60
    assert receipts[-1].lsn > receipts[0].lsn
    assert writer.put("afterwards", b"there is room").lsn > receipts[-1].lsn
    assert writer.get("more") is None


def test_a_callback_writes_where_there_is_room():
    """One batch leads to the next; it waits for each as well as any other thread."""
    writer = reef.Database(stores.open("memory://")).writer(NAME)
    done = threading.Event()

    def write_on(future):
        left = int(writer.get("left"))
        if not left:
            done.set()
            return
        writer.put("waited for", b"%d" % left)
        writer.put("left", b"%d" % (left - 1), wait=False).add_done_callback(write_on)

    writer.put("left", b"5", wait=False).add_done_callback(write_on)
    assert done.wait(60)
    assert (writer.get("left"), writer.get("waited for")) == (b"0", b"1")


def test_a_callback_still_sees_that_a_fold_has_made_room():
    """It does not wait for a fold, but checks whether there was one."""
    db = reef.Database(stores.open("memory://"))
    writer = db.writer(NAME, unfolded_bytes_max=500, write_deadline_s=120)
    results, done = [], threading.Event()

    def write_more(future):
        fold(db, NAME)
        results.append(seconds(lambda: writer.put("more", b"there")))
        done.set()

    writer.put("large", bytes(600), wait=False).add_done_callback(write_more)
    assert done.wait(60)
    outcome, took_s = results[0]
    assert outcome.lsn
    assert took_s < 60
    assert writer.get("more") == b"there"


@pytest.mark.parametrize("keyed", [True, False])
def test_writers_that_wait_for_room_do_not_wait_for_each_other(keyed):
    """Five threads at a full queue: each is rejected within its own deadline, keyed or not."""
    store, writer, _ = full_queue(write_deadline_s=2.0)
    results = []

    def write(number):
        key = f"key {number}" if keyed else None
        results.append(seconds(lambda: writer.put(f"t{number}", b"", idempotency_key=key)))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.go.set()
    assert [type(outcome) for outcome, _ in results] == [UnavailableError] * 5
    assert max(took_s for _, took_s in results) < 8, "ten, if they waited one after the other"
    writer.close()


def test_only_one_waiting_writer_checks_for_a_fold(monkeypatch):
    """Eight threads wait while the log is full and the store is slow: refreshes do not add up."""
    monkeypatch.setattr(committer, "REFRESH_S", 600.0)  # no second refresh for late threads
    store = SlowHeads(stores.open("memory://"))
    writer = reef.Database(store).writer(NAME, unfolded_bytes_max=100, write_deadline_s=0.3)
    writer.put("large", bytes(200), wait=False).result(60)
    store.go.clear()
    writer._committer.tail.bytes = 0
    writer.put("in flight", b"", wait=False)
    writer._committer.tail.bytes = 200
    store.delay_s = 0.3
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(seconds(lambda: writer.put("k", b""))))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.delay_s = 0.0
    assert [type(outcome) for outcome, _ in results] == [UnavailableError] * 8
    store.go.set()
    assert store.asked == 1
    assert max(took_s for _, took_s in results) < 60, "no caller waits for the objects in flight"
    writer.close()


def test_writers_do_not_wait_for_an_index_that_no_compaction_would_build():
    """All rows together are fewer than the index needs, whatever the bound is."""
    db = reef.Database(stores.open("memory://"))
    schema = pa.schema([("id", pa.string()), ("n", pa.int64())])
    db.create(NAME, schema, indexes=[reef.filter_index("n", rows_min=25)])
    with db.writer(NAME, background=False, unindexed_rows_max=5, write_deadline_s=0.2) as writer:
        writer.upsert([{"id": str(number), "n": number} for number in range(10)])
        fold(db, NAME)
        writer.refresh()
        writer.put("more", {"n": 1})
        assert writer.count() == 11


def test_writers_wait_while_too_many_rows_have_no_search_index():
    """Rows in segments too small for indexes are bounded; a compaction makes room."""
    db = reef.Database(stores.open("memory://"))
    schema = pa.schema([("id", pa.string()), ("n", pa.int64())])
    db.create(NAME, schema, indexes=[reef.filter_index("n", rows_min=25)])
    with db.writer(NAME, background=False, unindexed_rows_max=25, write_deadline_s=0.2) as writer:
        for part in range(3):
            for number in range(10):
                writer.put(f"{part}-{number}", {"n": number})
            fold(db, NAME)
        writer.refresh()
        with pytest.raises(UnavailableError, match=r"at most 25 rows .*, found 30"):
            writer.put("more", {"n": 1})
        compact(db, NAME, full=True)
        writer.refresh()
        writer.put("more", {"n": 1})
        assert writer.count("n = 1") == 4
