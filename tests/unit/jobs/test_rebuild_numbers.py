"""Numbers of a rebuilt head: epochs, generations and the fields that only the old head knew."""

import sys

import msgspec
import pyarrow as pa
import pytest

from reef.errors import ConflictError
from reef.jobs import fold, rebuild
from reef.jobs.rebuild import MARGIN
from reef.jobs.repair.job import fence_off
from reef.manifest.edits import raise_writer_epoch
from reef.manifest.head import Publisher
from tests.support.rebuild import EVENTS, NAME, head_of, open_mortal, rows_of
from tests.support.sweep_world import NAME as USERS_NAME
from tests.support.sweep_world import World


@pytest.fixture
def db():
    """A namespace with two versions of a row, in a segment each."""
    found = open_mortal()
    found.create(NAME, pa.schema([("id", pa.string()), ("x", pa.int32())]))
    with found.writer(NAME, background=False) as writer:
        for x in (1, 2):
            writer.upsert([{"id": "a", "x": x}])
            fold(found, NAME)
    return found


@pytest.fixture
def second_life():
    """A namespace that was dropped and created again, and that has no rows yet."""
    world = World()
    with world.db.writer(USERS_NAME) as writer:
        writer.put("a", b"old")
    world.db.drop(USERS_NAME)
    world.advance(10)
    world.db.create(USERS_NAME)
    return world


def edit_head(db, **fields):
    """Publish a head with other fields."""
    Publisher(db.store, EVENTS).publish(lambda head: msgspec.structs.replace(head, **fields))


def damage_head(db, **fields):
    """Publish a head that has lost its newest segment."""
    edit_head(db, segments=head_of(db).segments[1:], **fields)


def lose_manifests(store, names):
    """Delete every manifest there is."""
    store.delete_many([info.key for info in store.list(names.manifests)])


def test_an_older_version_of_a_row_is_another_row(db):
    """Heads that show different versions of one key differ, though key, sequence and kind agree."""
    damage_head(db)
    assert rows_of(db) == [{"id": "a", "x": 1}]
    report = rebuild(db, NAME)
    assert (report.rows_equal, report.rows) == (False, 1)
    rebuild(db, NAME, apply=True, force=True)
    assert rows_of(db) == [{"id": "a", "x": 2}]


def test_a_compactor_that_has_staged_nothing_is_fenced(db):
    """Its epoch is in no segment's name; the rebuilt head is above it all the same."""
    edit_head(db, compactor_epoch=head_of(db).compactor_epoch + 5)
    epoch = head_of(db).compactor_epoch
    lose_manifests(db.store, EVENTS)
    rebuild(db, NAME, apply=True)
    assert head_of(db).compactor_epoch > epoch


def test_a_head_that_appears_during_a_rebuild_is_reported(db):
    """A process that continues by deleted manifests hides the rebuilt head: it must be stopped."""
    lost = head_of(db)
    lose_manifests(db.store, EVENTS)
    inner = db.store.create

    def create(key, body):
        result = inner(key, body)
        if "/manifest/" in key:
            generation = lost.generation + 2 * MARGIN
            db.store.put(EVENTS.manifest(generation), b"of another chain")
        return result

    db.store.create = create
    with pytest.raises(ConflictError, match="appeared meanwhile"):
        rebuild(db, NAME, apply=True)


def test_a_forced_rebuild_keeps_stream_marks(db):
    """The batches of a stream were collected: only the head knows how far it is (H63)."""
    damage_head(db, stream_marks={"events-log": 7})
    rebuild(db, NAME, apply=True, force=True)
    assert head_of(db).stream_marks == {"events-log": 7}


def test_a_forced_rebuild_keeps_skipped_slots(db):
    """A slot below the floor that a repair voided is still not read by history."""
    damage_head(db, skipped_lsns=(2,))
    rebuild(db, NAME, apply=True, force=True)
    assert head_of(db).skipped_lsns == (2,)


def test_a_forced_rebuild_fences_compactors(db):
    """A merge that was planned over the segments of the old head is not published."""
    damage_head(db)
    epoch = head_of(db).compactor_epoch
    rebuild(db, NAME, apply=True, force=True)
    assert head_of(db).compactor_epoch == epoch + 1


def test_a_forced_rebuild_overtakes_openings_behind_its_fence(db, monkeypatch):
    """An opening that has raised the epoch after the fence loads the old head: it must start again.

    It compares its epoch with that of the head before it becomes the writer, so the publish has a
    higher one than the fence.
    """
    damage_head(db)
    epochs = []

    def fence_off_and_raise(*arguments):
        fence_off(*arguments)
        Publisher(db.store, EVENTS).publish(lambda head: raise_writer_epoch(head, 1))
        epochs.append(head_of(db).writer_epoch)

    monkeypatch.setattr(sys.modules["reef.jobs.rebuild"], "fence_off", fence_off_and_raise)
    rebuild(db, NAME, apply=True, force=True)
    assert head_of(db).writer_epoch > epochs[0]


def test_a_rebuilt_second_life_continues_all_numbers(second_life):
    """Of a life without rows only its record is left; its numbers are above those announced."""
    world = second_life
    before = world.head()
    lose_manifests(world.bucket, world.names)
    report = world.run(lambda: rebuild(world.db, USERS_NAME, apply=True))
    after = world.head()
    assert report.writer_epoch >= before.writer_epoch
    assert after.wal_base == before.wal_base > 1
    assert after.generation >= before.generation + MARGIN - 1
    assert after.compactor_epoch > before.compactor_epoch
