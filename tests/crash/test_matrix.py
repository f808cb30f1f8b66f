"""The crash matrix: each operation, a death at each point that it passes, and all is well after.

Crash points are found, not listed: every request, clock, lock, wait and named point that an
operation passes is one (`tests.crash.deaths`). A new one in an operation of the matrix is covered
the day it is written; a new named point that no operation passes fails a test here.
"""

import ast
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import reef
from reef.errors import NotFoundError
from reef.jobs import ProblemKind, compact, fold, sweep, verify
from reef.manifest.head import newest_incarnation
from reef.paths import Namespace
from reef.testing import crash_points
from tests.crash.deaths import VICTIM, contents, deaths_of, play
from tests.crash.operations import NAME, OWN_TABLES, elsewhere, operations
from tests.support.compaction import head_of

USERS = Namespace(NAME)
SOURCES = Path(reef.__file__).parent
DAY_S = 24 * 3600.0
LEFTOVERS = {
    ProblemKind.ORPHAN,
    ProblemKind.CONDEMNED,
    ProblemKind.LEASE_EXPIRED,
    ProblemKind.SKIPPED,
}
"""Problems that a crash may leave: harmless, and removed by a sweep."""
SWEEPS_MAX = 8
WAYS_TO_DIE = ("crash_points(", "crash_at=", "deaths_of(", "simulate(", "explore_states(")


# --- what must hold ---------------------------------------------------------------------


def rows_of(db):
    """Return the rows of a new reader; none without a namespace."""
    try:
        with db.reader(NAME) as reader:
            assert reader.damage is None
            return dict(reader.scan())
    except NotFoundError:
        return {}


def check_found(hand, death):
    """Check that the next process sees all acknowledged rows, and can continue."""
    where = death.where
    if NAME in hand.db.namespaces():
        found = verify(hand.db, NAME, deep=True)
        assert not found.problems, where
        assert {note.kind for note in found.notes} <= LEFTOVERS, where
    seen = rows_of(hand.db)
    for promised in death.ledgers.values():
        promised.copy().settle(seen, where)
    hand.ledger.settle(seen, where)
    with hand.db.writer(NAME, background=False) as writer:
        assert dict(writer.scan()) == seen, f"a writer sees another state, {where}"


def sweep_all(hand):
    """Sweep until nothing is left but manifests: every sweep that publishes replaces one."""
    for _ in range(SWEEPS_MAX):
        done = sweep(hand.db, NAME, apply=True, force=True, retain_generations_s=0.0)
        hand.sleep(2 * DAY_S)
        swept = {*(doomed.key for doomed in done.condemned), *done.deleted}
        others = {key for key in swept if not key.startswith("manifest/")}
        if not (others or done.jobs_reaped or done.leases_reaped):
            return
    raise AssertionError(f"after {SWEEPS_MAX} sweeps something is left to be swept")


def check_end(hand, where):
    """Check that all jobs continue, and that no unneeded object is left in the end."""
    fold(hand.db, NAME)
    compact(hand.db, NAME, full=True)
    hand.sleep(2 * DAY_S)
    sweep_all(hand)
    found = verify(hand.db, NAME, deep=True)
    assert not found.problems, where
    left = {note.kind for note in found.notes if "/manifest/" not in note.object}
    assert left <= {ProblemKind.SKIPPED}, where
    head, names = head_of(hand.db, NAME), newest_incarnation(hand.db.store, NAME)
    needed = [names.segment(entry.id) for entry in head.segments]
    needed += [names.centroids(index.centroids) for index in head.indexes if index.centroids]
    for earlier in map(names.at, range(1, names.incarnation)):
        assert list(hand.db.store.list(earlier.segments)) == [], where
    there = [info.key for info in hand.db.store.list(names.segments)]
    assert sorted(there) == sorted(needed), where
    assert rows_of(hand.db) == hand.ledger.rows(), where


def survive(operation, death):
    """Reopen the bucket that a crash left, check it, and continue to the end."""
    world = death.restore()

    def after(hand):
        hand.sleep(60.0)
        operation.recover(hand)
        check_found(hand, death)
        operation.also(hand)
        (operation.again or operation.work)(hand)
        hand.put({b"next": b"works"}) if plain(hand) else None
        check_end(hand, death.where)

    try:
        world.calmly(after)
    finally:
        world.close()


def plain(hand):
    """Whether rows are keys and values."""
    return hand.db.info(NAME).schema.names == ["id", "value"]


# --- the matrix -------------------------------------------------------------------------


@pytest.mark.parametrize("operation", operations(), ids=str)
def test_an_operation_may_die_anywhere(operation):
    """Acknowledged rows are there, verify finds nothing, it can be run again, all else is swept."""
    deaths, points = deaths_of(operation)
    assert set(operation.reaches) <= points
    assert len(deaths) > 1, "it changed nothing"
    for death in deaths:
        survive(operation, death)


# --- the registry -----------------------------------------------------------------------


@cache
def named_points():
    """Return the named points in the sources: literals, and patterns of those that are composed."""
    found = {}
    sources = {path: path.read_text() for path in sorted(SOURCES.rglob("*.py"))}
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)) if "reach(" in source else ():
            if _is_reach(node):
                found[f"{path.relative_to(SOURCES)}:{node.lineno}"] = _pattern(node.args[0])
    return found


def _is_reach(node):
    """Whether a node is `<…>runtime.reach(…)`."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    on = node.func.value
    name = on.attr if isinstance(on, ast.Attribute) else getattr(on, "id", "")
    return node.func.attr == "reach" and name.strip("_") == "runtime"


def _pattern(node):
    if isinstance(node, ast.Constant):
        return re.escape(node.value)
    assert isinstance(node, ast.JoinedStr), f"a crash point is named where it is: {ast.dump(node)}"
    parts = [re.escape(v.value) if isinstance(v, ast.Constant) else ".+" for v in node.values]
    return "".join(parts)


def test_every_named_point_is_reached():
    """A point that no operation passes, and that has no test of its own, is not covered."""
    reached = {point for operation in operations() for point in operation.reaches}
    reached |= set(elsewhere())
    patterns = named_points()
    assert len(patterns) >= 9, "the points are found"
    missed = {
        place: pattern
        for place, pattern in patterns.items()
        if not place.startswith(tuple(OWN_TABLES))
        and not any(re.fullmatch(pattern, point) for point in reached)
    }
    assert not missed, "add an operation to tests/crash/operations that passes these"


@pytest.mark.parametrize("area", OWN_TABLES)
def test_an_area_with_a_table_of_its_own_kills_its_processes(area):
    """Code with named points in such an area is crashed by tests of its own."""
    if not any(place.startswith(area) for place in named_points()):
        return
    root = Path(__file__).parents[2]
    tests = [path.read_text() for path in root.glob(OWN_TABLES[area])]
    assert any(word in test for test in tests for word in WAYS_TO_DIE), OWN_TABLES[area]


def test_every_point_that_is_claimed_is_there():
    """A point that was renamed or taken out does not stay in the tables."""
    patterns = named_points().values()
    claimed = {point for operation in operations() for point in operation.reaches}
    claimed |= set(elsewhere())
    assert not {p for p in claimed if not any(re.fullmatch(pattern, p) for pattern in patterns)}


def test_tests_elsewhere_exist():
    """A point that is left to another test names one that is there."""
    root = Path(__file__).parents[2]
    for test in elsewhere().values():
        path, _, name = test.partition("::")
        assert f"def {name}(" in (root / path).read_text(), test


# --- the method -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a fold", "a pinned reader"])
def test_a_recorded_state_equals_the_state_after_a_crash(name):
    """The short way (one run, all states) and the long one (a run for each death) agree."""
    (operation,) = [op for op in operations() if op.name == name]
    deaths, _ = deaths_of(operation)
    noted = {death.objects for death in deaths}
    left = set()
    for point in crash_points(lambda sim: play(operation, sim), VICTIM):
        left.add(contents(point.simulation.bucket))
    assert left == noted
    assert len(noted) > 1


def test_a_death_that_loses_something_is_noticed():
    """The checks can fail: a state from which an acknowledged object is missing is found out."""
    (operation,) = [op for op in operations() if op.name == "a writer"]
    deaths, _ = deaths_of(operation)
    *_, last = deaths
    (lost,) = sorted(key for key, _, _ in last.objects if "/wal/" in key)[-1:]
    short = replace(last, objects=tuple(one for one in last.objects if one[0] != lost))
    with pytest.raises(AssertionError, match="after a crash at"):
        survive(operation, short)
