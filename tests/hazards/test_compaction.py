"""H28, H30, H33 to H37, H60: which rows a compaction may drop, and when it is committed."""

from itertools import pairwise

import msgspec
import pyarrow as pa
import pytest

import reef
from reef.errors import ErrorKind, NotFoundError
from reef.formats.manifest import Condemned, OpenJob
from reef.formats.wal_object import OpKind
from reef.jobs import Compactor, compact, fold
from reef.manifest import edits
from reef.manifest.head import Publisher
from reef.manifest.invariants import is_balanced
from reef.paths import Namespace
from reef.stores import Outcome, Wrapper, WriteResult
from tests.support.compaction import SMALL, choose, head_of, ingest_rows
from tests.support.segment_checks import check_segment
from tests.support.sweep_world import DAY_S, GRACE_S, NAME, USERS, At, World

TINY = {**SMALL, "segment_bytes_min": 20, "segment_bytes": 40, "segment_bytes_max": 60}
"""Every few rows are a segment of their own."""


@pytest.fixture
def world():
    """Give a namespace with nothing in it."""
    world = World()
    world.db.create(NAME)
    return world


def put(world, rows, deleted=(), ranges=()):
    """Write, and fold into segments of their own."""
    with world.db.writer(NAME) as writer:
        for key, value in rows.items():
            writer.put(key, value)
        for key in deleted:
            writer.delete(key)
        for ends in ranges:
            writer.delete_range(*ends)
    fold(world.db, NAME, group_bytes=60)


def footer(world, entry):
    """Return the footer of a segment, every byte of which was checked."""
    key = USERS.segment(entry.id)
    return check_segment(world.bucket.get(key), key).footer


def contents(world):
    """Return how many rows and deletes are in segments."""
    segments = world.head().segments
    return sum(s.rows for s in segments), sum(s.tombstones for s in segments)


def by_age(segments):
    """Return segments, the oldest first."""
    return sorted(segments, key=lambda segment: segment.lsn_max)


# --- H34: resurrection ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("picked", "tombstones"),
    [([1, 2], 1), ([0, 2], 0), ([0, 1, 2], 0), ([2], 1)],
    ids=["without the oldest", "with it", "all", "the delete alone"],
)
def test_H34_a_delete_stays_while_an_older_row_may_be_in_another_segment(
    world, monkeypatch, picked, tombstones
):
    """H34: merged without the segment that has the old row, a delete must keep hiding it."""
    put(world, {"k": b"old"})
    put(world, {"other": b"1"})
    put(world, {}, deleted=["k"])
    choose(monkeypatch, lambda segments: [by_age(segments)[n] for n in picked])
    compact(world.db, NAME, strategy="chosen", rounds_max=1, **SMALL)
    assert sum(s.tombstones for s in world.head().segments) == tombstones
    assert world.rows() == {b"other": b"1"}
    compact(world.db, NAME, full=True, **SMALL)
    assert world.rows() == {b"other": b"1"}
    assert sum(s.tombstones for s in world.head().segments) == 0


def test_H34_a_delete_stays_over_a_segment_that_is_both_older_and_newer(world, monkeypatch):
    """H34: what counts is the oldest that another segment may have, not the newest."""
    put(world, {"k": b"old"})
    put(world, {}, deleted=["k"])
    put(world, {"z": b"newest"})
    choose(monkeypatch, lambda segments: by_age(segments)[::2])
    compact(world.db, NAME, strategy="chosen", rounds_max=1, **SMALL)
    choose(monkeypatch, lambda segments: [s for s in segments if s.tombstones])
    compact(world.db, NAME, strategy="chosen", rounds_max=1, **SMALL)
    assert world.rows() == {b"z": b"newest"}
    assert contents(world) == (3, 1)


def test_H34_an_older_row_in_a_snapshot_does_not_keep_a_delete(world):
    """H34: a snapshot reads its own segments, and none that was written after it."""
    put(world, {"k": b"old"})
    snapshot = world.db.snapshot(NAME)
    put(world, {}, deleted=["k"])
    compact(world.db, NAME, full=True, **SMALL)
    assert world.rows() == {}
    assert contents(world) == (0, 0)
    assert dict(world.db.reader(NAME, snapshot=snapshot).scan()) == {b"k": b"old"}


def test_H34_an_expired_row_hides_older_rows(world, monkeypatch):
    """H34: merged without the older row it becomes a delete; with it, both go."""
    put(world, {"k": b"old"})
    with world.db.writer(NAME) as writer:
        writer.put("k", b"short-lived", ttl_s=1.0)
    fold(world.db, NAME)
    world.advance(10)
    choose(monkeypatch, lambda segments: by_age(segments)[1:])
    report = compact(world.db, NAME, strategy="chosen", rounds_max=1, **SMALL)
    assert report.expired == 1
    assert [s.tombstones for s in by_age(world.head().segments)] == [0, 1]
    assert world.rows() == {}
    compact(world.db, NAME, full=True, **SMALL)
    assert contents(world) == (0, 0)


def test_H34_patches_wait_for_rows_that_may_be_in_between(world, monkeypatch):
    """H34: a patch is not laid over a row that another segment has replaced."""
    schema = pa.schema([("id", pa.string()), ("x", pa.int64()), ("y", pa.int64())])
    world.db.create("events", schema)
    with world.db.writer("events") as writer:
        writer.upsert([{"id": "k", "x": 1, "y": 1}])
        fold(world.db, "events")
        writer.upsert([{"id": "k", "x": 2, "y": 2}])
        fold(world.db, "events")
    ingest_rows(world.db, "events", [(b"k", OpKind.PATCH, {1: 3})])
    fold(world.db, "events")
    choose(monkeypatch, lambda segments: [s for s in by_age(segments) if s.lsn_max != 3])
    compact(world.db, "events", strategy="chosen", rounds_max=1, **SMALL)
    assert world.db.reader("events").get("k") == {"id": "k", "x": 3, "y": 2}
    compact(world.db, "events", full=True, **SMALL)
    assert world.db.reader("events").get("k") == {"id": "k", "x": 3, "y": 2}
    assert [(s.rows, s.patches) for s in head_of(world.db, "events").segments] == [(1, 0)]


def test_H34_an_unpinned_scan_fails_after_a_delete_that_left_no_trace(world):
    """H34: its rows were deleted, merged away and swept: it does not end as if all were well."""
    put(world, {f"k{n:02}": b"v" * 30 for n in range(20)})
    reader = world.db.reader(NAME, cache_bytes=0, row_cache_bytes=0)
    rows = iter(reader.scan())
    assert next(rows) == (b"k00", b"v" * 30)
    put(world, {}, ranges=[("k10", "k99")])
    compact(world.db, NAME, full=True, **SMALL)
    assert world.head().dropped_lsn > 0
    world.advance(DAY_S)
    world.sweep_twice()
    with pytest.raises(NotFoundError) as caught:
        world.run(lambda: list(rows))
    assert caught.value.kind is ErrorKind.COLLECTED


# --- H60: the hold of a live_wins load ---------------------------------------------------


def test_H60_nothing_above_an_open_begin_is_dropped(world):
    """H60: a load that sorts at its begin will bring in rows that newer deletes must hide."""
    put(world, {"a": b"1", "k": b"1"}, deleted=["gone"], ranges=[("q", "r")])
    begin = world.head().wal_floor - 1
    put(world, {}, deleted=["k"], ranges=[("x", "z")])
    world.publish(open_jobs=(OpenJob("load", begin, live_wins=True),))
    compact(world.db, NAME, full=True, **SMALL)
    (kept,) = world.head().segments
    assert kept.tombstones == 2, "of four deletes, the two above the begin"
    assert kept.lsn_min <= begin < kept.lsn_max
    world.publish(open_jobs=())
    compact(world.db, NAME, full=True, **SMALL)
    assert sum(s.tombstones for s in world.head().segments) == 0
    assert world.rows() == {b"a": b"1"}


def test_H60_patches_above_an_open_begin_stay_as_they_are(world):
    """H60: the row that they will be laid over may not have come in yet."""
    schema = pa.schema([("id", pa.string()), ("x", pa.int64()), ("y", pa.int64())])
    world.db.create("events", schema)
    with world.db.writer("events") as writer:
        writer.upsert([{"id": "k", "x": 1, "y": 1}])
    ingest_rows(world.db, "events", [(b"k", OpKind.PATCH, {1: 5})])
    ingest_rows(world.db, "events", [(b"k", OpKind.PATCH, {2: 6})])
    fold(world.db, "events")
    load = OpenJob("load", 3, live_wins=True)
    Publisher(world.bucket, Namespace("events")).publish(
        lambda head: msgspec.structs.replace(head, open_jobs=(load,))
    )
    compact(world.db, "events", full=True, **SMALL)
    assert [(s.rows, s.patches) for s in head_of(world.db, "events").segments] == [(3, 2)]
    assert world.db.reader("events").get("k") == {"id": "k", "x": 5, "y": 6}


# --- H30: clocks --------------------------------------------------------------------------


def test_H30_rows_outlive_their_expiry_by_a_margin(world):
    """H30: a reader whose clock is ten minutes behind still sees a row that was merged."""
    with world.db.writer(NAME) as writer:
        writer.put("k", b"v", ttl_s=60.0)
    fold(world.db, NAME)
    world.advance(65)
    assert compact(world.db, NAME, full=True).expired == 0
    assert world.head().segments[0].rows == 1
    world.advance(600)
    assert compact(world.db, NAME, full=True).expired == 1
    assert contents(world) == (0, 0)


# --- H33: one plan, cuts between keys (deaths: tests/crash) ----------------------------


def test_H33_all_versions_of_a_key_go_the_same_way(world):
    """H33: a job that is cut into many tasks cuts between keys, and loses none at an edge."""
    for value in (b"1", b"2", b"3"):
        put(world, {f"k{n:02}": value * 40 for n in range(12)}, deleted=["k05"])
    report = compact(world.db, NAME, full=True, **TINY)
    assert report.outputs > 4
    ordered = sorted(world.head().segments, key=lambda segment: segment.min_key)
    bounds = [(s.min_key, s.max_key) for s in ordered]
    assert all(left[1] < right[0] for left, right in pairwise(bounds))
    assert world.rows() == {b"k%02d" % n: b"3" * 40 for n in range(12) if n != 5}


# --- H35: who decides -----------------------------------------------------------------------


def _between(world, does, method="list", part="/segments/"):
    return reef.Database(At(world.bucket, method, part, does, after=True))


def test_H35_a_compactor_that_was_overtaken_changes_nothing(world):
    """H35: its epoch is not the current one any more: it steps down, and says so quietly."""
    put(world, {"a": b"1"})
    put(world, {"a": b"2"})

    def rival():
        Publisher(world.bucket, USERS).publish(edits.raise_compactor_epoch)

    before = world.head().segments
    db = _between(world, rival, "upload")
    compactor = Compactor(db, NAME, full=True, **SMALL)
    report = compactor.step()
    assert (report.outcome, report.published, report.epoch) == ("superseded", False, 2)
    assert world.head().segments == before
    assert compactor.epoch is None
    compactor.close()
    assert world.head().compactor_epoch == 2, "to step down is not to take the role back"


class LosesAResponse(Wrapper):
    """Publishes, lets another process continue from there, and loses the response. Once."""

    then = None

    def create(self, key, body):
        """Lose the response to a manifest PUT."""
        result = self.inner.create(key, body)
        if self.then is None or "/manifest/" not in key:
            return result
        then, self.then = self.then, None
        then()
        return WriteResult(Outcome.UNKNOWN)


def test_H35_a_role_that_another_process_acquired_is_not_mistaken_for_ones_own(world):
    """H35: our publish counts, as the head remembers, but the epoch in it is a rival's."""
    put(world, {"a": b"1"})
    put(world, {"a": b"2"})
    store = LosesAResponse(world.bucket)
    compactor = Compactor(reef.Database(store), NAME, full=True, **SMALL)
    rival = Publisher(world.bucket, USERS)
    store.then = lambda: rival.publish(edits.raise_compactor_epoch)
    assert compactor.step() is None
    assert compactor.epoch is None
    compactor.close()
    assert (world.head().compactor_epoch, world.head().compactor_job) == (2, "compact-2")
    store.then = lambda: None
    assert compactor.step(take_over=True).epoch == 3, "without a rival it is ours"


def test_H35_two_whole_compactions_one_within_the_other(world):
    """H35: the inner one wins wholly; the outer one's inputs are gone, and it says so."""
    put(world, {"a": b"1", "b": b"1"})
    put(world, {"a": b"2"}, deleted=["b"])
    inner = []
    db = _between(
        world, lambda: inner.append(compact(world.db, NAME, full=True, **SMALL)), "upload"
    )
    outer = compact(db, NAME, full=True, **SMALL)
    assert (inner[0].outcome, outer.outcome) == ("compacted", "superseded")
    assert world.rows() == {b"a": b"2"}
    assert len(world.head().segments) == 1
    assert is_balanced(world.head())


def test_H35_an_input_that_was_taken_out_refuses_the_publish(world):
    """H35: inputs are checked again at publication, whichever process changed them."""
    put(world, {"a": b"1"})
    put(world, {"a": b"2"})
    oldest = by_age(world.head().segments)[0]

    def repair():
        world.publish(segments=tuple(s for s in world.head().segments if s.id != oldest.id))

    report = compact(_between(world, repair, "upload"), NAME, full=True, **SMALL)
    assert report.outcome == "superseded"
    assert len(world.head().segments) == 1


def test_H35_an_older_segment_that_came_in_meanwhile_refuses_the_publish(world):
    """H35, H34: a delete was dropped since nothing older was there; now there is."""
    put(world, {"k": b"old"})
    (old,) = world.head().segments
    put(world, {}, deleted=["k"])
    world.publish(segments=tuple(s for s in world.head().segments if s.id != old.id))

    def comes_back():
        world.publish(segments=(*world.head().segments, old))

    report = compact(_between(world, comes_back, "get_range"), NAME, full=True, **SMALL)
    assert report.outcome == "superseded"
    assert world.rows() == {}


def test_H35_a_fold_in_the_middle_is_no_conflict(world):
    """H35: what comes in is newer than all that the job has read: both publish."""
    put(world, {"a": b"1", "b": b"1"})
    put(world, {"a": b"2"}, deleted=["b"])
    db = _between(world, lambda: put(world, {"b": b"3"}), "upload")
    assert compact(db, NAME, full=True, **SMALL).outcome == "compacted"
    assert world.rows() == {b"a": b"2", b"b": b"3"}


def test_H35_a_background_compactor_waits_for_one_that_is_at_work(world):
    """H35: two that took the role from each other would never finish; one that died is replaced."""
    put(world, {"a": b"1"})
    first = Compactor(world.db, NAME, full=True, **SMALL)
    assert first.step().outcome == "compacted"
    second = Compactor(world.db, NAME, full=True, **SMALL)
    assert not second.is_due(world.head())
    assert second.step() is None
    world.advance(800)
    put(world, {"b": b"1"})
    assert first.step().outcome == "compacted"
    world.advance(800)
    assert second.step() is None, "the first one has made progress"
    world.advance(901)
    assert second.is_due(world.head())
    assert second.step().outcome == "compacted"
    assert first.step() is None
    second.close()
    assert first.step().outcome == "compacted"


# --- H36: range tombstones ------------------------------------------------------------------


def test_H36_range_deletes_are_cut_at_the_edges_of_outputs(world, monkeypatch):
    """H36: each output has its part, within its bounds; rows they hide stay hidden."""
    old = {f"k{n:02}": b"old" * 20 for n in range(20)}
    put(world, old)
    put(world, {f"k{n:02}": b"mid" * 20 for n in range(20)})
    put(world, {}, ranges=[("k03", "k17")])
    choose(monkeypatch, lambda segments: by_age(segments)[1:])
    compact(world.db, NAME, strategy="chosen", rounds_max=1, **TINY)
    expected = {k.encode(): b"mid" * 20 for k in old if not "k03" <= k < "k17"}
    assert world.rows() == expected
    made = [s for s in world.head().segments if s.level == 1]
    assert sum(s.tombstones for s in made) > 1, "it was cut"
    covered = []
    for entry in made:
        tail = check_segment(world.bucket.get(USERS.segment(entry.id)), entry.id)
        for tombstone in tail.range_tombstones:
            assert entry.min_key <= tombstone.start < tombstone.end <= entry.max_key
            covered.append((tombstone.start, tombstone.end))
    covered.sort()
    assert (covered[0][0], covered[-1][1]) == (b"k03", b"k17")
    assert all(a[1] == b[0] for a, b in pairwise(covered)), "no gap"


def test_H36_a_range_delete_stays_only_where_it_hides_something(world, monkeypatch):
    """H36, H34: over the keys of an older segment that was not merged, and nowhere else."""
    put(world, {"d": b"old", "f": b"old"})
    put(world, {"a": b"1", "z": b"1"}, ranges=[("b", "y")])
    choose(monkeypatch, lambda segments: by_age(segments)[1:])
    compact(world.db, NAME, strategy="chosen", rounds_max=1, **SMALL)
    (made,) = [s for s in world.head().segments if s.level == 1]
    tail = check_segment(world.bucket.get(USERS.segment(made.id)), made.id)
    assert [(t.start, t.end) for t in tail.range_tombstones] == [(b"d", b"f\0")]
    assert world.rows() == {b"a": b"1", b"z": b"1"}


@pytest.mark.parametrize("ingested", [False, True])
def test_H36_a_range_delete_goes_with_all_that_it_hides(world, ingested):
    """H36: older rows go, newer ones stay; that of an ingest has the ingest's LSN."""
    put(world, {"a": b"1", "d": b"1", "f": b"1"})
    if ingested:
        ingest_rows(world.db, NAME, [(b"e", OpKind.PUT, {1: b"1"})], [(b"b", b"y")])
        fold(world.db, NAME)
    else:
        with world.db.writer(NAME) as writer:
            writer.write(reef.Batch().put("d", b"2").delete_range("b", "y").put("e", b"1"))
        fold(world.db, NAME)
    put(world, {"f": b"2"})
    compact(world.db, NAME, full=True, **SMALL)
    assert contents(world) == (3, 0)
    assert world.rows() == {b"a": b"1", b"e": b"1", b"f": b"2"}


# --- H37: lineage ---------------------------------------------------------------------------


def test_H37_footers_name_siblings_and_all_ancestors_that_are_left(world):
    """H37: of merged siblings of merged siblings too; never a swept object."""
    put(world, {f"a{n}": b"x" * 30 for n in range(4)})
    put(world, {f"a{n}": b"y" * 30 for n in range(4)})
    first = {s.id for s in world.head().segments}
    compact(world.db, NAME, full=True, **TINY)
    second = world.head().segments
    assert len(second) > 1
    for entry in second:
        found = footer(world, entry)
        assert set(found.ancestors) == first
        assert {*found.siblings, entry.id} == {s.id for s in second}
        assert (found.level, found.write_id) == (entry.level, entry.id)
    assert len({footer(world, entry).job for entry in second}) == 1
    put(world, {"a0": b"z"})
    newest = {s.id for s in world.head().segments} - {s.id for s in second}
    compact(world.db, NAME, full=True, **TINY)
    third = footer(world, world.head().segments[0])
    assert set(third.ancestors) == first | {s.id for s in second} | newest
    world.advance(DAY_S)
    world.sweep_twice()
    put(world, {"a0": b"zz"})
    compact(world.db, NAME, full=True, **TINY)
    fourth = footer(world, world.head().segments[0])
    assert not set(fourth.ancestors) & first


# --- H28: outputs in flight -------------------------------------------------------------------


class SlowSecondUpload(Wrapper):
    """Between the second output and the third, hours go by, and a sweep."""

    def __init__(self, world):
        super().__init__(world.bucket)
        self.world, self.uploads = world, 0

    def upload(self, key, parts):
        size = self.inner.upload(key, parts)
        self.uploads += 1
        if self.uploads == 2:
            self.world.advance(8 * GRACE_S)
            self.world.sweep_twice()
        return size


def test_H28_segments_that_a_compactor_stages_are_kept_for_it(world):
    """H28: it takes longer than the grace period, a sweep comes by, and it publishes."""
    put(world, {f"k{n:02}": b"x" * 40 for n in range(8)})

    db = reef.Database(SlowSecondUpload(world))
    report = world.run(lambda: compact(db, NAME, full=True, **{**TINY, "tasks_max": 1}))
    assert (report.outcome, report.outputs > 2) == ("compacted", True)
    assert len(world.rows()) == 8


def test_H28_segments_of_a_dead_compactor_are_swept_once_another_acquires_the_role(world):
    """H28: until then it is kept; it may be alive."""
    put(world, {"a": b"1"})
    world.publish(compactor_epoch=1, compactor_job="compact-1")
    world.bucket.put(USERS.segment("compact-1-orphan"), b"half a job")
    world.advance(8 * GRACE_S)
    world.sweep_twice()
    assert "compact-1-orphan.seg" in world.keys("segments")
    compact(world.db, NAME, full=True, **SMALL)
    assert world.head().compactor_job == ""
    world.advance(GRACE_S + 60)
    world.sweep_twice()
    assert "compact-1-orphan.seg" not in world.keys("segments")
    assert world.rows() == {b"a": b"1"}


def test_H28_a_condemned_output_is_not_published(world):
    """H28, H55: if a sweep did condemn it, the job fails, and nothing has changed."""
    put(world, {"a": b"1"})
    before = world.head().segments

    def condemn():
        staged = [k for k in world.keys("segments") if k.startswith("compact-")]
        world.publish(condemned=tuple(Condemned(f"segments/{key}", 1, 0) for key in staged))

    db = _between(world, condemn, "upload")
    with pytest.raises(reef.ConflictError):
        compact(db, NAME, full=True, **SMALL)
    assert world.head().segments == before
