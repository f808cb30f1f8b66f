"""Leases: what a session is about to read stays, for as long as its lease is alive.

A lease holds the state w of the head that was read before it was written, and protects whatever
any head from w on names: the segments behind w's checkpoint, and the checkpoints from that one on
(H22). The order makes it safe: read w, write the lease, read the head again, use that. Collection
lists the leases only after its plan is installed, so that either it sees the lease, or the
session sees a head that no longer names what goes.

A lease lapses `ttl_ms` after its object's date, both by the store's clock, and a margin is added
for clocks that are cut to seconds. A heartbeat never brings back a lease that was reaped: it is
conditional, or writes another name where the store has no If-Match.
"""

from dataclasses import dataclass

import msgspec

from reef.catalog.limits import Turnstile
from reef.catalog.snapshot import Snapshot
from reef.errors import UNDECODABLE, ConflictError, NotFoundError
from reef.paths import CatalogNames
from reef.stores import ObjectInfo, Store

__all__ = ["FoundLease", "Lease", "LeaseRecord", "LeaseStore"]

UNREADABLE_TTL_MS = 24 * 3600 * 1000
"""How long a lease that cannot be read holds everything."""
MARGIN_S = 5.0
LISTINGS_MAX = 5


class LeaseRecord(msgspec.Struct, frozen=True):
    """What a lease says."""

    id: str
    snapshot_txn_id: int
    checkpoint_seq: int
    """Nothing behind this segment may go, nor a checkpoint from it on."""
    owner: str
    ttl_ms: int
    nonce: str = ""


UNREADABLE = LeaseRecord("", 0, 0, "", UNREADABLE_TTL_MS)
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

        One that was listed and is gone was released, or has moved to another name: a later
        listing shows it there. If they never come to rest, one that holds everything stands for
        those that were not seen.
        """
        known: dict[str, LeaseRecord] = {}
        for _ in range(LISTINGS_MAX):
            listed = list(self.store.list(self.names.leases))
            if self._read_new(listed, known):
                return [self._found(info, known[info.key], now_s) for info in listed]
        return [FoundLease(self.names.lease("unseen"), "unseen", 0, lapsed=False)]

    def reap(self, leases: list[FoundLease]) -> None:
        """Remove lapsed leases."""
        self.store.delete_many([lease.key for lease in leases if lease.lapsed])

    def _found(self, info: ObjectInfo, record: LeaseRecord, now_s: float) -> FoundLease:
        margin_s = MARGIN_S + self.store.capabilities.clock_resolution_s
        lapsed = now_s - info.last_modified_s > record.ttl_ms / 1000 + margin_s
        return FoundLease(info.key, record.id, record.checkpoint_seq, lapsed)

    def _read_new(self, listed: list[ObjectInfo], known: dict[str, LeaseRecord]) -> bool:
        """Read the leases that are not known yet; whether all of them were still there."""
        complete = True
        for info in listed:
            if info.key in known:
                continue
            try:
                known[info.key] = msgspec.json.decode(self.store.get(info.key), type=LeaseRecord)
            except NotFoundError:
                complete = False
            except UNDECODABLE:
                known[info.key] = UNREADABLE
        return complete


class Lease:
    """A pin that is held until it is released or not renewed in time."""

    def __init__(self, leases: LeaseStore, record: LeaseRecord) -> None:
        self._leases = leases
        self._store = leases.store
        self.record = record
        self._written = self._store.runtime.stopwatch()
        with leases.turnstile.pass_through():
            self._tag = self._write()

    @property
    def lapsed(self) -> bool:
        """Whether collection may have gone on without it."""
        return self._written.elapsed_s() * 1000 >= self.record.ttl_ms

    def due(self, share: float) -> bool:
        """Whether so much of its time has passed."""
        return self._written.elapsed_s() * 1000 >= self.record.ttl_ms * share

    def renew(self) -> None:
        """Push the expiry out; ConflictError if the lease was reaped meanwhile."""
        with self._leases.turnstile.pass_through():
            before, written = self._written, self._store.runtime.stopwatch()
            if not self._store.capabilities.if_match or self._tag is None:
                self._move()
            else:
                result = self._store.replace(self._key, self._encoded(), self._tag)
                if not result.landed:
                    raise self._reaped()
                self._tag = result.tag
            if before.elapsed_s() * 1000 >= self.record.ttl_ms:
                raise self._reaped()  # it may have been seen as lapsed before this arrived
            self._written = written

    def release(self) -> None:
        self._store.delete(self._key)

    @property
    def _key(self) -> str:
        return self._leases.names.lease(self.record.id)

    def _move(self) -> None:
        """Renew under a new name: the old one may be gone, and must not come back."""
        old = self._key
        self.record = msgspec.structs.replace(self.record, id=self._store.runtime.ulid())
        self._tag = self._write()
        try:
            self._store.head(old)
        except NotFoundError:
            self.release()
            raise self._reaped() from None
        self._store.delete(old)

    def _write(self) -> str | None:
        return self._store.put(self._key, self._encoded())

    def _encoded(self) -> bytes:
        self.record = msgspec.structs.replace(self.record, nonce=self._store.runtime.ulid())
        return msgspec.json.encode(self.record)

    def _reaped(self) -> ConflictError:
        return ConflictError(
            f"lease {self.record.id} of a catalog's session was reaped or cannot be renewed",
            hint="Begin another session: it reads from the current head",
            object=self._key,
        )
