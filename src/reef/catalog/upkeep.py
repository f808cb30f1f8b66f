"""Upkeep of a catalog: compaction, garbage collection, replacement of an unreadable history.

    compact_once             compact all segments since the last checkpoint
    gc_compute, gc_apply,    the phases of garbage collection, for callers that schedule them
    gc_delete_and_reset
    compact_and_gc           compact, then run each phase that is due
    run_once                 one bounded unit of maintenance: recover orphans, compact if due,
                             run each phase that is due

**Compaction** turns segments into a checkpoint. Commits compact when the chain gets long
(`compact_if_due`). Every committer derives the same threshold from the head, so that exactly one of
them compacts; if it fails, a later one does. The threshold grows with the checkpoint, which bounds
the bytes that are rewritten per commit, and stays within the write ids that a head lists, so that
no reader needs a listing. No thread is started. Compactors may run concurrently; a checkpoint that
another one has overtaken is garbage-collected.

**Replacement.** `recreate` replaces the state of a catalog whose content can be derived from
elsewhere, as the registry of a bucket can. Nothing is repaired, and nothing is deleted:

1. Load the head, damaged or not; only then compute the new state, so that it is not older.
2. Write it as a checkpoint, with a number above those of all objects and of the head.
3. Swap the head for one that has only this checkpoint. Lost: from step 1.
4. Swap the plan, damaged or not, for an empty one that discards all states before it.

The head is swapped like any other, so a process that loaded the old one loses; its sessions find
that their base is not in the new history. A late write from before has a lower number, and cannot
be published. The objects of the old history are below the new checkpoint, and are
garbage-collected in time.

**Garbage collection** has a shared plan, and three phases that carry it out. The plan is one
document per catalog, changed by compare-and-swap, so that concurrent collectors work on one plan.
It names segments by ranges of numbers. Its `set_hash` covers the names of all objects to delete:
they are listed again before the deletion, and if the hash differs, the plan is reset.
`retained_from` never decreases, even if a plan is reset: another collector may be deleting.

1. **Compute.** From the head, the leases and the retention, determine the objects to delete, and
   install the plan, if there is none.
2. **Apply.** The head must have a checkpoint that covers all of them; otherwise reset the plan.
3. **Delete and reset.** After `not_before`: load the head again, and only then list the leases. A
   lease that may need an object of the plan delays it. List the plan's objects and compare their
   set hash; if it differs, reset the plan. Delete, and reset the plan when all is deleted.

No object is deleted that a session needs, because a session uses a head that it loaded after
writing its lease. If the listing of phase 3 did not contain the lease, it was written later, so
that head is not older than the one of phase 3, whose checkpoint covers the plan. If it contained
the lease, its state was compared with the plan, and heads never go back behind it. `session_at`,
which reads an old state, loads the plan after writing its lease, and fails if any plan so far has
discarded that state; a plan that it did not see was installed later, and phase 3 sees the lease.
The collector that resets a plan need not be the one that deletes, so a reset keeps `retained_from`.

On a store that creates by a register, crashes may also leave sources that were never copied, and
records without an object. They are removed when their number is decided: segments up to the head's
checkpoint, heads and plans up to the newest (`reef.stores.two_phase.store`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec

from reef.catalog.checkpoints import CheckpointMeta, ListedCheckpoint, Pair, pair_hash
from reef.catalog.commit import recover_orphans
from reef.catalog.head import (
    RECENT_MAX,
    RECENT_MIN,
    CatalogHead,
    CheckpointRef,
    KnownHead,
    Swap,
    Version,
    decode_document,
    decode_head,
    encode_document,
    with_checkpoint,
)
from reef.catalog.segments import CatalogSegment, ListedSegment
from reef.catalog.snapshot import (
    CatalogContext,
    CatalogSnapshot,
    Retention,
    SessionLease,
    apply_records,
    find_session_leases,
    pin,
)
from reef.errors import ConflictError, CorruptionError, InternalError, ReefError
from reef.formats.coding import unsupported
from reef.formats.segment import SetHash
from reef.paths import catalog_object
from reef.stores.base import reread_if_damaged
from reef.stores.leases import FoundLease
from reef.stores.two_phase import collect, find_two_phase
from reef.stores.wrappers.policies import Backoff
from reef.types import KeyRange

FORMAT = 1
SWAPS_MAX = 10
LEFTOVER_MIN_AGE_S = 24 * 3600.0

# --- the plan -----------------------------------------------------------------------


class SeqRange(msgspec.Struct, frozen=True):
    """Segments from `start` to `end`, both included."""

    start: int
    end: int


class GcPlan(msgspec.Struct, frozen=True):
    """Objects that one collection deletes; an empty plan deletes none."""

    version: int = FORMAT
    against_head_tag: str = ""
    """The head that it was computed from."""
    not_before: int = 0
    """When deletion may begin: milliseconds by the store's clock."""
    delete_segments: tuple[SeqRange, ...] = ()
    delete_checkpoints: tuple[str, ...] = ()
    make_checkpoints: tuple[str, ...] = ()
    """Checkpoints that the head must have, or have moved past, before the deletion."""
    set_hash: str = ""
    """Set hash of the names of all objects to delete."""
    objects: int = 0
    retained_from: int = 0
    """The largest `needs` of all plans so far: states that begin before it are discarded for good,
    even if their plan was reset."""
    nonce: str = ""

    @property
    def is_empty(self) -> bool:
        return not self.delete_segments and not self.delete_checkpoints

    @property
    def needs(self) -> int:
        """The first segment after which a state may begin without an object of this plan.

        A state whose checkpoint contains segment 10 needs that checkpoint, and no segment up to 10.
        """
        after = [int(each.split("-")[0]) + 1 for each in self.delete_checkpoints]
        return max([*(each.end for each in self.delete_segments), *after], default=0)


@dataclass(frozen=True, slots=True)
class KnownPlan:
    """A plan, and the version of the register that holds it."""

    plan: GcPlan
    version: Version


def load_plan(context: CatalogContext) -> KnownPlan:
    """Load the plan; empty if none is installed."""
    return reread_if_damaged(lambda: _decode_plan(context.plans.load()))


def _decode_plan(version: Version) -> KnownPlan:
    if version.body is None:
        return KnownPlan(GcPlan(), version)
    plan = decode_document(version.body, GcPlan, version.name)
    if plan.version > FORMAT:
        raise unsupported(version.name, "plan of a catalog", plan.version, FORMAT)
    return KnownPlan(plan, version)


def swap_plan(context: CatalogContext, known: KnownPlan, plan: GcPlan) -> GcPlan | None:
    """Replace a plan; None if that lost, or its outcome is unknown."""
    plan = msgspec.structs.replace(
        plan,
        retained_from=max(known.plan.retained_from, plan.needs),
        nonce=context.runtime.ulid(),
    )
    swap, _ = context.plans.swap(known.version, encode_document(plan))
    return plan if swap is Swap.LANDED else None


def discard_before(context: CatalogContext, seq: int) -> None:
    """Empty the plan, even if it is damaged, and discard all states that begin before a segment."""
    for _ in range(SWAPS_MAX):
        version = context.plans.load()
        retained_from = seq
        with suppress(CorruptionError):
            retained_from = max(seq, _decode_plan(version).plan.retained_from)
        plan = GcPlan(retained_from=retained_from, nonce=context.runtime.ulid())
        if context.plans.swap(version, encode_document(plan))[0] is Swap.LANDED:
            return
    raise ConflictError(
        f"the garbage-collection plan of the catalog was changed concurrently {SWAPS_MAX} times",
        hint="Retry later",
    )


# --- phase 1 ------------------------------------------------------------------------


def compute_plan(context: CatalogContext) -> GcPlan | None:
    """Install a plan; None if one is installed, or nothing can be deleted."""
    with context.limits.plans.pass_through():
        installed = load_plan(context)
        if not installed.plan.is_empty:
            return None
        known = context.heads.load()
        now_s = context.store.now()
        watermark = watermark_of(known.head, find_session_leases(context, now_s))
        listed = context.checkpoints.list_checkpoints()
        retained = retained_checkpoints(listed, known.head, watermark, now_s, context.retention)
        floor = min((each.seq for each in listed if each.id in retained), default=0)
        floor = min(floor, watermark, known.head.checkpoint_seq)
        checkpoints = [each for each in listed if each.id not in retained]
        segments = context.segments.list_segments(0, floor) if floor else []
        if not segments and not checkpoints:
            return None
        plan = _plan(known, segments, checkpoints, now_s + context.retention.grace_s)
        context.metrics.counter("catalog.gc_plans").add()
        return swap_plan(context, installed, plan)


def watermark_of(head: CatalogHead, leases: Iterable[FoundLease[SessionLease]]) -> int:
    """Return the last segment that neither the head nor a live lease needs."""
    held = [lease.record.checkpoint_seq for lease in leases if not lease.expired]
    return min([head.checkpoint_seq, *held])


def retained_checkpoints(
    listed: Sequence[ListedCheckpoint],
    head: CatalogHead,
    watermark: int,
    now_s: float,
    retention: Retention,
) -> set[str]:
    """Return the ids of checkpoints that are retained.

    The head's, and all from the watermark on, since they may be about to be published; the newest
    one not above the watermark; the last ones; and those below the minimum age.
    """
    ordered = sorted(listed, key=lambda each: (each.seq, each.id))
    below = [each for each in ordered if each.seq <= watermark]
    kept = [each for each in ordered if each.seq >= watermark or each.id == head.checkpoint_id]
    kept += below[-1:]
    kept += ordered[-retention.checkpoints_last :]
    kept += [e for e in ordered if now_s - e.last_modified_s < retention.checkpoints_min_age_s]
    return {each.id for each in kept}


def _plan(
    known: KnownHead,
    segments: Sequence[ListedSegment],
    checkpoints: Sequence[ListedCheckpoint],
    not_before_s: float,
) -> GcPlan:
    head = known.head
    names = [*(each.key for each in segments), *(each.key for each in checkpoints)]
    return GcPlan(
        against_head_tag=known.version.tag,
        not_before=int(not_before_s * 1000),
        delete_segments=_ranges(each.seq for each in segments),
        delete_checkpoints=tuple(each.id for each in checkpoints),
        make_checkpoints=(head.checkpoint_id,) if head.checkpoint_id else (),
        set_hash=_names_hash(names),
        objects=len(names),
    )


def _ranges(numbers: Iterable[int]) -> tuple[SeqRange, ...]:
    """Return sorted numbers as ranges without gaps."""
    ranges: list[SeqRange] = []
    for number in numbers:
        if ranges and number <= ranges[-1].end + 1:
            ranges[-1] = SeqRange(ranges[-1].start, number)
        else:
            ranges.append(SeqRange(number, number))
    return tuple(ranges)


def _names_hash(keys: Iterable[str]) -> str:
    return str(pair_hash((key.encode(), b"") for key in keys))


# --- phase 2 ------------------------------------------------------------------------


def apply_plan(context: CatalogContext) -> bool:
    """Return whether there is a plan that the head covers; one that it does not cover is reset."""
    with context.limits.plans.pass_through():
        installed = load_plan(context)
        if installed.plan.is_empty:
            return False
        if _covers(context.heads.load().head, installed.plan):
            return True
        swap_plan(context, installed, GcPlan())
        return False


def _covers(head: CatalogHead, plan: GcPlan) -> bool:
    return head.checkpoint_seq >= plan.needs and head.checkpoint_id not in plan.delete_checkpoints


# --- phase 3 ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GcResult:
    """Objects that were deleted."""

    segments: int = 0
    checkpoints: int = 0
    leases: int = 0
    waits: str = ""
    """Why nothing was deleted, if there is a plan."""


def delete_and_reset(context: CatalogContext) -> GcResult:
    """Delete the objects of the plan, if it is due and no session needs them, and reset it."""
    with context.limits.plans.pass_through():
        began = context.runtime.stopwatch()
        installed = load_plan(context)
        plan = installed.plan
        now_s = context.store.now()
        if plan.is_empty:
            _trim(context, now_s)
            return GcResult()
        if now_s * 1000 < plan.not_before:
            return GcResult(waits="the plan is not due yet")
        head = context.heads.load().head
        if not _covers(head, plan):
            swap_plan(context, installed, GcPlan())
            return GcResult(waits="the head does not cover the plan, which was reset")
        leases = find_session_leases(context, now_s)  # only now: after the plan, and after the head
        if watermark_of(head, leases) < plan.needs:
            return GcResult(waits="a lease needs an object of the plan")
        context.runtime.reach("catalog leases listed")
        result = _delete(context, installed, leases)
        if not result.waits:
            context.metrics.histogram("catalog.gc_seconds").record(began.elapsed_s())
            _trim(context, now_s)
        return result


def _delete(
    context: CatalogContext, installed: KnownPlan, leases: list[FoundLease[SessionLease]]
) -> GcResult:
    plan = installed.plan
    segments = [
        listed.key
        for each in plan.delete_segments
        for listed in context.segments.list_segments(each.start - 1, each.end)
    ]
    ids = set(plan.delete_checkpoints)
    checkpoints = [each.key for each in context.checkpoints.list_checkpoints() if each.id in ids]
    names = [*segments, *checkpoints]
    if (len(names), _names_hash(names)) != (plan.objects, plan.set_hash):
        context.events.emit("catalog.gc_plan_refused", expected=plan.objects, found=len(names))
        context.metrics.counter("catalog.gc_refused").add()
        swap_plan(context, installed, GcPlan())
        return GcResult(waits="the objects are not those of the plan, which was reset")
    context.store.delete_many(names)
    context.runtime.reach("catalog deleted")
    context.store.delete_many([lease.key for lease in leases if lease.expired])
    swap_plan(context, installed, GcPlan())
    expired = sum(lease.expired for lease in leases)
    context.metrics.counter("catalog.gc_segments").add(len(segments))
    context.metrics.counter("catalog.gc_checkpoints").add(len(checkpoints))
    context.metrics.counter("catalog.gc_leases").add(expired)
    return GcResult(len(segments), len(checkpoints), expired)


def _trim(context: CatalogContext, now_s: float) -> None:
    """Remove superseded heads and plans, where they are numbered, and leftovers of crashes."""
    context.heads.register.trim(now_s)
    context.plans.trim(now_s)
    remove_leftovers(context)


def remove_leftovers(context: CatalogContext) -> int:
    """Remove old sources and records of two-phase creates; return their number."""
    if find_two_phase(context.store) is None:
        return 0
    known = context.heads.load()
    plan = load_plan(context)
    names = context.names
    decided = {
        names.segments: known.head.checkpoint_seq,
        names.heads: int(known.version.tag or 0),
        names.plans: int(plan.version.tag or 0),
    }
    removed = [
        collect(
            context.store,
            prefix,
            is_below=partial(_is_at_most, last=last),
            older_than_s=LEFTOVER_MIN_AGE_S,
            apply=True,
        )
        for prefix, last in decided.items()
    ]
    return sum(len(one.temporaries) + len(one.records) for one in removed)


def _is_at_most(key: str, last: int) -> bool:
    return _number_of(key) <= last


def _number_of(key: str) -> int:
    """Return the number in a name; a number above all others for a foreign name."""
    named = catalog_object(key)
    if named is not None:
        return named[0]
    last = key.rsplit("/", 1)[-1]
    return int(last) if last.isdigit() else 1 << 64


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
