"""Snapshots: generations that stay readable until they are released or expire.

Taking a snapshot costs the same for any size of data: find the end of the log, and publish one
manifest that records it and pins itself. So a snapshot contains everything that was acknowledged
before the call. A `Snapshot` handle holds no connection and no lease; it can be pickled, and the
snapshot outlives it.

`generation_records` lists the retained generations, and the changes of each.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, pairwise
from typing import Any

from reef.engine.context import NamespaceContext
from reef.engine.history.as_of import ConcurrentSweep, History
from reef.engine.read.caches import ByteCache
from reef.engine.read.segments import SegmentStore
from reef.errors import (
    CorruptionError,
    ErrorKind,
    InvalidInputError,
    NotFoundError,
    ReefError,
    UnavailableError,
)
from reef.formats.manifest import Manifest, SnapshotEntry
from reef.manifest.edits import (
    add_snapshot,
    drop_snapshot,
    extend_snapshot,
    find_snapshot,
    is_active,
)
from reef.manifest.head import (
    Edit,
    HeadFinder,
    ManifestHead,
    Publisher,
    locate,
    locate_folder,
    refuse_dropped,
)
from reef.manifest.roots import expired_snapshots
from reef.paths import Namespace
from reef.stores import Store
from reef.stores.base import current_time_s
from reef.stores.probe import check_cas

NAME_LENGTH_MAX = 128
RESTARTS_MAX = 10


class Snapshot:
    """A pinned generation. Picklable."""

    def __init__(self, store: Store, names: Namespace, entry: SnapshotEntry) -> None:
        self.namespace = names.name
        self._names = names
        """The incarnation of the namespace that is pinned."""
        self._store = store
        self._entry = entry

    @property
    def id(self) -> str:
        return self._entry.id

    @property
    def name(self) -> str | None:
        return self._entry.name

    @property
    def generation(self) -> int:
        return self._entry.generation

    @property
    def expires_at(self) -> datetime | None:
        """When the snapshot expires, by the store's clock; None if never. Not refreshed."""
        at_ms = self._entry.expires_at_ms
        return None if at_ms is None else datetime.fromtimestamp(at_ms / 1000, UTC)

    def extend(self, ttl_s: float | None) -> None:
        """Set the expiry to `ttl_s` from now, or to never; NotFoundError if it has expired."""
        now_ms = _now_ms(self._store)
        expires_at_ms = _expiry_ms(ttl_s, now_ms)
        head = self._publisher().publish(
            lambda head: extend_snapshot(head, self.id, expires_at_ms, now_ms), dropped=True
        )
        self._entry = find_snapshot(head, self.id, now_ms)

    def release(self) -> None:
        """Release the snapshot. Does nothing if it was released or has expired."""
        self._publisher().publish(lambda head: drop_snapshot(head, self.id), dropped=True)

    def __repr__(self) -> str:
        name = "" if self.name is None else f" {self.name!r}"
        ends = "" if self.expires_at is None else f", until {self.expires_at.isoformat()}"
        return f"<Snapshot{name} of {self.namespace}, generation {self.generation}{ends}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Snapshot) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[str, str]:
        return self._names.folder, self.id  # the namespace may be renamed, its folder stays

    def _publisher(self) -> Publisher:
        check_cas(self._store)  # the handle may have been unpickled without the register (H23)
        return NamespaceContext(self._store, self._names).publisher


def take_snapshot(
    store: Store,
    publisher: Publisher,
    segments: SegmentStore,
    namespace: Namespace,
    *,
    name: str | None,
    ttl_s: float | None,
    generation: int | None,
    snapshot_id: str | None = None,
) -> Snapshot:
    """Pin the committed state, or a generation that is still retained."""
    if name is not None:
        _check_name(name)
    now_ms = _now_ms(store)
    entry = SnapshotEntry(
        id=snapshot_id or store.runtime.ulid(),
        generation=0 if generation is None else generation,
        name=name,
        expires_at_ms=_expiry_ms(ttl_s, now_ms),
    )
    located: ManifestHead | None = publisher.heads.found
    for _ in range(RESTARTS_MAX):
        head, located = (located or publisher.heads.find()).manifest, None
        pinned, last_lsn = None, None
        if generation is None:
            last_lsn = History(store, namespace, segments).end_of_log(head)
        else:
            pinned = _load_active(publisher.heads, head, generation, now_ms)
        head = publisher.publish(_adding(entry, now_ms, last_lsn, pinned))
        added = [snapshot for snapshot in head.snapshots if snapshot.id == entry.id]
        if added:
            return Snapshot(store, namespace, added[0])
    raise UnavailableError(f"{namespace.name} is folded faster than a snapshot can be taken")


def release_snapshot(store: Store, heads: HeadFinder, snapshot_id: str) -> None:
    """Release a snapshot of an incarnation; does nothing if it is gone already."""
    publisher = NamespaceContext(store, heads.names, heads=heads).publisher
    publisher.publish(lambda head: drop_snapshot(head, snapshot_id), dropped=True)


def check_snapshot(name: str, ttl_s: float | None) -> None:
    """Raise InvalidInputError unless these are the name and the time to live of a snapshot."""
    _check_name(name)
    _expiry_ms(ttl_s, 0)


def _adding(
    entry: SnapshotEntry, now_ms: int, last_lsn: int | None, pinned: Manifest | None
) -> Edit:
    return lambda head: add_snapshot(head, entry, now_ms, last_lsn, pinned)


def _load_active(heads: HeadFinder, head: Manifest, generation: int, now_ms: int) -> Manifest:
    """Load a generation that can be pinned; the edit checks again on the head it is applied to."""
    if isinstance(generation, bool) or not isinstance(generation, int):
        raise InvalidInputError(
            f"generation={generation!r} is not an integer", kind=ErrorKind.INVALID_OPTION
        )
    if is_active(head, generation, now_ms):
        try:
            return head if generation == head.generation else heads.load(generation)
        except NotFoundError:
            pass
    raise NotFoundError(
        f"generation {generation} is not active; generations {head.oldest_retained} to "
        f"{head.generation} are, and those pinned by snapshots",
        kind=ErrorKind.COLLECTED if generation <= head.generation else ErrorKind.NOT_FOUND,
        generation=generation,
    )


def list_snapshots(store: Store, name: str) -> list[Snapshot]:
    """Return the unexpired snapshots, oldest first; of a dropped name too, if it has any."""
    current = locate(store, name, dropped=True)
    now_ms = int(current_time_s(store) * 1000)
    snapshots = []
    for heads in (*_earlier(store, current, []), current):
        head = heads.found.manifest
        expired = expired_snapshots(head, now_ms)
        alive = [entry for entry in head.snapshots if entry.id not in expired]
        snapshots += [Snapshot(store, heads.names, entry) for entry in alive]
    if not snapshots:
        refuse_dropped(current.names, current.found.manifest)
    return snapshots


def _earlier(store: Store, current: HeadFinder, damage: list[ReefError]) -> Iterator[HeadFinder]:
    """Yield the heads of earlier incarnations of a name that are not fully swept.

    An incarnation whose manifests are damaged or lost is skipped, and its error is appended to
    `damage`.
    """
    for number in current.found.manifest.predecessors:
        heads = NamespaceContext(store, current.names.at(number)).heads
        try:
            heads.find(fallback=True, dropped=True)
        except (CorruptionError, NotFoundError) as error:
            damage.append(error)
            continue
        yield heads


def resolve_snapshot(store: Store, name: str, snapshot: Any) -> tuple[HeadFinder, SnapshotEntry]:
    """Find a snapshot by handle, id or name; NotFoundError if it was released or has expired.

    Snapshots of the current incarnation take precedence over those of earlier ones. That one may be
    dropped: its snapshots stay until they are released or expire.
    """
    if not isinstance(snapshot, Snapshot | str):
        raise InvalidInputError(
            f"snapshot={snapshot!r} is neither a Snapshot nor the id or name of one",
            kind=ErrorKind.INVALID_OPTION,
        )
    current, now_ms = locate(store, name, dropped=True), _now_ms(store)
    snapshot_id = _id_in(current.names, snapshot) if isinstance(snapshot, Snapshot) else snapshot
    damage: list[ReefError] = []
    for heads in chain([current], _earlier(store, current, damage)):
        with suppress(NotFoundError):
            return heads, find_snapshot(heads.found.manifest, snapshot_id, now_ms)
    if damage:  # the snapshot may belong to an incarnation that cannot be read
        raise damage[0]
    refuse_dropped(current.names, current.found.manifest)
    return current, find_snapshot(current.found.manifest, snapshot_id, now_ms)


def current_name(store: Store, snapshot: Snapshot) -> str:
    """Return the name of a snapshot's namespace, which may have had another one then."""
    return locate_folder(store, snapshot._names.folder).names.name


def _id_in(names: Namespace, snapshot: Snapshot) -> str:
    """Return the id of a snapshot of this namespace, which may have had another name then."""
    if snapshot._names.folder != names.folder:
        raise InvalidInputError(
            f"{snapshot!r} is not a snapshot of {names.name}", kind=ErrorKind.INVALID_OPTION
        )
    return snapshot.id


def _now_ms(store: Store) -> int:
    """Return the store's time, by which snapshots expire (H30)."""
    return int(store.now() * 1000)


def _expiry_ms(ttl_s: Any, now_ms: int) -> int | None:
    if ttl_s is None:
        return None
    if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not 0 < ttl_s < 1e10:
        raise InvalidInputError(
            f"ttl_s={ttl_s!r} is not a number of seconds", kind=ErrorKind.INVALID_OPTION
        )
    return now_ms + int(ttl_s * 1000)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not 1 <= len(name) <= NAME_LENGTH_MAX or not name.isprintable():
        raise InvalidInputError(
            f"{name!r} is not a valid name of a snapshot",
            kind=ErrorKind.INVALID_OPTION,
            hint=f"1 to {NAME_LENGTH_MAX} printable characters",
        )


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
        described = [_generation_record(manifests[0], "oldest retained")]
        described += [
            _generation_record(two, describe(one, two)) for one, two in pairwise(manifests)
        ]
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


def _generation_record(manifest: Manifest, change: str) -> GenerationRecord:
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
