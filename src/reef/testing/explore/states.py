"""States of an exploration: requests, responses, buckets, and hash chains of processes.

A process is deterministic, and observes the world only by responses of the store, by clocks, and
by which of its fibers is resumed. So its memory, and the requests that it will send next, are a
function of the responses that it has received. The state of the whole is:

- the bucket: the names and bytes of all objects (tags are derived from the bytes);
- of each live process: a chain of digests of everything that it has received, in the order in which
  its fibers were resumed. Equal chains mean equal memories. A response that has arrived and was not
  delivered yet is kept apart from the chain;
- of a process that has crashed or ended: only the state that the scenario keeps about it, the
  `witness`. Without a witness, its chain;
- requests that no process waits for and that may still take effect;
- the time, and how many crashes and faults there were.

Ids are drawn from (process, how many it has drawn): a function of the chain, and never the same
in two processes. Calls of one `gather` have chains of their own, joined in their order at the
end: they may not depend on each other's order, on real threads as here.

Every bucket that an exploration has reached has a number. A bucket is identified by the names,
bytes and dates of its objects. The effect of a request on a bucket is computed once, by
`MemoryStore`, and looked up from then on.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from hashlib import blake2b
from typing import Any

from reef.errors import ReefError
from reef.stores.base import ObjectInfo, Outcome, Tagged, WriteResult
from reef.stores.memory import MemoryStore, _Object
from reef.testing.runtime import Owner, Scheduler, ScriptedChoices, SimulatedRuntime

DIGEST_BYTES = 16
BLIND = ("create", "put", "upload", "delete")
"""Writes whose effect does not depend on the object that they replace."""


def digest(*parts: bytes) -> bytes:
    """Return a digest of a sequence of parts, unambiguous about where each ends."""
    state = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        state.update(len(part).to_bytes(4, "big") + part)
    return state.digest()


def summary(response: object) -> bytes:
    """Return bytes that identify a response: equal for equal responses."""
    match response:
        case Tagged():
            return f"object {response.tag}".encode()
        case WriteResult():
            fields = (response.outcome, response.tag, response.cause, response.date_s)
            return " ".join(map(str, fields)).encode()
        case ObjectInfo():
            return f"{response.key} {response.tag} {response.last_modified_s}".encode()
        case list():
            return b"\n".join(map(summary, response))
        case BaseException():
            return f"{type(response).__name__} {response}".encode()
    return repr(response).encode()


class Fate(Enum):
    """The effect of a request and its response."""

    OK = "done"
    LOST = "response lost"
    """It takes effect, and its sender gets no response."""
    FAILED = "no effect, no response"
    LATE = "lands later"
    CONFLICT = "spurious conflict"


def _never(*_: object) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Objects whose requests commute with others. It must be true of the scenario."""

    private: Callable[[str], bool] = _never
    """Names, and prefixes of listings, that only one process ever touches: its calls commute
    with everything that others do."""
    ignored: Callable[[str], bool] = _never
    """Private names that no process and no check ever reads: no part of the state."""
    immutable: Callable[[str, bytes], bool] = _never
    """Objects that are never replaced or deleted: once one exists, reads of it and failed creates
    have the same result at any time."""
    deleter: "tuple[str, Footprint] | None" = None
    """The name of a process, and the footprint without it, which applies once that process has
    ended or crashed. Objects that only this process deletes are immutable to itself."""


@dataclass(frozen=True)
class ExploredRequest:
    """A call to the store, as data, that can take effect on any bucket."""

    method: str
    key: str
    arguments: tuple[Any, ...] = ()
    conflict: Outcome | None = None
    """The outcome of a spurious conflict, if there can be one."""

    @property
    def description(self) -> str:
        return f"{self.method} {self.key}"

    @cached_property
    def writes(self) -> bool:
        return self.method in (*BLIND, "replace", "copy", "compose")

    def apply(self, bucket: MemoryStore) -> Any:
        """Take effect; return the response or raise it."""
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
    """A hash chain of everything that a process, or one call of a gather, has received."""

    name: str
    value: bytes = b""
    drawn: int = 0
    begun: int = 0
    branches: "list[Chain]" = field(default_factory=list)

    def absorb(self, *received: bytes) -> None:
        self.value = digest(self.value, *received)

    def whole(self) -> bytes:
        """Return the digest, including the gathers that have not ended."""
        if not self.branches:
            return self.value
        return digest(self.value, *[branch.whole() for branch in self.branches])

    def draw(self, count: int) -> bytes:
        """Return bytes that depend only on the chain's name and on how many were drawn."""
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
class FiberState:
    """The pending request of a fiber, and its chain."""

    name: bytes
    chain: Chain
    gather: str = ""
    """The gather whose call it runs. It shares no memory with other calls until its end."""
    request: ExploredRequest | None = None
    """Sent, without a response."""
    response: Any = None


# --- buckets ---------------------------------------------------------------------------


Objects = dict[str, _Object]


class ContentBucket(MemoryStore):
    """A bucket with tags derived from the bytes, whose objects can be read and set as a whole."""

    def __init__(self, **options: Any) -> None:
        super().__init__("memory://explored", **options)

    @property
    def objects(self) -> Objects:
        return dict(self._objects)

    def load(self, objects: Objects) -> None:
        """Replace all objects; the dict belongs to this bucket from now on."""
        self._objects = objects
        self._keys = sorted(objects)

    def _store(self, key: str, body: bytes) -> str:
        super()._store(key, body)
        tag = f'"{digest(body).hex()}"'
        self._objects[key] = _Object(bytes(body), tag, self._objects[key].written_s)
        return tag


class Responses:
    """All responses, by number."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self.summaries: list[bytes] = []
        self.values: list[Any] = []

    def number(self, response: object) -> int:
        short = summary(response)
        number = self._numbers.setdefault(short, len(self.values))
        if number == len(self.values):
            self.summaries.append(short)
            self.values.append(response)
        return number


@dataclass(frozen=True, slots=True)
class _Bucket:
    objects: Objects
    phase: int
    """Number of the footprint that applies."""
    private: list[bool]
    fixed: frozenset[str]
    """Names of objects that never change again."""
    fixed_but_for_one: frozenset[str]
    """Names of objects that only the deleter deletes."""


class Requests:
    """All requests, by number."""

    def __init__(self, footprint: Footprint) -> None:
        later = footprint.deleter
        self.footprints = [footprint, *([later[1]] if later else [])]
        self._numbers: dict[ExploredRequest, int] = {}
        self.values: list[ExploredRequest] = []
        self.private: list[list[bool]] = [[] for _ in self.footprints]
        self.single: list[bool] = []
        """Whether it touches one object, and does not change an existing one."""

    def number(self, request: ExploredRequest) -> int:
        number = self._numbers.setdefault(request, len(self.values))
        if number == len(self.values):
            self.values.append(request)
            for footprint, private in zip(self.footprints, self.private, strict=True):
                private.append(footprint.private(request.key))
            self.single.append(request.method in ("get_tagged", "get_range", "head", "create"))
        return number


class Buckets:
    """All buckets, by number; `apply` returns the next bucket and the response."""

    def __init__(self, requests: Requests, responses: Responses) -> None:
        self._clock = Scheduler(ScriptedChoices())
        self._requests = requests
        self._responses = responses
        self._store = ContentBucket()  # on which requests are applied
        self._store.runtime = SimulatedRuntime(self._clock, Owner("bucket"), 0, lambda *_: None)
        self._known: list[_Bucket] = []
        self._numbers: dict[tuple[int, frozenset[tuple[str, str, float]]], int] = {}
        self._done: dict[tuple[int, int, float], tuple[int, int]] = {}
        self._later: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._known)

    def number(self, objects: Objects, phase: int = 0) -> int:
        """Return the number of a bucket with these objects and this footprint."""
        footprint = self._requests.footprints[phase]
        kept = {key: found for key, found in objects.items() if not footprint.ignored(key)}
        contents = frozenset((key, found.tag, found.written_s) for key, found in kept.items())
        number = self._numbers.setdefault((phase, contents), len(self._known))
        if number == len(self._known):
            fixed = [
                frozenset(key for key, found in kept.items() if rule.immutable(key, found.body))
                for rule in (footprint, self._requests.footprints[-1])
            ]
            self._known.append(_Bucket(kept, phase, self._requests.private[phase], *fixed))
        return number

    def later(self, number: int) -> int:
        """Return the same bucket, with the footprint after the deleter has ended."""
        later = self._later.get(number)
        if later is None:
            later = self._later[number] = self.number(self._known[number].objects, phase=1)
        return later

    def objects(self, number: int) -> Objects:
        return dict(self._known[number].objects)

    def apply(self, number: int, request: int, now_s: float) -> tuple[int, int]:
        """Return the bucket after a request, and the number of its response."""
        done = self._done.get((number, request, now_s))
        if done is None:
            self._clock.now_s = now_s
            done = self._apply(number, self._requests.values[request])
            self._done[number, request, now_s] = done
        return done

    def _apply(self, number: int, request: ExploredRequest) -> tuple[int, int]:
        phase = self._known[number].phase
        ignored = request.method != "list" and self._requests.footprints[phase].ignored(request.key)
        if ignored and request.method not in BLIND:
            raise RuntimeError(
                f"{request.description}: an object that the footprint declares as ignored"
            )
        self._store.load({} if ignored else self.objects(number))
        response: object
        try:
            response = request.apply(self._store)
        except ReefError as error:
            response = error
        if request.writes and not ignored:
            number = self.number(self._store.objects, phase)
        return number, self._responses.number(response)

    def is_free(self, number: int, request: int, *, deleter: bool = False) -> bool:
        """Whether this call commutes with those of all other processes."""
        bucket = self._known[number]
        if bucket.private[request]:
            return True
        fixed = bucket.fixed_but_for_one if deleter else bucket.fixed
        return self._requests.single[request] and self._requests.values[request].key in fixed

    def private(self, number: int, request: int) -> bool:
        return self._known[number].private[request]

    def describe(self, request: int) -> str:
        return self._requests.values[request].description

    def conflict(self, request: int) -> Outcome:
        """Return the outcome of a spurious conflict."""
        return self._requests.values[request].conflict or Outcome.UNKNOWN

    def response_number(self, response: object) -> int:
        return self._responses.number(response)
