"""H14: a manifest whose PUT was held up may land in a generation that was used and swept since."""

import msgspec
import pytest

import reef
from reef.errors import FencedError, OutcomeUnknownError
from reef.formats.schema import DEFAULT_SCHEMA
from reef.manifest import edits
from reef.manifest.head import Publisher
from reef.paths import Namespace
from reef.stores import Wrapper
from reef.stores.memory import MemoryStore
from reef.telemetry import RequestMeter
from reef.testing import Simulation

NAME = "users"
USERS = Namespace(NAME)


class HeldUp(Wrapper):
    """Does something before the next PUT of a manifest goes out."""

    deed = None

    def create(self, key, body):
        if self.deed is not None and "/manifest/" in key:
            deed, self.deed = self.deed, None
            deed()
        return self.inner.create(key, body)


def overtake(bucket, rivals):
    """Others publish three generations, of which a sweep leaves the last."""
    publisher = Publisher(bucket, USERS)
    for number in range(3):
        changed = edits.raise_writer_epoch if number < rivals else grown
        last = publisher.publish(lambda head, changed=changed: changed(head, 1))
    last = publisher.publish(
        lambda head: msgspec.structs.replace(head, oldest_retained=head.generation)
    )
    for generation in range(1, last.generation):
        bucket.delete(USERS.manifest(generation))


def grown(head, _):
    """Publish something that has nothing to do with writers."""
    return edits.raise_compactor_epoch(head)


@pytest.mark.parametrize("rivals", [0, 1, 3], ids=["no epoch", "the same epoch", "higher epochs"])
def test_H14_an_epoch_that_was_raised_in_a_swept_generation_is_noticed(rivals):
    """H14: quick by every clock here, as on a machine that was paused: only the head proves it."""
    bucket = MemoryStore()
    reef.Database(bucket).writer(NAME).put("k", b"1")
    store = HeldUp(bucket)
    database = reef.Database(store)
    store.deed = lambda: overtake(bucket, rivals)
    with pytest.raises(FencedError):
        database.writer(NAME)
    assert reef.Database(bucket).writer(NAME).get("k") == b"1"


def test_H14_the_cost_of_checking_the_head_again():
    """H14: two listings of manifests per open, before and after the fences, and one of the log."""
    meter = RequestMeter()
    database = reef.open("memory://", meter=meter)
    database.writer(NAME).put("k", b"1")
    meter.reset()
    database.writer(NAME)
    assert meter.requests()["list"] == 3


def test_H14_a_slow_first_manifest_is_proved():
    """H14: another process created it meanwhile, and a sweep has deleted generation 1."""
    sim = Simulation(0)
    node = sim.process("slow")
    outcomes = []

    def rival():
        node.runtime.sleep(5)
        assert Publisher(sim.bucket, USERS).create(edits.new_namespace(DEFAULT_SCHEMA))
        overtake(sim.bucket, 1)

    def create():
        store = HeldUp(node.store())
        store.deed = rival
        try:
            outcomes.append(Publisher(store, USERS).create(edits.new_namespace(DEFAULT_SCHEMA)))
        except OutcomeUnknownError as error:
            outcomes.append(error)

    node.spawn(create)
    sim.run()
    sim.close()
    assert outcomes == [None], "the head names another first generation"
