"""Changes: what was committed after an LSN, in order, by the rules that everyone goes by.

A stream starts from a kept generation whose floor is at most the LSN after which it begins,
judges the log from there, and hands out what counts above that LSN. Its position moves object
by object, after the last row of each, and over fences, voids and skipped ones too (H44).

An object that is not there is either still to come or was collected. The floor tells: below
it every slot was filled once. What was collected is an error, never a gap in the stream.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import pyarrow as pa

from reef.engine.history.change_rows import Change, change_batches, change_schema, changes_of
from reef.engine.history.moments import (
    READ_AT_ONCE,
    History,
    Moved,
    collected,
    earlier_incarnation,
    with_skipped,
)
from reef.engine.log_rules import LogReader, Verdict, contiguous
from reef.engine.reading.segments import SegmentStore
from reef.errors import (
    CorruptionError,
    InvalidInputError,
    Kind,
    NotFoundError,
    ReefError,
    UnavailableError,
)
from reef.formats.manifest import Manifest
from reef.formats.schema import Schema
from reef.formats.wal_object import WalObject
from reef.paths import Namespace
from reef.runtime import Runtime
from reef.stores import Store
from reef.stores.notify.base import Bell, pause

__all__ = ["Changes", "LogFollower", "changes_arrow", "check_lsn", "check_reached"]

RESTARTS_MAX = 10
POLL_S = 0.2
"""How often a stream that follows the log looks for more."""


@dataclass(frozen=True, slots=True)
class Step:
    """A slot of the log, and what it amounts to."""

    lsn: int
    counts: WalObject | None
    """The object, if it changes rows."""


class LogFollower:
    """Reads the log in order from one LSN on. Not for several threads at once."""

    def __init__(
        self,
        store: Store,
        namespace: Namespace,
        segments: SegmentStore,
        after_lsn: int,
        start: Manifest | None = None,
    ) -> None:
        self.namespace, self._names = namespace.name, namespace
        self._segments = segments
        self._history = History(store, namespace, segments)
        self._after = after_lsn
        self.start, head = self._begin(start)
        """The generation from whose floor on the log is judged."""
        self._rules = LogReader(with_skipped(self.start, head))
        self._skipped = frozenset(head.skipped_lsns)
        self._waiting: deque[int] = deque()
        self._learn(head)

    def more(self) -> list[Step]:
        """Return what comes next, in order; nothing at the end of the log."""
        while True:
            if not self._waiting:
                self._list()
            if not self._waiting:
                return []
            steps = self._read()
            if steps:
                return steps

    def probe(self) -> bool:
        """Whether there is more: two requests, without a listing."""
        lsn = self._rules.next_lsn
        return self._history.log.read(lsn) is not None or self._head().wal_floor > lsn

    def check_reached(self) -> None:
        """Raise unless the log goes up to where the stream begins."""
        check_reached(self._history, self._head(), self._after)

    def schema_for(self, step: Step) -> Schema:
        """Return the newest schema there is; it is at least as new as that of a slot."""
        if step.counts is not None and not self._knows(step.counts):
            self._head()
            if not self._knows(step.counts):
                raise CorruptionError(
                    f"LSN {step.lsn} was written with schema {step.counts.header.schema_id}, "
                    f"which no manifest has",
                    object=self._names.wal_object(step.lsn),
                    offset=0,
                )
        return self.schema

    def batches(self, step: Step, schema: Schema) -> Iterator[pa.RecordBatch]:
        """Yield the change rows of a slot, with the columns of a schema."""
        if step.counts is None:
            return
        schemas = {0: schema, **self._schemas}
        try:
            yield from change_batches(step.counts, schemas, schema, self._segments)
        except NotFoundError as error:  # a segment of an ingest: compacted, and swept
            raise collected(self._names, step.lsn) from error

    # --- inside -------------------------------------------------------------------
    def _begin(self, start: Manifest | None) -> tuple[Manifest, Manifest]:
        for _ in range(RESTARTS_MAX):
            head = self._history.head()
            try:
                return start or self._history.start_of_changes(head, self._after), head
            except Moved:
                self._history.heads.forget()
        raise UnavailableError(f"{self._names.name} is swept faster than it can be read")

    def _learn(self, head: Manifest) -> None:
        if head.wal_base != self.start.wal_base:
            raise earlier_incarnation(self._names, head)
        self._schemas = {schema.id: schema for schema in head.schemas}
        self.schema: Schema = head.schema

    def _knows(self, found: WalObject) -> bool:
        return found.header.schema_id in (0, *self._schemas)

    def _head(self) -> Manifest:
        head = self._history.head()
        self._learn(head)
        return head

    def _list(self) -> None:
        """Find out what there is from the next LSN on; an error if that is gone (H44)."""
        first = self._rules.next_lsn
        self._waiting = self._contiguous(first)
        if self._waiting or self._head().wal_floor <= first:
            return
        # A fold has passed it: it is gone, or it came and was folded since it was listed.
        self._waiting = self._contiguous(first)
        if not self._waiting:
            raise collected(self._names, first)

    def _contiguous(self, first: int) -> deque[int]:
        filled = [slot.lsn for slot in self._history.log.filled(first)]
        return deque(contiguous([*filled, *self._skipped], first))

    def _read(self) -> list[Step]:
        lsns = [self._waiting.popleft() for _ in range(min(READ_AT_ONCE, len(self._waiting)))]
        sound = [lsn for lsn in lsns if lsn not in self._skipped]
        found = dict(zip(sound, self._history.log.read_many(sound), strict=True))
        if not self._history.kept_slots(self.start, lsns[0]):
            raise collected(self._names, max(lsns[0], self._after + 1))
        steps = []
        for lsn in lsns:
            read = found.get(lsn)
            if read is None and lsn not in self._skipped:  # listed, and swept since
                if lsn == lsns[0]:
                    raise collected(self._names, lsn)
                self._waiting.clear()
                break
            steps.append(self._judge(lsn, read))
        # Objects up to where the stream begins only set the stage.
        return [step for step in steps if step.lsn > self._after]

    def _judge(self, lsn: int, read: WalObject | None) -> Step:
        if read is None:
            self._rules.skip()
            return Step(lsn, None)
        applies = self._rules.judge(read.header).verdict is Verdict.APPLIES
        return Step(lsn, read if applies else None)


class Changes:
    """An iterator over changes. It ends where the log ends, and can be asked again later.

    With `follow` it waits there for more, at most `timeout_s` at a time. After an error it is
    over and gives the same error again; begin another one after its position. So it is after an
    interrupt in the middle of a slot, whose rest would be missing. One that waits goes on.
    """

    def __init__(
        self,
        follower: LogFollower,
        after_lsn: int,
        runtime: Runtime,
        *,
        follow: bool = False,
        timeout_s: float | None = None,
        check: Callable[[], None] = lambda: None,
        bell: Bell | None = None,
        calm_s: float = POLL_S,
    ) -> None:
        self.position = after_lsn
        """The last LSN of which everything was handed out: where to go on from."""
        self._follower = follower
        self._runtime = runtime
        self.follow(follow, timeout_s)
        self._check = check
        self._bell = bell
        self._calm_s = calm_s
        self._steps: deque[Step] = deque()
        self._rows: Iterator[Change] = iter(())
        self._reading: int = after_lsn
        self._error: ReefError | None = None
        self._is_waiting = False
        """Whether nothing is taken at this moment, and so nothing can be lost."""

    def follow(self, follow: bool, timeout_s: float | None = None) -> Self:
        """Wait at the end of the log from now on, or do not."""
        if timeout_s is not None and not follow:
            raise InvalidInputError(
                "timeout_s= is for a stream that follows the log",
                kind=Kind.INVALID_OPTION,
                hint="Add follow=True",
            )
        self._follow = follow
        self._timeout_s = timeout_s
        return self

    def has_more(self) -> bool:
        """Whether more has come since the log's end was reached: two requests, no listing."""
        self._check()
        return bool(self._steps) or self._follower.probe()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Change:
        if self._error is not None:
            raise self._error
        self._is_waiting = False
        try:
            self._check()
            while (change := next(self._rows, None)) is None:
                self.position = self._reading
                if not self._next_step():
                    break
        except ReefError as error:
            self._error = error
            raise
        except BaseException as error:
            if not self._is_waiting:
                self._error = self._torn(error)
            raise
        if change is None:
            raise StopIteration
        return change

    def __repr__(self) -> str:
        return f"<Changes of {self._follower.namespace}, after LSN {self.position}>"

    def _torn(self, error: BaseException) -> UnavailableError:
        """What was being read is neither handed out nor to be had again from here (H44)."""
        return UnavailableError(
            f"this stream of {self._follower.namespace} broke off behind LSN {self.position}: "
            f"{error!r}",
            hint="Begin another one after that LSN",
            lsn=self.position,
        )

    def _next_step(self) -> bool:
        """Go on to the next slot; False at the end."""
        if not self._steps:
            self._steps.extend(self._follower.more() or self._wait())
        if not self._steps:
            return False
        step = self._steps.popleft()
        self._rows = self._changes(step)
        self._reading = step.lsn
        return True

    def _changes(self, step: Step) -> Iterator[Change]:
        schema = self._follower.schema_for(step)
        for batch in self._follower.batches(step, schema):
            yield from changes_of(batch, schema)

    def _wait(self) -> list[Step]:
        """Wait for more, if that is wanted; nothing if none came in time."""
        if not self._follow:
            return []
        deadline = None
        if self._timeout_s is not None:
            deadline = self._runtime.deadline(self._timeout_s)
        self._is_waiting = True
        while not self._probe():
            if deadline is not None and deadline.passed():
                return []
            left_s = math.inf if deadline is None else deadline.remaining_s()
            pause(self._runtime, self._bell, min(POLL_S, left_s), min(self._calm_s, left_s))
            self._check()
        self._is_waiting = False
        return self._follower.more()

    def _probe(self) -> bool:
        if self._bell is not None:
            self._bell.clear()  # what rings from here on is for the next look
        return self._follower.probe()


def changes_arrow(follower: LogFollower, upto_lsn: int) -> pa.RecordBatchReader:
    """Return the changes up to an LSN, which must be in the log, as a stream of Arrow batches."""
    # All of a stream have one schema: the newest, from before the first is read.
    return pa.RecordBatchReader.from_batches(
        change_schema(follower.schema), _batches(follower, follower.schema, upto_lsn)
    )


def _batches(follower: LogFollower, schema: Schema, upto_lsn: int) -> Iterator[pa.RecordBatch]:
    while steps := follower.more():
        for step in steps:
            if step.lsn > upto_lsn:
                return
            yield from follower.batches(step, schema)


def check_reached(history: History, head: Manifest, after_lsn: int) -> None:
    """Raise InvalidInputError if the log ends before an LSN: what comes next would be missed."""
    if after_lsn <= max(head.wal_floor - 1, head.wal_id_last_seen):
        return
    end = history.end_of_log(head)
    if after_lsn > end:
        raise InvalidInputError(
            f"after_lsn={after_lsn} is past the end of the log, whose last LSN is {end}",
            kind=Kind.INVALID_OPTION,
            hint=f"Begin after LSN {end} at the latest",
            last_lsn=end,
        )


def check_lsn(lsn: Any, name: str) -> int:
    """Return an LSN that was given, or raise."""
    if isinstance(lsn, bool) or not isinstance(lsn, int) or lsn < 0:
        raise InvalidInputError(f"{name}={lsn!r} is not an LSN", kind=Kind.INVALID_OPTION)
    return lsn
