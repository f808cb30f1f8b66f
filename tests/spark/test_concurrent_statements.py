"""Statements that run concurrently with each other and with a live writer: no update is lost."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa
import pytest

import reef
import reef.jobs
import reef.spark
from tests.spark.writing import named_segments, sweep_everything

ROOT = Path(__file__).parent.parent.parent
KEYS = "abcde"
SCHEMA = pa.schema([("id", pa.string()), ("n", pa.int64())])


class Counters:
    """A table of counters, and how often each was incremented with success."""

    def __init__(self, spark, url, seed):
        self.chance = random.Random(seed)
        self.db = reef.open(url)
        self.db.create("t", SCHEMA)
        with self.db.writer("t", background=False) as writer:
            writer.upsert([{"id": key, "n": 0} for key in KEYS])
        self.table = reef.spark.ReefTable.for_path(spark, url, "t")
        self.spark = spark
        self.expected = dict.fromkeys(KEYS, 0)
        self.conflicts = 0
        self.lock = threading.Lock()
        self.errors = []

    def count(self, keys):
        with self.lock:
            for key in keys:
                self.expected[key] += 1

    def thread(self, work, times, seed):
        """Return a thread that runs some increments in random order."""

        def run():
            chance = random.Random(seed)
            try:
                for _ in range(times):
                    time.sleep(chance.random() * 0.2)
                    work(chance)
            except BaseException as error:
                self.errors.append(error)

        return threading.Thread(target=run)

    def state(self, chance):
        """Increment by a statement: one key, a range, or a merge; a conflict changes nothing."""
        keys = sorted(chance.sample(KEYS, chance.randrange(1, 3)))
        kind = chance.choice(["update", "range", "merge"])
        try:
            if kind == "update":
                names = ", ".join(f"'{key}'" for key in keys)
                self.table.update(f"id IN ({names})", {"n": "n + 1"})
            elif kind == "range":
                keys = [key for key in KEYS if keys[0] <= key <= keys[-1]]
                self.table.update(f"id >= '{keys[0]}' AND id <= '{keys[-1]}'", {"n": "n + 1"})
            else:
                source = self.spark.createDataFrame([(key, 1) for key in keys], "id string, d int")
                merge = self.table.merge(source, "t.id = source.id")
                merge.when_matched_update({"n": "t.n + source.d"}).execute()
            self.count(keys)
        except reef.ConflictError:
            with self.lock:
                self.conflicts += 1

    def write(self, chance):
        """Increment by a transaction of the live writer."""
        key = chance.choice(KEYS)
        while True:
            try:
                with self.writer.transaction() as transaction:
                    row = transaction.get(key)
                    transaction.upsert([{"id": key, "n": row["n"] + 1}])
                break
            except reef.ConflictError:
                continue
        self.count([key])

    def run(self, times):
        """Run two threads of statements and one of transactions to their end."""
        with self.db.writer("t", background=False) as self.writer:
            threads = [self.thread(self.state, times, self.chance.random()) for _ in range(2)]
            threads.append(self.thread(self.write, 8 * times, self.chance.random()))
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not self.errors
        with self.db.reader("t") as reader:
            return {key: row["n"] for key, row in reader.scan()}


def check_counters(spark, url, seed, times):
    """Every increment that succeeded is in the table, and no other."""
    reef.spark.register(spark)
    counters = Counters(spark, url, seed)
    assert counters.run(times) == counters.expected
    assert sum(counters.expected.values()) > 8 * times, "no statement has succeeded"


def test_H76_no_update_is_lost(spark, url):
    """Two threads of statements and a live writer increment the same counters."""
    check_counters(spark, url, seed=1, times=2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(5))
def test_H76_no_update_is_lost_in_many_interleavings(spark, url, seed):
    """The same, for longer and with other interleavings."""
    check_counters(spark, url, seed, times=15)


MERGE = """
import sys, time
from pathlib import Path
import reef.spark
from pyspark.sql import SparkSession
from pyspark.sql.functions import udf
from tests.support.spark_sessions import configured

url, flag = sys.argv[1:]
builder = configured(SparkSession.builder.master("local[2]"))
spark = reef.spark.configure(builder, url=url).getOrCreate()

def wait(value):
    Path(flag).touch()
    if value == {last}:
        time.sleep(600)
    return value

spark.udf.register("wait", udf(wait, "long"))
spark.sql('''
    MERGE INTO reef.default.t t USING (SELECT id, n + 100 AS n FROM reef.default.s) s
    ON t.id = s.id
    WHEN MATCHED THEN UPDATE SET n = wait(s.n)
    WHEN NOT MATCHED THEN INSERT (id, n) VALUES (s.id, s.n)
    WHEN NOT MATCHED BY SOURCE THEN DELETE
''')
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_H76_a_driver_that_is_killed_in_a_merge_leaves_nothing_visible(spark_home, tmp_path, url):
    """Some tasks have staged their rows; later statements and the sweep are not held back."""
    db = reef.open(url)
    for name in ("t", "s"):
        db.create(name, SCHEMA)
        reef.jobs.ingest(db, name, [{"id": f"k{n:05}", "n": n} for n in range(20_000)])
    before = dict(db.reader("t").scan())
    flag = tmp_path / "running"
    with (tmp_path / "log").open("w") as log:
        driver = subprocess.Popen(
            [sys.executable, "-c", MERGE.replace("{last}", "20099"), url, str(flag)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            while not flag.exists():
                assert driver.poll() is None, (tmp_path / "log").read_text()[-3000:]
                time.sleep(0.1)
            time.sleep(3)
        finally:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
    assert dict(db.reader("t").scan()) == before
    with db.writer("t", background=False) as writer:
        writer.patch([{"id": "k00001", "n": -1}])
    sweep_everything(db)
    after = dict(db.reader("t").scan())
    assert after == {**before, "k00001": {"id": "k00001", "n": -1}}
    assert sweep_everything(db) == named_segments(db)
