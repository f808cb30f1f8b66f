"""`reef snapshot`, `cursors` and `changes`."""

import json
import signal

import pytest

import reef
from tests.cli.process import start


@pytest.fixture
def users(data):
    """Return a bucket with a few changes to users."""
    with reef.open(str(data)).writer("users", background=False) as writer:
        writer.put("u1", b"Ada")
        writer.put(b"\xff", b"\x00")
        writer.delete("u1")
        writer.delete_range("a", "b")
    return data


def lines(text):
    """Return the JSON values of a stream."""
    return [json.loads(line) for line in text.splitlines()]


# --- snapshots ----------------------------------------------------------------------


def test_the_life_of_a_snapshot(cli, users):
    """Taken, listed, extended, released."""
    ran = cli("snapshot", "take", users, "users", "monday", "--ttl", 600, "--output", "json")
    taken = json.loads(ran.out)
    assert (ran.code, taken["name"]) == (0, "monday")
    listed = json.loads(cli("snapshot", "list", users, "users", "--output", "json").out)
    assert listed == [taken]
    extended = json.loads(
        cli("snapshot", "extend", users, "users", "monday", "--output", "json").out
    )
    assert extended["expires_at"] is None
    assert cli("snapshot", "release", users, "users", taken["id"]).code == 0
    assert cli("snapshot", "list", users, "users").out == "snapshots of users: none\n"


def test_the_life_of_a_snapshot_of_all_namespaces(cli, users):
    """Taken, listed, released, and taken again."""
    out = cli("snapshot", "take-all", users, "nightly", "--ttl", 600, "--output", "json").out
    assert [(one["namespace"], one["name"]) for one in json.loads(out)] == [("users", "nightly")]
    (listed,) = json.loads(cli("snapshot", "list-all", users, "--output", "json").out)
    assert (listed["name"], listed["is_complete"], listed["namespaces"]) == ("nightly", True, 1)
    assert cli("snapshot", "take-all", users, "nightly").code == 1
    assert cli("snapshot", "release-all", users, "nightly").code == 0
    assert cli("snapshot", "list", users, "users").out == "snapshots of users: none\n"
    assert cli("snapshot", "release-all", users, "nightly").code == 1
    assert cli("snapshot", "take-all", users, "nightly").code == 0


def test_snapshots_for_people(cli, users):
    """A table with a line for each."""
    cli("snapshot", "take", users, "users", "monday")
    cli("snapshot", "take", users, "users", "tuesday")
    out = cli("snapshot", "list", users, "users").out.splitlines()
    assert out[0] == "snapshots of users"
    assert [line.split()[0] for line in out[1:]] == ["name", "monday", "tuesday"]


def test_a_snapshot_that_is_not_there(cli, users):
    """It cannot be extended or released; a name that is taken cannot be taken again."""
    assert cli("snapshot", "extend", users, "users", "unknown").code == 1
    assert cli("snapshot", "release", users, "users", "unknown").code == 1
    cli("snapshot", "take", users, "users", "monday")
    assert cli("snapshot", "take", users, "users", "monday").code == 1
    assert cli("snapshot", "take", users, "users", "later", "--generation", 99).code == 1


# --- changes ------------------------------------------------------------------------


def test_changes_for_programs(cli, users):
    """One JSON object per change, in order."""
    report = lines(cli("changes", users, "users", "--output", "json").out)
    assert [(change["_lsn"], change["_op"]) for change in report] == [
        *((2, "put"), (3, "put"), (4, "delete")),
        (5, "delete_range"),
    ]
    assert report[1]["_key"] == {"base64": "/w=="}
    assert report[3]["_end_key"] == "b"


def test_changes_for_people(cli, users):
    """One line each."""
    out = cli("changes", users, "users", "--after", 3).out.splitlines()
    assert [line.split() for line in out] == [
        ["4.0", "delete", "u1"],
        ["5.0", "delete_range", "a", "…", "b"],
    ]


def test_a_part_of_the_changes(cli, users):
    """After an LSN, and no more than so many."""
    ran = cli("changes", users, "users", "--after", 2, "--limit", 1, "--output", "json")
    assert [change["_lsn"] for change in lines(ran.out)] == [3]
    assert cli("changes", users, "users", "--after", 999).code == 1


def test_a_cursor_resumes_where_it_was_committed(cli, users):
    """Reading moves nothing; --commit does."""
    assert cli("cursors", "register", users, "users", "billing", "--after", 3).code == 0
    words = ("changes", users, "users", "--cursor", "billing", "--output", "json")
    assert [change["_lsn"] for change in lines(cli(*words).out)] == [4, 5]
    assert [change["_lsn"] for change in lines(cli(*words, "--commit").out)] == [4, 5]
    assert lines(cli(*words).out) == []
    assert reef.open(str(users)).cursors("users") == {"billing": 5}


def test_the_life_of_a_cursor(cli, users):
    """Registered once, listed, dropped once."""
    words = ("cursors", "register", users, "users", "billing", "--output", "json")
    assert json.loads(cli(*words).out) == {"name": "billing", "lsn": 5}
    assert json.loads(cli(*words, "--after", 2).out) == {"name": "billing", "lsn": 5}
    listed = cli("cursors", "list", users, "users", "--output", "json")
    assert json.loads(listed.out) == [{"name": "billing", "lsn": 5, "lag": 0}]
    assert cli("cursors", "drop", users, "users", "billing").code == 0
    assert cli("cursors", "drop", users, "users", "billing").code == 1
    assert cli("cursors", "list", users, "users").out == "cursors of users: none\n"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--cursor", "unknown"), 1),
        (("--cursor", "billing", "--after", 2), 64),
        (("--commit",), 64),
        (("--cursor", "billing", "--commit", "--limit", 1), 64),
        (("--after", -1), 64),
    ],
)
def test_changes_asked_wrongly(cli, users, words, code):
    """Reading registers no cursor, and a part that was printed commits none."""
    cli("cursors", "register", users, "users", "billing", "--after", 3)
    assert cli("changes", users, "users", *words).code == code
    assert reef.open(str(users)).cursors("users") == {"billing": 3}


def test_following(users):
    """Changes come as they are committed, each at once; Ctrl-C ends it."""
    process = start("changes", users, "users", "--after", 4, "--follow", "--output", "json")
    assert json.loads(process.stdout.readline())["_lsn"] == 5
    with reef.open(str(users)).writer("users", background=False) as writer:
        receipt = writer.put("u2", b"Bob")
    assert json.loads(process.stdout.readline())["_lsn"] == receipt.lsn
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in err


def test_following_for_a_while(cli, users):
    """It ends when nothing came for so long."""
    ran = cli("changes", users, "users", "--follow", "--timeout", "0.1", "--output", "json")
    assert ran.code == 0
    assert len(lines(ran.out)) == 4
