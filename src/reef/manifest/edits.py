"""Edits: pure functions from a manifest to the content of the next one. Each is one publish.

The writer role, folds, compactions, the sweep, settings, snapshots, cursors and search indexes are
here; drops are in `lifecycle`, repairs in `repairs`.

**Levels** order segments for compaction only: no read depends on a level, since every version
carries its LSN. The deeper a segment, the less often it is merged. A load that is sorted and
overlaps no other segment needs no compaction, so its segments go to the bottom level as soon as
they are folded.

**Snapshots and cursors** are long-lived pins. A snapshot pins a generation; a cursor pins the log
from its position on. Both need an *active* generation: one that is retained or pinned already, and
names no condemned object. The edit checks that on the head that it is applied to, so a sweep comes
either before it, and the edit is rejected, or after it, and sees the pin.

A snapshot stops pinning when it expires, by the store's clock (H30). Its entry is removed by the
next edit here, or by the sweep that deletes its objects; so an entry that is present is complete.

**Search indexes**: the manifest names the indexes that segments get from then on. Segments say
themselves which ones they have, so neither adding nor dropping one touches a segment: a search uses
the index of a segment if it serves the manifest's, and reads its rows otherwise.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from reef.errors import ConflictError, ErrorKind, NotFoundError
from reef.formats.manifest import (
    Condemned,
    CondemnedRange,
    CursorEntry,
    DedupEntry,
    IndexSpec,
    Lineage,
    Manifest,
    OpenJob,
    SegmentEntry,
    SnapshotEntry,
    newest_indexes,
)
from reef.formats.schema import Schema
from reef.formats.segment import EMPTY, Footer, SetHash
from reef.manifest import invariants as sums
from reef.manifest.dedup import advance_marks, join_lineages
from reef.manifest.invariants import refuse_condemned, refuse_condemned_keys
from reef.manifest.lifecycle import clear_dropped, use
from reef.manifest.roots import expired_snapshots, pinned_generations
from reef.paths import centroids_name, numbered_key

NEVER = 2**63 - 1
"""An LSN above all others."""


def hold_lsn_of(open_jobs: Iterable[OpenJob]) -> int:
    """Return the LSN above which nothing is dropped or resolved: the first begin of an open load
    with `live_wins`, whose rows will sort there (H50, H60)."""
    return min((job.begin_lsn for job in open_jobs if job.live_wins), default=NEVER)


def at_their_level(
    folded: Sequence[SegmentEntry], known: Sequence[SegmentEntry]
) -> tuple[SegmentEntry, ...]:
    """Return a fold's segments, with those of loads that overlap nothing at the bottom level."""
    loaded = {s.id for s in folded if s.visible_lsn and is_plain(s)}
    if not loaded:
        return tuple(folded)
    bottom = max([1, *(segment.level for segment in known)])
    groups = overlapping_groups([*folded, *known])
    alone = loaded & {group[0].id for group in groups if len(group) == 1}
    return tuple(replace_level(s, bottom) if s.id in alone else s for s in folded)


def replace_level(segment: SegmentEntry, level: int) -> SegmentEntry:
    """Return the entry of the same object in another level."""
    return msgspec.structs.replace(segment, level=level)


def is_plain(segment: SegmentEntry) -> bool:
    """Whether merging it alone would change nothing: it has no deletes and no patches."""
    return not segment.tombstones and not segment.patches


def by_key(segment: SegmentEntry) -> tuple[bytes, bytes, str]:
    """Sort key: by first key, then last key."""
    return segment.min_key, segment.max_key, segment.id


def overlapping_groups(segments: Iterable[SegmentEntry]) -> list[list[SegmentEntry]]:
    """Return the segments in groups whose key ranges overlap.

    If a range tombstone was split, one segment ends with the key with which the next begins.
    That alone is no overlap; otherwise neighbours would be merged for ever.
    """
    groups: list[list[SegmentEntry]] = []
    last: SegmentEntry | None = None
    for segment in sorted(segments, key=by_key):
        if last is not None and _reaches(last, segment.min_key):
            groups[-1].append(segment)
        else:
            groups.append([segment])
        if last is None or segment.max_key >= last.max_key:
            last = segment
    return groups


def _reaches(segment: SegmentEntry, key: bytes) -> bool:
    """Whether a segment that begins at or before a key may have it."""
    if segment.tombstones:
        return key < segment.max_key
    return key <= segment.max_key


def new_namespace(
    schema: Schema,
    max_parallel_writes: int = 1,
    made_for: str = "",
    indexes: tuple[IndexSpec, ...] = (),
) -> Manifest:
    """Return the first manifest of a namespace; the publisher stamps it."""
    return Manifest(
        generation=1,
        write_id="",
        published_at_ms=0,
        schemas=(schema,),
        max_parallel_writes=max_parallel_writes,
        made_for=made_for,
        indexes=indexes,
    )


def grow_schema(manifest: Manifest, grown: Schema) -> Manifest | None:
    """Add the next version of the schema; None if it is the same and no load is pending."""
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


def lower_parallel_writes(manifest: Manifest, epoch: int, lower: int) -> Manifest | None:
    """Lower the number of PUTs in flight; only for the writer that has fenced with the old one."""
    if manifest.writer_epoch != epoch or manifest.max_parallel_writes <= lower:
        return None
    return msgspec.structs.replace(manifest, max_parallel_writes=lower)


@dataclass(frozen=True, slots=True)
class FoldResult:
    """The state of the log at the end of a fold of [floor, end), and the segments it wrote."""

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
    marks = advance_marks(manifest.stream_marks, result.marks)
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
    """Take the compactor role: publishes of an older compactor are rejected from now on.

    The same step stores the name of its job: segments that it stages are roots from the first
    byte on (H28), and those that the older one has staged are not any longer.
    """
    epoch = manifest.compactor_epoch + 1
    return msgspec.structs.replace(
        manifest, compactor_epoch=epoch, compactor_job=f"compact-{epoch}"
    )


def release_compactor(manifest: Manifest, epoch: int) -> Manifest | None:
    """Release the role; None if another compactor has it."""
    if manifest.compactor_epoch != epoch or not manifest.compactor_job:
        return None
    return msgspec.structs.replace(manifest, compactor_job="")


@dataclass(frozen=True, slots=True)
class CompactedSegments:
    """The inputs and outputs of a compaction."""

    epoch: int
    inputs: tuple[str, ...]
    outputs: tuple[SegmentEntry, ...]
    """An input among them is moved to another level unchanged."""
    oldest_lsn: int
    """No segment with older rows may have been added since the plan: the dropped tombstones would
    have hidden them. Folds add newer rows; `live_wins` loads add rows as old as their begin."""
    known: frozenset[str] = frozenset()
    """All segments at the time of the plan."""
    dropped: SetHash = EMPTY
    made: SetHash = EMPTY
    dropped_lsn: int = 0
    dropped_expired_ms: int = 0


def compact(manifest: Manifest, done: CompactedSegments) -> Manifest | None:
    """Replace inputs by outputs; None if the job was overtaken (H35).

    That is by another compactor, by an edit that removed an input, or by a new segment with rows
    older than the job has assumed.
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
    late = [s.visible_lsn for s in manifest.segments if s.id in inputs and s.is_late]
    return msgspec.structs.replace(
        manifest,
        segments=(*(s for s in manifest.segments if s.id not in inputs), *done.outputs),
        sums=sums.compacted(manifest, done.dropped, done.made),
        dropped_lsn=max([manifest.dropped_lsn, done.dropped_lsn, *late]),
        dropped_expired_ms=max(manifest.dropped_expired_ms, done.dropped_expired_ms),
    )


@dataclass(frozen=True, slots=True)
class Condemnation:
    """The objects that no root needs, as of one generation."""

    generation: int
    """Generation of the head that it was planned on."""
    oldest_retained: int
    keys: tuple[str, ...]
    """Keys of segments, relative to the namespace."""
    since_ms: int
    """By the store's clock."""
    expired: frozenset[str] = frozenset()
    """Snapshots that were not counted as roots: they are removed in the same step."""
    clears: bool = False
    """Whether the same step clears the dropped namespace."""
    ranges: tuple[tuple[str, int, int], ...] = ()
    """Ranges of slots and manifests: folder, first and last number."""


def condemn(manifest: Manifest, condemnation: Condemnation) -> Manifest | None:
    """Condemn keys; None if this is not the head on which the sweep was planned (H32).

    No generation from the oldest retained on names them, and none will: from this publish on,
    an edit that names one is refused. So a lease on such a generation does not hold them.
    """
    if manifest.generation != condemnation.generation:
        return None
    if condemnation.clears:
        manifest = clear_dropped(manifest)
    known = {condemned.key for condemned in manifest.condemned}
    new = [key for key in condemnation.keys if key not in known]
    dates = condemnation.oldest_retained, condemnation.since_ms
    ranges = [CondemnedRange(*numbers, *dates) for numbers in condemnation.ranges]
    return msgspec.structs.replace(
        manifest,
        oldest_retained=condemnation.oldest_retained,
        snapshots=tuple(s for s in manifest.snapshots if s.id not in condemnation.expired),
        condemned=(
            *manifest.condemned,
            *(Condemned(key, *dates) for key in new),
        ),
        condemned_ranges=(
            *manifest.condemned_ranges,
            *remove_ranges(ranges, manifest.condemned_ranges),
        ),
    )


def forget_condemned(
    manifest: Manifest, deleted: frozenset[str], ranges: Sequence[CondemnedRange] = ()
) -> Manifest | None:
    """Drop keys and ranges whose objects are deleted; None if another sweep has."""
    left = tuple(c for c in manifest.condemned if c.key not in deleted)
    ranges_left = tuple(remove_ranges(manifest.condemned_ranges, ranges))
    if (left, ranges_left) == (manifest.condemned, manifest.condemned_ranges):
        return None
    return msgspec.structs.replace(manifest, condemned=left, condemned_ranges=ranges_left)


def remove_ranges(
    ranges: Iterable[CondemnedRange], removed: Iterable[CondemnedRange]
) -> list[CondemnedRange]:
    """Return the parts of ranges that no removed range covers."""
    left = list(ranges)
    for hole in removed:
        left = [
            part
            for one in left
            for part in (one.without(hole.first, hole.last) if one.folder == hole.folder else [one])
        ]
    return left


# --- active generations -------------------------------------------------------------


def is_active(head: Manifest, generation: int, now_ms: int) -> bool:
    """Whether a generation is retained, or pinned by a snapshot or a branch."""
    if generation in head.skipped_generations:
        return False
    retained = head.oldest_retained <= generation <= head.generation
    return retained or generation in pinned_generations(head, now_ms)


def check_active(head: Manifest, pinned: Manifest, now_ms: int) -> None:
    """Raise NotFoundError unless a generation is active, with all of its objects."""
    if not is_active(head, pinned.generation, now_ms):
        raise NotFoundError(
            f"generation {pinned.generation} was garbage-collected; "
            f"the oldest retained generation is {head.oldest_retained}",
            kind=ErrorKind.COLLECTED,
            hint="Use a newer one; a snapshot retains a generation for longer",
            generation=pinned.generation,
        )
    for key in _condemned_of(head, pinned):
        raise NotFoundError(
            f"generation {pinned.generation} needs {key}, which a sweep has condemned",
            kind=ErrorKind.COLLECTED,
            hint="Use a newer one; a snapshot retains a generation for longer",
            generation=pinned.generation,
        )


def _condemned_of(head: Manifest, pinned: Manifest) -> Iterator[str]:
    """Yield the condemned keys that a generation needs. Names sort like their numbers."""
    segments = {f"segments/{s.id}.seg" for s in pinned.segments if s.home is None}
    segments |= {f"segments/{centroids_name(i.centroids)}" for i in pinned.indexes if not i.home}
    manifest = f"manifest/{pinned.generation:020}."
    slots = f"wal/{pinned.wal_floor - 1:020}.wal"
    for condemned in head.condemned:
        key = condemned.key
        in_log = key.startswith("wal/") and key >= slots
        if key in segments or key.startswith(manifest) or in_log:
            yield key
    for condemned_range in head.condemned_ranges:
        first, last = condemned_range.first, condemned_range.last
        in_log = condemned_range.folder == "wal" and last >= pinned.wal_floor - 1
        if in_log or (condemned_range.folder == "manifest" and first <= pinned.generation <= last):
            yield numbered_key(condemned_range.folder, last)


# --- snapshots ----------------------------------------------------------------------


def add_snapshot(
    head: Manifest, new: SnapshotEntry, now_ms: int, last_seen: int | None, pinned: Manifest | None
) -> Manifest | None:
    """Pin a generation: the one that this edit publishes, or one that was loaded.

    The one that is published covers the log up to `last_seen`. None if the floor has passed that
    already: the log has to be read again.
    """
    alive = _alive(head, now_ms)
    if new.name is not None and any(other.name == new.name for other in alive):
        raise ConflictError(
            f"there is a snapshot {new.name!r} already",
            hint="Release it, or choose another name",
        )
    if pinned is not None:
        check_active(head, pinned, now_ms)
        return msgspec.structs.replace(head, snapshots=(*alive, new))
    if last_seen is None or last_seen < head.wal_floor - 1:
        return None
    new = msgspec.structs.replace(new, generation=head.generation + 1)
    return msgspec.structs.replace(
        head,
        snapshots=(*alive, new),
        wal_id_last_seen=max(head.wal_id_last_seen, last_seen),
    )


def find_snapshot(head: Manifest, id_or_name: str, now_ms: int) -> SnapshotEntry:
    """Return a snapshot; NotFoundError if it was released or has expired."""
    alive = list(_alive(head, now_ms))
    for snapshot in alive:
        if id_or_name in (snapshot.id, snapshot.name):
            return snapshot
    names = ", ".join(snapshot.name or snapshot.id for snapshot in alive)
    raise NotFoundError(
        f"there is no snapshot {id_or_name}: it was never taken, was released, or has expired",
        kind=ErrorKind.COLLECTED,
        hint=f"There are: {names[:200]}"
        if names
        else "There is none: reef snapshot take takes one",
        snapshot=id_or_name,
    )


def extend_snapshot(
    head: Manifest, snapshot_id: str, expires_at_ms: int | None, now_ms: int
) -> Manifest | None:
    """Change when a snapshot expires; NotFoundError if it has expired already."""
    snapshot = find_snapshot(head, snapshot_id, now_ms)
    extended = msgspec.structs.replace(snapshot, expires_at_ms=expires_at_ms)
    if extended == snapshot:
        return None
    return msgspec.structs.replace(
        head,
        snapshots=tuple(extended if s.id == snapshot.id else s for s in _alive(head, now_ms)),
    )


def drop_snapshot(head: Manifest, snapshot_id: str) -> Manifest | None:
    """Release a snapshot; None if it is gone already."""
    left = tuple(s for s in head.snapshots if s.id != snapshot_id)
    if len(left) == len(head.snapshots):
        return None
    return msgspec.structs.replace(head, snapshots=left)


def _alive(head: Manifest, now_ms: int) -> tuple[SnapshotEntry, ...]:
    expired = expired_snapshots(head, now_ms)
    return tuple(s for s in head.snapshots if s.id not in expired)


# --- cursors ------------------------------------------------------------------------


def set_cursor(
    head: Manifest, name: str, lsn: int, before: int | None, start: Manifest
) -> Manifest | None:
    """Register a cursor, or move it from `before` to `lsn`; None if it is there already.

    The newest generation from which the log can be replayed at `lsn` + 1 is the one that this
    edit publishes, unless a fold has passed the cursor: then it is `start`, if that is retained,
    or the generation that the cursor has.
    """
    known = head.cursors.get(name)
    if known is not None and known.lsn == lsn:
        return None
    if (known.lsn if known is not None else None) != before:
        raise _moved_cursor_error(name, known)
    if head.wal_floor <= lsn + 1:
        generation = head.generation + 1
    elif is_retained(head, start):
        generation = start.generation
    elif known is not None:
        generation = known.generation
    else:
        raise NotFoundError(
            f"LSN {lsn + 1} was garbage-collected", kind=ErrorKind.COLLECTED, lsn=lsn + 1
        )
    cursors = {**head.cursors, name: CursorEntry(lsn, generation)}
    return msgspec.structs.replace(head, cursors=cursors)


def is_retained(head: Manifest, start: Manifest) -> bool:
    """Whether the log from a generation's floor on is retained."""
    return head.oldest_retained <= start.generation <= head.generation


def drop_cursor(head: Manifest, name: str) -> Manifest | None:
    """Remove a cursor; None if it does not exist."""
    if name not in head.cursors:
        return None
    left = {other: entry for other, entry in head.cursors.items() if other != name}
    return msgspec.structs.replace(head, cursors=left)


def _moved_cursor_error(name: str, known: CursorEntry | None) -> ConflictError | NotFoundError:
    if known is None:
        return NotFoundError(f"the cursor {name!r} was dropped", hint="Register it again")
    return ConflictError(
        f"the cursor {name!r} is at LSN {known.lsn}: another process has moved it",
        hint="One process at a time reads by a cursor; open it again to continue from there",
        lsn=known.lsn,
    )


def add_index(manifest: Manifest, spec: IndexSpec) -> Manifest | None:
    """Add an index; None if it exists, ConflictError if it exists with other options."""
    for known in manifest.indexes:
        if (known.kind, known.column) == (spec.kind, spec.column):
            if known.options == spec.options:
                return None
            raise ConflictError(
                f"the column has a {spec.kind} index with other options: {known.options}",
                hint="Drop it first with alter(drop_index=…)",
            )
    return msgspec.structs.replace(manifest, indexes=(*manifest.indexes, spec))


def drop_indexes(manifest: Manifest, column: int, name: str) -> Manifest:
    """Drop all indexes of a column; NotFoundError if it has none."""
    left = tuple(spec for spec in manifest.indexes if spec.column != column)
    if len(left) == len(manifest.indexes):
        raise NotFoundError(f"column {name} has no index", column=name)
    return msgspec.structs.replace(manifest, indexes=left)


def set_centroids(manifest: Manifest, spec: IndexSpec, centroids: str) -> Manifest | None:
    """Name the centroids of a vector index; None if it was dropped, or another process was first.

    From this publish on the object is a root; refused if a sweep has condemned it meanwhile.
    """
    if spec not in manifest.indexes:
        return None
    return msgspec.structs.replace(manifest, indexes=_trained(manifest, spec, centroids))


def retrain_index(manifest: Manifest, spec: IndexSpec, centroids: str) -> Manifest | None:
    """Name new centroids of a trained vector index next to those that its segments have.

    None if it was dropped, or is trained again already.
    """
    own = [s for s in manifest.indexes if (s.kind, s.column) == (spec.kind, spec.column)]
    if own != [spec]:
        return None
    indexes = (*_trained(manifest, spec, centroids), spec)
    return msgspec.structs.replace(manifest, indexes=indexes)


def _trained(manifest: Manifest, spec: IndexSpec, centroids: str) -> tuple[IndexSpec, ...]:
    """Return the indexes with centroids for one of them, which no sweep may have condemned."""
    refuse_condemned_keys(manifest, [f"segments/{centroids_name(centroids)}"])
    trained = msgspec.structs.replace(spec, centroids=centroids, home=None)
    indexes = tuple(trained if known == spec else known for known in manifest.indexes)
    return indexes


def forget_replaced_centroids(manifest: Manifest) -> Manifest | None:
    """Name only the newest centroids of each index; None if there are no others."""
    newest = newest_indexes(manifest.indexes)
    if newest == manifest.indexes:
        return None
    return msgspec.structs.replace(manifest, indexes=newest)


def without_centroids(indexes: Iterable[IndexSpec]) -> tuple[IndexSpec, ...]:
    """Return indexes to be trained again: a backup has no centroids."""
    newest = newest_indexes(indexes)
    return tuple(msgspec.structs.replace(spec, centroids="", home=None) for spec in newest)


def index_specs(footers: Iterable[Footer]) -> tuple[IndexSpec, ...]:
    """Return the indexes that the newest segment names, built or not: for a rebuild."""
    newest = max(footers, key=lambda footer: footer.created_at_ms, default=None)
    return () if newest is None else tuple(place.spec for place in newest.indexes)
