"""The documentation site: it builds without a warning, and its hooks do what they say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import site_hooks

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site as `make docs` does: a broken link, anchor or an omitted page is an error."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_in_the_navigation(site):
    """Also those of folders whose pages mkdocs.yml does not list one by one."""
    home = (site / "index.html").read_text()
    pages = [p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")]
    missing = [page for page in pages if _address(page) not in home]
    assert missing == []


def _address(page):
    return f'href="{re.sub("README.md$", "index.md", page).removesuffix(".md")}.html"'


def test_the_site_needs_no_other_host(site):
    """Neither fonts nor scripts nor styles are loaded from elsewhere."""
    loaded = re.compile(r'<(?:script|link|img)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]+"')
    for page in site.rglob("*.html"):
        assert not loaded.search(page.read_text()), page


def test_the_first_use_of_a_word_is_linked_to_its_definition(site):
    """Each of the words that a new user meets, on a page that defines none of them."""
    page = (site / "operations" / "views.html").read_text()
    for anchor in ("lsn", "generation", "sweep", "fence", "pin"):
        assert page.count(f'href="../design/glossary.html#{anchor}"') == 1, anchor
    glossary = (site / "design" / "glossary.html").read_text()
    for anchor in site_hooks.TERMS:
        assert f'id="{anchor}"' in glossary


@pytest.mark.parametrize(
    ("markdown", "linked"),
    [
        ("a fold, a fold", "a [fold](../design/glossary.md#fold), a fold"),
        ("`fold` folds", "`fold` [folds](../design/glossary.md#fold)"),
        ("# Fold\n\n[fold](tables.md)", "# Fold\n\n[fold](tables.md)"),
        ("```\nfold\n```\nFold", "```\nfold\n```\nFold"),
        ("| fold |\nunfolded", "| fold |\nunfolded"),
        (
            "[fold](../design/glossary.md#fold) and fold",
            "[fold](../design/glossary.md#fold) and fold",
        ),
    ],
)
def test_which_words_are_linked(markdown, linked):
    """Prose only: no code, no headings, no tables, no links; once."""
    assert site_hooks.with_terms(markdown, "guide/tables.md") == linked


@pytest.mark.parametrize(
    ("markdown", "text"),
    [
        ("[a test](../../tests/test_x.py)", "a test"),
        ("[decisions](../adr/)", "decisions"),
        ("[page](../guide/tables.md#x)", "[page](../guide/tables.md#x)"),
        ("[out](https://example.org/)", "[out](https://example.org/)"),
    ],
)
def test_links_out_of_the_site_become_text(markdown, text):
    """Sources are in the repository, not on the site."""
    assert site_hooks.without_outer_links(markdown, "design/hazards.md") == text
