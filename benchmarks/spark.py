"""Spark side by side with Parquet, and jobs on Spark side by side with threads.

    python -m benchmarks.spark [--rows 5000000] [--rounds 3] [--master 'local[2]'] [--keep]
    python -m benchmarks.spark --check [--rows 5000000]

Rows have 16-byte keys, in no order, and 100-byte values that do not compress. Both sides start
from the same Parquet files and take turns in one session. A bulk load stands against `sort` and
a Parquet write of the same data; a scan into `noop` and an aggregate over a tenth of the keys
against the same from the sorted Parquet; a compaction and a fold on Spark against the same with
threads. `--keep` writes the table to docs/benchmarks-spark.md. `--check` does none of that: it
writes live rows during one load and compares the result with a model, row by row.
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
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

import reef
import reef.spark
from benchmarks.spark_live import check_live
from benchmarks.spark_profile import carried_alone, read_alone, told_load

TABLE = Path(__file__).parent.parent / "docs" / "benchmarks-spark.md"
GOALS = {"bulk load": 1.2, "full scan": 1.0}
"""Rows per second over the peer's; design section 13. The others are stated."""
POINT_READS = 2000
LOADS = 4
"""What is compacted was loaded in so many parts, each over all keys."""
LOG_BATCH = 20_000
HEADER = "| what | Reef | peer | peer's | ratio of rows/s | goal | |\n|---|---|---|---|---|---|---|"


def session(master: str) -> Any:
    """Start a session that both sides share."""
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    return (
        SparkSession.builder.master(master)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "4g")
        .config("spark.sql.parquet.compression.codec", "zstd")
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", "65536")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )


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
    """Return how long a call takes, and what it returns."""
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
        """Run both in turns; return a line of the table."""
        times: list[tuple[float, float]] = []
        for number in range(count):
            order = (self.theirs, self.ours) if number % 2 else (self.ours, self.theirs)
            (first_s, first), (second_s, second) = timed(order[0]), timed(order[1])
            if first != second:
                raise SystemExit(f"{self.name}: one says {first}, the other {second}")
            times.append((second_s, first_s) if number % 2 else (first_s, second_s))
        ratio = statistics.median(b / a for a, b in times)
        mine_s, other_s = (statistics.median(column) for column in zip(*times, strict=True))
        goal, verdict, promised = GOALS.get(self.name), "stated", ""
        if goal is not None:
            promised = f"≥ {goal:g} ×"
            verdict = "met" if ratio >= goal else f"missed by {1 - ratio / goal:.0%}"
        return (
            f"| {self.name} | {mine_s:.1f} s, {rows / mine_s:,.0f} rows/s | {self.peer} | "
            f"{other_s:.1f} s, {rows / other_s:,.0f} rows/s | {ratio:.2f} × | {promised} | "
            f"{verdict} |"
        )


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

    def aggregate_reef(self) -> Any:
        table = reef.spark.table(self.spark, self.url, "t1")
        return self._sum(table.where("id < X'19999999'").df())

    def aggregate_parquet(self) -> Any:
        from pyspark.sql import functions as fn

        low = self.parquet_df().where(fn.col("id") < fn.unhex(fn.lit("19999999")))
        return self._sum(low)

    def _sum(self, df: Any) -> Any:
        from pyspark.sql import functions as fn

        (row,) = df.select(fn.count("id"), fn.sum(fn.length("value"))).collect()
        return tuple(row)

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
        f"{other_s:.1f} s, {rows / other_s:,.0f} rows/s | {ratio:.2f} × | | stated |"
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

    def told(line: str) -> None:
        page.append(line)
        print(line, flush=True)

    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    told(f"{bench.rows:,} rows of 16 + 100 bytes, {master}, on {machine}.\n")
    told(HEADER)
    cases = [
        Case("bulk load", "sort + Parquet", bench.load, bench.sort_and_write),
        Case(
            "full scan",
            "Parquet",
            lambda: bench.scan(bench.reef_df()),
            lambda: bench.scan(bench.parquet_df()),
        ),
        Case("filtered aggregate", "Parquet", bench.aggregate_reef, bench.aggregate_parquet),
    ]
    for case in cases:
        told(case.row(bench.rows, count))
    bench.prepare_jobs()
    told(job_row(bench, "compact", bench.rows, min(count, 2)))
    told(job_row(bench, "fold", max(1, bench.rows // 10), min(count, 2)))
    told("\nWhat the time goes into:\n")
    told(told_load(bench.reports[-1]))
    told(read_alone(bench.url, "t1"))
    told(carried_alone(bench.spark, bench.rows))
    told(bench.point_reads())
    return page


def main() -> None:
    """Run everything, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--keep", action="store_true")
    wanted = parser.parse_args()
    path = Path(tempfile.mkdtemp(prefix="reef-bench-"))
    spark = session(wanted.master)
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
