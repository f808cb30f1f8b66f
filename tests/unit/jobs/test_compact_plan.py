"""Which segments a compaction takes: planners as tables, with bytes instead of gigabytes."""

import pytest

from reef.config import CompactSettings
from reef.errors import ErrorKind, InvalidInputError
from reef.formats.manifest import SegmentEntry
from reef.jobs.compact.plan import plan_full, plan_leveled, plan_tiered, split_keys, strategy

SETTINGS = CompactSettings().changed(
    {
        "tier_bytes": 100,
        "tier_growth": 4,
        "tier_segments_min": 3,
        "inputs_max": 6,
        "level0_bytes": 50,
        "level0_segments_max": 4,
        "segment_bytes_min": 50,
        "segment_bytes": 75,
        "segment_bytes_max": 100,
        "group_bytes": 1,
    }
)


def segment(name, size, keys="az", level=0, **more):
    """Return an entry of `size` bytes between two keys."""
    low, high = keys[0].encode(), keys[1].encode()
    lsn = more.pop("lsn", 1)
    known = {"checksum": 0, "rows": 100, "tombstones": 0, "tail_bytes": 0, "schema_id": 1}
    known |= {"set_hash": "0" * 32, "lsn_min": lsn, "lsn_max": lsn, **more}
    return SegmentEntry(name, level, size, min_key=low, max_key=high, **known)


def ids(segments):
    """Return their names, in order."""
    return sorted(found.id for found in segments)


# --- tiered ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], None),
        ([99, 99], None),  # fewer than three
        ([30, 30, 30], None),  # 90 of 100
        ([40, 30, 30], [30, 30, 40]),
        ([500, 40, 30, 30], [30, 30, 40]),  # the smallest that cross it
        ([10, 10, 10, 10, 70], [10, 10, 10, 10, 70]),
        ([10, 10, 10, 10, 10, 10], None),  # six may stay
        ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6]),  # a seventh is one too many
    ],
    ids=str,
)
def test_tiered_takes_the_smallest_that_cross_the_threshold(sizes, expected):
    """By size, whatever their age and keys; or some, where there are too many to read."""
    plan = plan_tiered([segment(f"s{n}", size) for n, size in enumerate(sizes)], SETTINGS)
    assert (plan and sorted(s.size for s in plan.inputs)) == expected
    if plan is not None:
        assert plan.level == (1 if sum(expected) >= 100 else 0)


def test_tiered_thresholds_grow_with_the_level():
    """What fills level 0 is far too little for level 1."""
    assert plan_tiered([segment(f"s{n}", 100, level=1) for n in range(3)], SETTINGS) is None
    plan = plan_tiered([segment(f"s{n}", 134, level=1) for n in range(3)], SETTINGS)
    assert (len(plan.inputs), plan.level) == (3, 2)


def test_tiered_does_not_rewrite_large_segments_into_as_many():
    """Many segments of full size in one level stay: merging them would make no fewer."""
    assert plan_tiered([segment(f"s{n}", 100, level=2) for n in range(7)], SETTINGS) is None


def test_tiered_moves_segments_of_a_load():
    """Its segments do not overlap, and have their size: a rewrite would make the same again."""
    loaded = [
        segment("l0", 40, "af", visible_lsn=7),
        segment("l1", 40, "gm", visible_lsn=7),
        segment("l2", 40, "nz", visible_lsn=7),
    ]
    plan = plan_tiered(loaded, SETTINGS)
    assert (plan.level, plan.inputs, ids(plan.moved)) == (1, (), ["l0", "l1", "l2"])
    assert {found.level for found in plan.moved} == {1}


@pytest.mark.parametrize(
    ("other", "inputs", "moved"),
    [
        ({"keys": "ad", "size": 30}, ["l0", "other"], ["l1"]),  # what overlaps is merged
        ({"keys": "ad", "size": 1, "visible_lsn": 0, "tombstones": 1}, ["l0", "other"], ["l1"]),
        ({"keys": "01", "size": 30}, [], ["l0", "l1"]),  # one alone is not rewritten
        ({"keys": "az", "size": 30}, ["l0", "l1", "other"], []),
    ],
)
def test_tiered_merges_segments_that_a_load_overlaps(other, inputs, moved):
    """Written rows over loaded ones are merged with them, as ever."""
    loaded = [segment("l0", 40, "af", visible_lsn=7), segment("l1", 60, "gm", visible_lsn=7)]
    plan = plan_tiered([*loaded, segment("other", **other)], SETTINGS)
    assert (ids(plan.inputs), ids(plan.moved)) == (inputs, moved)


def test_tiered_merges_small_loads_and_those_with_deletes():
    """Many small ones are what compaction is for; and deletes go only in a merge."""
    small = [segment(f"l{n}", 20, f"{n}{n}", visible_lsn=n + 1) for n in range(6)]
    assert len(plan_tiered(small, SETTINGS).inputs) == 5
    deletes = [segment(f"l{n}", 40, f"{n}{n}", visible_lsn=7, tombstones=1) for n in range(3)]
    assert len(plan_tiered(deletes, SETTINGS).inputs) == 3


# --- leveled --------------------------------------------------------------------------


def test_leveled_waits_for_little():
    """A few small segments in level 0 are left alone."""
    assert plan_leveled([segment(f"s{n}", 10) for n in range(3)], SETTINGS) is None


def test_leveled_merges_level_0_among_itself():
    """Many small ones become one, which stays in level 0."""
    plan = plan_leveled([segment(f"s{n}", 10) for n in range(4)], SETTINGS)
    assert (ids(plan.inputs), plan.level) == (["s0", "s1", "s2", "s3"], 0)


def test_leveled_leaves_out_one_that_dwarfs_the_others():
    """Its bytes would be rewritten for every few that are new."""
    small = [segment(f"s{n}", 2) for n in range(3)]
    plan = plan_leveled([segment("large", 30), *small], SETTINGS)
    assert ids(plan.inputs) == ["s0", "s1", "s2"]


def test_leveled_goes_down_where_a_merge_of_level_0_would_leave_as_many():
    """Small rows fill segments by their number: merged among themselves, they would be for ever."""
    settings = SETTINGS.changed({"segment_rows_max": 100})
    full = [segment(f"s{n}", 5, rows=100, lsn=n) for n in range(4)]
    plan = plan_leveled(full, settings)
    assert (plan.level, ids(plan.inputs)) == (1, ["s0", "s1", "s2", "s3"])
    few = [segment(f"s{n}", 5, rows=25, lsn=n) for n in range(4)]
    assert plan_leveled(few, settings).level == 0


def test_leveled_goes_down_with_all_that_overlaps():
    """Level 0 at its size is merged with the segments it overlaps in level 1, and nothing else."""
    zero = [segment("new", 30, "dm"), segment("newer", 20, "kp", lsn=2)]
    one = [
        segment("left", 60, "ac", 1),
        segment("first", 60, "de", 1),
        segment("second", 60, "ot", 1),
        segment("right", 60, "uz", 1),
    ]
    plan = plan_leveled([*zero, *one], SETTINGS)
    assert ids(plan.inputs) == ["first", "new", "newer", "second"]
    assert (plan.level, plan.moved) == (1, ())


def test_leveled_moves_what_overlaps_nothing():
    """Only its level changes; one with deletes is rewritten, since they can go."""
    plan = plan_leveled(
        [
            segment("plain", 30, "ab"),
            segment("deletes", 30, "cd", tombstones=1),
            segment("old", 60, "xz", 1),
        ],
        SETTINGS,
    )
    assert [(s.id, s.level) for s in plan.moved] == [("plain", 1)]
    assert ids(plan.inputs) == ["deletes"]


def test_leveled_cuts_outputs_around_what_stays():
    """Far apart in level 0: no output may overlap a segment kept in level 1 or moved there."""
    zero = [segment("a", 30, "ab"), segment("aa", 30, "bc", lsn=2), segment("moved", 9, "ee")]
    zero += [segment("h", 30, "hi"), segment("hh", 30, "ij"), segment("x", 30, "xy", tombstones=1)]
    one = [segment("stays", 60, "lm", 1), segment("last", 60, "zz", 1)]
    plan = plan_leveled([*zero, *one], SETTINGS)
    assert ids(plan.inputs) == ["a", "aa", "h", "hh", "x"]
    assert ids(plan.moved) == ["moved"]
    assert plan.cuts == (b"h", b"x")


def test_leveled_two_with_the_same_key_overlap():
    """One key in common is an overlap, where it is a row of both."""
    plan = plan_leveled([segment("a", 30, "kk"), segment("b", 30, "kk", lsn=2)], SETTINGS)
    assert (ids(plan.inputs), plan.moved) == (["a", "b"], ())


def test_leveled_mends_a_level_that_overlaps():
    """As it may after tiered compactions: what overlaps is merged, once."""
    one = [segment("a", 60, "am", 1), segment("b", 60, "kz", 2), segment("c", 60, "Z[", 1)]
    plan = plan_leveled(one, SETTINGS)
    assert (ids(plan.inputs), plan.level) == (["a", "b"], 1)
    apart = [segment("a", 60, "am", 1), segment("b", 60, "nz", 1)]
    assert plan_leveled(apart, SETTINGS) is None


def test_leveled_neighbours_that_share_an_edge_do_not_overlap():
    """A range delete that was cut ends with the key with which the next segment begins (H36)."""
    one = [segment("a", 60, "am", 1, tombstones=1), segment("b", 60, "mz", 1)]
    assert plan_leveled(one, SETTINGS) is None


@pytest.mark.parametrize(
    ("sizes", "expected", "outputs"),
    [
        ([50, 50], None, 0),
        ([49, 40], ["s0", "s1"], 1),
        ([80, 20], ["s0", "s1"], 1),
        ([80, 30], ["s0", "s1"], 2),  # above the largest: two of 55
        ([60, 60, 10], ["s1", "s2"], 1),
        ([60, 46], None, 0),  # two halves that came out uneven are not cut again
        ([10], None, 0),
    ],
    ids=str,
)
def test_leveled_joins_small_neighbours(sizes, expected, outputs):
    """A segment of level 1 that is too small, with the next; above the largest, cut in two."""
    one = [segment(f"s{n}", size, "abcdefgh"[2 * n :], 1) for n, size in enumerate(sizes)]
    plan = plan_leveled(one, SETTINGS)
    assert (plan and ids(plan.inputs)) == expected
    if plan is not None:
        assert plan.join
        assert plan.outputs(SETTINGS) == outputs


@pytest.mark.parametrize(
    "odd", [{"tombstones": 1}, {"patches": 1}, {"visible_lsn": 7}, {"schema_id": 2}], ids=str
)
def test_what_cannot_be_joined_by_copy_is_merged(odd):
    """Deletes that may go, rows that store LSN 0, another schema: these have to be decoded."""
    plan = plan_leveled([segment("a", 10, "ab", 1), segment("b", 10, "cd", 1, **odd)], SETTINGS)
    assert (ids(plan.inputs), plan.join) == (["a", "b"], False)


def test_neighbours_with_too_many_rows_for_one_segment_stay_apart():
    """They would be joined, cut and joined again for ever."""
    settings = SETTINGS.changed({"segment_rows_max": 10})
    one = [segment("a", 10, "ab", 1, rows=6), segment("b", 10, "cd", 1, rows=6)]
    assert plan_leveled(one, settings) is None


# --- both -----------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [plan_tiered, plan_leveled])
def test_segments_of_an_origin_are_not_taken(plan):
    """A branch reads them; it copies them only if it is asked to."""
    assert plan([segment(f"s{n}", 99, home="origin") for n in range(9)], SETTINGS) is None


def test_a_full_compaction_takes_the_segments_of_an_origin():
    """The branch is independent afterwards (ADR 0040)."""
    shared = [segment(f"s{n}", 99, home="origin") for n in range(9)]
    assert {entry.id for entry in plan_full(shared, SETTINGS).inputs} == {s.id for s in shared}


def test_tails_do_not_count():
    """A tail grows with its segment's history: sizes are those of the groups."""
    with_tails = [segment(f"s{n}", 40, tail_bytes=35) for n in range(3)]
    assert plan_tiered(with_tails, SETTINGS) is None
    assert plan_leveled(with_tails, SETTINGS) is None


def test_a_full_compaction_takes_everything():
    """Whatever the levels; even one segment alone, since it may hold rows that can be dropped."""
    plan = plan_full([segment("a", 10), segment("b", 500, level=3)], SETTINGS)
    assert (ids(plan.inputs), plan.level) == (["a", "b"], 3)
    assert ids(plan_full([segment("a", 10)], SETTINGS).inputs) == ["a"]


@pytest.mark.parametrize(
    ("size", "rows", "outputs"), [(10, 1, 1), (110, 1, 2), (100, 1, 1), (375, 1, 5), (10, 99, 3)]
)
def test_how_many_outputs(size, rows, outputs):
    """About as many as give the size aimed at, never a larger one than may be."""
    settings = SETTINGS.changed({"segment_rows_max": 40})
    assert plan_full([segment("a", size, rows=rows)], settings).outputs(settings) == outputs


@pytest.mark.parametrize(
    ("groups", "parts", "cuts"),
    [
        ([], 3, []),
        ([(b"a", 1)], 3, []),
        ([(b"a", 5), (b"b", 5), (b"c", 5)], 3, [b"b", b"c"]),
        ([(b"a", 90), (b"b", 5), (b"c", 5)], 2, [b"b"]),
        ([(b"a", 1), (b"b", 1), (b"c", 98)], 2, []),
        ([(b"a", 5), (b"a", 5), (b"a", 5)], 2, []),  # one key is never on two sides
        ([(b"c", 5), (b"a", 5), (b"b", 5), (b"d", 5)], 4, [b"b", b"c", b"d"]),
    ],
    ids=str,
)
def test_cuts_fall_between_keys_and_are_even(groups, parts, cuts):
    """H33: all versions of a key are on one side of every cut."""
    assert split_keys(groups, parts) == cuts


def test_an_unknown_strategy_is_refused():
    """With the names of those that there are."""
    with pytest.raises(InvalidInputError) as caught:
        strategy("fastest")
    assert caught.value.kind is ErrorKind.INVALID_OPTION
    assert "tiered, leveled" in caught.value.hint


@pytest.mark.parametrize(
    "wrong",
    [
        {"tier_growth": 1},
        {"codec": "gzip"},
        {"tasks_max": 0},
        {"segment_bytes_min": 600, "segment_bytes_max": 1000},
        {"merge_bytes": -1},
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(wrong):
    """Before anything is read."""
    with pytest.raises(InvalidInputError):
        CompactSettings().changed(wrong)
