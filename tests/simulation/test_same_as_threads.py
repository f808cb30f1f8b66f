"""The same small programs, on real threads and on simulated fibers, come to the same end."""

import threading

import pytest

from reef.runtime import GATHER_WORKERS_MAX, REAL
from reef.testing import Simulation

TICK_S = 0.05
"""Long enough for a real thread to get where it is going."""


class Programs:
    """Small programs, named by their purpose; their results and errors are compared."""

    def notify_without_the_lock(self, runtime):
        runtime.condition().notify()

    def notify_all_without_the_lock(self, runtime):
        runtime.condition().notify_all()

    def wait_without_the_lock(self, runtime):
        runtime.condition().wait(0)

    def notify_without_waiters(self, runtime):
        condition = runtime.condition()
        with condition:
            condition.notify(5)
            condition.notify_all()
            return condition.wait(0), condition.wait(0.01), condition.wait(-1)

    def notify_two_of_four(self, runtime):
        condition, woken = runtime.condition(), []

        def wait(number):
            with condition:
                if condition.wait(6 * TICK_S):
                    woken.append(number)

        tasks = [runtime.spawn(lambda n=n: wait(n), name=f"w{n}") for n in range(4)]
        runtime.sleep(TICK_S)
        with condition:
            condition.notify(2)
        return [task.join() for task in tasks], len(woken)

    def close_waits_for_running_work(self, runtime):
        pool, done = runtime.pool(2, name="pool"), []
        pool.submit(lambda: (runtime.sleep(2 * TICK_S), done.append(1)))
        runtime.sleep(TICK_S)
        pool.close()
        return list(done)

    def close_cancels_queued_work(self, runtime):
        pool = runtime.pool(1, name="pool")
        running, queued = pool.submit(lambda: runtime.sleep(2 * TICK_S)), pool.submit(lambda: 2)
        runtime.sleep(TICK_S)
        pool.close()
        return running.done(), running.cancelled(), queued.cancelled()

    def submit_after_close(self, runtime):
        pool = runtime.pool(1, name="pool")
        pool.close()
        pool.close()
        pool.submit(lambda: 1)

    def pool_is_bounded(self, runtime):
        pool = runtime.pool(3, name="pool")
        peak, work = _counted(runtime)
        for future in [pool.submit(work) for _ in range(7)]:
            future.result()
        return peak

    def gather_is_bounded(self, runtime):
        peak, work = _counted(runtime)
        runtime.gather([work] * (2 * GATHER_WORKERS_MAX))
        return peak

    def gathers_share_their_bound(self, runtime):
        peak, work = _counted(runtime)
        calls = [work] * GATHER_WORKERS_MAX
        tasks = [runtime.spawn(lambda: runtime.gather(calls), name=f"g{n}") for n in range(2)]
        return [task.join() for task in tasks], peak

    def gather_inside_gather_runs_in_place(self, runtime):
        peak, work = _counted(runtime)
        runtime.gather([lambda: runtime.gather([work] * 3)] * 2)
        return peak

    def gather_raises_the_first_error(self, runtime):
        def fail(kind):
            raise kind

        runtime.gather([lambda: 1, lambda: fail(KeyError), lambda: fail(ValueError)])

    def gather_hands_on_an_exit(self, runtime):
        def leave():
            raise SystemExit(3)

        try:
            runtime.gather([leave, lambda: 1])
        except SystemExit as error:
            return error.code

    def sleep_backwards(self, runtime):
        runtime.sleep(-1)

    def join_with_and_without_a_bound(self, runtime):
        task = runtime.spawn(lambda: runtime.sleep(2 * TICK_S), name="task")
        return task.join(0), task.join(TICK_S / 5), task.join(), task.join(0)

    def promises(self, runtime):
        promise, seen = runtime.future(), []
        tasks = [
            runtime.spawn(lambda: seen.append(promise.result(1)), name=f"{n}") for n in range(3)
        ]
        runtime.sleep(TICK_S)
        promise.set_result(7)
        return [task.join() for task in tasks], seen

    def promise_not_kept(self, runtime):
        runtime.future().result(0.01)

    def promise_not_kept_at_once(self, runtime):
        runtime.future().result(0)

    def promise_cancelled(self, runtime):
        promise = runtime.future()
        runtime.spawn(lambda: (runtime.sleep(0.01), promise.cancel()), name="cancel")
        promise.result(1)

    def daemon_left_waiting(self, runtime):
        condition = runtime.condition()

        def wait():
            with condition:
                condition.wait()

        runtime.spawn(wait, name="daemon")
        runtime.sleep(0.01)
        return "done"

    def lock_freed_by_an_error(self, runtime):
        lock = runtime.lock()
        with pytest.raises(KeyError), lock:
            raise KeyError
        with lock:
            return "free"


def _counted(runtime):
    """Return the highest number of calls at a time, and the call."""
    busy, peak = [0], [0]

    def work():
        busy[0] += 1
        peak[0] = max(peak[0], busy[0])
        runtime.sleep(TICK_S)
        busy[0] -= 1

    return peak, work


def _end(program, runtime):
    try:
        return program(Programs(), runtime)
    except Exception as error:
        return type(error)


def _on_threads(program):
    ends = []
    thread = threading.Thread(target=lambda: ends.append(_end(program, REAL)), daemon=True)
    thread.start()
    thread.join(20)
    return ends


def _on_fibers(program, seed):
    sim, ends = Simulation(seed), []
    node = sim.process("node")
    node.spawn(lambda: ends.append(_end(program, node.runtime)))
    sim.run()
    sim.close()
    return ends


@pytest.mark.parametrize("name", [name for name in vars(Programs) if name[0] != "_"])
def test_fibers_behave_like_threads(name):
    """Equal results, or errors of the same type, whatever order the scheduler chose."""
    program = getattr(Programs, name)
    real = _on_threads(program)
    assert real, "the program hangs on threads"
    for seed in range(5):
        assert _on_fibers(program, seed) == real


@pytest.mark.parametrize("make", ["lock", "condition"])
def test_taking_a_lock_twice_is_an_error(make):
    """On threads it hangs; the simulation says so instead."""

    def take_twice(_, runtime):
        lock = getattr(runtime, make)()
        with lock, lock:
            pass

    assert _on_fibers(take_twice, 0) == [RuntimeError]
