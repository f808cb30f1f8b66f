"""A lease: an object that its holder beats alive, and that lapses when it does not.

What a lease protects is said by those who use it; here is only how one is kept. Leases are among
the few objects that are ever overwritten. A heartbeat never brings back one that was reaped: it is
conditional, or, where the store has no If-Match, it writes a lease of a new name and removes the
old one. A lease lapses `ttl_ms` after the store's date of its object: both ends of the comparison
are the store's clock (H30). Its holder counts from before it was written, and gives a lapsed one
up: whoever saw it lapsed has gone on without it.

A renewal without an answer is neither: the lease holds as long as it did before, and the next
renewal finds out what is there.
"""

from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Generic, TypeVar

import msgspec

from reef.errors import UNDECODABLE, ConflictError, NotFoundError, ReefError, UnavailableError
from reef.stores.base import ObjectInfo, Outcome, Store

__all__ = ["UNREADABLE_TTL_MS", "LeaseFields", "StoredLease", "list_leases"]

LISTINGS_MAX = 5
"""How often leases are listed until none of them vanishes between its listing and its reading."""
UNREADABLE_TTL_MS = 24 * 3600 * 1000
"""How long a lease that cannot be read holds everything."""


class LeaseFields(msgspec.Struct, frozen=True, kw_only=True):
    """What every lease says."""

    id: str
    owner: str
    ttl_ms: int
    nonce: str = ""
    """So that a renewal differs from what it renews."""


R = TypeVar("R", bound=LeaseFields)


class StoredLease(ABC, Generic[R]):
    """A lease that is held until it is released or not renewed in time."""

    def __init__(self, store: Store, record: R) -> None:
        self._store = store
        self.record = record
        self._written = store.runtime.stopwatch()
        self._tag = self._write()
        self._in_doubt = False
        """Whether a renewal had no answer, so that the tag may be an older one's."""

    @property
    def lapsed(self) -> bool:
        """Whether others may have gone on without it."""
        return self.is_spent(1.0)

    def is_spent(self, share: float) -> bool:
        """Whether so much of its time has passed."""
        return self._written.elapsed_s() * 1000 >= self.record.ttl_ms * share

    def renew(self) -> None:
        """Push the expiry out; ConflictError if the lease was reaped meanwhile.

        UnavailableError if nobody can say: it may be tried again while there is time.
        """
        before, written = self._written, self._store.runtime.stopwatch()
        if not self._store.capabilities.if_match or self._tag is None:
            self._move()
        else:
            self._tag = self._overwrite(self._tag)
        if before.elapsed_s() * 1000 >= self.record.ttl_ms:
            raise self._reaped()  # it may have been seen as lapsed before this arrived
        self._written = written

    def release(self) -> None:
        self._store.delete(self._key)

    @property
    @abstractmethod
    def _key(self) -> str: ...

    @abstractmethod
    def _reaped(self) -> ConflictError: ...

    def _overwrite(self, tag: str) -> str | None:
        """Renew in place, and return the new tag."""
        was_in_doubt, self._in_doubt = self._in_doubt, True
        if was_in_doubt:  # nobody else writes to this name: what is there is ours
            tag = self._tag_now() or tag
        result = self._store.replace(self._key, self._encoded(), tag)
        is_open = result.outcome is Outcome.UNKNOWN
        if is_open or (was_in_doubt and not result.landed):  # an earlier one may have come late
            raise UnavailableError(
                f"the renewal of lease {self.record.id} has no answer: {result.cause}",
                object=self._key,
            )
        if not result.landed:
            raise self._reaped()
        self._in_doubt = False
        return result.tag

    def _tag_now(self) -> str | None:
        try:
            return self._store.get_tagged(self._key).tag
        except NotFoundError:
            raise self._reaped() from None

    def _move(self) -> None:
        """Renew under a new name: the old one may be gone, and must not come back.

        It stays ours until it was seen beside the new one: after a failure on the way it is the
        one that is looked for again. What is left of either lapses by itself.
        """
        old, before = self._key, self.record
        self.record = msgspec.structs.replace(before, id=self._store.runtime.ulid())
        try:
            tag = self._write()
            self._check_there(old)
        except BaseException:
            self.record = before
            raise
        self._tag = tag
        with suppress(ReefError):
            self._store.delete(old)

    def _check_there(self, old: str) -> None:
        try:
            self._store.head(old)
        except NotFoundError:
            with suppress(ReefError):
                self.release()
            raise self._reaped() from None

    def _write(self) -> str | None:
        return self._store.put(self._key, self._encoded())

    def _encoded(self) -> bytes:
        self.record = msgspec.structs.replace(self.record, nonce=self._store.runtime.ulid())
        return msgspec.json.encode(self.record)


def list_leases(
    store: Store, prefix: str, unreadable: R
) -> tuple[list[tuple[ObjectInfo, R]], bool]:
    """Return the leases there are, and whether all of them were seen.

    One that was listed and is gone was released, or has moved to another name: a later listing
    shows it there. They may never come to rest. For one that cannot be read, `unreadable` stands.
    """
    known: dict[str, R] = {}
    listed: list[ObjectInfo] = []
    for _ in range(LISTINGS_MAX):
        listed = list(store.list(prefix))
        if _read_new(store, listed, known, unreadable):
            return [(info, known[info.key]) for info in listed], True
    return [(info, known[info.key]) for info in listed if info.key in known], False


def _read_new(store: Store, listed: list[ObjectInfo], known: dict[str, R], unreadable: R) -> bool:
    """Read the leases that are not known yet; whether all of them were still there."""
    complete = True
    for info in listed:
        if info.key in known:
            continue
        try:
            known[info.key] = msgspec.json.decode(store.get(info.key), type=type(unreadable))
        except NotFoundError:
            complete = False
        except UNDECODABLE:
            known[info.key] = unreadable
    return complete
