"""A lease that is kept alive for as long as its handle is used.

It is renewed when a third of its time has passed: by whoever reads, and by a helper in the
background for a reader that is busy with what it has. A lease that was reaped, or that could
not be renewed in time, is lost for good, and whoever asks is told so: what it protected may be
gone. The helper knows its lease only weakly, so that a handle nobody has any more is not kept
alive; its lease lapses by itself.
"""

import weakref
from contextlib import suppress

from reef.errors import ConflictError, ReefError
from reef.formats.manifest import Manifest
from reef.manifest.leases import Lease
from reef.paths import Namespace
from reef.runtime import Condition, Runtime
from reef.stores import Store

__all__ = ["HeldLease"]

BEATS = 3
"""A lease is renewed when one of so many parts of its time has passed."""
LOOKS = 2 * BEATS
"""How often the helper looks in that time: three renewals may fail before the lease lapses."""


class HeldLease:
    """A pin on a generation, from its taking to its release. Safe for threads."""

    def __init__(
        self, store: Store, namespace: Namespace, manifest: Manifest, *, owner: str, ttl_s: float
    ) -> None:
        self._runtime: Runtime = store.runtime
        self._namespace = namespace.name
        self._ttl_s = ttl_s
        self._written = self._runtime.stopwatch()
        self._lease = Lease.take(store, namespace, manifest, owner=owner, ttl_s=ttl_s)
        self._lost: ConflictError | None = None
        self._released = False
        self._turn = self._runtime.lock()
        self._wake: Condition = self._runtime.condition()

    @property
    def id(self) -> str:
        return self._lease.record.id

    def beat_in_background(self) -> None:
        """Keep it alive without being asked, until it is released or forgotten."""
        ref, wake, every_s = weakref.ref(self), self._wake, self._ttl_s / LOOKS
        self._runtime.spawn(lambda: _beat(ref, wake, every_s), name="lease")

    def check(self) -> None:
        """Raise if the lease is lost; renew it if it is time."""
        if not self.is_held() and self._lost is not None:
            raise ConflictError(self._lost.message, hint=self._lost.hint, **self._lost.context)

    def is_held(self) -> bool:
        """Whether it was held until now; renews it if it is time."""
        if self._written.elapsed_s() >= self._ttl_s / BEATS:
            self._renew()
        return not self.is_over

    @property
    def is_fresh(self) -> bool:
        """Whether a check would neither raise nor renew."""
        return not self.is_over and self._written.elapsed_s() < self._ttl_s / BEATS

    def release(self) -> None:
        """Give it up; one that cannot be removed lapses by itself."""
        with self._wake:
            self._released = True
            self._wake.notify_all()
        with self._turn, suppress(ReefError):
            self._lease.release()

    @property
    def is_over(self) -> bool:
        return self._released or self._lost is not None

    def _renew(self) -> None:
        with self._turn:
            if self.is_over or self._written.elapsed_s() < self._ttl_s / BEATS:
                return
            written = self._runtime.stopwatch()
            try:
                self._lease.renew()
                self._written = written
            except ConflictError as error:
                self._lost = error
            except ReefError as error:  # there is time for another try, or there is none
                if self._written.elapsed_s() >= self._ttl_s:
                    self._lost = self._lapsed(error)

    def _lapsed(self, error: ReefError) -> ConflictError:
        return ConflictError(
            f"lease {self.id} on {self._namespace} lapsed: {error.message}",
            hint="Open another one, and read again from the current head",
            namespace=self._namespace,
        )


def _beat(ref: "weakref.ref[HeldLease]", wake: Condition, every_s: float) -> None:
    while True:
        with wake:
            held = ref()
            if held is None or held.is_over:
                return
            del held  # not kept alive by waiting
            wake.wait(every_s)
        held = ref()
        if held is not None:
            held._renew()
        del held
