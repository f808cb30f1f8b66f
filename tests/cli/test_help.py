"""Every command has help with an example that runs, and a page in the docs."""

import re
import shlex
import subprocess
from pathlib import Path

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import reef
from reef.cli.main import ALIASES
from reef.cli.main import reef as root
from reef.locallog import LocalLog, LogEntry
from tests.cli.process import call

DOCS = Path(__file__).parent.parent.parent / "docs" / "cli"
REMOTE = {("store", "probe")}
"""Their examples need a server."""


def commands(group, path=()):
    """Yield every command below a group, with its path."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


ALL = list(commands(root))
NAMES = [" ".join(path) for path, _ in ALL]


def example_of(command):
    """Return the command line of a help's example."""
    return re.search(r"Example: (reef .+)", command.help)[1].strip()


@pytest.mark.parametrize(("path", "command"), ALL, ids=NAMES)
def test_every_command_has_help_with_an_example(cli, path, command):
    """Help describes the command and shows one call."""
    assert example_of(command).startswith(f"reef {' '.join(path)} ")
    ran = cli(*path, "--help")
    assert ran.code == 0
    assert "Example:" in ran.out
    assert "--output" in ran.out


@pytest.mark.parametrize(("path", "command"), ALL, ids=NAMES)
def test_every_option_has_help(path, command):
    """Every option has a help text."""
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.help, option.name


@pytest.mark.parametrize("name", [name for name in root.commands if name not in ALIASES])
def test_every_command_has_a_page(name):
    """docs/cli has a page for each command or group, which the overview links to."""
    page = DOCS / f"{name}.md"
    assert page.exists()
    assert page.read_text().startswith(f"# reef {name}\n")
    assert f"]({name}.md)" in (DOCS / "README.md").read_text()


@pytest.mark.parametrize(("path", "command"), ALL, ids=NAMES)
def test_every_page_shows_and_explains(path, command):
    """A page has a call of each of its commands, in a block that is run, and names all options."""
    name = path[0] if path[0] not in ALIASES else ALIASES[path[0]].name
    text = (DOCS / f"{name}.md").read_text()
    blocks = "".join(re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    calls = " ".join((name, *path[1:]))
    assert f"reef {calls} " in blocks
    if path[0] in ALIASES:
        assert f"reef {path[0]}" in text
    for option in command.params:
        if isinstance(option, click.Option) and option.name not in ("output", "options"):
            assert f"`{option.opts[-1]}" in text, option.opts


def test_no_page_without_a_command():
    """Removed and renamed commands have no page."""
    pages = {page.stem for page in DOCS.glob("*.md")} - {"README"}
    assert pages == root.commands.keys() - ALIASES.keys()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Return a directory in which all examples make sense."""
    path = tmp_path_factory.mktemp("examples")
    db = reef.open(str(path / "data"))
    log = {"durability": "local", "local_log": path / "users-log"}
    with db.writer("users", background=False, **log) as writer:
        writer.put("u1", b"Ada")
    db.create("docs", pa.schema([("id", pa.string()), ("body", pa.string())]))
    pq.write_table(pa.table({"id": ["p1", "p2"], "age": [36, 41]}), path / "people.parquet")
    (path / "keys.txt").write_text("u9\n")
    with LocalLog(path / "log") as log:
        log.store_logs([LogEntry(1), LogEntry(2)])
    return path


def on_a_server(words, server):
    """Put a server that is there in the place of the one that the example names."""
    server.make_bucket("bucket")
    options = {name: value for name, value in server.options().items() if name != "endpoint"}
    ours = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return [word.replace("http://127.0.0.1:9000", server.endpoint) for word in words] + ours


def prepare_snapshots(db, command):
    """Release all snapshots, and take those that a command of `reef snapshot` expects."""
    for of_bucket in db.bucket_snapshots():
        db.release_snapshot_all(of_bucket.name)
    for found in db.snapshots("users"):
        found.release()
    if command == "release-all":
        db.snapshot_all("nightly")
    if command in ("extend", "release"):
        db.snapshot("users", "monday")


@pytest.mark.parametrize(("path", "command"), ALL, ids=NAMES)
def test_every_example_runs(prepared, request, path, command):
    """As it is written, in the directory where a person would try it; a bucket is a real one."""
    words = shlex.split(example_of(command))[1:]
    if path in REMOTE:
        words = on_a_server(words, request.getfixturevalue("ministack"))
    db = reef.open(str(prepared / "data"))
    if path[0] in ("put", "delete") or path == ("log", "reapply"):
        words.append("--take-over")
    if path[0] == "snapshot":
        prepare_snapshots(db, path[1])
    if path == ("indexes", "drop"):
        db.alter("docs", add_index=reef.text_index("body", language="english"))
    if path[0] == "backup" and not path[1].startswith("create"):
        reef.jobs.backup(db, "users", prepared / "backup")
        reef.jobs.backup(db, None, prepared / "backup")
    if path == ("cursors", "drop"):
        db.cursor("users", "billing").close()
    code, _, err = call(*words, cwd=prepared)
    assert code == 0, err
    if path == ("rename",):
        db.rename("accounts", "users")


def test_the_order_of_the_help(cli):
    """Commands are in the order in which people meet them, aliases last."""
    out = cli("--help").out
    places = [re.search(rf"^  {name} ", out, re.MULTILINE).start() for name in root.commands]
    assert places == sorted(places)
    assert "Alias of fold." in out


def test_the_module_runs_too():
    """`python -m reef.cli.main` is the same command."""
    import sys

    done = subprocess.run(
        [sys.executable, "-m", "reef.cli.main", "--version"],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert done.stdout == f"reef {reef.__version__}\n"


REPOSITORY = DOCS.parent.parent
MENTIONED = re.compile(r"`reef ([a-z][^`]*)`")


def problem_of(mention):
    """Return why a command that a page mentions cannot be run; None if it can."""
    command, words = root, mention.split()
    while isinstance(command, click.Group) and words:
        found = command.get_command(None, words[0])
        if found is None:
            return f"no command {words[0]}"
        command, words = found, words[1:]
    known = {name for option in command.params for name in option.opts}
    unknown = [word for word in words if word.startswith("-") and word not in known]
    return f"no option {unknown[0]}" if unknown else None


def test_pages_mention_commands_that_exist():
    """Also within a sentence, where no test runs them: names of commands and of options."""
    pages = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
    mentions = {(page.name, text) for page in pages for text in MENTIONED.findall(page.read_text())}
    assert len(mentions) > 20
    wrong = {mention: problem_of(mention[1]) for mention in mentions}
    assert {mention: problem for mention, problem in wrong.items() if problem} == {}
