"""Spark side by side with Parquet: load, full scan, filtered aggregate; point reads after a load.

    python -m benchmarks.spark [--rows 5000000] [--rounds 3] [--master 'local[2]'] [--check]

Rows have 16-byte keys, in no order, and 100-byte values that do not compress. Both sides start
from the same Parquet files and take turns in one session. A bulk load stands against `sort` and
a Parquet write of the same data; a scan into `noop` and an aggregate over a tenth of the keys
against the same from the sorted Parquet. `--check` writes live rows during one load and compares
the result with a model, row by row.
"""

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

import reef
import reef.spark

GOALS = {"bulk load": 1.2, "full scan": 1.0, "filtered aggregate": None}
"""Rows per second over Parquet's; design section 13."""
POINT_READS = 2000


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


class Bench:
    """One run: a directory, a session, the same rows on both sides."""

    def __init__(self, spark: Any, rows: int, path: Path) -> None:
        self.spark, self.rows, self.path = spark, rows, path
        self.source = make_source(spark, rows, path)
        self.url = str(path / "reef")
        self.number = 0
        self.reports: list[Any] = []

    def load(self) -> None:
        """Bulk load into a new namespace."""
        self.number += 1
        name = f"t{self.number}"
        self.reports.append(reef.spark.bulk_load(self.source, self.url, name, key="id"))

    def sort_and_write(self) -> None:
        """What the load is compared with."""
        target = str(self.path / "sorted")
        self.source.sort("id").write.mode("overwrite").parquet(target)

    @property
    def reef_df(self) -> Any:
        return self.spark.read.format("reef").option("namespace", "t1").load(self.url)

    @property
    def parquet_df(self) -> Any:
        return self.spark.read.parquet(str(self.path / "sorted"))

    def scan(self, df: Any) -> None:
        df.write.format("noop").mode("overwrite").save()

    def aggregate_reef(self) -> Any:
        table = reef.spark.table(self.spark, self.url, "t1")
        return self._sum(table.where("id < X'19999999'").df())

    def aggregate_parquet(self) -> Any:
        from pyspark.sql import functions as fn

        low = self.parquet_df.where(fn.col("id") < fn.unhex(fn.lit("19999999")))
        return self._sum(low)

    def _sum(self, df: Any) -> Any:
        from pyspark.sql import functions as fn

        (row,) = df.select(fn.count("id"), fn.sum(fn.length("value"))).collect()
        return tuple(row)

    def point_reads(self) -> tuple[float, float]:
        """Return the mean time of a read right after a load: cold, then the same keys warm."""
        import hashlib

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
        return cold / POINT_READS, warm / POINT_READS


def rounds(
    bench: Bench, name: str, ours: Callable[[], Any], theirs: Callable[[], Any], count: int
) -> str:
    """Run both in turns; return a line of the table."""
    times: list[tuple[float, float]] = []
    for number in range(count):
        if number % 2:
            b, other = timed(theirs)
            a, mine = timed(ours)
        else:
            a, mine = timed(ours)
            b, other = timed(theirs)
        if mine != other:
            raise SystemExit(f"{name}: Reef says {mine}, Parquet {other}")
        times.append((a, b))
    ratio = statistics.median(b / a for a, b in times)
    mine_s, other_s = (statistics.median(column) for column in zip(*times, strict=True))
    goal = GOALS[name]
    verdict = "stated"
    if goal is not None:
        verdict = "met" if ratio >= goal else f"missed by {1 - ratio / goal:.0%}"
    return (
        f"| {name} | {mine_s:.1f} s, {bench.rows / mine_s:,.0f} rows/s | {other_s:.1f} s, "
        f"{bench.rows / other_s:,.0f} rows/s | {ratio:.2f} × | "
        f"{'' if goal is None else f'≥ {goal:g} ×'} | {verdict} |"
    )


def check_live(bench: Bench) -> str:
    """Load while a writer is at work; compare with a model, row by row."""
    db = reef.open(bench.url)
    db.create("live")
    writes: list[tuple[int, list[bytes], bytes]] = []
    over = threading.Event()

    def live() -> None:
        chance = random.Random(2)
        with db.writer("live", max_parallel_writes=4) as writer:
            while not over.is_set():
                some = [chance.randbytes(2) + bytes(14) for _ in range(50)]
                mark = b"live %d" % len(writes)
                rows = pa.table({"id": some, "value": [mark] * len(some)})
                writes.append((writer.upsert(rows).lsn or 0, some, mark))

    thread = threading.Thread(target=live)
    thread.start()
    try:
        report = reef.spark.bulk_load(bench.source, bench.url, "live")
    finally:
        over.set()
        thread.join()
    expected = {key: mark for lsn, keys, mark in writes if lsn < report.lsn for key in keys}
    table = bench.source.toArrow()
    ids, values = table["id"].to_pylist(), table["value"].to_pylist()
    expected |= dict(zip(ids, values, strict=True))
    for lsn, keys, mark in writes:
        if lsn > report.lsn:
            expected |= dict.fromkeys(keys, mark)
    seen = 0
    for batch in db.reader("live").scan_arrow():
        for key, value in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            if expected.pop(key, None) != value:
                raise SystemExit(f"{key!r} has {value!r}")
            seen += 1
    if expected:
        raise SystemExit(f"{len(expected)} rows are missing")
    before = sum(1 for lsn, _, _ in writes if lsn < report.lsn)
    return (
        f"Live rows: {len(writes)} batches beside a load of {bench.rows:,} rows, {before} of them "
        f"before its LSN; {seen:,} rows equal the model."
    )


def main() -> None:
    """Run everything, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--check", action="store_true")
    wanted = parser.parse_args()
    path = Path(tempfile.mkdtemp(prefix="reef-bench-"))
    spark = session(wanted.master)
    try:
        bench = Bench(spark, wanted.rows, path)
        print(f"{wanted.rows:,} rows of 16 + 100 bytes, {wanted.master}\n")
        print("| what | Reef | Parquet | ratio of rows/s | goal | |\n|---|---|---|---|---|---|")
        print(rounds(bench, "bulk load", bench.load, bench.sort_and_write, wanted.rounds))
        print(
            rounds(
                bench,
                "full scan",
                lambda: bench.scan(bench.reef_df),
                lambda: bench.scan(bench.parquet_df),
                wanted.rounds,
            )
        )
        print(
            rounds(
                bench,
                "filtered aggregate",
                bench.aggregate_reef,
                bench.aggregate_parquet,
                wanted.rounds,
            )
        )
        cold, warm = bench.point_reads()
        print(
            f"\nPoint reads after the load: {cold * 1e6:,.0f} µs cold, {warm * 1e6:,.0f} µs again."
        )
        last = bench.reports[-1]
        stages = {name: round(seconds, 1) for name, seconds in last.seconds.items()}
        tasks = {name: round(seconds, 1) for name, seconds in last.task_seconds.items()}
        print(f"The last load: {last.segments} segments, skew {last.skew:.2f}, {stages}; {tasks}.")
        if wanted.check:
            print(check_live(bench))
    finally:
        spark.stop()
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    main()
