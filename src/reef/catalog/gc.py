"""Garbage collection: a shared plan, and the three phases that carry it out.

The plan is one document per catalog, changed by compare-and-swap, so that concurrent collectors
work on one plan. It names segments by ranges of numbers. Its `set_hash` covers the names of all
objects to delete: they are listed again before the deletion, and if the hash differs, the plan is
reset. `retained_from` never decreases, even if a plan is reset: another collector may be deleting.

1. **Compute.** From the head, the leases and the retention, determine the objects to delete, and
   install the plan, if there is none.
2. **Apply.** The head must have a checkpoint that covers all of them; otherwise reset the plan.
3. **Delete and reset.** After `not_before`: load the head again, and only then list the leases. A
   lease that may need an object of the plan delays it. List the plan's objects and compare their
   set hash; if it differs, reset the plan. Delete, and reset the plan when all is deleted.

Why no object is deleted that a session needs. A session uses a head that it loaded after writing
its lease. If the listing of phase 3 did not contain the lease, it was written later, so that head
is not older than the one of phase 3, whose checkpoint covers the plan. If it contained the lease,
its state was compared with the plan, and heads never go back behind it. `session_at`, which reads
an old state, loads the plan after writing its lease, and fails if any plan so far has discarded
that state; a plan that it did not see was installed later, and phase 3 sees the lease. The
collector that resets a plan need not be the one that deletes, so a reset keeps `retained_from`.

On a store that creates by a register, crashes may also leave sources that were never copied, and
records without an object. They are removed when their number is decided: segments up to the head's
checkpoint, heads and plans up to the newest (`reef.stores.two_phase.store`).
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import msgspec

from reef.catalog.checkpoints import ListedCheckpoint, pair_hash
from reef.catalog.head import (
    CatalogHead,
    KnownHead,
    Swap,
    Version,
    decode_document,
    encode_document,
)
from reef.catalog.segments import ListedSegment
from reef.catalog.snapshot import CatalogContext, Retention, SessionLease, find_session_leases
from reef.errors import ConflictError, CorruptionError
from reef.formats.coding import unsupported
from reef.paths import catalog_object
from reef.stores.base import reread_if_damaged
from reef.stores.leases import FoundLease
from reef.stores.two_phase import collect, find_two_phase

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
