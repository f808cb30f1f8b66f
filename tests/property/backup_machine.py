"""Backups of namespaces under everything that changes or deletes objects.

The histories of `branch_machine` (writes, loads, patches, folds, compactions, sweeps, branches,
drops and new lives of a name), with backups into one set, and restores of any LSN or time that a
backup has covered since. A restored namespace has the rows of the model at that point.
"""

import argparse
import sys
from datetime import UTC, datetime

from reef.jobs import backup, restore, verify, verify_backup
from reef.manifest.head import locate
from reef.stores.memory import MemoryStore
from reef.testing import Simulation
from tests.property.branch_machine import BranchMachine, Bucket

RESTORED = "restored"


class BackupMachine(BranchMachine):
    """The namespaces of one bucket, a backup set, and the models of all LSNs."""

    def __init__(self, sim, node, seed):
        self.points = {}
        """By folder: (time, LSN, rows), for as long as the bucket exists."""
        self.covered = {}
        """By folder: LSNs that a backup has seen, and the name of the namespace then."""
        self.set = Bucket(MemoryStore(), node.runtime)
        self.restores = 0
        super().__init__(sim, node, seed)

    def note(self, name):
        super().note(name)
        root = locate(self.store, name).names.root
        lsn = max(self.past[name])
        points = self.points.setdefault(root, [])
        known = {point[1] for point in points}
        for earlier in sorted(self.past[name]):
            if earlier not in known:
                at_ms = int(self.runtime.wall_s() * 1000) if earlier == lsn else None
                points.append((at_ms, earlier, dict(self.past[name][earlier])))
        self.runtime.sleep(1.0)

    def backup(self, name):
        root = locate(self.store, name).names.root
        first = min((one[1] for one in self.points[root]), default=0)
        report = backup(self.db, name, self.set)
        floor = report.namespaces[0].floor
        low, high, _, _ = self.covered.get(root, (floor - 1, 0, "", ""))
        is_gapless = high + 1 >= floor - 1 or root not in self.covered
        self.covered[root] = (
            low if is_gapless else floor - 1,
            report.last_lsn,
            name,
            report.id,
        )
        assert first >= 0

    def restore(self, _):
        """Restore a random point of a random namespace that was backed up."""
        if not self.covered:
            return
        root = self.random.choice(sorted(self.covered))
        self.restore_one(root)

    def restore_one(self, root):
        low, high, name, backup_id = self.covered[root]
        points = [point for point in self.points[root] if low <= point[1] <= high]
        if not points:
            return
        at_ms, lsn, rows = self.random.choice(points)
        newest = [r for r, one in self.covered.items() if one[2] == name][-1]
        if newest != root:  # an earlier life: only the state of that backup is asked for
            at = {"backup": backup_id}
            rows = max(points, key=lambda point: point[1])[2]
        elif at_ms is not None and self.random.random() < 0.5:
            at = {"time": datetime.fromtimestamp(at_ms / 1000, UTC)}
        else:
            at = {"lsn": lsn}
        self.restores += 1
        out = f"{RESTORED}-{self.restores}" if self.random.random() < 0.5 else RESTORED
        restore(self.set, self.db, out, namespace=name, **at)
        assert self.read(out) == rows, f"{name} at {at}: {self.steps}"
        assert not verify(self.db, out, deep=True).problems
        self.db.drop(out)

    def step(self):
        kinds = ["write"] * 6 + ["branch", "load", "fold", "compact", "sweep"] * 2
        kinds += ["drop", "create_again", "clear"] + ["backup", "restore"] * 5
        kind, name = self.random.choice(kinds), self.random.choice(sorted(self.rows))
        self.steps.append((kind, name))
        getattr(self, kind)(name)

    def create_again(self, _):
        """Create a dropped name again: another life of it."""
        if self.dropped:
            name = self.random.choice(sorted(self.dropped))
            del self.dropped[name]
            self.create(name)

    def finish(self):
        """Every namespace that was ever backed up can be restored, and the set is whole."""
        found = verify_backup(self.set, deep=True)
        assert found.problems == []
        assert found.orphans == []
        for root in sorted(self.covered):
            self.restore_one(root)


def run(seed, steps=40):
    """Run one history; return the number of restores."""
    sim = Simulation(seed)
    node, errors = sim.process("machine"), []
    machine = None

    def history():
        nonlocal machine
        try:
            machine = BackupMachine(sim, node, seed)
            for _ in range(steps):
                machine.step()
            machine.finish()
        except Exception as error:
            error.add_note(f"seed {seed}: {machine.steps if machine else []}")
            errors.append(error)

    node.spawn(history)
    sim.run()
    sim.close()
    if errors:
        raise errors[0]
    return machine.restores


def main():
    """Run many seeds."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    restores = 0
    for seed in range(options.seed, options.seed + options.seeds):
        restores += run(seed, options.steps)
        print(f"\r{seed - options.seed + 1} histories", end="", file=sys.stderr, flush=True)
    print(f"\n{options.seeds} histories, {restores} restores, 0 failures")


if __name__ == "__main__":
    main()
