"""Edges of the log's rules, of a tail and of a resync; every test here kills a mutant."""

import msgspec
import pytest

import reef
from reef.engine.log.log import Log, LogRules, Verdict
from reef.engine.log.tail import Tail
from reef.engine.read.caches import ByteCache
from reef.engine.read.segments import SegmentStore
from reef.errors import CorruptionError, OutcomeUnknownError
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.wal_object import Job, WalHeader, WalKind, WalObject
from reef.manifest.head import HeadFinder
from reef.stores import Outcome, Wrapper, WriteResult
from tests.hazards.test_log import batch, manifest, other, verdicts
from tests.support.bulk_jobs import append
from tests.support.sweep_world import NAME, USERS, World


def test_H45_the_id_of_a_void_object_counts_for_those_behind_it():
    """H45: a slot's write id is that of whatever holds it, void or not."""
    reader = LogRules(manifest())
    found = verdicts(
        reader,
        batch(1, "a", ()),
        batch(2, "b", ("a",)),
        batch(3, "void", ("a", "another")),
        batch(4, "d", ("b", "expected")),
    )
    assert found == [Verdict.APPLIES, Verdict.APPLIES, Verdict.VOID, Verdict.VOID]


def test_H48_a_begin_of_an_older_schema_opens_nothing():
    """H48: a release before incarnations re-created names in one chain, with later schemas."""
    newer = msgspec.structs.replace(DEFAULT_SCHEMA, id=2)
    job = Job("job")
    begin = msgspec.structs.replace(other(1, WalKind.BEGIN, job=job), schema_id=1)
    reader = LogRules(manifest(schemas=(newer,)))
    ingest = other(2, WalKind.INGEST, "y", job)
    assert verdicts(reader, begin, ingest) == [Verdict.EMPTY, Verdict.IGNORED]


def test_H60_a_job_sorts_at_its_first_begin():
    """H60: a begin that was sent twice moves nothing: rows of the load sort at the first one."""
    reader = LogRules(manifest())
    begins = [other(lsn, WalKind.BEGIN, f"{lsn}", Job("job")) for lsn in (1, 2)]
    verdicts(reader, *begins)
    assert [job.begin_lsn for job in reader.open_jobs] == [1]


def test_H17_a_slot_that_a_repair_has_skipped_does_nothing():
    """H17: its rows do not count, its begin opens nothing and its abort closes nothing."""
    job, later = Job("job"), Job("later")
    reader = LogRules(manifest(skipped_lsns=(1, 3, 4)))
    headers = [
        batch(1, "a", ()),
        other(2, WalKind.BEGIN, "b", job),
        other(3, WalKind.ABORT, "c", job),
        other(4, WalKind.BEGIN, "d", later),
        other(5, WalKind.INGEST, "e", job),
        other(6, WalKind.INGEST, "f", later),
    ]
    found = verdicts(reader, *headers)
    assert (found[0], found[4], found[5]) == (Verdict.IGNORED, Verdict.APPLIES, Verdict.IGNORED)


def test_H45_slots_that_were_collected_make_nothing_void():
    """H45: the content of collected slots, over which a rebuild jumps, is unknown."""
    reader = LogRules(manifest())
    reader.jump(5)
    assert verdicts(reader, batch(5, "e", ("c", "d"))) == [Verdict.APPLIES]


def test_H63_marks_of_streams_never_fall():
    """H63: an object that was sent again carries a lower place than the mark."""
    reader = LogRules(manifest())
    for lsn, place in ((1, 7), (2, 4)):
        header = msgspec.structs.replace(batch(lsn, f"{lsn}", ()), marks={"stream": place})
        reader.advance(header)
    assert reader.marks == {"stream": 7}


# --- tails ----------------------------------------------------------------------------


@pytest.fixture
def world():
    """A namespace with one row."""
    world = World()
    with world.db.writer(NAME) as writer:
        writer.put("k", b"0")
    return world


def tail_of(world):
    """Return a tail to which the whole log was applied."""
    tail = Tail(world.head(), SegmentStore(world.bucket, USERS, ByteCache(1 << 20)))
    log = Log(world.bucket, USERS)
    for slot in log.filled(tail.next_lsn):
        tail.apply_object(log.read(slot.lsn))
    return tail


def test_H65_a_tail_follows_only_its_own_life(world):
    """H65: a newer manifest that begins at another base is another incarnation's."""
    tail, head = tail_of(world), world.head()
    newer = msgspec.structs.replace(head, generation=head.generation + 1)
    assert tail.follows(newer)
    assert not tail.follows(head), "it is not newer"
    assert not tail.follows(msgspec.structs.replace(newer, wal_base=2, wal_floor=2))


def test_H67_a_tail_follows_no_floor_that_it_has_not_reached(world):
    """H67: the rows between its end and the floor are in segments, and were never applied."""
    tail, head = tail_of(world), world.head()
    newer = msgspec.structs.replace(head, generation=head.generation + 1)
    assert tail.follows(msgspec.structs.replace(newer, wal_floor=tail.next_lsn))
    assert not tail.follows(msgspec.structs.replace(newer, wal_floor=tail.next_lsn + 1))


# --- resync ---------------------------------------------------------------------------


def test_kind_is_checked_before_epoch(world):
    """Protocol section 1: losing a slot to a record of a job is never fencing, whatever it says."""
    with world.db.writer(NAME) as writer:
        append(world.bucket, NAME, WalKind.SKIP, epoch=99)
        assert writer.put("k", b"1").lsn


def test_a_resync_stops_at_a_gap(world):
    """An object that a job has put ahead does not count yet; the writer fills the gap itself."""
    with world.db.writer(NAME) as writer:
        lsn = append(world.bucket, NAME, WalKind.SKIP)
        append(world.bucket, NAME, WalKind.SKIP, lsn=lsn + 2)
        assert writer.put("a", b"1").lsn == lsn + 1
        assert writer.put("b", b"1").lsn == lsn + 3


def late_batch(world, lsn, after):
    """Return an object of an older writer."""
    runtime = world.bucket.runtime
    header = WalHeader(lsn, WalKind.BATCHES, 0, "old", runtime.ulid(), 0, after=after)
    return WalObject.encode(header)


def test_a_batch_of_an_older_writer_behind_the_fences_is_damage(world):
    """Protocol section 2, step 4: in independent order it would count, though its writer was
    fenced: nothing more is sent.
    """
    with world.db.writer(NAME, ack="independent") as writer:
        lsn = max(world.slots()) + 1
        Log(world.bucket, USERS).fill(lsn, late_batch(world, lsn, None))
        with pytest.raises(OutcomeUnknownError, match="behind the fence"):
            writer.put("k", b"1")
        with pytest.raises(CorruptionError, match="behind the fence"):
            writer.put("k", b"2")
        assert max(world.slots()) == lsn


def test_H64_a_lost_slot_that_was_collected_is_not_waited_for(world):
    """H64: the void object that took it was folded and swept before the writer listed the log."""

    class Collected(Wrapper):
        armed = False

        def create(self, key, body):
            if not self.armed or not key.startswith(USERS.wal):
                return self.inner.create(key, body)
            self.armed = False
            lsn = max(world.slots()) + 1
            world.publish(wal_floor=lsn + 1, below_floor=("void",))
            return WriteResult(Outcome.EXISTS, winner=late_batch(world, lsn, ("void", "other")))

    store = Collected(world.bucket)
    writer = reef.Database(store).writer(NAME)
    lost = max(world.slots()) + 1
    store.armed = True
    assert world.run(lambda: writer.put("k", b"1")).lsn == lost + 1
    assert HeadFinder(world.bucket, USERS).find().manifest.wal_floor == lost + 1
