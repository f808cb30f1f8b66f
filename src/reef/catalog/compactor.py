"""The compactor: folds segments into checkpoints, and has what is left over collected.

    compact_once             segments since the last checkpoint become a new one
    gc_compute, gc_apply,    the phases of collection, one by one, for whoever wants to
    gc_delete_and_reset      schedule them
    compact_and_gc           a compaction, and each phase that is due
    run_once                 one bounded unit of upkeep: orphans, a compaction if it is worth one,
                             each phase that is due

No thread is started: the host decides when. Any number of compactors may work at once; a
checkpoint that lost its place to a newer one is collected like any other.
"""

from dataclasses import dataclass
from typing import NamedTuple

from reef.catalog.checkpoint_format import CheckpointMeta, Pair, pair_hash
from reef.catalog.collection import Collected, apply_plan, compute_plan, delete_and_reset
from reef.catalog.gc_plan import GcPlan
from reef.catalog.head import CheckpointRef, with_checkpoint
from reef.catalog.parts import Parts
from reef.catalog.pinning import pin
from reef.catalog.recovery import recover_orphans
from reef.catalog.register import Swap
from reef.catalog.segment_format import Segment
from reef.catalog.snapshot import Snapshot
from reef.catalog.view import laid_over
from reef.errors import ConflictError, InternalError
from reef.formats.set_hash import SetHash
from reef.stores.wrappers.retry import Backoff
from reef.types import KeyRange

__all__ = ["COMPACT_AFTER", "Compacted", "Compactor", "Upkeep"]

COMPACT_AFTER = 32
"""Segments since the last checkpoint that make a compaction worth its while."""
ALL = KeyRange()


class Compacted(NamedTuple):
    """What `compact_once` returns: the checkpoint that the head has now, and the head's tag."""

    checkpoint_id: str | None
    head_tag: str


@dataclass(frozen=True, slots=True)
class Upkeep:
    """What one unit of upkeep did."""

    recovered: int
    compacted: bool
    collected: Collected


class Compactor:
    """Upkeep of one catalog. Safe for threads."""

    def __init__(self, parts: Parts, *, compact_after: int = COMPACT_AFTER) -> None:
        self._parts = parts
        self._compact_after = compact_after

    # --- compaction ---------------------------------------------------------------
    def compact_once(self) -> Compacted:
        """Fold everything up to now into a checkpoint, and publish it."""
        parts = self._parts
        began = parts.runtime.stopwatch()
        known, lease = pin(parts, owner="compactor")
        try:
            snapshot = Snapshot.of(known)
            if snapshot.last_segment_seq == snapshot.floor:
                return Compacted(snapshot.checkpoint_id, snapshot.head_tag)
            ref = self._write_checkpoint(snapshot)
            parts.runtime.reach("catalog checkpoint durable")
            lease.renew_if_due()
            done = self._publish(ref)
        finally:
            lease.release()
        parts.metrics.counter("catalog.compactions").add()
        parts.metrics.histogram("catalog.compaction_seconds").record(began.elapsed_s())
        return done

    def _write_checkpoint(self, snapshot: Snapshot) -> CheckpointRef:
        parts = self._parts
        view = parts.view(snapshot)
        before, previous = self._before(snapshot)
        segments = view.segments()
        pairs, total = folded(before, previous, segments)
        meta = CheckpointMeta(
            id=f"{snapshot.last_segment_seq:020}-{parts.runtime.ulid()}",
            txn_id=snapshot.txn_id,
            last_segment_seq_at_ckpt=snapshot.last_segment_seq,
            write_id=segments[-1].write_id,
            created_at_ms=int(parts.runtime.wall_s() * 1000),
            key_count=len(pairs),
            byte_size=sum(len(key) + len(value) for key, value in pairs),
            set_hash=str(total),
            previous_id=previous.id if previous else None,
            previous_set_hash=previous.set_hash if previous else None,
        )
        return parts.checkpoints.write(meta, pairs)

    def _before(self, snapshot: Snapshot) -> tuple[list[Pair], CheckpointMeta | None]:
        ref = snapshot.checkpoint
        if ref is None:
            return [], None
        return self._parts.checkpoints.scan(ref, ALL), self._parts.checkpoints.meta(ref)

    def _publish(self, ref: CheckpointRef) -> Compacted:
        """Put the checkpoint into the head, unless that has one as new."""
        parts = self._parts
        backoff = Backoff(parts.runtime, parts.backoff)
        while True:
            known = parts.heads.load()
            head = known.head
            if head.checkpoint_seq >= ref.seq:
                return Compacted(head.checkpoint_id, known.version.tag)
            swap, after = parts.heads.publish(
                known, with_checkpoint(head, ref, parts.heads.nonce())
            )
            if swap is Swap.LANDED:
                return Compacted(ref.id, after.version.tag)
            parts.metrics.counter("catalog.cas_conflicts").add()
            if not backoff.wait():
                raise ConflictError(
                    f"a checkpoint of transaction {ref.txn_id} lost the head "
                    f"{backoff.attempts} times",
                    hint="Compact again later",
                )

    # --- collection ---------------------------------------------------------------
    def gc_plan(self) -> GcPlan:
        """Return the plan that is installed; an empty one if there is none."""
        return self._parts.plans.load().plan

    def gc_compute(self) -> GcPlan | None:
        """Phase 1: install a plan; None if there is one, or nothing to do."""
        return compute_plan(self._parts)

    def gc_apply(self) -> bool:
        """Phase 2: whether there is a plan that the head allows."""
        return apply_plan(self._parts)

    def gc_delete_and_reset(self) -> Collected:
        """Phase 3: delete, if the time has come and nobody needs it."""
        return delete_and_reset(self._parts)

    def compact_and_gc(self) -> Compacted:
        """Compact, then do each phase of collection that is due."""
        done = self.compact_once()
        self._collect()
        return done

    def run_once(self) -> Upkeep:
        """Do one bounded unit of upkeep."""
        recovered = recover_orphans(self._parts)
        head = self._parts.heads.load().head
        worth = head.last_segment_seq - head.checkpoint_seq >= self._compact_after
        if worth:
            self.compact_once()
        return Upkeep(recovered, worth, self._collect())

    def _collect(self) -> Collected:
        self.gc_compute()
        if not self.gc_apply():
            return Collected()
        return self.gc_delete_and_reset()


def folded(
    before: list[Pair], previous: CheckpointMeta | None, segments: list[Segment]
) -> tuple[list[Pair], SetHash]:
    """Return the state after some segments, and its set hash, reached in two ways that agree."""
    state = dict(before)
    total = SetHash.parse(previous.set_hash) if previous else SetHash()
    for segment in segments:
        for key, value in segment.records.items():
            if key in state:
                total -= pair_hash([(key, state[key])])
            if value is not None:
                total += pair_hash([(key, value)])
        laid_over(state, segment.records, ALL)
    pairs = sorted(state.items())
    if pair_hash(pairs) != total:
        raise InternalError(
            f"the state of transaction {segments[-1].txn_id} sums up to {pair_hash(pairs)}, "
            f"carried on it is {total}",
            hint="Nothing was published. Run `reef catalog verify`",
        )
    return pairs, total
