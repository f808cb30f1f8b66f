"""Background work: bounded steps behind a writer, in its own thread by default."""

import gc
import threading
import time

import pyarrow as pa
import pytest

import reef
from reef.config import BackgroundSettings, CompactSettings
from reef.engine.database import Database
from reef.jobs import fold
from reef.jobs.background import Background
from reef.manifest.edits import raise_compactor_epoch
from reef.manifest.publish import Publisher
from reef.paths import Namespace
from reef.stores import Fault, Faults, Rule
from reef.stores.memory import MemoryStore
from reef.telemetry import Events

NAME = "users"
EAGER = BackgroundSettings(fold_bytes=1, fold_interval_s=0.0, look_s=0.01)


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


# --- what is due ------------------------------------------------------------------------


def test_a_step_folds_what_is_due_and_empties_the_writers_memory(db):
    """By bytes, by number, or by age; after it nothing is left to fold."""
    writer = db.writer(NAME)
    worker = steps(writer, db)
    writer.put("k", b"v")
    assert writer.unfolded.bytes > 0
    step = worker.step()
    assert (step.what, step.report.rows, step.report.published) == ("fold", 1, True)
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
    with db.writer(NAME, background=BackgroundSettings(look_s=0.001)) as writer:
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
    """Many folds make many segments; steps merge them, and later take what was merged away."""
    writer = db.writer(NAME)
    worker = steps(writer, db, sweep_interval_s=0.0)
    compact_from(worker, 4)
    done = []
    for number in range(8):
        writer.put(f"k{number}", b"v" * 100)
        while (step := worker.step()) is not None and len(done) < 100:
            done.append(step.what)
            if step.what == "sweep":
                break
    assert {"fold", "compact", "sweep"} <= set(done)
    assert len(writer.manifest.segments) < 8
    assert [key for key, _ in writer.scan()] == [b"k%d" % n for n in range(8)]


def test_a_compactor_elsewhere_is_given_way_to(db):
    """The compactor epoch decides: a job that was taken over steps down without noise."""
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
    assert len(writer.manifest.segments) == 3


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
    settings = BackgroundSettings(fold_bytes=1 << 16, look_s=0.01)
    with db.writer(NAME, background=settings, unfolded_bytes_max=1 << 17) as writer:
        for number in range(40):
            writer.put(f"k{number:02}", b"x" * (1 << 14))
        assert len(list(writer.scan())) == 40


def test_pause_stops_the_work_and_resume_lets_it_go_on(tmp_path):
    """Serving goes on meanwhile."""
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
    task = writer.background._task
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
    task = writer.background._task
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
    task = old.background._task
    with db.writer(NAME, background=False) as new:
        new.put("k", b"new")
        with pytest.raises(reef.FencedError):
            old.put("k", b"old")
        assert task.join(60)
    assert "background_failed" not in heard


def test_a_failure_is_told_and_tried_again():
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
    with pytest.raises(reef.InvalidInputError, match="look_s"):
        db.writer(NAME, background=BackgroundSettings(look_s=0))
    with pytest.raises(reef.InvalidInputError, match="fold_bytes"):
        db.writer(NAME, background=BackgroundSettings(fold_bytes="1"))
    with pytest.raises(reef.NotFoundError):
        db.info(NAME)


def test_rates_are_kept(tmp_path):
    """Background work of many requests takes its time; serving does not wait for it."""
    db = reef.open(str(tmp_path))
    table = pa.table({"id": pa.array([b"%06d" % n for n in range(100)]), "value": [b"v"] * 100})
    with db.writer(NAME, background=False) as writer:
        for _ in range(30):
            writer.upsert(table)
        worker = Background(db, writer, BackgroundSettings(fold_bytes=1, requests_per_s=20))
        watch = time.monotonic()
        worker.step()
        assert time.monotonic() - watch > 0.5


# --- what a reviewer broke --------------------------------------------------------------


def test_work_that_is_paused_in_the_middle_holds_up_nobody(tmp_path):
    """Its requests wait on threads of their own: others gather on as before."""
    db = reef.open(str(tmp_path))
    with db.writer(NAME, background=False) as writer:
        for number in range(60):
            writer.put(f"k{number:03}", b"v")
        worker = Background(db, writer, EAGER)
        taken, real = [], worker._pace.take

        def take(*given, **named):
            taken.append(given)
            if len(taken) == 12:
                worker.pause()
            return real(*given, **named)

        worker._pace.take = take
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
        done.append(worker.step().what)
    assert set(done) == {"fold", "compact", "sweep"}


@pytest.mark.parametrize("error", [reef.CorruptionError("damaged"), OSError("disk")], ids=repr)
def test_work_that_fails_does_not_stop_the_others(db, monkeypatch, error):
    """Whatever the error; it is told, and each kind has its own pauses."""
    heard = []
    db.events.subscribe(lambda event: heard.append(event.fields.get("what")))
    writer = db.writer(NAME)
    writer.put("k", b"v")

    def fails(*_, **__):
        raise error

    monkeypatch.setattr("reef.jobs.background.fold", fails)
    worker = steps(writer, db, sweep_interval_s=0.0)
    assert worker.step().what == "sweep"
    assert heard.count("fold") == 1
    assert worker.chores[1].error is error or worker.chores[0].error is error
    assert writer.get("k") == b"v"


def test_a_listener_that_fails_does_not_end_the_work(db, monkeypatch):
    """Nobody's callback is worth the upkeep."""
    writer = db.writer(NAME)
    writer.put("k", b"v")

    def fails(*_, **__):
        raise reef.UnavailableError("away")

    monkeypatch.setattr("reef.jobs.background.fold", fails)
    db.events.subscribe(lambda event: 1 / 0)
    assert steps(writer, db, sweep=False).step() is None


def test_an_idle_writer_sweeps_to_the_end():
    """What it condemned goes when its time comes, though nothing is written any more."""
    from tests.collecting import World

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
    assert not writer.manifest.condemned
    assert writer.manifest.oldest_retained > 1
    assert swept < 80, "and less often when nothing is due"


def test_a_writer_that_is_forgotten_while_its_work_is_paused_is_let_go(tmp_path):
    """No step keeps it alive; its end ends the work."""
    db = reef.open(str(tmp_path))
    writer = db.writer(NAME, background=EAGER)
    worker = writer.background
    worker.pause()
    writer.put("k", b"v")
    time.sleep(0.2)
    task = worker._task
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
def test_what_is_no_setting_is_refused(tmp_path, wrong):
    """And nothing is changed."""
    db = reef.open(str(tmp_path))
    with pytest.raises(reef.InvalidInputError, match="background="):
        db.writer(NAME, background=wrong)
    assert db.namespaces() == []


def test_the_role_of_compactor_is_given_up_at_the_end(db):
    """The next one does not have to wait to be sure."""
    writer = db.writer(NAME)
    worker = steps(writer, db, sweep=False)
    compact_from(worker, 2)
    for number in range(3):
        writer.put(f"k{number}", b"v")
        fold(db, NAME)
    writer.refresh()
    assert worker.step().what == "compact"
    assert writer.manifest.compactor_job
    worker.stop()
    writer.refresh()
    assert not writer.manifest.compactor_job
