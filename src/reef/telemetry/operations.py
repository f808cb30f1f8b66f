"""Requests per operation: what one commit, one open, one cold read costs the bucket.

An operation opens a tally; every request that is counted while it runs, in its own thread or in
the helpers that it gathers, goes to the innermost one. When it ends the sum is recorded as
`<operation>.requests`, so that a budget that is broken shows up in production too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from reef.runtime import leaf_lock
from reef.telemetry.metrics import Metrics

__all__ = ["count_requests", "operation"]


class _Tally:
    def __init__(self) -> None:
        self._lock = leaf_lock()
        self.requests = 0

    def add(self, requests: int) -> None:
        with self._lock:
            self.requests += requests


_current: ContextVar[_Tally | None] = ContextVar("operation", default=None)


@contextmanager
def operation(metrics: Metrics, name: str) -> Iterator[None]:
    """Count the requests of what runs inside as those of one operation."""
    outer = _current.get()
    tally = _Tally()
    token = _current.set(tally)
    try:
        yield
    finally:
        _current.reset(token)
        metrics.histogram(f"{name}.requests", unit=1.0).record(tally.requests)
        if outer is not None:
            outer.add(tally.requests)


def count_requests(requests: int) -> None:
    """Add to the operation that is running here, if there is one."""
    tally = _current.get()
    if tally is not None and requests:
        tally.add(requests)
