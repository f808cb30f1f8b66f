"""A chain that restarts after damage: each field the safe way round (H18, H70)."""

import msgspec

from reef.formats.manifest import Condemned, CondemnedRange, CursorEntry, DedupEntry
from reef.formats.schema import DEFAULT_SCHEMA
from reef.manifest.repairs import Restart, merged_window, restart_after
from tests.unit.manifest.test_edits import HEAD, changed
from tests.unit.manifest.test_head_publish import entry

GROWN = msgspec.structs.replace(DEFAULT_SCHEMA, id=2)


def restarted(base=HEAD, **found):
    """Return the generation after two damaged ones."""
    known = {"epoch": 0, "max_parallel_writes": 1, "schemas": (), "last_lsn": 0, **found}
    return restart_after(base, Restart(base.generation + 2, **known), "new", 0)


def test_H18_numbers_are_above_all_that_the_log_names():
    """H18: a fence may be of an epoch that no readable manifest has; so may the rest be."""
    base = changed(compactor_job="compact-1")
    after = restarted(base, epoch=50, max_parallel_writes=8, schemas=(GROWN,), last_lsn=77)
    assert after.writer_epoch == 51
    assert (after.max_parallel_writes, after.wal_id_last_seen) == (8, 77)
    assert [schema.id for schema in after.schemas] == [1, 2]
    assert after.compactor_job == "", "an older compactor is rejected"


def test_H70_a_grace_that_was_lowered_still_waits_for_the_old_one():
    """H70: a process may still go by the longer one."""
    known = (changed(generation=5, grace_before_ms=9000, grace_lowered_at_ms=400),)
    after = restarted(known=known)
    assert (after.grace_before_ms, after.grace_lowered_at_ms) == (9000, 400)


def test_H70_objects_the_restarted_chain_needs_are_not_condemned():
    """H70: a later generation may have condemned objects that the newest intact one still names."""
    keys = [
        "segments/s.seg",
        "segments/old.seg",
        f"manifest/{7:020}.manifest.json",
        f"manifest/{2:020}.manifest.json",
    ]
    known = (changed(generation=8, condemned=tuple(Condemned(key, 1, 0) for key in keys)),)
    base = changed(segments=(entry("s"),), wal_floor=4, oldest_retained=6)
    after = restarted(base, known=known)
    assert [c.key for c in after.condemned] == [keys[1], keys[3]]


def test_H70_ranges_of_several_generations_are_joined():
    """H70: each number once, with the date of the first; none that the restarted chain needs."""
    first = CondemnedRange("wal", 1, 4, 7, 100)
    later = CondemnedRange("wal", 1, 9, 8, 200)
    known = (changed(generation=7, condemned_ranges=(first,)),)
    known += (changed(generation=8, condemned_ranges=(later,)),)
    after = restarted(changed(wal_floor=8, oldest_retained=6), known=known)
    rest = msgspec.structs.replace(later, first=5, last=6)
    assert after.condemned_ranges == (first, rest)


def test_H70_a_rebuilt_state_keeps_marks_and_the_cursors_that_it_can_serve():
    """H70: a cursor continues if the log is there from its next LSN on."""
    cursors = {name: CursorEntry(lsn, 1) for name, lsn in (("a", 3), ("b", 4), ("c", 5))}
    base = changed(cursors=cursors, stream_marks={"s": 9})
    after = restarted(base, rebuilt=changed(wal_floor=5, stream_marks={"s": 4, "t": 1}))
    assert set(after.cursors) == {"b", "c"}
    assert after.stream_marks == {"s": 9, "t": 1}


def test_H70_a_window_keeps_its_newest_keys():
    """H70: as many as it holds, and none from above the floor."""
    entries = [DedupEntry(f"{n}", "", n, 0, 1, 1, "id", 0) for n in range(6)]
    kept = merged_window([entries], changed(wal_floor=5, dedup_keys_max=2))
    assert [e.key for e in kept] == ["3", "4"]
