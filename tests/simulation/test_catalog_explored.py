"""H21, H22: rebase and collection of the catalog through all orders, deaths and late requests.

Small instances that end. The mutants show that violations would be found.
"""

import pytest

from reef.catalog import catalog, commit
from reef.catalog import snapshot as pinning
from reef.catalog import upkeep as collection
from reef.testing import ExplorationFailed, explore_states
from tests.simulation.catalog_explored import CALM, MISHAPS, Collecting, Committing


def explored(case, chaos=CALM):
    """Explore a case to its end."""
    done = explore_states(case, chaos=chaos, footprint=case.footprint)
    assert done.complete
    return done.states


@pytest.mark.parametrize(
    ("case", "states"),
    [
        (Committing(own_keys=""), 200),
        (Committing(counters="a", own_keys="x"), 300),
        (Committing(counters="a", own_keys="", compacts=True), 100),
        (Committing(counters="a", own_keys="", recovers=True), 100),
        (Committing(counters="a", own_keys="", recreates=True), 100),
        (Committing(own_keys="", numbered=True), 100),
        (Committing(counters="a", own_keys="", recreates=True, numbered=True), 100),
    ],
    ids=[
        "two conflict",
        "one rebases",
        "over a compaction",
        "a recoverer",
        "a new beginning",
        "two conflict, numbered",
        "a new beginning, numbered",
    ],
)
def test_H21_commits_with_a_death_and_a_late_request_anywhere(case, states):
    """H21: a committed transaction is applied, a conflicting one is not, none is applied twice."""
    assert explored(case, MISHAPS) > states


def test_H21_a_recoverer_and_two_commits_in_all_orders():
    """H21: a segment is adopted while its writer still tries, and a rival commits."""
    assert explored(Committing(own_keys="", recovers=True)) > 100


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Committing(own_keys="", recovers=True),
        Committing(own_keys="x"),
        Committing(counters="a", own_keys="x", compacts=True),
        Committing(counters="a", own_keys="x", recreates=True),
        Committing(counters="a", own_keys="x", numbered=True, recovers=True),
    ],
    ids=["two conflict and a recoverer", "three commits", "a compaction", "re-created", "numbered"],
)
def test_H21_larger_instances(case):
    """H21: the same with more who take part."""
    assert explored(case, MISHAPS) > 1000


@pytest.mark.parametrize(
    ("case", "states"),
    [
        (Collecting(readers="r"), 300),
        (Collecting(travellers="t"), 200),
        (Collecting(travellers="t", at=2), 200),
        (Collecting(writers="w"), 500),
        (Collecting(readers="r", numbered=True), 300),
        (Collecting(travellers="t", numbered=True), 200),
        (Collecting(writers="w", numbered=True), 500),
    ],
    ids=[
        "the newest state",
        "an old state",
        "the state of a checkpoint",
        "a commit",
        "the newest state, numbered",
        "an old state, numbered",
        "a commit, numbered",
    ],
)
def test_H22_a_collection_between_every_two_steps_of_a_session(case, states):
    """H22: nothing that a living lease protects is ever gone, in whatever order."""
    assert explored(case) > states


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Collecting(readers="r"),
        Collecting(travellers="t"),
        Collecting(writers="w"),
        Collecting(writers="w", numbered=True),
    ],
    ids=["the newest state", "an old state", "a commit", "a commit, numbered"],
)
def test_H22_collections_with_a_death_and_a_late_request_anywhere(case):
    """H22: with crashes and late requests, no object of a live lease is deleted."""
    assert explored(case, MISHAPS) > 5000


def test_H22_a_traveller_between_two_collectors():
    """H22: one resets the plan while the other still deletes; condemned objects stay condemned."""
    assert explored(TWO_COLLECTORS) > 10_000


TWO_COLLECTORS = Collecting(travellers="t", collectors="cd", compacts=False)


def _swap_without_memory(swap):
    def forgetting(context, known, plan):
        known = collection.KnownPlan(collection.GcPlan(), known.version)
        return swap(context, known, plan)

    return forgetting


def _hasty(parts, *, owner):
    before = parts.heads.load()
    return before, pinning.pin(parts, owner=owner)[1]


MUTANTS = {
    "H21: only the head's own write id counts": (
        commit,
        "on_chain",
        lambda parts, head, seq, write_id: head.write_id == write_id,
        Committing(own_keys="", recovers=True),
    ),
    "H21: a rebase without a check of the commits in between": (
        commit,
        "_rebase",
        lambda parts, base, newest, footprint: newest,
        Committing(own_keys=""),
    ),
    "H22: leases are not listed before the deletion": (
        collection,
        "watermark_of",
        lambda head, leases: head.checkpoint_seq,
        Collecting(travellers="t"),
    ),
    "H22: a reset plan is forgotten": (
        collection,
        "swap_plan",
        _swap_without_memory(collection.swap_plan),
        TWO_COLLECTORS,
    ),
    "H22: the head from before the lease is used": (
        catalog,
        "pin",
        _hasty,
        Collecting(readers="r"),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_exploration_finds_removed_protections(monkeypatch, name):
    """H21, H22: without its protection each breaks."""
    target, attribute, broken, case = MUTANTS[name]
    monkeypatch.setattr(target, attribute, broken)
    with pytest.raises(ExplorationFailed):
        explored(case)
