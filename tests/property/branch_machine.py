"""Namespaces that branch from one another, under everything that changes or deletes objects.

A history is drawn from a seed: writes, loads, folds, compactions, sweeps, purges, snapshots, drops
and branches at the newest state or at a past one. After every step each live namespace has the rows
of its model, whatever the namespaces that it shares objects with have done; after a sweep, also
every snapshot. At the end all branches are compacted into objects of their own, and the sweeps of
all namespaces have removed every pin and every object that is not needed.
"""

import argparse
import random
import sys

import pyarrow as pa

import reef
from reef.engine.handles.database import Database
from reef.jobs import compact, fold, ingest, purge, sweep, verify
from reef.manifest.head import locate
from reef.stores import Wrapper, agree_on_cas
from reef.testing import Simulation

SCHEMA = pa.schema([("id", pa.string()), ("x", pa.int64()), ("y", pa.int64())])
KEYS = [f"k{n:02}" for n in range(12)]
NAMES = ["main", "red", "green", "blue", "grey"]
GRACE_S, DAY_S = 15 * 60.0, 24 * 3600.0
ROUNDS_MAX = 20
"""Each branch of a branch of a branch is released two sweeps after the one above it."""


class Bucket(Wrapper):
    """The simulated bucket with the clock of the process that runs the history."""

    def __init__(self, inner, runtime):
        super().__init__(inner)
        self.runtime = runtime


class BranchMachine:
    """The namespaces of one bucket, and their models."""

    def __init__(self, sim, node, seed):
        self.runtime, self.random = node.runtime, random.Random(seed)
        self.store = Bucket(sim.bucket, node.runtime)
        agree_on_cas(self.store)
        self.db = Database(self.store)
        self.rows, self.dropped, self.snapshots, self.past = {}, {}, [], {}
        self.bases = {}
        """Of each branch: the namespace that it was made of, and its rows then."""
        """Models: of live and dropped namespaces, of snapshots, and of each LSN of a namespace."""
        self.steps = []
        self.create("main")

    # --- steps ------------------------------------------------------------------------
    def create(self, name):
        self.db.create(name, SCHEMA)
        self.bases.pop(name, None)
        self.rows[name], self.past[name] = {}, {}
        self.note(name)

    def write(self, name):
        """A few batches: rows, patches, deletes and range deletes."""
        rows = self.rows[name]
        with self.db.writer(name, background=False) as writer:
            for _ in range(self.random.randint(1, 3)):
                kind, key = self.random.choice(["put", "patch", "delete", "range"]), self.key()
                x = self.random.randrange(100)
                if kind == "put":
                    lsn = writer.upsert([{"id": key, "x": x, "y": 0}]).lsn
                    rows[key] = (x, 0)
                elif kind == "patch":
                    lsn = writer.patch([{"id": key, "y": x}]).lsn
                    if key in rows:
                        rows[key] = (rows[key][0], x)
                elif kind == "delete":
                    lsn = writer.delete(key).lsn
                    rows.pop(key, None)
                else:
                    end = self.key()
                    start, end = min(key, end), max(key, end) + "~"
                    lsn = writer.delete_range(start, end).lsn
                    for one in [k for k in rows if start <= k < end]:
                        del rows[one]
                self.past[name][lsn] = dict(rows)
        self.note(name)

    def load(self, name):
        """A bulk load, which is visible before it is folded."""
        keys = self.random.sample(KEYS, 3)
        x = self.random.randrange(100)
        ingest(self.db, name, [{"id": key, "x": x, "y": 1} for key in keys])
        self.rows[name] |= dict.fromkeys(keys, (x, 1))
        self.note(name)

    def fold(self, name):
        fold(self.db, name)

    def compact(self, name):
        compact(self.db, name, full=self.random.random() < 0.5)

    def sweep(self, name):
        """Condemn and delete, with nothing retained but what is pinned."""
        for _ in range(2):
            sweep(self.db, name, apply=True, force=True, retain_generations_s=0.0)
            self.runtime.sleep(GRACE_S + 10)
        self.past[name] = {}

    def snapshot(self, name):
        pin = self.db.snapshot(name)
        self.snapshots.append((name, pin, dict(self.rows[name])))

    def release(self, _):
        if self.snapshots:
            self.snapshots.pop(self.random.randrange(len(self.snapshots)))[1].release()

    def branch(self, source):
        """Branch the newest state, an LSN, or a snapshot; perhaps over a dropped name."""
        free = [name for name in NAMES if name not in self.rows]
        if not free:
            return
        name, at, model = self.random.choice(free), None, self.rows[source]
        own = [(pin, rows) for of, pin, rows in self.snapshots if of == source]
        kind = self.random.choice(["now", "lsn", "snapshot"])
        if kind == "lsn" and self.past[source]:
            lsn = self.random.choice(sorted(self.past[source]))
            at, model = {"lsn": lsn}, self.past[source][lsn]
        elif kind == "snapshot" and own:
            at, model = self.random.choice(own)
        self.db.branch(source, name, at)
        self.dropped.pop(name, None)
        self.rows[name], self.past[name] = dict(model), {}
        self.bases[name] = (source, dict(model))
        self.note(name)

    def merge(self, child):
        """Merge a branch into its origin, if that is there and was not released."""
        parent, base = self.bases.get(child, (None, None))
        if parent not in self.rows or parent == child:
            return
        theirs, ours = self.rows[child], dict(self.rows[parent])
        for key in {*base, *theirs}:
            if theirs.get(key) != base.get(key):
                ours.pop(key, None)
                ours |= {key: theirs[key]} if key in theirs else {}
        try:
            self.db.merge(child, parent, on_conflict="theirs")
        except reef.NotFoundError:
            return
        self.rows[parent] = ours
        self.note(parent)

    def diff(self, name):
        """Compare two namespaces, or a namespace with its past."""
        other = self.random.choice(sorted(self.rows))
        found = {d.key: (d.a, d.b) for d in self.db.diff(name, other)}
        a, b = self.rows[name], self.rows[other]
        assert found.keys() == {k for k in {*a, *b} if a.get(k) != b.get(k)}, self.steps

    def rollback(self, name):
        """Return to the rows of an LSN that is still retained."""
        if self.past[name]:
            lsn = self.random.choice(sorted(self.past[name]))
            self.db.rollback(name, {"lsn": lsn})
            self.rows[name] = dict(self.past[name][lsn])
            self.note(name)

    def purge(self, name):
        """Erase some keys; pins keep their rows, and nothing else changes."""
        keys = self.random.sample(KEYS, self.random.randint(1, 3))
        wait_s = self.random.choice([0.0, 4 * GRACE_S])
        report = purge(self.db, name, keys, apply=True, wait_s=wait_s)
        self.rows[name] = {k: row for k, row in self.rows[name].items() if k not in keys}
        self.past[name] = {}
        self.note(name)
        pinned = {key for of, _, rows in self.snapshots if of == name for key in rows}
        assert not (report.erased and pinned & set(keys)), self.steps
        if wait_s:
            self.check_pinned(name, report)

    def check_pinned(self, name, report):
        """Every object of the namespace with erased rows is pinned by a snapshot or a branch."""
        own = locate(self.store, name).names.base + "/"
        for one in report.remaining:
            kinds = {pin.kind for pin in one.pins}
            if one.object.startswith(own):
                assert kinds & {"snapshot", "branch"}, f"{one}: {self.steps}"

    def drop(self, name):
        if len(self.rows) > 1:
            for _, pin, _ in [entry for entry in self.snapshots if entry[0] == name]:
                pin.release()
            self.db.drop(name)
            self.dropped[name] = self.rows.pop(name)
            self.snapshots = [entry for entry in self.snapshots if entry[0] != name]

    def undrop(self, _):
        if self.dropped:
            name = self.random.choice(sorted(self.dropped))
            try:
                self.db.undrop(name)
            except reef.ReefError:
                return
            self.rows[name], self.past[name] = self.dropped.pop(name), {}
            self.note(name)

    def clear(self, _):
        """Sweep a dropped namespace a day later: its rows are gone, its pins are released."""
        if self.dropped:
            name = self.random.choice(sorted(self.dropped))
            self.runtime.sleep(DAY_S + 60)
            for _ in range(3):
                sweep(self.db, name, apply=True, force=True, retain_generations_s=0.0)
                self.runtime.sleep(GRACE_S + 10)

    # --- checks -----------------------------------------------------------------------
    def note(self, name):
        """Remember the rows as of the last LSN."""
        with self.db.reader(name, pin=True) as reader:
            self.past[name][reader.last_lsn] = dict(self.rows[name])

    def key(self):
        return self.random.choice(KEYS)

    def read(self, name, **options):
        with self.db.reader(name, **options) as reader:
            return {key: (row["x"], row["y"]) for key, row in reader.scan()}

    def check(self, *, deep=False):
        for name, rows in self.rows.items():
            assert self.read(name) == rows, f"{name}: {self.steps}"
        if deep:
            for name, pin, rows in self.snapshots:
                assert self.read(name, snapshot=pin) == rows, f"{pin}: {self.steps}"
            for name in self.rows:
                problems = verify(self.db, name, deep=True).problems
                assert not problems, f"{name}: {problems} {self.steps}"

    def step(self):
        kinds = ["write"] * 6 + ["branch"] * 3 + ["load", "fold", "compact", "sweep"] * 2
        kinds += ["snapshot", "release", "drop", "undrop", "clear", "merge", "merge", "diff"]
        kinds += ["rollback", "purge", "purge"]
        kind, name = self.random.choice(kinds), self.random.choice(sorted(self.rows))
        self.steps.append((kind, name))
        getattr(self, kind)(name)
        self.check(deep=kind in ("sweep", "clear", "compact", "purge"))

    def finish(self):
        """Make every branch independent: no pin and no foreign object is left."""
        while self.snapshots:
            self.release("")
        self.runtime.sleep(DAY_S + 60)
        for _ in range(ROUNDS_MAX):
            for name in [*sorted(self.rows), *sorted(self.dropped)]:
                if name in self.rows:
                    fold(self.db, name)
                    compact(self.db, name, full=True)
                sweep(self.db, name, apply=True, force=True, retain_generations_s=0.0)
            self.runtime.sleep(GRACE_S + DAY_S)
            if not any(self.shared(name) for name in self.rows):
                break
        self.check(deep=True)
        for name in self.rows:
            assert not self.shared(name), f"{name}: {self.steps}"

    def shared(self, name):
        """Return the pins of a namespace in others, and of others in it."""
        head = locate(self.store, name).found.manifest
        return [*head.pinned_homes, *head.branches.values()]


def run(seed, steps=25):
    """Run one history; raise where a namespace does not have the rows of its model."""
    sim = Simulation(seed)
    node, errors = sim.process("machine"), []

    def history():
        machine = None
        try:
            machine = BranchMachine(sim, node, seed)
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


def main():
    """Run many seeds."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=25)
    options = parser.parse_args()
    for seed in range(options.seed, options.seed + options.seeds):
        run(seed, options.steps)
        print(f"\r{seed - options.seed + 1} histories", end="", file=sys.stderr, flush=True)
    print(f"\n{options.seeds} histories, 0 failures")


if __name__ == "__main__":
    main()
