"""Streams under `kill -9`: drivers and executors die at random, and every row counts once (H40).

Each driver is a process of its own (`tests/spark/stream_driver.py`). It is killed after some more
micro-batches, wherever it is at that time, and started again until all input is written and copied.
A writer commits to the same namespace meanwhile, and sweeps with a small grace period collect what
is folded.

Some keys are in the files of both queries. Which row of them counts is decided by the order of the
log, so a follower records all changes as they come.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
from msgspec.structs import replace

import reef
import reef.jobs
from reef.manifest.head import Publisher
from reef.paths import Namespace
from tests.spark import streaming
from tests.spark.driver import ancestors
from tests.spark.stream_driver import COPY, NAMESPACE
from tests.support.servers.s3 import SeaweedFS

DRIVER = Path(__file__).parent / "stream_driver.py"
SCHEMA = pa.schema([("id", pa.string()), ("n", pa.int64()), ("batch", pa.int64())])
SHARED = 100_000
"""Numbers from here on are those of keys that both queries write; twice as many for the second."""
GRACE_MS, RETAIN_S = 5000, 60.0
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
        self.executors_killed = 0

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
        """How many micro-batches of the two queries Spark has committed."""
        return sum(1 for _ in self._home.glob("checkpoint[12]/commits/[0-9]*"))

    @property
    def copied(self):
        """How many micro-batches of the copy Spark has committed."""
        return sum(1 for _ in self._home.glob("checkpoint3/commits/[0-9]*"))

    @property
    def is_written(self):
        """Whether both queries have ended; a micro-batch may have had more than one file."""
        return (self._home / "written").exists()

    def wait_for(self, reached):
        """Wait until that is so; return False if the driver ended before."""
        while not reached():
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
            self.executors_killed += 1
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


@contextmanager
def follower(db):
    """Record all changes as they come, until the block ends; gives a list of them."""
    changes, over = [], threading.Event()

    def follow():
        position, ended = 0, False
        while not ended:
            ended = over.wait(0.2)
            with suppress(reef.UnavailableError), db.reader(NAMESPACE) as reader:
                stream = reader.changes(after_lsn=position)
                found = list(stream)
                changes.extend(found)
                position = stream.position

    with running(follow, over):
        yield changes


@contextmanager
def sweeper(db):
    """Sweep with a grace period of some seconds, until the block ends."""
    over = threading.Event()
    names = Namespace(NAMESPACE)
    Publisher(db.store, names).publish(lambda head: replace(head, grace_ms=GRACE_MS))

    def sweep():
        while not over.wait(1.0):
            with suppress(reef.UnavailableError, reef.OutcomeUnknownError, reef.ConflictError):
                reef.jobs.sweep(
                    db, NAMESPACE, apply=True, force=True, retain_generations_s=RETAIN_S
                )

    with running(sweep, over):
        yield


@contextmanager
def running(call, over):
    """Run a thread until the block ends; raise what it has raised."""
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(call)
        try:
            yield
        finally:
            over.set()
        result.result()


def write_input(home, files):
    """Write the files of both queries; return their rows by key, and the keys that both have."""
    size = 60
    spans = [range(n * size // 2, n * size // 2 + size) for n in range(files)]
    shared = [range(SHARED + n % 7, SHARED + n % 7 + 20) for n in range(files)]
    rows = []
    for number, letter in ((1, "a"), (2, "b")):

        def key(n, letter=letter):
            return f"c{n % 1000:05}" if n >= SHARED else f"{letter}{n:05}"

        numbers = [
            [*span, *(n + SHARED * (number - 1) for n in both)]
            for span, both in zip(spans, shared, strict=True)
        ]
        rows.append(streaming.write_files(home / f"in{number}", numbers, key=key))
    return rows


def run(
    master, url, home, options, *, files, kills, copy_kills=0, seed, between=lambda number: None
):
    """Kill and restart until all is written and copied; return what has happened."""
    chance = random.Random(seed)
    rows = write_input(home, files)
    db = reef.open(url, **options)
    db.create(NAMESPACE, SCHEMA)
    drivers = Drivers(master, url, home, options)
    if copy_kills:
        (home / "early").touch()
    with follower(db) as changes, sweeper(db):
        with live_writer(db) as written:
            drivers.start()
            for number in range(kills):
                more = chance.randrange(1, max(2, 2 * files // kills))
                goal = drivers.committed + more
                while not drivers.wait_for(
                    lambda goal=goal: drivers.is_written or drivers.committed >= goal
                ):
                    drivers.start()
                time.sleep(chance.random())  # wherever it is by then
                between(number)
                if not (number % 3 == 1 and drivers.kill_executor(chance)):
                    drivers.kill()
                    drivers.start()
            while not drivers.wait_for(lambda: drivers.is_written):
                drivers.start()
        (home / "ended").touch()
        for _ in range(copy_kills):
            goal = drivers.copied + 1
            drivers.wait_for(lambda goal=goal: drivers.copied >= goal)
            drivers.kill()
            drivers.start()
        while drivers.process.wait() != 0:
            drivers.start()
    return Ran(db, rows, written, changes, drivers)


@dataclass
class Ran:
    """What was to be written, what the log has shown, and what is there."""

    db: reef.Database
    rows: list
    written: dict
    changes: list
    drivers: Drivers

    def check(self):
        """Check the namespace, the order of its keys that two queries write, and the copy."""
        found = rows_of(self.db, NAMESPACE)
        alone = {k: v for rows in self.rows for k, v in rows.items() if k[0] != "c"}
        assert {k: v for k, v in found.items() if k[0] != "c"} == alone | self.written
        last = {}
        for change in self.changes:
            assert change.op == "put"
            if change.key[0] == "c":
                last.setdefault(change.key, {})[change.row["n"] >= 2 * SHARED] = change
        shared = [{k: v for k, v in rows.items() if k[0] == "c"} for rows in self.rows]
        assert last.keys() == shared[0].keys() == shared[1].keys()
        for key, by_query in last.items():
            assert by_query[False].row == shared[0][key]
            assert by_query[True].row == shared[1][key]
            assert found[key] == max(by_query.values(), key=lambda change: change.lsn).row
        assert rows_of(self.db, COPY) == found
        for name in (NAMESPACE, COPY):
            assert reef.jobs.verify(self.db, name, deep=True).problems == []


def rows_of(db, name):
    """Return all rows."""
    with db.reader(name) as reader:
        return {row["id"]: row for row in reader.to_arrow().to_pylist()}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_H40_a_driver_that_is_killed_and_restarted(spark_home, tmp_path):
    """Two queries, a live writer and a copy; the small version of the test below."""
    home = tmp_path / "home"
    home.mkdir()
    ran = run("local[1]", str(tmp_path / "bucket"), home, {}, files=3, kills=1, seed=1)
    ran.check()
    assert ran.drivers.starts >= 2


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
        ran = run(
            "local-cluster[2,1,1024]",
            url,
            home,
            options,
            files=50,
            kills=10,
            copy_kills=2,
            seed=7,
            between=between,
        )
        ran.check()
        assert ran.drivers.committed >= 90
        assert ran.drivers.executors_killed >= 3
    finally:
        server.stop()
