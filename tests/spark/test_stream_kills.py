"""Streams under `kill -9`: drivers and executors die at random, and every row counts once (H40).

Each driver is a process of its own (`tests/spark/stream_driver.py`). It is killed after some more
micro-batches, wherever it is at that time, and started again until all input is written. A writer
commits to the same namespace meanwhile.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pytest

import reef
import reef.jobs
from tests.spark import streaming
from tests.spark.driver import ancestors
from tests.spark.stream_driver import COPY, NAMESPACE
from tests.support.servers.s3 import SeaweedFS

DRIVER = Path(__file__).parent / "stream_driver.py"
SCHEMA = pa.schema([("id", pa.string()), ("n", pa.int64()), ("batch", pa.int64())])
STARTS_MAX = 40
"""Also for drivers that die by themselves, on a machine that is too busy."""


def descendants(pid):
    """Return the processes below one, with their command lines."""
    parents, commands = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
                commands[int(entry.name)] = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    return {below: commands[below] for below in parents if pid in ancestors(below, parents)}


class Drivers:
    """Starts drivers, one after the other, and kills them."""

    def __init__(self, master, url, home, options):
        self._words = [master, url, str(home), json.dumps(options)]
        self._home = home
        self.starts = 0

    def start(self):
        """Start a driver."""
        self.starts += 1
        assert self.starts <= STARTS_MAX, (self._home / "driver.log").read_text()[-4000:]
        environment = {**os.environ, "PYTHONPATH": f"{DRIVER.parents[2]}/src:{DRIVER.parents[2]}"}
        with (self._home / "driver.log").open("ab") as log:
            command = [sys.executable, str(DRIVER), *self._words]
            self.process = subprocess.Popen(
                command, cwd=self._home, env=environment, stdout=log, stderr=log
            )

    @property
    def committed(self):
        """How many micro-batches Spark has committed, of all queries."""
        return sum(1 for _ in self._home.glob("checkpoint*/commits/[0-9]*"))

    def wait_for(self, count):
        """Wait until so many are committed; return False if the driver ended before."""
        while self.committed < count:
            if self.process.poll() is not None:
                return False
            time.sleep(0.05)
        return True

    def kill(self):
        """Kill the driver: the program, its JVM, and everything below."""
        below = list(descendants(self.process.pid))
        for pid in (self.process.pid, *below):
            kill(pid)
        self.process.wait()

    def kill_executor(self, chance):
        """Kill one of its executors, if there is one; the driver continues."""
        found = [
            pid
            for pid, command in descendants(self.process.pid).items()
            if b"CoarseGrainedExecutorBackend" in command
        ]
        if found:
            kill(chance.choice(found))
        return bool(found)


def kill(pid):
    """Kill a process that may be gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@contextmanager
def live_writer(db):
    """Commit rows of its own, and fold, until the block ends; gives the rows that are there."""
    rows, over = {}, threading.Event()

    def write():
        number = 0
        while not over.is_set():
            # The server may restart meanwhile.
            retried = suppress(reef.UnavailableError, reef.OutcomeUnknownError)
            with retried, db.writer(NAMESPACE) as writer:
                while not over.wait(0.05):
                    row = {"id": f"w{number % 50}", "n": number, "batch": -1}
                    rows[row["id"]] = row
                    writer.upsert([row])
                    number += 1
        with db.writer(NAMESPACE) as writer:
            writer.upsert(list(rows.values()))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield rows
    finally:
        over.set()
        thread.join()


def run(master, url, home, options, *, files, kills, seed, between=lambda number: None):
    """Kill and restart until all is written; return what the namespace and its copy should be."""
    chance = random.Random(seed)
    size = 60
    spans = [range(n * size // 2, n * size // 2 + size) for n in range(files)]
    expected = streaming.write_files(home / "in1", spans, key=lambda n: f"a{n:05}")
    expected |= streaming.write_files(home / "in2", spans, key=lambda n: f"b{n:05}")
    db = reef.open(url, **options)
    db.create(NAMESPACE, SCHEMA)
    drivers = Drivers(master, url, home, options)
    with live_writer(db) as written:
        drivers.start()
        for number in range(kills):
            more = chance.randrange(1, max(2, 2 * files // kills))
            goal = min(drivers.committed + more, 2 * files)
            while not drivers.wait_for(goal):
                drivers.start()
            time.sleep(chance.random())  # wherever it is by then
            between(number)
            if not (chance.random() < 0.4 and drivers.kill_executor(chance)):
                drivers.kill()
                drivers.start()
        while drivers.process.wait() != 0:
            drivers.start()
    return db, expected | written, drivers


def rows_of(db, name):
    """Return all rows."""
    with db.reader(name) as reader:
        return {row["id"]: row for row in reader.to_arrow().to_pylist()}


def check(db, expected):
    """Check the namespace, and the copy once it has read the rest of the log."""
    assert rows_of(db, NAMESPACE) == expected
    assert reef.jobs.verify(db, NAMESPACE, deep=True).problems == []
    copied = rows_of(db, COPY)
    assert {k: v for k, v in copied.items() if k[0] != "w"} == {
        k: v for k, v in expected.items() if k[0] != "w"
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_H40_a_driver_that_is_killed_and_restarted(spark_home, tmp_path):
    """Two queries, a live writer and a copy; the small version of the test below."""
    home = tmp_path / "home"
    home.mkdir()
    db, expected, drivers = run(
        "local[2]", str(tmp_path / "bucket"), home, {}, files=3, kills=1, seed=1
    )
    check(db, expected)
    assert drivers.starts >= 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("store", ["directory", "s3"])
def test_H40_fifty_micro_batches_and_ten_kills(spark_home, tmp_path, store):
    """H31, H38, H39: on a cluster of two executors; the S3 server is restarted once."""
    home, options, server = tmp_path / "home", {}, SeaweedFS()
    home.mkdir()
    url = str(tmp_path / "bucket")
    if store == "s3":
        server.start(tmp_path / "weed")
        server.make_bucket("streams")
        url, options = "s3://streams/one", server.options() | {"listing": "unsorted"}

    def between(number):
        if store == "s3" and number == 5:
            server.restart()

    try:
        db, expected, drivers = run(
            "local-cluster[2,1,1024]",
            url,
            home,
            options,
            files=50,
            kills=10,
            seed=7,
            between=between,
        )
        check(db, expected)
        assert drivers.committed >= 100
    finally:
        server.stop()
