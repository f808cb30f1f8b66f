"""Footprints: which keys were written lately, for transactions to check their reads against.

While a transaction is open, every object that is applied leaves a footprint: its keys, its
deleted ranges, and for an ingest the key ranges of its segments. When the transaction commits,
it has a conflict if one of them, applied since it began, touches something that it read: a key,
or a range that it asked for, so that rows which were not there count too (H41).

Order is that of application, not of LSNs, since independent objects may be applied early.
Footprints are kept only while somebody needs them, and up to a bound; a transaction older than
that has to begin anew.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from reef.formats.batch import AnyOps, OneOp, OpKind
from reef.formats.manifest import SegmentEntry
from reef.runtime import leaf_lock
from reef.types import KeyRange

__all__ = ["Footprints", "Reads"]

KEY_BYTES = 60
"""About what a key in a footprint takes beside its own bytes."""


@dataclass(slots=True)
class Reads:
    """What a transaction has read: keys one by one, and ranges."""

    keys: set[bytes] = field(default_factory=set)
    ranges: list[KeyRange] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.keys) + len(self.ranges)


@dataclass(frozen=True, slots=True)
class _Footprint:
    keys: frozenset[bytes]
    ordered: Sequence[bytes]
    ranges: tuple[KeyRange, ...]
    bytes: int

    def touches(self, reads: Reads) -> bool:
        return (
            not reads.keys.isdisjoint(self.keys)
            or any(self._in(wanted) for wanted in reads.ranges)
            or any(_covers(written, reads) for written in self.ranges)
        )

    def _in(self, wanted: KeyRange) -> bool:
        """Whether one of the keys lies in a range."""
        place = bisect_left(self.ordered, wanted.start)
        if place == len(self.ordered):
            return False
        return wanted.end is None or self.ordered[place] < wanted.end


class Footprints:
    """The footprints of one writer, since its oldest open transaction began."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._lock = leaf_lock()
        self._kept: deque[_Footprint] = deque()
        self._first = 0
        """The number of the oldest one kept."""
        self._bytes = 0
        self._open: dict[int, int] = {}
        """From a transaction to the number of the first footprint that it has to mind."""
        self._next_transaction = 0
        self._dropped: deque[int] = deque()

    def begin(self) -> int:
        """Note that a transaction is open; return its number."""
        with self._lock:
            self._next_transaction += 1
            self._open[self._next_transaction] = self._first + len(self._kept)
            return self._next_transaction

    def end(self, transaction: int) -> None:
        with self._lock:
            self._open.pop(transaction, None)
            self._forget()

    def drop(self, transaction: int) -> None:
        """Note that nobody has a transaction any more. Called by the garbage collector, at any
        moment, perhaps while the lock is held here: so it takes none.
        """
        self._dropped.append(transaction)

    def conflict(self, transaction: int, reads: Reads) -> str | None:
        """Return why a transaction cannot commit; None if it can."""
        with self._lock:
            since = self._open.get(transaction, -1)  # of one that is over, nothing was kept
            if since < self._first:
                return "it is open for too long: more was written since than is remembered"
            new = list(self._kept)[since - self._first :]
        if any(footprint.touches(reads) for footprint in new):
            return "a row that it read was written since"
        return None

    def applying(
        self, batches: Sequence[AnyOps] = (), segments: Sequence[SegmentEntry] = ()
    ) -> None:
        """Note what is about to be written; of an ingest its key ranges, since its keys are
        not known.
        """
        if self._dropped:
            self._end_dropped()
        if self._open and batches:
            self._keep(_of_ops(batches))
        if self._open and segments:
            ranges = tuple(KeyRange(s.min_key, s.max_key + b"\0") for s in segments)
            self._keep(_Footprint(frozenset(), (), ranges, KEY_BYTES * len(ranges)))

    def applied(self) -> None:
        """Nothing more: what was noted counts from before it could be read."""

    def lost_track(self) -> None:
        """Note that something was applied that nobody can tell: all open ones are too old."""
        with self._lock:
            self._first += len(self._kept) + 1
            self._kept.clear()
            self._bytes = 0

    def _keep(self, footprint: _Footprint) -> None:
        with self._lock:
            self._kept.append(footprint)
            self._bytes += footprint.bytes
            while self._bytes > self._bytes_max:
                self._drop_oldest()

    def _end_dropped(self) -> None:
        with self._lock:
            while self._dropped:
                self._open.pop(self._dropped.popleft(), None)
            self._forget()

    def _forget(self) -> None:
        needed = min(self._open.values(), default=self._first + len(self._kept))
        while self._kept and self._first < needed:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._bytes -= self._kept.popleft().bytes
        self._first += 1


def _of_ops(batches: Sequence[AnyOps]) -> _Footprint:
    keys: set[bytes] = set()
    ranges: list[KeyRange] = []
    for ops in batches:
        listed = ops.key_list()
        if isinstance(ops, OneOp) or ops.end_keys is None:
            keys.update(listed)
            continue
        for kind, key, end in zip(
            ops.kinds.to_pylist(), listed, ops.end_keys.to_pylist(), strict=True
        ):
            if kind == OpKind.DELETE_RANGE:
                ranges.append(KeyRange(key, end))
            else:
                keys.add(key)
    size = sum(map(len, keys)) + KEY_BYTES * (len(keys) + len(ranges))
    return _Footprint(frozenset(keys), sorted(keys), tuple(ranges), size)


def _covers(written: KeyRange, reads: Reads) -> bool:
    """Whether a written range touches what was read."""
    return any(written.has(key) for key in reads.keys) or any(
        written.overlaps(wanted) for wanted in reads.ranges
    )
