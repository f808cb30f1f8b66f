"""Edits by a repair: pure functions, like all edits.

A repair moves no field backwards. If the newest manifest cannot be read, its fields are bounded
by other evidence: every generation raises an epoch by one at most, and fences in the log record
epochs; the floor is where the remaining log begins; the last LSN seen is the last one listed.

A chain that restarts from an older generation merges the fields of all readable generations, each
in the safe direction (H70):

    grace period       the longest: a process may still rely on it
    condemned keys     all: a sweep may be about to delete them, so none is named again
    oldest retained    the newest: objects below it may be gone
    stream marks       the highest of each stream: everything below it was committed
    dedup window       every key, up to the size of the window
    epochs             above all that may have been issued, the compactor's too
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from reef.formats.manifest import (
    BranchPin,
    Condemned,
    CondemnedRange,
    CursorEntry,
    DedupEntry,
    Manifest,
    Recent,
    SegmentEntry,
)
from reef.formats.schema import Schema
from reef.manifest import invariants as sums
from reef.manifest.branching import HOMES, needed_homes
from reef.manifest.dedup import merge_streams
from reef.manifest.edits import FoldResult, fold, remove_ranges
from reef.paths import centroids_name


@dataclass(frozen=True, slots=True)
class Repairs:
    """The damaged objects that are removed, and their replacements."""

    skipped_lsns: frozenset[int] = frozenset()
    skipped_generations: frozenset[int] = frozenset()
    ingests_without_begin: frozenset[int] = frozenset()
    replaced: Mapping[str, tuple[SegmentEntry, ...]] = field(default_factory=dict)
    """From a damaged segment to the segments of its salvaged rows."""
    snapshots: frozenset[str] = frozenset()
    """Ids of snapshots whose generation is lost."""
    cursors: Mapping[str, CursorEntry | None] = field(default_factory=dict)
    """New positions of cursors whose generation is lost; None to drop the cursor."""
    branches: Mapping[str, BranchPin] = field(default_factory=dict)
    """New pins of branches whose generation is lost."""
    fold: FoldResult | None = None
    """The log folded past the damage, with its salvaged rows."""


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
        skipped_lsns=_union(manifest.skipped_lsns, repairs.skipped_lsns),
        skipped_generations=_union(manifest.skipped_generations, repairs.skipped_generations),
        ingests_without_begin=_union(manifest.ingests_without_begin, repairs.ingests_without_begin),
        snapshots=tuple(s for s in manifest.snapshots if s.id not in repairs.snapshots),
        cursors={name: entry for name, entry in cursors.items() if entry is not None},
        branches={b: repairs.branches.get(b, pin) for b, pin in manifest.branches.items()},
    )
    return edited if repairs.fold is None else fold(edited, repairs.fold)


@dataclass(frozen=True, slots=True)
class Restart:
    """The evidence of the bucket in place of a damaged newest manifest."""

    newest: int
    """The damaged generation that the next one comes after."""
    epoch: int
    """The highest in the log."""
    max_parallel_writes: int
    schemas: tuple[Schema, ...]
    last_lsn: int
    compactor_epoch: int = 0
    """The highest one that a staged segment names."""
    oldest_retained: int = 1
    """The oldest generation from which on all manifests exist."""
    known: tuple[Manifest, ...] = ()
    """All other generations that can be read, the oldest first."""
    rebuilt: Manifest | None = None
    """A manifest derived from segments and log, if the newest intact one needs swept objects."""
    holes: tuple[str, ...] = ()
    """Descriptions of data that neither segments nor log account for."""


def restart_after(base: Manifest, restart: Restart, write_id: str, now_ms: int) -> Manifest:
    """Return the generation after damaged ones, made from the newest intact one."""
    lost = restart.newest - base.generation
    generation = restart.newest + 1
    known = max(schema.id for schema in base.schemas)
    grown = {schema.id: schema for schema in restart.schemas if schema.id > known}
    after = msgspec.structs.replace(
        base,
        generation=generation,
        write_id=write_id,
        published_at_ms=now_ms,
        recent=(*base.recent, Recent(generation, write_id, now_ms)),
        made_for="",  # a lost generation may have been the first use of others
        writer_epoch=max(base.writer_epoch + lost, restart.epoch) + 1,
        compactor_epoch=max(base.compactor_epoch + lost, restart.compactor_epoch) + 1,
        compactor_job="",
        writer_stream="",  # another writer may have had the role since
        max_parallel_writes=max(base.max_parallel_writes, restart.max_parallel_writes),
        schemas=(*base.schemas, *(grown[number] for number in sorted(grown))),
        wal_id_last_seen=max(base.wal_id_last_seen, restart.last_lsn),
        skipped_generations=_union(
            base.skipped_generations, range(base.generation + 1, generation)
        ),
    )
    after = _carry_fields(after, restart)
    return after if restart.rebuilt is None else _with_state(after, restart.rebuilt)


def _carry_fields(manifest: Manifest, restart: Restart) -> Manifest:
    """Merge the fields of other readable generations (H70)."""
    known = (*restart.known, manifest)
    oldest = max(restart.oldest_retained, *(m.oldest_retained for m in known))
    marks, lineages = merge_streams(known)
    carried = msgspec.structs.replace(
        manifest,
        grace_ms=max(m.grace_ms for m in known),
        grace_before_ms=max(m.grace_before_ms for m in known),
        grace_lowered_at_ms=max(m.grace_lowered_at_ms for m in known),
        oldest_retained=min(oldest, manifest.generation),
        stream_marks=marks,
        stream_lineages=lineages,
        dedup=merged_window([m.dedup for m in known], manifest),
        branches={branch: pin for m in known for branch, pin in m.branches.items()},
        pinned_homes=tuple(dict.fromkeys(home for m in known for home in m.pinned_homes)),
    )
    return msgspec.structs.replace(
        carried,
        condemned=_all_condemned(known, carried),
        condemned_ranges=_all_condemned_ranges(known, carried),
    )


def _all_condemned(known: Sequence[Manifest], manifest: Manifest) -> tuple[Condemned, ...]:
    """Return every key that was condemned and that the manifest does not need."""
    keys = {entry.key: entry for one in known for entry in one.condemned}
    live = {f"segments/{segment.id}.seg" for segment in manifest.segments}
    live |= {f"segments/{centroids_name(index.centroids)}" for index in manifest.indexes}
    live |= {f"{HOMES}{home}" for home in needed_homes(manifest)}
    first_slot = f"wal/{manifest.wal_floor - 1:020}.wal"
    retained = f"manifest/{manifest.oldest_retained:020}."
    return tuple(
        entry
        for key, entry in keys.items()
        if key not in live
        and not (key.startswith("wal/") and key >= first_slot)
        and not (key.startswith("manifest/") and key > retained)
    )


def _all_condemned_ranges(
    known: Sequence[Manifest], manifest: Manifest
) -> tuple[CondemnedRange, ...]:
    """Return every number that was condemned and that the manifest does not need."""
    needed = {"wal": manifest.wal_floor - 1, "manifest": manifest.oldest_retained}
    joined: list[CondemnedRange] = []
    for one in known:
        for new in one.condemned_ranges:
            below = new.without(needed[new.folder], new.last)
            joined += remove_ranges(below, joined)
    return tuple(joined)


def _with_state(manifest: Manifest, rebuilt: Manifest) -> Manifest:
    """Return a manifest with the segments and the floor of the one derived from the bucket."""
    marks, lineages = merge_streams([manifest, rebuilt])
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
        skipped_lsns=_union(manifest.skipped_lsns, frozenset(rebuilt.skipped_lsns)),
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
    """Return the keys of all windows below a manifest's floor, in the order of commits."""
    entries = {entry.key: entry for window in windows for entry in window}
    ordered = sorted(entries.values(), key=lambda entry: (entry.lsn, entry.index))
    below = [entry for entry in ordered if entry.lsn < manifest.wal_floor]
    return tuple(below[-manifest.dedup_keys_max :])


def _union(one: tuple[int, ...], other: "frozenset[int] | range") -> tuple[int, ...]:
    return tuple(sorted({*one, *other}))
