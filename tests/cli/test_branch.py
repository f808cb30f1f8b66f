"""`reef branch`, `diff`, `history` and `rollback`."""

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


def rows_of(data, name):
    """Return the rows of a namespace."""
    with reef.open(str(data)).reader(name) as reader:
        return dict(reader.scan())


def put(data, name, **rows):
    """Put rows."""
    with reef.open(str(data)).writer(name, background=False) as writer:
        for key, value in rows.items():
            writer.put(key, value)


def listed(cli, *words):
    """Return the rows of a command."""
    ran = cli(*words, "--output", "json")
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


def test_the_life_of_a_branch(cli, users):
    """Created, written, compared, merged, dropped; the list shows its name and state."""
    assert cli("branch", "create", users, "users", "trial").code == 0
    put(users, "trial", u1=b"Eve", u3=b"Cy")
    (one,) = listed(cli, "branch", "list", users, "users")
    assert (one["name"], one["state"], one["lsn"] > 0) == ("trial", "live", True)
    differences = listed(cli, "branch", "diff", users, "users", "trial")
    assert [(row["op"], row["key"]) for row in differences] == [("update", "u1"), ("insert", "u3")]
    assert len(listed(cli, "branch", "diff", users, "users", "trial", "--limit", 1)) == 1
    merged = listed(cli, "branch", "merge", users, "trial")
    assert (merged["namespace"], merged["written"]) == ("users", 2)
    assert rows_of(users, "users") == rows_of(users, "trial")
    reef.open(str(users)).rename("trial", "renamed")
    assert listed(cli, "branch", "list", users, "users")[0]["name"] == "renamed"
    assert cli("branch", "drop", users, "renamed").code == 0
    assert listed(cli, "branch", "list", users, "users")[0]["state"] == "dropped"


def test_a_branch_of_a_snapshot(cli, users):
    """By its name; one that is not there is an error."""
    reef.open(str(users)).snapshot("users", "monday")
    put(users, "users", u1=b"Eve")
    assert cli("branch", "create", users, "users", "trial", "--snapshot", "monday").code == 0
    assert rows_of(users, "trial")[b"u1"] == b"Ada"
    ran = cli("branch", "create", users, "users", "other", "--snapshot", "tuesday")
    assert (ran.code, "no snapshot 'tuesday'" in ran.err) == (1, True)


def test_a_conflict_is_an_error_unless_a_side_is_chosen(cli, users):
    """The keys are named."""
    cli("branch", "create", users, "users", "trial")
    put(users, "trial", u1=b"Eve")
    put(users, "users", u1=b"Flo")
    ran = cli("branch", "merge", users, "trial", "users")
    assert (ran.code, "u1" in ran.err) == (1, True)
    assert cli("branch", "merge", users, "trial", "users", "--on-conflict", "ours").code == 0
    assert rows_of(users, "users")[b"u1"] == b"Flo"
    assert cli("branch", "merge", users, "trial", "users", "--on-conflict", "theirs").code == 0
    assert rows_of(users, "users")[b"u1"] == b"Eve"


def test_what_is_no_branch_is_neither_merged_nor_dropped(cli, users):
    """The commands say so."""
    for command in ("merge", "drop"):
        ran = cli("branch", command, users, "users")
        assert (ran.code, "users is not a branch" in ran.err) == (1, True)
    assert rows_of(users, "users")


def test_states_are_compared_and_returned_to_by_any_kind_of_point(cli, users):
    """A snapshot by name, an LSN, a generation; without `--to` the newest state."""
    db = reef.open(str(users))
    pin = db.snapshot("users", "monday")
    lsn = db.reader("users", pin=True).last_lsn
    put(users, "users", u1=b"Eve")
    db.snapshot("users", "tuesday")
    for point in ("monday", pin.id, f"lsn:{lsn}", pin.generation):
        rows = listed(cli, "diff", users, "users", "--from", point)
        assert [(row["key"], row["a"], row["b"]) for row in rows] == [("u1", "Ada", "Eve")]
    assert listed(cli, "diff", users, "users", "--from", "tuesday", "--to", "tuesday") == []
    assert listed(cli, "rollback", users, "users", "monday")["written"] == 1
    assert rows_of(users, "users")[b"u1"] == b"Ada"
    assert listed(cli, "rollback", users, "users", "tuesday")["written"] == 1
    assert cli("rollback", users, "users", "wednesday").code == 1


def test_the_history_lists_generations(cli, users):
    """Newest first, each with its change."""
    cli("fold", users, "users")
    rows = listed(cli, "history", users, "users")
    assert rows[0]["generation"] == reef.open(str(users)).info("users").generation
    assert rows[0]["change"].startswith("fold up to LSN")
    assert [row["generation"] for row in rows] == sorted(
        (row["generation"] for row in rows), reverse=True
    )
