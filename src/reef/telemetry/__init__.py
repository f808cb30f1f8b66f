"""Telemetry: metrics, requests and their cost, and events.

Nothing is printed by itself: metrics are read, events are subscribed to, and the log is silent by
default.
"""

from reef.telemetry.metrics import (
    PRICES,
    Counter,
    Event,
    Events,
    Gauge,
    Histogram,
    Metrics,
    PriceTable,
    RequestKind,
    RequestMeter,
    operation,
)

__all__ = [
    "PRICES",
    "Counter",
    "Event",
    "Events",
    "Gauge",
    "Histogram",
    "Metrics",
    "PriceTable",
    "RequestKind",
    "RequestMeter",
    "operation",
]
