"""Processes of a simulated namespace: writers, folders, sweepers, readers, bulk jobs.

Each does its work and stops at the first sign of trouble that a client has to expect. Any other
error fails the history.
"""

from contextlib import suppress

import msgspec

from reef.engine.database import Database
from reef.errors import (
    ConflictError,
    FencedError,
    InvalidInputError,
    NotFoundError,
    OutcomeUnknownError,
    ReefError,
    UnavailableError,
)
from reef.formats.schema import DEFAULT_SCHEMA
from reef.jobs import fold, rebuild, sweep
from reef.manifest.edits import new_namespace
from reef.manifest.head import HeadFinder
from reef.manifest.leases import Lease
from reef.manifest.publish import Publisher
from reef.paths import Namespace
from reef.stores import Wrapper, agree_on_cas
from reef.stores.memory import MemoryStore
from tests import bulk
from tests.simulation.told import Stream, Told
from tests.simulation.truth import Truth

NAME = "users"
USERS = Namespace(NAME)
KEYS = ("a", "b", "c")
GAVE_UP = (FencedError, UnavailableError, OutcomeUnknownError, ConflictError, NotFoundError)
GRACE_S = 6.0
DEFAULT_GRACE_S = 900.0


class Calm(Wrapper):
    """The bucket as a process sees it whose requests neither fail nor take any time."""

    def __init__(self, world, node):
        super().__init__(world.sim.bucket)
        self.runtime = node.runtime


class World:
    """One namespace, the truth about it, and what was told of it."""

    def __init__(self, sim, *, grace_s=None, in_order=True):
        self.sim = sim
        self.grace_s = grace_s or DEFAULT_GRACE_S
        self.has_lives = getattr(sim, "has_lives", False)
        """Whether the name is dropped, undropped and created again while the others work."""
        self.truth = Truth(sim, NAME)
        self.told = Told(in_order)
        agree_on_cas(sim.bucket)
        if grace_s is not None:
            first = msgspec.structs.replace(
                new_namespace(DEFAULT_SCHEMA), grace_ms=int(grace_s * 1000)
            )
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
        """Run to the end, with a process that collects what was folded, and check."""
        self.start("collector", collect)
        if self.has_lives:
            for number in range(2):
                self.start(f"dropper{number}", drop_some, after_s=10.0)
            self.start("snapshots", look_back, 3)
        self.sim.run()
        self.check()

    def check(self):
        """A calm process opens what is left: it must work, and all that was told is so.

        A rebuild without any manifest shows the same rows.
        """
        calm = Database(self.sim.bucket)
        with calm.writer(NAME) as writer:
            self.told.opened("calm", writer)
            for key in KEYS:
                assert writer.get(key) == self.told.seen[-1][2].get(key.encode())
        fold(calm, NAME)
        reader = calm.reader(NAME)
        self.told.seen.append(("the last reader", reader.last_lsn, dict(reader.scan())))
        judged = self._current_life()
        assert reader.last_lsn == judged.last_lsn, "a new reader does not see all there is"
        assert dict(reader.scan()) == judged.states[judged.last_lsn], "not the rows of its life"
        if self.has_lives:
            self.told.check_lives(self.truth.lives())
        else:
            self.told.check(judged)
        check_rebuilt(self.sim.bucket, judged.states[judged.last_lsn])

    def _current_life(self):
        """Return the life in which the writer that was opened last has put its fences."""
        if not self.has_lives:
            return self.truth.judge()
        fence = self.told.opens[-1].fence_id
        return next(life for life in self.truth.lives() if life.lsn_of(fence) is not None)


def check_rebuilt(bucket, rows):
    """Rebuild a copy of the bucket that has lost its manifests; the rows are the same.

    A rebuild may also refuse, if it says what is missing.
    """
    copy = MemoryStore("memory://copy", runtime=bucket.runtime)
    for info in bucket.list("namespaces/"):
        if "/manifest/" not in info.key and "/leases/" not in info.key:
            copy.put(info.key, bucket.get(info.key))
    agree_on_cas(copy)
    db = Database(copy)
    try:
        report = rebuild(db, NAME, apply=True)
    except InvalidInputError as error:
        if "not everything is there" not in str(error):
            raise
        return
    with db.reader(NAME) as reader:
        rebuilt = dict(reader.scan())
    assert rebuilt == rows, f"a rebuild shows {rebuilt}, published was {rows}: {report.problems}"
    assert not report.problems, report.problems


# --- writers --------------------------------------------------------------------------


def open_writer(world, node, *, calm=False, **settings):
    """Take the role, and note what is there."""
    store = Calm(world, node) if calm else node.store()
    writer = Database(store).writer(NAME, lease_ttl_s=GRACE_S, **settings)
    world.told.opened(node.name, writer)
    return writer


def write(world, node, count, *, pause_s=0.0, nap_s=None, **settings):
    """Write, one after the other; every fifth is a delete. Before the last one comes a nap."""
    with suppress(*GAVE_UP):
        writer = open_writer(world, node, **settings)
        for number in range(count):
            if nap_s is not None and number == count - 1:
                node.runtime.sleep(node.runtime.uniform(*nap_s))
            key = KEYS[number % len(KEYS)]
            value = f"{node.name}-{number}".encode()
            if number % 5 == 4:
                world.told.delete(writer, key)
            elif number % 5 == 3:
                resolving(world, node, writer, value, world.told.increment, writer, key, value)
            else:
                resolving(world, node, writer, value, world.told.put, writer, key, value)
            node.runtime.sleep(node.runtime.uniform(0.0, pause_s))


def resolving(world, node, writer, value, call, *args):
    """Write; where the outcome is unknown, ask for it, now and later, and stop."""
    try:
        call(*args)
    except OutcomeUnknownError as error:
        for _ in range(2):
            node.runtime.sleep(node.runtime.uniform(0.0, world.grace_s))
            world.told.resolved.append((value, writer.resolve(error)))
        raise


def write_pipelined(world, node, count, *, resolve=False, **settings):
    """Send without waiting, then gather the answers."""
    told = world.told
    with suppress(*GAVE_UP):
        writer = open_writer(world, node, **settings)
        sent = []
        for number in range(count):
            key, value = KEYS[number % len(KEYS)], f"{node.name}-{number}".encode()
            told.sent(value)
            try:
                sent.append((value, writer.put(key, value, wait=False)))
            except ReefError:  # it was not even queued
                told.refuse(value)
                break
            if number % 2:
                node.runtime.sleep(node.runtime.uniform(0.0, 0.02))
        doubtful = [(value, told.answered(value, future)) for value, future in sent]
        for value, error in doubtful:
            if resolve and error is not None:
                node.runtime.sleep(node.runtime.uniform(0.0, 5.0))
                told.resolved.append((value, writer.resolve(error)))


def retry_keyed(world, node, count, tries, **settings):
    """Write batches that others write too, under the same keys, until each is acknowledged."""
    todo = [f"once-{number}" for number in range(count)]
    for _ in range(tries):
        with suppress(*GAVE_UP):
            writer = open_writer(world, node, **settings)
            while todo:
                key = KEYS[len(todo) % len(KEYS)]
                world.told.put(writer, key, todo[0].encode(), idempotency_key=todo[0])
                todo.pop(0)
            return
        node.runtime.sleep(node.runtime.uniform(0.0, 5.0))


# --- jobs -----------------------------------------------------------------------------


def fold_some(world, node, count, pause_s=5.0, *, calm=False):
    """Fold again and again, with pauses."""
    store = Calm(world, node) if calm else node.store()
    for _ in range(count):
        with suppress(*GAVE_UP):
            fold(Database(store), NAME)
        node.runtime.sleep(node.runtime.uniform(0.0, pause_s))


def sweep_some(world, node, count, pause_s=6.0):
    """Sweep again and again, keeping no more than the head and what others hold."""
    for _ in range(count):
        node.runtime.sleep(node.runtime.uniform(0.0, pause_s))
        with suppress(*GAVE_UP):
            _sweep(Database(node.store()))


def keep_house(world, node, rounds, pause_s=(5.0, 9.0)):
    """Sweep, fold and compact, calmly, round by round: about a grace period each."""
    db = Database(Calm(world, node))
    for _ in range(rounds):
        for job in (lambda: _sweep(db), lambda: fold(db, NAME), lambda: compact(db)):
            with suppress(*GAVE_UP):
                job()
        node.runtime.sleep(node.runtime.uniform(*pause_s))


def compact(db):
    """Put a copy in place of the oldest segment: a compaction, as far as names go."""
    publisher = Publisher(db.store, USERS)
    segments = publisher.heads.find().manifest.segments
    if not segments:
        return
    old, new_id = segments[-1], db.store.runtime.ulid()
    db.store.copy(USERS.segment(old.id), USERS.segment(new_id))
    new = msgspec.structs.replace(old, id=new_id)

    def edit(head):
        if old not in head.segments:
            return None
        kept = tuple(new if entry == old else entry for entry in head.segments)
        return msgspec.structs.replace(head, segments=kept)

    publisher.publish(edit)


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
            with suppress(*GAVE_UP):
                job()


def drop_some(world, node):
    """Drop the name, and bring it back, create it again, or leave that to the others."""
    db = Database(node.store())
    for _ in range(2):
        with suppress(*GAVE_UP):
            db.drop(NAME)
            node.runtime.sleep(node.runtime.uniform(0.0, 10.0))
            match world.sim.choices.pick(3):
                case 0:
                    db.undrop(NAME)
                case 1:
                    db.create(NAME)
        node.runtime.sleep(node.runtime.uniform(0.0, 2 * world.grace_s))


def look_back(world, node, rounds):
    """Take a snapshot and read it later, in whichever life the name is then; read as of LSNs."""
    db = Database(node.store())
    for _ in range(rounds):
        with suppress(*GAVE_UP):
            snapshot = db.snapshot(NAME)
            node.runtime.sleep(node.runtime.uniform(0.0, 3 * world.grace_s))
            with db.reader(NAME, snapshot=snapshot) as reader:
                world.told.seen.append((node.name, reader.last_lsn, dict(reader.scan())))
            snapshot.release()
        with suppress(*GAVE_UP):
            lsn = 1 + world.sim.choices.pick(db.reader(NAME).last_lsn or 1)
            with db.reader(NAME, as_of={"lsn": lsn}) as reader:
                world.told.seen.append((f"{node.name}, back", lsn, dict(reader.scan())))


def load_some(world, node, count, key=None):
    """Run bulk jobs by the protocol of section 4."""
    for number in range(count):
        rows = {k.encode(): f"{node.name}-{number}-{k}".encode() for k in KEYS[:2]}
        with suppress(*GAVE_UP):
            lsn = bulk.load(node.store(), NAME, rows, key=key, staged=world.truth.staged)
            if lsn is not None:
                world.told.loaded(rows, lsn)
        node.runtime.sleep(node.runtime.uniform(0.0, 2.0))


# --- readers --------------------------------------------------------------------------


def read_some(world, node, count, pause_s=3.0):
    """Refresh and look: a prefix, never an older one, and nothing acknowledged is missed."""
    with suppress(*GAVE_UP):
        reader = Database(node.store()).reader(NAME, refresh_interval_ms=1e9)
        last = 0
        for _ in range(count):
            acknowledged = world.told.acknowledged_lsn if world.told.in_order else 0
            reader.refresh()
            assert reader.last_lsn >= last, "a reader went back in time"
            last = reader.last_lsn
            assert last >= acknowledged, (
                f"a reader sees LSN {last}, though {acknowledged} was acknowledged before"
            )
            world.told.seen.append((node.name, last, dict(reader.scan())))
            node.runtime.sleep(node.runtime.uniform(0.0, pause_s))


def follow_changes(world, node, rounds):
    """Read the changes by a stream that nothing keeps the log for, with long pauses; begin again
    where it ends with an error."""
    for _ in range(rounds):
        with suppress(*GAVE_UP):
            reader = Database(node.store()).reader(NAME)
            changes, rows = reader.changes(after_lsn=reader.last_lsn), {}
            followed = Stream(node.name, changes.position, changes.position)
            world.told.streams.append(followed)
            for _ in range(4):
                for change in changes:
                    if change.op != "delete_range":
                        rows[change.lsn, change.key] = change.row
                followed.position = changes.position
                followed.rows = [(*place, row) for place, row in sorted(rows.items())]
                node.runtime.sleep(node.runtime.uniform(0.0, 5 * world.grace_s))


def hold_leases(world, node, count, looks, *, calm=False):
    """Pin the head, and look whether all that it needs is there for as long as the lease holds."""
    store, bucket = Calm(world, node) if calm else node.store(), world.sim.bucket
    for _ in range(count):
        with suppress(*GAVE_UP):
            heads = HeadFinder(store, USERS)
            lease = Lease.take(store, USERS, heads.find().manifest, owner=node.name, ttl_s=GRACE_S)
            heads.forget()
            manifest = heads.find().manifest
            for _ in range(looks):
                node.runtime.sleep(node.runtime.uniform(GRACE_S / 4, GRACE_S / 2))
                names = {info.key for info in bucket.list(f"{USERS.root}/")}
                lease.renew()  # only now is it known that it held until here
                _check_all_there(manifest, names)
            lease.release()


def _check_all_there(manifest, names):
    for entry in manifest.segments:
        assert USERS.segment(entry.id) in names, f"segment {entry.id} is pinned, and gone"
    slots = sorted(key for key in names if key.startswith(USERS.wal))
    above = [key for key in slots if key >= USERS.wal_object(manifest.wal_floor)]
    wanted = [USERS.wal_object(manifest.wal_floor + n) for n in range(len(above))]
    assert above == wanted, f"the log from LSN {manifest.wal_floor} is pinned, and has holes"
