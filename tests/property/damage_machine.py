"""A random history, one to three damaged or lost objects, then repair and rebuild against a model.

    python -m tests.property.damage_machine --seeds 2000          seeds 0 to 1999
    python -m tests.property.damage_machine --seed 17 --seeds 1   one of them again, with its steps
    python -m tests.property.damage_machine --merges              with merges among the operations
    python -m tests.property.damage_machine --live-wins           with such loads
    python -m tests.property.damage_machine --lives               with drops and re-creations

The history uses the public API only: puts, patches, deletes and range deletes in batches, with and
without idempotency keys, bulk loads of rows and of patches, loads that replace everything, folds,
compactions of any segments, sweeps, snapshots, and writers that open again. Then objects of the
log, segments and manifests are flipped, truncated, emptied, deleted or swapped, with `--lives` of
any life. From there every
variant of recovery (`VARIANTS`) starts from a copy of the bucket, and must keep two promises:

    where the report says that nothing is lost, rows are those of the model
    where it says that something is lost, nothing else differs

Afterwards the namespace stays usable: writes, a fold, a full compaction and a sweep must not change
a row, and a retry of a keyed batch that is not reported as lost must be replayed.

All ids, clocks and choices come from the seed, so that a seed always gives the same history.
"""

import argparse
import random
import re
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field

import pyarrow as pa

import reef
from reef.engine.rows.input import to_ops
from reef.errors import InvalidInputError
from reef.formats.wal_object import OpKind, WalObject
from reef.jobs import BulkJob, compact, fold, ingest, rebuild, repair, sweep, verify
from reef.jobs.ingest.job import sorted_rows, staged_rows
from reef.manifest.head import HeadFinder, newest_incarnation
from reef.paths import Namespace, number_of
from reef.testing import Simulation
from tests.support.rebuild import compact_these
from tests.support.sweep_world import World

NAME = "rows"
ROWS = Namespace(NAME)
KEYS = "abcdef"
SCHEMA = pa.schema([("id", pa.string()), ("x", pa.int64()), ("y", pa.int64())])
HOUR_S = 3600.0
CANARIES = 2
"""Objects at the end of the log that are never damaged: a log that is cut short shows nothing."""


# --- the model --------------------------------------------------------------------------


@dataclass
class Event:
    """The operations of one LSN."""

    lsn: int
    ops: list
    key: str | None = None
    is_load: bool = False
    sorts: int = 0
    """Where its operations sort, if not at its LSN: those of a load with `live_wins`."""

    def touches(self, low="", high=None):
        """Return the keys in [low, high) that it may change."""
        found = set()
        for kind, *given in self.ops:
            if kind in ("put", "patch", "delete", "add"):
                found.add(given[0])
            elif kind == "range":
                found |= {key for key in KEYS if given[0] <= key < given[1]}
            else:
                found |= set(KEYS)
        return {key for key in found if low <= key and (high is None or key < high)}


def apply_op(rows, op):
    """Apply one operation to the model."""
    kind, *given = op
    if kind == "put":
        key, x, y = given
        rows[key] = {"id": key, "x": x, "y": y}
    elif kind == "patch":
        key, column, value = given
        if key in rows:
            rows[key] = {**rows[key], column: value}
    elif kind == "add":
        key, column, value = given
        row = rows.get(key, {"id": key, "x": None, "y": None})
        rows[key] = {**row, column: (row[column] or 0) + value}
    elif kind == "delete":
        rows.pop(given[0], None)
    elif kind == "range":
        for key in [key for key in rows if given[0] <= key < given[1]]:
            del rows[key]
    else:
        rows.clear()


@dataclass
class Loss:
    """What reports have named as lost, in terms of the model."""

    lsns: set = field(default_factory=set)
    """Gone as if they had never been."""
    batches: set = field(default_factory=set)
    """By idempotency key: the same, where others of the same object are still there."""
    keys: set = field(default_factory=set)
    """May show anything."""
    skipped: set = field(default_factory=set)
    """LSNs that views of the past pass over."""
    idempotency_keys: set = field(default_factory=set)


@dataclass
class History:
    """All that was acknowledged."""

    events: list[Event] = field(default_factory=list)

    def rows(self, without=(), last=None, batches=()):
        """Return the rows after all events but some, up to an LSN."""
        rows = {}
        for event in sorted(self.events, key=lambda event: event.sorts or event.lsn):
            lost = event.lsn in without or (event.key is not None and event.key in batches)
            if not lost and (last is None or event.lsn <= last):
                for op in event.ops:
                    apply_op(rows, op)
        return rows

    def touched(self, first, end, low="", high=None):
        """Return the keys that may differ if LSNs [first, end) of keys [low, high) are lost."""
        found = set()
        for event in self.events:
            if first <= event.lsn < end:
                found |= event.touches(low, high)
        return found


# --- the history ------------------------------------------------------------------------


class Machine:
    """One seed: a history, then damage."""

    def __init__(self, seed, log=None, world=None, merges=False, live_wins=False, *, lives=False):
        self.random = random.Random(seed)
        self.merges = merges
        """Whether operations are merges, too; without them a seed gives the same history."""
        self.live_wins = live_wins
        """Whether some loads sort at their begin; likewise."""
        self.lives = lives
        """Whether the name is dropped, undropped and created again; likewise."""
        self.seed = seed
        self.log = log or (lambda line: None)
        self.world = world or World(simulation=lambda _: Simulation(seed))
        self.db = self.world.db
        self.store = self.world.bucket
        self.history = History()
        self.snapshots = {}
        self.lives_of = {}
        """By snapshot: the history of the life that it is of."""
        self.keyed = {}
        self.jobs = []
        self.count = 0
        self.damaged = []
        if world is None:
            self.db.create(NAME, SCHEMA)
        self.names = newest_incarnation(self.store, NAME) if lives else ROWS
        self.writer = self.db.writer(NAME, background=False)

    def close(self):
        self.end()
        self.world.sim.close()

    def end(self):
        """Close all handles of this process."""
        for job, _, _ in self.jobs:
            with suppress(reef.ReefError):  # the bucket may be damaged by now
                job.abort()
        self.jobs = []
        self.writer.close()

    def play(self, steps=None):
        """Run a random history, and end it with the canaries."""
        steps = steps or self.random.randint(4, 22)
        names = self.steps()
        for _ in range(steps):
            step = getattr(self, self.random.choice(names))
            step()
            self.world.advance(1)
        for _ in range(CANARIES):
            self.write([("put", "f", self.number(), 0)], key=None)
        expected = self.history.rows()
        assert rows_of(self.db) == expected, "the history itself went wrong"

    def steps(self):
        """Return the names of the kinds of steps, as often as they are likely."""
        names = ["write"] * 6 + ["load"] * 3 + ["fold"] * 4 + ["merge"] * 3
        names += ["merge_all", "sweep", "snapshot", "release", "reopen", "import_like"]
        names += ["group", "stage", "finish", "cursor"]
        names += ["stage", "finish"] * 3 * self.live_wins
        return names + ["drop_and_undrop", "recreate", "recreate", "snapshot"] * self.lives

    def number(self):
        self.count += 1
        return self.count

    def ops(self):
        chosen = []
        for _ in range(self.random.randint(1, 3)):
            kinds = ["put", "put", "patch", "patch", "patch", "delete", "range"]
            kind = self.random.choice(kinds + ["add"] * 5 * self.merges)
            key = self.random.choice(KEYS[:4])
            if kind == "put":
                chosen.append(("put", key, self.number(), self.number()))
            elif kind in ("patch", "add"):
                chosen.append((kind, key, self.random.choice("xy"), self.number()))
            elif kind == "delete":
                chosen.append(("delete", key))
            else:
                low, high = sorted(self.random.sample("abcdeg", 2))
                chosen.append(("range", low, high))
        return chosen

    def write(self, ops=None, key=False):
        ops = ops or self.ops()
        if key is False:
            key = f"key-{self.number()}" if self.random.random() < 0.4 else None
        receipt = self.writer.write(batch_of(ops), idempotency_key=key)
        self.history.events.append(Event(receipt.lsn, ops, key))
        if key is not None:
            self.keyed[key] = (ops, receipt.lsn)
        self.log(f"LSN {receipt.lsn}: {ops} {key or ''}")

    def group(self):
        """Several keyed batches in one object of the log, as concurrent clients send them."""
        batches = [(self.ops(), f"key-{self.number()}") for _ in range(self.random.randint(2, 4))]

        def send():
            sent = [
                self.writer.write(batch_of(ops), idempotency_key=key, wait=False)
                for ops, key in batches
            ]
            return [pending.result() for pending in sent]

        receipts = self.world.run(send)
        for (ops, key), receipt in zip(batches, receipts, strict=True):
            self.history.events.append(Event(receipt.lsn, ops, key))
            self.keyed[key] = (ops, receipt.lsn)
            self.log(f"LSN {receipt.lsn}: {ops} {key}, in a group")

    def stage(self):
        """A load that has begun and staged its rows; it commits later, or never."""
        keys = sorted(self.random.sample(KEYS[:4], 2))
        ops = [("put", key, self.number(), 6) for key in keys]
        rows = [{"id": key, "x": x, "y": y} for _, key, x, y in ops]
        live_wins = self.live_wins and self.random.random() < 0.8
        job = BulkJob(self.db, NAME, live_wins=live_wins)
        versions = staged_rows(to_ops(rows, job.schema, kind=OpKind.PUT))
        self.jobs.append((job, job.staging.stage([sorted_rows(versions)]), ops))
        self.log(f"a load has begun at LSN {job.begin_lsn}: {ops}")
        self.writer.refresh()

    def finish(self):
        if not self.jobs:
            return
        job, staged, ops = self.jobs.pop(0)
        try:
            if self.random.random() < 0.6:
                lsn = self.world.run(lambda: job.commit(staged)).lsn
                sorts = job.begin_lsn if job.live_wins else 0
                self.history.events.append(Event(lsn, ops, is_load=True, sorts=sorts))
                self.log(f"LSN {lsn}: load {ops}")
            else:
                job.abort()
                self.log("a load is aborted")
        except reef.ConflictError:
            job.abort()
        self.writer.refresh()

    def cursor(self):
        self.db.cursor(NAME, f"c{self.number()}")
        self.log("a cursor")

    def load(self):
        keys = sorted(self.random.sample(KEYS[:4], self.random.randint(1, 4)))
        size = self.random.choice([50, 10_000])
        sizes = {"segment_bytes": size, "group_bytes": self.random.choice([60, 10_000])}
        if self.random.random() < 0.35:
            column = self.random.choice("xy")
            kind = self.random.choice(["patch", "add"]) if self.merges else "patch"
            ops = [(kind, key, column, self.number()) for key in keys]
            rows = [{"id": key, column: value} for _, key, _, value in ops]
            op = "patch" if kind == "patch" else "merge"
            report = ingest(self.db, NAME, rows, op=op, operators={column: "add"}, **sizes)
        else:
            replace = self.random.random() < 0.2
            ops = [("put", key, self.number(), self.number()) for key in keys]
            rows = [{"id": key, "x": x, "y": y} for _, key, x, y in ops]
            report = ingest(self.db, NAME, rows, replace=replace, **sizes)
            ops = [("clear",), *ops] if replace else ops
        self.history.events.append(Event(report.lsn, ops, is_load=True))
        self.log(f"LSN {report.lsn}: load {ops}")
        self.writer.refresh()

    def import_like(self):
        """A keyed load, sent twice: the second one counts for nothing."""
        key = f"load-{self.number()}"
        rows = [{"id": self.random.choice(KEYS[:4]), "x": self.number(), "y": 7}]
        first = ingest(self.db, NAME, rows, idempotency_key=key)
        again = ingest(self.db, NAME, rows, idempotency_key=key)
        assert again.lsn == first.lsn
        ops = [("put", row["id"], row["x"], row["y"]) for row in rows]
        self.history.events.append(Event(first.lsn, ops, is_load=True))
        self.log(f"LSN {first.lsn}: keyed load {ops}")
        self.writer.refresh()

    def fold(self):
        size = self.random.choice([50, 10_000])
        report = fold(self.db, NAME, segment_bytes_max=size, group_bytes=60)
        self.log(f"fold up to {report.last_lsn}: {report.segments} segments")
        self.writer.refresh()

    def merge(self, everything=False):
        """Merge any segments, whatever is between them."""
        present = self.head().segments
        ids = {s.id for s in present if everything or self.random.random() < 0.6}
        if ids:
            size = self.random.choice([50, 200, 10_000])
            compact_these(self.db, lambda s: s.id in ids, bytes_each=size, name=NAME)
            self.log(f"merge {len(ids)} of {len(present)} into {self.shape()}")
            self.writer.refresh()

    def merge_all(self):
        self.merge(everything=True)

    def sweep(self):
        keep_s = self.random.choice([0.0, 0.0, 2 * HOUR_S])
        for _ in range(2):
            self.world.advance(HOUR_S)
            self.world.run(
                lambda: sweep(self.db, NAME, apply=True, force=True, retain_generations_s=keep_s)
            )
        self.log(f"sweep, retaining {keep_s:.0f} s")
        self.writer.refresh()

    def snapshot(self):
        name = f"s{self.number()}"
        snapshot = self.db.snapshot(NAME, name)
        last = self.history.events[-1].lsn if self.history.events else 0
        floor = HeadFinder(self.store, self.names).load(snapshot.generation).wal_floor
        self.snapshots[name] = (snapshot.generation, floor, last)
        self.lives_of[name] = self.history
        self.log(f"snapshot {name} of generation {snapshot.generation} at LSN {last}")

    def release(self):
        for snapshot in self.db.snapshots(NAME)[:1]:
            snapshot.release()  # one that is known still: a lost head may have been the release
            self.log(f"release {snapshot.name}")

    def reopen(self):
        self.writer.close()
        self.writer = self.db.writer(NAME, background=False)
        self.log("a new writer")

    # --- lives ------------------------------------------------------------------------
    def drop(self):
        """Drop the name; jobs and the writer of this life end."""
        self.end()
        self.db.drop(NAME)
        self.world.advance(self.random.choice([1, 10]))

    def drop_and_undrop(self):
        self.drop()
        self.db.undrop(NAME)
        self.writer = self.db.writer(NAME, background=False)
        self.log("dropped and undropped")

    def recreate(self):
        """Begin another life, sometimes behind a sweep that has cleared the last one."""
        self.drop()
        if self.random.random() < 0.3:
            self.world.advance(HOUR_S)
            self.world.run(
                lambda: sweep(
                    self.db,
                    NAME,
                    apply=True,
                    force=True,
                    retain_generations_s=0.0,
                    dropped_s=0.0,
                )
            )
        self.db.create(NAME, SCHEMA)
        self.names = newest_incarnation(self.store, NAME)
        self.history, self.keyed = History(), {}
        self.writer = self.db.writer(NAME, background=False)
        self.log(f"dropped, and created again: {self.names.root}")

    # --- damage -----------------------------------------------------------------------
    def damage(self):
        """Damage one to three objects."""
        for _ in range(self.random.choice([1, 1, 2, 3])):
            keys = self.targets()
            if keys:
                key = self.random.choice(keys)
                how = self.random.choice(["delete", "flip", "flip", "truncate", "empty", "swap"])
                others = [k for k in keys if k != key and k.rpartition("/")[0] in key]
                if how == "swap" and others:
                    other = self.random.choice(others)
                    swap(self.store, key, other)
                    self.damaged.append((other, how))
                else:
                    damage(self.store, key, how, self.random)
                self.damaged.append((key, how))
                self.log(f"{how} {key}")

    def targets(self):
        names = self.names
        if names.incarnation > 1 and self.random.random() < 0.4:
            names = names.at(self.random.randint(1, names.incarnation - 1))
        kind = self.random.choice([names.wal, names.segments, names.segments, names.manifests])
        keys = [info.key for info in self.store.list(kind)]
        if kind == self.names.wal:
            end = self.history.events[-CANARIES].lsn
            keys = [key for key in keys if number_of(key) < end]
        if kind == names.manifests and len(keys) < 2:
            return []
        return [key for key in keys if key not in {damaged for damaged, _ in self.damaged}]

    # --- reading ----------------------------------------------------------------------
    def head(self):
        return HeadFinder(self.store, self.names).find().manifest

    def shape(self):
        return [(s.lsn_min, s.lsn_max, s.rows, s.patches) for s in self.head().segments]


def batch_of(ops):
    """Return operations as a batch."""
    batch = reef.Batch()
    for kind, *given in ops:
        if kind == "put":
            key, x, y = given
            batch.upsert([{"id": key, "x": x, "y": y}])
        elif kind == "patch":
            key, column, value = given
            batch.patch([{"id": key, column: value}])
        elif kind == "add":
            key, column, value = given
            batch.merge(key, {column: reef.add(value)})
        elif kind == "delete":
            batch.delete(given[0])
        else:
            batch.delete_range(*given)
    return batch


def damage(store, key, how, choices):
    """Damage one object at rest."""
    if how == "delete":
        store.delete(key)
        return
    body = bytearray(store.get(key))
    if not body:
        return
    if how == "flip":
        body[choices.randrange(len(body))] ^= 1 << choices.randrange(8)
    else:
        body = body[: choices.randrange(len(body)) if how == "truncate" else 0]
    store.put(key, bytes(body))


def swap(store, key, other):
    """Store two intact objects under the name of each other."""
    bodies = store.get(key), store.get(other)
    store.put(key, bodies[1])
    store.put(other, bodies[0])


def rows_of(db, name=NAME, **view):
    """Return all rows by key, as a new reader sees them; of later columns those with a value."""
    with db.reader(name, **view) as reader:
        rows = {row["id"]: row for _, row in reader.scan()}
    kept = SCHEMA.names
    return {
        key: {n: value for n, value in row.items() if n in kept or value is not None}
        for key, row in rows.items()
    }


# --- recovery ---------------------------------------------------------------------------


class Recovery:
    """One way to recover a copy of a damaged bucket, and the checks behind it."""

    name, names = NAME, ROWS

    def __init__(self, machine, bodies):
        self.machine, self.history = machine, machine.history
        self.world = World(simulation=lambda _: Simulation(machine.seed + 1))
        self.db, self.store = self.world.db, self.world.bucket
        for key, body in bodies.items():
            self.store.put(key, body)
        # Later than all that happened: dates never go backwards.
        self.world.advance(machine.world.bucket.now() - self.store.now() + 60.0)
        if machine.lives:
            self.names = machine.names
        self.loss = Loss()
        self.reports = []
        self.checks_snapshots = True

    def run(self, variant):
        """Recover, check, continue, check."""
        try:
            if getattr(self, variant)():
                self.check(variant)
                if self.checks_snapshots:
                    self.check_snapshots()
                self.continues()
        finally:
            self.world.sim.close()

    # --- variants ---------------------------------------------------------------------
    def repaired(self):
        """Repair the namespace."""
        if self._has_no_manifest():
            return False  # for rebuild
        self._repair()
        return True

    def _has_no_manifest(self):
        heads = HeadFinder(self.store, self.names)
        for info in self.store.list(self.names.manifests):
            with suppress(reef.CorruptionError):
                heads.load(number_of(info.key))
                return False
        return True

    def rebuilt(self):
        """Rebuild without any manifest, then repair the objects that a rebuild does not read."""
        names = self.names
        for info in [*self.store.list(names.manifests), *self.store.list(names.leases)]:
            self.store.delete(info.key)
        try:
            self._rebuild()
        except reef.NotFoundError:
            return False  # nothing that is left says what columns there are
        self.loss.idempotency_keys |= self._collected_keys()
        self._repair()
        return True

    def twice(self):
        """Repair, continue for some steps, and damage it again."""
        if self._has_no_manifest():
            return False
        self._repair()
        self.check("repaired")
        if self.loss.keys:
            return False  # what there is now is not known
        gone, batches = self.loss.lsns, self.loss.batches
        kinds = {"merges": self.machine.merges, "live_wins": self.machine.live_wins}
        kinds |= {"lives": True} if self.machine.lives else {}
        machine = Machine(self.machine.seed + 1, self.machine.log, self.world, **kinds)
        machine.history = History(
            [e for e in self.history.events if e.lsn not in gone and e.key not in batches]
        )
        machine.count = 1000
        machine.keyed = {
            key: kept
            for key, kept in self.machine.keyed.items()
            if key not in self.loss.idempotency_keys
        }
        machine.play(steps=8)
        machine.end()
        machine.damage()
        self.names = machine.names if machine.lives else self.names
        if self._has_no_manifest():
            return False
        self.machine, self.history, self.loss = machine, machine.history, Loss()
        self.checks_snapshots = False  # some are older than the first repair
        self._repair()
        return True

    def forced(self):
        """Rebuild over a head, where it can be read and shows other rows; then repair."""
        try:
            report = self.world.run(lambda: rebuild(self.db, NAME, apply=True, force=True))
        except InvalidInputError:
            return False  # the same rows
        except (reef.CorruptionError, reef.ConflictError, reef.NotFoundError):
            return False  # a damaged head is for repair
        self._take_rebuild(report)
        self._repair()
        return True

    def _repair(self):
        dry = self.world.run(lambda: repair(self.db, self.name))
        report = self.world.run(lambda: repair(self.db, self.name, apply=True))
        self.reports.append(report)
        assert dry.lost == report.lost, f"the dry run said {dry.lost}, and then {report.lost}"
        assert not report.unrepaired, report.unrepaired
        self._take_repair(report.lost)
        found = verify(self.db, self.name, deep=True).problems
        assert not found, f"after a repair: {found}"

    def _rebuild(self):
        dry = self.world.run(lambda: rebuild(self.db, self.name))
        report = self.world.run(
            lambda: rebuild(self.db, self.name, apply=True, force=bool(dry.problems))
        )
        self.reports.append(report)
        assert report.problems == dry.problems
        self._take_rebuild(report)

    # --- what reports say -------------------------------------------------------------
    def _take_repair(self, lost):
        for lsn in lost.lsns:
            self.loss.skipped.add(lsn.lsn)
            self.loss.idempotency_keys |= set(lsn.idempotency_keys)
            events = [event for event in self.history.events if event.lsn == lsn.lsn]
            if not lsn.is_loss:
                continue
            if lsn.batches is not None and len(events) > 1:
                assert len(lsn.idempotency_keys) == lsn.batches
                self.loss.batches |= set(lsn.idempotency_keys)
            else:
                self.loss.lsns.add(lsn.lsn)
                self.loss.idempotency_keys |= {event.key for event in events}
        for segment in lost.segments:
            if segment.is_loss:
                for lost_range in segment.ranges:
                    low, high = lost_range.first_key, lost_range.last_key
                    self.loss.keys |= {key for key in KEYS if low <= key.encode() <= high}
                if segment.tombstones_lost:
                    low, high = segment.min_key, segment.max_key
                    self.loss.keys |= {key for key in KEYS if low <= key.encode() <= high}
        self._take_problems(lost.holes)

    def _take_rebuild(self, report):
        self.reports.append(report)
        self._take_problems(report.problems)

    def _take_problems(self, problems):
        for problem in problems:
            place = re.search(r"LSN (\d+) to (\d+)(?: of b'(.*?)' to (?:b'(.*?)'|None))?", problem)
            single = re.search(r"LSN (\d+) ", problem)
            below = re.search(r"objects below LSN (\d+)", problem)
            if below is not None:  # the record of this life is lost, and with it where it began
                self.loss.keys |= self.history.touched(0, int(below[1]))
                lost = [event for event in self.history.events if event.lsn < int(below[1])]
                self.loss.idempotency_keys |= {event.key for event in lost}
            if place is not None:
                first, last, low, high = place.groups()
                span = (int(first), int(last) + 1)
                self.loss.keys |= self.history.touched(*span, low or "", high)
                if low is None:  # all of these LSNs: their batches may be sent again
                    lost = [e for e in self.history.events if span[0] <= e.lsn < span[1]]
                    self.loss.idempotency_keys |= {event.key for event in lost}
            elif single is not None:
                lsn = int(single[1])
                self.loss.keys |= self.history.touched(lsn, lsn + 1)

    def _collected_keys(self):
        """Return keys of batches that are not in the log any more: no rebuild knows them."""
        there = {number_of(info.key) for info in self.store.list(self.names.wal)}
        return {e.key for e in self.history.events if e.lsn not in there or e.lsn in self._broken()}

    def _broken(self):
        found = set()
        for info in self.store.list(self.names.wal):
            lsn = number_of(info.key)
            try:
                header = WalObject.decode(self.store.get(info.key), info.key).header
                found |= {lsn} - {header.lsn}
            except reef.CorruptionError:
                found.add(lsn)
        return found

    # --- checks -----------------------------------------------------------------------
    def expected(self):
        return self.history.rows(without=self.loss.lsns, batches=self.loss.batches)

    def check(self, when):
        seen, expected = rows_of(self.db, self.name), self.expected()
        wrong = {
            key: (seen.get(key), expected.get(key))
            for key in {*seen, *expected} - self.loss.keys
            if seen.get(key) != expected.get(key)
        }
        assert not wrong, f"{when}: key: (seen, expected) {wrong}, reported lost: {self.loss}"

    def check_snapshots(self):
        """Check that the remaining snapshots show the same rows."""
        for snapshot in self.db.snapshots(NAME):
            _, floor, last = self.machine.snapshots[snapshot.name]
            skipped = {lsn for lsn in self.loss.skipped | self.loss.lsns if lsn >= floor}
            expected = self.machine.lives_of[snapshot.name].rows(without=skipped, last=last)
            seen = rows_of(self.db, snapshot=snapshot.name)
            assert seen == expected, f"snapshot {snapshot.name}: {seen} for {expected}"

    def continues(self):
        """Whatever follows changes no row."""
        self.world.advance(60)
        with self.db.writer(NAME, background=False) as writer:
            for key, (ops, lsn) in self.machine.keyed.items():
                if key in self.loss.idempotency_keys:
                    continue
                receipt = writer.write(batch_of(ops), idempotency_key=key)
                assert (receipt.replayed, receipt.lsn) == (True, lsn), f"{key} of LSN {lsn} again"
            self.check("after retries")
            ops = [("patch", "a", "x", -1), ("put", "e", -2, -2)]
            lsn = writer.write(batch_of(ops)).lsn
            self.history = History([*self.history.events, Event(lsn, ops)])
            self.check("after a write")
        self.world.run(lambda: fold(self.db, NAME))
        self.check("after a fold")
        self.world.run(lambda: compact(self.db, NAME, full=True))
        self.check("after a compaction")
        for snapshot in self.db.snapshots(NAME):
            snapshot.release()
        for _ in range(2):
            self.world.advance(HOUR_S)
            self.world.run(
                lambda: sweep(self.db, NAME, apply=True, force=True, retain_generations_s=0.0)
            )
        self.check("after a sweep")
        found = verify(self.db, NAME, deep=True).problems
        assert not found, f"after a sweep: {found}"
        again = self.world.run(lambda: rebuild(self.db, NAME))
        assert again.rows_equal, f"a rebuild shows other rows: {again}"


VARIANTS = ("repaired", "rebuilt", "forced", "twice")


def run_seed(
    seed,
    log=None,
    variants=VARIANTS,
    merges=False,
    *,
    live_wins=False,
    lives=False,
    machine=Machine,
    recovery=Recovery,
):
    """Play one seed, and recover it in every way; raise on a wrong result."""
    kinds = {"merges": merges} | ({"live_wins": True} if live_wins else {})
    kinds |= {"lives": True} if lives else {}
    machine = machine(seed, log, **kinds)
    try:
        machine.play()
        machine.damage()
        machine.writer.close()
        bodies = {info.key: machine.store.get(info.key) for info in machine.store.list()}
        for variant in variants:
            recovered = recovery(machine, bodies)
            try:
                recovered.run(variant)
            finally:
                for report in recovered.reports:
                    machine.log(f"{variant}: {report}")
    finally:
        machine.close()


def main():
    """Run seeds; print each failure with its seed, and how to play it again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--failures", type=int, default=10, help="stop after so many")
    parser.add_argument("--variant", choices=VARIANTS)
    parser.add_argument("--merges", action="store_true")
    parser.add_argument("--live-wins", action="store_true")
    parser.add_argument("--lives", action="store_true")
    arguments = parser.parse_args()
    variants = [arguments.variant] if arguments.variant else VARIANTS
    kinds = {
        "merges": arguments.merges,
        "live_wins": arguments.live_wins,
        "lives": arguments.lives,
    }
    return run_seeds(arguments, lambda seed, log: run_seed(seed, log, variants, **kinds))


def run_seeds(arguments, run):
    """Run the seeds of the command line; 1 if any failed."""
    failed, start_s = [], time.perf_counter()
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        try:
            log = print if arguments.seeds == 1 else None
            run(seed, log)
        except Exception as error:
            failed.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {str(error)[:400]}", flush=True)
            if arguments.seeds == 1:
                traceback.print_exc()
            if len(failed) >= arguments.failures:
                break
        if (seed - arguments.seed) % 250 == 249:
            print(f"{seed - arguments.seed + 1} seeds, failed: {failed}", flush=True)
    took_s = time.perf_counter() - start_s
    print(f"{arguments.seeds} seeds in {took_s:.0f} s, failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
