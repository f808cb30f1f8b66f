"""The life of a namespace: drop, undrop, create the name again, rename (protocols §8).

A drop has taken the writer role, so the log ends with M fences, the last of them just below
`Dropped.end_lsn`: a late write of an older writer is void or finds its slot taken. Until a sweep
clears the namespace everything is there, and `undrop` is one publish. Clearing puts the floor at
`end_lsn`.

A name that is created again starts an incarnation under a prefix of its own. The last manifest of
the dropped one names its successor: from then on it can only be read and swept, and a stalled
process of it finds its slots, epoch and generation used, in its own prefix (H48, H65).

A load that creates its namespace and then fails drops it again. The manifest names the load that
it was created for, until another process publishes anything or joins: a writer by taking the
role, another load or a `create` by `use`. Until then the log holds the records of that load and
nothing else, no writer has a PUT in flight, and the load's abort takes the place of the fences.

A rename moves no object (ADR 0036). The objects of a namespace stay in their folder, which has the
name of its first incarnation; its manifest has its current name. A name that has no folder of its
own leads there by an alias: a manifest without rows, in the chain that a namespace of that name
would have, so that creating the name and renaming to it exclude each other. An alias is in force
while the head of the namespace that it leads to has the id of the same rename.

    1  announce   the head of the namespace: this rename, to that name
    2  reserve    the chain of the new name: an alias
    3  fence      the log: no older writer commits any more
    4  rename     the head, if the rename is still announced and the role is still ours

Step 4 decides. Before it the old name is complete, after it the new one. A process that needs the
new name finds an alias that is not in force, and withdraws the rename first: from then on step 4
finds that it is not announced any more.

All edits here are pure.
"""

from dataclasses import dataclass

import msgspec

from reef.errors import ConflictError, ErrorKind, NotFoundError
from reef.formats.manifest import (
    Alias,
    Dropped,
    IndexSpec,
    Manifest,
    NamespaceState,
    Origin,
    Rename,
    Successor,
)
from reef.formats.schema import Schema

NAMES_MAX = 100
"""Former names that are remembered, for the errors of readers that still use them."""


# --- drop, undrop, create again ------------------------------------------------------


def drop(manifest: Manifest, epoch: int, dropped: Dropped) -> Manifest | None:
    """Drop the namespace; None if the role is not ours any more, or a fold has passed our fences.

    Clearing has to raise the floor: a fold that was planned before would fit otherwise.
    """
    if manifest.writer_epoch != epoch or manifest.wal_floor >= dropped.end_lsn:
        return None
    return msgspec.structs.replace(manifest, state=NamespaceState.DROPPED, dropped=dropped)


def drop_if_unused(manifest: Manifest, job: str, dropped: Dropped) -> Manifest | None:
    """Drop a namespace that was created for a failed job; None if it was used since."""
    if manifest.dropped is not None or manifest.made_for != job:
        return None
    if manifest.wal_floor >= dropped.end_lsn:
        return None
    return msgspec.structs.replace(manifest, state=NamespaceState.DROPPED, dropped=dropped)


def use(manifest: Manifest) -> Manifest | None:
    """Keep a namespace even if the load that created it fails; None if none did."""
    return msgspec.structs.replace(manifest, made_for="") if manifest.made_for else None


def undrop(manifest: Manifest) -> Manifest | None:
    """Undrop a namespace that no sweep has cleared; None if it is live and kept."""
    if manifest.dropped is None:
        return use(manifest)
    if manifest.successor is not None:
        raise ConflictError(
            "the namespace was dropped, and its name was created again since",
            hint="Drop the new one first; snapshots of the old one can still be read",
        )
    if manifest.dropped.is_cleared:
        raise NotFoundError(
            "the namespace was dropped, and a sweep has deleted its rows since",
            kind=ErrorKind.COLLECTED,
            hint="create() makes a new one of that name, without rows",
        )
    return msgspec.structs.replace(manifest, state=NamespaceState.LIVE, dropped=None)


def is_due(manifest: Manifest, before_s: float) -> bool:
    """Whether a namespace was dropped before `before_s`, by the store's clock, and not cleared."""
    dropped = manifest.dropped
    return dropped is not None and not dropped.is_cleared and dropped.at_ms / 1000 < before_s


def clear_dropped(manifest: Manifest) -> Manifest:
    """Remove everything from a dropped namespace but its counters and its pins.

    Cursors are removed: the log that they follow has ended. Snapshots and branches stay.
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
    """The first LSN behind all filled slots."""


def succeed(
    manifest: Manifest,
    schema: Schema,
    now_ms: int,
    end: LogEnd,
    made_for: str = "",
    *,
    origin: Origin | None = None,
    indexes: tuple[IndexSpec, ...] = (),
    prepared: str = "",
) -> Manifest | None:
    """Name the incarnation that replaces a dropped namespace; None if another process has.

    None also if it was undropped and dropped again since its log was listed. One LSN is left out
    between the two logs, so that the end of the old one is not the beginning of the new one. A
    branch, which has an origin, continues the log and the schemas of that instead; a restore has
    prepared its first manifest.
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
        names=manifest.names,
        rename_id=manifest.rename_id,
        origin=origin,
        indexes=indexes,
        prepared=prepared,
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
        names=successor.names,
        rename_id=successor.rename_id,
        indexes=successor.indexes,
    )


def forget_predecessor(manifest: Manifest, incarnation: int) -> Manifest | None:
    """Remove an earlier incarnation whose objects have been swept."""
    if incarnation not in manifest.predecessors:
        return None
    left = tuple(number for number in manifest.predecessors if number != incarnation)
    return msgspec.structs.replace(manifest, predecessors=left)


# --- rename --------------------------------------------------------------------------


def announce(manifest: Manifest, rename: Rename) -> Manifest:
    """Announce a rename; one that was announced before is withdrawn."""
    return msgspec.structs.replace(manifest, renaming=rename)


def withdraw(manifest: Manifest, rename_id: str) -> Manifest | None:
    """Withdraw a rename; None if it is no longer announced."""
    if manifest.renaming is None or manifest.renaming.id != rename_id:
        return None
    return msgspec.structs.replace(manifest, renaming=None)


def rename(manifest: Manifest, rename: Rename, epoch: int, folder: str) -> Manifest | None:
    """Rename the namespace; None if the rename was withdrawn, or the role is not ours any more."""
    if manifest.renaming != rename or manifest.writer_epoch != epoch:
        return None
    names = (*(manifest.names or (folder,)), rename.to)[-NAMES_MAX:]
    return msgspec.structs.replace(manifest, names=names, rename_id=rename.id, renaming=None)


def is_in_force(manifest: Manifest, alias: Alias, name: str) -> bool:
    """Whether a name leads to a namespace, whose head this is."""
    return manifest.rename_id == alias.id and manifest.name_in(alias.folder) == name


def alias_manifest(alias: Alias) -> Manifest:
    """Return the first manifest of a name that was never used; the publisher stamps it."""
    return Manifest(generation=1, write_id="", published_at_ms=0, alias=alias)


def replace_alias(manifest: Manifest, old: Alias, new: Alias) -> Manifest | None:
    """Point a name to another namespace; None if another process was first."""
    if manifest.alias != old:
        return None
    return msgspec.structs.replace(manifest, alias=new)


def create_over(manifest: Manifest, old: Alias, first: Manifest) -> Manifest | None:
    """Create a namespace in the chain of an alias that is not in force; None if it is gone."""
    if manifest.alias != old:
        return None
    return msgspec.structs.replace(
        first, recent=manifest.recent, oldest_retained=manifest.generation + 1
    )
