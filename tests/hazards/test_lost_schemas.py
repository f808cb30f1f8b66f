"""Every object that describes a schema is lost, and batches written with it are left (H49, H17)."""

import pyarrow as pa
import pytest

from reef.engine.handles.database import Database
from reef.errors import InvalidInputError
from reef.jobs import fold, rebuild, repair, verify
from reef.testing import Simulation
from tests.support.sweep_world import USERS

BEFORE = pa.schema([("id", pa.string()), ("x", pa.int64())])
AFTER = BEFORE.append(pa.field("z", pa.int64()))
OLDER, NEWER = [1], [4, 5]
"""The LSNs of the objects that describe each of the two schemas: fences, and the first batches."""


@pytest.fixture
def db():
    """A name whose schema has grown: LSN 2 and 3 are of the first one, LSN 4 to 7 of the other."""
    db = Database(Simulation(0).bucket)
    db.create("users", BEFORE)
    with db.writer("users", background=False) as writer:
        put(writer, "a")
        put(writer, "b")
        db.alter("users", AFTER)
        writer.refresh()
        put(writer, "c")
    with db.writer("users", background=False) as writer:
        put(writer, "d")
        put(writer, "e")
    return db


def put(writer, key):
    """Write a row."""
    writer.upsert([{"id": key, "x": 1}])


def lose(db, lsns):
    """Overwrite slots of the log."""
    for lsn in lsns:
        db.store.put(USERS.wal_object(lsn), b"junk")


def rows(db):
    """Return the keys of all rows."""
    with db.reader("users") as reader:
        return "".join(key for key, _ in reader.scan())


@pytest.mark.parametrize(
    ("lost", "unknown", "left"), [(OLDER, [2, 3], "cde"), (NEWER, [6, 7], "ab")]
)
def test_H49_a_batch_of_a_lost_schema_is_an_unreadable_one(db, lost, unknown, left):
    """H49: a rebuild names the LSNs that no schema describes, older or newer, and shows the rest.

    Root cause: a missing older schema was taken for a mistake of the engine (InternalError), and a
    missing newer one was reported but not skipped, so that the next reader raised the same.
    """
    for info in list(db.store.list(USERS.manifests)):
        db.store.delete(info.key)
    lose(db, lost)
    planned = rebuild(db, "users")
    named = [f"LSN {lsn} cannot be read, and no segment covers it" for lsn in lost]
    schema = 1 if lost == OLDER else 2
    named += [
        f"LSN {lsn} was written with schema {schema}, which no object describes: it cannot be read"
        for lsn in unknown
    ]
    assert list(planned.problems) == named
    with pytest.raises(InvalidInputError, match="rows may be lost"):
        rebuild(db, "users", apply=True)
    assert rebuild(db, "users", apply=True, force=True).rows == len(left)
    assert rows(db) == left
    with db.writer("users", background=False) as writer:
        put(writer, "z")
    fold(db, "users")
    assert rows(db) == left + "z"
    assert verify(db, "users", deep=True).ok


def test_H17_a_repair_skips_batches_of_a_lost_schema(db):
    """H17: the same where the newest intact manifest is older than the schema.

    Root cause, a sibling: verify decoded only the rows whose schema it knew, and said nothing of
    the others; the chain restarted, and every reader raised InternalError.
    """
    chain = [info.key for info in db.store.list(USERS.manifests)]
    grown = next(n for n, key in enumerate(chain) if b'"z"' in db.store.get(key))
    for key in chain[grown:]:
        db.store.put(key, b"junk")
    lose(db, NEWER)
    assert {p.lsn for p in verify(db, "users").problems if p.lsn} == {4, 5, 6, 7}
    done = repair(db, "users", apply=True)
    assert [lost.lsn for lost in done.lost.lsns] == [4, 5, 6, 7]
    assert [lost.batches for lost in done.lost.lsns] == [None, None, 1, 1]
    assert rows(db) == "ab"
    assert verify(db, "users", deep=True).ok


def test_H17_a_schema_that_is_added_during_a_verify_is_no_damage(db):
    """H17: a schema newer than the head of a survey is described by a fence or by its batches."""
    listed = db.store.list
    altered = []

    def alter_before(prefix="", start_after=""):
        if prefix == USERS.wal and not altered:
            altered.append(True)
            with db.writer("users", background=False) as writer:
                put(writer, "p")
                db.alter("users", AFTER.append(pa.field("q", pa.int64())))
                put(writer, "q")
                writer.refresh()
                put(writer, "r")
            with db.writer("users", background=False) as writer:
                put(writer, "s")
        return listed(prefix, start_after)

    db.store.list = alter_before
    assert verify(db, "users", deep=True).ok
    assert altered
