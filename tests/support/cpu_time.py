"""Processor time of a call, in seconds of a machine of a known speed.

Bounds on work are stated for the machine that they were measured on. A slower one, or one whose
cores are shared, takes longer for everything alike: for a fixed piece of work, too, which is
measured too. So a bound fails where the work has grown, and not where the machine is slow.
"""

import time

REFERENCE_S = 0.02
"""Time of the fixed piece of work on the machine where the bounds were measured."""


def processor_s(call):
    """Return the processor time of a call, scaled by the speed of this machine."""
    began_s = time.process_time()
    call()
    took_s = time.process_time() - began_s
    return took_s / max(1.0, min(map(_reference_s, range(3))) / REFERENCE_S)


def _reference_s(seed):
    """Return the time of some work with numbers, bytes, dicts and sorting, like the engine's."""
    began_s = time.process_time()
    keys = [b"%08d" % ((number * 48271 + seed) % 99_991) for number in range(40_000)]
    found = {key: place for place, key in enumerate(keys)}
    assert sum(found[key] for key in sorted(keys)) > 0
    return time.process_time() - began_s
