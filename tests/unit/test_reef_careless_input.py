"""Careless arguments: every one is an error of Reef's own, that says what is wrong with it.

Each argument of each public method gets values that do not belong there: the wrong type, None,
nothing, too much, text that is no Unicode. Most are refused, some mean something; none may end in
an error of a library below, which would name neither the argument nor the value.
"""

import inspect
import traceback
from datetime import date, datetime

import pyarrow as pa
import pytest

import reef
from reef import jobs

COLUMNS = pa.schema([("id", pa.string()), ("n", pa.int64()), ("vector", pa.list_(pa.float32(), 2))])
CARELESS = [
    *(None, "", b"\xff", -1, 1.5, float("nan"), True, 10**30, [], {}, [None], {"n": 1}, {"id"}),
    *("x" * 5000, "ключ", "a/../b", "\x00", "\ud800", "2026-13-45", datetime(2026, 1, 1)),
    *(date(2026, 1, 1), pa.table({"q": [1]}), print, reef),
]
SENSIBLE = {
    "namespace": "events",
    "source": "events",
    "child": "events",
    "new_name": "other",
    "schema": COLUMNS,
    "key": "e1",
    "keys": ["e1"],
    "rows": [{"id": "e1", "n": 1}],
    "value": {"n": 1},
    "columns": {"n": reef.add(1)},
    "operators": {"n": "add"},
    "where": "n > 1",
    "set": {"n": 1},
    "start": "a",
    "end": "z",
    "query": "SELECT 1",
    "batch": reef.Batch().put("e1", {"n": 1}),
    "target": "memory://",
}
JOBS = ("build_indexes", "compact", "export", "fold", "health", "import_", "ingest", "purge")
JOBS += ("rebuild", "repair", "restore", "sweep", "verify", "verify_backup")
LEFT_OUT = {"follow", "timeout_s", "until_lsn", "memory"}
"""Arguments of calls that wait, and the object in which a service keeps the state of its sweeps."""


@pytest.fixture
def db():
    """Return a database with a namespace, and a writer of it."""
    with reef.open("memory://") as db:
        db.create("events", COLUMNS)
        with db.writer("events", background=False) as writer:
            writer.upsert([{"id": "e1", "n": 1, "vector": [1, 2]}, {"id": "e2"}])
        yield db


def public(cls, *without):
    """Return the names of the methods of a class."""
    names = [name for name in dir(cls) if not name.startswith("_") and name not in without]
    return [name for name in names if callable(getattr(cls, name))]


def calls(function, **given):
    """Yield a function's arguments, with a careless value for one of them at a time."""
    known = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    required = {
        parameter.name: given.get(parameter.name, SENSIBLE.get(parameter.name, "e1"))
        for parameter in known
        if parameter.default is parameter.empty
    }
    for parameter in known:
        for value in () if parameter.name in LEFT_OUT else CARELESS:
            yield {**required, parameter.name: value}


def refuse_clearly(function, arguments):
    """Call a function; return what is wrong with its error, if anything is."""
    try:
        found = function(**arguments)
        for _ in found if inspect.isgenerator(found) else ():
            pass
    except reef.ReefError as error:
        return None if len(str(error)) < 4500 else f"{len(str(error))} characters"
    except (TypeError, ValueError, AttributeError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if "/reef/" in last.filename and str(last.line).startswith("raise "):
            return None
        return f"{type(error).__name__}: {error} at {last.filename}:{last.lineno}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def misunderstood(function, **given):
    """Return the careless arguments whose error is not Reef's own."""
    found = {}
    for arguments in calls(function, **given):
        problem = refuse_clearly(function, arguments)
        if problem is not None:
            found[str(arguments)[:200]] = problem
    return found


@pytest.mark.parametrize("name", public(reef.Database, "close"))
def test_methods_of_a_database(db, name):
    """Names, times, schemas, queries."""
    assert not misunderstood(getattr(db, name))


@pytest.mark.parametrize("name", public(reef.Writer, "close", "transaction"))
def test_methods_of_a_writer(db, name):
    """Keys, rows, conditions, bounds, columns."""
    with db.writer("events", background=False) as writer:
        assert not misunderstood(getattr(writer, name))


@pytest.mark.parametrize("name", public(reef.Reader, "close", "wait_for"))
def test_methods_of_a_reader(db, name):
    """Keys, bounds, filters, columns, points in time."""
    with db.reader("events") as reader:
        assert not misunderstood(getattr(reader, name))


@pytest.mark.parametrize("name", public(reef.Transaction))
def test_methods_of_a_transaction(db, name):
    """The same as of a writer."""
    with db.writer("events", background=False) as writer:

        def call(**arguments):
            with writer.transaction() as transaction:
                found = getattr(transaction, name)(**arguments)
                return list(found) if inspect.isgenerator(found) else found

        call.__signature__ = inspect.signature(getattr(writer.transaction(), name))
        assert not misunderstood(call)


@pytest.mark.parametrize("name", public(reef.Batch))
def test_methods_of_a_batch(name):
    """Keys and rows."""

    def call(**arguments):
        return getattr(reef.Batch(), name)(**arguments)

    call.__signature__ = inspect.signature(getattr(reef.Batch(), name))
    assert not misunderstood(call)


@pytest.mark.parametrize("name", JOBS)
def test_jobs(db, tmp_path, monkeypatch, name):
    """A URL for the database, a session of Spark for the executor, a file for a directory."""
    monkeypatch.chdir(tmp_path)  # some names are directories
    given = {"db": db, "source": "memory://"}
    assert not misunderstood(getattr(jobs, name), **given)


def test_the_url_of_a_bucket_is_no_database():
    """The error says what to pass."""
    with pytest.raises(reef.InvalidInputError, match=r"found str './data'. Pass what reef.open"):
        jobs.fold("./data", "users")


def test_a_session_is_no_executor(db):
    """The error names the function that makes one."""
    with pytest.raises(reef.InvalidInputError, match=r"reef.spark.executor\(spark\)"):
        jobs.compact(db, "events", executor="spark")
