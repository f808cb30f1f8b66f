"""The request hook: policies nest as stores, and a request passes each of them once."""

import pickle
import sys
from contextlib import suppress

import pytest

from reef import stores
from reef.errors import ErrorKind, InvalidInputError, UnavailableError
from reef.stores import Hooked, Meter, Operation, Outcome, ReadBack, Retry, RetryPolicy, Throttle
from reef.stores.local import LocalStore
from reef.stores.memory import MemoryStore
from reef.stores.wrappers.base import CALLS
from reef.telemetry import RequestMeter
from reef.testing import Fault, Faults, Recorder, Rule, Simulation, open_store

QUICK = RetryPolicy(attempts_max=3, first_delay_s=0.0)
FRAMES_MAX = 6
"""Method, two or three hooks, the call of the backend's method, and that method."""


class Noting(Hooked):
    """Notes the operations that pass its hooks, with a label."""

    def __init__(self, inner, label, notes, handled=tuple(Operation)):
        self.label, self.notes, self.handled = label, notes, handled
        super().__init__(inner)

    def handles(self, operation):
        return operation in self.handled

    def around(self, request, send):
        self.notes.append((self.label, request.operation))
        return send(request)

    def around_list(self, request, send):
        self.notes.append((self.label, request.operation))
        return send(request)


class Deep(MemoryStore):
    """Measures how many frames are between a test and the backend."""

    def __init__(self):
        super().__init__()
        self.depth = 0

    def get_tagged(self, key):
        self._measure()
        return super().get_tagged(key)

    def create(self, key, body):
        self._measure()
        return super().create(key, body)

    def _measure(self):
        frame, self.depth = sys._getframe(1), 0
        while not frame.f_code.co_name.startswith("test_"):
            frame, self.depth = frame.f_back, self.depth + 1


ONE_OBJECT = [operation for operation in Operation if operation is not Operation.GET_RANGES]
"""The operations of every store; a bucket reads several ranges with several requests."""


def use_all(store):
    """Call every method that sends a request."""
    store.put("a", b"1")
    store.get_tagged("a")
    store.get_range("a", 0, 1)
    store.head("a")
    list(store.list())
    store.create("b", b"2")
    store.replace("a", b"3", store.inner.head("a").tag)
    store.upload("c", [b"4"])
    store.copy("a", "d")
    store._compose("e", [b"5"])
    store.delete_many(["d"])
    store.now()
    store.abort_stale(0.0)


def test_every_operation_passes_the_hook_once():
    """Each method sends one request of its own operation, through each of two policies."""
    notes = []
    use_all(Noting(Noting(MemoryStore(), "inner", []), "outer", notes))
    assert sorted(operation for _, operation in notes) == sorted(ONE_OBJECT)
    assert set(CALLS) == set(Operation)


def test_several_ranges_of_a_file_are_one_call(tmp_path):
    """Policies pass them on together, as one request; other wrappers see each range."""
    meter = RequestMeter()
    store = ReadBack(Retry(Throttle(Meter(LocalStore(str(tmp_path)), meter)), QUICK), QUICK)
    store.put("a", b"0123456789")
    meter.reset()
    assert store.get_ranges("a", [(0, 2), (8, 10)]) == [b"01", b"89"]
    assert (meter.requests(), meter.to_dict()["get"]["bytes"]) == ({"get": 1}, 4)
    notes = []
    noting = Retry(Noting(store, "it", notes))
    assert noting.get_ranges("a", [(0, 2), (8, 10)]) == [b"01", b"89"]
    assert {operation for _, operation in notes} == {Operation.GET_RANGE}
    for wrong in ([(0, 2), (8, 11)], [(0, 2), (5, 5)], [(-1, 2)]):
        with pytest.raises(InvalidInputError):
            store.get_ranges("a", wrong)


def test_policies_run_from_the_outside_in():
    """The outermost policy sees a request first."""
    notes = []
    Noting(Noting(MemoryStore(), "inner", notes), "outer", notes).put("a", b"1")
    assert notes == [("outer", Operation.PUT), ("inner", Operation.PUT)]


def test_a_policy_is_bypassed_by_operations_that_it_does_not_handle():
    """Only the handled operations reach its hook; the others reach the store."""
    notes, handled = [], (Operation.LIST, Operation.PUT)
    use_all(Noting(MemoryStore(), "it", notes, handled))
    assert sorted(operation for _, operation in notes) == sorted(handled)


def test_a_method_that_is_overridden_is_called_by_outer_policies():
    """Composing hooks must not pass over a method that a subclass has changed."""
    called = []

    class Changed(Faults):
        def create(self, key, body):
            called.append(key)
            return super().create(key, body)

    store = ReadBack(Retry(Changed(MemoryStore(), [Rule(Fault.FAIL_AFTER, "create", times=1)])))
    assert store.create("a", b"1").outcome is Outcome.CREATED
    assert called == ["a", "a"]


@pytest.mark.parametrize("call", ["get_tagged", "create"])
def test_the_call_stack_of_an_open_store_is_short(call):
    """Metered, throttled, retried and read back: one frame for each policy that applies."""
    backend = Deep()
    store = stores.with_policies(backend)
    backend.put("a", b"1")
    if call == "create":
        assert store.create("b", b"2").landed
    else:
        assert store.get_tagged("a").body == b"1"
    assert 0 < backend.depth <= FRAMES_MAX


def test_policies_are_pickled_with_their_store(tmp_path):
    """A copy sends its requests through hooks of its own, with the same settings."""
    store = ReadBack(Retry(Throttle(Meter(LocalStore(str(tmp_path)))), QUICK), QUICK)
    copy = pickle.loads(pickle.dumps(store))
    copy.put("a", b"1")
    assert store.get("a") == b"1"
    assert (copy.policy, copy.inner.policy) == (QUICK, QUICK)
    assert copy.inner.inner.inner.meter.requests() == {"put": 1}
    assert store.inner.inner.inner.meter.requests() == {"get": 1}


def test_only_idempotent_requests_are_retried():
    """`Retry` does not send a conditional write or an upload again after a lost response."""
    for operation in ONE_OBJECT:
        bucket = MemoryStore()
        bucket.put("a", b"1")
        store = Retry(sent := Recorder(Faults(bucket, [Rule(Fault.FAIL_BEFORE, operation)])), QUICK)
        with suppress(UnavailableError):
            use_all(store)
        attempts = [call.method for call in sent.calls].count(operation)
        once = operation in ("create", "replace", "upload")
        assert attempts == (1 if once else QUICK.attempts_max), operation


def test_a_range_that_is_cut_short_is_read_again():
    """`Retry` checks the length of a range, since a truncated response is no error by itself."""
    store = Retry(Faults(MemoryStore(), [Rule(Fault.SHORT_READ, "get_range", times=2)]), QUICK)
    store.put("a", b"12345678")
    assert store.get_range("a", 2, 6) == b"3456"
    always = Retry(Faults(store, [Rule(Fault.SHORT_READ, "get_range")]), QUICK)
    with pytest.raises(UnavailableError) as failed:
        always.get_range("a", 2, 6)
    assert failed.value.kind is ErrorKind.SHORT_READ
    assert failed.value.context["attempts"] == QUICK.attempts_max


class Slow(stores.Wrapper):
    """Fails each request after a time."""

    def __init__(self, inner, seconds):
        super().__init__(inner)
        self.seconds, self.sent = seconds, 0

    def _fail(self):
        self.sent += 1
        self.runtime.sleep(self.seconds)
        raise UnavailableError("no response")

    def get_tagged(self, key):
        self._fail()

    def create(self, key, body):
        self._fail()

    def list(self, prefix="", start_after=""):
        self._fail()


@pytest.mark.parametrize(
    "call",
    [lambda s: s.get_tagged("a"), lambda s: s.create("a", b""), lambda s: list(s.list())],
    ids=["get", "create", "list"],
)
def test_the_deadline_of_a_retry_includes_the_first_attempt(call):
    """An attempt that has used up the deadline is the last one."""
    sim = Simulation(0)
    node = sim.process("node")
    slow = Slow(node.raw_store(), 11.0)
    policy = RetryPolicy(attempts_max=100, deadline_s=10, first_delay_s=0.1)
    store = ReadBack(Retry(slow, policy), policy)

    def run():
        with pytest.raises(UnavailableError):
            call(store)

    node.spawn(run)
    sim.run()
    sim.close()
    assert slow.sent == 1


def test_progress_of_a_listing_resets_its_attempts():
    """A listing that fails after each key ends, though it fails more often than a request may."""
    bucket = MemoryStore()
    for number in range(3 * QUICK.attempts_max):
        bucket.put(f"{number:02}", b"")

    class OneKeyAtATime(stores.Wrapper):
        def list(self, prefix="", start_after=""):
            for info in self.inner.list(prefix, start_after):
                yield info
                raise UnavailableError("connection reset")

    listed = Retry(OneKeyAtATime(bucket), QUICK).list()
    assert [info.key for info in listed] == [info.key for info in bucket.list()]


def test_faults_and_latency_are_below_the_policies():
    """`open_store` puts them where a network is: each attempt fails or waits by itself."""
    meter = RequestMeter()
    rules = [Rule(Fault.FAIL_BEFORE, "put", times=2)]
    store = open_store("memory://", faults=rules, retry=QUICK, meter=meter)
    store.put("a", b"1")
    assert meter.requests() == {"put": 3}
    assert store.get("a") == b"1"


@pytest.mark.parametrize("fault", [Fault.WRONG_BYTES, Fault.SHORT_READ])
def test_H8_a_read_back_that_was_damaged_in_transit_is_repeated(fault):
    """H8, H1: bytes that could be our own, damaged, are not taken for another writer's."""
    rules = [Rule(Fault.FAIL_AFTER, "create", times=1), Rule(fault, "get", times=1)]
    result = ReadBack(Faults(MemoryStore(), rules), QUICK).create("a", b"12345678")
    assert result.outcome is Outcome.CREATED
    assert rules[1].struck == 1


@pytest.mark.parametrize(
    ("operation", "call", "lane"),
    [
        ("get", lambda s: s.get("a/b"), ("read", "a")),
        ("put", lambda s: s.put("a/b", b""), ("write", "a")),
        ("copy", lambda s: s.copy("x/b", "a/b"), ("write", "a")),
        ("delete", lambda s: s.delete_many(["a/b", "x/b"]), ("write", "a")),
        ("list", lambda s: list(s.list("a/b")), ("read", "a")),
    ],
)
def test_a_throttled_request_opens_the_lane_of_its_folder(operation, call, lane):
    """Reads and writes have lanes of their own; a copy counts for the folder of its target."""
    store = Throttle(Faults(MemoryStore(), [Rule(Fault.THROTTLE_429, operation)]))
    with pytest.raises(UnavailableError):
        call(store)
    assert set(store.rates()) == {lane}
