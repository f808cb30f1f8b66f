"""Pinned readers: one moment of a namespace, for as long as it is needed.

What a pinned reader sees never changes. With a lease, nothing that it needs is swept until it
is closed; the order is that of protocol section 6: find the generation, write the lease, read
the head again, and refuse if that generation is no longer kept. Without one it reads until
something is missing, and says so.

It reads with the schema of its generation; rows expire by the reader's clock. Pickled or
forked, it takes a lease of its own in the new process, on the same moment, or says that the
moment is gone (H51).
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, Self

from reef.config import ReaderSettings
from reef.engine.history.held_lease import HeldLease
from reef.engine.history.moments import History, Moment, Moved, Wanted
from reef.engine.info import Info
from reef.engine.readable import Readable
from reef.engine.reading.cache import ByteCache
from reef.engine.reading.projection import Projection
from reef.engine.reading.row_cache import RowCache
from reef.engine.reading.segments import SegmentStore
from reef.engine.reading.view import View
from reef.engine.tail import Tail
from reef.errors import ClosedError, CorruptionError, Kind, NotFoundError, UnavailableError
from reef.formats.manifest import Manifest
from reef.formats.versions import Versions
from reef.manifest.head import HeadFinder
from reef.paths import Namespace
from reef.runtime import Runtime, leaf_lock
from reef.stores import Store
from reef.telemetry import Metrics
from reef.types import KeyRange

__all__ = ["PinnedReader"]

RESTARTS_MAX = 10


class PinnedReader(Readable):
    """A handle on one moment. Safe for threads; picklable; survives a fork."""

    def __init__(
        self,
        store: Store,
        namespace: Namespace,
        settings: ReaderSettings,
        wanted: Wanted,
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
        self._guard = leaf_lock()
        self._turn = self._runtime.lock()
        self._home = self._locks_home = self._runtime.process_id()
        self._held: HeldLease | None = None
        self._tail = self._open(wanted, heads)
        # What is open, and its copies in other processes, can be read after a drop as before it.
        self._dropped = True

    def __reduce__(self) -> tuple[Any, ...]:
        wanted = Wanted(self.generation, self.last_lsn)
        reopen = partial(type(self), pin=self._pin, dropped=self._dropped)
        return reopen, (self._store, self._names, self._settings, wanted)

    # --- what it sees -------------------------------------------------------------
    @property
    def generation(self) -> int:
        """The generation that is read."""
        return self._tail.manifest.generation

    @property
    def last_lsn(self) -> int:
        """The last LSN that belongs to this moment."""
        return self._tail.view().last_lsn

    @property
    def pinned(self) -> bool:
        """Whether a lease keeps what it needs."""
        return self._pin

    def close(self) -> None:
        """Give the lease back. A forked copy leaves its parent's alone."""
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
        return Info.of(self.namespace, self._tail.manifest, self._tail.ingested).html_of_handle(
            "One moment of", facts
        )

    # --- inside -------------------------------------------------------------------
    def _open(self, wanted: Wanted, heads: HeadFinder | None) -> Tail:
        for _ in range(RESTARTS_MAX):
            history = self._history(heads)
            try:
                return self._open_once(history, wanted)
            except Moved:
                heads = None
        raise UnavailableError(f"{self.namespace} is swept faster than it can be opened")

    def _open_once(self, history: History, wanted: Wanted) -> Tail:
        moment = history.find(history.head(), wanted)
        # On the wanted generation, not on the head: it protects what that one and newer ones name.
        held = self._lease(moment.manifest)
        try:
            head = history.head()  # again, now that the lease is there (H22)
            if wanted == Wanted():
                moment = Moment(head)
            history.check(head, moment)
            tail = history.replay(moment, head)
            self._check_whole(history, moment, held)
        except BaseException:
            if held is not None:
                held.release()
            raise
        self._held = held
        return tail

    def _check_whole(self, history: History, moment: Moment, held: HeldLease | None) -> None:
        """Raise Moved if the log may have been collected while it was read (H67)."""
        if held is None:
            is_whole = history.kept_slots(moment.manifest, moment.manifest.wal_floor)
        else:
            is_whole = held.is_held()
        if not is_whole:
            raise Moved("the log was collected while it was read")

    def _lease(self, manifest: Manifest) -> HeldLease | None:
        if not self._pin:
            return None
        owner = f"reader-{self._runtime.process_id()}"
        ttl_s = self._settings.lease_ttl_s
        held = HeldLease(self._store, self._names, manifest, owner=owner, ttl_s=ttl_s)
        held.beat_in_background()  # at once: reading a long log may take longer than it lasts
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
            raise ClosedError(f"this view of {self.namespace} is closed", hint="Open another one")
        if self._home != self._runtime.process_id():
            self._move_in()
        if self._held is not None:
            self._held.check()

    def _move_in(self) -> None:
        """Take a lease of this process's own: the parent's may end at any time (H51)."""
        process_id = self._runtime.process_id()
        with self._guard:
            if self._locks_home != process_id:  # one that was held at the fork has no owner here
                self._turn, self._locks_home = self._runtime.lock(), process_id
        with self._turn:
            if self._home != process_id:
                self._held = None
                self._pin_again()
                self._home = process_id

    def _pin_again(self) -> None:
        history, moment = self._history(), Moment(self._tail.manifest)
        held = self._lease(moment.manifest)
        try:
            history.check(history.head(), moment)
        except BaseException as error:
            if held is not None:
                held.release()
            if isinstance(error, Moved):
                raise self._gone(str(error)) from error
            raise
        self._held = held

    def _pieces(
        self, view: View, wanted: KeyRange, projection: Projection, reverse: bool
    ) -> Iterator[Versions]:
        return self._held_through(super()._pieces(view, wanted, projection, reverse))

    def _held_through(self, pieces: Iterator[Versions]) -> Iterator[Versions]:
        for rows in pieces:
            yield rows
            self._check()

    def _replan(self, generation: int, missing: NotFoundError) -> View:
        """There is no other view of this moment: tell what became of it."""
        self._check()
        history = self._history()
        if not self._pin and not history.is_kept(history.head(), self._tail.manifest):
            raise self._gone(missing.message) from missing
        raise CorruptionError(
            f"{missing.message}, though generation {generation} needs it",
            hint="Run verify, then repair",
            **missing.context,
        ) from missing

    def _gone(self, why: str) -> NotFoundError:
        return NotFoundError(
            f"generation {self.generation} of {self.namespace} is gone: {why}",
            kind=Kind.COLLECTED,
            hint="Open a newer one; pin=True or a snapshot keeps what it needs",
            generation=self.generation,
        )
