"""Views of past states: every LSN, every kept generation, times, and leases that hold them."""

import pickle
import threading
from datetime import UTC, datetime, timedelta, timezone

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reef
from reef import stores
from reef.jobs import fold
from reef.stores import Wrapper
from reef.stores import leases as leases_module
from reef.telemetry import RequestMeter
from tests.support.bulk_jobs import ingest
from tests.support.child_process import in_child
from tests.support.sweep_world import GRACE_S, NAME, USERS, World
from tests.unit.engine.model import LAST, few, keys, values


@pytest.fixture
def db():
    """Give an empty database in memory."""
    return reef.open("memory://")


@pytest.fixture
def world():
    """Give a namespace on virtual time, with three rows, two of them folded."""
    world = World()
    with world.db.writer(NAME) as writer:
        writer.put("a", b"1")
        writer.put("b", b"2")
        world.fold()
        writer.put("c", b"3")
    return world


def instant(world):
    """Return the time in the simulation, as a user has it."""
    return datetime.fromtimestamp(world.bucket.now(), UTC)


# --- LSNs -----------------------------------------------------------------------------


class FillsOpenSlot(Wrapper):
    """Does something once, right after a read has found a slot open."""

    does = None

    def get_tagged(self, key):
        try:
            return self.inner.get_tagged(key)
        except reef.NotFoundError:
            does, self.does = self.does, None if "/wal/" in key else self.does
            if does is not None and "/wal/" in key:
                does()
            raise


def test_H16_an_lsn_that_is_written_and_folded_while_it_is_asked_for_is_not_damage(world):
    """The slot was open when it was read, and folded when the head was read: nothing is missing.
    Root: an old read of a slot was classified by a newer head. Found by the simulator
    (hardly_any_grace with lives, seed 23)."""
    store = FillsOpenSlot(world.bucket)
    last = world.db.reader(NAME).last_lsn

    def write_and_fold():
        with world.db.writer(NAME) as writer:
            writer.put("d", b"4")
        world.fold()

    store.does = write_and_fold
    with reef.Database(store).reader(NAME, as_of={"lsn": last + 1}) as reader:
        assert reader.last_lsn == last + 1
        assert dict(reader.scan()) == {b"a": b"1", b"b": b"2", b"c": b"3"}


steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), keys, values),
        st.tuples(st.just("delete"), keys),
        st.tuples(st.just("delete_range"), keys),
        st.tuples(st.just("ingest"), keys, values),
        st.tuples(st.just("fold")),
        st.tuples(st.just("reopen")),
        st.tuples(st.just("snapshot")),
    ),
    max_size=25,
)


@few
@given(steps)
def test_every_lsn_reads_as_it_was(taken):
    """Whatever folds, loads and new writers came since: a dict that was kept at each LSN."""
    db = reef.open("memory://")
    writer, rows, history, pinned = db.writer(NAME), {}, {0: {}, 1: {}}, []
    for step, *args in taken:
        if step == "put":
            lsn, rows = writer.put(*args).lsn, {**rows, args[0]: args[1]}
        elif step == "delete":
            lsn = writer.delete(*args).lsn
            rows = {key: value for key, value in rows.items() if key != args[0]}
        elif step == "delete_range":
            lsn = writer.delete_range(args[0], LAST).lsn
            rows = {key: value for key, value in rows.items() if key < args[0]}
        elif step == "ingest":
            lsn = ingest(db.store, NAME, {args[0]: args[1]})
            history[lsn - 1], rows = rows, {**rows, args[0]: args[1]}
        elif step == "fold":
            fold(db, NAME)
            continue
        elif step == "snapshot":
            pinned.append((db.snapshot(NAME), rows))
            continue
        else:
            writer = db.writer(NAME)
            lsn = max(history) + 1
        history[lsn] = rows
    reader = db.reader(NAME)
    for lsn, expected in history.items():
        view = reader.as_of(lsn=lsn)
        assert (dict(view.scan()), view.last_lsn) == (expected, lsn)
    for snapshot, expected in pinned:
        assert dict(reader.as_of(generation=snapshot.generation).scan()) == expected
        with db.reader(NAME, snapshot=snapshot) as view:
            assert dict(view.scan()) == expected


def test_an_old_lsn_costs_little():
    """A hundred folds: the right generation is found by halving, not by reading all."""
    meter = RequestMeter()
    db = reef.Database(stores.open("memory://", meter=meter))
    with db.writer(NAME) as writer:
        for number in range(100):
            writer.put("k", b"%d" % number)
            fold(db, NAME)
    reader = db.reader(NAME)
    meter.reset()
    view = reader.as_of(lsn=40)
    assert meter.requests()["list"] == 2
    assert meter.requests()["get"] <= 12
    assert view.get("k") == b"38"


def test_an_lsn_that_is_not_there_yet(db):
    """It is not taken for one that was collected."""
    db.writer(NAME).put("k", b"v")
    with pytest.raises(reef.NotFoundError, match="LSN 3 is not in the log") as caught:
        db.reader(NAME).as_of(lsn=9)
    assert caught.value.kind == "not_found"
    assert caught.value.context["lsn"] == 3


def test_a_collected_lsn_is_named(world):
    """Its log was folded and swept, and no generation from before is kept."""
    world.fold()
    world.sweep_twice()
    with pytest.raises(reef.NotFoundError, match="LSN 3 of users was garbage-collected") as caught:
        world.db.reader(NAME).as_of(lsn=2)
    assert caught.value.kind == "collected"


# --- generations ----------------------------------------------------------------------


def test_a_generation_ends_where_it_had_seen_the_log(world):
    """Rows that were written after the fold are not in the fold's generation."""
    head = world.head()
    view = world.db.reader(NAME).as_of(generation=head.generation)
    assert dict(view.scan()) == {b"a": b"1", b"b": b"2"}
    assert (view.generation, view.last_lsn) == (head.generation, head.wal_floor - 1)


def test_generations_that_cannot_be_read(world):
    """One that is not there yet, and one that is not kept any more."""
    head = world.head()
    reader = world.db.reader(NAME)
    with pytest.raises(reef.NotFoundError, match="no generation 99 yet") as caught:
        reader.as_of(generation=99)
    assert caught.value.kind == "not_found"
    world.sweep()
    with pytest.raises(reef.NotFoundError, match="was garbage-collected") as caught:
        reader.as_of(generation=head.generation - 1)
    assert caught.value.kind == "collected"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({}, "one of generation=, lsn= and time="),
        ({"generation": 1, "lsn": 1}, "one of"),
        ({"generation": 0}, "at least 1"),
        ({"generation": True}, "at least 1"),
        ({"lsn": -1}, "at least 0"),
        ({"lsn": "1"}, "at least 0"),
        ({"time": "today"}, "not a time"),
        ({"time": datetime(2026, 1, 1)}, "no time zone"),
    ],
    ids=str,
)
def test_bad_points_in_time(db, words, says):
    """Each error names the expected value."""
    db.create(NAME)
    with pytest.raises(reef.InvalidInputError, match=says):
        db.reader(NAME).as_of(**words)


def test_the_forms_of_a_point_in_time(db):
    """A generation, a time, an AsOf or a dict."""
    with db.writer(NAME) as writer:
        writer.put("k", b"1")
    fold(db, NAME)
    now = datetime.now(UTC) + timedelta(seconds=1)
    elsewhere = now.astimezone(timezone(timedelta(hours=5)))
    for as_of in (3, now, elsewhere, {"lsn": 2}, reef.AsOf(lsn=2), reef.AsOf(generation=3)):
        with db.reader(NAME, as_of=as_of) as view:
            assert view.get("k") == b"1"
            assert view.pinned
    with pytest.raises(reef.InvalidInputError, match="one of"):
        db.reader(NAME, as_of={"LSN": 2})
    with pytest.raises(reef.InvalidInputError, match="both name a point in time"):
        db.reader(NAME, as_of=3, snapshot="s")


def test_a_view_reads_with_the_schema_of_its_generation(db):
    """A column that came later is not there, and the other has the type that it had."""
    before = pa.schema([("id", pa.string()), ("n", pa.int32())])
    after = pa.schema([("id", pa.string()), ("n", pa.int64()), ("more", pa.string())])
    db.create("events", before)
    with db.writer("events") as writer:
        writer.upsert([{"id": "e", "n": 1}])
        snapshot = db.snapshot("events")
        db.alter("events", after)
        writer.refresh()
        writer.upsert([{"id": "e", "n": 2, "more": "x"}])
    fold(db, "events")
    with db.reader("events", snapshot=snapshot) as view:
        assert view.get("e") == {"id": "e", "n": 1}
        assert view.schema == before
    reader = db.reader("events")
    assert reader.as_of(lsn=2).get("e") == {"id": "e", "n": 1, "more": None}
    assert reader.as_of(lsn=3).get("e") == {"id": "e", "n": 2, "more": "x"}


def test_rows_expire_by_the_readers_clock():
    """A row that existed at that time, and has expired since, is gone."""
    world = World()
    with world.db.writer(NAME) as writer:
        writer.put("k", b"v", ttl_s=60)
    with world.db.reader(NAME, as_of=reef.AsOf(lsn=2), lease_ttl_s=1000) as view:
        assert view.get("k") == b"v"
        world.advance(61)
        assert view.get("k") is None
        assert list(view.scan()) == []


# --- times ----------------------------------------------------------------------------


def test_a_time_is_that_of_the_objects():
    """Up to the first object that was made after it, folded or not."""
    world, times = World(), []
    writer = world.db.writer(NAME)
    for number in range(8):
        world.advance(10)
        writer.put("k", b"%d" % number)
        times.append(instant(world))
        if number % 3 == 2:
            world.fold()
    reader = world.db.reader(NAME)
    for number, time in enumerate(times):
        assert reader.as_of(time=time).get("k") == b"%d" % number
        just_before = reader.as_of(time=time - timedelta(milliseconds=1))
        assert just_before.get("k") == (b"%d" % (number - 1) if number else None)
    assert reader.as_of(time=times[-1] + timedelta(days=1)).last_lsn == reader.last_lsn


def test_a_time_that_is_not_kept(world):
    """From before the oldest generation that is."""
    early = instant(world) - timedelta(days=1)
    world.fold()
    world.sweep_twice()
    with pytest.raises(reef.NotFoundError, match="was garbage-collected") as caught:
        world.db.reader(NAME).as_of(time=early)
    assert caught.value.kind == "collected"


# --- leases ---------------------------------------------------------------------------


def test_a_pinned_view_holds_a_lease_until_it_is_closed(world):
    """Folds, compactions and sweeps take nothing from it; and everything after it."""
    view = world.db.reader(NAME, pin=True)
    assert len(world.keys("leases")) == 1
    with world.db.writer(NAME) as writer:
        writer.delete("a")
    world.fold()
    (old, *_) = [entry.id for entry in view._tail.manifest.segments]
    world.compact()
    world.advance(GRACE_S + 10)
    world.sweep_twice()
    assert world.bucket.head(USERS.segment(old))
    assert dict(view.scan()) == {b"a": b"1", b"b": b"2", b"c": b"3"}
    view.close()
    view.close()
    assert world.keys("leases") == []
    world.advance(GRACE_S + 10)
    world.sweep_twice()
    with pytest.raises(reef.NotFoundError):
        world.bucket.head(USERS.segment(old))
    with pytest.raises(reef.ClosedError):
        view.get("a")


def test_a_view_without_a_lease_says_what_became_of_it(world):
    """It reads while it can, and never mixes in rows of another snapshot."""
    view = world.db.reader(NAME).as_of(generation=world.head().generation)
    assert not view.pinned
    assert world.keys("leases") == []
    world.compact()
    world.advance(GRACE_S + 10)
    world.sweep_twice()
    with pytest.raises(reef.NotFoundError, match="was garbage-collected") as caught:
        view.get("a")
    assert caught.value.kind == "collected"
    with pytest.raises(reef.NotFoundError, match="was garbage-collected"):
        list(view.scan())


def test_a_lease_is_kept_alive_in_the_background(world):
    """For a reader that is busy with something else for an hour."""
    view = world.db.reader(NAME, pin=True)
    for _ in range(60):
        world.advance(60)
        assert world.sweep().leases_reaped == 0
    assert view.get("a") == b"1"
    view.close()


def test_pins_share_one_thread(db):
    """H75: 5 and 50 pinned readers of a database have one thread; it was one for each."""
    with db.writer(NAME, background=False) as writer:
        writer.put("a", b"1")
    before = set(threading.enumerate())  # threads of handles that earlier tests left open
    for count in (5, 50):
        views = [db.reader(NAME, pin=True) for _ in range(count)]
        started = set(threading.enumerate()) - before
        leases = [thread for thread in started if "lease" in thread.name]
        assert len(leases) == 1
        assert views[-1].get("a") == b"1"
        for view in views:
            view.close()
        leases[0].join(60)
        assert not leases[0].is_alive(), "it ends with the last of them"


def test_the_lease_of_an_unreferenced_handle_expires(world):
    """Forgotten without being closed, it is not kept alive for ever."""
    view = world.db.reader(NAME, pin=True)
    del view
    world.advance(200)
    assert world.sweep().leases_reaped == 1


def test_a_reaped_lease_ends_the_view(world):
    """The next use says so, instead of reading on; so does an open scan, with its next piece."""
    with world.db.writer(NAME) as writer:
        for part in range(4):
            writer.upsert(
                {"id": [b"%d%05d" % (part, n) for n in range(20_000)], "value": [b"v"] * 20_000}
            )
    fold(world.db, NAME, group_bytes=4096)
    view = world.db.reader(NAME, pin=True)
    scan = view.scan()
    next(scan)
    for key in world.keys("leases"):
        world.bucket.delete(f"{USERS.leases}{key}")
    world.advance(30)
    for _ in range(2):
        with pytest.raises(reef.ConflictError, match="was reaped"):
            view.get("a")
    with pytest.raises(reef.ConflictError, match="was reaped"):
        list(view.scan())
    with pytest.raises(reef.ConflictError, match="was reaped"):
        list(scan)
    view.close()


def test_a_store_that_is_away_for_a_while_costs_no_lease(world, monkeypatch):
    """A renewal may fail as long as there is time for another one, and not longer."""
    view = world.db.reader(NAME, pin=True)
    assert view.get("a") == b"1"
    replace = world.bucket.replace

    def away(*_):
        raise reef.UnavailableError("away")

    monkeypatch.setattr(world.bucket, "replace", away)
    world.advance(45)
    assert view.get("a") == b"1"
    monkeypatch.setattr(world.bucket, "replace", replace)
    world.advance(45)
    assert view.get("a") == b"1"
    monkeypatch.setattr(world.bucket, "replace", away)
    world.advance(90)
    with pytest.raises(reef.ConflictError, match="expired: away"):
        view.get("a")
    view.close()


def test_a_lease_is_kept_alive_while_the_log_is_read(db):
    """Opening may take longer than a lease lasts."""

    class Slow(stores.Wrapper):
        def get_tagged(self, key):
            if "/wal/" in key:
                self.runtime.sleep(2.5)
            return self.inner.get_tagged(key)

    with db.writer(NAME) as writer:
        writer.put("a", b"1")
    view = reef.Database(Slow(db.store)).reader(NAME, pin=True, lease_ttl_s=2.0)
    assert view.get("a") == b"1"
    view.close()


def test_opening_a_view_that_is_refused_leaves_no_lease(world):
    """Whatever goes wrong on the way."""
    for as_of in (99, reef.AsOf(lsn=99)):
        with pytest.raises(reef.NotFoundError):
            world.db.reader(NAME, as_of=as_of)
    assert world.keys("leases") == []


def test_H48_a_time_before_a_drop_is_not_searched_in_the_next_incarnation(world):
    """H48, H65: the new one was not there yet; rows of the dropped one are read in no other."""
    before = instant(world)
    world.advance(60)
    world.db.drop(NAME)
    world.advance(60)
    world.db.create(NAME)
    world.advance(60)
    between = instant(world)
    world.advance(60)
    with world.db.writer(NAME) as writer:
        writer.put("z", b"9")
    reader = world.db.reader(NAME)
    with pytest.raises(reef.NotFoundError, match="created again") as caught:
        reader.as_of(time=before)
    assert caught.value.kind == "collected"
    assert dict(reader.as_of(time=between).scan()) == {}
    assert dict(reader.as_of(time=instant(world)).scan()) == {b"z": b"9"}


# --- other processes ------------------------------------------------------------------


def test_a_pickled_view_takes_a_lease_of_its_own(tmp_path):
    """The same rows, whatever came since; or an error that they were collected."""
    db = reef.open(str(tmp_path))
    writer = db.writer(NAME)
    writer.put("k", b"1")
    view = db.reader(NAME, pin=True)
    data = pickle.dumps(view)
    writer.put("k", b"2")
    fold(db, NAME)
    code, output = in_child(lambda: (pickle.loads(data).get("k"), len(leases(db))))
    assert (code, output) == (0, "(b'1', 2)")
    view.close()


def leases(db):
    """Return the leases there are."""
    return list(db.store.list(USERS.leases))


def test_a_pickled_view_of_a_point_in_time_that_was_collected(world):
    """It is refused in the new process, in the words of a reader."""
    view = world.db.reader(NAME, pin=True)
    reopen, args = view.__reduce__()
    view.close()
    world.fold()
    world.sweep()
    with pytest.raises(reef.NotFoundError, match="was garbage-collected") as caught:
        reopen(*args)
    assert caught.value.kind == "collected"


def test_H51_a_forked_view_takes_a_lease_of_its_own(tmp_path):
    """H51: it reads in the child without the parent's lock or helper, and releases only its own."""
    db = reef.open(str(tmp_path))
    db.writer(NAME).put("k", b"1")
    view = db.reader(NAME, pin=True)

    def use():
        seen = view.get("k"), len(leases(db))
        view.close()
        return seen, len(leases(db))

    with view._turn, view._held._turn:  # another thread is at work in the parent
        assert in_child(use) == (0, "((b'1', 2), 1)")
        assert in_child(lambda: (view.close(), len(leases(db)))) == (0, "(None, 1)")
    assert view.get("k") == b"1"
    view.close()
    assert leases(db) == []


def test_H51_a_reader_that_is_forked_at_work_starts_again(tmp_path):
    """H51: its lock has no owner in the child, and a half-loaded cursor stays half loaded."""
    db = reef.open(str(tmp_path))
    writer = db.writer(NAME)
    writer.put("k", b"1")
    reader = db.reader(NAME, refresh_interval_ms=0)
    assert reader.get("k") == b"1"
    writer.put("k", b"2")
    reader._tail.rules.advance(reader._log.read(reader._tail.next_lsn).header)
    with reader._turn:
        assert in_child(lambda: (reader.get("k"), reader.last_lsn)) == (0, "(b'2', 3)")


def test_threads_share_a_view(db, monkeypatch):
    """Many readers of one handle, while its lease is renewed under them."""
    # Every 10 ms: often, but a stall of the machine does not end the lease.
    monkeypatch.setattr(leases_module, "RENEW_AFTER", 1 / 6000)
    monkeypatch.setattr(leases_module, "POLLS", 12_000)
    with db.writer(NAME) as writer:
        for number in range(50):
            writer.put(f"k{number}", b"v")
    view = db.reader(NAME, pin=True, lease_ttl_s=60.0)
    seen = []

    def read():
        for _ in range(30):
            seen.append(len(dict(view.scan())))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    view.close()
    assert seen == [50] * 120
