"""A store that holds requests and bytes to a rate."""

import pickle
import threading

import pytest

from reef.stores import Pace, Paced, PaceEnded
from reef.stores.local import LocalStore
from reef.stores.memory import MemoryStore
from reef.testing import Simulation


def paced(requests_per_s=0.0, bytes_per_s=0.0):
    """Give a paced store on virtual time, and a way to see how long calls took."""
    sim = Simulation(0)
    node = sim.process("p")
    store = Paced(node.store(), Pace(node.runtime, requests_per_s, bytes_per_s))
    sim.bucket.put("a", b"x" * 1000)

    def timed(call):
        took = []

        def run():
            watch = node.runtime.stopwatch()
            call(store)
            took.append(watch.elapsed_s())

        node.spawn(run)
        sim.run()
        return took[0]

    return timed


def test_requests_are_held_to_a_rate():
    """A second's worth is free, then the rate holds."""
    timed = paced(requests_per_s=10)
    took = timed(lambda store: [store.head("a") for _ in range(50)])
    assert 3.8 <= took <= 4.5


def test_bytes_are_held_to_a_rate_in_both_directions():
    """Ranges, whole objects, puts and uploads count alike."""
    timed = paced(bytes_per_s=1000)

    def traffic(store):
        store.get("a")
        store.get_range("a", 0, 1000)
        store.put("b", b"x" * 1000)
        store.upload("c", [b"x" * 500, b"x" * 500])

    assert 2.8 <= timed(traffic) <= 3.5


def test_without_a_limit_nothing_waits():
    """Zero means no limit."""
    assert paced()(lambda store: [store.head("a") for _ in range(1000)]) < 1.0


def test_a_pause_holds_requests_where_they_are():
    """Nothing gets through until it is resumed, and then everything does."""
    from reef.runtime import REAL

    store = Paced(MemoryStore(), pace := Pace(REAL, 0, 0))
    store.put("a", b"1")
    pace.pause()
    done = threading.Event()
    thread = threading.Thread(target=lambda: (store.get("a"), done.set()))
    thread.start()
    assert not done.wait(0.2)
    pace.resume()
    assert done.wait(60)
    thread.join()


def test_an_end_refuses_even_those_that_wait():
    """A paused request does not wait for ever."""
    from reef.runtime import REAL

    store = Paced(MemoryStore(), pace := Pace(REAL, 0, 0))
    pace.pause()
    raised = []

    def call():
        try:
            store.put("a", b"1")
        except PaceEnded as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    pace.end()
    thread.join(60)
    assert len(raised) == 1
    with pytest.raises(PaceEnded):
        list(store.list())
    assert list(store.inner.list()) == []


def test_requests_to_other_prefixes_are_not_paced(tmp_path):
    """A rate is one process's own."""
    from reef.runtime import REAL

    store = Paced(LocalStore(str(tmp_path)), Pace(REAL, 1, 1))
    assert isinstance(pickle.loads(pickle.dumps(store)), LocalStore)


@pytest.mark.parametrize("how", ["end", "pause"])
def test_who_waits_for_its_share_is_held_too(how):
    """An end or a pause counts for those that were let in and wait for their turn."""
    sim = Simulation(0)
    node = sim.process("p")
    store = Paced(node.store(), pace := Pace(node.runtime, 0, 1000))
    events = []

    def call():
        store.put("x", b"1" * 1000)  # the free second
        try:
            store.put("a", b"1" * 500)
        except PaceEnded:
            events.append("ended")

    def strike():
        node.runtime.sleep(0.1)
        getattr(pace, how)()
        node.runtime.sleep(0.7)
        assert events == (["ended"] if how == "end" else [])
        assert [info.key for info in store.inner.list()] == ["x"]
        pace.end()

    node.spawn(call)
    node.spawn(strike)
    sim.run()
    assert events == ["ended"]
    assert [info.key for info in sim.bucket.list()] == ["x"]
