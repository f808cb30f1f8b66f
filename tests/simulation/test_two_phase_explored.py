"""H23: two-phase creation through all orders, deaths at each step, and late requests.

The larger instances run with `make slow`. The mutants show that violations would be found
if it broke.
"""

import pytest

from reef.testing import ExplorationFailed, explore_states
from tests.simulation import two_phase_mutants as mutants
from tests.simulation.opening_explored import chaos
from tests.simulation.two_phase_explored import Case


def explored(case, crashes=0, late=0):
    """Explore a case to its end."""
    done = explore_states(case, chaos=chaos(crashes, late))
    assert done.complete
    return done


def test_H23_two_recoverers_and_the_first_writer():
    """H23: it may die at each of its five steps, or any recoverer at any of theirs, or resume."""
    assert explored(Case(recoverers=2), crashes=1).states > 2000


def test_H23_a_rival_helps():
    """H23: the loser of an insert finishes the winner's record before it returns "exists"."""
    assert explored(Case(rival=True, observer=True, bare=True), crashes=1).states > 1000


def test_H23_a_late_request_anywhere():
    """H23: a lost insert is read again; copies and deletes that land later do no harm."""
    assert explored(Case(rival=True), crashes=1, late=1).states > 1000


def test_H23_the_bytes_of_a_name_never_change():
    """H23: an observer reads twice while copies are made repeatedly."""
    assert explored(Case(recoverers=1, observer=True), crashes=1, late=1).states > 1000


def test_H23_collection_while_recoverers_are_stalled():
    """H23: a name is deleted and created again; no delayed process restores the deleted object."""
    assert explored(Case(recoverers=1, collects=True, successor=True), crashes=1).states > 5000


def test_H23_sources_are_swept_under_their_writers():
    """H23: a source goes only when its destination is decided, however long its writer sleeps."""
    assert explored(Case(rival=True, sweeps=True), crashes=1).states > 10_000


@pytest.mark.parametrize("how", ["silent", "shown"])
def test_H72_a_restore_between_any_two_requests(how):
    """H72: the register forgets all records; names have one winner, and their bytes never change.

    Root: the copy trusted an insert that the register had forgotten since, and recovery copied
    over objects that the register did not know.
    """
    assert explored(Case(rival=True, observer=True, restores=how)).states > 5000


def test_H72_a_death_and_a_restore():
    """H72: a writer dies at any step, the register is restored, and a recoverer is at work."""
    assert explored(Case(rival=True, restores="silent"), crashes=1).states > 5000


def test_H72_the_window_that_remains_is_found():
    """H72: a restore while a copy is on its way may let two win: the page says so, and this does.

    If this test fails because nothing is found, the window is closed: correct the page.
    """
    with pytest.raises(ExplorationFailed):
        explored(Case(rival=True, observer=True, restores="any time"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("case", "crashes", "late"),
    [
        (Case(recoverers=2, collects=True), 1, 0),
        (Case(recoverers=1, collects=True, resends=True), 1, 1),
        (Case(recoverers=1, rival=True), 1, 1),
        (Case(recoverers=1, sweeps=True), 1, 1),
        (Case(recoverers=2, rival=True), 1, 0),
        (Case(recoverers=1, rival=True, restores="silent"), 0, 0),
        (Case(recoverers=2, collects=True, successor=True), 1, 0),
    ],
    ids=str,
)
def test_H23_larger(case, crashes, late):
    """H23: a death at each step × two recoverers × the first writer resuming × collection."""
    assert explored(case, crashes, late).states > 10_000


FOUND_BY = {
    mutants.recovery_deletes_records_without_objects: (Case(rival=True, recoverers=1), 0, 0),
    mutants.the_loser_does_not_help: (Case(rival=True, bare=True), 0, 0),
    mutants.acknowledged_at_the_insert: (Case(), 0, 0),
    mutants.sources_go_by_age_alone: (Case(sweeps=True), 1, 0),
    mutants.sources_survive_their_names: (
        Case(recoverers=1, collects=True, successor=True),
        1,
        0,
    ),
    mutants.names_are_never_freed: (Case(collects=True), 1, 0),
    mutants.silence_means_lost: (Case(), 0, 1),
    mutants.silence_means_won: (Case(rival=True), 0, 1),
    mutants.the_destination_is_not_checked_again: (Case(rival=True, restores="silent"), 0, 0),
    mutants.the_record_is_not_checked_again: (Case(rival=True, restores="silent"), 0, 0),
}


@pytest.mark.parametrize("mutant", FOUND_BY, ids=lambda mutant: mutant.__name__)
def test_a_missing_protection_is_found(mutant, monkeypatch):
    """Some history breaks an invariant."""
    case, crashes, late = FOUND_BY[mutant]
    mutant(monkeypatch)
    with pytest.raises(ExplorationFailed):
        explored(case, crashes, late)
