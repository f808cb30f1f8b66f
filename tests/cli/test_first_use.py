"""Options that would have no effect are refused, and errors name their subject."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

import reef
from reef.config import CompactSettings, FoldSettings, SweepSettings

DOCS = Path(__file__).parent.parent.parent / "docs"


def test_a_key_needs_columns(cli, data):
    """A plain namespace has its own key column: another one is not left out in silence."""
    ran = cli("create", data, "users", "--key", "name:string")
    assert ran.code == 64
    assert "--key requires --column" in ran.err
    assert cli("create", data, "users", "--key", "name", "-c", "age:int8").code == 0
    assert reef.open(data).info("users").key == "name"


def test_a_patch_sets_no_expiry(cli, data):
    """A row that was to expire, and does not, would be noticed too late."""
    cli("create", data, "events", "-c", "a:int64")
    ran = cli("put", "--create", data, "events", "e", '{"a": 1}', "--patch", "--ttl", 5)
    assert ran.code == 64
    assert "--ttl and --patch exclude each other" in ran.err


def test_a_timeout_needs_follow(cli, data):
    """The error speaks of options, not of arguments of Python."""
    cli("put", "--create", data, "users", "k", "v")
    ran = cli("changes", data, "users", "--timeout", 1)
    assert ran.code == 64
    assert "--timeout requires --follow" in ran.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-o", "retry=3"), "option 'retry' cannot be given as text"),
        (("-o", "page=3", "-o", "page=4"), "option 'page' is given twice"),
    ],
)
def test_options_of_stores_that_are_wrong(cli, words, said):
    """The error says which of two things is wrong."""
    ran = cli("namespaces", "memory://", *words)
    assert ran.code == 1
    assert said in ran.err


def test_a_type_that_is_none_names_its_column(cli, data):
    """Of several columns, which one; and where the types are listed."""
    ran = cli("create", data, "events", "-c", "a:int64", "-c", "b:number")
    assert ran.code == 1
    assert "column b: 'number' is not the name of a column type" in ran.err
    assert "reef create --help" in ran.err


def test_a_row_that_is_wrong_names_its_key(cli, data):
    """Of several rows in one call, which one."""
    cli("create", data, "events", "-c", "a:float64")
    for row in ('{"a": "much"}', "no JSON", "[]"):
        ran = cli("put", "--create", data, "events", "e1", '{"a": 1}', "e2", row)
        assert ran.code == 1
        assert "error: key e2: " in ran.err


def test_lists_of_texts_have_one_heading(cli, data):
    """Not the same word twice, one below the other."""
    cli("put", "--create", data, "users", "k", "v")
    with (data / "namespaces/users/wal" / f"{2:020}.wal").open("ab") as damaged:
        damaged.write(b"x")
    lines = cli("repair", data, "users").out.splitlines()
    at = lines.index("actions")
    assert lines[at - 1] == ""
    assert lines[at + 1].startswith("copy namespaces/users/wal/")


@pytest.mark.parametrize(
    ("page", "settings"),
    [
        ("cli/fold.md", FoldSettings),
        ("cli/sweep.md", SweepSettings),
        ("operations/compaction.md", CompactSettings),
    ],
)
def test_every_setting_is_documented(page, settings):
    """Every setting that `--set` accepts is on a page, and every one on the page is accepted."""
    text = (DOCS / page).read_text()
    for field in dataclasses.fields(settings):
        assert f"`{field.name}`" in text, field.name


@pytest.mark.parametrize(("command", "settings"), [("index", FoldSettings), ("gc", SweepSettings)])
def test_help_has_every_setting(cli, command, settings):
    """They are in the help too."""
    report = cli(command, "--help").out
    for field in dataclasses.fields(settings):
        assert field.name in report


@pytest.mark.parametrize("module", ["reef", "reef_command"])
def test_the_command_without_its_script(module):
    """`python -m reef` is the same, for where the script is not on the path."""
    ran = subprocess.run(
        [sys.executable, "-m", module, "--version"],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert ran.stdout == f"reef {reef.__version__}\n"
