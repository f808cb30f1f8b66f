"""Leases of a catalog: what a session is about to read stays (`reef.stores.leases`).

A lease holds the state w of the head that was read before it was written, and protects whatever
any head from w on names: the segments behind w's checkpoint, and the checkpoints from that one on
(H22). The order makes it safe: read w, write the lease, read the head again, use that. Collection
lists the leases only after its plan is installed, so that either it sees the lease, or the
session sees a head that no longer names what goes. A margin is added to a lease's time for clocks
that are cut to seconds.
"""

from dataclasses import dataclass

from reef.catalog.limits import Turnstile
from reef.catalog.snapshot import Snapshot
from reef.errors import ConflictError
from reef.paths import CatalogNames
from reef.stores import ObjectInfo, Store
from reef.stores.leases import UNREADABLE_TTL_MS, LeaseFields, StoredLease, list_leases

__all__ = ["FoundLease", "Lease", "LeaseRecord", "LeaseStore"]

MARGIN_S = 5.0


class LeaseRecord(LeaseFields, frozen=True, kw_only=True):
    """What a lease says."""

    snapshot_txn_id: int
    checkpoint_seq: int
    """Nothing behind this segment may go, nor a checkpoint from it on."""


UNREADABLE = LeaseRecord(
    id="", owner="", ttl_ms=UNREADABLE_TTL_MS, snapshot_txn_id=0, checkpoint_seq=0
)
"""Stands for a lease of which nobody knows what it holds: all of it, for a day."""


@dataclass(frozen=True, slots=True)
class FoundLease:
    """A lease as collection sees it."""

    key: str
    id: str
    checkpoint_seq: int
    lapsed: bool


class LeaseStore:
    """Takes and finds leases."""

    def __init__(self, store: Store, names: CatalogNames, turnstile: Turnstile) -> None:
        self.store = store
        self.names = names
        self.turnstile = turnstile

    def take(self, snapshot: Snapshot, *, owner: str, ttl_s: float) -> "Lease":
        """Write a lease on a state that was read before."""
        record = LeaseRecord(
            id=self.store.runtime.ulid(),
            snapshot_txn_id=snapshot.txn_id,
            checkpoint_seq=snapshot.floor,
            owner=owner,
            ttl_ms=int(ttl_s * 1000),
        )
        return Lease(self, record)

    def find(self, now_s: float) -> list[FoundLease]:
        """Return the leases there are. `now_s` is the store's time, read before this is called.

        If they never come to rest, one that holds everything stands for those not seen.
        """
        found, complete = list_leases(self.store, self.names.leases, UNREADABLE)
        if complete:
            return [self._found(info, record, now_s) for info, record in found]
        return [FoundLease(self.names.lease("unseen"), "unseen", 0, lapsed=False)]

    def reap(self, leases: list[FoundLease]) -> None:
        """Remove lapsed leases."""
        self.store.delete_many([lease.key for lease in leases if lease.lapsed])

    def _found(self, info: ObjectInfo, record: LeaseRecord, now_s: float) -> FoundLease:
        margin_s = MARGIN_S + self.store.capabilities.clock_resolution_s
        lapsed = now_s - info.last_modified_s > record.ttl_ms / 1000 + margin_s
        return FoundLease(info.key, record.id, record.checkpoint_seq, lapsed)


class Lease(StoredLease[LeaseRecord]):
    """A pin that is held until it is released or not renewed in time."""

    def __init__(self, leases: LeaseStore, record: LeaseRecord) -> None:
        self._leases = leases
        with leases.turnstile.pass_through():
            super().__init__(leases.store, record)

    def renew(self) -> None:
        with self._leases.turnstile.pass_through():
            super().renew()

    @property
    def _key(self) -> str:
        return self._leases.names.lease(self.record.id)

    def _reaped(self) -> ConflictError:
        return ConflictError(
            f"lease {self.record.id} of a catalog's session was reaped or cannot be renewed",
            hint="Begin another session: it reads from the current head",
            object=self._key,
        )
