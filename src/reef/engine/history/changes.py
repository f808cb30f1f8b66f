"""Change streams: the operations committed after an LSN, in order, and registered cursors.

A stream starts at a retained generation whose floor is at most the LSN after which it begins,
replays the log from there by the rules of the log, and yields the operations of applied objects
above that LSN. Its position advances object by object, after the last row of each; fences, void
and skipped objects advance it too (H44). A missing object is either not written yet or collected:
below the floor every slot was filled once. A collected object is an error, never a gap.

A registered cursor has a name and a position in the manifest. The sweep retains the log from that
position, and the segments of the ingests in it, until the cursor is dropped; if a load with
`live_wins` was open there, also the rows of that state, which may win over those of the load.
Reading writes nothing; `commit` publishes the position. The next process that opens the name
resumes at the last committed position, so that every change is delivered at least once.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn, Self

import pyarrow as pa

from reef.engine.history.as_of import (
    ConcurrentSweep,
    History,
    collected,
    earlier_incarnation,
    with_skipped,
)
from reef.engine.history.change_rows import (
    Change,
    change_batches,
    change_schema,
    changes_of,
    state_before,
)
from reef.engine.log.log import (
    IDS_KEPT,
    READ_AT_ONCE,
    LogRules,
    Scanned,
    SlotGone,
    Verdict,
    contiguous,
    replay,
    run_replay,
)
from reef.engine.read.caches import ByteCache
from reef.engine.read.segments import SegmentStore
from reef.engine.read.view import View
from reef.errors import (
    ClosedError,
    CorruptionError,
    ErrorKind,
    InvalidInputError,
    NotFoundError,
    OutcomeUnknownError,
    ReefError,
    UnavailableError,
)
from reef.formats.manifest import CursorEntry, Manifest
from reef.formats.schema import Schema
from reef.formats.wal_object import WalKind, WalObject
from reef.manifest.edits import is_retained, set_cursor
from reef.manifest.head import Edit, Publisher, locate
from reef.paths import Namespace
from reef.runtime import Runtime
from reef.stores import Store
from reef.stores.notify.base import Subscription, pause

RESTARTS_MAX = 10
POLL_S = 0.2
"""How often a following stream polls the log."""


@dataclass(frozen=True, slots=True)
class ChangeSlot:
    """A slot of the log, with its object if that applies."""

    lsn: int
    applied: WalObject | None
    """None for fences, void and skipped objects."""


class LogFollower:
    """Reads the log in order from an LSN. Not thread-safe."""

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
        """The generation from whose floor the log is replayed."""
        self._rules = LogRules(with_skipped(self.start, head))
        self._slots: Iterator[Scanned] = iter(())
        self._use_schemas(head)
        self._is_partial = False
        """Whether the rules started after `after_lsn`: they know no job that began before it."""
        self._ids_from = after_lsn + 1
        """If so, they have the write ids of the slots from here on."""
        self._skip_to_start()

    def more(self) -> list[ChangeSlot]:
        """Return the next slots, in order; an empty list at the end of the log."""
        while True:
            window = self._read() or self._list()
            if not window:
                return []
            first = self._complete_rules(window) if self._is_partial else window[0].lsn
            if not self._history.kept_slots(self.start, first):
                raise collected(self._names, max(window[0].lsn, self._after + 1))
            steps = [
                ChangeSlot(slot.lsn, slot.object if slot.verdict is Verdict.APPLIES else None)
                for slot in replay(self._rules, window)
            ]
            # Objects up to the start of the stream only set up the state of the rules.
            if steps[-1].lsn > self._after:
                return [step for step in steps if step.lsn > self._after]

    def probe(self) -> bool:
        """Return whether there are more slots: two requests, no listing."""
        lsn = self._rules.next_lsn
        return self._history.log.read(lsn) is not None or self._head().wal_floor > lsn

    def check_reached(self) -> None:
        """Raise if the log ends before the LSN where the stream begins."""
        check_reached(self._history, self._head(), self._after)

    def schema_for(self, step: ChangeSlot) -> Schema:
        """Return the newest schema, which is at least as new as that of the slot."""
        if step.applied is not None and not self._knows(step.applied):
            self._head()
            if not self._knows(step.applied):
                raise CorruptionError(
                    f"LSN {step.lsn} was written with schema {step.applied.header.schema_id}, "
                    f"which is in no manifest",
                    object=self._names.wal_object(step.lsn),
                    offset=0,
                )
        return self.schema

    def batches(self, step: ChangeSlot, schema: Schema) -> Iterator[pa.RecordBatch]:
        """Yield the change rows of a slot, with the columns of a schema."""
        if step.applied is None:
            return
        schemas = {0: schema, **self._schemas}
        try:
            yield from change_batches(
                step.applied, schemas, schema, self._segments, self._state_before
            )
        except NotFoundError as error:  # a segment of an ingest: compacted, and swept
            raise collected(self._names, step.lsn) from error

    # --- inside -------------------------------------------------------------------
    def _state_before(self, lsn: int) -> View:
        """Return the state just before an LSN that was read."""
        for _ in range(RESTARTS_MAX):
            head = self._head()
            try:
                try:
                    start = self._history.start_of_log(head, lsn - 1)
                except NotFoundError:  # only the generation that a cursor pins is left
                    start = self.start
                view = state_before(self._history, start, head, lsn)
                if self._history.kept_slots(start, start.wal_floor):
                    return view
                raise collected(self._names, lsn)
            except ConcurrentSweep:
                self._history.heads.forget()
        raise UnavailableError(f"{self._names.name} is swept faster than it can be read")

    def _begin(self, start: Manifest | None) -> tuple[Manifest, Manifest]:
        for _ in range(RESTARTS_MAX):
            head = self._history.head()
            try:
                return start or self._history.start_of_changes(head, self._after), head
            except ConcurrentSweep:
                self._history.heads.forget()
        raise UnavailableError(f"{self._names.name} is swept faster than it can be read")

    def _skip_to_start(self) -> None:
        """Start the rules behind `after_lsn`, if that saves reading much of the log.

        A `batches` object counts by the write ids of the slots just before it, so the slots from
        the floor up to `after_lsn` need not be read. The slot at `after_lsn` must be filled and
        all before it, since nothing behind a gap counts.
        """
        if self._after - self._rules.next_lsn >= IDS_KEPT and self._is_contiguous_to(self._after):
            self._rules.jump(self._after + 1)
            self._is_partial = True

    def _is_contiguous_to(self, lsn: int) -> bool:
        """Whether all slots up to `lsn` are filled: by its `after`, or by a listing."""
        log = self._history.log
        try:
            found = None if lsn in self._rules.skipped else log.read(lsn)
        except CorruptionError:
            found = None
        if found is not None and found.header.after:
            # Its writer had seen the first of these slots durable, and all slots before that one.
            between = range(lsn - len(found.header.after) + 1, lsn)
            return None not in log.read_many(list(between))
        first = self._rules.next_lsn
        filled = [slot.lsn for slot in log.filled(first)]
        return lsn in contiguous([*filled, *self._rules.skipped], first)

    def _complete_rules(self, window: list[Scanned]) -> int:
        """Read the slots that a window depends on and that were skipped; return the first LSN."""
        headers = [slot.object.header for slot in window if slot.object is not None]
        if any(header.kind is WalKind.INGEST for header in headers):
            self._replay_skipped(window[0].lsn)
            return self.start.wal_floor
        expected = [header.lsn - len(header.after) for header in headers if header.after]
        lowest = max(min(expected, default=self._ids_from), self.start.wal_floor)
        slots = [n for n in range(lowest, self._ids_from) if n not in self._rules.skipped]
        for lsn, found in zip(slots, self._history.log.read_many(slots), strict=True):
            if found is None:
                raise collected(self._names, lsn)
            self._rules.add_ids({lsn: found.header.write_id})
        self._ids_from = min(lowest, self._ids_from)
        return min([*slots[:1], window[0].lsn])

    def _replay_skipped(self, end: int) -> None:
        """Replay the log from the floor: a load counts by its job, which may have begun there."""
        rules = LogRules(with_skipped(self.start, self._head()))
        try:
            run_replay(self._history.log.replay(rules, end))
        except SlotGone as gone:
            raise collected(self._names, gone.lsn) from gone
        self._rules, self._is_partial = rules, False

    def _use_schemas(self, head: Manifest) -> None:
        if head.wal_base != self.start.wal_base:
            raise earlier_incarnation(self._names, head)
        self._schemas = {schema.id: schema for schema in head.schemas}
        self.schema: Schema = head.schema

    def _knows(self, found: WalObject) -> bool:
        return found.header.schema_id in (0, *self._schemas)

    def _head(self) -> Manifest:
        head = self._history.head()
        self._use_schemas(head)
        return head

    def _list(self) -> list[Scanned]:
        """List the log from the next LSN; raise if that was swept (H44)."""
        first = self._rules.next_lsn
        self._slots = self._history.log.scan(first, self._rules.skipped)
        window = self._read()
        if window or self._head().wal_floor <= first:
            return window
        # A fold has passed this LSN: it was swept, or written and folded since the listing.
        self._slots = self._history.log.scan(first, self._rules.skipped)
        window = self._read()
        if not window:
            raise collected(self._names, first)
        return window

    def _read(self) -> list[Scanned]:
        """Read the next of the listed slots; stop before one that was swept since."""
        window: list[Scanned] = []
        try:
            for slot in islice(self._slots, READ_AT_ONCE):
                window.append(slot)
        except SlotGone as gone:
            self._slots = iter(())
            if not window:
                raise collected(self._names, gone.lsn) from gone
        return window


class Changes:
    """An iterator over changes. It stops at the end of the log, and can be resumed later.

    With `follow` it waits there for more, at most `timeout_s` at a time. After an error the
    stream has ended and raises the same error again; start another one after its position. The
    same holds after an interrupt in the middle of a slot. An interrupt during a wait ends nothing.
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
        subscription: Subscription | None = None,
        calm_s: float = POLL_S,
    ) -> None:
        self.position = after_lsn
        """The last LSN whose changes were all yielded: the position to resume from."""
        self._follower = follower
        self._runtime = runtime
        self.follow(follow, timeout_s)
        self._check = check
        self._subscription = subscription
        self._calm_s = calm_s
        self._steps: deque[ChangeSlot] = deque()
        self._rows: Iterator[Change] = iter(())
        self._reading: int = after_lsn
        self._error: ReefError | None = None
        self._is_waiting = False
        """Whether the stream waits for the log, so that an interrupt loses no change."""

    def follow(self, follow: bool, timeout_s: float | None = None) -> Self:
        """Set whether to wait for more at the end of the log."""
        if timeout_s is not None and not follow:
            raise InvalidInputError(
                "timeout_s= requires follow=True",
                kind=ErrorKind.INVALID_OPTION,
                hint="Pass follow=True, or omit timeout_s",
            )
        self._follow = follow
        self._timeout_s = timeout_s
        return self

    def has_more(self) -> bool:
        """Return whether more was written since the end was reached: two requests, no listing."""
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
                self._error = self._interrupted_error(error)
            raise
        if change is None:
            raise StopIteration
        return change

    def __repr__(self) -> str:
        return f"<Changes of {self._follower.namespace}, after LSN {self.position}>"

    def _interrupted_error(self, error: BaseException) -> UnavailableError:
        """Return the error of a stream that lost the rest of a slot to an interrupt (H44)."""
        return UnavailableError(
            f"this stream of {self._follower.namespace} was interrupted after LSN "
            f"{self.position}: {error!r}",
            hint="Start another stream after that LSN",
            lsn=self.position,
        )

    def _next_step(self) -> bool:
        """Advance to the next slot; return False at the end of the log."""
        if not self._steps:
            self._steps.extend(self._follower.more() or self._wait())
        if not self._steps:
            return False
        step = self._steps.popleft()
        self._rows = self._changes(step)
        self._reading = step.lsn
        return True

    def _changes(self, step: ChangeSlot) -> Iterator[Change]:
        schema = self._follower.schema_for(step)
        for batch in self._follower.batches(step, schema):
            yield from changes_of(batch, schema)

    def _wait(self) -> list[ChangeSlot]:
        """Wait for more if following; return nothing if the timeout passed first."""
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
            pause(self._runtime, self._subscription, min(POLL_S, left_s), min(self._calm_s, left_s))
            self._check()
        self._is_waiting = False
        return self._follower.more()

    def _probe(self) -> bool:
        if self._subscription is not None:
            self._subscription.clear()  # before the probe: a later commit signals it again
        return self._follower.probe()


def changes_arrow(follower: LogFollower, upto_lsn: int) -> pa.RecordBatchReader:
    """Return the changes up to an LSN, which must be in the log, as a stream of Arrow batches."""
    # A stream has one schema: the newest one when it is opened.
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
    """Raise InvalidInputError if the log ends before an LSN: changes up to it would be missed."""
    if after_lsn <= max(head.wal_floor - 1, head.wal_id_last_seen):
        return
    end = history.end_of_log(head)
    if after_lsn > end:
        raise InvalidInputError(
            f"after_lsn={after_lsn} is past the end of the log; the last LSN is {end}",
            kind=ErrorKind.INVALID_OPTION,
            hint=f"Start after LSN {end} at the latest",
            last_lsn=end,
        )


def check_lsn(lsn: Any, name: str) -> int:
    """Return `lsn` if it is one, or raise InvalidInputError."""
    if isinstance(lsn, bool) or not isinstance(lsn, int) or lsn < 0:
        raise InvalidInputError(f"{name}={lsn!r} is not an LSN", kind=ErrorKind.INVALID_OPTION)
    return lsn


NAME_LENGTH_MAX = 128


class ChangeCursor:
    """A named position in the log. For one process at a time."""

    def __init__(
        self,
        store: Store,
        namespace: Namespace,
        name: str,
        segments: SegmentStore,
        publisher: Publisher,
    ) -> None:
        self.namespace = namespace.name
        self.name = name
        self._store = store
        self._names = namespace
        self._segments = segments
        self._publisher = publisher
        self._closed = False
        entry = self._entry()
        self.committed = entry.lsn
        """The committed position, from which another process would resume."""
        self._unconfirmed: set[int] = set()
        """Positions whose commit has an unknown outcome."""
        start = publisher.heads.load(entry.generation)
        self._follower = LogFollower(store, namespace, segments, entry.lsn, start)
        self._changes = self._stream(entry.lsn)

    @property
    def position(self) -> int:
        """The last LSN whose changes were all yielded."""
        return self._changes.position

    def __iter__(self) -> Changes:
        """Yield the changes up to the end of the log; iterate again for newer ones."""
        return self._changes.follow(False)

    def follow(self, timeout_s: float | None = None) -> Changes:
        """Yield changes as they are committed; stop after `timeout_s` without one."""
        return self._changes.follow(True, timeout_s)

    def commit(self, upto_lsn: int | None = None) -> int:
        """Publish the position, so that the next process resumes here and the sweep may continue.

        With `upto_lsn`, publish that position instead: for consumers that have not processed
        everything they have read.
        """
        self._check()
        position, before = self.position, self.committed
        if upto_lsn is not None:
            position = check_upto(upto_lsn, before, position)
        if position == before:
            return before
        head = self._publisher.heads.find().manifest
        entry = head.cursors.get(self.name)
        if entry is not None and entry.lsn in self._unconfirmed:
            before = entry.lsn  # our own commit, whose response was lost
        start = self._start(head, position)
        try:
            self._publisher.publish(
                lambda head: set_cursor(head, self.name, position, before, start)
            )
        except OutcomeUnknownError:
            self._unconfirmed.add(position)
            raise
        self._unconfirmed.clear()
        self.committed = position
        return position

    def close(self) -> None:
        """Stop reading. The cursor stays registered at its committed position."""
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        where = f"at LSN {self.position}, committed up to {self.committed}"
        return f"<ChangeCursor {self.name!r} of {self.namespace}, {where}>"

    def __reduce__(self) -> NoReturn:
        raise InvalidInputError(
            "a ChangeCursor cannot be pickled",
            kind=ErrorKind.NOT_PICKLABLE,
            hint="Open it by name in the other process, after closing it here",
        )

    # --- inside -------------------------------------------------------------------
    def _entry(self) -> CursorEntry:
        entry = self._publisher.heads.find().manifest.cursors.get(self.name)
        if entry is None:
            raise NotFoundError(f"{self.namespace} has no cursor {self.name!r}", cursor=self.name)
        return entry

    def _stream(self, after_lsn: int) -> Changes:
        return Changes(self._follower, after_lsn, self._store.runtime, check=self._check)

    def _start(self, head: Manifest, position: int) -> Manifest:
        """Return the generation to resume from; folds may have passed the cursor."""
        history = History(self._store, self._names, self._segments)
        try:
            return history.start_of_log(head, position)
        except (ConcurrentSweep, NotFoundError):  # only the cursor's own generation is retained
            return self._follower.start

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"the cursor {self.name!r} is closed", hint="Open it again")


def check_upto(upto_lsn: int, committed: int, position: int) -> int:
    """Return a position to commit: neither before the committed one nor past the last one read."""
    if not committed <= check_lsn(upto_lsn, "upto_lsn") <= position:
        raise InvalidInputError(
            f"upto_lsn={upto_lsn} is not between the committed position {committed} "
            f"and the read position {position}",
            kind=ErrorKind.INVALID_OPTION,
        )
    return upto_lsn


def register_cursor(
    store: Store,
    namespace: Namespace,
    name: str,
    after_lsn: int | None,
    *,
    segments: SegmentStore,
    publisher: Publisher,
) -> None:
    """Register a cursor unless it exists: after an LSN, or at the end of the log."""
    check_cursor_name(name)
    for _ in range(RESTARTS_MAX):
        head = publisher.heads.find().manifest
        if name in head.cursors:
            return
        history = History(store, namespace, segments)
        lsn = history.end_of_log(head) if after_lsn is None else after_lsn
        if after_lsn is not None:
            check_reached(history, head, after_lsn)
        try:
            start = history.start_of_changes(head, lsn)
        except ConcurrentSweep:
            continue
        if name in publisher.publish(_registering(name, lsn, start)).cursors:
            return
    raise UnavailableError(f"{namespace.name} is swept faster than a cursor can be registered")


def cursor_lags(store: Store, namespace: str) -> dict[str, tuple[int, int]]:
    """Return the registered cursors: the committed LSN, and how many LSNs are behind it."""
    heads = locate(store, namespace)
    history = History(store, heads.names, SegmentStore(store, heads.names, ByteCache(0)), heads)
    head = heads.found.manifest
    last = history.end_of_log(head)
    return {n: (entry.lsn, last - entry.lsn) for n, entry in sorted(head.cursors.items())}


def move_cursor(
    store: Store,
    namespace: Namespace,
    name: str,
    lsn: int,
    *,
    segments: SegmentStore,
    publisher: Publisher,
) -> None:
    """Move a cursor forward to an LSN; register it again if it was dropped.

    For consumers that keep their position elsewhere: the cursor only holds the sweep back.
    """
    head = publisher.heads.find().manifest
    known = head.cursors.get(name)
    if known is not None and known.lsn >= lsn:
        return
    try:
        start = History(store, namespace, segments).start_of_log(head, lsn)
    except (ConcurrentSweep, NotFoundError):  # only the cursor's own generation is retained
        if known is None:
            raise
        start = publisher.heads.load(known.generation)

    def edit(head: Manifest) -> Manifest | None:
        known = head.cursors.get(name)
        if known is not None and known.lsn >= lsn:
            return None
        return set_cursor(head, name, lsn, None if known is None else known.lsn, start)

    publisher.publish(edit)


def _registering(name: str, lsn: int, start: Manifest) -> Edit:
    def edit(head: Manifest) -> Manifest | None:
        """None if the cursor exists, or if the log that it needs is no longer retained."""
        kept = head.wal_floor <= lsn + 1 or is_retained(head, start)
        if name in head.cursors or not kept:
            return None
        return set_cursor(head, name, lsn, None, start)

    return edit


def check_cursor_name(name: object) -> None:
    """Raise InvalidInputError unless a cursor can have this name."""
    if not isinstance(name, str) or not 1 <= len(name) <= NAME_LENGTH_MAX or not name.isprintable():
        raise InvalidInputError(
            f"{name!r} is not a valid name of a cursor",
            kind=ErrorKind.INVALID_OPTION,
            hint=f"1 to {NAME_LENGTH_MAX} printable characters",
        )
