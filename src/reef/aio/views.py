"""Views in time for asyncio: streams of changes, cursors and snapshots.

A stream fetches some changes ahead, but its position is that of what was handed out, so that a
cursor never commits what nobody has seen. Waiting for more is done in the loop: however many
streams follow a log, they hold no thread while there is nothing to read.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import datetime
from typing import Any, Self

from reef.aio.handle import Fetch, Handle, hop
from reef.engine.history import changes, cursor, snapshots
from reef.engine.history.change_rows import Change
from reef.errors import ReefError

__all__ = ["ChangeCursor", "Changes", "Snapshot"]

PIECE_CHANGES = 256
POLL_S = changes.POLL_S

Piece = tuple[list[tuple[int, Change]], int | None]
"""Changes, each with the position before it; and the position after all, at the log's end."""


class Changes(AsyncIterator[Change]):
    """Iterates over changes. It ends where the log ends, and can be asked again later."""

    def __init__(
        self,
        handle: Handle[Any],
        start: Callable[[], changes.Changes],
        after_lsn: int,
        *,
        follow: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        self.position = after_lsn
        """The last LSN of which everything was handed out: where to go on from."""
        self._handle = handle
        self._start = start
        self._source: changes.Changes | None = None
        self._follow, self._timeout_s = follow, timeout_s
        self._fetch = Fetch(handle, self._next_piece)
        self._piece: Iterator[tuple[int, Change]] = iter(())
        self._end: int | None = None

    def follow(self, follow: bool, timeout_s: float | None = None) -> Self:
        """Wait at the end of the log from now on, or do not."""
        self._follow, self._timeout_s = follow, timeout_s
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Change:
        while True:
            for position, change in self._piece:
                self.position = position
                return change
            if self._end is not None:
                self.position, self._end = self._end, None
                if not (self._follow and await self._wait()):
                    raise StopAsyncIteration
            fetched = await self._fetch.next()
            if fetched is not None:
                piece, self._end = fetched
                self._piece = iter(piece)

    def __repr__(self) -> str:
        return f"<aio.Changes after LSN {self.position}>"

    def _next_piece(self) -> Piece:
        """Read on, in a thread. An error waits until what is before it was handed out."""
        if self._source is None:
            self._source = self._start()
            self._source.follow(False)
        found: list[tuple[int, Change]] = []
        try:
            for change in self._source:
                found.append((self._source.position, change))
                if len(found) == PIECE_CHANGES:
                    return found, None
        except ReefError:  # the source gives it again
            if not found:
                raise
            return found, None
        return found, self._source.position

    async def _wait(self) -> bool:
        """Wait for more; False if none came in time."""
        runtime, timeout_s, source = self._handle._threads.runtime, self._timeout_s, self._source
        assert source is not None
        deadline = None if timeout_s is None else runtime.deadline(timeout_s)
        while not await self._handle._run(source.has_more):
            if deadline is not None and deadline.passed():
                return False
            await asyncio.sleep(POLL_S if deadline is None else min(POLL_S, deadline.remaining_s()))
        return True


class ChangeCursor(Handle[cursor.ChangeCursor]):
    """A place in the log that has a name. For one process at a time."""

    _stream: Changes | None = None

    @property
    def namespace(self) -> str:
        return self._sync.namespace

    @property
    def name(self) -> str:
        return self._sync.name

    @property
    def committed(self) -> int:
        """The position from which another process would go on."""
        return self._sync.committed

    @property
    def position(self) -> int:
        """The last LSN of which everything was handed out."""
        return self._sync.committed if self._stream is None else self._stream.position

    def __aiter__(self) -> Changes:
        """Yield what there is up to the end of the log; ask again for what came since."""
        return self._changes().follow(False)

    def follow(self, timeout_s: float | None = None) -> Changes:
        """Yield changes as they come; ends when nothing came for `timeout_s`."""
        return self._changes().follow(True, timeout_s)

    async def commit(self, upto_lsn: int | None = None) -> int:
        """Let the next reader of this name go on from here, and the sweep take what is before.

        With `upto_lsn`, from there: for those who have not worked off all that they were given.
        """
        position = self.position
        if upto_lsn is not None:  # what was fetched ahead was not given to anyone
            position = cursor.check_upto(upto_lsn, self.committed, position)
        return await self._run(lambda: self._sync.commit(position))

    def _changes(self) -> Changes:
        if self._stream is None:
            self._stream = Changes(self, lambda: iter(self._sync), self._sync.position)
        return self._stream


class Snapshot(Handle[snapshots.Snapshot]):
    """A pinned generation."""

    @property
    def namespace(self) -> str:
        return self._sync.namespace

    @property
    def id(self) -> str:
        return self._sync.id

    @property
    def name(self) -> str | None:
        return self._sync.name

    @property
    def generation(self) -> int:
        return self._sync.generation

    @property
    def expires_at(self) -> datetime | None:
        """When it ends, by the store's clock; None if it never does. As this handle knows it."""
        return self._sync.expires_at

    extend = hop(snapshots.Snapshot.extend)
    release = hop(snapshots.Snapshot.release)
