"""The commit path: protocol section 2, step by step.

Batches queue; groups of them go out as WAL objects, at most M in flight, each with the write
ids that it expects before it; what has landed is applied and answered in LSN order. There is
no thread of its own: whoever waits for a batch also sends, and a helper is started only for
those who do not wait. In the steady state a commit is one PUT and nothing else.

    queue ──take──▶ flights ──PUT──▶ answered ──settle──▶ applied, receipts
                       ▲                │ lost a slot
                       └── put back ◀── resync: list the log, apply what is there, go on

A lost slot stops sending until all in flight are answered. In prefix order everything behind
the lost slot is then lost or void, so all of it is put back, in order.

A caller that is interrupted gives up waiting, not the commit: what it was sending is handed
over. If a step of the books breaks off in the middle, or the store refuses, the writer ends.
Either way every waiter gets an answer (H26).
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from reef.config import WriterSettings
from reef.engine.commit.admission import Admission
from reef.engine.commit.answers import Answers
from reef.engine.commit.flights import (
    Flight,
    FlightMetrics,
    Pending,
    Role,
    State,
    broken,
    left_over,
    stopped,
)
from reef.engine.commit.group_queue import GroupQueue
from reef.engine.commit.helpers import Helpers
from reef.engine.commit.opening import Opened
from reef.engine.commit.resync import Resync
from reef.engine.commit.sending import Sender
from reef.engine.commit.telling import Telling
from reef.engine.footprints import Footprints
from reef.engine.log import Log
from reef.engine.log_rules import Verdict
from reef.engine.tail import Tail
from reef.errors import CorruptionError, FencedError, InternalError, ReefError, UnavailableError
from reef.manifest.head import HeadFinder
from reef.paths import Namespace
from reef.runtime import Future, Runtime
from reef.stores import Outcome, WriteResult
from reef.telemetry import Metrics, operation
from reef.types import Receipt

__all__ = ["Committer"]

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(eq=False)
class Committer:
    """Commits batches for one writer."""

    namespace: Namespace
    log: Log
    heads: HeadFinder
    opened: Opened
    settings: WriterSettings
    runtime: Runtime
    metrics: Metrics
    resync: Resync
    tail: Tail = field(init=False)
    _state: State = State.OPEN
    _end: ReefError | None = None
    _flights: "deque[Flight]" = field(default_factory=deque)
    _answers: Answers = field(default_factory=Answers)
    _flushing: int = 0
    _next_lsn: int = 0
    _ids_before: "deque[str]" = field(default_factory=deque)
    """Write ids from the last slot that was seen durable up to the last one sent."""

    def __post_init__(self) -> None:
        self.tail = self.opened.tail
        self._queue = GroupQueue(self.settings)
        self._sender = Sender(self.log, self.heads, self.settings.commit_deadline_s, self.runtime)
        self._changed = self.runtime.condition()
        self._door = Admission(
            self.namespace, self.settings, self.runtime, self._changed, self._queue, self
        )
        parallel, answering = self.settings.max_parallel_writes, self._door.answering_threads
        self._helpers = Helpers(parallel, self.runtime, self._changed, answering, self._next_work)
        self._noted = FlightMetrics(self.metrics)
        self._telling = Telling(self._answers, self._changed, self._door, self._helpers)
        self._start_after_tail()

    # --- called by clients --------------------------------------------------------
    def submit(self, pending: Pending) -> "Future[Receipt]":
        """Queue a batch, waiting for room as long as the deadline allows."""
        return self._door.admit(pending)

    @property
    def is_open(self) -> bool:
        return self._end is None

    def check_open(self) -> None:
        """Raise what ended this writer, if something did."""
        if self._end is not None:
            raise self._end.with_traceback(None)

    def drive(self, until: "Future[Receipt]", *, is_told: bool = True) -> None:
        """Send and settle until a batch is decided and, if asked for, told to its owner.

        The caller's thread does the work, but gives no other answers: their callbacks are not
        its business. Whoever waits for one takes it, and a helper gives those of all the rest.
        """
        me = object()
        try:
            while not until.done():
                self._work(me, lambda: self._answers.settles(until))
                if not is_told or self._telling.tell(until):
                    break
        except BaseException as error:
            self._hand_over(me, error)
            raise

    def drive_in_background(self) -> None:
        """Make sure that somebody sends although nobody waits."""
        self._helpers.ensure()

    def flush(self) -> ReefError | None:
        """Return when everything that was queued before is answered; tell the first refusal.

        In a callback it returns when all is decided: others are told as soon as it returns.
        """
        in_callback = self._door.is_answering
        with self._changed:
            self._flushing += 1
            waiting = [*self._answers.not_given(), *self.unanswered()]
        try:
            for pending in waiting:
                self.drive(pending.future, is_told=not in_callback)
        finally:
            with self._changed:
                self._flushing -= 1
        with self._changed:
            return self._answers.take_refusal()

    def end(self, error: ReefError) -> None:
        """Stop for good; what is not answered yet gets its answer now."""
        with self._changed:
            self._finish(error)
        try:
            while self._answers and not self._door.is_answering:
                self._telling.tell_all()
        finally:
            self._telling.leave_none()

    def begin(self, footprints: Footprints) -> int:
        """Begin a transaction, at a moment at which nothing is just being applied."""
        with self._changed:
            return footprints.begin()

    def look_again(self) -> None:
        """Take up the newest manifest from within a decision, where the lock is held."""
        self._run_resync()
        self.check_open()

    def rebase(self) -> None:
        """Go on from the newest manifest, and with what others have put into the log."""
        with self._changed:
            alone = self._state is State.OPEN and not self._flights
            if alone:
                self._whole(self._run_resync)
        if alone:
            self._telling.leave_none()  # of batches that were found committed, or of the end
            return
        # In flight: only the manifest. A slot that was lost to another is seen by the answer.
        manifest = self.heads.find().manifest
        with self._changed:
            if self.tail.follows(manifest):
                try:
                    self.tail.rebase(manifest)
                except CorruptionError as error:  # its own writes were replaced in the log (H73)
                    self._finish(error)
                    raise
                self._changed.notify_all()

    # --- taking -------------------------------------------------------------------
    def unanswered(self) -> list[Pending]:
        return [*(p for f in self._flights for p in f.batches), *self._queue]

    def _next_work(self) -> Callable[[], None] | None:
        """Return what a helper can do; None if there is nothing left."""
        if self._telling.count():
            return self._telling.tell_all
        return self._help if self._flights or self._queue else None

    def _help(self) -> None:
        """Send and settle until there is something to tell, or nothing left to send."""
        me = object()
        try:
            self._work(me, lambda: self._telling.count() or not (self._flights or self._queue))
        except BaseException as error:
            self._hand_over(me, error)
            raise

    def _hand_over(self, me: object, error: BaseException) -> None:
        """Let others go on with what an interrupted thread was sending: it may land yet."""
        with self._changed:
            if isinstance(error, Exception):  # not an interrupt: the next one would fail as well
                self._finish(broken(self.namespace, error))
            for flight in self._flights:
                if flight.sender is me:
                    flight.sender, flight.doubt = None, True
            waiting = self.unanswered()
            self._changed.notify_all()
        if waiting or self._answers:
            self.drive_in_background()

    def _whole(self, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a step of the books; one that breaks off in the middle ends this writer."""
        try:
            return step(*args, **kwargs)
        except BaseException as error:
            if not isinstance(error, UnavailableError):  # which changes nothing before it comes
                self._finish(broken(self.namespace, error))
            raise

    def _work(self, me: object, is_enough: Callable[[], object]) -> None:
        while (flight := self._next_flight(me, is_enough)) is not None:
            self._send(flight)

    def _next_flight(self, me: object, is_enough: Callable[[], object]) -> Flight | None:
        """Wait for something to send. Ends a resync on the way, if one is due."""
        with self._changed:
            while not is_enough():
                if self._state is State.LOST and all(f.answer is not None for f in self._flights):
                    self._whole(self._run_resync)
                    continue
                waiting = len(self._queue)
                flight = self._whole(self._left_over_or_new, me)
                if flight is not None:
                    return flight
                if len(self._queue) == waiting:  # otherwise one was refused: on to the next
                    self._changed.wait(self._queue.patience_s(len(self._flights)))
        return None

    def _left_over_or_new(self, me: object) -> Flight | None:
        return left_over(self._flights, me) or self._take(me)

    def _take(self, me: object) -> Flight | None:
        if self._state is not State.OPEN:
            return None
        group = self._queue.next_group(len(self._flights), flushing=self._flushing > 0)
        if not group:
            return None
        self._changed.notify_all()  # there is room again, or somebody is answered
        try:
            if group[0].decide is not None:
                group[0].decide()
                if not self._answers.replay(group, self.tail.dedup, self.namespace):
                    return None  # a look on the way has found its key committed (H46)
            return self._launch(group, me)
        except ReefError as error:
            for pending in self._answers.replay(group, self.tail.dedup, self.namespace):
                self._answers.add(pending, error)
            return None
        except BaseException:
            if not any(flight.batches is group for flight in self._flights):
                self._queue.put_back(group)
            raise

    def _launch(self, batches: list[Pending], me: object) -> Flight:
        after = tuple(self._ids_before) if self._is_ordered(batches) else None
        schema = self.opened.grown_schema(batches[0].schema_id, self.tail.manifest)
        role = Role(self.opened.epoch, self.opened.writer_id, after, schema)
        flight = Flight.of(batches, self._next_lsn, role, self.runtime, me)
        self._flights.append(flight)
        self._ids_before.append(flight.header.write_id)
        self._next_lsn += 1
        self._noted.note_launch(flight)
        self._noted.note_in_flight(self._flights)
        return flight

    def _is_ordered(self, batches: list[Pending]) -> bool:
        """Whether an object counts only behind the objects that were sent before it.

        In independent mode too, if it has a key: whether that is new was decided on the slots
        before it. If one of these is lost to another object, this one is void, and is decided
        again (protocol section 2, step 6).
        """
        return self.settings.ack == "prefix" or any(p.header.key is not None for p in batches)

    # --- sending ------------------------------------------------------------------
    def _send(self, flight: Flight) -> None:
        """PUT until the answer is definite, then settle what can be settled."""
        with operation(self.metrics, "commit"):
            answer = self._sender.send(flight)
        with self._changed:
            self._whole(self._take_answer, flight, answer)

    def _take_answer(self, flight: Flight, answer: WriteResult) -> None:
        flight.answer = answer
        if answer.outcome is Outcome.UNKNOWN:
            self._give_up(flight, answer)
        self._settle()
        self._changed.notify_all()

    def _give_up(self, flight: Flight, answer: WriteResult) -> None:
        """End the writer: behind a slot that may or may not be filled nothing can be sent."""
        refusal = answer.cause
        if flight.doubt or not isinstance(refusal, ReefError):
            self._finish(stopped(self.namespace, flight.lsn, refusal))
        elif flight in self._flights:
            self._flights.remove(flight)
            for pending in flight.batches:
                self._answers.add(pending, refusal)
            self._finish(refusal)

    # --- settling -----------------------------------------------------------------
    def _settle(self) -> None:
        """Apply and answer what has landed, in LSN order; a lost slot ends the order."""
        if self.settings.ack == "independent":
            self._settle_independently()
        while self._state is State.OPEN and self._flights:
            flight = self._flights[0]
            if flight.answer is None:
                break
            if not flight.answer.landed:
                self.metrics.counter("commit.lost_slots").add()
                self._state = State.LOST
                break
            self._apply(flight)
            if self._flights:  # or it was the end
                self._flights.popleft()
        self._noted.note_in_flight(self._flights)
        self._noted.unfolded_bytes.set(self.tail.bytes)

    def _settle_independently(self) -> None:
        for flight in self._flights:
            if flight.header.after is not None:  # it counts in order
                continue
            if flight.answer is not None and flight.answer.landed and not flight.acknowledged:
                self.tail.apply_early(flight.header, [p.ops for p in flight.batches])
                self._acknowledge(flight)

    def _apply(self, flight: Flight) -> None:
        ops = [pending.ops for pending in flight.batches]
        judgement = self.tail.take_own(flight.header, ops, len(flight.body))
        if judgement.verdict is not Verdict.APPLIES:
            self._finish(
                InternalError(f"LSN {flight.lsn} landed in its place and is {judgement.verdict}")
            )
            return
        # `after` reaches back to the last slot that was seen durable, not further.
        while self._ids_before[0] != flight.header.write_id:
            self._ids_before.popleft()
        self._acknowledge(flight)

    def _acknowledge(self, flight: Flight) -> None:
        if not flight.acknowledged:
            flight.acknowledged = True
            self._noted.seconds.record(flight.sent.elapsed_s())
            self._answers.add_receipts(self.namespace, flight)

    # --- after a lost slot --------------------------------------------------------
    def _run_resync(self) -> None:
        """Read what stands in the log, and queue again what does not count in it.

        Under the lock on purpose: nothing may be sent or answered meanwhile.
        """
        lost = [p for f in self._flights if not f.acknowledged for p in f.batches]
        lost_lsns = [f.lsn for f in self._flights if f.answer and not f.answer.landed]
        try:
            tail = self.resync.run(self.tail, min(lost_lsns, default=None))
            if tail is not self.tail:
                with tail.replacing():
                    self.tail = tail
        except ReefError as error:
            if isinstance(error, UnavailableError) and self._state is State.OPEN:
                raise  # nothing was lost: it was only a look
            if isinstance(error, FencedError | InternalError):
                # All of it is known not to count: lost its slot, or void behind one that did.
                self._queue.put_back(lost)
                self._flights.clear()
            self._finish(error)
            return
        self._flights.clear()
        again = [*lost, *self._queue.clear()]  # what waits was decided before, too
        self._queue.put_back(self._answers.replay(again, self.tail.dedup, self.namespace))
        self._start_after_tail()
        self._state = State.OPEN
        self._changed.notify_all()

    def _start_after_tail(self) -> None:
        self._next_lsn = self.tail.next_lsn
        self._ids_before = deque(self.tail.rules.last_ids()[-1:])

    # --- the end ------------------------------------------------------------------
    def _finish(self, error: ReefError) -> None:
        """Answer every waiter: what never counted is rejected, what may have is unknown."""
        if self._state is State.ENDED:
            return
        self._state, self._end = State.ENDED, error
        for flight in self._flights:
            if not flight.acknowledged:
                self._answers.add_unknown(self.namespace, flight, error)
        self._flights.clear()
        self._noted.note_in_flight(self._flights)
        for pending in self._queue.clear():
            self._answers.add(pending, error)
        self._changed.notify_all()
