"""Metrics, request costs and events."""

import logging
import threading

import pytest

from reef.telemetry import PRICES, Event, Events, Histogram, Metrics, RequestKind, RequestMeter


def test_counters_lose_nothing_between_threads():
    """Eight threads, ten thousand increments each."""
    counter = Metrics().counter("commits")
    threads = [
        threading.Thread(target=lambda: [counter.add() for _ in range(10_000)]) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.value == 80_000


def test_a_histogram_is_within_a_factor_of_two():
    """Quantiles are upper bounds from power-of-two buckets; the ends are exact."""
    histogram = Histogram(unit=1e-6)
    for number in range(1, 1001):
        histogram.record(number / 1000)
    assert histogram.count == 1000
    assert histogram.total == pytest.approx(500.5)
    assert 0.5 <= histogram.quantile(0.5) <= 1.0
    assert histogram.quantile(1.0) == 1.0
    assert histogram.quantile(0.0) >= 0.001
    assert Histogram().quantile(0.5) == 0.0
    with pytest.raises(ValueError, match="between 0 and 1"):
        histogram.quantile(1.5)


def test_a_histogram_takes_extremes():
    """Zero and amounts beyond the last bucket are counted, not dropped."""
    histogram = Histogram(unit=1.0)
    histogram.record(0)
    histogram.record(1e30)
    assert histogram.to_dict()["count"] == 2
    assert histogram.quantile(1.0) == 1e30


def test_metrics_are_made_once_and_keep_their_kind():
    """The same name is the same metric; another kind under it is a mistake."""
    metrics = Metrics()
    metrics.counter("a").add(2)
    metrics.gauge("b").set(1.5)
    metrics.histogram("c", unit=1.0).record(3)
    assert metrics.counter("a").value == 2
    assert metrics.to_dict()["b"] == {"value": 1.5}
    assert list(metrics.to_dict()) == ["a", "b", "c"]
    with pytest.raises(TypeError, match="metric a is a Counter"):
        metrics.gauge("a")


def test_the_meter_prices_requests():
    """A million PUTs at S3 cost five dollars, a million GETs forty cents."""
    meter = RequestMeter()
    meter.count(RequestKind.PUT, requests=1_000_000)
    assert meter.cost_usd("s3-standard") == pytest.approx(5.0)
    meter.count(RequestKind.GET, requests=1_000_000, bytes=10)
    assert meter.cost_usd("s3-standard") == pytest.approx(5.4)
    assert meter.requests() == {"get": 1_000_000, "put": 1_000_000}
    assert meter.to_dict()["get"] == {"requests": 1_000_000, "bytes": 10}
    meter.reset()
    assert meter.requests() == {}


@pytest.mark.parametrize("provider", PRICES)
def test_every_provider_prices_every_kind(provider):
    """No kind of request is without a price, and deleting is free."""
    for kind in RequestKind:
        meter = RequestMeter()
        meter.count(kind, requests=1000)
        assert (meter.cost_usd(provider) == 0) == (kind is RequestKind.DELETE)


def test_events_reach_subscribers_and_the_log(caplog):
    """Every subscriber receives it, and so does an enabled logger."""
    events, heard = Events(), []
    stop = events.subscribe(heard.append)
    with caplog.at_level(logging.INFO, logger="reef"):
        events.emit("fenced", namespace="users", epoch=3)
    stop()
    events.emit("fenced", namespace="users", epoch=4)
    assert heard == [Event("fenced", {"namespace": "users", "epoch": 3})]
    assert caplog.messages == ["fenced namespace='users' epoch=3"]


def test_a_subscriber_that_raises_is_logged_and_the_others_hear(caplog):
    """A listener that raises does not end the operation."""
    events, heard = Events(), []
    events.subscribe(lambda event: 1 / 0)
    events.subscribe(heard.append)
    events.emit("fenced", epoch=3)
    assert [event.name for event in heard] == ["fenced"]
    assert "a subscriber of event fenced failed" in caplog.text


def test_events_are_silent_by_default(capfd):
    """Nothing is printed unless someone asked."""
    Events().emit("fenced", level=logging.WARNING)
    assert capfd.readouterr() == ("", "")
