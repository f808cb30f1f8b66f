"""Engine, folds, compactions, branches and rebuilds against a model, with loads with `live_wins`.

The machine is `tests.property.live_wins_machine`; `python -m tests.property.live_wins_machine` runs
as many seeds as there is time for.
"""

import pytest

from tests.property.live_wins_machine import run_seed

SMALL = range(30)
FULL = range(10_000, 11_000)


@pytest.mark.parametrize("seed", SMALL)
def test_H60_every_read_shows_the_rows_of_its_lsn(seed):
    """H50, H60: whatever is folded, merged and swept while loads are open."""
    run_seed(seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_H60_a_thousand_seeds():
    """H50, H60: the same at full size."""
    for seed in FULL:
        try:
            run_seed(seed)
        except Exception as error:
            error.add_note(f"python -m tests.property.live_wins_machine --seed {seed} --seeds 1")
            raise
