"""The list of commits: what the log still has, decided by its rules."""

from datetime import UTC, datetime

import pyarrow as pa
import pytest

import reef
from reef.engine.history.commits import list_commits
from reef.jobs import fold, ingest
from reef.manifest.head import locate
from reef.runtime import REAL

NAME = "t"


@pytest.fixture
def db():
    """An empty table."""
    db = reef.open("memory://")
    db.create(NAME, pa.schema([("id", pa.string()), ("n", pa.int64())]))
    return db


def commits(db, name=NAME):
    """Return the commits of a table."""
    return list_commits(db.store, locate(db.store, name).names)


def test_each_commit_has_its_operation_and_size(db):
    """Folded or not; fences, begins, and loads that are aborted or repeated are none."""
    assert commits(db) == []
    before = datetime.now(UTC)
    with db.writer(NAME, background=False) as writer:
        writer.upsert([{"id": "a", "n": 1}, {"id": "b", "n": 2}], idempotency_key="first")
        writer.delete("b")
    fold(db, NAME)
    for _ in range(2):
        ingest(db, NAME, [{"id": "c", "n": 3}], idempotency_key="load")
    with pytest.raises(reef.InvalidInputError):
        ingest(db, NAME, [{"id": "c", "n": "no number"}])
    ingest(db, NAME, [{"id": "d", "n": 4}], replace=True)
    found = commits(db)
    assert [(c.operation, c.rows, c.keys) for c in found] == [
        ("write", 2, ("first",)),
        ("write", 1, ()),
        ("load", 1, ("load",)),
        ("replace", 1, ()),
    ]
    assert [c.lsn for c in found] == sorted({c.lsn for c in found})
    assert all(c.bytes > 100 and c.by for c in found)
    assert all(before.timestamp() - 1 < c.committed_at.timestamp() < REAL.wall_s() for c in found)


def test_the_time_of_a_commit_includes_it(db):
    """Reading as of that time is reading the state that it has made."""
    for n in range(3):
        ingest(db, NAME, [{"id": "a", "n": n}])
        REAL.sleep(0.003)
    for n, commit in enumerate(commits(db)):
        with db.reader(NAME, as_of=commit.committed_at) as reader:
            assert reader.get("a")["n"] == n


def test_a_damaged_slot_is_no_end_of_the_log(db):
    """The commits behind it are not left out without a word."""
    for key in "abc":
        ingest(db, NAME, [{"id": key, "n": 1}])
    names = locate(db.store, NAME).names
    second = names.wal_object(commits(db)[1].lsn)
    db.store.delete(second)
    db.store.create(second, bytes(100))
    with pytest.raises(reef.CorruptionError, match=r"LSN \d+ of t cannot be read") as error:
        commits(db)
    assert error.value.context["object"] == second


def test_a_branch_has_the_commits_of_its_origin(db):
    """As far as the log of the origin is part of it."""
    ingest(db, NAME, [{"id": "a", "n": 1}])
    db.branch(NAME, "b")
    ingest(db, "b", [{"id": "a", "n": 2}])
    ingest(db, NAME, [{"id": "a", "n": 3}])
    first, second = commits(db, "b")
    assert first == commits(db)[0]
    assert second not in commits(db)
