"""What a repair changes in a manifest. Pure functions, like all edits.

A repair never makes anything move backwards. Where the newest manifest cannot be read, what it
said is bounded from outside: every generation raises an epoch by one at most, and the log's own
fences tell theirs; the floor is where the log still begins; what was last seen is what is there.

A chain that restarts from an older generation merges what any readable generation knows, each
field the safe way round (H70):

    grace period       the longest: a process may still count on it
    condemned keys     all: a sweep may be about to delete them, so none is named again
    oldest retained    the newest: what is below it may be gone
    stream marks       the highest of each stream: below it everything was committed
    dedup window       every key, as many as the window holds
    epochs             above all that can have been given out, the compactor's too
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from reef.formats.manifest import (
    Condemned,
    CursorEntry,
    DedupEntry,
    Manifest,
    Recent,
    SegmentEntry,
)
from reef.formats.schema import Schema
from reef.manifest import sums
from reef.manifest.edits import FoldResult, fold
from reef.manifest.streams import merged_streams

__all__ = ["Repairs", "Restart", "apply_repairs", "merged_window", "restart_after"]


@dataclass(frozen=True, slots=True)
class Repairs:
    """What is given up, and what takes its place."""

    skipped_lsns: frozenset[int] = frozenset()
    skipped_generations: frozenset[int] = frozenset()
    replaced: Mapping[str, tuple[SegmentEntry, ...]] = field(default_factory=dict)
    """From a segment that is lost to what was saved of it."""
    snapshots: frozenset[str] = frozenset()
    """Ids of snapshots whose generation is given up."""
    cursors: Mapping[str, CursorEntry | None] = field(default_factory=dict)
    """Where cursors of lost generations go on; None: nowhere."""
    fold: FoldResult | None = None
    """The log up to past the damage, with what could be saved of it."""


def apply_repairs(manifest: Manifest, repairs: Repairs) -> Manifest | None:
    """Return the next manifest's content; None if a fold has moved the floor meanwhile."""
    segments = [new for old in manifest.segments for new in repairs.replaced.get(old.id, (old,))]
    old = [s for s in manifest.segments if s.id in repairs.replaced]
    new = [s for segment in old for s in repairs.replaced[segment.id]]
    cursors = {n: repairs.cursors.get(n, entry) for n, entry in manifest.cursors.items()}
    edited = msgspec.structs.replace(
        manifest,
        segments=tuple(segments),
        sums=manifest.sums and sums.compacted(manifest, sums.total(old), sums.total(new)),
        skipped_lsns=_joined(manifest.skipped_lsns, repairs.skipped_lsns),
        skipped_generations=_joined(manifest.skipped_generations, repairs.skipped_generations),
        snapshots=tuple(s for s in manifest.snapshots if s.id not in repairs.snapshots),
        cursors={name: entry for name, entry in cursors.items() if entry is not None},
    )
    return edited if repairs.fold is None else fold(edited, repairs.fold)


@dataclass(frozen=True, slots=True)
class Restart:
    """What the bucket tells where the newest manifest does not."""

    newest: int
    """The damaged generation that the next one comes after."""
    epoch: int
    """The highest in the log."""
    max_parallel_writes: int
    schemas: tuple[Schema, ...]
    last_lsn: int
    compactor_epoch: int = 0
    """The highest in whose name a segment was staged."""
    oldest_retained: int = 1
    """The first generation from which on manifests are there."""
    known: tuple[Manifest, ...] = ()
    """All other generations that can be read, the oldest first."""
    rebuilt: Manifest | None = None
    """Where the newest sound manifest needs what was swept since: what segments and log tell."""
    holes: tuple[str, ...] = ()
    """What nothing stands for, there."""


def restart_after(base: Manifest, found: Restart, write_id: str, now_ms: int) -> Manifest:
    """Return the generation after damaged ones, made from the newest sound one."""
    lost = found.newest - base.generation
    generation = found.newest + 1
    known = max(schema.id for schema in base.schemas)
    grown = {schema.id: schema for schema in found.schemas if schema.id > known}
    after = msgspec.structs.replace(
        base,
        generation=generation,
        write_id=write_id,
        published_at_ms=now_ms,
        recent=(*base.recent, Recent(generation, write_id, now_ms)),
        made_for="",  # a lost generation may have been the first use of others
        writer_epoch=max(base.writer_epoch + lost, found.epoch) + 1,
        compactor_epoch=max(base.compactor_epoch + lost, found.compactor_epoch) + 1,
        compactor_job="",
        writer_stream="",  # another writer may have had the role since
        max_parallel_writes=max(base.max_parallel_writes, found.max_parallel_writes),
        schemas=(*base.schemas, *(grown[number] for number in sorted(grown))),
        wal_id_last_seen=max(base.wal_id_last_seen, found.last_lsn),
        skipped_generations=_joined(
            base.skipped_generations, range(base.generation + 1, generation)
        ),
    )
    after = _carried(after, found)
    return after if found.rebuilt is None else _with_state(after, found.rebuilt)


def _carried(manifest: Manifest, found: Restart) -> Manifest:
    """Merge in what other readable generations know (H70)."""
    known = (*found.known, manifest)
    oldest = max(found.oldest_retained, *(m.oldest_retained for m in known))
    marks, lineages = merged_streams(known)
    carried = msgspec.structs.replace(
        manifest,
        grace_ms=max(m.grace_ms for m in known),
        grace_before_ms=max(m.grace_before_ms for m in known),
        grace_lowered_at_ms=max(m.grace_lowered_at_ms for m in known),
        oldest_retained=min(oldest, manifest.generation),
        stream_marks=marks,
        stream_lineages=lineages,
        dedup=merged_window([m.dedup for m in known], manifest),
    )
    return msgspec.structs.replace(carried, condemned=_all_condemned(known, carried))


def _all_condemned(known: Sequence[Manifest], manifest: Manifest) -> tuple[Condemned, ...]:
    """Return every key that was condemned and that the manifest does not need."""
    keys = {entry.key: entry for one in known for entry in one.condemned}
    live = {f"segments/{segment.id}.seg" for segment in manifest.segments}
    first_slot = f"wal/{manifest.wal_floor - 1:020}.wal"
    retained = f"manifest/{manifest.oldest_retained:020}."
    return tuple(
        entry
        for key, entry in keys.items()
        if key not in live
        and not (key.startswith("wal/") and key >= first_slot)
        and not (key.startswith("manifest/") and key > retained)
    )


def _with_state(manifest: Manifest, rebuilt: Manifest) -> Manifest:
    """Return a manifest with the segments and the floor that the bucket itself tells."""
    marks, lineages = merged_streams([manifest, rebuilt])
    return msgspec.structs.replace(
        manifest,
        segments=rebuilt.segments,
        wal_floor=rebuilt.wal_floor,
        wal_id_last_seen=max(manifest.wal_id_last_seen, rebuilt.wal_id_last_seen),
        dedup=merged_window([manifest.dedup, rebuilt.dedup], rebuilt),
        stream_marks=marks,
        stream_lineages=lineages,
        open_jobs=rebuilt.open_jobs,
        below_floor=rebuilt.below_floor,
        skipped_lsns=_joined(manifest.skipped_lsns, frozenset(rebuilt.skipped_lsns)),
        dropped_lsn=max(manifest.dropped_lsn, rebuilt.dropped_lsn),
        dropped_expired_ms=max(manifest.dropped_expired_ms, rebuilt.dropped_expired_ms),
        sums=None,
        oldest_retained=manifest.generation,
        cursors={
            name: CursorEntry(cursor.lsn, manifest.generation)
            for name, cursor in manifest.cursors.items()
            if cursor.lsn + 1 >= rebuilt.wal_floor  # the log behind the others is gone
        },
    )


def merged_window(
    windows: Iterable[Iterable[DedupEntry]], manifest: Manifest
) -> tuple[DedupEntry, ...]:
    """Return the keys that any window has below a manifest's floor, in the order of commits."""
    entries = {entry.key: entry for window in windows for entry in window}
    ordered = sorted(entries.values(), key=lambda entry: (entry.lsn, entry.index))
    below = [entry for entry in ordered if entry.lsn < manifest.wal_floor]
    return tuple(below[-manifest.dedup_keys_max :])


def _joined(one: tuple[int, ...], other: "frozenset[int] | range") -> tuple[int, ...]:
    return tuple(sorted({*one, *other}))
