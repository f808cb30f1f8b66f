"""Names with two lives: dropped, and created again (H65).

The root: one chain of generations, LSNs and epochs for several lives meant that every reader of
the log had to remember where the current one began. An incarnation has a prefix of its own, so
that each test here asks for a history in both lives and compares with a model of each.
"""

from datetime import UTC, datetime

import msgspec
import pytest

import reef
from reef.errors import ConflictError, FencedError, NotFoundError, OutcomeUnknownError
from reef.formats.manifest import NamespaceState, decode_successor
from reef.jobs import compact, export, fold, ingest, rebuild, repair, sweep, verify
from reef.manifest import edits
from reef.manifest.head import HeadFinder, Publisher, locate, newest_incarnation
from reef.manifest.lifecycle import clear_dropped
from reef.stores import Outcome, Wrapper, WriteResult
from reef.telemetry import RequestMeter
from tests.support.sweep_world import DAY_S, GRACE_S, NAME, USERS, World

OLD = {b"secret%d" % number: b"old" for number in range(3)}


@pytest.fixture
def world():
    """Three rows in a segment, pinned by a snapshot; dropped, and created again without rows."""
    world = World()
    with world.db.writer(NAME) as writer:
        for key, value in OLD.items():
            writer.put(key, value)
    world.fold()
    world.db.snapshot(NAME, name="old")
    create_again(world)
    return world


def create_again(world):
    """Drop the name and create it again, with some time in between."""
    world.advance(100)
    world.db.drop(NAME)
    world.advance(10)
    world.db.create(NAME)
    world.advance(10)


def load(world, key, *keys):
    """Load some rows under an idempotency key; return the LSN."""
    rows = {"id": list(keys), "value": [b"new"] * len(keys)}
    return world.run(lambda: ingest(world.db, NAME, rows, idempotency_key=key)).lsn


def swept(world, days=3):
    """Let days pass, and sweep on each."""
    for _ in range(days):
        world.advance(DAY_S)
        world.sweep()
        world.advance(GRACE_S + 10)
        world.sweep()


@pytest.mark.parametrize("key", ["load-1", "load-2"])
def test_H65_a_sweep_keeps_the_objects_of_snapshots_of_both_incarnations(key):
    """H65: the log of the new incarnation was resolved with the window of the old one."""
    world = World()
    world.db.create(NAME)
    load(world, "load-1", b"a")
    world.fold()
    world.db.snapshot(NAME, name="old")
    create_again(world)
    load(world, key, b"a", b"b")
    world.db.snapshot(NAME, name="new")
    with world.db.writer(NAME) as writer:
        writer.put("c", b"new")
    world.fold()
    world.run(lambda: compact(world.db, NAME, full=True))
    swept(world)
    for name, keys in (("new", {b"a", b"b"}), ("old", {b"a"})):
        with world.run(lambda name=name: world.db.reader(NAME, snapshot=name)) as reader:
            assert {key for key, _ in reader.scan()} == keys
    assert not verify(world.db, NAME, deep=True).problems


def test_H65_as_of_shows_one_life(world):
    """H65: an LSN or a time before the new life began is an error, one in it shows its rows."""
    first = load(world, "l", b"a")
    world.advance(10)
    load(world, "m", b"b")
    world.fold()
    reader = world.db.reader(NAME)
    assert dict(reader.as_of(lsn=first).scan()) == {b"a": b"new"}
    base = world.head().wal_base
    assert dict(reader.as_of(lsn=base - 1).scan()) == {}
    for lsn in range(base - 1):
        with pytest.raises(NotFoundError, match="created again"):
            reader.as_of(lsn=lsn)
    for generation in range(1, world.head().oldest_retained):
        with pytest.raises(NotFoundError) as caught:
            reader.as_of(generation=generation)
        assert caught.value.kind == "collected"


def test_H65_snapshots_of_the_dropped_life_can_be_read_listed_and_released(world):
    """H65: they are read in their own life; the new one's name wins where both have it."""
    with world.db.writer(NAME) as writer:
        writer.put("n", b"new")
    assert [snapshot.name for snapshot in world.db.snapshots(NAME)] == ["old"]
    (old,) = world.db.snapshots(NAME)
    for wanted in ("old", old, old.id):
        with world.db.reader(NAME, snapshot=wanted) as reader:
            assert dict(reader.scan()) == OLD
    world.db.snapshot(NAME, name="old")
    with world.db.reader(NAME, snapshot="old") as reader:
        assert dict(reader.scan()) == {b"n": b"new"}
    with world.db.reader(NAME, snapshot=old) as reader:
        assert dict(reader.scan()) == OLD
    target = reef.stores.open("memory://")
    assert world.run(lambda: export(world.db, NAME, target, snapshot=old)).rows == 3
    swept(world)
    with world.db.reader(NAME, snapshot=old) as reader:
        assert dict(reader.scan()) == OLD
    old.extend(100.0)
    old.release()
    with pytest.raises(NotFoundError):
        world.db.reader(NAME, snapshot=old)
    assert [snapshot._names.incarnation for snapshot in world.db.snapshots(NAME)] == [2]


def test_H65_a_sweep_deletes_earlier_lives_and_then_forgets_them():
    """H65: a day after its drop an earlier life is cleared; later sweeps do not list it."""
    world = World()
    for life in range(3):
        with world.db.writer(NAME) as writer:
            writer.put(f"k{life}", b"1")
        world.fold()
        create_again(world)
    assert world.head().predecessors == (1, 2, 3)
    preview = world.run(lambda: sweep(world.db, NAME))
    assert preview.condemned == ()
    swept(world, days=2)
    assert world.head().predecessors == ()
    for life in (1, 2, 3):
        names = USERS.at(life)
        assert list(world.bucket.list(names.segments)) == []
        assert len(list(world.bucket.list(names.manifests))) >= 1
        kinds = {int(i.key[-24:-4]) for i in world.bucket.list(names.wal)}
        assert kinds, "fences stay"
    assert world.rows() == {}
    with pytest.raises(NotFoundError):
        HeadFinder(world.bucket, USERS).find()


def test_H65_the_keys_of_earlier_lives_in_a_sweeps_report():
    """H65: they are relative to the folder of the name, so that each is said once."""
    world = World()
    for _ in range(2):
        with world.db.writer(NAME) as writer:
            writer.put("k", b"1")
        world.fold()
        create_again(world)
    world.advance(DAY_S + 10)
    keys = {doomed.key for doomed in world.sweep().condemned}
    assert any(key.startswith("segments/") for key in keys)
    assert any(key.startswith(f"incarnations/{2:020}/segments/") for key in keys)
    for key in keys:
        assert world.bucket.head(f"namespaces/{NAME}/{key}").size


@pytest.mark.parametrize("damaged", [False, True])
def test_H65_manifests_of_an_earlier_life_that_are_lost_do_not_concern_the_current_one(
    world, damaged
):
    """H65: the current life is found without them; its sweep works, and a repair or a rebuild ends
    the earlier one, whose snapshots are lost."""
    with world.db.writer(NAME) as writer:
        writer.put("n", b"new")
    for info in list(world.bucket.list(USERS.manifests)):
        if damaged:
            world.bucket.put(info.key, b"damage")
        else:
            world.bucket.delete(info.key)
    assert world.rows() == {b"n": b"new"}
    world.fold()
    assert "earlier incarnations that cannot be read" in world.sweep().kept
    problems = verify(world.db, NAME, deep=True).problems
    assert [(one.severity, "incarnation 1" in one.message) for one in problems] == [
        ("warning", True)
    ] * damaged
    assert world.db.namespaces() == [NAME]


def test_H65_rebuild_without_any_manifest_shows_the_current_life_only(world):
    """H65: dropped rows came back, and an acknowledged load of the new life was lost."""
    load(world, "load-1", b"a", b"b")
    with world.db.writer(NAME) as writer:
        writer.put("c", b"new")
    world.fold()
    before = world.rows()
    for names in (USERS, world.names):
        for info in list(world.bucket.list(names.manifests)):
            world.bucket.delete(info.key)
    report = world.run(lambda: rebuild(world.db, NAME, apply=True))
    assert report.problems == ()
    assert world.rows() == before
    head = world.head()
    assert (head.incarnation, head.predecessors) == (2, (1,))
    swept(world)
    assert world.rows() == before
    assert list(world.bucket.list(USERS.segments)) == [], "the dropped life is swept"


def test_H65_rebuild_of_a_life_that_has_no_rows_yet(world):
    """H65: nothing but its record is left of it; dropped rows do not come back."""
    for names in (USERS, world.names):
        for info in list(world.bucket.list(names.manifests)):
            world.bucket.delete(info.key)
    world.run(lambda: rebuild(world.db, NAME, apply=True))
    assert world.rows() == {}
    with world.db.writer(NAME) as writer:
        assert writer.put("n", b"new").lsn > 5, "its numbers continue"


def test_H65_repair_of_the_new_life_leaves_the_old_one_alone(world):
    """H65: it stopped with an error, or brought dropped rows back."""
    with world.db.writer(NAME) as writer:
        writer.put("n", b"new")
    world.fold()
    key = world.names.manifest(world.head().generation)
    world.bucket.put(key, b"damage")
    report = world.run(lambda: repair(world.db, NAME, apply=True))
    assert report.problems
    assert world.rows() == {b"n": b"new"}


def test_H65_a_zombie_of_the_old_life_is_fenced_there():
    """H65: its writes, loads and publishes find their own prefix, which is over."""
    world = World()
    old = world.db.writer(NAME)
    old.put("a", b"old")
    create_again(world)
    with world.db.writer(NAME) as writer:
        writer.put("a", b"new")
        with pytest.raises(FencedError):
            old.put("zombie", b"?")
        writer.put("b", b"new")
    assert world.rows() == {b"a": b"new", b"b": b"new"}


def test_H65_receipts_cursors_and_positions_of_the_old_life(world):
    """H65: all numbers continue, so none of them means something else in the new life."""
    with world.db.writer(NAME) as writer:
        receipt = writer.put("n", b"new")
    cursor = world.db.cursor(NAME, "c", after_lsn=0)
    assert [change.key for change in cursor] == [b"n"]
    create_again(world)
    with world.db.writer(NAME) as writer:
        assert writer.put("m", b"third").lsn > receipt.lsn
        assert writer.resolve(receipt) == "unknown"
    with pytest.raises(NotFoundError):
        list(cursor)
    assert world.db.cursors(NAME) == {}
    with pytest.raises(NotFoundError, match="created again"):
        world.db.cursor(NAME, "c", after_lsn=receipt.lsn)


@pytest.mark.parametrize("point", ["/successors/", "/incarnations/"])
@pytest.mark.parametrize("then", ["create", "writer", "undrop", "reader"])
def test_H65_a_creator_that_dies_in_between(point, then):
    """H65: until its first manifest is there the name is dropped; any creator completes it."""
    world = World()
    with world.db.writer(NAME) as writer:
        writer.put("a", b"old")
    world.db.drop(NAME)

    class Dies(Wrapper):
        def create(self, key, body):
            if point in key:
                raise KeyboardInterrupt
            return self.inner.create(key, body)

    with pytest.raises(KeyboardInterrupt):
        reef.Database(Dies(world.bucket)).create(NAME)
    assert world.db.namespaces(dropped=True) == [NAME]
    if then == "undrop":
        with pytest.raises(ConflictError, match="created again"):
            world.db.undrop(NAME)
    elif then == "reader":
        with pytest.raises(NotFoundError):
            world.db.reader(NAME)
    elif then == "create":
        world.db.create(NAME)
    world.db.writer(NAME).close()
    assert world.rows() == {}
    head = world.head()
    assert head.incarnation == 2
    key = USERS.successor(2)
    record = decode_successor(world.bucket.get(key), key)
    assert (record.incarnation, record.wal_base) == (2, head.wal_base)
    assert head.recent[0].generation == record.generation


def test_H65_only_names_that_were_created_again_cost_more():
    """H65: opening and refreshing cost the same; a second incarnation costs its LIST and head."""
    meter = RequestMeter()
    db = reef.Database(reef.stores.open("memory://", meter=meter))

    def cost():
        meter.reset()
        db.reader(NAME).close()
        return dict(meter.requests())

    db.create(NAME)
    assert cost() == {"list": 2, "get": 2}
    for _ in range(5):
        db.drop(NAME)
        db.create(NAME)
        assert cost() == {"list": 4, "get": 4}, "however often it was created again"


def test_H65_a_name_that_is_dropped_while_it_is_created_again():
    """H65: two creators and a drop; exactly one incarnation follows each drop."""
    world = World()
    world.db.create(NAME)
    world.db.drop(NAME)

    class Meanwhile(Wrapper):
        done = False

        def create(self, key, body):
            if not self.done and "/successors/" in key:
                self.done = True
                world.db.create(NAME)
                world.db.drop(NAME)
            return self.inner.create(key, body)

    reef.Database(Meanwhile(world.bucket)).create(NAME)
    assert world.head().incarnation == 3
    assert newest_incarnation(world.bucket, NAME).incarnation == 3
    assert world.db.namespaces() == [NAME]


def test_H65_a_record_whose_write_has_no_response():
    """H65: creating says so, and the next one completes it."""
    world = World()
    world.db.create(NAME)
    world.db.drop(NAME)

    class Silent(Wrapper):
        def create(self, key, body):
            result = self.inner.create(key, body)
            if "/successors/" in key:
                return WriteResult(Outcome.UNKNOWN)
            return result

    with pytest.raises(reef.UnavailableError, match="may not have been written"):
        reef.Database(Silent(world.bucket)).create(NAME)
    world.db.create(NAME)
    assert world.head().incarnation == 2


def test_H65_an_older_release_does_not_publish_over_a_successor(world):
    """H65: the manifest that names one has a format number that it refuses."""
    generation = HeadFinder(world.bucket, USERS).find(dropped=True).manifest.generation
    assert b'"format":2' in world.bucket.get(USERS.manifest(generation))
    assert b'"format":1' in world.bucket.get(world.names.manifest(world.head().generation))


def test_H65_a_reader_of_the_old_life_moves_to_the_new_one_as_a_whole(world):
    """H65: no read mixes rows of both; a scan that was begun in the old life ends with an error."""
    with world.db.writer(NAME) as writer:
        for number in range(4):
            writer.put(f"n{number}", b"new")
    world.fold()
    reader = world.db.reader(NAME)
    assert len(dict(reader.scan())) == 4
    create_again(world)
    world.run(reader.refresh)
    assert dict(reader.scan()) == {}
    assert locate(world.bucket, NAME).names.incarnation == 3
    fold(world.db, NAME)
    assert dict(reader.scan()) == {}


def test_H65_unknown_outcomes_are_not_rejected_in_the_next_life(world):
    """H65: a write of the old life whose response was lost is unknown to the new one."""

    class Silent(Wrapper):
        armed = False

        def create(self, key, body):
            result = self.inner.create(key, body)
            return WriteResult(Outcome.UNKNOWN) if self.armed and "/wal/" in key else result

    store = Silent(world.bucket)
    writer = reef.Database(store).writer(NAME, commit_deadline_s=0.0)
    store.armed = True
    with pytest.raises(OutcomeUnknownError) as caught:
        world.run(lambda: writer.put("n", b"new"))
    create_again(world)
    with world.db.writer(NAME) as new:
        for number in range(9):
            new.put("m", b"%d" % number)
        assert new.resolve(caught.value) == "unknown"


# --- buckets of releases before incarnations ------------------------------------------------


@pytest.fixture
def one_chain():
    """A name that was dropped and created again in one chain, with a snapshot of the old life."""
    world = World()
    with world.db.writer(NAME) as writer:
        for key, value in OLD.items():
            writer.put(key, value)
    load(world, "load-1", b"secret3")
    world.fold()
    world.db.snapshot(NAME, name="old")
    world.advance(100)
    world.db.drop(NAME)
    world.advance(10)

    def created_again(head):
        cleared = clear_dropped(head)
        schema = msgspec.structs.replace(head.schema, id=head.schema.id + 1)
        return msgspec.structs.replace(
            cleared,
            state=NamespaceState.LIVE,
            dropped=None,
            schemas=(schema,),
            wal_base=cleared.wal_floor,
            compactor_epoch=head.compactor_epoch + 1,
        )

    Publisher(world.bucket, USERS).publish(created_again, dropped=True)
    world.advance(10)
    return world


def test_H65_one_chain_is_read_and_swept_life_by_life(one_chain):
    """H65: old buckets are read; sweeps keep the segments that snapshots of each life need."""
    world = one_chain
    first = load(world, "load-1", b"a")
    world.db.snapshot(NAME, name="new")
    with world.db.writer(NAME) as writer:
        writer.put("c", b"new")
    world.fold()
    world.run(lambda: compact(world.db, NAME, full=True))
    assert world.rows() == {b"a": b"new", b"c": b"new"}
    swept(world)
    for name, keys in (("new", {b"a"}), ("old", {*OLD, b"secret3"})):
        with world.run(lambda name=name: world.db.reader(NAME, snapshot=name)) as reader:
            assert {key for key, _ in reader.scan()} == keys
    reader = world.db.reader(NAME)
    base = world.head().wal_base
    for lsn in range(base + 3):
        try:
            keys = {key for key, _ in reader.as_of(lsn=lsn).scan()}
        except NotFoundError:
            continue
        assert lsn >= base - 1
        assert keys <= {b"a", b"c"}
    assert first >= base
    create_again(world)
    assert world.head().incarnation == 2
    assert world.rows() == {}


def test_H65_one_chain_shows_no_rows_of_the_old_life_at_any_time(one_chain):
    """H65: a time before the second life is not kept; it was mixed with the old life's rows."""
    world = one_chain
    times = []
    for number in range(3):
        load(world, f"n{number}", b"a")
        world.advance(30)
        times.append(datetime.fromtimestamp(world.bucket.now(), UTC))
        world.advance(30)
    world.fold()
    swept(world)
    reader = world.db.reader(NAME)
    for time in times:
        try:
            keys = {key for key, _ in reader.as_of(time=time).scan()}
        except NotFoundError:
            continue
        assert keys <= {b"a"}


def test_H65_a_compactor_of_the_old_life_has_no_role_in_the_new_one():
    """H65: epochs continue, so releasing the role or publishing by an old epoch fits no head."""
    world = World()
    with world.db.writer(NAME) as writer:
        writer.put("a", b"1")
    world.fold()
    old = Publisher(world.bucket, USERS).publish(edits.raise_compactor_epoch).compactor_epoch
    create_again(world)
    assert world.head().compactor_epoch > old
    current = Publisher(world.bucket, world.names).publish(edits.raise_compactor_epoch)
    assert edits.release_compactor(current, old) is None
    assert edits.release_compactor(current, current.compactor_epoch) is not None
