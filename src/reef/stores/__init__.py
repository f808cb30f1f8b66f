"""Object stores, which hold all durable state.

`open(url)` returns a store that retries reads, resolves conditional writes by reading back, and
counts its requests. The parts are public too, for tests and for other layers.
"""

from reef.stores.base import (
    Capabilities,
    ObjectInfo,
    Outcome,
    Part,
    Store,
    Tagged,
    WriteResult,
    fetch,
)
from reef.stores.opening import open, with_policies
from reef.stores.probe import CasVerdict, agree_on_cas, probe
from reef.stores.wrappers import (
    DiskCache,
    Hooked,
    Meter,
    Operation,
    Pace,
    Paced,
    PaceEnded,
    ReadBack,
    Retry,
    RetryPolicy,
    StoreRequest,
    Throttle,
    Wrapper,
)

__all__ = [
    "Capabilities",
    "CasVerdict",
    "DiskCache",
    "Hooked",
    "Meter",
    "ObjectInfo",
    "Operation",
    "Outcome",
    "Pace",
    "PaceEnded",
    "Paced",
    "Part",
    "ReadBack",
    "Retry",
    "RetryPolicy",
    "Store",
    "StoreRequest",
    "Tagged",
    "Throttle",
    "Wrapper",
    "WriteResult",
    "agree_on_cas",
    "fetch",
    "open",
    "probe",
    "with_policies",
]
