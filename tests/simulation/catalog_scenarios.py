"""The catalog under the simulator: random concurrent transactions of several processes.

Compactors, collectors and recoverers run concurrently, with retention so short that everything
unpinned is deleted. Invariants, under crashes, stalls and lost responses:

- the head's chain is the order; applying it gives the rows at the end;
- a transaction with the outcome "committed" is on the chain, once; one with "conflict" is not; and
  none is on it twice, rebased or not;
- every read, of keys and of ranges, was that of the session's snapshot, and for what committed
  that of everything before it on the chain, rows that were not there included; so reads and
  writes never depend on each other in a circle;
- a session sees whatever was acknowledged before it began;
- nothing that a session needs is collected while its lease lives.
"""

from contextlib import suppress
from dataclasses import replace

from reef.catalog import Catalog, Retention
from reef.errors import (
    ConflictError,
    CorruptionError,
    ErrorKind,
    NotFoundError,
    OutcomeUnknownError,
    ReefError,
)
from tests.simulation.transaction_scenarios import apply, assert_reads, no_circle
from tests.support.proven_buckets import remember_probe

KEYS = ("a", "b", "c", "d")
SHORT = Retention(checkpoints_last=1, checkpoints_min_age_s=0.0, grace_s=0.3, lease_ttl_s=3.0)


class Attempt:
    """One transaction: its reads and writes, its snapshot, and its outcome."""

    def __init__(self, name, history):
        self.name = name
        self.history = history
        self.reads = []
        self.writes = {}
        self.reported = "nothing"
        self.snapshot = None
        self.session = None
        self.must_see = history.acknowledged
        self.place = None

    def run(self, catalog, choose):
        """Do some random reads and writes; every value that is written is unique."""
        with catalog.session_write() as session:
            self.begin(session)
            for step in range(1 + choose(4)):
                self.step(session, step, choose)
            receipt = session.commit()
        self.committed(receipt.txn_id)

    def begin(self, session):
        """Record the snapshot of the session."""
        self.snapshot = session.snapshot.txn_id
        self.session = session
        self.history.attempts[session._lease.id] = self

    def committed(self, txn_id):
        """Record its acknowledgement; transactions that begin later must see it."""
        self.reported = "committed"
        if self.writes:
            self.history.acknowledged = max(self.history.acknowledged, txn_id)

    def failed(self, error):
        """Check that an object is missing only after a lease has expired."""
        if error.kind is ErrorKind.COLLECTED and self.session is not None:
            self.history.gone_too_soon |= not self.session._lease.expired
        self.history.gone_too_soon |= error.kind is ErrorKind.CORRUPTION

    def step(self, session, step, choose):
        key = KEYS[choose(len(KEYS))]
        match choose(5):
            case 0:
                self.reads.append(((key, key + "\0"), {key: session.get(key)}, dict(self.writes)))
            case 1:
                start, end = sorted((key, KEYS[choose(len(KEYS))]))
                seen = {k.decode(): v for k, v in session.scan_range(start, end + "\0")}
                self.reads.append(((start, end + "\0"), seen, dict(self.writes)))
            case 2:
                session.delete(key)
                self.writes[key] = None
            case _:
                value = f"{self.name}.{step}".encode()
                session.put(key, value)
                self.writes[key] = value


class History:
    """All attempts of a run, and every segment that was ever sent."""

    def __init__(self):
        self.all = []
        self.attempts = {}
        """By the id of the session's lease."""
        self.sent = {}
        """From a write id to the lease of its session and its records."""
        self.acknowledged = 0
        self.gone_too_soon = False

    def catalog(self, node, **settings):
        """Return a catalog of a process that records its commits."""
        catalog = Catalog(node.store(), retention=SHORT, **settings)
        segments = catalog._writable().segments
        create = segments.create

        def noted(segment):
            if not segment.abandoned:
                records = {k.decode(): v for k, v in segment.records.items()}
                self.sent[segment.write_id] = (segment.lease_id, records)
            return create(segment)

        segments.create = noted
        return catalog

    def check(self, bucket):
        """Run the chain again, one by one, and compare with all that was seen and reported."""
        assert not self.gone_too_soon, "something was collected under a living lease"
        calm = Catalog(bucket)
        head = calm._writable().heads.load().head
        assert len(head.recent) == head.last_segment_seq, "the history is longer than the list"
        states = [{}]
        placed = {}
        for place, write_id in enumerate(head.recent, 1):
            lease_id, records = self.sent[write_id]
            attempt = self.attempts[lease_id]
            assert attempt not in placed, f"{attempt.name} was applied twice"
            placed[attempt] = attempt.place = place
            assert_reads(attempt, states[-1])
            assert records == attempt.writes
            states.append(apply(states[-1], records))
        for attempt in self.all:
            self._check_outcome(attempt, placed, states)
        assert {k.decode(): v for k, v in calm.scan_latest()} == states[-1]
        assert no_circle(list(placed))
        assert not calm.verify().problems

    def _check_outcome(self, attempt, placed, states):
        if attempt.reported == "committed":
            assert attempt in placed or not attempt.writes, f"{attempt.name} is lost"
        if attempt.reported == "conflict":
            assert attempt not in placed, f"{attempt.name} was reported conflict, and is applied"
        if attempt.snapshot is not None:
            assert attempt.snapshot >= attempt.must_see, f"{attempt.name} began in the past"
            assert_reads(attempt, states[attempt.snapshot])


def client(node, history, number):
    """Run some transactions, one after the other, and record their outcomes."""

    def choose(count):
        return int(node.runtime.uniform(0, count)) % count

    try:
        catalog = history.catalog(node)
    except ReefError:
        return
    for turn in range(3):
        attempt = Attempt(f"{node.name}.{number}.{turn}", history)
        history.all.append(attempt)
        try:
            attempt.run(catalog, choose)
        except ConflictError as error:
            attempt.reported = "conflict"
            attempt.failed(error)
        except OutcomeUnknownError as error:
            with suppress(ReefError):
                settled = catalog.resolve(error.receipt)
                attempt.reported = "committed" if settled else "conflict"
        except ReefError as error:  # nothing was sent, or nothing arrived
            attempt.failed(error)
            attempt.reported = "conflict" if attempt.snapshot is None else "nothing"


def traveller(node, history):
    """Read old snapshots as sessions: they are as they were, or refused from the start."""
    try:
        catalog = history.catalog(node)
    except ReefError:
        return
    for turn in range(3):
        attempt = Attempt(f"{node.name}.{turn}", history)
        history.all.append(attempt)
        with suppress(ReefError):
            taken = catalog.snapshot()
            node.runtime.sleep(node.runtime.uniform(0.0, 2.0))
            try:
                session = catalog.session_at(taken)
            except NotFoundError:
                continue
            with session:
                attempt.begin(session)
                node.runtime.sleep(node.runtime.uniform(0.0, 2.0))
                try:
                    seen = {k.decode(): v for k, v in session.scan()}
                    attempt.reads.append((("", "~"), seen, {}))
                except (ConflictError, CorruptionError) as error:
                    attempt.failed(error)


def upkeep(node, history):
    """Compact, collect and recover at random times, repeatedly."""
    try:
        catalog = history.catalog(node)
    except ReefError:
        return
    for _ in range(5):
        node.runtime.sleep(node.runtime.uniform(0.0, 1.0))
        with suppress(ReefError):
            catalog.compactor(compact_after=1).run_once()
        with suppress(ReefError):
            catalog.compactor().compact_and_gc()


def concurrent_catalog_sessions(sim):
    """Three processes with two clients each, a reader, and two that keep the catalog tidy."""
    remember_probe(sim.bucket)
    history = History()
    for name in ("p1", "p2", "p3"):
        node = sim.process(name)
        for number in range(2):
            node.spawn(lambda node=node, n=number: client(node, history, n), f"c{number}")
    reader = sim.process("reader")
    reader.spawn(lambda: traveller(reader, history))
    for name in ("u1", "u2"):
        node = sim.process(name)
        node.spawn(lambda node=node: upkeep(node, history))
    sim.run()
    history.check(sim.bucket)


def catalog_without_if_match(sim):
    """The same on a store that has no If-Match: heads and plans are numbered."""
    sim.bucket.capabilities = replace(sim.bucket.capabilities, if_match=False)
    concurrent_catalog_sessions(sim)


def catalog_counter(sim):
    """Eight processes increment a counter through `transact`; one keeps the catalog tidy.

    The value counts each acknowledged increment, and each of an unknown outcome once or not.
    """
    remember_probe(sim.bucket)
    acknowledged, begun = [0], [0]

    def increment(session):
        session.put("n", b"%d" % (int(session.get("n") or 0) + 1))

    def count(node):
        catalog = Catalog(node.store(), retention=SHORT)
        for _ in range(2):
            begun[0] += 1
            with suppress(ReefError):
                catalog.transact(increment)
                acknowledged[0] += 1

    for number in range(8):
        node = sim.process(f"n{number}")
        node.spawn(lambda node=node: count(node))
    keeper = sim.process("upkeep")
    keeper.spawn(lambda: upkeep(keeper, History()))
    sim.run()
    value = int(Catalog(sim.bucket).get_latest("n") or 0)
    assert acknowledged[0] <= value <= begun[0], f"{value}, not {acknowledged[0]} to {begun[0]}"
