"""One namespace under everything that its public API offers, compared with a model.

A history is a list of steps, drawn from a seed as plain data; each can be run in any state, so
that a history which fails can be shortened step by step. After each step the newest rows, some
past ones, all snapshots and the structure are checked; after a sweep, a drop or a creation, and
at the end, every LSN, generation and time is read. At last the manifests are lost, and a rebuild
has to show the same rows, under the name of their folder.
"""

from contextlib import contextmanager, suppress

import pyarrow as pa

import reef
from reef.engine.handles.database import Database
from reef.engine.rows.input import to_ops
from reef.formats.wal_object import OpKind
from reef.jobs import BulkJob, compact, fold, ingest, rebuild, sweep, verify
from reef.jobs.ingest.job import sorted_rows, staged_rows
from reef.stores import Wrapper, agree_on_cas
from reef.stores.memory import MemoryStore
from reef.testing import Simulation
from tests.lives.model import Kept, Life, apply_change, ordered
from tests.support.compaction import SMALL

NAMES = ["events", "orders", "users"]
SCHEMA = pa.schema([("id", pa.string()), ("x", pa.int64()), ("y", pa.int64())])
WIDE = SCHEMA.append(pa.field("z", pa.int64()))
KEYS = ["a", "b", "c", "d", "e"]
WHERES = {
    "less": ("x < 5", lambda row: is_less(row["x"], 5)),
    "or": ("x < 3 or y >= 50", lambda row: is_less(row["x"], 3) or is_less(49, row["y"])),
    "not": (
        "not (x < 8 and y is null)",
        lambda row: row["y"] is not None or (row["x"] is not None and row["x"] >= 8),
    ),
    "key": ("id > 'b' and not x = 1", lambda row: row["id"] > "b" and row["x"] not in (None, 1)),
}
"""Filters by name: as text, and as a function of a row."""
GRACE_S = 15 * 60.0
DAY_S = 24 * 3600.0


class Bucket(Wrapper):
    """The simulated bucket with the clock of the process that runs the history."""

    def __init__(self, inner, runtime):
        super().__init__(inner)
        self.runtime = runtime


class Machine:
    """The namespace, and its model."""

    def __init__(self, sim, node):
        self.sim, self.runtime = sim, node.runtime
        self.store = Bucket(sim.bucket, node.runtime)
        agree_on_cas(self.store)
        self.db = Database(self.store)
        self.name = NAMES[0]
        """The current name; objects stay in the folder of the first one."""
        self.schema = SCHEMA
        self.life = Life(1, SCHEMA.names[1:])
        self.past = []
        """Lives that are over."""
        self.writer = None
        self.parallel = 1
        self.reader = None
        """A reader that follows the name through its lives, opened now and then."""
        self.zombies = []
        """Writers of the past, with the number of their life."""
        self.receipts = []
        self.pins = []
        self.jobs = []
        self.serial = 0
        self.db.create(self.name, SCHEMA)
        self.note_end()

    # --- steps: rows ------------------------------------------------------------------
    def put(self, key, x, y):
        self.write(lambda w: w.upsert([{"id": key, "x": x, "y": y}]),
                   self.life.upsert([{"id": key, "x": x, "y": y}]))  # fmt: skip

    def upsert(self, keys, x):
        rows = [{"id": key, "x": x} for key in keys]
        self.write(lambda w: w.upsert(rows), self.life.upsert(rows))

    def patch(self, key, column, value):
        rows = [{"id": key, column: value}]
        self.write(lambda w: w.patch(rows), self.life.patch(rows))

    def delete(self, key):
        self.write(lambda w: w.delete(key), self.life.without_keys([key]))

    def delete_range(self, start, end):
        self.write(lambda w: w.delete_range(start, end), self.life.without(start, end))

    def put_keyed(self, key):
        """The same idempotency key again is replayed, in its life; in another it is new."""
        rows, name = [{"id": key, "x": 1}], f"put {key}"
        receipt = self.opened().upsert(rows, idempotency_key=name)
        known = self.life.keys.get(name)
        check(receipt.replayed == (known is not None), f"key {name} replayed={receipt.replayed}")
        if known is None:
            self.life.keys[name] = receipt.lsn
            self.life.commit(receipt.lsn, self.life.upsert(rows))
        else:
            check(receipt.lsn == known, f"key {name} was at LSN {known}, now {receipt.lsn}")

    def transact(self, key, other, x, meets):
        """Read one key, write another; a write to a row that was read is a conflict."""
        writer, before = self.opened(), self.life.rows
        try:
            with writer.transaction() as tx:
                check(tx.get(key) == before.get(key), f"a transaction read {tx.get(key)}")
                tx.upsert([{"id": other, "x": x}])
                if meets:
                    self.put(key, x, x)
        except reef.ConflictError:
            check(meets, "a conflict without another write")
            return
        check(not meets, "committed over a write to a row that was read")
        self.life.commit(tx.receipt.lsn, self.life.upsert([{"id": other, "x": x}]))

    def update_where(self, column, value, where):
        """Rows that match at the time of the statement are changed, no other ones."""
        text, holds = WHERES[where]
        rows = [{"id": key, column: value} for key, row in self.life.rows.items() if holds(row)]
        self._change_where(lambda w: w.update_where({column: value}, text), rows, self.life.patch)

    def delete_where(self, where):
        text, holds = WHERES[where]
        gone = [key for key, row in self.life.rows.items() if holds(row)]
        self._change_where(lambda w: w.delete_where(text), gone, self.life.without_keys)

    def _change_where(self, call, changed, result):
        receipt = call(self.opened())
        check(receipt.ops == len(changed), f"{receipt.ops} rows, not {len(changed)}, matched")
        if changed:
            self.receipts.append((receipt, self.life.number))
            self.life.commit(receipt.lsn, result(changed))

    def write(self, call, rows):
        receipt = call(self.opened())
        self.receipts.append((receipt, self.life.number))
        self.life.commit(receipt.lsn, rows)

    # --- steps: loads -----------------------------------------------------------------
    def load(self, keys, x, replace, name, op, again=False):
        """A key names one load: the same one is replayed, another one is refused."""
        if again and name in self.life.loads:
            keys, x, replace, op = self.life.loads[name][1]
        rows, body = [{"id": key, "x": x} for key in keys], (keys, x, replace, op)
        known, first = self.life.loads.get(name, (None, body))
        try:
            report = ingest(self.db, self.name, rows, replace=replace, idempotency_key=name, op=op)
        except reef.InvalidInputError:
            check(first != body, f"load {name} was refused")
            return
        check(report.replayed == (known is not None), f"load {name} replayed={report.replayed}")
        if known is None:
            if name is not None:
                self.life.loads[name] = report.lsn, body
            self.life.commit(report.lsn, self._loaded(rows, replace, op))
        else:
            check(first == body, f"load {name} was replayed with other rows")
            check(report.lsn == known, f"load {name} was at LSN {known}, now {report.lsn}")

    def _loaded(self, rows, replace, op):
        if replace:
            self.life.replaces()
            return Life(0, self.life.columns).upsert(rows) if op == "put" else {}
        return self.life.upsert(rows) if op == "put" else self.life.patch(rows)

    def begin_backfill(self, keys, x):
        """Begin a bulk job whose rows sort here."""
        self.begin_job(keys, x, live_wins=True)

    def begin_job(self, keys, x, live_wins=False):
        """Begin a bulk job and stage its rows; another step ends it."""
        rows = [{"id": key, "x": x} for key in keys]
        job = BulkJob(self.db, self.name, live_wins=live_wins)
        ops = to_ops(rows, job.schema, kind=OpKind.PUT)
        staged = job.staging.stage([sorted_rows(staged_rows(ops))])
        self.jobs.append((job, staged, rows, self.life.number))

    def end_job(self, commits):
        """A job commits in the life in which it began, and in no other."""
        if not self.jobs:
            return
        job, staged, rows, life = self.jobs.pop(0)
        try:
            receipt = job.commit(staged) if commits else job.abort()
        except reef.ReefError:
            with suppress(reef.ReefError):
                job.abort()
            return
        if commits:
            check(life == self.life.number, f"a job of life {life} committed in another")
            check(not self.is_dropped, "a job committed in a dropped namespace")
            if not job.live_wins:
                self.life.commit(receipt.lsn, self.life.upsert(rows))
                return
            rows = self.life.backfill(rows, job.begin_lsn)
            self.life.late.add(receipt.lsn)
            self.life.commit(receipt.lsn, rows, sorts=job.begin_lsn)

    # --- steps: jobs, time ------------------------------------------------------------
    def fold(self):
        fold(self.db, self.name, segment_bytes_max=150, group_bytes=60)

    def compact(self, strategy, full):
        if full:
            compact(self.db, self.name, full=True, **SMALL)
        else:
            compact(self.db, self.name, strategy=strategy, **SMALL)

    def sweep(self, wait_s, retained_s):
        """Let time pass, and collect; twice, since keys are condemned first."""
        self.runtime.sleep(wait_s)
        for _ in range(2):
            self.runtime.sleep(GRACE_S + 10.0)
            self._note_sweep(retained_s)
            with suppress(reef.NotFoundError):
                sweep(self.db, self.name, apply=True, force=True, retain_generations_s=retained_s)
        self.check_history()

    def _note_sweep(self, retained_s):
        now_s = self.runtime.wall_s()
        self.life.swept(now_s, retained_s)
        if self.is_dropped and now_s - self.life.dropped_s >= DAY_S:
            self.life.purged = True

    def sleep(self, seconds):
        self.runtime.sleep(seconds)

    # --- steps: snapshots, cursors, handles -------------------------------------------
    def snapshot(self, name):
        """Keep the rows as they are now; a name that is in use stays where it is."""
        if name in self.life.snapshots:
            return
        handle = self.db.snapshot(self.name, name=f"{name}-{self.life.number}")
        self.life.snapshots[name] = Kept(handle, self.life.rows, self.life.number)

    def release(self, name):
        """Release a snapshot of this life, or of an earlier one."""
        for life in (self.life, *self.past):
            kept = life.snapshots.pop(name, None)
            if kept is not None:
                kept.handle.release()
                return

    def pin(self):
        self.pins.append(
            Kept(self.db.reader(self.name, pin=True), self.life.rows, self.life.number)
        )
        if len(self.pins) > 2:
            self.pins.pop(0).handle.close()

    def cursor(self, name, commits):
        """Read by a registered cursor from where it was last committed."""
        known = self.life.cursors.get(name)
        with self.db.cursor(
            self.name, name, after_lsn=None if known is not None else self._some()
        ) as c:
            check(known is None or c.committed == known, f"{name} is at {c.committed}, not {known}")
            start = c.committed
            rows = dict(self.life.at(start))
            self._follow(c, start, rows)
            self.life.cursors[name] = start
            if commits:
                self.life.cursors[name] = c.commit()

    def _some(self):
        """Return an LSN for a new cursor: one that is surely kept."""
        return self.life.ends[-1][1]

    def reopen(self, parallel):
        self.close_writer()
        self.parallel = parallel
        self.opened()

    def close(self):
        """Close the writer cleanly: it releases its role."""
        if self.writer is not None:
            self.writer.close()
            self.close_writer()

    def follow(self):
        """Open a reader that is kept, whatever becomes of the name."""
        self.reader = self.db.reader(self.name, refresh_interval_ms=1e9)

    def zombie_put(self, key):
        """A writer that another one has followed acknowledges nothing."""
        if not self.zombies:
            return
        writer = self.zombies[-1]
        try:
            writer.upsert([{"id": key, "x": -1}])
        except reef.ReefError:
            return
        raise AssertionError("a writer of the past has acknowledged a write")

    # --- steps: lives -----------------------------------------------------------------
    def drop(self):
        self.close_writer()
        self.db.drop(self.name)
        self.life.dropped_s = self.runtime.wall_s()
        check(self.db.namespaces() == [], "a dropped namespace is listed")
        with raises(reef.NotFoundError, "a dropped namespace was opened"):
            self.db.reader(self.name).get("a")

    def undrop(self):
        """It is as it was, as long as no sweep has taken it."""
        try:
            self.db.undrop(self.name)
        except reef.NotFoundError:
            check(self.life.purged, "a namespace that no sweep has taken cannot be undropped")
            return
        self.life.dropped_s = None
        self.check_history()

    def create(self, wide):
        """In the place of a dropped one: nothing of that is left, not even its columns."""
        if not self.is_dropped:
            self.db.create(self.name, self.schema)
            return
        self.past.append(self.life)
        self.schema = WIDE if wide else SCHEMA
        self.db.create(self.name, self.schema)
        self.life = Life(self.life.number + 1, self.schema.names[1:])
        self.note_end()
        self.check_history()

    def rename(self, to):
        """The rows move to another name, as they are; the former one leads nowhere else."""
        if to == self.name:
            return
        self.close_writer()
        former, self.name = self.name, to
        self.db.rename(former, to)
        with raises(reef.NotFoundError, f"{former} was opened after its rename"):
            self.db.reader(former).get("a")
        check(self.db.namespaces() == [to], f"{self.db.namespaces()} after a rename to {to}")
        self.check_history()

    @property
    def is_dropped(self):
        return self.life.dropped_s is not None

    def opened(self):
        """Return the writer, opened if there is none."""
        if self.writer is None:
            self.writer = self.db.writer(
                self.name, background=False, lease_ttl_s=60.0, max_parallel_writes=self.parallel
            )
        return self.writer

    def close_writer(self):
        if self.writer is not None:
            self.zombies.append(self.writer)
            self.writer = None

    # --- what must hold ---------------------------------------------------------------
    def check_now(self, picks):
        """Check the newest state, and a few past ones."""
        problems = [
            str(problem)[:200] for problem in verify(self.db, self.name, deep=True).problems
        ]
        check(not problems, f"verify: {problems}")
        self.note_end()
        self.life.mark(self._quiet(), self.life.ends[-1][1])
        self._check_newest()
        self._check_kept()
        last = self.life.ends[-1][1]
        with self.db.reader(self.name) as reader:
            for pick in picks:
                self._check_lsn(reader, pick % (last + 1))
                self._check_time(reader, self.life.marks[pick % len(self.life.marks)])

    def check_history(self):
        """Check every LSN, generation and time of this life."""
        if self.is_dropped:
            return
        self.note_end()
        last = self.life.ends[-1][1]
        with self.db.reader(self.name) as reader:
            for lsn in range(last + 1):
                self._check_lsn(reader, lsn)
            for generation in range(1, self.db.info(self.name).generation + 1):
                self._check_generation(reader, generation)
            for mark in self.life.marks:
                self._check_time(reader, mark)
            for lsn in range(0, last + 1, 3):
                self._check_changes(reader, lsn)
        self._check_kept()

    def note_end(self):
        with self.db.reader(self.name) as reader:
            self.life.ends.append((self.runtime.wall_s(), reader.last_lsn))

    def _quiet(self):
        """Let a while pass before and after a time at which nothing is written."""
        self.runtime.sleep(5.0)
        now_s = self.runtime.wall_s()
        self.runtime.sleep(5.0)
        return now_s

    def _check_newest(self):
        rows = self.life.rows
        with self.db.reader(self.name) as reader:
            show(reader, rows, "a new reader")
            found = reader.get_many(KEYS)
            check(found["_found"].to_pylist() == [k in rows for k in KEYS], "get_many")
            for text, holds in WHERES.values():
                self._check_where(reader, text, [row for row in ordered(rows) if holds(row)])
        if self.writer is not None:
            self.writer.refresh()
            show(self.writer, rows, "the writer")
            check([self.writer.get(k) for k in KEYS] == [rows.get(k) for k in KEYS], "get")
        if self.reader is not None:
            self._check_follower()
        for receipt, life in self.receipts[-3:]:
            self._check_resolved(receipt, life)
        info, stats = self.db.info(self.name), self.db.stats(self.name)
        check(stats.generation == info.generation, "info and stats differ")
        names = {f"{name}-{self.life.number}" for name in self.life.snapshots}
        check(names <= set(stats.snapshots), f"snapshots in stats: {stats.snapshots}")
        check(self.db.namespaces() == [self.name], "the namespace is not listed")

    def _check_where(self, reader, text, expected):
        found = [row for _, row in reader.scan(where=text)]
        check(found == expected, f"where {text} shows {brief(found)}, not {brief(expected)}")
        check(reader.count(where=text) == len(expected), f"count where {text}")

    def _check_follower(self):
        """A reader of an earlier life moves to this one as a whole, or says that it is over."""
        try:
            self.reader.refresh()
            show(self.reader, self.life.rows, "a reader that was opened before")
        except reef.NotFoundError:
            self.reader = None

    def _check_resolved(self, receipt, life):
        """A receipt is committed in its own life; another one cannot say so."""
        if self.writer is None:
            return
        try:
            outcome = self.writer.resolve(receipt)
        except reef.ReefError:
            outcome = "unknown"
        allowed = {"committed", "unknown"} if life == self.life.number else {"unknown"}
        check(outcome in allowed, f"LSN {receipt.lsn} of life {life} is resolved as {outcome}")

    def _check_kept(self):
        """Snapshots of earlier lives are read in their own life, until they are released."""
        lives = [*self.past, self.life]
        kept = {f"{n}-{life.number}": k for life in lives for n, k in life.snapshots.items()}
        names = sorted(snapshot.name for snapshot in self.db.snapshots(self.name))
        check(names == sorted(kept), f"snapshots {names}, not {sorted(kept)}")
        check(self.db.cursors(self.name) == dict(sorted(self.life.cursors.items())), "cursors")
        for name, snapshot in kept.items():
            with self.db.reader(self.name, snapshot=snapshot.handle) as reader:
                show(reader, snapshot.rows, f"snapshot {name}")
        for kept in self.pins:
            self._check_pin(kept)

    def _check_pin(self, kept):
        try:
            show(kept.handle, kept.rows, "a pinned reader")
        except reef.NotFoundError:
            check(kept.life != self.life.number, "a pinned reader has lost its rows")

    def _check_lsn(self, reader, lsn):
        with self._unless_collected(lsn), reader.as_of(lsn=lsn) as view:
            show(view, self.life.at(lsn), f"as of LSN {lsn}")

    def _check_generation(self, reader, generation):
        """A generation shows the state at the LSN that its reader names."""
        try:
            with reader.as_of(generation=generation) as view:
                lsn = view.last_lsn
                show(view, self.life.at(lsn), f"as of generation {generation}, LSN {lsn}")
        except reef.NotFoundError as error:
            check(self.life.is_swept or self.past, f"generation {generation}: {error}")

    def _check_time(self, reader, mark):
        with self._unless_collected(mark.end), reader.as_of(time=mark.time) as view:
            show(view, mark.rows, f"as of {mark.time:%H:%M:%S}, at LSN {mark.end},")

    def _check_changes(self, reader, lsn):
        """The rows at an LSN and the changes since are the rows now."""
        rows = dict(self.life.at(lsn))
        with self._unless_collected(lsn):
            self._follow(reader.changes(after_lsn=lsn), lsn, rows)

    def _follow(self, changes, lsn, rows):
        seen = set()
        for change in changes:
            seen.add(change.lsn)
            apply_change(rows, change)
        found = sorted(seen)
        expected = [n for n in self.life.after(lsn) if n in seen or n not in self.life.late]
        check(found == expected, f"changes after {lsn} are at LSNs {found}, not {expected}")
        check(rows == self.life.rows, f"changes after {lsn} lead to {ordered(rows)}")

    @contextmanager
    def _unless_collected(self, lsn):
        """A read of the past may fail where a sweep may have collected it."""
        try:
            yield
        except reef.NotFoundError as error:
            first = self.life.states[0].lsn if self.life.states else lsn + 1
            check(lsn < max(self.life.collectable, first), f"LSN {lsn} is gone: {error}")

    def finish(self):
        """Read all of it once more; then lose the manifests, and rebuild."""
        for job, *_ in self.jobs:
            with suppress(reef.ReefError):
                job.abort()
        if self.is_dropped:
            return
        self.check_history()
        copy = MemoryStore("memory://copy", runtime=self.runtime)
        for info in self.store.list():
            if "/manifest/" not in info.key and "/leases/" not in info.key:
                copy.put(info.key, self.store.get(info.key))
        self._check_rebuilt(Database(copy), NAMES[0])

    def _check_rebuilt(self, db, name):
        try:
            report = rebuild(db, name, apply=True)
        except reef.NotFoundError as error:
            check(not self.life.states, f"rebuild: {error}")
            return
        check(report.problems == (), f"rebuild: {report.problems}")
        with db.reader(name) as reader:
            show(reader, self.life.rows, "rebuilt without manifests")
        with db.writer(name, background=False) as writer:
            writer.upsert([{"id": "z", "x": 1}])
            show(writer, self.life.upsert([{"id": "z", "x": 1}]), "rebuilt, and written to")


def show(handle, rows, what):
    """Compare all rows that a handle shows, and those of a point read."""
    found = [row for _, row in handle.scan()]
    check(found == ordered(rows), f"{what} shows {brief(found)}, not {brief(ordered(rows))}")
    for key in ("a", "c"):
        check(handle.get(key) == rows.get(key), f"{what}: get({key}) is {handle.get(key)}")


def is_less(value, than):
    """Compare as SQL does: null is neither less nor more."""
    return value is not None and than is not None and value < than


def brief(rows):
    """Return rows as a line that can be read."""
    return " ".join(f"{r['id']}={r['x']},{r['y']}" for r in rows).replace("None", "-") or "nothing"


def check(holds, message):
    """Raise AssertionError with a message that names the difference."""
    if not holds:
        raise AssertionError(message)


@contextmanager
def raises(kind, message):
    """Expect an error."""
    try:
        yield
    except kind:
        return
    raise AssertionError(message)


def run(steps):
    """Run a history; return the machine, or raise the error of its first wrong step."""
    sim = Simulation(0, switch_at=frozenset())
    node, machines, failed = sim.process("history"), [], []

    def go():
        machine = Machine(sim, node)
        machines.append(machine)
        for number, step in enumerate(steps):
            try:
                step.run(machine)
                if not machine.is_dropped:
                    machine.check_now(step.picks)
            except Exception as error:
                failed.append((number, error))
                return
        try:
            machine.finish()
        except Exception as error:
            failed.append((len(steps), error))

    node.spawn(go)
    try:
        sim.run()
    finally:
        sim.close()
    if failed:
        raise HistoryFailed(steps, *failed[0]) from failed[0][1]
    return machines[0]


class HistoryFailed(AssertionError):
    """A history in which the engine and the model differ; short enough to be read."""

    def __init__(self, steps, number, cause, seed=None):
        self.steps, self.number, self.cause, self.seed = steps, number, cause, seed
        lines = [f"  {place + 1:>3}  {step}" for place, step in enumerate(steps[: number + 1])]
        where = f"step {number + 1}" if number < len(steps) else "the end"
        super().__init__(
            f"seed {seed}, at {where}: {type(cause).__name__}: {cause}\n" + "\n".join(lines)
        )
