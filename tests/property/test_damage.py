"""Repair and rebuild against a model, after random histories and random damage (H68).

The machine is `tests.property.damage_machine`; `python -m tests.property.damage_machine --seeds N`
runs as many seeds as there is time for, and prints how to replay one that fails.
"""

import pytest

from tests.property import crossed_machine
from tests.property.damage_machine import run_seed

SMALL = range(12)
CROSSED = range(2000, 2006)
FULL = range(10_000, 11_000)


@pytest.mark.parametrize("seed", SMALL)
def test_H68_rows_not_reported_as_lost_are_unchanged(seed):
    """H68: some seeds of the damage machine, of every variant of recovery."""
    run_seed(seed)


@pytest.mark.parametrize("seed", SMALL)
def test_H68_merges_not_reported_as_lost_are_unchanged(seed):
    """H68: the same with merges, which must neither be lost nor count twice."""
    run_seed(seed, merges=True)


@pytest.mark.parametrize("seed", SMALL)
def test_H68_loads_that_sort_at_their_begin_are_recovered_there(seed):
    """H68, H60: the same with loads with `live_wins`, and merges above their rows."""
    run_seed(seed, live_wins=True, merges=bool(seed % 2))


@pytest.mark.parametrize("seed", SMALL)
def test_H68_names_with_several_lives_are_recovered(seed):
    """H68, H65: the same with drops, undrops and re-creations, and damage in any life."""
    run_seed(seed, lives=True, merges=bool(seed % 2))


@pytest.mark.parametrize("seed", CROSSED)
def test_H68_streams_and_branches_keep_what_is_not_reported_as_lost(seed):
    """H68, H40, H42: the same with streams, added columns, renames, folds from memory and branches,
    which are repaired or rebuilt too.
    """
    crossed_machine.run_seed(seed)


FOUND = {
    21: "rebuild: a lost segment whose log was collected left no trace, and nothing was reported",
    56: "repair: an old view passed over a load whose begin is damaged; rebuild lost that load",
    1162: "repair of a namespace all of whose manifests are damaged is for rebuild",
    1169: "rebuild by force made the checksum of a damaged segment fit its bytes",
    2049: "the dry run of a repair said less than the repair, with a head lost after a sweep",
    2152: "repair applied a patch past a load that is lost, and said that nothing is lost",
    2200: "repair of two segments without footers gave a key's delete to neither of them",
    4115: "repair did not see a damaged segment that a forced rebuild had named again",
    20009: "repair of a lost segment that covers nothing on its own",
    50294: "a snapshot passes over a load whose begin is abandoned",
    60056: "rebuild did not report a lost part of a merged load, and showed it later from the log",
    60490: "the same, after a second rebuild",
}
"""Seeds that failed once, and the defect. A seed means another history once the machine has
changed, so each of them has a test of its own in `tests/hazards/test_salvage.py` as well."""


FOUND_WITH_MERGES = {
    1424: "repair took blocks of another segment, which had lost its footer, for those of a load",
}
"""The same with merges; `tests/hazards/test_misplaced_segments.py` has the test of its own."""


FOUND_CROSSED = {
    17: "rebuild took the trace of a lost load for a piece of a fold, and chose the log alone",
    114: "a sweep of an origin failed at a damaged slot that only a branch needs",
    1102: "rebuild of a branch skipped a load that a repair of its origin had skipped since",
    1189: "verify did not check a manifest that only a branch pins",
    1288: "a second repair took a load for void whose begin the first one had skipped",
}
"""Seeds of the crossed machine as it was when they failed; `test_salvage.py` and
`test_damaged_branches.py` in `tests/hazards` have tests of their own."""


@pytest.mark.parametrize("seed", FOUND)
def test_H68_seeds_that_failed_once(seed):
    """H68: what each of them found is in `FOUND`."""
    run_seed(seed)


@pytest.mark.parametrize("seed", FOUND_WITH_MERGES)
def test_H68_seeds_with_merges_that_failed_once(seed):
    """H68: what each of them found is in `FOUND_WITH_MERGES`."""
    run_seed(seed, merges=True)


@pytest.mark.parametrize("seed", FOUND_CROSSED)
def test_H68_crossed_seeds_that_failed_once(seed):
    """H68: what each of them found is in `FOUND_CROSSED`."""
    crossed_machine.run_seed(seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_H68_three_hundred_crossed_seeds():
    """H68: histories that cross features, at full size."""
    for seed in range(30_000, 30_300):
        try:
            crossed_machine.run_seed(seed)
        except Exception as error:
            error.add_note(f"python -m tests.property.crossed_machine --seed {seed} --seeds 1")
            raise


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_H68_a_thousand_seeds_with_several_lives():
    """H68, H65: names that are dropped and created again, at full size."""
    for seed in FULL:
        try:
            run_seed(seed, lives=True, merges=bool(seed % 2))
        except Exception as error:
            error.add_note(
                f"python -m tests.property.damage_machine --lives --seed {seed} --seeds 1"
            )
            raise


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_H68_a_thousand_seeds():
    """H68: the same at full size."""
    for seed in FULL:
        try:
            run_seed(seed)
        except Exception as error:
            error.add_note(f"python -m tests.property.damage_machine --seed {seed} --seeds 1")
            raise
