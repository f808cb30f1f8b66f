"""`make bench`: run all benchmarks, and write docs/benchmarks.md with its plots and figures.

    python -m benchmarks [--quick] [--minutes 30] [--rows 200000] [--scale 1.0]
    python -m benchmarks --only mixes,s3 [--keep]    with --keep, in place of the kept figures

Ends with 1 if a goal was missed by more than half, so that no run hides it.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks import (
    bucket_put,
    dataframes,
    directory_create,
    latency,
    local_front,
    local_log,
    reads,
    report,
    search,
    upkeep,
    writes,
)
from benchmarks.contest import QUICK, Sizes
from benchmarks.harness import Comparison

PARTS: dict[str, Callable[[Sizes], Any]] = {
    "reads": reads.run,
    "writes": writes.run,
    "mixes": writes.mixes,
    "growth": lambda sizes: [*reads.grow(sizes), *writes.grow(sizes)],
    "upkeep": upkeep.run,
    "search": search.run,
    "s3": latency.run,
}
SMALL: dict[str, Callable[[Sizes], list[Comparison]]] = {
    "directory": lambda _: directory_create.run(),
    "server": lambda _: bucket_put.run(),
    "local log": lambda _: local_log.run(),
    "local front": lambda _: local_front.run(),
    "dataframes": lambda sizes: dataframes.run(10 * sizes.rows),
}


def main() -> int:
    """Run the parts that were asked for, within the time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of everything")
    parser.add_argument("--only", default="", help="parts, separated by commas")
    parser.add_argument("--keep", action="store_true", help="replace the figures of these parts")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rows", type=int, help="at the size that others are multiples of")
    parser.add_argument("--scale", type=float, help="of the number of operations in a round")
    asked = parser.parse_args()
    sizes = replace(QUICK if asked.quick else Sizes(), minutes=asked.minutes)
    sizes = replace(sizes, rows=asked.rows or sizes.rows, scale=asked.scale or sizes.scale)
    only = [part for part in asked.only.split(",") if part]
    earlier = report.kept() if asked.keep and only else report.Run()
    run = _run(sizes, only or [*PARTS, *SMALL], earlier, None if only and not asked.keep else asked)
    print("\n".join(report.goal_table(run)))
    return int(any(report.verdict(r, peer).startswith("**") for r, peer, _ in run.goals()))


def _run(sizes: Sizes, parts: list[str], run: report.Run, kept: Any) -> report.Run:
    """Run parts, and write the report after each: a later one may fail."""
    start_s = time.monotonic()
    for name in parts:
        minutes = (time.monotonic() - start_s) / 60
        if minutes > sizes.minutes:
            run.left_out.append(name)
            continue
        print(f"{name} … ({minutes:.1f} min)", file=sys.stderr, flush=True)
        if name in PARTS:
            newer = report.Run(PARTS[name](sizes), parts=[name])
        else:
            newer = report.Run(comparisons=SMALL[name](sizes), parts=[name])
        run = run.updated(newer)
        run.about = report.about()
        if kept is not None:
            report.write(run, quick=kept.quick)
    return run


if __name__ == "__main__":
    sys.exit(main())
