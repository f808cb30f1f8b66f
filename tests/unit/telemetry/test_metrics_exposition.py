"""Metrics for Prometheus and OpenTelemetry, and the rules and the dashboard that use them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import reef
from reef.telemetry import Metrics, RequestMeter, operation
from reef.telemetry.metrics import HELP, series_name

ROOT = Path(__file__).parents[3]
MONITORING = ROOT / "docs" / "operations" / "monitoring"
SAMPLE = re.compile(r"([a-z_0-9]+)(?:\{(.*)\})? (\S+)$")
MADE = re.compile(r'\.(?:counter|gauge|histogram)\(\s*"([a-z_.]+)"')
OPERATION = re.compile(r'\boperation\([\w.]+, "([a-z_]+)"')


def samples(text):
    """Return the values of a scrape, by name and labels; every line must be one or a comment."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("# "):
            name, labels, value = SAMPLE.match(line).groups()
            found[name, labels] = float(value)
    return found


def test_counters_gauges_and_histograms():
    """Buckets are cumulative, fixed, and end with +Inf; names and labels are escaped."""
    given = Metrics()
    given.counter("commit.fenced").add(3)
    given.gauge("reader.lag_s").set(1.5)
    for seconds in (0.00002, 0.001, 0.001, 100.0):
        given.histogram("commit.seconds").record(seconds)
    given.histogram("commit.object_bytes", unit=1.0).record(1000)
    text = given.prometheus({"app": 'a"b\\c'})
    found = samples(text)
    app = r'app="a\"b\\c"'
    assert found["reef_commit_fenced_total", app] == 3
    assert found["reef_reader_lag_s", app] == 1.5
    buckets = {
        float(re.search(r'le="([^"]+)"', labels)[1]): value
        for (name, labels), value in found.items()
        if name == "reef_commit_seconds_bucket"
    }
    assert list(buckets.values()) == sorted(buckets.values())
    assert (buckets[0.000032], buckets[0.001024], buckets[float("inf")]) == (1, 3, 4)
    assert found["reef_commit_seconds_count", app] == 4
    assert found["reef_commit_seconds_sum", app] == pytest.approx(100.00202)
    assert found["reef_commit_object_bytes_bucket", f'{app},le="1024"'] == 1
    assert "# TYPE reef_commit_seconds histogram" in text.splitlines()
    assert "# TYPE reef_commit_fenced_total counter" in text.splitlines()
    assert samples(Metrics().prometheus()) == {}


def test_the_requests_of_a_meter():
    """By kind, with their bytes."""
    meter = RequestMeter()
    db = reef.open("memory://", meter=meter)
    with db.writer("users", background=False) as users:
        users.put("a", b"1")
    found = samples(db.metrics.prometheus(meter=meter))
    assert found["reef_requests_total", 'kind="put"'] == meter.requests()["put"]
    assert found["reef_request_bytes_total", 'kind="put"'] > 0
    assert found["reef_commit_seconds_count", None] == 1


def test_every_metric_has_a_description():
    """The table is complete, and names nothing that no module records."""
    text = "\n".join(path.read_text() for path in (ROOT / "src" / "reef").rglob("*.py"))
    made = set(MADE.findall(text)) | {f"{name}.requests" for name in OPERATION.findall(text)}
    assert made == set(HELP)


@pytest.mark.parametrize("name", ["alerts.yml", "grafana.json", "README.md"])
def test_rules_and_dashboard_name_metrics_that_exist(name):
    """A renamed metric must not leave an alert that never fires."""
    text = (MONITORING / name).read_text()
    known = {"reef_requests_total", "reef_request_bytes_total"}
    for metric in HELP:
        series = series_name(metric)
        known |= {series, f"{series}_total"} | {f"{series}_{p}" for p in ("bucket", "sum", "count")}
    named = set(re.findall(r"\breef_[a-z_]*[a-z]\b", text))
    assert named
    assert named <= known
    if name == "grafana.json":
        panels = json.loads(text)["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels) >= 8
    kinds = _kinds()
    for series in named - {"reef_requests_total", "reef_request_bytes_total"}:
        assert series.endswith(kinds[_metric_of(series)]), series


def _metric_of(series):
    stem = re.sub(r"_(total|bucket|sum|count)$", "", series)
    return next(name for name in HELP if series_name(name) in (series, stem))


def _kinds():
    """Return how the series of each metric end, from the calls that make it."""
    text = "\n".join(path.read_text() for path in (ROOT / "src" / "reef").rglob("*.py"))
    ends = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    kinds = {
        name: ends[kind]
        for kind, name in re.findall(r'\.(counter|gauge|histogram)\(\s*"([a-z_.]+)"', text)
    }
    kinds |= {"cache.hits": ("_total",), "cache.misses": ("_total",), "cache.bytes": ("",)}
    return {name: kinds.get(name, ends["histogram"]) for name in HELP}


@pytest.fixture
def untraced():
    """Remove the tracer again."""
    yield
    operation.begin_span = None


def test_operations_are_spans(untraced):
    """Named after the operation, nested, with their requests and the error of a failed one."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from reef.telemetry import otel

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    otel.trace_operations(provider)
    db = reef.open("memory://")
    with db.writer("users", background=False) as users:
        exporter.clear()
        users.put("a", b"1")
    (commit,) = [span for span in exporter.get_finished_spans() if span.name == "reef.commit"]
    assert commit.attributes["reef.requests"] == 1
    exporter.clear()
    with pytest.raises(reef.NotFoundError):
        db.reader("nothing")
    (failed,) = exporter.get_finished_spans()
    assert (failed.name, failed.status.is_ok) == ("reef.open_reader", False)


def test_metrics_are_observed(untraced):
    """As they are when they are collected, of the database that was given."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    from reef.telemetry import otel

    reader = InMemoryMetricReader()
    db = reef.open("memory://")
    otel.instrument(db, meter_provider=MeterProvider([reader]), attributes={"app": "x"})
    with db.writer("users", background=False) as users:
        users.put("a", b"1")
        users.put("b", b"2")
    (resource,) = reader.get_metrics_data().resource_metrics
    (scope,) = resource.scope_metrics
    points = {metric.name: metric.data.data_points for metric in scope.metrics}
    (count,) = points["reef.commit.seconds.count"]
    assert (count.value, count.attributes) == (2, {"db.url": "memory://", "app": "x"})
    assert points["reef.commit.seconds.p99"][0].value > 0
    assert points["reef.commit.in_flight"][0].value == 0


def test_the_extra_is_named_if_it_is_missing():
    """Without OpenTelemetry the error says what to install; nothing else needs it."""
    program = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "import reef\nreef.open('memory://').metrics.prometheus()\n"
        "try:\n    import reef.telemetry.otel\n"
        "except reef.UnavailableError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True
    )
    assert "reef[otel]" in done.stdout
