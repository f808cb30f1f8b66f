"""A session's lease in use: checked by its reads, renewed on request or by a keeper.

Nothing runs in the background unless asked for. `heartbeat` renews once; a `LeaseKeeper` is a
thread that does so until it is shut down, or its session ends or is forgotten: it knows the
session's lease only weakly.
"""

import weakref
from contextlib import suppress

from reef.catalog.leases import Lease
from reef.errors import ConflictError, ReefError
from reef.runtime import Condition, Runtime, Task

__all__ = ["HeldLease", "LeaseKeeper"]

LOOKS = 6
"""How often a keeper looks in a lease's time; it renews when a third of it has passed."""
RENEW_AFTER = 1 / 3


class HeldLease:
    """A lease from its taking to its release. Safe for threads."""

    def __init__(self, lease: Lease, runtime: Runtime) -> None:
        self._lease = lease
        self._runtime = runtime
        self._turn = runtime.lock()
        self._lost: ConflictError | None = None
        self.released = False

    @property
    def id(self) -> str:
        return self._lease.record.id

    @property
    def ttl_s(self) -> float:
        return self._lease.record.ttl_ms / 1000

    def heartbeat(self) -> None:
        """Renew it now; ConflictError if it was reaped, or lapsed before this arrived."""
        with self._turn:
            if self.released:
                return
            if self._lost is not None:
                raise self._lost
            try:
                self._lease.renew()
            except ConflictError as error:
                self._lost = error
                raise

    def renew_if_due(self) -> None:
        """What a keeper does; what failed is told by the next heartbeat, or tried again."""
        if not self.released and self._lost is None and self._lease.is_spent(RENEW_AFTER):
            with suppress(ReefError):
                self.heartbeat()

    @property
    def lapsed(self) -> bool:
        """Whether what it protected may be gone."""
        return self._lost is not None or self._lease.lapsed

    @property
    def over(self) -> bool:
        return self.released or self._lost is not None

    def release(self) -> None:
        """Give it up; one that cannot be removed lapses by itself."""
        if self.released:
            return
        self.released = True
        with self._turn, suppress(ReefError):
            self._lease.release()


class LeaseKeeper:
    """Renews a lease in the background, from `start` to `shutdown`."""

    def __init__(self, held: HeldLease, runtime: Runtime) -> None:
        self._wake: Condition = runtime.condition()
        self._stop = [False]
        ref, wake, stop, every_s = weakref.ref(held), self._wake, self._stop, held.ttl_s / LOOKS
        self._task: Task = runtime.spawn(
            lambda: _keep(ref, wake, stop, every_s), name="catalog-lease"
        )

    def shutdown(self) -> None:
        """End it, and wait for its end."""
        with self._wake:
            self._stop[0] = True
            self._wake.notify_all()
        self._task.join()

    def __enter__(self) -> "LeaseKeeper":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _keep(ref: "weakref.ref[HeldLease]", wake: Condition, stop: list[bool], every_s: float) -> None:
    while True:
        with wake:
            held = ref()
            if stop[0] or held is None or held.over:
                return
            del held  # not kept alive by waiting
            wake.wait(every_s)
            if stop[0]:
                return
        held = ref()
        if held is not None:
            held.renew_if_due()
        del held
