"""The history of a namespace: its retained generations, and what each of them changed."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise

from reef.engine.history.as_of import ConcurrentSweep, History
from reef.engine.read.caches import ByteCache
from reef.engine.read.segments import SegmentStore
from reef.errors import CorruptionError, UnavailableError
from reef.formats.manifest import Manifest
from reef.manifest.head import HeadFinder, locate
from reef.stores import Store

RESTARTS_MAX = 10


@dataclass(frozen=True, slots=True)
class GenerationRecord:
    """One retained generation."""

    generation: int
    published_at: datetime
    lsn: int
    """The last LSN that it has seen."""
    rows: int
    """Versions in its segments, deletes among them; rows in the log are not counted."""
    bytes: int
    segments: int
    change: str
    """How it differs from the one before: fold, compaction, schema, snapshot, …"""


def generation_records(store: Store, name: str) -> list[GenerationRecord]:
    """Return the retained generations, newest first: one GET for each."""
    for _ in range(RESTARTS_MAX):
        try:
            heads = locate(store, name)
            manifests = sorted(_manifests(store, heads), key=lambda m: m.generation)
        except ConcurrentSweep:
            continue
        described = [_record(manifests[0], "oldest retained")]
        described += [_record(two, describe(one, two)) for one, two in pairwise(manifests)]
        return described[::-1]
    raise UnavailableError(f"sweeps of {name} outran {RESTARTS_MAX} attempts to list its history")


def _manifests(store: Store, heads: HeadFinder) -> Iterator[Manifest]:
    history = History(store, heads.names, SegmentStore(store, heads.names, ByteCache(0)), heads)
    head = heads.found.manifest
    yield head
    for generation in history.retained(head):
        try:
            yield history.load(generation)
        except CorruptionError:  # skipped by every reader, too
            continue


def _record(manifest: Manifest, change: str) -> GenerationRecord:
    return GenerationRecord(
        manifest.generation,
        datetime.fromtimestamp(manifest.published_at_ms / 1000, UTC),
        max(manifest.wal_id_last_seen, manifest.wal_floor - 1),
        sum(segment.rows for segment in manifest.segments),
        sum(segment.size for segment in manifest.segments),
        len(manifest.segments),
        change,
    )


def describe(before: Manifest, after: Manifest) -> str:
    """Return the changes from one generation to a later one, in words."""
    old, new = ({segment.id for segment in m.segments} for m in (before, after))
    came, went = len(new - old), len(old - new)
    folded = after.wal_floor > before.wal_floor
    facts = {
        f"fold up to LSN {after.wal_floor - 1}: {came} segments added": folded,
        f"compaction: {went} segments became {came}": not folded and bool(went),
        "schema": after.schema.id != before.schema.id,
        "writer": after.writer_epoch != before.writer_epoch,
        "compactor": after.compactor_epoch != before.compactor_epoch and not went,
        "snapshots": after.snapshots != before.snapshots,
        "cursors": after.cursors != before.cursors,
        "branches": after.branches != before.branches,
        "sweep": (after.condemned, after.condemned_ranges)
        != (before.condemned, before.condemned_ranges),
        "dropped": after.dropped is not None and before.dropped is None,
        "undropped": after.dropped is None and before.dropped is not None,
        "renamed": after.names != before.names,
    }
    return ", ".join(text for text, holds in facts.items() if holds) or "other"
