"""What the time of a load and of a scan goes into: from reports, and without Spark around it."""

import os
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

import reef
from reef.spark import BulkLoadReport, ReefSource

__all__ = ["carried_alone", "cpu_seconds", "read_alone", "report_load", "report_query"]

CARRIED_SHARES = 16
CARRIED_BATCH_ROWS = 65_536
QUERIES = 10


class Ready(DataSource):
    """Rows of the benchmark's size that are there already: what is left is Spark's transport."""

    @classmethod
    def name(cls) -> str:
        return "ready"

    def schema(self) -> str:
        return "id binary, value binary"

    def reader(self, schema: Any) -> "ReadyReader":
        return ReadyReader(int(self.options["rows"]))


class ReadyReader(DataSourceReader):
    """Sends one batch again and again."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(number) for number in range(CARRIED_SHARES)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        left = self._rows // CARRIED_SHARES
        arrays = [_noise(CARRIED_BATCH_ROWS, width) for width in (16, 100)]
        batch = pa.record_batch(arrays, names=["id", "value"])
        while left > 0:
            yield batch.slice(0, min(left, CARRIED_BATCH_ROWS))
            left -= CARRIED_BATCH_ROWS


def _noise(rows: int, width: int) -> pa.Array:
    offsets = np.arange(0, width * (rows + 1), width, dtype=np.int32)
    buffers = [
        None,
        pa.py_buffer(offsets),
        pa.py_buffer(np.random.default_rng(1).bytes(width * rows)),
    ]
    return pa.Array.from_buffers(pa.binary(), rows, buffers)


def cpu_seconds() -> float:
    """Return the CPU time of all processes below this one: Spark's JVM and its Python workers."""
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        process = int(entry.parent.name)
        parents[process] = int(fields[1])
        used[process] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return sum(time_s for process, time_s in used.items() if _is_below(process, parents))


def _is_below(process: int, parents: dict[int, int]) -> bool:
    while process in parents and process > 1:
        process = parents[process]
        if process == os.getpid():
            return True
    return False


def carried_alone(spark: Any, rows: int) -> str:
    """Scan rows that need no reading, as often as the rounds of a benchmark; report the best."""
    spark.dataSource.register(Ready)
    df = spark.read.format("ready").option("rows", rows).load()
    times = []
    for _ in range(3):
        started_s = time.perf_counter()
        df.write.format("noop").mode("overwrite").save()
        times.append(time.perf_counter() - started_s)
    return (
        f"- **Spark's transport alone**, from a Python data source that has its rows ready: "
        f"{min(times):.1f} s, {rows / min(times):,.0f} rows/s. No Python source can be quicker; "
        f'the option `engine="python"` reads so, the native reader does not.'
    )


def report_load(report: BulkLoadReport) -> str:
    """Say where the time of a load went, by the load's own report."""
    stages = ", ".join(f"{name} {took:.1f} s" for name, took in report.seconds.items())
    tasks = ", ".join(f"{name} {took:.1f} s" for name, took in report.task_seconds.items())
    return (
        f"- **The last bulk load** wrote {report.segments} segments from {report.partitions} "
        f"partitions (skew {report.skew:.2f}, {report.spilled} runs on disk). On the driver: "
        f"{stages}; checking counts rows and samples keys, which is a pass over the key column. "
        f"In its tasks, all together: {tasks}; receiving is Spark's read, shuffle and hand-over."
    )


def report_query(spark: Any, url: str, namespace: str, columns: list[str], parquet: str) -> str:
    """Say where the time of a narrow query goes, on both sides, and right after a change."""
    db = reef.open(url)

    def ours() -> Any:
        return spark.table(f"reef.default.{namespace}")

    def theirs() -> Any:
        return spark.read.parquet(parquet)

    times: dict[str, list[list[float]]] = {}
    for _ in range(QUERIES):
        db.snapshot(namespace, ttl_s=1)  # a generation more, of the same rows
        for name, table in (("Reef after a change", ours), ("Reef", ours), ("Parquet", theirs)):
            times.setdefault(name, []).append(_steps(table, columns))
    parts = []
    for name, rounds in times.items():
        table_ms, plan_ms, run_ms = (min(column) for column in zip(*rounds, strict=True))
        parts.append(f"{name} {table_ms:.0f} + {plan_ms:.0f} + {run_ms:.0f} ms")
    return (
        f"- **A query of {len(columns)} columns**, at best: table and schema, plan, and run: "
        f"{'; '.join(parts)}. Python plans only after a change."
    )


def _steps(table: Callable[[], Any], columns: list[str]) -> list[float]:
    """Return how long it takes to load a table, to plan a query of it, and to run it, in ms."""
    started = [time.perf_counter()]
    df = table().select(*columns)
    started.append(time.perf_counter())
    execution = df._jdf.queryExecution()
    execution.executedPlan()
    started.append(time.perf_counter())
    execution.toRdd().count()
    started.append(time.perf_counter())
    return [1000 * (end - start) for start, end in pairwise(started)]


def read_alone(url: str, namespace: str) -> str:
    """Read a table as the tasks of a scan do, in this process: what is left is Spark's part."""
    source = ReefSource({"path": url, "namespace": namespace})
    schema = source.schema()
    planned_s = time.perf_counter()
    reader: Any = source.reader(schema)
    shares = reader.partitions()
    planned_s = time.perf_counter() - planned_s
    started_s, cpu_s, rows = time.perf_counter(), time.process_time(), 0
    for share in shares:
        rows += sum(len(batch) for batch in reader.read(share))
    took_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    return (
        f"- **A full scan in Python**, no Spark, one share after the other: {took_s:.1f} s for "
        f"{rows:,} rows in {len(shares)} shares ({cpu_s:.1f} s of CPU), and {planned_s:.2f} s to "
        f"plan; the scan on Spark above is the native reader's, which decodes in the JVM without "
        f"Python processes ([Spark](guide/spark.md))."
    )
