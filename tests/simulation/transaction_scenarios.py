"""Transactions under the simulator: random concurrent ones, with takeovers and folds.

What must hold: what committed is as if it had run one by one in the order of the LSNs. So every
read of a committed transaction, of keys and of ranges, rows that were not there included, is
the state after the transactions before it in the log. That also means that reads and writes
never depend on each other in a circle; the graph is built and checked on its own.
"""

from contextlib import suppress

from reef.engine.handles.database import Database
from reef.errors import ConflictError, OutcomeUnknownError, ReefError
from reef.jobs import fold
from reef.manifest.head import HeadFinder, newest_incarnation
from reef.paths import Namespace
from tests.support.proven_buckets import remember_probe

NAME = "accounts"
KEYS = ("a", "b", "c", "d")
START = object()


class Attempt:
    """One transaction: its reads and writes, and its outcome."""

    def __init__(self, name):
        self.name = name
        self.reads = []
        self.writes = {}
        self.place = None
        self.unknown = False

    def run(self, writer, choose):
        """Do some random reads and writes; every value that is written is unique."""
        with writer.transaction() as tx:
            for step in range(1 + choose(4)):
                self._step(tx, step, choose)
        if tx.receipt is not None:
            self.place = (tx.receipt.lsn, tx.receipt.index)

    def _step(self, tx, step, choose):
        key = KEYS[choose(len(KEYS))]
        match choose(4):
            case 0:
                self.reads.append(((key, key + "\0"), {key: tx.get(key)}, dict(self.writes)))
            case 1:
                start, end = sorted((key, KEYS[choose(len(KEYS))]))
                seen = {k.decode(): v for k, v in tx.scan(start, end + "\0")}
                self.reads.append(((start, end + "\0"), seen, dict(self.writes)))
            case 2:
                value = f"{self.name}.{step}".encode()
                tx.put(key, value)
                self.writes[key] = value
            case 3:
                tx.delete(key)
                self.writes[key] = None


def client(node, writer, attempts, number):
    """Run some transactions, one after the other, and record their outcomes."""

    def choose(count):
        return int(node.runtime.uniform(0, count)) % count

    for turn in range(3):
        attempt = Attempt(f"{node.name}.{number}.{turn}")
        attempts.append(attempt)
        attempt.unknown = True  # until it is known: the process may crash before
        try:
            attempt.run(writer, choose)
            attempt.unknown = False
        except ConflictError:
            attempt.unknown = False
        except OutcomeUnknownError as error:
            attempt.place = (error.receipt.lsn, error.receipt.index)
            return
        except ReefError:
            attempt.unknown = False
            return


def concurrent_transactions(sim, **settings):
    """Two processes, the second fences the first, three clients each; and a fold."""
    remember_probe(sim.bucket)
    attempts = []
    for name, delay_s in (("w1", 0.0), ("w2", 3.0)):
        node = sim.process(name)

        def serve(node=node, delay_s=delay_s):
            node.runtime.sleep(node.runtime.uniform(0.0, delay_s))
            with suppress(ReefError):
                writer = Database(node.store()).writer(NAME, **settings)
                for number in range(3):
                    node.spawn(lambda n=number: client(node, writer, attempts, n), f"c{number}")

        node.spawn(serve)
    folder = sim.process("folder")

    def fold_twice():
        for _ in range(2):
            folder.runtime.sleep(folder.runtime.uniform(0.0, 3.0))
            with suppress(ReefError):
                fold(Database(folder.store()), NAME)

    folder.spawn(fold_twice)
    if getattr(sim, "has_lives", False):
        dropper = sim.process("dropper")
        dropper.spawn(lambda: drop_some(sim, dropper))
    sim.run()
    check(sim, attempts)


def drop_some(sim, node):
    """Drop the name, and bring it back, create it again, or leave that to the writers."""
    db = Database(node.store())
    for _ in range(2):
        node.runtime.sleep(node.runtime.uniform(0.0, 4.0))
        with suppress(ReefError):
            db.drop(NAME)
            node.runtime.sleep(node.runtime.uniform(0.0, 2.0))
            match sim.choices.pick(3):
                case 0:
                    db.undrop(NAME)
                case 1:
                    db.create(NAME)


def first_lsns(bucket):
    """Return the first LSN of each life of the name but the first: it begins without rows."""
    last = newest_incarnation(bucket, NAME).incarnation
    chains = [HeadFinder(bucket, Namespace(NAME, number)) for number in range(2, last + 1)]
    return [chain.find(dropped=True).manifest.wal_base for chain in chains]


def check(sim, attempts):
    """Apply the committed transactions again, one by one, in the order of the log."""
    calm = Database(sim.bucket)
    with calm.writer(NAME) as writer:
        final = {k.decode(): v for k, v in writer.scan()}
        landed = [a for a in attempts if a.place and (not a.unknown or _landed(writer, a, final))]
    landed.sort(key=lambda attempt: attempt.place)
    assert len({a.place for a in landed}) == len(landed), "two batches in one place"
    if any(a.unknown for a in attempts):
        # Its process crashed before the outcome: the transaction may be anywhere in the log.
        assert no_circle([a for a in landed if not a.unknown])
        return
    state, lives = {}, first_lsns(sim.bucket)
    for attempt in landed:
        while lives and lives[0] <= attempt.place[0]:
            state, lives = {}, lives[1:]
        assert_reads(attempt, state)
        state = apply(state, attempt.writes)
    assert ({} if lives else state) == final
    assert no_circle(landed)


def _landed(writer, attempt, final):
    """Whether an attempt with an unknown end shows in the log at rest."""
    return any(
        value is not None and final.get(key) == value for key, value in attempt.writes.items()
    )


def assert_reads(attempt, state):
    """Check that every read is the state before, with the transaction's own writes."""
    for (start, end), seen, written in attempt.reads:
        expected = {k: v for k, v in apply(state, written).items() if start <= k < end}
        found = {k: v for k, v in seen.items() if v is not None}
        assert found == expected, f"{attempt.name} at {attempt.place}: {found}, not {expected}"


def apply(state, writes):
    """Return the state after some writes."""
    return {k: v for k, v in {**state, **writes}.items() if v is not None}


def no_circle(attempts):
    """Whether reads-from and overwrites relations are consistent with one order."""
    writer_of = {v: a for a in attempts for v in a.writes.values() if v is not None}
    order = {a: set() for a in attempts}
    for attempt in attempts:
        for _, seen, written in attempt.reads:
            for key, value in seen.items():
                source = writer_of.get(value)
                if value is None or key in written or source is None or source is attempt:
                    continue
                order[attempt].add(source)
                later = [a for a in attempts if key in a.writes and a.place > source.place]
                for overwriter in later:
                    if overwriter is not attempt:
                        order[overwriter].add(attempt)
    done = set()
    while order.keys() - done:
        free = [a for a in order if a not in done and order[a] <= done]
        if not free:
            return False
        done.update(free)
    return True
