"""Loads with `live_wins` against a model: every read, at every LSN, after any fold and merge.

One seed is one history: puts, patches, merges, deletes, range deletes and expired rows of a live
writer; plain loads, and several loads with `live_wins` that are open at once and commit, abort or
are never heard of again; folds in the writer's memory, by another process and by shuffle; merges of
any segments, sweeps, snapshots, cursors and branches in between. After every step the newest state
is compared, and at the end every LSN, every change stream, a rebuild without manifests and a deep
verification.

The model keeps operations by the LSN at which they sort and the one from which they are visible.
`python -m tests.property.live_wins_machine --seeds 500` prints the seed of a history that fails.
"""

import argparse
import datetime
import random
import traceback

import pyarrow as pa

import reef
from reef import stores
from reef.config import BackgroundSettings
from reef.engine.rows.input import to_ops
from reef.formats.wal_object import OpKind
from reef.jobs import BulkJob, fold, ingest, rebuild, verify
from reef.jobs.background import Background
from reef.jobs.ingest.job import sorted_rows, staged_rows
from reef.manifest.edits import NEVER, hold_lsn_of
from tests.support.local_shuffler import LocalShuffler
from tests.support.rebuild import NAME, Mortal, compact_these, head_of, rebuilt, sweep_now

KEYS = "abcde"
SCHEMA = pa.schema([("id", pa.string()), ("x", pa.int64()), ("y", pa.int64())])
PAST = datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)


class Model:
    """Operations by LSN; those of a load with `live_wins` sort at its begin."""

    def __init__(self):
        self.events = []

    def add(self, visible, ops, sorts=None):
        self.events.append((visible if sorts is None else sorts, visible, ops))

    def rows(self, last=None):
        """Return the rows as of an LSN."""
        rows = {}
        for _, visible, ops in sorted(self.events, key=lambda event: event[0]):
            if last is None or visible <= last:
                for op in ops:
                    apply_op(rows, op)
        return {key: row for key, (row, expired) in rows.items() if not expired}


def apply_op(rows, op):
    """Apply one operation to rows, which are kept with whether they have expired."""
    kind, *given = op
    if kind == "put":
        key, x, y, expired = given
        rows[key] = {"id": key, "x": x, "y": y}, expired
    elif kind == "patch":
        key, column, value = given
        if key in rows:
            row, expired = rows[key]
            rows[key] = {**row, column: value}, expired
    elif kind == "add":
        key, column, value = given
        row, expired = rows.get(key, (None, True))
        row = {"id": key, "x": None, "y": None} if expired else row
        rows[key] = {**row, column: (row[column] or 0) + value}, False
    elif kind == "delete":
        rows.pop(given[0], None)
    else:
        for key in [key for key in rows if given[0] <= key < given[1]]:
            del rows[key]


class Machine:
    """One seed."""

    def __init__(self, seed, log=None):
        self.random = random.Random(seed)
        self.log = log or (lambda line: None)
        self.db = reef.Database(Mortal(stores.open("memory://")))
        self.db.create(NAME, SCHEMA)
        self.writer = self.db.writer(NAME, background=False)
        self.reader = self.db.reader(NAME, refresh_interval_ms=1e9)
        self.model, self.jobs, self.snapshots, self.cursors = Model(), [], [], {}
        self.count, self.swept, self.silent = 0, 0, set()

    def number(self):
        self.count += 1
        return self.count

    def play(self):
        names = ["write"] * 8 + ["begin"] * 4 + ["finish"] * 3 + ["fold"] * 3 + ["merge"] * 4
        names += ["fold_memory"] * 2 + ["fold_shuffled", "merge_all", "sweep", "snapshot", "cursor"]
        names += ["load", "reopen", "branch"]
        for _ in range(self.random.randint(8, 30)):
            getattr(self, self.random.choice(names))()
            self.check_newest()
        self.check_all()

    # --- writing ----------------------------------------------------------------------
    def ops(self):
        chosen = []
        for _ in range(self.random.randint(1, 3)):
            kind = self.random.choice(["put", "put", "patch", "patch", "add", "delete", "range"])
            key = self.random.choice(KEYS)
            if kind == "put":
                expired = self.random.random() < 0.15
                chosen.append(("put", key, self.number(), self.number(), expired))
            elif kind in ("patch", "add"):
                chosen.append((kind, key, self.random.choice("xy"), self.number()))
            elif kind == "delete":
                chosen.append(("delete", key))
            else:
                chosen.append(("range", *sorted(self.random.sample("abcdef", 2))))
        return chosen

    def write(self):
        ops = self.ops()
        lsn = self.writer.write(batch_of(ops)).lsn
        self.model.add(lsn, ops)
        self.log(f"LSN {lsn}: {ops}")

    def loaded(self):
        keys = sorted(self.random.sample(KEYS, self.random.randint(1, 4)))
        return [("put", k, self.number(), self.number(), self.random.random() < 0.1) for k in keys]

    def load(self):
        """A plain load, of rows, patches or merges, committed at once."""
        kind = self.random.choice(["put", "patch", "add"])
        if kind == "put":
            ops = self.loaded()
            report = ingest(self.db, NAME, rows_of(ops))
        else:
            keys = sorted(self.random.sample(KEYS, 2))
            ops = [(kind, key, "x", self.number()) for key in keys]
            rows = [{"id": key, "x": value} for _, key, _, value in ops]
            op = "patch" if kind == "patch" else "merge"
            report = ingest(self.db, NAME, rows, op=op, operators={"x": "add"})
        self.model.add(report.lsn, ops)
        self.log(f"LSN {report.lsn}: load {ops}")
        self.writer.refresh()

    def begin(self):
        options = {"segment_bytes": self.size(), "group_bytes": self.size()}
        if self.random.random() < 0.6:  # the others are reaped by the next sweep
            options["lease_ttl_s"] = 1e6
        job = BulkJob(self.db, NAME, live_wins=True, **options)
        ops = self.loaded()
        rows = sorted_rows(staged_rows(to_ops(rows_of(ops), job.schema, kind=OpKind.PUT)))
        staged = job.staging.stage([rows])
        self.jobs.append((job, staged, ops))
        self.log(f"LSN {job.begin_lsn}: begin of {ops}")
        self.writer.refresh()

    def finish(self):
        if not self.jobs:
            return
        job, staged, ops = self.jobs.pop(self.random.randrange(len(self.jobs)))
        if self.random.random() < 0.2:
            job.abort()
            self.log(f"abort of {job.begin_lsn}")
            return self.writer.refresh()
        try:
            lsn = job.commit(staged).lsn
        except reef.ConflictError:
            assert job.id in self.silent, "a job that was heard of is aborted"
            job.abort()
        else:
            self.model.add(lsn, ops, sorts=job.begin_lsn)
            self.log(f"LSN {lsn}: commit of {job.begin_lsn}")
        self.writer.refresh()

    def reopen(self):
        self.writer.close()
        self.writer = self.db.writer(NAME, background=False)
        self.log("a new writer")

    # --- jobs -------------------------------------------------------------------------
    def fold(self, **options):
        report = fold(self.db, NAME, segment_bytes_max=self.size(), group_bytes=60, **options)
        self.log(f"fold up to {report.last_lsn}")
        self.writer.refresh()

    def fold_shuffled(self):
        self.fold(executor=LocalShuffler(), shuffle_bytes_min=0)

    def fold_memory(self):
        settings = BackgroundSettings(
            fold_bytes=1, fold_interval_s=0.0, requests_per_s=0, bytes_per_s=0
        )
        background = Background(self.db, self.writer, settings)
        done = background.step(["fold"])
        self.log(f"fold in memory: {done is not None}")
        self.writer.refresh()

    def size(self):
        return self.random.choice([50, 10_000])

    def merge(self, everything=False):
        ids = {s.id for s in head_of(self.db).segments if everything or self.random.random() < 0.6}
        if ids:
            compact_these(self.db, lambda s: s.id in ids, bytes_each=self.random.choice([50, 9999]))
            self.log(f"merge {len(ids)} into {self.shape()}")
            self.writer.refresh()

    def merge_all(self):
        self.merge(everything=True)

    def sweep(self):
        """Jobs whose lease has expired are reaped."""
        self.silent |= {job.id for job, _, _ in self.jobs if job._settings.lease_ttl_s < 1e6}
        sweep_now(self.db)
        self.swept += 1
        self.log("sweep")
        self.writer.refresh()

    def snapshot(self):
        self.snapshots.append((self.db.snapshot(NAME), self.model.rows()))
        self.log("snapshot")

    def cursor(self):
        name = f"c{self.number()}"
        with self.db.cursor(NAME, name) as cursor:
            self.cursors[name] = cursor.committed, self.model.rows()
        self.log(f"cursor {name} at LSN {self.cursors[name][0]}")

    def branch(self):
        """A branch shows the rows, and continues by itself; the jobs stay with the origin."""
        name = f"branch{self.number()}"
        self.db.branch(NAME, name)
        expected = self.model.rows()
        fold(self.db, name)
        with self.db.writer(name, background=False) as writer:
            assert rows_in(writer) == expected, f"the branch shows {rows_in(writer)}"
            writer.delete("a")
        expected.pop("a", None)
        with self.db.reader(name) as reader:
            assert rows_in(reader) == expected, f"the branch shows {rows_in(reader)}"
        self.db.drop(name)
        self.log("branch")

    # --- checks -----------------------------------------------------------------------
    def check_newest(self):
        expected = self.model.rows()
        self.reader.refresh()
        with self.db.reader(NAME) as fresh:
            for handle, name in ((self.writer, "writer"), (fresh, "new"), (self.reader, "old")):
                self.check(handle, expected, name)
        head = head_of(self.db)
        live = [job.begin_lsn for job, _, _ in self.jobs if job.id not in self.silent]
        folded = [begin for begin in live if begin < head.wal_floor]
        assert hold_lsn_of(head.open_jobs) <= min(folded, default=NEVER)

    def check(self, handle, expected, name):
        found = rows_in(handle)
        assert found == expected, f"{name} shows {found}, not {expected}"
        backwards = [row for _, row in handle.scan(reverse=True)]
        assert backwards == [expected[key] for key in sorted(expected, reverse=True)], name
        assert [handle.get(key) for key in KEYS] == [expected.get(key) for key in KEYS], name
        many = handle.get_many(list(KEYS)).to_pylist()
        assert [row["_found"] for row in many] == [key in expected for key in KEYS], name
        chosen = [row for _, row in handle.scan(where="x > 5")]
        wanted = [expected[k] for k in sorted(expected) if (expected[k]["x"] or 0) > 5]
        assert chosen == wanted, f"{name}: where shows {chosen}, not {wanted}"

    def check_all(self):
        with self.db.reader(NAME) as reader:
            for lsn in range(reader.last_lsn + 1):
                self.check_lsn(reader, lsn)
        for name, (lsn, rows) in self.cursors.items():
            with self.db.cursor(NAME, name) as cursor:
                self.check_changes(cursor, lsn, rows)
        for snapshot, rows in self.snapshots:
            with self.db.reader(NAME, snapshot=snapshot) as reader:
                self.check(reader, rows, "a snapshot")
        problems = verify(self.db, NAME, deep=True).problems
        assert not problems, problems
        report = rebuild(self.db, NAME)
        assert (report.rows_equal, report.problems) == (True, ()), report
        copy, report = rebuilt(self.db)
        assert report.problems == (), report.problems
        with copy.reader(NAME) as reader:
            self.check(reader, self.model.rows(), "a rebuilt namespace")

    def check_lsn(self, reader, lsn):
        try:
            with reader.as_of(lsn=lsn) as view:
                self.check(view, self.model.rows(lsn), f"as of LSN {lsn}")
            self.check_changes(reader.changes(after_lsn=lsn), lsn, self.model.rows(lsn))
        except reef.NotFoundError:
            assert self.swept, f"LSN {lsn} is gone"

    def check_changes(self, changes, lsn, rows):
        rows = dict(rows)
        for change in changes:
            apply_change(rows, change)
        assert rows == self.model.rows(), f"changes after {lsn} lead to {rows}"

    def shape(self):
        return [(s.lsn_min, s.lsn_max, s.rows, s.patches) for s in head_of(self.db).segments]

    def close(self):
        for job, _, _ in self.jobs:
            job.abort()
        self.writer.close()


def rows_in(handle):
    """Return all rows that a handle shows, by key."""
    return {key: row for key, row in handle.scan()}


def rows_of(ops):
    """Return puts as rows."""
    return [
        {"id": k, "x": x, "y": y, "_expires_at": PAST if expired else None}
        for _, k, x, y, expired in ops
    ]


def batch_of(ops):
    """Return operations as a batch."""
    batch = reef.Batch()
    for kind, *given in ops:
        if kind == "put":
            batch.upsert(rows_of([(kind, *given)]))
        elif kind == "patch":
            batch.patch([{"id": given[0], given[1]: given[2]}])
        elif kind == "add":
            batch.merge(given[0], {given[1]: reef.add(given[2])})
        elif kind == "delete":
            batch.delete(given[0])
        else:
            batch.delete_range(*given)
    return batch


def apply_change(rows, change):
    """Apply a change as a consumer does."""
    if change.op == "delete_range":
        end = change.end_key
        for key in [k for k in rows if change.key <= k and (end is None or k < end)]:
            del rows[key]
    elif change.op == "delete":
        rows.pop(change.key, None)
    elif change.op == "put":
        rows[change.key] = change.row
        if change.expires_at is not None:
            rows.pop(change.key)
    elif change.op == "patch":
        if change.key in rows:
            rows[change.key] = rows[change.key] | change.row
    else:
        row = rows.get(change.key, {"id": change.key, "x": None, "y": None})
        sums = {name: (row[name] or 0) + operand.value for name, operand in change.row.items()}
        rows[change.key] = row | sums


def run_seed(seed, log=None):
    """Run one history; AssertionError if a read differs from the model."""
    machine = Machine(seed, log)
    try:
        machine.play()
    finally:
        machine.close()


def main():
    """Run some seeds; stop at the first that fails."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=100)
    given = parser.parse_args()
    for seed in range(given.seed, given.seed + given.seeds):
        try:
            run_seed(seed, print if given.seeds == 1 else None)
        except Exception:
            print(f"seed {seed}")
            traceback.print_exc()
            if given.seeds > 1:
                raise SystemExit(1) from None


if __name__ == "__main__":
    main()
