"""Writers and readers at their edges: bad input, closed handles, forks, unknown outcomes."""

import pickle
import threading
import time
from contextlib import ExitStack

import msgspec
import pytest

import reef
from reef import stores
from reef.errors import (
    ClosedError,
    CorruptionError,
    ErrorKind,
    FencedError,
    InvalidInputError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
)
from reef.formats.manifest import encode_manifest
from reef.formats.wal_object import WalHeader, WalKind, WalObject
from reef.jobs import fold
from reef.manifest.head import HeadFinder
from reef.paths import Namespace
from reef.stores import RetryPolicy, Wrapper
from reef.telemetry import RequestMeter
from reef.testing import Fault, Latency, LatencyProfile, Rule, open_store
from tests.support.child_process import in_child

QUICK = RetryPolicy(attempts_max=2, deadline_s=1.0, first_delay_s=0.001)


@pytest.fixture
def db():
    """Give an empty database in memory."""
    return reef.open("memory://")


def objects(db):
    """Return the content of the bucket."""
    return {info.key: db.store.get(info.key) for info in db.store.list()}


BAD_WRITES = [
    (lambda w: w.put("", b"v"), "1 to 65535 bytes, got 0"),
    (lambda w: w.put(b"k" * 65_536, b"v"), "got 65536"),
    (lambda w: w.put(17, b"v"), "bytes or str, got int"),
    (lambda w: w.put("k", "text"), "expected bytes, or a dict of columns, got str"),
    (lambda w: w.put("k", None), "a dict of columns, got NoneType"),
    (lambda w: w.put("k", b"v" * 3000), "exceeds batch_bytes_max=2000"),
    (lambda w: w.delete_range("b", "a"), "is empty"),
    (lambda w: w.delete_range("a", "a"), "is empty"),
    (lambda w: w.write(reef.Batch()), "without operations"),
    (lambda w: w.put(None, b"v"), "bytes or str, got NoneType"),
    (lambda w: w.put("\ud800", b"v"), "cannot be encoded as UTF-8"),
    (lambda w: w.delete(""), "1 to 65535 bytes, got 0"),
    (lambda w: w.delete_range("a", b"z" * 65_536), "got 65536"),
    (lambda w: w.delete_range("", "z"), "got 0"),
    (lambda w: w.write({"a": b"1"}), "takes a Batch, got dict"),
    (lambda w: w.put("k", b"v", idempotency_key=17), "idempotency key must be str, got int"),
    (lambda w: w.put("k", b"v", idempotency_key=""), "1 to 1024 bytes, got 0"),
    (
        lambda w: w.put("k", b"v", idempotency_key="\ud800"),
        "idempotency key cannot be encoded as UTF-8",
    ),
    (lambda w: w.put("k", b"v", idempotency_key="é" * 513), "got 1026"),
    (lambda w: w.put("k", 17, wait=False), "a dict of columns, got int"),
    (lambda w: w.get(17), "bytes or str, got int"),
    (lambda w: w.get(""), "1 to 65535 bytes, got 0"),
    (lambda w: w.scan(17), "bytes or text, got int"),
    (lambda w: w.scan("\ud800"), "not text"),
    (lambda w: w.scan(limit=-1), "limit=-1"),
]


@pytest.mark.parametrize(("write", "says"), BAD_WRITES, ids=[says for _, says in BAD_WRITES])
def test_bad_input_is_refused_and_nothing_is_written(db, write, says):
    """Each error names the expected value; the bucket stays as it was."""
    with db.writer("users", batch_bytes_max=2000) as writer:
        before = objects(db)
        with pytest.raises(InvalidInputError, match=says):
            write(writer)
        assert objects(db) == before
        writer.put("k", b"v")


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", "x" * 129, "a b", "..", "a\n", 17, None])
def test_bad_namespace_names(db, name):
    """Names are checked before anything is touched."""
    with pytest.raises(InvalidInputError, match="not the name of a namespace"):
        db.writer(name)
    assert objects(db) == {}


@pytest.mark.parametrize(
    "settings",
    [{"colour": 1}, {"ack": "never"}, {"max_parallel_writes": 0}, {"max_parallel_writes": 65},
     {"max_parallel_writes": 1.5}, {"max_parallel_writes": None}, {"max_parallel_writes": True},
     {"group_window_ms": -1}, {"group_window_ms": "fast"}, {"write_deadline_s": float("nan")},
     {"group_window_ms": float("inf")}, {"group_window_ms": 1e13}, {"commit_deadline_s": 1e10}],
    ids=str,
)  # fmt: skip
def test_bad_settings(db, settings):
    """A wrong setting is named, and the namespace stays as it was."""
    db.writer("users").close()
    before = objects(db)
    with pytest.raises(InvalidInputError, match=next(iter(settings))):
        db.writer("users", **settings)
    assert objects(db) == before


def test_a_closed_writer_refuses(db):
    """After close, every call says so; closing twice is fine."""
    writer = db.writer("users")
    writer.put("k", b"v")
    writer.close()
    writer.close()
    before = objects(db)
    calls = [
        lambda: writer.put("k", b"w"),
        lambda: writer.put("k", b"w", wait=False),
        lambda: writer.put("k", b"w", idempotency_key="once"),
        lambda: writer.delete_range("a", "z"),
        lambda: writer.get("k"),
        writer.scan,
        writer.flush,
        writer.refresh,
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call()
    assert objects(db) == before


def test_a_closed_reader_refuses(db):
    """The same for readers."""
    db.writer("users").close()
    reader = db.reader("users")
    reader.close()
    for call in (lambda: reader.get("k"), reader.refresh, lambda: reader.wait_for(1), reader.scan):
        with pytest.raises(ClosedError):
            call()


def test_a_reader_waits_for_lsns_only(db):
    """A receipt without an LSN, or a wait without an end, is a mistake, and reported as one."""
    lsn = db.writer("users").put("k", b"v").lsn
    reader = db.reader("users")
    for words in ((None,), ("2",), (-1,), (True,), (lsn, None), (lsn, "5"), (lsn, True)):
        with pytest.raises(InvalidInputError):
            reader.wait_for(*words)
    assert reader.wait_for(lsn, timeout_s=0)
    assert not reader.wait_for(lsn + 1, timeout_s=0.01)


@pytest.mark.parametrize("settings", [{"codec": "gzip"}, {"codec": None}, {"segment_bytes_max": 0}])
def test_bad_settings_of_a_fold(db, settings):
    """Named before anything is read or written, as those of all jobs."""
    db.writer("users").put("k", b"v")
    before = objects(db)
    with pytest.raises(InvalidInputError, match=next(iter(settings))):
        reef.jobs.fold(db, "users", **settings)
    assert objects(db) == before


def test_a_fenced_writer_refuses_for_good(db):
    """The second writer acquires the role; the first gets FencedError at its next write, and ever
    after."""
    first = db.writer("users")
    first.put("k", b"1")
    second = db.writer("users")
    assert second.get("k") == b"1"
    for _ in range(2):
        before = objects(db)
        with pytest.raises(FencedError, match="epoch 2"):
            first.put("k", b"2")
        assert objects(db) == before
    assert second.get("k") == b"1"
    second.put("k", b"3")


def test_a_writer_is_bound_to_its_process(tmp_path):
    """H43: neither pickling nor forking makes a second writer."""
    db = reef.open(str(tmp_path))
    with db.writer("users") as writer:
        writer.put("k", b"v")
        with pytest.raises(InvalidInputError) as caught:
            pickle.dumps(writer)
        assert caught.value.kind is ErrorKind.NOT_PICKLABLE
        before = objects(db)
        code, said = in_child(lambda: writer.put("k", b"child"))
        assert code == 1
        assert "belongs to process" in said
        assert objects(db) == before
        writer.put("k", b"parent")


def test_a_reader_travels_and_survives_a_fork(tmp_path):
    """H43, H51: readers can be pickled, and used on in a forked child."""
    db = reef.open(str(tmp_path))
    with db.writer("users") as writer:
        writer.put("k", b"v")
        reader = db.reader("users")
        assert pickle.loads(pickle.dumps(reader)).get("k") == b"v"
        assert in_child(lambda: (reader.refresh(), reader.get("k"))[1]) == (0, repr(b"v"))


class Stuck(Wrapper):
    """A store in which one thread does not get on."""

    def __init__(self, inner):
        super().__init__(inner)
        self.thread, self.reached, self.resume = None, threading.Event(), threading.Event()

    def get_tagged(self, key):
        if threading.current_thread() is self.thread:
            self.reached.set()
            assert self.resume.wait(240)
        return self.inner.get_tagged(key)


@pytest.mark.parametrize("pin", [False, True], ids=["reader", "pinned"])
def test_H51_a_reader_survives_a_fork_in_the_middle_of_anything(tmp_path, pin):
    """H51: locks that another thread held at the fork have no owner in the child."""
    db = reef.open(str(tmp_path))
    with db.writer("users") as writer:
        for number in range(10):
            writer.put(f"k{number}", b"v")
        fold(db, "users")
        db.store = stuck = Stuck(db.store)
        reader = db.reader("users", pin=True) if pin else db.reader("users")
        assert reader.get("k1") == b"v"
        scan = reader.scan()
        assert next(scan) == (b"k0", b"v")

        def hold(*locks):
            with ExitStack() as stack:
                for lock in locks:
                    stack.enter_context(lock)
                held.set()
                assert stuck.resume.wait(240)

        held = threading.Event()
        locks = [reader._row_cache._lock, reader._segments._cache._lock]
        if pin:
            locks.append(reader._turn)
            stuck.reached.set()
        else:  # a refresh that has begun, and holds its turn
            stuck.thread = threading.Thread(target=reader.refresh)
            stuck.thread.start()
        holder = threading.Thread(target=hold, args=locks)
        holder.start()
        assert stuck.reached.wait(60)
        assert held.wait(60)

        def read():
            if not pin:  # as an iterator whose object was swept
                assert reader._replan(0, NotFoundError("swept")).manifest.generation
            found = (reader.get("k1"), reader.get("k2"), len(list(reader.scan())), len(list(scan)))
            return found, in_child(lambda: reader.get("k3"))  # and its child, as well

        said = in_child(read)
        stuck.resume.set()
        holder.join()
        assert said == (0, repr(((b"v", b"v", 10, 9), (0, repr(b"v")))))
        assert reader.get("k4") == b"v"


def test_nothing_is_written_that_could_not_be_read_back(db):
    """Encoders decode their output: a header or manifest of wrong types never leaves."""
    header = WalHeader(1, WalKind.FENCE, 1, "w", 17, 0)
    with pytest.raises(msgspec.ValidationError):
        WalObject.encode(header)
    manifest = HeadFinder(db.writer("users")._committer.log._store, Namespace("users")).find()
    for wrong in ({"max_parallel_writes": 1.5}, {"dedup": (("k", 1),)}, {"write_id": None}):
        with pytest.raises(msgspec.ValidationError):
            encode_manifest(msgspec.structs.replace(manifest.manifest, **wrong))


def test_a_missing_namespace_is_not_made_by_a_reader(db):
    """Readers write nothing."""
    with pytest.raises(NotFoundError, match="no namespace users"):
        db.reader("users")
    assert objects(db) == {}


def test_a_repeated_key_with_another_batch_is_refused(db):
    """H19: a key identifies one batch, also after reopening and folding."""
    with db.writer("users") as writer:
        first = writer.put("k", b"1", idempotency_key="job-1")
        with pytest.raises(InvalidInputError, match="another batch"):
            writer.put("k", b"2", idempotency_key="job-1")
    fold(db, "users")
    with db.writer("users") as writer:
        again = writer.put("k", b"1", idempotency_key="job-1")
        assert (again.lsn, again.replayed) == (first.lsn, True)
        with pytest.raises(InvalidInputError, match="another batch"):
            writer.put("k", b"2", idempotency_key="job-1")


def test_two_keyed_batches_in_one_object(db):
    """H19: keys are per batch, not per object."""
    with db.writer("users") as writer:
        futures = [
            writer.put(f"k{n}", b"v", idempotency_key=f"job-{n}", wait=False) for n in range(20)
        ]
        lsns = [future.result(60).lsn for future in futures]
    with db.writer("users") as writer:
        again = [writer.put(f"k{n}", b"v", idempotency_key=f"job-{n}") for n in range(20)]
    assert [receipt.lsn for receipt in again] == lsns
    assert all(receipt.replayed for receipt in again)


def test_a_write_without_a_response_is_unknown_and_can_be_resolved(tmp_path):
    """The PUT lands, every response is lost: unknown, and resolve() finds it committed."""
    faults = [
        Rule(Fault.FAIL_AFTER, "create", "*/users/wal/*", skip=2),
        Rule(Fault.FAIL_BEFORE, "get", "*/users/wal/*", skip=1),
    ]
    db = reef.Database(open_store(tmp_path, faults=faults, retry=QUICK))
    writer = db.writer("users", commit_deadline_s=0.2)
    writer.put("k", b"1")
    with pytest.raises(OutcomeUnknownError) as caught:
        writer.put("k", b"2")
    assert caught.value.receipt.lsn == 3
    calm = reef.open(str(tmp_path))
    with calm.writer("users") as successor:
        assert successor.resolve(caught.value) == "committed"
        assert successor.resolve(caught.value.receipt) == "committed"
        assert successor.get("k") == b"2"


def test_resolving_what_never_left(db):
    """Another object in the slot means rejected; an open slot means unknown."""
    with db.writer("users") as writer:
        receipt = writer.put("k", b"1")
        assert writer.resolve(receipt) == "committed"
        foreign = reef.Receipt("users", receipt.lsn, 0, 1, "not-this-one", 1)
        assert writer.resolve(foreign) == "rejected"
        later = reef.Receipt("users", receipt.lsn + 5, 0, 1, "w", 1)
        assert writer.resolve(later) == "unknown"
        assert writer.resolve("no-such-key") == "unknown"
        with pytest.raises(InvalidInputError, match="takes an error, a receipt"):
            writer.resolve(17)


def test_backpressure_ends_in_an_error(tmp_path):
    """Past the bound writers wait, and past the deadline they get an error; a fold makes room."""
    db = reef.open(str(tmp_path))
    with db.writer("users", unfolded_bytes_max=2000, write_deadline_s=0.2) as writer:
        with pytest.raises(UnavailableError, match="write queue is full"):
            _fill(writer)
        fold(db, "users")
        writer.refresh()
        writer.put("room", b"again")


def test_a_fold_elsewhere_makes_room_for_a_waiting_writer(tmp_path):
    """A writer that is full polls the manifest: no process has to notify it."""
    db = reef.open(str(tmp_path))
    with db.writer("users", unfolded_bytes_max=2000, write_deadline_s=120) as writer:
        filling = threading.Thread(target=_fill, args=(writer,))
        filling.start()
        deadline = time.monotonic() + 120
        while filling.is_alive() and time.monotonic() < deadline:
            fold(reef.open(str(tmp_path)), "users")
            filling.join(0.05)
        assert not filling.is_alive()
        assert len(list(writer.scan())) == 100


def _fill(writer):
    for number in range(100):
        writer.put(f"k{number}", bytes(100))


def test_H17_a_damaged_log_stops_a_writer_and_is_reported_by_a_reader(tmp_path):
    """H17: one flipped byte: opening for writing refuses, readers serve up to it and say so."""
    db = reef.open(str(tmp_path))
    with db.writer("users") as writer:
        receipts = [writer.put(f"k{n}", b"v") for n in range(5)]
    path = tmp_path / Namespace("users").wal_object(receipts[2].lsn)
    damaged = bytearray(path.read_bytes())
    damaged[40] ^= 1
    path.write_bytes(bytes(damaged))
    with pytest.raises(CorruptionError, match=f"{receipts[2].lsn:020}"):
        db.writer("users")
    reader = db.reader("users")
    assert dict(reader.scan()).keys() == {b"k0", b"k1"}
    assert f"{receipts[2].lsn:020}" in str(reader.damage)


def test_many_threads_share_a_writer(tmp_path):
    """Group commit: 8 threads, 50 puts each, far fewer objects than puts, nothing lost."""
    always = (2.0, 2.0)  # ms: also on a quick disk, others come while one is sent
    slow = LatencyProfile(always, always, always, 1e9)
    db = reef.Database(Latency(stores.open(str(tmp_path)), slow))
    together = threading.Barrier(8)

    def write(thread):
        together.wait(60)
        for number in range(50):
            writer.put(f"{thread}-{number}", b"v")

    with db.writer("users") as writer:
        threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(list(writer.scan())) == 400
        assert writer._committer.tail.next_lsn < 300


def test_wait_for_sees_a_write(tmp_path):
    """A reader waits for an LSN, or says that it did not come."""
    db = reef.open(str(tmp_path))
    with db.writer("users") as writer, db.reader("users") as reader:
        receipt = writer.put("k", b"v")
        assert reader.wait_for(receipt.lsn, timeout_s=60)
        assert reader.get("k") == b"v"
        assert not reader.wait_for(receipt.lsn + 1, timeout_s=0.1)


# --- request budgets, design section 13 ---------------------------------------------


def metered(db_path):
    """Open a database with a request meter."""
    meter = RequestMeter()
    return reef.Database(stores.open(str(db_path), meter=meter)), meter


def test_a_commit_is_one_put(tmp_path):
    """In the steady state, and nothing else."""
    db, meter = metered(tmp_path)
    with db.writer("users") as writer:
        writer.put("warm", b"up")
        meter.reset()
        for number in range(10):
            writer.put(f"k{number}", b"v")
        assert meter.requests() == {"put": 10}


def test_opening_a_reader(tmp_path):
    """At most 2 LIST, 2 GET and one GET for each unfolded WAL object; no segment is touched."""
    db, _ = metered(tmp_path)
    with db.writer("users") as writer:
        for number in range(7):
            writer.put(f"k{number}", b"v")
        fold(db, "users")
        for number in range(5):
            writer.put(f"k{number}", b"w")
    readers, meter = metered(tmp_path)
    readers.reader("users")
    assert meter.requests() == {"list": 2, "get": 2 + 5}


def test_reading_a_segment(tmp_path):
    """First read: tail and group; then one GET for another group, none for a warm one."""
    db, _ = metered(tmp_path)
    with db.writer("users") as writer:
        writer.write(_many(2000))
        fold(db, "users", group_bytes=10_000)
    readers, meter = metered(tmp_path)
    reader = readers.reader("users", refresh_interval_ms=1e9)
    meter.reset()
    assert reader.get("k0000") == bytes(50)
    assert meter.requests() == {"get": 2}
    assert reader.get("k1999") == bytes(50)
    assert meter.requests() == {"get": 3}
    reader.get("k0001")
    assert meter.requests() == {"get": 3}
    assert reader.get("k1000x") is None
    assert meter.requests() == {"get": 3}, "a missing key costs nothing once filters are cached"


def _many(count):
    batch = reef.Batch()
    for number in range(count):
        batch.put(f"k{number:04}", bytes(50))
    return batch


def test_threads_that_read_do_not_starve_each_other(tmp_path):
    """H75: no thread does 1,000 gets before all 64 have done five; it was 1,333 against one."""
    db = reef.open(str(tmp_path))
    with db.writer("n", background=False) as writer:
        batch = reef.Batch()
        for number in range(5000):
            batch.put(f"k{number}", b"v" * 100)
        writer.write(batch)
        fold(db, "n")
    counts, barrier = [0] * 64, threading.Barrier(64)
    with db.reader("n", refresh_interval_ms=1e9, cache_bytes=1, row_cache_bytes=0) as reader:

        def read(thread):
            barrier.wait()
            while min(counts) < 5 and counts[thread] < 1000:
                reader.get(f"k{(thread * 79 + counts[thread] * 31) % 5000}")
                counts[thread] += 1

        threads = [threading.Thread(target=read, args=(number,)) for number in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert max(counts) < 1000, sorted(counts)
