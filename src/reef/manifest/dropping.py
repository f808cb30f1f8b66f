"""Dropping a namespace, undropping it, and creating the name again (protocol section 8).

A drop has taken the writer role, so the log ends with M fences, the last of them just below
`Dropped.end_lsn`: a late write of an older writer is void or finds its slot taken. Until a sweep
clears the namespace everything is there, and `undrop` is one publish. Clearing puts the floor at
`end_lsn`.

A name that is created again starts an incarnation under a prefix of its own. The last manifest of
the dropped one names its successor: from then on it can only be read and swept, and a stalled
process of it finds its slots, epoch and generation used, in its own prefix (H48, H65).

A load that creates its namespace and then fails takes it back. The manifest names the load that
it was created for, until another process publishes anything or joins: a writer by taking the
role, another load or a `create` by `use`. Until then the log holds the records of that load and
nothing else, no writer has a PUT in flight, and the load's abort takes the place of the fences.

All edits here are pure.
"""

from dataclasses import dataclass

import msgspec

from reef.errors import ConflictError, Kind, NotFoundError
from reef.formats.manifest import Dropped, Manifest, NamespaceState, Successor
from reef.formats.schema import Schema

__all__ = [
    "LogEnd",
    "clear_dropped",
    "drop",
    "first_manifest",
    "forget_predecessor",
    "is_due",
    "succeed",
    "take_back",
    "undrop",
    "use",
]


def drop(manifest: Manifest, epoch: int, dropped: Dropped) -> Manifest | None:
    """Drop; None if the role is not ours any more, or a fold has passed our fences.

    Clearing has to raise the floor: a fold that was planned before would fit otherwise.
    """
    if manifest.writer_epoch != epoch or manifest.wal_floor >= dropped.end_lsn:
        return None
    return msgspec.structs.replace(manifest, state=NamespaceState.DROPPED, dropped=dropped)


def take_back(manifest: Manifest, job: str, dropped: Dropped) -> Manifest | None:
    """Drop what was made for a job that failed; None if somebody else has used it since."""
    if manifest.dropped is not None or manifest.made_for != job:
        return None
    if manifest.wal_floor >= dropped.end_lsn:
        return None
    return msgspec.structs.replace(manifest, state=NamespaceState.DROPPED, dropped=dropped)


def use(manifest: Manifest) -> Manifest | None:
    """Let a namespace stay, whatever becomes of the load that made it; None if it does anyway."""
    return msgspec.structs.replace(manifest, made_for="") if manifest.made_for else None


def undrop(manifest: Manifest) -> Manifest | None:
    """Bring back what no sweep has cleared; None if it is there, and stays."""
    if manifest.dropped is None:
        return use(manifest)
    if manifest.successor is not None:
        raise ConflictError(
            "the namespace was dropped, and its name was created again since",
            hint="Drop the new one first; snapshots of the old one can still be read",
        )
    if manifest.dropped.is_cleared:
        raise NotFoundError(
            "the namespace was dropped, and a sweep has taken its rows since",
            kind=Kind.COLLECTED,
            hint="create() makes a new one of that name, without rows",
        )
    return msgspec.structs.replace(manifest, state=NamespaceState.LIVE, dropped=None)


def is_due(manifest: Manifest, before_s: float) -> bool:
    """Whether a namespace was dropped before `before_s`, by the store's clock, and not cleared."""
    dropped = manifest.dropped
    return dropped is not None and not dropped.is_cleared and dropped.at_ms / 1000 < before_s


def clear_dropped(manifest: Manifest) -> Manifest:
    """Take everything out of a dropped namespace but its numbers, and what pins others hold.

    Cursors go: what they would read on is over. Snapshots and branches keep their generations.
    """
    dropped = manifest.dropped
    if dropped is None or dropped.is_cleared:
        return manifest
    return msgspec.structs.replace(
        manifest,
        dropped=msgspec.structs.replace(dropped, is_cleared=True),
        segments=(),
        sums=None,
        dedup=(),
        stream_marks={},
        stream_lineages={},
        writer_stream="",
        writer_life="",
        open_jobs=(),
        compactor_job="",
        cursors={},
        wal_floor=dropped.end_lsn,
        below_floor=dropped.below,
        wal_id_last_seen=max(manifest.wal_id_last_seen, dropped.end_lsn - 1),
    )


@dataclass(frozen=True, slots=True)
class LogEnd:
    """The end of a dropped log, as it was listed after the drop."""

    dropped_lsn: int
    """The `end_lsn` of the drop before the listing."""
    open_lsn: int
    """The first LSN behind all that are filled."""


def succeed(
    manifest: Manifest, schema: Schema, now_ms: int, end: LogEnd, made_for: str = ""
) -> Manifest | None:
    """Name the incarnation that replaces a dropped namespace; None if another process has.

    None also if it was undropped and dropped again since its log was listed. One LSN is left out
    between the two logs: who has read all of the old one is not at the beginning of the new one.
    """
    dropped = manifest.dropped
    if dropped is None or dropped.end_lsn != end.dropped_lsn or manifest.successor is not None:
        return None
    successor = Successor(
        incarnation=manifest.incarnation + 1,
        schema=msgspec.structs.replace(schema, id=manifest.schema.id + 1),
        generation=manifest.generation + 2,  # the next one announces it
        wal_base=max(manifest.wal_floor, dropped.end_lsn, end.open_lsn) + 1,
        writer_epoch=manifest.writer_epoch,
        compactor_epoch=manifest.compactor_epoch + 1,
        made_for=made_for,
        predecessors=(*manifest.predecessors, manifest.incarnation),
        created_at_ms=now_ms,
        grace_ms=max(manifest.grace_ms, manifest.grace_before_ms),
    )
    return msgspec.structs.replace(manifest, successor=successor)


def first_manifest(successor: Successor) -> Manifest:
    """Return the first manifest of an incarnation; the publisher stamps it."""
    return Manifest(
        generation=successor.generation,
        oldest_retained=successor.generation,
        write_id="",
        published_at_ms=0,
        schemas=(successor.schema,),
        writer_epoch=successor.writer_epoch,
        compactor_epoch=successor.compactor_epoch,
        wal_floor=successor.wal_base,
        wal_base=successor.wal_base,
        wal_id_last_seen=successor.wal_base - 1,
        made_for=successor.made_for,
        incarnation=successor.incarnation,
        created_at_ms=successor.created_at_ms,
        grace_ms=successor.grace_ms,
        predecessors=successor.predecessors,
    )


def forget_predecessor(manifest: Manifest, incarnation: int) -> Manifest | None:
    """Note that a sweep has deleted all it can of an earlier incarnation."""
    if incarnation not in manifest.predecessors:
        return None
    left = tuple(number for number in manifest.predecessors if number != incarnation)
    return msgspec.structs.replace(manifest, predecessors=left)
