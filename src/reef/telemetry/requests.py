"""Requests by kind, and what they cost.

Requests are the currency of an object store: they decide both the bill and the latency.
The meter counts what would be sent to a bucket (pages of a listing, parts of an upload),
not the calls of a program. Prices are public list prices for requests alone, in US
dollars; storage and traffic leave a bill of their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from reef.runtime import leaf_lock
from reef.telemetry.operations import count_requests

__all__ = ["PRICES", "PriceTable", "RequestKind", "RequestMeter"]


class RequestKind(StrEnum):
    """Kinds of request, as bills tell them apart."""

    GET = "get"
    HEAD = "head"
    LIST = "list"
    PUT = "put"
    COPY = "copy"
    DELETE = "delete"


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
class Tally:
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
        count_requests(requests)

    def tallies(self) -> dict[RequestKind, Tally]:
        with self._lock:
            return {kind: Tally(*counts) for kind, counts in self._counts.items()}

    def requests(self) -> dict[str, int]:
        """Return the kinds that were used, with their counts: handy in assertions."""
        return {kind.value: t.requests for kind, t in self.tallies().items() if t.requests}

    def cost_usd(self, provider: str) -> float:
        """Return what the requests would cost at a provider named in `PRICES`."""
        prices = PRICES[provider]
        return sum(prices.of(kind) * t.requests for kind, t in self.tallies().items()) / 1e6

    def reset(self) -> None:
        with self._lock:
            self._counts = _no_counts()

    def to_dict(self) -> dict[str, dict[str, int]]:
        return {
            kind.value: {"requests": tally.requests, "bytes": tally.bytes}
            for kind, tally in self.tallies().items()
        }


def _no_counts() -> dict[RequestKind, list[int]]:
    """Return requests and bytes of each kind, to be counted up in place."""
    return {kind: [0, 0] for kind in RequestKind}
