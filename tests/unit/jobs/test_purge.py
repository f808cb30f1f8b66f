"""Erasure: no object holds a version of the keys, and everything else is as it was."""

import sys
from datetime import datetime

import pyarrow as pa
import pytest

import reef
from reef.engine.handles.database import Database
from reef.engine.log.log import Log
from reef.formats.wal_object import Ops
from reef.jobs import compact, fold, ingest, purge, rebuild, sweep, verify
from reef.jobs.compact.merge import read_tail
from reef.jobs.ingest.append import StreamAppender
from reef.jobs.ingest.job import BulkJob
from reef.manifest.head import locate
from reef.stores import Wrapper
from reef.stores.wrappers.base import Hooked
from tests.support.bulk_jobs import stage
from tests.support.requests import Requests
from tests.support.sweep_world import DAY_S, GRACE_S, NAME, At, World

SCHEMA = pa.schema([("id", pa.string()), ("text", pa.string()), ("n", pa.int64())])
PLAIN = {"codec": "none"}
LONG_S = 4.0 * GRACE_S
ERASED = ["k3", "k4"]


def row(number, text="first"):
    """Return a row whose text is found in an uncompressed object."""
    return {"id": f"k{number}", "text": f"secret {number} {text}", "n": number}


@pytest.fixture
def world():
    """Give a namespace with rows to erase."""
    return made()


def made():
    """Return ten rows in the log and in two uncompressed segments, with patches and merges."""
    world = World()
    world.db.create(NAME, SCHEMA)
    with world.db.writer(NAME, background=False) as writer:
        writer.upsert([row(number) for number in range(10)])
        writer.patch([{"id": "k3", "text": "secret 3 patched"}])
        fold(world.db, NAME, **PLAIN)
        writer.merge("k4", {"n": reef.add(5)})
        writer.upsert([row(3, "second"), row(6, "second")])
    ingest(world.db, NAME, [row(n, "loaded") for n in (2, 4, 5)], **PLAIN)
    world.advance(10)
    return world


def rows_of(db, name=NAME, **options):
    """Return the rows that a new reader sees."""
    with db.reader(name, **options) as reader:
        return dict(reader.scan())


def without(rows, keys=ERASED):
    """Return rows without the erased ones."""
    return {key: row for key, row in rows.items() if key not in keys}


def erase(world, keys=ERASED, name=NAME, **options):
    """Purge; return the report."""
    wanted = {**PLAIN, **options}
    return world.run(lambda: purge(world.db, name, keys, **wanted))


def objects_with(world, *parts):
    """Return the objects that contain one of some byte sequences."""
    bodies = {info.key: bytes(world.bucket.get(info.key)) for info in world.bucket.list()}
    return [key for key, body in bodies.items() if any(part in body for part in parts)]


SECRETS = (b"secret 3", b"secret 4")


def kinds_of(report):
    """Return the kinds of pins of all remaining objects."""
    return {pin.kind for one in report.remaining for pin in one.pins}


def names_of(report, kind):
    """Return the names of all pins of a kind."""
    return {pin.name for one in report.remaining for pin in one.pins if pin.kind == kind}


def state(world):
    """Return every object of the bucket, but for the object whose date is the store's clock."""
    found = [(info.key, info.tag) for info in world.bucket.list()]
    return [one for one in found if not one[0].startswith("store/")]


# --- erasing ----------------------------------------------------------------------------


def test_no_object_holds_an_erased_value_and_all_else_is_the_same(world):
    """Neither values nor keys are found in the bytes of any object; other rows are unchanged."""
    before = rows_of(world.db)
    assert objects_with(world, *SECRETS)
    report = erase(world, wait_s=LONG_S)
    assert report.erased
    assert (report.rows_deleted, report.remaining, report.unreadable) == (2, (), ())
    assert objects_with(world, *SECRETS, b"k3", b"k4") == []
    assert rows_of(world.db) == without(before)
    assert len(before) == 10
    assert verify(world.db, NAME, deep=True).problems == []
    assert report.objects_scanned == sum(
        1 for info in world.bucket.list() if info.key.startswith("namespaces/")
    )


def test_a_dry_run_changes_nothing_and_names_every_object(world):
    """Each object with rows of the keys, and the generations that need it."""
    before = state(world)
    report = purge(world.db, NAME, ERASED, apply=False)
    assert state(world) == before
    assert not report.applied
    assert not report.erased
    assert {one.object for one in report.remaining} == set(
        objects_with(world, *SECRETS, b"k3", b"k4")
    ) - {key for key in objects_with(world, b"k4") if "/manifest/" in key}
    assert kinds_of(report) == {"head", "generation"}
    assert report.to_dict()["remaining"][0]["pins"][0]["kind"] == "head"
    assert report.continue_at is None


def test_a_purge_without_waiting_is_continued_by_the_next(world):
    """Each run reports when the next one makes progress; the last one proves the erasure."""
    before = rows_of(world.db)
    report = erase(world)
    assert rows_of(world.db) == without(before), "the rows are gone from the newest state at once"
    runs = 1
    while not report.erased:
        assert runs < 10
        now_s = world.run(world.bucket.now)
        assert report.remaining
        world.advance(max(0.0, datetime.fromisoformat(report.continue_at).timestamp() - now_s) + 1)
        report = erase(world)
        assert report.rows_deleted == report.segments_rewritten == 0
        runs += 1
    assert 2 <= runs <= 4
    assert objects_with(world, *SECRETS) == []


def test_a_purge_of_keys_that_are_nowhere_changes_nothing(world):
    """Nor does a second purge: no commit, no generation."""
    erase(world, wait_s=LONG_S)
    before = state(world)
    report = erase(world)
    assert state(world) == before
    assert report.erased
    assert report.generation == world.head().generation
    assert erase(world, ["never"]).erased
    assert state(world) == before


def test_only_segments_that_hold_the_keys_are_rewritten(world):
    """Others keep their names, though their key ranges hold the keys."""
    fold(world.db, NAME, **PLAIN)
    ingest(world.db, NAME, [row(0, "apart"), row(9, "apart")], **PLAIN)
    fold(world.db, NAME, **PLAIN)
    before = {segment.id for segment in world.head().segments}
    held = {
        key.rpartition("/")[2].removesuffix(".seg")
        for key in objects_with(world, *SECRETS)
        if key.endswith(".seg")
    }
    assert held < before
    report = erase(world)
    after = {segment.id for segment in world.head().segments}
    assert before - after == held
    assert before & after
    assert report.segments_rewritten == len(held) + 1, "and the fold of the deletes"


def test_tombstones_of_the_keys_are_not_kept(world):
    """Deleted before the purge or by it: no tombstone names the key; range deletes stay."""
    with world.db.writer(NAME, background=False) as writer:
        writer.delete("k3")
        writer.delete_range("k6", "k8")
    fold(world.db, NAME, **PLAIN)
    before = rows_of(world.db)
    report = erase(world, wait_s=LONG_S)
    assert report.erased
    assert report.rows_deleted == 1, "k3 had no row"
    assert objects_with(world, b"k3", b"k4") == []
    assert rows_of(world.db) == without(before)
    compact(world.db, NAME, full=True)
    assert rows_of(world.db) == without(before)


def test_a_row_whose_time_has_expired_is_erased(world):
    """It is deleted like a visible one: a reader with a slower clock does not see it again."""
    with world.db.writer(NAME, background=False) as writer:
        writer.upsert([row(3, "expires")], ttl_s=1)
    world.advance(60)
    report = erase(world, ["k3"], wait_s=LONG_S)
    assert (report.erased, report.rows_deleted) == (True, 1)
    assert objects_with(world, b"secret 3") == []


def test_the_bound_of_a_load_is_reported_apart():
    """The record of a load stays in the log and names the first and the last key of its rows."""
    world = World()
    world.db.create(NAME, SCHEMA)
    ingest(world.db, NAME, [row(3), row(4), row(5)], **PLAIN)
    world.advance(10)
    report = erase(world, ["k3"], wait_s=LONG_S)
    assert report.erased
    assert objects_with(world, b"secret 3") == []
    assert sorted(report.bounds) == sorted(objects_with(world, b"k3"))
    assert any(key.endswith(".wal") for key in report.bounds)
    assert list(rows_of(world.db)) == ["k4", "k5"]


def test_conditions_that_name_a_key_are_traces_of_it(world):
    """The log records what a batch was conditional on, values included."""
    with world.db.writer(NAME, background=False) as writer:
        batch = reef.Batch().put("k9", {"text": "other", "n": 1})
        writer.write(batch, when=[reef.equals("k3", "text", "secret 3 second")])
    conditional = [key for key in objects_with(world, b"secret 3 second") if key.endswith(".wal")]
    found = {one.object for one in purge(world.db, NAME, ["k3"], apply=False).remaining}
    assert conditional[-1] in found
    assert erase(world, wait_s=LONG_S).erased
    assert objects_with(world, *SECRETS) == []


def test_a_purge_of_many_keys_takes_several_commits(world, monkeypatch):
    """The deletes are cut into batches; all of them are folded and swept."""
    monkeypatch.setattr(sys.modules["reef.jobs.purge.job"], "KEYS_AT_ONCE", 3)
    keys = [f"k{number}" for number in range(8)]
    report = erase(world, keys, wait_s=LONG_S)
    assert (report.erased, report.rows_deleted) == (True, 8)
    assert objects_with(world, *(b"secret %d" % number for number in range(8))) == []
    assert list(rows_of(world.db)) == ["k8", "k9"]


def test_search_indexes_are_written_again_without_the_rows():
    """They are in the rewritten segments: no word of an erased row is left, all others are."""
    world = World()
    schema = pa.schema([("id", pa.string()), ("text", pa.string())])
    world.db.create(NAME, schema, indexes=[reef.text_index("text")])
    with world.db.writer(NAME, background=False) as writer:
        writer.upsert([{"id": f"k{n}", "text": f"secretword{n} common"} for n in range(9)])
    fold(world.db, NAME, **PLAIN)
    world.advance(10)
    assert erase(world, ["k3"], wait_s=LONG_S).erased
    assert objects_with(world, b"secretword3") == []
    (entry,) = [entry for entry in world.head().segments if entry.rows]
    assert read_tail(world.bucket, world.names, entry).footer.indexes, "it is searched by its index"
    with world.db.reader(NAME) as reader:
        assert reader.search(text=("text", "secretword3"), k=3).num_rows == 0
        assert reader.search(text=("text", "secretword4"), k=3)["id"].to_pylist() == ["k4"]


# --- pins -------------------------------------------------------------------------------


def test_a_snapshot_pins_until_it_is_released(world):
    """It is listed by name and stays readable; with `release_snapshots` it goes."""
    before = rows_of(world.db)
    pin = world.db.snapshot(NAME, "monday")
    other = world.db.snapshot(NAME, "other", generation=1)
    report = erase(world, wait_s=LONG_S)
    assert not report.erased
    assert names_of(report, "snapshot") == {"monday", "other"}
    assert report.continue_at is None, "no time removes it"
    assert rows_of(world.db, snapshot=pin) == before
    other.release()
    report = erase(world, release_snapshots=True, wait_s=LONG_S)
    assert (report.erased, report.snapshots_released) == (True, ("monday",))
    assert objects_with(world, *SECRETS) == []
    assert world.db.snapshots(NAME) == []


def test_a_purge_that_is_refused_releases_no_snapshot(world):
    """A load with `live_wins` is open; the snapshots were gone, and the rows were not."""
    world.db.snapshot(NAME, "kept")
    BulkJob(world.db, NAME, live_wins=True)
    with pytest.raises(reef.ConflictError, match="live_wins is open"):
        erase(world, release_snapshots=True)
    assert [snapshot.name for snapshot in world.db.snapshots(NAME)] == ["kept"]


def test_snapshots_of_other_rows_are_not_released(world):
    """Only those whose objects hold the keys are in the way."""
    with world.db.writer(NAME, background=False) as writer:
        for key in ERASED:
            writer.delete(key)
        writer.upsert([row(1, "second")])
    fold(world.db, NAME, **PLAIN)
    compact(world.db, NAME, full=True, **PLAIN)
    world.db.snapshot(NAME, "after")
    assert objects_with(world, *SECRETS), "retained generations have them"
    report = erase(world, release_snapshots=True, wait_s=LONG_S)
    assert (report.erased, report.snapshots_released) == (True, ())
    assert [one.name for one in world.db.snapshots(NAME)] == ["after"]


def test_cursors_and_leases_are_named(world):
    """A cursor holds the log, a reader's lease its generation."""
    world.db.cursor(NAME, "copier", after_lsn=0)
    reader = world.run(lambda: world.db.reader(NAME, pin=True, lease_ttl_s=DAY_S))
    before = rows_of(world.db)
    report = erase(world, wait_s=LONG_S)
    assert names_of(report, "cursor") == {"copier"}
    (lease,) = names_of(report, "lease")
    assert "reader" in lease or "pinned" in lease or " at " in lease
    assert dict(reader.scan()) == before
    reader.close()
    report = erase(world, wait_s=LONG_S)
    assert kinds_of(report) == {"cursor"}
    world.db.drop_cursor(NAME, "copier")
    assert erase(world, wait_s=LONG_S).erased
    assert objects_with(world, *SECRETS) == []


def test_a_branch_pins_until_it_is_purged_too(world):
    """It is listed by name; with `include_branches` it loses the rows and its origin's objects."""
    world.db.branch(NAME, "child")
    world.db.branch("child", "grandchild")
    with world.db.writer("child", background=False) as writer:
        writer.upsert([row(4, "of the child"), row(7, "of the child")])
    rows = {name: rows_of(world.db, name) for name in (NAME, "child", "grandchild")}
    report = erase(world, wait_s=LONG_S)
    assert not report.erased
    assert {"child", "grandchild"} <= names_of(report, "branch")
    assert rows_of(world.db, "child") == rows["child"]
    report = erase(world, include_branches=True, wait_s=10 * LONG_S)
    assert report.erased, report.to_dict()
    assert objects_with(world, *SECRETS) == []
    for name, before in rows.items():
        assert rows_of(world.db, name) == without(before)
        assert verify(world.db, name, deep=True).problems == []


def independent_branches(world):
    """Make a branch and a branch of it, and let both release their origins."""
    world.db.branch(NAME, "child")
    world.db.branch("child", "grandchild")
    for name in ("grandchild", "child"):
        fold(world.db, name, **PLAIN)
        compact(world.db, name, full=True, **PLAIN)
    for _ in range(4):
        sweep_all(world, "grandchild", "child")
    assert not locate(world.db.store, NAME).found.manifest.branches


def test_a_branch_that_has_released_its_origin_is_purged_too(world):
    """It was found by the pin that it had released: rows were left behind, and none was reported.

    Without `include_branches` the report names it, since its rows are its own.
    """
    independent_branches(world)
    rows = {name: rows_of(world.db, name) for name in (NAME, "child", "grandchild")}
    dry = erase(world, apply=False)
    report = erase(world, wait_s=LONG_S)
    assert report.erased
    assert report.independent == dry.independent == ("child", "grandchild")
    assert rows_of(world.db, "child") == rows["child"]
    report = erase(world, include_branches=True, wait_s=10 * LONG_S)
    assert (report.erased, report.independent) == (True, ())
    assert objects_with(world, *SECRETS) == []
    for name, before in rows.items():
        assert rows_of(world.db, name) == without(before)


def test_a_dropped_branch_that_has_released_its_origin_is_reported(world):
    """It is not purged, and its objects are listed until it is swept or undropped."""
    independent_branches(world)
    world.db.drop("child")
    report = erase(world, include_branches=True, wait_s=LONG_S)
    assert not report.erased
    assert {one.object.split("/")[1] for one in report.remaining} == {"child"}
    world.advance(2 * DAY_S)
    sweep_all(world, "child")
    sweep_all(world, "child")
    assert erase(world, include_branches=True, wait_s=LONG_S).erased
    assert erase(world).independent == ("grandchild",)


def test_a_search_for_independent_branches_costs_a_few_requests_for_each_namespace(world):
    """Once in a run, however often it scans."""
    counted = Requests(world.bucket)
    db = Database(counted)
    first = counted.cost(lambda: purge(db, NAME, ["absent"]))
    for number in range(10):
        world.db.create(f"other-{number}")
    assert counted.cost(lambda: purge(db, NAME, ["absent"])) - first <= 4 * 10 + 5


def test_an_erased_key_at_the_end_of_a_segment_is_reported_as_a_bound():
    """The lineage names the key with a zero byte behind it, which was not compared with keys."""
    world = World()
    world.db.create(NAME)
    rows = [{"id": key, "value": b"1"} for key in (b"amy", b"mike", b"zoe")]
    ingest(world.db, NAME, rows, **PLAIN)
    with world.db.writer(NAME, background=False) as writer:
        writer.put("amy", b"2")
    fold(world.db, NAME, **PLAIN)
    compact(world.db, NAME, full=True, **PLAIN)
    world.advance(10)
    report = erase(world, ["zoe"], wait_s=LONG_S)
    assert report.erased
    assert set(objects_with(world, b"zoe")) == set(report.bounds)


def test_a_purge_of_a_branch_leaves_its_origin_alone(world):
    """The rows of the origin are its own; the report names it."""
    before = rows_of(world.db)
    world.db.branch(NAME, "child")
    report = erase(world, name="child", wait_s=LONG_S)
    assert (report.erased, report.origin) == (True, NAME)
    assert rows_of(world.db, "child") == without(before)
    assert rows_of(world.db) == before
    sweep_all(world, NAME, "child")
    assert rows_of(world.db) == before
    assert rows_of(world.db, "child") == without(before)


def test_a_load_in_the_inherited_log_of_a_branch_is_erased():
    """The branch has neither the object nor a manifest that names it: the origin's log does."""
    world = World()
    world.db.create(NAME, SCHEMA)
    ingest(world.db, NAME, [row(number) for number in range(3)], **PLAIN)
    world.db.branch(NAME, "child")
    assert len(purge(world.db, "child", ["k1"], apply=False).remaining) == 1
    assert erase(world, ["k1"], "child", wait_s=LONG_S).erased
    assert list(rows_of(world.db, "child")) == ["k0", "k2"]
    assert len(rows_of(world.db)) == 3


def sweep_all(world, *names):
    """Sweep until everything that was condemned is deleted."""
    for _ in range(3):
        for name in names:
            world.run(
                lambda name=name: sweep(
                    world.db, name, apply=True, force=True, retain_generations_s=0.0
                )
            )
        world.advance(GRACE_S + 10)


def test_earlier_incarnations_are_erased(world):
    """A name that was dropped and created again: its former rows cannot be undropped any more."""
    world.run(lambda: world.db.drop(NAME))
    world.db.create(NAME, SCHEMA)
    with world.db.writer(NAME, background=False) as writer:
        writer.upsert([row(3, "of another life"), row(5, "of another life")])
    world.advance(10)
    report = erase(world, wait_s=LONG_S)
    assert report.erased
    assert objects_with(world, *SECRETS) == []
    assert list(rows_of(world.db)) == ["k5"]


def test_a_namespace_that_was_just_dropped_is_not_cleared(world):
    """A purge refuses it and leaves it to be undropped."""
    before = rows_of(world.db)
    world.run(lambda: world.db.drop(NAME))
    with pytest.raises(reef.NotFoundError, match="dropped"):
        erase(world)
    world.db.undrop(NAME)
    assert rows_of(world.db) == before


def test_rows_of_an_open_load_are_named_by_their_job(world):
    """They were never committed: the job decides."""
    erase(world, wait_s=LONG_S)
    with BulkJob(world.db, NAME) as job:
        staged = stage(world.bucket, NAME, {b"k3": b"staged"}, job.id)
        report = erase(world)
        assert [one.object for one in report.remaining] == [world.names.segment(staged.id)]
        assert names_of(report, "job") == {job.id}
    assert erase(world, wait_s=LONG_S).erased


def test_the_last_batch_of_a_stream_is_named(world):
    """It is kept until the stream commits another one."""
    appender = StreamAppender(world.db, NAME)
    ops = Ops(
        pa.array([b"k3"], pa.binary()),
        pa.array([0], pa.uint8()),
        fields={1: pa.array(["secret 3 streamed"]), 2: pa.array([1], pa.int64())},
    )
    lsn = appender.append("spark", 1, [ops]).lsn
    report = erase(world, wait_s=LONG_S)
    assert [one.object for one in report.remaining] == [world.names.wal_object(lsn)]
    assert names_of(report, "stream") == {"spark"}
    appender.append("spark", 2, [])
    assert erase(world, wait_s=LONG_S).erased
    assert objects_with(world, *SECRETS) == []


def test_damaged_objects_prove_nothing(world):
    """An object that cannot be decoded is listed, and the erasure is not reported as complete."""
    erase(world, wait_s=LONG_S)
    key = f"{world.names.root}/quarantine/segments-lost.seg"
    world.bucket.create(key, b"secret 3 in pieces")
    report = erase(world)
    assert report.unreadable == (key,)
    assert not report.erased
    assert report.to_dict()["erased"] is False


# --- concurrent processes -----------------------------------------------------------------


def test_a_row_that_is_written_during_a_purge_is_kept(world):
    """A writer that puts a key again after its delete keeps it, with the old versions gone."""
    writer = world.db.writer(NAME, background=False)
    again = At(
        world.bucket, "list", "/segments/", lambda: writer.upsert([row(3, "anew")]), after=False
    )
    purge_with = Database(again)
    deletes = []
    again.armed = False
    real = Log.fill

    def fill(log, lsn, body):
        deletes.append(lsn)
        again.armed = len(deletes) == 2
        return real(log, lsn, body)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Log, "fill", fill)
        world.run(lambda: purge(purge_with, NAME, ERASED, apply=True, **PLAIN))
    writer.close()
    assert rows_of(world.db)["k3"]["text"] == "secret 3 anew"
    assert "k4" not in rows_of(world.db)


def test_a_key_that_appears_after_it_was_looked_up_is_kept(world):
    """The absence of a row holds up to the LSN that was read, and no further."""
    writer = world.db.writer(NAME, background=False)
    late = At(
        world.bucket, "create", "/wal/", lambda: writer.upsert([{**row(0, "late"), "id": "knew"}])
    )
    report = world.run(lambda: purge(Database(late), NAME, ["k3", "knew"], apply=True, **PLAIN))
    writer.close()
    assert report.rows_deleted == 1
    assert rows_of(world.db)["knew"]["text"] == "secret 0 late"
    fold(world.db, NAME)
    assert rows_of(world.db)["knew"]["text"] == "secret 0 late"


class Moving(Wrapper):
    """A bucket in which something happens just after all objects of a namespace were listed."""

    def __init__(self, inner, happens):
        super().__init__(inner)
        self._happens = happens

    def list(self, *where):
        listed = list(self.inner.list(*where))
        if where[0] == f"namespaces/{NAME}/" and self._happens:
            self._happens.pop()()
        return iter(listed)


def moving(world, times):
    """Return a database next to which all rows move into new objects after a listing."""

    def move():
        with world.db.writer(NAME, background=False) as writer:
            writer.upsert([row(11)])
        fold(world.db, NAME, **PLAIN)
        compact(world.db, NAME, full=True, **PLAIN)
        world.advance(10)
        world.sweep_twice()

    return Database(Moving(world.bucket, [move] * times))


def test_a_key_whose_row_moves_during_the_scan_is_erased(world):
    """The scan read no object that held the row, and took it for erased (simulator:
    rows_are_erased_late, seed 1614). It is repeated.
    """
    found = world.run(lambda: purge(moving(world, 1), NAME, ERASED, apply=False))
    assert found.remaining
    assert found.unreadable == ()
    report = world.run(lambda: purge(moving(world, 1), NAME, ERASED, wait_s=LONG_S, **PLAIN))
    assert report.erased
    assert report.rows_deleted == 2
    assert objects_with(world, *SECRETS) == []


def test_nothing_is_proved_while_rows_move_during_every_scan(world):
    """The report names the objects that were missed."""
    report = world.run(lambda: purge(moving(world, 20), NAME, ERASED, apply=False))
    assert not report.erased
    assert any(key.endswith(".seg") for key in report.unreadable)


def test_a_live_writer_and_cursors_see_the_deletes(world):
    """A purge deletes by commits: the writer is not fenced, and a registered consumer sees them."""
    cursor = world.db.cursor(NAME, "copier")
    with world.db.writer(NAME, background=False) as writer:
        erase(world)
        writer.upsert([row(1, "third")])
        assert writer.get("k3") is None
        assert writer.get("k5")["text"] == "secret 5 loaded"
    changes = [(change.op, change.key) for change in cursor]
    assert changes == [("delete", "k3"), ("delete", "k4"), ("put", "k1")]


def test_a_rebuild_after_a_purge_has_the_same_rows(world):
    """Manifests are lost: segments and log give the purged state."""
    before = rows_of(world.db)
    erase(world)
    for info in list(world.bucket.list(world.names.manifests)):
        world.bucket.delete_many([info.key])
    world.run(lambda: rebuild(world.db, NAME, apply=True))
    assert rows_of(world.db) == without(before)


class Mortal(Hooked):
    """Fails for good after some requests that change something."""

    def __init__(self, inner, left):
        super().__init__(inner)
        self.left = left

    def around(self, request, send):
        self.left -= request.operation in CHANGES
        if self.left < 0:
            raise reef.UnavailableError("dead")
        return send(request)


CHANGES = {"create", "put", "replace", "upload", "compose", "copy", "delete"}


def test_a_purge_that_dies_at_any_request_is_finished_by_the_next():
    """Whatever request is the last one, no other row changes, and the next run erases the rows."""
    died = 0
    for left in range(60):
        world = made()
        before = rows_of(world.db)
        store = Mortal(world.bucket, left)
        try:
            world.run(lambda store=store: purge(Database(store), NAME, ERASED, apply=True, **PLAIN))
        except reef.ReefError:
            died += 1
        assert without(rows_of(world.db)) == without(before)
        assert erase(world, wait_s=LONG_S).erased, left
        assert rows_of(world.db) == without(before)
        assert objects_with(world, *SECRETS) == []
        if store.left >= 0:
            break
    assert died > 5
    assert store.left >= 0, "the last one ran to its end"


def test_deletes_of_a_purge_that_died_before_its_last_batch_are_erased(world):
    """They are the last batch of the stream of purges, which is kept until another one follows."""
    appender = StreamAppender(world.db, NAME)
    keys = pa.array([b"k3", b"k4"], pa.binary())
    appender.append("reef:purge", 1, [Ops(keys, pa.array([1, 1], pa.uint8()), fields={})])
    with world.db.writer(NAME, background=False) as writer:
        writer.upsert([row(1, "second")])
    fold(world.db, NAME, **PLAIN)
    report = erase(world, wait_s=LONG_S)
    assert (report.erased, report.rows_deleted) == (True, 0)
    assert objects_with(world, b"k3", b"k4") == []


def test_range_deletes_still_hide_rows_of_other_segments(world):
    """The segment with the range delete is rewritten, the one with the rows is not."""
    with world.db.writer(NAME, background=False) as writer:
        fold(world.db, NAME, **PLAIN)
        writer.delete_range("k6", "k9")
        writer.upsert([{**row(4, "third"), "id": "k4b"}])
    fold(world.db, NAME, **PLAIN)
    before = rows_of(world.db)
    assert "k7" not in before
    erase(world, ["k4b"])
    assert rows_of(world.db) == without(before, ["k4b"])
    assert erase(world, ["k4b"], wait_s=LONG_S).erased
    assert rows_of(world.db) == without(before, ["k4b"])


def test_a_namespace_that_is_dropped_during_a_purge_can_be_undropped(world, monkeypatch):
    """Only earlier incarnations are cleared at once."""
    before = rows_of(world.db)

    def reach(_, point):
        if point == "purge rewritten":
            world.db.drop(NAME)
            world.advance(60)

    monkeypatch.setattr(type(world.bucket.runtime), "reach", reach)
    with pytest.raises(reef.NotFoundError, match="dropped"):
        erase(world)
    assert NAME in world.db.namespaces(dropped=True)
    world.db.undrop(NAME)
    assert rows_of(world.db) == without(before)


# --- input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "options", "message"),
    [
        ([], {}, "keys is empty"),
        ("k3", {}, "keys must be a list"),
        ([b""], {}, "1 to 65535 bytes"),
        ([b"\xff"], {}, "not UTF-8"),
        (["k3"], {"wait_s": -1}, "wait_s=-1"),
        (["k3"], {"wait_s": True}, "wait_s=True"),
        (["k3"], {"colour": 1}, "colour"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(world, keys, options, message):
    """The message names the key or the option."""
    before = state(world)
    with pytest.raises(reef.InvalidInputError, match=message):
        purge(world.db, NAME, keys, apply=True, **options)
    assert state(world) == before
