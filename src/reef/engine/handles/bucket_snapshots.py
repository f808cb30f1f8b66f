"""Snapshots of a whole bucket: one of every namespace, recorded together in the catalog.

    1  record   the name, and the id of the snapshot that each namespace is going to have
    2  pin      every namespace, under its id
    3  confirm  the record, with the snapshots that were taken; from here on they can be found

A process that dies in between leaves a record that is not confirmed. It names all pins, so that
they can be released: by `release_all`, or by `take_all` of the same name an hour later. If its
record was removed meanwhile, a process that is still alive releases what it has pinned.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from reef.engine.context import NamespaceContext
from reef.engine.history.snapshots import (
    Snapshot,
    check_snapshot,
    release_snapshot,
    resolve_snapshot,
    take_snapshot,
)
from reef.engine.registry import Registry
from reef.errors import ConflictError, NotFoundError
from reef.manifest.head import HeadFinder, locate
from reef.paths import Namespace
from reef.stores.base import current_time_s

if TYPE_CHECKING:
    from reef.catalog import Catalog, WriteSession
    from reef.engine.handles.database import Database

SNAPSHOTS = "snapshot/"
"""Key prefix of the records in the catalog."""
SILENT_MS = 3_600_000
"""A record that is not confirmed after this time was left by a process that died."""


@dataclass(frozen=True, slots=True)
class BucketSnapshot:
    """A snapshot of all namespaces, as the catalog has it."""

    name: str
    taken_at: datetime | None
    """By the store's clock; None if an earlier release has taken it."""
    is_complete: bool
    """Whether it was confirmed. One that was not is being taken, or its process has died."""
    namespaces: tuple[str, ...]
    """Names when it was taken."""


@dataclass(frozen=True, slots=True)
class _Record:
    """A record in the catalog."""

    pins: dict[str, tuple[str, str | None]]
    """By namespace: the id of its snapshot, and the folder; None in records of earlier releases."""
    at_ms: int = 0
    is_complete: bool = True

    @classmethod
    def of(cls, value: dict[str, Any]) -> "_Record":
        if not isinstance(value.get("pins"), dict):  # {namespace: id}
            return cls({namespace: (found, None) for namespace, found in value.items()})
        pins = {namespace: (pin[0], pin[1]) for namespace, pin in value["pins"].items()}
        return cls(pins, value["at_ms"], value["complete"])

    def value(self) -> dict[str, Any]:
        pins = {namespace: list(pin) for namespace, pin in self.pins.items()}
        return {"pins": pins, "at_ms": self.at_ms, "complete": self.is_complete}


# --- take -------------------------------------------------------------------------------


def take_all(db: "Database", name: str, ttl_s: float | None) -> dict[str, Snapshot]:
    """Take a snapshot of every namespace; ConflictError if there is one of that name.

    A namespace that is dropped meanwhile is left out. If it fails, what was pinned is released.
    """
    check_snapshot(name, ttl_s)
    catalog, key, runtime = _catalog(db), f"{SNAPSHOTS}{name}", db.store.runtime
    replaced = _replaceable(db, catalog.get_latest(key), name)
    publishers = {}
    for namespace in db.namespaces():
        with suppress(NotFoundError):
            publishers[namespace] = db._namespaces.publisher(namespace)
    pins: dict[str, tuple[str, str | None]] = {
        namespace: (runtime.ulid(), publisher.heads.names.root)
        for namespace, publisher in publishers.items()
    }
    record = _Record(pins, int(db.store.now() * 1000), is_complete=False)
    catalog.transact(lambda session: _exchange(session, name, replaced, record.value()))
    runtime.reach("snapshots recorded")
    taken: dict[str, Snapshot] = {}
    try:
        for namespace, publisher in publishers.items():
            names = publisher.heads.names
            with suppress(NotFoundError):
                taken[namespace] = take_snapshot(
                    db.store,
                    publisher,
                    db._segments(names),
                    names,
                    name=name,
                    ttl_s=ttl_s,
                    generation=None,
                    snapshot_id=pins[namespace][0],
                )
        runtime.reach("snapshots pinned")
        done = replace(record, pins={of: pins[of] for of in taken}, is_complete=True)
        catalog.transact(lambda session: _exchange(session, name, record.value(), done.value()))
    except BaseException:
        _release(db, record)
        with suppress(ConflictError):
            catalog.transact(lambda session: _exchange(session, name, record.value(), None))
        raise
    return taken


def _replaceable(db: "Database", value: Any, name: str) -> Any:
    """Return a record that may be replaced, or None for no record; ConflictError otherwise.

    All its snapshots were released or have expired, or the process that took them has died.
    """
    if value is None:
        return None
    record = _Record.of(value)
    if not record.is_complete and db.store.now() * 1000 - record.at_ms > SILENT_MS:
        _release(db, record)
    elif not record.is_complete or any(True for _ in _pinned(db, record)):
        raise _name_taken_error(name)
    return value


def _exchange(session: "WriteSession", name: str, before: Any, after: Any) -> None:
    """Replace a record, unless another process was first."""
    if session.get(SNAPSHOTS + name) != before:
        raise _name_taken_error(name)
    if after is None:
        session.delete(SNAPSHOTS + name)
    else:
        session.put(SNAPSHOTS + name, after)


# --- find, list, release ----------------------------------------------------------------


def find_all(db: "Database", name: str) -> dict[str, Snapshot]:
    """Return the recorded snapshots that are still there; NotFoundError if there is no record."""
    record = _load(db, name)
    if not record.is_complete:
        raise NotFoundError(
            f"the snapshot {name!r} of the bucket is not complete",
            hint="Wait for the process that takes it; if that has died, release it with "
            "release_snapshot_all",
            snapshot=name,
        )
    return dict(_readable(db, record))


def list_all(db: "Database") -> list[BucketSnapshot]:
    """Return all records, by name."""
    snapshots = []
    for key, value in _catalog(db).scan_latest(prefix=SNAPSHOTS):
        record = _Record.of(value)
        at = datetime.fromtimestamp(record.at_ms / 1000, UTC) if record.at_ms else None
        name = key.decode().removeprefix(SNAPSHOTS)
        snapshots.append(BucketSnapshot(name, at, record.is_complete, tuple(sorted(record.pins))))
    return snapshots


def release_all(db: "Database", name: str) -> None:
    """Release the snapshots of a record, and remove it; NotFoundError if there is none."""
    record = _load(db, name)
    _release(db, record)
    catalog = _catalog(db)

    def remove(session: "WriteSession") -> None:
        value = session.get(SNAPSHOTS + name)
        if value is not None and _Record.of(value) == record:
            session.delete(SNAPSHOTS + name)

    catalog.transact(remove)


def _load(db: "Database", name: str) -> _Record:
    check_snapshot(name, None)
    value = _catalog(db).get_latest(f"{SNAPSHOTS}{name}")
    if value is None:
        raise NotFoundError(f"there is no snapshot {name!r} of the bucket", snapshot=name)
    return _Record.of(value)


def _readable(db: "Database", record: _Record) -> Iterator[tuple[str, Snapshot]]:
    """Yield the snapshots that can be read, by the current name of each namespace."""
    for _, names, snapshot_id in _pinned(db, record):
        with suppress(NotFoundError):
            heads, entry = resolve_snapshot(db.store, names.name, snapshot_id)
            yield names.name, Snapshot(db.store, heads.names, entry)


def _pinned(db: "Database", record: _Record) -> Iterator[tuple[str, Namespace, str]]:
    """Yield the pins that are still there: the former name, the current one, and the id."""
    now_ms = int(current_time_s(db.store) * 1000)
    for namespace, (snapshot_id, root) in record.pins.items():
        with suppress(NotFoundError):
            heads = _locate(db, namespace, root)
            head = heads.found.manifest
            there = [one for one in head.snapshots if one.id == snapshot_id]
            if any(one.expires_at_ms is None or one.expires_at_ms > now_ms for one in there):
                folder = heads.names.folder
                current = head.name_in(folder)
                home = "" if current == folder else folder
                yield namespace, Namespace(current, heads.names.incarnation, home), snapshot_id


def _release(db: "Database", record: _Record) -> None:
    """Release every pin of a record, whatever has become of its namespace."""
    for namespace, (snapshot_id, root) in record.pins.items():
        with suppress(NotFoundError):
            release_snapshot(db.store, _locate(db, namespace, root), snapshot_id)


def _locate(db: "Database", namespace: str, root: str | None) -> HeadFinder:
    """Return the incarnation that was pinned: it may be renamed, dropped or succeeded since."""
    if root is None:
        return locate(db.store, namespace, dropped=True)
    heads = NamespaceContext(db.store, Namespace.of_root(root)).heads
    heads.find(dropped=True)
    return heads


def _catalog(db: "Database") -> "Catalog":
    return (db._registry or Registry(db.store)).catalog


def _name_taken_error(name: str) -> ConflictError:
    return ConflictError(
        f"there is a snapshot {name!r} of the bucket already",
        hint="Release it with release_snapshot_all, or choose another name",
    )
