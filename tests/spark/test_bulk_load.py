"""Bulk loads with a real session: reports, refusals, and a concurrent live writer."""

import random
import threading
from itertools import pairwise

import pyarrow as pa
import pytest
from pyspark.sql import types as st

import reef
from reef.manifest.head import HeadFinder
from reef.paths import Namespace
from reef.spark import load_check
from reef.spark.load_check import (
    TASK_KEYS,
    THINNED,
    KeyCounts,
    Preflight,
    _run_pass,
    hash_limit,
    is_narrow,
    sample_keys,
)
from reef.spark.sink import find_target
from tests.spark.writing import (
    kinds_of,
    leases_of,
    named_segments,
    numbers_of,
    rows_of,
    segments_of,
    sweep_everything,
)

COLUMNS = pa.schema([("id", pa.string()), ("n", pa.int64())])
KEYS_ONLY = st.StructType([st.StructField("id", st.StringType())])


@pytest.fixture(scope="module")
def numbers(spark):
    """Return rows in no order, over three partitions."""
    rows = spark.range(3000).selectExpr("lpad(id * 7919 % 3000, 6, '0') AS id", "id AS n")
    return rows.repartition(3).localCheckpoint()


def model():
    """Return what those rows are."""
    return {f"{n * 7919 % 3000:06}": n for n in range(3000)}


def ingested(db):
    """Return the segments of the last ingest, in the order of their keys."""
    entries = db.reader("t")._tail.view().memtable.ingested
    last = max(entry.visible_lsn for entry in entries)
    found = [entry for entry in entries if entry.visible_lsn == last]
    return sorted(found, key=lambda entry: entry.min_key)


def test_a_load_makes_a_namespace_of_segments_that_do_not_overlap(spark, numbers, db, url):
    """One ingest, each range of keys in one segment; the report has the counts and the LSN."""
    steps = []
    batch_rows = spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch")
    report = reef.spark.bulk_load(numbers, url, "t", key="id", partitions=3, progress=steps.append)
    assert numbers_of(db) == model()
    assert kinds_of(db) == ["begin", "ingest"]
    entries = ingested(db)
    assert [entry.rows for entry in entries] != [3000]
    assert all(a.max_key < b.min_key for a, b in pairwise(entries))
    assert (report.rows, report.segments, report.partitions) == (3000, 3, 3)
    assert (report.lsn, report.replayed, report.duplicates, report.spilled) == (2, False, 0, 0)
    assert report.bytes == sum(entry.size for entry in entries)
    assert 1.0 <= report.skew < 1.5
    assert list(report.seconds) == ["check", "begin", "stage", "commit"]
    assert set(report.task_seconds) == {"receive", "check", "sort and write"}
    assert report.to_dict()["checks"]["rows"] == 3000
    printed = [step.stage for step in steps if step.stage != "staging"]
    assert printed == ["check", "checked", "begin", "stage", "commit", "committed"]
    assert steps[1].checks == report.checks
    assert spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch") == batch_rows
    assert leases_of(db) == []


def test_a_load_with_a_key_that_was_used_changes_nothing(numbers, db, url):
    """No task runs, and the receipt is the first one's; also for another DataFrame."""
    first = reef.spark.bulk_load(numbers, url, "t", key="id", idempotency_key="monday")
    before = segments_of(db)
    again = reef.spark.bulk_load(
        numbers.limit(1), url, "t", idempotency_key="monday", replace=True, count=False
    )
    assert (again.lsn, again.rows, again.replayed) == (first.lsn, 3000, True)
    assert (again.segments, again.bytes) == (0, 0)
    assert segments_of(db) == before
    assert len(numbers_of(db)) == 3000


def test_a_rerun_with_a_committed_key_does_not_evaluate_its_source(numbers, db, url):
    """A source that has failed since is no error: the load is replayed before it is read."""
    first = reef.spark.bulk_load(numbers, url, "t", key="id", idempotency_key="monday")
    broken = numbers.selectExpr("id", "raise_error('the source was read') AS n")
    again = reef.spark.bulk_load(broken, url, "t", idempotency_key="monday")
    assert (again.lsn, again.rows, again.replayed) == (first.lsn, 3000, True)


@pytest.fixture
def counted(spark, tmp_path):
    """Numbers in three partitions behind a shuffle, and a count of how often each is evaluated."""
    runs = tmp_path / "runs"

    def count(batches):
        with runs.open("a") as file:
            file.write("x")
        yield from batches

    numbers = spark.range(3000, numPartitions=3).selectExpr("CAST(id AS STRING) AS id", "id AS n")
    rows = numbers.mapInArrow(count, numbers.schema).repartition(2)
    return rows, lambda: len(runs.read_text()) / 3


@pytest.mark.parametrize(
    ("options", "times"),
    [
        ({}, 2),
        ({"partitions": 3}, 2),
        ({"partitions": 3, "count": False}, 2),
        ({"persist": True}, 1),
    ],
)
def test_a_load_evaluates_its_source_at_most_twice(counted, db, url, options, times):
    """For the check and for the load; the ranges of keys need no evaluation of their own."""
    rows, evaluated = counted
    report = reef.spark.bulk_load(rows, url, "t", key="id", **options)
    assert 1 <= evaluated() <= times
    assert not rows.is_cached, "Spark keeps nothing afterwards"
    assert report.partitions == options.get("partitions", report.partitions)
    assert len(numbers_of(db)) == 3000


@pytest.mark.parametrize("mode", ["append", "overwrite"])
def test_a_write_evaluates_its_source_once(counted, db, url, mode):
    """Rows that cannot be written fail in their task: there is no pass before."""
    rows, evaluated = counted
    rows.write.format("reef").mode(mode).options(namespace="t", key="id").save(url)
    assert evaluated() == 1
    assert len(numbers_of(db)) == 3000


def test_the_driver_receives_no_rows_from_the_check(spark, db, url, monkeypatch):
    """Rows of a megabyte are sampled and converted by executors (they filled the driver before)."""
    rows = spark.range(40).selectExpr("CAST(id AS STRING) AS id", "repeat('x', 1 << 20) AS t")
    monkeypatch.setattr(type(rows), "toArrow", None)
    checks = reef.spark.preflight(rows, url, "t", key="id")
    assert (checks.rows, checks.problems) == (40, ())
    assert 40 << 20 <= checks.bytes <= 41 << 20


def test_preflight_returns_all_columns_that_cannot_be_loaded(numbers, db, url):
    """Complex types and wrong types are problems of the report, not the first of them an error."""
    db.create("t", COLUMNS)
    bad = numbers.selectExpr("id", "map('a', 1) AS a", "struct(n) AS b", "'x' AS n")
    problems = reef.spark.preflight(bad, url, "t").problems
    assert [problem.split(":")[0] for problem in problems] == ["column a", "column b", "column n"]


def test_replace_leaves_exactly_the_loaded_rows(numbers, db, url):
    """Also keys before the first and after the last of the load."""
    db.create("t", COLUMNS)
    with db.writer("t", background=False) as writer:
        writer.upsert([{"id": key, "n": -1} for key in ("!", "000001", "000001x", "zzz")])
    reef.jobs.fold(db, "t")
    reef.spark.bulk_load(numbers, url, "t", replace=True, partitions=3)
    for _ in range(2):
        assert numbers_of(db) == model()
        reef.jobs.fold(db, "t")
    reef.spark.bulk_load(numbers.limit(0), url, "t", replace=True)
    assert numbers_of(db) == {}


@pytest.mark.parametrize("last", ["staging", "commit"])
def test_a_progress_that_raises_ends_the_load(numbers, db, url, monkeypatch, last):
    """At any stage, also one that a thread reports: nothing is committed or left behind."""
    monkeypatch.setattr("reef.spark.bulk_loader.POLL_INTERVAL_S", 0.01)

    def stop(step):
        if step.stage == last:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reef.spark.bulk_load(numbers, url, "t", key="id", partitions=2, progress=stop)
    assert kinds_of(db) == ["begin", "abort"]
    assert db.namespaces() == []


def test_an_order_column_decides_wherever_the_rows_are(numbers, db, url):
    """All rows of a key meet in one task. Without an order, a key twice is refused (H38)."""
    more = numbers.where("n < 100").selectExpr("id", "n + 10000 AS n", "2 AS _turn")
    both = (
        numbers.selectExpr("id", "n", "1 AS _turn")
        .union(more)
        .union(more.selectExpr("id", "-n AS n", "0 AS _turn"))
    )
    twice = numbers.union(numbers.where("n = 5"))
    with pytest.raises(reef.InvalidInputError, match="comes more than once"):
        reef.spark.bulk_load(twice, url, "t", key="id", partitions=2)
    assert kinds_of(db) == ["begin", "abort"]
    assert db.namespaces() == [], "made for this load, and taken back"
    assert sweep_everything(db) == set()
    report = reef.spark.bulk_load(both, url, "t", key="id", order_by="_turn")
    assert numbers_of(db) == {k: n + 10_000 if n < 100 else n for k, n in model().items()}
    assert (report.rows, report.duplicates) == (3000, 200)
    draw = twice.selectExpr("id", "n", "1 AS _turn")
    with pytest.raises(reef.InvalidInputError, match="same place in the order column"):
        reef.spark.bulk_load(draw, url, "t", duplicates="order", order_by="_turn")


@pytest.mark.parametrize(
    ("bad", "options", "why"),
    [
        (["nullif(id, '000007') AS id", "n"], {}, "column id: 1 keys are null"),
        (["nullif(id, '000007') AS id", "n"], {"count": False}, "a key cannot be null"),
        (["replace(id, '000007', '') AS id", "n"], {}, "1 keys do not have 1 to 65535 bytes"),
        (["id", "CAST(n AS STRING) AS n"], {}, "column n: expected int64"),
        (["id", "n + 0.5 AS n"], {}, "column n"),
        (["id", "n AS m"], {}, "column m: there is no such column"),
        (["id", "n"], {"key": "n"}, "is 'id', not 'n'"),
        (["id", "n"], {"duplicates": "order"}, "go together"),
        (["id", "n"], {"duplicates": "refuse", "order_by": "n"}, "go together"),
        (["id", "n", "'put' AS _op"], {"replace": True}, "puts only"),
        (["id", "n"], {"partitions": 0}, "partitions=0"),
        (["id", "n"], {"segment_bytes": -1}, "segment_bytes=-1"),
        (["id", "n"], {"sort_bytes": 0}, "sort_bytes=0"),
        (["id", "n"], {"idempotency_key": ""}, "idempotency key must have 1 to"),
    ],
)
def test_bad_input_is_rejected_before_anything_is_written(numbers, db, url, bad, options, why):
    """Pre-flight finds it where it can; what only tasks can find leaves an aborted job."""
    db.create("t", COLUMNS)
    with pytest.raises(reef.InvalidInputError, match=why):
        reef.spark.bulk_load(numbers.selectExpr(*bad), url, "t", **options)
    assert kinds_of(db) == (["begin", "abort"] if options.get("count") is False else [])
    assert numbers_of(db) == {}
    assert leases_of(db) == []


def test_an_unknown_namespace_without_a_key_is_not_made(numbers, db, url):
    """And neither is one whose load pre-flight refuses."""
    with pytest.raises(reef.NotFoundError, match="there is no namespace t"):
        reef.spark.bulk_load(numbers, url, "t")
    with pytest.raises(reef.InvalidInputError, match="keys are null"):
        reef.spark.bulk_load(numbers.selectExpr("nullif(id, '000007') AS id"), url, "t", key="id")
    assert db.namespaces() == []


def test_a_namespace_that_grows_between_check_and_begin(numbers, db, url):
    """Rows are written as the job's schema has them: readers rely on it."""
    db.create("t", pa.schema([("id", pa.string()), ("n", pa.int32())]))

    def grow(step):
        if step.stage == "checked":
            db.alter("t", COLUMNS)

    narrow = numbers.selectExpr("id", "CAST(n AS INT) AS n")
    reef.spark.bulk_load(narrow, url, "t", progress=grow)
    assert numbers_of(db) == model()
    assert reef.jobs.verify(db, "t", deep=True).problems == []


def test_preflight_alone(numbers, db, url):
    """The checks of a load, without loading."""
    found = reef.spark.preflight(
        numbers.selectExpr("nullif(id, '000007') AS id", "n"), url, "t", key="id"
    )
    assert isinstance(found, Preflight)
    assert (found.rows, found.null_keys, found.longest_key) == (3000, 1, 6)
    assert (found.creates, found.columns, found.partitions) == (True, ("id", "n"), 1)
    assert found.problems == ("column id: 1 keys are null",)
    assert db.namespaces() == []


def test_runs_on_disk_change_nothing(numbers, db, url):
    """A task that may hold next to nothing sorts by way of files."""
    report = reef.spark.bulk_load(numbers, url, "t", key="id", partitions=2, sort_bytes=20_000)
    assert report.spilled > 0
    assert numbers_of(db) == model()
    assert all(a.max_key < b.min_key for a, b in pairwise(ingested(db)))


def test_the_bucket_is_named_as_spark_names_it(numbers, db, url):
    """`file:/…` is a directory for loads too, and no folder of that name."""
    report = reef.spark.bulk_load(numbers.limit(5), f"file:{url}", "t", key="id")
    assert report.rows == len(rows_of(db)) == 5


def test_live_rows_written_during_a_load_are_where_they_belong(numbers, db, url):
    """H45, H46: the writer is never fenced, its writes never swap, and later LSNs win."""
    db.create("t", COLUMNS)
    writes = []
    begun, over = threading.Event(), threading.Event()

    def live():
        with db.writer("t", max_parallel_writes=4, background=False) as writer:
            turn = 0
            while not over.is_set():
                turn += 1
                keys = [f"{(turn * 31 + at) % 3300:06}" for at in range(0, 60, 3)]
                rows = [{"id": key, "n": -turn} for key in keys]
                writes.append((keys, -turn, writer.upsert(rows, wait=False)))
                if turn == 1:
                    writes[0][2].result()
                    begun.set()
            assert all(later.result().lsn for _, _, later in writes)

    thread = threading.Thread(target=live)
    thread.start()
    try:
        assert begun.wait(120)
        report = reef.spark.bulk_load(numbers, url, "t", partitions=2)
        while writes[-1][2].result(120).lsn < report.lsn:  # it continues behind the load, too
            over.wait(0.01)
    finally:
        over.set()
        thread.join()
    lsns = [later.result().lsn for _, _, later in writes]
    assert lsns == sorted(lsns), "its own writes never swap"
    assert lsns[0] < report.lsn < lsns[-1]
    expected = {}
    for (keys, n, _), lsn in zip(writes, lsns, strict=True):
        if lsn < report.lsn:
            expected |= dict.fromkeys(keys, n)
    expected |= model()
    for (keys, n, _), lsn in zip(writes, lsns, strict=True):
        if lsn > report.lsn:
            expected |= dict.fromkeys(keys, n)
    for _ in range(2):
        assert numbers_of(db) == expected
        reef.jobs.fold(db, "t")
    head = HeadFinder(db.store, Namespace("t")).find().manifest
    assert head.writer_epoch == 1
    assert named_segments(db) >= {segment.id for segment in head.segments}


def test_a_check_of_files_finds_what_a_check_of_any_rows_finds(
    spark, db, url, tmp_path, monkeypatch
):
    """Keys are read alone, and rows of each file only at its start: counts and sample are alike."""
    db.create("t", COLUMNS)
    odd = "CASE WHEN id % 7000 = 1 THEN NULL WHEN id = 9 THEN '' ELSE hex(xxhash64(id)) END AS id"
    source = spark.range(150_000, numPartitions=1).selectExpr(odd, "'x' AS n")
    source.write.parquet(str(tmp_path / "files"))
    files = spark.read.parquet(str(tmp_path / "files"))
    target = find_target(db, Namespace("t"), KEYS_ONLY)
    quick, slow = (_run_pass(df, target.rows) for df in (files, files.repartition(1)))
    filtered = files.where("id IS NULL OR id != 'x'")
    monkeypatch.setattr(load_check, "MERGED_HERE_MAX", 0)
    assert _run_pass(filtered, target.rows) == quick, "counted as the keys pass by"
    assert (is_narrow(files), is_narrow(files.repartition(1))) == (True, False)
    assert quick.counts == slow.counts == KeyCounts(150_000, 22, 1, 16)
    keys = quick.keys.to_list()
    assert 1_000 < len(keys) < len(slow.keys.to_list())
    assert keys == slow.keys.to_list()[: len(keys)], "the keys with the lowest hashes"
    assert reef.spark.preflight(files, url, "t").problems[0].startswith("column n:")


def test_a_thinned_sample_has_all_keys_below_its_limit():
    """Spark sends all of the first rows of a partition, and later only those with low hashes."""
    choices = random.Random(1)
    hashes = [choices.randrange(-(2**63), 2**63) for _ in range(200_000)]
    (first, few), (second, fewer) = THINNED
    for rows, limit in (
        (100, None),
        (first, None),
        (first + 1, hash_limit(few)),
        (second, hash_limit(few)),
        (second + 1, hash_limit(fewer)),
    ):
        sent = [
            n
            for n in range(rows)
            if n <= first
            or n == second
            or (n < second and hashes[n] < hash_limit(few))
            or hashes[n] < hash_limit(fewer)
        ]
        batch = pa.record_batch(
            {
                "key": pa.array([b"%d" % n for n in sent]),
                "hash": pa.array([hashes[n] for n in sent]),
                "number": pa.array(sent),
            }
        )
        found = set(sample_keys([batch])[1].to_list())
        every = sorted((hashes[n], b"%d" % n) for n in range(rows))
        below = [key for value, key in every if limit is None or value < limit]
        assert found == set(below[: len(found)])
        assert len(found) == min(len(below), TASK_KEYS)
