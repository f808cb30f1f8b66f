"""Edges of edits, of publishing and of a sweep's roots; every test here kills a mutant."""

from types import SimpleNamespace

import msgspec
import pytest

from reef.config import SweepSettings
from reef.errors import ConflictError, InternalError, NotFoundError
from reef.formats.manifest import (
    Alias,
    Condemned,
    CondemnedRange,
    CursorEntry,
    Manifest,
    Recent,
    Rename,
)
from reef.formats.schema import DEFAULT_SCHEMA
from reef.jobs.sweep.plan import SweepPlan, SweepPlanner
from reef.manifest import edits, lifecycle
from reef.manifest.head import (
    RECENT_MAX,
    RECENT_MIN,
    RECENT_MS,
    HeadFinder,
    ManifestHead,
    Publisher,
    _trim,
)
from reef.manifest.invariants import broken_steps
from reef.stores import Outcome, Wrapper, WriteResult
from tests.support.sweep_world import GRACE_S, NAME, USERS, World
from tests.unit.manifest.test_head_publish import entry

HEAD = Manifest(generation=7, write_id="h", published_at_ms=0, recent=(Recent(7, "h", 0),))


def changed(**changes):
    """Return a manifest with some fields changed."""
    return msgspec.structs.replace(HEAD, **changes)


@pytest.fixture
def world():
    """A namespace on virtual time, with one row in its log."""
    world = World()
    with world.db.writer(NAME) as writer:
        writer.put("k", b"0")
    return world


# --- edits ----------------------------------------------------------------------------


CONDEMNED = (Condemned("segments/s.seg", 1, 0),)


def test_H55_no_edit_names_a_condemned_key():
    """H55: edits refuse by themselves; that the publisher does too is a second line."""
    head = changed(condemned=CONDEMNED, compactor_epoch=1)
    folded = edits.FoldResult(1, 2, (entry("s"),), (), (), ())
    with pytest.raises(ConflictError, match="was condemned"):
        edits.fold(head, folded)
    with pytest.raises(ConflictError, match="was condemned"):
        edits.compact(head, edits.CompactedSegments(1, (), (entry("s"),), 1))


def test_H32_a_key_is_condemned_once():
    """H32: a second condemnation would date it again, and let its deletion wait for ever."""
    condemned = edits.condemn(
        changed(condemned=CONDEMNED), edits.Condemnation(7, 7, ("segments/s.seg",), 99)
    )
    assert condemned.condemned == CONDEMNED


def test_H22_a_condemned_key_is_dated_by_the_oldest_generation_that_is_kept():
    """H22: none from there on names it, so a lease on one of those does not hold it."""
    condemned = edits.condemn(HEAD, edits.Condemnation(7, 5, ("segments/s.seg",), 99))
    assert condemned.condemned == (Condemned("segments/s.seg", 5, 99),)


def test_the_last_lsn_seen_does_not_fall_with_a_fold():
    """A snapshot may have seen further than a fold has come."""
    head = changed(wal_id_last_seen=9)
    assert edits.fold(head, edits.FoldResult(1, 4, (), (), (), ())).wal_id_last_seen == 9


def test_H34_what_compactions_have_dropped_is_never_forgotten():
    """H34: a scan that outlives several of them must hear of the newest delete that went."""
    head = changed(compactor_epoch=1, dropped_lsn=8, dropped_expired_ms=80)
    for lsn, expired_ms in ((5, 50), (9, 90)):
        done = edits.CompactedSegments(1, (), (), 1, dropped_lsn=lsn, dropped_expired_ms=expired_ms)
        after = edits.compact(head, done)
        assert (after.dropped_lsn, after.dropped_expired_ms) == (max(8, lsn), max(80, expired_ms))


def test_H35_only_older_rows_that_came_in_refuse_a_compaction():
    """H35: a fold brings in rows from the floor of the plan on: they are newer than all it read."""
    known = entry("known", lsn=2)
    for lsn, fits in ((4, False), (5, True), (6, True)):
        head = changed(compactor_epoch=1, segments=(known, entry("came", lsn=lsn)), wal_floor=9)
        done = edits.CompactedSegments(1, (), (), 5, frozenset({"known"}))
        assert (edits.compact(head, done) is not None) is fits


def test_H35_only_the_holder_gives_the_compactor_role_up():
    """H35: the segments that the next one stages would be swept."""
    head = edits.raise_compactor_epoch(HEAD)
    assert edits.release_compactor(head, head.compactor_epoch - 1) is None
    assert edits.release_compactor(head, head.compactor_epoch).compactor_job == ""


def test_H56_a_fenced_writer_does_not_lower_the_number_of_parallel_writes():
    """H56: the next writer has fenced for that many, and may have as many in flight."""
    head = changed(writer_epoch=2, max_parallel_writes=4)
    assert edits.lower_parallel_writes(head, 1, 2) is None
    assert edits.lower_parallel_writes(head, 2, 2).max_parallel_writes == 2


END = lifecycle.LogEnd(dropped_lsn=9, open_lsn=1)
DROPPED = msgspec.structs.replace(
    HEAD,
    state=lifecycle.NamespaceState.DROPPED,
    dropped=lifecycle.Dropped(0, 9, ()),
    grace_ms=1000,
    grace_before_ms=5000,
    predecessors=(1, 2),
    incarnation=3,
)


def test_H65_a_successor_continues_all_numbers():
    """H65: nothing of one life fits into the other, and both generations are free."""
    announced = lifecycle.succeed(DROPPED, DEFAULT_SCHEMA, 42, END, "job")
    first = lifecycle.first_manifest(announced.successor)
    assert first.generation == DROPPED.generation + 2, "one announces it"
    assert first.schema.id == DROPPED.schema.id + 1
    assert (first.grace_ms, first.created_at_ms, first.made_for) == (5000, 42, "job")
    assert first.predecessors == (1, 2, 3)
    assert lifecycle.forget_predecessor(first, 2).predecessors == (1, 3)


def test_H65_only_a_dropped_namespace_is_succeeded():
    """H65: one that was undropped meanwhile stays."""
    assert lifecycle.succeed(HEAD, DEFAULT_SCHEMA, 0, END) is None


def test_H65_a_cleared_namespace_has_no_cursors():
    """H65: the log that they follow has ended, and is not retained for them."""
    read_on = msgspec.structs.replace(DROPPED, cursors={"name": CursorEntry(1, 1)})
    assert lifecycle.clear_dropped(read_on).cursors == {}


SUCCEEDED = lifecycle.succeed(DROPPED, DEFAULT_SCHEMA, 42, END)
BACKWARDS = {
    "the incarnation never changes": (HEAD, {"incarnation": 2}),
    "epochs never fall": (changed(compactor_epoch=2), {"compactor_epoch": 1}),
    "a successor stays": (SUCCEEDED, {"successor": None}),
}


@pytest.mark.parametrize("rule", BACKWARDS)
def test_numbers_of_an_incarnation_never_go_back(rule):
    """The fields on which a process of the old incarnation relies stay."""
    before, changes = BACKWARDS[rule]
    after = msgspec.structs.replace(
        before, generation=before.generation + 1, write_id="new", **changes
    )
    assert rule in broken_steps(before, after)


# --- publishing -----------------------------------------------------------------------


def test_H14_recent_keeps_a_day_and_at_least_so_many():
    """H14: the entries that prove a publish that was slow for a day, or among many."""
    now_ms = 10 * RECENT_MS
    old = tuple(Recent(g, str(g), 0) for g in range(2 * RECENT_MIN))
    young = tuple(Recent(g, str(g), now_ms) for g in range(2 * RECENT_MIN))
    assert _trim(old, now_ms) == old[-RECENT_MIN:]
    assert _trim(young, now_ms) == young
    assert _trim((*old, *young), now_ms) == young
    many = tuple(Recent(g, str(g), now_ms) for g in range(2 * RECENT_MAX))
    assert _trim(many, now_ms) == many[-RECENT_MAX:]


def test_a_first_manifest_that_breaks_a_rule_is_not_created(world):
    """Nothing is published that could not be believed."""
    bad = edits.new_namespace(DEFAULT_SCHEMA, max_parallel_writes=0)
    other = USERS.at(2)
    with pytest.raises(InternalError, match="at least one PUT"):
        Publisher(world.bucket, other).create(bad)
    assert list(world.bucket.list(other.manifests)) == []


def grow(head):
    """An edit that shows how often it was applied."""
    return msgspec.structs.replace(head, grace_ms=head.grace_ms + 1)


class LosesTheResponse(Wrapper):
    """A publish lands, another process publishes after it, and the resend says EXISTS."""

    armed = True

    def __init__(self, inner, *, waits_s=0.0, doubt=False):
        super().__init__(inner)
        self.waits_s, self.doubt = waits_s, doubt

    def create(self, key, body):
        if not self.armed or not key.startswith(USERS.manifests):
            return self.inner.create(key, body)
        self.armed = False
        assert self.inner.create(key, body).landed
        Publisher(self.inner, USERS).publish(lambda head: head)
        self.runtime.sleep(self.waits_s)
        return WriteResult(Outcome.EXISTS, winner=b"another", doubt=self.doubt)


@pytest.mark.parametrize(("waits_s", "doubt"), [(0.0, True), (GRACE_S, False)])
def test_H66_exists_after_doubt_or_a_long_time_is_proved_by_recent(world, waits_s, doubt):
    """H66: its generation may have been swept and published again; the edit is applied once."""
    before = world.head().grace_ms
    store = LosesTheResponse(world.bucket, waits_s=waits_s, doubt=doubt)
    world.run(lambda: Publisher(store, USERS).publish(grow))
    assert world.head().grace_ms == before + 1


def test_H14_a_publish_is_as_old_as_the_head_that_it_was_made_from(world):
    """H14: while the edit took its time, the next generations were published and swept."""
    publisher, publishes = Publisher(world.bucket, USERS), []

    def slow(head):
        if not publishes:
            other = Publisher(world.bucket, USERS)
            publishes.extend(other.publish(grow).generation for _ in range(2))
            world.bucket.runtime.sleep(GRACE_S)
            world.bucket.delete(USERS.manifest(publishes[0]))
        return msgspec.structs.replace(head, max_parallel_writes=head.max_parallel_writes + 1)

    before = world.head()
    world.run(lambda: publisher.publish(slow))
    after = world.head()
    assert after.grace_ms == before.grace_ms + 2, "nothing of the others is lost"
    assert after.max_parallel_writes == before.max_parallel_writes + 1


@pytest.mark.parametrize(("share", "fresh"), [(0.0, True), (0.5, True), (0.51, False)])
def test_H47_a_head_is_fresh_for_half_a_grace(share, fresh):
    """H47: by the time a whole one has passed, the numbers behind it may be swept."""
    elapsed_s = HEAD.grace_ms / 1000 * share
    watch = SimpleNamespace(elapsed_s=lambda: elapsed_s)
    assert ManifestHead(HEAD, watch).fresh() is fresh
    assert ManifestHead(HEAD, watch).is_quick(elapsed_s) is fresh


# --- the sweep ------------------------------------------------------------------------


def test_H24_collected_generations_are_below_all_needed_ones():
    """H24: the slot just below the floor and the oldest generation that is kept are needed."""
    plan = SweepPlan(HEAD, 7, 0.0, (), {}, 0, wal_floor=5)
    slots = [plan.is_collected(USERS.wal_object(lsn)) for lsn in (3, 4, 5)]
    generations = [plan.is_collected(USERS.manifest(g)) for g in (6, 7)]
    assert (slots, generations) == ([True, False, False], [True, False])


def test_H17_a_slot_that_a_repair_voided_stays(world):
    """H17: it can be read all the same, and still an emptied slot could be filled again."""
    lsn = next(n for n in world.slots() if n > 1)
    world.fold()
    world.publish(skipped_lsns=(lsn,))
    with world.db.writer(NAME) as writer:
        writer.put("k", b"1")
    world.fold()
    deleted = world.sweep_twice()
    assert f"wal/{lsn:020}.wal" not in deleted
    assert lsn in world.slots()


def test_H62_orphans_wait_for_the_grace_that_holds(world):
    """H62: until a lowered grace holds, a job may still go by the longer one."""
    now_ms = int(world.bucket.now() * 1000)
    world.publish(grace_ms=1000, grace_before_ms=GRACE_S * 1000, grace_lowered_at_ms=now_ms)
    world.bucket.put(USERS.segment("orphan"), b"x")
    world.advance(GRACE_S / 2)
    orphan = "segments/orphan.seg"
    assert orphan not in {doomed.key for doomed in world.sweep().condemned}
    world.advance(GRACE_S)
    assert orphan in {doomed.key for doomed in world.sweep().condemned}


def test_H47_a_plan_is_of_a_head_that_was_listed(world):
    """H47: a probe finds no news where the generations in between were swept."""
    heads = HeadFinder(world.bucket, USERS)
    heads.find()
    swept = world.publish().generation
    newest = world.publish().generation
    world.bucket.delete(USERS.manifest(swept))
    executor = world.bucket.runtime
    planner = SweepPlanner(world.bucket, USERS, heads, executor, SweepSettings())
    assert world.run(planner.plan).head.generation == newest


@pytest.mark.parametrize(
    ("folder", "first", "last", "is_needed"),
    [
        ("wal", 1, 2, False),
        ("wal", 1, 3, True),  # the slot just below the floor
        ("wal", 5, 6, True),
        ("manifest", 1, 6, False),
        ("manifest", 7, 9, True),
        ("manifest", 8, 9, False),
    ],
)
def test_H32_a_generation_that_needs_a_condemned_number_is_not_pinned(
    folder, first, last, is_needed
):
    """Its manifest, or its log from the slot below its floor on."""
    pinned = changed(wal_floor=4)
    head = changed(generation=9, condemned_ranges=(CondemnedRange(folder, first, last, 9, 0),))
    if is_needed:
        with pytest.raises(NotFoundError, match="which a sweep has condemned"):
            edits.check_active(head, pinned, 0)
    else:
        edits.check_active(head, pinned, 0)


def test_H79_a_rename_needs_the_announcement_and_the_role():
    """A writer that opened since, or another rename: the old name stays."""
    renaming = Rename("new", "r1")
    manifest = lifecycle.announce(changed(writer_epoch=3), renaming)
    renamed = lifecycle.rename(manifest, renaming, 3, "old")
    assert (renamed.names, renamed.rename_id, renamed.renaming) == (("old", "new"), "r1", None)
    assert lifecycle.rename(manifest, renaming, 2, "old") is None
    assert lifecycle.rename(manifest, Rename("new", "r2"), 3, "old") is None
    assert lifecycle.rename(lifecycle.withdraw(manifest, "r1"), renaming, 3, "old") is None
    assert lifecycle.withdraw(manifest, "r2") is None


def test_H79_an_alias_is_replaced_only_if_it_is_the_one_that_was_read():
    """Another process may have pointed the name elsewhere, or created a namespace of it."""
    old, new = Alias("old", "r1"), Alias("other", "r2")
    recent = (Recent(1, "w", 5),)
    reserved = msgspec.structs.replace(lifecycle.alias_manifest(old), recent=recent)
    assert lifecycle.replace_alias(reserved, old, new).alias == new
    assert lifecycle.replace_alias(reserved, new, old) is None
    created = lifecycle.create_over(reserved, old, HEAD)
    assert created.alias is None
    assert created.recent == recent, "the proof of publishes in this chain"
    assert created.oldest_retained == reserved.generation + 1, "an alias has no rows to read"
    assert lifecycle.create_over(reserved, new, HEAD) is None
