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
from pyspark.errors import AnalysisException

import reef
import reef.jobs
import reef.spark
from tests.spark.writing import named_segments, sweep_everything

ROOT = Path(__file__).parent.parent.parent
KEYS = "abcde"
MORE_KEYS = "abcdefgh"
"""Those of statements: some have no row at first."""
SCHEMA = pa.schema([("id", pa.string()), ("n", pa.int64())])


class History:
    """Statements that run concurrently, and what each does to a model of the table.

    Every statement is a MERGE that also inserts a row of its own, its mark. The change feed has the
    LSN at which that became visible, and with it the place of the statement in the serial order.
    """

    def __init__(self, spark, url, seed):
        self.chance = random.Random(seed)
        self.spark, self.url, self.db = spark, url, reef.open(url)
        self.db.create("t", SCHEMA)
        with self.db.writer("t", background=False) as writer:
            writer.upsert([{"id": key, "n": 0} for key in KEYS])
        self.table = reef.spark.ReefTable.for_path(spark, url, "t")
        self.effects = {}
        self.conflicts = 0
        self.errors = []

    def thread(self, work, name, times):
        """Return a thread that does some work in random order."""
        chance = random.Random(self.chance.random())

        def run():
            try:
                for number in range(times):
                    time.sleep(chance.random() * 0.2)
                    work(chance, f"{name}{number}")
            except BaseException as error:
                self.errors.append(error)

        return threading.Thread(target=run)

    # --- statements -----------------------------------------------------------------
    def state(self, chance, mark):
        """Run one statement; if it commits, keep its effect. A conflict changes nothing."""
        keys = sorted(chance.sample(MORE_KEYS, chance.randrange(1, 3)))
        source = ", ".join(f"('{key}', {n})" for n, key in enumerate([*keys, mark], 1))
        statement, effect = chance.choice(STATEMENTS)
        table = self.table.name
        try:
            self.spark.sql(statement.format(t=table, source=f"VALUES {source} AS s(id, n)"))
        except AnalysisException as error:
            if "ConflictError" not in str(error):
                raise
            self.conflicts += 1
            return
        self.effects[mark] = lambda model: effect(
            model, {**dict(zip(keys, (1, 2), strict=False)), mark: len(keys) + 1}
        )

    def write(self, chance, mark):
        """Move one from a key to another, by a transaction of the live writer."""
        one, other = chance.sample(KEYS, 2)
        while True:
            try:
                with self.writer.transaction() as transaction:
                    n = (transaction.get(one) or {"n": 0})["n"]
                    moved = [{"id": one, "n": n - 1}, {"id": other, "n": n}, {"id": mark, "n": 0}]
                    transaction.upsert(moved)
                break
            except reef.ConflictError:
                continue

        def effect(model):
            n = model.get(one, 0)
            model.update({one: n - 1, other: n, mark: 0})

        self.effects[mark] = effect

    def run(self, times):
        """Run two threads of statements and one of transactions to their end."""
        with self.db.writer("t", background=False) as self.writer:
            threads = [self.thread(self.state, f"s{n}-", times) for n in range(2)]
            threads.append(self.thread(self.write, "w", 6 * times))
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not self.errors, self.errors

    def replayed(self):
        """Return the rows after the same statements, one after the other."""
        lsns = {}
        with self.db.reader("t") as reader:
            for change in reader.changes():
                if change.key in self.effects:
                    lsns.setdefault(change.key, change.lsn)
        assert set(lsns) == set(self.effects)
        model = dict.fromkeys(KEYS, 0)
        for mark in sorted(self.effects, key=lsns.get):
            self.effects[mark](model)
        return model

    def found(self):
        """Return the rows of the table."""
        with self.db.reader("t") as reader:
            return {key: row["n"] for key, row in reader.scan()}


def add(model, source):
    """Update the rows that match, insert the others."""
    for key, n in source.items():
        model[key] = model[key] + n if key in model else n


def insert(model, source):
    """Insert the rows that do not match."""
    for key, n in source.items():
        model.setdefault(key, n)


def delete(model, source):
    """Delete the rows that match, insert the others."""
    for key, n in source.items():
        if model.pop(key, None) is None:
            model[key] = n


def insert_the_sum(model, source):
    """Insert the rows that do not match, each with the sum of the table."""
    total = sum(n for key, n in model.items() if key in MORE_KEYS)
    for key in source:
        model.setdefault(key, total)


def clear_the_rest(model, source):
    """Update the rows that match, set the others of the table to 7, insert the mark."""
    for key in [key for key in model if key in MORE_KEYS and key not in source]:
        model[key] = 7
    add(model, source)


MERGE_KEYS = "MERGE INTO {t} t USING (SELECT * FROM {source}) s ON t.id = s.id "
INSERT = "WHEN NOT MATCHED THEN INSERT (id, n) VALUES (s.id, s.n) "
UPDATE = "WHEN MATCHED THEN UPDATE SET n = t.n + s.n "
KEYS_ONLY = "', '".join(MORE_KEYS)
STATEMENTS = [
    (MERGE_KEYS + UPDATE + INSERT, add),
    (MERGE_KEYS + INSERT, insert),
    (MERGE_KEYS + "WHEN MATCHED THEN DELETE " + INSERT, delete),
    (
        "MERGE INTO {t} t USING (SELECT s.id, (SELECT coalesce(sum(n), 0) FROM {t} "
        f"WHERE id IN ('{KEYS_ONLY}')) AS n FROM {{source}}) s ON t.id = s.id " + INSERT,
        insert_the_sum,
    ),
    (
        MERGE_KEYS
        + UPDATE
        + INSERT
        + f"WHEN NOT MATCHED BY SOURCE AND t.id IN ('{KEYS_ONLY}') THEN UPDATE SET n = 7",
        clear_the_rest,
    ),
]


def check_history(spark, url, seed, times):
    """The table is as if the statements had run one after the other, in the order of their LSNs."""
    reef.spark.register(spark)
    history = History(spark, url, seed)
    history.run(times)
    assert history.found() == history.replayed()
    assert len(history.effects) > 6 * times, "no statement has succeeded"


def test_H76_statements_are_serializable(spark, url):
    """Two threads of statements and a live writer; a serial model has the same rows."""
    check_history(spark, url, seed=1, times=2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(5))
def test_H76_statements_are_serializable_in_many_interleavings(spark, url, seed):
    """The same, for longer and with other interleavings."""
    check_history(spark, url, seed, times=15)


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
