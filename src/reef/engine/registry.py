"""The registry of a bucket: its namespaces and their states, in the catalog at `catalog/`.

The manifest of a namespace decides whether it exists; the registry follows, so that a listing of
ten thousand namespaces costs a few requests. A process that creates, drops or undrops a namespace
first adds an open change to its entry, then publishes, then closes the change. Closing the last
open change stores the state that the manifest has by then. So an entry without open changes is
right, and one with open changes is looked up in its manifest; a process that dies in between leaves
an entry that is looked up.

The first change in a bucket without a registry, or whose registry was lost, adds all listed
namespaces in the same transaction. While the registry is damaged no name is created or dropped,
because its entry could not be changed; `rebuild` replaces it. Repairs and rebuilds of namespaces
go ahead without it, and register a change like the others: they may bring a dropped name back.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from reef.engine.running_jobs import JobBoard, compact_if_due
from reef.engine.stats import list_states, namespace_state
from reef.errors import CorruptionError, ReefError
from reef.formats.manifest import NamespaceState
from reef.stores import Store

if TYPE_CHECKING:  # loaded when the registry is used: most programs open a bucket and one namespace
    from reef.catalog import Catalog, WriteSession

REGISTRY = "catalog"
"""Its prefix in a bucket."""
COMPLETE = "registry"
"""The key that is present once all namespaces are registered."""
PREFIX = "namespace/"
STALE_MS = 3600 * 1000
"""A rebuild closes changes that were opened longer ago than this: their process is gone."""

Entry = dict[str, Any]


class Registry:
    """The namespaces of one bucket, by name. Safe for threads, and picklable with its store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @cached_property
    def catalog(self) -> "Catalog":
        """The catalog that holds it."""
        from reef.catalog import JSON, Catalog

        return Catalog(self._store, prefix=REGISTRY, codec=JSON)

    @cached_property
    def board(self) -> JobBoard:
        """The jobs that run in this bucket."""
        return JobBoard(self.catalog)

    def __reduce__(self) -> tuple[Any, ...]:
        return Registry, (self._store,)

    # --- reading ------------------------------------------------------------------
    def names(self, state: NamespaceState) -> list[str] | None:
        """Return the names in a state; None if there is no complete, intact registry."""
        try:
            stored = {key.decode(): value for key, value in self.catalog.scan_latest()}
        except CorruptionError:  # the caller lists the bucket instead
            return None
        if COMPLETE not in stored:
            return None
        entries = {k.removeprefix(PREFIX): v for k, v in stored.items() if k.startswith(PREFIX)}
        return sorted(name for name, e in entries.items() if self._state(name, e) == state)

    def _state(self, name: str, entry: Entry) -> str | None:
        return namespace_state(self._store, name) if entry["changes"] else entry["state"]

    def has_drop(self, name: str) -> bool:
        """Whether a namespace is registered as dropped, without a look at its manifests.

        Where those are lost this is the only trace of the drop.
        """
        try:
            entry = self.catalog.get_latest(PREFIX + name)
        except CorruptionError:
            return False
        return bool(entry) and not entry["changes"] and entry["state"] == NamespaceState.DROPPED

    # --- changing -----------------------------------------------------------------
    @contextmanager
    def changing(self, name: str) -> Iterator[None]:
        """Register a change of a namespace before the block, and its new state after it.

        If the block fails, its publish may still land: the change stays open.
        """
        change = self._store.runtime.ulid()
        self._open_change(name, change)
        self._store.runtime.reach("registry noted")
        yield
        self._store.runtime.reach("registry behind")
        with suppress(ReefError):  # the change is published; until closed, the entry is looked up
            self._close_change(name, change)
            compact_if_due(self.catalog)

    @contextmanager
    def recovering(self, name: str) -> Iterator[None]:
        """Register a change like `changing`, for a repair or rebuild.

        A damaged registry does not stop it: `rebuild` derives that from the manifests.
        """
        change = self._store.runtime.ulid()
        try:
            self._open_change(name, change)
        except CorruptionError:
            yield
            return
        self._store.runtime.reach("registry noted")
        yield
        self._store.runtime.reach("registry behind")
        with suppress(ReefError):
            self._close_change(name, change)

    def _open_change(self, name: str, change: str) -> None:
        try:
            is_missing = self.catalog.get_latest(COMPLETE) is None
            listed = list_states(self._store) if is_missing else {}  # long, so before the session
            now_ms = int(self._store.now() * 1000)
            self.catalog.transact(lambda session: self._note(session, name, change, now_ms, listed))
        except CorruptionError as error:
            raise CorruptionError(
                f"the registry of namespaces is damaged: {error.message}",
                hint="Rebuild it from the namespaces: reef catalog rebuild URL",
                **error.context,
            ) from error

    def _note(
        self,
        session: "WriteSession",
        name: str,
        change: str,
        now_ms: int,
        listed: dict[str, NamespaceState],
    ) -> None:
        if session.get(COMPLETE) is None:  # if it was present above, it was lost since
            listed = listed or list_states(self._store)
            self._add_missing(session, listed, self._entries(session))
        entry = session.get(PREFIX + name) or {"state": None, "changes": {}}
        entry["changes"][change] = now_ms
        session.put(PREFIX + name, entry)

    def _close_change(self, name: str, change: str) -> None:
        def close(session: "WriteSession") -> None:
            entry = session.get(PREFIX + name) or {"state": None, "changes": {}}
            entry["changes"].pop(change, None)
            if not entry["changes"]:
                # Read after the session began: all changes that it does not show are published.
                entry["state"] = namespace_state(self._store, name)
            _put(session, name, entry)

        self.catalog.transact(close)

    def _add_missing(
        self,
        session: "WriteSession",
        listed: dict[str, NamespaceState],
        known: dict[str, Entry],
    ) -> None:
        """Add listed namespaces that have no entry: an entry may be newer than the listing."""
        new = {name: state for name, state in listed.items() if name not in known}
        for key, entry in _entries_of(new).items():
            session.put(key, entry)

    def _entries(self, session: "WriteSession") -> dict[str, Entry]:
        stored = session.scan_range(prefix=PREFIX)
        return {key.decode().removeprefix(PREFIX): entry for key, entry in stored}

    # --- rebuilding ---------------------------------------------------------------
    def rebuild(self) -> dict[str, NamespaceState]:
        """Rebuild the registry from the namespaces of the bucket; return them.

        An intact registry is corrected. A damaged one is replaced, without the jobs on its board.
        """
        if self.catalog.verify().problems:
            with suppress(CorruptionError):  # UnsupportedFormatError: written by a newer release
                self.catalog.scan_latest()
            self.catalog.recreate(lambda: _entries_of(list_states(self._store)))
        listed = list_states(self._store)
        stale_ms = int(self._store.now() * 1000) - STALE_MS

        def rebuild(session: "WriteSession") -> None:
            known = self._entries(session)
            self._add_missing(session, listed, known)
            for name, entry in known.items():
                if not entry["changes"] and entry["state"] == listed.get(name):
                    continue
                # The listing may be older than the entry: only the manifest decides.
                young = {c: at for c, at in entry["changes"].items() if at > stale_ms}
                state = namespace_state(self._store, name)
                _put(session, name, {"state": state, "changes": young})

        self.catalog.transact(rebuild)
        return listed


def _entries_of(listed: dict[str, NamespaceState]) -> dict[str, Entry]:
    entries = {PREFIX + name: {"state": state, "changes": {}} for name, state in listed.items()}
    return {COMPLETE: {"format": 1}, **entries}


def _put(session: "WriteSession", name: str, entry: Entry) -> None:
    """Store an entry; a namespace that does not exist and is not being changed needs none."""
    if entry["changes"] or entry["state"] is not None:
        session.put(PREFIX + name, entry)
    else:
        session.delete(PREFIX + name)
