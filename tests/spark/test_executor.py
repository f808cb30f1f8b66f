"""The Spark executor: the same tasks, the same results, the same errors as with threads."""

import os
from types import SimpleNamespace

import pytest

import reef
import reef.spark
from reef.spark.session import attempts_max, larger_batches
from tests.spark import tasks
from tests.spark.data import SCHEMA, change, rows


@pytest.fixture
def executor(spark):
    """An executor of the session."""
    return reef.spark.executor(spark)


def test_results_come_in_order(executor, db):
    """One Spark task for each, in other processes, and their requests are counted."""
    found = executor.map(tasks.touch, [tasks.Touch(db.store, n) for n in range(5)])
    assert [number for number, _, _ in found] == list(range(5))
    assert os.getpid() not in {process for _, process, _ in found}
    assert tasks.puts(executor) == 5
    assert len(list(db.store.list("touched/"))) == 5
    assert executor.map(tasks.touch, []) == []


def test_a_session_that_was_stopped_raises(spark, executor, db, url, monkeypatch):
    """As such, whatever is asked of it; nothing is begun."""
    df = spark.createDataFrame([("a", 1)], "id string, n long")
    monkeypatch.setattr(spark.sparkContext, "_jsc", None)
    remote = reef.spark.executor(SimpleNamespace(is_stopped=True))
    for ask in (
        lambda: executor.map(abs, [1]),
        lambda: remote.map(abs, [1]),
        executor.parallelism,
        lambda: reef.spark.bulk_load(df, url, "t", key="id"),
    ):
        with pytest.raises(reef.ClosedError, match="session was stopped"):
            ask()
    assert db.namespaces() == []


def test_functions_without_a_name_can_run(executor):
    """A closure is sent along."""
    factor = 3
    assert executor.map(lambda n: n * factor, [1, 2]) == [3, 6]


def test_the_first_error_comes_back_as_itself(executor, db):
    """An error of Reef's keeps its class, kind, hint and facts; the first in order wins."""
    for where in (executor, db.store.runtime):
        with pytest.raises(reef.ConflictError) as caught:
            where.map(tasks.fail, [0, 1, 2, 3])
        error = caught.value
        assert (error.message, error.hint, error.context) == ("task 2", "Try again", {"number": 2})


def test_other_errors_come_back_too(executor):
    """An error that is not Reef's comes back as it is; one that cannot be sent, as text."""
    with pytest.raises(ZeroDivisionError, match="task 0"):
        executor.map(tasks.fail_otherwise, [0])
    with pytest.raises(reef.InternalError, match="Unpicklable in a task: odd"):
        executor.map(tasks.fail_badly, [0])


def test_memory_is_refused_before_anything_runs(executor):
    """A store of this process's memory is nothing to other processes."""
    store = reef.open("memory://").store
    with pytest.raises(reef.InvalidInputError, match="is in the memory of one process"):
        executor.map(tasks.touch, [tasks.Touch(store, 1)])


@pytest.mark.parametrize(
    ("master", "attempts"),
    [("local[2]", 1), ("local[2,3]", 3), ("local", 1), ("local-cluster[2,1,1024]", 4), ("", 4)],
)
def test_how_often_spark_tries(master, attempts):
    """Threads of the driver are not tried again, unless the master says so."""

    class Session:
        class conf:  # noqa: N801 - Spark's name
            @staticmethod
            def get(name, default):
                return {"spark.master": master}.get(name, default)

    assert attempts_max(Session) == attempts


class Conf(dict):
    """The settings of a session, as far as they are asked for."""

    set, unset = dict.__setitem__, dict.__delitem__


@pytest.mark.parametrize("before", [{}, {"spark.sql.execution.arrow.maxRecordsPerBatch": "5"}])
def test_loads_that_overlap_leave_the_session_as_it_was(before):
    """Whichever ends first: a setting of one of them is not the user's."""
    conf = Conf(before)
    first, second = (larger_batches(SimpleNamespace(conf=conf)) for _ in range(2))
    for step in (first.__enter__, second.__enter__):
        step()
    assert set(conf.values()) == {"65536"}
    for load in (first, second):
        load.__exit__(None, None, None)
    assert conf == before


@pytest.mark.parametrize("seed", [0])
def test_fold_on_spark_is_fold_on_threads(executor, tmp_path, seed):
    """The same history, folded by both: the same rows and the same set hashes."""
    import random

    found = []
    for place, where in (("spark", executor), ("threads", None)):
        db = reef.open(str(tmp_path / place))
        db.create("t", SCHEMA)
        chance = random.Random(seed)
        with db.writer("t") as writer:
            writer.upsert(rows(0, 200))
            for step in range(5):
                change(writer, chance, step)
            before = dict(writer.scan())
        report = reef.jobs.fold(db, "t", executor=where)
        assert report.published
        after = dict(db.reader("t").scan())
        assert after == before
        found.append((after, report.rows, report.segments))
    assert found[0] == found[1]
