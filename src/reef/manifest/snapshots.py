"""Snapshots and cursors: long-lived pins, as edits of the manifest. Pure functions.

A snapshot pins a generation; a cursor pins the log from where it stands. Both may be made only
on what is still there: a generation is *active* if it is retained or pinned already, and names
nothing that a sweep has condemned. That is asked of the very head that the edit is applied to,
so a sweep comes either before, and the edit is refused, or after, and finds the pin.

A snapshot that has expired pins nothing any more, from the moment the store's clock says so
(H30). Its entry goes with the next edit here, or with the sweep that takes what it held; so an
entry that is still there has lost nothing.
"""

from collections.abc import Iterator

import msgspec

from reef.errors import ConflictError, Kind, NotFoundError
from reef.formats.manifest import CursorEntry, Manifest, Snapshot
from reef.manifest.roots import expired_snapshots, pinned_generations

__all__ = [
    "add_snapshot",
    "check_active",
    "drop_cursor",
    "drop_snapshot",
    "extend_snapshot",
    "find_snapshot",
    "is_active",
    "set_cursor",
]


# --- what can be pinned -------------------------------------------------------------


def is_active(head: Manifest, generation: int, now_ms: int) -> bool:
    """Whether a generation is retained, or pinned by a snapshot or a branch."""
    if generation in head.skipped_generations:
        return False
    retained = head.oldest_retained <= generation <= head.generation
    return retained or generation in pinned_generations(head, now_ms)


def check_active(head: Manifest, wanted: Manifest, now_ms: int) -> None:
    """Raise unless all that a generation needs is there, and stays while it is pinned."""
    if not is_active(head, wanted.generation, now_ms):
        raise NotFoundError(
            f"generation {wanted.generation} is not kept any more; "
            f"the oldest that is, is {head.oldest_retained}",
            kind=Kind.COLLECTED,
            hint="Name a newer one; a snapshot keeps one for longer",
            generation=wanted.generation,
        )
    for key in _condemned_of(head, wanted):
        raise NotFoundError(
            f"generation {wanted.generation} needs {key}, which a sweep has condemned",
            kind=Kind.COLLECTED,
            hint="Name a newer one; a snapshot keeps one for longer",
            generation=wanted.generation,
        )


def _condemned_of(head: Manifest, wanted: Manifest) -> Iterator[str]:
    """Yield the condemned keys that a generation needs. Numbers sort as names do."""
    segments = {f"segments/{s.id}.seg" for s in wanted.segments if s.home is None}
    manifest = f"manifest/{wanted.generation:020}."
    slots = f"wal/{wanted.wal_floor - 1:020}.wal"
    for condemned in head.condemned:
        key = condemned.key
        in_log = key.startswith("wal/") and key >= slots
        if key in segments or key.startswith(manifest) or in_log:
            yield key


# --- snapshots ----------------------------------------------------------------------


def add_snapshot(
    head: Manifest, wanted: Snapshot, now_ms: int, last_seen: int | None, pinned: Manifest | None
) -> Manifest | None:
    """Pin a generation: the one that this edit publishes, or one that was loaded.

    The new one says that the log is known up to `last_seen`, and so contains it. None if the
    floor is already past that: the log has to be looked at again.
    """
    alive = _alive(head, now_ms)
    if wanted.name is not None and any(other.name == wanted.name for other in alive):
        raise ConflictError(
            f"there is a snapshot {wanted.name!r} already",
            hint="Release it, or choose another name",
        )
    if pinned is not None:
        check_active(head, pinned, now_ms)
        return msgspec.structs.replace(head, snapshots=(*alive, wanted))
    if last_seen is None or last_seen < head.wal_floor - 1:
        return None
    wanted = msgspec.structs.replace(wanted, generation=head.generation + 1)
    return msgspec.structs.replace(
        head,
        snapshots=(*alive, wanted),
        wal_id_last_seen=max(head.wal_id_last_seen, last_seen),
    )


def find_snapshot(head: Manifest, wanted: str, now_ms: int) -> Snapshot:
    """Return the snapshot with this id or name; NotFoundError if it is over."""
    for snapshot in _alive(head, now_ms):
        if wanted in (snapshot.id, snapshot.name):
            return snapshot
    raise NotFoundError(
        f"there is no snapshot {wanted}: it was released, or it has expired",
        kind=Kind.COLLECTED,
        hint="Take another one",
        snapshot=wanted,
    )


def extend_snapshot(
    head: Manifest, snapshot_id: str, expires_at_ms: int | None, now_ms: int
) -> Manifest | None:
    """Let a snapshot expire at another time, if it is not over."""
    found = find_snapshot(head, snapshot_id, now_ms)
    extended = msgspec.structs.replace(found, expires_at_ms=expires_at_ms)
    if extended == found:
        return None
    return msgspec.structs.replace(
        head,
        snapshots=tuple(extended if s.id == found.id else s for s in _alive(head, now_ms)),
    )


def drop_snapshot(head: Manifest, snapshot_id: str) -> Manifest | None:
    """Release a snapshot; None if it is over already."""
    left = tuple(s for s in head.snapshots if s.id != snapshot_id)
    if len(left) == len(head.snapshots):
        return None
    return msgspec.structs.replace(head, snapshots=left)


def _alive(head: Manifest, now_ms: int) -> tuple[Snapshot, ...]:
    expired = expired_snapshots(head, now_ms)
    return tuple(s for s in head.snapshots if s.id not in expired)


# --- cursors ------------------------------------------------------------------------


def set_cursor(
    head: Manifest, name: str, lsn: int, before: int | None, start: Manifest
) -> Manifest | None:
    """Register a cursor, or move it on from `before`; None if it stands there already.

    The newest generation from which the log can be judged at `lsn` + 1 is the one that this
    edit publishes, unless a fold has passed the cursor: then it is `start`, if that is kept,
    or the one that the cursor has.
    """
    known = head.cursors.get(name)
    if known is not None and known.lsn == lsn:
        return None
    if (known.lsn if known is not None else None) != before:
        raise _moved(name, known)
    if head.wal_floor <= lsn + 1:
        generation = head.generation + 1
    elif is_retained(head, start):
        generation = start.generation
    elif known is not None:
        generation = known.generation
    else:
        raise NotFoundError(
            f"the log is not kept from LSN {lsn + 1} on any more", kind=Kind.COLLECTED, lsn=lsn + 1
        )
    cursors = {**head.cursors, name: CursorEntry(lsn, generation)}
    return msgspec.structs.replace(head, cursors=cursors)


def is_retained(head: Manifest, start: Manifest) -> bool:
    """Whether the log from a generation's floor on is kept for it."""
    return head.oldest_retained <= start.generation <= head.generation


def drop_cursor(head: Manifest, name: str) -> Manifest | None:
    """Forget a cursor; None if there is none."""
    if name not in head.cursors:
        return None
    left = {other: entry for other, entry in head.cursors.items() if other != name}
    return msgspec.structs.replace(head, cursors=left)


def _moved(name: str, known: CursorEntry | None) -> ConflictError | NotFoundError:
    if known is None:
        return NotFoundError(f"the cursor {name!r} was dropped", hint="Register it again")
    return ConflictError(
        f"the cursor {name!r} stands at LSN {known.lsn}: another process has moved it",
        hint="One process at a time reads by a cursor; open it again to go on from there",
        lsn=known.lsn,
    )
