"""Store wrappers: policies on one request hook, and the disk cache.

From the bucket outwards: meter, throttle, retry, read-back, disk cache. The meter is inside the
retries, so that it counts the requests that are sent; ranges from the disk cache are not requests.
A policy overrides `Hooked.around`; wrappers for tests are in `reef.testing`.
"""

from reef.stores.wrappers.base import Hooked, Meter, Operation, Send, StoreRequest, Wrapper
from reef.stores.wrappers.disk_cache import DiskCache
from reef.stores.wrappers.policies import (
    Pace,
    Paced,
    PaceEnded,
    Proved,
    ReadBack,
    Retry,
    RetryPolicy,
    Throttle,
)

__all__ = [
    "DiskCache",
    "Hooked",
    "Meter",
    "Operation",
    "Pace",
    "PaceEnded",
    "Paced",
    "Proved",
    "ReadBack",
    "Retry",
    "RetryPolicy",
    "Send",
    "StoreRequest",
    "Throttle",
    "Wrapper",
]
