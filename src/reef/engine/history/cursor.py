"""Registered cursors: readers of changes for whom the log is kept.

A cursor has a name and a position in the manifest. The sweep keeps the log from there on, and
the segments of the ingests in it, for as long as the cursor is registered: one that nobody
reads any more must be dropped. Reading moves nothing in the bucket; `commit` publishes how far
it came. Whoever opens the name again goes on from the last commit, so that every change is
seen at least once.
"""

from types import TracebackType
from typing import NoReturn, Self

from reef.engine.history.changes import Changes, LogFollower, check_lsn, check_reached
from reef.engine.history.moments import History, Moved
from reef.engine.reading.segments import SegmentStore
from reef.errors import (
    ClosedError,
    InvalidInputError,
    Kind,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
)
from reef.formats.manifest import CursorEntry, Manifest
from reef.manifest.publish import Edit, Publisher
from reef.manifest.snapshots import is_retained, set_cursor
from reef.paths import Namespace
from reef.stores import Store

__all__ = ["ChangeCursor", "check_upto", "register_cursor"]

NAME_LENGTH_MAX = 128
RESTARTS_MAX = 10


class ChangeCursor:
    """A place in the log that has a name. For one process at a time."""

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
        """The position from which another process would go on."""
        self._unanswered: set[int] = set()
        """Positions that were to be committed since, and may have been."""
        start = publisher.heads.load(entry.generation)
        self._follower = LogFollower(store, namespace, segments, entry.lsn, start)
        self._changes = self._stream(entry.lsn)

    @property
    def position(self) -> int:
        """The last LSN of which everything was handed out."""
        return self._changes.position

    def __iter__(self) -> Changes:
        """Yield what there is up to the end of the log; ask again for what came since."""
        return self._changes.follow(False)

    def follow(self, timeout_s: float | None = None) -> Changes:
        """Yield changes as they come; ends when nothing came for `timeout_s`."""
        return self._changes.follow(True, timeout_s)

    def commit(self, upto_lsn: int | None = None) -> int:
        """Let the next reader of this name go on from here, and the sweep take what is before.

        With `upto_lsn`, from there: for those who have not worked off all that they were given.
        """
        self._check()
        position, before = self.position, self.committed
        if upto_lsn is not None:
            position = check_upto(upto_lsn, before, position)
        if position == before:
            return before
        head = self._publisher.heads.find().manifest
        entry = head.cursors.get(self.name)
        if entry is not None and entry.lsn in self._unanswered:
            before = entry.lsn  # our own, whose answer was lost
        start = self._start(head, position)
        try:
            self._publisher.publish(
                lambda head: set_cursor(head, self.name, position, before, start)
            )
        except OutcomeUnknownError:
            self._unanswered.add(position)
            raise
        self._unanswered.clear()
        self.committed = position
        return position

    def close(self) -> None:
        """Stop reading. The cursor stays registered, where it was last committed."""
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        where = f"at LSN {self.position}, committed up to {self.committed}"
        return f"<ChangeCursor {self.name!r} of {self.namespace}, {where}>"

    def __reduce__(self) -> NoReturn:
        raise InvalidInputError(
            "a ChangeCursor cannot be pickled",
            kind=Kind.NOT_PICKLABLE,
            hint="Open it by its name in the other process, when this one is done with it",
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
        """Return the generation to go on from: a fold may have passed the cursor by far."""
        history = History(self._store, self._names, self._segments)
        try:
            return history.start_of_log(head, position)
        except (Moved, NotFoundError):  # none is kept but the one that the cursor has
            return self._follower.start

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"the cursor {self.name!r} is closed", hint="Open it again")


def check_upto(upto_lsn: int, committed: int, position: int) -> int:
    """Return up to where a cursor is to be committed: neither back nor past what was read."""
    if not committed <= check_lsn(upto_lsn, "upto_lsn") <= position:
        raise InvalidInputError(
            f"upto_lsn={upto_lsn} is not between {committed}, which is committed, "
            f"and {position}, up to which was read",
            kind=Kind.INVALID_OPTION,
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
    """Make a cursor unless there is one: after an LSN of the log, or at its end."""
    _check_name(name)
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
        except Moved:
            continue
        if name in publisher.publish(_registering(name, lsn, start)).cursors:
            return
    raise UnavailableError(f"{namespace.name} is swept faster than a cursor can be registered")


def _registering(name: str, lsn: int, start: Manifest) -> Edit:
    def edit(head: Manifest) -> Manifest | None:
        """None if there is one already, or if what it needs is not kept any more."""
        kept = head.wal_floor <= lsn + 1 or is_retained(head, start)
        if name in head.cursors or not kept:
            return None
        return set_cursor(head, name, lsn, None, start)

    return edit


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not 1 <= len(name) <= NAME_LENGTH_MAX or not name.isprintable():
        raise InvalidInputError(
            f"{name!r} is not the name of a cursor",
            kind=Kind.INVALID_OPTION,
            hint=f"1 to {NAME_LENGTH_MAX} printable characters",
        )
