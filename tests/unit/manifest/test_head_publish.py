"""Publishing: one CAS decides, losers go again, and only `recent` proves a slow one."""

from copy import copy

import msgspec
import pytest

from reef.errors import (
    ConflictError,
    CorruptionError,
    ErrorKind,
    InternalError,
    InvalidInputError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
)
from reef.formats.manifest import Condemned, Manifest, SegmentEntry, encode_manifest
from reef.formats.schema import DEFAULT_SCHEMA
from reef.manifest import edits
from reef.manifest.head import HeadFinder, Publisher, PublishPolicy
from reef.manifest.invariants import check_loaded, check_next
from reef.manifest.roots import take_lease
from reef.paths import Namespace
from reef.stores import Outcome, ReadBack, Retry, RetryPolicy, Wrapper, WriteResult
from reef.stores.memory import MemoryStore
from reef.testing import Chaos, Fault, Faults, Rule, Simulation

USERS = Namespace("users")
QUICK = RetryPolicy(attempts_max=2, deadline_s=1.0, first_delay_s=0.001)


def raise_epoch(manifest):
    """An edit that always changes something."""
    return edits.raise_writer_epoch(manifest, 1)


@pytest.fixture
def bucket():
    """Give a bucket with one namespace at generation 1."""
    store = MemoryStore()
    Publisher(store, USERS).create(edits.new_namespace(DEFAULT_SCHEMA))
    return store


def entry(name, low=b"a", high=b"z", lsn=1, size=3):
    """Return a small segment's entry."""
    return SegmentEntry(
        name, 0, size, 0, 1, 0, low, high, lsn, lsn, 10, DEFAULT_SCHEMA.id, "00" * 16
    )


def test_generations_follow_each_other(bucket):
    """Each publish takes the next number, and remembers the ones before."""
    publisher = Publisher(bucket, USERS)
    for epoch in range(1, 6):
        published = publisher.publish(raise_epoch)
        assert (published.generation, published.writer_epoch) == (epoch + 1, epoch)
    assert [recent.generation for recent in published.recent] == [1, 2, 3, 4, 5, 6]
    assert HeadFinder(bucket, USERS).find().manifest == published


def test_an_edit_that_changes_nothing_publishes_nothing(bucket):
    """None means: it is as it should be."""
    assert Publisher(bucket, USERS).publish(lambda head: None).generation == 1
    assert len(list(bucket.list(USERS.manifests))) == 1


def test_creating_twice(bucket):
    """The second one loses."""
    assert Publisher(bucket, USERS).create(edits.new_namespace(DEFAULT_SCHEMA)) is None


def test_no_namespace():
    """There is nothing to publish on."""
    with pytest.raises(NotFoundError, match="no namespace users"):
        Publisher(MemoryStore(), USERS).publish(raise_epoch)


def test_many_publishers_lose_no_edit():
    """Five processes, four edits each: the epoch ends at exactly twenty."""
    sim = Simulation(3, chaos=Chaos(latency_s=(0.001, 0.05)))
    Publisher(sim.bucket, USERS).create(edits.new_namespace(DEFAULT_SCHEMA))
    for name in "abcde":
        node = sim.process(name)
        publisher = Publisher(node.store(), USERS)
        node.spawn(lambda p=publisher: [p.publish(raise_epoch) for _ in range(4)])
    sim.run()
    sim.close()
    assert HeadFinder(sim.bucket, USERS).find().manifest.writer_epoch == 20


class Rival(Wrapper):
    """Commits another manifest before each attempt."""

    def create(self, key, body):
        if "/manifest/" in key:
            Publisher(self.inner, USERS).publish(raise_epoch)
        return self.inner.create(key, body)


def test_H25_losing_for_ever_ends_in_a_typed_error(bucket):
    """H25: bounded losses, then ConflictError."""
    policy = PublishPolicy(losses_max=5, first_delay_s=0.0001)
    with pytest.raises(ConflictError, match="5 publishes of users were overtaken"):
        Publisher(Rival(bucket), USERS, policy=policy).publish(raise_epoch)


def test_a_lost_response_is_proved_by_recent(bucket):
    """The PUT landed and its response was lost: `recent` of the head proves it."""
    lost = Faults(bucket, [Rule(Fault.FAIL_AFTER, "create", "*/manifest/*", times=1)])
    assert Publisher(lost, USERS).publish(raise_epoch).writer_epoch == 1
    assert HeadFinder(bucket, USERS).find().manifest.generation == 2


@pytest.mark.parametrize(
    "error",
    [
        UnavailableError("away"),
        CorruptionError("damaged", object="x", offset=0),
        InvalidInputError("no", kind=ErrorKind.ACCESS_DENIED),
    ],
)
def test_a_publish_without_response_stays_unknown_if_the_head_cannot_be_read(bucket, error):
    """An error in reading the head says nothing about the PUT, which has landed here."""

    class Refuses(Wrapper):
        def list(self, prefix="", start_after=""):
            if refuses:
                raise error
            return self.inner.list(prefix, start_after)

    refuses = []
    lost = Faults(bucket, [Rule(Fault.FAIL_AFTER, "create", "*/manifest/*", times=1)])
    publisher = Publisher(Refuses(lost), USERS)
    publisher.heads.find()
    refuses.append(True)
    with pytest.raises(OutcomeUnknownError) as caught:
        publisher.publish(raise_epoch)
    assert caught.value.__cause__ is error
    assert HeadFinder(bucket, USERS).find().manifest.writer_epoch == 1


def test_a_publish_that_never_arrived_is_unknown(bucket):
    """Nothing proves it, so nothing is claimed."""
    never = Faults(bucket, [Rule(Fault.FAIL_BEFORE, "create", "*/manifest/*")])
    store = ReadBack(Retry(never, QUICK), QUICK)
    with pytest.raises(OutcomeUnknownError) as caught:
        Publisher(store, USERS).publish(raise_epoch)
    assert caught.value.context["generation"] == 2


@pytest.mark.parametrize("collected", [False, True])
def test_H14_a_publish_that_stalled_past_the_grace(collected):
    """H14: it lands, even in a slot that was used and collected: only `recent` decides."""
    sim = Simulation(0)
    Publisher(sim.bucket, USERS).create(edits.new_namespace(DEFAULT_SCHEMA))
    slow, quick = sim.process("slow"), sim.process("quick")
    outcome = []

    class Stalls(Wrapper):
        def create(self, key, body):
            self.runtime.sleep(3600)
            return self.inner.create(key, body)

    def publish_slowly():
        try:
            outcome.append(Publisher(Stalls(slow.store()), USERS).publish(raise_epoch))
        except OutcomeUnknownError as error:
            outcome.append(error)

    def overtake():
        quick.runtime.sleep(10)
        publisher = Publisher(quick.store(), USERS)
        for _ in range(3):
            publisher.publish(raise_epoch)
        if collected:
            quick.store().delete(USERS.manifest(2))

    slow.spawn(publish_slowly)
    quick.spawn(overtake)
    sim.run()
    sim.close()
    head = HeadFinder(sim.bucket, USERS).find().manifest
    assert outcome[0] == head
    assert (head.generation, head.writer_epoch) == (5, 4), "it lost its slot, and was applied once"


def test_H29_what_becomes_visible_must_be_there(bucket):
    """H29: a segment that is missing, or has another size, is not published."""
    publisher = Publisher(bucket, USERS)

    def add(head):
        return msgspec.structs.replace(head, segments=(entry("01S"),), wal_floor=2)

    with pytest.raises(NotFoundError):
        publisher.publish(add)
    bucket.put(USERS.segment("01S"), b"too long")
    with pytest.raises(InternalError, match="expected 3 bytes, found 8"):
        publisher.publish(add)
    bucket.put(USERS.segment("01S"), b"abc")
    assert publisher.publish(add).segments == (entry("01S"),)


def test_H47_a_head_that_was_cached_too_long_is_listed(bucket):
    """H47: after half a grace a probe's "not found" proves nothing: the numbers may be swept."""
    sim = Simulation(0, bucket=None)
    Publisher(sim.bucket, USERS).create(edits.new_namespace(DEFAULT_SCHEMA))
    node = sim.process("sleeper")
    finder = HeadFinder(node.store(), USERS)
    seen = []

    def sleep_and_find():
        seen.append(finder.find().manifest.generation)
        node.runtime.sleep(3600)
        seen.append(finder.find().manifest.generation)

    def publish_and_sweep():
        node.runtime.sleep(10)
        publisher = Publisher(sim.bucket, USERS)
        for _ in range(5):
            publisher.publish(raise_epoch)
        sim.bucket.delete_many([USERS.manifest(g) for g in (1, 2, 3, 4, 5)])

    node.spawn(sleep_and_find)
    node.spawn(publish_and_sweep, "rest")
    sim.run()
    sim.close()
    assert seen == [1, 6]


BROKEN = {
    "the floor is at or above the base": {"wal_floor": 0},
    "at least one PUT may be in flight": {"max_parallel_writes": 0},
    "there is a schema, and their ids rise": {"schemas": ()},
    "segments have distinct ids": {"segments": (entry("s"), entry("s")), "wal_floor": 2},
    "segments are below the floor": {"segments": (entry("s", lsn=9),)},
    "key and LSN bounds are in order": {"segments": (entry("s", b"z", b"a"),), "wal_floor": 2},
    "no live segment is condemned": {
        "segments": (entry("s"),),
        "wal_floor": 2,
        "condemned": (Condemned("segments/s.seg", 1, 0),),
    },
    "the grace period is not negative": {"grace_ms": -1},
}


@pytest.mark.parametrize("rule", BROKEN)
def test_invariants_have_names(bucket, rule):
    """A manifest that breaks one is neither published nor believed."""
    head = HeadFinder(bucket, USERS).find().manifest
    broken = msgspec.structs.replace(head, **BROKEN[rule])
    with pytest.raises(CorruptionError, match=rule):
        check_loaded(broken, "m")
    with pytest.raises(InternalError, match=rule):
        check_next(None, broken)


STEPS = {
    "generations follow each other": {"generation": 9},
    "epochs never fall": {"writer_epoch": 1},
    "the floor never falls": {"wal_floor": 4},
    "the base never moves": {"wal_base": 2},
    "the last LSN seen never falls": {"wal_id_last_seen": 1},
    "the oldest retained never falls": {"oldest_retained": 1},
    "a write id is used once": {"write_id": "old"},
}


@pytest.mark.parametrize("rule", STEPS)
def test_steps_have_invariants_too(rule):
    """What may not go back does not."""
    from reef.formats.manifest import Recent

    before = Manifest(
        generation=4,
        write_id="old",
        published_at_ms=0,
        writer_epoch=2,
        wal_floor=5,
        wal_id_last_seen=7,
        oldest_retained=2,
        recent=(Recent(4, "old", 0),),
    )
    after = msgspec.structs.replace(before, generation=5, write_id="new", **{})
    after = msgspec.structs.replace(after, **STEPS[rule])
    after = msgspec.structs.replace(after, recent=(Recent(after.generation, after.write_id, 0),))
    with pytest.raises(InternalError, match=rule):
        check_next(before, after)


def test_a_manifest_in_the_wrong_place_is_damage(bucket):
    """The object's name and its content must agree."""
    head = HeadFinder(bucket, USERS).find().manifest
    bucket.put(USERS.manifest(2), encode_manifest(head))
    with pytest.raises(CorruptionError, match="holds generation 1"):
        HeadFinder(bucket, USERS).find()


# --- leases ---------------------------------------------------------------------------


@pytest.mark.parametrize("if_match", [True, False])
def test_H22_a_reaped_lease_is_not_brought_back(bucket, if_match):
    """H22: a heartbeat after the reaping says so, and leaves no lease."""
    from dataclasses import replace

    store = Wrapper(bucket)
    store.capabilities = replace(bucket.capabilities, if_match=if_match)
    manifest = HeadFinder(bucket, USERS).find().manifest
    lease = take_lease(store, USERS, manifest, owner="me", ttl_s=60)
    lease.renew()
    (info,) = bucket.list(USERS.leases)
    bucket.delete(info.key)
    with pytest.raises(ConflictError, match="was reaped"):
        lease.renew()
    assert list(bucket.list(USERS.leases)) == []


@pytest.mark.parametrize("if_match", [True, False])
def test_a_lease_is_one_object_and_can_be_released(bucket, if_match):
    """Renewing leaves one lease, with the generation and floor that were read before it."""
    from dataclasses import replace

    store = Wrapper(bucket)
    store.capabilities = replace(bucket.capabilities, if_match=if_match)
    manifest = HeadFinder(bucket, USERS).find().manifest
    lease = take_lease(store, USERS, manifest, owner="me", ttl_s=60)
    for _ in range(3):
        lease.renew()
        assert len(list(bucket.list(USERS.leases))) == 1
    assert (lease.record.generation, lease.record.wal_floor) == (1, 1)
    lease.release()
    assert list(bucket.list(USERS.leases)) == []


def faulty_lease(bucket, if_match, *rules):
    """Take a lease over a store that goes wrong afterwards, as the rules say."""
    from dataclasses import replace

    faults = Faults(bucket)
    faults.capabilities = replace(bucket.capabilities, if_match=if_match)
    manifest = HeadFinder(bucket, USERS).find().manifest
    lease = take_lease(ReadBack(faults, QUICK), USERS, manifest, owner="me", ttl_s=60)
    faults.rules += rules
    return lease


LOST_RENEWALS = {
    "not sent": (True, Rule(Fault.FAIL_BEFORE, "replace", times=2)),
    "response lost": (True, Rule(Fault.FAIL_AFTER, "replace", times=2)),
    "new name not written": (False, Rule(Fault.FAIL_BEFORE, "put", times=1)),
    "new name without a response": (False, Rule(Fault.FAIL_AFTER, "put", times=1)),
    "old name not seen": (False, Rule(Fault.FAIL_BEFORE, "head", times=1)),
}


@pytest.mark.parametrize("which", LOST_RENEWALS)
@pytest.mark.parametrize("is_reaped", [False, True])
def test_H22_a_renewal_without_a_response_costs_no_lease(bucket, which, is_reaped):
    """H22: the next one finds out: it is renewed if it is there, and not brought back if not."""
    if_match, rule = LOST_RENEWALS[which]
    lease = faulty_lease(bucket, if_match, copy(rule))
    with pytest.raises(UnavailableError):
        lease.renew()
    if is_reaped:
        bucket.delete(USERS.lease(lease.record.id))
        with pytest.raises(ConflictError, match="was reaped"):
            lease.renew()
        return
    for _ in range(2):
        lease.renew()
    assert bucket.head(USERS.lease(lease.record.id))
    lease.release()


def test_H22_an_old_name_that_cannot_be_removed_is_left_to_expire(bucket):
    """H22: the lease is renewed all the same, under its new name."""
    lease = faulty_lease(bucket, False, Rule(Fault.FAIL_BEFORE, "delete", times=1))
    lease.renew()
    assert len(list(bucket.list(USERS.leases))) == 2


def test_H22_a_renewal_that_comes_late_is_not_taken_for_a_reaping(bucket):
    """H22: it lands between the check and the next try, whose tag is then an old one."""
    sent = []

    class Late(Wrapper):
        def replace(self, key, body, tag):
            """Hold the first one back, and let it through just before the second."""
            sent.append((key, body, tag))
            if len(sent) == 1:
                return WriteResult(Outcome.UNKNOWN)
            if len(sent) == 2:
                self.inner.replace(*sent[0])
            return self.inner.replace(key, body, tag)

    manifest = HeadFinder(bucket, USERS).find().manifest
    lease = take_lease(Late(bucket), USERS, manifest, owner="me", ttl_s=60)
    for _ in range(2):
        with pytest.raises(UnavailableError):
            lease.renew()
    lease.renew()
    assert len(list(bucket.list(USERS.leases))) == 1
