"""What Reef tells of itself: metrics, requests and their cost, and events.

One small home for all of it. Nothing is printed unless someone asks: metrics are read,
events are subscribed to, and the log is silent by default.
"""

from reef.telemetry.events import Event, Events
from reef.telemetry.metrics import Counter, Gauge, Histogram, Metrics
from reef.telemetry.operations import operation
from reef.telemetry.requests import PRICES, PriceTable, RequestKind, RequestMeter

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
