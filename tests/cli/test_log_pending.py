"""`reef log pending` and `reef log reapply`: what is on one disk only, and how it gets away."""

import json

import pytest

from reef import stores
from reef.engine.database import Database
from reef.errors import InvalidInputError
from reef.jobs import rebuild
from reef.locallog import LocalLog


@pytest.fixture
def left(data, tmp_path):
    """A machine has died with two batches on its disk, one more was uploaded; a rival came."""
    db = Database(stores.open(str(data)))
    log = {"durability": "local", "local_log": tmp_path / "log", "local_segment_bytes": 4096}
    writer = db.writer("users", upload_interval_ms=1e9, background=False, **log)
    writer.put("a", b"uploaded")
    writer.flush()
    writer.put("a", b"mine")
    writer.upsert([{"id": b"b", "value": b"1"}, {"id": b"c", "value": b"2"}])
    writer._uploader.stop()
    writer._front.log.close()
    writer._closed = True
    with db.writer("users", background=False) as rival:
        rival.put("a", b"theirs")
    return tmp_path / "log"


def test_pending_by_the_logs_own_notes(cli, left):
    """Count, bytes, entries and ages; whether the log has heard of its upload is chance."""
    ran = cli("log", "pending", left, "--output", "json")
    assert ran.code == 0
    told = json.loads(ran.out)
    noted = told["uploaded_index"]
    assert noted in (0, 1)
    assert (told["batches"], told["operations"]) == (3 - noted, 4 - noted)
    assert (told["first_index"], told["last_index"]) == (1 + noted, 3)
    assert told["namespace"] == "users"
    assert not told["asked_bucket"]
    assert told["bytes"] > 100
    assert 0 <= told["newest_age_s"] <= told["oldest_age_s"] < 600


def test_pending_asks_the_bucket(cli, left, data):
    """Then it is exact; in text, too."""
    told = json.loads(cli("log", "pending", left, "--url", data, "--output", "json").out)
    assert (told["batches"], told["first_index"], told["uploaded_index"]) == (2, 2, 1)
    text = cli("log", "pending", left, "--url", data).out
    assert "batches" in text
    assert "oldest age s" in text


def test_pending_asks_the_right_bucket(cli, left, tmp_path):
    """One that does not know the log has nothing to say about it."""
    other = tmp_path / "other"
    Database(stores.open(str(other))).writer("users", background=False).close()
    ran = cli("log", "pending", left, "--url", other)
    assert ran.code == 1
    assert "another database" in ran.err


def test_reapply_writes_it_once(cli, left, data):
    """Never by accident, over the rival's rows, and nothing the second time."""
    refused = cli("log", "reapply", left, data)
    assert refused.code == 1
    assert "--take-over" in refused.err
    for applied in (2, 0):
        ran = cli("log", "reapply", left, data, "--take-over", "--output", "json")
        assert ran.code == 0, ran.err
        assert json.loads(ran.out)["applied_batches"] == applied
    with Database(stores.open(str(data))).reader("users") as reader:
        assert dict(reader.scan()) == {b"a": b"mine", b"b": b"1", b"c": b"2"}
        assert len(list(reader.changes(after_lsn=0))) == 5
    assert json.loads(cli("log", "pending", left, "--output", "json").out)["batches"] == 0


def test_reapply_to_another_bucket_is_refused(cli, left, tmp_path):
    """The log belongs to one database; the wrong one gets nothing of it."""
    ran = cli("log", "reapply", left, tmp_path / "other", "--take-over")
    assert ran.code == 1
    assert "another database" in ran.err
    assert Database(stores.open(str(tmp_path / "other"))).namespaces() == []


def test_reapply_after_a_rebuild(cli, left, data):
    """The marks are gone with the manifests; what is on the disk only need not be."""
    db = Database(stores.open(str(data)))
    for info in list(db.store.list("namespaces/users/manifest/")):
        db.store.delete(info.key)
    assert rebuild(db, "users", apply=True).applied
    with pytest.raises(InvalidInputError, match="reef log reapply"):
        db.writer("users", durability="local", local_log=left, background=False)
    ran = cli("log", "reapply", left, data, "--take-over", "--output", "json")
    assert json.loads(ran.out)["applied_batches"] in (2, 3), "with what it had not noted"
    with db.reader("users") as reader:
        assert dict(reader.scan()) == {b"a": b"mine", b"b": b"1", b"c": b"2"}
    with db.writer("users", durability="local", local_log=left, background=False) as writer:
        assert writer.local_recovery.replayed == 0


def test_what_is_no_writers_log(cli, tmp_path):
    """A directory without a log, and a log that nobody has put in front of a bucket."""
    assert "is not a log" in cli("log", "pending", tmp_path / "none").err
    LocalLog(tmp_path / "raft").close()
    assert "no writer's" in cli("log", "pending", tmp_path / "raft").err
