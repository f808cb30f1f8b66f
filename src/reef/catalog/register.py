"""A register: one small document, changed only by compare-and-swap.

The head and the plan of the garbage collection are registers. Where the store has If-Match, a
register is one object, replaced by tag; every body carries a nonce, so that a tag never comes
back (H5). Where it has not, each version is an object of its own, `<number, 20 digits>`, created
by whoever read the one before:

    If-Match     HEAD.json                    replace(tag)
    numbered     heads/00000000000000000007   create(8)

`swap` has three answers. LANDED: this version is, or was, the newest. LOST: another one came
first. UNKNOWN: it may have landed, or may land yet; only a later version can tell. Old numbers
are removed by `trim`, long after they were superseded. Since a slow create could then land in
an emptied place, one that took longer than half of that time is unknown too (H14).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum

from reef.errors import NotFoundError, UnavailableError
from reef.runtime import Stopwatch
from reef.stores import Outcome, Store

__all__ = ["Register", "Swap", "Version", "register"]

KEPT_S = 900.0
"""How long a superseded number stays at least."""
KEPT_MIN = 16
"""How many superseded numbers stay, however old."""
LISTINGS_MAX = 5


class Swap(StrEnum):
    """What became of a compare-and-swap."""

    LANDED = "landed"
    LOST = "lost"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Version:
    """A register's content, as it was read; no body if there was none."""

    body: bytes | None
    name: str
    """The object that holds it."""
    tag: str
    """Empty for no body: the tag, or the number, that a swap builds upon."""
    seen: Stopwatch
    """Started before the request that showed it was sent."""


class Register(ABC):
    """One document, read and swapped."""

    @abstractmethod
    def load(self) -> Version:
        """Return the newest version."""

    @abstractmethod
    def swap(self, version: Version, body: bytes) -> tuple[Swap, Version]:
        """Put `body` in the place of a version; an error means that nothing was written."""

    def trim(self, now_s: float) -> int:
        """Remove versions that nobody asks for any more; return how many."""
        return 0


def register(store: Store, name: str, numbered: str) -> Register:
    """Return the register of this name, in the form that the store allows."""
    if store.capabilities.if_match:
        return _Matched(store, name)
    return _Numbered(store, numbered)


class _Matched(Register):
    """One object, replaced by its tag."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name

    def load(self) -> Version:
        seen = self._store.runtime.stopwatch()
        try:
            found = self._store.get_tagged(self._name)
        except NotFoundError:
            return Version(None, self._name, "", seen)
        if found.tag is None:
            raise UnavailableError(f"{self._store.url} gave no tag of {self._name}")
        return Version(found.body, self._name, found.tag, seen)

    def swap(self, version: Version, body: bytes) -> tuple[Swap, Version]:
        seen = self._store.runtime.stopwatch()
        if version.body is None:
            result = self._store.create(self._name, body)
        else:
            result = self._store.replace(self._name, body, version.tag)
        if result.landed and result.tag is not None:
            return Swap.LANDED, Version(body, self._name, result.tag, seen)
        # A store that keeps the tag to itself leaves us to read it.
        known = result.outcome in (Outcome.EXISTS, Outcome.CHANGED)
        return (Swap.LOST if known else Swap.UNKNOWN), version


class _Numbered(Register):
    """Versions side by side; the highest number is the newest."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._known = 0
        """The highest number seen: listings begin there."""

    def load(self) -> Version:
        for _ in range(LISTINGS_MAX):
            seen = self._store.runtime.stopwatch()
            numbers = self._numbers(self._known - 1)
            if not numbers and self._known:  # the newest never goes: all of it was lost
                self._known = 0
                continue
            if not numbers:
                return Version(None, self._prefix, "", seen)
            try:
                name = self._name(numbers[-1])
                found = Version(self._store.get(name), name, str(numbers[-1]), seen)
            except NotFoundError:  # superseded and removed meanwhile
                continue
            self._known = max(self._known, numbers[-1])
            return found
        raise UnavailableError(
            f"versions below {self._prefix} are removed faster than they can be read",
            object=self._prefix,
        )

    def swap(self, version: Version, body: bytes) -> tuple[Swap, Version]:
        if version.seen.elapsed_s() > KEPT_S / 2:
            newest = self.load()
            if newest.tag != version.tag:
                return Swap.LOST, newest
            version = newest
        sent = self._store.runtime.stopwatch()
        number = int(version.tag or 0) + 1
        name = self._name(number)
        result = self._store.create(name, body)
        if result.outcome is Outcome.EXISTS:
            return Swap.LOST, version
        if not result.landed or version.seen.elapsed_s() > KEPT_S / 2:
            return Swap.UNKNOWN, version
        self._known = max(self._known, number)
        return Swap.LANDED, Version(body, name, str(number), sent)

    def trim(self, now_s: float) -> int:
        infos = list(self._store.list(self._prefix))[:-KEPT_MIN]
        old = [info.key for info in infos if now_s - info.last_modified_s > KEPT_S]
        if old:
            self._store.delete_many(old)
        return len(old)

    def _name(self, number: int) -> str:
        return f"{self._prefix}{number:020}"

    def _numbers(self, after: int) -> list[int]:
        start = self._name(after) if after > 0 else ""
        names = [info.key.rsplit("/", 1)[-1] for info in self._store.list(self._prefix, start)]
        return [int(name) for name in names if name.isdigit()]
