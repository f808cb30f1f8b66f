"""Leases: objects that their holders renew, and that expire otherwise (protocols §6).

    record      `LeaseRecord`: the holder and its term. A subclass adds the objects that it pins:
                `reef.manifest.roots` a generation, `reef.catalog.snapshot` a state of the catalog
    hold        `Lease`        one object in the bucket: written, renewed, narrowed, released
                `HeldLease`    a lease in use by the threads of one process
                `SharedLease`  a lease in use by tasks in many processes
    heartbeat   `LeaseKeeper`  renews a `HeldLease`, in one thread for all leases of a store
    find        `find_leases`, for the sweep

A lease expires `ttl_ms` after the store's date of its object: both ends of the comparison are the
store's clock (H30). Its holder counts from before it was written, and does not use it after that
time: a sweep may have seen it expired.

Leases are among the few objects that are ever overwritten. A renewal never brings back a lease that
was reaped: it is conditional, or, where the store has no If-Match, it writes a lease with a new id
and then removes the old one. A renewal without a response is neither a success nor a loss: the
lease holds as long as it did before, and the next renewal reads the object's tag first.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

import msgspec

from reef.errors import (
    UNDECODABLE,
    ConflictError,
    ErrorKind,
    NotFoundError,
    ReefError,
    UnavailableError,
)
from reef.runtime import ConditionVariable, Runtime, Stopwatch, Task, leaf_lock
from reef.stores.base import ObjectInfo, Outcome, Store

LISTINGS_MAX = 5
"""Listings until none of the listed leases disappears before it is read."""
UNREADABLE_TTL_MS = 24 * 3600 * 1000
"""Term of a lease that cannot be decoded; until then it holds everything."""
RENEW_AFTER = 1 / 3
"""Share of its term after which a lease is renewed."""
POLLS = 6
"""Checks per term, by keepers and tasks: three renewals may fail before the lease expires."""


# --- record ---------------------------------------------------------------------------


class LeaseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that all leases share."""

    id: str
    owner: str
    ttl_ms: int
    nonce: str = ""
    """Makes a renewal differ from the object that it replaces."""


R = TypeVar("R", bound=LeaseRecord)


class LeaseNames(Protocol):
    """The names of leases: `reef.paths.Namespace` and `reef.paths.CatalogNames`."""

    @property
    def leases(self) -> str: ...

    def lease(self, lease_id: str, /) -> str: ...


# --- hold -----------------------------------------------------------------------------


class Lease(Generic[R]):
    """One lease in the bucket, held until it is released or not renewed in time."""

    def __init__(
        self,
        store: Store,
        names: LeaseNames,
        record: R,
        *,
        subject: str,
        gate: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Write the lease. `subject` is the pinned thing, for errors; `gate` limits requests."""
        self.store, self._names, self._gate = store, names, gate
        self.record, self.subject = record, subject
        self._written = store.runtime.stopwatch()
        with gate():
            self._tag = self._write()
        self._in_doubt = False
        """Whether a renewal had no response, so that the tag may be outdated."""

    @property
    def expired(self) -> bool:
        """Whether a sweep may have seen it expired."""
        return self.is_spent(1.0)

    def is_spent(self, share: float) -> bool:
        """Whether this share of its term has passed."""
        return self._written.elapsed_s() * 1000 >= self.record.ttl_ms * share

    def renew(self) -> None:
        """Extend the lease by its term; ConflictError if it was reaped meanwhile.

        UnavailableError if the outcome is unknown: it may be renewed again while there is time.
        """
        with self._gate():
            before, written = self._written, self.store.runtime.stopwatch()
            if not self.store.capabilities.if_match or self._tag is None:
                self._move()
            else:
                self._tag = self._overwrite(self._tag)
            if before.elapsed_s() * 1000 >= self.record.ttl_ms:
                raise self._reaped_error()  # a sweep may have seen it expired before this arrived
            self._written = written

    def narrow(self, **pinned: Any) -> None:
        """Renew the lease with other fields, which pin less; raises as `renew` does.

        Until the store has the new record, the old one holds more, never less.
        """
        self.record = msgspec.structs.replace(self.record, **pinned)
        self.renew()

    def release(self) -> None:
        self.store.delete(self._key)

    @property
    def _key(self) -> str:
        return self._names.lease(self.record.id)

    def _reaped_error(self) -> ConflictError:
        return ConflictError(
            f"lease {self.record.id} on {self.subject} was reaped or cannot be renewed",
            hint="Open another one, and read again from the current head",
            object=self._key,
        )

    def _overwrite(self, tag: str) -> str | None:
        """Renew in place, and return the new tag."""
        was_in_doubt, self._in_doubt = self._in_doubt, True
        if was_in_doubt:  # no other process writes to this name: the object there is ours
            tag = self._current_tag() or tag
        result = self.store.replace(self._key, self._encoded(), tag)
        is_unknown = result.outcome is Outcome.UNKNOWN
        if is_unknown or (was_in_doubt and not result.landed):  # an earlier one may arrive late
            raise UnavailableError(
                f"the renewal of lease {self.record.id} had no response: {result.cause}",
                object=self._key,
            )
        if not result.landed:
            raise self._reaped_error()
        self._in_doubt = False
        return result.tag

    def _current_tag(self) -> str | None:
        try:
            return self.store.get_tagged(self._key).tag
        except NotFoundError:
            raise self._reaped_error() from None

    def _move(self) -> None:
        """Renew under a new id: the old object may be gone, and must not come back.

        The old id stays ours until its object was seen after the new one was written: after a
        failure in between, the next renewal checks for it again. Leftovers of either expire.
        """
        old, before = self._key, self.record
        self.record = msgspec.structs.replace(before, id=self.store.runtime.ulid())
        try:
            tag = self._write()
            self._check_exists(old)
        except BaseException:
            self.record = before
            raise
        self._tag = tag
        with suppress(ReefError):
            self.store.delete(old)

    def _check_exists(self, old: str) -> None:
        try:
            self.store.head(old)
        except NotFoundError:
            with suppress(ReefError):
                self.release()
            raise self._reaped_error() from None

    def _write(self) -> str | None:
        return self.store.put(self._key, self._encoded())

    def _encoded(self) -> bytes:
        self.record = msgspec.structs.replace(self.record, nonce=self.store.runtime.ulid())
        return msgspec.json.encode(self.record)


class HeldLease(Generic[R]):
    """A lease in use by one process, until it is released or lost. Safe for threads.

    It is renewed when a third of its term has passed, by the calls that check it, or by a keeper.
    A lease that was reaped, or that could not be renewed in time, is lost for good: the objects
    that it pinned may be gone.
    """

    def __init__(self, lease: Lease[R]) -> None:
        self._lease = lease
        runtime = lease.store.runtime
        self._turn, self._guard = runtime.lock(), runtime.lock()
        self._on_release: list[Callable[[], None]] = []
        self._lost: ConflictError | None = None
        self._released = False

    @property
    def id(self) -> str:
        return self._lease.record.id

    @property
    def is_over(self) -> bool:
        """Whether it was released or lost."""
        return self._released or self._lost is not None

    @property
    def expired(self) -> bool:
        """Whether the objects that it pinned may be gone."""
        return self._lost is not None or self._lease.expired

    @property
    def is_fresh(self) -> bool:
        """Whether `check` would neither raise nor renew."""
        return not self.is_over and not self._lease.is_spent(RENEW_AFTER)

    def check(self) -> None:
        """Raise ConflictError if the lease is lost; renew it if it is due."""
        if not self.is_held():
            self._raise_if_lost()

    def is_held(self) -> bool:
        """Whether the lease is still held; renews it if due."""
        self.renew_if_due()
        return not self.is_over

    def heartbeat(self) -> None:
        """Renew the lease; ConflictError if it was reaped or had expired."""
        with self._turn:
            if self._released:
                return
            self._raise_if_lost()
            try:
                self._lease.renew()
            except ConflictError as error:
                self._lost = error
                raise

    def renew_if_due(self) -> None:
        """Renew it if a third of its term has passed; a failure is not raised here."""
        if self._lease.is_spent(RENEW_AFTER):
            with self._turn:
                if not self.is_over and self._lease.is_spent(RENEW_AFTER):
                    self._try(self._lease.renew)

    def narrow(self, **pinned: Any) -> None:
        """Pin less from now on; if the store does not respond, from the next renewal on."""
        with self._turn:
            if not self.is_over:
                self._try(lambda: self._lease.narrow(**pinned))

    def release(self) -> None:
        """Release it; one that cannot be removed expires."""
        with self._guard:
            if self._released:
                return
            self._released = True
        for stop_renewing in self._on_release:
            stop_renewing()
        with self._turn, suppress(ReefError):
            self._lease.release()

    def hand_over(self) -> None:
        """Stop renewing it, and leave it to the process that knows its id."""
        with self._guard:
            self._released = True
        for stop_renewing in self._on_release:
            stop_renewing()
        with self._turn:  # a renewal under way may change the id
            pass

    def renew_in_background(self) -> "LeaseKeeper":
        """Renew it until it is over, or garbage-collected."""
        return LeaseKeeper(self)

    def _try(self, renew: Callable[[], None]) -> None:
        try:
            renew()
        except ConflictError as error:
            self._lost = error
        except ReefError as error:  # there may be time for another attempt
            if self._lease.expired:
                self._lost = ConflictError(
                    f"lease {self.id} on {self._lease.subject} expired: {error.message}",
                    hint="Open another one, and read again from the current head",
                )

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise ConflictError(self._lost.message, hint=self._lost.hint, **self._lost.context)


# --- heartbeat ------------------------------------------------------------------------


class LeaseKeeper:
    """Renews a lease in the background, until it is shut down or the lease is over.

    All keepers of a store share one thread. It has only a weak reference to the lease: the lease of
    a handle that was garbage-collected is not renewed, and expires.
    """

    def __init__(self, held: HeldLease[Any]) -> None:
        self._held = weakref.ref(held)
        self._every_s = held._lease.record.ttl_ms / 1000 / POLLS
        self._renewals = renewals = _renewals_of(held._lease.store)
        held._on_release.append(lambda: renewals.remove(self))
        renewals.add(self)

    @property
    def _is_over(self) -> bool:
        """Whether there is nothing left to renew."""
        held = self._held()
        return held is None or held.is_over

    def _renew_if_due(self) -> None:
        """Renew the lease if a third of its term has passed."""
        held = self._held()
        if held is not None:
            held.renew_if_due()

    def shutdown(self) -> None:
        """Stop renewing; the thread ends with the last keeper of its store."""
        self._renewals.remove(self, wait=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()


class _Renewals:
    """The thread that renews the leases of one store, while there are keepers."""

    def __init__(self, runtime: Runtime) -> None:
        self.process_id = runtime.process_id()
        self._runtime = runtime
        self._wake: ConditionVariable = runtime.condition()
        self._keepers: list[LeaseKeeper] = []
        self._task: Task | None = None

    def add(self, keeper: LeaseKeeper) -> None:
        """Renew one more lease."""
        with self._wake:
            self._keepers.append(keeper)
            if self._task is None:
                self._task = self._runtime.spawn(self._run, name="lease")
            self._wake.notify_all()

    def remove(self, keeper: LeaseKeeper, *, wait: bool = False) -> None:
        """Leave a lease alone; the thread ends with the last one."""
        with self._wake:
            if keeper in self._keepers:
                self._keepers.remove(keeper)
            task = self._task if wait and not self._keepers else None
            self._wake.notify_all()
        if task is not None:
            task.join()

    def _run(self) -> None:
        while keepers := self._next_round():
            self._runtime.map(LeaseKeeper._renew_if_due, keepers)

    def _next_round(self) -> list[LeaseKeeper]:
        """Wait for the next check; return the keepers, none if the thread shall end."""
        with self._wake:
            if self._is_needed():
                self._wake.wait(min(keeper._every_s for keeper in self._keepers))
            if not self._is_needed():
                self._task = None
            return list(self._keepers)

    def _is_needed(self) -> bool:
        self._keepers = [keeper for keeper in self._keepers if not keeper._is_over]
        return bool(self._keepers)


_by_store: "weakref.WeakKeyDictionary[Store, _Renewals]" = weakref.WeakKeyDictionary()
_by_store_lock = leaf_lock()


def _renewals_of(store: Store) -> _Renewals:
    """Return the renewals of a store in this process: a fork leaves the thread behind."""
    with _by_store_lock:
        found = _by_store.get(store)
        if found is None or found.process_id != store.runtime.process_id():
            found = _by_store[store] = _Renewals(store.runtime)
        return found


class SharedLease:
    """A lease that tasks in many processes use by its id. Picklable.

    There is no process that could renew it for all of them. Each task checks it from time to time,
    and the first one that finds it due renews it. It expires if no task has checked it for a term.
    A store without If-Match cannot renew it: there the tasks have to end within its term.
    """

    def __init__(
        self, store: Store, names: LeaseNames, lease_id: str, ttl_s: float, *, hint: str = ""
    ) -> None:
        self.id, self.ttl_s = lease_id, ttl_s
        self._store, self._names, self._hint = store, names, hint
        self._checked: Stopwatch | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _reshare, (self._store, self._names, self.id, self.ttl_s, self._hint)

    def check(self) -> None:
        """Raise if the lease is gone, and renew it if it is due; at most one HEAD in a sixth of
        its term.

        This machine's clock is good enough to decide whether it is due: an object that was swept
        too early is missing, never different. `verify` is exact.
        """
        if self._checked is not None and self._checked.elapsed_s() < self.ttl_s / POLLS:
            return
        checked = self._store.runtime.stopwatch()
        try:
            written_s = self._store.head(self._key).last_modified_s
        except NotFoundError:
            raise self._expired_error("is gone") from None
        if abs(self._store.runtime.wall_s() - written_s) >= self.ttl_s * RENEW_AFTER:
            self.verify()
        self._checked = checked

    def verify(self) -> None:
        """Raise unless every object read until now was protected; renew the lease if it is due."""
        started = self._store.runtime.stopwatch()
        try:
            age_s = self._age_s()
            if age_s >= self.ttl_s * RENEW_AFTER:
                self._renew()
        except NotFoundError:
            raise self._expired_error("is gone") from None
        if age_s + started.elapsed_s() >= self.ttl_s:  # a sweep may have seen it expired
            raise self._expired_error(f"is {age_s:.0f} seconds old")

    def release(self) -> None:
        self._store.delete(self._key)

    @property
    def _key(self) -> str:
        return self._names.lease(self.id)

    def _age_s(self) -> float:
        info = self._store.head(self._key)
        return self._store.now() - info.last_modified_s

    def _renew(self) -> None:
        """Write it again in place; another task's renewal is as good."""
        found = self._store.get_tagged(self._key)
        if not self._store.capabilities.if_match or found.tag is None:
            return
        record = msgspec.json.decode(found.body, type=dict[str, Any])
        record["nonce"] = self._store.runtime.ulid()
        result = self._store.replace(self._key, msgspec.json.encode(record), found.tag)
        if result.outcome is Outcome.CHANGED:
            self._store.head(self._key)  # renewed by another task, or reaped

    def _expired_error(self, why: str) -> NotFoundError:
        return NotFoundError(
            f"object {self._key}: this lease of {self.ttl_s:g} seconds {why}; the objects that it "
            "pinned may be garbage-collected",
            kind=ErrorKind.COLLECTED,
            hint=self._hint,
            object=self._key,
        )


def _reshare(
    store: Store, names: LeaseNames, lease_id: str, ttl_s: float, hint: str
) -> SharedLease:
    return SharedLease(store, names, lease_id, ttl_s, hint=hint)


# --- find -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FoundLease(Generic[R]):
    """A lease in the bucket, as a sweep sees it."""

    key: str
    record: R
    expired: bool
    renewed_s: float = 0.0
    """When it was written last, by the store's clock."""
    is_readable: bool = True
    """If not, `record` is a substitute that pins everything, and its owner is unknown."""

    @property
    def owner(self) -> str | None:
        """The holder; None if it is unknown."""
        return self.record.owner if self.is_readable else None


def find_leases(
    store: Store, names: LeaseNames, unreadable: R, *, now_s: float, margin_s: float
) -> list[FoundLease[R]]:
    """Return all leases. `now_s` is the store's time, read before this is called.

    Read later it could be long after the listing, and a lease that was renewed in between would
    seem to be expired. `unreadable` is the record of a lease that cannot be decoded, and of those
    that may have been missed because others were renewed in every listing.
    """
    found, complete = _list_leases(store, names.leases, unreadable)
    leases = [
        FoundLease(
            info.key,
            record,
            now_s - info.last_modified_s > record.ttl_ms / 1000 + margin_s,
            info.last_modified_s,
            record is not unreadable,
        )
        for info, record in found
    ]
    if not complete:
        leases.append(FoundLease(names.lease("unseen"), unreadable, False, is_readable=False))
    return leases


def _list_leases(
    store: Store, prefix: str, unreadable: R
) -> tuple[list[tuple[ObjectInfo, R]], bool]:
    """Return the leases, and whether the listing was complete.

    One that was listed and is gone was released, or was renewed under another id, which a later
    listing shows.
    """
    known: dict[str, R] = {}
    listed: list[ObjectInfo] = []
    for _ in range(LISTINGS_MAX):
        listed = list(store.list(prefix))
        if _read_new(store, listed, known, unreadable):
            return [(info, known[info.key]) for info in listed], True
    return [(info, known[info.key]) for info in listed if info.key in known], False


def _read_new(store: Store, listed: list[ObjectInfo], known: dict[str, R], unreadable: R) -> bool:
    """Read the leases that are not known yet; return whether all of them still exist."""
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
