"""What the time of a load and of a scan goes into: from reports, and without Spark around it."""

import time
from typing import Any

from reef.spark import BulkLoadReport, ReefSource

__all__ = ["read_alone", "told_load"]


def told_load(report: BulkLoadReport) -> str:
    """Say where the time of a load went, by the load's own report."""
    stages = ", ".join(f"{name} {took:.1f} s" for name, took in report.seconds.items())
    tasks = ", ".join(f"{name} {took:.1f} s" for name, took in report.task_seconds.items())
    return (
        f"- **The last bulk load** wrote {report.segments} segments from {report.partitions} "
        f"partitions (skew {report.skew:.2f}, {report.spilled} runs on disk). On the driver: "
        f"{stages}; checking counts rows and samples keys, which is a pass over the key column. "
        f"In its tasks, all together: {tasks}; receiving is Spark's read, shuffle and hand-over."
    )


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
        f"- **A full scan** without Spark, one share after the other: {took_s:.1f} s for "
        f"{rows:,} rows in {len(shares)} shares ({cpu_s:.1f} s of CPU), and {planned_s:.2f} s to "
        f"plan; what a scan on Spark takes beyond its part of that is the start of Python "
        f"processes and the hand-over."
    )
