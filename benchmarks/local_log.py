"""The local log against the bare system calls that it cannot do without.

Appends are compared with a write of the very same bytes and an fsync, on a file that was made the
same way. Reads are compared with a read of the same bytes. Every number is one call; entries a
second follow from the entries of a call.
"""

import os
import random
import tempfile

from benchmarks.harness import Comparison, compare
from reef.locallog import LocalLog, LogEntry

GOALS = {1: 1.5, 10: None, 100: 1.7}
"""By entries in an append."""
ENTRY_BYTES = 1024
SEGMENT_BYTES = 64 << 20
READS = 1000
OPENED_BYTES = 1 << 30


def run(rounds: int = 60) -> list[Comparison]:
    """Appends, reads, and opening."""
    with tempfile.TemporaryDirectory(dir=".") as root:
        appends = [_append(root, count, rounds) for count in GOALS]
    with tempfile.TemporaryDirectory(dir=".") as root:
        return [*appends, *_large_log(root)]


def _append(root: str, count: int, rounds: int) -> Comparison:
    body = os.urandom(ENTRY_BYTES)
    raw = _Raw(f"{root}/raw{count}")
    with LocalLog(f"{root}/log{count}", SEGMENT_BYTES) as log:
        firsts = range(1, 1 + count * (1 + 10 * rounds), count)
        batches = iter(
            [[LogEntry(n, 1, data=body) for n in range(first, first + count)] for first in firsts]
        )

        def append(_: int) -> None:
            log.store_logs(next(batches))

        append(0)
        bounds = log._view.tail.bounds(log.last_index, log.last_index)
        raw.body = os.urandom((bounds[1] - bounds[0] - 8) * count + 8)
        return compare(
            f"LocalLog.store_logs, {count} × 1 KiB",
            append,
            "pwrite, fsync of the same bytes",
            raw.append,
            goal=GOALS[count],
            rounds=rounds,
            calls=10,
        )


class _Raw:
    """A file that is appended to by hand."""

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(self.fd, 0, SEGMENT_BYTES)
        self.body = b""
        self.end = 0

    def append(self, _: int) -> None:
        if self.end + len(self.body) > SEGMENT_BYTES:
            self.end = 0
        os.pwrite(self.fd, self.body, self.end)
        os.fsync(self.fd)
        self.end += len(self.body)


def _large_log(root: str) -> list[Comparison]:
    path = f"{root}/log"
    body = os.urandom(ENTRY_BYTES)
    with LocalLog(path, SEGMENT_BYTES) as log:
        while log.last_index * ENTRY_BYTES < OPENED_BYTES:
            first = log.last_index + 1
            log.store_logs([LogEntry(index, 1, data=body) for index in range(first, first + 1000)])
        comparisons = [_random_reads(log), _reads_in_a_row(log)]
    names = sorted(name for name in os.listdir(path) if name.endswith(".wal"))
    return [
        *comparisons,
        compare(
            "LocalLog(…) of 1 GiB, opened and closed",
            lambda _: LocalLog(path).close(),
            "a read of its last segment",
            lambda _: _read_file(f"{path}/{names[-1]}"),
            goal=None,
            rounds=10,
            calls=1,
        ),
    ]


def _random_reads(log: LocalLog) -> Comparison:
    rng = random.Random(1)
    places = [rng.randint(1, log.last_index) for _ in range(READS)]
    fd = os.open(f"{log.path}/{log._view.sealed[0].info.name}", os.O_RDONLY)
    try:
        return compare(
            f"LocalLog.get_log, {READS:,} entries at random",
            lambda _: [log.get_log(place) for place in places] and None,
            "pread of 1 KiB, as often",
            lambda _: (
                [os.pread(fd, ENTRY_BYTES, place % 60_000 * 1024) for place in places] and None
            ),
            goal=None,
            rounds=20,
            calls=1,
        )
    finally:
        os.close(fd)


def _reads_in_a_row(log: LocalLog) -> Comparison:
    fd = os.open(f"{log.path}/{log._view.sealed[0].info.name}", os.O_RDONLY)
    try:
        return compare(
            f"LocalLog.entries, {READS:,} entries in a row",
            lambda n: sum(1 for _ in log.entries(1 + n * READS, (n + 1) * READS)) and None,
            "one pread of as many bytes",
            lambda n: os.pread(fd, READS * ENTRY_BYTES, n * READS * ENTRY_BYTES) and None,
            goal=None,
            rounds=20,
            calls=1,
        )
    finally:
        os.close(fd)


def _read_file(path: str) -> None:
    with open(path, "rb") as file:
        while file.read(1 << 20):
            pass


if __name__ == "__main__":
    for comparison in run():
        print(comparison.row())
