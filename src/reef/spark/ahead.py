"""Reading ahead: the next groups of a task are fetched and decoded while Spark takes the last.

A scan says which reads come next (`expect`). As many of them as fit into a bound of bytes are
begun on threads, of all segments that the task merges, so that a task waits for the bucket
once, not at every read of every segment. A task that is stopped gives up what it has not used.
"""

from collections.abc import Iterable, Sequence
from types import TracebackType

from reef.engine.reading.cache import ByteCache
from reef.engine.reading.segments import SegmentStore
from reef.formats.manifest import SegmentEntry
from reef.formats.segment_tail import SegmentTail
from reef.formats.versions import Versions
from reef.paths import Namespace
from reef.runtime import Future
from reef.stores import Store

__all__ = ["AHEAD_BYTES", "KnownTails", "ReadAhead"]

AHEAD_BYTES = 16 << 20
"""As stored, of all segments of a task; decoded it is some three times as much."""
THREADS = 4

Read = tuple[str, tuple[int, ...]]


class KnownTails(SegmentStore):
    """Segments whose tails are known: groups are numbered as these have them, and no others.

    What is read is read once, so nothing is kept.
    """

    def __init__(self, store: Store, namespace: Namespace, tails: dict[str, SegmentTail]) -> None:
        super().__init__(store, namespace, ByteCache(0))
        self._tails = tails

    def tail(self, entry: SegmentEntry) -> SegmentTail:
        known = self._tails.get(entry.id)
        if known is None:
            known = self._tails[entry.id] = super().tail(entry)
        return known


class ReadAhead(KnownTails):
    """The same for one task, which reads each group once and in order."""

    def __init__(self, store: Store, namespace: Namespace, tails: dict[str, SegmentTail]) -> None:
        super().__init__(store, namespace, tails)
        self._coming: dict[Read, tuple[Future[Versions], int]] = {}
        self._pool = store.runtime.pool(THREADS, name="read ahead")
        self._left = AHEAD_BYTES

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._coming.clear()
        self._pool.close()

    def expect(
        self, entry: SegmentEntry, numbers: Sequence[int], columns: Iterable[int] | None = None
    ) -> None:
        """Begin a read that is asked for soon, if there is room."""
        read = (entry.id, tuple(numbers))
        size = self._bytes_of(entry, numbers)
        if read in self._coming or size > self._left:
            return
        self._left -= size
        rows = self._pool.submit(super().rows, entry, numbers, columns)
        self._coming[read] = rows, size

    def rows(
        self, entry: SegmentEntry, numbers: Sequence[int], columns: Iterable[int] | None = None
    ) -> Versions:
        """Return what was begun, or read it now."""
        coming = self._coming.pop((entry.id, tuple(numbers)), None)
        if coming is None:
            return super().rows(entry, numbers, columns)
        rows, size = coming
        self._left += size
        return rows.result()

    def _bytes_of(self, entry: SegmentEntry, numbers: Sequence[int]) -> int:
        """Return about how much is read: all columns, as this is only a bound."""
        index = self.tail(entry).index
        chosen = list(numbers)
        columns = sum(int(lengths[chosen].sum()) for lengths in index.column_blocks.values())
        return int(index.key_blocks[chosen].sum()) + columns
