"""Creating a dropped name again, explored: the real code, all orders, deaths and late requests.

A namespace was dropped. Creators ensure that the name exists; one of them may be a load that
fails and takes its namespace back; an undrop may come in between. Whatever happens:

- every creator that returned holds the publisher of an incarnation that was live at some time
  since it began;
- an undrop that returned the old namespace excludes a successor, and the other way round;
- a process without faults finds exactly one current incarnation afterwards, named by its chain,
  and completes it if its creator died.
"""

from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from reef.engine.namespaces import Namespaces
from reef.errors import ConflictError, NotFoundError, OutcomeUnknownError, UnavailableError
from reef.formats.manifest import Dropped, NamespaceState, decode_successor
from reef.formats.schema import DEFAULT_SCHEMA
from reef.manifest.edits import new_namespace
from reef.manifest.head import HeadFinder, Publisher, locate, newest_incarnation
from reef.paths import Namespace, number_of
from reef.stores import ReadBack, agree_on_cas
from reef.stores.memory import MemoryStore
from reef.telemetry import Metrics
from reef.testing import Chaos, Footprint

NAME = "n"
NAMES = Namespace(NAME)
EXPECTED_ERRORS = (ConflictError, NotFoundError, OutcomeUnknownError, UnavailableError)
NOTHING_GOES = Footprint(immutable=lambda key, _: True)


def chaos(crashes, late):
    """Return so many deaths and so many late requests."""
    return Chaos(
        crash=float(crashes > 0),
        crashes_max=crashes,
        late=float(late > 0),
        faults_max=late,
        latency_s=(0.0, 0.0),
    )


@lru_cache
def prepared():
    """Return the objects of a dropped namespace."""
    bucket = MemoryStore()
    agree_on_cas(bucket)
    publisher = Publisher(bucket, NAMES)
    publisher.create(new_namespace(DEFAULT_SCHEMA))
    publisher.publish(
        lambda head: msgspec.structs.replace(
            head, state=NamespaceState.DROPPED, dropped=Dropped(0, 3, ("a", "b")), wal_floor=2
        )
    )
    return {info.key: bucket.get(info.key) for info in bucket.list()}


class Seen:
    """The results that processes got."""

    def __init__(self):
        self.results = {}

    def state(self):
        """Return all of it, for the exploration."""
        return tuple(sorted(self.results.items()))

    def recall(self, states):
        """Remember the results of several processes."""
        for results in states:
            self.results.update(results)


@dataclass(frozen=True)
class Recreating:
    """Who takes part."""

    creators: str = "ab"
    undrops: bool = False
    fails: bool = False
    """Whether the first creator is a load that takes its namespace back."""
    footprint = NOTHING_GOES

    def __call__(self, sim):
        """Run it; AssertionError if something does not hold."""
        for key, body in prepared().items():
            sim.bucket.put(key, body)
        seen = Seen()
        sim.witness, sim.recall = seen.state, seen.recall
        for name in self.creators:
            self.start(sim, name, lambda names, name=name: self.create(names, seen, name))
        if self.undrops:
            self.start(sim, "undrop", lambda names: self.undrop(names, seen))
        sim.run()
        self.check(sim, seen)

    def start(self, sim, name, act):
        """Start a process with a store of its own."""
        node = sim.process(name)

        def prepare():
            names = Namespaces(ReadBack(node.raw_store()), Metrics())
            node.spawn(lambda: act(names))

        sim.prepare(node, prepare)

    def create(self, names, seen, name):
        """Ensure that the name exists; a load that fails then takes its namespace back."""
        fails = self.fails and name == self.creators[0]
        with suppress(*EXPECTED_ERRORS):
            publisher = names.ensure(NAME, DEFAULT_SCHEMA, made_for=name if fails else "")
            seen.results[name] = publisher.heads.names.incarnation
            if fails and publisher.heads.find().manifest.made_for == name:
                end = publisher.heads.found.manifest.wal_base + 1
                names.drop_if_unused(publisher.heads.names, name, end, ("x",))

    def undrop(self, names, seen):
        """Bring the old one back, if it is not too late."""
        with suppress(*EXPECTED_ERRORS):
            seen.results["undrop"] = names.undrop(NAME).incarnation

    def check(self, sim, seen):
        """Compare the results with those of a process without faults."""
        calm = Namespaces(sim.bucket, Metrics())
        recorded = {number_of(info.key) for info in sim.bucket.list(NAMES.successors)}
        chain = {}
        for number in (1, *sorted(recorded)):
            try:
                manifest = HeadFinder(sim.bucket, NAMES.at(number)).find(dropped=True).manifest
            except NotFoundError:
                continue
            chain[number] = manifest
            assert manifest.incarnation == number
            if manifest.successor is not None:
                assert manifest.state is NamespaceState.DROPPED, "live, and replaced"
        newest = max(chain)
        assert set(chain) == set(range(1, newest + 1)), "an incarnation without a predecessor"
        for number in range(1, newest):
            assert chain[number].successor is not None
        for number in recorded:
            key = NAMES.successor(number)
            record = decode_successor(sim.bucket.get(key), key)
            assert chain[number - 1].successor == record, "the record is not the announced one"
        if seen.results.get("undrop") == 1:
            assert chain[1].state is NamespaceState.LIVE
            assert newest == 1
        for name, number in seen.results.items():
            assert number in chain, f"{name} holds an incarnation that is not there"
        found = calm.ensure(NAME, DEFAULT_SCHEMA).heads
        assert found.names == newest_incarnation(sim.bucket, NAME)
        assert locate(sim.bucket, NAME).names == found.names
        if not self.fails:
            # Nothing is dropped here: the created one is current.
            assert all(n == found.names.incarnation for n in seen.results.values())
