"""Leases of a namespace: short-lived pins, each its own object (`reef.stores.leases`).

A lease holds a generation w and its floor, both read before it is written, and protects
everything that any generation from w on names. The order is what makes it safe: read w,
write the lease, read the head again, use that. The sweep lists leases only after the CAS
that condemns, so that either it sees the lease or the holder sees the condemned list.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from platform import node

from reef.errors import ConflictError
from reef.formats.manifest import Manifest
from reef.paths import Namespace
from reef.stores import Store
from reef.stores.leases import UNREADABLE_TTL_MS, LeaseFields, StoredLease, list_leases

__all__ = ["FoundLease", "Lease", "LeaseRecord", "find_leases", "job_owner"]


class LeaseRecord(LeaseFields, frozen=True, kw_only=True):
    """What a lease says."""

    generation: int
    wal_floor: int
    where: str = ""
    """The machine and process that hold it, for people."""


UNREADABLE = LeaseRecord(id="", owner="", ttl_ms=UNREADABLE_TTL_MS, generation=0, wal_floor=0)
"""Stands for a lease of which nobody knows what it holds: all of it, for a day."""


class Lease(StoredLease[LeaseRecord]):
    """A pin that is held until it is released or not renewed in time."""

    def __init__(self, store: Store, namespace: Namespace, record: LeaseRecord) -> None:
        self._namespace = namespace
        super().__init__(store, record)

    @classmethod
    def take(
        cls, store: Store, namespace: Namespace, manifest: Manifest, *, owner: str, ttl_s: float
    ) -> "Lease":
        """Write a lease on a manifest that was read just before."""
        record = LeaseRecord(
            id=store.runtime.ulid(),
            generation=manifest.generation,
            wal_floor=manifest.wal_floor,
            owner=owner,
            ttl_ms=int(ttl_s * 1000),
            where=f"{node()}:{store.runtime.process_id()}",
        )
        return cls(store, namespace, record)

    @property
    def _key(self) -> str:
        return self._namespace.lease(self.record.id)

    def _reaped(self) -> ConflictError:
        return ConflictError(
            f"lease {self.record.id} on {self._namespace.name} was reaped or cannot be renewed",
            hint="Open another one, and read again from the current head",
            namespace=self._namespace.name,
        )


@dataclass(frozen=True, slots=True)
class FoundLease:
    """A lease as the sweep sees it."""

    key: str
    generation: int
    lapsed: bool
    owner: str | None = ""
    """None: nobody knows whose it is, so it may be anybody's."""
    where: str = ""
    renewed_s: float = 0.0
    """When it was written last, by the store's clock."""


def job_owner(job_id: str) -> str:
    """Return how the lease of a bulk job names its owner: while it lives, the job does."""
    return f"job {job_id}"


def find_leases(
    store: Store, namespace: Namespace, now_s: float, margin_s: float
) -> Iterator[FoundLease]:
    """Yield the leases there are. `now_s` is the store's time, read before this is called.

    Read later it could be long past the listing, and a lease that was renewed in between would
    seem to have lapsed. If they never come to rest, one that holds everything stands for those
    that were not seen.
    """
    found, complete = list_leases(store, namespace.leases, UNREADABLE)
    if not complete:
        yield FoundLease(namespace.lease("unseen"), 0, lapsed=False, owner=None)
    for info, record in found:
        lapsed = now_s - info.last_modified_s > record.ttl_ms / 1000 + margin_s
        owner = None if record is UNREADABLE else record.owner
        yield FoundLease(
            info.key, record.generation, lapsed, owner, record.where, info.last_modified_s
        )
