"""The registry of a bucket: the manifest decides, the catalog follows, and a listing is cheap."""

import pickle
from contextlib import suppress

import pyarrow as pa
import pytest

import reef
from reef.catalog import JSON, Catalog
from reef.engine.handles.database import Database
from reef.engine.registry import COMPACT_AFTER, JobBoard, Registry
from reef.errors import (
    ConflictError,
    CorruptionError,
    ErrorKind,
    NotFoundError,
    UnsupportedFormatError,
)
from reef.manifest.head import Publisher
from reef.manifest.lifecycle import clear_dropped
from reef.paths import Namespace
from reef.stores import Wrapper
from reef.testing import Simulation
from tests.support.sweep_world import At

TABLE = pa.schema([("id", pa.string()), ("n", pa.int64())])


@pytest.fixture
def bucket():
    """A bucket in memory that is not shared with other tests."""
    return Simulation(0).bucket


def opened(store):
    """Return a database with a registry, as `reef.open` makes it."""
    return Database(store, registry=Registry(store))


class Counted(Wrapper):
    """Counts the requests."""

    def __init__(self, inner):
        super().__init__(inner)
        self.calls = []
        for name in ("get", "get_range", "head", "list", "create", "put", "replace", "delete"):
            setattr(self, name, self._counting(name))

    def _counting(self, name):
        call = getattr(self.inner, name)

        def counted(*args, **words):
            self.calls.append((name, args[0] if args else ""))
            return call(*args, **words)

        return counted


def entries(bucket):
    """Return the entries of the registry."""
    found = Catalog(bucket, prefix="catalog", codec=JSON).scan_latest(prefix="namespace/")
    return {key.decode().removeprefix("namespace/"): value for key, value in found}


def test_reef_open_brings_it(tmp_path):
    """Created, dropped and undropped names are in the catalog, with no change left open."""
    with reef.open(str(tmp_path)) as db:
        db.create("a")
        db.writer("b", background=False).close()
        db.create("c")
        db.drop("b")
        db.drop("c")
        db.undrop("c")
        assert db.namespaces() == ["a", "c"]
        assert db.namespaces(dropped=True) == ["b"]
        assert pickle.loads(pickle.dumps(db)).namespaces() == ["a", "c"]
        store = db.store
    states = {name: entry["state"] for name, entry in entries(store).items()}
    assert states == {"a": "live", "b": "dropped", "c": "live"}
    assert not any(entry["changes"] for entry in entries(store).values())


def test_ten_thousand_names_cost_a_few_requests(bucket):
    """Not one for each: the checkpoint, what came since, and the head."""
    db = opened(bucket)
    db.create("a")

    def put_many(session):
        for number in range(10_000):
            session.put(f"namespace/n{number:05}", {"state": "live", "changes": {}})

    catalog = Catalog(bucket, prefix="catalog", codec=JSON)
    catalog.transact(put_many)
    catalog.compactor().compact_once()
    db.create("z")
    counted = Counted(bucket)
    names = opened(counted).namespaces()
    assert len(names) == 10_002
    assert names == sorted(names)
    assert len(counted.calls) <= 8, counted.calls


def test_opening_an_existing_namespace_costs_no_extra_request():
    """Writers, readers and `create` of an existing namespace never read the catalog."""

    def calls(make):
        bucket = Simulation(0).bucket
        opened(bucket).create("users")
        counted = Counted(bucket)
        db = make(counted)
        db.create("users")
        db.writer("users").close()
        db.reader("users").close()
        db.info("users")
        return [name for name, _ in counted.calls], {key for _, key in counted.calls}

    (plain, _), (with_registry, keys) = calls(Database), calls(opened)
    assert with_registry == plain
    assert not any(key.startswith("catalog") for key in keys)


def test_an_older_bucket_is_listed_and_registered_by_the_first_change(bucket):
    """Names from before are never missing."""
    older = Database(bucket)
    for name in "abc":
        older.create(name)
    older.drop("c")
    db = opened(bucket)
    assert db.namespaces() == ["a", "b"]
    assert not any(info.key.startswith("catalog/") for info in bucket.list(""))
    db.create("d")
    assert sorted(entries(bucket)) == ["a", "b", "c", "d"]
    assert db.namespaces() == ["a", "b", "d"]
    assert db.namespaces(dropped=True) == ["c"]


def test_a_lost_catalog_is_made_again(bucket):
    """By `rebuild`, or by the next change; until then the bucket is listed."""
    db = opened(bucket)
    for name in "abc":
        db.create(name)
    db.drop("b")
    for again in (lambda: Registry(bucket).rebuild(), lambda: opened(bucket).create("d")):
        for info in list(bucket.list("catalog/")):
            bucket.delete(info.key)
        listed = opened(bucket)
        assert listed.namespaces()[:2] == ["a", "c"]
        again()
        assert entries(bucket)["b"] == {"state": "dropped", "changes": {}}
        assert opened(bucket).namespaces()[:2] == ["a", "c"]
    assert not Catalog(bucket, prefix="catalog").verify().problems


def test_a_handle_of_a_lost_catalog_continues(bucket):
    """A process that runs on makes, drops and lists names, however much it remembers."""
    db = opened(bucket)
    for number in range(COMPACT_AFTER):
        db.create(f"n{number}")
    bucket.delete_many([info.key for info in bucket.list("catalog/")])
    assert len(db.namespaces()) == COMPACT_AFTER
    db.create("z")
    db.drop("n0")
    assert len(db.namespaces()) == len(opened(bucket).namespaces()) == COMPACT_AFTER
    assert entries(bucket)["n0"] == {"state": "dropped", "changes": {}}
    assert Catalog(bucket, prefix="catalog").verify().problems == []


def test_a_listing_does_not_overrule_a_newer_probe(bucket):
    """The registry is lost while a name is dropped, and made again from an older listing."""
    opened(bucket).create("a")

    def lose():
        bucket.delete_many([info.key for info in bucket.list("catalog/")])

    drop = At(bucket, "create", "/manifest/", lose)
    late = At(bucket, "put", "catalog/leases/", lambda: opened(drop).drop("a"))
    lose()
    opened(late).create("b")  # it has listed, and is about to begin its transaction
    assert opened(bucket).namespaces() == ["b"]
    assert opened(bucket).namespaces(dropped=True) == ["a"]


@pytest.mark.parametrize("kind", ["HEAD.json", "segments/", "checkpoints/", "gc/"])
@pytest.mark.parametrize("lost", [False, True], ids=["damaged", "lost"])
def test_a_damaged_registry_is_made_again(bucket, kind, lost):
    """Until then names are listed, and a change fails with a hint to rebuild."""
    db = opened(bucket)
    for number in range(COMPACT_AFTER + 1):
        db.create(f"n{number:02}")
    db.drop("n00")
    for info in list(bucket.list(f"catalog/{kind}")):
        bucket.delete(info.key) if lost else bucket.put(info.key, bucket.get(info.key)[:-3])
    everything = [f"n{number:02}" for number in range(1, COMPACT_AFTER + 1)]
    assert opened(bucket).namespaces() == db.namespaces() == everything
    if kind in ("segments/", "checkpoints/") or (kind == "HEAD.json" and not lost):
        with pytest.raises(CorruptionError) as refused:
            opened(bucket).create("z")
        assert "reef catalog rebuild" in refused.value.hint
    assert list(Registry(bucket).rebuild()) == ["n00", *everything]
    assert Catalog(bucket, prefix="catalog").verify().problems == []
    assert entries(bucket)["n00"]["state"] == "dropped"
    for one in (db, opened(bucket)):
        one.create("y")
        assert one.namespaces() == sorted([*everything, "y"])


def test_a_registry_of_a_newer_release_is_not_replaced(bucket, monkeypatch):
    """A rebuild by an older one leaves it as it is, and says so."""
    monkeypatch.setattr("reef.catalog.segments.FORMAT", 2)
    opened(bucket).create("a")
    monkeypatch.undo()
    before = [(info.key, info.tag) for info in bucket.list("catalog/")]
    with pytest.raises(UnsupportedFormatError):
        Registry(bucket).rebuild()
    assert [(info.key, info.tag) for info in bucket.list("catalog/")] == before


def test_a_rebuild_reads_only_entries_that_differ(bucket):
    """One listing of all; in the transaction itself, which others can spoil, next to nothing."""
    db = opened(bucket)
    for number in range(20):
        db.create(f"n{number:02}")
    counted = Counted(bucket)
    store, calls = counted.inner, counted.calls
    registry = Registry(counted)
    registry.rebuild()
    first = next(n for n, (_, key) in enumerate(calls) if key.startswith("catalog/leases"))
    assert not [key for _, key in calls[first:] if key.startswith("namespaces/")]
    assert sorted(entries(store)) == db.namespaces()


def test_a_rebuild_corrects_wrong_entries(bucket):
    """Names that a process without a registry has made or dropped; changes of dead processes."""
    db, other = opened(bucket), Database(bucket)
    db.create("a")
    db.create("b")
    other.create("c")
    other.drop("a")

    def note(session):
        session.put("namespace/b", {"state": None, "changes": {"long ago": 0}})
        session.put("namespace/gone", {"state": "live", "changes": {}})

    Catalog(bucket, prefix="catalog", codec=JSON).transact(note)
    assert Registry(bucket).rebuild() == {"a": "dropped", "b": "live", "c": "live"}
    assert {name: e["state"] for name, e in entries(bucket).items()} == {
        "a": "dropped",
        "b": "live",
        "c": "live",
    }
    assert entries(bucket)["b"]["changes"] == {}


def test_a_rebuild_leaves_changes_of_running_processes_open(bucket):
    """Their publish may come after the rebuild has read the manifest."""
    db, registry = opened(bucket), Registry(bucket)
    db.create("a")
    registry._open_change("a", "just now")
    registry.rebuild()
    assert list(entries(bucket)["a"]["changes"]) == ["just now"]


def test_an_entry_with_an_open_change_shows_no_drop(bucket):
    """The process that undrops it may have published, and not closed its change yet."""
    db, registry = opened(bucket), Registry(bucket)
    db.create("a")
    db.drop("a")
    assert registry.has_drop("a")
    registry._open_change("a", "an undrop")
    assert not registry.has_drop("a")


class Death(BaseException):
    """Passes through everything, as the end of a process does."""


class Dies(Wrapper):
    """Fails every write after some point, as if the process had died."""

    def __init__(self, inner, after):
        super().__init__(inner)
        self.left = after

    def create(self, key, body):
        self._count()
        return self.inner.create(key, body)

    def put(self, key, body):
        self._count()
        return self.inner.put(key, body)

    def replace(self, key, body, tag):
        self._count()
        return self.inner.replace(key, body, tag)

    def _count(self):
        self.left -= 1
        if self.left < 0:
            raise Death


@pytest.mark.parametrize("work", ["create", "drop", "undrop", "create again"])
def test_a_death_at_any_write_leaves_a_listing_that_is_right(work):
    """The registry agrees with the manifests after a death anywhere; later changes work."""
    for after in range(40):
        bucket = Simulation(0).bucket
        db = opened(bucket)
        db.create("other")
        if work != "create":
            db.create("users")
        if work in ("undrop", "create again"):
            db.drop("users")
        dying = Dies(bucket, after)
        call = getattr(opened(dying), work.split()[0])
        with suppress(Death):
            call("users")
        assert opened(bucket).namespaces() == Database(bucket).namespaces(), after
        dropped = Database(bucket).namespaces(dropped=True)
        assert opened(bucket).namespaces(dropped=True) == dropped, after
        opened(bucket).create("users")
        assert opened(bucket).namespaces() == ["other", "users"]
        if dying.left >= 0:
            return
    raise AssertionError("it never got through")


def test_overlapping_changes_leave_the_state_of_the_manifest(bucket):
    """A drop while another process creates the name again: the last to close reads the manifest."""
    opened(bucket).create("users")
    Database(bucket).drop("users")

    def drop_meanwhile():
        with suppress(reef.ReefError):
            opened(bucket).drop("users")

    for part in ("/manifest/", "catalog/segments/", "catalog/HEAD"):
        for after in (False, True):
            store = At(bucket, "create", part, drop_meanwhile, after=after)
            with suppress(reef.ReefError):
                opened(store).create("users")
            assert opened(bucket).namespaces() == Database(bucket).namespaces()


def test_two_that_make_the_same_name(bucket):
    """One wins; the other finds it, or gets an error about its columns."""
    rival = opened(bucket)
    store = At(bucket, "create", "/manifest/", lambda: rival.create("same"))
    assert opened(store).create("same").name == "same"
    store = At(bucket, "create", "/manifest/", lambda: rival.create("other", TABLE))
    with pytest.raises(ConflictError, match="with other columns"):
        opened(store).create("other")
    assert opened(bucket).namespaces() == ["other", "same"]


def test_the_chain_of_changes_stays_short(bucket):
    """Many changes make a checkpoint now and then."""
    db = opened(bucket)
    for number in range(COMPACT_AFTER // 2 + 4):
        db.create(f"n{number}")
    snapshot = Catalog(bucket, prefix="catalog").snapshot()
    assert snapshot.checkpoint_id
    assert snapshot.last_segment_seq - snapshot.floor < COMPACT_AFTER


def test_a_new_process_reads_a_short_chain(bucket):
    """Whenever it comes: the head, the checkpoint, and a bounded number of segments."""
    db = opened(bucket)
    for number in range(2 * COMPACT_AFTER):
        db.create(f"n{number:02}")
        counted = Counted(bucket)
        assert len(opened(counted).namespaces()) == number + 1
        assert len(counted.calls) <= COMPACT_AFTER + 4, counted.calls


def test_heartbeats_of_jobs_do_not_make_the_chain_long(bucket):
    """Renewing an entry compacts the catalog's segments."""
    db = opened(bucket)
    db.create("a")
    board = JobBoard(Catalog(bucket, prefix="catalog", codec=JSON))
    for _ in range(3 * COMPACT_AFTER):
        entry = {"kind": "export", "namespace": "a", "where": "m:1", "progress": {}}
        board.report("one", entry)
        snapshot = board.catalog.snapshot()
        assert snapshot.last_segment_seq - snapshot.floor < COMPACT_AFTER
    assert db.namespaces() == ["a"]


def test_what_cannot_be_brought_back_leaves_no_change_open(bucket):
    """A rejected undrop leaves no open change."""
    db = opened(bucket)
    db.create("a")
    db.drop("a")
    Publisher(bucket, Namespace("a")).publish(clear_dropped, dropped=True)
    with pytest.raises(NotFoundError) as refused:
        db.undrop("a")
    assert refused.value.kind is ErrorKind.COLLECTED
    assert entries(bucket)["a"] == {"state": "dropped", "changes": {}}


@pytest.mark.parametrize("objects", [3, 99, 100, 101, 250])
def test_a_listing_without_a_registry_skips_many_objects_and_no_name(bucket, objects):
    """One LIST for many small namespaces, and one more for each that is large."""
    names = ["a", "a-b", "a.b", "a0", "aa", "b"]
    for name in names:
        Database(bucket).create(name)
    for number in range(objects):
        for name in ("a", "aa", "b"):
            bucket.put(f"namespaces/{name}/wal/{number:020}.wal", b"x")
    bucket.put("namespaces/not a name/x", b"another tool's")
    counted = Counted(bucket)
    assert Database(counted).namespaces() == names
    listings = [key for call, key in counted.calls if (call, key) == ("list", "namespaces/")]
    assert len(listings) == (1 if objects < 99 else 4)


def test_a_damaged_catalog_hides_no_namespace(bucket):
    """The bucket stays the truth: it is listed."""
    opened(bucket).create("users")
    key = next(i.key for i in bucket.list("catalog/segments/"))
    bucket.put(key, bucket.get(key)[:-3])
    assert opened(bucket).namespaces() == ["users"]
