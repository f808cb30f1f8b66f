"""Meters: what the tasks of some reads ask of the bucket, seen from the driver.

    meter = reef.spark.TaskMeter(spark)
    reef.spark.table(spark, url, "events").where("amount > 5").meter(meter).df().count()
    meter.counts    # {"tasks": 4, "rows": 120, "get.requests": 9, "get.bytes": 81920, …}

Tasks that fail send nothing. The planning of a read, which is no task, travels home with the
first one, under names that begin with `planning.`.
"""

from typing import Any

from pyspark.accumulators import Accumulator

from reef.errors import InvalidInputError, Kind
from reef.spark.counts import Counts, CountsSum
from reef.spark.session import is_remote
from reef.spark.source import register

__all__ = ["TaskMeter"]


class TaskMeter:
    """Counts what the tasks of some reads ask of the bucket; lives on the driver."""

    def __init__(self, spark: Any) -> None:
        if is_remote(spark):
            raise InvalidInputError(
                "Spark Connect has no accumulators, which bring the counts home",
                kind=Kind.INVALID_OPTION,
                hint="Count in a session of its own, without Connect",
            )
        # A source that Spark found by itself is not given accumulators; one that it is told of is.
        register(spark)
        self._sum: Accumulator[Counts] = spark.sparkContext.accumulator({}, CountsSum())

    @property
    def option(self) -> str:
        """The value of the option `meter`."""
        return str(self._sum.aid)

    @property
    def counts(self) -> Counts:
        """What was counted since the last reset."""
        return dict(self._sum.value)

    def bytes_read(self, *, planning: bool = False) -> int:
        """Return the bytes that tasks have got, with or without those of planning."""
        counts = self.counts
        return counts.get("get.bytes", 0) + planning * counts.get("planning.get.bytes", 0)

    def reset(self) -> None:
        self._sum.value = {}
