"""Every code block in the documentation runs; every link leads somewhere."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import replay
from tests.docs.examples import without_examples
from tests.support.forked_commands import forked_commands
from tests.support.spark_sessions import QUICK

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


def blocks(page, language):
    """Return the blocks of one language."""
    text = without_examples(page.read_text())
    return [code for name, code in BLOCK.findall(text) if name == language]


def ids(page):
    """Name a page as readers do."""
    return str(page.relative_to(ROOT))


def program_of(page):
    """Return the blocks of a page as one program."""
    return "\n".join(blocks(page, "python"))


WITH_SPARK = [page for page in PAGES if "import SparkSession" in program_of(page)]
WITHOUT_SPARK = [page for page in PAGES if blocks(page, "python") and page not in WITH_SPARK]
EXAMPLES = ["event_log.py", "idempotent_etl.py", "live_analytics.py", "search.py"]
SPARK_EXAMPLES = ["feature_store.py", "streams.py 2", "demo.py --rows 4000 --path demo"]
"""Programs with their arguments; both kinds share a process with the pages, since a JVM takes
longer to start than all of them to run, and a Python longer than most of them."""
RUN_EACH = """
import json, os, runpy, shutil, sys, traceback
failures = {}
for name, path, *sys.argv[1:] in json.loads(sys.argv[1]):
    sys.argv[0] = path
    try:
        runpy.run_path(path, run_name="__main__")
    except BaseException:
        failures[name] = traceback.format_exc()
    spark = getattr(sys.modules.get("pyspark.sql"), "SparkSession", None)
    if spark is not None and spark.getActiveSession():
        spark.getActiveSession().stop()  # the next one has a catalog of its own
    for entry in os.listdir():  # the JVM and its Python processes stay where they were started
        shutil.rmtree(entry) if os.path.isdir(entry) else os.remove(entry)
sys.exit("\\n".join(f"{name}\\n{trace}" for name, trace in failures.items()) or 0)
"""


def spark_conf(folder):
    """Write the settings of sessions for short jobs, which pages do not mention."""
    folder.mkdir()
    lines = [f"{name} {value}\n" for name, value in QUICK.items()]
    (folder / "spark-defaults.conf").write_text("".join(lines))
    return folder


def run_each(pages, programs, tmp_path):
    """Run pages and programs in one process, each in an empty directory; all failures at once."""
    (tmp_path / "here").mkdir()
    runs = []
    for number, page in enumerate(pages):
        path = tmp_path / f"page{number}-{page.stem}.py"
        path.write_text(program_of(page))
        runs.append([ids(page), str(path)])
    for line in programs:
        program, *arguments = line.split()
        runs.append([program, str(ROOT / "examples" / program), *arguments])
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN_EACH, json.dumps(runs)],
        cwd=tmp_path / "here",
        env={**os.environ, "SPARK_CONF_DIR": str(spark_conf(tmp_path / "conf"))},
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )


@pytest.mark.timeout(600)
def test_python_blocks_and_examples_run(tmp_path):
    """The blocks of a page run in order, as one program; so do the examples."""
    done = run_each(WITHOUT_SPARK, EXAMPLES, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "totals: {'sale': 1, 'view': 4}" in done.stdout
    assert "totals: {'s0': 600, 's1': 600, 's2': 600}" in done.stdout
    assert "just written: notes.zanzibar\ndeleted: 0 rows" in done.stdout


@pytest.mark.timeout(600)
def test_python_blocks_and_examples_with_spark_run(tmp_path):
    """So do those about Spark, and a small `make demo`: it checks each of its steps itself."""
    assert WITH_SPARK
    done = run_each(WITH_SPARK, SPARK_EXAMPLES, tmp_path)
    assert done.returncode == 0, done.stderr
    for line in ("acknowledged live orders are there, none is lost", "repaired from the log"):
        assert line in done.stdout


def test_a_page_that_fails_is_named(tmp_path):
    """With its error; the pages after it still run."""
    bad, good = tmp_path / "bad.py", tmp_path / "good.py"
    bad.write_text("assert 1 == 2, 'wrong'")
    good.write_text("print('ran', __import__('sys').argv[1:])")
    runs = [["a bad page", str(bad)], ["good", str(good), "-x"]]
    (tmp_path / "here").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", RUN_EACH, json.dumps(runs)],
        cwd=tmp_path / "here",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("a bad page\n")
    assert "AssertionError: wrong" in done.stderr
    assert done.stdout == "ran ['-x']\n"


def test_every_example_runs_in_a_test():
    """Here, or in the tests of its part."""
    run = {line.split()[0] for line in [*EXAMPLES, *SPARK_EXAMPLES]}
    assert {path.name for path in ROOT.glob("examples/*.py")} == run | {"catalog.py", "typed.py"}


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """A folder in which the command `reef` starts at once."""
    with forked_commands(tmp_path_factory.mktemp("bin")) as folder:
        yield folder


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "sh")], ids=ids)
def test_shell_blocks_run(page, tmp_path, commands):
    """Commands run as written; `make` targets must exist."""
    makefile = (ROOT / "Makefile").read_text()
    path = f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    for block in blocks(page, "sh"):
        for line in block.splitlines():
            if line.startswith("make "):
                assert re.search(rf"^{line.split()[1]}:", makefile, re.MULTILINE), line
            elif line.strip():
                done = subprocess.run(
                    ["bash", "-ec", line],
                    cwd=tmp_path,
                    env={**os.environ, "PATH": path},
                    capture_output=True,
                    text=True,
                    timeout=240,
                    check=False,
                )
                assert done.returncode == 0, f"{line}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_somewhere(page):
    """Relative links name files that exist."""
    for target in LINK.findall(page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_all_blocks_are_of_a_kind_that_is_tested(page):
    """A block is python or sh, and runs, or is a drawing without a language."""
    kinds = {name for name, _ in BLOCK.findall(page.read_text())}
    assert kinds <= {"python", "sh", ""}


def test_every_table_has_a_head():
    """Rows without one, for instance after an empty line, would be shown as they are written."""
    for page in PAGES:
        text = BLOCK.sub("", page.read_text())
        for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
            rows = table.splitlines()
            assert re.fullmatch(r"\|[-:| ]+\|", rows[1] if len(rows) > 1 else ""), (page, rows[0])


def test_every_store_option_is_documented():
    """The stores page lists each option of s3://, and only those."""
    from dataclasses import fields

    from reef.stores.s3 import S3Options

    page = (ROOT / "docs" / "operations" / "stores.md").read_text()
    section = page.split("## S3 options")[1].split("Sets that work")[0]
    listed = {
        name
        for row in section.splitlines()
        if row.startswith("| `")
        for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    assert listed == {field.name for field in fields(S3Options)}


def test_a_replay_ignores_times_and_ids_only():
    """Counts and texts are compared; a make target's outline is its steps."""
    output = (
        "8 rows in 1.25 s, 3.0 MB\nid 01M7PKF8VZ0B614803WYSECP0J\n/tmp/x/y at 2026-11-18T06:00Z\n"
    )
    assert replay.normalized(output) == "8 rows in … s, … MB\nid …\n… at …\n"
    assert replay.normalized("9 rows\n") != replay.normalized("8 rows\n")
    assert replay.outline("make: x\n1. Start\n   2.0 s  done\n2. Stop\n") == "1. Start\n2. Stop\n"


def test_a_replay_runs_everything_that_a_page_shows():
    """Python as one program, each shell command, and the program of a guide."""
    titles = [title for title, _ in replay.commands(ROOT / "docs" / "guide" / "feature-store.md")]
    assert titles == ["python examples/feature_store.py"]
    titles = [title for title, _ in replay.commands(ROOT / "README.md")]
    assert titles[:2] == ["python", "make demo"]
    assert "reef scan ./shop users" in titles


@pytest.mark.parametrize("page", replay.pages(), ids=ids)
def test_every_replayed_page_has_a_transcript(page):
    """Of the commands that the page has now, none of which has failed."""
    transcript = (replay.TRANSCRIPTS / f"{page.stem}.txt").read_text()
    shown = [line[2:] for line in transcript.splitlines() if line.startswith("$ ")]
    assert shown == [title for title, _ in replay.commands(page)]
    assert "exit status" not in transcript.replace("exit status -9", "")  # a guide kills programs
