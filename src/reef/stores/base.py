"""The interface of an object store.

A `Store` maps keys to whole objects. Everything else depends on one operation: `create`, which
writes an object only where there is none, and reports who won. Its result has three values, as any
request over a network: created, exists, unknown. An error raised by a conditional write means that
nothing was written; an outcome that is not known is a result, never an error.

    get, get_tagged, get_range, get_ranges, head, list      read
    put, upload, copy, compose                              write, replacing any object
    create, replace                                         write, if the condition holds
    delete, delete_many                                     missing keys are fine
    now, abort_stale                                        the store's clock; its leftovers

Keys are paths of ordinary characters (`check_key`). Listings are complete, sorted by key,
and strongly consistent, as every store that Reef runs on promises.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from reef.errors import CorruptionError, ErrorKind, InvalidInputError, UnavailableError
from reef.runtime import Runtime, Stopwatch

KEY_BYTES_MAX = 1024
COALESCE_GAP_BYTES = 64 * 1024
"""Reading a gap this small costs less than another request."""


Part = bytes | tuple[str, int, int]
"""Part of an object to be composed: new bytes, or the range [start, end) of another object."""

PIECE_BYTES = 8 << 20
"""Size of one read, where a store cannot compose by itself."""


class Outcome(StrEnum):
    """The outcome of a conditional write."""

    CREATED = "created"
    EXISTS = "exists"
    REPLACED = "replaced"
    CHANGED = "changed"
    UNKNOWN = "unknown"


LANDED = (Outcome.CREATED, Outcome.REPLACED)


@dataclass(frozen=True, slots=True)
class WriteResult:
    """The result of `create` or `replace`."""

    outcome: Outcome
    tag: str | None = None
    """The new object's tag, if the store reported it."""
    winner: bytes | None = None
    """The object that has the key instead, if it was read back."""
    cause: Exception | None = None
    """Why the outcome is unknown."""
    date_s: float | None = field(default=None, compare=False)
    """The new object's date by the store's clock, where it is known without a request."""
    doubt: bool = False
    """Whether an earlier attempt of the same call had no response, or one that was not final."""

    @property
    def landed(self) -> bool:
        """Whether this write is the one that took effect, for certain."""
        return self.outcome in LANDED


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object, without its bytes."""

    key: str
    size: int
    tag: str | None
    """Opaque, quotes included. Equal bytes may have equal tags: put a nonce in the body."""
    last_modified_s: float
    """Unix time by the store's clock, cut to `Capabilities.clock_resolution_s`."""


@dataclass(frozen=True, slots=True)
class Tagged:
    """An object's bytes, and the tag that `replace` takes."""

    body: bytes
    tag: str | None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The features and page sizes of a backend."""

    create_only: bool = True
    if_match: bool = True
    shared: bool = True
    """Whether another process can open the same objects."""
    clock_resolution_s: float = 0.0
    list_page: int = 1000
    """Objects in one LIST request."""
    delete_page: int = 1
    """Objects in one DELETE request."""
    part_bytes: int | None = None
    """Size of one part of an upload; None where an upload is one request."""
    many_ranges: bool = False
    """Whether several ranges of an object cost no more than one: gaps are not worth reading."""
    compose: bool = False
    """Whether objects are put together out of others without passing through here."""
    abort_stale: bool = True
    now_requests: tuple[str, ...] = ()
    """Kinds of the requests that `now` sends; empty where it sends none."""
    abort_stale_requests: tuple[str, ...] = ()
    """Kinds of the requests that `abort_stale` sends, and a delete for each it removes."""


class Store(ABC):
    """An object store, rooted at a URL. Safe for threads; picklable where it is shared."""

    url: str
    capabilities: Capabilities
    runtime: Runtime

    @property
    def cas(self) -> str:
        """The way of compare-and-swap: "native", or the name of a register.

        All writers of a bucket must share it. May read the id of the register.
        """
        return "native"

    # --- read ---------------------------------------------------------------------
    def get(self, key: str) -> bytes:
        """Return an object's bytes; NotFoundError if there is none."""
        return self.get_tagged(key).body

    @abstractmethod
    def get_tagged(self, key: str) -> Tagged:
        """Return bytes and tag, both of the same version."""

    @abstractmethod
    def get_range(self, key: str, start: int, end: int) -> bytes:
        """Return exactly the bytes of [start, end); InvalidInputError past the object's end."""

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return several ranges, in the order given; near neighbours share a request."""
        for start, end in ranges:
            check_range(key, start, end)
        spans = coalesce(ranges, COALESCE_GAP_BYTES)
        if len(spans) == 1:  # the most common case, without a helper thread's call path
            bodies = [self.get_range(key, *spans[0])]
        else:
            bodies = self.runtime.map(lambda span: self.get_range(key, *span), spans)
        fetched = list(zip(spans, bodies, strict=True))
        return [_cut(fetched, start, end) for start, end in ranges]

    @abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """Return size, tag and date of an object; NotFoundError if there is none."""

    @abstractmethod
    def list(self, prefix: str = "", start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose keys begin with `prefix` and sort after `start_after`."""

    # --- write --------------------------------------------------------------------
    @abstractmethod
    def put(self, key: str, body: bytes) -> str | None:
        """Write an object, replacing any other; return its tag."""

    @abstractmethod
    def create(self, key: str, body: bytes) -> WriteResult:
        """Write an object where there is none: CREATED, EXISTS or UNKNOWN."""

    @abstractmethod
    def replace(self, key: str, body: bytes, tag: str) -> WriteResult:
        """Write in place of the object that has this tag: REPLACED, CHANGED or UNKNOWN."""

    @abstractmethod
    def upload(self, key: str, parts: Iterable[bytes]) -> int:
        """Write a large object, piece by piece, under a name never used before.

        Nothing is visible before the last piece; returns the size.
        """

    @abstractmethod
    def copy(self, source: str, target: str) -> None:
        """Write one object's bytes at another key, without passing them through here."""

    def compose(self, key: str, parts: Sequence[Part]) -> int:
        """Write an object out of ranges of others and new bytes, under a name never used before.

        Nothing is visible before it is whole; returns the size. A store that cannot do it reads
        the ranges and uploads them (`Capabilities.compose`).
        """
        for part in parts:
            if not isinstance(part, bytes):
                check_range(*part)
        return self.upload(key, self._pieces(parts))

    def compose_cost(self, parts: Sequence[Part]) -> Mapping[str, tuple[int, int]]:
        """Return the requests and bytes, by kind, that a store sends which composes by itself."""
        new_bytes = sum(len(part) for part in parts if isinstance(part, bytes))
        return {
            "copy": (sum(not isinstance(part, bytes) for part in parts), 0),
            "put": (1, new_bytes),
        }

    def _pieces(self, parts: Sequence[Part]) -> Iterator[bytes]:
        for part in parts:
            if isinstance(part, bytes):
                yield part
                continue
            source, start, end = part
            for at in range(start, end, PIECE_BYTES):
                yield self.get_range(source, at, min(at + PIECE_BYTES, end))

    def forget(self, key: str, ranges: Iterable[tuple[int, int]]) -> None:  # noqa: B027
        """Drop cached ranges whose bytes cannot be decoded; most stores cache nothing."""

    def delete(self, key: str) -> None:
        """Remove an object, if it is there."""
        self.delete_many([key])

    @abstractmethod
    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove objects; those that are not there are fine."""

    # --- housekeeping -------------------------------------------------------------
    @abstractmethod
    def now(self) -> float:
        """Return Unix time by the clock that dates this store's objects."""

    @abstractmethod
    def abort_stale(self, older_than_s: float) -> int:
        """Remove the leftovers of unfinished writes; return how many."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"


def check_key(key: str) -> str:
    """Return the key, or raise if some store could not hold it."""
    if not key or key.startswith("/") or key.endswith("/"):
        raise _bad_key(key, "is empty, or begins or ends with '/'")
    parts = key.split("/")
    if "" in parts or "." in parts or ".." in parts:
        raise _bad_key(key, "has an empty part, '.' or '..'")
    if not key.isprintable() or "\\" in key:
        raise _bad_key(key, "has a control character or a backslash")
    if len(key.encode()) > KEY_BYTES_MAX:
        raise _bad_key(key, f"is longer than {KEY_BYTES_MAX} bytes")
    return key


def check_prefix(prefix: str) -> str:
    """Return the prefix, or raise if no key could begin with it."""
    if prefix:
        check_key(prefix.removesuffix("/") or "/")
    return prefix


def check_range(key: str, start: int, end: int) -> None:
    """Raise unless [start, end) is a range that holds at least one byte."""
    if not 0 <= start < end:
        raise InvalidInputError(
            f"range [{start}, {end}) of object {key} is empty or negative",
            kind=ErrorKind.INVALID_RANGE,
            object=key,
        )


def past_the_end(key: str, end: int, size: int) -> InvalidInputError:
    """Return the error for a range that the object cannot fill."""
    return InvalidInputError(
        f"object {key} has {size} bytes, the range ends at {end}",
        kind=ErrorKind.INVALID_RANGE,
        object=key,
        size=size,
    )


def short_read(key: str, found: int, expected: int) -> UnavailableError:
    """Return the error for a truncated response, which can be retried."""
    return UnavailableError(
        f"object {key}: expected {expected} bytes, received {found}",
        kind=ErrorKind.SHORT_READ,
        object=key,
    )


def coalesce(ranges: Sequence[tuple[int, int]], gap_bytes: int) -> list[tuple[int, int]]:
    """Join ranges that overlap or are within `gap_bytes` of each other.

    >>> coalesce([(0, 10), (90, 100), (12, 20)], gap_bytes=4)
    [(0, 20), (90, 100)]
    """
    joined: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if joined and start - joined[-1][1] <= gap_bytes:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _cut(fetched: Sequence[tuple[tuple[int, int], bytes]], start: int, end: int) -> bytes:
    for (span_start, span_end), body in fetched:
        if span_start <= start and end <= span_end:
            return body[start - span_start : end - span_start]
    raise AssertionError("coalesce() covers every range")


def _bad_key(key: str, why: str) -> InvalidInputError:
    return InvalidInputError(
        f"key {key[:80]!r} {why}",
        kind=ErrorKind.INVALID_KEY,
        hint="A key is a path of printable characters, such as wal/0001.wal",
        object=key,
    )


# --- listings -------------------------------------------------------------------------


class Listing(Iterator[ObjectInfo]):
    """The objects with a prefix and after a key, filtered from pages that may hold others.

    It counts its requests, for the meter.
    """

    def __init__(
        self,
        pages: Callable[[], Iterator[Sequence[ObjectInfo]]],
        prefix: str,
        start_after: str,
        *,
        are_sorted: bool = True,
    ) -> None:
        self.requests = 0
        """Requests sent so far, including one that failed."""
        self._prefix, self._start_after = prefix, start_after
        infos = self._pull(pages)
        self._infos = self._until_prefix_ends(infos) if are_sorted else self._sorted(infos)

    def __next__(self) -> ObjectInfo:
        while True:
            info = next(self._infos)
            # Some servers ignore start-after: every key is checked here as well.
            if info.key > self._start_after and info.key.startswith(self._prefix):
                return info

    def _pull(self, pages: Callable[[], Iterator[Sequence[ObjectInfo]]]) -> Iterator[ObjectInfo]:
        """Yield the objects of all pages, and count the pages, including one that fails."""
        self.requests, received = 1, 0
        stream = pages()
        while True:
            try:
                page = next(stream, None)
            except Exception:
                self.requests = received + 1
                raise
            if page is None:
                return
            received += 1
            self.requests = received
            yield from page

    def _until_prefix_ends(self, infos: Iterator[ObjectInfo]) -> Iterator[ObjectInfo]:
        """Request no page past the prefix."""
        for info in infos:
            if info.key > self._prefix and not info.key.startswith(self._prefix):
                return
            yield info

    def _sorted(self, infos: Iterator[ObjectInfo]) -> Iterator[ObjectInfo]:
        yield from sorted(infos, key=lambda info: info.key)


# --- reads of checked objects ---------------------------------------------------------


T = TypeVar("T")
ATTEMPTS_MAX = 3


def fetch(store: Store, key: str, decode: Callable[[bytes], T]) -> T:
    """Return the decoded object; CorruptionError only if it is damaged in every read."""
    return reread_if_damaged(lambda: decode(store.get(key)))


def reread_if_damaged(read: Callable[[], T], forget: Callable[[], None] = lambda: None) -> T:
    """Call `read`, which fetches and decodes; call it again if a checksum is wrong (H8).

    Damage at rest comes back, a bad transfer does not. `forget` drops the bytes from caches, which
    would return the same ones again.
    """
    for attempt in range(1, ATTEMPTS_MAX + 1):
        try:
            return read()
        except CorruptionError:
            forget()
            if attempt == ATTEMPTS_MAX:
                raise
    raise AssertionError("the loop returns or raises")


# --- the store's clock ----------------------------------------------------------------


def current_time_s(store: Store) -> float:
    """Return the store's time; falls back to the local clock with read-only credentials.

    For reports only: reading a bucket's clock writes an object. Code that deletes by age calls
    `Store.now`, which never falls back (H30).
    """
    try:
        return store.now()
    except InvalidInputError as error:
        if error.kind is not ErrorKind.ACCESS_DENIED:
            raise
        return store.runtime.wall_s()


class StoreDates:
    """Measures elapsed time by the dates of objects as well as by local clocks. Safe for threads.

    A virtual machine that was suspended for an hour may have no clock that shows it. The store's
    dates do, where they come with the response of a write at no cost (`WriteResult.date_s`):

        local clocks  |--- 3 s ---|-- 1 s --|
                   response      send    response
        store dates   |----- 3,604 s -------|      an hour is missing in between

    Whether the hour was before or after the send is unknown, so it counts as after: a needless
    suspicion costs one check of the head. The first date has none to compare with.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._last: tuple[float, Stopwatch] | None = None

    def took_s(self, sent: Stopwatch, date_s: float | None) -> float:
        """Return how long ago `sent` was: by our clocks, or by the dates if they show more.

        `date_s` is the date of the object whose response has just arrived, if the store gave one.
        """
        elapsed_s = sent.elapsed_s()
        if date_s is None:
            return elapsed_s
        last, self._last = self._last, (date_s, self._runtime.stopwatch())
        if last is None:
            return elapsed_s
        last_s, since = last
        between_s = since.elapsed_s() - elapsed_s
        by_dates_s = date_s - last_s - between_s
        return by_dates_s if by_dates_s > elapsed_s else elapsed_s
