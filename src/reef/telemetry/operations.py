"""Requests per operation: what one commit, one open, one cold read costs the bucket.

An operation opens a tally; every request that is counted while it runs, in its own thread or in
the helpers that it gathers, goes to the innermost one. When it ends the sum is recorded as
`<operation>.requests`, so that a budget that is broken shows up in production too.
"""

from contextvars import ContextVar, Token

from reef.runtime import leaf_lock
from reef.telemetry.metrics import Metrics

__all__ = ["count_requests", "operation"]

_adding = leaf_lock()
"""One for all tallies: to make a lock costs more than an operation ever waits for this one."""


class operation:  # noqa: N801 - it is used like a function, in a `with`
    """Count the requests of what runs inside as those of one operation.

    A class and no generator: every commit and every cold read goes through here.
    """

    __slots__ = ("_metrics", "_name", "_outer", "requests")

    def __init__(self, metrics: Metrics, name: str) -> None:
        self._metrics, self._name = metrics, name
        self._outer: Token[operation | None] | None = None
        self.requests = 0

    def __enter__(self) -> None:
        self._outer = _current.set(self)

    def __exit__(self, *error: object) -> None:
        if self._outer is not None:
            _current.reset(self._outer)
        self._metrics.histogram(f"{self._name}.requests", unit=1.0).record(self.requests)
        count_requests(self.requests)

    def add(self, requests: int) -> None:
        with _adding:
            self.requests += requests


_current: ContextVar[operation | None] = ContextVar("operation", default=None)


def count_requests(requests: int) -> None:
    """Add to the operation that is running here, if there is one."""
    tally = _current.get()
    if tally is not None and requests:
        tally.add(requests)
