"""H23, H24, H43, H51: two-phase stores after deaths, with other processes, and under sweeps."""

import multiprocessing
import pickle
from contextlib import contextmanager
from urllib.parse import quote

import pyarrow as pa
import pytest

import reef
from reef import stores
from reef.catalog import Catalog
from reef.errors import ErrorKind, InvalidInputError, UnavailableError
from reef.stores import Outcome, Wrapper
from reef.stores.local import LocalStore
from reef.stores.two_phase import Register, TwoPhase, find_two_phase, recover
from reef.stores.two_phase.register import SqliteRegister, is_temporary, new_record
from tests.simulation.two_phase_register import TwoPhaseSimulation
from tests.support.child_process import in_child
from tests.support.registers import register_url
from tests.support.sweep_world import DAY_S, GRACE_S, NAME, USERS, World

STEPS = ("put", "insert", "copy", "commit", "delete")


class Died(BaseException):
    """The process is gone: nothing that it would do next is done."""


class DyingStore(Wrapper):
    """Dies right before or right after a step."""

    def __init__(self, inner, step, *, after):
        super().__init__(inner)
        self._step, self._after = step, after

    def put(self, key, body):
        return self.die_at("put", lambda: self.inner.put(key, body))

    def copy(self, source, target):
        return self.die_at("copy", lambda: self.inner.copy(source, target))

    def delete_many(self, keys):
        return self.die_at("delete", lambda: self.inner.delete_many(keys))

    def die_at(self, step, call):
        if step != self._step:
            return call()
        if self._after:
            call()
        raise Died(step)


class DyingRegister(Register):
    """The same for its statements."""

    def __init__(self, inner, store):
        self.inner, self._store, self.scope = inner, store, inner.scope

    @property
    def name(self):
        return self.inner.name

    def insert(self, record):
        return self._store.die_at("insert", lambda: self.inner.insert(record))

    def commit(self, record):
        self.inner.commit(record)

    def incarnation(self):
        return self.inner.incarnation()

    def holding(self, destination):
        return self.inner.holding(destination)

    def commit_in(self, record, incarnation):
        return self._store.die_at("commit", lambda: self.inner.commit_in(record, incarnation))

    def read(self, destinations):
        return self.inner.read(destinations)

    def delete(self, records):
        self.inner.delete(records)

    def page(self, prefix, start_after, *, unfinished):
        return self.inner.page(prefix, start_after, unfinished=unfinished)


def parts_of(tmp_path):
    """Return a bucket in a directory, and a register for it, as any process opens them."""
    bucket = LocalStore(str(tmp_path / "bucket"))
    return bucket, SqliteRegister(str(tmp_path / "register.db"), bucket.url)


@pytest.mark.parametrize("recoveries", [0, 1, 2])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_H23_a_death_at_each_step(tmp_path, step, after, recoveries):
    """H23: before the insert it never was; from the insert on it is there for good."""
    bucket, register = parts_of(tmp_path)
    dying = DyingStore(bucket, step, after=after)
    with pytest.raises(Died):
        TwoPhase(dying, DyingRegister(register, dying)).create("wal/1", b"first")

    bucket, register = parts_of(tmp_path)
    store = TwoPhase(bucket, register)
    for _ in range(recoveries):
        assert not recover(store).stuck
    is_durable = STEPS.index(step) >= (1 if after else 2)
    result = store.create("wal/1", b"second")
    assert result.outcome is (Outcome.EXISTS if is_durable else Outcome.CREATED)
    assert bucket.get("wal/1") == (b"first" if is_durable else b"second")
    assert not recover(store).stuck
    assert register.read_one("wal/1").committed


# --- the engine -------------------------------------------------------------------------


def options_of(tmp_path):
    """Return the options that its writers share."""
    return {"cas": f"sqlite:///{tmp_path}/register.db"}


def filled(tmp_path):
    """Return the URL of a bucket with some rows, written with a register."""
    url = str(tmp_path / "bucket")
    db = reef.open(url, **options_of(tmp_path))
    with db.writer(NAME, background=False) as writer:
        for number in range(3):
            writer.put(f"k{number}", b"v%d" % number)
    return url


def test_H23_readers_need_no_register(tmp_path):
    """H23: acknowledged objects are there for a reader that knows the bucket alone."""
    url = filled(tmp_path)
    bucket, register = parts_of(tmp_path)
    source = new_record(bucket.runtime, USERS.wal_object(99), b"left by a death").source
    bucket.put(source, b"left by a death")
    db = reef.open(url)
    assert dict(db.reader(NAME).scan()) == {b"k0": b"v0", b"k1": b"v1", b"k2": b"v2"}
    assert not reef.jobs.verify(db, NAME, deep=True).problems
    assert NAME in db.namespaces()
    register_file = tmp_path / "register.db"
    assert register.name.startswith("sqlite-")
    register_file.rename(tmp_path / "away.db")
    assert len(list(reef.open(url, **options_of(tmp_path)).reader(NAME).scan())) == 3


@pytest.mark.parametrize("cas", [None, "sqlite:///{}/another.db"])
def test_H23_all_writers_share_one_register(tmp_path, cas):
    """H23: who comes without it, with another one, or with a new one in its place, is refused."""
    url = filled(tmp_path)
    with pytest.raises(InvalidInputError) as caught:
        reef.open(url, cas=cas and cas.format(tmp_path)).writer(NAME)
    assert caught.value.kind is ErrorKind.OTHER_CAS
    (tmp_path / "register.db").rename(tmp_path / "lost.db")
    for name in ("register.db-wal", "register.db-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    with pytest.raises(InvalidInputError) as caught:
        reef.open(url, **options_of(tmp_path)).writer(NAME)
    assert caught.value.kind is ErrorKind.OTHER_CAS


WRITING = {
    "fold": lambda db: reef.jobs.fold(db, NAME),
    "compact": lambda db: reef.jobs.compact(db, NAME, full=True),
    "sweep": lambda db: reef.jobs.sweep(db, NAME, apply=True),
    "repair": lambda db: reef.jobs.repair(db, NAME, apply=True),
    "rebuild": lambda db: reef.jobs.rebuild(db, NAME, apply=True, force=True),
    "alter": lambda db: db.alter(NAME, pa.schema([("id", pa.binary()), ("value", pa.binary())])),
    "create": lambda db: db.create("another"),
    "drop": lambda db: db.drop(NAME),
    "cursor": lambda db: db.cursor(NAME, "reading"),
    "drop_cursor": lambda db: db.drop_cursor(NAME, "reading"),
    "snapshot": lambda db: db.snapshot(NAME),
    "release": lambda db: db.snapshots(NAME)[0].release(),
    "extend": lambda db: db.snapshots(NAME)[0].extend(None),
}


def test_H23_publishing_needs_the_register(tmp_path):
    """H4, H23: a job without it would publish by a condition that the others do not keep to."""
    url = filled(tmp_path)
    reef.open(url, **options_of(tmp_path)).snapshot(NAME, ttl_s=None)
    before = {info.key: info.tag for info in LocalStore(url).list()}
    kinds = {}
    for how, write in WRITING.items():
        try:
            write(reef.open(url))
        except InvalidInputError as error:
            kinds[how] = error.kind
    assert kinds == dict.fromkeys(WRITING, ErrorKind.OTHER_CAS)
    assert {info.key: info.tag for info in LocalStore(url).list()} == before


@pytest.mark.parametrize("reads_first", [False, True])
def test_H23_a_catalog_is_not_written_without_its_register(tmp_path, reads_first):
    """H23: not by one who has read it either; reading needs no register."""
    url = str(tmp_path / "bucket")
    Catalog(stores.open(url, **options_of(tmp_path))).transact(lambda s: s.put("k", b"v"))
    stranger = Catalog(stores.open(url))
    if reads_first:
        assert stranger.get_latest("k") == b"v"
    with pytest.raises(InvalidInputError) as caught:
        stranger.transact(lambda s: s.put("k", b"w"))
    assert caught.value.kind is ErrorKind.OTHER_CAS
    assert stranger.get_latest("k") == b"v"


@pytest.mark.parametrize("below", ["", "/catalog"])
def test_H23_a_catalog_without_a_register_is_not_read_with_one(tmp_path, below):
    """H23: its head has another form, and would not be found: an error, not an empty bucket.

    Seen from its own root, which has no verdict, it is the same; and the register is not asked.
    """
    url = str(tmp_path / "bucket")
    Catalog(stores.open(url), prefix="catalog").transact(lambda s: s.put("k", b"v"))
    silent = f"sqlite:///{tmp_path}/none/register.db"
    with pytest.raises(InvalidInputError) as caught:
        Catalog(stores.open(url + below, cas=silent), prefix="" if below else "catalog").get_latest(
            "k"
        )
    assert caught.value.kind is ErrorKind.OTHER_CAS


def test_H23_reading_a_catalog_asks_no_register(tmp_path):
    """H23: not from its own root either, where the form of its head identifies it."""
    url = str(tmp_path / "bucket")
    Catalog(stores.open(url, **options_of(tmp_path)), prefix="catalog").transact(
        lambda s: s.put("k", b"v")
    )
    silent = f"sqlite:///{tmp_path}/none/register.db"
    for store, prefix in ((url, "catalog"), (f"{url}/catalog", "")):
        assert Catalog(stores.open(store, cas=silent), prefix=prefix).get_latest("k") == b"v"


def test_H23_one_bucket_at_two_paths_wants_one_scope(tmp_path):
    """H23: records are kept by URL; who sees the bucket elsewhere is refused, or says the scope."""
    url = filled(tmp_path)
    (tmp_path / "mounted").symlink_to(tmp_path / "bucket")
    register = options_of(tmp_path)["cas"]
    with pytest.raises(InvalidInputError) as caught:
        reef.open(str(tmp_path / "mounted"), cas=register).writer(NAME)
    assert caught.value.kind is ErrorKind.OTHER_CAS
    scope = quote(stores.open(url).url, safe="")
    db = reef.open(str(tmp_path / "mounted"), cas=f"{register}?scope={scope}")
    with db.writer(NAME, background=False) as writer:
        assert writer.get("k0") == b"v0"


def undo_copy(tmp_path, key):
    """Bring an object back to where its writer would have left it by dying after the insert."""
    bucket, register = parts_of(tmp_path)
    record = register.read_one(key)
    bucket.put(record.source, bucket.get(key))
    bucket.delete(key)
    register.delete([record])
    register.insert(record)


@pytest.mark.parametrize("which", ["wal", "manifest"])
def test_H23_opening_for_writing_recovers(tmp_path, which):
    """H23: a commit or manifest that a writer had inserted when it died counts from then on."""
    url = filled(tmp_path)
    bucket, register = parts_of(tmp_path)
    last = max(info.key for info in bucket.list(f"{USERS.root}/{which}/"))
    undo_copy(tmp_path, last)
    heir, heard = reef.open(url, **options_of(tmp_path)), []
    heir.events.subscribe(heard.append)
    with heir.writer(NAME, background=False) as writer:
        assert dict(writer.scan()) == {b"k0": b"v0", b"k1": b"v1", b"k2": b"v2"}
    finished = [event.fields["object"] for event in heard if event.name == "two_phase.finished"]
    assert finished == [last]
    assert list(register.all(unfinished=True)) == []
    assert not [info.key for info in bucket.list() if is_temporary(info.key)]


def test_H23_a_stuck_record_is_reported_on_open(tmp_path):
    """H23: the alarm names the object; the record stays, and other slots continue."""
    url = filled(tmp_path)
    bucket, register = parts_of(tmp_path)
    record = new_record(bucket.runtime, f"{USERS.root}/wal/x", b"gone")
    register.insert(record)
    db, heard = reef.open(url, **options_of(tmp_path)), []
    db.events.subscribe(heard.append)
    with db.writer(NAME, background=False) as writer:
        writer.put("k9", b"v9")
    stuck = [event.fields["object"] for event in heard if event.name == "two_phase.stuck"]
    assert stuck == [record.destination]
    assert register.read_one(record.destination) == record


# --- other processes --------------------------------------------------------------------


def _race(pickled, racer, start, rounds, wins):
    store = pickle.loads(pickled)
    start.wait()
    won = [n for n in range(rounds) if store.create(f"race/{n:04}", b"%d" % racer).landed]
    wins.put((racer, won))


@pytest.mark.slow
def test_H43_pickled_stores_race_from_other_processes(tmp_path):
    """H43: a store that travels opens its own connection, and excludes the others."""
    store = stores.open(str(tmp_path / "bucket"), **options_of(tmp_path))
    store.create("warm", b"")
    spawn = multiprocessing.get_context("spawn")
    start, wins, rounds = spawn.Barrier(3), spawn.Queue(), 20
    sent = [(pickle.dumps(store), n, start, rounds, wins) for n in range(3)]
    processes = [spawn.Process(target=_race, args=args) for args in sent]
    for process in processes:
        process.start()
    won = dict(wins.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(60)
    assert sorted(n for numbers in won.values() for n in numbers) == list(range(rounds))
    for racer, numbers in won.items():
        assert all(store.get(f"race/{n:04}") == b"%d" % racer for n in numbers)


@pytest.mark.parametrize("register", ["sqlite", "postgresql", "dynalite"])
def test_H51_a_forked_child_has_its_own_connection(servers, tmp_path, register):
    """H51: parent and child continue in parallel after a fork with a warm register."""
    cas = register_url(servers, register, tmp_path)
    store = stores.open(str(tmp_path / "bucket"), cas=cas)
    store.create("wal/1", b"before")
    code, output = in_child(lambda: [str(store.create(f"wal/{n}", b"c").outcome) for n in (1, 2)])
    assert (code, output) == (0, "['exists', 'created']")
    assert store.create("wal/2", b"parent").outcome is Outcome.EXISTS
    assert store.create("wal/3", b"parent").outcome is Outcome.CREATED


@pytest.mark.parametrize("register", ["sqlite", "postgresql", "dynalite"])
def test_H51_no_connection_is_shared_with_a_child(servers, tmp_path, register):
    """H51: two processes on one connection would read each other's responses, sooner or later."""
    store = stores.open(str(tmp_path / "b"), cas=register_url(servers, register, tmp_path))
    inner = find_two_phase(store).register.inner
    connection_of = inner._open if register == "sqlite" else inner._connect
    store.create("warm", b"")
    warm = connection_of()
    assert in_child(lambda: connection_of() is warm) == (0, "False")
    assert connection_of() is warm


# --- the sweep --------------------------------------------------------------------------


@pytest.fixture
def world():
    """A namespace with some rows in segments, on virtual time, with a register."""
    made = World(simulation=TwoPhaseSimulation)
    with made.db.writer(NAME) as writer:
        for number in range(4):
            writer.put(f"k{number}", b"v")
    made.fold()
    return made


def destinations(world, folder):
    """Return the names in a folder that have a record."""
    register = world.bucket.register
    return [r.destination.rsplit("/", 1)[1] for r in register.all(f"{USERS.root}/{folder}/")]


def test_H24_a_record_goes_with_its_object(world):
    """H24: a swept slot has no record any more; one that is kept, a fence for one, has its own."""
    before = destinations(world, "wal")
    assert before == world.keys("wal")
    deleted = world.sweep_twice()
    assert any(key.startswith("wal/") for key in deleted)
    assert destinations(world, "wal") == world.keys("wal")
    assert len(world.keys("wal")) < len(before)
    assert destinations(world, "manifest") == world.keys("manifest")


def test_H24_a_reader_on_an_old_snapshot_replays_its_log_after_a_sweep(world):
    """H24: objects of a snapshot stay, with their records, until the snapshot is gone."""
    with world.db.writer(NAME) as writer:
        writer.put("late", b"1")
    snapshot = world.db.snapshot(NAME, "monday", ttl_s=None)
    world.fold()
    with world.db.writer(NAME) as writer:
        writer.put("late", b"2")
    world.fold()
    world.sweep_twice()
    assert dict(world.db.reader(NAME, snapshot=snapshot).scan())[b"late"] == b"1"
    assert destinations(world, "wal") == world.keys("wal")


def test_H24_records_below_the_boundary_go_if_their_object_is_gone(world):
    """H24: a crash between object and record; above the boundary nothing is touched."""
    world.sweep_twice()
    bucket, register = world.sim.plain_bucket, world.bucket.register
    gone = [new_record(bucket.runtime, USERS.wal_object(lsn), b"") for lsn in (2, 900)]
    for record in gone:
        register.insert(record)
        register.commit(record)
    preview = world.sweep(apply=False)
    assert preview.records_removed == 1
    assert world.sweep().records_removed == 1
    assert register.read_one(gone[0].destination) is None
    assert register.read_one(gone[1].destination) is not None


def test_H23_old_sources_are_swept_when_their_name_is_decided(world):
    """H23: a day old, and another won, or below the boundary; an open name keeps its source."""
    bucket = world.sim.plain_bucket
    world.sweep_twice()
    assert 2 not in world.slots()
    head = world.head()
    decided = new_record(bucket.runtime, USERS.manifest(head.generation), b"lost the race").source
    below = new_record(bucket.runtime, USERS.wal_object(2), b"never inserted").source
    undecided = new_record(bucket.runtime, USERS.wal_object(900), b"its writer sleeps").source
    for source in (decided, below, undecided):
        bucket.put(source, b"")
    assert world.sweep().temporaries_removed == 0, "they are young"
    world.advance(DAY_S + GRACE_S)
    named = new_record(bucket.runtime, USERS.wal_object(901), b"")
    bucket.put(named.source, b"")
    assert world.sweep(apply=False).temporaries_removed == 2
    assert world.sweep().temporaries_removed == 2
    left = {info.key for info in bucket.list() if is_temporary(info.key)}
    assert left == {undecided, named.source}


def test_H23_old_sources_of_successor_records_are_swept(world):
    """H23: a name that was dropped and created again; sources of its next incarnation stay.

    Root: the sweep collected next to the log and the manifests only, so that the sources of
    processes that died while they announced a successor stayed for ever.
    """
    bucket = world.sim.plain_bucket
    for _ in range(2):
        world.run(lambda: world.db.drop(NAME))
        world.run(lambda: world.db.create(NAME))
    records = [USERS.successor(number) for number in (2, 3, 4)]
    sources = [new_record(bucket.runtime, key, b"its creator died").source for key in records]
    for source in sources:
        bucket.put(source, b"")
    assert world.sweep().temporaries_removed == 0, "they are young"
    world.advance(DAY_S + GRACE_S)
    assert world.sweep(apply=False).temporaries_removed == 2
    assert world.sweep().temporaries_removed == 2
    left = {info.key for info in bucket.list() if is_temporary(info.key)}
    assert left == {sources[-1]}, "its name is open"
    assert [key for key in records if world.bucket.register.read_one(key)] == records[:2]
    world.run(lambda: world.db.drop(NAME))
    world.run(lambda: world.db.create(NAME))
    with world.db.writer(NAME) as writer:
        writer.put("k", b"v")


def test_H6_a_silent_register_is_unavailable_and_harms_nothing(tmp_path):
    """H6: nothing is concluded from silence; stored objects can be read."""
    url = filled(tmp_path)
    policy = stores.RetryPolicy(attempts_max=2, first_delay_s=0.0)
    cas = f"postgresql://{quote(USERS.name)}@127.0.0.1:1/none?connect_timeout=2"
    silent = stores.open(url, cas=cas, retry=policy)
    assert silent.create("new", b"x").outcome is Outcome.UNKNOWN
    with pytest.raises(UnavailableError):
        silent.delete("new")
    assert len(list(reef.Database(silent).reader(NAME).scan())) == 3


class Sleepy(LocalStore):
    """Stalls in the middle of its first copy, while others continue."""

    meanwhile = None

    def _open(self, key):
        return _slept(super()._open(key), self)


@contextmanager
def _slept(opened, store):
    with opened as found:
        meanwhile, store.meanwhile = store.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        yield found


def test_H23_a_helper_that_slept_in_a_copy_brings_nothing_back(tmp_path):
    """H23: it has opened the source; the name is freed and used again; the old bytes stay away."""
    bucket, register = parts_of(tmp_path)
    store = TwoPhase(bucket, register)
    record = new_record(bucket.runtime, "wal/1", b"first")
    bucket.put(record.source, b"first")
    register.insert(record)

    def meanwhile():
        store.delete("wal/1")
        assert store.create("wal/1", b"second").outcome is Outcome.CREATED

    sleepy = Sleepy(str(tmp_path / "bucket"))
    sleepy.meanwhile = meanwhile
    assert recover(TwoPhase(sleepy, register)).done == ("wal/1",)
    assert bucket.get("wal/1") == b"second"
    assert [info.key for info in bucket.list()] == ["wal/1"]
