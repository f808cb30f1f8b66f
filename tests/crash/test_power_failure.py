"""The directory store after power failures: acknowledged writes are still there.

The disk keeps all synced changes, and a random part of the others: names without
bytes, bytes without names, half of either.
"""

import pytest

from reef.stores import Outcome
from reef.stores.local import LocalStore
from reef.testing import SimulatedDisk, SimulatedFiles, Simulation, crash_points
from reef.testing.power_failures import crashes
from reef.testing.runtime import SeededChoices

BODY = b"0123456789" * 3


class Machine:
    """Processes on one disk. Their power fails together."""

    def __init__(self, sim, seed=0):
        self.sim = sim
        self.disk = SimulatedDisk()
        self.pick = SeededChoices(seed).pick

    def process(self, name):
        node = self.sim.process(name)
        files = SimulatedFiles(self.disk, node)
        return node, LocalStore("/var/data/bucket", runtime=node.runtime, files=files)

    def survivors(self):
        """Return the objects that a process reads after the restart."""
        self.disk.power_failure(self.pick)
        node, store = self.process("after")
        seen = {}
        node.spawn(lambda: seen.update({i.key: store.get(i.key) for i in store.list()}))
        self.sim.run()
        return seen


def _all_crash_points(work, check, seeds=range(6)):
    """Kill `work` at each of its yield points, then cut the power; `check` what survived."""
    count = 0
    for seed in seeds:
        machines = []

        def scenario(sim, machines=machines, seed=seed):
            machine = Machine(sim, seed)
            machines.append(machine)
            node, store = machine.process("victim")
            machine.acknowledged = {}
            node.spawn(
                lambda: (work(store, machine.acknowledged), node.runtime.reach("acknowledged"))
            )
            sim.run()

        for point in crash_points(scenario, "victim"):
            machine = machines[-1]
            check(machine.survivors(), machine.acknowledged, point.site)
            count += 1
    return count


def test_acknowledged_creates_survive_and_nothing_is_torn():
    """H7: at every system call, for the first object in new directories and for later ones."""

    def work(store, acknowledged):
        for number in range(3):
            key = f"wal/deep/{number}"
            if store.create(key, BODY).outcome is Outcome.CREATED:
                acknowledged[key] = BODY

    def check(survivors, acknowledged, site):
        missing = acknowledged.keys() - survivors.keys()
        assert not missing, f"lost after {site}: {missing}"
        assert set(survivors.values()) <= {BODY}, f"torn after {site}"

    assert _all_crash_points(work, check) > 200


def test_acknowledged_puts_survive_and_old_bytes_never_return():
    """An acknowledged overwrite is not undone; another one is either old or new."""

    def work(store, acknowledged):
        for number in range(4):
            store.put("lease", b"%d" % number * 10)
            acknowledged["lease"] = number

    def check(survivors, acknowledged, site):
        last = acknowledged.get("lease", -1)
        allowed = [b"%d" % n * 10 for n in (last, last + 1) if n >= 0]
        if last >= 0 or "lease" in survivors:
            assert survivors.get("lease") in allowed, f"after {site}"

    assert _all_crash_points(work, check) > 200


def test_acknowledged_deletes_stay_deleted():
    """A deleted object does not come back after a power failure."""

    def work(store, acknowledged):
        store.put("a", BODY)
        store.delete("a")
        acknowledged["deleted"] = True

    def check(survivors, acknowledged, site):
        if "deleted" in acknowledged:
            assert "a" not in survivors, f"after {site}"

    _all_crash_points(work, check)


def test_uploads_and_copies_are_whole_or_absent():
    """Large writes obey the same rule."""

    def work(store, acknowledged):
        store.upload("u", [b"ab", b"cd", b"ef"])
        acknowledged["u"] = b"abcdef"
        store.copy("u", "folder/c")
        acknowledged["folder/c"] = b"abcdef"

    def check(survivors, acknowledged, site):
        assert acknowledged.items() <= survivors.items(), f"after {site}"
        assert set(survivors.values()) <= {b"abcdef"}, f"torn after {site}"

    _all_crash_points(work, check)


HISTORIES = {
    "create": [("create", "wal/1", b"one"), ("create", "wal/2", b"two")],
    "put": [("put", "lease", b"one"), ("put", "lease", b"two")],
    "delete": [("put", "a", b"one"), ("delete", "a", None), ("put", "a", b"two")],
    "upload": [("upload", "a/b", b"onetwo"), ("upload", "a/b", b"three3")],
}


def _apply(store, call, key, body):
    if call == "delete":
        store.delete(key)
    elif call == "upload":
        store.upload(key, [body[:3], body[3:]])
    else:
        getattr(store, call)(key, body)


@pytest.mark.parametrize("name", HISTORIES)
def test_every_power_failure_of_a_short_history(name):
    """H7: after every subset of unsynced writes and names, and every tear, the bucket is that
    of the last acknowledged call, or that of the call in progress."""
    disk, states = SimulatedDisk(), [{}]
    store = LocalStore("/data/bucket", files=disk)
    for number, (call, key, body) in enumerate(HISTORIES[name], start=1):
        states.append({**states[-1], key: body})
        if body is None:
            del states[-1][key]
        disk.mark(("begun", number))
        _apply(store, call, key, body)
        disk.mark(("acked", number))
    seen = 0
    for done, content in crashes(disk):
        marks = [step.mark for step in disk.trace[:done] if step.kind == "mark"]
        allowed = [max((n for what, n in marks if what == word), default=0) for word in WORDS]
        assert _bucket(content) in [states[number] for number in allowed], disk.trace[:done]
        seen += 1
    assert seen > 60


WORDS = ("acked", "begun")


def _bucket(content):
    store = LocalStore("/data/bucket", files=SimulatedDisk(content))
    return {info.key: store.get(info.key) for info in store.list()}


def test_a_create_whose_directory_sync_fails_is_not_vouched_for():
    """The name may be lost although later syncs succeed, so no outcome in that directory is
    certain any more; with a disk that reports otherwise, this test would prove nothing."""
    disk = SimulatedDisk()
    store = LocalStore("/data/bucket", files=disk)
    store.create("wal/0", BODY)

    def fail(call, path):
        if call == "syncdir" and path.endswith("/wal"):
            raise OSError(5, "Input/output error")

    disk.before = fail
    assert store.create("wal/1", BODY).outcome is Outcome.UNKNOWN
    disk.before = None
    assert store.create("wal/1", BODY).outcome is Outcome.UNKNOWN
    assert store.create("wal/2", BODY).outcome is Outcome.UNKNOWN
    files = disk.scan("/data/bucket/wal")
    assert sorted(name for name, _ in files) == ["0", "1", "2"]
    disk.sync_directory("/data/bucket/wal")
    lost = [_bucket(content) for _, content in crashes(disk, len(disk.trace))]
    assert {"wal/0": BODY, "wal/2": BODY} in lost


@pytest.mark.parametrize("seed", range(40))
def test_the_loser_of_a_create_can_rely_on_the_winner(seed):
    """The outcome "exists" is only given for durable objects: the loser relies on it.

    The same for directories: one process makes them, another writes into them and is
    acknowledged; the power fails before the first one has synced.
    """
    sim = Simulation(seed)
    machine = Machine(sim, seed)
    acknowledged = {}

    def take(node, store):
        outcome = store.create("wal/1", node.name.encode()).outcome
        acknowledged[node.name] = outcome
        store.create(f"wal/{node.name}", b"mine")
        acknowledged[f"wal/{node.name}"] = True
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
        if acknowledged.get(name) is Outcome.CREATED:
            assert survivors["wal/1"] == name.encode()
        elif acknowledged.get(name) is Outcome.EXISTS:
            assert "wal/1" in survivors
        if f"wal/{name}" in acknowledged:
            assert survivors[f"wal/{name}"] == b"mine"


def test_a_lock_ends_with_its_process():
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
            file = files.create("/var/data/bucket/k")
            file.append(BODY)
            file.close()

        node.spawn(write)
        sim.run()
        survivors = machine.survivors()
        sim.close()
        lost += "k" not in survivors
        torn += survivors.get("k", BODY) != BODY
    assert lost > 5
    assert torn > 0
