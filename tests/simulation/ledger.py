"""The table of docs/evidence.md that says which seeds of which scenario have run, and where.

Ranges of one scenario and one commit that touch become one row. `missing` returns the seeds that
no row covers, so that a large number of them can be completed over several sessions.
"""

import re
from dataclasses import dataclass
from pathlib import Path

LEDGER = Path(__file__).parents[2] / "docs" / "evidence.md"
HEADING = "## Seeds of the simulator"
COLUMNS = (
    "| store | scenario | first seed | last seed | commit | failed seeds |\n"
    "|---|---|---|---|---|---|\n"
)
ROW = re.compile(r"\| (\S+) \| (\w+) \| (\d+) \| (\d+) \| (\w+) \| ([\d, ]*) ?\|\n")


@dataclass(frozen=True, order=True, slots=True)
class Covered:
    """Seeds that have run at a commit."""

    store: str
    scenario: str
    first: int
    last: int
    commit: str
    failed: tuple[int, ...] = ()

    def __str__(self):
        failed = ", ".join(map(str, self.failed))
        columns = (self.store, self.scenario, self.first, self.last, self.commit, failed)
        return "".join(f"| {column} " for column in columns) + "|\n"


def read(path=LEDGER):
    """Return the rows of the table."""
    section = _split(path.read_text())[1]
    return [
        Covered(store, scenario, int(first), int(last), commit, _seeds(failed))
        for store, scenario, first, last, commit, failed in ROW.findall(section)
    ]


def add(new, path=LEDGER):
    """Add rows to the table; those that touch rows of the same commit extend them."""
    before, _, after = _split(path.read_text())
    rows = merged([*read(path), *new])
    path.write_text(f"{before}{COLUMNS}{''.join(map(str, rows))}{after}")


def merged(rows):
    """Return the rows, with those that touch or overlap joined."""
    result = []
    for row in sorted(rows, key=lambda r: (r.store, r.scenario, r.commit, r.first)):
        last = result[-1] if result else None
        if last is not None and _touch(last, row):
            failed = tuple(sorted({*last.failed, *row.failed}))
            end = max(last.last, row.last)
            result[-1] = Covered(row.store, row.scenario, last.first, end, row.commit, failed)
        else:
            result.append(row)
    return result


def missing(rows, store, scenario, seeds):
    """Return the ranges of `seeds` that no row of a scenario covers, at any commit."""
    covered = sorted(
        (row.first, row.last) for row in rows if (row.store, row.scenario) == (store, scenario)
    )
    gaps, begin = [], seeds.start
    for first, last in covered:
        if first > begin:
            gaps.append(range(begin, min(first, seeds.stop)))
        begin = max(begin, last + 1)
    gaps.append(range(begin, seeds.stop))
    return [gap for gap in gaps if gap]


def _touch(row, following):
    same = (row.store, row.scenario, row.commit)
    return same == (following.store, following.scenario, following.commit) and (
        following.first <= row.last + 1
    )


def _split(text):
    """Return the text before the table, the table, and the text after it."""
    start = text.index(COLUMNS, text.index(HEADING))
    end = start + len(COLUMNS)
    while row := ROW.match(text, end):
        end = row.end()
    return text[:start], text[start:end], text[end:]


def _seeds(text):
    return tuple(int(seed) for seed in text.split(",") if seed.strip())
