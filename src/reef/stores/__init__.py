"""Object stores: what holds all durable state.

`open(url)` gives a store that retries reads, settles conditional writes by reading back,
and counts its requests. The parts are public too, for tests and for other layers.
"""

from reef.stores.base import (
    Capabilities,
    ObjectInfo,
    Outcome,
    Part,
    Store,
    Tagged,
    WriteResult,
)
from reef.stores.fetch import fetch
from reef.stores.opening import open
from reef.stores.probe import Verdict, agree_on_cas, probe
from reef.stores.wrappers import (
    PROFILES,
    DiskCache,
    Fault,
    Faults,
    Latency,
    LatencyProfile,
    Meter,
    Pace,
    Paced,
    PaceEnded,
    ReadBack,
    Recorder,
    Retry,
    RetryPolicy,
    Rule,
    Throttle,
    Wrapper,
)

__all__ = [
    "PROFILES",
    "Capabilities",
    "DiskCache",
    "Fault",
    "Faults",
    "Latency",
    "LatencyProfile",
    "Meter",
    "ObjectInfo",
    "Outcome",
    "Pace",
    "PaceEnded",
    "Paced",
    "Part",
    "ReadBack",
    "Recorder",
    "Retry",
    "RetryPolicy",
    "Rule",
    "Store",
    "Tagged",
    "Throttle",
    "Verdict",
    "Wrapper",
    "WriteResult",
    "agree_on_cas",
    "fetch",
    "open",
    "probe",
]
