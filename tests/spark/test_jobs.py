"""Jobs on Spark: the same tasks as with threads, and so the same rows and the same set hash."""

import random
import shutil

import pytest

import reef
import reef.spark
from reef.cli.main import run
from reef.jobs import compact, export, fold, purge, rebuild, verify
from reef.manifest.head import HeadFinder
from reef.manifest.invariants import total
from reef.paths import Namespace

NAME = "events"
SMALL = {"tier_bytes": 1, "tier_segments_min": 2, "segment_rows_max": 60}
"""Every few rows are worth a task of their own."""


def history(db, seed):
    """Write, delete and load at random, with folds in between: several segments and a log."""
    chance = random.Random(seed)
    with db.writer(NAME, background=False) as writer:
        for _ in range(6):
            for _ in range(chance.randrange(1, 5)):
                batch = reef.Batch()
                for _ in range(40):
                    batch.put(f"k{chance.randrange(300):04}", chance.randbytes(20))
                writer.write(batch)
            first = chance.randrange(300)
            writer.delete(f"k{first:04}")
            writer.delete_range(f"k{first:04}", f"k{first + 20:04}")
            if chance.random() < 0.7:
                fold(db, NAME)
        keys = [b"k%04d" % number for number in range(0, 300, 7)]
        values = [chance.randbytes(20) for _ in keys]
        reef.jobs.ingest(db, NAME, {"id": keys, "value": values})


def head(db):
    """Return the newest manifest."""
    return HeadFinder(db.store, Namespace(NAME)).find().manifest


def state(db):
    """Return the rows, and the sum of the segments' set hashes."""
    manifest = head(db)
    return dict(db.reader(NAME).scan()), total(manifest.segments), manifest.wal_floor


@pytest.fixture(params=[1, 2])
def twins(tmp_path, request):
    """Give the same random history twice."""
    for name in ("threads", "spark"):
        if name == "spark":
            shutil.copytree(tmp_path / "threads", tmp_path / "spark")
        else:
            history(reef.open(str(tmp_path / name)), request.param)
    return reef.open(str(tmp_path / "threads")), reef.open(str(tmp_path / "spark"))


def test_fold_and_compaction_give_the_same_as_with_threads(spark, twins):
    """Rows, set hash and floor are equal after each step; a deep verification finds nothing."""
    executor = reef.spark.executor(spark)
    threads, on_spark = twins
    before = state(threads)[0]
    fold(threads, NAME)
    fold(on_spark, NAME, executor=executor)
    assert state(on_spark) == state(threads)
    here = compact(threads, NAME, full=True, **SMALL)
    there = compact(on_spark, NAME, full=True, executor=executor, **SMALL)
    assert there.outputs == here.outputs > 1
    assert (there.read, there.dropped, there.made) == (here.read, here.dropped, here.made)
    assert state(on_spark) == state(threads)
    assert state(on_spark)[0] == before
    assert verify(on_spark, NAME, deep=True, executor=executor).problems == []


class Twice:
    """Runs each task two times, as Spark may: only the second result counts."""

    def map(self, run, tasks):
        """Return the results of the second run of each; keep the output of the first ones."""
        self.first = [run(task) for task in tasks]
        return [run(task) for task in tasks]


@pytest.mark.parametrize("twins", [1], indirect=True)
def test_H39_a_task_that_runs_twice_does_no_harm(twins):
    """H39: a fold's attempts have names of their own, a compaction's write the same bytes."""
    once, twice = twins
    executor = Twice()
    fold(once, NAME)
    fold(twice, NAME, executor=executor)
    named = {segment.id for segment in head(twice).segments}
    assert named.isdisjoint(entry.id for folded in executor.first for entry in folded.written)
    compact(once, NAME, full=True, **SMALL)
    compact(twice, NAME, full=True, executor=executor, **SMALL)
    again = [result.segment for result in executor.first if result.segment]
    assert {entry.id: entry.checksum for entry in again} == {
        segment.id: segment.checksum for segment in head(twice).segments
    }
    assert state(twice) == state(once)
    assert verify(twice, NAME, deep=True).problems == []


@pytest.mark.parametrize("twins", [1], indirect=True)
def test_rebuild_and_export_run_on_spark_too(spark, twins, tmp_path):
    """The same report, the same files."""
    executor = reef.spark.executor(spark)
    threads, on_spark = twins
    here, there = rebuild(threads, NAME), rebuild(on_spark, NAME, executor=executor)
    assert there.rows_equal
    assert there.to_dict() == here.to_dict()
    first = export(threads, NAME, str(tmp_path / "a"), rows_per_file=50)
    second = export(on_spark, NAME, str(tmp_path / "b"), rows_per_file=50, executor=executor)
    assert (second.rows, second.files) == (first.rows, first.files)


@pytest.mark.parametrize("twins", [1], indirect=True)
def test_commands_run_on_spark(spark, twins, tmp_path, capsys):
    """`--engine spark --master …` for each of them; a session that is there is used."""
    _, db = twins
    where = db.store.url.removeprefix("file://")
    before = state(db)[0]
    on_spark = ["--engine", "spark", "--master", "local[2]"]
    for words in (["index"], ["compact"], ["verify", "--deep"], ["rebuild"]):
        command, *options = words
        assert run([command, where, NAME, *options, *on_spark]) == 0, capsys.readouterr()
    assert run(["export", where, NAME, str(tmp_path / "out"), *on_spark]) == 0, capsys.readouterr()
    assert state(db)[0] == before


def test_a_purge_on_spark_erases_the_same(spark, tmp_path):
    """Fold, rewrite and scan run as tasks; report and rows are those of threads."""
    rows, reports = {}, {}
    for name, executor in (("threads", None), ("spark", reef.spark.executor(spark))):
        db = reef.open(str(tmp_path / name))
        history(db, 3)
        before = dict(db.reader(NAME).scan())
        keys = sorted(before)[::5]
        reports[name] = purge(db, NAME, keys, apply=True, executor=executor).to_dict()
        rows[name] = dict(db.reader(NAME).scan())
        assert rows[name] == {k: v for k, v in before.items() if k not in keys}
        assert verify(db, NAME, deep=True).problems == []
    assert rows["spark"] == rows["threads"]
    for fact in ("rows_deleted", "segments_rewritten", "versions_dropped", "erased"):
        assert reports["spark"][fact] == reports["threads"][fact]
    assert reports["spark"]["segments_rewritten"] > 1
