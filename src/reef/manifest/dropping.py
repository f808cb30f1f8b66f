"""Dropping a namespace, bringing it back, and making one anew in its place (protocol section 8).

A drop has taken the writer role, so M fences lie in the log, the last of them just below
`Dropped.end_lsn`: whatever an older writer still sends is void or finds its slot taken. Until a
sweep clears the namespace everything is there, and `undrop` is one publish. What clears it, and
what makes the name anew, puts the floor at `end_lsn`: the numbers go on, so that no slot, epoch or
generation is ever free for a zombie (H48).

A load that makes its namespace and then fails takes it back. The manifest says which load it was
made for, until somebody publishes anything or joins: a writer by taking the role, another load or
a `create` by `use`. So while that is said, the log holds the records of that load and nothing
else, no writer has anything in flight, and the load's abort stands where fences would.

All edits here are pure.
"""

import msgspec

from reef.errors import Kind, NotFoundError
from reef.formats.manifest import Dropped, Manifest, NamespaceState
from reef.formats.schema import Schema

__all__ = ["clear_dropped", "drop", "is_due", "made_anew", "take_back", "undrop", "use"]


def drop(manifest: Manifest, epoch: int, dropped: Dropped) -> Manifest | None:
    """Drop; None if the role is not ours any more, or a fold has passed our fences.

    The floor has to rise when the name is made anew: a fold from before would fit otherwise.
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


def made_anew(manifest: Manifest, schema: Schema, made_for: str = "") -> Manifest | None:
    """Make a namespace in the place of a dropped one; None if somebody else has.

    Schemas are numbered on, so that a bulk job of the old one cannot begin in the new one.
    """
    if manifest.dropped is None:
        return None
    cleared = clear_dropped(manifest)
    return msgspec.structs.replace(
        cleared,
        state=NamespaceState.LIVE,
        dropped=None,
        schemas=(msgspec.structs.replace(schema, id=manifest.schema.id + 1),),
        wal_base=cleared.wal_floor,
        compactor_epoch=manifest.compactor_epoch + 1,
        made_for=made_for,
    )
