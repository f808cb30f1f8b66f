"""Openings, explored: the real code, all orders, deaths and late requests within bounds.

An old writer has PUTs in flight; openers come, fence it, read what there is, and write one row
each; perhaps a fold and a sweep run concurrently. Invariants:

- every acknowledged write is there when a calm process opens later, in order;
- no write that was reported as failed is ever visible;
- the rows of an opener are all rows that older writers will ever have: none
  of them is acknowledged, or becomes visible, behind its back.

Parts that are not explored are prepared beforehand: the namespace, the old writer's own opening,
and the openers' first read of the head.
"""

from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from unittest import mock

import msgspec

from reef.engine.commit import open_writer
from reef.engine.handles.database import Database
from reef.engine.log.tail import Tail
from reef.engine.rows.batch import Batch
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
from reef.manifest.head import Publisher
from reef.manifest.roots import GenerationLease
from reef.paths import Namespace, number_of
from reef.stores import ReadBack, agree_on_cas
from reef.stores.memory import MemoryStore
from reef.testing import Chaos, Footprint

NAME = "n"
NAMES = Namespace(NAME)
LAST = b"last"
EXPECTED_ERRORS = (FencedError, UnavailableError, OutcomeUnknownError, ConflictError, NotFoundError)


def chaos(crashes, late):
    """Return so many deaths and so many late requests.

    A late request covers the lost outcome, when it lands at once, and the failed one, when it
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


NO_PROCESS_DELETES = Footprint(
    private=lambda key: key.startswith((NAMES.leases, NAMES.segments)),
    ignored=_is_lease,
    immutable=lambda key, _: not _is_lease(key),
)
BATCHES_GO = Footprint(
    private=lambda key: key.startswith(NAMES.segments),
    immutable=lambda key, body: _stays(body) if key.startswith(NAMES.wal) else not _is_lease(key),
    deleter=("folder", NO_PROCESS_DELETES),
)

LEASES_DO_NOT_MATTER = {
    "private": NO_PROCESS_DELETES.private,
    "ignored": NO_PROCESS_DELETES.ignored,
}


class Outcomes:
    """Outcomes of clients, and the rows that openers have read."""

    def __init__(self, ack, epoch, rows, batches):
        self.ack = ack
        self.epoch = epoch
        """Of the old writer."""
        self.own = [*rows, *(b"old-%d" % number for number in range(1, batches + 1))]
        """Its rows, in their order."""
        self.outcomes = dict(rows)
        self.found = {}

    def write(self, writer, name):
        """Write a row of its own and the shared one, and record the outcome."""
        try:
            self.outcomes[name] = writer.write(Batch().put(name, b"x").put(LAST, name)).lsn
        except OutcomeUnknownError:
            pass
        except ReefError:
            self.outcomes[name] = 0
            raise

    def state(self):
        """Return all of it, for the exploration."""
        return tuple(sorted(self.outcomes.items())), tuple(sorted(self.found.items()))

    def recall(self, states):
        """Restore the outcomes of several processes."""
        for outcomes, found in states:
            self.outcomes.update(outcomes)
            self.found.update(found)

    def check(self, rows):
        """Compare with the rows that a process without faults reads at the end."""
        visible = {name for name in rows if name != LAST}
        acknowledged = {name for name, lsn in self.outcomes.items() if lsn}
        rejected = {name for name, lsn in self.outcomes.items() if not lsn}
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
        reported = [(self.outcomes[name], name) for name in visible if self.outcomes.get(name)]
        if reported:
            newest = max(reported)[1]
            unknown = {name for name in visible if name not in self.outcomes}
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
    """Batches that are in the log already, acknowledged."""
    folds: bool = False
    collects: bool = False
    """After the fold."""
    time_passes: bool = False
    """A grace passes at any step, or never: leases expire, and slow writes must be proved."""
    ends: set | None = field(default=None, compare=False)
    """If given, all ends are added to it: the log, and the outcomes."""

    def __call__(self, sim):
        """Run it; AssertionError if something does not hold."""
        objects, opened, rows = prepared(self.in_flight, self.before, self.ack)
        for key, body in objects.items():
            sim.bucket.put(key, body)
        reported = Outcomes(self.ack, opened.epoch, rows, self.batches)
        sim.witness, sim.recall = reported.state, reported.recall
        old = old_writer(sim, reported, opened, self)
        for name in self.openers:
            opener(sim, reported, name, self)
        if self.folds:
            folder(sim, self)
        if self.time_passes:
            sim.let_time_pass(2 * opened.tail.manifest.grace_ms / 1000, old)
        sim.can_crash = lambda process: process.name != "folder"
        sim.run()
        log = [(info.key, sim.bucket.get(info.key)) for info in sim.bucket.list(NAMES.wal)]
        with Database(sim.bucket).writer(NAME) as writer:
            reported.check(dict(writer.scan()))
        if self.ends is not None:
            self.ends.add((tuple(log), *reported.state()))

    @property
    def footprint(self):
        if not self.collects:
            return NO_PROCESS_DELETES
        return BATCHES_GO if self.time_passes else replace(BATCHES_GO, **LEASES_DO_NOT_MATTER)


@lru_cache
def prepared(in_flight, before, ack):
    """Return the objects of a namespace that has a writer, its opening, and its rows' LSNs."""
    bucket = MemoryStore()
    agree_on_cas(bucket)
    Publisher(bucket, NAMES).create(new_namespace(DEFAULT_SCHEMA, in_flight))
    writer = Database(bucket).writer(NAME, max_parallel_writes=in_flight, ack=ack)
    reported = Outcomes(ack, 0, {}, 0)
    for number in range(before):
        reported.write(writer, b"before-%d" % number)
    objects = {info.key: bucket.get(info.key) for info in bucket.list()}
    return objects, writer._committer.opened, reported.outcomes


class Reopened:
    """Replaces an opening that is not explored, by the result of a real one."""

    def __init__(self, opened, store, segments):
        tail = Tail(opened.tail.manifest, segments)
        while tail.next_lsn < opened.tail.next_lsn:
            key = NAMES.wal_object(tail.next_lsn)
            tail.apply_object(WalObject.decode(store.get(key), key))
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


def old_writer(sim, reported, opened, case):
    """Start the writer that is to be fenced, with all that it may have in flight."""
    node = sim.process("old")

    def start():
        db = database_of(node)
        with mock.patch.object(
            open_writer, "WriterOpening", lambda store, _, __, s, **___: Reopened(opened, store, s)
        ):
            writer = db.writer(
                NAME, max_parallel_writes=case.in_flight, group_bytes_max=1, ack=case.ack
            )
        for number in range(1, case.batches + 1):
            name = b"old-%d" % number
            node.spawn(lambda name=name: work(writer, name), f"client-{number}")

    def work(writer, name):
        with suppress(*EXPECTED_ERRORS):
            reported.write(writer, name)

    sim.prepare(node, start)
    return node


def opener(sim, reported, name, case):
    """Start a process that takes the role and writes."""
    node = sim.process(name)

    def work(db):
        with suppress(*EXPECTED_ERRORS):
            writer = db.writer(
                NAME, max_parallel_writes=case.wanted, group_bytes_max=1, ack=case.ack
            )
            found = tuple(sorted(key for key, _ in writer.scan()))
            reported.found[name.encode()] = writer._committer.opened.epoch, found
            reported.write(writer, name.encode())

    sim.prepare(node, lambda: _start(node, work))


def folder(sim, case):
    """Start a fold, and a sweep of the log after it.

    A collector that comes before the fold has published finds nothing to do, so that one
    process for both leaves nothing out.
    """
    node = sim.process("folder")

    def work(db):
        with suppress(*EXPECTED_ERRORS):
            fold(db, NAME)
            if case.collects:
                collect(db, honours_time=case.time_passes)

    sim.prepare(node, lambda: _start(node, work))


def _start(node, work):
    db = database_of(node)
    node.spawn(lambda: work(db))


def collect(db, *, honours_time):
    """Collect the log by the rule of the protocol.

    Of kind `batches` only; below the head's floor, less the one just below it; not objects of a
    live lease; and only a grace after the floor was moved. Without time, both the
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
            lease = msgspec.json.decode(store.get(info.key), type=GenerationLease)
            if info.last_modified_s + lease.ttl_ms / 1000 > now_s:
                yield lease.wal_floor
