"""Processes of a simulated namespace: writers, folders, sweepers, readers, bulk jobs.

Each does its work and stops at the first error that a client has to expect. Any other error fails
the history.
"""

import re
from contextlib import suppress
from datetime import UTC, datetime

import msgspec

from reef.engine.handles.database import Database
from reef.engine.rows.input import to_ops
from reef.errors import (
    ConflictError,
    ErrorKind,
    FencedError,
    InvalidInputError,
    NotFoundError,
    OutcomeUnknownError,
    ReefError,
    UnavailableError,
)
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.wal_object import OpKind
from reef.jobs import BulkJob, compact, fold, rebuild, sweep
from reef.jobs.compact.plan import STRATEGIES, CompactPlan
from reef.jobs.ingest.append import StreamAppender
from reef.jobs.ingest.job import sorted_rows, staged_rows
from reef.manifest.edits import new_namespace
from reef.manifest.head import HeadFinder, Publisher
from reef.manifest.roots import take_lease
from reef.paths import Namespace
from reef.stores import Wrapper
from reef.stores.memory import MemoryStore
from tests.simulation.client_log import ClientLog, Stream
from tests.simulation.log_oracle import LogOracle
from tests.support import bulk_jobs
from tests.support.proven_buckets import remember_probe

NAME = "users"
USERS = Namespace(NAME)
KEYS = ("a", "b", "c")
STREAM = "spark/query@/checkpoint"
TIMES_READ = 5
EXPECTED_ERRORS = (FencedError, UnavailableError, OutcomeUnknownError, ConflictError, NotFoundError)
GRACE_S = 6.0
DEFAULT_GRACE_S = 900.0
AMBIGUOUS = re.compile(
    r"LSN \d+ commits a job that LSN \d+ aborts|LSN \d+ and LSN \d+ hold the same batch of a stream"
)


class Calm(Wrapper):
    """The bucket of a process whose requests neither fail nor take any time."""

    def __init__(self, world, node):
        super().__init__(world.sim.bucket)
        self.runtime = node.runtime


class World:
    """One namespace, the oracle of its log, and the observations of its clients."""

    columns = None
    """Of the name, when it is created again; None for a plain one."""

    def __init__(
        self, sim, *, grace_s=None, in_order=True, schema=DEFAULT_SCHEMA, oracle=LogOracle
    ):
        self.sim = sim
        self.grace_s = grace_s or DEFAULT_GRACE_S
        self.has_lives = getattr(sim, "has_lives", False)
        """Whether the name is dropped, undropped and created again while the others work."""
        self.oracle = oracle(sim, NAME)
        self.clients = ClientLog(in_order)
        remember_probe(sim.bucket)
        if grace_s is not None:
            first = msgspec.structs.replace(new_namespace(schema), grace_ms=int(grace_s * 1000))
            Publisher(sim.bucket, USERS).create(first)

    def start(self, name, act, *args, after_s=0.0, **settings):
        """Start a process, with a clock of its own, that acts after a while."""
        node = self.sim.process(name, skew_s=self.sim.choices.uniform(-600.0, 600.0))

        def run():
            node.runtime.sleep(node.runtime.uniform(0.0, after_s))
            act(self, node, *args, **settings)

        node.spawn(run)
        return node

    def suspend_some(self, nodes, times, seconds):
        """Close the lids of some machines for a while."""
        hand = self.sim.process("hand")

        def close_lids():
            for _ in range(times):
                hand.runtime.sleep(hand.runtime.uniform(0.0, 10.0))
                victim = nodes[self.sim.choices.pick(len(nodes))]
                victim.freeze(hand.runtime.uniform(*seconds), suspended=True)

        hand.spawn(close_lids)

    def finish(self):
        """Run to the end, with a process that sweeps folded objects, and check."""
        self.start("collector", collect)
        if self.has_lives:
            for number in range(2):
                self.start(f"dropper{number}", drop_some, after_s=10.0)
            self.start("snapshots", read_snapshots, 3)
        self.sim.run()
        self.check()

    def check(self):
        """Open the namespace without faults, and compare it with all observations of clients.

        A rebuild without any manifest shows the same rows.
        """
        calm = Database(self.sim.bucket)
        if self.columns is not None:
            calm.create(NAME, self.columns)  # where it was dropped
        with calm.writer(NAME) as writer:
            self.clients.opened("calm", writer)
            for key in KEYS:
                assert writer.get(key) == self.clients.seen[-1][2].get(key.encode())
        fold(calm, NAME)
        reader = calm.reader(NAME)
        self.clients.seen.append(("the last reader", reader.last_lsn, dict(reader.scan())))
        evaluated = self._current_life()
        assert reader.last_lsn == evaluated.last_lsn, "a new reader does not see all there is"
        rows = evaluated.states[evaluated.last_lsn]
        assert dict(reader.scan()) == rows, "not the rows of its life"
        if self.has_lives:
            check_past(calm, evaluated)
            self.clients.check_lives(self.oracle.lives())
        else:
            self.clients.check(evaluated)
        check_rebuilt(self.sim.bucket, rows)

    def _current_life(self):
        """Return the life in which the writer that was opened last has put its fences."""
        if not self.has_lives:
            return self.oracle.evaluate()
        fence = self.clients.opens[-1].fence_id
        return next(life for life in self.oracle.lives() if life.lsn_of(fence) is not None)


def check_past(db, life):
    """Read a life as of each of its LSNs, and as of some times: what is retained is its history.

    Clocks differ, so that several LSNs may be the last one of a time.
    """
    for lsn in range(life.base, life.last_lsn + 1):
        rows = _rows_as_of(db, {"lsn": lsn})
        assert rows in (None, life.states[lsn]), f"as of LSN {lsn}: {rows}, not {life.states[lsn]}"
    made_ms = {lsn: header.created_at_ms for lsn, header in life.headers.items()}
    for at_ms in sorted(set(made_ms.values()))[:: max(1, len(made_ms) // TIMES_READ)]:
        rows = _rows_as_of(db, {"time": datetime.fromtimestamp(at_ms / 1000, UTC)})
        last = [n for n in made_ms if made_ms[n] <= at_ms < made_ms.get(n + 1, at_ms + 1)]
        states = [life.states[n] for n in (life.base - 1, *last)]
        assert rows is None or rows in states, f"as of {at_ms} ms: {rows}, none of LSNs {last}"


def _rows_as_of(db, point):
    """Return the rows at a point in time; None if it is not retained."""
    try:
        with db.reader(NAME, as_of=point) as reader:
            return dict(reader.scan())
    except NotFoundError as error:
        if error.kind is not ErrorKind.COLLECTED:
            raise
        return None


def check_rebuilt(bucket, rows):
    """Rebuild a copy of the bucket that has lost its manifests; the rows are the same.

    Nothing else is lost, so it may refuse for two reasons only: an abort that may have been late,
    and a batch of a stream that may have been.
    """
    copy = MemoryStore("memory://copy", runtime=bucket.runtime)
    for info in bucket.list("namespaces/"):
        if "/manifest/" not in info.key and "/leases/" not in info.key:
            copy.put(info.key, bucket.get(info.key))
    remember_probe(copy)
    db = Database(copy)
    try:
        report = rebuild(db, NAME, apply=True)
    except InvalidInputError as error:
        problems = error.message.partition("rows may be lost: ")[2]
        if not problems or not all(map(AMBIGUOUS.match, problems.split("; "))):
            raise
        return
    with db.reader(NAME) as reader:
        rebuilt = dict(reader.scan())
    assert rebuilt == rows, f"a rebuild shows {rebuilt}, published was {rows}: {report.problems}"
    assert not report.problems, report.problems


# --- writers --------------------------------------------------------------------------


def open_writer(world, node, *, calm=False, **settings):
    """Open a writer, and record the rows that it sees."""
    store = Calm(world, node) if calm else node.store()
    if world.columns is not None:  # a writer would create a plain one
        settings = {"create": False, **settings}
    writer = Database(store).writer(NAME, lease_ttl_s=GRACE_S, **settings)
    world.clients.opened(node.name, writer)
    return writer


def write(world, node, count, *, pause_s=0.0, nap_s=None, **settings):
    """Write, one after the other; every fifth is a delete. Before the last one comes a nap."""
    with suppress(*EXPECTED_ERRORS):
        writer = open_writer(world, node, **settings)
        for number in range(count):
            if nap_s is not None and number == count - 1:
                node.runtime.sleep(node.runtime.uniform(*nap_s))
            key = KEYS[number % len(KEYS)]
            value = f"{node.name}-{number}".encode()
            if number % 5 == 4:
                world.clients.delete(writer, key)
            elif number % 5 == 3:
                resolving(world, node, writer, value, world.clients.increment, writer, key, value)
            else:
                resolving(world, node, writer, value, world.clients.put, writer, key, value)
            node.runtime.sleep(node.runtime.uniform(0.0, pause_s))


def resolving(world, node, writer, value, call, *args):
    """Write; resolve an unknown outcome, twice at different times, and stop."""
    try:
        call(*args)
    except OutcomeUnknownError as error:
        for _ in range(2):
            node.runtime.sleep(node.runtime.uniform(0.0, world.grace_s))
            world.clients.resolved.append((value, writer.resolve(error)))
        raise


def write_pipelined(world, node, count, *, resolve=False, **settings):
    """Send without waiting, then collect the outcomes."""
    clients = world.clients
    with suppress(*EXPECTED_ERRORS):
        writer = open_writer(world, node, **settings)
        sent = []
        for number in range(count):
            key, value = KEYS[number % len(KEYS)], f"{node.name}-{number}".encode()
            clients.sent(value)
            try:
                sent.append((value, writer.put(key, value, wait=False)))
            except ReefError:  # it was not even queued
                clients.refuse(value)
                break
            if number % 2:
                node.runtime.sleep(node.runtime.uniform(0.0, 0.02))
        doubtful = [(value, clients.record_outcome(value, future)) for value, future in sent]
        for value, error in doubtful:
            if resolve and error is not None:
                node.runtime.sleep(node.runtime.uniform(0.0, 5.0))
                clients.resolved.append((value, writer.resolve(error)))


def retry_keyed(world, node, count, tries, **settings):
    """Write batches that others write too, under the same keys, until each is acknowledged."""
    todo = [f"once-{number}" for number in range(count)]
    for _ in range(tries):
        with suppress(*EXPECTED_ERRORS):
            writer = open_writer(world, node, **settings)
            while todo:
                key = KEYS[len(todo) % len(KEYS)]
                world.clients.put(writer, key, todo[0].encode(), idempotency_key=todo[0])
                todo.pop(0)
            return
        node.runtime.sleep(node.runtime.uniform(0.0, 5.0))


# --- jobs -----------------------------------------------------------------------------


def fold_some(world, node, count, pause_s=5.0, *, calm=False):
    """Fold again and again, with pauses."""
    store = Calm(world, node) if calm else node.store()
    for _ in range(count):
        with suppress(*EXPECTED_ERRORS):
            fold(Database(store), NAME)
        node.runtime.sleep(node.runtime.uniform(0.0, pause_s))


def sweep_some(world, node, count, pause_s=6.0):
    """Sweep repeatedly, and keep only the head and what leases and snapshots hold."""
    for _ in range(count):
        node.runtime.sleep(node.runtime.uniform(0.0, pause_s))
        with suppress(*EXPECTED_ERRORS):
            _sweep(Database(node.store()))


def keep_house(world, node, rounds, pause_s=(5.0, 9.0)):
    """Sweep, fold and compact, calmly, round by round: about a grace period each."""
    db = Database(Calm(world, node))
    for _ in range(rounds):
        for job in (lambda: _sweep(db), lambda: fold(db, NAME), lambda: compact_oldest(db)):
            with suppress(*EXPECTED_ERRORS):
                job()
        node.runtime.sleep(node.runtime.uniform(*pause_s))


def compact_oldest(db):
    """Rewrite the oldest segment, by the protocol of compaction."""
    compact(db, NAME, strategy="oldest", rounds_max=1)


def _plan_oldest(segments, settings):
    return CompactPlan(1, tuple(segments[-1:])) if segments else None


STRATEGIES["oldest"] = _plan_oldest


def _sweep(db):
    sweep(db, NAME, apply=True, retain_generations_s=0.0)


def collect(world, node):
    """Let grace periods pass, fold and sweep, so that slots of the log are deleted: a few times,
    and some more while a request waits for that."""
    db = Database(Calm(world, node))
    for number in range(10):
        if number >= 4 and not world.sim.held.pending:
            break
        node.runtime.sleep(node.runtime.uniform(0.5 * world.grace_s, 1.6 * world.grace_s))
        for job in (lambda: fold(db, NAME), lambda: _sweep(db)):
            with suppress(*EXPECTED_ERRORS):
                job()


def drop_some(world, node):
    """Drop the name, and bring it back, create it again, or leave that to the others."""
    db = Database(node.store())
    for _ in range(2):
        with suppress(*EXPECTED_ERRORS):
            db.drop(NAME)
            node.runtime.sleep(node.runtime.uniform(0.0, 10.0))
            match world.sim.choices.pick(3):
                case 0:
                    db.undrop(NAME)
                case 1:
                    db.create(NAME, world.columns)
        node.runtime.sleep(node.runtime.uniform(0.0, 2 * world.grace_s))


def read_snapshots(world, node, rounds):
    """Take a snapshot and read it later, in any life of the name; read as of LSNs."""
    db = Database(node.store())
    for _ in range(rounds):
        with suppress(*EXPECTED_ERRORS):
            snapshot = db.snapshot(NAME)
            node.runtime.sleep(node.runtime.uniform(0.0, 3 * world.grace_s))
            with db.reader(NAME, snapshot=snapshot) as reader:
                world.clients.seen.append((node.name, reader.last_lsn, dict(reader.scan())))
            snapshot.release()
        with suppress(*EXPECTED_ERRORS):
            lsn = 1 + world.sim.choices.pick(db.reader(NAME).last_lsn or 1)
            with db.reader(NAME, as_of={"lsn": lsn}) as reader:
                world.clients.seen.append((f"{node.name}, back", lsn, dict(reader.scan())))


def load_some(world, node, count, key=None):
    """Run bulk jobs by the protocol of section 4."""
    for number in range(count):
        rows = {k.encode(): f"{node.name}-{number}-{k}".encode() for k in KEYS[:2]}
        with suppress(*EXPECTED_ERRORS):
            lsn = bulk_jobs.load(node.store(), NAME, rows, key=key, staged=world.oracle.staged)
            if lsn is not None:
                world.clients.loaded(rows, lsn)
        node.runtime.sleep(node.runtime.uniform(0.0, 2.0))


def stream_batches(world, node, count, *, calm=False):
    """Commit the batches of one stream, which several drivers may do: each of them sends every
    batch until it is acknowledged, with other rows at each try (H40).
    """
    for number in range(1, count + 1):
        for attempt in range(5):
            with suppress(*EXPECTED_ERRORS):
                db = Database(Calm(world, node) if calm else node.store())
                rows = {
                    k.encode(): f"{node.name}-{number}-{attempt}-{k}".encode()
                    for k in KEYS[number % 2 :][:2]
                }
                with world.clients.trying(rows.values()):
                    receipt = _commit_batch(world, db, number, rows)
                if not receipt.replayed:  # otherwise these rows may count, or those of another try
                    world.clients.loaded(rows, receipt.lsn)
                world.clients.committed_batches.add(number)
                break
            node.runtime.sleep(node.runtime.uniform(0.0, 5.0))
        else:
            return
        node.runtime.sleep(node.runtime.uniform(0.0, 2.0))


def _commit_batch(world, db, number, rows):
    """Commit a batch in the log, or by a job, whichever the dice say."""
    columns = {"id": list(rows), "value": list(rows.values())}
    ops = to_ops(columns, DEFAULT_SCHEMA, kind=OpKind.PUT)
    if world.sim.choices.pick(2):
        return StreamAppender(db, NAME).append(STREAM, number, [ops])
    with BulkJob(db, NAME, lease_ttl_s=world.grace_s) as job:
        staged = job.staging.stage([sorted_rows(staged_rows(ops))])
        world.oracle.note_staged(staged, rows)
        return job.commit(staged, marks={STREAM: number})


# --- readers --------------------------------------------------------------------------


def read_some(world, node, count, pause_s=3.0):
    """Refresh and read: a prefix of the log, never an older one, with all acknowledged writes."""
    with suppress(*EXPECTED_ERRORS):
        reader = Database(node.store()).reader(NAME, refresh_interval_ms=1e9)
        last = 0
        for _ in range(count):
            acknowledged = world.clients.acknowledged_lsn if world.clients.in_order else 0
            reader.refresh()
            assert reader.last_lsn >= last, "a reader went back in time"
            last = reader.last_lsn
            assert last >= acknowledged, (
                f"a reader sees LSN {last}, though {acknowledged} was acknowledged before"
            )
            world.clients.seen.append((node.name, last, dict(reader.scan())))
            node.runtime.sleep(node.runtime.uniform(0.0, pause_s))


def follow_changes(world, node, rounds):
    """Read the changes by a stream that nothing keeps the log for, with long pauses; begin again
    where it ends with an error."""
    for _ in range(rounds):
        with suppress(*EXPECTED_ERRORS):
            reader = Database(node.store()).reader(NAME)
            changes, rows = reader.changes(after_lsn=reader.last_lsn), {}
            followed = Stream(node.name, changes.position, changes.position)
            world.clients.streams.append(followed)
            for _ in range(4):
                for change in changes:
                    if change.op != "delete_range":
                        rows[change.lsn, change.key] = change.row
                followed.position = changes.position
                followed.rows = [(*place, row) for place, row in sorted(rows.items())]
                node.runtime.sleep(node.runtime.uniform(0.0, 5 * world.grace_s))


def hold_leases(world, node, count, checks, *, calm=False):
    """Pin the head, and check that no object it needs is deleted while the lease holds."""
    store, bucket = Calm(world, node) if calm else node.store(), world.sim.bucket
    for _ in range(count):
        with suppress(*EXPECTED_ERRORS):
            heads = HeadFinder(store, USERS)
            lease = take_lease(store, USERS, heads.find().manifest, owner=node.name, ttl_s=GRACE_S)
            heads.forget()
            manifest = heads.find().manifest
            for _ in range(checks):
                node.runtime.sleep(node.runtime.uniform(GRACE_S / 4, GRACE_S / 2))
                missing = _needed_objects(world, manifest) - {
                    info.key for info in bucket.list(f"{USERS.root}/")
                }
                lease.renew()  # only now is it known that it held until here
                assert not missing, f"{missing} are pinned, and gone"
            lease.release()


def _needed_objects(world, manifest):
    """Return the names of the segments and of the filled slots that a manifest needs.

    Slots are not filled in order: openers and drops that lose some aim at several at once.
    """
    segments = {USERS.segment(entry.id) for entry in manifest.segments}
    filled = world.oracle.filled_slots(USERS.root, manifest.wal_floor)
    return segments | {USERS.wal_object(lsn) for lsn in filled}
