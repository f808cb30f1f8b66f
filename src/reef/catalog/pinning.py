"""Pinning: the order of steps by which a session gets a state that will stay (H22).

    the newest head that is known here → lease → the head as it is now

The first may be old: a lease on an older state holds more, never less. Only a process that knows
no head yet reads one for it. For an old snapshot (`pin_at`) the lease is written first, and then
the plan is read: a state that any plan so far has given up is refused.
"""

from reef.catalog.head import KnownHead
from reef.catalog.keeper import HeldLease
from reef.catalog.parts import Parts
from reef.catalog.snapshot import Snapshot
from reef.errors import Kind, NotFoundError, UnavailableError

__all__ = ["pin", "pin_at"]

PINS_MAX = 5


def pin(parts: Parts, *, owner: str) -> tuple[KnownHead, HeldLease]:
    """Return the newest head, and a lease that protects it."""
    before = parts.heads.last or parts.heads.load()
    for _ in range(PINS_MAX):
        lease = _take(parts, Snapshot.of(before), owner)
        parts.runtime.reach("catalog lease written")
        try:
            known = parts.heads.load()
        except BaseException:
            lease.release()
            raise
        if known.head.checkpoint_seq >= before.head.checkpoint_seq:
            return known, lease
        lease.release()  # heads never go back: the catalog was lost, and this holds too little
        before = known
    raise UnavailableError("the head of the catalog goes back again and again")


def pin_at(parts: Parts, snapshot: Snapshot, *, owner: str) -> HeldLease:
    """Return a lease on a snapshot; NotFoundError if part of it is collected, or about to be."""
    lease = _take(parts, snapshot, owner)
    parts.runtime.reach("catalog lease written")
    try:
        _check_retained(parts, snapshot)
    except BaseException:
        lease.release()
        raise
    return lease


def _take(parts: Parts, snapshot: Snapshot, owner: str) -> HeldLease:
    lease = parts.leases.take(snapshot, owner=owner, ttl_s=parts.retention.lease_ttl_s)
    return HeldLease(lease, parts.runtime)


def _check_retained(parts: Parts, snapshot: Snapshot) -> None:
    retained_from = parts.plans.load().plan.retained_from
    if snapshot.floor < retained_from:
        raise NotFoundError(
            f"the state of transaction {snapshot.txn_id} is given up: it begins with segment "
            f"{snapshot.floor}, kept is what begins with {retained_from}",
            kind=Kind.COLLECTED,
            hint="Take a new snapshot, and keep a session open on what you still need",
        )
