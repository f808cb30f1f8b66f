"""All that the deaths of a process can leave in a bucket, from one run of it.

What a process leaves when it dies is the bucket as it stands then, and nothing else. So it need
not be killed: at every seam that it passes the bucket is noted, with what had been answered by
then. Most seams lie between two writes, and leave the same: each bucket is kept once, with all
that was promised while it stood so.
`test_matrix` shows that real deaths (`reef.testing.crash_points`) leave just these.
"""

from dataclasses import dataclass, field

import reef
from reef.stores import agree_on_cas
from reef.testing import Simulation
from tests.crash.operations import Hand, Ledger

VICTIM = "victim"


@dataclass(frozen=True)
class Death:
    """The bucket that a death leaves, and what was answered before it."""

    time_s: float
    objects: tuple[tuple[str, bytes, float], ...]
    """Names, bytes and dates."""
    seams: list[str] = field(default_factory=list)
    """Where a death leaves just this."""
    ledgers: dict[str, Ledger] = field(default_factory=dict)
    """What was promised at those places."""
    facts: dict[str, object] = field(default_factory=dict)

    @property
    def where(self):
        return f"after a death at {self.seams[0]}"

    def restore(self):
        """Return a world that goes on from here."""
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

    def seam(self, process, kind, what):
        super().seam(process, kind, what)
        if process.name != VICTIM:
            return
        tags = tuple((info.key, info.tag) for info in self.bucket.list())
        if tags not in self.deaths:
            self.deaths[tags] = Death(self.scheduler.now_s, contents(self.bucket))
        death = self.deaths[tags]
        death.seams.append(f"{kind} {what}")
        death.ledgers.setdefault(repr(self.ledger), self.ledger.copy())


class World:
    """A bucket, a clock, and a process that works on them without a mishap."""

    def __init__(self, sim=None):
        self.sim = sim or Simulation(0)
        self.ledger = Ledger()
        self.facts = {}

    def hand(self, db, runtime):
        return Hand(db, self.ledger, runtime.sleep, self.facts)

    def calmly(self, call):
        """Run something to its end, with requests that are no seams."""
        node = self.sim.process("calm")
        errors = []

        def told():
            try:
                agree_on_cas(self.sim.bucket)
                call(self.hand(reef.Database(self.sim.bucket), node.runtime))
            except Exception as error:  # raised again outside, where a traceback tells more
                errors.append(error)

        node.spawn(told)
        self.sim.run()
        if errors:
            raise errors[0]

    def close(self):
        self.sim.close()


def play(operation, sim):
    """Prepare, and let the victim do its work."""
    world = World(sim)
    world.ledger = sim.ledger if isinstance(sim, Watched) else world.ledger
    world.calmly(operation.prepare)
    node = sim.process(VICTIM)
    node.spawn(lambda: operation.work(world.hand(reef.Database(node.store()), node.runtime)))
    sim.run()
    return world


def deaths_of(operation):
    """Return what the deaths of an operation leave, and the points that it passes."""
    sim = Watched()
    try:
        world = play(operation, sim)
        for death in sim.deaths.values():
            death.facts.update(world.facts)
        points = {step.what for step in sim.trace if step.seam == "point"}
        return list(sim.deaths.values()), points
    finally:
        sim.close()
