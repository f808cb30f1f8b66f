"""The door to the queue: which batches may wait to be sent, and which callers wait for room.

A batch is looked up by its idempotency key and queued under one lock, the committer's (H19).
Whoever finds no room waits on that same lock's condition, so nobody waits for somebody else's
wait: each call has its own deadline, and with it one look at the head that may be under way.
Only one of those who wait looks whether a fold has made room, and not all the time.

A future's callbacks run on the thread that gives the answer, which is one of those that send.
If it waited for room here, nobody might be left to make some. So a write from a callback never
waits: where there is no room it is refused at once, and may be tried again from elsewhere.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from reef.config import WriterSettings
from reef.engine.commit.flights import Pending, no_room, replayed_receipt
from reef.engine.commit.group_queue import GroupQueue
from reef.engine.tail import Tail
from reef.errors import InvalidInputError, UnavailableError
from reef.paths import Namespace
from reef.runtime import Condition, Deadline, Future, Runtime, Stopwatch
from reef.types import Receipt

__all__ = ["Admission"]

T = TypeVar("T")
LOOK_S = 0.5
"""How often somebody looks whether a fold has made room."""


class Books(Protocol):
    """What the door has to know of the writer behind it; all but `rebase` under its lock."""

    tail: Tail

    def check_open(self) -> None: ...
    def unanswered(self) -> list[Pending]: ...
    def rebase(self) -> None: ...


@dataclass(eq=False)
class Admission:
    """Lets batches into one writer's queue."""

    namespace: Namespace
    settings: WriterSettings
    runtime: Runtime
    changed: Condition
    queue: GroupQueue
    books: Books
    answering_threads: set[object] = field(default_factory=set)
    """Those that give answers at this moment, and so run callbacks."""
    _looker: object | None = None
    """Who looks at this moment whether a fold has made room."""
    _looked: Stopwatch | None = None

    def admit(self, pending: Pending) -> "Future[Receipt]":
        """Queue a batch; return its future, or that of the same keyed batch before it."""
        in_callback = pending.in_callback = self.is_answering
        deadline = self.runtime.deadline(0.0 if in_callback else self.settings.write_deadline_s)
        me, tries = object(), 0
        try:
            while True:
                with self.changed:
                    self.books.check_open()
                    admitted = self._known(pending) or self._queued(pending)
                    if admitted is not None:
                        return admitted
                    if deadline.passed() and (tries or not self._look_is_due()):
                        raise self._no_room(in_callback)
                    self._look_or_wait(me, deadline)
                self._look_if_it_is(me)
                tries += 1
        finally:
            if self._looker is me:  # interrupted
                self._looker = None

    @property
    def is_answering(self) -> bool:
        """Whether this thread gives answers at this moment, and so runs a callback."""
        return self.runtime.thread_id() in self.answering_threads

    def answering(self, call: Callable[[], T]) -> T:
        """While `call` lasts, this thread runs callbacks: what they write must not wait."""
        me = self.runtime.thread_id()
        outermost = me not in self.answering_threads
        try:
            self.answering_threads.add(me)
            return call()
        finally:
            if outermost:
                self.answering_threads.discard(me)

    def _known(self, pending: Pending) -> "Future[Receipt] | None":
        """Return the answer to a key that is committed or on its way."""
        key, digest = pending.header.key, pending.header.digest
        if key is None or digest is None or pending.mark is not None:
            return None
        for other in self.books.unanswered():
            if other.header.key == key:
                if other.header.digest != digest:
                    raise InvalidInputError(
                        f"idempotency key {key!r} is on its way with another batch"
                    )
                other.unattended = other.unattended or pending.unattended
                other.in_callback = other.in_callback or pending.in_callback
                return other.future
        entry = self.books.tail.dedup.find(key, digest)
        if entry is None:
            return None
        answered: Future[Receipt] = self.runtime.future()
        answered.set_result(replayed_receipt(self.namespace.name, entry))
        return answered

    def _queued(self, pending: Pending) -> "Future[Receipt] | None":
        if not self.queue.has_room(self.books.tail.bytes):
            return None
        self.queue.add(pending)
        return pending.future

    def _look_or_wait(self, me: object, deadline: Deadline) -> None:
        if self._look_is_due():
            self._looker = me
        else:
            since_s = self._looked.elapsed_s() if self._looked is not None else 0.0
            pause_s = LOOK_S - since_s if since_s < LOOK_S else LOOK_S
            self.changed.wait(max(0.001, min(pause_s, deadline.remaining_s())))

    def _look_is_due(self) -> bool:
        """Whether a fold could make room, and nobody looks for one or has just now."""
        if self._looker is not None or self.books.tail.bytes <= self.settings.unfolded_bytes_max:
            return False
        return self._looked is None or self._looked.elapsed_s() >= LOOK_S

    def _look_if_it_is(self, me: object) -> None:
        if self._looker is not me:
            return
        with suppress(UnavailableError):
            self.books.rebase()  # a fold, wherever it ran, makes room
        with self.changed:
            self._looker, self._looked = None, self.runtime.stopwatch()
            self.changed.notify_all()

    def _no_room(self, in_callback: bool) -> UnavailableError:
        error = no_room(self.namespace, self.queue.bytes, self.books.tail.bytes)
        if not in_callback:
            return error
        return UnavailableError(
            f"{error.message}; a write from a future's callback does not wait for it",
            hint="Write from another thread than the callback's, or try again later",
            namespace=self.namespace.name,
        )
