"""Edges of pins, views and tails that one line each protects; every test here kills a mutant."""

import msgspec
import pytest

from reef.engine.history.cursor import _registering
from reef.engine.history.moments import History
from reef.engine.log import Log
from reef.engine.reading.cache import ByteCache
from reef.engine.reading.segments import SegmentStore
from reef.errors import CorruptionError, NotFoundError
from reef.formats.batch import OpKind
from reef.formats.manifest import Condemned, OpenJob, Snapshot
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.wal_object import WalKind, WalObject
from reef.jobs.repair_merge import hold_lsn_of, in_order
from reef.manifest.repairs import Repairs, apply_repairs
from reef.manifest.snapshots import check_active, find_snapshot, is_active
from tests.bulk import append
from tests.collecting import NAME, USERS, World
from tests.hazards.test_log import batch
from tests.unit.engine.test_log_edges import tail_of
from tests.unit.manifest.test_edit_edges import changed
from tests.unit.test_compact_edges import versions


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
    head = changed(wal_floor=9, condemned=(Condemned(f"wal/{slot:020}.wal", 1, 0),))
    wanted = changed(generation=6, wal_floor=4)
    if not is_needed:
        return check_active(head, wanted, 0)
    with pytest.raises(NotFoundError, match="has condemned"):
        check_active(head, wanted, 0)


def test_H18_a_generation_that_a_repair_gave_up_is_not_active():
    """H18: it cannot be read, whether it is retained or not."""
    head = changed(skipped_generations=(5,))
    assert [is_active(head, generation, 0) for generation in (5, 6)] == [False, True]


def test_H30_a_snapshot_that_has_expired_is_not_found():
    """H30: from the moment on that the store's clock says so, whether it was swept or not."""
    head = changed(snapshots=(Snapshot("id", 7, "name", expires_at_ms=100),))
    assert find_snapshot(head, "name", 99).id == "id"
    with pytest.raises(NotFoundError, match="expired"):
        find_snapshot(head, "name", 100)


def test_H44_a_cursor_is_not_registered_where_the_log_is_gone():
    """H44: a sweep between the look and the publish takes the generation: it looks again."""
    head = changed(wal_floor=9, oldest_retained=7)
    assert _registering("name", 4, changed(generation=6, wal_floor=3))(head) is None
    assert _registering("name", 4, changed(generation=7, wal_floor=3))(head).cursors


# --- the end of the log ---------------------------------------------------------------


def test_the_end_of_the_log_is_its_first_gap(world):
    """What a job has put ahead does not count yet; a slot that was given up is no gap."""
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
    """Counts what it hears of."""

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


def test_H45_what_was_shown_early_is_applied_once(world):
    """H45: in independent order an object that landed early is not applied again in its turn."""
    tail, watcher = tail_of(world), Watcher()
    tail.watch(watcher)
    header = own(tail, tail.next_lsn, None)
    tail.apply_early(header, [])
    tail.take_own(header, [], 0)
    assert watcher.heard == ["applying", "applied"]


def test_H45_an_own_object_that_is_void_is_not_applied(world):
    """H45: it landed, and everybody else passes over it."""
    tail, watcher = tail_of(world), Watcher()
    tail.watch(watcher)
    known = tail.rules.last_ids()[-2]
    tail.take_own(own(tail, tail.next_lsn, (known, "another")), [], 0)
    assert watcher.heard == []


def test_H41_watchers_of_a_tail_that_starts_again_have_lost_track(world):
    """H41: what is between the two was applied unseen: open transactions are too old."""
    tail, watcher = tail_of(world), Watcher()
    tail.watch(watcher)
    tail.restarted(world.head())
    assert watcher.heard == ["lost track"]


# --- repair ---------------------------------------------------------------------------


def test_H17_what_earlier_repairs_gave_up_stays_given_up():
    """H17: a slot that counts again would show rows that nobody has seen since."""
    repaired = apply_repairs(changed(skipped_lsns=(3,)), Repairs(skipped_lsns=frozenset({5})))
    assert repaired.skipped_lsns == (3, 5)


def test_H60_a_repair_resolves_no_patch_above_an_open_begin():
    """H60: rows of such a load sort at its begin, below the patch."""
    jobs = (OpenJob("a", 4, None, live_wins=True), OpenJob("b", 2, None, live_wins=False))
    assert hold_lsn_of(changed(open_jobs=jobs)) == 4


def test_H68_of_a_row_and_the_patch_that_it_was_made_of_the_row_stays():
    """H68: a merge has resolved the patch: both have its LSN and sequence."""
    put, patch = (versions((b"k", 5, 0, kind)) for kind in (OpKind.PUT, OpKind.PATCH))
    for parts in ([put, patch], [patch, put]):
        assert in_order(parts, DEFAULT_SCHEMA).kinds.tolist() == [OpKind.PUT]
