"""Every death of a writer and of a fold: what was acknowledged is there, and work goes on.

The rows of the crash matrix that concern the write path, from the seams that the code passes:
after the WAL PUT and before the answer, in the middle of a fold, around every publish.
"""

import reef
from reef.jobs import fold
from reef.stores import agree_on_cas
from reef.testing import crash_points

NAME = "users"


def _survives(work, least_points):
    """Kill `work` at each of its seams; then a new process opens, reads, writes and folds."""
    allowed = {}
    points = []

    def scenario(sim):
        allowed.clear()
        agree_on_cas(sim.bucket)
        node = sim.process("victim")
        node.spawn(lambda: work(reef.Database(node.store()), allowed))
        sim.run()

    for point in crash_points(scenario, "victim"):
        points.append(point.what)
        db = reef.Database(point.simulation.bucket)
        with db.writer(NAME) as writer:
            seen = dict(writer.scan())
            for key, values in allowed.items():
                assert seen.get(key) in values, f"{key} after a death at {point.what}"
            writer.put("next", b"works")
        fold(db, NAME)
        after = dict(db.reader(NAME).scan())
        assert after == {**seen, b"next": b"works"}, f"after a death at {point.what}"
    assert len(points) > least_points
    return points


def _put(writer, allowed, key, value):
    """Write, or delete with None: until it is answered the old value may be there, or the new."""
    allowed.setdefault(key, {None}).add(value)
    writer.delete(key) if value is None else writer.put(key, value)
    allowed[key] = {value}


def test_deaths_of_a_writer():
    """From the first request of the opening to the last answer, in prefix order."""

    def work(db, allowed):
        with db.writer(NAME) as writer:
            for number in range(3):
                _put(writer, allowed, b"k%d" % number, b"v%d" % number)

    points = _survives(work, 100)
    assert any(point.startswith("store create created") and "/wal/" in point for point in points)
    assert "point fence" in points


def test_deaths_of_a_second_writer():
    """While it takes over from one that was there before."""

    def work(db, allowed):
        first = db.writer(NAME)
        _put(first, allowed, b"a", b"1")
        with db.writer(NAME, max_parallel_writes=2) as second:
            _put(second, allowed, b"b", b"2")

    points = _survives(work, 150)
    assert points.count("point fence") == 2, "it died at the fences of either opening"


def test_deaths_of_a_fold():
    """Segments uploaded and not published are orphans; the next fold does the work again."""

    def work(db, allowed):
        with db.writer(NAME) as writer:
            for number in range(3):
                _put(writer, allowed, b"k%d" % number, b"v")
            fold(db, NAME)
            _put(writer, allowed, b"k0", b"newer")
            _put(writer, allowed, b"k1", None)
            fold(db, NAME)
            writer.refresh()

    points = _survives(work, 200)
    assert "point fold staged" in points
