"""Reads of a directory by the compiled kernel: file, checksums, codecs and search in one call.

A read passes through the policies of its store: each could wait, repeat it or count it. For a
directory they do nothing to a read that succeeds, except for the meter, which counts it. So a read
may go to the kernel directly if these hold, and is counted by the same meter:

    the store is a directory below `Meter`, `Throttle`, `Retry`, `ReadBack` and `Proved` alone
    no request is throttled now
    the file is open already, its name still leads to it, and it was not changed

In any other case, and whenever a read fails or finds damage, there is no result here: the caller
then reads through the policies, which repeat the read and report the error.
"""

from typing import Any

from reef import kernel
from reef.stores.base import Store
from reef.stores.local import LocalStore
from reef.stores.wrappers.base import GET_KIND, HISTOGRAMS, Meter
from reef.stores.wrappers.policies import Proved, ReadBack, Retry, Throttle
from reef.telemetry.metrics import Histogram

POLICIES = frozenset({Proved, ReadBack, Retry, Throttle, Meter})


class DirectReads:
    """The kernel's reads of one directory."""

    def __init__(self, directory: LocalStore, meter: Meter, throttle: Throttle | None) -> None:
        self._directory, self._meter, self._throttle = directory, meter, throttle
        self._seconds: Histogram | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return DirectReads, (self._directory, self._meter, self._throttle)

    @classmethod
    def of(cls, store: Store) -> "DirectReads | None":
        """Return the reads of a store; None if it is no directory, or has other policies."""
        known: dict[type, Any] = {}
        while type(store) in POLICIES and type(store) not in known:
            known[type(store)] = store
            store = store.inner  # type: ignore[attr-defined] # a policy
        if type(store) is not LocalStore or not store.is_real or Meter not in known:
            return None
        return cls(store, known[Meter], known.get(Throttle))

    def is_open(self, key: str) -> bool:
        """Whether the file of an object is open: a range of it was read before."""
        return self._directory.open_file(key) is not None

    def call(self, name: str, key: str, *arguments: Any) -> Any:
        """Return the result of a function of the kernel for an open file; None or False if it has
        none.

        Its last item is the number of bytes that were read, which are counted as one request.
        """
        function = getattr(kernel.native, name, None)  # earlier builds do not have all
        opened = self._directory.open_file(key)
        if function is None or opened is None or (self._throttle and self._throttle.is_limited):
            return None
        runtime, meter = self._meter.runtime, self._meter
        start_s = runtime.monotonic_s()
        found = function(opened.file.descriptor, opened.path, opened.identity, *arguments)
        if found:
            seconds = self._seconds
            if seconds is None:
                seconds = self._seconds = meter.metrics.histogram(HISTOGRAMS[GET_KIND])
            seconds.record(runtime.monotonic_s() - start_s)
            meter.meter.count(GET_KIND, bytes=found[-1])
        return found
