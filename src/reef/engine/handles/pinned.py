"""Pinned readers, and the time travel of plain readers.

A `PinnedReader` reads one point in time, which never changes. With a lease, no object that it needs
is swept until it is closed (protocols §6): find the generation, write the lease, read the head
again, and fail if that generation is no longer retained. Without a lease it reads until an object
is missing, and then raises. It uses the schema of its generation; rows expire by the reader's
clock. Pickled or forked, it takes its own lease on the same state in the new process, or raises if
that is gone (H51).

`TimeTravel` gives a plain reader `as_of`, `changes` and `changes_arrow`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from typing import Any, Self, TypeVar

import pyarrow as pa

from reef.config import ReaderSettings
from reef.engine.handles.readable import ForkAware, Readable
from reef.engine.history.as_of import (
    AsOf,
    ConcurrentSweep,
    History,
    PointInTime,
    ReadTarget,
    read_target,
)
from reef.engine.history.changes import Changes, LogFollower, changes_arrow, check_lsn
from reef.engine.log.tail import Tail
from reef.engine.read.caches import ByteCache, RowCache
from reef.engine.read.segments import SegmentStore
from reef.engine.read.view import Scan, View
from reef.engine.stats import handle_html, namespace_info
from reef.errors import ClosedError, CorruptionError, ErrorKind, NotFoundError, UnavailableError
from reef.formats.manifest import Manifest
from reef.formats.versions import Versions
from reef.manifest.head import HeadFinder
from reef.manifest.roots import GenerationLease, narrowed, take_lease
from reef.paths import Namespace
from reef.runtime import Runtime
from reef.stores import Store
from reef.stores.leases import HeldLease
from reef.stores.notify.base import Notifier, Subscription
from reef.telemetry import Metrics

RESTARTS_MAX = 10


class PinnedReader(ForkAware, Readable):
    """A reader of one point in time. Thread-safe; picklable; survives a fork."""

    def __init__(
        self,
        store: Store,
        namespace: Namespace,
        settings: ReaderSettings,
        target: ReadTarget,
        *,
        pin: bool,
        segments: SegmentStore | None = None,
        metrics: Metrics | None = None,
        heads: HeadFinder | None = None,
        dropped: bool = False,
    ) -> None:
        self.namespace = namespace.name
        self._dropped = dropped
        self._store = store
        self._names = namespace
        self._settings = settings
        self._pin = pin
        self._metrics = metrics or Metrics()
        self._runtime: Runtime = store.runtime
        cache = ByteCache(settings.cache_bytes, self._metrics)
        self._segments = segments or SegmentStore(store, namespace, cache)
        self._row_cache = RowCache(settings.row_cache_bytes)
        self._closed = False
        self._set_home()
        self._held: HeldLease[GenerationLease] | None = None
        self._tail = self._open(target, heads)
        # An open view, and its copies in other processes, outlive a drop of the namespace.
        self._dropped = True

    def __reduce__(self) -> tuple[Any, ...]:
        target = ReadTarget(self.generation, self.last_lsn)
        reopen = partial(type(self), pin=self._pin, dropped=self._dropped)
        return reopen, (self._store, self._names, self._settings, target)

    # --- state --------------------------------------------------------------------
    @property
    def generation(self) -> int:
        """The generation that is read."""
        return self._tail.manifest.generation

    @property
    def last_lsn(self) -> int:
        """The last LSN of this point in time."""
        return self._tail.view().last_lsn

    @property
    def pinned(self) -> bool:
        """Whether a lease protects the objects of this view."""
        return self._pin

    def close(self) -> None:
        """Release the lease. A forked copy leaves the lease of its parent alone."""
        if self._closed:
            return
        self._closed = True
        if self._held is not None and self._home == self._runtime.process_id():
            self._held.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        how = "closed" if self._closed else "pinned" if self._pin else "not pinned"
        where = f"generation {self.generation}, LSN {self.last_lsn}"
        return f"<PinnedReader {self.namespace}, {where}, {how}>"

    def _repr_html_(self) -> str:
        how = "closed" if self._closed else "pinned" if self._pin else "not pinned"
        facts = {"state": how, "LSN": str(self.last_lsn)}
        info = namespace_info(self.namespace, self._tail.manifest, self._tail.ingested)
        return handle_html("Pinned view of", info, facts)

    # --- inside -------------------------------------------------------------------
    def _open(self, target: ReadTarget, heads: HeadFinder | None) -> Tail:
        for _ in range(RESTARTS_MAX):
            history = self._history(heads)
            try:
                return self._open_once(history, target)
            except ConcurrentSweep:
                heads = None
        raise UnavailableError(
            f"sweeps of {self.namespace} outran {RESTARTS_MAX} attempts to open it"
        )

    def _open_once(self, history: History, target: ReadTarget) -> Tail:
        def check(point: PointInTime, tail: Tail, held: HeldLease[GenerationLease] | None) -> None:
            self._check_whole(history, point, held)

        held, tail = history.open_leased(target, self._lease, check)
        self._keep(held, tail)
        return tail

    def _keep(self, held: HeldLease[GenerationLease] | None, tail: Tail) -> None:
        """Hold the lease, narrowed to the point in time that was chosen (H74)."""
        if held is not None:
            held.narrow(**narrowed(tail.manifest, tail.view().last_lsn))
        self._held = held

    def _check_whole(
        self, history: History, point: PointInTime, held: HeldLease[GenerationLease] | None
    ) -> None:
        """Raise ConcurrentSweep if the log may have been collected during the replay (H67)."""
        if held is None:
            is_whole = history.kept_slots(point.manifest, point.manifest.wal_floor)
        else:
            is_whole = held.is_held()
        if not is_whole:
            raise ConcurrentSweep("the log was collected during the replay")

    def _lease(self, manifest: Manifest) -> HeldLease[GenerationLease] | None:
        if not self._pin:
            return None
        owner = f"reader-{self._runtime.process_id()}"
        ttl_s = self._settings.lease_ttl_s
        lease = take_lease(self._store, self._names, manifest, owner=owner, ttl_s=ttl_s)
        held = HeldLease(lease)
        held.renew_in_background()  # at once: replaying a long log may outlast the TTL
        return held

    def _history(self, heads: HeadFinder | None = None) -> History:
        return History(self._store, self._names, self._segments, heads, dropped=self._dropped)

    def _view(self) -> View:
        self._check()
        return self._tail.view()

    def _is_ready(self) -> bool:
        at_home = not self._closed and self._home == self._runtime.process_id()
        return at_home and (self._held is None or self._held.is_fresh)

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"this view of {self.namespace} is closed", hint="Open a new one")
        if self._home != self._runtime.process_id():
            self._move_in()
        if self._held is not None:
            self._held.check()

    def _reload(self) -> None:
        """Take a lease for this process: the parent's may end at any time."""
        self._held = None
        history, point = self._history(), PointInTime(self._tail.manifest)
        held = self._lease(point.manifest)
        try:
            history.check(history.head(), point)
        except BaseException as error:
            if held is not None:
                held.release()
            if isinstance(error, ConcurrentSweep):
                raise self._collected_error(str(error)) from error
            raise
        self._keep(held, self._tail)

    def _pieces(self, scan: Scan) -> Iterator[Versions]:
        return self._held_through(super()._pieces(scan))

    def _held_through(self, pieces: Iterator[Versions]) -> Iterator[Versions]:
        for rows in pieces:
            yield rows
            self._check()

    def _replan(self, generation: int, missing: NotFoundError) -> View:
        """Raise: this state is in no other generation. Classify why the object is missing."""
        self._check()
        history = self._history()
        if not self._pin and not history.is_kept(history.head(), self._tail.manifest):
            raise self._collected_error(missing.message) from missing
        raise CorruptionError(
            f"{missing.message}, though generation {generation} needs it",
            hint="Run verify, then repair",
            **missing.context,
        ) from missing

    def _collected_error(self, why: str) -> NotFoundError:
        return NotFoundError(
            f"generation {self.generation} of {self.namespace} was garbage-collected: {why}",
            kind=ErrorKind.COLLECTED,
            hint="Open a newer one; pin=True or a snapshot protects a view",
            generation=self.generation,
        )


T = TypeVar("T")


class TimeTravel(ABC):
    """Past states and change streams of a reader's namespace."""

    namespace: str
    _store: Store
    _names: Namespace
    _settings: ReaderSettings
    _segments: SegmentStore
    _metrics: Metrics
    _runtime: Runtime
    _notify: Notifier | None = None

    @property
    @abstractmethod
    def last_lsn(self) -> int: ...
    @abstractmethod
    def refresh(self) -> None: ...
    @abstractmethod
    def _check(self) -> None:
        """Raise ClosedError if this handle may not be used."""

    def as_of(
        self,
        *,
        generation: int | None = None,
        lsn: int | None = None,
        time: datetime | str | None = None,
        pin: bool = False,
    ) -> PinnedReader:
        """Return a view of a past state: by generation, LSN or time.

        A time is a datetime with a zone, or ISO 8601 text. With `pin` a lease protects the view
        until it is closed; `pin` alone pins the current state. NotFoundError(kind="collected") if
        the state was garbage-collected.
        """
        self._check()
        now = pin and (generation, lsn, time) == (None, None, None)
        target = ReadTarget()
        if not now:
            target = read_target(AsOf(generation=generation, lsn=lsn, time=time))
        return self._in_current_incarnation(
            lambda segments: PinnedReader(
                self._store,
                segments.namespace,
                self._settings,
                target,
                pin=pin,
                segments=segments,
                metrics=self._metrics,
            )
        )

    def changes(
        self, after_lsn: int = 0, *, follow: bool = False, timeout_s: float | None = None
    ) -> Changes:
        """Yield the operations committed after an LSN, in order, up to the end of the log.

        With `follow`, wait there for more, at most `timeout_s` at a time. If the log was
        collected, raise NotFoundError(kind="collected"); a registered cursor retains it. Without
        `follow`, an LSN past the end of the log is an InvalidInputError.
        """
        self._check()
        follower = self._follower(after_lsn)
        if not follow and after_lsn > self.last_lsn:
            follower.check_reached()
        return Changes(
            follower,
            after_lsn,
            self._runtime,
            follow=follow,
            timeout_s=timeout_s,
            check=self._check,
            subscription=self._subscribe() if follow else None,
            calm_s=self._settings.refresh_interval_ms / 1000,
        )

    def changes_arrow(
        self, after_lsn: int = 0, upto_lsn: int | None = None
    ) -> pa.RecordBatchReader:
        """Return the changes of (after_lsn, upto_lsn] as a stream of Arrow batches.

        Without `upto_lsn`, up to the newest LSN after a refresh.
        """
        if upto_lsn is None or check_lsn(upto_lsn, "upto_lsn") > self.last_lsn:
            self.refresh()
        upto_lsn = self.last_lsn if upto_lsn is None else upto_lsn
        if upto_lsn > self.last_lsn:
            raise NotFoundError(
                f"LSN {upto_lsn} is not in the log of {self.namespace} yet",
                hint="Wait for it with wait_for",
                lsn=upto_lsn,
            )
        return changes_arrow(self._follower(after_lsn), upto_lsn)

    def _subscribe(self) -> Subscription | None:
        """Return a subscription to commits, if this reader has a notifier."""
        if self._notify is None:
            return None
        return self._notify.subscribe(self._names.wal, self._names.manifests)

    def _follower(self, after_lsn: int) -> LogFollower:
        check_lsn(after_lsn, "after_lsn")
        return self._in_current_incarnation(
            lambda segments: LogFollower(self._store, segments.namespace, segments, after_lsn)
        )

    def _in_current_incarnation(self, read: Callable[[SegmentStore], T]) -> T:
        """Call `read` with the current incarnation; with the next if the name was re-created."""
        try:
            return read(self._segments)
        except NotFoundError as error:
            if error.kind is not ErrorKind.DROPPED:
                raise
            self.refresh()
            return read(self._segments)
