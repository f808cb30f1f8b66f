"""Openings, explored: the real code, all orders, deaths and late requests within bounds.

An old writer has PUTs in flight; openers come, fence it, read what there is, and write one row
each; perhaps a fold and a collector work beside them. Whatever happens:

- every acknowledged write is there when a calm process opens later, in order;
- no write that was reported as failed is ever visible;
- what an opener found when it had opened is all that there will ever be of older writers: none
  of them is acknowledged, or becomes visible, behind its back.

What is not under study is prepared beforehand: the namespace, the old writer's own opening, and
the openers' first look at the head.
"""

from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from unittest import mock

import msgspec

from reef.engine.batch import Batch
from reef.engine.commit import taking
from reef.engine.database import Database
from reef.engine.tail import Tail
from reef.errors import (
    ConflictError,
    FencedError,
    NotFoundError,
    OutcomeUnknownError,
    ReefError,
    UnavailableError,
)
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.wal_object import WalKind, WalObject
from reef.jobs import fold
from reef.manifest.edits import new_namespace
from reef.manifest.leases import LeaseRecord
from reef.manifest.publish import Publisher
from reef.paths import Namespace, number_of
from reef.stores import ReadBack, agree_on_cas
from reef.stores.memory import MemoryStore
from reef.testing import Chaos, Footprint

NAME = "n"
NAMES = Namespace(NAME)
LAST = b"last"
GAVE_UP = (FencedError, UnavailableError, OutcomeUnknownError, ConflictError, NotFoundError)


def chaos(crashes, late):
    """Return so many deaths and so many late requests.

    A late request covers the lost answer, when it lands at once, and the failed one, when it
    lands after it was sent again.
    """
    return Chaos(
        crash=float(crashes > 0),
        crashes_max=crashes,
        late=float(late > 0),
        faults_max=late,
        latency_s=(0.0, 0.0),
    )


def _is_lease(key):
    return key.startswith(NAMES.leases)


@lru_cache(maxsize=100_000)
def _stays(body):
    return WalObject.decode(body, "slot").header.kind is not WalKind.BATCHES


NOBODY_DELETES = Footprint(
    private=lambda key: key.startswith((NAMES.leases, NAMES.segments)),
    ignored=_is_lease,
    immutable=lambda key, _: not _is_lease(key),
)
BATCHES_GO = Footprint(
    private=lambda key: key.startswith(NAMES.segments),
    immutable=lambda key, body: _stays(body) if key.startswith(NAMES.wal) else not _is_lease(key),
    deleter=("folder", NOBODY_DELETES),
)

LEASES_DO_NOT_MATTER = {
    "private": NOBODY_DELETES.private,
    "ignored": NOBODY_DELETES.ignored,
}


class Told:
    """What clients were told, and what openers found."""

    def __init__(self, ack, epoch, rows, batches):
        self.ack = ack
        self.epoch = epoch
        """Of the old writer."""
        self.own = [*rows, *(b"old-%d" % number for number in range(1, batches + 1))]
        """Its rows, in their order."""
        self.answers = dict(rows)
        self.found = {}

    def write(self, writer, name):
        """Write a row of its own and the one that all write, and note the answer."""
        try:
            self.answers[name] = writer.write(Batch().put(name, b"x").put(LAST, name)).lsn
        except OutcomeUnknownError:
            pass
        except ReefError:
            self.answers[name] = 0
            raise

    def state(self):
        """Return all of it, for the exploration."""
        return tuple(sorted(self.answers.items())), tuple(sorted(self.found.items()))

    def recall(self, states):
        """Remember what was told of several processes."""
        for answers, found in states:
            self.answers.update(answers)
            self.found.update(found)

    def check(self, rows):
        """Compare with what a calm process finds at the end."""
        visible = {name for name in rows if name != LAST}
        acknowledged = {name for name, lsn in self.answers.items() if lsn}
        rejected = {name for name, lsn in self.answers.items() if not lsn}
        assert acknowledged <= visible, f"{acknowledged - visible} was acknowledged and is lost"
        assert not rejected & visible, f"{rejected & visible} was rejected and is visible"
        self._check_order(visible, rows.get(LAST))
        epochs = {name: epoch for name, (epoch, _) in self.found.items()}
        for epoch, found in self.found.values():
            older = {name for name in visible if epochs.get(name, self.epoch) < epoch}
            assert older == set(found) - {LAST}, (
                f"split brain: epoch {epoch} found {found} of older writers, there is {older}"
            )

    def _check_order(self, visible, last):
        told = [(self.answers[name], name) for name in visible if self.answers.get(name)]
        if told:
            newest = max(told)[1]
            unknown = {name for name in visible if name not in self.answers}
            assert last in {newest} | unknown, f"the last is {last}, not {newest}"
        seen = [name for name in self.own if name in visible]
        assert self.ack != "prefix" or seen == self.own[: len(seen)], f"{seen}: a hole"


@dataclass(frozen=True)
class Case:
    """Who takes part."""

    openers: str = "a"
    in_flight: int = 2
    """Of the old writer."""
    wanted: int = 2
    """In flight, of each opener."""
    batches: int = 2
    """Written by the old writer, each by a thread of its own."""
    ack: str = "prefix"
    before: int = 0
    """Batches that stand in the log already, acknowledged."""
    folds: bool = False
    collects: bool = False
    """After the fold."""
    time_passes: bool = False
    """A grace passes at any moment, or never: leases lapse, and what is slow must be proved."""
    ends: set | None = field(default=None, compare=False)
    """Where given, all ends are put there: the log, and what was told."""

    def __call__(self, sim):
        """Run it; AssertionError if something does not hold."""
        objects, opened, rows = prepared(self.in_flight, self.before, self.ack)
        for key, body in objects.items():
            sim.bucket.put(key, body)
        told = Told(self.ack, opened.epoch, rows, self.batches)
        sim.witness, sim.recall = told.state, told.recall
        old = old_writer(sim, told, opened, self)
        for name in self.openers:
            opener(sim, told, name, self)
        if self.folds:
            folder(sim, self)
        if self.time_passes:
            sim.let_time_pass(2 * opened.tail.manifest.grace_ms / 1000, old)
        sim.mortal = lambda process: process.name != "folder"
        sim.run()
        log = [(info.key, sim.bucket.get(info.key)) for info in sim.bucket.list(NAMES.wal)]
        with Database(sim.bucket).writer(NAME) as writer:
            told.check(dict(writer.scan()))
        if self.ends is not None:
            self.ends.add((tuple(log), *told.state()))

    @property
    def footprint(self):
        if not self.collects:
            return NOBODY_DELETES
        return BATCHES_GO if self.time_passes else replace(BATCHES_GO, **LEASES_DO_NOT_MATTER)


@lru_cache
def prepared(in_flight, before, ack):
    """Return the objects of a namespace that has a writer, its opening, and its rows' LSNs."""
    bucket = MemoryStore()
    agree_on_cas(bucket)
    Publisher(bucket, NAMES).create(new_namespace(DEFAULT_SCHEMA, in_flight))
    writer = Database(bucket).writer(NAME, max_parallel_writes=in_flight, ack=ack)
    told = Told(ack, 0, {}, 0)
    for number in range(before):
        told.write(writer, b"before-%d" % number)
    objects = {info.key: bucket.get(info.key) for info in bucket.list()}
    return objects, writer._committer.opened, told.answers


class Reopened:
    """In the place of an opening that is not under study: gives what a real one found."""

    def __init__(self, opened, store, segments):
        tail = Tail(opened.tail.manifest, segments)
        while tail.next_lsn < opened.tail.next_lsn:
            key = NAMES.wal_object(tail.next_lsn)
            tail.take(WalObject.decode(store.get(key), key))
        self._opened = replace(opened, tail=tail)

    def open(self):
        return self._opened


def database_of(node):
    """Return a database that knows its bucket and the head already: fewer steps to explore."""
    # Reads have no faults here, so that of the usual wrappers only the read-back is needed.
    db = Database(ReadBack(node.raw_store()))
    db._proved = True
    publisher = Publisher(db.store, NAMES, metrics=db.metrics)
    publisher.heads.find()
    db._ensure = lambda *_: publisher
    return db


def old_writer(sim, told, opened, case):
    """Start the writer that is to be fenced, with all that it may have in flight."""
    node = sim.process("old")

    def start():
        db = database_of(node)
        with mock.patch.object(
            taking, "WriterOpening", lambda store, _, __, s, **___: Reopened(opened, store, s)
        ):
            writer = db.writer(
                NAME, max_parallel_writes=case.in_flight, group_bytes_max=1, ack=case.ack
            )
        for number in range(1, case.batches + 1):
            name = b"old-%d" % number
            node.spawn(lambda name=name: work(writer, name), f"client-{number}")

    def work(writer, name):
        with suppress(*GAVE_UP):
            told.write(writer, name)

    sim.prepare(node, start)
    return node


def opener(sim, told, name, case):
    """Start a process that takes the role and writes."""
    node = sim.process(name)

    def work(db):
        with suppress(*GAVE_UP):
            writer = db.writer(
                NAME, max_parallel_writes=case.wanted, group_bytes_max=1, ack=case.ack
            )
            found = tuple(sorted(key for key, _ in writer.scan()))
            told.found[name.encode()] = writer._committer.opened.epoch, found
            told.write(writer, name.encode())

    sim.prepare(node, lambda: _start(node, work))


def folder(sim, case):
    """Start a fold, and what collects the log after it.

    A collector that comes before the fold has published finds nothing to do, so that one
    process for both leaves nothing out.
    """
    node = sim.process("folder")

    def work(db):
        with suppress(*GAVE_UP):
            fold(db, NAME)
            if case.collects:
                collect(db, honours_time=case.time_passes)

    sim.prepare(node, lambda: _start(node, work))


def _start(node, work):
    db = database_of(node)
    node.spawn(lambda: work(db))


def collect(db, *, honours_time):
    """Collect the log by the rule of the protocol.

    Of kind `batches` only; below the head's floor, less the one just below it; not what a lease
    holds that has not lapsed; and only a grace after the floor was moved. Without time, both the
    grace and the leases are over from the start.
    """
    store = db.store
    head = db._ensure().heads.find().manifest
    now_s = store.now() if honours_time else float("inf")
    if now_s * 1000 < head.published_at_ms + head.grace_ms:
        return
    floor = min([head.wal_floor, *(leased_floors(store, now_s) if honours_time else ())])
    for info in store.list(NAMES.wal):
        if number_of(info.key) < floor - 1 and not _stays(store.get(info.key)):
            store.delete(info.key)


def leased_floors(store, now_s):
    """Yield the floors that leases hold."""
    for info in store.list(NAMES.leases):
        with suppress(NotFoundError):
            lease = msgspec.json.decode(store.get(info.key), type=LeaseRecord)
            if info.last_modified_s + lease.ttl_ms / 1000 > now_s:
                yield lease.wal_floor
