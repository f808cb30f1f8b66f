"""Repair: rows salvaged when the log is swept, tables, merges; a crash at every step."""

import json

import pyarrow as pa
import pytest

import reef
from reef.formats.manifest import encode_manifest
from reef.jobs import compact, fold, rebuild, repair, verify
from reef.manifest.head import HeadFinder
from tests.support.damage import damage, flip, segment_sections
from tests.support.sweep_world import NAME, USERS, World


def swept(rows=60, group_bytes=200):
    """Return a namespace whose rows are in one segment of many groups, and nowhere else."""
    world = World()
    with world.db.writer(NAME) as writer:
        for number in range(rows):
            writer.put(b"k%03d" % number, b"value %d " % number * 3)
        writer.delete_range("k010", "k012")
    fold(world.db, NAME, group_bytes=group_bytes)
    world.advance(10)
    with world.db.writer(NAME) as writer:  # a newer generation, so that the older ones can go
        writer.put("new", b"1")
    world.advance(10)
    assert world.sweep_twice()
    assert not verify(world.db, NAME, deep=True).problems
    return world


def everything(rows=60):
    """Return the rows of that namespace."""
    found = {b"k%03d" % n: b"value %d " % n * 3 for n in range(rows) if n not in (10, 11)}
    return {**found, b"new": b"1"}


def segment_key(world):
    """Return the object of the namespace's one segment."""
    (entry,) = world.head().segments
    return USERS.segment(entry.id)


@pytest.mark.parametrize("how", ["key block", "column block"])
def test_only_the_damaged_group_of_a_segment_is_lost(how):
    """H27: its keys and the number of its rows are in the report, and nothing else is gone."""
    world = swept()
    key = segment_key(world)
    damage(world.bucket, key, how)
    report = repair(world.db, NAME, apply=True)
    (lost,) = report.lost.segments
    (lost_range,) = lost.ranges
    rows = everything()
    gone = {k for k in rows if lost_range.first_key <= k <= lost_range.last_key}
    assert 0 < len(gone) == lost_range.rows == lost.rows_lost < 10
    assert lost.saved_rows == 58 - len(gone)
    assert world.rows() == {k: v for k, v in rows.items() if k not in gone}
    assert not verify(world.db, NAME, deep=True).problems


@pytest.mark.parametrize("how", ["magic", "version", "filter", "index", "footer", "tail"])
def test_what_only_describes_the_rows_is_made_again(how):
    """H27: a damaged filter, index, footer or front takes no row."""
    world = swept()
    damage(world.bucket, segment_key(world), how)
    report = repair(world.db, NAME, apply=True)
    (lost,) = report.lost.segments
    assert (lost.saved_rows, lost.ranges, lost.is_loss) == (58, (), False)
    assert world.rows() == everything()


def test_lost_range_deletes_are_reported():
    """H27: where their block is damaged, and the log is gone, the report says so."""
    world = swept()
    damage(world.bucket, segment_key(world), "tombstone block")
    (lost,) = repair(world.db, NAME, apply=True).lost.segments
    assert lost.tombstones_lost
    assert lost.is_loss
    assert world.rows() == everything()


@pytest.mark.parametrize("how", ["deleted", "emptied"])
def test_a_segment_that_is_gone_is_lost_whole(how):
    """H27: keys, rows and LSNs are named; rows in other places are there."""
    world = swept()
    (entry,) = world.head().segments
    damage(world.bucket, segment_key(world), how)
    report = repair(world.db, NAME, apply=True)
    (lost,) = report.lost.segments
    assert (lost.rows, lost.saved_rows, lost.rows_lost) == (58, 0, 58)
    assert (lost.lsn_min, lost.lsn_max) == (entry.lsn_min, entry.lsn_max)
    assert (lost.min_key, lost.max_key) == (entry.min_key, entry.max_key)
    assert world.rows() == {b"new": b"1"}
    assert not verify(world.db, NAME, deep=True).problems


def test_truncated_in_the_middle_the_first_groups_are_saved():
    """H27: without footer and index the blocks are walked from the front."""
    world = swept()
    damage(world.bucket, segment_key(world), "truncated")
    (lost,) = repair(world.db, NAME, apply=True).lost.segments
    assert 20 < lost.saved_rows < 50
    rows, seen = everything(), world.rows()
    gone = {k for r in lost.ranges for k in rows if r.first_key <= k <= r.last_key}
    assert {k: v for k, v in rows.items() if k not in gone}.items() <= seen.items()
    assert len(seen) == lost.saved_rows + 1
    assert all(rows[k] == v for k, v in seen.items())


def test_damage_in_two_places_without_an_index():
    """H27: behind a damaged block the walk finds the next whole one."""
    world = swept()
    key = segment_key(world)
    places = segment_sections(world.bucket.get(key), key)
    flip(world.bucket, key, places["column block"])
    flip(world.bucket, key, places["index"])
    (lost,) = repair(world.db, NAME, apply=True).lost.segments
    assert 0 < lost.rows_lost < 15
    rows, seen = everything(), world.rows()
    assert set(rows) - set(seen) <= {
        k for r in lost.ranges for k in rows if r.first_key <= k <= r.last_key
    }


def merged(world):
    """Fold twice with deletes between, and merge; the log is gone, the inputs are not."""
    with world.db.writer(NAME) as writer:
        for number in range(30):
            writer.put(b"k%02d" % number, b"old")
    world.fold()
    with world.db.writer(NAME) as writer:
        for number in range(0, 30, 2):
            writer.put(b"k%02d" % number, b"new")
        writer.delete("k05")
    world.fold()
    before = {entry.id for entry in world.head().segments}
    compact(world.db, NAME, tier_bytes=1, tier_segments_min=2)
    assert not before & {entry.id for entry in world.head().segments}


def test_a_merged_segment_is_recovered_from_its_inputs():
    """H37: ancestors that an older generation still names give its rows back, to the last one."""
    world = World()
    merged(world)
    expected = world.rows()
    for info in list(world.bucket.list(USERS.wal)):  # so that only the ancestors are left
        lsn = int(info.key.rpartition("/")[2].split(".")[0])
        if lsn < world.head().wal_floor:
            world.bucket.delete(info.key)
    (entry,) = world.head().segments
    world.bucket.delete(USERS.segment(entry.id))
    report = repair(world.db, NAME, apply=True)
    (lost,) = report.lost.segments
    assert (lost.rows_lost, lost.is_loss) == (0, False)
    assert world.rows() == expected


def test_patches_are_saved_as_patches():
    """A damaged table in the log: rows folded past the damage need no other row."""
    db = reef.open("memory://")
    schema = pa.schema([("id", pa.string()), ("a", pa.int64()), ("b", pa.string())])
    db.create(NAME, schema)
    with db.writer(NAME) as writer:
        writer.upsert([{"id": "x", "a": 1, "b": "one"}, {"id": "y", "a": 2, "b": "two"}])
        fold(db, NAME)
        writer.patch([{"id": "x", "a": 10}])
        lsn = writer.patch([{"id": "y", "b": "damaged footer"}]).lsn
        writer.upsert([{"id": "z", "a": 3, "b": "three"}])
    damage(db.store, USERS.wal_object(lsn), "footer")
    report = repair(db, NAME, apply=True)
    assert not report.lost.rows_of_the_newest_state
    table = db.reader(NAME).scan_arrow().read_all()
    rows = {row["id"]: (row["a"], row["b"]) for row in table.to_pylist()}
    assert rows == {"x": (10, "one"), "y": (2, "damaged footer"), "z": (3, "three")}
    assert HeadFinder(db.store, USERS).find().manifest.segments[0].patches == 2
    fold(db, NAME)
    assert not verify(db, NAME, deep=True).problems


def test_cursors_of_a_lost_generation_continue_from_another():
    """The changes read before and after are the same; nothing is skipped."""
    world = World()
    with world.db.writer(NAME) as writer:
        writer.put("a", b"1")
        world.db.cursor(NAME, "mine")
        writer.put("b", b"2")
    at = world.head().cursors["mine"]
    world.fold()
    flip(world.bucket, USERS.manifest(at.generation), 40)
    report = repair(world.db, NAME, apply=True)
    assert report.lost.cursors == ()
    moved = world.head().cursors["mine"]
    assert (moved.lsn, moved.generation < at.generation) == (at.lsn, True)
    assert not verify(world.db, NAME).problems
    assert [change.key for change in world.db.cursor(NAME, "mine")] == [b"b"]


# --- H18, after a sweep -------------------------------------------------------------------


def swept_under_a_lost_head():
    """Damage all manifests but one that needs objects merged, folded and swept since."""
    world = World()
    with world.db.writer(NAME) as writer:
        for number in range(20):
            writer.put(b"k%02d" % number, b"first")
    world.fold()
    with world.db.writer(NAME) as writer:
        for number in range(0, 20, 2):
            writer.put(b"k%02d" % number, b"second")
        writer.delete("k01")
    old = world.head()
    world.fold()
    compact(world.db, NAME, tier_bytes=1, tier_segments_min=2)
    world.advance(10)
    with world.db.writer(NAME) as writer:
        writer.put("tail", b"in the log")
    world.sweep_twice()
    expected = world.rows()
    assert not {s.id for s in old.segments} & {s.id for s in world.head().segments}
    for info in list(world.bucket.list(USERS.manifests)):
        flip(world.bucket, info.key, 40)
    world.bucket.put(USERS.manifest(old.generation), encode_manifest(old))
    return world, old, expected


def test_H18_rows_of_swept_segments_are_recovered_from_their_merges():
    """H18: the newest intact manifest needs segments and a log that are gone; no row is."""
    world, old, expected = swept_under_a_lost_head()
    newest = max(int(key.split(".")[0]) for key in world.keys("manifest"))
    assert verify(world.db, NAME).problems
    dry = repair(world.db, NAME)
    report = repair(world.db, NAME, apply=True)
    assert (dry.lost, dry.actions) == (report.lost, report.actions)
    assert report.lost.holes == ()
    assert not report.lost.rows_of_the_newest_state
    head = world.head()
    assert head.generation == newest + 1
    assert head.wal_floor > old.wal_floor
    assert not verify(world.db, NAME, deep=True).problems
    assert world.rows() == expected


def test_H18_segments_without_remains_are_named():
    """H18: without the merged segment the report says which LSNs and keys are gone."""
    world, _, _ = swept_under_a_lost_head()
    for key in world.keys("segments"):
        world.bucket.delete(f"{USERS.segments}{key}")
    report = repair(world.db, NAME, apply=True)
    assert report.lost.rows_of_the_newest_state
    assert not verify(world.db, NAME, deep=True).problems
    assert world.rows() == {b"tail": b"in the log"}


# --- around it --------------------------------------------------------------------------------


def test_a_repaired_namespace_can_be_rebuilt():
    """Segments that repair writes name the LSNs they cover: a rebuild finds the same rows."""
    world = swept()
    damage(world.bucket, segment_key(world), "column block")
    with world.db.writer(NAME) as writer:
        lsn = writer.put("later", b"2").lsn
    damage(world.bucket, USERS.wal_object(lsn), "footer")
    repair(world.db, NAME, apply=True)
    assert rebuild(world.db, NAME).rows_equal


def test_the_report_is_plain_values():
    """For programs: everything in it is what JSON knows, keys as text."""
    world = swept()
    damage(world.bucket, segment_key(world), "column block")
    report = json.loads(json.dumps(repair(world.db, NAME).to_dict()))
    (lost,) = report["lost"]["segments"]
    assert lost["ranges"][0]["first_key"] == "k000"
    assert report["lost"]["rows_of_the_newest_state"]
    assert report["problems"][0]["kind"] == "segment_damaged"


def test_an_intact_namespace_is_left_alone():
    """Repair of nothing does nothing: no publish, no fence, no object."""
    world = swept()
    before = {info.key: info.tag for info in world.bucket.list()}
    report = repair(world.db, NAME, apply=True)
    assert (report.problems, report.actions, report.applied) == ((), (), True)
    assert {info.key: info.tag for info in world.bucket.list()} == before
