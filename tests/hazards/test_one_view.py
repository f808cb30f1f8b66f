"""H69 and its siblings: a read, a decision and an outcome each belong to one state.

The random machine is in tests/simulation/reading_scenarios.py; here is one schedule of each root.
"""

import threading
from types import SimpleNamespace

import pyarrow as pa
import pytest

import reef
from reef.engine.handles.database import Database
from reef.engine.handles.transaction import Footprints, Reads
from reef.engine.log.log import Log
from reef.engine.read.caches import MISSING, RowCache
from reef.engine.read.memtable import Memtable
from reef.engine.read.view import View
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.wal_object import Job, OneOp, WalKind
from reef.jobs import fold, ingest
from reef.manifest.dedup import DedupWindow
from reef.paths import Namespace
from reef.stores import (
    Meter,
    Outcome,
    ReadBack,
    Retry,
    Wrapper,
    WriteResult,
    agree_on_cas,
)
from reef.testing import Simulation
from reef.types import KeyRange
from tests.support import bulk_jobs
from tests.support.sweep_world import GRACE_S, At, World

NAME = "users"
TABLE = pa.schema([("id", pa.string()), ("a", pa.int64()), ("b", pa.int64())])


# --- one view per read ------------------------------------------------------------------


def in_thread(call):
    """Run a call in a thread of its own, to its end."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


READS = {
    "get": lambda writer: writer.get("k"),
    "get, some columns": lambda writer: writer.get("k", columns=["id", "a", "b"]),
    "get_many": lambda writer: _found(writer.get_many(["k"]).to_pylist()[0]),
    "scan": lambda writer: dict(writer.scan()).get("k"),
    "scan_arrow": lambda writer: next(
        iter(writer.scan_arrow(end="l").read_all().to_pylist()), None
    ),
    "in a transaction": lambda writer: writer.transaction().get("k"),
}


def _found(row):
    return {n: row[n] for n in TABLE.names} if row.pop("_found") else None


@pytest.mark.parametrize("read", READS)
def test_H69_rows_and_ingested_segments_of_one_instant(monkeypatch, read):
    """H69: a delete and a load of a patch right after the memtable was read do not mix.

    Root: the versions of a key and the list of ingested segments were read one after the other,
    so that an old row got a newer patch. Neither of the two states had that row.
    """
    db = reef.open("memory://")
    db.create(NAME, TABLE)
    writer = db.writer(NAME, background=False, row_cache_bytes=0)
    writer.upsert([{"id": "k", "a": 0, "b": 0}])
    fold(db, NAME)
    armed = [True]

    def change():
        writer.delete("k")
        ingest(db, NAME, [{"id": "k", "b": 1}], op="patch")
        writer.upsert([{"id": "other", "a": 9, "b": 9}])  # it meets the load in its slot

    def racing(original):
        def raced(self):
            cut = original(self)
            if armed[0]:
                armed[0] = False
                in_thread(change)
            return cut

        return raced

    monkeypatch.setattr(Memtable, "tidy_cut", racing(Memtable.tidy_cut))
    monkeypatch.setattr(View, "_cut", racing(View._cut))  # of a transaction
    try:
        row = READS[read](writer)
    except reef.ConflictError:  # a transaction may lose, and says so
        row = None
    assert not armed[0]
    assert row in ({"id": "k", "a": 0, "b": 0}, None)
    assert writer.get("k") is None


def test_H69_objects_that_landed_early_do_not_move_the_last_lsn():
    """With ack="independent" LSN 5 may be there before LSN 4: a state is known up to LSN 3.

    Root: a scan that continues after a sweep compared with the highest LSN that it had seen, and so
    did not notice an object that came in below it.
    """
    memtable = Memtable(DEFAULT_SCHEMA, 1)
    memtable.apply(3, [OneOp(b"a", 1, b"1")])
    memtable.apply(5, [OneOp(b"b", 1, b"1")], is_early=True)
    assert memtable.cut().last_lsn == 3
    memtable.apply(4, [OneOp(b"c", 1, b"1")])
    memtable.pass_over(5)
    assert memtable.cut().last_lsn == 5


# --- a local log above the bucket -------------------------------------------------------


def local_writer(tmp_path, **settings):
    """Return a database and a writer that uploads on request."""
    db = reef.open(f"file://{tmp_path}/bucket")
    db.create(NAME, TABLE)
    settings = {"upload_interval_ms": 60_000.0, "background": False, **settings}
    return db, db.writer(NAME, durability="local", local_log=tmp_path / "log", **settings)


def test_H69_both_tables_of_a_local_writer_are_read_at_one_instant(tmp_path):
    """H69: a view whose overlay was replaced meanwhile is not laid over a newer memtable.

    Root: the overlay and the memtable under it were read one after the other. The overlay held
    a patch; the row under it was replaced; together they showed a row that never was.
    """
    _, writer = local_writer(tmp_path)
    writer.upsert([{"id": "k", "a": 0, "b": 0}])
    writer.flush()
    writer.patch([{"id": "k", "a": 1}])
    view = writer._view()
    writer.flush()
    writer.upsert([{"id": "k", "a": 9, "b": 9}])
    writer.flush()
    schema = writer._manifest.schema
    a, b = (next(f.number for f in schema.fields if f.name == name) for name in "ab")
    assert view.get(b"k", 0).values == {a: 9, b: 9}
    assert [piece.fields[a].to_pylist() for piece in view.scan(KeyRange(), 0)] == [[9]]
    writer.close()


def test_H69_a_memtable_that_was_replaced_is_not_read_below_a_live_overlay(tmp_path):
    """H69: a fold has replaced the memtable of a view. The overlay above it still grows: it shows
    a row that was written after a conditional one, which is in the newer memtable only."""
    db = reef.open(f"file://{tmp_path}/bucket")
    settings = {"durability": "local", "local_log": tmp_path / "log", "background": False}
    with db.writer(NAME, upload_interval_ms=60_000.0, **settings) as writer:
        writer.put("a", b"1")
        writer.flush()
        view = writer._view()
        fold(db, NAME)
        writer.refresh()
        writer.put("first", b"1", when=[reef.absent("first")])
        writer.put("second", b"1")
        found = view.get_each([b"first", b"second"], 0)
        assert [row is not None for row in found] == [True, True]


class Racing:
    """A lock after whose next release something happens at once."""

    def __init__(self, lock, change):
        self.lock, self.change = lock, change

    def __enter__(self):
        return self.lock.__enter__()

    def __exit__(self, *error):
        self.lock.__exit__(*error)
        change, self.change = self.change, None
        if change is not None:
            change()


def test_H69_versions_and_ingested_segments_are_read_under_one_lock():
    """H69: a load that comes in right after the lock was released is in neither of the two."""
    table = Memtable(DEFAULT_SCHEMA, 1)
    table.apply(1, [OneOp(b"k", 1, b"old")])
    reads = (table.cut, lambda: View(None, None, table).cut()[1][0])
    for lsn, read in enumerate(reads, 2):
        before = table.ingested
        segment = SimpleNamespace(lsn_max=lsn)
        table.lock = Racing(table.lock, lambda lsn=lsn, new=segment: table.ingest(lsn, [new]))
        assert read().ingested == before
        assert table.ingested == (*before, segment)


def test_H69_an_uploaded_row_does_not_hide_a_newer_load(tmp_path):
    """H69: a row that is in the bucket counts at its LSN, though the overlay still holds it.

    Root: rows stay in the overlay until the uploader removes them. A load behind them in the log
    was hidden until then, partly, and the row cache kept the older row for good.
    """
    db, writer = local_writer(tmp_path)
    front, seen = writer._buffer, []
    removing = front.note_progress

    def load_first():
        if not seen:
            rows = [{"id": "k", "a": 2, "b": 2}, {"id": "l", "a": 2, "b": 2}]
            ingest(db, NAME, rows)
            writer._committer.rebase()
            seen.extend([writer.get("k"), dict(writer.scan())["k"], writer.get("l")])
            seen.append(_found(writer.get_many(["k"]).to_pylist()[0]))
        removing()

    front.note_progress = load_first
    writer.upsert([{"id": "k", "a": 1, "b": 1}])
    writer.flush()
    assert [row["a"] for row in seen] == [2, 2, 2, 2]
    assert writer.get("k") == {"id": "k", "a": 2, "b": 2}
    writer.close()


def test_H69_the_row_cache_keeps_nothing_while_two_writes_are_applied():
    """A local writer applies uploads and new batches in two threads, at the same time.

    Root: a count that was odd during a write was even during two; a row that was read before
    them was kept, and served after them.
    """
    cache = RowCache(1 << 20)
    cache.applying([OneOp(b"k", 1, b"new")])
    cache.applying([OneOp(b"l", 1, b"new")])
    cache.keep(b"k", b"old", 3, cache.writes)
    assert cache.rows.get(b"k", MISSING) is MISSING
    writes = cache.writes
    cache.applied()
    cache.keep(b"k", b"old", 3, cache.writes)
    cache.applied()
    cache.keep(b"k", b"old", 3, writes)
    assert cache.rows.get(b"k", MISSING) is MISSING
    cache.keep(b"k", b"new", 3, cache.writes)
    assert cache.rows[b"k"] == b"new"


# --- keys in independent order -----------------------------------------------------------


class Slow(Wrapper):
    """Lets one PUT wait for five seconds."""

    armed = None

    def create(self, key, body):
        if self.armed and key.endswith(self.armed):
            self.armed = None
            self.runtime.sleep(5)
        return self.inner.create(key, body)


@pytest.mark.parametrize("ack", ["prefix", "independent"])
def test_H19_a_key_counts_once_in_whichever_order_objects_land(ack):
    """H19: a keyed batch behind an open slot is decided again when a load of its key takes it.

    Root: in independent mode an object had no `after` and was acknowledged as it landed, though
    whether its key is new had been decided on the slots before it.
    """
    sim = Simulation(0)
    agree_on_cas(sim.bucket)
    node, ends = sim.process("w"), {}

    def run():
        slow = Slow(node.raw_store())
        db = Database(ReadBack(Retry(Meter(slow))))
        db.create(NAME)
        bulk_jobs.append(sim.bucket, NAME, WalKind.BEGIN, Job("j1", key="K"))
        segment = bulk_jobs.stage(sim.bucket, NAME, {b"k": b"load"}, "j1")
        writer = db.writer(NAME, max_parallel_writes=3, ack=ack, group_bytes_max=1)
        writer.put("a", b"0")
        first = writer._committer._next_lsn
        slow.armed = f"{first:020}.wal"
        futures = [
            writer.put("a", b"1", wait=False),
            writer.put("k", b"batch", wait=False, idempotency_key="K"),
            writer.put("b", b"1", wait=False),
        ]
        node.runtime.sleep(0.5)
        ends["early"] = [future.done() for future in futures]
        job = Job("j1", key="K", segments=(segment,))
        bulk_jobs.append(sim.bucket, NAME, WalKind.INGEST, job, lsn=first)
        ends["errors"] = [type(future.exception()) for future in futures]
        changes = Database(sim.bucket).reader(NAME).changes(after_lsn=0)
        ends["k"] = [change.row for change in changes if change.key == b"k"]
        ends["rows"] = dict(writer.scan())

    node.spawn(run)
    sim.run()
    sim.close()
    assert ends["early"] == [False, False, ack == "independent"], "only keys wait for their turn"
    assert ends["errors"] == [type(None), reef.InvalidInputError, type(None)]
    assert ends["k"] == [b"load"]
    assert ends["rows"] == {b"a": b"1", b"b": b"1", b"k": b"load"}


# --- outcomes ---------------------------------------------------------------------------


class Dead(Wrapper):
    """Requests into the log never arrive, and there is no response."""

    armed = False

    def create(self, key, body):
        if self.armed and "/wal/" in key:
            return WriteResult(Outcome.UNKNOWN, cause=reef.UnavailableError("no response"))
        return self.inner.create(key, body)


@pytest.mark.parametrize("body", [b"another body", b"first body"])
def test_H66_an_outcome_does_not_change_when_the_log_is_folded(body):
    """A batch that never landed stays rejected, though its key was committed by another object.

    Root: below the floor the key alone was compared, not whose object had committed it.
    """
    sim = Simulation(0)
    agree_on_cas(sim.bucket)
    node, outcomes = sim.process("w"), []

    def run():
        dead = Dead(node.raw_store())
        writer = Database(ReadBack(Retry(Meter(dead)))).writer(NAME, commit_deadline_s=5.0)
        dead.armed = True
        with pytest.raises(reef.OutcomeUnknownError) as unknown:
            writer.put("k", b"first body", idempotency_key="K")
        db = Database(sim.bucket)
        other = db.writer(NAME)
        receipt = other.put("k", body, idempotency_key="K")
        outcomes.extend([other.resolve(unknown.value), other.resolve(receipt)])
        fold(db, NAME)
        outcomes.extend([other.resolve(unknown.value), other.resolve(receipt), other.resolve("K")])

    node.spawn(run)
    sim.run()
    sim.close()
    assert outcomes == ["rejected", "committed", "rejected", "committed", "committed"]


def test_a_key_that_left_the_window_proves_nothing():
    """Its first batch may have counted: then the same key was committed again, much later."""
    db = reef.open("memory://")
    bulk_jobs.make_with_window(db, NAME, 2)
    writer = db.writer(NAME, background=False)
    first = writer.put("k", b"1", idempotency_key="K")
    for number in range(3):
        writer.put("other", b"1", idempotency_key=f"other-{number}")
    writer.put("k", b"2", idempotency_key="K")
    assert writer.resolve(first) == "committed"
    fold(db, NAME)
    writer.refresh()
    assert writer.resolve(first) == "unknown"
    assert not DedupWindow.of(writer._manifest).reaches_back_to(first.lsn)


# --- second lines of defence --------------------------------------------------------------


def test_H41_a_transaction_without_footprints_is_too_old_as_well():
    """H41: rows applied unseen count, also where nothing was noted before them.

    Root of the mutant that lived: the number of footprints alone does not move when none is kept.
    """
    footprints = Footprints(1 << 20)
    number = footprints.begin()
    reads = Reads({b"k"})
    assert footprints.conflict(number, reads) is None
    footprints.lost_track()
    assert "too long" in footprints.conflict(number, reads)
    assert footprints.conflict(footprints.begin(), reads) is None


def test_H41_a_load_that_a_fold_has_passed_is_a_conflict():
    """H41: the writer begins again from the head, and cannot know which commits came in between."""
    db = reef.open("memory://")
    writer = db.writer(NAME, background=False)
    writer.put("k", b"1")
    tx = writer.transaction()
    tx.put("copy", tx.get("k"))
    ingest(db, NAME, {"id": [b"k"], "value": [b"2"]})
    fold(db, NAME)
    with pytest.raises(reef.ConflictError):
        tx.commit()
    assert writer.get("copy") is None


@pytest.mark.parametrize("opens", [True, False], ids=["opens", "refreshes"])
def test_H10_a_listing_after_a_stall_is_checked_against_the_head(opens):
    """H10: between the head and the listing everything is folded and swept; a reader sees it all.

    Root of the mutant that lived: a listing with a hole at its first slot was taken for the end of
    the log, so a reader that trusted it would miss rows that were acknowledged long before.
    """
    world = World()
    world.db.create(NAME)
    with world.db.writer(NAME, background=False) as writer:
        writer.put("a", b"1")
        world.fold()
        reader = None if opens else Database(world.bucket).reader(NAME)
        for number in range(3):
            last = writer.put(f"k{number}", b"1")

    def stall():
        world.advance(10)
        world.fold()
        world.advance(GRACE_S + 10)
        assert world.sweep_twice()

    store = At(world.bucket, "list", "/wal/", stall)
    if opens:
        reader = Database(store).reader(NAME)
    else:
        world.advance(GRACE_S)  # so long ago that it lists
        reader._log = Log(store, Namespace(NAME))
        reader._reopen()
    assert not store.armed
    assert reader.last_lsn >= last.lsn, "at once, not only after the next refresh"
    assert set(dict(reader.scan())) == {b"a", b"k0", b"k1", b"k2"}
