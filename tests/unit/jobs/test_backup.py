"""Backups: only new objects are sent, every kind of state comes back, damage is refused by name."""

import datetime
from contextlib import suppress

import msgspec
import pyarrow as pa
import pytest

import reef
from reef import stores
from reef.errors import (
    ConflictError,
    CorruptionError,
    FencedError,
    InvalidInputError,
    NotFoundError,
)
from reef.jobs import (
    backup,
    compact,
    fold,
    ingest,
    list_backups,
    rebuild,
    restore,
    verify,
    verify_backup,
)
from reef.jobs.backup import copying, job
from reef.jobs.backup import job as backup_job
from reef.jobs.backup import restore as backup_restore
from reef.jobs.backup.archive import identify_bucket
from reef.manifest import branching
from reef.manifest.head import Publisher
from reef.paths import Namespace
from reef.stores.memory import MemoryStore
from reef.testing.disk import SimulatedDisk
from tests.support.compaction import head_of

NAME = "users"
COPY = "copy"
TABLE = pa.schema([("id", pa.string()), ("n", pa.int64()), ("word", pa.string())])


@pytest.fixture
def db():
    """Return a database with a namespace in it: segments, and rows in the log."""
    db = reef.Database(stores.open("memory://"))
    put(db, {"a": b"1", "b": b"2"})
    fold(db, NAME)
    put(db, {"b": b"3", "c": b"4"})
    return db


@pytest.fixture
def target():
    """Return an empty store for backups."""
    return stores.open("memory://")


@pytest.fixture
def other():
    """Return another bucket."""
    return reef.Database(stores.open("memory://"))


def put(db, rows, name=NAME, **options):
    """Write each row in a batch of its own; return the last LSN."""
    with db.writer(name, create=True, background=False) as writer:
        return [writer.put(key, value, **options).lsn for key, value in rows.items()][-1]


def rows_of(db, name=NAME, **options):
    """Return the rows of a new reader."""
    with db.reader(name, **options) as reader:
        return dict(reader.scan())


def retain_the_head(db):
    """Publish that no older generation is retained, as a sweep does."""
    Publisher(db.store, Namespace(NAME)).publish(
        lambda head: msgspec.structs.replace(head, oldest_retained=head.generation)
    )


def requests(report, store):
    """Return the requests of a report by kind."""
    return {kind: count["requests"] for kind, count in report.requests[store].items()}


def keys(store, folder=""):
    """Return the keys in a folder."""
    return [info.key for info in store.list(folder)]


# --- what is sent -----------------------------------------------------------------------


def test_a_backup_is_a_copy_of_its_own(db, target, other):
    """The rows are there although nothing of the source is left."""
    report = backup(db, NAME, target)
    rows = rows_of(db)
    db.store.delete_many(keys(db.store))
    done = restore(target, other, NAME)
    assert rows_of(other) == rows == {b"a": b"1", b"b": b"3", b"c": b"4"}
    assert verify(other, NAME, deep=True).problems == []
    assert done.namespaces[0].lsn == report.last_lsn
    assert report.to_dict()["namespaces"][0]["namespace"] == NAME
    assert done.to_dict()["verified"]


def test_a_second_backup_sends_new_objects_only(db, target):
    """Segments that are there are not read and not sent; of the log, only what is new."""
    compact(db, NAME, full=True)
    first = backup(db, NAME, target)
    assert (first.segments_sent, first.segments_reused) == (1, 0)
    again = backup(db, NAME, target)
    assert (again.segments_sent, again.segments_reused, again.log_objects) == (0, 1, 0)
    assert requests(again, "target") == {"list": 2, "put": 2}  # the manifest and the descriptor
    put(db, {"d": b"5"})
    fold(db, NAME)
    third = backup(db, NAME, target)
    assert (third.segments_sent, third.segments_reused) == (1, 1)
    assert requests(third, "target") == {"list": 2, "put": 4}
    assert third.log_objects == 2  # a fence and a batch
    assert third.seconds >= 0


def test_the_cost_of_a_backup(db, target):
    """The log is read once per slot and stored in one object; the rest does not depend on it."""
    few = backup(db, NAME, target)
    put(db, {f"k{n}": b"x" for n in range(50)})
    more = backup(db, NAME, target)
    assert more.log_objects == 51
    extra = requests(more, "source")["get"] - requests(few, "source")["get"]
    assert extra <= 51 + 2
    assert requests(more, "target")["put"] == 3
    assert requests(more, "source")["put"] == 1  # the lease


def test_the_log_between_two_backups_is_continued(db, target, other):
    """Folded since, and still retained: every LSN between two backups can be restored."""
    backup(db, NAME, target)
    between = put(db, {"a": b"between"})
    put(db, {"a": b"after"})
    fold(db, NAME)
    assert len(backup(db, NAME, target).namespaces) == 1
    restore(target, other, NAME, lsn=between)
    assert rows_of(other)[b"a"] == b"between"


def test_a_first_backup_covers_every_lsn_that_the_source_can_show(db, target, other):
    """Taken after a fold, it covered its last LSN only, and not each that `as_of` shows."""
    fold(db, NAME)
    compact(db, NAME, full=True)
    last = put(db, {"d": b"5"})
    fold(db, NAME)
    report = backup(db, NAME, target)
    assert (report.backups, report.last_lsn) == (1, last)
    floors = [(one.floor, one.last_lsn) for one in report.namespaces]
    assert floors == [(1, last), (last + 1, last)]
    for lsn in range(1, last + 1):
        expected = rows_of(db, as_of={"lsn": lsn})
        restore(target, other, f"copy-{lsn}", namespace=NAME, lsn=lsn)
        assert rows_of(other, f"copy-{lsn}") == expected
    assert len(backup(db, NAME, target).namespaces) == 1, "the second one continues the first"
    assert verify_backup(target, deep=True).ok


def test_a_first_backup_covers_the_log_of_a_snapshot(db, target, other):
    """The oldest generation that can be read is that of a snapshot; swept ones are left out."""
    db.snapshot(NAME, "old")
    pinned = rows_of(db)
    lsn = db.reader(NAME, pin=True).last_lsn
    put(db, {"a": b"later"})
    fold(db, NAME)
    retain_the_head(db)
    backup(db, NAME, target)
    restore(target, other, NAME, lsn=lsn)
    assert rows_of(other) == pinned
    with pytest.raises(NotFoundError, match="do not cover LSN 1 "):
        restore(target, other, COPY, namespace=NAME, lsn=1)


def test_a_log_that_was_collected_leaves_a_gap(db, target, other):
    """What no backup has seen cannot be restored, and the error names what can."""
    first = backup(db, NAME, target)
    between = put(db, {"a": b"between"})
    put(db, {"a": b"after"})
    fold(db, NAME)
    retain_the_head(db)
    second = backup(db, NAME, target)
    with pytest.raises(NotFoundError, match=f"do not cover LSN {between} .* 0 to {first.last_lsn}"):
        restore(target, other, NAME, lsn=between)
    restore(target, other, NAME, lsn=first.last_lsn)
    assert rows_of(other)[b"a"] == b"1"
    restore(target, other, COPY, namespace=NAME, lsn=second.last_lsn)
    assert rows_of(other, COPY)[b"a"] == b"after"


def test_pieces_are_bounded(db, target, other, monkeypatch):
    """A long log is stored in pieces, and restored in stretches, each of bounded size."""
    monkeypatch.setattr(copying, "PIECE_SLOTS", 3)
    lsn = put(db, {f"k{n}": b"%d" % n for n in range(20)})
    report = backup(db, NAME, target)
    assert report.pieces == -(-report.log_objects // 3)
    restore(target, other, NAME, lsn=lsn - 1)
    assert rows_of(other).keys() == rows_of(db).keys() - {b"k19"}


def test_a_lost_lease_ends_a_backup(db, target, monkeypatch):
    """A slot may have been collected and filled again: nothing read since is stored (H67)."""
    read = copying.LogShipper._read

    def reaping(self, lsn):
        db.store.delete_many(keys(db.store, f"namespaces/{NAME}/leases/"))
        with suppress(ConflictError):  # as the keeper of the lease notices it
            self.check.__self__._held.heartbeat()
        return read(self, lsn)

    monkeypatch.setattr(copying.LogShipper, "_read", reaping)
    with pytest.raises(ConflictError):
        backup(db, NAME, target)
    assert keys(target, "backups/") == []
    assert keys(target, "data/logs/") == []


def test_a_backup_holds_a_lease_and_releases_it(db, target, monkeypatch):
    """Wide while it follows the head; of an old state it holds exactly that (H74)."""
    leases = f"namespaces/{NAME}/leases/"
    seal = job._BackupRun.seal
    seen = []

    def watching(self, *args, **options):
        seen.extend(msgspec.json.decode(db.store.get(key)) for key in keys(db.store, leases))
        seal(self, *args, **options)

    monkeypatch.setattr(job._BackupRun, "seal", watching)
    backup(db, NAME, target)
    last = put(db, {"a": b"later"})
    backup(db, NAME, target, as_of={"lsn": last - 1})
    assert [lease.get("last_lsn") for lease in seen] == [None, last - 1]
    assert keys(db.store, leases) == []


# --- states -----------------------------------------------------------------------------


def test_everything_that_a_log_can_hold(target, other):
    """Patches, merges, range deletes, expiring rows and loads that are not folded."""
    db = reef.Database(stores.open("memory://"))
    db.create(NAME, TABLE)
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)
    past = datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)
    with db.writer(NAME, background=False) as writer:
        writer.upsert([{"id": f"k{n}", "n": n, "word": "w"} for n in range(8)])
        fold(db, NAME)
        writer.patch([{"id": "k0", "word": "patched"}])
        writer.merge("k1", {"n": reef.add(10)})
        writer.delete_range("k2", "k4")
        writer.upsert([{"id": "k4", "n": 0, "word": "gone", "_expires_at": past}])
        writer.upsert([{"id": "k5", "n": 5, "word": "soon", "_expires_at": later}])
        ingest(db, NAME, [{"id": "k6", "n": 66, "word": "loaded"}])
        writer.refresh()
        writer.patch([{"id": "k6", "word": "patched too"}])
    backup(db, NAME, target)
    restore(target, other, NAME)
    assert rows_of(other) == rows_of(db)
    assert rows_of(other)["k1"]["n"] == 11
    assert rows_of(other)["k6"] == {"id": "k6", "n": 66, "word": "patched too"}
    compact(other, NAME, full=True)
    assert rows_of(other) == rows_of(db)


def test_a_branch_becomes_independent(db, target, other):
    """Segments and log of its origin are in the backup; those of both are stored once."""
    db.branch(NAME, "child")
    put(db, {"a": b"child"}, "child")
    backup(db, NAME, target)
    report = backup(db, "child", target)
    assert (report.segments_sent, report.segments_reused) == (0, 1)
    rows = rows_of(db, "child")
    db.store.delete_many(keys(db.store))
    restore(target, other, "child")
    assert rows_of(other, "child") == rows == {b"a": b"child", b"b": b"3", b"c": b"4"}
    assert head_of(other, "child").pinned_homes == ()


def test_both_lives_of_a_name(db, target, other):
    """A name that was dropped and created again: the newest life, and the older one by its id."""
    first = backup(db, NAME, target)
    old = rows_of(db)
    db.drop(NAME)
    put(db, {"new": b"life"})
    backup(db, NAME, target)
    restore(target, other, NAME)
    assert rows_of(other) == {b"new": b"life"}
    restore(target, other, COPY, namespace=NAME, backup=first.id)
    assert rows_of(other, COPY) == old


def test_the_snapshot_of_a_bucket(db, target, other):
    """All namespaces at the point in time of the snapshot, in one backup."""
    put(db, {"o1": b"open"}, "orders")
    db.snapshot_all("nightly")
    expected = {name: rows_of(db, name) for name in (NAME, "orders")}
    put(db, {"a": b"later"})
    report = backup(db, None, target, snapshot="nightly")
    assert sorted(one.namespace for one in report.namespaces) == ["orders", NAME]
    done = restore(target, other, backup="nightly")
    assert sorted(one.name for one in done.namespaces) == ["orders", NAME]
    assert {name: rows_of(other, name) for name in other.namespaces()} == expected


def test_a_bucket_as_it_is_now(db, target, other):
    """Without a snapshot, one is taken for the backup and released afterwards."""
    put(db, {"o1": b"open"}, "orders")
    backup(db, None, target)
    assert db.snapshots(NAME) == []
    restore(target, other)
    assert sorted(other.namespaces()) == ["orders", NAME]
    with pytest.raises(ConflictError, match="namespace orders exists"):
        restore(target, other)


def test_a_past_state(db, target, other):
    """A generation, an LSN or a snapshot is backed up as it was."""
    pin = db.snapshot(NAME, "monday")
    expected = rows_of(db)
    put(db, {"a": b"later"})
    fold(db, NAME)
    backup(db, NAME, target, snapshot=pin)
    restore(target, other, NAME)
    assert rows_of(other) == expected
    backup(db, NAME, target, as_of={"lsn": 1})
    restore(target, other, COPY, namespace=NAME, lsn=1)
    assert rows_of(other, COPY) == {}


def test_columns_that_were_added_behind_the_generation(target, other):
    """Batches in the log may have a newer schema than the manifest from which it is replayed."""
    db = reef.Database(stores.open("memory://"))
    db.create(NAME, TABLE)
    with db.writer(NAME, background=False) as writer:
        writer.upsert([{"id": "a", "n": 1, "word": "old"}])
    backup(db, NAME, target)
    db.alter(NAME, TABLE.append(pa.field("more", pa.string())))
    with db.writer(NAME, background=False) as writer:
        lsn = writer.upsert([{"id": "b", "n": 2, "word": "new", "more": "columns"}]).lsn
        writer.upsert([{"id": "c", "n": 3, "word": "newest", "more": "rows"}])
        fold(db, NAME)
    backup(db, NAME, target)
    restore(target, other, NAME, lsn=lsn)
    assert rows_of(other)["b"]["more"] == "columns"
    assert rows_of(other).keys() == {"a", "b"}


def test_an_empty_namespace(target, other):
    """One without rows is restored with its columns."""
    db = reef.Database(stores.open("memory://"))
    db.create(NAME, TABLE)
    backup(db, NAME, target)
    restore(target, other, NAME)
    assert rows_of(other) == {}
    assert other.info(NAME).schema.names == TABLE.names


# --- points in time ---------------------------------------------------------------------


def test_a_time_in_the_covered_range(db, target, other):
    """The state after the last commit before it; also when nothing was committed for long."""
    retain_the_head(db)
    backup(db, NAME, target)
    (found,) = list_backups(target)
    end = datetime.datetime.fromtimestamp(found.namespaces[0].covered_ms / 1000, datetime.UTC)
    restore(target, other, NAME, time=end)
    assert rows_of(other) == rows_of(db)
    with pytest.raises(NotFoundError, match="do not cover 20"):
        restore(target, other, COPY, namespace=NAME, time=end + datetime.timedelta(seconds=5))
    with pytest.raises(NotFoundError, match="they cover 20"):
        restore(target, other, COPY, namespace=NAME, time="2001-01-01T00:00:00Z")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"lsn": 1, "time": "2026-01-01"}, "both name a point in time"),
        ({"lsn": -1}, "lsn=-1 is not an integer"),
        ({"lsn": 99}, "do not cover LSN 99"),
        ({"backup": "unknown"}, "has no backup unknown of users"),
        ({"namespace": "unknown"}, "has no backup of unknown"),
    ],
)
def test_positions_that_are_refused(db, target, other, options, match):
    """The error names the option and what is there; nothing was created."""
    backup(db, NAME, target)
    with pytest.raises((InvalidInputError, NotFoundError), match=match):
        restore(target, other, NAME, **options)
    assert other.namespaces() == []
    assert keys(other.store, "namespaces/") == []


def test_the_source_of_a_new_name(db, target, other):
    """The only namespace that has backups; with several the name must be one of them, or say so."""
    backup(db, NAME, target)
    assert restore(target, other, COPY).namespaces[0].namespace == NAME
    assert rows_of(other, COPY) == rows_of(db)
    with other.writer("second", create=True) as writer:
        writer.put("k", b"v")
    backup(other, "second", target)
    with pytest.raises(NotFoundError, match="has no backup of third"):
        restore(target, other, "third")
    restore(target, other, "third", namespace="second")
    assert rows_of(other, "third") == {b"k": b"v"}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"until_lsn": 3}, "for follow=True"),
        ({"follow": True, "as_of": 1}, "begins with the newest state"),
        ({"follow": True, "until_lsn": -1}, "is not an LSN"),
        ({"follow": True, "seconds": -1}, "is not a number of seconds"),
        ({"follow": True, "interval_s": 0}, "is not a number of seconds"),
    ],
)
def test_options_that_are_refused(db, target, options, match):
    """Before anything is written."""
    with pytest.raises(InvalidInputError, match=match):
        backup(db, NAME, target, **options)
    with pytest.raises(InvalidInputError, match="a whole bucket takes"):
        backup(db, None, target, as_of=1)
    with pytest.raises(InvalidInputError, match="need the name of the namespace"):
        restore(target, db, lsn=1)
    assert keys(target) == []


# --- following --------------------------------------------------------------------------


def test_following_ends(db, target):
    """At an LSN, or after some seconds."""
    last = put(db, {"a": b"5"})
    report = backup(db, NAME, target, follow=True, until_lsn=last, interval_s=0.01)
    assert report.last_lsn == last
    timed = backup(db, NAME, target, follow=True, seconds=0.05, interval_s=0.01)
    assert timed.seconds >= 0.05
    assert timed.backups == 1


def test_following_moves_its_lease(db, target, monkeypatch):
    """The source retains objects for one interval, and not for as long as the backup runs (H74)."""
    generations, steps = [], []
    step = backup_job._NamespaceBackup.step

    def busy(self):
        put(db, {"a": b"%d" % len(steps)})
        fold(db, NAME)
        step(self)
        steps.append(head_of(db, NAME).generation)
        found = [db.store.get(key) for key in keys(db.store, f"namespaces/{NAME}/leases/")]
        generations.append([int(one.split(b'"generation":')[1].split(b",")[0]) for one in found])

    monkeypatch.setattr(backup_job._NamespaceBackup, "step", busy)
    backup(db, NAME, target, follow=True, seconds=0.2, interval_s=0.01)
    assert len(steps) > 1
    assert generations == [[generation] for generation in steps]


# --- the restored namespace -------------------------------------------------------------


def test_a_name_that_is_in_use(db, target):
    """Nothing is overwritten; a dropped name is used again."""
    backup(db, NAME, target)
    with pytest.raises(ConflictError, match="namespace users exists"):
        restore(target, db, NAME)
    rows = rows_of(db)
    db.drop(NAME)
    restore(target, db, NAME)
    assert rows_of(db) == rows
    assert head_of(db, NAME).incarnation == 2
    assert [key for key in keys(db.store) if "/restored/" in key] == []
    put(db, {"next": b"works"})
    assert verify(db, NAME, deep=True).problems == []


def test_positions_of_the_source_mean_nothing_here(db, target, other):
    """A reader of the lost log is refused, in front of the restored state and behind it (H48)."""
    last = backup(db, NAME, target).last_lsn
    lost = put(db, {"lost": b"row"})
    (done,) = restore(target, other, NAME).namespaces
    assert done.first_lsn == last + 1 + branching.RESTORED_LSNS
    put(other, {"new": b"row"})
    reader = other.reader(NAME)
    for lsn in (1, last, lost):
        with pytest.raises(NotFoundError, match="or restored from a backup"):
            list(reader.changes(after_lsn=lsn))
        with pytest.raises(NotFoundError, match="or restored from a backup"):
            reader.as_of(lsn=lsn)
    changed = [change.key for change in reader.changes(after_lsn=done.first_lsn - 1)]
    assert changed == [b"new"]


def test_a_name_that_was_restored_twice(db, target):
    """LSNs rise from one life to the next, also if an older backup is restored."""
    backup(db, NAME, target)
    ends = []
    for _ in range(2):
        db.drop(NAME)
        (done,) = restore(target, db, NAME).namespaces
        ends.append((done.first_lsn, put(db, {"x": b"y"})))
    assert ends[1][0] > ends[0][1]


def test_keys_and_streams_survive(db, target, other):
    """A batch that was committed before the backup does not count again."""
    with db.writer(NAME, background=False) as writer:
        first = writer.put("k", b"once", idempotency_key="key")
    backup(db, NAME, target)
    restore(target, other, NAME)
    with other.writer(NAME, background=False) as writer:
        again = writer.put("k", b"once", idempotency_key="key")
        assert (again.replayed, again.lsn) == (True, first.lsn)
        assert not writer.put("k", b"new", idempotency_key="other").replayed


def test_H71_a_local_log_of_the_lost_bucket(target):
    """Its pending entries are refused, and kept, until they are re-applied; each counts once."""
    settings = {
        "durability": "local",
        "local_log": "/log",
        "background": False,
        "upload_interval_ms": 1e9,
    }
    disk, db, other = SimulatedDisk(), *(reef.Database(MemoryStore()) for _ in range(2))
    db._log_files = other._log_files = disk
    with db.writer(NAME, create=True, **settings) as writer:
        writer.put("sent", b"1")
    backup(db, NAME, target)
    writer = db.writer(NAME, **settings)
    writer.put("pending", b"2")
    writer._uploader.stop()  # as a killed process leaves it
    writer._closed = True
    writer._buffer.log.close()
    restore(target, other, NAME)
    with pytest.raises(FencedError):
        other.writer(NAME, **settings)
    with other.writer(NAME, reapply=True, **settings) as writer:
        writer.put("next", b"3")
    assert rows_of(other) == {b"sent": b"1", b"pending": b"2", b"next": b"3"}
    first = head_of(other, NAME).wal_base - 1
    changed = [one.key for one in other.reader(NAME).changes(after_lsn=first)]
    assert changed == [b"pending", b"next"]


def test_a_rebuild_of_a_restored_namespace(db, target, other, monkeypatch):
    """Without its manifests it has the same rows: LSNs that were left out are not lost (H49)."""
    for module in (branching, backup_restore):  # without the segment that covers them, a rebuild
        monkeypatch.setattr(module, "RESTORED_LSNS", 1000)  # would list them one by one
    backup(db, NAME, target)
    restore(target, other, NAME)
    put(other, {"d": b"5"})
    rows = rows_of(other)
    other.store.delete_many(keys(other.store, f"namespaces/{NAME}/manifest/"))
    report = rebuild(other, NAME, apply=True)
    assert report.problems == ()
    assert rows_of(other) == rows


def test_buckets_are_kept_apart(db, target, other):
    """Two buckets with the same names share a set; a restored one continues as another bucket."""
    backup(db, NAME, target)
    restore(target, other, NAME)
    put(other, {"a": b"other"})
    backup(other, NAME, target)
    assert identify_bucket(db.store) != identify_bucket(other.store)
    third = reef.Database(stores.open("memory://"))
    restore(target, third, NAME)
    assert rows_of(third)[b"a"] == b"other"
    older = list_backups(target)[0].id
    restore(target, third, COPY, namespace=NAME, backup=older)
    assert rows_of(third, COPY) == rows_of(db)
    assert verify_backup(target, deep=True).problems == []


# --- damage -----------------------------------------------------------------------------


def damage(store, key):
    """Flip a bit in the middle of an object."""
    body = bytearray(store.get(key))
    body[len(body) // 2] ^= 1
    store.put(key, bytes(body))


@pytest.mark.parametrize("folder", ["backups/", "data/manifests/", "data/segments/", "data/logs/"])
def test_a_damaged_backup_is_refused_by_name(db, target, other, folder):
    """The error names the object and both checksums; no namespace is visible."""
    backup(db, NAME, target)
    key = keys(target, folder)[-1]  # of two manifests, that of the newer generation
    damage(target, key)
    with pytest.raises(
        CorruptionError, match=r"expected checksum [0-9a-f]{8}, found [0-9a-f]{8}"
    ) as e:
        restore(target, other, NAME)
    assert e.value.context["object"] == key
    assert other.namespaces() == []
    found = verify_backup(target, deep=True)
    assert not found.ok
    assert found.problems[0].object == key


@pytest.mark.parametrize("folder", ["data/manifests/", "data/segments/", "data/logs/"])
def test_an_object_that_is_missing_is_named(db, target, other, folder):
    """Whatever is lost, verify says which, and a restore does not go around it."""
    last = backup(db, NAME, target).last_lsn
    key = keys(target, folder)[-1]
    target.delete(key)
    assert [problem.object for problem in verify_backup(target).problems] == [key]
    with pytest.raises((CorruptionError, NotFoundError)):
        restore(target, other, NAME, lsn=last)
    assert other.namespaces() == []


def test_a_segment_that_was_cut_short(db, target, other):
    """By its size, without reading it; and by a restore."""
    backup(db, NAME, target)
    (key,) = keys(target, "data/segments/")
    target.put(key, target.get(key)[:-1])
    (problem,) = verify_backup(target).problems
    assert (problem.object, "bytes, found" in problem.message) == (key, True)
    with pytest.raises(CorruptionError, match="shorter than"):
        restore(target, other, NAME)


def test_damage_of_the_source_is_not_backed_up(db, target):
    """A damaged segment or log ends the backup with the name of the object."""
    (segment,) = keys(db.store, f"namespaces/{NAME}/segments/")
    intact = db.store.get(segment)
    damage(db.store, segment)
    with pytest.raises(CorruptionError, match="checksum") as error:
        backup(db, NAME, target)
    assert error.value.context["object"] == segment
    assert keys(target, "data/segments/") == []
    db.store.put(segment, intact)
    slot = keys(db.store, f"namespaces/{NAME}/wal/")[-1]
    damage(db.store, slot)
    with pytest.raises(CorruptionError):
        backup(db, NAME, target)
    assert list_backups(target) == []


def test_a_restore_that_wrote_damage_is_noticed(db, target, other, monkeypatch):
    """Every block is read again before the namespace is created."""
    backup(db, NAME, target)
    from reef.jobs.backup import copying

    copy = copying._copy

    def damaging(source, sink, item):
        copy(source, sink, item)
        damage(sink, item.target)

    monkeypatch.setattr(copying, "_copy", damaging)
    with pytest.raises(CorruptionError, match="restored object"):
        restore(target, other, NAME)
    assert other.namespaces() == []


def test_leftovers_are_reported_and_used(db, target, monkeypatch):
    """A backup that died leaves orphans; the next one does not send them again."""
    put_object = job._BackupRun.put

    def dying(self, key, body):
        if key.startswith("backups/"):
            raise KeyboardInterrupt
        put_object(self, key, body)

    monkeypatch.setattr(job._BackupRun, "put", dying)
    with pytest.raises(KeyboardInterrupt):
        backup(db, NAME, target)
    found = verify_backup(target)
    assert (found.ok, found.backups) == (True, 0)
    assert len(found.orphans) == 4  # a segment, a piece, two manifests
    monkeypatch.undo()
    report = backup(db, NAME, target)
    assert (report.segments_sent, report.log_objects) == (0, 0)
    assert len(verify_backup(target).orphans) == 2  # the manifests
