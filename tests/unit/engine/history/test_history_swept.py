"""History where a sweep passes by: slots below the floor, gaps, other lives, errors of streams."""

import msgspec
import pytest

import reef
from reef.engine.history.as_of import ConcurrentSweep, History, PointInTime
from reef.engine.history.changes import LogFollower
from reef.engine.log.log import SlotGone
from reef.engine.read.caches import ByteCache
from reef.engine.read.segments import SegmentStore
from reef.errors import ErrorKind, NotFoundError
from tests.support.sweep_world import NAME, EachRequest, World


@pytest.fixture
def world():
    """Two versions of a row, ten seconds and a fold apart; nothing is swept."""
    world = World()
    with world.db.writer(NAME) as writer:
        for value in (b"1", b"2"):
            writer.put("a", value)
            world.fold()
            world.advance(10)
    return world


def segments_of(world, store=None):
    """Return the segments of the newest incarnation."""
    return SegmentStore(store or world.bucket, world.names, ByteCache(0))


def history_of(world):
    """Return its history."""
    return History(world.bucket, world.names, segments_of(world))


def generations(world):
    """Return all manifests, oldest first."""
    heads = history_of(world).heads
    return [heads.load(number) for number in range(1, world.head().generation + 1)]


def swept(world):
    """Fold another row, retain nothing but the head, and delete every object that it does not
    need."""
    with world.db.writer(NAME) as writer:
        writer.put("b", b"3")
        writer.put("b", b"4")
    world.fold()
    world.sweep_twice()


def follower(world, store=None, after_lsn=0, start=None):
    """Return a reader of changes."""
    store = store or world.bucket
    return LogFollower(store, world.names, segments_of(world, store), after_lsn, start)


def test_an_object_that_is_gone_does_not_say_when_it_was_folded(world):
    """A generation whose fold cannot be dated is not taken for an older time: its rows may be
    newer."""
    before_ms = next(m for m in generations(world) if m.segments).published_at_ms + 1000
    world.bucket.delete(world.names.wal_object(world.head().wal_floor - 1))
    history = history_of(world)
    found = history._before(world.head(), before_ms)
    assert found.wal_floor < world.head().wal_floor


def test_a_slot_below_the_floor_is_kept_only_with_its_generation(world):
    """H67: the head is fresh, but the slot is below its floor, and may have been filled again."""
    old = generations(world)[1]
    swept(world)
    history = history_of(world)
    head = history.head()
    assert history.kept_slots(old, head.wal_floor)
    assert not history.kept_slots(old, head.wal_floor - 1)


def test_a_gap_is_not_the_end_of_the_log(world):
    """H10: the beginning of a generation's log was swept before it was listed: read again."""
    old = generations(world)[1]
    swept(world)
    for lsn in range(old.wal_floor, world.head().wal_floor):  # also the last one, later
        world.bucket.delete(world.names.wal_object(lsn))
    with pytest.raises(ConcurrentSweep):
        history_of(world).replay(PointInTime(old), world.head())


def test_a_stream_does_not_continue_over_slots_that_were_filled_again(world):
    """H67: the first slot of a read is below the floor; that the last one is not proves nothing."""
    with world.db.writer(NAME) as writer:
        writer.put("b", b"3")
    old, head = generations(world)[1], world.head()
    stream = follower(world, after_lsn=0, start=old)
    first = head.wal_floor - 1
    stream._rules.jump(first)
    stream._slots = iter(list(history_of(world).log.scan(first, frozenset())))
    world.sweep_twice()
    with pytest.raises(NotFoundError) as raised:
        stream.more()
    assert raised.value.kind is ErrorKind.COLLECTED


def test_a_stream_stops_at_a_slot_that_was_swept_after_its_listing(world):
    """The next slot is listed and gone: an error, and not a stream that waits for ever."""
    stream = follower(world, start=generations(world)[0])

    def swept_since():
        raise SlotGone(stream._rules.next_lsn)
        yield

    stream._slots = swept_since()
    with pytest.raises(NotFoundError):
        stream._read()


def test_a_stream_does_not_continue_in_another_life(world):
    """H65: a chain of an older release continued with another base: its slots are not compared."""
    stream = follower(world)
    head = world.head()
    other = msgspec.structs.replace(head, wal_base=head.wal_floor)
    with pytest.raises(NotFoundError, match="created again"):
        stream._use_schemas(other)


def test_a_stream_is_over_after_an_error(world):
    """The same error comes again, though the store works: rows of the slot would be missing."""
    fails = []

    def request():
        if fails:
            raise reef.UnavailableError("the store is gone")

    db = reef.Database(EachRequest(world.bucket, request))
    with db.reader(NAME) as reader:
        stream = reader.changes()
        assert next(stream).row == b"1"
        fails.append(True)
        with pytest.raises(reef.UnavailableError):
            list(stream)
        fails.clear()
        with pytest.raises(reef.UnavailableError):
            next(stream)


def test_a_stream_does_not_read_lsns_that_a_repair_skipped(world):
    """A skipped slot is passed over without a request, whatever is in it."""
    with world.db.writer(NAME) as writer:
        lsn = writer.put("c", b"3").lsn
        writer.put("d", b"4")
    world.publish(skipped_lsns=(lsn,))
    world.bucket.put(world.names.wal_object(lsn), b"damage")
    with world.db.reader(NAME) as reader:
        assert [change.key for change in reader.changes(after_lsn=lsn - 1)] == [b"d"]


def test_a_scan_of_a_view_ends_when_the_view_is_closed(world):
    """H22: its lease is released with it, so later rows may be swept while they are read."""
    view = world.db.reader(NAME, pin=True)
    rows = view.scan()
    assert next(rows) == (b"a", b"2")
    view.close()
    with pytest.raises(reef.ClosedError):
        list(rows)
