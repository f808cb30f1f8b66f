"""A load that makes its namespace and fails leaves nothing; one that somebody else uses stays."""

import pickle

import pyarrow as pa
import pytest

import reef
from reef import stores
from reef.engine.database import Database
from reef.engine.namespaces import Namespaces
from reef.engine.rows import to_ops
from reef.errors import Kind
from reef.formats.batch import OpKind
from reef.formats.manifest import Dropped
from reef.formats.schema import Schema
from reef.jobs import BulkJob, ingest, repair, verify
from reef.jobs.ingest import sorted_rows, staged_rows
from reef.manifest import dropping
from reef.manifest.edits import new_namespace
from reef.manifest.head import locate
from reef.paths import Namespace
from reef.stores import Wrapper
from reef.stores.memory import MemoryStore
from reef.telemetry import RequestMeter
from tests.collecting import DAY_S, GRACE_S, World
from tests.collecting import NAME as WORLD
from tests.damage import flip

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
    """Nobody sees it any more, and the error says what it is."""
    job = load(db)
    stage(job)
    assert db.namespaces() == [NAME]
    assert head(db).made_for == job.id
    job.abort()
    assert db.namespaces() == []
    with pytest.raises(reef.NotFoundError) as caught:
        db.reader(NAME)
    assert caught.value.kind is Kind.DROPPED


def test_what_it_staged_is_swept():
    """A day later, with the namespace; the name can be made anew."""
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


def test_the_next_load_makes_it_anew(db):
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
    """Load beside it."""
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
    "an undrop": lambda db: db.undrop(NAME),
    "a cursor": lambda db: db.cursor(NAME, "c"),
    "a repair": repair_it,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_what_somebody_else_uses_stays(db, tmp_path, use):
    """Whatever they do with it that lasts."""
    job = load(db)
    use(reef.open(str(tmp_path)))
    job.abort()
    assert db.namespaces() == [NAME]
    assert head(db).made_for == ""


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_so_it_does_at_the_last_moment(db, tmp_path, monkeypatch, use):
    """They come between the load's last look and its publish, which decides."""
    job = load(db)
    take_back = Namespaces.take_back

    def too_late(self, *args):
        use(reef.open(str(tmp_path)))
        take_back(self, *args)

    monkeypatch.setattr(Namespaces, "take_back", too_late)
    job.abort()
    assert db.namespaces() == [NAME]


def test_a_load_that_cannot_tell_leaves_it(db, monkeypatch):
    """Taking back is a courtesy: what fails in it does not fail the abort."""

    def unavailable(*_):
        raise reef.UnavailableError("no answer")

    job = load(db)
    monkeypatch.setattr(Namespaces, "take_back", unavailable)
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
    """Its begin stands in the log already: it is aborted as any other job."""
    db = Database(Interrupted(MemoryStore()))
    with pytest.raises(KeyboardInterrupt):
        load(db)
    assert db.namespaces() == []


def test_what_is_dropped_meanwhile_is_told_to_the_registry(db, tmp_path, monkeypatch):
    """Nothing is left to take back; no change stays open that others would have to look up."""
    job = load(db)
    take_back = Namespaces.take_back

    def too_late(self, *args):
        reef.open(str(tmp_path)).drop(NAME)
        take_back(self, *args)

    monkeypatch.setattr(Namespaces, "take_back", too_late)
    job.abort()
    entry = db._registry.catalog.get_latest(f"namespace/{NAME}")
    assert entry == {"state": "dropped", "changes": {}}


def test_what_is_there_costs_nothing_more():
    """Neither to make it, nor to use it, nor to give up a load into it."""
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


def test_the_edit_refuses_what_is_not_its_own():
    """Of another load, of nobody, and what a fold has passed."""
    mine = new_namespace(SCHEMA, made_for="me")
    dropped = Dropped(at_ms=1, end_lsn=3, below=("begin", "abort"))
    assert dropping.take_back(mine, "me", dropped).dropped == dropped
    assert dropping.take_back(mine, "you", dropped) is None
    assert dropping.take_back(new_namespace(SCHEMA), "me", dropped) is None
    assert dropping.take_back(mine, "me", Dropped(at_ms=1, end_lsn=1, below=())) is None
