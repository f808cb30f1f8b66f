"""OpenTelemetry: a span for every operation, and the metrics of databases. Extra `otel`.

    import reef.telemetry.otel
    reef.telemetry.otel.instrument(db)

Spans are named `reef.commit`, `reef.get`, `reef.fold` and so on, with the attribute
`reef.requests`; they nest as the operations do, and have the error of one that failed. Metrics are
read when an exporter collects them. A histogram has three instruments, since OpenTelemetry has no
histogram that is read: `….count`, `….sum` and `….p99`.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from reef._version import __version__
from reef.errors import UnavailableError
from reef.telemetry.metrics import HELP, Counter, Gauge, Histogram, Metrics, operation

try:
    from opentelemetry import metrics as otel_metrics
    from opentelemetry import trace
    from opentelemetry.metrics import CallbackOptions, Observation
except ImportError as error:
    raise UnavailableError(
        "OpenTelemetry is not installed", hint="pip install 'reef[otel]'"
    ) from error

NAME = "reef"
SUMS, LEVELS = ("count", "sum"), ("p99",)


def instrument(
    db: Any,
    *,
    tracer_provider: Any = None,
    meter_provider: Any = None,
    attributes: dict[str, str] | None = None,
) -> None:
    """Export the metrics of a database, and the operations of this process as spans.

    The providers are the global ones by default. `attributes` are added to every value. A database
    that was garbage-collected is not exported any more.
    """
    trace_operations(tracer_provider)
    meter = otel_metrics.get_meter(NAME, __version__, meter_provider)
    source, fixed = weakref.ref(db.metrics), {"db.url": db.store.url, **(attributes or {})}
    for name, text in HELP.items():
        for part in ("", *SUMS, *LEVELS):
            read = _reader(source, name, part, fixed)
            full = f"reef.{name}.{part}" if part else f"reef.{name}"
            if part in SUMS:
                meter.create_observable_counter(full, [read], description=text)
            elif part:
                meter.create_observable_gauge(full, [read], description=text)
            else:  # whether it is a counter or a gauge shows when it is first used
                meter.create_observable_gauge(full, [read], description=text)


def trace_operations(tracer_provider: Any = None) -> None:
    """Make a span of every operation of this process."""
    tracer = trace.get_tracer(NAME, __version__, tracer_provider)

    def begin(name: str) -> Callable[..., None]:
        context = tracer.start_as_current_span(f"reef.{name}")
        span = context.__enter__()

        def end(requests: int, *error: Any) -> None:
            span.set_attribute("reef.requests", requests)
            context.__exit__(*error)

        return end

    operation.begin_span = begin


def _reader(
    source: "weakref.ref[Metrics]", name: str, part: str, fixed: dict[str, str]
) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def read(options: CallbackOptions) -> Iterator[Observation]:
        metrics = source()
        metric = None if metrics is None else dict(metrics.items()).get(name)
        if isinstance(metric, Counter | Gauge) and not part:
            yield Observation(metric.value, fixed)
        elif isinstance(metric, Histogram) and part:
            values = {"count": metric.count, "sum": metric.total, "p99": metric.quantile(0.99)}
            yield Observation(values[part], fixed)

    return read
