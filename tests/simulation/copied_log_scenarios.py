"""Copies of one local log, under the simulator: H71.

A machine's log directory is copied while it runs, while it is down, or comes back from an older
image of its disk, with uploads in flight; the copies run too, at the same time as the original, and
are copied in turn. Power cuts, lost responses, a rival, folds and sweeps as in
`local_log_scenarios`. In the end every disk returns, in any order. What must hold:

- every write that any machine has acknowledged counts exactly once after all disks have returned
  and the refused ones were re-applied, however often that is repeated and whichever disks have it;
- before it is re-applied it is either in the bucket or listed as pending on the disk of the machine
  that has acknowledged it;
- no disk with pending writes opens by itself after another writer or another copy had the role;
- writes of one machine are in the order in which they were made.
"""

from reef.errors import ErrorKind, FencedError
from reef.testing import Chaos
from reef.testing.power_failures import random_crash
from tests.simulation.actors import GRACE_S, KEYS, World, keep_house, write
from tests.simulation.local_log_scenarios import (
    PATH,
    Machine,
    calm_database,
    pending_values,
    run_lives,
    write_again,
)

COPIES_MAX = 3


class CopiedMachine(Machine):
    """A machine with a log of its own, or with a copy of another machine's."""

    def __init__(self, world, name, content=None):
        super().__init__(world)
        self.name = name
        self.content = content or {}

    def _next(self):
        self.number += 1
        return KEYS[self.number % len(KEYS)], f"{self.name}-{self.number}".encode()

    def opened(self, writer):
        super().opened(writer)
        self.disk.mark(self.epoch)

    def image(self, choices):
        """Return a copy of the disk as it is, or as it was at some earlier time, and the epoch of
        the last life that had opened its writer by then."""
        if self.disk is None:
            return dict(self.content), self.epoch
        steps = len(self.disk.trace)
        at = steps if choices.pick(2) else choices.pick(steps + 1)
        done, content = random_crash(self.disk, choices.pick, at)
        marks = [step.mark for step in self.disk.trace[:done] if step.kind == "mark"]
        return content, max(marks, default=0)


class Family:
    """All machines whose logs go back to one."""

    def __init__(self, world):
        self.world = world
        self.machines = [CopiedMachine(world, "first")]

    def start(self, machine, lives, count):
        hand = self.world.sim.process(f"hand of {machine.name}")
        hand.spawn(lambda: run_lives(self.world, machine, hand, lives, count))

    def copy_some(self, node, copies):
        """Copy the disk of some machine now and then, and start a machine with it."""
        choices = self.world.sim.choices
        for number in range(copies):
            node.runtime.sleep(choices.uniform(0.1, 2 * GRACE_S))
            source = self.machines[choices.pick(len(self.machines))]
            content, epoch = source.image(choices)
            copy = CopiedMachine(self.world, f"copy{number}", content)
            copy.epoch = epoch
            self.machines.append(copy)
            self.start(copy, lives=2, count=3)


def copies_of_a_log(sim, copies=COPIES_MAX, rival=True):
    """A machine, copies of its log, a rival, folds and sweeps."""
    world = World(sim, grace_s=GRACE_S)
    family = Family(world)
    family.start(family.machines[0], lives=3, count=4)
    copier = sim.process("copier")
    copier.spawn(lambda: family.copy_some(copier, 1 + sim.choices.pick(copies)))
    if rival and not sim.choices.pick(4):
        world.start("rival", write, 2, after_s=40.0)
    world.start("house", keep_house, 6)
    sim.run()
    for process in sim.processes:
        if not process.dead and process.name == "machine":
            process.crash()
    for machine in family.machines:
        machine.lose_power(sim.choices)
    check(world, family)


def check(world, family):
    """All machines come back for good, in calm weather and in any order."""
    world.sim.chaos = Chaos()
    node = world.sim.process("calm")
    waiting = list(family.machines)

    def return_all():
        while waiting:
            machine = waiting.pop(world.sim.choices.pick(len(waiting)))
            come_back(world, family, machine, node)

    node.spawn(return_all)
    world.sim.run()
    world.check()
    evaluated = world.oracle.evaluate()
    for machine in family.machines:
        for value in machine.acknowledged:
            places = evaluated.applied.get(value, [])
            assert len(places) == 1, f"{value} was acknowledged and counts at {places}"
        places = []
        for number in range(1, machine.number + 1):
            lsns = evaluated.applied.get(f"{machine.name}-{number}".encode(), [])
            assert len(lsns) <= 1, f"write {number} of {machine.name} counts at {lsns}"
            places += lsns
        assert places == sorted(places), f"writes of {machine.name} have changed places"


def come_back(world, family, machine, node):
    """Open the disk that is left; re-apply it if that is refused."""
    calm = calm_database(world, machine, node)
    pending = pending_values(calm)
    others = [opened.epoch for opened in world.clients.opens]
    others += [other.epoch for other in family.machines if other is not machine]
    before = machine.epoch
    refusal = None
    try:
        machine.epoch = write_again(calm)
    except FencedError as error:
        refusal = error
    if refusal is None:
        assert not pending or max(others, default=0) <= before, (
            f"{machine.name} applied {sorted(pending)} over the rows of another writer"
        )
        return
    assert refusal.kind in (ErrorKind.FENCED, ErrorKind.LOG_FORKED)
    assert f"reef log reapply {PATH}" in refusal.hint
    applied = world.oracle.evaluate().applied
    for value in machine.acknowledged:
        assert (value in pending) != (value in applied), f"{value}: {refusal}"
    for _ in range(2):
        machine.epoch = write_again(calm, reapply=True)
