"""Every code block in the documentation runs; every link leads somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


def blocks(page, language):
    """Return the blocks of one language."""
    return [code for name, code in BLOCK.findall(page.read_text()) if name == language]


def ids(page):
    """Name a page as readers do."""
    return str(page.relative_to(ROOT))


def program_of(page):
    """Return the blocks of a page as one program."""
    return "\n".join(blocks(page, "python"))


WITH_SPARK = [page for page in PAGES if "import SparkSession" in program_of(page)]
"""These share a process, since a JVM takes longer to come up than all of them to run."""
RUN_EACH = """
import os, shutil, sys
for path in sys.argv[1:]:
    exec(compile(open(path).read(), path, "exec"), {"__name__": "__main__"})
    for name in os.listdir():  # the JVM and its Python processes stay where they were started
        shutil.rmtree(name) if os.path.isdir(name) else os.remove(name)
"""


@pytest.mark.parametrize(
    "page", [p for p in PAGES if blocks(p, "python") and p not in WITH_SPARK], ids=ids
)
def test_python_blocks_run(page, tmp_path):
    """The blocks of a page run in order, as one program, in an empty directory."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program_of(page)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(600)
def test_python_blocks_with_spark_run(tmp_path):
    """So do those of the pages about Spark: one after the other, each in an empty directory."""
    assert WITH_SPARK
    programs = []
    (tmp_path / "here").mkdir()
    for number, page in enumerate(WITH_SPARK):
        programs.append(tmp_path / f"page{number}-{page.name}.py")
        programs[-1].write_text(program_of(page))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN_EACH, *map(str, programs)],
        cwd=tmp_path / "here",
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "sh")], ids=ids)
def test_shell_blocks_run(page, tmp_path):
    """Commands run as written; `make` targets must exist."""
    makefile = (ROOT / "Makefile").read_text()
    binaries = Path(sys.executable).parent
    for block in blocks(page, "sh"):
        for line in block.splitlines():
            if line.startswith("make "):
                assert re.search(rf"^{line.split()[1]}:", makefile, re.MULTILINE), line
            elif line.strip():
                done = subprocess.run(
                    ["bash", "-ec", line],
                    cwd=tmp_path,
                    env={**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}"},
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


def test_the_demo_runs(tmp_path):
    """`make demo` shows what it says."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert "the second writer replayed everything: 1000 rows" in done.stdout
    assert "created: 1, exists: 31" in done.stdout
    assert "brings it back, every time" in done.stdout


def test_every_store_option_is_documented():
    """The stores page lists each option of s3://, and only those."""
    from dataclasses import fields

    from reef.stores.s3_options import S3Options

    page = (ROOT / "docs" / "operations" / "stores.md").read_text()
    section = page.split("## S3 options")[1].split("Sets that work")[0]
    listed = {
        name
        for row in section.splitlines()
        if row.startswith("| `")
        for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    assert listed == {field.name for field in fields(S3Options)}
