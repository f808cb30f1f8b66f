"""Leases: short-lived pins, each its own object, beaten alive by their holder.

A lease holds a generation w and its floor, both read before it is written, and protects
everything that any generation from w on names. The order is what makes it safe: read w,
write the lease, read the head again, use that. The sweep lists leases only after the CAS
that condemns, so that either it sees the lease or the holder sees the condemned list.

Leases are among the few objects that are ever overwritten. A heartbeat never brings back a
lease that was reaped: it is conditional, or, where the store has no If-Match, it writes a
lease of a new name and removes the old one. A lease lapses `ttl_ms` after the store's date of
its object: both ends of the comparison are the store's clock (H30). Its holder counts from
before it was written, and gives a lapsed one up: a sweep that saw it lapsed goes on without it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from platform import node

import msgspec

from reef.errors import UNDECODABLE, ConflictError, NotFoundError
from reef.formats.manifest import Manifest
from reef.paths import Namespace
from reef.stores import ObjectInfo, Store

__all__ = ["FoundLease", "Lease", "LeaseRecord", "find_leases", "job_owner"]

UNREADABLE_TTL_MS = 24 * 3600 * 1000
"""How long a lease that cannot be read holds everything."""
LISTINGS_MAX = 5
"""How often leases are listed until none of them vanishes between its listing and its reading."""


class LeaseRecord(msgspec.Struct, frozen=True):
    """What a lease says."""

    id: str
    generation: int
    wal_floor: int
    owner: str
    ttl_ms: int
    nonce: str = ""
    """So that a renewal differs from what it renews."""
    where: str = ""
    """The machine and process that hold it, for people."""


UNREADABLE = LeaseRecord("", 0, 0, "", UNREADABLE_TTL_MS)
"""Stands for a lease of which nobody knows what it holds: all of it, for a day."""


class Lease:
    """A pin that is held until it is released or not renewed in time."""

    def __init__(self, store: Store, namespace: Namespace, record: LeaseRecord) -> None:
        self._store = store
        self._namespace = namespace
        self.record = record
        self._written = store.runtime.stopwatch()
        self._tag = self._write()

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

    def renew(self) -> None:
        """Push the expiry out; ConflictError if the lease was reaped meanwhile."""
        before, written = self._written, self._store.runtime.stopwatch()
        if not self._store.capabilities.if_match or self._tag is None:
            self._move()
        else:
            result = self._store.replace(self._key, self._encoded(), self._tag)
            if not result.landed:
                raise self._reaped()
            self._tag = result.tag
        if before.elapsed_s() * 1000 >= self.record.ttl_ms:
            raise self._reaped()  # a sweep may have seen it lapsed before this arrived
        self._written = written

    def release(self) -> None:
        self._store.delete(self._key)

    @property
    def _key(self) -> str:
        return self._namespace.lease(self.record.id)

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

    Read later it could be long past the listing, and a lease that was renewed in between
    would seem to have lapsed. One that was listed and is gone was released, or has moved to
    another name: a later listing shows it there. If they never come to rest, one that holds
    everything stands for those that were not seen.
    """
    known: dict[str, LeaseRecord] = {}
    listed: list[ObjectInfo] = []
    for _ in range(LISTINGS_MAX):
        listed = list(store.list(namespace.leases))
        if _read_new(store, listed, known):
            break
    else:
        yield FoundLease(namespace.lease("unseen"), 0, lapsed=False, owner=None)
    for info in listed:
        record = known.get(info.key)
        if record is not None:
            lapsed = now_s - info.last_modified_s > record.ttl_ms / 1000 + margin_s
            owner = None if record is UNREADABLE else record.owner
            yield FoundLease(
                info.key, record.generation, lapsed, owner, record.where, info.last_modified_s
            )


def _read_new(store: Store, listed: list[ObjectInfo], known: dict[str, LeaseRecord]) -> bool:
    """Read the leases that are not known yet; whether all of them were still there."""
    complete = True
    for info in listed:
        if info.key in known:
            continue
        try:
            known[info.key] = msgspec.json.decode(store.get(info.key), type=LeaseRecord)
        except NotFoundError:
            complete = False
        except UNDECODABLE:
            known[info.key] = UNREADABLE
    return complete
