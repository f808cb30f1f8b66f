"""Edits: what one publish changes. Pure functions from a manifest to the next one's content."""

from dataclasses import dataclass, field

import msgspec

from reef.formats.manifest import Condemned, DedupEntry, Manifest, OpenJob, SegmentEntry
from reef.formats.schema import Schema
from reef.formats.set_hash import EMPTY, SetHash
from reef.formats.streams import Lineage
from reef.manifest import sums
from reef.manifest.dropping import clear_dropped, use
from reef.manifest.invariants import refuse_condemned
from reef.manifest.levels import at_their_level
from reef.manifest.roots import effective_grace_ms
from reef.manifest.streams import join_lineages, moved_on

__all__ = [
    "Compacted",
    "Condemnation",
    "FoldResult",
    "compact",
    "condemn",
    "fold",
    "forget_condemned",
    "grow_schema",
    "lower_parallel_writes",
    "new_namespace",
    "raise_compactor_epoch",
    "raise_writer_epoch",
    "release_compactor",
    "set_grace",
]


def new_namespace(schema: Schema, max_parallel_writes: int = 1, made_for: str = "") -> Manifest:
    """Return the first manifest of a namespace; the publisher stamps it."""
    return Manifest(
        generation=1,
        write_id="",
        published_at_ms=0,
        schemas=(schema,),
        max_parallel_writes=max_parallel_writes,
        made_for=made_for,
    )


def grow_schema(manifest: Manifest, grown: Schema) -> Manifest | None:
    """Add the next version of the schema; None if it is the same, in a namespace that stays."""
    if grown.id == manifest.schema.id:
        return use(manifest)
    return msgspec.structs.replace(manifest, schemas=(*manifest.schemas, grown))


def raise_writer_epoch(manifest: Manifest, max_parallel_writes: int) -> Manifest:
    """Take the writer role. Parallel writes may rise here, and fall only later (H56)."""
    return msgspec.structs.replace(
        manifest,
        writer_epoch=manifest.writer_epoch + 1,
        max_parallel_writes=max(manifest.max_parallel_writes, max_parallel_writes),
    )


def lower_parallel_writes(manifest: Manifest, epoch: int, wanted: int) -> Manifest | None:
    """Lower the number of PUTs in flight, if the writer that fenced with the old one still is."""
    if manifest.writer_epoch != epoch or manifest.max_parallel_writes <= wanted:
        return None
    return msgspec.structs.replace(manifest, max_parallel_writes=wanted)


@dataclass(frozen=True, slots=True)
class FoldResult:
    """What a fold of [floor, end) found and wrote."""

    floor: int
    end: int
    segments: tuple[SegmentEntry, ...]
    dedup: tuple[DedupEntry, ...]
    open_jobs: tuple[OpenJob, ...]
    below_floor: tuple[str, ...]
    marks: dict[str, int] = field(default_factory=dict)
    lineages: dict[str, Lineage] = field(default_factory=dict)


def fold(manifest: Manifest, result: FoldResult) -> Manifest | None:
    """Make a fold's segments visible and move the floor; None if another fold was first."""
    if manifest.wal_floor != result.floor:
        return None
    refuse_condemned(manifest, [segment.id for segment in result.segments])
    marks = moved_on(manifest.stream_marks, result.marks)
    return msgspec.structs.replace(
        manifest,
        segments=(*at_their_level(result.segments, manifest.segments), *manifest.segments),
        wal_floor=result.end,
        wal_id_last_seen=max(manifest.wal_id_last_seen, result.end - 1),
        dedup=result.dedup,
        stream_marks=marks,
        stream_lineages=join_lineages(marks, manifest.stream_lineages, result.lineages),
        open_jobs=result.open_jobs,
        below_floor=result.below_floor,
        sums=sums.added(manifest, result.segments),
    )


# --- compaction -----------------------------------------------------------------------


def raise_compactor_epoch(manifest: Manifest) -> Manifest:
    """Take the compactor role: whatever an older one publishes from now on is refused.

    Its job's name goes into the manifest in the same step: what it stages is kept for it from
    the first byte on (H28), and what the older one has staged is not kept any longer.
    """
    epoch = manifest.compactor_epoch + 1
    return msgspec.structs.replace(
        manifest, compactor_epoch=epoch, compactor_job=f"compact-{epoch}"
    )


def release_compactor(manifest: Manifest, epoch: int) -> Manifest | None:
    """Give the role up: nothing is staged any more. None if another one has it."""
    if manifest.compactor_epoch != epoch or not manifest.compactor_job:
        return None
    return msgspec.structs.replace(manifest, compactor_job="")


@dataclass(frozen=True, slots=True)
class Compacted:
    """What a compaction read and wrote."""

    epoch: int
    inputs: tuple[str, ...]
    outputs: tuple[SegmentEntry, ...]
    """An input among them was moved to another level as it is."""
    oldest_lsn: int
    """Nothing older than this may have come in since the plan: what was dropped would have
    hidden it. Folds bring in what is newer; `live_wins` loads what is as old as their begin."""
    known: frozenset[str] = frozenset()
    """The segments that the plan has seen."""
    dropped: SetHash = EMPTY
    made: SetHash = EMPTY
    dropped_lsn: int = 0
    dropped_expired_ms: int = 0


def compact(manifest: Manifest, done: Compacted) -> Manifest | None:
    """Put outputs in the place of inputs; None if the job was overtaken (H35).

    By another compactor, by someone who took an input out, or by a segment that came in with
    rows as old as those that the job took for all there are.
    """
    inputs = set(done.inputs)
    live = {segment.id for segment in manifest.segments}
    if manifest.compactor_epoch != done.epoch or not inputs <= live:
        return None
    came = [s for s in manifest.segments if s.id not in done.known]
    if any(segment.lsn_min < done.oldest_lsn for segment in came):
        return None
    new = [segment.id for segment in done.outputs if segment.id not in inputs]
    refuse_condemned(manifest, new)
    return msgspec.structs.replace(
        manifest,
        segments=(*(s for s in manifest.segments if s.id not in inputs), *done.outputs),
        sums=sums.compacted(manifest, done.dropped, done.made),
        dropped_lsn=max(manifest.dropped_lsn, done.dropped_lsn),
        dropped_expired_ms=max(manifest.dropped_expired_ms, done.dropped_expired_ms),
    )


@dataclass(frozen=True, slots=True)
class Condemnation:
    """What a sweep found that nobody needs, as of one generation."""

    generation: int
    """Of the head that it was planned on."""
    oldest_retained: int
    keys: tuple[str, ...]
    """Relative to the namespace."""
    since_ms: int
    """By the store's clock."""
    expired: frozenset[str] = frozenset()
    """Snapshots that were not looked upon as roots: they go with what they held."""
    clears: bool = False
    """Whether it was planned as if the dropped namespace were cleared: it is, with this."""


def condemn(manifest: Manifest, found: Condemnation) -> Manifest | None:
    """Condemn keys; None if this is not the head on which the sweep was planned (H32).

    No generation from the oldest retained on names them, and none will: from this publish on,
    an edit that names one is refused. So a lease on such a generation does not hold them.
    """
    if manifest.generation != found.generation:
        return None
    if found.clears:
        manifest = clear_dropped(manifest)
    known = {condemned.key for condemned in manifest.condemned}
    new = [key for key in found.keys if key not in known]
    return msgspec.structs.replace(
        manifest,
        oldest_retained=found.oldest_retained,
        snapshots=tuple(s for s in manifest.snapshots if s.id not in found.expired),
        condemned=(
            *manifest.condemned,
            *(Condemned(key, found.oldest_retained, found.since_ms) for key in new),
        ),
    )


def forget_condemned(manifest: Manifest, deleted: frozenset[str]) -> Manifest | None:
    """Drop keys whose objects are deleted; None if another sweep has."""
    left = tuple(c for c in manifest.condemned if c.key not in deleted)
    if len(left) == len(manifest.condemned):
        return None
    return msgspec.structs.replace(manifest, condemned=left)


def set_grace(manifest: Manifest, grace_ms: int, now_ms: int) -> Manifest | None:
    """Change the grace period; a lower one takes effect one old grace later (H62)."""
    if grace_ms == manifest.grace_ms:
        return None
    before_ms = effective_grace_ms(manifest, now_ms)
    if grace_ms >= before_ms:
        return msgspec.structs.replace(
            manifest, grace_ms=grace_ms, grace_before_ms=0, grace_lowered_at_ms=0
        )
    return msgspec.structs.replace(
        manifest, grace_ms=grace_ms, grace_before_ms=before_ms, grace_lowered_at_ms=now_ms
    )
