"""What a state is, for an exploration that cuts what it has seen already.

A history is replayed from a script; nothing of a process can be copied or put back. What can
be done is to tell that two histories have led to the same state: everything that can happen
from there on is then the same, and the second one is cut. The state is:

- the bucket: the names and bytes of all objects (tags are made of the bytes, as servers do);
- of each process that is alive: a chain of digests of everything that it was told, in the
  order in which its strands went on. A process is deterministic, and learns of the world only
  by answers of the store, clocks, and which of its strands goes on: so equal chains are equal
  memories. An answer that has arrived and was not taken in yet is kept apart from the chain;
- of a process that has died or ended: nothing but what the scenario remembers of it, the
  `witness`. Without a witness, its chain too;
- requests that nobody waits for and that may still land;
- the time, and how many crashes and faults there were.

Ids are drawn from (process, how many it has drawn): a function of the chain, and never the same
in two processes. Calls of one `gather` have chains of their own, joined in their order at the
end: they may not depend on each other's order, on real threads as here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import Any

from reef.stores.base import ObjectInfo, Outcome, Tagged, WriteResult
from reef.stores.memory import MemoryStore, _Object

__all__ = [
    "Chain",
    "ContentBucket",
    "Cut",
    "Fate",
    "Footprint",
    "Request",
    "Seen",
    "Track",
    "digest",
    "summary",
]

DIGEST_BYTES = 16
TIME = "time"
"""Of a request that lets time pass: it comes before or after everything."""


class Cut(Exception):
    """This state was seen before: there is nothing new from here on."""


class Seen:
    """The states that were seen: with how many switches left, and what was asleep."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[int, frozenset[bytes]]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def is_new(self, state: bytes, switches_left: int, asleep: frozenset[bytes]) -> bool:
        """Whether something can happen from here that was not looked into."""
        known = self._known.get(state)
        if known is None:
            self._known[state] = switches_left, asleep
            return True
        if known[0] >= switches_left and known[1] <= asleep:
            return False
        self._known[state] = max(known[0], switches_left), known[1] & asleep
        return True


def digest(*parts: bytes) -> bytes:
    """Return a digest of a sequence; no two sequences run together."""
    state = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        state.update(len(part).to_bytes(4, "big") + part)
    return state.digest()


def summary(answer: object) -> bytes:
    """Return the bytes that stand for an answer: equal for equal answers."""
    match answer:
        case Tagged():
            return f"object {answer.tag}".encode()
        case WriteResult():
            return f"{answer.outcome} {answer.tag}".encode()
        case ObjectInfo():
            return f"{answer.key} {answer.tag} {answer.last_modified_s}".encode()
        case list():
            return b"\n".join(map(summary, answer))
        case BaseException():
            return f"{type(answer).__name__} {answer}".encode()
    return repr(answer).encode()


class Fate(Enum):
    """What becomes of a request."""

    OK = "answered"
    LOST = "answer lost"
    """It takes effect, its sender hears nothing."""
    FAILED = "no effect, no answer"
    LATE = "lands later"
    CONFLICT = "told conflict"


def _never(*_: object) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Which objects need no thought about order. What it says must be true of the scenario."""

    private: Callable[[str], bool] = _never
    """Names, and prefixes of listings, that only one process ever touches: its calls commute
    with everything that others do."""
    ignored: Callable[[str], bool] = _never
    """Private names that nobody, and no check either, ever reads: no part of the state."""
    immutable: Callable[[str, bytes], bool] = _never
    """Objects that are never replaced or deleted: once one is there, reading it gives the same
    whenever it is done, and so does the refusal to create it."""


@dataclass(slots=True, eq=False)
class Request:
    """A call to the store that was sent and has not taken effect."""

    method: str
    key: str
    effect: Callable[[], Any]
    writes: bool = False
    conflict: Outcome | None = None
    """What a spurious refusal says, where there can be one."""
    identity: bytes = b""
    """Of a write: tells it from others, so that it can outlive its sender."""

    @property
    def what(self) -> str:
        return f"{self.method} {self.key}"

    def meets(self, other: "Request") -> bool:
        """Whether the order of two requests may make a difference."""
        if TIME in (self.method, other.method):
            return True
        if not self.writes and not other.writes:
            return False
        return "copy" in (self.method, other.method) or self._covers(other) or other._covers(self)

    def _covers(self, other: "Request") -> bool:
        return other.key.startswith(self.key) if self.method == "list" else other.key == self.key


@dataclass(slots=True, eq=False)
class Chain:
    """Everything that a process, or one call of a gather, was told."""

    name: str
    value: bytes = b""
    drawn: int = 0
    begun: int = 0
    branches: "list[Chain]" = field(default_factory=list)

    def absorb(self, *told: bytes) -> None:
        self.value = digest(self.value, *told)

    def whole(self) -> bytes:
        """Return the chain with the gathers that have not ended."""
        if not self.branches:
            return self.value
        return digest(self.value, *[branch.whole() for branch in self.branches])

    def draw(self, count: int) -> bytes:
        """Return bytes that depend on nothing but whose they are, and how many were drawn."""
        self.drawn += 1
        return blake2b(f"{self.name}:{self.drawn}".encode(), digest_size=count).digest()

    def branch(self) -> "Chain":
        self.begun += 1
        self.branches.append(Chain(f"{self.name}.{self.begun:06}"))
        return self.branches[-1]

    def join(self, branches: "list[Chain]") -> None:
        for branch in branches:
            self.absorb(branch.whole())
            self.branches.remove(branch)


@dataclass(slots=True, eq=False)
class Track:
    """What an exploration knows of a strand."""

    name: bytes
    chain: Chain
    gather: object = None
    """Of a call of a gather: which. It shares no memory with others until its end."""
    request: Request | None = None
    """Sent, not in effect."""
    answer: bytes = b""
    """In effect, not taken in by the process yet."""
    fate: Fate = Fate.OK

    @property
    def alone(self) -> bool:
        return self.gather is not None

    @property
    def reads(self) -> bool:
        return self.request is not None and not self.request.writes


class ContentBucket(MemoryStore):
    """A bucket that knows a digest of its contents, and whose tags are made of the bytes."""

    def __init__(self, footprint: Footprint, **options: Any) -> None:
        super().__init__("memory://explored", **options)
        self._footprint = footprint
        self._digests: dict[str, int] = {}
        self._fixed: set[str] = set()
        self.contents = 0

    def is_fixed(self, key: str) -> bool:
        """Whether an object is there, and will be, unchanged."""
        if key in self._fixed:
            return True
        found = self._objects.get(key)
        if found is None or not self._footprint.immutable(key, found.body):
            return False
        self._fixed.add(key)
        return True

    def _store(self, key: str, body: bytes) -> str:
        super()._store(key, body)
        tag = f'"{digest(body).hex()}"'
        written_s = self._objects[key].written_s
        self._objects[key] = _Object(bytes(body), tag, written_s)
        self._count(key, digest(key.encode(), tag.encode(), str(written_s).encode()))
        return tag

    def delete_many(self, keys: Any) -> None:
        super().delete_many(keys)
        for key in keys:
            self._count(key, None)

    def _count(self, key: str, value: bytes | None) -> None:
        if self._footprint.ignored(key):
            return
        self.contents ^= self._digests.pop(key, 0)
        if value is not None:
            self._digests[key] = int.from_bytes(value, "big")
            self.contents ^= self._digests[key]
