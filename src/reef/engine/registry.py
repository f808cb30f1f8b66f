"""The registry of a bucket: which namespaces there are, in the catalog at `catalog/`.

The manifest of a namespace decides whether it is there; the registry follows, so that a listing of
ten thousand costs a few requests. Who makes, drops or brings back a namespace first notes that it
is about to (an open change, in the entry), then publishes, then closes its change. Whoever closes
the last one writes down what the manifest says by then. So an entry without open changes is right,
and one with some is looked up; a process that dies in between leaves one that is looked up.

The first change in a bucket without a registry, or whose registry was lost, takes in the
namespaces that a listing shows, in the same transaction. In one whose registry is damaged no name
is made or dropped before a rebuild: until then nobody could tell.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from reef.catalog import JSON, Catalog, WriteSession
from reef.engine.job_board import JobBoard
from reef.engine.registry_upkeep import keep_short
from reef.engine.stats import list_states, namespace_state
from reef.errors import CorruptionError, ReefError
from reef.formats.manifest import NamespaceState
from reef.stores import Store

__all__ = ["REGISTRY", "Registry"]

REGISTRY = "catalog"
"""Where it lies in a bucket."""
COMPLETE = "registry"
"""The key that says that all namespaces are in it."""
PREFIX = "namespace/"
STALE_MS = 3600 * 1000
"""A rebuild closes changes that were begun longer ago than this: their process is gone."""

Entry = dict[str, Any]


class Registry:
    """The namespaces of one bucket, by name. Safe for threads, and picklable with its store."""

    def __init__(self, store: Store) -> None:
        self.catalog = Catalog(store, prefix=REGISTRY, codec=JSON)
        self.board = JobBoard(self.catalog)
        self._store = store

    def __reduce__(self) -> tuple[Any, ...]:
        return Registry, (self._store,)

    # --- reading ------------------------------------------------------------------
    def names(self, state: NamespaceState) -> list[str] | None:
        """Return the names of those in a state; None if there is no registry that can tell."""
        try:
            found = {key.decode(): value for key, value in self.catalog.scan_latest()}
        except CorruptionError:  # the bucket stays the truth
            return None
        if COMPLETE not in found:
            return None
        entries = {k.removeprefix(PREFIX): v for k, v in found.items() if k.startswith(PREFIX)}
        return sorted(name for name, e in entries.items() if self._state(name, e) == state)

    def _state(self, name: str, entry: Entry) -> str | None:
        return namespace_state(self._store, name) if entry["changes"] else entry["state"]

    # --- changing -----------------------------------------------------------------
    @contextmanager
    def changing(self, name: str) -> Iterator[None]:
        """Note that a namespace is about to be made, dropped or brought back, and then what it is.

        Where the block fails, what it did may still land: the change stays open.
        """
        change = self._store.runtime.ulid()
        self._begin(name, change)
        self._store.runtime.reach("registry noted")
        yield
        self._store.runtime.reach("registry behind")
        with suppress(ReefError):  # it is done; the entry is looked up until it is closed
            self._close(name, change)
            keep_short(self.catalog)

    def _begin(self, name: str, change: str) -> None:
        try:
            lacking = self.catalog.get_latest(COMPLETE) is None
            listed = list_states(self._store) if lacking else {}  # long, so before the session
            now_ms = int(self._store.now() * 1000)
            self.catalog.transact(lambda session: self._note(session, name, change, now_ms, listed))
        except CorruptionError as error:
            raise CorruptionError(
                f"the registry of namespaces is damaged: {error.message}",
                hint="Make it again from the namespaces: reef catalog rebuild URL",
                **error.context,
            ) from error

    def _note(
        self,
        session: WriteSession,
        name: str,
        change: str,
        now_ms: int,
        listed: dict[str, NamespaceState],
    ) -> None:
        if session.get(COMPLETE) is None:  # and if it was there just now, it was lost since
            listed = listed or list_states(self._store)
            self._take_in(session, listed, self._entries(session))
        entry = session.get(PREFIX + name) or {"state": None, "changes": {}}
        entry["changes"][change] = now_ms
        session.put(PREFIX + name, entry)

    def _close(self, name: str, change: str) -> None:
        def close(session: WriteSession) -> None:
            entry = session.get(PREFIX + name) or {"state": None, "changes": {}}
            entry["changes"].pop(change, None)
            if not entry["changes"]:
                # After the session began: all whose changes it does not show have published.
                entry["state"] = namespace_state(self._store, name)
            _put(session, name, entry)

        self.catalog.transact(close)

    def _take_in(
        self,
        session: WriteSession,
        listed: dict[str, NamespaceState],
        known: dict[str, Entry],
    ) -> None:
        """Take in what is not known: an entry that is there may be newer than the listing."""
        new = {name: state for name, state in listed.items() if name not in known}
        for key, entry in _taken_in(new).items():
            session.put(key, entry)

    def _entries(self, session: WriteSession) -> dict[str, Entry]:
        found = session.scan_range(prefix=PREFIX)
        return {key.decode().removeprefix(PREFIX): entry for key, entry in found}

    # --- making it again ----------------------------------------------------------
    def rebuild(self) -> dict[str, NamespaceState]:
        """Make the registry from the namespaces there are; return them.

        One that is sound is corrected. One that is not is given up, with the jobs on its board.
        """
        if self.catalog.verify().problems:
            with suppress(CorruptionError):  # UnsupportedFormatError: not ours to give up
                self.catalog.scan_latest()
            self.catalog.begin_anew(lambda: _taken_in(list_states(self._store)))
        listed = list_states(self._store)
        stale_ms = int(self._store.now() * 1000) - STALE_MS

        def rebuild(session: WriteSession) -> None:
            known = self._entries(session)
            self._take_in(session, listed, known)
            for name, entry in known.items():
                if not entry["changes"] and entry["state"] == listed.get(name):
                    continue
                # The listing may be older than the entry: only the manifest tells.
                young = {c: at for c, at in entry["changes"].items() if at > stale_ms}
                state = namespace_state(self._store, name)
                _put(session, name, {"state": state, "changes": young})

        self.catalog.transact(rebuild)
        return listed


def _taken_in(listed: dict[str, NamespaceState]) -> dict[str, Entry]:
    entries = {PREFIX + name: {"state": state, "changes": {}} for name, state in listed.items()}
    return {COMPLETE: {"format": 1}, **entries}


def _put(session: WriteSession, name: str, entry: Entry) -> None:
    """Keep an entry; what is not there and does not change needs none."""
    if entry["changes"] or entry["state"] is not None:
        session.put(PREFIX + name, entry)
    else:
        session.delete(PREFIX + name)
