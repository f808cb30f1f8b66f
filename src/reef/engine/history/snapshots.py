"""Snapshots: moments that are kept until they are released, or expire.

Taking one costs the same whatever the size: look how far the log goes, and publish one
manifest that says so and pins itself. So a snapshot has everything that was acknowledged before
it was asked for. A handle holds no connection and no lease; it can be sent to other processes,
and goes on to exist without any.
"""

from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from itertools import chain
from typing import Any

from reef.engine.history.moments import History
from reef.engine.reading.segments import SegmentStore
from reef.errors import (
    CorruptionError,
    InvalidInputError,
    Kind,
    NotFoundError,
    ReefError,
    UnavailableError,
)
from reef.formats.manifest import Manifest
from reef.formats.manifest import Snapshot as SnapshotEntry
from reef.manifest.head import Head, HeadFinder, locate
from reef.manifest.publish import Edit, Publisher
from reef.manifest.roots import expired_snapshots
from reef.manifest.snapshots import (
    add_snapshot,
    drop_snapshot,
    extend_snapshot,
    find_snapshot,
    is_active,
)
from reef.paths import Namespace
from reef.stores import Store
from reef.stores.dates import now_to_look
from reef.stores.probe import check_cas

__all__ = ["Snapshot", "list_snapshots", "resolve_snapshot", "take_snapshot"]

NAME_LENGTH_MAX = 128
RESTARTS_MAX = 10


class Snapshot:
    """A pinned generation. Picklable."""

    def __init__(self, store: Store, names: Namespace, entry: SnapshotEntry) -> None:
        self.namespace = names.name
        self.names = names
        """The incarnation of the namespace that it pins."""
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
        """When it ends, by the store's clock; None if it never does. As this handle knows it."""
        at_ms = self._entry.expires_at_ms
        return None if at_ms is None else datetime.fromtimestamp(at_ms / 1000, UTC)

    def extend(self, ttl_s: float | None) -> None:
        """Let it end `ttl_s` from now, or never; NotFoundError if it is over."""
        now_ms = _now_ms(self._store)
        expires_at_ms = _expiry_ms(ttl_s, now_ms)
        head = self._publisher().publish(
            lambda head: extend_snapshot(head, self.id, expires_at_ms, now_ms), dropped=True
        )
        self._entry = find_snapshot(head, self.id, now_ms)

    def release(self) -> None:
        """End it now. One that is over already is fine."""
        self._publisher().publish(lambda head: drop_snapshot(head, self.id), dropped=True)

    def __repr__(self) -> str:
        name = "" if self.name is None else f" {self.name!r}"
        ends = "" if self.expires_at is None else f", until {self.expires_at.isoformat()}"
        return f"<Snapshot{name} of {self.namespace}, generation {self.generation}{ends}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Snapshot) and (self.namespace, self.id) == (
            other.namespace,
            other.id,
        )

    def __hash__(self) -> int:
        return hash((self.namespace, self.id))

    def _publisher(self) -> Publisher:
        check_cas(self._store)  # whoever has the handle may have come without the register (H23)
        return Publisher(self._store, self.names)


def take_snapshot(
    store: Store,
    publisher: Publisher,
    segments: SegmentStore,
    namespace: Namespace,
    *,
    name: str | None,
    ttl_s: float | None,
    generation: int | None,
) -> Snapshot:
    """Pin everything that is committed, or a generation that is still kept."""
    _check_name(name)
    now_ms = _now_ms(store)
    entry = SnapshotEntry(
        id=store.runtime.ulid(),
        generation=0 if generation is None else generation,
        name=name,
        expires_at_ms=_expiry_ms(ttl_s, now_ms),
    )
    found_head: Head | None = publisher.heads.found  # it was located just now
    for _ in range(RESTARTS_MAX):
        head, found_head = (found_head or publisher.heads.find()).manifest, None
        pinned, last_lsn = None, None
        if generation is None:
            last_lsn = History(store, namespace, segments).end_of_log(head)
        else:
            pinned = _load_active(publisher.heads, head, generation, now_ms)
        head = publisher.publish(_taking(entry, now_ms, last_lsn, pinned))
        found = [snapshot for snapshot in head.snapshots if snapshot.id == entry.id]
        if found:
            return Snapshot(store, namespace, found[0])
    raise UnavailableError(f"{namespace.name} is folded faster than a snapshot can be taken")


def _taking(
    entry: SnapshotEntry, now_ms: int, last_lsn: int | None, pinned: Manifest | None
) -> Edit:
    return lambda head: add_snapshot(head, entry, now_ms, last_lsn, pinned)


def _load_active(heads: HeadFinder, head: Manifest, generation: int, now_ms: int) -> Manifest:
    """Return a generation that can be pinned; the edit looks again at the head it meets."""
    if isinstance(generation, bool) or not isinstance(generation, int):
        raise InvalidInputError(
            f"generation={generation!r} is not a number", kind=Kind.INVALID_OPTION
        )
    if is_active(head, generation, now_ms):
        try:
            return head if generation == head.generation else heads.load(generation)
        except NotFoundError:
            pass
    raise NotFoundError(
        f"generation {generation} is not active: those from {head.oldest_retained} to "
        f"{head.generation} are, and those that snapshots pin",
        kind=Kind.COLLECTED if generation <= head.generation else Kind.NOT_FOUND,
        generation=generation,
    )


def list_snapshots(store: Store, name: str) -> list[Snapshot]:
    """Return the snapshots that have not expired, the oldest first."""
    current = locate(store, name)
    now_ms = int(now_to_look(store) * 1000)
    found = []
    for heads in (*_earlier(store, current, []), current):
        head = heads.found.manifest
        expired = expired_snapshots(head, now_ms)
        alive = [entry for entry in head.snapshots if entry.id not in expired]
        found += [Snapshot(store, heads.names, entry) for entry in alive]
    return found


def _earlier(store: Store, current: HeadFinder, damage: list[ReefError]) -> Iterator[HeadFinder]:
    """Yield the heads of earlier incarnations of a name that a sweep has not finished with.

    One whose manifests are damaged or lost has no snapshots that can be read, and does not
    concern the others; `damage` is given the error.
    """
    for number in current.found.manifest.predecessors:
        heads = HeadFinder(store, current.names.at(number))
        try:
            heads.find(fallback=True, dropped=True)
        except (CorruptionError, NotFoundError) as error:
            damage.append(error)
            continue
        yield heads


def resolve_snapshot(store: Store, name: str, wanted: Any) -> tuple[HeadFinder, SnapshotEntry]:
    """Return the chain and the entry of a handle, an id or a name; NotFoundError if expired.

    A snapshot of an earlier incarnation is found too, after those of the current one.
    """
    if isinstance(wanted, Snapshot):
        if wanted.namespace != name:
            raise InvalidInputError(
                f"{wanted!r} is not a snapshot of {name}", kind=Kind.INVALID_OPTION
            )
        wanted = wanted.id
    if not isinstance(wanted, str):
        raise InvalidInputError(
            f"snapshot={wanted!r} is neither a snapshot, nor an id or a name of one",
            kind=Kind.INVALID_OPTION,
        )
    current, now_ms = locate(store, name), _now_ms(store)
    damage: list[ReefError] = []
    for heads in chain([current], _earlier(store, current, damage)):
        with suppress(NotFoundError):
            return heads, find_snapshot(heads.found.manifest, wanted, now_ms)
    if damage:  # it may be one of those that cannot be read
        raise damage[0]
    return current, find_snapshot(current.found.manifest, wanted, now_ms)


def _now_ms(store: Store) -> int:
    """Return the store's time: all ends are by its clock (H30)."""
    return int(store.now() * 1000)


def _expiry_ms(ttl_s: Any, now_ms: int) -> int | None:
    if ttl_s is None:
        return None
    if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not 0 < ttl_s < 1e10:
        raise InvalidInputError(
            f"ttl_s={ttl_s!r} is not a number of seconds", kind=Kind.INVALID_OPTION
        )
    return now_ms + int(ttl_s * 1000)


def _check_name(name: object) -> None:
    if name is None:
        return
    if not isinstance(name, str) or not 1 <= len(name) <= NAME_LENGTH_MAX or not name.isprintable():
        raise InvalidInputError(
            f"{name!r} is not the name of a snapshot",
            kind=Kind.INVALID_OPTION,
            hint=f"1 to {NAME_LENGTH_MAX} printable characters",
        )
