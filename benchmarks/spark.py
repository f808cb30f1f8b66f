"""Spark compared with Parquet, and jobs on Spark with threads.

    python -m benchmarks.spark [--rows 5000000] [--rounds 5] [--master 'local[2]'] [--keep]
    python -m benchmarks.spark --check [--rows 5000000]

Rows have 16-byte keys, in no order, and 100-byte values that do not compress, unless a case says
otherwise. Both sides start from the same Parquet files and take turns in one session. A bulk load
is compared with `sort` and a Parquet write of the same data; scans into `noop`, filters, joins and
counts with the same from sorted Parquet; a compaction and a fold on Spark with the same on
threads. CPU time is that of Spark's JVM and its Python workers, which other programs of the machine
disturb less than the time on the clock. `--keep` writes the table to docs/benchmarks-spark.md.
`--check` does none of that: it writes live rows during one load and compares the result with a
model, row by row.
"""

import argparse
import hashlib
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

import reef
import reef.spark
from benchmarks.spark_live import check_live
from benchmarks.spark_profile import (
    carried_alone,
    cpu_seconds,
    read_alone,
    report_load,
    report_query,
)
from benchmarks.spark_reads import Reads

TABLE = Path(__file__).parent.parent / "docs" / "benchmarks-spark.md"
GOALS = {
    "bulk load": 1.2,
    "full scan": 1.5,
    "compressible values": 1.0,
    "six overlapping segments": 1.0,
    "two of twelve columns": 1.0,
    "filter on a clustered column": 1.0,
    "key-range filter": 1.0,
    "join with 100,000 keys": 1.0,
    "MERGE of 100,000 rows": 1.0,
}
"""Rows per second over the peer's. The others are stated."""
POINT_READS = 2000
LOADS = 4
"""What is compacted was loaded in so many parts, each over all keys."""
LOG_BATCH = 20_000
HEADER = (
    "| what | Reef | peer | peer's | rows/s over the peer's | of CPU | goal | |\n"
    "|---|---|---|---|---|---|---|---|"
)


def session(master: str, path: Path) -> Any:
    """Start a session that both sides share, with a catalog of the benchmark's bucket."""
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = (
        SparkSession.builder.master(master)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "4g")
        .config("spark.sql.parquet.compression.codec", "zstd")
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", "65536")
        .config("spark.log.level", "ERROR")
    )
    return reef.spark.configure(builder, url=str(path / "reef")).getOrCreate()


def make_source(spark: Any, rows: int, path: Path) -> Any:
    """Write the rows that both sides load, as Parquet files in no order."""
    from pyspark.sql import functions as fn

    digest = fn.unhex(fn.md5(fn.col("id").cast("string")))
    noise = [
        fn.unhex(fn.sha2(fn.concat(fn.lit(n), fn.col("id").cast("string")), 256)) for n in "abc"
    ]
    value = fn.concat(*noise, fn.unhex(fn.lit("00000000")))
    spark.range(rows, numPartitions=8).select(
        digest.alias("id"), value.alias("value")
    ).write.parquet(str(path / "source"))
    return spark.read.parquet(str(path / "source"))


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return how long a call takes, and its result."""
    start_s = time.perf_counter()
    result = call()
    return time.perf_counter() - start_s, result


@dataclass(frozen=True)
class Case:
    """The same work by Reef and by its peer."""

    name: str
    peer: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any]

    def row(self, rows: int, count: int) -> str:
        """Run both in turns, after one round that does not count; return a line of the table."""
        times: list[tuple[float, float, float, float]] = []
        for number in range(count + 1):
            first, second = (self.theirs, self.ours) if number % 2 else (self.ours, self.theirs)
            one, other = _measured(first), _measured(second)
            if one[2] != other[2]:
                raise SystemExit(f"{self.name}: one says {one[2]}, the other {other[2]}")
            mine, peers = (other, one) if number % 2 else (one, other)
            times.append((mine[0], peers[0], mine[1], peers[1]))
        return self._line(rows, times[1:])

    def _line(self, rows: int, times: list[tuple[float, float, float, float]]) -> str:
        ratio = statistics.median(b / a for a, b, _, _ in times)
        of_cpu = statistics.median(b / max(a, 0.01) for _, _, a, b in times)
        mine_s, other_s, *_ = (statistics.median(column) for column in zip(*times, strict=True))
        goal, verdict, promised = GOALS.get(self.name), "stated", ""
        if goal is not None:
            promised = f"≥ {goal:g} ×"
            verdict = "met" if ratio >= goal else f"missed by {1 - ratio / goal:.0%}"
        return (
            f"| {self.name} | {mine_s:.2f} s, {rows / mine_s:,.0f} rows/s | {self.peer} | "
            f"{other_s:.2f} s, {rows / other_s:,.0f} rows/s | {ratio:.2f} × | {of_cpu:.2f} × | "
            f"{promised} | {verdict} |"
        )


def _measured(call: Callable[[], Any]) -> tuple[float, float, Any]:
    before = cpu_seconds()
    took_s, result = timed(call)
    return took_s, cpu_seconds() - before, result


WARM_ROWS = 10_000
"""Rows of a run before all others: neither side should pay for what is only done once."""


class Bench:
    """One run: a directory, a session, the same rows on both sides."""

    def __init__(self, spark: Any, rows: int, path: Path) -> None:
        self.spark, self.rows, self.path = spark, rows, path
        self.source = make_source(spark, rows, path)
        self.url = str(path / "reef")
        self.number = 0
        self.reports: list[Any] = []

    # --- against Parquet ----------------------------------------------------------------
    def load(self) -> None:
        """Bulk load into a new namespace."""
        self.number += 1
        name = f"t{self.number}"
        self.reports.append(reef.spark.bulk_load(self.source, self.url, name, key="id"))

    def sort_and_write(self) -> None:
        """What the load is compared with."""
        target = str(self.path / "sorted")
        self.source.sort("id").write.mode("overwrite").parquet(target)

    def reef_df(self) -> Any:
        return self.spark.read.format("reef").option("namespace", "t1").load(self.url)

    def parquet_df(self) -> Any:
        return self.spark.read.parquet(str(self.path / "sorted"))

    def scan(self, df: Any) -> None:
        df.write.format("noop").mode("overwrite").save()

    # --- against threads ----------------------------------------------------------------
    def prepare_jobs(self) -> None:
        """Load the rows in parts that overlap; write a tenth of them to a log."""
        from pyspark.sql import functions as fn

        url = str(self.path / "compact")
        for part in range(LOADS):
            some = self.source.where(fn.pmod(fn.xxhash64("id"), fn.lit(LOADS)) == part)
            reef.spark.bulk_load(some, url, "c", key="id", count=False)
        reef.jobs.fold(reef.open(url), "c")
        tenth = pq.read_table(self.path / "source").slice(0, max(1, self.rows // 10))
        db = reef.open(str(self.path / "fold"))
        with db.writer("c", background=False, unfolded_bytes_max=1 << 40) as writer:
            for first in range(0, tenth.num_rows, LOG_BATCH):
                writer.upsert(tenth.slice(first, LOG_BATCH))

    def job(self, name: str, *, on_spark: bool) -> Any:
        """Return a run of a job on a copy of what was prepared, which is made first."""

        def run() -> tuple[float, Any]:
            copy = self.path / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(self.path / name, copy, copy_function=os.link)
            executor = reef.spark.executor(self.spark) if on_spark else None
            work = getattr(reef.jobs, name)
            wanted: dict[str, Any] = {"full": True} if name == "compact" else {}
            took_s, report = timed(
                lambda: work(reef.open(str(copy)), "c", executor=executor, **wanted)
            )
            rows = report.rows_written if name == "compact" else report.rows
            return took_s, rows

        return run

    # --- reads by key -------------------------------------------------------------------
    def point_reads(self) -> str:
        """Return the mean time of a read right after a load: cold, then the same keys warm."""
        chance = random.Random(1)
        keys = [
            hashlib.md5(str(chance.randrange(self.rows)).encode(), usedforsecurity=False).digest()
            for _ in range(POINT_READS)
        ]
        with reef.open(self.url).reader("t1") as reader:
            cold, found = timed(lambda: [reader.get(key) for key in keys])
            if any(row is None for row in found):
                raise SystemExit("a loaded row is missing")
            warm, _ = timed(lambda: [reader.get(key) for key in keys])
        return (
            f"- **A burst of {POINT_READS:,} point reads** right after the load, one by one: "
            f"{cold / POINT_READS * 1e6:,.0f} µs each from a cold reader, "
            f"{warm / POINT_READS * 1e6:,.0f} µs the second time. A cold one is a ranged read and "
            f"a checksum of one group of 64 to 256 KiB."
        )


def job_row(bench: Bench, name: str, rows: int, count: int) -> str:
    """Run a job with threads and on Spark, in turns; return a line of the table."""
    times: list[tuple[float, float]] = []
    here, there = bench.job(name, on_spark=False), bench.job(name, on_spark=True)
    for _ in range(count):
        (local_s, local), (spark_s, on_spark) = here(), there()
        if local != on_spark:
            raise SystemExit(f"{name}: threads wrote {local} rows, Spark {on_spark}")
        times.append((spark_s, local_s))
    mine_s, other_s = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(b / a for a, b in times)
    what = {"compact": "compaction", "fold": "fold of a log"}[name]
    return (
        f"| {what} on Spark | {mine_s:.1f} s, {rows / mine_s:,.0f} rows/s | threads | "
        f"{other_s:.1f} s, {rows / other_s:,.0f} rows/s | {ratio:.2f} × | | | stated |"
    )


def warm_up(spark: Any, path: Path) -> None:
    """Let the JVM compile, and the Python processes come up."""
    small = Bench(spark, WARM_ROWS, path)
    small.load()
    small.sort_and_write()
    for df in (small.reef_df(), small.parquet_df()):
        small.scan(df)


def run(bench: Bench, master: str, count: int) -> list[str]:
    """Run all cases; return the page, and print it line by line."""
    page: list[str] = []
    warm_up(bench.spark, bench.path / "warm")

    def emit(line: str) -> None:
        page.append(line)
        print(line, flush=True)

    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    emit(f"{bench.rows:,} rows of 16 + 100 bytes, {master}, on {machine}.\n")
    emit(HEADER)
    few = min(count, 3)
    emit(Case("bulk load", "sort + Parquet", bench.load, bench.sort_and_write).row(bench.rows, few))
    reads = Reads(bench.spark, bench.source, bench.rows, bench.path)
    for name, peer, rows, ours, theirs in reads.cases():
        emit(Case(name, peer, ours, theirs).row(rows, few if "MERGE" in name else count))
    with ExitStack() as stack:
        name, peer, rows, ours, theirs = reads.over_http(stack)
        emit(Case(name, peer, ours, theirs).row(rows, count))
    bench.prepare_jobs()
    emit(job_row(bench, "compact", bench.rows, min(count, 2)))
    emit(job_row(bench, "fold", max(1, bench.rows // 10), min(count, 2)))
    emit("\nWhat the time goes into:\n")
    emit(report_load(bench.reports[-1]))
    emit(read_alone(bench.url, "t1"))
    wide = str(bench.path / "wide-sorted")
    emit(report_query(bench.spark, bench.url, "wide", ["c2", "c7"], wide))
    emit(carried_alone(bench.spark, bench.rows))
    emit(bench.point_reads())
    return page


def main() -> None:
    """Run everything, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--keep", action="store_true")
    wanted = parser.parse_args()
    path = Path(tempfile.mkdtemp(prefix="reef-bench-"))
    spark = session(wanted.master, path)
    try:
        bench = Bench(spark, wanted.rows, path)
        if wanted.check:
            print(check_live(bench.source, path / "source", bench.url))
            return
        page = run(bench, wanted.master, wanted.rounds)
        if wanted.keep:
            made = f"Made by `python -m benchmarks.spark --keep` on {datetime.now(UTC):%Y-%m-%d}.\n"
            TABLE.write_text("\n".join(["# Benchmarks on Spark\n", made, *page]) + "\n")
    finally:
        spark.stop()
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    main()
