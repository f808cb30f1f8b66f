"""Damage in a branch, and in the objects that it shares with its origin (H17, H18, H42, H68).

A branch names segments and slots in the folder of its origin. Verify and repair of the branch
cover them too; a loss of manifests on one side must not delete objects that the other side needs.
"""

import re

import pytest

from reef.formats.manifest import encode_manifest
from reef.jobs import compact, fold, rebuild, repair, verify
from reef.manifest.roots import UNKNOWN_GENERATION
from tests.support.damage import flip
from tests.support.rebuild import compact_these
from tests.support.sweep_world import NAME
from tests.unit.engine.handles.test_branches import (
    BEFORE,
    CHILD,
    HOUR_S,
    head_of,
    rows_of,
    sweep_out,
    world,
)

__all__ = ["world"]  # a fixture

MINE = {**BEFORE, b"mine": b"1"}


@pytest.fixture
def branch(world):
    """Give a branch with a row of its own, over an origin that has moved on."""
    world.db.branch(NAME, CHILD)
    with world.db.writer(CHILD, background=False) as writer:
        writer.put("mine", b"1")
    with world.db.writer(NAME, background=False) as writer:
        writer.put("b", b"later")
    return world


def shared_segment(world):
    """Return the key of the folded segment that branch and origin share."""
    segments = [s for s in head_of(world, CHILD).segments if s.home and not s.visible_lsn]
    return f"{segments[0].home}/segments/{segments[0].id}.seg"


def manifests(world, name):
    """Return the keys of the manifests of a namespace, the newest last."""
    return [info.key for info in world.bucket.list(f"namespaces/{name}/manifest/")]


def lost_keys(report):
    """Return the key ranges that a repair reports as lost."""
    ranges = [r for segment in report.lost.segments for r in segment.ranges]
    return [(r.first_key, r.last_key) for r in ranges]


def test_H68_a_branch_is_verified_with_the_segments_of_its_origin(branch):
    """H68: verify passed over segments with a home, and so did repair: the branch could not be
    read, and both said that nothing is wrong. Root: a survey named own segments only.
    """
    key = shared_segment(branch)
    flip(branch.bucket, key, -60)  # the footer
    for name in (NAME, CHILD):
        assert [p.object for p in verify(branch.db, name).problems] == [key]
    report = repair(branch.db, CHILD, apply=True)
    assert not report.lost.rows_of_the_newest_state
    assert (rows_of(branch.db, CHILD), report.quarantined) == (MINE, ())
    assert verify(branch.db, CHILD, deep=True).problems == []
    assert all(segment.home is None for segment in head_of(branch, CHILD).segments)


def test_H68_rows_of_a_shared_segment_that_no_source_has_are_reported(branch):
    """H68: the branch has no log below its point in time."""
    branch.bucket.delete(shared_segment(branch))
    dry = repair(branch.db, CHILD)
    report = repair(branch.db, CHILD, apply=True)
    assert dry.lost == report.lost
    assert lost_keys(report) == [(b"a", b"b")]
    assert rows_of(branch.db, CHILD) == MINE, "a was deleted, and b was written later"


def test_H18_the_inherited_log_of_a_branch_with_a_damaged_head_is_not_lost(branch):
    """H18: its slots are in another folder, which only a manifest names. With the newest one
    damaged they were taken for missing, and skipped: intact rows were given up. Root: the names of
    a branch came from an intact head, or lacked the inherited log.
    """
    flip(branch.bucket, manifests(branch, CHILD)[-1], -60)
    report = repair(branch.db, CHILD, apply=True)
    assert (report.lost.lsns, report.lost.rows_of_the_newest_state) == ((), False)
    assert rows_of(branch.db, CHILD) == MINE
    assert verify(branch.db, CHILD, deep=True).problems == []


def test_H42_the_pin_of_a_branch_outlives_the_generation_that_it_names(branch):
    """H42: the pinned manifest is damaged. A repair leaves a pin on everything, and a namespace
    that verifies; before, the damage was reported for ever.
    """
    (pin,) = head_of(branch, NAME).branches.values()
    flip(branch.bucket, branch.names.manifest(pin.generation), -60)
    report = repair(branch.db, NAME, apply=True)
    assert pin.generation in report.lost.generations
    assert verify(branch.db, NAME, deep=True).problems == []
    (pin,) = head_of(branch, NAME).branches.values()
    assert pin.generation == UNKNOWN_GENERATION
    fold(branch.db, NAME)
    compact(branch.db, NAME, full=True)
    branch.advance(2 * HOUR_S)
    sweep_out(branch, NAME, rounds=3)
    assert rows_of(branch.db, CHILD) == MINE
    assert verify(branch.db, CHILD, deep=True).problems == []


@pytest.mark.parametrize("how", ["damaged", "lost"])
def test_H42_a_manifest_that_only_a_branch_pins_is_verified(branch, how):
    """H42: no other root of the origin needs it any more. Seed 1189 of the crossed machine."""
    fold(branch.db, NAME)
    branch.advance(2 * HOUR_S)
    sweep_out(branch, NAME, rounds=3)
    (pin,) = head_of(branch, NAME).branches.values()
    assert pin.generation < head_of(branch, NAME).oldest_retained
    key = branch.names.manifest(pin.generation)
    branch.bucket.delete(key) if how == "lost" else flip(branch.bucket, key, -60)
    assert [p.object for p in verify(branch.db, NAME).problems] == [key]
    assert not repair(branch.db, NAME, apply=True).lost.rows_of_the_newest_state
    assert verify(branch.db, NAME).problems == []
    assert rows_of(branch.db, CHILD) == MINE


def test_H42_a_branch_of_a_branch_with_an_unknown_generation_holds_every_home(branch):
    """H42: the branch in between needs no object of others any more; its own branch does, and the
    manifest that says so is lost.
    """
    fold(branch.db, CHILD)  # so that only segments of the origin are inherited further
    branch.db.branch(CHILD, "second")
    branch.db.branch("second", "third")
    (pin,) = head_of(branch, "second").branches.values()
    compact(branch.db, "second", full=True)
    flip(branch.bucket, f"namespaces/second/manifest/{pin.generation:020}.manifest.json", -60)
    repair(branch.db, "second", apply=True)
    branch.advance(2 * HOUR_S)
    sweep_out(branch, "second", CHILD, NAME, rounds=3)
    assert head_of(branch, "second").pinned_homes == (f"namespaces/{CHILD}", branch.names.root)
    assert rows_of(branch.db, "third") == MINE


@pytest.mark.parametrize("how", ["lost", "damaged"])
def test_H42_a_branch_whose_manifests_are_lost_keeps_its_pin(branch, how):
    """H42: a sweep of the origin took it for one that was never created, made it a dropped one
    and removed its pin: all rows of the branch were gone. Root: "no manifest" was the only sign
    of a branch that was never created; its log and its segments are others.
    """
    for key in manifests(branch, CHILD):
        branch.bucket.delete(key) if how == "lost" else flip(branch.bucket, key, -60)
    branch.advance(2 * HOUR_S)
    fold(branch.db, NAME)
    compact(branch.db, NAME, full=True)
    sweep_out(branch, NAME, rounds=3)
    assert len(head_of(branch, NAME).branches) == 1
    assert len(manifests(branch, CHILD)) == (0 if how == "lost" else 2)


@pytest.mark.parametrize("how", ["emptied", "deleted"])
def test_H42_a_sweep_of_the_origin_does_not_stop_at_a_damaged_slot_that_only_a_branch_needs(
    branch, how
):
    """H42: the slot is below every floor of the origin, so that no repair of it is concerned, and
    each of its sweeps failed. Now they keep everything. Seed 114 of the crossed machine.
    """
    fold(branch.db, NAME)
    compact(branch.db, NAME, full=True)
    branch.advance(2 * HOUR_S)
    sweep_out(branch, NAME, rounds=3)
    floor = head_of(branch, CHILD).wal_floor
    slot = branch.names.wal_object(floor + 1)
    branch.bucket.put(slot, b"") if how == "emptied" else branch.bucket.delete(slot)
    assert repair(branch.db, NAME, apply=True).problems == ()
    compact(branch.db, NAME, full=True)
    sweep_out(branch, NAME, rounds=2)
    assert branch.names.wal_object(floor) in branch_slots(branch)
    report = repair(branch.db, CHILD, apply=True)
    assert [lost.lsn for lost in report.lost.lsns] == [floor + 1]


def branch_slots(world):
    """Return the keys of the origin's log."""
    return [info.key for info in world.bucket.list(world.names.wal)]


# --- rebuild ----------------------------------------------------------------------------


def lose_manifests(world, name):
    """Delete all manifests of a namespace."""
    for key in manifests(world, name):
        world.bucket.delete(key)


def fold_and_write(world):
    """Fold the inherited log into a segment of the branch, and write on."""
    fold(world.db, CHILD)
    with world.db.writer(CHILD, background=False) as writer:
        writer.put("mine", b"1")


def compact_all(world):
    """Rewrite everything that the branch shares with its origin."""
    fold(world.db, CHILD)
    compact(world.db, CHILD, full=True)


@pytest.mark.parametrize("step", [None, fold_and_write, compact_all])
def test_H49_a_branch_is_rebuilt_from_the_point_in_time_that_its_origin_pins(branch, step):
    """H49: a rebuild read the folder of the branch only, and reported all that it had inherited as
    lost. Its first manifest follows from the generation and the LSN that the origin pins for it.
    """
    if step is not None:
        step(branch)
    with branch.db.writer(NAME, background=False) as writer:
        writer.delete("c")
    fold(branch.db, NAME)
    compact(branch.db, NAME, full=True)
    report = rebuild(branch.db, CHILD)
    assert (report.rows_equal, report.problems) == (True, ())
    origin = head_of(branch, CHILD).origin
    lose_manifests(branch, CHILD)
    branch.advance(2 * HOUR_S)
    sweep_out(branch, NAME, rounds=3)
    report = rebuild(branch.db, CHILD, apply=True)
    assert (report.problems, rows_of(branch.db, CHILD)) == ((), MINE)
    assert head_of(branch, CHILD).origin == origin
    assert verify(branch.db, CHILD, deep=True).problems == []


def test_H49_a_rebuilt_branch_releases_its_origin(branch):
    """H49, H42: it continues as before; nothing that it needs is swept, and nothing is held for
    ever.
    """
    lose_manifests(branch, CHILD)
    rebuild(branch.db, CHILD, apply=True)
    with branch.db.writer(CHILD, background=False) as writer:
        writer.put("after", b"1")
    branch.advance(2 * HOUR_S)
    sweep_out(branch, NAME, CHILD, rounds=3)
    assert rows_of(branch.db, CHILD) == {**MINE, b"after": b"1"}
    fold(branch.db, CHILD)
    compact(branch.db, CHILD, full=True)
    sweep_out(branch, CHILD, NAME, rounds=4)
    assert not head_of(branch, NAME).branches
    assert rows_of(branch.db, CHILD) == {**MINE, b"after": b"1"}
    assert rebuild(branch.db, CHILD).rows_equal


def test_H49_a_branch_of_a_branch_is_rebuilt(branch):
    """H49: the namespaces above its origin pin earlier points in time for it."""
    branch.db.branch(CHILD, "grandchild")
    with branch.db.writer("grandchild", background=False) as writer:
        writer.delete("b")
    lose_manifests(branch, "grandchild")
    assert rebuild(branch.db, "grandchild", apply=True).problems == ()
    assert rows_of(branch.db, "grandchild") == {b"c": b"loaded", b"mine": b"1"}
    assert head_of(branch, "grandchild").origin.root == f"namespaces/{CHILD}"


def test_H49_a_load_that_a_repair_of_the_origin_has_skipped_since_counts_in_the_branch(branch):
    """H49: the repair of the origin has replaced the damaged segment of the load, and its older
    views skip the load. A rebuild of the branch skipped it, too, and reported nothing. Seed 1102
    of the crossed machine.
    """
    fold(branch.db, CHILD)
    loaded = next(h for h in branch.bucket.list(f"{branch.names.root}/segments/") if "-" in h.key)
    flip(branch.bucket, loaded.key, 3)
    repair(branch.db, NAME, apply=True)
    lose_manifests(branch, CHILD)
    rebuild(branch.db, CHILD, apply=True, force=True)
    report = repair(branch.db, CHILD, apply=True)
    assert not report.lost.rows_of_the_newest_state
    assert rows_of(branch.db, CHILD) == MINE


def test_H49_an_inherited_segment_that_is_lost_is_named(branch):
    """H49: with its keys and LSNs, by the manifest of the origin; the other rows are there."""
    key = shared_segment(branch)
    branch.bucket.delete(key)
    lose_manifests(branch, CHILD)
    report = rebuild(branch.db, CHILD)
    assert len(report.problems) == 1
    assert re.search(r"no object has LSN \d+ to \d+ of b'a' to .*which was in", report.problems[0])
    rebuild(branch.db, CHILD, apply=True, force=True)
    assert rows_of(branch.db, CHILD) == MINE, "a was deleted, and b was written later"


def test_H49_a_branch_whose_point_in_time_is_lost_too_reports_its_inherited_lsns(branch):
    """H49: the pin does not name a generation any more; nothing is taken for complete."""
    (pin,) = head_of(branch, NAME).branches.values()
    flip(branch.bucket, branch.names.manifest(pin.generation), -60)
    repair(branch.db, NAME, apply=True)
    lose_manifests(branch, CHILD)
    report = rebuild(branch.db, CHILD)
    assert report.problems[0].startswith("no object has LSN 1 to")


def test_H18_the_head_of_a_branch_after_a_sweep_is_derived_with_its_inherited_segments(branch):
    """H18: the intact manifest needs segments that the branch has merged and swept since. The state
    is derived as in a rebuild, which lacked the segments of the origin.
    """
    fold(branch.db, CHILD)
    before = head_of(branch, CHILD)
    with branch.db.writer(CHILD, background=False) as writer:
        writer.put("after", b"1")
    fold(branch.db, CHILD)
    own = frozenset(s.id for s in head_of(branch, CHILD).segments if s.home is None)
    compact_these(branch.db, lambda s: s.id in own, name=CHILD)
    sweep_out(branch, CHILD, rounds=3)
    assert any(s.home for s in head_of(branch, CHILD).segments)
    newest = manifests(branch, CHILD)[-1]
    flip(branch.bucket, newest, -60)
    for key in manifests(branch, CHILD)[:-1]:
        branch.bucket.delete(key)
    older = f"namespaces/{CHILD}/manifest/{before.generation:020}.manifest.json"
    branch.bucket.put(older, encode_manifest(before))
    report = repair(branch.db, CHILD, apply=True)
    assert report.lost.holes == ()
    assert rows_of(branch.db, CHILD) == {**MINE, b"after": b"1"}
