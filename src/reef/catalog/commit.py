"""Commits, and the recovery of orphans (protocols §10).

1. Write the segment, create-only, under a name with a new write id. Its base is the last segment
   of the session's head.
2. Compare-and-swap the head. Landed: committed.
3. Lost, or no response: load the head and follow its chain. The segment is on it: committed, by
   an earlier attempt or by a process that recovered it. The head still ends with the same base, as
   after a compaction: swap again.
4. Otherwise other transactions were committed, and this segment never will be: no process
   publishes a segment onto another base (H21). If none of them changed a key that the session
   read or wrote, its owner may rebase: with a new segment, from step 1, a bounded number of
   times (H25).

A failure between step 1 and a definite result raises `OutcomeUnknownError`: the segment is
durable, and another process may publish it. `resolve` decides it later: it publishes the segment,
or occupies its name before it arrives.

An orphan is a durable segment whose writer died, or is slow, between step 1 and step 2.
`recover_orphans` publishes it onto its own base only, by a swap of the head that was loaded, so
everything that its session read is still current. A slow writer then finds its segment on the
chain and reports success; a writer that has reported a conflict has seen the head past its base,
where the segment cannot be published any more (H21). While the writer's lease is alive the segment
is left to it: not for safety, but to spare both a race.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NoReturn

from reef.catalog.head import CatalogHead, KnownHead, Swap, with_segment
from reef.catalog.segments import CatalogSegment, ChainTip
from reef.catalog.snapshot import CatalogContext, CommitReceipt, find_session_leases
from reef.errors import (
    ConflictError,
    CorruptionError,
    ErrorKind,
    NotFoundError,
    OutcomeUnknownError,
    ReefError,
)
from reef.stores import Outcome
from reef.stores.wrappers.policies import Backoff
from reef.types import KeyRange

SWAPS_MAX = 100
"""Swaps of a segment whose base is still the last one, before its outcome is unknown."""
RESOLVES_MAX = 5
ORPHANS_MAX = 1000


@dataclass(slots=True)
class ConflictSet:
    """Keys that a session read or wrote, and ranges that it scanned, with their absent keys."""

    keys: set[bytes] = field(default_factory=set)
    ranges: list[KeyRange] = field(default_factory=list)

    def conflict(self, segment: CatalogSegment) -> bytes | None:
        """Return a key of this set that a transaction changed, if there is one."""
        for key in segment.records:
            if key in self.keys or any(key_range.has(key) for key_range in self.ranges):
                return key
        return None


def commit(
    context: CatalogContext,
    base: KnownHead,
    conflicts: ConflictSet,
    records: Mapping[bytes, bytes | None],
    lease_id: str,
) -> CommitReceipt:
    """Commit records that were staged at `base`; ConflictError if another commit interferes."""
    began = context.runtime.stopwatch()
    with context.limits.commits.pass_through():
        newest = context.heads.last
        if newest is not None and newest.head.revision > base.head.revision:
            # This process knows a newer head: an attempt on the old one would be lost.
            base = _rebase(context, base, newest, conflicts)
        segment = _commit_on_newest(context, base, conflicts, records, lease_id)
    context.metrics.histogram("catalog.commit_seconds").record(began.elapsed_s())
    return _receipt(segment)


def _commit_on_newest(
    context: CatalogContext,
    base: KnownHead,
    conflicts: ConflictSet,
    records: Mapping[bytes, bytes | None],
    lease_id: str,
) -> CatalogSegment:
    backoff = Backoff(context.runtime, context.backoff)
    while True:
        segment = _new_segment(context, base.head, records, lease_id)
        _write_segment(context, segment)
        context.runtime.reach("catalog segment durable")
        newest = publish_segment(context, base, segment)
        if newest is None:
            return segment
        base = _rebase(context, base, newest, conflicts)
        if not backoff.wait():
            raise ConflictError(
                f"the commit lost the head of the catalog {backoff.attempts} times in a row",
                hint="Retry later, or commit from fewer processes concurrently",
                attempts=backoff.attempts,
            )
        newest = context.heads.load()
        base = _rebase(context, base, newest, conflicts)


def _new_segment(
    context: CatalogContext,
    head: CatalogHead,
    records: Mapping[bytes, bytes | None],
    lease_id: str,
) -> CatalogSegment:
    return CatalogSegment(
        head.last_segment_seq + 1,
        head.last_txn_id + 1,
        context.runtime.ulid(),
        head.write_id,
        records,
        lease_id,
        int(context.runtime.wall_s() * 1000),
    )


def _write_segment(context: CatalogContext, segment: CatalogSegment) -> None:
    """Step 1. An error other than OutcomeUnknownError means that nothing was written."""
    result, size = context.segments.create(segment)
    if not result.landed:
        _raise_unknown(segment, result.cause or "the name of its segment is taken")
    context.metrics.histogram("catalog.segment_bytes", unit=1.0).record(size)
    context.metrics.histogram("catalog.segment_records", unit=1.0).record(len(segment.records))


def publish_segment(
    context: CatalogContext, known: KnownHead, segment: CatalogSegment
) -> KnownHead | None:
    """Steps 2 and 3: None if the segment is on the chain, otherwise the head that excludes it."""
    began = context.runtime.stopwatch()
    for _ in range(SWAPS_MAX):
        try:
            swap, _ = context.heads.publish(known, with_segment(known.head, segment))
            if swap is Swap.LANDED:
                context.metrics.histogram("catalog.publish_seconds").record(began.elapsed_s())
                return None
            if swap is Swap.LOST:
                context.metrics.counter("catalog.cas_conflicts").add()
            context.runtime.reach("catalog head lost")
            known = context.heads.load()
            is_there = on_chain(context, known.head, segment.seq, segment.write_id)
        except ReefError as error:
            _raise_unknown(segment, error)
        if is_there is None:
            _raise_unknown(segment, "its part of the chain was garbage-collected")
        if is_there:
            return None
        if known.head.write_id != segment.base_write_id:
            return known
    _raise_unknown(segment, f"compactions changed the head {SWAPS_MAX} times")


def on_chain(context: CatalogContext, head: CatalogHead, seq: int, write_id: str) -> bool | None:
    """Whether a segment is in the history of a head; None if that part was garbage-collected."""
    if seq > head.last_segment_seq:
        return False
    if seq >= head.recent_from:
        return head.recent[seq - head.recent_from] == write_id
    try:
        chain = context.segments.chain(ChainTip(head.last_segment_seq, head.recent), seq - 1)
    except (CorruptionError, NotFoundError):
        return None
    return chain[0].write_id == write_id


def _rebase(
    context: CatalogContext, base: KnownHead, newest: KnownHead, conflicts: ConflictSet
) -> KnownHead:
    """Step 4: return the newest head if no commit since `base` conflicts."""
    if newest.head.write_id == base.head.write_id:  # at most a compaction
        return newest if newest.head.revision > base.head.revision else base
    for other in _commits_since(context, base.head, newest.head):
        key = conflicts.conflict(other)
        if key is not None:
            raise ConflictError(
                f"transaction {other.txn_id} changed {key!r}, which this session read or wrote "
                f"at transaction {base.head.last_txn_id}",
                hint="Retry in a new session, or use transact()",
                key=key,
                txn_id=other.txn_id,
            )
    return newest


def _commits_since(
    context: CatalogContext, base: CatalogHead, newest: CatalogHead
) -> list[CatalogSegment]:
    """Return the segments between two heads; ConflictError if they cannot be determined."""
    try:
        tip = ChainTip(newest.last_segment_seq, newest.recent)
        others = context.segments.chain(tip, base.last_segment_seq)
    except NotFoundError as error:
        raise ConflictError(
            f"segments after transaction {base.last_txn_id} were garbage-collected",
            kind=ErrorKind.COLLECTED,
            hint="Retry in a new session; keep long ones alive with start_lease_keeper()",
        ) from error
    if not others or others[0].base_write_id != base.write_id:
        raise ConflictError(
            f"transaction {base.last_txn_id}, at which this session began, is not in the history "
            f"of transaction {newest.last_txn_id}: the catalog was lost, and created again",
            hint="Retry in a new session",
        )
    return others


def resolve(context: CatalogContext, receipt: CommitReceipt) -> bool:
    """Decide a commit whose outcome is unknown: return whether it is committed, for good.

    If it could still be published, its name is occupied, unless its segment exists: then that is
    published. A free name alone is no proof: the segment may have been committed, compacted and
    garbage-collected meanwhile. So the head is loaded again, and it alone decides.
    """
    marker = CatalogSegment(
        receipt.seq, receipt.txn_id, receipt.write_id, receipt.base_write_id, {}, abandoned=True
    )
    is_occupied = False
    for _ in range(RESOLVES_MAX):
        known = context.heads.load()
        is_there = on_chain(context, known.head, receipt.seq, receipt.write_id)
        if is_there is None:
            _raise_unknown(marker, "its part of the chain was garbage-collected")
        if is_there or is_occupied or known.head.write_id != receipt.base_write_id:
            return is_there
        result, _ = context.segments.create(marker)
        if result.outcome is Outcome.EXISTS:
            with suppress(NotFoundError):  # collected since: the next head decides
                segment = context.segments.read(receipt.seq, receipt.write_id)
                return not segment.abandoned and publish_segment(context, known, segment) is None
        elif result.landed:
            is_occupied = True
        else:
            _raise_unknown(marker, result.cause or "no response")
    _raise_unknown(marker, "the head changes faster than it can be read")


def _receipt(segment: CatalogSegment) -> CommitReceipt:
    return CommitReceipt(segment.seq, segment.txn_id, segment.write_id, segment.base_write_id)


def _raise_unknown(segment: CatalogSegment, cause: Exception | str) -> NoReturn:
    error = cause if isinstance(cause, Exception) else None
    raise OutcomeUnknownError(
        f"transaction {segment.txn_id} with write id {segment.write_id} may be committed: {cause}",
        hint="Call Catalog.resolve(error.receipt) before retrying",
        receipt=_receipt(segment),
    ) from error


# --- orphans ------------------------------------------------------------------------


def recover_orphans(context: CatalogContext) -> int:
    """Publish durable segments whose writers are gone; return their number."""
    began = context.runtime.stopwatch()
    recovered = 0
    while recovered < ORPHANS_MAX:
        known = context.heads.load()
        orphan = _find_orphan(context, known.head)
        if orphan is None:
            break
        try:
            if publish_segment(context, known, orphan) is None:
                recovered += 1
                context.events.emit("catalog.adopted", seq=orphan.seq, write_id=orphan.write_id)
        except OutcomeUnknownError:
            break  # the next recovery sees the outcome
    context.metrics.counter("catalog.recovered_segments").add(recovered)
    context.metrics.histogram("catalog.recovery_seconds").record(began.elapsed_s())
    return recovered


def _find_orphan(context: CatalogContext, head: CatalogHead) -> CatalogSegment | None:
    """Return a segment whose base is the head's last one, and whose writer's lease is over."""
    listed = context.segments.list_segments(head.last_segment_seq, head.last_segment_seq + 1)
    if not listed:
        return None
    now_s = context.store.now()
    leases = find_session_leases(context, now_s)
    alive = {lease.record.id for lease in leases if not lease.expired}
    for each in listed:
        try:
            segment = context.segments.read(each.seq, each.write_id)
        except CorruptionError as error:
            context.events.emit("catalog.damaged_orphan", object=each.key, error=error.message)
            continue
        except NotFoundError:
            continue
        fits = segment.base_write_id == head.write_id and not segment.abandoned
        if fits and segment.lease_id not in alive:
            return segment
    return None
