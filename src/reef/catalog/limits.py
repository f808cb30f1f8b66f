"""Limits on paths that are heavy on compare-and-swap, per process.

Threads that race each other for one object only make each other lose (H25). So the commits of a
process to one catalog go one by one, and of leases and plans only a few are under way at a time.
All handles of a process share the limits of a catalog, by its address.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

from reef.runtime import Condition, Runtime, leaf_lock

__all__ = ["Limits", "Turnstile", "limits_of"]

COMMITS_MAX = 1
OTHERS_MAX = 4


class Turnstile:
    """Lets so many in at a time."""

    def __init__(self, runtime: Runtime, width: int) -> None:
        self._free = width
        self._turn: Condition = runtime.condition()

    @contextmanager
    def pass_through(self) -> Iterator[None]:
        """Wait for a place, and give it back at the end."""
        with self._turn:
            while self._free == 0:
                self._turn.wait()
            self._free -= 1
        try:
            yield
        finally:
            with self._turn:
                self._free += 1
                self._turn.notify()


class Limits:
    """The turnstiles of one catalog in one process."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.commits = Turnstile(runtime, COMMITS_MAX)
        self.leases = Turnstile(runtime, OTHERS_MAX)
        self.plans = Turnstile(runtime, OTHERS_MAX)


_shared: "WeakValueDictionary[tuple[int, int, str], Limits]" = WeakValueDictionary()
_lock = leaf_lock()


def limits_of(runtime: Runtime, address: str) -> Limits:
    """Return the limits that this process has for a catalog; a fork begins with new ones."""
    with _lock:
        # The limits keep their runtime, so that its id is nobody else's while they are known.
        key = (id(runtime), runtime.process_id(), address)
        known = _shared.get(key)
        if known is None:
            known = _shared[key] = Limits(runtime)
        return known
