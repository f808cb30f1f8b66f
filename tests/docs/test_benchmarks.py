"""The benchmark's own machinery: rounds in turns, the report from its figures, regressions."""

from pathlib import Path

import pytest

from benchmarks import plots, regression, report
from benchmarks.harness import Case, Figures, Result, measure
from reef.telemetry import RequestKind, RequestMeter

ROOT = Path(__file__).parents[2]


def result(ratio, requests=1.0, name="get"):
    """Return a result with one peer and a goal of 2."""
    figures = {"reef": Figures(1e-5, 1e-5, 1e-5, 1e-5, 2e-5, 3e-5, 1.0, requests, 100.0)}
    return Result("reads", name, "cached", 1, figures, {"peer": (ratio, 0.1, ratio)}, {"peer": 2.0})


def test_engines_take_turns_and_are_counted_apart():
    """Every other round begins with the other engine; only Reef's requests are Reef's."""
    order, meter = [], RequestMeter()

    def work(name):
        def run(number):
            order.append((name, number))
            meter.count(RequestKind.GET, bytes=10)

        return run

    works = {"reef": work("reef"), "peer": work("peer")}
    found = measure(Case("g", "n", works, calls=2, rounds=2, units=2, meter=meter))
    names = [name for name, _ in order]
    assert names == ["peer"] * 2 + ["reef"] * 4 + ["peer"] * 2
    assert [number for name, number in order if name == "reef"] == [0, 1, 2, 3]
    assert (found.figures["reef"].requests, found.figures["reef"].bytes) == (0.5, 5.0)
    assert found.figures["peer"].requests == 0
    assert found.figures["reef"].p50 <= found.figures["reef"].slowest


@pytest.mark.parametrize(
    ("ratio", "expected"), [(1.9, "met"), (3.9, "missed, within twice"), (4.1, "**missed**")]
)
def test_a_goal_is_met_or_missed(ratio, expected):
    """A miss by more than its double is marked."""
    assert report.verdict(result(ratio), "peer") == expected


def test_the_page_is_that_of_the_figures():
    """docs/benchmarks.md and its plots are written from the figures next to them."""
    run = report.Run.of(report.FIGURES.read_text())
    assert report.page_of(run) == report.PAGE.read_text()
    assert report.Run.of(run.to_json()) == run
    missed = [r.name for r, peer, _ in run.goals() if report.verdict(r, peer).startswith("**")]
    notes = report.NOTES.read_text()
    assert all(name.split(",")[0] in notes for name in missed), "each has its profile in the notes"


README = (ROOT / "README.md").read_text()
SHOWN = {
    "durable upsert of 100,000 rows": (
        ("writes", "durable upsert of 100,000, per row", 1e5, "seconds"),
        {"reef": "21 ms", "rocksdict": "179 ms"},
    ),
    "durable put of 100 bytes, 64 threads": (
        ("puts", "durable puts, 64 threads, per put", 1, "seconds"),
        {"reef": "85 µs", "rocksdict": "141 µs"},
    ),
    "commit over a bucket like S3 Standard": (
        ("s3-standard", "commit", 1, "seconds"),
        {"reef": "30 ms", "raw PUT": "33 ms"},
    ),
    "read by random key": (
        ("reads", "uniform get", 1, "seconds"),
        {"reef": "15 µs", "rocksdict": "5 µs", "slatedb": "46 µs"},
    ),
    "the same, warm": (
        ("reads", "warm get", 1, "cpu_seconds"),
        {"reef": "0.5 µs", "rocksdict": "3.3 µs"},
    ),
    "full scan to Arrow, CPU a row": (
        ("reads", "full scan, per row", 1, "cpu_seconds"),
        {"reef": "0.08 µs", "rocksdict": "0.22 µs", "parquet": "0.09 µs"},
    ),
}
UNITS = {"s": 1, "ms": 1e-3, "µs": 1e-6}


@pytest.mark.parametrize("line", SHOWN)
def test_the_readme_has_the_figures_of_the_benchmarks(line):
    """Each is the measured one, rounded as it is written."""
    (group, name, times, measure_of), written = SHOWN[line]
    (row,) = [text for text in README.splitlines() if text.startswith(f"| {line}")]
    run = report.Run.of(report.FIGURES.read_text())
    (found,) = [
        each
        for each in run.results
        if (each.group, each.name) == (group, name) and each.size in ("10 × caches", "")
    ]
    for engine, text in written.items():
        assert text in row
        number, unit = text.split()
        decimals = len(number.partition(".")[2])
        measured = getattr(found.figures[engine], measure_of) * times / UNITS[unit]
        assert round(measured, decimals) == float(number), f"{engine} has {measured}"


@pytest.mark.parametrize(
    ("line", "case"), [("bulk load", "bulk load"), ("full scan of them", "full scan")]
)
def test_the_readme_has_the_figures_on_spark(line, case):
    """Both times are those of docs/benchmarks-spark.md."""
    page = (ROOT / "docs" / "benchmarks-spark.md").read_text()
    (measured,) = [row for row in page.splitlines() if row.startswith(f"| {case} |")]
    (row,) = [text for text in README.splitlines() if text.startswith(f"| {line}")]
    _, _, ours, theirs, *_ = [cell.strip() for cell in row.split("|")]
    cells = [cell.strip() for cell in measured.split("|")]
    assert cells[2].startswith(f"{ours},")
    assert cells[4].startswith(f"{theirs.partition(',')[0]},")


def test_the_readme_is_short():
    """At most 150 lines, without the mechanism: that is for the pages behind it."""
    assert len(README.splitlines()) <= 150
    for word in ("under construction", "create-only", "simulator", "import-linter"):
        assert word not in README


def test_plots_are_drawn():
    """One bar for each ratio, one line for each series."""
    assert plots.bars("t", [("a", 1.0, 2.0), ("b", 5.0, 2.0)]).count("<rect") == 3
    lines = plots.growth("t", {"a <": [(10, 1.0), (100, 5.0)], "b": [(10, 3.0), (100, 9.0)]})
    assert lines.count("<polyline") == 2
    assert "a &lt;" in lines


def test_regressions_are_found():
    """By the ratio to a peer and by requests, the worst first; other cases are ignored."""
    base = report.Run([result(1.0), result(1.0, name="old")])
    new = report.Run([result(1.5, requests=1.1), result(1.0, name="new")])
    found = regression.changes(regression.ratios(base), regression.ratios(new))
    assert [name for change, name in found if change > regression.WORSE] == [
        "reads: get, cached / peer"
    ]
    assert len(found) == 2
