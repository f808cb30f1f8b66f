"""Drop and undrop: errors of handles, the time to undrop, and the sweep (protocols §8)."""

import pyarrow as pa
import pytest

import reef
from reef.errors import ConflictError, ErrorKind, FencedError, NotFoundError
from reef.formats.manifest import NamespaceState, decode_manifest, encode_manifest
from reef.formats.schema import DEFAULT_SCHEMA
from reef.jobs import compact, export, fold, rebuild, repair, sweep, verify
from reef.manifest.edits import new_namespace
from reef.stores import Wrapper
from tests.support.sweep_world import DAY_S, GRACE_S, NAME, USERS, World, garbage_keys

TABLE = pa.schema([("id", pa.string()), ("n", pa.int64())])


@pytest.fixture
def world():
    """One row in a segment, one in the log."""
    world = World()
    with world.db.writer(NAME) as writer:
        writer.put("a", b"1")
        fold(world.db, NAME)
        writer.put("b", b"2")
    return world


@pytest.mark.parametrize(
    "use",
    [
        lambda db: db.reader(NAME),
        lambda db: db.reader(NAME, pin=True),
        lambda db: db.info(NAME),
        lambda db: db.stats(NAME),
        lambda db: db.alter(NAME, TABLE),
        lambda db: db.snapshot(NAME),
        lambda db: db.cursor(NAME, "c"),
        lambda db: db.drop(NAME),
        lambda db: fold(db, NAME),
        lambda db: compact(db, NAME),
        lambda db: verify(db, NAME),
        lambda db: repair(db, NAME),
        lambda db: rebuild(db, NAME, apply=True, force=True),
        lambda db: export(db, NAME, reef.stores.open("memory://")),
    ],
)
def test_a_dropped_namespace_cannot_be_used(world, use):
    """Readers, jobs and writers get an error that names `undrop`; nothing is changed."""
    world.db.drop(NAME)
    before = world.keys("manifest")
    with pytest.raises(NotFoundError, match="was dropped") as caught:
        world.run(lambda: use(world.db))
    assert caught.value.kind is ErrorKind.DROPPED
    assert "undrop" in caught.value.hint
    assert world.keys("manifest") == before


def test_a_namespace_that_was_never_there_is_not_a_dropped_one(world):
    """There is nothing to drop and nothing to bring back."""
    for call in (world.db.drop, world.db.undrop):
        with pytest.raises(NotFoundError) as caught:
            call("other")
        assert caught.value.kind is ErrorKind.NOT_FOUND


def test_open_handles_find_that_it_is_gone_and_undrop_brings_all_of_it_back(world):
    """The writer is fenced, the reader gets an error; after undrop all rows are there, and writes
    work."""
    writer, reader = world.db.writer(NAME), world.db.reader(NAME)
    world.db.drop(NAME)
    with pytest.raises(FencedError):
        writer.put("c", b"3")
    with pytest.raises(NotFoundError):
        reader.refresh()
    assert world.db.namespaces() == []
    assert world.db.namespaces(dropped=True) == [NAME]
    info = world.db.undrop(NAME)
    assert world.db.info(NAME).generation == info.generation
    with pytest.raises(reef.NotFoundError, match="no dropped namespace users: it is live"):
        world.db.undrop(NAME)
    assert world.db.namespaces() == [NAME]
    reader.refresh()
    assert dict(reader.scan()) == {b"a": b"1", b"b": b"2"}
    with pytest.raises(FencedError):
        writer.put("c", b"3")
    with world.db.writer(NAME) as new:
        new.put("c", b"3")
    assert world.rows() == {b"a": b"1", b"b": b"2", b"c": b"3"}


def test_a_sweep_waits_for_its_time_and_then_takes_all_but_the_numbers(world):
    """A day for second thoughts; then segments and log go, the last manifest and fences stay."""
    world.db.drop(NAME)
    world.advance(DAY_S - 2 * GRACE_S)
    world.sweep_twice()
    assert len(world.keys("segments")) == 1
    world.db.undrop(NAME)
    world.db.drop(NAME)
    world.advance(DAY_S + 10)
    preview = world.run(lambda: sweep(world.db, NAME))
    assert {d.key.split("/")[0] for d in preview.condemned} == {"segments", "manifest", "wal"}
    assert len(world.keys("segments")) == 1
    world.sweep()
    with pytest.raises(NotFoundError, match="a sweep has deleted its rows") as caught:
        world.db.undrop(NAME)
    assert caught.value.kind is ErrorKind.COLLECTED
    world.advance(GRACE_S + 10)
    world.sweep()
    assert world.keys("segments") == []
    assert world.keys("wal") != []
    assert len(world.keys("manifest")) < len(garbage_keys(preview))
    assert "create()" in _dropped(world).hint


def _dropped(world):
    with pytest.raises(NotFoundError) as caught:
        world.db.info(NAME)
    return caught.value


def test_dropped_s_says_when(world):
    """The setting of the sweep; a share of all bytes is not asked about, since all of it goes."""
    world.db.drop(NAME)
    world.advance(2 * GRACE_S)
    assert "segments" not in _condemned(world.sweep(dropped_s=3.0 * GRACE_S))
    assert "segments" in _condemned(world.sweep(dropped_s=1.0 * GRACE_S, share_bytes_min=0))


def _condemned(report):
    return {doomed.key.split("/")[0] for doomed in report.condemned}


def test_pins_hold_their_objects(world):
    """A snapshot's segments stay after the drop; so do objects under an earlier lease."""
    world.db.snapshot(NAME, "kept")
    with world.db.reader(NAME, pin=True, lease_ttl_s=10 * DAY_S) as pinned:
        world.db.drop(NAME)
        world.advance(DAY_S + 10)
        world.sweep_twice()
        assert dict(pinned.scan()) == {b"a": b"1", b"b": b"2"}
    world.sweep_twice()
    assert len(world.keys("segments")) == 1
    world.db.create(NAME)
    with world.db.reader(NAME, snapshot="kept") as past:
        assert dict(past.scan()) == {b"a": b"1", b"b": b"2"}
    assert world.rows() == {}


def test_a_namespace_that_is_created_again_may_have_other_columns(world):
    """`create` and `writer` do; readers of the old one see the new one and none of its rows."""
    reader = world.db.reader(NAME)
    assert len(dict(reader.scan())) == 2
    world.db.drop(NAME)
    info = world.db.create(NAME, TABLE)
    assert info.schema.names == ["id", "n"]
    with pytest.raises(ConflictError):
        world.db.create(NAME)
    with world.db.writer(NAME) as writer:
        writer.upsert([{"id": "x", "n": 1}])
    fold(world.db, NAME)
    reader.refresh()
    assert list(reader.scan()) == [("x", {"id": "x", "n": 1})]
    assert not verify(world.db, NAME, deep=True).problems
    with pytest.raises(NotFoundError):
        world.db.undrop("never")
    with pytest.raises(reef.NotFoundError, match="it is live"):
        world.db.undrop(NAME)
    assert world.db.info(NAME).schema.names == ["id", "n"]


def test_a_reader_that_has_seen_the_drop_sees_the_new_one_after_it(world):
    """It has read the fences, so that the new floor is no news: its rows are of the past."""
    reader = world.db.reader(NAME)
    assert reader.get("a") == b"1"
    world.db.drop(NAME)
    with pytest.raises(NotFoundError):
        reader.refresh()
    world.db.create(NAME)
    reader.refresh()
    assert reader.get("a") is None
    assert dict(reader.scan()) == {}


class Meanwhile(Wrapper):
    """Does something once, when a drop has fenced and asks for the time."""

    def __init__(self, inner, does):
        super().__init__(inner)
        self._left = [does]

    def now(self):
        if self._left:
            self._left.pop()()
        return self.inner.now()


def test_a_writer_that_opens_meanwhile_loses_to_the_drop(world):
    """The drop takes the role again: in the end it is dropped, and the writer is fenced."""
    opened = []

    def open_writer():
        opened.append(reef.Database(world.bucket).writer(NAME))

    reef.Database(Meanwhile(world.bucket, open_writer)).drop(NAME)
    assert _dropped(world).kind is ErrorKind.DROPPED
    with pytest.raises(FencedError):
        opened[0].put("x", b"1")


def test_a_fold_that_passes_the_fences_meanwhile(world):
    """The floor must rise when the name is made again, so the drop fences once more."""
    reef.Database(Meanwhile(world.bucket, lambda: fold(world.db, NAME))).drop(NAME)
    head = reef.manifest.head.HeadFinder(world.bucket, USERS).find(dropped=True).manifest
    assert head.wal_floor < head.dropped.end_lsn
    world.db.undrop(NAME)
    assert world.rows() == {b"a": b"1", b"b": b"2"}


def test_a_live_manifest_has_the_same_bytes_as_before():
    """`dropped` is left out; a dropped one is read back as it was written."""
    first = new_namespace(DEFAULT_SCHEMA)
    assert b"dropped" not in encode_manifest(first)
    assert decode_manifest(encode_manifest(first), "m").state is NamespaceState.LIVE


def test_background_work_ends_with_the_namespace(tmp_path):
    """A dropped namespace is no failure of its worker."""
    db = reef.open(str(tmp_path))
    with db.writer(NAME) as writer:
        writer.put("a", b"1")
        db.drop(NAME)
        writer.background.chores[0].is_due = lambda _: True
        writer.background.step()
        assert writer.background.is_stopped
    assert db.metrics.to_dict()["background.failures"]["value"] == 0
