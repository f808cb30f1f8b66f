"""Who runs when: a wake-up reaches the wait that it is meant for, in a process that can run."""

import pytest

from reef.testing import Simulation
from reef.testing.runtime import (
    START_S,
    Deadlock,
    Owner,
    Scheduler,
    ScriptedChoices,
    SeededChoices,
)


@pytest.fixture
def sim():
    """Give a calm simulation."""
    simulation = Simulation(7)
    yield simulation
    simulation.close()


@pytest.fixture
def node(sim):
    """Give one process of it."""
    return sim.process("node")


def _elapsed_s(sim):
    return sim.scheduler.now_s - START_S


def _join_in_vain(node):
    """Stop waiting for a task that ends at second 5."""
    task = node.runtime.spawn(lambda: node.runtime.sleep(5), name="task")
    assert not task.join(1)


def test_a_join_that_timed_out_does_not_end_a_later_sleep(sim, node):
    """The task's end wakes no fiber that has stopped waiting for it."""
    node.spawn(lambda: (_join_in_vain(node), node.runtime.sleep(100)))
    sim.run()
    assert _elapsed_s(sim) == 101


def test_a_join_that_timed_out_does_not_end_a_later_wait(sim, node):
    """A condition's wait is True only if there was a notify, a promise waits for its result."""
    runtime, seen = node.runtime, []
    condition, promise = runtime.condition(), runtime.future()

    def work():
        _join_in_vain(node)
        with condition:
            seen.append((condition.wait(10), _elapsed_s(sim)))
        runtime.spawn(lambda: (runtime.sleep(50), promise.set_result("kept")), name="promise")
        _join_in_vain(node)
        seen.append(promise.result(100))

    node.spawn(work)
    sim.run()
    assert seen == [(False, 11), "kept"]


def test_a_join_that_timed_out_is_forgotten(sim, node):
    """Waiting many times for a long task leaves nothing behind."""
    fiber = sim.scheduler.spawn(node, lambda: node.runtime.sleep(100), "node/long")
    node.spawn(lambda: [sim.scheduler.join(fiber, 1) for _ in range(10)])
    sim.run(until_s=50)
    assert fiber.joiners == []


def test_a_fiber_cannot_wait_for_its_own_end(sim, node):
    """That would never end; as with threads, it is an error."""
    task = []

    def join():
        task[0].join()

    def work():
        task.append(node.runtime.spawn(join, name="self"))
        node.runtime.sleep(1)

    node.spawn(work)
    with pytest.raises(RuntimeError, match="its own end"):
        sim.run()


def test_a_notice_is_not_spent_on_a_sleeper_that_timed_out():
    """In every history the one that still waits gets it."""
    for seed in range(30):
        sim = Simulation(seed)
        runtime, woken = sim.process("node").runtime, {}
        condition = runtime.condition()

        def wait(name, timeout_s, runtime=runtime, condition=condition, woken=woken):
            with condition:
                woken[name] = condition.wait(timeout_s)

        def notify(runtime=runtime, condition=condition):
            runtime.sleep(1)
            with condition:
                condition.notify()

        node = sim.processes[0]
        node.spawn(lambda wait=wait: wait("short", 1.0), "short")
        node.spawn(lambda wait=wait: wait("long", 60.0), "long")
        node.spawn(notify, "notify")
        sim.run()
        sim.close()
        assert sum(woken.values()) == 1, (seed, woken)


def test_an_alarm_does_not_wake_a_frozen_process(sim, node):
    """What falls due during the freeze happens after it."""
    ran_s = []
    node.spawn(lambda: (node.runtime.sleep(1), ran_s.append(_elapsed_s(sim))))
    other = sim.process("other")
    other.spawn(lambda: (other.runtime.sleep(0.5), node.freeze(10)))
    sim.run()
    assert ran_s == [10.5]


def test_a_notify_does_not_wake_a_frozen_process(sim, node):
    """No wake-up resumes a frozen process."""
    condition, ran_s = node.runtime.condition(), []
    other = sim.process("other")

    def wait():
        with condition:
            assert condition.wait()
        ran_s.append(_elapsed_s(sim))

    def freeze_and_notify():
        other.runtime.sleep(1)
        node.freeze(10)
        with condition:
            condition.notify()

    node.spawn(wait)
    other.spawn(freeze_and_notify)
    sim.run()
    assert ran_s == [11]


def test_a_freeze_holds_where_only_store_calls_switch():
    """The heartbeats of a frozen process stop, also when its yield points do not hand over."""
    sim = Simulation(ScriptedChoices(), switch_at=frozenset({"store"}))
    node, other = sim.process("node"), sim.process("other")
    beats_s = []

    def beat():
        for _ in range(3):
            node.runtime.sleep(1)
            beats_s.append(_elapsed_s(sim))
        node.freeze(100)
        beats_s.append(_elapsed_s(sim))

    node.spawn(beat)
    other.spawn(lambda: (other.runtime.sleep(0.5), node.freeze(1000)))
    sim.run()
    sim.close()
    assert beats_s == [1000.5, 1001.5, 1002.5, 1102.5]


def test_freezes_that_overlap_end_with_the_last(sim, node):
    """A short freeze does not end a long one, and monotonic time never steps back."""
    other, seen = sim.process("other"), []

    def work():
        start_s = node.runtime.monotonic_s()
        node.runtime.sleep(1)
        seen.append((node.runtime.monotonic_s() - start_s, _elapsed_s(sim)))

    def freeze_twice():
        other.runtime.sleep(0.5)
        node.freeze(100, suspended=True)
        node.freeze(50, suspended=True)

    node.spawn(work)
    other.spawn(freeze_twice)
    sim.run()
    assert seen == [(0.5, 100.5)]


def test_a_notify_does_not_resume_the_dead(sim, node):
    """Nothing of a dead process runs again, not even to end in order."""
    condition, other = node.runtime.condition(), sim.process("other")
    traces = []

    def wait():
        try:
            with condition:
                condition.wait()
        finally:
            traces.append("ran after its death")

    def kill_and_notify():
        other.runtime.sleep(1)
        node.crash()
        other.runtime.sleep(1)
        with condition:
            condition.notify()

    node.spawn(wait)
    other.spawn(kill_and_notify)
    sim.run()
    assert traces == []


def test_the_dead_cannot_call():
    """Were it resumed by mistake, dead code would get nowhere: every call ends it again."""
    sim = Simulation(0, switch_at=frozenset())
    node = sim.process("node")
    store = node.raw_store()

    def work():
        try:
            sim.scheduler.park()
        finally:
            store.put("ghost", b"")

    fiber = sim.scheduler.spawn(node, work, "node/main")
    sim.process("other").spawn(node.crash)
    sim.run()
    sim.scheduler.current = fiber
    fiber.body.switch()
    sim.scheduler.current = None
    sim.close()
    assert fiber.finished
    assert list(sim.bucket.list()) == []


def test_nothing_starts_in_a_dead_process(sim, node):
    """Only a new process of that name does anything."""
    node.crash()
    node.spawn(lambda: node.store().put("ghost", b""))
    sim.run()
    assert list(sim.bucket.list()) == []


def test_daemons_do_not_keep_a_run_alive(sim, node):
    """Whether they wait or sleep, the run ends with what `Process.spawn` started."""
    runtime, rounds = node.runtime, []
    condition = runtime.condition()

    def wait():
        with condition:
            condition.wait()

    def loop():
        while True:
            runtime.sleep(1)
            rounds.append(_elapsed_s(sim))

    def main():
        runtime.spawn(wait, name="waits")
        runtime.spawn(loop, name="sleeps")
        runtime.sleep(3.5)

    node.spawn(main)
    sim.run()
    assert rounds == [1, 2, 3]
    sim.run(until_s=2.0)
    assert rounds == [1, 2, 3, 4, 5]


def test_daemons_of_the_dead_do_not_keep_a_run_alive(sim, node):
    """A process that died is not waited for, nor are its daemons."""

    def main():
        node.runtime.spawn(lambda: node.runtime.sleep(1e6), name="sleeps")
        node.runtime.sleep(1)
        node.crash()

    node.spawn(main)
    sim.run()
    assert _elapsed_s(sim) == 1


def test_a_deadlock_names_who_must_not_wait_for_ever(sim, node):
    """Daemons that wait are no part of it."""
    runtime = node.runtime
    condition = runtime.condition()

    def wait():
        with condition:
            condition.wait()

    node.spawn(lambda: (runtime.spawn(wait, name="daemon"), wait()))
    with pytest.raises(Deadlock, match=r"each other: node/main$"):
        sim.run()


def test_a_frozen_process_costs_one_check_per_step():
    """Whether a process is frozen is checked when one of its fibers becomes ready, not for all
    ready fibers at each step.
    """
    checks = []

    class Watched(Owner):
        def __getattribute__(self, name):
            checks.extend([name] if name == "frozen_until_s" else [])
            return super().__getattribute__(name)

    scheduler = Scheduler(SeededChoices(0))
    owner = Watched("node")
    for number in range(10):
        scheduler.spawn(owner, lambda: [scheduler.pause() for _ in range(10)], str(number))
    scheduler.run()
    assert len(checks) == scheduler.steps
