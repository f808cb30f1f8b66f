"""Edges of pins, views and tails that one line each protects; every test here kills a mutant."""

import msgspec
import pytest

from reef.engine.history.as_of import History
from reef.engine.history.changes import _registering
from reef.engine.log.log import Log
from reef.engine.read.caches import ByteCache
from reef.engine.read.segments import SegmentStore
from reef.errors import CorruptionError, NotFoundError
from reef.formats.manifest import Condemned, CondemnedRange, OpenJob, SnapshotEntry
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.wal_object import OpKind, WalKind, WalObject
from reef.jobs.repair.segments import in_order
from reef.manifest.edits import check_active, find_snapshot, hold_lsn_of, is_active
from reef.manifest.repairs import Repairs, apply_repairs
from tests.hazards.test_log import batch
from tests.support.bulk_jobs import append
from tests.support.sweep_world import NAME, USERS, World
from tests.unit.engine.log.test_log_rules import tail_of
from tests.unit.jobs.test_compact_edges import versions
from tests.unit.manifest.test_edits import changed


@pytest.fixture
def world():
    """A namespace with one row."""
    world = World()
    with world.db.writer(NAME) as writer:
        writer.put("k", b"0")
    return world


# --- pins -----------------------------------------------------------------------------


@pytest.mark.parametrize(("slot", "is_needed"), [(2, False), (3, True), (4, True)])
def test_H22_a_generation_needs_the_slot_just_below_its_floor(slot, is_needed):
    """H22: its write id and its date are there; once it is condemned nothing pins it any more."""
    alone = changed(wal_floor=9, condemned=(Condemned(f"wal/{slot:020}.wal", 1, 0),))
    in_range = changed(wal_floor=9, condemned_ranges=(CondemnedRange("wal", 1, slot, 1, 0),))
    pinned = changed(generation=6, wal_floor=4)
    for head in (alone, in_range):
        if not is_needed:
            check_active(head, pinned, 0)
            continue
        with pytest.raises(NotFoundError, match="has condemned"):
            check_active(head, pinned, 0)


@pytest.mark.parametrize(("last", "is_needed"), [(5, False), (6, True), (7, True)])
def test_H22_a_generation_needs_its_manifest(last, is_needed):
    """H22: it may be pinned by a release that does not know ranges, but not by this one."""
    head = changed(generation=9, condemned_ranges=(CondemnedRange("manifest", 2, last, 1, 0),))
    pinned = changed(generation=6)
    if not is_needed:
        return check_active(head, pinned, 0)
    with pytest.raises(NotFoundError, match="has condemned"):
        check_active(head, pinned, 0)


def test_H18_a_generation_that_a_repair_skipped_is_not_active():
    """H18: it cannot be read, whether it is retained or not."""
    head = changed(skipped_generations=(5,))
    assert [is_active(head, generation, 0) for generation in (5, 6)] == [False, True]


def test_H30_a_snapshot_that_has_expired_is_not_found():
    """H30: as soon as the store's clock says so, whether it was swept or not."""
    head = changed(snapshots=(SnapshotEntry("id", 7, "name", expires_at_ms=100),))
    assert find_snapshot(head, "name", 99).id == "id"
    with pytest.raises(NotFoundError, match="expired"):
        find_snapshot(head, "name", 100)


def test_H44_a_cursor_is_not_registered_where_the_log_is_gone():
    """H44: a sweep between the check and the publish takes the generation: it checks again."""
    head = changed(wal_floor=9, oldest_retained=7)
    assert _registering("name", 4, changed(generation=6, wal_floor=3))(head) is None
    assert _registering("name", 4, changed(generation=7, wal_floor=3))(head).cursors


# --- the end of the log ---------------------------------------------------------------


def test_the_end_of_the_log_is_its_first_gap(world):
    """Objects ahead of a gap do not count yet; a skipped slot is no gap."""
    last = max(world.slots())
    append(world.bucket, NAME, WalKind.SKIP, lsn=last + 2)
    history = History(world.bucket, USERS, SegmentStore(world.bucket, USERS, ByteCache(0)))
    assert history.end_of_log(world.head()) == last
    skipped = msgspec.structs.replace(world.head(), skipped_lsns=(last + 1,))
    assert history.end_of_log(skipped) == last + 2


def test_H65_a_drop_ends_the_log_behind_its_last_fence(world):
    """H65: a late PUT of the writer must not find an open slot in the next life's log."""
    with world.db.writer(NAME, max_parallel_writes=3):
        pass
    world.publish(max_parallel_writes=3)
    dropped = world.db._namespaces.drop(NAME)
    assert dropped.dropped.end_lsn == max(world.slots()) + 1


def test_an_object_in_the_slot_of_another_is_damage(world):
    """Its header says which slot it was written for."""
    log, last = Log(world.bucket, USERS), max(world.slots())
    header = msgspec.structs.replace(log.read(last).header, batches=())
    log.fill(last + 1, WalObject.encode(header))
    with pytest.raises(CorruptionError, match=f"LSN {last}"):
        log.read(last + 1)


# --- tails ----------------------------------------------------------------------------


class Watcher:
    """Counts its notifications."""

    def __init__(self):
        self.heard = []

    def applying(self, batches=(), segments=()):
        self.heard.append("applying")

    def applied(self):
        self.heard.append("applied")

    def lost_track(self):
        self.heard.append("lost track")


def own(tail, lsn, after):
    """Return the header of a writer's own object."""
    return batch(lsn, "own", after)


def test_H45_rows_that_were_visible_early_are_applied_once(world):
    """H45: in independent order an object that landed early is not applied again in its turn."""
    tail, watcher = tail_of(world), Watcher()
    tail.watch(watcher)
    header = own(tail, tail.next_lsn, None)
    tail.apply_early(header, [])
    tail.apply_own(header, [], 0)
    assert watcher.heard == ["applying", "applied"]


def test_H45_an_own_object_that_is_void_is_not_applied(world):
    """H45: it landed, and everybody else passes over it."""
    tail, watcher = tail_of(world), Watcher()
    tail.watch(watcher)
    known = tail.rules.last_ids()[-2]
    tail.apply_own(own(tail, tail.next_lsn, (known, "another")), [], 0)
    assert watcher.heard == []


def test_H41_watchers_of_a_tail_that_starts_again_have_lost_track(world):
    """H41: the objects between the two were applied unseen: open transactions are too old."""
    tail, watcher = tail_of(world), Watcher()
    tail.watch(watcher)
    tail.restarted(world.head())
    assert watcher.heard == ["lost track"]


# --- repair ---------------------------------------------------------------------------


def test_H17_lsns_that_earlier_repairs_skipped_stay_skipped():
    """H17: a slot that counts again would show rows that no process has seen since."""
    repaired = apply_repairs(changed(skipped_lsns=(3,)), Repairs(skipped_lsns=frozenset({5})))
    assert repaired.skipped_lsns == (3, 5)


def test_H60_a_repair_resolves_no_patch_above_an_open_begin():
    """H60: rows of such a load sort at its begin, below the patch."""
    jobs = (OpenJob("a", 4, None, live_wins=True), OpenJob("b", 2, None, live_wins=False))
    assert hold_lsn_of(jobs) == 4


def test_H68_of_a_row_and_the_patch_that_it_was_made_of_the_row_stays():
    """H68: a merge has resolved the patch: both have its LSN and sequence."""
    put, patch = (versions((b"k", 5, 0, kind)) for kind in (OpKind.PUT, OpKind.PATCH))
    for parts in ([put, patch], [patch, put]):
        assert in_order(parts, DEFAULT_SCHEMA).kinds.tolist() == [OpKind.PUT]
