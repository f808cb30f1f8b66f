"""`reef backup`."""

import json

import pytest

import reef


@pytest.fixture
def users(data):
    """Return a bucket with two users."""
    with reef.open(str(data)).writer("users", create=True, background=False) as writer:
        writer.put("u1", b"Ada")
        writer.put("u2", b"Bob")
    return data


def rows_of(path, name="users"):
    """Return the rows of a namespace."""
    return dict(reef.open(str(path)).reader(name).scan())


def ran_json(cli, *words):
    """Run a command that succeeds; return its JSON."""
    ran = cli(*words, "--output", "json")
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


def test_there_and_back(cli, users, tmp_path):
    """Created, listed, verified, restored; requests and bytes are reported."""
    target = tmp_path / "backup"
    made = ran_json(cli, "backup", "create", users, "users", target)
    assert made["requests"]["target"]["put"]["requests"] == 3
    (listed,) = ran_json(cli, "backup", "list", target)
    assert (listed["id"], listed["namespace"], listed["last_lsn"]) == (made["id"], "users", 3)
    assert ran_json(cli, "backup", "verify", target, "--deep")["ok"]
    done = ran_json(cli, "backup", "restore", target, users, "copy", "--namespace", "users")
    assert done["namespaces"][0]["lsn"] == 3
    assert rows_of(users, "copy") == rows_of(users)


def test_a_point_in_time(cli, users, tmp_path):
    """By LSN; one that is not covered is an error that names the range."""
    target = tmp_path / "backup"
    cli("backup", "create", users, "users", target)
    words = ("backup", "restore", target, tmp_path / "other", "users")
    assert cli(*words, "--lsn", 2, "--no-verify").code == 0
    assert rows_of(tmp_path / "other") == {b"u1": b"Ada"}
    ran = cli(
        "backup", "restore", target, tmp_path / "other", "late", "--namespace", "users", "--lsn", 9
    )
    assert ran.code == 1
    assert "do not cover LSN 9" in ran.err


def test_following_for_some_time(cli, users, tmp_path):
    """It ends by itself, at an LSN or after some seconds."""
    target = tmp_path / "backup"
    words = ("backup", "create", users, "users", target, "--follow", "--interval", 0.01)
    assert ran_json(cli, *words, "--until-lsn", 3)["last_lsn"] == 3
    assert ran_json(cli, *words, "--seconds", 0.02)["backups"] == 1


def test_a_whole_bucket(cli, users, tmp_path):
    """All namespaces, by the name of a snapshot, into an empty bucket."""
    reef.open(str(users)).snapshot_all("nightly")
    target, other = tmp_path / "backup", tmp_path / "other"
    made = ran_json(cli, "backup", "create-all", users, target, "--snapshot", "nightly")
    assert made["snapshot"] == "nightly"
    assert cli("backup", "restore-all", target, other, "--backup", "nightly").code == 0
    assert rows_of(other) == rows_of(users)


def test_damage_ends_with_2(cli, users, tmp_path):
    """Verify and restore name the object."""
    target = tmp_path / "backup"
    cli("backup", "create", users, "users", target)
    (piece,) = target.glob("data/logs/**/*.log")
    piece.write_bytes(piece.read_bytes()[:-1] + b"x")
    ran = cli("backup", "verify", target)
    assert ran.code == 2
    assert piece.name in ran.out
    ran = cli("backup", "restore", target, tmp_path / "other", "users")
    assert ran.code == 2
    assert piece.name in ran.err
