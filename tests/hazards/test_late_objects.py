"""Slots that are filled again after collection (H66, H67).

The root of all of these: a process stalls, its PUT lands in a slot whose object was folded and
collected meanwhile, and a reader of the log takes that object, or the EXISTS of another process's
resend, for the truth. Below the floor nothing counts, and a write in doubt is proved by the floor.
"""

import msgspec
import pytest

import reef
from reef.engine.log.log import Log
from reef.errors import NotFoundError, OutcomeUnknownError
from reef.formats.manifest import encode_manifest
from reef.formats.wal_object import Job, WalHeader, WalKind, WalObject
from reef.jobs import ingest
from reef.manifest.head import Publisher
from reef.stores import Outcome, Wrapper, WriteResult
from tests.support.sweep_world import GRACE_S, NAME, USERS, World


@pytest.fixture
def world():
    """A bucket on virtual time, with one row in the log."""
    world = World()
    with world.db.writer(NAME) as writer:
        writer.put("k", b"0")
    return world


class LostResponse(Wrapper):
    """A create that lands, then something happens for a long time, then the resend says EXISTS.

    So it is for a client with retries whose first response was lost.
    """

    def __init__(self, inner, part, does):
        super().__init__(inner)
        self.part, self.does, self.armed = part, does, False

    def create(self, key, body):
        if not self.armed or self.part not in key:
            return self.inner.create(key, body)
        self.armed = False
        assert self.inner.create(key, body).landed
        self.does(key)
        again = self.inner.create(key, body)
        assert again.outcome is Outcome.EXISTS, "the slot was filled again"
        winner = self.inner.get(key)
        if winner == body:
            return WriteResult(Outcome.CREATED, doubt=True)
        return WriteResult(Outcome.EXISTS, winner=winner, doubt=True)


def begin(store, lsn, kind=WalKind.BEGIN, **more):
    """Return the bytes of a stalled driver's object for a slot."""
    header = WalHeader(
        lsn=lsn,
        kind=kind,
        epoch=more.pop("epoch", 0),
        writer_id="stalled",
        write_id=store.runtime.ulid(),
        created_at_ms=int(store.runtime.wall_s() * 1000),
        job=more.pop("job", Job("stalled", key="stalled")),
        schema_id=1,
        **more,
    )
    return WalObject.encode(header)


def collect_and_refill(world, key, *, takeover):
    """Fold and collect a slot behind other writes, and let a stalled driver fill it again."""
    lsn = int(key.rsplit("/", 1)[1].removesuffix(".wal"))
    if takeover:
        with world.db.writer(NAME) as rival:
            rival.put("other", b"2")
    else:
        world.run(lambda: ingest(world.db, NAME, {"id": [b"x"], "value": [b"bulk"]}))
    world.fold()
    assert f"wal/{lsn:020}.wal" in world.sweep_twice()
    assert Log(world.bucket, USERS).fill(lsn, begin(world.bucket, lsn)).landed


@pytest.mark.parametrize("takeover", [False, True])
@pytest.mark.parametrize("keyed", [False, True])
def test_H66_a_batch_whose_slot_was_collected_and_filled_again(world, takeover, keyed):
    """H66: it counted, so it is neither sent again nor reported as fenced.

    Without a key nothing proves it, and the outcome is unknown; with one the window does.
    """
    store = LostResponse(
        world.bucket, "/wal/", lambda key: collect_and_refill(world, key, takeover=takeover)
    )
    writer = reef.Database(store).writer(NAME)
    store.armed = True
    batch, key = reef.Batch().put("k", b"v1"), "once" if keyed else None
    if keyed:
        assert writer.write(batch, idempotency_key=key).lsn == 4
    else:
        with pytest.raises(OutcomeUnknownError) as caught:
            writer.write(batch)
        assert writer.resolve(caught.value) == "unknown"
    seen = world.db.reader(NAME)
    assert seen.get("k") == b"v1"
    behind = seen.changes(world.head().wal_floor - 1)
    assert [change.lsn for change in behind if change.key == b"k"] == [], "it was applied once"


def test_H66_a_transaction_whose_slot_was_collected_and_filled_again(world):
    """H66: a read-modify-write is not decided and applied a second time."""
    store = LostResponse(
        world.bucket, "/wal/", lambda key: collect_and_refill(world, key, takeover=False)
    )
    writer = reef.Database(store).writer(NAME)
    store.armed = True
    with pytest.raises(OutcomeUnknownError), writer.transaction() as tx:
        tx.put("k", str(int(tx.get("k")) + 1).encode())
    assert world.db.reader(NAME).get("k") == b"1"


def test_H66_exists_after_doubt_at_or_above_the_floor_is_a_loss(world):
    """H66: a slot that was never collected shows who holds it; the batch is sent again, once."""

    class NeverLanded(Wrapper):
        armed = False

        def create(self, key, body):
            if not self.armed or "/wal/" not in key:
                return self.inner.create(key, body)
            self.armed = False
            lsn = int(key.rsplit("/", 1)[1].removesuffix(".wal"))
            Log(self.inner, USERS).fill(lsn, begin(self.inner, lsn))
            return WriteResult(Outcome.EXISTS, winner=self.inner.get(key), doubt=True)

    store = NeverLanded(world.bucket)
    writer = reef.Database(store).writer(NAME)
    store.armed = True
    receipt = writer.put("k", b"v1")
    assert receipt.lsn == 5
    assert world.rows() == {b"k": b"v1"}


def test_H66_a_publish_whose_generation_was_collected_and_filled_again(world):
    """H66: `recent` of the head proves it; the edit is not applied a second time."""

    def overtake(key):
        old = world.bucket.get(key)
        for _ in range(3):
            with world.db.writer(NAME) as writer:
                writer.put("k", b"2")
            world.fold()
        assert key.removeprefix(f"{USERS.root}/") in world.sweep_twice()
        stalled = msgspec.structs.replace(
            reef.formats.manifest.decode_manifest(old, key), write_id="stalled"
        )
        recent = (*stalled.recent[:-1], msgspec.structs.replace(stalled.recent[-1]))
        recent = (*recent[:-1], type(recent[-1])(stalled.generation, "stalled", 0))
        body = encode_manifest(msgspec.structs.replace(stalled, recent=recent))
        assert world.bucket.create(key, body).landed

    store = LostResponse(world.bucket, "/manifest/", overtake)
    publisher = Publisher(store, USERS)
    before = publisher.heads.find().manifest.writer_epoch
    store.armed = True
    publisher.publish(
        lambda head: msgspec.structs.replace(head, writer_epoch=head.writer_epoch + 1)
    )
    assert world.head().writer_epoch == before + 1 + 3, "three writers, and this edit once"


def test_H66_a_publish_that_lost_its_generation_is_applied_to_the_next(world):
    """H66: `recent` names another publish of that generation, so this one never counted."""

    class Lost(Wrapper):
        armed = True

        def create(self, key, body):
            if self.armed and "/manifest/" in key:
                self.armed = False
                world.publish(max_parallel_writes=4)
                return WriteResult(Outcome.EXISTS, winner=self.inner.get(key), doubt=True)
            return self.inner.create(key, body)

    publisher = Publisher(Lost(world.bucket), USERS)
    generation = world.head().generation
    published = world.run(
        lambda: publisher.publish(
            lambda head: msgspec.structs.replace(head, writer_epoch=head.writer_epoch + 1)
        )
    )
    assert published.generation == generation + 2
    assert published.max_parallel_writes == 4


def test_H67_a_change_stream_does_not_pass_over_a_collected_slot(world):
    """H67, H44: a slot that was collected and filled again is an error, never a skip."""
    stream = world.db.reader(NAME).changes(after_lsn=0)
    assert [change.lsn for change in stream] == [2]
    with world.db.writer(NAME) as writer:
        lost = writer.put("k", b"1").lsn
    collect_and_refill(world, USERS.wal_object(lost), takeover=False)
    assert Log(world.bucket, USERS).read(lost) is not None
    with pytest.raises(NotFoundError) as caught:
        list(stream)
    assert caught.value.kind == "collected"


def test_H67_a_change_stream_reads_folded_slots_that_are_kept(world):
    """H67: below the floor, but retained: no need for an error."""
    stream = world.db.reader(NAME).changes(after_lsn=0)
    assert [change.lsn for change in stream] == [2]
    with world.db.writer(NAME) as writer:
        lsn = writer.put("k", b"1").lsn
    world.fold()
    world.advance(GRACE_S)
    assert [change.lsn for change in stream] == [lsn]


def test_H67_a_cursor_reads_slots_that_it_has_kept(world):
    """H67: a registered cursor pins its slots, whatever is retained."""
    cursor = world.db.cursor(NAME, "c", after_lsn=2)
    with world.db.writer(NAME) as writer:
        lsn = writer.put("k", b"1").lsn
    world.fold()
    world.sweep_twice()
    world.advance(GRACE_S)
    assert [change.lsn for change in cursor] == [lsn]


def test_H67_a_reader_that_stalls_in_a_probe_does_not_show_a_late_object(world):
    """H67: between its check of the clock and the response the slot was collected and refilled.

    Other threads read meanwhile: the late object must not be visible even for a short time.
    """
    seen = []

    class Stalls(Wrapper):
        does = None

        def get_tagged(self, key):
            if self.does is not None and "/wal/" in key:
                does, self.does = self.does, None
                does(key)
            if seen:
                seen.append(reader.last_lsn)
            return self.inner.get_tagged(key)

    store = Stalls(world.bucket)
    reader = reef.Database(store).reader(NAME)
    assert reader.last_lsn == 2

    def overtake(key):
        with world.db.writer(NAME) as writer:
            for number in range(3):
                writer.put("k", b"%d" % number)
        world.fold()
        world.sweep_twice()
        lsn = int(key.rsplit("/", 1)[1].removesuffix(".wal"))
        world.bucket.put(key, begin(world.bucket, lsn, WalKind.FENCE, job=None, epoch=1))
        seen.append(reader.last_lsn)

    store.does = overtake
    world.run(reader.refresh)
    assert len(seen) > 1
    assert set(seen) == {2}
    assert reader.get("k") == b"2"
    assert dict(reader.scan()) == world.rows()


def test_H67_an_unpinned_view_whose_log_is_collected_while_it_is_read(world):
    """H67: a slot that was refilled meanwhile is in no view; it opens again, or is gone."""
    with world.db.writer(NAME) as writer:
        last = writer.put("k", b"1").lsn

    class Stalls(Wrapper):
        armed = False

        def get_tagged(self, key):
            if self.armed and key == USERS.wal_object(last):
                self.armed = False
                collect_and_refill(world, key, takeover=False)
            return self.inner.get_tagged(key)

    store = Stalls(world.bucket)
    reader = reef.Database(store).reader(NAME)
    store.armed = True
    with pytest.raises(NotFoundError) as caught:
        world.run(lambda: reader.as_of(lsn=last))
    assert caught.value.kind == "collected"


def test_H67_a_writer_passes_over_a_late_batch_below_the_floor(world):
    """H67: a void object of its own was collected, and an older writer's batch is there now.

    Above the floor that would be corruption; below it the object is nothing.
    """
    writer = world.db.writer(NAME)
    for number in range(2):
        rows = {"id": [b"x%d" % number], "value": [b"bulk"]}
        world.run(lambda rows=rows: ingest(world.db, NAME, rows))
    world.fold()
    lsn = world.head().wal_floor - 2
    late = begin(world.bucket, lsn, WalKind.BATCHES, job=None, epoch=1)
    world.bucket.put(USERS.wal_object(lsn), late)
    writer.put("d", b"1")
    assert set(world.rows()) == {b"d", b"k", b"x0", b"x1"}
