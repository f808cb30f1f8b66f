"""Rebase and collection of the catalog, explored: the real code, all orders, within bounds.

`Committing`: sessions that increment a counter, or put a key of their own and so can rebase, with
a compaction, a recoverer and a re-creation; crashes and late requests anywhere, with
heads of both kinds. Whatever happens: who was reported "committed" is in the state, unless all was
abandoned since, a conflicting one is not, and none is in it twice.

`Collecting`: sessions on the newest state and on old snapshots, begun, read and committed at any
point in time, with compactions and collections between every two of their steps. No time passes, so
that all leases live: no process may ever find an object missing, and all reads are right.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache

from reef.catalog import Catalog, Retention, commit
from reef.errors import (
    ConflictError,
    CorruptionError,
    NotFoundError,
    OutcomeUnknownError,
    ReefError,
    UnavailableError,
)
from reef.stores import ReadBack, agree_on_cas
from reef.stores.memory import MemoryStore
from reef.testing import Chaos, Footprint

AT_ONCE = Retention(checkpoints_last=1, checkpoints_min_age_s=0.0, grace_s=0.0)
MISHAPS = Chaos(crash=1, crashes_max=1, late=1, faults_max=1, latency_s=(0.0, 0.0))
CALM = Chaos(latency_s=(0.0, 0.0))


find_session_leases = commit.find_session_leases


def _find_leases(context, now_s):
    """Return the leases that a recovery sees: none if it is to race with living writers."""
    ignored = getattr(context, "ignores_leases", False)
    return [] if ignored else find_session_leases(context, now_s)


commit.find_session_leases = _find_leases


def _is_lease(key):
    return key.startswith("leases/")


NO_PROCESS_DELETES = Footprint(
    private=lambda key: key.startswith(("leases/", "checkpoints/")),
    ignored=_is_lease,
    immutable=lambda key, _: not _is_lease(key) and key != "HEAD.json",
)


class Outcomes:
    """The outcome of each process, and the rows that it has read."""

    def __init__(self):
        self.outcomes = {}

    def state(self):
        """Return all of it, for the exploration."""
        return tuple(sorted(self.outcomes.items()))

    def recall(self, states):
        """Restore the outcomes of several processes."""
        for outcomes in states:
            self.outcomes.update(outcomes)


@lru_cache
def prepared(commits, compacted, numbered):
    """Return the objects of a catalog, and the snapshots after each of its transactions."""
    bucket = MemoryStore()
    bucket.capabilities = replace(bucket.capabilities, if_match=not numbered)
    agree_on_cas(bucket)
    catalog = Catalog(bucket, cache=None, retention=AT_ONCE)
    snapshots = []
    for number in range(1, commits + 1):
        with catalog.session_write() as session:
            session.put("n", b"%d" % number)
            session.commit()
        if number in compacted:
            catalog.compactor().compact_once()
        snapshots.append(catalog.snapshot())
    return {info.key: bucket.get(info.key) for info in bucket.list()}, snapshots


def load(sim, commits, compacted, *, numbered=False):
    """Put a prepared catalog into the bucket of a run."""
    objects, snapshots = prepared(commits, compacted, numbered)
    sim.bucket.capabilities = replace(sim.bucket.capabilities, if_match=not numbered)
    for key, body in objects.items():
        sim.bucket.put(key, body)
    return snapshots


def catalog_of(node, **settings):
    """Return a catalog that has proved its bucket already: fewer steps to explore."""
    catalog = Catalog(ReadBack(node.raw_store()), cache=None, retention=AT_ONCE, **settings)
    catalog._writable()
    catalog._recovered = True
    return catalog


def start(sim, name, work):
    """Start a process with a catalog of its own."""
    node = sim.process(name)

    def prepare():
        catalog = catalog_of(node)
        node.spawn(lambda: work(catalog))

    sim.prepare(node, prepare)


@dataclass(frozen=True)
class Committing:
    """Who takes part in a race for the head."""

    counters: str = "ab"
    own_keys: str = "x"
    compacts: bool = False
    recovers: bool = False
    recreates: bool = False
    """Whether a process re-creates the catalog, at 0."""
    commits: int = 1
    numbered: bool = False
    """Whether the bucket has no If-Match."""
    footprint = NO_PROCESS_DELETES

    def __call__(self, sim):
        """Run it; AssertionError if something does not hold."""
        load(sim, self.commits, frozenset(), numbered=self.numbered)
        reported = Outcomes()
        sim.witness, sim.recall = reported.state, reported.recall
        for name in self.counters:
            start(sim, name, lambda catalog, name=name: self.increment(catalog, reported, name))
        for name in self.own_keys:
            start(sim, name, lambda catalog, name=name: self.put(catalog, reported, name))
        if self.compacts:
            start(sim, "compactor", lambda catalog: self.quietly(catalog.compactor().compact_once))
        if self.recovers:
            start(sim, "recoverer", self.recover)
        if self.recreates:
            start(sim, "recreate", lambda catalog: self.recreate(catalog, reported))
        sim.run()
        self.check(reported, {k.decode(): v for k, v in Catalog(sim.bucket).scan_latest()})
        finished = not self.recreates or "recreate" in reported.outcomes
        assert not finished or not Catalog(sim.bucket).verify().problems

    def increment(self, catalog, reported, name):
        """Read the counter, raise it, and leave a mark of one's own."""
        with suppress(ReefError), catalog.session_write() as session:
            session.put("n", b"%d" % (int(session.get("n")) + 1))
            session.put(f"did/{name}", b"")
            self.commit(session, reported, name)

    def put(self, catalog, reported, name):
        """Touch nothing that others touch: this never conflicts."""
        with suppress(ReefError), catalog.session_write() as session:
            session.put(f"did/{name}", b"")
            self.commit(session, reported, name)

    def commit(self, session, reported, name):
        """Commit, and record the outcome, if there is one."""
        try:
            session.commit()
            reported.outcomes[name] = "committed"
        except ConflictError:
            reported.outcomes[name] = "conflict"
        except OutcomeUnknownError:
            reported.outcomes[name] = "unknown"

    def recover(self, catalog):
        """Adopt an orphan on the head, as if all leases had expired."""
        catalog._writable().ignores_leases = True
        self.quietly(catalog.recover_orphans)

    def recreate(self, catalog, reported):
        """Re-create the catalog."""
        with suppress(ReefError):
            catalog.recreate(lambda: {"n": b"0", "did/recreate": b""})
            reported.outcomes["recreate"] = "committed"

    def quietly(self, call):
        with suppress(ReefError):
            call()

    def check(self, reported, state):
        """Compare the outcomes with the catalog."""
        did = {key.removeprefix("did/") for key in state if key.startswith("did/")}
        counted = len(did & set(self.counters)) + (0 if "recreate" in did else self.commits)
        assert int(state["n"]) == counted, f"{state}: applied twice, or lost"
        for name, outcome in reported.outcomes.items():
            is_recreated = "recreate" in did and name != "recreate"
            assert outcome != "committed" or name in did or is_recreated, f"{name} is lost"
            assert outcome != "conflict" or name not in did, f"{name} conflicted, and is there"
            free = name not in self.counters and not self.recreates
            assert outcome != "conflict" or not free, f"{name} conflicts with no other"


@dataclass(frozen=True)
class Collecting:
    """Who reads, who writes, and who tidies up."""

    readers: str = ""
    travellers: str = ""
    writers: str = ""
    commits: int = 3
    compacted: frozenset = frozenset({1, 2})
    at: int = 1
    """After which transaction the travellers' snapshot was taken."""
    collectors: str = "c"
    compacts: bool = True
    """Whether collectors compact first."""
    rounds: int = 1
    numbered: bool = False
    footprint = Footprint(private=lambda key: False)

    def __call__(self, sim):
        """Run it; AssertionError if something does not hold."""
        snapshots = load(sim, self.commits, self.compacted, numbered=self.numbered)
        reported = Outcomes()
        sim.witness, sim.recall = reported.state, reported.recall
        for name in self.readers:
            start(sim, name, lambda catalog, name=name: self.read(catalog, reported, name))
        for name in self.travellers:
            wanted = snapshots[self.at - 1]
            start(sim, name, lambda catalog, n=name, w=wanted: self.travel(catalog, reported, n, w))
        for name in self.writers:
            start(sim, name, lambda catalog, name=name: self.write(catalog, reported, name))
        for name in self.collectors:
            start(sim, name, self.collect)
        sim.run()
        for name, outcome in reported.outcomes.items():
            assert outcome != "gone", f"{name}: something is gone under a living lease"
            assert outcome in ("refused", "committed", self.expected(name)), f"{name}: {outcome}"
        report = Catalog(sim.bucket).verify()
        assert not report.problems, report.problems
        committed = sum(name in reported.outcomes for name in self.writers)
        assert 1 + committed <= report.keys <= 1 + len(self.writers)

    def expected(self, name):
        return b"%d" % (self.at if name in self.travellers else self.commits)

    def read(self, catalog, reported, name):
        """Begin at the newest state, and read."""
        with suppress(UnavailableError), catalog.session_read() as session:
            self.read_counter(session, reported, name)

    def travel(self, catalog, reported, name, wanted):
        """Go back to an old snapshot; to be refused is fine, to be disappointed later is not."""
        try:
            session = catalog.session_at(wanted)
        except NotFoundError:
            reported.outcomes[name] = "refused"
            return
        except UnavailableError:
            return
        with session:
            self.read_counter(session, reported, name)

    def read_counter(self, session, reported, name):
        """Read, and record the result."""
        try:
            reported.outcomes[name] = session.get("n")
        except (ConflictError, CorruptionError):
            reported.outcomes[name] = "gone"

    def write(self, catalog, reported, name):
        """Commit a key of one's own: over whatever was compacted and collected meanwhile."""
        with suppress(UnavailableError), catalog.session_write() as session:
            session.put(name, b"")
            try:
                session.commit()
                reported.outcomes[name] = "committed"
            except ConflictError:
                reported.outcomes[name] = "gone"
            except OutcomeUnknownError:
                pass

    def collect(self, catalog):
        """Compact, and go through all phases."""
        compactor = catalog.compactor()
        for _ in range(self.rounds):
            with suppress(ReefError):
                if self.compacts:
                    compactor.compact_once()
                compactor.gc_compute()
                compactor.gc_apply()
                compactor.gc_delete_and_reset()
