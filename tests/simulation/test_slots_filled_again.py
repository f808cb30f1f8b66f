"""Slots that are filled again after collection: four histories that went wrong once.

A writer's batch is folded and collected; a request that another process issued for that slot
arrives then, and the slot holds an object again, below the floor. The root of all four is one
rule: below the floor nothing counts, and after any doubt about a response only the floor proves
what became of a write (H66, H67). Each history runs in several orders of the processes.
"""

from contextlib import suppress

import pytest

import reef
from reef.engine.handles.database import Database
from reef.jobs import fold, sweep
from reef.stores import Meter, Outcome, ReadBack, Retry, Wrapper, WriteResult
from reef.testing import Simulation
from tests.simulation.actors import NAME, World, check_rebuilt
from tests.simulation.client_log import Stream
from tests.simulation.job_scenarios import load_rows

SEEDS = range(3)
KEY = "a"


class Accidents(Wrapper):
    """The bucket as one process sees it, with two accidents to come, each at a PUT of a slot."""

    def __init__(self, node):
        super().__init__(node.raw_store())
        self._node = node
        self.freeze_s = 0.0
        """How long the process is frozen before its next PUT of a slot is sent."""
        self.passed = 0
        """How many such PUTs are sent before that one."""
        self.forget_s = 0.0
        """How long it is frozen before it sends its next PUT again, whose response is lost."""

    def create(self, key, body):
        if "/wal/" not in key:
            return self.inner.create(key, body)
        self._freeze_before()
        result = self.inner.create(key, body)
        if not self.forget_s:
            return result
        assert result.landed
        self.freeze_s, self.forget_s = self.forget_s, 0.0
        return WriteResult(Outcome.UNKNOWN, cause=reef.UnavailableError("no response"))

    def _freeze_before(self):
        if self.freeze_s and self.passed == 0:
            freeze_s, self.freeze_s = self.freeze_s, 0.0
            self._node.freeze(freeze_s)
        self.passed = max(0, self.passed - 1)


class History:
    """A namespace, a driver whose PUT is held up, and someone who folds and sweeps."""

    def __init__(self, seed):
        self.sim = Simulation(seed)
        self.world = World(self.sim)
        self.reported = self.world.clients

    def process(self, name):
        """Return a new process, its accidents, and its database."""
        node = self.sim.process(name)
        accidents = Accidents(node)
        return node, accidents, Database(ReadBack(Retry(Meter(accidents))))

    def load(self, db, rows):
        """Load rows in one job, and record the acknowledgement."""
        load_rows(self.world, db, rows)

    def stalled_driver(self, freeze_s, passed=0):
        """Start a load of which one PUT is sent long after it was decided."""
        node, accidents, db = self.process("driver")

        def drive():
            node.runtime.sleep(5)
            accidents.freeze_s, accidents.passed = freeze_s, passed
            self.load(db, {b"a": b"late a", b"z": b"late z"})

        node.spawn(drive)

    def collect(self, node, db):
        """Fold, and sweep until the folded part of the log is gone."""
        fold(db, NAME)
        node.runtime.sleep(10)
        sweep(db, NAME, apply=True, retain_generations_s=0.0)
        node.runtime.sleep(1000)
        deleted = sweep(db, NAME, apply=True, retain_generations_s=0.0).deleted
        assert any("wal/" in key for key in deleted), "nothing was collected"

    def forgetful_writer(self, write):
        """Start a writer whose second write lands, and whose response comes after all else."""
        node, accidents, db = self.process("writer")

        def run():
            writer = db.writer(NAME)
            self.reported.opened("writer", writer)
            self.reported.put(writer, KEY, b"first")
            node.runtime.sleep(10)
            accidents.forget_s = 6000.0
            try:
                write(writer, KEY, b"doubtful")
            except reef.ReefError as error:
                self.outcome = error

        self.outcome = None
        node.spawn(run)

    def finish(self):
        self.sim.run()
        self.world.check()
        self.sim.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_H66_a_write_that_counted_is_not_sent_again_after_its_slot_was_filled_again(seed):
    """EXISTS after a lost response is no proof of a loss: the write counted, was folded and
    collected, and the object there is a stale one. Sent again, it would be applied twice, over a
    newer load that was acknowledged. Root: an EXISTS was believed without the floor."""
    history = History(seed)
    history.forgetful_writer(history.reported.put)
    history.stalled_driver(4000.0)
    admin, _, db = history.process("admin")

    def house():
        admin.runtime.sleep(20)
        history.load(db, {b"a": b"newer", b"y": b"newer y"})
        admin.runtime.sleep(10)
        history.collect(admin, db)

    admin.spawn(house)
    history.finish()
    assert isinstance(history.outcome, reef.OutcomeUnknownError)


@pytest.mark.parametrize("seed", SEEDS)
def test_H66_a_write_that_counted_is_not_reported_as_fenced(seed):
    """The same with a takeover: FencedError means that the write is not there, and it is. Root:
    an EXISTS was believed without the floor."""
    history = History(seed)
    history.forgetful_writer(history.reported.put)
    history.stalled_driver(4000.0)
    admin, _, db = history.process("admin")

    def house():
        admin.runtime.sleep(20)
        with db.writer(NAME) as other:
            history.reported.opened("other", other)
            history.reported.put(other, "b", b"other")
        admin.runtime.sleep(10)
        history.collect(admin, db)

    admin.spawn(house)
    history.finish()
    assert isinstance(history.outcome, reef.OutcomeUnknownError)


@pytest.mark.parametrize("seed", SEEDS)
def test_H66_a_transaction_that_counted_is_not_reported_as_a_conflict(seed):
    """ConflictError means that nothing happened. Root: an EXISTS was believed without the floor,
    and the transaction was decided again against its own write."""
    history = History(seed)
    history.forgetful_writer(history.reported.increment)
    history.stalled_driver(4000.0)
    admin, _, db = history.process("admin")

    def house():
        admin.runtime.sleep(20)
        history.load(db, {b"x": b"newer", b"y": b"newer y"})
        admin.runtime.sleep(10)
        history.collect(admin, db)

    admin.spawn(house)
    history.finish()
    assert isinstance(history.outcome, reef.OutcomeUnknownError)


@pytest.mark.parametrize("seed", SEEDS)
def test_H67_a_stream_does_not_pass_over_a_write_whose_slot_was_filled_again(seed):
    """An unregistered stream sleeps past a sweep: it ends with an error, and never continues
    behind a stale object in the place of an acknowledged write. Root: the stream evaluated by a
    floor of the past."""
    history = History(seed)
    history.stalled_driver(4000.0)
    admin, _, db = history.process("admin")

    def house():
        writer = db.writer(NAME)
        history.reported.put(writer, KEY, b"first")
        changes = db.reader(NAME).changes(after_lsn=0)
        followed = Stream("stream", 0, 0)
        history.reported.streams.append(followed)
        rows = [(c.lsn, c.key, c.row) for c in changes]
        admin.runtime.sleep(10)
        history.reported.put(writer, KEY, b"second")
        history.load(db, {b"x": b"newer", b"y": b"newer y"})
        admin.runtime.sleep(10)
        history.collect(admin, db)
        admin.runtime.sleep(5000)
        with suppress(reef.NotFoundError):  # collected
            rows += [(c.lsn, c.key, c.row) for c in changes]
        followed.rows, followed.position = rows, changes.position

    admin.spawn(house)
    history.finish()


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_H67_a_rebuild_takes_the_ingest_that_was_acknowledged(seed, folded):
    """A load's ingest lands in a collected slot, counts for no reader, and is sent again: a
    rebuild without manifests takes the second. Root: rebuild read the log by rules of its own,
    and took the first ingest of a job for its commit."""
    history = History(seed)
    history.stalled_driver(1500.0, passed=1)
    admin, _, db = history.process("admin")

    def house():
        writer = db.writer(NAME)
        history.reported.put(writer, KEY, b"first")
        admin.runtime.sleep(10)
        for number in range(4):
            history.reported.put(writer, KEY, b"live %d" % number)
        admin.runtime.sleep(10)
        history.collect(admin, db)
        admin.runtime.sleep(2000)
        if folded:
            fold(db, NAME)

    admin.spawn(house)
    history.sim.run()
    rows = dict(Database(history.sim.bucket).reader(NAME).scan())
    assert rows[b"a"] == b"late a"
    check_rebuilt(history.sim.bucket, rows)
    history.finish()
