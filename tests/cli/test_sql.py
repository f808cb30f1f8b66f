"""`reef sql`: one query, statements from stdin, and the shell."""

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import reef
from reef.cli.output import Output
from reef.cli.sql import Shell
from reef.engine.handles.sql import split_statements


@pytest.fixture
def shop(data):
    """Return a bucket with users and orders."""
    with reef.open(str(data)) as db:
        db.create("users", pa.schema([("id", pa.string()), ("name", pa.string())]))
        schema = [("id", pa.string()), ("user", pa.string()), ("amount", pa.float64())]
        db.create("orders", pa.schema(schema))
        with db.writer("users", background=False) as writer:
            writer.upsert([{"id": "u1", "name": "Ada"}])
            db.snapshot("users", "nightly")
            writer.upsert([{"id": "u2", "name": "Bob"}])
        with db.writer("orders", background=False) as writer:
            writer.upsert([{"id": f"o{n}", "user": f"u{n % 2 + 1}", "amount": n} for n in range(4)])
    return data


JOIN = (
    "SELECT u.name, sum(o.amount) AS total FROM users u JOIN orders o ON o.user = u.id "
    "GROUP BY ALL ORDER BY 1"
)


def test_a_query_for_people_and_programs(cli, shop):
    """Aligned columns, or one JSON object per line."""
    assert cli("sql", shop, JOIN).out == "name  total\nAda   2.0\nBob   4.0\n"
    ran = cli("sql", shop, JOIN, "--output", "json")
    assert [json.loads(line) for line in ran.out.splitlines()] == [
        {"name": "Ada", "total": 2.0},
        {"name": "Bob", "total": 4.0},
    ]
    assert cli("sql", shop, JOIN, "--format", "json").out == ran.out


def test_csv_and_parquet(cli, shop, tmp_path):
    """To stdout or to a new file; a query that fails leaves no file."""
    assert cli("sql", shop, JOIN, "--format", "csv").out == '"name","total"\n"Ada",2\n"Bob",4\n'
    target = tmp_path / "totals.parquet"
    assert cli("sql", shop, JOIN, "--format", "parquet", "--to", target).code == 0
    assert pq.read_table(target).to_pydict() == {"name": ["Ada", "Bob"], "total": [2.0, 4.0]}
    again = cli("sql", shop, JOIN, "--format", "parquet", "--to", target)
    assert again.code == 1
    assert "exists" in again.err
    failed = tmp_path / "failed.csv"
    query = "SELECT CAST(name AS INT) FROM users"
    assert cli("sql", shop, query, "--format", "csv", "--to", failed).code == 1
    assert not failed.exists()
    assert cli("sql", shop, JOIN, "--to", failed).code == 64
    assert cli("sql", shop, "--to", failed).code == 64


def test_the_past(cli, shop):
    """By AS OF or by a name with @."""
    for table in ("users AS OF 'nightly'", '"users@nightly"'):
        assert cli("sql", shop, f"SELECT name FROM {table}").out == "name\nAda\n"


def test_errors(cli, shop):
    """Writes are rejected with a hint, unknown names with a similar one."""
    ran = cli("sql", shop, "DELETE FROM users")
    assert ran.code == 1
    assert "SQL is read-only here" in ran.err
    ran = cli("sql", shop, "SELECT * FROM uesrs", "--output", "json")
    assert json.loads(ran.err)["hint"] == "Did you mean users?"


def test_statements_from_stdin(cli, shop, monkeypatch):
    """Without a query and a terminal, all statements are run; the last needs no semicolon."""
    text = "SELECT count(*) AS n FROM users;\n-- a ; comment\nSELECT 'a;b' AS t"
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert cli("sql", shop).out == "n\n2\nt\na;b\n"


def test_statements_are_split_at_semicolons_only():
    """Not within texts, names and comments; an unclosed one continues on the next line."""
    assert split_statements("a; b ;") == (["a", " b "], "")
    assert split_statements("';' \";\" /* ; */ -- ;\n; rest") == (
        ["';' \";\" /* ; */ -- ;\n"],
        " rest",
    )
    assert split_statements("SELECT 'a;\n") == ([], "SELECT 'a;\n")
    assert split_statements("x /* ;\n") == ([], "x /* ;\n")
    assert split_statements(" ; ;") == ([], "")


def test_the_shell(shop, capsys):
    """Statements over several lines, commands, errors that do not end it, Ctrl-C and Ctrl-D."""
    typed = [
        "SELECT name",
        "FROM users WHERE id = 'u1';",
        "SELECT * FROM nothing;",
        "SELECT 1 +",
        KeyboardInterrupt,
        ".tables",
        ".schema users",
        ".schema nothing",
        ".what",
        "SELECT count(*) AS n FROM orders; SHOW TABLES;",
        EOFError,
    ]
    prompts = []

    def read(prompt):
        prompts.append(prompt)
        line = typed.pop(0)
        if isinstance(line, str):
            return line
        raise line

    with reef.open(str(shop)) as db:
        Shell(Output(), db, "text", read).prompt()
    printed = capsys.readouterr()
    assert printed.out.startswith("name\nAda\n\norders\nusers\nid  string\nname  string\n")
    assert ".tables         list the namespaces" in printed.out
    assert printed.out.endswith("n\n4\nname\norders\nusers\n\n")
    assert printed.err.count("error: there is no namespace nothing") == 2
    assert prompts[:3] == ["reef> ", "   ...> ", "reef> "]
    assert not typed


def test_quit_ends_the_shell(shop):
    """So does its other name."""
    with reef.open(str(shop)) as db:
        for word in (".quit", ".exit"):
            Shell(Output(), db, "text", lambda _, word=word: word).prompt()
