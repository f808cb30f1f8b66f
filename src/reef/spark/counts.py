"""Counts: what a task has asked of the bucket, and how that comes home.

A task counts its requests and bytes, and sends them home when it has succeeded: those of a
read through one of Spark's accumulators, whose id goes along as an option; those of a job with
its result.
"""

from collections.abc import Mapping
from typing import Any

from pyspark.accumulators import Accumulator, AccumulatorParam

from reef.stores import Meter, Store, Wrapper
from reef.telemetry import RequestMeter

__all__ = ["Counts", "CountsSum", "counts_of", "send_home"]

Counts = dict[str, int]


class CountsSum(AccumulatorParam[Counts]):
    """Adds counts name by name."""

    def zero(self, value: Counts) -> Counts:
        return {}

    def addInPlace(self, value1: Counts, value2: Counts) -> Counts:  # noqa: N802 - Spark's name
        for name, count in value2.items():
            value1[name] = value1.get(name, 0) + count
        return value1


def send_home(meter: int, counts: Mapping[str, int]) -> None:
    """Add to an accumulator of the driver; called in a task."""
    Accumulator(meter, {}, CountsSum()).add(dict(counts))


def counts_of(store: Store, prefix: str = "") -> Counts:
    """Return what a store has counted: requests and bytes by kind."""
    meter = _meter_in(store)
    told: dict[str, Any] = {} if meter is None else meter.to_dict()
    return {
        f"{prefix}{kind}.{what}": count
        for kind, counted in told.items()
        for what, count in counted.items()
        if count
    }


def _meter_in(store: Store) -> RequestMeter | None:
    while isinstance(store, Wrapper):
        if isinstance(store, Meter):
            return store.meter
        store = store.inner
    return None
