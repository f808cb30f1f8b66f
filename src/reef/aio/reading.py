"""Readers for asyncio: rows that are at hand come from the loop, the others from a thread."""

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Any, TypeVar

import pyarrow as pa

from reef.aio.handle import Handle, Opening, hop, pieces
from reef.aio.views import Changes
from reef.engine import readable, reader
from reef.engine.history import pinned
from reef.engine.reading.row_cache import MISSING
from reef.errors import CorruptionError

__all__ = ["PinnedReader", "Readable", "Reader"]

R_co = TypeVar("R_co", bound=readable.Readable, covariant=True)
POLL_S = 0.05
"""How often a reader looks for an LSN that it waits for."""


class Readable(Handle[R_co]):
    """What can be read by key, by range, and as Arrow."""

    @property
    def namespace(self) -> str:
        return self._sync.namespace

    async def get(self, key: bytes | str, columns: Sequence[str] | None = None) -> Any:
        """Return a key's value or row; None if it has none. From the loop, if it is at hand."""
        row = self._sync.at_hand(key) if columns is None else MISSING
        if row is not MISSING:
            return row
        return await self._run(lambda: self._sync.get(key, columns))

    async def schema(self) -> pa.Schema:
        """Return the columns, the key's first."""
        return await self._run(lambda: self._sync.schema)

    get_many = hop(readable.Readable.get_many)
    scan = pieces(readable.Readable.scan)
    scan_arrow = pieces(readable.Readable.scan_arrow, 1)


class Reader(Readable[reader.Reader]):
    """A handle that reads one namespace."""

    @property
    def last_lsn(self) -> int:
        """The newest LSN that this reader has seen."""
        return self._sync.last_lsn

    @property
    def damage(self) -> CorruptionError | None:
        """What keeps the reader from seeing all there is, if anything does."""
        return self._sync.damage

    refresh = hop(reader.Reader.refresh)
    changes_arrow = pieces(reader.Reader.changes_arrow, 1)

    async def wait_for(self, lsn: int, timeout_s: float = 30.0) -> bool:
        """Wait until an LSN is visible; False if `timeout_s` passed first."""
        deadline = self._threads.runtime.deadline(timeout_s)
        while not await self._run(lambda: self._sync.wait_for(lsn, 0.0)):
            if deadline.passed():
                return False
            await asyncio.sleep(min(POLL_S, deadline.remaining_s()))
        return True

    def as_of(
        self,
        *,
        generation: int | None = None,
        lsn: int | None = None,
        time: datetime | None = None,
        pin: bool = False,
    ) -> "Opening[PinnedReader]":
        """Return a view of one past moment, which never changes."""
        return Opening(
            self._threads,
            lambda: self._sync.as_of(generation=generation, lsn=lsn, time=time, pin=pin),
            PinnedReader,
        )

    def changes(
        self, after_lsn: int = 0, *, follow: bool = False, timeout_s: float | None = None
    ) -> Changes:
        """Yield what was committed after an LSN, in order, up to the end of the log.

        With `follow` it waits there for more, at most `timeout_s` at a time.
        """
        return Changes(
            self,
            lambda: self._sync.changes(after_lsn, follow=follow, timeout_s=timeout_s),
            after_lsn,
            follow=follow,
            timeout_s=timeout_s,
        )


class PinnedReader(Readable[pinned.PinnedReader]):
    """A handle on one moment of a namespace."""

    @property
    def generation(self) -> int:
        """The generation that is read."""
        return self._sync.generation

    @property
    def last_lsn(self) -> int:
        """The last LSN that belongs to this moment."""
        return self._sync.last_lsn

    @property
    def pinned(self) -> bool:
        """Whether a lease keeps what it needs."""
        return self._sync.pinned
