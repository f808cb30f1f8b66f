"""The lease of a read: one object for the whole read, looked after by its tasks.

A DataFrame has no end that anybody is told of: it is planned in one process, which is gone
before the first task runs, and read as often as its owner likes. So nobody could beat a heart
in the background, and nobody could release the lease. Instead it is written for a long time
(`leaseSeconds`), and every task that reads under it looks at it, when it begins and from time to
time; whoever finds that a third of the time has passed renews it for all. It lapses by itself
when no task has read for that long. What was not read until then may be gone, and is told as
such.

The rules are those of every lease: whether it holds is judged by the store's clock alone (H30),
it is renewed only in place of the very object that was seen, so that one that was reaped never
comes back, and one that has lapsed is given up even if it is still there (H22). A store without
If-Match cannot renew it in place: there a read has to end within `leaseSeconds`.
"""

from typing import Any

import msgspec

from reef.errors import Kind, NotFoundError
from reef.formats.manifest import Manifest
from reef.manifest.leases import Lease, LeaseRecord
from reef.paths import Namespace
from reef.runtime import Stopwatch
from reef.stores import Outcome, Store

__all__ = ["BEATS", "SharedLease"]

BEATS = 3
"""A lease is renewed when one of so many parts of its time has passed."""
LOOKS = 2 * BEATS
"""How often a task looks in that time."""


class SharedLease:
    """A lease that many tasks hold together. Picklable: every copy looks for itself."""

    def __init__(self, store: Store, namespace: Namespace, lease_id: str, ttl_s: float) -> None:
        self.id = lease_id
        self.ttl_s = ttl_s
        self._store = store
        self._namespace = namespace
        self._looked: Stopwatch | None = None

    @classmethod
    def take(
        cls, store: Store, namespace: Namespace, manifest: Manifest, ttl_s: float
    ) -> "SharedLease":
        """Write a lease on a manifest that was read just before."""
        owner = f"spark-{store.runtime.process_id()}"
        lease = Lease.take(store, namespace, manifest, owner=owner, ttl_s=ttl_s)
        return cls(store, namespace, lease.record.id, ttl_s)

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedLease, (self._store, self._namespace, self.id, self.ttl_s)

    def check(self) -> None:
        """See that it is there, and renew it if it is time; one request, now and then.

        Whether it is time may be judged by this machine's clock: segments are never written
        again, so what was swept is missing, and that is told. Only `look` is sure.
        """
        if self._looked is not None and self._looked.elapsed_s() < self.ttl_s / LOOKS:
            return
        looked = self._store.runtime.stopwatch()
        try:
            written_s = self._store.head(self._key).last_modified_s
        except NotFoundError:
            raise self._lapsed("is gone") from None
        if abs(self._store.runtime.wall_s() - written_s) >= self.ttl_s / BEATS:
            self.look()
        self._looked = looked

    def look(self) -> None:
        """Raise unless everything that was read until now was protected; renew if it is time."""
        looked = self._store.runtime.stopwatch()
        try:
            age_s = self._age_s()
            if age_s >= self.ttl_s / BEATS:
                self._renew()
        except NotFoundError:
            raise self._lapsed("is gone") from None
        if age_s + looked.elapsed_s() >= self.ttl_s:  # a sweep may have seen it lapsed
            raise self._lapsed(f"is {age_s:.0f} seconds old")

    def release(self) -> None:
        """Give it up: for a read that ends before it began."""
        self._store.delete(self._key)

    @property
    def _key(self) -> str:
        return self._namespace.lease(self.id)

    def _age_s(self) -> float:
        info = self._store.head(self._key)
        return self._store.now() - info.last_modified_s

    def _renew(self) -> None:
        """Write it again; if another task was first, that is as good."""
        found = self._store.get_tagged(self._key)
        if not self._store.capabilities.if_match or found.tag is None:
            return
        record = msgspec.json.decode(found.body, type=LeaseRecord)
        renewed = msgspec.structs.replace(record, nonce=self._store.runtime.ulid())
        result = self._store.replace(self._key, msgspec.json.encode(renewed), found.tag)
        if result.outcome is Outcome.CHANGED:
            self._store.head(self._key)  # there, or it was reaped

    def _lapsed(self, why: str) -> NotFoundError:
        return NotFoundError(
            f"the lease {self.id} of this read of {self._namespace.name} {why}; it was for "
            f"{self.ttl_s:g} seconds after the last task",
            kind=Kind.COLLECTED,
            hint="Load the DataFrame again, or raise leaseSeconds",
            namespace=self._namespace.name,
        )
