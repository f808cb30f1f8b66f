"""Collection: the three phases by which what nobody needs goes away.

1. **Compute.** From the head, the leases and the retention, decide what goes, and install that as
   the plan, if there is none.
2. **Apply.** The head must hold a checkpoint that covers all that goes; else the plan is reset.
3. **Delete and reset.** After `not_before`: read the head again, and only then list the leases.
   One that may need something of the plan holds it back. List what the plan means and compare its
   set hash; another sum means that something has come or gone, and the plan is reset, undone.
   Delete, and reset the plan, only when all is deleted.

Why nothing is deleted that somebody needs. A session uses a head that it read after writing its
lease. If the list in phase 3 did not show the lease, it was written later, and so that head is not
older than the one of phase 3, whose checkpoint covers the plan. If the list showed it, its state w
was compared with the plan, and heads never go back behind w. `session_at`, which wants an old
state, reads the plan's document after writing its lease, and is refused if any plan so far gave
that state up; a plan that it did not see was installed later, and phase 3 sees the lease. That a
reset does not forget this matters: the collector that resets need not be the one that deletes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from reef.catalog.checkpoints import FoundCheckpoint
from reef.catalog.gc_plan import GcPlan, KnownPlan, SeqRange, names_hash
from reef.catalog.head import Head, KnownHead
from reef.catalog.leases import FoundLease
from reef.catalog.leftovers import remove_leftovers
from reef.catalog.parts import Parts
from reef.catalog.segments import FoundSegment
from reef.catalog.settings import Retention

__all__ = ["Collected", "apply_plan", "compute_plan", "delete_and_reset", "kept_checkpoints"]


@dataclass(frozen=True, slots=True)
class Collected:
    """What a deletion did."""

    segments: int = 0
    checkpoints: int = 0
    leases: int = 0
    waits: str = ""
    """Why nothing was deleted, if something could have been."""


# --- phase 1 --------------------------------------------------------------------------


def compute_plan(parts: Parts) -> GcPlan | None:
    """Install a plan; None if there is one, if there is nothing to do, or if others were first."""
    with parts.limits.plans.pass_through():
        installed = parts.plans.load()
        if not installed.plan.is_empty:
            return None
        known = parts.heads.load()
        now_s = parts.store.now()
        watermark = watermark_of(known.head, parts.leases.find(now_s))
        checkpoints = parts.checkpoints.found()
        kept = kept_checkpoints(checkpoints, known.head, watermark, now_s, parts.retention)
        floor = min((each.seq for each in checkpoints if each.id in kept), default=0)
        floor = min(floor, watermark, known.head.checkpoint_seq)
        going = [each for each in checkpoints if each.id not in kept]
        segments = parts.segments.found(0, floor) if floor else []
        if not segments and not going:
            return None
        plan = _plan(known, segments, going, now_s + parts.retention.grace_s)
        parts.metrics.counter("catalog.gc_plans").add()
        swapped = parts.plans.swap(installed, plan)
        return None if swapped is None else swapped.plan


def watermark_of(head: Head, leases: Iterable[FoundLease]) -> int:
    """Return the last segment that neither the head nor a living lease needs."""
    held = [lease.checkpoint_seq for lease in leases if not lease.lapsed]
    return min([head.checkpoint_seq, *held])


def kept_checkpoints(
    found: Sequence[FoundCheckpoint],
    head: Head,
    watermark: int,
    now_s: float,
    retention: Retention,
) -> set[str]:
    """Return the ids of those that stay.

    The head's, and any from the watermark on, since unpublished ones may be on their way to the
    head; the newest one not above the watermark; the last N; and those younger than the age.
    """
    ordered = sorted(found, key=lambda each: (each.seq, each.id))
    below = [each for each in ordered if each.seq <= watermark]
    stay = [each for each in ordered if each.seq >= watermark or each.id == head.checkpoint_id]
    stay += below[-1:]
    stay += ordered[-retention.checkpoints_last :]
    stay += [e for e in ordered if now_s - e.last_modified_s < retention.checkpoints_min_age_s]
    return {each.id for each in stay}


def _plan(
    known: KnownHead,
    segments: Sequence[FoundSegment],
    checkpoints: Sequence[FoundCheckpoint],
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
        set_hash=names_hash(names),
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


# --- phase 2 --------------------------------------------------------------------------


def apply_plan(parts: Parts) -> bool:
    """Whether there is a plan that the head allows; one that it does not allow is reset."""
    with parts.limits.plans.pass_through():
        installed = parts.plans.load()
        if installed.plan.is_empty:
            return False
        if _allows(parts.heads.load().head, installed.plan):
            return True
        parts.plans.reset(installed)
        return False


def _allows(head: Head, plan: GcPlan) -> bool:
    return head.checkpoint_seq >= plan.needs and head.checkpoint_id not in plan.delete_checkpoints


# --- phase 3 --------------------------------------------------------------------------


def delete_and_reset(parts: Parts) -> Collected:
    """Delete what the plan says, if its time has come and nobody needs it, and reset it."""
    with parts.limits.plans.pass_through():
        began = parts.runtime.stopwatch()
        installed = parts.plans.load()
        plan = installed.plan
        now_s = parts.store.now()
        if plan.is_empty:
            return _tidied(parts, now_s, Collected())
        if now_s * 1000 < plan.not_before:
            return Collected(waits="the plan's time has not come")
        head = parts.heads.load().head
        if not _allows(head, plan):
            parts.plans.reset(installed)
            return Collected(waits="the head does not cover the plan, which was reset")
        leases = parts.leases.find(now_s)  # only now: after the plan, and after the head
        if watermark_of(head, leases) < plan.needs:
            return Collected(waits="a lease needs what the plan would delete")
        parts.runtime.reach("catalog leases listed")
        done = _delete(parts, installed, leases)
        if done.waits:
            return done
        parts.metrics.histogram("catalog.gc_seconds").record(began.elapsed_s())
        return _tidied(parts, now_s, done)


def _delete(parts: Parts, installed: KnownPlan, leases: list[FoundLease]) -> Collected:
    plan = installed.plan
    segments = [
        found.key
        for each in plan.delete_segments
        for found in parts.segments.found(each.start - 1, each.end)
    ]
    wanted = set(plan.delete_checkpoints)
    checkpoints = [each.key for each in parts.checkpoints.found() if each.id in wanted]
    names = [*segments, *checkpoints]
    if (len(names), names_hash(names)) != (plan.objects, plan.set_hash):
        parts.events.emit("catalog.gc_plan_refused", expected=plan.objects, found=len(names))
        parts.metrics.counter("catalog.gc_refused").add()
        parts.plans.reset(installed)
        return Collected(waits="what is there is not what the plan was made of; it was reset")
    parts.store.delete_many(names)
    parts.runtime.reach("catalog deleted")
    parts.leases.reap(leases)
    parts.plans.reset(installed)
    parts.metrics.counter("catalog.gc_segments").add(len(segments))
    parts.metrics.counter("catalog.gc_checkpoints").add(len(checkpoints))
    lapsed = sum(lease.lapsed for lease in leases)
    parts.metrics.counter("catalog.gc_leases").add(lapsed)
    return Collected(len(segments), len(checkpoints), lapsed)


def _tidied(parts: Parts, now_s: float, done: Collected) -> Collected:
    """Remove superseded heads and plans, where they are numbered, and what deaths left."""
    parts.heads.trim(now_s)
    parts.plans.trim(now_s)
    remove_leftovers(parts)
    return done
