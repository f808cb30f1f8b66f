"""`db.jobs`: bulk loads and compactors as the bucket shows them, and jobs on the board."""

import threading

import pytest

import reef
from reef.engine import registry
from reef.engine.handles.database import Database
from reef.engine.registry import Registry
from reef.formats.wal_object import Job, WalKind
from reef.jobs import export, fold
from reef.jobs.ingest.job import BulkJob
from reef.manifest.edits import raise_compactor_epoch, release_compactor
from reef.manifest.head import Publisher
from reef.manifest.roots import job_owner, take_lease
from reef.telemetry import RequestMeter
from tests.support.bulk_jobs import append, stage
from tests.support.sweep_world import DAY_S, NAME, USERS, World


@pytest.fixture
def world():
    """A namespace with one row."""
    world = World()
    with world.db.writer(NAME) as writer:
        writer.put("a", b"1")
    return world


def test_a_bulk_load_is_seen_from_its_begin_to_its_end(tmp_path):
    """It shows its machine, its heartbeat and its staged segments, folded or not."""
    db = reef.open(str(tmp_path))
    db.create(NAME)
    assert db.jobs() == []
    with BulkJob(db, NAME) as job:
        staged = stage(db.store, NAME, {b"k": b"v"}, job.id)
        for _ in range(2):
            (seen,) = reef.open(str(tmp_path)).jobs()
            assert (seen.namespace, seen.kind, seen.id) == (NAME, "bulk load", job.id)
            assert seen.where.endswith(f":{db.store.runtime.process_id()}")
            assert not seen.is_stale
            assert 0 <= seen.since_s < 60
            assert 0 <= seen.heartbeat_s < 60
            assert seen.progress == {"segments": 1, "bytes": staged.size}
            assert [one.id for one in db.jobs(NAME)] == [job.id]
            with db.writer(NAME, background=False) as writer:
                writer.put("x", b"1")
            fold(db, NAME)
        job.commit([staged])
    assert db.jobs() == []


def test_a_bulk_load_whose_driver_died_is_stale(world):
    """Its lease has expired, or was reaped."""
    append(world.bucket, NAME, WalKind.BEGIN, Job("dead", key="dead"))
    lease = take_lease(world.bucket, USERS, world.head(), owner=job_owner("dead"), ttl_s=30.0)
    assert not world.db.jobs()[0].is_stale
    world.advance(DAY_S)
    (seen,) = world.db.jobs()
    assert seen.is_stale
    assert seen.heartbeat_s >= DAY_S
    lease.release()
    (seen,) = world.db.jobs()
    assert seen.is_stale
    assert seen.heartbeat_s is None
    assert seen.since_s >= DAY_S


def test_the_compactor_of_a_manifest(world):
    """It is there from the epoch that it raised until it gives the role up."""
    publisher = Publisher(world.bucket, USERS)
    head = publisher.publish(raise_compactor_epoch)
    world.bucket.put(USERS.segment(f"{head.compactor_job}-x"), b"12345")
    world.advance(10)
    (seen,) = world.db.jobs()
    assert (seen.kind, seen.id, seen.is_stale) == ("compact", "compact-1", False)
    assert seen.progress == {"segments": 1, "bytes": 5}
    assert 9 < seen.heartbeat_s < 60
    publisher.publish(lambda h: release_compactor(h, head.compactor_epoch))
    assert world.db.jobs() == []


class Slow:
    """Waits until the test has seen the job."""

    def __init__(self, runtime, observed, started):
        self._runtime = runtime
        self._observed, self._started = observed, started

    def map(self, call, tasks):
        self._started.set()
        assert self._observed.wait(240)
        return self._runtime.map(call, tasks)


@pytest.mark.parametrize("kind", ["fold", "export"])
def test_long_jobs_are_on_the_board_while_they_run(tmp_path, monkeypatch, kind):
    """With machine, process and heartbeat; nothing is left of them, and short ones never show."""
    monkeypatch.setattr(registry, "START_S", 0.01)
    monkeypatch.setattr(registry, "BEAT_S", 0.01)
    db = reef.open(str(tmp_path / "data"))
    with db.writer(NAME, background=False) as writer:
        writer.put("a", b"1")
    observed, started = threading.Event(), threading.Event()
    executor = Slow(db.store.runtime, observed, started)
    work = {
        "fold": lambda: fold(db, NAME, executor=executor),
        "export": lambda: export(db, NAME, tmp_path / "out", executor=executor),
    }
    thread = threading.Thread(target=work[kind])
    thread.start()
    try:
        assert started.wait(60)
        seen, deadline = [], db.store.runtime.deadline(60)
        while not deadline.passed():
            seen = [job for job in reef.open(str(tmp_path / "data")).jobs() if job.kind == kind]
            if seen:
                break
    finally:
        observed.set()
        thread.join(60)
    (job,) = seen
    assert job.where.endswith(f":{db.store.runtime.process_id()}")
    assert not job.is_stale
    assert job.since_s >= job.heartbeat_s >= 0
    assert db.jobs() == []


def test_a_job_that_died_is_stale_and_then_forgotten(world):
    """Two minutes without a heartbeat; a day later the next job takes it down."""
    db = Database(world.bucket, registry=Registry(world.bucket))
    entry = {"kind": "export", "namespace": NAME, "where": "m:1", "progress": {"files": 2}}
    db._board.report("one", entry)
    world.advance(60)
    (job,) = db.jobs()
    assert (job.id, job.is_stale, job.progress) == ("one", False, {"files": 2})
    world.advance(100)
    assert db.jobs()[0].is_stale
    world.advance(DAY_S)
    db._board.report("two", entry)
    assert [job.id for job in db.jobs()] == ["two"]
    db._board.remove("two")
    assert db.jobs() == []


def test_jobs_of_a_dropped_namespace_are_not_asked_for(world):
    """It is not among the namespaces."""
    Publisher(world.bucket, USERS).publish(raise_compactor_epoch)
    world.db.drop(NAME)
    assert world.db.jobs() == []
    assert world.db.jobs(NAME) == []


def test_damage_elsewhere_hides_no_job(world):
    """Of a namespace whose manifests are damaged, or of the board: `verify` is for that."""
    db = Database(world.bucket, registry=Registry(world.bucket))
    db.create("damaged")
    Publisher(world.bucket, USERS).publish(raise_compactor_epoch)
    broken = [*world.bucket.list("namespaces/damaged/manifest/"), *world.bucket.list("catalog/")]
    for info in broken:
        world.bucket.put(info.key, world.bucket.get(info.key)[:-3])
    assert [job.kind for job in db.jobs()] == ["compact"]


def test_a_bulk_load_in_a_bucket_of_many_namespaces_is_found(monkeypatch):
    """It has reported itself; its own log has the details, and shows it once."""
    monkeypatch.setattr(registry, "NAMESPACES_READ_MAX", 2)
    monkeypatch.setattr(registry, "START_S", 0.0)
    db = reef.open("memory://")
    for number in range(5):
        db.create(f"n{number}")
    meter = db.store.runtime.stopwatch()
    with BulkJob(db, "n3") as job:
        while not (found := db.jobs()):
            assert meter.elapsed_s() < 20
        assert [(one.namespace, one.kind, one.id) for one in found] == [("n3", "bulk load", job.id)]
        assert found[0].progress == {"segments": 0, "bytes": 0}, "as the bucket shows it"
    assert db.jobs() == db.jobs(deep=True) == []


def test_jobs_of_many_namespaces_cost_a_fixed_number_of_requests():
    """H75: 101 and 301 namespaces cost the same; it was four requests for each of them."""
    meter = RequestMeter()
    db = reef.open("memory://", meter=meter)
    requests, made = [], 0
    for count in (101, 301):
        while made < count:
            db.create(f"n{made}")
            made += 1
        meter.reset()
        assert db.jobs() == []
        requests.append(sum(meter.requests().values()))
    assert max(requests) < 60, requests
    meter.reset()
    assert db.jobs(deep=True) == []
    assert sum(meter.requests().values()) > 2 * 301


def test_the_requests_of_jobs_per_namespace():
    """×1, ×10, ×100 namespaces: a listing, a manifest and the log of each; it was a probe more."""
    meter = RequestMeter()
    db = reef.open("memory://", meter=meter)
    requests, made = [], 0
    for count in (1, 10, 100):
        while made < count:
            db.create(f"n{made}")
            made += 1
        meter.reset()
        assert db.jobs() == []
        requests.append(sum(meter.requests().values()))
    assert requests[1] - requests[0] <= 3 * 9
    assert requests[2] - requests[1] <= 3 * 90
