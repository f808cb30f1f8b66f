"""The sweep's bounds, the headers it reads, and the manifests it makes."""

import threading

import msgspec
import pytest

import reef
from reef.engine.log.tail import Missing
from reef.formats.manifest import Condemned, CondemnedRange
from reef.jobs import sweep
from reef.jobs.sweep.plan import SweepMemory, peek_headers
from reef.manifest.head import Publisher
from reef.manifest.invariants import check_loaded
from reef.manifest.roots import effective_grace_ms
from reef.stores import Wrapper
from reef.stores.memory import MemoryStore
from reef.testing import Recorder
from tests.support.grace import set_grace
from tests.support.segment_copies import copy_segment
from tests.support.sweep_world import DAY_S, GRACE_S, NAME, USERS, folded_world


@pytest.fixture
def world():
    """Give a namespace with five rows in the log, folded into one segment."""
    return folded_world()


# --- bounds ---------------------------------------------------------------------------


def test_deletes_are_bounded(world):
    """The rest is for the next call."""
    world.sweep()
    world.advance(GRACE_S + 10)
    assert [len(world.sweep(deletes_max=2, condemned_max=0).deleted) for _ in range(4)] == [
        2,
        2,
        2,
        0,
    ]


def test_the_condemned_list_is_bounded(world):
    """It is part of every manifest; consecutive slots or manifests are one entry."""
    world.compact()
    world.advance(GRACE_S + 10)
    assert len(world.sweep(condemned_max=2).condemned) == 2  # a segment, and manifests
    assert len(world.sweep(condemned_max=2).condemned) == 0
    head = world.head()
    assert (len(head.condemned), [r.folder for r in head.condemned_ranges]) == (1, ["manifest"])
    assert [one.numbers[0] for one in world.sweep(condemned_max=3).condemned] == ["wal"]


def test_a_large_share_goes_only_by_force(world):
    """H32: most likely a mistake, so it is refused, and a dry run says so."""
    for number in range(3):
        world.bucket.put(USERS.segment(f"orphan-{number}"), b"x" * 100_000)
    world.advance(GRACE_S + 10)
    with pytest.raises(reef.InvalidInputError, match="% of all"):
        world.sweep(share_bytes_min=1000)
    assert world.head().condemned == ()
    assert "the limit without force is 50%" in (
        world.sweep(apply=False, share_bytes_min=1000).refused or ""
    )
    assert world.sweep(share_bytes_min=1000, force=True).condemned_bytes > 300_000


def test_settings_are_checked(world):
    """A wrong word is an error, and so is keeping no generation at all."""
    with pytest.raises(reef.InvalidInputError, match="there is no setting 'keep'"):
        sweep(world.db, NAME, keep=1)
    with pytest.raises(reef.InvalidInputError, match="retain_generations_max"):
        sweep(world.db, NAME, retain_generations_max=0)


def test_unfinished_uploads_are_aborted(world):
    """After a day, by the store."""
    asked = []

    class Uploads(Wrapper):
        def abort_stale(self, older_than_s):
            asked.append(older_than_s)
            return 3

    report = world.sweep(reef.Database(Uploads(world.bucket)))
    assert report.uploads_aborted == 3
    assert asked == [DAY_S]


# --- headers --------------------------------------------------------------------------


def test_a_header_is_read_without_its_records():
    """One ranged request of a kilobyte, and a second one only for a long header."""
    asked = []

    class Ranges(Wrapper):
        def get_range(self, key, start, end):
            asked.append(end - start)
            return self.inner.get_range(key, start, end)

    store = Ranges(MemoryStore())
    with reef.Database(store).writer(NAME) as writer:
        big = writer.put("big", b"x" * 100_000).lsn
        long = writer.put("k", b"x" * 50_000, idempotency_key="k" * 1024).lsn
    sizes = {lsn: store.head(USERS.wal_object(lsn)).size for lsn in (big, long)}
    executor = store.runtime
    found = peek_headers(executor, store, USERS, list(sizes.items()))
    assert [found[lsn].lsn for lsn in (big, long)] == [big, long]
    assert sum(asked) < 6000
    assert len(asked) == 3
    assert peek_headers(executor, store, USERS, [(999, 10)]) == {999: Missing.GONE}


# --- edits and invariants -------------------------------------------------------------


def test_H55_a_publish_that_names_a_condemned_key_is_refused(world):
    """H55: its writer was too slow; it gets an error, and nothing is published."""
    (entry,) = world.head().segments
    world.publish(segments=())
    world.publish(condemned=(Condemned(f"segments/{entry.id}.seg", 1, 0),))
    before = world.head()
    with pytest.raises(reef.ConflictError, match="was condemned"):
        world.publish(segments=(entry,))
    assert world.head() == before


BROKEN = {
    "no slot from the one below the floor on is condemned": Condemned(f"wal/{6:020}.wal", 1, 0),
    "no generation that is retained is condemned": Condemned(
        f"manifest/{2:020}.manifest.json", 1, 0
    ),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_needed_objects_are_never_condemned(world, rule):
    """Such a manifest is rejected, whichever process made it."""
    head = msgspec.structs.replace(world.head(), condemned=(BROKEN[rule],), oldest_retained=2)
    with pytest.raises(reef.CorruptionError, match=rule):
        check_loaded(head, "m")
    below = Condemned(f"wal/{5:020}.wal", 1, 0), Condemned(f"manifest/{1:020}.manifest.json", 1, 0)
    check_loaded(msgspec.structs.replace(head, condemned=below), "m")


BROKEN_RANGES = {
    "no slot from the one below the floor on is condemned": CondemnedRange("wal", 2, 6, 1, 0),
    "no generation that is retained is condemned": CondemnedRange("manifest", 1, 2, 1, 0),
    "condemned ranges are in order and apart": CondemnedRange("wal", 3, 2, 1, 0),
}


@pytest.mark.parametrize("rule", BROKEN_RANGES)
def test_needed_objects_are_never_in_a_condemned_range(world, rule):
    """Such a manifest is rejected, whichever process made it."""
    ranges = (BROKEN_RANGES[rule],)
    head = msgspec.structs.replace(world.head(), condemned_ranges=ranges, oldest_retained=2)
    with pytest.raises(reef.CorruptionError, match=rule):
        check_loaded(head, "m")
    below = CondemnedRange("wal", 2, 5, 1, 0), CondemnedRange("manifest", 1, 1, 1, 0)
    check_loaded(msgspec.structs.replace(head, condemned_ranges=below), "m")
    twice = (*below, CondemnedRange("wal", 5, 5, 1, 0))
    with pytest.raises(reef.CorruptionError, match="in order and apart"):
        check_loaded(msgspec.structs.replace(head, condemned_ranges=twice), "m")


def test_H62_a_lowered_grace_waits_for_the_old_one(world):
    """H62: there are processes that still go by the longer one."""
    head = world.head()
    lowered = set_grace(head, 1000, now_ms=5_000_000)
    assert effective_grace_ms(lowered, 5_000_000 + head.grace_ms - 1) == head.grace_ms
    assert effective_grace_ms(lowered, 5_000_000 + head.grace_ms) == 1000
    again = set_grace(lowered, 500, now_ms=5_000_001)
    assert effective_grace_ms(again, 5_000_000 + head.grace_ms) == head.grace_ms
    raised = set_grace(again, 10**7, now_ms=5_000_002)
    assert effective_grace_ms(raised, 0) == 10**7
    assert set_grace(head, head.grace_ms, 0) is None


def test_H62_the_sweep_goes_by_the_grace_that_holds(world):
    """H62: a grace lowered just now deletes nothing sooner."""
    now_ms = int(world.bucket.now() * 1000)
    Publisher(world.bucket, USERS).publish(lambda head: set_grace(head, 1000, now_ms))
    world.sweep()
    world.advance(GRACE_S - 60)
    assert world.sweep().deleted == ()
    world.advance(70)
    assert world.sweep().deleted


# --- manifests ------------------------------------------------------------------------


@pytest.mark.parametrize("generations", [10, 100])
def test_a_repeated_sweep_loads_only_new_manifests(world, generations):
    """Retained manifests never change: the second sweep reads none of them again."""
    recorder, memory = Recorder(world.bucket, calls_max=1_000_000), SweepMemory()
    world.compact()
    for number in range(generations):
        world.publish(max_parallel_writes=1 + number % 2)
    orphan = copy_segment(world.bucket, USERS, world.head().segments[0])
    reads = []
    for _ in range(2):
        recorder.calls.clear()
        world.sweep(reef.Database(recorder), memory=memory, retain_generations_s=DAY_S)
        loads = [c for c in recorder.calls if "/manifest/" in c.key and c.method.startswith("get")]
        reads.append(len(loads))
    assert reads[0] > generations > 5 >= reads[1], orphan.id


def test_a_sweep_that_own_folds_overtake_lets_them_wait(world):
    """H75: at a high rate of commits folds publish during every plan; the second one is alone."""
    lock = threading.Lock()
    folds = []

    class Busy(Wrapper):
        """A fold of this process publishes whenever a sweep lists segments, if it may."""

        def list(self, prefix="", start_after=""):
            if prefix == USERS.segments and lock.acquire(blocking=False):
                folds.append(world.publish())
                lock.release()
            return self.inner.list(prefix, start_after)

    report = world.sweep(reef.Database(Busy(world.bucket)), memory=SweepMemory(lambda: lock))
    assert report.condemned
    assert len(folds) == 1
    assert not lock.locked()
