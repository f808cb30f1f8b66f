"""A fold by shuffle publishes the same as a fold in one task, whichever executor shuffles.

Random logs go through a shuffle in memory here, many of them and quickly; through Spark's own
in the tests below, and on a cluster in `test_read_elsewhere`.
"""

from bisect import bisect_right

import pyarrow as pa
import pytest

import reef
import reef.spark
from reef.config import FoldSettings
from reef.engine.log.log import Log
from reef.formats.wal_object import WalKind
from reef.jobs import fold, repair
from reef.jobs.fold.shuffle import count_ranges
from reef.manifest.head import HeadFinder
from reef.paths import Namespace
from tests.spark.logs import NAME, SMALL, check_fold, state, twins, write_log

ORDER = [("key", "ascending"), ("lsn", "descending"), ("seq", "descending")]


class InMemory:
    """Shuffles rows of this process; counts how often it is asked."""

    batch_rows = 7

    def __init__(self, runtime):
        self._runtime = runtime
        self.jobs = []

    def map(self, run, tasks):
        """Run the tasks in threads."""
        return self._runtime.map(run, tasks)

    def parallelism(self):
        """Two, for no reason."""
        return 2

    def shuffle(self, job):
        """Sort everything, cut it at the cuts."""
        self.jobs.append(job)
        parts = [pa.Table.from_batches(job.read(task), job.columns) for task in job.tasks]
        rows = pa.concat_tables(parts).sort_by(ORDER)
        places = [bisect_right(job.cuts, key) for key in rows["key"].to_pylist()]
        found = {}
        for place in sorted(set(places)):
            first = places.index(place)
            chosen = rows.slice(first, places.count(place)).combine_chunks()
            batches = iter(chosen.to_batches(max_chunksize=self.batch_rows))
            found[place] = job.write(job.plan, place, batches)
        return found


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))]
)
def test_random_logs_fold_alike(tmp_path, seed):
    """Rows, set hash, window, jobs and floor are equal; verify and rebuild agree."""
    threads, shuffled = twins(tmp_path, seed)
    executor = InMemory(shuffled.store.runtime)
    report = check_fold(threads, shuffled, executor)
    (job,) = executor.jobs
    assert len(job.cuts) > 1, "there are several ranges"
    assert report.segments > 3
    assert report.voided == 1


def test_a_key_may_have_more_versions_than_a_batch_has_rows(tmp_path):
    """Without patches only the newest of each batch is sent; of all batches one counts."""
    for place in ("threads", "shuffled"):
        db = reef.open(str(tmp_path / place))
        with db.writer(NAME, background=False) as writer:
            for number in range(60):
                writer.write(reef.Batch().put("hot", b"%d" % number).put(f"k{number:02}", b"x"))
            writer.delete_range("k10", "k20")
            writer.put("k15", b"again")
            writer.delete("hot")
    threads, shuffled = (reef.open(str(tmp_path / place)) for place in ("threads", "shuffled"))
    executor = InMemory(shuffled.store.runtime)
    for db, settings in ((threads, {}), (shuffled, {"shuffle_bytes_min": 0, "executor": executor})):
        fold(db, NAME, segment_bytes_max=400, **settings)
    assert state(shuffled)[:3] == state(threads)[:3]
    assert [key for key, _ in shuffled.reader(NAME).scan()][:11] == [
        *(b"k%02d" % n for n in range(10)),
        b"k15",
    ]


def test_H49_a_range_of_which_nothing_is_left_has_a_segment_that_says_so(tmp_path):
    """H49: patches over nothing leave nothing; the others' segments still cover all keys."""
    db = reef.open(str(tmp_path / "bucket"))
    db.create(NAME, pa.schema([("id", pa.string()), ("n", pa.int64())]))
    with db.writer(NAME, background=False) as writer:
        writer.upsert([{"id": f"b{n:03}", "n": n} for n in range(50)])
        writer.patch([{"id": f"{word}{n:03}", "n": 0} for word in "ac" for n in range(50)])
    executor = InMemory(db.store.runtime)
    fold(db, NAME, executor=executor, shuffle_bytes_min=0, segment_bytes_max=900)
    head = HeadFinder(db.store, Namespace(NAME)).find().manifest
    assert 0 in [segment.rows for segment in head.segments]
    assert len(list(db.reader(NAME).scan())) == 50
    found = reef.jobs.rebuild(db, NAME)
    assert (found.rows_equal, found.problems) == (True, ())


@pytest.mark.parametrize("deletes", [True, False])
def test_a_log_without_rows_is_folded(tmp_path, deletes):
    """Range deletes alone become one segment; nothing at all becomes none."""
    db = reef.open(str(tmp_path / "bucket"))
    with db.writer(NAME, background=False) as writer:
        if deletes:
            writer.delete_range("a", "b")
    executor = InMemory(db.store.runtime)
    report = fold(db, NAME, executor=executor, shuffle_bytes_min=0)
    assert report.published
    assert report.segments == deletes


def test_skipped_objects_stay_skipped(tmp_path):
    """An object that a repair has abandoned is passed over, in the survey too."""
    db = reef.open(str(tmp_path / "bucket"))
    with db.writer(NAME, background=False) as writer:
        for number in range(6):
            writer.put(f"k{number}", b"x" * 100)
    log = Log(db.store, Namespace(NAME))
    lsns = [s.lsn for s in log.filled(1) if log.read(s.lsn).header.kind is WalKind.BATCHES]
    key = Namespace(NAME).wal_object(lsns[3])
    body = bytearray(db.store.get(key))
    body[-40] ^= 1
    db.store.put(key, bytes(body))
    repair(db, NAME, apply=True)
    report = fold(db, NAME, executor=InMemory(db.store.runtime), shuffle_bytes_min=0)
    assert report.published
    assert [key for key, _ in db.reader(NAME).scan()] == [b"k0", b"k1", b"k2", b"k4", b"k5"]


def test_a_damaged_object_is_reported_and_nothing_is_published(tmp_path):
    """As in any fold: the error names the object."""
    db = reef.open(str(tmp_path / "bucket"))
    write_log(db, 1, steps=3)
    floor = HeadFinder(db.store, Namespace(NAME)).find().manifest.wal_floor
    key = Namespace(NAME).wal_object(floor)
    body = bytearray(db.store.get(key))
    body[-20] ^= 1
    db.store.put(key, bytes(body))
    generation = db.info(NAME).generation
    with pytest.raises(reef.CorruptionError, match=key):
        fold(db, NAME, executor=InMemory(db.store.runtime), shuffle_bytes_min=0, **SMALL)
    assert db.info(NAME).generation == generation


def test_a_short_log_is_one_task(tmp_path):
    """The shuffle is for logs that are worth it."""
    db = reef.open(str(tmp_path / "bucket"))
    write_log(db, 2, steps=2)
    executor = InMemory(db.store.runtime)
    assert fold(db, NAME, executor=executor, **SMALL).published
    assert executor.jobs == []


def test_a_shuffle_takes_the_whole_log_in_one_publish(tmp_path):
    """One stretch for each range would be in memory at a time, so there are no stretches."""
    db = reef.open(str(tmp_path / "bucket"))
    write_log(db, 3)
    generation = db.info(NAME).generation
    executor = InMemory(db.store.runtime)
    fold(db, NAME, executor=executor, shuffle_bytes_min=0, log_bytes=8192, **SMALL)
    assert db.info(NAME).generation == generation + 1


def test_ranges_follow_from_size_and_cores():
    """Segments of the wanted size, all cores at work, and no range too small."""
    settings = FoldSettings(segment_bytes_max=64 << 20)
    assert count_ranges(1000, settings, 8) == 1
    assert count_ranges(64 << 20, settings, 8) == 8
    assert count_ranges(65 << 20, settings, 2) == 2
    assert count_ranges(200 << 20, settings, 3) == 6
    assert count_ranges(1 << 50, settings, 3) == 512


# --- Spark's own shuffle --------------------------------------------------------------------


@pytest.mark.parametrize("seed", [11, pytest.param(12, marks=pytest.mark.slow)])
def test_random_logs_fold_alike_on_spark(spark, tmp_path, seed):
    """The same with Spark's shuffle; its tasks' requests are counted."""
    threads, shuffled = twins(tmp_path, seed)
    executor = reef.spark.executor(spark)
    report = check_fold(threads, shuffled, executor, segment_bytes_max=40_000)
    assert report.segments > 3
    counted = executor.meter.to_dict()
    assert counted["put"]["requests"] >= report.segments - 2, "all but those of the two loads"
    assert counted["get"]["requests"] > report.objects


def test_an_error_of_a_task_that_reads_comes_back_as_itself(spark, tmp_path, monkeypatch):
    """An object swept between the survey and the shuffle raises the same error as in any fold."""
    db = reef.open(str(tmp_path / "bucket"))
    write_log(db, 4, steps=3)
    executor = reef.spark.executor(spark)
    survey = executor.map

    def swept_after(run, tasks):
        found = survey(run, tasks)
        floor = HeadFinder(db.store, Namespace(NAME)).find().manifest.wal_floor
        db.store.delete(Namespace(NAME).wal_object(floor))
        return found

    monkeypatch.setattr(executor, "map", swept_after)
    with pytest.raises(reef.CorruptionError, match="was listed and is gone"):
        fold(db, NAME, executor=executor, shuffle_bytes_min=0, **SMALL)
