"""Committing: protocol section 10, step by step.

1. Write the segment, create-only, under a name with a fresh write id. It names the segment that
   the session read up to.
2. Compare-and-swap the head. Landed: committed.
3. Lost, or no answer: read the head, and follow its chain. The segment is on it: committed, by
   an earlier try or by somebody who found it. The head still ends with the same segment, as
   after a compaction: swap again, the segment still fits.
4. Otherwise others have committed, and this segment never will be: nobody publishes a segment
   onto another base (H21). If none of them touched what the session read or wrote, only its
   owner may rebase: as a new segment, from step 1, a bounded number of times (H25).

Whatever ends between step 1 and a definite answer ends as `OutcomeUnknownError`: the segment is
durable, and somebody may publish it. `resolve` settles it later, by publishing the segment, or by
taking its name away before it arrives.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NoReturn

from reef.catalog.head import Head, KnownHead, with_segment
from reef.catalog.parts import Parts
from reef.catalog.register import Swap
from reef.catalog.segment_format import Segment
from reef.catalog.segments import Chain
from reef.catalog.snapshot import CommitReceipt
from reef.errors import (
    ConflictError,
    CorruptionError,
    Kind,
    NotFoundError,
    OutcomeUnknownError,
    ReefError,
)
from reef.stores import Outcome
from reef.stores.wrappers.retry import Backoff
from reef.types import KeyRange

__all__ = ["Footprint", "commit", "on_chain", "publish_segment", "resolve"]

SWAPS_MAX = 100
"""How often a segment that still fits is sent, before its fate is called unknown."""
RESOLVES_MAX = 5


@dataclass(slots=True)
class Footprint:
    """What a session read and wrote: keys, and ranges with the keys that were not there."""

    keys: set[bytes] = field(default_factory=set)
    ranges: list[KeyRange] = field(default_factory=list)

    def conflict(self, segment: Segment) -> bytes | None:
        """Return a key by which a transaction touched this footprint."""
        for key in segment.records:
            if key in self.keys or any(asked.has(key) for asked in self.ranges):
                return key
        return None


def commit(
    parts: Parts,
    base: KnownHead,
    footprint: Footprint,
    records: Mapping[bytes, bytes | None],
    lease_id: str,
) -> CommitReceipt:
    """Commit records that were staged at `base`; ConflictError if others were in the way."""
    began = parts.runtime.stopwatch()
    with parts.limits.commits.pass_through():
        newest = parts.heads.last
        if newest is not None and newest.head.revision > base.head.revision:
            # This process knows better already: nothing is sent onto an old head.
            base = _rebased(parts, base, newest, footprint)
        segment = _commit_somewhere(parts, base, footprint, records, lease_id)
    parts.metrics.histogram("catalog.commit_seconds").record(began.elapsed_s())
    return _receipt(segment)


def _commit_somewhere(
    parts: Parts,
    base: KnownHead,
    footprint: Footprint,
    records: Mapping[bytes, bytes | None],
    lease_id: str,
) -> Segment:
    backoff = Backoff(parts.runtime, parts.backoff)
    while True:
        segment = _new_segment(parts, base.head, records, lease_id)
        _write_segment(parts, segment)
        parts.runtime.reach("catalog segment durable")
        newest = publish_segment(parts, base, segment)
        if newest is None:
            return segment
        base = _rebased(parts, base, newest, footprint)
        if not backoff.wait():
            raise ConflictError(
                f"lost the head of the catalog {backoff.attempts} times in a row",
                hint="Retry later, or have fewer processes commit at the same time",
                attempts=backoff.attempts,
            )
        newest = parts.heads.load()
        base = _rebased(parts, base, newest, footprint)


def _new_segment(
    parts: Parts, head: Head, records: Mapping[bytes, bytes | None], lease_id: str
) -> Segment:
    return Segment(
        head.last_segment_seq + 1,
        head.last_txn_id + 1,
        parts.runtime.ulid(),
        head.write_id,
        records,
        lease_id,
        int(parts.runtime.wall_s() * 1000),
    )


def _write_segment(parts: Parts, segment: Segment) -> None:
    """Step 1. An error means that nothing was written, and that nothing will be."""
    result, size = parts.segments.create(segment)
    if not result.landed:
        _unknown(segment, result.cause or "the segment's name is taken")
    parts.metrics.histogram("catalog.segment_bytes", unit=1.0).record(size)
    parts.metrics.histogram("catalog.segment_records", unit=1.0).record(len(segment.records))


def publish_segment(parts: Parts, known: KnownHead, segment: Segment) -> KnownHead | None:
    """Steps 2 and 3: None if the segment is on the chain, else the head that is in its way."""
    began = parts.runtime.stopwatch()
    for _ in range(SWAPS_MAX):
        try:
            head = with_segment(known.head, segment, parts.heads.nonce())
            swap, _ = parts.heads.publish(known, head)
            if swap is Swap.LANDED:
                parts.metrics.histogram("catalog.publish_seconds").record(began.elapsed_s())
                return None
            if swap is Swap.LOST:
                parts.metrics.counter("catalog.cas_conflicts").add()
            parts.runtime.reach("catalog head lost")
            known = parts.heads.load()
            there = on_chain(parts, known.head, segment.seq, segment.write_id)
        except ReefError as error:
            _unknown(segment, error)
        if there is None:
            _unknown(segment, "its part of the chain was collected")
        if there:
            return None
        if known.head.write_id != segment.base_write_id:
            return known
    _unknown(segment, f"the head changed {SWAPS_MAX} times by compactions alone")


def on_chain(parts: Parts, head: Head, seq: int, write_id: str) -> bool | None:
    """Whether a segment is in the history of a head; None if that cannot be told any more."""
    if seq > head.last_segment_seq:
        return False
    if seq >= head.recent_from:
        return head.recent[seq - head.recent_from] == write_id
    try:
        chain = parts.segments.chain(Chain(head.last_segment_seq, head.recent), seq - 1)
    except (CorruptionError, NotFoundError):
        return None
    return chain[0].write_id == write_id


def _rebased(parts: Parts, base: KnownHead, newest: KnownHead, footprint: Footprint) -> KnownHead:
    """Step 4: return the newest head if nothing since `base` conflicts."""
    if newest.head.write_id == base.head.write_id:  # a compaction at the most
        return newest if newest.head.revision > base.head.revision else base
    for other in _since(parts, base.head, newest.head):
        key = footprint.conflict(other)
        if key is not None:
            raise ConflictError(
                f"transaction {other.txn_id} changed {key!r}, which this session read or wrote "
                f"at transaction {base.head.last_txn_id}",
                hint="Begin another session, or let transact() do so",
                key=key,
                txn_id=other.txn_id,
            )
    return newest


def _since(parts: Parts, base: Head, newest: Head) -> list[Segment]:
    """Return what was committed between two heads; ConflictError if that cannot be told."""
    try:
        chain = Chain(newest.last_segment_seq, newest.recent)
        others = parts.segments.chain(chain, base.last_segment_seq)
    except NotFoundError as error:
        raise ConflictError(
            f"what was committed after transaction {base.last_txn_id} is collected already",
            kind=Kind.COLLECTED,
            hint="Begin another session; keep long ones alive with start_lease_keeper()",
        ) from error
    if not others or others[0].base_write_id != base.write_id:
        raise ConflictError(
            f"transaction {base.last_txn_id}, at which this session began, is not in the history "
            f"of transaction {newest.last_txn_id}: the catalog was lost, and begun again",
            hint="Begin another session",
        )
    return others


def resolve(parts: Parts, receipt: CommitReceipt) -> bool:
    """Settle a commit whose outcome is unknown: whether it is committed, now and for good.

    If it could still be published, its name is taken, unless it has that already: then it is
    published. A name that was free proves nothing by itself: the segment may have been committed,
    folded and collected meanwhile. So the head is read again, and it alone decides.
    """
    marker = Segment(
        receipt.seq, receipt.txn_id, receipt.write_id, receipt.base_write_id, {}, abandoned=True
    )
    named = False
    for _ in range(RESOLVES_MAX):
        known = parts.heads.load()
        there = on_chain(parts, known.head, receipt.seq, receipt.write_id)
        if there is None:
            _unknown(marker, "its part of the chain was collected")
        if there or named or known.head.write_id != receipt.base_write_id:
            return there
        result, _ = parts.segments.create(marker)
        if result.outcome is Outcome.EXISTS:
            with suppress(NotFoundError):  # collected since: the head tells what became of it
                segment = parts.segments.read(receipt.seq, receipt.write_id)
                return not segment.abandoned and publish_segment(parts, known, segment) is None
        elif result.landed:
            named = True
        else:
            _unknown(marker, result.cause or "no answer")
    _unknown(marker, "the head changes faster than it can be read")


def _receipt(segment: Segment) -> CommitReceipt:
    return CommitReceipt(segment.seq, segment.txn_id, segment.write_id, segment.base_write_id)


def _unknown(segment: Segment, cause: Exception | str) -> NoReturn:
    error = cause if isinstance(cause, Exception) else None
    raise OutcomeUnknownError(
        f"transaction {segment.txn_id} of write id {segment.write_id} may be committed: {cause}",
        hint="Ask Catalog.resolve(error.receipt) before trying again",
        receipt=_receipt(segment),
    ) from error
