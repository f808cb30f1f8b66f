"""The reader: sees what is committed, a moment later, and never writes.

It opens by manifest first and listing second; contiguous LSNs only (the gap rule). When warm it
probes the next LSN and the next generation. After a pause, and once a minute, it lists
instead, since probes past swept ids would say "no news" for ever (H47). It needs no lease and
works with read-only credentials; what it reads may be swept, and then it starts again from
the current head.
"""

from collections.abc import Callable, Iterator
from typing import Any, Self, TypeVar

from reef.config import ReaderSettings
from reef.engine.batch import encode_key
from reef.engine.cache import ByteCache
from reef.engine.log import Log
from reef.engine.log_rules import Verdict, contiguous
from reef.engine.reading import read_range, row_of
from reef.engine.segments import SegmentStore
from reef.engine.tail import Tail
from reef.engine.view import View
from reef.errors import ClosedError, CorruptionError, NotFoundError, UnavailableError
from reef.formats.manifest import Manifest
from reef.manifest.head import HeadFinder
from reef.paths import Namespace
from reef.runtime import Runtime, Stopwatch
from reef.stores import Store
from reef.telemetry import Events, Metrics, operation
from reef.types import KeyRange

__all__ = ["Reader"]

T = TypeVar("T")
RESTARTS_MAX = 10


class Reader:
    """A handle that reads one namespace. Safe for threads; picklable; survives a fork."""

    def __init__(
        self,
        store: Store,
        namespace: Namespace,
        settings: ReaderSettings,
        *,
        metrics: Metrics | None = None,
        events: Events | None = None,
    ) -> None:
        self.namespace = namespace.name
        self.damage: CorruptionError | None = None
        """What keeps the reader from going on, if anything does (H17)."""
        self._store = store
        self._names = namespace
        self._settings = settings
        self._metrics = metrics or Metrics()
        self._events = events or Events()
        self._runtime: Runtime = store.runtime
        self._heads = HeadFinder(store, namespace)
        self._log = Log(store, namespace)
        cache = ByteCache(settings.cache_bytes, self._metrics)
        self._segments = SegmentStore(store, namespace, cache)
        self._turn = self._runtime.lock()
        self._closed = False
        self._listed: Stopwatch
        self._refreshed: Stopwatch
        self._tail = self._open()

    def __reduce__(self) -> tuple[Any, ...]:
        return Reader, (self._store, self._names, self._settings)

    # --- reads --------------------------------------------------------------------
    def get(self, key: bytes | str) -> bytes | None:
        """Return a key's value; None if it has none."""
        encoded = encode_key(key)
        with operation(self._metrics, "get"):
            return row_of(self._read(lambda view: view.get(encoded, self._now_ms())))

    def scan(
        self,
        start: bytes | str | None = None,
        end: bytes | str | None = None,
        *,
        prefix: bytes | str | None = None,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[tuple[bytes, bytes]]:
        """Yield keys and values of [start, end) in order, from either end."""
        wanted = KeyRange.of(start, end, prefix)
        view = self._current()
        return read_range(view, wanted, self._now_ms(), reverse=reverse, limit=limit)

    @property
    def last_lsn(self) -> int:
        """The newest LSN that this reader has seen."""
        return self._tail.view().last_lsn

    def refresh(self) -> None:
        """See what is new, now."""
        self._check()
        with self._turn:
            self._advance()

    def wait_for(self, lsn: int, timeout_s: float = 30.0) -> bool:
        """Wait until an LSN is visible; False if `timeout_s` passed first."""
        deadline = self._runtime.deadline(timeout_s)
        while self.last_lsn < lsn:
            self.refresh()
            if self.last_lsn >= lsn:
                break
            if deadline.passed():
                return False
            self._runtime.sleep(min(0.05, deadline.remaining_s()))
        return True

    def close(self) -> None:
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        manifest = self._tail.manifest
        return f"<Reader {self.namespace}, generation {manifest.generation}, LSN {self.last_lsn}>"

    # --- inside -------------------------------------------------------------------
    def _read(self, read: Callable[[View], T]) -> T:
        """Read; if an object was swept underneath, start again from the current head."""
        for _ in range(RESTARTS_MAX):
            try:
                return read(self._current())
            except NotFoundError:
                with self._turn:
                    self._tail = self._open()
        raise UnavailableError(f"{self.namespace} is swept faster than it can be read")

    def _current(self) -> View:
        self._check()
        age_s = self._refreshed.elapsed_s()
        if age_s * 1000 >= self._settings.refresh_interval_ms:
            with self._turn:
                self._advance()
        return self._tail.view()

    def _open(self) -> Tail:
        """Manifest first, listing second; a listed object that is gone means: once more (H10)."""
        for _ in range(RESTARTS_MAX):
            self._heads.forget()
            self._listed = self._refreshed = self._runtime.stopwatch()
            tail = Tail(self._heads.find().manifest, self._segments)
            if self._take_listed(tail):
                return tail
        raise UnavailableError(f"{self.namespace} is swept faster than it can be opened")

    def _take_listed(self, tail: Tail) -> bool:
        """Take in what a listing shows; False if some of it was swept meanwhile."""
        slots = {slot.lsn: slot.size for slot in self._log.filled(tail.next_lsn)}
        skipped = tail.manifest.skipped_lsns
        lsns = contiguous([*slots, *skipped], tail.next_lsn)
        try:
            found = dict(zip(lsns, self._log.read_many(lsns), strict=True))
        except CorruptionError:
            return self._take_up_to_damage(tail, lsns)
        for lsn in lsns:
            if lsn in skipped:
                tail.skip()
                continue
            read = found[lsn]
            if read is None:
                return False
            tail.take(read, slots.get(lsn, 0))
        return True

    def _take_up_to_damage(self, tail: Tail, lsns: list[int]) -> bool:
        """Serve up to a damaged object, and say so (H17)."""
        for lsn in lsns:
            if lsn in tail.manifest.skipped_lsns:
                tail.skip()
                continue
            try:
                read = self._log.read(lsn)
            except CorruptionError as error:
                self.damage = error
                self._events.emit("damaged_log", namespace=self.namespace, lsn=lsn)
                return True
            if read is None:
                return False
            tail.take(read)
        return True

    def _advance(self) -> None:
        if self._must_list():
            self._tail = self._open()
            return
        self._refreshed = self._runtime.stopwatch()
        before = self._tail.next_lsn
        with operation(self._metrics, "refresh"):
            self._take_probed()
            self._move_to(self._heads.find().manifest)
        self._note_lag(self._tail.next_lsn - before)

    def _must_list(self) -> bool:
        grace_s = self._tail.manifest.grace_ms / 1000
        paused = self._refreshed.elapsed_s() > grace_s / 2
        return paused or self._listed.elapsed_s() > self._settings.list_interval_s

    def _take_probed(self) -> None:
        while self.damage is None:
            try:
                found = self._log.read(self._tail.next_lsn)
            except CorruptionError as error:
                self.damage = error
                return
            if found is None:
                return
            if self._tail.take(found).verdict is Verdict.VOID:
                self._metrics.counter("log.void").add()

    def _move_to(self, manifest: Manifest) -> None:
        if manifest.generation == self._tail.manifest.generation:
            return
        if manifest.wal_floor <= self._tail.next_lsn and not self.damage:
            self._tail.rebase(manifest)
        else:
            self.damage = None
            self._tail = self._open()

    def _note_lag(self, lsns: int) -> None:
        """Note how far behind the reader was until now: in LSNs, and since the newest of them."""
        age_s = max(0.0, self._runtime.wall_s() - self._tail.created_at_ms / 1000)
        self._metrics.gauge("reader.lag_lsns").set(lsns)
        self._metrics.gauge("reader.lag_s").set(age_s if lsns else 0.0)
        self._metrics.gauge("reader.last_lsn").set(self.last_lsn)

    def _now_ms(self) -> int:
        return int(self._runtime.wall_s() * 1000)

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"the reader of {self.namespace} is closed", hint="Open another one")
