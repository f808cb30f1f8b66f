"""The cost of a refresh, its caches, and the errors of folds and segments."""

import threading

import pyarrow as pa
import pytest

import reef
from reef import stores
from reef.engine.handles.reader import PROBES_MAX
from reef.errors import ConflictError, CorruptionError, NotFoundError, UnavailableError
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.wal_object import OpKind, Ops, decode_ops, encode_ops
from reef.jobs import fold
from reef.stores import Wrapper
from reef.telemetry import RequestMeter
from reef.testing import Simulation
from tests.support.bulk_jobs import make_with_window

NAME = "users"
WAL = f"namespaces/{NAME}/wal/"
SEGMENTS = f"namespaces/{NAME}/segments/"


class Hooked(Wrapper):
    """Runs something in the middle of a request for the log."""

    listing = getting = None

    def list(self, prefix="", start_after=""):
        found = list(self.inner.list(prefix, start_after))
        if self.listing and prefix == WAL:
            self.listing()
        return iter(found)

    def get_tagged(self, key):
        found = self.inner.get_tagged(key)
        if self.getting and key.startswith(WAL):
            self.getting()
        return found


class Meanwhile:
    """Does something between a fold's work and its publish."""

    def __init__(self, db, act):
        self._runtime = db.store.runtime
        self._act = act

    def map(self, task, items):
        written = list(self._runtime.map(task, items))
        self._act()
        return written


@pytest.fixture
def db():
    """Give an empty database in memory."""
    return reef.open("memory://")


def in_a_thread(act):
    """Run something in a thread of its own, to its end."""
    thread = threading.Thread(target=act)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


# --- refreshing -----------------------------------------------------------------------


def test_a_row_read_while_the_tail_is_replaced_is_not_kept(db):
    """Another thread reads the old row during the listing; afterwards all see the new one."""
    writer = db.writer(NAME)
    writer.put("a", b"old")
    fold(db, NAME)
    store = Hooked(db.store)
    reader = reef.Database(store).reader(NAME, refresh_interval_ms=1e9, list_interval_s=0)
    receipt = writer.put("a", b"new")
    fold(db, NAME)
    seen = []
    store.listing = lambda: in_a_thread(lambda: seen.append(reader.get("a")))
    assert reader.wait_for(receipt.lsn, 5)
    store.listing = None
    assert seen[0] == b"old"
    assert reader.get("a") == b"new"
    assert list(reader.scan()) == [(b"a", b"new")]


def test_a_refresh_ends_though_a_writer_is_always_ahead(db):
    """Each GET of the log lets another commit happen: some are probed, the rest are listed."""
    writer = db.writer(NAME)
    writer.put("k", b"first")
    store = Hooked(db.store)
    reader = reef.Database(store).reader(NAME, refresh_interval_ms=1e9)
    commits = []

    def commit():
        assert len(commits) < 10 * PROBES_MAX, "the refresh does not end"
        commits.append(writer.put("k", b"%d" % len(commits)))

    commit()
    store.getting = commit
    reader.refresh()
    assert len(commits) <= PROBES_MAX + 3
    assert reader.last_lsn >= commits[PROBES_MAX - 1].lsn
    store.getting = None
    reader.refresh()
    assert reader.last_lsn == commits[-1].lsn
    assert reader.get("k") == b"%d" % (len(commits) - 1)


def metered(path):
    """Open a database with a request meter."""
    meter = RequestMeter()
    return reef.Database(stores.open(str(path), meter=meter)), meter


@pytest.mark.parametrize("folded", [False, True])
def test_a_listing_refresh_reads_only_new_objects(tmp_path, folded):
    """50 objects are not folded: an idle reader lists twice, and does not read them again."""
    db, _ = metered(tmp_path)
    writer = db.writer(NAME)
    for number in range(50):
        writer.put(f"k{number}", b"v")
    readers, meter = metered(tmp_path)
    reader = readers.reader(NAME, refresh_interval_ms=1e9, list_interval_s=0)
    if folded:
        fold(db, NAME)
    meter.reset()
    reader.refresh()
    assert meter.requests() == {"list": 2, "get": 2}
    assert readers.metrics.to_dict()["refresh.requests"]["max"] == 4
    receipt = writer.put("k0", b"new")
    meter.reset()
    reader.refresh()
    assert meter.requests() == {"list": 2, "get": 3}
    assert (reader.last_lsn, reader.get("k0"), reader.get("k1")) == (receipt.lsn, b"new", b"v")


def test_a_listing_refresh_starts_again_where_the_log_was_folded_past_it(db):
    """H47: what comes next is folded, and its objects are gone."""
    writer = db.writer(NAME)
    writer.put("a", b"1")
    reader = db.reader(NAME, refresh_interval_ms=1e9, list_interval_s=0)
    receipt = writer.put("a", b"2")
    fold(db, NAME)
    for info in list(db.store.list(WAL)):
        db.store.delete(info.key)
    reader.refresh()
    assert reader.get("a") == b"2"
    assert reader.last_lsn == receipt.lsn


def test_H47_a_failed_probe_proves_nothing():
    """H47: after a pause the store is away at first; the next probe lists all the same."""
    sim = Simulation(0)
    stores.agree_on_cas(sim.bucket)
    node = sim.process("sleeper")
    db = reef.Database(sim.bucket)
    db.writer(NAME).put("k", b"v")
    asked = []

    class Away(Wrapper):
        away = False

        def list(self, prefix="", start_after=""):
            asked.append(prefix)
            if self.away:
                raise UnavailableError("away")
            return self.inner.list(prefix, start_after)

    def sleep():
        store = Away(node.store())
        reader = reef.Database(store).reader(NAME, list_interval_s=1e9)
        node.runtime.sleep(7 * 24 * 3600)
        store.away = True
        with pytest.raises(UnavailableError):
            reader.refresh()
        store.away = False
        asked.clear()
        reader.refresh()

    node.spawn(sleep)
    sim.run()
    sim.close()
    assert WAL in asked, "it did not go by probes"


# --- damage ---------------------------------------------------------------------------


@pytest.mark.parametrize("left", [0, 100, -1])
@pytest.mark.parametrize("read", ["get", "scan", "get_many"])
def test_a_truncated_segment_is_damage(db, left, read):
    """It is not the caller's range that is wrong; object and offset are reported."""
    batch = reef.Batch()
    for number in range(1000):
        batch.put(f"k{number:04}", b"v" * 50)
    db.writer(NAME).write(batch)
    fold(db, NAME, codec="none")
    (info,) = db.store.list(SEGMENTS)
    whole = db.store.get(info.key)
    warm = db.reader(NAME)
    assert warm.get("k0000"), "knows the tail"
    db.store.put(info.key, whole[:left])
    reads = {
        "get": lambda reader: reader.get("k0999"),
        "scan": lambda reader: list(reader.scan()),
        "get_many": lambda reader: reader.get_many(["k0999"]),
    }
    for reader in (db.reader(NAME), warm) if left >= 0 else (db.reader(NAME),):
        with pytest.raises(CorruptionError) as caught:
            reads[read](reader)
        assert caught.value.context["object"] == info.key
        assert caught.value.context["offset"] >= 0
    db.store.delete(info.key)
    with pytest.raises(CorruptionError, match="needs it") as caught:
        reads[read](db.reader(NAME))
    assert isinstance(caught.value.__cause__, NotFoundError)


def ops(kinds, end_keys=None):
    """Return the record of a batch with these kinds."""
    keys = pa.array([b"a", b"b"], pa.binary())
    return encode_ops(Ops(keys, pa.array(kinds, pa.uint8()), end_keys))


@pytest.mark.parametrize(
    "record",
    [
        ops([None, OpKind.PUT]),
        ops([None, None]),
        ops([OpKind.PUT, OpKind.DELETE_RANGE]),
        ops([OpKind.PATCH, OpKind.DELETE_RANGE]),
        ops([OpKind.PUT, OpKind.DELETE_RANGE], pa.array([b"c", None], pa.binary())),
    ],
    ids=["null kind", "null kinds", "no ends", "no ends next to a patch", "null end"],
)
def test_operations_that_say_nothing_are_damage(record):
    """A kind that is null, or a range without an end."""
    with pytest.raises(CorruptionError) as caught:
        decode_ops(record, DEFAULT_SCHEMA, "an object", 17)
    assert caught.value.context == {"object": "an object", "offset": 17}


def test_operations_without_an_end_key_are_valid():
    """Only ranges have one."""
    assert len(decode_ops(ops([OpKind.PUT, OpKind.PATCH]), DEFAULT_SCHEMA, "x")) == 2
    ends = pa.array([None, b"c"], pa.binary())
    assert len(decode_ops(ops([OpKind.PUT, OpKind.DELETE_RANGE], ends), DEFAULT_SCHEMA, "x")) == 2


# --- folding --------------------------------------------------------------------------


@pytest.mark.parametrize("fast", ["folder", "writer"])
def test_H30_a_clock_that_runs_ahead_does_not_empty_the_window(fast):
    """H30: one machine's clock is a day ahead; a keyed batch is still known after the fold."""
    sim = Simulation(0)
    stores.agree_on_cas(sim.bucket)
    skews = {name: 25 * 3600 if name == fast else 0 for name in ("folder", "writer")}
    folder, other = (sim.process(name, skew_s=skew) for name, skew in skews.items())
    results = []

    def play():
        calm = reef.Database(sim.process("calm").store())
        with calm.writer(NAME) as first:
            first.put("n", b"1", idempotency_key="key")
        with reef.Database(other.store()).writer(NAME) as second:
            second.put("n", b"2")
        fold(reef.Database(folder.store()), NAME)
        with calm.writer(NAME) as third:
            results.append(third.put("n", b"1", idempotency_key="key").replayed)
            results.append(third.get("n"))

    sim.process("main").spawn(play)
    sim.run()
    sim.close()
    assert results == [True, b"2"]


def test_keys_leave_the_window_as_others_come(db):
    """By their number alone: no clock has a say in it."""
    make_with_window(db, NAME, 1)
    writer = db.writer(NAME)
    writer.put("a", b"1", idempotency_key="old")
    writer.put("b", b"1", idempotency_key="new")
    fold(db, NAME)
    with db.writer(NAME) as successor:
        assert successor.resolve("new") == "committed"
        assert successor.put("a", b"2", idempotency_key="old").replayed is False


def test_a_fold_whose_segments_are_gone_says_so(db):
    """Staged, and not there at the publish: only its own work is lost, and it can run again."""
    db.writer(NAME).put("a", b"1")

    def sweep():
        for info in list(db.store.list(SEGMENTS)):
            db.store.delete(info.key)

    with pytest.raises(ConflictError, match="deleted the segments of this fold"):
        fold(db, NAME, executor=Meanwhile(db, sweep))
    assert fold(db, NAME).published
    assert db.reader(NAME).get("a") == b"1"


def test_a_fold_that_lost_did_not_publish(db):
    """A rival folded the same slots in between; the loser's report says so."""
    db.writer(NAME).put("a", b"1")
    rivals = []
    lost = fold(db, NAME, executor=Meanwhile(db, lambda: rivals.append(fold(db, NAME))))
    assert [rival.published for rival in rivals] == [True]
    assert lost.published is False
    assert fold(db, NAME).published is False, "there was nothing to do"
