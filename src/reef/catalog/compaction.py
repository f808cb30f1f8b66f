"""Compaction: segments become a checkpoint. And the replacement of an unreadable history.

    compact_once             compact all segments since the last checkpoint
    gc_compute, gc_apply,    the phases of garbage collection, for callers that schedule them
    gc_delete_and_reset
    compact_and_gc           compact, then run each phase that is due
    run_once                 one bounded unit of maintenance: recover orphans, compact if due,
                             run each phase that is due

Commits compact when the chain gets long (`compact_if_due`). Every committer derives the same
threshold from the head, so that exactly one of them compacts; if it fails, a later one does. The
threshold grows with the checkpoint, which bounds the bytes that are rewritten per commit, and stays
within the write ids that a head lists, so that no reader needs a listing. No thread is started.
Compactors may run concurrently; a checkpoint that another one has overtaken is garbage-collected.

`recreate` replaces the state of a catalog whose content can be derived from elsewhere, as the
registry of a bucket can. Nothing is repaired, and nothing is deleted:

1. Load the head, damaged or not; only then compute the new state, so that it is not older.
2. Write it as a checkpoint, with a number above those of all objects and of the head.
3. Swap the head for one that has only this checkpoint. Lost: from step 1.
4. Swap the plan, damaged or not, for an empty one that discards all states before it.

The head is swapped like any other, so a process that loaded the old one loses; its sessions find
that their base is not in the new history. A late write from before has a lower number, and cannot
be published. The objects of the old history are below the new checkpoint, and are
garbage-collected in time.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from reef.catalog.checkpoints import CheckpointMeta, Pair, pair_hash
from reef.catalog.commit import recover_orphans
from reef.catalog.gc import (
    GcPlan,
    GcResult,
    apply_plan,
    compute_plan,
    delete_and_reset,
    discard_before,
    load_plan,
)
from reef.catalog.head import (
    RECENT_MAX,
    RECENT_MIN,
    CatalogHead,
    CheckpointRef,
    Swap,
    Version,
    decode_head,
    with_checkpoint,
)
from reef.catalog.segments import CatalogSegment
from reef.catalog.snapshot import CatalogContext, CatalogSnapshot, apply_records, pin
from reef.errors import ConflictError, CorruptionError, InternalError, ReefError
from reef.formats.segment import SetHash
from reef.stores.wrappers.policies import Backoff
from reef.types import KeyRange

COMPACT_AFTER = 32
"""Segments since the last checkpoint from which on `run_once` compacts."""
REWRITTEN_BYTES = 64 << 10
"""Checkpoint bytes per segment since the last one from which on a commit compacts."""
RETRY_AFTER = 16
"""Segments after which a later commit compacts, if the one that was due failed."""


class CompactionResult(NamedTuple):
    """The checkpoint that the head has after a compaction, and the head's tag."""

    checkpoint_id: str | None
    head_tag: str


@dataclass(frozen=True, slots=True)
class MaintenanceResult:
    """Result of one unit of maintenance."""

    recovered: int
    compacted: bool
    collected: GcResult


class CatalogCompactor:
    """Maintenance of one catalog. Thread-safe."""

    def __init__(self, context: CatalogContext, *, compact_after: int = COMPACT_AFTER) -> None:
        self._context = context
        self._compact_after = compact_after

    # --- compaction ---------------------------------------------------------------
    def compact_once(self) -> CompactionResult:
        """Compact all segments into a checkpoint, and publish it."""
        context = self._context
        began = context.runtime.stopwatch()
        known, lease = pin(context, owner="compactor")
        try:
            snapshot = CatalogSnapshot.of(known)
            if snapshot.last_segment_seq == snapshot.floor:
                return CompactionResult(snapshot.checkpoint_id, snapshot.head_tag)
            ref = self._write_checkpoint(snapshot)
            context.runtime.reach("catalog checkpoint durable")
            lease.renew_if_due()
            result = self._publish(ref)
        finally:
            lease.release()
        context.metrics.counter("catalog.compactions").add()
        context.metrics.histogram("catalog.compaction_seconds").record(began.elapsed_s())
        return result

    def _write_checkpoint(self, snapshot: CatalogSnapshot) -> CheckpointRef:
        context, ref = self._context, snapshot.checkpoint
        before = [] if ref is None else context.checkpoints.scan(ref, KeyRange())
        previous = None if ref is None else context.checkpoints.meta(ref)
        segments = context.view(snapshot).segments()
        pairs, total = fold(before, previous, segments)
        last = segments[-1]
        return _write_state(context, last.seq, last.write_id, pairs, total=total, previous=previous)

    def _publish(self, ref: CheckpointRef) -> CompactionResult:
        """Publish a checkpoint, unless the head has one that is as new."""
        context = self._context
        backoff = Backoff(context.runtime, context.backoff)
        while True:
            with context.limits.commits.pass_through():  # never against a commit of this process
                known = context.heads.load()
                head = known.head
                if head.checkpoint_seq >= ref.seq:
                    return CompactionResult(head.checkpoint_id, known.version.tag)
                swap, after = context.heads.publish(known, with_checkpoint(head, ref))
            if swap is Swap.LANDED:
                return CompactionResult(ref.id, after.version.tag)
            context.metrics.counter("catalog.cas_conflicts").add()
            if not backoff.wait():
                raise ConflictError(
                    f"a checkpoint of transaction {ref.txn_id} lost the head "
                    f"{backoff.attempts} times",
                    hint="Compact again later",
                )

    # --- garbage collection -------------------------------------------------------
    def gc_plan(self) -> GcPlan:
        """Return the installed plan; empty if none is installed."""
        return load_plan(self._context).plan

    def gc_compute(self) -> GcPlan | None:
        """Phase 1: install a plan; None if there is one, or nothing to delete."""
        return compute_plan(self._context)

    def gc_apply(self) -> bool:
        """Phase 2: return whether there is a plan that the head covers."""
        return apply_plan(self._context)

    def gc_delete_and_reset(self) -> GcResult:
        """Phase 3: delete, if the plan is due and no session needs its objects."""
        return delete_and_reset(self._context)

    def compact_and_gc(self) -> CompactionResult:
        """Compact, then run each phase of garbage collection that is due."""
        result = self.compact_once()
        self._collect()
        return result

    def run_once(self) -> MaintenanceResult:
        """Run one bounded unit of maintenance."""
        recovered = recover_orphans(self._context)
        head = self._context.heads.load().head
        is_due = head.last_segment_seq - head.checkpoint_seq >= self._compact_after
        if is_due:
            self.compact_once()
        return MaintenanceResult(recovered, is_due, self._collect())

    def _collect(self) -> GcResult:
        self.gc_compute()
        if not self.gc_apply():
            return GcResult()
        return self.gc_delete_and_reset()


def compact_if_due(context: CatalogContext, seq: int) -> bool:
    """Compact and collect garbage if the commit of segment `seq` made that due.

    The commit has succeeded, so a failure is reported as an event only.
    """
    known = context.heads.last
    if known is None:
        return False
    checkpoint = known.head.checkpoint
    threshold = (checkpoint.bytes if checkpoint else 0) // REWRITTEN_BYTES
    threshold = max(RECENT_MIN, min(threshold, RECENT_MAX))
    above = seq - known.head.checkpoint_seq - threshold
    if above < 0 or above % RETRY_AFTER:
        return False
    try:
        CatalogCompactor(context).compact_and_gc()
    except ReefError as error:
        context.events.emit("catalog.compaction_failed", seq=seq, error=error.message)
    return True


def fold(
    before: list[Pair], previous: CheckpointMeta | None, segments: list[CatalogSegment]
) -> tuple[list[Pair], SetHash]:
    """Apply segments to a state; return its pairs and their set hash, computed in two ways."""
    state = dict(before)
    total = SetHash.parse(previous.set_hash) if previous else SetHash()
    for segment in segments:
        for key, value in segment.records.items():
            if key in state:
                total -= pair_hash([(key, state[key])])
            if value is not None:
                total += pair_hash([(key, value)])
        apply_records(state, segment.records)
    pairs = sorted(state.items())
    if pair_hash(pairs) != total:
        raise InternalError(
            f"the set hash of transaction {segments[-1].txn_id} is {pair_hash(pairs)}, "
            f"expected {total} from the previous checkpoint",
            hint="Nothing was published. Run `reef catalog verify`",
        )
    return pairs, total


def _write_state(
    context: CatalogContext,
    seq: int,
    write_id: str,
    pairs: Sequence[Pair],
    *,
    total: SetHash,
    previous: CheckpointMeta | None = None,
) -> CheckpointRef:
    """Write a checkpoint; its transaction id is the number of its last segment."""
    meta = CheckpointMeta(
        id=f"{seq:020}-{context.runtime.ulid()}",
        txn_id=seq,
        last_segment_seq_at_ckpt=seq,
        write_id=write_id,
        created_at_ms=int(context.runtime.wall_s() * 1000),
        key_count=len(pairs),
        byte_size=sum(len(key) + len(value) for key, value in pairs),
        set_hash=str(total),
        previous_id=previous.id if previous else None,
        previous_set_hash=previous.set_hash if previous else None,
    )
    return context.checkpoints.write(meta, pairs)


# --- recreation ---------------------------------------------------------------------


def recreate(context: CatalogContext, make: Callable[[], Mapping[bytes, bytes]]) -> None:
    """Replace the whole state; ConflictError if other processes keep changing the head."""
    backoff = Backoff(context.runtime, context.backoff)
    while True:
        version = context.heads.register.load()
        head = _first_head(context, make(), _next_seq(context, version))
        context.runtime.reach("catalog recreated")
        if context.heads.replace(version, head) is Swap.LANDED or _has_landed(context, head):
            break
        if not backoff.wait():
            raise ConflictError(
                f"the head of the catalog was changed concurrently {backoff.attempts} times",
                hint="Retry later",
                attempts=backoff.attempts,
            )
    discard_before(context, head.last_segment_seq)


def _first_head(context: CatalogContext, state: Mapping[bytes, bytes], seq: int) -> CatalogHead:
    """Step 2. A head has at most one checkpoint per segment, so that no older head has a higher
    revision than twice the number of segments.
    """
    pairs, write_id = sorted(state.items()), context.runtime.ulid()
    return CatalogHead(
        revision=2 * seq,
        last_segment_seq=seq,
        last_txn_id=seq,
        write_id=write_id,
        recent=(write_id,),
        checkpoint=_write_state(context, seq, write_id, pairs, total=pair_hash(pairs)),
    )


def _next_seq(context: CatalogContext, version: Version) -> int:
    head = _readable_head(version)
    return max(context.newest_seq(), head.last_segment_seq if head else 0) + 1


def _has_landed(context: CatalogContext, head: CatalogHead) -> bool:
    """Whether a swap without a response has landed, also if others have committed since."""
    newest = _readable_head(context.heads.register.load())
    return newest is not None and head.write_id in newest.recent


def _readable_head(version: Version) -> CatalogHead | None:
    with suppress(CorruptionError):
        return None if version.body is None else decode_head(version.body, version.name)
    return None
