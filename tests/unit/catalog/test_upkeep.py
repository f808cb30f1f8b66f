"""Checkpoints, retention, leases and the three phases of collection."""

import threading
from dataclasses import replace

import pytest

from reef import catalog as catalogs
from reef.catalog import Catalog, Retention, SeqRange
from reef.catalog import head as register
from reef.catalog import upkeep as collection
from reef.catalog.checkpoints import ListedCheckpoint
from reef.catalog.head import CatalogHead, CheckpointRef
from reef.catalog.snapshot import MARGIN_S, CatalogSnapshot
from reef.catalog.upkeep import GcPlan, retained_checkpoints
from reef.errors import ConflictError, ErrorKind, InvalidInputError
from reef.stores import ReadBack
from reef.stores.memory import MemoryStore
from reef.testing import Chaos, simulate
from tests.unit.catalog.conftest import AT_ONCE, put, without_if_match


def names(catalog, prefix):
    """Return how many objects there are of a kind."""
    return len(list(catalog.store.list(prefix)))


def test_a_checkpoint_has_the_state_and_says_so(catalog):
    """Deleted keys are gone, the meta counts the rest, and the hash is continued."""
    put(catalog, a=b"1", b=b"22", c=b"3")
    first, _ = catalog.compactor().compact_once()
    put(catalog, b=None, a=b"4")
    second, tag = catalog.compactor().compact_once()
    parts = catalog._writable()
    snapshot = catalog.snapshot()
    assert (snapshot.checkpoint_id, snapshot.checkpoint_seq, snapshot.head_tag) == (second, 2, tag)
    before = parts.checkpoints.read_whole(first)[0]
    meta, pairs = parts.checkpoints.read_whole(second)
    assert pairs == [(b"a", b"4"), (b"c", b"3")]
    assert (meta.txn_id, meta.key_count, meta.byte_size, meta.format) == (2, 2, 4, 1)
    assert meta.last_segment_seq_at_ckpt == 2
    assert meta.created_at_ms > 0
    assert (meta.previous_id, meta.previous_set_hash) == (first, before.set_hash)
    assert catalog.verify().set_hash == meta.set_hash
    assert parts.checkpoints.meta(snapshot.checkpoint) == catalog.checkpoint() == meta
    assert Catalog(MemoryStore()).checkpoint() is None


def test_nothing_new_needs_no_checkpoint(catalog):
    """Compacting twice writes one; an empty catalog has none."""
    assert catalog.compactor().compact_once().checkpoint_id is None
    put(catalog, a=b"1")
    assert catalog.compactor().compact_once() == catalog.compactor().compact_once()
    assert names(catalog, "checkpoints/") == 1


def test_the_chain_beyond_the_heads_list(catalog, monkeypatch):
    """Segments that the head no longer lists are found by their predecessors, orphans apart."""
    monkeypatch.setattr("reef.catalog.head.RECENT_MIN", 2)
    monkeypatch.setattr("reef.catalog.head.RECENT_MAX", 3)
    with catalog.session_write() as session:
        session.put("lost", b"x")
        for number in range(12):
            put(Catalog(catalog.store), **{f"k{number:02}": b"%d" % number})
        session.put("k00", b"x")
        with pytest.raises(ConflictError):
            session.commit()
    assert len(catalog.snapshot().write_ids) == 3
    other = Catalog(catalog.store)
    assert len(other.scan_latest()) == 12
    report = other.verify()
    assert (report.problems, report.segments, report.orphans) == ([], 12, 1)
    receipt = other.session_write()
    receipt.put("more", b"1")
    done = receipt.commit()
    for number in range(5):
        put(other, n=b"%d" % number)
    assert other.resolve(done) is True
    assert other.resolve(replace(done, write_id="0" * 26)) is False


def test_collection_keeps_needed_objects(catalog):
    """Segments below the checkpoint and older checkpoints go; the state stays."""
    for number in range(5):
        put(catalog, n=b"%d" % number)
        catalog.compactor().compact_once()
    put(catalog, m=b"x")
    catalog.compactor().compact_and_gc()
    assert (names(catalog, "segments/"), names(catalog, "checkpoints/")) == (0, 1)
    put(catalog, m=b"y")
    assert Catalog(catalog.store).scan_latest() == [(b"m", b"y"), (b"n", b"4")]
    assert catalog.verify().problems == []
    assert catalog.compactor().gc_plan().is_empty
    metrics = catalog.metrics.to_dict()
    assert metrics["catalog.gc_segments"]["value"] == 6
    assert metrics["catalog.gc_checkpoints"]["value"] == 5


def test_the_plan_says_what_will_go(catalog):
    """Ranges of segments, checkpoints, the sum of their names, and when."""
    catalog.retention = replace(AT_ONCE, grace_s=100.0)
    for number in range(3):
        put(catalog, n=b"%d" % number)
    first = catalog.compactor().compact_once().checkpoint_id
    put(catalog, n=b"x")
    compactor = catalog.compactor()
    second, tag = compactor.compact_once()
    plan = compactor.gc_compute()
    assert plan == compactor.gc_plan()
    assert plan.delete_segments == (SeqRange(1, 4),)
    assert plan.delete_checkpoints == (first,)
    assert plan.make_checkpoints == (second,)
    assert plan.against_head_tag == tag
    assert plan.objects == 5
    assert len(plan.set_hash) == 32
    assert plan.not_before > catalog.store.now() * 1000 + 50_000
    assert compactor.gc_compute() is None, "one plan at a time"
    assert compactor.gc_apply()
    assert "not due" in compactor.gc_delete_and_reset().waits
    assert names(catalog, "segments/") == 4


def test_a_late_checkpoint_does_not_replace_a_newer_one(catalog):
    """H22: heads never go back: collection relies on the checkpoint that the head has had."""
    put(catalog, a=b"1")
    late = catalog.compactor()
    ref = late._write_checkpoint(CatalogSnapshot.of(late._context.heads.load()))
    put(catalog, a=b"2")
    newer = catalog.compactor().compact_once()
    assert late._publish(ref) == newer
    assert late._context.heads.load().head.checkpoint_id == newer.checkpoint_id
    assert catalog.get_latest("a") == b"2"


def test_a_late_response_does_not_bring_back_an_older_head(catalog):
    """H22: responses overtake each other; a lease on the older state would hold too little."""
    put(catalog, a=b"1")
    heads = catalog.compactor()._context.heads
    updates, older = heads._updates, heads.load()
    put(catalog, a=b"2")
    newer = heads.load()
    heads._remember(older, updates)
    assert heads.last == newer


def test_a_state_needs_its_checkpoint_and_no_segment_up_to_it():
    """H22: a plan that deletes the checkpoint of segment 10 leaves states from 11 on; one that
    deletes the segments up to 10 leaves the state that begins with that checkpoint."""
    checkpoint = f"{10:020}-01ARZ3NDEKTSV4RRFFQ69G5FAV"
    assert GcPlan().needs == 0
    assert GcPlan(delete_segments=(SeqRange(1, 4), SeqRange(6, 10))).needs == 10
    assert GcPlan(delete_checkpoints=(checkpoint,)).needs == 11
    both = GcPlan(delete_segments=(SeqRange(1, 10),), delete_checkpoints=(checkpoint,))
    assert both.needs == 11


def test_a_plan_whose_objects_changed_is_reset(catalog):
    """An object more or less changes the hash: nothing is deleted, and the plan is reset."""
    put(catalog, a=b"1")
    put(catalog, a=b"2")
    catalog.compactor().compact_once()
    compactor = catalog.compactor()
    compactor.gc_compute()
    catalog.store.put("segments/seg-00000000000000000001-" + "Z" * 26, b"late")
    assert "not those of the plan" in compactor.gc_delete_and_reset().waits
    assert names(catalog, "segments/") == 3
    assert catalog.metrics.counter("catalog.gc_refused").value == 1
    compactor.gc_compute()
    assert compactor.gc_delete_and_reset().segments == 3


def test_a_plan_that_the_head_does_not_cover_is_reset(catalog):
    """Phase 2 and phase 3 load the head again."""
    put(catalog, a=b"1")
    parts = catalog._writable()
    bad = GcPlan(delete_segments=(SeqRange(1, 1),), objects=1)
    for phase in (lambda c: c.gc_apply() is True, lambda c: c.gc_delete_and_reset().segments):
        collection.swap_plan(parts, collection.load_plan(parts), bad)
        assert not phase(catalog.compactor())
        assert collection.load_plan(parts).plan.is_empty
    assert catalog.get_latest("a") == b"1"


def test_run_once_does_due_work(catalog):
    """Orphans, a compaction once there are enough segments, and collection."""
    compactor = catalog.compactor(compact_after=3)
    put(catalog, a=b"1")
    put(catalog, b=b"1")
    done = compactor.run_once()
    assert (done.recovered, done.compacted) == (0, False)
    put(catalog, c=b"1")
    done = compactor.run_once()
    assert done.compacted
    assert done.collected.segments == 3


HEAD = CatalogHead(checkpoint=CheckpointRef("5", 50, 50, 0, 0), last_segment_seq=60)


@pytest.mark.parametrize(
    ("retention", "watermark", "kept"),
    [
        (Retention(checkpoints_last=1, checkpoints_min_age_s=0), 50, "5"),
        (Retention(checkpoints_last=3, checkpoints_min_age_s=0), 50, "345"),
        (Retention(checkpoints_last=1, checkpoints_min_age_s=0), 35, "345"),
        (Retention(checkpoints_last=1, checkpoints_min_age_s=0), 30, "345"),
        (Retention(checkpoints_last=1, checkpoints_min_age_s=250), 50, "45"),
        (Retention(checkpoints_last=1, checkpoints_min_age_s=0), 0, "12345"),
    ],
    ids=["newest", "last N", "floor", "floor exactly", "age", "no checkpoint then"],
)
def test_retention(retention, watermark, kept):
    """The newest, the floor of the watermark, the last N, and the young ones stay."""
    found = [
        ListedCheckpoint(f"c{n}", str(n), n * 10, 1, 1000.0 - 100 * (6 - n)) for n in range(1, 6)
    ]
    assert retained_checkpoints(found, HEAD, watermark, 1000.0, retention) == set(kept)


@pytest.mark.parametrize(
    "wrong", [{"checkpoints_last": 0}, {"lease_ttl_s": 0}, {"grace_s": -1}], ids=str
)
def test_retention_that_makes_no_sense(wrong):
    """At least one checkpoint, a lease that lasts, no negative times."""
    with pytest.raises(InvalidInputError):
        Retention(**wrong)


def test_an_open_session_holds_collection_back(catalog):
    """While it is open nothing of its state goes; when it has ended, it goes."""
    put(catalog, a=b"1")
    catalog.compactor().compact_once()
    with catalog.session_read() as session:
        put(catalog, a=b"2")
        catalog.compactor().compact_and_gc()
        assert session.get("a") == b"1"
        assert names(catalog, "checkpoints/") == 2
    catalog.compactor().compact_and_gc()
    assert names(catalog, "checkpoints/") == 1


def on_virtual_time(scenario, **settings):
    """Run a scenario in which time passes without waiting."""

    def run(sim):
        node = sim.process("p")
        catalog = Catalog(ReadBack(node.raw_store()), retention=AT_ONCE, **settings)
        node.spawn(lambda: scenario(catalog, node.runtime))
        sim.run()

    simulate(run, range(3), chaos=Chaos(latency_s=(0.0, 0.0)))


def test_an_expired_lease_pins_nothing():
    """After its term and the margin collection continues; its session gets an error."""

    def scenario(catalog, runtime):
        put(catalog, a=b"1")
        with catalog.session_write() as session:
            put(catalog, a=b"2")
            runtime.sleep(60.0 + MARGIN_S - 1)
            catalog.compactor().compact_and_gc()
            assert names(catalog, "segments/") == 2, "the margin has not passed"
            runtime.sleep(2.0)
            catalog.compactor().compact_and_gc()
            assert names(catalog, "segments/") == 0
            assert names(catalog, "leases/") == 0, "expired leases are removed"
            with pytest.raises(ConflictError) as gone:
                session.get("a")
            assert gone.value.kind is ErrorKind.COLLECTED
            with pytest.raises(ConflictError, match="reaped"):
                session.heartbeat()
            session.put("b", b"1")
            with pytest.raises(ConflictError):
                session.commit()

    on_virtual_time(scenario, cache=None)


@pytest.mark.parametrize("kept_by", ["heartbeat", "keeper"])
def test_a_heartbeat_keeps_a_session_alive(kept_by):
    """By hand or by a keeper, a session outlives its lease's time."""

    def scenario(catalog, runtime):
        put(catalog, a=b"1")
        with catalog.session_read() as session:
            keeper = session.keep_alive() if kept_by == "keeper" else None
            put(catalog, a=b"2")
            for _ in range(6):
                runtime.sleep(30.0)
                if keeper is None:
                    session.heartbeat()
                catalog.compactor().compact_and_gc()
            assert session.get("a") == b"1"
            if keeper is not None:
                keeper.shutdown()
        catalog.compactor().compact_and_gc()
        assert names(catalog, "segments/") == 0

    on_virtual_time(scenario, cache=None)


def test_a_heartbeat_after_the_time_is_too_late():
    """A collection may have ignored it: the session gets an error, even if it was not reaped."""

    def scenario(catalog, runtime):
        with catalog.session_read() as session:
            runtime.sleep(61.0)
            for _ in range(2):
                with pytest.raises(ConflictError):
                    session.heartbeat()

    on_virtual_time(scenario)


def test_heartbeats_without_if_match():
    """A lease is renewed under a new name, and one that was reaped does not come back."""
    catalog = Catalog(without_if_match(), retention=AT_ONCE)
    put(catalog, a=b"1")
    with catalog.session_read() as session:
        first = [info.key for info in catalog.store.list("leases/")]
        session.heartbeat()
        second = [info.key for info in catalog.store.list("leases/")]
        assert len(first) == len(second) == 1
        assert first != second
        catalog.store.delete(second[0])
        with pytest.raises(ConflictError):
            session.heartbeat()
        assert names(catalog, "leases/") == 0


def test_a_lease_that_cannot_be_read_holds_everything(catalog):
    """It cannot be decoded, so it pins everything for a day."""
    put(catalog, a=b"1")
    catalog.store.put("leases/broken.json", b"{")
    catalog.compactor().compact_and_gc()
    assert names(catalog, "segments/") == 1


def keepers():
    """Return the threads that renew leases."""
    return {thread for thread in threading.enumerate() if "lease" in thread.name}


def test_a_keeper_ends_with_its_session(catalog):
    """No thread is left behind, whether or not it is shut down."""
    before = keepers()
    session = catalog.session_read()
    with session.start_lease_keeper():
        assert len(keepers() - before) == 1
        session.heartbeat()
    assert keepers() == before
    session.end()
    with catalog.session_read() as other:
        left = other.start_lease_keeper()
        assert len(keepers() - before) == 1
    left.shutdown()
    assert keepers() == before


def test_old_numbers_of_heads_are_removed(monkeypatch):
    """Superseded heads and plans go when they are old; some always stay."""
    monkeypatch.setattr(register, "RETAINED_MIN", 4)
    catalog = Catalog(MemoryStore())
    catalog.store.capabilities = replace(catalog.store.capabilities, if_match=False)
    for number in range(10):
        put(catalog, n=b"%d" % number)
    parts = catalog._writable()
    assert parts.heads.register.trim(catalog.store.now()) == 0, "they are young"
    monkeypatch.setattr(register, "RETAINED_S", -1.0)
    assert parts.heads.register.trim(catalog.store.now()) == 6
    monkeypatch.setattr(register, "RETAINED_S", 900.0)
    assert parts.heads.register.trim(catalog.store.now()) == 0
    assert Catalog(catalog.store).get_latest("n") == b"9"
    assert catalog.get_latest("n") == b"9"
    put(catalog, n=b"10")
    assert Catalog(catalog.store).get_latest("n") == b"10"


def test_a_slow_swap_of_a_numbered_head_proves_itself():
    """A head that was read long ago is read again before its next number is created."""

    def run(sim):
        sim.bucket.capabilities = replace(sim.bucket.capabilities, if_match=False)
        node = sim.process("p")
        catalog = Catalog(ReadBack(node.raw_store()), retention=AT_ONCE)

        def work():
            put(catalog, a=b"1")
            old = catalog._writable().heads.load()
            put(catalog, a=b"2")
            node.runtime.sleep(2000.0)
            for number in range(30):
                put(catalog, a=b"%d" % number)
            node.runtime.sleep(2000.0)
            catalog.compactor().compact_and_gc()  # the old numbers are gone, and seem free
            assert len(list(catalog.store.list("heads/"))) < 20
            swap, _ = catalog._writable().heads.publish(old, old.head)
            assert swap is register.Swap.LOST
            assert catalog.get_latest("a") == b"29"

        node.spawn(work)
        sim.run()

    simulate(run, range(2), chaos=Chaos(latency_s=(0.0, 0.0)))


def test_a_collection_reports_its_figures(catalog):
    """The number of deleted objects, or the reason for none."""
    assert catalog.compactor().gc_delete_and_reset() == collection.GcResult()


def test_no_thread_is_started_unless_asked_for(tmp_path):
    """Sessions, commits, compaction and collection all run in the caller's thread."""
    before = set(threading.enumerate())
    catalog = catalogs.open(str(tmp_path))
    with catalog.session_write() as session:
        session.put("a", b"1")
        session.commit()
    catalog.transact(lambda session: session.put("b", b"2"))
    catalog.compactor().compact_and_gc()
    with catalog.session_read() as session:
        assert session.get("b") == b"2"
        assert set(threading.enumerate()) <= before
        with session.start_lease_keeper():
            assert set(threading.enumerate()) - before, "this was asked for"
