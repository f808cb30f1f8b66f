"""`Catalog`: a serializable key-value store for metadata, with many writers, on any bucket.

A catalog is made from a store and a prefix, costs nothing until it is used, may be shared by
threads, and can be pickled with its store.

**Sessions** read one state, and apply their changes atomically or not at all. A session pins its
state by a lease (`reef.catalog.snapshot`). A write session stages its changes in memory and
includes them in its own reads; it records every key and every range that it read, so that `commit`
detects whether any of them has changed since. Without `commit` nothing changes.

A session is used by one thread at a time. One that is garbage-collected without `commit` or `end`
issues a ResourceWarning: its lease delays garbage collection until it expires.
"""

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self, TypeVar

import msgspec

from reef.catalog import upkeep
from reef.catalog.checkpoints import CheckpointMeta
from reef.catalog.commit import ConflictSet, commit, recover_orphans, resolve
from reef.catalog.head import CatalogHead, KnownHead
from reef.catalog.segments import CACHE_BYTES, BlobCache, MemoryBlobCache
from reef.catalog.snapshot import (
    CatalogContext,
    CatalogSnapshot,
    CatalogView,
    CommitReceipt,
    Retention,
    SessionLease,
    apply_records,
    pin,
    take_lease,
)
from reef.catalog.upkeep import COMPACT_AFTER, CatalogCompactor, compact_if_due, load_plan
from reef.catalog.verify import CatalogReport, verify
from reef.errors import (
    UNDECODABLE,
    ClosedError,
    ConflictError,
    CorruptionError,
    ErrorKind,
    InvalidInputError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
)
from reef.paths import CatalogNames
from reef.runtime import leaf_lock
from reef.stores import CasVerdict, RetryPolicy, Store, agree_on_cas
from reef.stores import open as open_store
from reef.stores.leases import HeldLease, LeaseKeeper
from reef.stores.probe import agrees_without_register, as_proved, remembered
from reef.stores.wrappers.policies import Backoff
from reef.telemetry import Events, Metrics
from reef.types import KeyRange

Key = bytes | str
KEY_BYTES_MAX = 65_535
RECORD_BYTES = 16
SEGMENT_BYTES_MAX = 64 << 20
T = TypeVar("T")


class ValueCodec(Protocol):
    """Encodes values to bytes, and decodes them."""

    def encode(self, value: Any) -> bytes: ...
    def decode(self, data: bytes) -> Any: ...


class _BytesCodec:
    """Values are bytes."""

    def encode(self, value: Any) -> bytes:
        if not isinstance(value, bytes):
            raise InvalidInputError(
                f"a value is bytes, got {type(value).__name__}",
                hint="Open the catalog with codec=reef.catalog.JSON for other values",
            )
        return value

    def decode(self, data: bytes) -> Any:
        return data

    def __reduce__(self) -> str:
        return "BYTES"


class _JsonCodec:
    """Values are JSON documents."""

    def encode(self, value: Any) -> bytes:
        try:
            return msgspec.json.encode(value)
        except (TypeError, ValueError) as error:
            raise InvalidInputError(f"the value is not JSON: {error}") from error

    def decode(self, data: bytes) -> Any:
        try:
            return msgspec.json.decode(data)
        except UNDECODABLE as error:
            raise CorruptionError(
                f"a value is not JSON: {error}", hint="It was written with another codec"
            ) from error

    def __reduce__(self) -> str:
        return "JSON"


BYTES: ValueCodec = _BytesCodec()
JSON: ValueCodec = _JsonCodec()


def as_key(key: Key) -> bytes:
    """Return a key's bytes; text is UTF-8."""
    try:
        encoded = key.encode() if isinstance(key, str) else key
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            f"the key is not text: {error}", kind=ErrorKind.INVALID_KEY
        ) from error
    if not isinstance(encoded, bytes) or not 1 <= len(encoded) <= KEY_BYTES_MAX:
        raise InvalidInputError(
            f"a key is text or bytes, 1 to {KEY_BYTES_MAX:,} of them, got {key!r:.80}",
            kind=ErrorKind.INVALID_KEY,
        )
    return encoded


def incomplete(txn_id: int, error: NotFoundError) -> CorruptionError:
    """Return the error for a missing object that no garbage collection may have deleted."""
    return CorruptionError(
        f"the state of transaction {txn_id} is incomplete: {error.message}",
        hint="Run `reef catalog verify`",
        **error.context,
    )


class _Session:
    """Base of both kinds: a pinned state, and its lease."""

    def __init__(
        self,
        context: CatalogContext,
        codec: ValueCodec,
        view: CatalogView,
        lease: HeldLease[SessionLease],
    ) -> None:
        self._context = context
        self._codec = codec
        self._view = view
        self._lease = lease
        self._ended = False

    @property
    def snapshot(self) -> CatalogSnapshot:
        """The state that is read."""
        return self._view.snapshot

    @property
    def ended(self) -> bool:
        """Whether it was committed or ended."""
        return self._ended

    def __repr__(self) -> str:
        state = "ended" if self._ended else "open"
        return f"<{type(self).__name__} at transaction {self.snapshot.txn_id}, {state}>"

    # --- reading ------------------------------------------------------------------
    def get(self, key: Key) -> Any:
        """Return the value, or None."""
        value = self._read(as_key(key))
        return None if value is None else self._codec.decode(value)

    def scan(self) -> list[tuple[bytes, Any]]:
        """Return all pairs, sorted by key."""
        return self.scan_range()

    def scan_range(
        self, start: Key | None = None, end: Key | None = None, *, prefix: Key | None = None
    ) -> list[tuple[bytes, Any]]:
        """Return the pairs from `start` up to, not including, `end`."""
        pairs = self._read_range(KeyRange.of(start, end, prefix))
        return [(key, self._codec.decode(value)) for key, value in pairs.items()]

    def _read(self, key: bytes) -> bytes | None:
        return self._read_pinned(lambda: self._view.get(key))

    def _read_range(self, key_range: KeyRange) -> dict[bytes, bytes]:
        return self._read_pinned(lambda: self._view.scan(key_range))

    def _read_pinned(self, read: Callable[[], T]) -> T:
        """Run a read; an object may be missing only if the lease has expired."""
        self._check_open()
        try:
            return read()
        except NotFoundError as error:
            if not self._lease.expired:
                raise incomplete(self.snapshot.txn_id, error) from error
            raise ConflictError(
                f"transaction {self.snapshot.txn_id} was garbage-collected: {error.message}",
                kind=ErrorKind.COLLECTED,
                hint="The session's lease has expired: begin another session and keep it alive",
            ) from error

    # --- the lease ----------------------------------------------------------------
    def heartbeat(self) -> None:
        """Renew the lease now; ConflictError if it is lost."""
        self._check_open()
        self._lease.heartbeat()

    def start_lease_keeper(self) -> LeaseKeeper:
        """Renew the lease from a thread, until the keeper is shut down or the session ends."""
        self._check_open()
        return self._lease.renew_in_background()

    keep_alive = start_lease_keeper

    def end(self) -> None:
        """Release the state; changes that were staged and not committed are dropped."""
        if not self._ended:
            self._ended = True
            self._lease.release()

    def _check_open(self) -> None:
        if self._ended:
            raise ClosedError("this catalog session has ended", hint="Begin another one")

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def __del__(self) -> None:
        # No lock and no request: a finalizer runs in any thread, at any time.
        if not getattr(self, "_ended", True):
            warnings.warn(
                f"a {type(self).__name__} of a catalog was dropped without end() or commit()",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )


class ReadSession(_Session):
    """Reads one state as long as its lease is alive."""


class WriteSession(_Session):
    """Reads one state, stages changes, and commits them together."""

    def __init__(
        self,
        context: CatalogContext,
        codec: ValueCodec,
        view: CatalogView,
        lease: HeldLease[SessionLease],
        base: KnownHead,
        *,
        auto_compact: bool = True,
    ) -> None:
        super().__init__(context, codec, view, lease)
        self._base = base
        self._auto_compact = auto_compact
        self._staged: dict[bytes, bytes | None] = {}
        self._staged_bytes = 0
        self._reads = ConflictSet()

    # --- staging ------------------------------------------------------------------
    def put(self, key: Key, value: Any) -> None:
        """Stage a value for a key."""
        self._stage(as_key(key), self._codec.encode(value))

    def delete(self, key: Key) -> None:
        """Stage the deletion of a key, which need not exist."""
        self._stage(as_key(key), None)

    def get_local(self, key: Key) -> Any:
        """Return the value that is staged for a key; None without one, or for a deletion."""
        staged = self._staged.get(as_key(key))
        return None if staged is None else self._codec.decode(staged)

    def scan_local(
        self, start: Key | None = None, end: Key | None = None, *, prefix: Key | None = None
    ) -> list[tuple[bytes, Any]]:
        """Return the staged pairs of a range; the value of a deletion is None."""
        staged = self._staged_in(KeyRange.of(start, end, prefix))
        return [
            (key, None if value is None else self._codec.decode(value))
            for key, value in sorted(staged.items())
        ]

    def _stage(self, key: bytes, value: bytes | None) -> None:
        self._check_open()
        staged_bytes = self._staged_bytes + _record_bytes(key, value)
        if key in self._staged:
            staged_bytes -= _record_bytes(key, self._staged[key])
        if staged_bytes > SEGMENT_BYTES_MAX:
            raise InvalidInputError(
                f"a catalog session stages at most {SEGMENT_BYTES_MAX:,} bytes",
                hint="A catalog is for metadata: store data in a namespace, and its name here",
            )
        self._staged[key], self._staged_bytes = value, staged_bytes

    def _staged_in(self, key_range: KeyRange) -> dict[bytes, bytes | None]:
        return {key: value for key, value in self._staged.items() if key_range.has(key)}

    # --- reading ------------------------------------------------------------------
    def _read(self, key: bytes) -> bytes | None:
        self._check_open()
        if key in self._staged:
            return self._staged[key]
        self._reads.keys.add(key)
        return super()._read(key)

    def _read_range(self, key_range: KeyRange) -> dict[bytes, bytes]:
        self._check_open()
        self._reads.ranges.append(key_range)
        pairs = apply_records(super()._read_range(key_range), self._staged_in(key_range))
        return dict(sorted(pairs.items()))

    # --- the end ------------------------------------------------------------------
    def commit(self) -> CommitReceipt:
        """Apply the changes atomically, and end the session.

        ConflictError: another transaction changed a key that was read or written here, and
        nothing was changed. OutcomeUnknownError: `Catalog.resolve(error.receipt)` decides it.
        """
        self._check_open()
        try:
            if not self._staged:  # every read was valid at the snapshot
                head = self._base.head
                return CommitReceipt(
                    head.last_segment_seq, head.last_txn_id, head.write_id, head.write_id
                )
            conflicts = ConflictSet(self._reads.keys | self._staged.keys(), self._reads.ranges)
            receipt = commit(self._context, self._base, conflicts, self._staged, self._lease.id)
        finally:
            self.end()
        if self._auto_compact:
            compact_if_due(self._context, receipt.seq)
        return receipt


def _record_bytes(key: bytes, value: bytes | None) -> int:
    return len(key) + len(value or b"") + RECORD_BYTES


def pin_at(
    context: CatalogContext, snapshot: CatalogSnapshot, *, owner: str
) -> HeldLease[SessionLease]:
    """Return a lease on an older snapshot; NotFoundError if it is, or may be, garbage-collected.

    The lease is written first, and then the plan is loaded, which may have discarded the state.
    """
    lease = take_lease(context, snapshot, owner)
    context.runtime.reach("catalog lease written")
    try:
        _check_retained(context, snapshot)
    except BaseException:
        lease.release()
        raise
    return lease


def _check_retained(context: CatalogContext, snapshot: CatalogSnapshot) -> None:
    retained_from = load_plan(context).plan.retained_from
    if snapshot.floor < retained_from:
        raise NotFoundError(
            f"the state of transaction {snapshot.txn_id} was garbage-collected: it begins with "
            f"segment {snapshot.floor}, the oldest retained is {retained_from}",
            kind=ErrorKind.COLLECTED,
            hint="Take a new snapshot, and keep a session open on it",
        )


BACKOFF = RetryPolicy(attempts_max=20, deadline_s=60.0, first_delay_s=0.02, delay_max_s=1.0)
"""Retries of a transaction after conflicts."""
READS_MAX = 10
"""Attempts of a read without a lease whose objects are garbage-collected meanwhile."""


def open_catalog(
    target: str | os.PathLike[str] | Store,
    *,
    prefix: str = "",
    cache: int | BlobCache | None = CACHE_BYTES,
    retention: Retention | None = None,
    backoff: RetryPolicy | None = None,
    codec: ValueCodec = BYTES,
    auto_compact: bool = True,
    metrics: Metrics | None = None,
    **options: Any,
) -> "Catalog":
    """Open the catalog at a URL, or below a prefix of a store.

    `cache` is a number of bytes, a blob cache of your own, or None. With `auto_compact=False`
    commits do not compact: run `compactor().run_once()` instead. `options` are passed to
    `reef.stores.open`. No request is sent before the catalog is used.
    """
    metrics = metrics or Metrics()
    if isinstance(target, str | os.PathLike):
        target = open_store(target, metrics=metrics, **options)
    return Catalog(
        target,
        prefix=prefix,
        cache=cache,
        retention=retention,
        backoff=backoff,
        codec=codec,
        auto_compact=auto_compact,
        metrics=metrics,
    )


class Catalog:
    """Keys and values with sessions. Thread-safe."""

    def __init__(
        self,
        store: Store,
        *,
        prefix: str = "",
        cache: int | BlobCache | None = CACHE_BYTES,
        retention: Retention | None = None,
        backoff: RetryPolicy | None = None,
        codec: ValueCodec = BYTES,
        auto_compact: bool = True,
        metrics: Metrics | None = None,
    ) -> None:
        self.store = store
        self.names = CatalogNames(prefix.rstrip("/") + "/" if prefix else "")
        self.cache = MemoryBlobCache(cache) if isinstance(cache, int) else cache
        self.retention = retention or Retention()
        self.backoff = backoff or BACKOFF
        self.codec = codec
        self.auto_compact = auto_compact
        self.metrics = metrics or Metrics()
        self.events = Events()
        self._lock = leaf_lock()
        self._opened: _OpenedContext | None = None
        self._recovered = False

    def __reduce__(self) -> tuple[Any, ...]:
        names = ("cache", "retention", "backoff", "codec", "auto_compact")
        settings = {name: getattr(self, name) for name in names}
        return _reopen, (self.store, self.names.root, settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    def __repr__(self) -> str:
        return f"<Catalog {self.store.url}/{self.names.root}>"

    # --- sessions -----------------------------------------------------------------
    def session_write(self) -> WriteSession:
        """Begin a transaction at the newest state."""
        context = self._writable()
        if not self._recovered:
            recover_orphans(context)
            self._recovered = True
        known, lease = pin(context, owner="write session")
        view = context.view(CatalogSnapshot.of(known))
        return WriteSession(context, self.codec, view, lease, known, auto_compact=self.auto_compact)

    def session_read(self) -> ReadSession:
        """Pin the newest state, and read it."""
        context = self._writable()
        known, lease = pin(context, owner="read session")
        return ReadSession(context, self.codec, context.view(CatalogSnapshot.of(known)), lease)

    def session_at(self, snapshot: CatalogSnapshot) -> ReadSession:
        """Read an older snapshot, taken by this process or another one."""
        context = self._writable()
        lease = pin_at(context, snapshot, owner="read session")
        return ReadSession(context, self.codec, context.view(snapshot), lease)

    def transact(self, change: Callable[[WriteSession], T]) -> T:
        """Call `change(session)`, commit, and return its result.

        After a conflict it is called again with a new session, a bounded number of times. It is
        applied once: before another attempt the previous one is known not to be committed. If it
        calls `commit()` or `end()` itself, nothing more is done.
        """
        backoff = Backoff(self.store.runtime, self.backoff)
        while True:
            try:
                with self.session_write() as session:
                    result = change(session)
                    if session.ended or self._commit(session):
                        return result
                    lost = ConflictError("a commit without a response has not landed")
            except ConflictError as error:
                lost = error
            if not backoff.wait():
                raise lost

    def _commit(self, session: WriteSession) -> bool:
        """Commit, and resolve an unknown outcome; OutcomeUnknownError only if that fails too."""
        try:
            session.commit()
        except OutcomeUnknownError as error:
            backoff = Backoff(self.store.runtime, self.backoff)
            while True:
                try:
                    return self.resolve(error.receipt)
                except (OutcomeUnknownError, UnavailableError):
                    if not backoff.wait():
                        raise error from None
        return True

    def resolve(self, receipt: CommitReceipt) -> bool:
        """Decide a commit of unknown outcome, for good; return whether it is committed."""
        return resolve(self._writable(), receipt)

    # --- without a session --------------------------------------------------------
    def snapshot(self) -> CatalogSnapshot:
        """Return the snapshot of the newest state; it is not pinned."""
        context = self._readable()
        return EMPTY if context is None else CatalogSnapshot.of(context.heads.load())

    def get_latest(self, key: Key) -> Any:
        """Return a key's newest value, or None."""
        encoded = as_key(key)
        value = self._latest(lambda view: view.get(encoded), None)
        return None if value is None else self.codec.decode(value)

    def scan_latest(
        self, start: Key | None = None, end: Key | None = None, *, prefix: Key | None = None
    ) -> list[tuple[bytes, Any]]:
        """Return the pairs of a range, all of the newest state."""
        key_range = KeyRange.of(start, end, prefix)
        empty: dict[bytes, bytes] = {}
        pairs = self._latest(lambda view: view.scan(key_range), empty)
        return [(key, self.codec.decode(value)) for key, value in pairs.items()]

    def _latest(self, read: Callable[[CatalogView], T], empty: T) -> T:
        """Read without a lease: if an object was garbage-collected, there is a newer head."""
        context = self._readable()
        if context is None:
            return empty
        for _ in range(READS_MAX):
            known = context.heads.load()
            try:
                return read(context.view(CatalogSnapshot.of(known)))
            except NotFoundError as error:
                if context.heads.load().head.revision == known.head.revision:
                    raise incomplete(known.head.last_txn_id, error) from error
        raise UnavailableError(
            f"objects of {self!r} are garbage-collected faster than they can be read",
            hint="Read in a session, or raise Retention.grace_s",
        )

    # --- maintenance --------------------------------------------------------------
    def recover_orphans(self) -> int:
        """Publish durable transactions whose writers are gone; return their number."""
        return recover_orphans(self._writable())

    def compactor(self, *, compact_after: int = COMPACT_AFTER) -> CatalogCompactor:
        """Return the compactor and garbage collector.

        `run_once` compacts when there are `compact_after` segments since the last checkpoint.
        """
        return CatalogCompactor(self._writable(), compact_after=compact_after)

    def checkpoint(self) -> CheckpointMeta | None:
        """Return the metadata of the newest checkpoint; None if there is none yet."""
        return self._latest(lambda view: view.checkpoint(), None)

    def recreate(self, make: Callable[[], Mapping[str, Any]]) -> None:
        """Replace a history that can no longer be read by the result of `make()`.

        For content that can be derived from elsewhere: the old one is discarded, and open sessions
        get a ConflictError. If the head changes concurrently, `make` is called again.
        """

        def encoded() -> dict[bytes, bytes]:
            return {as_key(key): self.codec.encode(value) for key, value in make().items()}

        upkeep.recreate(self._writable(), encoded)

    def begin_anew(self, make: Callable[[], Mapping[str, Any]]) -> None:
        """Deprecated name of `recreate`."""
        warnings.warn(
            "Catalog.begin_anew is deprecated: use Catalog.recreate",
            DeprecationWarning,
            stacklevel=2,
        )
        self.recreate(make)

    def verify(self) -> CatalogReport:
        """Read everything that is needed, and return every problem."""
        context = self._readable()
        return CatalogReport() if context is None else verify(context)

    # --- opening ------------------------------------------------------------------
    def _writable(self) -> CatalogContext:
        """Return the context, once the bucket's conditional writes are verified."""
        return self._open(proved=True) or self._make(agree_on_cas(self.store))

    def _readable(self) -> CatalogContext | None:
        """Return the context; None if the catalog was never written, so that it has no head."""
        known = self._open(proved=False)
        if known is not None:
            return known
        verdict = remembered(self.store)
        if verdict is not None:
            return self._make(verdict, proved=agrees_without_register(self.store, verdict))
        # If it was written, then through a root above this one, which has the verdict.
        implied = self._implied_verdict()
        if implied is None:
            return None
        agrees_without_register(self.store, implied)
        return self._make(implied, proved=False)

    def _implied_verdict(self) -> CasVerdict | None:
        """Return the verdict under which the existing head was written, from its form."""
        verdict = partial(CasVerdict, format=1, proved_at_s=0.0)
        with suppress(NotFoundError):
            self.store.head(self.names.head)
            return verdict(cas="native", if_match=True)
        numbered = next(iter(self.store.list(self.names.heads)), None)
        return None if numbered is None else verdict(cas="not known", if_match=False)

    def _open(self, *, proved: bool) -> CatalogContext | None:
        """Return the context of this process; a fork makes its own, with free locks."""
        opened = self._opened
        if opened is None or opened.process != self.store.runtime.process_id():
            return None
        return opened.context if opened.proved or not proved else None

    def _make(self, verdict: CasVerdict, *, proved: bool = True) -> CatalogContext:
        context = CatalogContext(
            as_proved(self.store, verdict),
            self.names,
            cache=self.cache,
            retention=self.retention,
            backoff=self.backoff,
            metrics=self.metrics,
            events=self.events,
        )
        with self._lock:
            known = self._open(proved=proved)
            if known is None:
                self._opened = _OpenedContext(self.store.runtime.process_id(), context, proved)
            return known or context


@dataclass(frozen=True, slots=True)
class _OpenedContext:
    """A context, the process that made it, and whether writes with it are safe."""

    process: int
    context: CatalogContext
    proved: bool


EMPTY = CatalogSnapshot("", 0, 0, None, None, 0, CatalogHead().recent)


def _reopen(store: Store, prefix: str, settings: dict[str, Any]) -> Catalog:
    return Catalog(store, prefix=prefix, **settings)
