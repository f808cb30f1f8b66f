"""`reef drop`, `undrop`, `jobs` and `catalog rebuild` on the command line."""

import json
import shutil

import reef
from reef.jobs.ingest.job import BulkJob


def test_drop_and_undrop(cli, tmp_path):
    """It goes from the list, errors name the command that restores it, and that restores it."""
    url = str(tmp_path / "data")
    assert cli("put", "--create", url, "users", "u1", "Ada").code == 0
    assert "users" in cli("drop", url, "users").out
    assert json.loads(cli("namespaces", url, "--output", "json").out) == []
    dropped = cli("namespaces", url, "--dropped", "--output", "json").out
    assert json.loads(dropped) == [{"namespace": "users"}]
    refused = cli("get", url, "users", "u1")
    assert refused.code == 1
    assert "reef undrop" in refused.err
    kind = json.loads(cli("stats", url, "users", "--output", "json").err)["kind"]
    assert kind == "dropped"
    assert cli("undrop", url, "users").code == 0
    assert "Ada" in cli("get", url, "users", "u1").out
    assert cli("undrop", url, "unknown").code == 1


def test_jobs(cli, tmp_path):
    """A table for people, objects for programs."""
    url = str(tmp_path / "data")
    db = reef.open(url)
    db.create("users")
    assert json.loads(cli("jobs", url, "--output", "json").out) == []
    with BulkJob(db, "users") as job:
        (seen,) = json.loads(cli("jobs", url, "users", "--output", "json").out)
        assert (seen["id"], seen["kind"], seen["is_stale"]) == (job.id, "bulk load", False)
        shown = cli("jobs", url).out
        assert "bulk load" in shown
        assert "running" in shown


def test_catalog_rebuild(cli, tmp_path):
    """After the loss of `catalog/` it is there again, with dropped ones as such."""
    url = str(tmp_path / "data")
    db = reef.open(url)
    db.create("a")
    db.create("b")
    db.drop("b")
    shutil.rmtree(tmp_path / "data" / "catalog")
    ran = cli("catalog", "rebuild", url, "--output", "json")
    assert ran.code == 0
    assert json.loads(ran.out) == [
        {"namespace": "a", "state": "live"},
        {"namespace": "b", "state": "dropped"},
    ]
    assert (tmp_path / "data" / "catalog").is_dir()
    assert cli("catalog", "verify", url).code == 0
