"""The tables of docs/design/hazards.md: rows by hand, the column of tests from the tests.

Run `make docs` to rewrite them. A test names a hazard by its id, in its name or its docstring:
`def test_H13_...` or `\"\"\"H13: ...\"\"\"`. Rows that a test names are in the first table, the
others in the second; both are sorted by id.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "design" / "hazards.md"
HAZARD = re.compile(r"(?<![A-Za-z0-9])H(\d{1,3})(?![A-Za-z0-9])")
HEADER = "| id | hazard | protection | tests |\n|---|---|---|---|\n"
TABLES = ("tested", "open")


class Row(NamedTuple):
    """One hazard; `text` is its hazard and its protection, as they are written."""

    number: int
    text: tuple[str, str]


def hazards_in(text: str) -> set[int]:
    """Return the ids that a text names.

    >>> sorted(hazards_in("H7 and test_H13_slow, not CH4 or H2O"))
    [7, 13]
    """
    return {int(number) for number in HAZARD.findall(text.replace("_", " "))}


def tests_by_hazard(tests: Iterable[Path]) -> dict[int, list[Path]]:
    """Return the files with a test that names a hazard, by id, in the order of their paths."""
    found: dict[int, set[Path]] = defaultdict(set)
    for path in tests:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for number in hazards_in(f"{node.name} {ast.get_docstring(node) or ''}"):
                    found[number].add(path)
    return {number: sorted(paths) for number, paths in found.items()}


def test_files() -> list[Path]:
    """Return the modules that pytest collects tests from."""
    return sorted((ROOT / "tests").rglob("test_*.py"))


def named_in(folder: Path) -> set[int]:
    """Return the ids that any module below a folder names."""
    return {number for path in folder.rglob("*.py") for number in hazards_in(path.read_text())}


def rows_of(page: str) -> list[Row]:
    """Return the rows of both tables, as they are on the page."""
    return [row for name in TABLES for row in _parsed(_between(page, name))]


def rewritten(page: str, tests: Mapping[int, list[Path]]) -> str:
    """Return the page with both tables brought up to date."""
    rows = sorted(rows_of(page))
    for name in TABLES:
        chosen = [row for row in rows if (row.number in tests) == (name == "tested")]
        lines = [_line(row, tests.get(row.number, [])) for row in chosen]
        old = _between(page, name)
        page = page.replace(_block(name, old), _block(name, HEADER + "".join(lines)))
    return page


def _parsed(table: str) -> Iterator[Row]:
    for line in table.removeprefix(HEADER).splitlines():
        number, hazard, protection, _ = (cell.strip() for cell in line.split("|")[1:-1])
        yield Row(int(number.removeprefix("H")), (hazard, protection))


def _line(row: Row, tests: list[Path]) -> str:
    links = ", ".join(f"[{_name(path)}](../../{path.relative_to(ROOT)})" for path in tests)
    return f"| H{row.number} | {' | '.join(row.text)} | {links} |\n"


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT / "tests").with_suffix("")).replace("test_", "")


def _between(page: str, name: str) -> str:
    begin, end = f"<!-- hazards: {name} -->\n", f"<!-- /hazards: {name} -->\n"
    return page.split(begin)[1].split(end, maxsplit=1)[0]


def _block(name: str, table: str) -> str:
    return f"<!-- hazards: {name} -->\n{table}<!-- /hazards: {name} -->\n"


def main() -> None:
    """Rewrite the page."""
    PAGE.write_text(rewritten(PAGE.read_text(), tests_by_hazard(test_files())))


if __name__ == "__main__":
    main()
