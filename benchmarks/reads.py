"""Reads: by key, by many keys, short and full scans, one column; cached, and of data ten times the
size of the caches, at a quarter, once and four times the rows.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.contest import CACHED, LARGE, Contest, Sizes, contest
from benchmarks.engines import EVERYONE, LOAD_ROWS, Duck, Lmdb, Parquet, Reef, Rocks
from benchmarks.harness import Case, Result, measure
from benchmarks.rows import Rows, key

HOT = 1000
SCANNED = 100
GROUP = "reads"
Work = Callable[[int], object]


def run(sizes: Sizes) -> list[Result]:
    """Measure everything at both sizes, and the growth."""
    results: list[Result] = []
    for size in (CACHED, LARGE):
        with contest(Rows(sizes.rows), size, EVERYONE, sizes) as found:
            _by_key(found)
            _by_range(found)
            if size == LARGE:
                _unfolded(found)
        results += found.results
    with contest(
        Rows(sizes.wide_rows, wide=True), LARGE, (Reef, Rocks, Lmdb, Duck, Parquet), sizes
    ) as found:
        _wide(found)
    return results + found.results


def grow(sizes: Sizes) -> list[Result]:
    """Measure the most important reads at a quarter and at four times the rows."""
    results: list[Result] = []
    for factor in (0.25, 1, 4):
        rows = Rows(int(sizes.rows * factor))
        with contest(rows, LARGE, (Reef, Rocks), sizes) as found:
            found.size = f"{rows.count:,} rows"
            _growing(found)
        results += found.results
    return results


def _growing(found: Contest) -> None:
    rows = found.rows
    found.run("growth", "uniform get", "get", _each(rows.uniform), calls=1000)
    found.run("growth", "missing key", "get", _each(rows.missing), calls=1000)
    found.run("growth", "get_many of 1,000", "get_many", _each(_lists(rows, 1000)), calls=5)
    found.run("growth", "scan of 100 rows", "scan", _scans(rows), calls=200)
    found.run("growth", "full scan, per row", "full", _whole(rows), units=rows.count, calls=1)


def _by_key(found: Contest) -> None:
    rows, large = found.rows, found.size == LARGE
    goals = {"rocksdict": 4.0, "slatedb": 0.5} if large else {}
    found.run(GROUP, "uniform get", "get", _each(rows.uniform), calls=500, goals=goals)
    found.run(GROUP, "Zipf get", "get", _each(rows.zipf), calls=500)
    found.run(GROUP, "missing key", "get", _each(rows.missing), calls=500)
    warm = {"rocksdict": 0.35} if large else {}
    hot = rows.keys[:HOT]
    found.run(
        GROUP,
        "warm get",
        "get",
        lambda get: lambda _: [get(one) for one in hot],
        units=HOT,
        calls=5,
        goals=warm,
    )
    for count, calls in ((10, 50), (1000, 5), (100_000, 1)):
        goals = {"rocksdict": 2.0} if large and count == 1000 else {}
        lists = _each(_lists(rows, min(count, rows.count)))
        name = f"get_many of {count:,}"
        found.run(GROUP, name, "get_many", lists, calls=calls, goals=goals)


def _by_range(found: Contest) -> None:
    rows, large = found.rows, found.size == LARGE
    goals = {"rocksdict": 4.0} if large else {}
    found.run(GROUP, "scan of 100 rows, folded", "scan", _scans(rows), calls=100, goals=goals)
    goals = {"rocksdict": 0.33} if large else {}
    found.run(
        GROUP, "full scan, per row", "full", _whole(rows), units=rows.count, calls=1, goals=goals
    )


def _unfolded(found: Contest) -> None:
    """Write half of the rows again, and scan while they are in memory only."""
    rows, reef = found.rows, found.reef
    reef._options |= {"unfolded_bytes_max": 1 << 40, "background": False}
    for start in range(0, rows.count // 2, LOAD_ROWS):
        reef.writer.upsert(rows.slice(start, LOAD_ROWS))
    writer = reef.writer
    for _ in range(10):
        list(writer.scan(limit=1))  # merges are spread over reads
    starts = _starts(rows)
    works: dict[str, Work] = {
        "reef": lambda _: list(writer.scan(start=next(starts), limit=SCANNED)),
        "rocksdict": _scans(rows)(found.engines["rocksdict"].scan),
    }
    name = f"scan of 100 rows, {rows.count // 2:,} unfolded"
    calls = found.sizes.calls(100)
    goals = {"rocksdict": 4.0}
    case = Case(GROUP, name, works, size=found.size, calls=calls, goals=goals, meter=reef.meter)
    found.results.append(measure(case))


def _wide(found: Contest) -> None:
    """Rows of 12 columns, a vector among them."""
    rows, group = found.rows, "wide rows"
    found.run(group, "uniform get", "get", _each(rows.uniform), calls=200)
    found.run(group, "missing key", "get", _each(rows.missing), calls=200)
    found.run(group, "get_many of 1,000", "get_many", _each(_lists(rows, 1000)), calls=3)
    found.run(group, "scan of 100 rows", "scan", _scans(rows), calls=20)
    scan = {"units": rows.count, "calls": 1}
    every = found.run(group, "full scan, per row", "full", _whole(rows), **scan)
    one = found.run(
        group,
        "one of 13 columns, per row",
        "columns",
        lambda columns: lambda _: _same(columns(["n2"]), rows),
        **scan,
    )
    share = one.figures["reef"].bytes / every.figures["reef"].bytes
    one.ratios["bytes of all columns"] = (share, 0.0, share)
    one.goals["bytes of all columns"] = 0.15


# --- which keys -----------------------------------------------------------------------


def _each(choose: Callable[[int], Sequence[Any]]) -> Callable[[Callable[[Any], Any]], Work]:
    """Return works that ask for one choice after the other, the same ones for every engine."""

    chosen = choose(5000)

    def bind(read: Callable[[Any], Any]) -> Work:
        asked = itertools.cycle(chosen)
        return lambda _: read(next(asked))

    return bind


def _lists(rows: Rows, count: int) -> Callable[[int], list[list[bytes]]]:
    return lambda _: [rows.uniform(count) for _ in range(max(5, min(25, 200_000 // count)))]


def _starts(rows: Rows) -> Iterator[bytes]:
    places = range(0, rows.count - SCANNED, max(1, rows.count // 997))
    return itertools.cycle([key(place * 7919 % (rows.count - SCANNED)) for place in places])


def _scans(rows: Rows) -> Callable[[Callable[[bytes, int], int]], Work]:
    def bind(scan: Callable[[bytes, int], int]) -> Work:
        starts = _starts(rows)

        def work(_: int) -> None:
            if scan(next(starts), SCANNED) < SCANNED:
                raise AssertionError(f"a scan of {SCANNED} rows came back short")

        return work

    return bind


def _whole(rows: Rows) -> Callable[[Callable[[], int]], Work]:
    return lambda full: lambda _: _same(full(), rows)


def _same(count: int, rows: Rows) -> None:
    if count != rows.count:
        raise AssertionError(f"{count} rows, {rows.count} were written")
