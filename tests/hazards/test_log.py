"""H11 to H20, H24, H45, H46, H52, H58, H61, H64: the log, its writers and its readers."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reef
from reef.engine.log.log import LogRules, Verdict
from reef.formats.manifest import Manifest, Recent
from reef.formats.wal_object import BatchHeader, Job, WalHeader, WalKind, WalObject
from reef.jobs import fold
from reef.manifest.head import HeadFinder, ManifestHead
from reef.paths import Namespace
from reef.stores import Meter, Outcome, ReadBack, Retry, Wrapper, agree_on_cas
from reef.testing import Latency, LatencyProfile, Simulation
from tests.support.bulk_jobs import append, ingest

NAME = "users"
USERS = Namespace(NAME)


@pytest.fixture
def db():
    """Give an empty database in memory."""
    return reef.open("memory://")


def rows(db):
    """Return the rows of a new reader and a new writer, which must agree."""
    seen = dict(db.reader(NAME).scan())
    with db.writer(NAME) as writer:
        assert dict(writer.scan()) == seen
    return seen


# --- the rules ------------------------------------------------------------------------


def manifest(**changes):
    """Return an empty manifest."""
    return Manifest(
        generation=1, write_id="m", published_at_ms=0, recent=(Recent(1, "m", 0),), **changes
    )


def batch(lsn, write_id, after, key=None):
    """Return the header of a batch."""
    return WalHeader(
        lsn, WalKind.BATCHES, 1, "w", write_id, 0, after=after, batches=(BatchHeader(1, key),)
    )


def other(lsn, kind, write_id="x", job=None):
    """Return the header of anything else."""
    return WalHeader(lsn, kind, 0, "j", write_id, 0, job=job)


def verdicts(reader, *headers):
    """Resolve objects in order."""
    return [reader.advance(header) for header in headers]


def test_H45_an_object_whose_predecessors_differ_is_void():
    """H45: all slots that `after` names count, not only the one just before."""
    reader = LogRules(manifest())
    assert verdicts(
        reader,
        batch(1, "a", ()),
        batch(2, "b", ("a",)),
        other(3, WalKind.INGEST, "i"),
        batch(4, "c", ("b", "c0")),  # expected its own c0 in slot 3
        batch(5, "d", ("b", "c0", "c")),  # its direct predecessor is right, and it is void still
        batch(6, "e", ("d",)),
    ) == [
        Verdict.APPLIES,
        Verdict.APPLIES,
        Verdict.IGNORED,
        Verdict.VOID,
        Verdict.VOID,
        Verdict.APPLIES,
    ]


def test_H45_the_rule_holds_at_the_floor():
    """H45: the manifest keeps the write ids below the floor."""
    floor = manifest(wal_floor=10, below_floor=("y", "z"))
    assert verdicts(LogRules(floor), batch(10, "a", ("y", "z"))) == [Verdict.APPLIES]
    assert verdicts(LogRules(floor), batch(10, "a", ("y", "x"))) == [Verdict.VOID]
    assert verdicts(LogRules(floor), batch(10, "a", None)) == [Verdict.APPLIES]


def test_an_ingest_counts_only_while_its_job_is_open():
    """A begin below, no abort and no other ingest in between, and a key that is new."""
    job, again = Job("j1", key="load"), Job("j2", key="load")
    reader = LogRules(manifest())
    assert verdicts(
        reader,
        other(1, WalKind.INGEST, job=Job("j0")),  # never begun
        other(2, WalKind.BEGIN, job=job),
        other(3, WalKind.BEGIN, job=again),
        other(4, WalKind.INGEST, job=job),
        other(5, WalKind.INGEST, job=job),  # twice
        other(6, WalKind.INGEST, job=again),  # H57: the same key
        other(7, WalKind.BEGIN, job=Job("j3")),
        other(8, WalKind.ABORT, job=Job("j3")),
        other(9, WalKind.INGEST, job=Job("j3")),
    ) == [
        Verdict.IGNORED,
        Verdict.EMPTY,
        Verdict.EMPTY,
        Verdict.APPLIES,
        Verdict.IGNORED,
        Verdict.IGNORED,
        Verdict.EMPTY,
        Verdict.EMPTY,
        Verdict.IGNORED,
    ]


JOBS = ("j1", "j2", "j3")
objects = st.lists(
    st.one_of(
        st.tuples(st.just(WalKind.BATCHES), st.sampled_from("abcd")),
        st.tuples(st.sampled_from([WalKind.BEGIN, WalKind.INGEST]), st.sampled_from(JOBS)),
    ),
    max_size=25,
)
KEY_OF = {"j1": "a", "j2": "b", "j3": "a"}


def headers(objects):
    """Return the headers of a log."""
    for lsn, (kind, what) in enumerate(objects, start=1):
        if kind is WalKind.BATCHES:
            yield batch(lsn, f"w{lsn}", None, key=what)
        else:
            yield other(lsn, kind, f"w{lsn}", job=Job(what, key=KEY_OF[what]))


@settings(max_examples=200, deadline=None)
@given(objects, st.integers(1, 4))
def test_H57_what_counts_is_the_same_from_every_manifest_on(objects, keys_max):
    """H57: from whichever floor a handle starts, it classifies the rest alike."""
    log = list(headers(objects))
    first = LogRules(manifest(dedup_keys_max=keys_max))
    folds, expected = [], []
    for header in log:
        folds.append(
            manifest(
                wal_floor=first.next_lsn,
                dedup=first.dedup.entries(),
                dedup_keys_max=keys_max,
                open_jobs=first.open_jobs,
                below_floor=first.last_ids(),
            )
        )
        expected.append(first.advance(header))
    for place, folded in enumerate(folds):
        later = LogRules(folded)
        assert verdicts(later, *log[place:]) == expected[place:]
        assert later.dedup.entries() == first.dedup.entries()
        assert len(later.dedup) <= keys_max


def test_open_jobs_are_carried_over_the_floor():
    """A job whose begin was folded is still open."""
    first = LogRules(manifest())
    first.advance(other(1, WalKind.BEGIN, job=Job("j1")))
    carried = manifest(wal_floor=2, open_jobs=first.open_jobs, below_floor=first.last_ids())
    assert verdicts(LogRules(carried), other(2, WalKind.INGEST, job=Job("j1"))) == [Verdict.APPLIES]


def test_objects_come_without_gaps():
    """The rules are for contiguous LSNs only."""
    with pytest.raises(ValueError, match="expected LSN 1, found 3"):
        LogRules(manifest()).advance(other(3, WalKind.SKIP))


# --- bulk jobs and a writer ----------------------------------------------------------


def test_H52_the_idle_writer_finds_its_slots_taken(db):
    """H52: ingests took its next slots and were folded; its next write goes behind them."""
    writer = db.writer(NAME)
    writer.put("a", b"1")
    ingest(db.store, NAME, {b"a": b"bulk", b"b": b"bulk"})
    ingest(db.store, NAME, {b"c": b"bulk"})
    fold(db, NAME)
    receipt = writer.put("b", b"live")
    assert receipt.lsn == 7
    assert writer.get("a") == b"bulk", "the load came later than the first put"
    assert writer.get("c") == b"bulk"
    assert rows(db) == {b"a": b"bulk", b"b": b"live", b"c": b"bulk"}


def test_a_live_writer_is_not_fenced_by_an_ingest(db):
    """Losing a slot to a job's object is never fencing; the place among live writes is exact."""
    writer = db.writer(NAME, max_parallel_writes=3)
    writer.put("k", b"before")
    ingest(db.store, NAME, {b"k": b"bulk"})
    futures = [writer.put("k", b"after-%d" % n, wait=False) for n in range(10)]
    lsns = [future.result(60).lsn for future in futures]
    assert lsns == sorted(lsns)
    assert rows(db) == {b"k": b"after-9"}


def test_an_aborted_ingest_is_never_seen(db):
    """Neither by readers nor by writers nor by a fold."""
    db.writer(NAME).put("k", b"live")
    ingest(db.store, NAME, {b"k": b"aborted"}, abort=True)
    assert rows(db) == {b"k": b"live"}
    fold(db, NAME)
    assert rows(db) == {b"k": b"live"}


def test_H54_an_ingest_is_seen_before_and_after_the_fold(db):
    """H54: its segments are rooted in the log first, in the manifest later."""
    db.writer(NAME).put("a", b"live")
    ingest(db.store, NAME, {b"b": b"bulk"})
    assert rows(db) == {b"a": b"live", b"b": b"bulk"}
    assert fold(db, NAME).segments == 2
    assert rows(db) == {b"a": b"live", b"b": b"bulk"}


def test_H64_a_writer_that_lost_slots_lists_instead_of_probing(db):
    """H64: two ingests, a fold, its own void object collected; it must not reuse that slot."""
    writer = db.writer(NAME, max_parallel_writes=3, group_bytes_max=1, group_window_ms=0)
    writer.put("k", b"0")
    first = writer._committer.tail.next_lsn

    class TakesFirst(Wrapper):
        """A job's objects take the writer's next slot just before its own PUTs arrive."""

        done = False

        def create(self, key, body):
            if not self.done and key == USERS.wal_object(first):
                self.done = True
                append(db.store, NAME, WalKind.BEGIN, Job("j"), lsn=first)
            return self.inner.create(key, body)

    writer._committer.log._store = TakesFirst(writer._committer.log._store)
    futures = [writer.put("k", b"%d" % n, wait=False) for n in range(1, 6)]
    assert [future.result(60).lsn for future in futures] == sorted(
        future.result().lsn for future in futures
    )
    assert rows(db) == {b"k": b"5"}
    fold(db, NAME)
    for slot in range(first, first + 3):  # as a sweep deletes folded batches
        found = WalObject.decode(db.store.get(USERS.wal_object(slot)), "x").header
        if found.kind is WalKind.BATCHES:
            db.store.delete(USERS.wal_object(slot))
    with db.writer(NAME) as successor:
        assert successor.put("k", b"6").lsn > first + 5
    assert rows(db) == {b"k": b"6"}


# --- opening ----------------------------------------------------------------------------


def test_H58_an_older_openers_fence_is_stepped_over(db):
    """H58: a fence of a lower epoch in the way is no reason to stop."""
    writer = db.writer(NAME)
    writer.put("k", b"1")
    head = writer._committer.tail.next_lsn
    header = WalHeader(head, WalKind.FENCE, 0, "old", "f", 0)
    assert db.store.create(USERS.wal_object(head), WalObject.encode(header)).landed
    assert writer.put("k", b"2").lsn == head + 1
    assert rows(db) == {b"k": b"2"}


@pytest.mark.parametrize("ack", ["prefix", "independent"])
@pytest.mark.parametrize("folder", ["/manifest/", "/wal/"])
def test_H11_an_epoch_without_a_fence_stops_no_writer(db, folder, ack):
    """H11: the old writer commits after the epoch was raised and before the fence: it is seen.

    Raising the epoch alone would let it be acknowledged and never be replayed.
    """
    old = db.writer(NAME, max_parallel_writes=2, ack=ack)
    last = old.put("k", b"0").lsn
    acknowledged, turn = [], threading.Lock()
    skipped = {USERS.wal_object(last + 2)}  # the second fence, which may be the first sent

    class Overtaken(Wrapper):
        """The old writer gets one more write in, at one step of the opening."""

        def create(self, key, body):
            if folder not in key or key in skipped or not turn.acquire(blocking=False):
                return self.inner.create(key, body)
            if folder == "/wal/":
                acknowledged.append(old.put("k", b"late"))
                return self.inner.create(key, body)
            result = self.inner.create(key, body)
            acknowledged.append(old.put("k", b"late"))
            return result

    new = reef.Database(ReadBack(Retry(Meter(Overtaken(db.store))))).writer(NAME, ack=ack)
    assert acknowledged
    assert new.get("k") == b"late"
    with pytest.raises(reef.FencedError):
        old.put("k", b"never")
    new.put("k", b"new")
    assert rows(db) == {b"k": b"new"}


def fences(db):
    """Return the epochs of the fences in the log, in order."""
    found = [WalObject.decode(db.store.get(i.key), i.key).header for i in db.store.list(USERS.wal)]
    return [header.epoch for header in found if header.kind is WalKind.FENCE]


def test_H56_changing_the_number_of_writes_in_flight(db):
    """H56: fences by the larger of old and new; the number falls only after that."""
    for parallel, expected in ((1, 1), (3, 3), (1, 3), (1, 1), (2, 2)):
        before = len(fences(db))
        with db.writer(NAME, max_parallel_writes=parallel) as writer:
            writer.put("k", b"v")
        assert len(fences(db)) - before == expected
        head = HeadFinder(db.store, USERS).find().manifest
        assert head.max_parallel_writes == parallel


def test_H61_everything_of_an_open_comes_from_one_manifest(db):
    """H61: a fold between the steps of an open does not make a keyed batch apply twice."""
    with db.writer(NAME) as writer:
        writer.put("k", b"1", idempotency_key="once")

    class FoldsAtTheFence(Wrapper):
        done = False

        def create(self, key, body):
            if not self.done and "/wal/" in key:
                self.done = True
                fold(reef.Database(self.inner), NAME)
            return self.inner.create(key, body)

    opened = reef.Database(FoldsAtTheFence(db.store))
    with opened.writer(NAME) as writer:
        assert writer.put("k", b"1", idempotency_key="once").replayed
        assert writer.get("k") == b"1"


def test_H12_a_fence_below_the_floor_does_not_count(db):
    """H12: the slot was used, folded and collected; a fence there does not count."""
    with db.writer(NAME) as writer:
        for number in range(4):
            writer.put("k", b"%d" % number)
    stale = [info for info in db.store.list(USERS.wal)]

    class ListsTheStart(Wrapper):
        """An opener whose listing is old: it takes slot 1 for the first open one."""

        listed = False

        def list(self, prefix="", start_after=""):
            if prefix == USERS.wal and not self.listed:
                self.listed = True
                fold(reef.Database(self.inner), NAME)
                for info in stale:
                    self.inner.delete(info.key)
                return iter(())
            return self.inner.list(prefix, start_after)

    opened = reef.Database(ListsTheStart(db.store))
    with opened.writer(NAME) as writer:
        floor = HeadFinder(db.store, USERS).find().manifest.wal_floor
        kept = [
            WalObject.decode(db.store.get(i.key), i.key).header for i in db.store.list(USERS.wal)
        ]
        assert [h.lsn for h in kept if h.kind is WalKind.FENCE and h.lsn >= floor] == [floor]
        assert writer.get("k") == b"3"
        assert writer.put("k", b"4").lsn > len(stale)
    assert rows(db) == {b"k": b"4"}


def test_H13_a_slow_put_below_the_floor_is_not_acknowledged(db):
    """H13: it landed in a slot that was folded and collected meanwhile: never acknowledged."""
    sim = Simulation(0)
    slow = sim.process("slow")
    outcome = []
    first = reef.Database(sim.bucket)
    first.writer(NAME).put("k", b"0")

    class Stalls(Wrapper):
        armed = False

        def create(self, key, body):
            if self.armed and "/wal/" in key:
                self.armed = False
                self.runtime.sleep(3600)
                successor = reef.Database(sim.bucket)
                with successor.writer(NAME) as writer:
                    writer.put("k", b"newer")
                fold(successor, NAME)
                sim.bucket.delete(key)  # collected
            return self.inner.create(key, body)

    def write():
        store = Stalls(slow.store())
        writer = reef.Database(store).writer(NAME)
        store.armed = True
        try:
            outcome.append(writer.put("k", b"slow"))
        except reef.ReefError as error:
            outcome.append(error)

    slow.spawn(write)
    sim.run()
    sim.close()
    assert isinstance(outcome[0], reef.OutcomeUnknownError)
    assert dict(reef.Database(sim.bucket).reader(NAME).scan()) == {b"k": b"newer"}


def test_H25_an_opener_is_not_starved_by_a_quick_writer():
    """H25: the old writer commits every 3 ms, each try of the opener takes 30: it still wins."""
    sim = Simulation(5)
    quick, slow = sim.process("quick"), sim.process("slow")
    agree_on_cas(sim.bucket)
    took, rejected = [], []

    def store(node, ms):
        timing = (ms, ms * 1.1)
        profile = LatencyProfile(timing, timing, timing, 1e12)
        return ReadBack(Retry(Meter(Latency(node.raw_store(), profile))))

    def write_for_ever():
        writer = reef.Database(store(quick, 3)).writer(NAME)
        for number in range(100_000):
            try:
                writer.put("k", b"%d" % number)
            except reef.FencedError as error:
                rejected.append((number, error))
                return

    def open_newer():
        slow.runtime.sleep(1)
        start_s = slow.runtime.monotonic_s()
        writer = reef.Database(store(slow, 30)).writer(NAME)
        took.append(slow.runtime.monotonic_s() - start_s)
        assert writer.get("k") == b"%d" % (rejected[0][0] - 1), "the last acknowledged"

    quick.spawn(write_for_ever)
    slow.spawn(open_newer)
    sim.run()
    sim.close()
    assert rejected
    assert took[0] < 10


def test_H16_a_missing_object_may_mean_fenced(db):
    """H16: a newer writer folded and swept in the middle of a replay: fenced, not damaged."""
    with db.writer(NAME) as writer:
        for number in range(3):
            writer.put("k", b"%d" % number)

    class SweepsDuringReplay(Wrapper):
        done = False

        def get_tagged(self, key):
            if key == USERS.wal_object(2) and not self.done:
                self.done = True
                successor = reef.Database(self.inner)
                successor.writer(NAME).put("k", b"newer")
                fold(successor, NAME)
                self.inner.delete(key)
            return self.inner.get_tagged(key)

    with pytest.raises(reef.FencedError):
        reef.Database(SweepsDuringReplay(db.store)).writer(NAME)
    assert rows(db) == {b"k": b"newer"}


def test_H16_a_missing_object_without_a_newer_writer_is_damage(db):
    """H16: the same hole with the epoch still ours is corruption."""
    with db.writer(NAME) as writer:
        for number in range(3):
            writer.put("k", b"%d" % number)

    class Loses(Wrapper):
        def get_tagged(self, key):
            if key == USERS.wal_object(2):
                self.inner.delete(key)
            return self.inner.get_tagged(key)

    with pytest.raises(reef.CorruptionError, match="LSN 2 of users is missing"):
        reef.Database(Loses(db.store)).writer(NAME)


def test_H24_a_reader_on_an_old_view_reads_on_after_a_fold(db):
    """H24: the objects of its view still exist, and a refresh advances it."""
    with db.writer(NAME) as writer:
        writer.put("k", b"1")
        reader = db.reader(NAME, refresh_interval_ms=1e9)
        fold(db, NAME)
        writer.put("k", b"2")
        assert reader.get("k") == b"1"
        reader.refresh()
        assert reader.get("k") == b"2"


def test_H10_a_reader_whose_objects_are_swept_starts_again(db):
    """H10: a fold and a sweep between its manifest and its listing; it opens all the same."""
    with db.writer(NAME) as writer:
        for number in range(5):
            writer.put(f"k{number}", b"v")

    class SweepsAtTheListing(Wrapper):
        done = False

        def list(self, prefix="", start_after=""):
            listed = list(self.inner.list(prefix, start_after))
            if prefix == USERS.wal and not self.done:
                self.done = True
                fold(reef.Database(self.inner), NAME)
                for info in listed[:-1]:
                    self.inner.delete(info.key)
            return iter(listed)

    reader = reef.Database(SweepsAtTheListing(db.store)).reader(NAME)
    assert len(list(reader.scan())) == 5


def test_the_gap_rule(db):
    """A reader waits for a missing LSN, and shows nothing behind it."""
    with db.writer(NAME) as writer:
        writer.put("a", b"1")
        hidden = writer.put("b", b"2").lsn
        writer.put("c", b"3")
    body = db.store.get(USERS.wal_object(hidden))
    db.store.delete(USERS.wal_object(hidden))
    reader = db.reader(NAME)
    assert dict(reader.scan()) == {b"a": b"1"}
    assert db.store.create(USERS.wal_object(hidden), body).outcome is Outcome.CREATED
    reader.refresh()
    assert dict(reader.scan()) == {b"a": b"1", b"b": b"2", b"c": b"3"}


def test_H64_a_slow_read_after_a_lost_slot_is_not_trusted(db, monkeypatch):
    """H64, H10: between head and listing its own void object is folded over and swept."""
    writer = db.writer(NAME, max_parallel_writes=2, group_bytes_max=1, group_window_ms=0)
    writer.put("k", b"0")
    first = writer._committer.tail.next_lsn
    behind = threading.Event()

    class Interferes(Wrapper):
        """A load is first in the slot; its void follower is deleted while the writer lists."""

        loaded = swept = False

        def create(self, key, body):
            if not self.loaded and key == USERS.wal_object(first):
                self.loaded = True
                append(db.store, NAME, WalKind.BEGIN, Job("j"), lsn=first)
                assert behind.wait(60), "the one behind it is sent too"
            result = self.inner.create(key, body)
            if key == USERS.wal_object(first + 1):
                behind.set()
            return result

        def list(self, prefix="", start_after=""):
            if self.loaded and not self.swept and prefix == USERS.wal:
                fold(db, NAME)
                self.inner.delete(USERS.wal_object(first + 1))
                self.swept = True
            return self.inner.list(prefix, start_after)

    interferes = Interferes(writer._committer.log._store)
    writer._committer.log._store = interferes
    writer._committer.resync.log._store = interferes
    fresh, stale = ManifestHead.fresh, [True]
    monkeypatch.setattr(
        ManifestHead,
        "fresh",
        lambda head, *by: fresh(head, *by) and not (interferes.swept and stale and stale.pop()),
    )
    futures = [writer.put("k", b"%d" % n, wait=False) for n in range(1, 4)]
    lsns = [future.result(60).lsn for future in futures]
    floor = HeadFinder(db.store, USERS).find().manifest.wal_floor
    assert min(lsns) >= floor, "acknowledged writes are at or above the floor"
    assert rows(db) == {b"k": b"3"}
