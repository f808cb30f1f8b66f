"""H1 to H10, H25, H43, H51: what object stores do to those who trust them."""

import pickle
import time
from unittest.mock import ANY

import pytest

from reef import stores
from reef.errors import ClosedError, CorruptionError, ErrorKind, InvalidInputError, UnavailableError
from reef.runtime import REAL, ProcessBound
from reef.stores import Outcome, ReadBack, Retry, RetryPolicy
from reef.stores.base import fetch
from reef.stores.local import LocalStore
from reef.stores.memory import MemoryStore
from reef.stores.probe import CasVerdict, agree_on_cas, as_proved, probe, remembered
from reef.testing import Fault, Faults, Recorder, Rule, Simulation
from tests.support.child_process import in_child
from tests.support.http_proxy import Caching, proxy

QUICK = RetryPolicy(attempts_max=5, deadline_s=5.0, first_delay_s=0.001, delay_max_s=0.002)
BODY = b"epoch 1, writer a, write id 01J"


def faulty(*rules, bucket=None):
    """Return (the store users get, its calls, the bucket), with faults in between."""
    bucket = bucket or MemoryStore()
    recorder = Recorder(bucket)
    return ReadBack(Retry(Faults(recorder, rules), QUICK), QUICK), recorder, bucket


@pytest.mark.parametrize("fault", [Fault.FAIL_AFTER, Fault.THROTTLE_429_AFTER])
def test_H1_own_object_after_a_lost_response_is_a_success(fault):
    """H1: the PUT landed, its response was lost, the retry gets "exists": it is our own."""
    store, recorder, bucket = faulty(Rule(fault, "create", times=1))
    assert store.create("wal/1", BODY).outcome is Outcome.CREATED
    assert [call.result for call in recorder.calls if call.method == "create"] == [
        "created",
        "exists",
    ]
    assert bucket.get("wal/1") == BODY


def test_H1_a_foreign_object_after_a_lost_response_is_a_loss():
    """H1: equal names are not enough; the winner's bytes are handed on."""
    store, _, bucket = faulty(Rule(Fault.FAIL_BEFORE, "create", times=1))
    bucket.put("wal/1", b"someone else's")
    result = store.create("wal/1", BODY)
    assert result.outcome is Outcome.EXISTS
    assert result.winner == b"someone else's"


def test_H1_a_failed_read_back_leaves_it_unknown():
    """H1: if the object cannot be read the outcome is unknown, never lost or won."""
    store, _, _ = faulty(Rule(Fault.FAIL_AFTER, "create", times=1), Rule(Fault.FAIL_BEFORE, "get"))
    assert store.create("wal/1", BODY).outcome is Outcome.UNKNOWN


def test_H1_every_try_sends_identical_bytes():
    """H1: a retry sends the same bytes, so that the body identifies its writer."""
    sent = []

    class Noting(Faults):
        def create(self, key, body):
            sent.append(body)
            return super().create(key, body)

    store = ReadBack(Noting(MemoryStore(), [Rule(Fault.FAIL_AFTER, "create", times=3)]), QUICK)
    assert store.create("wal/1", BODY).landed
    assert sent == [BODY] * len(sent)
    assert len(sent) >= 2


def test_H1_replace_after_a_lost_response():
    """H1: the same for If-Match: our own bytes there mean that it landed."""
    store, _, bucket = faulty(Rule(Fault.FAIL_AFTER, "replace", times=1))
    tag = bucket.put("head", b"old")
    assert store.replace("head", BODY, tag).outcome is Outcome.REPLACED
    assert bucket.get("head") == BODY


def test_H1_replace_that_was_overtaken_stays_unknown():
    """H1: other bytes after a lost response prove nothing: ours may have been replaced since."""
    bucket = MemoryStore()

    class Overtaken(Faults):
        def replace(self, key, body, tag):
            result = super().replace(key, body, tag)
            if result.outcome is Outcome.UNKNOWN:
                self.inner.put(key, b"a later writer's")
            return result

    store = ReadBack(Overtaken(bucket, [Rule(Fault.FAIL_AFTER, "replace", times=1)]), QUICK)
    tag = bucket.put("head", b"old")
    assert store.replace("head", BODY, tag).outcome is Outcome.UNKNOWN
    assert bucket.get("head") == b"a later writer's"


def test_H2_a_conflict_with_nothing_there_is_tried_again():
    """H2: 409 can mean that nothing landed: check, and if the name is free, send again."""
    store, _, bucket = faulty(Rule(Fault.CONFLICT_409, "create", times=2))
    assert store.create("wal/1", BODY).outcome is Outcome.CREATED
    assert bucket.get("wal/1") == BODY


def test_H2_a_conflict_with_a_foreign_object_is_a_loss():
    """H2: 409 with another's object there is a conflict."""
    store, _, bucket = faulty(Rule(Fault.CONFLICT_409, "create", times=1))
    bucket.put("wal/1", b"foreign")
    assert store.create("wal/1", BODY).outcome is Outcome.EXISTS


def test_H2_a_conflict_on_replace_with_the_tag_unchanged_is_tried_again():
    """H2: the tag is still the one we named, so the replace is sent again."""
    store, _, bucket = faulty(Rule(Fault.CONFLICT_409, "replace", times=1))
    tag = bucket.put("head", b"old")
    assert store.replace("head", BODY, tag).outcome is Outcome.REPLACED


def test_H3_an_upload_whose_last_response_was_lost_is_found():
    """H3: the completion's response is dropped; the object is there, whole, under its own name."""
    store, _, bucket = faulty(Rule(Fault.FAIL_AFTER, "upload", times=1))
    assert store.upload("segments/01J.seg", [b"ab", b"cd"]) == 4
    assert bucket.get("segments/01J.seg") == b"abcd"


def test_H3_an_upload_that_did_not_finish_is_an_error():
    """H3: no object, no success."""
    store, _, bucket = faulty(Rule(Fault.FAIL_BEFORE, "upload"))
    with pytest.raises(UnavailableError):
        store.upload("segments/01J.seg", [b"ab", b"cd"])
    assert list(bucket.list()) == []


def test_H3_stale_uploads_are_swept(ministack):
    """H3: an unfinished multipart upload is ended by abort_stale, young ones are left alone."""
    ministack.make_bucket("stale")
    store = stores.open("s3://stale/data", **ministack.options())
    with ministack.client() as client:
        client.create_multipart_upload(Bucket="stale", Key="data/segments/1.seg")
        client.create_multipart_upload(Bucket="stale", Key="other/segments/1.seg")
        assert store.abort_stale(3600) == 0
        assert store.abort_stale(-5) == 1  # five seconds into the future: all are old by then
        left = client.list_multipart_uploads(Bucket="stale")["Uploads"]
        assert [upload["Key"] for upload in left] == ["other/segments/1.seg"]


# H4 is shown next to the probe, in tests/contract/test_races.py.


@pytest.mark.parametrize("kind", ["memory", "directory"])
def test_H5_tags_do_not_repeat(tmp_path, kind):
    """H5: A → B → A: the first tag must not match the third object, equal bytes or not."""
    store = MemoryStore() if kind == "memory" else LocalStore(str(tmp_path))
    tags = [store.put("head", body) for body in (b"A", b"B") * 200]
    assert len(set(tags)) == 400
    assert store.replace("head", b"C", tags[0]).outcome is Outcome.CHANGED


def test_H5_tags_are_opaque():
    """H5: quotes are part of a tag; it goes back as it came."""
    store = MemoryStore()
    tag = store.put("head", b"A")
    assert tag.startswith('"')
    assert store.replace("head", b"B", tag.strip('"')).outcome is Outcome.CHANGED
    assert store.replace("head", b"B", tag).outcome is Outcome.REPLACED


@pytest.mark.parametrize("fault", [Fault.THROTTLE_429, Fault.THROTTLE_429_AFTER])
def test_H6_throttling_before_and_after_the_write_applied(fault):
    """H6: 429 is treated as unknown, then resolved by sending again and reading."""
    store, _, bucket = faulty(Rule(fault, "create", times=2))
    assert store.create("wal/1", BODY).outcome is Outcome.CREATED
    assert bucket.get("wal/1") == BODY


def test_H6_throttled_reads_back_off_with_jitter():
    """H6: reads wait longer and longer, never in lock-step, and within the deadline."""
    sim = Simulation(1)
    node = sim.process("node")
    policy = RetryPolicy(attempts_max=6, deadline_s=60, first_delay_s=1, delay_max_s=8)
    store = Retry(Faults(node.raw_store(), [Rule(Fault.UNAVAILABLE_503, "get")]), policy)
    waited = []

    def read():
        start_s = node.runtime.boottime_s()
        with pytest.raises(UnavailableError):
            store.get("k")
        waited.append(node.runtime.boottime_s() - start_s)

    for _ in range(5):
        node.spawn(read)
        sim.run()
    sim.close()
    assert all(0 < seconds <= 1 + 2 + 4 + 8 + 8 for seconds in waited)
    assert len(set(waited)) == 5


# H7 is shown in tests/crash: kill -9, power failure, and the order of system calls.


def test_H8_a_short_range_is_read_again():
    """H8: the length is checked inside the retry loop."""
    store, _, bucket = faulty(Rule(Fault.SHORT_READ, "get_range", times=2))
    bucket.put("seg", b"0123456789")
    assert store.get_range("seg", 2, 9) == b"2345678"


def test_H8_short_for_ever_is_an_error():
    """H8: fewer bytes than asked for are never returned as if they were all."""
    store, _, bucket = faulty(Rule(Fault.SHORT_READ, "get_range"))
    bucket.put("seg", b"0123456789")
    with pytest.raises(UnavailableError) as caught:
        store.get_range("seg", 2, 9)
    assert caught.value.kind is ErrorKind.SHORT_READ
    assert caught.value.context["attempts"] == QUICK.attempts_max


def _decode(body):
    if body != b"intact":
        raise CorruptionError("checksum mismatch")
    return "decoded"


@pytest.mark.parametrize("fault", [Fault.SHORT_READ, Fault.WRONG_BYTES])
def test_H8_a_checksum_failure_is_read_again(fault):
    """H8: bytes damaged on the way are fetched once more; the checksum is part of the loop."""
    store, _, bucket = faulty(Rule(fault, "get", times=1))
    bucket.put("wal/1", b"intact")
    assert fetch(store, "wal/1", _decode) == "decoded"


def test_H8_damage_at_rest_is_read_again_and_reported():
    """H8: damaged every time is damage, after a bounded number of reads."""
    store, recorder, bucket = faulty(Rule(Fault.WRONG_BYTES, "get"))
    bucket.put("wal/1", b"intact")
    with pytest.raises(CorruptionError):
        fetch(store, "wal/1", _decode)
    assert len(recorder.calls) == 3


def test_H9_a_cache_in_between_is_not_believed(ministack):
    """H9: neither an old object nor an old "not found" comes out of a caching proxy."""
    ministack.make_bucket("cached")
    direct = stores.open("s3://cached/ns", **ministack.options())
    with proxy(Caching, ministack.address) as cache:
        through = stores.open(
            "s3://cached/ns", **{**ministack.options(), "endpoint": cache.endpoint}
        )
        with pytest.raises(KeyError):
            through.get("manifest/2")
        direct.create("manifest/2", b"published by another")
        assert through.get("manifest/2") == b"published by another"
        direct.put("lease", b"old")
        assert through.get("lease") == b"old"
        direct.put("lease", b"new")
        assert through.get("lease") == b"new"
        assert through.create("manifest/2", b"mine").outcome is Outcome.EXISTS
        assert cache.hits == 0


def test_H9_the_caching_proxy_does_cache(ministack):
    """H9: without the header the same proxy serves stale responses: the test above can fail."""
    import http.client

    ministack.make_bucket("cached")
    with proxy(Caching, ministack.address) as cache:
        for _ in range(2):
            client = http.client.HTTPConnection(cache.endpoint.removeprefix("http://"))
            client.request("GET", "/cached/some-key")
            client.getresponse().read()
            client.close()
        assert cache.hits == 1


def test_H10_a_listing_in_pages_of_one_is_complete():
    """H10: pages are followed to the end, whatever their size."""
    bucket = MemoryStore(page=1)
    for number in range(7):
        bucket.put(f"wal/{number}", b"")
    store, _, _ = faulty(bucket=bucket)
    assert [info.key for info in store.list("wal/")] == [f"wal/{n}" for n in range(7)]


def test_H10_objects_deleted_during_a_listing_do_not_break_it():
    """H10: a sweep between two pages hides the deleted objects and nothing else."""
    bucket = MemoryStore(page=2)
    for number in range(9):
        bucket.put(f"wal/{number}", b"")
    listing = bucket.list("wal/")
    seen = [next(listing).key, next(listing).key]
    bucket.delete_many(["wal/1", "wal/2", "wal/3"])
    seen += [info.key for info in listing]
    assert seen == ["wal/0", "wal/1"] + [f"wal/{n}" for n in range(4, 9)]


def test_H10_a_listing_that_fails_half_way_resumes_where_it_was():
    """H10: a failed page is asked for again; nothing comes twice and nothing is missing."""
    bucket = MemoryStore(page=3)
    for number in range(10):
        bucket.put(f"wal/{number}", b"")

    class BreaksOnce(stores.Wrapper):
        broken = False

        def list(self, prefix="", start_after=""):
            for position, info in enumerate(self.inner.list(prefix, start_after)):
                if position == 4 and not self.broken:
                    self.broken = True
                    raise UnavailableError("connection reset")
                yield info

    listed = Retry(BreaksOnce(bucket), QUICK).list("wal/")
    assert [info.key for info in listed] == [f"wal/{n}" for n in range(10)]


def test_H25_endless_conflicts_end_in_a_typed_outcome():
    """H25: losing for ever is bounded in tries and in time, and the outcome is "unknown"."""
    store, recorder, _ = faulty(Rule(Fault.CONFLICT_409, "create"))
    assert store.create("manifest/2", BODY).outcome is Outcome.UNKNOWN
    assert sum(call.method == "get" for call in recorder.calls) == QUICK.attempts_max


def test_H25_an_unreachable_store_fails_within_its_deadline():
    """H25: the deadline holds even when there would be tries left."""
    sim = Simulation(0)
    node = sim.process("node")
    policy = RetryPolicy(attempts_max=1000, deadline_s=20, first_delay_s=1, delay_max_s=4)
    raw = Faults(node.raw_store(), [Rule(Fault.FAIL_BEFORE, "*")])
    store = ReadBack(Retry(raw, policy), policy)
    took = []

    def write():
        start_s = node.runtime.boottime_s()
        assert store.create("k", BODY).outcome is Outcome.UNKNOWN
        took.append(node.runtime.boottime_s() - start_s)

    node.spawn(write)
    sim.run()
    sim.close()
    assert 10 < took[0] <= 20


class Writer(ProcessBound):
    """Represents every writer handle: they all derive from ProcessBound."""


def test_H43_a_writer_cannot_be_pickled():
    """H43: a copy in another process would be two writers on one epoch."""
    with pytest.raises(InvalidInputError, match="cannot be pickled") as caught:
        pickle.dumps(Writer(REAL))
    assert caught.value.kind is ErrorKind.NOT_PICKLABLE
    assert "open a writer where it is needed" in caught.value.hint


def test_H43_a_forked_writer_refuses():
    """H43: the child notices the new process id; the parent continues."""
    writer = Writer(REAL)
    writer._check_process()

    def try_it():
        with pytest.raises(ClosedError) as caught:
            writer._check_process()
        return caught.value.kind.value

    assert in_child(try_it) == (0, "'forked'")
    writer._check_process()


@pytest.mark.parametrize("scheme", ["directory", "s3"])
def test_H43_stores_are_picklable(tmp_path, scheme, request):
    """H43: stores, unlike writers, travel: wrappers, options and all."""
    if scheme == "directory":
        store = stores.open(str(tmp_path))
    else:
        ministack = request.getfixturevalue("ministack")
        ministack.make_bucket("pickled")
        store = stores.open("s3://pickled/x", **ministack.options(), timeout_s=7)
    store.put("k", b"v")
    copy = pickle.loads(pickle.dumps(store))
    assert copy.get("k") == b"v"
    assert copy.url == store.url


def test_H51_a_warm_remote_store_works_after_fork(ministack):
    """H51: native threads do not survive a fork; the child opens its own and continues."""
    ministack.make_bucket("forked")
    store = stores.open("s3://forked/x", **ministack.options())
    store.put("k", b"v")
    listed = store.list()  # a listing in flight when the fork happens

    def child_work():
        fresh = stores.open("s3://forked/x", **ministack.options())
        store.create("from/child", b"1")
        grandchild = in_child(lambda: store.get("k"))
        return store.get("k"), fresh.get("k"), grandchild

    assert in_child(child_work) == (0, repr((b"v", b"v", (0, repr(b"v")))))
    assert store.get("from/child") == b"1"
    assert next(listed).key in ("from/child", "k")


def test_H51_a_warm_directory_store_works_after_fork(tmp_path):
    """H51: threads of the parent's pool are not waited for in the child."""
    store = stores.open(str(tmp_path))
    body = bytes(1_000_000)
    store.put("k", body)
    ranges = [(0, 10), (300_000, 300_010), (600_000, 600_010)]
    assert len(store.get_ranges("k", ranges)) == 3
    time.sleep(0.1)  # until the pool's threads are idle, which is when a child would trust them
    assert in_child(lambda: len(store.get_ranges("k", ranges))) == (0, "3")


def test_H51_a_memory_store_does_not_travel():
    """H51: a copy of a memory store would be another bucket; opening it elsewhere says so."""
    store = MemoryStore()
    store.put("k", b"v")
    pickled = pickle.dumps(store)
    assert pickle.loads(pickled) is store
    code, output = in_child(lambda: pickle.loads(pickled))
    assert code == 1
    assert "exists only in the process that opened it" in output


class Refusing(stores.Wrapper):
    """A bucket whose credentials expire after the first request."""

    def __init__(self, inner, refuse_from):
        super().__init__(inner)
        self.requests, self.refuse_from = 0, refuse_from

    def _ask(self, call):
        self.requests += 1
        if self.requests >= self.refuse_from:
            raise InvalidInputError("token expired", kind=ErrorKind.ACCESS_DENIED)
        return call()

    def create(self, key, body):
        return self._ask(lambda: self.inner.create(key, body))

    def replace(self, key, body, tag):
        return self._ask(lambda: self.inner.replace(key, body, tag))

    def get_tagged(self, key):
        return self._ask(lambda: self.inner.get_tagged(key))


@pytest.mark.parametrize("refuse_from", [2, 3])
@pytest.mark.parametrize("method", ["create", "replace"])
def test_H1_nothing_is_raised_once_a_try_may_have_landed(method, refuse_from):
    """H1: the response was lost, then the credentials expire: unknown, never an error."""
    bucket = MemoryStore()
    tag = bucket.put("k", b"old") if method == "replace" else None
    lost = Faults(bucket, [Rule(Fault.FAIL_AFTER, method, times=1)])
    store = ReadBack(Retry(Refusing(lost, refuse_from), QUICK), QUICK)
    arguments = ("k", BODY, tag) if tag else ("k", BODY)
    assert getattr(store, method)(*arguments).outcome is Outcome.UNKNOWN
    assert bucket.get("k") == BODY


def test_H1_a_refusal_without_doubt_is_raised():
    """H1: nothing was sent that could have landed, so the refusal is the result."""
    store = ReadBack(Refusing(MemoryStore(), 1), QUICK)
    with pytest.raises(InvalidInputError, match="token expired"):
        store.create("k", BODY)


def test_H1_a_read_that_is_refused_leaves_the_outcome_unknown():
    """H1: "exists", but the owner of the object cannot be read: unknown."""
    bucket = MemoryStore()
    bucket.put("k", BODY)
    assert ReadBack(Refusing(bucket, 2), QUICK).create("k", BODY).outcome is Outcome.UNKNOWN


def test_H4_silence_is_neither_guilt_nor_innocence():
    """H4: a store that does not respond is unavailable, and no verdict is kept."""
    for method in ("create", "replace"):
        bucket = MemoryStore()
        store, _, _ = faulty(Rule(Fault.FAIL_AFTER, method), bucket=bucket)
        with pytest.raises(UnavailableError, match="no verdict was stored"):
            agree_on_cas(Faults(bucket, [Rule(Fault.FAIL_AFTER, method, "store/probe/*")]))
        assert remembered(store) is None


def test_H4_a_flaky_store_that_excludes_is_accepted():
    """H4: some lost responses do not make a good store bad."""
    lost = [
        Rule(Fault.FAIL_AFTER, "create", "store/probe/*/twice", times=1),
        Rule(Fault.FAIL_AFTER, "create", "store/probe/*/create-0", times=1),
        Rule(Fault.FAIL_BEFORE, "create", "store/probe/*/create-1", times=2),
        Rule(Fault.FAIL_AFTER, "replace", "store/probe/*", times=1),
        Rule(Fault.UNAVAILABLE_503, "get", "store/probe/*", times=2),
    ]
    store, _, _ = faulty(*lost, bucket=MemoryStore())
    assert probe(store) == CasVerdict(1, "native", True, ANY, scope=2, bytes_proved=5 << 20)


class Overwrites(stores.Wrapper):
    """Excludes at first sight, but a racing create overwrites the winner's bytes."""

    def create(self, key, body):
        result = self.inner.create(key, body)
        if "create-" in key and not result.landed:
            self.inner.put(key, body)
        return result


class IgnoresTags(stores.Wrapper):
    """If-Match lets everybody through."""

    def replace(self, key, body, tag):
        return stores.WriteResult(Outcome.REPLACED, self.inner.put(key, body))


def test_H4_a_winner_whose_bytes_are_gone_is_noticed():
    """H4: one winner is not enough, its bytes must be there."""
    with pytest.raises(InvalidInputError, match="does not honour create-only"):
        probe(Overwrites(MemoryStore()))


def test_H4_a_store_that_ignores_tags_is_used_without_if_match():
    """H4: If-Match is proved too, with a stale tag and by racing."""
    assert not probe(IgnoresTags(MemoryStore())).if_match
    assert probe(MemoryStore()).if_match


class HoldsNothing(stores.Wrapper):
    """Says "created" to one and "exists" to the others, and keeps nothing."""

    def __init__(self, inner):
        super().__init__(inner)
        self.names = set()

    def create(self, key, body):
        first = key not in self.names
        self.names.add(key)
        return stores.WriteResult(Outcome.CREATED if first else Outcome.EXISTS)


def test_H4_a_store_that_keeps_nothing_is_refused():
    """H4: the winner's bytes must be there at all."""
    with pytest.raises(InvalidInputError) as caught:
        probe(HoldsNothing(MemoryStore()))
    assert caught.value.kind is ErrorKind.NOT_EXCLUSIVE


def test_H4_a_verdict_against_if_match_is_obeyed():
    """H4: who goes by the verdict cannot use If-Match by accident."""
    store = IgnoresTags(MemoryStore())
    proved = as_proved(store, agree_on_cas(store))
    assert not proved.capabilities.if_match
    tag = proved.put("k", b"old")
    with pytest.raises(InvalidInputError) as caught:
        proved.replace("k", b"new", tag)
    assert caught.value.kind is ErrorKind.UNSUPPORTED_BY_STORE
    assert as_proved(MemoryStore(), probe(MemoryStore())).capabilities.if_match


def test_every_call_can_fail_and_is_recorded():
    """The clock and the sweep of leftovers too."""
    store = Faults(recorder := Recorder(MemoryStore()), [Rule(Fault.UNAVAILABLE_503, "*", times=2)])
    for call in (store.now, lambda: store.abort_stale(0)):
        with pytest.raises(UnavailableError):
            call()
    store.now()
    store.abort_stale(0)
    assert [call.method for call in recorder.calls] == ["now", "abort_stale"]
