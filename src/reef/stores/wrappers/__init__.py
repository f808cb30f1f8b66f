"""Stores around stores: each adds one thing and passes the rest on.

From the bucket outwards: latency, faults, recorder, meter, throttle, retry, read-back, disk
cache. The
meter sits inside the retries, so that it counts what really goes over the wire; what the
cache has on disk does not.
"""

from reef.stores.wrappers.base import Wrapper
from reef.stores.wrappers.disk_cache import DiskCache
from reef.stores.wrappers.faults import Fault, Faults, Rule
from reef.stores.wrappers.latency import PROFILES, Latency, LatencyProfile
from reef.stores.wrappers.meter import Meter
from reef.stores.wrappers.pacing import Pace, Paced, PaceEnded
from reef.stores.wrappers.readback import ReadBack
from reef.stores.wrappers.recorder import Call, Recorder
from reef.stores.wrappers.retry import Retry, RetryPolicy
from reef.stores.wrappers.throttle import Throttle

__all__ = [
    "PROFILES",
    "Call",
    "DiskCache",
    "Fault",
    "Faults",
    "Latency",
    "LatencyProfile",
    "Meter",
    "Pace",
    "PaceEnded",
    "Paced",
    "ReadBack",
    "Recorder",
    "Retry",
    "RetryPolicy",
    "Rule",
    "Throttle",
    "Wrapper",
]
