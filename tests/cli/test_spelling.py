"""The words that a user tries first work, or the error has the ones that do."""

import io

import pyarrow as pa
import pytest

import reef
from reef.formats.schema import parse_type, type_name

ROW = '{"t": "12:00:01", "n": "23:59:59.000001", "l": null}'


@pytest.fixture
def table(cli, data):
    """Return the bucket, with a table of times."""
    assert (
        cli(
            "create", data, "events", "-c", "t:time", "-c", "n:time64[ns]", "-c", "l:time32[s]"
        ).code
        == 0
    )
    return data


def test_times_of_day_are_iso_text(cli, table, tmp_path):
    """In `reef put`, and in files of JSON lines and CSV."""
    assert cli("put", table, "events", "e1", ROW).code == 0
    (tmp_path / "rows.jsonl").write_text(
        '{"id": "e2", "t": "12:00:01.5", "n": "00:00:00.123456789"}\n{"id": "e3", "l": "07:30"}\n'
    )
    (tmp_path / "rows.csv").write_text("id,t\ne4,12:00:01\n")
    for file in ("rows.jsonl", "rows.csv"):
        ran = cli("import", table, "events", tmp_path / file)
        assert ran.code == 0, ran.err
    with reef.open(table).reader("events") as reader:
        rows = reader.to_arrow()
    assert rows["t"].cast(pa.int64()).to_pylist() == [
        43_201_000_000,
        43_201_500_000,
        None,
        43_201_000_000,
    ]
    assert rows["n"].cast(pa.int64()).to_pylist()[:2] == [86_399_000_001_000, 123_456_789]
    assert rows["l"].cast(pa.int32()).to_pylist() == [None, None, 27_000, None]


@pytest.mark.parametrize("text", ["noon", "25:00", "12:00:01+02:00", "1:2", "12:00:01.1234567891"])
def test_a_text_that_is_no_time(cli, table, tmp_path, text):
    """The error names key and column, or file, row and column."""
    ran = cli("put", table, "events", "e1", f'{{"t": "{text}"}}')
    assert ran.code == 1
    assert "key e1: column t: " in ran.err
    (tmp_path / "rows.jsonl").write_text(
        f'{{"id": "a", "t": "12:00"}}\n{{"id": "b", "t": "{text}"}}\n'
    )
    ran = cli("import", table, "events", tmp_path / "rows.jsonl")
    assert ran.code == 1
    assert "row 1, column t: " in ran.err


def test_a_time_that_is_too_precise(cli, table):
    """A fraction that the column cannot hold is not cut off."""
    assert "column l: " in cli("put", table, "events", "e1", '{"l": "12:00:01.5"}').err


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("time", "time[us]"),
        ("time64[us]", "time[us]"),
        ("time32[ms]", "time[ms]"),
        ("date32[day]", "date"),
        ("double", "float64"),
        ("timestamp", "timestamp[us]"),
        ("timestamp[us, tz=UTC]", "timestamp[us, UTC]"),
        ("decimal128(10,2)", "decimal(10, 2)"),
        ("list<item: double>", "list<float64>"),
        ("fixed_size_list<item: float>[3]", "vector<float32, 3>"),
        ("vector<double,3>", "vector<float64, 3>"),
        ("map<string,time>", "map<string, time[us]>"),
        ("struct<city: string, zip:int32>", 'struct<"city": string, "zip": int32>'),
        ('struct<"a, b": list<element: int8>,c: utf8>', 'struct<"a, b": list<int8>, "c": string>'),
    ],
)
def test_types_as_people_write_them(text, name):
    """Arrow's names and Reef's mean the same; what Arrow prints is read back."""
    parsed = parse_type(text)
    assert type_name(parsed) == name
    if '"a, b"' not in name:  # Arrow does not quote names
        assert type_name(parse_type(str(parsed))) == name
    assert parse_type(name) == parsed


@pytest.mark.parametrize("text", ["number", "list<>", "struct<a>", "map<string>", "struct<: int8>"])
def test_a_type_that_is_none(text):
    """The error has the text as it was written."""
    with pytest.raises(reef.InvalidInputError, match="is not the name of a column type"):
        parse_type(text)


@pytest.mark.parametrize(
    "words", [["drop"], ["verify"], ["history"], ["stats"], ["fold"], ["get", "k"], ["compact"]]
)
def test_every_command_suggests_a_similar_namespace(cli, data, words):
    """As readers and writers do."""
    cli("put", "--create", data, "users", "k", "v")
    ran = cli(words[0], data, "usres", *words[1:])
    assert ran.code == 1
    assert "there is no namespace usres" in ran.err
    assert "Did you mean users?" in ran.err


@pytest.mark.parametrize("method", ["info", "drop", "stats", "history", "reader", "snapshot"])
def test_every_method_suggests_a_similar_namespace(method):
    """At the cost of a LIST, after the error."""
    db = reef.open("memory://")
    db.create("users")
    with pytest.raises(reef.NotFoundError) as raised:
        getattr(db, method)("usres")
    assert raised.value.hint == "Did you mean users?"


def test_hints_name_commands(cli, data, tmp_path):
    """Of the command line, next to the methods of Python."""
    cli("put", "--create", data, "users", "k", "v")
    assert "reef namespaces --dropped" in cli("undrop", data, "users").err
    pytest.importorskip("duckdb")
    assert "reef put" in cli("sql", data, "INSERT INTO users VALUES (1)").err
    ran = cli("export", data, "users", tmp_path / "out", "--format", "csv")
    assert "--format csv --to" in ran.err
    with pytest.raises(reef.InvalidInputError) as raised:
        reef.jobs.export(reef.open(data), "users", tmp_path / "out", format="csv")
    assert "to_arrow()" in raised.value.hint


def test_a_snapshot_that_never_was(cli, data):
    """The error lists those that are there."""
    pytest.importorskip("duckdb")
    cli("put", "--create", data, "users", "k", "v")
    ran = cli("sql", data, "SELECT * FROM users AS OF 'nix'")
    assert "it was never taken, was released, or has expired" in ran.err
    cli("snapshot", "take", data, "users", "monday")
    assert "There are: monday" in cli("sql", data, "SELECT * FROM users AS OF 'nix'").err
    with pytest.raises(reef.InvalidInputError) as raised:
        reef.open(data).reader("users", as_of="monday")
    assert "snapshot='monday'" in raised.value.hint


def test_a_condition_on_a_field(cli, data):
    """It is for SQL, and the error says so."""
    cli("create", data, "people", "-c", "p:struct<city: string>")
    assert "reef sql" in cli("scan", data, "people", "--where", "p.city = 'R'").err


def test_a_file_that_is_missing(cli, data, tmp_path):
    """The error has its path."""
    cli("put", "--create", data, "users", "k", "v")
    missing = tmp_path / "missing.csv"
    assert f"there is no file {missing}" in cli("import", data, "users", missing).err


def test_dot_commands_in_a_script(cli, data, monkeypatch):
    """What a shell takes, a pipe does; a statement has several lines, the last no semicolon."""
    pytest.importorskip("duckdb")
    cli("put", "--create", data, "users", "k", "v")
    script = ".tables\n.schema users\nSELECT\n count(*) AS n FROM users;\nSELECT 7 AS seven\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(script))
    ran = cli("sql", data)
    assert ran.code == 0, ran.err
    assert ran.out.split() == ["users", "id", "binary", "value", "binary", "n", "1", "seven", "7"]
