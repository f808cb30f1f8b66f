"""`reef purge`."""

import json

import pytest

import reef
from reef.jobs import fold


@pytest.fixture
def db(data):
    """Return a database with rows in a segment and in the log."""
    db = reef.open(str(data))
    with db.writer("users", create=True, background=False) as writer:
        writer.put("u1", b"Ada Lovelace")
        writer.put(b"\xff\x00", b"bytes")
        fold(db, "users", codec="none")
        writer.put("u2", b"Bob")
    return db


@pytest.fixture
def keys(tmp_path):
    """Return a file with a key, an empty line, and a key that has no row."""
    path = tmp_path / "keys.txt"
    path.write_bytes(b"u1\r\n\nnobody\n")
    return path


def test_a_dry_run_lists_objects_and_pins(cli, db, data, keys):
    """Nothing changes, and the exit code says that there is something to erase."""
    db.snapshot("users", "monday")
    before = [info.key for info in db.store.list("namespaces/")]
    words = ("purge", data, "users", "--keys-file", keys, "--dry-run")
    ran = cli(*words)
    assert ran.code == 2
    assert "snapshot monday" in ran.out
    assert "dry run" in ran.out
    report = json.loads(cli(*words, "--output", "json").out)
    assert (report["keys"], report["applied"], report["erased"]) == (2, False, False)
    assert {pin["kind"] for one in report["remaining"] for pin in one["pins"]} >= {"snapshot"}
    assert [info.key for info in db.store.list("namespaces/")] == before


def test_rows_are_erased(cli, db, data, keys):
    """They are gone from the newest state at once; the objects follow."""
    words = ("purge", data, "users", "--keys-file", keys, "--output", "json")
    ran = cli(*words, "--release-snapshots", "--include-branches", "--set", "codec=none")
    assert ran.code == 2, "the grace period has not passed"
    report = json.loads(ran.out)
    assert (report["applied"], report["rows_deleted"]) == (True, 1)
    assert report["continue_at"]
    assert [key for key, _ in db.reader("users").scan()] == [b"u2", b"\xff\x00"]


def test_keys_may_be_encoded(cli, db, data, tmp_path):
    """As everywhere: --encoding says how; a wrong line is named."""
    path = tmp_path / "keys.txt"
    path.write_text("ff00\n")
    words = ("purge", data, "users", "--keys-file", path, "--encoding", "hex", "--dry-run")
    report = json.loads(cli(*words, "--output", "json").out)
    assert sum(one["rows"] for one in report["remaining"]) == 2, "in the log and in a segment"
    path.write_text("ff00\nzz\n")
    ran = cli(*words)
    assert ran.code == 1
    assert "line 2" in ran.err


def test_keys_may_be_arguments(cli, db, data):
    """With or without a file of more; none at all is a usage error."""
    report = json.loads(
        cli("purge", data, "users", "u1", "u2", "--dry-run", "--output", "json").out
    )
    assert report["keys"] == 2
    assert cli("purge", data, "users").code == 64


def test_nothing_to_erase_is_a_success(cli, db, data, tmp_path):
    """Exit code 0, and the number of objects that were read."""
    path = tmp_path / "keys.txt"
    path.write_text("nobody\n")
    ran = cli("purge", data, "users", "--keys-file", path, "--output", "json")
    report = json.loads(ran.out)
    assert (ran.code, report["erased"]) == (0, True)
    assert report["objects_scanned"] > 3
    path.write_text("")
    assert "keys is empty" in cli("purge", data, "users", "--keys-file", path).err
