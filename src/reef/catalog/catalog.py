"""A catalog: a serializable key-value store for metadata, with many writers, on any bucket.

`Catalog` is the face of all the parts. It is made over a store and a prefix, costs nothing until
it is used, may be shared by threads, and can be sent to other processes with its store.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

from reef.catalog import commit
from reef.catalog.cache import CACHE_BYTES, BlobCache, MemoryBlobCache
from reef.catalog.checkpoint_format import CheckpointMeta
from reef.catalog.compactor import COMPACT_AFTER, Compactor
from reef.catalog.head import Head
from reef.catalog.parts import Parts
from reef.catalog.pinning import pin, pin_at
from reef.catalog.recovery import recover_orphans
from reef.catalog.restart import begin_anew
from reef.catalog.sessions import Key, ReadSession, WriteSession, as_key, incomplete
from reef.catalog.settings import BYTES, Codec, Retention
from reef.catalog.snapshot import CommitReceipt, Snapshot
from reef.catalog.verify import CatalogReport, verify
from reef.catalog.view import View
from reef.errors import ConflictError, NotFoundError, OutcomeUnknownError, UnavailableError
from reef.paths import CatalogNames
from reef.runtime import leaf_lock
from reef.stores import RetryPolicy, Store, Verdict, agree_on_cas
from reef.stores import open as open_store
from reef.stores.probe import agrees_unasked, as_proved, remembered
from reef.stores.wrappers.retry import Backoff
from reef.telemetry import Events, Metrics
from reef.types import KeyRange

__all__ = ["BACKOFF", "Catalog", "open_catalog"]

BACKOFF = RetryPolicy(attempts_max=20, deadline_s=60.0, first_delay_s=0.02, delay_max_s=1.0)
"""How often, and for how long, a transaction that loses tries again."""
READS_MAX = 10
"""How often a read without a lease begins anew because what it needed was collected."""
T = TypeVar("T")


def open_catalog(
    target: str | os.PathLike[str] | Store,
    *,
    prefix: str = "",
    cache: int | BlobCache | None = CACHE_BYTES,
    retention: Retention | None = None,
    backoff: RetryPolicy | None = None,
    codec: Codec = BYTES,
    metrics: Metrics | None = None,
    **options: Any,
) -> "Catalog":
    """Open the catalog at a URL, or below a prefix of a store.

    `cache` is a number of bytes, a blob cache of your own, or None for none. `options` go to
    `reef.stores.open`. Nothing is read or written before the catalog is used.
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
        metrics=metrics,
    )


class Catalog:
    """Keys and values with sessions. Safe for threads."""

    def __init__(
        self,
        store: Store,
        *,
        prefix: str = "",
        cache: int | BlobCache | None = CACHE_BYTES,
        retention: Retention | None = None,
        backoff: RetryPolicy | None = None,
        codec: Codec = BYTES,
        metrics: Metrics | None = None,
    ) -> None:
        self.store = store
        self.names = CatalogNames(prefix.rstrip("/") + "/" if prefix else "")
        self.cache = MemoryBlobCache(cache) if isinstance(cache, int) else cache
        self.retention = retention or Retention()
        self.backoff = backoff or BACKOFF
        self.codec = codec
        self.metrics = metrics or Metrics()
        self.events = Events()
        self._lock = leaf_lock()
        self._made: _Made | None = None
        self._recovered = False

    def __reduce__(self) -> tuple[Any, ...]:
        settings = {
            name: getattr(self, name) for name in ("cache", "retention", "backoff", "codec")
        }
        return _reopen, (self.store, self.names.root, settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    def __repr__(self) -> str:
        return f"<Catalog {self.store.url}/{self.names.root}>"

    # --- sessions -----------------------------------------------------------------
    def session_write(self) -> WriteSession:
        """Begin a transaction at the newest state."""
        parts = self._writable()
        if not self._recovered:
            recover_orphans(parts)
            self._recovered = True
        known, lease = pin(parts, owner="write session")
        return WriteSession(parts, self.codec, parts.view(Snapshot.of(known)), lease, known)

    def session_read(self) -> ReadSession:
        """Pin the newest state, and read it."""
        parts = self._writable()
        known, lease = pin(parts, owner="read session")
        return ReadSession(parts, self.codec, parts.view(Snapshot.of(known)), lease)

    def session_at(self, snapshot: Snapshot) -> ReadSession:
        """Read a snapshot that was taken before, here or elsewhere."""
        parts = self._writable()
        lease = pin_at(parts, snapshot, owner="read session")
        return ReadSession(parts, self.codec, parts.view(snapshot), lease)

    def transact(self, change: Callable[[WriteSession], T]) -> T:
        """Call `change(session)`, commit, and return what it returned.

        After a conflict it is called again, with a new session, a bounded number of times. It is
        applied once: before another try it is certain that the last one is not committed. One
        that ends the session itself, by `commit()` or `end()`, has had its way.
        """
        backoff = Backoff(self.store.runtime, self.backoff)
        while True:
            try:
                with self.session_write() as session:
                    result = change(session)
                    if session.ended or self._committed(session):
                        return result
                    lost = ConflictError("a commit without an answer was found not to have landed")
            except ConflictError as error:
                lost = error
            if not backoff.wait():
                raise lost

    def _committed(self, session: WriteSession) -> bool:
        """Commit, and settle it where the answer was lost; unknown only if that fails too."""
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
        """Whether a commit of unknown outcome is committed: settled for good by asking."""
        return commit.resolve(self._writable(), receipt)

    # --- without a session --------------------------------------------------------
    def snapshot(self) -> Snapshot:
        """Return the newest state's snapshot; no lease holds it."""
        parts = self._readable()
        return EMPTY if parts is None else Snapshot.of(parts.heads.load())

    def get_latest(self, key: Key) -> Any:
        """Return a key's newest value, or None."""
        wanted = as_key(key)
        found = self._latest(lambda view: view.get(wanted), None)
        return None if found is None else self.codec.decode(found)

    def scan_latest(
        self, start: Key | None = None, end: Key | None = None, *, prefix: Key | None = None
    ) -> list[tuple[bytes, Any]]:
        """Return the newest pairs of a range, all of one state."""
        wanted = KeyRange.of(start, end, prefix)
        nothing: dict[bytes, bytes] = {}
        found = self._latest(lambda view: view.scan(wanted), nothing)
        return [(key, self.codec.decode(value)) for key, value in found.items()]

    def _latest(self, read: Callable[[View], T], empty: T) -> T:
        """Without a lease what a head names may be collected; then there is a newer head."""
        parts = self._readable()
        if parts is None:
            return empty
        for _ in range(READS_MAX):
            known = parts.heads.load()
            try:
                return read(parts.view(Snapshot.of(known)))
            except NotFoundError as error:
                if parts.heads.load().head.revision == known.head.revision:
                    raise incomplete(known.head.last_txn_id, error) from error
        raise UnavailableError(
            f"what is read of {self!r} is collected faster than it can be read",
            hint="Read in a session, or have more grace: Retention.grace_s",
        )

    # --- upkeep -------------------------------------------------------------------
    def recover_orphans(self) -> int:
        """Publish transactions that are durable, and whose writers have gone; return how many."""
        return recover_orphans(self._writable())

    def compactor(self, *, compact_after: int = COMPACT_AFTER) -> Compactor:
        """Return what makes checkpoints and collects.

        `run_once` compacts when there are so many segments since the last checkpoint.
        """
        return Compactor(self._writable(), compact_after=compact_after)

    def checkpoint(self) -> CheckpointMeta | None:
        """Return what the newest checkpoint says of itself; None if there is none yet."""
        return self._latest(lambda view: view.checkpoint(), None)

    def begin_anew(self, make: Callable[[], Mapping[str, Any]]) -> None:
        """Put what `make()` returns in the place of a history that can no longer be read.

        For what can be made again from elsewhere: whatever the catalog held is given up, and
        sessions that are open get a ConflictError. If others are first, it is made once more.
        """

        def encoded() -> dict[bytes, bytes]:
            return {as_key(key): self.codec.encode(value) for key, value in make().items()}

        begin_anew(self._writable(), encoded)

    def verify(self) -> CatalogReport:
        """Read everything that is needed, and return every problem."""
        parts = self._readable()
        return CatalogReport() if parts is None else verify(parts)

    # --- the parts ----------------------------------------------------------------
    def _writable(self) -> Parts:
        """Return the parts, once the bucket's conditional writes are proved."""
        return self._known(proved=True) or self._make(agree_on_cas(self.store))

    def _readable(self) -> Parts | None:
        """Return the parts; None if nobody has ever written here, so that there is no head."""
        known = self._known(proved=False)
        if known is not None:
            return known
        verdict = remembered(self.store)
        if verdict is not None:
            return self._make(verdict, proved=agrees_unasked(self.store, verdict))
        # Written, if at all, by way of a root above this one, which keeps the verdict.
        shown = self._shown()
        if shown is None:
            return None
        agrees_unasked(self.store, shown)
        return self._make(shown, proved=False)

    def _shown(self) -> Verdict | None:
        """Return the verdict that must have been, by the form of the head that is there."""
        verdict = partial(Verdict, format=1, proved_at_s=0.0)
        with suppress(NotFoundError):
            self.store.head(self.names.head)
            return verdict(cas="native", if_match=True)
        numbered = next(iter(self.store.list(self.names.heads)), None)
        return None if numbered is None else verdict(cas="not known", if_match=False)

    def _known(self, *, proved: bool) -> Parts | None:
        """Return the parts that this process made; a fork makes its own, with free locks."""
        made = self._made
        if made is None or made.process != self.store.runtime.process_id():
            return None
        return made.parts if made.proved or not proved else None

    def _make(self, verdict: Verdict, *, proved: bool = True) -> Parts:
        parts = Parts.of(
            as_proved(self.store, verdict),
            self.names,
            cache=self.cache,
            retention=self.retention,
            backoff=self.backoff,
            metrics=self.metrics,
            events=self.events,
        )
        with self._lock:
            known = self._known(proved=proved)
            if known is None:
                self._made = _Made(self.store.runtime.process_id(), parts, proved)
            return known or parts


@dataclass(frozen=True, slots=True)
class _Made:
    """The parts, who made them, and whether they may be written with."""

    process: int
    parts: Parts
    proved: bool


EMPTY = Snapshot("", 0, 0, None, None, 0, Head().recent)


def _reopen(store: Store, prefix: str, settings: dict[str, Any]) -> Catalog:
    return Catalog(store, prefix=prefix, **settings)
