"""`reef get` and `scan`, and how bytes are reported."""

import json

import pytest

import reef
from reef.cli.output import Encoding, printable, to_json


@pytest.fixture
def users(data):
    """Return a bucket with a few users, some of them no text."""
    with reef.open(str(data)).writer("users", background=False) as writer:
        batch = reef.Batch().put("u1", b"Ada").put("u2", b"two\nlines").put(b"\xff", b"\x00\x80")
        writer.write(batch)
    return data


def lines(text):
    """Return the JSON values of a stream."""
    return [json.loads(line) for line in text.splitlines()]


# --- get ----------------------------------------------------------------------------


def test_get(cli, users):
    """Text as it is, with its line breaks; other bytes as hexadecimal digits."""
    assert cli("get", users, "users", "u1").out == "Ada\n"
    assert cli("get", users, "users", "u2").out == "two\nlines\n"
    assert cli("get", users, "users", "ff", "--encoding", "hex").out == "0080\n"


def test_get_for_programs(cli, users):
    """Bytes that are no text are distinguished from text."""
    assert lines(cli("get", users, "users", "u1", "--output", "json").out) == [
        {"id": "u1", "value": "Ada"}
    ]
    words = ("get", users, "users", "/w==", "--output", "json")
    assert lines(cli(*words, "--encoding", "base64").out) == [{"id": "/w==", "value": "AIA="}]


def test_get_raw(users):
    """The value's bytes and nothing else."""
    from tests.cli.process import start

    process = start("get", users, "users", "ff", "--encoding", "hex", "--raw")
    assert process.communicate(timeout=240) == (b"\x00\x80", b"")


def test_get_of_a_missing_key(cli, users):
    """Exit code 1, and nothing on stdout."""
    ran = cli("get", users, "users", "unknown", "--output", "json")
    assert (ran.code, ran.out) == (1, "")
    assert json.loads(ran.err)["kind"] == "not_found"


def test_get_a_row(cli, data):
    """Where there are columns, one per line; --raw has no one value to print."""
    cli("create", data, "events", "-c", "amount:float64")
    cli("put", "--create", data, "events", "e1", '{"amount": 7.5}')
    assert cli("get", data, "events", "e1").out == "e1\nid      e1\namount  7.5\n"
    assert cli("get", data, "events", "e1", "--raw").code == 64


# --- scan ---------------------------------------------------------------------------


def test_scan_for_people(cli, users):
    """Aligned columns; control characters are reported, not sent to the terminal."""
    assert cli("scan", users, "users").out == (
        "id    value\nu1    Ada\nu2    two\\nlines\n0xff  0x0080\n"
    )


def test_scan_for_programs(cli, users):
    """One JSON object per line."""
    assert lines(cli("scan", users, "users", "--output", "json").out) == [
        {"id": "u1", "value": "Ada"},
        {"id": "u2", "value": "two\nlines"},
        {"id": {"base64": "/w=="}, "value": {"base64": "AIA="}},
    ]


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (("--start", "u2"), ["u2", "ff"]),
        (("--end", "u2"), ["u1"]),
        (("--prefix", "u"), ["u1", "u2"]),
        (("--reverse", "--limit", "2"), ["ff", "u2"]),
        (("--limit", "0"), []),
    ],
)
def test_parts_of_a_scan(cli, users, words, keys):
    """A range, an end of it, a number of rows."""
    ran = cli("scan", users, "users", *words, "--output", "json", "--columns", "id")
    report = [row["id"] if isinstance(row["id"], str) else "ff" for row in lines(ran.out)]
    assert report == keys


def test_bounds_in_another_encoding(cli, users):
    """Bounds are bytes as keys are."""
    ran = cli("scan", users, "users", "--start", "7532", "--encoding", "hex", "--output", "json")
    assert [row["id"] for row in lines(ran.out)] == ["7532", "ff"]


def test_scan_where(cli, data):
    """Rows are chosen by their columns, and columns by name."""
    cli("create", data, "events", "-c", "amount:float64", "-c", "state:string")
    cli(
        "put",
        "--create",
        data,
        "events",
        "e1",
        '{"amount": 1}',
        "e2",
        '{"amount": 9, "state": "open"}',
    )
    words = ("--where", "amount > 5", "--columns", "state,id")
    assert cli("scan", data, "events", *words).out == "state  id\nopen   e2\n"
    ran = cli("scan", data, "events", "--where", "amount >")
    assert ran.code == 1


def test_points_in_time(cli, data):
    """An LSN, a generation, a time, a snapshot: the rows as of then."""
    db = reef.open(str(data))
    with db.writer("users", background=False) as writer:
        lsn = writer.put("u1", b"old").lsn
        db.snapshot("users", "before")
        generation = db.info("users").generation
        db.store.runtime.sleep(0.05)
        between = db.store.runtime.wall_s()
        db.store.runtime.sleep(0.05)
        writer.put("u1", b"new")
    from datetime import UTC, datetime

    time = datetime.fromtimestamp(between, UTC).isoformat()
    assert cli("get", data, "users", "u1").out == "new\n"
    times = {"lsn": lsn, "generation": generation, "time": time, "snapshot": "before"}
    for name, value in times.items():
        assert cli("get", data, "users", "u1", f"--{name}", value).out == "old\n", name
        assert "old" in cli("scan", data, "users", f"--{name}", value).out, name
    assert list(db.store.list("namespaces/users/leases/")) == []


def test_values_that_are_no_point_in_time(cli, users):
    """Two points in time, or an invalid time: a usage error. A time too far in the past: an
    error."""
    assert cli("scan", users, "users", "--lsn", "1", "--generation", "1").code == 64
    assert cli("scan", users, "users", "--time", "yesterday").code == 64
    assert cli("scan", users, "users", "--generation", "99").code == 1
    assert cli("scan", users, "users", "--snapshot", "none").code == 1


def test_a_damaged_end_of_the_log_is_reported(cli, users):
    """A reader serves the rows before the damage, and the command warns on stderr (H17)."""
    with reef.open(str(users)).writer("users", background=False) as writer:
        receipt = writer.put("u3", b"Eve")
    path = users / f"namespaces/users/wal/{receipt.lsn:020}.wal"
    path.write_bytes(path.read_bytes()[:-1])
    for words in (["scan", users, "users", "--prefix", "u"], ["get", users, "users", "u1"]):
        ran = cli(*words)
        assert ran.code == 2, "the output may be incomplete"
        assert "Ada" in ran.out
        assert "damaged" in ran.err
        assert path.name in ran.err
    for key in ("u3", "never there"):
        ran = cli("get", users, "users", key)
        assert (ran.code, ran.out) == (2, "")
        assert path.name in ran.err


# --- bytes as text ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "encoding", "text"),
    [
        (b"Ada", "auto", "Ada"),
        ("Zoë".encode(), "auto", "Zoë"),
        (b"\x1b[31m", "auto", "\\x1b[31m"),
        (b"\xff", "auto", "0xff"),
        (b"a\xff", "utf8", "a\\xff"),
        (b"Ada", "hex", "416461"),
        (b"Ada", "base64", "QWRh"),
    ],
)
def test_printable(data, encoding, text):
    """No value moves the cursor or changes the colour."""
    assert printable(data, Encoding(encoding)) == text


def test_json_has_no_nan():
    """Values that JSON lacks are text, so that every program can read them."""
    found = to_json({"a": float("nan"), "b": [float("-inf"), 1.5]}, Encoding.AUTO)
    assert json.loads(json.dumps(found, allow_nan=False)) == {"a": "NaN", "b": ["-Infinity", 1.5]}


def test_get_selects_columns(cli, data):
    """In the given order; a column that does not exist is an error."""
    cli("create", data, "people", "-c", "name:string", "-c", "age:int64")
    cli("put", data, "people", "p1", '{"name": "Ada", "age": 36}')
    got = cli("get", data, "people", "p1", "--columns", "age, id", "--output", "json")
    assert list(json.loads(got.out).items()) == [("age", 36), ("id", "p1")]
    text = cli("get", data, "people", "p1", "--columns", "age")
    assert "36" in text.out
    assert "Ada" not in text.out
    assert cli("get", data, "people", "p1", "--columns", "size").code == 1
