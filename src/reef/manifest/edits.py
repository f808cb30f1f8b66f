"""Edits: what one publish changes. Pure functions from a manifest to the next one's content."""

from dataclasses import dataclass

import msgspec

from reef.formats.manifest import DedupEntry, Manifest, OpenJob, SegmentEntry
from reef.formats.schema import Schema

__all__ = ["FoldResult", "fold", "lower_parallel_writes", "new_namespace", "raise_writer_epoch"]


def new_namespace(schema: Schema, max_parallel_writes: int = 1) -> Manifest:
    """Return the first manifest of a namespace; the publisher stamps it."""
    return Manifest(
        generation=1,
        write_id="",
        published_at_ms=0,
        schemas=(schema,),
        max_parallel_writes=max_parallel_writes,
    )


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


def fold(manifest: Manifest, result: FoldResult) -> Manifest | None:
    """Make a fold's segments visible and move the floor; None if another fold was first."""
    if manifest.wal_floor != result.floor:
        return None
    return msgspec.structs.replace(
        manifest,
        segments=(*result.segments, *manifest.segments),
        wal_floor=result.end,
        wal_id_last_seen=max(manifest.wal_id_last_seen, result.end - 1),
        dedup=result.dedup,
        open_jobs=result.open_jobs,
        below_floor=result.below_floor,
    )
