"""H65: creating a dropped name again, through all orders, deaths and late requests."""

from unittest import mock

import msgspec
import pytest

from reef.formats.manifest import NamespaceState
from reef.manifest import lifecycle
from reef.testing import ExplorationFailed, explore_states
from tests.simulation.incarnations_explored import Recreating, chaos


def explored(case, crashes=1, late=1):
    """Explore a case to its end; return how many states it has."""
    done = explore_states(case, chaos=chaos(crashes, late), footprint=case.footprint)
    assert done.complete
    return done.states


@pytest.mark.parametrize(
    ("case", "crashes", "late"),
    [
        (Recreating("a"), 1, 1),
        (Recreating("ab"), 1, 0),
        (Recreating("ab"), 0, 1),
        (Recreating("a", undrops=True), 1, 1),
        (Recreating("ab", fails=True), 0, 0),
    ],
    ids=["one", "two, a death", "two, a late request", "an undrop", "a load that fails"],
)
def test_H65_creators_in_all_orders(case, crashes, late):
    """H65: one successor for each drop, with crashes and late requests."""
    assert explored(case, crashes, late) > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "crashes", "late"),
    [
        (Recreating("ab"), 1, 1),
        (Recreating("ab", undrops=True), 1, 1),
        (Recreating("ab", fails=True), 1, 1),
        (Recreating("ab", undrops=True, fails=True), 0, 0),
    ],
)
def test_H65_creators_with_a_death_and_a_late_request(case, crashes, late):
    """H65: the same with both at once."""
    assert explored(case, crashes, late) > 100


def undropped_over_a_successor(manifest):
    """Undrop without asking for a successor."""
    if manifest.dropped is None:
        return None
    return msgspec.structs.replace(
        manifest, state=NamespaceState.LIVE, dropped=None, successor=None
    )


def test_H65_the_exploration_finds_an_undrop_that_ignores_the_successor():
    """H65: without that rule both would be there."""
    with (
        mock.patch.object(lifecycle, "undrop", undropped_over_a_successor),
        mock.patch("reef.manifest.head.check_next", lambda before, after: after),
        pytest.raises(ExplorationFailed),
    ):
        explored(Recreating("a", undrops=True), 0, 0)
