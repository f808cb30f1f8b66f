"""Executors in processes of their own, and Spark Connect: over a directory and over S3.

Each kind of session runs once, in a driver of its own (tests.spark.read_driver), which does
everything and records the results, which the tests read.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import reef
from tests.spark.data import SCHEMA, rows

pytestmark = pytest.mark.timeout(600)  # a whole cluster comes up, on whatever cores are left
ROOT = Path(__file__).parent.parent.parent
KINDS = {"cluster": "local-cluster[2,1,1024]", "connect": "connect"}
CHECKS = {
    "directory": [
        "read_rows",
        "read_native",
        "read_some",
        "refuse",
        "run_tasks",
        "fail_tasks",
        "fold_alike",
    ],
    "s3": ["read_rows", "read_native", "run_tasks", "fold_log"],
}
EXPECTED = [[f"k{n:07d}", -1 if n < 10 else n] for n in range(600) if n != 20]


@pytest.fixture(scope="module", params=["cluster", pytest.param("connect", marks=pytest.mark.slow)])
def found(request, spark_home, tmp_path_factory, seaweedfs):
    """The results of a driver of this kind, on a directory and on a real S3 server."""
    kind = request.param
    home = tmp_path_factory.mktemp(kind)
    seaweedfs.make_bucket("spark-elsewhere")
    s3 = {
        "url": f"s3://spark-elsewhere/{kind}",
        "options": seaweedfs.options() | {"listing": "unsorted"},
    }
    buckets = {"directory": {"url": str(home / "bucket"), "options": {}}, "s3": s3}
    for name, bucket in buckets.items():
        bucket["checks"] = CHECKS[name]
        fill(reef.open(bucket["url"], **bucket["options"]))
    (home / "in.json").write_text(json.dumps(buckets))
    argv = [sys.executable, "-m", "tests.spark.read_driver", KINDS[kind], home / "in.json"]
    done = subprocess.run(
        [*map(str, argv), str(home / "out.json")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])},
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return kind, json.loads((home / "out.json").read_text())


def fill(db):
    """Rows in a segment, and newer ones in the log."""
    db.create("events", SCHEMA)
    with db.writer("events") as writer:
        writer.upsert(rows(0, 600))
        reef.jobs.fold(db, "events", group_bytes=4096)
        writer.patch([{"id": f"k{n:07d}", "n": -1} for n in range(10)])
        writer.delete("k0000020")


both = pytest.mark.parametrize("bucket", ["directory", "s3"])


@both
def test_all_rows_are_read(found, bucket):
    """Every row once, of segments and log, by tasks that open the bucket by themselves."""
    assert found[1][f"{bucket} read_rows"] == EXPECTED


@both
def test_all_rows_are_read_natively(found, bucket):
    """The same rows in the executors' JVMs, which have no credentials and no Reef of their own."""
    _, results = found
    assert results[f"{bucket} read_native"] == EXPECTED


def test_ranges_and_conditions_are_read(found):
    """Options of Reef and a filter of Spark's, together."""
    assert found[1]["directory read_some"] == list(range(150, 200, 2))


def test_a_missing_namespace_is_reported(found):
    """The driver says so, in Reef's own words."""
    assert "reef.errors.NotFoundError" in found[1]["directory refuse"]


@both
def test_tasks_run_elsewhere(found, bucket):
    """In other processes than the driver's; in a cluster, of more than one executor."""
    kind, seen = found
    ran = seen[f"{bucket} run_tasks"]
    assert ran["numbers"] == [0, 1, 2, 3]
    assert ran["puts"] == 4
    assert seen["driver"] not in {*ran["processes"], *ran["parents"]}
    if kind == "cluster":
        assert len(set(ran["parents"])) == 2


def test_errors_come_back_as_themselves(found):
    """With message, hint and facts."""
    assert found[1]["directory fail_tasks"] == ["task 2", "Try again", {"number": 2}]


def test_a_fold_runs_there(found):
    """The log is folded by Spark's shuffle, and the rows are the same."""
    assert found[1]["s3 fold_log"] == {"published": True, "rows": EXPECTED}


def test_random_logs_fold_alike_there(found):
    """Rows and set hash are those of a fold by threads; all of it is compared in the driver."""
    seen = found[1]["directory fold_alike"]
    assert seen["segments"] > 3
    assert seen["voided"] == 1
