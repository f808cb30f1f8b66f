"""A load that creates its namespace and fails removes it, unless another process uses it."""

import pickle

import pyarrow as pa
import pytest

import reef
from reef import stores
from reef.engine.handles.database import Database
from reef.engine.namespaces import Namespaces
from reef.engine.rows.input import to_ops
from reef.errors import ErrorKind
from reef.formats.manifest import Dropped
from reef.formats.schema import Schema
from reef.formats.wal_object import OpKind
from reef.jobs import BulkJob, ingest, repair, verify
from reef.jobs.ingest.job import sorted_rows, staged_rows
from reef.manifest import lifecycle
from reef.manifest.edits import new_namespace
from reef.manifest.head import locate
from reef.paths import Namespace
from reef.stores import Wrapper
from reef.stores.memory import MemoryStore
from reef.telemetry import RequestMeter
from tests.support.damage import flip
from tests.support.sweep_world import DAY_S, GRACE_S, World
from tests.support.sweep_world import NAME as WORLD

NAME = "t"
COLUMNS = pa.schema([("id", pa.string()), ("n", pa.int64())])
SCHEMA = Schema.of(COLUMNS, "id")
ROWS = [{"id": "a", "n": 1}, {"id": "b", "n": 2}]


@pytest.fixture
def db(tmp_path):
    """Give a bucket without a namespace."""
    return reef.open(str(tmp_path))


def load(db, **settings):
    """Begin a load that makes its namespace."""
    return BulkJob(db, NAME, make=SCHEMA, **settings)


def stage(job):
    """Stage two rows."""
    ops = to_ops(ROWS, job.schema, kind=OpKind.PUT)
    return job.staging.stage([sorted_rows(staged_rows(ops))])


def rows(db, name=NAME):
    """Return the column n of all rows."""
    return {key: row["n"] for key, row in db.reader(name).scan()}


def head(db):
    """Return the head, dropped or not."""
    return locate(db.store, NAME, dropped=True).found.manifest


def test_a_load_that_fails_takes_its_namespace_back(db):
    """It is not listed any more, and the error is the original one."""
    job = load(db)
    stage(job)
    assert db.namespaces() == [NAME]
    assert head(db).made_for == job.id
    job.abort()
    assert db.namespaces() == []
    with pytest.raises(reef.NotFoundError) as caught:
        db.reader(NAME)
    assert caught.value.kind is ErrorKind.DROPPED


def test_its_staged_segments_are_swept():
    """A day later, with the namespace; the name can be created again."""
    world = World()
    job = world.run(lambda: BulkJob(world.db, WORLD, make=SCHEMA))
    stage(job)
    world.run(job.abort)
    assert len(world.keys("segments")) == 1
    world.advance(DAY_S + GRACE_S)
    for _ in range(2):
        world.sweep_twice()
    assert world.keys("segments") == []
    world.db.create(WORLD, COLUMNS)
    world.run(lambda: ingest(world.db, WORLD, ROWS))
    assert rows(world.db, WORLD) == {"a": 1, "b": 2}
    assert not verify(world.db, WORLD, deep=True).problems


def test_another_process_takes_it_back_too(db):
    """Spark begins in one process and aborts in another."""
    handle = pickle.loads(pickle.dumps(load(db).handle))
    BulkJob.resume(handle).abort()
    assert db.namespaces() == []


def test_a_load_that_commits_keeps_it(db):
    """Also when it is aborted afterwards, as Spark does after a commit that raised."""
    job = load(db)
    handle = job.handle
    job.commit(stage(job))
    BulkJob.resume(handle).abort()
    assert rows(db) == {"a": 1, "b": 2}


def test_a_namespace_that_was_there_stays(db):
    """Whatever it holds."""
    db.create(NAME, COLUMNS)
    load(db).abort()
    assert db.namespaces() == [NAME]


def test_the_next_load_creates_it_again(db):
    """And takes back its own life only."""
    load(db).abort()
    second = load(db)
    assert head(db).made_for == second.id
    second.abort()
    assert db.namespaces() == []
    third = load(db)
    third.commit(stage(third))
    assert rows(db) == {"a": 1, "b": 2}
    assert not verify(db, NAME, deep=True).problems


def open_a_writer(db):
    """Take the role and give it back."""
    db.writer(NAME, background=False).close()


def load_elsewhere(db):
    """Load concurrently."""
    ingest(db, NAME, ROWS)


def repair_it(db):
    """Ask for it, lose the manifest that says so, and repair that."""
    db.create(NAME, COLUMNS)
    flip(db.store, Namespace(NAME).manifest(head(db).generation), 100)
    repair(db, NAME, apply=True)


USES = {
    "a writer": open_a_writer,
    "a create": lambda db: db.create(NAME, COLUMNS),
    "another load": load_elsewhere,
    "a load that begins": lambda db: BulkJob(db, NAME),
    "a snapshot": lambda db: db.snapshot(NAME),
    "new columns": lambda db: db.alter(NAME, COLUMNS.append(pa.field("more", pa.int64()))),
    "the same columns": lambda db: db.alter(NAME, COLUMNS),
    "a cursor": lambda db: db.cursor(NAME, "c"),
    "a repair": repair_it,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_namespace_that_another_process_uses_stays(db, tmp_path, use):
    """Whatever they do with it that lasts."""
    job = load(db)
    use(reef.open(str(tmp_path)))
    job.abort()
    assert db.namespaces() == [NAME]
    assert head(db).made_for == ""


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_namespace_used_just_before_the_publish_stays(db, tmp_path, monkeypatch, use):
    """They come between the load's last check and its publish, which decides."""
    job = load(db)
    drop_if_unused = Namespaces.drop_if_unused

    def too_late(self, *args):
        use(reef.open(str(tmp_path)))
        drop_if_unused(self, *args)

    monkeypatch.setattr(Namespaces, "drop_if_unused", too_late)
    job.abort()
    assert db.namespaces() == [NAME]


def test_a_load_with_an_unknown_outcome_leaves_it(db, monkeypatch):
    """Taking back is a courtesy: what fails in it does not fail the abort."""

    def unavailable(*_):
        raise reef.UnavailableError("no response")

    job = load(db)
    monkeypatch.setattr(Namespaces, "drop_if_unused", unavailable)
    job.abort()
    assert db.namespaces() == [NAME]


class Interrupted(Wrapper):
    """A bucket whose user presses Ctrl-C when the first record has gone into a log."""

    pressed = False

    def create(self, key, body):
        """Send it, and hear no more of it."""
        result = super().create(key, body)
        if key.endswith(".wal") and not self.pressed:
            self.pressed = True
            raise KeyboardInterrupt
        return result


def test_a_load_that_is_interrupted_as_it_begins_takes_it_back():
    """Its begin is in the log already: it is aborted as any other job."""
    db = Database(Interrupted(MemoryStore()))
    with pytest.raises(KeyboardInterrupt):
        load(db)
    assert db.namespaces() == []


def test_a_concurrent_drop_is_recorded_in_the_registry(db, tmp_path, monkeypatch):
    """Nothing is left to remove; no change stays open that others would have to resolve."""
    job = load(db)
    drop_if_unused = Namespaces.drop_if_unused

    def too_late(self, *args):
        reef.open(str(tmp_path)).drop(NAME)
        drop_if_unused(self, *args)

    monkeypatch.setattr(Namespaces, "drop_if_unused", too_late)
    job.abort()
    entry = db._registry.catalog.get_latest(f"namespace/{NAME}")
    assert entry == {"state": "dropped", "changes": {}}


def test_an_existing_namespace_costs_no_more_requests():
    """Neither to create it, nor to use it, nor to abort a load into it."""
    meter = RequestMeter()
    db = Database(stores.open("memory://", meter=meter))
    db._prove_store()

    def cost(act):
        meter.reset()
        return act(), sum(meter.requests().values())

    assert cost(lambda: db.create(NAME, COLUMNS))[1] == 5, "one LIST more: for successors"
    assert cost(lambda: db.create(NAME, COLUMNS))[1] == 4
    job, begun = cost(lambda: BulkJob(db, NAME))
    assert begun == 14
    assert cost(job.abort)[1] == 11


def test_the_edit_refuses_a_namespace_that_is_not_its_own():
    """Of another load, of none, and one that was folded."""
    mine = new_namespace(SCHEMA, made_for="me")
    dropped = Dropped(at_ms=1, end_lsn=3, below=("begin", "abort"))
    assert lifecycle.drop_if_unused(mine, "me", dropped).dropped == dropped
    assert lifecycle.drop_if_unused(mine, "you", dropped) is None
    assert lifecycle.drop_if_unused(new_namespace(SCHEMA), "me", dropped) is None
    assert lifecycle.drop_if_unused(mine, "me", Dropped(at_ms=1, end_lsn=1, below=())) is None
