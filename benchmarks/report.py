"""The report of a run: docs/benchmarks.md, plots and figures in docs/benchmarks/.

`python -m benchmarks.report` writes it again from the figures, after a change of its words.
"""

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.harness import HEADER, Comparison, Figures, Result

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
FIGURES = PAGE.with_suffix("") / "figures.json"
QUICK = ROOT / "build" / "bench"
NOTES = Path(__file__).parent / "notes.txt"
TITLES = {
    "reads": "Reads",
    "wide rows": "Rows of 12 columns",
    "writes": "Writes with background work",
    "puts": "Single puts",
    "mixes": "Mixes",
    "growth": "Growth",
    "upkeep": "Opening and jobs",
    "search": "Search",
    "s3-standard": "Over a bucket as slow as S3 Standard",
}
PREFACE = """# Benchmarks

Made by `make bench`: Reef and its peers take turns in one process, at least five rounds each. A
ratio is the time of Reef over the time of the peer for the same work, so less is better: the median
over the rounds, ± its standard error, of the median operation. The ratio of CPU time is given as
well, since the machine is shared and wall time includes the work of its other tenants.
`make bench QUICK=1` is a short run; `make bench-compare BASE=…` compares two runs, each a commit
or a file such as [figures.json](benchmarks/figures.json).

Rows have keys of 16 bytes and values of 100, half of them noise; wide rows have 12 columns with a
vector of 64 floats. "10 × caches": each engine's own cache has a tenth of the data. RocksDB is
compacted and has bloom filters; LMDB has the page cache alone; SlateDB's directory store does not
sync its files, so that its writes are not comparable.
"""


@dataclass(slots=True)
class Run:
    """All figures of one run."""

    results: list[Result] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)
    """That were run."""

    def goals(self) -> list[tuple[Result, str, float]]:
        """Return the results that have a goal, by peer."""
        return [(r, peer, goal) for r in self.results for peer, goal in r.goals.items()]

    def updated(self, newer: "Run") -> "Run":
        """Return this run with the results of a newer one in place of its own."""
        results = {(r.group, r.name, r.size): r for r in [*self.results, *newer.results]}
        comparisons = {c.name: c for c in [*self.comparisons, *newer.comparisons]}
        left_out = [part for part in self.left_out if part not in newer.parts]
        parts = list(dict.fromkeys([*self.parts, *newer.parts]))
        return Run([*results.values()], [*comparisons.values()], left_out, self.about, parts)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def of(cls, text: str) -> "Run":
        """Return a run from its JSON."""
        found = json.loads(text)
        results = [_result(each) for each in found["results"]]
        comparisons = [Comparison(**each) for each in found["comparisons"]]
        return cls(results, comparisons, found["left_out"], found["about"], found["parts"])


def _result(found: dict[str, Any]) -> Result:
    figures = {engine: Figures(**each) for engine, each in found.pop("figures").items()}
    ratios = {peer: tuple(each) for peer, each in found.pop("ratios").items()}
    return Result(**found, figures=figures, ratios=ratios)


def kept() -> Run:
    """Return the run that the page shows; an empty one if there is none."""
    return Run.of(FIGURES.read_text()) if FIGURES.exists() else Run()


def about() -> dict[str, Any]:
    """Return where and when a run was made."""
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "load": [round(load, 1) for load in os.getloadavg()],
    }


def write(run: Run, *, quick: bool) -> None:
    """Write the page, the plots and the figures; those of a quick run into build/bench."""
    page = QUICK / "benchmarks.md" if quick else PAGE
    folder = page.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FIGURES.name).write_text(run.to_json())
    (folder / "goals.svg").write_text(plots.bars("Ratios next to their goals", _bars(run)))
    (folder / "growth.svg").write_text(
        plots.growth("Time of one operation by the number of rows", _lines(run.results))
    )
    page.write_text(page_of(run))


def page_of(run: Run) -> str:
    """Return the page."""
    return "\n".join(_page(run))


def _page(run: Run) -> Iterable[str]:
    facts = run.about
    load = " / ".join(map(str, facts["load"]))
    yield PREFACE
    yield (
        f"Measured {facts['date']} on {facts['machine']}, Python {facts['python']}, at a load of "
        f"{load} (1, 5 and 15 minutes)."
    )
    yield "\n## Goals\n\n![Ratios next to their goals](benchmarks/goals.svg)\n"
    yield from goal_table(run)
    yield "\n" + NOTES.read_text()
    for group, title in TITLES.items():
        found = [result for result in run.results if result.group == group]
        if found:
            yield f"\n## {title}\n"
            if group == "growth":
                yield "![Growth](benchmarks/growth.svg)\n"
            yield from _table(found)
    if run.comparisons:
        yield f"\n## Stores, the local log and data frames\n\n{HEADER}"
        yield from (comparison.row() for comparison in run.comparisons)
    if run.left_out:
        yield f"\nLeft out for lack of time: {', '.join(run.left_out)}."
    yield ""


def goal_table(run: Run) -> Iterable[str]:
    """Return the rows of the table of goals."""
    yield "| work | peer | ratio | of CPU time | goal | |\n|---|---|---|---|---|---|"
    for result, peer, goal in run.goals():
        wall, error, cpu = result.ratios[peer]
        yield (
            f"| {result.name}{_of(result.size)} | {peer} | {wall:.3g} ± {error:.1g} | {cpu:.3g} "
            f"| ≤ {goal:.3g} | {verdict(result, peer)} |"
        )


def verdict(result: Result, peer: str) -> str:
    """Return whether a goal was met, by wall time."""
    wall, goal = result.ratios[peer][0], result.goals[peer]
    if wall <= goal:
        return "met"
    return "missed, within twice" if wall <= 2 * goal else "**missed**"


def _table(results: Sequence[Result]) -> Iterable[str]:
    yield (
        "| work | engine | time | CPU | p99 | requests | bytes | peak MB | Reef's ratio |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    for result in results:
        name = f"{result.name}{_of(result.size)}"
        for engine, figures in result.figures.items():
            ratio = result.ratios.get(engine)
            stated = f"{ratio[0]:.3g} ± {ratio[1]:.1g}" if ratio else ""
            yield f"| {name} | {engine} | {_cells(figures)} | {stated} |"
            name = ""


def _cells(figures: Figures) -> str:
    times = [duration(t) for t in (figures.seconds, figures.cpu_seconds, figures.p99)]
    sent = f"{figures.requests:.3g}" if figures.requests else ""
    size = f"{figures.bytes:,.0f}" if figures.bytes else ""
    return " | ".join([*times, sent, size, f"{max(0.0, figures.peak_mb):.0f}"])


def duration(seconds: float) -> str:
    """Return a time with its unit."""
    for unit, factor in (("s", 1), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def _of(size: str) -> str:
    return f", {size}" if size else ""


def _bars(run: Run) -> list[tuple[str, float, float]]:
    return [
        (f"{result.name} / {peer}"[:44], result.ratios[peer][0], goal)
        for result, peer, goal in run.goals()
    ] or [("", 1.0, 1.0)]


def _lines(results: Sequence[Result]) -> dict[str, list[tuple[float, float]]]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        if result.group == "growth":
            rows = float(result.size.split()[0].replace(",", ""))
            for engine, figures in result.figures.items():
                name = f"{result.name}: {engine}"
                lines.setdefault(name, []).append((rows, figures.seconds * 1e6))
    return lines or {"": [(1, 1), (2, 1)]}


if __name__ == "__main__":
    write(kept(), quick=False)
