"""`make bench`: run all benchmarks, print the table, keep it in docs/benchmarks.md."""

import platform
import sys
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import bucket_put, directory_create, engine, local_front, local_log
from benchmarks.harness import HEADER

TABLE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
PREFACE = """# Benchmarks

Made by `make bench`. Reef and its peer run in turns in one process; the ratio is the median of
the rounds' ratios, ± its standard error: time of Reef over time of the peer for the same work, so
less is better. The goals are the design's.
"""

NOTES = """
Writers run without background work here, which `python -m benchmarks.compaction` measures by
itself.

Where a goal is missed, and what the profile shows:

- **A full scan to Arrow from a cold reader** decodes every block: about a quarter of the time is
  zstd, which Arrow gives a new context for each block; the rest is some 210 calls into Python and
  C for each group of 64 KiB (checksum, buffers, key prefix, cache). The peer's iterator has its
  blocks in memory, uncompressed. Larger groups (`group_bytes` up to 1 MiB) cost a point read more
  bytes and a scan proportionally fewer calls.
- **A durable put** of 100 bytes to a directory costs what the disk's two syncs cost (0.5 to 0.9 ms
  here) and about 0.15 ms of Reef's own work: some 490 calls into Python and C, most of them in the
  committer's queue, locks, clocks and answers, since one row is encoded and kept without any Arrow.
  The quicker the disk, the worse the ratio; it moves with the disk, from 1.2 to 1.6 in runs of the
  same code on one day. Over a server that answers in a millisecond the goal is met, and over a
  cloud's bucket the work is lost in the round trip. A batch of 1,000 rows has the same fixed cost.
- **Upserts** spend their time in encoding, checksums, the durable PUT and the memtable's index
  of keys, which is a Python dict and the only part that is per row (built by C calls).
"""


def main() -> int:
    """Return 1 if a goal was missed, so that nobody overlooks it."""
    parts = (directory_create, bucket_put, engine, local_log, local_front)
    comparisons = [comparison for part in parts for comparison in part.run()]
    machine = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    lines = [PREFACE, f"Measured {datetime.now(UTC):%Y-%m-%d} on {machine}.", "", HEADER]
    lines += [comparison.row() for comparison in comparisons]
    TABLE.write_text("\n".join(lines) + "\n" + NOTES)
    print("\n".join(lines[3:]))
    return 0 if all(comparison.met for comparison in comparisons) else 1


if __name__ == "__main__":
    sys.exit(main())
