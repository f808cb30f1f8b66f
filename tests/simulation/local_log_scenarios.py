"""A machine whose writer has a local log, under the simulator.

The machine dies anywhere, with its power or without, and restarts on the content of its disk.
Responses get lost, a rival acquires the role, folds and sweeps run while it is down. Invariants:

- every write that was acknowledged on the local disk is in the bucket's log exactly once after the
  machine has restarted, or, if a rival has the role, is listed as pending and not in the bucket;
- re-applying it then stores it once, however often that is repeated;
- no write is there twice, acknowledged or not, and the others are in the order of the puts;
- a read on the machine sees its own last write at once.
"""

from contextlib import suppress

import reef
from reef.engine.handles.database import Database
from reef.engine.local.open import find_pending
from reef.engine.local.stream import decode_entry
from reef.errors import (
    ConditionFailedError,
    FencedError,
    InvalidInputError,
    NotFoundError,
    ReefError,
)
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.wal_object import decode_ops
from reef.testing import Chaos
from reef.testing.disk import SimulatedDisk, SimulatedFiles
from reef.testing.power_failures import random_crash
from tests.simulation.actors import GRACE_S, KEYS, NAME, Calm, World, keep_house, load_some, write

PATH = "/local-log"
SETTINGS = {
    "durability": "local",
    "local_log": PATH,
    "lease_ttl_s": GRACE_S,
    "background": False,
    "local_segment_bytes": 2048,
    "upload_interval_ms": 50.0,
    "commit_deadline_s": 5.0,
    "write_deadline_s": 5.0,
}


POLL_S = 0.5
POLL_SHARE = 1 / 16
"""How often the end of a life is polled: less often in a life that lasts for hours, with a request
held or its process frozen, because every poll is a step of the simulation."""


class Machine:
    """The state that outlives the machine's processes: its disk, and acknowledged writes."""

    def __init__(self, world):
        self.world = world
        self.disk = None
        self.content = {}
        self.acknowledged = []
        self.done = False
        self.number = 0
        self.epoch = 0
        """Of the last life that has opened its writer."""
        self.refused = ""
        """The error that the machine got when it came back after a rival."""

    def live(self, node, count):
        """Open, write, close: until something goes wrong or the process dies."""
        self.disk = self.disk or SimulatedDisk(self.content)
        try:
            self._write(node, count)
        except (ReefError, ConditionFailedError):
            node.runtime.sleep(node.runtime.uniform(0.0, 1.0))
        self.done = True

    def _write(self, node, count):
        db = Database(node.store())
        db._log_files = SimulatedFiles(self.disk, node)
        writer = db.writer(NAME, **SETTINGS)
        self.opened(writer)
        for _ in range(count):
            key, value = self._next()
            writer.put(key, value)
            self.acknowledged.append(value)
            assert writer.get(key) == value, "a write is not seen where it was made"
            self._something_else(node, writer)
        with suppress(FencedError):
            writer.close()

    def opened(self, writer):
        """Note that a life has its writer."""
        self.epoch = writer._committer.opened.epoch

    def _next(self):
        self.number += 1
        return KEYS[self.number % len(KEYS)], f"local-{self.number}".encode()

    def _something_else(self, node, writer):
        match int(node.runtime.uniform(0, 8)):
            case 0:
                writer.flush()
            case 1:
                key, value = self._next()
                with suppress(ConditionFailedError):
                    self.world.clients.put(writer, key, value, when=[reef.present(key)])
            case 2:
                key, value = self._next()
                writer.put(key, value, wait=False).result()
                self.acknowledged.append(value)
            case 3:
                node.runtime.sleep(node.runtime.uniform(0.0, 20.0))
            case _:
                node.runtime.sleep(node.runtime.uniform(0.0, 0.1))

    def lose_power(self, choices):
        """Keep some of the unsynced bytes; or all, since only the process has crashed. Then it
        is still not synced, and goes if the power fails later."""
        if self.disk is None:
            return
        if choices.pick(2):
            self.disk.restart()
            return
        _, self.content = random_crash(self.disk, choices.pick, len(self.disk.trace))
        self.disk = None

    def files(self):
        """Return the content of the machine's disk, for the next process."""
        return SimulatedDisk(self.content if self.disk is None else self.disk.content())


def run_lives(world, machine, hand, lives, count):
    """Start the machine again whenever it has died; it stays down for a while."""
    for _ in range(lives):
        node = world.sim.process("machine", skew_s=world.sim.choices.uniform(-600.0, 600.0))
        machine.done = False
        node.spawn(lambda node=node: machine.live(node, count))
        waited_s = 0.0
        while not (node.dead or machine.done):
            pause_s = max(POLL_S, waited_s * POLL_SHARE)
            hand.runtime.sleep(pause_s)
            waited_s += pause_s
        if machine.done:
            node.crash()  # with all its threads
        machine.lose_power(world.sim.choices)
        hand.runtime.sleep(world.sim.choices.uniform(0.0, 3 * GRACE_S))


def a_machine_comes_back(sim, lives=3, count=4, rival=True):
    """Some restarts of a machine, with a rival, a bulk job, folds and sweeps."""
    world = World(sim, grace_s=GRACE_S)
    machine = Machine(world)
    hand = sim.process("hand")
    hand.spawn(lambda: run_lives(world, machine, hand, lives, count))
    if rival and sim.choices.pick(2):
        world.start("rival", write, 2, after_s=40.0)
    world.start("job", load_some, 1, after_s=20.0)
    world.start("house", keep_house, 6)
    sim.run()
    for process in sim.processes:
        if not process.dead and process.name == "machine":
            process.crash()
    machine.lose_power(sim.choices)
    check(world, machine)


def a_lone_machine_comes_back(sim):
    """The same without a rival: nothing is ever left behind."""
    a_machine_comes_back(sim, rival=False)


def check(world, machine):
    """The machine comes back for good, in calm weather."""
    world.sim.chaos = Chaos()
    node = world.sim.process("calm")
    node.spawn(lambda: come_back(world, machine, node))
    world.sim.run()
    world.check()
    evaluated = world.oracle.evaluate()
    for value in machine.acknowledged:
        assert len(evaluated.applied.get(value, [])) == 1, (
            f"{value} was acknowledged and counts at {evaluated.applied.get(value)}"
        )
    if machine.refused:
        assert f"reef log pending {PATH}" in machine.refused
        assert f"reef log reapply {PATH}" in machine.refused
    places = []
    for number in range(1, machine.number + 1):
        lsns = evaluated.applied.get(f"local-{number}".encode(), [])
        assert len(lsns) <= 1, f"write {number} counts at {lsns}"
        places += lsns
    assert places == sorted(places), "writes of one machine have changed places"


def come_back(world, machine, node):
    """Open the log that is left. If a rival was first, apply the pending batches."""
    calm = calm_database(world, machine, node)
    pending = pending_values(calm)
    rivals = [opened.epoch for opened in world.clients.opens]
    try:
        calm.writer(NAME, **SETTINGS).close()
        assert not pending or max(rivals, default=0) < machine.epoch, "applied over a rival's rows"
    except FencedError as error:
        machine.refused = error.hint
        applied = world.oracle.evaluate().applied
        for value in machine.acknowledged:
            assert (value in pending) != (value in applied), f"{value}: pending and in the bucket"
        for _ in range(2):
            calm.writer(NAME, reapply=True, **SETTINGS).close()


def calm_database(world, machine, node):
    """Return the database as a calm process sees it that has the machine's disk."""
    calm = Database(Calm(world, node))
    calm._log_files = machine.files()
    return calm


def write_again(calm, **settings):
    """Open the log, upload its batches, and close; return the epoch."""
    writer = calm.writer(NAME, **SETTINGS, **settings)
    writer.close()
    return writer._committer.opened.epoch


def pending_values(calm):
    """Return the values of the local log that were not uploaded yet."""
    values = set()
    try:
        _, entries = find_pending(PATH, files=calm._log_files, store=calm.store)
    except (NotFoundError, InvalidInputError):  # it died before there was any log
        return values
    for entry in entries:
        batch = decode_entry(entry, PATH)
        ops = decode_ops(batch.record, DEFAULT_SCHEMA, PATH)
        values.update(((ops.fields or {})[1]).to_pylist())
    return values
