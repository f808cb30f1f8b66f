"""The log as objects in a bucket: one slot per LSN, each filled once."""

from contextlib import suppress
from dataclasses import dataclass

from reef.errors import CorruptionError, NotFoundError, UnavailableError
from reef.formats.wal_object import WalObject
from reef.paths import Namespace, number_of, slot_name
from reef.runtime import Runtime
from reef.stores import Store, WriteResult, fetch

__all__ = ["Log", "Slot"]


@dataclass(frozen=True, slots=True)
class Slot:
    """A filled slot, as a listing shows it."""

    lsn: int
    size: int


class Log:
    """Reads and fills slots. What a slot's object means is for `log_rules` to say."""

    def __init__(self, store: Store, namespace: Namespace) -> None:
        self._store = store
        self.runtime: Runtime = store.runtime
        self._namespace = namespace
        self._folder = namespace.wal

    def filled(self, first: int) -> list[Slot]:
        """Return the filled slots from `first` on, in order, gaps and all."""
        after = self._namespace.wal_object(first - 1)
        infos = self._store.list(self._namespace.wal, after)
        return [Slot(lsn, info.size) for info in infos if (lsn := number_of(info.key)) is not None]

    def read(self, lsn: int) -> WalObject | None:
        """Return the object in a slot; None if the slot is open."""
        key = self._namespace.wal_object(lsn)
        try:
            found = fetch(self._store, key, lambda body: WalObject.decode(body, key))
        except NotFoundError:
            return None
        return self._checked(found, lsn, key)

    def read_many(self, lsns: list[int]) -> list[WalObject | None]:
        """Return the objects of several slots, fetched side by side."""
        return self.runtime.gather([lambda lsn=lsn: self.read(lsn) for lsn in lsns])  # type: ignore[misc]

    def fill(self, lsn: int, body: bytes) -> WriteResult:
        """Put an object into a slot, if it is open."""
        return self._store.create(slot_name(self._folder, lsn), body)

    def winner(self, lsn: int, lost: WriteResult) -> WalObject:
        """Return the object that a lost `fill` found in its slot."""
        key = self._namespace.wal_object(lsn)
        if lost.winner is not None:
            with suppress(CorruptionError):  # perhaps only on its way here: read it again (H8)
                return self._checked(WalObject.decode(lost.winner, key), lsn, key)
        found = self.read(lsn)
        if found is None:
            raise UnavailableError(f"LSN {lsn} was taken and is open again", object=key)
        return found

    def _checked(self, found: WalObject, lsn: int, key: str) -> WalObject:
        if found.header.lsn != lsn:
            raise CorruptionError(
                f"object {key} says that it is LSN {found.header.lsn}", object=key, offset=0
            )
        return found
