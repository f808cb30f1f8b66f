"""Crashes within branch, merge, rollback and drop, while sweeps of both sides run."""

from contextlib import suppress

import pytest

import reef
from reef.errors import ConflictError, NotFoundError, UnavailableError
from reef.jobs import fold, sweep, verify
from reef.stores import agree_on_cas
from reef.testing import crash_points

MAIN, CHILD, VICTIM = "main", "child", "victim"
GRACE_S = 900.0
HOUR_S, DAY_S = 3600.0, 86400.0
PAUSES_S = (0.0, 0.03, 0.1, 0.3, GRACE_S + 60, 0.1)
"""Before each sweep of a sweeper: some run concurrently with the operation, some after a grace."""
AT_BRANCH = {b"a": b"1", b"b": b"2", b"c": b"3"}
OF_CHILD = {b"a": b"child", b"c": b"3", b"d": b"child"}
OF_MAIN = {b"a": b"1", b"b": b"2", b"c": b"main"}
MERGED = {b"a": b"child", b"c": b"main", b"d": b"child"}


def prepare_main(db):
    """Leave rows in a segment and in the log, and a snapshot of them."""
    with db.writer(MAIN, create=True, background=False) as writer:
        writer.put("a", b"1")
        writer.put("b", b"2")
        fold(db, MAIN)
        writer.put("c", b"3")
    db.snapshot(MAIN, "point")


def prepare_both(db):
    """Leave a branch with changes of its own, and an origin that has moved on."""
    prepare_main(db)
    db.branch(MAIN, CHILD)
    with db.writer(CHILD, background=False) as writer:
        writer.put("a", b"child")
        writer.delete("b")
        writer.put("d", b"child")
    with db.writer(MAIN, background=False) as writer:
        writer.put("c", b"main")


def make_branch(db):
    """Make the branch, unless it is there."""
    if CHILD not in db.namespaces():
        db.branch(MAIN, CHILD)


def drop_branch(db):
    """Drop the branch, unless it is dropped."""
    if CHILD in db.namespaces():
        db.drop(CHILD)


def roll_back(db):
    """Return to the snapshot."""
    (pin,) = db.snapshots(MAIN)
    db.rollback(MAIN, pin)


def merge(db):
    """Merge the branch."""
    db.merge(CHILD, MAIN)


OPERATIONS = {
    "branch": (prepare_main, make_branch, (AT_BRANCH, None), (AT_BRANCH, AT_BRANCH)),
    "merge": (prepare_both, merge, (OF_MAIN, OF_CHILD), (MERGED, OF_CHILD)),
    "rollback": (prepare_both, roll_back, (OF_MAIN, OF_CHILD), (AT_BRANCH, OF_CHILD)),
    "drop": (prepare_both, drop_branch, (OF_MAIN, OF_CHILD), (OF_MAIN, None)),
}
"""Each with the rows of both namespaces before and after it."""


def run_calmly(sim, name, call):
    """Run a call in a process of its own to its end; raise its error."""
    node, errors = sim.process(name), []

    def run():
        try:
            agree_on_cas(sim.bucket)
            call(reef.Database(sim.bucket), node.runtime)
        except Exception as error:  # raised again outside of the simulation
            errors.append(error)

    node.spawn(run)
    sim.run()
    if errors:
        raise errors[0]


def keep_sweeping(node, name):
    """Sweep a namespace again and again, with nothing retained but the head."""
    db = reef.Database(node.store())
    for pause_s in PAUSES_S:
        node.runtime.sleep(pause_s)
        with suppress(NotFoundError, ConflictError, UnavailableError):
            sweep_once(db, name)


def sweep_once(db, name):
    """Sweep, retaining the head and pins."""
    sweep(db, name, apply=True, force=True, retain_generations_s=0.0, dropped_s=HOUR_S)


def play(sim, operation):
    """Run an operation next to a sweeper of each side."""
    prepare, work, _, _ = OPERATIONS[operation]
    run_calmly(sim, "before", lambda db, runtime: prepare(db) or runtime.sleep(10.0))
    for name in (MAIN, CHILD):
        node = sim.process(f"sweeper of {name}")
        node.spawn(lambda node=node, name=name: keep_sweeping(node, name))
    victim = sim.process(VICTIM)
    victim.spawn(lambda: work(reef.Database(victim.store())))
    sim.run()


def rows_of(db, name):
    """Return the rows of a namespace; None if there is none."""
    try:
        with db.reader(name) as reader:
            return dict(reader.scan())
    except NotFoundError:
        return None


def finish(db, runtime, operation):
    """Check what the crash has left, repeat the operation, and sweep for days."""
    _, work, before, after = OPERATIONS[operation]
    assert (rows_of(db, MAIN), rows_of(db, CHILD)) in (before, after)
    work(db)
    assert (rows_of(db, MAIN), rows_of(db, CHILD)) == after
    for _ in range(4):
        for name in (MAIN, CHILD):
            with suppress(NotFoundError):
                sweep_once(db, name)
        runtime.sleep(DAY_S)
    assert (rows_of(db, MAIN), rows_of(db, CHILD)) == after
    for name, rows in zip((MAIN, CHILD), after, strict=True):
        assert rows is None or verify(db, name, deep=True).problems == []


@pytest.mark.parametrize("operation", OPERATIONS)
def test_H42_a_crash_while_both_sides_are_swept(operation):
    """H42: all of it or nothing is visible, and neither sweeper takes an object that is needed."""
    assert crash_at_points(operation, every=11) > 5


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_H42_a_crash_at_every_step_while_both_sides_are_swept(operation):
    """H42: the same at every yield point of the operation."""
    assert crash_at_points(operation, every=1) > 60


def crash_at_points(operation, every):
    """Crash the operation at its yield points, and continue from each; return how many."""
    points = 0
    for point in crash_points(lambda sim: play(sim, operation), VICTIM, every=every):
        points += 1
        try:
            run_calmly(
                point.simulation, "after", lambda db, runtime: finish(db, runtime, operation)
            )
        except Exception as error:
            error.add_note(f"after a crash at {point.number}: {point.site}")
            raise
    return points
