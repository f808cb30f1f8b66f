"""The reader: sees what is committed, a moment later, and never writes.

It opens by manifest first and listing second; contiguous LSNs only (the gap rule). When warm it
probes the next LSN and the next generation. After a pause, and once a minute, it lists what is
new instead: probes past swept ids would say "no news" for ever (H47). It needs no lease and
works with read-only credentials; what it reads may be swept, and then it starts again from
the current head.

Damage is told, never hidden: up to a damaged object of the log it serves what is before it
(H17), and where the newest manifest is damaged, the one before it (H18).
"""

import logging
from typing import Any, Self

from reef.config import ReaderSettings
from reef.engine.display import human_bytes
from reef.engine.history.changes import check_lsn
from reef.engine.history.looking_back import LooksBack
from reef.engine.info import Info
from reef.engine.log import Log
from reef.engine.log_rules import Judgement, Verdict, contiguous
from reef.engine.readable import Readable
from reef.engine.reading.cache import ByteCache
from reef.engine.reading.row_cache import RowCache
from reef.engine.reading.segments import SegmentStore
from reef.engine.reading.view import View
from reef.engine.tail import Tail
from reef.errors import (
    ClosedError,
    CorruptionError,
    InvalidInputError,
    Kind,
    NotFoundError,
    UnavailableError,
)
from reef.formats.manifest import Manifest
from reef.formats.wal_object import WalObject
from reef.manifest.head import Head, HeadFinder, locate
from reef.paths import Namespace
from reef.runtime import Runtime, Stopwatch, leaf_lock
from reef.stores import Store
from reef.stores.notify.base import Notifier, pause
from reef.telemetry import Events, Metrics, operation

__all__ = ["Reader"]

RESTARTS_MAX = 10
POLL_S = 0.05
"""How often it looks for an LSN that is waited for, where nothing tells of news."""
PROBES_MAX = 16
"""Objects taken one by one in a refresh; a listing shows the rest, however busy a writer is."""


class Reader(LooksBack, Readable):
    """A handle that reads one namespace. Safe for threads; picklable; survives a fork."""

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
        self._bind(heads or HeadFinder(store, namespace))
        self._row_cache = RowCache(settings.row_cache_bytes)
        self._guard = leaf_lock()
        self._turn = self._runtime.lock()
        self._home = self._locks_home = self._runtime.process_id()
        self._closed = False
        self._tail = self._open(self._heads.last)

    def __reduce__(self) -> tuple[Any, ...]:
        return Reader, (self._store, self._names, self._settings)

    def _bind(self, heads: HeadFinder) -> None:
        """Read one incarnation of the namespace from now on."""
        self._heads, self._names = heads, heads.names
        self._log = Log(self._store, heads.names)
        self._segments = SegmentStore(self._store, heads.names, self._cache)
        self._bell = self._new_bell()  # before the log is listed: no commit falls in between

    # --- what it sees -------------------------------------------------------------
    @property
    def last_lsn(self) -> int:
        """The newest LSN that this reader has seen."""
        return self._tail.view().last_lsn

    @property
    def damage(self) -> CorruptionError | None:
        """What keeps the reader from seeing all there is, if anything does (H17, H18)."""
        return self._damaged_head or self._damaged_log

    def refresh(self) -> None:
        """See what is new, now."""
        self._check()
        with self._turn:
            self._advance()

    def wait_for(self, lsn: int, timeout_s: float = 30.0) -> bool:
        """Wait until an LSN is visible; False if `timeout_s` passed first."""
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
            pause(self._runtime, self._bell, min(POLL_S, left_s), calm_s)
        return True

    def close(self) -> None:
        self._closed = True
        if self._bell is not None:
            self._bell.ring()  # who waits for news need not wait for the interval

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
        return Info.of(self.namespace, self._tail.manifest, self._tail.ingested).html_of_handle(
            "Reader of", facts
        )

    # --- inside -------------------------------------------------------------------
    def _replan(self, generation: int, missing: NotFoundError) -> View:
        """Return a view on a newer generation; what the head itself names is lost, not swept."""
        if self._home != self._runtime.process_id():  # an iterator that was begun before a fork
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
        if self._is_due():
            with self._turn:
                if self._is_due():  # nobody else did meanwhile
                    self._advance()
        return self._tail.view()

    def _is_ready(self) -> bool:
        at_home = not self._closed and self._home == self._runtime.process_id()
        return at_home and not self._is_due()

    def _is_due(self) -> bool:
        """Whether it is time to look: there is news, or there may be some unheard of."""
        rung = self._bell is not None and self._bell.is_rung
        return rung or self._runtime.boottime_s() >= self._due_s

    def _open(self, located: Head | None = None) -> Tail:
        """Manifest first, listing second, manifest again: else once more (H10)."""
        for _ in range(RESTARTS_MAX):
            started = self._note_begin()
            head, located = located or self._find_current(), None
            tail = Tail(head.manifest, self._segments)
            tail.watch(self._row_cache)
            self._damaged_log = None
            self._note_head(head)
            if self._take_listed(tail) and self._was_whole(head):
                self._listed = self._refreshed = started
                return tail
        raise UnavailableError(f"{self.namespace} is swept faster than it can be opened")

    def _find_current(self) -> Head:
        """Return the head; of the next incarnation, if the name was dropped and re-created."""
        self._heads.forget()
        try:
            return self._heads.find(fallback=True)
        except NotFoundError as error:
            if error.kind is not Kind.DROPPED:
                raise
            heads = locate(self._store, self.namespace, fallback=True)
            if heads.names != self._names:  # otherwise it was undropped just now
                self._bind(heads)
            return heads.found

    def _reopen(self) -> None:
        """Replace the tail; rows that others read from the one before it are not kept."""
        tail = self._open()
        with tail.replacing():
            self._tail = tail

    def _take_listed(self, tail: Tail) -> bool:
        """Take in what a listing shows; False if some of it was swept meanwhile."""
        slots = {slot.lsn: slot.size for slot in self._log.filled(tail.next_lsn)}
        skipped = tail.manifest.skipped_lsns
        lsns = contiguous([*slots, *skipped], tail.next_lsn)
        sound = [lsn for lsn in lsns if lsn not in skipped]
        try:
            found = dict(zip(sound, self._log.read_many(sound), strict=True))
        except CorruptionError:
            found = self._read_up_to_damage(sound)
        for lsn in lsns:
            if lsn in skipped:
                tail.skip()
                continue
            if lsn not in found:
                return True  # it is damaged, or lies behind what is
            read = found[lsn]
            if read is None or not tail.knows(read.header):
                return False
            if not self._take(tail, read, slots.get(lsn, 0)):
                return True
        return True

    def _take(self, tail: Tail, found: WalObject, size: int = 0) -> bool:
        """Take in an object; False if it is damaged after all, though its checksums are right."""
        try:
            self._note_verdict(tail.take(found, size))
        except CorruptionError as error:
            if error.kind is Kind.CHANGED_WINNER:  # rows that are shown already may be wrong (H73)
                raise
            self._note_damaged_log(error, found.header.lsn)
            return False
        return True

    def _read_up_to_damage(self, lsns: list[int]) -> dict[int, WalObject | None]:
        """Serve up to a damaged object, and say so (H17)."""
        found: dict[int, WalObject | None] = {}
        for lsn in lsns:
            try:
                found[lsn] = self._log.read(lsn)
            except CorruptionError as error:
                self._note_damaged_log(error, lsn)
                break
        return found

    def _advance(self) -> None:
        started = self._note_begin()
        before = self._tail.next_lsn
        with operation(self._metrics, "refresh"):
            try:
                self._advance_in_chain(started)
            except NotFoundError as error:
                if error.kind is not Kind.DROPPED:
                    raise
                self._reopen()  # in the next incarnation, if there is one
        self._refreshed = started
        self._note_lag(self._tail.next_lsn - before)

    def _advance_in_chain(self, started: Stopwatch) -> None:
        if not self._must_list():
            self._take_probed()
            self._move_to(self._heads.find(fallback=True))
        # Again, if probing took so long that its misses prove nothing (H47).
        if self._must_list():
            if self._catch_up():
                self._listed = started
            else:
                self._reopen()

    def _catch_up(self) -> bool:
        """Look by listing alone, and read only what is new; False if it must be read anew."""
        self._heads.forget()
        head = self._heads.find(fallback=True)
        older = head.manifest.generation < self._tail.manifest.generation
        if self.damage or head.damage or older or not self._can_follow(head.manifest):
            return False
        self._move_to(head)
        return self._take_listed(self._tail) and self._was_whole(head)

    def _was_whole(self, head: Head) -> bool:
        """Whether a listing after `head` was found can be trusted: no sweep was at it (H10).

        What a generation needs is condemned after it was superseded, and deleted a grace later.
        After that only a head tells that is read now, and still retains that generation.
        """
        if head.fresh():
            return True
        self._heads.forget()
        return self._heads.find(fallback=True).manifest.oldest_retained <= head.manifest.generation

    def _note_begin(self) -> Stopwatch:
        """Start a stopwatch for a look at the store; it counts once that has succeeded."""
        if self._bell is not None:
            self._bell.clear()
        self._due_s = self._runtime.boottime_s() + self._settings.refresh_interval_ms / 1000
        return self._runtime.stopwatch()

    def _must_list(self) -> bool:
        grace_s = self._tail.manifest.grace_ms / 1000
        paused = self._refreshed.elapsed_s() > grace_s / 2
        return paused or self._listed.elapsed_s() > self._settings.list_interval_s

    def _take_probed(self) -> None:
        for _ in range(PROBES_MAX):
            if self._damaged_log is not None:
                return
            try:
                found = self._log.read(self._tail.next_lsn)
            except CorruptionError as error:
                self._note_damaged_log(error, self._tail.next_lsn)
                return
            if found is None or self._must_list():
                return  # after a stall its slot may have been collected and filled again (H67)
            if not self._tail.knows(found.header):
                self._reopen()  # a newer manifest says how to read it
                return
            if not self._take(self._tail, found):
                return
        if not self._take_listed(self._tail):
            self._reopen()

    def _move_to(self, head: Head) -> None:
        self._note_head(head)
        if head.manifest.generation <= self._tail.manifest.generation:
            return
        if self._can_follow(head.manifest):
            self._tail.rebase(head.manifest)
        else:
            self._reopen()

    def _can_follow(self, manifest: Manifest) -> bool:
        """Whether the tail can go on from a manifest with what it has in memory."""
        before = self._tail.manifest
        changed = (manifest.skipped_lsns, manifest.wal_base) != (
            before.skipped_lsns,  # a repair gave something up
            before.wal_base,  # or it was dropped, and is another one now
        )
        return manifest.wal_floor <= self._tail.next_lsn and not self._damaged_log and not changed

    def _note_head(self, head: Head) -> None:
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

    def _note_verdict(self, judgement: Judgement) -> None:
        """Count what is void, once, though it may be read again from another manifest on."""
        lsn = judgement.header.lsn
        if judgement.verdict is Verdict.VOID and lsn > self._last_void:
            self._last_void = lsn
            self._metrics.counter("log.void").add()

    def _note_lag(self, lsns: int) -> None:
        """Note how far behind the reader was until now: in LSNs, and since the newest of them."""
        age_s = max(0.0, self._runtime.wall_s() - self._tail.created_at_ms / 1000)
        self._metrics.gauge("reader.lag_lsns").set(lsns)
        self._metrics.gauge("reader.lag_s").set(age_s if lsns else 0.0)
        self._metrics.gauge("reader.last_lsn").set(self.last_lsn)

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"the reader of {self.namespace} is closed", hint="Open another one")
        if self._home != self._runtime.process_id():
            self._move_in()

    def _move_in(self) -> None:
        """Start again in a forked child: what another thread had half done stays so (H51)."""
        process_id = self._runtime.process_id()
        with self._guard:
            if self._locks_home != process_id:  # one that was held at the fork has no owner here
                self._turn, self._locks_home = self._runtime.lock(), process_id
        with self._turn:
            if self._home != process_id:
                self._heads = HeadFinder(self._store, self._names)
                self._notify = self._bell = None  # they ring in the parent
                self._row_cache = RowCache(self._settings.row_cache_bytes)
                self._reopen()
                self._home = process_id
