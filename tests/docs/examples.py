"""The code of examples/ on the pages of docs/: kept current by `make docs`.

A page names a program and some of its functions, or all of it:

    <!-- code: examples/event_log.py consume main -->
    <!-- /code -->

Between the two comments is a block with their source. Such blocks are not run with the page; the
program itself is run by a test.
"""

import ast
import re
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
EMBEDDED = re.compile(
    r"(?P<head><!-- code: (?P<path>\S+)(?P<names>[^>]*) -->\n).*?<!-- /code -->", re.S
)


def pages() -> list[Path]:
    """Return the pages that show code of examples."""
    return [
        page for page in sorted((ROOT / "docs").rglob("*.md")) if EMBEDDED.search(page.read_text())
    ]


def rewritten(page: str) -> str:
    """Return a page with the current code of its examples."""

    def block(match: re.Match[str]) -> str:
        code = source_of(ROOT / match["path"], match["names"].split())
        return f"{match['head']}```python\n{code}\n```\n<!-- /code -->"

    return EMBEDDED.sub(block, page)


def without_examples(page: str) -> str:
    """Return a page without the code of examples."""
    return EMBEDDED.sub("", page)


def source_of(path: Path, names: Sequence[str]) -> str:
    """Return the source of some functions of a program, in their order; all of it without names."""
    source = path.read_text()
    if not names:
        return source.rstrip()
    nodes = {
        node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)
    }
    lines = source.splitlines()
    parts = ["\n".join(lines[nodes[name].lineno - 1 : nodes[name].end_lineno]) for name in names]
    return "\n\n\n".join(parts)


def main() -> None:
    """Rewrite the pages."""
    for page in pages():
        page.write_text(rewritten(page.read_text()))


if __name__ == "__main__":
    main()
