"""Namespaces that go and come back under writers, readers and sweeps (H48)."""

from contextlib import suppress

import msgspec

from reef.engine.database import Database
from reef.engine.registry import Registry
from reef.formats.schema import DEFAULT_SCHEMA
from reef.jobs import fold, sweep, verify
from reef.manifest.edits import new_namespace
from reef.manifest.publish import Publisher
from reef.paths import Namespace
from reef.stores import agree_on_cas
from tests.simulation.actors import GAVE_UP, GRACE_S

NAME = "users"
DROPPED_S = 8.0


class Lives:
    """What is known of the lives that a name has: each begins with a base of its own."""

    def __init__(self, sim):
        self.sim = sim
        self.acknowledged: dict[tuple[int, int], bytes] = {}
        """By base and LSN: the value of the key that is named after the LSN's writer."""
        agree_on_cas(sim.bucket)
        first = new_namespace(DEFAULT_SCHEMA)
        first = msgspec.structs.replace(first, grace_ms=int(GRACE_S * 1000))
        Publisher(sim.bucket, Namespace(NAME)).create(first)

    def start(self, name, act, *args):
        node = self.sim.process(name, skew_s=self.sim.choices.uniform(-600.0, 600.0))

        def run():
            for number in range(3):
                node.runtime.sleep(node.runtime.uniform(0.0, 12.0))
                with suppress(*GAVE_UP):
                    act(self, node, number, *args)

        node.spawn(run)
        return node


def database(node):
    """Return a process's database, with the registry that `reef.open` gives it."""
    store = node.store()
    return Database(store, registry=Registry(store))


def write(lives, node, number, parallel):
    """Open, write, wait, write again; note what was acknowledged, and in which life."""
    with database(node).writer(NAME, max_parallel_writes=parallel, background=False) as writer:
        base = writer.manifest.wal_base
        for turn in range(2):
            value = f"{node.name}-{number}-{turn}".encode()
            receipt = writer.put(value, value)
            lives.acknowledged[base, receipt.lsn] = value
            node.runtime.sleep(node.runtime.uniform(0.0, 20.0))


def drop(lives, node, number):
    """Drop, and half of the time bring it back."""
    db = database(node)
    db.drop(NAME)
    if lives.sim.choices.pick(2):
        node.runtime.sleep(node.runtime.uniform(0.0, 2 * DROPPED_S))
        db.undrop(NAME)


def keep_house(lives, node, number):
    """Fold and sweep, for as long as a dropped one needs to go."""
    db = database(node)
    for _ in range(3):
        with suppress(*GAVE_UP):
            fold(db, NAME)
        with suppress(*GAVE_UP):
            sweep(db, NAME, apply=True, force=True, retain_generations_s=0.0, dropped_s=DROPPED_S)
        node.runtime.sleep(node.runtime.uniform(0.0, 2 * GRACE_S))


def read(lives, node, number):
    """Whatever a reader shows is of one life: of the one that its manifest belongs to."""
    with database(node).reader(NAME) as reader:
        base = reader._tail.manifest.wal_base
        seen = {value for _, value in reader.scan()}
        if reader._tail.manifest.wal_base == base:
            others = {v for (b, _), v in list(lives.acknowledged.items()) if b != base}
            assert not seen & others, "rows of another life"


def names_come_and_go(sim):
    """Drops and undrops beside writers, readers and sweeps.

    In the end the last life has every row that was acknowledged in it, none of another one, and
    the registry says what the manifest says.
    """
    lives = Lives(sim)
    lives.start("w1", write, 1)
    lives.start("w2", write, 1 + sim.choices.pick(3))
    lives.start("d1", drop)
    lives.start("house", keep_house)
    lives.start("reader", read)
    sim.run()
    calm = Database(sim.bucket, registry=Registry(sim.bucket))
    assert calm.namespaces() == Database(sim.bucket).namespaces()
    with suppress(*GAVE_UP):
        calm.undrop(NAME)
    with calm.writer(NAME, background=False) as writer:
        base = writer.manifest.wal_base
        rows = {value for _, value in writer.scan()}
    assert not verify(calm, NAME, deep=True).problems
    own = {value for (life, _), value in lives.acknowledged.items() if life == base}
    assert own <= rows, "acknowledged in this life, and lost"
    others = set(lives.acknowledged.values()) - own
    assert not rows & others, "rows of another life"
    assert calm.namespaces() == [NAME]
