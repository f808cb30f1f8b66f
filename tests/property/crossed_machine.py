"""The damage machine with more features: streams, columns that are added, renames, folds from
memory, and branches, whose rows are checked against a model of their own.

    python -m tests.property.crossed_machine --seeds 200          seeds 0 to 199
    python -m tests.property.crossed_machine --seed 17 --seeds 1   one of them again, with its steps

Every promise of `tests.property.damage_machine` holds here too. In addition:

    a batch of a stream that is not reported as lost is not applied again
    after the origin was recovered and the branch was repaired, a branch has the rows of its point
    in time and its own, but for those that the repair of the branch reports
"""

import argparse
import sys
from functools import partial

import pyarrow as pa

from reef.config import BackgroundSettings
from reef.engine.rows.batch import encode_batch
from reef.jobs import compact, fold
from reef.jobs.background import Background
from reef.jobs.ingest.append import StreamAppender
from reef.manifest.head import locate
from reef.manifest.roots import UNKNOWN_GENERATION
from reef.paths import Namespace, number_of
from tests.property import damage_machine as plain
from tests.property.damage_machine import NAME, Event, History, Loss, batch_of

AWAY = "elsewhere"
COLUMN = "z"


class CrossedMachine(plain.Machine):
    """A history with more kinds of steps."""

    def __init__(self, seed, log=None, world=None, merges=True):
        super().__init__(seed, log, world, merges)
        self.streams = {}
        """By stream: the batches that were committed, by number."""
        self.branches = {}
        """By name: the history of each branch."""

    def steps(self):
        more = ["stream"] * 4 + ["stream_again", "grow", "rename", "branch", "branch"]
        return super().steps() + more + ["memory_fold"] * 3 + ["branch_write"] * 2 + ["branch_job"]

    def stream(self):
        name = self.random.choice(["s1", "s2"])
        batches = self.streams.setdefault(name, {})
        number, ops = len(batches) + 1, self.ops()
        self.append(name, number, ops)

    def append(self, name, number, ops):
        appender = StreamAppender(self.db, NAME)
        encoded = [encoded_ops(ops, appender)]
        receipt = self.world.run(lambda: appender.append(name, number, encoded))
        assert not receipt.replayed
        self.streams[name][number] = (ops, receipt.lsn)
        self.history.events.append(Event(receipt.lsn, ops))
        self.log(f"LSN {receipt.lsn}: {ops} of stream {name}, batch {number}")
        self.writer.refresh()

    def stream_again(self):
        """A batch that was committed before, with other rows."""
        for name, batches in self.streams.items():
            appender = StreamAppender(self.db, NAME)
            ops = [encoded_ops(self.ops(), appender)]
            number = self.random.choice(list(batches))
            assert self.world.run(partial(appender.append, name, number, ops)).replayed

    def grow(self):
        self.db.alter(NAME, plain.SCHEMA.append(pa.field(COLUMN, pa.int64())))
        self.log("another column")
        self.writer.refresh()

    def rename(self):
        self.writer.close()
        self.db.rename(NAME, AWAY)
        self.db.rename(AWAY, NAME)
        self.writer = self.db.writer(NAME, background=False)
        self.log("renamed, and renamed back")

    def memory_fold(self):
        worker = Background(self.db, self.writer, BackgroundSettings())
        report = self.world.run(worker._fold_memory)
        self.log(f"fold from memory: {report and report.last_lsn}")

    def branch(self):
        if len(self.branches) == 3:
            return
        name = f"branch{len(self.branches)}"
        self.world.run(lambda: self.db.branch(NAME, name))
        self.branches[name] = History(list(self.history.events))
        self.log(f"branch {name}")

    def branch_write(self):
        if self.branches:
            name = self.random.choice(list(self.branches))
            ops = self.ops()
            with self.db.writer(name, background=False) as writer:
                lsn = writer.write(batch_of(ops)).lsn
            self.branches[name].events.append(Event(lsn, ops))
            self.log(f"LSN {lsn} of {name}: {ops}")

    def branch_job(self):
        if self.branches:
            name, job = self.random.choice(list(self.branches)), self.random.choice([fold, compact])
            self.world.run(partial(job, self.db, name, **({} if job is fold else {"full": True})))
            self.log(f"{job.__name__} {name}")

    def play(self, steps=None):
        super().play(steps)
        for name, history in self.branches.items():
            with self.db.writer(name, background=False) as writer:
                for _ in range(plain.CANARIES):
                    ops = [("put", "f", self.number(), 0)]
                    history.events.append(Event(writer.write(batch_of(ops)).lsn, ops))

    def targets(self):
        """Objects of a branch, now and then."""
        if not self.branches or self.random.random() < 0.7:
            return super().targets()
        name = self.random.choice(list(self.branches))
        folder = self.random.choice(["wal", "segments", "manifest"])
        keys = [info.key for info in self.store.list(f"namespaces/{name}/{folder}/")]
        if folder == "wal":
            end = self.branches[name].events[-plain.CANARIES].lsn
            keys = [key for key in keys if number_of(key) < end]
        if folder == "manifest" and len(keys) < 2:
            return []
        return [key for key in keys if key not in {damaged for damaged, _ in self.damaged}]


class CrossedRecovery(plain.Recovery):
    """The checks of streams and branches behind a recovery."""

    def continues(self):
        self.check_streams()
        self.check_branches()
        super().continues()

    def check_streams(self):
        """Send the last batch of each stream again."""
        known = {number_of(info.key) for info in self.store.list(plain.ROWS.wal)}
        for stream, batches in getattr(self.machine, "streams", {}).items():
            _, lsn = batches[max(batches)]
            if lsn in self.loss.lsns or (self.is_rebuilt and lsn in {*self._broken()}):
                continue
            if lsn not in known and (self.is_rebuilt or self.is_derived()):
                continue  # a batch that was deleted and is folded: not derivable
            appender = StreamAppender(self.db, NAME)
            ops = [encoded_ops([("put", "a", -5, -5)], appender)]
            again = self.world.run(partial(appender.append, stream, max(batches), ops))
            assert again.replayed, f"batch {max(batches)} of {stream}, LSN {lsn}, again"
        self.check("after batches of streams")

    is_rebuilt = False

    def is_derived(self):
        """Whether a repair has derived segments and floor as a rebuild does."""
        return any("derive segments" in action for r in self.reports for action in actions_of(r))

    def rebuilt(self):
        self.is_rebuilt = True
        return super().rebuilt()

    def check_branches(self):
        """Repair each branch, and compare it with its own history."""
        for name, history in getattr(self.machine, "branches", {}).items():
            own = BranchRecovery(self, name, history)
            try:
                own.recover()
            finally:
                self.reports += own.reports


class BranchRecovery(plain.Recovery):
    """The repair of one branch, in the bucket of another recovery."""

    def __init__(self, origin, name, history):
        self.machine, self.history, self.name = origin.machine, history, name
        self.world, self.db, self.store = origin.world, origin.db, origin.store
        self.loss, self.reports = Loss(), []
        self.names = Namespace(name)

    def recover(self):
        """Repair; half of the branches of an origin that was only repaired are rebuilt instead."""
        pins = locate(self.store, NAME).found.manifest.branches.values()
        has_pin = any(
            p.root == self.names.root and p.generation != UNKNOWN_GENERATION for p in pins
        )
        is_chosen = has_pin and (self.machine.seed + len(self.history.events)) % 2 == 1
        if is_chosen or self._has_no_manifest():
            if not has_pin:
                return  # only its own folder is left
            for info in self.store.list(self.names.manifests):
                self.store.delete(info.key)
            self._rebuild()
        self._repair()
        self.check(f"branch {self.name}")


def actions_of(report):
    """Return what a repair did; a rebuild lists nothing."""
    return getattr(report, "actions", ())


def encoded_ops(ops, appender):
    """Return operations as a batch of a stream has them."""
    return encode_batch(batch_of(ops), appender.schema, 1 << 20).ops


def run_seed(seed, log=None, variants=plain.VARIANTS):
    """Play one seed, and recover it in every way; raise on a wrong result."""
    plain.run_seed(seed, log, variants, True, machine=CrossedMachine, recovery=CrossedRecovery)


def main():
    """Run seeds; print each failure with its seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--failures", type=int, default=10, help="stop after so many")
    parser.add_argument("--variant", choices=plain.VARIANTS)
    arguments = parser.parse_args()
    variants = [arguments.variant] if arguments.variant else plain.VARIANTS
    return plain.run_seeds(arguments, lambda seed, log: run_seed(seed, log, variants))


if __name__ == "__main__":
    sys.exit(main())
