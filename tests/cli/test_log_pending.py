"""`reef log pending` and `reef log reapply`: batches that are on one disk only, and their
upload."""

import json
import shutil

import pytest

from reef import stores
from reef.engine.handles.database import Database
from reef.errors import ErrorKind, FencedError, InvalidInputError, NotFoundError
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
    writer._buffer.log.close()
    writer._closed = True
    with db.writer("users", background=False) as rival:
        rival.put("a", b"theirs")
    return tmp_path / "log"


def test_pending_by_the_logs_own_notes(cli, left):
    """Count, bytes, entries and ages; whether the log has heard of its upload is chance."""
    ran = cli("log", "pending", left, "--output", "json")
    assert ran.code == 0
    report = json.loads(ran.out)
    noted = report["uploaded_index"]
    assert noted in (0, 1)
    assert (report["batches"], report["operations"]) == (3 - noted, 4 - noted)
    assert (report["first_index"], report["last_index"]) == (1 + noted, 3)
    assert report["namespace"] == "users"
    assert not report["asked_bucket"]
    assert report["bytes"] > 100
    assert 0 <= report["newest_age_s"] <= report["oldest_age_s"] < 600


def test_pending_asks_the_bucket(cli, left, data):
    """Then it is exact; in text, too."""
    report = json.loads(cli("log", "pending", left, "--url", data, "--output", "json").out)
    assert (report["batches"], report["first_index"], report["uploaded_index"]) == (2, 2, 1)
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
    rival = Database(stores.open(str(data))).writer("users", background=False)
    refused = cli("log", "reapply", left, data)
    assert refused.code == 1
    assert "--take-over" in refused.err
    rival.close()
    for applied in (2, 0):
        ran = cli("log", "reapply", left, data, "--take-over", "--output", "json")
        assert ran.code == 0, ran.err
        assert json.loads(ran.out)["applied_batches"] == applied
    with Database(stores.open(str(data))).reader("users") as reader:
        assert dict(reader.scan()) == {b"a": b"mine", b"b": b"1", b"c": b"2"}
        assert len(list(reader.changes(after_lsn=0))) == 5
    assert json.loads(cli("log", "pending", left, "--output", "json").out)["batches"] == 0


def test_reapply_after_a_rename(cli, left, data):
    """The log finds its namespace by the folder: both commands name the current one, and the
    writer under the former name reports the rename, not another database."""
    db = Database(stores.open(str(data)))
    db.rename("users", "customers")
    report = json.loads(cli("log", "pending", left, "--url", data, "--output", "json").out)
    assert (report["namespace"], report["batches"]) == ("customers", 2)
    with pytest.raises(NotFoundError) as renamed:
        db.writer("users", durability="local", local_log=left, background=False)
    assert renamed.value.kind is ErrorKind.RENAMED
    ran = cli("log", "reapply", left, data, "--take-over", "--output", "json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["namespace"] == "customers"
    with db.reader("customers") as reader:
        assert dict(reader.scan()) == {b"a": b"mine", b"b": b"1", b"c": b"2"}


def test_the_log_of_a_dropped_namespace(cli, left, data):
    """Its writer says so; undropped, the pending batches are applied."""
    db = Database(stores.open(str(data)))
    db.drop("users")
    with pytest.raises(NotFoundError) as dropped:
        db.writer("users", create=False, durability="local", local_log=left, background=False)
    assert dropped.value.kind is ErrorKind.DROPPED
    assert cli("log", "pending", left, "--url", data).code == 1
    db.undrop("users")
    assert cli("log", "reapply", left, data, "--take-over").code == 0
    with db.reader("users") as reader:
        assert dict(reader.scan()) == {b"a": b"mine", b"b": b"1", b"c": b"2"}


def test_reapply_to_another_bucket_is_refused(cli, left, tmp_path):
    """The log belongs to one database; the wrong one gets nothing of it."""
    ran = cli("log", "reapply", left, tmp_path / "other", "--take-over")
    assert ran.code == 1
    assert "another database" in ran.err
    assert Database(stores.open(str(tmp_path / "other"))).namespaces() == []


def test_reapply_to_another_bucket_with_the_same_namespace_is_refused(cli, left, tmp_path):
    """A bucket that does not know the log is not taken for one that has forgotten it: it has
    another address, and gets nothing of the log."""
    other = tmp_path / "other"
    with Database(stores.open(str(other))).writer("users", background=False) as writer:
        writer.put("a", b"of another database")
    ran = cli("log", "reapply", left, other, "--take-over")
    assert ran.code == 1
    assert "another database" in ran.err
    with Database(stores.open(str(other))).reader("users") as reader:
        assert dict(reader.scan()) == {b"a": b"of another database"}


@pytest.fixture
def forked(data, tmp_path):
    """A copy of the log has uploaded two batches; the original has three that were not."""
    db = Database(stores.open(str(data)))
    log, copy = tmp_path / "log", tmp_path / "copy"
    settings = {"durability": "local", "background": False, "upload_interval_ms": 1e9}
    with db.writer("users", local_log=log, **settings) as writer:
        writer.put("a", b"both")
    shutil.copytree(log, copy)
    writer = db.writer("users", local_log=log, **settings)
    for number in range(3):
        writer.put(f"original{number}", b"1")
    writer._uploader.stop()
    writer._buffer.log.close()
    writer._closed = True
    with db.writer("users", local_log=copy, **settings) as other:
        for number in range(2):
            other.put(f"copy{number}", b"1")
    return log


def test_H71_pending_and_reapply_of_a_log_that_has_forked(cli, forked, data):
    """H71: by the bucket's word the batches of the original are pending, and re-applied once."""
    report = json.loads(cli("log", "pending", forked, "--url", data, "--output", "json").out)
    assert (report["forked"], report["batches"], report["uploaded_index"]) == (True, 3, 1)
    db = Database(stores.open(str(data)))
    with pytest.raises(FencedError, match="has forked") as caught:
        db.writer("users", durability="local", local_log=forked, background=False)
    assert caught.value.kind is ErrorKind.LOG_FORKED
    for applied in (3, 0):
        ran = cli("log", "reapply", forked, data, "--take-over", "--output", "json")
        assert ran.code == 0, ran.err
        assert json.loads(ran.out)["applied_batches"] == applied
    report = json.loads(cli("log", "pending", forked, "--url", data, "--output", "json").out)
    assert (report["forked"], report["batches"]) == (False, 0)
    with db.reader("users") as reader:
        assert len(dict(reader.scan())) == len(list(reader.changes(after_lsn=0))) == 6


def test_reapply_after_a_rebuild(cli, left, data):
    """The marks are gone with the manifests; the batches on the disk are not."""
    db = Database(stores.open(str(data)))
    for info in list(db.store.list("namespaces/users/manifest/")):
        db.store.delete(info.key)
    assert rebuild(db, "users", apply=True).applied
    with pytest.raises(InvalidInputError, match="reef log reapply"):
        db.writer("users", durability="local", local_log=left, background=False)
    ran = cli("log", "reapply", left, data, "--take-over", "--output", "json")
    assert json.loads(ran.out)["applied_batches"] in (2, 3), (
        "with batches whose upload was not recorded"
    )
    with db.reader("users") as reader:
        assert dict(reader.scan()) == {b"a": b"mine", b"b": b"1", b"c": b"2"}
    with db.writer("users", durability="local", local_log=left, background=False) as writer:
        assert writer.local_recovery.replayed == 0


def test_a_directory_that_is_no_writers_log(cli, tmp_path):
    """A directory without a log, and a log that no writer has used."""
    assert "is not a log" in cli("log", "pending", tmp_path / "none").err
    LocalLog(tmp_path / "raft").close()
    assert "no writer has used it" in cli("log", "pending", tmp_path / "raft").err
