"""Snapshots: named, shared, extended, released; and their cost."""

import pickle
from datetime import UTC, datetime

import pytest

import reef
from reef import stores
from reef.jobs import fold
from reef.telemetry import RequestMeter
from tests.support.bulk_jobs import ingest
from tests.support.sweep_world import DAY_S, GRACE_S, NAME, USERS, World


@pytest.fixture
def world():
    """Give a namespace on virtual time, with one row folded and one in the log."""
    world = World()
    with world.db.writer(NAME) as writer:
        writer.put("a", b"1")
        world.fold()
        writer.put("b", b"2")
    return world


def rows(world, snapshot):
    """Return the rows of a snapshot."""
    with world.db.reader(NAME, snapshot=snapshot) as view:
        return dict(view.scan())


BOTH = {b"a": b"1", b"b": b"2"}


def test_a_snapshot_has_everything_that_was_acknowledged(world):
    """Folded or not, loads included; and nothing that comes after it."""
    ingest(world.bucket, NAME, {b"bulk": b"3"})
    snapshot = world.db.snapshot(NAME)
    with world.db.writer(NAME) as writer:
        writer.put("c", b"4")
        writer.delete("a")
    world.fold()
    assert rows(world, snapshot) == {**BOTH, b"bulk": b"3"}
    assert snapshot.generation < world.head().generation


def test_a_snapshot_retains_its_objects_and_nothing_after_its_end(world):
    """Manifest, segments and log stay through folds and sweeps, and go when it is released."""
    snapshot = world.db.snapshot(NAME, "monday")
    (old,) = world.head().segments
    with world.db.writer(NAME) as writer:
        writer.put("b", b"new")
    world.fold()
    world.compact()
    world.advance(2 * DAY_S)
    world.sweep_twice()
    assert rows(world, snapshot) == BOTH
    snapshot.release()
    world.advance(GRACE_S + 10)
    gone = world.sweep_twice()
    assert {f"segments/{old.id}.seg", f"manifest/{snapshot.generation:020}.manifest.json"} <= {
        *gone
    }
    assert world.slots() == [1, 4, 5], "fences, and the one below the floor"


def test_a_name_is_taken_once(world):
    """While the first is alive: after its release or its end it is free."""
    first = world.db.snapshot(NAME, "monday", ttl_s=60)
    with pytest.raises(reef.ConflictError, match="'monday' already"):
        world.db.snapshot(NAME, "monday")
    first.release()
    world.db.snapshot(NAME, "monday", ttl_s=60)
    world.advance(61)
    third = world.db.snapshot(NAME, "monday")
    assert [s.id for s in world.db.snapshots(NAME)] == [third.id]
    assert len(world.head().snapshots) == 1, "the expired one went with the edit"


def test_several_share_a_generation(world):
    """Each holds it; the last one to end lets it go."""
    first = world.db.snapshot(NAME, "first")
    second = world.db.snapshot(NAME, "second", generation=first.generation)
    assert second.generation == first.generation
    assert second.id != first.id
    first.release()
    first.release()
    world.fold()
    world.advance(DAY_S)
    world.sweep_twice()
    assert rows(world, "second") == BOTH
    third = world.db.snapshot(NAME, generation=second.generation)
    assert third.generation < world.head().oldest_retained, "pinned already, so still active"
    second.release()
    third.release()
    with pytest.raises(reef.NotFoundError, match="released, or has expired"):
        rows(world, second)


def test_only_an_active_generation_can_be_pinned(world):
    """Not one that is gone, nor one that is to come."""
    old = world.head().generation
    world.fold()
    world.sweep()
    with pytest.raises(reef.NotFoundError, match="not active") as caught:
        world.db.snapshot(NAME, generation=old)
    assert caught.value.kind == "collected"
    with pytest.raises(reef.NotFoundError, match="not active") as caught:
        world.db.snapshot(NAME, generation=99)
    assert caught.value.kind == "not_found"
    kept = world.head().generation
    assert world.db.snapshot(NAME, generation=kept).generation == kept


def test_expiry_and_extension(world):
    """It ends when its time is over, can be extended before, and not after."""
    snapshot = world.db.snapshot(NAME, "s", ttl_s=60)
    assert snapshot.expires_at == datetime.fromtimestamp(world.bucket.now() + 60, UTC)
    world.advance(50)
    snapshot.extend(100)
    world.advance(90)
    assert rows(world, "s") == BOTH
    world.advance(11)
    assert world.db.snapshots(NAME) == []
    for call in (lambda: snapshot.extend(100), lambda: rows(world, snapshot)):
        with pytest.raises(reef.NotFoundError, match="has expired") as caught:
            call()
        assert caught.value.kind == "collected"
    forever = world.db.snapshot(NAME, "s", ttl_s=60)
    forever.extend(None)
    assert forever.expires_at is None
    world.advance(365 * DAY_S)
    assert world.db.snapshots(NAME) == [forever]


def test_an_expired_snapshot_is_removed_by_the_sweep_that_deletes_its_objects(world):
    """So an entry that is still there has lost nothing."""
    snapshot = world.db.snapshot(NAME, ttl_s=60)
    world.fold()
    world.sweep()
    assert len(world.head().snapshots) == 1
    world.advance(70)
    assert any(str(snapshot.generation) in doomed.key for doomed in world.sweep().condemned)
    assert world.head().snapshots == ()


def test_a_pickled_snapshot_is_the_same(tmp_path):
    """It can be read, extended and released elsewhere."""
    db = reef.open(str(tmp_path))
    db.writer(NAME).put("a", b"1")
    snapshot = db.snapshot(NAME, "s", ttl_s=60)
    copy = pickle.loads(pickle.dumps(snapshot))
    assert (copy, hash(copy)) == (snapshot, hash(snapshot))
    assert copy.expires_at == snapshot.expires_at
    copy.extend(None)
    (listed,) = db.snapshots(NAME)
    assert listed.expires_at is None
    copy.release()
    assert db.snapshots(NAME) == []
    assert "'s' of users" in repr(copy)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"name": ""}, "not a valid name of a snapshot"),
        ({"name": 7}, "not a valid name of a snapshot"),
        ({"name": "x" * 129}, "not a valid name of a snapshot"),
        ({"ttl_s": 0}, "not a number of seconds"),
        ({"ttl_s": "1"}, "not a number of seconds"),
        ({"ttl_s": float("nan")}, "not a number of seconds"),
        ({"generation": "1"}, "not an integer"),
        ({"generation": True}, "not an integer"),
    ],
    ids=str,
)
def test_bad_words_publish_nothing(world, words, says):
    """Each error names the expected value."""
    before = world.head()
    with pytest.raises(reef.InvalidInputError, match=says):
        world.db.snapshot(NAME, **words)
    assert world.head() == before


def test_values_that_are_no_snapshot_of_this_namespace(world):
    """Of another one, of none, or of no kind that there is."""
    world.db.create("other")
    with pytest.raises(reef.InvalidInputError, match="not a snapshot of users"):
        rows(world, world.db.snapshot("other"))
    with pytest.raises(reef.NotFoundError, match="no snapshot sunday"):
        rows(world, "sunday")
    with pytest.raises(reef.InvalidInputError, match="neither a Snapshot"):
        rows(world, 3)
    with pytest.raises(reef.NotFoundError, match="no namespace"):
        world.db.snapshot("unknown")


@pytest.mark.parametrize("size", [1, 200])
def test_a_snapshot_costs_the_same_whatever_the_size(size):
    """One listing of the log and one manifest; segments are not touched."""
    meter = RequestMeter()
    db = reef.Database(stores.open("memory://", meter=meter))
    with db.writer(NAME) as writer:
        for number in range(size):
            writer.put(f"k{number}", b"v")
            if number % 20 == 0:
                fold(db, NAME)
    meter.reset()
    db.snapshot(NAME)
    assert meter.requests() == {"list": 2, "get": 3, "put": 1}


def test_a_fold_and_a_sweep_while_a_snapshot_lists_the_log(world):
    """H10: a listed object is already deleted; it lists again, and misses nothing."""
    from tests.hazards.test_collection import At

    with world.db.writer(NAME) as writer:
        writer.put("c", b"3")

    def overtake():
        world.fold()
        world.sweep_twice()
        with world.db.writer(NAME) as writer:
            writer.put("d", b"4")

    db = reef.Database(At(world.bucket, "list", "/wal/", overtake))
    assert rows(world, db.snapshot(NAME)) == {**BOTH, b"c": b"3", b"d": b"4"}
    assert world.bucket.head(USERS.manifest(world.head().generation))
