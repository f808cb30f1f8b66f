"""Conditional ingests: commit only if nothing that the job has read was written since (H76)."""

import random

import msgspec
import pytest

import reef
from reef.engine.rows.input import to_ops
from reef.errors import ConflictError
from reef.formats.schema import DEFAULT_SCHEMA
from reef.formats.wal_object import OpKind, WalObject
from reef.jobs import fold
from reef.jobs.ingest import condition
from reef.jobs.ingest.condition import KeyRanges, Unchanged
from reef.jobs.ingest.job import BulkJob, staged_rows
from reef.manifest.head import Publisher
from reef.paths import Namespace
from reef.types import KeyRange

NAME = "users"


@pytest.fixture
def db():
    """A namespace with one row."""
    db = reef.open("memory://")
    with db.writer(NAME, background=False) as writer:
        writer.put("a", b"1")
    return db


def rows(**values):
    """Return rows as a job stages them."""
    columns = {"id": [key.encode() for key in values], "value": list(values.values())}
    return staged_rows(to_ops(columns, DEFAULT_SCHEMA, kind=OpKind.PUT))


def position(db, *ranges):
    """Return the condition that nothing changes after the present state."""
    with db.reader(NAME) as reader:
        return Unchanged(db.info(NAME).generation, reader.last_lsn, ranges or (KeyRange(),))


def commit(db, unless, **values):
    """Load rows under a condition."""
    with BulkJob(db, NAME) as job:
        return job.commit(job.staging.stage([rows(**values)]), unless=unless)


def contents(db):
    """Return all rows."""
    with db.reader(NAME) as reader:
        return dict(reader.scan())


def test_H76_an_unchanged_namespace_is_written(db):
    """The job's own begin is no change."""
    commit(db, position(db), a=b"2")
    assert contents(db) == {b"a": b"2"}


@pytest.mark.parametrize("change", ["put", "delete_range", "load"])
def test_H76_a_change_since_is_a_conflict(db, change):
    """Whatever wrote it, and nothing of the job is visible."""
    unless = position(db)
    if change == "load":
        commit(db, None, b=b"other")
    else:
        with db.writer(NAME, background=False) as writer:
            writer.put("b", b"other") if change == "put" else writer.delete_range("x", "z")
    before = contents(db)
    with pytest.raises(ConflictError, match="was changed at LSN"):
        commit(db, unless, a=b"2")
    assert contents(db) == before


def test_H76_a_load_that_replaces_a_range_is_a_change_of_all_of_it(db):
    """H76: it deletes keys of which it has no row, and which are in no bounds of its segments."""
    with BulkJob(db, NAME, replace=KeyRange(b"a", b"n")) as job:
        begun = position(db, KeyRange(b"b", b"c"))
        job.commit(job.staging.stage([rows(m=b"new")], KeyRange(b"a", b"n")))
    with pytest.raises(ConflictError, match="was changed at LSN"):
        commit(db, begun, b=b"2")
    assert contents(db) == {b"m": b"new"}


def test_H76_an_object_of_an_unknown_schema_may_have_changed_any_key(db):
    """H76: its keys cannot be decoded with the columns that were read."""
    with db.writer(NAME, background=False) as writer:
        lsn = writer.put("z", b"1").lsn
    names = Namespace(NAME)
    found = WalObject.decode(db.store.get(names.wal_object(lsn)), "the put")
    keys = KeyRanges.of([KeyRange(b"a", b"b")])
    assert not condition.KeysWritten(db.store, names, (DEFAULT_SCHEMA,)).touch(found, keys)
    assert condition.KeysWritten(db.store, names, ()).touch(found, keys)


def test_H76_a_change_elsewhere_is_none(db):
    """Only keys in the ranges that were read count; a fence changes nothing."""
    unless = position(db, KeyRange(b"a", b"b"))
    with db.writer(NAME, background=False) as writer:
        writer.put("m", b"other")
        writer.delete_range("x", "z")
    commit(db, unless, a=b"2")
    assert contents(db) == {b"a": b"2", b"m": b"other"}


def test_H76_a_fold_in_between_hides_no_change(db):
    """Objects below the floor of the head are checked: the manifest that was read has them."""
    unless = position(db)
    with db.writer(NAME, background=False) as writer:
        writer.put("b", b"other")
    fold(db, NAME)
    with pytest.raises(ConflictError, match="was changed at LSN"):
        commit(db, unless, a=b"2")


def test_H76_a_slot_that_is_lost_is_checked_too(db, monkeypatch):
    """A writer commits between the check and the PUT: the next try finds it."""
    unless = position(db)
    job = BulkJob(db, NAME)
    staged = job.staging.stage([rows(a=b"2")])
    send, sent = job._appender._send, []

    def write_first(header, seen):
        if not sent:
            with db.writer(NAME, background=False) as writer:
                writer.put("a", b"other")
        sent.append(header)
        send(header, seen)

    monkeypatch.setattr(job._appender, "_send", write_first)
    with pytest.raises(ConflictError, match="was changed at LSN"):
        job.commit(staged, unless=unless)
    job.abort()
    assert contents(db) == {b"a": b"other"}


def test_H76_a_generation_that_is_not_retained_is_a_conflict(db):
    """Its log may have been collected and its slots filled again: nothing is proved (H67)."""
    unless = position(db)
    fold(db, NAME)
    publisher = Publisher(db.store, Namespace(NAME))
    publisher.publish(
        lambda head: msgspec.structs.replace(head, oldest_retained=unless.generation + 1)
    )
    with pytest.raises(ConflictError, match="was garbage-collected"):
        commit(db, unless, a=b"2")
    assert contents(db) == {b"a": b"1"}


ALPHABET = [bytes([letter]) for letter in b"abcdefgh"]


def random_range(chance):
    """Return a key, a range of keys, or one without an end."""
    start, end = chance.choice(ALPHABET), chance.choice([*ALPHABET, None, None])
    if end is None and chance.random() < 0.7:
        end = start + b"\0"
    return KeyRange(start, end if end is None or end > start else start + b"\0")


def test_H76_ranges_are_searched_as_one_by_one():
    """Keys, sorted keys and other ranges, against a search of all ranges."""
    chance = random.Random(1)
    for _ in range(300):
        ranges = [random_range(chance) for _ in range(chance.randrange(5))]
        found = KeyRanges.of(ranges)
        assert list(found.starts) == sorted(set(found.starts))
        for key in [b"", *ALPHABET, b"zz"]:
            assert found.has(key) == any(one.has(key) for one in ranges), (ranges, key)
        keys = sorted(chance.sample(ALPHABET, chance.randrange(5)))
        hit = any(one.has(key) for one in ranges for key in keys)
        assert found.has_one_of(keys) == hit, (ranges, keys)
        other = random_range(chance)
        assert found.overlap(other) == any(map(other.overlaps, ranges)), (ranges, other)


@pytest.mark.parametrize(("keys", "conflicts"), [("aez", True), ("adz", False), ("ez", True)])
def test_H76_a_load_is_a_change_of_its_keys(db, keys, conflicts):
    """Its keys are read where those of the job are between its bounds; its first one is known."""
    unless = position(db, KeyRange(b"b", b"b\0"), KeyRange(b"e", b"ee"))
    commit(db, None, **dict.fromkeys(keys, b"other"))
    if conflicts:
        with pytest.raises(ConflictError, match="was changed at LSN"):
            commit(db, unless, b=b"2")
    else:
        commit(db, unless, b=b"2")


def test_H76_a_large_load_is_a_change_between_its_bounds(db, monkeypatch):
    """A conflict too many is safe, and costs no read of its keys."""
    monkeypatch.setattr(condition, "ROWS_READ_MAX", 1)
    unless = position(db, KeyRange(b"b", b"b\0"))
    commit(db, None, a=b"other", z=b"other")
    with pytest.raises(ConflictError, match="was changed at LSN"):
        commit(db, unless, b=b"2")


def test_H76_a_load_that_was_compacted_and_swept_is_a_change(db):
    """Its keys cannot be read any more: it may have had any of those between its bounds."""
    unless = position(db, KeyRange(b"b", b"b\0"))
    commit(db, None, a=b"other", z=b"other")
    for found in db.store.list(f"{Namespace(NAME).segments}"):
        db.store.delete(found.key)
    with pytest.raises(ConflictError, match="was changed at LSN"):
        commit(db, unless, b=b"2")
