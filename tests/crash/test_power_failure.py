"""The directory store on a disk that forgets: what was answered is still there.

The disk keeps only what was synced, and of the rest whatever chance keeps: names without
bytes, bytes without names, half of either.
"""

import pytest

from reef.stores import Outcome
from reef.stores.local import LocalStore
from reef.testing import SimulatedDisk, SimulatedFiles, Simulation, crash_points
from reef.testing.choices import SeededChoices

BODY = b"0123456789" * 3


class Machine:
    """Processes on one disk. Their power fails together."""

    def __init__(self, sim, seed=0):
        self.sim = sim
        self.disk = SimulatedDisk(SeededChoices(seed))

    def process(self, name):
        node = self.sim.process(name)
        files = SimulatedFiles(self.disk, node)
        return node, LocalStore("/var/data/bucket", runtime=node.runtime, files=files)

    def survivors(self):
        """What a process sees that is started after the power came back."""
        self.disk.power_failure()
        node, store = self.process("after")
        seen = {}
        node.spawn(lambda: seen.update({i.key: store.get(i.key) for i in store.list()}))
        self.sim.run()
        return seen


def _all_crash_points(work, check, seeds=range(6)):
    """Kill `work` at each of its seams, then cut the power; `check` what survived."""
    count = 0
    for seed in seeds:
        machines = []

        def scenario(sim, machines=machines, seed=seed):
            machine = Machine(sim, seed)
            machines.append(machine)
            node, store = machine.process("victim")
            machine.answered = {}
            node.spawn(lambda: (work(store, machine.answered), node.runtime.reach("answered")))
            sim.run()

        for point in crash_points(scenario, "victim"):
            machine = machines[-1]
            check(machine.survivors(), machine.answered, point.what)
            count += 1
    return count


def test_answered_creates_survive_and_nothing_is_torn():
    """H7: at every system call, for the first object in new directories and for later ones."""

    def work(store, answered):
        for number in range(3):
            key = f"wal/deep/{number}"
            if store.create(key, BODY).outcome is Outcome.CREATED:
                answered[key] = BODY

    def check(survivors, answered, what):
        missing = answered.keys() - survivors.keys()
        assert not missing, f"lost after {what}: {missing}"
        assert set(survivors.values()) <= {BODY}, f"torn after {what}"

    assert _all_crash_points(work, check) > 200


def test_answered_puts_survive_and_old_bytes_never_return():
    """An overwrite that was answered is not undone; one that was not is either old or new."""

    def work(store, answered):
        for number in range(4):
            store.put("lease", b"%d" % number * 10)
            answered["lease"] = number

    def check(survivors, answered, what):
        last = answered.get("lease", -1)
        allowed = [b"%d" % n * 10 for n in (last, last + 1) if n >= 0]
        if last >= 0 or "lease" in survivors:
            assert survivors.get("lease") in allowed, f"after {what}"

    assert _all_crash_points(work, check) > 200


def test_answered_deletes_stay_deleted():
    """A deleted object does not come back after a power failure."""

    def work(store, answered):
        store.put("a", BODY)
        store.delete("a")
        answered["deleted"] = True

    def check(survivors, answered, what):
        if "deleted" in answered:
            assert "a" not in survivors, f"after {what}"

    _all_crash_points(work, check)


def test_uploads_and_copies_are_whole_or_absent():
    """Large writes obey the same rule."""

    def work(store, answered):
        store.upload("u", [b"ab", b"cd", b"ef"])
        answered["u"] = b"abcdef"
        store.copy("u", "folder/c")
        answered["folder/c"] = b"abcdef"

    def check(survivors, answered, what):
        assert answered.items() <= survivors.items(), f"after {what}"
        assert set(survivors.values()) <= {b"abcdef"}, f"torn after {what}"

    _all_crash_points(work, check)


@pytest.mark.parametrize("seed", range(40))
def test_the_loser_of_a_create_can_rely_on_the_winner(seed):
    """ "exists" is answered only of what will survive: the loser goes on from it.

    The same for directories: one process makes them, another writes into them and is
    answered; the power fails before the first one has synced.
    """
    sim = Simulation(seed)
    machine = Machine(sim, seed)
    answered = {}

    def take(node, store):
        outcome = store.create("wal/1", node.name.encode()).outcome
        answered[node.name] = outcome
        store.create(f"wal/{node.name}", b"mine")
        answered[f"wal/{node.name}"] = True
        for process in sim.processes:  # the first to be done pulls the plug
            if process is not node:
                process.crash()
        node.crash()

    for name in ("a", "b"):
        node, store = machine.process(name)
        node.spawn(lambda node=node, store=store: take(node, store))
    sim.run()
    survivors = machine.survivors()
    sim.close()
    for name in ("a", "b"):
        if answered.get(name) is Outcome.CREATED:
            assert survivors["wal/1"] == name.encode()
        elif answered.get(name) is Outcome.EXISTS:
            assert "wal/1" in survivors
        if f"wal/{name}" in answered:
            assert survivors[f"wal/{name}"] == b"mine"


def test_a_lock_outlives_nobody():
    """A process that dies while it holds a key's lock does not block the next one."""

    def scenario(sim):
        machine = Machine(sim)
        node, store = machine.process("victim")
        node.spawn(lambda: (store.put("k", b"1"), store.put("k", b"2")))
        sim.run()
        scenario.machine = machine

    for point in crash_points(scenario, "victim"):
        node, store = scenario.machine.process("next")
        node.spawn(lambda store=store: store.put("k", b"3"))
        point.simulation.run()
        node, store = scenario.machine.process("reader")
        seen = []
        node.spawn(lambda store=store, seen=seen: seen.append(store.get("k")))
        point.simulation.run()
        assert seen == [b"3"]


def test_the_disk_really_forgets():
    """Without syncs, data is lost: the simulated disk can make these tests fail."""
    lost = torn = 0
    for seed in range(30):
        sim = Simulation(seed)
        machine = Machine(sim, seed)
        node, _ = machine.process("careless")
        files = SimulatedFiles(machine.disk, node)

        def write(files=files):
            files.make_directory("/var")
            files.make_directory("/var/data")
            files.make_directory("/var/data/bucket")
            fd = files.create("/var/data/bucket/k")
            files.write(fd, BODY)
            files.close(fd)

        node.spawn(write)
        sim.run()
        survivors = machine.survivors()
        sim.close()
        lost += "k" not in survivors
        torn += survivors.get("k", BODY) != BODY
    assert lost > 5
    assert torn > 0
