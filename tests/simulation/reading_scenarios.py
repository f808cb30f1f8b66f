"""Reads that race writes at every line of the read path.

One process reads with everything there is to read with while others of its fibers commit, load,
fold and refresh. What must hold (H69): every read equals the state of the rows at one LSN, and
that LSN is between the newest one that was visible when the read began and the newest one
when it ended. The reads of one fiber never go back in time, a transaction's reads all belong to
one state, and a condition was true of the state right below the batch that it let through. With a
local log a state is the log up to an LSN, and above it the local batches up to some index.
"""

from dataclasses import dataclass, field

import pyarrow as pa

import reef
from reef.engine.handles.database import Database
from reef.jobs import fold, ingest
from reef.testing.disk import SimulatedDisk
from tests.simulation.yielding import NAP_S, yielding_on_every_line
from tests.support.proven_buckets import remember_probe

NAME = "rows"
KEYS = ("a", "b", "c", "d")
COLUMNS = pa.schema([("id", pa.string()), ("x", pa.int64()), ("y", pa.int64())])
NEVER = 1 << 62
LOCAL = {
    "durability": "local",
    "local_log": "/local-log",
    "upload_interval_ms": 20.0,
    "write_deadline_s": 600.0,
    "commit_deadline_s": 600.0,
}


@dataclass(eq=False)
class Change:
    """A batch or a load, and its place in the log once it is known."""

    ops: list
    receipt: object = None
    local_number: int = 0
    """Its place among the batches of the local log; 0 if it is none of them."""

    @property
    def lsn(self):
        return NEVER if self.receipt is None else self.receipt.lsn

    @property
    def place(self):
        """Several batches may be in one object."""
        return self.lsn, getattr(self.receipt, "index", 0)


@dataclass
class Seen:
    """One read: keys and rows, or several reads that belong to one state."""

    fiber: str
    what: str
    rows: dict
    """By key: a row, or None; keys that were not asked for are missing."""
    first: tuple
    last: tuple


@dataclass
class World:
    """The namespace, all changes of it, and all reads."""

    sim: object
    node: object
    lines: object
    changes: list = field(default_factory=list)
    seen: list = field(default_factory=list)
    started: int = 0
    """Batches that were handed to a local log."""
    acknowledged: int = 0
    value: int = 0
    writer: object = None
    db: object = None
    keys: tuple = KEYS

    def pick(self, count):
        return self.sim.choices.pick(count)

    def rest(self, seconds_max):
        self.node.runtime.sleep(self.node.runtime.uniform(0.0, seconds_max))

    def ops(self):
        """Return some random operations; every value is new."""
        found = []
        for _ in range(1 + self.pick(3)):
            self.value += 1
            key = self.keys[self.pick(len(self.keys))]
            match self.pick(5):
                case 0:
                    found.append(("delete", key))
                case 1:
                    start, end = sorted((key, self.keys[self.pick(len(self.keys))]))
                    found.append(("delete_range", start, end + "\0"))
                case 2 | 3:
                    found.append(("patch", key, ("x", "y")[self.pick(2)], self.value))
                case _:
                    found.append(("put", key, self.value))
        return found

    # --- states -------------------------------------------------------------------
    def place(self):
        """Return the LSNs that are visible at least, of the log and of the local log."""
        return self.writer._committer.tail.view().last_lsn, self.acknowledged

    def end(self):
        return self.writer._committer.tail.view().last_lsn, self.started

    def state(self, lsn, local):
        """Return all rows as of an LSN, with the local batches up to some number above them."""
        ordered = sorted((c for c in self.changes if c.lsn <= lsn), key=lambda c: c.place)
        above = [c for c in self.changes if c.lsn > lsn and 0 < c.local_number <= local]
        rows = {}
        for change in [*ordered, *sorted(above, key=lambda c: c.local_number)]:
            for op in change.ops:
                apply(rows, op)
        return rows

    def check(self):
        """Find a state for every read, in the order of each fiber."""
        at = {}
        for seen in self.seen:
            floor = at.get(seen.fiber, (0, 0))
            lsns = range(max(seen.first[0], floor[0]), seen.last[0] + 1)
            counts = range(max(seen.first[1], floor[1]), seen.last[1] + 1)
            states = ((lsn, count) for lsn in lsns for count in counts)
            found = next((s for s in states if self.shows(s, seen.rows)), None)
            assert found is not None, f"{seen}\nfrom {floor}\n{self.history(seen)}"
            at[seen.fiber] = found

    def shows(self, place, rows):
        state = self.state(*place)
        return all(state.get(key) == row for key, row in rows.items())

    def history(self, seen):
        lsns = range(seen.first[0], seen.last[0] + 1)
        return "\n".join(f"{lsn}: {self.state(lsn, seen.first[1])}" for lsn in lsns)


def apply(rows, op):
    """Apply one operation to the model."""
    match op:
        case ("put", key, value):
            rows[key] = {"id": key, "x": value, "y": value}
        case ("patch", key, column, value) if key in rows:
            rows[key] = {**rows[key], column: value}
        case ("delete", key):
            rows.pop(key, None)
        case ("delete_range", start, end):
            for key in [k for k in rows if start <= k < end]:
                del rows[key]


def batch_of(ops):
    """Return the batch of some operations."""
    batch = reef.Batch()
    for op in ops:
        match op:
            case ("put", key, value):
                batch.upsert([{"id": key, "x": value, "y": value}])
            case ("patch", key, column, value):
                batch.patch([{"id": key, column: value}])
            case ("delete", key):
                batch.delete(key)
            case ("delete_range", start, end):
                batch.delete_range(start, end)
    return batch


# --- fibers --------------------------------------------------------------------------


def write_some(world, count, *, is_local=False):
    """Commit random batches."""
    for _ in range(count):
        world.rest(0.5)
        change = Change(world.ops())
        world.changes.append(change)
        world.started += is_local
        change.local_number = world.started if is_local else 0
        change.receipt = world.writer.write(batch_of(change.ops))
        world.acknowledged += is_local


def load_some(world, count):
    """Load rows or patches at one LSN, and have the writer meet them."""
    for _ in range(count):
        world.rest(0.5)
        world.value += 1
        keys = sorted({world.keys[world.pick(len(world.keys))] for _ in range(2)})
        if world.pick(2):
            ops = [("put", key, world.value) for key in keys]
            rows = [{"id": key, "x": world.value, "y": world.value} for key in keys]
            op = "put"
        else:
            ops = [("patch", key, "y", world.value) for key in keys]
            rows = [{"id": key, "y": world.value} for key in keys]
            op = "patch"
        change = Change(ops)
        world.changes.append(change)
        change.receipt = ingest(world.db, NAME, rows, op=op)
        if world.pick(4):
            world.writer.refresh()


def fold_some(world, count):
    """Fold, and have the writer refresh."""
    for _ in range(count):
        world.rest(2.0)
        fold(world.db, NAME)
        world.writer.refresh()


def read_some(world, fiber, handle, count, place=None, end=None):
    """Read in random ways, and record the results."""
    place, end = place or world.place, end or world.end
    for _ in range(count):
        read = READS[world.pick(len(READS))]
        first = place()
        world.lines.stay_at_one()
        rows = read(world, handle)
        world.seen.append(Seen(fiber, read.__name__, rows, first, end()))
        world.rest(0.1)


def get(world, handle):
    """One key."""
    key = world.keys[world.pick(len(world.keys))]
    return {key: handle.get(key)}


def get_columns(world, handle):
    """One key, by the names of its columns."""
    key = world.keys[world.pick(len(world.keys))]
    return {key: handle.get(key, columns=["id", "x", "y"])}


def get_many(world, handle):
    """All keys at once."""
    table = handle.get_many(KEYS).to_pylist()
    return {row["id"]: _bare(row) if row["_found"] else None for row in table}


def scan(world, handle):
    """Everything, in either direction."""
    found = dict(handle.scan(reverse=bool(world.pick(2))))
    return {key: found.get(key) for key in KEYS}


def scan_range(world, handle):
    """Some keys."""
    start, end = sorted(
        (world.keys[world.pick(len(world.keys))], world.keys[world.pick(len(world.keys))])
    )
    found = dict(handle.scan(start, end + "\0"))
    return {key: found.get(key) for key in KEYS if start <= key <= end}


def scan_arrow(world, handle):
    """Everything, as Arrow."""
    found = {row["id"]: row for row in handle.scan_arrow().read_all().to_pylist()}
    return {key: found.get(key) for key in KEYS}


READS = (get, get, get, get_columns, get_many, scan, scan_range, scan_arrow)


def _bare(row):
    return {name: row[name] for name in COLUMNS.names}


def transact_some(world, count):
    """Read twice in a transaction: both reads belong to one state, or there is a conflict."""
    for _ in range(count):
        first, rows = world.place(), {}
        try:
            tx = world.writer.transaction()
            for _ in range(2):
                read = READS[world.pick(len(READS))]
                rows |= read(world, tx)
            last = world.end()
            tx.rollback()
        except reef.ConflictError:
            continue
        world.seen.append(Seen("tx", "transaction", rows, first, last))


def decide_some(world, count):
    """Write under a condition, which must be true right below the batch, or false on the way."""
    for _ in range(count):
        world.value += 1
        value = world.value
        key, other = (
            world.keys[world.pick(len(world.keys))],
            world.keys[world.pick(len(world.keys))],
        )
        wanted = world.writer.get(key)
        condition = reef.absent(key) if wanted is None else reef.equals(key, "x", wanted["x"])
        change = Change([("put", other, value)])
        world.changes.append(change)
        first = world.place()
        try:
            change.receipt = world.writer.write(batch_of(change.ops), when=[condition])
        except reef.ConditionFailedError:
            world.changes.remove(change)
            last = world.end()
            world.seen.append(Failed("conditions", key, wanted, first, last))
            continue
        below = change.lsn - 1
        world.seen.append(Held("conditions", key, wanted, (below, 0), (below, 0)))


class Held(Seen):
    """A condition that held at the LSN below its batch."""

    def __init__(self, fiber, key, wanted, first, last):
        super().__init__(fiber, "held", _Condition(key, wanted, True), first, last)


class Failed(Seen):
    """A condition that was false at some LSN on the way."""

    def __init__(self, fiber, key, wanted, first, last):
        super().__init__(fiber, "failed", _Condition(key, wanted, False), first, last)


class _Condition(dict):
    """Compares as rows do: with the state of its key."""

    def __init__(self, key, wanted, holds):
        x = None if wanted is None else wanted["x"]
        super().__init__({key: _Equals(x, holds)})


class _Equals:
    def __init__(self, x, holds):
        self.x, self.holds = x, holds

    def __eq__(self, row):
        found = None if row is None else row["x"]
        is_same = (row is None) if self.x is None else (row is not None and found == self.x)
        return is_same is self.holds

    __hash__ = None

    def __repr__(self):
        return f"x {'is' if self.holds else 'is not'} {self.x}"


# --- scenarios ------------------------------------------------------------------------


def _open(sim, lines, *, disk=None, **settings):
    """Return a world with a writer, some rows in a segment, and some in memory."""
    remember_probe(sim.bucket)
    world = World(sim, sim.process("w"), lines)

    def start():
        world.db = Database(world.node.store())
        world.db._log_files = disk or world.db._log_files
        world.db.create(NAME, COLUMNS)
        world.writer = world.db.writer(NAME, background=False, **settings)

    world.node.spawn(start)
    sim.run()
    return world


def _finish(world):
    """At rest every handle shows the last state: no cache has kept another one."""

    def read_all():
        world.writer.flush()
        world.writer.refresh()
        for name in ("one", "again"):  # from the caches, and into them
            for key in KEYS:
                first = world.place()
                rows = {key: world.writer.get(key)}
                world.seen.append(Seen(name, "at rest", rows, (first[0], world.started), first))

    world.node.spawn(read_all)
    world.sim.run()
    world.check()


def reads_race_writes(sim):
    """All reads of a writer, concurrent with its own commits, loads, folds and refreshes."""
    parallel = 1 + sim.choices.pick(2)
    with yielding_on_every_line(sim) as lines:
        world = _open(
            sim, lines, max_parallel_writes=parallel, row_cache_bytes=sim.choices.pick(2) << 20
        )
        world.keys = KEYS[: 2 + sim.choices.pick(3)]
        for number in range(2):
            world.node.spawn(lambda n=number: read_some(world, f"r{n}", world.writer, 8), "read")
        world.node.spawn(lambda: write_some(world, 5), "write")
        world.node.spawn(lambda: write_some(world, 3), "write too")
        world.node.spawn(lambda: load_some(world, 5), "load")
        world.node.spawn(lambda: fold_some(world, 2), "fold")
        world.node.spawn(lambda: transact_some(world, 2), "transact")
        world.node.spawn(lambda: decide_some(world, 2), "decide")
        sim.run()
        _finish(world)


def readers_race_refreshes(sim):
    """Fibers that share a plain reader, which any of them refreshes, and a writer."""
    with yielding_on_every_line(sim) as lines:
        world = _open(sim, lines)
        node, opened = sim.process("r"), []

        def read(number):
            if not opened:
                opened.append(Database(node.store()).reader(NAME, refresh_interval_ms=20))
            reader = opened[0]
            read_some(world, f"r{number}", reader, 5, lambda: (reader.last_lsn, 0), end)

        def end():
            return max((c.lsn for c in world.changes if c.receipt), default=0) + NEWER, 0

        for number in range(3):
            node.spawn(lambda n=number: read(n), "read")
        world.node.spawn(lambda: write_some(world, 6), "write")
        world.node.spawn(lambda: load_some(world, 2), "load")
        world.node.spawn(lambda: fold_some(world, 2), "fold")
        sim.run()
        _finish(world)


NEWER = 8
"""A reader may see commits before they are acknowledged."""


def local_reads_race_uploads(sim):
    """Reads of a writer with a local log: rows move from it into the bucket's log meanwhile."""
    with yielding_on_every_line(sim) as lines:
        world = _open(
            sim, lines, disk=SimulatedDisk({}), **LOCAL, row_cache_bytes=sim.choices.pick(2) << 20
        )
        world.keys = KEYS[:2]  # so that loads and batches meet in a key
        for number in range(2):
            world.node.spawn(lambda n=number: read_some(world, f"r{n}", world.writer, 12), "read")
        world.node.spawn(lambda: write_some(world, 12, is_local=True), "write")
        world.node.spawn(lambda: load_some(world, 5), "load")
        world.node.spawn(lambda: fold_some(world, 1), "fold")
        sim.run()
        _finish(world)


# --- one change at each line of one read ----------------------------------------------


def _write(*ops, is_local=False):
    def run(world):
        change = Change(list(ops))
        world.changes.append(change)
        world.started += is_local
        change.local_number = world.started if is_local else 0
        change.receipt = world.writer.write(batch_of(change.ops))
        world.acknowledged += is_local

    return run


def _load(*ops):
    def run(world):
        change = Change(list(ops))
        world.changes.append(change)
        kind = ops[0][0]
        if kind == "put":
            rows = [{"id": key, "x": value, "y": value} for _, key, value in ops]
        else:
            rows = [{"id": key, column: value} for _, key, column, value in ops]
        change.receipt = ingest(world.db, NAME, rows, op=kind)
        world.writer.refresh()

    return run


def _fold(world):
    fold(world.db, NAME)
    world.writer.refresh()


def _flush(world):
    world.writer.flush()


FIRST = (_write(("put", "a", 1), ("put", "b", 1)), _fold, _write(("patch", "b", "x", 2)))
SCRIPTS = {
    "delete, patched by a load": (
        _write(("delete", "a"), ("delete", "b")),
        _load(("patch", "a", "y", 3), ("patch", "b", "y", 3)),
    ),
    "replaced, folded, patched": (
        _write(("put", "a", 4), ("put", "b", 4)),
        _fold,
        _write(("patch", "a", "x", 5), ("patch", "b", "x", 5)),
    ),
    "loaded, deleted, loaded": (
        _load(("put", "a", 6), ("put", "b", 6)),
        _write(("delete_range", "a", "c")),
        _load(("patch", "a", "y", 7), ("patch", "b", "y", 7)),
        _fold,
    ),
}
LOCAL_FIRST = (
    _write(("put", "a", 1), ("put", "b", 1), is_local=True),
    _flush,
    _write(("patch", "a", "x", 2), ("patch", "b", "x", 2), is_local=True),
)
LOCAL_SCRIPTS = {
    "uploaded, replaced, uploaded": (
        _flush,
        _write(("put", "a", 3), ("put", "b", 3), is_local=True),
        _flush,
    ),
    "uploaded, loaded, folded": (_flush, _load(("put", "a", 4), ("put", "b", 4)), _fold),
    "replaced, folded, patched": (
        _write(("put", "a", 5), ("put", "b", 5), is_local=True),
        _flush,
        _fold,
        _write(("patch", "a", "y", 6), is_local=True),
    ),
}


def changes_at_a_line(sim, read, line, first, script, **settings):
    """Run a script while a read stays at one of its lines; whether it has that many lines."""
    reached = []
    with yielding_on_every_line(sim, one_in=0) as lines:
        world = _open(sim, lines, **settings)
        world.keys = KEYS[:1]  # the same key at every line

        def read_at_a_line():
            for step in first:
                step(world)
            world.node.spawn(change, "change")
            place = world.place()
            lines.stay_at_one(line)
            rows = read(world, world.writer)
            reached.append(lines.has_stayed())
            world.seen.append(Seen("r", read.__name__, rows, place, world.end()))

        def change():
            world.node.runtime.sleep(NAP_S / 10)
            for step in script:
                step(world)

        world.node.spawn(read_at_a_line, "read")
        sim.run()
        _finish(world)
    return reached[0]
