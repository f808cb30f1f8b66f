"""Branches: namespaces that share the objects of another one (protocols §8). Pure edits.

A branch names the segments of its origin by their home, reads the origin's log up to the LSN at
which it was made, and writes everything else to a folder of its own:

    1  pin     in every namespace whose objects the branch will name: the generation, and the last
               LSN of its log; the pin has the id of the branch and never expires
    2  create  the first manifest of the branch, create-only

A branch exists if and only if the head of its own chain is live. A pin is removed only when its
branch can never need it again: its chain shows another branch's id, or does not list the home any
more; if there is no chain at all, the collector first creates a dropped one, so that a creator that
stalled between the two steps finds its name taken (H42).

A home is *released* like an object is deleted: a sweep of the branch condemns it in the manifest
once no retained generation names it, and unpins after the grace, when no lease holds it. The origin
is released only after a full compaction, a purge or a drop: a merge needs the common state.

A namespace that is restored from a backup begins in the same way. Its segments are copied, and the
log up to the chosen LSN is folded, before the first manifest is created. The log itself is not
restored. LSNs, epochs and write ids of the source would otherwise be valid in both, so the numbers
of the restored namespace begin far behind them.
"""

from collections.abc import Iterable

import msgspec

from reef.errors import ConflictError, ErrorKind, NotFoundError
from reef.formats.manifest import (
    BranchPin,
    Dropped,
    IndexSpec,
    InheritedLog,
    Manifest,
    NamespaceState,
    Origin,
    SegmentEntry,
    Successor,
)
from reef.manifest.edits import check_active

HOMES = "homes/"
"""The folder of condemned homes, which are no objects: deleting one means to unpin it."""
RESTORED_LSNS = 1_000_000_000
"""LSNs left out behind a restored state, and more than were lost: the position of a reader of the
lost log is never valid in the restored one (H48)."""
RESTORED_EPOCHS = 1_000_000


def pin_branch(
    head: Manifest, branch_id: str, pin: BranchPin, pinned: Manifest | None, now_ms: int
) -> Manifest | None:
    """Pin the generation that this edit publishes, or one that was loaded, for a branch.

    None if a fold has passed the LSN already: the log has to be read again.
    """
    if pinned is not None:
        check_active(head, pinned, now_ms)
        _check_homes(head, pinned)
    else:
        if pin.last_lsn < head.wal_floor - 1:
            return None
        pin = msgspec.structs.replace(pin, generation=head.generation + 1)
    seen = head.wal_id_last_seen if pinned is not None else max(head.wal_id_last_seen, pin.last_lsn)
    branches = {**head.branches, branch_id: pin}
    return msgspec.structs.replace(head, branches=branches, wal_id_last_seen=seen)


def _check_homes(head: Manifest, pinned: Manifest) -> None:
    """Raise NotFoundError if a generation needs objects that the namespace is releasing."""
    condemned = {entry.key for entry in head.condemned}
    for home in needed_homes(pinned):
        if HOMES + home in condemned or home not in head.pinned_homes:
            raise NotFoundError(
                f"generation {pinned.generation} needs objects of {home}, which were released",
                kind=ErrorKind.COLLECTED,
                hint="Use a newer one; a snapshot retains a generation for longer",
                generation=pinned.generation,
            )


def pin_again(head: Manifest, branch_id: str, parent_id: str, root: str) -> Manifest:
    """Pin for a branch whatever another branch, its origin, has pinned here."""
    inherited = head.branches.get(parent_id)
    if inherited is None:
        raise ConflictError(
            "the namespace that is being branched has just released objects of its own origin",
            hint="Create the branch again",
        )
    pin = msgspec.structs.replace(inherited, root=root)
    return msgspec.structs.replace(head, branches={**head.branches, branch_id: pin})


def unpin_branch(head: Manifest, branch_id: str) -> Manifest | None:
    """Remove the pin of a branch; None if it is gone already."""
    if branch_id not in head.branches:
        return None
    left = {other: pin for other, pin in head.branches.items() if other != branch_id}
    return msgspec.structs.replace(head, branches=left)


def first_manifest(source: Manifest, head: Manifest, origin: Origin) -> Manifest:
    """Return the first manifest of a branch of a generation; the publisher stamps it.

    `head` is a later head of the origin: a fence in the inherited log may be newer than the
    generation, slots may have been skipped by a repair since, and the log behind the generation may
    have been written with newer schemas.
    """
    seen = max(source.wal_id_last_seen, source.wal_floor - 1)
    parts = [part for part in source.inherited if part.last_lsn >= source.wal_floor]
    return msgspec.structs.replace(
        _carried_state(source),
        schemas=head.schemas if origin.last_lsn > seen else source.schemas,
        writer_epoch=max(source.writer_epoch, head.writer_epoch),
        compactor_epoch=max(source.compactor_epoch, head.compactor_epoch) + 1,
        wal_floor=source.wal_floor,
        wal_base=source.wal_floor,
        wal_id_last_seen=origin.last_lsn,
        segments=tuple(_at_home(source.segments, origin.root)),
        open_jobs=source.open_jobs,
        below_floor=source.below_floor,
        skipped_lsns=tuple(sorted({*source.skipped_lsns, *head.skipped_lsns})),
        ingests_without_begin=head.ingests_without_begin,
        origin=origin,
        inherited=(*parts, InheritedLog(origin.last_lsn, origin.root)),
        pinned_homes=pinned_homes(source, origin),
        indexes=tuple(_index_at_home(source.indexes, origin.root)),
    )


def pinned_homes(source: Manifest, origin: Origin) -> tuple[str, ...]:
    """Return the folders in which a branch pins objects: its origin, and homes of its origin."""
    needed = needed_homes(source)
    return (origin.root, *(home for home in source.pinned_homes if home in needed))


def _at_home(segments: Iterable[SegmentEntry], root: str) -> Iterable[SegmentEntry]:
    return (s if s.home else msgspec.structs.replace(s, home=root) for s in segments)


def _index_at_home(indexes: Iterable[IndexSpec], root: str) -> Iterable[IndexSpec]:
    """Name the centroids of an origin by their home, as its segments are."""
    return (
        index if index.home or not index.centroids else msgspec.structs.replace(index, home=root)
        for index in indexes
    )


def as_successor(first: Manifest, successor: Successor) -> Manifest:
    """Return the first manifest of a branch that replaces a dropped namespace."""
    return msgspec.structs.replace(
        first,
        generation=successor.generation,
        oldest_retained=successor.generation,
        incarnation=successor.incarnation,
        predecessors=successor.predecessors,
        names=successor.names,
        rename_id=successor.rename_id,
        writer_epoch=max(first.writer_epoch, successor.writer_epoch),
        compactor_epoch=max(first.compactor_epoch, successor.compactor_epoch),
    )


def tombstone(now_ms: int) -> Manifest:
    """Return the first manifest of a branch that is never created; the publisher stamps it."""
    return Manifest(
        generation=1,
        write_id="",
        published_at_ms=0,
        state=NamespaceState.DROPPED,
        dropped=Dropped(now_ms, 1, (), is_cleared=True),
    )


def let_origin_go(manifest: Manifest) -> Manifest | None:
    """Allow the pin in the origin to end; None if it is no branch, or still names segments there.

    A fold alone does not: a branch of rows that are all in the log would lose the state that it was
    made of, which a merge compares with, without any compaction.
    """
    origin = manifest.origin
    if origin is None or manifest.releases_origin or origin.root not in manifest.pinned_homes:
        return None
    if any(segment.home == origin.root for segment in manifest.segments):
        return None
    return msgspec.structs.replace(manifest, releases_origin=True)


def holds_origin(manifest: Manifest) -> bool:
    """Whether a branch needs its origin although it may share no object with it any more."""
    is_cleared = manifest.dropped is not None and manifest.dropped.is_cleared
    return not manifest.releases_origin and not is_cleared


def is_dead(child: Manifest, branch_id: str, home: str) -> bool:
    """Whether the head of a branch's chain shows that its pin in a home is not needed any more."""
    lost = child.origin is None or child.origin.id != branch_id
    return lost or home not in child.pinned_homes


def release_homes(manifest: Manifest, homes: frozenset[str]) -> Manifest | None:
    """Remove homes whose pins are removed; None if there is nothing to remove."""
    left = tuple(home for home in manifest.pinned_homes if home not in homes)
    if left == manifest.pinned_homes:
        return None
    return msgspec.structs.replace(manifest, pinned_homes=left)


def condemned_home(key: str) -> str | None:
    """Return the home that a condemned key represents; None if it is the key of an object."""
    return key.removeprefix(HOMES) if key.startswith(HOMES) else None


def needed_homes(manifest: Manifest) -> set[str]:
    """Return the folders of other namespaces whose objects a generation needs."""
    homes = {segment.home for segment in manifest.segments if segment.home is not None}
    homes |= {index.home for index in manifest.indexes if index.home is not None}
    return homes | inherited_homes(manifest, manifest.wal_floor)


def inherited_homes(manifest: Manifest, floor: int) -> set[str]:
    """Return the folders of the inherited log from a floor on.

    The slot just below the floor is not needed: of a branch, `Origin.at_ms` replaces its date.
    """
    return {part.root for part in manifest.inherited if part.last_lsn >= floor}


def check_is_branch(manifest: Manifest, name: str) -> Origin:
    """Return the origin of a branch; NotFoundError if a namespace is none."""
    if manifest.origin is None:
        raise NotFoundError(f"{name} is not a branch", namespace=name)
    return manifest.origin


def restored_manifest(state: Manifest, now_ms: int) -> Manifest:
    """Return the first manifest of a namespace that is restored; the publisher stamps it.

    `state` has everything folded. Its log is not restored: positions, epochs and write ids of the
    lost namespace mean nothing here. The dedup window and the marks of streams stay, so that a
    batch that was committed before does not count again. Jobs that were open have lost their
    segments.
    """
    base = state.wal_floor + RESTORED_LSNS
    return msgspec.structs.replace(
        _carried_state(state),
        writer_epoch=state.writer_epoch + RESTORED_EPOCHS,
        compactor_epoch=state.compactor_epoch + RESTORED_EPOCHS,
        wal_floor=base,
        wal_base=base,
        wal_id_last_seen=base - 1,
        created_at_ms=now_ms,
    )


def _carried_state(source: Manifest) -> Manifest:
    """Return a first manifest with the state that a branch and a restored namespace both carry."""
    return Manifest(
        generation=1,
        write_id="",
        published_at_ms=0,
        schemas=source.schemas,
        max_parallel_writes=source.max_parallel_writes,
        segments=source.segments,
        dedup=source.dedup,
        dedup_keys_max=source.dedup_keys_max,
        stream_marks=source.stream_marks,
        stream_lineages=source.stream_lineages,
        dropped_lsn=source.dropped_lsn,
        dropped_expired_ms=source.dropped_expired_ms,
        sums=source.sums,
        grace_ms=max(source.grace_ms, source.grace_before_ms),
        indexes=source.indexes,
    )


def restored_successor(first: Manifest, successor: Successor) -> Manifest:
    """Return the first manifest of a restored namespace that replaces a dropped one.

    Its log begins behind both: the dropped one may have been restored itself.
    """
    base = max(first.wal_base, successor.wal_base)
    return msgspec.structs.replace(
        as_successor(first, successor), wal_floor=base, wal_base=base, wal_id_last_seen=base - 1
    )
