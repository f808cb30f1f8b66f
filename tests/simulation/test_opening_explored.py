"""H11, H12, H13, H45, H56, H58, H61: openings through all orders, deaths and late requests.

Small instances that end; `make explore` runs the full ones. The mutants show that what is
explored would be found if it broke.
"""

from dataclasses import replace
from unittest import mock

import pytest

from reef.engine.commit import open_writer
from reef.testing import ExplorationFailed, explore_states, replay_states
from tests.simulation.opening_explored import Case, chaos
from tests.simulation.opening_mutants import MUTANTS

ONE = Case(in_flight=1, wanted=1, batches=1)


def explored(case, crashes=0, late=0, **bounds):
    """Explore a case to its end."""
    done = explore_states(case, chaos=chaos(crashes, late), footprint=case.footprint, **bounds)
    assert done.complete
    return done


@pytest.mark.parametrize("ack", ["prefix", "independent"])
def test_H11_an_opener_fences_two_puts_in_flight(ack):
    """H11: all orders of two PUTs in flight and an opening, a death and a late request anywhere."""
    assert explored(Case(ack=ack), crashes=1, late=1).states > 5000


def test_H11_H58_two_openers_with_a_death_anywhere():
    """H11, H58: requests of the dead land at any later step. M is 1 here."""
    assert explored(replace(ONE, openers="ab"), crashes=1).states > 5000


def test_H58_two_openers_with_a_late_request_anywhere():
    """H58: the older opener's fences block the newer one, in every order."""
    case = replace(ONE, openers="ab", batches=0)
    assert explored(case, late=1).states > 1000


@pytest.mark.parametrize(("old", "new"), [(2, 1), (1, 2)])
def test_H56_in_flight_is_lowered_and_raised_by_the_opener(old, new):
    """H56: fences by the larger of old and new."""
    assert explored(Case(in_flight=old, wanted=new, batches=old, ack="independent")).states > 10


def test_H61_a_fold_between_the_steps_of_an_opening():
    """H61: segments, window and floor come from one head."""
    assert explored(replace(ONE, before=1, folds=True)).states > 500


def test_H12_H13_a_fold_and_a_sweep_during_an_opening():
    """H12, H13: slots below the floor become free again, and no process relies on them."""
    case = replace(ONE, before=3, folds=True, collects=True)
    assert explored(case).states > 5000


def test_H13_a_grace_passes_at_any_step():
    """H13: slow writes are proved by the floor, and leases expire."""
    case = replace(ONE, before=2, folds=True, collects=True, time_passes=True)
    assert explored(case, switches_max=0).states > 10


def test_an_opener_that_aims_at_several_slots_at_once():
    """The salvos of ADR 0005, with small numbers: every slot up to the last fence is filled."""
    with mock.patch.multiple(open_writer, PATIENT_ROUNDS=0, SALVO_MAX=3):
        assert explored(replace(ONE, batches=2, ack="independent"), crashes=1).states > 40


def _promises_less(one, other):
    """Whether the log is the same, and no process has another outcome."""
    (log, outcomes, found), (other_log, other_outcomes, other_found) = one, other
    return (
        log == other_log and set(outcomes) <= set(other_outcomes) and set(found) <= set(other_found)
    )


@pytest.mark.parametrize(
    ("case", "crashes", "late"),
    [
        (replace(ONE, openers="ab", batches=0), 0, 0),
        (replace(ONE, before=1, batches=0, folds=True), 0, 0),
        (replace(ONE, before=2, batches=0, folds=True, collects=True), 0, 0),
        (ONE, 1, 1),
        (replace(ONE, ack="independent"), 1, 1),
    ],
    ids=["two openers", "fold", "collection", "mishaps", "mishaps, independent"],
)
def test_reductions_lead_to_the_same_ends(case, crashes, late):
    """All orders of all steps, and all deaths: no other log, and no further acknowledgement."""
    reduced, plain = set(), set()
    few = explored(replace(case, ends=reduced), crashes, late)
    more = explored(replace(case, ends=plain), crashes, late, reduced=False)
    assert reduced <= plain
    for end in plain - reduced:
        assert any(_promises_less(end, other) for other in reduced)
    assert few.states * 10 < more.states


@pytest.mark.parametrize("name", MUTANTS)
def test_the_exploration_finds_removed_protections(name):
    """H11, H12, H45, H56, H61: without its protection each breaks, and the script shows how."""
    mutant, case = MUTANTS[name]
    bounds = {"footprint": case.footprint}
    with mutant():
        with pytest.raises(ExplorationFailed) as found:
            explore_states(case, **bounds)
        # The last: the engine itself notices that a slot's winner has changed (H73).
        found_so = r"split brain|rejected and is visible|was filled twice"
        with pytest.raises(ExplorationFailed, match=found_so):
            replay_states(case, found.value.script, **bounds)
