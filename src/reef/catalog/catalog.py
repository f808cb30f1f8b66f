"""`Catalog`: a serializable key-value store for metadata, with many writers, on any bucket.

It is made from a store and a prefix, costs nothing until it is used, may be shared by threads, and
can be pickled with its store.
"""

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

from reef.catalog import commit, compaction
from reef.catalog.checkpoints import CheckpointMeta
from reef.catalog.compaction import COMPACT_AFTER, CatalogCompactor
from reef.catalog.head import CatalogHead
from reef.catalog.segments import CACHE_BYTES, BlobCache, MemoryBlobCache
from reef.catalog.sessions import (
    BYTES,
    Key,
    ReadSession,
    ValueCodec,
    WriteSession,
    as_key,
    incomplete,
    pin_at,
)
from reef.catalog.snapshot import (
    CatalogContext,
    CatalogSnapshot,
    CatalogView,
    CommitReceipt,
    Retention,
    pin,
)
from reef.catalog.verify import CatalogReport, verify
from reef.errors import ConflictError, NotFoundError, OutcomeUnknownError, UnavailableError
from reef.paths import CatalogNames
from reef.runtime import leaf_lock
from reef.stores import CasVerdict, RetryPolicy, Store, agree_on_cas
from reef.stores import open as open_store
from reef.stores.probe import agrees_without_register, as_proved, remembered
from reef.stores.wrappers.policies import Backoff
from reef.telemetry import Events, Metrics
from reef.types import KeyRange

BACKOFF = RetryPolicy(attempts_max=20, deadline_s=60.0, first_delay_s=0.02, delay_max_s=1.0)
"""Retries of a transaction after conflicts."""
READS_MAX = 10
"""Attempts of a read without a lease whose objects are garbage-collected meanwhile."""
T = TypeVar("T")


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
            commit.recover_orphans(context)
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
        return commit.resolve(self._writable(), receipt)

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
        return commit.recover_orphans(self._writable())

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

        compaction.recreate(self._writable(), encoded)

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
