"""H10, H28, H31, H35, H53, H57, H59: bulk jobs next to appends, folds, sweeps and failures."""

import threading
import time
from dataclasses import replace

import pytest

import reef
from reef.engine.handles.database import Database
from reef.formats.manifest import SnapshotEntry
from reef.formats.wal_object import Job, WalKind
from reef.jobs import BulkJob, fold, ingest, sweep
from reef.jobs.ingest import append as appending
from reef.jobs.ingest.append import Appender
from reef.manifest.head import HeadFinder
from reef.manifest.roots import find_generation_leases, take_lease
from reef.stores import Wrapper
from reef.stores.memory import MemoryStore
from reef.testing import Fault, Faults, Latency, LatencyProfile, Rule
from tests.support.bulk_jobs import make_with_window
from tests.support.sweep_world import DAY_S, GRACE_S, NAME, USERS, At, World, folded_world
from tests.unit.jobs.test_ingest import _plain as plain


@pytest.fixture
def store():
    """Give a bucket in memory."""
    return MemoryStore()


@pytest.fixture
def db(store):
    """Give a database with a plain namespace."""
    db = Database(store)
    db.create(NAME)
    return db


def kinds(store):
    """Return the objects of the log, by LSN."""
    found = Appender(store, USERS)
    found.read_log()
    return {lsn: str(header.kind) for lsn, header in sorted(found._headers.items())}


def staged_job(db, key=b"mine", **options):
    """Begin a job and stage one row."""
    job = BulkJob(db, NAME, **options)
    return job, job.staging.stage([plain([key])])


class ActsOnPut(Wrapper):
    """Lets others act around PUTs into the log, or before its listings; one act for each."""

    def __init__(self, inner, *, before=(), after=(), listing=()):
        super().__init__(inner)
        self._before, self._after, self._listing = list(before), list(after), list(listing)
        self.puts = 0

    def create(self, key, body):
        """Act first, put, act again."""
        if "/wal/" not in key:
            return self.inner.create(key, body)
        self.puts += 1
        if self._before:
            self._before.pop(0)()
        result = self.inner.create(key, body)
        if self._after:
            self._after.pop(0)()
        return result

    def list(self, prefix="", start_after=""):
        """Act first."""
        if "/wal/" in prefix and self._listing:
            self._listing.pop(0)()
        return self.inner.list(prefix, start_after)


def interpose(job, **acts):
    """Return a store that runs other processes around each append of a job to the log."""
    acting = job._appender._log._store = ActsOnPut(job._store, **acts)
    return acting


# --- H59: a saturated writer ------------------------------------------------------------


class Hammer:
    """Clients that keep a writer's pipeline full and record the acknowledged writes."""

    def __init__(self, writer, clients):
        self.acknowledged, self.errors = [], []
        self._writer, self._stop = writer, threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(clients)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    def _run(self, client):
        try:
            for count in range(10**6):
                if self._stop.is_set():
                    return
                key = b"w%d-%d" % (client, count)
                self._writer.put(key, b"v")
                self.acknowledged.append(key)
        except reef.ReefError as error:
            self.errors.append(error)


def test_H59_a_job_commits_within_seconds_next_to_a_saturated_writer(store, monkeypatch):
    """H59: 20 ms for each request, M = 8: it aims where the writer is not yet, and no write that
    was acknowledged is lost by the slots that it took.
    """
    monkeypatch.setattr(appending, "TRIES_MAX", 20)
    always = (20.0, 20.0)
    db = Database(Latency(store, LatencyProfile(always, always, always, 1e9)))
    writer = db.writer(NAME, max_parallel_writes=8, group_window_ms=0, group_bytes_max=1)
    with writer, Hammer(writer, clients=16) as hammer:
        while len(hammer.acknowledged) < 64:
            time.sleep(0.01)
        started, before = time.monotonic(), len(hammer.acknowledged)
        job, staged = staged_job(db)
        receipt = job.commit(staged)
        took_s, concurrent = time.monotonic() - started, len(hammer.acknowledged) - before
    assert not hammer.errors
    assert took_s < 10
    assert concurrent > 100, "the writer was not saturated"
    log = kinds(store)
    assert log[receipt.lsn] == "ingest"
    rows = dict(Database(store).reader(NAME).scan())
    assert rows.keys() == {*hammer.acknowledged, b"mine"}


def test_H59_a_slot_that_was_lost_ahead_is_followed_by_no_skips(db, store):
    """H59: skips close the gap below a stored object; without one they only cost requests."""
    writer = db.writer(NAME, max_parallel_writes=4)
    job, staged = staged_job(db)
    ahead = [lambda: [writer.put(b"k", b"v") for _ in range(20)]]
    acting = interpose(job, before=[*[lambda: writer.put(b"k", b"v")] * 3, *ahead])
    receipt = job.commit(staged)
    assert acting.puts == 5 + 8, "five tries; only the last one, eight ahead, has a gap below it"
    log = kinds(store)
    assert [log[lsn] for lsn in range(receipt.lsn - 8, receipt.lsn + 1)] == [
        *["skip"] * 8,
        "ingest",
    ]
    writer.put(b"after", b"v")
    assert dict(db.reader(NAME).scan()) == {b"k": b"v", b"mine": b"v", b"after": b"v"}


# --- H31: a request without a response may have been committed ----------------------------


class Away(Wrapper):
    """Fails every listing after the first append to the log."""

    armed = away = False

    def create(self, key, body):
        """Put, and then be gone."""
        result = self.inner.create(key, body)
        self.away = self.away or (self.armed and "/wal/" in key)
        return result

    def list(self, prefix="", start_after=""):
        """List, unless it is away."""
        if self.away:
            raise reef.UnavailableError("away")
        return self.inner.list(prefix, start_after)


@pytest.mark.parametrize("key", [None, "load-7"])
def test_H31_an_ingest_whose_commit_cannot_be_checked_is_unknown(store, key):
    """H31: it is committed, so it must not be reported as failed; its key resolves it."""
    away = Away(store)
    db = Database(away)
    db.create(NAME)
    job, staged = staged_job(db, idempotency_key=key)
    away.armed = True
    with pytest.raises(reef.OutcomeUnknownError) as raised:
        job.commit(staged)
    away.armed = away.away = False
    assert dict(db.reader(NAME).scan()) == {b"mine": b"v"}
    assert repr(job.key) in raised.value.hint
    again = ingest(db, NAME, [{"id": b"other", "value": b"v"}], idempotency_key=job.key)
    assert (again.replayed, again.rows) == (True, 1)
    receipt = job.commit(staged)
    assert (receipt.lsn, receipt.replayed) == (again.lsn, False), "the job itself knows it too"


def test_H31_a_begin_that_cannot_be_checked_is_unavailable(store):
    """Nothing can have become visible: it can simply be run again."""
    away = Away(store)
    db = Database(away)
    db.create(NAME)
    away.armed = True
    with pytest.raises(reef.UnavailableError, match="away"):
        BulkJob(db, NAME)


def test_H31_a_put_without_a_response_is_unknown_and_a_refused_one_is_not(db, store, monkeypatch):
    """H31: a request that may have landed is unknown; one that was refused every time is not."""
    monkeypatch.setattr(appending, "DEADLINE_S", 0.0)
    job, staged = staged_job(db)
    job._appender._log._store = Faults(store, [Rule(Fault.FAIL_AFTER, "create", "*/wal/*")])
    with pytest.raises(reef.OutcomeUnknownError) as raised:
        job.commit(staged)
    assert repr(job.key) in raised.value.hint
    job, staged = staged_job(db)
    job._appender._log._store = Refuses(store)
    with pytest.raises(reef.UnavailableError, match="refused"):
        job.commit(staged)


class Refuses(Wrapper):
    """Takes nothing."""

    def create(self, key, body):
        """Write nothing, and say so."""
        raise reef.UnavailableError(f"{key} was refused")


def test_H31_the_last_attempt_is_checked(db, monkeypatch):
    """H31: a commit that took the last try has counted all the same."""
    job, staged = staged_job(db)
    monkeypatch.setattr(appending, "TRIES_MAX", 1)
    assert job.commit(staged).lsn == 2


def test_H31_no_slot_at_all_is_unavailable(db, monkeypatch):
    """The job is open still, so that none of its tries has counted, for certain."""
    writer = db.writer(NAME)
    job, staged = staged_job(db)
    monkeypatch.setattr(appending, "TRIES_MAX", 2)
    interpose(job, before=[lambda: writer.put(b"k", b"v")] * 2)
    with pytest.raises(reef.UnavailableError, match="no slot for a ingest"):
        job.commit(staged)
    assert dict(db.reader(NAME).scan()) == {b"k": b"v"}


# --- H53: jobs below the floor -------------------------------------------------------


def roll_window(db):
    """Commit a key, so that a window of one forgets all others."""
    db.writer(NAME).put(b"k", b"v", idempotency_key="another")


@pytest.fixture
def narrow(store):
    """Give a namespace that remembers a single key."""
    db = Database(store)
    make_with_window(db, NAME, 1)
    return db


def test_H53_an_ingest_whose_key_was_forgotten_at_once_counts(narrow):
    """H53: the log itself shows that it ended the job."""
    job, staged = staged_job(narrow)
    interpose(job, after=[lambda: roll_window(narrow)])
    receipt = job.commit(staged)
    assert (receipt.lsn, receipt.replayed) == (2, False)


def test_H53_an_ingest_that_was_folded_and_forgotten_is_known_by_its_segments(narrow):
    """H53: neither log nor window has the job, and the manifest names its staged segments."""
    job, staged = staged_job(narrow)
    interpose(job, after=[lambda: (roll_window(narrow), fold(narrow, NAME))])
    receipt = job.commit(staged)
    assert (receipt.lsn, receipt.replayed) == (2, False)


def test_H53_a_job_without_any_trace_is_unknown():
    """H53: folded, forgotten and compacted: it is not said that it did not count."""
    world = World()
    make_with_window(world.db, NAME, 1)
    job, staged = world.run(lambda: staged_job(world.db))
    others = [lambda: (roll_window(world.db), world.fold(), world.compact())]
    interpose(job, after=others)
    with pytest.raises(reef.OutcomeUnknownError, match="has left the dedup window"):
        world.run(lambda: job.commit(staged))


def test_H28_a_job_that_was_aborted_and_folded_is_reported_as_aborted(db, store):
    """H28: the abort stays in the log, also below the floor: the outcome is known."""
    job, staged = staged_job(db)
    abort = Job(job.id, key=job.key)
    ends = Appender(store, USERS)
    others = [lambda: (ends.append(WalKind.ABORT, abort, job.schema), fold(db, NAME))]
    interpose(job, before=others)
    with pytest.raises(reef.ConflictError, match="was aborted"):
        job.commit(staged)
    assert dict(db.reader(NAME).scan()) == {}


def test_H28_an_abort_in_a_slot_that_was_collected_proves_nothing():
    """H28, H53: after so long a time it may have been put where a batch was before, and have
    ended nothing.
    """
    world = World()
    world.db.create(NAME)
    job, staged = world.run(lambda: staged_job(world.db))
    abort = Job(job.id, key=job.key)
    ends = Appender(world.bucket, USERS)
    others = [
        lambda: (
            ends.append(WalKind.ABORT, abort, job.schema),
            world.fold(),
            world.advance(GRACE_S),
        )
    ]
    interpose(job, before=others)
    with pytest.raises(reef.OutcomeUnknownError):
        world.run(lambda: job.commit(staged))


def test_H35_a_begin_that_was_reaped_and_folded_is_not_begun_again(db, store):
    """H35: a job's state only moves forward, and its id is never used again."""
    schema = HeadFinder(store, USERS).find().manifest.schema
    job = Job("j", key="j")
    ends = Appender(store, USERS)
    appender = Appender(store, USERS)
    reap = [lambda: (ends.append(WalKind.ABORT, job, schema), fold(db, NAME))]
    appender._log._store = ActsOnPut(store, after=reap)
    assert not appender.append(WalKind.BEGIN, job, schema).counts
    assert HeadFinder(store, USERS).find().manifest.open_jobs == ()
    assert appender.read_log().open_jobs == {}


def test_H10_a_listing_counts_only_while_its_head_is_fresh():
    """H10: the log was extended, folded and swept after the listing: it is listed again."""
    world = World()
    world.db.create(NAME)

    def extend_the_log():
        with world.db.writer(NAME) as writer:
            writer.put(b"k", b"v")
        world.fold()
        world.advance(GRACE_S)

    slow = At(world.bucket, "list", "/wal/", extend_the_log, after=True)
    seen = world.run(lambda: Appender(slow, USERS).read_log())
    assert seen.manifest == world.head()
    assert seen.open_slot == world.head().wal_floor


def test_H17_a_slot_that_a_repair_voided_is_skipped():
    """H17: jobs follow the published repairs, as every reader does."""
    world = World()
    with world.db.writer(NAME) as writer:
        lsn = writer.put(b"lost", b"v").lsn
        last = writer.put(b"k", b"v").lsn
    world.bucket.put(USERS.wal_object(lsn), b"nonsense")
    with pytest.raises(reef.CorruptionError, match=f"LSN {lsn} "):
        world.run(lambda: BulkJob(world.db, NAME))
    world.publish(skipped_lsns=(lsn,))
    job, staged = world.run(lambda: staged_job(world.db))
    assert world.run(lambda: job.commit(staged)).lsn == last + 2
    assert world.rows() == {b"k": b"v", b"mine": b"v"}


# --- H57: one key -------------------------------------------------------------------------


@pytest.mark.parametrize("folds", [False, True])
def test_H57_of_three_drivers_with_one_key_one_counts(db, folds):
    """H57: each loses its slot to the next one; all of them return the winner's receipt."""
    (one, first), (two, second), (three, third) = (
        staged_job(db, key, idempotency_key="k") for key in (b"1", b"2", b"3")
    )
    receipts = []

    def last():
        receipts.append(three.commit(third))
        if folds:
            fold(db, NAME)

    interpose(one, before=[lambda: receipts.append(two.commit(second))])
    interpose(two, before=[last])
    receipts.append(one.commit(first))
    assert [receipt.replayed for receipt in receipts] == [False, True, True]
    assert len({receipt.lsn for receipt in receipts}) == 1
    assert folds or list(kinds(db.store).values()).count("ingest") == 1
    for _ in range(2):
        assert dict(db.reader(NAME).scan()) == {b"3": b"v"}
        fold(db, NAME)


def test_H57_an_ingest_that_lands_behind_the_winners_does_not_count(db):
    """H57: the rival came between the read and the last listing; replays skip the second one."""
    writer = db.writer(NAME)
    job, staged = staged_job(db, idempotency_key="k")
    rival, theirs = staged_job(db, b"theirs", idempotency_key="k")
    nothing = dict  # does nothing at the first read and the second
    interpose(
        job,
        before=[lambda: writer.put(b"k", b"v")],
        listing=[nothing, nothing, lambda: rival.commit(theirs)],
    )
    receipt = job.commit(staged)
    assert list(kinds(db.store).values()).count("ingest") == 2
    assert (receipt.replayed, receipt.lsn) == (True, rival.receipt.lsn)
    for _ in range(2):
        assert dict(db.reader(NAME).scan()) == {b"theirs": b"v", b"k": b"v"}
        fold(db, NAME)


# --- H28: leases, and who is reaped -------------------------------------------------------


class ActsOnLease(Wrapper):
    """Lets its holder act when a lease is about to be read."""

    act = None
    always = False

    def get_tagged(self, key):
        """Act first."""
        if "/leases/" in key and self.act is not None:
            act = self.act
            self.act = act if self.always else None
            act()
        return self.inner.get_tagged(key)


def test_H28_a_lease_that_moves_while_it_is_read_is_seen(store):
    """H28: without If-Match a renewal has another name; the old one is gone when it is read."""
    moving = ActsOnLease(store)
    moving.capabilities = replace(store.capabilities, if_match=False)
    Database(moving).create(NAME)
    head = HeadFinder(store, USERS).find().manifest
    lease = take_lease(moving, USERS, head, owner="me", ttl_s=60.0)
    moving.act = lease.renew
    (found,) = find_generation_leases(moving, USERS, moving.now(), 1.0)
    assert (found.owner, found.expired, found.key) == ("me", False, USERS.lease(lease.record.id))


def test_H28_leases_that_never_come_to_rest_hold_everything():
    """H28: an unseen object may hold anything: nothing is deleted and no job is reaped."""
    world = folded_world()
    job, _ = world.run(lambda: staged_job(world.db))
    world.run(job.let_go)
    world.sweep()
    world.advance(DAY_S)
    moving = ActsOnLease(world.bucket)
    moving.capabilities = replace(world.bucket.capabilities, if_match=False)
    lease = take_lease(moving, USERS, world.head(), owner="me", ttl_s=60.0)
    moving.act, moving.always = lease.renew, True
    found = list(find_generation_leases(moving, USERS, moving.now(), 1.0))
    assert [(lease.record.generation, lease.expired, lease.owner) for lease in found] == [
        (0, False, None)
    ]
    report = world.sweep(Database(moving))
    assert (report.deleted, report.jobs_reaped) == ((), 0)
    moving.act = None
    report = world.sweep(Database(moving))
    assert report.deleted
    assert report.jobs_reaped == 1


def test_H28_a_job_that_another_process_resumes_is_not_reaped():
    """H28: the new lease exists before the old one is deleted, whenever the sweep lists."""
    world = World()
    world.db.create(NAME)
    job, staged = world.run(lambda: staged_job(world.db, lease_ttl_s=10 * DAY_S))
    handle, resumed = job.handle, []
    world.advance(2 * 3600)
    moving = ActsOnLease(world.bucket)
    moving.act = lambda: resumed.append(BulkJob.resume(handle))
    report = world.run(lambda: sweep(Database(moving), NAME, apply=True))
    assert report.jobs_reaped == 0
    world.run(lambda: resumed[0].commit(staged))
    assert world.rows() == {b"mine": b"v"}


@pytest.mark.parametrize("ending", ["commit", "abort", "let_go"])
def test_H28_a_resumed_job_has_one_lease_and_leaves_none(db, store, ending):
    """H28: it has its own lease from the start, and the lease it adopted is gone."""
    job, staged = staged_job(db)
    resumed = BulkJob.resume(job.handle)
    (lease,) = find_generation_leases(store, USERS, store.now(), 1.0)
    assert lease.key == USERS.lease(resumed.handle.lease_id)
    assert lease.key != USERS.lease(job.handle.lease_id)
    getattr(resumed, ending)(*([staged] if ending == "commit" else []))
    assert list(find_generation_leases(store, USERS, store.now(), 1.0)) == []


def test_H28_a_job_is_reaped_when_it_was_silent_for_so_long():
    """H28: a lease may be lost for a short time by a live driver."""
    world = World()
    world.db.create(NAME)
    job, _ = world.run(lambda: staged_job(world.db))
    world.run(job.let_go)
    world.advance(1800)
    assert world.sweep().jobs_reaped == 0
    assert world.sweep(silent_job_s=1700.0).jobs_reaped == 1


def test_H28_a_dead_job_that_staged_nothing_is_reaped_too():
    """H28: or the head would carry it along for ever; an abort is not reported twice."""
    world = World()
    world.db.create(NAME)
    job = world.run(lambda: BulkJob(world.db, NAME))
    world.run(job.let_go)
    world.advance(DAY_S)
    world.fold()
    assert [open_job.id for open_job in world.head().open_jobs] == [job.id]
    assert [world.sweep().jobs_reaped for _ in range(2)] == [1, 0]
    world.fold()
    assert world.head().open_jobs == ()


def test_H54_a_repair_since_does_not_stop_the_sweep_of_an_old_log():
    """H54, H17: a snapshot's log has a slot that was voided later: readers of it skip the slot."""
    world = World()
    with world.db.writer(NAME) as writer:
        lsn = writer.put(b"lost", b"v").lsn
        writer.put(b"k", b"v")
    pinned = world.head()
    world.fold()
    world.bucket.put(USERS.wal_object(lsn), b"nonsense")
    world.bucket.put(USERS.segment("orphan"), b"x")  # so that the log has to be read
    world.publish(snapshots=(SnapshotEntry("s", pinned.generation),))
    with pytest.raises(reef.CorruptionError, match=f"LSN {lsn} is missing"):
        world.sweep()
    world.publish(skipped_lsns=(lsn,))
    world.advance(DAY_S)
    assert any("orphan" in doomed.key for doomed in world.sweep().condemned)


def test_H28_a_job_that_commits_while_it_is_being_reaped_wins():
    """H28: the log decides; it is not aborted and not reported as reaped."""
    world = World()
    world.db.create(NAME)
    job, staged = world.run(lambda: staged_job(world.db))
    world.run(job.let_go)
    world.advance(DAY_S)
    slow = At(world.bucket, "list", "/leases/", lambda: job.commit(staged), after=True)
    assert world.sweep(Database(slow)).jobs_reaped == 0
    assert kinds(world.bucket) == {1: "begin", 2: "ingest"}
    assert world.rows() == {b"mine": b"v"}
