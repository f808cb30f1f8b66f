"""Compaction as a job: its report and output, and how tasks are cut, joined and moved."""

import pickle
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import reef
from reef import stores
from reef.errors import InternalError, InvalidInputError
from reef.jobs import Compactor, compact, fold
from reef.jobs.compact.merge import run_compact_task
from reef.jobs.compact.plan import CompactPlan, data_bytes
from reef.manifest.invariants import is_balanced
from reef.paths import Namespace
from reef.stores.memory import MemoryStore
from reef.testing import Recorder
from tests.support.compaction import SMALL, choose, head_of
from tests.support.segment_checks import check_segment

TASK = sys.modules["reef.jobs.compact.merge"]  # `reef.jobs.compact` is the function
PLAN = sys.modules["reef.jobs.compact.plan"]
NAME = "users"
USERS = Namespace(NAME)
LEVELED = {
    **SMALL,
    "level0_bytes": 3000,
    "segment_bytes_min": 2000,
    "segment_bytes": 3000,
    "segment_bytes_max": 4000,
    "group_bytes": 100,
    "codec": "none",
}


@pytest.fixture
def db():
    """Give a bucket whose calls are recorded."""
    return reef.Database(Recorder(MemoryStore()))


def rows_of(numbers, value=b"v"):
    """Return rows of about a hundred bytes."""
    return {b"k%05d" % n: value * 90 for n in numbers}


def put(db, rows, deleted=()):
    """Write rows and fold them."""
    with db.writer(NAME, background=False) as writer:
        batch = reef.Batch()
        for key, value in rows.items():
            batch.put(key, value)
        for key in deleted:
            batch.delete(key)
        writer.write(batch)
    fold(db, NAME, group_bytes=100, codec="none")


def seen(db):
    """Return all rows, as a new reader has them."""
    with db.reader(NAME) as reader:
        forwards = dict(reader.scan())
        assert dict(reader.scan(reverse=True)) == forwards
    return forwards


# --- reports ---------------------------------------------------------------------------


def test_nothing_to_do_writes_nothing(db):
    """An idle compaction takes no role and publishes no manifest."""
    put(db, rows_of(range(3)))
    before = head_of(db, NAME).generation
    report = compact(db, NAME)
    assert (report.outcome, report.published, report.jobs) == ("idle", False, 0)
    assert head_of(db, NAME).generation == before
    assert not Compactor(db, NAME).is_due(head_of(db, NAME))


def test_a_report_has_the_counts_of_the_work(db):
    """Counts, bytes and the three sums, as a dict too; and an event is emitted."""
    events = []
    db.events.subscribe(events.append)
    put(db, rows_of(range(4)))
    put(db, rows_of(range(2), b"w"), deleted=[b"k00003"])
    report = compact(db, NAME, full=True, **SMALL)
    assert (report.outcome, report.published, report.epoch) == ("compacted", True, 1)
    assert (report.inputs, report.rows_read, report.rows_written) == (2, 7, 3)
    assert report.output_bytes == sum(s.size for s in head_of(db, NAME).segments)
    as_dict = report.to_dict()
    assert as_dict["published"]
    assert as_dict["read"] != as_dict["dropped"] != as_dict["made"] == "0" * 32
    assert [event.name for event in events].count("compacted") == 1


def test_jobs_add_up(db):
    """One call runs jobs until nothing is due, and reports them all together."""
    for number in range(8):
        put(db, rows_of(range(number, number + 3)))
    report = compact(db, NAME, strategy="tiered", **SMALL)
    assert report.jobs > 1
    assert len(seen(db)) == 10
    assert compact(db, NAME, strategy="tiered", **SMALL).outcome == "idle"


def test_one_step_is_one_job(db):
    """For a background loop: it holds the role from step to step, and releases it."""
    for number in range(8):
        put(db, rows_of(range(number, number + 3)))
    compactor = Compactor(db, NAME, **SMALL)
    assert compactor.is_due(head_of(db, NAME))
    reports = []
    while (report := compactor.step()) is not None:
        reports.append(report)
    assert len(reports) > 1
    assert {(report.jobs, report.epoch) for report in reports} == {(1, 1)}
    assert head_of(db, NAME).compactor_job == "compact-1"
    compactor.close()
    compactor.close()
    assert head_of(db, NAME).compactor_job == ""


def test_settings_and_strategies_are_checked(db):
    """Before anything is read."""
    for wrong in ({"strategy": "best"}, {"tier_bites": 7}, {"tasks_max": 0}):
        with pytest.raises(InvalidInputError):
            compact(db, NAME, **wrong)


# --- the set hash ------------------------------------------------------------------------


def test_a_task_that_loses_a_row_is_caught(db, monkeypatch):
    """The sums do not add up: nothing is published."""
    put(db, rows_of(range(4)))
    put(db, rows_of(range(2), b"w"))
    before = head_of(db, NAME).segments
    monkeypatch.setattr(
        TASK,
        "merged",
        lambda runs, reverse: ([part.slice(1, len(part))] for run in runs for part in taken(run)),
    )
    with pytest.raises(InternalError, match="its inputs have"):
        compact(db, NAME, full=True, **SMALL)
    assert head_of(db, NAME).segments == before


def taken(run):
    """Yield all pieces of a run."""
    while run.load():
        yield run.take(run.edge(reverse=False), reverse=False)


def test_an_output_that_lacks_a_row_is_caught(db, monkeypatch):
    """The input was intact; the output is not."""
    put(db, rows_of(range(4)))
    put(db, rows_of(range(2), b"w"))
    merge = TASK.Merger.merge

    def loses_one(self, parts):
        rows = merge(self, parts)
        return rows.slice(0, len(rows) - 1)

    monkeypatch.setattr(TASK.Merger, "merge", loses_one)
    with pytest.raises(InternalError, match="were dropped"):
        compact(db, NAME, full=True, **SMALL)


def test_sums_are_kept_from_the_first_compaction_on(db):
    """Folds add to them, compactions drop and make; every generation is balanced."""
    put(db, rows_of(range(4)))
    assert head_of(db, NAME).sums is None
    compact(db, NAME, full=True, **SMALL)
    put(db, rows_of(range(2), b"w"), deleted=[b"k00003"])
    assert is_balanced(head_of(db, NAME))
    compact(db, NAME, full=True, **SMALL)
    head = head_of(db, NAME)
    assert head.sums is not None
    assert head.sums.dropped != "0" * 32
    assert is_balanced(head)


# --- levels ------------------------------------------------------------------------------


def test_leveled_ends_with_segments_of_the_right_size(db):
    """Level 1 does not overlap, and its segments are between the bounds."""
    for number in range(12):
        put(db, rows_of(range(number * 7 % 100, 200, 7)))
        compact(db, NAME, strategy="leveled", **LEVELED)
    one = sorted((s for s in head_of(db, NAME).segments if s.level == 1), key=lambda s: s.min_key)
    assert len(one) > 2
    assert all(left.max_key < right.min_key for left, right in pairwise(one))
    assert all(1500 <= data_bytes(s) <= 4000 for s in one)


def test_level_1_never_overlaps_between_two_jobs(db):
    """Writes at both ends of a namespace leave the segments between them alone."""
    put(db, rows_of(range(1000, 1030)))
    compactor = Compactor(db, NAME, "leveled", **LEVELED)
    assert compactor.step().moved == 1
    (middle,) = head_of(db, NAME).segments
    for number in range(2):
        put(db, rows_of(range(number, 20)))
        put(db, rows_of(range(2000, 2020 - number)))
    jobs = []
    while (report := compactor.step()) is not None:
        one = [s for s in head_of(db, NAME).segments if s.level == 1]
        one.sort(key=lambda s: s.min_key)
        assert all(left.max_key < right.min_key for left, right in pairwise(one)), report
        jobs.append(middle.id in {s.id for s in one})
    assert jobs[0], "the merge down had no part in it"
    assert len(seen(db)) == 70


def calls_of(db):
    """Return the recorded calls of the store inside the one that was proved."""
    store = db.store
    while not isinstance(store, Recorder):
        store = store.inner
    return store.calls


def test_what_overlaps_nothing_is_moved_as_it_is(db):
    """Only its level changes, in the manifest: no object is written."""
    put(db, rows_of(range(30)))
    put(db, rows_of(range(100, 130)))
    before = {s.id for s in head_of(db, NAME).segments}
    calls_of(db).clear()
    compactor = Compactor(db, NAME, "leveled", **LEVELED)
    report = compactor.step()
    assert (report.moved, report.inputs, report.outputs) == (2, 0, 0)
    assert {(s.id, s.level) for s in head_of(db, NAME).segments} == {(i, 1) for i in before}
    assert not [call for call in calls_of(db) if call.method in ("upload", "compose", "get_range")]
    assert len(seen(db)) == 60


def _neighbours(db, monkeypatch, *numbers):
    """Make adjacent level-1 segments of some rows each."""
    for some in numbers:
        put(db, rows_of(some))
        choose(monkeypatch, lambda segments: [s for s in segments if s.level == 0])
        compact(db, NAME, strategy="chosen", **{**LEVELED, "rounds_max": 1})


def test_small_neighbours_are_joined_by_copy(db, monkeypatch):
    """Their groups are copied byte by byte; filter, index and footer are new."""
    _neighbours(db, monkeypatch, range(6), range(50, 56))
    left, right = sorted(head_of(db, NAME).segments, key=lambda s: s.min_key)
    old = [db.store.get(USERS.segment(s.id)) for s in (left, right)]
    calls_of(db).clear()
    report = compact(db, NAME, strategy="leveled", **LEVELED)
    assert (report.jobs, report.joined, report.outputs) == (1, 1, 1)
    assert [call.method for call in calls_of(db)].count("compose") == 1
    assert not [call for call in calls_of(db) if call.method == "upload"]
    (joined,) = head_of(db, NAME).segments
    body = db.store.get(USERS.segment(joined.id))
    tail = check_segment(body, joined.id)
    groups = [data[16 : s.size - s.tail_bytes] for data, s in zip(old, (left, right), strict=True)]
    assert body[16 : joined.size - joined.tail_bytes] == b"".join(groups)
    assert (joined.size, joined.rows) == (len(body), 12)
    assert set(tail.footer.ancestors) >= {left.id, right.id}
    assert seen(db) == rows_of([*range(6), *range(50, 56)])
    with db.reader(NAME) as reader:
        assert reader.get(b"k00053") == b"v" * 90
        assert reader.get(b"k00030") is None


def test_a_join_above_the_largest_size_is_cut_in_two(db, monkeypatch):
    """Between groups, about the middle; both halves are copied."""
    _neighbours(db, monkeypatch, range(14), range(50, 53))
    report = compact(db, NAME, strategy="leveled", **LEVELED)
    assert (report.jobs, report.joined, report.outputs) == (1, 2, 2)
    sizes = [data_bytes(s) for s in head_of(db, NAME).segments]
    assert max(sizes) < 1.25 * min(sizes)
    assert seen(db) == rows_of([*range(14), *range(50, 53)])
    assert is_balanced(head_of(db, NAME))


def test_a_join_that_turns_out_to_be_impossible_is_a_merge(db, monkeypatch):
    """Two that have a key in common, whatever their bounds seemed to say."""
    _neighbours(db, monkeypatch, range(6))
    put(db, rows_of(range(5, 8), b"w"))
    chosen = {"chosen": lambda found, _: CompactPlan(1, tuple(found), join=True)}
    monkeypatch.setattr(PLAN, "STRATEGIES", chosen)
    report = compact(db, NAME, strategy="chosen", **{**LEVELED, "rounds_max": 1})
    assert (report.joined, report.outputs) == (0, 1)
    assert seen(db) == rows_of(range(5)) | rows_of(range(5, 8), b"w")


# --- tasks -------------------------------------------------------------------------------


class Pickling:
    """An executor that sends tasks and results as another process would get them."""

    def __init__(self):
        self.tasks = 0

    def map(self, run, tasks):
        self.tasks += len(tasks)
        assert run is run_compact_task
        return [pickle.loads(pickle.dumps(run(pickle.loads(pickle.dumps(t))))) for t in tasks]


def test_tasks_run_anywhere(tmp_path):
    """A large job is cut into tasks that travel, each with its own part of the keys."""
    db = reef.Database(stores.open(str(tmp_path / "bucket")))
    put(db, rows_of(range(100)))
    put(db, rows_of(range(0, 100, 2), b"w"))
    executor = Pickling()
    report = compact(db, NAME, full=True, executor=executor, **LEVELED)
    assert executor.tasks == report.outputs > 3
    assert seen(db) == rows_of(range(100)) | rows_of(range(0, 100, 2), b"w")


def test_directories_join_by_copy_too(tmp_path, monkeypatch):
    """The kernel copies the groups; the rows read back are complete."""
    db = reef.Database(stores.open(str(tmp_path / "bucket")))
    _neighbours(db, monkeypatch, range(6), range(50, 56))
    report = compact(db, NAME, strategy="leveled", **LEVELED)
    assert report.joined == 1
    (joined,) = head_of(db, NAME).segments
    check_segment(db.store.get(USERS.segment(joined.id)), joined.id)
    assert seen(db) == rows_of([*range(6), *range(50, 56)])


def test_memory_is_bounded():
    """200 MB of rows in 8 overlapping segments: far less than to hold them and sort them."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.compaction", "--memory", "--mb", "200"],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    _, peak_mb, rows = map(int, done.stdout.split())
    assert rows > 1_000_000
    assert peak_mb < 330
