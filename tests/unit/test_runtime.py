"""The real runtime: thin, and right about threads, forks and ids."""

import os
import pickle
import threading
import time

import pytest

from reef.runtime import REAL, leaf_lock
from tests.support.child_process import in_child


def test_clocks_move():
    """Sleep takes at least its time by every clock."""
    clocks = (REAL.wall_s, REAL.monotonic_s, REAL.boottime_s)
    before = [clock() for clock in clocks]
    REAL.sleep(0.02)
    assert all(clock() - start >= 0.019 for clock, start in zip(clocks, before, strict=True))


def test_ulids_are_unique_and_sorted_by_time():
    """26 characters; later ones sort after earlier ones, to the millisecond."""
    first = REAL.ulid()
    time.sleep(0.002)
    later = [REAL.ulid() for _ in range(1000)]
    assert len(set(later)) == 1000
    assert all(len(ulid) == 26 and ulid > first for ulid in later)
    assert set("".join(later)) <= set("0123456789ABCDEFGHJKMNPQRSTVWXYZ")


def test_a_deadline_runs_out():
    """Remaining time falls to zero and stays there."""
    deadline = REAL.deadline(600)
    assert 0 < deadline.remaining_s() <= 600
    assert not deadline.passed()
    deadline = REAL.deadline(0.01)
    assert deadline.remaining_s() <= 0.01
    time.sleep(0.02)
    assert deadline.remaining_s() == 0
    assert deadline.passed()


def test_gather_runs_in_parallel_and_keeps_the_order():
    """Sixteen calls of which none ends before all have begun; the last ones end first."""
    all_begun = threading.Barrier(16)

    def call(number):
        all_begun.wait(60)
        time.sleep(0.001 * (16 - number))
        return number

    results = REAL.gather([lambda n=n: call(n) for n in range(16)])
    assert results == list(range(16))


def test_gather_inside_gather_does_not_wait_for_itself():
    """More nested calls than workers still come to an end."""

    def outer(number):
        return sum(REAL.gather([lambda n=n: n + number for n in range(8)]))

    results = REAL.gather([lambda n=n: outer(n) for n in range(64)])
    assert results == [sum(range(8)) + 8 * n for n in range(64)]


def test_map_calls_with_each_item():
    """Each item of an iterator is passed once, and the results keep the order of the items."""
    assert REAL.map(lambda n: n * n, iter(range(40))) == [n * n for n in range(40)]
    assert REAL.map(str, []) == []
    with pytest.raises(ZeroDivisionError):
        REAL.map(lambda n: 1 / n, [1, 0])


def test_gather_raises_the_error_of_a_call():
    """The first error comes out."""
    with pytest.raises(ZeroDivisionError):
        REAL.gather([lambda: 1, lambda: 1 / 0])


def test_the_real_runtime_pickles_as_itself():
    """There is one machine."""
    assert pickle.loads(pickle.dumps(REAL)) is REAL


def test_threads_pools_and_futures():
    """The thin wrappers forward to the wrapped object."""
    done, go = [], threading.Event()
    task = REAL.spawn(lambda: (go.wait(60), done.append(1)), name="task")
    assert not task.join(0.001)
    go.set()
    assert task.join()
    assert done == [1]
    pool = REAL.pool(2, name="pool")
    assert pool.submit(lambda x: x + 1, 1).result() == 2
    pool.close()
    future = REAL.future()
    REAL.spawn(lambda: future.set_result(7), name="future")
    assert future.result(60) == 7
    condition = REAL.condition()
    with condition:
        assert not condition.wait(0.001)
    with REAL.lock():
        pass


def test_a_leaf_lock_held_at_a_fork_is_free_in_the_child():
    """The holder does not exist in the child, so it would never be released."""
    lock = leaf_lock()
    held, let_go = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            let_go.wait(120)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if lock.acquire(timeout=60) else 1)
    let_go.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_H51_a_forked_child_has_a_pool_of_its_own():
    """H51: idle threads of the parent's pool are counted in the child, but are not there."""
    REAL.gather([lambda: time.sleep(0.05)] * 4)
    time.sleep(0.1)  # until all of them are idle
    assert in_child(lambda: REAL.gather([lambda: 7] * 3)) == (0, "[7, 7, 7]")
