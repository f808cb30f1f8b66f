"""H5, H9, H21, H22, H25 of the catalog: each once by hand, where the simulator has many."""

import threading

import pytest

from reef.catalog import Catalog, Retention
from reef.catalog.snapshot import Turnstile
from reef.errors import ConflictError, NotFoundError, OutcomeUnknownError
from reef.runtime import REAL
from reef.stores import Outcome, ReadBack, RetryPolicy, Wrapper, WriteResult
from reef.stores.memory import MemoryStore
from reef.testing import Fault, Faults, Rule
from reef.testing.explore.states import ContentBucket
from tests.unit.catalog.conftest import AT_ONCE, put, without_if_match

NO_PATIENCE = RetryPolicy(attempts_max=1)


@pytest.fixture(params=["If-Match", "numbered"])
def bucket(request):
    """Return a bucket of each kind of head."""
    return MemoryStore() if request.param == "If-Match" else without_if_match()


class Elsewhere(Wrapper):
    """The bucket as another process sees it, which does not wait for the commits of this one."""

    def __init__(self, inner):
        super().__init__(inner)
        self.url = f"{inner.url}#elsewhere"


class Hook(Elsewhere):
    """Calls something right before, or right after, the first matching write."""

    def __init__(self, inner, *, names, before=None, after=None, lost=False):
        super().__init__(inner)
        self.names, self.before, self.after, self.lost = names, before, after, lost

    def create(self, key, body):
        return self._write(key, lambda: self.inner.create(key, body))

    def replace(self, key, body, tag):
        return self._write(key, lambda: self.inner.replace(key, body, tag))

    def _write(self, key, write):
        before, after = self.before, self.after
        if not key.startswith(self.names) or not (before or after or self.lost):
            return write()
        self.before = self.after = None
        if before:
            before()
        result = write()
        if after:
            after()
        if self.lost:
            self.lost = False
            return WriteResult(Outcome.UNKNOWN)
        return result


HEADS = ("HEAD.json", "heads/")


def increment(session):
    """Raise the counter by one."""
    session.put("n", b"%d" % (int(session.get("n") or 0) + 1))


def value(bucket):
    """Return the counter as a new process sees it."""
    return int(Catalog(bucket).get_latest("n") or 0)


def test_H21_a_refused_transaction_is_never_adopted(bucket):
    """H21: segment durable, head lost, "conflict" reported: the next one does not publish it."""
    Catalog(bucket).transact(increment)
    rival = Catalog(bucket)
    slow = Catalog(Hook(bucket, names=HEADS, before=lambda: rival.transact(increment)))
    session = slow.session_write()
    increment(session)
    with pytest.raises(ConflictError):
        session.commit()
    assert Catalog(bucket).verify().orphans == 1
    assert Catalog(bucket).recover_orphans() == 0
    slow.transact(increment)
    assert value(bucket) == 3


def test_H21_a_commit_under_another_one_is_no_conflict(bucket):
    """H21: the response to the head PUT is lost, another commits on top: still "committed"."""
    Catalog(bucket).transact(increment)
    rival = Catalog(bucket)
    hook = Hook(bucket, names=HEADS, after=lambda: rival.transact(increment), lost=True)
    assert Catalog(ReadBack(hook)).transact(lambda s: increment(s) or "done") == "done"
    assert value(bucket) == 3


def test_H21_an_adopted_writer_finds_itself_committed(bucket):
    """H21: another process publishes the segment before its slow writer: "committed"."""
    Catalog(bucket).transact(increment)

    def adopt():
        bucket.delete_many([info.key for info in bucket.list("leases/")])  # expired and reaped
        assert Catalog(bucket).recover_orphans() == 1

    slow = Catalog(Hook(bucket, names=HEADS, before=adopt))
    slow.transact(increment)
    assert value(bucket) == 2


class Died(Exception):
    """The process is gone."""


def test_H21_the_transaction_of_a_dead_writer_is_adopted(bucket):
    """H21: durable and unpublished, on the head that is there: the next session finds it done."""

    def die():
        raise Died

    session = Catalog(Hook(bucket, names=HEADS, before=die)).session_write()
    session.put("n", b"5")
    with pytest.raises(Died):
        session.commit()
    assert value(bucket) == 0
    with Catalog(bucket).session_write() as after:
        assert after.get("n") == b"5"


def test_H21_an_orphan_of_a_lost_history_is_not_adopted(bucket):
    """H21: it has the next number, and is based on a segment that is not in this history."""
    Catalog(bucket).transact(increment)

    def die():
        raise Died

    session = Catalog(Hook(bucket, names=HEADS, before=die)).session_write()
    increment(session)
    with pytest.raises(Died):
        session.commit()
    _, orphan = [info.key for info in bucket.list("segments/")]
    bucket.delete_many([info.key for info in bucket.list() if info.key != orphan])
    put(Catalog(bucket), other=b"1")
    assert Catalog(bucket).recover_orphans() == 0
    assert value(bucket) == 0


def test_H21_a_living_writer_is_left_alone(bucket):
    """H21: a segment whose session has a living lease is its writer's to publish."""
    seen = []
    slow = Catalog(
        Hook(bucket, names=HEADS, before=lambda: seen.append(Catalog(bucket).recover_orphans()))
    )
    slow.transact(increment)
    assert seen == [0]
    assert value(bucket) == 1


def test_H21_an_unknown_commit_is_settled(bucket):
    """H21: no response at all, not even to a read: resolve publishes the durable segment, once."""
    faults = Faults(bucket)
    catalog = Catalog(ReadBack(faults, NO_PATIENCE), backoff=NO_PATIENCE)
    catalog.transact(increment)
    session = catalog.session_write()
    increment(session)
    faults.rules = [Rule(Fault.FAIL_BEFORE, "*", "H*"), Rule(Fault.FAIL_BEFORE, "*", "heads*")]
    with pytest.raises(OutcomeUnknownError) as unknown:
        session.commit()
    faults.rules = []
    assert value(bucket) == 1
    assert catalog.resolve(unknown.value.receipt) is True
    assert catalog.resolve(unknown.value.receipt) is True
    assert value(bucket) == 2


def test_H21_a_segment_that_did_not_arrive_loses_its_name(bucket):
    """H21: resolve says "not committed", and then the late segment cannot arrive any more."""
    late = []

    class Late(Elsewhere):
        def create(self, key, body):
            if key.startswith("segments/") and not late:
                late.append((key, body))
                return WriteResult(Outcome.UNKNOWN)
            return self.inner.create(key, body)

    catalog = Catalog(Late(bucket))
    session = catalog.session_write()
    increment(session)
    with pytest.raises(OutcomeUnknownError) as unknown:
        session.commit()
    assert catalog.resolve(unknown.value.receipt) is False
    assert bucket.create(*late[0]).outcome is Outcome.EXISTS
    assert Catalog(bucket).recover_orphans() == 0
    assert catalog.resolve(unknown.value.receipt) is False
    catalog.transact(increment)
    assert value(bucket) == 1
    assert Catalog(bucket).verify().problems == []


def test_H21_a_free_name_does_not_prove_that_it_never_was_there(bucket):
    """H21: adopted, folded and collected while `resolve` was slow: it is committed all the same."""
    faults = Faults(bucket, [Rule(Fault.FAIL_AFTER, "create", "segments/*")])
    writer = Catalog(ReadBack(faults, NO_PATIENCE), retention=AT_ONCE)
    session = writer.session_write()
    increment(session)
    with pytest.raises(OutcomeUnknownError) as unknown:
        session.commit()

    def overtake():
        other = Catalog(bucket, retention=AT_ONCE)
        assert other.recover_orphans() == 1
        other.compactor().compact_and_gc()
        assert list(bucket.list("segments/")) == []

    slow = Catalog(Hook(bucket, names=("segments/",), before=overtake))
    assert slow.resolve(unknown.value.receipt) is True
    assert value(bucket) == 1


@pytest.mark.parametrize(("fault", "calls"), [(Fault.FAIL_AFTER, 1), (Fault.FAIL_BEFORE, 2)])
def test_H21_transact_asks_before_another_try(bucket, fault, calls):
    """H21: a segment that arrived unheard is published, not made again; one that did not is."""
    Catalog(bucket).transact(lambda session: None)
    rules = [Rule(fault, "create", "segments/*", times=1)]
    catalog = Catalog(ReadBack(Faults(bucket, rules), NO_PATIENCE))
    called = []
    catalog.transact(lambda session: called.append(increment(session)))
    assert len(called) == calls
    assert value(bucket) == 1


def test_H21_transact_resolves_a_lost_response_itself(bucket):
    """H21: every third response is lost; the counter equals the acknowledged increments."""
    rules = [
        Rule(Fault.FAIL_AFTER, method, pattern, chance=0.3)
        for method, pattern in (("*e", "HEAD*"), ("create", "heads/*"), ("create", "segments/*"))
    ]
    catalog = Catalog(ReadBack(Faults(bucket, rules), RetryPolicy(first_delay_s=0.001)))
    for _ in range(20):
        catalog.transact(increment)
    assert sum(rule.struck for rule in rules) > 3
    assert value(bucket) == 20


class SweepBetween(Elsewhere):
    """A compaction and a whole collection before every call of a session."""

    def __init__(self, inner):
        super().__init__(inner)
        self.sweeps = 0

    def sweep(self):
        self.sweeps += 1
        other = Catalog(self.inner, retention=AT_ONCE, cache=None)
        other.transact(lambda s: s.put("other", b"%d" % self.sweeps))
        other.compactor().compact_and_gc()

    def get_tagged(self, key):
        self.sweep()
        return self.inner.get_tagged(key)

    def get_range(self, key, start, end):
        self.sweep()
        return self.inner.get_range(key, start, end)

    def put(self, key, body):
        self.sweep()
        return self.inner.put(key, body)

    def create(self, key, body):
        self.sweep()
        return self.inner.create(key, body)


def test_H22_a_sweep_between_every_two_steps_of_a_session(bucket):
    """H22: compact and collect before each of its calls; the session reads and commits."""
    put(Catalog(bucket), a=b"1")
    Catalog(bucket).compactor().compact_once()
    store = SweepBetween(bucket)
    catalog = Catalog(store, retention=AT_ONCE, cache=None)
    with catalog.session_write() as session:
        assert session.get("a") == b"1"
        assert session.scan_range("a", "b") == [(b"a", b"1")]
        session.put("mine", b"x")
        # Each try loses to the sweep's own commit; the bounded number of them ends typed.
        store.sweep, swept = (lambda: None), store.sweep
        session.commit()
        store.sweep = swept
    assert store.sweeps > 5
    with catalog.session_read() as session:
        assert session.get("mine") == b"x"
    assert Catalog(bucket).verify().problems == []


def test_H22_an_old_state_is_refused_or_kept(bucket):
    """H22: with a sweep before each call, session_at is refused at once, or reads to its end."""
    catalog = Catalog(bucket, retention=AT_ONCE, cache=None)
    put(catalog, a=b"1")
    catalog.compactor().compact_once()
    taken = catalog.snapshot()
    with Catalog(bucket).session_at(taken) as session:
        SweepBetween(bucket).sweep()
        assert session.get("a") == b"1"
        assert session.scan() == [(b"a", b"1")]
    SweepBetween(bucket).sweep()
    with pytest.raises(NotFoundError):
        Catalog(SweepBetween(bucket)).session_at(taken)


def test_H22_leases_are_listed_again_before_the_deletion(bucket):
    """H22: a lease that came between the listing of phase 1 and its plan holds phase 3 back."""
    catalog = Catalog(bucket, retention=AT_ONCE)
    put(catalog, a=b"1")
    catalog.compactor().compact_once()
    old = catalog.snapshot()
    put(catalog, a=b"2")
    catalog.compactor().compact_once()
    sessions = []
    hook = Hook(
        bucket,
        names=("gc/",),
        before=lambda: sessions.append(Catalog(bucket, cache=None).session_at(old)),
    )
    compactor = Catalog(hook, retention=AT_ONCE).compactor()
    assert compactor.gc_compute() is not None
    assert "a lease needs" in compactor.gc_delete_and_reset().waits
    with sessions.pop() as session:
        assert session.get("a") == b"1"
    assert compactor.gc_delete_and_reset().checkpoints == 1


def test_H25_a_rival_before_each_attempt_ends_typed(bucket):
    """H25: a bounded number of losses, then ConflictError; nothing of it is ever applied."""
    rival = Catalog(bucket)

    class Rival(Elsewhere):
        tries = 0

        def create(self, key, body):
            return self._race(key, lambda: self.inner.create(key, body))

        def replace(self, key, body, tag):
            return self._race(key, lambda: self.inner.replace(key, body, tag))

        def _race(self, key, write):
            if key.startswith(HEADS):
                self.tries += 1
                put(rival, rival=b"%d" % self.tries)
            return write()

    store = Rival(bucket)
    policy = RetryPolicy(attempts_max=5, first_delay_s=0.001)
    with Catalog(store, backoff=policy).session_write() as session:
        session.put("mine", b"x")
        with pytest.raises(ConflictError, match="5 times in a row"):
            session.commit()
    assert store.tries == 5
    assert Catalog(bucket).recover_orphans() == 0
    assert Catalog(bucket).get_latest("mine") is None


def test_H25_threads_of_a_process_do_not_race_each_other(bucket):
    """H25: one commit at a time in a process, and each knows of the one before: no swap is lost."""
    catalog = Catalog(bucket)
    threads = [
        threading.Thread(
            target=lambda n=n: [put(catalog, **{f"k{n}.{i}": b"x"}) for i in range(10)]
        )
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(catalog.scan_latest()) == 80
    assert catalog.metrics.counter("catalog.cas_conflicts").value == 0
    assert catalog.verify().orphans == 0


def test_H25_a_turnstile_lets_so_many_in():
    """H25: leases and plans are collected a few at a time, for every caller."""
    turnstile, inside, most = Turnstile(REAL, 2), [], []
    gate = threading.Barrier(8)

    def take():
        gate.wait(60)
        for _ in range(20):
            with turnstile.pass_through():
                inside.append(1)
                most.append(len(inside))
                REAL.sleep(0.0005)
                inside.pop()

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 160
    assert max(most) == 2


def test_H5_no_two_heads_are_equal():
    """H5: tags made of bytes repeat for equal bytes; so no two heads have equal bytes."""
    bucket = ContentBucket()
    catalog = Catalog(bucket)
    put(catalog, a=b"1")
    parts = catalog._writable()
    known = parts.heads.load()
    tags = {known.version.tag}
    for _ in range(5):
        again = parts.heads.load()
        parts.heads.publish(again, again.head)
        tags.add(parts.heads.load().version.tag)
    assert len(tags) == 6
    swap, _ = parts.heads.publish(known, known.head)
    assert swap == "lost"


def test_H9_only_what_cannot_change_is_cached(bucket):
    """H9: a warm reader sees the next commit at once, and a "not found" is not remembered."""
    reader, writer = Catalog(bucket), Catalog(bucket)
    put(writer, a=b"1")
    assert reader.get_latest("a") == b"1"
    assert reader.get_latest("b") is None
    put(writer, a=b"2", b=b"3")
    assert reader.get_latest("a") == b"2"
    assert reader.get_latest("b") == b"3"
    cached = {name for name, _ in reader.cache._blobs}
    assert cached
    assert all("/segments/" in name or "/checkpoints/" in name for name in cached)


def test_H9_a_damaged_cache_is_read_around(bucket):
    """H9: bytes that went bad in the cache are fetched again."""
    put(Catalog(bucket), a=b"1")
    reader = Catalog(bucket)
    reader.get_latest("a")
    for key in reader.cache._blobs:
        reader.cache._blobs[key] = b"damaged"
    other = Catalog(bucket, cache=reader.cache)
    assert other.get_latest("a") == b"1"


def test_readers_without_a_lease_follow_the_head(bucket):
    """Objects of a head are collected while it is read: the read restarts at the newer head."""
    put(Catalog(bucket), a=b"1")

    class Vanishing(Elsewhere):
        swept = False

        def get_tagged(self, key):
            if key.startswith("segments/") and not self.swept:
                self.swept = True
                Catalog(self.inner, retention=AT_ONCE).compactor().compact_and_gc()
            return self.inner.get_tagged(key)

    assert Catalog(Vanishing(bucket), retention=Retention()).get_latest("a") == b"1"
