"""Hooks of the documentation site, named in mkdocs.yml.

- The navigation gets the pages that it does not list: those of a folder go to its section.
- A link that leaves docs/ (to a test, an example), or that names a folder, becomes text: the site
  has no such page.
- The first use of each word of TERMS on a page links to its one definition, in the glossary.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
GLOSSARY = "design/glossary.md"
SECTIONS = {
    "guide": "Guides",
    "operations": "Operations",
    "migrate": "Compare and migrate",
    "reference": "Reference",
    "design": "Design",
}
"""Sections that take the unlisted pages of a folder."""
SUBSECTIONS = {
    ("Reference", "Commands"): "cli",
    ("Design", "File formats"): "format",
    ("Design", "Decisions"): "adr",
}
"""Sections made of all pages of a folder."""
TERMS = {
    "lsn": r"LSNs?",
    "fence": r"fences?|fenced|fencing",
    "fold": r"folds?|folded|folding",
    "sweep": r"sweeps?|swept",
    "generation": r"generations?",
    "epoch": r"epochs?",
    "pin": r"pins?|pinned",
}
LINKED = re.compile(
    r"(index|getting-started|concepts|comparison|(guide|operations|cli|migrate)/.*)\.md"
)
"""Pages whose words are linked: those for users."""
SKIPPED = r"""
    ^```.*?^```\s*$            # code
  | ^\#.*?$                    # headings
  | ^\|.*?$                    # tables
  | `[^`]*`
  | !?\[[^\]]*\]\([^)]*\)      # links and pictures
  | <[^>]*>
"""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)]*)?\)")


def on_config(config: Any) -> Any:
    """Add unlisted pages to the navigation."""
    nav = {title: entry for item in config["nav"] for title, entry in item.items()}
    for (section, title), folder in SUBSECTIONS.items():
        nav[section].append({title: [page for page in pages(folder) if page not in listed(nav)]})
    for folder, section in SECTIONS.items():
        nav[section] += [page for page in pages(folder) if page not in listed(nav)]
    config["nav"] = [{title: entry} for title, entry in nav.items()]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page."""
    source = page.file.src_uri
    markdown = without_outer_links(markdown, source)
    return with_terms(markdown, source) if LINKED.fullmatch(source) else markdown


def pages(folder: str) -> list[str]:
    """Return the pages below a folder, as the navigation names them."""
    paths = sorted((DOCS / folder).rglob("*.md"))
    return [path.relative_to(DOCS).as_posix() for path in paths]


def listed(entry: Any) -> set[str]:
    """Return the pages below an entry of the navigation."""
    if isinstance(entry, str):
        return {entry}
    items = entry.values() if isinstance(entry, dict) else entry
    return set().union(*map(listed, items))


def without_outer_links(markdown: str, source: str) -> str:
    """Turn links to files outside of docs/ into text."""

    def changed(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[3]))
        outside = target.startswith("../") or link[3].endswith("/")
        return link[2] if outside and "://" not in link[3] else link[0]

    return LINK.sub(changed, markdown)


def with_terms(markdown: str, source: str) -> str:
    """Link the first use of each term in prose to the glossary."""
    glossary = posixpath.relpath(GLOSSARY, posixpath.dirname(source))
    for anchor, word in TERMS.items():
        pattern = re.compile(rf"(?P<skip>{SKIPPED})|\b(?P<term>{word})\b", re.M | re.S | re.X)
        for match in pattern.finditer(markdown):
            if match["skip"] is not None and f"{GLOSSARY.rpartition('/')[2]}#{anchor})" in match[0]:
                break
            if match["term"]:
                link = f"[{match['term']}]({glossary}#{anchor})"
                markdown = markdown[: match.start()] + link + markdown[match.end() :]
                break
    return markdown
