"""The engine under the simulator: writers, zombies, folds and readers on one namespace.

What must hold, whatever happens: every acknowledged write is readable by every later open, in
order; no write that was reported as failed is ever visible; a reader sees a prefix of the log.
"""

from contextlib import suppress

from reef.engine.database import Database
from reef.errors import (
    ConflictError,
    FencedError,
    NotFoundError,
    OutcomeUnknownError,
    ReefError,
    UnavailableError,
)
from reef.jobs import fold
from reef.stores import agree_on_cas

NAME = "users"
KEYS = ("a", "b", "c")
GAVE_UP = (FencedError, UnavailableError, OutcomeUnknownError, ConflictError, NotFoundError)


class History:
    """What clients were told, as opposed to what is in the bucket."""

    def __init__(self):
        self.acknowledged = {}
        self.unknown = {}
        self.rejected = set()
        self.seen = []

    def note(self, future, key, value):
        """Note the answer to a write that was not waited for."""
        try:
            receipt = future.result()
        except OutcomeUnknownError:
            return
        except ReefError:
            del self.unknown[value]
            self.rejected.add(value)
            return
        del self.unknown[value]
        self.acknowledged[value] = (receipt.lsn, key)

    def put(self, writer, key, value):
        """Write, and note the answer."""
        self.unknown[value] = key  # until told otherwise: the process may die before it is
        try:
            receipt = writer.put(key, value)
        except OutcomeUnknownError:
            raise
        except ReefError:
            del self.unknown[value]
            self.rejected.add(value)
            raise
        del self.unknown[value]
        self.acknowledged[value] = (receipt.lsn, key)

    def check(self, seen, everything=True):
        """The state of a later open, against what was told."""
        for key in KEYS:
            value = seen.get(key.encode())
            assert value not in self.rejected, f"{value} was reported as failed and is visible"
            told = [(lsn, v) for v, (lsn, k) in self.acknowledged.items() if k == key]
            if everything and told:
                last = max(told)[1]
                allowed = {last} | {v for v, k in self.unknown.items() if k == key}
                assert value in allowed, f"{key} is {value}, {last} was acknowledged last"


def _database(node):
    return Database(node.store())


def write_some(node, history, count, **settings):
    """Take the role, write, and stop at the first sign of trouble."""
    with suppress(*GAVE_UP):
        writer = _database(node).writer(NAME, **settings)
        for number in range(count):
            key = KEYS[number % len(KEYS)]
            history.put(writer, key, f"{node.name}-{number}".encode())


def fold_some(node, count):
    """Fold again and again, with pauses."""
    for _ in range(count):
        with suppress(*GAVE_UP):
            fold(_database(node), NAME)
        node.runtime.sleep(node.runtime.uniform(0.0, 5.0))


def read_some(node, history, count):
    """Refresh and look; nothing that was rejected may ever be seen, and time never goes back."""
    with suppress(*GAVE_UP):
        reader = _database(node).reader(NAME, refresh_interval_ms=0)
        last = 0
        for _ in range(count):
            seen = dict(reader.scan())
            assert reader.last_lsn >= last, "a reader went back in time"
            last = reader.last_lsn
            history.seen.append(seen)
            node.runtime.sleep(node.runtime.uniform(0.0, 3.0))


def writers_take_over(sim, **settings):
    """Two writers, one after the other and overlapping, with folds and a reader beside them."""
    agree_on_cas(sim.bucket)
    history = History()
    for name, delay_s in (("w1", 0.0), ("w2", 3.0)):
        node = sim.process(name, skew_s=sim.choices.uniform(-600.0, 600.0))

        def run(node=node, delay_s=delay_s):
            node.runtime.sleep(node.runtime.uniform(0.0, delay_s))
            write_some(node, history, 4, **settings)

        node.spawn(run)
    folder = sim.process("folder")
    folder.spawn(lambda: fold_some(folder, 2))
    reader = sim.process("reader")
    reader.spawn(lambda: read_some(reader, history, 3))
    sim.run()
    _check_at_rest(sim, history)


def _check_at_rest(sim, history):
    """A calm process opens what is left: it must work, and show what was acknowledged."""
    calm = Database(sim.bucket)
    with calm.writer(NAME) as writer:
        history.check(dict(writer.scan()))
        for key in KEYS:
            assert writer.get(key) == dict(writer.scan()).get(key.encode())
    fold(calm, NAME)
    history.check(dict(calm.reader(NAME).scan()))
    for seen in history.seen:
        history.check(seen, everything=False)


def write_pipelined(node, history, count, **settings):
    """Send without waiting, then gather the answers."""
    with suppress(*GAVE_UP):
        writer = _database(node).writer(NAME, **settings)
        sent = []
        for number in range(count):
            key, value = KEYS[number % len(KEYS)], f"{node.name}-{number}".encode()
            history.unknown[value] = key
            sent.append((key, value, writer.put(key, value, wait=False)))
            if number % 2:
                node.runtime.sleep(node.runtime.uniform(0.0, 0.02))
        for key, value, future in sent:
            history.note(future, key, value)


def pipelined_writers_take_over(sim, **settings):
    """The same with three PUTs in flight; a writer's own batches never swap."""
    agree_on_cas(sim.bucket)
    history = History()
    for name, delay_s in (("w1", 0.0), ("w2", 3.0)):
        node = sim.process(name)

        def run(node=node, delay_s=delay_s):
            node.runtime.sleep(node.runtime.uniform(0.0, delay_s))
            write_pipelined(
                node, history, 8, max_parallel_writes=3, group_bytes_max=100, **settings
            )

        node.spawn(run)
    folder = sim.process("folder")
    folder.spawn(lambda: fold_some(folder, 2))
    sim.run()
    _check_at_rest(sim, history)


def independent_writers_take_over(sim):
    """The same where each object is acknowledged as it lands."""
    pipelined_writers_take_over(sim, ack="independent")
