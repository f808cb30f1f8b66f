"""In-memory buckets that remember a passed probe of their conditional writes.

A probe writes tens of megabytes, more than a whole simulated history; all in-memory buckets pass
it alike, so that it runs once per test process.
"""

from functools import cache

import msgspec

from reef import paths
from reef.stores import agree_on_cas
from reef.stores.memory import MemoryStore
from reef.stores.probe import probe


def remember_probe(store):
    """Store the verdict of a probe; `store` is a `MemoryStore`, or wraps one."""
    if store.cas != "native":
        agree_on_cas(store)
        return
    if_match = store.capabilities.if_match
    verdict = msgspec.structs.replace(_verdict(), if_match=if_match, proved_at_s=store.now())
    store.put(paths.cas_verdict(), msgspec.json.encode(verdict))


@cache
def _verdict():
    return probe(MemoryStore("memory://probed"))
