"""Metrics and their text format, events, and the requests of operations with their cost.

**Metrics.** A histogram has fixed buckets, each twice the one before, from 1 µs (or 1 byte) up, so
that recording is one increment and memory never grows. Quantiles are read off the bucket bounds:
right to within a factor of two, and exact at the ends, which is enough to distinguish 5 ms from 50.

`HELP` describes every metric. In the text format of Prometheus:

    commit.seconds       →  reef_commit_seconds_bucket{le="0.001024"}, …_sum, …_count
    commit.lost_slots    →  reef_commit_lost_slots_total
    commit.in_flight     →  reef_commit_in_flight

Buckets are the same in every scrape, so that quantiles can be aggregated over processes.

**Events** are names with values. An event goes to every subscriber and to the standard library's
logger `reef`, which has no handler of its own: it is silent until the application configures it.
Subscribers are called synchronously, sometimes under a lock. One that raises is reported to the
logger, and to no other place: it must not interrupt the operation that emits the event.

**Operations.** Every request that is counted while an operation runs, in its own thread or in the
tasks that it starts, is counted for the innermost operation. When it ends the sum is recorded as
`<operation>.requests`, so that an exceeded request budget shows up in production too.

**Requests** decide both the bill and the latency of an object store. A `RequestMeter` counts the
requests that are sent to a bucket (pages of a listing, parts of an upload), not the calls of a
program. Prices are public list prices for requests alone, in US dollars, without storage and
traffic.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, TypeVar

from reef.runtime import leaf_lock

PREFIX = "reef_"
OPERATIONS = (
    *("append", "backup", "branch", "commit", "compact", "export", "fold", "get", "get_many"),
    *("import", "index", "ingest", "open_reader", "open_writer", "purge", "rebuild", "refresh"),
    *("repair", "restore", "search", "snapshot", "verify"),
)
HELP = {
    "background.failures": "Steps of background work that failed and are retried",
    "cache.bytes": "Bytes in the memory cache of groups and indexes",
    "cache.hits": "Reads that the memory cache served",
    "cache.misses": "Reads that the memory cache did not serve",
    "catalog.cas_conflicts": "Commits of a catalog that lost to another process",
    "catalog.commit_seconds": "Time of one commit to a catalog",
    "catalog.compaction_seconds": "Time of one compaction of a catalog",
    "catalog.compactions": "Compactions of a catalog",
    "catalog.gc_checkpoints": "Checkpoints of a catalog that were deleted",
    "catalog.gc_leases": "Expired leases of a catalog that were deleted",
    "catalog.gc_plans": "Plans of the garbage collection of a catalog",
    "catalog.gc_refused": "Objects of a catalog that a lease protected from deletion",
    "catalog.gc_seconds": "Time of one garbage collection of a catalog",
    "catalog.gc_segments": "Segments of a catalog that were deleted",
    "catalog.publish_seconds": "Time of one compare-and-swap of a catalog's head",
    "catalog.recovered_segments": "Commits of dead processes that were adopted",
    "catalog.recovery_seconds": "Time to adopt a commit of a dead process",
    "catalog.segment_bytes": "Size of a commit to a catalog",
    "catalog.segment_records": "Records of a commit to a catalog",
    "commit.fenced": "Writers of this process that a newer writer fenced",
    "commit.group_batches": "Batches in one WAL object",
    "commit.in_flight": "WAL objects without a response yet",
    "commit.in_flight_bytes": "Bytes of WAL objects without a response yet",
    "commit.lost_slots": "LSNs that another process filled first",
    "commit.object_bytes": "Size of a WAL object",
    "commit.object_rows": "Rows of a WAL object",
    "commit.seconds": "Time from sending a WAL object to its response",
    "commit.unfolded_bytes": "Bytes of the unfolded log",
    "disk_cache.bytes": "Bytes in the disk cache",
    "disk_cache.damaged": "Damaged files of the disk cache, which were dropped",
    "disk_cache.errors": "Failed calls of the disk cache's file system",
    "disk_cache.evicted": "Ranges removed from the disk cache to make room",
    "disk_cache.hits": "Ranges that the disk cache served",
    "disk_cache.misses": "Ranges that the disk cache did not serve",
    "disk_cache.skipped": "Ranges that were not kept in the disk cache",
    "local.backlog_bytes": "Bytes of a local log that are not in the bucket yet",
    "local.sync_seconds": "Time to write and sync a group in a local log",
    "log.void": "Void objects: a slot before them holds another object",
    "manifest.losses": "Publishes that lost to another process",
    "manifest.publish_seconds": "Time to publish one generation, retries included",
    "open.fences": "Fences written while opening writers",
    "open.replay_seconds": "Time to replay the log when a writer opens",
    "reader.lag_lsns": "LSNs that this reader was behind before its last refresh",
    "reader.lag_s": "Seconds that this reader was behind before its last refresh",
    "reader.last_lsn": "The newest LSN that this reader shows",
    **{f"{name}.requests": f"Requests of one call of {name}" for name in OPERATIONS},
}
"""The description of every metric; a test compares the names with the sources."""

SECONDS_BUCKETS = range(4, 27)
"""Powers of two of a microsecond: 16 µs to 67 s."""
AMOUNT_BUCKETS = range(0, 31, 2)
"""Powers of four: 1 to a gibi."""
BUCKETS = 64
M = TypeVar("M", "Counter", "Gauge", "Histogram")


class Counter:
    """A number that only grows.

    The caches add to `value` without the lock, at every read: threads that run at the very same
    time may then count one hit instead of two.
    """

    def __init__(self) -> None:
        self._lock = leaf_lock()
        self.value = 0

    def add(self, amount: int = 1) -> None:
        with self._lock:
            self.value += amount

    def to_dict(self) -> dict[str, float]:
        return {"value": self.value}


class Gauge:
    """A number that is set."""

    def __init__(self) -> None:
        self.value = 0.0

    def set(self, value: float) -> None:
        self.value = value

    def to_dict(self) -> dict[str, float]:
        return {"value": self.value}


class Histogram:
    """A distribution of non-negative amounts, in steps of powers of two of `unit`."""

    def __init__(self, unit: float = 1e-6) -> None:
        self._lock = leaf_lock()
        self.unit = unit
        self._buckets = [0] * BUCKETS
        self.count = 0
        self.total = 0.0
        self.smallest = math.inf
        self.largest = 0.0

    def record(self, amount: float) -> None:
        bucket = int(amount / self.unit).bit_length()
        if bucket >= BUCKETS:
            bucket = BUCKETS - 1
        with self._lock:
            self._buckets[bucket] += 1
            self.count += 1
            self.total += amount
            self.smallest = amount if amount < self.smallest else self.smallest
            self.largest = amount if amount > self.largest else self.largest

    def quantile(self, share: float) -> float:
        """Return an upper bound of the smallest amounts that make up `share` of all."""
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"a share is between 0 and 1, got {share}")
        if self.count == 0:
            return 0.0
        rank = max(1, math.ceil(share * self.count))
        seen = 0
        for bucket, count in enumerate(self._buckets):
            seen += count
            if seen >= rank and bucket < BUCKETS - 1:
                bound = self.unit * (1 << bucket)
                return min(max(bound, self.smallest), self.largest)
        return self.largest  # the last bucket has no upper bound

    def state(self) -> tuple[list[int], int, float]:
        """Return the buckets, the count and the total, of one point in time."""
        with self._lock:
            return list(self._buckets), self.count, self.total

    def to_dict(self) -> dict[str, float]:
        return {
            "count": self.count,
            "total": self.total,
            "p50": self.quantile(0.5),
            "p99": self.quantile(0.99),
            "max": self.largest,
        }


class Metrics:
    """A process's or a handle's metrics, by name; made on first use."""

    def __init__(self) -> None:
        self._lock = leaf_lock()
        self._by_name: dict[str, Counter | Gauge | Histogram] = {}
        self._requests: dict[str, Histogram] = {}

    # Existing metrics are found without the lock: most calls are on hot paths.
    def counter(self, name: str) -> Counter:
        found = self._by_name.get(name)
        return found if type(found) is Counter else self._named(name, Counter, Counter)

    def gauge(self, name: str) -> Gauge:
        found = self._by_name.get(name)
        return found if type(found) is Gauge else self._named(name, Gauge, Gauge)

    def histogram(self, name: str, unit: float = 1e-6) -> Histogram:
        found = self._by_name.get(name)
        if type(found) is Histogram:
            return found
        return self._named(name, lambda: Histogram(unit), Histogram)

    def requests_of(self, operation: str) -> Histogram:
        """Return the histogram of an operation's requests."""
        found = self._requests.get(operation)
        if found is None:
            found = self.histogram(f"{operation}.requests", unit=1.0)
            self._requests[operation] = found
        return found

    def items(self) -> list[tuple[str, "Counter | Gauge | Histogram"]]:
        """Return all metrics by name, in order."""
        with self._lock:
            return sorted(self._by_name.items())

    def to_dict(self) -> dict[str, dict[str, float]]:
        return {name: metric.to_dict() for name, metric in self.items()}

    def prometheus(
        self, labels: Mapping[str, str] | None = None, meter: "RequestMeter | None" = None
    ) -> str:
        """Return all metrics in the text format of Prometheus.

        `labels` are added to every value; a `meter` adds the requests that it has counted.
        """
        return prometheus_text(self, labels, meter)

    def __repr__(self) -> str:
        return f"<Metrics: {', '.join(sorted(tuple(self._by_name)))}>"

    def _named(self, name: str, make: Callable[[], M], kind: type[M]) -> M:
        with self._lock:
            metric = self._by_name.get(name)
            if metric is None:
                metric = self._by_name[name] = make()
        if type(metric) is not kind:
            raise TypeError(f"metric {name} is a {type(metric).__name__}")
        return metric


# --- events -----------------------------------------------------------------------


logging.getLogger("reef").addHandler(logging.NullHandler())


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened."""

    name: str
    fields: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{name}={value!r}" for name, value in self.fields.items())])


class Events:
    """Sends events to subscribers and to the log."""

    def __init__(self) -> None:
        self._subscribers: tuple[Callable[[Event], None], ...] = ()
        self._log = logging.getLogger("reef")

    def subscribe(self, subscriber: Callable[[Event], None]) -> Callable[[], None]:
        """Call `subscriber` with every event from now on; the returned function ends it."""
        self._subscribers = (*self._subscribers, subscriber)
        return lambda: self._unsubscribe(subscriber)

    def emit(self, name: str, *, level: int = logging.INFO, **fields: Any) -> None:
        if not self._subscribers and not self._log.isEnabledFor(level):
            return
        event = Event(name, fields)
        self._log.log(level, "%s", event)
        for subscriber in self._subscribers:
            try:
                subscriber(event)
            except Exception:
                self._log.exception("a subscriber of event %s failed", name)

    def _unsubscribe(self, subscriber: Callable[[Event], None]) -> None:
        self._subscribers = tuple(known for known in self._subscribers if known is not subscriber)


# --- operations -------------------------------------------------------------------


_adding = leaf_lock()
"""One for all operations: creating a lock costs more than waiting for this one."""


class operation:  # noqa: N801 - it is used like a function, in a `with`
    """Count the requests of the block inside as those of one operation.

    A class instead of a generator: every commit and every cold read uses it.
    """

    __slots__ = ("_end_span", "_metrics", "_name", "_outer", "requests")
    begin_span: ClassVar[Callable[[str], Callable[..., None]] | None] = None
    """Called when an operation begins; its result with the requests and the error when it ends."""

    def __init__(self, metrics: Metrics, name: str) -> None:
        self._metrics, self._name = metrics, name
        self._outer: Token[operation | None] | None = None
        self.requests = 0
        self._end_span: Callable[..., None] | None = None

    def __enter__(self) -> None:
        self._outer = _current.set(self)
        if (begin := operation.begin_span) is not None:
            self._end_span = begin(self._name)

    def __exit__(self, *error: object) -> None:
        if self._end_span is not None:
            self._end_span(self.requests, *error)
        known = self._metrics._requests.get(self._name)
        (known or self._metrics.requests_of(self._name)).record(self.requests)
        if self._outer is not None:
            _current.reset(self._outer)
            if type(outer := self._outer.old_value) is operation:
                outer.add(self.requests)

    def add(self, requests: int) -> None:
        with _adding:
            self.requests += requests


_current: ContextVar[operation | None] = ContextVar("operation", default=None)


# --- requests and their cost ------------------------------------------------------


class RequestKind(StrEnum):
    """Kinds of requests, as services bill them."""

    GET = "get"
    HEAD = "head"
    LIST = "list"
    PUT = "put"
    COPY = "copy"
    DELETE = "delete"

    __hash__ = str.__hash__  # an Enum's own is Python code, which every count would run


@dataclass(frozen=True, slots=True)
class PriceTable:
    """Dollars for a million requests. Deleting is free at all of these providers."""

    write_usd: float
    read_usd: float
    list_usd: float
    delete_usd: float = 0.0

    def of(self, kind: RequestKind) -> float:
        if kind in (RequestKind.PUT, RequestKind.COPY):
            return self.write_usd
        if kind is RequestKind.LIST:
            return self.list_usd
        return self.delete_usd if kind is RequestKind.DELETE else self.read_usd


PRICES: Mapping[str, PriceTable] = {
    "s3-standard": PriceTable(write_usd=5.0, read_usd=0.4, list_usd=5.0),
    "s3-express": PriceTable(write_usd=1.13, read_usd=0.03, list_usd=1.13),
    "gcs-standard": PriceTable(write_usd=5.0, read_usd=0.4, list_usd=5.0),
    "azure-hot": PriceTable(write_usd=6.5, read_usd=0.5, list_usd=6.5),
    "r2": PriceTable(write_usd=4.5, read_usd=0.36, list_usd=4.5),
    "tigris": PriceTable(write_usd=5.0, read_usd=0.5, list_usd=5.0),
}


@dataclass(frozen=True, slots=True)
class RequestCount:
    """Requests of one kind so far, and the bytes of their bodies."""

    requests: int = 0
    bytes: int = 0


class RequestMeter:
    """Counts requests and bytes by kind. One may serve several stores."""

    def __init__(self) -> None:
        self._lock = leaf_lock()
        self._counts = _no_counts()

    def count(self, kind: RequestKind, *, requests: int = 1, bytes: int = 0) -> None:
        with self._lock:
            counts = self._counts[kind]
            counts[0] += requests
            counts[1] += bytes
        running = _current.get()
        if running is not None and requests:
            with _adding:  # as `operation.add`, without a call for each request
                running.requests += requests

    def counts(self) -> dict[RequestKind, RequestCount]:
        with self._lock:
            return {kind: RequestCount(*counts) for kind, counts in self._counts.items()}

    def requests(self) -> dict[str, int]:
        """Return the kinds that were used, with their counts: handy in assertions."""
        return {kind.value: t.requests for kind, t in self.counts().items() if t.requests}

    def cost_usd(self, provider: str) -> float:
        """Return the cost of the requests at a provider named in `PRICES`."""
        prices = PRICES[provider]
        return sum(prices.of(kind) * t.requests for kind, t in self.counts().items()) / 1e6

    def reset(self) -> None:
        with self._lock:
            self._counts = _no_counts()

    def to_dict(self) -> dict[str, dict[str, int]]:
        return {
            kind.value: {"requests": count.requests, "bytes": count.bytes}
            for kind, count in self.counts().items()
        }


def _no_counts() -> dict[RequestKind, list[int]]:
    """Return requests and bytes of each kind, to be counted up in place."""
    return {kind: [0, 0] for kind in RequestKind}


# --- text format of Prometheus -------------------------------------------------------


def prometheus_text(
    metrics: Metrics, labels: Mapping[str, str] | None = None, meter: RequestMeter | None = None
) -> str:
    """Return all metrics, and the requests of a meter, in the text format of Prometheus."""
    fixed = dict(labels or {})
    lines: list[str] = []
    for name, metric in metrics.items():
        lines += _expose(name, metric, fixed)
    if meter is not None:
        lines += _requests(meter, fixed)
    return "".join(f"{line}\n" for line in lines)


def series_name(name: str) -> str:
    """Return the name that a metric has in Prometheus, without `_total` or `_bucket`."""
    return PREFIX + name.replace(".", "_")


def _expose(
    name: str, metric: Counter | Gauge | Histogram, labels: dict[str, str]
) -> Iterator[str]:
    series, kind = series_name(name), type(metric).__name__.lower()
    if isinstance(metric, Counter):
        series += "_total"
    if name in HELP:
        yield f"# HELP {series} {HELP[name]}"
    yield f"# TYPE {series} {kind}"
    if isinstance(metric, Histogram):
        yield from _histogram(series, metric, labels)
    else:
        yield f"{series}{_format_labels(labels)} {_number(metric.value)}"


def _histogram(series: str, metric: Histogram, labels: dict[str, str]) -> Iterator[str]:
    buckets, count, total = metric.state()
    steps = AMOUNT_BUCKETS if metric.unit >= 1 else SECONDS_BUCKETS
    for step in steps:
        bound, below = _number(metric.unit * 2**step), sum(buckets[: step + 1])
        yield f"{series}_bucket{_format_labels({**labels, 'le': bound})} {below}"
    yield f"{series}_bucket{_format_labels({**labels, 'le': '+Inf'})} {count}"
    yield f"{series}_sum{_format_labels(labels)} {_number(total)}"
    yield f"{series}_count{_format_labels(labels)} {count}"


def _requests(meter: RequestMeter, labels: dict[str, str]) -> Iterator[str]:
    counts = meter.counts()
    for series, text, values in (
        ("requests", "Requests sent to the store", {k: c.requests for k, c in counts.items()}),
        ("request_bytes", "Bytes of their bodies", {k: c.bytes for k, c in counts.items()}),
    ):
        yield f"# HELP {PREFIX}{series}_total {text}"
        yield f"# TYPE {PREFIX}{series}_total counter"
        for kind, value in values.items():
            yield f"{PREFIX}{series}_total{_format_labels({**labels, 'kind': kind.value})} {value}"


def _format_labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    pairs = ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())
    return f"{{{pairs}}}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(round(value, 9))
