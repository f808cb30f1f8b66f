"""Background work: bounded steps behind a writer, in its own thread by default."""

import gc
import threading
import time

import pyarrow as pa
import pytest

import reef
from reef.config import BackgroundSettings, CompactSettings
from reef.engine.handles.database import Database
from reef.formats.manifest import unindexed_rows
from reef.formats.wal_object import OpKind
from reef.jobs import fold
from reef.jobs.background import Background
from reef.manifest.edits import raise_compactor_epoch
from reef.manifest.head import Publisher
from reef.paths import Namespace
from reef.stores.memory import MemoryStore
from reef.stores.wrappers import policies
from reef.telemetry import Events
from reef.testing import Fault, Faults, Rule
from tests.support.compaction import ingest_rows

NAME = "users"
EAGER = BackgroundSettings(fold_bytes=1, fold_interval_s=0.0, poll_interval_s=0.01)


def wait_until(happens, timeout_s=60):
    """Wait for something that another thread does."""
    deadline = time.monotonic() + timeout_s
    while not happens():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def steps(writer, db, **settings):
    """Give the steps behind a writer, without a thread."""
    wanted = {"fold_bytes": 1, "fold_interval_s": 0.0} | settings
    return Background(db, writer, BackgroundSettings().changed(wanted))


def compact_from(worker, segments):
    """Let so many segments be worth a compaction, however small they are."""
    worker._compactor.settings = CompactSettings(
        tier_bytes=1, tier_segments_min=segments, segment_bytes_min=0
    )


@pytest.fixture
def db():
    """Give a database that does nothing by itself."""
    return Database(MemoryStore())


# --- due work ---------------------------------------------------------------------------


def test_a_step_folds_due_objects_and_empties_the_memtable(db):
    """By bytes, by number, or by age; after it nothing is left to fold."""
    writer = db.writer(NAME)
    worker = steps(writer, db)
    writer.put("k", b"v")
    assert writer.unfolded.bytes > 0
    step = worker.step()
    assert (step.job, step.report.rows, step.report.published) == ("fold", 1, True)
    assert writer.unfolded.bytes == 0
    assert writer.get("k") == b"v"
    assert worker.step() is None


@pytest.mark.parametrize(
    ("limits", "due"),
    [
        ({"fold_bytes": 1 << 30, "fold_interval_s": 1e9, "fold_objects": 3}, True),
        ({"fold_bytes": 1 << 30, "fold_interval_s": 1e9, "fold_objects": 99}, False),
        ({"fold_bytes": 10, "fold_interval_s": 1e9, "fold_objects": 99}, True),
        ({"fold_bytes": 1 << 30, "fold_interval_s": 0.0, "fold_objects": 99}, True),
    ],
)
def test_each_limit_makes_a_fold_due(db, limits, due):
    """Bytes, objects and age: whichever is first."""
    writer = db.writer(NAME)
    for number in range(3):
        writer.put(f"k{number}", b"v")
    assert (steps(writer, db, **limits).step() is not None) is due


def test_an_idle_writer_costs_no_request(tmp_path):
    """Whether something is due is decided from memory."""
    db = reef.open(str(tmp_path))
    with db.writer(NAME, background=BackgroundSettings(poll_interval_s=0.001)) as writer:
        writer.put("k", b"v")
        meter = _meter(db.store)
        before = meter.requests()
        time.sleep(0.3)
        assert meter.requests() == before


def _meter(store):
    while not hasattr(store, "meter"):
        store = store.inner
    return store.meter


def test_steps_compact_and_sweep_too(db):
    """Many folds make many segments; steps merge them, and later sweep the merged inputs."""
    writer = db.writer(NAME)
    worker = steps(writer, db, sweep_interval_s=0.0)
    compact_from(worker, 4)
    done = []
    for number in range(8):
        writer.put(f"k{number}", b"v" * 100)
        while (step := worker.step()) is not None and len(done) < 100:
            done.append(step.job)
            if step.job == "sweep":
                break
    assert {"fold", "compact", "sweep"} <= set(done)
    assert len(writer._manifest.segments) < 8
    assert [key for key, _ in writer.scan()] == [b"k%d" % n for n in range(8)]


@pytest.mark.parametrize("strategy", ["tiered", "leveled"])
def test_rows_without_a_search_index_are_merged_before_writers_wait_for_it(db, strategy):
    """However few bytes the segments have: no strategy would merge them, and each write fail."""
    schema = pa.schema([("id", pa.string()), ("n", pa.int64())])
    db.create(NAME, schema, indexes=[reef.filter_index("n", rows_min=20)])
    with db.writer(NAME, unindexed_rows_max=30, write_deadline_s=0.2) as writer:
        worker = steps(writer, db, strategy=strategy)
        for part in range(7):
            writer.upsert([{"id": f"{n}-{part}", "n": n} for n in range(8)])
            while worker.step() is not None:
                assert unindexed_rows(writer._manifest) <= 24
        assert writer.count("n = 3") == 7


def test_patches_without_a_search_index_are_merged_with_their_rows(db):
    """Loads of patches are stored as they are, and no strategy would merge few bytes of them."""
    schema = pa.schema([("id", pa.string()), ("n", pa.int64())])
    db.create(NAME, schema, indexes=[reef.filter_index("n", rows_min=10)])
    with db.writer(NAME, unindexed_rows_max=10, write_deadline_s=0.2) as writer:
        worker = steps(writer, db)
        writer.upsert([{"id": f"{n:02}", "n": n} for n in range(40)])
        worker.step()
        ingest_rows(db, NAME, [(b"%02d" % n, OpKind.PATCH, {1: -1}) for n in range(20)])
        fold(db, NAME)
        writer.refresh()
        assert unindexed_rows(writer._manifest) == 20
        while worker.step() is not None:
            pass
        assert not any(entry.patches for entry in writer._manifest.segments)
        writer.put("more", {"n": -1})
        assert writer.count("n = -1") == 21


def test_a_compactor_elsewhere_is_given_way_to(db):
    """The compactor epoch decides: a job whose role was acquired by another stops quietly."""
    writer = db.writer(NAME)
    worker = steps(writer, db, sweep=False)
    compact_from(worker, 2)
    for number in range(3):
        writer.put(f"k{number}", b"v")
        fold(db, NAME)
    writer.refresh()
    Publisher(db.store, Namespace(NAME)).publish(raise_compactor_epoch)
    writer.refresh()
    assert worker.step() is None, "another one has the role and seems to work"
    assert len(writer._manifest.segments) == 3


# --- the thread -------------------------------------------------------------------------


def test_a_writer_folds_by_itself(tmp_path):
    """The default of reef.open; a reader in another place needs no log any more."""
    db = reef.open(str(tmp_path))
    with db.writer(NAME, background=EAGER) as writer:
        writer.put("k", b"v")
        wait_until(lambda: writer.unfolded.bytes == 0)
    assert db.info(NAME).segments == 1
    assert db.reader(NAME).get("k") == b"v"


def test_it_can_be_turned_off(tmp_path):
    """`background=False`: no thread, nothing folded."""
    db = reef.open(str(tmp_path))
    before = set(threading.enumerate())
    with db.writer(NAME, background=False) as writer:
        assert writer.background is None
        new = set(threading.enumerate()) - before
        assert not [thread for thread in new if thread.name == "background"]


def test_backpressure_ends_when_the_background_folds(tmp_path):
    """A writer that waits for room is let in by its own fold."""
    db = reef.open(str(tmp_path))
    settings = BackgroundSettings(fold_bytes=1 << 16, poll_interval_s=0.01)
    with db.writer(NAME, background=settings, unfolded_bytes_max=1 << 17) as writer:
        for number in range(40):
            writer.put(f"k{number:02}", b"x" * (1 << 14))
        assert len(list(writer.scan())) == 40


def test_pause_stops_the_work_and_resume_continues_it(tmp_path):
    """Reads and writes continue meanwhile."""
    db = reef.open(str(tmp_path))
    with db.writer(NAME, background=EAGER) as writer:
        writer.background.pause()
        writer.put("k", b"v")
        time.sleep(0.2)
        assert writer.unfolded.bytes > 0
        assert writer.get("k") == b"v"
        writer.background.resume()
        wait_until(lambda: writer.unfolded.bytes == 0)


def test_close_ends_it_even_in_the_middle_of_something(tmp_path):
    """A paused fold does not hold up the end; its orphans are the sweep's."""
    db = reef.open(str(tmp_path))
    writer = db.writer(NAME, background=EAGER)
    task = writer.background._tasks[0]
    writer.background.pause()
    writer.put("k", b"v")
    time.sleep(0.1)
    writer.close()
    assert task.join(60)
    assert db.reader(NAME).get("k") == b"v"


def test_a_forgotten_writer_is_not_kept_alive(tmp_path):
    """The thread knows its writer only weakly, and ends when it is gone."""
    db = reef.open(str(tmp_path))
    writer = db.writer(NAME, background=EAGER)
    task = writer.background._tasks[0]
    del writer
    gc.collect()
    assert task.join(60)


def test_a_fenced_writer_stops_working(tmp_path):
    """The new one works; the old one's thread ends without noise."""
    db = reef.open(str(tmp_path))
    heard = []
    db.events = Events()
    db.events.subscribe(lambda event: heard.append(event.name))
    old = db.writer(NAME, background=EAGER)
    task = old.background._tasks[0]
    with db.writer(NAME, background=False) as new:
        new.put("k", b"new")
        with pytest.raises(reef.FencedError):
            old.put("k", b"old")
        assert task.join(60)
    assert "background_failed" not in heard


def test_a_failure_is_reported_and_retried():
    """A store that is away for a while does not end the work."""
    faults = Faults(MemoryStore(), [])
    db = Database(faults, lambda *given: Background(*given).start())
    heard = []
    db.events.subscribe(lambda event: heard.append(event.name))
    with db.writer(NAME, background=False) as writer:
        writer.put("k", b"v")
    writer = db.writer(NAME, background=False)
    writer.put("l", b"w")
    faults.rules = [Rule(Fault.FAIL_BEFORE, "upload")]
    worker = Background(db, writer, EAGER).start()
    wait_until(lambda: "background_failed" in heard)
    assert writer.unfolded.bytes > 0
    faults.rules = []
    wait_until(lambda: writer.unfolded.bytes == 0)
    worker.stop()
    assert db.metrics.counter("background.failures").value >= 1
    writer.close()


def test_bad_settings_are_refused_before_the_role_is_taken(tmp_path):
    """And nothing is changed."""
    db = reef.open(str(tmp_path))
    with pytest.raises(reef.InvalidInputError, match="poll_interval_s"):
        db.writer(NAME, background=BackgroundSettings(poll_interval_s=0))
    with pytest.raises(reef.InvalidInputError, match="fold_bytes"):
        db.writer(NAME, background=BackgroundSettings(fold_bytes="1"))
    with pytest.raises(reef.NotFoundError):
        db.info(NAME)


def test_a_sweep_keeps_its_rate(tmp_path):
    """A sweep of many requests is paced; commits and folds do not wait for it (H75)."""
    db = reef.open(str(tmp_path))
    with db.writer(NAME, background=False) as writer:
        for number in range(30):
            writer.put(f"k{number}", b"v")
        fold(db, NAME)
        writer.refresh()
        limits = {"requests_per_s": 4, "sweep_interval_s": 0.0}
        worker = Background(db, writer, BackgroundSettings(**limits))
        watch = time.monotonic()
        assert worker.step().job == "sweep"
        assert time.monotonic() - watch > 0.5


def test_a_fold_is_not_paced(tmp_path):
    """H75: a rate far below that of the commits does not delay the fold."""
    db = reef.open(str(tmp_path))
    with db.writer(NAME, background=False) as writer:
        for number in range(30):
            writer.put(f"k{number}", b"v" * 1000)
        settings = BackgroundSettings(fold_bytes=1, requests_per_s=0.001, bytes_per_s=1)
        worker = Background(db, writer, settings)

        def waits(*given, **named):
            pytest.fail("the fold waits for its share of the requests")

        worker._pace.take = waits  # at this rate it would wait for hours
        assert worker.step().report.rows == 30


def test_a_plan_that_folds_wait_for_is_short(tmp_path, monkeypatch):
    """H75: it begins with a fold, so that it reads few headers, and none of them is paced. At
    1,000 commits a second, headers at 100 requests a second let 18,000 objects pile up.
    """
    db = reef.open(str(tmp_path))
    with db.writer(NAME, background=False) as writer:
        for number in range(30):
            writer.put(f"k{number}", b"v")
        worker = Background(db, writer, BackgroundSettings(sweep_interval_s=0.0))
        paced, take = [], policies._RateLimit.reserve
        monkeypatch.setattr(
            policies._RateLimit, "reserve", lambda *given: paced.append(given) or take(*given)
        )
        with worker._folds_wait():
            assert writer.unfolded.objects == 0
            assert worker._db.reader(NAME).get("k7") == b"v"
            assert not worker._fold_lock.acquire(blocking=False)
        assert not [rate for rate, *_ in paced if rate._per_s], "folds have no rate"
        assert worker.step(["sweep"]).job == "sweep"
        assert [rate for rate, *_ in paced if rate._per_s], "the first plan is paced"


# --- regressions found by review --------------------------------------------------------


def test_work_that_is_paused_in_the_middle_blocks_no_caller(tmp_path):
    """Its requests wait on threads of their own: others gather on as before."""
    db = reef.open(str(tmp_path))
    with db.writer(NAME, background=False) as writer:
        for number in range(60):
            writer.put(f"k{number:03}", b"v")
        worker = Background(db, writer, EAGER)
        taken, real = [], worker._fold_pace.take

        def take(*given, **named):
            taken.append(given)
            if len(taken) == 3:
                worker.pause()
            return real(*given, **named)

        worker._fold_pace.take = take
        worker.start()
        wait_until(lambda: worker._pace.is_paused)
        opened = threading.Event()
        reading = lambda: (Database(db.store).reader(NAME).get("k001"), opened.set())  # noqa: E731
        threading.Thread(target=reading, daemon=True).start()
        assert opened.wait(60)
        worker.stop()


def test_a_fold_that_is_always_due_starves_nothing(db):
    """The kinds of work take turns."""
    writer = db.writer(NAME)
    worker = steps(writer, db, sweep_interval_s=0.0)
    compact_from(worker, 4)
    done = []
    for number in range(20):
        writer.put(f"k{number}", b"v")
        done.append(worker.step().job)
    assert set(done) == {"fold", "compact", "sweep"}


@pytest.mark.parametrize("error", [reef.CorruptionError("damaged"), OSError("disk")], ids=repr)
def test_work_that_fails_does_not_stop_the_others(db, monkeypatch, error):
    """Whatever the error; it is reported, and each kind has its own backoff."""
    heard = []
    db.events.subscribe(lambda event: heard.append(event.fields.get("job")))
    writer = db.writer(NAME)
    writer.put("k", b"v")

    def fails(*_, **__):
        raise error

    monkeypatch.setattr("reef.jobs.background.fold_memory", fails)
    worker = steps(writer, db, sweep_interval_s=0.0)
    assert worker.step().job == "sweep"
    assert heard.count("fold") == 1
    assert [chore.job for chore in worker.chores if chore.error is error] == ["fold"]
    assert writer.get("k") == b"v"


def test_a_listener_that_fails_does_not_end_the_work(db, monkeypatch):
    """A callback that raises does not end the background work."""
    writer = db.writer(NAME)
    writer.put("k", b"v")

    def fails(*_, **__):
        raise reef.UnavailableError("away")

    monkeypatch.setattr("reef.jobs.background.fold_memory", fails)
    db.events.subscribe(lambda event: 1 / 0)
    assert steps(writer, db, sweep=False).step() is None


def test_an_idle_writer_sweeps_to_the_end():
    """Condemned objects are deleted after the grace period, though nothing is written any more."""
    from tests.support.sweep_world import World

    world = World()
    world.db.create(NAME)

    def live():
        writer = world.db.writer(NAME)
        worker = steps(writer, world.db, retain_generations_s=3600.0, compact=False)
        for number in range(3):
            writer.put(f"k{number}", b"v")
            worker.step()
        swept = 0
        for _ in range(100):
            world.db.store.runtime.sleep(600)
            step = worker.step()
            swept += step is not None
        return writer, swept

    writer, swept = world.run(live)
    assert not writer._manifest.condemned
    assert writer._manifest.oldest_retained > 1
    assert swept < 80, "and less often when nothing is due"


def test_a_writer_that_is_forgotten_while_its_work_is_paused_is_let_go(tmp_path):
    """No step keeps it alive; its end ends the work."""
    db = reef.open(str(tmp_path))
    writer = db.writer(NAME, background=EAGER)
    worker = writer.background
    worker.pause()
    writer.put("k", b"v")
    time.sleep(0.2)
    task = worker._tasks[0]
    del writer, worker
    gc.collect()
    assert task.join(60)


def test_close_from_a_listener_of_its_events_closes(tmp_path):
    """It runs on the work's own thread, which must not wait for itself."""
    db = reef.open(str(tmp_path))
    writer = db.writer(NAME, background=EAGER)
    db.events.subscribe(lambda event: writer.close() if event.name == "folded" else None)
    writer.put("k", b"v")
    wait_until(lambda: not writer._committer.is_open)
    assert db.reader(NAME).get("k") == b"v"


@pytest.mark.parametrize("wrong", [{"fold_bytes": 1}, "off", 7, None])
def test_invalid_settings_are_refused(tmp_path, wrong):
    """And nothing is changed."""
    db = reef.open(str(tmp_path))
    with pytest.raises(reef.InvalidInputError, match="background="):
        db.writer(NAME, background=wrong)
    assert db.namespaces() == []


def test_the_role_of_compactor_is_released_at_the_end(db):
    """The next one does not have to wait to be sure."""
    writer = db.writer(NAME)
    worker = steps(writer, db, sweep=False)
    compact_from(worker, 2)
    for number in range(3):
        writer.put(f"k{number}", b"v")
        fold(db, NAME)
    writer.refresh()
    assert worker.step().job == "compact"
    assert writer._manifest.compactor_job
    worker.stop()
    writer.refresh()
    assert not writer._manifest.compactor_job
