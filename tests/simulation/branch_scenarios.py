"""Branches that are made, written, merged, rolled back and dropped while both sides sweep (H42).

Every write has a key of its own, so that a state is a set of keys. A branch shows exactly the rows
of its origin up to the LSN at which it was made, for ever, and its own: `Branches.check_branch`
holds at every point in time, whatever either side folds, compacts, sweeps or merges.
"""

from contextlib import suppress

import msgspec

from reef.engine.handles.database import Database
from reef.formats.schema import DEFAULT_SCHEMA
from reef.jobs import compact, fold, purge, sweep, verify
from reef.manifest.edits import new_namespace
from reef.manifest.head import Publisher, locate
from reef.paths import Namespace
from reef.testing.simulation import CALM
from tests.simulation.actors import EXPECTED_ERRORS, GRACE_S, Calm
from tests.support.proven_buckets import remember_probe

NAME = "main"
CHILDREN = ("red", "green")
DROPPED_S = 8.0
SILENT_S = 20.0
"""How old a pin is before a collector examines whether its branch exists."""
ROUNDS = 3
SWEEPS = {
    "apply": True,
    "force": True,
    "retain_generations_s": 0.0,
    "dropped_s": DROPPED_S,
    "silent_job_s": SILENT_S,
}


class Branches:
    """One namespace, its branches, and what their clients have observed."""

    def __init__(self, sim):
        self.sim = sim
        self.main: dict[bytes, int] = {}
        """The LSNs of acknowledged rows of the origin."""
        self.own: dict[str, dict[bytes, int]] = {}
        """The same of each branch, by its id."""
        self.rolled_back: dict[str, int] = {}
        """Of each branch: the LSN of its last rollback that was acknowledged."""
        self.doubtful: set[str] = set()
        """Branches with a rollback whose outcome is unknown, or that may still land."""
        self.merged: set[bytes] = set()
        """Rows of branches that a merge was acknowledged for."""
        self.merging: set[str] = set()
        """Branches that were merged, perhaps without a response."""
        self.sent: set[bytes] = set()
        self.erasing: set[bytes] = set()
        self.erased: set[bytes] = set()
        remember_probe(sim.bucket)
        first = new_namespace(DEFAULT_SCHEMA)
        first = msgspec.structs.replace(first, grace_ms=int(GRACE_S * 1000))
        Publisher(sim.bucket, Namespace(NAME)).create(first)

    def start(self, name, act, *args, rounds=ROUNDS):
        """Start a process that acts a few times, with pauses."""
        node = self.sim.process(name, skew_s=self.sim.choices.uniform(-600.0, 600.0))

        def run():
            for number in range(rounds):
                node.runtime.sleep(node.runtime.uniform(0.0, 10.0))
                with suppress(*EXPECTED_ERRORS):
                    act(self, node, number, *args)

        node.spawn(run)
        return node

    # --- what must hold -----------------------------------------------------------
    def check_branch(self, reader, origin):
        """Compare the rows of an open reader with those that its branch must have."""
        seen = {key for key, _ in reader.scan()}
        inherited = {key for key, lsn in self.main.items() if lsn <= origin.last_lsn}
        later = {key for key, lsn in self.main.items() if lsn > origin.last_lsn}
        assert inherited <= seen, f"{inherited - seen} of the origin are lost"
        assert not later & seen, f"{later & seen} were written after the branch was made"
        others = self.own.keys() - {origin.id} - self.merging
        foreign = {key for other in others for key in self.own[other]}
        assert not foreign & seen, "rows of another branch"
        return seen

    def check_own(self, seen, origin):
        """Check that the acknowledged rows of a branch are there, unless they were rolled back."""
        if origin.id in self.doubtful:
            return
        last = self.rolled_back.get(origin.id, 0)
        own = self.own.get(origin.id, {})
        lost = {key for key, lsn in own.items() if lsn > last} - seen
        assert not lost, f"{lost} were acknowledged and are lost"
        back = {key for key, lsn in own.items() if lsn < last} & seen
        assert not back, f"{back} were rolled back and are there"


# --- processes --------------------------------------------------------------------------


def write_main(world, node, number):
    """Write a few rows to the origin."""
    with Database(node.store()).writer(NAME, background=False) as writer:
        for turn in range(3):
            key = f"{node.name}-{number}-{turn}".encode()
            world.sent.add(key)
            world.main[key] = writer.put(key, b"1").lsn
            node.runtime.sleep(node.runtime.uniform(0.0, 8.0))


def make_branch(world, node, number, name):
    """Make a branch now, or at an LSN of the past."""
    known = sorted(world.main.values())
    past = known and world.sim.choices.pick(2)
    at = {"lsn": known[world.sim.choices.pick(len(known))]} if past else None
    Database(node.store()).branch(NAME, name, at)


def write_child(world, node, number, name):
    """Write a few rows to a branch; each life of the name has rows of its own."""
    with Database(node.store()).writer(name, background=False, create=False) as writer:
        origin = writer._manifest.origin
        own = world.own.setdefault(origin.id, {})
        for turn in range(2):
            key = f"{name}-{node.name}-{number}-{turn}".encode()
            world.sent.add(key)
            lsn = writer.put(key, b"1").lsn
            own[key] = lsn
            node.runtime.sleep(node.runtime.uniform(0.0, 8.0))


def merge(world, node, number, name):
    """Merge a branch: everything that it had acknowledged before is then in the origin."""
    db = Database(node.store())
    with db.reader(name) as reader:
        origin = reader._tail.manifest.origin
    last = world.rolled_back.get(origin.id, 0)
    before = {key for key, lsn in world.own.get(origin.id, {}).items() if lsn > last}
    world.merging.add(origin.id)
    db.merge(name, NAME)
    now = locate(world.sim.bucket, name).found.manifest.origin
    is_same = now is not None and now.id == origin.id
    if is_same and origin.id not in world.doubtful and world.rolled_back.get(origin.id, 0) == last:
        world.merged |= before


def roll_back(world, node, number, name):
    """Return a branch to the rows with which it began."""
    db = Database(node.store())
    origin = locate(node.store(), name).found.manifest.origin
    world.doubtful.add(origin.id)
    report = db.rollback(name, {"lsn": origin.last_lsn})
    if report.lsn and locate(world.sim.bucket, name).found.manifest.origin.id == origin.id:
        world.rolled_back[origin.id] = report.lsn
        world.doubtful.discard(origin.id)


def drop(world, node, number, name):
    """Drop a branch; half of the time, bring it back."""
    db = Database(node.store())
    db.drop(name)
    if world.sim.choices.pick(2):
        node.runtime.sleep(node.runtime.uniform(0.0, 2 * DROPPED_S))
        db.undrop(name)


def keep_house(world, node, number, name):
    """Fold, compact and sweep one side, with a collector that examines pins early."""
    db = Database(node.store())
    with suppress(*EXPECTED_ERRORS):
        fold(db, name)
    with suppress(*EXPECTED_ERRORS):
        compact(db, name, full=world.sim.choices.pick(2) == 0)
    for _ in range(2):
        with suppress(*EXPECTED_ERRORS):
            sweep(db, name, **SWEEPS)
        node.runtime.sleep(node.runtime.uniform(0.0, 2 * GRACE_S))


def read(world, node, number, name):
    """Compare a branch, as it is now, with the origin at its branch point."""
    with Database(node.store()).reader(name) as reader:
        origin = reader._tail.manifest.origin
        if origin is not None:
            world.check_branch(reader, origin)


# --- scenarios --------------------------------------------------------------------------


def branches_come_and_go(sim):
    """Branches of a written namespace: made by two processes at once, dropped, made again.

    In the end every branch that is there has the rows of its origin at its branch point and its
    own, acknowledged merges are in the origin, and the sweeps of all sides have lost nothing.
    """
    world = Branches(sim)
    world.start("writer", write_main)
    for name in CHILDREN:
        world.start(f"maker-{name}", make_branch, name)
        world.start(f"rival-{name}", make_branch, name)
        world.start(f"writer-{name}", write_child, name)
        world.start(f"house-{name}", keep_house, name)
    world.start("dropper", drop, CHILDREN[sim.choices.pick(2)])
    world.start("merger", merge, CHILDREN[0])
    world.start("reader", read, CHILDREN[1])
    world.start("house", keep_house, NAME, rounds=2 * ROUNDS)
    sim.run()
    finish(world)


def branches_roll_back(sim):
    """A branch is written, rolled back and merged at the same time."""
    world = Branches(sim)
    (name, _) = CHILDREN
    world.start("writer", write_main)
    world.start("maker", make_branch, name)
    world.start("writer-1", write_child, name)
    world.start("writer-2", write_child, name)
    world.start("roller", roll_back, name)
    world.start("merger", merge, name)
    world.start("house-child", keep_house, name)
    world.start("house", keep_house, NAME, rounds=2 * ROUNDS)
    sim.run()
    finish(world)


def finish(world):
    """Sweep everything a day later, and compare every branch with its model."""
    calm = Database(world.sim.bucket)
    world.sim.scheduler.now_s += 24 * 3600.0
    for _ in range(2):
        compare(world, calm)
        for name in (*CHILDREN, NAME):
            with suppress(*EXPECTED_ERRORS):
                fold(calm, name)
            with suppress(*EXPECTED_ERRORS):
                sweep(calm, name, **SWEEPS)
        world.sim.scheduler.now_s += 3600.0
    compare(world, calm)


def compare(world, calm):
    """Check the origin and all branches, without faults."""
    with calm.writer(NAME, background=False) as writer:
        rows = {key for key, _ in writer.scan()}
    assert set(world.main) <= rows, f"{set(world.main) - rows} were acknowledged and are lost"
    assert world.merged <= rows, f"{world.merged - rows} were merged and are lost"
    assert rows <= world.sent, "rows from nowhere"
    for name in set(CHILDREN) & set(calm.namespaces()):
        with calm.reader(name) as reader:
            origin = reader._tail.manifest.origin
            world.check_own(world.check_branch(reader, origin), origin)
        assert not verify(calm, name, deep=True).problems
    assert not verify(calm, NAME, deep=True).problems


# --- erasure ----------------------------------------------------------------------------


def erase(world, node, number):
    """Erase a row that was acknowledged."""
    known = sorted(set(world.main) - world.erasing)
    if known:
        key = known[world.sim.choices.pick(len(known))]
        world.erasing.add(key)
        purge(Database(node.store()), NAME, [key], apply=True, wait_s=4 * GRACE_S)
        world.erased.add(key)


def rows_are_erased(sim):
    """Two purges while the namespace is written, folded, compacted and swept.

    In the end no acknowledged row is lost but those that were to be erased, and another purge of
    those leaves no trace of them.
    """
    world = Branches(sim)
    world.start("writer", write_main)
    world.start("eraser-1", erase)
    world.start("eraser-2", erase)
    world.start("house", keep_house, NAME)
    sim.run()
    calm = Database(sim.bucket)
    with calm.writer(NAME, background=False) as writer:
        rows = {key for key, _ in writer.scan()}
    kept = set(world.main) - world.erasing
    assert kept <= rows, f"{kept - rows} are lost"
    assert not world.erased & rows, f"{world.erased & rows} were erased and are there"
    assert not verify(calm, NAME, deep=True).problems
    if world.erasing:
        check_erased(world, kept)


def check_erased(world, kept):
    """Erase again, without faults: nothing is left of the keys, and all else is there."""
    sim, reports = world.sim, []
    sim.chaos = CALM
    node = sim.process("calm")
    db = Database(Calm(world, node))

    def run():
        node.runtime.sleep(24 * 3600.0)
        reports.append(purge(db, NAME, sorted(world.erasing), apply=True, wait_s=100 * GRACE_S))

    node.spawn(run)
    sim.run()
    (report,) = reports
    assert report.erased, report
    bodies = [bytes(sim.bucket.get(info.key)) for info in sim.bucket.list()]
    assert not [key for key in world.erasing if any(key in body for body in bodies)]
    with Database(sim.bucket).reader(NAME) as reader:
        assert kept <= {key for key, _ in reader.scan()}
