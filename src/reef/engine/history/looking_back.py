"""Looking back: past moments and changes, from a plain reader."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import datetime
from typing import TypeVar

import pyarrow as pa

from reef.config import ReaderSettings
from reef.engine.history.changes import Changes, LogFollower, changes_arrow, check_lsn
from reef.engine.history.moments import AsOf, Wanted
from reef.engine.history.pinned import PinnedReader
from reef.engine.reading.segments import SegmentStore
from reef.errors import Kind, NotFoundError
from reef.paths import Namespace
from reef.runtime import Runtime
from reef.stores import Store
from reef.stores.notify.base import Bell, Notifier
from reef.telemetry import Metrics

__all__ = ["LooksBack"]

T = TypeVar("T")


class LooksBack(ABC):
    """What a reader can say of the past."""

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
        time: datetime | None = None,
        pin: bool = False,
    ) -> PinnedReader:
        """Return a view of one past moment, which never changes.

        With `pin` a lease keeps what it needs until it is closed; and without a moment, that
        is now. NotFoundError(kind="collected") if the moment is gone.
        """
        self._check()
        now = pin and (generation, lsn, time) == (None, None, None)
        wanted = Wanted() if now else AsOf(generation=generation, lsn=lsn, time=time).wanted()
        return self._in_current_incarnation(
            lambda segments: PinnedReader(
                self._store,
                segments.namespace,
                self._settings,
                wanted,
                pin=pin,
                segments=segments,
                metrics=self._metrics,
            )
        )

    def changes(
        self, after_lsn: int = 0, *, follow: bool = False, timeout_s: float | None = None
    ) -> Changes:
        """Yield what was committed after an LSN, in order, up to the end of the log.

        With `follow` it waits there for more, at most `timeout_s` at a time. Where the log was
        collected, NotFoundError(kind="collected"); a cursor keeps it. An LSN past the end of the
        log is an InvalidInputError, unless it follows.
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
            bell=self._new_bell() if follow else None,
            calm_s=self._settings.refresh_interval_ms / 1000,
        )

    def changes_arrow(
        self, after_lsn: int = 0, upto_lsn: int | None = None
    ) -> pa.RecordBatchReader:
        """Return the changes of (after_lsn, upto_lsn] as a stream of Arrow batches.

        Without `upto_lsn`, up to the newest that this reader sees after a refresh.
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

    def _new_bell(self) -> Bell | None:
        """Return a bell for this namespace's commits, where there is someone to ring it."""
        if self._notify is None:
            return None
        return self._notify.bell(self._names.wal, self._names.manifests)

    def _follower(self, after_lsn: int) -> LogFollower:
        check_lsn(after_lsn, "after_lsn")
        return self._in_current_incarnation(
            lambda segments: LogFollower(self._store, segments.namespace, segments, after_lsn)
        )

    def _in_current_incarnation(self, read: Callable[[SegmentStore], T]) -> T:
        """Read with the segments of one incarnation; of the next, if the name was re-created."""
        try:
            return read(self._segments)
        except NotFoundError as error:
            if error.kind is not Kind.DROPPED:
                raise
            self.refresh()
            return read(self._segments)
