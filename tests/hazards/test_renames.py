"""H79: a rename that is interrupted anywhere leaves the old name or the new one, complete."""

import pyarrow as pa
import pytest

import reef
from reef.engine.registry import Registry
from reef.errors import (
    ConflictError,
    CorruptionError,
    ErrorKind,
    FencedError,
    InvalidInputError,
    NotFoundError,
)
from reef.formats.manifest import Alias, decode_manifest, encode_manifest
from reef.jobs import fold, rebuild, sweep, verify
from reef.jobs.ingest.job import BulkJob
from reef.manifest.head import HeadFinder
from reef.paths import Namespace
from reef.stores.memory import MemoryStore
from reef.stores.wrappers.base import Hooked
from tests.support.proven_buckets import remember_probe

ROWS = {b"a": b"1", b"b": b"2"}


class Death(BaseException):
    """The process dies."""


class Dying(Hooked):
    """A store whose process dies before or after one of its requests."""

    passes_ranges = True

    def __init__(self, inner, at, *, after):
        super().__init__(inner)
        self.left, self.after = at, after

    def handles(self, operation):
        return True

    def around(self, request, send):
        self.left -= 1
        if self.left < 0 and not self.after:
            raise Death
        response = send(request)
        if self.left < 0:
            raise Death
        return response

    def around_list(self, request, send):
        self.left -= 1
        if self.left < 0:
            raise Death
        return send(request)


def bucket():
    """Return a store with a namespace: rows in a segment and in the log, a snapshot, a cursor."""
    store = MemoryStore()
    remember_probe(store)
    db = reef.Database(store)
    with db.writer("old", background=False) as writer:
        writer.put("a", b"1")
        fold(db, "old")
        writer.put("b", b"2")
    db.snapshot("old", "monday")
    db.cursor("old", "reader", after_lsn=0)
    return store


@pytest.fixture
def db():
    """Give a database with that namespace."""
    return reef.Database(bucket())


def rows(db, name):
    """Return the rows of a namespace."""
    with db.reader(name) as reader:
        return dict(reader.scan())


def check(db):
    """Return the one name that is complete; the other one must not exist."""
    (name,) = db.namespaces()
    assert rows(db, name) == ROWS
    other = {"old": "new", "new": "old"}[name]
    with pytest.raises(NotFoundError) as caught:
        db.reader(other)
    if name == "new":
        assert caught.value.kind is ErrorKind.RENAMED
        assert caught.value.context["renamed_to"] == "new"
        assert "renamed to new" in caught.value.message
    else:
        assert caught.value.kind is ErrorKind.NOT_FOUND, "a rename that was only announced"
    return name


@pytest.mark.parametrize("after", [False, True])
def test_H79_a_death_at_every_request(after):
    """One name is complete, writable and verified; repeating the rename finishes it."""
    seen, at = [], 0
    while True:
        store = bucket()
        try:
            reef.Database(Dying(store, at, after=after)).rename("old", "new")
        except Death:
            at += 1
        else:
            break
        db = reef.Database(store)
        name = check(db)
        seen.append(name)
        with db.writer(name, background=False) as writer:
            writer.put("a", b"1")
        db.rename("old", "new")
        assert check(db) == "new"
        assert verify(db, "new").problems == []
    assert check(reef.Database(store)) == "new"
    assert seen == sorted(seen, reverse=True), "old, and then new"
    assert "old" in seen


@pytest.mark.parametrize("after", [False, True])
def test_H79_the_name_is_created_after_a_death_at_every_request(after):
    """A rename that died never comes into force over a namespace that was created since."""
    at = 0
    while True:
        store = bucket()
        dying = reef.Database(Dying(store, at, after=after))
        try:
            dying.rename("old", "new")
        except Death:
            at += 1
        else:
            break
        db = reef.Database(store)
        if db.namespaces() == ["new"]:
            continue
        with pytest.raises(NotFoundError, match="there is no namespace new"):
            db.reader("new")
        db.create("new", pa.schema([("id", pa.string()), ("n", pa.int64())]))
        with db.writer("new", background=False) as writer:
            writer.upsert([{"id": "x", "n": 1}])
        assert db.namespaces() == ["new", "old"]
        assert rows(db, "old") == ROWS
        assert rows(db, "new") == {"x": {"id": "x", "n": 1}}
        with pytest.raises(ConflictError, match="namespace new exists"):
            db.rename("old", "new")


def test_H79_a_rename_is_repeated_only_to_the_same_name(db):
    """To another one that exists: the former name leads nowhere, and nothing is reported done."""
    db.create("other")
    db.rename("old", "new")
    assert db.rename("old", "new").name == "new"
    with pytest.raises(NotFoundError, match="renamed to new"):
        db.rename("old", "other")
    assert db.namespaces() == ["new", "other"]


def test_H79_an_alias_of_a_lost_namespace_gives_its_name_away(db):
    """Nothing is left in the folder that it leads to: the name is free to be created."""
    db.rename("old", "new")
    for info in list(db.store.list("namespaces/old/")):
        db.store.delete(info.key)
    db.create("new")
    assert db.namespaces() == ["new"]
    assert rows(db, "new") == {}


def test_H79_a_name_that_was_created_again_is_in_use(db):
    """Renamed, dropped and created again: its alias is in force, and no rename takes the name."""
    db.rename("old", "new")
    db.drop("new")
    db.create("new")
    db.create("other")
    with pytest.raises(ConflictError, match="namespace new exists"):
        db.rename("other", "new")
    assert db.namespaces() == ["new", "other"]


def test_H79_a_log_without_a_manifest_keeps_its_name(db):
    """Its manifests are lost: a rename to it would hide its rows from a rebuild."""
    with db.writer("lost", background=False) as writer:
        writer.put("k", b"v")
    for info in list(db.store.list("namespaces/lost/manifest/")):
        db.store.delete(info.key)
    with pytest.raises(CorruptionError, match="has a log and no manifest"):
        db.rename("old", "lost")
    assert rows(db, "old") == ROWS
    rebuild(db, "lost", apply=True)
    assert rows(db, "lost") == {b"k": b"v"}


def test_H79_a_snapshot_handle_outlives_the_name(db):
    """Taken under the former name: it is read, compared, extended and released as before."""
    snapshot = db.snapshot("old", "tuesday")
    db.rename("old", "new")
    with db.reader("new", snapshot=snapshot) as reader:
        assert dict(reader.scan()) == ROWS
    (found,) = [listed for listed in db.snapshots("new") if listed.name == "tuesday"]
    assert found == snapshot
    assert hash(found) == hash(snapshot)
    snapshot.extend(60.0)
    db.create("old2", pa.schema([("id", pa.string()), ("n", pa.int64())]))
    with pytest.raises(InvalidInputError, match="is not a snapshot of old2"):
        db.reader("old2", snapshot=snapshot)
    snapshot.release()
    assert [listed.name for listed in db.snapshots("new")] == ["monday"]


def test_H79_a_name_that_is_created_while_the_rename_is_under_way(db):
    """The rename is withdrawn, though it had reserved the name: both namespaces are complete."""
    runtime_reach = type(db.store.runtime).reach
    created = []

    def reach(runtime, place):
        if place == "rename reserved" and not created:
            created.append(db.create("new"))
        return runtime_reach(runtime, place)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(db.store.runtime), "reach", reach)
        with pytest.raises(ConflictError, match="withdrawn"):
            db.rename("old", "new")
    assert db.namespaces() == ["new", "old"]
    assert rows(db, "old") == ROWS
    assert rows(db, "new") == {}


def test_handles_and_history_of_a_renamed_namespace(db):
    """The writer is fenced, readers learn the name, and snapshots, cursors and pins stay."""
    writer = db.writer("old", background=False)
    reader, pinned = db.reader("old", refresh_interval_ms=0), db.reader("old", pin=True)
    db.rename("old", "new")
    with pytest.raises(FencedError):
        writer.put("c", b"3")
    with pytest.raises(NotFoundError, match="renamed to new"):
        reader.refresh()
    assert dict(pinned.scan()) == ROWS
    for call in (db.writer, db.drop, db.create, db.stats, db.snapshots):
        with pytest.raises(NotFoundError, match="renamed to new"):
            call("old")
    with db.reader("new", snapshot="monday") as past:
        assert dict(past.scan()) == ROWS
    assert db.cursors("new") == {"reader": 0}
    assert len(list(db.cursor("new", "reader"))) == 2
    with db.writer("new", background=False) as again:
        assert again.put("c", b"3").namespace == "new"
        fold(db, "new")
    assert rows(db, "new") == {**ROWS, b"c": b"3"}
    assert verify(db, "new").problems == []


def test_a_load_that_is_running_commits(db):
    """It was begun under the former name."""
    job = BulkJob(db, "old")
    db.rename("old", "new")
    job.commit(())
    assert rows(db, "new") == ROWS


def test_renamed_again_and_back(db):
    """Former names lead to the current one in errors; former names are free."""
    db.rename("old", "new")
    db.rename("new", "third")
    for name in ("old", "new"):
        with pytest.raises(NotFoundError, match="renamed to third"):
            db.reader(name)
    db.rename("third", "new")
    assert rows(db, "new") == ROWS
    db.rename("new", "old")
    assert db.namespaces() == ["old"]
    assert rows(db, "old") == ROWS
    with pytest.raises(NotFoundError, match="renamed to old"):
        db.writer("new", background=False)
    # The alias is not in force any more.
    with db.writer("new", background=False, create=True) as writer:
        writer.put("x", b"9")
    assert (rows(db, "new"), rows(db, "old")) == ({b"x": b"9"}, ROWS)


def test_dropped_and_created_again_after_a_rename(db):
    """The new incarnation has the new name; undrop restores the old one before that."""
    db.rename("old", "new")
    db.drop("new")
    assert db.namespaces() == []
    db.undrop("new")
    assert rows(db, "new") == ROWS
    db.drop("new")
    db.create("new")
    assert db.namespaces() == ["new"]
    assert rows(db, "new") == {}
    with pytest.raises(NotFoundError, match="renamed to new"):
        db.create("old")
    with db.writer("new", background=False) as writer:
        writer.put("x", b"9")
    assert rows(db, "new") == {b"x": b"9"}
    assert sweep(db, "new").namespace == "new"


def test_names_that_are_used(db):
    """By a namespace, a dropped one, a folder, or itself; and what is no name."""
    db.create("other")
    db.create("gone")
    db.drop("gone")
    for to in ("other", "gone"):
        with pytest.raises(ConflictError):
            db.rename("old", to)
    assert HeadFinder(db.store, Namespace("old")).find().manifest.renaming is None
    db.rename("old", "new")
    with pytest.raises(ConflictError, match="stored under the name old"):
        db.rename("other", "old")
    with pytest.raises(ConflictError, match="new exists"):
        db.rename("other", "new")
    with pytest.raises(InvalidInputError):
        db.rename("new", "new")
    with pytest.raises(InvalidInputError):
        db.rename("new", "_no")
    with pytest.raises(NotFoundError):
        db.rename("nothing", "something")
    assert db.rename("old", "new").name == "new"  # repeated


def test_the_registry_follows():
    """It has the new name, and not the old one."""
    store = bucket()
    db = reef.Database(store, None, Registry(store))
    assert db.namespaces() == ["old"]
    db.rename("old", "new")
    assert db.namespaces() == ["new"]
    assert Registry(store).names("live") == ["new"]
    db.create("other")
    assert db.namespaces() == ["new", "other"]


def test_a_local_log_follows_its_namespace(tmp_path, db):
    """Batches that were acknowledged before the rename are uploaded under the new name."""
    log = {"durability": "local", "local_log": tmp_path / "log", "upload_interval_ms": 60_000}
    writer = db.writer("old", background=False, **log)
    writer.put("c", b"3")
    writer.close()
    db.rename("old", "new")
    with db.writer("new", background=False, reapply=True, **log) as again:
        again.put("d", b"4")
    assert rows(db, "new") == {**ROWS, b"c": b"3", b"d": b"4"}


def test_a_rebuild_keeps_the_name(db):
    """All manifests of the namespace are lost; the alias still leads to it."""
    db.rename("old", "new")
    store = db.store
    for info in list(store.list("namespaces/old/manifest/")):
        store.delete(info.key)
    rebuild(db, "new", apply=True)
    assert rows(db, "new") == ROWS
    with pytest.raises(NotFoundError, match="renamed to new"):
        db.reader("old")


def test_an_older_release_refuses_a_renamed_namespace(db):
    """The format of its manifest is 3; those of others keep theirs."""
    db.create("other")
    db.rename("old", "new")
    for folder, number in (("old", 3), ("new", 3), ("other", 1)):
        newest = max(info.key for info in db.store.list(f"namespaces/{folder}/manifest/"))
        data = db.store.get(newest)
        assert b'"format":%d' % number in data
        assert encode_manifest(decode_manifest(data, newest)) == data
    alias = HeadFinder(db.store, Namespace("new")).load(1)
    assert isinstance(alias.alias, Alias)
    assert alias.alias.folder == "old"
