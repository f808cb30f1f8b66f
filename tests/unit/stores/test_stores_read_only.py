"""Read-only credentials: reads write nothing, not even to learn the store's time."""

from datetime import UTC, datetime

import pytest

import reef
from reef.errors import ErrorKind, InvalidInputError
from reef.stores import Wrapper

NAME = "users"


class ReadOnly(Wrapper):
    """A bucket whose policy allows GET and LIST, and so has no clock."""

    def _denied(self, *_args):
        raise InvalidInputError("no permission", kind=ErrorKind.ACCESS_DENIED)

    put = create = replace = upload = copy = delete_many = now = abort_stale = _denied


@pytest.fixture
def db():
    """Give a database that may only be read, with something of everything in it."""
    db = reef.open("memory://")
    with db.writer(NAME, background=False) as writer:
        writer.put("a", b"1")
        reef.jobs.fold(db, NAME)
        db.snapshot(NAME, name="monday", ttl_s=3600)  # which ends by the store's time
        writer.put("b", b"2")
        reef.jobs.fold(db, NAME)
        reef.jobs.sweep(db, NAME, apply=True, retain_generations_max=1)
        writer.put("c", b"3")
    return db._over(ReadOnly(db.store))


def monday(db):
    """Return the generation of the snapshot, which nothing else keeps any more."""
    (snapshot,) = db.snapshots(NAME)
    assert snapshot.generation < db.stats(NAME).oldest_retained
    return snapshot.generation


READS = {
    "get": lambda db: db.reader(NAME).get("c") == b"3",
    "changes": lambda db: [c.key for c in db.reader(NAME).changes(after_lsn=3)] == [b"c"],
    "as of a snapshot": lambda db: (
        dict(db.reader(NAME).as_of(generation=monday(db)).scan()) == {b"a": b"1"}
    ),
    "as of an LSN": lambda db: dict(db.reader(NAME).as_of(lsn=2).scan()) == {b"a": b"1"},
    "as of a time": lambda db: db.reader(NAME).as_of(time=datetime.now(UTC)).get("a") == b"1",
    "stats": lambda db: "monday" in db.stats(NAME).snapshots,
    "snapshots": lambda db: len(db.snapshots(NAME)) == 1,
    "jobs": lambda db: db.jobs() == [],
    "verify": lambda db: reef.jobs.verify(db, NAME, deep=True).problems == [],
    "dry sweep": lambda db: not reef.jobs.sweep(db, NAME).applied,
    "dry repair": lambda db: not reef.jobs.repair(db, NAME).applied,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_reading_needs_no_permission_to_write(db, read):
    """Readers, reports and dry runs work where nothing can be written, and return the same."""
    assert read(db)


def test_a_reader_of_a_retained_generation_does_not_read_the_clock():
    """It would have to write for it; a snapshot that ends holds nothing that is not kept anyway."""
    asked = []

    class Watched(Wrapper):
        def now(self):
            asked.append(self.url)
            return self.inner.now()

    db = reef.open("memory://")
    db.writer(NAME, background=False).put("a", b"1")
    db.snapshot(NAME, ttl_s=3600)
    reader = db._over(Watched(db.store)).reader(NAME)
    assert reader.as_of(generation=1).get("a") is None
    assert len(list(reader.changes(after_lsn=0))) == 1
    assert asked == []


def test_reads_return_the_same(db):
    """A snapshot that has not ended is there, and nothing is wrong."""
    assert [snapshot.name for snapshot in db.snapshots(NAME)] == ["monday"]
    assert reef.jobs.verify(db, NAME).problems == []


WRITES = {
    "writer": lambda db: db.writer(NAME),
    "a new namespace": lambda db: db.writer("others"),
    "fold": lambda db: reef.jobs.fold(db, NAME),
    "sweep": lambda db: reef.jobs.sweep(db, NAME, apply=True),
    "snapshot": lambda db: db.snapshot(NAME, ttl_s=60),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_writing_is_refused_by_name(db, write):
    """H30: and a sweep that deletes goes by no clock but the store's."""
    with pytest.raises(InvalidInputError) as caught:
        write(db)
    assert caught.value.kind is ErrorKind.ACCESS_DENIED
