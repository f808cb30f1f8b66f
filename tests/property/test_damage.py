"""Repair and rebuild against a model, after random histories and random damage (H68).

The machine is `tests.property.damage_machine`; `python -m tests.property.damage_machine --seeds N`
runs as many seeds as there is time for, and prints how to replay one that fails.
"""

import pytest

from tests.property.damage_machine import run_seed

SMALL = range(12)
FULL = range(10_000, 11_000)


@pytest.mark.parametrize("seed", SMALL)
def test_H68_what_is_not_reported_as_lost_is_as_it_was(seed):
    """H68: some seeds of the damage machine, of every variant of recovery."""
    run_seed(seed)


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
    50294: "a snapshot passes over a load whose begin is given up",
    60056: "rebuild did not report a lost part of a merged load, and showed it later from the log",
    60490: "the same, after a second rebuild",
}
"""Seeds that failed once, and what was wrong. A seed means another history once the machine has
changed, so each of them has a test of its own in `tests/hazards/test_salvage.py` as well."""


@pytest.mark.parametrize("seed", FOUND)
def test_H68_seeds_that_failed_once(seed):
    """H68: what each of them found is in `FOUND`."""
    run_seed(seed)


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
