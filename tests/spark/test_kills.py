"""Kills: executors and drivers die at bad times; the visible rows are exact every time.

Each driver is a process of its own (`tests/spark/driver.py`), so that it can die.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import reef
from tests.spark.driver import ROWS, SLOW_S
from tests.spark.writing import (
    kinds_of,
    leases_of,
    named_segments,
    numbers_of,
    segments_of,
    sweep_everything,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # clusters come up, on whatever cores

DRIVER = Path(__file__).parent / "driver.py"
MODEL = {f"{n * 7919 % ROWS:06}": n for n in range(ROWS)}


def drive(what, url, cwd, options=None, timeout_s=800):
    """Run a driver to its end, natural or not; return its output, by scenario."""
    environment = {**os.environ, "PYTHONPATH": str(DRIVER.parents[2])}
    done = subprocess.run(
        [sys.executable, str(DRIVER), what, str(url), json.dumps(options or {})],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    found = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            facts = json.loads(line)
            found[facts.pop("scenario")] = facts
    return done.returncode, found, done.stderr[-3000:]


@pytest.fixture(scope="module", params=["directory", "s3"])
def cluster(request, spark_home, tmp_path_factory):
    """Run all scenarios on a cluster of two executor processes, one after the other."""
    home = tmp_path_factory.mktemp("cluster")
    url, options = str(home / "bucket"), {}
    if request.param == "s3":
        seaweedfs = request.getfixturevalue("seaweedfs")
        seaweedfs.make_bucket("spark-kills")
        url, options = "s3://spark-kills/one", seaweedfs.options() | {"listing": "unsorted"}
    code, found, errors = drive("cluster", url, home, options)
    return reef.open(url, **options), code, found, errors, url, options


def test_H39_a_task_that_fails_after_its_upload(cluster):
    """H39: it runs again, and the segments of the first attempt are never visible, and are
    swept."""
    db, _, found, errors, *_ = cluster
    assert "failsonce" in found, errors
    assert numbers_of(db, "failsonce") == MODEL
    staged = segments_of(db, "failsonce")
    named = named_segments(db, "failsonce")
    assert len(named) == 4
    assert len(staged) == 5
    assert sweep_everything(db, "failsonce") == named
    assert numbers_of(db, "failsonce") == MODEL


def test_H39_speculation_counts_one_attempt_of_each_task(spark_home, tmp_path):
    """H39: two attempts run concurrently and both upload; one of them counts."""
    code, found, errors = drive("speculate", tmp_path / "bucket", tmp_path)
    assert code == 0, errors
    assert found["slowonce"]["seconds"] < SLOW_S, "the second attempt was the faster one"
    db = reef.open(str(tmp_path / "bucket"))
    assert numbers_of(db, "slowonce") == MODEL
    named = named_segments(db, "slowonce")
    assert len(named) == 4
    assert len(segments_of(db, "slowonce")) >= 5
    assert sweep_everything(db, "slowonce") == named
    assert numbers_of(db, "slowonce") == MODEL


def test_H38_an_executor_that_is_killed_in_the_middle_of_a_load(cluster):
    """H38: its tasks run elsewhere, every row arrives once; a rerun changes nothing."""
    db, _, found, errors, *_ = cluster
    assert "executor" in found, errors
    assert found["executor"]["killed"] == 1
    assert found["executor"]["rows"] == ROWS
    assert found["executor"]["again"]
    assert numbers_of(db, "killed") == MODEL
    assert kinds_of(db, "killed") == ["begin", "ingest"]
    assert leases_of(db, "killed") == []
    assert sweep_everything(db, "killed") == named_segments(db, "killed")


def test_H39_an_executor_that_is_killed_in_the_middle_of_a_compaction(cluster):
    """H39: its tasks run elsewhere; rows and set hash hold, and the sweep takes the rest."""
    db, _, found, errors, *_ = cluster
    assert "compaction" in found, errors
    assert (found["compaction"]["killed"], found["compaction"]["rows"]) == (1, ROWS)
    assert found["compaction"]["outputs"] > 6, "others were at work when it was killed"
    assert numbers_of(db, "compacted") == MODEL
    assert reef.jobs.verify(db, "compacted", deep=True).problems == []
    assert sweep_everything(db, "compacted") == named_segments(db, "compacted")
    assert numbers_of(db, "compacted") == MODEL


@pytest.mark.parametrize("after", [False, True])
def test_H31_a_driver_that_dies_in_a_write(spark_home, spark, tmp_path, after):
    """H31: before its commit nothing is seen of it, after it all; the rerun makes it whole."""
    url = str(tmp_path / "bucket")
    code, found, errors = drive("write-after" if after else "write-before", url, tmp_path)
    assert found.get("writing") == {"after": after}, errors
    assert code < 0
    db = reef.open(url)
    assert numbers_of(db, "dies") == (MODEL if after else {})
    staged = segments_of(db, "dies")
    assert len(staged) == 4
    rows = spark.range(ROWS).selectExpr(f"lpad(id * 7919 % {ROWS}, 6, '0') AS id", "id AS n")
    for _ in range(2):
        options = {"namespace": "dies", "idempotencyKey": "k"}
        rows.write.format("reef").options(**options).mode("append").save(url)
    assert numbers_of(db, "dies") == MODEL
    ingests = [kind for kind in kinds_of(db, "dies") if kind == "ingest"]
    assert len(ingests) == 1
    named = named_segments(db, "dies")
    assert (named == staged) is after
    assert sweep_everything(db, "dies") == named
    assert numbers_of(db, "dies") == MODEL


def test_H31_a_driver_that_dies_after_its_commit(cluster, spark):
    """H31: the rows are there; the rerun with the same key returns the same receipt, and stages
    nothing."""
    db, code, found, errors, url, options = cluster
    assert found.get("dying") == {"after": True, "segments": 2}, errors
    assert code < 0
    assert numbers_of(db, "after") == MODEL
    named = named_segments(db, "after")
    rerun = spark.range(5).selectExpr("CAST(id AS STRING) AS id", "id AS n")
    report = reef.spark.bulk_load(rerun, url, "after", idempotency_key="k", store_options=options)
    assert (report.replayed, report.rows) == (True, ROWS)
    assert sweep_everything(db, "after") == named
    assert numbers_of(db, "after") == MODEL


def test_H28_a_driver_that_dies_before_its_commit(spark_home, spark, tmp_path):
    """H28: nothing is seen of it; the rerun loads everything, and the sweep takes the rest."""
    url = str(tmp_path / "bucket")
    code, found, errors = drive("dies", url, tmp_path)
    assert found.get("dying") == {"after": False, "segments": 2}, errors
    assert code < 0
    db = reef.open(url)
    assert numbers_of(db, "before") == {}
    assert len(segments_of(db, "before")) == 2
    assert len(leases_of(db, "before")) == 1
    rows = spark.range(ROWS).selectExpr(f"lpad(id * 7919 % {ROWS}, 6, '0') AS id", "id AS n")
    report = reef.spark.bulk_load(rows, url, "before", idempotency_key="k", partitions=2)
    assert (report.replayed, report.rows) == (False, ROWS)
    assert numbers_of(db, "before") == MODEL
    assert sweep_everything(db, "before") == named_segments(db, "before")
    assert numbers_of(db, "before") == MODEL
    assert kinds_of(db, "before") == ["begin", "begin", "ingest", "abort"]


def test_spark_connect_appends_overwrites_and_loads(spark_home, tmp_path):
    """A remote session has no RDDs; writes run on its server, a load is driven by its client."""
    url = str(tmp_path / "bucket")
    code, found, errors = drive("connect", url, tmp_path)
    assert code == 0, errors
    assert found["append"] == {"rows": ROWS}
    assert found["overwrite"] == {"rows": 50}
    assert found["refused"] == {"clearly": True}
    assert found["taken back"] == {"left": ["c"]}
    assert found["bulk_load"]["rows"] == ROWS
    assert "connect" in found["bulk_load"]["module"]
    assert found["partitions"]["chosen"] == 1
    assert numbers_of(reef.open(url), "c") == MODEL
