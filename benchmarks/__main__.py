"""`make bench`: run all benchmarks, print the table, keep it in docs/benchmarks.md."""

import platform
import sys
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import directory_create, engine
from benchmarks.harness import HEADER

TABLE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
PREFACE = """# Benchmarks

Made by `make bench`. Reef and its peer run in turns in one process; the ratio is the median of
the rounds' ratios, ± its standard error: time of Reef over time of the peer for the same work, so
less is better. The goals are the design's.
"""


def main() -> int:
    """Return 1 if a goal was missed, so that nobody overlooks it."""
    comparisons = [*directory_create.run(), *engine.run()]
    machine = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    lines = [PREFACE, f"Measured {datetime.now(UTC):%Y-%m-%d} on {machine}.", "", HEADER]
    lines += [comparison.row() for comparison in comparisons]
    TABLE.write_text("\n".join(lines) + "\n")
    print("\n".join(lines[3:]))
    return 0 if all(comparison.met for comparison in comparisons) else 1


if __name__ == "__main__":
    sys.exit(main())
