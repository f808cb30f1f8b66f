"""The simulated machine behaves like a machine: time, locks, waits, death."""

from contextlib import suppress

import pytest

from reef.errors import UnavailableError
from reef.stores import Outcome
from reef.testing import Chaos, Simulation, SimulationFailed, simulate
from reef.testing.runtime import Deadlock, ScriptedChoices, SeededChoices, TooManySteps


@pytest.fixture
def sim():
    """Give a calm simulation."""
    simulation = Simulation(7)
    yield simulation
    simulation.close()


def test_time_is_virtual(sim):
    """An hour of sleep takes no time, and the clocks show it."""
    node = sim.process("node")
    seen = []

    def sleeper():
        start_s = node.runtime.monotonic_s()
        node.runtime.sleep(3600)
        seen.append(node.runtime.monotonic_s() - start_s)

    node.spawn(sleeper)
    sim.run()
    assert seen == [pytest.approx(3600)]


def test_sleepers_wake_in_the_order_of_their_alarms(sim):
    """Time decides, not the order of starting."""
    node = sim.process("node")
    order = []
    for seconds in (5, 1, 3):
        node.spawn(lambda s=seconds: (node.runtime.sleep(s), order.append(s)), f"s{seconds}")
    sim.run()
    assert order == [1, 3, 5]


def test_clocks_differ_by_their_skew(sim):
    """Each process has its own wall clock; the store has another."""
    fast, slow = sim.process("fast", skew_s=600), sim.process("slow", skew_s=-600)
    assert fast.runtime.wall_s() - slow.runtime.wall_s() == 1200
    assert sim.bucket.now() == fast.runtime.wall_s() - 600


def test_a_suspended_process_loses_monotonic_time_only(sim):
    """H62: after a suspend the monotonic clock lags behind the boot-time clock."""
    node = sim.process("node")
    seen = []

    def work():
        node.freeze(100, suspended=True)
        node.runtime.sleep(0)
        seen.append((node.runtime.monotonic_s(), node.runtime.boottime_s()))

    node.spawn(work)
    sim.run()
    monotonic_s, boottime_s = seen[0]
    assert boottime_s == pytest.approx(100)
    assert monotonic_s == pytest.approx(0)


def test_a_frozen_process_does_nothing_while_others_run(sim):
    """Freezing stops every fiber of the process."""
    frozen, free = sim.process("frozen"), sim.process("free")
    order = []

    def block_forever():
        frozen.freeze(50)
        frozen.runtime.reach("after the freeze")
        order.append("frozen")

    frozen.spawn(block_forever)
    free.spawn(lambda: (free.runtime.sleep(10), order.append("free")))
    sim.run()
    assert order == ["free", "frozen"]


def test_a_lock_excludes(sim):
    """Two fibers that both increment under a lock lose no increment."""
    node = sim.process("node")
    lock = node.runtime.lock()
    value = [0]

    def increment():
        for _ in range(10):
            with lock:
                seen = value[0]
                node.runtime.reach("in between")
                value[0] = seen + 1

    for name in "abc":
        node.spawn(increment, name)
    sim.run()
    assert value == [30]


def test_without_a_lock_increments_are_lost():
    """The scheduler does switch inside: the same code without the lock goes wrong."""
    lost = 0
    for seed in range(20):
        sim = Simulation(seed)
        node = sim.process("node")
        value = [0]

        def increment(node=node, value=value):
            for _ in range(10):
                seen = value[0]
                node.runtime.reach("in between")
                value[0] = seen + 1

        for name in "abc":
            node.spawn(increment, name)
        sim.run()
        sim.close()
        lost += value != [30]
    assert lost == 20


def test_a_condition_wakes_who_waits(sim):
    """Notified waiters see True, the others time out and see False."""
    node = sim.process("node")
    condition = node.runtime.condition()
    woken = []

    def wait(timeout_s):
        with condition:
            woken.append((timeout_s, condition.wait(timeout_s)))

    def notify():
        node.runtime.sleep(2)
        with condition:
            condition.notify_all()

    node.spawn(lambda: wait(1.0), "short")
    node.spawn(lambda: wait(60.0), "long")
    node.spawn(notify, "notifier")
    sim.run()
    assert sorted(woken) == [(1.0, False), (60.0, True)]


def test_waiting_without_the_lock_is_an_error(sim):
    """A condition that is not held cannot be waited on."""
    node = sim.process("node")
    condition = node.runtime.condition()
    node.spawn(condition.wait)
    with pytest.raises(RuntimeError, match="does not hold"):
        sim.run()


def test_a_deadlock_is_reported(sim):
    """A deadlock is a failure, not a hang."""
    node = sim.process("node")
    one, two = node.runtime.lock(), node.runtime.lock()

    def take(first, second):
        with first:
            node.runtime.sleep(1)
            with second:
                pass

    node.spawn(lambda: take(one, two), "left")
    node.spawn(lambda: take(two, one), "right")
    with pytest.raises(Deadlock, match="node/left, node/right"):
        sim.run()


def test_an_endless_history_is_cut_off():
    """The number of steps is bounded."""
    sim = Simulation(0, steps_max=100)
    node = sim.process("node")

    def forever():
        while True:
            node.runtime.reach("again")

    node.spawn(forever, "a")
    with pytest.raises(TooManySteps):
        sim.run()
    sim.close()


def test_pools_futures_and_gather_run_in_virtual_time(sim):
    """Pools, tasks and gathers of the runtime run concurrently, within their bounds."""
    node = sim.process("node")
    busy, peak, results = [0], [0], {}

    def work(number):
        busy[0] += 1
        peak[0] = max(peak[0], busy[0])
        node.runtime.sleep(1)
        busy[0] -= 1
        if number == 13:
            raise UnavailableError("unlucky")
        return number * 2

    def main():
        pool = node.runtime.pool(2, name="workers")
        futures = [pool.submit(work, number) for number in range(5)]
        results["pool"] = [future.result() for future in futures]
        results["gather"] = node.runtime.gather([lambda n=n: work(n) for n in range(3)])
        with pytest.raises(UnavailableError):
            pool.submit(work, 13).result()
        task = node.runtime.spawn(lambda: node.runtime.sleep(5), name="task")
        results["early"] = task.join(1)
        results["late"] = task.join()
        promise = node.runtime.future()
        node.runtime.spawn(lambda: promise.set_result("kept"), name="promise")
        results["promise"] = promise.result()
        with pytest.raises(TimeoutError):
            node.runtime.future().result(1)

    node.spawn(main)
    sim.run()
    assert results == {
        "pool": [0, 2, 4, 6, 8],
        "gather": [0, 2, 4],
        "early": False,
        "late": True,
        "promise": "kept",
    }
    assert peak == [3]


def test_a_dead_process_does_nothing_more(sim):
    """Neither its other fibers nor its finally-blocks reach the bucket after its death."""
    node, other = sim.process("node"), sim.process("other")
    store = node.store()

    def die():
        try:
            store.put("before", b"")
            node.crash()
        finally:
            store.put("after", b"")

    node.spawn(die)
    node.spawn(lambda: (node.runtime.sleep(10), store.put("later", b"")), "late")
    other.spawn(lambda: (other.runtime.sleep(20), other.store().put("other", b"")))
    sim.run()
    assert [info.key for info in sim.bucket.list()] == ["before", "other"]
    sim.close()
    assert [info.key for info in sim.bucket.list()] == ["before", "other"]


def test_a_failure_in_a_fiber_fails_the_run(sim):
    """An uncaught error fails the run."""
    node = sim.process("node")
    node.spawn(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sim.run()


def test_equal_seeds_give_equal_histories():
    """One seed, one trace: call by call, with chaos and with random ids."""

    def history(seed):
        sim = Simulation(seed, chaos=CHAOS)
        for name in ("a", "b"):
            node = sim.process(name)
            node.spawn(lambda node=node: _chatter(node))
        sim.run()
        sim.close()
        return sim.fingerprint(), [info.key for info in sim.bucket.list()]

    assert history(3) == history(3)
    assert len({history(seed)[0] for seed in range(20)}) == 20


CHAOS = Chaos(
    crash=0.01, lost_response=0.1, fail_before=0.1, conflict=0.05, stall=0.02, freeze=0.01
)


def _chatter(node):
    store = node.store()
    with suppress(UnavailableError):
        for _ in range(5):
            store.create(f"k/{node.runtime.ulid()}", b"x")
            store.put("shared", node.name.encode())


def test_chaos_reaches_every_kind_of_mishap():
    """Lost responses, failures, conflicts, stalls, freezes and crashes all happen."""
    seen = {"no response": 0, "freeze": 0, "crash": 0}
    for seed in range(60):
        sim = Simulation(seed, chaos=CHAOS)
        node = sim.process("node")
        node.spawn(lambda node=node: _chatter(node))
        sim.run()
        sim.close()
        for step in sim.trace:
            seen["no response"] += "no response" in step.detail
            seen["freeze"] += step.kind == "freeze"
            seen["crash"] += step.kind == "death"
    assert all(seen.values()), seen


def test_a_lost_response_leaves_the_outcome_unknown():
    """The raw store says unknown, and the object is there."""
    sim = Simulation(0, chaos=Chaos(lost_response=1.0))
    node = sim.process("node")
    results = []
    node.spawn(lambda: results.append(node.raw_store().create("k", b"x")))
    sim.run()
    sim.close()
    assert results[0].outcome is Outcome.UNKNOWN
    assert sim.bucket.get("k") == b"x"


def test_a_failure_names_its_seed_and_shows_the_trace():
    """The message has the seed and the last steps of the trace."""

    def scenario(sim):
        node = sim.process("node")
        node.spawn(lambda: node.store().put("k", b"x"))
        sim.run()
        assert sim.bucket.get("k") == b"y"

    with pytest.raises(SimulationFailed, match=r"seed 5: AssertionError(.|\n)*put k") as caught:
        simulate(scenario, [5])
    assert caught.value.seed == 5


def test_scripts_are_checked():
    """A script that asks for an option that is not there is an error."""
    with pytest.raises(ValueError, match="decision 0 is 3"):
        ScriptedChoices([3]).pick(2)
    assert SeededChoices(1).pick(5) == SeededChoices(1).pick(5)
