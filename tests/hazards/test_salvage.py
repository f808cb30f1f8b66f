"""Rows that repair and rebuild salvage, and state that they must keep (H67, H68, H70)."""

import os
import shutil

import msgspec
import pyarrow as pa
import pytest

import reef
from reef.errors import ConflictError, FencedError
from reef.formats.manifest import (
    Condemned,
    CondemnedRange,
    DedupEntry,
    Manifest,
    Recent,
    decode_manifest,
)
from reef.formats.wal_object import Job, WalKind, WalObject
from reef.jobs import compact, fold, ingest, rebuild, repair, verify
from reef.jobs.compact.job import Compactor
from reef.jobs.repair.segments import collapsed, within_bounds
from reef.manifest.head import HeadFinder
from reef.manifest.invariants import check_next
from reef.manifest.repairs import Restart, restart_after
from reef.paths import number_of
from reef.stores import Wrapper
from tests.support.bulk_jobs import append, stage
from tests.support.compaction import choose, versions_of
from tests.support.damage import flip
from tests.support.rebuild import Mortal
from tests.support.sweep_world import NAME, USERS, World

SCHEMA = pa.schema([("id", pa.string()), ("a", pa.int64()), ("b", pa.string())])


def table():
    """Return an empty table, and a writer of it."""
    db = reef.open("memory://")
    db.create(NAME, schema=SCHEMA)
    return db, db.writer(NAME, background=False)


def head_of(db):
    """Return the newest manifest."""
    return HeadFinder(db.store, USERS).find().manifest


def row(db, key):
    """Return one row, as a new reader sees it."""
    with db.reader(NAME) as reader:
        return reader.get(key)


# --- H68: compaction's own merge ----------------------------------------------------------


def test_H68_a_resolved_patch_keeps_the_row_below_it():
    """H68: the merge had made one row of a put and a patch, at the patch's LSN. Cut to that LSN
    before they are merged again, the row below the patch is lost, and the report says all is saved.
    """
    db, writer = table()
    writer.upsert([{"id": "k", "a": 1, "b": "v1"}])
    fold(db, NAME)
    ingest(db, NAME, [{"id": "k", "a": 3}], op="patch")
    fold(db, NAME)
    writer.close()
    compact(db, NAME, full=True)
    (merged,) = head_of(db).segments
    assert (merged.rows, merged.patches) == (1, 0)
    db.store.delete(USERS.segment(merged.id))
    report = repair(db, NAME, apply=True)
    assert not report.lost.rows_of_the_newest_state
    assert row(db, "k") == {"id": "k", "a": 3, "b": "v1"}
    assert not verify(db, NAME, deep=True).problems


def test_H68_a_patch_is_not_applied_past_a_version_in_a_segment_between():
    """H68: the merged segment held a put and a patch apart, since a load is between the two in
    another segment. Salvage must keep them apart by the same rule.
    """
    db, writer = table()
    writer.upsert([{"id": "k", "a": 1, "b": "v1"}])
    fold(db, NAME)
    pads = [{"id": f"pad{i}", "a": i, "b": os.urandom(300).hex()} for i in range(200)]
    ingest(db, NAME, [{"id": "k", "a": 2, "b": "v2"}, *pads])
    fold(db, NAME)
    ingest(db, NAME, [{"id": "k", "a": 3}], op="patch")
    fold(db, NAME)
    writer.close()
    sizes = sorted(s.size - s.tail_bytes for s in head_of(db).segments)
    compact(db, NAME, tier_bytes=sum(sizes[:2]), tier_segments_min=2, rounds_max=1)
    merged = next(s for s in head_of(db).segments if s.id.startswith("compact"))
    assert merged.rows == 2
    db.store.delete(USERS.segment(merged.id))
    report = repair(db, NAME, apply=True)
    assert not report.lost.rows_of_the_newest_state
    assert row(db, "k") == {"id": "k", "a": 3, "b": "v2"}


def test_H68_merges_that_were_joined_do_not_count_twice(monkeypatch):
    """H68: a merged segment has two merges of a key as one, in a group that is intact. Another
    group is damaged, and its rows come from the ancestors, which have the two merges.
    """
    db, writer = table()
    writer.upsert([{"id": key, "a": 1, "b": "v1"} for key in "jk"])
    fold(db, NAME)
    for _ in range(2):
        rows = [{"id": key, "a": 10} for key in "jk"]
        ingest(db, NAME, rows, op="merge", operators={"a": "add"})
        fold(db, NAME)
    writer.close()
    choose(monkeypatch, lambda segments: [s for s in segments if s.patches])
    compact(db, NAME, strategy="chosen", group_bytes=1, rounds_max=1)
    merged = next(s for s in head_of(db).segments if s.id.startswith("compact"))
    assert (merged.rows, merged.patches) == (2, 2)
    flip(db.store, USERS.segment(merged.id), 40)
    report = repair(db, NAME, apply=True)
    assert not report.lost.rows_of_the_newest_state
    assert [row(db, key)["a"] for key in "jk"] == [21, 21]


def test_H68_the_fold_of_a_repair_leaves_a_load_between_put_and_patch():
    """H68: damage of another object makes a repair fold the log. A batch's patch belongs to the
    load below it, which is in a segment of its own, and not to the batch below that.
    """
    db, writer = table()
    writer.upsert([{"id": "k", "a": 1, "b": "v1"}])
    ingest(db, NAME, [{"id": "k", "a": 2, "b": "v2"}])
    writer.patch([{"id": "k", "b": "v3"}])
    victim = writer.upsert([{"id": "other", "a": 0, "b": "x"}]).lsn
    writer.upsert([{"id": "more", "a": 0, "b": "x"}])
    writer.close()
    flip(db.store, USERS.wal_object(victim), -1)
    report = repair(db, NAME, apply=True)
    assert not report.lost.rows_of_the_newest_state
    assert row(db, "k") == {"id": "k", "a": 2, "b": "v3"}
    assert row(db, "other") == {"id": "other", "a": 0, "b": "x"}


def test_H68_versions_outside_the_bounds_stay_out_but_for_the_row_below_a_patch():
    """H68, H34: what hid an older version may have been dropped since, so it must not come back.
    The row below a patch is part of the row that the segment had.
    """
    db, writer = table()
    writer.close()
    schema = head_of(db).schema
    number = next(f.number for f in schema.fields if f.name == "a")
    puts = versions_of(schema, [(b"k", 0, {number: 1}), (b"old", 0, {number: 1})], lsn=2)
    patches = versions_of(schema, [(b"k", 3, {number: 5})], lsn=6)
    entry = msgspec.structs.replace(_entry(), min_key=b"a", max_key=b"z", lsn_min=6, lsn_max=6)
    rows = within_bounds(collapsed([puts, patches], [], schema, [], 2**63 - 1), entry)
    assert (rows.keys.to_pylist(), rows.lsns.tolist()) == ([b"k"], [6])
    between = msgspec.structs.replace(entry, lsn_min=4, lsn_max=4)
    apart = within_bounds(collapsed([puts, patches], [], schema, [between], 2**63 - 1), entry)
    assert (apart.keys.to_pylist(), apart.lsns.tolist()) == ([b"k", b"k"], [6, 2])


def _entry():
    world = World()
    with world.db.writer(NAME) as writer:
        writer.put("k", b"1")
    world.fold()
    return world.head().segments[0]


def test_H68_a_patch_is_not_applied_past_a_load_that_is_lost():
    """H68: a row of a lost segment is a patch over a load. The load's own segment is lost as well,
    and the row in the log below the load is older: the row is lost, and reported. Seed 2152 of the
    damage machine.
    """
    world = World()
    world.db.create(NAME, schema=SCHEMA)
    world.db.cursor(NAME, "keeps the log")
    with world.db.writer(NAME, background=False) as writer:
        writer.upsert([{"id": "k", "a": 1, "b": "old"}])
        ingest(world.db, NAME, [{"id": "k", "a": 2, "b": "load"}])
        writer.refresh()
        world.fold()
        loaded = next(s for s in world.head().segments if s.visible_lsn)
        writer.refresh()
        writer.patch([{"id": "k", "a": 3}])
        world.fold()
        writer.refresh()
        compact(world.db, NAME, full=True)
        world.advance(10)
        world.sweep_twice()
        (merged,) = world.head().segments
    for lost in (loaded, merged):
        world.bucket.delete(USERS.segment(lost.id))
    report = repair(world.db, NAME, apply=True)
    lost = {segment.id: segment for segment in report.lost.segments}[merged.id]
    assert lost.is_loss
    assert [(r.first_key, r.last_key) for r in lost.ranges] == [(b"k", b"k")]
    assert row(world.db, "k") is None, "neither as it was before, nor mixed"


def test_H68_a_load_whose_begin_an_earlier_repair_skipped_is_not_taken_for_void():
    """H68: the first repair counted the load, whose begin it could not read, and replaced its
    segment. With the replacement lost too, the log seemed to show that the load had never counted,
    so that nothing was to be saved, and nothing was reported. Root: only objects that are
    unreadable now put an ignored ingest in doubt. Seed 1288 of the crossed machine, twice.
    """
    db, writer = table()
    loaded = ingest(db, NAME, [{"id": "k", "a": 1, "b": "v"}])
    flip(db.store, USERS.wal_object(loaded.lsn - 1), -30)
    (segment,) = (i.key for i in db.store.list(USERS.segments))
    flip(db.store, segment, -30)
    writer.close()
    assert not any(s.is_loss for s in repair(db, NAME, apply=True).lost.segments)
    assert row(db, "k") == {"id": "k", "a": 1, "b": "v"}
    replacement = next(s for s in head_of(db).segments if s.rows)
    db.store.delete(USERS.segment(replacement.id))
    report = repair(db, NAME, apply=True)
    (lost,) = report.lost.segments
    assert [(r.first_key, r.last_key) for r in lost.ranges] == [(b"k", b"k")]
    assert report.lost.rows_of_the_newest_state


def test_H68_two_segments_without_footers_are_saved_from_all_that_is_left():
    """H68: nothing says which of them a delete was in. Only its bounds do, after the merge, and so
    each is saved from everything that the two can have covered. Seed 2200 of the damage machine.
    """
    db = reef.open("memory://")
    with db.writer(NAME, background=False) as writer:
        for key in ("d", "x"):
            writer.put(key, b"1")
            fold(db, NAME)
            writer.refresh()
        compact(db, NAME, full=True)
        writer.refresh()
        writer.delete("d")
        writer.put("f", b"1")
        fold(db, NAME)
    for segment in head_of(db).segments:
        db.store.put(USERS.segment(segment.id), b"")
    report = repair(db, NAME, apply=True)
    assert not report.lost.rows_of_the_newest_state
    assert dict(db.reader(NAME).scan()) == {b"f": b"1", b"x": b"1"}
    assert rebuild(db, NAME).rows_equal


def test_H68_the_replacement_of_a_lost_segment_covers_the_same_lsns():
    """H68, H49: also if no row is left. Otherwise a rebuild takes a pinned ancestor for live."""
    world = World()
    with world.db.writer(NAME) as writer:
        writer.put("k", b"1")
        writer.put("kept", b"1")
    world.fold()
    world.db.snapshot(NAME, "pin")
    with world.db.writer(NAME) as writer:
        writer.delete("k")
    world.fold()
    compact(world.db, NAME, full=True)
    world.advance(10)
    world.sweep_twice()
    (merged,) = world.head().segments
    world.bucket.delete(USERS.segment(merged.id))
    report = repair(world.db, NAME, apply=True)
    shown = world.rows()
    again = rebuild(world.db, NAME)
    assert (again.rows_equal, again.problems) == (True, ())
    assert report.lost.rows_of_the_newest_state or shown == {b"kept": b"1"}


def test_H68_an_old_view_has_a_load_whose_begin_is_lost():
    """H68: the begin of a folded load cannot be read. The head has its rows, and a snapshot from
    before the fold shows them too. Seed 56 of the damage machine.
    """
    world = World()
    with world.db.writer(NAME) as writer:
        writer.put("a", b"1")
    loaded = ingest(world.db, NAME, {"id": [b"b"], "value": [b"2"]}).lsn
    world.db.snapshot(NAME, "before the fold")
    world.fold()
    with world.db.writer(NAME) as writer:
        writer.put("c", b"3")
    flip(world.bucket, USERS.wal_object(loaded - 1), 40)
    report = repair(world.db, NAME, apply=True)
    assert {lost.lsn for lost in report.lost.lsns} == {loaded - 1}
    assert all(lost.history_only for lost in report.lost.lsns)
    assert world.rows() == {b"a": b"1", b"b": b"2", b"c": b"3"}
    view = world.db.reader(NAME, snapshot="before the fold")
    assert dict(view.scan()) == {b"a": b"1", b"b": b"2"}


# --- H70: state that a repair must keep ----------------------------------------------------


def test_H70_a_repair_that_folds_keeps_the_marks_of_streams(tmp_path):
    """H70, H63: a local log whose tail was uploaded before the machine died is not applied twice,
    over a newer row, because a repair has folded the log in between.
    """
    db = reef.open(str(tmp_path / "bucket"))
    log, copy = tmp_path / "log", tmp_path / "copy"
    writer = db.writer(NAME, durability="local", local_log=str(log), background=False)
    writer.put("k", b"old")
    shutil.copytree(log, copy)  # as the disk is if the machine dies after the upload
    writer.flush()
    writer._buffer.drain()
    writer.close()
    ingest(db, NAME, {"id": [b"k"], "value": [b"newer"]})
    with db.writer(NAME) as other:
        victim = other.put("x", b"1").lsn
        other.put("y", b"2")
    flip(db.store, USERS.wal_object(victim), -1)
    before = head_of(db)
    repair(db, NAME, apply=True)
    head = head_of(db)
    assert head.wal_floor > before.wal_floor
    assert list(head.stream_marks.values()) == [1]
    assert dict(db.reader(NAME).scan())[b"k"] == b"newer"


def _manifest(**changes):
    facts = {"generation": 5, "write_id": "base", "published_at_ms": 5, "oldest_retained": 2}
    facts |= {"recent": (Recent(5, "base", 5),), "wal_floor": 20, "compactor_epoch": 3}
    return Manifest(**{**facts, **changes})


def _older(**changes):
    return _manifest(generation=4, write_id="older", recent=(Recent(4, "older", 4),), **changes)


def _restarted(base, *known, **facts):
    given = {"newest": 7, "epoch": 2, "max_parallel_writes": 1, "schemas": (), "last_lsn": 30}
    following = restart_after(base, Restart(**{**given, **facts}, known=known), "new", 9)
    return check_next(base, following)


def _key(name, lsn):
    return DedupEntry(name, "digest", lsn, 0, 1, 1, "id", 0)


def test_H70_the_longest_grace_period_stays():
    """H70: a process may still count on the longer one."""
    assert _restarted(_manifest(grace_ms=10), _older(grace_ms=50)).grace_ms == 50
    assert _restarted(_manifest(grace_ms=90), _older(grace_ms=50)).grace_ms == 90


def test_H70_condemned_keys_stay_condemned():
    """H70: all of them, except objects that the manifest needs; a sweep may be deleting them."""
    gone = Condemned("segments/gone.seg", 2, 1)
    other = Condemned("segments/other.seg", 3, 1)
    slot = Condemned(f"wal/{25:020}.wal", 3, 1)
    kept = _restarted(_manifest(condemned=(other,)), _older(condemned=(gone, slot))).condemned
    assert set(kept) == {gone, other}


def test_H70_condemned_ranges_stay_condemned():
    """H70: those of every generation, once, up to the slots that the manifest needs."""
    ours, theirs = CondemnedRange("wal", 1, 4, 2, 1), CondemnedRange("wal", 3, 90, 3, 1)
    base = _manifest(condemned_ranges=(ours,))
    kept = _restarted(base, _older(condemned_ranges=(theirs,))).condemned_ranges
    slots = [number for one in kept for number in range(one.first, one.last + 1)]
    assert sorted(slots) == list(range(1, 19)), "the floor is 20, and the slot below is needed"


def test_H70_the_oldest_retained_generation_never_falls():
    """H70: by what any generation says, and by which manifests are there."""
    assert _restarted(_manifest(), _older(oldest_retained=4)).oldest_retained == 4
    assert _restarted(_manifest(), oldest_retained=3).oldest_retained == 3


def test_H70_stream_marks_and_keys_of_any_generation_are_kept():
    """H70: the highest mark of each stream, every key below the floor in the order of commits."""
    base = _manifest(stream_marks={"s": 4}, dedup=(_key("b", 9),))
    older = _older(stream_marks={"s": 2, "t": 8}, dedup=(_key("a", 3), _key("z", 20)))
    head = _restarted(base, older)
    assert head.stream_marks == {"s": 4, "t": 8}
    assert [entry.key for entry in head.dedup] == ["a", "b"]


def test_H70_marks_and_keys_of_the_derived_part_are_kept():
    """H70: where segments and floor are derived, so are the marks and keys of the log below it."""
    rebuilt = _manifest(wal_floor=30, stream_marks={"s": 6}, dedup=(_key("c", 25),))
    head = _restarted(_manifest(stream_marks={"s": 4}, dedup=(_key("b", 9),)), rebuilt=rebuilt)
    assert head.stream_marks == {"s": 6}
    assert [entry.key for entry in head.dedup] == ["b", "c"]


def test_H70_both_epochs_are_above_all_that_were_given_out():
    """H70: every lost generation may have raised either by one; staged segments name theirs."""
    head = _restarted(_manifest(writer_epoch=4))
    assert (head.writer_epoch, head.compactor_epoch) == (7, 6)
    assert _restarted(_manifest(), compactor_epoch=9).compactor_epoch == 10


def test_H70_a_stream_does_not_hold_the_role_over_lost_generations():
    """H70: another writer may have had it in one of them."""
    assert _restarted(_manifest(writer_stream="s")).writer_stream == ""


def test_H70_a_compactor_of_a_lost_generation_is_refused():
    """H70: it took the role in the generation that was lost; its publish after the repair is
    refused, as by any newer compactor.
    """
    world = World()
    for value in (b"1", b"2"):
        with world.db.writer(NAME) as writer:
            writer.put("k", value)
        world.fold()
    compactor = Compactor(world.db, NAME, full=True)
    taken = compactor._take_role()
    flip(world.bucket, USERS.manifest(taken.generation), 40)
    repair(world.db, NAME, apply=True)
    assert world.head().compactor_epoch > taken.compactor_epoch
    plan = compactor._planner(taken.segments, compactor.settings)
    report = compactor._run(taken, plan)
    assert report.outcome == "superseded"
    assert world.rows() == {b"k": b"2"}


def test_H70_a_forced_rebuild_keeps_the_window_of_the_head():
    """H70: a keyed batch that was collected is replayed after a rebuild over a published head."""
    world = World()
    with world.db.writer(NAME) as writer:
        first = writer.put("k", b"once", idempotency_key="job-1")
        writer.put("other", b"1")
    world.fold()
    with world.db.writer(NAME) as writer:
        writer.put("k", b"changed later")
        writer.put("pad", b"1")
    world.fold()
    world.sweep_twice()
    world.publish(segments=world.head().segments[:1])
    report = world.run(lambda: rebuild(world.db, NAME, apply=True, force=True))
    assert report.problems == ()
    with world.db.writer(NAME) as writer:
        again = writer.put("k", b"once", idempotency_key="job-1")
        assert (again.replayed, again.lsn) == (True, first.lsn)
        assert writer.get("k") == b"changed later"


def test_H70_a_forced_rebuild_does_not_lower_the_floor():
    """H70: where a segment is lost and its log is not, repair is the one that brings it back."""
    world = World()
    with world.db.writer(NAME) as writer:
        writer.put("k", b"1")
    world.fold()
    (lost,) = world.head().segments
    world.bucket.delete(USERS.segment(lost.id))
    with pytest.raises(ConflictError, match="floor") as caught:
        world.run(lambda: rebuild(world.db, NAME, apply=True, force=True))
    assert "repair" in caught.value.hint
    repair(world.db, NAME, apply=True)
    assert world.rows() == {b"k": b"1"}


def test_H70_a_forced_rebuild_keeps_published_checksums():
    """H70: the checksum of a damaged segment is not made to fit its bytes. Seed 1169 of the damage
    machine.
    """
    world = World()
    with world.db.writer(NAME) as writer:
        writer.put("a", b"1")
    world.fold()
    with world.db.writer(NAME) as writer:
        writer.put("b", b"2")
    world.fold()
    both = world.head().segments
    damaged = both[-1]
    flip(world.bucket, USERS.segment(damaged.id), 20)
    world.publish(segments=(damaged,))
    world.run(lambda: rebuild(world.db, NAME, apply=True, force=True))
    assert {s.id: s.checksum for s in world.head().segments}[damaged.id] == damaged.checksum
    assert [p.segment for p in verify(world.db, NAME, deep=True).problems] == [damaged.id]


def test_H70_a_segment_that_a_forced_rebuild_names_again_can_be_repaired():
    """H70: its damage is found and repaired in the head, although an older generation had dropped
    it. Seed 4115 of the damage machine.
    """
    world = World()
    with world.db.writer(NAME) as writer:
        writer.put("a", b"1")
    world.fold()
    with world.db.writer(NAME) as writer:
        writer.put("b", b"2")
    world.fold()
    named = world.head().segments[-1]
    world.publish(segments=world.head().segments[:1])
    world.run(lambda: rebuild(world.db, NAME, apply=True, force=True))
    assert named in world.head().segments
    world.bucket.delete(USERS.segment(named.id))
    report = repair(world.db, NAME, apply=True)
    assert [(s.id, s.history_only) for s in report.lost.segments] == [(named.id, False)]
    assert not verify(world.db, NAME, deep=True).problems
    assert world.rows() == {b"a": b"1", b"b": b"2"}


# --- fences come first --------------------------------------------------------------------


def test_H17_damage_in_the_slot_at_the_floor_fences_the_writer():
    """H17: the first slot that is not folded belongs to the log that a writer has in memory, as
    all behind it do.
    """
    db = reef.open("memory://")
    with db.writer(NAME, background=False) as writer:
        writer.put("a", b"0")
        fold(db, NAME)
        lsn = writer.put("k", b"1").lsn
        assert lsn == head_of(db).wal_floor
        flip(db.store, USERS.wal_object(lsn), 40)
        report = repair(db, NAME, apply=True)
        assert [lost.lsn for lost in report.lost.lsns] == [lsn]
        with pytest.raises(FencedError):
            writer.write(reef.Batch().put("seen", b"k is there"), when=[reef.present("k")])
    assert dict(db.reader(NAME).scan()) == {b"a": b"0"}


class Recording(Wrapper):
    """Notes which objects are created, in order."""

    def __init__(self, inner):
        super().__init__(inner)
        self.created = []

    def create(self, key, body):
        result = self.inner.create(key, body)
        self.created.append((key, body))
        return result


@pytest.mark.parametrize("how", ["damaged", "emptied"])
def test_H17_a_repair_fences_before_it_skips_any_lsn(how):
    """H17: a writer that has the lost row in memory must not commit on it when readers cannot see
    the row any more. Fences are behind all skipped LSNs, and never in an emptied slot.
    """
    plain = reef.open("memory://")
    with plain.writer(NAME, background=False) as writer:
        lsn = writer.put("a", b"1").lsn
        last = writer.put("b", b"2").lsn
        writer.put("c", b"3")
    key = USERS.wal_object(lsn)
    flip(plain.store, key, 40) if how == "damaged" else plain.store.delete(key)
    store = Recording(plain.store)
    repair(reef.Database(store), NAME, apply=True)
    fences = [at for at, (key, _) in enumerate(store.created) if "/wal/" in key]
    skipping = [
        at
        for at, (key, body) in enumerate(store.created)
        if "/manifest/" in key and lsn in decode_manifest(body, key).skipped_lsns
    ]
    assert fences
    assert max(fences) < min(skipping)
    assert min(number_of(store.created[at][0]) for at in fences) > last
    assert dict(plain.reader(NAME).scan()) == {b"b": b"2", b"c": b"3"}


def test_H17_a_damaged_head_fences_the_writer():
    """H17, H18: a lost generation may have been the takeover by another writer; none continues."""
    db = reef.open("memory://")
    with db.writer(NAME, background=False) as writer:
        writer.put("a", b"1")
        flip(db.store, USERS.manifest(head_of(db).generation), 40)
        repair(db, NAME, apply=True)
        with pytest.raises(FencedError):
            writer.put("b", b"2")
    assert dict(db.reader(NAME).scan()) == {b"a": b"1"}


def test_H17_a_forced_rebuild_fences_the_writer():
    """H17: it has the rows of the head that was replaced in memory, and must not commit on them."""
    world = World()
    with world.db.writer(NAME) as writer:
        writer.put("a", b"1")
    world.fold()
    with world.db.writer(NAME) as writer:
        writer.put("b", b"2")
    world.fold()
    world.publish(segments=world.head().segments[:1])
    with world.db.writer(NAME, background=False) as writer:
        assert writer.get("a") is None
        world.run(lambda: rebuild(world.db, NAME, apply=True, force=True))
        with pytest.raises(FencedError):
            writer.write(reef.Batch().put("c", b"no a"), when=[reef.absent("a")])
    assert world.rows() == {b"a": b"1", b"b": b"2"}


# --- H67: rebuild and late objects -----------------------------------------------------------


def test_H67_of_several_ingests_of_a_job_the_last_one_counts():
    """H67: the driver stalled, its ingest landed in a slot that had been folded and collected, and
    it committed again at a later LSN. A rebuild must not take the first one for the commit.
    """
    world = World()
    job = Job(world.bucket.runtime.ulid(), key="load")
    with world.db.writer(NAME) as writer:
        writer.put("k", b"0")
        append(world.bucket, NAME, WalKind.BEGIN, job)
        writer.refresh()
        slot = writer.put("k", b"1").lsn
        writer.put("k", b"2")
        writer.put("k", b"2")
    world.fold()
    world.sweep_twice()
    assert slot not in world.slots()
    staged = stage(world.bucket, NAME, {b"k": b"load", b"only": b"load"}, job.id)
    commit = msgspec.structs.replace(job, segments=(staged,))
    append(world.bucket, NAME, WalKind.INGEST, commit)
    _late(world, slot)
    expected = world.rows()
    assert expected == {b"k": b"load", b"only": b"load"}
    assert _without_manifests(world) == expected
    world.fold()
    assert _without_manifests(world) == expected


def test_H67_the_last_ingest_of_a_job_counts_also_if_the_fold_of_the_first_slot_is_lost():
    """H67: no segment says any more that the slot of the first one held something else."""
    world = World()
    job = Job(world.bucket.runtime.ulid(), key="load")
    with world.db.writer(NAME) as writer:
        writer.put("k", b"0")
        append(world.bucket, NAME, WalKind.BEGIN, job)
        writer.refresh()
        slot = writer.put("k", b"1").lsn
        writer.put("k", b"2")
        writer.put("k", b"2")
    world.fold()
    world.sweep_twice()
    (folded,) = world.head().segments
    with world.db.writer(NAME) as writer:
        writer.put("k", b"before the load")
    staged = stage(world.bucket, NAME, {b"k": b"load"}, job.id)
    commit = msgspec.structs.replace(job, segments=(staged,))
    append(world.bucket, NAME, WalKind.INGEST, commit)
    _late(world, slot)
    world.bucket.delete(USERS.segment(folded.id))
    copy = _copy(world)
    rebuild(copy, NAME, apply=True, force=True)
    assert dict(copy.reader(NAME).scan()) == {b"k": b"load"}


def test_H67_an_ingest_that_landed_late_is_not_in_the_window():
    """H67: its driver died. Another one that sends the load again must not get a result as if the
    late object had counted, and the late object must not show rows.
    """
    world = World()
    job = Job(world.bucket.runtime.ulid(), key="load")
    with world.db.writer(NAME) as writer:
        writer.put("k", b"0")
        append(world.bucket, NAME, WalKind.BEGIN, job)
        writer.refresh()
        slot = writer.put("k", b"1").lsn
        writer.put("k", b"2")
        writer.put("k", b"2")
    world.fold()
    world.sweep_twice()
    staged = stage(world.bucket, NAME, {b"k": b"load"}, job.id)
    commit = msgspec.structs.replace(job, segments=(staged,))
    lsn = append(world.bucket, NAME, WalKind.INGEST, commit)
    _late(world, slot)
    world.bucket.delete(USERS.wal_object(lsn))
    copy = _copy(world)
    rebuild(copy, NAME, apply=True)
    assert dict(copy.reader(NAME).scan()) == {b"k": b"2"}
    assert head_of(copy).dedup == ()


def _late(world, slot):
    """Put the newest object of the log into an earlier slot, as its first, stalled PUT does."""
    key = USERS.wal_object(max(world.slots()))
    found = WalObject.decode(world.bucket.get(key), key)
    header = msgspec.structs.replace(found.header, lsn=slot)
    world.bucket.put(USERS.wal_object(slot), WalObject.encode(header))


def _copy(world):
    copy = Mortal(reef.stores.open("memory://"))
    for info in world.bucket.list():
        if "/manifest/" not in info.key and "/leases/" not in info.key:
            copy.put(info.key, world.bucket.get(info.key))
    return reef.Database(copy)


def _without_manifests(world):
    copy = _copy(world)
    report = rebuild(copy, NAME, apply=True)
    assert report.problems == ()
    return dict(copy.reader(NAME).scan())


# --- rebuild names lost segments ---------------------------------------------------------------


def test_H49_a_lost_segment_whose_log_was_collected_is_named():
    """H49: nothing in the bucket names it any more. LSNs below the floor that no segment
    covers were folded into it. Seed 21 of the damage machine, and many others.
    """
    world = World()
    for key in ("a", "b"):
        with world.db.writer(NAME) as writer:
            lsn = writer.put(key, b"1").lsn
        world.fold()
    world.sweep_twice()
    lost = world.head().segments[-1]
    world.bucket.delete(USERS.segment(lost.id))
    copy = _copy(world)
    with pytest.raises(reef.InvalidInputError, match="no object has LSN"):
        rebuild(copy, NAME, apply=True)
    report = rebuild(copy, NAME, apply=True, force=True)
    assert len(report.problems) == 1
    assert dict(copy.reader(NAME).scan()) == {b"b": b"1"}
    assert lsn < head_of(copy).wal_floor


def test_H49_rows_that_a_rebuild_reported_lost_stay_lost():
    """H49: the lost rows are still in the log, which a cursor keeps. The next rebuild shows the
    rows of the head, and has nothing new to report. Seed 60056 of the damage machine.
    """
    world = World()
    world.db.create(NAME)
    world.db.cursor(NAME, "keeps the log")
    for key in ("a", "b"):
        with world.db.writer(NAME) as writer:
            writer.put(key, b"1")
        world.fold()
    world.publish(segments=world.head().segments)
    world.bucket.delete(USERS.segment(world.head().segments[-1].id))
    report = world.run(lambda: rebuild(world.db, NAME, apply=True, force=True))
    assert "no object has" in report.problems[0]
    assert world.rows() == {b"b": b"1"}
    again = rebuild(world.db, NAME)
    assert (again.rows_equal, again.problems) == (True, ())


def test_H49_the_trace_of_a_lost_load_claims_the_keys_of_that_load_only():
    """H49: a rebuild writes a segment without rows where a load is lost. The next one took it for
    a piece of a fold, whose other pieces have the other keys: no choice was without holes, and the
    one with the fewest was the log alone, without anything that was repaired since. Root: a segment
    with covers and without ancestors counted as a fold. Seed 17 of the crossed machine.
    """
    world = World()
    world.db.create(NAME)
    world.db.cursor(NAME, "keeps the log")
    for key, value in ((b"m", b"lost"), (b"n", b"repaired")):
        world.run(lambda k=key, v=value: ingest(world.db, NAME, [{"id": k, "value": v}]))
    with world.db.writer(NAME) as writer:
        writer.put("a", b"1")
    world.fold()
    lost, damaged = sorted(world.head().segments, key=lambda s: s.min_key)[-2:]
    world.bucket.delete(USERS.segment(lost.id))
    flip(world.bucket, USERS.segment(damaged.id), 40)
    for info in list(world.bucket.list(USERS.manifests)):
        world.bucket.delete(info.key)
    world.run(lambda: rebuild(world.db, NAME, apply=True, force=True))
    report = world.run(lambda: repair(world.db, NAME, apply=True))
    assert [segment.id for segment in report.lost.segments] == [damaged.id]
    again = rebuild(world.db, NAME)
    assert (again.rows_equal, again.problems) == (True, ())


def test_H49_a_part_of_a_load_that_was_merged_and_lost_is_named():
    """H49: the load's own segment is there, and cannot count as a whole, since one of the segments
    that it was merged into is there too. Seed 60056 of the damage machine.
    """
    world = World()
    with world.db.writer(NAME) as writer:
        writer.put("b", b"0")
        writer.put("y", b"0")
    world.fold()
    (folded,) = world.head().segments
    world.db.cursor(NAME, "keeps the load")
    lsn = ingest(world.db, NAME, {"id": [b"a", b"x"], "value": [b"1", b"2"]}).lsn
    world.fold()
    compact(world.db, NAME, full=True, segment_bytes=50, segment_bytes_min=1, group_bytes=10)
    low, high = sorted(world.head().segments, key=lambda segment: segment.min_key)
    assert low.max_key < b"x" <= high.max_key
    world.advance(10)
    world.sweep_twice()
    for gone in (folded, low):
        world.bucket.delete(USERS.segment(gone.id))
    report = rebuild(_copy(world), NAME)
    assert any(f"LSN {lsn} to {lsn} of b'a'" in problem for problem in report.problems)


def test_H49_the_last_lost_segment_is_named_too():
    """H49: no later one covers anything; its slots are gone from the log."""
    world = World()
    for key in ("a", "b"):
        with world.db.writer(NAME) as writer:
            writer.put(key, b"1")
            writer.put(f"{key}{key}", b"1")  # the slot below the floor stays
        world.fold()
    with world.db.writer(NAME) as writer:
        writer.put("c", b"1")
    world.sweep_twice()
    world.bucket.delete(USERS.segment(world.head().segments[0].id))
    copy = _copy(world)
    report = rebuild(copy, NAME, apply=True, force=True)
    assert "no object has" in report.problems[0]
    assert dict(copy.reader(NAME).scan()) == dict.fromkeys([b"a", b"aa", b"bb", b"c"], b"1")


def test_H49_one_lost_object_of_the_log_takes_nothing_else_along():
    """H49: a gap that no segment covers is one lost LSN, and not the place where the log begins."""
    world = World()
    with world.db.writer(NAME) as writer:
        writer.put("a", b"1")
        lsn = writer.put("b", b"1").lsn
        writer.put("c", b"1")
        writer.put("d", b"1")
    world.bucket.delete(USERS.wal_object(lsn))
    copy = _copy(world)
    report = rebuild(copy, NAME, apply=True, force=True)
    assert report.problems == (f"no object has LSN {lsn} to {lsn}",)
    assert dict(copy.reader(NAME).scan()) == {b"a": b"1", b"c": b"1", b"d": b"1"}
    with copy.writer(NAME) as writer:
        writer.put("b", b"2")


def test_H49_a_fold_of_which_nothing_is_left_says_so():
    """H49: patches of rows that are not there leave no row. An empty segment covers their LSNs, or
    a rebuild could not distinguish them from a lost segment.
    """
    world = World()
    world.db.create(NAME, schema=SCHEMA)
    with world.db.writer(NAME) as writer:
        writer.patch([{"id": "missing", "a": 1}])
    world.fold()
    with world.db.writer(NAME) as writer:
        writer.upsert([{"id": "k", "a": 1, "b": "x"}])
    world.fold()
    world.sweep_twice()
    assert sorted(s.rows for s in world.head().segments) == [0, 1]
    assert rebuild(world.db, NAME).problems == ()


def test_H49_a_load_whose_begin_is_lost_counts():
    """H49: no driver sends an ingest without a begin, so a lost object below it was the begin.
    Seed 56 of the damage machine.
    """
    world = World()
    with world.db.writer(NAME) as writer:
        writer.put("a", b"1")
    loaded = ingest(world.db, NAME, {"id": [b"b"], "value": [b"2"]}).lsn
    with world.db.writer(NAME) as writer:
        writer.put("c", b"3")
    flip(world.bucket, USERS.wal_object(loaded - 1), 40)
    copy = _copy(world)
    rebuild(copy, NAME, apply=True, force=True)
    assert dict(copy.reader(NAME).scan()) == {b"a": b"1", b"b": b"2", b"c": b"3"}
