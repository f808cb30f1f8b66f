"""What a state is, for an exploration that cuts what it has seen already.

A process is deterministic, and learns of the world only by answers of the store, by clocks, and
by which of its strands goes on. So what it remembers, and what it will ask next, is a function of
what it was told. The state of the whole is:

- the bucket: the names and bytes of all objects (tags are made of the bytes, as servers do);
- of each process that is alive: a chain of digests of everything that it was told, in the
  order in which its strands went on. Equal chains are equal memories. An answer that has arrived
  and was not taken in yet is kept apart from the chain;
- of a process that has died or ended: nothing but what the scenario remembers of it, the
  `witness`. Without a witness, its chain;
- requests that nobody waits for and that may still land;
- the time, and how many crashes and faults there were.

Ids are drawn from (process, how many it has drawn): a function of the chain, and never the same
in two processes. Calls of one `gather` have chains of their own, joined in their order at the
end: they may not depend on each other's order, on real threads as here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from hashlib import blake2b
from typing import Any

from reef.stores.base import ObjectInfo, Outcome, Tagged, WriteResult
from reef.stores.memory import MemoryStore

__all__ = ["Chain", "Fate", "Footprint", "Request", "Track", "digest", "summary"]

DIGEST_BYTES = 16
BLIND = ("create", "put", "upload", "delete")
"""Writes that do not look at what was there."""


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
            told = f"{answer.outcome} {answer.tag} {answer.cause} {answer.date_s}"
            return told.encode()
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
    deleter: "tuple[str, Footprint] | None" = None
    """The name of a process, and what would be true without it: so it is, when that one has ended
    or died; and what nobody but that one takes away is immutable to it."""


@dataclass(frozen=True)
class Request:
    """A call to the store, as data: the same on whatever bucket it takes effect."""

    method: str
    key: str
    arguments: tuple[Any, ...] = ()
    conflict: Outcome | None = None
    """What a spurious refusal says, where there can be one."""

    @property
    def what(self) -> str:
        return f"{self.method} {self.key}"

    @cached_property
    def writes(self) -> bool:
        return self.method in (*BLIND, "replace", "copy", "compose")

    def apply(self, bucket: MemoryStore) -> Any:
        """Take effect; return the answer or raise it."""
        match self.method:
            case "list":
                return _page(bucket, self.key, *self.arguments)
            case "delete":
                return bucket.delete_many([self.key])
            case "copy":
                return bucket.copy(self.arguments[0], self.key)
            case "now" | "abort_stale":
                return getattr(bucket, self.method)(*self.arguments)
        return getattr(bucket, self.method)(self.key, *self.arguments)


def _page(bucket: MemoryStore, prefix: str, start_after: str) -> list[ObjectInfo]:
    infos = bucket.list(prefix, start_after)
    return [info for _, info in zip(range(bucket.page), infos, strict=False)]


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
    gather: str = ""
    """Of a call of a gather: which. It shares no memory with others until its end."""
    request: Request | None = None
    """Sent, and not answered."""
    answer: Any = None
