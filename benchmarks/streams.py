"""`python -m benchmarks.streams`: micro-batches into Reef and into Parquet, in one run.

    rows/s     Spark's `rate-micro-batch` source into each sink, in turns, with micro-batches of
               1,000, 100,000 and 1,000,000 rows; the median micro-batch, without the first ones
    latency    from a micro-batch's commit, by the date of its object, to a reader that sees it
    requests   of one micro-batch in the steady state, by kind
    ways       micro-batches of several sizes in the log itself and as segments: where `appendBytes`
               should be (`--only ways` measures nothing else)

With `--keep` the table goes to docs/benchmarks-streams.md. Exits with 1 if a query has lost rows.
"""

import argparse
import pickle
import platform
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

import reef
import reef.spark
from reef.spark import options, stream_sink
from reef.spark.stream_source import ReefStreamReader
from reef.telemetry import RequestKind, RequestMeter
from reef.testing import wrappers

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks-streams.md"
SIZES = {1000: 12, 100_000: 8, 1_000_000: 5}
"""Rows of a micro-batch, and how many of them are measured."""
WARM = 2
STEADY, CYCLE = 64, 32
"""Requests are the mean of the last CYCLE of STEADY micro-batches: from one fold to the next."""
SINKS = ("reef", "parquet")
WAYS_MIB = (0.25, 1, 4, 16, 32)
WAYS = 1 << 40, 1
"""The options `appendBytes` with which everything is appended, and everything staged."""
FOLDED = 16
"""Appended micro-batches from one fold to the next."""


# --- throughput -----------------------------------------------------------------------


def source(spark: SparkSession, rows: int) -> Any:
    """Return the rows of a micro-batch: a key of 16 bytes and 100 bytes."""
    rate = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows)
    value = (
        "concat(sha2(cast(value AS STRING), 256), substr(sha2(cast(value AS STRING), 224), 1, 36))"
    )
    return (
        rate.option("numPartitions", 2)
        .load()
        .selectExpr("lpad(value, 16, '0') AS id", f"{value} AS v")
    )


def run_query(spark: SparkSession, home: Path, sink: str, rows: int, batches: int) -> list[float]:
    """Run some micro-batches; return the seconds that each took, without the first ones."""
    place = home / f"{sink}-{rows}-{time.monotonic_ns()}"
    writer = source(spark, rows).writeStream.format(sink)
    writer = writer.option("checkpointLocation", str(place / "checkpoint"))
    if sink == "reef":
        writer = writer.options(namespace="t", key="id")
    query = writer.start(str(place / "data"))
    try:
        while query.isActive and (query.lastProgress or {"batchId": 0})["batchId"] < WARM + batches:
            time.sleep(0.05)
    finally:
        query.stop()
    if query.exception() is not None:
        raise SystemExit(str(query.exception()))
    progress = query.recentProgress
    check_rows(spark, place, sink, progress)
    shutil.rmtree(place)
    return [p["durationMs"]["triggerExecution"] / 1000 for p in progress[WARM : WARM + batches]]


def check_rows(spark: SparkSession, place: Path, sink: str, progress: list[Any]) -> None:
    """Stop if rows are missing: a quick sink that loses some is no peer."""
    at_least = sum(p["numInputRows"] for p in progress)
    if sink == "reef":
        found = reef.open(str(place / "data")).reader("t").count()
    else:
        found = spark.read.parquet(str(place / "data")).count()
    if found < at_least:
        raise SystemExit(f"{sink} has {found} of {at_least} rows")


def throughput(spark: SparkSession, home: Path, scale: float, rounds: int) -> list[str]:
    """Return a row of the table for each size."""
    lines = []
    for rows, batches in SIZES.items():
        count = max(1, int(rows * scale))
        took: dict[str, list[float]] = {sink: [] for sink in SINKS}
        for _ in range(rounds):
            for sink in SINKS:
                took[sink] += run_query(spark, home, sink, count, batches)
        median = {sink: statistics.median(took[sink]) for sink in SINKS}
        ours, theirs = (count / median[sink] for sink in SINKS)
        lines.append(
            f"| {count:,} rows | {median['reef']:.2f} s, {ours:,.0f} rows/s | "
            f"{median['parquet']:.2f} s, {theirs:,.0f} rows/s | {ours / theirs:.2f} × |"
        )
        print(lines[-1], flush=True)
    return lines


# --- latency --------------------------------------------------------------------------


def latency(spark: SparkSession, home: Path, seconds: float) -> list[str]:
    """Return rows of the table: how long after its commit a reader sees a micro-batch."""
    lines = []
    for name, settings in (
        ("a reader that refreshes every 2 s, the default", {}),
        ("every 100 ms", {"refresh_interval_ms": 100}),
    ):
        delays = _delays(spark, home / f"latency-{len(lines)}", seconds, settings)
        p50, p99 = np.percentile(delays, [50, 99])
        lines.append(f"| {name} | {p50 * 1000:,.0f} ms | {p99 * 1000:,.0f} ms | {len(delays)} |")
        print(lines[-1], flush=True)
    return lines


def _delays(
    spark: SparkSession, place: Path, seconds: float, settings: dict[str, Any]
) -> list[float]:
    db = reef.open(str(place / "data"))
    db.create("t", pa.schema([("id", pa.string()), ("v", pa.string())]))
    seen: dict[int, float] = {}
    over = threading.Event()

    def watch() -> None:
        with db.reader("t", **settings) as reader:
            while not over.wait(0.002):
                reader.get("0")  # refreshes by itself, when it is due
                seen.setdefault(reader.last_lsn, time.time())

    thread = threading.Thread(target=watch)
    thread.start()
    writer = source(spark, 1000).writeStream.format("reef").options(namespace="t")
    query = writer.option("checkpointLocation", str(place / "checkpoint")).start(
        str(place / "data")
    )
    time.sleep(seconds)
    query.stop()
    time.sleep(3)
    over.set()
    thread.join()
    times = sorted(seen.items())
    delays = []
    for path in (place / "data").rglob("*.wal"):
        lsn, written = int(path.stem), path.stat().st_mtime
        visible = [at for last, at in times if last >= lsn]
        if visible:
            delays.append(max(0.0, visible[0] - written))
    shutil.rmtree(place)
    return delays


# --- requests -------------------------------------------------------------------------


def requests(home: Path) -> list[str]:
    """Return rows of the table: the requests of one micro-batch, in the steady state."""
    lines = []
    for name, size, rows in (("appended", 4 << 20, 1000), ("staged by 2 tasks", 1, 1000)):
        counts = _requests(home / name.replace(" ", "-"), size, rows)
        lines.append(f"| {name} | {_text(counts)} |")
        print(lines[-1], flush=True)
    counts = _read_requests(home / "appended")
    lines.append(f"| read as changes | {_text(counts)} |")
    print(lines[-1], flush=True)
    return lines


def _text(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind.upper()}" for kind, count in sorted(counts.items()) if count)


class _Metered:
    """Counts the requests of everything that opens a store by the options of a query."""

    def __init__(self, latency: str | None = None) -> None:
        self.meter = RequestMeter()
        self._latency = latency
        self._open = options.TableLocation.open

    def __enter__(self) -> RequestMeter:
        meter, latency = self.meter, self._latency
        options.TableLocation.open = lambda self: wrappers.open_store(  # type: ignore[method-assign]
            self.url, meter=meter, latency=latency
        )
        return meter

    def __exit__(self, *error: object) -> None:
        options.TableLocation.open = self._open  # type: ignore[method-assign]


def _requests(place: Path, size: int, rows: int) -> dict[str, int]:
    with _Metered() as meter:
        for batch, _ in enumerate(_micro_batches(place, size, rows, STEADY)):
            if batch == STEADY - CYCLE - 1:
                meter.reset()
        return {kind: round(count / CYCLE) for kind, count in meter.requests().items()}


def _micro_batches(place: Path, size: int, rows: int, count: int) -> Iterator[float]:
    """Write micro-batches by two tasks; yield the seconds of each, as if both ran at once."""
    from pyspark.sql import types as st

    given = {"path": str(place), "namespace": "t", "key": "id", "appendbytes": str(size)}
    given["checkpointlocation"] = "/checkpoint"
    columns = st.StructType(
        [st.StructField("id", st.StringType()), st.StructField("v", st.StringType())]
    )
    values = random.Random(0).randbytes(50 * rows).hex()
    share, stream_sink.SHARE_BYTES_MIN = stream_sink.SHARE_BYTES_MIN, 1
    current = stream_sink.StreamTask.current
    try:
        for batch in range(count):
            took, messages = [], list[Any]()
            for part in range(2):
                task = stream_sink.StreamTask("q", "run", str(batch), part, 0)
                stream_sink.StreamTask.current = lambda task=task: task  # type: ignore[method-assign,assignment,misc]
                numbers = range(part * rows // 2, (part + 1) * rows // 2)
                table = pa.table(
                    {
                        "id": [f"{batch:08}{n:08}" for n in numbers],
                        "v": [values[100 * n : 100 * n + 100] for n in numbers],
                    }
                )
                start_s = time.perf_counter()
                sink = reef.spark.ReefSource(given).streamWriter(columns, False)
                messages.append(sink.write(iter(table.to_batches())))
                took.append(time.perf_counter() - start_s)
            start_s = time.perf_counter()
            reef.spark.ReefSource(given).streamWriter(columns, False).commit(messages, batch)
            yield max(took) + time.perf_counter() - start_s
    finally:
        stream_sink.SHARE_BYTES_MIN = share
        stream_sink.StreamTask.current = current  # type: ignore[method-assign]


# --- appended or staged ---------------------------------------------------------------


def ways(home: Path) -> list[str]:
    """Return a row of the table for each size of micro-batches: appended, and staged.

    On a store with the delays of S3, over a whole cycle of folds.
    """
    lines = []
    for mib in WAYS_MIB:
        cells = [_way(home / f"way-{mib}-{size}", size, int(mib * 2**20) // 116) for size in WAYS]
        lines.append(f"| {mib} MiB | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return lines


def _way(place: Path, size: int, rows: int) -> str:
    with _Metered("s3-standard") as meter:
        cpu_s = time.process_time()
        took = list(_micro_batches(place, size, rows, FOLDED))
        cpu_s = time.process_time() - cpu_s
        counts = meter.counts()
    shutil.rmtree(place)
    requests = sum(count.requests for count in counts.values()) / FOLDED
    written = counts[RequestKind.PUT].bytes / FOLDED / rows / 116
    median, mean = statistics.median(took), statistics.mean(took)
    return (
        f"{median:.2f} s, {mean:.2f} s with folds, {requests:.0f} requests, "
        f"{cpu_s / FOLDED:.2f} s of CPU, {written:.1f} × written"
    )


def _read_requests(place: Path) -> dict[str, int]:
    given = {"path": str(place), "namespace": "t", "startingLsn": "0", "cursorSeconds": "0"}
    given |= {"pollMs": "0", "maxRowsPerTrigger": "1000"}
    source = reef.spark.ReefSource(given)
    reader = ReefStreamReader(given, source.schema())
    start: dict[str, Any] = reader.initialOffset()
    with _Metered() as meter:
        for _ in range(4):
            meter.reset()
            end = reader.latestOffset(start, reader.getDefaultReadLimit())
            parts = reader.partitions(start, end)
            for part in parts:
                task, sent = pickle.loads(pickle.dumps((reader, part)))
                for _ in task.read(sent):
                    pass
            reader.commit(end)
            start = end
        return dict(meter.requests())


# --- the page -------------------------------------------------------------------------


def main() -> int:
    """Measure everything, print it, and keep it if asked to."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--scale", type=float, default=1.0, help="of the rows in a micro-batch")
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--seconds", type=float, default=40.0, help="of each latency run")
    arguments.add_argument("--keep", action="store_true", help="write the page in docs/")
    arguments.add_argument("--only", choices=["ways"], help="measure nothing else")
    given = arguments.parse_args()
    if given.only:
        with tempfile.TemporaryDirectory() as folder:
            ways(Path(folder))
        return 0
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.log.level", "ERROR").config("spark.sql.shuffle.partitions", "2")
    spark = reef.spark.configure(builder).getOrCreate()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        machine = f"{platform.system()} {platform.machine()}, local[2]"
        lines = [
            "# Benchmarks of streams",
            "",
            "Made by `python -m benchmarks.streams --keep`.",
            "",
            f"Measured {datetime.now(UTC):%Y-%m-%d} on {machine}.",
            "",
            "Rows of 16 + 100 bytes from the source `rate-micro-batch`; the median micro-batch.",
            "",
            "| micro-batch | Reef | Parquet sink | ratio of rows/s |",
            "|---|---|---|---|",
            *throughput(spark, home, given.scale, given.rounds),
            "",
            "From the commit of a micro-batch of 1,000 rows until a reader sees it:",
            "",
            "| reader | p50 | p99 | micro-batches |",
            "|---|---|---|---|",
            *latency(spark, home, given.seconds),
            "",
            "Requests of one micro-batch, all processes together, in the steady state: the mean of "
            f"{CYCLE} micro-batches, with the folds between them.",
            "",
            "| micro-batch | requests |",
            "|---|---|",
            *requests(home),
            "",
            "Micro-batches in the log itself, and as segments of 2 tasks, on a store with the "
            "delays of S3: the time from rows to commit, without the processes of Spark; "
            f"{FOLDED} micro-batches, with the folds between them. `written` is relative to the "
            "rows. The default of `appendBytes` follows from this.",
            "",
            "| micro-batch | appended | staged |",
            "|---|---|---|",
            *ways(home),
        ]
    if given.keep:
        PAGE.write_text("\n".join(lines) + "\n")
    spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
