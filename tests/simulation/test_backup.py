"""A backup follows the log while a writer, folds, compactions and sweeps change the source."""

import random
from contextlib import suppress
from datetime import UTC, datetime

import pytest

import reef
from reef.errors import ReefError
from reef.jobs import (
    backup,
    compact,
    fold,
    ingest,
    list_backups,
    restore,
    sweep,
    verify,
    verify_backup,
)
from reef.jobs.backup import job as backup_job
from reef.jobs.backup.archive import Archive
from reef.stores import agree_on_cas
from reef.stores.memory import MemoryStore
from reef.testing import Chaos, Simulation
from tests.property.branch_machine import Bucket

NAME = "users"
BATCHES = 60
FAULTS = Chaos(lost_response=0.01, fail_before=0.01, stall=0.002, stall_s=(1.0, 60.0))


class History:
    """The rows of a namespace at every LSN, and when that was."""

    def __init__(self):
        self.rows = {}
        self.at = {}
        self.times = []

    def note(self, lsn, runtime):
        self.at[lsn] = dict(self.rows)
        self.times.append((int(runtime.wall_s() * 1000), lsn))


def write(db, history, seed, runtime):
    """Put and delete rows, with a pause after each, so that times distinguish them."""
    chosen = random.Random(seed)
    with db.writer(NAME, create=True, background=False) as writer:
        for n in range(BATCHES):
            key = b"k%d" % chosen.randrange(10)
            if chosen.random() < 0.2:
                history.rows.pop(key, None)
                lsn = writer.delete(key).lsn
            else:
                history.rows[key] = b"%d" % n
                lsn = writer.put(key, b"%d" % n).lsn
            history.note(lsn, runtime)
            runtime.sleep(30.0)
            if n % 20 == 10:
                history.rows[b"load"] = b"%d" % n
                history.note(load(db, n), runtime)
                writer.refresh()
                runtime.sleep(30.0)


def load(db, number):
    """Load a row in bulk, again if there was an error; return its LSN."""
    rows = [{"id": b"load", "value": b"%d" % number}]
    while True:
        with suppress(ReefError):
            return ingest(db, NAME, rows, idempotency_key=f"load-{number}").lsn


def keep_house(db, runtime, hours):
    """Fold, compact and sweep, and retain nothing that is not pinned."""
    end_s = runtime.monotonic_s() + hours * 3600
    while runtime.monotonic_s() < end_s:
        runtime.sleep(100.0)
        with suppress(ReefError):
            fold(db, NAME)
            compact(db, NAME, full=True)
            sweep(db, NAME, apply=True, force=True, retain_generations_s=0.0)


class World:
    """A writer, maintenance and a backup at the same time, each in a process of its own."""

    def __init__(self, seed, chaos):
        self.seed, self.sim = seed, Simulation(seed, chaos=chaos)
        self.target, self.history = MemoryStore(), History()
        self.errors, self.reports = [], []
        self.backup = None
        agree_on_cas(self.sim.bucket)

    def start(self, name, work):
        """Run a function in a new process, which is its argument; keep its error."""
        node = self.sim.process(name)

        def run():
            try:
                work(node)
            except Exception as error:
                self.errors.append(error)

        node.spawn(run)
        return node

    def write(self, node):
        write(reef.Database(node.store()), self.history, self.seed, node.runtime)

    def keep_house(self, node):
        keep_house(reef.Database(node.store()), node.runtime, 1)

    def follow(self, node):
        """Back up and follow, as a service would: it starts again after an error."""
        node.runtime.sleep(200.0)
        db, store = reef.Database(node.store()), Bucket(self.target, node.runtime)
        last, options = max(self.history.at), {"seconds": 2 * 3600.0, "interval_s": 45.0}
        while not self.reports:
            with suppress(ReefError):
                self.reports.append(backup(db, NAME, store, follow=True, **options))
        assert self.reports[-1].last_lsn >= last

    def kill(self, node, kills):
        """Kill the process of the backup at random times, and start another one."""
        chosen = random.Random(self.seed)
        for number in range(kills):
            node.runtime.sleep(chosen.uniform(210.0, 600.0))
            self.backup.crash()
            self.backup = self.start(f"backup-{number}", self.follow)

    def play(self, kills):
        self.start("writer", self.write)
        self.start("house", self.keep_house)
        self.backup = self.start("backup", self.follow)
        self.start("killer", lambda node: self.kill(node, kills))
        self.sim.run()
        self.sim.close()
        for error in self.errors:
            raise error


def play(seed, chaos, monkeypatch, kills=0):
    """Return the set, the history and the last report of a world."""
    monkeypatch.setattr(backup_job, "REBASE_BYTES", 2000)
    world = World(seed, chaos)
    world.play(kills)
    return world.target, world.history, world.reports[-1]


def first_covered(target):
    """Return the first LSN that the backups cover."""
    return min(one.namespaces[0].floor for one in list_backups(target)) - 1


@pytest.mark.parametrize("seed", range(3))
def test_every_point_in_time_can_be_restored(seed, monkeypatch):
    """Backed up while written, folded, compacted and swept: 20 random LSNs and times are right."""
    target, history, report = play(seed, Chaos(), monkeypatch)
    assert report.backups > 1, "later generations were backed up too"
    assert verify_backup(target, deep=True).problems == []
    chosen, first = random.Random(seed), first_covered(target)
    db = reef.Database(MemoryStore())
    agree_on_cas(db.store)
    times = [(at_ms, lsn) for at_ms, lsn in history.times if lsn >= first]
    assert len(times) > 40
    for number, (at_ms, lsn) in enumerate(chosen.sample(times, 20)):
        at = {"lsn": lsn} if number % 2 else {"time": datetime.fromtimestamp(at_ms / 1000, UTC)}
        restore(target, db, f"copy-{number}", namespace=NAME, **at)
        assert rows_of(db, f"copy-{number}") == history.at[lsn], at
    restore(target, db, NAME)
    assert rows_of(db, NAME) == history.rows
    assert verify(db, NAME, deep=True).problems == []


@pytest.mark.parametrize("seed", range(3))
def test_faults_at_the_source_cost_no_row(seed, monkeypatch):
    """With lost responses, errors and stalls a backup fails as a whole, or is right."""
    target, history, _ = play(seed, FAULTS, monkeypatch)
    db = reef.Database(MemoryStore())
    agree_on_cas(db.store)
    restore(target, db, NAME)
    assert rows_of(db, NAME) == history.rows
    for number, lsn in enumerate(random.Random(seed).sample(sorted(history.at), 5)):
        if lsn >= first_covered(target):
            restore(target, db, f"copy-{number}", namespace=NAME, lsn=lsn)
            assert rows_of(db, f"copy-{number}") == history.at[lsn]


@pytest.mark.parametrize("seed", range(3))
def test_a_backup_that_is_killed_is_started_again(seed, monkeypatch):
    """Whatever it was doing: the next one continues, and every covered LSN is restored."""
    target, history, _ = play(seed, Chaos(), monkeypatch, kills=4)
    assert verify_backup(target, deep=True).problems == []
    db = reef.Database(MemoryStore())
    agree_on_cas(db.store)
    restore(target, db, NAME)
    assert rows_of(db, NAME) == history.rows
    covered = [lsn for lsn in sorted(history.at) if is_covered(target, lsn)]
    assert len(covered) > 20
    for number, lsn in enumerate(random.Random(seed).sample(covered, 8)):
        restore(target, db, f"copy-{number}", namespace=NAME, lsn=lsn)
        assert rows_of(db, f"copy-{number}") == history.at[lsn]


def is_covered(target, lsn):
    """Whether some backup and the log behind it cover an LSN."""
    found = list_backups(target)
    log = Archive(target).log(found[0].bucket, found[0].namespaces[0].root)
    floors = [one.namespaces[0].floor for one in found]
    return any(floor - 1 <= lsn <= log.reach(floor) for floor in floors)


def rows_of(db, name):
    """Return the rows of a new reader."""
    with db.reader(name) as reader:
        return dict(reader.scan())
