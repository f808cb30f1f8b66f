"""`reef create`, `put` and `delete`."""

import json

import pytest

import reef


def values(data, name="users"):
    """Return the rows of a namespace."""
    return dict(reef.open(str(data)).reader(name).scan())


def objects(data):
    """Return every object of the bucket, with its bytes."""
    store = reef.open(str(data)).store
    return {info.key: store.get(info.key) for info in store.list()}


# --- create -------------------------------------------------------------------------


def test_create_a_plain_namespace(cli, data):
    """Without columns it is a key-value store, and no writer is needed for it."""
    ran = cli("create", data, "users", "--output", "json")
    assert ran.code == 0
    assert json.loads(ran.out)["columns"] == {"id": "binary", "value": "binary"}
    assert reef.open(str(data)).info("users").writer_epoch == 0


def test_create_with_columns(cli, data):
    """Types are Reef's own names; the key may be named and typed."""
    words = ("-c", "amount:float64", "-c", "at:timestamp[us, UTC]", "-c", "tags:list<string>")
    ran = cli("create", data, "events", "--key", "event:binary", *words)
    assert ran.code == 0, ran.err
    info = reef.open(str(data)).info("events")
    assert info.key == "event"
    assert [str(field.type) for field in info.schema] == [
        *("binary", "double", "timestamp[us, tz=UTC]"),
        "list<item: string>",
    ]


def test_create_twice(cli, data):
    """The same columns are fine; others are a conflict that names those there are."""
    assert cli("create", data, "events", "-c", "a:int64").code == 0
    assert cli("create", data, "events", "-c", "a:int64").code == 0
    ran = cli("create", data, "events", "-c", "b:int64")
    assert ran.code == 1
    assert "id, a" in ran.err


@pytest.mark.parametrize(
    ("words", "code", "report"),
    [
        (("-c", "a:money"), 1, "'money'"),
        (("-c", "a"), 64, "NAME:TYPE"),
        (("-c", ":int8"), 64, "NAME:TYPE"),
        (("-c", "_a:int8"), 1, "_a"),
        (("--key", "id:int64", "-c", "a:int8"), 1, "a key is string or binary"),
    ],
)
def test_create_with_wrong_columns(cli, data, words, code, report):
    """The message names the column, and nothing is made."""
    ran = cli("create", data, "events", *words)
    assert ran.code == code
    assert report in ran.err
    assert reef.open(str(data)).namespaces() == []


# --- put ----------------------------------------------------------------------------


def test_put_is_one_batch(cli, data):
    """Several pairs share one LSN; the receipt is reported."""
    ran = cli("put", "--create", data, "users", "u1", "Ada", "u2", "Bob", "--output", "json")
    receipt = json.loads(ran.out)
    assert (ran.code, receipt["lsn"], receipt["ops"]) == (0, 2, 2)
    assert values(data) == {b"u1": b"Ada", b"u2": b"Bob"}


def test_put_for_people(cli, data):
    """One line, with the position."""
    assert cli("put", "--create", data, "users", "u1", "Ada").out == (
        "committed at LSN 2: 1 operation in users\n"
    )


@pytest.mark.parametrize(
    ("encoding", "key", "value"),
    [("hex", "ff00", "0x0102"), ("base64", "/wA=", "AQI=")],
)
def test_put_bytes(cli, data, encoding, key, value):
    """Bytes can be written as hexadecimal digits or base64."""
    assert cli("put", "--create", data, "users", key, value, "--encoding", encoding).code == 0
    assert values(data) == {b"\xff\x00": b"\x01\x02"}


@pytest.mark.parametrize("encoding", ["hex", "base64"])
def test_put_bytes_that_are_none(cli, data, encoding):
    """A value in another encoding than said is refused before anything is written."""
    ran = cli("put", "--create", data, "users", "zz!", "00", "--encoding", encoding)
    assert ran.code == 1
    assert f"is not {encoding}" in ran.err
    assert objects(data) == {}


def test_put_a_row(cli, data):
    """Where there are columns, a value is a JSON object; JSON lacks points in time, bytes and
    NaN."""
    columns = ("at:timestamp[us, UTC]", "day:date", "price:decimal(10, 2)", "raw:binary")
    words = [
        word
        for column in (*columns, "x:float64", "v:vector<float32, 2>", "n:int64")
        for word in ("-c", column)
    ]
    assert cli("create", data, "events", *words).code == 0
    row = {
        "at": "2026-01-02T03:04:05.000006Z",
        "day": "2026-01-02",
        "price": 1.10,
        "raw": "abc",
        "x": "NaN",
        "v": [0.5, 1],
        "n": 9007199254740993,
    }
    assert cli("put", "--create", data, "events", "e1", json.dumps(row)).code == 0
    report = json.loads(cli("get", data, "events", "e1", "--output", "json").out)
    assert report == {
        "id": "e1",
        "at": "2026-01-02 03:04:05.000006Z",
        "day": "2026-01-02",
        "price": "1.10",
        "raw": "abc",
        "x": "NaN",
        "v": [0.5, 1.0],
        "n": 9007199254740993,
    }


def test_patch_sets_only_the_named_columns(cli, data):
    """The other columns stay as they are."""
    cli("create", data, "events", "-c", "a:int64", "-c", "b:string")
    cli("put", "--create", data, "events", "e1", '{"a": 1, "b": "x"}')
    assert (
        cli("put", "--create", data, "events", "e1", '{"a": 2}', "--patch", "--take-over").code == 0
    )
    assert reef.open(str(data)).reader("events").get("e1") == {"id": "e1", "a": 2, "b": "x"}


@pytest.mark.parametrize(
    ("value", "report"),
    [
        ("nonsense", "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"c": 1}', "c"),
        ('{"a": "x"}', "a"),
        ('{"at": "yesterday"}', "'yesterday' is not timestamp"),
    ],
)
def test_rows_that_do_not_fit(cli, data, value, report):
    """Each is an error that names the column or the text, and nothing is committed."""
    cli("create", data, "events", "-c", "a:int64", "-c", "at:timestamp[us, UTC]")
    ran = cli("put", "--create", data, "events", "e1", value)
    assert ran.code == 1
    assert report in ran.err
    assert values(data, "events") == {}


def test_put_from_a_file(cli, data, tmp_path):
    """The file's bytes are the value, whatever the encoding."""
    (tmp_path / "value").write_bytes(b"\x00\xff\n")
    words = ("--from", tmp_path / "value", "--encoding", "hex")
    assert cli("put", "--create", data, "users", "6b", *words).code == 0
    assert values(data) == {b"k": b"\x00\xff\n"}


def test_put_with_conditions(cli, data):
    """A condition that is false is an error, and nothing is changed."""
    assert cli("put", "--create", data, "users", "u1", "Ada", "--if-absent").code == 0
    ran = cli(
        "put",
        "--create",
        data,
        "users",
        "u1",
        "Eve",
        "--if-absent",
        "--take-over",
        "--output",
        "json",
    )
    assert ran.code == 1
    assert json.loads(ran.err)["kind"] == "condition_failed"
    assert (
        cli("put", "--create", data, "users", "u1", "Eve", "--if-present", "--take-over").code == 0
    )
    assert values(data) == {b"u1": b"Eve"}


def test_put_once(cli, data):
    """The same idempotency key returns the first receipt, and nothing is written again."""
    words = ("put", data, "users", "u1", "Ada", "--idempotency-key", "job-1", "--create")
    assert "committed at LSN 2" in cli(*words).out
    assert "was committed before at LSN 2" in cli(*words).out


def test_put_that_expires(cli, data):
    """A row with a time to live is gone when that has passed."""
    assert cli("put", "--create", data, "users", "u1", "Ada", "--ttl", "0.01").code == 0
    reef.open(str(data)).store.runtime.sleep(0.05)
    assert cli("get", data, "users", "u1").code == 1


@pytest.mark.parametrize(
    "words",
    [
        ("u1",),
        ("u1", "Ada", "u2"),
        ("u1", "Ada", "--from", "-"),
        ("u1", "--from", "no-such-file"),
        ("u1", "Ada", "--if-absent", "--if-present"),
        ("u1", "Ada", "--nonsense"),
    ],
)
def test_put_wrongly(cli, data, words):
    """The command line is wrong, and nothing is made."""
    assert cli("put", "--create", data, "users", *words).code == 64
    assert not data.exists() or objects(data) == {}


def test_patching_a_plain_namespace(cli, data):
    """There are no columns to choose from."""
    ran = cli("put", "--create", data, "users", "u1", "Ada", "--patch")
    assert ran.code == 1
    assert "--patch" in ran.err


# --- the writer role ----------------------------------------------------------------


@pytest.mark.parametrize("words", [("put", "u1", "Eve"), ("delete", "u1")])
def test_the_role_is_not_taken_by_accident(cli, data, words):
    """While another writer is at work: refused, it is named, and not one object changes."""
    with reef.open(str(data)).writer("users", background=False) as users:
        users.put("u1", b"Ada")
        before = objects(data)
        command, *rest = words
        ran = cli(command, data, "users", *rest)
        assert ran.code == 1
        assert users._committer.opened.writer_id in ran.err
        assert "--take-over" in ran.err
        assert objects(data) == before
        users.put("u1", b"still here")


def test_the_role_is_taken_on_request(cli, data):
    """The other writer is fenced."""
    with reef.open(str(data)).writer("users", background=False) as users:
        users.put("u1", b"Ada")
        assert cli("put", "--create", data, "users", "u1", "Eve", "--take-over").code == 0
        with pytest.raises(reef.FencedError):
            users.put("u1", b"Ada again")
    assert values(data) == {b"u1": b"Eve"}


def test_a_refusal_for_programs(cli, data):
    """Its kind distinguishes it from other errors."""
    writer = reef.open(str(data)).writer("users")
    writer.put("u1", b"Ada")
    ran = cli("put", "--create", data, "users", "u1", "Eve", "--output", "json")
    report = json.loads(ran.err)
    assert (ran.code, report["kind"]) == (1, "conflict")
    assert "--take-over" in report["hint"]


# --- delete -------------------------------------------------------------------------


def test_delete(cli, data):
    """Keys, a range, all that begin alike: in one batch."""
    pairs = [word for key in ("a1", "a2", "b1", "b2", "c", "d") for word in (key, "x")]
    cli("put", "--create", data, "users", *pairs)
    words = ("a1", "unknown", "--prefix", "b", "--start", "c", "--end", "d", "--take-over")
    ran = cli("delete", data, "users", *words, "--output", "json")
    assert (ran.code, json.loads(ran.out)["ops"]) == (0, 4)
    assert values(data) == {b"a2": b"x", b"d": b"x"}


@pytest.mark.parametrize("words", [(), ("--start", "a"), ("--prefix", ""), ("u1", "--end", "b")])
def test_delete_wrongly(cli, data, words):
    """A range needs both ends; nothing at all is not everything."""
    cli("put", "--create", data, "users", "u1", "Ada")
    before = objects(data)
    assert cli("delete", data, "users", *words, "--take-over").code == 64
    assert objects(data) == before


def test_deleting_makes_no_namespace(cli, data):
    """There is nothing to delete from."""
    ran = cli("delete", data, "users", "u1")
    assert ran.code == 1
    assert "no namespace users" in ran.err
    assert objects(data) == {}
