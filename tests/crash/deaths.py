"""All buckets that crashes of a process can leave, from one run of it.

A crashed process leaves the bucket as it is at that point, and nothing else. So it need not be
crashed: at every yield point the objects of the bucket are recorded, with the operations that were
acknowledged by then. Most yield points are between two writes and leave the same objects: each
bucket is kept once, with all acknowledgements that were given in it. `test_matrix` shows that real
crashes (`reef.testing.crash_points`) leave exactly these.
"""

from dataclasses import dataclass, field

import reef
from reef.stores import agree_on_cas
from reef.testing import Simulation
from tests.crash.operations import Hand, Ledger

VICTIM = "victim"


@dataclass(frozen=True)
class Death:
    """The bucket that a crash leaves, and the acknowledgements before it."""

    time_s: float
    objects: tuple[tuple[str, bytes, float], ...]
    """Names, bytes and dates."""
    yield_points: list[str] = field(default_factory=list)
    """Yield points at which a crash leaves this bucket."""
    ledgers: dict[str, Ledger] = field(default_factory=dict)
    """Acknowledgements up to those points."""
    facts: dict[str, object] = field(default_factory=dict)

    @property
    def where(self):
        return f"after a crash at {self.yield_points[0]}"

    def restore(self):
        """Return a world that continues from here."""
        world = World()
        for key, body, date_s in sorted(self.objects, key=lambda one: one[2]):
            world.sim.scheduler.now_s = date_s
            world.sim.bucket.put(key, body)
        world.sim.scheduler.now_s = self.time_s
        *_, last = self.ledgers.values()
        world.ledger, world.facts = last.copy(), dict(self.facts)
        return world


def contents(bucket):
    """Return all objects of a bucket: names, bytes and dates."""
    return tuple((info.key, bucket.get(info.key), info.last_modified_s) for info in bucket.list())


class Watched(Simulation):
    """Notes what each death of the victim would leave."""

    def __init__(self):
        super().__init__(0)
        self.ledger = Ledger()
        self.deaths: dict[object, Death] = {}

    def yield_point(self, process, kind, detail):
        super().yield_point(process, kind, detail)
        if process.name != VICTIM:
            return
        tags = tuple((info.key, info.tag) for info in self.bucket.list())
        if tags not in self.deaths:
            self.deaths[tags] = Death(self.scheduler.now_s, contents(self.bucket))
        death = self.deaths[tags]
        death.yield_points.append(f"{kind} {detail}")
        death.ledgers.setdefault(repr(self.ledger), self.ledger.copy())


class World:
    """A bucket, a clock, and a process without faults."""

    def __init__(self, sim=None):
        self.sim = sim or Simulation(0)
        self.ledger = Ledger()
        self.facts = {}

    def hand(self, db, runtime):
        return Hand(db, self.ledger, runtime.sleep, self.facts)

    def calmly(self, call):
        """Run a call to its end, without any yield point."""
        node = self.sim.process("calm")
        errors = []

        def run():
            try:
                agree_on_cas(self.sim.bucket)
                call(self.hand(reef.Database(self.sim.bucket), node.runtime))
            except Exception as error:  # raised again outside of the simulation
                errors.append(error)

        node.spawn(run)
        self.sim.run()
        if errors:
            raise errors[0]

    def close(self):
        self.sim.close()


def play(operation, sim):
    """Run the preparation of an operation, and its work in the victim."""
    world = World(sim)
    world.ledger = sim.ledger if isinstance(sim, Watched) else world.ledger
    world.calmly(operation.prepare)
    node = sim.process(VICTIM)
    node.spawn(lambda: operation.work(world.hand(reef.Database(node.store()), node.runtime)))
    sim.run()
    return world


def deaths_of(operation):
    """Return the buckets that crashes of an operation leave, and its named points."""
    sim = Watched()
    try:
        world = play(operation, sim)
        for death in sim.deaths.values():
            death.facts.update(world.facts)
        points = {step.detail for step in sim.trace if step.kind == "point"}
        return list(sim.deaths.values()), points
    finally:
        sim.close()
