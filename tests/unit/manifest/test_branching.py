"""The edits that make, pin and restore branches: nothing that an origin knows is left out (H42)."""

import msgspec
import pytest

from reef.errors import ConflictError, NotFoundError
from reef.formats.manifest import (
    BranchPin,
    Condemned,
    InheritedLog,
    Manifest,
    OpenJob,
    Origin,
    Recent,
    Successor,
)
from reef.formats.schema import DEFAULT_SCHEMA
from reef.manifest import branching

ORIGIN = Origin("branch", "namespaces/origin", 7, 20, 0)
PIN = BranchPin("namespaces/child", 7, 20, 0)
HEAD = Manifest(
    generation=7,
    write_id="h",
    published_at_ms=0,
    wal_floor=10,
    wal_id_last_seen=15,
    recent=(Recent(7, "h", 0),),
)


def changed(**changes):
    """Return the head of the origin with some fields changed."""
    return msgspec.structs.replace(HEAD, **changes)


@pytest.mark.parametrize(("last_lsn", "is_pinned"), [(8, False), (9, True), (20, True)])
def test_H42_a_branch_pins_no_log_that_was_folded_since_it_was_read(last_lsn, is_pinned):
    """H42: its rows would be in segments of later LSNs; the log just below the floor is enough."""
    pin = msgspec.structs.replace(PIN, last_lsn=last_lsn)
    pinned = branching.pin_branch(HEAD, "branch", pin, None, 0)
    assert (pinned is not None) == is_pinned
    if pinned is not None:
        assert pinned.branches["branch"].generation == HEAD.generation + 1
        assert pinned.wal_id_last_seen == max(15, last_lsn)


@pytest.mark.parametrize(
    "released",
    [
        {"pinned_homes": ()},
        {"condemned": (Condemned(branching.HOMES + "namespaces/other", 7, 0),)},
    ],
    ids=["released", "being released"],
)
def test_H42_a_generation_whose_homes_are_released_cannot_be_branched(released):
    """H42: its objects are in the folder of another namespace, which may delete them by now."""
    inherited = (InheritedLog(12, "namespaces/other"),)
    head = changed(inherited=inherited, pinned_homes=("namespaces/other",))
    assert branching.pin_branch(head, "branch", PIN, head, 0).branches == {"branch": PIN}
    later = msgspec.structs.replace(head, **released)
    with pytest.raises(NotFoundError, match="objects of namespaces/other, which were released"):
        branching.pin_branch(later, "branch", PIN, head, 0)


def test_H42_a_branch_of_a_branch_is_pinned_only_where_its_origin_is():
    """H42: an origin that has just released its own one has nothing to pin there."""
    head = changed(branches={"parent": PIN})
    pinned = branching.pin_again(head, "branch", "parent", "namespaces/grandchild")
    assert pinned.branches["parent"] == PIN
    assert pinned.branches["branch"].root == "namespaces/grandchild"
    assert pinned.branches["branch"].generation == PIN.generation
    with pytest.raises(ConflictError):
        branching.pin_again(HEAD, "branch", "parent", "namespaces/grandchild")


def test_a_pin_is_removed_alone():
    """Others stay, and a second removal changes nothing."""
    head = changed(branches={"one": PIN, "other": PIN})
    left = branching.unpin_branch(head, "one")
    assert left.branches == {"other": PIN}
    assert branching.unpin_branch(left, "one") is None


def test_the_first_manifest_of_a_branch_judges_the_log_as_its_origin_does():
    """The inherited log is replayed by the rules of the origin: epochs of fences, slots that a
    repair skips, loads that are open or have lost their begin."""
    source = changed(
        writer_epoch=3,
        compactor_epoch=4,
        open_jobs=(OpenJob("job", 5),),
        skipped_lsns=(11,),
        max_parallel_writes=3,
        grace_before_ms=3_600_000,
    )
    head = changed(
        generation=9,
        writer_epoch=6,
        compactor_epoch=2,
        skipped_lsns=(11, 13),
        ingests_without_begin=(14,),
    )
    first = branching.first_manifest(source, head, ORIGIN)
    assert (first.writer_epoch, first.compactor_epoch) == (6, 5)
    assert first.open_jobs == source.open_jobs
    assert first.skipped_lsns == (11, 13)
    assert first.ingests_without_begin == (14,)
    assert first.max_parallel_writes == 3
    assert first.grace_ms == 3_600_000
    assert (first.wal_floor, first.wal_base, first.wal_id_last_seen) == (10, 10, 20)
    assert first.inherited == (InheritedLog(20, ORIGIN.root),)
    assert first.pinned_homes == (ORIGIN.root,)


@pytest.mark.parametrize("epochs", [(2, 9), (9, 2)])
def test_H48_a_branch_in_the_place_of_a_dropped_name_has_the_higher_epochs(epochs):
    """H48: a zombie of either namespace stays fenced."""
    own, dropped = epochs
    successor = Successor(2, DEFAULT_SCHEMA, 30, 1, writer_epoch=dropped, compactor_epoch=dropped)
    first = changed(writer_epoch=own, compactor_epoch=own)
    made = branching.as_successor(first, successor)
    assert (made.writer_epoch, made.compactor_epoch) == (9, 9)
    assert (made.generation, made.oldest_retained, made.incarnation) == (30, 30, 2)


def test_H42_a_pin_is_needed_while_that_very_branch_needs_the_folder():
    """H42: another branch of the same path, or one that has released the folder, needs no pin."""
    child = changed(origin=ORIGIN, pinned_homes=(ORIGIN.root,))
    assert not branching.is_dead(child, "branch", ORIGIN.root)
    assert branching.is_dead(child, "another", ORIGIN.root)
    assert branching.is_dead(child, "branch", "namespaces/elsewhere")
    assert branching.is_dead(changed(), "branch", ORIGIN.root)


def test_the_inherited_log_is_needed_up_to_its_last_lsn():
    """A floor behind it needs nothing of its folder."""
    child = changed(inherited=(InheritedLog(12, "one"), InheritedLog(20, "other")))
    assert branching.inherited_homes(child, 12) == {"one", "other"}
    assert branching.inherited_homes(child, 13) == {"other"}
    assert branching.inherited_homes(child, 21) == set()


def test_H48_a_restored_namespace_repeats_no_position_and_no_epoch():
    """H48: a reader, a receipt or a writer of the lost one is never valid in the restored one."""
    state = changed(writer_epoch=3, compactor_epoch=4, stream_marks={"s": 5})
    first = branching.restored_manifest(state, 99)
    assert first.wal_floor == first.wal_base == first.wal_id_last_seen + 1
    assert first.wal_base >= 10 + branching.RESTORED_LSNS
    assert first.writer_epoch >= 3 + branching.RESTORED_EPOCHS
    assert first.compactor_epoch >= 4 + branching.RESTORED_EPOCHS
    assert first.stream_marks == {"s": 5}
    successor = Successor(2, DEFAULT_SCHEMA, 30, 10 * branching.RESTORED_LSNS)
    second = branching.restored_successor(first, successor)
    assert second.wal_base == second.wal_floor == 10 * branching.RESTORED_LSNS
    earlier = msgspec.structs.replace(successor, wal_base=1)
    assert branching.restored_successor(first, earlier).wal_base == first.wal_base
