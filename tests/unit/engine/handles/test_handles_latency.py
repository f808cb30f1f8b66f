"""Times over a bucket's latencies: on virtual time, so thousands of samples take a second.

The profile is that of the latency wrapper; the subject is how many requests are one behind
the other on each path, and that nothing else waits.
"""

import statistics

import pytest

from reef.engine.handles.database import Database
from reef.jobs import fold
from reef.stores import agree_on_cas
from reef.testing import PROFILES, Latency, Simulation

NAME = "users"
GOAL_S = 0.3


def quantile_99(times_s):
    """Return the 99th percentile."""
    return statistics.quantiles(times_s, n=100)[-1]


@pytest.fixture
def timed():
    """Give a way to run `work(db, clock)` on a simulated machine far from its bucket."""

    def run(work):
        sim = Simulation(7)
        agree_on_cas(sim.bucket)
        node = sim.process("node")
        results = []

        def main():
            db = Database(Latency(node.store(), PROFILES["s3-standard"]))
            results.append(work(db, node.runtime.monotonic_s))

        node.spawn(main)
        sim.run()
        sim.close()
        (result,) = results
        return result

    return run


def test_commits_over_s3_standard(timed):
    """99 of 100 single commits take less than 300 ms: one PUT, and no second request."""

    def work(db, clock):
        times_s = []
        with db.writer(NAME, unfolded_bytes_max=1 << 30) as writer:
            for number in range(2000):
                start_s = clock()
                writer.put(f"k{number}", bytes(1000))
                times_s.append(clock() - start_s)
        return times_s

    times_s = timed(work)
    assert quantile_99(times_s) < GOAL_S
    assert 0.02 < statistics.median(times_s) < 0.06


def test_cold_reads_over_s3_standard(timed):
    """99 of 100 cold reads take less than 300 ms, the first one of a segment included."""

    def work(db, clock):
        with db.writer(NAME) as writer:
            futures = [writer.put(f"k{n:05}", bytes(2000), wait=False) for n in range(2000)]
            for future in futures:
                future.result()
        fold(db, NAME, codec="none", group_bytes=4096)
        first_s, later_s = [], []
        for start in range(0, 2000, 20):
            reader = db.reader(NAME, refresh_interval_ms=1e9)
            for times_s, number in ((first_s, start), (later_s, start + 10)):
                start_s = clock()
                assert reader.get(f"k{number:05}") == bytes(2000)
                times_s.append(clock() - start_s)
        return first_s, later_s

    first_s, later_s = timed(work)
    assert quantile_99(first_s + later_s) < GOAL_S
    assert statistics.median(later_s) < 0.03, "with the tail cached: one GET"
    assert statistics.median(first_s) < 0.06, "the tail and one group"
