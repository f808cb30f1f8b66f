"""The reader: follows the committed state of a namespace, and never writes.

Opening reads the manifest first and lists the log second; only contiguous LSNs count (the gap
rule). A warm reader probes the next LSN and the next generation. After a pause, and once a minute,
it lists instead: a probe past swept ids would report "nothing new" for ever (H47). It takes no
lease and works with read-only credentials. If an object that it needs was swept, it starts again
from the current head.

Damage is reported in `damage`: behind a damaged WAL object the reader serves the state before it
(H17); if the newest manifest is damaged, it serves the one before (H18).
"""

import logging
from typing import Any, Self

from reef.config import ReaderSettings
from reef.engine.context import NamespaceContext
from reef.engine.display import human_bytes
from reef.engine.handles.pinned import TimeTravel
from reef.engine.handles.readable import ForkAware, Readable
from reef.engine.history.changes import check_lsn
from reef.engine.log.log import SlotGone, Verdict
from reef.engine.log.tail import Tail
from reef.engine.read.caches import ByteCache, RowCache
from reef.engine.read.view import View
from reef.engine.stats import handle_html, namespace_info
from reef.errors import (
    ClosedError,
    CorruptionError,
    ErrorKind,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)
from reef.formats.manifest import Manifest
from reef.formats.wal_object import WalObject
from reef.manifest.head import HeadFinder, ManifestHead, locate
from reef.paths import Namespace
from reef.runtime import Runtime, Stopwatch
from reef.stores import Store
from reef.stores.notify.base import Notifier, pause
from reef.telemetry import Events, Metrics, operation

RESTARTS_MAX = 10
POLL_S = 0.05
"""How often `wait_for` polls without a notifier."""
PROBES_MAX = 16
"""WAL objects that a refresh reads one by one; after that it lists the rest."""


class Reader(TimeTravel, ForkAware, Readable):
    """A reader of one namespace. Thread-safe; picklable; survives a fork."""

    def __init__(
        self,
        store: Store,
        namespace: Namespace,
        settings: ReaderSettings,
        *,
        metrics: Metrics | None = None,
        events: Events | None = None,
        notify: Notifier | None = None,
        heads: HeadFinder | None = None,
    ) -> None:
        self.namespace = namespace.name
        self._damaged_log: CorruptionError | None = None
        self._last_void = 0
        self._damaged_head: CorruptionError | None = None
        self._store = store
        self._settings = settings
        self._metrics = metrics = metrics or Metrics()
        self._events = events or Events()
        self._runtime: Runtime = store.runtime
        self._cache = ByteCache(settings.cache_bytes, metrics)
        self._notify = notify
        self._bind(heads or NamespaceContext(store, namespace).heads)
        self._row_cache = RowCache(settings.row_cache_bytes)
        self._set_home()
        self._closed = False
        self._tail = self._open(self._heads.last)

    def __reduce__(self) -> tuple[Any, ...]:
        return Reader, (self._store, self._names, self._settings)

    def _bind(self, heads: HeadFinder) -> None:
        """Switch to an incarnation of the namespace."""
        context = NamespaceContext(self._store, heads.names, heads=heads)
        self._heads, self._names = heads, heads.names
        self._log, self._segments = context.log, context.segments(self._cache)
        self._subscription = (
            self._subscribe()
        )  # before the log is listed, so that no commit is missed

    # --- state --------------------------------------------------------------------
    @property
    def last_lsn(self) -> int:
        """The newest LSN that this reader has applied."""
        return self._tail.view().last_lsn

    @property
    def damage(self) -> CorruptionError | None:
        """The damage that hides newer rows from this reader; None if there is none (H17, H18)."""
        return self._damaged_head or self._damaged_log

    def refresh(self) -> None:
        """Load everything that was committed before this call."""
        self._check()
        with self._turn:
            self._advance()

    def wait_for(self, lsn: int, timeout_s: float = 30.0) -> bool:
        """Wait until an LSN is visible; return False if `timeout_s` passed first."""
        self._check()
        check_lsn(lsn, "lsn")
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
            raise InvalidInputError(f"timeout_s={timeout_s!r} is not a number of seconds")
        deadline = self._runtime.deadline(timeout_s)
        while self.last_lsn < lsn:
            self.refresh()
            if self.last_lsn >= lsn:
                break
            if deadline.passed():
                return False
            left_s = deadline.remaining_s()
            calm_s = min(self._settings.refresh_interval_ms / 1000, left_s)
            pause(self._runtime, self._subscription, min(POLL_S, left_s), calm_s)
        return True

    def close(self) -> None:
        """Close the handle."""
        self._closed = True
        if self._subscription is not None:
            self._subscription.signal()  # wake waiters at once

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        where = f"generation {self._tail.manifest.generation}, LSN {self.last_lsn}"
        damaged = f", damaged: {self.damage.context['object']}" if self.damage else ""
        closed = ", closed" if self._closed else ""
        return f"<Reader {self.namespace}, {where}{damaged}{closed}>"

    def _repr_html_(self) -> str:
        facts = {
            "state": "closed" if self._closed else "open",
            "LSN": str(self.last_lsn),
            "not folded": human_bytes(self._tail.bytes),
        }
        if self.damage is not None:
            facts["damage"] = str(self.damage)
        info = namespace_info(self.namespace, self._tail.manifest, self._tail.ingested)
        return handle_html("Reader of", info, facts)

    # --- inside -------------------------------------------------------------------
    def _replan(self, generation: int, missing: NotFoundError) -> View:
        """Return a view on a newer generation; an object that the head names is damage."""
        if self._home != self._runtime.process_id():  # an iterator that was started before a fork
            self._move_in()
        with self._turn:
            if self._tail.manifest.generation <= generation:
                self._reopen()
            view = self._tail.view()
        if view.manifest.generation > generation:
            return view
        raise CorruptionError(
            f"{missing.message}, though generation {generation} needs it",
            hint="Run verify, then repair",
            **missing.context,
        ) from (self.damage or missing)

    def _view(self) -> View:
        if self._closed or self._home != self._runtime.process_id():
            self._check()
        subscription = self._subscription
        if self._runtime.boottime_s() >= self._due_s or (
            subscription is not None and subscription.is_signaled
        ):
            with self._turn:
                if self._is_due():  # no other thread has refreshed meanwhile
                    self._advance()
        return self._tail.view()

    def _is_ready(self) -> bool:
        at_home = not self._closed and self._home == self._runtime.process_id()
        return at_home and not self._is_due()

    def _is_due(self) -> bool:
        """Return whether a refresh is due: an event has come, or the interval has passed."""
        is_signaled = self._subscription is not None and self._subscription.is_signaled
        return is_signaled or self._runtime.boottime_s() >= self._due_s

    def _open(self, located: ManifestHead | None = None) -> Tail:
        """Read the manifest, list the log, check the manifest again; repeat if it moved (H10)."""
        for _ in range(RESTARTS_MAX):
            started = self._note_begin()
            head, located = located or self._find_current(), None
            tail = Tail(head.manifest, self._segments)
            tail.watch(self._row_cache)
            self._damaged_log = None
            self._note_head(head)
            if self._apply_listed(tail) and self._was_complete(head):
                self._listed = self._refreshed = started
                return tail
        raise UnavailableError(
            f"sweeps of {self.namespace} outran {RESTARTS_MAX} attempts to open it"
        )

    def _find_current(self) -> ManifestHead:
        """Return the head of the current incarnation of the name."""
        self._heads.forget()
        try:
            return self._heads.find(fallback=True)
        except NotFoundError as error:
            if error.kind is not ErrorKind.DROPPED:
                raise
            heads = locate(self._store, self.namespace, fallback=True)
            if heads.names != self._names:  # otherwise it was undropped meanwhile
                self._bind(heads)
            return heads.found

    def _reopen(self) -> None:
        """Replace the tail, and clear the row cache of the previous one."""
        tail = self._open()
        with tail.replacing():
            self._tail = tail

    def _apply_listed(self, tail: Tail) -> bool:
        """Apply the listed log; return False if some of it was swept meanwhile."""
        slots = self._log.scan(tail.next_lsn, tail.rules.skipped)
        while True:
            try:
                slot = next(slots, None)
            except SlotGone:
                return False
            except CorruptionError as error:  # serve up to a damaged object, and report it (H17)
                self._note_damaged_log(error, tail.next_lsn)
                return True
            if slot is None:
                return True
            if slot.object is None:
                tail.skip()
            elif not tail.knows(slot.object.header):
                return False
            elif not self._apply(tail, slot.object, slot.size):
                return True

    def _apply(self, tail: Tail, wal_object: WalObject, size: int = 0) -> bool:
        """Apply an object; return False if it is damaged, though its checksums are correct."""
        try:
            self._note_verdict(wal_object.header.lsn, tail.apply_object(wal_object, size))
        except CorruptionError as error:
            if error.kind is ErrorKind.CHANGED_WINNER:  # rows that were served may be wrong (H73)
                raise
            self._note_damaged_log(error, wal_object.header.lsn)
            return False
        return True

    def _advance(self) -> None:
        started = self._note_begin()
        before = self._tail.next_lsn
        with operation(self._metrics, "refresh"):
            try:
                self._advance_in_chain(started)
            except NotFoundError as error:
                if error.kind is not ErrorKind.DROPPED:
                    raise
                self._reopen()  # in the next incarnation, if there is one
        self._refreshed = started
        self._note_lag(self._tail.next_lsn - before)

    def _advance_in_chain(self, started: Stopwatch) -> None:
        if not self._must_list():
            self._apply_probed()
            self._move_to(self._heads.find(fallback=True))
        # Also after slow probes, whose misses prove nothing (H47).
        if self._must_list():
            if self._catch_up():
                self._listed = started
            else:
                self._reopen()

    def _catch_up(self) -> bool:
        """Refresh by listing, reading only new objects; return False if it must be reopened."""
        self._heads.forget()
        head = self._heads.find(fallback=True)
        older = head.manifest.generation < self._tail.manifest.generation
        if self.damage or head.damage or older or not self._can_follow(head.manifest):
            return False
        self._move_to(head)
        return self._apply_listed(self._tail) and self._was_complete(head)

    def _was_complete(self, head: ManifestHead) -> bool:
        """Return whether a listing made after `head` was complete: no sweep ran meanwhile (H10).

        Objects of a generation are condemned after it is superseded, and deleted a grace period
        later. Once a grace period has passed, only a newly read head can prove that the generation
        is still retained.
        """
        if head.fresh():
            return True
        self._heads.forget()
        return self._heads.find(fallback=True).manifest.oldest_retained <= head.manifest.generation

    def _note_begin(self) -> Stopwatch:
        """Start the stopwatch of a refresh; it is kept if the refresh succeeds."""
        if self._subscription is not None:
            self._subscription.clear()
        self._due_s = self._runtime.boottime_s() + self._settings.refresh_interval_ms / 1000
        return self._runtime.stopwatch()

    def _must_list(self) -> bool:
        grace_s = self._tail.manifest.grace_ms / 1000
        paused = self._refreshed.elapsed_s() > grace_s / 2
        return paused or self._listed.elapsed_s() > self._settings.list_interval_s

    def _apply_probed(self) -> None:
        for _ in range(PROBES_MAX):
            if self._damaged_log is not None:
                return
            try:
                found = self._log.read(self._tail.next_lsn)
            except CorruptionError as error:
                self._note_damaged_log(error, self._tail.next_lsn)
                return
            if found is None or self._must_list():
                return  # after a stall the slot may have been collected and filled again (H67)
            if not self._tail.knows(found.header):
                self._reopen()  # a newer manifest has its schema
                return
            if not self._apply(self._tail, found):
                return
        if not self._apply_listed(self._tail):
            self._reopen()

    def _move_to(self, head: ManifestHead) -> None:
        self._note_head(head)
        if head.manifest.generation <= self._tail.manifest.generation:
            return
        if self._can_follow(head.manifest):
            self._tail.rebase(head.manifest)
        else:
            self._reopen()

    def _can_follow(self, manifest: Manifest) -> bool:
        """Return whether the tail in memory can continue with a newer manifest."""
        before = self._tail.manifest
        changed = (manifest.skipped_lsns, manifest.wal_base) != (
            before.skipped_lsns,  # changed by a repair
            before.wal_base,  # changed by a drop and a new incarnation
        )
        return manifest.wal_floor <= self._tail.next_lsn and not self._damaged_log and not changed

    def _note_head(self, head: ManifestHead) -> None:
        if head.damage is not None and self._damaged_head is None:
            self._events.emit(
                "damaged_manifest",
                level=logging.WARNING,
                namespace=self.namespace,
                object=head.damage.context["object"],
                served_generation=head.manifest.generation,
            )
        self._damaged_head = head.damage

    def _note_damaged_log(self, error: CorruptionError, lsn: int) -> None:
        self._damaged_log = error
        self._events.emit("damaged_log", level=logging.WARNING, namespace=self.namespace, lsn=lsn)

    def _note_verdict(self, lsn: int, verdict: Verdict) -> None:
        """Count a void object once, even if it is replayed again."""
        if verdict is Verdict.VOID and lsn > self._last_void:
            self._last_void = lsn
            self._metrics.counter("log.void").add()

    def _note_lag(self, lsns: int) -> None:
        """Record how far behind the reader was: in LSNs, and the age of the newest of them."""
        age_s = max(0.0, self._runtime.wall_s() - self._tail.created_at_ms / 1000)
        self._metrics.gauge("reader.lag_lsns").set(lsns)
        self._metrics.gauge("reader.lag_s").set(age_s if lsns else 0.0)
        self._metrics.gauge("reader.last_lsn").set(self.last_lsn)

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"the reader of {self.namespace} is closed", hint="Open a new one")
        if self._home != self._runtime.process_id():
            self._move_in()

    def _reload(self) -> None:
        self._heads = NamespaceContext(self._store, self._names).heads
        self._notify = self._subscription = None
        self._row_cache = RowCache(self._settings.row_cache_bytes)
        self._reopen()
