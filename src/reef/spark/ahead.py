"""Reading ahead: the next groups of a task are fetched while the last are decoded and taken.

A scan says which reads come next (`expect`). As many of them as fit into a bound of bytes are
begun on threads, of all segments that the task merges, so that a task waits for the bucket
once, not at every read of every segment. Decoding stays with the task's own thread: Spark has
given every core a task, and threads of one process would only wait for each other. A task that
is stopped gives up what it has not used.
"""

from collections.abc import Iterable, Sequence
from types import TracebackType

from reef.engine.reading.cache import ByteCache
from reef.engine.reading.segments import SegmentStore
from reef.formats.coding import Buffer
from reef.formats.manifest import SegmentEntry
from reef.formats.segment_tail import SegmentTail
from reef.paths import Namespace
from reef.runtime import Future
from reef.stores import Store

__all__ = ["AHEAD_BYTES", "KnownTails", "ReadAhead"]

AHEAD_BYTES = 16 << 20
"""As stored, of all segments of a task."""
THREADS = 4

Read = tuple[str, tuple[tuple[int, int], ...]]


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

    reads_ahead = True

    def __init__(self, store: Store, namespace: Namespace, tails: dict[str, SegmentTail]) -> None:
        super().__init__(store, namespace, tails)
        self._coming: dict[Read, tuple[Future[Sequence[Buffer]], int]] = {}
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
        key, spans = self._spans(entry, numbers, columns)
        read = (key, tuple(spans))
        size = sum(end - start for start, end in spans)
        if read in self._coming or size > self._left:
            return
        self._left -= size
        self._coming[read] = self._pool.submit(self._store.get_ranges, key, spans), size

    def _read_ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> Sequence[Buffer]:
        """Return what was begun, or read it now."""
        coming = self._coming.pop((key, tuple(spans)), None)
        if coming is None:
            return super()._read_ranges(key, spans)
        fetched, size = coming
        self._left += size
        return fetched.result()
